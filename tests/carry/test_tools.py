"""Other tools, run on small models: the tags come through, and what they say is true."""

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import onnx.version_converter
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export import tools
from htp_export.capabilities.carry.adapting import adapter
from htp_export.errors import HtpExportError, InputError, ToolError
from htp_export.extras import required
from htp_export.files.model_files import write_model
from htp_export.format.tags import owners_of as owned_of
from tests.exporting import exported, exported_net
from tests.handmade import stripped
from tests.nets import NETS, Holding, composed, spread
from tests.truth import inexact, owners_of, untagged

pytestmark = [
    pytest.mark.filterwarnings("ignore")  # of the tools, to their own developers
]


def slow(*values: Any, **options: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow, **options)


PACKAGES = ("onnxslim", "onnxsim", "onnxoptimizer")
FLOAT_TOOLS = [
    *(pytest.param(name, {}, id=name) for name in PACKAGES),
    pytest.param("onnxscript", {}, id="onnxscript"),
    *(
        slow("onnxruntime", {"level": level}, id=f"onnxruntime-{level}")
        for level in ("basic", "extended")
    ),
    pytest.param("onnxruntime", {"level": "all"}, id="onnxruntime-all"),
    pytest.param("version_converter", {"opset": 21}, id="version_converter"),
    pytest.param("symbolic_shape_infer", {"auto_merge": True}, id="symbolic_shape_infer"),
]


class Attention(nn.Module):
    """Self-attention with named projections."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm, self.heads = nn.Linear(width, width), nn.LayerNorm(width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        weights = torch.softmax(q @ k.transpose(2, 3) / 8**0.5, -1)
        joined = (weights @ v).transpose(1, 2).reshape(x.shape)
        return self.norm(x + self.out(joined))


class Encoder(Holding, layers=nn.ModuleList(Attention() for _ in range(2))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module", params=["dynamo", slow("torchscript")])
def attention(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any, Path]:
    torch.manual_seed(0)
    model, kwargs = Encoder().eval(), {"x": torch.randn(2, 6, 32)}
    folder = tmp_path_factory.mktemp("attention")
    exported(model, kwargs, request.param, folder)
    return model, kwargs, folder / "model.onnx"


QUANTIZERS = [
    pytest.param("float16", {"keep_io_types": True}, id="float16"),
    pytest.param("quantize_dynamic", {}, id="quantize_dynamic"),
    pytest.param("quantize_static", {}, id="quantize_static"),
    pytest.param("matmul_nbits", {"block_size": 16}, id="matmul_nbits"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), [*FLOAT_TOOLS, *QUANTIZERS])
def test_nodes_have_their_owners_after_a_tool_and_names_show_what_it_was_given(
    name, options, attention, tmp_path
):
    """The adapter knows that it is the original; `carry` has to see it, and then finds the same without a run."""
    model, kwargs, path = attention
    if name == "quantize_static":
        [given] = htp_export.load(path).model.graph.inputs
        options = {"data": [{given.name: kwargs["x"].numpy()}]}
    result = getattr(tools, name)(path, tmp_path / "out.onnx", **options)
    written = onnx.load(tmp_path / "out.onnx")
    assert untagged(written) == []
    assert result.nodes == result.kept + sum(result.recovered.values())
    if name in {each.values[0] for each in QUANTIZERS}:
        # nothing is the root's in this model
        paths = {path for path, _ in model.named_modules()} - {""}
        assert {owner for node in written.graph.node for owner in owners_of(node)} <= paths
    else:
        assert inexact(model, kwargs, tmp_path / "out.onnx") == []
    carried = htp_export.carry(path, stripped(result.model))
    assert carried.unknown == []
    found, true = (
        [owned_of(node.metadata_props) for node in each.model.graph.all_nodes()]
        for each in (carried, result)
    )
    assert found == true


@pytest.fixture(scope="module", params=[slow("dynamo"), "torchscript"])
def convolutions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convolutions")
    exported_net("conv_bn_relu", request.param, folder, do_constant_folding=False)
    return folder / "model.onnx"


@pytest.mark.parametrize(("name", "options"), FLOAT_TOOLS)
def test_convolutions_are_exact_after_a_tool(name, options, convolutions, tmp_path):
    model, kwargs = NETS["conv_bn_relu"].build()
    getattr(tools, name)(convolutions, tmp_path / "out.onnx", **options)
    assert inexact(model, kwargs, tmp_path / "out.onnx") == []


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_layers_that_run_twice_in_a_row_keep_their_calls(exporter, tmp_path):
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        # a sum of one summand
        return self.head(torch.tanh(torch.stack([self.layer(self.layer(x))]).sum(0)))

    model = spread(composed(forward, layer=nn.Linear(8, 8), head=nn.Linear(8, 3)).eval(), 3)
    kwargs = {"x": torch.ones(2, 5, 8)}
    exported(model, kwargs, exporter, tmp_path)
    tagged = tools.onnxsim(tmp_path / "model.onnx", tmp_path / "out.onnx").tagged
    assert [
        sum(node.op_type == "Gemm" for node in tagged["layer"].call(k).nodes) for k in range(2)
    ] == [1, 1]
    assert htp_export.verify(model, tmp_path / "out.onnx", (), kwargs).ok


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_result_into_which_a_factor_went_is_not_that_of_the_layer(exporter, tmp_path):
    halved = composed(
        lambda self, x: torch.stack([self.layer(x) * 0.5, x]).sum(0), layer=nn.Linear(8, 8)
    )
    model, kwargs = spread(halved.eval(), 3), {"x": torch.ones(2, 4, 8)}
    exported(model, kwargs, exporter, tmp_path)
    for tool in (tools.onnxslim, tools.onnxsim):
        tool(tmp_path / "model.onnx", tmp_path / "out.onnx")
        assert htp_export.verify(model, tmp_path / "out.onnx", (), kwargs).ok
        assert inexact(model, kwargs, tmp_path / "out.onnx") == []


@pytest.mark.parametrize("tool", ["onnxslim", "onnxruntime"])
def test_a_division_by_one_that_a_tool_removed_leaves_its_tensor(tool, tmp_path):
    def block() -> nn.Module:  # as ResnetBlock2D of diffusers, whose output_scale_factor is 1
        return composed(lambda self, x: (x + self.fc(x)) / 1.0, fc=nn.Linear(4, 4))

    x = torch.randn(2, 3, 4)
    net = spread(nn.Sequential(block(), block(), nn.Linear(4, 3))).eval()
    exported(net, {"input": x}, "torchscript", tmp_path)
    made = getattr(tools, tool)(tmp_path / "model.onnx", tmp_path / "made.onnx")
    assert "Div" not in {node.op_type for node in made.model.graph}
    assert not made.fates
    assert not inexact(net, {"input": x}, tmp_path / "made.onnx")


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_equal_results_of_two_modules_are_those_of_each(exporter, tmp_path):
    """Both are outputs of the model: a tool computes them twice, or gives one of them back from the other."""

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part for head in (self.one, self.two) for part in head(x))

    heads = {
        name: composed(lambda self, x: (self.fc(x), x.sum(-1)), fc=nn.Linear(4, 4))
        for name in ("one", "two")
    }
    model, kwargs = spread(composed(forward, **heads).eval()), {"x": torch.randn(2, 4)}
    exported(model, kwargs, exporter, tmp_path)
    for tool in (tools.onnxslim, tools.onnxscript, htp_export.optimize):
        tool(tmp_path / "model.onnx", tmp_path / "out.onnx")
        assert htp_export.verify(model, tmp_path / "out.onnx", (), kwargs).ok
        assert inexact(model, kwargs, tmp_path / "out.onnx") == []
        assert {
            info.fate for info in htp_export.load(tmp_path / "out.onnx").hierarchy.values()
        } == {"computed"}


@pytest.mark.long
def test_a_name_of_another_tensor_is_found_before_a_reshape_that_does_nothing(tmp_path):
    """onnxsim folds the factor into the first weight, and calls the product as the convolution was called."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * 1.5
        return self.head(x.reshape(-1, *x.shape[1:]).relu()) + x.mean(1, keepdim=True)

    model = spread(composed(forward, embed=nn.Conv2d(3, 4, 1), head=nn.Conv2d(4, 2, 1)).eval())
    open_sizes = {"x": dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)}
    kwargs = {"x": torch.randn(2, 3, 4, 4)}
    exported(model, kwargs, "dynamo", tmp_path, dynamic_shapes=open_sizes)
    tagged = tools.onnxsim(tmp_path / "model.onnx", tmp_path / "out.onnx").tagged
    assert tagged["embed"].fate == "fused"
    assert htp_export.verify(model, tmp_path / "out.onnx", (), kwargs).ok


def onnxruntime_alone(given: Path, made: Path) -> onnx.ModelProto:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(made), 4
    onnxruntime.InferenceSession(str(given), options, providers=["CPUExecutionProvider"])
    return onnx.load(made)


@pytest.mark.long
@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(lambda given, _: required("onnxslim").slim(onnx.load(given)), id="onnxslim"),
        pytest.param(
            lambda given, _: onnx.version_converter.convert_version(onnx.load(given), 21),
            id="converter",
        ),
        pytest.param(onnxruntime_alone, id="onnxruntime"),
    ],
)
def test_with_a_map_the_model_before_is_not_needed(tool, attention, tmp_path):
    htp_export.embed_map(attention[2], tmp_path / "mapped.onnx")
    made = tool(tmp_path / "mapped.onnx", tmp_path / "made.onnx")
    one, other = htp_export.carry(tmp_path / "mapped.onnx", made), htp_export.carry(made)
    assert [n.metadata_props for n in one.model.graph] == [
        n.metadata_props for n in other.model.graph
    ]
    assert one.model.metadata_props == other.model.metadata_props
    assert one.to_dict() == other.to_dict()
    assert inexact(attention[0], attention[1], ir.to_proto(other.model)) == []


def test_a_fused_attention_belongs_to_all_that_it_computes(tmp_path):
    torch.manual_seed(0)
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=99,
        attn_implementation="eager",
    )  # fmt: skip
    kwargs = {
        "input_ids": torch.randint(3, 99, (1, 8)),
        "attention_mask": torch.ones(1, 8, dtype=torch.long),
    }
    exported(BertModel(config).eval(), kwargs, "torchscript", tmp_path, opset_version=17)
    result = tools.onnxruntime_transformers(
        tmp_path / "model.onnx", num_heads=4, hidden_size=32, opt_level=0
    )
    fused = [node.metadata_props for node in result.model.graph if node.op_type == "Attention"]
    assert len(fused) == 1, "ONNX Runtime fuses no attention any more: take another model"
    self_attention = "encoder.layer.0.attention.self"
    parts = {self_attention, *(f"{self_attention}.{part}" for part in ("query", "key", "value"))}
    # the model itself makes the mask that went in too
    assert set(json.loads(fused[0]["htp.owners"])) == {"", *parts}
    assert fused[0]["htp.reason"] == "fused"


def test_own_layouts_of_onnxruntime_belong_to_the_convolutions_that_they_serve(tmp_path):
    exported_net("conv_bn_relu", "dynamo", tmp_path)
    result = tools.onnxruntime(tmp_path / "model.onnx")
    said = [(node.op_type, owners_of(ir.to_proto(node))) for node in result.model.graph]
    if ("ReorderOutput", ("2",)) not in said:
        pytest.skip("this processor has no layout of its own")
    assert said == [
        ("Conv", ("0", "1", "2")),
        ("ReorderOutput", ("2",)),
        ("Conv", ("3",)),
        ("ReorderOutput", ("3",)),
    ]


def test_quantizers_belong_to_the_modules_that_they_serve(tmp_path):
    exported_net("siblings", "dynamo", tmp_path)
    _, kwargs = NETS["siblings"].build()
    feeds = {name: tensor.numpy() for name, tensor in kwargs.items()}
    before = htp_export.load(tmp_path / "model.onnx")
    tools.quantize_static(before, tmp_path / "out.onnx", data=[feeds])
    written = onnx.load(tmp_path / "out.onnx")
    assert untagged(written) == []
    by_output = {output: node for node in written.graph.node for output in node.output}
    # what is still there belongs to whom it belonged, and its weights' quantizers with it
    for node in before.nodes:
        same = by_output.get(str(node.outputs[0].name))
        if same is None or same.op_type != node.op_type:
            continue
        assert owners_of(same) == before.owners_of(node)
        for read in same.input[1:]:
            if read in by_output and by_output[read].op_type == "DequantizeLinear":
                assert owners_of(by_output[read]) == before.owners_of(node)


class Scaled(Holding, fc=nn.Linear(6, 4), scale=nn.Parameter(torch.rand(4) + 2)):
    """A linear layer whose scale OnnxSlim takes into its weights, leaving the layer's name to the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * self.fc(x.sin())).permute(0, 2, 1).tanh()


def test_a_name_that_was_taken_over_is_seen_through_a_transposition(tmp_path):
    path = tmp_path / "model.onnx"
    exported(Scaled().eval(), {"x": torch.randn(2, 3, 6)}, "dynamo", tmp_path)
    result = tools.onnxslim(path, tmp_path / "out.onnx")
    assert "Mul" not in {node.op_type for node in result.model.graph}
    after = htp_export.load(tmp_path / "out.onnx")
    assert (after["fc"].fate, after.hierarchy["fc"].fused_with) == ("fused", ("",))
    assert {node.op_type: after.owners_of(node) for node in after.model.graph}["Gemm"] == ("", "fc")
    assert htp_export.compare(path, tmp_path / "out.onnx").ok


class FlattensTwice(Holding, one=nn.Flatten(), other=nn.Flatten()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).tanh() @ self.other(x).mT.sin()


def test_constants_that_a_rule_forgets_to_give_to_the_graph_are_there(tmp_path):
    """onnxscript 0.7's rule for Flatten, where two read one tensor."""
    exported(
        FlattensTwice().eval(), {"x": torch.randn(2, 3, 4)}, "dynamo", tmp_path, optimize=False
    )
    path = tmp_path / "model.onnx"
    model = htp_export.load(path).model
    for node in list(model.graph):
        if node.op_type == "Reshape":  # torch writes Flatten in some cases, and these in others
            node.op_type, node.domain = "Flatten", ""
            node.resize_inputs(1)
            node.attributes.clear()
    write_model(model, path)
    tools.onnxscript(path, tmp_path / "out.onnx")
    assert htp_export.compare(path, tmp_path / "out.onnx").ok
    assert htp_export.optimize(path, level="fused", verify=True).rolled_back == {}


class Residual(Holding, first=nn.Conv2d(3, 6, 3, padding=1), second=nn.Conv2d(6, 6, 3, padding=1)):
    """ONNX Runtime works on these in a layout of its own, with more channels than there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.first(x))
        return (y + self.second(y)).mean((2, 3))


def test_what_is_made_in_another_layout_is_not_taken_for_the_tensor_itself(tmp_path):
    exported(Residual().eval(), {"x": torch.randn(1, 3, 8, 8)}, "dynamo", tmp_path)
    tools.onnxruntime(tmp_path / "model.onnx", tmp_path / "out.onnx", level="all")
    result = htp_export.compare(tmp_path / "model.onnx", tmp_path / "out.onnx")
    assert (result.ok, result.modules[""].status) == (True, "agrees")


@pytest.mark.parametrize("exporter", [slow("dynamo"), "torchscript"])
def test_weights_that_a_quantizer_transposes_may_have_notes(exporter, tmp_path):
    model = nn.Sequential(nn.Linear(3, 5), nn.Softmax(-1)).eval()
    exported(model, {"input": torch.randn(4, 3)}, exporter, tmp_path)
    before = htp_export.load(tmp_path / "model.onnx").model.graph.initializers
    result = tools.quantize_dynamic(tmp_path / "model.onnx")
    assert "MatMulInteger" in {node.op_type for node in result.model.graph}
    notes = {name: dict(value.metadata_props) for name, value in before.items()}
    kept = tools.onnxscript(tmp_path / "model.onnx").model.graph.initializers
    assert {name: dict(value.metadata_props) for name, value in kept.items()} == notes


def test_tools_work_on_files_with_external_data(attention, tmp_path):
    loaded = htp_export.load(attention[2])
    loaded.save(tmp_path / "model.onnx", external_data="weights.bin")
    result = tools.onnxslim(tmp_path / "model.onnx")
    assert result.recovered["tensor"] > 0
    assert inexact(attention[0], attention[1], ir.to_proto(result.model)) == []


def test_nodes_have_their_own_names_again(attention):
    nameless = htp_export.load(attention[2]).model.clone()
    for node in nameless.graph:
        node.name = None
    result = tools.onnxscript(nameless)
    assert not any(node.name and node.name.startswith("htp_export/") for node in result.model.graph)


class AroundBranches(Holding, first=nn.Linear(8, 8), yes=nn.Linear(8, 8), no=nn.Linear(8, 8)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.cond(x.sum() > 0, lambda x: self.yes(x).tanh(), lambda x: -self.no(x), (x,))  # type: ignore[no-any-return]


@pytest.mark.long
def test_tensors_of_branches_that_onnxruntime_names_as_those_outside_get_other_names(tmp_path):
    net, x = spread(AroundBranches()).eval(), torch.randn(2, 5, 8)
    exported(net, {"x": x}, "dynamo", tmp_path)
    tools.onnxruntime(tmp_path / "model.onnx", tmp_path / "fast.onnx", level="basic")
    assert "Gemm" in {node.op_type for node in htp_export.load(tmp_path / "fast.onnx").nodes}
    assert htp_export.compare(tmp_path / "model.onnx", tmp_path / "fast.onnx", {"x": x.numpy()}).ok


def test_a_tool_that_fails_is_named_and_leaves_nothing(attention, tmp_path):
    with pytest.raises(ToolError, match="float16 failed on this model: TypeError") as failed:
        tools.float16(attention[2], tmp_path / "out.onnx", op_block_list=3)
    assert (failed.value.tool, type(failed.value.__cause__)) == ("float16", TypeError)
    assert not list(tmp_path.iterdir())


class TurnsPoints(Holding, matrix=nn.Linear(8, 9)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(self.matrix(x.amax(2)).view(-1, 3, 3) + torch.eye(3), x[:, :3])


def test_shape_inference_that_fails_leaves_nothing_where_the_program_runs(tmp_path, monkeypatch):
    exported(TurnsPoints().eval(), {"x": torch.randn(2, 8, 5)}, "dynamo", tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(HtpExportError, match="Incomplete symbolic shape inference"):
        tools.symbolic_shape_infer(tmp_path / "model.onnx")
    assert list((tmp_path / "here").iterdir()) == []


def test_a_tool_that_makes_no_valid_model_is_named(attention, tmp_path):
    def twice(given: Path, made: Path) -> onnx.ModelProto:
        model = onnx.load(given)
        model.graph.node.append(model.graph.node[-1])
        return model

    with pytest.raises(
        ToolError, match=r"twice made a model of this one that is not valid: .*redeclared"
    ):
        adapter(twice)(attention[2], tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


def test_a_tool_that_takes_optional_inputs_for_constants_is_told_from_one_that_is_broken(tmp_path):
    exported(nn.Linear(4, 4).eval(), {"input": torch.randn(2, 3, 4)}, "dynamo", tmp_path)
    adapted = htp_export.lora.insert(tmp_path / "model.onnx", ".").model
    with pytest.raises(
        ToolError,
        match=r"input 'lora_A.weight' any more: it took the default value, .*for a constant",
    ):
        tools.onnxslim(adapted, tmp_path / "slim.onnx")
    assert not (tmp_path / "slim.onnx").exists()


def test_a_library_that_is_not_installed_is_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxslim", None)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
    htp_export.export(net, (torch.randn(2, 4),), tmp_path / "model.onnx", verbose=False)
    with pytest.raises(InputError, match=r'needs onnxslim; .* pip install "htp-export\[tools\]"'):
        tools.onnxslim(tmp_path / "model.onnx", tmp_path / "slim.onnx")
    assert not (tmp_path / "slim.onnx").exists()
