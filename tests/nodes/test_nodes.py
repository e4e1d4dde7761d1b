"""``nodes``: nodes, modules, parameters and initializers, each with the others that belong to it."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from rich.console import Console
from torch import nn

import htp_export
from htp_export.capabilities.nodes.map_result import DRAWN_COLUMNS, ModelMap
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.model.module_facts import stored_tensor
from htp_export.model.recipes import recipe_of
from htp_export.model.regions import all_values
from htp_export.reporting.row_table import MOST_ROWS, RowTable
from tests import handmade
from tests.exporting import BOTH, quick
from tests.extract.test_cutting import exported_to
from tests.nets import EXPORTERS, NETS, Holding, spread, x


class Net(nn.Module):
    """Weights that exporters keep, transpose, share, join and merge."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc, self.up = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 8)
        self.rnn, self.conv, self.bn = nn.LSTM(8, 3), nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)
        self.down, self.head = nn.Linear(5, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.rnn(self.up(self.fc(self.emb(ids)).relu()))[0]
        return self.head(self.down(self.bn(self.conv(hidden.transpose(1, 2))).transpose(1, 2)))


@pytest.fixture(scope="module")
def net():
    return spread(Net()).eval()


@pytest.fixture(scope="module", params=EXPORTERS)
def file(request, net, tmp_path_factory):
    path = tmp_path_factory.mktemp("map") / "net.onnx"
    return exported_to(path, net, {"ids": torch.arange(8).reshape(1, 8)}, request.param)


@pytest.fixture(scope="module")
def mapped(file):
    return htp_export.nodes(file)


def uses(mapped: ModelMap) -> dict[str, set[str]]:
    """Parameter → what was done to it, of each initializer that holds it."""
    return {
        name: {" ".join(use.how) for use in each.initializers}
        for name, each in mapped.parameters.items()
    }


class TestNodes:
    def test_a_node_has_its_operator_modules_reason_parameters_and_tensors(self, mapped):
        [node] = [
            node for node in mapped.nodes if "up" in node.modules and node.operator == "MatMul"
        ]
        assert node.modules == ("up",)
        assert node.reason in ("scope", "flow")
        assert [str(use) for use in node.parameters] == ["up.weight (transposed)"]
        assert [use.initializer for use in node.parameters] == [node.inputs[1]]
        assert len(node.outputs) == 1
        assert node.inside == ""

    def test_tied_parameters_have_the_name_of_the_module_that_reads_them(self, mapped):
        read = {
            node.modules: [str(use) for use in node.parameters]
            for node in mapped.nodes
            if node.parameters
        }
        assert read["emb",] == ["emb.weight"]
        assert read["head",] == ["head.weight (transposed)"]

    def test_a_fused_node_reads_the_parameters_of_all_its_modules(self, mapped):
        [node] = [node for node in mapped.nodes if node.operator == "Conv"]
        assert node.modules == ("conv", "bn")
        assert {use.name for use in node.parameters} == {
            "conv.weight",
            "conv.bias",
            "bn.weight",
            "bn.bias",
        }
        assert {use.how for use in node.parameters} == {("merged",)}

    def test_the_lines_of_python_are_there_where_the_exporter_wrote_them(self, mapped):
        [node] = [node for node in mapped.nodes if node.operator == "Relu"]
        for line in node.stack[-1:]:
            assert (Path(line.file).name, ".relu()" in line.code) == ("test_nodes.py", True)
        assert Path(node.source.rpartition(":")[0]).name == "test_nodes.py"

    def test_calls_are_those_of_modules_that_ran_several_times(self, tmp_path):
        mapped = htp_export.nodes(handmade.called_twice())
        assert {node.name or node.outputs[0]: node.calls for node in mapped.nodes if node.calls}
        for node in mapped.nodes:
            assert all(mapped.modules[path].calls > 1 for path in node.calls)


class TestParameters:
    def test_every_parameter_says_what_was_done_to_it(self, mapped):
        assert uses(mapped) == {
            "emb.weight": {"", "transposed"},
            "fc.weight": {"transposed"},
            "fc.bias": {""},
            "up.weight": {"transposed"},
            "up.bias": {""},
            "rnn.weight_ih_l0": {"reordered reshaped"},
            "rnn.weight_hh_l0": {"reordered reshaped"},
            "rnn.bias_ih_l0": {"reordered joined reshaped"},
            "rnn.bias_hh_l0": {"reordered joined reshaped"},
            "conv.weight": {"merged"},
            "conv.bias": {"merged"},
            "bn.weight": {"merged"},
            "bn.bias": {"merged"},
            "down.weight": {"transposed"},
            "down.bias": {""},
            "head.weight": {"", "transposed"},
        }

    def test_tied_parameters_stand_under_each_name(self, mapped):
        first, tied = mapped.parameters["emb.weight"], mapped.parameters["head.weight"]
        assert (first.tied, tied.tied) == ("", "emb.weight")
        assert first.initializers == tied.initializers
        assert [node.modules for node in first.nodes] == [("emb",), ("head",)]

    def test_modules_parameters_and_initializers_name_each_other(self, mapped, net):
        assert list(mapped.modules) == [name for name, _ in net.named_modules()]
        assert mapped.modules["up"].parameters == ("up.weight", "up.bias")
        assert [node.operator for node in mapped.modules["up"].nodes] == ["MatMul", "Add"]
        [use] = mapped.parameters["up.weight"].initializers
        weight = mapped.initializers[use.name]
        assert (weight.shape, weight.dtype) == ((4, 8), "float32")
        assert [each.name for each in weight.parameters] == ["up.weight"]
        assert (
            weight.nodes == mapped.parameters["up.weight"].nodes == mapped.modules["up"].nodes[:1]
        )

    def test_matrices_of_a_cell_that_are_alike_are_told_apart(self, tmp_path):
        file = exported_to(
            tmp_path / "m.onnx", spread(nn.LSTM(3, 3)).eval(), {"input": x(2, 1, 3)}, "torchscript"
        )
        found = htp_export.nodes(file)
        assert uses(found)["weight_ih_l0"] == {"reordered reshaped"}
        assert (
            found.parameters["weight_ih_l0"].initializers
            != found.parameters["weight_hh_l0"].initializers
        )

    @pytest.mark.long
    @BOTH
    def test_the_directions_of_a_recurrent_layer_are_joined(self, exporter, tmp_path):
        model = spread(nn.LSTM(3, 4, num_layers=2, bidirectional=True)).eval()
        file = exported_to(tmp_path / "m.onnx", model, {"input": x(5, 2, 3)}, exporter)
        found = htp_export.nodes(file)
        assert uses(found) == {
            name: {"reordered reshaped joined" if "weight" in name else "reordered joined reshaped"}
            for name in dict(model.named_parameters())
        }
        [kept] = found.parameters["weight_ih_l0"].initializers
        assert [use.name for use in found.initializers[kept.name].parameters] == [
            "weight_ih_l0",
            "weight_ih_l0_reverse",
        ]

    def test_parameters_that_nothing_reads_are_in_no_initializer(self, tmp_path):
        model = nn.Sequential(nn.Linear(3, 3), nn.Identity())
        model.register_parameter("unused", nn.Parameter(torch.ones(7)))
        mapped = htp_export.nodes(
            exported_to(
                tmp_path / "m.onnx", spread(model).eval(), {"input": x(2, 3)}, "torchscript"
            )
        )
        assert mapped.parameters["unused"].initializers == ()
        assert mapped.parameters["unused"].nodes == ()

    def test_a_folded_table_is_in_the_tensor_that_it_was_folded_into(self, tmp_path):
        class Positions(Holding, table=nn.Embedding(8, 4)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.table(torch.arange(5))

        file = exported_to(
            tmp_path / "m.onnx", spread(Positions()).eval(), {"x": x(2, 5, 4)}, "torchscript"
        )
        htp_export.optimize(file, tmp_path / "folded.onnx")
        assert uses(htp_export.nodes(tmp_path / "folded.onnx")) == {
            "table.weight": {"sliced reshaped"}
        }

    def test_equal_weights_that_are_stored_once_are_those_of_both_modules(self, tmp_path):
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).eval()
        model[2].load_state_dict(model[0].state_dict())
        file = exported_to(tmp_path / "m.onnx", model, {"input": x(2, 3)}, "torchscript")
        htp_export.optimize(file, tmp_path / "small.onnx")
        mapped = htp_export.nodes(tmp_path / "small.onnx")
        read = {node.modules: [str(use) for use in node.parameters] for node in mapped.nodes}
        assert read["0",] == ["0.weight", "0.bias"]
        assert read["2",] == ["2.weight", "2.bias"]

    @BOTH
    def test_of_equal_weights_with_one_shape_each_is_that_of_its_name(self, exporter, tmp_path):
        # weights of ones, biases of zeros
        model = nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.LayerNorm(4)).eval()
        mapped = htp_export.nodes(
            exported_to(tmp_path / "m.onnx", model, {"input": x(2, 4)}, exporter)
        )
        [kept] = mapped.parameters["2.weight"].initializers
        assert kept.how == ()
        assert kept == mapped.parameters["0.weight"].initializers[0]
        assert {use.name for use in mapped.parameters["2.bias"].initializers}.isdisjoint(
            {kept.name}
        )

    def test_weights_in_a_file_that_does_not_name_parameters_are_named_as_they_are(self):
        model = handmade.encoder()
        assert "htp.parameters" not in model.metadata_props
        mapped = htp_export.nodes(model)
        assert not mapped.from_pytorch
        assert mapped.parameters
        assert all(
            each.initializers == (each.initializers[0],) for each in mapped.parameters.values()
        )
        assert "does not say" in str(mapped)


VALUES = [
    "cells", "child_of_two_parents", "conv_bn_relu", "equal_siblings", "lstm", "modules_in_branches",
    "multihead_attention", "nested_sequentials", "tied_weights", "transformer_encoder", "two_names", "two_parents",
    "weight_norm",
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", quick(VALUES, "conv_bn_relu", "tied_weights"))
def test_what_is_said_of_a_parameter_is_true_of_its_values(name, exporter, shared_files):
    """Initializers that are a parameter as it is, or transposed, have its numbers."""
    if exporter in NETS[name].skip:
        pytest.skip("torch does not export it")
    model, _ = NETS[name].build()
    file = shared_files.net(name, exporter)
    mapped, tagged = htp_export.nodes(file), htp_export.load(file)
    values = {value.name: value for graph in tagged.model.graphs() for value in all_values(graph)}
    state = dict(model.named_parameters(remove_duplicate=False))
    assert list(mapped.parameters) == [each for each in state if each in mapped.parameters]
    for parameter in mapped.parameters.values():
        for use in parameter.initializers:
            tensor = stored_tensor(values[use.name])
            assert tensor is not None
            wanted = state[parameter.name].detach().numpy()
            if use.how in ((), ("transposed",)):
                np.testing.assert_array_equal(
                    tensor.numpy(), wanted.T if use.how else wanted, err_msg=str(parameter)
                )


@BOTH
@pytest.mark.parametrize("name", ["two_parents", "two_names", "child_of_two_parents"])
def test_parameters_of_a_module_with_several_names_are_found_under_the_first(
    name, exporter, shared_files
):
    """torch names an initializer after any of them."""
    parameters = htp_export.nodes(shared_files.net(name, exporter)).parameters
    assert parameters
    for parameter in parameters.values():
        ways = {use.how for use in parameter.initializers}
        assert ways
        assert ways <= {(), ("transposed",)}, parameter.name


class TestOtherFiles:
    def test_what_other_nodes_only_move_is_read_behind_them(self):
        weight = handmade.weight("fc.weight")
        turned = handmade.tagged_node("Transpose", [weight], "fc", "turned")
        cast = handmade.tagged_node("Cast", [turned.outputs[0]], "fc", "cast")
        cast.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT16)
        given = handmade.value("x")
        product = handmade.tagged_node("Mul", [given, cast.outputs[0]], "fc", "y")
        mapped = htp_export.nodes(
            handmade.model([given], [turned, cast, product], [weight], MODULES)
        )
        read = {node.operator: [str(use) for use in node.parameters] for node in mapped.nodes}
        assert read == {
            "Transpose": ["fc.weight"],
            "Cast": ["fc.weight (transposed)"],
            "Mul": ["fc.weight (transposed, cast)"],
        }

    def test_nodes_of_functions_read_the_weights_of_each_call(self, tmp_path):
        block = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())  # noqa: E731 - the same class each time
        model = spread(nn.Sequential(block(), block())).eval()
        file = exported_to(tmp_path / "flat.onnx", model, {"input": x(2, 3, 4)}, "torchscript")
        htp_export.functions(file, ["0", "1"], tmp_path / "nested.onnx")
        flat, nested = htp_export.nodes(file), htp_export.nodes(tmp_path / "nested.onnx")
        assert uses(nested) == uses(flat)
        [product] = [node for node in nested.nodes if node.operator == "MatMul"]
        assert product.inside.startswith("htp::")
        assert product.modules == ("0.0", "1.0")
        assert [str(use) for use in product.parameters] == [
            "0.0.weight (transposed)",
            "1.0.weight (transposed)",
        ]
        calls = [node for node in nested.nodes if node.operator.startswith("htp::")]
        assert [(node.reason, node.parameters) for node in calls] == [("function", ())] * 2
        assert [node.modules for node in nested.parameters["1.0.weight"].nodes] == [("0.0", "1.0")]

    @pytest.mark.long
    def test_nodes_in_branches_say_which_node_holds_them(self, shared_files):
        mapped = htp_export.nodes(shared_files.net("modules_in_branches", "dynamo"))
        [holder] = [node for node in mapped.nodes if node.operator == "If"]
        inner = [node for node in mapped.nodes if node.inside]
        assert {node.inside for node in inner} == {holder.name}
        read = {
            node.modules: {str(use) for use in node.parameters}
            for node in inner
            if node.operator == "Gemm"
        }
        assert read["block.fc",] == {"block.fc.weight", "block.fc.bias"}

    def test_an_optimized_file_names_the_parameters_that_were_joined(self, tmp_path):
        class Attention(Holding, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (self.q(x) * self.k(x)).tanh() + self.v(x)

        file = exported_to(
            tmp_path / "m.onnx", spread(Attention()).eval(), {"x": x(2, 5, 8)}, "torchscript"
        )
        result = htp_export.optimize(file, passes=["merge_parallel_projections"], level="tolerant")
        mapped = htp_export.nodes(result.tagged)
        [product] = [node for node in mapped.nodes if node.operator in ("MatMul", "Gemm")]
        assert product.modules == ("q", "k", "v")
        assert [str(use) for use in product.parameters] == [
            f"{name}.weight (transposed, joined)" for name in "qkv"
        ]
        assert uses(mapped) == {
            **{f"{name}.weight": {"transposed joined"} for name in "qkv"},
            **{f"{name}.bias": {"joined"} for name in "qkv"},
        }

    @pytest.mark.parametrize(
        ("precision", "operator"), [("int4", "MatMulNBits"), ("int8", "MatMul")]
    )
    def test_a_quantized_weight_is_that_of_its_parameter_and_scales_are_not(
        self, precision, operator, tmp_path
    ):
        model = spread(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 64))).eval()
        file = exported_to(tmp_path / "m.onnx", model, {"input": x(2, 3, 32)}, "torchscript")
        given = {str(htp_export.load(file).model.graph.inputs[0].name): x(2, 3, 32).numpy()}
        result = htp_export.quantize(file, {"**": precision}, data=[given])
        mapped = htp_export.nodes(result.tagged)
        for name in ("0.weight", "2.weight"):
            [use] = mapped.parameters[name].initializers
            assert "quantized" in use.how, use
            assert mapped.initializers[use.name].dtype in ("int8", "uint8")
            assert operator in {
                node.operator.rpartition("::")[2] for node in mapped.parameters[name].nodes
            }
        assert all(len(each.initializers) == 1 for each in mapped.parameters.values())

    def test_a_weight_that_another_tool_quantized_is_that_of_its_parameter(self, tmp_path):
        model = spread(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 64))).eval()
        file = exported_to(tmp_path / "m.onnx", model, {"input": x(2, 3, 32)}, "torchscript")
        quantization = pytest.importorskip("onnxruntime.quantization")
        quantization.quantize_dynamic(file, tmp_path / "q.onnx", per_channel=True)
        carried = htp_export.carry(file, tmp_path / "q.onnx").tagged
        weights = {f"{name}.weight": {"quantized"} for name in "02"}
        assert uses(htp_export.nodes(carried)) == {
            **weights,
            **{f"{name}.bias": {""} for name in "02"},
        }
        [name] = [name for name in carried.model.graph.initializers if name.endswith("_quantized")][
            :1
        ]
        assert recipe_of(carried.model.graph.initializers[name]) == [
            "computed",
            "0.weight",
            "another tool",
        ]

    def test_what_another_tool_computed_has_the_parameters_of_the_modules_that_read_it(
        self, tmp_path
    ):
        ort = pytest.importorskip("onnxruntime")
        model = spread(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
        ).eval()
        file = tmp_path / "m.onnx"
        htp_export.export(model, (x(1, 3, 8, 8),), file, dynamo=False, do_constant_folding=False, verbose=False,
                          training=torch.onnx.TrainingMode.PRESERVE)  # fmt: skip
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(tmp_path / "folded.onnx")
        ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        found = uses(htp_export.nodes(htp_export.carry(file, tmp_path / "folded.onnx").tagged))
        merged = {f"{name}.{part}": {"merged"} for name in "01" for part in ("weight", "bias")}
        assert found == {**merged, "3.weight": {""}, "3.bias": {""}}

    def test_a_quantized_bias_of_32_bits_is_that_of_its_parameter(self, tmp_path):
        file = exported_to(
            tmp_path / "m.onnx",
            spread(nn.Conv2d(3, 8, 3)).eval(),
            {"input": x(1, 3, 8, 8)},
            "torchscript",
        )
        model = ir.load(file)
        bias = model.graph.initializers.pop("bias")
        scale = ir.Value(name="bias_quantized_scale", const_value=ir.tensor(np.float32(0.01)))
        levels = np.int32(bias.const_value.numpy() * 100)
        quantized = ir.Value(
            name="bias_quantized", const_value=ir.tensor(levels, name="bias_quantized")
        )
        model.graph.initializers.update({str(value.name): value for value in (scale, quantized)})
        node = ir.node("DequantizeLinear", [quantized, scale])
        [reader] = [use.node for use in bias.uses()]
        model.graph.insert_before(reader, node)
        reader.replace_input_with(2, node.outputs[0])
        found = htp_export.nodes(htp_export.carry(file, model).tagged)
        assert uses(found) == {"weight": {""}, "bias": {"quantized"}}


class TestFind:
    def test_a_node_is_found_by_name_by_tensor_and_by_index_in_the_file(self, file, mapped):
        proto = onnx.load(file, load_external_data=False)
        for index, node in enumerate(proto.graph.node):
            found = mapped[node.name]
            assert (found.name, found.index) == (node.name, index)
            assert mapped[index] is found
            assert all(mapped[name] is found for name in node.output)
            tensors = {tensor.name: tensor for tensor in mapped.find(node.name).tensors}
            assert tensors.keys() == {*filter(None, node.input), *node.output}
            for name, tensor in tensors.items():
                readers = [each.name for each in proto.graph.node if name in each.input]
                assert [each.name for each in tensor.consumers] == readers
                makers = [each.name for each in proto.graph.node if name in each.output]
                assert [each.name for each in tensor.producers] == makers
                assert tensor.is_output == (name in {out.name for out in proto.graph.output})

    def test_an_input_and_a_weight_have_the_nodes_that_read_them(self, file, mapped):
        [name] = [value.name for value in onnx.load(file).graph.input]
        given = mapped.find(name)
        assert given.summary == f"{name} is an input of the model"
        assert not given.nodes
        assert [node.modules for node in given.tensors[0].consumers] == [("emb",)]
        use = mapped.parameters["up.bias"].initializers[0]
        weight = mapped.find(use.name)
        assert weight.tensors[0].kind == "stored"
        assert weight.tensors[0].parameters == ("up.bias",)
        with pytest.raises(InputError, match="no node computes it"):
            mapped[name]

    def test_what_is_not_there_is_told_with_what_is_near(self, mapped):
        with pytest.raises(InputError, match=r"no node 100000 in the graph; it has \d+ nodes"):
            mapped[100_000]
        name = mapped.nodes[0].name
        with pytest.raises(InputError, match=f"nearest: .*{re.escape(repr(name))}"):
            mapped[name + "x"]
        with pytest.raises(InputError, match="it is a module with 2 nodes: select it"):
            mapped["up"]

    def test_nodes_of_a_map_are_iterated(self, mapped):
        assert list(mapped) == list(mapped.nodes)

    def test_the_command_answers_about_one_node(self, file, mapped, capsys):
        [node] = [
            node for node in mapped.nodes if "up" in node.modules and node.operator == "MatMul"
        ]
        for asked in (node.name, node.outputs[0], str(node.index)):
            main(["nodes", str(file), "--node", asked])
            printed = capsys.readouterr().out
            assert "up  Linear" in printed
            assert f"node {node.index} of the graph" in printed
            assert "up.weight (transposed)" in printed
            main(["nodes", str(file), "--node", asked, "--json"])
            [data] = json.loads(capsys.readouterr().out)["nodes"]
            assert (data["name"], data["index"]) == (node.name, node.index)

    def test_tensors_of_functions_are_apart(self, tmp_path):
        block = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())  # noqa: E731 - the same class each time
        model = spread(nn.Sequential(block(), block())).eval()
        file = exported_to(tmp_path / "flat.onnx", model, {"input": x(2, 3, 4)}, "torchscript")
        htp_export.functions(file, ["0", "1"], tmp_path / "nested.onnx")
        mapped = htp_export.nodes(tmp_path / "nested.onnx")
        [product] = [node for node in mapped.nodes if node.operator == "MatMul"]
        kinds = {tensor.name: tensor.kind for tensor in mapped.find(product.name).tensors}
        assert kinds == {**dict.fromkeys(product.inputs, "input"), product.outputs[0]: "computed"}
        [name] = [value.name for value in onnx.load(tmp_path / "nested.onnx").graph.input]
        assert mapped.find(name).tensors[0].kind == "model input"

    @pytest.mark.parametrize("columns", [60, 80, 132])
    def test_a_table_in_a_terminal_fits_its_width_and_says_how_many_rows_are_left(
        self, columns, shared_files
    ):
        mapped = htp_export.nodes(shared_files.net("transformer_encoder", "torchscript"))
        rows = [*mapped.nodes] * 3
        console = Console(width=columns, force_terminal=True, color_system=None, file=io.StringIO())
        console.print(RowTable(DRAWN_COLUMNS["nodes"], rows, lambda more: f"{more} more"))
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= columns
        assert lines[-1] == f"{len(rows) - MOST_ROWS} more"
        assert lines[0].split()[:3] == ["node", "operator", "modules"]
        assert lines[1].startswith(mapped.nodes[0].name[:5])

    def test_a_table_in_a_pipe_has_all_rows_and_whole_words(self, shared_files, capsys):
        file = shared_files.net("transformer_encoder", "torchscript")
        mapped = htp_export.nodes(file)
        main(["nodes", str(file)])
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1 : 1 + len(mapped.nodes)]] == [
            node.name for node in mapped.nodes
        ]


MODULES = [
    htp_export.ModuleInfo("", "net.Net", 1, "computed"),
    htp_export.ModuleInfo("fc", "net.Fc", 1, "computed"),
]


class TestForms:
    def test_a_selection_has_the_modules_inside_with_their_nodes_and_parameters(self, file):
        mapped = htp_export.nodes(file, select=["rnn", "head"])
        assert list(mapped.modules) == ["rnn", "head"]
        assert {module for node in mapped.nodes for module in node.modules} == {"rnn", "head"}
        # tied: it is read
        assert {name.partition(".")[0] for name in mapped.parameters} == {"rnn", "emb", "head"}
        assert {node.modules for node in mapped.parameters["emb.weight"].nodes} == {("head",)}

    def test_plain_data_is_json_and_nodes_have_their_names(self, mapped):
        data = json.loads(json.dumps(mapped.to_dict()))
        assert set(data) == {
            "nodes",
            "modules",
            "parameters",
            "initializers",
            "from_pytorch",
            "notes",
            "tags",
        }
        assert [node["name"] for node in data["nodes"]] == [node.name for node in mapped.nodes]
        [use] = mapped.parameters["up.weight"].initializers
        assert data["parameters"]["up.weight"] == {
            "name": "up.weight",
            "module": "up",
            "shape": [8, 4],
            "tied": "",
            "initializers": [{"name": use.name, "how": ["transposed"]}],
            "nodes": [mapped.modules["up"].nodes[0].name],
        }

    def test_data_frames_have_a_row_for_each(self, mapped):
        pandas = pytest.importorskip("pandas")
        nodes = mapped.to_pandas()
        assert list(nodes.index) == [node.name for node in mapped.nodes]
        of_module = nodes.explode("modules").groupby("modules").size()
        assert of_module["up"] == 2
        assert isinstance(nodes, pandas.DataFrame)
        assert list(mapped.to_pandas("parameters").index) == list(mapped.parameters)
        assert list(mapped.to_pandas("modules").index) == list(mapped.modules)
        assert mapped.to_pandas("initializers").loc["up.bias", "parameters"] == ("up.bias",)
        with pytest.raises(InputError, match="no table 'layers'"):
            mapped.to_pandas("layers")

    def test_the_command_writes_tables_csv_and_json(self, file, mapped, capsys):
        main(["nodes", str(file), "--table", "parameters"])
        printed = capsys.readouterr().out
        assert printed.splitlines()[0].split() == [
            "parameter",
            "shape",
            "tied",
            "to",
            "initializers",
            "nodes",
        ]
        assert "up.weight" in printed
        main(["nodes", str(file), "--csv", "--select", "up"])
        rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert [(row["operator"], row["parameters"]) for row in rows] == [
            ("MatMul", "up.weight"),
            ("Add", "up.bias"),
        ]
        main(["nodes", str(file), "--json"])
        data = json.loads(capsys.readouterr().out)
        assert data == {"schema_version": 1, **json.loads(json.dumps(mapped.to_dict()))}


def test_a_long_chain_of_casts_takes_no_recursion(tmp_path):
    weight = handmade.weight("fc.weight")
    nodes, last = [], weight
    for number in range(1200):
        nodes.append(handmade.tagged_node("Identity", [last], "fc", f"v{number}"))
        last = nodes[-1].outputs[0]
    given = handmade.value("x")
    nodes.append(handmade.tagged_node("Mul", [given, last], "fc", "y"))
    mapped = htp_export.nodes(handmade.model([given], nodes, [weight], MODULES))
    assert [str(use) for use in mapped.nodes[-1].parameters] == ["fc.weight"]
