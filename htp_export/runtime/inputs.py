"""Inputs of a model: sizes of its open dimensions, and arrays of the user or random arrays."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.errors import InputError, OpenDimensionError, nearest_names
from htp_export.files.npz_file import NpzArrays
from htp_export.format.bounds import LARGEST, MOST_DIMENSIONS
from htp_export.runtime.arrays import Array
from htp_export.runtime.declared_inputs import (
    Input,
    array_for,
    check_array,
    in_precision_of,
    random_array,
)
from htp_export.runtime.settings import DEFAULTS, RunSettings
from htp_export.shapes.expressions import evaluate, names_in
from htp_export.shapes.symbolic import Symbolic


@dataclass(frozen=True)
class Bound:
    """The inputs of a model with the known sizes of its open dimensions.

    Attributes:
        sizes: Name of an open dimension → size.
        shapes: Input name → shape, with None for a dimension of unknown size; None if the rank is
            unknown.
        open: The dimensions of unknown size: names, ``x: 1`` for one without a name, ``x: all`` for
            a whole shape.
        conflicts: Contradictions between the sizes, or with the model, a sentence each.
    """

    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int | None, ...] | None]
    open: tuple[str, ...]
    conflicts: tuple[str, ...]

    def check(self) -> None:
        """Refuse sizes that contradict each other, and open dimensions without a size (`OpenDimensionError`)."""
        if self.conflicts:
            raise InputError(self.conflicts[0])
        if self.open:
            example = "shapes"
            if all(":" not in name for name in self.open):
                example = f"dims ({', '.join(f'{name}=...' for name in self.open)})"
            problem = f"sizes are open: {', '.join(map(repr, self.open))}; give {example} or data"
            raise OpenDimensionError(self.open, problem)


@dataclass(frozen=True)
class Feed:
    """An array for each input, its ONNX type, which numpy may not have, and a note for each assumed size."""

    arrays: Mapping[str, Array]
    types: Mapping[str, ir.DataType]
    notes: tuple[str, ...] = ()


class Inputs:
    """The inputs of a model, in order, except those with default values.

    Examples:
        >>> x = ir.val("x", ir.DataType.FLOAT, ["batch", 4])
        >>> inputs = Inputs.of(ir.Model(ir.Graph([x], [], nodes=[]), ir_version=10))
        >>> [str(declared) for declared in inputs], inputs.bind(dims={"batch": 2}).shapes
        (['float [batch, 4]'], {'x': (2, 4)})
        >>> inputs.feed({"x": np.ones((2, 3), np.float32)})
        Traceback (most recent call last):
        ...
        htp_export.errors.InputError: input 'x': is float [2, 3], but the model requires float [batch, 4]
    """

    def __init__(self, inputs: Iterable[Input]) -> None:
        self._inputs = tuple(inputs)
        self._by_name = {declared.name: declared for declared in self._inputs}

    @classmethod
    def of(cls, model: ir.Model) -> Inputs:
        """Return the inputs of a model that have no default value."""
        required = (
            value for value in model.graph.inputs if value.name not in model.graph.initializers
        )
        return cls(map(Input.of, required))

    def __iter__(self) -> Iterator[Input]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def bind(
        self,
        *,
        dims: Mapping[str, int] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Bound:
        """Set the sizes of open dimensions by name, or by shapes of inputs, which also apply to other inputs."""
        dims = dims or {}
        sizes = dict(dims)
        for name, size in sizes.items():
            _check_name("open dimension", name, self._open_names)
            if not _is_size(size):
                raise InputError(f"size {name!r} must be a whole number, not {_shown(size)}")
        checked_shapes = {
            name: self._checked(name, shape) for name, shape in (shapes or {}).items()
        }
        conflicts: dict[str, None] = {}
        # first the sizes from which others are computed, then all
        for left_out in (self._computed, frozenset[str]()):
            for name, shape in checked_shapes.items():
                texts = _match(self._by_name[name], shape, sizes, dims, left_out)
                conflicts.update(dict.fromkeys(texts))
        conflicts.update(dict.fromkeys(self._contradictions(sizes)))
        bound: dict[str, tuple[int | None, ...] | None] = {}
        open_names: dict[str, None] = {}
        for declared in self:
            bound[declared.name] = checked_shapes.get(declared.name)
            if declared.name in checked_shapes:
                continue
            if declared.shape is not None:
                bound[declared.name] = _evaluated(declared.shape, sizes)
                open_names.update(dict.fromkeys(self._unknown_dims(declared, sizes)))
            elif declared.tensor:
                open_names[f"{declared.name}: all"] = None
        return Bound(sizes, bound, tuple(open_names), tuple(conflicts))

    def _contradictions(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Describe each computed size that differs from its value by the other sizes."""
        for name in self._computed & sizes.keys():
            others = {other: size for other, size in sizes.items() if other != name}
            expected = evaluate(name, others)
            if expected not in (None, sizes[name]):
                yield f"size {name!r} is {sizes[name]}, but follows from the others as {expected}"

    def _unknown_dims(self, declared: Input, sizes: Mapping[str, int]) -> Iterator[str]:
        """Iterate over the names of dimensions without a size, except those that are computed of others."""
        shape = declared.shape or ()
        for axis, size in enumerate(_evaluated(shape, sizes)):
            dim = shape[axis]
            if size is None and dim not in self._computed:
                yield dim if isinstance(dim, str) else f"{declared.name}: {axis}"

    def feed(
        self, arrays_by_name: Mapping[str, Any], dims: Mapping[str, int] | None = None
    ) -> Feed:
        """Check inputs of a user (numpy arrays, torch tensors, or nested lists), and convert them to arrays.

        ``dims``: name of an open dimension → the required size. An InputError names the input, and
        the expected type and shape.
        """
        if not isinstance(arrays_by_name, Mapping):
            raise InputError(
                f"inputs must be a dict of name → array, not {type(arrays_by_name).__name__}"
            )
        for name in arrays_by_name:
            _check_name("input", name, self._by_name)
        missing = [
            f"{name!r} ({declared})"
            for name, declared in self._by_name.items()
            if name not in arrays_by_name
        ]
        if missing:
            raise InputError(f"no value for input {', '.join(missing)}")
        if isinstance(arrays_by_name, NpzArrays):
            for declared in self:  # before an array is decompressed, which may be large
                check_array(declared, arrays_by_name.headers[declared.name])
        arrays = {
            declared.name: array_for(declared, arrays_by_name[declared.name]) for declared in self
        }
        for declared in self:
            check_array(declared, arrays[declared.name])
        if dims:
            shapes = {name: array.shape for name, array in arrays.items()}
            self.bind(dims=dims, shapes=shapes).check()
        return Feed(arrays, self._types)

    def feed_again(self, arrays_by_name: Mapping[str, Array]) -> Feed:
        """Check the inputs of one file of a model for another file; floats are converted to its precision.

        If there are as many arrays as inputs, an input without an array of its name gets the one at
        its position.

        Examples:
            >>> x = Input("x_half", ir.DataType.FLOAT16, ("batch", 4))
            >>> Inputs([x]).feed_again({"x": np.ones((2, 4), np.float32)}).arrays["x_half"].dtype
            dtype('float16')
        """
        in_order = list(arrays_by_name.values())
        if len(in_order) != len(self):
            in_order = []
        feed = {}
        for position, declared in enumerate(self):
            array = arrays_by_name.get(declared.name, in_order[position] if in_order else None)
            if array is None:
                raise InputError(
                    f"takes an input {declared.name!r}, but the other file has no input of that name"
                )
            feed[declared.name] = in_precision_of(declared, array)
        return self.feed(feed)

    def random(
        self,
        settings: RunSettings = DEFAULTS,
        *,
        open_sizes: Sequence[int] = (1,),
        true: float = 1.0,
    ) -> Feed:
        """Create random inputs: floats are normally distributed, integers are 0 or 1, which are in most vocabularies.

        Integers that index a table of one row are 0. ``open_sizes`` are for the remaining open
        dimensions, as in `assume`; ``true`` is the probability that a boolean is true.
        """
        wanted = self.bind(dims=settings.dims, shapes=settings.shapes)
        bound, notes = self.assume(wanted, open_sizes)
        if settings.dims:
            bound.check()
        generator = np.random.default_rng(settings.check_seed())
        arrays: dict[str, Array] = {}
        for declared in self:
            shape = bound.shapes[declared.name]
            if shape is None:
                raise InputError(
                    f"input {declared.name!r}: random values cannot be generated for {declared}; give shapes or data"
                )
            sizes = [size for size in shape if size is not None]
            arrays[declared.name] = random_array(declared, sizes, generator, true)
            check_array(declared, arrays[declared.name])
        return Feed(arrays, self._types, notes)

    def assume(
        self, bound: Bound, open_sizes: Sequence[int] = (1,)
    ) -> tuple[Bound, tuple[str, ...]]:
        """Assume sizes for the open dimensions, and return the result with a note for each of them.

        The ``open_sizes`` are used in turn. Dimensions with the same name get the same size, and so
        do all dimensions without a name. A tensor of unknown rank is an error.

        Examples:
            >>> x = Inputs([Input("x", ir.DataType.FLOAT, ("batch", 4))])
            >>> bound, notes = x.assume(x.bind())
            >>> bound.shapes, notes
            ({'x': (1, 4)}, ("size 'batch' is 1",))
        """
        numbers, sizes = itertools.cycle(open_sizes), dict(bound.sizes)
        unnamed: list[int] = []
        notes: dict[str, None] = {}
        for declared in self:
            if bound.shapes[declared.name] is None and declared.tensor:
                problem = f"input {declared.name!r}: the model does not contain its shape; give shapes or data"
                raise OpenDimensionError([f"{declared.name}: all"], problem)
            for axis, dim in _open(declared, bound):
                if dim is None:
                    unnamed = unnamed or [next(numbers)]
                    notes[f"size {axis} of input {declared.name!r} is {unnamed[0]}"] = None
                elif dim not in self._computed:
                    if dim not in sizes:
                        sizes[dim] = next(numbers)
                    notes[f"size {dim!r} is {sizes[dim]}"] = None
        shapes = dict(bound.shapes)
        for declared in self:
            shape = bound.shapes[declared.name]
            if shape is None:
                continue
            filled = list(shape)
            for axis, dim in _open(declared, bound):
                filled[axis] = unnamed[0] if dim is None else _computed_size(dim, sizes)
            shapes[declared.name] = tuple(filled)
        return Bound(sizes, shapes, (), bound.conflicts), tuple(notes)

    @cached_property
    def _open_names(self) -> Mapping[str, None]:
        names: dict[str, None] = {}
        for declared in self:
            names.update(dict.fromkeys(d for d in declared.shape or () if isinstance(d, str)))
        return names

    @cached_property
    def _computed(self) -> frozenset[str]:
        """The open dimensions that are expressions of others: ``past + sequence``, but not a name such as ``x-y``."""
        names = {name for name in self._open_names if name.isidentifier()}
        others = self._open_names.keys() - names
        return frozenset(name for name in others if (parts := names_in(name)) and parts <= names)

    @property
    def _types(self) -> dict[str, ir.DataType]:
        return {declared.name: declared.type for declared in self if declared.type is not None}

    def _checked(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that a user gave for an input; an InputError if it is invalid."""
        _check_name("input", name, self._by_name)
        if not isinstance(shape, Sequence) or not all(map(_is_size, shape)):
            raise InputError(
                f"input {name!r}: a shape must be a list of whole numbers, not {_shown(shape)}"
            )
        if len(shape) > MOST_DIMENSIONS:
            raise InputError(
                f"input {name!r}: a shape of {len(shape)} dimensions; numpy supports at most {MOST_DIMENSIONS}"
            )
        return tuple(int(size) for size in shape)


def _evaluated(
    shape: Sequence[int | str | None], sizes: Mapping[str, int]
) -> tuple[int | None, ...]:
    """Return a shape with the sizes of its dimensions, None for unknown ones."""
    return tuple(evaluate(dim, sizes) if isinstance(dim, str) else dim for dim in shape)


def _computed_size(dim: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a dimension; an OpenDimensionError if it is negative or not an integer."""
    size = evaluate(dim, sizes)
    if size is None:
        values = ", ".join(f"{name}={sizes[name]}" for name in sorted(names_in(dim)))
        raise OpenDimensionError(
            [dim], f"{dim!r} is not a valid size with {values}; give other dims"
        )
    return size


def _check_name(kind: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name in names:
        return
    nearest = nearest_names(str(name), names, count=1, cutoff=0.6)
    hint = f"; nearest: {nearest[0]!r}" if nearest else ""
    problem = f"no {kind} {name!r} in this model, only {', '.join(map(repr, names))}{hint}"
    if not names:
        problem = f"this model has no {kind}s, and so none named {name!r}"
    if kind == "open dimension":
        raise OpenDimensionError([name], problem)
    raise InputError(problem)


def _is_size(size: object) -> bool:
    if not isinstance(size, int | np.integer) or isinstance(size, bool):
        return False
    return 0 <= int(size) <= LARGEST


def _shown(value: object) -> str:
    """Return an invalid size or shape for a message; Python does not print an integer of more than 4,300 digits."""
    numbers = value if isinstance(value, Sequence) else [value]
    too_large = any(isinstance(number, int) and number > LARGEST for number in numbers)
    return "one of more than 64 bits" if too_large else repr(value)


def _open(declared: Input, bound: Bound) -> Iterator[tuple[int, str | None]]:
    """Iterate over the open dimensions of an input: axis, and name or None."""
    for axis, size in enumerate(bound.shapes[declared.name] or ()):
        if size is None:
            dim = declared.shape[axis] if declared.shape is not None else None
            yield axis, dim if isinstance(dim, str) else None


def _match(
    wanted: Input,
    shape: tuple[int, ...],
    sizes: dict[str, int],
    dims: Mapping[str, int],
    left_out: Container[str] = (),
) -> Iterator[str]:
    """Iterate over the contradictions of a shape with the model and with known sizes; add unknown sizes to ``sizes``.

    Dimensions in ``left_out`` are ignored.
    """
    if wanted.shape is None:
        return
    if len(wanted.shape) != len(shape):
        yield f"input {wanted.name!r} has {len(wanted.shape)} dimensions in the model, not {len(shape)}"
        return
    for dim, size in zip(wanted.shape, shape, strict=True):
        if dim in left_out:
            continue
        expected = dim
        if isinstance(dim, str):
            expected = evaluate(dim, sizes)
            if expected is None:
                expected = sizes.setdefault(dim, size)
        if expected is not None and expected != size:
            if dim in dims:
                subject = f"dims has {dim} ="
            elif isinstance(dim, str):
                subject = f"size {dim!r} of it is"
            else:
                subject = "a size of it is"
            yield f"input {wanted.name!r} is {list(shape)}, but {subject} {expected}"


def infer_bound(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> Symbolic:
    """Infer the shapes and types in a model for shapes of its inputs, without reading weights.

    Inputs with a default value that are not in ``shapes`` have the shape of this value.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x", ir.DataType.FLOAT, ["batch", 4])], outputs=[ir.val("y")])
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20}, name="g")
        >>> known = infer_bound(ir.Model(graph, ir_version=10), {"x": (2, 4)})
        >>> known.shape(relu.outputs[0]), known.bytes_of(relu.outputs[0])
        ((2, 4), 32)
    """
    sizes = Inputs.of(model).bind(shapes=shapes).sizes
    numbers = {name: tuple(map(int, shape)) for name, shape in shapes.items()}
    known = {**default_shapes(model.graph), **numbers}
    return Symbolic(model.graph, functions=model.functions, sizes=sizes, shapes=known)


def default_shapes(graph: ir.Graph) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the inputs with default values."""
    tensors = ((str(value.name), value.const_value) for value in graph.inputs)
    return {name: tuple(tensor.shape.numpy()) for name, tensor in tensors if tensor is not None}
