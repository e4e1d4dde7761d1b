"""Result of `nodes`: nodes, modules, parameters and initializers, mapped to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from htp_export.errors import InputError
from htp_export.format.torch_metadata import SourceLine
from htp_export.reporting.columns import Column, chosen, csv_text, data_frame, record
from htp_export.reporting.result import PlainData, Result, Table
from htp_export.reporting.tag_facts import TagFacts

MapTable: TypeAlias = Literal["nodes", "modules", "parameters", "initializers"]


class _Use:
    """The use of a parameter, with its transformations ``how``."""

    name: str
    how: tuple[str, ...]

    def __str__(self) -> str:
        if self.how:
            return f"{self.name} ({', '.join(self.how)})"
        return self.name


@dataclass(frozen=True)
class ParameterUse(_Use):
    """A parameter that a node uses, or that an initializer contains.

    Attributes:
        name: Its name in PyTorch; of tied ones, the name in the module of the node.
        initializer: The initializer that contains it.
        how: Its transformations, in order: ``transposed``, ``cast``, ...; empty if there are none.
    """

    name: str
    initializer: str
    how: tuple[str, ...] = ()


@dataclass(frozen=True)
class InitializerUse(_Use):
    """An initializer that contains a parameter.

    Attributes:
        name: Its name.
        how: The transformations of the parameter; empty if there are none.
    """

    name: str
    how: tuple[str, ...] = ()


@dataclass(frozen=True)
class MappedNode(PlainData):
    """A node.

    Attributes:
        name: Its name; that of its first output if it has none.
        operator: Its operator, with the domain if that is not ONNX's.
        modules: The modules that it computes, in execution order; several if work was merged.
        calls: Module → numbers of its calls that the node computes, for modules that ran several
            times.
        reason: The evidence for the modules, a word of ``docs/format.md``.
        parameters: The parameters that it uses, directly or through nodes that only transpose,
            cast or reshape them.
        inputs: Names of its input tensors; ``""`` for an absent input.
        outputs: Names of its output tensors.
        inside: The function that contains it, or the node whose branch or loop body contains it;
            ``""`` for the main graph.
        stack: The Python lines at which it was captured, the innermost last; empty if the file
            does not contain them.
    """

    derived = ("source",)

    name: str
    operator: str
    modules: tuple[str, ...] = ()
    calls: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reason: str = ""
    parameters: tuple[ParameterUse, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    inside: str = ""
    stack: tuple[SourceLine, ...] = ()

    @property
    def source(self) -> str:
        """The innermost Python line, ``/path/net.py:7``; ``""`` if it is unknown."""
        if not self.stack:
            return ""
        line = self.stack[-1]
        return f"{line.file}:{line.line}"


class _WithNodes(PlainData):
    """An entry with nodes, which are names in plain data."""

    nodes: tuple[MappedNode, ...]

    def data(self) -> dict[str, Any]:
        return {**super().data(), "nodes": [node.name for node in self.nodes]}


@dataclass(frozen=True)
class MappedModule(_WithNodes):
    """A module.

    Attributes:
        path: Its path.
        class_name: Its class.
        calls: Number of its runs.
        fate: Its fate, a word of ``docs/format.md``.
        nodes: The nodes that it computes itself, without nodes of its descendants.
        parameters: Names of its own parameters.
    """

    path: str
    class_name: str = ""
    calls: int = 0
    fate: str = ""
    nodes: tuple[MappedNode, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class MappedParameter(_WithNodes):
    """A parameter of the PyTorch model.

    Attributes:
        name: Its name, as in ``model.named_parameters()``.
        module: The module that owns it.
        shape: Its shape in PyTorch.
        tied: The name of the same parameter in an earlier module; ``""`` if there is none.
        initializers: The initializers that contain it; empty if it is unused.
        nodes: The nodes that use it.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    tied: str = ""
    initializers: tuple[InitializerUse, ...] = ()
    nodes: tuple[MappedNode, ...] = ()


@dataclass(frozen=True)
class MappedInitializer(_WithNodes):
    """A weight of the file: an initializer, or the value of a ``Constant``.

    Attributes:
        name: Its name in the file.
        shape: Its shape.
        dtype: The type of its elements, by numpy's name.
        parameters: The parameters that it contains; empty for buffers and constants.
        nodes: The nodes that use it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parameters: tuple[ParameterUse, ...] = ()
    nodes: tuple[MappedNode, ...] = ()


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
        *map(_column, ("inputs", "outputs", "inside")),
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

DRAWN_COLUMNS: Mapping[MapTable, Sequence[Column[Any]]] = {
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
"""The columns of each table in drawings."""


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
