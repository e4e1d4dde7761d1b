"""What a graph does to its inputs: their kinds, attention, convolutions, recurrences, routers, time steps."""

from __future__ import annotations

import functools
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
    "Attention", "Conv", "ConvInteger", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "MatMulInteger",
    "QLinearConv", "RNN", "Softmax"
))  # fmt: skip
"""The results of these are computed features, and no longer the input in another form, or a mask."""
_MOST_NODES = 400  # that compute a mask; beyond that, the value is a feature of the model
_MOST_ELEMENTS = 1 << 22  # of a mask that is computed
# a score that is lower than another one by this much has no weight after a softmax
_FAR_BELOW = 1e3
_NEAREST = 80
"""Values that a search looks at from an input on: more than the casts, scalings and reshapes before an embedding, a
convolution or a sine, and few enough for inputs such as masks that every layer reads."""
_NEAREST_PICK = 20  # the same from selected indices on
_GATE_NODES = 7  # between a router's linear layer and its selection
_MOST_EXPERTS = 1024  # a wider linear layer before a ``TopK`` is a vocabulary, not a router
_SHORTEST_LOOP = 4  # steps: two or three equal slices also occur elsewhere (queries, keys, values)
_STEP_NODES = 3  # results of each step of such a loop at least: a sum of slices has one
_OPEN_SIZES = (1, 64)  # where a size is open: the first one, and the others, of texts and of images

_ANOTHER = MIXING | SIZES_ONLY | {"CumSum"}
"""What they give is no longer the input in another form: a table that positions index is no token embedding."""
_AROUND_WAVES = frozenset((
    "Cast", "Concat", "Div", "Expand", "Flatten", "Gather", "Identity", "MatMul", "Mul", "Reshape", "Slice", "Split",
    "Squeeze", "Unsqueeze"
))  # fmt: skip
"""Between a time step, its sines and cosines, and the layer that these enter."""
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
    "Gather", "GatherElements", "GatherND", "Equal", "NonZero", "OneHot", "ScatterElements", "ScatterND"
))  # fmt: skip


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
    """What a graph computes."""

    def __init__(self, tagged: TaggedModel) -> None:
        self._inferred = _inferred_with_sizes(tagged)
        self.facts = GraphFacts(tagged, self._inferred)
        self.inputs = model_inputs(self.facts)

    @cached_property
    def attentions(self) -> Counter[str]:
        """``"causal"``, ``"bidirectional"``, ``"cross"``, ``"learned queries"`` → number of attentions."""
        from htp_export.capabilities.forensics.patterns import attention_steps

        # layers share masks
        is_causal = functools.cache(functools.partial(_is_causal, self.facts, self._inferred))
        found: list[tuple[bool, ir.Value | None, ir.Value | None]] = []
        for steps in attention_steps(self.facts):
            queries, keys = steps.scores.inputs[:2]
            found.append((any(map(is_causal, steps.masks)), queries, keys))
        for node in self.facts.nodes:
            if node.op_type in _FUSED:
                written = any(
                    node.attributes.get_int(name, 0) for name in ("is_causal", "unidirectional")
                )
                mask = _mask(node)
                causal = (
                    written
                    or node.op_type == "GroupQueryAttention"
                    or (mask is not None and is_causal(mask))
                )
                # its second input is a weight
                packed = node.op_type == "Attention" and not is_standard(node)
                keys = node.inputs[1] if len(node.inputs) > 1 and not packed else None
                found.append((causal, node.inputs[0], keys or node.inputs[0]))
        data = [given.value for given in self.inputs if given.kind != "control"]
        starts: dict[ir.Value | None, int] = {value: 1 << place for place, value in enumerate(data)}
        reaching = dependence(reads_and_results(self.facts.nodes), starts)
        return Counter(
            "causal" if causal else _kind_of(reaching.get(queries, 0), reaching.get(keys, 0))
            for causal, queries, keys in found
        )

    @cached_property
    def convolutions(self) -> Counter[int]:
        """Dimensions of space or time → number of convolutions; those with one point as kernel are linear layers."""
        found = self.facts.nodes_of("Conv", "ConvInteger", "QLinearConv", "ConvTranspose")
        kernels = (
            self.facts.shape(node.inputs[3 if node.op_type == "QLinearConv" else 1]) or ()
            for node in found
        )
        return Counter(
            len(kernel) - 2 for kernel in kernels if any(size != 1 for size in kernel[2:])
        )

    @cached_property
    def time_steps(self) -> list[str]:
        """The inputs of one number for each example whose sines and cosines enter a linear layer.

        Rotary positions do not count: their sines and cosines multiply queries and keys, and enter
        no layer.
        """
        shapes = {given.value: self.facts.shape(given.value) for given in self.inputs}
        single = [
            value
            for value, shape in shapes.items()
            if shape is not None and shape[1:] in ((), (1,))
        ]
        return [value.name or "unnamed" for value in single if _enters_as_waves(self.facts, value)]

    @cached_property
    def routers(self) -> list[tuple[int, int]]:
        """For each node that selects experts for each position, how many it chooses (0: not constant), of how many."""
        return [
            router
            for node in self.facts.nodes_of("TopK", "ArgMax")
            if (router := _router(self.facts, node))
        ]

    @cached_property
    def recurrent(self) -> Counter[str]:
        """``LSTM``, ``GRU``, ``RNN``, and ``Scan`` and ``Loop`` that multiply numbers in each step → how many."""
        bodies = self.facts.tagged.index.bodies
        inside = {
            node: {inner.op_type for body in bodies.get(node, ()) for inner in body.all_nodes()}
            for node in self.facts.nodes_of("Scan", "Loop")
        }
        loops = [
            node for node, operators in inside.items() if operators & {"MatMul", "Gemm", "Mul"}
        ]
        return Counter(
            node.op_type for node in (*self.facts.nodes_of("LSTM", "GRU", "RNN"), *loops)
        )

    @cached_property
    def loops(self) -> list[int]:
        """For each tensor that an unrolled loop takes apart, how many steps it has.

        Such a loop takes a tensor apart along one dimension, a step at a time, and each step reads
        what the one before has computed: there are results of the first piece alone, of the first
        two, and so on.
        """
        found = []
        for places in _pieces(self.facts).values():
            starts: dict[ir.Value | None, int] = {
                places[place]: 1 << step for step, place in enumerate(sorted(places))
            }
            if len(starts) >= _SHORTEST_LOOP:
                results = Counter(dependence(reads_and_results(self.facts.nodes), starts).values())
                if all(results[(2 << step) - 1] >= _STEP_NODES for step in range(1, len(starts))):
                    found.append(len(starts))
        return found

    @property
    def decodes(self) -> bool:
        """Whether what is computed from one input attends to what is computed from another: it is what generates."""
        return self.attentions["cross"] > 0 and self.attentions["causal"] > 0

    def takes(self, *kinds: str) -> bool:
        """Whether an input is of one of some kinds."""
        return any(given.kind in kinds for given in self.inputs)


def _inferred_with_sizes(tagged: TaggedModel) -> Symbolic:
    """Types and shapes in numbers: one example, and a size that fits texts and images where another one is open."""
    inputs = Inputs.of(tagged.model)
    shapes = [given.shape for given in inputs if given.shape is not None]
    if all(isinstance(size, int) for shape in shapes for size in shape):
        return tagged.inferred
    named = {
        dim: _OPEN_SIZES[place > 0]
        for shape in shapes
        for place, dim in enumerate(shape)
        if isinstance(dim, str)
    }
    bound = inputs.bind(dims={dim: size for dim, size in named.items() if dim.isidentifier()})
    sizes = {
        name: [_OPEN_SIZES[place > 0] if size is None else size for place, size in enumerate(shape)]
        for name, shape in bound.shapes.items()
        if shape is not None
    }
    return infer_bound(tagged.model, sizes)


def _uses(
    starts: Iterable[ir.Value], onward: Callable[[ir.Node], bool], most: int = _NEAREST
) -> Iterator[tuple[ir.Node, int]]:
    """The nodes that read values, or what ``onward`` nodes compute of them, and at which place; the nearest first."""
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
    """The inputs of a model that are no weights, by what first consumes them."""
    graph = facts.tagged.model.graph
    return [_model_input(facts, value) for value in graph.inputs if not value.is_initializer()]


def _model_input(facts: GraphFacts, value: ir.Value) -> ModelInput:
    rank, dtype = facts.rank(value) or 0, facts.dtype(value)
    floating = dtype is not None and dtype.is_floating_point()
    convolution: ir.Node | None = None

    def onward(node: ir.Node) -> bool:
        counts = (
            not floating and node.op_type == "Mul" and not any(map(facts.is_constant, node.inputs))
        )
        return not counts and node.op_type not in _ANOTHER

    for node, place in _uses([value], onward):
        table = node.inputs[0] if node.op_type in ("Gather", "GatherND") and place == 1 else None
        if not floating and facts.is_constant(table) and facts.rank(table) == 2:
            return ModelInput(value, "tokens")
        if convolution is None and is_standard(node, "Conv") and place == 0:
            convolution = node
    if convolution is not None and rank >= 4 and (facts.rank(convolution.inputs[1]) or 0) >= 4:
        return ModelInput(value, "image", convolution)
    if convolution is not None and floating and rank in (2, 3):
        return ModelInput(value, "sound", convolution)
    return ModelInput(value, "features" if floating and rank >= 2 and value.uses() else "control")


def _enters_as_waves(facts: GraphFacts, value: ir.Value) -> bool:
    waves = [node for node in _nodes_behind([value]) if node.op_type in ("Sin", "Cos")]
    readers = _nodes_behind(node.outputs[0] for node in waves)
    layers = (
        node
        for node in readers
        if node.op_type in ("MatMul", "Gemm") and facts.is_constant(node.inputs[1])
    )
    return len({node.op_type for node in waves}) == 2 and any(layers)


def _router(facts: GraphFacts, node: ir.Node) -> tuple[int, int] | None:
    """How many experts a ``TopK`` or ``ArgMax`` chooses of how many, where its indices select something."""
    scores = node.inputs[0]
    experts = _scored(facts, scores)
    behind = _uses(node.outputs[-1:], lambda _: True, _NEAREST_PICK)
    if (
        scores is None
        or experts is None
        or not any(reader.op_type in _PICKS for reader, _ in behind)
    ):
        return None
    # by the largest share alone, classes are told: it has to be used, too
    if node.op_type == "ArgMax":
        return (1, experts) if len(scores.uses()) > 1 else None
    chosen, axis = facts.scalar(node.inputs[1]) or 0, node.attributes.get_int("axis", -1)
    last = axis in (-1, (facts.rank(scores) or 0) - 1)
    return (int(chosen), experts) if last and chosen < experts else None


def _scored(facts: GraphFacts, value: ir.Value | None) -> int | None:
    """The width of the linear layer before a value, with only a gate between; None if there is none."""
    for _ in range(_GATE_NODES + 1):
        node = producer_of(value)
        if node is not None and node.op_type in ("MatMul", "Gemm"):
            width = (
                (facts.shape(node.outputs[0]) or (None,))[-1]
                if facts.is_constant(node.inputs[1])
                else None
            )
            return width if isinstance(width, int) and 2 <= width <= _MOST_EXPERTS else None
        if node is None or node.op_type not in _GATES:
            return None
        # its condition masks groups of experts
        operands = node.inputs[1:] if node.op_type == "Where" else node.inputs
        value = next(
            (
                operand
                for operand in operands
                if operand is not None and not facts.is_constant(operand)
            ),
            None,
        )
    return None


def _pieces(facts: GraphFacts) -> dict[tuple[ir.Value | None, int | None], dict[float, ir.Value]]:
    """Tensor and dimension → place → the piece of size one at it."""
    pieces: defaultdict[tuple[ir.Value | None, int | None], dict[float, ir.Value]] = defaultdict(
        dict
    )
    for node in facts.nodes_of("Gather", "Split"):
        taken = pieces[node.inputs[0], node.attributes.get_int("axis", 0)]
        if node.op_type == "Split":
            taken.update(enumerate(node.outputs))
        elif (
            not facts.is_constant(node.inputs[0])
            and (place := facts.scalar(node.inputs[1])) is not None
        ):
            taken.setdefault(place, node.outputs[0])
    return pieces


def _kind_of(asked: int, answered: int) -> str:
    """The kind of an attention that is not causal, by the data inputs of queries and keys, one bit each."""
    if asked:  # keys of earlier calls, which a cache holds, are of more inputs than the queries
        return "cross" if asked & ~answered else "bidirectional"
    return "learned queries" if answered else "bidirectional"


def _mask(node: ir.Node) -> MaskUse | None:
    from htp_export.capabilities.forensics.patterns import MaskUse

    mask = next(iter(node.inputs[3 if is_standard(node) else 5 :]), None)
    floating = mask is not None and (mask.dtype is None or mask.dtype.is_floating_point())
    return None if mask is None else MaskUse(mask, "added" if floating else "kept")


def _is_causal(facts: GraphFacts, inferred: Symbolic, mask: MaskUse) -> bool:
    """Whether what lies above the diagonal is masked, and the diagonal not; False where that cannot be computed.

    Rows and columns are the last two dimensions, except for those of size one after them: scores
    may have several channels for each pair of positions.
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
    """The elements of a value that depends on sizes, constants and inputs of ones; None where it takes more."""
    from onnx.reference import ReferenceEvaluator

    nodes: set[ir.Node] = set()
    feeds: dict[ir.Value, Array] = {}
    pending = [value]
    while pending:
        current = pending.pop()
        node = current.producer()
        if current in feeds or node in nodes:
            continue
        known = _known(facts, inferred, current)
        if known is not None:
            feeds[current] = known
        elif (
            node is None
            or not _is_plain(node)
            or node in facts.tagged.index.bodies
            or len(nodes) >= _MOST_NODES
        ):
            return None
        else:
            nodes.add(node)
            pending += [operand for operand in node.inputs if operand is not None]
    if value in feeds or len({node.graph for node in nodes}) > 1:
        return feeds.get(value)
    opsets = dict(facts.tagged.model.graph.opset_imports)
    ordered = [node for node in facts.nodes if node in nodes]
    graph = ir.GraphView(
        list(feeds), [value], nodes=ordered, opset_imports=opsets, name="mask"
    ).clone()
    if not _is_small(graph, list(feeds.values())):
        return None
    try:
        with np.errstate(all="ignore"):
            evaluator = ReferenceEvaluator(ir.to_proto(ir.Model(graph, ir_version=10)))
            return np.asarray(
                next(
                    iter(evaluator.run(None, {str(of.name): array for of, array in feeds.items()}))
                )
            )
    except Exception:  # it raises whatever numpy does on what does not fit
        return None


def _is_plain(node: ir.Node) -> bool:
    """Whether a node may compute a mask, in a time that its inputs and results bound."""
    return (
        node.domain == ""
        and node.op_type in {"Constant", *EVALUATED}
        and node.op_type not in MIXING
    )


def _is_small(graph: ir.Graph, feeds: Sequence[Array]) -> bool:
    """Whether all that a graph computes of some inputs is small, whatever the file says of shapes."""
    alone = graph.clone()
    inputs = list(alone.inputs)
    alone.inputs.clear()
    for value, array in zip(inputs, feeds, strict=True):
        value.const_value = ir.tensor(array)
        alone.register_initializer(value)
    made = [value for node in alone for value in node.outputs if value.name]
    for value in made:
        value.type = value.shape = None
    known = Symbolic(alone)
    sizes = (known.shape(value) for value in made)
    return all(shape is not None and _count(shape) <= _MOST_ELEMENTS for shape in sizes)


def _count(shape: Shape) -> float:
    """The number of elements; infinite if it is not known."""
    return math.prod(size if isinstance(size, int) else math.inf for size in shape)


def _known(facts: GraphFacts, inferred: Symbolic, value: ir.Value) -> Array | None:
    """The elements of a constant, of sizes that are known, and ones for an input."""
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
