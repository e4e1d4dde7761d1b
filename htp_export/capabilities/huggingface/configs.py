"""Changes to transformers configs: overrides by dotted key, and the key-value cache on or off."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from htp_export.errors import ModelSourceError, in_one_line


def _sub_configs(config: Any) -> Iterator[Any]:
    """The configs inside a config, such as those of its text tower or its backbone."""
    inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {})
    return (level for level in inner if hasattr(level, "to_dict"))


def find(config: Any, *names: str) -> Any:
    """The first existing setting of these names, in the config itself or in a sub-config; None if there is none.

    Examples:
        >>> from transformers import CLIPConfig
        >>> find(CLIPConfig(), "image_size"), find(CLIPConfig(), "num_mel_bins")
        (224, None)
    """
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return next(
        (value for level in _sub_configs(config) if (value := find(level, *names)) is not None),
        None,
    )


def is_setting(kind: type, value: Any) -> bool:
    """Whether a value is a boolean, a whole number from 0 on, or a finite number; settings may come from anywhere."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and 0 <= value < 2**31
    return isinstance(value, int | float) and math.isfinite(value)


def use_cache(config: Any, wanted: bool) -> None:
    """Enable or disable the key-value cache at all levels that have one."""
    if hasattr(config, "use_cache"):
        config.use_cache = wanted
    for level in _sub_configs(config):
        use_cache(level, wanted)


def nearest(name: str, known: Iterable[str], what: str) -> str:
    """A hint for a message: the known names nearest to an unknown one."""
    matches = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"; nearest {what}: {', '.join(matches)}" if matches else ""


def apply_overrides(source: str, config: Any, overrides: Mapping[str, object]) -> Any:
    """A new config of the same class with other values; derived values are computed again.

    Dots in keys lead into sub-configs. The source is the name of the model, for messages.
    """
    if not overrides:
        return config
    for key, value in overrides.items():
        _check(source, config, key, value)
    values = _with(config, overrides)
    values.pop("model_type", None)
    try:
        return type(config)(**values)
    except Exception as error:  # configs check themselves, each in its way
        raise ModelSourceError(
            source, f"its config refuses {_shown(overrides)}: {in_one_line(error)}"
        ) from error


def _check(source: str, config: Any, key: str, value: object) -> None:
    """Refuse a key that is not there, and a negative number in place of a count or a size: an empty loop."""
    level, above = config, ""
    for part in key.split("."):
        if above and not (isinstance(level, dict) or hasattr(level, "to_dict")):
            raise ModelSourceError(
                source, f"{above!r} in its config has no keys below it, so there is no {key!r}"
            )
        known = {
            *(level if isinstance(level, dict) else level.to_dict()),
            *(getattr(level, "attribute_map", None) or ()),
        }
        found = level.get(part) if isinstance(level, dict) else getattr(level, part, None)
        is_property = (
            part == key
            and not part.startswith("_")
            and hasattr(level, part)
            and not callable(found)
        )
        if part not in known and not is_property:
            where = f" in {above}" if above else ""
            raise ModelSourceError(
                source, f"its config has no {part!r}{where}" + nearest(part, known, "keys")
            )
        level, above = found, f"{above}.{part}" if above else part
    numbers = all(
        isinstance(number, int | float) and not isinstance(number, bool)
        for number in (level, value)
    )
    is_id = key.endswith(("_id", "_ids", "_index"))  # of tokens and labels: -1 is none
    if numbers and not is_id and value < 0 < level:  # type: ignore[operator]
        raise ModelSourceError(source, f"its config has {key}={level}, and {value} is negative")


def _with(config: Any, overrides: Mapping[str, object]) -> dict[str, Any]:
    """The arguments that rebuild a config: values that differ from its defaults, and the overrides."""
    values = _not_default(config)
    for key, value in overrides.items():
        first, _, rest = key.partition(".")
        if not rest:
            values[(getattr(config, "attribute_map", None) or {}).get(first, first)] = value
        else:
            level = getattr(config, first)
            changes = {
                name.partition(".")[2]: new
                for name, new in overrides.items()
                if name.startswith(f"{first}.")
            }
            values[first] = (
                {**level, **changes} if isinstance(level, dict) else _with(level, changes)
            )
    return values


def _not_default(config: Any) -> dict[str, Any]:
    """What was set: ``to_diff_dict`` of transformers also has what a config derived, and refuses when it is rebuilt."""
    values: dict[str, Any] = config.to_dict()
    try:
        default: dict[str, Any] = type(config)().to_dict()
    except Exception:  # a config that cannot be built without arguments has no defaults
        default = {}
    kept = {
        name: value
        for name, value in values.items()
        if name not in default or default[name] != value
    }
    kept.pop("transformers_version", None)
    if getattr(config, "model_type", ""):
        kept["model_type"] = config.model_type
    return kept


def _shown(overrides: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in overrides.items())
