"""NaN is no number: each capability that meets one says where, in one sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnxruntime import InferenceSession
from torch import nn

import htp_export
from htp_export.errors import InputError
from tests.exporting import BOTH
from tests.extract.test_cutting import exported_to
from tests.nets import Apply, Holding, composed, spread, x

NAN = float("nan")


def example(seed: int = 0, *, broken: bool = False) -> dict[str, Any]:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
    if broken:
        x[0, 3] = NAN
    return {"input": x.numpy()}


def exported(folder: Path, *more: nn.Module, broken: bool = False) -> Path:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8), *more).eval()
    if broken:
        with torch.no_grad():
            net[0].weight[5, 0] = NAN
    htp_export.export(
        net, (torch.from_numpy(example()["input"]),), folder / "net.onnx", verbose=False
    )
    return folder / "net.onnx"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("nan"))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One weight of the first layer is NaN."""
    return exported(tmp_path_factory.mktemp("nan"), broken=True)


@pytest.fixture(scope="module")
def partly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of what it returns is NaN."""
    return exported(tmp_path_factory.mktemp("nan"), Apply(lambda x: x.log()))


@pytest.mark.parametrize("order", [(True, False), (False, True)])
@pytest.mark.parametrize(
    "run",
    [
        lambda file, data: htp_export.quantize(file, {".": "int8"}, data=data),
        lambda file, data: htp_export.sensitivity(file, ["fp16"], data=data),
    ],
    ids=["quantize", "sensitivity"],
)
def test_data_with_nan_are_refused_in_any_order(run, order, file):
    data = [example(seed, broken=each) for seed, each in enumerate(order)]
    with pytest.raises(InputError, match=rf"data, run {order.index(True)}: input 'input' has NaN"):
        run(file, data)


def test_a_metric_without_a_number_is_refused(file):
    def metric(outputs: Any) -> float:
        return NAN

    with pytest.raises(InputError, match="the metric returned nan: the outputs contain no NaN"):
        htp_export.sensitivity(file, ["int8"], data=example(), metric=metric)
    pytest.importorskip("optuna")
    with pytest.raises(InputError, match="the metric returned nan"):
        htp_export.search(
            file,
            ["int8", "fp32"],
            objectives=["metric", "size"],
            data=example(),
            metric=metric,
            trials=3,
        )


@pytest.mark.parametrize("by_metric", [False, True])
def test_outputs_without_a_number_have_no_error_and_no_metric(by_metric, broken):
    options: dict[str, Any] = {
        "objectives": ["metric"],
        "metric": lambda runs: float(runs[0]["linear_1"].sum()),
    }
    with pytest.raises(InputError, match=r"data, run 0: output 'linear_1' of the model is NaN"):
        htp_export.search(
            broken, ["fp16"], data=example(), trials=3, **options if by_metric else {}
        )


def test_search_says_which_choices_have_no_number(file):
    pytest.importorskip("optuna")
    expected = InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, example())[
        0
    ]

    def metric(outputs: Any) -> float:
        return 1.0 if np.array_equal(outputs[0]["linear_1"], expected) else NAN

    found = htp_export.search(
        file,
        ["fp16", "fp32"],
        objectives=["metric", "size"],
        data=example(),
        metric=metric,
        trials=3,
    )
    assert [note for note in found.notes if note.startswith("2 in fp16: the metric returned nan")]
    assert all(set(trial.plan.values()) == {"fp32"} for trial in found.trials)


@pytest.mark.parametrize("precision", ["int8", "int8-dynamic", "int8-weights", "int4"])
def test_weights_with_nan_are_not_quantized(precision, broken):
    with pytest.raises(
        InputError, match=rf"'0\.weight' of module '0' has NaN, which {precision} has not"
    ):
        htp_export.quantize(broken, {".": precision}, data=example())
    assert htp_export.quantize(broken, {"0": "fp16"}).modules["0"].precision == "fp16"


@pytest.mark.parametrize("value", [0.5, "2:4", "channels:0.25", "rank:25%"])
def test_weights_with_nan_are_not_pruned(value, broken):
    with pytest.raises(InputError, match=r"weight '0\.weight' of module '0' has NaN"):
        htp_export.prune(broken, {"0": value})


def test_ranges_of_tensors_with_nan_are_not_measured(broken):
    with pytest.raises(InputError, match=r"data, run 0: .* computes NaN in 'relu'"):
        htp_export.quantize(broken, {"2": "int8"}, data=example())


def test_nan_on_both_sides_is_said(file, broken):
    found = htp_export.compare(broken, broken, example())
    assert found.ok
    assert {path: module.status for path, module in found.modules.items()} == dict.fromkeys(
        ["", "0", "1", "2"], "nan"
    )
    assert found.summary.endswith("of these, 4 have NaN at the same places on both sides")
    assert found.notes[0].startswith("first NaN: 0, 2 of 128 elements of 'linear', on both sides")
    assert not htp_export.compare(file, broken, example()).ok
    assert htp_export.compare(file, file, example()).modules["0"].status == "agrees"


def test_outputs_with_some_nan_are_said_beside_their_errors(partly):
    found = htp_export.sensitivity(partly, ["fp16"], data=example())
    assert (
        found.notes[0] == "data, run 0: output 'log' of the model has NaN, which counts as no error"
    )
    assert htp_export.search(partly, ["fp16"], data=example(), trials=3).notes[0] == found.notes[0]


def test_outputs_with_nan_are_said_where_passes_were_verified(file, partly):
    found = htp_export.optimize(partly, verify=True, data=example())
    assert found.nan == ("log",)
    assert found.summary.endswith(
        "outputs differ by 0 at most; of elements that are NaN before and after, in 'log', nothing is known"
    )
    assert htp_export.optimize(file, verify=True).nan == ()


def test_a_metric_without_a_number_for_all_modules_but_one_is_a_row(file):
    calls: list[Any] = []

    # of the original, of two modules alone, and of both without one
    def metric(outputs: Any) -> float:
        calls.append(outputs)
        return 1.0 if len(calls) <= 3 else NAN

    found = htp_export.sensitivity(file, ["fp16"], data=example(), metric=metric)
    assert [row.alone is not None and row.all_but is None for row in found.ranking] == [True, True]
    assert found.modules["0"]["fp16"].problem.startswith(
        "all modules but this one: the metric returned nan"
    )
    assert any(note.startswith("2 in fp16: all modules but this one") for note in found.notes)


class Gate(Holding, proj=nn.Linear(16, 16)):
    """Squares what it projects and multiplies; with a large gain, more than float16 can hold."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.proj(x) * self.gain) ** 2


def gates(largest: float) -> nn.Module:
    """Three blocks, of which the second one overflows; its norm makes NaN of the infinity."""
    blocks = [
        nn.Sequential(nn.Linear(16, 16), Gate(gain), nn.LayerNorm(16)) for gain in (1, largest, 1)
    ]
    return spread(nn.Sequential(*blocks)).eval()


@BOTH
class TestTheFirstModuleThatOverflows:
    @pytest.fixture
    def files(self, exporter, tmp_path):
        given = {"input": x(2, 16)}
        file = exported_to(tmp_path / "fp32.onnx", gates(400.0), given, exporter)
        htp_export.quantize(file, {"**": "fp16"}, tmp_path / "fp16.onnx")
        [name] = [value.name for value in onnx.load(file).graph.input]
        return file, tmp_path / "fp16.onnx", {name: given["input"].numpy()}

    def test_compare_names_it_and_the_first_nan(self, files, exporter):
        fp32, fp16, data = files
        found = htp_export.compare(fp32, fp16, data)
        assert found.first_wrong == "1.1"
        assert [(first.kind, first.module, first.side) for first in found.not_finite] == [
            ("infinite", "1.1", "compared"),
            ("nan", "1.2", "compared"),
        ]
        # the same tensor in ONNX Runtime
        first = found.not_finite[0]
        model = onnx.load(fp16)
        model.graph.output.append(onnx.ValueInfoProto(name=first.tensor))
        session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        [values] = session.run([first.tensor], data)
        assert (np.isinf(values).sum(), values.size) == (first.elements, first.size)
        swapped = htp_export.compare(fp16, fp32, data).not_finite
        assert [(each.module, each.side) for each in swapped] == [
            ("1.1", "reference"),
            ("1.2", "reference"),
        ]

    def test_check_of_quantize_names_it(self, files, exporter):
        fp32, _, data = files
        check = htp_export.quantize(fp32, {"**": "fp16"}, data=data, check=True).check
        assert [first.module for first in check.not_finite] == ["1.1", "1.2"]
        assert "first infinity: 1.1" in "\n".join(check.lines)

    def test_verify_names_it_where_pytorch_overflows_too(self, tmp_path, exporter):
        model, given = gates(1e30), x(2, 16)
        file = exported_to(tmp_path / "net.onnx", model, {"input": given}, exporter)
        with torch.no_grad():
            assert model[1][:2](model[0](given)).isinf().any()
        found = htp_export.verify(model, file, (given,))
        assert found.ok
        assert [(first.kind, first.module, first.side) for first in found.not_finite] == [
            ("infinite", "1.1", "both"),
            ("nan", "1.2", "both"),
        ]
        statuses = {path: module.status for path, module in found.modules.items()}
        assert (statuses["1.0"], statuses["1.1"], statuses["1.2"]) == ("agrees", "infinite", "nan")
        everywhere = found.modules["1.1"]
        assert np.isnan(everywhere.cosine)
        assert np.isnan(everywhere.max_abs)
        assert not np.isnan(found.modules[found.worst].max_abs)
        assert "of these, 8 have NaN" in found.summary
        assert "1 has infinity at the same places on both sides" in found.summary


@BOTH
def test_an_overflow_that_only_other_processors_have_is_named(exporter, tmp_path):
    """ONNX Runtime adds float16 in float32 on a CPU: the sum is finite there, and infinite on a GPU."""
    net = composed(
        lambda parts, x: parts.norm(x + parts.large(x)),
        large=spread(nn.Linear(16, 16)),
        norm=nn.LayerNorm(16),
    ).eval()
    with torch.no_grad():
        net.large.weight.mul_(1e6)
    given = {"x": x(2, 16)}
    file = exported_to(tmp_path / "fp32.onnx", net, given, exporter)
    [name] = [value.name for value in onnx.load(file).graph.input]
    feed = {name: given["x"].numpy()}

    def first(plan):
        quantized = htp_export.quantize(file, plan, tmp_path / "fp16.onnx", data=feed, check=True)
        found = htp_export.compare(file, tmp_path / "fp16.onnx", feed)
        assert found.ok
        assert found.not_finite == quantized.check.not_finite
        return found.not_finite

    [overflow] = first({"**": "fp16", "large,norm": "fp32"})
    assert (overflow.module, overflow.side, overflow.in_float16_only) == ("", "compared", True)
    # the parent, whose sum it is, in float32
    assert first({".": "fp32"}) == ()


def test_a_tensor_of_the_model_itself_that_overflows_is_told_of_the_model(tmp_path):
    model = composed(
        lambda parts, x: parts.fc(x * 1e25 * 1e25).tanh(), fc=spread(nn.Linear(4, 4))
    ).eval()
    file = exported_to(tmp_path / "net.onnx", model, {"x": x(2, 4)}, "dynamo")
    [first, _] = htp_export.compare(file, file, {"x": x(2, 4).numpy()}).not_finite
    assert (first.module, first.kind, first.side) == ("", "infinite", "both")
