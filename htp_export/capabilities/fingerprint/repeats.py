"""Equal pieces of the chain from an input to the outputs, for graphs without tags.

A node is a *link* of the chain if every path from the input to the end contains it: the additions of residual
connections, and all nodes outside of branches. Pieces are between links. Blocks are repeated runs of pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.fingerprint.detectors.inputs import ModelInputs
from htp_export.model.dependence import dependence, reads_and_results
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.structural_hash import Hasher

__all__ = ["holds_weights", "repeated_pieces"]

_LEAST_NODES = 5
_LONGEST_CHAIN = 4096  # pieces; what comes after is not looked at
_WEIGHED = frozenset((
    "Attention", "Conv", "ConvInteger", "ConvTranspose", "FusedConv", "FusedMatMul", "GRU", "Gemm", "LSTM", "MatMul",
    "MatMulInteger", "MatMulNBits", "MultiHeadAttention", "QLinearConv", "QLinearMatMul", "RNN"
))  # fmt: skip


def repeated_pieces(facts: GraphFacts) -> list[list[tuple[ir.Node, ...]]]:
    """Consecutive equal blocks, each with the nodes of every repetition."""
    hasher, repeated, taken = Hasher(facts), list[list[tuple[ir.Node, ...]]](), set[ir.Node]()
    for model_input in ModelInputs(facts).data:
        pieces = _chain(facts, model_input.value)[:_LONGEST_CHAIN]
        keys = [hasher.part(piece) for piece in pieces]
        for start, period, count in _runs(keys, [len(piece) for piece in pieces]):
            ranges = [pieces[start + k * period : start + (k + 1) * period] for k in range(count)]
            blocks = [tuple(node for piece in block for node in piece) for block in ranges]
            telling = any(map(holds_weights, blocks[0]))
            if len(blocks[0]) >= _LEAST_NODES and telling and taken.isdisjoint(blocks[0]):
                repeated.append(blocks)
                taken.update(node for block in blocks for node in block)
    return repeated


def holds_weights(node: ir.Node) -> bool:
    """Whether a node has an operator with weights or attention, as every block has."""
    return node.op_type in _WEIGHED


def _chain(facts: GraphFacts, start: ir.Value) -> list[tuple[ir.Node, ...]]:
    """The pieces between links, in order."""
    nodes = _between(facts, start)
    place = {node: k for k, node in enumerate(nodes)}
    pieces: list[tuple[ir.Node, ...]] = []
    first, furthest = 0, max((place[use.node] for use in start.uses() if use.node in place), default=0)
    for k, node in enumerate(nodes):
        if furthest <= k:  # no edge from before leads past this node
            pieces.append(tuple(nodes[first : k + 1]))
            first = k + 1
        furthest = max(furthest, *(place[reader] for reader in node.successors() if reader in place), k)
    return [piece for piece in (*pieces, tuple(nodes[first:])) if piece]


def _between(facts: GraphFacts, start: ir.Value) -> list[ir.Node]:
    """The nodes on paths from a value to the outputs of the graph, in order; paths through sizes do not count."""
    graph = facts.tagged.model.graph
    starts: dict[ir.Value | None, int] = {start: 1}
    reached = dependence(reads_and_results(graph), starts)
    ahead = [node for node in graph if any(value in reached for value in node.outputs)]
    useful: set[ir.Node] = set()
    for node in reversed(ahead):
        leaves = any(value.is_graph_output() for value in node.outputs)
        if leaves or any(reader in useful for reader in node.successors()):
            useful.add(node)
    return [node for node in ahead if node in useful]


def _runs(keys: Sequence[str], weights: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Repetitions in a sequence: start, period and count; the largest first, without overlaps."""
    numbers = np.unique(np.array(keys, dtype=object).astype(str), return_inverse=True)[1] if keys else np.zeros(0, int)
    pending = [(0, len(numbers))]
    while pending:
        low, high = pending.pop()
        best = _best_run(numbers[low:high], np.asarray(weights[low:high]))
        if best is None:
            continue
        start, period, count = best
        yield low + start, period, count
        pending += [(low, low + start), (low + start + period * count, high)]


def _best_run(numbers: np.ndarray, weights: np.ndarray) -> tuple[int, int, int] | None:
    """The repetition that covers most nodes; of equal ones, that with the shortest period."""
    total = np.concatenate([[0], np.cumsum(weights)])
    best: tuple[int, int, int] | None = None
    covered = 0
    for period in range(1, len(numbers) // 2 + 1):
        same = np.concatenate([[0], (numbers[:-period] == numbers[period:]).astype(int), [0]])
        edges = np.flatnonzero(np.diff(same))
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            count = (end - begin) // period + 1
            if count < 2:
                continue
            weight = int(total[begin + period * count] - total[begin])
            if weight > covered:
                best, covered = (begin, period, count), weight
    return best
