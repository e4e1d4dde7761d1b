"""The result of `map`, and its tables: nodes, modules, parameters, initializers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from htp_export.capabilities.nodes.map_rows import MappedInitializer, MappedModule, MappedNode, MappedParameter
from htp_export.errors import InputError
from htp_export.results.columns import Column
from htp_export.results.result import Result, Table
from htp_export.results.tables import data_frame, html_table
from htp_export.results.tag_facts import TagFacts

__all__ = ["DRAWN_COLUMNS", "MAP_COLUMNS", "MapTable", "ModelMap", "plain_text"]

MapTable: TypeAlias = Literal["nodes", "modules", "parameters", "initializers"]


def plain_text(value: Any) -> str:
    """A value of a table as text: lists by comma.

    Examples:
        >>> plain_text(("fc.weight", "fc.bias")), plain_text((("transposed", "cast"), ())), plain_text({"fc": (0, 2)})
        ('fc.weight, fc.bias', 'transposed cast, ', 'fc: 0 2')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {' '.join(map(str, each))}" for key, each in value.items())
    if isinstance(value, tuple):
        return ", ".join(" ".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value)
    return str(value)


def _modules_text(modules: Sequence[str]) -> str:
    return ", ".join(path or "(root)" for path in modules)


def _path_text(path: str) -> str:
    return path or "(root)"


def _each(attribute: str, of_each: str) -> Callable[[Any], tuple[Any, ...]]:
    return lambda row: tuple(getattr(each, of_each) for each in getattr(row, attribute))


def _column(name: str, title: str = "", **options: Any) -> Column[Any]:
    return Column(name, title or name, right=False, **{"text": plain_text, **options})


def _uses(attribute: str) -> Callable[[Any], tuple[str, ...]]:
    return lambda row: tuple(dict.fromkeys(map(str, getattr(row, attribute))))


_NODE_NAMES = _column("nodes", value=_each("nodes", "name"))
MAP_COLUMNS: Mapping[MapTable, Sequence[Column[Any]]] = {
    "nodes": (
        _column("name", "node"),
        _column("operator"),
        _column("modules"),
        _column("calls"),
        _column("reason"),
        _column("parameters", value=_each("parameters", "name")),
        _column("how", value=_each("parameters", "how")),
        _column("initializers", value=_each("parameters", "initializer")),
        _column("inputs"),
        _column("outputs"),
        _column("inside"),
        _column("source"),
    ),
    "modules": (
        _column("path", "module", text=_path_text),
        _column("class_name", "class"),
        _column("calls"),
        _column("fate"),
        _NODE_NAMES,
        _column("parameters"),
    ),
    "parameters": (
        _column("name", "parameter"),
        _column("module", text=_path_text),
        _column("shape"),
        _column("tied", "tied to"),
        _column("initializers", value=_each("initializers", "name")),
        _column("how", value=_each("initializers", "how")),
        _NODE_NAMES,
    ),
    "initializers": (
        _column("name", "initializer"),
        _column("shape"),
        _column("dtype", "type"),
        _column("parameters", value=_each("parameters", "name")),
        _column("how", value=_each("parameters", "how")),
        _NODE_NAMES,
    ),
}
"""The columns of each table as data."""

DRAWN_COLUMNS: Mapping[MapTable, Sequence[Column[Any]]] = {
    "modules": MAP_COLUMNS["modules"],
    "nodes": (
        _column("name", "node"),
        _column("operator"),
        _column("modules", text=_modules_text),
        _column("parameters", value=_uses("parameters")),
        _column("reason"),
        _column("source", text=lambda source: source.rpartition("/")[2]),
    ),
    "parameters": (
        _column("name", "parameter"),
        _column("shape"),
        _column("tied", "tied to"),
        _column("initializers", value=_uses("initializers")),
        _NODE_NAMES,
    ),
    "initializers": (
        _column("name", "initializer"),
        _column("shape"),
        _column("dtype", "type"),
        _column("parameters", value=_uses("parameters")),
        _NODE_NAMES,
    ),
}
"""The columns of each table as it is drawn."""


@dataclass(frozen=True)
class ModelMap(Result):
    """The result of `map`: nodes, modules, parameters and initializers, each with the others that belong to it.

    Attributes:
        nodes: The nodes, those of branches and loop bodies after the node that holds them, those of functions last.
        modules: Module path → module, in the order of ``named_modules()``.
        parameters: Name in PyTorch → parameter; tied ones under each of their names.
        initializers: Name in the file → weight that a node reads.
        from_pytorch: Whether the file says which parameters PyTorch had; if not, they are the initializers whose
            names begin with the path of a module.
        tags: What is known about the tags of the file.
    """

    derived = ("notes",)

    nodes: tuple[MappedNode, ...]
    modules: Mapping[str, MappedModule]
    parameters: Mapping[str, MappedParameter]
    initializers: Mapping[str, MappedInitializer]
    from_pytorch: bool = True
    tags: TagFacts = field(default_factory=TagFacts)

    @property
    def summary(self) -> str:
        """The result in one line."""
        found = sum(bool(parameter.initializers) for parameter in self.parameters.values())
        return (
            f"{len(self.nodes):,} nodes of {len(self.modules):,} modules; "
            f"{found:,} of {len(self.parameters):,} parameters are in {len(self.initializers):,} weights"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to know, a line each."""
        if self.from_pytorch:
            return ()
        return ("the file does not say which parameters PyTorch had: initializers named after a module count as such",)

    def rows(self, table: MapTable) -> Sequence[Any]:
        """The rows of a table.

        Raises:
            InputError: If there is no such table.
        """
        if table not in MAP_COLUMNS:
            raise InputError(f"there is no table {table!r}; there are {', '.join(MAP_COLUMNS)}")
        return self.nodes if table == "nodes" else list(attrgetter(table)(self).values())

    def to_pandas(self, table: MapTable = "nodes") -> Any:
        """A table as a ``pandas.DataFrame``, with a row for each node, module, parameter or initializer.

        Columns that hold several values hold tuples: ``frame.explode("modules")`` gives a row for each.

        Raises:
            InputError: If pandas is not installed, or if there is no such table.
        """
        rows, (key, *columns) = self.rows(table), MAP_COLUMNS[table]
        records = [{column.name: column.data(row) for column in columns} for row in rows]
        return data_frame(records, [column.name for column in columns], [key.data(row) for row in rows], key.title)

    def table(self) -> Table:
        """The nodes."""
        return DRAWN_COLUMNS["nodes"], self.nodes

    def _repr_html_(self) -> str:
        columns = DRAWN_COLUMNS["nodes"]
        lines = ([column.cell(node) for column in columns] for node in self.nodes)
        return html_table([column.heading for column in columns], lines, (self.summary, *self.lines))
