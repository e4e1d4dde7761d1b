"""The session options with which ONNX Runtime uses the devices of nodes: ``htp.placement``; see ``docs/format.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping

from htp_export.format import tags


def read_placement(metadata: Mapping[str, str]) -> dict[str, str]:
    """Name of a session configuration entry → its value; empty if the model says none.

    Examples:
        >>> metadata: dict[str, str] = {}
        >>> write_placement(metadata, {"session.layer_assignment_settings": "gpu(=gpu)"})
        >>> read_placement(metadata)
        {'session.layer_assignment_settings': 'gpu(=gpu)'}
    """
    try:
        listed = json.loads(metadata.get(tags.PLACEMENT, "{}"))
        return {str(name): str(value) for name, value in listed.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{tags.PLACEMENT} is not a JSON object of session configuration entries: {error}") from error


def write_placement(metadata: MutableMapping[str, str], entries: Mapping[str, str]) -> None:
    """Write the entries, in place of those that were there."""
    metadata[tags.PLACEMENT] = json.dumps(dict(entries))
