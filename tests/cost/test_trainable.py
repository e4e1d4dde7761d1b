"""The parameters that train, by module: those of PyTorch, kept by what keeps parameters, and unknown in old files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.costs.result import tree_rows
from tests.nets import EXPORTERS, spread


class Tied(nn.Module):
    """An embedding that is also the matrix of the head, frozen; and a body whose first layer is half frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(words)))


def net() -> nn.Module:
    model = spread(Tied()).eval()
    model.embed.weight.requires_grad_(False)
    model.body[0].weight.requires_grad_(False)
    return model


def in_pytorch(model: nn.Module) -> dict[str, int]:
    counts: dict[str, int] = {}
    for path, module in model.named_modules():
        counts[path] = sum(each.numel() for each in module.parameters() if each.requires_grad)
    return counts


def of(model: Any) -> dict[str, int | None]:
    rows = tree_rows(htp_export.load(model)).rows
    return {row.path: row.trainable for row in rows}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainable") / "net.onnx"
    htp_export.export(net(), (torch.arange(6)[None],), path, dynamo=False, verbose=False)
    return path


@pytest.mark.long
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_file_says_how_many_parameters_of_each_module_train(exporter, tmp_path):
    model = net()
    words = torch.arange(6)[None]
    path = tmp_path / "net.onnx"
    htp_export.export(model, (words,), path, dynamo=exporter == "dynamo", verbose=False)
    assert of(path) == in_pytorch(model)
    assert of(htp_export.inspect(model, words)) == in_pytorch(model)


def test_what_keeps_parameters_keeps_them(file, tmp_path):
    expected = of(file)
    body = of(htp_export.extract(file, "body").model)
    assert body == {path: expected[path] for path in body if path} | {"": expected["body"]}
    made = {
        "optimize": htp_export.optimize(file, tmp_path / "a.onnx"),
        "quantize": htp_export.quantize(file, {"body.2": "int8-weights"}, tmp_path / "b.onnx"),
        "carry": htp_export.carry(file, htp_export.load(file).model.clone()),
    }
    for name, result in made.items():
        assert of(result.model) == expected, name


def test_channels_that_are_cut_out_of_frozen_weights_stay_frozen(file):
    pruned = htp_export.prune(file, {"body.0": "channels:0.5"})
    # 4 x 4 frozen; trainable: 4 biases, 4 x 4 weights and 4 biases behind it, 10 biases of the head
    trainable = of(pruned.model)
    assert (trainable["body.0"], trainable["body.2"], trainable[""]) == (4, 20, 34)


def test_an_old_file_does_not_say_so_and_nothing_is_guessed(file, tmp_path, capsys):
    tagged = htp_export.load(file)
    old = tagged.model.clone()
    del old.metadata_props["htp.frozen"]
    assert set(of(old).values()) == {None}
    htp_export.load(old).save(tmp_path / "old.onnx")
    for name, numbers in ((file, ["126", "54"]), (tmp_path / "old.onnx", ["126"])):
        assert main(["tree", str(name), "--columns", "parameters,trainable", "--depth", "0"]) == 0
        [row] = [line for line in capsys.readouterr().out.splitlines() if "(root)" in line]
        assert row.split()[-len(numbers) :] == numbers


@pytest.mark.parametrize("text", ["[", "[1]", '{"body.0": "weight"}', '{"body.0": [1]}'])
def test_metadata_that_is_not_valid_is_an_error_that_names_the_key(file, text):
    model = htp_export.load(file).model.clone()
    model.metadata_props["htp.frozen"] = text
    with pytest.raises(htp_export.errors.InputError, match=r"htp\.frozen"):
        of(model)
