"""``htp-export nodes``."""

from __future__ import annotations

from typing import Annotated, Literal

from htp_export.command.options import FileArgument, Idle, JsonOption, SelectOption
from htp_export.command.terminal import Steps, print_json, print_text, show

EXAMPLE = 'bert.onnx --select "encoder.layer.0.**"'
PLACE = ("Look", 3)
IDLE = (Idle(("table",), lambda given: given["as_json"], "--json writes all tables"),)


def nodes_command(
    file: FileArgument,
    select: SelectOption = None,
    table: Annotated[
        Literal["nodes", "modules", "parameters", "initializers"], "The kind of the rows."
    ] = "nodes",
    as_json: JsonOption = False,
    as_csv: Annotated[bool, "Write the table as CSV."] = False,
) -> None:
    """Map nodes to modules and parameters, and back.

    A table has one row for each node, module, parameter or initializer; JSON has all tables.
    """
    from htp_export.capabilities.nodes.map_result import DRAWN_COLUMNS, map_csv
    from htp_export.capabilities.nodes.mapping import nodes
    from htp_export.reporting.module_table import flat_table

    with Steps(quiet=as_json or as_csv).step(f"mapping {file}"):
        mapped = nodes(file, select=select or None)
    if as_json:
        print_json(mapped.to_dict())
    elif as_csv:
        print_text(map_csv(mapped, table))
    else:
        show(flat_table(DRAWN_COLUMNS[table], mapped.rows(table)))
        show("\n".join((mapped.summary, *mapped.lines)))
