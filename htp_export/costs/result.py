"""What a model costs, by module and by node: the result of ``costing``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from htp_export.costs.columns import COST_COLUMNS, TREE_COLUMNS
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import ModuleFacts, contents_of, visible
from htp_export.model.tagged import TaggedModel
from htp_export.reporting.columns import Column, chosen
from htp_export.reporting.tables import ModuleTable
from htp_export.reporting.tag_facts import TagFacts

_DRAWN = ("class_name", "nodes", "parameters", "weight_bytes", "flops", "other_flops", "peak_bytes")


@dataclass(frozen=True)
class NodeCost:
    """One node, and all its runs together.

    Attributes:
        name: The node's name.
        op_type: Its operator.
        owners: The modules that it computes.
        times: How often it runs: more than once in a loop, not at all in a branch of an ``If`` that
            costs less.
        counted: Whether its work is known. If not, its ``macs``, ``flops`` and ``other_flops`` are
            0.
        macs: Multiply-adds of matrix products and convolutions, all runs together, as what follows.
        flops: Two for each of those.
        other_flops: Operations on single elements.
        shapes: Shape of each output; None where it is not known.
        activation_bytes: Size of what it makes.
        traffic_bytes: What it reads and writes, weights too.
        modules: The modules in whose regions it is.
    """

    name: str
    op_type: str
    owners: tuple[str, ...]
    times: int
    counted: bool
    macs: int
    flops: int
    other_flops: int
    shapes: tuple[tuple[int, ...] | None, ...]
    activation_bytes: int
    traffic_bytes: int
    modules: AbstractSet[str] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, kw_only=True)
class ModuleCost(ModuleFacts):
    """One module with all below it, and for ``self_…`` the same of it alone: its facts, and what it costs.

    A node of several modules counts once in the total of each module above them. For ``self_…`` it
    is divided between its owners, so that they add up to the whole.

    Attributes:
        macs: Multiply-adds of matrix products and convolutions, in attention and recurrent layers
            too.
        flops: Two for each multiply-add: what torch's ``FlopCounterMode`` counts.
        other_flops: Operations on single elements: activations, normalisation, softmax, reductions,
            additions.
        uncounted: Operator → nodes whose work is not known; it is in none of the numbers.
        activation_bytes: Size of all that its nodes make.
        traffic_bytes: What its nodes read and write, one after another: weights, inputs, outputs,
            intermediates.
        peak_bytes: The most activation memory that the whole model takes while one of its nodes
            runs.
        fused_traffic_bytes: ``traffic_bytes`` if its intermediates stayed on chip.
        fused_peak_bytes: The peak of the whole model if its intermediates stayed on chip.
    """

    macs: int = 0
    self_macs: int = 0
    flops: int = 0
    self_flops: int = 0
    other_flops: int = 0
    self_other_flops: int = 0
    uncounted: Mapping[str, int] = field(default_factory=dict)
    activation_bytes: int = 0
    self_activation_bytes: int = 0
    traffic_bytes: int = 0
    self_traffic_bytes: int = 0
    peak_bytes: int = 0
    fused_traffic_bytes: int = 0
    fused_peak_bytes: int = 0

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: all operations for each byte that is moved."""
        return (self.flops + self.other_flops) / self.traffic_bytes if self.traffic_bytes else 0.0

    @property
    def saved_traffic_bytes(self) -> int:
        """How much less it would read and write if its intermediates stayed on chip."""
        return self.traffic_bytes - self.fused_traffic_bytes


@dataclass(frozen=True)
class Peak:
    """Where activation memory is highest.

    Attributes:
        bytes: How much is live.
        node: The node that runs then, the first if there are several; "" for a model without nodes.
        modules: Its owners: the modules on top of the peak.
        live: The tensors in memory, ``(tensor, bytes)``, the largest first; what subgraphs hold is
            not listed.
    """

    bytes: int
    node: str
    modules: tuple[str, ...]
    live: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Cost(ModuleTable):
    """The result of `cost`.

    Attributes:
        modules: Module path → its cost, in the order of ``named_modules()``; ``""`` is the whole
            model.
        nodes: Every execution of a node, in order.
        uncounted: Operator → number of nodes without known work in the whole model: the operator
            has no formula, or a shape or the number of iterations of a loop is unknown.
        peak: The maximum of activation memory, and where it occurs.
        shared: Name of each parameter that belongs to several modules → these modules.
        dims: Name of an open dimension → the size that was used.
        from_pytorch: Whether ``parameters`` are those of PyTorch; otherwise they are the weights in
            the file.
        limits: What these numbers leave out, a line each.
        tags: The tags of the model: source, reasons, untagged nodes.
        assumed: A line for each open dimension whose size was not given, with the size that was
            used.
    """

    columns = COST_COLUMNS
    measure = "flops"
    details = ("weight_bytes_by_dtype", "uncounted")
    derived = ("notes",)

    modules: Mapping[str, ModuleCost]
    nodes: tuple[NodeCost, ...]
    uncounted: Mapping[str, int]
    peak: Peak
    shared: Mapping[str, tuple[str, ...]]
    dims: Mapping[str, int]
    from_pytorch: bool
    limits: tuple[str, ...] = field(default=(), repr=False)
    tags: TagFacts | None = None
    assumed: tuple[str, ...] = ()

    @property
    def drawn(self) -> Sequence[Column[ModuleCost]]:
        """The columns of the table as text."""
        return chosen(self.columns, _DRAWN)

    @property
    def summary(self) -> str:
        """The operations of the whole."""
        root = self.modules[""]
        products = f"{root.flops:,} FLOPs (2 for each multiply-add of matrix products)"
        return f"{products}, {root.other_flops:,} other operations"

    @property
    def notes(self) -> tuple[str, ...]:
        """What else is to be known of the whole, in words, a line each."""
        lines = []
        if self.peak.node:
            on_top = ", ".join(path or "(root)" for path in self.peak.modules) or "no module"
            lines.append(
                f"{self.peak.bytes:,} bytes of activations at the peak, at {self.peak.node!r} of {on_top}"
            )
        if self.uncounted:
            listed = ", ".join(f"{op} × {count}" for op, count in self.uncounted.items())  # noqa: RUF001 - "times"
            lines.append(f"not counted: {listed}")
        if self.shared:
            listed = ", ".join(
                f"{name} ({', '.join(paths)})" for name, paths in list(self.shared.items())[:3]
            )
            more = f" and {len(self.shared) - 3} more" if len(self.shared) > 3 else ""
            how = "tied" if self.from_pytorch else "shared"
            lines.append(
                f"{how}, and counted once in modules that hold several of these: {listed}{more}"
            )
        if len(self.dims) > len(self.assumed):
            lines.append(
                "with " + ", ".join(f"{name} = {size}" for name, size in self.dims.items())
            )
        return (*lines, *self.assumed, *self.limits)


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


_DRAWN_OF_TREE = ("class_name", "calls", "fate", "nodes", "own_nodes", "parameters")


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
        """What is known of a module."""
        return {
            name: value for name, value in super().module_data(row).items() if value is not None
        }

    @property
    def drawn(self) -> Sequence[Column[ModuleRow]]:
        """The columns of the table as text."""
        return chosen(self.columns, _DRAWN_OF_TREE)

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
    """The ``visible`` modules of a model, with FLOPs of its ``cost``; ``measured``: path → field of a row → value."""
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
