"""Patterns that no pass changes in every form; and large equal weights."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.hashes import array_hash
from htp_export.model.neighbours import connected, producer_of
from htp_export.shapes.known import constant_tensor
from htp_export.shapes.operator_kinds import SIZES_ONLY, is_standard

if TYPE_CHECKING:
    from htp_export.capabilities.optimize.registry import Declined


_COMPARED = 1024
"""Elements; `eliminate_duplicate_constants` compares tensors up to this size, so these are no
findings here."""

_HASHED = 1 << 20
"""Bytes. Hashing these takes about a millisecond; of larger tensors, a sample is compared first."""

_SAMPLE = 1024
"""Elements of the sample. Weights that differ nearly always differ in the first elements."""

_Found: TypeAlias = tuple[str, tuple[ir.Node, ...], str, str]
"""The fields of a `Declined`."""


def unchanged(facts: GraphFacts) -> Iterator[Declined]:
    """Operators in single steps, consecutive casts, and computed sizes; after the exact passes."""
    from htp_export.capabilities.optimize.registry import Declined

    found = (_single_steps(facts), _casts(facts), _sizes(facts), _attentions(facts))
    return itertools.starmap(Declined, itertools.chain(*found))


def _attentions(facts: GraphFacts) -> Iterator[_Found]:
    for steps in attention_steps(facts):
        einsum = "Einsum" in (steps.scores.op_type, steps.context.op_type)
        yield "attention", steps.nodes, "written with Einsum" if einsum else "", ""


def _single_steps(facts: GraphFacts) -> Iterator[_Found]:
    """Operators that are written in single steps, with the weights of a normalization."""
    from htp_export.capabilities.optimize.single_steps import VISITED, steps_at

    for node in facts.nodes_of(*VISITED):
        steps = steps_at(node, facts.tagged.inferred)
        if steps is not None:
            yield steps.kind, steps.nodes, steps.why, f"{len(steps.nodes)} steps"


def _casts(facts: GraphFacts) -> Iterator[_Found]:
    for node in facts.nodes_of("Cast"):
        first = producer_of(node.inputs[0], "Cast")
        if first is None:
            continue
        source, between = facts.dtype(first.inputs[0]), facts.dtype(first.outputs[0])
        keeps_values = source is not None and between is not None and _holds(between, source)
        why = "" if keeps_values else "the type in between holds less, so that both count"
        dtypes = (source, between, facts.dtype(node.outputs[0]))
        detail = " to ".join("?" if dtype is None else dtype.name for dtype in dtypes)
        yield "cast_chain", (first, node), why, detail


def _holds(wide: ir.DataType, narrow: ir.DataType) -> bool:
    """Whether every value of the type ``narrow`` is also one of the type ``wide``."""
    try:
        return narrow == ir.DataType.BOOL or bool(np.can_cast(narrow.numpy(), wide.numpy(), "safe"))
    except TypeError:
        return False


def _sizes(facts: GraphFacts) -> Iterator[_Found]:
    """Nodes that compute sizes from ``Shape``; connected nodes of one module are one finding."""
    owners = facts.tagged.index.owners
    chain: dict[ir.Node, None] = {}
    sizes: set[ir.Value] = set()
    for node in facts.nodes:
        if is_standard(node, *SIZES_ONLY) or _computes_sizes(facts, node, sizes):
            chain[node] = None
            sizes.update(node.outputs)
    for nodes in connected(chain, lambda one, other: owners[one] == owners[other]):
        yield "shape_chain", nodes, "the sizes depend on the model's inputs, and are needed", ""


def _computes_sizes(facts: GraphFacts, node: ir.Node, sizes: set[ir.Value]) -> bool:
    """Whether a node computes a scalar or a vector from sizes and constants."""
    if not is_standard(node) or sizes.isdisjoint(node.inputs):
        return False
    others = (value for value in node.inputs if value is not None and value not in sizes)
    return all(map(facts.is_constant, others)) and (facts.rank(node.outputs[0]) or 0) <= 1


def large_duplicates(
    facts: GraphFacts,
) -> Iterator[tuple[tuple[str, ...], tuple[ir.Node, ...], str, str]]:
    """Equal tensors that no pass merges: names, consumers, the reason, and their size."""
    # compare dtype and shape, then a sample, then all: most files are read hardly at all
    same_form = _alike(
        _large_constants(facts), lambda tensor: (tensor.dtype, tuple(tensor.shape.numpy()))
    )
    same_start = itertools.chain.from_iterable(_alike(group, _start) for group in same_form)
    same_contents = itertools.chain.from_iterable(_alike(group, _whole) for group in same_start)
    for equal in same_contents:
        size = equal[0][1].nbytes * (len(equal) - 1)
        readers = tuple(dict.fromkeys(use.node for value, _ in equal for use in value.uses()))
        why = f"more than {_COMPARED:,} elements: passes do not read weights to compare them"
        names = tuple(value.name or "" for value, _ in equal)
        yield names, readers, why, f"{len(equal)} equal, {size:,} bytes too many"


def _large_constants(facts: GraphFacts) -> Iterator[_Held]:
    """The initializers and constants of the main graph that passes do not compare."""
    graph = facts.tagged.model.graph
    constants = [node.outputs[0] for node in facts.nodes_of("Constant") if node.graph is graph]
    for value in (*graph.initializers.values(), *constants):
        if value.is_graph_input():
            continue
        tensor = constant_tensor(value) if value.const_value is None else value.const_value
        if tensor is None or tensor.dtype == ir.DataType.STRING:
            continue
        if tensor.size > _COMPARED:
            yield value, tensor


_Held: TypeAlias = tuple[ir.Value, ir.TensorProtocol]


def _alike(
    held: Iterable[_Held], key: Callable[[ir.TensorProtocol], Hashable | None]
) -> list[list[_Held]]:
    """The groups of at least two tensors with an equal key.

    Tensors that cannot be read are in none.
    """
    groups: defaultdict[Hashable, list[_Held]] = defaultdict(list)
    for value, tensor in held:
        try:
            groups[key(tensor)].append((value, tensor))
        except (OSError, FileError):  # the file of its external data is not there
            continue
    return [group for group in groups.values() if len(group) > 1]


def _start(tensor: ir.TensorProtocol) -> Hashable:
    """The first elements of a large tensor.

    Nothing of a small one, which is hashed whole at once.
    """
    if tensor.nbytes <= _HASHED:
        return ()
    return np.asarray(tensor.numpy()).reshape(-1)[:_SAMPLE].tobytes()


def _whole(tensor: ir.TensorProtocol) -> Hashable:
    return array_hash(np.asarray(tensor.numpy()))


_STEPS = 12
"""The longest path of nodes from a product to the softmax, and from the softmax to the next
product. Longer paths are no attention, and the bound keeps the search linear in the size of the
graph."""

_PRODUCTS = ("MatMul", "Einsum")
_FIRST_INPUT = ("Cast", "Reshape", "Clip", "Tanh", "Identity", "Slice", "Div")
_BEFORE = (*_FIRST_INPUT, "Add", "Sub", "Mul", "Where", "Max", "Concat")
_AFTER = ("Cast", "Where", "Dropout", "Reshape", "Mul", "Identity", "IsNaN", "Slice", "Transpose")


@dataclass(frozen=True)
class MaskUse:
    """A mask, and its effect: ``"added"`` to the scores.

    ``"kept"`` or ``"dropped"`` where it is true.
    """

    value: ir.Value
    role: str


@dataclass(frozen=True)
class AttentionSteps:
    """Attention as single nodes: the product of queries and keys, and that with the values.

    ``nodes`` contains all nodes in order.
    """

    scores: ir.Node
    masks: tuple[MaskUse, ...]
    softmax: ir.Node
    context: ir.Node
    nodes: tuple[ir.Node, ...]


def attention_steps(facts: GraphFacts) -> Iterator[AttentionSteps]:
    """Every attention that is written in single steps."""

    @functools.cache
    def path_from_product(value: ir.Value | None, steps: int) -> tuple[ir.Node, ...]:
        """The nodes from a product of computed matrices to a value; empty if there is none."""
        node = None if value is None or not steps else value.producer()
        if node is None or node.op_type not in (*_PRODUCTS, *_BEFORE):
            return ()
        varying = [arg for arg in node.inputs if arg is not None and not facts.is_constant(arg)]
        if node.op_type in _PRODUCTS:
            return (node,) if len(varying) == len(node.inputs) else ()
        for arg in varying:
            if node.op_type in _FIRST_INPUT and arg is not node.inputs[0]:
                continue
            before = path_from_product(arg, steps - 1)
            if before:
                return (*before, node)
        return ()

    for softmax in facts.nodes_of("Softmax"):
        after = _path_to_product(softmax)
        before = path_from_product(softmax.inputs[0], _STEPS) if after else ()
        if not before:
            continue
        masks: list[MaskUse] = []
        for previous, node in itertools.pairwise(before):
            masks += _masks(facts, node, previous)
        nodes = (*before, softmax, *after)
        yield AttentionSteps(before[0], tuple(masks), softmax, after[-1], nodes)


def _masks(facts: GraphFacts, node: ir.Node, before: ir.Node) -> list[MaskUse]:
    """The masks that a node applies to the scores, which the node ``before`` produces."""
    scores = before.outputs[0]
    if node.op_type == "Where" and node.inputs[0] is not None:
        return [MaskUse(node.inputs[0], "kept" if node.inputs[1] is scores else "dropped")]
    if node.op_type != "Add":
        return []
    others = [value for value in node.inputs if value is not None and value is not scores]
    return [MaskUse(value, "added") for value in others if facts.scalar(value) is None]


def _path_to_product(softmax: ir.Node) -> tuple[ir.Node, ...]:
    """The nodes from a softmax to the product that consumes it; empty if no product does."""
    value, after = softmax.outputs[0], list[ir.Node]()
    for _ in range(_STEPS):
        readers = [use.node for use in value.uses()]
        product = next((node for node in readers if node.op_type in _PRODUCTS), None)
        if product is not None:
            return (*after, product)
        steps = [node for node in readers if node.op_type in _AFTER]
        # IsNaN guards rows that are masked completely
        after += [node for node in steps if node.op_type == "IsNaN"][:1]
        onward = next((node for node in steps if node.op_type != "IsNaN"), None)
        if onward is None:
            return ()
        after.append(onward)
        value = onward.outputs[0]
    return ()
