"""The calls of modules during one export, as a tree, in the order in which they began."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from htp_export import tags

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


@dataclass
class CallLog:
    """A growing list of calls, with the stack of those that are running.

    Attributes:
        calls: Every call, in the order in which they began; an index into it names a call.
        stack: Indices of the calls that are running, outermost first.
        returned_inputs: For each module path, whether every call so far gave back only tensors that it was given.
    """

    calls: list[Call] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)
    returned_inputs: dict[str, bool] = field(default_factory=dict)
    _counts: collections.Counter[str] = field(default_factory=collections.Counter)
    _chains: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _owners: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def enter(self, path: str) -> int:
        """Note that a module begins to run; the index of its call."""
        index = self.add(path, self.stack[-1] if self.stack else NO_CALL)
        self.stack.append(index)
        return index

    def add(self, path: str, parent: int) -> int:
        """Note a call without putting it on the stack; its index."""
        self.calls.append(Call(path, self._counts[path], parent))
        self._counts[path] += 1
        return len(self.calls) - 1

    def leave(self, given: Any, returned: Any) -> None:
        """Note that the innermost running module returns."""
        path = self.calls[self.stack.pop()].path
        if self.returned_inputs.get(path, True):
            known = {id(tensor) for tensor in tensors_in(given)}
            self.returned_inputs[path] = all(id(tensor) in known for tensor in tensors_in(returned))

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


def tensors_in(tree: Any) -> Iterator[Any]:
    """Every tensor in nested tuples, lists, mappings and objects with ``to_tuple`` (transformers' outputs)."""
    import torch

    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from itertools.chain.from_iterable(map(tensors_in, tree.values()))
    elif isinstance(tree, (tuple, list)):
        yield from itertools.chain.from_iterable(map(tensors_in, tree))
