"""``htp-export quantize``: plans from files and rules, data, what is written and printed, and what is refused."""

import csv
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError
from tests.nets import composed
from tests.quantized import IDS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(
        'first: int8\n"class:Embedding": {precision: int4, block_size: 16}\n'
    )
    np.savez(tmp_path / "ids.npz", ids=IDS)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out))


def test_a_plan_file_then_rules_in_order(net, folder, capsys):
    words = [
        "quantize",
        str(net),
        "plan.yaml",
        "--rule",
        "head=fp16",
        "--rule",
        "first=int8-weights",
        "-o",
        "q.onnx",
    ]
    assert main([*words, "--json"]) == 0
    result = said(capsys)
    assert (result["file"], result["dry_run"], result["notes"]) == ("q.onnx", False, [])
    precisions = {path: module["precision"] for path, module in result["modules"].items()}
    assert (precisions["first"], precisions["table"], precisions["head"]) == (
        "int8-weights",
        "int4",
        "fp16",
    )
    tagged = htp_export.load("q.onnx")
    assert not tagged.untagged
    assert result["modules"][""]["bytes_after"] == htp_export.cost(tagged).modules[""].weight_bytes


def test_a_dry_run_draws_the_plan_and_writes_nothing(net, folder, capsys):
    before = sorted(folder.iterdir())
    assert main(["quantize", str(net), "plan.yaml", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        " ".join(lines[0].split())
        == "module class precision nodes changed bytes before bytes after ratio"
    )
    by_name = {line.split()[1]: line.split() for line in lines[2:8]}
    assert by_name["first"][2:6] == ["Linear", "int8", "2", "2"]
    assert by_name["head"][2:6] == ["Linear", "fp32", "1", "0"]
    assert "predicted: weights 34.16 kB before, 14.74 kB after (43.2%)" in "\n".join(lines)
    assert sorted(folder.iterdir()) == before


def test_the_same_bytes_are_predicted_and_written(net, folder, capsys):
    words = ["quantize", str(net), "plan.yaml", "--csv"]
    assert main([*words, "--dry-run"]) == 0
    predicted = capsys.readouterr().out
    assert main([*words, "-o", "q.onnx", "--data", "ids.npz"]) == 0
    assert capsys.readouterr().out == predicted
    rows = list(csv.DictReader(io.StringIO(predicted)))
    assert [row["precision"] for row in rows if row["module"] == "first"] == ["int8"]


def test_files_of_data_are_runs(net, folder, capsys):
    np.savez(folder / "few.npz", ids=IDS % 3)

    def first_scale(*words: str) -> float:
        assert (
            main(["quantize", str(net), "--rule", "first=int8", "-o", "q.onnx", "--json", *words])
            == 0
        )
        capsys.readouterr()
        model = htp_export.load("q.onnx").model
        node = next(node for node in model.graph if node.op_type == "QuantizeLinear")
        return float(node.inputs[1].const_value.numpy())  # type: ignore[union-attr]

    assert first_scale("--data", "few.npz") < first_scale("--data", "few.npz", "--data", "ids.npz")
    (folder / "runs_of_data.py").write_text(
        "import numpy as np\n\ndef make():\n    return [{'ids': np.arange(14).reshape(2, 7)}]\n"
    )
    assert first_scale("--data", "runs_of_data:make") == first_scale("--data", "ids.npz")


def test_random_inputs_are_warned_of(net, folder, capsys):
    assert main(["quantize", str(net), "int8", "-o", "q.onnx"]) == 0
    ended = capsys.readouterr()
    assert ended.err.count("accuracy of this model means nothing") == 1
    assert "wrote q.onnx" in ended.out
    assert "next: htp-export compare" in ended.out


def test_a_file_with_the_fields_of_a_precision_is_for_the_whole_model(net, folder, capsys):
    (folder / "blocks.yaml").write_text("precision: int4\nblock_size: 16\n")
    assert (
        main(["quantize", str(net), "blocks.yaml", "--rule", "first=fp32", "--dry-run", "--json"])
        == 0
    )
    typed = said(capsys)["modules"]
    assert (
        main(
            [
                "quantize",
                str(net),
                "int4:block_size=16",
                "--rule",
                "first=fp32",
                "--dry-run",
                "--json",
            ]
        )
        == 0
    )
    named = said(capsys)["modules"]
    assert [each["bytes_after"] for each in typed.values()] == [
        each["bytes_after"] for each in named.values()
    ]
    assert typed["first"]["precision"] == "fp32"


X = np.random.default_rng(0).standard_normal((2, 64), dtype=np.float32)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, the second of which loses more in blocks of integers: each block has one large weight."""
    unlike = tmp_path_factory.mktemp("check") / "net.onnx"
    torch.manual_seed(0)
    fine, coarse = nn.Linear(64, 64), nn.Linear(64, 64)
    with torch.no_grad():
        coarse.weight[:, ::16] = 40
    net = composed(lambda self, x: self.coarse(torch.tanh(self.fine(x))), fine=fine, coarse=coarse)
    htp_export.export(net.eval(), (torch.from_numpy(X),), unlike, verbose=False)
    return unlike


def runs_of(count: int) -> list[Mapping[str, Any]]:
    return [{"x": X * k} for k in range(1, count + 1)]


def test_the_worst_module_is_that_of_compare_over_the_runs_of_the_data(unlike):
    result = htp_export.quantize(unlike, {".": "int4"}, data=iter(runs_of(3)), check=True)
    check = result.check
    assert check is not None
    largest = [htp_export.compare(unlike, result, run) for run in runs_of(3)]
    expected = max(
        (each.modules[each.worst] for each in largest if each.worst is not None),
        key=lambda row: row.max_abs or 0,
    )
    assert (check.worst, check.compared) == (expected.path, 3)
    assert check.worst in ("", "coarse")  # the output is that of the whole, too
    assert check.max_abs == expected.max_abs
    assert (check.bytes_before, check.bytes_after) == (
        result.modules[""].bytes_before,
        result.modules[""].bytes_after,
    )
    assert check.ms_before > 0
    assert check.ms_after > 0
    assert result.to_dict()["check"]["worst"] == check.worst
    assert "worst module on 3 runs of the data" in str(result)
    assert f"medians of {check.runs} runs each, in turn, on this machine" in str(result)


@pytest.mark.parametrize(("given", "compared"), [(runs_of(9), 4), (None, 4), (runs_of(1)[0], 1)])
def test_at_most_four_runs_are_compared_also_of_random_inputs(unlike, given, compared):
    check = htp_export.quantize(unlike, {"fine": "int8"}, data=given, check=True).check
    assert check is not None
    assert check.compared == compared


def test_precisions_that_change_types_are_checked(unlike):
    assert htp_export.quantize(unlike, "fp16", data=runs_of(1), check=True).check is not None
    same = htp_export.quantize(unlike, {"fine": "fp32"}, data=runs_of(1), check=True).check
    assert same is not None
    assert same.max_abs == 0


def test_without_it_nothing_is_said_and_a_dry_run_cannot_have_it(unlike):
    result = htp_export.quantize(unlike, {".": "int4"})
    assert result.check is None
    assert "check" not in result.to_dict()
    with pytest.raises(InputError, match="check runs the quantized model, and dry_run makes none"):
        htp_export.quantize(unlike, {".": "int4"}, dry_run=True, check=True)


def test_the_command_shows_it(unlike, tmp_path, capsys):
    words = [
        "quantize",
        str(unlike),
        "--rule",
        "**=int4",
        "-o",
        str(tmp_path / "int4.onnx"),
        "--check",
    ]
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"worst module on 4 runs of random inputs: \S+, max difference [\d.e-]+, cosine [\d.]+",
        shown,
    )
    assert re.search(r"[\d.]+ ms a run before, [\d.]+ ms after \([\d.]+ times as fast\)", shown)
    assert main([*words, "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["check"]["runs"] == 20
    assert main([*words[:4], "--dry-run", "--check"]) == 2
    assert "--dry-run" in capsys.readouterr().err
