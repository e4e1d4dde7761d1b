"""Results of ``optimize``: changes by pass and module."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.tagged import TaggedResult
from htp_export.reporting.columns import Column, si, text_table
from htp_export.reporting.result import PlainData, Result, Table


@dataclass(frozen=True)
class Change:
    """What a pass did to the nodes and weights of a module.

    Attributes:
        removed: Nodes that are gone.
        changed: Nodes that stayed, and read other tensors, have other attributes, or do the work of
            others, too.
        added: Nodes that are new.
        saved_bytes: By how many bytes its weights are fewer; negative where they are more.
    """

    removed: int = 0
    changed: int = 0
    added: int = 0
    saved_bytes: int = 0

    def __add__(self, other: Change) -> Change:
        return Change(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def saved(self) -> int:
        """By how many nodes there are fewer.

        Examples:
            >>> (Change(removed=3, added=1) + Change(removed=1)).saved
            3
        """
        return self.removed - self.added


@dataclass(frozen=True)
class PassReport(PlainData):
    """What one pass did, all rounds together.

    Attributes:
        name: The pass.
        level: What it may do to the results.
        modules: Module path → what it did to nodes and weights of the module itself. A node of
            several modules, and a weight that several modules read, counts once, at the deepest
            module above all of them; so the numbers of a pass add up to the whole.
        seconds: How long it took.
        fused: Modules that were exact before and are fused since → the modules with which.
        rolled_back: Why its work was undone; empty where it was not.
        left: Nodes that the library that does its work cannot handle, and that stay as they are →
            why.
    """

    name: str
    level: str
    modules: Mapping[str, Change] = field(default_factory=dict, repr=False)
    seconds: float = 0.0
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rolled_back: str = ""
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def change(self) -> Change:
        """What it did, over all modules."""
        return sum(self.modules.values(), Change())

    def data(self) -> dict[str, Any]:
        """What `to_dict` has."""
        return {
            **super().data(),
            "seconds": round(self.seconds, 4),
            **vars(self.change),
            "modules": self.modules,
        }


@dataclass(frozen=True)
class Optimized(TaggedResult):
    """The result of `htp_export.optimize`.

    Attributes:
        nodes_before: Number of nodes before, including those in subgraphs.
        nodes_after: Number of nodes after.
        passes: The passes that ran, in order.
        max_abs: The largest absolute difference of any output, with ``verify``; None without.
        nan: Outputs that have NaN with and without the passes, with ``verify``: of these elements
            nothing is known.
        model: The optimised model.
    """

    nodes_before: int
    nodes_after: int
    passes: tuple[PassReport, ...]
    max_abs: float | None = None
    nan: tuple[str, ...] = ()
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def attribution(self) -> dict[str, Mapping[str, Change]]:
        """Pass → module path → what the pass did to the module itself; see `PassReport`."""
        return {report.name: report.modules for report in self.passes}

    @property
    def rolled_back(self) -> dict[str, str]:
        """Passes whose work was undone → why."""
        return {report.name: report.rolled_back for report in self.passes if report.rolled_back}

    @property
    def left(self) -> dict[str, str]:
        """Nodes that the library behind a pass cannot handle, and that the pass left as they are → why."""
        return {name: why for report in self.passes for name, why in report.left.items()}

    @property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """Modules that were exact and are fused now → the modules with which."""
        return {path: others for report in self.passes for path, others in report.fused.items()}

    def below(self, path: str) -> dict[str, Change]:
        """What each pass did to a module and everything below it; to the whole model for the root, ``""``."""
        return {
            name: sum(
                (change for owner, change in by_module.items() if tags.is_under(owner, path)),
                Change(),
            )
            for name, by_module in self.attribution.items()
        }

    def at_depth(self, depth: int) -> dict[str, dict[str, Change]]:
        """Pass → module path → what the pass did to the module and everything below it, down to a depth; 0: the whole.

        What it did to a module above that depth itself has a line of its own, so that the numbers
        add up.

        Raises:
            InputError: If the depth is negative.
        """
        if depth < 0:
            raise InputError(f"a depth is 0 or more, not {depth}")
        by_pass: dict[str, dict[str, Change]] = {}
        for name, changes in self.attribution.items():
            at = by_pass.setdefault(name, {})
            for path, change in changes.items():
                above = [*tags.ancestors(path)][::-1]  # the root first
                cut = above[min(depth, len(above) - 1)]
                at[cut] = at.get(cut, Change()) + change
        return by_pass

    @property
    def summary(self) -> str:
        """How many nodes there were and are, and how far the outputs moved where that was measured."""
        text = f"{self.nodes_before} nodes before, {self.nodes_after} after"
        if self.max_abs is None:
            return text
        text += f"; outputs differ by {self.max_abs:.3g} at most"
        nan = f"; of elements that are NaN before and after, in {', '.join(map(repr, self.nan))}, nothing is known"
        return text + (nan if self.nan else "")

    def table(self) -> Table:
        """The passes."""
        return PASS_COLUMNS, self.passes


PASS_COLUMNS: tuple[Column[PassReport], ...] = (
    Column("name", "pass", right=False),
    Column("removed", "removed", lambda report: report.change.removed),
    Column("changed", "changed", lambda report: report.change.changed),
    Column("added", "added", lambda report: report.change.added),
    Column("saved_bytes", "saved", lambda report: report.change.saved_bytes, "B"),
    Column(
        "rolled_back",
        "undone",
        lambda report: report.rolled_back or None,
        style="yellow",
        right=False,
    ),
)
"""What is known of each pass."""


@dataclass(frozen=True)
class OptimizedModels(Result):
    """What passes did to several models.

    Attributes:
        models: Name of a model → what `htp_export.optimize` did to it.

    Examples:
        >>> import onnx_ir as ir
        >>> model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 20}), ir_version=10)
        >>> one = Optimized(5, 3, (PassReport("fold_constants", "exact", {"": Change(3, 0, 1)}),), model=model)
        >>> both = OptimizedModels({"bert": one, "vit": one})
        >>> both.attribution["fold_constants"]["vit"].saved, both.total["fold_constants"].saved
        (2, 4)
        >>> print(both)
        nodes fewer by  bert  vit  all  saved
        fold_constants     2    2    4    0 B
        nodes before       5    5   10
        nodes after        3    3    6
    """

    derived = ("total",)

    models: Mapping[str, Optimized]

    @property
    def attribution(self) -> dict[str, dict[str, Change]]:
        """Pass → model → what the pass did to it; passes in the order in which they ran."""
        by_pass: dict[str, dict[str, Change]] = {}
        for name, result in self.models.items():
            for report in result.passes:
                by_pass.setdefault(report.name, {})[name] = report.change
        return by_pass

    @property
    def total(self) -> dict[str, Change]:
        """Pass → what it did to all models together."""
        return {name: sum(changes.values(), Change()) for name, changes in self.attribution.items()}

    @property
    def summary(self) -> str:
        """The result in one line."""
        results = self.models.values()
        nodes = (
            sum(result.nodes_before for result in results),
            sum(result.nodes_after for result in results),
        )
        return f"{nodes[0]} nodes before, {nodes[1]} after, in {len(results)} models"

    def table(self) -> Table:
        """Columns and lines: for each pass, the nodes that it saved in each model; then the nodes of each model."""
        lines: list[list[Any]] = []
        for name, total in self.total.items():
            if total != Change():
                saved = (self.attribution[name].get(model, Change()).saved for model in self.models)
                lines.append([name, *saved, total.saved, si(total.saved_bytes, "B")])
        for name in ("nodes_before", "nodes_after"):
            counts = [getattr(result, name) for result in self.models.values()]
            lines.append([name.replace("_", " "), *counts, sum(counts), ""])
        sums = lines[-2:]
        columns: list[Column[list[Any]]] = [
            Column(
                head,
                head,
                operator.itemgetter(k),
                text=str,
                style=lambda line: "bold" if line in sums else "",
                right=k > 0,
            )
            for k, head in enumerate(["nodes fewer by", *self.models, "all", "saved"])
        ]
        return columns, lines

    def __str__(self) -> str:
        return "\n".join(text_table(*self.table()))
