"""Files for engines that take types from the graph: standard operators alone, and as few Casts as there can be."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.weights.rebuilding import rebuilt
from tests.exporting import open_sizes
from tests.nets import EXPORTERS, Apply, composed, spread
from tests.quantized import (
    IDS,
    Net,
    assert_others_are_the_same,
    assert_predicted,
    assert_tagged,
    outputs,
    results,
    slow,
    written,
)
from tests.written import weight
from tests.written import written as from_text

FEED = {"ids": IDS}
E4M3 = ir.DataType.FLOAT8E4M3FN


def checked(file: Path) -> onnx.ModelProto:
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    return model


def casts(model: ir.Model) -> list[tuple[str, str]]:
    """What each Cast reads, and its type."""
    nodes = [node for node in model.graph if node.op_type == "Cast"]
    return [
        (str(node.inputs[0].name), ir.DataType(node.attributes["to"].as_int()).name)
        for node in nodes
    ]


class TestBlocks:
    @pytest.mark.parametrize(
        ("fields", "kind"),
        [
            ({"precision": "int4"}, "UINT4"),
            ({"precision": "int4", "symmetric": True}, "INT4"),
            ({"precision": "int8-weights"}, "UINT8"),
            slow({"precision": "int8-weights", "symmetric": True}, "INT8"),
            slow({"precision": "int4", "algorithm": "rtn"}, "UINT4"),
            slow({"precision": "int4", "algorithm": "k-quant"}, "UINT4"),
        ],
    )
    def test_standard_operators_compute_what_those_of_onnx_runtime_do(
        self, net, fields, kind, tmp_path
    ):
        own, standard = tmp_path / "own.onnx", tmp_path / "standard.onnx"
        htp_export.quantize(net, {"class:Linear": {**fields, "accuracy_level": 0}}, own)
        plan = {"class:Linear": {**fields, "format": "qdq"}}
        result = htp_export.quantize(net, plan, standard)
        model = checked(standard)
        assert {entry.domain: entry.version for entry in model.opset_import} == {"": 21}
        made = [node for node in result.model.graph if node.op_type == "DequantizeLinear"]
        assert [node.inputs[0].dtype.name for node in made] == [kind] * 3
        assert_tagged(net, standard, "class:Linear")
        assert_others_are_the_same(net, standard, "class:Linear")
        assert_predicted(result, net, plan)
        [expected] = outputs(own, FEED)
        [found] = ReferenceEvaluator(model).run(None, FEED)
        assert np.allclose(found, expected, rtol=1e-4, atol=1e-5)
        [fused] = outputs(standard, FEED)  # with products in integers of 8 bits
        assert np.abs(fused - expected).max() < 0.03 * np.abs(expected).max()

    @pytest.mark.parametrize("activation", ["float32", "float16"])
    def test_they_are_made_anew_of_other_parameters(self, net, activation):
        torch.manual_seed(0)
        state = spread(Net().eval()).state_dict()
        plan = {"class:Linear": {"precision": "int4", "format": "qdq", "activation": activation}}
        tagged = htp_export.quantize(net, plan).tagged
        made = rebuilt(tagged, state)
        assert not made.unknown
        read = [
            node.inputs[:3] for node in tagged.model.graph if node.op_type == "DequantizeLinear"
        ]
        for value in [value for values in read for value in values]:
            assert np.array_equal(made.tensors[value].numpy(), value.const_value.numpy()), (
                value.name
            )

    def test_a_weight_that_two_products_share_is_dequantized_once(self, tmp_path):
        net = composed(
            lambda self, x: self.table(torch.tanh(self.table(x))),
            table=nn.Linear(32, 32, bias=False),
        )
        file = written(net, (torch.randn(2, 32),), tmp_path / "twice.onnx", "dynamo", ["x"])
        result = htp_export.quantize(file, {".": {"precision": "int4", "format": "qdq"}})
        assert [node.op_type for node in result.model.graph] == [
            "DequantizeLinear",
            "MatMul",
            "Tanh",
            "MatMul",
        ]

    def test_a_rule_of_a_plan_file_says_so(self, net, tmp_path):
        plan, made = tmp_path / "plan.yaml", tmp_path / "made.onnx"
        plan.write_text("second: {precision: int4, format: qdq, activation: float16}\n")
        assert main(["quantize", str(net), str(plan), "-o", str(made)]) == 0
        assert "DequantizeLinear" in {node.op_type for node in checked(made).graph.node}

    def test_an_opset_that_cannot_be_raised_is_refused(self, net, tmp_path):
        plan = {".": {"precision": "int4", "format": "qdq"}}
        model = htp_export.load(net).model
        model.graph.opset_imports[""] = 17
        with pytest.raises(
            InputError, match="needs opset 21 or later, and the model has 17: export it with"
        ):
            htp_export.quantize(model, plan)
        model.graph.opset_imports[""] = 18
        node = next(node for node in model.graph if node.op_type == "Relu")
        node.op_type = "GroupNormalization"
        with pytest.raises(
            InputError, match=r"GroupNormalization .* means something else from opset 21 on"
        ):
            htp_export.quantize(model, plan)


def product_of_convolved(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(self.conv(x)).flatten(2)
    return self.head((y @ y.transpose(1, 2)).mean(1))


class TestFloat8:
    def test_onnx_runtime_and_the_reference_agree(self, tmp_path):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 6, 6)
        source, made = tmp_path / "conv.onnx", tmp_path / "made.onnx"
        net = composed(
            product_of_convolved, conv=nn.Conv2d(3, 8, 3, padding=1), head=nn.Linear(8, 4)
        )
        written(net, (x,), source, "dynamo", ["x"])
        result = htp_export.quantize(source, {".": "fp8"}, made, data={"x": x.numpy()})
        kinds = [node.op_type for node in result.model.graph]
        # what the convolution, the product (two) and the layer read
        assert kinds.count("QuantizeLinear") == 4
        assert kinds.count("DequantizeLinear") == 6
        [expected], [found] = outputs(source, {"x": x.numpy()}), outputs(made, {"x": x.numpy()})
        assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
        [reference] = ReferenceEvaluator(checked(made)).run(None, {"x": x.numpy()})
        assert np.allclose(found, reference, rtol=1e-4, atol=1e-4)
        assert_tagged(source, made, ".")
        assert_predicted(result, source, {".": "fp8"})

    @pytest.mark.parametrize("exporter", EXPORTERS)
    def test_a_relu_in_front_of_a_product_stays_in_the_sessions_of_users(self, exporter, tmp_path):
        torch.manual_seed(0)
        x, source, made = torch.randn(4, 16), tmp_path / "net.onnx", tmp_path / "made.onnx"
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        written(net, (x,), source, exporter, ["x"])
        [value] = onnx.load(source).graph.input
        feed = {value.name: x.numpy()}
        htp_export.quantize(source, "fp8", made, data=feed)
        [reference] = ReferenceEvaluator(checked(made)).run(None, feed)
        [expected] = outputs(source, feed)
        assert 0 < np.abs(reference - expected).max() < 0.1 * np.abs(expected).max()
        for optimized in (False, True):
            assert np.allclose(
                results(made, feed, optimized=optimized)[0], reference, rtol=1e-4, atol=1e-4
            )

    def test_a_weight_that_is_read_along_both_axes_has_scales_and_names_for_each(self, tmp_path):
        text = "g (float[2,4] x) => (float[2,4] z) { y = MatMul(x, w) t = Relu(y) z = Gemm<transB=1>(t, w) }"
        source, made = tmp_path / "both.onnx", tmp_path / "made.onnx"
        ir.save(from_text(text, 20, {"y": "first", "t": "", "z": "second"}, w=weight(4, 4)), source)
        x = weight(2, 4, seed=1)
        graph = htp_export.quantize(source, "fp8", made, data={"x": x}).model.graph
        back = [node for node in graph if node.op_type == "DequantizeLinear"]
        assert [node.attributes.get_int("axis", 9) for node in back] == [9, -1, 9, 0]
        names = [value.name for node in graph for value in node.outputs]
        assert len(set(names)) == len(names)
        [reference] = ReferenceEvaluator(checked(made)).run(None, {"x": x})
        [expected] = outputs(source, {"x": x})
        assert np.abs(reference - expected).max() < 0.1 * np.abs(expected).max()

    def test_the_largest_value_of_a_range_is_the_largest_of_the_type(self, net):
        graph = htp_export.quantize(net, {"head": "fp8"}, data=FEED).model.graph
        [first, weight] = [node for node in graph if node.op_type == "DequantizeLinear"]
        mean = next(node.inputs[0] for node in graph if node.op_type == "QuantizeLinear")
        tensor = htp_export.load(net).model.graph.initializers["head.weight"].const_value.numpy()
        assert np.allclose(weight.inputs[1].const_value.numpy(), np.abs(tensor).max(1) / 448)
        assert weight.inputs[0].dtype == first.inputs[0].dtype == E4M3
        assert (np.abs(weight.inputs[0].const_value.numpy().astype(np.float32)).max(1) == 448).all()
        proto = onnx.load(net)
        proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(str(mean.name)))
        largest = np.abs(ReferenceEvaluator(proto).run([str(mean.name)], FEED)[0]).max()
        assert np.allclose(first.inputs[1].const_value.numpy(), largest / 448)


class TestCasts:
    def test_those_of_several_calls_are_those_of_one(self, net, tmp_path):
        one = htp_export.quantize(net, {"first,act,norm": "fp16"}).model
        assert casts(one) == [("embedding", "FLOAT16"), ("layer_norm_float16", "FLOAT")]
        for order in (("first", "act,norm"), ("act,norm", "first")):
            part = htp_export.quantize(net, {order[0]: "fp16"}, tmp_path / "part.onnx")
            assert len(casts(part.model)) == 2
            two = htp_export.quantize(tmp_path / "part.onnx", {order[1]: "fp16"})
            assert casts(two.model) == casts(one)
            assert [node.outputs[0].name for node in two.model.graph] == [
                node.outputs[0].name for node in one.graph
            ]
            assert not two.tagged.untagged

    def test_a_border_between_types_of_16_bits_has_one(self, net):
        model = htp_export.quantize(net, {"first": "fp16", "act,norm": "bf16"}).model
        assert casts(model) == [
            ("embedding", "FLOAT16"),
            ("linear", "BFLOAT16"),
            ("layer_norm_bfloat16", "FLOAT"),
        ]

    def test_inputs_and_outputs_have_the_type_if_that_is_asked(self, tmp_path, net):
        x = torch.randn(2, 8)
        file = written(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)),
            (x,),
            tmp_path / "two.onnx",
            "dynamo",
            ["x"],
        )
        whole = htp_export.quantize(
            file, {".": {"precision": "fp16", "narrow_io": True}}, tmp_path / "made.onnx"
        )
        assert casts(whole.model) == []
        model = checked(tmp_path / "made.onnx")
        half = onnx.TensorProto.FLOAT16
        assert [
            each.type.tensor_type.elem_type for each in (*model.graph.input, *model.graph.output)
        ] == [half, half]
        last = htp_export.quantize(file, {"1": {"precision": "fp16", "narrow_io": True}}).model
        assert [last.graph.inputs[0].dtype.name, last.graph.outputs[0].dtype.name] == [
            "FLOAT",
            "FLOAT16",
        ]

    def test_weights_in_blocks_among_activations_of_16_bits_need_none(self, net, tmp_path):
        plan = {
            ".": {"precision": "int4", "format": "qdq", "activation": "float16", "narrow_io": True}
        }
        result = htp_export.quantize(net, plan, tmp_path / "made.onnx")
        checked(tmp_path / "made.onnx")
        assert casts(result.model) == []
        assert_tagged(net, tmp_path / "made.onnx", ".")
        assert_predicted(result, net, plan)
        two = htp_export.quantize(
            net, {".": "fp16", "second": {"precision": "int4", "activation": "float16"}}
        )
        assert casts(two.model) == [("linear_2_float16", "FLOAT")]
        [expected], [found] = outputs(net, FEED), outputs(tmp_path / "made.onnx", FEED)
        assert np.abs(found - expected).max() < 0.2 * np.abs(expected).max()


def attend(self: Any, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    """Attention of ONNX Runtime with a cache, without rotation."""
    length = key.shape[2] + x.shape[1]
    total = torch.full((), length, dtype=torch.int32)
    last = torch.full((x.shape[0],), length - 1, dtype=torch.int32)
    sizes = (x.shape[0], key.shape[1], length, key.shape[3])
    return torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [self.q(x), self.k(x), self.v(x), key, value, last, total],
        {"num_heads": 4, "kv_num_heads": 2},
        dtypes=[torch.float32] * 3,
        shapes=[(x.shape[0], x.shape[1], 64), sizes, sizes],
        version=1,
    )


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    source = tmp_path_factory.mktemp("attention") / "attention.onnx"
    example = (torch.randn(1, 5, 32), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))
    dims = {
        name: {axis: torch.export.Dim.DYNAMIC}
        for name, axis in (("x", 1), ("key", 2), ("value", 2))
    }
    net = spread(
        composed(attend, q=nn.Linear(32, 64), k=nn.Linear(32, 32), v=nn.Linear(32, 32)).eval()
    )
    htp_export.export(net, example, source, dynamic_shapes=dims, opset_version=21, verbose=False)
    return source


@pytest.mark.parametrize("per_channel", [True, False])
def test_caches_of_keys_and_values_are_stored_as_integers(per_channel, attention, tmp_path):
    source, made, empty = attention, tmp_path / "made.onnx", torch.zeros(1, 2, 0, 16)
    x = np.random.default_rng(0).standard_normal((1, 9, 32)).astype(np.float32)
    start = {"x": x, "key": empty.numpy(), "value": empty.numpy()}
    plan = {".": {"precision": "int8-cache", "per_channel": per_channel}}
    result = htp_export.quantize(source, plan, made, data=start)
    assert not result.tagged.untagged
    expected = outputs(source, start)
    first = {
        "x": x[:, :8],
        "key": empty.numpy().astype(np.int8),
        "value": empty.numpy().astype(np.int8),
    }
    _, key, value = outputs(made, first)
    assert key.dtype == value.dtype == np.int8
    assert key.shape == (1, 2, 8, 16)
    found, key, _ = outputs(made, {"x": x[:, 8:], "key": key, "value": value})
    assert 0 < np.abs(found - expected[0][:, 8:]).max() < 0.05 * np.abs(expected[0]).max()
    scales = next(
        node for node in result.model.graph if node.op_type == "GroupQueryAttention"
    ).inputs[12]
    steps = scales.const_value.numpy().reshape((1, 2, 1, 16) if per_channel else (1, 1, 1, 1))
    assert np.abs(key * steps - expected[1]).max() < 0.51 * steps.max()
    with pytest.raises(InputError, match=r"no operator of module .* takes int8-cache"):
        htp_export.quantize(made, plan, data=first)


@pytest.mark.slow
def test_a_decoder_with_a_cache_in_fp16_generates_the_same_tokens(tmp_path):
    from tests.decoders import DECODERS, generated_by_genai, prompt

    pytest.importorskip(
        "transformers.exporters", reason="transformers older than 5.23 has no exporters"
    )
    settings = [
        word for key, size in DECODERS["llama"].items() for word in ("--set", f"{key}={size}")
    ]
    task = ["--task", "text-generation-with-past", "--quiet", "--genai"]
    file = tmp_path / "fp32" / "model.onnx"
    assert main(["export", "llama", "--random-weights", *settings, *task, "-o", str(file)]) == 0
    expected = generated_by_genai(file.parent, prompt())
    before = len(casts(htp_export.load(file).model))
    whole: dict[str, Any] = {".": {"precision": "fp16", "narrow_io": True}}
    # 5 norms
    for name, plan, added in (
        ("whole", whole, 0),
        ("norms", {**whole, "class:LlamaRMSNorm": "fp32"}, 10),
    ):
        target = tmp_path / name / "model.onnx"
        shutil.copytree(file.parent, target.parent)
        made = htp_export.quantize(file, plan, target)
        assert len(casts(made.model)) == before + added
        cache = [value for value in made.model.graph.inputs if "past" in str(value.name)]
        assert {value.dtype for value in cache} == {ir.DataType.FLOAT16}
        assert generated_by_genai(target.parent, prompt()) == expected


BOTH = pytest.mark.parametrize("exporter", EXPORTERS)


@pytest.mark.long
@BOTH
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("int4", "int8"), ("fp16", "fp16")),
        *(
            slow("int8-dynamic", "int8"),
            slow("int8-dynamic", "fp16"),
            slow("int4", "fp16"),
            slow("fp16", "int8"),
        ),
    ],
)
def test_a_second_call_quantizes_what_the_first_one_left(first, second, exporter, tmp_path):
    torch.manual_seed(0)
    net = written(Net(), (torch.from_numpy(IDS),), tmp_path / "net.onnx", exporter, ["ids"])
    kwargs: dict[str, Any] = {"data": {"ids": IDS}}
    htp_export.quantize(net, {"table": first, "first": first}, tmp_path / "one.onnx", **kwargs)
    htp_export.quantize(tmp_path / "one.onnx", {"second": second}, tmp_path / "two.onnx", **kwargs)
    htp_export.quantize(tmp_path / "two.onnx", {"head": second}, tmp_path / "three.onnx", **kwargs)
    [expected], [found] = outputs(net, {"ids": IDS}), outputs(tmp_path / "three.onnx", {"ids": IDS})
    assert np.abs(found - expected).max() / np.abs(expected).max() < 0.5
    # ONNX's own inference cannot tell these
    for node in htp_export.load(tmp_path / "one.onnx").nodes:
        assert node.domain == "" or node.outputs[0].dtype is not None, node.name


def sized(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """The size of what one module makes is read by another module and by the root."""
    y = self.body(self.table(ids))
    return self.head(self.after(y).reshape(y.shape[0], y.shape[1], 8))


@pytest.mark.long
@BOTH
@pytest.mark.parametrize("chosen", ["body", "after", "head"])
def test_sizes_are_read_of_the_tensor_that_was_there(chosen, exporter, tmp_path):
    torch.manual_seed(0)
    sizes = open_sizes(exporter, ids={0: "batch", 1: "length"})
    after = Apply(lambda x: torch.relu(x.reshape(x.shape[0] * x.shape[1], 8)))
    layers = {"body": nn.Linear(8, 8), "after": after, "head": nn.Linear(8, 4)}
    net, model = (
        tmp_path / "net.onnx",
        spread(composed(sized, table=nn.Embedding(50, 8), **layers).eval()),
    )
    htp_export.export(
        model, (torch.from_numpy(IDS),), net, dynamo=exporter == "dynamo", verbose=False, **sizes
    )
    assert any(node.op_type == "Shape" for node in onnx.load(net).graph.node)
    htp_export.quantize(net, {chosen: "fp16"}, tmp_path / "half.onnx")
    assert_others_are_the_same(net, tmp_path / "half.onnx", chosen)
    graph = htp_export.load(tmp_path / "half.onnx")
    for node in graph.nodes:
        if node.op_type == "Shape" and chosen not in graph.owners_of(node):
            assert graph.inferred.dtype(node.inputs[0]).name in ("FLOAT", "INT64"), node.name
    [expected], [found] = outputs(net, {"ids": IDS}), outputs(tmp_path / "half.onnx", {"ids": IDS})
    assert np.allclose(found, expected, rtol=1e-2, atol=1e-2)
