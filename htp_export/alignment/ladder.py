"""The ladder of evidence for the owners of nodes: names and structure, then weights, then values.

Each step reads more than the one before. If names prove something, all owners are known; otherwise,
what weights and values do not prove stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from htp_export.lineage.owner_rule import Owned
from htp_export.runtime.inputs import Inputs

_KEPT = 0.5
"""The share of tensors under their names beyond which names prove something: tools keep 0.7, other exporters none."""

_CONTRADICTED = 0.05
"""The share of names that structure contradicts: 0.03 after tools, and 0.1 where an exporter counts its names anew."""


_Summary = tuple[GraphSummary, list[ir.Node]]
"""What `summarize` returns."""


@dataclass(frozen=True)
class Found:
    """The owners of the nodes of a model."""

    nodes: Sequence[ir.Node]  # its nodes
    owned: Sequence[Owned]  # the owners of each
    alignment: Alignment  # the counterparts of its tensors
    not_compared: str = ""  # why values were not compared, although this might have helped

    @property
    def unknown(self) -> list[ir.Node]:
        """The nodes whose owners are not known."""
        return [
            node
            for node, owned in zip(self.nodes, self.owned, strict=True)
            if owned.reason == Reason.UNKNOWN
        ]


def find_owners(
    origin: Origin,
    model: ir.Model,
    data: Mapping[str, Any] | None = None,
    seed: int = 0,
    sure: bool = False,
) -> Found:
    """Go up the ladder, until the owners of all nodes are known.

    ``data``: Input name of the original → array, for values; None for random inputs. ``sure``:
    Whether the model was certainly made of the original; otherwise its names have to show that.

    Raises:
        InputError: If the data are not the inputs of the original.
    """
    if data is not None and origin.model is not None:
        data = Inputs.of(origin.model).feed(data).arrays
    after = summarize(model, model.functions.values())
    return _by_names(origin, model, after, sure) or _without_names(origin, model, after, data, seed)


def _by_names(origin: Origin, model: ir.Model, summary: _Summary, sure: bool) -> Found | None:
    """The owners by names and structure, and by renamed weights; None if names prove nothing."""
    before, (after, nodes) = origin.summary, summary
    alignment = Alignment(before, after)
    if not sure and not names_hold(alignment):
        return None
    if origin.model is not None:
        # it loads numpy, and ONNX Runtime
        from htp_export.alignment.evidence import renamed_weights

        weights = renamed_weights((origin.model, before), (model, after))
        alignment = (
            Alignment(before, after, AlignmentEvidence(weights=weights)) if weights else alignment
        )
    owned = OwnersAfter(alignment, replaced_nodes(alignment), origin.calls).decide()
    return Found(nodes, _with_root(owned), alignment)


def _without_names(
    origin: Origin, model: ir.Model, summary: _Summary, data: Mapping[str, Any] | None, seed: int
) -> Found:
    """The owners by structure and weights, or else by values too; what these do not prove is unknown."""
    before, (after, nodes) = origin.summary, summary
    scopes = [
        scope_of(node.name or "", *(str(value.name) for value in node.outputs[:1]))
        for node in nodes
    ]
    held = (
        (path, below(path, name)) for path, of in origin.parameters.items() for name in of.shapes
    )
    holders = {before.find(name): path for path, name in held}
    holders.pop(NOTHING, None)
    if origin.model is None:
        inputs = AlignmentEvidence(inputs=input_pairs(before, after))
        rungs = iter([(inputs, "of the original, only its map is known")])
    else:
        from htp_export.alignment.evidence import weights_then_values

        rungs = weights_then_values((origin.model, before), (model, after), data, seed)
    unnamed = without_names(after)
    for evidence, not_compared in rungs:
        alignment = UnnamedAlignment(before, unnamed, evidence)
        owned = ProvedOwners(alignment, scopes, origin.calls, holders).owners()
        found = Found(nodes, _with_root(owned), alignment, not_compared)
        if not found.unknown:
            break
    for value, named in zip(unnamed.values, after.values, strict=True):
        value.name = named.name  # what was found is told by names
    return found


def names_hold(alignment: Alignment) -> bool:
    """Whether names prove that the second model was made of the first.

    Most tensors have a name of the original, and of those that structure alone identifies, nearly
    all have their own. Exporters name by type and number, so equal names may stand for other
    tensors.
    """
    before, after, numbers = alignment.before, alignment.after, alignment.numbers
    if any(alignment.counterpart[value] == NOTHING for value in (*after.inputs, *after.outputs)):
        return False
    kept = agree = contradicted = 0
    for node in after.nodes:
        for value, same in zip(node.outputs, alignment.recomputed(node), strict=True):
            if value == NOTHING or value in after.outputs or not node.inputs:
                continue
            named = before.find(after.values[value].name, node.scope)
            if named == NOTHING:
                kept += alignment.evidence_of[value] == Reason.NODE
            elif same == NOTHING:
                # two products that became one have the name of one of them
                kept += alignment.is_compatible(value, named)
            elif numbers.number[named] == numbers.number[same]:
                agree += 1
            else:
                contradicted += 1
    fewer = min(
        sum(len({*node.makes} - {*each.outputs}) for node in each.nodes if node.inputs)
        for each in (before, after)
    )
    return kept + agree >= _KEPT * fewer and contradicted <= _CONTRADICTED * (agree + contradicted)


def _with_root(owned: Sequence[Owned]) -> list[Owned]:
    """Nodes without neighbours that have owners are of the root, as far as is known."""
    return [entry if entry.paths else Owned(("",), Reason.UNKNOWN) for entry in owned]
