"""What one layer cannot have, it keeps, with a reason; the rest is done, and ``strict`` refuses."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.quantize.ort_quantizers import PartError, quantizers, without_faulty
from htp_export.command.main import main
from htp_export.errors import InputError, ToolError
from tests.exporting import every, quick
from tests.quantized import assert_predicted, distance, outputs, results, tagged_graph, written


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def quantized(
    model: Any, precision: Any, feed: dict[str, Any], limit: float = 0.05
) -> htp_export.results.Quantized:
    """The result, whose model is as near to the original as rounding allows, also with ONNX Runtime's optimizations."""
    result = htp_export.quantize(model, precision, data=feed)
    [expected] = results(model, feed)
    for optimized in (False, True):
        assert distance(results(result.model, feed, optimized=optimized)[0], expected) < limit
    return result


def refused(model: Any, precision: Any, feed: dict[str, Any], problem: str) -> None:
    """The same plan with ``strict``."""
    with pytest.raises(InputError, match=problem):
        htp_export.quantize(model, precision, data=feed, strict=True)


def two_layers(call: str, **constants: Any) -> ir.Model:
    """A product before and after a layer."""
    text = f"g (float[2,4,6,6] x) => (float[a,b,c,d] y) {{ a = Conv(x,first) r = {call} y = Conv(r,last) }}"
    return tagged_graph(text, 19, first=drawn(4, 4, 3, 3), last=drawn(2, 4, 1, 1), **constants)


FEED = {"x": drawn(2, 4, 6, 6)}


class TestBiases:
    """ONNX Runtime has a scale for each channel of a weight, and for its bias the same ones."""

    @pytest.mark.parametrize("precision", ["int8", "u8s8", "uint8", "int16"])
    def test_one_of_a_row_is_a_vector(self, precision):
        text = "g (float[5,8] x) => (float[5,6] y) { a = Gemm(x,w,b) y = Relu(a) }"
        for shape in ((1, 6), (1,), (1, 1)):
            model = tagged_graph(text, w=drawn(8, 6), b=drawn(*shape) * 3)
            result = quantized(model, precision, {"x": drawn(5, 8)}, 0.1)
            assert not result.kept
            biases = [
                value.const_value.shape.numpy()
                for value in result.model.graph.initializers.values()
                if value.const_value.dtype == ir.DataType.INT32 and len(value.const_value.shape)
            ]
            assert (6,) in biases or precision == "uint8"
            assert htp_export.quantize(model, precision, dry_run=True).modules[""].bytes_after == (
                result.modules[""].bytes_after
            )

    def test_one_that_no_vector_can_be_stays_in_fp32(self):
        text = "g (float[5,8] x) => (float[5,6] y) { a = Gemm(x,w,b) r = Relu(a) y = Gemm(r,v,c) }"
        constants = {"w": drawn(8, 6), "b": drawn(5, 6) * 3, "v": drawn(6, 6), "c": drawn(6)}
        model, feed = tagged_graph(text, **constants), {"x": drawn(5, 8)}
        result = quantized(model, "int8", feed)
        [kept] = result.kept
        assert (kept.node, kept.operator, kept.modules, kept.precision, kept.whole) == (
            "a",
            "Gemm",
            ("a",),
            "int8",
            False,
        )
        assert kept.reason in result.notes
        assert kept.reason.startswith(
            "the bias of Gemm 'a' of 'a' stays in fp32: its shape is [5, 6]"
        )
        assert result.modules["a"].precision == "int8"
        bias = result.model.graph.initializers["b"].const_value
        assert np.array_equal(bias.numpy(), constants["b"])
        refused(model, "int8", feed, "int8, strict: the bias of Gemm 'a' of 'a' stays in fp32")

    @pytest.mark.parametrize("groups", [2, 4])
    def test_that_of_a_transposed_convolution_in_groups_stays_in_fp32(self, groups, tmp_path):
        torch.manual_seed(0)
        layers = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 8, 4, stride=2, groups=groups),
        )
        file = written(
            nn.Sequential(*layers),
            (torch.randn(1, 3, 8, 8),),
            tmp_path / "net.onnx",
            "dynamo",
            ["x"],
        )
        name = htp_export.load(file).model.graph.inputs[0].name
        feed = {str(name): drawn(1, 3, 8, 8)}
        result = quantized(file, "u8s8", feed)
        assert [(kept.modules, kept.whole) for kept in result.kept] == [(("2",), False)]
        assert {path: row.precision for path, row in result.modules.items()} == dict.fromkeys(
            ("", *"012"), "u8s8"
        )
        assert_predicted(result, file, "u8s8", data=None)

    @pytest.mark.parametrize("read", ["Conv(x,w,b)", "ConvTranspose(x,w,b)"])
    def test_one_that_32_bits_do_not_hold_keeps_its_node(self, read):
        """ONNX Runtime warns of it, and clips."""
        text = (
            f"g (float[2,4,6,6] x) => (float[a,b,c,d] y) {{ a = {read} r = Relu(a) y = Conv(r,v) }}"
        )
        model = tagged_graph(
            text, w=drawn(4, 4, 3, 3) * np.float32(1e-9), b=drawn(4) * 100, v=drawn(4, 4, 1, 1)
        )
        result = quantized(model, "uint8", FEED)
        assert [kept.node for kept in result.kept] == ["a", "r"]  # a Relu stays with its producer
        operator = read.partition("(")[0]
        assert result.notes == (
            f"2 nodes stay in fp32: ONNX Runtime would clip the bias of {operator} 'a' of 'a' to int32",
        )
        assert {path: result.modules[path].precision for path in ("a", "y")} == {
            "a": "fp32",
            "y": "uint8",
        }
        assert result.operators == {"uint8": {"Conv": 1}}
        refused(model, "uint8", FEED, "would clip the bias")

    def test_the_search_for_nodes_to_leave_ends_if_the_quantizer_does_not_leave_them(
        self, monkeypatch
    ):
        class QuantizesAll(quantizers("qdq_quantizer").QDQQuantizer):
            def __init__(self, *arguments: Any) -> None:
                nodes_to_exclude = arguments[7]
                nodes_to_exclude.clear()
                super().__init__(*arguments)

        monkeypatch.setattr(quantizers("qdq_quantizer"), "QDQQuantizer", QuantizesAll)
        text = "g (float[2,4,6,6] x) => (float[a,b,c,d] y) { a = Conv(x,w,b) y = Conv(a,v) }"
        model = tagged_graph(
            text, w=drawn(4, 4, 3, 3) * np.float32(1e-9), b=drawn(4) * 100, v=drawn(4, 4, 1, 1)
        )
        [kept] = quantized(model, "uint8", FEED).kept
        assert kept.reason.startswith(
            "ONNX Runtime fails on Conv 'a' of 'a': ONNX Runtime would clip"
        )

    def test_one_that_is_read_elsewhere_too_keeps_its_bits(self):
        """As an operand it has 8 bits, as a bias 32."""
        text = "g (float[4,4] x) => (float[4,4] y) { a = Gemm(x,w,b) y = Add(a,b) }"
        model = tagged_graph(text, w=drawn(4, 4), b=drawn(4) * 100)
        result = quantized(model, "uint8", {"x": drawn(4, 4)})
        kinds = {value.const_value.dtype.name for value in result.model.graph.initializers.values()}
        assert "INT32" in kinds
        assert result.modules == htp_export.quantize(model, "uint8", dry_run=True).modules


SHARED = {
    "a table and the head": (
        "g (int64[6] i) => (float[6,16] y) { e = Gather(t,i) r = Relu(e) y = Gemm<transB=1>(r,t) }",
        {"t": drawn(16, 8) * np.linspace(0.1, 5, 16, dtype=np.float32)[:, None]},
    ),
    "a table and a product as it is": (
        "g (int64[6] i) => (float[6,8] y) { e = Gather(t,i) m = MatMul(e,t) k = Gather(t,j) y = Add(m,k) }",
        {
            "t": drawn(8, 8) * np.linspace(0.1, 5, 8, dtype=np.float32)[:, None],
            "j": np.array([7, 6, 5, 4, 3, 2]),
        },
    ),
    "products of both directions": (
        "g (float[4,4] x) => (float[4,4] y) { a = Gemm<transB=1>(x,w,b) y = Gemm(a,w,b) }",
        {"w": drawn(4, 4) * np.linspace(0.1, 5, 4, dtype=np.float32), "b": drawn(4)},
    ),
    "products with two factors": (
        "g (float[4,4] x) => (float[4,4] y) { a = Gemm<alpha=2.0>(x,w,b) y = Gemm<alpha=0.5,beta=3.0>(a,w,b) }",
        {"w": drawn(4, 4), "b": drawn(4)},
    ),
    "a convolution and its transpose": (
        "g (float[1,4,7,7] x) => (float[a,b,c,d] y) { a = Conv(x,w) y = ConvTranspose(a,w) }",
        {"w": drawn(4, 4, 3, 3) * np.linspace(0.1, 5, 4, dtype=np.float32).reshape(4, 1, 1, 1)},
    ),
    "a weight and an operand": (
        "g (float[4,4] x) => (float[4,4] y) { a = MatMul(x,w) y = Add(a,w) }",
        {"w": drawn(4, 4) * np.linspace(0.1, 5, 4, dtype=np.float32)},
    ),
}


_BOTH = itertools.product(
    SHARED, ("int8", "u8s8", "uint8", "int16", "int8-dynamic", "int8-weights", "int4")
)


@pytest.mark.parametrize(
    ("case", "precision"),
    # which have no such weights
    every(3, [each for each in _BOTH if each != ("a convolution and its transpose", "int4")]),
)
def test_a_constant_that_nodes_read_in_several_ways_is_right_in_each(case, precision):
    """Tools have one scale, or one layout, for each constant."""
    text, constants = SHARED[case]
    model = tagged_graph(text, 21, **constants)
    given = model.graph.inputs[0]
    feed = {
        str(given.name): drawn(*given.shape.numpy())
        if given.name == "x"
        else np.array([0, 3, 1, 1, 5, 2])
    }
    result = quantized(model, precision, feed, 0.2 if precision == "int4" else 0.05)
    assert not result.kept
    predicted = htp_export.quantize(model, precision, dry_run=True).modules
    assert {path: row.bytes_after for path, row in result.modules.items()} == {
        path: row.bytes_after for path, row in predicted.items()
    }


@pytest.mark.parametrize("precision", ["int8", "u8s8", "uint8"])
def test_a_node_whose_results_would_be_clipped_stays_alone(precision):
    """Cubic interpolation leaves the range of its input, whose scale ONNX Runtime gives to the result."""
    model = two_layers('Resize<mode="cubic">(a,,s)', s=np.float32([1, 1, 2, 1.5]))
    result = quantized(model, precision, FEED)
    [kept] = result.kept
    assert (kept.node, kept.whole) == ("r", True)
    assert kept.reason.startswith("results of Resize 'r' of 'r' leave the range of its input")
    assert result.operators == {precision: {"Conv": 2}}
    assert result.left[precision] == {"Resize": 1}
    assert result.to_dict()["kept"] == [
        {"node": "r", "operator": "Resize", "modules": ["r"], "precision": precision, "whole": True,
         "reason": kept.reason}
    ]  # fmt: skip
    refused(
        model,
        precision,
        FEED,
        f"{precision}, strict: Resize 'r' of 'r' stays as it is: results of Resize",
    )


@pytest.mark.parametrize("precision", ["int8", "u8s8", "uint8"])
def test_a_node_with_which_a_file_would_not_load_stays(precision):
    """ONNX Runtime's own AveragePool of integers has no dilations."""
    model = two_layers("AveragePool<kernel_shape=[3,3],pads=[1,1,1,1],dilations=[1,2]>(a)")
    result = quantized(model, precision, FEED)
    assert "r" in {kept.node for kept in result.kept}
    assert all("Unrecognized attribute: dilations" in kept.reason for kept in result.kept)
    assert result.modules["a"].precision == precision
    refused(model, precision, FEED, "stays as it is: ONNX Runtime fails on AveragePool 'r' of 'r'")


def test_a_constant_without_elements_is_no_hindrance():
    text = "g (float[1,3,4] x) => (float[1,3,4] y) { k = MatMul(x,w) c = Concat<axis=1>(past,k) y = Relu(c) }"
    model = tagged_graph(text, w=drawn(4, 4), past=np.zeros((1, 0, 4), np.float32))
    for precision in ("int8", "u8s8", "uint8", "int16"):
        assert not quantized(model, precision, {"x": drawn(1, 3, 4)}).kept


_QUANTIZED_BY = {
    "static": ("operators.matmul", "QDQMatMul", "quantize"),
    "dynamic": ("operators.matmul", "MatMulInteger", "quantize"),
    "weights": ("matmul_nbits_quantizer", "DefaultWeightOnlyQuantizer", "quantize_matmul"),
}
"""Method → the function of ONNX Runtime's quantizer for products: its module, its class and its name."""


class TestFailures:
    """A tool that fails on one layer."""

    def fail_on(self, shape: list[int], monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        """Let ONNX Runtime's quantizer fail on products with matrices of a shape."""
        module, owner, function = _QUANTIZED_BY[method]
        kind = getattr(quantizers(module), owner)
        before = getattr(kind, function)

        def fails(own: Any, *arguments: Any) -> Any:
            node, graph = (
                (arguments[0], arguments[1][0])
                if arguments
                else (own.node, own.quantizer.model.model.graph)
            )
            matrix = next(tensor for tensor in graph.initializer if tensor.name == node.input[1])
            if list(matrix.dims) == shape:
                raise ValueError(f"no such shape in {node.name}")
            return before(own, *arguments)

        monkeypatch.setattr(kind, function, fails)

    @pytest.mark.parametrize(
        ("precision", "method"),
        [
            ("u8s8", "static"),
            ("int8-dynamic", "dynamic"),
            ("int4", "weights"),
            ("int8-weights", "weights"),
        ],
    )
    def test_is_told_and_the_others_are_quantized(self, precision, method, monkeypatch):
        text = (
            "g (float[3,8] x) => (float[3,4] y) { a = MatMul(x,w) b = MatMul(a,v) y = MatMul(b,u) }"
        )
        model = tagged_graph(text, w=drawn(8, 8), v=drawn(8, 24), u=drawn(24, 4))
        self.fail_on([8, 24], monkeypatch, method)
        result = quantized(model, precision, {"x": drawn(3, 8)}, 0.3)
        [kept] = result.kept
        assert (kept.node, kept.whole) == ("b", True)
        assert (
            kept.reason == "ONNX Runtime fails on MatMul 'b' of 'b': ValueError: no such shape in b"
        )
        assert result.operators == {precision: {"MatMul": 2}}
        assert result.modules["b"].precision == "fp32"
        assert any(node.op_type == "MatMul" and node.name == "b" for node in result.model.graph)
        refused(
            model,
            precision,
            {"x": drawn(3, 8)},
            f"{precision}, strict: MatMul 'b' of 'b' stays as it is",
        )

    def test_of_all_layers_is_one_of_the_tool(self, monkeypatch):
        model = tagged_graph(
            "g (float[3,8] x) => (float[3,24] y) { y = MatMul(x,w) }", w=drawn(8, 24)
        )
        self.fail_on([8, 24], monkeypatch, "weights")
        with pytest.raises(
            ToolError, match=r"failed on model 'g': ValueError: .* in y \(MatMul 'y' of 'y'\)"
        ):
            htp_export.quantize(model, "int4")

    def test_is_found_by_halves(self):
        tried: list[list[int]] = []

        def attempt(numbers: Any) -> int:
            tried.append(list(numbers))
            if {7, 50} & set(numbers) or {20, 30} <= set(numbers):
                raise PartError("these do not go together")
            return sum(numbers)

        result, faulty = without_faulty(range(64), attempt, lambda number: [str(number)])
        assert set(faulty) == {7, 30, 50}
        assert result == sum(range(64)) - 87
        assert len(tried) < 48
        alone, why = without_faulty([7], attempt, lambda number: [str(number)])
        assert (alone, set(why)) == (None, {7})

    def test_of_too_many_layers_ends_soon(self):
        tried: list[object] = []

        def attempt(numbers: Any) -> None:
            tried.append(numbers)
            raise PartError("no such argument")

        result, faulty = without_faulty(
            range(10_000), attempt, lambda number: [f"Gemm {number % 500}", "Gemm"]
        )
        assert (result, len(faulty)) == (None, 10_000)
        assert str(faulty[0]) == "no such argument"
        assert (
            str(faulty[5000])
            == "not tried after failures, one of which on a similar Gemm 0: no such argument"
        )
        assert (
            str(faulty[5300])
            == "not tried after failures, one of which on a similar Gemm: no such argument"
        )
        assert len(tried) < 200

    def test_of_too_many_layers_leaves_those_that_are_not_alike(self):
        tried: list[int] = []

        def attempt(numbers: Any) -> int:
            tried.append(len(numbers))
            if any(number % 3 == 0 for number in numbers):
                raise PartError("divisible by 3")
            return sum(numbers)

        numbers = range(3000)
        result, faulty = without_faulty(
            numbers, attempt, lambda number: [f"Conv {number % 3}", "Conv"]
        )
        assert set(faulty) == set(range(0, 3000, 3))
        assert result == sum(number for number in numbers if number % 3)
        assert len(tried) < 300

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("precision", "method"),
        quick([("u8s8", "static"), ("int4", "weights")], ("int4", "weights")),
    )
    def test_of_forty_layers_stay_and_the_others_are_quantized(
        self, precision, method, monkeypatch
    ):
        layers = [f"a{k} = MatMul(b{k},w) b{k + 1} = MatMul(a{k},v)" for k in range(40)]
        text = f"g (float[3,8] x) => (float[3,8] y) {{ b0 = Identity(x) {' '.join(layers)} y = MatMul(b40,u) }}"
        model = tagged_graph(text, w=drawn(8, 24) / 3, v=drawn(24, 8) / 5, u=drawn(8, 8))
        self.fail_on([8, 24], monkeypatch, method)
        result = htp_export.quantize(model, precision, data={"x": drawn(3, 8)})
        assert {each.node for each in result.kept} == {f"a{k}" for k in range(40)}
        assert result.operators == {precision: {"MatMul": 41}}


def test_the_command_says_what_stays_and_refuses_it_with_strict(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ir.save(two_layers('Resize<mode="cubic">(a,,s)', s=np.float32([1, 1, 2, 1.5])), "net.onnx")
    np.savez("data.npz", **FEED)
    command = ["quantize", "net.onnx", "u8s8", "-o", "small.onnx", "--data", "data.npz"]
    assert main([*command, "--strict"]) == 2
    assert (
        "Resize 'r' of 'r' stays as it is: results of Resize 'r' of 'r' leave the range"
        in capsys.readouterr().err
    )
    assert not Path("small.onnx").exists()
    assert main([*command, "--json"]) == 0
    [kept] = json.loads(capsys.readouterr().out)["kept"]
    assert kept["modules"] == ["r"]
    assert distance(outputs(Path("small.onnx"), FEED)[0], outputs(Path("net.onnx"), FEED)[0]) < 0.05


def test_what_changes_nothing_is_no_measurement():
    """A module that stays as it is would seem to have no error."""
    model = two_layers('Resize<mode="cubic">(a,,s)', s=np.float32([1, 1, 2, 1.5]))
    found = htp_export.sensitivity(model, ["u8s8"], data=FEED, select="a", all_but=False)
    assert found.modules["a"]["u8s8"].alone.error > 0
    text = "g (float[2,4,6,6] x) => (float[2,4,4,4] y) { y = Conv(x,w,b) }"
    huge = tagged_graph(text, w=drawn(4, 4, 3, 3) * np.float32(1e-9), b=drawn(4) * 100)
    row = htp_export.sensitivity(huge, ["uint8"], data=FEED, select="y", all_but=False).modules[
        "y"
    ]["uint8"]
    assert row.alone is None
    assert (
        row.problem
        == "nothing changes: ONNX Runtime would clip the bias of Conv 'y' of 'y' to int32"
    )
