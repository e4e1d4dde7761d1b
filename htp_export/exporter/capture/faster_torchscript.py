"""Repeated work of torch in an export by TorchScript, done once or faster with the same result.

Each wrapper here changes how long torch takes, and nothing else. They are applied while an export
is captured, unless `running.hurries` is False, and not at all where torch has moved: then torch does
this work itself. ``tests/exporter/test_faster_torchscript.py`` compares graphs with and without them.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from htp_export.exporter.capture.running import script_capture
from htp_export.exporter.capture.torchscript_internals import may_have_blocks, plain_state


def listed(owner: str, size: str, at: str, node: str = "") -> Callable[[Any], Any]:
    """Create the wrapper of a method that returns an iterator of the values of a node.

    The iterator of the bindings ends with an exception of C++, at ten times the cost of the values
    themselves. The exporter asks for it two or three times for each node. ``size`` and ``at`` are
    methods of a node that return the number of the values, and one of them. ``node`` is the method
    of ``owner``, a class, that returns the node with the values: inputs of a graph are the outputs of
    its first node, and outputs the inputs of its last one. Without it, ``owner`` is that of nodes.
    """

    def wrap(original: Any) -> Any:
        node_of = getattr(getattr(torch._C, owner), node) if node else None
        count = getattr(torch._C.Node, size)
        value = getattr(torch._C.Node, at)

        @functools.wraps(original)
        def values(self: Any) -> Iterator[Any]:
            if script_capture.get() is None:
                return original(self)  # type: ignore[no-any-return]
            end = self if node_of is None else node_of(self)
            return iter([value(end, place) for place in range(count(end))])

        return values

    return wrap


def blocks(original: Any) -> Any:
    """Return no blocks of a node whose kind has none: see `listed`."""

    @functools.wraps(original)
    def wrapper(self: Any) -> Iterator[Any]:
        if script_capture.get() is None or may_have_blocks(self.kind()):
            return original(self)  # type: ignore[no-any-return]
        return iter(())

    return wrapper


class SignaturesOnce:
    """``inspect`` for the translations of operators, which ask for the signature of a function in each call."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._found: weakref.WeakKeyDictionary[Any, inspect.Signature] = weakref.WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def signature(self, function: Any, **options: Any) -> Any:
        """The signature of a function; functions of the exporter do not change."""
        if options or script_capture.get() is None or not inspect.isfunction(function):
            return self._original.signature(function, **options)
        found = self._found.get(function)
        if found is None:
            found = self._found[function] = self._original.signature(function)
        return found


def name_lookup(original: Any) -> Any:
    """Create the function that finds the variable of a traced tensor: not for tensors that we ask about.

    The tracer asks for the name of a value without one, each time; values keep the names that torch
    gives them, so there must be none in our frames (see `traced_number`). The names are recorded:
    see `Trace.variables`.
    """
    if [*inspect.signature(original).parameters] != ["frames_up"]:
        raise TypeError("it does not count frames")

    @functools.wraps(original)
    def create(frames_up: int = 1) -> Callable[[Any], str]:
        find = original(frames_up + 1)  # it counts the frame of the function below, too
        names = set[str]()
        running = script_capture.get()
        if running is not None:
            running.trace.variables = names

        def name_of(tensor: Any) -> str:
            capture = script_capture.get()
            if capture is not None and capture.trace.asks:
                return ""
            name: str = find(tensor)
            names.add(name)
            return name

        return name_of

    return create


def opset_once(original: Any) -> Any:
    """Find the version of a translation once for each set of versions.

    The exporter sorts the versions of a translation two or three times for each node.
    """
    if [*inspect.signature(original).parameters] != ["target", "registered_opsets"]:
        raise TypeError("it does not choose among versions")
    found: dict[tuple[int, ...], int | None] = {}

    @functools.wraps(original)
    def version(target: int, registered_opsets: Collection[int]) -> int | None:
        if script_capture.get() is None:
            return original(target, registered_opsets)  # type: ignore[no-any-return]
        key = (target, *registered_opsets)
        if key not in found:
            found[key] = original(target, registered_opsets)
        return found[key]

    return version


def unique_state(original: Any) -> Any:
    """Collect the state of a model without the hooks that its modules do not have.

    The exporter asks for it four times. A model with a module that saves its state in a way of its
    own is asked in torch's way.
    """
    if [*inspect.signature(original).parameters] != ["module", "keep_vars"]:
        raise TypeError("it does not collect the state of a module")

    @functools.wraps(original)
    def state(module: Any, keep_vars: bool = False) -> Any:
        found = None if script_capture.get() is None else plain_state(module)
        if found is None:
            return original(module, keep_vars)
        if keep_vars:
            return found
        return OrderedDict((name, tensor.detach()) for name, tensor in found.items())

    return state


def mode_kept(original: Any) -> Any:
    """Set no module's mode that has it: the exporter sets the mode of all modules, and sets it back."""
    if [*inspect.signature(original).parameters] != ["self", "mode"]:
        raise TypeError("it does not set the mode of a module")

    @functools.wraps(original)
    def train(self: Any, mode: bool = True) -> Any:
        if script_capture.get() is None or not _have_mode(self, mode):
            return original(self, mode)
        return self

    return train


def _have_mode(module: Any, mode: bool) -> bool:
    """Whether a module and its descendants have a mode, and torch's own way to set it."""
    kind = type(module)
    plain: Any = torch.nn.Module
    if not issubclass(kind, plain) or vars(module).get("training") is not mode:
        return False
    if kind.train is not plain.train or kind.__setattr__ is not plain.__setattr__:
        return False
    if kind.children is not plain.children or kind.named_children is not plain.named_children:
        return False
    children = [child for child in module._modules.values() if child is not None]
    return all(_have_mode(child, mode) for child in children)


class FewerPasses:
    """``torch._C`` for the exporter, without passes over its graph that find nothing.

    It checks its graph after ten of its passes: here twice. The checks find faults of torch, and
    change nothing. The last one before the translation and the last one after it are kept, at their
    places: a fault that an earlier one would find, they find.

    It simplifies its graph twice, around the fusion of a product with a sum: here once, if the first
    time changes nothing, and there is no product to fuse.
    """

    def __init__(self, passes: Any) -> None:
        for name in ("_jit_pass_lint", *self._SIMPLIFYING, *self._AFTER_CHECK):
            getattr(passes, name)
        self._passes = passes
        self._is_due = False
        # id of the graph that has not changed since a pass found nothing to simplify; 0 for none
        self._simple = 0

    _SIMPLIFYING = ("_jit_pass_peephole", "_jit_pass_fuse_addmm")
    # the passes that follow the checks that are kept
    _AFTER_CHECK = (
        "_jit_pass_prepare_division_for_onnx",
        "_jit_pass_onnx_graph_shape_type_inference",
    )

    def __getattr__(self, name: str) -> Any:
        self._simple = 0
        wanted_pass = getattr(self._passes, name)
        if name in self._AFTER_CHECK:
            return functools.partial(self._after_check, wanted_pass)
        return wanted_pass

    def _jit_pass_lint(self, graph: Any) -> None:
        if script_capture.get() is None:
            self._passes._jit_pass_lint(graph)
        else:
            self._is_due = True

    def _after_check(self, run: Callable[..., Any], graph: Any, *rest: Any) -> Any:
        if self._is_due:
            self._is_due = False
            self._passes._jit_pass_lint(graph)
        return run(graph, *rest)

    def _jit_pass_peephole(self, graph: Any, *rest: Any) -> Any:
        if script_capture.get() is None:
            return self._passes._jit_pass_peephole(graph, *rest)
        if self._simple == id(graph):
            return False
        changed = self._passes._jit_pass_peephole(graph, *rest)
        self._simple = id(graph) if changed is False else 0
        return changed

    def _jit_pass_fuse_addmm(self, graph: Any) -> Any:
        if graph.findNode("aten::mm") is not None:
            self._simple = 0
        return self._passes._jit_pass_fuse_addmm(graph)
