"""Arrays own their memory: nothing that ONNX Runtime returns changes when its owner is freed and the memory reused."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from htp_export.capabilities.lora.adapters import LowRank, read_adapter, write_adapter
from htp_export.runtime.arrays import from_ort
from htp_export.runtime.sessions import RunnableModel, Session, from_value

ROWS, WIDTH = 64, 256  # large enough that freed memory is reused for the arrays below


def session(text: str) -> Session:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    return Session(RunnableModel(ir.to_proto(model).SerializeToString(), "the model"))


def numbers(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH), dtype=np.float32)


def kept_after_overwriting(make: Callable[[], Any]) -> Any:
    """What a function returns, after memory that is free now was taken and filled with other numbers."""
    made = make()
    gc.collect()
    taken = [np.full((ROWS, WIDTH), np.nan, np.float32) for _ in range(200)]
    assert len(taken) == 200
    return made


def owner_of(array: np.ndarray[Any, Any]) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base


@pytest.mark.parametrize("output", ["x", "y", "w", "wide", "parts"])
def test_a_result_owns_its_memory_also_if_it_is_an_input_or_a_weight(output):
    text = "g (float[n, m] x) => (float[n, m] x, float[n, m] y, float[2] w,"
    text += " bfloat16[n, m] wide, seq(float[n, m]) parts)"
    text += " <float[2] w = {1, 2}> { y = Neg(x) wide = Cast<to = 16>(x) parts = SequenceConstruct(x, y) }"

    def run() -> Any:
        return session(text).run({"x": numbers()}, [output])[output]

    found = kept_after_overwriting(run)
    wanted = {"x": numbers(), "y": -numbers(), "w": np.float32([1, 2])}
    if output == "parts":
        assert [part.tolist() for part in found] == [numbers().tolist(), (-numbers()).tolist()]
    elif output == "wide":
        np.testing.assert_allclose(found.astype(np.float32), numbers(), rtol=1e-2)
        assert isinstance(owner_of(found), bytes)
    else:
        assert np.array_equal(found, wanted[output])
        assert owner_of(found) is None


def test_a_value_that_is_an_input_keeps_the_array_alive_from_run_to_run():
    passing = session("g (float[n, m] x) => (float[n, m] x, float[n, m] y) { y = Neg(x) }")

    def run() -> Any:
        # the transposed array is copied: nobody else has the copy
        value = passing.values({"x": numbers().T})["x"]
        return passing.run_values({"x": value})[0]

    value = kept_after_overwriting(run)
    assert np.array_equal(from_value(value), numbers().T)


def test_bound_inputs_stay_as_they_were_given():
    table = session(
        "g (float[n] table, int64[n, m] rows) => (float[n, m] y) { y = Gather(table, rows) }"
    )
    rows = np.arange(ROWS * WIDTH // 2).reshape(WIDTH // 2, ROWS)
    feed = {"table": np.zeros(rows.size, np.float32), "rows": rows.T}
    run = kept_after_overwriting(lambda: table.bound(feed))
    # other numbers in the memory of `rows` are no rows of the table, which ONNX Runtime refuses
    run()


def layers(*, turned: bool) -> dict[str, LowRank]:
    factors = {path: (numbers(2 * k), numbers(2 * k + 1).T) for k, path in enumerate("abcdef")}
    if turned:  # ONNX Runtime takes contiguous arrays: of these, copies
        factors = {
            path: (np.asfortranarray(a), np.asfortranarray(b)) for path, (a, b) in factors.items()
        }
    return {path: LowRank(a, b) for path, (a, b) in factors.items()}


@pytest.mark.parametrize("turned", [False, True])
def test_the_factors_of_an_adapter_file_are_those_that_were_written(turned, tmp_path):
    write_adapter(layers(turned=turned), tmp_path / "a.onnx_adapter")
    read = kept_after_overwriting(lambda: read_adapter(tmp_path / "a.onnx_adapter"))
    for path, layer in layers(turned=False).items():
        assert np.array_equal(read.layers[path].a, layer.a)
        assert np.array_equal(read.layers[path].b, layer.b)
        assert owner_of(read.layers[path].a) is owner_of(read.layers[path].b) is None


def test_an_array_of_a_value_is_a_copy():
    array = numbers()
    copy = from_ort(onnxruntime.OrtValue.ortvalue_from_numpy(array))
    array.fill(0)
    assert np.array_equal(copy, numbers())
