"""`adopt`: module tags for a file that others exported."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.carry import LEAST_KNOWN
from htp_export.capabilities.carry.evidence import evidence_of_foreign
from htp_export.capabilities.carry.feeds import inputs_of_call
from htp_export.capabilities.carry.foreign_alignment import ForeignAlignment, without_names
from htp_export.capabilities.carry.foreign_owners import foreign_owners
from htp_export.capabilities.carry.graph_summary import NOTHING, summarize
from htp_export.capabilities.carry.name_scopes import scope_of
from htp_export.capabilities.carry.tagging import Origin, lasting_metadata, tag
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.reasons import Reason
from htp_export.format.tags import below
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import HoldsModel, ModelSource, TaggedModel, load, model_of, name_of
from htp_export.process.garbage_collection import no_collection
from htp_export.runtime.data import Data, single_run

if TYPE_CHECKING:
    import torch

__all__ = ["Adopted", "AdoptedModule", "adopt"]


@dataclass(frozen=True)
class AdoptedModule:
    """A module in a file that others exported.

    Attributes:
        path: Its path.
        class_name: Its class.
        nodes: Number of nodes in its region.
        unknown: Number of these of which it is not known which module in this one computes them.
        fate: Its fate in the file; see ``docs/format.md``.
    """

    path: str = field(repr=False)
    class_name: str
    nodes: int
    unknown: int
    fate: str


@dataclass(frozen=True)
class Adopted(HoldsModel):
    """The result of `adopt`.

    Attributes:
        model: The file with tags on every node.
        nodes: Number of nodes, including those in subgraphs and functions.
        recovered: ``htp.reason`` → number of nodes whose owners were found by this evidence; see ``docs/format.md``.
        unknown: Names of the nodes whose owners are not known; of those without a name, their first output.
        modules: Module path → its nodes, for modules that have some.
        contamination: ``(module, tensor, leaves)`` for tensors at boundaries that are no inputs or outputs of the
            module in PyTorch.
        not_compared: Why values were not compared; empty if they were.
    """

    model: ir.Model = field(repr=False)
    nodes: int
    recovered: Mapping[str, int]
    unknown: Sequence[str]
    modules: Mapping[str, AdoptedModule]
    contamination: Sequence[tuple[str, str, bool]]
    not_compared: str = ""

    @property
    def share_known(self) -> float:
        """The share of nodes whose owners are known; 1 for a file without nodes."""
        return 1 - len(self.unknown) / self.nodes if self.nodes else 1.0

    @property
    def summary(self) -> str:
        """The result in one line."""
        return f"{self.nodes} nodes, {self.nodes - len(self.unknown)} with known owners, {len(self.unknown)} unknown"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know besides the numbers, a line each."""
        return (f"values were not compared: {self.not_compared}",) if self.not_compared else ()

    def __str__(self) -> str:
        lines = [f"{self.nodes:7} nodes"]
        lines += [f"{count:7} by {reason}" for reason, count in self.recovered.items()]
        lines += [f"{len(self.unknown):7} unknown"] if self.unknown else []
        lines += [*self.notes]
        return "\n".join(lines)


@names_model_faults("foreign")
def adopt(
    model: torch.nn.Module | ModelSource,
    foreign: ModelSource,
    output: str | os.PathLike[str] | None = None,
    args: tuple[Any, ...] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    data: Data | None = None,
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
        data: For a tagged model: the inputs of one run, as for `quantize`. None for random inputs.
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
    tagged, inputs = _original(model, args, kwargs, single_run(data, "adopt"))
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
            raise InputError("args and kwargs are example inputs of an nn.Module; for a tagged model, give data")
        tagged = read_flat(model, others=False)
        tagged.require_exact_tags()
        return tagged, inputs
    if inputs is not None:
        raise InputError("data are for a tagged model; for an nn.Module, give args and kwargs")
    from htp_export.exporter.exporting import export

    program = export(model, args, kwargs=dict(kwargs or {}), verbose=False)
    assert program is not None
    tagged = load(program)
    return tagged, inputs_of_call([str(value.name) for value in tagged.model.graph.inputs], args, kwargs or {})


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _adopted(tagged: TaggedModel, model: ir.Model, inputs: Mapping[str, Any] | None, seed: int) -> Adopted:
    before, _ = summarize(tagged.model, tagged.model.functions.values())
    after, nodes = summarize(model, model.functions.values())
    for node in after.nodes:
        node.owners, node.call, node.reason = (), "", ""
    evidence, not_compared = evidence_of_foreign((tagged.model, before), (model, after), inputs, seed)
    scopes = [scope_of(node.name or "", *(str(value.name) for value in node.outputs[:1])) for node in nodes]
    names = without_names(after)
    alignment = ForeignAlignment(before, after, evidence)
    places = {
        path: [before.find(below(path, name)) for name in of.shapes] for path, of in (tagged.parameters or {}).items()
    }
    holders = {place: path for path, found in places.items() for place in found if place != NOTHING}
    owned = foreign_owners(alignment, scopes, tagged.calls, holders)
    for value, name in zip(after.values, names, strict=True):
        value.name = name
    lasting = lasting_metadata(tagged.model.metadata_props)
    origin = Origin(before, tagged.hierarchy, tagged.signatures, tagged.calls, lasting)
    hierarchy, contamination = tag(model, nodes, owned, alignment, origin)
    reasons = [str(entry.reason) for entry in owned]
    unknown = [node for node, reason in zip(nodes, reasons, strict=True) if reason == Reason.UNKNOWN]
    return Adopted(
        model=model,
        nodes=len(nodes),
        recovered=dict(Counter(reason for reason in reasons if reason != Reason.UNKNOWN).most_common()),
        unknown=[node.name or str(node.outputs[0].name if node.outputs else "") for node in unknown],
        modules=_modules(load(model), hierarchy, unknown),
        contamination=contamination,
        not_compared=not_compared,
    )


def _modules(tagged: TaggedModel, hierarchy: Hierarchy, unknown: Sequence[ir.Node]) -> dict[str, AdoptedModule]:
    regions = {path: tagged[path].nodes for path in hierarchy}
    is_unknown = set(unknown)
    return {
        path: AdoptedModule(
            path, hierarchy[path].class_name, len(region), len(is_unknown & {*region}), hierarchy[path].fate
        )
        for path, region in regions.items()
        if region
    }
