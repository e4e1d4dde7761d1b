"""How the TorchScript exporter calls the model: as torch calls it, and as the user does where torch's call fails.

torch formats the arguments first. It fills the signature of ``forward`` by position, defaults included, drops keywords
that ``forward`` does not name, and makes tensors of numbers and flags, which become inputs of the graph. Whatever torch
exports in this way is exported in this way.

Some models refuse it (transformers 5: ``got multiple values for argument 'use_cache'``), the tracer refuses objects
among the arguments, and objects such as a key-value cache among the outputs; and a model that asks whether an argument
is a number may compute something else (transformers: ``logits_to_keep``). Then only what the user gave is passed, as
the user gave it: tensors are traced, all else is constant. No wrapper module is needed for that, so that no module path
changes.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from htp_export.errors import described
from htp_export.exporter.capture.modules import Before
from htp_export.exporter.capture.torchscript_internals import flattened, numbers_as_tensors
from htp_export.format.leaves import named_leaves

_MISSING = object()
_log = logging.getLogger(__name__)


class RootCall(Protocol):
    """One way of calling the model.

    Attributes:
        traced: The arguments that become inputs of the trace, in order.
    """

    traced: Any

    def arguments(self, traced: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What ``forward`` is called with, positional and by keyword: the tracer's tensors in their places."""

    def result(self, result: Any) -> Any:
        """What the model returns, as the tracer takes it."""


class GivenCall:
    """The call as the user gave it: by position and by keyword, tensors traced, all else constant.

    Args:
        model: The module that is exported.
        args: The arguments as ``torch.onnx.export`` passes them on: a tuple, keyword arguments as a dict at its end.
        in_signature_order: Whether keyword arguments become inputs in the order of ``forward``'s signature, as torch
            has it; else in the order in which they were given, as under dynamo.
    """

    def __init__(self, model: Any, args: Any, *, in_signature_order: bool) -> None:
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        keywords = dict(args[-1]) if args and isinstance(args[-1], dict) else {}
        self.positional = args[:-1] if args and isinstance(args[-1], dict) else args
        known = []
        if in_signature_order:
            known = [name for name in inspect.signature(model.forward).parameters if name in keywords]
        self.keywords = {name: keywords[name] for name in dict.fromkeys((*known, *keywords))}
        slots: list[tuple[int | str, Any]] = [*enumerate(self.positional), *self.keywords.items()]
        self._slots = [(where, _MISSING if _traceable(value) else value) for where, value in slots]
        self.traced = tuple(value for _, value in slots if _traceable(value))
        # The names or places of the arguments that do not become inputs of the trace
        self.constants = [where for where, value in self._slots if value is not _MISSING]

    def arguments(self, traced: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = iter(traced)
        slots = [(where, next(values) if value is _MISSING else value) for where, value in self._slots]
        positional = tuple(value for where, value in slots if isinstance(where, int))
        return positional, {where: value for where, value in slots if isinstance(where, str)}

    @staticmethod
    def result(result: Any) -> Any:
        return result if _traceable(result) else tuple(_tensors(result))


class FormattedCall:
    """The call as torch formats it.

    Args:
        formatted: The arguments as torch formats them; a tuple, as a rule.
        given: The call as the user gave it, in whose order keyword arguments become inputs of the trace.
    """

    def __init__(self, formatted: Any, given: GivenCall) -> None:
        values = formatted if isinstance(formatted, tuple) else (formatted,)
        by_position = min(len(given.positional), len(values))
        rest, found = [*range(by_position, len(values))], []
        for value in given.keywords.values():
            found += [at for at in rest if at not in found and values[at] is value][:1]
        self._order = [*range(by_position), *found, *(at for at in rest if at not in found)]
        self.traced = tuple(values[at] for at in self._order) if isinstance(formatted, tuple) else formatted
        self.formatted = values
        # Whether ``forward`` is certain to get the values that the user gave it. Else there are numbers among the
        # arguments, which become tensors, or keywords that torch drops.
        self.same_values = len(found) == len(given.keywords) and all(map(_traceable, values))
        # Whether, besides, it gets them as the user gave them: by position, and no defaults
        self.same_call = self.same_values and not given.keywords and len(values) == len(given.positional)

    def arguments(self, traced: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placed = dict(zip(self._order, traced, strict=True))
        return tuple(placed[at] for at in range(len(placed))), {}

    def result(self, result: Any) -> Any:
        if not self.same_values or not _refused(result):
            return result
        _log.info("torch does not take a %s as output: its tensors become outputs", type(result).__name__)
        return GivenCall.result(result)


@dataclass(frozen=True)
class RootChoice:
    """The call that is traced."""

    call: RootCall  # the call
    # The state to go back to before the call as given is tried; None if that is no other call
    before: Before | None = None

    @property
    def after_trace(self) -> RootChoice:
        """What is left to choose once the trace is made: as given, the model has the same trace but for numbers."""
        same = isinstance(self.call, FormattedCall) and self.call.same_values
        return replace(self, before=None) if same else self


class RootCalls:
    """How the model is called in one export.

    Args:
        args: The arguments, as ``torch.onnx.export`` passes them on.
        names_inputs: Whether the user names the graph's inputs, counting on torch's order of them.
        refusal: Why an export failed in which the model was called as torch calls it; empty if there was none.
    """

    def __init__(self, args: Any, *, names_inputs: bool, refusal: str = "") -> None:
        self.choice: RootChoice | None = None  # how it is called; None before it is traced
        self.runs = False  # whether it runs, so that modules which are called are called by it
        self._args, self._names_inputs, self._refusal = args, names_inputs, refusal

    @property
    def call(self) -> RootCall | None:
        """The call; None where torch alone says so."""
        return None if self.choice is None else self.choice.call

    def choose(self, model: Any, formatted: Any) -> Any:
        """Choose how to call the model, and return the arguments that become inputs of the trace.

        ``formatted`` are the arguments as torch formats them.
        """
        as_passed = GivenCall(model, self._args, in_signature_order=self._names_inputs)
        self.choice = _chosen(model, formatted, as_passed, self._refusal)
        return self.choice.call.traced

    def traced(self) -> None:
        """Note that the trace is made."""
        self.choice = None if self.choice is None else self.choice.after_trace


def _chosen(model: Any, formatted: Any, as_passed: GivenCall, refusal: str) -> RootChoice:
    if not refusal:
        call = FormattedCall(formatted, as_passed)
        if call.same_call:
            return RootChoice(call)
        before = Before(model, (as_passed.positional, as_passed.keywords))
        refusal = "" if call.same_values else _changed_meaning(model, call, as_passed, before)
        if not refusal:
            return RootChoice(call, before)
    level = logging.WARNING if as_passed.constants else logging.INFO
    constants = f"; constants in the file: {', '.join(map(str, as_passed.constants))}" if as_passed.constants else ""
    _log.log(level, "%s: not called as torch calls it: %s%s", type(model).__name__, refusal, constants)
    return RootChoice(as_passed)


def _changed_meaning(model: Any, call: FormattedCall, as_passed: GivenCall, before: Before) -> str:
    """Why the call as torch formats it does not give what the call as given gives; empty if it does.

    Both are run to find out, without a trace.
    """
    try:
        arguments = numbers_as_tensors(call.formatted)
    except RuntimeError as error:
        return described(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs = flattened(model(*arguments))
        except Exception as error:
            return described(error)
        finally:
            before.put_back()
        try:
            ours = flattened(model(*as_passed.positional, **as_passed.keywords))
            same = _equal(theirs, ours)
        except Exception:  # the call as given is none: nothing to compare with
            return ""
        finally:
            before.put_back()
    return "" if same else "numbers that become tensors, or keywords that are dropped, change its result"


def _equal(theirs: list[Any], ours: list[Any]) -> bool:
    """Whether two results are the same, but for types and rounding."""
    import torch

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
    import torch

    if isinstance(value, Mapping):
        return isinstance(value, dict) and all(map(_traceable, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_traceable, value))
    return value is None or isinstance(value, (torch.Tensor, str))


def _tensors(value: Any) -> Iterator[Any]:
    """Every tensor in a structure, attributes of objects (transformers' caches) included, in order."""
    import torch

    for _, leaf in named_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)):
            yield from _tensors(vars(leaf))
