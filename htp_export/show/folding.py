"""Siblings that are alike and follow each other, ``layer.0`` to ``layer.11``, which tables and pages draw once.

This is the one rule for both: names that end in consecutive numbers, and the same shape, down to the last module below.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

__all__ = ["likeness", "repeats", "runs"]

T = TypeVar("T")


def likeness(
    class_name: str, calls: int, fate: str, nodes: int, parameters: int, flops: float | None, status: str | None
) -> Hashable:
    """What makes two modules alike, apart from what is below them. Times and errors differ between alike modules."""
    return (class_name, calls, fate, nodes, parameters, flops, status or "")


def runs(siblings: Iterable[T], name: Callable[[T], str], shape: Callable[[T], object]) -> list[list[T]]:
    """Siblings, in order, in runs of alike ones; most runs hold a single one.

    Args:
        siblings: What lies right below one module.
        name: What a sibling is called.
        shape: What has to be equal, below the sibling too.

    Example:
        >>> runs(["layer.0", "layer.1", "head.2"], name=str, shape=len)
        [['layer.0', 'layer.1'], ['head.2']]
        >>> runs(["layer.0", "layer.10"], name=str, shape=len)
        [['layer.0'], ['layer.10']]
    """
    found: list[list[T]] = []
    for sibling in siblings:
        last = found[-1][-1] if found else None
        if last is not None and _follows(name(last), name(sibling)) and shape(last) == shape(sibling):
            found[-1].append(sibling)
        else:
            found.append([sibling])
    return found


def repeats(parents: Mapping[str, str | None], alike: Callable[[str], Hashable]) -> list[list[str]]:
    """The runs of two and more in a whole tree, those at its top first.

    Args:
        parents: Module path → the one that it is drawn below; None at the top.
        alike: What makes modules alike, apart from what is below them.

    Example:
        >>> tree = {"": None, "layer.0": "", "layer.0.fc": "layer.0", "layer.1": "", "layer.1.fc": "layer.1"}
        >>> repeats(tree, alike=lambda path: path.count("."))
        [['layer.0', 'layer.1']]
    """
    below: dict[str, list[str]] = {path: [] for path in parents}
    for path, parent in parents.items():
        if parent is not None:
            below[parent].append(path)
    numbers: dict[Hashable, int] = {}
    shapes: dict[str, int] = {}
    for path in sorted(parents, key=len, reverse=True):  # the path of a parent is shorter
        shape = (alike(path), tuple((_label(child, path), shapes[child]) for child in below[path]))
        shapes[path] = numbers.setdefault(shape, len(numbers))
    found = (run for siblings in below.values() for run in runs(siblings, str, shapes.__getitem__))
    return [run for run in found if len(run) > 1]


def _label(path: str, parent: str) -> str:
    return path[len(parent) + 1 :] if parent else path


def _follows(name: str, following: str) -> bool:
    """Whether two names are numbers, or end in parts that are, one after the other: ``layer.3`` and ``layer.4``."""
    stem, _, number = name.rpartition(".")
    other, _, successor = following.rpartition(".")
    return stem == other and number.isdecimal() and successor.isdecimal() and int(successor) == int(number) + 1
