"""Which module of one model is which of another."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Protocol

from htp_export.format import tags

__all__ = ["aligned"]


class _State(Protocol):
    """What is known of a module."""

    @property
    def class_name(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def structure(self) -> str: ...


def aligned(before: Mapping[str, _State], after: Mapping[str, _State]) -> dict[str, str]:
    """Path in the second model → path in the first, for the modules that both have.

    Equal paths are the same module. What is left is held against each other from the top down: modules of equal
    structure first, then those of one class that hold modules of the same names. With a module, all below it moves.

    Args:
        before: Module path → module, of the first model, each after those above it.
        after: The same of the second.
    """
    partner = {path: path for path in after if path in before}
    lost = [path for path in before if path not in after]
    new = [path for path in after if path not in before]
    taken = set(partner)
    inside, inside_before = _inside(new), _inside(lost)
    for exact in (True, False):
        candidates: defaultdict[Hashable, deque[str]] = defaultdict(deque)
        for path in lost:
            candidates[_key(before[path], inside_before[path], exact)].append(path)
        for path in new:
            key = _key(after[path], inside[path], exact)
            if path in partner or key is None:
                continue
            waiting = candidates[key]
            while waiting and waiting[0] in taken:
                waiting.popleft()
            if not waiting:
                continue
            found = waiting.popleft()
            for rest in inside[path]:
                below, old = path + rest, found + rest
                if below not in partner and old in before and old not in taken:
                    partner[below] = old
                    taken.add(old)
    return partner


def _inside(paths: Iterable[str]) -> dict[str, list[str]]:
    """For each of some paths, what is to be put behind it for those of them at or below it."""
    found: dict[str, list[str]] = {path: [] for path in paths}
    for path in found:
        for up in tags.ancestors(path):
            if up in found:
                found[up].append(path[len(up) :])
    return found


def _key(state: _State, inside: list[str], exact: bool) -> Hashable:
    """What two modules have in common that are one; None for a module that has too little to be recognised by."""
    if exact:
        return (state.structure, state.class_name) if state.nodes else None
    return (state.class_name, *sorted(inside)) if len(inside) > 1 and state.class_name else None
