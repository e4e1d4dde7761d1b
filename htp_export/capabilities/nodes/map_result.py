"""Result of `nodes`: nodes, modules, parameters and initializers, mapped to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from htp_export.capabilities.nodes.entries import (
    MappedInitializer,
    MappedModule,
    MappedNode,
    MappedParameter,
)
from htp_export.capabilities.nodes.finding import Finder, FoundNodes, Uncomputed
from htp_export.errors import InputError
from htp_export.reporting.columns import Column, chosen, csv_text, data_frame, record
from htp_export.reporting.result import Result, Table
from htp_export.reporting.tag_facts import TagFacts

MapTable: TypeAlias = Literal["nodes", "modules", "parameters", "initializers"]


def _plain_text(value: Any) -> str:
    """A value of a table as text, with commas between items.

    Examples:
        >>> _plain_text(("fc.weight", "fc.bias")), _plain_text((("cast", "joined"), ())), _plain_text({"fc": (0, 2)})
        ('fc.weight, fc.bias', 'cast joined, ', 'fc: 0 2')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {' '.join(map(str, numbers))}" for key, numbers in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(_item_text, value))
    return str(value)


def _item_text(item: Any) -> str:
    if isinstance(item, tuple):
        return " ".join(map(str, item))
    return str(item)


def _path_text(path: str) -> str:
    return path or "(root)"


def _column(name: str, title: str = "", **options: Any) -> Column[Any]:
    return Column(name, title or name, right=False, **{"text": _plain_text, **options})


def _of_each(attribute: str, of_each: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function: row → one attribute of each entry in another."""
    return lambda row: tuple(getattr(entry, of_each) for entry in getattr(row, attribute))


def _uses(attribute: str) -> Column[Any]:
    """A column of distinct uses, with their transformations."""

    def texts(row: Any) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(str, getattr(row, attribute))))

    return _column(attribute, value=texts)


_NODE_NAMES = _column("nodes", value=_of_each("nodes", "name"))
_HOW = _column("how", value=_of_each("parameters", "how"))
_PARAMETER_NAMES = _column("parameters", value=_of_each("parameters", "name"))

_COLUMNS: Mapping[MapTable, Sequence[Column[Any]]] = {
    "nodes": (
        _column("name", "node"),
        _column("operator"),
        _column("modules", text=lambda modules: ", ".join(map(_path_text, modules))),
        *map(_column, ("calls", "reason")),
        _PARAMETER_NAMES,
        _HOW,
        _column("initializers", value=_of_each("parameters", "initializer")),
        *map(_column, ("inputs", "outputs", "inside", "index")),
        _column("source", text=lambda source: source.rpartition("/")[2]),
    ),
    "modules": (
        _column("path", "module", text=_path_text),
        _column("class_name", "class"),
        *map(_column, ("calls", "fate")),
        _NODE_NAMES,
        _column("parameters"),
    ),
    "parameters": (
        _column("name", "parameter"),
        *map(_column, ("module", "shape")),
        _column("tied", "tied to"),
        _column("initializers", value=_of_each("initializers", "name")),
        _column("how", value=_of_each("initializers", "how")),
        _NODE_NAMES,
    ),
    "initializers": (
        _column("name", "initializer"),
        _column("shape"),
        _column("dtype", "type"),
        _PARAMETER_NAMES,
        _HOW,
        _NODE_NAMES,
    ),
}
"""The columns of each table as data."""

_DRAWN_COLUMNS: Mapping[MapTable, Sequence[Column[Any]]] = {
    "nodes": (
        *chosen(_COLUMNS["nodes"], ("name", "operator", "modules")),
        _uses("parameters"),
        *chosen(_COLUMNS["nodes"], ("reason", "source")),
    ),
    "modules": _COLUMNS["modules"],
    "parameters": (
        *_COLUMNS["parameters"][:1],
        *_COLUMNS["parameters"][2:4],
        _uses("initializers"),
        _NODE_NAMES,
    ),
    "initializers": (*_COLUMNS["initializers"][:3], _uses("parameters"), _NODE_NAMES),
}

_KEPT = (
    "modules",
    "operator",
    "class_name",
    "nodes",
    "source",
    "parameters",
    "initializers",
    "shape",
)
"""Columns that a narrow terminal keeps, the most important first."""


def _keep(column: Column[Any]) -> Column[Any]:
    place = _KEPT.index(column.name) if column.name in _KEPT else len(_KEPT)
    return replace(column, keep=len(_KEPT) - place)


DRAWN_COLUMNS: Mapping[MapTable, Sequence[Column[Any]]] = {
    table: tuple(map(_keep, columns)) for table, columns in _DRAWN_COLUMNS.items()
}
"""The columns of each table in drawings."""


_LONGEST_INDEX = 10  # digits


@dataclass(frozen=True)
class ModelMap(Result):
    """The result of `nodes`: nodes, modules, parameters and initializers, mapped to each other.

    Attributes:
        nodes: The nodes. Nodes of branches and loop bodies follow the node that contains them;
            nodes of functions are last.
        modules: Module path → module, in the order of ``named_modules()``.
        parameters: Name in PyTorch → parameter; tied ones under each of their names.
        initializers: Name in the file → weight that a node uses.
        from_pytorch: Whether the file contains PyTorch's parameters; otherwise they are the
            initializers whose names begin with the path of a module.
        tags: Facts about the tags of the file.
        outputs: Names of the outputs of the model.
        uncomputed: Function, or ``""`` for the graph, and tensor → kind, of tensors that no node
            computes.
    """

    derived = ("notes",)

    nodes: tuple[MappedNode, ...]
    modules: Mapping[str, MappedModule]
    parameters: Mapping[str, MappedParameter]
    initializers: Mapping[str, MappedInitializer]
    from_pytorch: bool = True
    tags: TagFacts = field(default_factory=TagFacts)
    outputs: tuple[str, ...] = field(default=(), repr=False)
    uncomputed: Mapping[tuple[str, str], Uncomputed] = field(default_factory=dict, repr=False)

    @property
    def summary(self) -> str:
        """The result in one line."""
        stored = sum(bool(parameter.initializers) for parameter in self.parameters.values())
        return (
            f"{len(self.nodes):,} nodes of {len(self.modules):,} modules; "
            f"{stored:,} of {len(self.parameters):,} parameters are in {len(self.initializers):,} weights"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Further notes, one line each."""
        if self.from_pytorch:
            return ()
        return (
            "the file does not say which parameters PyTorch had: initializers named after a module count as such",
        )

    @cached_property
    def _finder(self) -> Finder:
        return Finder(self.nodes, self.modules, self.initializers, self.uncomputed, self.outputs)

    def find(self, identifier: str | int) -> FoundNodes:
        """Find nodes by name, by a tensor, or by index, with the nodes around them.

        Args:
            identifier: The name of a node; the name of a tensor: the node that computes it, or the nodes
                that read an input or a weight; or the index of a node in the main graph, from 0.

        Raises:
            InputError: There is no such node or tensor; the message has similar names.

        Examples:
            >>> import torch, htp_export
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
            >>> mapped = htp_export.nodes(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
            >>> print(mapped.find("linear").summary)
            linear is a tensor that node_linear (Gemm) of 0 computes
        """
        return self._finder.find(identifier)

    def key_of(self, typed: str) -> str | int:
        """The argument of `find` for a text: an index if it is a number, and no name."""
        if typed.isdecimal() and len(typed) < _LONGEST_INDEX and not self._finder.knows(typed):
            return int(typed)
        return typed

    def __getitem__(self, identifier: str | int) -> MappedNode:
        """The node with a name or index, or that computes a tensor.

        Raises:
            InputError: There is no such node, or there are several.
        """
        found = self.find(identifier)
        if len(found.nodes) == 1:
            return found.nodes[0]
        if found.nodes:
            places = ", ".join(
                f"{node.index} in {node.inside or 'the graph'}" for node in found.nodes
            )
            raise InputError(
                f"{len(found.nodes)} nodes have this name: {places}; find({identifier!r}) has all"
            )
        raise InputError(
            f"{found.summary}: no node computes it; find({identifier!r}) has the nodes that read it"
        )

    def __iter__(self) -> Iterator[MappedNode]:
        return iter(self.nodes)

    def rows(self, table: MapTable) -> Sequence[Any]:
        """The rows of a table.

        Raises:
            InputError: If there is no such table.
        """
        if table not in _COLUMNS:
            raise InputError(f"there is no table {table!r}; there are {', '.join(_COLUMNS)}")
        if table == "nodes":
            return self.nodes
        return list(attrgetter(table)(self).values())

    def to_pandas(self, table: MapTable = "nodes") -> Any:
        """A table as a ``pandas.DataFrame``, with one row for each entry.

        Columns with several values contain tuples: ``frame.explode("modules")`` returns a row for
        each.

        Raises:
            InputError: pandas is not installed, or there is no such table.
        """
        rows = self.rows(table)
        key, *columns = _COLUMNS[table]
        records = [record(columns, row) for row in rows]
        names = [column.name for column in columns]
        return data_frame(records, names, [key.data(row) for row in rows], key.title)

    def table(self) -> Table:
        """The nodes, one row each."""
        return DRAWN_COLUMNS["nodes"], self.nodes


def map_csv(mapped: ModelMap, table: MapTable = "nodes") -> str:
    """A table of a map as CSV, with commas between items."""
    columns = [replace(column, value=_texts(column)) for column in _COLUMNS[table]]
    return csv_text(columns, mapped.rows(table))


def _texts(column: Column[Any]) -> Callable[[Any], str]:
    return lambda row: _plain_text(column.data(row))
