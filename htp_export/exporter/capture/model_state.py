"""The state of a model that a run may change, and how it is put back: nothing of htp_export changes a user's model.

State are the buffers, the attributes of modules with all lists, dictionaries, tensors, random
number generators and plain objects in them, such as counters and caches, the arguments, and the
random numbers of the process. Parameters are too large to be copied for the few models whose
``forward`` changes them: each is copied before the first operator that writes to it.
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
"""Beyond, the objects that a model refers to are data of its program: visiting so many takes a tenth of a second."""

_PLAIN_CLASSES_OF_PYTHON = ("collections", "types")
"""Modules of the standard library whose objects hold what users put there; others have threads, files and loggers."""


class ModelState:
    """The state of a model, of its arguments and of random number generators: run twice, it gives what it gives once.

    Parameters are those that the model has now, with the memory that they have now; for their
    values see `unchanged`.
    """

    def __init__(self, model: nn.Module, arguments: Any) -> None:
        self._undo: list[Callable[[], object]] = []
        self._kept: list[Any] = []  # so that no id is that of another object later
        self._seen = set[int]()
        # those of scripted modules are in no attribute
        for tensor in (*model.buffers(), *tensors_in(arguments)):
            self._keep(tensor)
        attributes = [each for module in model.modules() for each in self._keep(module)]
        self._walk([arguments, *attributes])
        cuda_runs = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._random, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state of the process
        self._generator = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if cuda_runs else []

    def put_back(self) -> None:
        """Undo what was changed since."""
        for undo in self._undo:
            undo()
        random.setstate(self._random)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._generator)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)

    def _walk(self, values: list[Any]) -> None:
        """Keep some values, and what they hold, at any depth."""
        most = len(self._seen) + len(values) + _MOST_OBJECTS
        while values and len(self._seen) < most:
            values = [each for value in values for each in self._keep(value)]

    def _keep(self, value: Any) -> Iterable[Any]:
        """Record the contents of one object, and return the objects in it."""
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
        elif (undo := _generator_undo(value)) is not None:
            self._undo.append(undo)
        elif _holds_state(value):
            return [*self._keep_slots(value), *self._keep(getattr(value, "__dict__", None))]
        return ()

    def _keep_slots(self, value: Any) -> list[Any]:
        """Record the attributes of an object that its classes declare in ``__slots__``, and return them."""
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
        return [each for _, each in contents] if isinstance(value, dict) else contents


def _holds_state(value: Any) -> bool:
    """Whether the attributes of an object are state: a module, or an object of a class that is not Python's or torch's.

    Objects of torch are graphs and programs, whose caches are their own.
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
"""The value of a slot that was never set, or was deleted."""


def _slots_of(kind: type) -> tuple[Any, ...]:
    """The descriptors of the slots of a class and its bases; those of classes in C are none of a program."""
    owners = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    held = [each for base in owners for each in vars(base).values()]
    return tuple(each for each in held if isinstance(each, types.MemberDescriptorType))


def _read_slot(slot: Any, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _UNSET


def _put_slots_back(owner: Any, contents: Iterable[tuple[Any, Any]]) -> None:
    """Set slots to what they held, without the methods of the class, which may refuse it, as a frozen one does."""
    for slot, held in contents:
        if _read_slot(slot, owner) is held:
            continue
        if held is _UNSET:
            slot.__delete__(owner)
        else:
            slot.__set__(owner, held)


def _generator_undo(value: Any) -> Callable[[], object] | None:
    """Return a function that puts a random number generator back; None for anything else."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    # which has no state
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
    """Return a function that gives a tensor its memory back, and its values unless it is a parameter."""
    if is_lazy(tensor):
        return lambda: None
    try:
        memory = tensor.data
        values = None if isinstance(tensor, nn.Parameter) else memory.clone()
    except (RuntimeError, TypeError):  # a tensor of another library that has no such memory
        return lambda: None

    def undo() -> None:
        if not _is_same_memory(tensor.data, memory):
            tensor.data = memory
        if values is None:
            return
        # Without values of their own: sparse and fake tensors. Versions do not say whether a tensor
        # was changed: batch normalization counts none.
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
    except RuntimeError:  # it has no memory of its own: sparse, fake
        return True
    return same_place


def _put_array_back(array: Any, values: Any) -> None:
    if array.flags.writeable and array.tobytes() != values.tobytes():
        array[...] = values


def _put_container_back(container: Any, contents: list[Any]) -> None:
    """Fill a container with what it held, by the methods of Python's own class: a subclass may refuse them.

    One that holds the same is not touched.
    """
    kinds: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
    kind = next(each for each in kinds if isinstance(container, each))
    if isinstance(container, dict):
        if _identities(container.items()) != _identities(contents):
            kind.clear(container)
            for key, value in contents:
                kind.__setitem__(container, key, value)
    elif list(map(id, container)) != list(map(id, contents)):
        kind.clear(container)
        kind.update(container, contents) if kind is set else kind.extend(container, contents)


def _identities(items: Iterable[tuple[Any, Any]]) -> list[tuple[int, int]]:
    return [(id(key), id(value)) for key, value in items]


class _WrittenParameters:
    """The values of the parameters of a model that operators write to, as they were before."""

    def __init__(self, model: nn.Module) -> None:
        self._by_storage: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in model.parameters():
            storage = _storage(parameter)
            if storage is not None:
                self._by_storage[storage].append(parameter.data)

    def note(self, tensor: torch.Tensor) -> None:
        """Copy the parameters that lie in the memory of a tensor, which is about to change."""
        storage = _storage(tensor)
        for memory in self._by_storage.pop(storage, ()) if storage is not None else ():
            self._before.append((memory, memory.clone()))

    def put_back(self) -> None:
        """Write the values back."""
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
def unchanged(model: nn.Module, arguments: Any, *, traced: bool = False) -> Iterator[None]:
    """Put back what runs of a model inside a ``with`` block change, on errors too: `ModelState`, and parameters.

    Parameters that are written to are not noted if the runs are ``traced``: torch's tracers work on
    stand-ins for them.
    """

    def make(changes: Changes) -> None:
        state, written = ModelState(model, arguments), _WrittenParameters(model)
        changes.will_undo(written.put_back)
        changes.will_undo(state.put_back)  # first: parameters get the memory back that they had
        if not traced:
            enter(changes, noting_writes(written.note), of_thread=True)

    with restored(make):
        yield
