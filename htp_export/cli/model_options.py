"""The options that name a model, as several commands have them, and the model and its inputs that they lead to."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from htp_export.cli.sources import Call, call_entry, parse_overrides, read_shapes
from htp_export.errors import InputError

__all__ = ["Dtype", "ModelOptions"]


class Dtype(enum.StrEnum):
    """Float types of weights."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


@dataclass(frozen=True)
class ModelOptions:
    """Which model, with which weights and inputs: the options of every command that loads a PyTorch model."""

    source: Annotated[
        str | None, typer.Argument(help="Hub id, local folder, or model type (bert).", show_default=False)
    ] = None
    entry: Annotated[str | None, typer.Option(help="package.module:factory that returns (model, example inputs).")] = (
        None
    )
    task: Annotated[str | None, typer.Option(help="As in transformers' pipelines: fill-mask, ...")] = None
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Build from the config alone.")] = False
    seed: Annotated[int, typer.Option(help="Of random weights and inputs: the same seed gives the same.")] = 0
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

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            InputError: If no model is named, or two are, or if there are options that a factory decides.
        """
        if (self.source is None) == (self.entry is None):
            raise InputError("give one model: a SOURCE or --entry package.module:factory")
        if self.source is not None and not self.source.strip():
            raise InputError("SOURCE is empty; name a folder, a hub id (owner/name) or a model type")
        if self.source is not None and re.fullmatch(r"[\w.]+:\w+", self.source):
            raise InputError(f"{self.source}: a factory is named with --entry {self.source}")
        ours = {
            "--task": self.task,
            "--random-weights": self.random_weights,
            "--set": self.settings,
            "--dtype": self.dtype,
            "--inputs": self.inputs,
        }
        for name, value in ours.items():
            if self.entry is not None and value:
                raise InputError(f"{name} is for a SOURCE; with --entry, the factory decides")

    def call(self, *, batch: int = 1, shapes: Mapping[str, Any] | None = None, stream_weights: bool = False) -> Call:
        """The model, and example inputs.

        Args:
            batch: Examples in one call, where nothing else says it.
            shapes: Input of a file → shape, as far as the model takes an input of that name; what is in the file of
                ``--inputs`` goes before.
            stream_weights: Whether the weights stay in their safetensors files.

        Raises:
            InputError: If there is no such model, or it cannot be built as asked.
        """
        self.check()
        if stream_weights and (self.entry is not None or self.random_weights):
            raise InputError("--stream-weights is for a SOURCE with weights in safetensors files")
        if self.entry is not None:
            return call_entry(self.entry, self.seed)
        from htp_export.huggingface import example_inputs, load_model
        from htp_export.huggingface.inputs import named_parameters

        model = load_model(
            str(self.source),
            task=self.task,
            random_weights=self.random_weights,
            overrides=parse_overrides(self.settings or ()),
            dtype=self.dtype.value if self.dtype else None,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            attn_implementation=self.attention,
            seed=self.seed,
            stream_weights=stream_weights,
        )
        checkpoint = None
        if stream_weights:
            from htp_export.huggingface.streaming import find_checkpoint

            hub = {"revision": self.revision, "local_files_only": True}
            checkpoint = find_checkpoint(str(self.source), model.config, hub)
        taken = named_parameters(model)
        fitting = {name: shape for name, shape in (shapes or {}).items() if name in taken}
        wanted = {**fitting, **read_shapes(self.inputs)}
        kwargs = example_inputs(model, task=self.task, shapes=wanted, batch=batch, seed=self.seed)
        return Call(model, (), dict(kwargs), checkpoint)
