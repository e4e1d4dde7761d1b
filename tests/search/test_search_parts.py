"""search: the formats of the parts of a module are decided apart, by module or by class."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError
from tests.nets import composed, spread

X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
PARTS = {"data": ["8.4", "4.2"], "weight": ["8.6", "4.3"], "bias": ["8.4"]}
SPACE = {"class:Linear": {"precision": "fixed", **PARTS}}


def fake(tensor: torch.Tensor, text: str) -> torch.Tensor:
    """PyTorch's own simulation of fixed point."""
    width, fraction = map(int, text.split("."))
    ends = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    return torch.fake_quantize_per_tensor_affine(tensor, 2.0**-fraction, 0, *ends)


def network() -> nn.Module:
    torch.manual_seed(0)
    parts = {"one": nn.Linear(16, 8), "act": nn.ReLU(), "two": nn.Linear(8, 3)}
    return spread(composed(lambda self, x: self.two(self.act(self.one(x))), **parts).eval())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("parts") / "net.onnx"
    htp_export.export(network(), (torch.from_numpy(X),), made, verbose=False)
    return made


def first_output(outputs) -> float:
    """A metric that depends on every bit of the first output."""
    return float(np.float64(outputs[0][next(iter(outputs[0]))]).sum())


def of_pytorch(formats: dict[str, tuple[str, str, str]]) -> float:
    """The same metric of the net in PyTorch, with formats of data, weight and bias by module."""
    net, x = network(), torch.from_numpy(X)
    with torch.no_grad():
        for path in ("one", "two"):
            layer = net.get_submodule(path)
            data, weight, bias = formats[path]
            rounded = [fake(x, data), fake(layer.weight, weight), fake(layer.bias, bias)]
            x = nn.functional.linear(*rounded)
            x = torch.relu(x) if path == "one" else x
    return float(x.double().sum())


def formats_in(plan: dict[str, str]) -> dict[str, tuple[str, str, str]]:
    """Module → its formats in a plan such as ``fixed:data=8.4:weight=8.6:bias=8.4``."""
    formats = {}
    for path in ("one", "two"):
        fields = (plan.get(path) or plan["."]).split(":")[1:]
        data, weight, bias = (field.partition("=")[2] for field in fields)
        formats[path] = data, weight, bias
    return formats


@pytest.mark.parametrize(("by", "count"), [("module", 16), ("class", 4)])
def test_every_plan_computes_what_pytorch_does(by, count, file):
    settings = {"objectives": ("metric", "bits"), "metric": first_output, "data": {"x": X}}
    found = htp_export.search(file, SPACE, by=by, sampler="grid", trials=count, **settings)
    of_study = [trial for trial in found.trials if trial.number is not None]
    # A sampler may choose plans again that were measured before.
    assert count / 2 < len({json.dumps(trial.plan) for trial in of_study}) <= count
    for trial in of_study:
        formats = formats_in(trial.plan)
        assert trial.values["metric"] == pytest.approx(of_pytorch(formats), abs=1e-5)
        if by == "class":
            assert formats["one"] == formats["two"]
    if by == "module":
        assert any(len(set(formats_in(trial.plan).values())) == 2 for trial in of_study)
    # the whole model with one format for all parts is among the trials
    whole = {trial.plan["."] for trial in found.trials if trial.number is None}
    assert "fixed:data=8.4:weight=8.4:bias=8.4" in whole


def test_variables_are_parts_of_modules_or_of_classes(file):
    settings = {"objectives": ("error", "bits"), "data": {"x": X}, "trials": 1}
    by_module = htp_export.search(file, SPACE, **settings).modules
    assert list(by_module) == [f"{path}:{part}" for path in ("one", "two") for part in PARTS]
    assert by_module["one:weight"] == ("weight=8.6", "weight=4.3")
    assert list(htp_export.search(file, SPACE, by="class", **settings).modules) == [
        f"class:Linear:{part}" for part in PARTS
    ]
    whole = htp_export.search(file, ["fixed:8.4", "fp32"], by="class", **settings).modules
    assert whole == {"class:Linear": ("fixed:8.4", "fp32")}
    both = {"one": {"precision": "fixed", "weight": ["8.6", "4.3"]}, "two": ["int8", "fp32"]}
    assert list(htp_export.search(file, both, **settings).modules) == ["one:weight", "two"]


def test_a_part_that_is_float_stays(file):
    space = {"one": {"precision": "fixed", "weight": ["float32", "8.6"], "data": ["float32"]}}
    found = htp_export.search(file, space, objectives=("error", "bits"), data={"x": X}, trials=2)
    plans = [trial.plan for trial in found.trials if trial.number is not None]
    assert {"one": "fp32"} in plans
    assert {"one": "fixed:data=float32:weight=8.6:bias=float32"} in plans


def test_the_command_reads_parts_from_a_file_and_its_plan_quantizes(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(json.dumps(SPACE))
    np.savez("x.npz", x=X)
    words = ["search", str(file), "space.yaml", "--by", "class", "--objectives", "error,bits"]
    assert main([*words, "--data", "x.npz", "--trials", "4", "-o", "found"]) == 0
    front = json.loads(Path("found/front.json").read_text())
    assert len(front["trials"]) >= 4
    assert main(["quantize", str(file), "found/plan0.json", "-o", "made.onnx"]) == 0
    assert main(["view", str(file), "--result", "found/front.json", "-o", "page.html"]) == 0


@pytest.mark.parametrize(
    ("space", "options", "problem"),
    [
        ({"one": {"precision": "int4", "block_size": [16, 32]}}, {}, "'int4' has no parts"),
        ({"one": {"precision": "fixed", "wieght": ["8.4"]}}, {}, "parts of 'fixed' are data, weig"),
        ({"one": {"precision": "fixed", "weight": []}}, {}, "'weight' of 'fixed' has no values"),
        ({"one": {"precision": "fixed", "weight": [8.4]}}, {}, "is no fixed-point format"),
        ({"one": {"precision": "fixed", "weight": ["8.9"]}}, {}, "more than its width of 8"),
        (SPACE, {"by": "kind"}, "by is 'kind': there are 'module' and 'class'"),
        (SPACE, {"sampler": "gird"}, "there is no sampler 'gird'"),
        (
            {"class:Linear": {"precision": "fixed", **dict.fromkeys(PARTS, ["8.4"] * 13)}},
            {"sampler": "grid"},
            "",
        ),
    ],
)
def test_wrong_spaces_are_errors_before_anything_runs(space, options, problem, file):
    if not problem:
        formats = [f"16.{bits}" for bits in range(13)]
        space = {"class:Linear": {"precision": "fixed", **dict.fromkeys(PARTS, formats)}}
        problem = "of which there are 4,826,809"
    with pytest.raises(InputError, match=problem):
        htp_export.search(file, space, objectives=("error", "bits"), data={"x": X}, **options)
