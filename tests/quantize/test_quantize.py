"""quantize: exactly the chosen modules change, every node is tagged, bytes are as predicted, and the result runs."""

import itertools
import json
import logging
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import InputError, SelectorError, ToolError
from htp_export.format import tags
from tests.exporting import exported, quick
from tests.nets import EXPORTERS, Apply, TiedWeights, composed, image, spread
from tests.quantized import (
    IDS,
    Net,
    assert_others_are_the_same,
    assert_predicted,
    assert_tagged,
    outputs,
    slow,
    written,
)

PRECISIONS = [
    "int8",
    "u8s8",
    "uint8",
    "int16",
    "int8-dynamic",
    "int8-weights",
    "int4",
    "fp8",
    "fp16",
    "fixed",
    "mxint8",
    "mxfp8",
]
INSERTED = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast", "Mul"}


def tied_file(folder: Path) -> Path:
    """Two layers that share a weight, which TorchScript passes on through an Identity."""
    torch.manual_seed(0)
    a, b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    b.weight = a.weight
    net = composed(lambda self, x: self.b(torch.tanh(self.a(x))), a=a, b=b)
    return written(net, (torch.randn(2, 3, 32),), folder / "tied.onnx", "torchscript", ["x"])


@pytest.mark.long
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("chosen", "exporter"),
    [
        *((".", "dynamo"), ("first", "torchscript"), slow("first", "dynamo")),
        *(slow("class:Linear", each) for each in EXPORTERS),
    ],
)
def test_exactly_the_chosen_modules_change(nets, exporter, precision, chosen, tmp_path):
    net, file = nets[exporter], tmp_path / "quantized.onnx"
    result = htp_export.quantize(net, {chosen: precision}, file, data={"ids": IDS})
    assert_others_are_the_same(net, file, chosen)
    assert_tagged(net, file, chosen)
    onnx.checker.check_model(str(file))
    [expected], [found] = outputs(net, {"ids": IDS}), outputs(file, {"ids": IDS})
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert 0 < error < (0.5 if precision == "int4" else 0.1)
    assert_predicted(result, net, {chosen: precision})
    sizes = {path: module.bytes_after for path, module in result.modules.items()}
    counted = htp_export.cost(file).modules
    assert sizes == {path: counted[path].weight_bytes for path in sizes}
    assert (
        result.modules[""].bytes_after
        < result.modules[""].bytes_before
        == htp_export.cost(net).modules[""].weight_bytes
    )


@pytest.mark.parametrize("exporter", quick(EXPORTERS, "dynamo"))
def test_a_plan_of_several_precisions_is_applied_in_turn(nets, exporter, tmp_path):
    net, file = nets[exporter], tmp_path / "mixed.onnx"
    plan = {".": "int8", "table": "int4", "second": "int8-dynamic", "norm": "fp32", "head": "fp16"}
    result = htp_export.quantize(net, plan, file, data=[{"ids": IDS}, {"ids": IDS[::-1]}])
    found = {path: module.precision for path, module in result.modules.items()}
    assert found == {
        "": "mixed", "table": "int4", "first": "int8", "act": "int8", "norm": "fp32", "second": "int8-dynamic",
        "head": "fp16",
    }  # fmt: skip
    by_module = {
        path: {node.op_type for node in htp_export.load(file)[path].nodes} for path in found if path
    }
    assert by_module["table"] == {"GatherBlockQuantized"}
    assert by_module["first"] >= {"QuantizeLinear", "DequantizeLinear", "MatMul", "Add"}
    assert by_module["second"] >= {"DynamicQuantizeLinear", "MatMulInteger"}
    assert by_module["head"] == {"Cast", "Gemm"}
    assert_others_are_the_same(net, file, "**,!norm")
    assert not result.tagged.untagged
    assert_predicted(result, net, plan)
    [expected], [quantized] = outputs(net, {"ids": IDS}), outputs(file, {"ids": IDS})
    assert np.abs(quantized - expected).max() < 0.5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        *(({"algorithm": name}, 4) for name in ("default", "rtn", "hqq", "k-quant")),
        ({"symmetric": True}, 3),
    ],
)
def test_weights_are_rounded_by_each_algorithm(net, fields, inputs, tmp_path):
    file = tmp_path / "quantized.onnx"
    plan = {"class:Linear": {"precision": "int4", "block_size": 32, **fields}}
    result = htp_export.quantize(net, plan, file, data={"ids": IDS})
    nodes = [node for node in result.model.graph if node.op_type == "MatMulNBits"]
    assert [node.attributes["block_size"].as_int() for node in nodes] == [32, 32, 32]
    assert {len(node.inputs) for node in nodes} == {inputs}  # the last one has zero points
    [expected], [found] = outputs(net, {"ids": IDS}), outputs(file, {"ids": IDS})
    assert 0 < np.abs(found - expected).max() < 0.3 * np.abs(expected).max()
    assert_predicted(result, net, plan)


class TestAccuracyLevel:
    """``accuracy_level`` of ``MatMulNBits``, by module."""

    def levels(self, result: htp_export.results.Quantized) -> dict[str, int]:
        """Module → level of its product, 0 without one."""
        products = [node for node in result.model.graph if node.op_type == "MatMulNBits"]
        return {
            node.metadata_props["htp.module"]: node.attributes.get_int("accuracy_level", 0)
            for node in products
        }

    def test_each_module_has_the_one_of_its_rule(self, net, tmp_path):
        file = tmp_path / "levels.onnx"
        plan = {
            "class:Linear": {"precision": "int4", "block_size": 16},
            "first": {"precision": "int8-weights", "accuracy_level": 0},
            "head": "int4:accuracy_level=1:algorithm=rtn",
        }
        result = htp_export.quantize(net, plan, file)
        assert self.levels(result) == {"first": 0, "second": 4, "head": 1}
        assert result.modules["head"].precision == "int4:accuracy_level=1:algorithm=rtn"
        outputs(file, {"ids": IDS})

    def test_int8_arithmetic_is_what_is_computed(self, net, tmp_path):
        """At level 4 results differ from those in fp32 by about a step of int8; levels 0 and 1 are equal."""
        found = {}
        for level in (0, 1, 4):
            htp_export.quantize(
                net, {"class:Linear": f"int8-weights:accuracy_level={level}"}, tmp_path / "q.onnx"
            )
            [found[level]] = outputs(tmp_path / "q.onnx", {"ids": IDS})
        assert np.array_equal(found[0], found[1])
        assert 1e-5 < np.abs(found[4] - found[0]).max() / np.abs(found[0]).max() < 0.05

    def test_zero_points_that_are_floats_have_none(self, net):
        assert set(
            self.levels(htp_export.quantize(net, {"class:Linear": "int4:algorithm=hqq"})).values()
        ) == {0}

    @pytest.mark.parametrize(
        ("precision", "problem"),
        [
            (
                {"precision": "int4", "format": "qdq", "algorithm": "hqq"},
                "zero points of hqq are no integers",
            ),
            ({"precision": "int8-dynamic", "format": "qdq"}, "format is 'qdq', and can be default"),
            (
                {"precision": "int4", "narrow_io": True},
                "narrow_io is for activations in float16 or bfloat16",
            ),
            ({"precision": "fp16", "narrow_io": 2}, "narrow_io is 2, and can be False, True"),
            (
                "int8:accuracy_level=4",
                "accuracy_level is of weights in blocks of ONNX Runtime: int4, int8-weights",
            ),
            ("int4:accuracy_level=5", "accuracy_level is 5, and can be 0, 1, 2, 3, 4"),
            (
                {"precision": "int4", "accuracy_level": True},
                "accuracy_level is 'True', and can be 0",
            ),
            ("int4:algorithm=hqq:accuracy_level=4", "accuracy_level has no effect with hqq"),
            (
                "int4:format=qdq:accuracy_level=4",
                "accuracy_level is of MatMulNBits, which the format qdq",
            ),
            (
                "int4:accuracy_level",
                "'accuracy_level' is no field of a precision; write FIELD=VALUE",
            ),
            ("int4:acuracy_level=0", "has no field 'acuracy_level'; nearest: 'accuracy_level'"),
        ],
    )
    def test_fields_that_do_not_go_together_are_refused(self, net, precision, problem):
        with pytest.raises(InputError, match=problem):
            htp_export.quantize(net, {"first": precision})


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_ranges_are_measured_by_each_method(net, method, tmp_path):
    file = tmp_path / "quantized.onnx"
    runs = [{"ids": (IDS + k) % 50} for k in range(3)]
    htp_export.quantize(net, {".": {"precision": "int8", "calibration": method}}, file, data=runs)
    [expected], [found] = outputs(net, {"ids": IDS}), outputs(file, {"ids": IDS})
    assert 0 < np.abs(found - expected).max() < 0.2 * np.abs(expected).max()


def test_ranges_are_those_of_all_runs(net):
    def scale(data: Any) -> float:
        result = htp_export.quantize(net, {"first": "int8"}, data=data)
        [node] = [node for node in result.model.graph if node.op_type == "QuantizeLinear"][:1]
        return float(node.inputs[1].const_value.numpy())

    first, second = {"ids": IDS % 3}, {"ids": IDS}
    assert (
        scale([first])
        < scale([first, second])
        == scale([second, first])
        == scale(iter([first, second]))
    )


def test_one_run_is_in_memory_at_a_time(net):
    alive: list[weakref.ref[np.ndarray]] = []

    def runs() -> Iterator[dict[str, np.ndarray]]:
        for number in range(6):
            # the last one, and the one before it on its way out
            assert sum(ref() is not None for ref in alive) <= 2
            array = (IDS + number) % 50
            alive.append(weakref.ref(array))
            yield {"ids": array}
            del array

    htp_export.quantize(net, {"first": "int8"}, data=runs())
    assert len(alive) == 6


def test_an_iterator_serves_two_precisions(net):
    result = htp_export.quantize(
        net, {"first": "int8", "second": "uint8"}, data=iter([{"ids": IDS}])
    )
    assert {name: sum(kinds.values()) for name, kinds in result.operators.items()} == {
        "int8": 2,
        "uint8": 1,
    }


def test_random_inputs_are_said_to_mean_nothing(net, caplog):
    result = htp_export.quantize(net, {"first": "int8"})
    assert "accuracy of this model means nothing" in caplog.text
    assert any("means nothing" in note for note in result.notes)
    caplog.clear()
    assert htp_export.quantize(net, {"first": "int4"}).notes == ()
    assert not caplog.text


def test_logging_of_the_program_stays_as_it_was(net):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    htp_export.quantize(net, {".": "int8-dynamic", "head": "int4"})
    assert (root.handlers[:], root.level) == before


@pytest.mark.parametrize("data", [True, False])
def test_a_range_that_is_no_number_is_refused_with_the_tensor(data, tmp_path):
    """A softmax of which everything is masked."""
    parts = {"fc": nn.Linear(8, 8), "head": nn.Linear(8, 3)}
    net = composed(
        lambda self, x: self.head((self.fc(x) + torch.full((8,), -torch.inf)).softmax(-1)), **parts
    )
    file = written(net, (torch.randn(4, 8),), tmp_path / "net.onnx", "dynamo", ["x"])
    with pytest.raises(InputError, match="computes NaN in 'softmax'; its range is not known"):
        htp_export.quantize(
            file, "u8s8", data=[{"x": np.ones((4, 8), np.float32)}] if data else None
        )


class TestCasts:
    def test_stand_at_borders_alone(self, net):
        model = htp_export.quantize(net, {"class:Linear,act,norm": "fp16"}).model
        owners = [
            node.metadata_props[tags.MODULE] for node in model.graph if node.op_type == "Cast"
        ]
        assert owners == ["first", "second", "head", "head"]

    def test_are_placed_once_for_all_readers_in_a_type(self, tmp_path):
        net = composed(
            lambda self, x: self.a(y := torch.tanh(x)) * self.b(y) + self.c(y),
            **{n: nn.Linear(8, 8) for n in "abc"},
        )
        file = written(net, (torch.randn(2, 8),), tmp_path / "two.onnx", "dynamo", ["x"])
        model = htp_export.quantize(file, {"a,b": "fp16"}).model
        casts = [node for node in model.graph if node.op_type == "Cast"]
        assert [json.loads(node.metadata_props.get(tags.OWNERS, "[]")) for node in casts] == [
            ["a", "b"],
            [],
            [],
        ]
        assert [node.attributes["to"].as_int() for node in casts] == [10, 1, 1]

    def test_weights_keep_their_names_and_those_that_others_read_stay(self, tmp_path):
        file = tied_file(tmp_path)
        before = set(htp_export.load(file).model.graph.initializers)
        both = htp_export.quantize(file, {".": "fp16"}).model.graph.initializers
        assert {name: value.const_value.dtype for name, value in both.items()} == dict.fromkeys(
            before, ir.DataType.FLOAT16
        )
        # what torch makes of it
        assert "Identity" in {node.op_type for node in htp_export.load(file).model.graph}
        one = htp_export.quantize(file, {"a": "fp16"}).model.graph.initializers
        assert {value.const_value.dtype for name, value in one.items() if name in before} == {
            ir.DataType.FLOAT
        }
        assert len(one) == len(before) + 1

    def test_operators_without_the_type_stay_as_they_are(self, net):
        result = htp_export.quantize(net, {".": "bf16"})
        assert result.modules[""].bytes_after == result.modules[""].bytes_before // 2
        onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
        steps = Apply(lambda x: torch.cumsum(x, 1) * 2.5).eval()
        program = htp_export.export(steps, (torch.randn(2, 3),), verbose=False)
        left = htp_export.quantize(program, {".": "fp16"})
        assert left.left == {"fp16": {"CumSum": 1}} or "CumSum" in left.operators["fp16"]

    @pytest.mark.parametrize("exporter", EXPORTERS)
    def test_those_of_the_model_to_other_types_stay(self, exporter, tmp_path):
        parts = {"fc": nn.Linear(4, 4), "table": nn.Embedding(10, 3)}
        net = composed(
            lambda self, x: self.table((self.fc(x).abs() * 2).clamp(0, 9).long()), **parts
        )
        x = torch.randn(2, 4)
        file = written(net, (x,), tmp_path / "net.onnx", exporter, ["x"])
        htp_export.quantize(file, "fp16", tmp_path / "half.onnx")
        with torch.no_grad():
            assert np.allclose(
                outputs(tmp_path / "half.onnx", {"x": x.numpy()})[0], net(x), atol=1e-2
            )

    @pytest.mark.parametrize("summed", ["scatter_add", "index_put"])
    def test_sums_of_scattered_numbers_stay(self, summed, tmp_path):
        """ONNX Runtime loads them in half precision, and refuses to run them."""

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            h, places = self.fc(x), torch.tensor([0, 1, 0])
            if summed == "scatter_add":
                return torch.zeros(2, 4).scatter_add(0, places[:, None].expand(3, 4), h)
            return torch.zeros(2, 4).index_put((places,), h, accumulate=True)

        net, x = composed(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4)
        file = written(net, (x,), tmp_path / "net.onnx", "dynamo", ["x"])
        htp_export.quantize(file, "fp16", tmp_path / "half.onnx")
        with torch.no_grad():
            assert np.allclose(
                outputs(tmp_path / "half.onnx", {"x": x.numpy()})[0], net(x), atol=1e-2
            )

    def test_sequences_stay(self, tmp_path):
        net = composed(
            lambda self, x: torch.unsafe_chunk(self.fc(x), 2, -1)[1] * 2.5, fc=nn.Linear(4, 4)
        ).eval()
        x, file = torch.randn(2, 4), tmp_path / "net.onnx"
        htp_export.export(net, (x,), file, optimize=False, verbose=False)
        assert "SequenceAt" in {node.op_type for node in onnx.load(file).graph.node}
        htp_export.quantize(
            file, {"fc": "u8s8"}, small := tmp_path / "small.onnx", data=[{"x": x.numpy()}]
        )
        htp_export.quantize(small, "fp16", tmp_path / "half.onnx")
        with torch.no_grad():
            assert np.allclose(
                outputs(tmp_path / "half.onnx", {"x": x.numpy()})[0], net(x), atol=0.1
            )

    def test_a_size_is_read_of_either_type(self, tmp_path):
        net = composed(
            lambda self, x: (y := self.fc(x)).reshape(y.shape[0] * 2, 4), fc=nn.Linear(8, 8)
        ).eval()
        options: dict[str, Any] = {
            "dynamo": False,
            "input_names": ["x"],
            "dynamic_axes": {"x": {0: "batch"}},
        }
        file, target = tmp_path / "sizes.onnx", tmp_path / "half.onnx"
        htp_export.export(net, (torch.randn(2, 8),), file, verbose=False, **options)
        htp_export.quantize(file, {".": "fp16"}, target)
        x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
        assert outputs(target, {"x": x})[0].shape == (6, 4)


def test_a_weight_behind_an_identity_is_a_weight(tmp_path):
    file, x = tied_file(tmp_path), torch.randn(2, 3, 32).numpy()
    for precision, chosen in itertools.product(
        ("int4", "int8-dynamic", "int8", "fp16"), (".", "b")
    ):
        plan = {chosen: precision}
        target = tmp_path / "quantized.onnx"
        result = htp_export.quantize(file, plan, target, data={"x": x})
        assert (
            "Identity" not in {node.op_type for node in result.model.graph} or precision == "fp16"
        )
        assert_predicted(result, file, plan)
        assert 0 < np.abs(outputs(file, {"x": x})[0] - outputs(target, {"x": x})[0]).max() < 0.5


def test_a_module_that_reads_no_input_of_the_model_is_calibrated(tmp_path):
    torch.manual_seed(0)
    # too large to be folded
    positions = composed(lambda self: self.embed(self.ids), embed=nn.Embedding(4000, 4))
    positions.register_buffer("ids", torch.arange(8).flip(0))
    net = composed(
        lambda self, x: self.fc(x + self.positions()), positions=positions, fc=nn.Linear(4, 3)
    )
    x = torch.randn(2, 8, 4)
    file = written(net, (x,), tmp_path / "net.onnx", "dynamo", ["x"])
    result = htp_export.quantize(
        file, {"positions": "int8"}, tmp_path / "small.onnx", data=[{"x": x.numpy()}]
    )
    assert result.modules["positions"].precision == "int8"
    assert result.modules["positions"].changed > 0
    [before], [after] = (
        outputs(path, {"x": x.numpy()}) for path in (file, tmp_path / "small.onnx")
    )
    assert 0 < np.abs(before - after).max() < 0.1


def test_values_that_fill_masks_are_not_divided_into_steps(tmp_path):
    def masked(self: Any, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
        return self.out(torch.softmax(self.scores(x) + mask, -1))

    torch.manual_seed(0)
    x, keep = torch.randn(5, 8), torch.tensor([True, True, False, True])
    net = composed(masked, scores=nn.Linear(8, 4), out=nn.Linear(4, 3))
    file = written(net, (x, keep), tmp_path / "masked.onnx", "dynamo", ["x", "keep"])
    feed = {"x": x.numpy(), "keep": keep.numpy()}
    target = tmp_path / "int8.onnx"
    result = htp_export.quantize(file, {".": "int8"}, target, data=feed)
    assert any("fill masks" in note for note in result.notes)
    [expected], [found] = outputs(file, feed), outputs(target, feed)
    assert 0 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    for calibration in ("entropy", "percentile"):  # the nodes that stay are the same
        plan = {".": {"precision": "int8", "calibration": calibration}}
        other = htp_export.quantize(file, plan, target, data=[feed, feed])
        assert [each.node for each in other.kept] == [each.node for each in result.kept]
        assert 0 < np.abs(outputs(target, feed)[0] - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("exporter", quick(EXPORTERS, "dynamo"))
def test_a_weight_that_other_modules_read_stays_for_them(exporter, tmp_path):
    file = written(
        TiedWeights(50, 64), (torch.from_numpy(IDS),), tmp_path / "net.onnx", exporter, ["ids"]
    )
    for precision in ("int4", "int8-dynamic", "int8", "fp16"):
        target = tmp_path / "quantized.onnx"
        htp_export.quantize(file, {"head": precision}, target, data={"ids": IDS})
        assert_others_are_the_same(file, target, "head")
        assert_tagged(file, target, "head")
        assert (
            0
            < np.abs(outputs(file, {"ids": IDS})[0] - outputs(target, {"ids": IDS})[0]).max()
            < 0.5
        )


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("precision", ["int8", "uint8", "int8-dynamic", "fp16"])
def test_convolutions_with_a_merged_batchnorm_are_those_of_both(
    precision, exporter, shared_files, tmp_path
):
    file, target = shared_files.net("conv_bn_relu", exporter), tmp_path / "quantized.onnx"
    feed = {onnx.load(file).graph.input[0].name: image()["input"].numpy()}
    result = htp_export.quantize(file, {"0": precision}, target, data=feed)
    assert result.operators == {precision: {"Conv": 1}}
    assert_others_are_the_same(file, target, "0,1")
    assert_tagged(file, target, "0,1")
    [expected], [found] = outputs(file, feed), outputs(target, feed)
    assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    assert_predicted(result, file, {"0": precision})


def test_nodes_in_branches_change_too_and_a_weight_of_two_is_counted_in_each(tmp_path):
    def branches(self: Any, x: torch.Tensor) -> Any:
        return torch.cond(
            x.sum() > 0, lambda x: self.a(self.both(x)), lambda x: self.b(self.both(x)), (x,)
        )

    torch.manual_seed(0)
    x = torch.randn(3, 4, 32)
    net = composed(branches, **{name: nn.Linear(32, 32) for name in ("a", "b", "both")})
    file = written(net, (x,), tmp_path / "branches.onnx", "dynamo", ["x"])
    target = tmp_path / "quantized.onnx"
    for precision in ("int4", "int8-weights", "fp16"):
        htp_export.quantize(file, {"a": precision}, target)
        tagged = htp_export.load(target)
        assert not tagged.untagged
        kinds = {path: {node.op_type for node in tagged[path].nodes} for path in ("a", "b")}
        assert kinds["a"] & {"MatMulNBits", "Cast"}
        assert not kinds["b"] & {"MatMulNBits", "Cast"}
        for sign in (1, -1):
            feed = {"x": sign * np.abs(x.numpy())}
            error = np.abs(outputs(file, feed)[0] - outputs(target, feed)[0]).max()
            assert (error > 0) == (sign > 0)
            assert error < 0.5
        assert_predicted(htp_export.quantize(file, {"both": precision}), file, {"both": precision})


def test_functions_are_inlined_first(net, tmp_path):
    nested, target = tmp_path / "nested.onnx", tmp_path / "quantized.onnx"
    htp_export.functions(net, "class:Linear", nested)
    result = htp_export.quantize(nested, {"first": "int4"}, target)
    assert result.operators["int4"] == {"MatMul": 1}
    assert {node.op_type for node in htp_export.load(target)["first"].nodes} == {
        "MatMulNBits",
        "Add",
    }


def test_external_weights_stay_external(net, tmp_path):
    file, target = tmp_path / "external.onnx", tmp_path / "quantized.onnx"
    htp_export.load(net).save(file, external_data="external.data")
    htp_export.quantize(file, {".": "int8", "head": "fp16"}, target, data={"ids": IDS})
    assert_tagged(file, target, ".")
    assert np.abs(outputs(file, {"ids": IDS})[0] - outputs(target, {"ids": IDS})[0]).max() < 0.2


def test_other_commands_read_the_result(net, tmp_path):
    file = tmp_path / "quantized.onnx"
    htp_export.quantize(
        net, {".": "int8", "head": "fp16", "second": "int4"}, file, data={"ids": IDS}
    )
    compared = htp_export.compare(net, file, {"ids": IDS}, tolerances={".": (1.0, 1.0)})
    assert compared.modules["head"].max_abs is not None
    assert htp_export.optimize(file, verify=True).max_abs == 0
    assert htp_export.cost(file).modules["first"].weight_bytes > 0
    assert len(htp_export.load(file)["first"].nodes) > 3
    htp_export.view(file, tmp_path / "view.html")
    assert htp_export.profile(file, {"ids": IDS}, runs=2, warmup=0).unattributed_ms == 0
    checked = htp_export.verify(
        spread(Net().eval()), file, (torch.from_numpy(IDS),), tolerances={"**": (1.0, 1.0)}
    )
    assert checked.ok
    assert checked.modules["head"].max_abs > 0
    again = htp_export.quantize(file, {"table": "fp32", "second": "fp16"}, tmp_path / "again.onnx")
    assert not again.tagged.untagged


class TestRefused:
    @pytest.mark.parametrize(
        ("plan", "error", "problem"),
        [
            ({"firs": "int8"}, SelectorError, "matches no module; nearest: 'first'"),
            (
                {"norm": "int4"},
                InputError,
                "no operator of module 'norm' takes int4; there are: 1 LayerNormalization",
            ),
            (
                {"act": "int8"},
                InputError,
                "no operator of module 'act' takes int8; there are: 1 Relu",
            ),
            (
                {"second": {"precision": "int4", "algorithm": "rtn", "block_size": 16}},
                InputError,
                "no operator of module 'second' takes int4; there are: 1 MatMul",
            ),
            (
                {"first": "int8", "act": "int8-dynamic"},
                InputError,
                "rule 'act': no operator of module 'act'",
            ),
            ({"first": "int9"}, InputError, "rule 'first': there is no precision 'int9'"),
            ({}, InputError, "no rules"),
            (
                "f.onnx",
                InputError,
                "'f.onnx' is a model and not a plan; the model comes before the plan",
            ),
        ],
        ids=str,
    )
    def test_before_anything_runs(self, plan, error, problem, net, tmp_path):
        target = tmp_path / "quantized.onnx"
        target.write_bytes(b"as it was")

        def runs() -> Iterator[dict[str, np.ndarray]]:
            raise AssertionError("data were read")
            yield {}

        with pytest.raises(error, match=problem):
            htp_export.quantize(net, plan, target, data=runs())
        assert target.read_bytes() == b"as it was"
        assert [path.name for path in tmp_path.iterdir()] == ["quantized.onnx"]

    def test_weights_that_nodes_transpose(self, tmp_path):
        file = exported(
            nn.Linear(16, 16).eval(),
            {"input": torch.randn(2, 3, 16)},
            "dynamo",
            tmp_path,
            optimize=False,
        )
        with pytest.raises(
            InputError,
            match=r"1 Transpose.*; weights are still computed .* optimize the file first",
        ):
            htp_export.quantize(file, {".": "int8-dynamic"})
        optimized = htp_export.optimize(file).model
        assert htp_export.quantize(optimized, {".": "int8-dynamic"}).modules[""].changed == 1

    @pytest.mark.parametrize(
        ("data", "problem"),
        [
            ([], "data have no runs"),
            ({"x": IDS}, "data, run 0: no input 'x'"),
            ([{"ids": IDS}, {"ids": IDS.astype(np.float32)}], "data, run 1: "),
        ],
        ids=str,
    )
    def test_data_that_do_not_fit(self, data, problem, net, tmp_path):
        with pytest.raises(InputError, match=problem):
            htp_export.quantize(net, {"first": "int8"}, tmp_path / "quantized.onnx", data=data)
        assert not list(tmp_path.iterdir())

    def test_an_opset_without_scales_of_channels(self, tmp_path):
        file = tmp_path / "old.onnx"
        x = torch.randn(2, 8)
        htp_export.export(
            nn.Linear(8, 8).eval(), (x,), file, dynamo=False, opset_version=11, verbose=False
        )
        with pytest.raises(InputError, match="needs opset 13 or later, and the model has 11"):
            htp_export.quantize(file, {".": "int8"})

    def test_a_quantizer_that_fails_is_named(self, net, tmp_path, monkeypatch):
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of order")

        quantizer = "onnxruntime.quantization.matmul_nbits_quantizer.MatMulNBitsQuantizer"
        monkeypatch.setattr(f"{quantizer}._process_subgraph", fail)
        with pytest.raises(
            ToolError,
            match=r"onnxruntime.quantization failed on .*dynamo.onnx: RuntimeError: out of order",
        ):
            htp_export.quantize(net, {"first": "int4"}, tmp_path / "quantized.onnx")
        assert not list(tmp_path.iterdir())


def test_a_dry_run_has_no_model_and_prints_what_is_predicted(net):
    result = htp_export.quantize(net, "int4", dry_run=True)
    assert "predicted: weights" in str(result)
    assert result.modules["first"].precision == "int4"
    assert (
        result.to_dict()["modules"]["first"]["bytes_after"] == result.modules["first"].bytes_after
    )
    with pytest.raises(InputError, match="a dry run makes no model"):
        _ = result.model


def test_a_rule_that_later_ones_override_is_noted(net):
    result = htp_export.quantize(net, {"first": "int8", "act": "fp32", ".": "int4"}, dry_run=True)
    assert [note for note in result.notes if note.startswith("rule ")] == [
        f"rule {selector!r} decides nothing: later rules hold for all of its nodes"
        for selector in ("first", "act")
    ]


def test_threads_quantize_one_model_at_once(net):
    tagged = htp_export.load(net)
    plans = [{".": "int8-dynamic"}, {"class:Linear": "int4"}, {".": "int8"}, {".": "fp16"}] * 2

    def made(plan: dict[str, str]) -> bytes:
        model = htp_export.quantize(tagged, plan, data={"ids": IDS}).model
        return ir.to_proto(model).SerializeToString(deterministic=True)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(made, plans))
    assert together == [made(plan) for plan in plans]


@pytest.mark.parametrize("exporter", quick(EXPORTERS, "dynamo"))
def test_bytes_of_norms_and_computed_weights_are_predicted(exporter, tmp_path):
    layers = nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2)
    net, x = (
        nn.Sequential(*layers, nn.utils.parametrizations.weight_norm(nn.Linear(12, 5))),
        torch.randn(2, 3, 8, 8),
    )
    file = written(net, (x,), tmp_path / "odd.onnx", exporter, ["x"])
    for precision in ("int8", "u8s8", "uint8", "int16"):
        target = tmp_path / "quantized.onnx"
        feed = {onnx.load(file).graph.input[0].name: x.numpy()}
        assert_predicted(htp_export.quantize(file, precision, target, data=feed), file, precision)
        assert np.abs(outputs(target, feed)[0] - outputs(file, feed)[0]).max() < 0.5


def test_a_constant_input_of_a_product_is_counted_as_it_becomes(tmp_path):
    net = composed(lambda self, x: x + self.out(torch.zeros(2, 4)), out=nn.Linear(4, 4))
    file = written(net, (torch.randn(2, 4),), tmp_path / "zeros.onnx", "torchscript", ["x"])
    assert_predicted(htp_export.quantize(file, "int8-dynamic"), file, "int8-dynamic")
