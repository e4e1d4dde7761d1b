"""One run of a PyTorch model: the arguments of its modules, and its module tree."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.editing.edit import Edit
from htp_export.exporter.capture.model_state import unchanged
from htp_export.exporter.capture.torch_internals import changes_of
from htp_export.exporter.torch_programs import drop_identities
from htp_export.format import tags
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, module_paths
from htp_export.format.leaves import tensors_in
from htp_export.format.tags import Reason
from htp_export.lineage.tagging import Owned
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import subgraphs

if TYPE_CHECKING:
    import torch


@dataclass
class ModuleRun:
    """Observed module calls of a run: the arguments of the first call, and the number of calls.

    ``error`` ended the run before it was complete. ``returned_inputs``: whether each call returned
    only inputs, unchanged, and at least one tensor.
    """

    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    error: Exception | None = None
    returned_inputs: dict[str, bool] = field(default_factory=dict)
    _entered: dict[str, dict[int, int]] = field(default_factory=dict)

    @property
    def identities(self) -> set[str]:
        """The modules that returned their inputs."""
        return {path for path, returned in self.returned_inputs.items() if returned}

    def _enter(
        self,
        path: str,
        _: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.given.setdefault(path, (args, kwargs))
        self.counts[path] += 1
        self._entered[path] = _states((args, kwargs))

    def _leave(
        self,
        path: str,
        _module: object,
        _args: object,
        _kwargs: object,
        returned: Any,
    ) -> None:
        results = _states(returned)
        same = bool(results) and results.items() <= self._entered[path].items()
        self.returned_inputs[path] = self.returned_inputs.get(path, True) and same


def _states(tree: Any) -> dict[int, int]:
    """``id`` of each tensor → how often it was changed in place."""
    return {id(tensor): changes_of(tensor) for tensor in tensors_in(tree)}


def run_once(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> ModuleRun:
    """Run a model once, without gradients, and record the calls of its modules."""
    import torch

    run = ModuleRun()
    with unchanged(model, (args, kwargs)), contextlib.ExitStack() as hooks, torch.no_grad():
        for path, _, module in module_paths(model):
            enter = functools.partial(run._enter, path)
            leave = functools.partial(run._leave, path)
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        try:
            model(*args, **kwargs)
        except Exception as error:  # the calls before it are recorded
            run.error = error
    return run


def edit_by_scopes(model: ir.Model, tree: Hierarchy, path_of: Callable[[ir.Node], str]) -> Edit:
    """Begin an edit of a graph without tags: each node belongs to the module in whose scope it is.

    Args:
        model: The model; it is changed in place.
        tree: The modules.
        path_of: Returns the path of a node's module.
    """
    edit = Edit(TaggedModel(model, tree))
    for node in list(model.graph.all_nodes()):
        edit.set_owners(node, Owned((path_of(node),), Reason.SCOPE))
    return edit


def without_identities(graph: ir.Graph) -> set[str]:
    """Remove nodes that return their input, and return their owners."""
    owners: set[str] = set()
    for node in drop_identities(graph):
        owners.update(tags.owners_of(node.metadata_props))
        for body in subgraphs(node):
            owners |= owners_in(body)
    return owners


def owners_in(graph: ir.Graph) -> set[str]:
    """The owners of all nodes."""
    return {owner for node in graph.all_nodes() for owner in tags.owners_of(node.metadata_props)}


def tree_of(
    model: torch.nn.Module,
    run: ModuleRun,
    owners: Collection[str],
    identities: Collection[str],
) -> Hierarchy:
    """The module tree of a model, with fates.

    Some identities have no node: torch 2.13 has one for dropout in eval mode, torch 2.15 has none,
    and ``nn.Identity`` never had one. Therefore the run counts as well as ``identities``, the
    modules whose nodes returned their input.
    """
    tree = Hierarchy.from_module(model)
    has_nodes = {*owners, *tags.all_above(owners)}
    returned_input = {*identities, *run.identities}

    def fate(path: str) -> Fate:
        if path in has_nodes:
            return Fate.COMPUTED
        if not run.counts.get(path):
            return Fate.UNCALLED
        if path in returned_input:
            return Fate.IDENTITY
        return Fate.COMPUTED

    calls = {path: run.counts[path] for path in tree if run.counts.get(path)}
    return tree.with_results(calls=calls, fates={path: fate(path) for path in tree})
