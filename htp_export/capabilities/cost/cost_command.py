"""``htp-export cost``."""

from __future__ import annotations

from typing import Annotated

from htp_export.command.model_options import FILE_IDLE, LookOptions
from htp_export.command.options import JSON_HAS_ALL, Idle, TableOptions
from htp_export.command.run_options import InputOptions
from htp_export.command.terminal import Steps, split_names
from htp_export.costs.columns import COST_COLUMNS, FUSED
from htp_export.reporting.columns import names_of

EXAMPLE = "bert.onnx --dims batch=1,sequence=16"
PLACE = ("Check and measure", 4)
IDLE = (
    Idle(("nodes",), lambda given: not given["as_csv"], "it is for --csv"),
    Idle(("fused",), lambda given: given["columns"], "--columns names the columns"),
    Idle(("fused", "depth", "select"), lambda given: given["as_json"], JSON_HAS_ALL),
    Idle(
        ("fused", "columns", "sort", "depth", "select"),
        lambda given: given["nodes"],
        "--nodes writes a line for each node",
    ),
    FILE_IDLE,
)


def cost_command(
    model: LookOptions,
    table: TableOptions,
    runs_on: InputOptions,
    columns: Annotated[
        list[str] | None, f"By comma, of {', '.join(names_of(COST_COLUMNS))}."
    ] = None,
    fused: Annotated[bool, "Estimated savings by fusing each module."] = False,
    nodes: Annotated[bool, "With --csv, a line for each node."] = False,
) -> None:
    """Count parameters, FLOPs, bytes and memory of every module.

    The model is an ONNX file, which is not run, or a PyTorch model, which need not be exportable.
    """
    from htp_export.costs.costing import cost
    from htp_export.costs.drawing import modules_csv, nodes_csv, render_cost
    from htp_export.model.module_facts import visible
    from htp_export.model.tagged import load

    quiet = table.as_json or table.as_csv
    looked = model.look(quiet=quiet)
    given = model.run_keywords(runs_on)
    with Steps(quiet=quiet).step(f"counting {looked.name}"):
        tagged = load(looked.model)
        report = cost(tagged, **given)
    rows = [report.modules[path] for path in visible(tagged, table.depth, table.select or None)]
    names = split_names(columns) or (list(FUSED) if fused else None)

    def csv() -> str:
        if nodes:
            return nodes_csv(report.nodes)
        return modules_csv(report, rows, names or names_of(COST_COLUMNS), table.sort)

    table.report(
        {**looked.facts, **report.to_dict()},
        csv,
        lambda: render_cost(report, rows, fold=table.fold, columns=names, sort=table.sort),
    )
