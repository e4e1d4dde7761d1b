"""What `decomposed_attention` shows of a model: operations, memory and traffic, as it is and in steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export.attention.decomposing import attention_as_in, decomposed_attention
from htp_export.errors import InputError
from htp_export.exporter.capture.model_state import unchanged
from htp_export.exporter.capture.torch_internals import scopes_of
from htp_export.exporter.exporting import export
from htp_export.model.tagged import TaggedModel, load
from htp_export.process.argument_types import checks_arguments
from htp_export.reporting.columns import Column
from htp_export.reporting.result import Result, Table

if TYPE_CHECKING:
    import torch

    from htp_export.costs.memory import FusedCost

_ATTENTION = "attention"
_MODEL = "model"


@dataclass(frozen=True)
class AttentionRow:
    """Some modules of one export.

    Attributes:
        modules: How many modules these are.
        nodes: Their ONNX nodes.
        operations: Their operations in the FX graph that the exporter translates.
        cost: Memory and traffic, as they are and if each of these modules kept its intermediates on
            chip.
    """

    modules: int
    nodes: int
    operations: int
    cost: FusedCost


@dataclass(frozen=True)
class AttentionReport(Result):
    """The result of `attention_report`.

    Attributes:
        modules: The paths of the modules with attention.
        before: The model as it is: ``"model"``, the whole, and ``"attention"``, all modules with
            attention.
        after: The same inside `decomposed_attention`; and for the name of each step, or of another
            module right below one with attention, all modules of this name.
    """

    modules: tuple[str, ...]
    before: Mapping[str, AttentionRow]
    after: Mapping[str, AttentionRow]

    @property
    def summary(self) -> str:
        """How many nodes and operations there are, in one line."""
        before, after = (
            [rows[part] for part in (_MODEL, _ATTENTION)] for rows in (self.before, self.after)
        )
        return (
            f"{len(self.modules)} modules with attention; "
            f"ONNX nodes from {before[0].nodes} to {after[0].nodes}, "
            f"in attention from {before[1].nodes} to {after[1].nodes}; "
            f"FX operations from {before[0].operations} to {after[0].operations}, "
            f"in attention from {before[1].operations} to {after[1].operations}"
        )

    def table(self) -> Table:
        """Each part of both exports."""
        return _COLUMNS, [
            (when, *row) for when in ("before", "after") for row in getattr(self, when).items()
        ]


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
    """Export a model as it is and in steps of attention, and compare operations, memory and traffic.

    Both exports are made in memory, with ``dynamo=True``. Memory and traffic are estimates by
    `cost`, with all modules of a row as they are and if each of them kept its intermediates on
    chip.

    Not thread-safe: no other thread may use the model meanwhile.

    Args:
        model: The model.
        args: Example positional inputs.
        kwargs: Example keyword inputs.

    Returns:
        The numbers of both exports: of the whole model, of all modules with attention, and of each
        step in all of them.

    Raises:
        InputError: If no module of the model computes attention, or `decomposed_attention` refuses
            one.

    Examples:
        >>> import torch, htp_export
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        >>> report = htp_export.attention_report(layer, (torch.randn(1, 5, 16),))
        >>> report.modules, report.after["model"].nodes < report.before["model"].nodes
        (('self_attn',), True)
    """
    with decomposed_attention(model):
        tagged, operations = _exported(model, args, kwargs)
    made_of_steps = {
        path for path, info in tagged.hierarchy.items() if info.synthetic and tagged[path].nodes
    }
    if not made_of_steps <= frozenset().union(*operations):
        # torch knows the modules that there were when its export began
        with attention_as_in(tagged.hierarchy, model):
            tagged, operations = _exported(model, args, kwargs)
    steps: defaultdict[str, list[str]] = defaultdict(list)
    hierarchy = tagged.hierarchy
    paths = tuple(
        dict.fromkeys(
            hierarchy.parent(path) or "" for path, info in hierarchy.items() if info.synthetic
        )
    )
    if not paths:
        raise InputError(
            "no module of the model computes attention: nn.MultiheadAttention, scaled_dot_product_attention, or the "
            "softmax of a product of two tensors"
        )
    for path in (child for parent in paths for child in hierarchy.children(parent)):
        if tagged[path].nodes:
            name = path.rpartition(".")[2]
            steps[f".{name}" if name in (_MODEL, _ATTENTION) else name].append(path)
    after = _numbers(tagged, operations, {_ATTENTION: paths, **steps})
    tagged, operations = _exported(model, args, kwargs)
    return AttentionReport(paths, _numbers(tagged, operations, {_ATTENTION: paths}), after)


def _exported(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[TaggedModel, list[frozenset[str]]]:
    """The export, and for each operation of its FX graph the modules in which it is."""
    with unchanged(model, (args, kwargs), traced=True):
        program = export(model, args, kwargs=kwargs, verbose=False)
    if program is None or program.exported_program is None:
        raise InputError("the exporter returned no program")
    nodes = [node for node in program.exported_program.graph.nodes if node.op == "call_function"]
    return load(program), [frozenset(scope.name for scope in scopes_of(node)) for node in nodes]


def _numbers(
    tagged: TaggedModel, operations: Sequence[frozenset[str]], groups: Mapping[str, Collection[str]]
) -> dict[str, AttentionRow]:
    """The rows of an export: the whole model, then groups of modules."""
    from htp_export.costs.memory import cost_of_fusing

    groups = {_MODEL: ("",), **groups}
    costs = cost_of_fusing(tagged, groups)
    return {
        name: AttentionRow(
            modules=len(paths),
            nodes=len({node for path in paths for node in tagged[path].nodes}),
            operations=sum(1 for stack in operations if not {*stack, ""}.isdisjoint(paths)),
            cost=costs[name],
        )
        for name, paths in groups.items()
    }
