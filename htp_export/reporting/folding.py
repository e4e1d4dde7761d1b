"""Runs of equal siblings, ``layer.0`` to ``layer.11``, which tables and pages draw once.

Their names end in consecutive numbers, and all of their descendants are equal.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def likeness(
    class_name: str,
    calls: int,
    fate: str,
    nodes: int,
    parameters: int,
    flops: float | None,
    status: str | None,
) -> Hashable:
    """The properties of a module, without its children, that equal siblings share.

    Times and errors are not among them: they differ between equal modules.
    """
    return (class_name, calls, fate, nodes, parameters, flops, status or "")


def folded(
    parents: Mapping[str, str | None], key: Callable[[str], Hashable]
) -> dict[str | None, list[list[str]]]:
    """The children of each module of a tree (None: the top level), in runs of equal siblings.

    Most runs contain a single module. ``parents`` is a result of `drawn_parents`; ``key`` returns
    the properties that equal modules share, without their children.

    Examples:
        >>> tree = {"": None, "layer.0": "", "layer.0.fc": "layer.0", "layer.1": "", "layer.1.fc": "layer.1"}
        >>> folded(tree, key=lambda path: path.count("."))[""]
        [['layer.0', 'layer.1']]
    """
    below: dict[str | None, list[str]] = {None: [], **{path: [] for path in parents}}
    for path, parent in parents.items():
        below[parent].append(path)
    identities = _identities(parents, below, key)
    runs: dict[str | None, list[list[str]]] = {path: [] for path in below}
    for parent, siblings in below.items():
        for path in siblings:
            last = runs[parent][-1] if runs[parent] else None
            if (
                last is not None
                and _follows(last[-1], path)
                and identities[last[-1]] == identities[path]
            ):
                last.append(path)
            else:
                runs[parent].append([path])
    return runs


def _identities(
    parents: Mapping[str, str | None],
    below: Mapping[str | None, Sequence[str]],
    key: Callable[[str], Hashable],
) -> dict[str, int]:
    """Number the modules so that modules with equal properties and descendants share a number."""
    numbers: dict[Hashable, int] = {}
    identities: dict[str, int] = {}
    # The path of a parent is shorter: children come first.
    for path in sorted(parents, key=len, reverse=True):
        children = tuple(
            (child.removeprefix(f"{path}."), identities[child]) for child in below[path]
        )
        identities[path] = numbers.setdefault((key(path), children), len(numbers))
    return identities


def repeats(parents: Mapping[str, str | None], key: Callable[[str], Hashable]) -> list[list[int]]:
    """The runs of two or more siblings, as in `folded`, outermost first; not at the top level.

    A run is a list of positions in ``parents``.
    """
    positions = {path: position for position, path in enumerate(parents)}
    repeated: list[list[int]] = []
    for parent, runs in folded(parents, key).items():
        if parent is None:
            continue
        for run in runs:
            places = [positions[path] for path in run]
            if len(places) > 1:
                repeated.append(places)
    return repeated


def gathered(
    rows: Iterable[T], path: Callable[[T], str], key: Callable[[T], Hashable]
) -> list[tuple[str, list[T]]]:
    """Group equal rows whose paths differ in one number only; return common name and rows.

    Examples:
        >>> paths = ["layer.0.fc", "layer.0.act", "layer.1.fc", "layer.1.act", "layer.3.act", "head"]
        >>> [name[:9] for name, _ in gathered(paths, path=str, key=lambda path: path == "layer.3.act")]
        ['layer.0…1', 'layer.0…1', 'layer.3.a', 'head']
    """
    listed = list(rows)
    # A row can join any group of its path with one number left out; it joins the largest.
    keys: list[list[tuple[tuple[str | None, ...], Hashable]]] = []
    for row in listed:
        identity = key(row)
        keys.append([(pattern, identity) for pattern in _without_a_number(path(row))])
    sizes = Counter(itertools.chain.from_iterable(keys))
    groups: dict[Hashable, list[T]] = {}
    patterns: dict[Hashable, Sequence[str | None]] = {}
    for number, (row, row_keys) in enumerate(zip(listed, keys, strict=True)):
        best = max(row_keys, key=sizes.__getitem__, default=None)
        group_key: Hashable = best if best is not None and sizes[best] > 1 else number
        groups.setdefault(group_key, []).append(row)
        if best is not None:
            patterns[group_key] = best[0]
    named: list[tuple[str, list[T]]] = []
    for group_key, group in groups.items():
        paths = [path(row) for row in group]
        name = paths[0] if len(group) == 1 else _together(patterns[group_key], paths)
        named.append((name, group))
    return named


def _without_a_number(path: str) -> list[tuple[str | None, ...]]:
    """The parts of a path, once with each of its numbers left out."""
    parts = path.split(".")
    return [(*parts[:k], None, *parts[k + 1 :]) for k, part in enumerate(parts) if part.isdecimal()]


def _together(pattern: Sequence[str | None], paths: Sequence[str]) -> str:
    """The common name of paths that differ only in the number that a pattern leaves out."""
    place = pattern.index(None)
    numbers = sorted(int(path.split(".")[place]) for path in paths)
    name = ".".join(_ranges(numbers) if part is None else part for part in pattern)
    return f"{name} × {len(paths)}"  # noqa: RUF001 - "times"


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, with a range for consecutive ones: ``0…2,4,6…7``."""
    ranges = list[str]()
    first = None
    for index, number in enumerate(numbers):
        if first is None:
            first = number
        is_last = index + 1 == len(numbers) or numbers[index + 1] != number + 1
        if is_last:
            ranges.append(f"{first}…{number}" if first < number else str(first))
            first = None
    return ",".join(ranges)


def _follows(name: str, following: str) -> bool:
    """Whether two names end in consecutive numbers, such as ``layer.3`` and ``layer.4``."""
    stem, _, number = name.rpartition(".")
    following_stem, _, successor = following.rpartition(".")
    if stem != following_stem or not (number.isdecimal() and successor.isdecimal()):
        return False
    return int(successor) == int(number) + 1
