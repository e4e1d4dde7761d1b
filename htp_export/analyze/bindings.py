"""What the sizes are that a model leaves open: told by name, by shape, or by example inputs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.analyze.execution import Tensor
from htp_export.analyze.inference import MOST_ELEMENTS
from htp_export.errors import InputError

__all__ = ["Bindings", "bind"]


@dataclass(frozen=True)
class Bindings:
    """The inputs of a model, with every size known.

    Attributes:
        sizes: Name of an open size → size.
        inputs: Input name → the tensor.
    """

    sizes: Mapping[str, int]
    inputs: Mapping[str, Tensor]


def bind(
    model: ir.Model,
    inputs: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Bindings:
    """Give every size of a model's inputs a number.

    Args:
        model: The model.
        inputs: Input name → example: anything with a ``shape``, or nested lists. Not all have to be there.
        dims: Name of an open size → size.
        shapes: Input name → its whole shape.

    Raises:
        InputError: If there is no such input or size, they contradict each other or the model, or sizes stay open.

    Example:
        >>> x = ir.val("x", ir.DataType.FLOAT, ["batch", 4])
        >>> model = ir.Model(ir.Graph([x], [], nodes=[]), ir_version=10)
        >>> bind(model, dims={"batch": 2}).inputs["x"].shape
        (2, 4)
        >>> bind(model)
        Traceback (most recent call last):
        ...
        htp_export.errors.InputError: sizes are open: 'batch'; give dims (batch=...), or example inputs
    """
    wanted = {str(value.name): value for value in model.graph.inputs if value.name not in model.graph.initializers}
    given: dict[str, tuple[int, ...]] = {}
    values: dict[str, Any] = {}
    for name, example in (inputs or {}).items():
        _check_name("input", name, wanted)
        array = example if hasattr(example, "shape") else np.asarray(example)
        given[name] = tuple(int(size) for size in array.shape)
        values[name] = _small(array)
    for name, sizes_of in (shapes or {}).items():
        _check_name("input", name, wanted)
        given[name] = tuple(int(size) for size in sizes_of)
    sizes = _sizes(wanted, given, dict(dims or {}))
    open_sizes: dict[str, None] = {}
    found = {}
    for name, value in wanted.items():
        shape = given[name] if name in given else _bound(value, sizes, open_sizes)
        dtype = value.dtype if isinstance(value.type, ir.TensorType) else None
        known = values.get(name)
        found[name] = Tensor(name, dtype, shape, "input", None if known is None or dtype is None else known)
    if open_sizes:
        named = [name for name in open_sizes if ":" not in name]
        example = f"dims ({', '.join(f'{name}=...' for name in named)})" if len(named) == len(open_sizes) else "shapes"
        raise InputError(f"sizes are open: {', '.join(map(repr, open_sizes))}; give {example}, or example inputs")
    return Bindings(sizes, found)


def _check_name(what: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; do you mean {near[0]!r}?" if near else ""
        raise InputError(f"the model has no {what} {name!r}, only {', '.join(map(repr, known)) or 'none'}{hint}")


def _sizes(
    wanted: Mapping[str, ir.Value], given: Mapping[str, tuple[int, ...]], dims: dict[str, int]
) -> dict[str, int]:
    names = dict.fromkeys(
        dim.value for value in wanted.values() for dim in value.shape or () if isinstance(dim, ir.SymbolicDim)
    )
    for name, size in dims.items():
        _check_name("open size", name, {str(known): None for known in names if known is not None})
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise InputError(f"size {name!r} is a whole number, not {size!r}")
    for name, shape in given.items():
        declared = wanted[name].shape
        if declared is None:
            continue
        if len(declared) != len(shape):
            raise InputError(f"input {name!r} has {len(declared)} dimensions in the model, not {len(shape)}")
        for dim, size in zip(declared, shape, strict=True):
            if isinstance(dim, int):
                expected: int | None = dim
            else:
                expected = dims.setdefault(dim.value, size) if dim.value is not None else None
            if expected is not None and expected != size:
                named = f"size {dim.value!r}" if isinstance(dim, ir.SymbolicDim) else "a size"
                raise InputError(f"input {name!r} is {list(shape)}, but {named} of it is {expected}")
    return dims


def _bound(value: ir.Value, sizes: Mapping[str, int], open_sizes: dict[str, None]) -> tuple[int, ...] | None:
    if value.shape is None:
        if isinstance(value.type, ir.TensorType):
            open_sizes[f"{value.name}: all"] = None
        return None
    found = []
    for position, dim in enumerate(value.shape):
        if isinstance(dim, int):
            found.append(dim)
        elif dim.value in sizes:
            found.append(sizes[str(dim.value)])
        else:
            open_sizes[dim.value or f"{value.name}: {position}"] = None
    return tuple(found)


def _small(array: Any) -> Any:
    """The values of an example that may say sizes: whole numbers, and few of them."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        array = array.numpy() if str(array.dtype).startswith(("torch.int", "torch.bool", "torch.uint")) else None
    if isinstance(array, np.ndarray | np.generic) and array.dtype.kind in "iub" and array.size <= MOST_ELEMENTS:
        return np.asarray(array)
    return None
