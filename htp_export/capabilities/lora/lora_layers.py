"""What the metadata of a model says of its LoRA layers, and the nodes that compute them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from htp_export.capabilities.lora.adapters import factor_name
from htp_export.editing.editing import take_place
from htp_export.editing.submodels import remove_unused
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.lora import FACTORS, read_lora
from htp_export.model.tagged import TaggedModel

__all__ = ["lora_layers", "remove_lora"]


def lora_layers(tagged: TaggedModel) -> dict[str, float]:
    """Module path → the factor by which its low-rank product is multiplied, for the layers that `insert_lora` made.

    Raises:
        InputError: If the metadata is not what the file format says, or names what the graph does not have.
    """
    try:
        layers = read_lora(tagged.model.metadata_props)
    except ValueError as error:
        raise InputError(f"model {tagged.model.graph.name!r}: {error}") from error
    for path in layers:
        for name in (factor_name(path, factor) for factor in FACTORS):
            if path not in tagged or name not in tagged.model.graph.initializers:
                raise InputError(f"{tags.LORA} names module {path!r}, and the graph has no input {name!r}")
    return layers


def remove_lora(graph: ir.Graph, path: str) -> None:
    """Take the LoRA layer of a module out of a graph; the module's results keep their names.

    Raises:
        InputError: If the graph no longer has the nodes that `insert_lora` made, as after an optimizer.
    """
    factors = [graph.initializers[factor_name(path, factor)] for factor in FACTORS]
    made = _derived(factors[0])
    joins = [node for node in made if node.op_type == "Add" and any(_not_among(value, made) for value in node.inputs)]
    if not joins:
        raise InputError(f"module {path!r}: the nodes of its LoRA layer were changed by another tool")
    for join in joins:
        [base] = [value for value in join.inputs if value is not None and _not_among(value, made)]
        take_place(join.outputs[0], base)
        remove_unused(join.outputs)
    for factor in factors:
        if factor.uses():
            raise InputError(f"module {path!r}: {factor.name!r} is read outside of its LoRA layer")
        graph.inputs.remove(factor)
        del graph.initializers[str(factor.name)]


def _derived(value: ir.Value) -> dict[ir.Node, None]:
    """The nodes that depend on a factor, up to the additions of what does not."""
    found: dict[ir.Node, None] = {}
    waiting = [value]
    while waiting:
        for use in waiting.pop().uses():
            if use.node not in found:
                found[use.node] = None
                if use.node.op_type != "Add":
                    waiting += use.node.outputs
    return found


def _not_among(value: ir.Value | None, nodes: Mapping[ir.Node, None]) -> bool:
    return value is not None and value.producer() not in nodes
