"""The opset that was asked for, against those that torch writes: it only logs that it wrote another."""

from __future__ import annotations

from htp_export.errors import InputError
from htp_export.exporter.capture import torch_internals


def check_opset(opset: int | None, *, dynamo: bool) -> None:
    """Refuse an opset that an exporter of torch cannot write, with an `InputError`; None is torch's own choice.

    Examples:
        >>> check_opset(18, dynamo=True)
    """
    if opset is None:
        return
    lowest, highest = torch_internals.opset_range(dynamo=dynamo)
    if not lowest <= opset <= highest:
        exporter = "dynamo" if dynamo else "TorchScript"
        raise InputError(f"opset {opset}: torch's {exporter} exporter writes opsets {lowest} to {highest}")


def other_opset(asked: int | None, written: int | None) -> str | None:
    """Say that the file has another opset than the one that was asked for; None if there is nothing to say.

    Either is None where there is none: torch chose, or the file imports no ONNX operators.

    Examples:
        >>> other_opset(7, 18)
        'opset 7 was asked for, and torch wrote opset 18, as it could not convert the model'
    """
    if asked is None or written is None or asked == written:
        return None
    return f"opset {asked} was asked for, and torch wrote opset {written}, as it could not convert the model"
