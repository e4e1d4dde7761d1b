"""Repair of torch's scopes: contaminated tensors at module boundaries, before and after."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.call_tree import CallTree, NodeCalls
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.model_metadata import read_contamination
from htp_export.format.torch_metadata import scopes_of
from htp_export.model.boundaries import OUTSIDE
from htp_export.model.regions import GraphIndex
from htp_export.model.tagged import ModelSource, TaggedModel, load
from htp_export.process.argument_types import checks_arguments
from htp_export.reporting.result import Result

Finding = tuple[str, str, str]
"""Module, tensor, and kind: see `Contamination`."""

_Crossings = dict[tuple[str, str, bool], int]
"""(module, tensor, whether it leaves) → place of the node on the other side."""


@dataclass(frozen=True)
class Contamination(Result):
    """The tensors at module boundaries that are no inputs or outputs of the module in PyTorch.

    Attributes:
        before: With torch's own scopes as owners, ``(module, tensor, kind)``. ``kind`` is the
            modules between which the tensor passes, and the operator that produces it: ``layers.0 →
            layers.1, Unsqueeze``.
        after: With the file's tags; empty if the tags are exact.
        nodes: Number of nodes in the file.
    """

    before: list[Finding]
    after: list[Finding]
    nodes: int

    def kinds(self) -> dict[str, tuple[int, int]]:
        """Kind → numbers of tensors before and after, the most frequent kind first."""
        before = collections.Counter(kind for _, _, kind in self.before)
        after = collections.Counter(kind for _, _, kind in self.after)
        return {kind: (before[kind], after[kind]) for kind, _ in (before + after).most_common()}

    @property
    def summary(self) -> str:
        """The result in one line."""
        return (
            f"{len(self.before)} contaminated border tensors before repair, {len(self.after)} after"
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """The numbers of tensors before and after, by kind."""
        return tuple(
            f"{before:6} → {after:<6} {kind}" for kind, (before, after) in self.kinds().items()
        )


@checks_arguments
def contamination(model: ModelSource) -> Contamination:
    """Compare torch's module scopes with the tags of an exported model, at module boundaries.

    A tensor at the boundary of a module is *contaminated* if it is not an input or output of the
    module in PyTorch. Torch's scopes are those in the file (dynamo: ``pkg.torch.onnx.name_scopes``;
    TorchScript: node names).

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model`` that
            htp_export exported.

    Returns:
        Contaminated tensors with torch's scopes, and with the tags.

    Raises:
        UntaggedModelError: The model was not exported by htp_export.
        FileError: The file cannot be read.

    Examples:
        >>> import torch, htp_export
        >>> linear = torch.nn.Linear(4, 3).eval()
        >>> program = htp_export.export(linear, (torch.randn(2, 4),), verbose=False)
        >>> contamination(program).after
        []
    """
    tagged = load(model)
    tagged.require_exact_tags()
    nodes = tagged.nodes
    whole_model = tagged.calls.work(("",))
    by_path = CallTree(Hierarchy([tagged.hierarchy.root]))  # torch's scopes have no calls

    def torch_owner(node: ir.Node) -> tuple[str, ...]:
        return _torch_owner(node, tagged.hierarchy)

    def tagged_work(node: ir.Node) -> NodeCalls:
        work = tagged.work_of(node)
        return work if work.owners else whole_model

    before = _crossings(tagged, lambda node: by_path.work(torch_owner(node)))
    after = _crossings(tagged, tagged_work)
    unknown = read_contamination(tagged.model.metadata_props)
    # (module, tensor) of the boundary in PyTorch
    known = {crossing[:2] for crossing in after if crossing not in unknown}
    contaminated_before = {key: node for key, node in before.items() if key[:2] not in known}
    contaminated_after = {key: node for key, node in after.items() if key in unknown}
    return Contamination(
        before=_findings(contaminated_before, nodes, torch_owner),
        after=_findings(contaminated_after, nodes, tagged.owners_of),
        nodes=len(nodes),
    )


def _torch_owner(node: ir.Node, hierarchy: Hierarchy) -> tuple[str, ...]:
    """The module of a node's scope in torch; its nearest ancestor if the tree lacks the module."""
    scopes = scopes_of(node)
    path = scopes[-1][0] if scopes else ""
    return (next(up for up in tags.ancestors(path) if up in hierarchy),)


def _crossings(tagged: TaggedModel, work_of: Callable[[ir.Node], NodeCalls]) -> _Crossings:
    """The tensors at the boundaries of modules that ran and have exact fates."""
    boundaries = GraphIndex(tagged.model, work_of, tagged.taps).boundaries_by_values
    crossings: _Crossings = {}
    for path, module in tagged.hierarchy.items():
        if module.calls and module.fate.is_exact:
            for value, other, leaves in boundaries.of([path]):
                crossings.setdefault((path, str(value.name), leaves), other)
    return crossings


def _findings(
    crossings: _Crossings,
    nodes: Sequence[ir.Node],
    owners_of: Callable[[ir.Node], Iterable[str]],
) -> list[Finding]:
    producers = {str(value.name): node for node in nodes for value in node.outputs}
    findings = []
    for (path, name, leaves), other in crossings.items():
        here = path or "(root)"
        beyond = "model"
        if other != OUTSIDE:
            beyond = ", ".join(owners_of(nodes[other])) or "(root)"
        direction = f"{here} → {beyond}" if leaves else f"{beyond} → {here}"
        producer = producers.get(name)
        operator = "input" if producer is None else producer.op_type
        findings.append((path, name, f"{direction}, {operator}"))
    return findings
