"""``export_plan``: a plan as the file that another tool reads."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, TypeAlias

import onnx_ir as ir

from htp_export.capabilities.quantize.choosing import AutoPrecision
from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.methods.weights import Blocks
from htp_export.capabilities.quantize.precisions import precisions_of
from htp_export.discovery import names_in
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError, RuleError
from htp_export.files.targets import Kind, check_target
from htp_export.files.text_files import write_text
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.plans.rules import assigned
from htp_export.reporting.result import Result
from htp_export.weights.products import Product, products_of

Expressed: TypeAlias = Mapping[str, Mapping[str, tuple[Any, ...]]]
"""The precisions that a tool supports: method → field of a precision → values; other fields may
have any value."""

_USUAL: Mapping[str, tuple[Any, ...]] = {"format": ("default",), "accuracy_level": (None, 0)}
"""The values that a tool supports if `Expressed` does not list the field: a tool writes its own
operators, without a level of arithmetic."""

LEVELS = (None, *Blocks.accuracy_levels)
"""The values of ``accuracy_level`` for a tool that writes it."""

IN_BLOCKS = ("MatMul", "Gather")
"""Operators whose weights ONNX Runtime and Olive cut into blocks."""


@dataclass(frozen=True)
class TargetFile:
    """The contents of a file for a tool.

    Attributes:
        content: Plain data, written as JSON.
        notes: How to use it, and parts of the plan that it cannot contain, a line each.
    """

    content: dict[str, object]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedModel:
    """A model whose nodes have precisions.

    Attributes:
        tagged: The model, without functions.
        precisions: Node → its precision, for the nodes that a rule matches.
        rules: Selector → precision, the plan.
    """

    tagged: TaggedModel
    precisions: Mapping[ir.Node, Precision]
    rules: Mapping[str, Precision]

    @cached_property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes of the main graph; tools ignore the graphs of branches and loops."""
        return tuple(self.tagged.model.graph)

    def of(self, method: str) -> dict[Precision, list[ir.Node]]:
        """Precision → its nodes in the main graph, for the precisions of a method."""
        nodes_of = defaultdict[Precision, list[ir.Node]](list)
        for node in self.nodes:
            precision = self.precisions.get(node)
            if precision is not None and precision.method == method:
                nodes_of[precision].append(node)
        return nodes_of

    def named_nodes_without(self, chosen: Iterable[ir.Node]) -> list[ir.Node]:
        """The nodes of the main graph that are not chosen, as far as they have names."""
        excluded = set(chosen)
        return [node for node in self.nodes if node not in excluded and node.name]

    def weighted(self, nodes: Iterable[ir.Node]) -> list[Product]:
        """The nodes among ``nodes`` that multiply with a weight or look it up, with the weight."""
        return list(products_of(self.tagged, nodes))

    def check(self, target: str, expressed: Expressed) -> None:
        """Raise a `RuleError` for a rule with a precision that a tool does not support."""
        for selector, precision in self.rules.items():
            if precision.method == "keep":
                continue
            if precision.method not in expressed:
                known = ", ".join(sorted({*expressed, "keep"}))
                raise RuleError(
                    selector, f"{target} has no {precision}; it takes the methods {known}"
                )
            for name, allowed in {**_USUAL, **expressed[precision.method]}.items():
                value = getattr(precision, name)
                if value not in allowed:
                    known = ", ".join(str(other) for other in allowed if other is not None)
                    raise RuleError(
                        selector,
                        f"{target} has no {precision} with {name} {value}; it takes {known}",
                    )

    def check_alike(self, target: str, method: str, *fields: str) -> None:
        """Raise a `RuleError` if rules differ in fields with one value in a run of a tool."""
        used = {*self.precisions.values()}
        rules = [
            (selector, precision)
            for selector, precision in self.rules.items()
            if precision.method == method and precision in used
        ]
        for name in fields:
            for selector, precision in rules[1:]:
                first, value = value_of(rules[0][1], name), value_of(precision, name)
                if value != first:
                    raise RuleError(
                        selector,
                        f"{target} has one {name} in a run; the plan has {first} and {value}",
                    )

    def check_names(self) -> None:
        """Raise an `InputError` for a node without a unique name, by which a tool could find it."""
        counts = Counter(node.name for node in self.nodes)
        for node in self.nodes:
            if node not in self.precisions or (node.name and counts[node.name] == 1):
                continue
            owner = next(iter(self.tagged.owners_of(node)), "") or "(root)"
            problem = "has no name"
            if node.name:
                problem = f"shares the name {node.name!r} with another node"
            raise InputError(
                f"a {node.op_type} of module {owner!r} {problem}; tools know nodes by their names"
            )

    def block_notes(self, tool: str) -> tuple[str, ...]:
        """A note on weights that a tool does not cut into blocks, because of their operators."""
        left_out: list[str] = []
        for nodes in self.of("weights").values():
            kinds = (use.node.op_type for use in self.weighted(nodes))
            left_out += [kind for kind in kinds if kind not in IN_BLOCKS]
        if not left_out:
            return ()
        listed = ", ".join(sorted(set(left_out)))
        return (f"{len(left_out)} nodes keep their weights: {tool} has no blocks in {listed}",)

    def subgraph_notes(self) -> tuple[str, ...]:
        """A note on nodes of branches and loops, which the file cannot name."""
        count = len(self.precisions.keys() - set(self.nodes))
        if not count:
            return ()
        return (
            f"{count} nodes in branches or loops are left out: the file names nodes of the main graph",
        )


def value_of(precision: Precision, field: str) -> Any:
    """The value of a field; for the level of arithmetic, the effective one if it is None."""
    if field == "accuracy_level":
        return Blocks(precision).accuracy_level
    return getattr(precision, field)


def block_fields(precision: Precision) -> dict[str, Any]:
    """The fields of weights in blocks, by their names in ONNX Runtime and Olive."""
    return {
        "bits": precision.bits,
        "block_size": precision.block_size,
        "is_symmetric": precision.symmetric,
        "accuracy_level": value_of(precision, "accuracy_level"),
    }


def names(nodes: Iterable[ir.Node]) -> list[str]:
    """The names of nodes."""
    return [str(node.name) for node in nodes]


_FOLDER = "htp_export.capabilities.quantize.targets"


def targets() -> list[str]:
    """The tools for which plans can be written: the files of ``targets``."""
    return names_in(_FOLDER)


@dataclass(frozen=True)
class PlanFile(Result):
    """The result of `export_plan`.

    Attributes:
        to: The tool.
        content: The contents of the file: plain data, written as JSON.
        nodes: Name of a precision → number of its nodes.
        notes: How to use the file, and parts of the plan that it cannot contain, a line each.
        file: The file that was written; None if none was.
    """

    to: str
    content: Mapping[str, Any]
    nodes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    file: str | None = None

    @property
    def text(self) -> str:
        """The contents of the file."""
        return json.dumps(self.content, indent=2, ensure_ascii=False) + "\n"

    @property
    def summary(self) -> str:
        """The result in one line."""
        listed = ", ".join(f"{count} nodes {name}" for name, count in self.nodes.items())
        return f"plan for {self.to}: {listed}"


@names_model_faults("model")
def export_plan(
    model: ModelSource,
    plan: Mapping[str, Any] | str,
    output: str | os.PathLike[str] | None = None,
    *,
    to: str,
) -> PlanFile:
    """Write a plan as a JSON file for another tool, which need not be installed.

    - ``"ort"``: arguments of ONNX Runtime's ``quantize_static``, ``quantize_dynamic`` and
      ``MatMulNBitsQuantizer``
    - ``"nncf"``: arguments of ``nncf.quantize`` and ``nncf.compress_weights``, with ignored scopes
    - ``"modelopt"``: arguments of ``modelopt.onnx.quantization.quantize``
    - ``"genai"``: ``target_options`` of ONNX Runtime GenAI's model builder
    - ``"olive"``: passes of ``olive run``

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        plan: Selector → precision, in order, or a precision for the whole model; as for
            ``quantize``.
        output: The file to write; None for none.
        to: The tool.

    Returns:
        The contents of the file as ``.content`` and ``.text``, and notes on its use.

    Raises:
        InputError: The plan has a precision that the tool does not have, or a node cannot be named.
        SelectorError: A selector cannot be read or matches no module.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> plan = htp_export.export_plan(program, {"0": "int8"}, to="ort")
        >>> plan.content["steps"][0]["arguments"]["nodes_to_quantize"]
        ['node_linear']
    """
    check_target(output, Kind.JSON)
    if to not in targets():
        raise InputError(f"plans are written for {', '.join(targets())}, not for {to!r}")
    tagged = read_flat(model)
    auto = AutoPrecision(tagged)
    rules = auto.rules(precisions_of(plan))
    planned = PlannedModel(tagged, assigned(tagged, rules).nodes, rules)
    planned.check_names()
    target = import_module(f"{_FOLDER}.{to}")
    planned.check(to, target.EXPRESSED)
    written: TargetFile = target.plan_file(planned)
    counts = Counter(str(precision) for precision in planned.precisions.values())
    notes = (*auto.notes, *written.notes)
    file = None if output is None else os.fspath(output)
    result = PlanFile(to, written.content, dict(counts), notes, file)
    if output is not None:
        write_text(output, result.text, Kind.JSON)
    return result
