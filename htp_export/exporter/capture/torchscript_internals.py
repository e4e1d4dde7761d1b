"""Private parts of torch that are used: TorchScript's tracer, schemas and graphs.

See ``torch_internals.py`` for the others. JIT graphs are read into plain data; constants, most of a
traced graph, are only listed, because each access takes time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from htp_export.process.restoring import Changes, restored, set_attribute

CONSTANTS = frozenset({"prim::Constant", "onnx::Constant"})
CONTROL_FLOW = frozenset({"onnx::If", "onnx::Loop", "onnx::Scan"})
# Operations on shapes alone: traced as integers, ONNX's own, and operations that fill a tensor of
# the size of another.
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
_PLAIN = frozenset({"i", "is", "f", "fs", "s", "ss"})  # types of attributes: numbers and strings
_NAME = "onnx_name"

_T = TypeVar("_T")


@cache
def usual_name(kind: str) -> str:
    """The operator that torch substitutes for an alias, ``aten::mul`` for ``aten::multiply``.

    It does so at the end of every trace, and whenever it compiles a function; therefore a function
    is compiled here.
    """
    name = kind.removeprefix("aten::")
    if name == kind or not name.isidentifier():
        return kind
    for schema in torch._C._jit_get_schemas_for_operator(kind):
        parameters = []
        arguments = []
        for number, argument in enumerate(schema.arguments):
            parameters.append(f"a{number}: {argument.type.annotation_str}")
            keyword = f"{argument.name}=" if argument.kwarg_only else ""
            arguments.append(f"{keyword}a{number}")
        try:
            unit = torch.jit.CompilationUnit(
                f"def f({', '.join(parameters)}):\n"
                f"    return torch.ops.aten.{name}({', '.join(arguments)})\n"
            )
        except RuntimeError:  # arguments of a type without an annotation
            continue
        kinds = {node.kind() for node in unit.f.graph.nodes()} - {"prim::Constant"}
        return kinds.pop() if len(kinds) == 1 else kind
    return kind


def tracing_state() -> Any:
    """The state of the running TorchScript trace of this thread; None if there is none."""
    return torch._C._get_tracing_state()


def flattened(value: Any) -> list[Any]:
    """The tensors of arguments or results as the tracer accepts them, with numbers and flags.

    Raises a `RuntimeError` for other values.
    """
    tensors, _ = torch._C._jit_flatten(value)
    return list(tensors)


def numbers_as_tensors(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as the TorchScript tracer passes them on: numbers and flags become tensors.

    Raises a `RuntimeError` for values that the tracer rejects.
    """
    tensors, structure = torch._C._jit_flatten(arguments)
    changed: tuple[Any, ...] = torch._C._jit_unflatten(tensors, structure)
    return changed


def state_of(model: Any) -> Mapping[str, Any]:
    """Parameters and buffers that are inputs of a traced graph, in their order, shared ones once."""
    if not isinstance(model, torch.nn.Module):
        return {}
    plain = plain_state(model)
    if plain is not None:
        return plain
    # ``keep_vars``: a quantized model also has state that is not a tensor and cannot be detached.
    return torch.jit._unique_state_dict(model, keep_vars=True)  # type: ignore[attr-defined, no-untyped-call, no-any-return]


def storage_of(tensor: Any) -> int:
    """The address of the memory of a tensor, which its views share; 0 if it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (AttributeError, RuntimeError):  # sparse, quantized, on the meta device
        return 0


def constant_tensors(graph: Any) -> Iterator[Any]:
    """The tensors that are constants of a traced graph."""
    for node in graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            yield node.t("value")


def inputs_behind(entries: int, *tensor: Any) -> set[int]:
    """The inputs of the running trace whose numbers determine a tensor, among the last ``entries`` ones.

    -1 stands for all inputs before them. Empty for a tensor that is not in the trace. The tensor has
    no name here for the reason in `traced_number`.
    """
    try:
        waiting = [_traced_value(*tensor)]
    except RuntimeError:
        return set()
    found: set[int] = set()
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        node = value.node()
        if value.unique() in seen:
            continue
        seen.add(value.unique())
        if node.kind() == "prim::Param":
            found.add(max(-1, value.offset() - (node.outputsSize() - entries)))
        elif node.kind() not in SHAPE_KINDS:
            waiting.extend(node.inputs())
    return found


_STATE_OF = torch.nn.Module.state_dict
_SAVE_STATE = torch.nn.Module._save_to_state_dict
_EXTRA_STATE = torch.nn.Module.get_extra_state


def plain_state(model: Any) -> OrderedDict[str, Any] | None:
    """The state of a model by name, shared tensors once: as ``torch.jit._unique_state_dict``, in a third of its time.

    None if a module saves its state in a way of its own.
    """
    found: dict[str, Any] = {}
    if not _add_plain_state(found, model, "", set()):
        return None
    seen: set[int] = set()
    unique: OrderedDict[str, Any] = OrderedDict()
    for name, tensor in found.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            unique[name] = tensor
    return unique


def _add_plain_state(found: dict[str, Any], module: Any, prefix: str, plain: set[type]) -> bool:
    """Add the state of a module and its descendants; return False for one with a way of its own.

    ``plain`` are the classes of modules seen so far, which save their state as torch does.
    """
    own = vars(module)
    kind = type(module)
    if kind not in plain:
        if not _saves_as_torch_does(kind):
            return False
        plain.add(kind)
    if "state_dict" in own or "_save_to_state_dict" in own:
        return False
    if module._state_dict_hooks or module._state_dict_pre_hooks:
        return False
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found[prefix + name] = parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            found[prefix + name] = buffer
    for name, child in module._modules.items():
        if child is not None and not _add_plain_state(found, child, f"{prefix}{name}.", plain):
            return False
    return True


def _saves_as_torch_does(kind: type) -> bool:
    """Whether a class of modules saves its state with torch's own methods alone."""
    if not issubclass(kind, torch.nn.Module) or issubclass(kind, torch.jit.ScriptModule):
        return False
    if kind.state_dict is not _STATE_OF or kind._save_to_state_dict is not _SAVE_STATE:
        return False
    return kind.get_extra_state is _EXTRA_STATE


@cache
def written(kind: str, count: int) -> int:
    """The position of the argument that an operator changes in place and returns; -1 for none.

    ``count`` is the number of its arguments: overloads of one name have different numbers if one of
    them has an ``out``.
    """
    return next((place for place, alias in _aliases(kind, count) if alias.is_write), -1)


@cache
def viewed(kind: str, count: int) -> int:
    """The position of the argument, of ``count``, that an operator may return a view of; or -1."""
    if kind in ("prim::ListUnpack", "prim::TupleUnpack"):
        return 0
    return next((place for place, alias in _aliases(kind, count) if not alias.is_write), -1)


def out_of_place(kind: str) -> str:
    """The operator that torch substitutes for one in place: ``aten::add`` for ``aten::add_``.

    Other operators with such an ending, ``aten::__rshift__``, are renamed consistently, too.
    """
    return kind.removesuffix("_")


def _aliases(kind: str, count: int) -> list[tuple[int, Any]]:
    """Positions and alias information of arguments whose memory an operator's result may share."""
    if not kind.startswith("aten::"):
        return []
    aliases = []
    for schema in torch._C._jit_get_schemas_for_operator(kind):
        returns_alias = any(result.alias_info is not None for result in schema.returns)
        if len(schema.arguments) != count or not returns_alias:
            continue
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None:
                aliases.append((position, argument.alias_info))
    return aliases


# the name of the root in the scopes of ``torch.jit.trace``, which opens no scope for it
_TRACED_ROOT = "__module"


def scope_names(paths: dict[int, str]) -> dict[str, str]:
    """Module path → the name of the module's scope in the running trace.

    ``paths`` has the paths by ``id(module.__dict__)``.
    """
    modules = torch.jit._trace._trace_module_map or {}
    scopes = ((module, name) for module, name in modules.items() if module != _TRACED_ROOT)
    return {paths.get(id(module.__dict__), ""): name for module, name in scopes}


def is_listed(module: Any) -> bool:
    """Whether the running tracer listed a module at its start, so that it opens a scope for it."""
    return module in (torch.jit._trace._trace_module_map or {})


def next_number() -> int:
    """A number between those of existing and of future values of the running TorchScript trace."""
    value = tracing_state().graph().insertConstant(0)
    number = int(value.unique())
    value.node().destroy()
    return number


def is_script_method(forward: Any) -> bool:
    """Whether a module's ``forward`` is scripted, so that the tracer opens no scope for it."""
    return isinstance(forward, torch._C.ScriptMethod)


def traced_number(*tensor: Any) -> int | None:
    """The number of a tensor in the running TorchScript trace; None for an unknown one.

    The tracer names a value that has no name yet by the variable that holds it in the calling
    frame, or in the next one. Here that variable holds a tuple, and in the next frame there is
    none: values keep the names that torch gives them.
    """
    try:
        return int(_traced_value(*tensor).unique())
    except RuntimeError:
        # a parameter of another model, which the tracer does not convert to a constant
        return None


def _traced_value(*tensor: Any) -> Any:
    """The value of a tensor in the running TorchScript trace; see `traced_number`.

    The transforms of ``torch.func`` wrap traced tensors. The tracer knows none of the wrappers, and
    the process crashes where it converts one of ``grad`` to a constant.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(*tensor):
        tensor = (torch._C._functorch.get_unwrapped(*tensor),)
    return torch._C._get_value_trace(*tensor)  # type: ignore[attr-defined]


def is_number(given: Container[int | None], *tensor: Any) -> bool:
    """Whether a tensor of the running TorchScript trace is a number in PyTorch.

    These are sizes, results of arithmetic on numbers alone, and ``given``: numbers among the
    model's arguments. The tensor has no name here for the reason in `traced_number`.
    """
    if tensor[0].dim():
        return False
    try:
        waiting = [_traced_value(*tensor)]
    except RuntimeError:
        return False
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        node = value.node()
        number = value.unique()
        if number in given or number in seen or node.kind() == _NUMBER:
            continue
        if not node.kind().startswith("aten::"):
            return False
        inputs = [operand for operand in node.inputs() if not _is_constant_number(operand)]
        # a function that creates a tensor from numbers has integers or floats as inputs
        if not inputs or not all(map(_is_tensor, inputs)):
            return False
        seen.add(number)
        waiting.extend(inputs)
    return True


def _is_tensor(value: Any) -> bool:
    return bool(value.type().isSubtypeOf(torch._C.TensorType.get()))


def _is_constant_number(value: Any) -> bool:
    """Whether a value is a constant that is a number in PyTorch.

    Operators receive numbers as tensors that do not count when the type of the result is chosen: 2
    + int8 is int8.
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
    """Substitute the second tensor of each pair for the first in the running TorchScript trace.

    The second ones are computed again. The nodes of the first ones are removed, unless other nodes
    read them: exporters would merge them with the nodes of the second ones, and keep the scopes of
    the first. Pairs are in the order of computation.
    """
    if tracing_state() is None:
        return
    removed: set[int] = set()

    def remove(value: Any) -> None:
        node = value.node()
        outputs = list(node.outputs())
        inputs = [(operand.unique(), operand) for operand in node.inputs()]
        if node.kind() == "prim::Param" or any(output.uses() for output in outputs):
            return
        removed.update(output.unique() for output in outputs)
        node.destroy()
        for number, operand in inputs:
            if number not in removed:
                remove(operand)

    value_of = functools.partial(_value_of, torch._C._get_value_trace)  # type: ignore[attr-defined]
    values = [(first, value_of(first), value_of(second)) for first, second in pairs]
    for first, _, value in values:
        torch._C._set_value_trace(first, value)  # type: ignore[attr-defined]
    if values:
        remove(values[-1][1])


def _value_of(get: Callable[[Any], Any], *tensor: Any) -> Any:
    """The value of a tensor in the trace; it gets no name from a variable: see `traced_number`."""
    return get(*tensor)


# --- graphs ---------------------------------------------------


class JitStep(NamedTuple):
    """One node of a JIT graph at one moment; tensors are numbers in the graph, or their states."""

    # its operator, ``aten::linear``; one in place has the name of the operator out of place:
    # `out_of_place`
    kind: str
    inputs: tuple[Any, ...]  # its inputs, and the outputs of its blocks
    outputs: tuple[Any, ...]
    # for a node whose only block computes its outputs, the block's outputs; empty for others
    returned: tuple[int, ...] = ()
    writes: int = -1  # position of the input that it changes in place; -1 for none
    # names and values of its attributes, of ONNX operators only: operators of ATen have inputs
    attributes: tuple[tuple[str, Any], ...] = ()
    from_blocks: int = 0  # how many of its inputs, the last ones, are outputs of its blocks


@dataclass
class Reading:
    """A JIT graph at one moment."""

    # its nodes without constants, each after the nodes of its blocks
    steps: list[JitStep] = field(default_factory=list)
    # for each node of the outermost block, its number of steps
    sizes: list[int] = field(default_factory=list)
    # numbers of the constants, in order
    constants: dict[int, None] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)  # numbers of the user's inputs
    parameters: list[int] = field(default_factory=list)  # numbers of the other inputs
    outputs: list[Any] = field(default_factory=list)  # its outputs, with tuples unpacked

    @property
    def outermost(self) -> list[JitStep]:
        """The steps of the outermost block, one for each of ``sizes``."""
        return [self.steps[end - 1] for end in itertools.accumulate(self.sizes)]


def read(graph: Any, user_inputs: int) -> Reading:
    """Read a JIT graph; its first ``user_inputs`` inputs are the user's, the others parameters."""
    reading = Reading()
    numbers = numbers_of_graph_inputs(graph)
    reading.inputs = numbers[:user_inputs]
    reading.parameters = numbers[user_inputs:]
    _read_block(graph.block(), reading, is_outermost=True)
    tuples = {
        step.outputs[0]: step.inputs
        for step in reading.steps
        if step.kind == "prim::TupleConstruct"
    }
    outputs = numbers_of_inputs(graph.return_node())
    reading.outputs = list(without_lists(outputs, tuples))
    return reading


class Copy(NamedTuple):
    """A copy of a JIT graph, node by node with new numbers."""

    reading: Reading
    numbers: dict[int, int]  # number in the original → number in the copy


def read_copy(graph: Any, original: Reading) -> Copy:
    """Read a copy of a graph, made node by node: only new numbers are read, which takes a third of the time."""
    copied = numbers_of_graph_inputs(graph)
    numbers = dict(zip((*original.inputs, *original.parameters), copied, strict=True))
    if any(may_have_blocks(step.kind) for step in original.steps):
        # blocks have inputs of their own, which a reading does not have
        reading = read(graph, len(original.inputs))
    else:
        reading = _read_copied_steps(graph, original, numbers)
        reading.inputs = copied[: len(original.inputs)]
        reading.parameters = copied[len(original.inputs) :]
    numbers.update(zip(original.constants, reading.constants, strict=True))
    for was, now in zip(original.steps, reading.steps, strict=True):
        numbers.update(zip(was.outputs, now.outputs, strict=True))
    return Copy(reading, numbers)


def _read_copied_steps(graph: Any, original: Reading, inputs: Mapping[int, int]) -> Reading:
    """The steps of a copy without blocks; ``inputs``: number of an input in the original → in the copy."""
    reading = Reading(sizes=original.sizes)
    results: list[tuple[int, ...]] = []
    for node in nodes_in(graph.block()):
        outputs = numbers_of_outputs(node)
        if node.kind() in CONSTANTS:
            reading.constants[outputs[0]] = None
        else:
            results.append(outputs)
    numbers = {**inputs, **dict(zip(original.constants, reading.constants, strict=True))}
    for step, outputs in zip(original.steps, results, strict=True):
        numbers.update(zip(step.outputs, outputs, strict=True))
        reads = tuple([numbers[number] for number in step.inputs])
        attributes = step.attributes
        reading.steps.append(JitStep(step.kind, reads, outputs, (), step.writes, attributes))
    reading.outputs = [numbers[number] for number in original.outputs]
    return reading


def without_lists(keys: Sequence[_T], elements: Mapping[_T, Sequence[_T]]) -> Iterator[_T]:
    """Tensors, with the elements of lists or tuples in place of these; ``elements``: those of each list."""
    waiting = [*reversed(keys)]
    while waiting:
        key = waiting.pop()
        if key in elements:
            waiting.extend(reversed(elements[key]))
        else:
            yield key


def _read_block(block: Any, reading: Reading, *, is_outermost: bool) -> None:
    for node in nodes_in(block):
        kind = node.kind()
        if kind in CONSTANTS:
            reading.constants[node.output().unique()] = None
            continue
        before = len(reading.steps)
        outputs = numbers_of_outputs(node)
        inputs = numbers_of_inputs(node)
        attributes = attributes_of(node, kind) if kind.startswith("onnx::") else ()
        writes = written(kind, len(inputs))
        if may_have_blocks(kind):
            returned = _read_inner_blocks(node, reading)
            same = returned if len(returned) == len(outputs) else ()
            inputs = (*inputs, *returned)
            step = JitStep(
                out_of_place(kind), inputs, outputs, same, writes, attributes, len(returned)
            )
        else:
            step = JitStep(out_of_place(kind), inputs, outputs, (), writes, attributes)
        reading.steps.append(step)
        if is_outermost:
            reading.sizes.append(len(reading.steps) - before)


def _read_inner_blocks(node: Any, reading: Reading) -> tuple[int, ...]:
    """Read the blocks of a node, and return the numbers of their outputs."""
    returned: list[int] = []
    for inner in node.blocks():
        _read_block(inner, reading, is_outermost=False)
        returned.extend(numbers_of_inputs(inner.returnNode()))
    return tuple(returned)


def attributes_of(node: Any, kind: str) -> tuple[tuple[str, Any], ...]:
    """The attributes of an ONNX node with plain values, without its name, which is one, too."""
    if not kind.startswith("onnx::") or not node.hasAttributes():
        return ()
    attributes = []
    for name in node.attributeNames():
        attribute_type = node.kindOf(name) if name != _NAME else ""
        if attribute_type in _PLAIN:
            # the method that reads an attribute is named after its type
            attributes.append((name, _hashable(getattr(node, attribute_type)(name))))
    return tuple(attributes)


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value


def numbers_of_graph_inputs(graph: Any) -> list[int]:
    """The numbers of a graph's inputs."""
    return [*numbers_of_outputs(graph.param_node())]


def numbers_of_inputs(node: Any) -> tuple[int, ...]:
    """The numbers of a node's inputs."""
    return tuple([node.inputsAt(place).unique() for place in range(node.inputsSize())])


def numbers_of_outputs(node: Any) -> tuple[int, ...]:
    """The unique ids of a node's outputs in its graph, as torch assigns them."""
    # By index: the bindings create a new iterator type for each list, at thirty times the cost of
    # one access.
    count = node.outputsSize()
    if count == 1:
        return (node.output().unique(),)
    return tuple([node.outputsAt(position).unique() for position in range(count)])


def is_jit_node(value: object) -> bool:
    """Whether an object is a node of a JIT graph."""
    return isinstance(value, torch._C.Node)


@contextlib.contextmanager
def without_graph_dump() -> Iterator[None]:
    """Keep the exporter from printing the whole graph on an error, in a ``with`` block.

    It always does: `setup_onnx_logging` tests a function where it means its result.
    """

    def make(changes: Changes) -> None:
        set_attribute(changes, torch._C, "_jit_onnx_log", lambda *_: None)

    with restored(make):
        yield


def source_range(node: Any) -> str:
    """The Python stack when a node was traced, the innermost frame first; or its text in a script."""
    return str(node.sourceRange())


def nodes_in(block: Any) -> Iterator[Any]:
    """The nodes of a block, without those in their blocks.

    The iterator is not asked for one more node after the last: the binding ends with an exception
    of C++, at the cost of thirty nodes, and a traced graph has a block for each call of a module.
    """
    last = block.returnNode().prev()
    if last.kind() == "prim::Param":  # the block is empty
        return
    for node in block.nodes():
        yield node
        if node is last:
            return


def nodes_of(block: Any) -> Iterator[Any]:
    """Every node of a graph or block, each after the nodes of its blocks."""
    for node in nodes_in(block.block() if isinstance(block, torch._C.Graph) else block):
        for inner in node.blocks() if may_have_blocks(node.kind()) else ():
            yield from nodes_of(inner)
        yield node


@cache
def may_have_blocks(kind: str) -> bool:
    """Whether nodes of a kind can have blocks: of ATen none, and of ONNX only control flow."""
    return kind in CONTROL_FLOW or not (kind in _NO_BLOCKS or kind.startswith(("aten::", "onnx::")))
