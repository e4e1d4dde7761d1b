"""What a capture hands on: the calls of modules, operations as PyTorch ran them, and what became of their tensors.

Operations are those of the exporter's own first graph (ONNX nodes before any optimisation under
dynamo, traced ATen operations under TorchScript), where each belongs to exactly one call. Tensors
are named by any hashable key.
"""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from htp_export.format import tags
from htp_export.format.leaves import containers_in, named_tensors_in
from htp_export.format.tags import Reason

NO_CALL = -1  # where an index of a call stands otherwise
Key = Hashable
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a module's ``forward``."""

    path: str  # the module's path
    nth: int  # the number of this run of the module, from 0
    parent: int  # index of the calling call; ``NO_CALL`` for the outermost


@dataclass(frozen=True, slots=True)
class CallTensors:
    """The tensors that enter and leave one call."""

    # Name of the argument of ``forward``, ``mask`` or ``states.1``, and key of each tensor
    inputs: tuple[tuple[str, Any], ...]
    outputs: tuple[Any, ...] = ()  # the keys of the tensors that ``forward`` returned, in order
    # The names of arguments that are caches, or other containers of tensors that only torch knows
    containers: tuple[str, ...] = ()
    # The names of arguments that are numbers in PyTorch, and tensors in the trace
    numbers: frozenset[str] = frozenset()

    @classmethod
    def given(cls, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallTensors:
        """The tensors themselves at the beginning of a call of ``forward``, which may change the cache that it gets."""
        arguments = arguments_by_name(forward, args, kwargs)
        return cls(tuple(named_tensors_in(arguments)), (), tuple(containers_in(arguments)))

    def is_part(self, argument: str) -> bool:
        """Return whether an argument is a part of a container."""
        return any(argument.startswith(f"{container}.") for container in self.containers)


@dataclass
class CallLog:
    """The list of calls so far, and the stack of running calls."""

    # Every call, in the order in which they start; an index into it identifies a call
    calls: list[Call] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)  # indices of the running calls, outermost first
    # Module path → whether every call so far returned only input tensors
    returned_inputs: dict[str, bool] = field(default_factory=dict)
    # Call → the tensors that enter and leave it, if they were captured
    call_tensors: dict[int, CallTensors] = field(default_factory=dict)
    _inputs: dict[int, tuple[set[int], CallTensors]] = field(default_factory=dict)
    _counts: collections.Counter[str] = field(default_factory=collections.Counter)
    _first: dict[str, int] = field(default_factory=dict)
    _chains: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _owners: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def copy(self) -> CallLog:
        """The same calls, to which others can be added."""
        tensors, returned = self.call_tensors.copy(), self.returned_inputs.copy()
        other = CallLog(self.calls.copy(), self.stack.copy(), returned, tensors)
        other._counts, other._first = self._counts.copy(), self._first.copy()
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
        """Return the first call of the nearest module above that ran: the assumed caller of an unobserved call."""
        above = tags.nearest_above(path, self._first)
        return NO_CALL if above is None else self._first[above]

    def record_inputs(self, given: CallTensors, key: Callable[[Any], Any]) -> None:
        """Record the inputs of the innermost running call; ``key`` gives a tensor's key in the captured graph."""
        names, tensors = [name for name, _ in given.inputs], [tensor for _, tensor in given.inputs]
        entering = replace(given, inputs=tuple(zip(names, keys_of(tensors, key), strict=True)))
        self._inputs[self.stack[-1]] = set(map(id, tensors)), entering

    def exit(self, results: list[Any], key: Callable[[Any], Any]) -> None:
        """Record the outputs, all tensors, and the end of the innermost running call; ``key``: see `record_inputs`."""
        index = self.stack.pop()
        path, (input_ids, entered) = self.calls[index].path, self._inputs.pop(index)
        if self.returned_inputs.get(path, True):
            self.returned_inputs[path] = all(id(tensor) in input_ids for tensor in results)
        self.call_tensors[index] = replace(entered, outputs=keys_of(results, key))

    def count(self, path: str) -> int:
        """Return how often a module ran."""
        return self._counts[path]

    def chain(self, index: int) -> tuple[int, ...]:
        """Return the call and its callers, innermost first; empty for ``NO_CALL``."""
        if index == NO_CALL:
            return ()
        if index not in self._chains:
            self._chains[index] = (index, *self.chain(self.calls[index].parent))
        return self._chains[index]

    def common(self, first: int, second: int) -> int:
        """Return the innermost call that contains both calls, or is one of them; ``NO_CALL`` if there is none."""
        callers = self.chain(second)
        return next((index for index in self.chain(first) if index in callers), NO_CALL)

    def owners(self, index: int) -> tuple[str, ...]:
        """Return the paths of the modules that own the operations of this call, in the order in which they started.

        Usually one; more if the module is registered outside of the module that called it.
        """
        if index not in self._owners:
            running = [self.calls[i].path for i in reversed(self.chain(index))]
            self._owners[index] = tags.innermost(running)
        return self._owners[index]

    @property
    def running(self) -> tuple[str, ...]:
        """The paths of the running modules, outermost first."""
        return tuple(self.calls[index].path for index in self.stack)


def last_in_place(key: _Key, became: Mapping[_Key, _Key], stop: Container[_Key]) -> _Key:
    """Where a chain of replacements ends: at one in ``stop``, or at one that nothing replaced."""
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
    forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a ``forward`` by parameter name; those of ``*args`` are ``args.0``, ...

    Examples:
        >>> arguments_by_name(lambda x, *rest, mask=None: x, (1, 2, 3), {"mask": 4})
        {'x': 1, 'rest.0': 2, 'rest.1': 3, 'mask': 4}
    """
    known, rest = _positional_names(
        getattr(forward, "__func__", forward), hasattr(forward, "__self__")
    )
    names = [*known[: len(args)], *(f"{rest}.{place}" for place in range(len(args) - len(known)))]
    return {**dict(zip(names, args, strict=True)), **kwargs}


def defaults_of(forward: Any) -> dict[str, Any]:
    """The defaults of a ``forward``, under the names of its parameters.

    Examples:
        >>> defaults_of(lambda x, n=2, *, mask=None: x)
        {'n': 2, 'mask': None}
    """
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # built in, or not written in Python
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@functools.lru_cache(maxsize=1024)
def _positional_names(function: Any, bound: bool) -> tuple[tuple[str, ...], str]:
    """The names of a function's positional parameters, and of its ``*args``; of a method, without ``self``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[bound:]
    except (TypeError, ValueError):  # built in, or not written in Python
        return (), "args"
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    return tuple(p.name for p in parameters if p.kind in by_position), rest


@dataclass(slots=True)
class Operation:
    """One operation as PyTorch ran it."""

    call: int  # index of the call that ran it, ``NO_CALL`` where nothing says
    inputs: tuple[Key, ...]  # keys of the tensors it reads
    outputs: tuple[Key, ...]  # keys of the tensors it makes
    # whether its result depends on shapes alone (``Shape``, ``aten::size``)
    shape_only: bool = False
    # Whether it computes a size of sizes, which torch does once for all calls that compute the same
    symbolic: bool = False
    # the input that is its result, unchanged, as of a dropout in evaluation
    passed_on: Key | None = None


@dataclass(slots=True)
class Node:
    """One node of the exported graph, or of a body inside it."""

    inputs: tuple[Key, ...]  # keys of the tensors it reads, those that its bodies return included
    outputs: tuple[Key, ...]  # keys of the tensors it makes
    hint: int = NO_CALL  # index of the call that other evidence names, or ``NO_CALL``
    evidence: Reason = Reason.SCOPE  # which evidence that is: ``scope``, ``parameters`` or ``flow``
    shape_only: bool = False  # as in `Operation`


@dataclass
class Record:
    """Everything that one export told about its modules."""

    log: CallLog  # the calls
    operations: list[Operation] = field(default_factory=list)  # what PyTorch ran, in order
    # Calls that did something of which the captured graph has nothing, because nothing needed it
    dead: set[int] = field(default_factory=set)
    # Call → other calls to which work of it was given, because the tensor that it made is not in
    # the captured graph: a view of a tensor that was changed afterwards
    moved: dict[int, set[int]] = field(default_factory=dict)
    # Call → the tensors that enter and leave it; a key is None if the tensor was not captured
    call_tensors: dict[int, CallTensors] = field(default_factory=dict)
    # keys of the captured graph's inputs whose values the user gives
    inputs: set[Key] = field(default_factory=set)
    # keys of the tensors that the captured graph returns
    outputs: list[Key] = field(default_factory=list)
    # For a captured tensor, its key in the exported graph; absent where no tensor of it is left
    final: dict[Key, Key] = field(default_factory=dict)
    # the exported graph's nodes, in order, bodies included
    nodes: list[Node] = field(default_factory=list)
    # Keys of the exported graph's inputs whose values the user gives
    graph_inputs: set[Key] = field(default_factory=set)
    # keys of the tensors that the exported graph returns
    graph_outputs: set[Key] = field(default_factory=set)
