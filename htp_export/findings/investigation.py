"""Forensics: every pattern of a graph that somebody may want to be otherwise, by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from htp_export.findings.finding import KINDS, Finding, Forensics, Match, node_name
from htp_export.findings.patterns.activation import gelus, softmaxes
from htp_export.findings.patterns.attention import attentions, double_scalings
from htp_export.findings.patterns.constants import dead, duplicates, unfolded, unused
from htp_export.findings.patterns.linear import matmul_adds, projections
from htp_export.findings.patterns.movement import casts, identities, reshapes, transposes
from htp_export.findings.patterns.normalization import conv_neighbours, norms
from htp_export.findings.patterns.shapes import shape_chains
from htp_export.findings.trials import tried
from htp_export.format import tags
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.inlining import read_flat
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel

__all__ = ["forensics"]

_MATCHERS: Sequence[Callable[[GraphFacts], Iterator[Match]]] = (
    matmul_adds,
    projections,
    attentions,
    double_scalings,
    norms,
    gelus,
    softmaxes,
    conv_neighbours,
    identities,
    casts,
    transposes,
    reshapes,
    shape_chains,
    unfolded,
    duplicates,
    unused,
    dead,
)


@names_model_faults("model")
def forensics(model: ModelSource, *, select: str | Sequence[str] | None = None, try_passes: bool = True) -> Forensics:
    """What is in a graph that could be otherwise: pairs that are one operator, work done twice or for nothing.

    For each finding: its nodes, the module it lies in, the pass of `htp_export.optimize` that changes it, and why none
    does where none does. That is tried: the passes run on a copy, which shares the weights, and what is found there
    again is not fixed.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``. It is not changed. Without tags
            everything is found, too, and belongs to the root.
        select: Only what lies in these modules; see `htp_export.format.tags.select` for the language.
        try_passes: Whether to run the passes. Without, ``fixed_by`` is told from the pattern alone, which takes less
            time on large models, and is wrong where a pass has conditions that a pattern does not see.

    Returns:
        The findings; `htp_export.findings.finding.KINDS` lists their kinds.

    Raises:
        FileError: The file cannot be read.
        SelectorError: The selector cannot be read, or matches nothing.
        UntaggedModelError: Modules are selected, and the model has no tags.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(approximate="tanh")).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 5, 4),), opset_version=18, verbose=False)
        >>> [(found.kind, found.module, found.fixed_by) for found in forensics(program).findings]
        [('matmul_add_3d', '0', 'fuse_matmul_add_3d'), ('gelu_tanh', '1', 'fuse_for_onnxruntime')]
    """
    tagged = read_flat(model)
    chosen = None if select is None else tagged.select(select)
    found = _look(tagged)
    if chosen is not None:
        found = [finding for finding in found if any(tags.is_under(finding.module, path) for path in chosen)]
    settled = tried(tagged, found, _look) if try_passes else tuple(found)
    return Forensics(settled, len(tagged.nodes), tagged.tag_facts)


def _look(tagged: TaggedModel) -> list[Finding]:
    """Every pattern of a model, in the order of tables."""
    facts = GraphFacts(tagged)
    matches = [match for matcher in _MATCHERS for match in matcher(facts)]
    order = {kind: place for place, kind in enumerate(KINDS)}
    return [_finding(match, facts) for match in sorted(matches, key=lambda match: order[match.kind])]


def _finding(match: Match, facts: GraphFacts) -> Finding:
    kind = KINDS[match.kind]
    fixed = kind.fixed_by if not match.blocked else None
    return Finding(
        kind=match.kind,
        module=facts.module_of(match.nodes or match.readers),
        nodes=tuple(node_name(node) for node in match.nodes or match.readers),
        fixed_by=fixed,
        why="" if fixed else match.blocked or kind.why,
        detail=match.detail,
        tensors=match.tensors,
    )
