"""The options of several commands that name a model or a file, and the model and inputs that they create."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from htp_export.command.options import Idle, seed_option
from htp_export.command.run_options import InputOptions, ShapesOption
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
        args: Its positional arguments; empty if all arguments have keywords.
        kwargs: Its keyword arguments, in the order of ``forward``'s signature.
        example: The `htp_export.huggingface.ExampleCall` of the task: names, dynamic axes, and runs
            to verify; None without a task.
        checkpoint: The files of its weights, if weights are read only when they are used.
        packed: The folder or file of its weights, if they are quantized; the model contains them as
            floats.
        returned: The example inputs as a factory returned them.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    example: Any = None
    checkpoint: Checkpoint | None = None
    packed: Path | None = None
    returned: Any = None

    @property
    def named_inputs(self) -> dict[str, Any]:
        """The tensors by the names of the inputs of the file."""
        return self.inputs if self.example is None else dict(self.example.inputs)

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Name → keyword arguments of each run to verify the file; the name is empty if there is only one run."""
        runs = {} if self.example is None else dict(self.example.runs)
        return runs if len(runs) > 1 else {"": self.kwargs}

    @contextlib.contextmanager
    def adapted(self) -> Iterator[None]:
        """Give the model the arguments and results of the file, for a ``with`` block."""
        with contextlib.nullcontext() if self.example is None else self.example.adapted():
            yield

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments that are tensors."""
        import torch

        return {
            name: value for name, value in self.kwargs.items() if isinstance(value, torch.Tensor)
        }


def call_entry(entry: str, seed: int = 0) -> SourceCall:
    """Call ``package.module:factory``, which returns a model and example inputs as a tuple or a dict.

    The model is set to eval mode.
    """
    import torch

    from htp_export.exporter.capture.modules import set_eval_mode

    returned = call_factory(entry, seed)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not isinstance(returned[0], torch.nn.Module):
        raise ModelSourceError(entry, "must return (model, example inputs), the model an nn.Module")
    model, inputs = returned
    set_eval_mode(model)
    return replace(_call_with(entry, model, inputs), returned=inputs)


def _call_with(entry: str, model: nn.Module, inputs: Any) -> SourceCall:
    """Return the call of a model with the inputs of a factory: by keyword, if their names are known."""
    import torch

    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list, Mapping)):
        raise ModelSourceError(
            entry, f"example inputs must be a tuple or a dict, not {type(inputs).__name__}"
        )
    if isinstance(inputs, Mapping):
        parameters = inspect.signature(model.forward).parameters
        in_order = [name for name in parameters if name in inputs]
        names = dict.fromkeys((*in_order, *inputs))
        return SourceCall(model, (), {name: inputs[name] for name in names})
    return _by_keyword(model, tuple(inputs))


def _by_keyword(model: nn.Module, args: tuple[Any, ...]) -> SourceCall:
    """Return a call with keyword arguments, if the signature has names for all positional arguments."""
    named = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(args) > len(named):
        return SourceCall(model, args)
    return SourceCall(model, (), dict(zip(named, args, strict=False)))


def parse_overrides(settings: Sequence[str]) -> dict[str, object]:
    """Parse ``key=value`` settings; a value is JSON if it can be parsed, and text otherwise.

    Examples:
        >>> parse_overrides(["num_hidden_layers=2", "hidden_act=relu", "depths=[1, 2]"])
        {'num_hidden_layers': 2, 'hidden_act': 'relu', 'depths': [1, 2]}
    """
    overrides: dict[str, object] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"--set {setting}: write key=value")
        if key in overrides:
            raise InputError(f"--set {setting}: {key} is set twice")
        try:
            overrides[key] = parse_json(text, finite=False)
        except ValueError:
            overrides[key] = text
        if _WHOLE.fullmatch(text) and not isinstance(overrides[key], int):
            raise InputError(f"--set {key}: a whole number of more than 64 bits")
    return overrides


_WHOLE = re.compile(r"\s*-?[0-9]+\s*")


@dataclass(frozen=True)
class ModelOptions:
    """A PyTorch model, its weights and its inputs: the options of every command that loads one."""

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
        """The name of the model in messages."""
        return str(self.source or self.entry)

    @property
    def words(self) -> str:
        """The arguments and options that choose this model, for a command to type.

        Examples:
            >>> ModelOptions("bert", random_weights=True, settings=["num_hidden_layers=2"]).words
            'bert --random-weights --set num_hidden_layers=2'
        """
        words = ["--entry", self.entry] if self.entry is not None else [str(self.source)]
        for name, value in self._changes.items():
            if value is True:
                words.append(name)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    words += [name, text]
        return shlex.join(words)

    @property
    def random(self) -> bool:
        """Whether the result depends on the seed."""
        return self.random_weights or self.entry is not None

    def check(self, stream_weights: bool = False) -> None:
        """Refuse options that cannot be combined: two models, no model, or options that a factory decides."""
        if (self.source is None) == (self.entry is None):
            raise InputError("give one model: a SOURCE or --entry package.module:factory")
        if self.source is not None and re.fullmatch(r"[\w.]+:\w+", self.source):
            raise InputError(f"{self.source}: a factory is named with --entry {self.source}")
        if stream_weights and (self.entry is not None or self.random_weights):
            raise InputError("--stream-weights is for a SOURCE with weights in safetensors files")
        if self.entry is not None:
            for name, value in {**self._changes, "--shapes": self.shapes}.items():
                if value:
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
        """Refuse options that choose or change a model, because SOURCE is an ONNX file."""
        for name, value in self._changes.items():
            if value:
                raise InputError(
                    f"{name} is for a model without a file, but {self.source} is an ONNX file"
                )

    def call(
        self,
        *,
        batch: int = 1,
        shapes: Mapping[str, Any] | None = None,
        stream_weights: bool = False,
    ) -> SourceCall:
        """Create the model and example inputs.

        ``batch`` is the default batch size. ``shapes`` are those of the inputs of a file, of which
        the inputs of the model are used; ``--shapes`` takes precedence.
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
        """Return the files of the task, and the call for the export of each; empty without a task.

        By default, folders and hub ids whose config names a generating class have a task. The
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
        """Whether there is a task: an option, or one that follows from the config of a folder or hub id."""
        if self.task is not None or self.entry is not None:
            return self.entry is None
        return bool(provider("named_models").has_guessed_task(self))

    @property
    def overrides(self) -> dict[str, object]:
        """The changes of the config by ``--set``."""
        return parse_overrides(self.settings or ())


_MODEL_NAME = r"(?=.{1,96}$)([\w.-]+/)?[\w.-]+"  # a hub id or a model type


@dataclass(frozen=True)
class Looked:
    """A model to inspect: a file, or the graph of a PyTorch model.

    ``facts`` are entries of the JSON result that describe how the graph was captured.
    """

    model: ModelSource
    name: str
    facts: dict[str, Any]

    @property
    def file(self) -> Path | None:
        """The file; None for a PyTorch model."""
        return self.model if isinstance(self.model, Path) else None


@dataclass(frozen=True)
class LookOptions(ModelOptions):
    """An ONNX file or a PyTorch model: the options of the commands that show properties of a model."""

    source: Annotated[
        str | None,
        typer.Argument(
            metavar="file", help="The ONNX file; or a model: hub id, local folder, model type."
        ),
    ] = None

    @property
    def is_file(self) -> bool:
        """Whether the source is an ONNX file: by its extension, or because it cannot be the name of a model."""
        if self.entry is not None or self.source is None or self.random_weights:
            return False
        import onnx

        suffix = Path(self.source).suffix
        if os.path.isfile(self.source):  # noqa: PTH113 - it accepts any string
            return True
        if onnx.serialization.registry.get_format_from_file_extension(suffix):
            return True
        return not (os.path.isdir(self.source) or re.fullmatch(_MODEL_NAME, self.source))  # noqa: PTH112 - as above

    def run_keywords(self, runs_on: InputOptions) -> dict[str, Any]:
        """Return the arguments of a run. For a PyTorch model, ``--shapes`` is about its example inputs."""
        return (runs_on if self.is_file else replace(runs_on, shapes=None)).keywords

    def look(self, *, quiet: bool = False) -> Looked:
        """Return the file, or a graph of the model; how it was captured, and why not better, is printed to stderr."""
        if self.is_file:
            self.check_file()
            return Looked(Path(str(self.source)), str(self.source), {})
        if self.source is None and self.entry is None:
            raise InputError("name an ONNX file, a model, or --entry package.module:factory")
        with (
            Steps(quiet=quiet).step(f"tracing {self.name}"),
            contextlib.redirect_stdout(sys.stderr),
        ):
            # stdout is for the result, and not for output of the model itself
            inspected = provider("traced_models").traced(self.call())
        for line in str(inspected).splitlines():
            notice_line(line)
        return Looked(inspected, self.name, inspected.to_dict())


def names_file(given: Mapping[str, Any]) -> bool:
    """Return whether the values of `LookOptions` name an ONNX file."""
    names = ("source", "entry", "random_weights")
    return LookOptions(**{name: given[name] for name in names}).is_file


FILE_IDLE = Idle(("seed",), names_file, "it is for a model without a file")
