"""The options that name a model or a file, as several commands have them, and the model and inputs they lead to."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from htp_export.command.options import Idle, ShapesOption, seed_option
from htp_export.command.terminal import Steps, notice_line
from htp_export.discovery import provider
from htp_export.errors import InputError, ModelSourceError
from htp_export.format.json_text import parse_json
from htp_export.process.user_code import call_factory

if TYPE_CHECKING:
    from torch import nn

    from htp_export.files.checkpoint import Checkpoint
    from htp_export.model.tagged import ModelSource


@dataclass(frozen=True)
class SourceCall:
    """A model and the arguments of one call of it.

    Attributes:
        args: Its positional arguments; empty where all could be given by keyword.
        kwargs: Its keyword arguments, in the order of ``forward``'s signature.
        example: What the task says of the call: names, dynamic axes, and runs to verify; None
            without a task; see `htp_export.huggingface.ExampleCall`.
        checkpoint: The files of its weights, where the weights are read from them only when they
            are used.
        packed: The folder or file of its weights, where they are quantized already; the model has
            them as floats.
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

        return {
            name: value for name, value in self.kwargs.items() if isinstance(value, torch.Tensor)
        }


def call_entry(entry: str, seed: int = 0) -> SourceCall:
    """What ``package.module:factory`` returns: a model, put in eval mode, and example inputs as a tuple or a dict."""
    import torch

    from htp_export.exporter.capture.modules import set_eval_mode

    returned = call_factory(entry, seed)
    if (
        not isinstance(returned, tuple)
        or len(returned) != 2
        or not isinstance(returned[0], torch.nn.Module)
    ):
        raise ModelSourceError(entry, "must return (model, example inputs), the model an nn.Module")
    model, inputs = returned
    set_eval_mode(model)
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list, Mapping)):
        raise ModelSourceError(
            entry, f"example inputs are a tuple or a dict, not {type(inputs).__name__}"
        )
    if isinstance(inputs, Mapping):
        order = [name for name in inspect.signature(model.forward).parameters if name in inputs]
        return SourceCall(
            model, (), {name: inputs[name] for name in dict.fromkeys((*order, *inputs))}
        )
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
            overrides[key.strip()] = parse_json(value, finite=False)
        except ValueError:
            overrides[key.strip()] = value
        if _WHOLE.fullmatch(value) and not isinstance(overrides[key.strip()], int):
            raise InputError(f"--set {key.strip()}: a whole number of more than 64 bits")
    return overrides


_WHOLE = re.compile(r"\s*-?[0-9]+\s*")


@dataclass(frozen=True)
class ModelOptions:
    """Which model, with which weights and inputs: the options of every command that loads a PyTorch model."""

    source: Annotated[
        str | None, typer.Argument(help="Hub id, local folder, or model type (bert).")
    ] = None
    entry: Annotated[str | None, "package.module:factory that returns (model, example inputs)."] = (
        None
    )
    task: Annotated[
        str | None, "fill-mask, text-generation-with-past, ...; auto: what the model is for."
    ] = None
    random_weights: Annotated[bool, "Build from the config alone."] = False
    seed: Annotated[
        int, seed_option("Of random weights and inputs: the same seed gives the same.")
    ] = 0
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the config; may be repeated."),
    ] = None
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "fp32", "fp16", "bf16"] | None, "Of the weights."
    ] = None
    shapes: ShapesOption = None
    attention: Annotated[str | None, "transformers' attention: eager, sdpa."] = None
    revision: Annotated[str | None, "Branch, tag or commit on the hub."] = None
    trust_remote_code: Annotated[bool, "Run the model's own code."] = False

    @property
    def name(self) -> str:
        """What the model is called in messages."""
        return str(self.source or self.entry)

    @property
    def random(self) -> bool:
        """Whether the seed matters."""
        return self.random_weights or self.entry is not None

    def check(self, stream_weights: bool = False) -> None:
        """Refuse options that do not go together: two models or none, or options that a factory decides."""
        if (self.source is None) == (self.entry is None):
            raise InputError("give one model: a SOURCE or --entry package.module:factory")
        if self.source is not None and re.fullmatch(r"[\w.]+:\w+", self.source):
            raise InputError(f"{self.source}: a factory is named with --entry {self.source}")
        if stream_weights and (self.entry is not None or self.random_weights):
            raise InputError("--stream-weights is for a SOURCE with weights in safetensors files")
        ours = {**self._changes, "--shapes": self.shapes}
        for name, value in ours.items():
            if self.entry is not None and value:
                raise InputError(f"{name} is for a SOURCE; with --entry, the factory decides")
        if self.revision is not None and Path(str(self.source)).is_dir():
            raise InputError(f"--revision is for a hub id, and {self.source} is a folder")

    @property
    def _changes(self) -> dict[str, object]:
        """The options that choose or change a model of transformers."""
        return {
            "--task": self.task,
            "--random-weights": self.random_weights,
            "--set": self.settings,
            "--dtype": self.dtype,
            "--attention": self.attention,
            "--revision": self.revision,
            "--trust-remote-code": self.trust_remote_code,
        }

    def check_file(self) -> None:
        """Refuse options that choose or change a model, where SOURCE is an ONNX file."""
        for name, value in self._changes.items():
            if value:
                raise InputError(f"{name} is for a model without a file; {self.source} is one")

    def call(
        self,
        *,
        batch: int = 1,
        shapes: Mapping[str, Any] | None = None,
        stream_weights: bool = False,
    ) -> SourceCall:
        """The model, and example inputs; ``batch`` is for where nothing else says it.

        Shapes are those of inputs of a file. The model takes those that it has; ``--shapes`` go
        before.
        """
        self.check(stream_weights)
        if self.entry is not None:
            return call_entry(self.entry, self.seed)
        call: SourceCall = provider("named_models").one_call(
            self, batch=batch, shapes=shapes, stream_weights=stream_weights
        )
        return call

    def calls_by_task(
        self, *, cache_names: str = "optimum", stream_weights: bool = False, **settings: Any
    ) -> dict[str, SourceCall]:
        """The files of the task, and the call that each is exported from; empty where no task is given or guessed.

        A task is guessed for folders and hub ids whose config names a class that generates. The
        settings are those of ``provides_named_models.calls_by_task``.
        """
        self.check(stream_weights)
        if not self.has_task:
            return {}
        if cache_names not in ("optimum", "transformers"):
            raise InputError(f"--cache-names {cache_names}: choose optimum or transformers")
        calls: dict[str, SourceCall] = provider("named_models").calls_by_task(
            self, cache_names=cache_names, stream_weights=stream_weights, **settings
        )
        return calls

    @cached_property
    def has_task(self) -> bool:
        """Whether a task is given, or guessed from the config of a folder or hub id."""
        if self.task is not None or self.entry is not None:
            return self.entry is None
        return bool(provider("named_models").has_guessed_task(self))

    @property
    def overrides(self) -> dict[str, object]:
        """What ``--set`` changes in the config."""
        return parse_overrides(self.settings or ())


_MODEL_NAME = r"(?=.{1,96}$)([\w.-]+/)?[\w.-]+"  # a hub id or a model type


@dataclass(frozen=True)
class Looked:
    """A model to look at: a file, or the graph of a PyTorch model; ``facts`` of the JSON say which way that was got."""

    model: ModelSource
    name: str
    facts: dict[str, Any]

    @property
    def file(self) -> Path | None:
        """The file; None for a PyTorch model."""
        return self.model if isinstance(self.model, Path) else None


@dataclass(frozen=True)
class LookOptions(ModelOptions):
    """An ONNX file or a PyTorch model: the options of the commands that show what a model is like."""

    source: Annotated[
        str | None,
        typer.Argument(
            metavar="file", help="The ONNX file; or a model: hub id, local folder, model type."
        ),
    ] = None

    @property
    def is_file(self) -> bool:
        """Whether an ONNX file is named: its name ends as those of ONNX files do, or it is no name of a model."""
        if self.entry is not None or self.source is None or self.random_weights:
            return False
        import onnx

        suffix = Path(self.source).suffix
        if os.path.isfile(self.source):  # noqa: PTH113 - it raises on no name
            return True
        if onnx.serialization.registry.get_format_from_file_extension(suffix):
            return True
        return not (os.path.isdir(self.source) or re.fullmatch(_MODEL_NAME, self.source))  # noqa: PTH112 - as above

    def look(self, *, quiet: bool = False) -> Looked:
        """The file, or a graph of the model; for that, stderr has which way it was got, and why no better one."""
        if self.is_file:
            self.check_file()
            return Looked(Path(str(self.source)), str(self.source), {})
        if self.source is None and self.entry is None:
            raise InputError("name an ONNX file, a model, or --entry package.module:factory")
        with (
            Steps(quiet=quiet).step(f"tracing {self.name}"),
            contextlib.redirect_stdout(sys.stderr),
        ):
            # stdout has the result, and not what the model itself prints
            inspected = provider("traced_models").traced(self.call())
        for line in str(inspected).splitlines():
            notice_line(line)
        return Looked(inspected, self.name, inspected.to_dict())


def names_file(given: Mapping[str, Any]) -> bool:
    """Whether the values of `LookOptions` name an ONNX file."""
    return LookOptions(
        **{name: given[name] for name in ("source", "entry", "random_weights")}
    ).is_file


FILE_IDLE = Idle(("seed",), names_file, "it is for a model without a file")
