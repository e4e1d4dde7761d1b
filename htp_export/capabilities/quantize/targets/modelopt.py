"""NVIDIA ModelOpt: arguments of ``modelopt.onnx.quantization.quantize``.

It accepts regular expressions, and matches them with the *beginning* of a node's name
(``re.match``): names are escaped, and end in ``$``. A run has one type of integers; in the mode
``int4``, single weights may have 8 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx_ir as ir

from htp_export.capabilities.quantize.plan_exporting import Expressed, PlannedModel, TargetFile
from htp_export.errors import InputError

EXPRESSED: Expressed = {
    "static": {"activation": ("int8",), "weight": ("int8",)},
    "weights": {"activation": ("float32",), "algorithm": ("default",)},
    "cast": {},
}

_HIGH = {"float16": "fp16", "bfloat16": "bf16"}
_EIGHT_BITS = re.compile(r"[/a-zA-Z0-9_.\-]+")
"""The names of weights that ModelOpt can parse in ``layers_8bit``, a list with commas."""


def plan_file(planned: PlannedModel) -> TargetFile:
    """The arguments as JSON."""
    static, weights, casts = planned.of("static"), planned.of("weights"), planned.of("cast")
    if static and weights:
        raise InputError(
            "modelopt quantizes either activations and weights or weights alone in one run, and not both"
        )
    planned.check_alike("modelopt", "cast", "activation")
    high = {_HIGH[precision.activation] for precision in casts}
    chosen = [node for nodes in (*static.values(), *weights.values()) for node in nodes]
    content: dict[str, object] = {
        "quantize_mode": "int4" if weights else "int8",
        "nodes_to_exclude": _patterns(planned.named_nodes_without(chosen)),
        "high_precision_dtype": next(iter(high), "fp32"),
        **(_blocks(planned) if weights else {"nodes_to_quantize": _patterns(chosen)}),
    }
    notes = [
        "modelopt.onnx.quantization.quantize(MODEL, calibration_data=..., output_path=..., **arguments)"
    ]
    notes += [
        f"{kind} is that of the whole model: ModelOpt excludes operators from it, and no nodes"
        for kind in high
    ]
    return TargetFile(content, (*notes, *planned.subgraph_notes()))


def _patterns(nodes: Iterable[ir.Node]) -> list[str]:
    return [f"{re.escape(str(node.name))}$" for node in nodes]


def _blocks(planned: PlannedModel) -> dict[str, object]:
    """The arguments of the mode ``int4``: the size of blocks, and the weights with 8 bits."""
    weights = planned.of("weights")
    planned.check_alike("modelopt", "weights", "block_size")
    bits: dict[str, int] = {}
    for precision, nodes in weights.items():
        for use in planned.weighted(nodes):
            bits[str(use.value.name)] = precision.bits
    eight = [name for name in bits if bits[name] == 8]
    for name in eight:
        if not _EIGHT_BITS.fullmatch(name):
            raise InputError(f"modelopt cannot read the name of weight {name!r} in layers_8bit")
        within = next(
            (other for other in bits if bits[other] == 4 and f".{name}." in f".{other}."), None
        )
        if within is not None:
            raise InputError(
                f"modelopt's layers_8bit would also take weight {within!r} with {name!r}"
            )
    mixed = {"enable_mixed_quant": True, "layers_8bit": ",".join(eight)} if eight else {}
    return {"block_size": next(iter(weights)).block_size, **mixed}
