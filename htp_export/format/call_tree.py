"""The tree of module calls: the caller of each call, and the calls whose operations each node computes.

An export records the callers as ``htp.callers``; see ``docs/format.md``. All other code uses this
module to find the calls of a node.
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

_UNKNOWN = -1  # the number of an unknown call


class Instance(NamedTuple):
    """One call of a module."""

    path: str
    call: int = 0


Block: TypeAlias = str | Instance
"""A module, or one call of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One call whose operations a node computes.

    ``running``: the call and its callers, innermost first. ``modules``: their modules, and the
    containers around these, which never run.
    """

    call: Instance
    running: AbstractSet[Instance]
    modules: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class NodeCalls:
    """The calls whose operations a node computes: several if equal nodes were merged.

    ``modules``: all modules whose regions contain the node.
    """

    owners: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    modules: frozenset[str] = frozenset()

    @property
    def calls(self) -> tuple[Instance, ...]:
        """The innermost calls whose operations the node computes."""
        return tuple(part.call for part in self.parts)

    @property
    def doing(self) -> tuple[str, ...]:
        """The modules of `calls`: the owners, without those that only called another owner."""
        return tuple(dict.fromkeys(part.call.path for part in self.parts))

    def in_call(self, call: Instance) -> bool:
        """Return whether the node computes operations of a call, or of its descendants."""
        return any(call in part.running for part in self.parts)

    def is_inside(self, path: str, around: str) -> bool:
        """Return whether the module ``around`` encloses each call through which the node is in ``path``."""
        if around not in self.modules:
            return False
        return all(around in part.modules for part in self.parts if path in part.modules)

    def is_for(self, blocks: Collection[Block]) -> bool:
        """Return whether the node computes operations of one of the blocks."""
        if not blocks:
            return False
        if not self.modules.isdisjoint(blocks):
            return True
        return any(not part.running.isdisjoint(blocks) for part in self.parts)

    def blocks_outside(
        self, paths: Collection[str], call: Instance | None = None
    ) -> Collection[Block]:
        """Return the blocks outside ``paths`` for which the node computes the same operations.

        If equal nodes of two blocks are merged into one, its result feeds both blocks: a consumer
        in the other block does not make it an output of ``paths``. These blocks are:

        - for each call of the node that is not inside ``paths``: the modules around the call that
          contain none of ``paths``;
        - an owner that contains all of ``paths``, because it computes the same operations itself;
        - if the boundary is that of one ``call`` of a module: the module's other calls.

        This rule holds for every boundary; only `htp_export.model.boundaries` applies it.
        """
        if len(self.parts) < 2 and len(self.owners) < 2:
            return ()
        outside = set[str]()
        for part in self.parts:
            if part.modules.isdisjoint(paths):
                outside |= part.modules
        blocks: set[Block] = set()
        for module in outside:
            if not any(tags.is_under(path, module) for path in paths):
                blocks.add(module)
        for owner in self.owners:
            if all(path != owner and tags.is_under(path, owner) for path in paths):
                blocks.add(owner)
        if call is not None:
            for part in self.parts:
                if call not in part.running:
                    blocks.update(other for other in part.running if other.path == call.path)
        return blocks


class CallTree:
    """The calls of the modules of one model.

    By default, the calls of a module ran in the calls of its nearest ancestor that ran: in its only
    call, or equally often in each. ``callers``: module path → the caller of each of its calls in
    order, None for the outermost call; without modules for which the default is correct. If
    ``callers`` is None, they are unknown, and the default is a guess.

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

    # --- the file format ----------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, text: str | None, hierarchy: Hierarchy) -> CallTree:
        """Parse the value of ``htp.callers``, None for a file without it; a ValueError names the module at fault.

        An entry is ignored if its number of calls differs from the module tree: then a tool has
        changed the modules.
        """
        if text is None:
            return cls(hierarchy)
        entries = tags.json_object(
            tags.CALLERS, text, "modules and the callers of their calls", list
        )
        tags.check_paths(entries)
        tree = cls(hierarchy, {})
        for path, calls in entries.items():
            callers = [tree._caller_from_json(path, entry) for entry in calls]
            tags.check_paths({caller.path for caller in callers if caller is not None})
            if len(callers) == tree._ran(path):
                tree._callers[path] = callers
        return tree

    def _caller_from_json(self, path: str, entry: object) -> Instance | None:
        match entry:
            case None:
                return None
            case int(number) if tags.is_call_number(number):
                return Instance(self._nearest(path) or "", number)
            case [str(caller), int(number)] if tags.is_call_number(number):
                return Instance(caller, number)
        raise ValueError(
            f"{tags.CALLERS}: module {path!r} has an invalid caller of a call: {entry!r}"
        )

    def to_json(self) -> str:
        """Return the value of ``htp.callers``: the callers that differ from the default of the module tree."""
        entries: dict[str, list[int | list[str | int] | None]] = {}
        for path in self._hierarchy:
            callers = list(self._callers.get(path, ()))
            if callers != [self._usual(Instance(path, number)) for number in range(len(callers))]:
                nearest = self._nearest(path)
                entries[path] = [_caller_to_json(caller, nearest) for caller in callers]
        return tags.json_text(entries)

    def among(self, hierarchy: Hierarchy) -> CallTree:
        """Return a call tree for another module tree, with the known callers of the modules in both."""
        callers = {path: calls for path, calls in self._callers.items() if path in hierarchy}
        return CallTree(hierarchy, callers if self._is_known else None)

    # --- callers and callees -------------------------------------------------------------------------------

    def caller(self, call: Instance) -> Instance | None:
        """Return the caller of a call; None for the outermost. Its number is -1 if it is unknown."""
        callers = self._callers.get(call.path)
        if callers is not None and 0 <= call.call < len(callers):
            return callers[call.call]
        return self._usual(call)

    def _usual(self, call: Instance) -> Instance | None:
        """Return the default caller of a call: that of the nearest ancestor, at an equal share of its calls."""
        nearest = self._nearest(call.path)
        if nearest is None:
            return None
        calls, caller_calls = self._ran(call.path), self._ran(nearest)
        if caller_calls == 1:
            return Instance(nearest)
        share, rest = divmod(calls, caller_calls)
        if call.call < 0 or not share or rest:
            return Instance(nearest, _UNKNOWN)
        return Instance(nearest, call.call // share)

    def chain(self, call: Instance) -> tuple[Instance, ...]:
        """Return the call and its callers, innermost first."""
        return tuple(self._part(call).running)

    def inside(self, call: Instance) -> dict[str, tuple[int, ...]]:
        """Return the calls that ran in a call, including itself: module path → numbers of its calls.

        If the file does not record the callers, a warning is logged, and all calls that may have
        run in the call are included.
        """
        self.warn(call.path)
        return {path: numbers for path in self._hierarchy if (numbers := self.numbers(path, call))}

    def numbers(self, path: str, call: Instance) -> tuple[int, ...]:
        """Return the numbers of the calls of a module that ran in a call of another one, as in `inside`."""
        numbers = range(self._ran(path))
        if not self._ran(call.path):  # a container, which never runs
            return tuple(numbers) if tags.is_under(path, call.path) else ()
        return tuple(number for number in numbers if self._may_run_in(path, number, call))

    def _may_run_in(self, path: str, number: int, call: Instance) -> bool:
        """Return whether a call ran in another one, or in a call of the same module with an unknown number."""
        running = self._part(Instance(path, number)).running
        return call in running or Instance(call.path, _UNKNOWN) in running

    def warn(self, path: str) -> None:
        """Log, once for a module, the descendants whose callers the file does not record."""
        if self._ran(path) < 2 or path in self._warned:
            return
        self._warned.add(path)
        even: list[str] = []
        unknown: list[str] = []
        for module in self._hierarchy:
            if module == path or not tags.is_under(module, path) or not self._is_guessed(module):
                continue
            caller = self.caller(Instance(module))
            is_unknown = caller is not None and caller.call == _UNKNOWN
            (unknown if is_unknown else even).append(module)
        self._warn_of(path, even, "each is assumed to have run equally often in every call")
        self._warn_of(path, unknown, "their nodes are in no call of it")

    def _warn_of(self, path: str, modules: Sequence[str], consequence: str) -> None:
        if modules:
            _log.warning(
                "the file does not record in which calls of module %r these ran: %s; %s. A new export of the model "
                "records it (%s)",
                *(path, ", ".join(map(repr, modules)), consequence, tags.CALLERS),
            )

    def _is_guessed(self, path: str) -> bool:
        if self._is_known or self._ran(path) == 0:
            return False
        nearest = self._nearest(path)
        return nearest is not None and self._ran(nearest) > 1

    def _ran(self, path: str) -> int:
        """Return the number of calls of a module."""
        info = self._hierarchy.get(path)
        return info.calls if info is not None else 0

    def _nearest(self, path: str) -> str | None:
        """Return the nearest ancestor of a module that ran; None without one."""
        if path not in self._near:
            above = (up for up in tags.ancestors(path) if up != path)
            self._near[path] = next((up for up in above if self._ran(up)), None)
        return self._near[path]

    # --- the calls of a node -------------------------------------------------------------------------------

    def work(self, owners: tuple[str, ...], encoded: str = "") -> NodeCalls:
        """Return the calls whose operations a node computes, by its owners and its ``tags.encoded_calls``."""
        if (owners, encoded) not in self._works:
            self._works[owners, encoded] = self.of_calls(owners, self._calls_of(owners, encoded))
        return self._works[owners, encoded]

    def of_calls(self, owners: tuple[str, ...], calls: Iterable[Instance]) -> NodeCalls:
        """Return the calls of a node with these owners that computes the operations of ``calls``.

        A call that is only the caller of another one is dropped.
        """
        distinct = list(dict.fromkeys(calls))
        callers = set[Instance]()
        if len(distinct) > 1:
            for call in distinct:
                callers.update(self.chain(call)[1:])
        parts = tuple(self._part(call) for call in distinct if call not in callers)
        if len(parts) == 1:
            modules = parts[0].modules
        else:
            modules = frozenset[str]().union(*(part.modules for part in parts))
        return NodeCalls(owners, parts, modules)

    def around_owners(self, work: NodeCalls) -> dict[str, frozenset[str]]:
        """Return owner → modules whose regions contain the owner's share of the node."""
        modules = dict.fromkeys(work.owners, frozenset[str]())
        owner_calls = set[Instance]()
        for part in work.parts:
            owner_calls.update(call for call in part.running if call.path in modules)
        for call in owner_calls:
            modules[call.path] |= self._part(call).modules
        return modules

    def encode_calls(self, owners: tuple[str, ...], calls: Iterable[Instance]) -> str:
        """Return the encoded calls of a node; empty if they follow from its owners."""
        return self.encoded(self.of_calls(owners, calls))

    def encoded(self, work: NodeCalls) -> str:
        """Return the encoded calls of a node with this work, as `encode_calls`."""
        if not work.parts:
            return ""
        owners = work.owners
        candidates = [""]
        (first, *more) = work.calls
        # the usual case: the only call of the only owner
        if owners == (first.path,) and not more and first.call == 0 and self._ran(first.path) <= 1:
            return ""
        if not more and first.path == owners[-1] and self._ran(first.path) > 1:
            candidates.insert(0, str(first.call))
        for encoded in candidates:
            if {*self.work(owners, encoded).calls} == {*work.calls}:
                return encoded
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for call in work.calls:
            numbers[call.path].append(call.call)
        return tags.json_text(numbers)

    def encode_merged_calls(
        self, owners: tuple[str, ...], nodes: Iterable[tuple[tuple[str, ...], str]]
    ) -> str:
        """Return the encoded calls of a node that replaces several nodes.

        ``nodes``: the owners and the encoded calls of each of these nodes.
        """
        calls: list[Instance] = []
        for node_owners, encoded in dict.fromkeys(nodes):
            calls += self.work(node_owners, encoded).calls
        return self.encode_calls(owners, calls)

    def _part(self, call: Instance) -> Part:
        if call not in self._parts:
            running: dict[Instance, None] = {}
            current, outer = call, Part(call, frozenset(), frozenset())
            while current not in running:  # in an untrusted file, calls may form a cycle
                running[current] = None
                caller = self.caller(current)
                if caller is None:
                    break
                if caller in self._parts:
                    outer = self._parts[caller]
                    break
                current = caller
            paths = [caller.path for caller in running]
            containers = (up for up in tags.all_above(paths, outer.modules) if not self._ran(up))
            modules = outer.modules.union((*paths, *containers, ""))
            all_running = dict.fromkeys((*running, *outer.running)).keys()
            self._parts[call] = Part(call, all_running, modules)
        return self._parts[call]

    def _calls_of(self, owners: tuple[str, ...], encoded: str) -> list[Instance]:
        """Return the calls of a node.

        They are the modules and numbers of ``htp.calls``, if there are any. Otherwise they are the
        call of the last owner whose number is ``htp.call``, and all calls of each owner that did
        not call it.
        """
        calls: list[Instance] = []
        is_listed = False
        for path, numbers in tags.calls_listed(encoded).items():
            if path in self._hierarchy:  # an untrusted file may name other modules
                is_listed = True
                calls += [Instance(path, number) for number in numbers]
        if is_listed:
            return calls
        last: list[Instance] = []
        running = set[str]()
        number = number_in(encoded)
        if number is not None and owners:
            last.append(Instance(owners[-1], number))
            running = {caller.path for caller in self.chain(last[0])}
        for owner in dict.fromkeys(owners):
            if owner not in running:
                count = max(self._ran(owner), 1)
                calls += [Instance(owner, number) for number in range(count)]
        return [*calls, *last]


def _caller_to_json(caller: Instance | None, nearest: str | None) -> int | list[str | int] | None:
    """Return the entry of a caller: only its number if it is a call of the nearest ancestor that ran."""
    if caller is None:
        return None
    if caller.path == nearest:
        return caller.call
    return [caller.path, caller.call]


def renumbered(
    tree: CallTree, work: NodeCalls, number: Callable[[Instance], Instance | None]
) -> list[Instance]:
    """Return the calls of a node in another model, in which modules have other numbers of calls.

    ``number`` maps a call to its counterpart, or None. A call missing from the mapping is replaced
    by its caller.
    """
    calls: list[Instance] = []
    for call in work.calls:
        # the call itself, or its nearest caller with a counterpart
        counterparts = filter(None, map(number, tree.chain(call)))
        counterpart = next(counterparts, None)
        if counterpart is not None:
            calls.append(counterpart)
    return calls
