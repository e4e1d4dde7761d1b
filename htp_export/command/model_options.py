"""The options that name a model, as several commands have them, and the model and its inputs that they lead to."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from htp_export.command.file_options import seed_option
from htp_export.command.sources import SourceCall, call_entry, parse_overrides
from htp_export.discovery import provider
from htp_export.errors import InputError

__all__ = ["Dtype", "ModelOptions"]


class Dtype(enum.StrEnum):
    """Float types of weights."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


@dataclass(frozen=True)
class ModelOptions:
    """Which model, with which weights and inputs: the options of every command that loads a PyTorch model."""

    source: Annotated[
        str | None, typer.Argument(help="Hub id, local folder, or model type (bert).", show_default=False)
    ] = None
    entry: Annotated[str | None, typer.Option(help="package.module:factory that returns (model, example inputs).")] = (
        None
    )
    task: Annotated[
        str | None, typer.Option(help="fill-mask, text-generation-with-past, ...; auto: what the model is for.")
    ] = None
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Build from the config alone.")] = False
    seed: Annotated[int, seed_option("Of random weights and inputs: the same seed gives the same.")] = 0
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the config; may be repeated.")
    ] = None
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights.")] = None
    inputs: Annotated[Path | None, typer.Option(help='JSON file of shapes: {"input_ids": [2, 16]}.')] = None
    attention: Annotated[str | None, typer.Option(help="transformers' attention: eager, sdpa.")] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False

    @property
    def name(self) -> str:
        """What the model is called in messages."""
        return str(self.source or self.entry)

    @property
    def random(self) -> bool:
        """Whether the seed matters."""
        return self.random_weights or self.entry is not None

    def check(self, stream_weights: bool = False) -> None:
        """Refuse options that do not go together.

        Args:
            stream_weights: Whether the weights are to stay in their safetensors files.

        Raises:
            InputError: If no model is named, or two are, or if there are options that a factory decides.
        """
        if (self.source is None) == (self.entry is None):
            raise InputError("give one model: a SOURCE or --entry package.module:factory")
        if self.source is not None and not self.source.strip():
            raise InputError("SOURCE is empty; name a folder, a hub id (owner/name) or a model type")
        if self.source is not None and re.fullmatch(r"[\w.]+:\w+", self.source):
            raise InputError(f"{self.source}: a factory is named with --entry {self.source}")
        if stream_weights and (self.entry is not None or self.random_weights):
            raise InputError("--stream-weights is for a SOURCE with weights in safetensors files")
        ours = {**self._changes, "--inputs": self.inputs}
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
        """Refuse options that choose or change a model, where SOURCE is an ONNX file.

        Raises:
            InputError: If there is such an option.
        """
        for name, value in self._changes.items():
            if value:
                raise InputError(f"{name} is for a model without a file; {self.source} is one")

    def call(
        self, *, batch: int = 1, shapes: Mapping[str, Any] | None = None, stream_weights: bool = False
    ) -> SourceCall:
        """The model, and example inputs.

        Args:
            batch: Examples in one call, where nothing else says it.
            shapes: Input of a file → shape, as far as the model takes an input of that name; what is in the file of
                ``--inputs`` goes before.
            stream_weights: Whether the weights stay in their safetensors files.

        Raises:
            InputError: If there is no such model, or it cannot be built as asked.
        """
        self.check(stream_weights)
        if self.entry is not None:
            return call_entry(self.entry, self.seed)
        made: SourceCall = provider("named_models").one_call(
            self, batch=batch, shapes=shapes, stream_weights=stream_weights
        )
        return made

    def calls_by_task(
        self,
        *,
        two_files: bool | None = None,
        cache_names: str = "optimum",
        sizes: Mapping[str, int] | None = None,
        stream_weights: bool = False,
        right_padding: bool = False,
    ) -> dict[str, SourceCall]:
        """The files of the task, and the call that each is exported from; empty where no task is given or guessed.

        A task is guessed for folders and hub ids whose config names a class that generates.

        Args:
            two_files: Whether a decoder has one file for prefill and one for decoding; None for what is usual.
            cache_names: ``optimum`` or ``transformers``.
            sizes: Name of a dimension → its size in the example.
            stream_weights: Whether the weights stay in their safetensors files.
            right_padding: Whether sliding windows count tokens, for batches that are padded on the right.

        Raises:
            InputError: If there is no such model, or it cannot do the task.
        """
        self.check(stream_weights)
        if not self.has_task:
            return {}
        if cache_names not in ("optimum", "transformers"):
            raise InputError(f"--cache-names {cache_names}: choose optimum or transformers")
        made: dict[str, SourceCall] = provider("named_models").calls_by_task(
            self, two_files=two_files, cache_names=cache_names, sizes=sizes, stream_weights=stream_weights
        )
        return made

    @cached_property
    def has_task(self) -> bool:
        """Whether a task is given, or guessed from the config of a folder or hub id.

        Raises:
            ModelSourceError: If there is no such model.
        """
        if self.task is not None or self.entry is not None:
            return self.entry is None
        return bool(provider("named_models").has_guessed_task(self))

    @property
    def overrides(self) -> dict[str, object]:
        """What ``--set`` changes in the config."""
        return parse_overrides(self.settings or ())
