"""The checks of one exported architecture: by torch, by transformers' exporters, and by `htp_export`.

Modules are held against PyTorch by ``tests/truth.py``, which runs both and compares tensors, and never asks how the
tags were made.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

import htp_export
from tests.same_graph import difference
from tests.truth import Judge, equal, leaves, tree_of, untagged

Row = dict[str, Any]
Inputs = dict[str, Any]
EXPORTERS = ("dynamo", "torchscript")
SHOWN = 3  # modules that are not exact, in a row


@dataclass(frozen=True)
class Subject:
    """One architecture.

    Attributes:
        name: Library and model: ``"transformers/bert"``.
        build: Makes the model, in eval mode with spread weights, and its keyword inputs.
    """

    name: str
    build: Callable[[], tuple[torch.nn.Module, Inputs]]


def examine(subject: Subject, folder: Path, note: Callable[[Row], None]) -> Row:
    """Export one architecture in every way and compare; ``note`` gets the row whenever there is more of it.

    The time ratio is one export with tags by one of torch's. The first export of a model takes longest: of half of the
    architectures it is torch's.
    """
    row: Row = {"name": subject.name, "stage": "build"}
    note(row)
    torch.manual_seed(0)
    try:
        model, inputs = subject.build()
        with torch.no_grad():
            first, again = leaves(model(**inputs)), leaves(model(**inputs))
    except Exception as error:
        return {**row, "error": said(error)}
    row["class"], row["parameters"] = (
        type(model).__name__,
        sum(each.numel() for each in model.parameters()),
    )
    row["modules"] = sum(1 for _ in model.modules())
    row["torch_first"] = len(subject.name) % 2 == 0  # the first export of a process takes longer
    row["random"] = not all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again, strict=True)
    )
    for exporter in EXPORTERS:
        one: Row = {}
        row[exporter] = one
        files = {who: folder / exporter / who / "model.onnx" for who in ("torch", "ours")}
        calls = {"torch": torch.onnx.export, "ours": htp_export.export}
        for who in sorted(files, reverse=row["torch_first"]):
            row["stage"] = f"{exporter}, {who}"
            note(row)
            files[who].parent.mkdir(parents=True)
            one[who] = attempted(
                calls[who], copied_model(model), inputs, files[who], exporter == "dynamo"
            )
        row["stage"] = f"{exporter}, comparison"
        note(row)
        if "error" not in one["torch"] and "error" not in one["ours"]:
            one["difference"] = difference(read(files["ours"]), read(files["torch"]))
            one["ratio"] = one["ours"]["seconds"] / one["torch"]["seconds"]
        if "error" not in one["ours"]:
            one.update(judged(model, inputs, read(files["ours"])))
    if subject.name.startswith("transformers/"):
        row["stage"] = "transformers.exporters"
        note(row)
        row["transformers"] = by_transformers(model, inputs, folder / "transformers")
    row["stage"] = "done"
    note(row)
    return row


def attempted(
    call: Callable[..., Any], model: torch.nn.Module, inputs: Inputs, path: Path, dynamo: bool
) -> Row:
    """How much processor time an export took, or why it failed."""
    began = time.process_time()  # what else the machine does is not counted
    try:
        with torch.no_grad():
            call(model, (), path, kwargs=copy.deepcopy(inputs), dynamo=dynamo, verbose=False)
    except Exception as error:
        return {"error": said(error)}
    return {"seconds": round(time.process_time() - began, 2)}


def by_transformers(model: torch.nn.Module, inputs: Inputs, folder: Path) -> Row:
    """Whether transformers' exporter takes the model, and what `tagging` makes of its file."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    def export() -> Any:
        return OnnxExporter().export(copied_model(model), copy.deepcopy(inputs), OnnxConfig())

    try:
        with htp_export.tagging():
            exported = export()
    except Exception as error:
        try:
            export()
        except Exception as alone:
            return {"error": said(alone)}
        return {"ours": {"error": said(error)}}
    exported.save_pretrained(folder)
    [path] = folder.glob("*.onnx")
    file = read(path)
    found: Row = {"ours": {}, "untagged": len(untagged(file))}
    return {**found, **judged(model, inputs, file)}


def judged(model: torch.nn.Module, inputs: Inputs, file: onnx.ModelProto) -> Row:
    """Whether a file computes what PyTorch does, and which of its modules are exact."""
    row: Row = {"untagged": len(untagged(file))}
    try:
        judge = Judge(model, inputs, file)
        row["agrees"] = agrees(judge, 0)
        row["others_agree"] = agrees(judge, 1)
    except Exception as error:
        row["one_probe"] = said(error)
    try:
        if not row.get("others_agree"):
            judge = Judge(model, inputs, file, probes=1)
            row["agrees"] = agrees(judge, 0)
        faults = [fault for fault in judge.faults() if "computes another" not in fault[1]]
    except Exception as error:
        return {**row, "judge_error": said(error)}
    fates = [entry["fate"] for entry in tree_of(file).values()]
    wrong = {path for path, _ in faults}
    row.update(total=len(fates), exact=len(fates) - len(wrong), fused=fates.count("fused"))
    row["faults"] = [f"{path or '(root)'}: {why}" for path, why in faults[:SHOWN]]
    return row


def agrees(judge: Judge, probe: int) -> bool:
    """Whether ONNX Runtime and PyTorch give the same on one set of inputs."""
    results, values = judge.runs[probe][1], judge.opened[probe].values
    names = [output.name for output in judge.file.graph.output]
    return len(names) >= len(results) and all(map(equal, (values[name] for name in names), results))


def copied_model(model: torch.nn.Module) -> torch.nn.Module:
    """A copy, as exports may leave something behind; the model itself where it cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception:
        return model


def read(path: Path) -> onnx.ModelProto:
    """A file with its weights."""
    return onnx.load(str(path))


def said(error: BaseException) -> str:
    """Kind and first line of an error; of one that torch wraps, the innermost."""
    inner = error
    while (
        type(inner).__name__ in ("ConversionError", "OnnxExporterError", "TorchExportError")
        and inner.__cause__
    ):
        inner = inner.__cause__
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()] or [""]
    return f"{type(inner).__name__}: {lines[0]}"[:300]
