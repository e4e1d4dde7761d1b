"""The call of each node of a JIT graph, for traced modules and for scripts.

While PyTorch traces, each module's call has a block of nodes of its own, which is dissolved when
the trace ends: `Trace` reads the blocks before. Nodes of a script have chains of attribute names:
`ScriptCalls`.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from htp_export.exporter.capture.calls import NO_CALL, CallLog, CallTensors, keys_of
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.torchscript_internals import (
    CONSTANTS,
    JitStep,
    Reading,
    flattened,
    is_listed,
    is_number,
    is_script_method,
    next_number,
    nodes_in,
    nodes_of,
    numbers_of_graph_inputs,
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

    kind: str  # its operator; one in place has the name of the operator out of place
    call: int  # index of the call that ran it
    outputs: tuple[int, ...]  # numbers of its outputs
    inputs: tuple[int, ...]  # numbers of its inputs


class Trace:
    """Attempts at ``torch.jit.trace`` in one export; a new attempt discards the earlier one."""

    def __init__(self, names: ModuleNames) -> None:
        self.log = CallLog()  # the calls
        # the traced nodes without constants, in order; filled when the trace ends
        self.nodes: list[TracedNode] = []
        self.inputs: list[int] = []  # numbers of the graph's inputs
        # numbers of the model's outputs; None for one that the tracer does not know
        self.outputs: tuple[int | None, ...] = ()
        self._names = names
        self._scope_names: dict[str, str] = {}  # module path → the name of its scope
        self._has_root_scope = True
        self._unscoped: set[int] = set()  # calls without a scope
        # traced tensors in place of numbers among the model's arguments
        self._numbers: set[int | None] = set()
        self.asks = False  # whether numbers of values are read: no value gets a name meanwhile
        # call → two numbers: values between them, in the caller's scope, belong to the call
        self._between: dict[int, list[int]] = {}
        # Whether the blocks of modules are dissolved when the trace ends. torch would do it after
        # that, and copy each node twice for each module around it: see `_add_nodes`.
        self.dissolves = False
        # names of the user's variables that the tracer gave to values; None if they are not observed
        self.variables: set[str] | None = None

    def enter(self, module: Any, state: Any) -> str | None:
        """Record that a module's ``forward`` begins, and return the name of its scope.

        The name is empty if the tracer has no scope for the module, because it was registered while
        the model ran; None if the call is not recorded.
        """
        path = self._names.path_now(module) if state is not None else None
        if path is None or is_script_method(module.forward):
            return None
        self._scope_names = self._scope_names or scope_names(self._names.paths)
        name = self._scope_names.get(path) if is_listed(module) else ""
        if name is None:
            return None
        if not self.log.stack:  # a new attempt
            self.log = CallLog()
            self._unscoped = set()
            self._between = {}
            self._numbers = set()
            self._has_root_scope = bool(name)
        elif not name:
            index = len(self.log.calls)
            self._unscoped.add(index)
            self._between[index] = [next_number()]
        self.log.enter(path)
        return name

    def runs_hooks(self) -> None:
        """Record that forward hooks run before the innermost module returns, outside its scope."""
        self._between.setdefault(self.log.stack[-1], [next_number()])

    def leave(
        self,
        state: Any,
        given: CallTensors,
        result: Any,
        changed: Callable[[Any], Any] | None,
    ) -> None:
        """Record that the innermost running module returns ``result``.

        ``changed``, for the model itself, is applied to the result before it becomes an output.
        """
        # Not before: the tracer would turn an unknown tensor into a constant, named after the
        # caller's scope.
        index = self.log.stack[-1]
        self.asks = True
        try:
            self.log.record_inputs(self._without_numbers(given), traced_number)
            self.log.exit(self._tensors(list(tensors_in(result))), traced_number)
        finally:
            self.asks = False
        if index in self._between:
            self._between[index].append(next_number())
        if self.log.stack:
            return
        graph = state.graph()
        scoped = [call for call in range(len(self.log.calls)) if call not in self._unscoped]
        outermost = NO_CALL if self._has_root_scope else index
        self.nodes = []
        if self.dissolves:
            self._add_nodes([*nodes_in(graph.block())], outermost, scoped, graph.return_node())
        else:
            self._add_nodes(nodes_in(graph.block()), outermost, scoped)
        self._assign_between()
        self.inputs = numbers_of_graph_inputs(graph)
        # raised if the tracer rejects the result: then the export fails, too
        with contextlib.suppress(RuntimeError):
            self.outputs = keys_of(
                flattened(result if changed is None else changed(result)), traced_number
            )

    def given_numbers(self, numbers: list[Any]) -> None:
        """Record the traced tensors in place of numbers among the arguments of the model."""
        self._numbers = set(keys_of(numbers, traced_number))

    def _without_numbers(self, given: CallTensors) -> CallTensors:
        """The input tensors of a call, without tensors that are numbers in PyTorch.

        Numbers among the arguments of the model are inputs of the graph: they stay, and are marked.
        """
        tensors = [tensor for _, tensor in given.inputs]
        if all(map(_has_axes, tensors)):
            return given
        flags = keys_of(tensors, self._is_number)
        if not any(flags):
            return given
        numbers = frozenset(name for name, _ in itertools.compress(given.inputs, flags))
        if len(self.log.stack) == 1:
            return given._replace(numbers=numbers)
        return given._replace(inputs=tuple(pair for pair in given.inputs if pair[0] not in numbers))

    def _tensors(self, traced: list[Any]) -> list[Any]:
        """The subset of traced tensors that are tensors in PyTorch, too."""
        if all(map(_has_axes, traced)):
            return traced
        flags = keys_of(traced, self._is_number)
        if not any(flags):
            return traced
        return list(itertools.compress(traced, map(operator.not_, flags)))

    def _is_number(self, *tensor: Any) -> bool:
        return is_number(self._numbers, *tensor)

    def _add_nodes(
        self, nodes: Iterable[Any], call: int, later: list[int], end: Any = None
    ) -> None:
        """Add every traced node except constants, in order; ``later`` are the calls of blocks to come.

        The node of a module's block has the module's scope name. A block belongs to the first later
        call of that module, which is removed from ``later`` with the calls before it.

        With ``end``, every node is moved before it, and the empty blocks are removed. Order, scopes
        and names are then those that torch gives to copies of the nodes; numbers stay.
        """
        for node in nodes:
            kind = node.kind()
            if kind == "prim::TracedModuleForward":
                inner = self._call_of_block(node.s("scope"), call, later)
                inside = nodes_in(next(iter(node.blocks())))  # of its only block
                if end is None:
                    self._add_nodes(inside, inner, later)
                else:
                    self._add_nodes([*inside], inner, later, end)
                    node.destroy()
                continue
            if end is not None:
                node.moveBefore(end)
            if kind not in CONSTANTS:
                numbers = numbers_of_outputs(node), numbers_of_inputs(node)
                self.nodes.append(TracedNode(out_of_place(kind), call, *numbers))

    def _call_of_block(self, scope: str, call: int, later: list[int]) -> int:
        for place, index in enumerate(later):
            if self._scope_names.get(self.log.calls[index].path) == scope:
                del later[: place + 1]
                return index
        return call

    def _assign_between(self) -> None:
        """Assign nodes traced during calls, but in the callers' scope, to these calls.

        Outer calls come first.
        """
        for index, (began, ended) in sorted(self._between.items()):
            parent = self.log.calls[index].parent
            for place, node in enumerate(self.nodes):
                if node.call == parent and node.outputs and began < node.outputs[0] < ended:
                    self.nodes[place] = node._replace(call=index)


def _has_axes(*tensor: Any) -> bool:
    """Whether a tensor is no number for sure. It has no name here for the reason in `traced_number`."""
    return bool(tensor[0].dim())


def _with_usual_names(traced: Sequence[TracedNode], reading: Reading) -> Sequence[TracedNode]:
    """The nodes, with the names that the tracer gives operators when it ends."""
    others = {node.kind for node in traced} - {step.kind for step in reading.outermost}
    usual = {kind: usual_name(kind) for kind in others}
    if not usual:
        return traced
    return [node._replace(kind=usual.get(node.kind, node.kind)) for node in traced]


class Matching:
    """Matches the nodes of a graph with traced nodes; the graph is the trace without dead nodes.

    Neither kind nor order can tell a dead node from a live one like it. Therefore the graph is
    matched from its end: a node's consumers are matched first, and the inputs of their traced nodes
    are the outputs of its traced node.

    ``reading`` is the graph as it was traced, or that of a module which was created by tracing and
    inlined; ``inputs`` has the numbers of its inputs: while tracing → in the graph.
    """

    def __init__(
        self,
        trace: Trace,
        reading: Reading,
        inputs: Mapping[int, int],
    ) -> None:
        self._traced = traced = _with_usual_names(trace.nodes, reading)
        self._steps = reading.outermost
        self._traced_producer = _places_of_outputs(traced)
        self._producer = _places_of_outputs(self._steps)
        # number in the graph → number while tracing
        self._was: dict[int, int] = {number: old for old, number in inputs.items()}
        # for each node of the graph, the place of its traced node
        self._places: list[int | None] = [None] * len(self._steps)
        if trace.dissolves:  # nodes that were moved keep the numbers of their outputs
            same = self._traced_producer.keys() & self._producer.keys()
            self._was.update(zip(same, same, strict=True))
        if len(trace.outputs) == len(reading.outputs):
            pairs = zip(reading.outputs, trace.outputs, strict=True)
            self._was.update((number, old) for number, old in pairs if old is not None)
        # first with the evidence that is certain, then with the rest
        for find in (self._by_consumers, self._by_inputs):
            for index in reversed(range(len(self._steps))):
                if self._places[index] is None:
                    self._match(index, find(index))
        # the call of each node of the graph's outermost block that is not a constant
        self.calls = [NO_CALL if place is None else traced[place].call for place in self._places]
        # calls of which no node is left
        self.dead = {node.call for node in traced} - set(self.calls)
        self.numbers: dict[int, int] = dict(inputs)  # while tracing → in the graph
        for step, place in zip(self._steps, self._places, strict=True):
            if place is not None:
                self.numbers.update(zip(traced[place].outputs, step.outputs, strict=False))

    def _match(self, index: int, place: int | None) -> None:
        self._places[index] = place
        if place is None:
            return
        pairs = zip(self._steps[index].inputs, self._traced[place].inputs, strict=False)
        for number, old in pairs:
            self._was.setdefault(number, old)

    def _by_consumers(self, index: int) -> int | None:
        """The traced node whose outputs are inputs of the matched consumers of a node."""
        step = self._steps[index]
        for number in step.outputs:
            if number in self._was:
                place = self._traced_producer.get(self._was[number])
                if place is not None and self._traced[place].kind == step.kind:
                    return place
        return None

    def _by_inputs(self, index: int) -> int | None:
        """The last traced node with the same inputs, between the matched nodes around a node.

        For a node without consumers, which changes a tensor in place.
        """
        place = self._by_consumers(index)  # if all its consumers are such nodes
        if place is not None:
            return place
        begin = _first_known(reversed(self._places[:index]), -1)
        end = _first_known(self._places[index + 1 :], len(self._traced))
        for candidate in range(end - 1, begin, -1):
            if self._computes_same(index, candidate):
                return candidate
        return None

    def _computes_same(self, index: int, place: int) -> bool:
        """Whether a node and a traced node compute the same from inputs that are matched."""
        waiting = [(index, place)]
        seen = set()
        while waiting:
            pair = waiting.pop()
            step = self._steps[pair[0]]
            node = self._traced[pair[1]]
            if step.kind != node.kind or len(step.outputs) != len(node.outputs):
                return False
            seen.add(pair)
            for number, old in zip(step.inputs, node.inputs, strict=False):
                if number in self._was:
                    if self._was[number] != old:
                        return False
                    continue
                producer = self._producer.get(number)
                if producer is None:  # a constant
                    continue
                traced_producer = self._traced_producer.get(old)
                if traced_producer is None:
                    return False
                if (producer, traced_producer) not in seen:
                    waiting.append((producer, traced_producer))
        return True


def _places_of_outputs(nodes: Iterable[TracedNode | JitStep]) -> dict[int, int]:
    places: dict[int, int] = {}
    for place, node in enumerate(nodes):
        places.update(dict.fromkeys(node.outputs, place))
    return places


def _first_known(places: Iterable[int | None], default: int) -> int:
    return next((place for place in places if place is not None), default)


class ScriptCalls:
    """The calls of a `ScriptModule`, from its operations, because no Python calls can be observed.

    Inlined operations have a chain of attribute names, ``0(Block).fc(Linear)``, without the
    containers between them (``layers.0``) and equal for every call. Containers are distinguished by
    the parameters that operations read, and otherwise by order.
    """

    def __init__(self, log: CallLog, paths: Iterable[str]) -> None:
        self._log = log
        self._paths = list(paths)
        self._order = {path: place for place, path in enumerate(self._paths)}
        # last part of a path → the places of all such paths
        self._places: dict[str, list[int]] = {}
        for place, path in enumerate(self._paths):
            self._places.setdefault(_last_part(path), []).append(place)
        self._sorted: dict[str, list[str]] = {}  # the same with paths, sorted
        for name, places in self._places.items():
            self._sorted[name] = sorted(self._paths[place] for place in places)
        self._running = [_RunningModule("", "", log.enter(""))]
        log.stack.pop()

    def of_graph(
        self,
        graph: Any,
        reading: Reading,
        parameters: Mapping[int, str],
    ) -> Iterator[int]:
        """The call of each step of a graph; ``parameters`` names the inputs that are parameters."""
        nodes = (node for node in nodes_of(graph) if node.kind() not in CONSTANTS)
        for node, step in zip(nodes, reading.steps, strict=True):
            read = [parameters[number] for number in step.inputs if number in parameters]
            yield self.call_of(node.getModuleHierarchy(), read)

    def call_of(self, hierarchy: str, parameters: Sequence[str]) -> int:
        """The call of one operation, from its chain (empty in the root) and its parameters."""
        holders = [name.rpartition(".")[0] for name in parameters]
        names = _PART.findall(hierarchy)
        for depth, name in enumerate(names, 1):
            running = self._running[depth] if depth < len(self._running) else None
            if running is not None and running.name == name:
                is_innermost = depth == len(names)  # only this one must hold the parameters
                if not is_innermost or self._may_hold(running.path, holders):
                    continue
            above = self._running[depth - 1]
            last = None if running is None else running.path
            path = self._resolve(above.path, name, holders, last)
            del self._running[depth:]
            # A frozen module contains no modules any more: their operations are its own, in one
            # call.
            call = above.call if path == above.path else self._log.add(path, above.call)
            self._running.append(_RunningModule(name, path, call))
        del self._running[len(names) + 1 :]
        return self._running[-1].call

    @staticmethod
    def _may_hold(path: str, holders: Sequence[str]) -> bool:
        """Whether a module, or one around or inside it, is among the holders, if there are any."""
        if not holders:
            return True
        return any(tags.is_under(holder, path) or tags.is_under(path, holder) for holder in holders)

    def _resolve(
        self,
        above: str,
        name: str,
        holders: Sequence[str],
        last: str | None,
    ) -> str:
        """The module called ``name`` below ``above``: by parameters, by order, or the nearest.

        ``holders`` are the modules whose parameters are read; ``last`` is the module that ran
        before, or None.
        """
        found = self._around(holders, above, name)
        if found is None and last is not None:
            found = self._next_after(last, above, name)
        if found is None:
            return self._nearest(above, name)
        return found

    def _around(self, holders: Sequence[str], above: str, name: str) -> str | None:
        """The first module called ``name`` below ``above`` of the holders and their ancestors."""
        found: set[str] = set()
        for holder in holders:
            for path in tags.ancestors(holder):
                is_named = path in self._order and _last_part(path) == name
                if is_named and _is_below(path, above):
                    found.add(path)
        return min(found, key=self._order.__getitem__, default=None)

    def _next_after(self, last: str, above: str, name: str) -> str | None:
        """The first module called ``name`` below ``above`` that comes after another one."""
        places = self._places.get(name, [])
        first = bisect.bisect_right(places, self._order.get(last, -1))
        for place in itertools.islice(places, first, None):
            if _is_below(self._paths[place], above):
                return self._paths[place]
        return None

    def _nearest(self, above: str, name: str) -> str:
        """The least deep module called ``name`` below ``above``; ``above`` if there is none."""
        named = self._sorted.get(name, [])
        if above:
            # paths below it are neighbours in the sorted list, because "/" comes after "."
            begin = bisect.bisect_left(named, f"{above}.")
            end = bisect.bisect_left(named, f"{above}/")
            named = named[begin:end]

        def depth_and_order(path: str) -> tuple[int, int]:
            return path.count("."), self._order[path]

        below = (path for path in named if path != above)
        return min(below, key=depth_and_order, default=above)


class _RunningModule(NamedTuple):
    """A module in which the current operation of a script runs."""

    name: str  # in the chain of attribute names
    path: str
    call: int


def _last_part(path: str) -> str:
    return path.rpartition(".")[2]


def _is_below(path: str, above: str) -> bool:
    return path != above and tags.is_under(path, above)
