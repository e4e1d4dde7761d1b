"""The options that name a model, as several commands have them, and the model and its inputs that they lead to."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.cli.file_options import seed_option
from htp_export.cli.sources import Call, call_entry, parse_overrides, read_shapes
from htp_export.errors import InputError

if TYPE_CHECKING:
    from htp_export.files.checkpoint import Checkpoint

__all__ = ["Dtype", "ModelOptions"]

_AUTO = "auto"


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
        self.check(stream_weights)
        if self.entry is not None:
            return call_entry(self.entry, self.seed)
        from htp_export.huggingface import example_inputs
        from htp_export.huggingface.inputs import named_parameters

        task = None if self.task == _AUTO else self.task
        model = self._model(task, stream_weights)
        taken = named_parameters(model)
        fitting = {name: shape for name, shape in (shapes or {}).items() if name in taken}
        wanted = {**fitting, **read_shapes(self.inputs)}
        processor = self._processor()
        kwargs = example_inputs(model, task=task, shapes=wanted, batch=batch, seed=self.seed, processor=processor)
        return Call(model, (), dict(kwargs), checkpoint=self._checkpoint(model, stream_weights))

    def calls_by_task(
        self,
        *,
        two_files: bool | None = None,
        cache_names: str = "optimum",
        sizes: Mapping[str, int] | None = None,
        stream_weights: bool = False,
        right_padding: bool = False,
    ) -> dict[str, Call]:
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
        from htp_export.huggingface import example_calls
        from htp_export.huggingface.streaming import released_when_read

        if cache_names not in ("optimum", "transformers"):
            raise InputError(f"--cache-names {cache_names}: choose optimum or transformers")
        model = self._model(self.task or _AUTO, stream_weights)
        checkpoint = self._checkpoint(model, stream_weights)
        task = None if self.task in (None, _AUTO) else self.task
        with released_when_read(model) if stream_weights else contextlib.nullcontext():
            found = example_calls(
                model,
                task=task,
                two_files=two_files,
                cache_names=cache_names,  # type: ignore[arg-type] # it is one of them
                sizes=sizes,
                shapes=read_shapes(self.inputs) or None,
                seed=self.seed,
                processor=self._processor(),
                right_padding=right_padding,
            )
        return {name: Call(each.model, (), each.kwargs, each, checkpoint) for name, each in found.items()}

    @cached_property
    def has_task(self) -> bool:
        """Whether a task is given, or guessed from the config of a folder or hub id.

        Raises:
            ModelSourceError: If there is no such model.
        """
        if self.task is not None or self.entry is not None:
            return self.entry is None
        from htp_export.huggingface.models import names_a_generating_class

        overrides, revision = parse_overrides(self.settings or ()), self.revision
        return names_a_generating_class(
            str(self.source),
            random_weights=self.random_weights,
            overrides=overrides,
            revision=revision,
            trust_remote_code=self.trust_remote_code,
        )

    def _model(self, task: str | None, stream_weights: bool) -> Any:
        from htp_export.huggingface import load_model

        return load_model(
            str(self.source),
            task=task,
            random_weights=self.random_weights,
            overrides=parse_overrides(self.settings or ()),
            dtype=self.dtype.value if self.dtype else None,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            attn_implementation=self.attention,
            seed=self.seed,
            stream_weights=stream_weights,
        )

    def _processor(self) -> Any:
        """The tokenizer and the image processor that lie beside the model."""
        from htp_export.huggingface import load_processor

        return load_processor(
            str(self.source),
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            overrides=parse_overrides(self.settings or ()),
        )

    def _checkpoint(self, model: Any, stream_weights: bool) -> Checkpoint | None:
        """The files of the weights, if those stay in them."""
        if not stream_weights:
            return None
        from htp_export.huggingface.streaming import find_checkpoint

        hub = {"revision": self.revision, "local_files_only": True}
        return find_checkpoint(str(self.source), model.config, hub)
