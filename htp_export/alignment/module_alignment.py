"""The modules of two models that are the same module: by path, and then by structure and class."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Hashable, Iterable, Mapping
from typing import Protocol

from htp_export.format import tags


class AlignedModule(Protocol):
    """The properties of a module by which it is matched.

    ``structure`` is a hash of its computation, `Hasher.region`.
    """

    @property
    def class_name(self) -> str:
        """The class of the module; ``""`` if it is unknown."""

    @property
    def nodes(self) -> int:
        """The number of its nodes."""

    @property
    def structure(self) -> str:
        """The hash of its computation."""


def aligned_modules(
    before: Mapping[str, AlignedModule], after: Mapping[str, AlignedModule]
) -> dict[str, str]:
    """Path in the second model → path in the first, for the modules that both have.

    Modules with equal paths are the same. The others are matched from the top down: first modules
    of equal structure, then modules of one class whose descendants have equal names. The
    descendants of a matched module move with it. Both mappings have each module after its
    ancestors.
    """
    counterparts = {path: path for path in after if path in before}
    taken = set(counterparts)
    descendants = _descendants(path for path in after if path not in before)
    descendants_before = _descendants(path for path in before if path not in after)
    for exact in (True, False):
        candidates: defaultdict[Hashable, deque[str]] = defaultdict(deque)
        for path in descendants_before:
            key = _key(before[path], descendants_before[path], exact)
            candidates[key].append(path)
        for path in descendants:
            key = _key(after[path], descendants[path], exact)
            if path in counterparts or key is None:
                continue
            counterpart = _next_free(candidates[key], taken)
            if counterpart is None:
                continue
            for relative in descendants[path]:
                new, old = path + relative, counterpart + relative
                if new not in counterparts and old in before and old not in taken:
                    counterparts[new] = old
                    taken.add(old)
    return counterparts


def _next_free(candidates: deque[str], taken: Container[str]) -> str | None:
    """Remove and return the first candidate that is not taken; None if there is none."""
    while candidates:
        candidate = candidates.popleft()
        if candidate not in taken:
            return candidate
    return None


def _descendants(paths: Iterable[str]) -> dict[str, list[str]]:
    """For each path: the relative paths of itself and its descendants among `paths`."""
    descendants: dict[str, list[str]] = {path: [] for path in paths}
    for path in descendants:
        for ancestor in tags.ancestors(path):
            if ancestor in descendants:
                descendants[ancestor].append(path[len(ancestor) :])
    return descendants


def _key(state: AlignedModule, descendants: list[str], exact: bool) -> Hashable:
    """The key of modules that match each other; None for a module with too little to match by."""
    if exact:
        return (state.structure, state.class_name) if state.nodes else None
    if len(descendants) > 1 and state.class_name:
        return (state.class_name, *sorted(descendants))
    return None
