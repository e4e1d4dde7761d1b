"""Consecutive siblings that are alike, ``layer.0`` to ``layer.11``, which tables and pages draw once.

Their names end in consecutive numbers, and all modules below them are alike.
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
    """What makes two modules alike, apart from what is below them. Times and errors differ between alike modules."""
    return (class_name, calls, fate, nodes, parameters, flops, status or "")


def folded(
    parents: Mapping[str, str | None], alike: Callable[[str], Hashable]
) -> dict[str | None, list[list[str]]]:
    """The modules right below each one of a tree (None: at its top), in runs of alike ones; most hold a single one.

    ``parents`` are those of `drawn_parents`; ``alike`` is what makes modules alike, apart from what
    is below them.

    Examples:
        >>> tree = {"": None, "layer.0": "", "layer.0.fc": "layer.0", "layer.1": "", "layer.1.fc": "layer.1"}
        >>> folded(tree, alike=lambda path: path.count("."))[""]
        [['layer.0', 'layer.1']]
    """
    below: dict[str | None, list[str]] = {None: [], **{path: [] for path in parents}}
    for path, parent in parents.items():
        below[parent].append(path)
    numbers: dict[Hashable, int] = {}
    shapes: dict[str, int] = {}
    for path in sorted(parents, key=len, reverse=True):  # the path of a parent is shorter
        shape = (
            alike(path),
            tuple((child.removeprefix(f"{path}."), shapes[child]) for child in below[path]),
        )
        shapes[path] = numbers.setdefault(shape, len(numbers))
    runs: dict[str | None, list[list[str]]] = {path: [] for path in below}
    for parent, siblings in below.items():
        for path in siblings:
            last = runs[parent][-1] if runs[parent] else None
            if last is not None and _follows(last[-1], path) and shapes[last[-1]] == shapes[path]:
                last.append(path)
            else:
                runs[parent].append([path])
    return runs


def repeats(parents: Mapping[str, str | None], alike: Callable[[str], Hashable]) -> list[list[str]]:
    """The runs of two and more modules below others, as `folded` has them, those at the top of the tree first."""
    runs = folded(parents, alike)
    return [
        run for path, listed in runs.items() if path is not None for run in listed if len(run) > 1
    ]


def gathered(
    rows: Iterable[T], path: Callable[[T], str], alike: Callable[[T], Hashable]
) -> list[tuple[str, list[T]]]:
    """Rows in groups that are alike and whose paths differ in one number only: a common name, and the group.

    Examples:
        >>> paths = ["layer.0.fc", "layer.0.act", "layer.1.fc", "layer.1.act", "layer.3.act", "head"]
        >>> [name[:9] for name, _ in gathered(paths, path=str, alike=lambda path: path == "layer.3.act")]
        ['layer.0…1', 'layer.0…1', 'layer.3.a', 'head']
    """
    listed = list(rows)
    keys = [[(key, alike(row)) for key in _without_a_number(path(row))] for row in listed]
    sizes = Counter(key for row_keys in keys for key in row_keys)
    groups: dict[Hashable, list[T]] = {}
    patterns: dict[Hashable, Sequence[str | None]] = {}
    for number, (row, row_keys) in enumerate(zip(listed, keys, strict=True)):
        best = max(row_keys, key=sizes.__getitem__, default=None)
        key: Hashable = best if best is not None and sizes[best] > 1 else number
        groups.setdefault(key, []).append(row)
        if best is not None:
            patterns[key] = best[0]
    return [
        (
            path(group[0])
            if len(group) == 1
            else _together(patterns[key], [path(row) for row in group]),
            group,
        )
        for key, group in groups.items()
    ]


def _without_a_number(path: str) -> list[tuple[str | None, ...]]:
    """A path with each of its numbers left out."""
    parts = path.split(".")
    return [(*parts[:k], None, *parts[k + 1 :]) for k, part in enumerate(parts) if part.isdecimal()]


def _together(pattern: Sequence[str | None], paths: Sequence[str]) -> str:
    """The common name of paths that differ in the number that a pattern leaves out."""
    place = pattern.index(None)
    numbers = sorted(int(path.split(".")[place]) for path in paths)
    name = ".".join(_ranges(numbers) if part is None else part for part in pattern)
    return f"{name} × {len(paths)}"  # noqa: RUF001 - "times"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, those that follow each other by the first and the last: ``0…2,4,6…7``."""
    runs = itertools.groupby(enumerate(numbers), key=lambda placed: placed[1] - placed[0])
    ends = ((run[0][1], run[-1][1]) for run in (list(group) for _, group in runs))
    return ",".join(f"{first}…{last}" if first < last else str(first) for first, last in ends)


def _follows(name: str, following: str) -> bool:
    """Whether two names are numbers, or end in parts that are, one after the other: ``layer.3`` and ``layer.4``."""
    stem, _, number = name.rpartition(".")
    following_stem, _, successor = following.rpartition(".")
    return (
        stem == following_stem
        and number.isdecimal()
        and successor.isdecimal()
        and int(successor) == int(number) + 1
    )
