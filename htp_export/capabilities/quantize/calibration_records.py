"""Records in a file of how its ranges of activations were measured, so that they can be measured again.

Each node that was quantized with measured ranges, and each QuantizeLinear and DequantizeLinear that
was inserted for it, has the number of a calibration in its metadata. The range of a QuantizeLinear
is that of its own input. The metadata of the model has the calibrations: the precision, and the call
of `quantize` that measured it (``docs/format.md``).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.method import ENGINE, FIELDS, Precision
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.bounds import number_in
from htp_export.format.json_text import parse_json
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import quantizes

_VERSION = 1
"""Of the records: a reader passes over later ones."""

OF_FORMAT = "format"
"""In place of a number: the range of a QuantizeLinear is that of its format, whatever the data are."""

_METHOD = "static"
_MOST = 256
"""Calibrations of a file, at most: a precision for each call of `quantize`."""

_MOST_KEPT = 1 << 10
"""Elements of a constant, at most, whose floats are recorded; larger ones would double the file."""


@dataclass(frozen=True)
class Calibration:
    """One measurement of ranges.

    Attributes:
        call: The call of `quantize` that measured them: later ones measured the result of earlier
            ones.
        precision: The precision of the nodes.
        others: The other precisions of the plan, by name. Their modules were floats when the ranges
            were measured.
    """

    call: int
    precision: Precision
    others: tuple[str, ...] = ()


def read_calibrations(metadata: Mapping[str, str]) -> list[Calibration]:
    """Return the calibrations of a model; none for a model without records, or with later ones.

    Raises:
        InputError: The records are not valid.
    """
    text = metadata.get(tags.CALIBRATIONS)
    if text is None:
        return []
    try:
        written = parse_json(text)
        if written["version"] > _VERSION:
            return []
        entries = written["calibrations"]
        if len(entries) > _MOST:
            raise ValueError(f"there are {len(entries)} calibrations")
        return [_calibration(entry) for entry in entries]
    except (InputError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{tags.CALIBRATIONS} is not valid: {error}") from error


def _calibration(entry: Mapping[str, Any]) -> Calibration:
    fields = dict(entry)
    call, others = fields.pop("call"), fields.pop("others", [])
    if type(call) is not int or not 0 <= call < _MOST:
        raise ValueError(f"call {call!r} is not a number")
    for name, default in _DEFAULTS.items():
        if name in fields and type(fields[name]) is not type(default):
            raise ValueError(f"{name} is {fields[name]!r}")
    # An engine is a plug-in: a file does not choose which code runs.
    if fields.get("method") != _METHOD or fields.get("engine", ENGINE) != ENGINE:
        raise ValueError(
            f"the method {fields.get('method')!r} has no ranges that are measured again"
        )
    return Calibration(call, Precision(**fields), tuple(map(str, [*others])))


_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(Precision)
    if isinstance(field.default, bool | int | str)
}


def number_of_calibration(
    original: ir.Model, changed: ir.Model, precision: Precision, planned: Iterable[object]
) -> str:
    """Record a calibration in the model that is changed, if it is not there yet; return its number.

    Args:
        original: The model whose ranges are measured.
        changed: The model that gets them.
        precision: The precision of the nodes.
        planned: The precisions of all nodes in the plan.
    """
    others: set[str] = set()
    for other in planned:
        if isinstance(other, Precision) and not (other.is_kept or other.calibrated):
            others.add(other.name)
    earlier = [known.call for known in read_calibrations(original.metadata_props)]
    new = Calibration(max(earlier, default=-1) + 1, precision, tuple(sorted(others)))
    known = read_calibrations(changed.metadata_props)
    if new not in known:
        known.append(new)
        _write(changed.metadata_props, known)
    return str(known.index(new))


def _write(metadata: MutableMapping[str, str], calibrations: Iterable[Calibration]) -> None:
    entries: list[dict[str, Any]] = []
    for each in calibrations:
        entry: dict[str, Any] = {"call": each.call}
        if each.others:
            entry["others"] = list(each.others)
        for name in FIELDS:
            value = getattr(each.precision, name)
            if name != "bits" and value != _DEFAULTS.get(name) and value not in (None, {}):
                entry[name] = value
        entries.append(entry)
    metadata[tags.CALIBRATIONS] = tags.json_text({"version": _VERSION, "calibrations": entries})


def mark(nodes: Iterable[ir.Node], number: str) -> None:
    """Record the calibration of quantized nodes, and of the nodes that quantize their tensors."""
    for node in nodes:
        node.metadata_props[tags.CALIBRATION] = number


def has_range(node: ir.Node) -> bool:
    """Whether a node is a QuantizeLinear with a range of its own, and not with that of its format."""
    return quantizes(node) and node.metadata_props.get(tags.CALIBRATION) != OF_FORMAT


def calibration_number(node: ir.Node) -> int | None:
    """Return the number of the calibration of a node; None without a record."""
    return number_in(node.metadata_props.get(tags.CALIBRATION, ""))


def with_floats(levels: ir.TensorProtocol, floats: Array, dequantized: Array) -> ir.TensorProtocol:
    """Return the integers of a constant with a record of its floats, unless these are the dequantized ones.

    Of a weight, the entries of the ``state_dict`` are the record. A large constant is recorded as not
    kept.
    """
    if np.array_equal(floats, dequantized):
        return levels
    kept = np.ascontiguousarray(floats, "<f4").tobytes() if floats.size <= _MOST_KEPT else b""
    levels.metadata_props[tags.FLOATS] = base64.b85encode(kept).decode()
    return levels


def floats_of(levels: ir.TensorProtocol, dequantized: Array) -> Array | None:
    """Return the floats of a constant before it was quantized; None if they were not kept.

    Raises:
        InputError: The record is not valid.
    """
    text = levels.metadata_props.get(tags.FLOATS)
    if text is None:
        return dequantized
    try:
        kept = base64.b85decode(text)
    except (ValueError, binascii.Error) as error:
        raise InputError(f"{levels.name!r}: {tags.FLOATS} is not valid: {error}") from error
    if not kept:
        return None
    if len(kept) != 4 * dequantized.size:
        raise InputError(f"{levels.name!r}: {tags.FLOATS} has {len(kept)} bytes")
    return np.frombuffer(kept, "<f4").astype(np.float32).reshape(dequantized.shape)
