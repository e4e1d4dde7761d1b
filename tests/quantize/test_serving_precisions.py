"""The precision ``auto``: chosen by what a model multiplies with, and by the processor."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.quantize import choosing
from htp_export.command.main import main
from tests.nets import spread

IMAGE = {"input": np.random.default_rng(0).standard_normal((1, 3, 12, 12)).astype(np.float32)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A conv net with a small head; and a patch embedding before large products, as of a vision transformer."""
    folder = tmp_path_factory.mktemp("nets")
    tail = [nn.Flatten(), nn.Linear(800, 10)]
    nets = {
        "convolutions": nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), *tail),
        "products": nn.Sequential(
            nn.Conv2d(3, 4, 4, stride=4), nn.Flatten(), nn.Linear(36, 400), nn.Linear(400, 10)
        ),
    }
    for name, net in nets.items():
        htp_export.export(
            spread(net.eval()),
            (torch.from_numpy(IMAGE["input"]),),
            folder / f"{name}.onnx",
            verbose=False,
        )
    return {name: folder / f"{name}.onnx" for name in nets}


def on(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(choosing, "is_arm", lambda: machine == "ARM")
    monkeypatch.setattr(choosing, "saturates", lambda: machine == "x86 without VNNI")


@pytest.mark.parametrize(
    ("net", "machine", "precision"),
    [
        ("products", "x86", "int8-dynamic"),
        ("products", "ARM", "int8-dynamic"),
        ("products", "x86 without VNNI", "int8-dynamic"),
        ("convolutions", "x86", "u8s8"),
        ("convolutions", "ARM", "int8"),
        ("convolutions", "x86 without VNNI", "u8s8"),
    ],
)
def test_auto_is_chosen_by_work_and_processor_and_says_why(
    files, monkeypatch, net, machine, precision
):
    on(monkeypatch, machine)
    planned = htp_export.quantize(files[net], dry_run=True)
    assert set(planned.operators) == {precision}
    [note] = [note for note in planned.notes if note.startswith("auto is")]
    assert note.startswith(f"auto is {precision}, ")
    assert machine in note
    same = htp_export.quantize(files[net], {".": precision}, dry_run=True)
    assert planned.modules[""].bytes_after == same.modules[""].bytes_after or net == "products"


def test_weights_have_7_bits_where_products_saturate(files, monkeypatch):
    on(monkeypatch, "x86 without VNNI")
    found = htp_export.quantize(files["products"]).model.graph.initializers
    levels = [
        value.const_value.numpy() for name, value in found.items() if name.endswith("_quantized")
    ]
    assert levels
    assert all(np.abs(array).max() <= 64 for array in levels)


def test_convolutions_among_products_stay(files):
    result = htp_export.quantize(files["products"])
    assert {path: result.modules[path].precision for path in "023"} == {
        "0": "fp32", "2": "int8-dynamic", "3": "int8-dynamic"
    }  # fmt: skip
    chosen = htp_export.quantize(files["products"], {".": "auto", "0": "u8s8"}, data=IMAGE)
    assert chosen.modules["0"].precision == "u8s8"
    by_rule = htp_export.quantize(files["products"], {"0": "auto", "2": "auto"}, dry_run=True)
    assert (by_rule.modules["0"].precision, by_rule.modules["2"].precision) == (
        "u8s8",
        "int8-dynamic",
    )


def test_sensitivity_and_search_take_it_by_default(files, tmp_path):
    found = htp_export.sensitivity(files["products"], data=IMAGE, select=["2", "3"], all_but=False)
    assert {row.precision for row in found.ranking} == {"int8-dynamic"}
    assert any(note.startswith("auto is int8-dynamic") for note in found.notes)
    pytest.importorskip("optuna")
    searched = htp_export.search(files["products"], data=IMAGE, select=["2", "3"], trials=3)
    assert searched.modules == {"2": ("int8-dynamic", "fp32"), "3": ("int8-dynamic", "fp32")}


def test_the_command_takes_it_without_a_plan(files, tmp_path, capsys):
    assert main(["quantize", str(files["products"]), "-o", str(tmp_path / "made.onnx")]) == 0
    assert "auto is int8-dynamic" in " ".join(capsys.readouterr().out.split())


def test_where_nothing_can_be_faster_auto_is_refused(files):
    with pytest.raises(
        htp_export.InputError, match=r"'1': auto: nothing here multiplies with stored weights"
    ):
        htp_export.quantize(files["convolutions"], {"1": "auto"})
    with pytest.raises(
        htp_export.InputError, match="precision 'auto' has no fields, and 'block_size' is given"
    ):
        htp_export.quantize(files["convolutions"], {".": {"precision": "auto", "block_size": 32}})
