"""sensitivity and search: errors, exact fronts, shared studies, and plans that are better than one precision."""

import itertools
import json
import math
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.search.fronts import Choice, additive_front, pareto
from htp_export.capabilities.search.measuring import Measurer
from htp_export.capabilities.search.output_errors import OutputErrors
from htp_export.command.main import main
from htp_export.errors import FileError, InputError, SelectorError
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import RunSettings
from tests import documents
from tests.nets import composed, spread, x

Array = np.ndarray[Any, Any]
ROOT = Path(__file__).parents[2]


def in_turn(self: Any, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = x + block(x)
    return self.head(x)


@pytest.fixture(scope="module")
def data() -> list[dict[str, Array]]:
    keep = (torch.arange(32) > 0).float()
    return [{"x": (x(4, 32, seed=seed) * keep).numpy()} for seed in range(3)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two equal blocks, one of which has weights that few bits represent badly, and a head.

    Feature 0 is always 0. The weights that it is multiplied with in ``blocks.1.0`` are large: they change no output,
    and make the steps of all weights in their blocks large.
    """
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2)
    )
    model: Any = composed(in_turn, blocks=blocks, head=nn.Linear(32, 8)).eval()
    with torch.no_grad():
        model.blocks[0][2].weight[0] = 0
        model.blocks[0][2].bias[0] = 0
        model.blocks[1][0].weight[:, 0] = 3
    path = tmp_path_factory.mktemp("search") / "net.onnx"
    shapes = {"x": {0: torch.export.Dim("batch")}}
    htp_export.export(
        model, (), path, kwargs={"x": x(4, 32, seed=9)}, dynamic_shapes=shapes, verbose=False
    )
    return path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans of the models that are quantized."""
    plans: list[Any] = []
    quantized = Measurer.quantized
    monkeypatch.setattr(
        Measurer,
        "quantized",
        lambda self, plan, *of: plans.append(plan) or quantized(self, plan, *of),
    )
    return plans


class TestErrors:
    def test_numbers_of_outputs(self):
        errors = OutputErrors()
        errors.add({"y": np.float32([[1, 2], [3, 4]])}, {"y": np.float32([[1, 2], [3, 5]])})
        found = errors.result()
        assert found.error == pytest.approx(1 / 30)
        assert found.sqnr_db == pytest.approx(10 * math.log10(30))
        assert found.cosine == pytest.approx(34 / math.sqrt(30 * 39))
        first = np.exp([0, 1]) / np.exp([0, 1]).sum()
        second = np.exp([0, 2]) / np.exp([0, 2]).sum()
        assert found.kl == pytest.approx((first * np.log(first / second)).sum() / 2)

    def test_probabilities_are_taken_as_they_are(self):
        errors = OutputErrors()
        errors.add({"p": np.float32([[0.25, 0.75]])}, {"p": np.float32([[0.5, 0.5]])})
        assert errors.result().kl == pytest.approx(
            0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-5
        )

    def test_sums_go_over_samples_and_the_mean_over_outputs(self):
        errors = OutputErrors()
        for _ in range(2):
            errors.add(
                {"a": np.float32([2.0]), "b": np.float32([10.0]), "i": np.int64([1])},
                {"a": np.float32([1.0]), "b": np.float32([10.0]), "i": np.int64([2])},
            )
        assert errors.result().error == pytest.approx(0.25 / 2)
        assert errors.result().kl is None

    @pytest.mark.parametrize(
        ("expected", "found", "error", "cosine"),
        [
            (np.float32([1, 2]), np.float32([1, np.nan]), math.inf, -1),
            (np.float32([1, 2]), np.float32([1, np.inf]), math.inf, -1),
            (np.float32([1, -np.inf]), np.float32([1, -np.inf]), 0, 1),  # masks
            (np.int64([1, 2, 3, 4]), np.int64([1, 2, 3, 5]), 0.25, 0),
        ],
        ids=["NaN", "infinity", "infinity in both", "integers alone"],
    )
    def test_outputs_that_are_no_numbers_or_no_floats(self, expected, found, error, cosine):
        errors = OutputErrors()
        errors.add({"y": expected}, {"y": found})
        assert (errors.result().error, errors.result().cosine) == (error, cosine)
        json.dumps(errors.result().to_dict(), allow_nan=False)


class TestFronts:
    def test_the_additive_front_is_that_of_all_combinations(self):
        generator = np.random.default_rng(0)
        for _ in range(20):
            modules = {
                f"m{k}": [
                    Choice(
                        str(c), float(generator.integers(1, 30)), float(generator.integers(0, 30))
                    )
                    for c in range(3)
                ]
                for k in range(5)
            }
            every = [
                (sum(choice.size for choice in chosen), sum(choice.error for choice in chosen))
                for chosen in itertools.product(*modules.values())
            ]
            expected = sorted({every[place] for place in pareto(every)})
            front = additive_front(modules)
            assert [(size, error) for size, error, _ in front.points] == expected
            assert front.exact
            for size, error, plan in front.points:
                chosen = [
                    next(choice for choice in modules[path] if choice.name == name)
                    for path, name in plan.items()
                ]
                assert (size, error) == (sum(c.size for c in chosen), sum(c.error for c in chosen))

    def test_a_hundred_modules_are_bounded_and_say_so(self):
        generator = np.random.default_rng(1)
        modules = {
            f"m{k}": [
                Choice(str(c), float(generator.random()), float(generator.random()))
                for c in range(4)
            ]
            for k in range(100)
        }
        front = additive_front(modules, most=500)
        assert not front.exact
        assert len(front.points) <= 500
        assert pareto([point[:2] for point in front.points]) == list(range(len(front.points)))


@pytest.fixture(scope="module")
def found(file: Path, data: list[dict[str, Array]]) -> Any:
    return htp_export.sensitivity(file, ["int4", "fp16"], data=data)


class TestSensitivity:
    def test_errors_are_those_of_the_quantized_models(self, file, data, found):
        assert list(found.modules) == [
            "blocks.0.0",
            "blocks.0.2",
            "blocks.1.0",
            "blocks.1.2",
            "head",
        ]
        measurer = measurer_of(file, data)
        made = htp_export.quantize(file, {"blocks.1.0": "int4"}).tagged
        row = found.modules["blocks.1.0"]["int4"]
        assert row.alone.error == pytest.approx(measurer._measured(made).error, rel=1e-6)
        assert row.alone.error > 0
        assert row.saved_bytes == found.original.bytes - row.alone.bytes
        # a scale and a zero point
        assert row.saved_bytes == pytest.approx(32 * 64 * (4 - 0.5 - 5 / 32), rel=0.03)

    def test_the_ranking_begins_with_the_module_that_few_bits_represent_badly(self, found):
        assert found.ranking[0].path == "blocks.1.0"
        errors = [row.alone.error for row in found.ranking]
        assert errors == sorted(errors, reverse=True)

    def test_estimates_rank_alike_and_run_nothing_quantized(self, file, data, found):
        estimated = htp_export.sensitivity(file, ["int4", "fp16"], data=data, estimate=True)
        assert not estimated.measured
        assert estimated.original is None
        assert all(row.alone is None for row in estimated.ranking)
        assert estimated.ranking[0].path == "blocks.1.0"
        assert {row.precision for row in estimated.ranking[:5]} == {"int4"}
        assert {row.path for row in estimated.ranking[:5]} == set(found.modules)
        alone = estimated.modules["head"]["int4"].estimate
        assert found.modules["head"]["int4"].alone.error == pytest.approx(alone, rel=0.5)

    def test_data_that_can_be_read_once_are_those_of_a_list(self, file, data):
        def errors(given: Any, calibration: Any) -> list[float]:
            result = htp_export.sensitivity(
                file, ["int8", "u8s8"], data=given, calibration=calibration, select="head"
            )
            return [result.modules["head"][name].alone.error for name in ("int8", "u8s8")]

        assert errors((run for run in data), iter(data[:2])) == errors(data, data[:2])

    def test_all_but_one_module(self, found):
        others = {path: rows["int4"].all_but.error for path, rows in found.modules.items()}
        assert min(others, key=others.__getitem__) == "blocks.1.0"
        assert (
            found.modules["blocks.1.0"]["int4"].all_but.bytes
            > found.modules["head"]["int4"].all_but.bytes
        )

    def test_blocks_have_mean_and_worst(self, found):
        first, second = (block for block in found.blocks if block.precision == "int4")
        assert (first.part, second.part) == ("0", "2")
        assert first.modules == ("blocks.0.0", "blocks.1.0")
        errors = [found.modules[path]["int4"].alone.error for path in first.modules]
        assert (first.mean, first.worst) == (pytest.approx(sum(errors) / 2), max(errors))
        assert first.worst_module == "blocks.1.0"

    def test_depth_selectors_and_metric(self, file, data):
        seen: list[int] = []

        def metric(outputs: Sequence[Mapping[str, Array]]) -> float:
            seen.append(len(outputs))
            return float(sum((output.values().__iter__().__next__()).sum() for output in outputs))

        found = htp_export.sensitivity(
            file, ["int8-dynamic"], data=data, depth=1, metric=metric, all_but=False
        )
        assert list(found.modules) == ["blocks.0", "blocks.1", "head"]
        assert seen == [3] * 4
        assert found.original.metric != found.modules["head"]["int8-dynamic"].alone.metric
        assert list(
            htp_export.sensitivity(file, ["fp16"], data=data, select="blocks.0").modules
        ) == ["blocks.0"]

    def test_a_plan_whose_last_rule_keeps_all_is_measured_as_the_original(self):
        program = htp_export.export(
            nn.Sequential(nn.Sequential(nn.Linear(64, 64))).eval(), (x(2, 64),), verbose=False
        )
        found = htp_export.sensitivity(program, "int8-dynamic", select="0,0.0")
        assert found.modules["0.0"]["int8-dynamic"].all_but.error == 0
        assert found.modules["0"]["int8-dynamic"].all_but.error > 0

    def test_errors_by_module_begin_where_it_is_quantized_and_each_model_is_quantized_once(
        self, file, data, made
    ):
        given: dict[str, Any] = {
            "data": data,
            "select": "blocks.1.0",
            "by_module": True,
            "all_but": False,
        }
        found = htp_export.sensitivity(file, ["int4", "fp16"], **given)
        assert len(made) == 2
        cosines = found.modules["blocks.1.0"]["int4"].by_module
        assert cosines["blocks.0"] == pytest.approx(1, abs=1e-9)
        assert cosines["blocks.1.0"] < 1 - 1e-4

    def test_times_are_measured_if_asked_for(self, file, data):
        found = htp_export.sensitivity(
            file, ["fp16"], data=data, select="head", runs=3, all_but=False
        )
        row = found.modules["head"]["fp16"]
        assert found.original.latency_ms > 0
        assert row.saved_ms == found.original.latency_ms - row.alone.latency_ms

    def test_finished_runs_are_not_repeated(self, file, data, tmp_path, made):
        results = tmp_path / "runs.jsonl"
        given: dict[str, Any] = {"data": data, "depth": 1, "results": results}
        first = htp_export.sensitivity(file, ["int4"], **given)
        lines = results.read_text().splitlines(keepends=True)
        results.write_text("".join(lines[:-4]))  # the process was killed
        made.clear()
        again = htp_export.sensitivity(file, ["int4"], **given)
        assert len(made) == 4
        assert again.to_dict() == first.to_dict()
        made.clear()
        assert htp_export.sensitivity(file, ["int4"], **given).to_dict() == first.to_dict()
        assert not made
        other = [{"x": 2 * feed["x"]} for feed in data]
        htp_export.sensitivity(file, ["int4"], **{**given, "data": other}, all_but=False)
        assert len(made) == 3

    def test_a_module_that_cannot_have_a_precision_is_said(self, tmp_path):
        model = spread(nn.Sequential(nn.Conv1d(32, 32, 3), nn.ReLU(), nn.Linear(14, 32))).eval()
        htp_export.export(model, (x(2, 32, 16, seed=1),), tmp_path / "c.onnx", verbose=False)
        found = htp_export.sensitivity(tmp_path / "c.onnx", ["int4"], seed=3)
        assert [row.path for row in found.ranking] == ["2"]
        assert found.modules["0"]["int4"].problem
        assert any(note.startswith("0 in int4: ") for note in found.notes)
        assert any("random" in note for note in found.notes)

    def test_the_command(self, file, data, tmp_path, capsys):
        np.savez(tmp_path / "x.npz", **data[0])
        command = [
            "sensitivity",
            str(file),
            "--precision",
            "int4,fp16",
            "--data",
            str(tmp_path / "x.npz"),
        ]
        command += ["--depth", "1"]
        assert main(command) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[0].split()[:3] == ["module", "class", "precision"]
        assert main([*command, "--json", "--results", str(tmp_path / "runs.jsonl")]) == 0
        printed = json.loads(capsys.readouterr().out)
        given: dict[str, Any] = {"data": data[0], "depth": 1, "results": tmp_path / "runs.jsonl"}
        expected = htp_export.sensitivity(file, ["int4", "fp16"], **given)
        assert printed == {"schema_version": 1, **json.loads(json.dumps(expected.to_dict()))}


def measurer_of(file: Path, data: list[dict[str, Array]], *metric: Any) -> Measurer:
    tagged = htp_export.load(file)
    return Measurer(tagged, Samples.of(RunSettings(data), tagged.model), *metric)


def brief(file: Path, data: Any, **options: Any) -> Any:
    given = {"trials": 14, "first": 4} | options
    return htp_export.search(
        file, ["int4", "fp16", "fp32"], objectives=["error", "size"], data=data, **given
    )


class TestSearch:
    @pytest.fixture(autouse=True)
    def _optuna(self) -> None:
        pytest.importorskip("optuna")

    def test_trials_and_front(self, file, data):
        found = brief(file, data)
        assert len({json.dumps(dict(trial.plan)) for trial in found.trials}) == len(found.trials)
        assert found.exact
        assert found.failed == 0
        points = [(trial.values["error"], trial.values["size"]) for trial in found.trials]
        best = [(trial.values["error"], trial.values["size"]) for trial in found.pareto]
        assert sorted(best) == sorted(points[place] for place in pareto(points))
        assert [size for _, size in best] == sorted(size for _, size in best)
        assert min(points)[0] == 0  # fp32
        assert {trial.origin for trial in found.trials} <= {"front", "uniform", "sampler"}
        made = htp_export.quantize(file, found.pareto[0].plan).tagged
        measurer = measurer_of(file, data)
        assert measurer._measured(made).error == pytest.approx(
            found.pareto[0].values["error"], rel=1e-6
        )

    def test_data_that_can_be_read_once_are_those_of_a_list(self, file, data):
        plans: dict[str, Any] = {"head": ["int8", "fp32"], "blocks.0.0": ["u8s8", "fp32"]}

        def found(given: Any, calibration: Any) -> list[Any]:
            options: dict[str, Any] = {"objectives": ["error", "size"], "trials": 8}
            result = htp_export.search(file, plans, data=given, calibration=calibration, **options)
            return sorted(tuple(trial.values.values()) for trial in result.trials)

        assert found((run for run in data), iter(data[:2])) == found(data, data[:2])

    def test_all_combinations_end_the_search(self, file, data):
        found = htp_export.search(
            file, {"head": ["int4", "fp32"]}, objectives=["size"], data=data, trials=50
        )
        assert len([trial for trial in found.trials if trial.number is not None]) == 2
        assert [trial.values["size"] for trial in found.pareto] == [
            min(t.values["size"] for t in found.trials)
        ]

    def test_a_space_by_selector_and_fields_of_a_precision(self, file, data):
        small = htp_export.Precision("small blocks", "weights", weight="int4", block_size=16)
        space = {"blocks.**": ["int4", "fp32"], "blocks.1.0": [small, "fp16"]}
        found = htp_export.search(file, space, objectives=["error", "size"], data=data, trials=30)
        assert found.modules["blocks.1.0"] == ("small blocks", "fp16")
        assert found.modules["blocks.0.0"] == ("int4", "fp32")
        assert "head" not in found.modules
        plan = next(t.plan for t in found.trials if isinstance(t.plan.get("blocks.1.0"), dict))
        assert htp_export.quantize(file, plan).modules["blocks.1.0"].bytes_after < 32 * 64

    @pytest.mark.parametrize("kind", ["journal", pytest.param("sqlite", marks=pytest.mark.slow)])
    def test_a_stored_study_goes_on_and_is_not_measured_again(
        self, file, data, tmp_path, kind, made
    ):
        storage = tmp_path / "study.log" if kind == "journal" else f"sqlite:///{tmp_path}/study.db"
        first = brief(file, data, storage=storage, trials=5)
        made.clear()
        assert brief(file, data, storage=storage, trials=5).to_dict() == first.to_dict()
        assert not made
        more = brief(file, data, storage=storage, trials=8)
        assert [trial.to_dict() for trial in more.trials[:5]] == [
            trial.to_dict() for trial in first.trials[:5]
        ]
        assert len(made) <= 3
        with pytest.raises(InputError, match="is of another search: its model and data differs"):
            brief(file, [{"x": 2 * data[0]["x"]}], storage=storage)
        with pytest.raises(InputError, match="its choices differs"):
            htp_export.search(
                file, ["int4"], objectives=["error", "size"], data=data, storage=storage
            )
        assert brief(file, data[:1], storage=storage, study="another", trials=5).trials

    @pytest.mark.long
    def test_the_page_runs_as_it_stands(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        page, names = ROOT / "docs" / "search.md", dict[str, Any]()
        for block in documents.blocks(page):
            if block.language == "python" and "past.onnx" not in block.text:
                exec(compile(block.text, "search.md", "exec"), names)
        assert (tmp_path / "found.onnx").exists()
        texts = [
            each.text.partition(" #")[0]
            for each in documents.commands(page)
            if "past.onnx" not in each.text and "mynets" not in each.text
        ]
        for text in texts:
            if text.startswith("echo "):
                subprocess.run(text, shell=True, check=True)
            else:
                assert main(shlex.split(text)[1:]) == 0
        named = [text.split()[1] for text in texts if not text.startswith("echo ")]
        assert named == ["sensitivity", "search", "search", "pipeline", "search"]

    def test_the_command_writes_plans_that_quantize_reads(self, file, data, tmp_path, capsys):
        np.savez(tmp_path / "x.npz", **data[0])
        out = tmp_path / "found"
        command = [
            "search",
            str(file),
            "--choices",
            "int4,fp32",
            "--data",
            str(tmp_path / "x.npz"),
            "--trials",
            "6",
        ]
        assert main([*command, "--select", "blocks.1", "-o", str(out)]) == 0
        assert "wrote" in capsys.readouterr().out
        assert {path.name for path in out.iterdir()} > {
            "front.json",
            "front.svg",
            "plan0.json",
            "plan1.json",
        }
        assert ET.parse(out / "front.svg").getroot().tag.endswith("svg")
        front = json.loads((out / "front.json").read_text())
        assert json.loads((out / "plan0.json").read_text()) == front["pareto"][0]["plan"]
        assert (
            main(["quantize", str(file), str(out / "plan0.json"), "-o", str(tmp_path / "q.onnx")])
            == 0
        )
        capsys.readouterr()
        assert main([*command, "--select", "blocks.1", "-o", str(out), "--json"]) == 0
        assert set(json.loads(capsys.readouterr().out)) == {"schema_version", *front}
        (tmp_path / "space.yaml").write_text("head: [int4, fp32]\n")
        assert (
            main(
                ["search", str(file), str(tmp_path / "space.yaml"), "--trials", "2", "-o", str(out)]
            )
            == 0
        )
        assert "random" in capsys.readouterr().out

    def test_errors_in_python(self, file, tmp_path):
        with pytest.raises(SelectorError):
            htp_export.search(file, {"nothing": ["int4"]})
        with pytest.raises(InputError, match="the space is empty"):
            htp_export.search(file, {})
        with pytest.raises(InputError, match="two precisions are named"):
            htp_export.search(
                file,
                [{"precision": "int4", "block_size": 16}, {"precision": "int4", "block_size": 64}],
            )
        (tmp_path / "broken.log").write_text("{nothing\n{}\n")
        with pytest.raises(FileError, match="is no journal"):
            htp_export.search(file, ["int4"], storage=tmp_path / "broken.log")


def test_without_optuna_the_error_says_what_to_install(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match="pip install"):
        htp_export.search(file, ["int4"])
