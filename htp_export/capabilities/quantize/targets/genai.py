"""``target_options`` for ONNX Runtime GenAI's model builder, which reads the same checkpoint.

The builder writes a file of its own, and names its nodes after the modules of transformers:
``model.layers.0.self_attn.q_proj`` is ``/model/layers.0/attn/q_proj/MatMul``. A run has one type of
weights, and one block size; a list of overrides sets 4 or 8 bits for single nodes, or excludes
them. The builder rejects an unknown name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from htp_export.capabilities.quantize.plan_exporting import (
    Expressed,
    PlannedModel,
    TargetFile,
    value_of,
)
from htp_export.errors import InputError

_LAYER = re.compile(
    r"(?:model\.)?(?:language_model\.)?(?:layers\.(\d+)\.(self_attn|attn|mlp)\.(\w+)|(lm_head))"
)
_METHODS = {"default": "default", "rtn": "rtn", "k-quant": "k_quant"}
EXPRESSED: Expressed = {
    "weights": {
        "activation": ("float32",),
        "algorithm": tuple(_METHODS),
        "accuracy_level": (None, 0, 1, 2, 3, 4),
    }
}


def plan_file(planned: PlannedModel) -> TargetFile:
    """The options as JSON."""
    weights = planned.of("weights")
    if not weights:
        raise InputError(
            "the plan has no weights of 4 or 8 bits, and the builder of genai takes no other rules"
        )
    planned.check_alike(
        "genai", "weights", "block_size", "symmetric", "algorithm", "accuracy_level"
    )
    first = next(iter(weights))
    bits = {
        use.node: precision.bits
        for precision, nodes in weights.items()
        for use in planned.weighted(nodes)
    }
    usual = min(bits.values())
    overrides: list[dict[str, object]] = []
    for name, node_bits in _bits_by_name(planned, bits).items():
        if node_bits is None:
            overrides.append({"match": {"name": name}, "exclude": True})
        elif node_bits != usual:
            overrides.append({"match": {"name": name}, "type": f"int{node_bits}"})
    settings = {
        "type": f"int{usual}",
        "block_size": first.block_size,
        "symmetric": first.symmetric,
        "method": _METHODS[first.algorithm],
        "accuracy_level": value_of(first, "accuracy_level"),
        "op_types": ["MatMul"],
        "overrides": overrides,
    }
    notes = [
        "python -m onnxruntime_genai.models.builder -m MODEL -o FOLDER -e cpu --target_options FILE"
    ]
    tables = [node for node in bits if node.op_type == "Gather"]
    if tables:
        notes.append(
            f"{len(tables)} tables of embeddings keep their weights: the options are for MatMul alone"
        )
    content: dict[str, object] = {"quant_config": {"io_dtype": "fp32", "weights": settings}}
    return TargetFile(content, (*notes, *planned.subgraph_notes()))


def _bits_by_name(planned: PlannedModel, bits: Mapping[ir.Node, int]) -> dict[str, int | None]:
    """The builder's name of each product → the bits of its weight; None if it stays as it is."""
    by_name: dict[str, int | None] = {}
    for use in planned.weighted(planned.nodes):
        if use.node.op_type != "Gather":
            by_name[_name(planned.tagged.owners_of(use.node))] = bits.get(use.node)
    return by_name


def _name(owners: Iterable[str]) -> str:
    """The builder's name of the product with the weight of a module."""
    path = next(iter(owners), "")
    match = _LAYER.fullmatch(path)
    if match is None:
        raise InputError(f"the builder of genai names no node by module {path or '(root)'!r}")
    layer, part, name, head = match.groups()
    if head:
        return f"/{head}/MatMul"
    return f"/model/layers.{layer}/{part.removeprefix('self_')}/{name}/MatMul"
