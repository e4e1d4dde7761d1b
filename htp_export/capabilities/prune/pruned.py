"""The result of ``prune``: precision, sparsity and bytes by module."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.hierarchy import ModuleInfo
from htp_export.model.module_facts import ModuleFacts
from htp_export.model.tagged import TaggedResult
from htp_export.reporting.columns import CLASS_NAME, Column, chosen, percent, si
from htp_export.reporting.tables import (
    BYTES_COLUMNS,
    PRECISION,
    SPARSITY,
    CompressedModule,
    ModuleTable,
)


@dataclass(frozen=True, kw_only=True)
class PrunedModule(CompressedModule):
    """One module with all below it: how much of its weights is zero or gone.

    Attributes:
        nodes: Its nodes after.
        weights_before: Elements of its weights before: initializers that its products multiply
            with, and tables.
        weights_after: Elements after; fewer if channels, heads or blocks were cut out.
        zeros_before: Of ``weights_before``, those that were zero.
        zeros_after: Of ``weights_after``, those that are zero.
    """

    nodes: int = 0
    weights_before: int = 0
    weights_after: int = 0
    zeros_before: int = 0
    zeros_after: int = 0

    @property
    def sparsity(self) -> float:
        """Share of the elements before that are zero or gone now."""
        if not self.weights_before:
            return 0.0
        return (self.weights_before - self.weights_after + self.zeros_after) / self.weights_before

    @property
    def sparsity_before(self) -> float:
        """Share of the elements that were zero before."""
        return self.zeros_before / self.weights_before if self.weights_before else 0.0


PRUNED_COLUMNS: tuple[Column[Any], ...] = (
    CLASS_NAME,
    PRECISION,
    SPARSITY,
    Column("sparsity_before", "sparsity before", unit="%", keep=3),
    Column("weights_before", "weights before", keep=4),
    Column("weights_after", "weights after", keep=5),
    Column("zeros_before", "zeros before"),
    Column("zeros_after", "zeros", keep=6),
    *BYTES_COLUMNS,
)
"""What is known of each module."""

_DRAWN = (
    "class_name",
    "sparsity",
    "weights_before",
    "weights_after",
    "zeros_after",
    "bytes_before",
    "bytes_after",
)


@dataclass(frozen=True)
class Pruned(TaggedResult, ModuleTable):
    """The result of `htp_export.prune`.

    Attributes:
        modules: Module path → how much of its weights is zero or gone. A weight that several
            modules read counts in each of them, and once in every module above them.
        plan: Module path → what the plan says of it, as text, for the modules that a rule names.
        removed: The residual blocks that were removed.
        cut: Weight → its shape before and after, for weights that became smaller.
        ranks: Weight → its rank, for weights that became products of two matrices.
        whole: Weight → why it stays as it is, for those whose channels cannot be cut, or that a
            rank would not make smaller.
        short: Weight → what stays of its channels or heads, where the share of the plan cannot be
            reached.
        model: The pruned model.
    """

    columns = PRUNED_COLUMNS
    derived = ("notes", "tags")

    modules: Mapping[str, PrunedModule]
    plan: Mapping[str, str]
    removed: tuple[str, ...] = ()
    cut: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    short: Mapping[str, str] = field(default_factory=dict)
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def drawn(self) -> Sequence[Column[Any]]:
        """The columns of the table as text."""
        return chosen(self.columns, _DRAWN)

    @property
    def listed(self) -> Sequence[PrunedModule]:
        """The modules that have weights."""
        return [
            module for module in self.modules.values() if module.weights_before or not module.path
        ]

    @property
    def summary(self) -> str:
        """The sparsity of the whole, and its bytes."""
        root = self.modules[""]
        size = f"{si(root.bytes_before, 'B')} of weights before, {si(root.bytes_after, 'B')} after"
        return f"{percent(root.sparsity)} of {root.weights_before:,} weights are zero or removed; {size}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Further facts, a line each."""
        root = self.modules[""]
        notes = [f"removed: {', '.join(self.removed)}"] if self.removed else []
        for name, shapes in itertools.islice(self.cut.items(), 1):
            before, after = ("×".join(map(str, shape)) for shape in shapes)  # noqa: RUF001 - "times"
            notes.append(
                f"{len(self.cut)} weights are smaller, such as {name}: {before} before, {after} after"
            )
        notes += [f"{name}: {what}" for name, what in self.short.items()]
        for name, rank in itertools.islice(self.ranks.items(), 1):
            notes.append(
                f"{len(self.ranks)} weights are products of two matrices, such as {name}, of rank {rank}"
            )
        if self.whole:
            notes.append(f"{len(self.whole)} weights stay as they are:")
        for reason in dict.fromkeys(self.whole.values()):
            names = [name for name, other in self.whole.items() if other == reason]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            notes.append(f"  {', '.join(names[:3])}{more}: {reason}")
        if root.zeros_after > root.zeros_before:
            notes.append(
                "zeros take as many bytes as other numbers: files and ONNX Runtime keep weights dense"
            )
        return tuple(notes)


Counts = tuple[int, int]
"""Elements of a weight, and how many of them are zero."""


def pruned_modules(
    modules: Iterable[ModuleFacts],
    weights: Iterable[tuple[Sequence[str], Counts, Counts]],
    bytes_before: Mapping[str, int],
) -> dict[str, PrunedModule]:
    """Module path → its row, of weights with the modules that read them; each weight once in every module.

    Examples:
        >>> weight = (("a.q", "a.k"), (8, 0), (8, 4))
        >>> rows = pruned_modules([ModuleFacts(path, "") for path in ("", "a", "a.q")], [weight], {})
        >>> [(path, row.weights_before, row.sparsity) for path, row in rows.items()]
        [('', 8, 0.5), ('a', 8, 0.5), ('a.q', 8, 0.5)]
    """
    from htp_export.capabilities.quantize.precisions import weight_precision

    sums: defaultdict[str, Any] = defaultdict(Counter)
    for owners, (weights_before, zeros_before), (weights_after, zeros_after) in weights:
        counts = {"weights_before": weights_before, "zeros_before": zeros_before}
        counts |= {"weights_after": weights_after, "zeros_after": zeros_after}
        for path in {up for owner in owners for up in tags.ancestors(owner)}:
            sums[path].update(counts)
    return {
        module.path: PrunedModule(
            **{each.name: getattr(module, each.name) for each in fields(ModuleInfo)},
            **sums[module.path],
            precision=weight_precision(module.weight_bytes_by_dtype)
            if module.weight_bytes_by_dtype
            else None,
            nodes=module.nodes,
            bytes_before=bytes_before.get(module.path, 0),
            bytes_after=module.weight_bytes,
        )
        for module in modules
    }
