"""What optimising did, as data: by pass and module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx_ir as ir

from htp_export import tags
from htp_export.tag_facts import TagFacts, tag_lines
from htp_export.tagged import load

__all__ = ["Change", "Optimized", "PassReport"]


@dataclass(frozen=True)
class Change:
    """What a pass did to the nodes of a module.

    Attributes:
        removed: Nodes that are gone.
        added: Nodes that are new.
        merged: Nodes that stayed and do the work of others, too.
    """

    removed: int = 0
    added: int = 0
    merged: int = 0

    def __add__(self, other: Change) -> Change:
        return Change(self.removed + other.removed, self.added + other.added, self.merged + other.merged)

    @property
    def saved(self) -> int:
        """By how many nodes there are fewer.

        Example:
            >>> (Change(removed=3, added=1) + Change(removed=1)).saved
            3
        """
        return self.removed - self.added


@dataclass(frozen=True)
class PassReport:
    """What one pass did, all rounds together.

    Attributes:
        name: The pass.
        level: What it may do to the results.
        seconds: How long it took.
        change: Its nodes, over all modules.
        fused: Modules that were exact before and are fused since → the modules with which.
        rolled_back: Why its work was undone; empty where it was not.
    """

    name: str
    level: str
    seconds: float = 0.0
    change: Change = Change()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rolled_back: str = ""


@dataclass(frozen=True)
class Optimized:
    """What `htp_export.optimize` did.

    Attributes:
        nodes_before: Nodes of the model, in subgraphs too.
        nodes_after: Nodes that it has now.
        attribution: Pass → module path → what it did to nodes of the module itself. A node of several modules counts
            once, at the deepest module above all of them; so the numbers of a pass add up to the whole.
        passes: The passes that ran, in order.
        max_abs: The largest difference of any output, with ``verify``; None without.
        model: The optimised model.
    """

    nodes_before: int
    nodes_after: int
    attribution: Mapping[str, Mapping[str, Change]]
    passes: tuple[PassReport, ...]
    max_abs: float | None = None
    model: ir.Model = field(repr=False, kw_only=True)

    @cached_property
    def tags(self) -> TagFacts:
        """What the optimised model knows about its module tags."""
        return load(self.model).tag_facts

    @property
    def rolled_back(self) -> dict[str, str]:
        """Passes whose work was undone → why."""
        return {report.name: report.rolled_back for report in self.passes if report.rolled_back}

    @property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """Modules that were exact and are fused now → the modules with which."""
        return {path: others for report in self.passes for path, others in report.fused.items()}

    def below(self, path: str) -> dict[str, Change]:
        """What each pass did to nodes of a module and of everything below it.

        Args:
            path: The module; the root for the whole model.
        """
        return {
            name: sum((change for owner, change in found.items() if tags.is_under(owner, path)), Change())
            for name, found in self.attribution.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model, as JSON has it."""
        return {
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "max_abs": self.max_abs,
            "tags": self.tags.to_dict(),
            "passes": [
                {
                    "name": report.name,
                    "level": report.level,
                    "seconds": round(report.seconds, 4),
                    "removed": report.change.removed,
                    "added": report.change.added,
                    "merged": report.change.merged,
                    "fused": {path: list(others) for path, others in report.fused.items()},
                    "rolled_back": report.rolled_back,
                    "modules": {path: vars(change) for path, change in self.attribution.get(report.name, {}).items()},
                }
                for report in self.passes
            ],
        }

    def __str__(self) -> str:
        lines = [f"{'pass':34} {'removed':>8} {'added':>6} {'merged':>7}"]
        for report in self.passes:
            change = report.change
            note = f"  rolled back: {report.rolled_back}" if report.rolled_back else ""
            lines.append(f"{report.name:34} {change.removed:>8} {change.added:>6} {change.merged:>7}{note}")
        lines.append(f"{self.nodes_before} nodes before, {self.nodes_after} after")
        return "\n".join((*lines, *tag_lines(self.tags)))
