"""Findings: the changes that passes would apply to a graph, and the nodes that they leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from htp_export.format import tags
from htp_export.reporting.columns import Column, si
from htp_export.reporting.result import Modules, Result, Table
from htp_export.reporting.tag_facts import TagFacts


@dataclass(frozen=True)
class Kind:
    """A kind of finding: its title, the pass that fixes it, and the reason if no pass does."""

    title: str
    fixed_by: str | None
    why: str = ""


KINDS: Mapping[str, Kind] = {
    "matmul_add_2d": Kind("MatMul + Add of matrices", "fuse_matmul_add"),
    "matmul_add_3d": Kind("MatMul + Add with batch", "fuse_matmul_add_3d"),
    "qkv_projections": Kind("three projections of one tensor", "merge_parallel_projections"),
    "attention": Kind("attention in single steps", "fuse_for_onnxruntime"),
    "double_scaling": Kind("queries and keys scaled apart", "cleanup_attention"),
    "layer_norm": Kind("LayerNorm in single steps", "fuse_single_steps"),
    "rms_norm": Kind("RMSNorm in single steps", "fuse_single_steps"),
    "gelu_erf": Kind("GELU in single steps", "fuse_single_steps"),
    "gelu_tanh": Kind("GELU by tanh in single steps", "fuse_single_steps"),
    "softmax": Kind("softmax in single steps", "fuse_single_steps"),
    "log_softmax": Kind("log-softmax in single steps", "fuse_single_steps"),
    "conv_batchnorm": Kind("Conv + BatchNormalization", "fuse_conv_batchnorm"),
    "conv_relu": Kind("Conv + Relu", "fuse_conv_relu"),
    "identity": Kind("Identity", "eliminate_identity_ops"),
    "identity_weight": Kind("Identity around a weight", "eliminate_identity_ops"),
    "identity_cast": Kind("Cast to the same type", "eliminate_identity_ops"),
    "cast_chain": Kind("Cast after Cast", None, "no pass merges casts"),
    "identity_transpose": Kind("Transpose that moves nothing", "eliminate_redundant_transposes"),
    "cancelling_transposes": Kind("Transposes that cancel", "eliminate_redundant_transposes"),
    "chained_transposes": Kind("Transpose after Transpose", "eliminate_redundant_transposes"),
    "identity_reshape": Kind("Reshape to the same shape", "eliminate_identity_ops"),
    "chained_reshapes": Kind("Reshape after Reshape", "merge_reshapes"),
    "shape_chain": Kind("sizes computed from Shape", "simplify_shape_chains"),
    "unfolded_constants": Kind("work on constants alone", "fold_constants"),
    "duplicate_constants": Kind("equal constants", "eliminate_duplicate_constants"),
    "unused_initializers": Kind("weights that nothing reads", "eliminate_unused_initializers"),
    "dead_nodes": Kind("nodes that nothing needs", "eliminate_dead_nodes"),
}
"""Kinds of findings, in the order of tables. A change by any other pass has the name of that pass
as its kind."""

SINGLE_STEPS = ("layer_norm", "rms_norm", "gelu_erf", "gelu_tanh", "softmax", "log_softmax")
"""Kinds of operators in single steps, whose findings have the bytes that they move."""


def title_of(kind: str) -> str:
    """The title of a kind of finding, for readers.

    Examples:
        >>> title_of("chained_reshapes"), title_of("eliminate_expands")
        ('Reshape after Reshape', 'eliminate expands')
    """
    return KINDS[kind].title if kind in KINDS else kind.replace("_", " ")


@dataclass(frozen=True)
class Moved:
    """Bytes that nodes read and write, as `cost` counts them with open sizes of 1.

    Attributes:
        read: Bytes that the nodes read.
        written: Bytes that the nodes write.
        read_after: Bytes that the new nodes read.
        written_after: Bytes that the new nodes write.
    """

    read: int
    written: int
    read_after: int
    written_after: int

    def __str__(self) -> str:
        """All four numbers.

        Examples:
            >>> print(Moved(5_120, 3_100, 1_000, 1_000))
            reads 5.120 kB → 1.000 kB, writes 3.100 kB → 1.000 kB
        """
        numbers = (self.read, self.read_after, self.written, self.written_after)
        read, read_after, written, written_after = (si(each, "B") for each in numbers)
        return f"reads {read} → {read_after}, writes {written} → {written_after}"


@dataclass(frozen=True)
class Finding:
    """Nodes that one rewrite of a pass would change, or that match a pass and stay.

    Attributes:
        kind: A key of `KINDS`, or the name of the pass.
        module: The deepest module that contains all its nodes; ``""`` is the root, and the module
            of all findings in untagged models.
        nodes: Names of its nodes; for a node without a name, the name of its first output.
        fixed_by: The pass of `htp_export.optimize` that changes it; None if there is none.
        why: Why no pass changes it.
        detail: Details of this finding.
        tensors: The constants of the finding.
        level: The level of `htp_export.optimize` from which on the pass may run; None if there is
            none.
        moved: Bytes that its nodes read and write, and that the operator in their place reads and writes;
            None for other findings than operators in single steps, or if a size is unknown.
    """

    kind: str
    module: str
    nodes: tuple[str, ...]
    fixed_by: str | None
    why: str = ""
    detail: str = ""
    tensors: tuple[str, ...] = ()
    level: str | None = None
    moved: Moved | None = None


@dataclass(frozen=True)
class Forensics(Result):
    """The result of `forensics`.

    Attributes:
        findings: All findings, by kind in the order of `KINDS`, then in graph order.
        nodes: Number of nodes of the model.
        tags: The tags of the model: source, reasons, untagged nodes.
        failed: Passes that could not run on this model → the reason; their findings are unknown.
    """

    derived = ("kinds", "modules")

    findings: tuple[Finding, ...]
    nodes: int
    tags: TagFacts | None = None
    failed: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """Kind → number of findings, in the order of `KINDS`."""
        counts = Counter(finding.kind for finding in self.findings)
        return {kind: counts[kind] for kind in dict.fromkeys((*KINDS, *counts)) if counts[kind]}

    @cached_property
    def modules(self) -> Mapping[str, Mapping[str, int]]:
        """Module path → kind → number of findings at or below it.

        Modules without findings are left out.
        """
        found: dict[str, Counter[str]] = {}
        for finding in self.findings:
            for path in tags.ancestors(finding.module):
                found.setdefault(path, Counter())[finding.kind] += 1
        return Modules({path: dict(found[path]) for path in sorted(found, key=tags.path_order)})

    def of(self, kind: str) -> tuple[Finding, ...]:
        """Return the findings of one kind."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    @property
    def by_kind(self) -> list[KindSummary]:
        """A summary for each kind that was found."""
        return [_summed(kind, self.of(kind)) for kind in self.kinds]

    @property
    def summary(self) -> str:
        """The numbers of findings, and of findings that a pass fixes, in one line."""
        if not self.findings:
            return f"nothing found in {self.nodes} nodes"
        fixed = sum(finding.fixed_by is not None for finding in self.findings)
        count = "1 finding" if len(self.findings) == 1 else f"{len(self.findings)} findings"
        return f"{count} in {self.nodes} nodes, {fixed} of which a pass changes"

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines below the table: the passes that could not run."""
        return tuple(
            f"{name} could not run, and is left out: {why}" for name, why in self.failed.items()
        )

    def table(self) -> Table | None:
        """The findings by kind."""
        return (KIND_COLUMNS, self.by_kind) if self.findings else None


@dataclass(frozen=True)
class KindSummary:
    """All findings of one kind; ``fix`` contains the level of the pass if that is not ``exact``."""

    title: str
    count: int
    nodes: int
    fix: str
    not_fixed: str


KIND_COLUMNS: tuple[Column[KindSummary], ...] = (
    Column("count", "found"),
    Column("nodes", "nodes"),
    Column("title", "what", right=False),
    Column("fix", "fixed by", right=False),
    Column("not_fixed", "not fixed", style="yellow", right=False),
)
"""Columns of the table of kinds."""


def _summed(kind: str, findings: tuple[Finding, ...]) -> KindSummary:
    fixed = [finding for finding in findings if finding.fixed_by is not None]
    fix = ""
    if fixed:
        fix, level = fixed[0].fixed_by or "", fixed[0].level
        if level not in (None, "exact"):
            fix += f" ({level})"
    reasons = Counter(finding.why for finding in findings if finding.fixed_by is None).most_common()
    if len(reasons) == 1 and not fixed:
        not_fixed = reasons[0][0]
    else:
        not_fixed = "; ".join(f"{count}: {why}" for why, count in reasons)
    nodes = {name for finding in findings for name in finding.nodes}
    return KindSummary(title_of(kind), len(findings), len(nodes), fix, not_fixed)
