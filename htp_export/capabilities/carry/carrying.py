"""`carry`: module tags for any model of the same network."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.alignment.carried_owners import tag
from htp_export.alignment.ladder import Found, find_owners
from htp_export.alignment.origin_map import Origin, from_map, from_model, map_of, module_functions
from htp_export.alignment.stored_weights import carry_recipes
from htp_export.capabilities.carry import LEAST_KNOWN
from htp_export.editing.flattening import dissolve
from htp_export.errors import InputError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.tags import Reason
from htp_export.model.assumed_values import ReadParameters
from htp_export.model.model_faults import names_model_faults
from htp_export.model.regions import name_of_node
from htp_export.model.tagged import (
    HoldsModel,
    ModelSource,
    TaggedModel,
    is_of_user,
    load,
    model_of,
    name_of,
)
from htp_export.process.argument_types import is_torch_module
from htp_export.process.restoring import no_collection
from htp_export.runtime.carried_inputs import inputs_of_call
from htp_export.runtime.data import Data
from htp_export.runtime.settings import DEFAULTS, RunSettings

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class CarriedModule:
    """A module in the tagged model.

    Attributes:
        path: Its path.
        class_name: Its class.
        nodes: Number of nodes in its region.
        unknown: Number of these whose owner is unknown.
        fate: Its fate; see ``docs/format.md``.
    """

    path: str = field(repr=False)
    class_name: str
    nodes: int
    unknown: int
    fate: str


@dataclass(frozen=True)
class Carried(HoldsModel):
    """The result of `carry`.

    Attributes:
        model: The model ``after``, with tags on every node.
        nodes: Number of nodes, also in subgraphs and functions.
        kept: Number of nodes whose tags the tool kept and which are correct.
        recovered: ``htp.reason`` → number of other nodes whose owners were found by this evidence;
            see ``docs/format.md``.
        unknown: Names of the nodes with unknown owners; for a node without a name, its first
            output.
        modules: Module path → its nodes, for modules that have some.
        fates: Module path → new fate, for modules whose fate changed: ``fused`` if a tensor at the
            boundary was removed, ``constant`` if the module was folded.
        contamination: ``(module, tensor, leaves)`` for tensors at boundaries that are not inputs or
            outputs of the module in PyTorch.
        not_compared: Why values were not compared although nodes are unknown; else empty.
    """

    model: ir.Model = field(repr=False)
    nodes: int
    kept: int
    recovered: Mapping[str, int]
    unknown: Sequence[str]
    modules: Mapping[str, CarriedModule]
    fates: Mapping[str, str]
    contamination: Sequence[tuple[str, str, bool]]
    not_compared: str = ""

    @property
    def share_known(self) -> float:
        """The share of nodes whose owners are known; 1 for a file without nodes."""
        return 1 - len(self.unknown) / self.nodes if self.nodes else 1.0

    @property
    def summary(self) -> str:
        """The result in one line."""
        known = f"{len(self.unknown)} with unknown owners" if self.unknown else "all with owners"
        kept = f"; {self.kept} kept their tags" if self.kept else ""
        return f"{self.nodes} nodes, {known}{kept}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Limits of the result that its numbers do not show, a line each."""
        return (f"values were not compared: {self.not_compared}",) if self.not_compared else ()

    def __str__(self) -> str:
        lines = [f"{self.nodes:7} nodes" + ("" if self.unknown else ", all with owners")]
        if self.kept:
            lines.append(f"{self.kept:7} kept their tags")
        for reason, count in self.recovered.items():
            lines.append(f"{count:7} by {reason}")
        if self.unknown:
            lines.append(f"{len(self.unknown):7} unknown")
        for fate, count in Counter(self.fates.values()).items():
            lines.append(f"{count:7} modules now {fate}")
        if self.contamination:
            lines.append(f"{len(self.contamination):7} boundary tensors that are none in PyTorch")
        return "\n".join([*lines, *self.notes])


@names_model_faults("before", "after")
def carry(
    before: nn.Module | ModelSource | None,
    after: ModelSource | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    require: float = LEAST_KNOWN,
    data: Data | None = None,
    seed: int = 0,
    share_weights: bool = False,
) -> Carried:
    """Add module tags to the result of a tool, or to another export of the same network.

    A node that replaces an original node gets its owners; a node that replaces several gets all of
    their owners; an inserted node (quantizer, cast, layout operator) gets the owners of its
    consumers. A module that lost a tensor at its boundary becomes ``fused``, with the modules with
    which it was merged.

    Evidence is used in this order, until the owners of all nodes are known:

    1. Names and structure, if the names prove that ``after`` derives from ``before``. Nothing is
       run.
    2. Weights: equal, or cast, transposed, joined, cut, scaled or quantized.
    3. Values: both models run in ONNX Runtime, without its optimisations.

    A node without a proved owner has the reason ``unknown``, and belongs to the innermost module
    that is certain. See ``docs/carry.md``.

    Thread-safe, also for calls on the same model; exports of modules run one after the other.

    Args:
        before: The original. A tagged model, in any form that `load` accepts; a model with the map
            that `embed_map` wrote before a tool ran; or an ``nn.Module``, which is exported with
            ``args`` and ``kwargs``. If there is only ``after``, with a map, call ``carry(after)``.
        after: The model to tag. A model in memory is not changed.
        output: The file to write; its weights stay external if they are.
        args: Example positional inputs of an ``nn.Module``.
        kwargs: Example keyword inputs of an ``nn.Module``.
        require: The smallest share of nodes with known owners, from 0 to 1. If it is not reached,
            the models are not the same, or too different.
        data: For a tagged model: the inputs of one run, as for `quantize`, with the names of
            ``before``. Both models run on them if values are needed. None for random inputs.
            Constant inputs and zeros are weak evidence.
        seed: The seed of random inputs.
        share_weights: Keep external weights in the data file of another model in the folder of
            ``output``, without a copy.

    Returns:
        The model with tags, the evidence for them, and the nodes whose owners are unknown.

    Raises:
        UntaggedModelError: ``before`` has neither tags of htp_export nor a map; or there is no
            ``before``, and ``after`` has no map.
        InputError: The data are not the inputs of the original, or it cannot run on them; or fewer
            owners are known than ``require``.
        FileError: A file cannot be read or written.
        Exception: Errors of the export of an ``nn.Module``.

    Examples:
        >>> import torch, htp_export
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).eval(), torch.randn(2, 8)
        >>> program = htp_export.export(net, (x,), verbose=False)
        >>> plain = torch.onnx.export(net, (x,), dynamo=True, verbose=False)
        >>> print(carry(program, plain))
              2 nodes, all with owners
              2 by tensor
        >>> carry(net, plain, args=(x,)).unknown
        []
    """
    settings = RunSettings(data, seed=seed)
    check_target(output)
    if after is None:
        before, after = None, before
    if after is None or is_torch_module(after):
        raise InputError("name the model to carry tags to: carry(before, after)")
    with no_collection(kept=True):
        model = model_of(after)
        if is_of_user(model, after):
            model = model.clone()
        if is_torch_module(before):
            if data is not None:
                raise InputError(
                    "data are for a tagged model; for an nn.Module, give args and kwargs"
                )
            before, inputs = _exported(before, args, kwargs)
            settings = replace(settings, data=inputs)
        elif args or kwargs:
            raise InputError(
                "args and kwargs are example inputs of an nn.Module; for a tagged model, give data"
            )
        else:
            settings = settings.with_one_run("carry")
        result = _carried(_origin(before, model, settings.data), model, settings)
    if result.share_known < require:
        raise InputError(
            f"{result.share_known:.1%} of the nodes of {name_of(after, 'the second model')} have known owners, less "
            f"than require={require}: it seems to be no file of this model, or one with other weights; nothing was "
            "written"
        )
    if output is not None:
        write_model(model, output, share_weights=share_weights)
    return result


def carry_in_place(before: ModelSource, after: ir.Model) -> Carried:
    """Carry tags onto a model that certainly derives from the first one, and may be changed."""
    return _carried(_origin(before, after), after, sure=True)


def _exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[TaggedModel, dict[str, Any]]:
    """Export a PyTorch model; return its program, and the example inputs by name."""
    from htp_export.exporter.capture.model_state import unchanged
    from htp_export.exporter.exporting import export

    with unchanged(model, (args, kwargs), traced=True):
        program = export(model, args, kwargs=dict(kwargs or {}), verbose=False)
    assert program is not None
    tagged = load(program)
    return tagged, inputs_of_call(
        [str(value.name) for value in tagged.model.graph.inputs], args, kwargs or {}
    )


def _origin(before: Any, after: ir.Model, data: object = None) -> Origin:
    """Describe the original by its tags or map, or by the map of the other model without one."""
    if before is None:
        if data is not None:
            raise InputError(
                "to find tensors by their values, the model before has to run too: carry(before, after)"
            )
        return from_map(after)
    tagged = load(before)
    props, nodes = tagged.model.metadata_props, tagged.nodes
    if tags.MAP in props and not any(tags.owners_of(node.metadata_props) for node in nodes):
        return from_map(tagged.model)
    tagged.require_exact_tags()
    return from_model(tagged, after)


def _carried(
    origin: Origin,
    model: ir.Model,
    settings: RunSettings = DEFAULTS,
    sure: bool = False,
) -> Carried:
    """Carry tags onto a model, in place; arguments as of `find_owners`."""
    functions = module_functions(model)
    if functions and (origin.model is None or functions != module_functions(origin.model)):
        dissolve(model, origin.hierarchy, origin.calls)
    found = find_owners(origin, model, settings, sure)
    hierarchy, contamination = tag(model, found.nodes, found.owned, found.alignment, origin)
    carry_recipes(origin.model, model)
    if origin.model is not None:
        ReadParameters.of(origin.model).record_assumed(model)
    if origin.has_map:
        model.metadata_props[tags.MAP] = map_of(model)
    recovered = Counter(str(entry.reason) for entry in found.owned if not entry.kept)
    del recovered[Reason.UNKNOWN]
    changed = {}
    for path, info in hierarchy.items():
        if info.fate != origin.hierarchy[path].fate:
            changed[path] = info.fate
    return Carried(
        model=model,
        nodes=len(found.nodes),
        kept=sum(entry.kept for entry in found.owned),
        recovered=dict(recovered.most_common()),
        unknown=[*map(name_of_node, found.unknown)],
        modules=_modules(found, hierarchy),
        fates=changed,
        contamination=contamination,
        not_compared=found.not_compared,
    )


def _modules(found: Found, hierarchy: Hierarchy) -> dict[str, CarriedModule]:
    """The modules of the result that have nodes."""
    nodes, unknown = Counter[str](), Counter[str]()
    # Many nodes have the same owners and reason.
    groups = Counter((entry.paths, entry.reason) for entry in found.owned)
    for (owners, reason), count in groups.items():
        for path in dict.fromkeys(path for owner in owners for path in tags.ancestors(owner)):
            nodes[path] += count
            unknown[path] += count * (reason == Reason.UNKNOWN)
    modules = {}
    for path, info in hierarchy.items():
        if nodes[path]:
            of_module = nodes[path], unknown[path]
            modules[path] = CarriedModule(path, info.class_name, *of_module, info.fate)
    return modules
