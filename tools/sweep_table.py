"""The page of the sweep's results: docs/models.md."""

from __future__ import annotations

import importlib.metadata
import re
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

Each file is compared with PyTorch by `tests/truth.py`: it runs PyTorch with hooks and ONNX Runtime with every tensor
exposed, and compares the tensors at the boundary of each module. It does not use how tags are made.

- **of theirs**: files that we write, of those that torch (or, in the last row, transformers) writes.
- **same graph**: ours, without `htp.*` keys, namespaces and the graph's name, is torch's, byte for byte.
- **modules exact**: of files that compute what PyTorch does, and of models that draw no random numbers; and how many
  of these modules are `fused`.
- **time**: processor time of the export with tags divided by torch's, one run each. For every second architecture,
  torch's export is the first one, which takes longer.

"""
_RESULTS = """## Results

`dynamo` and `TorchScript` are `torch.onnx.export` and `htp_export.export` with the same arguments. In the column
`transformers`, `OnnxExporter().export(...)` runs inside `htp_export.tagging()`. Numbers refer to the reasons below.
Models with the same result stand in one row. *Yes* alone says that the other exporter writes a file and we write the
same graph, that ONNX Runtime and PyTorch compute the same, on the example inputs and on other ones, that every node
has an owner, and that every module is exact.

| cell | meaning |
|---|---|
| no | neither exports it |
| yes, torch: no | only `htp_export` does |
| first inputs | ONNX Runtime and PyTorch agree on the example inputs only, as a trace holds for them alone |
| differs | the file, with torch's own graph, computes something else than PyTorch |
| not run | ONNX Runtime does not run the file |
| random | the model draws random numbers: modules are not compared |
| 65 of 66 | so many modules are exact |
"""
_SUMMARY = (
    "exporter", "others export", "we export", "of theirs", "same graph", "nodes untagged", "modules exact", "fused",
    "time, median",
)  # fmt: skip
_COLUMNS = (*_SHORT.values(), "transformers", "models")


def page(rows: Iterable[Row], listed: int) -> str:
    """The whole page; ``listed`` is how many architectures there are to run."""
    rows = sorted(rows, key=lambda row: row["name"])
    reasons: dict[str, int] = {}
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(_cells(row, reasons), []).append(row["name"])
    lines = [f"| {' | '.join([*cells, ', '.join(names)])} |" for cells, names in groups.items()]
    table = "\n".join([*_header(_COLUMNS), *lines])
    numbered = "\n".join(f"{number}. `{_plain(reason)}`" for reason, number in reasons.items())
    parts = [
        _HEAD.format(versions=_versions()) + summary(rows, listed),
        _RESULTS,
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
        exact, total = (
            sum(cell.one.get(key, 0) for cell in compared) for key in ("exact", "total")
        )
        ratios = [cell.one["ratio"] for cell in both if "ratio" in cell.one]
        lines.append(
            f"| {_SHORT.get(exporter, exporter)} | {len(theirs)} | {len(ours)} | {len(both)} of {len(theirs)} | {same} "
            f"| {sum(cell.one.get('untagged', 0) for cell in ours)} | {exact} of {total} "
            f"| {sum(cell.one.get('fused', 0) for cell in compared)} "
            f"| {f'{statistics.median(ratios):.2f}' if ratios else ''} |"
        )
    missed = [row["name"] for row in built if missing(row)]
    lines.append(
        f"\nExported by one of the others, and by us with none: {', '.join(missed) or 'none'}.\n"
    )
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
        self.comparable = (
            not row.get("random") and bool(self.one.get("agrees")) and "exact" in self.one
        )


def _cells(row: Row, reasons: dict[str, int]) -> tuple[str, ...]:
    if "error" in row:
        return (f"not built {_note(row['error'], reasons)}", "", "")
    cells = [_found(row, exporter, reasons) for exporter in (*EXPORTERS, "transformers")]
    if "ended" in row:
        cells[-1] = f"{cells[-1]} stopped {_note(row['ended'], reasons)}".strip()
    return tuple(cells)


def _found(row: Row, exporter: str, reasons: dict[str, int]) -> str:
    """What a cell of the table says: `yes`, and what is not as it should be."""
    if exporter not in row:
        return ""
    cell, own = _Cell(row, exporter), exporter != "transformers"
    others = "torch" if own else "transformers"
    theirs = "" if cell.theirs else _note(_why(cell.others, row), reasons)
    if not cell.ours:
        ours = _note(_why(cell.our if own else cell.our or cell.others, row), reasons)
        return (
            f"no {ours}"
            if ours == theirs
            else f"no {ours}, {others}: {f'no {theirs}' if theirs else 'yes'}"
        )
    return ", ".join(
        ["yes", *([f"{others}: no {theirs}"] if theirs else []), *_faults(row, cell, reasons)]
    )


def _faults(row: Row, cell: _Cell, reasons: dict[str, int]) -> Iterator[str]:
    """What is not as it should be in a file that we write."""
    one = cell.one
    if one.get("difference"):
        yield f"other graph: {one['difference']}"
    if one.get("untagged"):
        yield f"{one['untagged']} nodes untagged"
    if row.get("random"):
        yield "random"
    elif "judge_error" in one:
        yield f"not run {_note(one['judge_error'], reasons)}"
    elif not one.get("agrees"):
        yield "differs"
    elif not one.get("others_agree"):
        yield "first inputs"
    if cell.comparable and one["exact"] != one["total"]:
        yield f"{one['exact']} of {one['total']} {_note('; '.join(one.get('faults', ())), reasons)}"


def _why(found: Row, row: Row) -> str:
    return str(found.get("error") or row.get("ended") or "not tried")


def _note(reason: str, reasons: dict[str, int]) -> str:
    # one fault of many classes is one reason
    reason = re.sub(r"\w+\.forward\(\)", "forward()", reason)
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
