"""What became of one module of a model that was made smaller: precision, sparsity and bytes, of every result alike."""

from __future__ import annotations

from dataclasses import dataclass

from htp_export.format.hierarchy import ModuleInfo
from htp_export.results.columns import Column


@dataclass(frozen=True, kw_only=True)
class CompressedModule(ModuleInfo):
    """What became of one module, with all modules below it; ``""`` is the whole model.

    Attributes:
        precision: The precision of its weights now, or the one in which it computes: ``fp32``, ``int8``; ``mixed`` for
            several. None where that is not known.
        bytes_before: Size of all weights that its nodes read, biases too, before.
        bytes_after: The same afterwards, with scales and zero points.
    """

    precision: str | None = None
    bytes_before: int = 0
    bytes_after: int = 0

    @property
    def sparsity(self) -> float | None:
        """Share of its weights that are zero or gone; None where that was not counted."""
        return None

    @property
    def ratio(self) -> float | None:
        """The bytes after by the bytes before; None for a module without weights."""
        return self.bytes_after / self.bytes_before if self.bytes_before else None


PRECISION: Column[CompressedModule] = Column("precision", "precision", right=False, keep=4)
SPARSITY: Column[CompressedModule] = Column("sparsity", "sparsity", unit="%", keep=9)
BYTES_COLUMNS: tuple[Column[CompressedModule], ...] = (
    Column("bytes_before", "bytes before", unit="B", keep=7),
    Column("bytes_after", "bytes after", unit="B", keep=8),
    Column("ratio", "ratio", unit="%", keep=2),
)
"""The bytes, in every table of these modules."""
