"""Which modules take LoRA adapters: ``htp.lora`` of the model's metadata; see ``docs/format.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping

from htp_export.format import tags

FACTORS = ("A", "B")


def factor_module(path: str, factor: str) -> str:
    """The path of the module that computes the product with a factor.

    Examples:
        >>> factor_module("encoder.fc", "A"), factor_module("", "B")
        ('encoder.fc.lora_A', 'lora_B')
    """
    return tags.below(path, f"lora_{factor}")


def read_lora(metadata: Mapping[str, str]) -> dict[str, float]:
    """Module path → the factor by which its low-rank product is multiplied; empty if there are no such modules.

    Examples:
        >>> read_lora({"htp.lora": '{"fc":{"scaling":2.0}}'})
        {'fc': 2.0}
    """
    try:
        listed = json.loads(metadata.get(tags.LORA, "{}"))
        return {str(path): float(entry["scaling"]) for path, entry in listed.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{tags.LORA} is not a JSON object of modules and their scaling: {error}") from error


def write_lora(metadata: MutableMapping[str, str], layers: Mapping[str, float]) -> None:
    """Write what `read_lora` reads; no entry if there are no such modules."""
    metadata.pop(tags.LORA, None)
    if layers:
        entries = {path: {"scaling": scaling} for path, scaling in layers.items()}
        metadata[tags.LORA] = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)


def lora_modules(metadata: Mapping[str, str]) -> set[str]:
    """The paths of the modules that were inserted for adapters; empty if the metadata cannot be read."""
    try:
        return {factor_module(path, factor) for path in read_lora(metadata) for factor in FACTORS}
    except ValueError:
        return set()
