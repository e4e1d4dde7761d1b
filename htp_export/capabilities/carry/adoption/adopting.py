"""`adopt`: module tags for a file that others exported."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.carry.adoption import LEAST_KNOWN
from htp_export.capabilities.carry.adoption.adopted import Adopted, AdoptedModule
from htp_export.capabilities.carry.adoption.feeds import inputs_in_order
from htp_export.capabilities.carry.adoption.foreign_alignment import ForeignAlignment, without_names
from htp_export.capabilities.carry.adoption.foreign_owners import foreign_owners
from htp_export.capabilities.carry.adoption.gathering import gather
from htp_export.capabilities.carry.adoption.name_scopes import scope_of
from htp_export.capabilities.carry.carrying import lasting_metadata, write_tags
from htp_export.capabilities.carry.fates import CarriedEvidence
from htp_export.capabilities.carry.graph_summary import NOTHING, GraphSummary, summarize
from htp_export.capabilities.carry.ownership import Owned
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.reasons import Reason
from htp_export.model.fates import find_fates
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, load, model_of, name_of
from htp_export.process.garbage_collection import no_collection

if TYPE_CHECKING:
    import torch

__all__ = ["adopt"]


@names_model_faults("foreign")
def adopt(
    model: torch.nn.Module | ModelSource,
    foreign: ModelSource,
    output: str | os.PathLike[str] | None = None,
    args: tuple[Any, ...] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    seed: int = 0,
    require: float = LEAST_KNOWN,
    share_weights: bool = False,
) -> Adopted:
    """Tag a file that someone else exported from a PyTorch model.

    The file need not have the names or operators of the original: tools write it with other weights formats, joined
    projections and fused operators. Owners are found by evidence: weights with the same numbers, also if they are cast,
    transposed, joined, cut or quantized; tensors with the same numbers when both models run; the operations between
    tensors that are known; and scopes in names of nodes, where these are proved by the rest. A node whose owners are
    not known has the reason ``unknown``, and as its module the innermost one that is certain. See ``docs/adopt.md``.

    Both models run in ONNX Runtime, on the CPU, without optimisations. If the other file does not run, its weights and
    names decide alone, and a note says so.

    Thread-safe, also for calls on the same model; exports of modules run one after the other.

    Args:
        model: The original: an ``nn.Module``, which is exported with ``args`` and ``kwargs``; or a tagged model, as
            `load` takes it.
        foreign: The file to tag: whatever `load` takes. A model in memory is not changed.
        output: The file to write; its weights stay external if they are.
        args: Example positional inputs of an ``nn.Module``.
        kwargs: Example keyword inputs of an ``nn.Module``.
        inputs: For a tagged model: input name → array, on which both models run. None for random inputs.
        seed: Of random inputs.
        require: The share of nodes whose owners have to be known, from 0 to 1: with fewer, the models are not the same,
            or the file is too different.
        share_weights: Leave external weights in the data file of another model in the folder of ``output``.

    Returns:
        The file with tags, the evidence for them, and the nodes whose owners are not known.

    Raises:
        InputError: The inputs are not those of the original; fewer owners are known than ``require`` asks for; or a
            model is invalid.
        UntaggedModelError: ``model`` is a file without tags of htp_export.
        FileError: A file cannot be read or written.
        Exception: Errors of the export of an ``nn.Module``.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).eval()
        >>> foreign = torch.onnx.export(net, (torch.randn(2, 8),), dynamo=True, verbose=False)
        >>> print(adopt(net, foreign, args=(torch.randn(2, 8),)))
              2 nodes
              2 by region
    """
    check_target(output)
    tagged, inputs = _original(model, args, kwargs, inputs)
    with no_collection(kept=True):
        after = model_of(foreign)
        if not isinstance(foreign, str | os.PathLike | onnx.ModelProto):  # those were read into a model of our own
            after = after.clone()
        result = _adopted(tagged, after, inputs, seed)
    if result.share_known < require:
        raise InputError(
            f"{result.share_known:.1%} of the nodes of {name_of(foreign, 'the file')} have known owners, less than "
            f"require={require}: it seems to be no file of this model, or one with other weights; nothing was written"
        )
    if output is not None:
        write_model(after, output, share_weights=share_weights)
    return result


def _original(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, inputs: Mapping[str, Any] | None
) -> tuple[TaggedModel, Mapping[str, Any] | None]:
    """The tagged model of the original, without functions, and its inputs."""
    if not _is_module(model):
        if args or kwargs:
            raise InputError("args and kwargs are example inputs of an nn.Module; for a tagged model, give inputs")
        tagged = read_flat(model, others=False)
        tagged.require_exact_tags()
        return tagged, inputs
    if inputs is not None:
        raise InputError("inputs are for a tagged model; for an nn.Module, give args and kwargs")
    import torch

    from htp_export.exporter.exporting import export

    program = export(model, args, kwargs=dict(kwargs or {}), verbose=False)
    assert program is not None
    tagged = load(program)
    names = [str(value.name) for value in tagged.model.graph.inputs]
    by_keyword = {name: value for name, value in (kwargs or {}).items() if isinstance(value, torch.Tensor)}
    if set(names) == set(by_keyword):
        return tagged, by_keyword
    return tagged, inputs_in_order(names, args, kwargs or {})


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _adopted(tagged: TaggedModel, model: ir.Model, inputs: Mapping[str, Any] | None, seed: int) -> Adopted:
    before, _ = summarize(tagged.model, tagged.model.functions.values())
    after, nodes = summarize(model, model.functions.values())
    for node in after.nodes:
        node.owners, node.call, node.reason = (), "", ""
    evidence, not_compared = gather((tagged.model, before), (model, after), inputs, seed)
    scopes = [scope_of(node.name or "", *(str(value.name) for value in node.outputs[:1])) for node in nodes]
    names = without_names(after)
    alignment = ForeignAlignment(before, after, evidence)
    owned = foreign_owners(alignment, scopes, tagged.calls, _holders(tagged, before))
    for value, name in zip(after.values, names, strict=True):
        value.name = name
    hierarchy, contamination = _write(tagged, model, (alignment, after), nodes, owned)
    unknown = [
        node.name or str(node.outputs[0].name if node.outputs else "")
        for node, entry in zip(nodes, owned, strict=True)
        if entry.reason == Reason.UNKNOWN
    ]
    counts = Counter(str(entry.reason) for entry in owned if entry.reason != Reason.UNKNOWN)
    return Adopted(
        model=model,
        nodes=len(nodes),
        recovered=dict(counts.most_common()),
        unknown=unknown,
        modules=_modules(load(model), hierarchy),
        contamination=contamination,
        not_compared=not_compared,
    )


def _holders(tagged: TaggedModel, before: GraphSummary) -> dict[int, str]:
    """Weight → the module that holds it as a parameter."""
    holders = {}
    for name, parameter in (tagged.declared or {}).items():
        index = before.find(name)
        if index != NOTHING:
            holders[index] = parameter.module
    return holders


def _write(
    tagged: TaggedModel,
    model: ir.Model,
    aligned: tuple[ForeignAlignment, GraphSummary],
    nodes: Sequence[ir.Node],
    owned: Sequence[Owned],
) -> tuple[Hierarchy, list[tuple[str, str, bool]]]:
    alignment, after = aligned
    works = [tagged.calls.work(entry.paths, entry.call) for entry in owned]
    evidence = CarriedEvidence(alignment, tagged.hierarchy, tagged.signatures, works, tagged.calls)
    hierarchy, unknown = find_fates(tagged.hierarchy, evidence)
    contamination = list(dict.fromkeys((path, after.values[value].name, leaves) for path, value, leaves in unknown))
    write_tags(model, nodes, owned, hierarchy, evidence.signatures(), contamination)
    model.metadata_props.update(lasting_metadata(tagged.model.metadata_props))
    return hierarchy, contamination


def _modules(tagged: TaggedModel, hierarchy: Hierarchy) -> dict[str, AdoptedModule]:
    modules = {}
    for path, info in hierarchy.items():
        region = tagged[path].nodes
        if region:
            unknown = sum(node.metadata_props.get("htp.reason") == Reason.UNKNOWN for node in region)
            modules[path] = AdoptedModule(path, info.class_name, len(region), unknown, info.fate)
    return modules
