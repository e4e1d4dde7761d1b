"""What the model's metadata says of its modules, written and read in one place; see ``docs/format.md``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.parameters import ModuleParameters, parameters_to_json
from htp_export.format.signatures import Signature, signatures_to_json


def write_model_metadata(
    metadata: MutableMapping[str, str],
    hierarchy: Hierarchy,
    *,
    calls: CallTree | None = None,
    signatures: Mapping[str, Sequence[Signature]] | None = None,
    parameters: Mapping[str, ModuleParameters] | None = None,
    contamination: Iterable[tuple[str, str, bool]] = (),
) -> None:
    """Write what is known of a model's modules; what is not given stays as it was.

    The map of `htp_export.embed_map` goes: it tells of the graph as it was. ``contamination`` is
    ``(module, tensor, leaves)`` for boundary tensors that PyTorch does not know.

    Examples:
        >>> from htp_export.format.hierarchy import ModuleInfo
        >>> metadata: dict[str, str] = {}
        >>> write_model_metadata(metadata, Hierarchy([ModuleInfo("", "Net", 1)]))
        >>> metadata
        {'htp.version': '1', 'htp.modules': '{"":{"class":"Net","calls":1,"fate":"computed"}}'}
    """
    metadata.pop(tags.MAP, None)
    metadata.setdefault(tags.FORMAT, tags.VERSION)
    metadata[tags.MODULES] = hierarchy.to_json()
    if calls is not None:
        metadata[tags.CALLERS] = calls.to_json()
    if signatures:
        metadata[tags.SIGNATURES] = signatures_to_json(signatures)
    if contamination := list(contamination):
        metadata[tags.CONTAMINATION] = json.dumps(contamination, separators=(",", ":"))
    if parameters is not None:
        metadata[tags.PARAMETERS] = parameters_to_json(parameters)


def read_contamination(metadata: Mapping[str, str]) -> set[tuple[str, str, bool]]:
    """``(module, tensor, leaves)`` for boundary tensors that PyTorch does not know; empty where that cannot be read.

    Examples:
        >>> read_contamination({"htp.contamination": '[["fc","x",false]]'}), read_contamination({})
        ({('fc', 'x', False)}, set())
    """
    try:
        listed = json.loads(metadata.get(tags.CONTAMINATION, "[]"))
        return {(str(path), str(name), bool(leaves)) for path, name, leaves in listed}
    except (ValueError, TypeError, RecursionError):
        return set()
