"""What a run of a model can change, and its way back: a model that is run twice gives what it would give once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from htp_export.format.leaves import tensors_in


class Before:
    """The state of a model, its arguments and the random number generators.

    Parameters are left out: a model of any size would be copied for the few whose ``forward`` changes them.

    Args:
        model: The module.
        arguments: What it is called with.
    """

    def __init__(self, model: Any, arguments: Any) -> None:
        import torch
        from torch.nn.parameter import is_lazy

        held = [tensor for tensor in (*model.buffers(), *tensors_in(arguments)) if not is_lazy(tensor)]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in held]
        self._attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
        self._containers = [(each, each.copy()) for each in self._held_containers()]
        self._random = random.getstate()
        cuda_runs = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._generator = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if cuda_runs else []

    def _held_containers(self) -> Iterator[Any]:
        """Dictionaries and lists that modules hold: their parameters and buffers are in such."""
        for _, attributes in self._attributes:
            for value in attributes.values():
                if isinstance(value, (dict, list)):
                    yield value

    def put_back(self) -> None:
        """Undo what was changed since."""
        import torch

        for now, then in (*self._attributes, *self._containers):
            _put_back(now, then)
        with torch.no_grad():
            for tensor, values in self._tensors:
                with contextlib.suppress(RuntimeError):  # tensors without values of their own: sparse, fake
                    if not torch.equal(tensor, values):  # versions do not tell: batch normalization raises none
                        tensor.copy_(values)
        random.setstate(self._random)
        torch.set_rng_state(self._generator)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)


def _put_back(now: Any, then: Any) -> None:
    """Fill a dictionary or list with what it held; one that holds the same is not touched."""
    if isinstance(now, list):
        if list(map(id, now)) != list(map(id, then)):
            now[:] = then
    elif [(key, id(value)) for key, value in now.items()] != [(key, id(value)) for key, value in then.items()]:
        now.clear()
        now.update(then)
