"""Ranges of activations after `bind`: measured again with ``data``, and otherwise those of the old weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import TaggedModel
from htp_export.reporting.columns import many
from htp_export.runtime.data import Data
from htp_export.shapes.operator_kinds import quantizes


@dataclass(frozen=True)
class Ranges:
    """The ranges of a model with new weights.

    Attributes:
        tensors: Initializer → its new contents: scales, zero points, and biases that depend on them.
        measured: Number of tensors whose ranges were measured.
        unmeasured: Scale → the reason why it is that of the old weights.
        notes: The ranges that stay, a sentence each.
    """

    tensors: Mapping[ir.Value, ir.TensorProtocol] = field(default_factory=dict)
    measured: int = 0
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        tagged: TaggedModel,
        entries: Mapping[str, ir.TensorProtocol],
        data: Data | None,
        name: str,
    ) -> Ranges:
        """Measure the ranges of a model, if there are data.

        Args:
            tagged: The model with its new weights.
            entries: Entry of the ``state_dict`` → tensor.
            data: The inputs of runs; None to leave the ranges.
            name: The name of the model in errors.

        Raises:
            InputError: The model has no ranges, or the data do not fit it.
        """
        places = _ranges_in(tagged)
        if data is None:
            return cls(notes=_of_old_weights(places))
        if not places:
            raise InputError(
                f"{name} has no QuantizeLinear with a range to measure: leave data out"
            )
        from htp_export.capabilities.quantize.measuring_again import measured_again

        found = measured_again(tagged, entries, data, name)
        initializers = tagged.model.graph.initializers
        tensors: dict[ir.Value, ir.TensorProtocol] = {}
        unmeasured = dict(found.stayed)
        for key, tensor in found.tensors.items():
            if key in initializers:
                tensors[initializers[key]] = tensor
            else:
                unmeasured[key] = "it is no initializer of the main graph"
        return cls(tensors, found.ranges, unmeasured, (*found.notes, *_not_measured(unmeasured)))


def _ranges_in(tagged: TaggedModel) -> int:
    """The number of ranges that depend on weights; ranges of a format do not."""
    quantizers = [node for node in all_nodes(tagged.model) if quantizes(node)]
    if not quantizers:
        return 0
    from htp_export.capabilities.quantize.calibration_records import has_range

    return sum(map(has_range, quantizers))


def _of_old_weights(places: int) -> tuple[str, ...]:
    if not places:
        return ()
    return (
        f"ranges of activations at {many(places, 'place')} are those of the old weights; data measure them again",
    )


def _not_measured(unmeasured: Mapping[str, str]) -> tuple[str, ...]:
    if not unmeasured:
        return ()
    name, why = next(iter(unmeasured.items()))
    count = many(len(unmeasured), "range")
    return (f"{count} of activations stay those of the old weights, such as {name!r}: {why}",)
