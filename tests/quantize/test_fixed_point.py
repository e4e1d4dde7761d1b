"""Fixed point by part of a module: PyTorch, ONNX Runtime and onnx's evaluator compute the same bits."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError, RuleError
from tests.exporting import quick
from tests.nets import EXPORTERS, composed, spread
from tests.quantized import results, tagged_graph

X = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 4, 16)).astype(np.float32) * 2)
"""Inputs that saturate in narrow formats."""

WIDTHS = range(2, 17)


def fake(tensor: torch.Tensor, width: int, fraction: int) -> torch.Tensor:
    """PyTorch's own simulation of fixed point."""
    lowest, highest = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    return torch.fake_quantize_per_tensor_affine(tensor, 2.0**-fraction, 0, lowest, highest)


def network() -> nn.Module:
    """A convolution, and linear layers with an input of three and of two dimensions."""
    torch.manual_seed(0)
    net = composed(
        lambda self, x: self.head(torch.relu(self.fc(torch.relu(self.conv(x)))).flatten(1)),
        conv=nn.Conv1d(4, 6, 3, padding=1),
        fc=nn.Linear(16, 5),
        head=nn.Linear(30, 3),
    )
    return spread(net.eval())


class FakeQuantized(nn.Module):
    """The network of 20 lines in PyTorch, with the formats of data, weight and bias."""

    def __init__(self, net: nn.Module, data: tuple, weight: tuple, bias: tuple) -> None:
        super().__init__()
        self.net, self.data, self.weight, self.bias = net, data, weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        conv, fc, head = self.net.conv, self.net.fc, self.net.head
        x = nn.functional.conv1d(*self.parts(x, conv), padding=1)
        x = nn.functional.linear(*self.parts(torch.relu(x), fc))
        return nn.functional.linear(*self.parts(torch.relu(x).flatten(1), head))

    def parts(self, x: torch.Tensor, layer: nn.Module) -> list[torch.Tensor]:
        return [
            fake(x, *self.data),
            fake(layer.weight, *self.weight),
            fake(layer.bias, *self.bias),
        ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fixed")
    made: dict[str, Path] = {}
    for exporter in EXPORTERS:
        options = {} if exporter == "dynamo" else {"input_names": ["x"]}
        made[exporter] = folder / f"{exporter}.onnx"
        is_dynamo = exporter == "dynamo"
        htp_export.export(
            network(), (X,), made[exporter], dynamo=is_dynamo, verbose=False, **options
        )
    return made


def everywhere(model: object) -> list[np.ndarray]:
    """The output in ONNX Runtime, with and without optimizations, and in onnx's evaluator."""
    graph = model if isinstance(model, ir.Model) else ir.load(str(model))
    feed = {str(graph.graph.inputs[0].name): X.numpy()}
    found = [results(model, feed, optimized=optimized)[0] for optimized in (True, False)]
    [evaluated] = ReferenceEvaluator(ir.to_proto(graph)).run(None, feed)
    return [*found, evaluated]


@pytest.mark.long
@pytest.mark.parametrize("width", WIDTHS)
def test_every_float_is_rounded_as_pytorch_does(width):
    """Ties, both ends, and numbers far beyond, in each width with each of its fractions."""
    for fraction in range(width + 1):
        steps = np.arange(-(2 ** (width - 1)) - 3, 2 ** (width - 1) + 4) * 0.5
        x = np.float32([*steps * 2.0**-fraction, 1e9, -1e9, 1e-30, np.inf, -np.inf])[None]
        weight = np.eye(1, dtype=np.float32)
        graph = tagged_graph(
            f"g (float[{x.size},1] x) => (float[{x.size},1] y) {{ y = MatMul(x, w) }}", 21, w=weight
        )
        plan = f"fixed:data={width}.{fraction}:weight=float32:bias=float32"
        model = htp_export.quantize(graph, plan).model
        expected = fake(torch.from_numpy(x.T.copy()), width, fraction).numpy()
        [evaluated] = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x.T})
        for found in (
            *(results(model, {"x": x.T}, optimized=optimized)[0] for optimized in (True, False)),
            evaluated,
        ):
            np.testing.assert_array_equal(found, expected, f"{width}.{fraction}")


@pytest.mark.long
@pytest.mark.parametrize("width", WIDTHS)
def test_a_stored_weight_is_rounded_as_pytorch_does(width):
    """Ties and both ends, as for inputs."""
    for fraction in range(width + 1):
        steps = np.arange(-(2 ** (width - 1)) - 3, 2 ** (width - 1) + 4) * 0.5
        weight = np.float32([*steps * 2.0**-fraction, 1e9, -1e9, 1e-30])[None]
        text = f"g (float[1,1] x) => (float[1,{weight.size}] y) {{ y = MatMul(x, w) }}"
        plan = f"fixed:data=float32:weight={width}.{fraction}:bias=float32"
        model = htp_export.quantize(tagged_graph(text, 21, w=weight), plan).model
        [found] = results(model, {"x": np.ones((1, 1), np.float32)})
        expected = fake(torch.from_numpy(weight), width, fraction).numpy()
        np.testing.assert_array_equal(found, expected, f"{width}.{fraction}")


@pytest.mark.long
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    "formats", [((8, 4), (6, 2), (16, 8)), ((4, 2), (5, 4), (7, 7)), ((12, 6), (8, 6), (9, 3))]
)
def test_a_network_is_that_of_pytorch_bit_for_bit(exporter, formats, files, tmp_path):
    data, weight, bias = (f"{width}.{fraction}" for width, fraction in formats)
    made = tmp_path / "fixed.onnx"
    result = htp_export.quantize(
        files[exporter], f"fixed:data={data}:weight={weight}:bias={bias}", made
    )
    onnx.checker.check_model(str(made), full_check=True)
    with torch.no_grad():
        expected = FakeQuantized(network(), *formats)(X).numpy()
    # Sums of these products are exact in fp32, in whatever order they are added.
    for found in everywhere(made):
        np.testing.assert_array_equal(found, expected)
    assert {
        path: result.modules[path].precision for path in ("conv", "fc", "head")
    } == dict.fromkeys(("conv", "fc", "head"), result.modules[""].precision)
    assert not result.tagged.untagged
    sizes = {path: module.bytes_after for path, module in result.modules.items()}
    assert sizes == {
        path: each.weight_bytes for path, each in htp_export.cost(made).modules.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("width", WIDTHS)
def test_weights_and_biases_are_those_of_pytorch_in_every_width(width, files):
    for fraction in {0, width // 2, width}:
        model = htp_export.quantize(files["torchscript"], f"fixed:{width}.{fraction}").model
        stored = {}
        for node in model.graph:
            if node.op_type == "DequantizeLinear" and node.inputs[0].const_value is not None:
                levels, scale = (value.const_value.numpy() for value in node.inputs[:2])
                stored[node.inputs[0].name.partition("_")[0]] = levels.astype(np.float32) * scale
        for name, parameter in network().named_parameters():
            expected = fake(parameter.detach(), width, fraction).numpy()
            found = [value for value in stored.values() if value.shape == expected.shape]
            assert any(np.array_equal(value, expected) for value in found), name


@pytest.mark.parametrize("exporter", quick(EXPORTERS, "dynamo"))
def test_only_the_module_of_the_rule_changes_and_parts_without_a_format_stay(exporter, files):
    plan = {"fc": {"precision": "fixed", "data": "8.4", "weight": "float32", "bias": "float32"}}
    model = ir.external_data.load_to_model(htp_export.quantize(files[exporter], plan).model)
    with torch.no_grad():
        net = network()
        inner = fake(torch.relu(net.conv(X)), 8, 4)
        expected = net.head(torch.relu(net.fc(inner)).flatten(1)).numpy()
    for found in everywhere(model):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert [node.op_type for node in model.graph if "Quantize" in node.op_type] == [
        "QuantizeLinear"
    ]


def test_new_values_of_parameters_are_rounded_by_bind(files, tmp_path):
    """The recipe of a rounded weight has the format, so no other file is needed."""
    other = network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.flip(parameter, [0]) * 1.5)
    made, bound = tmp_path / "fixed.onnx", tmp_path / "bound.onnx"
    htp_export.quantize(files["dynamo"], "fixed:data=8.4:weight=6.2:bias=16.8", made)
    htp_export.bind(made, other.state_dict(), bound)
    with torch.no_grad():
        expected = FakeQuantized(other, (8, 4), (6, 2), (16, 8))(X).numpy()
    for found in everywhere(bound):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("fixed:1.0", "'1.0' is 1 wide; choose a width from 2 to 16 bits"),
        ("fixed:17.4", "'17.4' is 17 wide"),
        ("fixed:weight=8.9", "weight: '8.9' has 9 fractional bits, more than its width of 8"),
        ("fixed:wieght=8.4", "no part 'wieght'; write data, weight or bias"),
        ("fixed:data=8", "'8' is no fixed-point format"),
        ("fixed:data=-8.4", "'-8.4' is no fixed-point format"),
        ("fixed:data=", "'' is no fixed-point format"),
        ({"precision": "fixed", "data": 16.1}, "16.1 is no fixed-point format; write .* as a text"),
        ("fixed:float32", "data, weight and bias are all float32"),
    ],
)
def test_a_wrong_format_is_an_error_that_names_rule_part_and_remedy(value, problem, files):
    with pytest.raises(RuleError, match=f"rule 'fc'.*{problem}"):
        htp_export.quantize(files["dynamo"], {"fc": value})


def test_the_command_has_status_2_for_a_wrong_format_and_writes_nothing(files, capsys, tmp_path):
    made = tmp_path / "made.onnx"
    words = ["quantize", str(files["dynamo"]), "-o", str(made), "--json", "--rule"]
    assert main([*words, "fc=fixed:weight=20.4"]) == 2
    assert "'20.4' is 20 wide" in capsys.readouterr().err
    assert not made.exists()
    assert main([*words, "fc=fixed:data=8.4:weight=6.2:bias=16.8"]) == 0
    module = json.loads(capsys.readouterr().out)["modules"]["fc"]
    assert module["precision"] == "fixed:data=8.4:weight=6.2:bias=16.8"
    # 80 weights of 6 bits in int8, 5 biases of 16 bits
    assert module["bytes_after"] == 80 + 2 * 5
    assert made.exists()


def test_bias_alone_needs_a_bias():
    text = "g (float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }"
    graph = tagged_graph(text, 21, w=np.eye(4, dtype=np.float32))
    with pytest.raises(InputError, match="no operator of module"):
        htp_export.quantize(graph, "fixed:data=float32:weight=float32:bias=8.4")


def recurrent(kind: type[nn.Module]) -> nn.Module:
    """A table, a recurrent layer of both directions and a linear one."""
    torch.manual_seed(0)
    net = composed(
        lambda self, ids: self.head(self.rnn(self.table(ids))[0]),
        table=nn.Embedding(20, 6),
        rnn=kind(6, 4, batch_first=True, bidirectional=True),
        head=nn.Linear(8, 3),
    )
    return spread(net.eval())


@pytest.mark.long
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("kind", quick([nn.LSTM, nn.GRU], nn.LSTM))
@pytest.mark.filterwarnings("ignore")  # torch, about attributes of recurrent layers
def test_tables_and_recurrent_layers_are_those_of_pytorch(kind, exporter, tmp_path):
    ids = torch.arange(14).reshape(2, 7)
    file, made = tmp_path / "net.onnx", tmp_path / "fixed.onnx"
    is_dynamo = exporter == "dynamo"
    options = {} if is_dynamo else {"input_names": ["ids"]}
    htp_export.export(recurrent(kind), (ids,), file, dynamo=is_dynamo, verbose=False, **options)
    plan = {"table": "fixed:weight=4.2", "rnn,head": "fixed:data=8.5:weight=6.4:bias=12.8"}
    result = htp_export.quantize(file, plan, made)
    assert [result.modules[path].precision for path in ("table", "rnn")] == list(plan.values())
    net = recurrent(kind)
    with torch.no_grad():
        net.table.weight.copy_(fake(net.table.weight, 4, 2))
        for name, parameter in (*net.rnn.named_parameters(), *net.head.named_parameters()):
            form = (12, 8) if "bias" in name else (6, 4)
            parameter.copy_(fake(parameter, *form))
        rows = fake(net.table(ids), 8, 5)
        expected = net.head(fake(net.rnn(rows)[0], 8, 5)).numpy()
    tapped = htp_export.tap(made, "table:out").model
    feed = {"ids": ids.numpy()}
    found, table = results(tapped, feed)
    # The table's numbers are looked up: all bits are the same; the gates have other exponentials.
    np.testing.assert_array_equal(table, net.table(ids).detach().numpy())
    np.testing.assert_allclose(found, expected, atol=2**-5)
    assert np.mean(np.abs(found - expected)) < 1e-3
    facts = htp_export.cost(made).modules
    assert facts["table"].weight_bits == 120 * 4
    biases = sum(each.numel() for name, each in net.rnn.named_parameters() if "bias" in name)
    weights = sum(each.numel() for each in net.rnn.parameters()) - biases
    state = facts["rnn"].weight_bits - weights * 6 - biases * 12
    assert state == facts["rnn"].weight_bytes_by_dtype["float32"] * 8  # the initial one, zeros


def test_a_table_has_no_data_and_a_gather_along_another_axis_stays():
    text = "g (int64[2] i) => (float[2,3] y, float[4,2] z) { y = Gather(t, i) z = Gather<axis=1>(t, i) }"
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    graph = tagged_graph(text, 21, t=table)
    result = htp_export.quantize(graph, {"y": "fixed:8.2", "z": "fp32"})
    found = results(result.model, {"i": np.array([1, 2])})
    np.testing.assert_array_equal(found[0], table[[1, 2]])
    with pytest.raises(RuleError, match="z"):
        htp_export.quantize(graph, {"z": "fixed:8.2"})
    with pytest.raises(RuleError, match="y"):
        htp_export.quantize(graph, {"y": "fixed:data=8.2:weight=float32:bias=float32"})
