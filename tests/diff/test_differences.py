"""Differences between two files: modules that changed, moved, came and went."""

import io
import json
from collections import OrderedDict

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from tests.nets import Holding, spread
from tests.written import weight, written


class Block(nn.Module):
    def __init__(self, width: int = 8, act: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, width), act or nn.ReLU(), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


def row(**children: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(children))


_EXPORTED: dict[str, htp_export.TaggedModel] = {}


def _file(net: nn.Module) -> onnx.ModelProto:
    file = io.BytesIO()
    htp_export.export(net, (torch.randn(2, 8),), file, dynamo=False, verbose=False)
    return onnx.load_model_from_string(file.getvalue())


def model(**children: nn.Module) -> htp_export.TaggedModel:
    """A net of these modules, exported once."""
    net = spread(row(**children)).eval()
    if str(net) not in _EXPORTED:
        _EXPORTED[str(net)] = htp_export.load(_file(net))
    return _EXPORTED[str(net)]


def statuses(found: htp_export.results.ModelDifference) -> dict[str, str]:
    return {path: module.status for path, module in found.modules.items()}


def test_a_file_is_the_same_as_itself():
    found = htp_export.diff(model(a=Block(), b=Block()), model(a=Block(), b=Block()))
    assert found.same
    assert set(statuses(found).values()) == {"same"}
    assert (
        str(found) == "no difference in 9 modules; values of weights are not compared\n"
        "both: every node has a module: 8 captured at export"
    )


def test_a_change_shows_in_the_modules_above_it_and_nowhere_else():
    found = htp_export.diff(model(a=Block(), b=Block()), model(a=Block(), b=Block(act=nn.Tanh())))
    assert found.changed == ["", "b", "b.act"]
    assert found.modules["b"].operators == {"Relu": -1, "Tanh": 1}
    assert found.modules["b.act"].simple_class == "ReLU → Tanh"
    assert found.modules["b"].nodes == (4, 4)


def test_parameters_and_bytes_before_and_after():
    found = htp_export.diff(model(a=Block(8)), model(a=Block(16)))
    assert found.modules["a"].parameters == (2 * (8 * 8 + 8), 2 * 8 * 16 + 16 + 8)
    assert found.modules["a.up"].weight_bytes == {"float32": (4 * 72, 4 * 144)}
    assert found.modules["a.act"].status == "same"


class Projections(Holding, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 24)):
    """Three projections of one input, which can be one product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        return torch.cat([self.q(x), self.k(x), self.v(x)], 2)


def test_the_weight_of_merged_projections_is_shared_and_has_not_grown(capsys, tmp_path):
    before = model(heads=Projections(), out=nn.Linear(40, 8))
    after = htp_export.optimize(before, passes="merge_parallel_projections", level="tolerant").model
    found = htp_export.diff(before, after)
    each, both = {"heads.q": 4 * 72, "heads.k": 4 * 72, "heads.v": 4 * 216}, 4 * 360
    sizes = {
        path: (module.weight_bytes["float32"], module.shared_bytes)
        for path, module in found.modules.items()
    }
    assert {path: sizes.pop(path) for path in each} == {
        path: ((size, both), {"float32": (0, both)}) for path, size in each.items()
    }
    assert [*sizes] == ["", "heads", "out"]
    # the matrix is read inside of ``heads``
    assert all(shared == {"float32": (0, 0)} for _, shared in sizes.values())
    assert found.to_dict()["modules"]["heads.q"]["shared_bytes"] == {"float32": [0, both]}
    assert htp_export.cost(after).modules["heads.q"].shared_weight_bytes == both
    before.save(tmp_path / "a.onnx")
    htp_export.load(after).save(tmp_path / "b.onnx")
    assert main(["diff", str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx")]) == 0
    lines = {
        line.split()[0]: " ".join(line.split())
        for line in capsys.readouterr().out.splitlines()
        if line.strip()
    }
    assert "float32 288 → 1,440 shared" in lines["heads.q"]
    assert "float32 864 → 1,440 shared" in lines["heads.v"]
    assert "float32 1,440 " in lines["heads"]
    assert lines["shared:"].endswith(
        "that other modules read too; in the modules above them they count once"
    )


def test_modules_that_come_and_go():
    found = htp_export.diff(model(a=Block(), old=nn.Linear(8, 8)), model(a=Block(), new=nn.Tanh()))
    assert (found.added, found.removed) == (["new"], ["old"])
    assert found.modules["new"].nodes == (0, 1)
    assert found.modules["old"].nodes == (1, 0)
    assert found.counts == {"same": 4, "changed": 1, "added": 1, "removed": 1}


def test_a_subtree_that_was_renamed_or_is_under_a_new_prefix_has_moved():
    before = model(a=Block(), tail=nn.Tanh())
    found = htp_export.diff(before, model(b=Block(), tail=nn.Tanh()))
    assert found.moved == {"b": "a", "b.up": "a.up", "b.act": "a.act", "b.down": "a.down"}
    assert [module.path for module in found.topmost()] == ["b"]
    assert (found.added, found.removed) == ([], [])
    found = htp_export.diff(
        before, model(body=row(a=Block(), tail=nn.Tanh()), head=nn.Linear(8, 8))
    )
    assert (found.moved["body.a"], found.moved["body.tail"]) == ("a", "tail")
    assert found.added == ["body", "head"]


def test_equal_modules_move_in_order_and_each_once():
    before = model(a=Block(), b=Block())
    after = model(c=Block(), d=Block(), e=Block())
    found = htp_export.diff(before, after)
    assert [(path, old) for path, old in found.moved.items() if "." not in path] == [
        ("c", "a"),
        ("d", "b"),
    ]
    assert [path for path in found.added if "." not in path] == ["e"]


def test_a_renamed_subtree_that_changed_inside_is_recognised_by_its_modules():
    found = htp_export.diff(model(a=Block()), model(b=Block(act=nn.ReLU6())))
    assert found.modules["b"].status == "changed"
    assert found.modules["b"].moved_from == "a"
    assert found.modules["b.up"].status == "moved"


def test_quantized_weights_are_counted_by_their_type(tmp_path):
    from onnxruntime.quantization import quantize_dynamic

    model(a=Block()).save(tmp_path / "a.onnx")
    quantize_dynamic(tmp_path / "a.onnx", tmp_path / "b.onnx")
    found = htp_export.diff(tmp_path / "a.onnx", tmp_path / "b.onnx")
    sizes = found.modules[""].weight_bytes
    assert sizes["int8"] == (0, 2 * 64)  # the two zero points are scalars
    assert sizes["float32"][1] < sizes["float32"][0]


def test_values_of_weights_do_not_count():
    text = "g (float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }"
    one, other = (written(text, 17, {"y": "fc"}, w=weight(4, 4, seed=seed)) for seed in (0, 1))
    assert htp_export.diff(one, other).same


def test_names_and_the_order_of_independent_nodes_do_not_count():
    one = written(
        "g (float[2] x) => (float[2] y) { a = Neg(x)  b = Abs(x)  y = Add(a, b) }", 17, {}
    )
    other = written(
        "g (float[2] x) => (float[2] y) { q = Abs(x)  p = Neg(x)  y = Add(p, q) }", 17, {}
    )
    assert htp_export.diff(one, other).same
    swapped = written(
        "g (float[2] x) => (float[2] y) { a = Neg(x)  b = Abs(x)  y = Sub(b, a) }", 17, {}
    )
    assert not htp_export.diff(one, swapped).same


def test_attributes_and_settings_count():
    text = "g (float[2,4] x) => (float[2,4] y) {{ y = {op} }}"
    soft = [written(text.format(op=f"Softmax<axis={axis}>(x)"), 17, {}) for axis in (0, 1)]
    assert not htp_export.diff(*soft).same
    assert htp_export.diff(
        written(text.format(op="Softmax(x)"), 17, {}),
        written(text.format(op="Softmax<axis=-1>(x)"), 17, {}),
    ).same
    power = [
        written(text.format(op="Pow(x, p)"), 17, {}, p=np.array(p, np.float32)) for p in (2, 3)
    ]
    assert not htp_export.diff(*power).same


def test_untagged_files_are_compared_whole():
    text = "g (float[2] x) => (float[2] y) {{ y = {op}(x) }}"
    found = htp_export.diff(
        written(text.format(op="Relu")), written(text.format(op="Neg"), 17, {"y": "act"})
    )
    assert not found.by_module
    assert statuses(found) == {"": "changed"}
    assert found.modules[""].operators == {"Neg": 1, "Relu": -1}


def test_neither_model_is_changed():
    models = [
        written("g (float[2] x) => (float[2] y) { y = Relu(x) }", 17, {"y": path})
        for path in ("a", "b")
    ]
    before = [ir.to_proto(each).SerializeToString() for each in models]
    htp_export.diff(*models)
    assert [ir.to_proto(each).SerializeToString() for each in models] == before


def test_the_command(tmp_path, capsys):
    paths = [str(tmp_path / f"{name}.onnx") for name in "ab"]
    model(a=Block(), b=Block()).save(paths[0])
    model(a=Block(), b=Block(act=nn.Tanh())).save(paths[1])
    assert main(["diff", *paths]) == 0
    every = capsys.readouterr().out
    assert main(["diff", *paths, "--only-changed"]) == 0
    changed = capsys.readouterr().out
    assert "a.up" in every
    assert "a.up" not in changed
    assert "b.act" in changed
    assert main(["diff", *paths, "--only-changed", "--depth", "1"]) == 0
    assert "b.act" not in capsys.readouterr().out
    assert main(["diff", *paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"same": 6, "changed": 3}
    assert main(["diff", paths[0], paths[0], "--only-changed"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[0]
        == "no difference in 9 modules; values of weights are not compared"
    )


def test_a_file_without_tags_is_the_same_graph():
    """What one file does not say is no difference."""
    tagged = model(a=Block())
    bare = ir.to_proto(tagged.model)
    bare.ClearField("metadata_props")
    for node in bare.graph.node:
        node.ClearField("metadata_props")
        node.name = ""
    found = htp_export.diff(tagged, bare)
    assert (found.same, found.by_module, list(found.modules)) == (True, False, [""])


def test_files_of_different_models_are_said_to_be_that():
    deep = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    other = nn.ModuleDict({"body": nn.Sequential(nn.Tanh(), nn.Linear(4, 2))})
    other.forward = other["body"].forward
    first = htp_export.export(deep, (torch.randn(2, 4),), verbose=False)
    second = htp_export.export(other.eval(), (torch.randn(2, 4),), verbose=False)
    unrelated = htp_export.diff(first, second)
    assert unrelated.unrelated
    assert unrelated.summary.endswith("these are files of different models")
    assert not htp_export.diff(first, first).unrelated
