"""The work of the capability, and its result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from htp_export.editing.edit import Edit
from htp_export.editing.editing import add_constant, insert_behind
from htp_export.editing.flattening import read_for_change
from htp_export.errors import InputError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format.call_tree import Instance
from htp_export.model.module_tensors import OUT
from htp_export.model.tagged import ModelSource, TaggedResult
from htp_export.reporting.columns import Column
from htp_export.reporting.tables import ModuleTable


@dataclass(frozen=True)
class ClippedModule:
    """A module whose output is limited.

    Attributes:
        path: The module.
        tensors: The names of its outputs that are limited.
    """

    path: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Clipped(TaggedResult, ModuleTable):
    """The result of `clip`.

    Attributes:
        modules: Module path → what is limited of it.
        low: The smallest value.
        high: The largest value.
        model: The model.
    """

    columns = (Column("tensors", "tensors", text=", ".join, right=False),)

    modules: Mapping[str, ClippedModule]
    low: float
    high: float
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def summary(self) -> str:
        """The result in one line."""
        return f"outputs of {len(self.modules)} modules limited to {self.low:g} … {self.high:g}"


def clip(
    model: ModelSource,
    select: str,
    output: str | os.PathLike[str] | None = None,
    *,
    low: float = -1.0,
    high: float = 1.0,
) -> Clipped:
    """Limit the first output of modules to a range.

    Args:
        model: The model; not changed.
        select: The modules.
        output: The file to write.
        low: The smallest value.
        high: The largest value.

    Returns:
        The changed model, and the tensors that are limited.

    Raises:
        InputError: The range is empty, or a module has no output in the file.
        SelectorError: The selector matches no module.
    """
    if not low < high:
        raise InputError(f"the range {low:g} … {high:g} is empty")
    check_target(output)
    tagged = read_for_change(model)
    modules: dict[str, ClippedModule] = {}
    with Edit(tagged) as edit:
        limits = [
            add_constant(edit.graph, np.array(limit, "float32"), edit.names.tensors.unused(name))
            for name, limit in (("clip_low", low), ("clip_high", high))
        ]
        for tensor in tagged.select_tensors([f"{path}:{OUT}" for path in tagged.select(select)]):
            [value] = tensor.values
            node = edit.node(
                "Clip",
                [value, *limits],
                Instance(tensor.path, tensor.call or 0),
                f"{tensor.path}.clip",
            )
            insert_behind(edit.graph, value, node)
            readers = [(use.node, use.idx) for use in value.uses() if use.node is not node]
            name = str(value.name)
            edit.replace_uses(value, node.outputs[0], readers, rest=f"{name}.unclipped")
            modules[tensor.path] = ClippedModule(tensor.path, (name,))
    if output is not None:
        write_model(tagged.model, output)
    return Clipped(modules, low, high, model=tagged.model)
