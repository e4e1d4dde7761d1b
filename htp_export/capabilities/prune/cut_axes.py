"""Axes of tensors made shorter: weights, the sizes that a graph holds as constants, and parameters in the metadata."""

from __future__ import annotations

from collections.abc import Mapping
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
from htp_export.editing.editing import add_constant, remove_unused
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.parameters import ModuleParameters
from htp_export.format.recipes import step
from htp_export.model.module_facts import stored_tensor
from htp_export.model.neighbours import producer_of
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array
from htp_export.shapes.known import Shape
from htp_export.shapes.sizes import divide, is_unnamed
from htp_export.shapes.symbolic import Symbolic
from htp_export.weights.parameter_places import ParameterPlaces, Place
from htp_export.weights.products import changed_when_written
from htp_export.weights.storing import store

ParameterShape: TypeAlias = tuple[int, ...]


def change_parameters(
    tagged: TaggedModel,
    before: ParameterPlaces,
    changes: Mapping[ir.Value, tuple[ParameterShape, Mapping[str, ParameterShape]]],
) -> None:
    """Write the new shapes of parameters into the metadata; ``before`` says where they were.

    A change is the shape that an initializer had, and what replaces it: what is added to the name
    of a parameter → the shape.
    """
    new: dict[str, dict[str, ParameterShape]] = {}
    for value, (old, after) in changes.items():
        turned: dict[Place, bool] = {}
        for place in before.places.get(value, ()):
            shape = before.declared[place.parameter].shape
            is_turned = "transposed" in place.how or ("merged" in place.how and shape != old)
            if shape == (old[::-1] if is_turned else old):
                turned[place] = is_turned
        # perhaps in another tensor
        vague = [place for place in turned if "merged" in place.how and len(old) > 1]
        for place, is_turned in turned.items():
            if len(vague) < 2 or place not in vague or place.parameter == value.name:
                new[place.parameter] = {
                    end: each[::-1] if is_turned else each for end, each in after.items()
                }
    parameters = {}
    for path, held in (tagged.parameters or {}).items():
        shapes: dict[str, ParameterShape] = {}
        for key, shape in held.shapes.items():
            first = before.declared[tags.below(path, key)].first
            shapes |= {f"{key}{end}": each for end, each in new.get(first, {"": shape}).items()}
        parameters[path] = ModuleParameters(
            shapes, {key: full for key, full in held.tied.items() if key in shapes}
        )
    if parameters:
        write_model_metadata(tagged.model.metadata_props, tagged.hierarchy, parameters=parameters)


_SIZES = {"Reshape": 1, "Expand": 1, "Resize": 3, "ConstantOfShape": 0}
"""Operator → place of the input that holds the shape of the result."""

_COMPUTES_SIZES = frozenset(
    ("Concat", "Mul", "Unsqueeze", "Squeeze", "Cast", "Identity", "Reshape", "Where")
)
"""What sizes with a constant factor or part are computed by."""


def cut_axes(tagged: TaggedModel, kept: Mapping[Axis, Array]) -> None:
    """Leave only some indices of axes, in place: of all tensors that have the channels, see ``coupling``.

    After an InputError, for a node that would not get the sizes that it has to have, the model is
    not usable.
    """
    shapes = tagged.inferred
    graph = tagged.model.graph
    before = {value: shapes.shape(value) for value in tagged.values.values()}
    around = (
        node
        for value, _ in kept
        for node in (value.producer(), *(use.node for use in value.uses()))
    )
    for node in dict.fromkeys(around):
        if node is not None:
            _refit(graph, node, kept, shapes)
    by_value: dict[ir.Value, dict[int, Array]] = {}
    for (value, axis), stays in kept.items():
        by_value.setdefault(value, {})[axis] = stays
    for value, axes in by_value.items():
        _shorten(value, axes)
    remove_unused(tagged.model)  # what computed the indices of a Gather
    after = Symbolic(graph, functions=tagged.model.functions)
    if _keep_sizes(graph, kept, shapes, after):
        after = Symbolic(graph, functions=tagged.model.functions)
    _check(tagged, before, after, by_value)


def _shorten(value: ir.Value, axes: Mapping[int, Array]) -> None:
    """Take the other indices out of a weight, when it is written; say the new shape of any tensor."""
    places = {axis: np.flatnonzero(stays) for axis, stays in axes.items() if not stays.all()}
    if not places:
        return
    tensor = stored_tensor(value)
    if tensor is not None:
        shape = [
            len(places[axis]) if axis in places else size
            for axis, size in enumerate(tensor.shape.numpy())
        ]

        def taken(array: Array) -> Array:
            for axis, indices in places.items():
                array = np.take(array, indices, axis)
            return array

        recipe = recipe_of(value)
        for axis, indices in places.items():
            recipe = step("take", recipe, [axis, indices.tolist()])
        store(value, changed_when_written(tensor, taken, recipe, shape))
    if value.shape is not None:
        cut = [dim if axis not in places else len(places[axis]) if isinstance(dim, int) else None
               for axis, dim in enumerate(value.shape)]  # fmt: skip
        value.shape = ir.Shape(cut)


def _refit(graph: ir.Graph, node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic) -> None:
    """Change the sizes that a node has as constants."""
    if node.domain:
        return
    if node.op_type in _SIZES and len(node.inputs) > _SIZES[node.op_type]:
        _refit_sizes(graph, node, kept, shapes)
    elif node.op_type == "Split":
        _refit_split(graph, node, kept, shapes)
    elif node.op_type == "Slice":
        _refit_slice(graph, node, kept, shapes)
    elif node.op_type in ("Conv", "ConvTranspose") and node.attributes.get_int("group", 1) > 1:
        stays = kept.get((node.outputs[0], 1))
        if stays is not None and is_cut_by_groups(node, shapes):
            group = node.attributes.get_int("group", 1) * int(stays.sum()) // len(stays)
            node.attributes.add(ir.AttrInt64("group", group))
    elif node.op_type in RECURRENT and (stays := kept.get((node.inputs[2], 2))) is not None:  # type: ignore[arg-type]
        node.attributes.add(ir.AttrInt64("hidden_size", int(stays.sum())))
    elif node.op_type in ("Gather", "GatherND"):
        _refit_gather(graph, node, kept, shapes)


def _refit_sizes(
    graph: ir.Graph, node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic
) -> None:
    result, place = node.outputs[0], _SIZES[node.op_type]
    rank = shapes.rank(result) or 0
    given = shapes.shape(node.inputs[place])
    length = given[0] if given and isinstance(given[0], int) else rank
    for axis in range(rank):
        stays = kept.get((result, axis))
        if stays is not None and not stays.all():
            _set_size(
                graph, node, place, axis - (rank - length), len(stays), int(stays.sum()), shapes
            )


def _keep_sizes(
    graph: ir.Graph, kept: Mapping[Axis, Array], before: Symbolic, after: Symbolic
) -> bool:
    """Let sizes stay that are computed of an axis that was cut, for tensors that do not have its channels.

    So ``nn.MultiheadAttention`` splits its projections by the width of what it reads. Returns
    whether there are some.
    """
    found = False
    for node in graph:
        place = _SIZES.get(node.op_type, len(node.inputs))
        if node.domain or place >= len(node.inputs):
            continue
        rank, given = before.rank(node.outputs[0]) or 0, node.inputs[place]
        sizes, computed = before.contents(given), after.contents(given)
        if sizes is None or computed is None or sizes.shape != computed.shape:
            continue
        for index, (old, new) in enumerate(zip(sizes, computed, strict=True)):
            axis = index + rank - len(sizes)
            if isinstance(old, int) and old != new and (node.outputs[0], axis) not in kept:
                _set_size(graph, node, place, index, old, old, before)
                found = True
    return found


def _set_size(
    graph: ir.Graph, node: ir.Node, place: int, index: int, old: int, new: int, shapes: Symbolic
) -> None:
    """Replace a number in a vector of sizes, or a factor of it, where it is a constant.

    Computed ones follow the tensors. Where other nodes may need the old number, the nodes that
    compute it are copied.
    """
    value = node.inputs[place]
    if value is None or index < 0:
        return
    numbers = shapes.constant(value)
    if numbers is not None:
        if len(numbers) > index and numbers[index] == old:
            dtype = shapes.dtype(value) or ir.DataType.INT64
            array = np.array([*numbers[:index], new, *numbers[index + 1 :]], dtype.numpy())
            _give(
                graph,
                node,
                place,
                array.reshape(() if shapes.rank(value) == 0 else -1),
                f"{value.name}_cut",
            )
        return
    producer = producer_of(value, *_COMPUTES_SIZES)
    if producer is None:
        return
    producer = _for_one_reader(graph, producer, node, place)
    if producer.op_type == "Mul":
        for at, factor in enumerate(producer.inputs):
            numbers = (
                shapes.constant(factor)
                if factor is not None and stored_tensor(factor) is not None
                else None
            )
            if numbers is not None and len(numbers) == 1 and not numbers[0] % old:
                _set_size(graph, producer, at, 0, numbers[0], numbers[0] // old * new, shapes)
                return
    elif producer.op_type == "Where":  # TorchScript writes 1 for the sizes of an expand that are -1
        given = [(at, shapes.contents(producer.inputs[at])) for at in (1, 2)]
        holds = [
            at for at, sizes in given if sizes is not None and sizes.ndim and sizes[index] == old
        ]
        if len(holds) == 1:
            _set_size(graph, producer, holds[0], index, old, new, shapes)
    elif producer.op_type != "Concat":
        _set_size(graph, producer, 0, index, old, new, shapes)
    else:
        start = 0
        for at, part in enumerate(producer.inputs):
            shape = shapes.shape(part)
            if not shape or not isinstance(shape[0], int):
                return
            if start <= index < start + shape[0]:
                _set_size(graph, producer, at, index - start, old, new, shapes)
                return
            start += shape[0]


def _for_one_reader(graph: ir.Graph, producer: ir.Node, node: ir.Node, place: int) -> ir.Node:
    """What makes an input of a node; a copy of it, if others read the same."""
    value = producer.outputs[0]
    if len(value.uses()) == 1 and not value.is_graph_output():
        return producer
    attributes, metadata = producer.attributes, dict(producer.metadata_props)
    copy = ir.node(producer.op_type, producer.inputs, attributes, metadata_props=metadata)
    copy.name, copy.outputs[0].name = f"{producer.name}_{node.name}", f"{value.name}_{node.name}"
    copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
    graph.insert_before(node, copy)
    node.replace_input_with(place, copy.outputs[0])
    return copy


def _give(graph: ir.Graph, node: ir.Node, place: int, array: Array, name: str) -> None:
    """Let a node read another constant; one that nothing reads then goes with all that is unused."""
    node.replace_input_with(place, add_constant(graph, array, name))


def _refit_gather(
    graph: ir.Graph, node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic
) -> None:
    found = gathered(node, shapes)
    if found is None or (stays := kept.get((node.inputs[0], found[0]))) is None:  # type: ignore[arg-type]
        return
    at, indices = found
    for place in range(indices.ndim):
        left = kept.get((node.outputs[0], at + place))
        indices = indices if left is None else np.compress(left, indices, place)
    dtype = shapes.dtype(node.inputs[1]) or ir.DataType.INT64
    changed = (np.cumsum(stays) - 1)[indices].astype(dtype.numpy())
    _give(
        graph,
        node,
        1,
        changed if node.op_type == "Gather" else changed[..., None],
        f"{node.name}_indices_cut",
    )


def _refit_split(
    graph: ir.Graph, node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic
) -> None:
    [axis] = changed_axes(node, shapes) or [0]
    if (node.inputs[0], axis) not in kept:
        return
    sizes = []
    for value in node.outputs:
        stays = kept.get((value, axis))
        shape = shapes.shape(value)
        sizes.append(int(stays.sum()) if stays is not None else shape[axis] if shape else 0)
    node.attributes.pop("num_outputs", None)
    if "split" in node.attributes:
        node.attributes.add(ir.AttrInt64s("split", [int(size) for size in sizes]))  # type: ignore[arg-type]
        return
    if len(node.inputs) < 2:
        node.resize_inputs(2)
    _give(graph, node, 1, np.array(sizes, np.int64), f"{node.name}_split_cut")


def _refit_slice(
    graph: ir.Graph, node: ir.Node, kept: Mapping[Axis, Array], shapes: Symbolic
) -> None:
    changed = changed_axes(node, shapes) or []
    for place, axis in enumerate(changed):
        stays, shape = kept.get((node.inputs[0], axis)), shapes.shape(node.outputs[0])  # type: ignore[arg-type]
        if stays is None or shape is None or not isinstance(shape[axis], int):
            continue
        start = slice_start(node, axis, shapes, len(stays)) or 0
        bounds = (int(stays[:start].sum()), int(stays[: start + shape[axis]].sum()))
        for name, at, bound in (("starts", 1, bounds[0]), ("ends", 2, bounds[1])):
            numbers = node.attributes.get_ints(name)
            if numbers is not None:
                node.attributes.add(
                    ir.AttrInt64s(name, [*numbers[:place], bound, *numbers[place + 1 :]])
                )
                continue
            listed = list(shapes.constant(node.inputs[at]) or [])
            listed[place] = bound
            given = node.inputs[at]
            dtype = shapes.dtype(given) or ir.DataType.INT64
            _give(graph, node, at, np.array(listed, dtype.numpy()), f"{node.name}_{name}_cut")


def _check(
    tagged: TaggedModel,
    before: Mapping[ir.Value, Shape | None],
    after: Symbolic,
    cut: Mapping[ir.Value, Mapping[int, Array]],
) -> None:
    """Refuse a graph in which a tensor has another shape than it should have."""
    for value, shape in before.items():
        if shape is None or value.graph is None:
            continue
        wanted = list(shape)
        for axis, stays in cut.get(value, {}).items():
            # some indices, or some of each period
            wanted[axis] = divide(wanted[axis], len(stays)) * int(stays.sum())
        found = after.shape(value)
        fits = found is not None and len(found) == len(wanted) and (0 not in wanted or 0 in shape)
        known = [
            pair
            for pair in zip(found or (), wanted, strict=False)
            if not any(map(is_unnamed, pair))
        ]
        if not fits or any(one != other for one, other in known):
            what, node = f"tensor {value.name!r}", value.producer()
            if node is not None:
                what = f"{node.op_type} {node.name!r} of {', '.join(map(repr, tagged.owners_of(node)))}"
            sizes = ", ".join(map(str, wanted))
            raise InputError(f"channels cannot be cut: {what} does not get the shape [{sizes}]")
