"""`carry`: module tags for the result of any other tool."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.carry.alignment import Alignment, AlignmentEvidence
from htp_export.capabilities.carry.graph_summary import NOTHING, GraphSummary, summarize
from htp_export.capabilities.carry.inlined_names import restore_names
from htp_export.capabilities.carry.maps import map_to_text, text_to_map
from htp_export.capabilities.carry.ownership import owners_after
from htp_export.capabilities.carry.replaced_nodes import replaced_nodes
from htp_export.capabilities.carry.tagging import Origin, lasting_metadata, tag
from htp_export.editing.flattening import InlinedCall, dissolve, dissolved, read_flat
from htp_export.editing.function_records import DOMAIN
from htp_export.errors import InputError, UntaggedModelError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.signatures import signatures_from_json
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import HoldsModel, ModelSource, TaggedModel, load, model_of
from htp_export.process.garbage_collection import no_collection
from htp_export.runtime.data import Data, single_run

__all__ = ["Carried", "carry", "carry_in_place", "embed_map", "tagged_model"]


@dataclass(frozen=True)
class Carried(HoldsModel):
    """The result of `carry`.

    Attributes:
        model: The model after the tool, with tags on every node.
        nodes: Number of nodes, including those in subgraphs and functions.
        kept: Number of nodes whose tags the tool kept and which are correct.
        recovered: ``htp.reason`` → number of other nodes whose owners were found by this evidence; see
            ``docs/format.md``.
        fates: Module path → new fate, for modules whose fate changed: ``fused`` if a tensor at the boundary is gone,
            ``constant`` if the tool folded the module.
        contamination: ``(module, tensor, leaves)`` for tensors at boundaries that are no inputs or outputs of the
            module in PyTorch.
    """

    model: ir.Model = field(repr=False)
    nodes: int
    kept: int
    recovered: Mapping[str, int]
    fates: Mapping[str, str]
    contamination: Sequence[tuple[str, str, bool]]

    @property
    def summary(self) -> str:
        """The result in one line."""
        return f"{self.nodes} nodes, all with owners; {self.kept} kept their tags"

    def __str__(self) -> str:
        lines = [f"{self.nodes:7} nodes, all with owners", f"{self.kept:7} kept their tags"]
        lines += [f"{count:7} by {reason}" for reason, count in self.recovered.items()]
        lines += [f"{count:7} modules now {fate}" for fate, count in Counter(self.fates.values()).items()]
        if self.contamination:
            lines.append(f"{len(self.contamination):7} boundary tensors that are none in PyTorch")
        return "\n".join(lines)


@names_model_faults("before", "after")
def carry(
    before: ModelSource | None,
    after: ModelSource | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    data: Data | None = None,
    share_weights: bool = False,
) -> Carried:
    """Restore module tags after another tool has processed a tagged model.

    A node that computes the same as an original node gets its owners; a node that does the work of several gets all of
    their owners; an inserted node (quantizers, casts, layouts) gets those of the nodes that it serves. A module that
    lost a tensor at its boundary becomes ``fused``, with the modules with which it was merged.

    No weights are read, and nothing is run, unless ``data`` are given: then both models run once in ONNX Runtime
    without its optimisations, and tensors with equal values are matched if names and structure do not decide. This
    helps with tools that rename tensors.

    Thread-safe, also for calls on the same model.

    Args:
        before: The tagged model before the tool: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or
            ``ir.Model``. If it is not available, call ``carry(after)``: the map that `embed_map` wrote before the tool
            ran is used.
        after: The model after the tool. Models in memory are not changed.
        output: The file to write; its weights stay external if they are.
        data: The inputs of one run, as for `quantize`, with the names of ``before``. Those that are constant or zero
            give little evidence.
        share_weights: Leave external weights in the data file of another model in the folder of ``output``, and write
            no copy. If that file changes, ``output`` cannot be read any more.

    Returns:
        The model after the tool with tags, and the evidence for them.

    Raises:
        UntaggedModelError: ``before`` has no tags of htp_export; or there is no ``before``, and ``after`` has no map.
        InputError: ``after`` has inputs or outputs that ``before`` does not have; or there are ``data``, and
            ``before`` is missing or a model does not run on them.
        FileError: A file cannot be read or written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> stripped = program.model.clone()
        >>> for node in stripped.graph:
        ...     node.metadata_props.clear()
        >>> print(carry(program, stripped))
              2 nodes, all with owners
              0 kept their tags
              2 by tensor
    """
    if after is None:
        before, after = None, before
    if after is None:
        raise InputError("no model to carry tags to")
    with no_collection(kept=True):
        model = model_of(after)
        if not isinstance(after, str | os.PathLike | onnx.ModelProto):  # those were read into a model of our own
            model = model.clone()
        inputs = single_run(data, "carry")
        return carry_in_place(before, model, output, inputs, share_weights=share_weights)


def carry_in_place(
    before: ModelSource | None,
    after: ir.Model,
    output: str | os.PathLike[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    share_weights: bool = False,
) -> Carried:
    """`carry` onto a model that may be changed."""
    if before is None and inputs is not None:
        raise InputError("to find tensors by their values, the model before has to run too: carry(before, after, ...)")
    check_target(output)
    result = _carried(_from_map(after) if before is None else _from_model(before, after), after, inputs)
    if output is not None:
        write_model(after, output, share_weights=share_weights)
    return result


@names_model_faults("model")
def embed_map(model: ModelSource, output: str | os.PathLike[str] | None = None) -> ir.Model:
    """Write what `carry` needs to know about a tagged model into its metadata.

    `carry` can then restore the tags without this model. The map takes about 30 bytes a node: operators, names and
    shapes of tensors, and owners; no weights. Nearly all tools keep it. `carry` and the adapters in
    ``htp_export.tools`` rewrite it; passes and ``splice`` remove it, because it describes the graph as it is now.

    Thread-safe, also for calls on the same model.

    Args:
        model: The tagged model; a model in memory is not changed.
        output: The file to write; None to only return the model.

    Returns:
        The model with the map.

    Raises:
        UntaggedModelError: The model has no tags of htp_export.
        FileError: A file cannot be read or written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> mapped = embed_map(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> for node in mapped.graph:
        ...     node.metadata_props.clear()
        >>> carry(mapped).recovered
        {'tensor': 2}
    """
    check_target(output)
    mapped = tagged_model(model)
    mapped.metadata_props[tags.MAP] = _map_of(mapped)
    if output is not None:
        write_model(mapped, output)
    return mapped


def tagged_model(source: ModelSource) -> ir.Model:
    """A tagged model that may be changed: that of a file, or a copy of one in memory.

    Raises:
        UntaggedModelError: It has no tags of htp_export, or lost some.
    """
    model = _tagged(source).model
    return model if isinstance(source, str | os.PathLike) else model.clone()


def _tagged(source: ModelSource) -> TaggedModel:
    tagged = load(source)
    tagged.require_exact_tags()
    return tagged


def _tagged_summary(model: ir.Model) -> GraphSummary:
    """The summary of a model all of whose nodes have tags."""
    summary, _ = summarize(model, model.functions.values())
    lost = sum(not node.owners for node in summary.nodes)
    if lost:
        raise UntaggedModelError(
            f"{lost} nodes of model {model.graph.name!r} have no tags; carry them from the model as it was exported"
        )
    return summary


def _map_of(model: ir.Model) -> str:
    """The map of a tagged model: of its flat graph, as a tool may inline the functions that were made of modules."""
    return map_to_text(_tagged_summary(read_flat(model, others=False).model))


def _from_model(source: ModelSource, after: ir.Model) -> Origin:
    """From the model before; if the tool inlined functions that were made of modules, from its flat graph.

    A node of such a function stands for one in each call. What a tool makes of it in one of them is that call's.
    """
    tagged = _tagged(source)
    if _module_functions(tagged.model) != _module_functions(after):
        inlined: list[InlinedCall] = []
        tagged = dissolved(tagged, inlined)
        restore_names(after, inlined)
    props = tagged.model.metadata_props
    summary, lasting = _tagged_summary(tagged.model), lasting_metadata(props)
    calls = _calls(lasting, tagged.hierarchy)
    return Origin(summary, tagged.hierarchy, tagged.signatures, calls, lasting, tagged.model, tags.MAP in props)


def _from_map(model: ir.Model) -> Origin:
    """From the map in the model after the tool."""
    props = model.metadata_props
    if tags.MAP not in props or tags.MODULES not in props:
        raise UntaggedModelError(
            f"model {model.graph.name!r} does not say what it was made of; name the model before it too, "
            "carry(before, after), or use htp_export.embed_map(before) ahead of the tool"
        )
    try:
        signatures = signatures_from_json(props[tags.SIGNATURES]) if tags.SIGNATURES in props else {}
        hierarchy, summary = Hierarchy.from_json(props[tags.MODULES]), text_to_map(props[tags.MAP])
    except ValueError as error:
        raise InputError(f"model {model.graph.name!r}: {error}") from error
    lasting = lasting_metadata(props)
    return Origin(summary, hierarchy, signatures, _calls(lasting, hierarchy), lasting, has_map=True)


def _calls(lasting: Mapping[str, str], hierarchy: Hierarchy) -> CallTree:
    try:
        return CallTree.from_json(lasting.get(tags.CALLERS), hierarchy)
    except ValueError as error:
        raise InputError(f"the first model: {error}") from error


def _module_functions(model: ir.Model) -> set[ir.OperatorIdentifier]:
    return {key for key in model.functions if key[0] == DOMAIN}


def _carried(origin: Origin, model: ir.Model, inputs: Mapping[str, Any] | None) -> Carried:
    functions = _module_functions(model)
    if functions and (origin.model is None or functions != _module_functions(origin.model)):
        dissolve(model, origin.hierarchy, origin.calls)
    after, nodes = summarize(model, model.functions.values())
    evidence = AlignmentEvidence()
    if origin.model is not None:
        from htp_export.capabilities.carry.evidence import evidence_of_tool  # it loads numpy, and ONNX Runtime

        evidence = evidence_of_tool((origin.model, origin.summary), (model, after), inputs)
    alignment = Alignment(origin.summary, after, evidence)
    for value in (*after.inputs, *after.outputs):
        if alignment.counterpart[value] == NOTHING:
            raise InputError(
                f"the second model was not made of the first, which has no {after.values[value].name!r} of that shape"
            )
    owners = owners_after(origin.summary, after, replaced_nodes(alignment), origin.calls)
    owned = [entry if entry.paths else replace(entry, paths=("",)) for entry in owners]
    hierarchy, contamination = tag(model, nodes, owned, alignment, origin)
    if origin.has_map:
        model.metadata_props[tags.MAP] = _map_of(model)
    return Carried(
        model=model,
        nodes=len(nodes),
        kept=sum(entry.kept for entry in owned),
        recovered=dict(Counter(str(entry.reason) for entry in owned if not entry.kept).most_common()),
        fates={path: info.fate for path, info in hierarchy.items() if info.fate != origin.hierarchy[path].fate},
        contamination=contamination,
    )
