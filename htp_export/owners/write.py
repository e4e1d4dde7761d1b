"""Owners and fates into the model: node metadata, and the module tree in the model's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from htp_export import tags
from htp_export.capture.record import Key, Record
from htp_export.hierarchy import Hierarchy, ModuleInfo
from htp_export.owners.assign import Ownership, assign
from htp_export.owners.fates import Fates
from htp_export.owners.flow import Flow
from htp_export.parameters import Held, parameters_to_json
from htp_export.signatures import Signature, signatures_to_json


def node_metadata(record: Record, owners: Sequence[Ownership], hierarchy: Hierarchy) -> list[dict[str, str]]:
    """The metadata of each node, in the order of ``record.nodes``."""
    called = hierarchy.called

    @cache
    def fixed(paths: tuple[str, ...], reason: str) -> dict[str, str]:
        return tags.node_tags(paths, reason, called)

    result = []
    for owner in owners:
        entry = fixed(owner.paths, owner.reason)
        calls = [record.log.calls[index] for index in owner.calls]
        if len({call.path for call in calls}) == 1 and record.log.count(calls[0].path) > 1:
            entry = {**entry, tags.CALL: str(calls[0].nth)}
        result.append(entry)
    return result


def model_metadata(record: Record, fates: Fates, hierarchy: Hierarchy) -> tuple[Hierarchy, dict[str, str]]:
    """The module tree with calls and fates, and the model's metadata that holds it.

    Args:
        record: What the export told.
        fates: What became of the modules.
        hierarchy: The module tree without calls and fates; modules that ran and are not in it are added.
    """
    infos = []
    for path in dict.fromkeys((*hierarchy, *(call.path for call in record.log.calls))):
        fate = fates.of(path)
        class_name = hierarchy[path].class_name if path in hierarchy else ""
        infos.append(ModuleInfo(path, class_name, record.log.count(path), fate.name, fate.fused_with))
    tree = Hierarchy(infos)
    metadata = {tags.FORMAT: tags.VERSION, tags.MODULES: tree.to_json()}
    signatures = _signatures(record)
    if signatures:
        metadata[tags.SIGNATURES] = signatures_to_json(signatures)
    if fates.contamination:
        listed = [[path, str(getattr(key, "name", key)), leaves] for path, key, leaves in fates.contamination]
        metadata[tags.CONTAMINATION] = json.dumps(listed, separators=(",", ":"))
    return tree, metadata


def _signatures(record: Record) -> dict[str, list[Signature]]:
    """Module path → its calls; only modules all of whose calls were seen from inside."""
    found: dict[str, list[Signature]] = {}
    for index, call in enumerate(record.log.calls):
        passing = record.passed.get(index)
        if passing is not None:
            inputs = {name: _name(record, key) for name, key in passing.given}
            found.setdefault(call.path, []).append(Signature(inputs, tuple(_name(record, k) for k in passing.returned)))
    return {path: calls for path, calls in found.items() if len(calls) == record.log.count(path)}


def _name(record: Record, key: Key | None) -> str | None:
    """The name that a captured tensor has in the file."""
    final = record.final.get(key)
    return None if final is None else str(getattr(final, "name", final))


@dataclass(frozen=True)
class Tags:
    """Everything that is written into one exported model.

    Attributes:
        nodes: Metadata of each node, in the order of the record's nodes.
        model: Metadata of the model.
        graph_name: The main graph's name: the root's class.
    """

    nodes: list[dict[str, str]]
    model: dict[str, str]
    graph_name: str


def make_tags(record: Record, hierarchy: Hierarchy, parameters: Mapping[str, Held] | None = None) -> Tags:
    """Find owners and fates, and say them in the file format's words.

    Args:
        record: What the export told.
        hierarchy: The module tree without calls and fates.
        parameters: Module path → the parameters it holds, where they are known.
    """
    flow = Flow.of(record)
    owners = assign(record, flow)
    tree, metadata = model_metadata(record, Fates(record, owners, flow), hierarchy)
    if parameters is not None:
        metadata[tags.PARAMETERS] = parameters_to_json(parameters)
    return Tags(node_metadata(record, owners, tree), metadata, tree.root.simple_class)
