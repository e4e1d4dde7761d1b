"""The effect of `decomposed_attention` on a model's operations, memory and traffic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export.attention.decomposing import attention_as_in, decomposed_attention
from htp_export.costs.memory import FusedCost, cost_of_fusing, fusible_traffic
from htp_export.errors import InputError
from htp_export.exporter.capture.model_state import unchanged
from htp_export.exporter.capture.torch_internals import scopes_of
from htp_export.exporter.exporting import export
from htp_export.model.tagged import TaggedModel, load
from htp_export.process.argument_types import checks_arguments
from htp_export.reporting.columns import Column, percent
from htp_export.reporting.result import Result, Table

if TYPE_CHECKING:
    import torch

_ATTENTION = "attention"
_MODEL = "model"


@dataclass(frozen=True)
class AttentionRow:
    """The modules of one part of an export, in total.

    Attributes:
        modules: Number of modules.
        nodes: Number of their ONNX nodes.
        operations: Number of their operations in the FX graph that the exporter translates.
        cost: Memory and traffic, as they are, and if each of these modules kept its intermediates
            on chip.
    """

    modules: int
    nodes: int
    operations: int
    cost: FusedCost


@dataclass(frozen=True)
class Exposed:
    """The operations of a model, with attention as one operation in each module, or in steps.

    Attributes:
        operations: Number of operations of the model in its FX graph.
        attention_operations: The number of these in modules with attention.
        traffic_bytes: Bytes that the ONNX nodes read and write.
        fusible_bytes: Bytes of these that fusing pointwise operators saves, of what is seen.
    """

    operations: int
    attention_operations: int
    traffic_bytes: int
    fusible_bytes: int

    @property
    def memory_reduction(self) -> float:
        """The share of the traffic that fusing pointwise operators saves."""
        return self.fusible_bytes / self.traffic_bytes if self.traffic_bytes else 0.0


@dataclass(frozen=True)
class AttentionReport(Result):
    """The result of `attention_report`.

    Attributes:
        modules: The paths of the modules with attention.
        before: The unchanged model: ``"model"``, the whole, and ``"attention"``, all modules with
            attention.
        after: The same inside `decomposed_attention`; also for the name of each step, or of another
            child of a module with attention, all modules of this name.
        opaque: The unchanged model, if each call of a module with attention were one operation, as
            ``torch.fx.symbolic_trace`` has it with these modules as leaves.
        exposed: The model inside `decomposed_attention`.
    """

    modules: tuple[str, ...]
    before: Mapping[str, AttentionRow]
    after: Mapping[str, AttentionRow]
    opaque: Exposed
    exposed: Exposed

    @property
    def notes(self) -> tuple[str, ...]:
        """The numbers if attention were one operation, and in steps, in one line."""
        opaque, exposed = self.opaque, self.exposed
        return (
            "with attention as one operation in each module: "
            f"operations from {opaque.operations} to {exposed.operations} "
            f"(x {exposed.operations / opaque.operations:.2f}), "
            f"in attention from {opaque.attention_operations} to {exposed.attention_operations} "
            f"(x {exposed.attention_operations / opaque.attention_operations:.1f}); "
            "traffic that fusing pointwise operators saves from "
            f"{percent(opaque.memory_reduction)} to {percent(exposed.memory_reduction)}",
        )

    @property
    def summary(self) -> str:
        """The numbers of nodes and operations, in one line."""
        model = self.before[_MODEL]
        model_after = self.after[_MODEL]
        attention = self.before[_ATTENTION]
        attention_after = self.after[_ATTENTION]
        return (
            f"{len(self.modules)} modules with attention; "
            f"ONNX nodes from {model.nodes} to {model_after.nodes}, "
            f"in attention from {attention.nodes} to {attention_after.nodes}; "
            f"FX operations from {model.operations} to {model_after.operations}, "
            f"in attention from {attention.operations} to {attention_after.operations}"
        )

    def table(self) -> Table:
        """Each part of both exports."""
        rows = [("before", part, row) for part, row in self.before.items()]
        rows += [("after", part, row) for part, row in self.after.items()]
        return _COLUMNS, rows


_COLUMNS: tuple[Column[tuple[str, str, AttentionRow]], ...] = (
    Column("export", "export", lambda row: row[0], right=False),
    Column("part", "part", lambda row: row[1], right=False),
    Column("modules", "modules", lambda row: row[2].modules),
    Column("nodes", "nodes", lambda row: row[2].nodes),
    Column("operations", "FX operations", lambda row: row[2].operations),
    Column("traffic", "traffic", lambda row: row[2].cost.traffic_bytes, unit="B"),
    Column("fused_traffic", "if fused", lambda row: row[2].cost.fused_traffic_bytes, unit="B"),
    Column("peak", "peak memory", lambda row: row[2].cost.peak_bytes, unit="B"),
    Column("fused_peak", "if fused", lambda row: row[2].cost.fused_peak_bytes, unit="B"),
)


@checks_arguments
def attention_report(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> AttentionReport:
    """Export a model without and with steps of attention; compare operations, memory and traffic.

    Both exports are in memory, with ``dynamo=True``. Memory and traffic are estimates by `cost`,
    with all modules of a row as they are, and if each of them kept its intermediates on chip.

    Not thread-safe: no other thread may use the model meanwhile.

    Args:
        model: The model.
        args: Example positional inputs.
        kwargs: Example keyword inputs.

    Returns:
        The numbers of both exports: of the whole model, of all modules with attention, and of each
        step in all of them.

    Raises:
        InputError: If no module of the model computes attention, or `decomposed_attention` raises
            it.

    Examples:
        >>> import torch, htp_export
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        >>> report = htp_export.attention_report(layer, (torch.randn(1, 5, 16),))
        >>> report.modules, report.after["model"].nodes < report.before["model"].nodes
        (('self_attn',), True)
    """
    with decomposed_attention(model):
        tagged, scopes = _exported(model, args, kwargs)
    steps_with_nodes = {
        path for path, info in tagged.hierarchy.items() if info.synthetic and tagged[path].nodes
    }
    if not steps_with_nodes <= frozenset().union(*scopes):
        # torch only has scopes for modules that were registered when its export began
        with attention_as_in(tagged.hierarchy, model):
            tagged, scopes = _exported(model, args, kwargs)
    hierarchy = tagged.hierarchy
    parents = (hierarchy.parent(path) for path, info in hierarchy.items() if info.synthetic)
    paths = tuple(dict.fromkeys(parent or "" for parent in parents))
    if not paths:
        raise InputError(
            "no module of the model computes attention: nn.MultiheadAttention, scaled_dot_product_attention, or the "
            "softmax of a product of two tensors"
        )
    after = _rows(tagged, scopes, {_ATTENTION: paths, **_children_by_name(tagged, paths)})
    exposed = _exposed(tagged, after)
    tagged, scopes = _exported(model, args, kwargs)
    before = _rows(tagged, scopes, {_ATTENTION: paths})
    return AttentionReport(paths, before, after, _opaque(tagged, before, paths), exposed)


def _exposed(tagged: TaggedModel, rows: Mapping[str, AttentionRow]) -> Exposed:
    operations, in_attention = rows[_MODEL].operations, rows[_ATTENTION].operations
    return Exposed(operations, in_attention, *fusible_traffic(tagged))


def _opaque(tagged: TaggedModel, rows: Mapping[str, AttentionRow], paths: Sequence[str]) -> Exposed:
    """The counts of a model in which each call of some modules is one operation."""
    calls = sum(tagged.hierarchy[path].calls for path in paths)
    outside = rows[_MODEL].operations - rows[_ATTENTION].operations
    return Exposed(outside + calls, calls, *fusible_traffic(tagged, paths))


def _children_by_name(tagged: TaggedModel, paths: Sequence[str]) -> dict[str, list[str]]:
    """Name of a child of the modules → the paths of all children of this name with nodes."""
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for parent in paths:
        for path in tagged.hierarchy.children(parent):
            if tagged[path].nodes:
                name = path.rpartition(".")[2]
                # a module may have the name of another row
                by_name[f".{name}" if name in (_MODEL, _ATTENTION) else name].append(path)
    return by_name


def _exported(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> tuple[TaggedModel, list[frozenset[str]]]:
    """The export, and the module scopes of each operation of its FX graph."""
    with unchanged(model, (args, kwargs), traced=True):
        program = export(model, args, kwargs=kwargs, verbose=False)
    if program is None or program.exported_program is None:
        raise InputError("the exporter returned no program")
    scopes = []
    for node in program.exported_program.graph.nodes:
        if node.op == "call_function":
            names = [scope.name for scope in scopes_of(node)]
            scopes.append(frozenset(names))
    return load(program), scopes


def _rows(
    tagged: TaggedModel,
    scopes: Sequence[frozenset[str]],
    groups: Mapping[str, Collection[str]],
) -> dict[str, AttentionRow]:
    """The rows of an export: the whole model, then groups of modules."""
    groups = {_MODEL: ("",), **groups}
    costs = cost_of_fusing(tagged, groups)
    rows = {}
    for name, paths in groups.items():
        nodes = set[Any]().union(*(tagged[path].nodes for path in paths))
        operations = [stack for stack in scopes if not {*stack, ""}.isdisjoint(paths)]
        rows[name] = AttentionRow(len(paths), len(nodes), len(operations), costs[name])
    return rows
