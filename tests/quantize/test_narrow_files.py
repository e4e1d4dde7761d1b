"""Files that are in float16 already get blocks of weights, or a reason; operators that cannot be in it stay."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import InputError, RuleError
from tests.exporting import every
from tests.nets import composed
from tests.quantized import assert_predicted, distance, outputs, results, tagged_graph


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


IDS = np.arange(14).reshape(2, 7)


@pytest.fixture(scope="module", params=[18, 20])
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, a convolution, and products with and without bias, in float16."""
    torch.manual_seed(0)
    parts = {"table": nn.Embedding(30, 64), "conv": nn.Conv1d(7, 8, 3), "fc": nn.Linear(62, 32)}
    net = composed(
        lambda self, ids: self.head(torch.relu(self.fc(self.conv(self.table(ids))))),
        **parts,
        head=nn.Linear(32, 16, bias=False),
    )
    file = tmp_path_factory.mktemp("half") / f"{request.param}.onnx"
    htp_export.export(
        net.eval().half(),
        (torch.from_numpy(IDS),),
        file,
        opset_version=request.param,
        verbose=False,
    )
    return file


def feed_of(file: Path) -> dict[str, Any]:
    return {str(htp_export.load(file).model.graph.inputs[0].name): IDS}


_LIMITS = {
    "int8-weights": 0.02,
    "int8-weights:symmetric=true": 0.02,
    "int8-weights:algorithm=rtn": 0.02,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "precision",
    every(2, [
        "int4", "int4:symmetric=true", "int4:algorithm=hqq", "int4:algorithm=rtn:block_size=16",
        "int4:algorithm=k-quant:block_size=16", "int4:accuracy_level=0", "int4:activation=float16", *_LIMITS,
    ]),
)  # fmt: skip
def test_weights_in_float16_get_blocks(precision, half, tmp_path):
    made, feed = tmp_path / "made.onnx", feed_of(half)
    result = htp_export.quantize(half, precision, made)
    assert_predicted(result, half, precision)
    kinds = {node.op_type for node in result.model.graph}
    assert "MatMulNBits" in kinds
    scales = {node.inputs[2].dtype for node in result.model.graph if node.op_type == "MatMulNBits"}
    assert scales == {ir.DataType.FLOAT16}
    [expected] = outputs(half, feed)
    # at accuracy level 4, ONNX Runtime computes something else without optimizations
    for optimized in (False, True):
        [found] = results(made, feed, optimized=optimized)
        assert found.dtype == np.float16
        assert distance(found.astype(np.float32), expected.astype(np.float32)) < _LIMITS.get(
            precision, 0.25
        )


def test_products_in_float16_have_a_level_only_if_a_rule_says_so(half):
    def levels(precision: str, file: Any = half) -> set[int]:
        model = htp_export.quantize(file, precision).model
        products = [node for node in model.graph if node.op_type == "MatMulNBits"]
        return {node.attributes.get_int("accuracy_level", 0) for node in products}

    assert levels("int4") == {0}
    assert levels("int4:accuracy_level=4") == {4}
    wide = tagged_graph("g (float[3,32] x) => (float[3,8] y) { y = MatMul(x,w) }", w=drawn(32, 8))
    assert levels("int4", wide) == {4}
    assert levels("int4:activation=float16", wide) == {0}


def test_a_convolution_in_float16_is_stored_from_opset_19_on(half):
    result = htp_export.quantize(half, "int8-weights")
    is_old = half.stem == "18"
    assert result.modules["conv"].precision == ("fp32" if is_old else "int8-weights")
    assert (
        any("DequantizeLinear supports it from opset 19 on" in note for note in result.notes)
        == is_old
    )


@pytest.mark.parametrize(
    "precision", ["int8", "u8s8", "int16", "int8-dynamic", "fp16", "bf16", "auto"]
)
def test_what_is_made_of_float32_says_that_this_is_why(precision, half):
    name = "int8-dynamic" if precision == "auto" else precision
    why = f"its type is float16, and {name} is made of float32"
    with pytest.raises(InputError, match=f"1 Conv: {why}.*; 2 MatMul: {why}|1 Gather: {why}"):
        htp_export.quantize(half, precision)
    found: Any = None
    with pytest.raises(InputError) as refusal:
        found = htp_export.quantize(half, precision)
    assert found is None
    assert "nothing here" not in str(refusal.value)


def test_a_part_in_float16_is_told_in_a_note_and_refused_with_strict(half, tmp_path):
    text = "g (float[3,8] x) => (float[3,4] y) { a = MatMul(x,w) y = MatMul(a,v) }"
    model = tagged_graph(text, 19, w=drawn(8, 8), v=drawn(8, 4))
    mixed = htp_export.quantize(model, {"a": "fp16"}).model
    result = htp_export.quantize(mixed, "int8-dynamic")
    why = "1 MatMul: its type is float16, and int8-dynamic is made of float32: give it int8-dynamic before it is cast"
    assert result.notes == (f"int8-dynamic leaves {why}",)
    assert result.operators == {"int8-dynamic": {"MatMul": 1}}
    with pytest.raises(InputError, match=f"strict: int8-dynamic leaves {why}"):
        htp_export.quantize(mixed, "int8-dynamic", strict=True, dry_run=True)


@pytest.mark.parametrize("precision", ["int4", "int8-weights", "int8-dynamic", "auto"])
def test_weights_that_are_inputs_are_told(precision):
    text = "g (float[3,8] x, float[8,8] w) => (float[3,8] y) { y = MatMul(x,w) }"
    models = [tagged_graph(text)]
    models.append(tagged_graph(text, w=drawn(8, 8)))  # an initializer is its default
    for model in models:
        with pytest.raises(
            InputError, match="1 MatMul: 'w' is an input of the model and no stored weight"
        ):
            htp_export.quantize(model, precision)


def test_an_odd_number_of_blocks_is_told():
    model = tagged_graph("g (float[3,48] x) => (float[3,8] y) { y = MatMul(x,w) }", w=drawn(48, 8))
    with pytest.raises(
        RuleError,
        match="1 MatMul: rtn fails on an odd number of blocks in a column: choose another",
    ):
        htp_export.quantize(model, "int4:algorithm=rtn:block_size=16")


class TestStaysValid:
    """``fp16`` and ``bf16`` leave what onnx does not take in the type, whatever the types of operators allow."""

    OPTIONALS = (
        "o = Optional(x) e = OptionalGetElement(o)",
        "o = Optional(x) i = Identity(o) e = OptionalGetElement(i)",
        "e = OptionalGetElement(x)",
        "s = SequenceConstruct(x,x) o = Optional(s) q = OptionalGetElement(o) e = SequenceAt(q,zero)",
        "s = SequenceConstruct(x,x) n = SequenceLength(s) e = SequenceAt(s,zero)",
        "s = SequenceEmpty() t = SequenceInsert(s,x) e = SequenceAt(t,zero)",
        "s = SequenceConstruct(x,x) e = ConcatFromSequence<axis=0>(s)",
    )

    @pytest.mark.parametrize("body", OPTIONALS)
    def test_sequences_and_optionals(self, body, tmp_path):
        text = (
            f"g (float[2,8] given) => (float[n,6] y) {{ x = Relu(given) {body} y = MatMul(e,w) }}"
        )
        model, feed = (
            tagged_graph(text, 18, w=drawn(8, 6), zero=np.array(0)),
            {"given": drawn(2, 8)},
        )
        [expected] = results(model, feed)
        for precision in ("fp16", "bf16", "u8s8", "int8-dynamic", "int4"):
            result = htp_export.quantize(model, precision, tmp_path / "made.onnx", data=feed)
            assert "MatMul" in result.operators[precision]
            if precision != "bf16":  # ONNX Runtime's CPU has no such product
                limit = 0.3 if precision == "int4" else 0.05
                assert distance(results(tmp_path / "made.onnx", feed)[0], expected) < limit

    OPERATORS = (
        "r = BitCast<to=6>(x) y = BitCast<to=1>(r)",  # types of equal width
        "y = MeanVarianceNormalization<axes=[0]>(x)",  # a function with constants in fp32
        # onnx fails on it in fp32, too
        "q = Reshape(x,images) r = MeanVarianceNormalization(q) y = Reshape(r,rows)",
        "r = HannWindow(n) y = Mul(x,r)",  # a type in an attribute of another name
        "r = BlackmanWindow<output_datatype=1>(n) y = Mul(x,r)",
        # one that is 32 bits where nothing says so
        "r = RandomNormal<shape=[8,8]>() z = Mul(r,zeros) y = Add(x,z)",
    )

    @pytest.mark.parametrize("body", OPERATORS)
    def test_operators_that_onnx_infers_otherwise(self, body, tmp_path):
        opset = 26 if "BitCast" in body else 17
        if opset > onnx.defs.onnx_opset_version():
            pytest.skip("this onnx has no BitCast")
        text = f"g (float[8,8] given) => (float[8,8] y) {{ x = Sigmoid(given) {body} }}"
        zeros = np.zeros((8, 8), np.float32)
        constants = {
            "n": np.array(8),
            "zeros": zeros,
            "images": np.array([2, 4, 4, 2]),
            "rows": np.array([8, 8]),
        }
        model, feed = tagged_graph(text, opset, **constants), {"given": drawn(8, 8)}
        result = htp_export.quantize(model, "fp16", tmp_path / "made.onnx")
        assert result.operators["fp16"]["Sigmoid"] == 1
        if opset == 17:
            assert (
                distance(results(tmp_path / "made.onnx", feed)[0], results(model, feed)[0]) < 0.01
            )

    def test_a_model_without_operators_of_onnx_gets_its_casts(self, tmp_path):
        from onnx import TensorProto, helper

        node = helper.make_node(
            "Scaler", ["x"], ["y"], domain="ai.onnx.ml", name="y", offset=[1.0], scale=[2.0]
        )
        node.metadata_props.add(key="htp.module", value="y")
        sizes = ("x", TensorProto.FLOAT, [2, 3]), ("y", TensorProto.FLOAT, [2, 3])
        given, made = (helper.make_tensor_value_info(*each) for each in sizes)
        opsets = [helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("com.microsoft", 1)]
        quick = helper.make_node("QuickGelu", ["y"], ["z"], domain="com.microsoft", name="z")
        quick.metadata_props.add(key="htp.module", value="y")
        last = helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 3])
        proto = helper.make_model(
            helper.make_graph([node, quick], "g", [given], [last], value_info=[made])
        )
        del proto.opset_import[:]
        proto.opset_import.extend(opsets)
        proto.ir_version = 10
        htp_export.quantize(proto, "fp16", tmp_path / "made.onnx")
        assert ir.load(tmp_path / "made.onnx").opset_imports[""] == 13


@pytest.fixture(scope="module")
def operator_tests() -> list[Any]:
    """Onnx can collect them once in a process, and computes numbers that overflow."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(collect_testcases(None))


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["fp16", "u8s8", "int8", "int16", "int8-dynamic", "int8-weights", "int4"]
)
def test_onnx_own_tests_of_operators(precision, operator_tests, tmp_path):
    """Each operator of ONNX with the inputs and attributes of its tests, as inputs and as constants."""
    tried = 0
    for case, constant in itertools.product(operator_tests, (False, True)):
        found = _as_graph(case, constant=constant)
        if found is None or not _quantized(*found, precision, tmp_path / "made.onnx"):
            continue
        model, feed = found
        tried += 1
        expected = results(model, _copied(feed))
        for optimized in (False, True):
            got = results(tmp_path / "made.onnx", _copied(feed), optimized=optimized)
            for one, other in zip(expected, got, strict=True):
                if (
                    isinstance(one, np.ndarray)
                    and one.dtype == np.float32
                    and case.name not in _INHERENT
                ):
                    limit = 0.3 if precision == "int4" else 0.1
                    finite = np.isfinite(one) & (np.abs(one) < 6e4)
                    assert distance(np.where(finite, other, 0), np.where(finite, one, 0)) < limit, (
                        case.name
                    )
    assert tried > 5


def _quantized(model: ir.Model, feed: dict[str, Any], precision: str, target: Path) -> bool:
    """Write a model in a precision; whether there is such a model, and ONNX Runtime runs it as it was."""
    try:
        results(model, _copied(feed))
    except Exception:  # ONNX Runtime has no such operator
        return False
    try:
        htp_export.quantize(model, precision, target, data=_copied(feed))
    except InputError as error:
        if any(
            word in str(error)
            for word in ("no operator of module", "needs opset", "computes NaN", "has NaN")
        ):
            return False
        raise
    return True


_INHERENT = {"test_softmax_large_number"}
"""Tests of which rounding alone changes the results."""


def _copied(feed: dict[str, Any]) -> dict[str, Any]:
    """ONNX Runtime writes into inputs of BatchNormalization in training."""
    return {name: each.copy() for name, each in feed.items()}


def _as_graph(case: Any, *, constant: bool) -> tuple[ir.Model, dict[str, Any]] | None:
    """A test of one node on floats as a tagged model, whose inputs but the first can be constants; None for others."""
    from onnx import numpy_helper

    proto, inputs = case.model, case.data_sets[0][0] if case.data_sets else []
    is_plain = all(isinstance(each, np.ndarray) and each.size for each in inputs)
    kinds = {
        value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output)
    }
    if (
        not inputs
        or not is_plain
        or 1 not in kinds
        or (constant and len(inputs) == 1)
        or len(proto.graph.node) > 1
    ):
        return None
    if any(attribute.HasField("g") for attribute in proto.graph.node[0].attribute):
        return None
    copy = type(proto)()
    copy.CopyFrom(proto)
    copy.ir_version = 10
    for node in copy.graph.node:
        node.name = "node"
        node.metadata_props.add(key="htp.module", value="")
    names = [value.name for value in copy.graph.input]
    feed = {name: np.array(array) for name, array in zip(names, inputs, strict=False)}
    for name in names[1:] if constant else ():
        copy.graph.initializer.append(numpy_helper.from_array(feed.pop(name), name))
    if constant:
        del copy.graph.input[1:]
    model = ir.from_proto(copy)
    model.metadata_props.update({"htp.version": "1"})
    return model, feed
