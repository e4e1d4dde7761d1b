"""The result of ``prune``: precision, sparsity and bytes by module."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.prune.activations import ZeroCount
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
    """One module with its descendants: how much of its weights is zero or removed.

    Attributes:
        nodes: Its nodes after.
        weights_before: Elements of its weights before: initializers that its products multiply
            with, and tables.
        weights_after: Elements after; fewer if channels, heads or blocks were cut out.
        zeros_before: The zeros among ``weights_before``.
        zeros_after: The zeros among ``weights_after``.
        activations: Elements of outputs for which the plan has ``activations``, of the module and
            its descendants, in all runs of the data.
        activation_zeros_before: The zeros among them before they are pruned, with the weights that
            stay.
        activation_zeros_after: The zeros among them afterwards.
    """

    nodes: int = 0
    weights_before: int = 0
    weights_after: int = 0
    zeros_before: int = 0
    zeros_after: int = 0
    activations: int = 0
    activation_zeros_before: int = 0
    activation_zeros_after: int = 0

    @property
    def activation_sparsity(self) -> float | None:
        """Measured share of zeros in these outputs; None without such outputs."""
        return self.activation_zeros_after / self.activations if self.activations else None

    @property
    def activation_sparsity_before(self) -> float | None:
        """Measured share of zeros before; None without such outputs."""
        return self.activation_zeros_before / self.activations if self.activations else None

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
    Column("activations", "activations"),
    Column("activation_zeros_before", "activation zeros before"),
    Column("activation_zeros_after", "activation zeros"),
    Column("activation_sparsity_before", "activation sparsity before", unit="%", keep=8),
    Column("activation_sparsity", "activation sparsity", unit="%", keep=9),
)
"""The columns of a module."""

_DRAWN = (
    "class_name",
    "sparsity",
    "weights_before",
    "weights_after",
    "zeros_after",
    "bytes_before",
    "bytes_after",
)
_DRAWN_OF_ACTIVATIONS = ("activation_sparsity_before", "activation_sparsity")


@dataclass(frozen=True)
class Pruned(TaggedResult, ModuleTable):
    """The result of `htp_export.prune`.

    Attributes:
        modules: Module path → how much of its weights is zero or removed. A weight that several
            modules use counts in each of them, and once in every module above them.
        plan: Module path → its value in the plan, as text, for the modules that a rule names.
        removed: The residual blocks that were removed.
        cut: Weight → its shape before and after, for weights that became smaller.
        ranks: Weight → its rank, for weights that became products of two matrices.
        whole: Weight → why it is unchanged, for weights whose channels cannot be cut, or that a
            rank would not make smaller.
        short: Weight → the channels or heads that stay, if the share of the plan cannot be
            reached.
        thresholds: Module path → the largest absolute value of its output that becomes zero.
        unmasked: Module path → why its output is unchanged, for modules with ``activations`` in the
            plan.
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
    thresholds: Mapping[str, float] = field(default_factory=dict)
    unmasked: Mapping[str, str] = field(default_factory=dict)
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def drawn(self) -> Sequence[Column[Any]]:
        """The columns of the table as text."""
        has_activations = self.modules[""].activations
        further = _DRAWN_OF_ACTIVATIONS if has_activations else ()
        return chosen(self.columns, (*_DRAWN, *further))

    @property
    def listed(self) -> Sequence[PrunedModule]:
        """The modules that have weights, or pruned outputs."""
        modules = self.modules.values()
        return [
            each for each in modules if each.weights_before or each.activations or not each.path
        ]

    @property
    def summary(self) -> str:
        """The sparsity of the whole, and its bytes."""
        root = self.modules[""]
        size = f"{si(root.bytes_before, 'B')} of weights before, {si(root.bytes_after, 'B')} after"
        share = f"{percent(root.sparsity)} of {root.weights_before:,} weights"
        weights = f"{share} are zero or removed; {size}"
        if root.activation_sparsity is None:
            return weights
        zeros = f"{percent(root.activation_sparsity)} of {root.activations:,} activations"
        return f"{weights}; {zeros} are zero on the data"

    @property
    def notes(self) -> tuple[str, ...]:
        """Further facts, a line each."""
        root = self.modules[""]
        notes = [f"removed: {', '.join(self.removed)}"] if self.removed else []
        notes += self._notes_on_examples()
        if self.whole:
            notes.append(f"{len(self.whole)} weights stay as they are:")
        weights_of_reason: defaultdict[str, list[str]] = defaultdict(list)
        for name, reason in self.whole.items():
            weights_of_reason[reason].append(name)
        for reason, names in weights_of_reason.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            notes.append(f"  {', '.join(names[:3])}{more}: {reason}")
        for path, reason in self.unmasked.items():
            notes.append(f"the output of {path or '(root)'} stays as it is: {reason}")
        if root.zeros_after > root.zeros_before:
            notes.append(
                "zeros take as many bytes as other numbers: "
                "files and ONNX Runtime keep weights dense"
            )
        return tuple(notes)

    def _notes_on_examples(self) -> Iterator[str]:
        """Lines with an example of smaller weights and of ranks, and all missed shares."""
        for name, shapes in itertools.islice(self.cut.items(), 1):
            times = "×"  # noqa: RUF001 - the sign of a product, no letter
            before, after = (times.join(map(str, shape)) for shape in shapes)
            count = f"{len(self.cut)} weights are smaller"
            yield f"{count}, such as {name}: {before} before, {after} after"
        for name, problem in self.short.items():
            yield f"{name}: {problem}"
        for name, rank in itertools.islice(self.ranks.items(), 1):
            count = f"{len(self.ranks)} weights are products of two matrices"
            yield f"{count}, such as {name}, of rank {rank}"


Counts = tuple[int, int]
"""Elements of a weight, and zeros among them."""


def pruned_modules(
    modules: Iterable[ModuleFacts],
    weights: Iterable[tuple[Sequence[str], Counts, Counts]],
    bytes_before: Mapping[str, int],
    activations: Mapping[str, ZeroCount] = MappingProxyType({}),
) -> dict[str, PrunedModule]:
    """Module path → its row, from weights with the modules that use them, and outputs of modules.

    Each weight counts once in every module.

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
    for owner, count in activations.items():
        zeros = {"activation_zeros_before": count.before, "activation_zeros_after": count.after}
        for path in tags.ancestors(owner):
            sums[path].update({"activations": count.elements, **zeros})
    names = [field.name for field in fields(ModuleInfo)]
    rows: dict[str, PrunedModule] = {}
    for module in modules:
        by_dtype = module.weight_bytes_by_dtype
        rows[module.path] = PrunedModule(
            **{name: getattr(module, name) for name in names},
            **sums[module.path],
            precision=weight_precision(by_dtype) if by_dtype else None,
            nodes=module.nodes,
            bytes_before=bytes_before.get(module.path, 0),
            bytes_after=module.weight_bytes,
        )
    return rows
