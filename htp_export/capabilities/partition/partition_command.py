"""``htp-export partition``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from htp_export.command.options import FileArgument, Idle, JsonOption
from htp_export.command.outputs import Writes, show_next, show_written, written_folder
from htp_export.command.terminal import Steps, print_json, show
from htp_export.errors import InputError
from htp_export.format.bounds import number_in
from htp_export.reporting.row_table import DrawnResult

EXAMPLE = "bert.onnx 4 -o stages/"
PLACE = ("Deploy", 3)
IDLE = (
    Idle(("genai_config",), lambda given: given["serve"] != "genai", "it is for --serve genai"),
    Idle(
        ("balance", "slack"),
        lambda given: _count_of(given["stages"]) is None,
        "the stages begin at the named modules",
    ),
)


def partition_command(
    file: FileArgument,
    stages: Annotated[
        list[str],
        "The number of stages; or the modules at which they begin: encoder.layer.4 encoder.layer.8",
    ],
    output: Annotated[Path, "The folder to write.", Writes()],
    balance: Annotated[
        str,
        "The weights: parameters, flops, or JSON with a number for each module path, as of profile --json.",
    ] = "parameters",
    slack: Annotated[
        float,
        typer.Option(
            min=0,
            help="How much heavier than necessary the heaviest stage may be, for better borders.",
        ),
    ] = 0.05,
    serve: Annotated[
        str | None,
        "Write the configuration of an engine, too: genai; or a plug-in, such as triton or ray.",
    ] = None,
    genai_config: Annotated[
        Path | None,
        "The genai_config.json of the model, for --serve genai; by default the one beside it.",
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Cut a model into stages that run one after another."""
    from htp_export.capabilities.partition.balancing import read_weights
    from htp_export.capabilities.partition.stage_folder import check_folder
    from htp_export.capabilities.partition.staging import partition

    check_folder(output)
    weights: Any = balance
    if balance not in ("parameters", "flops"):
        if not Path(balance).suffix and not Path(balance).exists():
            raise InputError(
                f"--balance {balance}: balance parameters or flops, or name a JSON file"
            )
        weights = read_weights(balance)
    count = _count_of(stages)
    wanted = stages if count is None else count
    with Steps(quiet=as_json).step(f"cutting {file}"):
        result = partition(
            file,
            wanted,
            output,
            balance=weights,
            slack=slack,
            serve=serve,
            genai_config=genai_config,
        )
    if as_json:
        print_json(result.to_dict())
    else:
        show(DrawnResult(result))
        show_written(written_folder(output))
        show_next("htp-export", "view", result.stages[0].file or output)


def _count_of(stages: list[str]) -> int | None:
    """The number of stages; None if they are named by modules."""
    return number_in(stages[0]) if len(stages) == 1 else None
