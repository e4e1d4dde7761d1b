"""Several files in one page: a table of their modules, and the graphs of two of them side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from htp_export.alignment.module_alignment import aligned_modules
from htp_export.capabilities.view.inventory import Inventory, ModuleEntry
from htp_export.capabilities.view.measures import Measure
from htp_export.capabilities.view.page.document import document, json_number, tags_data
from htp_export.capabilities.view.page.packing import packed
from htp_export.format import tags
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.hashes import Hasher
from htp_export.model.tagged import TaggedModel
from htp_export.reporting.command_words import in_both
from htp_export.reporting.tables import drawn_parents

SCRIPTS = (
    *("base.js", "packed.js", "sizes.js", "reasons.js", "layers.js", "drawing.js"),
    *("pair.js", "together.js"),
)
"""The scripts of the page of several files, in execution order."""

COSTS = ("flops", "other_flops", "activation_bytes")
"""Measures of every graph of a page, if its costs are known."""


@dataclass(frozen=True)
class ShownFile:
    """One of the files of a page.

    Attributes:
        name: Its name, which no other file of the page has.
        inventory: Its modules and nodes.
        measures: Its numbers by module.
        notes: Remarks on its numbers.
        structures: Module path → hash of the computation of the module.
        steps: The hash of each node with its direct inputs, in the order of ``inventory.nodes``.
    """

    name: str
    inventory: Inventory
    measures: Sequence[Measure]
    notes: Sequence[str]
    structures: Mapping[str, str]
    steps: Sequence[str]

    @cached_property
    def parents(self) -> Mapping[str, str | None]:
        """Drawn module → the drawn module above it."""
        return drawn_parents(self.inventory.modules)

    @cached_property
    def aligned(self) -> Mapping[str, _Aligned]:
        """Drawn module → the properties by which it is matched, each after its ancestors."""
        modules = self.inventory.modules
        return {
            path: _Aligned(modules[path].class_name, modules[path].nodes, self.structures[path])
            for path in self.parents
        }


@dataclass(frozen=True)
class _Aligned:
    """The properties by which a module is matched with one of another file."""

    class_name: str
    nodes: int
    structure: str


def hashes_of(tagged: TaggedModel) -> tuple[dict[str, str], list[str]]:
    """The hashes of the modules of a flat model, by path, and those of its nodes, in order."""
    hasher = Hasher(GraphFacts(tagged))
    paths = [""] if tagged.source == "none" else ["", *tagged.paths]
    return {path: hasher.region(path) for path in paths}, [
        hasher.step(node) for node in tagged.nodes
    ]


def distinct_names(files: Sequence[str]) -> list[str]:
    """Short names of files: as many folders as tell all of them apart.

    A file that is listed twice has a number.

    Examples:
        >>> distinct_names(["bert.onnx", "out/int8.onnx"]), distinct_names(["a/net.onnx", "b/net.onnx"])
        (['bert.onnx', 'int8.onnx'], ['a/net.onnx', 'b/net.onnx'])
        >>> distinct_names(["net.onnx", "net.onnx"])
        ['net.onnx', 'net.onnx (2)']
    """
    parts = [Path(file).parts for file in files]
    different = len(set(parts))
    count = 1
    while count < max(map(len, parts)) and len({each[-count:] for each in parts}) < different:
        count += 1
    names: list[str] = []
    for each in parts:
        name = "/".join(each[-count:])
        number = sum(1 for other in parts[: len(names)] if other == each) + 1
        names.append(name if number == 1 else f"{name} ({number})")
    return names


def page_of_files(files: Sequence[ShownFile]) -> str:
    """Build the page.

    All files are compared with the first one until the reader chooses another.
    """
    rows = _Rows(files)
    words = _Numbers()
    paths = list(rows.places)
    measures = _distinct_measures(files)
    structures = _Numbers()
    data = {
        "files": [_head(file) for file in files],
        "measures": [_measure_head(measure) for measure in measures],
    }
    content = {
        "rows": [[path, rows.parents[path]] for path in paths],
        "files": [
            _content(file, rows.of_file[k], paths, measures, words, structures)
            for k, file in enumerate(files)
        ],
        "words": list(words.places),
    }
    title = " · ".join(file.name for file in files)
    return document(
        title,
        data,
        packed={"content": packed(content)},
        template="together.html",
        style=("page.css", "together.css"),
        scripts=SCRIPTS,
    )


class _Numbers:
    """Numbers for texts, in the order in which they appear: each text is in the page once."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))


class _Rows:
    """The rows of the table: the modules of all files, a module that was moved in one row.

    Attributes:
        places: Path of a row, which is that in the first file that has the module → its position.
        parents: Path of a row → position of the row above it; None at the top.
        of_file: For each file: drawn module → position of its row.
    """

    def __init__(self, files: Sequence[ShownFile]) -> None:
        first = files[0]
        # For each file: drawn module → path of its row.
        rows_of: list[dict[str, str]] = [dict(zip(first.parents, first.parents, strict=True))]
        for file in files[1:]:
            counterparts = aligned_modules(first.aligned, file.aligned)
            rows_of.append({path: counterparts.get(path, path) for path in file.parents})
        above: dict[str, str | None] = {}
        for file, row_of in zip(files, rows_of, strict=True):
            for path, parent in file.parents.items():
                above.setdefault(row_of[path], None if parent is None else row_of[parent])
        order = list(_from_the_top(above))
        self.places = {path: place for place, path in enumerate(order)}
        self.parents = {path: self._place(above[path]) for path in order}
        self.of_file: list[dict[str, int]] = []
        for row_of in rows_of:
            self.of_file.append({path: self.places[row] for path, row in row_of.items()})

    def _place(self, path: str | None) -> int | None:
        return None if path is None else self.places[path]


def _from_the_top(above: Mapping[str, str | None]) -> Iterator[str]:
    """Each module before its descendants, siblings in the order in which they appear."""
    below: dict[str | None, list[str]] = {}
    for path, parent in above.items():
        below.setdefault(parent, []).append(path)
    pending = list(reversed(below.get(None, [])))
    while pending:
        path = pending.pop()
        yield path
        pending.extend(reversed(below.get(path, [])))


def _distinct_measures(files: Iterable[ShownFile]) -> list[Measure]:
    """The measures of all files, each key once: the main ones first, those of every file last."""
    measures: dict[str, Measure] = {}
    for file in files:
        for measure in file.measures:
            measures.setdefault(measure.key, measure)
    return sorted(measures.values(), key=lambda each: (not each.main, each.key in COSTS))


def _head(file: ShownFile) -> dict[str, Any]:
    """The facts about a file that the top of the page shows."""
    advice = [in_both(text) for text in (file.inventory.tags.advice,) if text]
    return {
        "name": file.name,
        **tags_data(file.inventory.tags),
        "nodes": len(file.inventory.nodes),
        "notes": [*advice, *file.notes],
    }


def _measure_head(measure: Measure) -> dict[str, Any]:
    names = ("key", "title", "unit", "main", "named")
    return {name: getattr(measure, name) for name in names}


def _content(
    file: ShownFile,
    row_of: Mapping[str, int],
    paths: Sequence[str],
    measures: Sequence[Measure],
    words: _Numbers,
    structures: _Numbers,
) -> dict[str, Any]:
    """The modules and nodes of a file, as columns: equal kinds of values compress well."""
    modules = file.inventory.modules
    count = len(paths)
    # Position of a row → the module of this file in it.
    at = {row: modules[path] for path, row in row_of.items()}
    by_key = {measure.key: measure for measure in file.measures}
    structure = [-1] * count
    for row, module in at.items():
        structure[row] = structures[file.structures[module.path]]
    return {
        "moved": {row: module.path for row, module in at.items() if module.path != paths[row]},
        "structure": structure,
        "class": [words[at[row].class_name] if row in at else -1 for row in range(count)],
        "nodes": _column(at, count, lambda module: module.nodes),
        "parameters": _column(at, count, lambda module: module.parameters),
        "weight_bytes": _column(at, count, lambda module: module.weight_bytes),
        "values": [_values(by_key.get(measure.key), at, count, words) for measure in measures],
        "graph": _graph(file, row_of, words, structures),
    }


def _graph(
    file: ShownFile, row_of: Mapping[str, int], words: _Numbers, structures: _Numbers
) -> dict[str, Any]:
    """The nodes of a file, with positions of rows, producers and words in place of names."""
    inputs = {tensor.name: -1 - place for place, tensor in enumerate(file.inventory.inputs)}
    outputs = {tensor.name for tensor in file.inventory.outputs}
    nodes = file.inventory.nodes
    producers = []
    for node in nodes:
        read = [inputs.get(link.tensor) if link.node is None else link.node for link in node.inputs]
        producers.append([each for each in dict.fromkeys(read) if each is not None])
    return {
        "inputs": [[tensor.name, tensor.type] for tensor in file.inventory.inputs],
        "op": [words[node.operator] for node in nodes],
        "name": [node.name for node in nodes],
        "type": [words[node.outputs[0].type if node.outputs else ""] for node in nodes],
        "row": [_row_of_node(node.module, row_of) for node in nodes],
        "from": producers,
        "step": [structures[step] for step in file.steps],
        "outputs": {
            tensor.name: place
            for place, node in enumerate(nodes)
            for tensor in node.outputs
            if tensor.name in outputs
        },
    }


def _row_of_node(path: str, row_of: Mapping[str, int]) -> int:
    """The row of the module that a node is drawn in; containers that never ran have none."""
    row = row_of.get(path)
    if row is not None:
        return row
    return row_of[tags.nearest_above(path, row_of) or ""]


def _column(
    at: Mapping[int, ModuleEntry], count: int, number: Callable[[ModuleEntry], int]
) -> list[int | None]:
    """A number of each row's module; None where the file has no module."""
    return [number(at[row]) if row in at else None for row in range(count)]


def _values(
    measure: Measure | None, at: Mapping[int, ModuleEntry], count: int, words: _Numbers
) -> list[float | str | None]:
    """A measure's value for each row: a number, the position of a word, or None.

    An empty list if the file does not have the measure.
    """
    if measure is None:
        return []
    if measure.named:
        texts = measure.words
        return [
            words[texts[at[row].path]] if row in at and at[row].path in texts else None
            for row in range(count)
        ]
    return [
        _short_number(measure.total.get(at[row].path)) if row in at else None
        for row in range(count)
    ]


def _short_number(value: float | None) -> float | str | None:
    """A number with six digits, as whole numbers are exact in the built-in columns."""
    if value is None or not math.isfinite(value):
        return json_number(value)
    return int(value) if value == int(value) else float(f"{value:.6g}")
