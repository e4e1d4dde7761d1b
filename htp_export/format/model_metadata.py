"""Read and write the metadata of a model: modules, taps, adapters and processing steps; see ``docs/format.md``."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.json_text import parse_json
from htp_export.format.parameters import ModuleParameters, frozen_to_json, parameters_to_json
from htp_export.format.signatures import Signature, signatures_to_json

_T = TypeVar("_T")


def write_model_metadata(
    metadata: MutableMapping[str, str],
    hierarchy: Hierarchy,
    *,
    calls: CallTree | None = None,
    signatures: Mapping[str, Sequence[Signature]] | None = None,
    parameters: Mapping[str, ModuleParameters] | None = None,
    contamination: Iterable[tuple[str, str, bool]] = (),
) -> None:
    """Write the metadata of a model's modules; entries for arguments that are None are unchanged.

    The map of `htp_export.embed_map` is removed, because it describes an earlier state of the
    graph. ``contamination`` is ``(module, tensor, leaves)`` for boundary tensors that PyTorch does
    not have.

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
        metadata[tags.CONTAMINATION] = tags.json_text(contamination)
    if parameters is not None:
        metadata[tags.PARAMETERS] = parameters_to_json(parameters)
        metadata.pop(tags.FROZEN, None)
        frozen = frozen_to_json(parameters)
        if frozen is not None:
            metadata[tags.FROZEN] = frozen


def _parsed(key: str, text: str | None, of: str, parse: Callable[[Any], _T]) -> _T:
    """Parse the value of a key with ``parse``, an empty object if it is missing; a ValueError if it is invalid."""
    try:
        return parse(parse_json(text or "{}"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{key} is not a JSON object of {of}: {error}") from error


def _write(metadata: MutableMapping[str, str], key: str, entries: Mapping[str, Any]) -> None:
    """Write entries under a key; without entries, remove the key."""
    metadata.pop(key, None)
    if entries:
        metadata[key] = tags.json_text(entries)


def write_assumed(metadata: MutableMapping[str, str], assumed: Mapping[str, float | str]) -> None:
    """Write entry → the number that all of its elements have to be, or their hash."""
    _write(metadata, tags.ASSUMED, assumed)


def assumed_from_json(text: str) -> dict[str, float | str]:
    """Return entry → the number that all of its elements have to be, or their hash; a ValueError if invalid.

    Examples:
        >>> assumed_from_json('{"fc.bias":0}')
        {'fc.bias': 0.0}
    """
    found = tags.json_object(tags.ASSUMED, text, "numbers and hashes", (int, float, str))
    assumed: dict[str, float | str] = {}
    for name, wanted in found.items():
        assumed[name] = wanted if isinstance(wanted, str) else float(wanted)
    return assumed


def read_contamination(metadata: Mapping[str, str]) -> set[tuple[str, str, bool]]:
    """Return ``(module, tensor, leaves)`` for boundary tensors that PyTorch does not have; empty if invalid.

    Examples:
        >>> read_contamination({"htp.contamination": '[["fc","x",false]]'}), read_contamination({})
        ({('fc', 'x', False)}, set())
    """
    try:
        listed = parse_json(metadata.get(tags.CONTAMINATION, "[]"))
        return {(str(path), str(name), bool(leaves)) for path, name, leaves in listed}
    except (ValueError, TypeError):
        return set()


@dataclass(frozen=True)
class Tap:
    """One output that was added to a file.

    Attributes:
        places: The sides of modules whose tensor it returns: ``encoder.layer.0:out``.
        made: Names of the tensors that only this output needs, including its own.
    """

    places: tuple[str, ...]
    made: tuple[str, ...]


def taps_from_json(text: str) -> dict[str, Tap]:
    """Parse the value of ``htp.taps``: name of an output → its tap; a ValueError if it is invalid.

    Examples:
        >>> taps_from_json('{"h":{"places":["fc:out"],"made":["h"]}}')
        {'h': Tap(places=('fc:out',), made=('h',))}
    """

    def parse(entries: Any) -> dict[str, Tap]:
        return {name: _tap_from_json(entry) for name, entry in entries.items()}

    return _parsed(tags.TAPS, text, "outputs with places", parse)


def _tap_from_json(entry: Any) -> Tap:
    places = tuple(map(str, entry["places"]))
    made = tuple(map(str, entry["made"]))
    return Tap(places, made)


def write_taps(metadata: MutableMapping[str, str], taps: Mapping[str, Tap]) -> None:
    """Write the taps of a model; no entry if there are none."""
    _write(metadata, tags.TAPS, {name: asdict(tap) for name, tap in taps.items()})


FACTORS = ("A", "B")


def factor_module(path: str, factor: str) -> str:
    """Return the path of the module that multiplies by a factor of a low-rank adapter.

    Examples:
        >>> factor_module("encoder.fc", "A"), factor_module("", "B")
        ('encoder.fc.lora_A', 'lora_B')
    """
    return tags.below(path, f"lora_{factor}")


def factor_name(path: str, factor: str) -> str:
    """Return the name of a factor of a module, as in a PEFT checkpoint: also the name of its model input.

    Examples:
        >>> factor_name("encoder.fc", "A")
        'encoder.fc.lora_A.weight'
    """
    return f"{factor_module(path, factor)}.weight"


def read_lora(metadata: Mapping[str, str]) -> dict[str, float]:
    """Return module path → scaling of its low-rank adapter; empty if the model has no adapter inputs.

    Examples:
        >>> read_lora({"htp.lora": '{"fc":{"scaling":2.0}}'})
        {'fc': 2.0}
    """

    def parse(entries: Any) -> dict[str, float]:
        scalings = {str(path): float(entry["scaling"]) for path, entry in entries.items()}
        if not all(map(math.isfinite, scalings.values())):
            raise ValueError("a scaling is not finite")
        return scalings

    return _parsed(tags.LORA, metadata.get(tags.LORA), "modules and their scaling", parse)


def write_lora(metadata: MutableMapping[str, str], layers: Mapping[str, float]) -> None:
    """Write the scalings that `read_lora` returns; no entry if there are none."""
    _write(metadata, tags.LORA, {path: {"scaling": scaling} for path, scaling in layers.items()})


def lora_modules(metadata: Mapping[str, str]) -> set[str]:
    """Return the paths of the modules that were inserted for adapters; empty if the metadata is invalid."""
    try:
        layers = read_lora(metadata)
    except ValueError:
        return set()
    return {factor_module(path, factor) for path in layers for factor in FACTORS}


def lora_of_inputs(metadata: Mapping[str, str], inputs: Container[str]) -> dict[str, float]:
    """Return the scalings of `read_lora` for modules both of whose factors are inputs of the model.

    Empty if the metadata is invalid.
    """
    try:
        layers = read_lora(metadata)
    except ValueError:
        return {}

    def is_adapted(path: str) -> bool:
        return all(factor_name(path, factor) in inputs for factor in FACTORS)

    return {path: scaling for path, scaling in layers.items() if is_adapted(path)}


def read_placement(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the session configuration entries of a model, name → value; empty without them.

    Examples:
        >>> metadata: dict[str, str] = {}
        >>> write_placement(metadata, {"session.layer_assignment_settings": "gpu(=gpu)"})
        >>> read_placement(metadata)
        {'session.layer_assignment_settings': 'gpu(=gpu)'}
    """

    def parse(entries: Any) -> dict[str, str]:
        return {str(name): str(value) for name, value in entries.items()}

    text = metadata.get(tags.PLACEMENT)
    return _parsed(tags.PLACEMENT, text, "session configuration entries", parse)


def write_placement(metadata: MutableMapping[str, str], entries: Mapping[str, str]) -> None:
    """Replace the session configuration entries of a model."""
    _write(metadata, tags.PLACEMENT, entries)


@dataclass(frozen=True)
class ProvenanceNote:
    """One processing step that ran.

    Attributes:
        step: Its name.
        options: Its options, as far as JSON can represent them; see `described_options`.
        input: The hash of its input model; see `content_hash`.
        output: The hash of its result; for a check, which changes nothing, that of its input.
        files: Each option that names a file → the SHA-256 of the file.
        versions: The packages that the step used → their versions.
    """

    step: str
    options: Mapping[str, Any]
    input: str
    output: str
    files: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the note as a dictionary for JSON."""
        return asdict(self)


def read_provenance(metadata: Mapping[str, str]) -> tuple[ProvenanceNote, ...]:
    """Return the steps in a model's metadata, in order; empty without them; an InputError if they are invalid.

    Examples:
        >>> metadata: dict[str, str] = {}
        >>> write_provenance(metadata, [ProvenanceNote("optimize", {"level": "exact"}, "sha256:0", "sha256:1")])
        >>> read_provenance(metadata)[0].options
        {'level': 'exact'}
    """
    if tags.PROVENANCE not in metadata:
        return ()
    try:
        entries = parse_json(metadata[tags.PROVENANCE], finite=False)  # an option may be infinite
        notes = tuple(ProvenanceNote(**entry) for entry in entries)
        if not all(map(_is_note, notes)):
            raise ValueError("a step has a name, options, two hashes, files and versions")
    except (ValueError, TypeError) as error:
        raise InputError(f"its metadata {tags.PROVENANCE!r} cannot be read: {error}") from error
    return notes


def _is_note(note: ProvenanceNote) -> bool:
    """Return whether the fields of a note, which come from a file, have valid types."""
    texts = (note.step, note.input, note.output)
    mappings = (note.options, note.files, note.versions)
    if not all(isinstance(text, str) for text in texts):
        return False
    return all(isinstance(mapping, dict) for mapping in mappings)


def write_provenance(metadata: MutableMapping[str, str], notes: Sequence[ProvenanceNote]) -> None:
    """Replace the recorded processing steps of a model."""
    metadata[tags.PROVENANCE] = tags.json_text([note.to_dict() for note in notes])
