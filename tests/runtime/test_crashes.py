"""Models on which ONNX Runtime itself crashes: the package does not, and says what helps."""

import itertools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.runtime.crashes import AT_FAULT, DISABLED, can_crash
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
        note = any(DISABLED in note and AT_FAULT in note for note in result.notes)
        words.append(f"{target}|{AT_FAULT if note else ''}")
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
    assert [dict(stage.session_config) for stage in found.stages] == [{}, {DISABLED: AT_FAULT}, {}]
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
    assert written["model"]["decoder"]["session_options"][DISABLED] == AT_FAULT


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
