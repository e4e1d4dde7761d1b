"""Which outputs of a file are taps, not what the model returns: ``htp.taps`` of its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass

from htp_export.format import tags


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
    listed = tags.json_object(tags.TAPS, text, "outputs with places")
    try:
        return {
            name: Tap(tuple(map(str, entry["places"])), tuple(map(str, entry["made"])))
            for name, entry in listed.items()
        }
    except (TypeError, KeyError) as error:
        raise ValueError(f"{tags.TAPS} is not a JSON object of outputs with places: {error}") from error


def write_taps(metadata: MutableMapping[str, str], taps: Mapping[str, Tap]) -> None:
    """Write which outputs are taps; no entry if there are none."""
    metadata.pop(tags.TAPS, None)
    if taps:
        entries = {name: asdict(tap) for name, tap in taps.items()}
        metadata[tags.TAPS] = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)
