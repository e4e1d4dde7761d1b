"""Ranges over several runs are those of ONNX Runtime on all of them at once, in any order."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxruntime import quantization
from onnxruntime.quantization.calibrate import create_calibrator

import htp_export
from htp_export.capabilities.quantize.calibrating import CALIBRATIONS, Calibration
from htp_export.errors import InputError
from tests.quantized import distance, results, tagged_graph

_WAYS = tuple(CALIBRATIONS)


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def net() -> ir.Model:
    text = "g (float[N,16] x) => (float[N,8] y) { a = MatMul(x,w) r = Relu(a) y = MatMul(r,v) }"
    return tagged_graph(text, w=drawn(0, 16, 16), v=drawn(1, 16, 8))


# The first run has the smallest values: what comes later lies outside of its histogram.
RUNS = [{"x": drawn(seed, 64, 16) * np.float32(0.5 + seed)} for seed in range(6)]


class Reader(quantization.CalibrationDataReader):
    """Runs as ONNX Runtime's own functions read them."""

    def __init__(self, runs: list[dict[str, np.ndarray]]) -> None:
        self.left = iter(runs)

    def get_next(self) -> Any:
        return next(self.left, None)


def ranges_alone(file: Path, method: str, *, symmetric: bool) -> dict[str, tuple[float, float]]:
    """The ranges that ONNX Runtime's calibrator finds if it gets all runs in one call."""
    options = {"symmetric": True} if symmetric else {}
    calibrator = create_calibrator(
        file,
        augmented_model_path=str(file.with_suffix(".augmented.onnx")),
        calibrate_method=quantization.CalibrationMethod[CALIBRATIONS[method]],
        extra_options=options,
    )
    calibrator.collect_data(Reader(RUNS))
    found = calibrator.compute_data().items()
    return {name: (each.range_value[0].item(), each.range_value[1].item()) for name, each in found}


def scales(result: htp_export.results.Quantized) -> list[float]:
    return [
        float(n.inputs[1].const_value.numpy())
        for n in result.model.graph
        if n.op_type == "QuantizeLinear"
    ]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("method", _WAYS)
def test_ranges_are_those_of_onnx_runtime_on_all_runs_at_once(method, symmetric, tmp_path):
    file = tmp_path / "net.onnx"
    onnx.save(ir.to_proto(net()), file)
    alone = ranges_alone(file, method, symmetric=symmetric)
    calibration = Calibration(
        file, ["MatMul", "Relu"], method, symmetric, False, dict.fromkeys(alone, "")
    )
    for order in (RUNS, RUNS[::-1]):
        found = calibration.ranges(lambda order=order: nullcontext(iter(order))).bounds
        assert {name: (low.item(), high.item()) for name, (low, high) in found.items()} == alone


@pytest.mark.long
@pytest.mark.parametrize("method", _WAYS)
@pytest.mark.parametrize("precision", ["int8", "u8s8", "uint8", "int16"])
def test_results_are_as_near_as_those_of_onnx_runtime_in_any_order(precision, method, tmp_path):
    onnx.save(ir.to_proto(net()), tmp_path / "net.onnx")
    kind = quantization.QuantType
    types = {"int8": kind.QInt8, "u8s8": kind.QUInt8, "uint8": kind.QUInt8, "int16": kind.QInt16}
    quantization.quantize_static(
        tmp_path / "net.onnx",
        tmp_path / "alone.onnx",
        Reader(RUNS),
        per_channel=precision != "uint8",
        activation_type=types[precision],
        weight_type=kind.QUInt8 if precision == "uint8" else kind.QInt8,
        calibrate_method=quantization.CalibrationMethod[CALIBRATIONS[method]],
    )
    plan = {".": {"precision": precision, "calibration": method}}
    ours = [
        htp_export.quantize(net(), plan, data=order)
        for order in (RUNS, RUNS[::-1], iter(RUNS[3:] + RUNS[:3]))
    ]
    assert scales(ours[0]) == scales(ours[1]) == scales(ours[2])
    whole = {"x": np.concatenate([run["x"] for run in RUNS])}
    [expected] = results(net(), whole)
    error, alone = (
        distance(results(each, whole)[0], expected)
        for each in (ours[0].model, tmp_path / "alone.onnx")
    )
    assert error < 1.5 * alone < 0.05


def test_search_and_sensitivity_measure_the_same_in_any_order():
    minmax, entropy = (
        {"precision": "u8s8", "calibration": way, "name": way} for way in ("minmax", "entropy")
    )
    errors = []
    for order in (RUNS, RUNS[::-1]):
        rows = htp_export.sensitivity(
            net(), [minmax, entropy], data=order, select="a", all_but=False
        ).modules["a"]
        found = htp_export.search(net(), {"a": ["fp32", entropy]}, data=order, trials=2, seed=0)
        [trial] = [each for each in found.trials if each.plan.get("a") != "fp32"][:1]
        errors += [rows["entropy"].alone.error, trial.values["error"]]
        assert rows["entropy"].alone.error < 2 * rows["minmax"].alone.error
    assert np.allclose(errors, errors[0], rtol=1e-3)


@pytest.mark.parametrize("method", _WAYS)
@pytest.mark.parametrize("place", [0, 2])
def test_nan_in_any_run_is_refused_with_the_run_and_the_first_tensor(method, place):
    model = tagged_graph(
        "g (float[N,2] x) => (float[N,2] y) { a = MatMul(x,w) y = Relu(a) }", w=[[1.0, 2], [-1, 0]]
    )
    runs = [{"x": drawn(seed, 3, 2)} for seed in range(3)]
    runs[place]["x"][0] = np.inf  # minus itself
    plan = {".": {"precision": "u8s8", "calibration": method}}
    with pytest.raises(
        InputError,
        match=f"data, run {place}: the model computes NaN in 'a'; its range is not known",
    ):
        htp_export.quantize(model, plan, data=runs)


@pytest.mark.parametrize("method", _WAYS)
def test_tensors_without_elements_in_some_runs_have_the_ranges_of_the_others(method):
    """As an empty cache has none in the first step of a decoder."""
    text = "g (float[N,4] x, float[P,4] p) => (float[Q,4] y) { k = MatMul(x,w) y = Concat<axis=0>(p,k) }"
    model = tagged_graph(text, w=drawn(0, 4, 4))
    full, empty = (
        {"x": drawn(1, 3, 4), "p": drawn(2, 5, 4)},
        {"x": drawn(3, 3, 4), "p": np.zeros((0, 4), np.float32)},
    )
    plan = {".": {"precision": "u8s8", "calibration": method}}
    both = [htp_export.quantize(model, plan, data=runs) for runs in ([full, empty], [empty, full])]
    assert scales(both[0]) == scales(both[1])
    assert not both[0].kept
    alone = htp_export.quantize(model, plan, data=[empty])
    assert [each.node for each in alone.kept] == ["y"]
    assert alone.notes == (
        "1 node stays in fp32: the data have no values of p, whose range is not known",
    )
    assert alone.modules["y"].precision == "fp32"


def test_a_range_too_narrow_for_a_histogram_is_that_of_the_values():
    text = "g (float[N,4] x) => (float[N,4] y) { c = Add(x,k) y = MatMul(c,w) }"
    model = tagged_graph(text, k=np.float32(1e9), w=drawn(0, 4, 4))  # adjacent floats are 64 apart
    feed = {"x": drawn(1, 3, 4)}
    for method, symmetric in itertools.product(_WAYS, (False, True)):
        plan = {".": {"precision": "int16", "calibration": method, "symmetric": symmetric}}
        result = htp_export.quantize(model, plan, data=feed)
        assert distance(results(result.model, feed)[0], results(model, feed)[0]) < 0.01
