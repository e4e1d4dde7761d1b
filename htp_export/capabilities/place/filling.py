"""Which parts of a model go to a device with limited memory, so that it does most of the work and few tensors cross.

This is a knapsack problem on top of a graph cut. A dynamic program over the parts in order of execution solves it: of
the choices before a part, all that matters is on which side the tensors and weights are that later parts use. Of the
choices with the same sides, those remain that no other one beats in all of memory, work and crossings. If they become
too many, those with as many crossings are compared in steps of 1/64 of the memory, and the result is nearly the best.

The peak of activations is no sum. Each value that it may have is tried as a limit: parts with a higher peak stay
outside, and what is left of the memory is for weights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from htp_export.model.boundaries import OUTSIDE
from htp_export.model.parts import PartTensor

_MOST = 500  # choices that are kept for the same sides of tensors
_STEPS = 64
_MOST_LIMITS = 16


@dataclass(frozen=True)
class Item:
    """A part that is on the device as a whole, or not at all.

    Attributes:
        weights: Weight → bytes. A weight of several items needs memory once.
        peak: Bytes of activations while it runs.
        work: What the device saves if it runs there.
    """

    weights: Mapping[object, int]
    peak: int
    work: int

    @property
    def memory(self) -> int:
        """The bytes that it needs by itself."""
        return self.peak + sum(self.weights.values())


class _Choice(NamedTuple):
    """A choice for the items so far."""

    used: int
    crossings: int
    work: int
    before: _Choice | None
    on_device: bool


_Sides: TypeAlias = tuple[tuple[int, bool | None], ...]
"""Number of each tensor and shared weight that is still used → whether it is on the device; None if it crosses."""


def fill(items: Sequence[Item], tensors: Iterable[PartTensor], memory: int, slack: float = 0.1) -> list[int]:
    """Choose the items that go to the device.

    First the most work is found whose weights fit into the memory, with the highest of its peaks. Then, of all choices
    with at least ``1 - slack`` of that work, the one with the fewest crossings is taken; of several, the one with the
    most work. A tensor crosses if the items that make and read it are not all on one side. The items are in order of
    execution; the numbers of the chosen ones are returned, none if nothing fits.

    Examples:
        >>> items = [Item({k: 10}, peak=5, work=1) for k in range(4)]
        >>> chain = [PartTensor(k - 1, frozenset([k])) for k in range(4)] + [PartTensor(3, frozenset([OUTSIDE]))]
        >>> fill(items, chain, 25), fill(items, chain, 14)
        ([0, 1], [])
    """
    nets = Counter(tensor.consumers | {tensor.producer} for tensor in tensors)
    limits = _limits(items, memory)
    most = {limit: max(choice.work for choice in _Program(items, {}, limit, memory).run(0)) for limit in limits}
    if not most:
        return []
    least = max(1, round(max(most.values()) * (1 - slack)))
    best: list[_Choice] = []
    for limit in sorted((limit for limit in limits if most[limit] >= least), key=lambda limit: (-most[limit], limit)):
        program = _Program(items, nets, limit, memory)
        found = program.run(least, most_crossings=best[0].crossings if best else math.inf)
        best = [min(best + found, key=lambda choice: (choice.crossings, -choice.work, choice.used))]
    taken: list[bool] = []
    choice = best[0]
    while choice.before is not None:
        taken.append(choice.on_device)
        choice = choice.before
    return [number for number, on_device in enumerate(reversed(taken)) if on_device]


def _limits(items: Sequence[Item], memory: int) -> set[int]:
    """The values that the highest peak may have; where they are many, those at the steps of the memory."""
    limits = {item.peak for item in items if item.memory <= memory}
    if len(limits) <= _MOST_LIMITS:
        return limits
    highest: dict[int, int] = {}
    for limit in limits:
        step = limit * _MOST_LIMITS // max(memory, 1)
        highest[step] = max(highest.get(step, 0), limit)
    return set(highest.values())


class _Program:
    """The dynamic program for one limit on the peak; ``nets``: items of the same tensors → how many tensors."""

    def __init__(self, items: Sequence[Item], nets: Mapping[frozenset[int], int], limit: int, memory: int) -> None:
        self._items, self._memory = items, memory - limit
        self._allowed = [item.peak <= limit for item in items]
        self._touching: defaultdict[int, list[int]] = defaultdict(list)
        self._last: list[int] = []
        self._tensors: list[int] = []
        self._outside: set[int] = set()  # nets of which a part is never on the device
        for parts, tensors in nets.items():
            if len(parts) > 1:
                number = self._touch(parts - {OUTSIDE})
                self._tensors.append(tensors)
                if OUTSIDE in parts:
                    self._outside.add(number)
        self._own = [0] * len(items)
        self._shared: dict[int, int] = {}  # number, after those of the nets → bytes
        readers: defaultdict[object, list[int]] = defaultdict(list)
        for number, item in enumerate(items):
            for weight in item.weights:
                readers[weight].append(number)
        alike: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for weight, numbers in readers.items():
            alike[tuple(numbers)] += items[numbers[-1]].weights[weight]
        for places, size in alike.items():
            if len(places) == 1:
                self._own[places[0]] += size
            else:
                self._shared[self._touch(places)] = size

    def _touch(self, places: Collection[int]) -> int:
        """Note which items a net or a shared weight belongs to; its number."""
        number = len(self._last)
        self._last.append(max(places))
        for place in places:
            self._touching[place].append(number)
        return number

    def run(self, least: int, most_crossings: float = math.inf) -> list[_Choice]:
        """The choices that no other one beats, with the least work or more and so many crossings or fewer."""
        left = sum(item.work for item, allowed in zip(self._items, self._allowed, strict=True) if allowed)
        states: dict[_Sides, list[_Choice]] = {(): [_Choice(0, 0, 0, None, False)]}
        for number, item in enumerate(self._items):
            if self._allowed[number]:
                left -= item.work
            after: defaultdict[_Sides, list[_Choice]] = defaultdict(list)
            for sides, choices in states.items():
                for on_device in (False, True) if self._allowed[number] else (False,):
                    key, used, crossings = self._step(number, dict(sides), on_device)
                    work = item.work if on_device else 0
                    after[key] += [
                        _Choice(before.used + used, before.crossings + crossings, before.work + work, before, on_device)
                        for before in choices
                        if before.used + used <= self._memory
                        and before.work + work + left >= least
                        and before.crossings + crossings <= most_crossings
                    ]
            states = {key: _unbeaten(choices, self._memory) for key, choices in after.items()}
        return [choice for choices in states.values() for choice in choices]

    def _step(self, number: int, sides: dict[int, bool | None], on_device: bool) -> tuple[_Sides, int, int]:
        """The sides after an item, and the memory and the crossings that it adds."""
        used, crossings = (self._own[number] if on_device else 0), 0
        for net in self._touching[number]:
            if net in self._shared:
                if on_device and net not in sides:
                    used, sides[net] = used + self._shared[net], True
            else:
                before = sides.get(net, False if net in self._outside else on_device)
                sides[net] = on_device if before is on_device else None
                crossings += self._tensors[net] if sides[net] is None and before is not None else 0
            if self._last[net] <= number:
                sides.pop(net, None)
        return tuple(sorted(sides.items())), used, crossings


def _unbeaten(choices: list[_Choice], memory: int) -> list[_Choice]:
    """The choices of which no other one has as little memory and crossings, and as much work."""
    kept: list[_Choice] = []
    used: list[int] = []  # increasing, and with it the work: the best of those with as few crossings
    work: list[int] = []
    for choice in sorted(choices, key=lambda each: (each.crossings, each.used, -each.work)):
        place = bisect_right(used, choice.used)
        if place and work[place - 1] >= choice.work:
            continue
        kept.append(choice)
        end = place
        while end < len(work) and work[end] <= choice.work:
            end += 1
        start = place - 1 if place and used[place - 1] == choice.used else place
        used[start:end], work[start:end] = [choice.used], [choice.work]
    return kept if len(kept) <= _MOST else _thinned(kept, memory)


def _thinned(choices: list[_Choice], memory: int) -> list[_Choice]:
    best: dict[tuple[int, int], _Choice] = {}
    for choice in choices:
        key = choice.crossings, choice.used * _STEPS // max(memory, 1)
        if key not in best or best[key].work < choice.work:
            best[key] = choice
    return list(best.values())
