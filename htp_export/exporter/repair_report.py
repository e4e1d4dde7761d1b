"""What repair did: the tensors at modules' borders that PyTorch does not know, before and after."""

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
# (module, tensor, whether it leaves) → node on the other side
_Border = dict[tuple[str, str, bool], int]


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
        """For each kind, how many there were before and how many after, the most frequent first."""
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
        """How many tensors there were and are, by kind."""
        return tuple(
            f"{before:6} → {after:<6} {kind}" for kind, (before, after) in self.kinds().items()
        )


@checks_arguments
def contamination(model: ModelSource) -> Contamination:
    """Compare torch's own module scopes with the tags of an exported model, at the boundaries of modules.

    A tensor at the boundary of a module is *contaminated* if PyTorch does not know it as an input
    or output of the module. Torch's scopes are those in the file (dynamo:
    ``pkg.torch.onnx.name_scopes``; TorchScript: node names).

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
        >>> program = htp_export.export(torch.nn.Linear(4, 3).eval(), (torch.randn(2, 4),), verbose=False)
        >>> contamination(program).after
        []
    """
    tagged = load(model)
    tagged.require_exact_tags()
    nodes, whole = tagged.nodes, tagged.calls.work(("",))
    by_path = CallTree(Hierarchy([tagged.hierarchy.root]))  # torch's scopes say nothing of calls
    after = _crossing(tagged, lambda node: work if (work := tagged.work_of(node)).owners else whole)
    before = _crossing(tagged, lambda node: by_path.work(_torch_owner(node, tagged.hierarchy)))
    unknown = read_contamination(tagged.model.metadata_props)
    known = {(path, name) for path, name, leaves in after if (path, name, leaves) not in unknown}
    return Contamination(
        before=_findings(
            {key: at for key, at in before.items() if key[:2] not in known},
            nodes,
            lambda n: _torch_owner(n, tagged.hierarchy),
        ),
        after=_findings(
            {key: at for key, at in after.items() if key in unknown}, nodes, tagged.owners_of
        ),
        nodes=len(nodes),
    )


def _torch_owner(node: ir.Node, hierarchy: Hierarchy) -> tuple[str, ...]:
    """The module that torch's own scope names; its nearest ancestor where the name leads to none."""
    scopes = scopes_of(node)
    path = scopes[-1][0] if scopes else ""
    return (next(up for up in tags.ancestors(path) if up in hierarchy),)


def _crossing(tagged: TaggedModel, work_of: Callable[[ir.Node], NodeCalls]) -> _Border:
    boundaries, hierarchy = (
        GraphIndex(tagged.model, work_of, tagged.taps).boundaries_by_values,
        tagged.hierarchy,
    )
    found: _Border = {}
    for path in hierarchy:
        if hierarchy[path].calls and hierarchy[path].fate.is_exact:
            for value, other, leaves in boundaries.of([path]):
                found.setdefault((path, str(value.name), leaves), other)
    return found


def _findings(
    borders: _Border, nodes: Sequence[ir.Node], owners_of: Callable[[ir.Node], Iterable[str]]
) -> list[Finding]:
    made_by = {str(value.name): node for node in nodes for value in node.outputs}
    found = []
    for (path, name, leaves), other in borders.items():
        maker = made_by.get(name)
        beyond = ", ".join(owners_of(nodes[other])) or "(root)" if other != OUTSIDE else "model"
        way = f"{path or '(root)'} → {beyond}" if leaves else f"{beyond} → {path or '(root)'}"
        found.append((path, name, f"{way}, {maker.op_type if maker else 'input'}"))
    return found
