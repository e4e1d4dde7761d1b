"""search on trained nets: against NNCF and mixed precision of onnxsim, and on the shapes of BERT-base and ResNet-50."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.search.output_errors import OutputErrors
from htp_export.files.lazy_tensor import slots
from tests.nets import composed

pytest.importorskip("optuna")
pytestmark = pytest.mark.slow

Feed = dict[str, np.ndarray]
SPACE = [
    "int8",
    "int8-weights",
    "int4",
    "fp16",
    "fp32",
    htp_export.Precision("int4 symmetric", "weights", weight="int4", symmetric=True),
    htp_export.Precision("int8 symmetric", "weights", weight="int8", symmetric=True),
]
TRIALS = 40


def trained(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model.eval()


def digits() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A small classifier of images of 8 by 8 pixels, whose first layers matter more than the large one behind them."""
    datasets = pytest.importorskip("sklearn.datasets")
    found = datasets.load_digits()
    images, labels = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    torch.manual_seed(0)
    model: Any = composed(
        lambda self, pixels: self.head(self.narrow(self.wide(self.stem(pixels).relu()).relu()).relu()),
        stem=nn.Linear(64, 64), wide=nn.Linear(64, 512), narrow=nn.Linear(512, 64), head=nn.Linear(64, 10),
    )  # fmt: skip
    model = trained(model, images[:1200], labels[:1200], 60)
    # weights without effect, that make the steps of the others large: their pixel is always 0
    with torch.no_grad():
        assert not images[:, [0, 32]].any()
        model.stem.weight[:, [0, 32]] = 6
    return model, images[1200:], labels[1200:]


def texts() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A classifier of sequences of tokens: a table, an encoder with attention, and a head."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 196, (900, 12), generator=generator)
    labels = torch.randint(0, 4, (900,), generator=generator)
    # one word tells
    tokens[torch.arange(900), torch.randint(0, 12, (900,), generator=generator)] = 196 + labels
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    model: Any = composed(
        lambda self, tokens: self.head(self.encoder(self.table(tokens)).mean(1)),
        table=nn.Embedding(200, 64), encoder=encoder, head=nn.Linear(64, 4),
    )  # fmt: skip
    model = trained(model, tokens[:600], labels[:600], 40)
    with torch.no_grad():
        for feature in (0, 32):  # one in each block of weights
            model.encoder.norm2.weight[feature] = model.encoder.norm2.bias[feature] = 0
            model.head.weight[:, feature] = 15  # it is multiplied with 0
    return model, tokens[600:], labels[600:]


NETS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]] = {
    "digits": digits,
    "texts": texts,
}


class Net:
    """A trained net as a file, with the inputs and labels that it was not trained on."""

    def __init__(self, name: str, folder: Path, opset: int) -> None:
        model, inputs, self.labels = NETS[name]()
        argument = "pixels" if name == "digits" else "tokens"
        self.file, self.feed = folder / "net.onnx", {argument: inputs.numpy()}
        shapes = {argument: {0: torch.export.Dim("batch")}}
        options: dict[str, Any] = {
            "kwargs": {argument: inputs},
            "dynamic_shapes": shapes,
            "opset_version": opset,
        }
        htp_export.export(model, (), self.file, verbose=False, **options)
        self.expected = self.outputs(onnx.load(self.file))

    def outputs(self, model: onnx.ModelProto) -> dict[str, np.ndarray]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return dict(
            zip(
                [value.name for value in session.get_outputs()],
                session.run(None, self.feed),
                strict=True,
            )
        )

    def accuracy(self, outputs: Sequence[Mapping[str, np.ndarray]]) -> float:
        [output] = outputs[0].values()
        return float((output.argmax(-1) == self.labels.numpy()).mean())

    def error(self, model: onnx.ModelProto) -> float:
        errors = OutputErrors()
        errors.add(self.expected, self.outputs(model))
        return errors.result().error

    def searched(self) -> Any:
        return htp_export.search(
            self.file,
            SPACE,
            objectives=["error", "size", "metric"],
            data=self.feed,
            metric=self.accuracy,
            trials=TRIALS,
        )


def tensor_bytes(model: onnx.ModelProto) -> int:
    """The bytes of the tensors that nodes read, as search counts them; onnxsim leaves the original weights in."""
    read = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return sum(slot.tensor.nbytes for slot in slots(ir.from_proto(model)))


@pytest.mark.parametrize("name", list(NETS))
def test_a_plan_keeps_the_accuracy_at_two_fifths_of_the_bytes_where_int4_does_not(name, tmp_path):
    net = Net(name, tmp_path, 20)
    original, made = onnx.load(net.file), tmp_path / "made.onnx"
    whole = net.accuracy([net.expected])
    assert whole > 0.9
    htp_export.quantize(net.file, "int4", made)
    assert net.accuracy([net.outputs(onnx.load(made))]) < whole - 0.01
    good = [trial for trial in net.searched().pareto if trial.values["metric"] >= whole - 0.01]
    smallest = min(good, key=lambda trial: trial.values["size"])
    assert smallest.values["size"] <= 0.4 * tensor_bytes(original)
    # the plan gives the same again
    htp_export.quantize(net.file, smallest.plan, made, data=[net.feed])
    assert net.accuracy([net.outputs(onnx.load(made))]) == smallest.values["metric"]


@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.parametrize("max_drop", [0.0, 0.01])
def test_no_larger_than_nncf_at_the_accuracy_that_its_accuracy_control_keeps(
    name, max_drop, tmp_path
):
    nncf = pytest.importorskip("nncf")
    # ONNX Runtime cannot load what NNCF makes of the texts in opset 21
    net = Net(name, tmp_path, 20)
    made = nncf.quantize_with_accuracy_control(
        onnx.load(net.file),
        nncf.Dataset([net.feed]),
        nncf.Dataset([net.feed]),
        lambda model, items: (net.accuracy([net.outputs(model) for _ in items]), None),
        max_drop=max_drop,
    )
    kept = net.accuracy([net.outputs(made)])
    assert kept >= net.accuracy([net.expected]) - max_drop
    as_good = [trial for trial in net.searched().pareto if trial.values["metric"] >= kept]
    assert min(trial.values["size"] for trial in as_good) <= tensor_bytes(made)


@pytest.mark.parametrize("name", list(NETS))
def test_no_more_error_than_mixed_precision_of_onnxsim_within_a_percent_of_its_bytes(
    name, tmp_path
):
    onnxsim = pytest.importorskip("onnxsim")
    if not hasattr(onnxsim, "apply_mixed_precision_quantization"):
        pytest.skip("this onnxsim has no mixed precision")
    net = Net(name, tmp_path, 21)  # it needs DequantizeLinear with blocks
    found = net.searched()
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        made = onnxsim.apply_mixed_precision_quantization(
            onnx.load(net.file), calibration_data=[net.feed], high_bits_fraction=share
        )
        # plans between two of the front's can be closer to one of them
        size = tensor_bytes(made) * 1.01
        best = min(trial.values["error"] for trial in found.pareto if trial.values["size"] <= size)
        assert best <= net.error(made), (share, size)


def bert() -> tuple[nn.Module, Feed]:
    """Two layers of BERT-base; its table of words is cut to 1,000."""
    from transformers import BertConfig, BertModel

    ids = torch.randint(0, 1000, (1, 16))
    model = BertModel(BertConfig(num_hidden_layers=2, vocab_size=1000))
    return model, {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()}


def resnet() -> tuple[nn.Module, Feed]:
    """A block of each stage of ResNet-50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(depths=[1, 1, 1, 1]))
    return model, {"pixel_values": torch.randn(1, 3, 64, 64).numpy()}


@pytest.mark.parametrize(("build", "depth"), [(bert, 3), (resnet, 3)])
def test_the_front_is_below_one_precision_on_the_shapes_of_real_models(build, depth, tmp_path):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, feed = build()
    file = tmp_path / "net.onnx"
    inputs = {name: torch.from_numpy(array) for name, array in feed.items()}
    htp_export.export(model.eval(), (), file, kwargs=inputs, verbose=False)
    found = htp_export.search(
        file,
        ["int8", "int4", "fp16"],
        objectives=["error", "size"],
        data=feed,
        depth=depth,
        trials=16,
        first=10,
    )
    uniform = {trial.plan["."]: trial.values for trial in found.trials if list(trial.plan) == ["."]}
    assert set(uniform) == {"int8", "int4", "fp16"}
    for name, whole in uniform.items():
        front = min(
            trial.values["error"] for trial in found.pareto if trial.values["size"] <= whole["size"]
        )
        assert front <= whole["error"], name
    sizes = [values["size"] for values in uniform.values()]
    assert any(
        min(sizes) < trial.values["size"] < max(sizes) and len(trial.plan) > 1
        for trial in found.pareto
    )
