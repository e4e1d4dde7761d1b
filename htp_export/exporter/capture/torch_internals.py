"""Private parts of torch that are used, each behind a function that says what for.

The places that are patched stand in ``patches.py``. ``tests/test_torch_internals.py`` fails where a part has moved.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from htp_export.format.leaves import tensors_in
from htp_export.process.restoring import Changes
from htp_export.process.shared_settings import SharedSetting


def bodies_run_in_place(module: Any) -> Iterator[Any]:
    """The graph modules inside an exported one that torch runs where they stand, once: ``with torch.no_grad():``."""
    for node in module.graph.nodes:
        if node.op == "call_function" and "wrap_with" in str(node.target):
            for argument in node.all_input_nodes:
                if argument.op == "get_attr" and hasattr(body := getattr(module, argument.target), "graph"):
                    yield body
                    yield from bodies_run_in_place(body)


def graph_modules_in(module: Any) -> Iterator[Any]:
    """A graph module and those inside it: the bodies of operators."""
    import torch

    return (each for each in module.modules() if isinstance(each, torch.fx.GraphModule))


def has_module_stacks(model: Any) -> bool:
    """Whether a model is a graph module whose operations have the module stacks of an earlier export."""
    import torch

    nodes = model.graph.nodes if isinstance(model, torch.fx.GraphModule) else ()
    return any(node.op == "call_function" and node.meta.get("nn_module_stack") for node in nodes)


class Scope(NamedTuple):
    """One module of those in which a node of a graph that Dynamo made runs.

    Attributes:
        key: Dynamo's key of the module's call.
        name: The expression by which Dynamo reaches the module.
        module: Its ``id``; -1 where the key does not hold it.
    """

    key: str
    name: str
    module: int


def scopes_of(node: Any) -> list[Scope]:
    """The modules in which a node of a graph that Dynamo made runs, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    numbers = {key: key.partition("@")[0] for key in stack}  # from the second call on, the keys are "id@1", ...
    return [
        Scope(key, str(name), int(numbers[key]) if numbers[key].isdecimal() else -1) for key, (name, _) in stack.items()
    ]


def bodies_of(module: Any) -> dict[Any, list[Any]]:
    """The branches and loop bodies in the graph of a module: node → graph modules; none for what has no graph."""
    import torch

    bodies: dict[Any, list[Any]] = {}
    for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
        if has_bodies(node.target):
            arguments = [getattr(module, each.target, None) for each in node.all_input_nodes if each.op == "get_attr"]
            bodies[node] = [body for body in arguments if isinstance(body, torch.fx.GraphModule)]
    return bodies


def nodes_in_bodies(module: Any) -> dict[Any, list[Any]]:
    """The same with nodes in the place of graph modules, each before the nodes of the bodies that it has."""
    found: dict[Any, list[Any]] = {}
    for node, bodies in bodies_of(module).items():
        found[node] = []
        for body in bodies:
            inner = nodes_in_bodies(body)
            for each in body.graph.nodes:
                found[node] += [each, *inner.get(each, ())]
    return found


def has_bodies(function: Any) -> bool:
    """Return whether a function takes branches or loop bodies: ``torch.cond``, ``while_loop``, ``scan``."""
    import torch

    return isinstance(function, torch._ops.HigherOrderOperator)


def bodies_given(function: Any, args: Any) -> list[Any]:
    """The branches or loop bodies among the arguments of such an operator, in order."""
    import torch

    return [each for each in args if has_bodies(function) and isinstance(each, torch.fx.GraphModule)]


def is_choice(function: Any) -> bool:
    """Whether of the bodies of such an operator one alone runs."""
    import torch

    return function is torch.ops.higher_order.cond


def gives_what_a_body_gives(function: Any) -> bool:
    """Whether the last body of such an operator gives results of the operator's kind, from the same inputs."""
    import torch

    return function in (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop)


def file_of_code(module: Any) -> str | None:
    """Return the file name that FX generates for the code of a graph module; None for other modules."""
    import torch

    if not isinstance(module, torch.fx.GraphModule) or not module.code:  # Dynamo's have no code until it is asked for
        return None
    code = getattr(module.forward, "__code__", None)
    return None if code is None else str(code.co_filename)


def generated_lines(trace: str) -> list[tuple[str, str]]:
    """Return the lines of FX-generated code in a stack trace, innermost first: file, and name of the line's node."""
    return re.findall(r'File "(<eval_with_key>[^"]*)", line \d+, in .*\n\s*(\w+)\b[^=\n]* = ', trace)[::-1]


class State(NamedTuple):
    """A tensor that an executed node read or returned, in its state after the execution.

    Attributes:
        node: The node of the executed graph whose result the tensor is.
        changes: How often the tensor has been changed in place.
        maker: The node of the traced graph that produces it, or None.
        changed: Whether this execution changed it in place.
    """

    node: Any
    changes: int
    maker: Any
    changed: bool = False


class ExecutedNode(NamedTuple):
    """One executed node of the decomposed FX graph, and the nodes into which it was traced.

    Attributes:
        node: The executed node.
        made: The nodes of the traced graph, in order.
        read: The tensors that the node read.
        returned: The tensor that it returned; empty if it returned several.
    """

    node: Any
    made: list[Any]
    read: list[State]
    returned: list[State]


def fx_tracer() -> Any:
    """What traces into an FX graph in this thread; None where nothing does."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return None if mode is None else mode.tracer


class Tracing(NamedTuple):
    """The state of the trace in this thread before a node of another graph is executed.

    Attributes:
        tracer: The tracer.
        made: Number of nodes in the traced graph.
        held: The tensors that the node reads: producer, tensor, and how often it has been changed in place.
    """

    tracer: Any
    made: int
    held: list[tuple[Any, Any, int]]


def fx_tracing(interpreter: Any, node: Any) -> Tracing | None:
    """Return the state of the running trace before a node is executed; None if there is no trace.

    Args:
        interpreter: Executes the node's graph; it has the results of the other nodes.
        node: The node.
    """
    import torch

    tracer = fx_tracer()
    if tracer is None:
        return None
    arguments = [(each, interpreter.env.get(each)) for each in node.all_input_nodes]
    held = [(each, value, changes_of(value)) for each, value in arguments if isinstance(value, torch.Tensor)]
    return Tracing(tracer, len(tracer.graph.nodes), held)


def executed_since(before: Tracing, node: Any, result: Any) -> ExecutedNode:
    """Return the nodes into which a node was traced when it was executed.

    Args:
        before: The state of the trace before the execution.
        node: The executed node.
        result: Its result.
    """
    nodes = before.tracer.graph.nodes
    traced = list(itertools.islice(reversed(nodes), len(nodes) - before.made))[::-1]
    read = [
        State(each, now, fx_node_of(value, before.tracer), now != was)
        for each, value, was in before.held
        for now in [changes_of(value)]
    ]
    returned = [State(node, changes_of(value), fx_node_of(value, before.tracer)) for value in tensors_in(result)]
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


def reversed_view(node: Any) -> Any:
    """Return the view that a node writes back into its base tensor, as functionalization does after an in-place change.

    Returns:
        The node with the value of the view; None if the node is no such write.
    """
    import torch

    if node.target is operator.getitem:
        return None
    aten = torch.ops.aten
    scatters = (aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter, aten.as_strided_scatter)
    place = 1 if getattr(node.target, "overloadpacket", None) in scatters else 0 if is_view(node) else None
    return node.args[place] if place is not None and isinstance(node.args[place], torch.fx.Node) else None


def changes_of(tensor: Any) -> int:
    """Return how often a tensor was changed in place, including through views; 0 if torch does not count."""
    try:
        return int(tensor._version)
    except RuntimeError:  # made in inference mode
        return 0


def use_plain_containers(changes: Changes, program: Any) -> bool:
    """Let an exported program take and return lists in place of the containers of other libraries.

    torch builds the containers again while it decomposes the program, inside the trace. Tensors that they make for
    that, as the caches of transformers do, become constants of the trace that the decomposed program lacks.

    Args:
        changes: When they are reverted, the program has its own containers again.
        program: The program.

    Returns:
        Whether there are such containers.
    """
    from torch.utils import _pytree

    def children(spec: Any) -> list[Any]:
        found: list[Any] = spec.children() if hasattr(spec, "children") else spec.children_specs  # of torch 2.10
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
    before = {} if signature is None else {name: getattr(signature, name) for name in ("in_spec", "out_spec")}
    if not any(map(has_others, before.values())):
        return False
    for name, spec in before.items():
        changes.will_undo(functools.partial(setattr, signature, name, spec))
        setattr(signature, name, _pytree.tree_structure(plain(spec)))
    return True


def watch_bodies(changes: Changes, module: Any, watched: Callable[[Callable[[], Any], Any, Any], Any]) -> None:
    """Observe the nodes of bodies while torch decomposes an exported graph: it inlines them, without their scopes.

    Args:
        changes: When they are reverted, the bodies get their own code back.
        module: The exported graph module.
        watched: Called for each node of a body with a function that executes it, the interpreter of the body, and the
            node; returns the result of the function.
    """
    import torch

    class Watched(torch.fx.Interpreter):
        """Runs a body node by node, as its own code does."""

        def __init__(self, body: torch.fx.GraphModule) -> None:
            super().__init__(body)
            self._file = file_of_code(body) or ""
            self._lines = _lines_of_nodes(body)

        def run_node(self, n: torch.fx.Node) -> Any:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if n.op == "call_function" and n.name in self._lines:
                call = _calling_from(self._file, self._lines[n.name])
                return watched(lambda: call(n.target, args, kwargs), self, n)
            return watched(lambda: getattr(self, n.op)(n.target, args, kwargs), self, n)

    for body in bodies_run_in_place(module):
        interpreter = Watched(body)
        changes.will_undo(functools.partial(vars(body).pop, "forward", None))
        body.forward = interpreter.run


def _lines_of_nodes(module: Any) -> dict[str, int]:
    """Name of a node of a graph module → its line in the code that FX made of the graph."""
    lines = enumerate(module.code.splitlines(), 1)
    named = [(match.group(1), line) for line, text in lines if (match := re.match(r"\s+(\w+)\b[^=\n]* = ", text))]
    return dict(reversed(named))  # the first line of each name


def _calling_from(file: str, line: int) -> Callable[[Any, Any, Any], Any]:
    """Call a function from a ``forward`` at a line of a file, as torch sees it, which writes the place on each node."""

    def call(target: Any, args: Any, kwargs: Any) -> Any:
        return target(*args, **kwargs)

    code = call.__code__.replace(co_name="forward", co_filename=file, co_firstlineno=line - 1)
    return types.FunctionType(code, {})


@functools.cache
def usual_name(kind: str) -> str:
    """The operator that torch puts for one that is another name of it, ``aten::mul`` for ``aten::multiply``.

    It does so at the end of every trace, and whenever it compiles a function; so one is compiled.

    Args:
        kind: The kind of a node of a JIT graph.

    Returns:
        The kind that the node has afterwards: its own, if the operator has no other name.
    """
    import torch

    name = kind.removeprefix("aten::")
    if name == kind or not name.isidentifier():
        return kind
    for schema in torch._C._jit_get_schemas_for_operator(kind):
        types = ", ".join(f"a{k}: {given.type.annotation_str}" for k, given in enumerate(schema.arguments))
        given = ", ".join(f"{'' if not a.kwarg_only else a.name + '='}a{k}" for k, a in enumerate(schema.arguments))
        try:
            unit = torch.jit.CompilationUnit(f"def f({types}):\n    return torch.ops.aten.{name}({given})\n")
        except RuntimeError:  # arguments of a type that cannot be written down
            continue
        kinds = {node.kind() for node in unit.f.graph.nodes()} - {"prim::Constant"}
        return kinds.pop() if len(kinds) == 1 else kind
    return kind


def _stance() -> Any:
    from torch._dynamo import eval_frame

    return eval_frame._stance


def _set_stance(stance: Any) -> None:
    from torch._dynamo import eval_frame

    eval_frame._set_stance(stance)


def _eager_stance() -> Any:
    from torch._dynamo.eval_frame import DynamoStance

    return DynamoStance("force_eager")


_STANCE = SharedSetting(_stance, _set_stance, _eager_stance)


def turn_compilation_off(changes: Changes) -> None:
    """Run what is compiled, and the bodies of ``torch.cond`` and loops, as Python, until the changes are taken back."""
    _STANCE.hold(changes)


def exported_by_dynamo_alone() -> tuple[type, ...]:
    """What ``torch.onnx.export`` gives to the dynamo exporter under ``dynamo=False`` too."""
    import torch

    exportable = getattr(torch.onnx, "ExportableModule", None)  # since torch 2.11
    return (torch.export.ExportedProgram, *([exportable] if exportable else []))


def tracing_state() -> Any:
    """The state of the TorchScript trace that runs in this thread; None where none does."""
    import torch

    return torch._C._get_tracing_state()


def flattened(value: Any) -> list[Any]:
    """What the TorchScript tracer makes of arguments or results: their tensors, numbers and flags as tensors, in order.

    Raises:
        RuntimeError: If something among them is none of what it takes.
    """
    import torch

    tensors, _ = torch._C._jit_flatten(value)
    return list(tensors)


def numbers_as_tensors(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as the TorchScript tracer passes them on: numbers and flags are tensors.

    Raises:
        RuntimeError: If something among them is none of what it takes.
    """
    import torch

    tensors, structure = torch._C._jit_flatten(arguments)
    changed: tuple[Any, ...] = torch._C._jit_unflatten(tensors, structure)
    return changed


def keep_autocast_cache(changes: Changes) -> None:
    """Leave autocast's cache as it is: torch turns it off while it traces, and leaves it off where that fails."""
    import torch

    changes.will_undo(functools.partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()))


def state_names(model: Any) -> frozenset[str]:
    """Names of the parameters and buffers that a traced graph of this model takes as inputs, shared ones once."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return frozenset()
    # With its tensors as they are: a quantized model holds more than tensors, which cannot be detached.
    return frozenset(torch.jit._unique_state_dict(model, keep_vars=True))  # type: ignore[attr-defined, no-untyped-call]


@functools.cache
def written(kind: str, count: int) -> int:
    """Which of its ``count`` arguments an operator changes in place and gives back; -1 for none.

    Overloads of one name have different counts of arguments where one of them has an ``out``.
    """
    return next((place for place, alias in _aliases(kind, count) if alias.is_write), -1)


@functools.cache
def viewed(kind: str, count: int) -> int:
    """Of which of its ``count`` arguments an operator may give back a view; -1 for none."""
    if kind in ("prim::ListUnpack", "prim::TupleUnpack"):
        return 0
    return next((place for place, alias in _aliases(kind, count) if not alias.is_write), -1)


@functools.cache
def out_of_place(kind: str) -> str:
    """What an operator in place is called where it is not: ``aten::add`` for ``aten::add_``; others keep their name.

    The schemas decide: ``aten::__rshift__`` ends like an operator in place and is none, ``aten::__ior__`` is one.
    """
    first = [schema.arguments[0].alias_info for schema in _schemas(kind) if schema.arguments]
    if not any(alias is not None and alias.is_write for alias in first):
        return kind
    if kind.endswith("__"):
        return kind.replace("::__i", "::__")
    return kind.removesuffix("_")


def _schemas(kind: str) -> list[Any]:
    import torch

    schemas: list[Any] = torch._C._jit_get_schemas_for_operator(kind) if kind.startswith("aten::") else []
    return schemas


def _aliases(kind: str, count: int) -> list[tuple[int, Any]]:
    """The arguments of an operator whose memory what it gives back may have."""
    return [
        (place, argument.alias_info)
        for schema in _schemas(kind)
        if len(schema.arguments) == count and any(result.alias_info is not None for result in schema.returns)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    ]


_TRACED_ROOT = "__module"  # stands for the root in the scopes of ``torch.jit.trace``, which opens no scope for it


class _ScopeNames(dict[str, str]):
    """Module path → the name of its scope in the trace; filled when the exporter has made its map."""

    def __init__(self, paths: dict[int, str]) -> None:
        self._paths = paths

    def get(self, path: str, default: Any = None) -> Any:
        if not self:
            import torch

            modules = torch.jit._trace._trace_module_map or {}
            scopes = ((key, name) for key, name in modules.items() if key != _TRACED_ROOT)
            self.update((self._paths.get(id(module.__dict__), ""), name) for module, name in scopes)
        return super().get(path, default)


def scope_names(paths: dict[int, str]) -> dict[str, str]:
    """Module path → the name that the tracer of the running export gives the module's scope."""
    return _ScopeNames(paths)


def is_listed(module: Any) -> bool:
    """Whether the tracer of the running export listed a module when it began: only then it opens a scope for it."""
    import torch

    return module in (torch.jit._trace._trace_module_map or {})


def names_of_traced_scope(scope: str) -> str:
    """The names of the modules that run, outermost first, from the scope of a node under ``torch.jit.trace``.

    Each part is a module's path below ``__module``, a name its end: ``__module.layers.0/__module.layers.0.fc``.
    """
    return "/".join(part.rpartition(".")[2] for part in scope.split("/")) if scope else ""


def names_of_inlined_scope(scope: str) -> str:
    """The same, from the scope that a node has once the methods of a traced module were inlined.

    Each part is a class and a name, with containers that did not run or without: ``Net::/Block::layers.0/Linear::fc``.
    """
    return "/".join(part.rpartition("::")[2].rpartition(".")[2] for part in scope.split("/")[1:])


def next_number() -> int:
    """A number between those of the values that the running TorchScript trace has made, and those that it will make."""
    value = tracing_state().graph().insertConstant(0)
    number = int(value.unique())
    value.node().destroy()
    return number


def run_after_hooks(changes: Changes, module: Any, finish: Callable[[Any], Any]) -> bool:
    """Run something once, when the user's forward hooks on a module have run, with what the module gives back then.

    It is asked for while the module's ``forward`` runs.

    Args:
        changes: When they are taken back, nothing is left to be run.
        module: The module.
        finish: Gets what the module gives back, and gives back what it is to give back.

    Returns:
        Whether there are hooks; else it would not run.
    """
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


def is_script_method(forward: Any) -> bool:
    """Whether a module's ``forward`` is scripted: then the tracer opens no scope for it."""
    import torch

    return isinstance(forward, torch._C.ScriptMethod)


def traced_number(*tensor: Any) -> int | None:
    """The number of a tensor in the graph of the TorchScript trace that runs; None for one it does not know.

    The tracer names a value that has no name yet by the variable that holds it in the frame that asks, or in the next
    one. Here that variable holds a tuple, and in the next frame there is none: values keep the names that torch gives.
    """
    import torch

    try:
        return int(torch._C._get_value_trace(*tensor).unique())  # type: ignore[attr-defined]
    except RuntimeError:  # a parameter that is none of the model's: the tracer takes it for no constant
        return None


def take_over_trace(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Let tensors that were computed a second time stand for the first ones in the TorchScript trace that runs.

    What computed the first ones is removed from the trace, unless something else reads it: exporters would merge it
    with what computes the second ones, and keep the scopes of the first.

    Args:
        pairs: Each first tensor with the second one, in the order of their computation.
    """
    import torch

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


def fx_node_of(tensor: Any, tracer: Any) -> Any:
    """The node that makes a tensor in the FX graph that is being traced; None for one that the tracer does not know."""
    import torch
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def called_by_export(module: Any) -> Any:
    """The module that runs when ``torch.export`` calls ``module``: as a rule itself.

    ``torch.export`` traces the model inside a wrapper module. It calls the model from there, so that the call is seen;
    but a model that is a ``GraphModule`` it interprets node by node, in the wrapper's own call.
    """
    import torch

    inner = dict(module._modules.items()).get("_export_root")  # a traced module's is no dictionary
    return inner if isinstance(inner, torch.fx.GraphModule) else module


def called_by_forward(module: Any) -> Any:
    """The module whose bound ``__call__`` is the ``forward`` of another one, as `torch.compile` sets it; else None.

    torch sees the calls of modules in a trace by replacing ``nn.Module.__call__``, and one that was bound before is
    the one from before: torch opens no scope for its module.
    """
    import torch

    forward = inspect.unwrap(module.forward)
    inner = getattr(forward, "__self__", None)
    is_call = getattr(forward, "__func__", None) is torch.nn.Module._wrapped_call_impl
    return inner if is_call and inner is not module else None


def is_compiled(module: Any) -> bool:
    """Whether `torch.compile` was applied to a module, or its own method ``compile``."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


def without_export_root(name: str, root: str | None) -> str:
    """A module's name in a scope, without the name of the wrapper in which ``torch.export`` traces the model.

    torch takes it off the names in the main graph, and leaves it in branches and loop bodies.

    Args:
        name: The name, ``_export_root.layer.0``.
        root: The model's own name in the trace; None where the trace was not seen, and has the usual one.
    """
    root = "_export_root" if root is None else root
    return "" if name == root else name.removeprefix(f"{root}.")


def outputs_of(output: Any) -> list[Any]:
    """What the ``output`` node of an FX graph returns, one after the other: nodes, and None for all else."""
    import torch

    leaves = torch.utils._pytree.tree_leaves(output.args[0])
    return [leaf if isinstance(leaf, torch.fx.Node) else None for leaf in leaves]


def opset_range(*, dynamo: bool) -> tuple[int, int]:
    """The lowest and the highest ONNX opset that an exporter of torch can be asked for.

    Under dynamo, that is the newest that onnx knows: torch tries to convert the graph to it.
    """
    import onnx
    from torch.onnx import _constants

    highest = onnx.defs.onnx_opset_version() if dynamo else _constants.ONNX_TORCHSCRIPT_EXPORTER_MAX_OPSET
    return _constants.ONNX_MIN_OPSET, highest
