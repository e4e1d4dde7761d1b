"""``htp-export diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from htp_export.command.options import JSON_HAS_ALL, DepthOption, Idle, JsonOption
from htp_export.command.outputs import Writes, report, show_written, written_page
from htp_export.command.terminal import Steps, show
from htp_export.files.targets import Kind

EXAMPLE = "bert.onnx small.onnx"
PLACE = ("Look", 5)
IDLE = (Idle(("depth", "only_changed"), lambda given: given["as_json"], JSON_HAS_ALL),)


def diff_command(
    before: Annotated[Path, "The first ONNX file."],
    after: Annotated[Path, "The second."],
    depth: DepthOption = None,
    only_changed: Annotated[bool, "Leave out modules without changes."] = False,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None, "Write a page: both trees, side by side.", Writes(Kind.PAGE)
    ] = None,
) -> None:
    """Show the differences between two files, by module."""
    from htp_export.capabilities.diff.differing import diff
    from htp_export.capabilities.diff.drawing import difference_page, render
    from htp_export.files.text_files import write_text

    with Steps(quiet=as_json).step(f"comparing {before} and {after}"):
        difference = diff(before, after)
    if output is not None:
        write_text(output, difference_page(difference, before.name, after.name))
    report(difference, as_json, lambda: render(difference, depth=depth, only_changed=only_changed))
    if output is not None and not as_json and (written := written_page(output)):
        show_written(written)
        show(f"next: open {output} in a browser")
