"""One stage of a model, and what is known of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from htp_export.runtime.inputs import Input

__all__ = ["Stage", "Tensor"]


@dataclass(frozen=True)
class Tensor:
    """What is known of a tensor.

    Attributes:
        type: Its element type, by ONNX's name: ``"FLOAT"``; None where it is not known, or no tensor.
        shape: Sizes, names of sizes, or None for sizes without a name; None where even their number is not known.
    """

    type: str | None
    shape: tuple[int | str | None, ...] | None

    @classmethod
    def of(cls, value: ir.Value) -> Tensor:
        """What a graph says of a value."""
        known = Input.of(value)
        return cls(None if known.type is None else known.type.name, known.shape)

    def __str__(self) -> str:
        sizes = (
            "" if self.shape is None else f"[{', '.join('?' if size is None else str(size) for size in self.shape)}]"
        )
        return f"{self.type or 'unknown type'}{sizes}"


@dataclass(frozen=True)
class Stage:
    """One stage of a model: a contiguous run of whole modules.

    Attributes:
        modules: The outermost modules that are whole in it, in order of execution. A module that is cut, and what it
            computes around its submodules, is in none.
        inputs: Input → its type and shape.
        outputs: Output → the same.
        sources: Input → the number of the stage that computes it, from 0; None where it is an input of the model.
        nodes: How many nodes it has.
        parameter_bytes: Bytes of its initializers, without the constants that stages before it have too.
        file: Where it was written; None if it was not.
        model: The model; None where it was written.
        files: All its files, ``file`` first, by their paths in the folder of that.
    """

    modules: tuple[str, ...]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    sources: Mapping[str, int | None]
    nodes: int
    parameter_bytes: int
    file: Path | None = None
    model: ir.Model | None = field(default=None, repr=False, compare=False)
    files: tuple[str, ...] = ()
