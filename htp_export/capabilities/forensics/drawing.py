"""Findings of `forensics`, drawn for a terminal or a pipe: by kind, by module, or one by one."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.text import Text

from htp_export.capabilities.forensics.finding import KIND_COLUMNS, Finding, Forensics, title_of
from htp_export.format import tags
from htp_export.reporting.columns import Column
from htp_export.reporting.command_words import tag_note
from htp_export.reporting.folding import gathered
from htp_export.reporting.module_table import flat_table


def _nodes(finding: Finding) -> str:
    more = f", … ({len(finding.nodes)})" if len(finding.nodes) > 3 else ""
    return ", ".join(finding.nodes[:3]) + more


def _detail(finding: Finding) -> str:
    return finding.detail if finding.moved is None else f"{finding.detail}; {finding.moved}"


_FINDING: tuple[Column[Finding], ...] = (
    Column("module", "module", lambda finding: finding.module or "(root)", right=False),
    Column("kind", "what", text=title_of, right=False),
    Column(
        "fixed_by",
        "fixed by",
        lambda finding: finding.fixed_by or finding.why,
        style=lambda finding: "" if finding.fixed_by else "yellow",
        right=False,
    ),
    Column("nodes", "nodes", _nodes, right=False),
    Column("detail", "detail", _detail, style="dim", right=False),
)


def render_forensics(result: Forensics, *, depth: int | None = None) -> RenderableType:
    """A table with one line a kind, and one line a module with findings.

    Modules more than ``depth`` names below the root have no line.
    """
    if not result.findings:
        return Group(Text(result.summary), *map(Text, result.notes), *tag_note(result.tags))
    parts: list[RenderableType] = [flat_table(KIND_COLUMNS, result.by_kind, gap=2)]
    modules = [
        path for path in result.modules if path and (depth is None or path.count(".") < depth)
    ]
    if modules:
        parts += [Text(), _by_module(result, modules)]
    return Group(*parts, Text(), *map(Text, result.notes), *tag_note(result.tags))


def render_findings(result: Forensics) -> RenderableType:
    """A table with one line a finding; modules with the same findings share a line.

    The line of several modules lists the nodes of the first.
    """
    groups = gathered(result.findings, attrgetter("module"), attrgetter("kind", "fixed_by", "why"))
    table = flat_table(
        _FINDING, [replace(findings[0], module=name) for name, findings in groups], gap=2
    )
    return Group(table, Text(), *tag_note(result.tags))


def _by_module(result: Forensics, modules: list[str]) -> RenderableType:
    """A table with one line a module; modules with the same findings share it.

    A module whose parent has the same findings has no line.
    """

    def parent_of(path: str) -> str:
        return tags.nearest_above(path, result.modules) or ""

    def kinds_text(path: str) -> str:
        kinds = sorted(result.modules[path].items(), key=lambda item: -item[1])
        return ", ".join(f"{count} {kind}" for kind, count in kinds)

    shown = set(modules)
    finer: list[str] = []
    for path in modules:
        parent = parent_of(path)
        if parent not in shown or result.modules[parent] != result.modules[path]:
            finer.append(path)
    columns: list[Column[tuple[str, str]]] = [
        Column("found", "found", lambda line: sum(result.modules[line[1]].values())),
        Column("module", "module", lambda line: line[0], right=False),
        Column("kinds", "of which", lambda line: kinds_text(line[1]), style="dim", right=False),
    ]
    lines = [(name, paths[0]) for name, paths in gathered(finer, str, kinds_text)]
    return flat_table(columns, lines, gap=2)
