"""export_plan: files as other tools read them, held against how the tools match names, and against those installed."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.quantize.plan_exporting import targets
from htp_export.command.main import main
from htp_export.errors import InputError, RuleError
from tests.exporting import BOTH
from tests.extract.test_cutting import exported_to
from tests.nets import EXPORTERS, composed, spread


def in_turn(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = torch.relu(layer(x))
    return self.head(x)


def example() -> torch.Tensor:
    return torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """More than ten equal layers, so that the name of one node is the beginning of another's; products without bias."""
    folder = tmp_path_factory.mktemp("plans")
    found = {}
    for exporter in EXPORTERS:
        layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(12))
        model = spread(composed(in_turn, layers=layers, head=nn.Linear(32, 4))).eval()
        named = {"input_names": ["x"]} if exporter == "torchscript" else {}
        found[exporter] = exported_to(
            folder / f"{exporter}.onnx", model, {"x": example()}, exporter, **named
        )
    return found


def owned(file: Path, path: str) -> set[str]:
    return {str(node.name) for node in htp_export.load(file)[path].nodes}


def all_names(file: Path) -> set[str]:
    return {str(node.name) for node in htp_export.load(file).model.graph}


class Reader:
    """Calibration data as ONNX Runtime reads it."""

    def __init__(self) -> None:
        self.feeds: Iterator[dict[str, Any]] = iter([{"x": example().numpy()}])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.feeds, None)


def applied(steps: list[dict[str, Any]], file: Path, folder: Path) -> onnx.ModelProto:
    """What ONNX Runtime makes of the steps, as docs/quantize.md applies them."""
    from onnxruntime.quantization import CalibrationMethod, QuantType

    source, target = file, folder / "step.onnx"
    for number, step in enumerate(steps):
        module, _, name = step["function"].rpartition(".")
        function, arguments = getattr(import_module(module), name), dict(step["arguments"])
        target = folder / f"step{number}.onnx"
        for key in ("activation_type", "weight_type"):
            if key in arguments:
                arguments[key] = QuantType[arguments[key]]
        if name == "quantize_static":
            arguments["calibrate_method"] = CalibrationMethod[arguments["calibrate_method"]]
            function(source, target, Reader(), **arguments)
        elif name == "quantize_dynamic":
            function(source, target, **arguments)
        elif name == "MatMulNBitsQuantizer":
            arguments["op_types_to_quantize"] = tuple(arguments["op_types_to_quantize"])
            quantizer = function(onnx.load(source), **arguments)
            quantizer.process()
            quantizer.model.save_model_to_file(str(target))
        else:
            model = onnx.load(source)
            # or weights that stay float32 are stored as float16, and cast back
            model.graph.ClearField("value_info")
            converted = function(model, **arguments)
            converted.graph.ClearField("value_info")  # it has wrong types of what stays float32
            onnx.save(converted, target)
        source = target
    return onnx.load(target)


def made_by_dequantizing(model: onnx.ModelProto) -> set[str]:
    return {
        name
        for node in model.graph.node
        if node.op_type == "DequantizeLinear"
        for name in node.output
    }


def bits_of(model: onnx.ModelProto, attribute: str = "bits") -> dict[str, int]:
    """Node with a weight in blocks → its bits, or another attribute."""
    return {
        re.sub("_Q[48]$", "", node.name): next(
            each.i for each in node.attribute if each.name == attribute
        )
        for node in model.graph.node
        if node.op_type == "MatMulNBits"
    }


class TestOnnxRuntime:
    @pytest.mark.long
    @BOTH
    def test_static_quantization_takes_exactly_the_planned_products(
        self, files, exporter, tmp_path
    ):
        plan = htp_export.export_plan(
            files[exporter], {"layers.1": "int8", "head": "int8"}, to="ort"
        )
        made = applied(plan.content["steps"], files[exporter], tmp_path)
        weighted = [node for node in made.graph.node if node.op_type in ("MatMul", "Gemm")]
        quantized = {
            node.name
            for node in weighted
            if set(node.input[1:2]) <= made_by_dequantizing(made) and len(node.input) > 1
        }
        planned = owned(files[exporter], "layers.1") | owned(files[exporter], "head")
        assert quantized == {node.name for node in weighted if node.name in planned}
        assert len(quantized) == 2

    @BOTH
    def test_blocks_of_weights_are_those_of_the_planned_products(self, files, exporter, tmp_path):
        rules = {"layers.1": "int4", "layers.11": {"precision": "int8-weights", "block_size": 16}}
        plan = htp_export.export_plan(files[exporter], rules, to="ort")
        made = applied(plan.content["steps"], files[exporter], tmp_path)
        bits, sizes = bits_of(made), bits_of(made, "block_size")
        assert sorted((bits[name], sizes[name]) for name in bits) == [(4, 32), (8, 16)]
        assert bits.keys() <= owned(files[exporter], "layers.1") | owned(
            files[exporter], "layers.11"
        )

    @BOTH
    def test_dynamic_and_half_precision(self, files, exporter, tmp_path):
        plan = htp_export.export_plan(
            files[exporter], {"layers.1": "int8-dynamic", "layers.2": "fp16"}, to="ort"
        )
        assert [step["function"].rpartition(".")[2] for step in plan.content["steps"]] == [
            "convert_float_to_float16",
            "quantize_dynamic",
        ]
        made = applied(plan.content["steps"], files[exporter], tmp_path)
        assert sum(node.op_type == "MatMulInteger" for node in made.graph.node) == 1
        halves = [
            each for each in made.graph.initializer if each.data_type == onnx.TensorProto.FLOAT16
        ]
        assert [list(each.dims) for each in halves] == [[32, 32]]

    def test_what_has_no_blocks_is_said(self, tmp_path):
        model = spread(nn.Sequential(nn.Conv1d(4, 4, 3))).eval()
        file = exported_to(tmp_path / "conv.onnx", model, {"input": torch.randn(2, 4, 8)}, "dynamo")
        notes = htp_export.export_plan(file, {".": "int4"}, to="ort").notes
        assert "1 nodes keep their weights: ONNX Runtime has no blocks in Conv" in notes


class TestNncf:
    @BOTH
    def test_all_other_nodes_are_ignored(self, files, exporter):
        content = htp_export.export_plan(files[exporter], {"layers.1": "int8"}, to="nncf").content
        ignored = set(content["quantize"]["ignored_scope"]["names"])
        constants = {
            str(node.name)
            for node in htp_export.load(files[exporter]).model.graph
            if node.op_type == "Constant"
        }
        assert (
            ignored == all_names(files[exporter]) - owned(files[exporter], "layers.1") - constants
        )
        assert content["quantize"]["preset"] == "mixed"

    def test_each_precision_of_weights_is_a_run_of_its_own(self, files):
        rules = {"layers.1": "int4", "layers.2": {"precision": "int8-weights", "symmetric": True}}
        runs = htp_export.export_plan(files["dynamo"], rules, to="nncf").content["compress_weights"]
        assert [(run["mode"], run.get("group_size")) for run in runs] == [
            ("int8_sym", None),
            ("int4_asym", 32),
        ]
        assert owned(files["dynamo"], "layers.2") <= set(runs[1]["ignored_scope"]["names"])

    @BOTH
    def test_nncf_quantizes_exactly_the_planned_products(self, files, exporter):
        nncf = pytest.importorskip("nncf")
        content = htp_export.export_plan(
            files[exporter], {"layers.1": "int8", "head": "int8"}, to="nncf"
        ).content
        scope = nncf.IgnoredScope(**content["quantize"]["ignored_scope"])
        preset = nncf.QuantizationPreset(content["quantize"]["preset"])
        data = nncf.Dataset([{"x": example().numpy()}])
        made = nncf.quantize(onnx.load(files[exporter]), data, preset=preset, ignored_scope=scope)
        read = {
            node.name for node in made.graph.node if set(node.input) & made_by_dequantizing(made)
        }
        products = {node.name for node in made.graph.node if node.op_type in ("MatMul", "Gemm")}
        assert read == products & (
            owned(files[exporter], "layers.1") | owned(files[exporter], "head")
        )

    @BOTH
    def test_nncf_compresses_exactly_the_planned_weights(self, files, exporter):
        nncf = pytest.importorskip("nncf")
        rules = {"layers.1": "int4", "layers.2": "int8-weights"}
        made = onnx.load(files[exporter])
        for run in htp_export.export_plan(files[exporter], rules, to="nncf").content[
            "compress_weights"
        ]:
            mode, scope = (
                nncf.CompressWeightsMode(run.pop("mode")),
                nncf.IgnoredScope(**run.pop("ignored_scope")),
            )
            made = nncf.compress_weights(made, mode=mode, ignored_scope=scope, **run)
        bits = set(bits_of(made).values())
        names = {node.name for node in made.graph.node if node.op_type in ("MatMul", "Gemm")}
        assert not names & {next(iter(owned(files[exporter], "layers.1")))}
        stored = {each.name: each.data_type for each in made.graph.initializer}
        eight = [
            name
            for name, kind in stored.items()
            if kind in (onnx.TensorProto.UINT8, onnx.TensorProto.INT8)
        ]
        assert (bits, bool(eight)) == ({4}, True)


class TestModelOpt:
    @BOTH
    def test_patterns_match_exactly_the_planned_nodes(self, files, exporter):
        content = htp_export.export_plan(
            files[exporter], {"layers.1": "int8"}, to="modelopt"
        ).content
        names = all_names(files[exporter])

        # as modelopt.onnx.quantization.graph_utils.expand_node_names_from_patterns
        def matched(key: str) -> set[str]:
            return {name for pattern in content[key] for name in names if re.match(pattern, name)}

        assert matched("nodes_to_quantize") == owned(files[exporter], "layers.1")
        assert matched("nodes_to_exclude") == names - owned(files[exporter], "layers.1")
        assert (content["quantize_mode"], content["high_precision_dtype"]) == ("int8", "fp32")

    def test_modelopt_reads_them(self, files, tmp_path):
        quantization = pytest.importorskip("modelopt.onnx.quantization")
        content = htp_export.export_plan(
            files["dynamo"], {"layers.1": "int8"}, to="modelopt"
        ).content
        target, data = tmp_path / "quantized.onnx", {"x": example().numpy()}
        quantization.quantize(
            str(files["dynamo"]),
            output_path=str(target),
            calibration_data=data,
            calibration_eps=["cpu"],
            **content,
        )
        made = onnx.load(target)
        read = {
            node.name for node in made.graph.node if set(node.input) & made_by_dequantizing(made)
        }
        products = {node.name for node in made.graph.node if node.op_type in ("MatMul", "Gemm")}
        assert read & products == products & owned(files["dynamo"], "layers.1") != set()

    def test_weights_of_eight_bits_are_named_among_those_of_four(self, files):
        rules = {"layers.*": "int4", "layers.11": "int8-weights", "head": "fp16"}
        content = htp_export.export_plan(files["dynamo"], rules, to="modelopt").content
        weights = [
            node.inputs[1].name
            for node in htp_export.load(files["dynamo"])["layers.11"].nodes
            if len(node.inputs) > 1
        ]
        assert content["layers_8bit"] == ",".join(weights)
        assert content["enable_mixed_quant"]
        assert content["block_size"] == 32
        assert content["high_precision_dtype"] == "fp16"


def decode(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.model.layers:
        x = layer.mlp.down_proj(layer.self_attn.q_proj(x).relu())
    return self.lm_head(x)


@pytest.fixture(scope="module")
def decoder_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules with the paths of a decoder of transformers."""
    file, linear = (
        tmp_path_factory.mktemp("decoder") / "model.onnx",
        partial(nn.Linear, 32, bias=False),
    )
    parts = [
        {"self_attn": {"q_proj": linear(32)}, "mlp": {"down_proj": linear(32)}} for _ in range(2)
    ]
    layers = [
        composed(decode, **{key: nn.ModuleDict(part) for key, part in each.items()})
        for each in parts
    ]
    model = composed(
        decode, model=nn.ModuleDict({"layers": nn.ModuleList(layers)}), lm_head=linear(64)
    )
    htp_export.export(spread(model).eval(), (example(),), file, verbose=False, dynamo=True)
    return file


class TestGenAI:
    RULES: ClassVar[dict[str, Any]] = {
        "model.layers.*.self_attn": {"precision": "int4", "symmetric": True},
        "lm_head": {"precision": "int8-weights", "block_size": 32, "symmetric": True},
    }

    def test_nodes_have_the_names_of_the_builder(self, decoder_file):
        plan = htp_export.export_plan(decoder_file, self.RULES, to="genai")
        weights = plan.content["quant_config"]["weights"]
        assert (weights["type"], weights["block_size"], weights["symmetric"]) == ("int4", 32, True)
        assert weights["overrides"] == [
            {"match": {"name": "/model/layers.0/mlp/down_proj/MatMul"}, "exclude": True},
            {"match": {"name": "/model/layers.1/mlp/down_proj/MatMul"}, "exclude": True},
            {"match": {"name": "/lm_head/MatMul"}, "type": "int8"},
        ]

    def test_modules_that_the_builder_does_not_know_are_refused(self, files):
        with pytest.raises(
            InputError, match=r"the builder of genai names no node by module 'layers\.0'"
        ):
            htp_export.export_plan(files["dynamo"], {"head": "int4"}, to="genai")

    @pytest.mark.slow
    def test_the_builder_gives_each_module_the_planned_bits(self, tmp_path):
        pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
        pytest.importorskip(
            "transformers.exporters", reason="transformers older than 5.23 has no exporters"
        )
        from htp_export.huggingface import example_calls
        from tests.decoders import Programs, decoder
        from tests.export.test_transformers_js import words

        model, checkpoint, options = (
            decoder("llama"),
            words(tmp_path / "llama"),
            tmp_path / "options.json",
        )
        model.save_pretrained(checkpoint)
        rules = {**self.RULES, "model.layers.1.mlp.down_proj": self.RULES["lm_head"]}
        htp_export.export_plan(
            Programs(model, example_calls(model))["model"], rules, options, to="genai"
        )
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint)]
        command += [
            "-o",
            str(tmp_path / "built"),
            "-e",
            "cpu",
            "-c",
            str(tmp_path),
            "--target_options",
            str(options),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        layers = [
            f"/model/layers.{layer}/attn/{name}/MatMul"
            for layer in range(2)
            for name in ("qkv_proj", "o_proj")
        ]
        eight = dict.fromkeys(["/model/layers.1/mlp/down_proj/MatMul", "/lm_head/MatMul"], 8)
        built = onnx.load(tmp_path / "built" / "model.onnx", load_external_data=False)
        assert bits_of(built) == {**dict.fromkeys(layers, 4), **eight}


class TestOlive:
    def test_each_precision_is_a_pass_with_the_names_of_its_nodes(self, decoder_file):
        rules = {"model.layers.0": "fp16", "model.layers.1.mlp": "int8-dynamic", "lm_head": "int4"}
        passes = htp_export.export_plan(decoder_file, rules, to="olive").content["passes"]
        half, dynamic, blocks = passes.values()
        assert set(half["node_block_list"]) == all_names(decoder_file) - owned(
            decoder_file, "model.layers.0"
        )
        assert dynamic["nodes_to_quantize"] == list(owned(decoder_file, "model.layers.1.mlp"))
        assert (blocks["bits"], set(blocks["nodes_to_include"])) == (
            4,
            owned(decoder_file, "lm_head"),
        )

    @pytest.mark.slow
    def test_olive_gives_each_node_the_planned_bits(self, decoder_file, tmp_path):
        program = shutil.which(os.environ.get("HTP_OLIVE", "olive"))
        if program is None:
            pytest.skip(
                "HTP_OLIVE names no program olive, and none is installed (pip install olive-ai)"
            )
        rules = {
            "model.layers.0": "int4",
            "lm_head": {"precision": "int8-weights", "block_size": 16},
        }
        rules["model.layers.1.mlp"] = "int8-dynamic"
        config, target = tmp_path / "olive.json", tmp_path / "made"
        htp_export.export_plan(decoder_file, rules, config, to="olive")
        command = [
            program,
            "run",
            "--config",
            str(config),
            "-m",
            str(decoder_file),
            "-o",
            str(target),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        made = onnx.load(next(target.rglob("*.onnx")), load_external_data=False)
        expected = dict.fromkeys(owned(decoder_file, "model.layers.0.self_attn.q_proj"), 4)
        expected |= dict.fromkeys(owned(decoder_file, "model.layers.0.mlp.down_proj"), 4)
        assert bits_of(made) == expected | dict.fromkeys(owned(decoder_file, "lm_head"), 8)
        assert sum(node.op_type == "MatMulInteger" for node in made.graph.node) == 1


BLOCKS_OF_64 = {"precision": "int4", "block_size": 64}


@pytest.mark.parametrize(
    ("to", "rules", "problem"),
    [
        ("modelopt", {"lm_head": "int8", "model": "int4"}, "not both"),
        ("modelopt", {"lm_head": "uint8"}, "modelopt has no uint8"),
        (
            "modelopt",
            {"lm_head": "fp16", "model": "bf16"},
            "rule 'model': modelopt has one activation in a run",
        ),
        ("modelopt", {"lm_head": "int8-dynamic"}, "rule 'lm_head': modelopt has no int8-dynamic"),
        ("modelopt", {"lm_head": "int4", "model": BLOCKS_OF_64}, "'model': .*one block_size"),
        ("genai", {"lm_head": "fp16"}, "rule 'lm_head': genai has no fp16"),
        ("genai", {"lm_head": "fp32"}, "no weights of 4 or 8 bits"),
        ("genai", {"lm_head": "int4", "model": BLOCKS_OF_64}, "one block_size in a run"),
        (
            "genai",
            {"lm_head": "int4:algorithm=hqq"},
            "algorithm hqq; it takes default, rtn, k-quant",
        ),
        (
            "genai",
            {"lm_head": "int4", "model": "int4:accuracy_level=1"},
            "'model': .* one accuracy_level .* 4 and 1",
        ),
        ("olive", {"lm_head": "int8"}, "rule 'lm_head': olive has no int8; it takes the methods"),
        (
            "olive",
            {"lm_head": "bf16"},
            "olive has no bf16 with activation bfloat16; it takes float16",
        ),
        ("olive", {"lm_head": "int4:algorithm=hqq"}, "with algorithm hqq; it takes default, rtn"),
    ],
)
def test_what_a_tool_cannot_do_is_refused(decoder_file, to, rules, problem):
    with pytest.raises(InputError, match=problem):
        htp_export.export_plan(decoder_file, rules, to=to)


PLAIN = {
    "weights": "int4",
    "cast": "fp16",
    "static": "int8",
    "dynamic": "int8-dynamic",
    "float8": "fp8",
    "fixed": "fixed",
    "microscaling": "mxfp8",
}
FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("weights", {"format": "qdq"}),
    *(("weights", {"activation": kind}) for kind in ("float16", "bfloat16")),
    *(("weights", {"accuracy_level": level}) for level in (1, 2, 3)),
    *(("weights", {"algorithm": name}) for name in ("rtn", "hqq", "k-quant")),
    ("cast", {"activation": "bfloat16", "weight": "bfloat16"}),
    ("static", {"activation": "int16", "symmetric": True}),
    ("static", {"activation": "uint16", "weight": "uint8"}),
    ("float8", {}),
    ("fixed", {}),
    ("microscaling", {}),
]


@pytest.mark.parametrize("to", targets())
@pytest.mark.parametrize(("method", "fields"), FIELDS, ids=str)
def test_no_tool_gets_a_plan_without_a_field_that_it_cannot_express(
    decoder_file, to, method, fields
):
    """A field changes what is written, or the rule is refused by its selector."""
    given = {"precision": PLAIN[method], **fields}
    written: Any = None
    with contextlib.suppress(RuleError):
        written = htp_export.export_plan(decoder_file, {"lm_head": given}, to=to).content
    if written is None:
        named = "|".join(
            f"with {name} {value}; it takes" for name, value in (fields or {"": ""}).items()
        )
        with pytest.raises(RuleError, match=f"rule 'lm_head': .*({named}|it takes the methods)"):
            htp_export.export_plan(decoder_file, {"lm_head": given}, to=to)
        return
    same = fields.get("algorithm") == "rtn" and to == "olive"  # it has no other
    plain = htp_export.export_plan(decoder_file, {"lm_head": PLAIN[method]}, to=to).content
    assert (written == plain) == same


def test_nodes_without_names_are_refused():
    x = ir.val("x", ir.DataType.FLOAT, [2])
    relu = ir.node("Relu", [x], name="", metadata_props={"htp.module": "act"})
    model = ir.Model(
        ir.Graph([x], relu.outputs, nodes=[relu], opset_imports={"": 20}), ir_version=10
    )
    with pytest.raises(InputError, match="a Relu of module 'act' has no name"):
        htp_export.export_plan(model, {"act": "fp16"}, to="nncf")


class TestFiles:
    @pytest.mark.parametrize("to", ["ort", "nncf", "modelopt"])
    def test_the_command_writes_what_the_function_returns(self, files, tmp_path, capsys, to):
        out = tmp_path / "plan.txt"
        command = [
            "quantize",
            str(files["dynamo"]),
            "--rule",
            "layers.*=int8",
            "--plan-for",
            to,
            "-o",
            str(out),
        ]
        assert main([*command, "--json"]) == 0
        result = htp_export.export_plan(files["dynamo"], {"layers.*": "int8"}, to=to)
        assert out.read_text() == result.text
        printed = json.loads(capsys.readouterr().out)
        assert printed["nodes"] == dict(result.nodes)
        assert set(printed) == {"schema_version", *result.to_dict()}
        assert sorted(targets()) == ["genai", "modelopt", "nncf", "olive", "ort"]

    def test_rules_of_a_file_come_before_those_that_are_typed(self, files, tmp_path, capsys):
        (tmp_path / "plan.yaml").write_text("'layers.*': int8\nhead: int4\n")
        command = [
            "quantize",
            str(files["dynamo"]),
            str(tmp_path / "plan.yaml"),
            "--rule",
            "head=fp32",
        ]
        assert main([*command, "--plan-for", "ort", "-o", str(tmp_path / "plan.json")]) == 0
        out = capsys.readouterr().out
        assert "fp32" in out.splitlines()[0]
        assert "wrote" in out
        [step] = json.loads((tmp_path / "plan.json").read_text())["steps"]
        planned = set(step["arguments"]["nodes_to_quantize"])
        assert len(planned) == 12
        assert planned.isdisjoint(owned(files["dynamo"], "head"))
