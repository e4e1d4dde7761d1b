"""``htp-export bind``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from htp_export.command.options import FileArgument, JsonOption
from htp_export.command.outputs import Writes, report
from htp_export.command.run_options import typed_data
from htp_export.command.terminal import Steps, print_json
from htp_export.errors import InputError
from htp_export.files.targets import Kind

EXAMPLE = "optimised.onnx finetuned/ -o new.onnx"
PLACE = ("Deploy", 0)


def bind_command(
    file: FileArgument,
    weights: Annotated[str, "A safetensors file, its index, a folder, a GGUF file, or a hub id."],
    output: Annotated[
        Path | None, "The ONNX file to write.", Writes(Kind.MODEL, in_place=True)
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="An adapter and its factor: styles/a=0.7. May be repeated."),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict/--no-strict", help="Write nothing if an entry cannot be bound."),
    ] = True,
    cast: Annotated[
        bool, typer.Option("--cast/--no-cast", help="Convert entries of another type.")
    ] = True,
    in_place_data: Annotated[
        bool, "Replace the data file of FILE alone; FILE stays byte for byte as it is."
    ] = False,
    share_weights: Annotated[
        bool, "Refer to the safetensors files of WEIGHTS in place of copying them."
    ] = False,
    only: Annotated[
        list[str] | None,
        "Write the weights of these modules alone, a part; the last part writes OUTPUT.",
    ] = None,
    data: Annotated[
        list[str] | None,
        "Measure the ranges of activations again on these inputs: an .npz file, a folder of these, or "
        "package.module:factory. May be repeated.",
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--map", help="Print a map as JSON: recipes, tensorrt, safetensors, genai, qti."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Load the weights of another checkpoint into a file.

    The file may have been optimised, quantized, pruned, cut or renamed since.
    """
    from htp_export.capabilities.bind.binding import bind

    if output is None and not in_place_data and form is None:
        raise typer.BadParameter("give the file to write with -o, or --in-place-data")
    adapters = dict(map(_adapter, adapter or ()))
    with Steps(quiet=as_json or form is not None).step(f"binding {weights}"):
        result = bind(
            file,
            weights,
            output,
            adapters=adapters,
            strict=strict,
            cast=cast,
            in_place_data=in_place_data,
            share_weights=share_weights,
            only=only,
            data=typed_data(data),
        )
    if form is not None:
        found: Any = result.map(form)  # type: ignore[arg-type] # it refuses others
        print_json(found)
        return
    written = file if output is None else output
    report(result, as_json, output=written if written.exists() else None)


def _adapter(typed: str) -> tuple[str, float]:
    """Parse ``PATH=FACTOR``; the factor is 1 by default."""
    name, equals, factor = typed.rpartition("=")
    if not equals:
        return typed, 1.0
    try:
        return name, float(factor)
    except ValueError as error:
        raise InputError(f"--adapter {typed}: write FOLDER=FACTOR, such as styles/a=0.7") from error
