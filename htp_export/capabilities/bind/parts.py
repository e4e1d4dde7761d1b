"""``only``: the new weights of some modules, in a data file of their own; the last such run writes the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import onnx_ir as ir

from htp_export.errors import FileError, InputError
from htp_export.files.data_files import DataTensor
from htp_export.files.data_parts import DataParts, described_files, hash_of
from htp_export.files.data_plan import sha256_of
from htp_export.files.filesystem import is_special
from htp_export.files.model_files import write_sharing
from htp_export.files.write_file import real_path
from htp_export.format.recipes import Recipe, parameters_in
from htp_export.format.tags import ancestors
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.plans.rules import modules_within
from htp_export.reporting.columns import many
from htp_export.weights.fitting import Needed

Selector: TypeAlias = str | Sequence[str]

Tensors: TypeAlias = Mapping[ir.Value, ir.TensorProtocol]

_SMALL_BYTES = 256
"""Tensors up to this size are in the ONNX file: the run that writes it computes them."""

_MOST_NAMED = 5
"""Modules that a note names."""


@dataclass(frozen=True)
class Parts:
    """The parts of the weights of one model, by module.

    Attributes:
        data: Their data files.
        modules: Name of each initializer in a part → the module of its first entry.
    """

    data: DataParts
    modules: Mapping[str, str]

    @classmethod
    def of(
        cls,
        model: ModelSource,
        output: str | os.PathLike[str] | None,
        needed: Needed,
        tensors: Tensors,
        entries: Mapping[str, ir.TensorProtocol],
    ) -> Parts:
        """Find the tensors of all parts.

        Raises:
            InputError: There is no output, or the model or the weights are no files.
            FileError: The output is a device or a pipe.
        """
        files = described_files(entries)
        if output is None or not isinstance(model, str | os.PathLike) or not files:
            raise InputError(
                "only writes a part of a file: give the path of a model, an output, and safetensors files as weights"
            )
        if is_special(Path(output)):
            raise FileError(output, "is not a regular file, so that no data file can be beside it")
        large: dict[str, ir.TensorProtocol] = {}
        modules: dict[str, str] = {}
        for value, tensor in tensors.items():
            if tensor.nbytes > _SMALL_BYTES:
                large[str(value.name)] = tensor
                modules[str(value.name)] = _module_of(needed.recipes[value], needed)
        run = hash_of([sha256_of(Path(model)), files])
        return cls(DataParts(real_path(Path(output)), run, large), modules)

    def write(self, only: Selector, tagged: TaggedModel) -> str:
        """Write one part, and the model if all parts are there; return a note on what is missing.

        Raises:
            InputError: The selector matches no module, or no module with weights.
            FileError: A file cannot be written.
        """
        selected = frozenset(modules_within(tagged, only))
        names = [name for name, module in self.modules.items() if module in selected]
        if not names:
            raise InputError(
                f"only={only!r}: no tensor of the file has its weights from these modules"
            )
        self.data.write(names)
        written = self.data.written()
        output = self.data.output
        missing = [name for name in self.modules if name not in written]
        done = f"{len(names):,} of {many(len(self.modules), 'tensor')} were written"
        if missing:
            modules = list(dict.fromkeys(self.modules[name] or "." for name in missing))
            more = ", ..." * (len(modules) > _MOST_NAMED)
            listed = ", ".join(modules[:_MOST_NAMED]) + more
            return f"{done}; {output.name} is written when those of {listed} are there"
        self._write_model(tagged.model, written)
        return f"{done}; all parts are there, and {output.name} refers to them"

    def _write_model(self, model: ir.Model, written: Mapping[str, DataTensor]) -> None:
        """Write the ONNX file, which refers to the data files of all parts."""
        for graph in model.graphs():
            for value in graph.initializers.values():
                name = str(value.name)
                if name in written and value.const_value is self.data.tensors[name]:
                    value.const_value = written[name]
        files = {tensor.file.path for tensor in written.values()}
        write_sharing(model, self.data.output, files, own=True, is_same_graph=True)


def _module_of(recipe: Recipe, needed: Needed) -> str:
    """Return the module that has the first entry of a recipe."""
    name = next(parameters_in(recipe), "")
    return next((path for path in ancestors(name) if path in needed.modules), "")
