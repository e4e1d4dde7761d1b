"""What a plan does to a model, before anything is run: which nodes get which precision, and the bytes of weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from htp_export.capabilities.quantize.blocks import block_bytes, takes_blocks
from htp_export.capabilities.quantize.casting import Ports, ports_of
from htp_export.capabilities.quantize.integers import (
    WITH_PRODUCER,
    dynamic_bytes,
    is_bias,
    static_bytes,
    takes_dynamic,
    takes_static,
)
from htp_export.capabilities.quantize.nncf_engine import nncf_bytes, takes_nncf
from htp_export.capabilities.quantize.nncf_weights import nncf_weight_bytes, takes_nncf_weights
from htp_export.capabilities.quantize.precisions import Engine, Method, Precision
from htp_export.editing.submodels import constant_of
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.module_facts import contents_of
from htp_export.model.tagged import TaggedModel
from htp_export.plans.rules import Assigned, assigned
from htp_export.weights.products import weight_place

__all__ = ["PrecisionChoice", "choose"]

_FIRST_QDQ, _FIRST_PER_CHANNEL = 10, 13  # opsets


@dataclass(frozen=True)
class PrecisionChoice:
    """Which nodes of a model get which precision.

    Attributes:
        tagged: The model.
        found: The precisions of modules and nodes, as the rules say.
        nodes: Precision → the nodes that get it, in order.
        ports: Node that is cast → what it can read and make in the other type.
        left: Precision → the other nodes of its modules that read or make floats.
    """

    tagged: TaggedModel
    found: Assigned[Precision]
    nodes: Mapping[Precision, Sequence[ir.Node]]
    ports: Mapping[ir.Node, Ports]
    left: Mapping[Precision, Sequence[ir.Node]]

    @property
    def calibrated(self) -> list[Precision]:
        """The precisions that need data."""
        return [precision for precision in self.nodes if precision.calibrated]

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
        """Module path → the name of its precision, ``mixed`` for several, ``fp32`` for none."""
        disputed = self.found.disputed
        weighty = [
            node
            for node in self.tagged.nodes
            if node in self.precision_of
            or (node not in disputed and any(value in self.weights for value in node.inputs))
        ]
        words: dict[str, set[str]] = {}
        for node in weighty:
            precision = self.precision_of.get(node, self.found.nodes.get(node))
            word = "fp32" if precision is None or precision.method == Method.KEEP else precision.name
            taken = node in self.precision_of
            for path in self.tagged.index.works[node].modules or ("",):
                words.setdefault(path, set()).add(word if taken or word == "fp32" else f"?{word}")
        return {path: _said(words.get(path, set())) for path in self.tagged}

    def predicted(self) -> dict[str, int]:
        """Module path → bytes of its weights afterwards, without the scales of activations."""
        sizes: dict[ir.Node, dict[Hashable, int]] = {}
        for node in self.tagged.nodes:
            sizes[node] = dict(_sizes(node, self, self.weights))
        found: dict[str, int] = {}
        for path in self.tagged:
            below = self.tagged.index.below.get(path, ()) if path else self.tagged.nodes
            whole: dict[Hashable, int] = {}
            for node in below:
                whole |= sizes[node]
            found[path] = sum(whole.values())
        return found

    def counted(self, nodes: Mapping[Precision, Sequence[ir.Node]]) -> dict[str, dict[str, int]]:
        """Name of a precision → operator type → number of nodes; precisions with the same name count as one."""
        found: dict[str, Counter[str]] = {}
        for precision, listed in nodes.items():
            if listed:
                found.setdefault(precision.name, Counter()).update(node.op_type for node in listed)
        return {name: dict(kinds.most_common()) for name, kinds in found.items()}


def choose(tagged: TaggedModel, rules: Mapping[str, Precision]) -> PrecisionChoice:
    """Find out what a plan does to a model. No weights are read.

    Args:
        tagged: The model.
        rules: Selector → precision, in order.

    Raises:
        InputError: If a rule matches no module, or none of its operators takes the precision.
    """
    found = assigned(tagged, rules)
    types = tagged.inferred
    values = (value for node in tagged.nodes for value in (*node.inputs, *node.outputs) if value is not None)
    dtypes = {value: types.dtype(value) for value in values if isinstance(types.type(value), ir.TensorType)}
    by_name = {str(value.name): dtype for value, dtype in dtypes.items()}
    opset = tagged.model.graph.opset_imports.get("", 1)
    nodes: dict[Precision, list[ir.Node]] = {}
    left: dict[Precision, list[ir.Node]] = {}
    ports: dict[ir.Node, Ports] = {}
    taken: dict[ir.Value | None, Precision] = {}
    for node, precision in found.nodes.items():
        if precision.method == Method.KEEP:
            continue
        _check_opset(precision, opset)
        alone = node.op_type in WITH_PRODUCER and taken.get(node.inputs[0]) != precision
        if not (alone and precision.method == Method.STATIC) and _takes(
            node, precision, tagged.model, opset, dtypes, by_name, ports
        ):
            nodes.setdefault(precision, []).append(node)
            taken.update(dict.fromkeys(node.outputs, precision))
        elif any(dtypes.get(value) == ir.DataType.FLOAT and constant_of(value) is None for value in node.outputs):
            left.setdefault(precision, []).append(node)
    choice = PrecisionChoice(tagged, found, nodes, ports, left)
    _check_rules(choice, rules)
    return choice


def _takes(
    node: ir.Node,
    precision: Precision,
    model: ir.Model,
    opset: int,
    dtypes: Mapping[ir.Value, ir.DataType | None],
    by_name: Mapping[str, ir.DataType | None],
    ports: dict[ir.Node, Ports],
) -> bool:
    if precision.method == Method.CAST:
        found = ports_of(node, opset, precision, dtypes)
        if found is not None:
            ports[node] = found
        return found is not None
    if precision.method == Method.WEIGHTS and precision.engine != Engine.NNCF:
        return takes_blocks(node, precision) and (node.graph is model.graph or not precision.calibrated)
    if node.graph is not model.graph:  # the quantizers read no subgraphs
        return False
    if precision.engine == Engine.NNCF:
        weights_alone = precision.method == Method.WEIGHTS
        return takes_nncf_weights(node, precision) if weights_alone else takes_nncf(node, by_name)
    return takes_dynamic(node) if precision.method == Method.DYNAMIC else takes_static(node, by_name)


def _check_opset(precision: Precision, opset: int) -> None:
    needed = _FIRST_PER_CHANNEL if precision.per_channel else _FIRST_QDQ
    by_nncf = precision.engine == Engine.NNCF and precision.method == Method.WEIGHTS
    needed = _FIRST_PER_CHANNEL if by_nncf else needed
    if (by_nncf or precision.method in (Method.STATIC, Method.DYNAMIC)) and opset < needed:
        raise InputError(f"precision {precision.name!r} needs opset {needed} or later, and the model has {opset}")


def _check_rules(choice: PrecisionChoice, rules: Mapping[str, Precision]) -> None:
    """Refuse a rule that changes nothing because no operator of its modules takes its precision."""
    for selector, precision in rules.items():
        if precision.method == Method.KEEP:
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
        raise InputError(
            f"rule {selector!r}: no operator of module {paths[0] or '(root)'!r}{more} takes {precision.name}; "
            f"there are: {listed}{_said_otherwise(choice, nodes, precision)}"
        )


def _said_otherwise(choice: PrecisionChoice, nodes: Sequence[ir.Node], precision: Precision) -> str:
    """That other modules of these nodes have another precision, if that is why they do not take one."""
    merged = [node for node in nodes if choice.found.nodes.get(node) != precision]
    if not merged:
        return ""
    owners = ", ".join(repr(path) for path in choice.tagged.index.works[merged[0]].doing)
    return f"; {merged[0].op_type} {merged[0].name!r} does the work of {owners}: give them one precision"


def _said(words: set[str]) -> str:
    """The one precision; nodes that stay as they are in modules of it do not count beside others."""
    sure = {word for word in words if not word.startswith("?")}
    open_ones = {word.removeprefix("?") for word in words if word.startswith("?")}
    if not sure or not open_ones <= sure:
        sure |= {"fp32"} if open_ones or not sure else set()
    return sure.pop() if len(sure) == 1 else "mixed"


def _sizes(
    node: ir.Node, choice: PrecisionChoice, weights: Collection[ir.Value | None]
) -> Iterator[tuple[Hashable, int]]:
    """The weights that a node reads afterwards, and their bytes; equal weights of several nodes are equal."""
    precision = choice.precision_of.get(node)
    if (
        node.op_type == "Identity"
        and precision is None
        and all(_size_of(use.node, use.idx, choice) is not None for use in node.outputs[0].uses())
    ):
        return  # it goes with the weight that it gave
    for place, value in enumerate(node.inputs):
        tensor = constant_of(value)
        if value is None or tensor is None:
            continue
        maker = value.producer()
        if maker is not None and maker in choice.precision_of and (maker.op_type == "Identity" or value not in weights):
            continue  # it is cast itself
        size = _size_of(node, place, choice)
        if size is not None and precision is not None:
            yield (value, precision, _place_of_copy(node, place, precision)), size
        elif value in weights:
            yield value, tensor.nbytes


def _place_of_copy(node: ir.Node, place: int, precision: Precision) -> Hashable:
    """The node or graph whose readers of a weight share one in the precision; None where all of the model do."""
    if precision.method == Method.STATIC and is_bias(node, place):
        return node
    return None if precision.method == Method.CAST else node.graph


def _size_of(node: ir.Node, place: int, choice: PrecisionChoice) -> int | None:
    """The bytes of a weight of a node in the precision that it gets; None if it stays as it is."""
    precision, tensor = choice.precision_of.get(node), constant_of(node.inputs[place])
    if precision is None or tensor is None:
        return None
    opset = choice.tagged.model.graph.opset_imports.get("", 1)
    return _size_in(node, place, tensor, precision, choice.ports.get(node), opset)


def _size_in(
    node: ir.Node, place: int, tensor: ir.TensorProtocol, precision: Precision, ports: Ports | None, opset: int
) -> int | None:
    """The bytes of a weight in a precision; None if it stays as it is."""
    if tensor.dtype != ir.DataType.FLOAT or not len(tensor.shape):
        return None  # numbers are no weights
    if precision.method == Method.CAST:
        converted = ports is not None and place in ports.inputs
        return 2 * math.prod(tensor.shape.numpy()) if converted else None
    main = place == weight_place(node)
    if precision.method == Method.WEIGHTS:
        if precision.engine == Engine.NNCF:
            return nncf_weight_bytes(node, tensor, precision, opset) if main else None
        return block_bytes(node, precision) if main else None
    if precision.method == Method.DYNAMIC:
        constant_input = place == 0 and not main  # quantized with the weight
        return dynamic_bytes(node, tensor, precision) if main else tensor.size if constant_input else None
    if precision.engine == Engine.NNCF:
        return nncf_bytes(node, place, tensor, precision)
    return static_bytes(node, place, tensor, precision)
