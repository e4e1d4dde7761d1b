"""Tags of an exported model: the owners of its nodes, and the module tree with fates.

The evidence of an export for the fates of modules are the captured tensors at the boundary of their
calls. A tensor that passes from one call of a module to another call of it counts, too; at the
boundary of the module's *nodes* (`htp_export.model.boundaries`) it is inside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from htp_export.exporter.capture.calls import NO_CALL, CallLog, CallTensors, Key, Record
from htp_export.exporter.owners import Flow, Ownership, assign, needed, varying
from htp_export.format.call_tree import CallTree, Instance, NodeCalls
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.parameters import ModuleParameters
from htp_export.format.signatures import Signature
from htp_export.format.tags import Reason
from htp_export.lineage.fates import FateEvidence, Outcome, find_fates
from htp_export.lineage.tagging import ModelTags, Owned
from htp_export.model.boundaries import Boundaries


@dataclass
class CallBoundary:
    """Captured tensors at the boundary of one module's calls, in order of use and of production."""

    # tensors computed outside a call and read inside → calls that computed them
    inputs: dict[Key, set[int]] = field(default_factory=dict)
    # tensors computed inside a call and read outside → calls that read them
    outputs: dict[Key, set[int]] = field(default_factory=dict)


def boundaries_of_calls(record: Record, flow: Flow) -> dict[str, CallBoundary]:
    """Return the boundary of the calls of each module that ran.

    Only tensors whose values depend on the model's inputs count, and only operations that the
    outputs depend on.
    """
    boundaries = {call.path: CallBoundary() for call in record.log.calls}
    producer = dict.fromkeys(record.inputs, NO_CALL)
    # result of an operation that returns its input unchanged → this input
    source_of: dict[Key, Key] = {}

    def read(key: Key, reader: int) -> None:
        """Record a consumer of a tensor, and of the tensor that was passed on as this one."""
        for read_key in (key, source_of[key]) if key in source_of else (key,):
            source = producer.get(read_key)
            if source is not None and source != reader and read_key in flow.live:
                _add_crossings(boundaries, record.log, read_key, source, reader)

    for operation, is_wanted in zip(record.operations, flow.wanted, strict=True):
        if not is_wanted:
            continue
        for key in operation.inputs:
            read(key, operation.call)
        producer.update(dict.fromkeys(operation.outputs, operation.call))
        passed_on = operation.passed_on
        if passed_on is not None:
            source = source_of.get(passed_on, passed_on)
            source_of.update(dict.fromkeys(operation.outputs, source))
    for key in record.outputs:
        read(key, NO_CALL)
    return boundaries


def _add_crossings(
    boundaries: dict[str, CallBoundary],
    log: CallLog,
    key: Key,
    source: int,
    reader: int,
) -> None:
    """Add a tensor to the boundary of each call that contains only its producer, or consumer."""
    reading = log.chain(reader)
    producing = log.chain(source)
    for call in reading:
        if call not in producing:
            boundaries[log.calls[call].path].inputs.setdefault(key, set()).add(source)
    for call in producing:
        if call not in reading:
            boundaries[log.calls[call].path].outputs.setdefault(key, set()).add(reader)


class ExportEvidence(FateEvidence[Key]):
    """Evidence of the capture for the fates of modules.

    ``works`` is the work of each node, ``fused`` the places of nodes that several modules were
    fused into.
    """

    def __init__(
        self,
        record: Record,
        works: Sequence[NodeCalls],
        flow: Flow,
        fused: Collection[int],
    ) -> None:
        live = varying(record.nodes, record.graph_inputs)
        nodes = [(node.inputs, node.outputs) for node in record.nodes]
        super().__init__(
            Boundaries(nodes, works, live.__contains__, record.graph_outputs, fused=fused)
        )
        self._record = record
        self._passed = boundaries_of_calls(record, flow)
        self._useful = self._modules_that_count(flow.wanted)
        self._passes_on = self._modules_that_pass_on(flow.wanted)
        self._lost_of: dict[str, dict[str, None]] = {}  # module path → the result of `_lost`

    @cached_property
    def _measured(self) -> frozenset[str]:
        """Modules of whose results only the sizes are read."""
        wanted = needed(self._record.operations, self._record.outputs, values_only=True)
        return frozenset(
            path for path, is_read in self._modules_that_count(wanted).items() if not is_read
        )

    @cached_property
    def _calls_of(self) -> Mapping[str, Sequence[int]]:
        """Module path → the indices of its calls."""
        calls: dict[str, list[int]] = {}
        for index, call in enumerate(self._record.log.calls):
            calls.setdefault(call.path, []).append(index)
        return calls

    @cached_property
    def _with_dead_calls(self) -> frozenset[str]:
        """Modules in whose calls a tensor without consumers was computed."""
        return self._around(self._record.dead)

    @cached_property
    def _captured(self) -> frozenset[Key]:
        """Results of captured operations; torch removes dead operations before the capture."""
        return frozenset(key for operation in self._record.operations for key in operation.outputs)

    def _modules_that_count(self, wanted: list[bool]) -> dict[str, bool]:
        """Path → whether the outputs depend on the module's work; absent if it has no work."""
        log = self._record.log
        useful: dict[str, bool] = {}
        marks: dict[int, bool] = {}
        for operation, is_wanted in zip(self._record.operations, wanted, strict=True):
            marks[operation.call] = marks.get(operation.call, False) or is_wanted
        # other operations read at most constants of dead calls
        marks.update(dict.fromkeys(self._record.dead, False))
        for call, is_wanted in marks.items():
            for caller in log.chain(call):
                path = log.calls[caller].path
                useful[path] = useful.get(path, False) or is_wanted
        return useful

    def _modules_that_pass_on(self, wanted: list[bool]) -> frozenset[str]:
        """The modules whose wanted operations all return their inputs unchanged."""
        passing = set[int]()
        working = set[int]()
        for operation, is_wanted in zip(self._record.operations, wanted, strict=True):
            if is_wanted and operation.passed_on is None:
                working.add(operation.call)
            elif is_wanted:
                passing.add(operation.call)
        return self._around(passing) - self._around(working)

    def _around(self, calls: Iterable[int]) -> frozenset[str]:
        """The modules of calls, and their callers."""
        log = self._record.log
        paths: set[str] = set()
        for call in calls:
            paths.update(log.calls[caller].path for caller in log.chain(call))
        return frozenset(paths)

    def read_by(self, path: str) -> Collection[Key]:
        """The captured tensors that calls of a module read and did not compute."""
        return self._passed.get(path, CallBoundary()).inputs

    # The abstract methods of `FateEvidence`, which documents them.

    def predetermined(self, path: str) -> Outcome | None:
        if not self._record.log.count(path):
            return Outcome(Fate.UNCALLED)
        if self._moved(path):
            return None
        has_nodes = self.has_nodes(path)
        if path not in self._useful:
            return Outcome(self._fate_without_operations(path, has_nodes))
        if not self._useful[path]:
            return Outcome(Fate.DEAD)
        is_lost = self._lost(path)
        if (is_lost or not has_nodes) and path in self._measured:
            return Outcome(Fate.DEAD)
        if is_lost or self._passed[path].outputs:
            return None
        # no consumer outside: is any of its results in the file?
        returned = self._returned(path)
        if not returned or not self._record.final.keys().isdisjoint(returned):
            return None
        return Outcome(Fate.DEAD if self._captured.isdisjoint(returned) else Fate.CONSTANT)

    def _fate_without_operations(self, path: str, has_nodes: bool) -> Fate:
        """The fate of a module that ran, and of which no operation was captured."""
        if has_nodes:  # in a branch or loop body, in which operations are not captured
            return Fate.COMPUTED
        if self._ran_in_dead_bodies(path):
            return Fate.DEAD
        if self._record.log.returned_inputs.get(path, True):
            return Fate.IDENTITY
        return Fate.CONSTANT

    def without_work(self, path: str) -> Fate | None:
        passes_on = path in self._passes_on
        if self._moved(path) or (self._lost(path) and not passes_on):
            return None
        boundary = self._passed[path]
        final = self._record.final
        if not boundary.outputs and not self._record.log.returned_inputs.get(path):
            return Fate.CONSTANT
        inputs = {final.get(key) for key in boundary.inputs}
        if not passes_on and not all(final[key] in inputs for key in boundary.outputs):
            return None
        # Apart from its results, it may have computed tensors without consumers.
        if path in self._with_dead_calls:
            return Fate.DEAD
        return Fate.IDENTITY

    def partners(self, path: str) -> Collection[str] | None:
        return self._moved(path) or self._lost(path) or None

    def ran(self, path: str) -> bool:
        return self._record.log.count(path) > 0

    def known(self, path: str) -> Collection[Key]:
        final = self._record.final
        passed = self._passed.get(path, CallBoundary())
        known = {final[key] for key in (*passed.inputs, *passed.outputs) if key in final}
        if path:
            return known
        return known | self._record.graph_outputs

    def around(self, group: Sequence[str]) -> Iterator[list[str]]:
        before: list[str] = []
        after: list[str] = []
        for path in group:
            boundary = self._passed.get(path)
            if boundary is not None:
                before += self._beyond(boundary, boundary.inputs)
                after += self._beyond(boundary, boundary.outputs)
        yield before
        yield after

    def _ran_in_dead_bodies(self, path: str) -> bool:
        """Whether a module ran only in bodies of dead modules, where its calls do not return."""
        if path in self._record.log.returned_inputs:
            return False
        return all(map(self._is_in_dead_module, self._calls_of[path]))

    def _is_in_dead_module(self, call: int) -> bool:
        log = self._record.log
        paths = (log.calls[caller].path for caller in log.chain(call))
        return any(self._useful.get(path) is False for path in paths)

    def _moved(self, path: str) -> dict[str, None]:
        """Owners of a module's work that was assigned to other calls, in order of execution."""
        moved = self._record.moved
        if not moved:
            return {}
        calls: set[int] = set()
        for call in self._calls_of.get(path, ()):
            calls |= moved.get(call, set())
        owners: dict[str, None] = {}
        for call in sorted(calls):
            owners.update(dict.fromkeys(self._record.log.owners(call)))
        owners.pop(path, None)
        return owners

    def _returned(self, path: str) -> list[Key]:
        """The captured tensors that calls of a module returned, in the file or not."""
        returned: list[Key] = []
        for call in self._calls_of[path]:
            tensors = self._record.call_tensors.get(call)
            if tensors is not None:
                returned += tensors.outputs
        return returned

    def _lost(self, path: str) -> dict[str, None]:
        """Owners of the operations beyond the tensors of a module's boundary that the file lacks."""
        # not `cache`, whose function would refer to this object: only the garbage collector frees that
        if path not in self._lost_of:
            self._lost_of[path] = self._beyond_lost(path)
        return self._lost_of[path]

    def _beyond_lost(self, path: str) -> dict[str, None]:
        boundary = self._passed[path]
        lost = [
            key for key in (*boundary.inputs, *boundary.outputs) if key not in self._record.final
        ]
        if not lost:
            return {}
        return self._beyond(boundary, lost)

    def _beyond(self, boundary: CallBoundary, keys: Collection[Key]) -> dict[str, None]:
        """Owners of the operations beyond the given tensors of a boundary, in order of execution.

        Modules that do work, or have nodes, take precedence.
        """
        calls: set[int] = set()
        for key in keys:
            calls.update(boundary.inputs.get(key, ()), boundary.outputs.get(key, ()))
        paths: list[str] = []
        for call in sorted(calls):
            paths += self._record.log.owners(call) or ("",)
        working = [path for path in paths if path not in self._passes_on or self.has_nodes(path)]
        return dict.fromkeys(working or paths)


def make_tags(
    record: Record,
    hierarchy: Hierarchy,
    parameters: Mapping[str, ModuleParameters] | None = None,
) -> ModelTags:
    """Find the owners and fates of a record, and encode them in the file format.

    ``hierarchy`` has no calls and fates yet; ``parameters``: module path → its parameters, if
    known.
    """
    flow = Flow.of(record)
    owners = assign(record, flow)
    hierarchy = _with_calls(hierarchy, record.log)
    calls, works = _works_of(record.log, owners, hierarchy)
    fused = {place for place, owner in enumerate(owners) if owner.reason == Reason.FUSED}
    evidence = ExportEvidence(record, works, flow, fused)
    tree, unknown = find_fates(hierarchy, evidence)
    return ModelTags.of(
        _owned(owners, works, calls),
        tree,
        calls=calls,
        signatures=_signatures(record, evidence),
        parameters=parameters,
        contamination=[(path, _name_of(key), leaves) for path, key, leaves in unknown],
    )


def _with_calls(hierarchy: Hierarchy, log: CallLog) -> Hierarchy:
    """The module tree with the number of calls of each module; modules missing in it are added."""
    paths = dict.fromkeys((*hierarchy, *(call.path for call in log.calls)))
    modules = (hierarchy.get(path) or ModuleInfo(path, "") for path in paths)
    return Hierarchy([module.with_results(calls=log.count(module.path)) for module in modules])


def _works_of(
    log: CallLog,
    owners: Sequence[Ownership],
    hierarchy: Hierarchy,
) -> tuple[CallTree, list[NodeCalls]]:
    """The tree of the model's calls, and the work of each node."""
    instances = [Instance(call.path, call.nth) for call in log.calls]
    callers: dict[str, list[Instance | None]] = {}
    for call in log.calls:
        caller = None if call.parent == NO_CALL else instances[call.parent]
        callers.setdefault(call.path, []).append(caller)
    tree = CallTree(hierarchy, callers)

    @cache
    def work(paths: tuple[str, ...], calls: tuple[int, ...]) -> NodeCalls:
        return tree.of_calls(paths, [instances[index] for index in calls] or [Instance("")])

    return tree, [work(owner.paths, owner.calls) for owner in owners]


def _owned(
    owners: Sequence[Ownership],
    works: Sequence[NodeCalls],
    calls: CallTree,
) -> list[Owned]:
    """The owners of each node, with their calls as encoded in the file."""

    @cache
    def encoded_calls(work: NodeCalls) -> str:
        return calls.encoded(work)

    return [
        Owned(owner.paths, owner.reason, encoded_calls(work))
        for owner, work in zip(owners, works, strict=True)
    ]


def _signatures(record: Record, evidence: ExportEvidence) -> dict[str, list[Signature]]:
    """Module path → its calls; only modules all of whose calls were observed."""
    signatures: dict[str, list[Signature]] = {}
    for index, call in enumerate(record.log.calls):
        tensors = record.call_tensors.get(index)
        if tensors is None:
            continue
        inputs = _named_inputs(record, call.path, tensors, evidence.read_by(call.path))
        outputs = tuple(_name(record, key) for key in tensors.outputs)
        signatures.setdefault(call.path, []).append(Signature(inputs, outputs))
    return {
        path: calls for path, calls in signatures.items() if len(calls) == record.log.count(path)
    }


def _named_inputs(
    record: Record,
    path: str,
    tensors: CallTensors,
    read: Collection[Key],
) -> dict[str, str | None]:
    """Name of an argument → name of its tensor in the file.

    Every layer is passed the whole cache: only the parts count that it uses or returns. A number
    among the arguments of the model counts if it is an input of the file.
    """
    inputs: dict[str, str | None] = {}
    for name, key in tensors.inputs:
        is_used = key in read or key in tensors.outputs
        if path and tensors.is_part(name) and not is_used:
            continue
        if name in tensors.numbers and record.final.get(key) is None:
            continue
        inputs[name] = _name(record, key)
    return inputs


def _name(record: Record, key: Key | None) -> str | None:
    """The name of a captured tensor in the file; None if it is not in it."""
    final = record.final.get(key)
    return None if final is None else _name_of(final)


def _name_of(key: Key) -> str:
    """The name of a tensor of the exported graph, from its key.

    The key is its value under dynamo, and its name under TorchScript.
    """
    return str(getattr(key, "name", key))
