"""The module tree of a graph whose nodes were tagged one by one, without a record of all calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import onnx_ir as ir

from htp_export.capabilities.inspect.runs import ModuleRun
from htp_export.exporter.capture.program_graph import drop_identities
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.reasons import Reason
from htp_export.shapes.operator_kinds import subgraphs

if TYPE_CHECKING:
    import torch

__all__ = ["owners_in", "tag_by_scope", "tree_of", "without_identities"]


def tag_by_scope(node: ir.Node, path: str) -> None:
    """Write that a node is of the module in whose scope it is; namespaces are those of `merged`, or of `tree_of`."""
    tags.tag_node(node.metadata_props, tags.node_tags([path], Reason.SCOPE, ()))


def without_identities(graph: ir.Graph) -> set[str]:
    """Remove nodes that give back their input, and return the modules that they were of."""
    return {owner for node in drop_identities(graph) for owner in _owners(node)}


def owners_in(graph: ir.Graph) -> set[str]:
    """The owners of all nodes."""
    return {owner for node in graph.all_nodes() for owner in tags.owners_of(node.metadata_props)}


def tree_of(model: torch.nn.Module, run: ModuleRun, owners: Collection[str], identities: Collection[str]) -> Hierarchy:
    """The module tree of a model.

    Some identities have no node: torch 2.13 has one for dropout in eval mode, torch 2.15 has none, and ``nn.Identity``
    never had one. So the run counts as well.

    Args:
        model: The model.
        run: One run of it.
        owners: The modules that own nodes.
        identities: Modules whose nodes gave back their input.
    """
    tree = Hierarchy.from_module(model)
    ran, unchanged = {*owners, *tags.all_above(owners)}, {*identities, *run.identities}

    def fate(path: str) -> str:
        if path not in ran and not run.counts.get(path):
            return "uncalled"
        return "identity" if path in unchanged and path not in ran else "computed"

    calls = {path: run.counts[path] for path in tree if run.counts.get(path)}
    return tree.with_results(calls=calls, fates={path: fate(path) for path in tree})


def _owners(node: ir.Node) -> Iterator[str]:
    yield from tags.owners_of(node.metadata_props)
    for body in subgraphs(node):
        yield from owners_in(body)
