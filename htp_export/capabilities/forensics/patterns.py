"""Patterns that no pass changes in every form, as onnxscript patterns; and large equal weights."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.hashes import array_hash
from htp_export.model.neighbours import connected, only_consumer, producer_of
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
_Op: TypeAlias = Any
_Value: TypeAlias = Any  # the parts of onnxscript's patterns have no type hints
_Pattern: TypeAlias = Callable[[_Op, _Value], _Value]


def unchanged(facts: GraphFacts) -> Iterator[Declined]:
    """Operators in single steps, consecutive casts, and computed sizes; after the exact passes."""
    from htp_export.capabilities.optimize.registry import Declined

    found = (_single_steps(facts), _casts(facts), _sizes(facts), _attentions(facts))
    return itertools.starmap(Declined, itertools.chain(*found))


def _attentions(facts: GraphFacts) -> Iterator[_Found]:
    for steps in attention_steps(facts):
        einsum = "Einsum" in (steps.scores.op_type, steps.context.op_type)
        yield "attention", steps.nodes, "written with Einsum" if einsum else "", ""


def _either(operator: Callable[[_Value, _Value], _Value], one: _Value, other: _Value) -> _Value:
    """An operator of two values in either order."""
    from onnxscript.rewriter.pattern import OrValue

    return OrValue([operator(one, other), operator(other, one)])


def _centred(op: _Op, x: _Value) -> _Value:
    return op.Sub(x, op.ReduceMean(x, _allow_other_inputs=True))


def _mean_square(op: _Op, x: _Value) -> _Value:
    from onnxscript.rewriter.pattern import OrValue, Var

    mean = op.ReduceMean(OrValue([op.Pow(x, 2), op.Mul(x, x)]), _allow_other_inputs=True)
    return OrValue([_either(op.Add, mean, Var("epsilon")), mean])


def _inverse(op: _Op, x: _Value) -> _Value:
    """``1 / sqrt(mean(x²) + epsilon)``."""
    from onnxscript.rewriter.pattern import OrValue

    square = _mean_square(op, x)
    root = op.Sqrt(square)
    return OrValue([op.Reciprocal(root), op.Div(1, root), op.Pow(square, -0.5)])


def _norms(centre: Callable[[_Op, _Value], _Value]) -> Iterator[_Pattern]:
    """``x / sqrt(mean(x²) + epsilon)``, in each form.

    It is LayerNorm if ``centre`` subtracts the mean from ``x``.
    """
    yield lambda op, x: op.Div(centred := centre(op, x), op.Sqrt(_mean_square(op, centred)))
    yield lambda op, x: op.Mul(centred := centre(op, x), _inverse(op, centred))
    yield lambda op, x: op.Mul(_inverse(op, centred := centre(op, x)), centred)


def _gelus(inner: Callable[[_Op, _Value], _Value]) -> Iterator[_Pattern]:
    """``0.5 x (1 + inner(x))``, its factors in any order."""
    from onnxscript.rewriter.pattern import OrValue

    def half(op: _Op, value: _Value) -> _Value:
        return OrValue([_either(op.Mul, value, 0.5), op.Div(value, 2)])

    def factors(op: _Op, x: _Value) -> Sequence[tuple[_Value, _Value]]:
        sum_ = _either(op.Add, inner(op, x), 1)
        return (half(op, x), sum_), (x, half(op, sum_)), (_either(op.Mul, x, sum_), 0.5)

    for form, order in itertools.product(range(3), (1, -1)):
        yield functools.partial(
            lambda form, order, op, x: op.Mul(*factors(op, x)[form][::order]), form, order
        )
    yield lambda op, x: op.Div(factors(op, x)[2][0], 2)


def _erf(op: _Op, x: _Value) -> _Value:
    from onnxscript.rewriter.pattern import OrValue

    return op.Erf(OrValue([op.Div(x, math.sqrt(2)), _either(op.Mul, x, math.sqrt(0.5))]))


def _tanh(op: _Op, x: _Value) -> _Value:
    from onnxscript.rewriter.pattern import OrValue

    square = OrValue([op.Mul(x, x), op.Pow(x, 2)])
    cube = _either(op.Mul, OrValue([op.Pow(x, 3), _either(op.Mul, x, square)]), 0.044715)
    return op.Tanh(_either(op.Mul, _either(op.Add, x, cube), math.sqrt(2 / math.pi)))


def _softmaxes() -> Iterator[_Pattern]:
    """``exp(x) / sum(exp(x))``, with or without the largest element subtracted first."""
    yield lambda op, x: op.Div(
        e := op.Exp(_less_largest(op, x)), op.ReduceSum(e, _allow_other_inputs=True)
    )
    yield lambda op, x: op.Div(e := op.Exp(x), op.ReduceSum(e, _allow_other_inputs=True))


def _less_largest(op: _Op, x: _Value) -> _Value:
    return op.Sub(x, op.ReduceMax(x, _allow_other_inputs=True))


_PATTERNS: Mapping[str, Callable[[], Iterator[_Pattern]]] = {
    "layer_norm": lambda: _norms(_centred),
    "rms_norm": lambda: _norms(lambda _, x: x),
    "gelu_erf": lambda: _gelus(_erf),
    "gelu_tanh": lambda: _gelus(_tanh),
    "softmax": _softmaxes,
}
"""Kind → its forms; the first kind that matches a node counts."""


def _single_steps(facts: GraphFacts) -> Iterator[_Found]:
    """Operators that are written in single steps, with the weights of a normalization."""
    from onnxscript.rewriter.pattern import Pattern

    patterns = [(kind, Pattern(form)) for kind, forms in _PATTERNS.items() for form in forms()]
    model = facts.tagged.model
    for node in facts.nodes_of("Div", "Mul"):
        for kind, pattern in patterns:
            match = pattern.match(model, model.graph, node, check_nodes_are_removable=False)
            if match:
                steps = [*match.nodes, *(_affine(facts, node) if kind.endswith("norm") else ())]
                yield kind, tuple(dict.fromkeys(steps)), "", f"{len(steps)} steps"
                break


def _affine(facts: GraphFacts, node: ir.Node) -> Iterator[ir.Node]:
    """The ``Mul`` and ``Add`` of weights after a node."""
    for op in ("Mul", "Add"):
        reader = only_consumer(node.outputs[0], op)
        if reader is not None and facts.with_constant(reader) is not None:
            yield (node := reader)


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
