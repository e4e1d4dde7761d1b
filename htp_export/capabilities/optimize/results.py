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
    """The changes of the nodes and weights of a module by a pass.

    Attributes:
        removed: Removed nodes.
        changed: Nodes that stayed and have other inputs or attributes, or replace other nodes, too.
        added: New nodes.
        saved_bytes: Bytes by which its weights shrank; negative if they grew.
    """

    removed: int = 0
    changed: int = 0
    added: int = 0
    saved_bytes: int = 0

    def __add__(self, other: Change) -> Change:
        return Change(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def saved(self) -> int:
        """The number of nodes that it has fewer.

        Examples:
            >>> (Change(removed=3, added=1) + Change(removed=1)).saved
            3
        """
        return self.removed - self.added


@dataclass(frozen=True)
class PassReport(PlainData):
    """The changes by one pass, in all rounds together.

    Attributes:
        name: The pass.
        level: Its effect on the results.
        modules: Module path → the changes of nodes and weights of the module itself. A node or
            weight of several modules counts once, at the deepest module above all of them; so the
            numbers of a pass add up to the whole.
        seconds: Its run time.
        fused: Modules that were exact before and are fused since → the modules that they are
            fused with.
        rolled_back: Why it was undone; empty if it was not.
        left: Nodes that its library cannot handle, and that are unchanged → why.
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
        """The changes of all modules together."""
        return sum(self.modules.values(), Change())

    def data(self) -> dict[str, Any]:
        """The fields of `to_dict`."""
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
        nodes_before: Number of nodes before, including nodes in subgraphs.
        nodes_after: Number of nodes after.
        passes: The passes that ran, in order.
        max_abs: The largest absolute difference of any output, with ``verify``; None without.
        nan: Outputs that have NaN with and without the passes, with ``verify``: the differences of
            these elements are unknown.
        model: The optimized model.
    """

    nodes_before: int
    nodes_after: int
    passes: tuple[PassReport, ...]
    max_abs: float | None = None
    nan: tuple[str, ...] = ()
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def attribution(self) -> dict[str, Mapping[str, Change]]:
        """Pass → module path → the changes of the module itself; see `PassReport`."""
        return {report.name: report.modules for report in self.passes}

    @property
    def rolled_back(self) -> dict[str, str]:
        """Passes that were undone → why."""
        return {report.name: report.rolled_back for report in self.passes if report.rolled_back}

    @property
    def left(self) -> dict[str, str]:
        """Nodes that the library of a pass cannot handle, and that are unchanged → why."""
        return {name: why for report in self.passes for name, why in report.left.items()}

    @property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """Modules that were exact and are fused now → the modules they are fused with."""
        return {path: others for report in self.passes for path, others in report.fused.items()}

    def below(self, path: str) -> dict[str, Change]:
        """Pass → the changes of a module with its descendants.

        The root, ``""``, is the whole model.
        """
        by_pass: dict[str, Change] = {}
        for name, by_module in self.attribution.items():
            owners = [owner for owner in by_module if tags.is_under(owner, path)]
            by_pass[name] = sum((by_module[owner] for owner in owners), Change())
        return by_pass

    def at_depth(self, depth: int) -> dict[str, dict[str, Change]]:
        """Pass → module path → the changes of the module with its descendants, down to a depth.

        Depth 0 is the whole model. The changes of a module above that depth itself have their own
        line, so that the numbers add up.

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
        """Numbers of nodes before and after, and the largest difference of outputs if known."""
        text = f"{self.nodes_before} nodes before, {self.nodes_after} after"
        if self.max_abs is not None:
            text += f"; outputs differ by {self.max_abs:.3g} at most"
            if self.nan:
                listed = ", ".join(map(repr, self.nan))
                text += (
                    f"; of elements that are NaN before and after, in {listed}, nothing is known"
                )
        return text

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
"""The columns of a pass."""


@dataclass(frozen=True)
class OptimizedModels(Result):
    """The changes of several models by passes.

    Attributes:
        models: Name of a model → the result of `htp_export.optimize`.

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
        """Pass → model → the changes of the model; passes in the order of their first run."""
        by_pass: dict[str, dict[str, Change]] = {}
        for name, result in self.models.items():
            for report in result.passes:
                by_pass.setdefault(report.name, {})[name] = report.change
        return by_pass

    @property
    def total(self) -> dict[str, Change]:
        """Pass → the changes of all models together."""
        return {name: sum(changes.values(), Change()) for name, changes in self.attribution.items()}

    @property
    def summary(self) -> str:
        """The result in one line."""
        results = self.models.values()
        before = sum(result.nodes_before for result in results)
        after = sum(result.nodes_after for result in results)
        return f"{before} nodes before, {after} after, in {len(results)} models"

    def table(self) -> Table:
        """Columns and lines: the nodes that each pass saved in each model, and totals."""
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
