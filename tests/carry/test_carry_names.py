"""`carry` onto a model whose tensors and nodes a tool renamed: by contents of weights, and by who reads a constant."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.format import tags
from htp_export.format.hierarchy import ModuleInfo
from htp_export.model.regions import all_values
from htp_export.model.tensor_names import rename
from tests.exporting import exported_once
from tests.handmade import model, stripped, tagged_node, value
from tests.nets import EXPORTERS

WIDTH = 16  # weights of 1 kB, which are not small constants


def weight(name: str, seed: int) -> ir.Value:
    numbers = np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    return ir.val(name, const_value=ir.tensor(numbers, name=name))


def parallel(paths: tuple[str, ...] = ("query", "key", "value")) -> ir.Model:
    """Products of one tensor with weights of one shape, by modules beside each other."""
    x = value("x", WIDTH)
    weights = [weight(f"{path}.weight", seed) for seed, path in enumerate(paths)]
    nodes = [
        tagged_node("MatMul", [x, each], path, f"{path}.out")
        for path, each in zip(paths, weights, strict=True)
    ]
    total = tagged_node("Sum", [node.outputs[0] for node in nodes], "", "sum")
    return model(
        [x],
        [*nodes, total],
        weights,
        [ModuleInfo(path, "net.Any", 1, "computed") for path in ("", *paths)],
    )


def renamed(source: ir.Model, names: dict[str, str] | None = None) -> ir.Model:
    """A copy without tags in which all tensors but inputs and outputs have other names, and nodes none."""
    copy = stripped(source)
    for node in copy.graph.all_nodes():
        node.name = None
    fixed = {*copy.graph.inputs, *copy.graph.outputs}
    for number, each in enumerate([*all_values(copy.graph)]):
        if each not in fixed:
            rename(each, f"temporary{number}" if names is None else names[str(each.name)])
    return copy


def owners(tagged: ir.Model) -> list[list[str]]:
    return [list(tags.owners_of(node.metadata_props)) for node in tagged.graph]


def test_modules_beside_each_other_are_told_apart_by_the_contents_of_renamed_weights():
    before = parallel()
    after = renamed(before)
    assert owners(htp_export.carry(before, after).model) == [["query"], ["key"], ["value"], [""]]
    nodes = list(after.graph)[:3]
    after.graph.remove(nodes)
    after.graph.insert_before(after.graph[0], nodes[::-1])
    assert owners(htp_export.carry(before, after).model) == [["value"], ["key"], ["query"], [""]]


def test_renamed_weights_in_data_files_are_found_too_and_without_their_file_nothing_is_known(
    tmp_path,
):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    htp_export.load(parallel()).save(before, "before.data")
    htp_export.load(renamed(parallel())).save(after, "after.data")
    assert owners(htp_export.carry(before, after).model) == [["query"], ["key"], ["value"], [""]]
    opened = htp_export.load(before).model
    (tmp_path / "before.data").unlink()
    assert len(htp_export.carry(opened, after, require=0).unknown) == 4


def test_weights_are_read_only_where_both_models_have_unknown_ones_of_a_shape(monkeypatch):
    before, after = parallel(), stripped(parallel())
    monkeypatch.setattr(ir.Tensor, "tobytes", lambda tensor: pytest.fail(f"{tensor.name} was read"))
    assert owners(htp_export.carry(before, after).model) == [["query"], ["key"], ["value"], [""]]


def constant(path: str, name: str, number: float) -> ir.Node:
    node = tagged_node("Constant", [], path, f"{path}.{name}")
    node.attributes.add(ir.AttrFloat32("value_float", number))
    return node


def scales() -> ir.Model:
    """Two modules that each multiply by a constant of their own; the two are equal."""
    x = value("x", WIDTH)
    nodes: list[ir.Node] = []
    for path in ("first", "second"):
        scale, shift = constant(path, "scale", 0.5), constant(path, "shift", len(path))
        product = tagged_node(
            "Mul", [x if not nodes else nodes[-1].outputs[0], scale.outputs[0]], path, f"{path}.mul"
        )
        nodes += [
            scale,
            shift,
            product,
            tagged_node("Add", [product.outputs[0], shift.outputs[0]], path, f"{path}.y"),
        ]
    return model(
        [x],
        nodes,
        [],
        [ModuleInfo(path, "net.Any", 1, "computed") for path in ("", "first", "second")],
    )


def test_equal_constants_under_names_of_others_belong_to_the_module_that_reads_them():
    before = scales()
    names = {str(each.name): str(each.name) for each in all_values(before.graph)}
    names |= {"first.scale": "first.shift", "first.shift": "second.scale"}
    names |= {"second.scale": "second.shift", "second.shift": "first.scale"}
    expected = [["first"]] * 4 + [["second"]] * 4
    assert owners(before) == expected
    assert owners(htp_export.carry(before, renamed(before)).model) == expected
    assert owners(htp_export.carry(before, renamed(before, names)).model) == expected


def test_a_constant_that_took_the_name_of_another_one_is_known_by_its_contents():
    before = scales()
    names = {str(each.name): str(each.name) for each in all_values(before.graph)}
    names |= {"first.shift": "second.shift", "second.shift": "first.shift"}
    assert owners(htp_export.carry(before, renamed(before, names)).model) == owners(before)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key, self.out = (
            nn.LayerNorm(32),
            *(nn.Linear(32, 32, bias=False) for _ in range(3)),
        )

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        normal = self.norm(x)
        weights = torch.softmax(self.query(normal) @ self.key(normal).transpose(1, 2) + bias, -1)
        summed: torch.Tensor = x + self.out(weights @ normal)
        return summed


class SharesBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bias = (
            Attends(),
            Attends(),
            nn.Parameter(torch.randn(1, 8, 8)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second: torch.Tensor = self.second(self.first(x, self.bias), self.bias)
        return second


def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(1, 8, 32)}


@pytest.mark.long
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("tool", "options"), [("matmul_nbits", {"block_size": 32}), ("quantize_dynamic", {})]
)
def test_known_owners_of_quantized_and_renamed_nodes_are_true(tool, options, exporter, tmp_path):
    """Rounding hides all values, a bias that two modules add does not tell whose sum it is, and regions are wide."""
    other = exported_once(SharesBias, inputs, exporter, tmp_path)[1]
    quantized = getattr(htp_export.tools, tool)(other, **options).model
    carried = htp_export.carry(
        exported_once(SharesBias, inputs, "dynamo", tmp_path)[1], renamed(quantized)
    ).model
    known = [
        (node.op_type, node.metadata_props[tags.REASON], said, true)
        for node, said, true in zip(carried.graph, owners(carried), owners(quantized), strict=True)
        if node.metadata_props[tags.REASON] != "unknown" and node.op_type != "Constant"
    ]
    assert [each for each in known if {*each[2]} != {*each[3]}] == []
    assert len(known) > len(carried.graph) / 3
