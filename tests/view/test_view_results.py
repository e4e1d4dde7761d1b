"""What the page shows of the results of quantize, prune, sensitivity and search."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import htp_export
from htp_export.capabilities.search.front_files import front_svg
from htp_export.capabilities.search.search_results import Search, Trial, search_from
from htp_export.capabilities.view.measures import measures_of
from htp_export.capabilities.view.page.document import front_data
from htp_export.capabilities.view.viewing import read_results
from htp_export.command.main import main
from tests.chromium import needs_chromium
from tests.view.test_view_page import start

PARTS = ("", "0", "1", "2")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("net") / "net.onnx"
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)]
    htp_export.export(
        torch.nn.Sequential(*layers).eval(), (torch.randn(2, 16),), file, verbose=False
    )
    return file


@pytest.fixture(scope="module")
def data() -> list[dict[str, Any]]:
    torch.manual_seed(1)
    return [{"input": torch.randn(2, 16)}]


@pytest.fixture(scope="module")
def quantized(net: Path, data: list[dict[str, Any]]) -> Any:
    return htp_export.quantize(net, {"0": "int8", "2": "fp16"}, data=data)


def by_key(result: object) -> dict[str, Any]:
    return {measure.key: measure for measure in measures_of(result)}


def test_a_quantized_model_has_a_precision_and_bytes_by_module(quantized):
    for result in (quantized, json.loads(json.dumps(quantized.to_dict()))):
        measures = by_key(result)
        precision = measures["precision"]
        assert precision.named
        assert precision.main
        assert precision.total == {}
        assert {path: precision.words[path] for path in PARTS} == {
            path: quantized.modules[path].precision for path in PARTS
        }
        assert (precision.words["0"], precision.words["2"], precision.words[""]) == (
            "int8",
            "fp16",
            "mixed",
        )
        assert (
            measures["bytes_before"].total["0"]
            == quantized.modules["0"].bytes_before
            == (16 * 32 + 32) * 4
        )
        assert measures["bytes_after"].total["2"] == quantized.modules["2"].bytes_after
        assert "sparsity" not in measures


def test_a_pruned_model_has_its_sparsity_by_module(net):
    pruned = htp_export.prune(net, {"0": 0.5})
    for result in (pruned, json.loads(json.dumps(pruned.to_dict()))):
        sparsity = by_key(result)["sparsity"]
        assert (sparsity.main, sparsity.named, sparsity.title) == (True, False, "sparsity")
        assert (sparsity.total["0"], sparsity.total["2"]) == (0.5, 0.0)


def test_a_sensitivity_has_errors_by_module_for_each_precision(net, data):
    found = htp_export.sensitivity(net, ["int8", "int4"], data=data)
    for result in (found, json.loads(json.dumps(found.to_dict()))):
        measures = by_key(result)
        assert [key for key, measure in measures.items() if measure.main] == [
            "error:int8",
            "error:int4",
        ]
        for name in ("int8", "int4"):
            error = measures[f"error:{name}"]
            assert error.title == f"error of the outputs, {name}"
            assert error.total == {path: found.modules[path][name].error for path in ("0", "2")}
        assert measures["saved_bytes:int8"].total["0"] == found.modules["0"]["int8"].saved_bytes
        assert measures["cosine:int4"].total["2"] == found.modules["2"]["int4"].alone.cosine


def test_of_two_results_with_the_same_number_both_are_shown():
    first, second = ({"modules": {"fc": {"sparsity": share}}} for share in (0.25, 0.5))
    measures = read_results([first, second, second]).measures
    assert [(measure.key, measure.title, measure.total["fc"]) for measure in measures] == [
        ("sparsity", "sparsity", 0.25),
        ("sparsity:2", "sparsity (2)", 0.5),
        ("sparsity:3", "sparsity (3)", 0.5),
    ]


@pytest.fixture(scope="module")
def file_of_results(quantized: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("results") / "quantized.json"
    file.write_text(json.dumps(quantized.to_dict()), encoding="utf-8")
    return file


def test_the_command_draws_precision_and_sparsity_as_overlays(
    net, file_of_results, tmp_path, capsys
):
    target = tmp_path / "drawn.json"
    command = ["view", str(net), "--result", str(file_of_results), "-o", str(target)]
    assert main([*command, "--overlay", "precision"]) == 0
    drawn = json.loads(target.read_text())
    assert drawn["name"] == "precision"
    values = {entry["value"] for entry in drawn["results"].values()}
    colours = {entry["value"]: entry["bgColor"] for entry in drawn["results"].values()}
    assert {"int8", "fp16"} <= values
    assert len(set(colours.values())) == len(values)
    assert main([*command, "--overlay", "sparsity"]) == 2
    assert "--result with the JSON of htp-export prune" in " ".join(capsys.readouterr().err.split())
    zeros = tmp_path / "zeros.json"
    zeros.write_text(json.dumps({"modules": {"0": {"sparsity": 0.5}}}), encoding="utf-8")
    assert main([*command, "--result", str(zeros), "--overlay", "sparsity"]) == 0
    assert {entry["value"] for entry in json.loads(target.read_text())["results"].values()} == {0.5}
    assert main([*command, "--netron"]) == 0
    said = json.loads(target.read_text())["metadata"]
    assert {entry["value"] for entry in said if entry["name"] == "precision"} >= {"int8", "fp16"}


@pytest.fixture(scope="module")
def drawn(net: Path, file_of_results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("drawn") / "net.html"
    command = ["view", str(net), "--result", str(file_of_results), "--no-explorer", "-o", str(file)]
    assert main(command) == 0
    return file


def trial(
    number: int | None, plan: dict[str, Any], error: float, size: float, origin: str = "front"
) -> Trial:
    return Trial(number, plan, {"error": error, "size": size}, origin, {})


FOUND = Search(
    ("error", "size"),
    (
        trial(0, {"0": "int8", "2": {"precision": "int4", "block_size": 16}}, 0.01, 900.0),
        trial(1, {"0": "int8", "2": "fp16"}, 0.002, 1500.0),
        trial(2, {"0": "int4", "2": "fp16"}, 0.3, 1600.0, "sampler"),
        trial(None, {"": "fp16"}, math.nan, 2000.0, "uniform"),
    ),
    1,
    {"0": ("int8", "int4"), "2": ("int4", "fp16")},
)


def test_a_search_is_read_back_from_what_its_command_wrote():
    read = search_from(json.loads(json.dumps(FOUND.to_dict())))
    assert read is not None
    assert (read.objectives, read.summary, read.modules) == (
        FOUND.objectives,
        FOUND.summary,
        FOUND.modules,
    )
    assert read.trials[:3] == FOUND.trials[:3]
    assert math.isnan(read.trials[3].values["error"])
    assert search_from({"modules": {"": {"flops": 1}}}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"objectives": ["<b>"]},
        {"objectives": []},
        {"trials": [{"number": 0}]},
        {"trials": [{**FOUND.trials[0].to_dict(), "origin": "<b>"}]},
        {"trials": [{**FOUND.trials[0].to_dict(), "plan": {"0": 8}}]},
        {"modules": [3]},
    ],
)
def test_a_file_that_is_no_search_is_refused_with_its_name(net, tmp_path, capsys, change):
    file = tmp_path / "front.json"
    file.write_text(json.dumps({**FOUND.to_dict(), **change}), encoding="utf-8")
    assert (
        main(
            [
                "view",
                str(net),
                "--result",
                str(file),
                "--no-explorer",
                "-o",
                str(tmp_path / "net.html"),
            ]
        )
        == 2
    )
    assert "front.json: this is no result of a search" in " ".join(capsys.readouterr().err.split())


def test_values_that_are_not_finite_are_no_points():
    picture = front_svg(FOUND)
    assert [f'data-trial="{number}"' in picture for number in range(4)] == [True, True, True, False]
    assert "nan" not in picture
    assert front_data(replace(FOUND, objectives=("error",)))["svg"] == ""
    assert front_data(replace(FOUND, trials=FOUND.trials[3:]))["svg"] == ""


@needs_chromium
def test_the_front_of_a_search_is_drawn_and_the_plan_of_a_point_is_read(page, net, tmp_path):
    (tmp_path / "front.json").write_text(json.dumps(FOUND.to_dict()), encoding="utf-8")
    htp_export.view(net, tmp_path / "net.html", results=[tmp_path / "front.json"], explorer=False)
    start(page, tmp_path / "net.html")
    page.run("document.getElementById('tab-front').click()")
    assert page.run("document.getElementById('pane-front').innerText").startswith(FOUND.summary)
    assert page.run("document.querySelectorAll('.front svg circle[data-trial]').length") == 3
    rows = page.run(
        "[...document.querySelectorAll('.front tbody tr')]"
        ".map((row) => [...row.children].map((cell) => cell.innerText))"
    )
    assert rows == [
        ["trial 0", "1.00e-02", "900 B", "front", "1 int8, 1 int4"],
        ["trial 1", "2.00e-03", "1.500 kB", "front", "1 int8, 1 fp16"],
    ]
    plan = "document.querySelector('.front .plan').innerText.split(/\\s*\\n\\s*/)"
    assert page.run(plan) == [
        "trial 0, plan0.json",
        "error 1.00e-02, size 900 B",
        "0",
        "int8",
        "2",
        "int4, block_size 16",
    ]
    point = "document.querySelector('.front circle[data-trial=\"2\"]')"
    page.run(f"{point}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert page.run(plan) == ["trial 2", "error 3.00e-01, size 1.600 kB", "0", "int4", "2", "fp16"]
    assert page.run(f"{point}.classList.contains('chosen')")
    assert page.run("document.getElementById('detail').offsetParent") is None
    assert page.run("location.hash") == "#tab=front"
    assert page.asked == []


@needs_chromium
def test_names_in_a_search_are_text(page, net, tmp_path):
    hostile = (
        "<img src=x onerror=\"document.title='ran'\"></title><script>document.title='ran'</script>"
    )
    found = replace(FOUND, trials=(trial(0, {hostile: hostile}, 0.1, 5.0), *FOUND.trials))
    htp_export.view(net, tmp_path / "net.html", results=[found], explorer=False)
    start(page, tmp_path / "net.html")
    page.run("document.getElementById('tab-front').click()")
    assert page.run("document.querySelector('.front dt').innerText") == hostile
    assert page.run("document.querySelectorAll('.front img, .front script').length") == 0
    assert page.run("document.title") == "net.onnx"
