"""Inputs of a model: sizes of its open dimensions, and given or random arrays."""

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
from htp_export.process.argument_types import MOST_SEED, check_whole
from htp_export.runtime.arrays import Array
from htp_export.runtime.declared_inputs import (
    Input,
    array_for,
    check_array,
    in_precision_of,
    random_array,
)
from htp_export.shapes.expressions import evaluate, names_in
from htp_export.shapes.symbolic import Symbolic


@dataclass(frozen=True)
class Bound:
    """The inputs of a model with sizes for its open dimensions, as far as they are given.

    Attributes:
        sizes: Name of an open dimension → size.
        shapes: Input name → shape, with None for a dimension that stays open; None if the rank is
            unknown.
        open: The dimensions that stay open: names, ``x: 1`` for one without a name, ``x: all`` for
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
            named = [name for name in self.open if ":" not in name]
            example = (
                f"dims ({', '.join(f'{name}=...' for name in named)})"
                if len(named) == len(self.open)
                else "shapes"
            )
            problem = f"sizes are open: {', '.join(map(repr, self.open))}; give {example} or data"
            raise OpenDimensionError(self.open, problem)


@dataclass(frozen=True)
class Feed:
    """An array for every input, its ONNX type, as numpy does not have all of them, and a note for each assumed size."""

    arrays: Mapping[str, Array]
    types: Mapping[str, ir.DataType]
    notes: tuple[str, ...] = ()


class Inputs:
    """The inputs of a model without those that have a default value, in order.

    Examples:
        >>> x = ir.val("x", ir.DataType.FLOAT, ["batch", 4])
        >>> inputs = Inputs.of(ir.Model(ir.Graph([x], [], nodes=[]), ir_version=10))
        >>> [str(each) for each in inputs], inputs.bind(dims={"batch": 2}).shapes
        (['float [batch, 4]'], {'x': (2, 4)})
        >>> inputs.feed({"x": np.ones((2, 3), np.float32)})
        Traceback (most recent call last):
        ...
        htp_export.errors.InputError: input 'x': is float [2, 3], and the model wants float [batch, 4]
    """

    def __init__(self, inputs: Iterable[Input]) -> None:
        self._inputs = tuple(inputs)
        self._by_name = {declared.name: declared for declared in self._inputs}

    @classmethod
    def of(cls, model: ir.Model) -> Inputs:
        """The inputs of a model."""
        return cls(
            Input.of(value)
            for value in model.graph.inputs
            if value.name not in model.graph.initializers
        )

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
        """Set the sizes of open dimensions by name, or by shapes, which do so for all inputs."""
        sizes = dict(dims or {})
        names = self._open_names
        for name, size in sizes.items():
            _check_name("open dimension", name, names)
            if not _is_size(size):
                raise InputError(f"size {name!r} is a whole number, not {_shown(size)}")
        given_shapes = {
            name: self._given_shape(name, shape) for name, shape in (shapes or {}).items()
        }
        conflicts = dict.fromkeys(
            text
            for later in (self._computed, ())  # first the sizes of which others are computed
            for name, shape in given_shapes.items()
            for text in _match(self._by_name[name], shape, sizes, dims or {}, later)
        )
        for name in self._computed & sizes.keys():
            expected = evaluate(
                name, {other: size for other, size in sizes.items() if other != name}
            )
            if expected not in (None, sizes[name]):
                conflicts[f"size {name!r} is {sizes[name]}, but by the others it is {expected}"] = (
                    None
                )
        bound: dict[str, tuple[int | None, ...] | None] = {}
        open_sizes: dict[str, None] = {}
        for declared in self:
            if declared.name in given_shapes:
                bound[declared.name] = given_shapes[declared.name]
            elif declared.shape is None:
                bound[declared.name] = None
                open_sizes.update({f"{declared.name}: all": None} if declared.tensor else {})
            else:
                shape = tuple(
                    evaluate(dim, sizes) if isinstance(dim, str) else dim for dim in declared.shape
                )
                bound[declared.name] = shape
                stays = (
                    (k, dim)
                    for k, dim in enumerate(declared.shape)
                    if shape[k] is None and dim not in self._computed
                )
                open_sizes.update(
                    {
                        dim if isinstance(dim, str) else f"{declared.name}: {k}": None
                        for k, dim in stays
                    }
                )
        return Bound(sizes, bound, tuple(open_sizes), tuple(conflicts))

    def feed(
        self, arrays_by_name: Mapping[str, Any], dims: Mapping[str, int] | None = None
    ) -> Feed:
        """Check given inputs (numpy arrays, torch tensors, or nested lists of numbers), and convert them to arrays.

        ``dims``: name of an open dimension → the size that the inputs must have there. An
        InputError has the input and the expected type and shape.
        """
        if not isinstance(arrays_by_name, Mapping):
            raise InputError(
                f"inputs are a dict of name → array, not {type(arrays_by_name).__name__}"
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
            for declared in self:  # before anything is unpacked
                check_array(declared, arrays_by_name.headers[declared.name])
        arrays = {
            declared.name: array_for(declared, arrays_by_name[declared.name]) for declared in self
        }
        for declared in self:
            check_array(declared, arrays[declared.name])
        if dims:
            self.bind(
                dims=dims, shapes={name: array.shape for name, array in arrays.items()}
            ).check()
        return Feed(arrays, self._types)

    def feed_again(self, arrays_by_name: Mapping[str, Array]) -> Feed:
        """Check the inputs of one file of a model for another file of it; floats are converted to its precision.

        If there are as many arrays as inputs, they are matched by position where the names differ.

        Examples:
            >>> x = Input("x_half", ir.DataType.FLOAT16, ("batch", 4))
            >>> Inputs([x]).feed_again({"x": np.ones((2, 4), np.float32)}).arrays["x_half"].dtype
            dtype('float16')
        """
        places = list(arrays_by_name.values()) if len(arrays_by_name) == len(self) else []
        feed = {}
        for place, declared in enumerate(self):
            array = arrays_by_name.get(declared.name, places[place] if places else None)
            if array is None:
                raise InputError(
                    f"takes an input {declared.name!r}, and the other file has none of that name"
                )
            feed[declared.name] = in_precision_of(declared, array)
        return self.feed(feed)

    def random(
        self,
        dims: Mapping[str, int] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        seed: int = 0,
        *,
        open_sizes: Sequence[int] = (1,),
        true: float = 1.0,
    ) -> Feed:
        """Create random inputs: floats are normally distributed, integers are 0 or 1, which most vocabularies have.

        They are 0 where they are looked up in a table of one row. ``open_sizes`` are for further
        open dimensions, see `assume`; ``true`` is the probability that a boolean is true.
        """
        bound, notes = self.assume(self.bind(dims=dims, shapes=shapes), open_sizes)
        if dims:
            bound.check()
        generator = np.random.default_rng(check_whole("seed", seed, 0, MOST_SEED))
        arrays: dict[str, Array] = {}
        for declared in self:
            shape = bound.shapes[declared.name]
            if shape is None:
                raise InputError(
                    f"input {declared.name!r}: no random value can be made of {declared}; give shapes or data"
                )
            arrays[declared.name] = random_array(
                declared, [size for size in shape if size is not None], generator, true
            )
            check_array(declared, arrays[declared.name])
        return Feed(arrays, self._types, notes)

    def assume(
        self, bound: Bound, open_sizes: Sequence[int] = (1,)
    ) -> tuple[Bound, tuple[str, ...]]:
        """Assume sizes for the dimensions that stay open; returns a note for each, too.

        The ``open_sizes`` are taken one after another. Dimensions with the same name have the same
        size, and so have those without a name. A tensor of unknown rank is an error.

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
                problem = f"input {declared.name!r}: the model does not tell its shape; give shapes or data"
                raise OpenDimensionError([f"{declared.name}: all"], problem)
            for place, dim in _open(declared, bound):
                if dim is None:
                    unnamed = unnamed or [next(numbers)]
                    notes[f"size {place} of input {declared.name!r} is {unnamed[0]}"] = None
                elif dim not in self._computed:
                    sizes[dim] = sizes[dim] if dim in sizes else next(numbers)
                    notes[f"size {dim!r} is {sizes[dim]}"] = None
        shapes = dict(bound.shapes)
        for declared in self:
            filled = list(bound.shapes[declared.name] or ())
            for place, dim in _open(declared, bound):
                filled[place] = unnamed[0] if dim is None else evaluate(dim, sizes)
                if filled[place] is None:
                    given = ", ".join(
                        f"{name}={sizes[name]}" for name in sorted(names_in(str(dim)))
                    )
                    raise OpenDimensionError(
                        [str(dim)], f"{dim!r} is no size if {given}; give other dims"
                    )
            shapes[declared.name] = None if bound.shapes[declared.name] is None else tuple(filled)
        return Bound(sizes, shapes, (), bound.conflicts), tuple(notes)

    @cached_property
    def _open_names(self) -> Mapping[str, None]:
        return dict.fromkeys(
            dim for declared in self for dim in declared.shape or () if isinstance(dim, str)
        )

    @cached_property
    def _computed(self) -> frozenset[str]:
        """The open dimensions that are computed of others, as ``past + sequence``; a name such as ``x-y`` is a name."""
        names = {name for name in self._open_names if name.isidentifier()}
        others = self._open_names.keys() - names
        return frozenset(name for name in others if (parts := names_in(name)) and parts <= names)

    @property
    def _types(self) -> dict[str, ir.DataType]:
        return {declared.name: declared.type for declared in self if declared.type is not None}

    def _given_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        _check_name("input", name, self._by_name)
        if not isinstance(shape, Sequence) or not all(map(_is_size, shape)):
            raise InputError(
                f"input {name!r}: a shape is a list of whole numbers, not {_shown(shape)}"
            )
        if len(shape) > MOST_DIMENSIONS:
            raise InputError(
                f"input {name!r}: a shape of {len(shape)} dimensions; numpy has at most {MOST_DIMENSIONS}"
            )
        return tuple(int(size) for size in shape)


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name in names:
        return
    near = nearest_names(str(name), names, count=1, cutoff=0.6)
    hint = f"; nearest: {near[0]!r}" if near else ""
    problem = f"no {what} {name!r} in this model, only {', '.join(map(repr, names))}{hint}"
    if not names:
        problem = f"this model has no {what}s, and so none named {name!r}"
    raise OpenDimensionError([name], problem) if what == "open dimension" else InputError(problem)


def _is_size(size: object) -> bool:
    return (
        isinstance(size, int | np.integer)
        and not isinstance(size, bool)
        and 0 <= int(size) <= LARGEST
    )


def _shown(value: object) -> str:
    """A size or shape that cannot be used; Python prints no integer of more than 4,300 digits."""
    numbers = value if isinstance(value, Sequence) else [value]
    too_large = any(isinstance(number, int) and number > LARGEST for number in numbers)
    return "one of more than 64 bits" if too_large else repr(value)


def _open(declared: Input, bound: Bound) -> Iterator[tuple[int, str | None]]:
    for place, size in enumerate(bound.shapes[declared.name] or ()):
        if size is None:
            dim = declared.shape[place] if declared.shape is not None else None
            yield place, dim if isinstance(dim, str) else None


def _match(
    wanted: Input,
    shape: tuple[int, ...],
    sizes: dict[str, int],
    dims: Mapping[str, int],
    later: Container[str] = (),
) -> Iterator[str]:
    """Iterate over the contradictions of a shape with the model and with known sizes; add sizes that were unknown.

    Dimensions in ``later`` are left out.
    """
    if wanted.shape is None:
        return
    if len(wanted.shape) != len(shape):
        yield f"input {wanted.name!r} has {len(wanted.shape)} dimensions in the model, not {len(shape)}"
        return
    for dim, size in zip(wanted.shape, shape, strict=True):
        if dim in later:
            continue
        known = evaluate(dim, sizes) if isinstance(dim, str) else dim
        expected = sizes.setdefault(dim, size) if known is None and isinstance(dim, str) else known
        if expected is not None and expected != size:
            named = f"size {dim!r} of it is" if isinstance(dim, str) else "a size of it is"
            named = f"dims has {dim} =" if dim in dims else named
            yield f"input {wanted.name!r} is {list(shape)}, but {named} {expected}"


def infer_bound(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> Symbolic:
    """Return what is known of the tensors of a model if its inputs have given shapes; no weights are read.

    Inputs that have a default and no shape here are left out.

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
    """Name → shape of the inputs that a run may leave out, as it then is."""
    tensors = ((str(value.name), value.const_value) for value in graph.inputs)
    return {name: tuple(tensor.shape.numpy()) for name, tensor in tensors if tensor is not None}
