"""One stage of a model, and what is known of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from htp_export.runtime.declared_inputs import Input

__all__ = ["Stage", "StageTensor"]


@dataclass(frozen=True)
class StageTensor:
    """What is known of a tensor.

    Attributes:
        type: Its element type, by ONNX's name: ``"FLOAT"``; None where it is not known, or no tensor.
        shape: Sizes, names of sizes, or None for sizes without a name; None where even their number is not known.
    """

    type: str | None
    shape: tuple[int | str | None, ...] | None

    @classmethod
    def of(cls, value: ir.Value) -> StageTensor:
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
    """One stage of a model: whole modules that follow each other.

    Attributes:
        modules: The outermost modules that are completely in the stage, in order of execution. A module that is cut is
            in none.
        inputs: Input → its type and shape.
        outputs: Output → its type and shape.
        sources: Input → number of the stage that computes it, from 0; None for an input of the model.
        nodes: Number of nodes.
        parameter_bytes: Bytes of its initializers, without constants that earlier stages have, too.
        file: The file that was written; None if there is none.
        model: The model; None if it was written.
        files: All its files, ``file`` first, by their paths in the folder of ``file``.
        session_config: Session configuration entries that ONNX Runtime needs in order to load it.
    """

    modules: tuple[str, ...]
    inputs: Mapping[str, StageTensor]
    outputs: Mapping[str, StageTensor]
    sources: Mapping[str, int | None]
    nodes: int
    parameter_bytes: int
    file: Path | None = None
    model: ir.Model | None = field(default=None, repr=False, compare=False)
    files: tuple[str, ...] = ()
    session_config: Mapping[str, str] = field(default_factory=dict)
