"""verify raises no alarm on right files: what PyTorch or torch.onnx.export leaves open, or has in another form."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.verify.pytorch_run import parameter_readers, stable_sorting
from tests import faults
from tests.exporting import quick
from tests.nets import EXPORTERS, Holding, composed, spread, x

BOTH = pytest.mark.parametrize("exporter", EXPORTERS)
Tensor = torch.Tensor


def file_of(model: Any, args: tuple[Any, ...], folder: Path, exporter: str = "dynamo") -> Path:
    file = folder / "model.onnx"
    htp_export.export(model, args, file, dynamo=exporter == "dynamo", verbose=False)
    return file


# --- complex numbers: real and imaginary parts in a last dimension ---------------------------------------------------


class Frequencies(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.polar(torch.ones(5, 4), x(5, 4)))

    def forward(self, y: Tensor) -> Tensor:
        return self.table * torch.polar(
            torch.ones(5, 4), y.mean((0, 2))[:, None] + torch.arange(4.0)
        )


class Rotary(nn.Module):
    def forward(self, y: Tensor, frequencies: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * frequencies).flatten(-2)


class Rotated(Holding, frequencies=Frequencies(), rotary=Rotary(), fc=nn.Linear(8, 8)):
    def forward(self, y: Tensor) -> Tensor:
        result: Tensor = self.fc(self.rotary(y, self.frequencies(y)))
        return result


def test_modules_that_take_and_return_complex_tensors(tmp_path):
    model, args = spread(Rotated()).eval(), (x(3, 5, 8),)
    file = file_of(model, args, tmp_path)
    for isolated in (False, True):
        result = htp_export.verify(model, file, args, isolated=isolated)
        assert result.ok, str(result)
        assert {module.status for module in result.modules.values()} == {"agrees"}
    model.frequencies.table[2, 3] *= 1.5  # type: ignore[index, operator]
    for isolated in (False, True):
        assert htp_export.verify(model, file, args, isolated=isolated).wrong == ("frequencies",)


def test_complex_inputs_are_fed_as_torch_exports_them(tmp_path):
    model, args = Rotary().eval(), (x(3, 5, 8), torch.polar(torch.ones(5, 4), x(5, 4)))
    assert htp_export.verify(model, file_of(model, args, tmp_path), args).ok


# --- an order that is open ---------------------------------------------------


class Router(Holding, gate=nn.Linear(8, 16)):
    def forward(self, y: Tensor) -> Any:
        weights, experts = torch.topk(self.gate(y).softmax(-1), 6, dim=-1, sorted=False)
        return weights / weights.sum(-1, keepdim=True), experts


class Mixture(Holding, router=Router(), experts=nn.Parameter(x(16, 8))):
    def forward(self, y: Tensor) -> Tensor:
        weights, experts = self.router(y)
        return (self.experts[experts] * weights[..., None]).sum(-2) + y


@BOTH
def test_the_best_of_a_router_in_any_order(tmp_path, exporter):
    model, args = spread(Mixture()).eval(), (x(4, 5, 8),)
    file = file_of(model, args, tmp_path, exporter)
    before = file.read_bytes()
    for isolated in (False, True):
        result = htp_export.verify(model, file, args, isolated=isolated)
        assert result.ok, str(result)
        assert result.modules["router"].status == "agrees"
    with torch.no_grad():
        model.router.gate.bias[3] += 9  # type: ignore[index, operator]
    for isolated in (False, True):
        assert htp_export.verify(model, file, args, isolated=isolated).first_wrong == "router.gate"
    assert htp_export.compare(file, file).ok
    assert file.read_bytes() == before


class Best(nn.Module):
    def forward(self, y: Tensor) -> Any:
        best = y.topk(k=7, dim=1)
        return best.values, best.indices, torch.topk(y, 5, 0, False)[1]


@BOTH
def test_the_best_of_equal_elements_are_those_that_come_first(tmp_path, exporter):
    model, args = Best().eval(), ((x(30, 40) > 0).float(),)
    result = htp_export.verify(model, file_of(model, args, tmp_path, exporter), args)
    assert result.ok, str(result)


class Experts(Holding, work=nn.Linear(3, 3)):
    """Rows sorted by a key that many have, worked on, and put back."""

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        order = torch.sort(expert)[1]
        return self.work(x[order])[torch.sort(order)[1]]


def test_modules_between_two_sorts_agree():
    generator = torch.Generator().manual_seed(0)
    x, expert = (
        torch.randn(200, 3, generator=generator),
        torch.randint(0, 4, (200,), generator=generator),
    )
    net = Experts().eval()
    program = htp_export.export(net, (x, expert), verbose=False)
    result = htp_export.verify(net, program, (x, expert))
    assert result.ok, result.summary
    assert result.modules["work"].status == "agrees"


def test_every_way_of_sorting_is_stable_inside_and_takes_its_arguments():
    equal, rising = torch.zeros(4, 500), list(range(500))
    with stable_sorting():
        for found in (
            torch.sort(equal)[1],
            equal.sort(1)[1],
            torch.argsort(equal, -1, True),
            equal.argsort(dim=1, descending=True),
            torch.sort(input=equal, stable=False)[1].sort()[0],
            torch.argsort(equal, stable=True),
        ):
            assert found.tolist() == [rising] * 4
        assert torch.sort(torch.tensor([1.0, 3.0, 2.0]), descending=True)[0].tolist() == [
            3.0,
            2.0,
            1.0,
        ]


# --- modules without calls, or without tensors, of their own ---------------------------------------------------


class Mapped(Holding, fc=nn.Linear(8, 8), out=nn.Linear(8, 4)):
    def forward(self, y: Tensor) -> Tensor:
        rows = torch.vmap(self.fc)(y) + torch.vmap(lambda row: row.tanh() * row.sum())(y)
        result: Tensor = self.out(rows)
        return result


@BOTH
def test_modules_that_vmap_runs_are_not_compared_and_the_others_are(tmp_path, exporter):
    model, args = spread(Mapped()).eval(), (x(3, 5, 8),)
    result = htp_export.verify(model, file_of(model, args, tmp_path, exporter), args)
    assert result.ok, str(result)
    assert {path: module.status for path, module in result.modules.items()} == {
        "": "agrees",
        "fc": "not compared",
        "out": "agrees",
    }
    assert "torch.vmap" in result.modules["fc"].reason


def stack() -> nn.Module:
    return spread(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))).eval()


class _Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved for the backward pass."""


class _DoublesRows(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return torch.vmap(_Doubled.apply)(y)


def test_an_autograd_function_under_vmap_is_an_operator_without_bodies():
    # as the masks of transformers 4.57; torch cannot export this one
    net = nn.Sequential(nn.Linear(4, 4), _DoublesRows()).eval()
    with parameter_readers(net) as readers:
        torch.testing.assert_close(net(x(3, 4)), net[0](x(3, 4)) * 2)
    assert readers["0.weight"] == {"0"}


def test_the_module_of_an_exported_program(tmp_path):
    model, args = spread(Mixture()).eval(), (x(4, 5, 8),)
    program = torch.export.export(model, args)
    file = file_of(program, args, tmp_path)
    result = htp_export.verify(program.module(), file, args)
    assert result.ok, str(result)
    assert (result.modules[""].status, result.modules["router"].status) == (
        "agrees",
        "not compared",
    )
    assert htp_export.verify(model, file, args).ok


def test_a_graph_module_and_its_copy_stand_for_the_model(tmp_path):
    args = (x(3, 8),)
    model = stack()
    traced = torch.fx.symbolic_trace(model)
    for exported in (model, copy.deepcopy(traced)):
        file = file_of(exported, args, tmp_path)
        for verified in (model, traced, copy.deepcopy(traced)):
            result = htp_export.verify(verified, file, args)
            assert result.ok, str(result)
            assert result.score == "4 of 4"
        with pytest.raises(htp_export.InputError, match="has the class ReLU, not Tanh"):
            htp_export.verify(
                nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), file, args
            )


# --- half precision ---------------------------------------------------


@pytest.mark.long
def test_files_in_half_precision_are_compared_with_its_tolerance_which_is_said_once(tmp_path):
    model, args = stack(), (x(3, 8),)
    file = file_of(model, args, tmp_path)
    half = tmp_path / "half.onnx"
    for make in (
        lambda: htp_export.quantize(file, {"**": "fp16"}, half),  # takes and gives float32
        lambda: htp_export.quantize(file, {"0": "fp16"}, half),
        lambda: htp_export.tools.float16(file, half),
        lambda: htp_export.export(
            copy.deepcopy(model).half(), (args[0].half(),), half, verbose=False
        ),
    ):
        make()
        for isolated in (False, True):
            result = htp_export.verify(model, half, args, isolated=isolated)
            assert result.ok, str(result)
            assert 1e-4 < result.modules["0"].max_abs < 1e-2  # type: ignore[operator]
            said = [line for line in result.notes if "float16" in line]
            assert len(said) == 1
            assert said[0].startswith("float16 against float32, with the tolerance of float16: ")
        assert htp_export.compare(half, file).ok
        assert htp_export.compare(file, half).ok
        tagged = htp_export.load(half)
        faults.change(
            tagged, faults.weights(tagged, "2")[0], lambda array: (array * 1.5).astype(array.dtype)
        )
        assert htp_export.verify(model, tagged, args).wrong == ("2",)


def test_other_weights_are_refused_in_half_precision_too(tmp_path):
    model, args = stack(), (x(3, 8),)
    htp_export.tools.float16(file_of(model, args, tmp_path), tmp_path / "half.onnx")
    with pytest.raises(htp_export.InputError, match="it has other weights"):
        htp_export.verify(spread(copy.deepcopy(model), seed=5), tmp_path / "half.onnx", args)
    assert np.float16 == htp_export.load(tmp_path / "half.onnx").model.graph.inputs[0].dtype.numpy()  # type: ignore[union-attr]


@BOTH
def test_a_weight_of_a_layer_that_the_model_returns(tmp_path, exporter):
    model = spread(
        composed(lambda self, y: (self.fc(y), self.fc.weight), fc=nn.Linear(4, 3)).eval()
    )
    result = htp_export.verify(model, file_of(model, (x(2, 4),), tmp_path, exporter), (x(2, 4),))
    assert result.ok
    assert not result.misplaced


# --- state that `forward` replaces ---------------------------------------------------


class Stream(Holding, conv=nn.Conv1d(4, 4, 3)):
    """A streaming convolution: the end of one piece is kept for the next one."""

    left: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.zeros(1, 4, 2))

    def forward(self, y: Tensor) -> Tensor:
        y = torch.cat([self.left, y], -1)
        self.left = y[..., -2:].detach()
        result: Tensor = self.conv(y)
        return result


def streams() -> nn.Module:
    model = spread(nn.Sequential(Stream(), nn.ReLU(), Stream())).eval()
    model[0].left, model[2].left = torch.zeros(1, 4, 2), torch.zeros(1, 4, 2)
    return model


def test_equal_caches_that_forward_replaces_belong_to_both_modules(tmp_path):
    model, args = streams(), (x(1, 4, 10),)
    file = file_of(model, args, tmp_path)
    # torch merged them
    assert sum("left" in name for name in htp_export.load(file).model.graph.initializers) == 1
    for isolated in (False, True):
        result = htp_export.verify(model, file, args, isolated=isolated)
        assert result.ok, str(result)
        assert result.parameters == 5
    model(*args)  # now the caches differ from those in the file, and from each other
    later = htp_export.verify(model, file, args)
    assert later.first_wrong == "0"
    assert later.misplaced == ()


# --- packed sequences: padded in the files of TorchScript's exporter --------------------------------------------------


class PackedNet(nn.Module):
    """Recurrent layers of packed sequences, one after another."""

    def __init__(self, *layers: nn.Module, batch_first: bool, is_sorted: bool) -> None:
        super().__init__()
        self.layers, self.batch_first, self.is_sorted = (
            nn.ModuleList(layers),
            batch_first,
            is_sorted,
        )

    def forward(self, y: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            y, lengths, batch_first=self.batch_first, enforce_sorted=self.is_sorted
        )
        for layer in self.layers:
            packed, _ = layer(packed)
        padded: Tensor = nn.utils.rnn.pad_packed_sequence(packed, batch_first=self.batch_first)[0]
        return padded


# layers, whether the batch comes first, the lengths of the sequences
PACKED: dict[str, tuple[Any, ...]] = {
    "LSTM": ([nn.LSTM(6, 5)], True, [7, 5, 2]),
    "GRU": ([nn.GRU(6, 5)], False, [7, 5, 2]),
    "RNN": ([nn.RNN(6, 5)], True, [7, 7, 7]),
    "both directions": ([nn.LSTM(6, 5, bidirectional=True)], True, [7, 5, 2]),
    "two layers": ([nn.LSTM(6, 5), nn.GRU(5, 4)], True, [7, 5, 2]),
    "as many steps as sequences": ([nn.LSTM(6, 5), nn.LSTM(5, 5)], True, [3, 3, 1]),
    "any order": ([nn.LSTM(6, 5), nn.LSTM(5, 4)], True, [2, 7, 5]),
}


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:Exporting a model to ONNX with a batch_size"
)
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_compared_step_by_step(name, tmp_path, capfd):
    layers, batch_first, lengths = PACKED[name]
    is_sorted = lengths == sorted(lengths, reverse=True)
    model = spread(
        PackedNet(*copy.deepcopy(layers), batch_first=batch_first, is_sorted=is_sorted)
    ).eval()
    shape = (len(lengths), max(lengths), 6) if batch_first else (max(lengths), len(lengths), 6)
    args = (x(*shape), torch.tensor(lengths))
    file = file_of(model, args, tmp_path, "torchscript")
    for isolated in (False, True):
        result = htp_export.verify(model, file, args, isolated=isolated)
        assert result.ok, str(result)
        assert {result.modules[f"layers.{number}"].status for number in range(len(layers))} == {
            "agrees"
        }
    last = f"layers.{len(layers) - 1}"
    tagged = htp_export.load(file)
    faults.change(tagged, faults.weights(tagged, last)[0], lambda array: array * 1.5)
    for isolated in (False, True):
        assert htp_export.verify(model, tagged, args, isolated=isolated).wrong == (last,)
    capfd.readouterr()  # torch prints warnings about the shapes of packed sequences


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:Exporting a model to ONNX with a batch_size"
)
def test_an_extracted_layer_of_packed_sequences_has_the_names_of_their_fields(tmp_path, capfd):
    model = spread(PackedNet(nn.LSTM(6, 5), batch_first=True, is_sorted=True)).eval()
    file = file_of(model, (x(3, 7, 6), torch.tensor([7, 5, 2])), tmp_path, "torchscript")
    htp_export.extract(file, "layers.0", tmp_path / "layer.onnx")
    inputs = htp_export.load(tmp_path / "layer.onnx").model.graph.inputs
    assert [value.name for value in inputs] == ["input.data", "input.batch_sizes"]
    capfd.readouterr()


# --- files in training mode: nothing is wrong with their modules --------------------------------------------------


class LastDropout(Holding, rnn=nn.LSTM(8, 8, 2, dropout=0.5)):
    def forward(self, y: Tensor) -> Any:
        return self.rnn(y)[0]


# the net, the module in training mode, and what it does
TRAINING: dict[str, tuple[Any, str, str]] = {
    "dropout": (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)), "1", "Dropout"),
    "batch normalization": (
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        "1",
        "BatchNormalization",
    ),
    "dropout in a layer": (LastDropout(), "rnn", "Dropout"),
    "random numbers": (
        nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.5)),
        "1",
        "RandomUniformLike",
    ),
}


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
@pytest.mark.parametrize(
    ("name", "exporter"),
    quick(
        [
            ("dropout", "dynamo"),
            ("dropout", "torchscript"),
            ("batch normalization", "torchscript"),  # dynamo writes what it computes in eval mode
            ("dropout in a layer", "dynamo"),
            ("random numbers", "dynamo"),
        ],
        ("dropout", "dynamo"),
        ("batch normalization", "torchscript"),
    ),
)
def test_a_file_in_training_mode_is_said_to_be_one(name, exporter, tmp_path):
    net, path, operator = TRAINING[name]
    model, args, file = spread(copy.deepcopy(net)).train(), (x(30, 8),), tmp_path / "training.onnx"
    dynamo = exporter == "dynamo"
    options = (
        {}
        if dynamo
        else {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    )
    htp_export.export(model, args, file, dynamo=dynamo, verbose=False, **options)
    for verified in (model, copy.deepcopy(model).eval()):
        result = htp_export.verify(verified, file, args)
        assert not result.ok
        assert result.summary.startswith(f"the file is in training mode: {operator} ")
        assert f" of {path} " in result.summary
        assert result.summary.endswith("; export model.eval()")
    right = file_of(model.eval(), args, tmp_path, exporter)
    assert htp_export.verify(model, right, args).training == ()


@BOTH
def test_a_model_that_draws_random_numbers_in_eval_mode_is_not_said_to_be_in_training_mode(
    exporter, tmp_path
):
    model = composed(lambda self, y: nn.functional.dropout(y, 0.5, training=True)).eval()
    result = htp_export.verify(model, file_of(model, (x(20, 8),), tmp_path, exporter), (x(20, 8),))
    assert result.training == ()
    assert result.first_wrong == ""
