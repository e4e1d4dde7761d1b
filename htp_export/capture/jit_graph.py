"""JIT graphs read into plain data, and what became of their tensors from one reading to the next.

Reading crosses from C++ to Python for every value, which is what capture under TorchScript costs; so constants, most
of a traced graph, are only listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from htp_export.capture.torch_internals import written

CONSTANTS = frozenset({"prim::Constant", "onnx::Constant"})
CONTROL_FLOW = frozenset({"onnx::If", "onnx::Loop", "onnx::Scan"})
_LISTS = frozenset(f"prim::{kind}" for kind in ("ListConstruct", "ListUnpack", "TupleConstruct", "TupleUnpack"))
_NO_BLOCKS = CONSTANTS | _LISTS | {"prim::GetAttr", "prim::NumToTensor"}


class Step(NamedTuple):
    """One node of a JIT graph at one moment; tensors are named by their numbers in the graph, or by their states.

    Attributes:
        kind: What it does, ``aten::linear``; an operation in place is called as the one that is not: `out_of_place`.
        inputs: What it reads, what its blocks return included.
        outputs: What it makes.
        returned: For a node whose one block makes its outputs, the block's; empty for others.
        writes: Which of its inputs it changes in place; -1 for none.
    """

    kind: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    returned: tuple[int, ...] = ()
    writes: int = -1


@dataclass
class Reading:
    """A JIT graph at one moment.

    Attributes:
        steps: Its nodes that are no constants, those inside blocks before the node that has the blocks.
        sizes: For each node of the outermost block that is no constant, how many steps it is.
        constants: Numbers of the tensors that constants make.
        made: Numbers of everything that nodes of the outermost block make, in order.
        inputs: Numbers of the inputs that the user gives.
        parameters: Numbers of the other inputs.
        outputs: What it returns, with tuples taken apart.
        scopes: For each node of the outermost block that is no constant, the name of its scope; if they were asked for.
    """

    steps: list[Step] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    constants: set[int] = field(default_factory=set)
    made: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)

    @property
    def outermost(self) -> list[Step]:
        """The steps of the outermost block, for each of ``sizes`` one."""
        return [self.steps[end - 1] for end in itertools.accumulate(self.sizes)]

    @property
    def tensors(self) -> set[int]:
        """Numbers of everything that a step makes."""
        return {number for step in self.steps for number in step.outputs}

    def copied_to(self, graph: Any) -> dict[int, int] | None:
        """Old number → new, for a copy of this graph that numbers its values one after the other.

        None where the copy does not do so, or where there are blocks, whose values come in between.
        """
        first = len(list(graph.inputs()))
        last = graph.return_node().prev()
        if any(size > 1 for size in self.sizes) or not self.made or not last.outputsSize():
            return None
        if last.outputsAt(last.outputsSize() - 1).unique() != first + len(self.made) - 1:
            return None
        given = zip((*self.inputs, *self.parameters), (value.unique() for value in graph.inputs()), strict=True)
        return {**dict(given), **{old: new for new, old in enumerate(self.made, first)}}

    def paired_with(self, copy: Reading) -> dict[int, int]:
        """Old number → new, for another reading of a copy of this graph."""
        numbers = dict(zip((*self.inputs, *self.parameters), (*copy.inputs, *copy.parameters), strict=True))
        for was, now in zip(self.steps, copy.steps, strict=True):
            numbers.update(zip(was.outputs, now.outputs, strict=True))
        return {**numbers, **dict(zip(self.made, copy.made, strict=True))}

    def renamed(self, numbers: dict[int, int]) -> Reading:
        """This graph with other numbers; what has none (values of constants in blocks) gets one that nothing has."""

        def new(old: Iterable[int]) -> tuple[int, ...]:
            return tuple([numbers.get(number, -1 - number) for number in old])

        steps = [Step(step.kind, new(step.inputs), new(step.outputs), new(step.returned)) for step in self.steps]
        return Reading(
            steps,
            self.sizes,
            set(new(self.constants)),
            list(new(self.made)),
            list(new(self.inputs)),
            list(new(self.parameters)),
            list(new(self.outputs)),
        )


def read(graph: Any, user_inputs: int, *, scopes: bool = False) -> Reading:
    """Read a JIT graph whose first ``user_inputs`` inputs are the user's and the others parameters."""
    reading = Reading()
    given = [value.unique() for value in graph.inputs()]
    reading.inputs, reading.parameters = given[:user_inputs], given[user_inputs:]
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
            number = node.output().unique()
            constants.add(number)
            if top:
                reading.made.append(number)
            continue
        outputs = numbers_of_outputs(node)
        if top:
            reading.made.extend(outputs)
        before = len(steps)
        reads = [node.inputsAt(place).unique() for place in range(node.inputsSize())]
        returned: list[int] = []
        if may_have_blocks(kind):
            for inner in node.blocks():
                _read(inner, reading, top=False)
                returned.extend(value.unique() for value in inner.outputs())
        one_to_one = tuple(returned) if len(returned) == len(outputs) else ()
        steps.append(Step(out_of_place(kind), (*reads, *returned), outputs, one_to_one, written(kind)))
        if top:
            reading.sizes.append(len(steps) - before)
            if scopes:
                reading.scopes.append(node.scopeName())


def out_of_place(kind: str) -> str:
    """What an operation in place is called where it is not: ``aten::add`` for ``aten::add_``."""
    return kind.removesuffix("_")


def numbers_of_outputs(node: Any) -> tuple[int, ...]:
    """The numbers of what a node makes."""
    # By index: the bindings make a new iterator type for each list, at thirty times the cost of one access.
    count = node.outputsSize()
    return (node.output().unique(),) if count == 1 else tuple([node.outputsAt(k).unique() for k in range(count)])


@cache
def may_have_blocks(kind: str) -> bool:
    """Whether nodes of a kind can have blocks: those of ATen cannot, and of ONNX only control flow can."""
    return kind in CONTROL_FLOW or not (kind in _NO_BLOCKS or kind.startswith(("aten::", "onnx::")))


def follow(before: Reading, after: Reading) -> dict[int, int]:
    """Where a rewriting of a graph in place left each tensor: the tensor that now holds its value.

    Tensors whose values no tensor holds any more are absent. What is still there has the same number.

    A node that is in both graphs and reads another tensor in a place shows what that place's tensor became. From
    there backwards: where one operation stands in for another of its kind, so do the tensors that they read; and where
    it stands in for one of another kind after one of its own, both are gone, and it does the work of both. Where a
    node made ``a``, the next computed ``b`` from it, and now a changed node makes ``a`` and everything that read
    ``b`` reads it, then the changed node does the work of both, and the tensor called ``a`` holds the value of ``b``.
    """
    made_before = {number: step for step in before.steps for number in step.outputs}
    made_after = {number: step for step in after.steps for number in step.outputs}
    given = {*after.parameters, *after.constants}
    became: dict[int, int] = {}
    queue = [(a, b) for a, b in zip(before.outputs, after.outputs, strict=False) if a != b]
    for step in after.steps:
        old = made_before.get(step.outputs[0]) if step.outputs else None
        if old is not None and old.inputs != step.inputs:
            queue.extend(_replaced(old, step, given))
    while queue:
        old_number, new_number = queue.pop()
        if old_number in made_after or old_number in became or old_number not in made_before:
            continue
        became[old_number] = new_number
        stands_in = made_before.get(new_number) or made_after.get(new_number)
        if stands_in is not None:
            old = made_before[old_number]
            absorbed = [made_before[read] for read in old.inputs if read in made_before and read not in made_after]
            same = [step for step in (old, *absorbed) if step.kind == stands_in.kind][:1]
            queue.extend(pair for step in same for pair in _replaced(step, stands_in, given))
    there = {*made_after, *after.inputs, *after.constants}
    moved = {number: number for number in (*made_before, *before.inputs) if number in there}
    moved.update((number, _last(number, became, made_after)) for number in became)
    constants = before.constants | after.constants
    for old_number, new_number in became.items():
        made, remade = made_before.get(new_number), made_after.get(new_number)
        reads_it = made is not None and new_number in made_before[old_number].inputs
        if reads_it and remade is not None and _changed(made, remade, became, constants):  # type: ignore[arg-type]
            del moved[new_number]
    return {old: new for old, new in moved.items() if new in there}


def _replaced(old: Step, new: Step, given: Collection[int]) -> Iterable[tuple[int, int]]:
    """What one operation reads in place of what another read; a weight at the end may be new, as a bias is."""
    size = len(old.inputs)
    if old.kind != new.kind or len(new.inputs) < size or any(extra not in given for extra in new.inputs[size:]):
        return ()
    return ((a, b) for a, b in zip(old.inputs, new.inputs, strict=False) if a != b)


def _last(number: int, became: dict[int, int], stop: dict[int, Step]) -> int:
    """Where a chain of replacements ends."""
    seen = set()
    while number not in stop and number in became and number not in seen:
        seen.add(number)
        number = became[number]
    return number


def _changed(made: Step, remade: Step, became: dict[int, int], constants: set[int]) -> bool:
    """Whether a node reads other tensors than before, or is another operation."""
    if made.kind != remade.kind or len(made.inputs) != len(remade.inputs):
        return True
    pairs = zip(made.inputs, remade.inputs, strict=True)
    return any(a != b and became.get(a) != b and not (a in constants and b in constants) for a, b in pairs)
