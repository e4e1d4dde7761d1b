"""What became of the FX graph of an exported program when torch decomposed it.

torch runs the exported graph node by node and traces what happens. Watching each node run tells which node of the new
graph makes which of its results, also where a node was given another name, had several results, or became nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from htp_export.capture.calls import NO_CALL
from htp_export.capture.torch_internals import inputs_of


class Decomposition:
    """The decomposition of one exported program, as it happens.

    Args:
        program: The exported program.
        calls: Names of nodes of its outermost graph → calls, where these are not in the nodes' scopes.
        call_of: A node of a body inside the program → its call, ``NO_CALL`` where nothing says.

    Attributes:
        runs: Whether torch is at it.
        calls: Name of a node of the decomposed graph → its call, where that is not in its scopes.
    """

    def __init__(self, program: Any, calls: Mapping[str, int], call_of: Callable[[Any], int]) -> None:
        self.runs = True
        self.calls: dict[str, int] = {}
        self._inputs = [node.name for node in inputs_of(program.graph)]
        self._given = len(program.graph_signature.user_inputs)
        self._calls_before = calls
        self._call_of = call_of
        self._tracer: Any = None
        self._results: dict[str, Any] = {}  # node → node of the decomposed graph that makes its one result

    def ran(self, tracer: Any, node: Any, made: list[str], results: list[Any]) -> None:
        """Note what became of a node; see ``torch_internals.Ran``."""
        self._note(tracer, node, made, results, self._calls_before.get(node.name, NO_CALL))

    def ran_in_body(self, tracer: Any, node: Any, made: list[str], results: list[Any]) -> None:
        """Note what became of a node of a body, which is dissolved into the graph around it."""
        self._note(tracer, node, made, results, self._call_of(node))

    def _note(self, tracer: Any, node: Any, made: list[str], results: list[Any], call: int) -> None:
        self._tracer = self._tracer or tracer
        if tracer is not self._tracer or node.op != "call_function":  # it is of a graph inside the graph, or an input
            return
        if call != NO_CALL:
            for name in made:  # a body's nodes come before the node that runs the body
                self.calls.setdefault(name, call)
        if len(results) == 1:
            self._results.setdefault(node.name, results[0])

    def name_of(self, node: Any) -> str | None:
        """The name of the node that has the result of a node of the graph before, or of what that was copied from.

        None where there is none any more, or where it cannot be told.
        """
        found = node if node.op == "placeholder" else self._results.get(node.name)
        if found is None:
            return None
        return self._input_name(found) if found.op == "placeholder" else str(found.name)

    def _input_name(self, node: Any) -> str | None:
        """The name of an input: torch copies graphs and names inputs anew, and puts constants before those of users."""
        here = inputs_of(node.graph)
        from_end = len(here) - here.index(node)
        alike = len(here) == len(self._inputs)
        return self._inputs[-from_end] if alike or from_end <= self._given else None
