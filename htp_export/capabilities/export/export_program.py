"""The Python of ``htp-export export``, for ``--as-python``: the lines that load, export and check a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from htp_export.capabilities.export.export_options import DeployOptions, GraphOptions
from htp_export.command.as_python import Preparation, Written, call_text, text_of
from htp_export.command.model_options import ModelOptions
from htp_export.command.model_programs import prepare_entry
from htp_export.errors import InputError


@dataclass(frozen=True)
class ExportProgram:
    """The options of an export, and the lines of the program so far."""

    program: Preparation
    output: Path
    model: ModelOptions
    deploy: DeployOptions
    graph: GraphOptions
    verify: bool
    two_files: bool | None
    cache_names: str | None

    def text(self) -> str:
        """Return the program.

        Raises:
            InputError: If an option has no function in Python.
        """
        if self.deploy.makes_folder or self.deploy.transformers_js is not None:
            names = "--genai, --export-json and --transformers-js"
            raise InputError(f"--as-python: {names} have no function in Python")
        is_of_task = self.graph.dynamo and not self.graph.axes and self.model.has_task
        return self._of_task() if is_of_task else self._of_one_call()

    def _of_one_call(self) -> str:
        """The program of an export with one call of the model."""
        from htp_export.capabilities.verify.verifying import verify
        from htp_export.exporter.exporting import export

        if self.model.entry is None:
            settings = self._settings_of_source()
        else:
            settings = self.graph.for_torch(prepare_entry(self.program, self.model))
        del settings["verbose"]
        objects = self.program.arguments
        arguments = {**settings, **objects, "f": self.output, "weights": self.graph.weights}
        statements = self._in_blocks(call_text("htp_export.export", export, arguments))
        statements += self._map_of(text_of(self.output))
        if self.verify:
            check = call_text("htp_export.verify", verify, {**objects, "onnx": self.output})
            statements.append(f"print({check})")
        return self.program.program(*statements)

    def _settings_of_source(self) -> dict[str, Any]:
        """Write the lines of a SOURCE; return the arguments of the export besides them."""
        from htp_export.capabilities.huggingface.source_programs import prepare_source

        settings = self.graph.settings
        axes = self.graph.axes
        batch = 2 if "batch" in axes else 1
        streamed = self.graph.stream_weights
        prepare_source(self.program, self.model, batch=batch, stream_weights=streamed)
        if not self.graph.dynamo:
            settings["input_names"] = Written("list(inputs)")
        if axes:
            self.program.imports["htp_export.huggingface"].append("dynamic_shapes")
            parameter = "dynamic_shapes" if self.graph.dynamo else "dynamic_axes"
            settings[parameter] = Written(f"dynamic_shapes(inputs, {text_of(list(axes))})")
        return settings

    def _of_task(self) -> str:
        """The program of an export of the files of a task."""
        from htp_export.capabilities.huggingface.source_programs import prepare_calls

        settings: dict[str, Any] = {"stream_weights": self.graph.stream_weights}
        for name in ("two_files", "cache_names"):
            value = getattr(self, name)
            if value is not None:
                settings[name] = value
        prepare_calls(self.program, self.model, **settings)
        words = ["call.model"]
        for name, value in self.graph.settings.items():
            if name not in ("dynamo", "verbose", "external_data"):
                words.append(f"{name}={text_of(value)}")
        call = ", ".join([*words, "**call.options"])
        file = text_of(self.output)
        if self.output.suffix != ".onnx":
            file = f'f"{self.output}/{{name}}.onnx"'
        one_file = [
            "with call.exporting():",
            *_indented(self._in_blocks(f"program = htp_export.export({call})", "call.model")),
            "call.name_dimensions(program.model.graph)",
            f"program.save({file}, external_data={self.graph.external_data})",
            *self._map_of(file),
        ]
        if self.verify:
            check = f"htp_export.verify(call.model, {file}, kwargs=kwargs)"
            one_file += [
                "for run, kwargs in call.runs.items():",
                "    with call.adapted():",
                f"        print(run, {check})",
            ]
        if self.output.suffix == ".onnx":
            return self.program.program("[call] = calls.values()", *one_file)
        folder = f"Path({text_of(self.output)}).mkdir(exist_ok=True)"
        self.program.imports["pathlib"] = ["Path"]
        loop = ["for name, call in calls.items():", *_indented(one_file)]
        return self.program.program(folder, *loop)

    def _in_blocks(self, statement: str, model: str = "model") -> list[str]:
        """The export in the ``with`` blocks of its options."""
        lines = statement.splitlines()
        if self.graph.decompose_attention:
            kept = ", keep_kernel=True" if self.graph.keep_attention else ""
            block = f"with htp_export.decomposed_attention({model}{kept}):"
            lines = [block, *_indented(lines)]
        if self.graph.allow_untagged:
            lines = ["with htp_export.tagging(strict=False):", *_indented(lines)]
        return lines

    def _map_of(self, file: str) -> list[str]:
        """The line for ``--embed-map``."""
        if not self.graph.with_map:
            return []
        return [f"htp_export.embed_map({file}, {file})"]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
