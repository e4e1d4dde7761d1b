"""What is in a graph, drawn for a terminal or a pipe: findings by kind and by module, and fingerprints."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from htp_export.findings.finding import KINDS, Forensics
from htp_export.fingerprints.families import Fingerprint
from htp_export.format import tags
from htp_export.show.folding import gathered
from htp_export.show.tag_note import tag_note

__all__ = ["render_findings", "render_fingerprint", "render_forensics"]


def render_forensics(found: Forensics, *, depth: int | None = None) -> RenderableType:
    """A table with a line for each kind, and one with a line for each module that has findings.

    Names are drawn as they are, whatever markup they look like.

    Args:
        found: What to draw.
        depth: Leave out modules more than so many names below the root; no modules where it is 0, all where it is None.
    """
    if not found.findings:
        return Group(Text(f"nothing found in {found.nodes} nodes"), *tag_note(found.tags))
    parts: list[RenderableType] = [_by_kind(found)]
    modules = [path for path in found.modules if path and (depth is None or path.count(".") < depth)]
    if modules:
        parts += [Text(), _by_module(found, modules)]
    return Group(*parts, Text(), *tag_note(found.tags))


def render_findings(found: Forensics) -> RenderableType:
    """A table with a line for each finding; those of alike modules are one, with the nodes of the first.

    Args:
        found: What to draw.
    """
    table = _table("module", "what", "fixed by", "nodes", "detail")
    alike = gathered(found.findings, lambda each: each.module, lambda each: (each.kind, each.fixed_by, each.why))
    for name, findings in alike:
        finding = findings[0]
        table.add_row(
            Text(name or "(root)"),
            Text(KINDS[finding.kind].title),
            Text(finding.fixed_by or finding.why, style="" if finding.fixed_by else "yellow"),
            Text(", ".join(finding.nodes[:3]) + (f", … ({len(finding.nodes)})" if len(finding.nodes) > 3 else "")),
            Text(finding.detail, style="dim"),
        )
    return Group(table, Text(), *tag_note(found.tags))


def render_fingerprint(found: Fingerprint) -> RenderableType:
    """The family, the evidence, and a table of the repeated blocks.

    Args:
        found: What to draw.
    """
    parts: list[RenderableType] = [Text(found.family, style="bold"), *(Text(f"  {fact}") for fact in found.evidence)]
    if found.blocks:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for _ in range(2):
            table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold", style="cyan")
        table.add_column(overflow="fold", style="dim")
        for block in found.blocks:
            first = (block.modules or block.starts)[0]
            table.add_row(f"{block.count} ×", f"{block.nodes} nodes", Text(block.name), Text(first))  # noqa: RUF001 - "times"
        parts += [Text(), table]
    return Group(*parts, Text(), *tag_note(found.tags))


def _by_kind(found: Forensics) -> Table:
    table = _table("found", "nodes", "what", "fixed by", "not fixed")
    for row in found.summary():
        table.add_row(str(row.count), str(row.nodes), row.title, Text(row.fix), Text(row.not_fixed, style="yellow"))
    return table


def _by_module(found: Forensics, modules: list[str]) -> Table:
    """A line for each module, alike ones once, without those that only hold another one with the same findings."""
    table = _table("found", "module", "of which")

    def above(path: str) -> str:
        return next((up for up in tags.ancestors(path) if up != path and up in found.modules), "")

    def told(path: str) -> str:
        kinds = sorted(found.modules[path].items(), key=lambda item: -item[1])
        return ", ".join(f"{count} {kind}" for kind, count in kinds)

    shown = set(modules)
    finer = [p for p in modules if above(p) not in shown or found.modules[above(p)] != found.modules[p]]
    for name, paths in gathered(finer, str, told):
        count = sum(found.modules[paths[0]].values())
        table.add_row(str(count), Text(name), Text(told(paths[0]), style="dim"))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        number = column in ("found",) or (column == "nodes" and columns[0] == "found")
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table
