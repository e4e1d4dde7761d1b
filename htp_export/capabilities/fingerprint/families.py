"""Fingerprint: the family of architectures that a graph belongs to, why, and the blocks that it repeats.

Only mechanisms count: what the graph does to its inputs. Names of models, modules and tensors say
nothing.
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

_LEAST_NODES = 3  # of a module
_LEAST_IN_PIECES = 5  # nodes of a block without modules: fewer repeat by chance
_LONGEST_CHAIN = 4096  # pieces; what comes after is not looked at
_WEIGHED = frozenset((
    "Attention", "Conv", "ConvInteger", "ConvTranspose", "FusedConv", "FusedMatMul", "GRU", "Gemm", "LSTM", "MatMul",
    "MatMulInteger", "MatMulNBits", "MultiHeadAttention", "QLinearConv", "QLinearMatMul", "RNN"
))  # fmt: skip
"""Operators with weights or attention, of which every block has one."""
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
"""Operators that give a block its name where no class does."""


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
        where = (self.modules or self.starts)[0]
        return f"{self.count:5} × {self.name}, {self.nodes} nodes each: {where}"  # noqa: RUF001 - "times"


def repeated_blocks(facts: GraphFacts) -> tuple[Block, ...]:
    """The structures that a graph repeats, those that make up most of it first.

    Parts of a repeated block are no blocks of their own, unless each block has several of them.
    """
    blocks = list(_modules(facts)) if facts.tagged.source != "none" else []
    return tuple(sorted(blocks or _pieces(facts), key=lambda block: -block.count * block.nodes))


def _modules(facts: GraphFacts) -> Iterator[Block]:
    tagged, hasher = facts.tagged, Hasher(facts)
    groups: defaultdict[str, list[Region]] = defaultdict(list)
    for path in tagged.paths:
        region = tagged[path]
        if (
            path
            and region.calls
            and len(region.nodes) >= _LEAST_NODES
            and _holds_weights(region.nodes)
        ):
            groups[hasher.region(path)].append(region)
    repeated = {key: regions for key, regions in groups.items() if _runs_of(regions) > 1}
    group_of = {region.path: key for key, regions in repeated.items() for region in regions}

    def around(region: Region) -> str | None:
        return group_of.get(tags.nearest_above(region.path, group_of) or "")

    for regions in repeated.values():
        inside = Counter(map(around, regions))
        several = {
            key for key, count in inside.items() if key is not None and count > len(repeated[key])
        }
        kept = [
            region
            for region in regions
            if around(region) is None or (region.children and around(region) in several)
        ]
        if _runs_of(kept) > 1:
            names = dict.fromkeys(
                region.info.simple_class or region.path.rpartition(".")[2] for region in kept
            )
            size = len(kept[0].nodes) // max(kept[0].calls, 1)
            paths = tuple(region.path for region in kept)
            yield Block(
                _runs_of(kept),
                " / ".join(names),
                paths,
                size,
                _starts(region.nodes for region in kept),
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
    for given in model_inputs(facts):
        pieces = _chain(facts, given.value)[:_LONGEST_CHAIN] if given.kind != "control" else []
        keys = [hasher.part(piece) for piece in pieces]
        for start, period, count in _repetitions(keys, [len(piece) for piece in pieces]):
            ranges = [pieces[start + k * period : start + (k + 1) * period] for k in range(count)]
            parts = [[node for piece in part for node in piece] for part in ranges]
            if (
                len(parts[0]) >= _LEAST_IN_PIECES
                and _holds_weights(parts[0])
                and taken.isdisjoint(parts[0])
            ):
                taken.update(node for part in parts for node in part)
                counts = Counter(node.op_type for node in parts[0])
                named = [(op, counts[op]) for op in _TELLING if counts[op]] or counts.most_common(3)
                name = ", ".join(f"{number} {op}" for op, number in named)
                yield Block(count, name, (), len(parts[0]), _starts(parts))


def _chain(facts: GraphFacts, start: ir.Value) -> list[list[ir.Node]]:
    """The pieces between the nodes that every path from an input to the end contains, in order."""
    nodes = _between(facts, start)
    place = {node: k for k, node in enumerate(nodes)}
    pieces: list[list[ir.Node]] = []
    first, furthest = (
        0,
        max((place[use.node] for use in start.uses() if use.node in place), default=0),
    )
    for k, node in enumerate(nodes):
        if furthest <= k:  # no edge from before leads past this node
            pieces.append(nodes[first : k + 1])
            first = k + 1
        furthest = max(
            furthest, *(place[reader] for reader in node.successors() if reader in place), k
        )
    return [piece for piece in (*pieces, nodes[first:]) if piece]


def _between(facts: GraphFacts, start: ir.Value) -> list[ir.Node]:
    """The nodes on paths from a value to the outputs of the graph, in order; paths through sizes do not count."""
    graph = facts.tagged.model.graph
    starts: dict[ir.Value | None, int] = {start: 1}
    reached = dependence(reads_and_results(graph), starts)
    useful: dict[ir.Node, None] = {}
    for node in reversed(graph):
        leaves = any(value.is_graph_output() for value in node.outputs)
        if any(value in reached for value in node.outputs) and (
            leaves or any(n in useful for n in node.successors())
        ):
            useful[node] = None
    return list(reversed(useful))


def _repetitions(keys: Sequence[str], weights: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Repetitions in a sequence: start, period and count; the largest first, without overlaps."""
    numbers = (
        np.unique(np.array(keys, dtype=object).astype(str), return_inverse=True)[1]
        if keys
        else np.zeros(0, int)
    )
    pending = [(0, len(numbers))]
    while pending:
        low, high = pending.pop()
        best = _best_repetition(numbers[low:high], np.asarray(weights[low:high]))
        if best is not None:
            start, period, count = best
            yield low + start, period, count
            pending += [(low, low + start), (low + start + period * count, high)]


def _best_repetition(numbers: np.ndarray, weights: np.ndarray) -> tuple[int, int, int] | None:
    """The repetition that covers most nodes; of equal ones, that with the shortest period."""
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
        blocks: Repeated structures, those with the largest part of the model first.
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
        """The evidence, the blocks, and what is known about tags."""
        return (*(f"  {fact}" for fact in self.evidence), *map(str, self.blocks), *super().lines)


def _hears(seen: GraphFeatures) -> bool:
    """Whether there is a signal, or a spectrum that enters layers of speech models."""
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
"""Family → the evidence that decides, and what it has to be; the first family that applies counts."""

FAMILIES = tuple(_RULES)
"""What `Fingerprint.family` can be."""


@names_model_faults("model")
def fingerprint(model: ModelSource) -> Fingerprint:
    """Classify the architecture of a model, and find the blocks that it repeats.

    The first of `FAMILIES` whose evidence is there counts, so that a speech model with an encoder
    and a decoder is ``speech``. ``docs/fingerprint.md`` has what tells each, and the accuracy.

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
    family, (first, _) = next((name, rule) for name, rule in _RULES.items() if rule[1](seen))
    sentences = _evidence(seen)
    evidence = (*sentences.pop(first), *itertools.chain.from_iterable(sentences.values()))
    return Fingerprint(
        family, evidence, repeated_blocks(GraphFacts(tagged)), len(tagged.nodes), tagged.tag_facts
    )


def _evidence(seen: GraphFeatures) -> dict[str, list[str]]:
    attentions = ", ".join(f"{count} {kind}" for kind, count in seen.attentions.most_common())
    wide = (
        f"{count} in {many(dims, 'dimension')}" for dims, count in sorted(seen.convolutions.items())
    )
    unrolled = (
        f"loops over {max(seen.loops, default=0)} steps, unrolled, over {len(seen.loops)} tensors"
    )
    return {
        "time": [
            f"input {name} is a time step: its sines and cosines enter a linear layer"
            for name in seen.time_steps
        ],
        "routing": [
            f"{len(seen.routers)} routers: each position chooses {chosen or 'some'} of {experts} experts"
            for chosen, experts in seen.routers[:1]
        ],
        "recurrence": [
            *(f"{count} {op}" for op, count in seen.recurrent.most_common()),
            *[unrolled][: len(seen.loops)],
        ],
        "attention": [f"{seen.attentions.total()} attentions: {attentions}"] if attentions else [],
        "inputs": [_about(seen.facts, given) for given in seen.inputs if given.kind != "control"],
        "convolution": [
            f"{seen.convolutions.total()} convolutions wider than a point: {', '.join(wide)}"
        ]
        if seen.convolutions
        else [],
    }


def _about(facts: GraphFacts, given: ModelInput) -> str:
    sizes = ", ".join(
        str(size if isinstance(size, int) else size.value or "?")
        for size in given.value.shape or ()
    )
    sentence = f"input {given.value.name or 'unnamed'} [{sizes}] is"
    if given.kind == "tokens":
        return f"{sentence} tokens: it is looked up in a table of vectors"
    first = given.convolution
    shape = None if first is None else facts.shape(first.inputs[1])
    kernel = [size for size in (shape or ())[2:] if isinstance(size, int)]
    if first is None or not kernel:
        return f"{sentence} numbers that enter no convolution first"
    strides = [*(first.attributes.get_ints("strides") or (1,) * len(kernel))]
    wide, stride = ("x".join(map(str, sizes)) for sizes in (kernel, strides))
    patches = kernel == strides and min(kernel) > 1
    how = (
        f"is cut in patches of {wide}"
        if patches
        else f"enters a convolution of {wide}, stride {stride}"
    )
    return f"{sentence} {'an image' if given.kind == 'image' else 'a signal or spectrum over time'}: it {how}"
