"""Ranges of activations of a quantized file, measured again after its weights changed.

The float model is restored from the file, and quantized again as the file records. So a range is that
of `quantize` with the new weights, bit for bit, if no other step changed the arithmetic of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.calibration_records import (
    Calibration,
    calibration_number,
    has_range,
    read_calibrations,
)
from htp_export.capabilities.quantize.float_twin import (
    dequantized_from,
    float_twin,
    is_inserted,
    name_in_twin,
)
from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.quantizing import apply_precisions
from htp_export.capabilities.quantize.rounding_recipes import scale_of_input
from htp_export.capabilities.quantize.static_biases import is_bias
from htp_export.capabilities.quantize.work import CalibrationData, Facts, Left, Work
from htp_export.editing.flattening import read_flat
from htp_export.editing.submodels import constant_of
from htp_export.errors import InputError
from htp_export.format.recipes import CONSTANT, step
from htp_export.model.copies import Copied
from htp_export.model.recipes import recipe_of, recorded
from htp_export.model.tagged import TaggedModel
from htp_export.reporting.columns import many
from htp_export.runtime.data import Data
from htp_export.runtime.settings import RunSettings
from htp_export.weights.rebuilding import remade

_NO_RECORD = "the file does not record how its range was measured"


@dataclass(frozen=True)
class MeasuredAgain:
    """The ranges of a model after its weights changed.

    Attributes:
        tensors: Initializer → its new contents: scales, zero points, and biases that depend on them.
        ranges: Number of tensors whose ranges were measured.
        stayed: Scale → the reason why it is as before.
        notes: Differences to a new quantization, a sentence each.
    """

    tensors: Mapping[str, ir.TensorProtocol] = field(default_factory=dict)
    ranges: int = 0
    stayed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def ranges_in(tagged: TaggedModel) -> list[ir.Node]:
    """Return the QuantizeLinear nodes of the main graph that have a range of their own."""
    return list(filter(has_range, tagged.model.graph))


def measured_again(
    tagged: TaggedModel, entries: Mapping[str, Any], data: Data, name: str
) -> MeasuredAgain:
    """Measure the ranges of activations on data.

    Args:
        tagged: The model, with its new weights; not changed.
        entries: Entry of the ``state_dict`` → tensor: the new weights.
        data: The inputs of runs, as for `quantize`.
        name: The name of the model in errors.

    Raises:
        InputError: The data do not fit the model, or its records are not valid.
    """
    flat = read_flat(tagged).clone()
    nodes = ranges_in(flat)
    calibrations = read_calibrations(flat.model.metadata_props)
    if not calibrations or not any(map(is_inserted, nodes)):
        return MeasuredAgain(stayed=_all_stay(nodes, _NO_RECORD))
    try:
        twin = float_twin(flat, entries)
    except InputError as error:
        return MeasuredAgain(stayed=_all_stay(nodes, str(error)))
    again, left = _quantized(twin, calibrations, RunSettings(data), name)
    new = _by_tensor(again, twin, len(calibrations))
    reason = left[0].why if left else "a new quantization has no such range"
    tensors, stayed = _transferred(nodes, new, reason)
    for value in flat.model.graph.initializers.values():
        value.const_value = tensors.get(str(value.name), value.const_value)
    measured = len(new.keys() & set(map(name_in_twin, nodes)))
    biases = _biases(flat, entries)
    notes = _notes(calibrations, nodes, new)
    return MeasuredAgain({**tensors, **biases}, measured, stayed, notes)


def _all_stay(nodes: Sequence[ir.Node], why: str) -> dict[str, str]:
    return {str(node.inputs[1].name): why for node in nodes if node.inputs[1] is not None}


def _quantized(
    twin: TaggedModel, calibrations: Sequence[Calibration], settings: RunSettings, name: str
) -> tuple[TaggedModel, list[Left]]:
    """Quantize the float model in the recorded calls of `quantize`, one after the other."""
    readings = sum(each.precision.how.readings for each in calibrations)
    samples = CalibrationData.of(settings, twin.model, passes=readings)
    current, left = twin, list[Left]()
    for call in sorted({each.call for each in calibrations}):
        copied = Copied.of(current)
        changed = copied.tagged
        chosen: dict[Precision, list[ir.Node]] = {}
        for calibration in calibrations:
            if calibration.call == call:
                chosen[calibration.precision] = []
        planned: dict[ir.Node, object] = {}
        for node in changed.model.graph:
            number = calibration_number(node)
            if number is None or number >= len(calibrations) or calibrations[number].call != call:
                continue
            precision = calibrations[number].precision
            chosen[precision].append(node)
            planned[node] = precision
        facts = Facts.of(current)
        work = Work(copied, current, facts, planned, samples, name, None)
        left += apply_precisions({each: nodes for each, nodes in chosen.items() if nodes}, work)
        current = changed.refresh()
    return current, left


def _by_tensor(again: TaggedModel, twin: TaggedModel, first: int) -> dict[str, ir.Node]:
    """Return tensor of the float model → the QuantizeLinear that was inserted for it.

    The tensor keeps its name, or, where a part of the model ends, its dequantized copy has it.

    Args:
        again: The model that was quantized again.
        twin: The float model.
        first: The number of the first new calibration.
    """
    found: dict[str, ir.Node] = {}
    for node in ranges_in(again):
        if (calibration_number(node) or 0) < first:
            continue
        for value in (node.inputs[0], *dequantized_from(node)):
            if value is not None and value.name and value.name in twin.values:
                found[value.name] = node
                break
    return found


def _transferred(
    nodes: Sequence[ir.Node], new: Mapping[str, ir.Node], reason: str
) -> tuple[dict[str, ir.TensorProtocol], dict[str, str]]:
    """Return the new scales and zero points, and the scales that stay with the reason.

    Args:
        nodes: The QuantizeLinear nodes of the file.
        new: Tensor → its QuantizeLinear in the model that was quantized again.
        reason: Why there is none for a recorded one.
    """
    tensors: dict[str, ir.TensorProtocol] = {}
    stayed: dict[str, str] = {}
    for node in nodes:
        counterpart = new.get(name_in_twin(node)) if is_inserted(node) else None
        if counterpart is None:
            why = reason if is_inserted(node) else _NO_RECORD
            stayed.update(_all_stay([node], why))
            continue
        for old, measured in zip(node.inputs[1:], counterpart.inputs[1:], strict=False):
            before, after = constant_of(old), constant_of(measured)
            if old is None or before is None or after is None:
                continue
            if before.dtype != after.dtype or before.shape != after.shape:
                stayed[str(old.name)] = "a new quantization gives it another type"
                continue
            array = np.asarray(after.numpy())
            tensor = ir.Tensor(array, dtype=after.dtype, name=old.name)
            tensors[str(old.name)] = recorded(tensor, CONSTANT)
    return tensors, {name: why for name, why in stayed.items() if name not in tensors}


def _biases(flat: TaggedModel, entries: Mapping[str, Any]) -> dict[str, ir.TensorProtocol]:
    """Return the integers and scales of biases: a scale is that of the input times that of the weight.

    ``flat``: The model, with its new scales.
    """
    tensors: dict[str, ir.TensorProtocol] = {}
    for node in flat.model.graph:
        for place, bias in enumerate(node.inputs):
            producer = None if bias is None else bias.producer()
            if not is_bias(node, place) or producer is None or not is_inserted(producer):
                continue
            scale = scale_of_input(node)
            for value in producer.inputs[:2]:
                recipe = CONSTANT if value is None else recipe_of(value)
                if scale is None or value is None or value.const_value is None:
                    continue
                if not isinstance(recipe, list) or recipe[0] != "round_bias":
                    continue
                _, floats, weight, (part, _, *scheme) = recipe
                made = step("round_bias", floats, weight, [part, scale, *scheme])
                stored = recorded(value.const_value, made)
                tensors[str(value.name)] = remade(stored, made, entries)
    return tensors


def _notes(
    calibrations: Sequence[Calibration], nodes: Sequence[ir.Node], new: Mapping[str, ir.Node]
) -> tuple[str, ...]:
    """Return the differences to a new quantization that are known."""
    notes: list[str] = []
    others: set[str] = set()
    for calibration in calibrations:
        others.update(calibration.others)
    if others:
        notes.append(
            f"ranges are measured with the modules in {', '.join(sorted(others))} as they are in the file; quantize "
            "measures them in floats, so that the last digits of ranges behind them can differ"
        )
    surplus = new.keys() - set(map(name_in_twin, nodes))
    if surplus:
        further = many(len(surplus), "further tensor")
        notes.append(f"a new quantization would round {further}, such as {min(surplus)!r}")
    return tuple(notes)
