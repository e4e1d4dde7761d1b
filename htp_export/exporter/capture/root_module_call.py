"""How the TorchScript exporter calls the model: as torch calls it, and as the user does where torch's call fails.

torch formats the arguments first. It fills the signature of ``forward`` by position, defaults
included, drops keywords that ``forward`` does not name, and makes tensors of numbers and flags,
which become inputs of the graph. Whatever torch exports in this way is exported in this way.

Some models refuse it (transformers 5: ``got multiple values for argument 'use_cache'``), the tracer
refuses objects among the arguments, and objects such as a key-value cache among the outputs; and a
model that asks whether an argument is a number may compute something else (transformers:
``logits_to_keep``). Then only what the user gave is passed, as the user gave it: tensors are
traced, all else is constant.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from htp_export.errors import described
from htp_export.exporter.capture.model_state import ModelState, unchanged
from htp_export.exporter.capture.torchscript_internals import flattened, numbers_as_tensors
from htp_export.format.leaves import named_leaves

_MISSING = object()
_log = logging.getLogger(__name__)


class GivenCall:
    """The call as the user gave it: by position and by keyword, tensors traced, all else constant.

    ``args`` are as ``torch.onnx.export`` passes them on: a tuple, keyword arguments as a dict at
    its end. With ``in_signature_order``, these become inputs in the order of ``forward``'s
    signature, as torch has it; else in the order in which they were given, as under dynamo.
    """

    def __init__(self, model: Any, args: Any, *, in_signature_order: bool) -> None:
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        keywords = dict(args[-1]) if args and isinstance(args[-1], dict) else {}
        self.positional = args[:-1] if args and isinstance(args[-1], dict) else args
        known = []
        if in_signature_order:
            known = [
                name for name in inspect.signature(model.forward).parameters if name in keywords
            ]
        self.keywords = {name: keywords[name] for name in dict.fromkeys((*known, *keywords))}
        slots: list[tuple[int | str, Any]] = [*enumerate(self.positional), *self.keywords.items()]
        self._slots = [(where, _MISSING if _traceable(value) else value) for where, value in slots]
        # the inputs of the trace, in order
        self.traced = tuple(value for _, value in slots if _traceable(value))
        # The names or places of the arguments that do not become inputs of the trace
        self.constants = [where for where, value in self._slots if value is not _MISSING]

    def arguments(self, traced: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What ``forward`` is called with, positional and by keyword: the tracer's tensors in their places."""
        values = iter(traced)
        slots = [
            (where, next(values) if value is _MISSING else value) for where, value in self._slots
        ]
        positional = tuple(value for where, value in slots if isinstance(where, int))
        return positional, {where: value for where, value in slots if isinstance(where, str)}

    @staticmethod
    def numbers(_: tuple[Any, ...]) -> list[Any]:
        """The tensors among the arguments that stand for numbers: none, as numbers are constant."""
        return []

    @staticmethod
    def result(result: Any) -> Any:
        """What the model returns, as the tracer takes it."""
        return result if _traceable(result) else tuple(_tensors(result))


class FormattedCall:
    """The call as torch formats it; keyword arguments become inputs in the order in which the user gave them."""

    def __init__(self, formatted: Any, given: GivenCall) -> None:
        values = formatted if isinstance(formatted, tuple) else (formatted,)
        by_position = min(len(given.positional), len(values))
        rest, found = [*range(by_position, len(values))], []
        for value in given.keywords.values():
            found += [at for at in rest if at not in found and values[at] is value][:1]
        self._order = [*range(by_position), *found, *(at for at in rest if at not in found)]
        self.traced = (
            tuple(values[at] for at in self._order) if isinstance(formatted, tuple) else formatted
        )
        self.formatted = values
        # Whether ``forward`` is certain to get the values that the user gave it. Else there are
        # numbers among the arguments, which become tensors, or keywords that torch drops.
        self.same_values = len(found) == len(given.keywords) and all(map(_traceable, values))
        # Whether, besides, it gets them as the user gave them: by position, and no defaults
        self.same_call = (
            self.same_values and not given.keywords and len(values) == len(given.positional)
        )

    def arguments(self, traced: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placed = dict(zip(self._order, traced, strict=True))
        return tuple(placed[at] for at in range(len(placed))), {}

    def numbers(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The tensors among the arguments that stand for numbers and flags."""
        if self.same_values:
            return []
        was = (leaf for _, leaf in named_leaves(self.formatted))
        now = (leaf for _, leaf in named_leaves(arguments))
        return [
            tensor
            for number, tensor in zip(was, now, strict=False)
            if isinstance(number, (int, float))
        ]

    def result(self, result: Any) -> Any:
        if not self.same_values or not _refused(result):
            return result
        _log.info(
            "torch does not take a %s as output: its tensors become outputs", type(result).__name__
        )
        return GivenCall.result(result)


RootCall: TypeAlias = GivenCall | FormattedCall


class RootCalls:
    """How the model is called in one export; ``args`` are as of `GivenCall`.

    With ``names_inputs``, the user names the graph's inputs, and counts on torch's order of them.
    ``refusal`` says why an export failed in which the model was called as torch calls it; it is
    empty if there was none.
    """

    def __init__(self, args: Any, *, names_inputs: bool, refusal: str = "") -> None:
        self.call: RootCall | None = None  # how it is called; None before it is traced
        # the state before the call, if the call as given may be tried after it
        self.before: ModelState | None = None
        self.runs = False  # whether it runs, so that modules which are called are called by it
        self._args, self._names_inputs, self._refusal = args, names_inputs, refusal

    def choose(self, model: Any, formatted: Any) -> Any:
        """Choose how to call the model, and return the arguments that become inputs of the trace.

        ``formatted`` are the arguments as torch formats them.
        """
        as_passed, refusal = (
            GivenCall(model, self._args, in_signature_order=self._names_inputs),
            self._refusal,
        )
        self.call, self.before = as_passed, None
        if not refusal:
            call = FormattedCall(formatted, as_passed)
            before = (
                None
                if call.same_call
                else ModelState(model, (as_passed.positional, as_passed.keywords))
            )
            if before is not None and not call.same_values:
                refusal = _changed_meaning(model, call, as_passed)
            if not refusal:
                self.call, self.before = call, before
                return call.traced
        level = logging.WARNING if as_passed.constants else logging.INFO
        constants = ", ".join(map(str, as_passed.constants))
        listed = f"; constants in the file: {constants}" if constants else ""
        _log.log(
            level, "%s: not called as torch calls it: %s%s", type(model).__name__, refusal, listed
        )
        return as_passed.traced

    def traced(self) -> None:
        """Note that the trace is made: as given, the model has the same trace but for numbers."""
        if isinstance(self.call, FormattedCall) and self.call.same_values:
            self.before = None


def _changed_meaning(model: Any, call: FormattedCall, as_passed: GivenCall) -> str:
    """Why the two calls, run without a trace, do not give the same; empty if they do. The model stays as it is."""
    try:
        arguments = numbers_as_tensors(call.formatted)
    except RuntimeError as error:
        return described(error)
    given = as_passed.positional, as_passed.keywords
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with unchanged(model, given):
                theirs = flattened(model(*arguments))
        except Exception as error:
            return described(error)
        try:
            with unchanged(model, given):
                ours = flattened(model(*as_passed.positional, **as_passed.keywords))
            same = _equal(theirs, ours)
        except Exception:  # the call as given is none: nothing to compare with
            return ""
    return (
        ""
        if same
        else "numbers that become tensors, or keywords that are dropped, change its result"
    )


def _equal(theirs: list[Any], ours: list[Any]) -> bool:
    """Whether two results are the same, but for types and rounding."""

    def wide(tensor: Any) -> Any:
        return tensor.dequantize() if tensor.is_quantized else tensor.to(torch.complex128)

    return [tensor.shape for tensor in theirs] == [tensor.shape for tensor in ours] and all(
        torch.allclose(wide(theirs_tensor), wide(our_tensor), rtol=1e-3, atol=1e-5, equal_nan=True)
        for theirs_tensor, our_tensor in zip(theirs, ours, strict=True)
    )


def _refused(result: Any) -> bool:
    """Whether the tracer refuses what a model returns."""
    try:
        flattened(result)
    except RuntimeError:
        return True
    return False


def _traceable(value: Any) -> bool:
    """Whether the tracer takes a value among inputs and outputs, and gives it on as it is."""
    if isinstance(value, Mapping):
        return isinstance(value, dict) and all(map(_traceable, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_traceable, value))
    return value is None or isinstance(value, (torch.Tensor, str))


def _tensors(value: Any) -> Iterator[Any]:
    """Every tensor in a structure, attributes of objects (transformers' caches) included, in order."""
    for _, leaf in named_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)):
            yield from _tensors(vars(leaf))
