"""``htp-export export-plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.command.file_options import FileArgument, JsonOption
from htp_export.command.outputs import Kind, Writes, report, show_written, written_page
from htp_export.command.plan_options import PlanArgument, RuleOption, read_rules
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx int8 --rule pooler=fp32 --to nncf -o nncf.json"
PLACE = 143


def export_plan_command(
    file: FileArgument,
    plan: PlanArgument = None,
    rule: RuleOption = None,
    *,
    to: Annotated[str, typer.Option(help="The tool: ort, nncf, modelopt.")],
    output: Annotated[Path, "The file to write.", Writes(Kind.JSON)],
    as_json: JsonOption = False,
) -> None:
    """Write a plan as the file that another tool reads."""
    from htp_export.capabilities.export_plan.plan_exporting import export_plan
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    wanted = read_rules(plan, rule, "PRECISION", named=PRECISIONS)
    with Steps(quiet=as_json).step(f"writing the plan of {file.name}"):
        result = export_plan(file, wanted, output, to=to)
    report(result, as_json)
    if not as_json:
        show_written(written_page(output))
