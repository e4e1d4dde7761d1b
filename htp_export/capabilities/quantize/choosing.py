"""The effect of a plan before anything is run: precisions of nodes, and bytes of weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import onnx_ir as ir

from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.precisions import AUTO, PRECISIONS
from htp_export.capabilities.quantize.work import Facts
from htp_export.editing.submodels import constant_of
from htp_export.errors import InputError, RuleError
from htp_export.format import tags
from htp_export.model.module_facts import contents_of
from htp_export.model.tagged import TaggedModel
from htp_export.plans.rules import Assigned, assigned
from htp_export.reporting.columns import percent
from htp_export.runtime.processors import is_arm, saturates
from htp_export.runtime.settings import DEFAULTS, RunSettings
from htp_export.shapes.operator_kinds import is_standard
from htp_export.weights.products import products_of
from htp_export.weights.storing import numbers_of

_PRODUCTS, _CONVOLUTIONS = "products with stored matrices", "convolutions"


class AutoPrecision:
    """Replaces the precision ``auto`` by one that is usually faster than fp32 on this machine.

    The choice follows from the operators of the model, which has no functions; ``notes`` explain
    it. The measurements are in ``docs/quantize.md`` ("Which one"):

    - Products with stored matrices are as fast with ranges at run time (``int8-dynamic``) as with
      calibrated ranges, closer to fp32, and need no data.
    - Convolutions are slower with ranges at run time (``ConvInteger`` has no fast kernel), and
      faster with calibrated ranges: on x86 with unsigned activations (``u8s8``), on ARM with signed
      ones (``int8``), which ONNX Runtime fuses by default on ARM and not on x86.
    - On x86 without VNNI, products of unsigned and signed integers saturate: weights get 7 bits.
    """

    def __init__(self, tagged: TaggedModel, settings: RunSettings = DEFAULTS) -> None:
        # The work follows from sizes; data, which may be large, are not read for it.
        self._tagged, self._settings = tagged, replace(settings, data=None)
        self.notes: list[str] = []

    def precision(self, precision: Precision) -> Precision:
        """Return a precision unchanged, or for ``auto`` the one chosen for the whole model."""
        return self._for_whole_model if precision == AUTO else precision

    def rules(self, rules: Mapping[str, Precision]) -> dict[str, Precision]:
        """A plan in which each ``auto`` is replaced by the choice for the nodes of its rule.

        If most of the work is in products, modules of convolutions stay in fp32, unless a later rule
        matches them.
        """
        if AUTO not in rules.values():
            return dict(rules)
        deciding = assigned(self._tagged, rules).deciding
        replaced: dict[str, Precision] = {}
        for selector, precision in rules.items():
            # An inserted rule for convolutions may have this selector, before its turn.
            replaced.pop(selector, None)
            if precision != AUTO:
                replaced[selector] = precision
                continue
            prefix = "" if selector == "." else f"{selector!r}: "
            nodes = deciding[selector]
            chosen = replaced[selector] = self._choose(nodes, prefix)
            if chosen.method == "dynamic":
                kept = self._modules_of_convolutions(nodes)
                replaced |= dict.fromkeys(kept, PRECISIONS["fp32"])
        return replaced

    @cached_property
    def _for_whole_model(self) -> Precision:
        return self._choose(self._tagged.nodes, "")

    def _choose(self, nodes: Collection[ir.Node], prefix: str) -> Precision:
        """Choose a precision for nodes; add a note with the reason, after ``prefix``."""
        work = Counter[str]()
        for node in nodes:
            work[self._kinds.get(node, "")] += self._work.get(node, 0)
        if not work[_PRODUCTS] + work[_CONVOLUTIONS]:
            reasons = reasons_why_not(nodes, PRECISIONS["int8-dynamic"], Facts.of(self._tagged))
            why = "; ".join(listed(reasons)) or "nothing here multiplies with stored weights"
            raise InputError(f"{prefix}auto: {why}; name a precision")

        if work[_PRODUCTS] >= work[_CONVOLUTIONS]:
            name = "int8-dynamic"
        elif is_arm():
            name = "int8"
        else:
            name = "u8s8"
        total = work.total()
        products = f"{percent(work[_PRODUCTS] / total)} {_PRODUCTS}"
        convolutions = f"{percent(work[_CONVOLUTIONS] / total)} {_CONVOLUTIONS}"
        self.notes.append(
            f"{prefix}auto is {name}, as a rule the fastest on {_processor()}: {products}, "
            f"{convolutions}"
        )
        return replace(PRECISIONS[name], reduce_range=saturates())

    def _modules_of_convolutions(self, nodes: Iterable[ir.Node]) -> list[str]:
        """The owners of convolutions that have no products with stored matrices."""
        with_products: set[str] = set()
        for node, kind in self._kinds.items():
            if kind == _PRODUCTS:
                with_products.update(self._tagged.index.works[node].modules)
        owners: dict[str, None] = {}
        for node in nodes:
            if self._kinds.get(node) == _CONVOLUTIONS:
                owners |= dict.fromkeys(self._tagged.owners_of(node))
        return [path for path in owners if path and path not in with_products]

    @cached_property
    def _kinds(self) -> Mapping[ir.Node, str]:
        """The kind of each node that ``int8-dynamic`` takes: products, convolutions, or ""."""
        method, facts = PRECISIONS["int8-dynamic"].how, Facts.of(self._tagged)
        kind_of = {"Conv": _CONVOLUTIONS, "ConvTranspose": _CONVOLUTIONS, "Gather": ""}
        taken = (node for node in self._tagged.nodes if method.takes(node, facts))
        return {node: kind_of.get(node.op_type, _PRODUCTS) for node in taken}

    @cached_property
    def _work(self) -> Mapping[ir.Node, int]:
        """The multiply-adds of each node; the size of its weight if shapes are unknown."""
        from htp_export.costs.execution import run_by_shapes, walk
        from htp_export.costs.work import work_of

        work = Counter[ir.Node]()
        try:
            run = run_by_shapes(self._tagged, self._settings)
        except InputError:
            run = None
        for step, times in walk(run.steps) if run else ():
            done = work_of(step)
            if done:
                work[step.node] += times * done.macs
        for product in products_of(self._tagged, self._tagged.nodes):
            if not work[product.node]:
                work[product.node] = numbers_of(product.value).size
        return work


def _processor() -> str:
    """The kind of this processor, as far as the choice depends on it."""
    if is_arm():
        return "ARM"
    if saturates():
        return "x86 without VNNI (weights get 7 bits)"
    return "x86"


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision of each node of a model.

    Attributes:
        tagged: The model.
        facts: Types of its tensors.
        found: The assignment of the rules, before methods were asked.
        nodes: Precision → the nodes that get it, in the order of the model.
        left: Precision → the other nodes of its modules that produce floats.
    """

    tagged: TaggedModel
    facts: Facts
    found: Assigned[Precision]
    nodes: Mapping[Precision, Sequence[ir.Node]]
    left: Mapping[Precision, Sequence[ir.Node]]

    @property
    def calibrated(self) -> bool:
        """Whether a precision needs data."""
        return any(precision.calibrated for precision in self.nodes)

    @cached_property
    def precision_of(self) -> Mapping[ir.Node, Precision]:
        """Node → its precision; the inverse of ``nodes``."""
        return {node: precision for precision, nodes in self.nodes.items() for node in nodes}

    def without(self, stayed: Iterable[ir.Node]) -> PrecisionChoice:
        """A copy of the choice in which some of the nodes are left unchanged."""
        staying = frozenset(stayed)
        nodes: dict[Precision, list[ir.Node]] = {}
        left = {precision: list(members) for precision, members in self.left.items()}
        for precision, members in self.nodes.items():
            kept = [node for node in members if node not in staying]
            gone = [node for node in members if node in staying]
            if kept:
                nodes[precision] = kept
            if gone:
                left.setdefault(precision, []).extend(gone)
        return replace(self, nodes=nodes, left=left)

    @cached_property
    def weights(self) -> frozenset[ir.Value | None]:
        """The weights of all modules."""
        contents = contents_of(self.tagged).modules
        return frozenset(value for module in contents.values() for value in module.own_weights)

    def precisions(self) -> dict[str, str]:
        """Module path → the name of its precision, ``mixed`` for several, ``fp32`` for none.

        Nodes that are left unchanged do not count in a module that has other nodes with the same
        precision of the plan.
        """
        given = defaultdict[str, set[str]](set)  # module → names of nodes that change, or stay fp32
        missed = defaultdict[str, set[str]](set)  # module → names of nodes that are left
        for node in self.tagged.nodes:
            precision = self.precision_of.get(node)
            is_changed = precision is not None
            if not is_changed:
                # Only nodes with weights count: others have no type of their own in the table.
                if node in self.found.disputed or self.weights.isdisjoint(node.inputs):
                    continue
                precision = self.found.nodes.get(node)
            name = "fp32" if precision is None or precision.is_kept else precision.name
            names = given if is_changed or name == "fp32" else missed
            for path in self.tagged.index.works[node].modules or ("",):
                names[path].add(name)
        for path in self.tagged:
            if not given[path] or not missed[path] <= given[path]:
                given[path].add("fp32")
        return {path: _only(given[path], "mixed") for path in self.tagged}

    def predicted(self) -> dict[str, int]:
        """Module path → predicted bytes of its weights, without the scales of activations.

        As `contents_of` counts them: a module that several others call has the weights of all of
        its calls.
        """
        sizes_of: dict[str, dict[Hashable, int]] = {path: {} for path in self.tagged}
        for node in self.tagged.nodes:
            sizes = dict(self._sizes(node))
            paths = {""}
            for owner in self.tagged.owners_of(node):
                paths.update(tags.ancestors(owner))
            for path in paths:
                sizes_of[path] |= sizes
        return {path: sum(sizes.values()) for path, sizes in sizes_of.items()}

    def _sizes(self, node: ir.Node) -> Iterator[tuple[Hashable, int]]:
        """Yield a key and the predicted bytes of each weight; shared weights have equal keys."""
        precision = self.precision_of.get(node)
        if node.op_type == "Identity" and precision is None:
            uses = node.outputs[0].uses()
            if all(self._size_of(use.node, use.idx) is not None for use in uses):
                return  # it is removed with the weight that it copied
        for place, value in enumerate(node.inputs):
            tensor = constant_of(value)
            if value is None or tensor is None:
                continue
            producer = value.producer()
            if producer in self.precision_of and (
                value not in self.weights or is_standard(producer, "Identity")
            ):
                continue  # the producer gets the type, and its constant is counted there
            size = self._size_of(node, place)
            if size is not None and precision is not None:
                yield (value, precision, precision.how.shared_by(node, place)), size
            elif value in self.weights:
                yield value, tensor.nbytes

    def _size_of(self, node: ir.Node, place: int) -> int | None:
        """The bytes of a weight in the precision of its consumer; None if it stays as it is."""
        precision, tensor = self.precision_of.get(node), constant_of(node.inputs[place])
        if precision is None or tensor is None:
            return None
        if not len(tensor.shape) or not tensor.dtype.is_floating_point():
            return None  # scalars and integers are no weights
        return precision.how.bytes_of(node, place, tensor, self.facts)

    def counted(self, nodes: Mapping[Precision, Sequence[ir.Node]]) -> dict[str, dict[str, int]]:
        """Name of a precision → operator type → number of nodes; equal names are added."""
        counts = defaultdict[str, Counter[str]](Counter)
        for precision, members in nodes.items():
            counts[precision.name].update(node.op_type for node in members)
        return {name: dict(kinds.most_common()) for name, kinds in counts.items()}


def _only(names: Collection[str], otherwise: str) -> str:
    """The single name of a set; ``otherwise`` if there are several."""
    return next(iter(names)) if len(names) == 1 else otherwise


def choose(tagged: TaggedModel, rules: Mapping[str, Precision]) -> PrecisionChoice:
    """Determine the precision of each node, without reading weights.

    Raises:
        RuleError: A rule changes nothing.
        InputError: The opset of the model is too early for a precision.
    """
    found, facts = assigned(tagged, rules), Facts.of(tagged)
    chosen: dict[ir.Node | None, Precision] = {}
    nodes, left = (defaultdict[Precision, list[ir.Node]](list) for _ in range(2))
    for node, precision in found.nodes.items():
        if precision.is_kept:
            continue
        method = precision.how
        _check_opset(precision, method.first_opset, facts)
        # An activation function is quantized only with its producer, with which it is fused.
        source = node.inputs[0] if node.op_type in method.with_producer else None
        has_producer = source is None or chosen.get(source.producer()) == precision
        in_reach = node.graph is facts.graph or method.in_subgraphs
        if has_producer and in_reach and method.takes(node, facts):
            nodes[precision].append(node)
            chosen[node] = precision
        elif any(_could_be(value, precision, facts) for value in node.outputs):
            left[precision].append(node)
    choice = PrecisionChoice(tagged, facts, found, dict(nodes), dict(left))
    _check_rules(choice, rules)
    return choice


def _check_opset(precision: Precision, first: int, facts: Facts) -> None:
    if facts.opset < first:
        raise precision.fault(
            f"needs opset {first} or later, and the model has {facts.opset}: export it with "
            f"opset_version={first}, or convert it with htp_export.tools.version_converter"
        )


def _could_be(value: ir.Value, precision: Precision, facts: Facts) -> bool:
    """Whether a result could have a precision: a float tensor that is computed, in another type."""
    dtype = facts.dtypes.get(value)
    if dtype is None or not dtype.is_floating_point() or constant_of(value) is not None:
        return False
    return dtype == ir.DataType.FLOAT or dtype.numpy().name != precision.activation


def reasons_why_not(
    nodes: Iterable[ir.Node], precision: Precision, facts: Facts
) -> Counter[tuple[str, str]]:
    """Operator type and reason → number of nodes with weights that cannot have a precision."""
    counts = Counter[tuple[str, str]]()
    for node in nodes:
        reason = precision.how.why_not(node, facts)
        if reason:
            counts[node.op_type, reason] += 1
    return counts


def listed(reasons: Mapping[tuple[str, str], int]) -> list[str]:
    """The result of `reasons_why_not` as text, an entry for each reason."""
    return [f"{count} {op_type}: {why}" for (op_type, why), count in reasons.items()]


def _check_rules(choice: PrecisionChoice, rules: Mapping[str, Precision]) -> None:
    """Raise a `RuleError` for a rule whose modules have no operator that takes its precision."""
    for selector, precision in rules.items():
        if precision.is_kept:
            continue
        nodes = choice.found.deciding[selector]
        if choice.found.reached[selector] and not nodes:
            continue  # later rules decide all of its nodes
        if any(choice.precision_of.get(node) == precision for node in nodes):
            continue
        paths = sorted(choice.found.named[selector], key=tags.path_order)
        raise RuleError(selector, _without_effect(choice, precision, nodes, paths))


def _without_effect(
    choice: PrecisionChoice,
    precision: Precision,
    nodes: Collection[ir.Node],
    paths: Sequence[str],
) -> str:
    """Explain why a rule for the modules at ``paths`` changes none of its nodes."""
    kinds = Counter(node.op_type for node in nodes)
    # Five kinds show which module this is; a whole model has dozens.
    operators = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5))
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    problem = (
        f"no operator of module {paths[0] or '(root)'!r}{more} takes {precision.name}; "
        f"there are: {operators or 'no operators'}"
    )
    # A node of several merged modules gets the precision of the module that keeps its weight.
    merged = next((node for node in nodes if choice.found.nodes.get(node) != precision), None)
    if merged is not None:
        owners = ", ".join(map(repr, choice.tagged.index.works[merged].doing))
        return f"{problem}; {merged.op_type} {merged.name!r} does the work of {owners}: give them one precision"
    reasons = listed(reasons_why_not(nodes, precision, choice.facts))
    if reasons:
        return f"{problem}; {'; '.join(reasons)}"
    if any(product.how for product in products_of(choice.tagged, nodes)):
        return f"{problem}; weights are still computed when the model runs: optimize the file first"
    return problem
