"""What `tree`, `view` and `cost` look at: an ONNX file, or a PyTorch model, of which a graph is made."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.command.file_options import seed_option
from htp_export.command.idle_options import Idle
from htp_export.command.model_options import Dtype, ModelOptions
from htp_export.command.terminal import Steps, notice_line
from htp_export.discovery import provider
from htp_export.errors import InputError

if TYPE_CHECKING:
    from htp_export.model.tagged import ModelSource

__all__ = ["FILE_IDLE", "LookOptions", "Looked"]


_MODEL_NAME = r"(?=.{1,96}$)([\w.-]+/)?[\w.-]+"  # a hub id or a model type


@dataclass(frozen=True)
class Looked:
    """A model to look at.

    Attributes:
        model: The file, or the graph of a PyTorch model.
        name: What it is called.
        facts: Keys of the JSON that say which way the graph of a PyTorch model was got.
    """

    model: ModelSource
    name: str
    facts: dict[str, Any]

    @property
    def file(self) -> Path | None:
        """The file; None for a PyTorch model."""
        return self.model if isinstance(self.model, Path) else None


@dataclass(frozen=True)
class LookOptions:
    """An ONNX file or a PyTorch model: the options of the commands that show what a model is like."""

    file: Annotated[
        str | None,
        typer.Argument(help="The ONNX file; or a model: hub id, local folder, model type.", show_default=False),
    ] = None
    entry: Annotated[
        str | None, typer.Option(help="A model of your own: package.module:factory returns (model, example inputs).")
    ] = None
    task: Annotated[str | None, typer.Option(help="Of a model without a file: fill-mask, ...")] = None
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Build the model from its config.")] = False
    seed: Annotated[int, seed_option("Of random weights and inputs.")] = 0
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the config; may be repeated.")
    ] = None
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights of a model without a file.")] = None
    attention: Annotated[str | None, typer.Option(help="transformers' attention: eager, sdpa.")] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False

    @property
    def is_file(self) -> bool:
        """Whether an ONNX file is named: its name ends as those of ONNX files do, or it is no name of a model."""
        if self.entry is not None or self.file is None or self.random_weights:
            return False
        import onnx

        suffix = Path(self.file).suffix
        if os.path.isfile(self.file) or onnx.serialization.registry.get_format_from_file_extension(suffix):  # noqa: PTH113 - it raises on no name
            return True
        return not (os.path.isdir(self.file) or re.fullmatch(_MODEL_NAME, self.file))  # noqa: PTH112 - as above

    def look(self, inputs: Path | None = None, *, quiet: bool = False) -> Looked:
        """The file, or a graph of the model; for that, stderr has which way it was got, and why no better one.

        Args:
            inputs: For a model without a file: the shapes of its example inputs, as JSON.
            quiet: Whether to show no progress.

        Raises:
            InputError: If nothing is named, or two models are, or the model has no graph.
        """
        if self.is_file:
            self._check_file()
            return Looked(Path(str(self.file)), str(self.file), {})
        if self.file is None and self.entry is None:
            raise InputError("name an ONNX file, a model, or --entry package.module:factory")
        options = ModelOptions(
            source=self.file,
            entry=self.entry,
            task=self.task,
            random_weights=self.random_weights,
            seed=self.seed,
            settings=self.settings,
            dtype=self.dtype,
            inputs=inputs,
            attention=self.attention,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )
        with Steps(quiet=quiet).step(f"tracing {options.name}"), _stdout_for_results():
            inspected = provider("traced_models").traced(options.call())
        for line in str(inspected).splitlines():
            notice_line(line)
        return Looked(inspected, options.name, inspected.to_dict())

    def _check_file(self) -> None:
        given = {"--task": self.task, "--set": self.settings, "--dtype": self.dtype, "--attention": self.attention}
        for name, value in given.items():
            if value:
                raise InputError(f"{name} is for a model without a file; {self.file} is one")


def _names_file(given: Mapping[str, Any]) -> bool:
    fields = {name: given[name] for name in ("file", "entry", "random_weights")}
    return LookOptions(**fields).is_file


FILE_IDLE = Idle(("seed", "revision", "trust_remote_code"), _names_file, "it is for a model without a file")


@contextlib.contextmanager
def _stdout_for_results() -> Iterator[None]:
    """Let what the model itself prints go to stderr: stdout has the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
