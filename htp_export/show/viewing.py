"""``view``: a model as a page."""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from htp_export.errors import FileError, InputError
from htp_export.files.json_file import read_json
from htp_export.files.model_files import check_target
from htp_export.model.columns import si
from htp_export.model.drawn_levels import drawn_parents
from htp_export.model.inlining import read_flat
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource
from htp_export.show.inventory import Inventory, take_inventory
from htp_export.show.measures import Measure, measures_of
from htp_export.show.model_explorer.application import MissingApplicationError, application, packed
from htp_export.show.model_explorer.drawing import drawing
from htp_export.show.page.document import asset, document
from htp_export.show.page.payload import page_data
from htp_export.show.text_file import check_name, write_text

if TYPE_CHECKING:
    from torch import nn

__all__ = ["View", "inventory_of", "read_results", "view"]

_FRAME = "width:100%;height:720px;border:1px solid #ccc;border-radius:8px"

Result = object
"""Numbers by module: what ``profile``, ``cost`` or ``verify`` returns, or a JSON file that its command wrote."""


@dataclass(frozen=True)
class View:
    """The result of `view`: an HTML page. A notebook displays it.

    Attributes:
        html: The page.
        path: The file that was written; None if there is none.
        nodes: Number of nodes in the page.
        modules: Number of modules in the page, without containers that never ran.
        missing: Why the interactive graph is missing; ``""`` if it is there.
        failures: Module path → error, for modules of a PyTorch model that could not be exported.
    """

    html: str = field(repr=False)
    path: Path | None
    nodes: int
    modules: int
    missing: str = ""
    failures: Mapping[str, str] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        page = html.escape(self.html, quote=True)
        return f'<iframe srcdoc="{page}" style="{_FRAME}"></iframe>'

    @property
    def summary(self) -> str:
        """The result in one line."""
        where = str(self.path) if self.path else "a page in memory"
        return f"{where}: {self.modules} modules, {self.nodes} nodes, {si(len(self.html), 'B')}"

    def __str__(self) -> str:
        lines = [self.summary, *([f"without the graph: {self.missing}"] if self.missing else [])]
        return "\n".join([*lines, *(f"{path or '(root)'}: {why}" for path, why in self.failures.items())])


@overload
def view(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    *,
    results: Sequence[Result] = (),
    graph: bool = True,
    weights: bool = False,
) -> View: ...


@overload
def view(
    model: nn.Module,
    args: Any,
    output: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    results: Sequence[Result] = (),
    graph: bool = True,
    weights: bool = False,
) -> View: ...


def view(
    model: Any,
    *positional: Any,
    args: Any = None,
    output: str | os.PathLike[str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    results: Sequence[Result] = (),
    graph: bool = True,
    weights: bool = False,
) -> View:
    """Write or show a model as one offline HTML page: module tree, map, and interactive graph.

    ``view("model.onnx", "model.html")`` writes the page; ``view(model, args)`` shows a PyTorch model, which is exported
    to memory. If the export fails, its modules are exported one by one, and the page has the errors of those that fail.

    Thread-safe for ONNX models; a PyTorch model must not be used by another thread meanwhile.

    Args:
        model: A file, ``ModelProto``, ``ir.Model`` or `TaggedModel`, with or without tags; or a PyTorch module.
        positional: The output; for a PyTorch module its arguments, and then the output.
        args: For a PyTorch module: its positional arguments.
        output: The file to write.
        kwargs: For a PyTorch module: its keyword arguments.
        results: Numbers by module for columns, sizes and colours: results of ``profile``, ``cost``, ``verify`` or
            ``compare``, or files that their commands wrote with ``--json``.
        graph: Include Model Explorer's graph. It needs the extra ``view``; without it the page says so.
        weights: Read every weight, and show mean, standard deviation, range and share of zeros.

    Returns:
        The page; a notebook displays it.

    Raises:
        InputError: The model, a result, or a weight that is to be shown cannot be read.
        FileError: The page cannot be written, or has the name of a model; existing files are unchanged.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> shown = view(net, torch.randn(2, 4), graph=False)
        >>> shown.modules, shown.nodes, shown.html.startswith("<!doctype html>")
        (3, 2, True)
    """
    arguments = list(positional)
    if _is_module(model):
        args = arguments.pop(0) if arguments else args
    if arguments:
        output = arguments.pop(0)
    if arguments:
        raise TypeError("view takes a model, the arguments of a PyTorch module, and an output")
    path = None if output is None else Path(output)
    if path is not None:
        check_name(path)
        check_target(path)
    measures = read_results(results)
    if _is_module(model):
        from htp_export.show.parts import inventory_of_module

        inventory = inventory_of_module(model, _as_tuple(args), kwargs, statistics=weights)
    else:
        inventory = inventory_of(model, weights)
    page, missing = _page(inventory, measures, graph)
    if path is not None:
        write_text(path, page)
    failures = {path: module.failure for path, module in inventory.modules.items() if module.failure}
    return View(page, path, len(inventory.nodes), len(drawn_parents(inventory.modules)), missing, failures)


@names_model_faults("model")
def inventory_of(model: ModelSource, statistics: bool = False) -> Inventory:
    """The inventory of a model, with the name of its file, and the statistics of its weights if requested."""
    name = Path(model).name if isinstance(model, str | os.PathLike) else ""
    return take_inventory(read_flat(model), name, statistics)


def read_results(results: Sequence[Result]) -> list[Measure]:
    """The numbers by module in results, and in files of them.

    Raises:
        FileError: If a file cannot be read, or holds no such numbers.
    """
    measures: list[Measure] = []
    for result in results:
        if not isinstance(result, str | os.PathLike):
            measures += measures_of(result)
            continue
        try:
            measures += measures_of(read_json(result))
        except FileError:
            raise
        except InputError as error:
            raise FileError(Path(result), str(error)) from error
    return measures


def _page(inventory: Inventory, measures: Sequence[Measure], graph: bool) -> tuple[str, str]:
    """The page, and why there is no graph in it."""
    in_page: dict[str, str] = {}
    missing = "" if graph else "it was left out"
    if graph:
        try:
            in_page["graph-application"] = packed(application(asset("frame.js")))
            in_page["graph-drawing"] = packed(drawing(inventory, measures))
        except MissingApplicationError as error:
            missing = str(error)
    return document(inventory.name, page_data(inventory, measures, missing), in_page), missing


def _is_module(model: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _as_tuple(args: Any) -> tuple[Any, ...]:
    return () if args is None else tuple(args) if isinstance(args, tuple | list) else (args,)
