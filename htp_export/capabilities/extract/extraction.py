"""One module of a file as a model of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from htp_export.editing.flattening import read_flat
from htp_export.files.model_files import has_external_data, write_model
from htp_export.files.targets import check_target
from htp_export.model.cut_models import cut_model
from htp_export.model.cutting import Cutter
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import HoldsModel, ModelSource


@dataclass(frozen=True)
class Extraction(HoldsModel):
    """The result of `extract`.

    Attributes:
        model: The extracted model; it shares the weights of the original model.
        path: The module.
        call: Number of the extracted call.
        inputs: Input → its type and shape, ``"FLOAT[1, 16, 768]"``.
        outputs: Output → its type and shape.
        nodes: Number of nodes.
        outside: Inputs that are no argument of ``forward``: tensors computed outside of the module.
        file: The file that was written; None if there is none.
    """

    model: ir.Model = field(repr=False)
    path: str
    call: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    nodes: int
    outside: tuple[str, ...]
    file: Path | None = None

    @property
    def summary(self) -> str:
        """The result in one line."""
        where = f" -> {self.file}" if self.file else ""
        return f"{self.path or '(root)'}: {self.nodes} nodes{where}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The inputs and outputs, a line each."""
        sides = (("in ", self.inputs), ("out", self.outputs))
        return tuple(f"  {side}  {name}: {kind}" for side, ends in sides for name, kind in ends.items())


@names_model_faults("model")
def extract(
    model: ModelSource, path: str, output: str | os.PathLike[str] | None = None, *, call: int = 0
) -> Extraction:
    """Extract one module as a valid model of its own.

    Its inputs are the arguments of the module's ``forward``, under their names, as far as they are needed; other
    tensors that are computed outside become inputs under their names in the file. Sizes are read from its own inputs;
    dynamic dimensions stay dynamic. It has the initializers that it needs, and keeps opset, functions, tags, and its
    part of the module tree under the same paths.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        path: The module.
        output: The file to write. External weights go into a file beside it, ``<name>.data``.
        call: Number of the call of a module that ran several times, from 0.

    Returns:
        The model, with the types and shapes of its inputs and outputs.

    Raises:
        UnknownModuleError: There is no such module; the message has the nearest names.
        InputError: There is no such call, or the module cannot be extracted; the message names a module that can.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> print(extract(program, "0"))
        0: 1 nodes
          in   input: FLOAT[2,4]
          out  linear: FLOAT[2,3]
    """
    check_target(output)
    tagged = read_flat(model, others=False)
    part = Cutter(tagged).cut(path, call)
    extracted = cut_model(tagged, part)
    ends = (extracted.graph.inputs, extracted.graph.outputs)
    inputs, outputs = ({str(value.name): _type_and_shape(value) for value in values} for values in ends)
    signature = tagged.signature(part.path, call)
    arguments = signature.inputs if signature is not None else ()
    outside = tuple(name for name in part.inputs if name not in arguments) if part.path else ()
    if output is not None:
        write_model(extracted, output, True if has_external_data(extracted) else None)
    nodes = sum(1 for _ in extracted.graph.all_nodes())
    file = None if output is None else Path(output)
    return Extraction(extracted, part.path, call, inputs, outputs, nodes, outside, file)


def _type_and_shape(value: ir.Value) -> str:
    return f"{value.dtype.name if value.dtype else 'unknown type'}{value.shape if value.shape is not None else ''}"
