"""The recipes of the tensors of a graph: read, written, and followed through the operators that compute constants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from htp_export.errors import InputError
from htp_export.files.lazy_tensor import viewed
from htp_export.format import tags
from htp_export.format.recipes import CONSTANT, Recipe, recipe_from_text, recipe_to_text, step
from htp_export.model.hashes import array_hash
from htp_export.model.module_facts import stored_tensor
from htp_export.shapes.inference import Inference
from htp_export.shapes.operator_kinds import RESHAPING, SIZES_ONLY, is_standard, subgraphs

_ARITHMETIC = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Neg": "neg", "Sqrt": "sqrt"}
"""IEEE 754 rounds these in one way, so that every runtime gives the same bits."""

_SMALL = 1 << 12
"""Elements; a constant with more of them is no position, size or factor of an operator."""


def recipe_of(value: ir.Value) -> Recipe:
    """How a stored tensor was made.

    One without a recipe is the parameter of its name, if there is one; integers are constants.

    Raises:
        InputError: If the file says it in another way than the format does.
    """
    tensor = value.const_value
    if tensor is None or value.producer() is not None:
        return CONSTANT
    text = tensor.metadata_props.get(tags.RECIPE)
    if text is None:
        return str(value.name) if tensor.dtype.is_floating_point() else CONSTANT
    try:
        return recipe_from_text(text)
    except ValueError as error:
        raise InputError(f"initializer {value.name!r}: {tags.RECIPE}: {error}") from error


def recorded(tensor: ir.TensorProtocol, recipe: Recipe) -> ir.TensorProtocol:
    """The tensor with a recipe; whatever changes weights puts this in their place.

    It is another object: copies of models share their tensors.
    """
    view: Any = viewed(tensor)
    # copies would share them
    view._metadata_props = {**tensor.metadata_props, tags.RECIPE: recipe_to_text(recipe)}
    return view  # type: ignore[no-any-return]


# of a name that are tried: tools add a few words, and a file may have a name of any length
_MOST_ENDS = 256


def known_beginning(name: str, known: Container[str]) -> str | None:
    """The longest of some names that a name is, or begins with, before what a tool added to it.

    Examples:
        >>> known_beginning("fc.weight_quantized", {"fc.weight"}), known_beginning("fc.weight2", {"fc.weight"})
        ('fc.weight', None)
    """
    ends = (place for place in range(len(name), 0, -1) if not name[place : place + 1].isalnum())
    return next(
        (name[:end] for end in itertools.islice(ends, _MOST_ENDS) if name[:end] in known), None
    )


def lift_constants(model: ir.Model) -> bool:
    """Make initializers of ``Constant`` nodes; whether there were any."""
    known = {value for graph in model.graphs() for value in graph.initializers.values()}
    modified = LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(
        model
    ).modified
    for graph in model.graphs() if modified else ():
        for value in graph.initializers.values():
            if (
                value not in known
                and value.const_value is not None
                and value.const_value.dtype.is_floating_point()
            ):
                value.const_value = recorded(value.const_value, CONSTANT)
    return modified


def of_values(why: str, *values: ir.Value | None) -> Recipe:
    """How a tensor is made of others in a way that no step says: constant, if these are."""
    recipes = [CONSTANT if value is None else recipe_of(value) for value in values]
    return (
        CONSTANT
        if all(recipe == CONSTANT for recipe in recipes)
        else step("computed", *recipes, why)
    )


def recipes_of_computed(graph: ir.Graph) -> dict[str, Recipe]:
    """Name → recipe, for the tensors that nodes compute from stored ones alone: a tool may store them."""
    known: dict[ir.Value, Recipe] = {}
    follow(graph, graph, known)
    return {
        str(value.name): recipe
        for value, recipe in known.items()
        if value.producer() is not None and value.name
    }


def replaced_by(
    tool: str,
    model: ir.Model,
    before: Mapping[str, ir.TensorProtocol | None],
    computed: Mapping[str, Recipe],
) -> None:
    """Record which stored tensors a tool may have made anew.

    Args:
        tool: Its name.
        model: The model that it returned.
        before: Name → the tensor that was stored under it.
        computed: Name → the recipe of a tensor that nodes computed (`recipes_of_computed`).
    """
    stored: StoredTensors | None = None
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if (
            tensor is None
            or not tensor.dtype.is_floating_point()
            or tags.RECIPE in tensor.metadata_props
        ):
            continue
        if name in before and before[name] is tensor:
            continue
        if name in before:
            recipe: Recipe = step("computed", name, tool)
        elif computed.get(name) == CONSTANT:
            recipe = CONSTANT
        else:
            stored = stored or StoredTensors(before)
            joined = stored.joined(tensor)
            recipe = joined or step("computed", computed.get(name, CONSTANT), tool)
        value.const_value = recorded(tensor, recipe)


class StoredTensors:
    """Stored tensors by their numbers, so that one that was joined of some of them is recognised."""

    def __init__(self, tensors: Mapping[str, ir.TensorProtocol | None]) -> None:
        self._by_hash: dict[bytes, Recipe] = {}
        for name, tensor in tensors.items():
            if tensor is not None and tensor.dtype.is_floating_point() and tensor.size > 1:
                self._add(name, tensor)

    def _add(self, name: str, tensor: ir.TensorProtocol) -> None:
        array = np.asarray(tensor.numpy())
        if (array == array.reshape(-1)[0]).all():  # zeros and ones of one origin are those of any
            return
        text = tensor.metadata_props.get(tags.RECIPE)
        recipe = name if text is None else recipe_from_text(text)
        self._by_hash.setdefault(_hash(array), recipe)
        if array.ndim == 2:
            self._by_hash.setdefault(_hash(array.T), step("transpose", recipe, [1, 0]))

    def joined(self, tensor: ir.TensorProtocol) -> Recipe | None:
        """The recipe of a tensor that is one of these, or a concatenation of two or three of one size."""
        array = np.asarray(tensor.numpy())
        whole = self._by_hash.get(_hash(array))
        if whole is not None:
            return whole
        for axis, size in enumerate(array.shape):
            for count in _JOINED:
                if size % count or not size:
                    continue
                parts = [self._by_hash.get(_hash(part)) for part in np.split(array, count, axis)]
                if all(part is not None for part in parts):
                    return step("concat", *parts, axis)
        return None


_JOINED = (3, 2)
"""Projections that attention operators read as one: queries, keys and values; or keys and values."""


def _hash(array: Any) -> bytes:
    return array_hash(np.ascontiguousarray(array)) + str(array.shape).encode()


def merged(recipes: Iterable[Recipe]) -> Recipe:
    """How a tensor was made that stands for several, because these were equal."""
    different: list[Recipe] = []
    for recipe in recipes:
        if recipe not in different:
            different.append(recipe)
    return different[0] if len(different) == 1 else step("equal", *different)


def follow(graph: ir.Graph, nodes: Iterable[ir.Node], known: dict[ir.Value, Recipe]) -> None:
    """Note how values are made that depend on no input of the model.

    Args:
        graph: The graph in which positions and sizes are looked up that are computed.
        nodes: Producers before consumers; those that read what is neither known nor stored are left
            out.
        known: Value → how it is made; what is found is added.

    Examples:
        >>> weight = ir.Value(name="w", const_value=ir.tensor([[1.0, 2.0]], name="w"))
        >>> turned = ir.node("Transpose", [weight])
        >>> cast, known = ir.node("Cast", turned.outputs, {"to": 10}), {weight: "w"}
        >>> follow(ir.Graph([], [], nodes=[turned, cast]), [turned, cast], known)
        >>> known[cast.outputs[0]]
        ['cast', ['transpose', 'w', []], 'float16']
    """
    positions = _Positions(graph)
    for node in nodes:
        for value in node.inputs:
            if (
                value is not None
                and value not in known
                and value.is_initializer()
                and value.const_value is not None
            ):
                known[value] = recipe_of(value)
        if is_standard(node, *SIZES_ONLY):
            known.update(dict.fromkeys(node.outputs, CONSTANT))
        elif all(value is None or value in known for value in node.inputs) and not subgraphs(node):
            known.update(_of_node(node, known, positions))
        elif is_standard(node, "CastLike") and node.inputs[0] in known:
            known.update(_cast_like(node, known, positions))


class _Positions:
    """The elements of small constants of a graph, also of computed ones; these are found when they are asked for."""

    def __init__(self, graph: ir.Graph) -> None:
        self._inferred = Inference(graph.opset_imports)
        self._reached, self._visited = set[ir.Node](), set[ir.Node]()

    def _visit(self, value: ir.Value | None) -> None:
        """Infer what a value depends on, and nothing else: most of a graph is no position."""
        producer = None if value is None else value.producer()
        waiting = [] if producer is None else [producer]
        while waiting:
            if waiting[-1] not in self._reached:
                self._reached.add(waiting[-1])
                waiting += [
                    node for node in waiting[-1].predecessors() if node not in self._reached
                ]
            elif (node := waiting.pop()) not in self._visited:
                self._visited.add(node)
                self._inferred.visit(node)

    def __call__(self, value: ir.Value | None) -> Any:
        tensor = None if value is None else stored_tensor(value)
        if tensor is None:
            self._visit(value)
            return self._inferred.array(value)
        return None if tensor.size > _SMALL else tensor.numpy()

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        self._visit(value)
        return self._inferred.dtype(value)

    def sizes(self, value: ir.Value) -> list[int] | None:
        if value.shape is None:
            self._visit(value)
        shape = self._inferred.shape(value) if value.shape is None else value.shape
        sizes = None if shape is None else [size for size in shape if isinstance(size, int)]
        return (
            sizes if shape is not None and sizes is not None and len(sizes) == len(shape) else None
        )


def _of_node(
    node: ir.Node, known: Mapping[ir.Value, Recipe], positions: _Positions
) -> dict[ir.Value, Recipe]:
    operands = [CONSTANT if each is None else known[each] for each in node.inputs]
    if all(each == CONSTANT for each in operands):
        return dict.fromkeys(node.outputs, CONSTANT)
    attributes = {name: each.value for name, each in node.attributes.items()}
    name = node.op_type if is_standard(node) else f"{node.domain}.{node.op_type}"
    return {
        output: folded(
            name,
            attributes,
            operands,
            lambda place: positions(node.inputs[place]) if place < len(node.inputs) else None,
            lambda output=output: positions.sizes(output),  # type: ignore[misc]
            place,
        )
        for place, output in enumerate(node.outputs)
    }


def _cast_like(
    node: ir.Node, known: Mapping[ir.Value, Recipe], positions: _Positions
) -> dict[ir.Value, Recipe]:
    """How a value is made that gets the type of another one, which depends on inputs; nothing if that is not known."""
    recipe = known[node.inputs[0]]  # type: ignore[index]
    if recipe != CONSTANT:
        before, after = map(positions.dtype, node.inputs)
        if before is None or after is None:
            return {}
        recipe = recipe if before == after else step("cast", recipe, after.name.lower())
    return {node.outputs[0]: recipe}


def folded(
    op_type: str,
    attributes: Mapping[str, Any],
    operands: Sequence[Recipe],
    constant: Callable[[int], Any],
    sizes: Callable[[], Sequence[int] | None],
    output: int = 0,
) -> Recipe:
    """How a result of an operator on constants is made, of which ``operands`` says how they are made.

    ``constant`` gives the elements of a small input by its place, and ``sizes`` the shape of the
    result, or None.
    """
    if op_type == "Identity":
        return operands[0]
    if op_type == "Transpose":
        return step("transpose", operands[0], [int(axis) for axis in attributes.get("perm") or ()])
    if op_type == "Cast":
        return step("cast", operands[0], ir.DataType(int(attributes["to"])).name.lower())
    if op_type == "Concat":
        return step("concat", *operands, int(attributes["axis"]))
    if op_type in ("Squeeze", "Unsqueeze") and (axes := constant(1)) is not None:
        return step(op_type.lower(), operands[0], [int(axis) for axis in axes.reshape(-1)])
    if (op_type in RESHAPING or op_type == "Expand") and (shape := sizes()) is not None:
        return step(
            "expand" if op_type == "Expand" else "reshape",
            operands[0],
            [int(size) for size in shape],
        )
    if op_type == "Gather" and (rows := constant(1)) is not None:
        return _gathered(operands[0], int(attributes.get("axis", 0)), rows, sizes())
    if op_type == "Slice" and (cuts := _cuts(attributes, constant)) is not None:
        made = operands[0]
        for cut in cuts:
            made = step("slice", made, cut)
        return made
    if op_type == "Split" and (splits := constant(1)) is not None:
        start = int(splits[:output].sum())
        return step(
            "slice",
            operands[0],
            [int(attributes.get("axis", 0)), start, start + int(splits[output]), 1],
        )
    if op_type in _ARITHMETIC:
        pairs = (
            (each, constant(place) if each == CONSTANT else None)
            for place, each in enumerate(operands)
        )
        return step(
            _ARITHMETIC[op_type],
            *(each if array is None else _number(array) for each, array in pairs),
        )
    return (
        step("computed", *operands, op_type)
        if any(each != CONSTANT for each in operands)
        else CONSTANT
    )


def _gathered(operand: Recipe, axis: int, rows: Any, shape: Sequence[int] | None) -> Recipe:
    """Rows that lie side by side, one row many times, or any rows; ``shape`` is that of the result, if known."""
    first, count = int(rows.reshape(-1)[0]) if rows.size else -1, rows.size
    if shape is None:
        return step("take", operand, [axis, rows.tolist()])
    if first >= 0 and (rows.reshape(-1) == np.arange(first, first + count)).all():
        return step("reshape", step("slice", operand, [axis, first, first + count, 1]), list(shape))
    if first >= 0 and axis == 0 and (rows == first).all():
        return step("expand", step("slice", operand, [0, first, first + 1, 1]), list(shape))
    return step("take", operand, [axis, rows.tolist()])


def _number(array: Any) -> Recipe:
    return (
        float(array)
        if array.ndim == 0 and array.dtype.kind == "f" and np.isfinite(array)
        else CONSTANT
    )


def _cuts(attributes: Mapping[str, Any], constant: Callable[[int], Any]) -> list[list[int]] | None:
    """The slices of one axis each that a ``Slice`` makes; None where they are not known."""
    given = [constant(place) for place in (1, 2, 3, 4)]
    starts, ends, axes, steps = given if given[0] is not None else (
        attributes.get("starts"), attributes.get("ends"), attributes.get("axes"), None,
    )  # fmt: skip
    if starts is None or ends is None:
        return None
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    cuts = [[int(number) for number in cut] for cut in zip(axes, starts, ends, steps, strict=True)]
    return cuts if all(cut[3] > 0 for cut in cuts) else None


def batchnorm_folded(
    weight: Recipe,
    bias: Recipe | None,
    norm: Sequence[Recipe],
    epsilon: float,
    column: Sequence[int],
    root: str = "sqrt",
) -> tuple[Recipe, Recipe]:
    """The weight and the bias of a layer that a batch normalisation after it was folded into.

    ``norm``: its scale, bias, mean and variance; ``column``: the shape of the factors for the
    weight; ``root``: the step that takes the root, which PyTorch rounds in another way than IEEE
    754 says.
    """
    gamma, beta, mean, variance = norm
    scale = step("div", gamma, step(root, step("add", variance, float(np.float32(epsilon)))))
    before = step("neg", mean) if bias is None else step("sub", bias, mean)
    return (
        step("mul", weight, step("reshape", scale, list(column))),
        step("add", step("mul", before, scale), beta),
    )
