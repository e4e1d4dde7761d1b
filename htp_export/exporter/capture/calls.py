"""The result of a capture: calls of modules, operations that PyTorch ran, and their tensors.

Operations belong to the exporter's own first graph (ONNX nodes before any optimisation under
dynamo, traced ATen operations under TorchScript), where each belongs to exactly one call. Tensors
are identified by any hashable key.
"""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from htp_export.format import tags
from htp_export.format.leaves import are_tensors, containers_in, named_tensors_in
from htp_export.format.tags import Reason

NO_CALL = -1  # in place of the index of a call
Key = Hashable
_Key = TypeVar("_Key", bound=Hashable)


class Call(NamedTuple):
    """One run of a module's ``forward``."""

    path: str  # the module's path
    nth: int  # the number of this run of the module, from 0
    parent: int  # index of the calling call; ``NO_CALL`` for the outermost


class CallTensors(NamedTuple):
    """The input and output tensors of one call."""

    # argument of ``forward``, such as ``mask`` or ``states.1``, and key of each tensor
    inputs: tuple[tuple[str, Any], ...]
    outputs: tuple[Any, ...] = ()  # the keys of the tensors that ``forward`` returned, in order
    # names of arguments that are caches, or other containers registered with torch
    containers: tuple[str, ...] = ()
    # names of arguments that are numbers in PyTorch, and tensors in the trace
    numbers: frozenset[str] = frozenset()

    @classmethod
    def given(
        cls,
        forward: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> CallTensors:
        """The input tensors of a call of ``forward``, before it may change a cache in place."""
        arguments = arguments_by_name(forward, args, kwargs)
        if are_tensors(arguments.values()):
            return cls(tuple(arguments.items()))
        return cls(tuple(named_tensors_in(arguments)), (), tuple(containers_in(arguments)))

    def is_part(self, argument: str) -> bool:
        """Whether an argument is part of a container."""
        return any(argument.startswith(f"{container}.") for container in self.containers)


@dataclass
class CallLog:
    """The list of calls so far, and the stack of running calls."""

    # every call, in the order in which they start; an index into it identifies a call
    calls: list[Call] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)  # indices of the running calls, outermost first
    # module path → whether every call so far returned only input tensors
    returned_inputs: dict[str, bool] = field(default_factory=dict)
    # call → its input and output tensors, if they were captured
    call_tensors: dict[int, CallTensors] = field(default_factory=dict)
    # running call → ids of its input tensors, its inputs, and the tensors as they were given
    _inputs: dict[int, tuple[set[int], tuple[tuple[str, Any], ...], CallTensors]] = field(
        default_factory=dict
    )
    _counts: collections.Counter[str] = field(default_factory=collections.Counter)
    _first: dict[str, int] = field(default_factory=dict)
    _chains: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _owners: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def copy(self) -> CallLog:
        """Return a copy to which calls can be added."""
        tensors = self.call_tensors.copy()
        returned = self.returned_inputs.copy()
        other = CallLog(self.calls.copy(), self.stack.copy(), returned, tensors)
        other._counts = self._counts.copy()
        other._first = self._first.copy()
        return other

    def enter(self, path: str) -> int:
        """Record the start of a call, and return its index."""
        index = self.add(path, self.stack[-1] if self.stack else NO_CALL)
        self.stack.append(index)
        return index

    def add(self, path: str, parent: int) -> int:
        """Record a call without putting it on the stack, and return its index."""
        self._first.setdefault(path, len(self.calls))
        self.calls.append(Call(path, self._counts[path], parent))
        self._counts[path] += 1
        return len(self.calls) - 1

    def near(self, path: str) -> int:
        """The first call of the nearest ancestor that ran: assumed caller of an unobserved call."""
        above = tags.nearest_above(path, self._first)
        if above is None:
            return NO_CALL
        return self._first[above]

    def record_inputs(self, given: CallTensors, key: Callable[[Any], Any]) -> None:
        """Record the inputs of the innermost call; ``key`` returns a tensor's key in the graph."""
        names = [name for name, _ in given.inputs]
        tensors = [tensor for _, tensor in given.inputs]
        inputs = tuple(zip(names, keys_of(tensors, key), strict=True))
        self._inputs[self.stack[-1]] = set(map(id, tensors)), inputs, given

    @property
    def inputs(self) -> tuple[tuple[str, Any], ...]:
        """The inputs recorded for the innermost call: argument, and key of the tensor."""
        return self._inputs[self.stack[-1]][1]

    def adopt(self, index: int, caller: int) -> None:
        """Make ``caller`` the caller of the calls that the innermost call ``index`` has made so far."""
        for later in range(index + 1, len(self.calls)):
            if self.calls[later].parent == index:
                self.calls[later] = self.calls[later]._replace(parent=caller)
        self._chains.clear()
        self._owners.clear()

    def exit(self, results: list[Any], key: Callable[[Any], Any]) -> None:
        """Record the outputs and the end of the innermost call; ``key``: see `record_inputs`."""
        index = self.stack.pop()
        path = self.calls[index].path
        input_ids, inputs, given = self._inputs.pop(index)
        if self.returned_inputs.get(path, True):
            self.returned_inputs[path] = all(id(tensor) in input_ids for tensor in results)
        outputs = keys_of(results, key)
        self.call_tensors[index] = CallTensors(inputs, outputs, given.containers, given.numbers)

    def count(self, path: str) -> int:
        """The number of calls of a module."""
        return self._counts[path]

    def chain(self, index: int) -> tuple[int, ...]:
        """The call and its callers, innermost first; empty for ``NO_CALL``."""
        if index == NO_CALL:
            return ()
        if index not in self._chains:
            self._chains[index] = (index, *self.chain(self.calls[index].parent))
        return self._chains[index]

    def common(self, first: int, second: int) -> int:
        """The innermost call that contains both calls, or is one of them; else ``NO_CALL``."""
        callers = self.chain(second)
        return next((index for index in self.chain(first) if index in callers), NO_CALL)

    def owners(self, index: int) -> tuple[str, ...]:
        """The paths of the modules that own the operations of this call, in order of execution.

        Usually one; more if the module is registered outside the module that called it.
        """
        if index not in self._owners:
            running = [self.calls[i].path for i in reversed(self.chain(index))]
            self._owners[index] = tags.innermost(running)
        return self._owners[index]

    @property
    def running(self) -> tuple[str, ...]:
        """The paths of the running modules, outermost first."""
        return tuple(self.calls[index].path for index in self.stack)


def last_in_place(
    key: _Key,
    became: Mapping[_Key, _Key],
    stop: Container[_Key],
) -> _Key:
    """The end of a chain of replacements: a key in ``stop``, or one that was not replaced."""
    seen: set[_Key] = set()
    while key not in stop and key in became and key not in seen:
        seen.add(key)
        key = became[key]
    return key


def keys_of(tensors: list[Any], key: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return the keys of tensors, in a frame that has no tensor as a local variable.

    The TorchScript tracer names values after local variables of the frame that requests their
    numbers.
    """
    return tuple(map(key, tensors))


def arguments_by_name(
    forward: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of a ``forward`` by parameter name; values of ``*args`` are ``args.0``, ...

    Examples:
        >>> arguments_by_name(lambda x, *rest, mask=None: x, (1, 2, 3), {"mask": 4})
        {'x': 1, 'rest.0': 2, 'rest.1': 3, 'mask': 4}
    """
    function = getattr(forward, "__func__", forward)
    is_bound = hasattr(forward, "__self__")
    positional, rest = _positional_names(function, is_bound)
    names = list(positional[: len(args)])
    names += [f"{rest}.{number}" for number in range(len(args) - len(positional))]
    return {**dict(zip(names, args, strict=True)), **kwargs}


def defaults_of(forward: Any) -> dict[str, Any]:
    """The defaults of a ``forward``, by parameter name.

    Examples:
        >>> defaults_of(lambda x, n=2, *, mask=None: x)
        {'n': 2, 'mask': None}
    """
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # built in, or not written in Python
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@functools.lru_cache(maxsize=1024)  # more than the classes of modules in one model
def _positional_names(function: Any, bound: bool) -> tuple[tuple[str, ...], str]:
    """The names of a function's positional parameters, without ``self``, and of its ``*args``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[bound:]
    except (TypeError, ValueError):  # built in, or not written in Python
        return (), "args"
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(parameter.name for parameter in parameters if parameter.kind in by_position)
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return names, parameter.name
    return names, "args"


@dataclass(slots=True)
class Operation:
    """One operation as PyTorch ran it."""

    call: int  # index of the call that ran it, ``NO_CALL`` if unknown
    inputs: tuple[Key, ...]  # keys of its input tensors
    outputs: tuple[Key, ...]  # keys of its output tensors
    # whether its result depends on shapes alone (``Shape``, ``aten::size``)
    shape_only: bool = False
    # whether it computes a size from sizes, which torch does once for all calls that compute it
    symbolic: bool = False
    # the input that it returns unchanged, such as a dropout in evaluation mode
    passed_on: Key | None = None


@dataclass(slots=True)
class Node:
    """One node of the exported graph, or of a body inside it."""

    inputs: tuple[Key, ...]  # keys of its input tensors, and of the outputs of its bodies
    outputs: tuple[Key, ...]  # keys of its output tensors
    hint: int = NO_CALL  # index of the call named by other evidence, or ``NO_CALL``
    evidence: Reason = Reason.SCOPE  # the kind of that evidence: scope, parameters or flow
    shape_only: bool = False  # as in `Operation`


@dataclass
class Record:
    """The result of the capture of one export."""

    log: CallLog  # the calls
    operations: list[Operation] = field(default_factory=list)  # in the order in which they ran
    # calls of whose operations none is in the captured graph, because no output depends on them
    dead: set[int] = field(default_factory=set)
    # Call → other calls that its work was assigned to, because its tensor is not in the captured
    # graph: a view of a tensor that was changed afterwards
    moved: dict[int, set[int]] = field(default_factory=dict)
    # call → its input and output tensors; a key is None if the tensor was not captured
    call_tensors: dict[int, CallTensors] = field(default_factory=dict)
    # keys of the captured graph's inputs, without parameters
    inputs: set[Key] = field(default_factory=set)
    # keys of the captured graph's outputs
    outputs: list[Key] = field(default_factory=list)
    # captured tensor → its counterpart in the exported graph; absent without one
    final: dict[Key, Key] = field(default_factory=dict)
    # the exported graph's nodes, in order, with those of bodies
    nodes: list[Node] = field(default_factory=list)
    # keys of the exported graph's inputs, without parameters
    graph_inputs: set[Key] = field(default_factory=set)
    # keys of the exported graph's outputs
    graph_outputs: set[Key] = field(default_factory=set)
