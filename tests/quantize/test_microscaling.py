"""Microscaling formats: the numbers of the OCP specification, in ONNX Runtime and in onnx's evaluator.

The rules are written here once more, from the text of the specification (MX 1.0, sections 5.2, 5.3
and 6.3): elements are listed, and each number gets the nearest one.
"""

import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import htp_export
from htp_export.errors import InputError
from tests.exporting import quick
from tests.nets import EXPORTERS, composed, spread
from tests.quantized import results

FORMATS = {
    "mxint8": (0, 0, 0),
    "mxfp8": (4, 3, 8),
    "mxfp8:weight=e5m2": (5, 2, 15),
    "mxfp6": (2, 3, 2),
    "mxfp6:weight=e3m2": (3, 2, 4),
    "mxfp4": (2, 1, 2),
}
"""Precision → bits of the exponent, bits of the mantissa, and the largest exponent (tables 1 to 5)."""


def elements(name: str) -> list[float]:
    """The numbers of an element type from zero, in the order of their bits."""
    exponent_bits, mantissa_bits, largest = FORMATS[name]
    if not exponent_bits:
        return [step / 64 for step in range(128)]
    bias = 2 ** (exponent_bits - 1) - 1
    numbers = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            power = exponent - bias
            is_special = power > largest or (name == "mxfp8" and (exponent, mantissa) == (15, 7))
            if not is_special:
                numbers.append(
                    math.ldexp(1 + fraction, power) if exponent else math.ldexp(fraction, 1 - bias)
                )
    return numbers


def nearest(value: float, numbers: list[float]) -> float:
    """The nearest number, of two the one with an even last bit; the largest for larger ones."""
    magnitude = abs(value)
    place = min(range(len(numbers)), key=lambda k: (abs(numbers[k] - magnitude), k % 2))
    return math.copysign(numbers[place], value)


def block_as_specified(block: list[float], name: str) -> tuple[int, list[float]]:
    """The shared exponent of a block, and its numbers."""
    largest = max(map(abs, block))
    if not largest:
        return 0, [0.0 for _ in block]
    shared = math.floor(math.log2(largest)) - FORMATS[name][2]
    numbers = elements(name)
    return shared, [math.ldexp(nearest(math.ldexp(v, -shared), numbers), shared) for v in block]


def as_specified(weight: np.ndarray, name: str) -> np.ndarray:
    """A weight in blocks along the second axis."""
    moved = np.moveaxis(weight, 1, -1)
    rounded = np.empty_like(moved)
    for place in np.ndindex(moved.shape[:-1]):
        for start in range(0, moved.shape[-1], 32):
            block = moved[place][start : start + 32].tolist()
            rounded[place][start : start + 32] = block_as_specified(block, name)[1]
    return np.moveaxis(rounded, -1, 1)


def network() -> nn.Module:
    """A convolution, and linear layers whose axes are no multiples of 32."""
    torch.manual_seed(0)
    net = composed(
        lambda self, x: self.head(torch.relu(self.fc(torch.relu(self.conv(x)))).flatten(1)),
        conv=nn.Conv1d(36, 6, 3, padding=1),
        fc=nn.Linear(70, 11),
        head=nn.Linear(66, 3),
    )
    net = spread(net.eval())
    with torch.no_grad():
        net.fc.weight[0] = 0.0  # blocks of zeros
        net.fc.weight[1] *= 1e-4
        # halves between two elements, and one beyond the largest
        net.fc.weight[2, :8] = torch.tensor([1.0, 1.75, 0.3125, 1.0625, -1.9999, 0.25, 0.75, -1.25])
    return net


X = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 36, 70)).astype(np.float32))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, made = tmp_path_factory.mktemp("mx"), dict[str, Path]()
    for exporter in EXPORTERS:
        is_dynamo = exporter == "dynamo"
        options = {} if is_dynamo else {"input_names": ["x"]}
        made[exporter] = folder / f"{exporter}.onnx"
        htp_export.export(
            network(), (X,), made[exporter], dynamo=is_dynamo, verbose=False, **options
        )
    return made


def dequantized(model: ir.Model) -> dict[tuple[int, ...], np.ndarray]:
    """Shape → the weight that onnx's evaluator dequantizes, for each weight in blocks."""
    nodes = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    for node in nodes:
        model.graph.outputs.append(node.outputs[0])
    feed = {str(model.graph.inputs[0].name): X.numpy()}
    _, *found = ReferenceEvaluator(ir.to_proto(model)).run(None, feed)
    return {each.shape: each for each in found}


@pytest.mark.long
@pytest.mark.parametrize("exporter", quick(EXPORTERS, "dynamo", "torchscript"))
@pytest.mark.parametrize("e8m0", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_specification_bit_for_bit(name, e8m0, exporter, files):
    model = htp_export.quantize(files[exporter], f"{name}:format=e8m0" if e8m0 else name).model
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    scales = {node.inputs[1].dtype for node in model.graph if node.op_type == "DequantizeLinear"}
    assert scales == {ir.DataType.FLOAT8E8M0 if e8m0 else ir.DataType.FLOAT}
    found = dequantized(model)
    for parameter, weight in network().named_parameters():
        if parameter.endswith("weight"):
            expected = as_specified(weight.detach().numpy(), name)
            np.testing.assert_array_equal(found[expected.shape], expected)


@pytest.mark.parametrize("exporter", quick(EXPORTERS, "dynamo", "torchscript"))
@pytest.mark.parametrize("name", FORMATS)
def test_a_network_computes_as_pytorch_with_these_weights(name, exporter, files, tmp_path):
    made, net = tmp_path / "mx.onnx", network()
    result = htp_export.quantize(files[exporter], name, made)
    with torch.no_grad():
        for parameter, weight in net.named_parameters():
            if parameter.endswith("weight"):
                weight.copy_(torch.from_numpy(as_specified(weight.numpy(), name)))
        expected = net(X).numpy()
    for optimized in (True, False):
        feed = {str(result.model.graph.inputs[0].name): X.numpy()}
        [found] = results(made, feed, optimized=optimized)
        # no activation is rounded: only the order of sums differs
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not result.tagged.untagged
    sizes = {path: module.bytes_after for path, module in result.modules.items()}
    assert sizes == {
        path: each.weight_bytes for path, each in htp_export.cost(made).modules.items()
    }
    predicted = htp_export.quantize(files[exporter], name, dry_run=True)
    assert sizes == {path: module.bytes_after for path, module in predicted.modules.items()}


def test_bytes_of_onnx_types_are_those_of_the_format(files):
    """A matrix of 11 rows of 70 in 4 bits has 3 scales of one byte for each row."""
    result = htp_export.quantize(files["dynamo"], {"fc": "mxfp4:format=e8m0"})
    assert result.modules["fc"].bytes_after == 11 * 70 // 2 + 11 * 3 + 4 * 11


def test_new_values_of_parameters_are_rounded_by_bind(files, tmp_path):
    other = network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.flip(parameter, [0]) * 1.5)
    made, bound = tmp_path / "mx.onnx", tmp_path / "bound.onnx"
    htp_export.quantize(files["dynamo"], "mxfp6", made)
    htp_export.bind(made, other.state_dict(), bound)
    found = dequantized(ir.external_data.load_to_model(ir.load(bound)))
    for weight in (other.conv.weight, other.fc.weight, other.head.weight):
        expected = as_specified(weight.detach().numpy(), "mxfp6")
        np.testing.assert_array_equal(found[expected.shape], expected)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("mxfp4:block_size=16", "block_size is 16, and blocks of MX formats have 32"),
        ("mxfp4:weight=int4", "weight is 'int4', and can be int8, e4m3"),
        ("mxfp4:format=qdq", "format is 'qdq', and can be default, e8m0"),
        ("mxint8:scale=e8m0", "has no field 'scale'"),
    ],
)
def test_wrong_fields_are_errors(value, problem, files):
    with pytest.raises(InputError, match=problem):
        htp_export.quantize(files["dynamo"], {"fc": value})
