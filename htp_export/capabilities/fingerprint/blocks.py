"""Blocks that a graph repeats: modules of equal structure, or equal pieces of the chain from input to output."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.capabilities.fingerprint.repeats import holds_weights, repeated_pieces
from htp_export.format import tags
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.structural_hash import RegionHashes
from htp_export.model.tagged import Region

__all__ = ["Block", "repeated_blocks"]

_LEAST_NODES = 3


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


def repeated_blocks(facts: GraphFacts) -> tuple[Block, ...]:
    """The structures that a graph repeats, those that make up most of it first.

    Parts of a repeated block are no blocks of their own, unless each block has several of them.
    """
    blocks = _modules(facts) if facts.tagged.source != "none" else ()
    return tuple(sorted(blocks or _pieces(facts), key=lambda block: -block.count * block.nodes))


def _modules(facts: GraphFacts) -> tuple[Block, ...]:
    tagged = facts.tagged
    hashes = RegionHashes(facts)
    groups: defaultdict[str, list[Region]] = defaultdict(list)
    for path in tagged.paths:
        region = tagged[path]
        if path and region.calls and len(region.nodes) >= _LEAST_NODES and any(map(holds_weights, region.nodes)):
            groups[hashes[path]].append(region)
    repeated = {key: regions for key, regions in groups.items() if _runs(regions) > 1}
    group_of = {region.path: key for key, regions in repeated.items() for region in regions}
    blocks = []
    for regions in repeated.values():
        around = {region: _group_around(region, group_of) for region in regions}
        parts = {
            holding: _is_part_of_each(regions, repeated[holding])
            for holding in set(around.values())
            if holding is not None
        }
        kept = [
            region for region, holding in around.items() if holding is None or (region.children and not parts[holding])
        ]
        if kept and _runs(kept) > 1:
            blocks.append(_block(kept, _runs(kept)))
    return tuple(blocks)


def _runs(regions: Iterable[Region]) -> int:
    return sum(region.calls for region in regions)


def _group_around(region: Region, group_of: Mapping[str, str]) -> str | None:
    """The group of the nearest block that a module lies in."""
    above = tags.nearest_above(region.path, group_of)
    return None if above is None else group_of[above]


def _is_part_of_each(regions: Sequence[Region], blocks: Sequence[Region]) -> bool:
    """Whether no block has several of these modules: they are parts of it, and no blocks of their own."""
    holders = {holder.path for holder in blocks}
    return sum(tags.nearest_above(region.path, holders) is not None for region in regions) <= len(holders)


def _block(regions: list[Region], count: int) -> Block:
    from htp_export.capabilities.forensics.finding import node_name

    names = list(dict.fromkeys(region.info.simple_class or region.path.rpartition(".")[2] for region in regions))
    return Block(
        count=count,
        name=" / ".join(names),
        modules=tuple(region.path for region in regions),
        nodes=len(regions[0].nodes) // max(regions[0].calls, 1),
        starts=tuple(node_name(region.nodes[0]) for region in regions),
    )


def _pieces(facts: GraphFacts) -> tuple[Block, ...]:
    from htp_export.capabilities.forensics.finding import node_name

    return tuple(
        Block(
            count=len(pieces),
            name=_operators(pieces[0]),
            modules=(),
            nodes=len(pieces[0]),
            starts=tuple(node_name(piece[0]) for piece in pieces),
        )
        for pieces in repeated_pieces(facts)
    )


def _operators(nodes: Iterable[ir.Node]) -> str:
    """The operators that hold weights or give a block its name, with how many there are of each."""
    telling = (
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
    counts = Counter(node.op_type for node in nodes)
    parts = [f"{counts[op]} {op}" for op in telling if counts[op]]
    return ", ".join(parts or [f"{count} {op}" for op, count in counts.most_common(3)])
