"""What the regions of a model compute, to compare them with one another and with those of another model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts
from htp_export.model.region_digests import RegionDigests
from htp_export.model.structural_hash import Hasher

__all__ = ["Structure", "structures"]

_BITS = (1 << 64) - 1


class Structure:
    """What a region computes: operators, wiring, attributes, shapes and types of weights.

    Two structures are equal if their digests are. Most regions are told apart, or found equal, by sums over their nodes
    and edges; only if these leave it open are digests computed, those of all regions together.

    Attributes:
        kinds: A sum over nodes by what they do and edges between such; equal digests have equal sums.
        places: The same, with the place of each node among those of its module; where regions of one path have equal
            sums, their nodes correspond one by one, and so do their edges.
    """

    def __init__(self, path: str, digests: RegionDigests, sums: tuple[int, int]) -> None:
        self.kinds, self.places = sums
        self._path, self._digests = path, digests

    @property
    def digest(self) -> str:
        """The hash of the region: the same in every process."""
        return self._digests[self._path]

    def __hash__(self) -> int:
        return hash(self.kinds)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure) or self.kinds != other.kinds:
            return False
        return (self._path, self.places) == (other._path, other.places) or self.digest == other.digest


def structures(facts: GraphFacts, paths: Iterable[str]) -> dict[str, Structure]:
    """The structures of some regions of a model; ``""`` is all of it.

    Args:
        facts: The model, as it is now.
        paths: Module paths.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.Tanh()).eval()
        >>> facts = GraphFacts(htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False)))
        >>> found = structures(facts, ["0", "1", "2"])
        >>> found["0"] == found["1"], found["1"] == found["2"]
        (True, False)
    """
    hasher = Hasher(facts)
    sums, digests = _Sums(facts, hasher).by_path, RegionDigests(facts, hasher)
    return {path: Structure(path, digests, sums.get(path, (0, 0))) for path in paths}


class _Sums:
    """Module path → what `Structure` holds of its region.

    A node counts in every region that it is in, and an edge in every region that both its ends are in; in one that has
    the reader alone it counts as something that enters.
    """

    def __init__(self, facts: GraphFacts, hasher: Hasher) -> None:
        index = facts.tagged.index
        inside = {node: work.modules for node, work in index.works.items()}
        both_totals = (_Totals(), _Totals())  # of kinds, and of places
        ordinals: Counter[tuple[str, ...]] = Counter()
        named: dict[ir.Node, tuple[int, int]] = {}
        for node in index.nodes:
            owners = index.owners[node]
            ordinals[owners] += 1
            kind = hash(hasher.node(node))
            named[node] = (kind, hash((kind, owners, ordinals[owners])))
            for name, totals in zip(named[node], both_totals, strict=True):
                totals.add(inside[node], hash((name, len(node.outputs))))
        for node in index.nodes:
            for place, (value, leaf) in enumerate(hasher.inputs(node)):
                producer = None if value is None else value.producer()
                for side, (name, totals) in enumerate(zip(named[node], both_totals, strict=True)):
                    outside = hash((leaf, place, name))
                    totals.add(inside[node], outside)
                    if value is not None and producer in named:
                        edge = hash((named[producer][side], value.index(), place, name))
                        totals.add(_both(inside[producer], inside[node]), edge - outside)
        first, second = (totals.by_path() for totals in both_totals)
        self.by_path: Mapping[str, tuple[int, int]] = {path: (first[path], second[path]) for path in first}


def _both(first: AbstractSet[str], second: AbstractSet[str]) -> AbstractSet[str]:
    return first if first is second else first & second


class _Totals:
    """Numbers that each count in a set of regions, and in the whole."""

    def __init__(self) -> None:
        self._of: defaultdict[AbstractSet[str], int] = defaultdict(int)

    def add(self, regions: AbstractSet[str], number: int) -> None:
        self._of[regions] += number

    def by_path(self) -> dict[str, int]:
        """Module path → the sum of the numbers that count there."""
        sums: defaultdict[str, int] = defaultdict(int)
        for regions, number in self._of.items():
            for path in {"", *regions}:
                sums[path] += number
        return {path: number & _BITS for path, number in sums.items()}
