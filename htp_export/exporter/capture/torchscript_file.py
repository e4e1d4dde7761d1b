"""The file of a TorchScript export: written whole, with weights that stay where they are until then.

torch copies each weight four times on its way into a file. It is given an empty tensor in its place; the shape and the
bytes are put in when the file is written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from htp_export.errors import CaptureError
from htp_export.files.protobuf_bytes import Weight
from htp_export.files.replacing import replace_file

_SMALL = 1024  # bytes, of which a copy costs nothing
_MOST = 1 << 30  # bytes; torch decides by the whole size whether a model still fits into one file


@dataclass
class KeptWeights:
    """The weights that are not in the bytes that torch made."""

    weights: dict[str, Weight]  # name of an initializer → its contents
    whole: Callable[[], bytes]  # makes the bytes as torch makes them, with all weights

    @classmethod
    def of(
        cls, weights: Mapping[str, Any], empty: Iterable[str], copied: Mapping[str, bytes], whole: Callable[[], bytes]
    ) -> KeptWeights:
        """Keep the weights for which torch was given stand-ins, and those that it copied."""
        kept = {name: Weight.of(data) for name, data in copied.items()}
        kept.update((name, stored(weights[name])) for name in empty)
        return cls(kept, whole)


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


def write_tagged(capture: Any, f: Any, chunks: Iterable[bytes | memoryview]) -> bool:
    """Write the tagged file, if the capture can make its pieces; else leave no trace of it."""
    began = f.tell() if hasattr(f, "seekable") and f.seekable() else None

    def pieces() -> Iterator[bytes | memoryview]:
        pieces_left = iter(chunks)
        while (piece := capture.step("writing the tagged file", next, pieces_left, None)) is not None:
            yield piece
        if capture.fault is not None:
            raise capture.fault

    try:
        write(f, pieces())
    except CaptureError as fault:
        if fault is not capture.fault or (began is None and not isinstance(f, (str, os.PathLike))):
            raise  # what was written to a stream stays
        if began is not None:
            f.seek(began)
            f.truncate()
        return False
    return True


def write(f: Any, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file whole: beside its place first, then into it, so that a failure leaves what was there."""
    if not isinstance(f, (str, os.PathLike)):
        for chunk in chunks:
            f.write(chunk)
        return
    with replace_file(Path(f)) as new, new.open("wb") as opened:
        for chunk in chunks:
            opened.write(chunk)
