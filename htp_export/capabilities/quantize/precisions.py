"""Named precisions, and their notation in plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from htp_export.capabilities.quantize.method import CHECKPOINT, FIELDS, Precision
from htp_export.errors import InputError, RuleError, unknown_name

AUTO = Precision("auto")
"""A placeholder, which `AutoPrecision` replaces by one that is usually faster than fp32 on this machine."""

PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("int8", "static", "int8", "int8", per_channel=True),
        Precision("u8s8", "static", "uint8", "int8", per_channel=True),
        Precision("uint8", "static", "uint8", "uint8"),
        Precision("int16", "static", "int16", "int8", symmetric=True, per_channel=True),
        Precision("int8-dynamic", "dynamic", "uint8", "int8", per_channel=True),
        Precision("int8-weights", "weights", weight="int8"),
        Precision("int4", "weights", weight="int4"),
        Precision("int8-cache", "cache", weight="int8", per_channel=True),
        Precision("fp8", "float8", "float8e4m3fn", "float8e4m3fn", per_channel=True),
        Precision("fixed", "fixed", "fixed16.8", "fixed16.8", options={"bias": "fixed16.8"}),
        Precision("mxint8", "microscaling", weight="int8"),
        Precision("mxfp8", "microscaling", weight="e4m3"),
        Precision("mxfp6", "microscaling", weight="e2m3"),
        Precision("mxfp4", "microscaling", weight="e2m1"),
        Precision("fp16", "cast", "float16", "float16"),
        Precision("bf16", "cast", "bfloat16", "bfloat16"),
        Precision("fp32"),
        AUTO,
    )
}
"""Name → precision."""


def precision_of(value: Any, named: Mapping[str, Precision] = PRECISIONS) -> Precision:
    """Parse a precision: a name, or a mapping with it as ``precision`` and other fields.

    A name with fields, as in ``int4:block_size=128:accuracy_level=0``, also becomes the name of the
    resulting precision.

    Args:
        value: The value of a rule.
        named: Name → precision.

    Examples:
        >>> precision_of("int4").block_size, precision_of({"precision": "int4", "block_size": 128}).block_size
        (32, 128)
        >>> precision_of("int4:block_size=128").block_size
        128
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, Mapping):
        return _with_fields(value, named)
    if isinstance(value, str) and value.partition(":")[0] in named and ":" in value:
        name, *texts = value.split(":")
        fields = named[name].how.fields_in(texts)
        return _with_fields({"precision": name, **fields, "name": value}, named)
    if not isinstance(value, str) or value not in named:
        raise InputError(f"there is no precision {unknown_name(value, named)}")
    return named[value]


def _with_fields(value: Mapping[str, Any], named: Mapping[str, Precision]) -> Precision:
    """The precision with the name in ``precision``, in which the other fields are replaced."""
    given = dict(value)
    name = given.pop("precision", None)
    if name is None:
        raise InputError(f"precision {value!r} has no name; write it as 'precision': 'int8'")
    base = precision_of(name, named)
    if base == AUTO and given:
        listed = ", ".join(repr(each) for each in given if each != "name")
        raise InputError(f"precision 'auto' has no fields, and {listed} is given")
    given = base.how.fields_from(base.name, given)
    fields = {key: given.pop(key) for key in FIELDS if key in given}
    # The remaining fields are options of the method. The bits follow from the type.
    changes = {"bits": 0, "options": {**base.options, **given}, **fields}
    return dataclasses.replace(base, **changes)


def precisions_of(
    plan: Mapping[str, Any] | Precision | str, named: Mapping[str, Precision] = PRECISIONS
) -> dict[str, Precision]:
    """Parse a plan, or a precision for the whole model: selector → precision.

    A mapping with the key ``precision`` is a precision with fields, as in a rule.

    Raises:
        RuleError: The precision of a rule cannot be parsed; the error names the selector.

    Examples:
        >>> {selector: precision.name for selector, precision in precisions_of("int4").items()}
        {'.': 'int4'}
        >>> precisions_of({"precision": "int4", "block_size": 64})["."].block_size
        64
    """
    if isinstance(plan, str) and PurePath(plan).suffix == ".onnx":
        raise InputError(f"{plan!r} is a model and not a plan; the model comes before the plan")
    if isinstance(plan, str | Precision) or (isinstance(plan, Mapping) and "precision" in plan):
        return {".": precision_of(plan, named)}
    if not isinstance(plan, Mapping):
        raise InputError(
            f"a plan is a mapping from selectors to precisions, or a precision, not {type(plan).__name__}"
        )
    rules: dict[str, Precision] = {}
    for selector, value in plan.items():
        try:
            rules[selector] = precision_of(value, named)
        except InputError as error:
            raise RuleError(selector, str(error)) from error
    return rules


def check_plan(plan: Mapping[str, Any] | Precision | str, weights: object = None) -> None:
    """Check the rules of a plan; with ``weights``, `CHECKPOINT` is a precision, too.

    Examples:
        >>> check_plan({"head": "checkpoint"}, weights="Llama-GPTQ")
    """
    named = dict(PRECISIONS)
    if weights is not None:
        named[CHECKPOINT] = PRECISIONS["int4"]  # any precision: the model decides which
    precisions_of(plan, named)


def weight_precision(types: Iterable[str]) -> str:
    """The name of the precision of weights with these element types, as in plans if they have one.

    Examples:
        >>> weight_precision(["float32"]), weight_precision(["float64"]), weight_precision(["float16", "float32"])
        ('fp32', 'float64', 'mixed')
    """
    named = [known for known in PRECISIONS.values() if "float" in known.weight and known != AUTO]
    float_names = {known.weight: known.name for known in named}
    first, *others = dict.fromkeys(types)
    return "mixed" if others else float_names.get(first, first)
