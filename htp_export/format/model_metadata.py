"""What the model's metadata says of its modules, taps, adapters and steps, in one place; see ``docs/format.md``."""

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
from htp_export.format.parameters import ModuleParameters, parameters_to_json
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
        metadata[tags.CONTAMINATION] = tags.json_text(contamination)
    if parameters is not None:
        metadata[tags.PARAMETERS] = parameters_to_json(parameters)


def _parsed(key: str, text: str | None, of: str, parse: Callable[[Any], _T]) -> _T:
    """What is written under a key, an empty object where nothing is; a ValueError if it is not as described."""
    try:
        return parse(parse_json(text or "{}"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{key} is not a JSON object of {of}: {error}") from error


def _write(metadata: MutableMapping[str, str], key: str, entries: Mapping[str, Any]) -> None:
    metadata.pop(key, None)
    if entries:
        metadata[key] = tags.json_text(entries)


def read_contamination(metadata: Mapping[str, str]) -> set[tuple[str, str, bool]]:
    """``(module, tensor, leaves)`` for boundary tensors that PyTorch does not know; empty where that cannot be read.

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
        places: The sides of modules that it gives: ``encoder.layer.0:out``.
        made: Names of the tensors that only it needs, its own among them.
    """

    places: tuple[str, ...]
    made: tuple[str, ...]


def taps_from_json(text: str) -> dict[str, Tap]:
    """Parse the value of ``htp.taps``: output → what it is; a ValueError if it is not as described.

    Examples:
        >>> taps_from_json('{"h":{"places":["fc:out"],"made":["h"]}}')
        {'h': Tap(places=('fc:out',), made=('h',))}
    """

    def tap(entry: Any) -> Tap:
        return Tap(tuple(map(str, entry["places"])), tuple(map(str, entry["made"])))

    return _parsed(
        tags.TAPS,
        text,
        "outputs with places",
        lambda listed: {name: tap(entry) for name, entry in listed.items()},
    )


def write_taps(metadata: MutableMapping[str, str], taps: Mapping[str, Tap]) -> None:
    """Write which outputs are taps; no entry if there are none."""
    _write(metadata, tags.TAPS, {name: asdict(tap) for name, tap in taps.items()})


FACTORS = ("A", "B")


def factor_module(path: str, factor: str) -> str:
    """The path of the module that computes the product with a factor.

    Examples:
        >>> factor_module("encoder.fc", "A"), factor_module("", "B")
        ('encoder.fc.lora_A', 'lora_B')
    """
    return tags.below(path, f"lora_{factor}")


def factor_name(path: str, factor: str) -> str:
    """The name of a factor of a module, as in a PEFT checkpoint: the input of the model for it.

    Examples:
        >>> factor_name("encoder.fc", "A")
        'encoder.fc.lora_A.weight'
    """
    return f"{factor_module(path, factor)}.weight"


def read_lora(metadata: Mapping[str, str]) -> dict[str, float]:
    """Module path → the factor by which its low-rank product is multiplied; empty if there are no such modules.

    Examples:
        >>> read_lora({"htp.lora": '{"fc":{"scaling":2.0}}'})
        {'fc': 2.0}
    """

    def factors(listed: Any) -> dict[str, float]:
        scalings = {str(path): float(entry["scaling"]) for path, entry in listed.items()}
        if not all(map(math.isfinite, scalings.values())):
            raise ValueError("a scaling is not finite")
        return scalings

    return _parsed(tags.LORA, metadata.get(tags.LORA), "modules and their scaling", factors)


def write_lora(metadata: MutableMapping[str, str], layers: Mapping[str, float]) -> None:
    """Write what `read_lora` reads; no entry if there are no such modules."""
    _write(metadata, tags.LORA, {path: {"scaling": scaling} for path, scaling in layers.items()})


def lora_modules(metadata: Mapping[str, str]) -> set[str]:
    """The paths of the modules that were inserted for adapters; empty if the metadata cannot be read."""
    try:
        return {factor_module(path, factor) for path in read_lora(metadata) for factor in FACTORS}
    except ValueError:
        return set()


def lora_of_inputs(metadata: Mapping[str, str], inputs: Container[str]) -> dict[str, float]:
    """The part of what `read_lora` reads whose factors are among the inputs of a model.

    Empty if the metadata cannot be read.
    """
    try:
        layers = read_lora(metadata)
    except ValueError:
        return {}
    return {
        path: scaling
        for path, scaling in layers.items()
        if all(factor_name(path, factor) in inputs for factor in FACTORS)
    }


def read_placement(metadata: Mapping[str, str]) -> dict[str, str]:
    """Name of a session configuration entry → its value; empty if the model says none.

    Examples:
        >>> metadata: dict[str, str] = {}
        >>> write_placement(metadata, {"session.layer_assignment_settings": "gpu(=gpu)"})
        >>> read_placement(metadata)
        {'session.layer_assignment_settings': 'gpu(=gpu)'}
    """

    def entries(listed: Any) -> dict[str, str]:
        return {str(name): str(value) for name, value in listed.items()}

    return _parsed(
        tags.PLACEMENT, metadata.get(tags.PLACEMENT), "session configuration entries", entries
    )


def write_placement(metadata: MutableMapping[str, str], entries: Mapping[str, str]) -> None:
    """Write the entries, in place of those that were there."""
    _write(metadata, tags.PLACEMENT, entries)


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
        listed = parse_json(metadata[tags.PROVENANCE], finite=False)  # an option may be infinite
        notes = tuple(ProvenanceNote(**entry) for entry in listed)
        if not all(map(_is_note, notes)):
            raise ValueError("a step has a name, options, two hashes, files and versions")
    except (ValueError, TypeError) as error:
        raise InputError(f"its metadata {tags.PROVENANCE!r} cannot be read: {error}") from error
    return notes


def _is_note(note: ProvenanceNote) -> bool:
    texts = all(isinstance(text, str) for text in (note.step, note.input, note.output))
    return texts and all(
        isinstance(each, dict) for each in (note.options, note.files, note.versions)
    )


def write_provenance(metadata: MutableMapping[str, str], notes: Sequence[ProvenanceNote]) -> None:
    """Write the steps that made a model, in place of those that it had."""
    metadata[tags.PROVENANCE] = tags.json_text([note.to_dict() for note in notes])
