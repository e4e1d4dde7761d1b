"""Parts of a candidate of an architecture search, and the keys under which equal parts are one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.call_tree import Instance
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.hashes import Hasher
from htp_export.model.tagged import TaggedModel

REST = Instance("", -1)
"""The part that contains all nodes outside the others: the work of the modules around them."""


@dataclass(frozen=True)
class Part:
    """A part of a graph: one call of a module, or `REST`.

    Attributes:
        call: The call.
        nodes: Its nodes, in order; constants are in no part.
        key: A hash of their computation: operators, settings, types and shapes of weights and
            inputs. Parts with equal keys take the same time.
    """

    call: Instance
    nodes: Sequence[ir.Node]
    key: str


def part_modules(tagged: TaggedModel) -> list[str]:
    """The modules that are measured as a whole: the blocks of a network.

    A module that computes nothing itself, and contains a module with modules of its own, is a list
    of blocks, such as a ``ModuleList`` of layers. It is divided into its modules, and so are all
    modules around it, and the root. Smaller lists, such as a ``Sequential`` of a layer and its
    activation, stay whole: a runtime fuses their operators.
    """
    hierarchy = tagged.hierarchy
    computing = {owner for owners in tagged.index.owners.values() for owner in owners}
    divided = {""}
    for path in tagged:
        children = hierarchy.children(path)
        if path not in computing and any(hierarchy.children(child) for child in children):
            divided.update(tags.ancestors(path))
    return list(_undivided(tagged, "", divided))


def _undivided(tagged: TaggedModel, path: str, divided: set[str]) -> Iterator[str]:
    """The outermost modules below a module that ran, and that are not divided."""
    for child in tagged.hierarchy.children(path):
        if child not in divided and tagged.hierarchy[child].calls:
            yield child
        else:
            yield from _undivided(tagged, child, divided)


def parts_of(tagged: TaggedModel, modules: Iterable[str]) -> dict[Instance, Part]:
    """Divide a graph into the calls of modules, and `REST`, which is always there.

    The key of `REST` also depends on the kinds of the other parts, because equal work of several
    parts, which an exporter merges, is in it.
    """
    nodes_of = nodes_of_parts(tagged, modules)
    facts = GraphFacts(tagged)
    hasher = Hasher(facts)
    keys = {call: _key(facts, hasher, nodes) for call, nodes in nodes_of.items()}
    keys[REST] = " ".join([keys[REST], *sorted({*keys.values()})])
    return {call: Part(call, nodes, keys[call]) for call, nodes in nodes_of.items()}


def nodes_of_parts(tagged: TaggedModel, modules: Iterable[str]) -> dict[Instance, list[ir.Node]]:
    """Part → its nodes, for the calls of modules and for `REST`."""
    chosen = frozenset(modules)
    nodes_of: dict[Instance, list[ir.Node]] = {REST: []}
    for node in tagged.model.graph:
        if not all(value in tagged.index.constant for value in node.outputs):
            nodes_of.setdefault(_call_of(tagged, node, chosen), []).append(node)
    return nodes_of


def _call_of(tagged: TaggedModel, node: ir.Node, chosen: frozenset[str]) -> Instance:
    """The only call of a chosen module for which a node computes; `REST` otherwise."""
    found: set[Instance] = set()
    for work in tagged.index.works[node].parts:
        inside = (call for call in work.running if call.path in chosen)
        found.add(next(inside, REST))
    return found.pop() if len(found) == 1 else REST


def _key(facts: GraphFacts, hasher: Hasher, nodes: Sequence[ir.Node]) -> str:
    """The hash of nodes with the types and shapes of their inputs, which are numbered."""
    index = facts.tagged.index
    members = frozenset(nodes)
    entering: dict[ir.Value, str] = {}
    for node in nodes:
        for value in index.reads(node):
            if value in entering or value.producer() in members:
                continue
            if index.initializer(value) is None:
                kind = "constant" if value in index.constant else "input"
                shape = f"{facts.dtype(value)}{facts.shape(value)}"
                entering[value] = f"{kind} {len(entering)} {shape}"
    return hasher.part(nodes, entering)
