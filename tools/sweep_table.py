"""The page of the sweep's results: docs/models.md."""

from __future__ import annotations

import importlib.metadata
import statistics
from collections.abc import Iterable, Iterator

from tools.sweep_checks import EXPORTERS, Row

_SHORT = {"dynamo": "dynamo", "torchscript": "TorchScript"}
_PACKAGES = (
    "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "timm", "diffusers", "x-transformers", "vit-pytorch",
    "monai", "segmentation-models-pytorch",
)  # fmt: skip

_HEAD = """# Models

<!-- Written by `python tools/sweep.py --results sweep.jsonl --table docs/models.md`; the rows come from
     `python tools/sweep.py --results sweep.jsonl`. Do not edit. -->

Architectures with small configs and random parameters, exported by `torch.onnx.export`, by `transformers.exporters`,
and by `htp_export`. {versions}

    python tools/sweep.py --results sweep.jsonl

- **exporter**: `dynamo` and `TorchScript` are `torch.onnx.export` and `htp_export.export` with the same arguments; in
  rows `transformers`, `OnnxExporter().export(...)` runs inside `htp_export.tagging()`, and alone if that fails.
- **others**, **ours**: whether the export succeeds. A number refers to the reasons below.
- **same graph**: ours, without `htp.*` keys, namespaces and the graph's name, is torch's, byte for byte.
- **agrees**: ONNX Runtime and PyTorch compute the same, on the example inputs and on other ones; *first* means only on
  the example inputs, as a trace holds for them alone.
- **untagged**: nodes without an owner.
- **exact**: modules that are exact, of all modules, and how many of them are `fused`. The check is `tests/truth.py`: it
  runs PyTorch with hooks and ONNX Runtime with every tensor exposed, and compares the tensors at the boundary of each
  module; it does not use how tags are made. If a module is not exact, a number refers to the first three such modules
  among the reasons. Modules are not comparable if the file does not compute what PyTorch does (the graph is torch's),
  or if the model draws random numbers.
- **time**: processor time of the export with tags divided by torch's, one run each. For every second architecture,
  torch's export is the first one, which takes longer.

"""
_SUMMARY = (
    "exporter", "others export", "we export", "of theirs", "same graph", "nodes untagged", "modules exact", "fused",
    "time, median",
)  # fmt: skip
_COLUMNS = (
    "model", "class", "exporter", "others", "ours", "same graph", "agrees", "untagged", "exact", "time",
)  # fmt: skip


def page(rows: Iterable[Row], listed: int) -> str:
    """The whole page; ``listed`` is how many architectures there are to run."""
    rows = sorted(rows, key=lambda row: row["name"])
    reasons: dict[str, int] = {}
    lines = [line for row in rows for line in _lines(row, reasons)]
    table = "\n".join([*_header(_COLUMNS), *lines])
    numbered = "\n".join(f"{number}. `{_plain(reason)}`" for reason, number in reasons.items())
    parts = [
        _HEAD.format(versions=_versions()) + summary(rows, listed),
        "## Results\n",
        table,
        "\n## Reasons\n",
        numbered,
        "",
    ]
    return "\n".join(parts)


def summary(rows: list[Row], listed: int) -> str:
    """How many of them are what they should be."""
    built = [row for row in rows if "error" not in row]
    run = f"{len(rows)} were run, and {len(built)} of these could be built."
    lines = [f"{listed} architectures are listed, {run}\n"]
    lines += _header(_SUMMARY)
    for exporter in (*EXPORTERS, "transformers"):
        found = [_Cell(row, exporter) for row in built if exporter in row]
        theirs = [cell for cell in found if cell.theirs]
        both = [cell for cell in theirs if cell.ours]
        ours = [cell for cell in found if cell.ours]
        compared = [cell for cell in ours if cell.comparable]
        same = f"{sum(cell.one.get('difference') == '' for cell in both)} of {len(both)}"
        same = "" if exporter == "transformers" else same
        exact, total = (sum(cell.one.get(key, 0) for cell in compared) for key in ("exact", "total"))
        ratios = [cell.one["ratio"] for cell in both if "ratio" in cell.one]
        lines.append(
            f"| {_SHORT.get(exporter, exporter)} | {len(theirs)} | {len(ours)} | {len(both)} of {len(theirs)} | {same} "
            f"| {sum(cell.one.get('untagged', 0) for cell in ours)} | {exact} of {total} "
            f"| {sum(cell.one.get('fused', 0) for cell in compared)} "
            f"| {f'{statistics.median(ratios):.2f}' if ratios else ''} |"
        )
    missed = [row["name"] for row in built if missing(row)]
    lines.append(f"\nExported by one of the others, and by us with none: {', '.join(missed) or 'none'}.\n")
    return "\n".join(lines)


def _header(columns: tuple[str, ...]) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]


def missing(row: Row) -> bool:
    """Whether one of the others exports an architecture, and `htp_export` does in no way."""
    cells = [_Cell(row, exporter) for exporter in (*EXPORTERS, "transformers") if exporter in row]
    return any(cell.theirs for cell in cells) and not any(cell.ours for cell in cells)


class _Cell:
    """What one exporter made of one architecture."""

    def __init__(self, row: Row, exporter: str) -> None:
        self.one: Row = row[exporter]
        own = exporter != "transformers"
        self.others: Row = self.one.get("torch", {}) if own else self.one
        self.our: Row = self.one.get("ours", {})
        self.theirs = "seconds" in self.others if own else "error" not in self.one
        self.ours = "seconds" in self.our if own else "ours" in self.one and "error" not in self.our
        self.comparable = not row.get("random") and bool(self.one.get("agrees")) and "exact" in self.one


def _lines(row: Row, reasons: dict[str, int]) -> Iterator[str]:
    name, kind = row["name"], row.get("class", "")
    if "error" in row:
        yield f"| {name} | | | not built {_note(row['error'], reasons)} | | | | | | |"
        return
    for exporter in (*EXPORTERS, "transformers"):
        if exporter not in row:
            continue
        cell = _Cell(row, exporter)
        one = cell.one
        agrees = {True: "yes", False: "no"}.get(one.get("agrees"), "")
        if one.get("agrees") and not one.get("others_agree"):
            agrees = "first"
        exact = ""
        if cell.ours:
            fused = f", {one['fused']} fused" if one.get("fused") else ""
            exact = f"{one.get('exact')} of {one.get('total')}{fused}" if cell.comparable else "not comparable"
            if cell.comparable and one.get("faults"):
                exact += f" {_note('; '.join(one['faults']), reasons)}"
            agrees = "random" if row.get("random") else agrees
        if "judge_error" in one:
            exact = f"not compared {_note(one['judge_error'], reasons)}"
        same = "" if "difference" not in one else "yes" if one["difference"] == "" else f"no: {one['difference']}"
        untagged = one.get("untagged", "") if cell.ours else ""
        ratio = f"{one['ratio']:.2f}" if "ratio" in one else ""
        theirs = "yes" if cell.theirs else f"no {_note(_why(cell.others, row), reasons)}"
        ours = "yes" if cell.ours else f"no {_note(_why(cell.our, row), reasons)}"
        if exporter == "transformers" and not cell.theirs:
            ours = ""
        cells = (name, kind, _SHORT.get(exporter, exporter), theirs, ours, same, agrees, untagged, exact, ratio)
        yield "| " + " | ".join(map(str, cells)) + " |"
        name = kind = ""
    if "ended" in row:
        yield f"| | | | {_note(row['ended'], reasons)} | | | | | | |"


def _why(found: Row, row: Row) -> str:
    return str(found.get("error") or row.get("ended") or "not tried")


def _note(reason: str, reasons: dict[str, int]) -> str:
    return f"({reasons.setdefault(reason, len(reasons) + 1)})"


def _plain(reason: str) -> str:
    return reason.replace("`", "'").replace("|", "/")


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"With {', '.join(found)}, on Linux, CPU."
