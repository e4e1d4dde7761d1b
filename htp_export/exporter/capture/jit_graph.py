"""JIT graphs read into plain data; constants, most of a traced graph, are only listed, as each access takes time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from htp_export.exporter.capture.torchscript_internals import out_of_place, written

CONSTANTS = frozenset({"prim::Constant", "onnx::Constant"})
CONTROL_FLOW = frozenset({"onnx::If", "onnx::Loop", "onnx::Scan"})
# Operations on shapes alone: traced as integers, ONNX's own, and those that fill a tensor as large as another.
SHAPE_KINDS = frozenset(
    {
        *("aten::size", "aten::dim", "aten::numel", "aten::len", "onnx::Shape", "onnx::Size"),
        *("aten::zeros_like", "aten::ones_like", "aten::empty_like"),
        *("aten::new_zeros", "aten::new_ones", "aten::new_empty"),
    }
)
_LISTS = frozenset(f"prim::{kind}" for kind in ("ListConstruct", "ListUnpack", "TupleConstruct", "TupleUnpack"))
_NO_BLOCKS = CONSTANTS | _LISTS | {"prim::GetAttr", "prim::NumToTensor"}
_PLAIN = frozenset({"i", "is", "f", "fs", "s", "ss"})  # numbers and words: types of attributes
_NAME = "onnx_name"


class JitStep(NamedTuple):
    """One node of a JIT graph at one moment; tensors are named by their numbers in the graph, or by their states."""

    kind: str  # what it does, ``aten::linear``; an operation in place is called as the one that is not: `out_of_place`
    inputs: tuple[Any, ...]  # what it reads, what its blocks return included
    outputs: tuple[Any, ...]  # what it makes
    returned: tuple[int, ...] = ()  # for a node whose one block makes its outputs, the block's; empty for others
    writes: int = -1  # which of its inputs it changes in place; -1 for none
    # Names and values of its attributes. ONNX operators have such; those of ATen have inputs instead.
    attributes: tuple[tuple[str, Any], ...] = ()


@dataclass
class Reading:
    """A JIT graph at one moment."""

    # Its nodes that are no constants, those inside blocks before the node that has the blocks
    steps: list[JitStep] = field(default_factory=list)
    # For each node of the outermost block that is no constant, how many steps it is
    sizes: list[int] = field(default_factory=list)
    constants: dict[int, None] = field(default_factory=dict)  # numbers of the tensors that constants make, in order
    inputs: list[int] = field(default_factory=list)  # numbers of the inputs that the user gives
    parameters: list[int] = field(default_factory=list)  # numbers of the other inputs
    outputs: list[Any] = field(default_factory=list)  # what it returns, with tuples taken apart
    # For each node of the outermost block that is no constant, the name of its scope; if they were asked for
    scopes: list[str] = field(default_factory=list)

    @property
    def outermost(self) -> list[JitStep]:
        """The steps of the outermost block, for each of ``sizes`` one."""
        return [self.steps[end - 1] for end in itertools.accumulate(self.sizes)]

    def paired_with(self, copy: Reading) -> dict[int, int]:
        """Old number → new, for the reading of a copy of this graph that was made node by node."""
        old, new = ((*each.inputs, *each.parameters, *each.constants) for each in (self, copy))
        numbers = dict(zip(old, new, strict=True))
        for was, now in zip(self.steps, copy.steps, strict=True):
            numbers.update(zip(was.outputs, now.outputs, strict=True))
        return numbers


def read(graph: Any, user_inputs: int, *, scopes: bool = False) -> Reading:
    """Read a JIT graph whose first ``user_inputs`` inputs are the user's and the others parameters."""
    reading = Reading()
    numbers = [value.unique() for value in graph.inputs()]
    reading.inputs, reading.parameters = numbers[:user_inputs], numbers[user_inputs:]
    _read(graph, reading, top=True, scopes=scopes)
    tuples = {step.outputs[0]: step.inputs for step in reading.steps if step.kind == "prim::TupleConstruct"}
    waiting = [value.unique() for value in graph.outputs()][::-1]
    while waiting:
        number = waiting.pop()
        if number in tuples:
            waiting.extend(reversed(tuples[number]))
        else:
            reading.outputs.append(number)
    return reading


def _read(block: Any, reading: Reading, *, top: bool, scopes: bool = False) -> None:
    steps, constants = reading.steps, reading.constants
    for node in block.nodes():
        kind = node.kind()
        if kind in CONSTANTS:
            constants[node.output().unique()] = None
            continue
        outputs = numbers_of_outputs(node)
        before = len(steps)
        reads = numbers_of_inputs(node)
        returned: list[int] = []
        if may_have_blocks(kind):
            for inner in node.blocks():
                _read(inner, reading, top=False)
                returned.extend(value.unique() for value in inner.outputs())
        one_to_one = tuple(returned) if len(returned) == len(outputs) else ()
        changed = written(kind, len(reads))
        steps.append(
            JitStep(out_of_place(kind), (*reads, *returned), outputs, one_to_one, changed, attributes_of(node, kind))
        )
        if top:
            reading.sizes.append(len(steps) - before)
            if scopes:
                reading.scopes.append(node.scopeName())


def attributes_of(node: Any, kind: str) -> tuple[tuple[str, Any], ...]:
    """The attributes of an ONNX node that say what it does; not its name, which torch keeps in one too."""
    if not kind.startswith("onnx::") or not node.hasAttributes():
        return ()
    types = [(name, node.kindOf(name)) for name in node.attributeNames() if name != _NAME]
    return tuple([(name, _plain(getattr(node, of)(name))) for name, of in types if of in _PLAIN])


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def numbers_of_inputs(node: Any) -> tuple[int, ...]:
    """The numbers of what a node reads."""
    return tuple([node.inputsAt(place).unique() for place in range(node.inputsSize())])


def numbers_of_outputs(node: Any) -> tuple[int, ...]:
    """The numbers of what a node makes."""
    # By index: the bindings make a new iterator type for each list, at thirty times the cost of one access.
    count = node.outputsSize()
    return (node.output().unique(),) if count == 1 else tuple([node.outputsAt(k).unique() for k in range(count)])


def nodes_of(block: Any) -> Iterator[Any]:
    """Every node of a graph or block, those inside its blocks before the node."""
    for node in block.nodes():
        for inner in node.blocks() if may_have_blocks(node.kind()) else ():
            yield from nodes_of(inner)
        yield node


@cache
def may_have_blocks(kind: str) -> bool:
    """Whether nodes of a kind can have blocks: those of ATen cannot, and of ONNX only control flow can."""
    return kind in CONTROL_FLOW or not (kind in _NO_BLOCKS or kind.startswith(("aten::", "onnx::")))
