"""``htp-export nodes``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from htp_export.command.as_python import text_of, wanted_program
from htp_export.command.options import FileArgument, Idle, JsonOption, SelectOption
from htp_export.command.terminal import Steps, print_json, print_text, show
from htp_export.reporting.columns import many

EXAMPLE = 'bert.onnx --select "encoder.layer.0.**"'
PLACE = ("Look", 3)
IDLE = (
    Idle(("table",), lambda given: given["as_json"], "--json writes all tables"),
    Idle(
        ("select", "table", "as_csv"),
        lambda given: given["node"] is not None,
        "--node answers about one node",
    ),
)


def nodes_command(
    file: FileArgument,
    select: SelectOption = None,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|INDEX|TENSOR",
            help="All about one node: its name, its index in the graph, or a tensor.",
        ),
    ] = None,
    table: Annotated[
        Literal["nodes", "modules", "parameters", "initializers"], "The kind of the rows."
    ] = "nodes",
    as_json: JsonOption = False,
    as_csv: Annotated[bool, "Write the table as CSV."] = False,
) -> None:
    """Map nodes to modules and parameters, and back.

    A table has one row for each node, module, parameter or initializer; JSON has all tables. In a
    terminal, it has the first rows.
    """
    from htp_export.capabilities.nodes.map_result import DRAWN_COLUMNS, map_csv
    from htp_export.capabilities.nodes.mapping import nodes
    from htp_export.command.outputs import report
    from htp_export.reporting.row_table import RowTable

    program = wanted_program()
    if program is not None and node is not None:
        program.printed = f"result.find(result.key_of({text_of(node)}))"
    with Steps(quiet=as_json or as_csv).step(f"mapping {file}"):
        mapped = nodes(file, select=select or None)
    if node is not None:
        report(mapped.find(mapped.key_of(node)), as_json)
    elif as_json:
        print_json(mapped.to_dict())
    elif as_csv:
        print_text(map_csv(mapped, table))
    else:
        show(RowTable(DRAWN_COLUMNS[table], mapped.rows(table), _rest))
        show("\n".join((mapped.summary, *mapped.lines)))


def _rest(more: int) -> str:
    return (
        f"and {many(more, 'more row')}: --select and --node choose, "
        "--json, --csv and a pipe (| less -S) have all"
    )
