"""Which device each node goes to, by rules that name modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.deploy.devices import device_named
from htp_export.errors import InputError
from htp_export.format.selectors import select, select_below
from htp_export.format.tags import ancestors
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import TaggedModel

__all__ = ["Share", "devices_by_rules", "shares_of"]

Share = frozenset[str]
"""A part of a node's work, as the modules in whose regions it is."""


@dataclass(frozen=True)
class _Rule:
    """One rule: the regions of some modules, without those of the modules that its selector excludes below them."""

    device: str
    modules: frozenset[str]
    excluded: frozenset[str]

    def holds_for(self, share: Share) -> bool:
        return not self.modules.isdisjoint(share) and self.excluded.isdisjoint(share)


def devices_by_rules(tagged: TaggedModel, plan: Mapping[str, str]) -> dict[ir.Node, str]:
    """Node → its device, for the nodes that a rule names.

    A rule holds for the regions of the modules that its selector names, without the regions of modules that it
    excludes. Of several rules, the last one holds. A node of several modules has the device of the first of them, in
    the order of execution, that has one: its result is then there when it is needed first.

    Args:
        tagged: The model.
        plan: Selector → device, in order.

    Raises:
        InputError: If a device is unknown, or a rule names modules without nodes.
        SelectorError: If a selector cannot be read or matches no module.
        UntaggedModelError: If the model has no tags.

    Examples:
        >>> nodes = [ir.node("Relu", [ir.val("x")], metadata_props={"htp.module": path}) for path in ("net.0", "net.1")]
        >>> graph = ir.Graph(nodes[0].inputs, nodes[1].outputs, nodes=nodes, opset_imports={"": 20})
        >>> from htp_export.model.tagged import load
        >>> list(devices_by_rules(load(ir.Model(graph, ir_version=10)), {".": "cpu", "net.1": "gpu"}).values())
        ['cpu', 'gpu']
    """
    tagged.require_tags()
    rules = [_rule(tagged, selector, device) for selector, device in plan.items()]
    devices: dict[ir.Node, str] = {}
    used = [False] * len(rules)
    for node in all_nodes(tagged.model):
        for share in shares_of(tagged, node):
            holding = [number for number, rule in enumerate(rules) if rule.holds_for(share)]
            for number in holding:
                used[number] = True
            if holding:
                devices.setdefault(node, rules[holding[-1]].device)
    for selector, is_used in zip(plan, used, strict=True):
        if not is_used:
            raise InputError(
                f"selector {selector!r} names modules without nodes: they return their input, or were merged"
            )
    return devices


def shares_of(tagged: TaggedModel, node: ir.Node) -> tuple[Share, ...]:
    """The parts of a node's work, in the order of execution; a node without owners is the root's."""
    work = tagged.index.works[node]
    return tuple(part.modules | {""} for part in work.parts) or (frozenset(("",)),)


def _rule(tagged: TaggedModel, selector: str, device: str) -> _Rule:
    classes = tagged.hierarchy.classes
    modules = frozenset(select(selector, classes))
    kept = frozenset(select_below(selector, classes))
    below = (path for path in classes if not modules.isdisjoint(ancestors(path)))
    return _Rule(device_named(device), modules, frozenset(path for path in below if path not in kept))
