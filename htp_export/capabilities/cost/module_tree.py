"""The module tree of a file, with what each module came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from htp_export.capabilities.cost.columns import TREE_COLUMNS
from htp_export.capabilities.cost.result import Cost
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import ModuleFacts, contents_of, visible
from htp_export.model.tagged import TaggedModel
from htp_export.results.columns import Column, chosen
from htp_export.results.tables import ModuleTable
from htp_export.results.tag_facts import TagFacts


@dataclass(frozen=True, kw_only=True)
class ModuleRow(ModuleFacts):
    """One module of the tree: its facts, and what was measured.

    Attributes:
        flops: Two for each multiply-add of matrix products and convolutions, where sizes are known.
        time_ms: How long it takes, with all below it, where that was measured.
        own_time_ms: Of that, its own nodes.
        error: How far it is from PyTorch, or from another file, at most, where that was measured.
        status: What is wrong with it; empty where nothing is, or it was not checked.
    """

    flops: int | None = None
    time_ms: float | None = None
    own_time_ms: float | None = None
    error: float | None = None
    status: str | None = None

    @property
    def own_nodes(self) -> int:
        """Nodes that it computes itself, and no module below it."""
        return self.self_nodes


_DRAWN = ("class_name", "calls", "fate", "nodes", "own_nodes", "parameters")


@dataclass(frozen=True)
class ModuleTree(ModuleTable):
    """The rows of a module tree, in the order of ``named_modules()``.

    Attributes:
        rows: One for each module shown.
        tags: What the model knows about its module tags.
        notes: What to know about the rows.
    """

    columns = TREE_COLUMNS
    optional = ("notes",)

    rows: tuple[ModuleRow, ...] = field(repr=False)
    tags: TagFacts | None = None
    notes: tuple[str, ...] = ()

    def module_data(self, row: ModuleRow) -> dict[str, Any]:
        """What is known of a module.

        Examples:
            >>> ModuleTree((ModuleRow("", "net.Net", 1, "computed", nodes=3),)).to_dict()["modules"][""]["nodes"]
            3
        """
        return {name: value for name, value in super().module_data(row).items() if value is not None}

    @property
    def drawn(self) -> Sequence[Column[ModuleRow]]:
        """The columns of the table as text."""
        return chosen(self.columns, _DRAWN)

    @property
    def by_module(self) -> Mapping[str, ModuleRow]:
        """Module path → its row."""
        return {row.path: row for row in self.rows}

    @property
    def summary(self) -> str:
        """How much the whole is, where its row is among them."""
        root = self.by_module.get("")
        size = f", {root.nodes:,} nodes, {root.parameters:,} parameters" if root is not None else ""
        return f"{len(self.rows):,} modules{size}"


@names_model_faults("tagged")
def tree_rows(
    tagged: TaggedModel,
    depth: int | None = None,
    select: str | Sequence[str] | None = None,
    *,
    cost: Cost | None = None,
    measured: Mapping[str, Mapping[str, Any]] | None = None,
) -> ModuleTree:
    """What each of the ``visible`` modules of a model came to.

    FLOPs are those of its cost. What was ``measured`` is module path → attribute of ``ModuleRow`` → value.
    """
    contents = contents_of(tagged).modules
    rows = tuple(
        ModuleRow(
            **vars(contents[path].facts),
            flops=None if cost is None else cost.modules[path].flops,
            **(measured or {}).get(path, {}),
        )
        for path in visible(tagged, depth, select)
    )
    return ModuleTree(rows, tagged.tag_facts, cost.assumed if cost is not None else ())
