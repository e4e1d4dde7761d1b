"""The recipes of a graph's tensors: read, recorded, and followed through constant computations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from htp_export.errors import InputError
from htp_export.files.lazy_tensor import viewed
from htp_export.format import tags
from htp_export.format.recipes import CONSTANT, Recipe, recipe_from_text, recipe_to_text, step
from htp_export.model.folded_recipes import folded, merged
from htp_export.model.hashes import array_hash
from htp_export.model.module_facts import stored_tensor
from htp_export.model.neighbours import dependencies_first
from htp_export.shapes.inference import Inference
from htp_export.shapes.operator_kinds import SIZES_ONLY, graphs_in, is_standard, subgraphs

_SMALL = 1 << 12
"""Elements of an operator's argument, at most; a larger constant is a weight, and is not read."""


def recipe_of(value: ir.Value) -> Recipe:
    """The recipe of a stored tensor: how it was computed from parameters.

    Without a recorded recipe, a float tensor is the parameter of its name; integers are constants.

    Raises:
        InputError: If the file has a recipe that is not in the format.
    """
    tensor = value.const_value
    if tensor is None or value.producer() is not None:
        return CONSTANT
    text = tensor.metadata_props.get(tags.RECIPE)
    if text is None:
        return default_recipe(str(value.name), tensor.dtype)
    try:
        return recipe_from_text(text)
    except ValueError as error:
        raise InputError(f"initializer {value.name!r}: {tags.RECIPE}: {error}") from error


def default_recipe(name: str, dtype: ir.DataType) -> Recipe:
    """The recipe of an initializer for which none is recorded.

    Examples:
        >>> default_recipe("fc.weight", ir.DataType.FLOAT), default_recipe("position_ids", ir.DataType.INT64)
        ('fc.weight', ['constant'])
    """
    return name if dtype.is_floating_point() else CONSTANT


def recorded(tensor: ir.TensorProtocol, recipe: Recipe) -> ir.TensorProtocol:
    """Return the tensor with a recipe; code that changes weights stores this one.

    It is a new object: copies of models share their tensors.
    """
    view: Any = viewed(tensor)
    # a new dict: the view shares that of the tensor
    view._metadata_props = {**tensor.metadata_props, tags.RECIPE: recipe_to_text(recipe)}
    return view  # type: ignore[no-any-return]


_MOST_ENDS = 256
"""Prefixes of a name that are tried, at most: tools add a few words, but a name has any length."""


def known_beginning(name: str, known: Container[str]) -> str | None:
    """The longest known name that a name begins with, before a suffix that a tool added.

    Examples:
        >>> known_beginning("fc.weight_quantized", {"fc.weight"}), known_beginning("fc.weight2", {"fc.weight"})
        ('fc.weight', None)
    """
    # A suffix begins with a character that is neither a letter nor a digit.
    ends = (place for place in range(len(name), 0, -1) if not name[place : place + 1].isalnum())
    for end in itertools.islice(ends, _MOST_ENDS):
        if name[:end] in known:
            return name[:end]
    return None


def lift_constants(model: ir.Model) -> bool:
    """Convert ``Constant`` nodes into initializers; return whether there were any."""
    known = {value for graph in graphs_in(model.graph) for value in graph.initializers.values()}
    lift = LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)
    modified = lift(model).modified
    for graph in graphs_in(model.graph) if modified else ():
        for value in graph.initializers.values():
            tensor = value.const_value
            if value not in known and tensor is not None and tensor.dtype.is_floating_point():
                value.const_value = recorded(tensor, CONSTANT)
    return modified


def depends_on_entries(value: ir.Value) -> bool:
    """Whether the elements of a value are computed from a stored tensor that is not constant."""
    producer = value.producer()
    if producer is None:
        return value.const_value is not None and recipe_of(value) != CONSTANT
    for node in dependencies_first(producer, _nodes_read, set()):
        read = () if is_standard(node, *SIZES_ONLY) else node.inputs
        for each in read:
            if each is not None and each.producer() is None and depends_on_entries(each):
                return True
    return False


def _nodes_read(node: ir.Node) -> Iterable[ir.Node]:
    """The producers of the inputs whose elements a node reads."""
    return () if is_standard(node, *SIZES_ONLY) else node.predecessors()


def of_values(why: str, *values: ir.Value | None) -> Recipe:
    """The recipe of a tensor that is computed from others without a step of its own.

    A constant if all others are constants. ``why``: The computation, for people.
    """
    recipes = [CONSTANT if value is None else recipe_of(value) for value in values]
    if all(recipe == CONSTANT for recipe in recipes):
        return CONSTANT
    return step("computed", *recipes, why)


def recipes_of_computed(graph: ir.Graph) -> dict[str, Recipe]:
    """The recipes of tensors that nodes compute from stored ones alone, by name: a tool may fold them."""
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
    """Record that a tool may have computed new tensors.

    Args:
        tool: Its name.
        model: The model that it returned.
        before: The stored tensors by name before it ran.
        computed: The recipes of tensors that nodes computed, by name (`recipes_of_computed`).
    """
    stored: StoredTensors | None = None
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tags.RECIPE in tensor.metadata_props:
            continue
        if name in before and before[name] is tensor:
            continue
        is_integer = not tensor.dtype.is_floating_point()
        if name in before and not is_integer:
            recipe = step("computed", name, tool)
        elif computed.get(name, CONSTANT if is_integer else None) == CONSTANT:
            recipe = CONSTANT
        else:
            stored = stored or StoredTensors(before)
            joined = stored.joined(tensor)
            recipe = joined or step("computed", computed.get(name, CONSTANT), tool)
        if recipe != default_recipe(name, tensor.dtype):
            value.const_value = recorded(tensor, recipe)


class StoredTensors:
    """Stored tensors by their numbers, so that one that was joined of some of them is recognised."""

    def __init__(self, tensors: Mapping[str, ir.TensorProtocol | None]) -> None:
        # hash of numbers → the shapes and recipes of tensors that have them
        self._by_hash: dict[bytes, list[tuple[tuple[int, ...], Recipe]]] = {}
        for name, tensor in tensors.items():
            if tensor is not None and tensor.dtype.is_floating_point() and tensor.size > 1:
                self._add(name, tensor)

    def _add(self, name: str, tensor: ir.TensorProtocol) -> None:
        array = np.asarray(tensor.numpy())
        if (array == array.reshape(-1)[0]).all():  # zeros and ones of one origin are those of any
            return
        text = tensor.metadata_props.get(tags.RECIPE)
        recipe = name if text is None else recipe_from_text(text)
        self._record(array, recipe)
        if array.ndim == 2:
            self._record(array.T, step("transpose", recipe, [1, 0]))

    def _record(self, array: Any, recipe: Recipe) -> None:
        self._by_hash.setdefault(array_hash(array), []).append((array.shape, recipe))

    def _recipe(self, array: Any) -> Recipe | None:
        """The recipe of a tensor with the numbers of an array, in any shape; all recipes of equal ones."""
        found: list[Recipe] = []
        for shape, recipe in self._by_hash.get(array_hash(array), ()):
            is_like = shape == array.shape
            found.append(recipe if is_like else step("reshape", recipe, list(array.shape)))
        return merged(found) if found else None

    def joined(self, tensor: ir.TensorProtocol) -> Recipe | None:
        """The recipe of a tensor that is one of these, or a concatenation of two or three of one size."""
        array = np.asarray(tensor.numpy())
        whole = self._recipe(array)
        if whole is not None:
            return whole
        for axis, size in enumerate(array.shape):
            for count in _JOINED:
                if size % count or not size:
                    continue
                parts = [self._recipe(part) for part in np.split(array, count, axis)]
                if all(part is not None for part in parts):
                    return step("concat", *parts, axis)
        return None


_JOINED = (3, 2)
"""Projections that attention operators read as one: queries, keys and values; or keys and values."""


FOLDED_BY_NUMPY = {"Exp": "exp"}
"""Operators that torch's dynamo exporter folds by the reference implementation of onnx: numpy rounds them.

IEEE 754 does not define their rounding, and other tools fold them otherwise.
"""


def follow(
    graph: ir.Graph,
    nodes: Iterable[ir.Node],
    known: dict[ir.Value, Recipe],
    arithmetic: Mapping[str, str] | None = None,
) -> None:
    """Find the recipes of values that do not depend on the model's inputs.

    Args:
        graph: The graph whose computed positions and sizes are inferred.
        nodes: The nodes, producers before consumers; nodes with an input that is neither known nor
            stored are skipped.
        known: Value → its recipe; extended.
        arithmetic: Further operators → steps, if the rounding of the code that folds them is known.

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
            if value is None or value in known:
                continue
            if value.is_initializer() and value.const_value is not None:
                known[value] = recipe_of(value)
        if is_standard(node, *SIZES_ONLY):
            known.update(dict.fromkeys(node.outputs, CONSTANT))
            continue
        # of its second input, a CastLike reads the type alone
        if is_standard(node, "CastLike") and node.inputs[0] in known:
            known.update(_cast_like(node, known, positions))
        is_known = all(value is None or value in known for value in node.inputs)
        if is_known and node.outputs[0] not in known and not subgraphs(node):
            known.update(_of_node(node, known, positions, arithmetic or {}))


class _Positions:
    """The elements of small constants of a graph; computed ones are inferred on demand."""

    def __init__(self, graph: ir.Graph) -> None:
        self._inferred = Inference(graph.opset_imports)
        self._visited = set[ir.Node]()

    def _visit(self, value: ir.Value | None) -> None:
        """Infer only the nodes that a value depends on: most of a graph computes no positions."""
        producer = None if value is None else value.producer()
        if producer is None:
            return
        for node in dependencies_first(producer, ir.Node.predecessors, self._visited):
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
        """The dimensions of a value; None if one of them is not a number."""
        if value.shape is None:
            self._visit(value)
        shape = self._inferred.shape(value) if value.shape is None else value.shape
        if shape is None:
            return None
        sizes = [size for size in shape if isinstance(size, int)]
        return sizes if len(sizes) == len(shape) else None


def _of_node(
    node: ir.Node,
    known: Mapping[ir.Value, Recipe],
    positions: _Positions,
    arithmetic: Mapping[str, str],
) -> dict[ir.Value, Recipe]:
    """The recipes of a node's outputs, from those of its inputs."""
    operands = [CONSTANT if value is None else known[value] for value in node.inputs]
    if all(operand == CONSTANT for operand in operands):
        return dict.fromkeys(node.outputs, CONSTANT)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    name = node.op_type if is_standard(node) else f"{node.domain}.{node.op_type}"

    if name in arithmetic:
        return {node.outputs[0]: step(arithmetic[name], *operands)}

    def constant(place: int) -> Any:
        return positions(node.inputs[place]) if place < len(node.inputs) else None

    recipes: dict[ir.Value, Recipe] = {}
    for place, output in enumerate(node.outputs):
        sizes = functools.partial(positions.sizes, output)
        recipes[output] = folded(name, attributes, operands, constant, sizes, place)
    return recipes


def _cast_like(
    node: ir.Node, known: Mapping[ir.Value, Recipe], positions: _Positions
) -> dict[ir.Value, Recipe]:
    """The recipe of a ``CastLike`` whose second input is not constant; none if a type is unknown."""
    recipe = known[node.inputs[0]]  # type: ignore[index]
    if recipe != CONSTANT:
        before, after = map(positions.dtype, node.inputs)
        if before is None or after is None:
            return {}
        if before != after:
            recipe = step("cast", recipe, after.name.lower())
    return {node.outputs[0]: recipe}
