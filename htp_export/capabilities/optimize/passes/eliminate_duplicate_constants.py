"""Constants as initializers, and equal initializers merged."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import DeduplicateInitializersPass

from htp_export.capabilities.optimize.registry import register
from htp_export.format.recipes import Recipe
from htp_export.model.folded_recipes import merged
from htp_export.model.recipes import lift_constants, recipe_of, recorded
from htp_export.process.quiet import quiet
from htp_export.shapes.operator_kinds import graphs_in

_LARGEST = 1024
"""Elements; comparing larger initializers would read the weights of the model."""


@register("eliminate_duplicate_constants", level="exact")
class EliminateDuplicateConstants(ir.passes.InPlacePass):
    """Converts ``Constant`` nodes to initializers, and merges equal small initializers."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        lifted = lift_constants(model)
        # the recipe of each initializer, with a consumer: its input tells which one was kept
        consumers: list[tuple[Recipe, tuple[ir.Node, int]]] = []
        for graph in graphs_in(model.graph):
            for value in graph.initializers.values():
                use = next(iter(value.uses()), None)
                if use is not None:
                    consumers.append((recipe_of(value), use))
        # it warns about each initializer that is an input or output, and keeps it
        with quiet("onnx_ir"):
            deduplicated = DeduplicateInitializersPass(_LARGEST)(model).modified
        recipes_of: dict[ir.Value, list[Recipe]] = {}
        for recipe, (node, position) in consumers if deduplicated else ():
            kept = node.inputs[position]
            assert kept is not None
            recipes_of.setdefault(kept, []).append(recipe)
        for kept, recipes in recipes_of.items():
            recipe = merged(recipes)
            if recipe != recipe_of(kept) and kept.const_value is not None:
                kept.const_value = recorded(kept.const_value, recipe)
        return ir.passes.PassResult(model, lifted or deduplicated)
