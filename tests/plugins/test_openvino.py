"""OpenVINO as an engine of ``profile``: what it merges, splits and inserts belongs to the modules whose work it is."""

import json
import sys
from typing import Any

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.profile.measurements import Entry, Kernel, entry_kernels
from htp_export.command.main import main
from htp_export.errors import InputError, ToolError
from tests.handmade import encoder
from tests.nets import Holding, spread
from tests.profile.test_latency import assert_adds_up


@pytest.fixture(scope="module")
def openvino() -> Any:
    return pytest.importorskip("openvino", reason="OpenVINO is an extra: pip install openvino")


class Block(nn.Module):
    """Layers that OpenVINO joins (linear with GELU), splits (normalisation) and lays out anew."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # else its last operation keeps the name
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.wide, self.act = nn.Linear(width, 4 * width), nn.GELU()
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.act(self.wide(self.norm(x))))


class Blocks(Holding, blocks=nn.Sequential(Block(256), Block(256)), head=nn.Linear(256, 8)):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.blocks(x)
        return hidden, self.head(hidden).softmax(-1)


def exported(model: nn.Module, *args: torch.Tensor, dynamo: bool, **kwargs: torch.Tensor) -> Any:
    import io

    file = io.BytesIO()
    program = htp_export.export(
        spread(model).eval(),
        args,
        None if dynamo else file,
        kwargs=kwargs,
        dynamo=dynamo,
        verbose=False,
    )
    return program if dynamo else onnx.load_from_string(file.getvalue())


@pytest.mark.usefixtures("openvino")
class TestOpenvino:
    @pytest.mark.parametrize("dynamo", [True, False])
    def test_every_node_of_the_engine_belongs_to_the_modules_whose_work_it_is(self, dynamo):
        torch.manual_seed(0)
        report = htp_export.profile(
            exported(Blocks(), torch.randn(4, 64, 256), dynamo=dynamo), engine="openvino", runs=5
        )
        assert (report.engine, report.providers, report.unattributed) == (
            "openvino",
            ("OpenVINO CPU",),
            (),
        )
        assert_adds_up(report)
        assert report.end_to_end_ms > 0
        owners: dict[str, set[tuple[str, ...]]] = {}
        for kernel in report.kernels:
            owners.setdefault(kernel.op_type, set()).add(kernel.owners)
        products = {path for paths in owners["FullyConnected"] for path in paths}
        assert {f"blocks.{k}.{part}" for k in (0, 1) for part in ("wide", "back")} <= products
        # A normalisation that OpenVINO's reader makes of several operations is not the work of what reads it.
        assert owners["MVN"] == {("blocks.0.norm",), ("blocks.1.norm",)}
        assert report.modules["head"].kernels >= 1

    def test_options_reach_the_engine_and_wrong_ones_are_refused(self):
        report = htp_export.profile(
            encoder(), engine="openvino", runs=1, engine_options={"INFERENCE_PRECISION_HINT": "f32"}
        )
        assert report.unattributed == ()
        with pytest.raises(ToolError, match=r"OpenVINO.*NO_SUCH"):
            htp_export.profile(encoder(), engine="openvino", runs=1, engine_options={"NO_SUCH": 1})

    def test_a_model_that_it_cannot_read_is_an_error_of_the_tool(self):
        model = ir.from_proto(
            onnx.parser.parse_model(
                '<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { y = NoOp(x) }'
            )
        )
        model.graph[0].metadata_props["htp.module"] = "act"
        with pytest.raises(ToolError, match=r"OpenVINO.*cannot load"):
            htp_export.profile(model, engine="openvino")

    def test_the_command_draws_it(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        htp_export.load(encoder()).save("net.onnx")
        assert (
            main(["profile", "net.onnx", "--engine", "openvino", "--runs", "2", "--threads", "1"])
            == 0
        )
        assert "ms under the profiler" in capsys.readouterr().out
        assert main(["profile", "net.onnx", "--engine", "openvino", "--runs", "2", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["engine"], result["unattributed_ms"]) == ("openvino", 0)


def chain(*ops: str) -> ir.Model:
    """Nodes in a row, each of a module of its name."""
    values = [ir.val("x", ir.DataType.FLOAT, [2]), *(ir.val(f"v{k}") for k in range(len(ops)))]
    nodes = [ir.node(op, [values[k]], outputs=[values[k + 1]], name=op) for k, op in enumerate(ops)]
    for node in nodes:
        node.metadata_props["htp.module"] = node.op_type.lower()
    return ir.Model(
        ir.Graph(values[:1], values[-1:], nodes=nodes, opset_imports={"": 20}), ir_version=10
    )


def test_inserted_nodes_belong_to_their_consumers_and_without_to_their_producers():
    tagged = htp_export.load(chain("Neg", "Exp"))
    neg, exp = tagged.nodes
    entries = [
        Entry(Kernel(name, kind, "CPU", ms, 1.0), nodes, inputs, [name])
        for name, kind, ms, nodes, inputs in (
            ("x", "Parameter", 0.0, [], []),
            ("reorder", "Reorder", 1.0, [], ["x"]),
            ("neg", "Eltwise", 2.0, [neg], ["reorder"]),
            ("between", "Convert", 4.0, [], ["neg"]),
            ("exp", "Eltwise", 8.0, [exp], ["between"]),
            ("end", "Reorder", 16.0, [], ["exp"]),
            ("alone", "Inner", 32.0, [], []),
        )
    ]
    kernels = entry_kernels(entries, tagged)
    assert {kernel.name: (kernel.ms, kernel.owners) for kernel in kernels} == {
        "x": (0.0, ("neg",)),
        "reorder": (1.0, ("neg",)),
        "neg": (2.0, ("neg",)),
        "between": (4.0, ("exp",)),
        "exp": (8.0, ("exp",)),
        "end": (16.0, ("exp",)),
        "alone": (32.0, ()),
    }


def test_where_openvino_is_not_installed_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(
        InputError, match=r"needs openvino; install it with: .*htp-export\[openvino\]"
    ):
        htp_export.profile(encoder(), engine="openvino")


def test_options_of_onnx_runtime_are_refused():
    with pytest.raises(
        InputError,
        match="is for engine='onnxruntime'",
    ):
        htp_export.profile(encoder(), engine="openvino", memory=True)
    with pytest.raises(InputError, match="engine_options are for other engines"):
        htp_export.profile(encoder(), engine_options={"x": 1})
