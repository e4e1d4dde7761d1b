"""``htp-export forensics``, ``htp-export fingerprint`` and ``htp-export diff``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from htp_export.cli.file_options import DepthOption, FileArgument, JsonOption, SelectOption
from htp_export.cli.outputs import check_output, show_written, written_page
from htp_export.cli.terminal import Steps, print_json, show

if TYPE_CHECKING:
    from htp_export.passes.registry import Level

__all__ = ["diff_command", "fingerprint_command", "forensics_command"]


def forensics_command(
    file: FileArgument,
    select: SelectOption = None,
    depth: DepthOption = None,
    every: Annotated[bool, typer.Option("--list", help="A line for each finding.")] = False,
    level: Annotated[
        str, typer.Option(help="What passes may do to results: exact, tolerant or fused; exact takes the least time.")
    ] = "fused",
    as_json: JsonOption = False,
) -> None:
    """Show what could be simplified in each module.

    Each finding names the pass that does it.
    """
    from htp_export.findings.investigation import forensics
    from htp_export.show.findings import render_findings, render_forensics

    with Steps(quiet=as_json).step(f"looking into {file}"):
        found = forensics(file, select=select or None, level=cast("Level", level))
    if as_json:
        print_json(found.to_dict())
    else:
        show(render_findings(found) if every else render_forensics(found, depth=depth))


def fingerprint_command(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show what kind of network it is, and why.

    The blocks that it repeats, too.
    """
    from htp_export.fingerprints.families import fingerprint
    from htp_export.show.findings import render_fingerprint

    with Steps(quiet=as_json).step(f"looking into {file}"):
        found = fingerprint(file)
    if as_json:
        print_json(found.to_dict())
    else:
        show(render_fingerprint(found))


def diff_command(
    before: Annotated[Path, typer.Argument(help="The first ONNX file.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="The second.", show_default=False)],
    depth: DepthOption = None,
    only_changed: Annotated[bool, typer.Option("--only-changed", help="Leave out what is the same.")] = False,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a page: both trees, side by side.", show_default=False)
    ] = None,
) -> None:
    """Show what differs between two files, by module."""
    from htp_export.differences.differing import diff
    from htp_export.show.differences import render

    if output is not None:
        check_output(output, [before, after], page=True)
    with Steps(quiet=as_json).step(f"comparing {before} and {after}"):
        found = diff(before, after)
    if output is not None:
        from htp_export.show.page.comparison import difference_page
        from htp_export.show.text_file import write_text

        write_text(output, difference_page(found, before, after))
    if as_json:
        print_json(found.to_dict())
    else:
        show(render(found, depth=depth, only_changed=only_changed))
        if output is not None and (written := written_page(output)):
            show_written(written)
            show(f"next: open {output} in a browser")
