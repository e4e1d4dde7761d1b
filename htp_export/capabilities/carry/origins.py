"""What `carry` is given: a PyTorch model, a tagged model, or the map of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.capabilities.carry.feeds import inputs_of_call
from htp_export.capabilities.carry.graph_summary import GraphSummary, summarize
from htp_export.capabilities.carry.inlined_names import restore_names
from htp_export.capabilities.carry.maps import map_to_text, text_to_map
from htp_export.editing.flattening import InlinedCall, dissolved, read_flat
from htp_export.editing.function_records import DOMAIN
from htp_export.errors import InputError, UntaggedModelError
from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.parameters import ModuleParameters, parameters_from_json
from htp_export.format.signatures import Signature, signatures_from_json
from htp_export.model.tagged import TaggedModel, load

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Origin:
    """What is known of the original model."""

    summary: GraphSummary  # its nodes and their owners
    hierarchy: Hierarchy  # its modules
    signatures: Mapping[str, Sequence[Signature]]  # their inputs and outputs in PyTorch
    calls: CallTree  # their calls
    lasting: Mapping[str, str]  # metadata that stays true whatever a tool does: parameters, calls, earlier steps
    parameters: Mapping[str, ModuleParameters] = field(default_factory=dict)  # module path → what it holds in PyTorch
    model: ir.Model | None = None  # the model; None if only its map is known
    has_map: bool = False  # whether its metadata has a map


def exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[TaggedModel, dict[str, Any]]:
    """A fresh export of a PyTorch model, and the example inputs by the names of its inputs."""
    from htp_export.exporter.exporting import export

    program = export(model, args, kwargs=dict(kwargs or {}), verbose=False)
    assert program is not None
    tagged = load(program)
    return tagged, inputs_of_call([str(value.name) for value in tagged.model.graph.inputs], args, kwargs or {})


def from_model(tagged: TaggedModel, after: ir.Model) -> Origin:
    """From a tagged model; if the tool inlined functions that were made of modules, from its flat graph.

    A node of such a function stands for one in each call. What a tool makes of it in one of them is that call's.
    """
    if module_functions(tagged.model) != module_functions(after):
        inlined: list[InlinedCall] = []
        tagged = dissolved(tagged, inlined)
        restore_names(after, inlined)
    props = tagged.model.metadata_props
    known = tagged.hierarchy, tagged.signatures, _calls(props, tagged.hierarchy), _lasting(props)
    return Origin(_tagged_summary(tagged.model), *known, tagged.parameters or {}, tagged.model, tags.MAP in props)


def from_map(model: ir.Model) -> Origin:
    """From the map in the metadata of a model."""
    props = model.metadata_props
    if tags.MAP not in props or tags.MODULES not in props:
        raise UntaggedModelError(
            f"model {model.graph.name!r} does not say what it was made of; name the model before it too, "
            "carry(before, after), or use htp_export.embed_map(before) ahead of the tool"
        )
    try:
        signatures = signatures_from_json(props[tags.SIGNATURES]) if tags.SIGNATURES in props else {}
        parameters = parameters_from_json(props[tags.PARAMETERS]) if tags.PARAMETERS in props else {}
        hierarchy, summary = Hierarchy.from_json(props[tags.MODULES]), text_to_map(props[tags.MAP])
    except ValueError as error:
        raise InputError(f"model {model.graph.name!r}: {error}") from error
    return Origin(
        *(summary, hierarchy, signatures, _calls(props, hierarchy), _lasting(props), parameters), has_map=True
    )


def map_of(model: ir.Model) -> str:
    """The map of a tagged model: of its flat graph, as a tool may inline the functions that were made of modules."""
    return map_to_text(_tagged_summary(read_flat(model, others=False).model))


def module_functions(model: ir.Model) -> set[ir.OperatorIdentifier]:
    """The functions of a model that were made of modules."""
    return {key for key in model.functions if key[0] == DOMAIN}


def _tagged_summary(model: ir.Model) -> GraphSummary:
    """The summary of a model all of whose nodes have tags."""
    summary, _ = summarize(model, model.functions.values())
    lost = sum(not node.owners for node in summary.nodes)
    if lost:
        raise UntaggedModelError(
            f"{lost} nodes of model {model.graph.name!r} have no tags; carry them from the model as it was exported"
        )
    return summary


def _lasting(props: Mapping[str, str]) -> dict[str, str]:
    return {key: props[key] for key in (tags.PARAMETERS, tags.CALLERS, tags.PROVENANCE) if key in props}


def _calls(props: Mapping[str, str], hierarchy: Hierarchy) -> CallTree:
    try:
        return CallTree.from_json(props.get(tags.CALLERS), hierarchy)
    except ValueError as error:
        raise InputError(f"the first model: {error}") from error
