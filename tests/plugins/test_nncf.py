"""quantize with NNCF as the engine: only the chosen modules change, and what it makes is run before it is believed."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError, ToolError
from tests.nets import EXPORTERS, Holding, spread
from tests.quantized import (
    IDS,
    Net,
    assert_others_are_the_same,
    assert_predicted,
    assert_tagged,
    outputs,
    written,
)

INT8 = {"precision": "int8", "engine": "nncf"}


@pytest.fixture(scope="module", params=EXPORTERS)
def net(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("net") / "net.onnx"
    torch.manual_seed(0)
    return written(Net(), (torch.from_numpy(IDS),), file, request.param, ["ids"])


@pytest.fixture(scope="module")
def nncf() -> Any:
    return pytest.importorskip("nncf")


def initializers(file: Path, owner: str) -> dict[str, np.ndarray]:
    """The weights that the nodes of a module read, by name."""
    tagged = htp_export.load(file)
    read = {
        value
        for node in tagged.nodes
        if owner in tagged.owners_of(node)
        for value in node.inputs
        if value
    }
    return {
        str(value.name): value.const_value.numpy()
        for value in read
        if value.const_value is not None
    }


def error(before: Path, after: Path) -> float:
    [expected], [found] = outputs(before, {"ids": IDS}), outputs(after, {"ids": IDS})
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    "fields", [{}, {"symmetric": True, "per_channel": False}, {"reduce_range": True}]
)
@pytest.mark.parametrize("chosen", [".", "second", "class:Linear"])
def test_exactly_the_chosen_modules_change(net, fields, chosen, nncf, tmp_path):
    file = tmp_path / "quantized.onnx"
    plan = {chosen: INT8 | fields}
    result = htp_export.quantize(net, plan, file, data={"ids": IDS})
    assert_others_are_the_same(net, file, chosen)
    assert_tagged(net, file, chosen)
    onnx.checker.check_model(str(file))
    assert 0 < error(net, file) < 0.03
    kinds = [node.op_type for node in onnx.load(file).graph.node]
    weights = {".": 4, "second": 1, "class:Linear": 3}[chosen]
    assert kinds.count("DequantizeLinear") == weights + kinds.count("QuantizeLinear")
    assert_predicted(result, net, plan)
    assert result.notes == ()


def test_smooth_quant_scales_what_the_chosen_products_read(net, nncf, tmp_path):
    file = tmp_path / "quantized.onnx"
    htp_export.quantize(net, {"second": INT8 | {"smooth_quant": True}}, file, data={"ids": IDS})
    assert_others_are_the_same(net, file, "second")
    assert_tagged(net, file, "second")
    tagged = htp_export.load(file)
    kinds = [node.op_type for node in tagged.nodes if "second" in tagged.owners_of(node)]
    assert kinds == ["Mul", "QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "MatMul"]
    assert error(net, file) < 0.03


def test_bias_correction_changes_the_biases_of_the_chosen_modules(net, nncf, tmp_path):
    files = {corrected: tmp_path / f"{corrected}.onnx" for corrected in (False, True)}
    for corrected, file in files.items():
        htp_export.quantize(
            net, {"first": INT8 | {"bias_correction": corrected}}, file, data={"ids": IDS}
        )
        assert_others_are_the_same(net, file, "first")
        assert_tagged(net, file, "first")

    vectors = {
        corrected: [
            a
            for a in initializers(file, "first").values()
            if a.shape == (48,) and a.dtype == np.float32
        ]
        for corrected, file in files.items()
    }
    before = [array for array in initializers(net, "first").values() if array.shape == (48,)]
    assert len(before) == 1
    assert any(np.array_equal(before[0], array) for array in vectors[False])
    assert not any(np.array_equal(before[0], array) for array in vectors[True])
    assert any(np.abs(before[0] - array).max() < 0.05 for array in vectors[True])


def test_values_that_fill_masks_are_not_divided_into_steps(nncf, tmp_path):
    class Masked(Holding, query=nn.Linear(16, 16), position=nn.Parameter(torch.zeros(5, 5))):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (self.query(x) @ x.transpose(1, 2) + (self.position + mask)).softmax(-1)

    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 16), torch.zeros(2, 5, 5)
    mask[:, :, 3:] = torch.finfo(torch.float32).min
    before = written(Masked(), (x, mask), tmp_path / "net.onnx", "dynamo", ["x", "mask"])
    feed = {"x": x.numpy(), "mask": mask.numpy()}
    result = htp_export.quantize(before, {".": INT8}, tmp_path / "after.onnx", data=feed)
    [expected], [found] = outputs(before, feed), outputs(tmp_path / "after.onnx", feed)
    assert np.abs(expected - found).max() < 0.05
    assert len(result.notes) == 1
    assert result.notes[0].startswith("2 nodes stay in fp32: NNCF leaves them, or values")


WEIGHTS = [
    {"precision": "int8-weights"},
    {"precision": "int8-weights", "symmetric": True},
    {"precision": "int4", "block_size": 16},
    {"precision": "int4", "block_size": 16, "symmetric": True},
    {"precision": "int4", "block_size": 16, "awq": True, "scale_estimation": True},
]


@pytest.fixture(scope="module", params=[18, 21])
def opsets(
    nncf: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Before opset 21, NNCF writes blocks as MatMulNBits, then as DequantizeLinear."""
    file = tmp_path_factory.mktemp("net") / "net.onnx"
    torch.manual_seed(0)
    net = spread(Net().eval())
    htp_export.export(
        net, (torch.from_numpy(IDS),), file, dynamo=True, opset_version=request.param, verbose=False
    )
    return file


class TestWeights:
    """``nncf.compress_weights``: exactly the chosen modules change, and the files that it writes run."""

    @pytest.mark.parametrize("fields", WEIGHTS)
    @pytest.mark.parametrize("chosen", [".", "second", "class:Linear"])
    def test_exactly_the_chosen_modules_change(self, opsets, fields, chosen, nncf, tmp_path):
        file, plan = tmp_path / "quantized.onnx", {chosen: {**fields, "engine": "nncf"}}
        data = [{"ids": (IDS * 3 + k) % 50} for k in range(8)]
        result = htp_export.quantize(opsets, plan, file, data=data)
        assert_others_are_the_same(opsets, file, chosen)
        assert_tagged(opsets, file, chosen)
        onnx.checker.check_model(str(file))
        assert result.notes == ()
        assert_predicted(result, opsets, plan)
        count = {".": 4, "second": 1, "class:Linear": 3}[chosen]
        if fields["precision"] == "int4":
            # neither a table, nor the head: 16 does not divide its 40 columns
            count = min(count, 2)
        assert sum(result.operators[fields["precision"]].values()) == count
        kinds = [node.op_type for node in onnx.load(file).graph.node]
        assert kinds.count("DequantizeLinear") + kinds.count("MatMulNBits") == count
        assert 0 < error(opsets, file) < (0.15 if fields["precision"] == "int4" else 0.02)

    def test_no_data_are_needed_without_awq(self, opsets, nncf):
        rule = {"precision": "int8-weights", "engine": "nncf"}
        assert htp_export.quantize(opsets, {"second": rule}).notes == ()

    def test_a_weight_whose_last_block_is_not_full_is_not_taken(self, opsets, nncf):
        with pytest.raises(InputError, match="no operator of module 'second' takes int4"):
            htp_export.quantize(
                opsets, {"second": {"precision": "int4", "block_size": 32, "engine": "nncf"}}
            )

    def test_what_does_not_run_is_refused(self, opsets, nncf, monkeypatch):
        compress = nncf.compress_weights

        def made(*given: Any, **options: Any) -> onnx.ModelProto:
            model = compress(*given, **options)
            scale = next(
                tensor for tensor in model.graph.initializer if tensor.name.endswith("_scale")
            )
            scale.CopyFrom(onnx.numpy_helper.from_array(np.ones((7,), np.float32), scale.name))
            return model

        monkeypatch.setattr(nncf, "compress_weights", made)
        with pytest.raises(ToolError, match="nncf made an invalid model"):
            htp_export.quantize(opsets, {"second": {"precision": "int8-weights", "engine": "nncf"}})


def test_convolutions_have_a_scale_for_each_channel(nncf, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3))
    before = written(net, (torch.randn(1, 3, 9, 9),), tmp_path / "net.onnx", "dynamo", ["input"])
    plan = {".": {"precision": "int8-weights", "engine": "nncf", "symmetric": True}}
    result = htp_export.quantize(before, plan, tmp_path / "after.onnx")
    assert result.operators["int8-weights"] == {"Conv": 1, "ConvTranspose": 1}
    assert result.modules["0"].bytes_after == 8 * 3 * 9 + 4 * 8 + 4 * 8
    assert result.modules["2"].bytes_after == 8 * 4 * 9 + 4 * 4 + 4 * 4
    x = {"input": torch.randn(1, 3, 9, 9).numpy()}
    [expected], [found] = outputs(before, x), outputs(tmp_path / "after.onnx", x)
    assert 0 < np.abs(expected - found).max() < 0.02 * np.abs(expected).max()
    assert (
        result.modules[""].bytes_after
        == htp_export.quantize(before, plan, dry_run=True).modules[""].bytes_after
    )


@pytest.fixture(scope="module")
def trained(nncf: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A net of which one layer, with one weight that makes its steps large, cannot be quantized to 8 bits."""
    torch.manual_seed(0)
    net = spread(
        nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
        ).eval()
    )
    x = torch.randn(64, 16)
    with torch.no_grad():
        net[2].weight[0, 0], net[2].bias[0], net[4].weight[:, 0] = 0, 0, 0
        # a range of activations of 40,000
        net[0].weight[0], net[0].bias[0], net[2].weight[1:, 0] = 0, 4e4, 0
    file = tmp_path_factory.mktemp("control") / "net.onnx"
    htp_export.export(net, (x,), file, verbose=False)
    return file, x.numpy()


class TestAccuracyControl:
    """Operators go back to fp32 until a metric of the whole model falls by no more than it may."""

    def metric(self, file: Path, x: np.ndarray) -> Any:
        labels = outputs(file, {"input": x})[0].argmax(-1)

        def accuracy(found: Any) -> float:
            [output] = found[0].values()
            return float((output.argmax(-1) == labels).mean())

        return accuracy

    def test_the_layers_that_cost_accuracy_go_back(self, trained, nncf, tmp_path):
        file, x = trained
        metric, feed = self.metric(file, x), {"input": x}
        plain = htp_export.quantize(file, {".": INT8}, tmp_path / "plain.onnx", data=feed)
        assert plain.metric_after is None
        assert metric([{"y": outputs(tmp_path / "plain.onnx", feed)[0]}]) < 0.9
        after = tmp_path / "after.onnx"
        result = htp_export.quantize(
            file, {".": INT8 | {"max_drop": 0.05}}, after, data=feed, metric=metric
        )
        assert result.metric_before == 1.0
        assert result.metric_after == metric([{"y": outputs(after, feed)[0]}]) >= 0.95
        kinds = [node.op_type for node in onnx.load(after).graph.node]
        assert 0 < kinds.count("DequantizeLinear") < 6
        assert len(result.notes) == 1
        assert result.notes[0].endswith("or the metric would fall by more than max_drop")
        assert_tagged(file, after, ".")
        assert result.to_dict()["metric_after"] == result.metric_after

    def test_the_command(self, trained, nncf, tmp_path, capsys, monkeypatch):
        file, x = trained
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        np.savez("x.npz", input=x)
        np.save("labels.npy", outputs(file, {"input": x})[0].argmax(-1))
        (tmp_path / "accuracy_of_x.py").write_text(
            "import numpy as np\n"
            "def accuracy():\n"
            "    labels = np.load('labels.npy')\n"
            "    return lambda outputs: (next(iter(outputs[0].values())).argmax(-1) == labels).mean()\n"
        )
        (tmp_path / "plan.yaml").write_text(
            '".": {precision: int8, engine: nncf, max_drop: 0.05}\n'
        )
        command = [
            "quantize",
            str(file),
            "plan.yaml",
            "-o",
            "after.onnx",
            "--data",
            "x.npz",
            "--json",
        ]
        assert main(command) == 2
        assert "give the metric that may fall by it" in capsys.readouterr().err
        assert main([*command, "--metric", "accuracy_of_x:accuracy", "--validation", "x.npz"]) == 0
        assert json.loads(capsys.readouterr().out)["metric_after"] >= 0.95
        assert main([*command[:3], "--dry-run"]) == 0

    def test_other_rules_that_cost_more_are_an_error_and_no_file_is_written(
        self, trained, nncf, tmp_path
    ):
        file, x = trained
        values = iter([1.0, 1.0, 1.0, *[0.5] * 100])
        plan = {"4": INT8 | {"max_drop": 0.05}, "0": "int8"}
        with pytest.raises(InputError, match=r"the metric falls from 1 to 0\.5"):
            htp_export.quantize(
                file,
                plan,
                tmp_path / "no.onnx",
                data={"input": x},
                metric=lambda found: next(values),
            )
        assert not (tmp_path / "no.onnx").exists()

    @pytest.mark.parametrize(
        ("plan", "options", "problem"),
        [
            ({".": INT8 | {"max_drop": 0.1}}, {}, "give the metric that may fall by it"),
            ({".": INT8}, {"metric": max}, "are for rules with max_drop"),
            ({".": INT8}, {"validation": {}}, "are for rules with max_drop"),
            (
                {".": INT8 | {"max_drop": 0.1}},
                {"metric": lambda found: "high"},
                "which is no number",
            ),
        ],
    )
    def test_bad_arguments(self, trained, nncf, plan, options, problem):
        file, x = trained
        with pytest.raises(InputError) as caught:
            htp_export.quantize(file, plan, data={"input": x}, **options)
        assert problem in str(caught.value)


def test_without_the_extra_the_command_that_installs_it_is_said(net, monkeypatch):
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(InputError, match=r'pip install "htp-export\[nncf\]"'):
        htp_export.quantize(net, {"second": INT8}, data={"ids": IDS})


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (
            {"precision": "fp16", "engine": "nncf"},
            "with the engine 'nncf', method is 'cast', and can be static",
        ),
        (
            {"precision": "uint8", "engine": "nncf"},
            "with the engine 'nncf', activation is 'uint8', and can be int8",
        ),
        (
            {"precision": "int4", "engine": "nncf", "algorithm": "hqq"},
            "algorithm is 'hqq', and can be default",
        ),
        (
            {"precision": "int4", "engine": "nncf", "max_drop": 0.1},
            "has no field 'max_drop'; the method 'weights'",
        ),
        (INT8 | {"awq": True}, "has no field 'awq'; the method 'static' of nncf has"),
        (
            {"precision": "int8-weights", "engine": "nncf", "scale_estimation": True},
            "scale_estimation is for int4 only",
        ),
        (
            {"precision": "int4", "awq": True},
            "has no field 'awq'; the method 'weights' of onnxruntime has",
        ),
        (INT8 | {"max_drop": -1}, "max_drop is -1, not a number from 0 up"),
        (INT8 | {"max_drop": float("nan")}, "max_drop is nan, not a number from 0 up"),
        (
            INT8 | {"calibration": "entropy"},
            "with the engine 'nncf', calibration is 'entropy', and can be minmax",
        ),
        (INT8 | {"bias_correction": "slow"}, "bias_correction is 'slow', and can be False, True"),
        (
            {"precision": "int8", "smooth_quant": True},
            "has no field 'smooth_quant'; the method 'static' of onnx",
        ),
        ({"precision": "int8", "engine": "tvm"}, "engine is 'tvm', and can be onnxruntime, nncf"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(rule, problem):
    with pytest.raises(InputError) as caught:
        htp_export.quantize("no.onnx", {"second": rule})
    assert problem in str(caught.value)


def test_a_fault_of_our_own_that_nncf_calls_back_is_not_one_of_nncf():
    from htp_export.capabilities.quantize.precisions import precisions_of
    from htp_export.process.argument_types import check_whole
    from htp_export_plugins.nncf import _calling_nncf

    called: dict[str, Any] = {}
    exec(
        compile("def quantize(work):\n    return work()", "/packages/nncf/quantization.py", "exec"),
        called,
    )
    precision = precisions_of({"0": "int8"})["0"]
    with (
        pytest.raises(ToolError, match="nncf failed on the modules of 'int8': Zero"),
        _calling_nncf(precision),
    ):
        called["quantize"](lambda: 1 / 0)
    with pytest.raises(TypeError, match="not supported between"), _calling_nncf(precision):
        called["quantize"](lambda: check_whole("seed", 1, None, 2))  # type: ignore[arg-type]
