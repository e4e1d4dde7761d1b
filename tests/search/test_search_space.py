"""search over sparsity, ranks, dropped blocks and precisions together: spaces, plans, fronts, samplers."""

import itertools
import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.quantize.precisions import PRECISIONS
from htp_export.capabilities.search.front_files import front_svg
from htp_export.capabilities.search.measuring import Measurer
from htp_export.capabilities.search.search_results import Search, Trial, search_from
from htp_export.capabilities.search.spaces import choice_of
from htp_export.capabilities.view.page.document import front_data
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.files.lazy_tensor import slots
from htp_export.format.model_metadata import read_provenance
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import RunSettings
from htp_export.weights.products import weights_of
from tests.nets import composed, x

Array = np.ndarray[Any, Any]


def residual() -> nn.Module:
    """Its result is its input and what two layers add."""
    parts = {"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}
    return composed(lambda self, x: x + self.down(torch.relu(self.up(x))), **parts)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two residual blocks, of which the second one adds little, and a head."""
    torch.manual_seed(0)
    blocks = nn.Sequential(residual(), residual())
    model: Any = composed(
        lambda self, x: self.head(self.blocks(x)), blocks=blocks, head=nn.Linear(32, 8)
    ).eval()
    with torch.no_grad():
        model.blocks[1].down.weight *= 0.05
    path = tmp_path_factory.mktemp("space") / "net.onnx"
    shapes = {"x": {0: torch.export.Dim("batch")}}
    htp_export.export(
        model, (), path, kwargs={"x": x(4, 32, seed=9)}, dynamic_shapes=shapes, verbose=False
    )
    return path


@pytest.fixture(scope="module")
def data() -> list[dict[str, Array]]:
    return [{"x": x(4, 32, seed=seed).numpy()} for seed in range(2)]


SPACE = {
    "blocks.*": ["drop", "fp32"],
    "blocks.*.up": [
        "int4",
        "0.5",
        "2:4+int8-dynamic",
        {"prune": "rank:25%", "precision": "int4"},
        "channels:0.25",
    ],
    "blocks.*.down": ["int8", 0.5, "fp32"],
    "head": ["int4", "fp32"],
}
THREE = ("error", "size", "nonzeros")


def searched(
    file: Path, data: Any, objectives: Sequence[str] = THREE, space: Any = None, **options: Any
) -> Any:
    pytest.importorskip("optuna")
    return htp_export.search(
        file,
        SPACE if space is None else space,
        objectives=objectives,
        data=data,
        **({"trials": 30} | options),
    )


@pytest.fixture(scope="module")
def found(file: Path, data: list[dict[str, Array]]) -> Any:
    return searched(file, data, first=8)


class TestChoices:
    @pytest.mark.parametrize(
        ("value", "name", "written"),
        [
            ("int8", "int8", "int8"),
            (0.5, "0.5", "0.5"),
            ("0.5", "0.5", "0.5"),
            ("int8+2:4", "2:4+int8", "2:4+int8"),
            ("rank:16 + int4", "rank:16+int4", "rank:16+int4"),
            ("2:4+fp32", "2:4", "2:4"),
            ({"prune": "drop"}, "drop", "drop"),
            (
                {"prune": 0.5, "precision": "int4", "block_size": 16},
                "0.5+int4",
                {"prune": "0.5", "precision": "int4", "block_size": 16},
            ),
            (PRECISIONS["fp16"], "fp16", "fp16"),
        ],
    )
    def test_forms(self, value, name, written):
        choice = choice_of(value)
        assert (choice.name, choice.written) == (name, written)
        assert choice_of(choice.written) == choice

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            ("2:4+int9", "there is no precision 'int9'"),
            ("drop+int8", "nothing is left to quantize"),
            ("int8+int4", "one value of prune and one precision"),
            ("0.5+2:4", "one value of prune and one precision"),
            ({"prune": "2:4", "bits": 4}, "has no name"),
            ({"sparsity": 0.5}, "has no name"),
            (None, "sparsity None"),
        ],
    )
    def test_what_is_no_choice(self, value, problem):
        with pytest.raises(InputError, match=problem):
            choice_of(value)


class TestPlans:
    @pytest.mark.long
    def test_values_are_those_of_prune_and_then_quantize(self, file, data, found):
        measurer = Measurer(
            htp_export.load(file), Samples.of(RunSettings(data), htp_export.load(file).model)
        )
        studied = [trial for trial in found.trials if trial.number is not None and trial.prune]
        assert len(studied) > 10
        for trial in studied[:6]:
            made = htp_export.prune(file, trial.prune)
            kept = sum(
                int(np.count_nonzero(weight.tensor.numpy())) for weight in weights_of(made.tagged)
            )
            changed = {path: value for path, value in trial.plan.items() if value != "fp32"}
            after = (
                htp_export.quantize(made.tagged, changed, data=data).tagged
                if changed
                else made.tagged
            )
            assert trial.values["nonzeros"] == kept
            assert trial.values["size"] == sum(slot.tensor.nbytes for slot in slots(after.model))
            assert trial.values["error"] == pytest.approx(measurer._measured(after).error, rel=1e-5)

    def test_nothing_is_said_of_modules_inside_a_dropped_one(self, found):
        dropped = [trial for trial in found.trials if "drop" in trial.prune.values()]
        assert dropped
        for trial in dropped:
            gone = [path for path, value in trial.prune.items() if value == "drop"]
            named = [path for path in (*trial.plan, *trial.prune) if path not in gone]
            assert not [path for path in named for block in gone if path.startswith(f"{block}.")]
            assert trial.choices[gone[0]] == "drop"

    def test_the_block_that_adds_little_is_dropped_first(self, found):
        one = [t for t in found.trials if list(t.prune.items()).count(("blocks.1", "drop"))]
        alone = min(one, key=lambda trial: trial.values["error"])
        assert alone.values["error"] < 0.02
        assert not [
            t
            for t in found.pareto
            if t.prune.get("blocks.0") == "drop" and t.values["error"] < 0.02
        ]

    def test_results_are_read_back_and_drawn(self, found):
        again = search_from(json.loads(json.dumps(found.to_dict())))
        assert [(t.plan, t.prune, t.values) for t in again.trials] == [
            (t.plan, t.prune, t.values) for t in found.trials
        ]
        drawn = front_data(again)
        places = [place for place in drawn["front"] if again.trials[place].prune]
        assert all(drawn["trials"][place]["file"].startswith("steps") for place in places)
        plans = {words for trial in drawn["trials"] for _, words in trial["plan"]}
        assert {"drop", "2:4+int8-dynamic", "int4"} <= plans
        assert "rank:25%+int4" in plans

    def test_steps_make_the_model_again_and_say_how(self, file, data, found, tmp_path):
        trial = next(
            t
            for t in found.pareto
            if t.prune and any(v not in ("fp32", "int8") for v in t.plan.values())
        )
        made = htp_export.pipeline(trial.steps, file, tmp_path / "smaller.onnx")
        tagged = htp_export.load(made.output)
        assert sum(slot.tensor.nbytes for slot in slots(tagged.model)) == trial.values["size"]
        notes = read_provenance(tagged.model.metadata_props)
        assert [note.step for note in notes] == ["prune", "quantize"]
        assert notes[0].options["plan"] == trial.prune

    def test_the_command_writes_steps_that_pipeline_reads(self, file, data, tmp_path, capsys):
        pytest.importorskip("optuna")
        for number, feed in enumerate(data):
            np.savez(tmp_path / f"{number}.npz", **feed)
        (tmp_path / "space.yaml").write_text(
            '"blocks.*": [drop, fp32]\n"blocks.*.up": ["2:4+int8", int8]\n'
        )
        out = tmp_path / "found"
        given = [f"--data={tmp_path / name}" for name in ("0.npz", "1.npz")]
        command = [
            "search",
            str(file),
            str(tmp_path / "space.yaml"),
            *given,
            "--trials",
            "6",
            "--objective",
        ]
        assert main([*command, "nonzeros,error", "-o", str(out)]) == 0
        printed = capsys.readouterr().out
        front = json.loads((out / "front.json").read_text())
        steps = [place for place, trial in enumerate(front["pareto"]) if trial["prune"]]
        assert steps
        assert {path.name for path in out.iterdir()} == {
            "front.json",
            "front.svg",
            *(
                f"steps{place}.json" if place in steps else f"plan{place}.json"
                for place in range(len(front["pareto"]))
            ),
        }
        made = [json.loads((out / f"steps{place}.json").read_text()) for place in steps]
        files = [str(tmp_path / name) for name in ("0.npz", "1.npz")]
        assert (
            next(step["quantize"]["data"] for each in made for step in each if "quantize" in step)
            == files
        )
        for place in steps:
            target = tmp_path / f"{place}.onnx"
            assert (
                main(
                    [
                        "pipeline",
                        str(out / f"steps{place}.json"),
                        "-m",
                        str(file),
                        "-o",
                        str(target),
                    ]
                )
                == 0
            )
            size = sum(slot.tensor.nbytes for slot in slots(htp_export.load(target).model))
            assert size == front["pareto"][place]["measured"]["bytes"]
        assert "2:4+int8" in printed
        assert main([*command, "error,size", "--choices", "0.5"]) == 2
        assert (
            main([*command[:2], "--choices", "0.5,int4", "--trials", "3", "--select", "head"]) == 0
        )
        assert "zeros take as many bytes" in capsys.readouterr().out


class TestFront:
    def test_the_computed_front_is_that_of_all_combinations_with_what_is_inside_dropped_blocks_left_out(
        self, file, data
    ):
        space = {
            "blocks.*": ["drop", "fp32"],
            "blocks.*.*": ["int4", "fp16"],
            "head": ["int4", "fp32"],
        }
        result = searched(file, data, ("error", "size"), space, trials=1)
        tagged = htp_export.load(file)
        measurer = Measurer(tagged, Samples.of(RunSettings(data), tagged.model))
        original = measurer.original

        def cost(pruning: dict[str, str], plan: dict[str, str]) -> tuple[int, float]:
            removed = {path: choice_of(value).sparsity for path, value in pruning.items()}
            named = {path: PRECISIONS[name] for path, name in plan.items()}
            measured = measurer.measure(named, removed)  # type: ignore[arg-type]
            return measured.bytes - original.bytes, measured.error

        def inside(block: str) -> list[tuple[int, float]]:
            pairs = itertools.product(
                *(
                    [cost({}, {f"{block}.{part}": name}) for name in ("int4", "fp16")]
                    for part in ("up", "down")
                )
            )
            return [cost({block: "drop"}, {}), *((a[0] + b[0], a[1] + b[1]) for a, b in pairs)]

        heads = [cost({}, {"head": "int4"}), (0, 0.0)]
        sums = [
            (original.bytes + sum(part[0] for part in parts), sum(part[1] for part in parts))
            for parts in itertools.product(inside("blocks.0"), inside("blocks.1"), heads)
        ]
        best = [
            one
            for one in sums
            if not any(a <= one[0] and b <= one[1] and (a, b) != one for a, b in sums)
        ]
        assert result.exact
        assert [(size, pytest.approx(error)) for size, error in sorted(set(best))] == list(
            result.predicted
        )
        assert result.predicted[0][0] > 0

    def test_the_front_is_over_the_cost_that_is_asked_for(self, file, data):
        space = {"blocks.*.up": ["0.25", "0.75", "fp32"]}
        result = searched(file, data, ("nonzeros", "error"), space, trials=20, first=9)
        sums = {8448 - first - second for first in (0, 512, 1536) for second in (0, 512, 1536)}
        assert {size for size, _ in result.predicted} <= sums
        assert (result.predicted[0][0], result.predicted[-1]) == (8448 - 2 * 1536, (8448, 0))
        assert len([trial for trial in result.trials if trial.number is not None]) == 9
        assert {trial.origin for trial in result.trials[:5]} == {"front", "uniform"}
        assert not any("zeros take" in note for note in result.notes)


class TestSaidBefore:
    @pytest.fixture(autouse=True)
    def _nothing_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def runs(*given: Any) -> None:
            raise AssertionError("something was measured")

        monkeypatch.setattr(Measurer, "_run", runs)

    @pytest.mark.parametrize(
        ("space", "problem"),
        [
            (
                {"head": ["drop", "fp32"]},
                "choice 'drop' of 'head': module 'head' is no residual block",
            ),
            (
                {"blocks.*": ["drop", "fp32"], "head": ["drop", "int4"]},
                "choice 'drop' of 'head': .*no residual block",
            ),
            (
                {"head": ["channels:0.5"]},
                "choice 'channels:0.5' of 'head': .*its channels reach output",
            ),
            (
                {"head": ["rank:7"]},
                "choice 'rank:7' of 'head': rank 7 of a matrix of 8 by 32 saves no bytes",
            ),
            (
                {"head": ["heads:0.5"]},
                "choice 'heads:0.5' of 'head': it has no attention heads to cut",
            ),
            ({"blocks.*": ["drop", "int8"], "blocks.0.up": ["int8"]}, "lies in"),
            (
                {"blocks.0": ["drop", "int8"], "blocks.0.up": ["int8"]},
                "module 'blocks.0.up' lies in 'blocks.0'",
            ),
            (["drop+int8"], "nothing is left to quantize"),
        ],
    )
    def test_what_cannot_be(self, file, data, space, problem):
        with pytest.raises(InputError, match=problem):
            searched(file, data, space=space)


def test_modules_with_the_same_channels_have_one_share(tmp_path):
    pytest.importorskip("optuna")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), residual(), residual(), nn.Linear(32, 8)).eval()
    program = htp_export.export(model, (x(2, 16, seed=1),), verbose=False)
    problem = "modules '1.down' and '2.down' have the same channels, and may lose different shares of them"
    with pytest.raises(InputError, match=problem):
        htp_export.search(
            program, {"1.down": ["channels:0.5"], "2.down": ["channels:0.25", "fp32"]}
        )
    space = {"*.down": ["channels:0.5", "fp32"], "*.up": ["channels:0.5", "channels:0.25"]}
    found = htp_export.search(program, space, objectives=("error", "size"), trials=12, first=4)
    assert found.failed == 0
    assert {len(trial.prune) for trial in found.trials if trial.number is not None} == {2, 3, 4}


def test_choices_that_some_modules_cannot_have_are_noted(file, data):
    space = {"**": ["rank:7", "fp32"]}
    result = searched(file, data, ("error", "size"), space, trials=4)
    assert result.modules["head"] == ("fp32",)
    assert result.modules["blocks.0.up"] == ("rank:7", "fp32")
    assert [note for note in result.notes if note.startswith("head in rank:7: rank 7 of a matrix")]


@pytest.mark.parametrize(
    "sampler",
    ["tpe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grid", "nsga2", "random"))],
)
def test_samplers_with_mixed_choices_and_three_objectives_are_reproducible(file, data, sampler):
    space = {
        "blocks.1": SPACE["blocks.*"],
        "blocks.1.up": SPACE["blocks.*.up"],
        "head": ["int4", "fp32"],
    }

    def plans(seed: int) -> list[Any]:
        result = searched(file, data, space=space, trials=12, first=3, sampler=sampler, seed=seed)
        assert result.failed == 0
        return [(trial.plan, trial.prune, trial.values) for trial in result.trials]

    first = plans(1)
    assert first == plans(1)
    assert [plan[:2] for plan in first] != [plan[:2] for plan in plans(2)]
    kinds = {value for _, prune, _ in first for value in prune.values()}
    assert {"drop", "0.5", "2:4", "rank:25%", "channels:0.25"} <= kinds


def test_the_line_in_the_picture_is_the_front_in_the_two_objectives_that_are_drawn():
    def trial(number: int, size: float, metric: float, nonzeros: float) -> Trial:
        values = {"metric": metric, "size": size, "nonzeros": nonzeros}
        return Trial(number, {"fc": "int8"}, values, "sampler", {})

    # The third one has fewer zeros alone, and the fourth one is worse in everything.
    given = (trial(0, 1, 0.5, 9), trial(1, 90, 0.9, 9), trial(2, 15, 0.2, 1), trial(3, 18, 0.1, 9))
    search = Search(("metric", "size", "nonzeros"), given, 0, {"fc": ("int8",)})
    assert [each.number for each in search.pareto] == [2, 0, 1]
    drawn = ET.fromstring(front_svg(search))
    space = {"svg": "http://www.w3.org/2000/svg"}
    [line] = drawn.findall("svg:polyline", space)
    circles = {each.get("data-trial"): each for each in drawn.findall("svg:circle", space)}
    ends = [f"{circles[place].get('cx')},{circles[place].get('cy')}" for place in ("0", "1")]
    assert line.get("points", "").split() == ends
    assert [circles[place].get("opacity") for place in "0123"] == ["1", "1", "1", "0.5"]
    assert not [
        each.text for each in drawn.findall("svg:text", space) if (each.text or "").startswith("-")
    ]
