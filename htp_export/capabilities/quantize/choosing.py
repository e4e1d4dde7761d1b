"""What a plan does to a model, before anything is run: which nodes get which precision, and the bytes of weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.work import Facts
from htp_export.editing.submodels import constant_of
from htp_export.errors import RuleError
from htp_export.format import tags
from htp_export.model.module_facts import contents_of
from htp_export.model.tagged import TaggedModel
from htp_export.plans.rules import Assigned, assigned


@dataclass(frozen=True)
class PrecisionChoice:
    """Which nodes of a model get which precision.

    ``found`` is what the rules say; ``nodes`` get a precision, in order; ``left`` are the other nodes of its modules
    that make floats.
    """

    tagged: TaggedModel
    facts: Facts
    found: Assigned[Precision]
    nodes: Mapping[Precision, Sequence[ir.Node]]
    left: Mapping[Precision, Sequence[ir.Node]]

    @cached_property
    def precision_of(self) -> Mapping[ir.Node, Precision]:
        """Node → the precision that it gets."""
        return {node: precision for precision, nodes in self.nodes.items() for node in nodes}

    @cached_property
    def weights(self) -> frozenset[ir.Value | None]:
        """The weights of the model."""
        contents = contents_of(self.tagged).modules
        return frozenset(value for module in contents.values() for value in module.own_weights)

    def precisions(self) -> dict[str, str]:
        """Module path → the name of its precision, ``mixed`` for several, ``fp32`` for none.

        Nodes that stay as they are in modules that have a precision do not count beside others that get it.
        """
        given, missed = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        for node in self.tagged.nodes:
            taken = self.precision_of.get(node)
            if taken is None and (node in self.found.disputed or self.weights.isdisjoint(node.inputs)):
                continue
            precision = taken or self.found.nodes.get(node)
            word = "fp32" if precision is None or precision.is_kept else precision.name
            for path in self.tagged.index.works[node].modules or ("",):
                (given if taken or word == "fp32" else missed)[path].add(word)
        for path in self.tagged:
            if not given[path] or not missed[path] <= given[path]:
                given[path].add("fp32")
        return {path: next(iter(given[path])) if len(given[path]) == 1 else "mixed" for path in self.tagged}

    def predicted(self) -> dict[str, int]:
        """Module path → bytes of its weights afterwards, without the scales of activations.

        As `contents_of` counts them: a module that others call too has the weights of all of its calls.
        """
        found: dict[str, dict[Hashable, int]] = {path: {} for path in self.tagged}
        for node in self.tagged.nodes:
            sizes = dict(self._sizes(node))
            owners = self.tagged.owners_of(node) or ("",)
            for path in {"", *(up for owner in owners for up in tags.ancestors(owner))} if sizes else ():
                found[path] |= sizes
        return {path: sum(sizes.values()) for path, sizes in found.items()}

    def _sizes(self, node: ir.Node) -> Iterator[tuple[Hashable, int]]:
        """The weights that a node reads afterwards, and their bytes; equal weights of several nodes are equal."""
        precision = self.precision_of.get(node)
        if node.op_type == "Identity" and precision is None:
            uses = node.outputs[0].uses()
            if all(self._size_of(use.node, use.idx) is not None for use in uses):
                return  # it goes with the weight that it gave
        for place, value in enumerate(node.inputs):
            tensor = constant_of(value)
            if value is None or tensor is None:
                continue
            maker = value.producer()
            if maker in self.precision_of and (value not in self.weights or _is_identity(maker)):
                continue  # it is cast itself
            size = self._size_of(node, place)
            if size is not None and precision is not None:
                yield (value, precision, precision.how.shared_by(node, place)), size
            elif value in self.weights:
                yield value, tensor.nbytes

    def _size_of(self, node: ir.Node, place: int) -> int | None:
        """The bytes of a weight of a node in the precision that it gets; None if it stays as it is."""
        precision, tensor = self.precision_of.get(node), constant_of(node.inputs[place])
        if precision is None or tensor is None or tensor.dtype != ir.DataType.FLOAT or not len(tensor.shape):
            return None  # numbers are no weights
        return precision.how.bytes_of(node, place, tensor, self.facts)

    def counted(self, nodes: Mapping[Precision, Sequence[ir.Node]]) -> dict[str, dict[str, int]]:
        """Name of a precision → operator type → number of nodes; precisions with the same name count as one."""
        found: dict[str, Counter[str]] = {}
        for precision, listed in nodes.items():
            if listed:
                found.setdefault(precision.name, Counter()).update(node.op_type for node in listed)
        return {name: dict(kinds.most_common()) for name, kinds in found.items()}


def _is_identity(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Identity"


def choose(tagged: TaggedModel, rules: Mapping[str, Precision]) -> PrecisionChoice:
    """Find out what a plan does to a model; a rule that changes nothing is refused. No weights are read."""
    found, facts = assigned(tagged, rules), Facts.of(tagged)
    chosen: dict[ir.Node | None, Precision] = {}
    nodes: dict[Precision, list[ir.Node]] = {}
    left: dict[Precision, list[ir.Node]] = {}
    for node, precision in found.nodes.items():
        if precision.is_kept:
            continue
        how = precision.how
        if facts.opset < how.first_opset:
            needed = how.first_opset
            raise precision.fault(
                f"needs opset {needed} or later, and the model has {facts.opset}: export it with "
                f"opset_version={needed}, or convert it with htp_export.tools.version_converter"
            )
        with_producer = node.op_type not in how.with_producer or chosen.get(_first_producer(node)) == precision
        in_reach = node.graph is facts.graph or how.in_subgraphs
        if with_producer and in_reach and how.takes(node, facts):
            nodes.setdefault(precision, []).append(node)
            chosen[node] = precision
        elif any(facts.dtypes.get(value) == ir.DataType.FLOAT and constant_of(value) is None for value in node.outputs):
            left.setdefault(precision, []).append(node)
    choice = PrecisionChoice(tagged, facts, found, nodes, left)
    _check_rules(choice, rules)
    return choice


def _first_producer(node: ir.Node) -> ir.Node | None:
    value = node.inputs[0]
    return None if value is None else value.producer()


def _check_rules(choice: PrecisionChoice, rules: Mapping[str, Precision]) -> None:
    """Refuse a rule that changes nothing because no operator of its modules takes its precision."""
    for selector, precision in rules.items():
        if precision.is_kept:
            continue
        nodes = choice.found.deciding[selector]
        if choice.found.reached[selector] and not nodes:
            continue  # later rules say otherwise of all of its modules
        if any(choice.precision_of.get(node) == precision for node in nodes):
            continue
        kinds = Counter(node.op_type for node in nodes)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) or "no operators"
        paths = sorted(choice.found.named[selector], key=tags.path_order)
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        raise RuleError(
            selector,
            f"no operator of module {paths[0] or '(root)'!r}{more} takes {precision.name}; "
            f"there are: {listed}{_said_otherwise(choice, nodes, precision)}",
        )


def _said_otherwise(choice: PrecisionChoice, nodes: Sequence[ir.Node], precision: Precision) -> str:
    """That other modules of these nodes have another precision, if that is why they do not take one."""
    merged = [node for node in nodes if choice.found.nodes.get(node) != precision]
    if not merged:
        return ""
    owners = ", ".join(repr(path) for path in choice.tagged.index.works[merged[0]].doing)
    return f"; {merged[0].op_type} {merged[0].name!r} does the work of {owners}: give them one precision"
