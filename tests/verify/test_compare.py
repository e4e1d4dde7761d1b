"""Compare: two ONNX files of one model, or a file and the tensors of another engine, module by module."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.editing.editing import add_constant, replace_uses
from htp_export.errors import FileError, InputError
from tests import faults
from tests.decoders import TEXT
from tests.exporting import exported, quick
from tests.nets import EXPORTERS, Holding, spread, x


class Wide(Holding, first=nn.Linear(32, 32), norm=nn.LayerNorm(32), last=nn.Linear(32, 32)):
    """A linear, a norm and a linear that runs twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.last(self.norm(self.first(x)))))


def file_of(
    folder: Path, exporter: str = "torchscript", model: nn.Module | None = None, **options: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    exported(spread(model or Wide()).eval(), {"x": x(2, 32)}, exporter, folder, **options)
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same model from both exporters; not to be written to."""
    return [file_of(tmp_path_factory.mktemp(exporter), exporter) for exporter in EXPORTERS]


def test_the_files_of_both_exporters_agree_in_portions_too(files):
    inputs = {"x": x(2, 32).numpy()}
    result = htp_export.compare(*files, inputs)
    assert result.ok, str(result)
    assert [module.status for module in result.modules.values()] == ["agrees"] * 4
    assert [call.number for call in result.modules["last"].calls] == [0, 1]
    assert htp_export.compare(*reversed(files)).ok
    one, many = (htp_export.compare(*files, portion_bytes=size).to_dict() for size in (1 << 30, 1))
    assert one == many


def test_a_change_is_found_in_its_module(files):
    changed = htp_export.load(files[1])
    faults.weight_changed(changed, "norm")
    result = htp_export.compare(files[0], changed)
    assert not result.ok
    assert result.wrong == ("norm",)
    assert {path: module.status for path, module in result.modules.items()} == {
        "": "inherits",
        "first": "agrees",
        "norm": "differs",
        "last": "inherits",
    }


def test_random_inputs_follow_the_seed_and_the_sizes_asked_for(files, tmp_path):
    changed = htp_export.load(files[1])
    faults.weight_changed(changed, "norm")
    one, again, other = (
        htp_export.compare(files[1], changed, seed=seed).to_dict() for seed in (0, 0, 1)
    )
    assert one == again != other
    dynamic = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    path = file_of(tmp_path, **dynamic)
    given = htp_export.compare(path, path, dims={"batch": 5})
    assert (given.ok, given.assumed) == (True, ())
    assumed = htp_export.compare(path, path)
    assert assumed.to_dict()["assumed"] == ["size 'batch' is 1"]
    assert "size 'batch' is 1" in str(assumed)
    with pytest.raises(InputError, match="no open dimension 'bacth' in this model, only 'batch'"):
        htp_export.compare(path, path, dims={"bacth": 5})


def in_half(path: Path, to: Path) -> Path:
    """Weights, inputs and outputs in half precision, as a converter does it."""
    model = onnx.load(path)
    for each in (*model.graph.input, *model.graph.output):
        each.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float16), tensor.name))
    del model.graph.value_info[:]
    onnx.save(model, to)
    return to


def test_half_precision_is_compared_with_its_own_tolerance_and_a_note(files, tmp_path):
    half = in_half(files[1], tmp_path / "half.onnx")
    result = htp_export.compare(files[1], half)
    assert result.ok, str(result)
    assert (
        result.modules["first"].differences[0].note
        == "float16 against float32, with the tolerance of float16"
    )
    assert 0 < result.modules["first"].max_abs < 1e-2


def to_uint8(file, to):
    """Unsigned weights: products of signed ones saturate on processors without VNNI."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(file, to, weight_type=QuantType.QUInt8)


def test_quantized_weights_agree_within_a_tolerance_and_a_module_that_a_tool_breaks_does_not(
    tmp_path,
):
    """Broken are rows of a quantized weight in another order: the error is far above that of quantization."""
    net = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    exported(spread(net).eval(), {"input": x(2, 32)}, "torchscript", tmp_path)
    to_uint8(tmp_path / "model.onnx", tmp_path / "uint8.onnx")
    result = htp_export.compare(tmp_path / "model.onnx", tmp_path / "uint8.onnx")
    assert (result.ok, result.first_wrong) == (False, "0")
    assert all(module.cosine > 0.999 for module in result.modules.values())
    assert htp_export.compare(
        tmp_path / "model.onnx", tmp_path / "uint8.onnx", tolerances={"**": (0.1, 0.1)}
    ).ok
    broken = onnx.load(tmp_path / "uint8.onnx")
    weight = next(
        w for w in broken.graph.initializer if w.name.startswith("2.weight") and len(w.dims) == 2
    )
    weight.CopyFrom(
        onnx.numpy_helper.from_array(np.roll(onnx.numpy_helper.to_array(weight), 5, 0), weight.name)
    )
    onnx.save(broken, tmp_path / "broken.onnx")
    result = htp_export.compare(
        tmp_path / "model.onnx", tmp_path / "broken.onnx", tolerances={"**": (0.2, 0.2)}
    )
    assert result.wrong == ("2",)
    assert result.modules["2"].cosine < 0.5


def test_a_module_that_was_fused_away_is_compared_at_the_one_around_it(tmp_path):
    """A Linear whose result only exists together with the ReLU after it."""
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    exported(spread(net).eval(), {"input": x(2, 4)}, "dynamo", tmp_path)
    fused = htp_export.load(tmp_path / "model.onnx")
    gemm, relu = fused["0"].nodes
    merged = ir.node(
        "FusedGemm",
        gemm.inputs,
        {"transB": 1, "activation": "Relu"},
        domain="com.microsoft",
        metadata_props={"htp.module": "0", "htp.owners": '["0.0","0.1"]', "htp.reason": "fused"},
    )
    merged.outputs[0].name = "merged"
    graph = fused.model.graph
    graph.insert_before(gemm, merged)
    relu.outputs[0].replace_all_uses_with(merged.outputs[0])
    graph.remove([relu, gemm], safe=True)
    graph.opset_imports["com.microsoft"] = 1
    result = htp_export.compare(tmp_path / "model.onnx", htp_export.load(fused.model))
    assert result.ok, str(result)
    assert result.modules["0"].status == "agrees"
    for path in ("0.0", "0.1"):
        module = result.modules[path]
        assert (module.status, module.compared_at) == ("not compared", "0")
        assert module.reason == "model b has none of its tensors; compared at 0"


class Sum(Holding, left=nn.Linear(8, 8), right=nn.Linear(8, 8)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.left(x)) * self.right(x)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_modules_after_a_dropped_one_inherit_its_error(exporter, tmp_path):
    """They receive the tensor of another module, which is right as the result of that one."""
    net = spread(nn.Sequential(Sum(), Sum(), Sum())).eval()
    exported(net, {"input": x(2, 8)}, exporter, tmp_path)
    htp_export.prune(tmp_path / "model.onnx", {"1": "drop"}, tmp_path / "dropped.onnx")
    result = htp_export.compare(tmp_path / "model.onnx", tmp_path / "dropped.onnx")
    assert result.wrong == ("1",)
    for path in ("2", "2.left", "2.right"):
        assert result.modules[path].status == "inherits"


def test_files_of_two_models_are_refused(files, tmp_path):
    class Wider(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(32)

    other = file_of(tmp_path, "dynamo", Wider())
    with pytest.raises(
        InputError,
        match=r"are not of one model: module '\(root\)' has the class Wide in one, Wider",
    ):
        htp_export.compare(files[0], other)


# --- tensors that another engine computed: the first wrong module in it, found with few outputs ---


class Block(
    Holding, norm=nn.LayerNorm(8), up=nn.Linear(8, 12), act=nn.GELU(), down=nn.Linear(12, 8)
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Deep(Holding, blocks=nn.Sequential(*(Block() for _ in range(8))), head=nn.Linear(8, 3)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def example() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The net of this file, an entry."""
    torch.manual_seed(0)
    return spread(Deep()).eval(), (torch.randn(2, 5, 8),)


class Engine:
    """An engine that runs a whole file, computes the nodes of one module wrongly, and returns tensors by name."""

    def __init__(self, file: Path, wrong: str | None) -> None:
        model = htp_export.load(file).clone().model
        tagged = htp_export.load(model)
        if wrong is not None:
            *_, node = tagged[wrong].nodes
            result, readers = (
                node.outputs[0],
                [(use.node, use.idx) for use in node.outputs[0].uses()],
            )
            factor = add_constant(model.graph, np.array(1.1, np.float32), "factor")
            fault = ir.node("Mul", [result, factor], name="fault")
            model.graph.insert_after(node, fault)
            replace_uses(result, fault.outputs[0], readers, rest="before the fault")
        self.model = model

    def run(self, names: list[str], x: torch.Tensor) -> dict[str, Any]:
        model = self.model.clone()
        values = {value.name: value for node in model.graph for value in node.outputs}
        model.graph.outputs.clear()
        model.graph.outputs.extend(values[name] for name in names)
        session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
        return {
            "x": x.numpy(),
            **dict(zip(names, session.run(None, {"x": x.numpy()}), strict=True)),
        }


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, args = example()
    path = tmp_path_factory.mktemp("deep") / "deep.onnx"
    htp_export.export(model, args, path, dynamo=True, external_data=False, verbose=False)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong", quick(["blocks.0.up", "blocks.4.act", "blocks.7.down", "head"], "blocks.4.act")
)
def test_the_first_wrong_module_of_an_engine_is_found_with_few_outputs(file, wrong):
    model, (x,) = example()
    engine, tagged = Engine(file, wrong), htp_export.load(file)
    tensors = {
        each.tensor for path in tagged.paths for each in tagged.tensors(path) if each.side == "out"
    }
    [output] = [str(value.name) for value in tagged.results]
    asked, result = [output], None
    while True:
        dump = engine.run(asked, x)
        result = htp_export.verify(model, file, (x,), outputs_from=dump)
        assert not result.ok
        if not result.next_outputs:
            break
        assert wrong == result.first_wrong or wrong.startswith(
            result.first_wrong + "." if result.first_wrong else ""
        )
        assert result.next_outputs[0] in str(result)
        asked += result.next_outputs
    assert result.first_wrong == wrong
    assert len(asked) <= 2 + math.ceil(math.log2(len(tensors)))
    assert result.modules["blocks.2.norm"].status in ("agrees", "inherits", "not compared")


def test_an_engine_that_is_right_agrees_where_it_was_asked_and_nothing_is_known_elsewhere(file):
    model, (x,) = example()
    dump = Engine(file, None).run([str(value.name) for value in htp_export.load(file).results], x)
    result = htp_export.verify(model, file, (x,), outputs_from=dump)
    assert result.ok
    assert result.next_outputs == ()
    assert result.modules["blocks.3"].status == "not compared"
    assert result.modules["blocks.3"].reason == "the dump has none of its tensors"
    assert result.modules["head"].status == "agrees"


def test_a_tap_is_a_tensor_of_its_module_and_names_may_be_those_that_engines_write(file, tmp_path):
    model, (x,) = example()
    tapped = tmp_path / "tapped.onnx"
    htp_export.tap(file, "blocks.3:out", tapped)
    session = onnxruntime.InferenceSession(tapped)
    names = [value.name for value in session.get_outputs()]
    dump = dict(zip(names, session.run(None, {"x": x.numpy()}), strict=True))
    dump["blocks_3_out"] = dump.pop("blocks.3:out") + 1
    result = htp_export.verify(model, tapped, (x,), outputs_from=dump)
    assert result.modules["blocks.3"].max_abs == pytest.approx(1, abs=1e-3)
    assert result.modules["blocks.3.down"].status == "not compared"


@pytest.mark.parametrize("axis", [-1, 1])
def test_tensors_that_a_tap_put_together_are_those_of_their_modules(file, axis, tmp_path):
    model, (x,) = example()
    # the last is of another size
    places = ["blocks.3:out", "blocks.4:out"] + ["blocks.2.up:out"] * (axis == -1)
    tapped = htp_export.tap(file, {"h": places}, tmp_path / "tapped.onnx", concat=axis)
    [given] = [value for value in tapped.model.graph.outputs if value.name == "h"]
    session = onnxruntime.InferenceSession(tmp_path / "tapped.onnx")
    [h] = session.run(["h"], {"x": x.numpy()})
    assert list(given.shape or ()) == list(h.shape)
    second = [slice(None)] * 3
    second[axis] = slice(8, 16) if axis == -1 else slice(5, 10)
    h[tuple(second)] += 1
    result = htp_export.verify(model, tmp_path / "tapped.onnx", (x,), outputs_from={"h": h})
    assert result.first_wrong == "blocks.4"
    assert result.modules["blocks.3"].status == "agrees"
    assert result.modules["blocks.2.up"].status == ("agrees" if axis == -1 else "not compared")


@pytest.mark.long
def test_the_command_takes_the_run_prefill_or_decode_whose_inputs_the_dump_has(
    shared_files, tmp_path, capsys
):
    pytest.importorskip(
        "transformers.exporters", reason="transformers older than 5.23 has no exporters"
    )
    options = ["llama", "--random-weights", "--task", "text-generation-with-past"]
    options += [word for name, value in TEXT.items() for word in ("--set", f"{name}={value}")]
    steered = htp_export.steer(shared_files.decoder("llama"), "model.layers.0:out")
    htp_export.tap(steered, "model.layers.0:out", tmp_path / "file.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "file.onnx")
    for past in (0, 3):
        feed = {}
        for value in session.get_inputs():
            sizes = [size if isinstance(size, int) else 2 for size in value.shape]
            if "past" in value.name:
                sizes[2] = past
            elif value.name == "attention_mask":
                sizes[1] = past + 2
            feed[value.name] = np.ones(
                sizes, np.float32 if value.type == "tensor(float)" else np.int64
            )
        if "position_ids" in feed:
            feed["position_ids"][:] = np.arange(past, past + 2)
        names = [value.name for value in session.get_outputs()]
        dump = dict(zip(names, session.run(None, feed), strict=True))
        np.savez(tmp_path / "bare.npz", **dump)
        dump["model.layers.0:out"][0, 0] += 1
        np.savez(tmp_path / "wrong.npz", **dump, **feed)
        typed = ["verify", str(tmp_path / "file.onnx"), *options, "--outputs-from"]
        assert main([*typed, str(tmp_path / "wrong.npz"), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert [path for path, each in found["modules"].items() if each["status"] == "differs"] == [
            "model.layers.0"
        ]
    assert main([*typed, str(tmp_path / "bare.npz")]) == 2
    assert "write the inputs of the run into the dump" in capsys.readouterr().err


def test_the_command_reads_an_npz_with_its_inputs_and_says_what_to_ask_for(file, tmp_path, capsys):
    x = torch.ones(2, 5, 8)
    [output] = [str(value.name) for value in htp_export.load(file).results]
    np.savez(tmp_path / "right.npz", **Engine(file, None).run([output], x))
    np.savez(tmp_path / "wrong.npz", **Engine(file, "blocks.5.up").run([output], x))
    typed = ["verify", str(file), "--entry", "tests.verify.test_compare:example", "--outputs-from"]
    assert main([*typed, str(tmp_path / "right.npz")]) == 0
    capsys.readouterr()
    assert main([*typed, str(tmp_path / "wrong.npz"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["next_outputs"]) == 1


def test_dumps_that_say_nothing_are_refused(file, tmp_path):
    model, (x,) = example()
    with pytest.raises(InputError, match=r"has no tensor that .* computes; it has 'y'"):
        htp_export.verify(model, file, (x,), outputs_from={"y": np.ones(3)})
    dump = Engine(file, None).run([str(value.name) for value in htp_export.load(file).results], x)
    with pytest.raises(InputError, match="another input 'x'"):
        htp_export.verify(model, file, (x + 1,), outputs_from=dump)
    with pytest.raises(InputError, match="give one of them"):
        htp_export.verify(model, file, (x,), outputs_from=dump, isolated=True)
    np.savez(tmp_path / "pickled.npz", y=np.array([{}], dtype=object))
    with pytest.raises(FileError, match="plain arrays"):
        htp_export.verify(model, file, (x,), outputs_from=tmp_path / "pickled.npz")
