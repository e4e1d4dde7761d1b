"""``htp-export view``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from htp_export.command.file_options import JsonOption
from htp_export.command.idle_options import Idle
from htp_export.command.interrupts import accept_interrupt
from htp_export.command.model_options import FILE_IDLE, Looked, LookOptions, names_file
from htp_export.command.outputs import Kind, Writes, check_output, show_written, written_page
from htp_export.command.terminal import Steps, print_json, show
from htp_export.errors import InputError

if TYPE_CHECKING:
    from htp_export.capabilities.view.viewing import View

EXAMPLE = "bert.onnx -o bert.html"
PLACE = 30
IDLE = (
    Idle(("port",), lambda given: not given["serve"], "it is for --serve"),
    Idle(("graph", "weights"), lambda given: given["netron"] or given["overlay"], "it is for the page"),
    FILE_IDLE,
    Idle(("inputs",), names_file, FILE_IDLE.why),
)


_Overlay: TypeAlias = Literal["latency", "error", "flops", "precision", "sparsity", "dtype"]
_MEASURES = {
    "latency": ("total_ms", "--profile", "profile"),
    "error": ("max_abs", "--verify", "verify"),
    "flops": ("flops", "--cost", "cost"),
    "precision": ("precision", "--result", "quantize"),
    "sparsity": ("sparsity", "--result", "prune"),
}
"""The key of the measure that is drawn, the option that gives it, and the command that writes it."""


def view_command(
    model: LookOptions,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page.", show_default="FILE.html"), Writes()
    ] = None,
    profile: Annotated[Path | None, "What `profile --json` wrote: latency by module."] = None,
    cost: Annotated[Path | None, "What `cost --json` wrote: FLOPs and memory by module."] = None,
    verify: Annotated[Path | None, "What `verify --json` or `compare --json` wrote: errors."] = None,
    result: Annotated[
        list[Path] | None, "What another command wrote with `--json`: `quantize`, `prune`, `sensitivity`; repeatable."
    ] = None,
    graph: Annotated[bool, typer.Option("--graph/--no-graph", help="Put the interactive graph into the page.")] = True,
    weights: Annotated[bool, "Read the weights: show mean, spread, range and zeros of each."] = False,
    overlay: Annotated[_Overlay | None, "Write one overlay for Model Explorer (node data JSON), not a page."] = None,
    netron: Annotated[bool, "Write Netron's sidecar, to be dropped onto the open model, not a page."] = False,
    serve: Annotated[bool, "Serve the page on this machine, at an address that is printed; no file."] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where --serve listens; 0 for any free port.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Draw a model as one offline page.

    Of an ONNX file, or of a PyTorch model, which need not export to ONNX. It shows the module tree, a map of it and the
    interactive graph, and loads nothing from elsewhere.
    """
    if sum((overlay is not None, netron, serve)) > 1:
        raise InputError("--overlay, --netron and --serve each do another thing; give one of them")
    results = [path for path in (profile, cost, verify, *(result or ())) if path is not None]
    if serve:
        if output is not None:
            raise InputError("--serve writes no file; leave out --output")
        _serve(model, results, port, graph=graph, weights=weights, as_json=as_json)
        return
    if (overlay or netron) and not model.is_file:
        raise InputError("--overlay and --netron are for an ONNX file that Model Explorer or Netron opens")
    file = Path(str(model.source) if model.is_file else "model")
    target = output or file.with_suffix(".netron.json" if netron else f".{overlay}.json" if overlay else ".html")
    kind = Kind.JSON if netron or overlay else Kind.PAGE
    check_output(target, kind)
    looked = model.look(quiet=as_json)
    if overlay is not None:
        _write(target, _overlay(file, overlay, results))
    elif netron:
        _write(target, _attachment(file, results))
    else:
        _page(looked, target, results, graph=graph, weights=weights, as_json=as_json)
        return
    written = written_page(target)
    if as_json:
        print_json({"file": str(target), "files": written})
        return
    show_written(written)
    if written:
        netrons = f"open {file} in Netron, and drop {target} onto it"
        show(f"next: {netrons if netron else f'open {file} in Model Explorer, and add {target} as node data'}")


def _page(looked: Looked, target: Path, results: list[Path], *, graph: bool, weights: bool, as_json: bool) -> None:
    from htp_export.capabilities.view.viewing import view

    with Steps(quiet=as_json).step(f"drawing {looked.name}"):
        shown = view(looked.model, target, results=results, graph=graph, weights=weights)
    written, counts = written_page(target), _counts(shown)
    if as_json:
        print_json({"file": str(target), "files": written, **looked.facts, **counts})
        return
    _show_counts(shown)
    show_written(written)
    if written:
        show(f"next: open {target} in a browser")


def _counts(shown: View) -> dict[str, object]:
    return {"modules": shown.modules, "nodes": shown.nodes, "missing": shown.missing}


def _show_counts(shown: View) -> None:
    show(f"{shown.modules:,} modules, {shown.nodes:,} nodes")
    if shown.missing:
        show(f"without the graph: {shown.missing}")


def _overlay(file: Path, overlay: _Overlay, results: list[Path]) -> dict[str, object]:
    from htp_export.capabilities.view.model_explorer.overlays import dtype_overlay, overlay_of
    from htp_export.capabilities.view.viewing import inventory_of, read_results

    measures = {measure.key: measure for measure in read_results(results)}
    if overlay == "dtype":
        return dtype_overlay(inventory_of(file))
    key, option, command = _MEASURES[overlay]
    if key not in measures:
        raise InputError(f"--overlay {overlay} needs a result: give {option} with the JSON of htp-export {command}")
    return overlay_of(measures[key], inventory_of(file))


def _attachment(file: Path, results: list[Path]) -> dict[str, object]:
    from htp_export.capabilities.view.netron import netron_attachment
    from htp_export.capabilities.view.viewing import inventory_of, read_results

    return netron_attachment(inventory_of(file), [measure for measure in read_results(results) if measure.main])


def _write(path: Path, data: dict[str, object]) -> None:
    from htp_export.files.text_files import write_text

    write_text(path, json.dumps(data, indent=1), Kind.JSON)


def _serve(model: LookOptions, results: list[Path], port: int, *, graph: bool, weights: bool, as_json: bool) -> None:
    from htp_export.capabilities.view.page.server import PageServer
    from htp_export.capabilities.view.viewing import view

    with PageServer(port) as server:  # before the work: the port may be taken
        looked = model.look(quiet=as_json)
        with Steps(quiet=as_json).step(f"drawing {looked.name}"):
            shown = view(looked.model, results=results, graph=graph, weights=weights)
        if as_json:
            print_json({"url": server.url, **looked.facts, **_counts(shown)})
        else:
            _show_counts(shown)
            typer.echo(f"{server.url}\nCtrl-C ends it")
        sys.stdout.flush()  # a program that started this one waits for the address
        server.run(shown.html)
        accept_interrupt()
