"""Options of ``export`` for what other runtimes need besides the ONNX file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from htp_export.command.model_options import ModelOptions, SourceCall
from htp_export.command.outputs import Writes
from htp_export.errors import InputError
from htp_export.files.filesystem import is_special

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeployOptions:
    """What is written for other runtimes, beside the model or as a folder."""

    genai: Annotated[bool, "Write genai_config.json, configs and tokenizer beside the model."] = False
    export_json: Annotated[bool, "Write export.json and configs, for transformers.exporters."] = False
    transformers_js: Annotated[Path | None, "Write a folder for transformers.js, too.", Writes()] = None
    js_dtypes: Annotated[str, "Types of weights in that folder, by comma: fp32, fp16, q8, int8, uint8, q4."] = "fp32,q4"

    def check(self, output: Path, model: ModelOptions) -> None:
        """Refuse what cannot be written, before the model is loaded.

        Raises:
            InputError: If the model is none of transformers, or files would lie where others are.
        """
        if not (self.makes_folder or self.transformers_js is not None):
            return
        if model.source is None:
            raise InputError("--genai, --export-json and --transformers-js are for a SOURCE, a model of transformers")
        if is_special(output):
            raise InputError(f"nothing can lie beside {output}; name a file")
        from htp_export.capabilities.huggingface.genai import check_genai
        from htp_export.capabilities.huggingface.transformers_js import check_transformers_js

        beside = output.absolute() if output.is_dir() else output.absolute().parent
        if self.makes_folder and not _is_same(Path(model.source), beside):
            check_genai(beside)
        if self.transformers_js is not None:
            folder = self.transformers_js.absolute()
            if output.absolute().is_relative_to(folder):
                raise InputError(f"{output} lies in {self.transformers_js}, which is replaced; export to another place")
            if _is_same(Path(model.source), folder):
                raise InputError(f"--transformers-js {self.transformers_js}: would replace SOURCE; name another folder")
            check_transformers_js(folder, self._dtypes)

    def check_files(self, names: Iterable[str]) -> None:
        """Refuse a model with files of these names that the other runtimes do not take, before it is exported."""
        listed = list(names)
        sees_images = "vision_encoder" in listed
        if len(listed) > 1 and (self.export_json or (self.genai and not sees_images)):
            problem = f"this one has {len(listed)}: {', '.join(listed)}"
            raise InputError(f"--genai and --export-json are for models of one file, and {problem}")
        if sees_images and self.genai and self.transformers_js is not None:
            problem = "embed_tokens puts images in their places for GenAI, and does not for transformers.js"
            raise InputError(f"--genai and --transformers-js: {problem}; export twice")
        if self.transformers_js is not None and "decoder_with_past_model" in listed:
            raise InputError("--transformers-js: it runs decoders of one file; leave --two-files away")

    def write_beside(self, model: ModelOptions, call: SourceCall, file: Path, made: Any) -> list[str]:
        """Write the files that lie beside the exported model, ``made`` by the exporter; their names."""
        written: list[Path] = []
        if self.genai and (call.example is None or "logits" in call.example.output_names):  # of several, the decoder
            from htp_export.capabilities.huggingface.genai import write_genai

            written += write_genai(file, call.model, companions=_companions(model))
        if self.export_json:
            from htp_export.capabilities.huggingface.companions import write_export_metadata

            exported_program = getattr(made, "exported_program", None)
            written += write_export_metadata(file, call.model, call.kwargs, exported_program)
        return list(dict.fromkeys(path.name for path in written))

    def write_folder(
        self, files: Mapping[str, Path], model: ModelOptions, calls: Sequence[SourceCall]
    ) -> dict[str, int]:
        """Write the folder for transformers.js; its files with their sizes.

        The files are by their name in the folder. The last call is one of the whole model, not of its encoder.
        """
        if self.transformers_js is None:
            return {}
        from htp_export.capabilities.huggingface.transformers_js import write_transformers_js
        from htp_export.command.outputs import written_folder

        companions, called = _companions(model), calls[-1].model
        folder = write_transformers_js(files, self.transformers_js, called, companions=companions, dtypes=self._dtypes)
        return written_folder(folder)

    @property
    def makes_folder(self) -> bool:
        """Whether the folder of the output is made: its files belong together, as those for transformers.js do."""
        return self.genai or self.export_json

    @property
    def _dtypes(self) -> list[str]:
        return [dtype.strip() for dtype in self.js_dtypes.split(",") if dtype.strip()]


def _companions(model: ModelOptions) -> Path | None:
    """The folder with the tokenizer of a model."""
    from htp_export.capabilities.huggingface.companions import source_folder

    folder = source_folder(str(model.source), model.revision)
    if folder is None:
        _log.info("%s has no tokenizer; none is copied", model.name)
    return folder


def _is_same(one: Path, other: Path) -> bool:
    return one.is_dir() and one.resolve() == other.resolve()
