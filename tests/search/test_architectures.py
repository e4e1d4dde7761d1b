"""Architecture search: parts that are measured once, costs and metrics beside PyTorch's, and candidates that fail."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.search.architecture_space import ArchitectureSpace, ChosenValues
from htp_export.capabilities.search.candidate_parts import REST, part_modules, parts_of
from htp_export.capabilities.search.part_timing import PartTimer
from htp_export.command.main import main
from htp_export.errors import InputError

pytest.importorskip("optuna")

SPACE: dict[str, list[Any]] = {"depth": [1, 3], "mixer": ["Linear", "Identity"]}


class Block(nn.Module):
    def __init__(self, width: int, mixer: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mixer = {"Linear": nn.Linear(width, width), "Identity": nn.Identity()}[mixer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(self.mixer(x))))


class Net(nn.Module):
    def __init__(self, depth: int, mixer: str = "Identity", width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width, mixer) for _ in range(depth))
        self.head = nn.Linear(width, 2)
        self.head.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.head(x))


def build(choice: Mapping[str, Any]) -> tuple[nn.Module, torch.Tensor]:
    return Net(**choice), torch.ones(3, 4)


def metric(module: nn.Module) -> float:
    """The number of weights: a value that the test knows, too."""
    return float(sum(parameter.numel() for parameter in module.parameters()))


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of these nets are not compared."""
    monkeypatch.setattr("htp_export.capabilities.search.part_timing._LEAST_SECONDS", 0.0)


def searched(build: Any, space: Any = None, **settings: Any) -> Any:
    settings = {"trials": 4, "runs": 1, "dynamo": False, **settings}
    return htp_export.search(build, SPACE if space is None else space, **settings)


def macs_of(choice: Mapping[str, Any]) -> int:
    """Multiply-adds of `Net` on three rows, by hand: width 8."""
    mixer = 8 * 8 if choice["mixer"] == "Linear" else 0
    return 3 * (4 * 8 + choice["depth"] * (2 * 8 * 16 + mixer) + 8 * 2)


@pytest.fixture(scope="module")
def found() -> Any:
    return searched(build, metric=metric, objectives=["latency", "flops", "metric"])


def test_all_candidates_of_a_small_space_are_measured_once(found):
    choices = {(trial.choice["depth"], trial.choice["mixer"]) for trial in found.trials}
    assert choices == {(1, "Linear"), (1, "Identity"), (3, "Linear"), (3, "Identity")}
    assert len(found.trials) == 4
    assert not found.failures


def test_costs_and_metrics_are_those_of_pytorch(found):
    for trial in found.trials:
        module = Net(**trial.choice)
        count = sum(parameter.numel() for parameter in module.parameters())
        assert (trial.parameters, trial.bytes, trial.metric) == (count, 4 * count, count)
        assert trial.flops == trial.values["flops"] == 2 * macs_of(trial.choice)


def test_a_module_that_was_seen_before_is_not_measured_again(found):
    # stem, head, two kinds of blocks, and what runs between them for each kind: 6
    assert found.measured_parts == 6
    # the blocks, stem, head, and the tanh of the root
    assert found.all_parts == 1 + 1 + 3 + 3 + 4 * 3
    for trial in found.trials:
        blocks = [part for part in trial.parts if part.module.startswith("blocks")]
        assert len({part.key for part in blocks}) == 1
        assert all(part.reused for part in blocks[1:])
    first, *others = found.trials
    assert not first.parts[0].reused
    assert sum(not part.reused for trial in others for part in trial.parts) < 6


def test_the_latency_of_a_candidate_is_the_sum_of_its_parts(found):
    for trial in found.trials:
        assert trial.latency_ms == pytest.approx(sum(part.latency_ms for part in trial.parts))
        assert trial.latency_ms > 0


def test_the_front_has_the_candidates_that_no_other_is_better_than(found):
    best = max(found.trials, key=lambda trial: trial.metric)
    assert best.choice == {"depth": 3, "mixer": "Linear"}
    assert best in found.pareto
    assert "of 4 candidates are on the front" in found.summary
    assert json.loads(json.dumps(found.to_dict()))["measured_parts"] == 6


def test_both_exporters_have_the_same_parts(monkeypatch):
    timed: list[int] = []
    parts = PartTimer.parts

    def counted(self: PartTimer, tagged: Any, nodes: Any, feed: Any) -> list[float]:
        timed.extend(map(len, nodes))
        return parts(self, tagged, nodes, feed)

    monkeypatch.setattr(PartTimer, "parts", counted)
    space = {"depth": [2], "mixer": ["Linear"]}
    names = []
    for dynamo in (True, False):
        [trial] = searched(build, space, dynamo=dynamo).trials
        names.append(sorted(part.name for part in trial.parts))
        assert trial.flops == 2 * macs_of(trial.choice)
    assert names[0] == names[1]
    assert len(timed) == 2 * 4
    assert all(timed)


@pytest.mark.long
def test_settings_shapes_and_inputs_tell_parts_apart():
    class Scale(nn.Module):
        def __init__(self, factor: float, twice: bool = False) -> None:
            super().__init__()
            self.factor, self.twice = factor, twice

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x if self.twice else y) * self.factor + x

    class Calls(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.inner(x, y)

    def key(inner: nn.Module, size: int = 3) -> str:
        arguments = (torch.ones(1, size), torch.ones(1, size))
        program = htp_export.export(Calls(inner).eval(), arguments, verbose=False)
        tagged = htp_export.load(program)
        parts = parts_of(tagged, part_modules(tagged))
        [part] = [part for call, part in parts.items() if call != REST]
        return part.key

    plain = key(Scale(2.0))
    assert plain == key(Scale(2.0))
    assert len({plain, key(Scale(3.0)), key(Scale(2.0), size=4), key(Scale(2.0, twice=True))}) == 4


def test_candidates_that_fail_are_listed_and_the_search_goes_on():
    def failing(choice: Mapping[str, Any]) -> Any:
        if choice["depth"] == 2:
            raise ValueError("two is too few")
        return "no module" if choice["depth"] == 3 else build(choice)

    space = {"depth": [1, 2, 3], "mixer": ["Identity"]}
    found = searched(failing, space)
    assert [trial.choice["depth"] for trial in found.trials] == [1]
    reasons = {failure.choice["depth"]: failure.reason for failure in found.failures}
    assert "raised ValueError: two is too few" in reasons[2]
    assert "build returned str; return an nn.Module, or (module, inputs)" in reasons[3]
    assert "depth=2, mixer=Identity: build: raised ValueError" in str(found)


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        ({}, "the space of a build function is a mapping"),
        (["int8"], "the space of a build function is a mapping"),
        ({"depth": []}, "'depth' needs a list of choices, not []"),
        ({"depth": 3}, "'depth' needs a list of choices, not 3"),
        ({"depth": [1, 1]}, "'depth' has two equal choices"),
        ({"depth": [nn.ReLU]}, "give a name, from which the build function makes the object"),
    ],
)
def test_a_space_that_cannot_be_read_is_an_error_before_anything_is_built(space, problem):
    with pytest.raises(InputError) as error:
        searched(lambda choice: pytest.fail("built"), space)
    assert problem in str(error.value)


def test_names_that_build_does_not_know_are_an_error_or_a_note():
    with pytest.raises(InputError, match=r"no candidate could be measured: .*unexpected keyword"):
        searched(lambda choice: build(choice), {"depth": [1], "wdith": [2]})

    def reads_depth(choice: Mapping[str, Any]) -> Any:
        return build({"depth": choice["depth"]})

    found = searched(reads_depth, {"depth": [1], "wdith": [2]})
    assert found.notes[-1] == "space: build read 'wdith' for no candidate; is the name right?"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"objectives": ["error"]}, "objectives of architectures are some of latency, size"),
        ({"objectives": ["metric"]}, "go together"),
        ({"select": "blocks"}, "select is for the search on a file"),
        ({"repeats": 3}, "repeats is for the search on a file"),
        ({"depth": 0}, "depth is for the search on a file"),
        ({"by": "class"}, "by is for the search on a file"),
        ({"first": 5}, "first is for the search on a file"),
        ({"new_tokens": 8}, "new_tokens is for the search on a file"),
        ({"sampler": "nosuch"}, "there is no sampler 'nosuch'"),
        ({"metric": lambda module: float("nan")}, "the metric returned nan"),
        ({"metric": lambda module: "good"}, "the metric returned 'good', which is not a number"),
    ],
)
def test_arguments_of_the_other_search_are_errors(settings, problem):
    with pytest.raises(InputError) as error:
        searched(build, {"depth": [1]}, **settings)
    assert problem in str(error.value)


def test_a_grid_of_too_many_candidates_is_refused_before_one_is_built():
    def never(choice: Mapping[str, Any]) -> nn.Module:
        raise AssertionError("it was called")

    space = {"depth": list(range(1000)), "width": list(range(1, 1003))}
    with pytest.raises(InputError, match="there are 1,002,000"):
        searched(never, space, sampler="grid")


def test_an_argument_of_this_search_is_an_error_with_a_file():
    with pytest.raises(InputError, match="dynamo is for the search by a function"):
        htp_export.search("model.onnx", dynamo=False)


def test_a_module_in_place_of_the_function_is_an_error():
    with pytest.raises(InputError, match="give a function that builds modules"):
        searched(Net(1))


def test_inputs_may_come_from_data():
    def without_inputs(choice: Mapping[str, Any]) -> nn.Module:
        return Net(**choice)

    with pytest.raises(InputError, match=r"return \(module, inputs\), or give data"):
        searched(without_inputs, {"depth": [1]})
    found = searched(without_inputs, {"depth": [1]}, data={"x": torch.ones(5, 4)})
    assert found.trials[0].flops == 2 * 5 * (4 * 8 + 2 * 8 * 16 + 8 * 2)


def test_a_storage_keeps_measurements_and_refuses_another_search(tmp_path, monkeypatch):
    storage = tmp_path / "study.log"
    first = searched(build, storage=storage, trials=2)
    timed: list[Any] = []
    monkeypatch.setattr(
        PartTimer,
        "parts",
        lambda self, tagged, nodes, feed: timed.append(nodes) or [1.0] * len(nodes),
    )
    again = searched(build, storage=storage, trials=2)
    assert again.trials == first.trials
    assert not timed
    with pytest.raises(InputError, match="is of another search: its objectives differs"):
        searched(build, storage=storage, objectives=["size"])


def test_the_choices_of_a_candidate_are_a_dict_that_notes_what_is_read():
    choice = ChosenValues({"a": 1, "b": 2})
    assert choice["a"] == 1
    assert choice.read == {"a"}
    assert dict(**choice) == {"a": 1, "b": 2}
    assert choice.read == {"a", "b"}
    space = ArchitectureSpace({"a": [True, 2, "x", [1, 2]], "b": [None]})
    different = space.different(4, seed=1)
    assert len({texts["a"] for texts in different}) == 4
    assert space.choice({"a": "[1, 2]", "b": "null"}) == {"a": [1, 2], "b": None}


CODE = """
import torch
from torch import nn

def build(choice):
    return nn.Sequential(nn.Linear(4, choice["width"]), nn.ReLU(), nn.Linear(choice["width"], 2)), torch.ones(1, 4)
"""


def test_the_command_takes_a_function_and_writes_the_front(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mynets.py").write_text(CODE)
    Path("space.yaml").write_text("width: [4, 8, 16]\n")
    command = "search --entry mynets:build space.yaml --no-dynamo --runs 1 --objective latency,size -o found"
    for _ in range(2):  # the folder of an earlier search is replaced
        assert main(command.split()) == 0
    shown = capsys.readouterr().out
    assert "wrote" in shown
    assert "parts were measured" in shown
    assert "width=4" in shown
    front = json.loads(Path("found/front.json").read_text())
    assert {trial["choice"]["width"] for trial in front["trials"]} == {4, 8, 16}
    assert json.loads(Path("found/choice0.json").read_text()) == front["pareto"][0]["choice"]
    assert Path("found/front.svg").read_text().count("<circle data-trial") == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "name an ONNX file, or a function that builds modules: --entry"),
        ("--entry mynets:build", "a function needs a file of its space"),
        ("--entry mynets:nosuch space.yaml", "has no function 'nosuch'"),
        ("--entry mynets:build space.yaml --select x", "--select has no effect"),
        ("--entry mynets:build space.yaml --choices int8", "--choices has no effect"),
        ("net.onnx space.yaml --no-dynamo", "--no-dynamo has no effect"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mynets.py").write_text(CODE)
    Path("space.yaml").write_text("width: [4]\n")
    assert main(["search", *arguments.split()]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
