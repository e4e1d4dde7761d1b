"""Weights that stay where they are while torch serializes a model, and go from there straight into the file.

torch copies each weight twice on its way into the bytes of a model. In its place it is given an empty tensor of the
same type; the shape and the bytes are put in when the file is written, weight by weight.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from htp_export.files.protobuf_bytes import Weight

__all__ = ["stand_ins", "stored"]

_SMALL = 1024  # bytes, of which a copy costs nothing
_MOST = 1 << 30  # bytes; torch decides by the whole size whether a model still fits into one file


def stand_ins(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Name → an empty tensor, for weights whose bytes can be had without torch's exporter.

    Examples:
        >>> stand_ins({"weight": torch.ones(16, 64), "bias": torch.ones(16)})
        {'weight': tensor([])}
    """
    plain = {name: weight for name, weight in weights.items() if _is_plain(weight)}
    if sys.byteorder != "little" or sum(weight.nbytes for weight in plain.values()) > _MOST:
        return {}
    return {name: torch.empty(0, dtype=weight.dtype) for name, weight in plain.items()}


def _is_plain(weight: Any) -> bool:
    return (
        type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.layout is torch.strided
        and weight.device.type == "cpu"
        and weight.nbytes > _SMALL
        and not (weight.is_quantized or weight.is_conj() or weight.is_neg())
    )


def stored(weight: torch.Tensor) -> Weight:
    r"""A weight's shape and bytes; the bytes are copied only where they do not lie in order, as of a transposed one.

    Examples:
        >>> bytes(stored(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).T).read())
        b'\x01\x03\x02\x04'
    """

    def read() -> memoryview:
        bytewise = weight.detach().contiguous().reshape(-1).view(torch.uint8)
        return memoryview(bytewise.numpy().data)

    return Weight(weight.nbytes, read, tuple(weight.shape))
