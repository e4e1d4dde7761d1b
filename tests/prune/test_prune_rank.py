"""prune with a rank: matrices become products of two smaller ones, which are those of numpy's singular values."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.prune.low_rank import factors_of
from htp_export.capabilities.prune.sparsities import sparsity_of
from htp_export.command.main import main
from htp_export.errors import InputError
from tests.exporting import BOTH, exported_once
from tests.extract.test_cutting import exported_to, run_file
from tests.nets import composed, spread
from tests.prune.test_prune import tied, words


def mix(self: Any, words: torch.Tensor) -> torch.Tensor:
    features = self.twice(torch.relu(self.twice(self.table(words))))
    features = self.conv(self.plain(features).transpose(1, 2)).transpose(1, 2)
    return self.head(features.mean(1))


def mixed() -> nn.Module:
    """Products of two and of three dimensions, with a bias and without, a layer that runs twice, and a convolution."""
    return composed(
        mix,
        table=nn.Embedding(17, 20),
        twice=nn.Linear(20, 20),
        plain=nn.Linear(20, 36, bias=False),
        conv=nn.Conv1d(36, 24, 1),
        head=nn.Linear(24, 30),
    )


def smaller(layer: nn.Linear, rank: int) -> nn.Module:
    """A linear layer whose matrix is a product of two."""
    pair = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features)
    for made, factor in zip(pair, factors_of(layer.weight.detach().numpy().T, rank), strict=True):
        made.weight = nn.Parameter(torch.tensor(factor.T))
    pair[1].bias = layer.bias
    return nn.Sequential(*pair)


@pytest.fixture
def exporter() -> str:
    """That of the tests that are not run with both."""
    return "dynamo"


@pytest.fixture
def made(exporter: str, tmp_path: Path) -> tuple[Any, Path]:
    return exported_once(mixed, words, exporter, tmp_path)


@pytest.fixture
def model(made: tuple[Any, Path]) -> Any:
    return made[0]


@pytest.fixture
def file(made: tuple[Any, Path]) -> Path:
    return made[1]


def outputs(tagged: htp_export.TaggedModel, folder: Path) -> np.ndarray[Any, Any]:
    ir.external_data.load_to_model(tagged.model)
    ir.save(tagged.model, folder / "run.onnx")
    [given] = [str(value.name) for value in tagged.model.graph.inputs]
    [found] = run_file(folder / "run.onnx", {given: words()["words"].numpy()})
    return found


@BOTH
def test_a_layer_computes_what_two_layers_with_numpys_factors_compute(model, file, tmp_path):
    plan = {"twice": "rank:5", "plain": "rank:25%", "head": "rank:50%"}
    result = htp_export.prune(file, plan, tmp_path / "low.onnx")
    tagged = htp_export.load(tmp_path / "low.onnx")
    assert sorted(result.ranks.values()) == [5, 5, 12]
    for path, rank in (("twice", 5), ("plain", 5), ("head", 12)):
        setattr(model, path, smaller(getattr(model, path), rank))
    with torch.no_grad():
        expected = model(**words()).numpy()
    np.testing.assert_allclose(outputs(tagged, tmp_path), expected, rtol=1e-5, atol=1e-6)


def test_the_factors_are_those_of_numpy_bit_for_bit(model, file, tmp_path):
    tagged = htp_export.prune(file, {"head": "rank:7"}).tagged
    weight = model.head.weight.detach().numpy().astype(np.float64)
    left, singular, right = np.linalg.svd(weight.T, full_matrices=False)
    roots = np.sqrt(singular[:7])
    expected = {
        (left[:, :7] * roots).astype(np.float32).tobytes(),
        (right[:7].T * roots).T.astype(np.float32).tobytes(),
    }
    values = tagged.model.graph.initializers.values()
    arrays = [value.const_value.numpy() for value in values if value.name.endswith(("_a", "_b"))]
    assert len(arrays) == 2
    matrices = [array if array.shape in ((24, 7), (7, 30)) else array.T for array in arrays]
    assert {np.ascontiguousarray(matrix).tobytes() for matrix in matrices} == expected


@BOTH
def test_tags_parameters_and_numbers(model, file, tmp_path):
    before = htp_export.load(file)
    result = htp_export.prune(file, {"twice": "rank:4", "head": "rank:3"})
    after = result.tagged
    for path, calls in (("twice", 2), ("head", 1)):
        products = [
            [n for n in t[path].nodes if n.op_type in ("MatMul", "Gemm")] for t in (before, after)
        ]
        assert len(products[1]) == 2 * len(products[0]) == 2 * calls
        assert all(after.owners_of(node) == (path,) for node in products[1])
        assert after[path].calls == before[path].calls == calls
        for call in range(calls if calls > 1 else 0):
            assert (
                len([n for n in after[path].call(call).nodes if n.op_type in ("MatMul", "Gemm")])
                == 2
            )
    changed = {id(node) for path in ("twice", "head") for node in after[path].nodes}
    assert [n.name for n in before.nodes if before.owners_of(n) not in (("twice",), ("head",))] == [
        n.name for n in after.nodes if id(n) not in changed
    ]
    assert after.parameters["twice"].shapes == {
        "weight_a": (4, 20),
        "weight_b": (20, 4),
        "bias": (20,),
    }
    assert after.parameters["head"].shapes == {
        "weight_a": (3, 24),
        "weight_b": (30, 3),
        "bias": (30,),
    }
    assert after.parameters["plain"].shapes == {"weight": (36, 20)}
    module = result.modules["twice"]
    assert (module.weights_before, module.weights_after) == (400, 160)
    assert module.bytes_before - module.bytes_after == 4 * 240
    assert after.tag_facts.untagged == 0
    assert json.dumps(result.to_dict())
    assert "of rank" in " ".join(result.notes)
    inferred = after.inferred
    for node in after.nodes:
        for value in node.outputs:
            assert (
                value.shape is None
                or inferred.shape(value) is None
                or len(value.shape) == len(inferred.shape(value))
            )


def test_what_cannot_have_a_rank_is_said(model, file, tmp_path):
    with pytest.raises(
        InputError, match=r"rule 'conv': .* keeps its rank: Conv does not multiply with a matrix"
    ):
        htp_export.prune(file, {"conv": "rank:2"})
    with pytest.raises(
        InputError, match=r"rule 'table': .* Gather does not multiply with a matrix"
    ):
        htp_export.prune(file, {"table": "rank:2"})
    with pytest.raises(InputError, match="rank 10 of a matrix of 20 by 20 saves no bytes"):
        htp_export.prune(file, {"twice": "rank:50%"})
    result = htp_export.prune(file, {".": "rank:10"})
    assert len(result.ranks) == 2  # plain (20 by 36) and head (24 by 30)
    assert len(result.whole) == 3
    assert any("3 weights stay as they are" in note for note in result.notes)


def test_a_tied_table_keeps_its_rank(tmp_path):
    torch.manual_seed(0)
    file = exported_to(tmp_path / "tied.onnx", spread(tied(19, 16)).eval(), words(), "dynamo")
    with pytest.raises(InputError, match="keeps its rank"):
        htp_export.prune(file, {"head": "rank:2"})
    assert list(htp_export.prune(file, {".": "rank:2"}).ranks.values()) == [2]


def test_a_matrix_that_is_added_as_well_keeps_its_rank(tmp_path):
    torch.manual_seed(0)
    net = composed(lambda self, x: self.fc(x) + self.fc.weight, fc=nn.Linear(20, 20))
    file = exported_to(
        tmp_path / "net.onnx", spread(net).eval(), {"x": torch.randn(20, 20)}, "dynamo"
    )
    with pytest.raises(InputError, match="keeps its rank: it is also read in other ways"):
        htp_export.prune(file, {"fc": "rank:2"})


def test_pruned_channels_and_a_rank_in_one_plan(model, file, tmp_path):
    result = htp_export.prune(file, {"conv": "channels:0.5", "head": "rank:2"})
    assert result.tagged.parameters["head"].shapes == {
        "weight_a": (2, 12),
        "weight_b": (30, 2),
        "bias": (30,),
    }
    assert outputs(result.tagged, tmp_path).shape == (2, 30)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("operator", "flags"),
    [("MatMul", (0, 0)), ("Gemm", (0, 0)), ("Gemm", (1, 0)), ("Gemm", (0, 1)), ("Gemm", (1, 1))],
)
def test_products_from_both_sides_and_transposed_ones(operator, place, flags, tmp_path):
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((14, 2)) @ generator.standard_normal((2, 18))  # of rank 2
    weight = np.ascontiguousarray(weight.T if flags[place] else weight).astype(np.float32)
    x_shape = (6, 14) if place else (18, 6)
    x_shape = x_shape[::-1] if flags[1 - place] else x_shape
    x = generator.standard_normal(x_shape).astype(np.float32)
    given = ir.val("x", ir.DataType.FLOAT, x_shape)
    matrix = ir.Value(
        name="w", const_value=ir.tensor(weight), type=ir.TensorType(ir.DataType.FLOAT)
    )
    matrix.shape = ir.Shape(weight.shape)
    attributes = (
        {"transA": flags[0], "transB": flags[1], "alpha": 0.5} if operator == "Gemm" else {}
    )
    inputs = [matrix, given] if place == 0 else [given, matrix]
    product = ir.node(
        operator, inputs, attributes, metadata_props={"htp.module": "fc"}, name="product"
    )
    result = product.outputs[0]
    result.name, result.type = "y", ir.TensorType(ir.DataType.FLOAT)
    result.shape = ir.Shape([6, 18] if place else [14, 6])
    graph = ir.Graph(
        [given], [result], nodes=[product], initializers=[matrix], opset_imports={"": 20}, name="g"
    )
    tagged = htp_export.load(ir.Model(graph, ir_version=10))
    made = htp_export.prune(tagged, {"fc": "rank:2"}).model
    ir.save(tagged.model, tmp_path / "whole.onnx")
    ir.save(made, tmp_path / "low.onnx")
    [expected], [found] = (
        run_file(tmp_path / name, {"x": x}) for name in ("whole.onnx", "low.onnx")
    )
    assert [node.op_type for node in made.graph] == [operator] * 2
    assert "w" not in made.graph.initializers
    assert tuple(made.graph[0].outputs[0].shape) == ((6, 2) if place else (2, 6))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_rank_twice_has_names_of_its_own(file, tmp_path):
    once = htp_export.prune(file, {"head": "rank:9"}).tagged
    twice = htp_export.prune(once, {"head": "rank:3"}).tagged
    names = [node.name for node in twice.nodes]
    assert len(set(names)) == len(names)
    assert outputs(twice, tmp_path).shape == (2, 30)


@pytest.mark.parametrize(
    "value", ["rank:0", "rank:0%", "rank:150%", "rank:", "rank:x", "rank:0.5", "rank:-3"]
)
def test_values_that_are_no_rank(value):
    with pytest.raises(InputError, match="write the rank"):
        sparsity_of(value)


def test_the_command(file, tmp_path, capsys):
    assert (
        main(
            [
                "prune",
                str(file),
                "--rule",
                "head=rank:25%",
                "-o",
                str(tmp_path / "low.onnx"),
                "--json",
            ]
        )
        == 0
    )
    assert list(json.loads(capsys.readouterr().out)["ranks"].values()) == [6]
    assert (
        main(
            [
                "quantize",
                str(tmp_path / "low.onnx"),
                "--rule",
                "head=int8-dynamic",
                "-o",
                str(tmp_path / "q.onnx"),
            ]
        )
        == 0
    )
    quantized = htp_export.load(tmp_path / "q.onnx")
    assert (
        sum(
            node.op_type in ("MatMulInteger", "DynamicQuantizeMatMul")
            for node in quantized["head"].nodes
        )
        == 2
    )
