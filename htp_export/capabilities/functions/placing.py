"""Which of the selected module calls each node of a model lies in, as far as the tags can tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from htp_export.editing.function_records import given_values
from htp_export.format.call_tree import Instance, NodeCalls
from htp_export.model.regions import GraphIndex
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import is_standard, subgraphs, with_subgraphs

MOST_NESTED = 100
"""As many functions may call one another: https://github.com/onnx/onnx refuses more when it checks a model."""

Chain: TypeAlias = tuple[Instance, ...]
"""The instances that a node lies in, outermost first."""


class Placement:
    """The chain of every node of a model's graph and its subgraphs; what lies in functions already has none.

    A node of several modules lies in those that hold all of them, and one whose call is not known lies in none that
    ran several times. Instances that could not become one call of a function are in no chain.
    """

    def __init__(self, tagged: TaggedModel, index: GraphIndex, selected: Collection[str]) -> None:
        self._calls = tagged.calls
        self._selected = frozenset(selected)
        self._most = MOST_NESTED - _nested(tagged.model)
        self._around: dict[Instance, Chain] = {}
        self.flat: dict[str, str] = {}  # path of a selected module → why some instance of it is in no chain
        # Node → the nodes whose subgraphs it lies in, outermost first.
        self.scopes = {node: [*index.scopes(node)][:0:-1] for node in tagged.model.graph.all_nodes()}
        self.chains = {node: self._chain_of(node, index.works[node]) for node in self.scopes}
        for path in self._selected:
            self._calls.warn(path)
        self._drop_those_in_several_graphs()

    def without(self, node: ir.Node, instances: Iterable[Instance]) -> None:
        """Take a node, with all that its subgraphs hold, out of some instances."""
        gone = frozenset(instances)
        for held in with_subgraphs(node):
            self.chains[held] = tuple(instance for instance in self.chains[held] if instance not in gone)

    def _chain_of(self, node: ir.Node, work: NodeCalls) -> Chain:
        if any(_gives_back_from_outside(body) for body in subgraphs(node)):
            return ()  # its outer value could not be an input of a function
        if is_standard(node, "Identity") and node.inputs[0] is not None and node.inputs[0].is_initializer():
            return ()  # of a weight that TorchScript found to be equal to another one's: an input of functions, as that
        return _common_start([self._selected_around(call) for call in work.calls])

    def _selected_around(self, call: Instance) -> Chain:
        """The selected instances that a call ran in, outermost first, as far as they are known."""
        chain = self._calls.chain(call)
        known = next((place for place, running in enumerate(chain) if running in self._around), len(chain))
        around = self._around[chain[known]] if known < len(chain) else ()
        for running in reversed(chain[:known]):  # each call is in those of its caller, and in itself
            if running.path in self._selected and running.call >= 0:
                if len(around) < self._most:
                    around = (*around, running)
                else:
                    self.flat[running.path] = f"ONNX allows {MOST_NESTED} functions inside one another"
            self._around[running] = around
        return around

    def _drop_those_in_several_graphs(self) -> None:
        """Leave out instances that have nodes in several graphs, and no node of theirs that holds them all."""
        homes: defaultdict[Instance, set[ir.Graph | None]] = defaultdict(set)
        for node, chain in self.chains.items():
            held = {instance for scope in self.scopes[node] for instance in self.chains[scope]}
            for instance in chain:
                if instance not in held:
                    homes[instance].add(node.graph)
        gone = {instance for instance, graphs in homes.items() if len(graphs) > 1}
        self.flat.update({instance.path: "its nodes lie in several branches or loop bodies" for instance in gone})
        for node, chain in self.chains.items() if gone else ():
            self.chains[node] = tuple(instance for instance in chain if instance not in gone)


def _nested(model: ir.Model) -> int:
    """How many functions of a model call one another, at most; counted up to what ONNX allows."""
    left = {key: {node.op_identifier() for node in each.all_nodes()} for key, each in model.functions.items()}
    levels = 0
    while left and levels < MOST_NESTED:
        called = {key for inside in left.values() for key in inside if key in left}
        if len(called) == len(left):  # some call themselves
            break
        left = {key: inside for key, inside in left.items() if key in called}
        levels += 1
    return levels


def _common_start(chains: Sequence[Chain]) -> Chain:
    if not chains:
        return ()
    same = 0
    for instances in zip(*chains, strict=False):
        if len(set(instances)) > 1:
            break
        same += 1
    return chains[0][:same]


def _gives_back_from_outside(graph: ir.Graph) -> bool:
    """Whether a subgraph returns a value that it does not make; ONNX Runtime refuses that too."""
    inside = {*given_values(graph), *(value for node in graph for value in node.outputs)}
    return not inside.issuperset(graph.outputs)
