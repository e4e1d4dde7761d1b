"""What a file knows about its tags, as a sentence: it stands under every table that is by module."""

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
"""Each word of ``htp.reason`` as it is shown; one that is not here, of a later version, is shown as it is."""


@dataclass(frozen=True)
class Evidence:
    """How many nodes have owners that are known alike: how, and the words of ``htp.reason`` that this stands for."""

    text: str
    nodes: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.nodes:,} {self.text}"


def evidence_of(reasons: Mapping[str, int]) -> tuple[Evidence, ...]:
    """How the owners of nodes are known, most nodes first, of the nodes of each word of ``htp.reason``.

    Examples:
        >>> ", ".join(map(str, evidence_of({"node": 2, "scope": 4, "tensor": 3})))
        '5 recovered by carry, 4 captured at export'
    """
    alike: dict[str, list[str]] = {}
    for reason in reasons:
        alike.setdefault(_EVIDENCE.get(reason, reason), []).append(reason)
    evidence = [
        Evidence(text, sum(reasons[word] for word in words), tuple(words))
        for text, words in alike.items()
    ]
    return tuple(sorted(evidence, key=lambda entry: -entry.nodes))


@dataclass(frozen=True)
class TagFacts:
    """What a model knows about its module tags.

    Attributes:
        source: Where the owners of nodes come from: ``"htp"``, ``"torch"`` or ``"none"``, as
            `TaggedModel.source` has it.
        reasons: How the owners are known, a word of ``docs/format.md`` → nodes; most first.
        untagged: Nodes that belong to no module.
        lost: Whether the model still knows its modules, and its nodes no longer.

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
        """What to do about tags that are missing or not exact; ``""`` where they are exact."""
        if self.lost:
            scopes = (
                " Modules are read from torch's own scopes, which are not exact."
                if self.source == "torch"
                else ""
            )
            return (
                "The nodes of this file have lost their module tags: "
                f"htp_export.carry(before, after) brings them back.{scopes}"
            )
        if self.source == "none":
            return (
                "This file has no module tags. "
                "Export it with htp_export.export(...) in place of torch.onnx.export(...)."
            )
        if self.source == "torch":
            return (
                "The modules are read from torch's own scopes, which are not exact. "
                "Export with htp_export.export(...) in place of torch.onnx.export(...) for exact ones."
            )
        return ""

    @property
    def headline(self) -> str:
        """The same in a few words: whether every node has a module."""
        if self.source == "none":
            return "no module tags"
        if self.source == "torch":
            return "modules are read from torch's own scopes"
        if self.untagged:
            return f"{self.untagged:,} node{' has' if self.untagged == 1 else 's have'} no module"
        return "every node has a module"

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """How the owners of the nodes are known, most nodes first."""
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
    """The line that stands under a table; for two files one for each, or one where both know the same.

    Files that are read with torch's own scopes have none: ``load`` has warned of these. None, where
    nobody asked, is no line.

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
