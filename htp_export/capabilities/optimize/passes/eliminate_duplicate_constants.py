"""Constants as initializers, equal ones once."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import DeduplicateInitializersPass, LiftConstantsToInitializersPass

from htp_export.capabilities.optimize.registry import register


@register("eliminate_duplicate_constants", level="exact")
class EliminateDuplicateConstants(ir.passes.InPlacePass):
    """Makes ``Constant`` nodes initializers, and keeps one of equal initializers.

    Args:
        size_limit: Initializers of more elements are not compared: their values would have to be read.
    """

    def __init__(self, size_limit: int = 1024) -> None:
        self._lift = LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)
        self._deduplicate = DeduplicateInitializersPass(size_limit)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        lifted, deduplicated = self._lift(model), self._deduplicate(model)
        return ir.passes.PassResult(model, lifted.modified or deduplicated.modified)
