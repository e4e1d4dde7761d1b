"""``htp-export view``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from htp_export.command.model_options import FILE_IDLE, LookOptions, names_file
from htp_export.command.options import Idle, JsonOption
from htp_export.command.outputs import Writes, check_output, show_written, written_page
from htp_export.command.run_options import InputOptions
from htp_export.command.streams import quiet_runtime
from htp_export.command.terminal import Steps, print_json, show
from htp_export.errors import InputError
from htp_export.files.targets import Kind
from htp_export.process.interrupts import accept_interrupt
from htp_export.reporting.command_words import in_commands

if TYPE_CHECKING:
    from htp_export.capabilities.view.viewing import View
    from htp_export.runtime.settings import RunSettings

EXAMPLE = "bert.onnx -o bert.html"
PLACE = ("Look", 4)
SEVERAL = ("--with",)
IDLE = (
    Idle(("port",), lambda given: not given["serve"], "it is for --serve"),
    Idle(("output",), lambda given: given["serve"], "--serve writes no file"),
    Idle(
        ("explorer", "weights"),
        lambda given: given["netron"] or given["overlay"],
        "it is for the page",
    ),
    Idle(
        ("explorer", "weights"),
        lambda given: given["beside"],
        "it is for the page of a single file",
    ),
    FILE_IDLE,
    Idle(
        ("shapes",),
        lambda given: names_file(given) and not given["measure"],
        "it is for a model without a file, or for --measure",
    ),
    Idle(("data", "dims"), lambda given: not given["measure"], "it is for --measure"),
    Idle(
        ("data", "dims"),
        lambda given: not names_file(given),
        "a PyTorch model has the inputs of its example",
    ),
)


_Overlay: TypeAlias = Literal["latency", "error", "flops", "precision", "sparsity", "dtype"]
_MEASURES = {
    "latency": ("total_ms", "--profile", "profile", "time"),
    "error": ("max_abs", "--verify", "verify", ""),
    "flops": ("flops", "--cost", "cost", "cost"),
    "precision": ("precision", "--result", "quantize", ""),
    "sparsity": ("sparsity", "--result", "prune", ""),
}
"""Overlay → key of its measure, option and command of the result, and kind of measurement."""


def view_command(
    model: LookOptions,
    runs_on: InputOptions,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The page.", show_default="FILE.html"),
        Writes(),
    ] = None,
    profile: Annotated[Path | None, "Output of `profile --json`: latency by module."] = None,
    cost: Annotated[Path | None, "Output of `cost --json`: FLOPs and memory by module."] = None,
    verify: Annotated[Path | None, "Output of `verify --json` or `compare --json`: errors."] = None,
    result: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FILE=]JSON",
            help="Output of another command with `--json`, or of another engine; repeatable. "
            "With `--with`, that of a file: int8.onnx=int8.json.",
        ),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="FILE...",
            help="Further files, as columns: a row for each module, and two graphs side by side.",
        ),
    ] = None,
    measure: Annotated[
        str | None, "Measure it first: time (as `profile`), cost, or both by comma: time,cost."
    ] = None,
    explorer: Annotated[
        bool | None,
        typer.Option(
            "--explorer/--no-explorer",
            help="Put Model Explorer into the page.",
            show_default="up to 20,000 nodes",
        ),
    ] = None,
    weights: Annotated[
        bool, "Read the weights; show mean, spread, range and zeros of each."
    ] = False,
    overlay: Annotated[
        _Overlay | None, "Write one overlay for Model Explorer (node data JSON), not a page."
    ] = None,
    netron: Annotated[
        bool, "Write Netron's sidecar, to be dropped onto the open model, not a page."
    ] = False,
    serve: Annotated[
        bool, "Serve the page on this machine, at an address that is printed; no file."
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where --serve listens; 0 for any free port.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Draw a model as one offline page.

    The model is an ONNX file or a PyTorch model, which need not be exportable. The page shows the
    module tree, a map of it and the graph, and loads nothing from elsewhere.
    """
    from htp_export.capabilities.view.viewing import measured_kinds

    if sum((overlay is not None, netron, serve)) > 1:
        raise InputError("--overlay, --netron and --serve exclude each other; choose one")
    kinds = measured_kinds(measure or ())
    given = model.run_keywords(runs_on)
    further = list(beside or ())
    if further and (overlay or netron or not model.is_file):
        raise InputError("--with is for the page of an ONNX file; export a PyTorch model first")
    _check_models(further)
    results_of = _results_by_file([str(model.source), *map(str, further)], result or ())
    results: list[Any] = [path for path in (profile, cost, verify) if path is not None]
    results += results_of[0]

    def draw(page: Path | None) -> tuple[View, dict[str, Any]]:
        """Draw the page into a file or memory; return it with facts for JSON."""
        from htp_export.capabilities.view.viewing import view

        looked = model.look(quiet=as_json)
        doing = "measuring and drawing" if kinds else "drawing"
        with Steps(quiet=as_json).step(f"{doing} {looked.name}"), quiet_runtime():
            shown = view(
                looked.model,
                page,
                results=results,
                beside=list(zip(further, results_of[1:], strict=True)),
                measure=kinds,
                **given,
                explorer=explorer,
                weights=weights,
            )
        return shown, {
            **looked.facts,
            "modules": shown.modules,
            "nodes": shown.nodes,
            "missing": shown.missing,
        }

    if serve:
        is_one_file = model.is_file and not further
        _serve(
            draw, Path(str(model.source)) if is_one_file else None, port, as_json, 1 + len(further)
        )
        return
    if (overlay or netron) and not model.is_file:
        raise InputError(
            "--overlay and --netron are for an ONNX file that Model Explorer or Netron opens"
        )
    if netron or overlay:
        _write_sidecar(model, overlay, output, results, kinds, given, as_json=as_json)
        return
    file = Path(str(model.source) if model.is_file else "model")
    target = output or file.with_suffix(".html")
    check_output(target, Kind.PAGE)
    shown, facts = draw(target)
    _report(target, f"open {target} in a browser", as_json, shown, facts, files=1 + len(further))


def _write_sidecar(
    model: LookOptions,
    overlay: _Overlay | None,
    output: Path | None,
    results: Sequence[Path],
    kinds: Sequence[str],
    runs_on: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """Write an overlay for Model Explorer, or Netron's sidecar, for a file that these open."""
    from htp_export.files.text_files import write_text
    from htp_export.runtime.settings import RunSettings

    file = Path(str(model.source))
    settings = RunSettings(**runs_on)
    if overlay is None:
        target = output or file.with_suffix(".netron.json")
        viewer = f"Netron, and drop {target} onto it"
    else:
        target = output or file.with_suffix(f".{overlay}.json")
        viewer = f"Model Explorer, and add {target} as node data"
    check_output(target, Kind.JSON)
    model.check_file()
    sidecar = _sidecar(file, overlay, results, kinds, settings, Steps(quiet=as_json))
    write_text(target, json.dumps(sidecar, indent=1), Kind.JSON)
    _report(target, f"open {file} in {viewer}", as_json)


def _check_models(files: Sequence[Path]) -> None:
    """Refuse files of measurements in place of models."""
    from htp_export.capabilities.view.engine_results import is_measured

    for file in files:
        if is_measured(file):
            raise InputError(
                f"--with {file}: this file has times and no model; give --result {file}"
            )


def _results_by_file(files: Sequence[str], results: Sequence[str]) -> list[list[str]]:
    """The results of each file; one without ``FILE=`` belongs to the first.

    A file is named as it was typed, by its last part, or by that without ``.onnx``.
    """
    found: list[list[str]] = [[] for _ in files]
    for result in results:
        name, equals, path = result.partition("=")
        if not equals or Path(result).exists():
            found[0].append(result)
            continue
        places = [place for place, file in enumerate(files) if name in _names_of(file)]
        if len(places) != 1:
            problem = "no file" if not places else "several files"
            raise InputError(
                f"--result {result}: {problem} of this page {'is' if not places else 'are'} called "
                f"{name!r}; there are {', '.join(files)}"
            )
        found[places[0]].append(path)
    return found


def _names_of(file: str) -> tuple[str, str, str]:
    path = Path(file)
    return file, path.name, path.stem


def _report(
    target: Path,
    step: str,
    as_json: bool,
    shown: View | None = None,
    facts: Mapping[str, Any] = MappingProxyType({}),
    files: int = 1,
) -> None:
    """Report the written files, and the next step; ``files``: those that the page shows."""
    written = written_page(target)
    if as_json:
        print_json({"file": str(target), "files": written, **facts})
        return
    if shown is not None:
        _show_counts(shown, files)
    show_written(written)
    if written:
        show(f"next: {step}")


def _show_counts(shown: View, files: int) -> None:
    both = f" in {files} files" if files > 1 else ""
    show(f"{shown.modules:,} modules, {shown.nodes:,} nodes{both}")
    if shown.missing:
        show(f"without Model Explorer: {in_commands(shown.missing)}")


def _sidecar(
    file: Path,
    overlay: _Overlay | None,
    results: Sequence[Path],
    kinds: Sequence[str],
    settings: RunSettings,
    steps: Steps,
) -> dict[str, Any]:
    """The sidecar for another viewer: an overlay of Model Explorer, or else Netron's."""
    from htp_export.capabilities.view.inventory import take_inventory
    from htp_export.capabilities.view.model_explorer.graphs import (
        dtype_overlay,
        netron_attachment,
        overlay_of,
    )
    from htp_export.capabilities.view.viewing import measured, read_results
    from htp_export.editing.flattening import read_flat

    measures = read_results(results).measures
    key, option, command, kind = _MEASURES.get(overlay or "", ("",) * 4)
    if key and kind not in kinds and all(measure.key != key for measure in measures):
        raise InputError(
            f"--overlay {overlay} needs a result: give {option} with the JSON of htp-export {command}"
        )
    tagged = read_flat(file)
    if kinds:
        with steps.step(f"measuring {file}"), quiet_runtime():
            measured_too = measured(file, tagged, kinds, settings)
        measures = read_results([*results, *measured_too]).measures
    inventory = take_inventory(tagged, file.name)
    if overlay is None:
        return netron_attachment(inventory, [measure for measure in measures if measure.main])
    if overlay == "dtype":
        return dtype_overlay(inventory)
    return overlay_of(next(measure for measure in measures if measure.key == key), inventory)


def _serve(
    draw: Callable[[Path | None], tuple[View, dict[str, Any]]],
    file: Path | None,
    port: int,
    as_json: bool,
    files: int,
) -> None:
    """Draw the page and serve it until Ctrl-C; with a file, also the values of its tensors."""
    from htp_export.capabilities.view.page.document import served
    from htp_export.capabilities.view.page.server import PageServer
    from htp_export.capabilities.view.tensor_values import TensorValues
    from htp_export.editing.flattening import read_flat

    with PageServer(port) as server:  # before the work: the port may be in use
        shown, facts = draw(None)
        # before the address is shown: the file may change from then on
        values = None if file is None else TensorValues(read_flat(file))
        if as_json:
            print_json({"url": server.url, **facts})
        else:
            _show_counts(shown, files)
            typer.echo(f"{server.url}\nCtrl-C ends it")
        sys.stdout.flush()  # a parent process waits for the address
        server.run(shown.html if values is None else served(shown.html), values)
        accept_interrupt()
