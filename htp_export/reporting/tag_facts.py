"""Facts about a model's tags, as a sentence below each table by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_CARRIED = "recovered by carry"
_EVIDENCE = {
    "scope": "captured at export",
    "shared": "shared by several modules",
    "fused": "fused from several modules",
    "flow": "found by the nodes around them",
    "function": "calls of module functions",
    "spliced": "spliced in",
    "parameters": "found by their parameters",
    **dict.fromkeys(("tensor", "node", "initializer", "values", "region"), _CARRIED),
    "inserted": "inserted by a tool",
}
"""Word of ``htp.reason`` → text; an unknown word, of a later version, is shown as it is."""


@dataclass(frozen=True)
class Evidence:
    """How the owners of some nodes were determined.

    ``text`` describes it, and ``reasons`` are the words of ``htp.reason`` that it covers.
    """

    text: str
    nodes: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.nodes:,} {self.text}"


def evidence_of(reasons: Mapping[str, int]) -> tuple[Evidence, ...]:
    """Group node counts by evidence, most nodes first; ``reasons``: ``htp.reason`` → nodes.

    Examples:
        >>> ", ".join(map(str, evidence_of({"node": 2, "scope": 4, "tensor": 3})))
        '5 recovered by carry, 4 captured at export'
    """
    words_of: dict[str, list[str]] = {}
    for reason in reasons:
        words_of.setdefault(_EVIDENCE.get(reason, reason), []).append(reason)
    evidence = []
    for text, words in words_of.items():
        nodes = sum(reasons[word] for word in words)
        evidence.append(Evidence(text, nodes, tuple(words)))
    return tuple(sorted(evidence, key=lambda entry: -entry.nodes))


@dataclass(frozen=True)
class TagFacts:
    """Facts about the module tags of a model.

    Attributes:
        source: Source of the owners of nodes: ``"htp"``, ``"torch"`` or ``"none"``, as in
            `TaggedModel.source`.
        reasons: Evidence for the owners, a word of ``docs/format.md`` → nodes; most first.
        untagged: Number of nodes without a module.
        lost: Whether the model knows its modules, but its nodes have lost their tags.

    Examples:
        >>> print(TagFacts("htp", {"scope": 12, "fused": 2}, untagged=1))
        1 node has no module; the others: 12 captured at export, 2 fused from several modules
    """

    source: str = "none"
    reasons: Mapping[str, int] = field(default_factory=dict)
    untagged: int = 0
    lost: bool = False

    @property
    def advice(self) -> str:
        """Advice for missing or inexact tags; ``""`` if they are exact."""
        if self.lost:
            scopes = ""
            if self.source == "torch":
                scopes = " Modules are read from torch's own scopes, which are not exact."
            return (
                "The nodes of this file have lost their module tags: "
                f"htp_export.carry(before, after) brings them back.{scopes}"
            )
        if self.source == "none":
            return (
                "This file has no module tags. "
                "Export it with htp_export.export(...) in place of torch.onnx.export(...), "
                "or tag it with htp_export.carry(model, file)."
            )
        if self.source == "torch":
            return (
                "The modules are read from torch's own scopes, which are not exact. "
                "Export with htp_export.export(...) in place of torch.onnx.export(...) for exact ones."
            )
        return ""

    @property
    def headline(self) -> str:
        """Whether every node has a module, in a few words."""
        if self.source == "none":
            return "no module tags"
        if self.source == "torch":
            return "modules are read from torch's own scopes"
        if self.untagged:
            return f"{self.untagged:,} node{' has' if self.untagged == 1 else 's have'} no module"
        return "every node has a module"

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """How the owners of the nodes were determined, most nodes first."""
        return evidence_of(self.reasons)

    def __str__(self) -> str:
        if self.source != "htp":
            return self.advice
        evidence = ", ".join(map(str, self.evidence))
        if not evidence:
            return self.headline
        return f"{self.headline}{'; the others' if self.untagged else ''}: {evidence}"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self)


def tag_lines(
    *facts: TagFacts | None, names: Sequence[str] = ("before", "after")
) -> tuple[str, ...]:
    """The lines about tags below a table; for two files one each, or one if they are equal.

    Files that are read with torch's scopes have no line, because ``load`` warns of them. None, for
    a file whose tags were not examined, has no line either.

    Examples:
        >>> for line in tag_lines(TagFacts("htp", {"scope": 3}), TagFacts("htp", {"scope": 2, "fused": 1})):
        ...     print(line)
        before: every node has a module: 3 captured at export
        after: every node has a module: 2 captured at export, 1 fused from several modules
        >>> tag_lines(*[TagFacts("htp", {"scope": 3})] * 2), tag_lines(None)
        (('both: every node has a module: 3 captured at export',), ())
    """
    known = [fact for fact in facts if fact is not None]
    texts = ["" if fact.source == "torch" and not fact.lost else str(fact) for fact in known]
    if len(texts) < 2:
        return tuple(filter(None, texts))
    if len(set(texts)) == 1:
        return (f"both: {texts[0]}",) if texts[0] else ()
    return tuple(f"{name}: {line}" for name, line in zip(names, texts, strict=True) if line)
