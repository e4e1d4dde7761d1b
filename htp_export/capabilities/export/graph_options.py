"""Options of ``export`` that decide what stands in the graph, and how it is written."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from htp_export.command.model_options import SourceCall
from htp_export.command.options import MapOption
from htp_export.errors import InputError

if TYPE_CHECKING:
    from torch import nn

_ATTENTION_SINCE = 23


@dataclass(frozen=True)
class GraphOptions:
    """How to export."""

    dynamo: Annotated[bool, typer.Option("--dynamo/--torchscript", help="Which of torch's exporters.")] = True
    opset: Annotated[int | None, typer.Option(min=1, help="ONNX opset; torch's own choice without it.")] = None
    dynamic: Annotated[list[str] | None, "Axes that may vary, by comma: batch, sequence, height, width."] = None
    functions: Annotated[
        list[str] | None, "Modules that become ONNX functions: class:BertLayer, encoder.layer.*; ** for all."
    ] = None
    names: Annotated[str | None, "path: names of nodes and tensors from module paths, /encoder/layer.0/MatMul."] = None
    decompose_attention: Annotated[bool, "Attention as modules: q_proj, scores, softmax, context, ..."] = False
    keep_attention: Annotated[bool, "One Attention node for each scaled_dot_product_attention; opset 23."] = False
    external_data: Annotated[bool, "Weights in a file of their own, <output>.data."] = True
    stream_weights: Annotated[bool, "Copy weights from safetensors files without holding them in memory."] = False
    with_map: MapOption = False
    allow_untagged: Annotated[bool, "Write torch's own file, with a warning, where tagging fails."] = False

    def check(self) -> None:
        """Refuse options that do not go together, or an opset that torch does not write, before a model is loaded."""
        if self.names is not None:
            from htp_export.model.path_names import check_style

            check_style(self.names)
        if self.keep_attention and not self.dynamo:
            raise InputError("--keep-attention: TorchScript has no operator for attention; leave --torchscript away")
        if self.keep_attention and (self.opset or _ATTENTION_SINCE) < _ATTENTION_SINCE:
            problem = f"--keep-attention needs {_ATTENTION_SINCE}, the first with Attention"
            raise InputError(f"--opset {self.opset}: {problem}")
        if self.wanted_opset is not None:
            from htp_export.exporter.capture.opsets import check_opset

            check_opset(self.wanted_opset, dynamo=self.dynamo)
        if self.stream_weights and not self.dynamo:
            raise InputError(
                "--stream-weights: the TorchScript exporter holds all weights in memory; leave --torchscript"
            )

    @property
    def wanted_opset(self) -> int | None:
        """The opset that the file must have; None if torch chooses it."""
        return self.opset or (_ATTENTION_SINCE if self.keep_attention else None)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of axes that may vary."""
        return tuple(axis.strip() for text in self.dynamic or () for axis in text.split(",") if axis.strip())

    def attention(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """How the attention of the model runs, for a ``with`` block."""
        if not self.decompose_attention:
            return contextlib.nullcontext()
        from htp_export.attention import decomposed_attention

        return decomposed_attention(model, keep_kernel=self.keep_attention)

    def idle_attention(self, file: Path) -> set[str]:
        """The options for attention that had no effect on an exported file."""
        if not (self.decompose_attention or self.keep_attention):
            return set()
        from htp_export.model.tagged import load

        tagged = load(file)
        idle = set()
        if self.decompose_attention and not any(info.synthetic for info in tagged.hierarchy.values()):
            idle.add("--decompose-attention")
        if self.keep_attention and not any(node.op_type == "Attention" for node in tagged.nodes):
            idle.add("--keep-attention")
        return idle

    def for_torch(self, call: SourceCall) -> dict[str, Any]:
        """The keyword arguments of ``torch.onnx.export``."""
        options: dict[str, Any] = {"dynamo": self.dynamo, "verbose": False, "external_data": self.external_data}
        if self.wanted_opset is not None:
            options["opset_version"] = self.wanted_opset
        if self.names is not None:
            options["names"] = self.names
        if self.functions:
            options["export_modules_as_functions"] = tuple(self.functions)
        if call.example is not None:
            return options | {name: value for name, value in call.example.options.items() if name != "kwargs"}
        if not self.dynamo and len(call.inputs) == len(call.kwargs) and call.kwargs:
            options["input_names"] = list(call.inputs)
        return options | self._dynamic_axes(call)

    def _dynamic_axes(self, call: SourceCall) -> dict[str, Any]:
        if not self.axes:
            return {}
        if call.args:
            raise InputError("--dynamic needs inputs that forward names; return them from --entry as a dict")
        from htp_export.capabilities.huggingface.inputs import dynamic_shapes

        shapes = dynamic_shapes(call.inputs, self.axes)
        if self.dynamo:
            return {"dynamic_shapes": {name: shapes.get(name) for name in call.kwargs}}
        return {"dynamic_axes": {name: axes for name, axes in shapes.items() if axes}}
