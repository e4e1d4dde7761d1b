"""Which tensors of a file are computed in half precision, or from tensors that are."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from htp_export.model.dependence import dependence, reads_and_results
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import is_standard

__all__ = ["half_precisions"]

_BITS = {ir.DataType.FLOAT16: 1, ir.DataType.BFLOAT16: 2}
_NAMES = {1: "float16", 2: "bfloat16", 3: "bfloat16"}  # the coarser one, where it is computed from both


def half_precisions(tagged: TaggedModel) -> Mapping[str, str]:
    """Tensor of the main graph → the coarsest type of half precision among it and the tensors it is computed from.

    A tensor that is cast to float32 is as exact as what it was cast from.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid()).eval()
        >>> program = htp_export.export(net, (torch.ones(2),), verbose=False)
        >>> half_precisions(htp_export.load(htp_export.quantize(program, {"0": "fp16"}).model))["sigmoid"]
        'float16'
    """
    if not _has_halves(tagged):
        return {}
    starts: dict[ir.Value | None, int] = {}
    for name, value in tagged.typed.items():
        if value.dtype in _BITS:
            starts[tagged.values[name]] = _BITS[value.dtype]
    found = dependence(reads_and_results(tagged.model.graph.all_nodes()), starts)
    return {name: _NAMES[found[value]] for name, value in tagged.values.items() if value in found}


def _has_halves(tagged: TaggedModel) -> bool:
    """Whether a tensor has such a type, as far as the file says so: then types are inferred."""
    casts = (node.attributes.get_int("to", 0) for node in tagged.nodes if is_standard(node, "Cast"))
    return any(value.dtype in _BITS for value in tagged.values.values()) or any(to in list(_BITS) for to in casts)
