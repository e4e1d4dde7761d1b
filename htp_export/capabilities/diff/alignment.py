"""Which module of one model is which of another."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

from htp_export.format import tags

if TYPE_CHECKING:
    from htp_export.capabilities.diff.differing import ModuleState

__all__ = ["aligned"]


def aligned(before: Mapping[str, ModuleState], after: Mapping[str, ModuleState]) -> dict[str, str]:
    """Path in the second model → path in the first, for the modules that both have.

    Equal paths are the same module. What is left is held against each other from the top down: modules of equal
    structure first, then those of one class that hold modules of the same names. With a module, all below it moves.
    Both mappings have each module after those above it.
    """
    partner = {path: path for path in after if path in before}
    taken = set(partner)
    inside = _inside(path for path in after if path not in before)
    inside_before = _inside(path for path in before if path not in after)
    for exact in (True, False):
        candidates: defaultdict[Hashable, deque[str]] = defaultdict(deque)
        for path in inside_before:
            candidates[_key(before[path], inside_before[path], exact)].append(path)
        for path in inside:
            key = _key(after[path], inside[path], exact)
            if path in partner or key is None:
                continue
            waiting = candidates[key]
            while waiting and waiting[0] in taken:
                waiting.popleft()
            counterpart = waiting.popleft() if waiting else ""
            for rest in inside[path] if counterpart else ():
                below, old = path + rest, counterpart + rest
                if below not in partner and old in before and old not in taken:
                    partner[below] = old
                    taken.add(old)
    return partner


def _inside(paths: Iterable[str]) -> dict[str, list[str]]:
    """For each of some paths, what is to be put behind it for those of them at or below it."""
    inside: dict[str, list[str]] = {path: [] for path in paths}
    for path in inside:
        for up in tags.ancestors(path):
            if up in inside:
                inside[up].append(path[len(up) :])
    return inside


def _key(state: ModuleState, inside: list[str], exact: bool) -> Hashable:
    """What two modules have in common that are one; None for a module that has too little to be recognised by."""
    if exact:
        return (state.structure, state.class_name) if state.nodes else None
    return (state.class_name, *sorted(inside)) if len(inside) > 1 and state.class_name else None
