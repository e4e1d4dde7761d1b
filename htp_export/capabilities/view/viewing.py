"""``view``: a model as a page."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

from htp_export.capabilities.view.engine_results import (
    NamedNumbers,
    named_numbers,
    numbers_in_table,
)
from htp_export.capabilities.view.inventory import Inventory, take_inventory
from htp_export.capabilities.view.measures import Measure, measures_of
from htp_export.capabilities.view.model_explorer.application import (
    MissingApplicationError,
    application,
)
from htp_export.capabilities.view.model_explorer.graphs import drawing
from htp_export.capabilities.view.page.document import asset, document, front_data, page_data
from htp_export.capabilities.view.page.packing import packed
from htp_export.capabilities.view.side_by_side import (
    COSTS,
    ShownFile,
    distinct_names,
    hashes_of,
    page_of_files,
)
from htp_export.editing.flattening import read_flat
from htp_export.errors import FileError, InputError
from htp_export.files.targets import Kind, check_target
from htp_export.files.text_files import read_json, write_text
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, load
from htp_export.process.argument_types import check_fits, checks_arguments, is_torch_module
from htp_export.reporting.columns import si
from htp_export.reporting.result import Result
from htp_export.runtime.data import Data
from htp_export.runtime.settings import RunSettings

if TYPE_CHECKING:
    from torch import nn

    from htp_export.capabilities.inspect.inspected import Inspected, Stop
    from htp_export.capabilities.search.search_results import Search
    from htp_export.costs.result import Cost

_MEASURED = ("time", "cost")
_MOST_NODES = 20_000  # with Model Explorer: a page of 100,000 nodes has 40 MB
_FRAME = "width:100%;height:720px;border:1px solid #ccc;border-radius:8px"

Numbers = object
"""Numbers by module: a result, as of ``profile`` or ``quantize``, or a JSON file of its command."""

Beside: TypeAlias = "ModelSource | tuple[ModelSource, Sequence[Numbers]]"
"""Another file of a page, or such a file and its results."""


@dataclass(frozen=True)
class View(Result):
    """The result of `view`: an HTML page. A notebook displays it.

    Attributes:
        html: The page.
        path: The file that was written; None if there is none.
        nodes: Number of nodes; of several files, the sum.
        modules: Number of modules in the module tree, as of `info`; of several files, the sum.
        missing: The reason why Model Explorer is not in the page; ``""`` if it is.
        failures: Module path → error, for modules of a PyTorch model that could not be exported.
        way: How the graph of a PyTorch model was obtained, as of `inspect`; ``""`` for an ONNX
            model.
        stopped: For each better way, where it failed.
    """

    html: str = field(repr=False)
    path: Path | None
    nodes: int
    modules: int
    missing: str = ""
    failures: Mapping[str, str] = field(default_factory=dict)
    way: str = ""
    stopped: tuple[Stop, ...] = ()

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        page = html.escape(self.html, quote=True)
        return f'<iframe srcdoc="{page}" style="{_FRAME}"></iframe>'

    @property
    def summary(self) -> str:
        """The result in one line."""
        where = str(self.path) if self.path else "a page in memory"
        return f"{where}: {self.modules} modules, {self.nodes} nodes, {si(len(self.html), 'B')}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The reasons why parts are missing, one line each."""
        missing = [f"without Model Explorer: {self.missing}"] if self.missing else []
        failed = (f"{path or '(root)'}: {failure}" for path, failure in self.failures.items())
        return (*missing, *map(str, self.stopped), *failed)


@overload
def view(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    *,
    results: Sequence[Numbers] = (),
    beside: Sequence[Beside] = (),
    measure: str | Sequence[str] = (),
    data: Data | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    explorer: bool | None = None,
    weights: bool = False,
) -> View: ...


@overload
def view(
    model: nn.Module,
    args: Any,
    output: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    results: Sequence[Numbers] = (),
    measure: str | Sequence[str] = (),
    data: Data | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    explorer: bool | None = None,
    weights: bool = False,
) -> View: ...


@checks_arguments
def view(
    model: ModelSource | nn.Module,
    *positional: Any,
    args: Any = None,
    output: str | os.PathLike[str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    results: Sequence[Numbers] = (),
    beside: Sequence[Beside] = (),
    measure: str | Sequence[str] = (),
    data: Data | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    explorer: bool | None = None,
    weights: bool = False,
) -> View:
    """Write or show a model as one offline HTML page: module tree, map, graph, and Model Explorer.

    ``view("model.onnx", "model.html")`` writes the page; ``view(model, args)`` shows a PyTorch
    model, by the best way that `inspect` finds, and the page explains why no better way worked.

    Thread-safe for ONNX models; a PyTorch model must not be used by another thread meanwhile.

    Args:
        model: A file, ``ModelProto``, ``ir.Model`` or `TaggedModel`, with or without tags; or a
            PyTorch module, or the result of `inspect` for it.
        positional: The output; for a PyTorch module its arguments, and then the output.
        args: For a PyTorch module: its positional arguments.
        output: The file to write.
        kwargs: For a PyTorch module: its keyword arguments.
        results: Numbers by module for columns, sizes and colours, and precisions for colours:
            results of ``profile``, ``cost``, ``verify``, ``compare``, ``quantize``, ``prune`` or
            ``sensitivity``, or files that their commands wrote with ``--json``. For a result of
            ``search``, the page shows its front and its plans. Files that other engines wrote where
            they ran the model: traces of ONNX Runtime, files of ``trtexec``, OpenVINO's counters,
            tables of ExecuTorch's Inspector; or numbers by name of a module or node:
            ``{"encoder.layer.0": 1.2}``.
        beside: Further models, each alone or with its results, ``("int8.onnx", [result])``: the
            page is a table with a row for each module and the numbers of all files, and shows the
            graphs of two of them side by side.
        measure: Measurements for the page: ``"time"``, as by ``profile``, and ``"cost"``.
        data: The inputs of the measured run, as for `quantize`; random values by default.
        dims: Open dimension → size, for measurements.
        shapes: Input name → shape, for measurements.
        explorer: Include Model Explorer, which needs the extra ``view``; by default up to 20,000
            nodes. A page without it states the reason.
        weights: Load every weight, and show mean, standard deviation, range and share of zeros.

    Returns:
        The page; a notebook displays it.

    Raises:
        InputError: The model, a result, or a weight cannot be read; or a measurement is not
            possible: a model without tags, or one that does not export, has no times.
        FileError: The page cannot be written, or has the name of a model; existing files are
            unchanged.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> shown = view(net, torch.randn(2, 4), explorer=False)
        >>> shown.modules, shown.nodes, shown.html.startswith("<!doctype html>")
        (3, 2, True)
    """
    from htp_export.capabilities.inspect.inspected import Inspected
    from htp_export.costs.result import Cost

    args, output = _arguments(is_torch_module(model), positional, args, output)
    check_fits(view, "output", output)
    path = _checked_target(output, results)
    kinds = measured_kinds(measure)
    settings = RunSettings(data, dims, shapes)
    if not kinds and settings.has_inputs:
        raise InputError("data, dims and shapes are for a measurement; give measure, too")
    if not is_torch_module(model):
        results = _with_measurements(results, cast(ModelSource, model))
    read = read_results(results)
    if is_torch_module(model):
        from htp_export.capabilities.inspect.inspecting import inspect

        model = inspect(cast(Any, model), () if args is None else args, kwargs=kwargs)
    if beside:
        if isinstance(model, Inspected):
            raise InputError("files side by side are ONNX files; export the PyTorch model first")
        files = [(cast(ModelSource, model), tuple(results)), *map(_with_results, beside)]
        return _side_by_side(files, path, kinds, settings)
    subject = _subject_of(cast(ModelSource, model), kinds)
    tagged, file = subject.tagged, subject.file
    measurements = measured(file or tagged, tagged, kinds, settings)
    if measurements:
        read = read_results([*results, *measurements])
    costs = next((result for result in measurements if isinstance(result, Cost)), None)
    graphs = subject.graphs(shown_graph(tagged, file, statistics=weights, costs=costs))
    graphs = [graph.with_results(read) for graph in graphs]
    page, missing = page_of(graphs, explorer, read.searches)
    if path is not None:
        write_text(path, page)
    inventory = graphs[0].inventory
    modules = inventory.modules
    result = View(
        html=page,
        path=path,
        nodes=len(inventory.nodes),
        modules=len(modules),
        missing=missing,
        failures={path: module.failure for path, module in modules.items() if module.failure},
    )
    if subject.inspected is None:
        return result
    return replace(result, way=subject.inspected.way, stopped=subject.inspected.stopped)


@dataclass(frozen=True)
class _Subject:
    """The model of a page.

    ``file``: its path, as the user passed it; empty for a model in memory. ``inspected``: the
    result of `inspect`, for a PyTorch model.
    """

    tagged: TaggedModel
    file: str = ""
    inspected: Inspected | None = None

    def graphs(self, shown: ShownGraph) -> list[ShownGraph]:
        """The graphs of the page; ``shown``: the whole graph."""
        return [shown] if self.inspected is None else _graphs_of(self.inspected, shown)


def _subject_of(model: ModelSource | Inspected, kinds: Sequence[str]) -> _Subject:
    """Load a model, unless it is inspected already, and check that it can be measured."""
    from htp_export.capabilities.inspect.inspected import Inspected

    if isinstance(model, Inspected):
        if model.way != "onnx" and "time" in kinds:
            raise InputError(f"times need an ONNX model, and this is the {model.summary}")
        return _Subject(model.tagged, inspected=model)
    file = os.fspath(model) if isinstance(model, str | os.PathLike) else ""
    return _Subject(load(model), file)


def _checked_target(
    output: str | os.PathLike[str] | None, results: Sequence[Numbers]
) -> Path | None:
    """The path of the page, which must not replace a model or one of the results."""
    if output is None:
        return None
    path = Path(output)
    files = [result for result in results if isinstance(result, str | os.PathLike)]
    check_target(path, Kind.PAGE, files)
    return path


def _arguments(
    is_torch: bool, positional: Sequence[Any], args: Any, output: Any
) -> tuple[Any, Any]:
    """The arguments of a PyTorch module and the output, which may both be positional."""
    rest = list(positional)
    if is_torch and rest:
        args = rest.pop(0)
    if rest:
        output = rest.pop(0)
    if rest:
        raise TypeError("view takes a model, the arguments of a PyTorch module, and an output")
    return args, output


def _with_results(beside: Beside) -> tuple[ModelSource, Sequence[Numbers]]:
    """A file beside another one, and its results."""
    return beside if isinstance(beside, tuple) else (beside, ())


def _side_by_side(
    files: Sequence[tuple[ModelSource, Sequence[Numbers]]],
    path: Path | None,
    kinds: Sequence[str],
    settings: RunSettings,
) -> View:
    """The page of several files; nothing is written unless all of them can be read."""
    named = [model if isinstance(model, str | os.PathLike) else "" for model, _ in files]
    names = distinct_names([os.fspath(name) or f"model {k}" for k, name in enumerate(named, 1)])
    files = [(model, _with_measurements(results, model)) for model, results in files]
    read = [read_results(results) for _, results in files]
    shown = []
    for (model, results), name, known in zip(files, names, read, strict=True):
        tagged = read_flat(model)
        measurements = measured(model, tagged, kinds, settings)
        if measurements:
            known = read_results([*results, *measurements])
        if known.searches:
            raise InputError(
                f"{name}: the page of several files does not show a search; leave it out"
            )
        graph = shown_graph(tagged).with_results(known)
        structures, steps = hashes_of(tagged)
        notes = graph.note.splitlines()
        shown.append(ShownFile(name, graph.inventory, graph.measures, notes, structures, steps))
    page = page_of_files(shown)
    if path is not None:
        write_text(path, page)
    return View(
        html=page,
        path=path,
        nodes=sum(len(file.inventory.nodes) for file in shown),
        modules=sum(len(file.inventory.modules) for file in shown),
    )


def _graphs_of(inspected: Inspected, shown: ShownGraph) -> list[ShownGraph]:
    """The graphs of a PyTorch model: the whole, followed by Dynamo's if there are several."""
    whole = _with_way(shown, inspected)
    if len(inspected.graphs) < 2:
        return [whole]
    whole = replace(whole, title=f"all {len(inspected.graphs)} graphs")
    return [whole, *_graphs_between_breaks(inspected)]


def _with_way(shown: ShownGraph, inspected: Inspected) -> ShownGraph:
    """The graph of a PyTorch model, with notes on how it was obtained, and with failures."""
    inventory = shown.inventory
    modules = {
        path: replace(module, failure=inspected.failures.get(path, ""))
        for path, module in inventory.modules.items()
    }
    inventory = replace(inventory, modules=modules, notes=(*inventory.notes, *inspected.notes))
    notes = []
    if inspected.way != "onnx":
        notes.append(f"The {inspected.summary}.")
        notes += [f"{stop}." for stop in (*inspected.stopped, *inspected.breaks)]
    if shown.note:
        notes.append(shown.note)
    return replace(shown, inventory=inventory, note="\n".join(notes))


def _graphs_between_breaks(inspected: Inspected) -> list[ShownGraph]:
    """Dynamo's graphs of a model with graph breaks, in the order of `inspect`: largest first."""
    graphs = []
    for name, graph in inspected.graphs.items():
        shown = shown_graph(graph)
        title = f"{name.replace('_', ' ')} of {len(inspected.graphs)}: {len(shown.inventory.nodes)} nodes"
        graphs.append(replace(shown, title=title))
    return graphs


def measured_kinds(measure: str | Sequence[str]) -> list[str]:
    """The distinct measurements of a list of names, or of a text separated by commas."""
    names = measure.split(",") if isinstance(measure, str) else measure
    kinds = list(dict.fromkeys(str(name).strip() for name in names))
    unknown = [kind for kind in kinds if kind not in _MEASURED]
    if unknown:
        raise InputError(f"nothing measures {unknown[0]!r}; there are {', '.join(_MEASURED)}")
    return kinds


def measured(
    model: ModelSource, opened: TaggedModel, kinds: Sequence[str], settings: RunSettings
) -> list[Numbers]:
    """Run ``profile`` and ``cost``; ``profile`` runs the file itself, not the loaded model."""
    from htp_export.capabilities.profile.latency import profile
    from htp_export.costs.costing import cost

    inputs: dict[str, Any] = {
        "data": settings.data,
        "dims": settings.dims,
        "shapes": settings.shapes,
    }
    results: list[Numbers] = []
    for kind in kinds:
        is_time = kind == "time"
        results.append(profile(model, **inputs) if is_time else cost(opened, **inputs))
    return results


def _with_measurements(results: Sequence[Numbers], model: ModelSource) -> list[Numbers]:
    """Results with those of ``profile`` in place of files in which engines recorded times elsewhere.

    Each trace of ONNX Runtime is one result; the files of another engine are one together.
    """
    from htp_export.capabilities.profile.latency import profile
    from htp_export.capabilities.profile.latency_results import OWN_ENGINE
    from htp_export.capabilities.profile.measured_files import engine_of

    shown: list[Numbers] = []
    of_engine: dict[str, list[str | os.PathLike[str]]] = {}
    for result in results:
        engine = engine_of(result) if isinstance(result, str | os.PathLike) else None
        if engine is None:
            shown.append(result)
        elif engine == OWN_ENGINE:
            shown.append(profile(model, measured=[cast("str | os.PathLike[str]", result)]))
        else:
            of_engine.setdefault(engine, []).append(cast("str | os.PathLike[str]", result))
    for engine, files in of_engine.items():
        shown.append(profile(model, measured=files, engine=engine))
    return shown


@dataclass(frozen=True)
class ReadResults:
    """The results for a page.

    Attributes:
        measures: Numbers by module, with distinct keys and titles.
        named: Numbers by name, which depend on the model.
        searches: The results that are searches.
    """

    measures: Sequence[Measure]
    named: Sequence[NamedNumbers] = ()
    searches: Sequence[Search] = ()


def read_results(results: Sequence[Numbers]) -> ReadResults:
    """Read results and their JSON files."""
    from htp_export.capabilities.search.search_results import Search

    measures: list[Measure] = []
    named = []
    searches = []
    for result in results:
        opened = _opened(result)
        if isinstance(opened, NamedNumbers):
            named.append(opened)
        elif isinstance(opened, Search):
            searches.append(opened)
        else:
            measures += opened
    return ReadResults(_numbered(measures), named, searches)


def _numbered(measures: Sequence[Measure]) -> list[Measure]:
    """The measures with distinct keys; the titles of repeated ones have numbers."""
    distinct: dict[str, Measure] = {}
    for measure in measures:
        key = measure.key
        title = measure.title
        number = 1
        while key in distinct:
            number += 1
            key = f"{measure.key}:{number}"
            title = f"{measure.title} ({number})"
        distinct[key] = replace(measure, key=key, title=title)
    return list(distinct.values())


def _opened(result: Numbers, file: str = "numbers") -> list[Measure] | NamedNumbers | Search:
    """The measures of a result or of its JSON file, numbers by name, or the search that it is."""
    from htp_export.capabilities.search.search_results import Search, search_from

    if isinstance(result, str | os.PathLike):
        table = numbers_in_table(Path(result))
        if table is not None:
            return table
        try:
            return _opened(read_json(result), Path(result).stem)
        except FileError:
            raise
        except InputError as error:
            raise FileError(Path(result), str(error)) from error
    search = result if isinstance(result, Search) else search_from(result)
    if search is not None:
        return search
    named = named_numbers(result, file)
    return measures_of(result) if named is None else named


@dataclass(frozen=True)
class ShownGraph:
    """A graph in a page, with its own measures. A page with several has a choice by title.

    ``note`` describes how the graph was obtained; ``file`` is the file as the user named it.
    """

    inventory: Inventory
    measures: Sequence[Measure] = ()
    title: str = ""
    note: str = ""
    file: str = ""

    def with_results(self, results: ReadResults) -> ShownGraph:
        """The same graph with measures of the user, which replace its own with the same key."""
        matched = [named.of_model(self.inventory) for named in results.named]
        measures = _numbered([*results.measures, *(measure for measure, _ in matched)])
        keys = {measure.key for measure in measures}
        kept = [measure for measure in self.measures if measure.key not in keys]
        notes = [self.note, *(note for _, note in matched)]
        return replace(
            self, measures=(*measures, *kept), note="\n".join(note for note in notes if note)
        )


@names_model_faults("model")
def shown_graph(
    model: ModelSource, file: str = "", *, statistics: bool = False, costs: Cost | None = None
) -> ShownGraph:
    """A graph with FLOPs and activations; its note lists assumed sizes, or why they are unknown."""
    from htp_export.costs.costing import cost

    tagged = read_flat(model)
    inventory = take_inventory(tagged, Path(file).name, statistics)
    try:
        costs = cost(tagged) if costs is None else costs
    except InputError as error:
        return ShownGraph(
            inventory, note=f"FLOPs and activations are not known: {error}", file=file
        )
    measures = tuple(measure for measure in measures_of(costs) if measure.key in COSTS)
    note = f"FLOPs and activations: {', '.join(costs.assumed)}." if costs.assumed else ""
    return ShownGraph(inventory, measures, note=note, file=file)


def page_of(
    graphs: Sequence[ShownGraph], explorer: bool | None = None, searches: Sequence[Search] = ()
) -> tuple[str, str]:
    """Build a page of graphs, the first of which is shown first; and why it lacks Model Explorer.

    With several graphs, it has a choice by title. It contains Model Explorer's drawing of each,
    unless that is excluded, which is the default from 20,000 nodes on, and the fronts of searches.
    """
    packed_parts: dict[str, str] = {}
    nodes = sum(len(graph.inventory.nodes) for graph in graphs)
    missing = ""
    if explorer is False:
        missing = "it was left out; view(..., explorer=True) puts it in"
    elif explorer is None and nodes > _MOST_NODES:
        missing = (
            f"of {nodes:,} nodes, it would make the page large and slow; "
            "view(..., explorer=True) puts it in"
        )
    else:
        try:
            packed_parts["explorer-application"] = packed(application(asset("frame.js")))
            for k, graph in enumerate(graphs):
                drawn = drawing(graph.inventory, graph.measures)
                packed_parts[f"explorer-drawing-{k}"] = packed(drawn)
        except MissingApplicationError as error:
            missing = str(error)
    first, *further = (
        page_data(graph.inventory, graph.measures, missing, graph.file) for graph in graphs
    )
    data: dict[str, Any] = {f"data-{k}": graph_data for k, graph_data in enumerate(further, 1)}
    data["fronts"] = [front_data(search) for search in searches]
    data["graphs"] = [
        {"title": graph.title or graph.inventory.name, "note": graph.note} for graph in graphs
    ]
    return document(graphs[0].inventory.name, first, packed_parts, data), missing
