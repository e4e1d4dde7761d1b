"""``htp-export export-plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.command.file_options import FileArgument, JsonOption
from htp_export.command.idle_options import Idle
from htp_export.command.outputs import Kind, Writes, report, show_written, written_page
from htp_export.command.plan_options import DataOption, EntryOption, PlanArgument, RuleOption, read_data, read_rules
from htp_export.command.terminal import Steps

EXAMPLE = "bert.onnx int8 --rule pooler=fp32 --to nncf -o nncf.json"
PLACE = 143
IDLE = (
    Idle(("data", "entry"), lambda given: given["to"] not in ("qnn", "aimet"), "it is for --to qnn and --to aimet"),
)


def export_plan_command(
    file: FileArgument,
    plan: PlanArgument = None,
    rule: RuleOption = None,
    *,
    to: Annotated[str, typer.Option(help="The tool: ort, nncf, modelopt, qnn, aimet.")],
    output: Annotated[Path, "The file to write.", Writes(Kind.JSON)],
    data: DataOption = None,
    entry: EntryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as the file that another tool reads.

    --data and --entry give the inputs from which the ranges of activations are measured, for qnn and aimet.
    """
    from htp_export.capabilities.export_plan.plan_exporting import export_plan
    from htp_export.capabilities.quantize.precisions import PRESETS

    wanted = read_rules(plan, rule, PRESETS)
    with Steps(quiet=as_json).step(f"writing the plan of {file.name}"):
        result = export_plan(file, wanted, output, to=to, data=read_data(data, entry))
    report(result, as_json)
    if not as_json:
        show_written(written_page(output))
