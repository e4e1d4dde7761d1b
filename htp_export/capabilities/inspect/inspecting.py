"""`inspect`: the graph of a PyTorch model, by the best way that there is."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import onnx_ir as ir

from htp_export.capabilities.inspect.breaks import graphs_with_breaks
from htp_export.capabilities.inspect.inspected import Inspected, Stop, Way
from htp_export.capabilities.inspect.parts import Parts
from htp_export.capabilities.inspect.runs import (
    owners_in,
    run_once,
    tag_by_scope,
    tree_of,
    unchanged,
    without_identities,
)
from htp_export.capabilities.inspect.stops import reason_of, stop_of
from htp_export.errors import InputError
from htp_export.exporter.broken_graphs import dynamo_as_it_was
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.patches import translations_read_once
from htp_export.exporter.exporting import export
from htp_export.exporter.torch_programs import exported_graph, lowered_graph
from htp_export.format import tags
from htp_export.format.leaves import tensors_in
from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.parameters import parameters_of

if TYPE_CHECKING:
    import torch

__all__ = ["inspect"]

_log = logging.getLogger(__name__)

_Made = TypeVar("_Made")


def inspect(model: torch.nn.Module, args: Any = (), *, kwargs: Mapping[str, Any] | None = None) -> Inspected:
    """Make a graph of a PyTorch model with its module tree, also if the model does not export to ONNX.

    Ways are tried one after the other, and the result names the one that it was got by, and where each better one
    ended: the export to ONNX; ``torch.export`` alone, whose operators need no translation; symbolic tracing by
    ``torch.fx``; Dynamo's graphs with breaks; the modules one by one, with what they are given in one run of the model.
    ``docs/inspection.md`` describes the graphs.

    No other thread may use the model meanwhile.

    Args:
        model: The model; it is left as it was.
        args: Its positional arguments, or the only one.
        kwargs: Its keyword arguments.

    Returns:
        The graph. ``cost``, ``view``, ``load`` and other functions that write no model take it; it cannot be saved
        unless it came from the export to ONNX.

    Raises:
        InputError: There is no graph by any way; the message has the reasons.

    Examples:
        >>> import torch
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.fc = torch.nn.Linear(4, 4)
        ...     def forward(self, x):
        ...         return torch.linalg.qr(self.fc(x))[0]  # ONNX has no such operator
        >>> inspected = inspect(Net().eval(), torch.eye(4))
        >>> inspected.way, [(stop.way, stop.module) for stop in inspected.stopped]
        ('torch.export', [('onnx', '')])
        >>> [(node.op_type, node.metadata_props["htp.module"]) for node in inspected.model.graph]
        [('linear', 'fc'), ('linalg_qr', '')]
    """
    given = tuple(args) if isinstance(args, tuple | list) else (args,)
    named = dict(kwargs or {})
    path_by_id = ModuleNames(model).by_id
    stopped: list[Stop] = []
    with dynamo_as_it_was(), translations_read_once():
        for way, make in _WAYS.items():
            try:
                found = _quietly(make, model, given, named)
            except Exception as error:  # whatever torch raises on what it cannot trace
                stopped.append(stop_of(way, error, path_by_id))
                _log.debug("%s", stopped[-1], exc_info=error)
                continue
            _mark(found)
            return replace(found, stopped=tuple(stopped))
        return _by_parts(model, given, named, tuple(stopped))


def _exported(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ir.Model:
    program = export(model, args, kwargs=kwargs, verbose=False)
    assert program is not None  # dynamo=True gives one
    return program.model


def _by_parts(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stopped: tuple[Stop, ...]
) -> Inspected:
    """The modules one by one, with what they are given in one run of the model."""
    run = run_once(model, args, kwargs)
    failure = stopped[0].reason if run.error is None else reason_of(run.error)
    parts = Parts(model, run, failure, functools.partial(_quietly, _exported))
    if not parts.exported:
        raise InputError("\n".join(["this model has no graph", *map(str, stopped)]))
    note = (
        f"This model does not export as a whole. {parts.exported} of its modules were exported alone, "
        f"and {len(parts.innermost)} could not be: see those whose fate is failed."
    )
    found = Inspected(parts.graph(), "parts", stopped, failures=parts.failures, notes=(note,))
    _mark(found)
    return found


def _mark(found: Inspected) -> None:
    """Let a graph not be written by accident, unless it is an ONNX model."""
    for graph in (found.model, *found.graphs.values()) if found.way != "onnx" else ():
        graph.metadata_props[tags.WAY] = found.way


def _quietly(make: Callable[..., _Made], *given: Any) -> _Made:
    """Make a graph; what torch prints of one that it cannot trace goes to the log: the error says why."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are for those who will run the graph
            return make(*given)
    finally:
        _log.debug("%s", stderr.getvalue())


def _by_symbolic_tracing(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inspected:
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
    _check_traced(model, traced, args, kwargs)
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


def _check_traced(
    model: torch.nn.Module, traced: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
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


_WAYS: dict[Way, Callable[..., Inspected]] = {
    "onnx": lambda *given: Inspected(_exported(*given), "onnx"),
    "torch.export": lambda *given: Inspected(exported_graph(*given), "torch.export"),
    "torch.fx": _by_symbolic_tracing,
    "dynamo": graphs_with_breaks,
}
