"""``htp-export cost``."""

from __future__ import annotations

from typing import Annotated

import typer

from htp_export.cli.file_options import DepthOption, FeedDimsOption, FeedOption, FileArgument, JsonOption, SelectOption
from htp_export.cli.sizes import read_sizes
from htp_export.cli.terminal import Steps, print_json, print_text, show, split_names
from htp_export.costs.columns import COST_COLUMNS, FUSED
from htp_export.model.columns import names_of
from htp_export.show.costs import cost_csv, nodes_csv, render_cost

__all__ = ["cost_command"]

EXAMPLE = "bert.onnx --dims batch=1,sequence=16"
PLACE = 40


def cost_command(
    file: FileArgument,
    inputs: FeedOption = None,
    dims: FeedDimsOption = None,
    depth: DepthOption = None,
    select: SelectOption = None,
    sort: Annotated[str | None, typer.Option(help="A column: a list, the largest first.", show_default=False)] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help=f"By comma, of {', '.join(names_of(COST_COLUMNS))}.")
    ] = None,
    fused: Annotated[bool, typer.Option("--fused", help="What fusing each module would save: an estimate.")] = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="With --csv, a line for each node.")] = False,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV.")] = False,
    fold: Annotated[bool, typer.Option("--fold/--no-fold", help="Draw alike siblings as one line.")] = True,
) -> None:
    """Count the parameters, FLOPs and bytes of every module.

    The peak memory, too. Nothing is run.
    """
    from htp_export.costs.costing import cost
    from htp_export.costs.module_tree import visible
    from htp_export.model.tagged import load

    sizes = read_sizes(inputs, dims)
    with Steps(quiet=as_json or as_csv).step(f"counting {file}"):
        tagged = load(file)
        report = cost(tagged, sizes.inputs, dims=sizes.dims, shapes=sizes.shapes)
    rows = [report.modules[path] for path in visible(tagged, depth, select or None)]
    names = split_names(columns) or (list(FUSED) if fused else None)
    if as_json:
        print_json(report.to_dict())
    elif as_csv:
        print_text(nodes_csv(report.nodes) if nodes else cost_csv(rows, names, sort))
    else:
        show(render_cost(report, rows, fold=fold, columns=names, sort=sort))
