"""prune: the weights that PyTorch prunes become zero, and nothing else changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import htp_export
from htp_export.capabilities.prune.masks import find_cutoff, keys_of
from htp_export.command.main import main
from htp_export.errors import InputError, SelectorError
from tests.exporting import BOTH, exported_once
from tests.nets import composed, spread


def encode(self: Any, words: torch.Tensor) -> torch.Tensor:
    features = self.conv(self.table(words).transpose(1, 2)).transpose(1, 2)
    return self.pool(self.fc(self.norm(features)).mean(1))


def encoder() -> nn.Module:
    """Products of two and three dimensions, a convolution, a table, norms and biases."""
    before = {
        "table": nn.Embedding(11, 6),
        "conv": nn.Conv1d(6, 8, 3, padding=1),
        "norm": nn.LayerNorm(8),
    }
    return composed(encode, **before, fc=nn.Linear(8, 10), pool=nn.Linear(10, 5))


def tied(count: int = 9, width: int = 6) -> nn.Module:
    """A table whose weight is that of the last layer too."""
    table, fc, head = (
        nn.Embedding(count, width),
        nn.Linear(width, width),
        nn.Linear(width, count, bias=False),
    )
    head.weight = table.weight
    return composed(
        lambda self, words: self.head(torch.relu(self.fc(self.table(words)))),
        table=table,
        fc=fc,
        head=head,
    )


def words() -> dict[str, torch.Tensor]:
    return {"words": torch.tensor([[1, 5, 2, 7], [3, 8, 0, 4]])}


def made(kind: Callable[[], nn.Module], exporter: str, folder: Path) -> tuple[Any, Path]:
    return exported_once(kind, words, exporter, folder)


def sparsity(tensor: torch.Tensor) -> float:
    return int((tensor == 0).sum()) / tensor.numel()


@BOTH
def test_weights_are_those_that_torch_prunes(exporter, tmp_path):
    model, file = made(encoder, exporter, tmp_path)
    amounts = {"table": 0.3, "conv": 0.5, "fc": 0.8, "pool": 0.4}
    result = htp_export.prune(file, amounts, tmp_path / "pruned.onnx")
    for path, amount in amounts.items():
        torch_prune.l1_unstructured(model.get_submodule(path), "weight", amount)
        assert result.modules[path].sparsity == sparsity(model.get_submodule(path).weight)
    assert htp_export.verify(model, tmp_path / "pruned.onnx", (), words()).ok
    assert htp_export.load(tmp_path / "pruned.onnx").paths == htp_export.load(file).paths


@BOTH
def test_a_share_of_all_weights_together_is_that_of_torch(exporter, tmp_path):
    model, file = made(encoder, exporter, tmp_path)
    result = htp_export.prune(
        file, {"**": 0.6, "table": 0}, tmp_path / "pruned.onnx", scope="global"
    )
    pruned = [(model.get_submodule(path), "weight") for path in ("conv", "fc", "pool")]
    torch_prune.global_unstructured(pruned, torch_prune.L1Unstructured, amount=0.6)
    assert [result.modules[p].sparsity for p in ("conv", "fc", "pool")] == [
        sparsity(m.weight) for m, _ in pruned
    ]
    assert len({sparsity(m.weight) for m, _ in pruned}) > 1
    assert result.modules["table"].zeros_after == 0
    assert htp_export.verify(model, tmp_path / "pruned.onnx", (), words()).ok


@BOTH
def test_two_of_four_neighbours_stay_along_the_axis_that_is_summed(exporter, tmp_path):
    model, file = made(encoder, exporter, tmp_path)
    htp_export.prune(file, {"fc": "2:4", "conv": "2:4", "pool": "2:4"}, tmp_path / "pruned.onnx")
    with torch.no_grad():
        for path in ("fc", "conv", "pool"):
            weight = model.get_submodule(path).weight
            rows = weight.transpose(1, -1).reshape(-1, weight.shape[1])
            rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4))
            smallest = rows.abs().reshape(-1, 4).argsort(dim=1)[:, :2]
            kept = torch.ones(rows.numel() // 4, 4).scatter(1, smallest, 0.0).reshape(rows.shape)
            kept = (
                kept[:, : weight.shape[1]].reshape(weight.transpose(1, -1).shape).transpose(1, -1)
            )
            weight.mul_(kept)
    assert htp_export.verify(model, tmp_path / "pruned.onnx", (), words()).ok


@pytest.mark.long
@pytest.mark.parametrize(("given", "same"), [("1:999999999", "1:40"), ("999999998:999999999", 0.0)])
def test_a_group_that_is_larger_than_a_row_is_the_row(given, same, tmp_path):
    net = composed(lambda self, x: self.fc(x), fc=torch.nn.Linear(40, 4))
    program = htp_export.export(spread(net).eval(), (torch.randn(2, 40),), verbose=False)
    weights = [htp_export.prune(program, {"fc": plan}).model for plan in (given, same)]
    first, second = (model.graph.initializers["fc.weight"].const_value.numpy() for model in weights)
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    "plan", [f"{'9' * 5000}:{'9' * 5000}", f"rank:{'9' * 5000}", f"rank:{'9' * 5000}%", "1" * 5000]
)
def test_numbers_of_any_number_of_digits_are_no_sparsity(plan, tmp_path):
    _, file = made(encoder, "dynamo", tmp_path)
    with pytest.raises(InputError, match="rule 'fc'"):
        htp_export.prune(file, {"fc": plan})


def test_a_seed_says_which_elements_go_at_random(tmp_path):
    _, file = made(encoder, "dynamo", tmp_path)

    def zeros(seed: int, scope: Any = "local") -> bytes:
        pruned = htp_export.prune(file, {"**": 0.5}, method="random", seed=seed, scope=scope)
        return b"".join(
            (value.const_value.numpy() == 0).tobytes()
            for value in pruned.model.graph.initializers.values()
        )

    assert zeros(3) == zeros(3) != zeros(4)
    assert zeros(3, "global") == zeros(3, "global") != zeros(3)
    row = htp_export.prune(file, {"fc": 0.5}, method="random").modules["fc"]
    assert (row.weights_after, row.zeros_after) == (80, 40)


@BOTH
def test_a_tied_weight_is_pruned_and_counted_once(exporter, tmp_path):
    model, file = made(tied, exporter, tmp_path)
    result = htp_export.prune(file, {"head": 0.5}, tmp_path / "pruned.onnx")
    torch_prune.l1_unstructured(model.head, "weight", 0.5)
    torch_prune.remove(model.head, "weight")
    model.table.weight = model.head.weight
    assert htp_export.verify(model, tmp_path / "pruned.onnx", (), words()).ok
    counts = {path: (row.weights_after, row.zeros_after) for path, row in result.modules.items()}
    assert counts == {"": (90, 27), "table": (54, 27), "fc": (36, 0), "head": (54, 27)}
    with pytest.raises(
        InputError, match=r"shared by modules with different values.*'table': 0\.2, 'head': 0.5"
    ):
        htp_export.prune(file, {"table": 0.2, "head": 0.5})


def test_a_model_in_memory_and_the_other_weights_stay_as_they_were(tmp_path):
    _, file = made(encoder, "dynamo", tmp_path)
    tagged = htp_export.load(file)
    before = {
        name: value.const_value.numpy().copy()
        for name, value in tagged.model.graph.initializers.items()
    }
    pruned = htp_export.prune(tagged, {"fc": 0.5}).model.graph.initializers
    assert all(
        np.array_equal(before[n], v.const_value.numpy())
        for n, v in tagged.model.graph.initializers.items()
    )
    changed = [
        name
        for name, value in pruned.items()
        if not np.array_equal(before[name], value.const_value.numpy())
    ]
    assert [before[name].size for name in changed] == [80]


def test_external_weights_stay_external(tmp_path):
    _, file = made(encoder, "dynamo", tmp_path)
    htp_export.load(file).save(tmp_path / "external.onnx", external_data="weights.bin")
    htp_export.prune(tmp_path / "external.onnx", {"fc": 0.5}, tmp_path / "pruned.onnx")
    assert (tmp_path / "pruned.onnx.data").stat().st_size > 0
    assert (
        htp_export.prune(tmp_path / "pruned.onnx", {"fc": 0.5}).modules["fc"].sparsity_before == 0.5
    )


def test_a_result_is_a_table_and_plain_data(tmp_path):
    _, file = made(encoder, "dynamo", tmp_path)
    result = htp_export.prune(file, {"**": 0.5, "fc": "1:4"})
    assert (
        result.summary
        == "55.9% of 340 weights are zero or removed; 1.516 kB of weights before, 1.516 kB after"
    )
    assert result.plan["fc"] == "1:4"
    assert result.plan["pool"] == "0.5"
    data = json.loads(json.dumps(result.to_dict()))
    assert data["modules"]["fc"]["sparsity"] == 0.75
    assert data["modules"]["fc"]["bytes_before"] == data["modules"]["fc"]["bytes_after"] == 360
    assert "75.0%" in next(line for line in str(result).splitlines() if line.startswith("fc"))
    assert list(result.modules) == result.tagged.paths


def test_results_of_prune_and_quantize_have_the_same_attributes(tmp_path):
    _, file = made(encoder, "dynamo", tmp_path)
    cast = htp_export.quantize(file, {"fc": "fp16"})
    pruned = htp_export.prune(cast.model, {"fc": 0.5})
    assert [pruned.modules[path].precision for path in ("", "fc", "conv")] == [
        "mixed",
        "fp16",
        "fp32",
    ]
    assert {path for path, module in pruned.modules.items() if module.precision is None} == {
        path for path, module in pruned.modules.items() if not module.bytes_after
    }
    for result, ratio, sparsity in ((cast, 0.5, None), (pruned, 1, 0.5)):
        module: htp_export.results.CompressedModule = result.modules["fc"]
        assert (module.precision, module.ratio, module.sparsity) == ("fp16", ratio, sparsity)
        assert module.bytes_after == 180
        assert (module.calls, module.fate) == (1, "computed")
        assert {
            "precision",
            "sparsity",
            "bytes_before",
            "bytes_after",
            "ratio",
        } <= result.to_dict()["modules"][""].keys()
        assert "tags" in result.to_dict()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"fc": 1.5}, "a share is from 0 to 1; YAML reads 2:4 without quotes"),
        ({"fc": "5:4"}, "n is at most m"),
        ({"fc": "much"}, "write a share such as 0.5"),
        ({"fc": None}, "write a share such as 0.5"),
        ({"norm": 0.5}, "rule 'norm': the modules that it names have no weights"),
        ({}, "the plan has no rules"),
    ],
)
def test_what_cannot_be_done_is_said(plan, message, tmp_path):
    _, file = made(encoder, "torchscript", tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=message):
        htp_export.prune(file, plan, tmp_path / "pruned.onnx")
    assert sorted(tmp_path.iterdir()) == before


def test_words_that_there_are_not_are_refused(tmp_path):
    _, file = made(encoder, "dynamo", tmp_path)
    with pytest.raises(SelectorError, match="nearest: 'fc'"):
        htp_export.prune(file, {"fcc": 0.5})
    with pytest.raises(InputError, match="method 'l3': there are 'l1' and 'random'"):
        htp_export.prune(file, {"fc": 0.5}, method="l3")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="scope 'here': there are 'local' and 'global'"):
        htp_export.prune(file, {"fc": 0.5}, scope="here")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="seed -1"):
        htp_export.prune(file, {"fc": 0.5}, seed=-1)


class TestCutoff:
    @pytest.mark.parametrize("wide", [False, True])
    @pytest.mark.parametrize("count", [1, 5, 499, 700, 1000])
    def test_is_that_of_sorting(self, wide, count):
        numbers = (
            np.random.default_rng(5)
            .normal(size=1000)
            .astype(np.float64 if wide else np.float32)
            .round(2)
        )
        keys = keys_of(numbers, wide)
        cutoff = find_cutoff(lambda: [keys[:400], keys[400:]], count, wide=wide)
        ordered = np.sort(keys)
        assert cutoff == (
            int(ordered[count - 1]),
            int(np.count_nonzero(ordered[:count] == ordered[count - 1])),
        )


class TestCommand:
    def test_rules_are_typed_and_read(self, tmp_path, monkeypatch, capsys):
        made(encoder, "dynamo", tmp_path)
        monkeypatch.chdir(tmp_path)
        Path("plan.yaml").write_text("'**': 0.5\nfc: '2:4'\n")
        command = ["prune", "model.onnx", "plan.yaml", "--rule", "pool=0.2", "-o", "pruned.onnx"]
        assert main([*command, "--json"]) == 0
        written = json.loads(capsys.readouterr().out)
        assert {path: said for path, said in written["plan"].items() if said != "0.5"} == {
            "fc": "2:4",
            "pool": "0.2",
        }
        onnx.checker.check_model("pruned.onnx")
        assert main([*command, "--in-place"]) == 0
        out = capsys.readouterr().out
        assert "wrote pruned.onnx" in out
        assert "zeros take as many bytes as other numbers" in out

    def test_alike_modules_are_one_line(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6))
        ).eval()
        htp_export.export(layers, (torch.randn(2, 8),), "net.onnx", verbose=False)
        command = [
            "prune",
            "net.onnx",
            "--rule",
            ".=0.5",
            "-o",
            "pruned.onnx",
            "--force",
            "--in-place",
        ]
        lines = {}
        for more in ([], ["--no-fold"], ["--depth", "1", "--select", "2"]):
            assert main([*command, *more]) == 0
            lines[" ".join(more)] = capsys.readouterr().out.partition("\n\n")[0].splitlines()
        assert len(lines[""]) == 4
        assert lines[""][2].startswith("└── 0 … 5 \N{MULTIPLICATION SIGN} 6")
        assert (len(lines["--no-fold"]), len(lines["--depth 1 --select 2"])) == (14, 4)
