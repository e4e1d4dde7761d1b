"""ONNX Runtime GenAI's model builder: its ``target_options``, for a decoder that it builds from the same checkpoint.

The builder writes a file of its own, whose nodes it names by the modules of transformers:
``model.layers.0.self_attn. q_proj`` is ``/model/layers.0/attn/q_proj/MatMul``. One run has one type
of weights, with blocks of one size; a list of overrides gives single nodes 4 or 8 bits, or leaves
them as they are. The builder refuses a name that it does not write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
    named = {
        _name(planned.tagged.owners_of(use.node)): bits.get(use.node)
        for use in planned.weighted(planned.nodes)
        if use.node.op_type != "Gather"
    }
    settings = {
        "type": f"int{usual}",
        "block_size": first.block_size,
        "symmetric": first.symmetric,
        "method": _METHODS[first.algorithm],
        "accuracy_level": value_of(first, "accuracy_level"),
        "op_types": ["MatMul"],
        "overrides": [
            {
                "match": {"name": name},
                **({"exclude": True} if found is None else {"type": f"int{found}"}),
            }
            for name, found in named.items()
            if found != usual
        ],
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


def _name(owners: Iterable[str]) -> str:
    """The builder's name of the node with the weight of a module."""
    path = next(iter(owners), "")
    match = _LAYER.fullmatch(path)
    if match is None:
        raise InputError(f"the builder of genai names no node by module {path or '(root)'!r}")
    layer, part, name, head = match.groups()
    return (
        f"/{head}/MatMul"
        if head
        else f"/model/layers.{layer}/{part.removeprefix('self_')}/{name}/MatMul"
    )
