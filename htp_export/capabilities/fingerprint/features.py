"""Features of a graph: kinds of inputs, attention, convolutions, recurrences, routers."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.model.boundaries import dependence, reads_and_results
from htp_export.model.graph_facts import Array, GraphFacts
from htp_export.model.neighbours import producer_of
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.inputs import Inputs, infer_bound
from htp_export.shapes.known import Shape
from htp_export.shapes.operator_kinds import SIZES_ONLY, is_standard
from htp_export.shapes.schemas import EVALUATED
from htp_export.shapes.symbolic import Symbolic

if TYPE_CHECKING:
    from htp_export.capabilities.forensics.patterns import MaskUse

_FUSED = frozenset((
    "Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedMultiHeadAttention",
    "DecoderMaskedMultiHeadAttention"
))  # fmt: skip
MIXING = frozenset((
    "Attention", "Conv", "ConvInteger", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul",
    "MatMulInteger", "QLinearConv", "RNN", "Softmax"
))  # fmt: skip
"""Operators that compute features: their results are not the input in another form, or a mask."""
_MOST_NODES = 400  # that compute a mask; with more, the value is a feature of the model
_MOST_ELEMENTS = 1 << 22  # of a mask that is computed: 32 MB as int64, and 2,048 tokens squared
# a score that is lower than another one by this much has no weight after a softmax
_FAR_BELOW = 1e3
_NEAREST = 80
"""Values that a search visits from an input on.

More than the casts, scalings and reshapes before an embedding, a convolution or a sine, and few
enough for inputs such as masks, which every layer uses."""
_NEAREST_PICK = 20  # likewise, from selected indices to the node that they select from
_GATE_NODES = 7  # between a router's linear layer and its selection: softmax, scales, group masks
_MOST_EXPERTS = 1024  # a wider linear layer before a ``TopK`` is a vocabulary, not a router
_SHORTEST_LOOP = 4  # steps: two or three equal slices also occur elsewhere (queries, keys, values)
_STEP_NODES = 3  # the fewest results of a step of such a loop: a sum of slices has one
_OPEN_SIZES = (1, 64)  # one example; and a size that both texts and images can have

_ANOTHER = MIXING | SIZES_ONLY | {"CumSum"}
"""Operators whose results are not the input in another form, such as the positions of tokens."""
_AROUND_WAVES = frozenset((
    "Cast", "Concat", "Div", "Expand", "Flatten", "Gather", "Identity", "MatMul", "Mul", "Reshape",
    "Slice", "Split", "Squeeze", "Unsqueeze"
))  # fmt: skip
"""Operators between a time step, its sines and cosines, and the layer that these enter."""
_GATES = (
    "Softmax",
    "Sigmoid",
    "Cast",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Identity",
    "Softplus",
    "Sqrt",
    "Reshape",
    "Where",
)
_PICKS = frozenset((
    "Gather", "GatherElements", "GatherND", "Equal", "NonZero", "OneHot", "ScatterElements",
    "ScatterND"
))  # fmt: skip
"""Operators that select experts by their indices."""


@dataclass(frozen=True)
class ModelInput:
    """One input of the model.

    Attributes:
        value: The input.
        kind: ``"tokens"``, indices into a table of vectors; ``"image"``, with two or three spatial
            dimensions; ``"sound"``, a signal or a spectrum over time that enters a convolution;
            ``"features"``, other numbers; or ``"control"``: masks, positions, scalars.
        convolution: The first convolution that it enters, with only reshapes and scalings before.
    """

    value: ir.Value
    kind: str
    convolution: ir.Node | None = None


class GraphFeatures:
    """The features of a graph that tell its architecture."""

    def __init__(self, tagged: TaggedModel) -> None:
        self._inferred = _inferred_with_sizes(tagged)
        self.facts = GraphFacts(tagged, self._inferred)
        self.inputs = model_inputs(self.facts)

    @cached_property
    def attentions(self) -> Counter[str]:
        """``"causal"``, ``"bidirectional"``, ``"cross"``, ``"learned queries"`` → attentions."""
        from htp_export.capabilities.forensics.patterns import attention_steps

        # layers share masks
        is_causal = functools.cache(functools.partial(_is_causal, self.facts, self._inferred))
        found: list[tuple[bool, ir.Value | None, ir.Value | None]] = []
        for steps in attention_steps(self.facts):
            queries, keys = steps.scores.inputs[:2]
            found.append((any(map(is_causal, steps.masks)), queries, keys))
        for node in self.facts.nodes:
            if node.op_type in _FUSED:
                mask = _mask(node)
                causal = _hides_later(node) or (mask is not None and is_causal(mask))
                queries = node.inputs[0]
                found.append((causal, queries, _keys_of(node) or queries))
        data = [one.value for one in self.inputs if one.kind != "control"]
        starts: dict[ir.Value | None, int] = {value: 1 << bit for bit, value in enumerate(data)}
        sources = dependence(reads_and_results(self.facts.nodes), starts)
        kinds: Counter[str] = Counter()
        for causal, queries, keys in found:
            kind = _kind_of(sources.get(queries, 0), sources.get(keys, 0))
            kinds["causal" if causal else kind] += 1
        return kinds

    @cached_property
    def convolutions(self) -> Counter[int]:
        """Dimensions of space or time → convolutions, without kernels of one point.

        Convolutions with one point as kernel are linear layers.
        """
        counts: Counter[int] = Counter()
        for node in self.facts.nodes_of("Conv", "ConvInteger", "QLinearConv", "ConvTranspose"):
            position = 3 if node.op_type == "QLinearConv" else 1
            weight_shape = self.facts.shape(node.inputs[position]) or ()
            if any(size != 1 for size in weight_shape[2:]):
                counts[len(weight_shape) - 2] += 1
        return counts

    @cached_property
    def time_steps(self) -> list[str]:
        """The inputs of one number for each example whose sines and cosines enter a linear layer.

        Rotary positions do not count: their sines and cosines are multiplied with queries and keys,
        and enter no layer.
        """
        names: list[str] = []
        for model_input in self.inputs:
            value = model_input.value
            shape = self.facts.shape(value)
            is_single = shape is not None and shape[1:] in ((), (1,))
            if is_single and _enters_as_waves(self.facts, value):
                names.append(value.name or "unnamed")
        return names

    @cached_property
    def routers(self) -> list[tuple[int, int]]:
        """For each node that selects experts: how many (0: not constant), and of how many."""
        found = (_router(self.facts, node) for node in self.facts.nodes_of("TopK", "ArgMax"))
        return [router for router in found if router is not None]

    @cached_property
    def recurrent(self) -> Counter[str]:
        """Recurrent operators, and each ``Scan`` and ``Loop`` with products → number of nodes."""
        bodies = self.facts.tagged.index.bodies
        counts = Counter(node.op_type for node in self.facts.nodes_of("LSTM", "GRU", "RNN"))
        for node in self.facts.nodes_of("Scan", "Loop"):
            inner_nodes = itertools.chain(*(body.all_nodes() for body in bodies.get(node, ())))
            if any(inner.op_type in ("MatMul", "Gemm", "Mul") for inner in inner_nodes):
                counts[node.op_type] += 1
        return counts

    @cached_property
    def loops(self) -> list[int]:
        """The number of steps for each tensor that an unrolled loop splits.

        Such a loop splits a tensor along one dimension, one slice a step, and each step uses the
        result of the previous one: there are results of the first slice alone, of the first two,
        and so on.
        """
        steps: list[int] = []
        for slices in _pieces(self.facts).values():
            starts: dict[ir.Value | None, int] = {}
            for step, position in enumerate(sorted(slices)):
                starts[slices[position]] = 1 << step
            if len(starts) < _SHORTEST_LOOP:
                continue
            results = Counter(dependence(reads_and_results(self.facts.nodes), starts).values())
            first_slices = [(2 << step) - 1 for step in range(1, len(starts))]  # one bit a slice
            if all(results[bits] >= _STEP_NODES for bits in first_slices):
                steps.append(len(starts))
        return steps

    @property
    def decodes(self) -> bool:
        """Whether it is a decoder with an encoder: features of one input attend to another's."""
        return self.attentions["cross"] > 0 and self.attentions["causal"] > 0

    def takes(self, *kinds: str) -> bool:
        """Whether an input is of one of these kinds."""
        return any(one.kind in kinds for one in self.inputs)


def _inferred_with_sizes(tagged: TaggedModel) -> Symbolic:
    """Types and shapes in numbers: one example, and a usual size for the other open dimensions."""
    inputs = Inputs.of(tagged.model)
    shapes = [one.shape for one in inputs if one.shape is not None]
    if all(isinstance(size, int) for shape in shapes for size in shape):
        return tagged.inferred
    first, others = _OPEN_SIZES
    dims: dict[str, int] = {}
    for shape in shapes:
        for position, dim in enumerate(shape):
            if isinstance(dim, str):
                dims[dim] = first if position == 0 else others
    bound = inputs.bind(dims={dim: size for dim, size in dims.items() if dim.isidentifier()})
    sizes: dict[str, list[int]] = {}
    for name, bound_shape in bound.shapes.items():
        if bound_shape is None:
            continue
        default = [first, *[others] * len(bound_shape)]
        sizes[name] = [
            default[position] if size is None else size for position, size in enumerate(bound_shape)
        ]
    return infer_bound(tagged.model, sizes)


def _uses(
    starts: Iterable[ir.Value], onward: Callable[[ir.Node], bool], most: int = _NEAREST
) -> Iterator[tuple[ir.Node, int]]:
    """Consumers of values with the position of the input, the nearest first.

    The search continues with the results of ``onward`` nodes.
    """
    pending = deque(starts)
    seen = set(pending)
    for _ in range(most):
        if not pending:
            return
        for use in pending.popleft().uses():
            yield use.node, use.idx
            if onward(use.node):
                fresh = [output for output in use.node.outputs if output not in seen]
                seen.update(fresh)
                pending.extend(fresh)


def _nodes_behind(starts: Iterable[ir.Value]) -> list[ir.Node]:
    return list(
        dict.fromkeys(node for node, _ in _uses(starts, lambda node: node.op_type in _AROUND_WAVES))
    )


def model_inputs(facts: GraphFacts) -> list[ModelInput]:
    """The inputs of a model that are no weights, with their kinds."""
    graph = facts.tagged.model.graph
    return [_model_input(facts, value) for value in graph.inputs if not value.is_initializer()]


def _model_input(facts: GraphFacts, value: ir.Value) -> ModelInput:
    is_floating = _is_floating(facts, value)

    def onward(node: ir.Node) -> bool:
        # a product of computed integers has positions, and is no input in another form
        is_count = node.op_type == "Mul" and not any(map(facts.is_constant, node.inputs))
        return node.op_type not in _ANOTHER and (is_floating or not is_count)

    convolution: ir.Node | None = None
    for node, position in _uses([value], onward):
        if not is_floating and _looks_up(facts, node, position):
            return ModelInput(value, "tokens")
        if convolution is None and is_standard(node, "Conv") and position == 0:
            convolution = node
    rank = facts.rank(value) or 0
    if convolution is not None:
        kernel_rank = facts.rank(convolution.inputs[1]) or 0
        if rank >= 4 and kernel_rank >= 4:
            return ModelInput(value, "image", convolution)
        if is_floating and rank in (2, 3):
            return ModelInput(value, "sound", convolution)
    if is_floating and rank >= 2 and value.uses():
        return ModelInput(value, "features")
    return ModelInput(value, "control")


def _is_floating(facts: GraphFacts, value: ir.Value) -> bool:
    dtype = facts.dtype(value)
    return dtype is not None and dtype.is_floating_point()


def _looks_up(facts: GraphFacts, node: ir.Node, position: int) -> bool:
    """Whether an input of a node are indices into a constant table of vectors."""
    if node.op_type not in ("Gather", "GatherND") or position != 1:
        return False
    table = node.inputs[0]
    return facts.is_constant(table) and facts.rank(table) == 2


def _enters_as_waves(facts: GraphFacts, value: ir.Value) -> bool:
    """Whether sines and cosines of a value enter a linear layer."""
    waves = [node for node in _nodes_behind([value]) if node.op_type in ("Sin", "Cos")]
    if len({node.op_type for node in waves}) < 2:
        return False
    for node in _nodes_behind(node.outputs[0] for node in waves):
        if node.op_type in ("MatMul", "Gemm") and facts.is_constant(node.inputs[1]):
            return True
    return False


def _router(facts: GraphFacts, node: ir.Node) -> tuple[int, int] | None:
    """Selected and all experts of a ``TopK`` or ``ArgMax`` whose indices select something."""
    scores = node.inputs[0]
    experts = _scored(facts, scores)
    if scores is None or experts is None:
        return None
    consumers = _uses(node.outputs[-1:], lambda _: True, _NEAREST_PICK)
    if not any(consumer.op_type in _PICKS for consumer, _ in consumers):
        return None
    # a classifier selects the largest share, too; a router also uses the share
    if node.op_type == "ArgMax":
        return (1, experts) if len(scores.uses()) > 1 else None
    selected, axis = facts.scalar(node.inputs[1]) or 0, node.attributes.get_int("axis", -1)
    is_last = axis in (-1, (facts.rank(scores) or 0) - 1)
    return (int(selected), experts) if is_last and selected < experts else None


def _scored(facts: GraphFacts, value: ir.Value | None) -> int | None:
    """The width of the linear layer before a value, with only a gate between.

    None if there is none.
    """
    for _ in range(_GATE_NODES + 1):
        node = producer_of(value)
        if node is None:
            return None
        if node.op_type in ("MatMul", "Gemm"):
            return _experts_of(facts, node)
        if node.op_type not in _GATES:
            return None
        # the condition of a Where masks groups of experts
        operands = node.inputs[1:] if node.op_type == "Where" else node.inputs
        computed = [arg for arg in operands if arg is not None and not facts.is_constant(arg)]
        value = computed[0] if computed else None
    return None


def _experts_of(facts: GraphFacts, layer: ir.Node) -> int | None:
    """The width of a linear layer, if it may be the number of experts."""
    shape = facts.shape(layer.outputs[0])
    if not shape or not facts.is_constant(layer.inputs[1]):
        return None
    width = shape[-1]
    return width if isinstance(width, int) and 2 <= width <= _MOST_EXPERTS else None


def _pieces(facts: GraphFacts) -> dict[tuple[ir.Value | None, int | None], dict[float, ir.Value]]:
    """Tensor and dimension → index → the slice of size one at it."""
    slices_of: defaultdict[tuple[ir.Value | None, int | None], dict[float, ir.Value]]
    slices_of = defaultdict(dict)
    for node in facts.nodes_of("Gather", "Split"):
        slices = slices_of[node.inputs[0], node.attributes.get_int("axis", 0)]
        if node.op_type == "Split":
            slices.update(enumerate(node.outputs))
        elif not facts.is_constant(node.inputs[0]):
            index = facts.scalar(node.inputs[1])
            if index is not None:
                slices.setdefault(index, node.outputs[0])
    return slices_of


def _kind_of(queries: int, keys: int) -> str:
    """The kind of an attention that is not causal.

    ``queries`` and ``keys``: the data inputs that they depend on, a bit each.
    """
    if not queries:
        return "learned queries" if keys else "bidirectional"
    # a cache has keys of earlier calls, so keys may depend on more inputs than queries
    return "cross" if queries & ~keys else "bidirectional"


def _hides_later(node: ir.Node) -> bool:
    """Whether a fused attention is causal by its attributes or its definition."""
    if node.op_type == "GroupQueryAttention":
        return True
    return any(node.attributes.get_int(name, 0) for name in ("is_causal", "unidirectional"))


def _keys_of(node: ir.Node) -> ir.Value | None:
    """The keys of a fused attention; None if they are packed with the queries."""
    is_packed = node.op_type == "Attention" and not is_standard(node)  # then input 1 is a weight
    return node.inputs[1] if len(node.inputs) > 1 and not is_packed else None


def _mask(node: ir.Node) -> MaskUse | None:
    """The mask of a fused attention."""
    from htp_export.capabilities.forensics.patterns import MaskUse

    position = 3 if is_standard(node) else 5
    mask = node.inputs[position] if len(node.inputs) > position else None
    if mask is None:
        return None
    is_floating = mask.dtype is None or mask.dtype.is_floating_point()
    return MaskUse(mask, "added" if is_floating else "kept")


def _is_causal(facts: GraphFacts, inferred: Symbolic, mask: MaskUse) -> bool:
    """Whether a mask hides all above the diagonal, and not the diagonal; False if it is unknown.

    Rows and columns are the last two dimensions, except for dimensions of size one after them:
    scores may have several channels for each pair of positions.
    """
    array = _elements(facts, inferred, mask.value)
    while array is not None and array.ndim > 2 and array.shape[-1] == 1:
        array = array[..., 0]
    if array is None or array.ndim < 2 or (mask.role == "added" and array.dtype.kind != "f"):
        return False
    if mask.role == "added":
        numbers = np.nan_to_num(array.astype(np.float64), nan=-np.inf)
        hidden = numbers < numbers.max(initial=-np.inf) - _FAR_BELOW
    else:
        hidden = array.astype(bool) == (mask.role == "dropped")
    rows, columns = hidden.shape[-2:]
    earlier = max(columns - rows, 0)  # keys of earlier calls come first
    ahead = np.triu(np.ones((rows, columns), bool), k=1 + earlier)
    now = np.eye(rows, columns, k=earlier, dtype=bool)
    return bool(ahead.any() and hidden[..., ahead].all() and not hidden[..., now].all())


def _elements(facts: GraphFacts, inferred: Symbolic, value: ir.Value) -> Array | None:
    """The elements of a value, computed from sizes, constants and inputs of ones.

    None if it is too large.
    """
    from onnx.reference import ReferenceEvaluator

    part = _computing(facts, inferred, value)
    if part is None:
        return None
    nodes, feeds = part
    if value in feeds or len({node.graph for node in nodes}) > 1:
        return feeds.get(value)
    opsets = dict(facts.tagged.model.graph.opset_imports)
    ordered = [node for node in facts.nodes if node in nodes]
    view = ir.GraphView(list(feeds), [value], nodes=ordered, opset_imports=opsets, name="mask")
    graph = view.clone()
    if not _is_small(graph, list(feeds.values())):
        return None
    arrays = {str(source.name): array for source, array in feeds.items()}
    try:
        with np.errstate(all="ignore"):
            evaluator = ReferenceEvaluator(ir.to_proto(ir.Model(graph, ir_version=10)))
            [result] = evaluator.run(None, arrays)
            return np.asarray(result)
    except Exception:  # numpy raises errors of many classes for arguments that do not fit
        return None


def _computing(
    facts: GraphFacts, inferred: Symbolic, value: ir.Value
) -> tuple[set[ir.Node], dict[ir.Value, Array]] | None:
    """The nodes that compute a value, and the arrays that they start from.

    None if it is no mask.
    """
    nodes: set[ir.Node] = set()
    feeds: dict[ir.Value, Array] = {}
    pending = [value]
    while pending:
        current = pending.pop()
        node = current.producer()
        if current in feeds or node in nodes:
            continue
        array = _known(facts, inferred, current)
        if array is not None:
            feeds[current] = array
            continue
        if node is None or not _is_plain(node) or node in facts.tagged.index.bodies:
            return None
        if len(nodes) >= _MOST_NODES:
            return None
        nodes.add(node)
        pending += [arg for arg in node.inputs if arg is not None]
    return nodes, feeds


def _is_plain(node: ir.Node) -> bool:
    """Whether a node may compute a mask, and takes time by the size of its inputs and results."""
    return (
        node.domain == ""
        and node.op_type in {"Constant", *EVALUATED}
        and node.op_type not in MIXING
    )


def _is_small(graph: ir.Graph, feeds: Sequence[Array]) -> bool:
    """Whether all results of a graph are small for these inputs.

    Shapes in the file are not trusted.
    """
    alone = graph.clone()
    inputs = list(alone.inputs)
    alone.inputs.clear()
    for value, array in zip(inputs, feeds, strict=True):
        value.const_value = ir.tensor(array)
        alone.register_initializer(value)
    results = [value for node in alone for value in node.outputs if value.name]
    for value in results:
        value.type = value.shape = None
    known = Symbolic(alone)
    shapes = map(known.shape, results)
    return all(shape is not None and _count(shape) <= _MOST_ELEMENTS for shape in shapes)


def _count(shape: Shape) -> float:
    """The number of elements; infinite if it is unknown."""
    return math.prod(size if isinstance(size, int) else math.inf for size in shape)


def _known(facts: GraphFacts, inferred: Symbolic, value: ir.Value) -> Array | None:
    """The elements of constants and of known sizes, and ones for an input.

    None for other values.
    """
    source = facts.tagged.index.initializer(value)
    sizes = [size for size in facts.shape(value) or () if isinstance(size, int)]
    dtype, rank = facts.dtype(value), facts.rank(value)
    if dtype is None or len(sizes) != rank or math.prod(sizes) > _MOST_ELEMENTS:
        return None
    if source is not None and source.const_value is not None:
        try:
            return np.asarray(source.const_value.numpy())
        except (OSError, FileError):
            return None
    contents = inferred.constant(value)
    if contents is not None:
        return np.array(contents, dtype.numpy()).reshape(sizes)
    return np.ones(sizes, dtype.numpy()) if value.producer() is None else None
