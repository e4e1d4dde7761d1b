"""Results of `cost` and `tree`: the cost of a model by module and by node."""

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
_DRAWN_OF_QUANTIZED = (*_DRAWN, "weight_bits", "moved_bits")
_UNQUANTIZED = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
"""Types of weights, as numpy names them, in which a model is trained."""


@dataclass(frozen=True)
class NodeCost:
    """One node, with all of its runs.

    Attributes:
        name: The node's name.
        op_type: Its operator.
        owners: The modules that it computes.
        times: Number of runs: several in a loop, 0 in the cheaper branch of an ``If``.
        counted: Whether its work is known. If not, ``macs``, ``flops`` and ``other_flops`` are 0.
        macs: Multiply-adds of matrix products and convolutions; as the following, of all runs.
        flops: Two for each multiply-add.
        other_flops: Operations on single elements.
        shapes: Shape of each output; None if unknown.
        activation_bytes: Size of its outputs.
        moved_bits: Bits of the activations that it reads and writes, in the width of their formats.
        traffic_bytes: Bytes that it reads and writes, weights included.
        read_bytes: Bytes that it reads.
        written_bytes: Bytes that it writes.
        modules: The modules whose regions contain it.
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
    moved_bits: int
    traffic_bytes: int
    read_bytes: int = 0
    written_bytes: int = 0
    modules: AbstractSet[str] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, kw_only=True)
class ModuleCost(ModuleFacts):
    """Facts and costs of a module with its descendants; ``self_…``: of its own nodes.

    A node of several modules counts once in the total of each of their ancestors. In ``self_…``, it
    is divided between its owners, so that they add up to the total.

    Attributes:
        macs: Multiply-adds of matrix products and convolutions, in attention and recurrent layers
            too.
        flops: Two for each multiply-add, as torch's ``FlopCounterMode`` counts.
        other_flops: Operations on single elements: activations, normalisation, softmax, reductions,
            additions.
        uncounted: Operator → nodes of unknown work, which no number includes.
        activation_bytes: Size of the outputs of its nodes.
        moved_bits: Bits of the activations that its nodes read and write, without weights, in the
            width of the format in which they are used.
        traffic_bytes: Bytes that its nodes read and write, one after another: weights, inputs,
            outputs, intermediates.
        read_bytes: The bytes of these that they read.
        written_bytes: The bytes of these that they write.
        peak_bytes: Peak of the whole model's activation memory while one of its nodes runs.
        fused_traffic_bytes: ``traffic_bytes`` if its intermediates stayed on chip.
        fused_peak_bytes: Peak of the whole model if its intermediates stayed on chip.
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
    moved_bits: int = 0
    self_moved_bits: int = 0
    traffic_bytes: int = 0
    self_traffic_bytes: int = 0
    read_bytes: int = 0
    self_read_bytes: int = 0
    written_bytes: int = 0
    self_written_bytes: int = 0
    peak_bytes: int = 0
    fused_traffic_bytes: int = 0
    fused_peak_bytes: int = 0

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations for each byte of traffic; 0 without traffic."""
        if not self.traffic_bytes:
            return 0.0
        return (self.flops + self.other_flops) / self.traffic_bytes

    @property
    def saved_traffic_bytes(self) -> int:
        """Bytes of traffic that are saved if its intermediates stay on chip."""
        return self.traffic_bytes - self.fused_traffic_bytes


@dataclass(frozen=True)
class Peak:
    """The peak of activation memory.

    Attributes:
        bytes: Live bytes at the peak.
        node: The node that runs then, the first if there are several; "" for a model without nodes.
        modules: Its owners: the innermost modules at the peak.
        live: The tensors in memory, ``(tensor, bytes)``, the largest first, without tensors inside
            subgraphs.
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
        shared: Parameter of several modules → these modules.
        dims: Open dimension → the size that was used.
        from_pytorch: Whether ``parameters`` are PyTorch's parameters; otherwise they are the
            weights in the file.
        limits: Limits of these numbers, one line each.
        tags: The tags of the model: source, reasons, untagged nodes.
        assumed: A line for each open dimension without a size in the call, with the size that was
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
        """The columns of the table as text; of a quantized model, also the bits."""
        types = self.modules[""].weight_bytes_by_dtype
        is_quantized = any(name not in _UNQUANTIZED for name in types)
        return chosen(self.columns, _DRAWN_OF_QUANTIZED if is_quantized else _DRAWN)

    @property
    def summary(self) -> str:
        """The operations of the whole model."""
        root = self.modules[""]
        products = f"{root.flops:,} FLOPs (2 for each multiply-add of matrix products)"
        return f"{products}, {root.other_flops:,} other operations"

    @property
    def notes(self) -> tuple[str, ...]:
        """Further facts about the whole model, one line each."""
        lines = []
        if self.peak.node:
            owners = ", ".join(path or "(root)" for path in self.peak.modules) or "no module"
            lines.append(
                f"{self.peak.bytes:,} bytes of activations at the peak, at {self.peak.node!r} of {owners}"
            )
        if self.uncounted:
            listed = ", ".join(f"{op} × {count}" for op, count in self.uncounted.items())  # noqa: RUF001 - "times"
            lines.append(f"not counted: {listed}")
        if self.shared:
            lines.append(self._shared_note())
        if len(self.dims) > len(self.assumed):
            sizes = ", ".join(f"{name} = {size}" for name, size in self.dims.items())
            lines.append(f"with {sizes}")
        return (*lines, *self.assumed, *self.limits)

    def _shared_note(self) -> str:
        """The first three shared parameters, so that the line stays short, and their number."""
        listed = []
        for name, paths in list(self.shared.items())[:3]:
            listed.append(f"{name} ({', '.join(paths)})")
        more = f" and {len(self.shared) - 3} more" if len(self.shared) > 3 else ""
        how = "tied" if self.from_pytorch else "shared"
        return f"{how}, and counted once in modules that hold several of these: {', '.join(listed)}{more}"


@dataclass(frozen=True, kw_only=True)
class ModuleRow(ModuleFacts):
    """One module of the tree: facts and measurements.

    Attributes:
        flops: Two for each multiply-add of matrix products and convolutions, if sizes are known.
        time_ms: Measured time with all descendants; None if it was not measured.
        own_time_ms: Measured time of its own nodes.
        error: Largest measured difference from PyTorch, or from another file.
        status: The problem of the module; empty if it has none, or was not checked.
    """

    flops: int | None = None
    time_ms: float | None = None
    own_time_ms: float | None = None
    error: float | None = None
    status: str | None = None

    @property
    def own_nodes(self) -> int:
        """Number of nodes that it computes itself, outside its descendants."""
        return self.self_nodes


_DRAWN_OF_TREE = ("class_name", "calls", "fate", "nodes", "own_nodes", "parameters")


@dataclass(frozen=True)
class ModuleTree(ModuleTable):
    """The rows of a module tree, in the order of ``named_modules()``.

    Attributes:
        rows: One for each module in the tree.
        tags: Facts about the model's module tags.
        notes: Notes about the rows.
    """

    columns = TREE_COLUMNS
    optional = ("notes",)

    rows: tuple[ModuleRow, ...] = field(repr=False)
    tags: TagFacts | None = None
    notes: tuple[str, ...] = ()

    def module_data(self, row: ModuleRow) -> dict[str, Any]:
        """The known values of a module."""
        entries = super().module_data(row)
        return {name: value for name, value in entries.items() if value is not None}

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
        """The number of modules, and the size of the whole model if its row is in the tree."""
        root = self.by_module.get("")
        size = ""
        if root is not None:
            size = f", {root.nodes:,} nodes, {root.parameters:,} parameters"
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
    """The ``visible`` modules of a model, with FLOPs of its ``cost`` and measurements.

    ``measured`` maps paths to fields of `ModuleRow` and their values.
    """
    contents = contents_of(tagged).modules
    rows = []
    for path in visible(tagged, depth, select):
        flops = None if cost is None else cost.modules[path].flops
        further = (measured or {}).get(path, {})
        rows.append(ModuleRow(**vars(contents[path].facts), flops=flops, **further))
    return ModuleTree(tuple(rows), tagged.tag_facts, () if cost is None else cost.assumed)
