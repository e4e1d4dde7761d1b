"""Constants as initializers, equal ones once."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import DeduplicateInitializersPass

from htp_export.capabilities.optimize.registry import register
from htp_export.format.recipes import Recipe
from htp_export.model.recipes import lift_constants, merged, recipe_of, recorded
from htp_export.process.quiet import quiet

_LARGEST = 1024
"""Elements; the values of larger initializers would have to be read."""


@register("eliminate_duplicate_constants", level="exact")
class EliminateDuplicateConstants(ir.passes.InPlacePass):
    """Makes ``Constant`` nodes initializers, and keeps one of equal initializers, but for large ones."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        lifted, found = lift_constants(model), list[tuple[Recipe, tuple[ir.Node, int]]]()
        for graph in model.graphs():
            for value in graph.initializers.values():
                if value.uses() and value.dtype is not None and value.dtype.is_floating_point():
                    found.append((recipe_of(value), next(iter(value.uses()))))
        # it warns of each initializer that is an input or output, too: these stay
        with quiet("onnx_ir"):
            deduplicated = DeduplicateInitializersPass(_LARGEST)(model).modified
        stands_for: dict[ir.Value, list[Recipe]] = {}
        for recipe, (node, place) in found if deduplicated else ():
            kept = node.inputs[place]
            assert kept is not None
            stands_for.setdefault(kept, []).append(recipe)
        for kept, recipes in stands_for.items():
            recipe = merged(recipes)
            if recipe != recipe_of(kept) and kept.const_value is not None:
                kept.const_value = recorded(kept.const_value, recipe)
        return ir.passes.PassResult(model, lifted or deduplicated)
