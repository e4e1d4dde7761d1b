"""The calls of the modules of a model in which another one stands in the place of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance, renumbered
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.signatures import Signature
from htp_export.model.tagged import TaggedModel


class _Source(NamedTuple):
    """Where a call comes from."""

    copy: int  # the call of the module that the replacement stands for; -1 for a call that was there before
    call: Instance  # in the model that it comes from


class SplicedCalls:
    """What ran in which call, once a model has taken the place of some calls (``numbers``) of a module (``path``).

    ``paths``: path in the replacement → path in the host.

    Attributes:
        hierarchy: The host's modules, with what lies below the module now.
        tree: Their calls.
    """

    def __init__(
        self, host: TaggedModel, replacement: TaggedModel, paths: Mapping[str, str], path: str, numbers: Sequence[int]
    ) -> None:
        self._host, self._replacement, self._paths, self._path = host, replacement, paths, path
        self._replaced = {Instance(path, number) for number in numbers}
        every = (host.calls.chain(Instance(path, number)) for number in range(max(host.hierarchy[path].calls, 1)))
        self._whole = not any(map(self._replaced.isdisjoint, every))
        if self._whole:
            self._replaced.add(Instance(path, -1))  # calls that ran in one of them, the file does not say in which
        self._top = next((source_path for source_path, host_path in paths.items() if host_path == path), path)
        sources_of = {
            module: self._sources(module, numbers) for module in dict.fromkeys((*host.hierarchy, *paths.values()))
        }
        self._now = {
            source: Instance(module, number)
            for module, sources in sources_of.items()
            for number, source in enumerate(sources)
        }
        self.hierarchy = Hierarchy(self._infos({module: len(sources) for module, sources in sources_of.items()}))
        callers = {module: [self._caller(source) for source in sources] for module, sources in sources_of.items()}
        known = {module: calls for module, calls in callers.items() if all(c is None or c.call >= 0 for c in calls)}
        self.tree = CallTree(self.hierarchy, known)
        self._kept = {
            module: [source.call.call for source in sources]
            for module, sources in sources_of.items()
            if all(source.copy < 0 for source in sources)
        }

    def encode_calls(self, node: ir.Node | None, owners: tuple[str, ...], copy: int = -1) -> str:
        """What a node of the host says of its calls now; or one of the replacement, copied for a call of the module.

        None stands for a node that the module itself has in that call.
        """
        source, calls = (self._host if copy < 0 else self._replacement), list[Instance]()
        if node is not None:
            calls = renumbered(source.calls, source.work_of(node), lambda call: self._now.get(_Source(copy, call)))
        if copy >= 0 and not calls:
            calls = [self._now[_Source(copy, Instance(self._top))]]
        return self.tree.encode_calls(owners, calls)

    def signatures(self) -> dict[str, Sequence[Signature]]:
        """Those of the host's modules all of whose calls were there before, and of the module itself."""
        known_calls = self._host.signatures.get(self._path, ())
        signatures = {self._path: known_calls} if len(known_calls) == self.hierarchy[self._path].calls else {}
        for path, numbers in self._kept.items():
            known = self._host.signatures.get(path, ())
            if numbers and len(known) == self._host.hierarchy[path].calls:
                signatures[path] = tuple(known[number] for number in numbers)
        return {path: signatures[path] for path in self._host.signatures if path in signatures}

    # --- where calls come from ------------------------------------------------------------------------------

    def _sources(self, path: str, numbers: Sequence[int]) -> list[_Source]:
        """The calls of a module, in the order in which they ran."""
        ran = self._host.hierarchy[path].calls if path in self._host.hierarchy else 0
        chains = [self._host.calls.chain(Instance(path, number)) for number in range(ran)]
        if self._host.hierarchy[self._path].calls:
            gone = [not self._replaced.isdisjoint(chain) for chain in chains]
        else:  # it only holds others
            gone = [tags.is_under(path, self._path)] * ran
        placed = [(number, 1, _Source(-1, Instance(path, number))) for number in range(ran) if not gone[number]]
        for copy in numbers:
            inside = [k for k, chain in enumerate(chains) if Instance(self._path, copy) in chain]
            later = [k for k, chain in enumerate(chains) if any(c.path == self._path and c.call > copy for c in chain)]
            place = inside[0] if inside else later[0] if later else ran
            placed += [(place, 0, source) for source in self._copied_sources(path, copy)]
        return [source for _, _, source in sorted(placed)]

    def _copied_sources(self, path: str, copy: int) -> list[_Source]:
        """The calls of a module in one copy of the replacement."""
        source_path = next((key for key, host_path in self._paths.items() if host_path == path), None)
        if path == self._path:
            source_path = self._top
        if source_path is None:
            return []
        ran = self._replacement.hierarchy[source_path].calls if source_path in self._replacement.hierarchy else 0
        return [_Source(copy, Instance(source_path, number)) for number in range(max(ran, path == self._path))]

    def _caller(self, source: _Source) -> Instance | None:
        """The call that made a call, as it is now; its number is -1 where that is not known."""
        if source.copy < 0:
            caller = self._host.calls.caller(source.call)
            return None if caller is None else self._now.get(_Source(-1, caller), Instance(caller.path, -1))
        caller = self._replacement.calls.caller(source.call)
        if caller is not None and caller.call < 0:
            return Instance(self._path, -1)
        inside = None if caller is None else self._now.get(_Source(source.copy, caller))
        if inside is not None:
            return inside
        if source.call.path != self._top:
            return self._now[_Source(source.copy, Instance(self._top))]
        caller = self._host.calls.caller(Instance(self._path, source.copy))
        return None if caller is None else self._now.get(_Source(-1, caller), Instance(caller.path, -1))

    # --- the module tree --------------------------------------------------------------------------------------

    def _infos(self, counts: Mapping[str, int]) -> list[ModuleInfo]:
        tree, replacement = self._host.hierarchy, self._replacement.hierarchy
        fresh = {
            host_path: replace(replacement[source_path], path=host_path, calls=counts[host_path])
            for source_path, host_path in self._paths.items()
            if source_path in replacement and host_path != self._path
        }
        infos: list[ModuleInfo] = []
        for path, info in tree.items():
            if path == self._path:
                calls = counts[path] if info.calls else 0
                infos += [replace(info, calls=calls, fate=Fate.COMPUTED, fused_with=()), *fresh.values()]
            elif tags.is_under(path, self._path) and (self._whole or path in fresh):
                continue
            else:
                infos.append(info.counted(counts[path]))
        return infos
