#!/usr/bin/env python3
"""Accuracy of `htp_export.fingerprint` over models of transformers with random weights.

    python tools/fingerprint_accuracy.py export --folder models/   # write the files, by each exporter that can, once
    python tools/fingerprint_accuracy.py score --folder models/    # the table of docs/fingerprint.md
    python tools/fingerprint_accuracy.py score --folder models/ --half "held out"

The models are those of ``fingerprint_models.py``: one half the rules were made with, the other nobody has looked into.
Every file is looked at twice: with its tags, and with all metadata, names of nodes and names of weights taken off. A
model counts as right if each of its files is.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fingerprint_models import HELD_OUT, TUNED, Model, smaller

import htp_export

HALVES = {"tuned": TUNED, "held out": HELD_OUT}
EXPORTERS = ("torchscript", "dynamo")


def built(name: str, model: Model) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in eval mode, and keyword arguments for one call of it."""
    from transformers import AutoConfig

    from htp_export.huggingface import example_inputs, load_model

    torch.manual_seed(0)
    if model.build is not None:
        made, inputs = model.build()
        return made.eval(), inputs
    general = smaller(AutoConfig.for_model(name)) if model.smaller or not model.overrides else {}
    overrides = {**general, **model.overrides}
    made = load_model(name, random_weights=True, overrides=overrides)
    if hasattr(made.config, "_experts_implementation"):
        made.config._experts_implementation = "batched_mm"  # the default has no translation to ONNX
    inputs = dict(example_inputs(made))
    if "decoder_input_ids" in inputs:
        # the vocabulary is smaller than the config's special tokens know
        inputs["decoder_input_ids"] %= 1000
    return made, inputs


def export(folder: Path, halves: list[str], names: list[str], exporters: list[str]) -> int:
    """Write the files that are not there; how many models no exporter could export."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, model in {
        name: model for half in halves for name, model in HALVES[half].items()
    }.items():
        if names and name not in names:
            continue
        for exporter in exporters:
            file = folder / f"{name}.{exporter}.onnx"
            start = time.perf_counter()
            if not file.exists():
                try:
                    net, inputs = built(name, model)
                    htp_export.export(
                        net, (), file, kwargs=inputs, dynamo=exporter == "dynamo", verbose=False
                    )
                except Exception as error:
                    line = str(error).strip().splitlines()[-1:] or [""]
                    print(
                        f"{name}: {exporter}: {type(error).__name__}: {line[0][:120]}", flush=True
                    )
                else:
                    print(f"{name}: {exporter}, {time.perf_counter() - start:.1f} s", flush=True)
        failed += not any(files_of(folder, name))
    return failed


def files_of(folder: Path, name: str) -> Iterator[Path]:
    """The files of a model that are there."""
    return (file for exporter in EXPORTERS if (file := folder / f"{name}.{exporter}.onnx").exists())


def score(folder: Path, halves: list[str], as_json: bool) -> int:
    """Print one row for each model, and how many are right; how many are not."""
    rows = [
        scored(folder, half, name, model) for half in halves for name, model in HALVES[half].items()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print(
            "| half | model | family | files | with tags | without | blocks with tags | without |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for row in rows:
            files = [file["exporter"] for file in row["files"]]
            said = [named(row, key) for key in ("tagged", "bare", "blocks", "bare blocks")]
            print(
                f"| {row['half']} | {row['model']} | {row['family']} | {', '.join(files)} | {' | '.join(said)} |"
            )
        print()
        for half in halves:
            ours = [row for row in rows if row["half"] == half]
            right = {key: sum(is_right(row, key) for row in ours) for key in ("tagged", "bare")}
            print(
                f"{half}: {right['tagged']} of {len(ours)} right with tags, {right['bare']} without"
            )
    return sum(not is_right(row, key) for row in rows for key in ("tagged", "bare"))


def scored(folder: Path, half: str, name: str, model: Model) -> dict[str, Any]:
    """What is said about each file of a model."""
    files = []
    for file in files_of(folder, name):
        tagged, bare = htp_export.fingerprint(file), htp_export.fingerprint(stripped(file))
        files.append(
            {
                "exporter": file.suffixes[-2][1:],
                "tagged": tagged.family,
                "bare": bare.family,
                "blocks": [f"{block.count} × {block.name}" for block in tagged.blocks[:1]],  # noqa: RUF001 - "times"
                "bare blocks": [f"{one.count} × {one.nodes} nodes" for one in bare.blocks[:1]],  # noqa: RUF001
            }
        )
    return {"half": half, "model": name, "family": model.family, "files": files}


def is_right(row: dict[str, Any], key: str) -> bool:
    """Whether each file of a model is said to be what it is; one without any file is not."""
    return bool(row["files"]) and all(file[key] == row["family"] for file in row["files"])


def named(row: dict[str, Any], key: str) -> str:
    """What is said of all files of a model, in one cell."""
    if key in ("tagged", "bare"):
        found = dict.fromkeys(file[key] for file in row["files"])
        return "right" if is_right(row, key) else f"**{', '.join(found) or 'no file'}**"
    return next((file[key][0] for file in reversed(row["files"]) if file[key]), "none")


def stripped(file: Path) -> Any:
    """The model of a file without metadata, and with no names that could tell anything."""
    tagged = htp_export.load(file)
    model = tagged.model
    model.metadata_props.clear()
    for number, node in enumerate(tagged.nodes):
        node.metadata_props.clear()
        node.name = f"n{number}"
        for output in node.outputs:
            output.metadata_props.clear()
    for number, value in enumerate(list(model.graph.inputs)):
        value.name = f"i{number}"
    for number, value in enumerate(list(model.graph.initializers.values())):
        value.name = f"w{number}"
    model.graph.name = "g"
    return model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["export", "score"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=[], help="only these are exported")
    parser.add_argument("--exporters", nargs="+", default=list(EXPORTERS), choices=EXPORTERS)
    parser.add_argument("--half", choices=list(HALVES), action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    halves = options.half or list(HALVES)
    if options.what == "export":
        return export(options.folder, halves, options.models, options.exporters)
    return score(options.folder, halves, options.json)


if __name__ == "__main__":
    sys.exit(main())
