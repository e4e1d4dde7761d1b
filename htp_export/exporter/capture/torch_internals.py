"""Private parts of torch that are used: FX graphs, modules and their calls, each behind a function.

Those of TorchScript are in ``torchscript_internals.py``, the places that are patched in
``dynamo_patches.py`` and ``patches.py``. Tests of exports fail if a part has moved.
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
    """Whether a model is a graph module with the module stacks of an earlier export."""
    import torch

    nodes = model.graph.nodes if isinstance(model, torch.fx.GraphModule) else ()
    return any(node.op == "call_function" and node.meta.get("nn_module_stack") for node in nodes)


class Scope(NamedTuple):
    """One module in which a node of a graph traced by Dynamo runs."""

    key: str  # Dynamo's key of the module's call
    name: str  # the expression by which Dynamo reaches the module
    module: int  # its ``id``; -1 if the key does not contain it


def scopes_of(node: Any) -> list[Scope]:
    """The modules in which a node of a graph traced by Dynamo runs, outermost first."""
    scopes = []
    for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items():
        # From the second call on, the keys are "id@1", ...; torch.export prepends a name.
        module_id = re.search(r"(\d+)(@\d+)?$", key)
        scopes.append(Scope(key, str(name), int(module_id.group(1)) if module_id else -1))
    return scopes


class State(NamedTuple):
    """A tensor that an executed node read or returned, in its state after the execution."""

    node: Any  # the node of the executed graph that returned the tensor
    changes: int  # how often the tensor has been changed in place
    producer: Any  # the node of the traced graph that produces it, or None
    changed: bool = False  # whether this execution changed it in place


class ExecutedNode(NamedTuple):
    """One executed node of the decomposed FX graph, and the nodes into which it was traced."""

    node: Any  # the executed node
    traced: list[Any]  # the nodes of the traced graph, in order
    read: list[State]  # the tensors that the node read
    returned: list[State]  # the tensor that it returned; empty if it returned several


def fx_tracer() -> Any:
    """The tracer of the running FX trace of this thread; None if there is none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return None if mode is None else mode.tracer


class Tracing(NamedTuple):
    """The state of the trace in this thread before a node of another graph is executed."""

    tracer: Any  # the tracer
    traced: int  # number of nodes in the traced graph
    # the tensors that the node reads: producer, tensor, and how often it has been changed in place
    read: list[tuple[Any, Any, int]]


def fx_tracing(interpreter: Any, node: Any) -> Tracing | None:
    """The running trace, before an interpreter executes a node of another graph, or None."""
    import torch

    tracer = fx_tracer()
    if tracer is None:
        return None
    read = []
    for producer in node.all_input_nodes:
        tensor = interpreter.env.get(producer)
        if isinstance(tensor, torch.Tensor):
            read.append((producer, tensor, changes_of(tensor)))
    return Tracing(tracer, len(tracer.graph.nodes), read)


def executed_since(before: Tracing, node: Any, result: Any) -> ExecutedNode:
    """The nodes into which a node was traced when it was executed and returned ``result``."""
    nodes = before.tracer.graph.nodes
    # from the end, because the nodes are a linked list
    traced = list(itertools.islice(reversed(nodes), len(nodes) - before.traced))
    traced.reverse()
    read = []
    for producer, tensor, changes_before in before.read:
        changes = changes_of(tensor)
        traced_by = fx_node_of(tensor, before.tracer)
        read.append(State(producer, changes, traced_by, changes != changes_before))
    returned = [
        State(node, changes_of(tensor), fx_node_of(tensor, before.tracer))
        for tensor in tensors_in(result)
    ]
    return ExecutedNode(node, traced, read, returned if len(returned) == 1 else [])


def is_view(node: Any) -> bool:
    """Whether the result of a node of a functional FX graph is a view of its first argument.

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
    """Namespace, name and overload of the target of an FX node; the default overload is ``""``.

    The namespace of Python functions, which compute with sizes, is ``python``.
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

    name: str  # in the operator's schema; without a schema, its position
    value: Any  # None if it is omitted
    takes_tensors: bool = False  # whether the schema has a tensor, or several, at this position


def arguments_of(node: Any) -> list[Argument]:
    """The arguments of a node of an FX graph, in the order of the operator's schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        by_position = {str(position): value for position, value in enumerate(node.args)}
        return [Argument(name, value) for name, value in {**by_position, **node.kwargs}.items()]
    names = [parameter.name for parameter in schema.arguments]
    values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return [
        Argument(parameter.name, values.get(parameter.name), "Tensor" in str(parameter.type))
        for parameter in schema.arguments
    ]


def is_assertion(node: Any) -> bool:
    """Whether a node of an FX graph has no result: it checks a fact about sizes or values."""
    import torch

    schema = getattr(node.target, "_schema", None)
    return (
        isinstance(node.target, torch._ops.OpOverload) and schema is not None and not schema.returns
    )


def needed_nodes(graph: Any) -> set[Any]:
    """The nodes of an FX graph that its outputs depend on.

    They include nodes that change in place a tensor that is read later.
    """
    memory: dict[Any, Any] = {}  # node → the node that allocated the memory of its result
    for node in graph.nodes:
        memory[node] = memory[node.args[0]] if is_view(node) else node
    needed = set[Any]()
    read = set[Any]()
    for node in reversed(graph.nodes):
        changed = _changed_by(node)
        if changed:
            has_effect = any(memory[source] in read for source in changed)
        else:
            has_effect = _is_impure(node)
        if has_effect or node in needed:
            needed.update((node, *node.all_input_nodes))
            read.update(memory[source] for source in node.all_input_nodes)
    return needed


def _is_impure(node: Any) -> bool:
    """Whether a node that changes no tensor has another effect."""
    if node.op == "placeholder" or is_assertion(node):
        return False
    # by default, random operators count as impure, among them attention and LSTM, which may have
    # dropout
    return bool(node.is_impure(impure_random=False))


def _changed_by(node: Any) -> list[Any]:
    """The nodes whose results a node of an FX graph changes in place."""
    import torch

    written = _written_names(getattr(node.target, "_schema", None))
    values = [argument.value for argument in arguments_of(node) if argument.name in written]
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)]


def _written_names(schema: Any) -> list[str]:
    """Names of the arguments that an operator with this schema writes to."""
    arguments = () if schema is None else schema.arguments
    return [
        argument.name
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def reversed_view(node: Any) -> Any:
    """The view that a node writes back into its base; None if it writes none.

    Functionalization adds such nodes after a change in place.
    """
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
    if getattr(node.target, "overloadpacket", None) in scatters:
        view = node.args[1]
    elif is_view(node):
        view = node.args[0]
    else:
        return None
    if isinstance(view, torch.fx.Node):
        return view
    return None


def changes_of(tensor: Any) -> int:
    """How often a tensor was changed in place, also through views; 0 if torch does not count."""
    try:
        return int(tensor._version)
    except RuntimeError:  # made in inference mode
        return 0


def noting_writes(note: Callable[[Any], None]) -> Any:
    """Return a context manager that observes writes: it calls ``note`` with the tensor before each.

    Operators in the bodies of ``torch.cond`` and of loops are not observed: all their input tensors
    may be written to.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:  # else Dynamo compiles nothing inside
            return True

        def __torch_dispatch__(
            self,
            func: Any,
            types: Any,
            args: Any = (),
            kwargs: Any = None,
        ) -> Any:
            for tensor in tensors_in(_maybe_written(func, args, kwargs or {})):
                note(tensor)
            return func(*args, **(kwargs or {}))

    return Noting()  # type: ignore[no-untyped-call]


def _maybe_written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments, and parameters of bodies, that an operator may write to."""
    import torch

    if has_bodies(function):
        bodies = [argument for argument in args if isinstance(argument, torch.nn.Module)]
        return [args, kwargs, *(list(body.parameters()) for body in bodies)]
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = [parameter.name for parameter in schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    return [values.get(name) for name in _written_names(schema)]


def has_bodies(function: Any) -> bool:
    """Whether a function has branches or loop bodies: ``torch.cond``, ``while_loop``, ``scan``."""
    import torch

    return isinstance(function, torch._ops.HigherOrderOperator)


def is_choice(function: Any) -> bool:
    """Whether only one of the bodies of such an operator runs."""
    import torch

    return function is torch.ops.higher_order.cond


def returns_like_its_body(function: Any) -> bool:
    """Whether the last body of such an operator has the operator's inputs and kinds of results."""
    import torch

    return function in (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop)


def use_plain_containers(changes: Changes, program: Any) -> bool:
    """Replace the containers of other libraries that a program takes and returns by lists.

    Returns whether there were any. torch rebuilds the containers while it decomposes the program,
    inside the trace. Tensors created for that, as in the caches of transformers, would become
    constants that the decomposed program lacks.
    """
    from torch.utils import _pytree

    def children(spec: Any) -> list[Any]:
        if hasattr(spec, "children"):
            return list(spec.children())
        return list(spec.children_specs)  # torch 2.10

    def plain(spec: Any) -> Any:
        parts = [plain(child) for child in children(spec)]
        if spec.is_leaf():
            return 0
        if spec.type is dict:
            return dict(zip(spec.context, parts, strict=True))
        if spec.type is tuple:
            return tuple(parts)
        return parts

    def has_other_containers(spec: Any) -> bool:
        if not spec.is_leaf() and spec.type not in (list, tuple, dict):
            return True
        return any(map(has_other_containers, children(spec)))

    signature = program.module_call_graph[0].signature if program.module_call_graph else None
    if signature is None:
        return False
    before = {name: getattr(signature, name) for name in ("in_spec", "out_spec")}
    if not any(map(has_other_containers, before.values())):
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
    """Run compiled functions, ``torch.cond`` and loops as Python, until the changes are undone."""
    _STANCE.hold(changes)


def exported_by_dynamo_alone() -> tuple[type, ...]:
    """Classes of models that ``torch.onnx.export`` exports with dynamo even if ``dynamo=False``."""
    import torch

    exportable = getattr(torch.onnx, "ExportableModule", None)  # since torch 2.11
    return (torch.export.ExportedProgram, *([exportable] if exportable else []))


def keep_autocast_cache(changes: Changes) -> None:
    """Restore autocast's cache: torch disables it while tracing, and leaves it off on failure."""
    import torch

    before = torch.is_autocast_cache_enabled()
    changes.will_undo(functools.partial(torch.set_autocast_cache_enabled, before), of_thread=True)


def has_hooks(module: Any) -> bool:
    """Whether a module has forward hooks, of its own or of all modules."""
    return bool(module._forward_hooks or _modules()._global_forward_hooks)


@functools.cache
def _modules() -> Any:
    from torch.nn.modules import module

    return module


def run_after_hooks(
    changes: Changes,
    module: Any,
    finish: Callable[[Any], Any],
) -> bool:
    """Apply ``finish`` to a module's result after its forward hooks; return whether it has any.

    Without hooks, nothing is changed.
    """
    if not has_hooks(module):
        return False
    hooks = module._forward_hooks
    key = object()

    def last(_module: Any, _args: Any, returned: Any) -> Any:
        hooks.pop(key, None)
        return finish(returned)

    changes.will_undo(functools.partial(hooks.pop, key, None))
    hooks[key] = last
    return True


def fx_node_of(tensor: Any, tracer: Any) -> Any:
    """The node that produces a tensor in the FX graph being traced; None for an unknown tensor."""
    import torch
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def computes_a_size(fx_node: Any) -> bool:
    """Whether an FX node computes a size from sizes, and not from a tensor."""
    import torch

    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    if fx_node is None or fx_node.op != "call_function" or not fx_node.all_input_nodes:
        return False
    nodes = [fx_node, *fx_node.all_input_nodes]
    return all(isinstance(node.meta.get("val"), symbols) for node in nodes)


def called_by_export(module: Any) -> Any:
    """The module that runs when ``torch.export`` calls ``module``: usually itself.

    A model that is a ``GraphModule`` is interpreted node by node, in the call of the wrapper that
    is traced.
    """
    import torch

    # ``_modules`` of a traced module is not a dictionary
    inner = dict(module._modules.items()).get("_export_root")
    if isinstance(inner, torch.fx.GraphModule):
        return inner
    return module


def called_by_forward(module: Any) -> Any:
    """The module whose bound ``__call__`` is the ``forward`` of another one; None otherwise.

    `torch.compile` sets it so. torch replaces ``nn.Module.__call__`` while it traces, so it does
    not see a call of a method that was bound before.
    """
    import torch

    forward = inspect.unwrap(module.forward)
    inner = getattr(forward, "__self__", None)
    is_call = getattr(forward, "__func__", None) is torch.nn.Module._wrapped_call_impl
    if is_call and inner is not module:
        return inner
    return None


def call_uncompiled(changes: Changes, module: Any) -> None:
    """Let a module from `torch.compile` call the original: torch 2.10 compiles it in an export."""
    from torch._dynamo import OptimizedModule

    if isinstance(module, OptimizedModule):
        set_item(changes, vars(module), "forward", inspect.unwrap(module.forward))


# the key of the pre-hook of htp_export; those of torch are numbers
_LAST = "htp_export"


def has_forward_pre_hooks(module: Any) -> bool:
    """Whether a call of a module runs forward pre-hooks: its own, or those of all modules."""
    from torch.nn.modules.module import _global_forward_pre_hooks

    return bool(module._forward_pre_hooks or _global_forward_pre_hooks)


def add_last_pre_hook(changes: Changes, module: Any, hook: Any) -> None:
    """Add a forward pre-hook to a module, after its others; it gets the arguments by keyword, too."""
    set_item(changes, module._forward_pre_hooks_with_kwargs, _LAST, True)
    set_item(changes, module._forward_pre_hooks, _LAST, hook)


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no values, because ``torch.export`` created it while it traced."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_compiled(module: Any) -> bool:
    """Whether `torch.compile` was applied to a module, or its own method ``compile``."""
    from torch._dynamo import OptimizedModule

    return (
        isinstance(module, OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def without_export_root(name: str, root: str | None) -> str:
    """A module's name in a scope of a branch or loop body, without the name of the traced wrapper.

    ``root`` is the model's own name in the trace; None, for the usual one, if the trace was not
    observed.
    """
    root = "_export_root" if root is None else root
    if name == root:
        return ""
    return name.removeprefix(f"{root}.")


def outputs_of(output: Any) -> list[Any]:
    """The leaves of the ``output`` node of an FX graph, in order; None for other leaves."""
    import torch

    leaves = torch.utils._pytree.tree_leaves(output.args[0])
    return [leaf if isinstance(leaf, torch.fx.Node) else None for leaf in leaves]


def is_forward_of_layer(code: Any) -> bool:
    """Whether a code object is the ``forward`` of one of torch's own layers."""
    import torch.nn.modules

    folder = str(torch.nn.modules.__file__).rpartition("__init__")[0]
    return (
        isinstance(code, types.CodeType)
        and code.co_name == "forward"
        and code.co_filename.startswith(folder)
    )


def opset_range(*, dynamo: bool) -> tuple[int, int]:
    """The lowest and the highest ONNX opset that an exporter of torch accepts.

    Under dynamo, the highest is the newest of onnx: torch tries to convert the graph to it.
    """
    import onnx
    from torch.onnx import _constants

    highest = (
        onnx.defs.onnx_opset_version() if dynamo else _constants.ONNX_TORCHSCRIPT_EXPORTER_MAX_OPSET
    )
    return _constants.ONNX_MIN_OPSET, highest
