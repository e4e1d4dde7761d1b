"""Private parts of torch that are used, as in ``torch_internals.py``: branches, loop bodies, other graphs in graphs."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from htp_export.process.restoring import Changes


def bodies_run_in_place(module: Any) -> Iterator[Any]:
    """The graph modules inside an exported one that torch runs where they stand, once: ``with torch.no_grad():``."""
    for node in module.graph.nodes:
        if node.op == "call_function" and "wrap_with" in str(node.target):
            for argument in node.all_input_nodes:
                if argument.op == "get_attr" and hasattr(body := getattr(module, argument.target), "graph"):
                    yield body
                    yield from bodies_run_in_place(body)


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
