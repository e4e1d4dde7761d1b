"""Latency by module: times that add up, kernels that belong to all their owners, and inputs that are refused."""

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.profile.latency_results import Profile
from htp_export.command.main import main
from htp_export.errors import InputError, UntaggedModelError
from htp_export.runtime.inputs import Inputs
from tests.handmade import encoder, with_function
from tests.nets import Holding, spread

SLOW = pytest.mark.slow
OTHERS = (
    ("bert", "torchscript"),
    ("gpt2", "dynamo"),
    ("resnet", "dynamo"),
    ("resnet", "torchscript"),
)
BOTH = pytest.mark.parametrize("exporter", ["dynamo", pytest.param("torchscript", marks=SLOW)])


def small(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers as tf

    ids = torch.arange(12).reshape(1, 12)
    words = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "bert":
        sizes = {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 100,
        }
        return tf.BertModel(tf.BertConfig(num_hidden_layers=1, **sizes)), words
    if name == "gpt2":
        config = tf.GPT2Config(
            n_layer=1, n_embd=32, n_head=2, vocab_size=100, n_positions=32, use_cache=False
        )
        return tf.GPT2LMHeadModel(config), {**words, "position_ids": ids}
    config = tf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], num_labels=3)
    return tf.ResNetForImageClassification(config), {"pixel_values": torch.randn(1, 3, 32, 32)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The file of a model, written when the first test asks for it."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def file(name: str, exporter: str = "dynamo") -> Path:
        torch.manual_seed(0)
        model, kwargs = small(name)
        path = folder / f"{name}_{exporter}.onnx"
        dynamo = exporter == "dynamo"
        htp_export.export(
            spread(model).eval(), (), path, kwargs=kwargs, dynamo=dynamo, verbose=False
        )
        return path

    return file


def assert_adds_up(report: Profile) -> None:
    """Whole, modules and their children agree, and what is left is listed."""
    root = report.modules[""]
    assert root.total_ms + report.unattributed_ms == pytest.approx(report.kernels_ms)
    assert sum(m.self_ms for m in report.modules.values()) == pytest.approx(root.total_ms)
    assert report.unattributed_ms == pytest.approx(sum(kernel.ms for kernel in report.unattributed))
    assert sum(kernel.ms for kernel in report.kernels) == pytest.approx(report.kernels_ms)
    paths = [*report.modules]
    for path, module in report.modules.items():
        children = [p for p in paths if p and p != path and p.rpartition(".")[0] == path]
        below = sum(report.modules[child].total_ms for child in children)
        assert module.total_ms == pytest.approx(module.self_ms + below, abs=1e-9)
        assert sum(module.by_op.values()) == pytest.approx(module.total_ms)


class TestRealModels:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("name", "exporter"),
        [
            ("bert", "dynamo"),
            ("gpt2", "torchscript"),
            *(pytest.param(name, exporter, marks=SLOW) for name, exporter in OTHERS),
        ],
    )
    def test_all_kernels_of_an_optimised_model_belong_to_modules_and_times_add_up(
        self, exported, name, exporter
    ):
        report = htp_export.profile(exported(name, exporter), runs=3)
        assert report.unattributed == ()
        assert report.kernels_ms > 0
        assert report.end_to_end_ms > 0
        assert_adds_up(report)
        assert set(report.modules) == set(htp_export.load(exported(name, exporter)).paths)

    @pytest.mark.long
    @pytest.mark.parametrize(
        "level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"]
    )
    def test_less_optimisation_loses_no_kernel_either(self, exported, level):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        report = htp_export.profile(exported("bert"), runs=1, session_options=options)
        assert report.unattributed == ()
        fused = {kernel.op_type for kernel in report.kernels} & {
            "SkipLayerNormalization",
            "FusedMatMul",
        }
        assert bool(fused) == (level == "ORT_ENABLE_EXTENDED")
        assert_adds_up(report)

    @BOTH
    def test_a_fused_kernel_belongs_to_every_module_whose_work_it_does(self, exported, exporter):
        report = htp_export.profile(exported("bert", exporter), runs=1)
        output = "encoder.layer.0.attention.output"
        (skip,) = [k for k in report.kernels if k.op_type.startswith("Skip") and output in k.owners]
        assert skip.owners == (output, f"{output}.LayerNorm")
        pooler = [kernel.owners for kernel in report.kernels if kernel.op_type == "FusedGemm"]
        assert pooler == [("pooler.dense", "pooler.activation")]
        norm = report.modules[f"{output}.LayerNorm"]
        assert norm.self_ms == pytest.approx(skip.ms / 2)
        assert norm.fused_ms == pytest.approx(norm.total_ms)
        assert report.modules[output].fused_ms == 0

    @pytest.mark.long
    @BOTH
    def test_a_convolution_that_adds_and_clips_belongs_to_the_block_and_its_activation_too(
        self, exported, exporter
    ):
        report = htp_export.profile(exported("resnet", exporter), runs=1)
        block = "resnet.encoder.stages.1.layers.1"
        parts = {
            f"{block}.layer.2.convolution",
            f"{block}.layer.2.normalization",
            block,
            f"{block}.activation",
        }
        mine = [kernel for kernel in report.kernels if parts & {*kernel.owners}]
        assert parts <= {path for kernel in mine for path in kernel.owners}
        # Whatever this machine's kernels are, none of them reaches into another block.
        for kernel in mine:
            assert all(path == "resnet.pooler" or path.startswith(block) for path in kernel.owners)

    def test_nothing_is_written_beside_the_file_and_nothing_is_left(
        self, exported, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        path = exported("bert")
        before = {each: each.stat().st_mtime_ns for each in path.parent.iterdir()}
        htp_export.profile(path, runs=1)
        with pytest.raises(InputError):
            htp_export.profile(path, {"input_ids": 1})
        assert {each: each.stat().st_mtime_ns for each in path.parent.iterdir()} == before
        assert list(tmp_path.iterdir()) == []


class Uneven(Holding, small=nn.Linear(64, 64), wide=nn.Linear(64, 3200), back=nn.Linear(3200, 64)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(torch.relu(self.back(torch.relu(self.wide(self.small(x))))))


def test_the_heavy_module_comes_first_and_calls_are_counted():
    program = htp_export.export(Uneven().eval(), (torch.randn(64, 64),), verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    report = htp_export.profile(program, runs=5, session_options=options)
    order = sorted((m for m in report.modules.values() if m.path), key=lambda m: -m.self_ms)
    assert {module.path for module in order[:2]} == {"wide", "back"}
    assert (report.modules["small"].calls, report.modules["small"].kernels) == (2, 2)
    shares = report.by_path("share")
    assert shares == {
        path: pytest.approx(m.total_ms / report.kernels_ms) for path, m in report.modules.items()
    }
    assert shares[""] == pytest.approx(
        sum(shares[path] for path in ("small", "wide", "back"))
        + report.modules[""].self_ms / report.kernels_ms
    )


def tagged(text: str, **owners: str) -> ir.Model:
    """A model from ONNX text; the node that gives each tensor belongs to a module."""
    model = ir.from_proto(onnx.parser.parse_model(text))
    for node in model.graph.all_nodes():
        if node.outputs[0].name in owners:
            node.metadata_props["htp.module"] = owners[str(node.outputs[0].name)]
    return model


LOOP = """
<ir_version: 10, opset_import: ["": 20]>
g (float[64, 64] x, int64 n, bool c) => (float[64, 64] y) <bool go = {1}> {
  r = Loop(n, go, x) <body = b (int64 i, bool k, float[64, 64] s) => (bool k2, float[64, 64] o) {
    k2 = Identity(k) m = MatMul(s, s) o = If(c) <
      then_branch = t () => (float[64, 64] u) { u = Tanh(m) },
      else_branch = e () => (float[64, 64] v) { v = Relu(m) }
    >
  }>
  y = Neg(r)
}
"""


def test_work_in_loops_and_branches_belongs_to_its_own_module_and_is_counted_as_often_as_it_ran():
    owners = {
        "r": "loop",
        "k2": "loop",
        "m": "loop.step",
        "o": "loop",
        "u": "loop.yes",
        "v": "loop.no",
        "y": "",
    }
    feed = {"x": np.ones((64, 64), np.float32), "n": np.asarray(5, np.int64), "c": np.asarray(True)}
    report = htp_export.profile(tagged(LOOP, **owners), feed, runs=3)
    assert_adds_up(report)
    assert report.unattributed == ()
    launches = {(kernel.op_type, kernel.owners): kernel.launches for kernel in report.kernels}
    assert launches == {
        ("Loop", ("loop",)): 1,
        ("Identity", ("loop",)): 5,
        ("MatMul", ("loop.step",)): 5,
        ("If", ("loop",)): 5,
        ("Tanh", ("loop.yes",)): 5,
        ("Neg", ("",)): 1,
    }
    assert report.modules["loop.step"].launches == 5
    assert report.modules["loop.no"].total_ms == 0


def test_functions_are_seen_through():
    report = htp_export.profile(with_function(), runs=1)
    assert [kernel.owners for kernel in report.kernels] == [("block.fc",), ("block.act",), ("",)]
    assert report.modules["block"].kernels == 2


def test_a_function_that_serves_two_modules_is_told_apart_by_its_calls():
    text = """
    <ir_version: 10, opset_import: ["": 20, "pkg": 1]>
    g (float[2] x) => (float[2] y) { a = pkg.Block(x) y = pkg.Block(a) }
    <domain: "pkg", opset_import: ["": 20]> Block (p) => (q) { h = Neg(p) q = Exp(h) }
    """
    model = tagged(text, a="layer.0", y="layer.1")
    for node in next(iter(model.functions.values())):
        node.metadata_props["htp.module"] = "layer.0.inner" if node.op_type == "Neg" else "layer.0"
    report = htp_export.profile(model, runs=1)
    owners = [path for kernel in report.kernels for path in kernel.owners]
    assert owners == ["layer.0.inner", "layer.0", "layer.1", "layer.1"]
    assert model.functions


def test_what_belongs_to_no_module_is_listed_with_its_time():
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[99,99] x) => (float[99,99] y) { a = Exp(x) y = Neg(a) }'
    report = htp_export.profile(tagged(text, y="act"), runs=2)
    (lost,) = report.unattributed
    assert (lost.op_type, lost.owners) == ("Exp", ())
    assert report.unattributed_ms == lost.ms > 0
    assert_adds_up(report)
    assert "ms belongs to no module: Exp" in str(report)


def test_torch_scopes_are_taken_with_a_warning_and_no_tags_are_refused(tmp_path, caplog):
    net = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)).eval()
    torch.onnx.export(
        net, (torch.randn(2, 4),), tmp_path / "plain.onnx", verbose=False, dynamo=True
    )
    report = htp_export.profile(tmp_path / "plain.onnx", runs=1)
    assert report.modules["1"].by_op.keys() == {"Softmax"}
    assert "not exact" in caplog.text
    bare = tagged(
        '<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { y = Neg(x) }'
    )
    with pytest.raises(UntaggedModelError, match=r"export it with htp_export\.export"):
        htp_export.profile(bare)


class TestInputs:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"runs": 0}, "runs 0"),
            ({"providers": ["NoSuchProvider"]}, "no NoSuchProvider, only"),
            ({"shapes": {"z": [2]}}, "no input 'z'"),
            ({"shapes": {"x": [2, 5]}}, r"is float \[2, 5\]"),
        ],
    )
    def test_wrong_options_are_refused(self, options, message):
        with pytest.raises(InputError, match=message):
            htp_export.profile(encoder(), **options)

    def test_bfloat16_runs_from_torch_and_at_random(self):
        text = '<ir_version: 10, opset_import: ["": 20]> g (bfloat16[4] x) => (float[4] y) { y = Cast<to = 1>(x) }'
        model = tagged(text, y="act")
        assert (
            htp_export.profile(model, {"x": torch.ones(4, dtype=torch.bfloat16)}, runs=1)
            .modules["act"]
            .kernels
            == 1
        )
        assert htp_export.profile(model, runs=1).modules["act"].kernels == 1
        array = (
            Inputs.of(model)
            .feed({"x": torch.tensor([1.5, 2, 3, 4], dtype=torch.bfloat16)})
            .arrays["x"]
        )
        assert array.astype(np.float32).tolist() == [1.5, 2, 3, 4]

    def test_no_random_value_can_be_made_of_strings(self):
        value = ir.val("s", ir.DataType.STRING, [2])
        with pytest.raises(InputError, match="'s': random values"):
            Inputs.of(ir.Model(ir.Graph([value], [], nodes=[]), ir_version=10)).random()

    def test_a_model_that_cannot_run_is_an_input_error(self):
        text = '<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[3] y) { y = NoSuchOperator(x) }'
        with pytest.raises(InputError, match="ONNX Runtime cannot load it"):
            htp_export.profile(tagged(text, y="act"))


class TestCommandLine:
    @pytest.fixture
    def file(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        htp_export.load(encoder()).save("net.onnx")
        return "net.onnx"

    def test_shows_the_tree_with_times_to_a_depth_and_in_an_order(self, file, capsys):
        assert main(["profile", file, "--runs", "2", "--warmup", "0", "--threads", "1"]) == 0
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert lines[0].split() == [
            "module",
            "class",
            "total",
            "ms",
            "self",
            "ms",
            "share",
            "kernels",
            "mostly",
        ]
        names = [line.strip("│├└─ ").split()[0] for line in lines[1:6]]
        assert names == ["(root)", "layer.0", "fc", "layer.1", "fc"]
        assert "ms a run, median of 2" in lines[-2]
        assert main(["profile", file, "--runs", "1", "--depth", "1"]) == 0
        assert "fc" not in capsys.readouterr().out
        assert main(["profile", file, "--runs", "1", "--sort", "total"]) == 0
        assert capsys.readouterr().out.splitlines()[1].startswith("(root)")

    def test_json_is_all_that_is_on_stdout(self, file, capsys):
        assert main(["profile", file, "--runs", "1", "--optimization", "disable", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["modules"]["layer.0"]["kernels"] == 4
        assert result["unattributed_ms"] == 0
        operators = {"Neg", "Transpose", "MatMul", "Add", "Mul", "Relu"}
        assert {kernel["op_type"] for kernel in result["kernels"]} == operators

    def test_memory_stands_beside_the_times_and_is_in_the_json(self, file, capfd):
        assert main(["profile", file, "--runs", "1", "--memory"]) == 0
        output = capfd.readouterr()
        assert "allocated for the outputs of kernels" in output.out
        # ONNX Runtime's warning of an option that is set again
        assert "already exists" not in output.err
        assert (
            main(
                ["profile", file, "--runs", "1", "--memory", "--optimization", "disable", "--json"]
            )
            == 0
        )
        result = json.loads(capfd.readouterr().out)
        assert result["memory"]["allocated_bytes"] == sum(
            kernel["bytes"] for kernel in result["memory"]["kernels"]
        )
        assert result["modules"]["layer.0"]["estimated_bytes"] > 0
        assert result["modules"][""]["allocated_bytes"] == result["memory"]["allocated_bytes"]
