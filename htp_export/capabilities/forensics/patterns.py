"""What no pass changes, or not in every form: patterns, as onnxscript rules, and large weights that are equal."""

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
"""Elements; `eliminate_duplicate_constants` compares tensors up to this size."""

_HASHED = 1 << 20  # bytes; of what is larger, a sample is compared first
_SAMPLE = 1024  # elements

_Found: TypeAlias = tuple[str, tuple[ir.Node, ...], str, str]
"""The fields of a `Declined`."""
_Op: TypeAlias = Any
_Value: TypeAlias = Any  # what onnxscript's patterns are made of has no types
_Pattern: TypeAlias = Callable[[_Op, _Value], _Value]


def unchanged(facts: GraphFacts) -> Iterator[Declined]:
    """What looks like one operator in single steps, casts in a row, and sizes, after the passes of level ``exact``."""
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
    """``x / sqrt(mean(x²) + epsilon)``, in each form; LayerNorm where the mean was taken off ``x`` before."""
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
    """``exp(x) / sum(exp(x))``, with or without the largest element taken off before."""
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
    """Operators that are written in single steps, with what scales and shifts a normalization afterwards."""
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
    """The ``Mul`` and ``Add`` of weights behind a node."""
    for op in ("Mul", "Add"):
        reader = only_consumer(node.outputs[0], op)
        if reader is not None and facts.with_constant(reader) is not None:
            yield (node := reader)


def _casts(facts: GraphFacts) -> Iterator[_Found]:
    for node in facts.nodes_of("Cast"):
        first = producer_of(node.inputs[0], "Cast")
        if first is not None:
            source, between = facts.dtype(first.inputs[0]), facts.dtype(first.outputs[0])
            keeps = source is not None and between is not None and _holds(between, source)
            why = "" if keeps else "the type in between holds less, so that both count"
            detail = " to ".join(
                "?" if dtype is None else dtype.name
                for dtype in (source, between, facts.dtype(node.outputs[0]))
            )
            yield "cast_chain", (first, node), why, detail


def _holds(wide: ir.DataType, narrow: ir.DataType) -> bool:
    """Whether every value of one type is one of another."""
    try:
        return narrow == ir.DataType.BOOL or bool(np.can_cast(narrow.numpy(), wide.numpy(), "safe"))
    except TypeError:
        return False


def _sizes(facts: GraphFacts) -> Iterator[_Found]:
    """Nodes that compute sizes from ``Shape``: of one module, those that read each other together."""
    owners = facts.tagged.index.owners
    chain: set[ir.Node] = set()
    sizes: set[ir.Value] = set()
    for node in facts.nodes:
        on_sizes = is_standard(node) and any(value in sizes for value in node.inputs)
        rest = (value for value in node.inputs if value is not None and value not in sizes)
        on_sizes = (
            on_sizes
            and all(map(facts.is_constant, rest))
            and (facts.rank(node.outputs[0]) or 0) <= 1
        )
        if on_sizes or is_standard(node, *SIZES_ONLY):
            chain.add(node)
            sizes.update(node.outputs)
    for nodes in connected(
        (node for node in facts.nodes if node in chain),
        lambda one, other: owners[one] == owners[other],
    ):
        yield "shape_chain", nodes, "the sizes depend on the model's inputs, and are needed", ""


def large_duplicates(
    facts: GraphFacts,
) -> Iterator[tuple[tuple[str, ...], tuple[ir.Node, ...], str, str]]:
    """Equal tensors that no pass merges: their names, their readers, the reason, and how large they are."""
    graph = facts.tagged.model.graph
    made = (node.outputs[0] for node in facts.nodes_of("Constant") if node.graph is graph)
    values = (
        value for value in (*graph.initializers.values(), *made) if not value.is_graph_input()
    )
    held = (
        (value, constant_tensor(value) if value.const_value is None else value.const_value)
        for value in values
    )
    large = [
        (value, tensor)
        for value, tensor in held
        if tensor is not None and tensor.size > _COMPARED and tensor.dtype != ir.DataType.STRING
    ]
    same_form = _alike(large, lambda tensor: (tensor.dtype, tuple(tensor.shape.numpy())))
    # as little is read as can be
    same_start = (finer for group in same_form for finer in _alike(group, _start))
    for equal in (finer for group in same_start for finer in _alike(group, _whole)):
        size = equal[0][1].nbytes * (len(equal) - 1)
        readers = tuple(dict.fromkeys(use.node for value, _ in equal for use in value.uses()))
        why = f"more than {_COMPARED:,} elements: passes do not read weights to compare them"
        names = tuple(value.name or "" for value, _ in equal)
        yield names, readers, why, f"{len(equal)} equal, {size:,} bytes too many"


_Held: TypeAlias = tuple[ir.Value, ir.TensorProtocol]


def _alike(
    held: Iterable[_Held], key: Callable[[ir.TensorProtocol], Hashable | None]
) -> list[list[_Held]]:
    """The groups of several tensors of which the same can be said; those that cannot be read are in none."""
    groups: defaultdict[Hashable, list[_Held]] = defaultdict(list)
    for value, tensor in held:
        try:
            groups[key(tensor)].append((value, tensor))
        except (OSError, FileError):  # the file of its external data is not there
            continue
    return [group for group in groups.values() if len(group) > 1]


def _start(tensor: ir.TensorProtocol) -> Hashable:
    """The first elements of a large tensor; nothing of a small one, which is read whole at once."""
    return (
        ()
        if tensor.nbytes <= _HASHED
        else np.asarray(tensor.numpy()).reshape(-1)[:_SAMPLE].tobytes()
    )


def _whole(tensor: ir.TensorProtocol) -> Hashable:
    return array_hash(np.asarray(tensor.numpy()))


_STEPS = 12
"""How many nodes may lie between a product and the softmax, and after it."""

_PRODUCTS = ("MatMul", "Einsum")
_FIRST_INPUT = ("Cast", "Reshape", "Clip", "Tanh", "Identity", "Slice", "Div")
_BEFORE = (*_FIRST_INPUT, "Add", "Sub", "Mul", "Where", "Max", "Concat")
_AFTER = ("Cast", "Where", "Dropout", "Reshape", "Mul", "Identity", "IsNaN", "Slice", "Transpose")


@dataclass(frozen=True)
class MaskUse:
    """A mask, and how it works: ``"added"`` to the scores; ``"kept"`` or ``"dropped"`` where it is true."""

    value: ir.Value
    role: str


@dataclass(frozen=True)
class AttentionSteps:
    """Attention as single nodes: the products of queries and keys, and with the values; ``nodes`` has all, in order."""

    scores: ir.Node
    masks: tuple[MaskUse, ...]
    softmax: ir.Node
    context: ir.Node
    nodes: tuple[ir.Node, ...]


def attention_steps(facts: GraphFacts) -> Iterator[AttentionSteps]:
    """Every attention that is written in single steps."""

    @functools.cache
    def way_back(value: ir.Value | None, steps: int) -> tuple[ir.Node, ...]:
        """The nodes from a product of computed matrices to a value; none if there is no such product before it."""
        node = None if value is None or not steps else value.producer()
        if node is None or node.op_type not in (*_PRODUCTS, *_BEFORE):
            return ()
        varying = [
            given for given in node.inputs if given is not None and not facts.is_constant(given)
        ]
        if node.op_type in _PRODUCTS:
            return (node,) if len(varying) == len(node.inputs) else ()
        leading = [
            given
            for given in varying
            if given is node.inputs[0] or node.op_type not in _FIRST_INPUT
        ]
        before = next((way for given in leading if (way := way_back(given, steps - 1))), ())
        return (*before, node) if before else ()

    for softmax in facts.nodes_of("Softmax"):
        after = _way_on(softmax)
        before = way_back(softmax.inputs[0], _STEPS) if after else ()
        if before:
            masks = (
                mask
                for given, node in itertools.pairwise(before)
                for mask in _masks(facts, node, given)
            )
            yield AttentionSteps(
                before[0], tuple(masks), softmax, after[-1], (*before, softmax, *after)
            )


def _masks(facts: GraphFacts, node: ir.Node, before: ir.Node) -> list[MaskUse]:
    """The masks that a step puts on the scores, which another step gives."""
    through = before.outputs[0]
    if node.op_type == "Where" and node.inputs[0] is not None:
        return [MaskUse(node.inputs[0], "kept" if node.inputs[1] is through else "dropped")]
    others = [value for value in node.inputs if value is not None and value is not through]
    return [
        MaskUse(value, "added")
        for value in others
        if node.op_type == "Add" and facts.scalar(value) is None
    ]


def _way_on(softmax: ir.Node) -> tuple[ir.Node, ...]:
    """The nodes from a softmax to the product that it goes into; none if it goes into none."""
    value, after = softmax.outputs[0], list[ir.Node]()
    for _ in range(_STEPS):
        readers = [use.node for use in value.uses()]
        product = next((node for node in readers if node.op_type in _PRODUCTS), None)
        if product is not None:
            return (*after, product)
        steps = [node for node in readers if node.op_type in _AFTER]
        # a guard for rows that are masked whole
        after += [node for node in steps if node.op_type == "IsNaN"][:1]
        onward = next((node for node in steps if node.op_type != "IsNaN"), None)
        if onward is None:
            return ()
        after.append(onward)
        value = onward.outputs[0]
    return ()
