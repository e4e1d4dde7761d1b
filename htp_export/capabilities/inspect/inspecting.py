"""`inspect`: the graph of a PyTorch model, by the best way that succeeds."""

from __future__ import annotations

import contextlib
import functools
import inspect as python_inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.capabilities.inspect.breaks import Piece, graphs_with_breaks, merged
from htp_export.capabilities.inspect.inspected import Inspected, Stop, Way
from htp_export.capabilities.inspect.runs import (
    edit_by_scopes,
    owners_in,
    run_once,
    tree_of,
    without_identities,
)
from htp_export.errors import InputError
from htp_export.exporter.broken_graphs import dynamo_as_it_was
from htp_export.exporter.capture.model_state import unchanged
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.patches import translations_read_once
from htp_export.exporter.exporting import export
from htp_export.exporter.failures import place_of_failure, reason_of
from htp_export.exporter.torch_programs import exported_graph, lowered_graph
from htp_export.format import tags
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, module_paths
from htp_export.format.leaves import tensors_in
from htp_export.format.parameters import parameters_of
from htp_export.process.argument_types import checks_arguments

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


@checks_arguments
def inspect(
    model: torch.nn.Module,
    args: Any = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    way: Way | None = None,
    concrete_args: Mapping[str, Any] | None = None,
) -> Inspected:
    """Trace a PyTorch model into a graph with its modules, even if it does not export to ONNX.

    Several ways are tried in order: the export to ONNX; ``torch.export`` alone, whose operators
    need no translation; symbolic tracing by ``torch.fx``; Dynamo's graphs with breaks; the modules
    one by one, with their arguments in one run of the model. The result names the way that
    succeeded, and the errors of the ways before. ``docs/inspection.md`` describes the graphs.

    No other thread may use the model meanwhile.

    Args:
        model: The model; its state is restored.
        args: Its positional arguments, or the only one.
        kwargs: Its keyword arguments.
        way: The only way to try; None for all.
        concrete_args: For the way ``torch.fx``: parameter of ``forward`` → the value that
            conditions on it have, as in ``torch.fx.Tracer.trace``. The call must have equal values.

    Returns:
        The graph. ``cost``, ``view``, ``load`` and other functions that write no model accept it.
        It cannot be saved unless it is from the export to ONNX.

    Raises:
        InputError: Every way failed, and the message has the reasons; there is no such way, or no
            such parameter of ``forward``.

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
    positional = tuple(args) if isinstance(args, tuple | list) else (args,)
    named = dict(kwargs or {})
    if way is not None and way not in _WAYS:
        raise InputError(f"way {way!r} is none of {', '.join(_WAYS)}")
    concrete = _checked_concrete_args(model, way, concrete_args)
    ways: dict[Way, Callable[..., Inspected]] = {
        **_WAYS,
        "torch.fx": functools.partial(_by_symbolic_tracing, concrete_args=concrete),
    }
    if way is not None:
        ways = {way: ways[way]}
    path_by_id = ModuleNames(model).by_id
    stopped: list[Stop] = []
    with dynamo_as_it_was(), translations_read_once():
        for tried, trace in ways.items():
            try:
                inspected = _quietly(trace, model, positional, named, stopped)
            except Exception as error:  # any error of torch on a model that it cannot trace
                place = place_of_failure(error, path_by_id)
                stopped.append(Stop(tried, reason_of(error), *place))
                _log.debug("%s", stopped[-1], exc_info=error)
                continue
            if tried != "onnx":
                for graph in (inspected.model, *inspected.graphs.values()):
                    graph.metadata_props[tags.WAY] = tried  # functions that write models refuse it
            return replace(inspected, stopped=tuple(stopped))
    reasons = [str(stop) for stop in stopped if stop.way != "parts" or way == "parts"]
    raise InputError("\n".join(["this model has no graph", *reasons]))


def _checked_concrete_args(
    model: torch.nn.Module, way: Way | None, concrete_args: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The concrete arguments.

    Raises:
        InputError: ``forward`` has no parameter of a name, or the way does not use them.
    """
    if concrete_args is None:
        return None
    if way not in (None, "torch.fx"):
        raise InputError(f"concrete_args are for the way torch.fx, and the way is {way}")
    parameters = python_inspect.signature(model.forward).parameters
    unknown = [name for name in concrete_args if name not in parameters]
    if unknown:
        raise InputError(
            f"concrete_args: forward of {type(model).__name__} has no parameter {unknown[0]!r}; it has "
            f"{', '.join(parameters)}"
        )
    return dict(concrete_args)


def _quietly(trace: Callable[..., Inspected], *args: Any) -> Inspected:
    """Trace a model; torch's output on errors goes to the log, because the error has the reason."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are for users who will run the graph
            return trace(*args)
    finally:
        _log.debug("%s", stderr.getvalue())


def _exported(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ir.Model:
    with unchanged(model, (args, kwargs), traced=True):
        program = export(model, args, kwargs=kwargs, verbose=False)
    assert program is not None  # dynamo=True returns one
    return program.model


def _program(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ir.Model:
    with unchanged(model, (args, kwargs), traced=True):
        return exported_graph(model, args, kwargs)


def _by_symbolic_tracing(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    _stopped: Sequence[Stop],
    *,
    concrete_args: dict[str, Any] | None = None,
) -> Inspected:
    """Trace a model symbolically, remove dead code, and lower the rest to torch's operators.

    Symbolic tracing can take another branch than a run of the model (``isinstance(x,
    torch.Tensor)``). Therefore the traced model is run: a RuntimeError is raised if its results
    differ from the model's.
    """
    import torch

    names = ModuleNames(model)
    with unchanged(model, (args, kwargs), traced=True):
        traced = torch.fx.GraphModule(model, torch.fx.Tracer().trace(model, concrete_args))
        traced.graph.eliminate_dead_code()
        traced.recompile()
    traced_args, traced_kwargs = args, kwargs
    if concrete_args:
        # torch.fx gives these parameters other names, so that all arguments are positional
        bound = python_inspect.signature(model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        traced_args, traced_kwargs = tuple(bound.arguments.values()), {}
    results = []
    for module, given, named in (
        (model, args, kwargs),
        (traced, traced_args, traced_kwargs),
    ):
        with unchanged(model, (args, kwargs)), torch.no_grad():
            results.append([tensor.clone() for tensor in tensors_in(module(*given, **named))])
    try:
        torch.testing.assert_close(
            *results, rtol=1e-5, atol=1e-8, equal_nan=True, check_stride=False
        )
    except AssertionError:
        raise RuntimeError(
            "the model that torch.fx traced gives another result than the model"
        ) from None
    lowered = lowered_graph(traced, traced_args, traced_kwargs)
    graph = lowered.model.graph

    def path_of(node: ir.Node) -> str:
        fx_node = node.meta.get("node")
        stack = {} if fx_node is None else fx_node.meta.get("nn_module_stack") or {}
        scopes = [str(name) for name, _ in stack.values()]
        paths = [names.aliases[name] for name in scopes if name in names.aliases]
        return paths[-1] if paths else ""

    with edit_by_scopes(lowered.model, Hierarchy.from_module(model), path_of) as edit:
        identities = without_identities(graph)
        tree = tree_of(model, run_once(model, args, kwargs), owners_in(graph), identities)
        edit.set_modules(tree)
        edit.set_parameters(parameters_of(model))
    graph.name = tree.root.simple_class
    return Inspected(lowered.model, "torch.fx")


def _by_parts(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stopped: Sequence[Stop],
) -> Inspected:
    """The largest modules that can be exported alone, side by side; a RuntimeError without any.

    ``stopped`` begins with the error of the export of the whole model.
    """
    run = run_once(model, args, kwargs)
    modules = {path: module for path, _, module in module_paths(model)}
    tree = Hierarchy.from_module(model)
    fates = {path: Fate.of_calls(run.counts.get(path, 0)) for path in tree}
    tree = tree.with_results(calls=run.counts, fates=fates)
    failures = {"": stopped[0].reason if stopped else "it was not tried"}
    if run.error is not None:
        failures = {"": reason_of(run.error)}
    exported: dict[str, ir.Model] = {}

    def called_in(path: str) -> Iterator[str]:
        """The nearest descendants that ran; containers, which do not run, are skipped."""
        for child in tree.children(path):
            if child in run.given:
                yield child
            else:
                yield from called_in(child)

    pending = [*called_in("")]
    while pending:
        path = pending.pop(0)
        try:
            exported[path] = _exported(modules[path], *run.given[path])
        except Exception as error:  # any error of torch on a module that it cannot export
            failures[path] = reason_of(error)
            pending = [*called_in(path), *pending]
    if not exported:
        raise RuntimeError("no module of the model can be exported alone")
    pieces = [Piece(part, path, path) for path, part in exported.items()]
    innermost = tags.innermost(failures)
    note = (
        f"This model does not export as a whole. {len(exported)} of its modules were exported alone, "
        f"and {len(innermost)} could not be: see those whose fate is failed."
    )
    whole = merged(pieces, tree, parameters_of(model))
    return Inspected(whole, "parts", failures=_with_causes(failures, innermost), notes=(note,))


def _with_causes(failures: Mapping[str, str], innermost: Sequence[str]) -> dict[str, str]:
    """Module path → error, or the innermost modules below it that failed."""
    reasons = {}
    for path, reason in failures.items():
        causes = [other for other in innermost if other != path and tags.is_under(other, path)]
        reasons[path] = f"because of {', '.join(causes)}" if causes else reason
    return reasons


_WAYS: dict[Way, Callable[..., Inspected]] = {
    "onnx": lambda model, args, kwargs, _: Inspected(_exported(model, args, kwargs), "onnx"),
    "torch.export": lambda model, args, kwargs, _: Inspected(
        _program(model, args, kwargs), "torch.export"
    ),
    "torch.fx": _by_symbolic_tracing,
    "dynamo": lambda model, args, kwargs, _: graphs_with_breaks(model, args, kwargs),
    "parts": lambda model, args, kwargs, stopped: _by_parts(model, args, kwargs, stopped),
}
"""The ways, the best one first; arguments: the model, its arguments, errors of better ways."""
