"""Which call of a module ran in which call of another, and whose calls the work of each node is.

Written at export as ``htp.callers``, where calls are known as they ran; see ``docs/format.md``.
Everything that has to know in which call something ran asks here.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from htp_export.format import tags
from htp_export.format.bounds import number_in
from htp_export.format.hierarchy import Hierarchy

_log = logging.getLogger(__name__)

_UNKNOWN = -1  # in place of a call's number


class Instance(NamedTuple):
    """One call of a module."""

    path: str
    call: int = 0


Block: TypeAlias = str | Instance
"""A module, or one call of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One call whose operations a node computes, its callers, and their modules, with containers that never run."""

    call: Instance
    running: AbstractSet[Instance]
    modules: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class NodeCalls:
    """The calls whose operations a node computes, several if work was merged; ``modules`` have it in their region."""

    owners: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    modules: frozenset[str] = frozenset()

    @property
    def calls(self) -> tuple[Instance, ...]:
        """The innermost calls whose operations the node computes."""
        return tuple(part.call for part in self.parts)

    @property
    def doing(self) -> tuple[str, ...]:
        """The modules that do the work: the owners, without those of which one only called another."""
        return tuple(dict.fromkeys(part.call.path for part in self.parts))

    def in_call(self, call: Instance) -> bool:
        """Return whether the node computes operations of a call, or of a call inside it."""
        return any(call in part.running for part in self.parts)

    def is_inside(self, path: str, around: str) -> bool:
        """Return whether the node is in the region of a module, if in that of another, by the same calls."""
        parts = (part.modules for part in self.parts if path in part.modules)
        return around in self.modules and all(around in modules for modules in parts)

    def is_for(self, blocks: Collection[Block]) -> bool:
        """Return whether the node computes operations of one of the blocks."""
        if not blocks:
            return False
        return not self.modules.isdisjoint(blocks) or any(
            not part.running.isdisjoint(blocks) for part in self.parts
        )

    def others(self, paths: Collection[str], call: Instance | None = None) -> Collection[Block]:
        """Return the other blocks for which the node computes the same as for ``paths``, and that may read its result.

        These are, for each further call of the node, the modules around the call that contain none
        of ``paths``. If equal work of two blocks is merged into one node, its result feeds both
        blocks: it may be read anywhere in the other block without leaving ``paths``. A call inside
        one of ``paths`` is no other block. An owner that contains all of ``paths`` is one: it
        computes the same itself, and may read the result anywhere. If the boundary is that of one
        ``call`` of a module, the module's other calls are blocks, too.

        This rule holds for every boundary; only `htp_export.model.boundaries` applies it.
        """
        if len(self.parts) < 2 and len(self.owners) < 2:
            return ()
        apart = frozenset().union(
            *(part.modules for part in self.parts if part.modules.isdisjoint(paths))
        )
        blocks: set[Block] = {
            block for block in apart if not any(tags.is_under(path, block) for path in paths)
        }
        blocks.update(
            up
            for up in self.owners
            if all(path != up and tags.is_under(path, up) for path in paths)
        )
        if call is not None:
            calls = (
                block for part in self.parts if call not in part.running for block in part.running
            )
            blocks.update(block for block in calls if block.path == call.path)
        return blocks


class CallTree:
    """The calls of the modules of one model.

    Where nothing else is said of a module's calls, they ran in those of the nearest module above it
    that ran: in its only call, or equally often in each. ``callers``: module path → for each of its
    calls in order, the call that made it, None for the outermost; without the modules of which
    nothing else is to be said. None where nobody knows: then the rule is a guess.

    Examples:
        >>> from htp_export.format.hierarchy import ModuleInfo
        >>> tree = Hierarchy([ModuleInfo("", "Net", 1), ModuleInfo("mlp", "Mlp", 2), ModuleInfo("mlp.fc", "Fc", 4)])
        >>> calls = CallTree.from_json('{"mlp.fc":[0,1,1,1]}', tree)
        >>> calls.caller(Instance("mlp.fc", 2)), calls.inside(Instance("mlp", 1))["mlp.fc"]
        (Instance(path='mlp', call=1), (1, 2, 3))
        >>> calls.work(("mlp.fc",), "0").in_call(Instance("mlp", 0))
        True
    """

    def __init__(
        self, hierarchy: Hierarchy, callers: Mapping[str, Sequence[Instance | None]] | None = None
    ) -> None:
        self._hierarchy = hierarchy
        self._callers, self._is_known = dict(callers or {}), callers is not None
        self._near: dict[str, str | None] = {}
        self._parts: dict[Instance, Part] = {}
        self._works: dict[tuple[tuple[str, ...], str], NodeCalls] = {}
        self._warned: set[str] = set()

    @property
    def called(self) -> Collection[str]:
        """The paths of the modules that ran."""
        return self._hierarchy.called

    # --- what is written ----------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, text: str | None, hierarchy: Hierarchy) -> CallTree:
        """Parse the value of ``htp.callers``, None for a file without it; a ValueError names the module at fault.

        Entries whose number of calls differs from the module tree are ignored: a tool has changed
        the modules.
        """
        if text is None:
            return cls(hierarchy)
        listed = tags.json_object(
            tags.CALLERS, text, "modules and the callers of their calls", list
        )
        tags.check_paths(listed)
        tree = cls(hierarchy, {})
        for path, calls in listed.items():
            callers = [tree._read(path, caller) for caller in calls]
            tags.check_paths({caller.path for caller in callers if caller is not None})
            if len(callers) == tree._ran(path):
                tree._callers[path] = callers
        return tree

    def _read(self, path: str, caller_text: object) -> Instance | None:
        match caller_text:
            case None:
                return None
            case int(number) if tags.is_call_number(number):
                return Instance(self._nearest(path) or "", number)
            case [str(caller), int(number)] if tags.is_call_number(number):
                return Instance(caller, number)
        raise ValueError(
            f"{tags.CALLERS}: module {path!r} has a caller that is no call: {caller_text!r}"
        )

    def to_json(self) -> str:
        """Return the value of ``htp.callers``: the callers that do not follow from the module tree."""
        plain: dict[str, list[int | list[str | int] | None]] = {}
        for path in self._hierarchy:
            callers, near = self._callers.get(path, ()), self._nearest(path)
            if any(
                caller != self._usual(Instance(path, number))
                for number, caller in enumerate(callers)
            ):
                plain[path] = [
                    None
                    if caller is None
                    else caller.call
                    if caller.path == near
                    else [caller.path, caller.call]
                    for caller in callers
                ]
        return tags.json_text(plain)

    def among(self, hierarchy: Hierarchy) -> CallTree:
        """Return the calls of the modules that another tree has, too."""
        callers = {path: calls for path, calls in self._callers.items() if path in hierarchy}
        return CallTree(hierarchy, callers if self._is_known else None)

    # --- which call ran in which ----------------------------------------------------------------------------

    def caller(self, call: Instance) -> Instance | None:
        """Return the caller of a call; None for the outermost. Its number is -1 if it is unknown."""
        known = self._callers.get(call.path)
        if known is not None and 0 <= call.call < len(known):
            return known[call.call]
        return self._usual(call)

    def _usual(self, call: Instance) -> Instance | None:
        near = self._nearest(call.path)
        if near is None:
            return None
        ran, around = self._ran(call.path), self._ran(near)
        if around == 1:
            return Instance(near)
        share, rest = divmod(ran, around)
        return Instance(
            near, call.call // share if call.call >= 0 and share and not rest else _UNKNOWN
        )

    def chain(self, call: Instance) -> tuple[Instance, ...]:
        """Return the call and its callers, innermost first."""
        return tuple(self._part(call).running)

    def inside(self, call: Instance) -> dict[str, tuple[int, ...]]:
        """Return the calls that ran in a call, including itself: module path → numbers of its calls.

        If the file does not record them, a warning is logged, and all calls that may have run in it
        are included.
        """
        self.warn(call.path)
        return {path: numbers for path in self._hierarchy if (numbers := self.numbers(path, call))}

    def numbers(self, path: str, call: Instance) -> tuple[int, ...]:
        """Return the numbers of the calls of a module that ran in a call of another one; as in ``inside``."""
        numbers = range(self._ran(path))
        if not self._ran(call.path):  # it only holds others
            return tuple(numbers) if tags.is_under(path, call.path) else ()
        around = (call, Instance(call.path, _UNKNOWN))
        return tuple(
            number
            for number in numbers
            if not self._part(Instance(path, number)).running.isdisjoint(around)
        )

    def warn(self, path: str) -> None:
        """Log once for which modules below a module the file does not record the calling call."""
        if self._ran(path) < 2 or path in self._warned:
            return
        self._warned.add(path)
        below = [
            module for module in self._hierarchy if module != path and tags.is_under(module, path)
        ]
        guessed = [module for module in below if self._is_guessed(module)]
        lost = [
            module
            for module in guessed
            if (caller := self.caller(Instance(module))) and caller.call == _UNKNOWN
        ]
        even = [module for module in guessed if module not in lost]
        for paths, what in (
            (even, "each is taken to have run equally often in every call"),
            (lost, "their nodes are in no call of it"),
        ):
            if paths:
                _log.warning(
                    "the file does not say in which calls of module %r these ran: %s; %s. Files that are exported anew "
                    "say it (%s)",
                    *(path, ", ".join(map(repr, paths)), what, tags.CALLERS),
                )

    def _is_guessed(self, path: str) -> bool:
        near = self._nearest(path)
        return (
            not self._is_known and self._ran(path) > 0 and near is not None and self._ran(near) > 1
        )

    def _ran(self, path: str) -> int:
        info = self._hierarchy.get(path)
        return info.calls if info is not None else 0

    def _nearest(self, path: str) -> str | None:
        if path not in self._near:
            self._near[path] = next(
                (up for up in tags.ancestors(path) if up != path and self._ran(up)), None
            )
        return self._near[path]

    # --- whose work a node does -----------------------------------------------------------------------------

    def work(self, owners: tuple[str, ...], encoded: str = "") -> NodeCalls:
        """Return the calls whose operations a node computes, by its owners and its ``tags.encoded_calls``."""
        if (owners, encoded) not in self._works:
            self._works[owners, encoded] = self.of_calls(owners, self._calls_of(owners, encoded))
        return self._works[owners, encoded]

    def of_calls(self, owners: tuple[str, ...], calls: Iterable[Instance]) -> NodeCalls:
        """Return the calls of a node with these owners into which the work of the given calls was merged."""
        every = list(dict.fromkeys(calls))
        around = {up for call in every for up in self.chain(call)[1:]} if len(every) > 1 else ()
        parts = tuple(self._part(call) for call in every if call not in around)
        modules = (
            parts[0].modules
            if len(parts) == 1
            else frozenset[str]().union(*(part.modules for part in parts))
        )
        return NodeCalls(owners, parts, modules)

    def around_owners(self, work: NodeCalls) -> dict[str, frozenset[str]]:
        """Return owner → modules whose regions contain the owner's share of the node."""
        modules = dict.fromkeys(work.owners, frozenset[str]())
        for call in {call for part in work.parts for call in part.running if call.path in modules}:
            modules[call.path] |= self._part(call).modules
        return modules

    def encode_calls(self, owners: tuple[str, ...], calls: Iterable[Instance]) -> str:
        """Return the encoded calls of a node; empty if they follow from its owners."""
        work = self.of_calls(owners, calls)
        if not work.parts:
            return ""
        (first, *more) = work.calls
        by_number = (
            str(first.call)
            if not more and first.path == owners[-1] and self._ran(first.path) > 1
            else ""
        )
        for encoded in (by_number, ""):
            if {*self.work(owners, encoded).calls} == {*work.calls}:
                return encoded
        listed: defaultdict[str, list[int]] = defaultdict(list)
        for call in work.calls:
            listed[call.path].append(call.call)
        return tags.json_text(listed)

    def encode_merged_calls(
        self, owners: tuple[str, ...], nodes: Iterable[tuple[tuple[str, ...], str]]
    ) -> str:
        """Return the encoded calls of a node that does the work of several, by owners and encoded calls of each."""
        return self.encode_calls(
            owners, [call for node in dict.fromkeys(nodes) for call in self.work(*node).calls]
        )

    def _part(self, call: Instance) -> Part:
        if call not in self._parts:
            running: dict[Instance, None] = {}
            current, around = call, Part(call, frozenset(), frozenset())
            while current not in running:  # in a file, calls may be in a circle
                running[current] = None
                caller = self.caller(current)
                if caller is None or caller in self._parts:
                    around = self._parts[caller] if caller is not None else around
                    break
                current = caller
            paths = [each.path for each in running]
            containers = (up for up in tags.all_above(paths, around.modules) if not self._ran(up))
            modules = around.modules.union((*paths, *containers, ""))
            self._parts[call] = Part(
                call, dict.fromkeys((*running, *around.running)).keys(), modules
            )
        return self._parts[call]

    def _calls_of(self, owners: tuple[str, ...], encoded: str) -> list[Instance]:
        listed = tags.calls_listed(encoded)
        # a file may name others
        listed = {path: calls for path, calls in listed.items() if path in self._hierarchy}
        if listed:
            return [
                Instance(path, number) for path, numbers in listed.items() for number in numbers
            ]
        last: list[Instance] = []
        number = number_in(encoded)
        if number is not None and owners:
            last.append(Instance(owners[-1], number))
        running = {caller.path for call in last for caller in self.chain(call)}
        counts = {owner: max(self._ran(owner), 1) for owner in owners if owner not in running}
        return [
            *(
                Instance(owner, number)
                for owner, count in counts.items()
                for number in range(count)
            ),
            *last,
        ]


def renumbered(
    tree: CallTree, work: NodeCalls, number: Callable[[Instance], Instance | None]
) -> list[Instance]:
    """Return the calls of a node in a model with other numbers; for a call that it has not, the caller counts."""
    every = (next(filter(None, map(number, tree.chain(call))), None) for call in work.calls)
    return [call for call in every if call is not None]
