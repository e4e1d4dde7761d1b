"""Measured memory: every number against a count of our own, modules that add up, and where the estimate is off."""

from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import torch
from torch import nn

import htp_export
from htp_export.capabilities.profile.measured_memory import ModuleMemory
from tests.handmade import encoder
from tests.nets import spread
from tests.profile.test_latency import tagged as of_text

BLOCK = 256


def blocks(size: int) -> int:
    """Bytes in whole blocks, as ONNX Runtime allocates."""
    return -(-size // BLOCK) * BLOCK


def tagged(text: str, **owners: str) -> onnx.ModelProto:
    return ir.to_proto(of_text(text, **owners))


def as_written() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def sizes_of(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> dict[str, int]:
    """Tensor → bytes, by ONNX's own reference implementation."""
    counted = onnx.ModelProto()
    counted.CopyFrom(model)
    del counted.graph.output[:]
    names = [name for node in counted.graph.node for name in node.output if name]
    counted.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    values = onnx.reference.ReferenceEvaluator(counted).run(None, feed)
    return {name: np.asarray(value).nbytes for name, value in zip(names, values, strict=True)}


CHAIN = """
<ir_version: 10, opset_import: ["": 20]>
g (float[20, 30] x, float[30, 50] w) => (float[50, 20] y) {
  a = MatMul(x, w)
  b = Softmax<axis = -1>(a)
  d = Exp(b)
  c, at = TopK<axis = -1>(d, five)
  y = Transpose<perm = [1, 0]>(d)
  e = ReduceMax<keepdims = 0>(c)
}
""".replace("{\n  a", "<int64[1] five = {5}> {\n  a")


class TestAgainstACountOfOurOwn:
    def test_every_kernel_has_the_bytes_of_its_outputs_in_blocks_and_none_where_it_writes_over_its_input(
        self,
    ):
        model = tagged(CHAIN, a="product", b="soft", c="top", d="soft.act", y="turn", e="top")
        feed = {"x": np.ones((20, 30), np.float32), "w": np.ones((30, 50), np.float32)}
        sizes = sizes_of(model, feed)
        report = htp_export.profile(
            model, feed, runs=1, warmup=0, session_options=as_written(), memory=True
        )
        assert report.memory is not None
        assert {kernel.op_type: kernel.bytes for kernel in report.memory.kernels} == {
            "MatMul": blocks(sizes["a"]),
            "Softmax": 0,  # nothing else reads `a`
            "TopK": blocks(sizes["c"]) + blocks(sizes["at"]),
            "Exp": blocks(sizes["d"]),  # ONNX Runtime's kernel never writes over its input
            "Transpose": blocks(sizes["y"]),
            "ReduceMax": blocks(4),
        }
        assert (blocks(sizes["a"]), blocks(4)) == (4096, 256)
        modules = {path: module.memory for path, module in report.modules.items()}
        assert modules["soft"] == ModuleMemory(4096, 0, 2 * sizes["b"], sizes["b"], 0)
        assert modules["soft.act"] == ModuleMemory(4096, 4096, sizes["d"], sizes["d"], 1)
        assert modules[""].allocated_bytes == report.memory.allocated_bytes
        assert modules[""].estimated_bytes == sum(sizes.values()) == report.memory.estimated_bytes

    def test_the_estimate_is_that_of_cost(self):
        model = encoder()
        report, expected = htp_export.profile(model, runs=1, memory=True), htp_export.cost(model)
        for path, module in report.modules.items():
            assert module.memory is not None
            assert module.memory.estimated_bytes == expected.modules[path].activation_bytes
            assert (
                module.memory.self_estimated_bytes == expected.modules[path].self_activation_bytes
            )

    def test_what_a_fusion_never_makes_is_not_allocated_and_the_estimate_is_said_to_be_off(
        self, tmp_path
    ):
        net = nn.Sequential(nn.Linear(64, 64), nn.Conv1d(5, 5, 1), nn.GELU()).eval()
        x = torch.randn(1, 5, 64)
        htp_export.export(
            spread(net), (x,), tmp_path / "net.onnx", opset_version=17, dynamo=False, verbose=False
        )
        report = htp_export.profile(tmp_path / "net.onnx", runs=1, memory=True)
        made = 5 * 64 * 4  # MatMul, Add, Conv, and the five nodes of Gelu; Conv and Gelu stay
        gelu = report.modules["2"].memory
        assert gelu is not None
        assert (gelu.allocated_bytes, gelu.estimated_bytes, gelu.ratio) == (made, 5 * made, 0.2)
        assert report.memory is not None
        assert report.memory.off[0] == "2"
        assert "1" not in report.memory.off
        assert "off in 2 of 4 modules, most in 2: 1.280 kB allocated, 6.400 kB estimated" in str(
            report
        )


SUBGRAPHS = """
<ir_version: 10, opset_import: ["": 20]>
g (float[64, 64] x, int64 n, bool c) => (float[64, 64] y) <bool go = {1}> {
  r = Loop(n, go, x) <body = b (int64 i, bool k, float[64, 64] s) => (bool k2, float[64, 64] o) {
    k2 = Identity(k) m = MatMul(s, s) o = If(c) <
      then_branch = t () => (float[64, 64] u) { u = Softmax(m) },
      else_branch = e () => (float[64, 64] v) { v = MatMul(m, m) }
    >
  }>
  y = MatMul(r, r)
}
"""


class TestNames:
    def test_nodes_in_loops_and_branches_count_once_and_belong_to_their_modules(self):
        owners = {
            "r": "loop",
            "k2": "loop",
            "m": "loop.step",
            "o": "loop",
            "u": "loop.yes",
            "v": "loop.no",
            "y": "end",
        }
        feed = {
            "x": np.ones((64, 64), np.float32),
            "n": np.asarray(5, np.int64),
            "c": np.asarray(True),
        }
        report = htp_export.profile(tagged(SUBGRAPHS, **owners), feed, runs=1, memory=True)
        sizes = {path: module.memory for path, module in report.modules.items()}
        whole = 64 * 64 * 4
        assert sizes["loop.step"] == ModuleMemory(whole, whole, whole, whole, 1)
        assert sizes["end"] == ModuleMemory(whole, whole, whole, whole, 1)
        assert sizes["loop.no"].allocated_bytes == 0
        assert report.memory is not None
        assert report.memory.unattributed_bytes == 0

    def test_missing_names_commas_and_long_names_are_told_apart(self):
        text = '<ir_version: 10, opset_import: ["": 20]> g (float[9, 9] x) => (float[9, 9] y, float[9, 9] z) {\n'
        text += "  a = MatMul(x, x) LONG = MatMul(a, a) y = MatMul(LONG, x) z = MatMul(y, LONG)\n}"
        long = "a_tensor_name_of_more_than_sixteen_bytes"
        model = tagged(
            text.replace("LONG", long), a="first", y="third", z="fourth", **{long: "second"}
        )
        assert {model.graph.node[0].name, model.graph.node[1].name} == {""}
        model.graph.node[2].name = "a,b_" + "long" * 30
        report = htp_export.profile(model, runs=1, memory=True)
        assert [report.modules[path].memory for path in ("first", "second", "third", "fourth")] == [
            ModuleMemory(512, 512, 324, 324, 1)
        ] * 4
        assert report.memory is not None
        owners = sorted(path for kernel in report.memory.kernels for path in kernel.owners)
        assert owners == ["first", "fourth", "second", "third"]

    def test_what_belongs_to_no_module_is_said(self):
        text = '<ir_version: 10, opset_import: ["": 20]> g (float[9] x) => (float[9] y, float[9] z)'
        model = tagged(text + " { y = Softmax(x) z = Softmax<axis = 0>(x) }", y="act")
        report = htp_export.profile(model, runs=1, memory=True, session_options=as_written())
        assert report.memory is not None
        assert (report.memory.allocated_bytes, report.memory.unattributed_bytes) == (512, 256)
        assert "256 B was allocated for kernels of no module" in report.notes


def test_without_memory_nothing_is_measured_and_no_key_is_written():
    report = htp_export.profile(encoder(), runs=1)
    assert report.memory is None
    data = report.to_dict()
    assert "memory" not in data
    assert "allocated_bytes" not in data["modules"]["layer.0"]


def test_rounding_to_blocks_is_no_error_of_the_estimate():
    assert not ModuleMemory(512, 512, 300, 300, 2).is_off
    assert ModuleMemory(1024, 1024, 300, 300, 2).is_off
    assert ModuleMemory(0, 0, 4, 4, 0).is_off
    assert not ModuleMemory().is_off


def test_session_options_of_the_user_record_nothing_afterwards(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    options = onnxruntime.SessionOptions()
    htp_export.profile(encoder(), runs=1, memory=True, session_options=options)
    assert options.get_session_config_entry("session.collect_node_memory_stats_to_file") == ""
    assert (
        options.enable_mem_pattern,
        options.enable_mem_reuse,
        options.optimized_model_filepath,
    ) == (True, True, "")
    onnxruntime.InferenceSession(
        htp_export.load(encoder()).save(tmp_path / "net.onnx") or "net.onnx", options
    )
    assert sorted(file.name for file in Path().iterdir()) == ["net.onnx"]
