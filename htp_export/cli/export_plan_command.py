"""``htp-export export-plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from htp_export.cli.file_options import FileArgument, JsonOption
from htp_export.cli.outputs import check_output, report, show_written, written_page
from htp_export.cli.plan_options import PlanOption, RulesArgument, read_rules
from htp_export.cli.terminal import Steps

EXAMPLE = 'bert.onnx ".=int8" "pooler=fp32" --to nncf -o plan.json'
PLACE = 142


def export_plan_command(
    file: FileArgument,
    rules: RulesArgument = None,
    *,
    to: Annotated[str, typer.Option(help="The tool: ort, nncf, modelopt, qnn, aimet, trtexec.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)],
    plan: PlanOption = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="An .npz file of inputs, for the ranges of activations (qnn, aimet).", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as the file that another tool reads."""
    from htp_export.compress.plan_exporting import export_plan

    wanted = read_rules(rules, plan)
    check_output(output, [each for each in (file, plan, inputs) if each is not None], page=True)
    with Steps(quiet=as_json).step(f"writing the plan of {file.name}"):
        result = export_plan(file, wanted, output, to=to, data=inputs)
    report(result, as_json)
    if not as_json:
        show_written(written_page(output))
