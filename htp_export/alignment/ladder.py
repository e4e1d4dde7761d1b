"""The ladder of evidence for the owners of nodes: names and structure, then weights, then values.

Each step costs more than the one before. If names are proved, all owners are known. Otherwise,
owners that weights and values do not prove stay unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from htp_export.alignment.alignment import Alignment, AlignmentEvidence
from htp_export.alignment.carried_owners import OwnersAfter
from htp_export.alignment.graph_summary import NOTHING, GraphSummary, summarize
from htp_export.alignment.name_scopes import scope_of
from htp_export.alignment.origin_map import Origin
from htp_export.alignment.proved_owners import ProvedOwners
from htp_export.alignment.replaced_nodes import replaced_nodes
from htp_export.alignment.unnamed_alignment import UnnamedAlignment, input_pairs, without_names
from htp_export.format.tags import Reason, below
from htp_export.lineage.tagging import Owned
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.settings import DEFAULTS, RunSettings

_KEPT = 0.5
"""Share of tensors with their names that proves names: tools keep 0.7, other exporters none."""

_CONTRADICTED = 0.05
"""Share of names that structure may contradict: 0.03 after tools, 0.1 after other exporters."""


_Summary = tuple[GraphSummary, list[ir.Node]]
"""The result of `summarize`."""


@dataclass(frozen=True)
class Found:
    """The owners of the nodes of a model."""

    nodes: Sequence[ir.Node]
    owned: Sequence[Owned]  # the owners of each
    alignment: Alignment  # the counterparts of its tensors
    not_compared: str = ""  # why values were not compared, if that could have proved more

    @property
    def unknown(self) -> list[ir.Node]:
        """The nodes whose owners are unknown."""
        return [
            node
            for node, owned in zip(self.nodes, self.owned, strict=True)
            if owned.reason == Reason.UNKNOWN
        ]


def find_owners(
    origin: Origin,
    model: ir.Model,
    settings: RunSettings = DEFAULTS,
    sure: bool = False,
) -> Found:
    """Find the owners of a model's nodes, with more evidence until all are known.

    Args:
        origin: The original model.
        model: The model.
        settings: The inputs of the original, to compare values: those of one run, or random ones.
        sure: Whether a tool certainly derived the model from the original; otherwise its names
            have to prove that.

    Raises:
        InputError: If the data are not the inputs of the original.
    """
    given: Any = settings.data
    if given is not None and origin.model is not None:
        settings = replace(settings, data=Inputs.of(origin.model).feed(given).arrays)
    after = summarize(model, model.functions.values())
    return _by_names(origin, model, after, sure) or _without_names(origin, model, after, settings)


def _by_names(origin: Origin, model: ir.Model, summary: _Summary, sure: bool) -> Found | None:
    """The owners by names and structure, and by renamed weights; None if names are not proved."""
    before, (after, nodes) = origin.summary, summary
    alignment = Alignment(before, after)
    if not sure and not names_hold(alignment):
        return None
    if origin.model is not None:
        # imported here: it imports numpy and ONNX Runtime
        from htp_export.alignment.evidence import renamed_weights

        weights = renamed_weights((origin.model, before), (model, after))
        if weights:
            alignment = Alignment(before, after, AlignmentEvidence(weights=weights))
    owned = OwnersAfter(alignment, replaced_nodes(alignment), origin.calls).decide()
    return Found(nodes, _with_root(owned), alignment)


def _without_names(
    origin: Origin, model: ir.Model, summary: _Summary, settings: RunSettings
) -> Found:
    """The owners by structure and weights, or else by values, too; others are unknown."""
    before, (after, nodes) = origin.summary, summary
    scopes = []
    for node in nodes:
        first_output = [str(value.name) for value in node.outputs[:1]]
        scopes.append(scope_of(node.name or "", *first_output))
    # original weight → the module that has it as a parameter
    holders = dict[int, str]()
    for path, parameters in origin.parameters.items():
        for name in parameters.shapes:
            holders[before.find(below(path, name))] = path
    holders.pop(NOTHING, None)
    passed = list[int]()
    for calls in origin.signatures.values():
        for call in calls:
            passed += map(before.find, (*call.taken, *call.given))
    if origin.model is None:
        inputs = AlignmentEvidence(inputs=input_pairs(before, after))
        steps = iter([(inputs, "of the original, only its map is known")])
    else:
        from htp_export.alignment.evidence import weights_then_values

        steps = weights_then_values((origin.model, before), (model, after), settings)
    unnamed = without_names(after)
    for evidence, not_compared in steps:
        alignment = UnnamedAlignment(before, unnamed, evidence)
        owned = ProvedOwners(alignment, scopes, origin.calls, holders, passed).owners()
        found = Found(nodes, _with_root(owned), alignment, not_compared)
        if not found.unknown:
            break
    for value, named in zip(unnamed.values, after.values, strict=True):
        value.name = named.name  # reports name the tensors
    return found


def names_hold(alignment: Alignment) -> bool:
    """Whether names prove that a tool derived the second model from the first.

    Most tensors have a name of the original. Of the tensors that structure alone identifies, nearly
    all have their own name: exporters name by type and number, so that equal names may belong to
    different tensors.
    """
    before, after, numbers = alignment.before, alignment.after, alignment.numbers
    if any(alignment.counterpart[value] == NOTHING for value in (*after.inputs, *after.outputs)):
        return False
    kept = agree = contradicted = 0
    for node in after.nodes:
        if not node.inputs:
            continue
        for value, same in zip(node.outputs, alignment.recomputed(node), strict=True):
            if value == NOTHING or value in after.outputs:
                continue
            named = before.find(after.values[value].name, node.scope)
            if named == NOTHING:
                kept += alignment.evidence_of[value] == Reason.NODE
            elif same == NOTHING:
                # Two products that were merged into one have the name of one of them.
                kept += alignment.is_compatible(value, named)
            elif numbers.number[named] == numbers.number[same]:
                agree += 1
            else:
                contradicted += 1
    fewer = min(_count_computed(before), _count_computed(after))
    return kept + agree >= _KEPT * fewer and contradicted <= _CONTRADICTED * (agree + contradicted)


def _count_computed(summary: GraphSummary) -> int:
    """The number of tensors that nodes with inputs compute, without the model's outputs."""
    outputs, computed = {*summary.outputs}, 0
    for node in summary.nodes:
        if node.inputs:
            computed += len({*node.makes} - outputs)
    return computed


def _with_root(owned: Sequence[Owned]) -> list[Owned]:
    """Assign nodes without owners to the root, as unknown: no neighbour has owners either."""
    return [entry if entry.paths else Owned(("",), Reason.UNKNOWN) for entry in owned]
