"""The calls of modules during one export, as a tree, in the order in which they began."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from htp_export.format import tags

NO_CALL = -1


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a module's ``forward``.

    Attributes:
        path: The module's path.
        nth: Which run of that module, from 0.
        parent: Index of the call that it happened in; ``NO_CALL`` for the outermost.
    """

    path: str
    nth: int
    parent: int


@dataclass(frozen=True, slots=True)
class Passing:
    """The tensors that one call was given and that it gave back.

    Attributes:
        given: Which argument of ``forward`` each tensor was, ``mask`` or ``states.1``, and its key.
        returned: The keys of what ``forward`` returned, in order.
    """

    given: tuple[tuple[str, Any], ...]
    returned: tuple[Any, ...]


@dataclass
class CallLog:
    """A growing list of calls, with the stack of those that are running.

    Attributes:
        calls: Every call, in the order in which they began; an index into it names a call.
        stack: Indices of the calls that are running, outermost first.
        returned_inputs: For each module path, whether every call so far gave back only tensors that it was given.
        passed: Call → the tensors that it was given and gave back, where the capture saw them.
    """

    calls: list[Call] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)
    returned_inputs: dict[str, bool] = field(default_factory=dict)
    passed: dict[int, Passing] = field(default_factory=dict)
    _given: dict[int, tuple[set[int], tuple[tuple[str, Any], ...]]] = field(default_factory=dict)
    _counts: collections.Counter[str] = field(default_factory=collections.Counter)
    _first: dict[str, int] = field(default_factory=dict)
    _chains: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _owners: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def enter(self, path: str) -> int:
        """Note that a module begins to run; the index of its call."""
        index = self.add(path, self.stack[-1] if self.stack else NO_CALL)
        self.stack.append(index)
        return index

    def add(self, path: str, parent: int) -> int:
        """Note a call without putting it on the stack; its index."""
        self._first.setdefault(path, len(self.calls))
        self.calls.append(Call(path, self._counts[path], parent))
        self._counts[path] += 1
        return len(self.calls) - 1

    def near(self, path: str) -> int:
        """The first call of the nearest module above a path that ran: where an unseen call is taken to have run."""
        above = [up for up in tags.ancestors(path) if up != path]
        return next((self._first[up] for up in above if up in self._first), NO_CALL)

    def give(self, arguments: Mapping[str, Any], key: Callable[[Any], Any]) -> None:
        """Note what the innermost running module was given.

        Args:
            arguments: Its arguments, by name.
            key: A tensor → what stands for it in the graph that is being captured.
        """
        given = list(named_tensors_in(arguments))
        names, tensors = [name for name, _ in given], [tensor for _, tensor in given]
        self._given[self.stack[-1]] = set(map(id, tensors)), tuple(zip(names, _keys(tensors, key), strict=True))

    def leave(self, returned: Any, key: Callable[[Any], Any]) -> None:
        """Note that the innermost running module returns.

        Args:
            returned: What it gives back.
            key: As in ``give``.
        """
        index, results = self.stack.pop(), list(tensors_in(returned))
        path, (known, given) = self.calls[index].path, self._given.pop(index)
        if self.returned_inputs.get(path, True):
            self.returned_inputs[path] = all(id(tensor) in known for tensor in results)
        self.passed[index] = Passing(given, _keys(results, key))

    def count(self, path: str) -> int:
        """How often a module ran."""
        return self._counts[path]

    def chain(self, index: int) -> tuple[int, ...]:
        """The call and those it happened in, innermost first; empty for ``NO_CALL``."""
        if index == NO_CALL:
            return ()
        if index not in self._chains:
            self._chains[index] = (index, *self.chain(self.calls[index].parent))
        return self._chains[index]

    def common(self, one: int, other: int) -> int:
        """The innermost call that is, or is around, both calls; ``NO_CALL`` where there is none."""
        around = self.chain(other)
        return next((index for index in self.chain(one) if index in around), NO_CALL)

    def owners(self, index: int) -> tuple[str, ...]:
        """The module paths that own what this call computes itself, in the order in which they began.

        One as a rule; more where a module ran that is registered outside the one that called it.
        """
        if index not in self._owners:
            running = [self.calls[i].path for i in reversed(self.chain(index))]
            self._owners[index] = tags.innermost(running)
        return self._owners[index]

    @property
    def running(self) -> tuple[str, ...]:
        """Paths of the modules that are running now, outermost first."""
        return tuple(self.calls[index].path for index in self.stack)


def _keys(tensors: list[Any], key: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The keys of tensors; a frame of its own, without a tensor among its variables.

    The TorchScript tracer names values by the variables of the frame that asks it for their numbers.
    """
    return tuple(map(key, tensors))


def arguments_by_name(forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a ``forward`` is called with, under the names of its parameters; those of ``*args`` are ``args.0``, ...

    Examples:
        >>> arguments_by_name(lambda x, *rest, mask=None: x, (1, 2, 3), {"mask": 4})
        {'x': 1, 'rest.0': 2, 'rest.1': 3, 'mask': 4}
    """
    known, rest = _positional_names(getattr(forward, "__func__", forward), hasattr(forward, "__self__"))
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


def named_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in nested tuples, lists and mappings (transformers' outputs are such), with the keys that lead to it.

    A key that is no word and no number counts by its place: a tensor must not be looked at, while it is being traced.

    Examples:
        >>> list(named_leaves({"x": 1, "states": (None, 2)}))
        [('x', 1), ('states.0', None), ('states.1', 2)]
    """
    items: Any
    if isinstance(tree, Mapping):
        named = (key if isinstance(key, (str, int)) else place for place, key in enumerate(tree))
        items = zip(named, tree.values(), strict=True)
    elif isinstance(tree, (tuple, list)):
        items = enumerate(tree)
    else:
        yield name, tree
        return
    for key, item in items:
        yield from named_leaves(item, f"{name}.{key}" if name else str(key))


def named_tensors_in(tree: Any) -> Iterator[tuple[str, Any]]:
    """The tensors among the leaves, in order, with the keys that lead to them, joined by dots."""
    import torch

    return ((name, leaf) for name, leaf in named_leaves(tree) if isinstance(leaf, torch.Tensor))


def tensors_in(tree: Any) -> Iterator[Any]:
    """The tensors among the leaves, in order."""
    return (tensor for _, tensor in named_tensors_in(tree))
