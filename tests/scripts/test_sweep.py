"""tools/sweep.py: what it finds on two architectures, what a resumed run leaves, what limits do, and the page of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.shrinking import smaller
from tools.sweep_table import page

ROOT = Path(__file__).parents[2]
TWO = ("torch/TransformerEncoder", "transformers/vit")
forks = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="the sweep forks a process for each architecture"
)


def sweep(results: Path, *options: str) -> str:
    """What a run of the tool prints."""
    command = [
        sys.executable,
        str(ROOT / "tools" / "sweep.py"),
        "--results",
        str(results),
        *options,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def rows_of(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "sweep.jsonl"
    sweep(path, "--only", TWO[0])
    return path


# --- the run ---------------------------------------------------


@forks
@pytest.mark.slow
def test_two_architectures_are_exported_compared_and_written_and_a_resumed_run_does_not_repeat_them(
    results, tmp_path
):
    [first] = rows_of(results)
    assert TWO[1] in sweep(results, "--only", *TWO)
    assert rows_of(results)[0] == first
    assert [row["name"] for row in rows_of(results)] == list(TWO)
    for row in rows_of(results):
        for exporter in ("dynamo", "torchscript"):
            one = row[exporter]
            assert (one["untagged"], one["agrees"], one["others_agree"]) == (0, True, True)
            assert one["exact"] == one["total"] == row["modules"]
            if (row["name"], exporter) == (TWO[0], "torchscript"):
                # its fast path
                assert "_transformer_encoder_layer_fwd' to ONNX opset" in one["torch"]["error"]
            else:
                assert one["difference"] == ""
                assert one["ratio"] > 0
    assert "error" not in rows_of(results)[1]["transformers"]
    assert sweep(results, "--only", *TWO) == ""
    sweep(results, "--table", str(tmp_path / "models.md"))
    assert "architectures are listed, 2 were run, and 2 of these could be built." in (
        tmp_path / "models.md"
    ).read_text(encoding="utf-8")


@forks
@pytest.mark.slow
def test_a_limit_ends_one_architecture_and_what_was_found_is_kept(tmp_path):
    results = tmp_path / "sweep.jsonl"
    sweep(results, "--only", TWO[1], "--seconds", "2")
    [row] = rows_of(results)
    assert row["ended"].startswith("stopped after 2 s (")
    assert row["stage"] != "done"


# --- the page ---------------------------------------------------


def one(**changed: Any) -> dict[str, Any]:
    """What one exporter made of an architecture."""
    good = {
        "torch": {"seconds": 1.0}, "ours": {"seconds": 2.0}, "difference": "", "ratio": 2.0, "untagged": 0,
        "agrees": True, "others_agree": True, "exact": 7, "total": 7, "fused": 1,
    }  # fmt: skip
    return {**good, **changed}


def row(name: str, **exporters: Any) -> dict[str, Any]:
    return {"name": name, "class": "Net", "random": False, **exporters}


def test_the_page_counts_what_is_exported_exact_and_tagged():
    refused = {"torch": {"error": "TypeError: no"}, "ours": {"error": "TypeError: no"}}
    wrong = one(agrees=False, exact=1)
    inexact = one(exact=6, faults=["gate: view leaves, and is no output of it"])
    rows = [
        row("b/two", dynamo=one(), torchscript=refused),
        row("a/one", dynamo=inexact, torchscript=wrong),
    ]
    rows.append(row("c/too", dynamo=one(), torchscript=refused))
    text = page(rows, listed=3)
    assert "3 architectures are listed, 3 were run, and 3 of these could be built." in text
    assert "| dynamo | 3 | 3 | 3 of 3 | 3 of 3 | 0 | 20 of 21 | 3 | 2.00 |" in text
    assert "| TorchScript | 1 | 1 | 1 of 1 | 1 of 1 | 0 | 0 of 0 | 0 | 2.00 |" in text
    assert text.index("| yes, 6 of 7 (1) | yes, differs |  | a/one |") < text.index(
        "| yes | no (2) |  | b/two, c/too |"
    )
    assert "1. `gate: view leaves, and is no output of it`" in text
    assert "2. `TypeError: no`" in text
    assert "and by us with none: none." in text


# --- small configs ---------------------------------------------------


def config(**settings: Any) -> Any:
    return SimpleNamespace(to_dict=lambda: settings, sub_configs={}, **settings)


def test_widths_become_one_number_and_layers_two():
    settings = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    }
    assert smaller(config(**settings)) == {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }


def test_numbers_only_become_smaller_and_rates_kernels_and_counts_of_listed_parts_stay():
    assert (
        smaller(
            config(hidden_size=32, dropout=0.1, conv_kernel=[10, 3], patch_size=16, use_cache=True)
        )
        == {}
    )
    assert smaller(config(num_stages_layers=4, depths=[2, 2, 6, 2])) == {"depths": [1, 2, 2, 2]}


def test_special_tokens_stay_apart_and_within_the_vocabulary():
    found = smaller(
        config(vocab_size=50_000, bos_token_id=49_000, eos_token_id=49_001, image_token_id=48_000)
    )
    assert found["vocab_size"] == 1000
    assert (found["bos_token_id"], found["eos_token_id"]) == (1, 2)
    assert 900 <= found["image_token_id"] < 1000
