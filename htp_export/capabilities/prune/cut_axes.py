"""Axes of tensors cut shorter: in weights, in constant sizes, and in the metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.prune.coupled_axes import (
    RECURRENT,
    Axis,
    changed_axes,
    gathered,
    is_cut_by_groups,
    slice_start,
)
from htp_export.editing.edit import Edit
from htp_export.editing.editing import add_constant, remove_unused
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.parameters import ModuleParameters
from htp_export.format.recipes import step
from htp_export.model.module_facts import stored_tensor
from htp_export.model.neighbours import producer_of
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array
from htp_export.shapes.known import Shape
from htp_export.shapes.sizes import Dim, divide, is_unnamed
from htp_export.shapes.symbolic import Symbolic
from htp_export.weights.parameter_places import ParameterPlaces, Place
from htp_export.weights.products import changed_when_written
from htp_export.weights.storing import store

ParameterShape: TypeAlias = tuple[int, ...]


def change_parameters(
    edit: Edit,
    before: ParameterPlaces,
    changes: Mapping[ir.Value, tuple[ParameterShape, Mapping[str, ParameterShape]]],
) -> None:
    """Set the new shapes of parameters; ``before``: their places before.

    A change consists of the old shape of an initializer and its new shapes, one for each suffix
    that is added to the name of the parameter.
    """
    new: dict[str, dict[str, ParameterShape]] = {}
    for value, (old, shapes) in changes.items():
        for place, is_transposed in _whole_parameters(before, value, old).items():
            new[place.parameter] = {
                suffix: shape[::-1] if is_transposed else shape for suffix, shape in shapes.items()
            }
    parameters = {}
    for path, module in (edit.tagged.parameters or {}).items():
        module_shapes: dict[str, ParameterShape] = {}
        frozen: set[str] = set()
        for key, old in module.shapes.items():
            first = before.declared[tags.below(path, key)].first
            for suffix, shape in new.get(first, {"": old}).items():
                module_shapes[f"{key}{suffix}"] = shape
                if key in (module.frozen or ()):
                    frozen.add(f"{key}{suffix}")
        tied = {key: full for key, full in module.tied.items() if key in module_shapes}
        known = None if module.frozen is None else frozenset(frozen)
        parameters[path] = ModuleParameters(module_shapes, tied, known)
    if parameters:
        edit.set_parameters(parameters)


def _whole_parameters(
    before: ParameterPlaces, value: ir.Value, shape: ParameterShape
) -> dict[Place, bool]:
    """The parameters that are whole in an initializer → whether they are transposed in it."""
    transposed: dict[Place, bool] = {}
    for place in before.places.get(value, ()):
        declared = before.declared[place.parameter].shape
        # tools that merge do not record whether they transpose
        is_transposed = "transposed" in place.how or ("merged" in place.how and declared != shape)
        if declared == (shape[::-1] if is_transposed else shape):
            transposed[place] = is_transposed
    merged = [place for place in transposed if "merged" in place.how and len(shape) > 1]
    if len(merged) < 2:
        return transposed
    # of several merged matrices of one shape, each may be in another tensor, unless the name tells
    for place in merged:
        if place.parameter != value.name:
            del transposed[place]
    return transposed


_SIZES = {"Reshape": 1, "Expand": 1, "Resize": 3, "ConstantOfShape": 0}
"""Operator → position of the input that contains the shape of the result."""

_COMPUTES_SIZES = frozenset(
    ("Concat", "Mul", "Unsqueeze", "Squeeze", "Cast", "Identity", "Reshape", "Where")
)
"""Operators that compute sizes from a constant factor or part."""


def cut_axes(edit: Edit, kept: Mapping[Axis, Array]) -> None:
    """Keep only some indices of axes, in place, in all tensors that have the channels.

    After an InputError, for a node whose result would not get the required sizes, the model is not
    usable.
    """
    tagged, graph = edit.tagged, edit.graph
    shapes = tagged.inferred
    before = {value: shapes.shape(value) for value in tagged.values.values()}
    neighbours: dict[ir.Node | None, None] = {}
    for value, _ in kept:
        neighbours[value.producer()] = None
        neighbours.update(dict.fromkeys(use.node for use in value.uses()))
    for node in neighbours:
        if node is not None:
            _refit(edit, node, kept, shapes)
    by_value: dict[ir.Value, dict[int, Array]] = {}
    for (value, axis), stays in kept.items():
        by_value.setdefault(value, {})[axis] = stays
    for value, axes in by_value.items():
        _shorten(value, axes)
    remove_unused(tagged.model)  # nodes that computed the indices of a Gather
    after = Symbolic(graph, functions=tagged.model.functions)
    if _keep_sizes(edit, kept, shapes, after):
        after = Symbolic(graph, functions=tagged.model.functions)
    _check(tagged, before, after, by_value)


def _shorten(value: ir.Value, axes: Mapping[int, Array]) -> None:
    """Remove the other indices of a weight, when it is written; update the shape of any tensor."""
    kept = {axis: np.flatnonzero(stays) for axis, stays in axes.items() if not stays.all()}
    if not kept:
        return
    tensor = stored_tensor(value)
    if tensor is not None:
        shape = list(tensor.shape.numpy())
        recipe = recipe_of(value)
        for axis, indices in kept.items():
            shape[axis] = len(indices)
            recipe = step("take", recipe, [axis, indices.tolist()])

        def taken(array: Array) -> Array:
            for axis, indices in kept.items():
                array = np.take(array, indices, axis)
            return array

        store(value, changed_when_written(tensor, taken, recipe, shape))
    if value.shape is not None:
        dims: list[int | ir.SymbolicDim | None] = list(value.shape)
        for axis, indices in kept.items():
            # an open dimension is a multiple of the channels, and its name is not known any more
            dims[axis] = len(indices) if isinstance(dims[axis], int) else None
        value.shape = ir.Shape(dims)


def _refit(edit: Edit, node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic) -> None:
    """Change the sizes that a node has as constants or attributes."""
    if node.domain:
        return
    operator = node.op_type
    if operator in _SIZES and len(node.inputs) > _SIZES[operator]:
        _refit_sizes(edit, node, kept, shapes)
    elif operator == "Split":
        _refit_split(edit, node, kept, shapes)
    elif operator == "Slice":
        _refit_slice(edit, node, kept, shapes)
    elif operator in ("Conv", "ConvTranspose"):
        _refit_convolution(node, kept, shapes)
    elif operator in ("Gather", "GatherND"):
        _refit_gather(edit, node, kept, shapes)
    elif operator in RECURRENT:
        stays = kept.get((node.inputs[2], 2))  # type: ignore[arg-type]
        if stays is not None:
            node.attributes.add(ir.AttrInt64("hidden_size", int(stays.sum())))


def _refit_convolution(node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic) -> None:
    groups = node.attributes.get_int("group", 1)
    stays = kept.get((node.outputs[0], 1))
    if groups > 1 and stays is not None and is_cut_by_groups(node, shapes):
        node.attributes.add(ir.AttrInt64("group", groups * int(stays.sum()) // len(stays)))


def _refit_sizes(edit: Edit, node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic) -> None:
    result, position = node.outputs[0], _SIZES[node.op_type]
    rank = shapes.rank(result) or 0
    sizes_shape = shapes.shape(node.inputs[position])
    count = sizes_shape[0] if sizes_shape and isinstance(sizes_shape[0], int) else rank
    for axis in range(rank):
        stays = kept.get((result, axis))
        if stays is not None and not stays.all():
            index = axis - (rank - count)  # Expand may have sizes for the last axes only
            change = _SizeChange(position, index, len(stays), int(stays.sum()))
            _set_size(edit, node, change, shapes)


def _keep_sizes(edit: Edit, kept: Mapping[Axis, Array], before: Symbolic, after: Symbolic) -> bool:
    """Keep sizes that are computed from an axis that was cut, for tensors without its channels.

    ``nn.MultiheadAttention`` splits its projections by the width of its input in this way. Returns
    whether there are any.
    """
    modified = False
    for node in edit.graph:
        position = _SIZES.get(node.op_type, len(node.inputs))
        if node.domain or position >= len(node.inputs):
            continue
        rank, sizes_input = before.rank(node.outputs[0]) or 0, node.inputs[position]
        sizes, computed = before.contents(sizes_input), after.contents(sizes_input)
        if sizes is None or computed is None or sizes.shape != computed.shape:
            continue
        for index, (old, new) in enumerate(zip(sizes, computed, strict=True)):
            axis = index + rank - len(sizes)
            if isinstance(old, int) and old != new and (node.outputs[0], axis) not in kept:
                _set_size(edit, node, _SizeChange(position, index, old, old), before)
                modified = True
    return modified


@dataclass(frozen=True)
class _SizeChange:
    """A size that changes: the input that contains it, its index there, and both numbers."""

    position: int
    index: int
    old: int
    new: int


def _set_size(edit: Edit, node: ir.Node, change: _SizeChange, shapes: Symbolic) -> None:
    """Replace a number in a vector of sizes, or a factor of it, if it is a constant.

    Computed sizes follow from the tensors. If other nodes may need the old number, the nodes that
    compute it are copied.
    """
    value = node.inputs[change.position]
    if value is None or change.index < 0:
        return
    numbers = shapes.constant(value)
    if numbers is None:
        producer = producer_of(value, *_COMPUTES_SIZES)
        if producer is None:
            return
        producer = _for_one_reader(edit, producer, node, change.position)
        source = _source_of_size(producer, change, shapes)
        if source is not None:
            _set_size(edit, producer, source, shapes)
    elif len(numbers) > change.index and numbers[change.index] == change.old:
        changed = list(numbers)
        changed[change.index] = change.new
        dtype = shapes.dtype(value) or ir.DataType.INT64
        array = np.array(changed, dtype.numpy())
        array = array.reshape(() if shapes.rank(value) == 0 else -1)
        _set_constant(edit, node, change.position, array, f"{value.name}_cut")


def _source_of_size(producer: ir.Node, change: _SizeChange, shapes: Symbolic) -> _SizeChange | None:
    """The change of an input of the producer that has this effect on its output."""
    if producer.op_type == "Mul":
        return _source_of_product(producer, change, shapes)
    if producer.op_type == "Where":
        return _source_of_choice(producer, change, shapes)
    if producer.op_type == "Concat":
        return _source_of_part(producer, change, shapes)
    return replace(change, position=0)


def _source_of_product(
    producer: ir.Node, change: _SizeChange, shapes: Symbolic
) -> _SizeChange | None:
    """The constant factor that is a multiple of the old size."""
    for position, factor in enumerate(producer.inputs):
        if factor is None or stored_tensor(factor) is None:
            continue
        numbers = shapes.constant(factor)
        if numbers is not None and len(numbers) == 1 and numbers[0] % change.old == 0:
            return _SizeChange(position, 0, numbers[0], numbers[0] // change.old * change.new)
    return None


def _source_of_choice(
    producer: ir.Node, change: _SizeChange, shapes: Symbolic
) -> _SizeChange | None:
    """The one choice of a ``Where`` that has the old size.

    TorchScript writes such a ``Where``, to replace the sizes -1 of an expand by 1.
    """
    positions: list[int] = []
    for position in (1, 2):
        sizes = shapes.contents(producer.inputs[position])
        if sizes is not None and sizes.ndim and sizes[change.index] == change.old:
            positions.append(position)
    return replace(change, position=positions[0]) if len(positions) == 1 else None


def _source_of_part(producer: ir.Node, change: _SizeChange, shapes: Symbolic) -> _SizeChange | None:
    """The part of a ``Concat`` that contains the index."""
    start = 0
    for position, part in enumerate(producer.inputs):
        shape = shapes.shape(part)
        if not shape or not isinstance(shape[0], int):
            return None
        if start <= change.index < start + shape[0]:
            return replace(change, position=position, index=change.index - start)
        start += shape[0]
    return None


def _for_one_reader(edit: Edit, producer: ir.Node, node: ir.Node, position: int) -> ir.Node:
    """The producer of an input of a node; a copy of it, if it has other consumers."""
    value = producer.outputs[0]
    if len(value.uses()) == 1 and not value.is_graph_output():
        return producer
    copy = ir.node(producer.op_type, producer.inputs, producer.attributes)
    copy.name, copy.outputs[0].name = f"{producer.name}_{node.name}", f"{value.name}_{node.name}"
    copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
    edit.own_as(copy, producer)
    edit.graph.insert_before(node, copy)
    node.replace_input_with(position, copy.outputs[0])
    return copy


def _set_constant(edit: Edit, node: ir.Node, position: int, array: Array, name: str) -> None:
    """Replace an input of a node by a new constant.

    The old one is removed later, if it is unused.
    """
    node.replace_input_with(position, add_constant(edit.graph, array, name))


def _refit_gather(edit: Edit, node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic) -> None:
    indexed = gathered(node, shapes)
    if indexed is None:
        return
    table_axis, indices = indexed
    stays = kept.get((node.inputs[0], table_axis))  # type: ignore[arg-type]
    if stays is None:
        return
    for axis in range(indices.ndim):
        kept_indices = kept.get((node.outputs[0], table_axis + axis))
        if kept_indices is not None:
            indices = np.compress(kept_indices, indices, axis)
    dtype = shapes.dtype(node.inputs[1]) or ir.DataType.INT64
    new_positions = np.cumsum(stays) - 1
    array = new_positions[indices].astype(dtype.numpy())
    if node.op_type == "GatherND":
        array = array[..., None]
    _set_constant(edit, node, 1, array, f"{node.name}_indices_cut")


def _refit_split(edit: Edit, node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic) -> None:
    [axis] = changed_axes(node, shapes) or [0]
    if (node.inputs[0], axis) not in kept:
        return
    sizes: list[Dim] = []
    for value in node.outputs:
        stays, shape = kept.get((value, axis)), shapes.shape(value)
        if stays is not None:
            sizes.append(int(stays.sum()))
        else:
            sizes.append(shape[axis] if shape else 0)
    node.attributes.pop("num_outputs", None)
    if "split" in node.attributes:
        numbers = [int(size) for size in sizes]  # type: ignore[arg-type]
        node.attributes.add(ir.AttrInt64s("split", numbers))
        return
    if len(node.inputs) < 2:
        node.resize_inputs(2)
    _set_constant(edit, node, 1, np.array(sizes, np.int64), f"{node.name}_split_cut")


def _refit_slice(edit: Edit, node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic) -> None:
    for index, axis in enumerate(changed_axes(node, shapes) or []):
        stays = kept.get((node.inputs[0], axis))  # type: ignore[arg-type]
        shape = shapes.shape(node.outputs[0])
        if stays is None or shape is None or not isinstance(shape[axis], int):
            continue
        start = slice_start(node, axis, shapes, len(stays)) or 0
        end = start + shape[axis]
        _set_bound(edit, node, "starts", index, int(stays[:start].sum()), shapes)
        _set_bound(edit, node, "ends", index, int(stays[:end].sum()), shapes)


def _set_bound(
    edit: Edit, node: ir.Node, name: str, index: int, bound: int, shapes: Symbolic
) -> None:
    """Set one of the ``starts`` or ``ends`` of a Slice, an attribute or an input."""
    listed = node.attributes.get_ints(name)
    if listed is not None:
        node.attributes.add(ir.AttrInt64s(name, [*listed[:index], bound, *listed[index + 1 :]]))
        return
    position = 1 if name == "starts" else 2
    value = node.inputs[position]
    numbers = list(shapes.constant(value) or [])
    numbers[index] = bound
    dtype = shapes.dtype(value) or ir.DataType.INT64
    array = np.array(numbers, dtype.numpy())
    _set_constant(edit, node, position, array, f"{node.name}_{name}_cut")


def _check(
    tagged: TaggedModel,
    before: Mapping[ir.Value, Shape | None],
    after: Symbolic,
    cut: Mapping[ir.Value, Mapping[int, Array]],
) -> None:
    """Refuse a graph in which a tensor has another shape than required."""
    for value, shape in before.items():
        if shape is None or value.graph is None:
            continue
        wanted = list(shape)
        for axis, stays in cut.get(value, {}).items():
            # some indices, or some of each period
            wanted[axis] = divide(wanted[axis], len(stays)) * int(stays.sum())
        became_empty = 0 in wanted and 0 not in shape
        if not became_empty and _fits(after.shape(value), wanted):
            continue
        tensor, node = f"tensor {value.name!r}", value.producer()
        if node is not None:
            owners = ", ".join(map(repr, tagged.owners_of(node)))
            tensor = f"{node.op_type} {node.name!r} of {owners}"
        sizes = ", ".join(map(str, wanted))
        raise InputError(f"channels cannot be cut: {tensor} does not get the shape [{sizes}]")


def _fits(shape: Shape | None, wanted: Sequence[Dim]) -> bool:
    """Whether a shape is the wanted one, as far as its open dimensions have names."""
    if shape is None or len(shape) != len(wanted):
        return False
    for size, wanted_size in zip(shape, wanted, strict=True):
        is_known = not is_unnamed(size) and not is_unnamed(wanted_size)
        if is_known and size != wanted_size:
            return False
    return True
