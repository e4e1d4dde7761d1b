"""What became of the FX graph of an exported program when torch decomposed it.

torch runs the exported graph node by node and traces what happens. Watching each node run tells which node of the new
graph makes which of its results, also where a node had several results, or became nothing. Names are no help, as torch
copies graphs and names nodes anew; what stands in a node's ``meta`` is copied with it.
"""

from __future__ import annotations

import itertools
from typing import Any

from htp_export.capture.calls import NO_CALL

CALL = "htp.call"
"""Key in an FX node's ``meta``: the call that it is of, where its scopes do not say that."""


class Places:
    """Numbers for the results of the nodes of one FX graph; copies of a node have the same.

    Args:
        key: Where the number stands in a node's ``meta``.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._numbers = itertools.count()

    def mark(self, node: Any) -> int:
        """The number of a node; a new one where it has none."""
        if self._key not in node.meta:
            node.meta[self._key] = next(self._numbers)
        return int(node.meta[self._key])

    def read(self, node: Any) -> int | None:
        """The number of a node or of the one that it is a copy of, if that has one."""
        found: int | None = node.meta.get(self._key)
        return found


class Decomposition:
    """The decomposition of one exported program, as it happens.

    Args:
        places: Those of the program's graph.

    Attributes:
        runs: Whether torch is at it.
    """

    def __init__(self, places: Places) -> None:
        self.runs = False
        self._tracer: Any = None
        self._before, self._after = places, Places("htp.decomposed")
        self._results: dict[int, int] = {}  # place in the exported graph → place in the decomposed one
        self._names: dict[int, str] = {}  # place in the decomposed graph → name of its node

    def ran(self, tracer: Any, node: Any, made: list[Any], results: list[Any], call: int) -> None:
        """Note that a node ran.

        Args:
            tracer: What traces.
            node: The node of the exported graph, or of a body in it.
            made: The nodes that it became.
            results: For each tensor that it gave, the node that makes it in the graph that is traced.
            call: Its call, where the nodes that it became do not have that in their scopes; else ``NO_CALL``.
        """
        self._tracer = self._tracer or tracer
        if tracer is not self._tracer:  # it is of a graph inside the graph
            return
        if call != NO_CALL:
            for each in made:  # a body's nodes come before the node that runs the body
                each.meta.setdefault(CALL, call)
        place = self._before.read(node)
        if place is not None and len(results) == 1 and results[0] is not None:
            self._results.setdefault(place, self._after.mark(results[0]))

    def finish(self, program: Any) -> None:
        """Note that the decomposed program is complete."""
        self.runs = False
        places = ((self._after.read(node), node.name) for node in program.graph.nodes)
        self._names = {place: name for place, name in places if place is not None}

    def name_of(self, place: int | None) -> str | None:
        """The name of the decomposed program's node that has a result; None where that is gone, or cannot be told."""
        return None if place is None else self._names.get(self._results.get(place, -1))
