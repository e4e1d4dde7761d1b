"""Owners and fates into the model: node metadata, and the module tree in the model's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from htp_export.exporter.capture.calls import NO_CALL, CallLog, Key, Record
from htp_export.exporter.owners.assign import Ownership, assign
from htp_export.exporter.owners.fates import ExportEvidence
from htp_export.exporter.owners.flow import Flow
from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance, NodeCalls
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.parameters import ModuleParameters
from htp_export.format.signatures import Signature
from htp_export.model.fates import find_fates


@dataclass(frozen=True)
class Tags:
    """Everything that is written into one exported model."""

    nodes: list[dict[str, str]]  # metadata of each node, in the order of the record's nodes
    model: dict[str, str]  # metadata of the model
    graph_name: str  # the main graph's name: the root's class


def make_tags(record: Record, hierarchy: Hierarchy, parameters: Mapping[str, ModuleParameters] | None = None) -> Tags:
    """Find owners and fates of a record, and say them in the file format's words.

    ``hierarchy`` has no calls and fates yet; ``parameters``: module path → those it holds, where they are known.
    """
    flow = Flow.of(record)
    owners = assign(record, flow)
    hierarchy = _with_calls(hierarchy, record.log)
    calls, works = _works_of(record.log, owners, hierarchy)
    evidence = ExportEvidence(record, works, flow)
    tree, unknown = find_fates(hierarchy, evidence)
    metadata: dict[str, str] = {}
    write_model_metadata(
        metadata,
        tree,
        calls=calls,
        signatures=_signatures(record, evidence),
        parameters=parameters,
        contamination=[(path, _name_of(key), leaves) for path, key, leaves in unknown],
    )
    return Tags(_node_metadata(owners, works, calls, tree), metadata, tree.root.simple_class)


def _with_calls(hierarchy: Hierarchy, log: CallLog) -> Hierarchy:
    """The module tree with how often each module ran; modules that ran and are not in it are added."""
    paths = dict.fromkeys((*hierarchy, *(call.path for call in log.calls)))
    known = (hierarchy.get(path) or ModuleInfo(path, "") for path in paths)
    return Hierarchy([replace(module, calls=log.count(module.path)) for module in known])


def _works_of(log: CallLog, owners: Sequence[Ownership], hierarchy: Hierarchy) -> tuple[CallTree, list[NodeCalls]]:
    """The calls of a model's modules as they ran, and whose work each node does."""
    instances = [Instance(call.path, call.nth) for call in log.calls]
    callers: dict[str, list[Instance | None]] = {}
    for call in log.calls:
        callers.setdefault(call.path, []).append(None if call.parent == NO_CALL else instances[call.parent])
    tree = CallTree(hierarchy, callers)

    @cache
    def work(paths: tuple[str, ...], calls: tuple[int, ...]) -> NodeCalls:
        return tree.of_calls(paths, [instances[index] for index in calls] or [Instance("")])

    return tree, [work(owner.paths, owner.calls) for owner in owners]


def _node_metadata(
    owners: Sequence[Ownership], works: Sequence[NodeCalls], calls: CallTree, hierarchy: Hierarchy
) -> list[dict[str, str]]:
    """The metadata of each node, in order."""
    called = hierarchy.called

    @cache
    def fixed(paths: tuple[str, ...], reason: str, encoded: str) -> dict[str, str]:
        return tags.node_tags(paths, reason, called, encoded)

    @cache
    def encoded_calls(work: NodeCalls) -> str:
        return calls.encode_calls(work.owners, work.calls)

    owned = zip(owners, works, strict=True)
    return [fixed(owner.paths, owner.reason, encoded_calls(work)).copy() for owner, work in owned]


def _signatures(record: Record, evidence: ExportEvidence) -> dict[str, list[Signature]]:
    """Module path → its calls; only modules all of whose calls were seen from inside.

    Every layer is given the whole cache; its signature has the parts that it reads or gives back.
    """
    signatures: dict[str, list[Signature]] = {}
    for index, call in enumerate(record.log.calls):
        tensors = record.call_tensors.get(index)
        if tensors is not None:
            used = {*evidence.read_by(call.path), *tensors.outputs}
            inputs = {
                name: _name(record, key)
                for name, key in tensors.inputs
                if not call.path or key in used or not tensors.is_part(name)
            }
            outputs = tuple(_name(record, key) for key in tensors.outputs)
            signatures.setdefault(call.path, []).append(Signature(inputs, outputs))
    return {path: calls for path, calls in signatures.items() if len(calls) == record.log.count(path)}


def _name(record: Record, key: Key | None) -> str | None:
    """The name that a captured tensor has in the file."""
    final = record.final.get(key)
    return None if final is None else _name_of(final)


def _name_of(key: Key) -> str:
    """The name of a tensor of the exported graph; its key is its value under dynamo, and its name under TorchScript."""
    return str(getattr(key, "name", key))
