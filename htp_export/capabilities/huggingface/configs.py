"""Transformers configs: search for settings, overrides by dotted key, and the key-value cache on or off."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from htp_export.errors import ModelSourceError, in_one_line


def _sub_configs(config: Any) -> Iterator[Any]:
    """Configs inside a config, such as those of its text tower or its backbone."""
    for name in getattr(config, "sub_configs", None) or {}:
        sub_config = getattr(config, name, None)
        if hasattr(sub_config, "to_dict"):
            yield sub_config


def find(config: Any, *names: str) -> Any:
    """The first setting with one of these names, in the config itself or in a sub-config; None if there is none.

    Examples:
        >>> from transformers import CLIPConfig
        >>> find(CLIPConfig(), "image_size"), find(CLIPConfig(), "num_mel_bins")
        (224, None)
    """
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for sub_config in _sub_configs(config):
        value = find(sub_config, *names)
        if value is not None:
            return value
    return None


def is_setting(kind: type, value: Any) -> bool:
    """Whether a value is a valid setting of a kind; values of files are not trusted.

    ``kind``: bool; int, for an integer from 0 up that 32 bits hold, as consumers in C++ need it; or
    float, for a finite number.
    """
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and 0 <= value < 2**31
    return isinstance(value, int | float) and math.isfinite(value)


def use_cache(config: Any, wanted: bool) -> None:
    """Enable or disable the key-value cache in a config and its sub-configs."""
    if hasattr(config, "use_cache"):
        config.use_cache = wanted
    for sub_config in _sub_configs(config):
        use_cache(sub_config, wanted)


def use_batched_experts(config: Any) -> None:
    """Let a mixture of experts run in operators of torch, unless the config chooses an implementation.

    Its experts are then products with the weights of the experts of each token. By default,
    transformers runs an operator of its own, which no exporter of torch translates into ONNX.
    """
    # transformers 4 has no choice
    if getattr(config, "_experts_implementation", "") is None:
        config._experts_implementation = "batched_mm"


def nearest(name: str, known: Iterable[str], what: str) -> str:
    """A hint for a message: the known names most similar to an unknown one."""
    # Three hints fit a line; difflib's own cutoff, 0.6, drops too many short names.
    matches = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"; nearest {what}: {', '.join(matches)}" if matches else ""


def apply_overrides(source: str, config: Any, overrides: Mapping[str, object]) -> Any:
    """Build a new config of the same class with other values; derived values are computed again.

    Dots in keys lead into sub-configs. ``source`` is the name of the model, for messages.
    """
    if not overrides:
        return config
    for key, value in overrides.items():
        _check(source, config, key, value)
    values = _with(config, overrides)
    values.pop("model_type", None)
    try:
        return type(config)(**values)
    except Exception as error:  # from the checks of any config class
        raise ModelSourceError(
            source, f"its config refuses {_shown(overrides)}: {in_one_line(error)}"
        ) from error


def _check(source: str, config: Any, key: str, value: object) -> None:
    """Refuse a key that does not exist, and a negative number for a count or a size."""
    current = _setting_at(source, config, key)
    if not _is_number(current) or not _is_number(value):
        return
    is_id = key.endswith(("_id", "_ids", "_index"))  # of tokens and labels: -1 means none
    # A negative count would build a model with empty loops.
    if not is_id and value < 0 < current:  # type: ignore[operator]
        raise ModelSourceError(source, f"its config has {key}={current}, and {value} is negative")


def _is_number(value: object) -> bool:
    """Whether a value is an int or a float, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _setting_at(source: str, config: Any, key: str) -> Any:
    """The setting with a dotted key; an error if there is none."""
    level, path = config, ""
    for part in key.split("."):
        if path and not (isinstance(level, dict) or hasattr(level, "to_dict")):
            raise ModelSourceError(
                source, f"{path!r} in its config has no keys below it, so there is no {key!r}"
            )
        if isinstance(level, dict):
            names, setting = set(level), level.get(part)
        else:
            names, setting = set(level.to_dict()), getattr(level, part, None)
        names |= set(getattr(level, "attribute_map", None) or ())
        # A property of the config itself may be set, too; a method may not.
        is_public = part == key and not part.startswith("_")
        is_property = is_public and hasattr(level, part) and not callable(setting)
        if part not in names and not is_property:
            where = f" in {path}" if path else ""
            hint = nearest(part, names, "keys")
            raise ModelSourceError(source, f"its config has no {part!r}{where}{hint}")
        level = setting
        path = f"{path}.{part}" if path else part
    return level


def _with(config: Any, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Arguments that rebuild a config: values that differ from its defaults, and the overrides."""
    values = _not_default(config)
    aliases = getattr(config, "attribute_map", None) or {}
    for key, value in overrides.items():
        first, _, rest = key.partition(".")
        if not rest:
            values[aliases.get(first, first)] = value
            continue
        prefix = f"{first}."
        changes = {
            name.removeprefix(prefix): new
            for name, new in overrides.items()
            if name.startswith(prefix)
        }
        level = getattr(config, first)
        values[first] = {**level, **changes} if isinstance(level, dict) else _with(level, changes)
    return values


def _not_default(config: Any) -> dict[str, Any]:
    """The settings of a config that differ from the defaults of its class.

    ``to_diff_dict`` of transformers also contains derived values, which a config refuses as
    arguments.
    """
    values: dict[str, Any] = config.to_dict()
    try:
        default: dict[str, Any] = type(config)().to_dict()
    except Exception:  # The class requires arguments: it has no defaults.
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
