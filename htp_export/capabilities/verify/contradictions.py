"""Finds tags that contradict the graph of the file, whatever the values of the tensors.

A tensor with the right values may still be computed by nodes of another module. The graph shows this, together with
the names of the inputs and outputs of modules in PyTorch (``htp.signatures``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from htp_export.capabilities.verify.locating import Blame
from htp_export.format.call_tree import Instance, NodeCalls
from htp_export.format.model_metadata import read_contamination
from htp_export.model.dependence import input_dependent_values
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import SIZES_ONLY

__all__ = ["contradictions", "with_contradictions"]


def with_contradictions(tagged: TaggedModel, blame: Blame, paths: Collection[str]) -> Blame:
    """Add the modules whose tags contradict the graph, after those whose values are wrong."""
    known = blame.modules
    contradicting = {path: why for path, why in contradictions(tagged).items() if path in paths and path not in known}
    return replace(blame, modules={**known, **contradicting}) if contradicting else blame


def contradictions(tagged: TaggedModel) -> Mapping[str, str]:
    """Return module path → the contradiction between its tags and the graph.

    - A constant or dead module returns a tensor that depends on the inputs, or that a result depends on.
    - A computed module returns a tensor that no node of its region computes.
    - A call of it has an input that nodes of this call compute, and that is none of its outputs.

    Modules whose boundary differs from PyTorch according to the export (``htp.contamination``) are left out.
    """
    if tagged.source != "htp" or not tagged.signatures:
        return {}
    excused = {path for path, *_ in read_contamination(tagged.model.metadata_props)}
    facts = _Facts(tagged)
    reasons = ((path, next(facts.reasons(path), "")) for path in tagged.paths if path and path not in excused)
    return {path: reason for path, reason in reasons if reason}


class _Facts:
    """The tensors of modules in the graph."""

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged
        self._varying = input_dependent_values(tagged.model, tagged.nodes)
        self._useful = _useful(tagged)

    def reasons(self, path: str) -> Iterator[str]:
        """The contradictions of a module."""
        fate = self._tagged.hierarchy[path].fate
        calls = self._tagged.signatures.get(path, ())
        outputs = self._values([name for call in calls for name in call.outputs])
        taken = [self._values(list(call.inputs.values())) for call in calls]
        new = [value for value in outputs if not any(value in inputs_of_call for inputs_of_call in taken)]
        if fate.is_folded or fate.is_needless:
            leads = "depends on the inputs" if fate.is_folded else "leads to a result"
            for value in new:
                if fate.is_folded or value in self._useful:
                    yield f"it is said to be {fate}, but {value.name!r}, which it gives back, {leads}"
        elif fate.is_exact:
            for value in new:
                if path not in self._work(value).modules:
                    owners = _listed(self._work(value).owners)
                    yield f"{value.name!r}, which it gives back, is computed by {owners}"
            for number, values in enumerate(taken):
                inside = Instance(path, number)
                for value in values:
                    if value not in outputs and all(inside in part.running for part in self._work(value).parts):
                        yield f"{value.name!r}, which it is given, is computed by its own nodes"

    def _values(self, names: Sequence[str | None]) -> list[ir.Value]:
        """The tensors with these names that nodes compute from the inputs."""
        values = (self._tagged.values.get(name) for name in dict.fromkeys(names) if name is not None)
        return [value for value in values if value in self._varying and value is not None and self._work(value).parts]

    def _work(self, value: ir.Value) -> NodeCalls:
        producer = value.producer()
        return NodeCalls() if producer is None else self._tagged.work_of(producer)


def _useful(tagged: TaggedModel) -> set[ir.Value]:
    """The tensors of the main graph on whose values, not only sizes, a result of the model depends."""
    useful = set(tagged.model.graph.outputs)
    for node in reversed(tagged.model.graph):
        if node.op_type not in SIZES_ONLY and any(value in useful for value in node.outputs):
            useful.update(tagged.index.reads(node))
    return useful


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(repr(path) if path else "the model itself" for path in paths)
