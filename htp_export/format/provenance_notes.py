"""How a file was made: the steps of `pipeline` with their options, versions and hashes, in the model's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from htp_export.errors import InputError
from htp_export.format import tags


@dataclass(frozen=True)
class ProvenanceNote:
    """One step that ran.

    Attributes:
        step: Its name.
        options: Its options, as far as JSON can hold them; see `described_options`.
        input: The hash of the model that it was given, see `content_hash`.
        output: The hash of the model that it made; of a check, that of the model that it was given.
        files: Each option that names a file → the SHA-256 of the file.
        versions: The packages that took part → their versions.
    """

    step: str
    options: Mapping[str, Any]
    input: str
    output: str
    files: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The note as plain data, for JSON."""
        return asdict(self)


def read_provenance(metadata: Mapping[str, str]) -> tuple[ProvenanceNote, ...]:
    """The steps that a model's metadata names, in order; empty if it names none.

    Examples:
        >>> metadata: dict[str, str] = {}
        >>> write_provenance(metadata, [ProvenanceNote("optimize", {"level": "exact"}, "sha256:0", "sha256:1")])
        >>> read_provenance(metadata)[0].options
        {'level': 'exact'}
    """
    if tags.PROVENANCE not in metadata:
        return ()
    try:
        listed = json.loads(metadata[tags.PROVENANCE])
        notes = tuple(ProvenanceNote(**entry) for entry in listed)
        if not all(isinstance(note.step, str) and isinstance(note.options, dict) for note in notes):
            raise ValueError("a step has a name and options")
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"its metadata {tags.PROVENANCE!r} cannot be read: {error}") from error
    return notes


def write_provenance(metadata: MutableMapping[str, str], notes: Sequence[ProvenanceNote]) -> None:
    """Write the steps that made a model, in place of those that it had."""
    listed = [note.to_dict() for note in notes]
    metadata[tags.PROVENANCE] = json.dumps(listed, separators=(",", ":"), ensure_ascii=False)
