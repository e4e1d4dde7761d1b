"""The precision ``auto``: one that is faster than fp32 in ONNX Runtime on this machine, by what a model computes.

What was measured, with the commands, is in ``docs/quantize.md`` ("Which one"):

- Products with stored matrices are as fast with ranges at run time (``int8-dynamic``) as with calibrated ones, nearer
  to fp32, and need no data.
- Convolutions are slower with ranges at run time (``ConvInteger`` has no fast kernel), and faster with calibrated ones:
  on x86 with unsigned activations (``u8s8``), on ARM with signed ones (``int8``), which ONNX Runtime fuses by default
  there and not on x86.
- On x86 without VNNI, products of unsigned and signed integers saturate: weights get 7 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import onnx_ir as ir

from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.precisions import AUTO, PRECISIONS
from htp_export.capabilities.quantize.work import Facts
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export.plans.rules import assigned
from htp_export.results.columns import percent
from htp_export.runtime.processors import is_arm, saturates
from htp_export.weights.products import products_of

_PRODUCTS, _CONVOLUTIONS = "products with stored matrices", "convolutions"


class Serving:
    """What ``auto`` stands for in a model without functions, with sentences on why, of what was asked."""

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

        Modules of convolutions stay in fp32 where products take most of the work, unless a later rule names them.
        """
        if AUTO not in rules.values():
            return dict(rules)
        deciding = assigned(self._tagged, rules).deciding
        served: dict[str, Precision] = {}
        for selector, given in rules.items():
            served.pop(selector, None)  # it holds at its new place
            where = "" if selector == "." else f"{selector!r}: "
            served[selector] = given if given != AUTO else self._of(deciding[selector], where)
            if given == AUTO and served[selector].method == "dynamic":
                served |= dict.fromkeys(self._apart(deciding[selector]), PRECISIONS["fp32"])
        return served

    @cached_property
    def _whole(self) -> Precision:
        return self._of(self._tagged.nodes, "")

    def _of(self, nodes: Iterable[ir.Node], where: str) -> Precision:
        """The precision that serves nodes; a note says why."""
        among = Counter[str]()
        for node in nodes:
            among[self._kinds.get(node, "")] += self._work.get(node, 0)
        if not among[_PRODUCTS] + among[_CONVOLUTIONS]:
            raise InputError(f"{where}auto: nothing here multiplies with stored weights; name a precision")
        dynamic = among[_PRODUCTS] >= among[_CONVOLUTIONS]
        name = "int8-dynamic" if dynamic else "int8" if is_arm() else "u8s8"
        chosen = replace(PRECISIONS[name], reduce_range=saturates())
        shares = ", ".join(f"{percent(among[kind] / among.total())} {kind}" for kind in (_PRODUCTS, _CONVOLUTIONS))
        machine = "ARM" if is_arm() else "x86 without VNNI, so weights have 7 bits" if saturates() else "x86"
        self.notes.append(
            f"{where}auto is {name}, which is faster than fp32 here: {shares}; the processor is {machine}"
        )
        return chosen

    def _apart(self, nodes: Iterable[ir.Node]) -> list[str]:
        """The modules of convolutions that have no products with stored matrices."""
        kinds: dict[str, set[str]] = {}
        for node in self._tagged.nodes:
            for path in self._tagged.index.works[node].modules:
                kinds.setdefault(path, set()).add(self._kinds.get(node, ""))
        own = (node for node in nodes if self._kinds.get(node) == _CONVOLUTIONS)
        owners = dict.fromkeys(path for node in own for path in self._tagged.owners_of(node))
        return [path for path in owners if path and _PRODUCTS not in kinds[path]]

    @cached_property
    def _kinds(self) -> Mapping[ir.Node, str]:
        how, facts = PRECISIONS["int8-dynamic"].how, Facts.of(self._tagged)
        names = {"Conv": _CONVOLUTIONS, "ConvTranspose": _CONVOLUTIONS, "Gather": ""}
        return {node: names.get(node.op_type, _PRODUCTS) for node in self._tagged.nodes if how.takes(node, facts)}

    @cached_property
    def _work(self) -> Mapping[ir.Node, int]:
        """The multiply-adds of nodes; the elements of their weights where sizes are not known."""
        from htp_export.capabilities.cost.execution import run_by_shapes, walk
        from htp_export.capabilities.cost.work import work_of

        work = Counter[ir.Node]()
        try:
            run = run_by_shapes(self._tagged, None, self._dims, self._shapes)
        except InputError:
            run = None
        for step, times in walk(run.steps) if run else ():
            done = work_of(step)
            work[step.node] += times * (done.macs if done else 0)
        for product in products_of(self._tagged, self._tagged.nodes):
            if not work[product.node] and product.value.const_value is not None:
                work[product.node] = product.value.const_value.size
        return work
