"""Owners of nodes, tensors of module signatures, and fates, kept up to date while a model changes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Self

import onnx_ir as ir

from htp_export.errors import HtpExportError
from htp_export.format import tags
from htp_export.format.call_tree import NodeCalls
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.signatures import Signature, is_unread
from htp_export.lineage.difference import PassDifference, Snapshot, update_owners
from htp_export.lineage.fates import FateEvidence, Outcome, find_fates
from htp_export.lineage.owner_rule import OwnerRule
from htp_export.lineage.records import changes_are_checked
from htp_export.model.boundaries import BOUNDARY
from htp_export.model.regions import GraphIndex
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import names_now, separate_names
from htp_export.shapes.operator_kinds import without_copies


class SignatureEvidence(FateEvidence[ir.Value]):
    """The boundaries of modules in a changed graph, compared with their signatures.

    The fates in ``hierarchy`` are those before the change; ``signatures`` have the present names of
    tensors. ``lost`` has, for each module that lost a tensor of its signature, the owners on the
    other side of that tensor; ``excused`` the tensors at the boundary of a module that were unknown
    before the change already; ``unread`` the modules whose outputs nothing read before it.
    """

    def __init__(
        self,
        index: GraphIndex,
        hierarchy: Hierarchy,
        signatures: Mapping[str, Sequence[Signature]],
        lost: Mapping[str, Iterable[str]] | None = None,
        excused: Mapping[str, Collection[str]] | None = None,
        unread: Collection[str] = (),
    ) -> None:
        super().__init__(index.boundaries_by_values)
        self._hierarchy, self._lost, self._excused, self._unread = (
            hierarchy,
            lost or {},
            excused or {},
            unread,
        )
        self._given = {
            path: {name for call in calls for name in call.given}
            for path, calls in signatures.items()
        }
        self._known: dict[str, set[str | None]] = {
            path: {name for call in calls for name in call.taken | call.given}
            for path, calls in signatures.items()
        }
        graph = index.model.graph
        self._known.setdefault("", set()).update(
            value.name for value in (*graph.inputs, *graph.outputs)
        )
        copies = {
            value.name: source
            for value in graph.outputs
            if (source := without_copies(value)) is not value
        }
        for names in self._known.values():
            names.update(source.name for name, source in copies.items() if name in names)

    def strange(self, path: str) -> set[str]:
        """The tensors at a module's boundary that its signature does not name; none for a module without one."""
        if path not in self._known or self.is_closed(path):
            return set()
        return {str(value.name) for value, _, _ in self.unknown([path])}

    def counterpart(self, tensor: ir.Value) -> str | None:
        return tensor.name

    def known(self, path: str) -> Collection[str | None]:
        return self._known.get(path, ())

    def ran(self, path: str) -> bool:
        return path in self._known

    def predetermined(self, path: str) -> Outcome | None:
        """The fate of a module that had no nodes before."""
        info = self._hierarchy[path]
        return None if info.fate.does_work else Outcome(info.fate)

    def without_work(self, path: str) -> Fate | None:
        """``identity`` for a module without nodes that lost no tensor and has outputs, ``constant`` or ``dead``."""
        if self.partners(path) is not None:
            return None
        if path in self._unread:
            return Fate.DEAD
        return Fate.IDENTITY if self._given.get(path) else Fate.CONSTANT

    def partners(self, path: str) -> list[str] | None:
        """The modules beyond tensors that are gone, and those that a fused module was fused with before."""
        info = self._hierarchy[path]
        is_open = (
            info.fate.is_merged
            or path in self._lost
            or self.strange(path) - {*self._excused.get(path, ())}
        )
        beyond = (partner for partner in self._lost.get(path, ()) if partner in self._hierarchy)
        return [*info.fused_with, *beyond] if is_open else None

    def behind_unknown(self, group: Sequence[str]) -> Iterator[str]:
        """First the modules beyond tensors that members of the group lost: one node does the work of both."""
        behind = list(super().behind_unknown(group))
        beyond = (partner for path in group for partner in self._lost.get(path, ()) if behind)
        shared = [
            partner for partner in beyond if partner in self._hierarchy and partner not in group
        ]
        yield from shared or behind

    def around(self, group: Sequence[str]) -> Iterator[list[str]]:
        """The owners of the producers, or else the consumers, of the boundary tensors of modules."""
        names = set[str | None]().union(*map(self.known, group))
        yield [
            owner
            for node in self.boundaries.beside(lambda value: value.name in names)
            for owner in node.owners
        ]


class Bookkeeping:
    """Follows a model through passes, which change it in place; `settle` is called after each."""

    def __init__(self, tagged: TaggedModel) -> None:
        self.model, self._source = tagged.model, tagged.source
        self.hierarchy = tagged.hierarchy
        order: dict[str, int] = {}
        for place, node in enumerate(tagged.nodes):
            for owner in tags.owners_of(node.metadata_props):
                order.setdefault(owner, place)
        self._rule = OwnerRule(tagged.calls, order)
        self._signatures = tagged.signatures if tagged.source == "htp" else {}
        self._taps = tagged.taps
        calls = [call for calls in self._signatures.values() for call in calls]
        values = tagged.values
        self._where = {name: values.get(name) for call in calls for name in call.taken | call.given}
        self._stored = {
            name
            for name, value in self._where.items()
            if value is not None and value.is_initializer()
        }
        self._lost: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._unread = self._where.keys() - self._crossing()
        self._unread_modules = {
            path for path, calls in self._signatures.items() if is_unread(calls)
        }
        self._note_boundary()
        self._snapshot, self._names = Snapshot(tagged.model), names_now(tagged.model)
        self.difference = PassDifference.between(self._snapshot, self._snapshot)
        self._excused: dict[str, set[str]] = {}
        if self._signatures:
            evidence = SignatureEvidence(tagged.index, self.hierarchy, self._signatures)
            self._excused = {path: evidence.strange(path) for path in self._signatures}

    def twin(self) -> Self:
        """The same of a copy of the model: what passes do to one, the other does not see."""
        twin = copy.copy(self)
        twin.model = self.model.clone()
        values = TaggedModel(twin.model, self.hierarchy).values
        twin._where = {
            name: None if value is None else values.get(value.name or "")
            for name, value in self._where.items()
        }
        twin._lost = defaultdict(dict, {path: dict(others) for path, others in self._lost.items()})
        twin._note_boundary()
        twin._snapshot, twin._names = Snapshot(twin.model), names_now(twin.model)
        return twin

    def _crossing(self) -> set[str]:
        """Names of tensors that cross the boundary of a module: its inputs, and its outputs that others read.

        Outputs without a consumer may be removed, and so may all tensors of modules with the fate
        ``identity``.
        """
        crossing: set[str] = set()
        for path, calls in self._signatures.items():
            if path in self.hierarchy and self.hierarchy[path].fate.passes_on:
                continue
            for call in calls:
                values = {name: self._where[name] for name in call.given}
                left = (
                    name
                    for name, value in values.items()
                    if value is None or self._leaves(value, path)
                )
                crossing.update(call.taken, left)
        return crossing

    def _note_boundary(self) -> None:
        for name, value in self._where.items():
            if value is not None and name not in self._unread:
                value.meta[BOUNDARY] = True

    def settle(self, part: Collection[ir.Node] | None = None) -> dict[str, tuple[str, ...]]:
        """Tag new nodes, follow tensors, find fates: modules that became fused → their partners.

        ``part``: The nodes that were to be changed, if only some were.
        """
        separate_names(self.model, self._names)
        before, after = self._snapshot, Snapshot(self.model)
        after.check(before)
        difference = self.difference = PassDifference.between(before, after)
        self._snapshot, self._names = after, names_now(self.model)
        if changes_are_checked():
            difference.check_records()
        fused: dict[str, tuple[str, ...]] = {}
        if difference and self._source == "htp":
            update_owners(difference, self._rule, part)
            if bare := [node for node in after.nodes if tags.MODULE not in node.metadata_props]:
                listed = ", ".join(f"{node.op_type} {node.name!r}" for node in bare[:3])
                raise HtpExportError(f"{len(bare)} nodes have no owner: {listed}")
            self._follow(difference)
            fused = self._find_fates()
        return fused

    def tensor(self, name: str) -> ir.Value | None:
        """The tensor that a signature of the original model calls so; None if it is gone."""
        return self._where.get(name)

    def worked_across(self, paths: Iterable[str]) -> set[str]:
        """Original names of boundary tensors that remain although a node computes across them.

        Of modules that became fused without losing a tensor: inputs that are computed inside of the
        module, and outputs that are computed outside; all boundary tensors of a module that has
        neither.
        """
        tensors: set[str] = set()
        for path in paths:
            if path in self._lost:
                continue
            inputs = {name for call in self._signatures[path] for name in call.taken}
            outputs = {name for call in self._signatures[path] for name in call.given}
            present = {
                name: value
                for name in inputs | outputs
                if (value := self._where.get(name)) is not None
            }
            inside = {name for name, value in present.items() if self._is_inside(value, path)}
            across = ((inputs - outputs) & inside) | ((outputs - inputs - inside) & present.keys())
            tensors |= across or present.keys()
        return tensors

    def _is_inside(self, value: ir.Value, path: str) -> bool:
        """Whether the producer of a tensor is in the region of a module."""
        maker = value.producer()
        return maker is not None and path in self._work(maker).modules

    def _leaves(self, value: ir.Value, path: str) -> bool:
        """Whether a tensor is an output of its graph, or has a consumer that does work outside of a module."""
        if value.is_graph_output():
            return True
        readers = (self._work(use.node) for use in value.uses())
        return any(
            not work.parts or any(path not in part.modules for part in work.parts)
            for work in readers
        )

    def _work(self, node: ir.Node) -> NodeCalls:
        metadata = node.metadata_props
        return self._rule.calls.work(tags.owners_of(metadata), tags.encoded_calls(metadata))

    def _follow(self, difference: PassDifference) -> None:
        """Find the tensors of signatures in the changed graph; note those that are gone, and the owners around them."""
        if not self._where:
            return
        values = ir.convenience.create_value_mapping(self.model.graph, include_subgraphs=False)
        here = set(values.values())
        lost: dict[str, ir.Value] = {}
        for name, value in self._where.items():
            if value is None:
                continue
            before = difference.before.names.get(value, value.name)
            if value in here and (value.name == before or before not in values):
                continue
            # A value that is here lost its name to another one: that one has its place.
            equal = None if value in here else difference.counterpart(value, here)
            counterpart = equal or (values.get(before) if before else None)
            # constants may come and go
            is_needed = name not in self._unread and value in difference.before.live
            if counterpart is None and is_needed:
                lost[name] = value
            self._where[name] = counterpart
        self._note_boundary()
        if lost:
            self._note_lost(difference, lost)

    def _note_lost(self, difference: PassDifference, lost: Mapping[str, ir.Value]) -> None:
        before = difference.before
        around: dict[ir.Value | None, dict[str, None]] = {}
        for value in lost.values():
            maker = before.makers.get(value)
            metadata = {} if maker is None else before.nodes[maker].metadata
            around[value] = dict.fromkeys(tags.owners_of(metadata))
        for entry in before.nodes.values():
            for read in entry.inputs:
                if read in around:
                    around[read].update(dict.fromkeys(tags.owners_of(entry.metadata)))
        for path, calls in self._signatures.items():
            for call in calls:
                for original in (*call.inputs.values(), *call.outputs):
                    gone = lost.get(original) if original is not None else None
                    if gone is not None:
                        others = (owner for owner in around[gone] if not tags.is_under(owner, path))
                        self._lost[path].update(dict.fromkeys(others))

    def _find_fates(self) -> dict[str, tuple[str, ...]]:
        if not self._signatures:
            return {}
        was, index = self.hierarchy, GraphIndex(self.model, self._work, self._taps)
        evidence = SignatureEvidence(
            index, was, self.signatures, self._lost, self._excused, self._unread_modules
        )
        self.hierarchy, _ = find_fates(was, evidence)
        return {
            path: module.fused_with
            for path, module in self.hierarchy.items()
            if module.fate.is_merged and not was[path].fate.is_merged
        }

    @property
    def signatures(self) -> dict[str, tuple[Signature, ...]]:
        """The signatures of the modules, with the present names of tensors."""
        return {
            path: tuple(call.renamed(self._now) for call in calls)
            for path, calls in self._signatures.items()
        }

    def _now(self, name: str) -> str | None:
        value = self._where.get(name)
        if value is None or (value.is_initializer() and name not in self._stored):
            return None
        return value.name

    def finish(self) -> TaggedModel:
        """The model with its modules, fates and signatures, which are written into its metadata."""
        if self._source == "htp" and tags.MODULES in self.model.metadata_props:
            write_model_metadata(
                self.model.metadata_props, self.hierarchy, signatures=self.signatures
            )
        return TaggedModel(self.model, self.hierarchy, self._source)
