"""Private parts of torch that are used, each behind a function that says what for: FX graphs, modules and their calls.

Those of TorchScript are in ``torchscript_internals.py``, the places that are patched in
``dynamo_patches.py`` and ``patches.py``. Tests of exports fail where a part has moved.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from htp_export.format.leaves import tensors_in
from htp_export.process.restoring import Changes, SharedSetting, set_item


def has_module_stacks(model: Any) -> bool:
    """Whether a model is a graph module whose operations have the module stacks of an earlier export."""
    import torch

    nodes = model.graph.nodes if isinstance(model, torch.fx.GraphModule) else ()
    return any(node.op == "call_function" and node.meta.get("nn_module_stack") for node in nodes)


class Scope(NamedTuple):
    """One module of those in which a node of a graph that Dynamo made runs."""

    key: str  # dynamo's key of the module's call
    name: str  # the expression by which Dynamo reaches the module
    module: int  # its ``id``; -1 where the key does not hold it


def scopes_of(node: Any) -> list[Scope]:
    """The modules in which a node of a graph that Dynamo made runs, outermost first."""
    # From the second call on, the keys are "id@1", ...; torch.export puts a name before what it
    # takes from Dynamo.
    stack = node.meta.get("nn_module_stack") or {}
    numbers = {key: re.search(r"(\d+)(@\d+)?$", key) for key in stack}
    return [
        Scope(key, str(name), int(number.group(1)) if (number := numbers[key]) else -1)
        for key, (name, _) in stack.items()
    ]


class State(NamedTuple):
    """A tensor that an executed node read or returned, in its state after the execution."""

    node: Any  # the node of the executed graph whose result the tensor is
    changes: int  # how often the tensor has been changed in place
    maker: Any  # the node of the traced graph that produces it, or None
    changed: bool = False  # whether this execution changed it in place


class ExecutedNode(NamedTuple):
    """One executed node of the decomposed FX graph, and the nodes into which it was traced."""

    node: Any  # the executed node
    made: list[Any]  # the nodes of the traced graph, in order
    read: list[State]  # the tensors that the node read
    returned: list[State]  # the tensor that it returned; empty if it returned several


def fx_tracer() -> Any:
    """What traces into an FX graph in this thread; None where nothing does."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return None if mode is None else mode.tracer


class Tracing(NamedTuple):
    """The state of the trace in this thread before a node of another graph is executed."""

    tracer: Any  # the tracer
    made: int  # number of nodes in the traced graph
    # The tensors that the node reads: producer, tensor, and how often it has been changed in place
    held: list[tuple[Any, Any, int]]


def fx_tracing(interpreter: Any, node: Any) -> Tracing | None:
    """The state of the running trace before an interpreter executes a node of another graph; None without a trace."""
    import torch

    tracer = fx_tracer()
    if tracer is None:
        return None
    arguments = [(each, interpreter.env.get(each)) for each in node.all_input_nodes]
    held = [
        (each, value, changes_of(value))
        for each, value in arguments
        if isinstance(value, torch.Tensor)
    ]
    return Tracing(tracer, len(tracer.graph.nodes), held)


def executed_since(before: Tracing, node: Any, result: Any) -> ExecutedNode:
    """The nodes into which a node was traced when it was executed, and gave ``result``."""
    nodes = before.tracer.graph.nodes
    traced = list(itertools.islice(reversed(nodes), len(nodes) - before.made))[::-1]
    read = [
        State(each, now, fx_node_of(value, before.tracer), now != was)
        for each, value, was in before.held
        for now in [changes_of(value)]
    ]
    returned = [
        State(node, changes_of(value), fx_node_of(value, before.tracer))
        for value in tensors_in(result)
    ]
    return ExecutedNode(node, traced, read, returned if len(returned) == 1 else [])


def is_view(node: Any) -> bool:
    """Return whether the result of a node of a functional FX graph is a view of its first argument.

    This includes a ``getitem`` that selects one of several results of such an operator.
    """
    import torch

    argument = node.args[0] if node.args else None
    if not isinstance(argument, torch.fx.Node):
        return False
    if node.target is operator.getitem:
        return argument.target is not operator.getitem and is_view(argument)
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.returns) and schema.returns[0].alias_info is not None


def operator_name(target: Any) -> tuple[str, str, str]:
    """Return namespace, name and overload of what a node of an FX graph calls: ``aten``, ``linear``; ``""`` by default.

    The namespace of functions of Python, which compute with sizes, is ``python``.
    """
    import torch

    if isinstance(target, torch._ops.OpOverload):
        overload = "" if target._overloadname == "default" else target._overloadname
        return target.namespace, target._schema.name.partition("::")[2], overload
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "higher_order", str(target.__name__), ""
    return "python", str(getattr(target, "__name__", target)), ""


class Argument(NamedTuple):
    """One argument of a node of an FX graph."""

    name: str  # as the operator's schema has it; its place, where there is no schema
    value: Any  # none if it is left out
    takes_tensors: bool = False  # whether the schema has a tensor, or several, at its place


def arguments_of(node: Any) -> list[Argument]:
    """Return the arguments of a node of an FX graph, in the order of the operator's schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        given = {
            **dict(zip(map(str, range(len(node.args))), node.args, strict=True)),
            **node.kwargs,
        }
        return [Argument(name, value) for name, value in given.items()]
    given = {
        **dict(zip((each.name for each in schema.arguments), node.args, strict=False)),
        **node.kwargs,
    }
    return [
        Argument(each.name, given.get(each.name), "Tensor" in str(each.type))
        for each in schema.arguments
    ]


def is_assertion(node: Any) -> bool:
    """Return whether a node of an FX graph has no result: it checks or states what is true of sizes or values."""
    import torch

    schema = getattr(node.target, "_schema", None)
    return (
        isinstance(node.target, torch._ops.OpOverload) and schema is not None and not schema.returns
    )


def needed_nodes(graph: Any) -> set[Any]:
    """The nodes of an FX graph that its result depends on; those too that change in place what is read later."""
    memory: dict[Any, Any] = {}  # node → the node that made the memory of its result
    needed, read = set[Any](), set[Any]()
    for node in graph.nodes:
        memory[node] = memory[node.args[0]] if is_view(node) else node
    for node in reversed(graph.nodes):
        changed = _changed_by(node)
        if changed:
            acts = any(memory[each] in read for each in changed)
        else:
            # random operators count as impure by default: attention and LSTM, which may drop out,
            # among them
            acts = (
                node.op != "placeholder"
                and node.is_impure(impure_random=False)
                and not is_assertion(node)
            )
        if acts or node in needed:
            needed.update((node, *node.all_input_nodes))
            read.update(memory[each] for each in node.all_input_nodes)
    return needed


def _changed_by(node: Any) -> list[Any]:
    """The nodes whose results a node of an FX graph changes in place."""
    import torch

    schema = getattr(node.target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    written = {
        each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write
    }
    values = [argument.value for argument in arguments_of(node) if argument.name in written]
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.fx.Node)
    ]


def reversed_view(node: Any) -> Any:
    """The view that a node writes back into its base tensor, as functionalization does after a change; or None."""
    import torch

    if node.target is operator.getitem:
        return None
    aten = torch.ops.aten
    scatters = (
        aten.slice_scatter,
        aten.select_scatter,
        aten.diagonal_scatter,
        aten.as_strided_scatter,
    )
    place = (
        1
        if getattr(node.target, "overloadpacket", None) in scatters
        else 0
        if is_view(node)
        else None
    )
    return (
        node.args[place]
        if place is not None and isinstance(node.args[place], torch.fx.Node)
        else None
    )


def changes_of(tensor: Any) -> int:
    """Return how often a tensor was changed in place, including through views; 0 if torch does not count."""
    try:
        return int(tensor._version)
    except RuntimeError:  # made in inference mode
        return 0


def noting_writes(note: Callable[[Any], None]) -> Any:
    """Return a context manager that calls a function with each tensor that an operator is about to write to.

    Operators in the bodies of ``torch.cond`` and of loops are not seen: all tensors that these take
    may be written to.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:  # else Dynamo compiles nothing inside
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            schema = getattr(func, "_schema", None)
            if has_bodies(func):
                bodies = [each for each in args if isinstance(each, torch.nn.Module)]
                for tensor in tensors_in(
                    [args, kwargs, *(list(body.parameters()) for body in bodies)]
                ):
                    note(tensor)
            elif schema is not None and schema.is_mutable:
                given = dict(
                    zip((argument.name for argument in schema.arguments), args, strict=False)
                )
                given |= kwargs or {}
                for argument in schema.arguments:
                    if argument.alias_info is not None and argument.alias_info.is_write:
                        for tensor in tensors_in(given.get(argument.name)):
                            note(tensor)
            return func(*args, **(kwargs or {}))

    return Noting()  # type: ignore[no-untyped-call]


def has_bodies(function: Any) -> bool:
    """Return whether a function takes branches or loop bodies: ``torch.cond``, ``while_loop``, ``scan``."""
    import torch

    return isinstance(function, torch._ops.HigherOrderOperator)


def is_choice(function: Any) -> bool:
    """Whether of the bodies of such an operator one alone runs."""
    import torch

    return function is torch.ops.higher_order.cond


def returns_results_of_body(function: Any) -> bool:
    """Whether such an operator returns the results of its last body, which accepts the operator's own inputs."""
    import torch

    return function in (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop)


def use_plain_containers(changes: Changes, program: Any) -> bool:
    """Let an exported program take and return lists in place of the containers of other libraries; whether it has any.

    torch builds the containers again while it decomposes the program, inside the trace. Tensors
    that they make for that, as the caches of transformers do, become constants that the decomposed
    program lacks.
    """
    from torch.utils import _pytree

    def children(spec: Any) -> list[Any]:
        # of torch 2.10
        found: list[Any] = spec.children() if hasattr(spec, "children") else spec.children_specs
        return found

    def plain(spec: Any) -> Any:
        parts = [plain(child) for child in children(spec)]
        if spec.is_leaf():
            return 0
        if spec.type is dict:
            return dict(zip(spec.context, parts, strict=True))
        return tuple(parts) if spec.type is tuple else parts

    def has_others(spec: Any) -> bool:
        own = spec.is_leaf() or spec.type in (list, tuple, dict)
        return not own or any(map(has_others, children(spec)))

    signature = program.module_call_graph[0].signature if program.module_call_graph else None
    before = (
        {}
        if signature is None
        else {name: getattr(signature, name) for name in ("in_spec", "out_spec")}
    )
    if not any(map(has_others, before.values())):
        return False
    for name, spec in before.items():
        changes.will_undo(functools.partial(setattr, signature, name, spec))
        setattr(signature, name, _pytree.tree_structure(plain(spec)))
    return True


def _frames() -> Any:
    from torch._dynamo import eval_frame

    return eval_frame


_STANCE = SharedSetting(
    lambda: _frames()._stance,
    lambda stance: _frames()._set_stance(stance),
    lambda: _frames().DynamoStance("force_eager"),
)


def turn_compilation_off(changes: Changes) -> None:
    """Run what is compiled, and the bodies of ``torch.cond`` and loops, as Python, until the changes are taken back."""
    _STANCE.hold(changes)


def exported_by_dynamo_alone() -> tuple[type, ...]:
    """What ``torch.onnx.export`` gives to the dynamo exporter under ``dynamo=False`` too."""
    import torch

    exportable = getattr(torch.onnx, "ExportableModule", None)  # since torch 2.11
    return (torch.export.ExportedProgram, *([exportable] if exportable else []))


def keep_autocast_cache(changes: Changes) -> None:
    """Leave autocast's cache as it is: torch turns it off while it traces, and leaves it off where that fails."""
    import torch

    before = torch.is_autocast_cache_enabled()
    changes.will_undo(functools.partial(torch.set_autocast_cache_enabled, before), of_thread=True)


def run_after_hooks(changes: Changes, module: Any, finish: Callable[[Any], Any]) -> bool:
    """Give back ``finish`` of what a module gives back, once the user's hooks have run; whether there are any."""
    from torch.nn.modules import module as modules

    hooks, key = module._forward_hooks, object()
    if not (hooks or modules._global_forward_hooks):
        return False

    def last(_module: Any, _args: Any, returned: Any) -> Any:
        hooks.pop(key, None)
        return finish(returned)

    changes.will_undo(functools.partial(hooks.pop, key, None))
    hooks[key] = last
    return True


def fx_node_of(tensor: Any, tracer: Any) -> Any:
    """The node that makes a tensor in the FX graph that is being traced; None for one that the tracer does not know."""
    import torch
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def computes_a_size(fx_node: Any) -> bool:
    """Whether an FX node computes a size of sizes; one that reads a size from a tensor does not."""
    import torch

    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    nodes = (
        []
        if fx_node is None or fx_node.op != "call_function"
        else [fx_node, *fx_node.all_input_nodes]
    )
    return len(nodes) > 1 and all(isinstance(node.meta.get("val"), symbols) for node in nodes)


def called_by_export(module: Any) -> Any:
    """The module that runs when ``torch.export`` calls ``module``: as a rule itself.

    A model that is a ``GraphModule`` is interpreted node by node, in the call of the wrapper that
    is traced.
    """
    import torch

    inner = dict(module._modules.items()).get("_export_root")  # a traced module's is no dictionary
    return inner if isinstance(inner, torch.fx.GraphModule) else module


def called_by_forward(module: Any) -> Any:
    """The module whose bound ``__call__`` is the ``forward`` of another one, as `torch.compile` sets it; else None.

    torch replaces ``nn.Module.__call__`` while it traces, so that it sees no call of one that was
    bound before.
    """
    import torch

    forward = inspect.unwrap(module.forward)
    inner = getattr(forward, "__self__", None)
    is_call = getattr(forward, "__func__", None) is torch.nn.Module._wrapped_call_impl
    return inner if is_call and inner is not module else None


def call_uncompiled(changes: Changes, module: Any) -> None:
    """Let what `torch.compile` made call the module in it as it is: torch 2.10 would compile it inside an export."""
    from torch._dynamo import OptimizedModule

    if isinstance(module, OptimizedModule):
        set_item(changes, vars(module), "forward", inspect.unwrap(module.forward))


def is_compiled(module: Any) -> bool:
    """Whether `torch.compile` was applied to a module, or its own method ``compile``."""
    from torch._dynamo import OptimizedModule

    return (
        isinstance(module, OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def without_export_root(name: str, root: str | None) -> str:
    """A module's name in a scope of a branch or loop body, without the name of the wrapper that is traced.

    ``root`` is the model's own name in the trace; None where the trace was not seen, and has the
    usual one.
    """
    root = "_export_root" if root is None else root
    return "" if name == root else name.removeprefix(f"{root}.")


def outputs_of(output: Any) -> list[Any]:
    """What the ``output`` node of an FX graph returns, one after the other: nodes, and None for all else."""
    import torch

    leaves = torch.utils._pytree.tree_leaves(output.args[0])
    return [leaf if isinstance(leaf, torch.fx.Node) else None for leaf in leaves]


def is_forward_of_layer(code: Any) -> bool:
    """Whether code is the ``forward`` of one of torch's own layers."""
    import torch.nn.modules

    folder = str(torch.nn.modules.__file__).rpartition("__init__")[0]
    return (
        isinstance(code, types.CodeType)
        and code.co_name == "forward"
        and code.co_filename.startswith(folder)
    )


def opset_range(*, dynamo: bool) -> tuple[int, int]:
    """The lowest and the highest ONNX opset that an exporter of torch can be asked for.

    Under dynamo, that is the newest that onnx knows: torch tries to convert the graph to it.
    """
    import onnx
    from torch.onnx import _constants

    highest = (
        onnx.defs.onnx_opset_version() if dynamo else _constants.ONNX_TORCHSCRIPT_EXPORTER_MAX_OPSET
    )
    return _constants.ONNX_MIN_OPSET, highest
