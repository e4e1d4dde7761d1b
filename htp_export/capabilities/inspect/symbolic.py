"""A PyTorch model by symbolic tracing of ``torch.fx``: where values that Python needs do not reach the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.inspect.inspected import Inspected
from htp_export.capabilities.inspect.runs import run_once, unchanged
from htp_export.capabilities.inspect.trees import owners_in, tag_by_scope, tree_of, without_identities
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.torch_programs import lowered_graph
from htp_export.format.leaves import tensors_in
from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.parameters import parameters_of

if TYPE_CHECKING:
    import torch

__all__ = ["graph_by_symbolic_tracing"]


def graph_by_symbolic_tracing(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inspected:
    """Trace a model with stand-ins for its inputs, drop what the result does not need, and lower the rest.

    Symbolic tracing can take another branch than a run of the model (``isinstance(x, torch.Tensor)``). So the traced
    model is run, and has to give what the model gives.

    Args:
        model: The model; it is left as it was.
        args: Its arguments.
        kwargs: Its arguments by keyword.

    Raises:
        RuntimeError: The traced model gives something else than the model.
        Exception: Whatever ``torch.fx`` or ``torch.export`` raises, and errors of the model.
    """
    import torch

    names = ModuleNames(model)
    with unchanged(model, (args, kwargs)):
        traced = torch.fx.GraphModule(model, torch.fx.Tracer().trace(model))
        traced.graph.eliminate_dead_code()
        traced.recompile()
    _check(model, traced, args, kwargs)
    lowered = lowered_graph(traced, args, kwargs)
    graph = lowered.model.graph
    for node in graph.all_nodes():
        stack = (node.meta["node"].meta.get("nn_module_stack") or {}).values() if "node" in node.meta else ()
        paths = [names.aliases[str(name)] for name, _ in stack if str(name) in names.aliases]
        tag_by_scope(node, paths[-1] if paths else "")
    identities = without_identities(graph)
    tree = tree_of(model, run_once(model, args, kwargs), owners_in(graph), identities)
    write_model_metadata(lowered.model.metadata_props, tree, parameters=parameters_of(model))
    graph.name = tree.root.simple_class
    return Inspected(lowered.model, "torch.fx")


def _check(model: torch.nn.Module, traced: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Compare the results of a model and of what was traced."""
    import torch

    results = []
    for module in (model, traced):
        with unchanged(model, (args, kwargs)), torch.no_grad():
            results.append([tensor.clone() for tensor in tensors_in(module(*args, **kwargs))])
    expected, found = results
    same = len(expected) == len(found) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, equal_nan=True)
        for a, b in zip(expected, found, strict=True)
    )
    if not same:
        raise RuntimeError("the model that torch.fx traced gives another result than the model")
