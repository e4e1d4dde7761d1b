"""Models on which ONNX Runtime crashes, or computes something else: the package does not, and says what helps."""

import itertools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from htp_export.runtime.faulty_optimizers import (
    CRASHING,
    DISABLED,
    INACCURATE,
    can_crash,
    faulty_optimizers,
    safe_entries,
)
from htp_export.runtime.sessions import RunnableModel, Session
from tests.exporting import open_sizes, quick
from tests.nets import spread


class Encoder(nn.Module):
    """A table, an encoder with attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.table(tokens)))


PLANS = (
    ".",
    "encoder",
    "encoder.self_attn",
    "encoder.linear1,encoder.linear2",
    "encoder.norm1",
    "table,head",
)


def exported(file: Path, exporter: str, *, dynamic: bool) -> Path:
    model, tokens = spread(Encoder().eval()), torch.arange(24).reshape(2, 12)
    given = open_sizes(exporter, tokens={0: "batch", 1: "length"}) if dynamic else {}
    given = {"input_names": ["tokens"], **given}
    htp_export.export(model, (tokens,), file, dynamo=exporter == "dynamo", verbose=False, **given)
    return file


def finishes(code: str, *arguments: object) -> str:
    """What a process prints that does not crash."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


LOAD = """
    import sys, onnxruntime
    for word in sys.argv[1:]:
        file, _, disabled = word.partition("|")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        if disabled:
            options.add_session_config_entry("optimization.disable_specified_optimizers", disabled)
        print(file, flush=True)
        onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
"""


@pytest.mark.filterwarnings("ignore:.*legacy TorchScript-based ONNX export.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("exporter", "dynamic"),
    quick(list(itertools.product(("dynamo", "torchscript"), (True, False))), ("dynamo", True)),
)
def test_a_float16_model_loads_as_its_notes_say(exporter, dynamic, tmp_path):
    words, noted = [], []
    file = exported(tmp_path / "net.onnx", exporter, dynamic=dynamic)
    for number, plan in enumerate(PLANS):
        target = tmp_path / f"{number}.onnx"
        result = htp_export.quantize(file, {plan: "fp16"}, target)
        note = any(DISABLED in note and CRASHING in note for note in result.notes)
        words.append(f"{target}|{CRASHING if note else ''}")
        noted += [plan] * note
    assert len(finishes(LOAD, *words).split()) == len(words)
    assert not dynamic or "encoder.self_attn" in noted
    assert not {"encoder.norm1", "table,head"} & set(noted)


@pytest.fixture(scope="module")
def at_risk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that ONNX Runtime cannot load as it is, made of ``net.onnx`` beside it."""
    folder = tmp_path_factory.mktemp("crashes")
    quantized = folder / "fp16.onnx"
    htp_export.quantize(
        exported(folder / "net.onnx", "dynamo", dynamic=True),
        {"encoder.self_attn": "fp16"},
        quantized,
    )
    return quantized


@pytest.mark.long
def test_sessions_of_the_package_survive(at_risk, tmp_path):
    assert can_crash(ir.load(at_risk))
    code = """
        import sys
        import numpy as np
        import onnxruntime
        import htp_export
        file, quantized, target = sys.argv[1:]
        data = {"tokens": np.arange(24).reshape(2, 12)}
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("optimization.disable_specified_optimizers", "GeluFusionL2")
        htp_export.profile(quantized, data, runs=1, warmup=0, session_options=options)
        print(options.get_session_config_entry("optimization.disable_specified_optimizers"))
        htp_export.profile(quantized, data, runs=1, warmup=0)
        htp_export.tools.onnxruntime(quantized, target)
        found = htp_export.sensitivity(file, ["fp16"], data=data, select="encoder.self_attn", runs=1, all_but=False)
        print("fp16" in found.modules["encoder.self_attn"])
    """
    files = at_risk.with_name("net.onnx"), at_risk, tmp_path / "optimised.onnx"
    assert finishes(code, *files).split() == ["GeluFusionL2", "True"]


def test_the_program_for_ray_survives(at_risk, tmp_path):
    found = htp_export.partition(at_risk, ["encoder", "head"], tmp_path / "stages", serve="ray")
    assert [dict(stage.session_config) for stage in found.stages] == [{}, {DISABLED: CRASHING}, {}]
    assert [
        stage.session_config for stage in htp_export.load_partition(tmp_path / "stages").stages
    ] == [stage.session_config for stage in found.stages]
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import serve_app
        for number in range(3):
            serve_app.Stage(sys.argv[1], number, ["CPUExecutionProvider"])
            print(number)
    """
    assert finishes(code, tmp_path / "stages").split() == ["0", "1", "2"]


def test_triton_and_genai_are_told_about_stages_at_risk(at_risk, tmp_path):
    htp_export.partition(at_risk, ["encoder", "head"], tmp_path / "triton", serve="triton")
    configs = [
        (tmp_path / "triton" / "triton" / f"Encoder_stage{number}" / "config.pbtxt").read_text()
        for number in range(3)
    ]
    assert ["optimization { graph { level: 1 } }" in text for text in configs] == [
        False,
        True,
        False,
    ]
    config = tmp_path / "genai_config.json"
    config.write_text(
        json.dumps({"model": {"decoder": {"inputs": {}, "outputs": {}}}, "search": {}})
    )
    htp_export.partition(
        at_risk, ["encoder", "head"], tmp_path / "genai", serve="genai", genai_config=config
    )
    written = json.loads((tmp_path / "genai" / "genai_config.json").read_text())
    assert written["model"]["decoder"]["session_options"][DISABLED] == CRASHING


@pytest.mark.parametrize(
    ("axes", "narrow", "cast", "expected"),
    [
        ([1, 0, 2], True, None, True),  # ONNX Runtime inserts the Cast
        ([1, 0, 2], False, ir.DataType.DOUBLE, True),
        ([1, 2, 0], False, ir.DataType.DOUBLE, True),
        ([1, 0, 2], False, ir.DataType.FLOAT16, False),
        ([1, 0, 2], False, None, False),
        ([0, 2, 1], True, None, False),
        ([1, 0], True, None, False),
        (None, True, None, False),
    ],
)
def test_what_makes_a_crash_possible(axes, narrow, cast, expected):
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16 if narrow else ir.DataType.FLOAT))
    nodes = [ir.node("Transpose", [x], {} if axes is None else {"perm": axes})]
    if cast is not None:
        nodes.append(ir.node("Cast", nodes[-1].outputs, {"to": int(cast)}))
    alone = ir.Model(ir.Graph([], [], nodes=nodes, opset_imports={"": 20}), ir_version=10)
    assert not can_crash(alone)
    alone.graph.append(ir.node("MatMul", [nodes[-1].outputs[0], ir.Value(name="w")]))
    assert can_crash(alone) is expected


_QUANTIZED = [
    ("INT8", -128), ("INT8", 0), ("UINT8", 0), ("UINT8", 3), ("INT16", 0), ("UINT16", 7), ("INT4", -8), ("INT4", 0),
    ("UINT4", 8), ("FLOAT8E4M3FN", 0), ("FLOAT8E5M2", 0), ("FLOAT8E4M3FN", None), ("INT4", None),
]  # fmt: skip


def relu_and_quantized(kind: str, zero: int | None, *, is_node: bool = False) -> onnx.ModelProto:
    """Relu, QuantizeLinear and DequantizeLinear; the zero point is an initializer, or made by a node."""
    number, constants = getattr(onnx.TensorProto, kind), {"scale": np.float32(0.25)}
    nodes, read, attributes = [onnx.helper.make_node("Relu", ["x"], ["r"])], ["scale"], {}
    if zero is None:
        attributes["output_dtype"] = number
    else:
        read.append("zero")
        constants["zero"] = np.asarray(zero, onnx.helper.tensor_dtype_to_np_dtype(number))
    tensors = [
        onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()
    ]
    if is_node and zero is not None:
        nodes.insert(0, onnx.helper.make_node("Constant", [], ["zero"], value=tensors.pop()))
    nodes.append(onnx.helper.make_node("QuantizeLinear", ["r", *read], ["q"], **attributes))
    nodes.append(onnx.helper.make_node("DequantizeLinear", ["q", *read], ["y"]))
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [17]) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10
    )


@pytest.mark.parametrize("is_node", [False, True])
@pytest.mark.parametrize(("kind", "zero"), _QUANTIZED)
def test_no_relu_is_lost_in_front_of_a_quantization(kind, zero, is_node, tmp_path):
    proto, feed = (
        relu_and_quantized(kind, zero, is_node=is_node),
        {"x": np.linspace(-4, 4, 17, dtype=np.float32)},
    )
    [expected] = onnx.reference.ReferenceEvaluator(proto).run(None, feed)

    def off(entries: dict[str, str]) -> float:
        options = onnxruntime.SessionOptions()
        for name, said in entries.items():
            options.add_session_config_entry(name, said)
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return float(np.abs(session.run(None, feed)[0] - expected).max())

    model = ir.from_proto(proto)
    is_needed = faulty_optimizers(model) == [INACCURATE]
    # 4 bits are left out with any zero point
    assert is_needed == (off({}) > 0 or (kind, zero) == ("INT4", -8))
    assert off(safe_entries(model)) == 0
    assert (
        float(
            np.abs(Session(RunnableModel.of(model, "g", tmp_path)).run(feed)["y"] - expected).max()
        )
        == 0
    )


def test_triton_runs_a_stage_that_can_lose_a_relu_at_the_first_level(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    htp_export.export(net, (torch.randn(2, 8),), tmp_path / "net.onnx", verbose=False)
    model = htp_export.load(tmp_path / "net.onnx").model
    relu = next(node for node in model.graph if node.op_type == "Relu")
    narrow = ir.DataType.FLOAT8E4M3FN
    zero, scale = (
        ir.tensor(np.zeros((), narrow.numpy()), name="zero"),
        ir.tensor(np.float32(0.01), name="scale"),
    )
    given = [
        ir.Value(name=each.name, const_value=each, type=ir.TensorType(each.dtype))
        for each in (scale, zero)
    ]
    for value in given:
        model.graph.register_initializer(value)
    steps = [
        ir.node("QuantizeLinear", [relu.outputs[0], *given], outputs=[ir.val("q", narrow, [2, 8])])
    ]
    steps.append(
        ir.node(
            "DequantizeLinear", [steps[0].outputs[0], *given], outputs=[ir.val("d", narrow, [2, 8])]
        )
    )
    steps[1].outputs[0].dtype = ir.DataType.FLOAT
    readers = [use.node for use in relu.outputs[0].uses() if use.node.graph is model.graph]
    for reader in readers:
        reader.replace_input_with(0, steps[1].outputs[0])
    for step in steps:
        step.metadata_props.update(relu.metadata_props)
    model.graph.insert_after(relu, steps)
    model.graph.opset_imports[""] = 21
    htp_export.partition(model, ["2"], tmp_path / "triton", serve="triton")
    configs = sorted((tmp_path / "triton").rglob("config.pbtxt"))
    levels = [
        path.parent.name
        for path in configs
        if "optimization { graph { level: -1 } }" in path.read_text()
    ]
    assert [name.rpartition("_")[2] for name in levels] == ["stage0"]
