"""What ``torch.export`` does not keep with the programs that it makes: which modules ran, and in which bodies.

Captures are noted on the nodes of the program's graph, so that they come along when the graph is copied or changed.
Without strict mode, ``torch.export`` leaves the nodes of bodies without a module stack; it can be written while the
graphs are there that Dynamo made of the bodies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from htp_export.exporter.capture.bodies import Bodies, nodes_in_bodies
from htp_export.exporter.capture.calls import CallLog
from htp_export.exporter.capture.dynamo import DynamoCapture
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.running import Guarded
from htp_export.exporter.capture.torch_internals import fx_tracer, graph_modules_in
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.parameters import ModuleParameters

_CAPTURED = "htp.captured"  # key in the ``meta`` of FX nodes
_Stack = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Captured:
    """What was captured of one model; it does not hold the model."""

    capture: DynamoCapture  # the capture, as it was when the program was complete
    hierarchy: Hierarchy | None  # the model's module tree
    parameters: Mapping[str, ModuleParameters] | None  # module path → the parameters that it holds

    def keep_with(self, program: Any) -> None:
        """Note it on the nodes of an ``ExportedProgram``."""
        for node in _nodes(program):
            node.meta[_CAPTURED] = self

    def __deepcopy__(self, _: Any) -> Captured:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a program that is pickled, and read elsewhere, is one that was made elsewhere


def captured_with(program: Any) -> Captured | None:
    """What was captured while a program was made; None if nothing was, or if its nodes come from several models."""
    noted = (node.meta.get(_CAPTURED) for node in _nodes(program))
    found: dict[int, Captured] = {id(captured): captured for captured in noted if captured is not None}
    return next(iter(found.values())) if len(found) == 1 else None


def _nodes(program: Any) -> Iterator[Any]:
    for module in graph_modules_in(program.graph_module):
        yield from module.graph.nodes


class ProgramBodies(Guarded):
    """The bodies that one ``torch.export`` traces."""

    def __init__(self) -> None:
        super().__init__()
        self._log = CallLog()
        self._root = self._log.enter("")

    def begin(self, model: Any) -> None:
        """Read the names of the modules of the model that is exported."""
        names = self._names = ModuleNames(model)
        classes = ((names.by_id[id(module)], type(module)) for module in model.modules())
        self._classes = {path: f"{cls.__module__}.{cls.__qualname__}" for path, cls in classes}
        self._bodies = Bodies(names.by_id)

    def enter_operator(self, function: Any, args: Any) -> bool:
        """Note that an operator runs that may have bodies; only if it is true, `leave_operator` is to be called."""
        return self._bodies.enter(function, args, self._log, traced=fx_tracer() is not None)

    def leave_operator(self) -> None:
        """Note that the operator returns."""
        self._bodies.leave()

    def write(self, program: Any) -> None:
        """Write the module stacks on the nodes of the bodies of an ``ExportedProgram`` that have none."""
        module = program.graph_module
        scopes = {(key, name) for node in module.graph.nodes for key, (name, _) in _stack(node).items()}
        outside = Counter(name.partition("@")[0] for _, name in scopes)  # calls of a module that are in no body
        for node, inner in nodes_in_bodies(module).items():
            calls = self._bodies.calls(self._root, [each.meta.get("stack_trace") for each in inner])
            for each in inner:
                if each.op == "call_function" and not _stack(each):
                    call = calls.get(each.meta.get("stack_trace") or "", self._root)
                    each.meta["nn_module_stack"] = {**_stack(node), **self._running(call, outside)}

    def _running(self, call: int, outside: Counter[str]) -> _Stack:
        """The module stack of a call in a body, as torch writes one; its calls are numbered after those outside."""
        found: _Stack = {}
        for index in reversed(self._log.chain(call)):
            if index != self._root:
                path, number = self._log.calls[index].path, self._log.calls[index].nth
                number += outside[path]
                name = f"{path}@{number}" if number else path
                found[f"L__self___{name}"] = name, self._classes[path]
        return found


def _stack(node: Any) -> _Stack:
    return node.meta.get("nn_module_stack") or {}
