"""Repeated work of torch and onnxscript in an export under ``dynamo=True``, done once or faster with the same result.

Each wrapper here changes how long torch takes, and nothing else. They are applied while a model is
exported with tags, unless `running.hurries` is False; where torch has moved, one of them is left
out, and torch does this work itself. ``tests/exporter/test_faster_dynamo.py`` compares programs with
and without them.
"""

from __future__ import annotations

import functools
import linecache
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from htp_export.exporter.capture import running

# --- torch.export ---------------------------------------------------------------------------------


class _ReadOnce:
    """An object whose attributes are each read once; torch computes them anew at each access."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        setattr(self, name, value)
        return value


def parameters_read_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Create the wrapper of a function that looks up each input of a graph in its signature.

    The signature lists all parameters at each access, so that time grew with their square.
    """

    @functools.wraps(original)
    def populate(metadata: Any, module: Any, signature: Any) -> Any:
        if not running.saves_work():
            return original(metadata, module, signature)
        return original(metadata, module, _ReadOnce(signature))

    return populate


def is_call_name(original: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    """Create the wrapper of a function that compares names of modules by a regular expression.

    It compares each module with all beside it: almost all of them begin differently.
    """

    @functools.wraps(original)
    def is_name(call_name: str, base: str) -> bool:
        if not call_name.startswith(base):
            return False
        return call_name == base or original(call_name, base)

    return is_name


class SourcesCopied:
    """``copy`` for the history of nodes, which torch copies whole for each node that it makes of another."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def deepcopy(self, value: Any, *memo: Any) -> Any:
        """A copy of a value, with copies of all that it contains."""
        if memo or type(value) is not list or not running.saves_work():
            return self._original.deepcopy(value, *memo)
        return [self._copied(item) for item in value]

    def _copied(self, source: Any) -> Any:
        fields = getattr(source, "__dict__", {})
        if fields.keys() != _FIELDS or fields["_dict"] is not None:
            return self._original.deepcopy(source)
        info = fields["node_info"]
        copied = object.__new__(type(source))
        vars(copied).update(
            fields,
            action=list(fields["action"]),  # members of an enumeration
            node_info=None if info is None else self._original.copy(info),
            from_node=[self._copied(item) for item in fields["from_node"]],
        )
        return copied


_FIELDS = {"pass_name", "action", "from_node", "node_info", "_action_string", "_dict"}


def frames_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Create the wrapper of a function that describes the frames of a stack: each frame is described once.

    torch asks for the stack of every node, and most of its frames are those of the node before.
    """
    described: dict[tuple[str, int, str], traceback.FrameSummary] = {}

    @functools.wraps(original)
    def extract(frames: Sequence[Any], skip: int) -> Any:
        if not running.saves_work():
            return original(frames, skip)
        stack = traceback.StackSummary()
        for frame in reversed(frames[skip:]):
            key = frame["filename"], frame["line"], frame["name"]
            found = described.get(key)
            if found is None:
                found = described[key] = traceback.FrameSummary(*key)
            stack.append(found)
        return stack

    return extract


class SourcesInMemory:
    """The source files whose lines Python holds in memory (``linecache``) when an export begins.

    For the stacks of nodes, torch reads the lines of its own files, and Python keeps all lines of
    each: 6 MB until the process ends.
    """

    def __init__(self) -> None:
        self._before = set(linecache.cache)

    def forget_others(self) -> None:
        """Release the lines of files that were read since; they are read again if they are needed."""
        if not running.saves_work():
            return
        entries: list[tuple[str, tuple[Any, ...]]] = list(linecache.cache.items())
        for name, entry in entries:
            # sources that are not in a file have no time of modification
            is_file = len(entry) == _OF_FILE and entry[1] is not None
            if is_file and name not in self._before:
                linecache.cache.pop(name, None)


_OF_FILE = 4
"""The length of an entry of ``linecache``: size, time of modification, lines, and path."""


# --- the decomposed program -----------------------------------------------------------------------


def known_results(original: Callable[..., Any]) -> Callable[..., Any]:
    """Create the wrapper of a method that executes the nodes of a program to promote their types.

    The result of a node is known from the trace. It is computed again only if a node is given other
    arguments, and in programs with sizes that are open.
    """

    @functools.wraps(original)
    def run_node(self: Any, node: Any) -> Any:
        known = node.meta.get("val")
        if not running.saves_work() or not _has_known_result(node) or not _is_static(self):
            return original(self, node)
        arguments = node.args, node.kwargs

        def call(target: Any, args: Any, kwargs: Any) -> Any:
            # nodes that promote types are called before the arguments are replaced
            is_same = node.args is arguments[0] and node.kwargs is arguments[1]
            if is_same and target is node.target:
                return known
            return type(self).call_function(self, target, args, kwargs)

        self.call_function = call
        try:
            return original(self, node)
        finally:
            del self.call_function

    return run_node


def _has_known_result(node: Any) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and type(node.meta.get("val")) is torch._subclasses.FakeTensor
    )


def _is_static(interpreter: Any) -> bool:
    """Whether all tensors of the graph have known sizes, and no operator chooses the size of its result."""
    fields = vars(interpreter)
    if "_htp_export_static" not in fields:
        nodes = interpreter.module.graph.nodes
        fields["_htp_export_static"] = all(map(_has_static_result, nodes))
    return bool(fields["_htp_export_static"])


def _has_static_result(node: Any) -> bool:
    result = node.meta.get("val")
    for part in result if isinstance(result, list | tuple) else (result,):
        if isinstance(part, torch.SymInt | torch.SymFloat | torch.SymBool):
            return False
        if isinstance(part, torch.Tensor) and not all(type(size) is int for size in part.shape):
            return False
    return True


# --- translations of operators --------------------------------------------------------------------


class NamesOfFunctions(property):
    """The signature of a translation of an operator, of which torch reads only the domain.

    Computing it parses the source of the function: a second in the first export of a process.
    """

    def __init__(self, original: property) -> None:
        super().__init__(original.fget, original.fset, original.fdel, original.__doc__)
        self._original = original

    def __get__(self, function: Any, owner: Any = None) -> Any:
        if function is None:
            return self
        if not running.saves_work():
            return self._original.__get__(function, owner)
        return _Signature(function, self._original)


class _Signature:
    """The signature of a function, computed when more than its domain is read."""

    def __init__(self, function: Any, original: property) -> None:
        self._function = function
        self._original = original
        self.domain = function._opset.domain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original.__get__(self._function), name)


def signatures_once(original: Callable[[Any], Any]) -> Any:
    """Create the wrapper of a function that makes the signature of an ONNX operator of its schema."""
    made: dict[tuple[str, str, int], Any] = {}

    @functools.wraps(original)
    def from_op_schema(schema: Any) -> Any:
        if not running.saves_work():
            return original(schema)
        key = schema.domain, schema.name, schema.since_version
        if key not in made:
            made[key] = original(schema)
        return made[key]

    return staticmethod(from_op_schema)


def other_operators_skipped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Create the wrapper of a method that applies a rewrite rule at a node.

    A rule cannot apply at another operator than the one that its pattern ends with. onnxscript finds
    that out late; for a pattern with several results, it first lists all nodes of the graph.
    """
    ends: dict[Any, tuple[str, str] | None] = {}

    @functools.wraps(original)
    def try_rewrite(
        self: Any, model: Any, graph: Any, node: Any, *, tracer: Any = None, **options: Any
    ) -> Any:
        if tracer is not None or options.get("verbose") or not running.saves_work():
            return original(self, model, graph, node, tracer=tracer, **options)
        if self not in ends:
            ends[self] = _end_of(self)
        end = ends[self]
        if end is not None and end != (node.domain, node.op_type):
            return None
        return original(self, model, graph, node, **options)

    return try_rewrite


def _end_of(rule: Any) -> tuple[str, str] | None:
    """Domain and name of the operator with which the pattern of a rule ends; None if it may be any."""
    matcher: Any = getattr(rule, "_matcher", None)
    if getattr(rule, "_verbose", True):  # it prints what it compares
        return None
    if type(matcher).__name__ != "SimplePatternMatcher":
        return None
    ends: Iterator[Any] = iter(getattr(matcher.pattern, "output_nodes", ()))
    end = next(ends, None)
    identifier = None if end is None else end.op_identifier()
    if identifier is None:
        return None
    domain, name, _ = identifier
    return domain, name
