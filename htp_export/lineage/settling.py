"""Owners of nodes, tensors of signatures, and fates, kept up to date while a model changes."""

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
from htp_export.format.signatures import Signature, is_unread, renamed_signatures
from htp_export.lineage.difference import PassDifference, Snapshot, owners_after
from htp_export.lineage.fates import FateEvidence, Outcome, find_fates
from htp_export.lineage.owner_rule import OwnerRule
from htp_export.lineage.records import changes_are_checked
from htp_export.model.boundaries import BOUNDARY
from htp_export.model.copies import Copied
from htp_export.model.regions import GraphIndex, all_nodes
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import names_now, separate_names
from htp_export.shapes.operator_kinds import without_copies


class SignatureEvidence(FateEvidence[ir.Value]):
    """The boundaries of modules in a changed graph, compared with their signatures.

    Args:
        index: The graph after the change.
        hierarchy: The modules with their fates before the change.
        signatures: Module path → signatures, with the present names of tensors.
        lost: Module path → the owners on the other side of the tensors that its signature lost.
        excused: Module path → boundary tensors that were unknown before the change already.
        unread: The modules whose outputs nothing read before the change.
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
        self._hierarchy, self._unread = hierarchy, unread
        self._lost, self._excused = lost or {}, excused or {}
        self._outputs: dict[str, set[str]] = {}
        self._known: dict[str, set[str | None]] = {}
        for path, calls in signatures.items():
            self._outputs[path] = set().union(*(call.given for call in calls))
            self._known[path] = set().union(*(call.taken | call.given for call in calls))
        graph = index.model.graph
        ends = self._known.setdefault("", set())
        ends.update(value.name for value in (*graph.inputs, *graph.outputs))
        self._add_sources_of_copies(graph)

    def _add_sources_of_copies(self, graph: ir.Graph) -> None:
        """Know the source of a copy that keeps the name of an output, wherever the copy is known."""
        for value in graph.outputs:
            source = without_copies(value)
            if source is value:
                continue
            for names in self._known.values():
                if value.name in names:
                    names.add(source.name)

    def strange(self, path: str) -> set[str]:
        """The tensors at a module's boundary that its signature does not name.

        None for a module without a signature.
        """
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
        """``dead`` if nothing read the outputs, ``identity`` if there are outputs, or ``constant``.

        None for a module that lost a tensor.
        """
        if self.partners(path) is not None:
            return None
        if path in self._unread:
            return Fate.DEAD
        return Fate.IDENTITY if self._outputs.get(path) else Fate.CONSTANT

    def partners(self, path: str) -> list[str] | None:
        """The modules beyond lost tensors, after the partners that a fused module had before."""
        info = self._hierarchy[path]
        is_open = info.fate.is_merged or path in self._lost
        if not is_open and not self.strange(path) - {*self._excused.get(path, ())}:
            return None
        beyond = (partner for partner in self._lost.get(path, ()) if partner in self._hierarchy)
        return [*info.fused_with, *beyond]

    def behind_unknown(self, group: Sequence[str]) -> Iterator[str]:
        """The owners behind unknown tensors; if the group lost tensors, the modules beyond these.

        A tensor is lost if one node does the work on both of its sides, so that the module beyond
        it is certainly a partner. The owner of an unknown tensor only may be one.
        """
        behind = list(super().behind_unknown(group))
        if not behind:
            return
        lost = (partner for path in group for partner in self._lost.get(path, ()))
        beyond = [one for one in lost if one in self._hierarchy and one not in group]
        yield from beyond or behind

    def around(self, group: Sequence[str]) -> Iterator[list[str]]:
        """The owners of the producers, or else the consumers, of modules' boundary tensors."""
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
        for place, node in enumerate(all_nodes(tagged.model)):
            for owner in tags.owners_of(node.metadata_props):
                order.setdefault(owner, place)
        self._rule = OwnerRule(tagged.calls, order)
        self._signatures = tagged.signatures if tagged.source == "htp" else {}
        self._taps = tagged.taps
        values = tagged.values
        # original name of a signature's tensor → the present value; None if it was removed
        self._present: dict[str, ir.Value | None] = {}
        # original names of initializers
        self._stored: set[str] = set()
        self._unread_modules: set[str] = set()
        for path, calls in self._signatures.items():
            if is_unread(calls):
                self._unread_modules.add(path)
            for call in calls:
                for name in call.taken | call.given:
                    value = self._present[name] = values.get(name)
                    if value is not None and value.is_initializer():
                        self._stored.add(name)
        # module → the owners on the other side of its removed tensors
        self._lost: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._unread = self._present.keys() - self._crossing()
        self._mark_boundary()
        self._snapshot, self._names = Snapshot(tagged.model), names_now(tagged.model)
        self.difference = PassDifference.between(self._snapshot, self._snapshot)
        self._excused: dict[str, set[str]] = {}
        if self._signatures:
            evidence = SignatureEvidence(tagged.index, self.hierarchy, self._signatures)
            self._excused = {path: evidence.strange(path) for path in self._signatures}

    def twin(self) -> Self:
        """Return the same for a copy of the model, which passes change independently."""
        twin = copy.copy(self)
        twin._move_to(Copied.of(TaggedModel(self.model, self.hierarchy, self._source)))
        return twin

    def _move_to(self, copied: Copied) -> None:
        """Follow a copy of the model from now on."""
        self.model = copied.tagged.model
        present = self._present
        self._present = {}
        for name, value in present.items():
            self._present[name] = None if value is None else copied.value_of(value)
        lost = {path: dict(others) for path, others in self._lost.items()}
        self._lost = defaultdict(dict, lost)
        self._mark_boundary()
        self._snapshot, self._names = Snapshot(self.model), names_now(self.model)

    def _crossing(self) -> set[str]:
        """Names of tensors that cross the boundary of a module: inputs, and outputs with consumers.

        Outputs without a consumer may be removed, and so may all tensors of modules with the fate
        ``identity``.
        """
        crossing: set[str] = set()
        for path, calls in self._signatures.items():
            if path in self.hierarchy and self.hierarchy[path].fate.passes_on:
                continue
            for call in calls:
                crossing.update(call.taken)
                for name in call.given:
                    value = self._present[name]
                    if value is None or self._leaves(value, path):
                        crossing.add(name)
        return crossing

    def _mark_boundary(self) -> None:
        """Mark the boundary tensors of modules, so that passes keep them."""
        for name, value in self._present.items():
            if value is not None and name not in self._unread:
                value.meta[BOUNDARY] = True

    def settle(self, part: Collection[ir.Node] | None = None) -> dict[str, tuple[str, ...]]:
        """Tag new nodes, follow tensors, and find fates after a pass.

        Args:
            part: The nodes that the pass was limited to, or None.

        Returns:
            Module that became fused → its partners.
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
            for node, owned in owners_after(difference, self._rule, part).items():
                owned.write(node.metadata_props, self._rule.calls.called)
            untagged = [node for node in after.nodes if tags.MODULE not in node.metadata_props]
            if untagged:
                listed = ", ".join(f"{node.op_type} {node.name!r}" for node in untagged[:3])
                raise HtpExportError(f"{len(untagged)} nodes have no owner: {listed}")
            self._follow(difference)
            fused = self._find_fates()
        return fused

    def check_unchanged(self) -> None:
        """Compare the model with its state after the last pass that reported a change.

        Only with `checked_changes`: it takes as long as a change.

        Raises:
            HtpExportError: If it is another one: a pass has changed it, and reported no change.
        """
        if not changes_are_checked():
            return
        difference = PassDifference.between(self._snapshot, Snapshot(self.model))
        changed = [
            f"{node.op_type} {node.name!r}" for node in (*difference.removed, *difference.added)
        ]
        for value, equal in difference.equal.items():
            if not equal.is_initializer():  # libraries exchange equal constants
                changed.append(repr(value.name))
        if changed:
            listed = ", ".join(changed[:3])
            raise HtpExportError(f"no change was reported, and there is one: {listed}")

    def tensor(self, name: str) -> ir.Value | None:
        """The present tensor of an original name in a signature; None if it was removed."""
        return self._present.get(name)

    def worked_across(self, paths: Iterable[str]) -> set[str]:
        """Original names of boundary tensors that remain although a node computes across them.

        They are of modules that became fused without a lost tensor: inputs that are computed inside
        the module, and outputs that are computed outside; all boundary tensors of a module without
        such inputs and outputs.
        """
        tensors: set[str] = set()
        for path in paths:
            if path in self._lost:
                continue
            inputs, outputs = set[str](), set[str]()
            for call in self._signatures[path]:
                inputs |= call.taken
                outputs |= call.given
            present, inside = set[str](), set[str]()
            for name in inputs | outputs:
                value = self._present.get(name)
                if value is not None:
                    present.add(name)
                    if self._is_inside(value, path):
                        inside.add(name)
            computed_inside = (inputs - outputs) & inside
            computed_outside = (outputs - inputs - inside) & present
            tensors |= (computed_inside | computed_outside) or present
        return tensors

    def _is_inside(self, value: ir.Value, path: str) -> bool:
        """Whether the producer of a tensor is in the region of a module."""
        maker = value.producer()
        return maker is not None and path in self._work(maker).modules

    def _leaves(self, value: ir.Value, path: str) -> bool:
        """Whether a tensor is an output of its graph, or a consumer works outside a module."""
        if value.is_graph_output():
            return True
        for use in value.uses():
            parts = self._work(use.node).parts
            is_inside = bool(parts) and all(path in part.modules for part in parts)
            if not is_inside:
                return True
        return False

    def _work(self, node: ir.Node) -> NodeCalls:
        metadata = node.metadata_props
        return self._rule.calls.work(tags.owners_of(metadata), tags.encoded_calls(metadata))

    def _follow(self, difference: PassDifference) -> None:
        """Find the tensors of signatures in the changed graph, and record lost ones."""
        if not self._present:
            return
        values = ir.convenience.create_value_mapping(self.model.graph, include_subgraphs=False)
        here = set(values.values())
        lost: dict[str, ir.Value] = {}
        for name, value in self._present.items():
            if value is None:
                continue
            before = difference.before.names.get(value, value.name)
            if value in here and (value.name == before or before not in values):
                continue
            # If the value remains under another name, the value that has its name replaces it.
            equal = None if value in here else difference.counterpart(value, here)
            counterpart = equal or (values.get(before) if before else None)
            # constants may come and go
            is_needed = name not in self._unread and value in difference.before.live
            if counterpart is None and is_needed:
                lost[name] = value
            self._present[name] = counterpart
        self._mark_boundary()
        if lost:
            self._record_lost(difference, lost)

    def _record_lost(self, difference: PassDifference, lost: Mapping[str, ir.Value]) -> None:
        """Record the owners around lost tensors for the modules that have these in their signatures."""
        around = self._owners_around(difference, lost.values())
        for path, calls in self._signatures.items():
            for call in calls:
                for original in (*call.inputs.values(), *call.outputs):
                    value = lost.get(original) if original is not None else None
                    if value is None:
                        continue
                    for owner in around[value]:
                        if not tags.is_under(owner, path):
                            self._lost[path][owner] = None

    def _owners_around(
        self, difference: PassDifference, values: Iterable[ir.Value]
    ) -> dict[ir.Value | None, dict[str, None]]:
        """The owners of the former producers and consumers of values, in order."""
        before = difference.before
        around: dict[ir.Value | None, dict[str, None]] = {}
        for value in values:
            maker = before.makers.get(value)
            metadata = {} if maker is None else before.nodes[maker].metadata
            around[value] = dict.fromkeys(tags.owners_of(metadata))
        for entry in before.nodes.values():
            for read in entry.inputs:
                if read in around:
                    around[read].update(dict.fromkeys(tags.owners_of(entry.metadata)))
        return around

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
        return renamed_signatures(self._signatures, self._now)

    def _now(self, name: str) -> str | None:
        value = self._present.get(name)
        if value is None or (value.is_initializer() and name not in self._stored):
            return None
        return value.name

    def finish(self) -> TaggedModel:
        """Write modules, fates and signatures into the model's metadata, and return the model."""
        if self._source == "htp" and tags.MODULES in self.model.metadata_props:
            write_model_metadata(
                self.model.metadata_props, self.hierarchy, signatures=self.signatures
            )
        return TaggedModel(self.model, self.hierarchy, self._source)
