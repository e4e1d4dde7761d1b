"""Options of ``export``: the contents of the graph, its file, and further files for other runtimes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.command.model_options import ModelOptions, SourceCall
from htp_export.command.options import MapOption
from htp_export.command.outputs import Writes
from htp_export.errors import FileError, InputError
from htp_export.files.filesystem import is_special

if TYPE_CHECKING:
    from torch import nn


_ATTENTION_SINCE = 23  # first ONNX opset with the operator Attention


@dataclass(frozen=True)
class GraphOptions:
    """Options for the graph and its file."""

    dynamo: Annotated[
        bool, typer.Option("--dynamo/--torchscript", help="Which of torch's exporters.")
    ] = True
    opset: Annotated[
        int | None, typer.Option(min=1, help="ONNX opset; torch's own choice without it.")
    ] = None
    dynamic: Annotated[
        list[str] | None, "Axes that may vary, by comma: batch, sequence, height, width."
    ] = None
    functions: Annotated[
        list[str] | None,
        "Modules that become ONNX functions: class:BertLayer, encoder.layer.*; ** for all.",
    ] = None
    names: Annotated[
        str | None, "path: names of nodes and tensors from module paths, /encoder/layer.0/MatMul."
    ] = None
    decompose_attention: Annotated[
        bool, "Attention as modules: q_proj, scores, softmax, context, ..."
    ] = False
    keep_attention: Annotated[
        bool, "One Attention node for each scaled_dot_product_attention; opset 23."
    ] = False
    external_data: Annotated[bool, "Weights in a file of their own, <output>.data."] = True
    stream_weights: Annotated[
        bool, "Copy weights from safetensors files without holding them in memory."
    ] = False
    weights: Annotated[
        Path | None,
        "A checkpoint in safetensors files: the file refers to it in place of weights of its own.",
    ] = None
    with_map: MapOption = False
    allow_untagged: Annotated[
        bool, "Write torch's own file, with a warning, where tagging fails."
    ] = False

    def check(self) -> None:
        """Refuse incompatible options, or an opset that torch does not support, before a model is loaded."""
        if self.names is not None:
            from htp_export.editing.path_names import check_style

            check_style(self.names)
        if self.keep_attention and not self.dynamo:
            raise InputError(
                "--keep-attention: TorchScript has no operator for attention; leave --torchscript away"
            )
        if self.keep_attention and (self.opset or _ATTENTION_SINCE) < _ATTENTION_SINCE:
            problem = f"--keep-attention needs {_ATTENTION_SINCE}, the first with Attention"
            raise InputError(f"--opset {self.opset}: {problem}")
        if self.wanted_opset is not None:
            from htp_export.exporter.export_arguments import check_opset

            check_opset(self.wanted_opset, dynamo=self.dynamo)
        if self.stream_weights and not self.dynamo:
            raise InputError(
                "--stream-weights: the TorchScript exporter holds all weights in memory; leave --torchscript"
            )

        if self.weights is not None and not self.external_data:
            raise InputError("--weights: they stay in their files; leave --no-external-data away")
        if self.weights is not None:
            from htp_export.discovery import provider

            provider("weights_of_checkpoint").check(self.weights)

    @property
    def wanted_opset(self) -> int | None:
        """The opset that the file must have; None if torch chooses it."""
        return self.opset or (_ATTENTION_SINCE if self.keep_attention else None)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of axes that may vary."""
        names = [axis.strip() for text in self.dynamic or () for axis in text.split(",")]
        return tuple(filter(None, names))

    def attention(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that decomposes the attention of the model, if requested."""
        if not self.decompose_attention:
            return contextlib.nullcontext()
        from htp_export.attention import decomposed_attention

        return decomposed_attention(model, keep_kernel=self.keep_attention)

    def idle_attention(self, file: Path) -> set[str]:
        """Options for attention that had no effect on an exported file."""
        if not (self.decompose_attention or self.keep_attention):
            return set()
        from htp_export.model.tagged import load

        tagged = load(file)
        # Decomposed attention has synthetic modules.
        is_decomposed = any(info.synthetic for info in tagged.hierarchy.values())
        is_kept = any(node.op_type == "Attention" for node in tagged.nodes)
        idle = set()
        if self.decompose_attention and not is_decomposed:
            idle.add("--decompose-attention")
        if self.keep_attention and not is_kept:
            idle.add("--keep-attention")
        return idle

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of ``torch.onnx.export`` that do not depend on the model."""
        options: dict[str, Any] = {
            "dynamo": self.dynamo,
            "verbose": False,
            "external_data": self.external_data,
        }
        if self.wanted_opset is not None:
            options["opset_version"] = self.wanted_opset
        if self.names is not None:
            options["names"] = self.names
        if self.functions:
            options["export_modules_as_functions"] = tuple(self.functions)
        return options

    def for_torch(self, call: SourceCall) -> dict[str, Any]:
        """Keyword arguments of ``torch.onnx.export``."""
        options = self.settings
        if call.example is not None:
            options |= call.example.options
            options.pop("kwargs", None)
            return options
        if not self.dynamo and len(call.inputs) == len(call.kwargs) and call.kwargs:
            options["input_names"] = list(call.inputs)
        return options | self._dynamic_axes(call)

    def _dynamic_axes(self, call: SourceCall) -> dict[str, Any]:
        """The exporter's argument for ``--dynamic``: ``dynamic_shapes``, or ``dynamic_axes`` of TorchScript."""
        if not self.axes:
            return {}
        if call.args:
            raise InputError(
                "--dynamic needs inputs that forward names; return them from --entry as a dict"
            )
        from htp_export.capabilities.huggingface.inputs import dynamic_shapes

        shapes = dynamic_shapes(call.inputs, self.axes)
        if self.dynamo:
            return {"dynamic_shapes": {name: shapes.get(name) for name in call.kwargs}}
        return {"dynamic_axes": {name: axes for name, axes in shapes.items() if axes}}


_log = logging.getLogger(__name__)

_CONFIG = "config.json"


@dataclass(frozen=True)
class DeployOptions:
    """Options for further files for other runtimes, beside the model or in a folder."""

    genai: Annotated[bool, "Write genai_config.json, configs and tokenizer beside the model."] = (
        False
    )
    export_json: Annotated[bool, "Write export.json and configs, for transformers.exporters."] = (
        False
    )
    transformers_js: Annotated[
        Path | None, "Write a folder for transformers.js, too.", Writes()
    ] = None
    js_dtypes: Annotated[
        str, "Types of weights in that folder, by comma: fp32, fp16, q8, int8, uint8, q4."
    ] = "fp32,q4"

    def check(self, output: Path, model: ModelOptions) -> None:
        """Refuse files that cannot be written, before the model is loaded.

        Raises:
            InputError: If the model is not from transformers, or other files would be replaced.
        """
        if not (self.makes_folder or self.transformers_js is not None):
            return
        if model.source is None:
            raise InputError(
                "--genai, --export-json and --transformers-js are for a SOURCE, a model of transformers"
            )
        if is_special(output):
            raise InputError(f"nothing can lie beside {output}; name a file")
        from htp_export.capabilities.huggingface.beside import replaces_beside
        from htp_export.capabilities.huggingface.genai import check_genai
        from htp_export.capabilities.huggingface.transformers_js import check_transformers_js

        beside = output.absolute() if output.is_dir() else output.absolute().parent
        if self.makes_folder and self._is_in_source(beside, model):
            if model.settings:
                raise InputError(
                    f"--set: {beside / _CONFIG} is that of SOURCE, and stays; export into another folder"
                )
        elif self.makes_folder and (
            output.is_dir() or not replaces_beside(output)(beside / _CONFIG)
        ):
            check_genai(beside)
        if self.transformers_js is None:
            return
        folder = self.transformers_js.absolute()
        if output.absolute().is_relative_to(folder):
            raise InputError(
                f"{output} lies in {self.transformers_js}, which is replaced; export to another place"
            )
        if _is_same(Path(model.source), folder):
            raise InputError(
                f"--transformers-js {self.transformers_js}: would replace SOURCE; name another folder"
            )
        check_transformers_js(folder, self._dtypes)

    def check_files(self, names: Iterable[str]) -> None:
        """Refuse a model with files of these names that another runtime cannot load, before it is exported."""
        listed = list(names)
        sees_images = "vision_encoder" in listed
        if len(listed) > 1 and (self.export_json or (self.genai and not sees_images)):
            problem = f"this one has {len(listed)}: {', '.join(listed)}"
            raise InputError(f"--genai and --export-json are for models of one file, and {problem}")
        if sees_images and self.genai and self.transformers_js is not None:
            problem = "for GenAI, embed_tokens inserts the images; for transformers.js, it does not"
            raise InputError(f"--genai and --transformers-js: {problem}; export twice")
        if self.transformers_js is not None and "decoder_with_past_model" in listed:
            raise InputError(
                "--transformers-js: it runs decoders of one file; leave --two-files away"
            )

    def check_folder(self, model: ModelOptions) -> None:
        """Refuse a folder for transformers.js that contains other files, before the model is exported."""
        if self.transformers_js is None:
            return
        from htp_export.capabilities.huggingface.companions import companion_names
        from htp_export.capabilities.huggingface.transformers_js import check_transformers_js

        check_transformers_js(
            self.transformers_js, self._dtypes, companion_names(_companions(model))
        )

    def check_beside(self, file: Path, model: ModelOptions, call: SourceCall) -> None:
        """Refuse a file if files beside it, of other tools or models, would be replaced; before it is exported."""
        if not self.makes_folder or self._is_in_source(file.parent, model):
            return
        from htp_export.capabilities.huggingface.beside import (
            OF_GENAI,
            OF_TRANSFORMERS,
            check_beside,
        )
        from htp_export.files.own_data import replaceable_data

        data = file.with_name(f"{file.name}.data")
        if self.export_json and not replaceable_data(file)(data):
            raise FileError(
                data,
                f"is there, and has no data of {file.name}, which transformers would read from it",
            )
        if self.export_json:
            check_beside(file, call.model, OF_TRANSFORMERS)
        if self.genai and self._is_run_by_genai(call):
            check_beside(file, call.model, OF_GENAI, _companions(model))

    @staticmethod
    def _is_run_by_genai(call: SourceCall) -> bool:
        """Whether GenAI's configuration is written beside this file: of several files, the decoder."""
        return call.example is None or "logits" in call.example.output_names

    def replaces_beside(self, file: Path) -> Callable[[Path], bool]:
        """Return a predicate: whether a file beside an exported one may be replaced."""
        from htp_export.capabilities.huggingface.beside import replaces_beside

        return replaces_beside(file)

    def _is_in_source(self, folder: Path, model: ModelOptions) -> bool:
        """Whether the files are written into the folder of SOURCE, whose own files stay."""
        return _is_same(Path(str(model.source)), folder)

    def write_beside(
        self, model: ModelOptions, call: SourceCall, file: Path, made: Any, place: Path
    ) -> list[str]:
        """Write further files beside an exported model, and return their names.

        Args:
            model: The model of the command.
            call: The call that was exported.
            file: The exported file, in a temporary folder.
            made: The exporter's program.
            place: The target of ``file``; all files are moved to its folder. If this is the folder
                of SOURCE, its own files are not replaced.
        """
        from htp_export.capabilities.huggingface.companions import is_companion

        written: list[Path] = []
        if self.genai and self._is_run_by_genai(call):
            from htp_export.capabilities.huggingface.genai import write_genai

            written += write_genai(file, call.model, companions=_companions(model))
        if self.export_json:
            from htp_export.capabilities.huggingface.companions import write_export_metadata

            exported_program = getattr(made, "exported_program", None)
            written += write_export_metadata(file, call.model, call.kwargs, exported_program)
        names = list(dict.fromkeys(path.name for path in written))
        if not self._is_in_source(place.parent, model):
            return names
        own = [name for name in names if is_companion(name) and place.with_name(name).exists()]
        for name in own:
            file.with_name(name).unlink()
        return [name for name in names if name not in own]

    def write_folder(
        self, files: Mapping[str, Path], model: ModelOptions, calls: Sequence[SourceCall]
    ) -> dict[str, int]:
        """Write the folder for transformers.js, and return its files with their sizes.

        ``files``: name in the folder → file.
        """
        if self.transformers_js is None:
            return {}
        from htp_export.capabilities.huggingface.transformers_js import write_transformers_js
        from htp_export.command.outputs import written_folder

        # The last call is of the whole model; earlier ones may be of its encoder.
        whole_model = calls[-1].model
        folder = write_transformers_js(
            files,
            self.transformers_js,
            whole_model,
            companions=_companions(model),
            dtypes=self._dtypes,
        )
        return written_folder(folder)

    @property
    def makes_folder(self) -> bool:
        """Whether the folder of the output may be created, because several files belong together."""
        return self.genai or self.export_json

    @property
    def _dtypes(self) -> list[str]:
        return [dtype.strip() for dtype in self.js_dtypes.split(",") if dtype.strip()]


def _companions(model: ModelOptions) -> Path | None:
    """The folder with the tokenizer of a model; None if it has none."""
    from htp_export.capabilities.huggingface.companions import source_folder

    folder = source_folder(str(model.source), model.revision)
    if folder is None:
        _log.info("%s has no tokenizer; none is copied", model.name)
    return folder


def _is_same(one: Path, other: Path) -> bool:
    return one.is_dir() and one.resolve() == other.resolve()
