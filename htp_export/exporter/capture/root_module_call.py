"""How the TorchScript exporter calls the model: as torch does, or as the user does if that fails.

torch formats the arguments first. It fills the signature of ``forward`` by position, with defaults,
drops keywords that ``forward`` does not name, and converts numbers and flags to tensors, which
become inputs of the graph. A model that torch exports in this way is exported in this way.

Some models reject it (transformers 5: ``got multiple values for argument 'use_cache'``). The tracer
rejects objects among the arguments, and objects such as a key-value cache among the outputs. A
model that checks whether an argument is a number may compute another result (transformers:
``logits_to_keep``). In these cases the arguments are passed as the user passed them: tensors are
traced, everything else is constant.
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

_TRACED = object()
"""Marks an argument that becomes an input of the trace."""
_log = logging.getLogger(__name__)


class GivenCall:
    """The call as the user wrote it: by position and by keyword, tensors traced, the rest constant.

    ``args`` are as ``torch.onnx.export`` passes them on: a tuple, with keyword arguments as a dict
    at its end. With ``in_signature_order``, keyword arguments become inputs in the order of
    ``forward``'s signature, as torch has it; else in the order in which they were passed, as under
    dynamo.
    """

    def __init__(self, model: Any, args: Any, *, in_signature_order: bool) -> None:
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        keywords: dict[str, Any] = {}
        if args and isinstance(args[-1], dict):
            args, keywords = args[:-1], dict(args[-1])
        self.positional = args
        names = list(keywords)
        if in_signature_order:
            in_signature = inspect.signature(model.forward).parameters
            names = [name for name in in_signature if name in keywords] + names
        self.keywords = {name: keywords[name] for name in dict.fromkeys(names)}
        arguments: list[tuple[int | str, Any]] = [
            *enumerate(self.positional),
            *self.keywords.items(),
        ]
        # (position or name, the constant or `_TRACED`)
        self._slots: list[tuple[int | str, Any]] = []
        traced = []
        for slot, argument in arguments:
            if _traceable(argument):
                traced.append(argument)
                self._slots.append((slot, _TRACED))
            else:
                self._slots.append((slot, argument))
        self.traced = tuple(traced)  # the inputs of the trace, in order
        # positions or names of the arguments that do not become inputs of the trace
        self.constants = [slot for slot, argument in self._slots if argument is not _TRACED]

    def arguments(self, traced: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of ``forward``, by position and by keyword, with the tracer's tensors."""
        tensors = iter(traced)
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for slot, constant in self._slots:
            argument = next(tensors) if constant is _TRACED else constant
            if isinstance(slot, int):
                positional.append(argument)
            else:
                keywords[slot] = argument
        return tuple(positional), keywords

    @staticmethod
    def numbers(_: tuple[Any, ...]) -> list[Any]:
        """The tensors among the arguments that replace numbers: none, as numbers are constant."""
        return []

    @staticmethod
    def result(result: Any) -> Any:
        """The result of the model, in a form that the tracer accepts."""
        if _traceable(result):
            return result
        return tuple(_tensors(result))


class FormattedCall:
    """The call as torch formats it; keyword arguments become inputs in the user's order."""

    def __init__(self, formatted: Any, given: GivenCall) -> None:
        self.formatted = formatted if isinstance(formatted, tuple) else (formatted,)
        by_position = min(len(given.positional), len(self.formatted))
        by_keyword = self._positions_of_keywords(given, by_position)
        others = [
            position
            for position in range(by_position, len(self.formatted))
            if position not in by_keyword
        ]
        # positions among the formatted arguments, in the order of the inputs of the trace
        self._order = [*range(by_position), *by_keyword, *others]
        self.traced = formatted
        if isinstance(formatted, tuple):
            self.traced = tuple(formatted[position] for position in self._order)
        # Whether ``forward`` certainly receives the values that the user passed. Otherwise there
        # are numbers among the arguments, which become tensors, or keywords that torch drops.
        all_found = len(by_keyword) == len(given.keywords)
        self.same_values = all_found and all(map(_traceable, self.formatted))
        # Whether it also receives them as the user passed them: by position, without defaults
        all_by_position = not given.keywords and len(self.formatted) == len(given.positional)
        self.same_call = self.same_values and all_by_position

    def _positions_of_keywords(self, given: GivenCall, begin: int) -> list[int]:
        """The positions of the keyword arguments among the formatted ones; torch may drop some."""
        found: list[int] = []
        for argument in given.keywords.values():
            for position in range(begin, len(self.formatted)):
                if position not in found and self.formatted[position] is argument:
                    found.append(position)
                    break
        return found

    def arguments(self, traced: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_position = dict(zip(self._order, traced, strict=True))
        return tuple(by_position[position] for position in range(len(by_position))), {}

    def numbers(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The tensors among the arguments that replace numbers and flags."""
        if self.same_values:
            return []
        before = (leaf for _, leaf in named_leaves(self.formatted))
        now = (leaf for _, leaf in named_leaves(arguments))
        return [
            tensor
            for number, tensor in zip(before, now, strict=False)
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
    """The call of the model in one export; ``args`` are as of `GivenCall`.

    With ``names_inputs``, the user names the graph's inputs, and relies on torch's order of them.
    ``refusal`` is the reason why an export with torch's own call failed; empty without one.
    """

    def __init__(self, args: Any, *, names_inputs: bool, refusal: str = "") -> None:
        self.call: RootCall | None = None  # the chosen call; None before the trace
        # the state before the call, if the user's own call may be tried after it
        self.before: ModelState | None = None
        self.runs = False  # whether the model runs: modules called meanwhile are called by it
        self._args = args
        self._names_inputs = names_inputs
        self._refusal = refusal

    def choose(self, model: Any, formatted: Any) -> Any:
        """Choose how to call the model, and return the arguments that become inputs of the trace.

        ``formatted`` are the arguments as torch formats them.
        """
        given = GivenCall(model, self._args, in_signature_order=self._names_inputs)
        refusal = self._refusal
        self.call = given
        self.before = None
        if not refusal:
            call = FormattedCall(formatted, given)
            before = None
            if not call.same_call:
                before = ModelState(model, (given.positional, given.keywords))
            if not call.same_values:
                refusal = _changed_meaning(model, call, given)
            if not refusal:
                self.call = call
                self.before = before
                return call.traced
        level = logging.WARNING if given.constants else logging.INFO
        constants = ", ".join(map(str, given.constants))
        listed = f"; constants in the file: {constants}" if constants else ""
        _log.log(
            level, "%s: not called as torch calls it: %s%s", type(model).__name__, refusal, listed
        )
        return given.traced

    def traced(self) -> None:
        """Record that the trace is complete.

        The user's own call would give the same trace, except for numbers: it need not be tried.
        """
        if isinstance(self.call, FormattedCall) and self.call.same_values:
            self.before = None


def _changed_meaning(model: Any, call: FormattedCall, given: GivenCall) -> str:
    """Why the two calls, run without a trace, differ in their results; empty if they do not.

    The model is left unchanged.
    """
    try:
        arguments = numbers_as_tensors(call.formatted)
    except RuntimeError as error:
        return described(error)
    state = given.positional, given.keywords
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with unchanged(model, state):
                theirs = flattened(model(*arguments))
        except Exception as error:
            return described(error)
        try:
            with unchanged(model, state):
                ours = flattened(model(*given.positional, **given.keywords))
            is_same = _equal(theirs, ours)
        except Exception:  # the user's call fails, too: nothing to compare with
            return ""
    if is_same:
        return ""
    return "numbers that become tensors, or keywords that are dropped, change its result"


def _equal(theirs: list[Any], ours: list[Any]) -> bool:
    """Whether two results are equal except for types and rounding."""

    def wide(tensor: Any) -> Any:
        if tensor.is_quantized:
            return tensor.dequantize()
        return tensor.to(torch.complex128)

    if [tensor.shape for tensor in theirs] != [tensor.shape for tensor in ours]:
        return False
    # tolerances of single precision: the calls may run other kernels
    return all(
        torch.allclose(wide(one), wide(other), rtol=1e-3, atol=1e-5, equal_nan=True)
        for one, other in zip(theirs, ours, strict=True)
    )


def _refused(result: Any) -> bool:
    """Whether the tracer rejects the result of a model."""
    try:
        flattened(result)
    except RuntimeError:
        return True
    return False


def _traceable(value: Any) -> bool:
    """Whether the tracer accepts a value among inputs and outputs, and passes it on unchanged."""
    if isinstance(value, Mapping):
        return isinstance(value, dict) and all(map(_traceable, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_traceable, value))
    return value is None or isinstance(value, (torch.Tensor, str))


def _tensors(value: Any) -> Iterator[Any]:
    """Every tensor in a structure, in order, with attributes of objects (transformers' caches)."""
    for _, leaf in named_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)):
            yield from _tensors(vars(leaf))
