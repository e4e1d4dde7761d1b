"""From what was typed to a model and the arguments of one call of it."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from htp_export.errors import InputError, ModelSourceError
from htp_export.process.factories import call_factory

if TYPE_CHECKING:
    from torch import nn

    from htp_export.files.checkpoint import Checkpoint


@dataclass(frozen=True)
class SourceCall:
    """A model and the arguments of one call of it.

    Attributes:
        args: Its positional arguments; empty where all could be given by keyword.
        kwargs: Its keyword arguments, in the order of ``forward``'s signature.
        example: What the task says of the call: names, dynamic axes, and runs to verify; None without a task; see
            `htp_export.huggingface.ExampleCall`.
        checkpoint: The files of its weights, where the weights are read from them only when they are used.
        packed: The folder or file of its weights, where they are quantized already; the model has them as floats.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    example: Any = None
    checkpoint: Checkpoint | None = None
    packed: Path | None = None

    @property
    def named_inputs(self) -> dict[str, Any]:
        """The tensors under the names that the file has for them."""
        return self.inputs if self.example is None else dict(self.example.inputs)

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Name → keyword arguments of each run that a check of the file makes; the name is empty if there is one."""
        runs = {} if self.example is None else dict(self.example.runs)
        return runs if len(runs) > 1 else {"": self.kwargs}

    @contextlib.contextmanager
    def adapted(self) -> Iterator[None]:
        """The model with the arguments and results of the file, for a ``with`` block."""
        with contextlib.nullcontext() if self.example is None else self.example.adapted():
            yield

    @property
    def inputs(self) -> dict[str, Any]:
        """The tensors that are arguments by keyword."""
        import torch

        return {name: value for name, value in self.kwargs.items() if isinstance(value, torch.Tensor)}


def call_entry(entry: str, seed: int = 0) -> SourceCall:
    """What ``package.module:factory`` returns: a model, put in eval mode, and example inputs as a tuple or a dict."""
    import torch

    from htp_export.exporter.capture.modules import set_eval_mode

    returned = call_factory(entry, seed)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], torch.nn.Module):
        raise ModelSourceError(entry, "must return (model, example inputs), the model an nn.Module")
    model, inputs = returned
    set_eval_mode(model)
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list, Mapping)):
        raise ModelSourceError(entry, f"example inputs are a tuple or a dict, not {type(inputs).__name__}")
    if isinstance(inputs, Mapping):
        order = [name for name in inspect.signature(model.forward).parameters if name in inputs]
        return SourceCall(model, (), {name: inputs[name] for name in dict.fromkeys((*order, *inputs))})
    return _by_keyword(model, tuple(inputs))


def _by_keyword(model: nn.Module, args: tuple[Any, ...]) -> SourceCall:
    """Positional arguments by keyword, where the signature has names for all of them."""
    named = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(args) > len(named):
        return SourceCall(model, args)
    return SourceCall(model, (), dict(zip(named, args, strict=False)))


def parse_overrides(settings: Sequence[str]) -> dict[str, object]:
    """``key=value`` as typed; values are JSON where they can be, else text.

    Examples:
        >>> parse_overrides(["num_hidden_layers=2", "hidden_act=relu", "depths=[1, 2]"])
        {'num_hidden_layers': 2, 'hidden_act': 'relu', 'depths': [1, 2]}
    """
    overrides: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {setting}: write key=value")
        if key.strip() in overrides:
            raise InputError(f"--set {setting}: {key.strip()} is set twice")
        try:
            overrides[key.strip()] = json.loads(value)
        except ValueError:
            overrides[key.strip()] = value
    return overrides
