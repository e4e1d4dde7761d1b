"""The calls of a ``ScriptModule``: scripted code has no Python calls, but inlined operations say where they come from.

What they say is a chain of attribute names, ``0(Block).fc(Linear)``, without the containers in between (``layers.0``)
and the same for every call. Parameters that an operation reads tell containers apart; order tells the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from htp_export.exporter.capture.calls import CallLog
from htp_export.exporter.capture.jit_graph import CONSTANTS, Reading, nodes_of
from htp_export.format import tags

_PART = re.compile(r"([^.()]+)\([^()]*\)")


class ScriptCalls:
    """Turns chains of attribute names into calls, operation by operation, in order.

    Args:
        log: Where the calls are noted.
        paths: The model's module paths.
    """

    def __init__(self, log: CallLog, paths: Iterable[str]) -> None:
        self._log = log
        self._paths = list(paths)
        self._running: list[tuple[str, str, int]] = [("", "", log.enter(""))]  # name, path, call
        log.stack.pop()

    def of_graph(self, graph: Any, reading: Reading, parameters: Mapping[int, str]) -> Iterator[int]:
        """The call of each step of a graph that was inlined, also of those in branches and loop bodies.

        Args:
            graph: The graph.
            reading: The same, as it was read.
            parameters: Number of a graph input that is a parameter → its name.
        """
        nodes = (node for node in nodes_of(graph) if node.kind() not in CONSTANTS)
        for node, step in zip(nodes, reading.steps, strict=True):
            held = [parameters[number] for number in step.inputs if number in parameters]
            yield self.call_of(node.getModuleHierarchy(), held)

    def call_of(self, hierarchy: str, parameters: Sequence[str]) -> int:
        """The call of one operation.

        Args:
            hierarchy: What the operation says of its origin, ``0(Block).fc(Linear)``; empty for the root.
            parameters: Names of the parameters that it reads, ``layers.0.fc.weight``.
        """
        holders = [name.rpartition(".")[0] for name in parameters]
        names = _PART.findall(hierarchy)
        for depth, name in enumerate(names, 1):
            same = depth < len(self._running) and self._running[depth][0] == name
            if same and (depth < len(names) or self._holds(self._running[depth][1], holders)):
                continue
            _, above, parent = self._running[depth - 1]
            path = self._resolve(above, name, holders, self._running[depth][1] if depth < len(self._running) else None)
            del self._running[depth:]
            # A frozen module has no modules in it any more: what they computed is its own work, in one call of it.
            call = parent if path == above else self._log.add(path, parent)
            self._running.append((name, path, call))
        del self._running[len(names) + 1 :]
        return self._running[-1][2]

    @staticmethod
    def _holds(path: str, holders: Sequence[str]) -> bool:
        return not holders or any(tags.is_under(holder, path) or tags.is_under(path, holder) for holder in holders)

    def _resolve(self, above: str, name: str, holders: Sequence[str], last: str | None) -> str:
        """The module called ``name`` below ``above``: by parameters, else the next one in order, else the nearest."""
        below = [path for path in self._paths if path != above and tags.is_under(path, above)]
        candidates = [path for path in below if path.rpartition(".")[2] == name]
        known = [path for path in candidates if any(tags.is_under(holder, path) for holder in holders)]
        later = [path for path in candidates if last is not None and self._paths.index(path) > self._paths.index(last)]
        ranked = known or later or sorted(candidates, key=lambda path: path.count("."))
        return ranked[0] if ranked else above
