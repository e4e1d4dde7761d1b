"""Which parts of a model go to a device with limited memory, so that it does most of the work and few tensors cross.

Choosing the parts is a knapsack problem on top of a graph cut: both are hard in general. Here they are solved exactly
by a dynamic program over the parts in order of execution. After each part, the only thing that matters of the choices
before it is, for every tensor and weight that later parts use too, on which side it is: a few, as most tensors live
shortly. Of all choices with the same sides, those remain that no other one beats in all of memory, work and crossings.
Equal blocks have equal numbers, so that these are few, too. If they become too many, those with as many crossings are
compared in steps of 1/64 of the memory, and the result is only nearly the best; a choice that does not fit is never
taken.

The peak of activations is no sum. Each value that it may have is tried as a limit: parts with a higher peak stay
outside, and what is left of the memory is for weights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from htp_export.model.boundaries import OUTSIDE
from htp_export.model.parts import PartTensor

__all__ = ["Item", "fill"]

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


class _Choice(NamedTuple):
    """A choice for the items so far."""

    used: int
    crossings: int
    work: int
    before: _Choice | None
    on_device: bool


_Sides: TypeAlias = tuple[tuple[int, str], ...]
"""For each tensor and shared weight that is still used: its number, and what of it is known."""


def fill(items: Sequence[Item], tensors: Iterable[PartTensor], memory: int, slack: float = 0.1) -> list[int]:
    """Choose the items that go to the device.

    First the most work is found that fits. Then, of all choices with at least ``1 - slack`` of that work, the one with
    the fewest crossings is taken; of several, the one with the most work.

    Args:
        items: The items, in order of execution.
        tensors: What they give each other and the rest: it crosses if its producer and a consumer are not on one side.
        memory: Bytes for the weights of the chosen items and the highest of their peaks.
        slack: Which part of the work may be given up for fewer crossings.

    Returns:
        The numbers of the chosen items, in order; empty if none fits.

    Examples:
        >>> items = [Item({k: 10}, peak=5, work=1) for k in range(4)]
        >>> chain = [PartTensor(k - 1, frozenset([k])) for k in range(4)] + [PartTensor(3, frozenset([OUTSIDE]))]
        >>> fill(items, chain, 25), fill(items, chain, 14)
        ([0, 1], [])
    """
    nets = _merged(tensors)
    limits = _limits(items, memory)
    most = {limit: max(choice.work for choice in _Program(items, (), limit, memory - limit).run(0)) for limit in limits}
    if not most:
        return []
    least = max(1, round(max(most.values()) * (1 - slack)))
    best: _Choice | None = None
    for limit in sorted((limit for limit in limits if most[limit] >= least), key=lambda limit: (-most[limit], limit)):
        program = _Program(items, nets, limit, memory - limit)
        found = program.run(least, most_crossings=math.inf if best is None else best.crossings)
        best = min((choice for choice in (best, *found) if choice is not None), key=_order)
    assert best is not None
    return _chosen(best)


def _limits(items: Sequence[Item], memory: int) -> set[int]:
    """The values that the highest peak may have; where they are many, those at the steps of the memory."""
    limits = {item.peak for item in items if item.peak + sum(item.weights.values()) <= memory}
    if len(limits) <= _MOST_LIMITS:
        return limits
    highest: dict[int, int] = {}
    for limit in limits:
        step = limit * _MOST_LIMITS // max(memory, 1)
        highest[step] = max(highest.get(step, 0), limit)
    return set(highest.values())


def _order(choice: _Choice) -> tuple[int, int, int]:
    return choice.crossings, -choice.work, choice.used


def _chosen(last: _Choice) -> list[int]:
    taken: list[bool] = []
    choice: _Choice | None = last
    while choice is not None and choice.before is not None:
        taken.append(choice.on_device)
        choice = choice.before
    return [number for number, on_device in enumerate(reversed(taken)) if on_device]


class _Net(NamedTuple):
    """Tensors between the same items."""

    producer: int
    consumers: frozenset[int]
    tensors: int

    @property
    def items(self) -> frozenset[int]:
        return (self.consumers | {self.producer}) - {OUTSIDE}


def _merged(tensors: Iterable[PartTensor]) -> list[_Net]:
    count = Counter((tensor.producer, tensor.consumers - {tensor.producer}) for tensor in tensors)
    return [_Net(*key, count[key]) for key in count if key[1]]


class _Program:
    """The dynamic program for one limit on the peak.

    What is known of a tensor: ``""`` nothing, ``f`` its producer is on the device, ``s`` it is not, ``r`` a consumer on
    the device was seen before the producer, ``o`` one that is not, ``ro`` both. Of a shared weight: ``""`` or ``f``.
    """

    def __init__(self, items: Sequence[Item], nets: Sequence[_Net], limit: int, memory: int) -> None:
        self._items, self._memory = items, memory
        self._allowed = [item.peak <= limit for item in items]
        self._nets = [net for net in nets if net.items]
        self._touching: defaultdict[int, list[int]] = defaultdict(list)
        self._last: list[int] = []
        for number, net in enumerate(self._nets):
            for place in net.items:
                self._touching[place].append(number)
            self._last.append(max(net.items))
        self._own = [0] * len(items)
        self._shared: dict[int, int] = {}  # number, after those of the nets → bytes
        self._weigh()

    def _weigh(self) -> None:
        readers: defaultdict[object, list[int]] = defaultdict(list)
        sizes: dict[object, int] = {}
        for number, item in enumerate(self._items):
            for weight, size in item.weights.items():
                readers[weight].append(number)
                sizes[weight] = size
        alike: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for weight, numbers in readers.items():
            alike[tuple(numbers)] += sizes[weight]
        for places, size in alike.items():
            if len(places) == 1:
                self._own[places[0]] += size
                continue
            group = len(self._nets) + len(self._shared)
            self._shared[group] = size
            self._last.append(places[-1])
            for place in places:
                self._touching[place].append(group)

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
                    key, step = self._step(number, dict(sides), on_device)
                    after[key] += [
                        made
                        for choice in choices
                        if (made := _added(choice, step)).used <= self._memory
                        and made.work + left >= least
                        and made.crossings <= most_crossings
                    ]
            states = {key: _unbeaten(choices, self._memory) for key, choices in after.items()}
        return [choice for choices in states.values() for choice in choices]

    def _step(self, number: int, sides: dict[int, str], on_device: bool) -> tuple[_Sides, _Choice]:
        """The sides after an item, and what it adds."""
        item = self._items[number]
        used, crossings = (self._own[number] if on_device else 0), 0
        for net in self._touching[number]:
            before = sides.get(net, "")
            if net in self._shared:
                if on_device and not before:
                    used, sides[net] = used + self._shared[net], "f"
            else:
                known, crosses = _seen(self._nets[net], number, before, on_device)
                sides[net] = known
                if crosses:
                    crossings += self._nets[net].tensors
            if self._last[net] <= number:
                sides.pop(net, None)
        step = _Choice(used, crossings, item.work if on_device else 0, None, on_device)
        return tuple(sorted((net, known) for net, known in sides.items() if known)), step


_CROSSED = "x"


def _seen(net: _Net, number: int, before: str, on_device: bool) -> tuple[str, bool]:
    """What is known of a net after an item, and whether it is known only now that it crosses."""
    if before == _CROSSED:
        return before, False
    if number == net.producer:
        inside, outside = "r" in before, "o" in before or OUTSIDE in net.consumers
        crosses, known = (outside, "f") if on_device else (inside, "s")
    else:
        side = "s" if net.producer == OUTSIDE else before if before in ("f", "s") else ""
        known = side or "".join(sorted({*before, "r" if on_device else "o"}, reverse=True))
        crosses = bool(side) and (side == "f") != on_device
    return (_CROSSED, True) if crosses else (known, False)


def _added(choice: _Choice, step: _Choice) -> _Choice:
    return _Choice(
        choice.used + step.used,
        choice.crossings + step.crossings,
        choice.work + step.work,
        choice,
        step.on_device,
    )


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
