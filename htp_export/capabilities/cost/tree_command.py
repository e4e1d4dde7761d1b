"""``htp-export tree``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from htp_export.command.model_options import FILE_IDLE, LookOptions
from htp_export.command.options import TableOptions
from htp_export.command.run_options import InputOptions
from htp_export.command.terminal import split_names
from htp_export.costs.columns import TREE_COLUMNS
from htp_export.errors import FileError, InputError
from htp_export.files.text_files import read_json
from htp_export.reporting.columns import names_of

if TYPE_CHECKING:
    from htp_export.costs.result import Cost
    from htp_export.model.tagged import TaggedModel

EXAMPLE = "bert.onnx --depth 3"
PLACE = ("Look", 2)
IDLE = (FILE_IDLE,)


def tree_command(
    model: LookOptions,
    table: TableOptions,
    runs_on: InputOptions,
    columns: Annotated[
        list[str] | None, f"By comma, of {', '.join(names_of(TREE_COLUMNS))}."
    ] = None,
    profile: Annotated[Path | None, "Times: the output of profile --json."] = None,
    verify: Annotated[Path | None, "Errors: the output of verify or compare --json."] = None,
) -> None:
    """Show the module tree: classes, nodes, parameters, FLOPs.

    The model is an ONNX file, or a PyTorch model, which need not be exportable. Times and errors
    come from results of profile, verify or compare.
    """
    from htp_export.costs.drawing import modules_csv, render, usual_columns
    from htp_export.costs.result import tree_rows
    from htp_export.editing.flattening import read_flat

    looked = model.look(quiet=table.as_json or table.as_csv)
    tagged = read_flat(looked.model)
    model_cost, note = _cost(tagged, model.run_keywords(runs_on))
    measured = read_measured(profile, verify)
    tree = tree_rows(tagged, table.depth, table.select or None, cost=model_cost, measured=measured)
    if note:
        tree = replace(tree, notes=(*tree.notes, note))
    names = split_names(columns)
    table.report(
        {**looked.facts, **tree.to_dict()},
        lambda: modules_csv(tree, tree.rows, names or usual_columns(tree), table.sort),
        lambda: render(tree, fold=table.fold, columns=names, sort=table.sort),
    )


def _cost(tagged: TaggedModel, given: Mapping[str, Any]) -> tuple[Cost | None, str]:
    """The cost of the model; or the reason why it is unknown."""
    from htp_export.costs.costing import cost

    try:
        return cost(tagged, **given), ""
    except InputError as error:
        if any(given.values()):
            raise
        return None, f"no FLOPs: {error}"


_WRONG = ("differs", "inherits")


def read_measured(profile: Path | None, verify: Path | None) -> dict[str, dict[str, Any]]:
    """Module path → measurements, from the JSON of ``profile``, and ``verify`` or ``compare``.

    Raises:
        FileError: A file cannot be read, or has other contents.
    """
    measured: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for path, entry in _modules(profile, "total_ms").items():
        measured[path] |= {
            "time_ms": _number(entry.get("total_ms")),
            "own_time_ms": _number(entry.get("self_ms")),
        }
    for path, entry in _modules(verify, "max_abs").items():
        status = entry.get("status")
        measured[path] |= {
            "error": _number(entry.get("max_abs")),
            "status": status if status in _WRONG else None,
        }
    return measured


def _modules(path: Path | None, needed: str) -> Mapping[str, Mapping[str, Any]]:
    """The rows by module of a JSON result, of which some have the key ``needed``."""
    if path is None:
        return {}
    data = read_json(path)
    modules = data.get("modules") if isinstance(data, dict) else None
    if not isinstance(modules, dict) or not all(
        isinstance(entry, dict) for entry in modules.values()
    ):
        raise FileError(
            path, "has no results by module; write it with --json of profile, verify or compare"
        )
    if modules and not any(needed in entry for entry in modules.values()):
        raise FileError(path, f"has {needed!r} for no module; is it the JSON of another command?")
    return modules


def _number(value: Any) -> float | None:
    """A number; NaN and infinity are words in JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
