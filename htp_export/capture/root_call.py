"""How the TorchScript exporter calls the model: by keyword, with tensors, and with outputs that it can trace.

torch fills the model's whole signature with positional arguments, defaults included, and then traces all of them.
Models whose ``forward`` sits in decorators refuse that (transformers 5: ``got multiple values for argument
'use_cache'``), the tracer refuses numbers and flags among the arguments, and objects such as a key-value cache among
the outputs. Here only what the user gave is passed, as the user gave it: tensors are traced, all else is constant.
No wrapper module is needed for that, so that no module path changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from htp_export.capture.calls import named_leaves

_MISSING = object()


def _traceable(value: Any) -> bool:
    """Whether the tracer takes a value among inputs and outputs."""
    import torch

    if isinstance(value, Mapping):
        return isinstance(value, dict) and all(map(_traceable, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_traceable, value))
    return value is None or isinstance(value, (torch.Tensor, str))


class RootCall:
    """One call of the model as the user meant it.

    Args:
        model: The module that is exported.
        in_signature_order: Whether keyword arguments become inputs in the order of ``forward``'s signature, as torch
            has it; else in the order in which they were given, as under dynamo.
        args: The arguments as ``torch.onnx.export`` passes them on: a tuple, keyword arguments as a dict at its end.

    Attributes:
        traced: The arguments that become inputs of the trace, in order.
    """

    def __init__(self, model: Any, args: Any, *, in_signature_order: bool) -> None:
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        keywords = dict(args[-1]) if args and isinstance(args[-1], dict) else {}
        positional = args[:-1] if args and isinstance(args[-1], dict) else args
        known = []
        if in_signature_order:
            known = [name for name in inspect.signature(model.forward).parameters if name in keywords]
        slots: list[tuple[int | str, Any]] = list(enumerate(positional))
        slots.extend((name, keywords[name]) for name in dict.fromkeys((*known, *keywords)))
        self._slots = [(where, _MISSING if _traceable(value) else value) for where, value in slots]
        self.traced = tuple(value for _, value in slots if _traceable(value))

    def arguments(self, traced: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The user's arguments, positional and by keyword, with the tracer's tensors in their places."""
        values = iter(traced)
        given = [(where, next(values) if value is _MISSING else value) for where, value in self._slots]
        positional = tuple(value for where, value in given if isinstance(where, int))
        return positional, {where: value for where, value in given if isinstance(where, str)}

    @staticmethod
    def result(result: Any) -> Any:
        """What the model returns, as the tracer takes it."""
        return result if _traceable(result) else tuple(_tensors(result))


def _tensors(value: Any) -> Iterator[Any]:
    """Every tensor in a structure, attributes of objects (transformers' caches) included, in order."""
    import torch

    for _, leaf in named_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)):
            yield from _tensors(vars(leaf))
