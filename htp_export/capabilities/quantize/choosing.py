"""What a plan does to a model, before anything is run: which nodes get which precision, and the bytes of weights."""

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
from htp_export.shapes.operator_kinds import is_standard
from htp_export.weights.products import products_of
from htp_export.weights.storing import numbers_of

_PRODUCTS, _CONVOLUTIONS = "products with stored matrices", "convolutions"


class AutoPrecision:
    """The precision ``auto``: one that is faster than fp32 in ONNX Runtime on this machine, by what a model computes.

    ``notes`` say why, of what was asked. The model has no functions. What was measured is in
    ``docs/quantize.md`` ("Which one"):

    - Products with stored matrices are as fast with ranges at run time (``int8-dynamic``) as with calibrated ones,
      nearer to fp32, and need no data.
    - Convolutions are slower with ranges at run time (``ConvInteger`` has no fast kernel), and faster with calibrated
      ones: on x86 with unsigned activations (``u8s8``), on ARM with signed ones (``int8``), which
      ONNX Runtime fuses by default there and not on x86.
    - On x86 without VNNI, products of unsigned and signed integers saturate: weights get 7 bits.
    """

    def __init__(
        self,
        tagged: TaggedModel,
        dims: Mapping[str, int] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._tagged, self._dims, self._shapes = tagged, dims, shapes
        self.notes: list[str] = []

    def precision(self, given: Precision) -> Precision:
        """A precision, or for ``auto`` the one that serves the whole model."""
        return self._whole if given == AUTO else given

    def rules(self, rules: Mapping[str, Precision]) -> dict[str, Precision]:
        """A plan in which each ``auto`` is the precision that serves the nodes of its rule.

        Modules of convolutions stay in fp32 where products take most of the work, unless a later
        rule names them.
        """
        if AUTO not in rules.values():
            return dict(rules)
        deciding = assigned(self._tagged, rules).deciding
        served: dict[str, Precision] = {}
        for selector, given in rules.items():
            served.pop(selector, None)  # it holds at its new place
            served[selector] = given
            if given == AUTO:
                served[selector] = self._of(
                    deciding[selector], "" if selector == "." else f"{selector!r}: "
                )
                if served[selector].method == "dynamic":
                    served |= dict.fromkeys(self._apart(deciding[selector]), PRECISIONS["fp32"])
        return served

    @cached_property
    def _whole(self) -> Precision:
        return self._of(self._tagged.nodes, "")

    def _of(self, nodes: Collection[ir.Node], where: str) -> Precision:
        """The precision that serves nodes; a note says why."""
        among = Counter[str]()
        for node in nodes:
            among[self._kinds.get(node, "")] += self._work.get(node, 0)
        if not among[_PRODUCTS] + among[_CONVOLUTIONS]:
            reasons = reasons_why_not(nodes, PRECISIONS["int8-dynamic"], Facts.of(self._tagged))
            why = "; ".join(listed(reasons)) or "nothing here multiplies with stored weights"
            raise InputError(f"{where}auto: {why}; name a precision")
        dynamic = among[_PRODUCTS] >= among[_CONVOLUTIONS]
        name = "int8-dynamic" if dynamic else "int8" if is_arm() else "u8s8"
        shares = ", ".join(
            f"{percent(among[kind] / among.total())} {kind}" for kind in (_PRODUCTS, _CONVOLUTIONS)
        )
        machine = (
            "ARM"
            if is_arm()
            else "x86 without VNNI, so weights have 7 bits"
            if saturates()
            else "x86"
        )
        self.notes.append(
            f"{where}auto is {name}, which is faster than fp32 here: {shares}; the processor is {machine}"
        )
        return replace(PRECISIONS[name], reduce_range=saturates())

    def _apart(self, nodes: Iterable[ir.Node]) -> list[str]:
        """The modules of convolutions that have no products with stored matrices."""
        products = (node for node, kind in self._kinds.items() if kind == _PRODUCTS)
        around = {path for node in products for path in self._tagged.index.works[node].modules}
        own = (node for node in nodes if self._kinds.get(node) == _CONVOLUTIONS)
        owners = dict.fromkeys(path for node in own for path in self._tagged.owners_of(node))
        return [path for path in owners if path and path not in around]

    @cached_property
    def _kinds(self) -> Mapping[ir.Node, str]:
        how, facts = PRECISIONS["int8-dynamic"].how, Facts.of(self._tagged)
        names = {"Conv": _CONVOLUTIONS, "ConvTranspose": _CONVOLUTIONS, "Gather": ""}
        return {
            node: names.get(node.op_type, _PRODUCTS)
            for node in self._tagged.nodes
            if how.takes(node, facts)
        }

    @cached_property
    def _work(self) -> Mapping[ir.Node, int]:
        """The multiply-adds of nodes; the elements of their weights where sizes are not known."""
        from htp_export.costs.execution import run_by_shapes, walk
        from htp_export.costs.work import work_of

        work = Counter[ir.Node]()
        try:
            run = run_by_shapes(self._tagged, None, self._dims, self._shapes)
        except InputError:
            run = None
        for step, times in walk(run.steps) if run else ():
            if done := work_of(step):
                work[step.node] += times * done.macs
        for product in products_of(self._tagged, self._tagged.nodes):
            if not work[product.node]:
                work[product.node] = numbers_of(product.value).size
        return work


@dataclass(frozen=True)
class PrecisionChoice:
    """Which nodes of a model get which precision.

    ``found`` is what the rules say; ``nodes`` get a precision, in order; ``left`` are the other
    nodes of its modules that make floats.
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

    def without(self, stayed: Iterable[ir.Node]) -> PrecisionChoice:
        """The choice in which some of its nodes stay as they are."""
        staying = frozenset(stayed)
        nodes = {
            given: [node for node in listed if node not in staying]
            for given, listed in self.nodes.items()
        }
        left = {given: list(listed) for given, listed in self.left.items()}
        for given, listed in self.nodes.items():
            if gone := [node for node in listed if node in staying]:
                left.setdefault(given, []).extend(gone)
        return replace(
            self, nodes={given: listed for given, listed in nodes.items() if listed}, left=left
        )

    @cached_property
    def weights(self) -> frozenset[ir.Value | None]:
        """The weights of the model."""
        contents = contents_of(self.tagged).modules
        return frozenset(value for module in contents.values() for value in module.own_weights)

    def precisions(self) -> dict[str, str]:
        """Module path → the name of its precision, ``mixed`` for several, ``fp32`` for none.

        Nodes that stay as they are in modules that have a precision do not count beside others that
        get it.
        """
        given, missed = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        for node in self.tagged.nodes:
            taken = self.precision_of.get(node)
            if taken is None and (
                node in self.found.disputed or self.weights.isdisjoint(node.inputs)
            ):
                continue
            precision = taken or self.found.nodes.get(node)
            word = "fp32" if precision is None or precision.is_kept else precision.name
            for path in self.tagged.index.works[node].modules or ("",):
                (given if taken or word == "fp32" else missed)[path].add(word)
        for path in self.tagged:
            if not given[path] or not missed[path] <= given[path]:
                given[path].add("fp32")
        return {
            path: next(iter(given[path])) if len(given[path]) == 1 else "mixed"
            for path in self.tagged
        }

    def predicted(self) -> dict[str, int]:
        """Module path → bytes of its weights afterwards, without the scales of activations.

        As `contents_of` counts them: a module that others call too has the weights of all of its
        calls.
        """
        found: dict[str, dict[Hashable, int]] = {path: {} for path in self.tagged}
        for node in self.tagged.nodes:
            sizes = dict(self._sizes(node))
            for path in {
                "",
                *(up for owner in self.tagged.owners_of(node) for up in tags.ancestors(owner)),
            }:
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
            if maker in self.precision_of and (
                value not in self.weights or is_standard(maker, "Identity")
            ):
                continue  # it is cast itself
            size = self._size_of(node, place)
            if size is not None and precision is not None:
                yield (value, precision, precision.how.shared_by(node, place)), size
            elif value in self.weights:
                yield value, tensor.nbytes

    def _size_of(self, node: ir.Node, place: int) -> int | None:
        """The bytes of a weight of a node in the precision that it gets; None if it stays as it is."""
        precision, tensor = self.precision_of.get(node), constant_of(node.inputs[place])
        if (
            precision is None
            or tensor is None
            or not len(tensor.shape)
            or not tensor.dtype.is_floating_point()
        ):
            return None  # numbers are no weights
        return precision.how.bytes_of(node, place, tensor, self.facts)

    def counted(self, nodes: Mapping[Precision, Sequence[ir.Node]]) -> dict[str, dict[str, int]]:
        """Name of a precision → operator type → number of nodes; precisions with the same name count as one."""
        found = defaultdict[str, Counter[str]](Counter)
        for precision, listed in nodes.items():
            found[precision.name].update(node.op_type for node in listed)
        return {name: dict(kinds.most_common()) for name, kinds in found.items()}


def choose(tagged: TaggedModel, rules: Mapping[str, Precision]) -> PrecisionChoice:
    """Find out what a plan does to a model; a rule that changes nothing is refused. No weights are read."""
    found, facts = assigned(tagged, rules), Facts.of(tagged)
    chosen: dict[ir.Node | None, Precision] = {}
    nodes, left = (defaultdict[Precision, list[ir.Node]](list) for _ in range(2))
    for node, precision in found.nodes.items():
        if precision.is_kept:
            continue
        how = precision.how
        if facts.opset < (needed := how.first_opset):
            raise precision.fault(
                f"needs opset {needed} or later, and the model has {facts.opset}: export it with "
                f"opset_version={needed}, or convert it with htp_export.tools.version_converter"
            )
        first = node.inputs[0] if node.op_type in how.with_producer else None
        with_producer = first is None or chosen.get(first.producer()) == precision
        in_reach = node.graph is facts.graph or how.in_subgraphs
        if with_producer and in_reach and how.takes(node, facts):
            nodes[precision].append(node)
            chosen[node] = precision
        elif any(_could_be(value, precision, facts) for value in node.outputs):
            left[precision].append(node)
    choice = PrecisionChoice(tagged, facts, found, dict(nodes), dict(left))
    _check_rules(choice, rules)
    return choice


def _could_be(value: ir.Value, precision: Precision, facts: Facts) -> bool:
    """Whether a result could have a precision: it is no constant, and consists of floats that have it not already."""
    dtype = facts.dtypes.get(value)
    if dtype is None or not dtype.is_floating_point() or constant_of(value) is not None:
        return False
    return dtype == ir.DataType.FLOAT or dtype.numpy().name != precision.activation


def reasons_why_not(
    nodes: Iterable[ir.Node], precision: Precision, facts: Facts
) -> Counter[tuple[str, str]]:
    """Operator type and reason → number of nodes with weights that cannot have a precision for this reason."""
    found = Counter[tuple[str, str]]()
    for node in nodes:
        if why := precision.how.why_not(node, facts):
            found[node.op_type, why] += 1
    return found


def listed(reasons: Mapping[tuple[str, str], int]) -> list[str]:
    """Reasons in words."""
    return [f"{count} {op_type}: {why}" for (op_type, why), count in reasons.items()]


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
        there_are = (
            ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) or "no operators"
        )
        paths = sorted(choice.found.named[selector], key=tags.path_order)
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        problem = f"no operator of module {paths[0] or '(root)'!r}{more} takes {precision.name}; there are: {there_are}"
        merged = next((node for node in nodes if choice.found.nodes.get(node) != precision), None)
        if merged is not None:
            owners = ", ".join(map(repr, choice.tagged.index.works[merged].doing))
            problem += f"; {merged.op_type} {merged.name!r} does the work of {owners}: give them one precision"
        elif reasons := listed(reasons_why_not(nodes, precision, choice.facts)):
            problem += f"; {'; '.join(reasons)}"
        elif any(product.how for product in products_of(choice.tagged, nodes)):
            problem += "; weights are still computed when the model runs: optimize the file first"
        raise RuleError(selector, problem)
