"""Private parts of torch that are used, as in ``torch_internals.py``: TorchScript's tracer, schemas and graphs.

JIT graphs are read into plain data; constants, most of a traced graph, are only listed, as each
access takes time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

CONSTANTS = frozenset({"prim::Constant", "onnx::Constant"})
CONTROL_FLOW = frozenset({"onnx::If", "onnx::Loop", "onnx::Scan"})
# Operations on shapes alone: traced as integers, ONNX's own, and those that fill a tensor as large
# as another.
SHAPE_KINDS = frozenset(
    {
        *("aten::size", "aten::dim", "aten::numel", "aten::len", "onnx::Shape", "onnx::Size"),
        *("aten::zeros_like", "aten::ones_like", "aten::empty_like"),
        *("aten::new_zeros", "aten::new_ones", "aten::new_empty"),
    }
)
LIST = "prim::ListConstruct"
_LISTS = {LIST} | frozenset(
    f"prim::{kind}" for kind in ("ListUnpack", "TupleConstruct", "TupleUnpack")
)
_NUMBER = "prim::NumToTensor"
_NO_BLOCKS = CONSTANTS | _LISTS | {"prim::GetAttr", _NUMBER}
_PLAIN = frozenset({"i", "is", "f", "fs", "s", "ss"})  # numbers and words: types of attributes
_NAME = "onnx_name"


@cache
def usual_name(kind: str) -> str:
    """The operator that torch puts for one that is another name of it, ``aten::mul`` for ``aten::multiply``.

    It does so at the end of every trace, and whenever it compiles a function; so one is compiled.
    """
    name = kind.removeprefix("aten::")
    if name == kind or not name.isidentifier():
        return kind
    for schema in torch._C._jit_get_schemas_for_operator(kind):
        types = ", ".join(
            f"a{k}: {given.type.annotation_str}" for k, given in enumerate(schema.arguments)
        )
        given = ", ".join(
            f"{'' if not a.kwarg_only else a.name + '='}a{k}"
            for k, a in enumerate(schema.arguments)
        )
        try:
            unit = torch.jit.CompilationUnit(
                f"def f({types}):\n    return torch.ops.aten.{name}({given})\n"
            )
        except RuntimeError:  # arguments of a type that cannot be written down
            continue
        kinds = {node.kind() for node in unit.f.graph.nodes()} - {"prim::Constant"}
        return kinds.pop() if len(kinds) == 1 else kind
    return kind


def tracing_state() -> Any:
    """The state of the TorchScript trace that runs in this thread; None where none does."""
    return torch._C._get_tracing_state()


def flattened(value: Any) -> list[Any]:
    """The tensors of arguments or results as the tracer takes them, numbers and flags too; or a `RuntimeError`."""
    tensors, _ = torch._C._jit_flatten(value)
    return list(tensors)


def numbers_as_tensors(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as the TorchScript tracer passes them on, or refuses them: numbers and flags are tensors."""
    tensors, structure = torch._C._jit_flatten(arguments)
    changed: tuple[Any, ...] = torch._C._jit_unflatten(tensors, structure)
    return changed


def state_names(model: Any) -> frozenset[str]:
    """Names of the parameters and buffers that a traced graph of this model takes as inputs, shared ones once."""
    if not isinstance(model, torch.nn.Module):
        return frozenset()
    # With its tensors as they are: a quantized model holds more than tensors, which cannot be
    # detached.
    return frozenset(torch.jit._unique_state_dict(model, keep_vars=True))  # type: ignore[attr-defined, no-untyped-call]


@cache
def written(kind: str, count: int) -> int:
    """Which of its ``count`` arguments an operator changes in place and gives back; -1 for none.

    Overloads of one name have different counts of arguments where one of them has an ``out``.
    """
    return next((place for place, alias in _aliases(kind, count) if alias.is_write), -1)


@cache
def viewed(kind: str, count: int) -> int:
    """Of which of its ``count`` arguments an operator may give back a view; -1 for none."""
    if kind in ("prim::ListUnpack", "prim::TupleUnpack"):
        return 0
    return next((place for place, alias in _aliases(kind, count) if not alias.is_write), -1)


def out_of_place(kind: str) -> str:
    """The name that torch gives an operator once it changes nothing in place: ``aten::add`` for ``aten::add_``.

    What ends alike and changes nothing, ``aten::__rshift__``, has one name of this kind everywhere,
    too.
    """
    return kind.removesuffix("_")


def _aliases(kind: str, count: int) -> list[tuple[int, Any]]:
    """The arguments of an operator whose memory what it gives back may have."""
    return [
        (place, argument.alias_info)
        for schema in (
            torch._C._jit_get_schemas_for_operator(kind) if kind.startswith("aten::") else ()
        )
        if len(schema.arguments) == count
        and any(result.alias_info is not None for result in schema.returns)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    ]


# stands for the root in the scopes of ``torch.jit.trace``, which opens no scope for it
_TRACED_ROOT = "__module"


def scope_names(paths: dict[int, str]) -> dict[str, str]:
    """Module path → the name that the tracer of the running export gives the module's scope.

    ``paths`` has the paths by ``id(module.__dict__)``.
    """
    modules = torch.jit._trace._trace_module_map or {}
    scopes = ((module, name) for module, name in modules.items() if module != _TRACED_ROOT)
    return {paths.get(id(module.__dict__), ""): name for module, name in scopes}


def is_listed(module: Any) -> bool:
    """Whether the tracer of the running export listed a module when it began: only then it opens a scope for it."""
    return module in (torch.jit._trace._trace_module_map or {})


def next_number() -> int:
    """A number between those of the values that the running TorchScript trace has made, and those that it will make."""
    value = tracing_state().graph().insertConstant(0)
    number = int(value.unique())
    value.node().destroy()
    return number


def is_script_method(forward: Any) -> bool:
    """Whether a module's ``forward`` is scripted: then the tracer opens no scope for it."""
    return isinstance(forward, torch._C.ScriptMethod)


def traced_number(*tensor: Any) -> int | None:
    """The number of a tensor in the graph of the TorchScript trace that runs; None for one it does not know.

    The tracer names a value that has no name yet by the variable that holds it in the frame that
    asks, or in the next one. Here that variable holds a tuple, and in the next frame there is none:
    values keep the names that torch gives.
    """
    try:
        return int(torch._C._get_value_trace(*tensor).unique())  # type: ignore[attr-defined]
    except RuntimeError:
        # a parameter that is none of the model's: the tracer takes it for no constant
        return None


def is_number(given: Container[int | None], *tensor: Any) -> bool:
    """Whether a tensor of the TorchScript trace that runs is a number in PyTorch: the trace has tensors in their place.

    These are sizes, what arithmetic makes of numbers alone, and ``given``: numbers among the
    model's arguments. The tensor has no name here for the reason in `traced_number`.
    """
    if tensor[0].dim():
        return False
    try:
        waiting = [torch._C._get_value_trace(*tensor)]  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        node = value.node()
        if value.unique() in given or value.unique() in seen or node.kind() == _NUMBER:
            continue
        reads = [each for each in node.inputs() if not _is_constant_number(each)]
        if not node.kind().startswith("aten::") or not reads or not all(map(_is_tensor, reads)):
            # a function that makes a tensor of numbers reads them as integers or floats
            return False
        seen.add(value.unique())
        waiting.extend(reads)
    return True


def _is_tensor(value: Any) -> bool:
    return bool(value.type().isSubtypeOf(torch._C.TensorType.get()))


def _is_constant_number(value: Any) -> bool:
    """Whether a value is a constant that is no tensor in PyTorch.

    Operators get numbers as tensors that do not count when the type of the result is chosen: 2 +
    int8 is int8.
    """
    node = value.node()
    if node.kind() != "prim::Constant":
        return False
    if not _is_tensor(value):
        return True
    constant = node.t("value")
    smallest = {torch.int64: torch.int8, torch.float64: torch.float16}.get(
        constant.dtype, constant.dtype
    )
    if smallest == constant.dtype:
        return bool(constant.dtype == torch.bool)
    return bool(torch.result_type(torch.zeros((), dtype=smallest), constant) == smallest)


def take_over_trace(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Let the second tensor of each pair, computed again, stand for the first in the TorchScript trace that runs.

    What computed the first ones is removed, unless something else reads it: exporters would merge
    it with what computes the second ones, and keep the scopes of the first. Pairs are in the order
    of computation.
    """
    if tracing_state() is None:
        return
    removed: set[int] = set()

    def remove(value: Any) -> None:
        node = value.node()
        outputs, inputs = list(node.outputs()), [(each.unique(), each) for each in node.inputs()]
        if node.kind() == "prim::Param" or any(output.uses() for output in outputs):
            return
        removed.update(output.unique() for output in outputs)
        node.destroy()
        for number, each in inputs:
            if number not in removed:
                remove(each)

    value_of = functools.partial(_value_of, torch._C._get_value_trace)  # type: ignore[attr-defined]
    values = [(first, value_of(first), value_of(second)) for first, second in pairs]
    for first, _, value in values:
        torch._C._set_value_trace(first, value)  # type: ignore[attr-defined]
    if values:
        remove(values[-1][1])


def _value_of(get: Callable[[Any], Any], *tensor: Any) -> Any:
    """The value of a tensor in the trace, which gets no name from a variable: see `traced_number`."""
    return get(*tensor)


# --- graphs ---------------------------------------------------


class JitStep(NamedTuple):
    """One node of a JIT graph at one moment; tensors are named by their numbers in the graph, or by their states."""

    # what it does, ``aten::linear``; an operation in place is called as the one that is not:
    # `out_of_place`
    kind: str
    inputs: tuple[Any, ...]  # what it reads, what its blocks return included
    outputs: tuple[Any, ...]  # what it makes
    # for a node whose one block makes its outputs, the block's; empty for others
    returned: tuple[int, ...] = ()
    writes: int = -1  # which of its inputs it changes in place; -1 for none
    # Names and values of its attributes. ONNX operators have such; those of ATen have inputs
    # instead.
    attributes: tuple[tuple[str, Any], ...] = ()


@dataclass
class Reading:
    """A JIT graph at one moment."""

    # Its nodes that are no constants, those inside blocks before the node that has the blocks
    steps: list[JitStep] = field(default_factory=list)
    # For each node of the outermost block that is no constant, how many steps it is
    sizes: list[int] = field(default_factory=list)
    # numbers of the tensors that constants make, in order
    constants: dict[int, None] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)  # numbers of the inputs that the user gives
    parameters: list[int] = field(default_factory=list)  # numbers of the other inputs
    outputs: list[Any] = field(default_factory=list)  # what it returns, with tuples taken apart

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


def read(graph: Any, user_inputs: int) -> Reading:
    """Read a JIT graph whose first ``user_inputs`` inputs are the user's and the others parameters."""
    reading = Reading()
    numbers = [value.unique() for value in graph.inputs()]
    reading.inputs, reading.parameters = numbers[:user_inputs], numbers[user_inputs:]
    _read(graph, reading, top=True)
    tuples = {
        step.outputs[0]: step.inputs
        for step in reading.steps
        if step.kind == "prim::TupleConstruct"
    }
    waiting = [value.unique() for value in graph.outputs()][::-1]
    while waiting:
        number = waiting.pop()
        if number in tuples:
            waiting.extend(reversed(tuples[number]))
        else:
            reading.outputs.append(number)
    return reading


def _read(block: Any, reading: Reading, *, top: bool) -> None:
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
            JitStep(
                out_of_place(kind),
                (*reads, *returned),
                outputs,
                one_to_one,
                changed,
                attributes_of(node, kind),
            )
        )
        if top:
            reading.sizes.append(len(steps) - before)


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
    # By index: the bindings make a new iterator type for each list, at thirty times the cost of one
    # access.
    count = node.outputsSize()
    return (
        (node.output().unique(),)
        if count == 1
        else tuple([node.outputsAt(k).unique() for k in range(count)])
    )


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
