"""What the sizes are that a model leaves open: told by name, by shape, or by example inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.cost.execution import Tensor
from htp_export.runtime.inputs import Inputs
from htp_export.shapes.known import MOST_ELEMENTS

__all__ = ["Bindings", "bind"]


@dataclass(frozen=True)
class Bindings:
    """The inputs of a model, with every size known.

    Attributes:
        sizes: Name of an open size → size.
        inputs: Input name → the tensor.
        notes: What was assumed.
    """

    sizes: Mapping[str, int]
    inputs: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()


def bind(
    model: ir.Model,
    inputs: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Bindings:
    """Give every size of a model's inputs a number: 1, with a note, if nothing tells it.

    Args:
        model: The model.
        inputs: Input name → example: anything with a ``shape``, or nested lists. Not all have to be there.
        dims: Name of an open size → size.
        shapes: Input name → its whole shape.

    Raises:
        InputError: If there is no such input or size, they contradict each other or the model, or the number of
            dimensions of an input is not known.

    Examples:
        >>> x = ir.val("x", ir.DataType.FLOAT, ["batch", 4])
        >>> model = ir.Model(ir.Graph([x], [], nodes=[]), ir_version=10)
        >>> bind(model, dims={"batch": 2}).inputs["x"].shape
        (2, 4)
        >>> bind(model).inputs["x"].shape, bind(model).notes
        ((1, 4), ("size 'batch' is 1",))
    """
    examples = {
        name: example if hasattr(example, "shape") else np.asarray(example) for name, example in (inputs or {}).items()
    }
    example_shapes = {name: tuple(int(size) for size in example.shape) for name, example in examples.items()}
    wanted = Inputs.of(model)
    bound, notes = wanted.assume(wanted.bind(dims=dims, shapes={**example_shapes, **(shapes or {})}))
    bound.check()
    tensors = {}
    for declared in wanted:
        known = _small(examples[declared.name]) if declared.name in examples and declared.type is not None else None
        shape = bound.shapes[declared.name]
        sizes = None if shape is None else tuple(size for size in shape if size is not None)  # all are: see above
        tensors[declared.name] = Tensor(declared.name, declared.type, sizes, "input", known)
    return Bindings(bound.sizes, tensors, notes)


def _small(array: Any) -> Any:
    """The values of an example that may say sizes: whole numbers, and few of them."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = array.numpy() if str(array.dtype).startswith(("torch.int", "torch.bool", "torch.uint")) else None
    if isinstance(array, np.ndarray | np.generic) and array.dtype.kind in "iub" and array.size <= MOST_ELEMENTS:
        return np.asarray(array)
    return None
