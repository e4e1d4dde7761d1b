"""The state of a model that a run may change; it is saved and restored around each run.

State are the buffers, the attributes of modules with all lists, dictionaries, tensors, random
number generators and plain objects in them, such as counters and caches, the arguments, and the
random number generators of the process. Parameters are too large to be copied for the few models
whose ``forward`` changes them: each is copied before the first operator that writes to it.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from htp_export.exporter.capture.torch_internals import noting_writes
from htp_export.format.leaves import tensors_in
from htp_export.process.restoring import Changes, enter, restored

_MOST_OBJECTS = 100_000
"""The largest number of objects that are saved; it takes a tenth of a second.

Beyond, the objects that a model refers to are data of its program."""

_PLAIN_CLASSES_OF_PYTHON = ("collections", "types")
"""Modules of the standard library whose objects contain the user's own.

Objects of other modules are threads, files and loggers."""


class ModelState:
    """The saved state of a model, of its arguments and of random number generators.

    Restored between two runs, it makes the second run equal to the first. Parameters get the memory
    back that they have now; for their values see `unchanged`.
    """

    def __init__(self, model: nn.Module, arguments: Any) -> None:
        self._undo: list[Callable[[], object]] = []
        self._kept: list[Any] = []  # keeps the objects alive, so that their ids stay unique
        self._seen = set[int]()
        # buffers of scripted modules are not in an attribute
        for tensor in (*model.buffers(), *tensors_in(arguments)):
            self._keep(tensor)
        attributes = [held for module in model.modules() for held in self._keep(module)]
        self._walk([arguments, *attributes])
        cuda_runs = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._random, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state of the process
        self._generator = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if cuda_runs else []

    def put_back(self) -> None:
        """Restore the state."""
        for undo in self._undo:
            undo()
        random.setstate(self._random)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._generator)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)

    def _walk(self, values: list[Any]) -> None:
        """Save objects, and the objects in them, at any depth."""
        most = len(self._seen) + len(values) + _MOST_OBJECTS
        while values and len(self._seen) < most:
            values = [held for value in values for held in self._keep(value)]

    def _keep(self, value: Any) -> Iterable[Any]:
        """Save the contents of one object, and return the objects in it."""
        if id(value) in self._seen or isinstance(
            value, (str, bytes, int, float, complex, type(None))
        ):
            return ()
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, torch.Tensor):
            self._undo.append(_tensor_undo(value))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._undo.append(functools.partial(_put_array_back, value, value.copy()))
        elif isinstance(value, (tuple, frozenset)):
            return value
        elif isinstance(value, (dict, list, set, deque)):
            return self._keep_container(value)
        else:
            return self._keep_object(value)
        return ()

    def _keep_object(self, value: Any) -> Iterable[Any]:
        """Save a random number generator, or an object with attributes."""
        undo = _generator_undo(value)
        if undo is not None:
            self._undo.append(undo)
            return ()
        if not _holds_state(value):
            return ()
        return [*self._keep_slots(value), *self._keep(getattr(value, "__dict__", None))]

    def _keep_slots(self, value: Any) -> list[Any]:
        """Save, and return, the attributes that an object's classes declare in ``__slots__``."""
        slots = _slots_of(type(value))
        if not slots:
            return []
        contents = [(slot, _read_slot(slot, value)) for slot in slots]
        self._undo.append(functools.partial(_put_slots_back, value, contents))
        return [held for _, held in contents if held is not _UNSET]

    def _keep_container(self, value: Any) -> Iterable[Any]:
        contents = list(value.items()) if isinstance(value, dict) else list(value)
        self._undo.append(functools.partial(_put_container_back, value, contents))
        if len(contents) > _MOST_OBJECTS:
            return ()
        if isinstance(value, dict):
            return [item for _, item in contents]
        return contents


def _holds_state(value: Any) -> bool:
    """Whether the attributes of an object are state.

    They are for a module, and for an object of a class outside Python and torch. Objects of torch
    are graphs and programs, whose caches are their own.
    """
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    if not hasattr(value, "__dict__") and not _slots_of(type(value)):
        return False
    home = str(type(value).__module__).partition(".")[0]
    if home in _PLAIN_CLASSES_OF_PYTHON:
        return True
    return home not in sys.stdlib_module_names and home != "torch"


_UNSET: Any = object()
"""The value of a slot that is not set."""


def _slots_of(kind: type) -> tuple[Any, ...]:
    """The descriptors of the slots of a class and its bases, except classes written in C."""
    owners = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    attributes = [attribute for base in owners for attribute in vars(base).values()]
    return tuple(slot for slot in attributes if isinstance(slot, types.MemberDescriptorType))


def _read_slot(slot: Any, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _UNSET


def _put_slots_back(owner: Any, contents: Iterable[tuple[Any, Any]]) -> None:
    """Restore slots without the methods of the class, which may reject it, as a frozen one does."""
    for slot, held in contents:
        if _read_slot(slot, owner) is held:
            continue
        if held is _UNSET:
            slot.__delete__(owner)
        else:
            slot.__set__(owner, held)


def _generator_undo(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a random number generator; None for other objects."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    # `SystemRandom` has no state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.BitGenerator):
        return functools.partial(setattr, value, "state", value.state)
    return None


def _tensor_undo(tensor: torch.Tensor) -> Callable[[], None]:
    """Return a function that restores a tensor's memory, and values if it is not a parameter."""
    if is_lazy(tensor):
        return lambda: None
    try:
        memory = tensor.data
        values = None if isinstance(tensor, nn.Parameter) else memory.clone()
    except (RuntimeError, TypeError):  # a tensor of another library without such memory
        return lambda: None

    def undo() -> None:
        if not _is_same_memory(tensor.data, memory):
            tensor.data = memory
        if values is None:
            return
        # Sparse and fake tensors, without values of their own, raise. Versions do not show whether
        # a tensor was changed: batch normalization does not count its changes.
        with (
            contextlib.suppress(RuntimeError),
            torch.no_grad(),
            torch.inference_mode(tensor.is_inference()),
        ):
            if not torch.equal(tensor, values):
                tensor.copy_(values)

    return undo


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    try:
        same_place = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    except RuntimeError:  # no memory of its own: sparse, fake
        return True
    return same_place


def _put_array_back(array: Any, values: Any) -> None:
    if array.flags.writeable and array.tobytes() != values.tobytes():
        array[...] = values


def _put_container_back(container: Any, contents: list[Any]) -> None:
    """Restore the contents of a container, if they changed.

    The methods of Python's own class are called, because a subclass may reject changes.
    """
    kinds: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
    kind = next(candidate for candidate in kinds if isinstance(container, candidate))
    if isinstance(container, dict):
        if _identities(container.items()) != _identities(contents):
            kind.clear(container)
            for key, value in contents:
                kind.__setitem__(container, key, value)
    elif list(map(id, container)) != list(map(id, contents)):
        kind.clear(container)
        if kind is set:
            kind.update(container, contents)
        else:
            kind.extend(container, contents)


def _identities(items: Iterable[tuple[Any, Any]]) -> list[tuple[int, int]]:
    return [(id(key), id(value)) for key, value in items]


class _WrittenParameters:
    """The values of a model's parameters before operators write to them."""

    def __init__(self, model: nn.Module) -> None:
        self._by_storage: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in model.parameters():
            storage = _storage(parameter)
            if storage is not None:
                self._by_storage[storage].append(parameter.data)

    def note(self, tensor: torch.Tensor) -> None:
        """Copy the parameters in the memory of a tensor that is about to change."""
        storage = _storage(tensor)
        for memory in self._by_storage.pop(storage, ()) if storage is not None else ():
            self._before.append((memory, memory.clone()))

    def put_back(self) -> None:
        """Restore the values."""
        for memory, values in self._before:
            memory.copy_(values)
        self._before.clear()


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        # lazy, sparse, or a subclass without memory of its own
        return None


@contextlib.contextmanager
def unchanged(
    model: nn.Module,
    arguments: Any,
    *,
    traced: bool = False,
) -> Iterator[None]:
    """Restore the state that runs of a model change in a ``with`` block, on errors too.

    That is `ModelState`, and parameters. Writes to parameters are not observed if the runs are
    ``traced``: torch's tracers replace parameters by other tensors.
    """

    def make(changes: Changes) -> None:
        state = ModelState(model, arguments)
        written = _WrittenParameters(model)
        changes.will_undo(written.put_back)
        changes.will_undo(state.put_back)  # first: parameters get the memory back that they had
        if not traced:
            enter(changes, noting_writes(written.note), of_thread=True)

    with restored(make):
        yield
