"""The call of each node of a JIT graph: of one that was traced, from the nodes as they were while tracing; of a script.

While PyTorch traces, each module's call has a block of nodes of its own, which is dissolved when
the trace ends.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from htp_export.exporter.capture.calls import NO_CALL, CallLog, CallTensors, keys_of
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.torchscript_internals import (
    CONSTANTS,
    Reading,
    flattened,
    is_listed,
    is_number,
    is_script_method,
    next_number,
    nodes_of,
    numbers_of_inputs,
    numbers_of_outputs,
    out_of_place,
    scope_names,
    traced_number,
    usual_name,
)
from htp_export.format import tags
from htp_export.format.leaves import tensors_in

_PART = re.compile(r"([^.()]+)\([^()]*\)")


class TracedNode(NamedTuple):
    """One node of a JIT graph while it is traced."""

    kind: str  # what it does; an operation in place is called as the one that is not
    call: int  # index of the call that ran it
    outputs: tuple[int, ...]  # the numbers of what it makes
    inputs: tuple[int, ...]  # the numbers of what it reads


class Trace:
    """One export's attempts at ``torch.jit.trace``, as they happen; a new one starts from nothing."""

    def __init__(self, names: ModuleNames) -> None:
        self.log = CallLog()  # the calls
        # what was traced, without constants, in order; once the trace is over
        self.nodes: list[TracedNode] = []
        self.inputs: list[int] = []  # the numbers of the inputs
        # The numbers of what the model returns; None for what the tracer does not know
        self.outputs: tuple[int | None, ...] = ()
        self._names = names
        self._scope_names: dict[str, str] = {}  # module path → the name of its scope
        self._has_root_scope = True
        self._unscoped: set[int] = set()  # calls that have no scope
        self._numbers: set[int | None] = set()  # what stands for numbers that the model is given
        # call → the numbers between which what has its caller's scope is its
        self._between: dict[int, list[int]] = {}

    def enter(self, module: Any, state: Any) -> str | None:
        """Note that a module's ``forward`` begins, and return the name of its scope; None if nothing is to be noted.

        The name is empty if the tracer has no scope for it, as it was put in place while the model
        ran.
        """
        path = self._names.path_now(module) if state is not None else None
        if path is None or is_script_method(module.forward):
            return None
        self._scope_names = self._scope_names or scope_names(self._names.paths)
        name = self._scope_names.get(path) if is_listed(module) else ""
        if name is None:
            return None
        if not self.log.stack:
            self.log, self._unscoped, self._between, self._numbers = CallLog(), set(), {}, set()
            self._has_root_scope = bool(name)
        elif not name:
            index = len(self.log.calls)
            self._unscoped.add(index)
            self._between[index] = [next_number()]
        self.log.enter(path)
        return name

    def runs_hooks(self) -> None:
        """Note that the user's forward hooks run before the innermost module returns: outside of its scope."""
        self._between.setdefault(self.log.stack[-1], [next_number()])

    def leave(
        self, state: Any, given: CallTensors, result: Any, changed: Callable[[Any], Any] | None
    ) -> None:
        """Note that the innermost running module returns ``result``, or what ``changed`` gives in its place."""
        # Only now: the tracer would make a tensor that it does not know a constant, and name it by
        # the caller's scope.
        index = self.log.stack[-1]
        self.log.record_inputs(self._without_numbers(given), traced_number)
        self.log.exit(self._tensors(list(tensors_in(result))), traced_number)
        if index in self._between:
            self._between[index].append(next_number())
        if self.log.stack:
            return
        graph = state.graph()
        scoped = (at for at in range(len(self.log.calls)) if at not in self._unscoped)
        self.nodes = list(
            self._noted(graph.nodes(), NO_CALL if self._has_root_scope else index, list(scoped))
        )
        self._place_between()
        self.inputs = [value.unique() for value in graph.inputs()]
        # the tracer refuses the result, and the export fails
        with contextlib.suppress(RuntimeError):
            self.outputs = keys_of(
                flattened(result if changed is None else changed(result)), traced_number
            )

    def given_numbers(self, numbers: list[Any]) -> None:
        """Note the tensors that stand for numbers among the model's arguments, when the model is called."""
        self._numbers = set(keys_of(numbers, traced_number))

    def _without_numbers(self, given: CallTensors) -> CallTensors:
        """The tensors that enter a call, without those that are numbers in PyTorch.

        Those that the model is given are inputs of the graph, and only marked.
        """
        flags = keys_of([tensor for _, tensor in given.inputs], self._is_number)
        numbers = frozenset(name for name, _ in itertools.compress(given.inputs, flags))
        if not numbers or len(self.log.stack) == 1:
            return replace(given, numbers=numbers)
        return replace(given, inputs=tuple(each for each in given.inputs if each[0] not in numbers))

    def _tensors(self, traced: list[Any]) -> list[Any]:
        """Those tensors of the trace that are tensors in PyTorch, too."""
        flags = keys_of(traced, self._is_number)
        return list(itertools.compress(traced, map(operator.not_, flags)))

    def _is_number(self, *tensor: Any) -> bool:
        return is_number(self._numbers, *tensor)

    def _noted(self, nodes: Any, call: int, later: list[int]) -> Iterator[TracedNode]:
        """Every traced node but constants, in order; ``later`` are the calls whose blocks are to come, in order.

        The node of a module's block names the module as the trace module map does.
        """
        for node in nodes:
            kind = node.kind()
            if kind == "prim::TracedModuleForward":
                name, inner = node.s("scope"), call
                for place, index in enumerate(later):
                    if self._scope_names.get(self.log.calls[index].path) == name:
                        inner = index
                        del later[: place + 1]
                        break
                for block in node.blocks():
                    yield from self._noted(block.nodes(), inner, later)
            elif kind not in CONSTANTS:
                numbers = numbers_of_outputs(node), numbers_of_inputs(node)
                yield TracedNode(out_of_place(kind), call, *numbers)

    def _place_between(self) -> None:
        """Give calls, outer ones first, what was traced while they ran and has their callers' scope."""
        for index, (began, ended) in sorted(self._between.items()):
            parent = self.log.calls[index].parent
            for place, node in enumerate(self.nodes):
                if node.call == parent and node.outputs and began < node.outputs[0] < ended:
                    self.nodes[place] = node._replace(call=index)


def _with_usual_names(traced: Sequence[TracedNode], reading: Reading) -> Sequence[TracedNode]:
    """The nodes, with the names that the tracer gives operators when it ends."""
    others = {node.kind for node in traced} - {step.kind for step in reading.outermost}
    usual = {kind: usual_name(kind) for kind in others}
    return (
        [node._replace(kind=usual.get(node.kind, node.kind)) for node in traced]
        if usual
        else traced
    )


class Matching:
    """Which node of the trace each node of the graph is: the graph is the trace, without dead nodes.

    Neither kind nor order can tell a dead node from a live one like it, so that the graph is
    matched from its end: a node's consumers are matched first, and what they read in the trace is
    what the node made there.

    ``reading`` is the graph as it was traced, or that of a module which was made by tracing and
    inlined; ``inputs`` has the numbers of its inputs: while tracing → in the graph.
    """

    def __init__(self, trace: Trace, reading: Reading, inputs: Mapping[int, int]) -> None:
        self._traced = traced = _with_usual_names(trace.nodes, reading)
        self._steps = reading.outermost
        self._made_at = {
            number: place for place, node in enumerate(traced) for number in node.outputs
        }
        self._made_by = {
            number: index for index, step in enumerate(self._steps) for number in step.outputs
        }
        # in the graph → while tracing
        self._was: dict[int, int] = {number: old for old, number in inputs.items()}
        self._places: list[int | None] = [None] * len(self._steps)
        if len(trace.outputs) == len(reading.outputs):
            pairs = zip(reading.outputs, trace.outputs, strict=True)
            self._was.update((number, old) for number, old in pairs if old is not None)
        for find in (self._by_consumers, self._by_inputs):
            for index in reversed(range(len(self._steps))):
                if self._places[index] is None:
                    self._put(index, find(index))
        # The call of each node of the graph's outermost block that is no constant
        self.calls = [NO_CALL if place is None else traced[place].call for place in self._places]
        # calls all of whose nodes are gone
        self.dead = {node.call for node in traced} - set(self.calls)
        self.numbers: dict[int, int] = dict(inputs)  # while tracing → in the graph
        for step, place in zip(self._steps, self._places, strict=True):
            if place is not None:
                self.numbers.update(zip(traced[place].outputs, step.outputs, strict=False))

    def _put(self, index: int, place: int | None) -> None:
        self._places[index] = place
        if place is not None:
            for number, old in zip(
                self._steps[index].inputs, self._traced[place].inputs, strict=False
            ):
                self._was.setdefault(number, old)

    def _by_consumers(self, index: int) -> int | None:
        """The node that made, while tracing, what consumers of this one read."""
        step = self._steps[index]
        places = (
            self._made_at.get(self._was[number]) for number in step.outputs if number in self._was
        )
        return next(
            (
                place
                for place in places
                if place is not None and self._traced[place].kind == step.kind
            ),
            None,
        )

    def _by_inputs(self, index: int) -> int | None:
        """For a node whose results nothing reads, as it changes a tensor in place: the last that reads the same.

        It stands between those of the nodes around it.
        """
        place = self._by_consumers(index)  # of one that has only consumers of this sort
        if place is not None:
            return place
        begin = next((at for at in reversed(self._places[:index]) if at is not None), -1)
        end = next((at for at in self._places[index + 1 :] if at is not None), len(self._traced))
        same = (place for place in range(end - 1, begin, -1) if self._does_the_same(index, place))
        return next(same, None)

    def _does_the_same(self, index: int, place: int) -> bool:
        """Whether a node of the graph and one of the trace compute the same from what is known to be the same."""
        waiting, seen = [(index, place)], set()
        while waiting:
            pair = waiting.pop()
            step, node = self._steps[pair[0]], self._traced[pair[1]]
            if step.kind != node.kind or len(step.outputs) != len(node.outputs):
                return False
            seen.add(pair)
            for number, old in zip(step.inputs, node.inputs, strict=False):
                if number in self._was and self._was[number] != old:
                    return False
                producer, at = self._made_by.get(number), self._made_at.get(old)
                if number in self._was or producer is None:  # known, or a constant
                    continue
                if at is None:
                    return False
                if (producer, at) not in seen:
                    waiting.append((producer, at))
        return True


class ScriptCalls:
    """The calls of a `ScriptModule`, operation by operation: no calls of Python are seen.

    Inlined operations have a chain of attribute names, ``0(Block).fc(Linear)``, without the
    containers in between (``layers.0``) and the same for every call. Parameters that they read tell
    containers apart; order tells the rest.
    """

    def __init__(self, log: CallLog, paths: Iterable[str]) -> None:
        self._log = log
        self._paths = list(paths)
        self._order = {path: place for place, path in enumerate(self._paths)}
        # last part of a path → the places of all such paths
        self._places: dict[str, list[int]] = {}
        for place, path in enumerate(self._paths):
            self._places.setdefault(_last_part(path), []).append(place)
        self._sorted = {
            name: sorted(self._paths[place] for place in places)
            for name, places in self._places.items()
        }
        self._running: list[tuple[str, str, int]] = [("", "", log.enter(""))]  # name, path, call
        log.stack.pop()

    def of_graph(
        self, graph: Any, reading: Reading, parameters: Mapping[int, str]
    ) -> Iterator[int]:
        """The call of each step of a graph; ``parameters`` has the names of its inputs that are parameters."""
        nodes = (node for node in nodes_of(graph) if node.kind() not in CONSTANTS)
        for node, step in zip(nodes, reading.steps, strict=True):
            held = [parameters[number] for number in step.inputs if number in parameters]
            yield self.call_of(node.getModuleHierarchy(), held)

    def call_of(self, hierarchy: str, parameters: Sequence[str]) -> int:
        """The call of one operation, from its chain, empty in the root, and the parameters that it reads."""
        holders = [name.rpartition(".")[0] for name in parameters]
        names = _PART.findall(hierarchy)
        for depth, name in enumerate(names, 1):
            same = depth < len(self._running) and self._running[depth][0] == name
            if same and (depth < len(names) or self._holds(self._running[depth][1], holders)):
                continue
            _, above, parent = self._running[depth - 1]
            path = self._resolve(
                above,
                name,
                holders,
                self._running[depth][1] if depth < len(self._running) else None,
            )
            del self._running[depth:]
            # A frozen module has no modules in it any more: what they computed is its own work, in
            # one call of it.
            call = parent if path == above else self._log.add(path, parent)
            self._running.append((name, path, call))
        del self._running[len(names) + 1 :]
        return self._running[-1][2]

    @staticmethod
    def _holds(path: str, holders: Sequence[str]) -> bool:
        return not holders or any(
            tags.is_under(holder, path) or tags.is_under(path, holder) for holder in holders
        )

    def _resolve(self, above: str, name: str, holders: Sequence[str], last: str | None) -> str:
        """The module called ``name`` below ``above``: by parameters, else the next one in order, else the nearest.

        ``holders`` are the modules whose parameters are read; ``last``: the one that ran before, if
        any did.
        """
        found = self._around(holders, above, name)
        if found is None and last is not None:
            found = self._next_after(last, above, name)
        return self._nearest(above, name) if found is None else found

    def _around(self, holders: Sequence[str], above: str, name: str) -> str | None:
        """The first module called ``name`` below ``above`` that is one of some, or around one of them."""
        around = {
            path for holder in holders for path in tags.ancestors(holder) if path in self._order
        }
        found = [path for path in around if _last_part(path) == name and _is_below(path, above)]
        return min(found, key=self._order.__getitem__, default=None)

    def _next_after(self, last: str, above: str, name: str) -> str | None:
        """The first module called ``name`` below ``above`` that comes after another one."""
        places = self._places.get(name, [])
        first = bisect.bisect_right(places, self._order.get(last, -1))
        later = (self._paths[place] for place in itertools.islice(places, first, None))
        return next((path for path in later if _is_below(path, above)), None)

    def _nearest(self, above: str, name: str) -> str:
        """The module called ``name`` that is least deep below ``above``; ``above`` itself if there is none."""
        named = self._sorted.get(name, [])
        if above:  # those below it stand together: "/" comes after "."
            begin, end = (bisect.bisect_left(named, f"{above}{sign}") for sign in "./")
            named = named[begin:end]
        below = (path for path in named if path != above)
        return min(below, key=lambda path: (path.count("."), self._order[path]), default=above)


def _last_part(path: str) -> str:
    return path.rpartition(".")[2]


def _is_below(path: str, above: str) -> bool:
    return path != above and tags.is_under(path, above)
