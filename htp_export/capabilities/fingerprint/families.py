"""Fingerprint: the family of architectures that a graph belongs to, and its repeated blocks.

Only mechanisms are evidence: the operations of the graph on its inputs. Names of models, modules
and tensors are not.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.fingerprint.features import GraphFeatures, ModelInput, model_inputs
from htp_export.editing.flattening import read_flat
from htp_export.format import tags
from htp_export.model.boundaries import dependence, reads_and_results
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.hashes import Hasher
from htp_export.model.model_faults import names_model_faults
from htp_export.model.regions import Region, name_of_node
from htp_export.model.tagged import ModelSource
from htp_export.reporting.columns import many
from htp_export.reporting.result import Result
from htp_export.reporting.tag_facts import TagFacts

_LEAST_NODES = 3  # of a module: a Linear has two, MatMul and Add
_LEAST_IN_PIECES = 5  # nodes of a block without modules: fewer repeat by chance
_LONGEST_CHAIN = 4096  # pieces: the search for repetitions takes time with their number squared
_WEIGHED = frozenset((
    "Attention", "Conv", "ConvInteger", "ConvTranspose", "FusedConv", "FusedMatMul", "GRU", "Gemm",
    "LSTM", "MatMul", "MatMulInteger", "MatMulNBits", "MultiHeadAttention", "QLinearConv",
    "QLinearMatMul", "RNN"
))  # fmt: skip
"""Operators with weights or attention; every block has one."""
_TELLING = (
    "MatMul",
    "Gemm",
    "Conv",
    "Softmax",
    "Attention",
    "LayerNormalization",
    "LSTM",
    "GRU",
    "BatchNormalization",
)
"""Operators that name a block without a class."""


@dataclass(frozen=True)
class Block:
    """A structure that a graph repeats.

    Attributes:
        count: How many times it runs.
        name: The class of its modules; for untagged models, the operators with most of its work.
        modules: The paths of its modules, each once; empty for untagged models.
        nodes: Number of nodes in each.
        starts: Name of the first node of each.
    """

    count: int
    name: str
    modules: tuple[str, ...]
    nodes: int
    starts: tuple[str, ...]

    def __str__(self) -> str:
        first = (self.modules or self.starts)[0]
        times = "×"  # noqa: RUF001 - the sign of a product, no letter
        return f"{self.count:5} {times} {self.name}, {self.nodes} nodes each: {first}"


def repeated_blocks(facts: GraphFacts) -> tuple[Block, ...]:
    """The structures that a graph repeats, the largest part of the model first.

    Parts of a repeated block are no blocks of their own, unless each block has several of them.
    """
    blocks = list(_modules(facts)) if facts.tagged.source != "none" else []
    return tuple(sorted(blocks or _pieces(facts), key=lambda block: -block.count * block.nodes))


def _repeated_modules(facts: GraphFacts) -> dict[str, list[Region]]:
    """Hash → the modules with weights that have it, if they run more than once."""
    tagged, hasher = facts.tagged, Hasher(facts)
    groups: defaultdict[str, list[Region]] = defaultdict(list)
    for path in tagged.paths:
        region = tagged[path]
        is_candidate = path and region.calls and len(region.nodes) >= _LEAST_NODES
        if is_candidate and _holds_weights(region.nodes):
            groups[hasher.region(path)].append(region)
    return {key: regions for key, regions in groups.items() if _runs_of(regions) > 1}


def _modules(facts: GraphFacts) -> Iterator[Block]:
    """Modules that compute the same, as blocks."""
    repeated = _repeated_modules(facts)
    group_of = {region.path: key for key, regions in repeated.items() for region in regions}

    def group_above(region: Region) -> str | None:
        """The group of the nearest repeated module above."""
        return group_of.get(tags.nearest_above(region.path, group_of) or "")

    for regions in repeated.values():
        parts_in = Counter(map(group_above, regions))
        kept: list[Region] = []
        for region in regions:
            above = group_above(region)
            if above is None:
                kept.append(region)
            elif region.children and parts_in[above] > len(repeated[above]):
                kept.append(region)  # each block above has several
        if _runs_of(kept) > 1:
            yield _block_of(kept)


def _block_of(regions: Sequence[Region]) -> Block:
    names = dict.fromkeys(
        region.info.simple_class or region.path.rpartition(".")[2] for region in regions
    )
    return Block(
        count=_runs_of(regions),
        name=" / ".join(names),
        modules=tuple(region.path for region in regions),
        nodes=len(regions[0].nodes) // max(regions[0].calls, 1),
        starts=_starts(region.nodes for region in regions),
    )


def _runs_of(regions: Iterable[Region]) -> int:
    return sum(region.calls for region in regions)


def _holds_weights(nodes: Iterable[ir.Node]) -> bool:
    return any(node.op_type in _WEIGHED for node in nodes)


def _starts(parts: Iterable[Sequence[ir.Node]]) -> tuple[str, ...]:
    return tuple(name_of_node(nodes[0]) for nodes in parts)


def _pieces(facts: GraphFacts) -> Iterator[Block]:
    """Consecutive equal blocks along the chain of each input, for graphs without tags."""
    hasher, taken = Hasher(facts), set[ir.Node]()
    for model_input in model_inputs(facts):
        if model_input.kind == "control":
            continue
        pieces = _chain(facts, model_input.value)[:_LONGEST_CHAIN]
        keys = [hasher.part(piece) for piece in pieces]
        for start, period, count in _repetitions(keys, [len(piece) for piece in pieces]):
            parts: list[list[ir.Node]] = []
            for k in range(count):
                first = start + k * period
                parts.append(list(itertools.chain(*pieces[first : first + period])))
            is_large = len(parts[0]) >= _LEAST_IN_PIECES and _holds_weights(parts[0])
            if is_large and taken.isdisjoint(parts[0]):
                taken.update(*parts)
                yield Block(count, _name_of(parts[0]), (), len(parts[0]), _starts(parts))


def _name_of(nodes: Iterable[ir.Node]) -> str:
    """The name of a block without modules: its main operators."""
    counts = Counter(node.op_type for node in nodes)
    main = [(op, counts[op]) for op in _TELLING if counts[op]] or counts.most_common(3)
    return ", ".join(f"{count} {op}" for op, count in main)


def _chain(facts: GraphFacts, start: ir.Value) -> list[list[ir.Node]]:
    """The nodes after an input, cut after each node that every path from it contains."""
    nodes = _between(facts, start)
    positions = {node: position for position, node in enumerate(nodes)}
    pieces: list[list[ir.Node]] = []
    first = 0
    furthest = max((positions.get(use.node, 0) for use in start.uses()), default=0)
    for position, node in enumerate(nodes):
        if furthest <= position:  # no edge from an earlier node passes this one
            pieces.append(nodes[first : position + 1])
            first = position + 1
        consumers = [positions.get(consumer, 0) for consumer in node.successors()]
        furthest = max(furthest, position, *consumers)
    return [piece for piece in (*pieces, nodes[first:]) if piece]


def _between(facts: GraphFacts, start: ir.Value) -> list[ir.Node]:
    """The nodes on paths from a value to the outputs of the graph, in order.

    Paths through sizes do not count.
    """
    graph = facts.tagged.model.graph
    starts: dict[ir.Value | None, int] = {start: 1}
    reached = dependence(reads_and_results(graph), starts)
    useful: dict[ir.Node, None] = {}
    for node in reversed(graph):
        if not any(value in reached for value in node.outputs):
            continue
        is_last = any(value.is_graph_output() for value in node.outputs)
        if is_last or any(consumer in useful for consumer in node.successors()):
            useful[node] = None
    return list(reversed(useful))


def _repetitions(keys: Sequence[str], weights: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Repetitions in a sequence: start, period and count; the largest first, without overlaps."""
    if not keys:
        return
    _, numbers = np.unique(np.array(keys, dtype=object).astype(str), return_inverse=True)
    pending = [(0, len(numbers))]
    while pending:
        low, high = pending.pop()
        best = _best_repetition(numbers[low:high], np.asarray(weights[low:high]))
        if best is not None:
            start, period, count = best
            yield low + start, period, count
            pending += [(low, low + start), (low + start + period * count, high)]


def _best_repetition(numbers: np.ndarray, weights: np.ndarray) -> tuple[int, int, int] | None:
    """The repetition that contains the most nodes.

    Of equal ones, the one with the shortest period.
    """
    total = np.concatenate([[0], np.cumsum(weights)])
    best: tuple[int, int, int] | None = None
    covered = 0
    for period in range(1, len(numbers) // 2 + 1):
        same = np.concatenate([[0], (numbers[:-period] == numbers[period:]).astype(int), [0]])
        edges = np.flatnonzero(np.diff(same))
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            count = (end - begin) // period + 1
            weight = int(total[begin + period * count] - total[begin])
            if count > 1 and weight > covered:
                best, covered = (begin, period, count), weight
    return best


@dataclass(frozen=True)
class Fingerprint(Result):
    """The result of `fingerprint`.

    Attributes:
        family: One of `FAMILIES`.
        evidence: The evidence in sentences; the decisive one comes first.
        blocks: Repeated structures, the largest part of the model first.
        nodes: Number of nodes of the model.
        tags: The tags of the model: source, reasons, untagged nodes.
    """

    family: str
    evidence: tuple[str, ...]
    blocks: tuple[Block, ...]
    nodes: int
    tags: TagFacts | None = None

    @property
    def summary(self) -> str:
        """The result in one line."""
        return self.family

    @property
    def lines(self) -> tuple[str, ...]:
        """The evidence, the blocks, and notes on the tags."""
        return (*(f"  {fact}" for fact in self.evidence), *map(str, self.blocks), *super().lines)


def _hears(seen: GraphFeatures) -> bool:
    """Whether an input is a signal, or a spectrum that enters layers of speech models."""
    spectrum = seen.takes("features") and not seen.takes("tokens", "image")
    return seen.takes("sound") or (spectrum and bool(seen.attentions) and seen.convolutions[1] > 0)


_RULES: Mapping[str, tuple[str, Callable[[GraphFeatures], bool]]] = {
    "diffusion-like": ("time", lambda seen: bool(seen.time_steps)),
    "mixture": ("routing", lambda seen: bool(seen.routers)),
    "multimodal": (
        "inputs",
        lambda seen: seen.takes("tokens") and seen.takes("image", "sound") and not seen.decodes,
    ),
    "speech": ("inputs", _hears),
    "recurrent": (
        "recurrence",
        lambda seen: seen.recurrent.total() + len(seen.loops) > seen.attentions.total(),
    ),
    "vision transformer": (
        "inputs",
        lambda seen: seen.takes("image") and bool(seen.attentions) and not seen.decodes,
    ),
    "encoder-decoder": ("attention", lambda seen: seen.decodes),
    "CNN": (
        "convolution",
        lambda seen: seen.convolutions[2] + seen.convolutions[3] > 0 and not seen.attentions,
    ),
    "decoder": (
        "attention",
        lambda seen: seen.attentions["causal"] > seen.attentions["bidirectional"],
    ),
    "encoder": ("attention", lambda seen: bool(seen.attentions) or seen.takes("tokens")),
    "unknown": ("attention", lambda seen: True),
}
"""Family → its decisive evidence, and the condition; the first family that applies counts."""

FAMILIES = tuple(_RULES)
"""The values of `Fingerprint.family`."""


@names_model_faults("model")
def fingerprint(model: ModelSource) -> Fingerprint:
    """Classify the architecture of a model, and find the blocks that it repeats.

    The first of `FAMILIES` whose condition holds counts, so that a speech model with an encoder and
    a decoder is ``speech``. ``docs/fingerprint.md`` lists the conditions, and the accuracy.

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
            Tags are not needed; with them, repeated blocks are modules.

    Returns:
        The family, the evidence for it, and the blocks.

    Raises:
        FileError: The file cannot be read.

    Examples:
        >>> import torch, htp_export
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> program = htp_export.export(net, (torch.randn(1, 5, 16),), verbose=False)
        >>> found = fingerprint(program)
        >>> found.family, found.evidence[0], [(block.count, block.name) for block in found.blocks]
        ('encoder', '3 attentions: 3 bidirectional', [(3, 'TransformerEncoderLayer')])
    """
    tagged = read_flat(model)
    seen = GraphFeatures(tagged)
    family = next(name for name, (_, applies) in _RULES.items() if applies(seen))
    decisive, _ = _RULES[family]
    sentences = _evidence(seen)
    evidence = (*sentences.pop(decisive), *itertools.chain.from_iterable(sentences.values()))
    blocks = repeated_blocks(GraphFacts(tagged))
    return Fingerprint(family, evidence, blocks, len(tagged.nodes), tagged.tag_facts)


def _evidence(seen: GraphFeatures) -> dict[str, list[str]]:
    """Kind of evidence → its sentences."""
    time_steps = [
        f"input {name} is a time step: its sines and cosines enter a linear layer"
        for name in seen.time_steps
    ]
    routing: list[str] = []
    if seen.routers:
        chosen, experts = seen.routers[0]
        choice = f"each position chooses {chosen or 'some'} of {experts} experts"
        routing.append(f"{len(seen.routers)} routers: {choice}")
    recurrence = [f"{count} {op}" for op, count in seen.recurrent.most_common()]
    if seen.loops:
        steps, tensors = max(seen.loops), len(seen.loops)
        recurrence.append(f"loops over {steps} steps, unrolled, over {tensors} tensors")
    attention: list[str] = []
    if seen.attentions:
        kinds = ", ".join(f"{count} {kind}" for kind, count in seen.attentions.most_common())
        attention.append(f"{seen.attentions.total()} attentions: {kinds}")
    inputs = [_about(seen.facts, one) for one in seen.inputs if one.kind != "control"]
    convolution: list[str] = []
    if seen.convolutions:
        by_dimensions = sorted(seen.convolutions.items())
        listed = ", ".join(f"{count} in {many(dims, 'dimension')}" for dims, count in by_dimensions)
        total = seen.convolutions.total()
        convolution.append(f"{total} convolutions wider than a point: {listed}")
    return {
        "time": time_steps,
        "routing": routing,
        "recurrence": recurrence,
        "attention": attention,
        "inputs": inputs,
        "convolution": convolution,
    }


def _about(facts: GraphFacts, model_input: ModelInput) -> str:
    """A sentence on the kind of an input, and on its first consumer."""
    value = model_input.value
    sizes = [size if isinstance(size, int) else size.value or "?" for size in value.shape or ()]
    sentence = f"input {value.name or 'unnamed'} [{', '.join(map(str, sizes))}] is"
    if model_input.kind == "tokens":
        return f"{sentence} tokens: it is looked up in a table of vectors"
    consumer = _about_convolution(facts, model_input.convolution)
    if not consumer:
        return f"{sentence} numbers that enter no convolution first"
    kind = "an image" if model_input.kind == "image" else "a signal or spectrum over time"
    return f"{sentence} {kind}: it {consumer}"


def _about_convolution(facts: GraphFacts, convolution: ir.Node | None) -> str:
    """The use of an input by its first convolution; empty if it has none of known size."""
    if convolution is None:
        return ""
    weight_shape = facts.shape(convolution.inputs[1]) or ()
    kernel = [size for size in weight_shape[2:] if isinstance(size, int)]
    if not kernel:
        return ""
    strides = [*(convolution.attributes.get_ints("strides") or (1,) * len(kernel))]
    width = "x".join(map(str, kernel))
    if kernel == strides and min(kernel) > 1:
        return f"is cut in patches of {width}"
    stride = "x".join(map(str, strides))
    return f"enters a convolution of {width}, stride {stride}"
