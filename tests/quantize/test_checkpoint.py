"""Quantized checkpoints become packed weights without quantizing again."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import htp_export
from htp_export.capabilities.huggingface.packed.checkpoints import read_packed
from htp_export.command.main import main
from htp_export.huggingface import load_model
from tests.decoders import TEXT
from tests.nets import EXPORTERS, composed
from tests.packed import awq, gptq, int8, nf4, written_checkpoint, written_gguf
from tests.quantized import assert_predicted, matrix_of, written

INPUTS = 96


def small_net() -> nn.Module:
    """Products with and without bias, and a norm that the checkpoint has other numbers for."""
    return composed(
        lambda self, x: self.head(torch.relu(self.second(self.norm(self.first(x))))),
        first=nn.Linear(INPUTS, 64),
        norm=nn.LayerNorm(64),
        second=nn.Linear(64, 48, bias=False),
        head=nn.Linear(48, 8),
    )


X = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 3, INPUTS)).astype(np.float32))

CASES: dict[str, dict[str, Any]] = {
    "gptq": {"group": 32},
    "gptq of one group": {"group": 4096},
    "gptq in groups of 48": {"group": 48},
    "gptq in any order": {"group": 32, "act_order": True},
    "gptq of 8 bits": {"group": 16, "bits": 8},
    "gptq of 2 bits": {"group": 16, "bits": 2},
    "gptq_v2": {"group": 32, "v2": True},
    "awq": {"group": 32},
    "bitsandbytes nf4": {"group": 64},
    "bitsandbytes nf4, nested": {"group": 64, "nested": True},
    "bitsandbytes int8": {"group": 64},
}
METHODS = {"gptq": gptq, "awq": awq, "bitsandbytes nf4": nf4, "bitsandbytes int8": int8}


def checkpoint(folder: Path, case: str, **changes: Any) -> tuple[Path, nn.Module]:
    """A checkpoint of `small_net` whose first two products are packed, and the net with these weights."""
    torch.manual_seed(0)
    generator, net, tensors = np.random.default_rng(0), small_net().eval(), {}
    pack: Any = next(method for name, method in METHODS.items() if case.startswith(name))
    settings = CASES[case]
    for path in ("first", "second"):
        module = net.get_submodule(path)
        group = (
            min(settings["group"], module.in_features)
            if case != "gptq in groups of 48" or path == "first"
            else 64
        )
        packed, weight = pack(generator, *module.weight.shape, **{**settings, "group": group})
        module.weight = nn.Parameter(weight)
        tensors |= {f"{path}.{name}": tensor for name, tensor in packed.items()}
    for name, parameter in net.named_parameters():
        with torch.no_grad():
            if not name.endswith("weight") or "norm" in name or "head" in name:
                parameter.copy_(parameter.half() + torch.linspace(0, 1, parameter.shape[-1]).half())
                tensors[name] = parameter.half()
    quantization = {
        "quant_method": case.replace("_", " ").split()[0],
        "bits": settings.get("bits", 4),
        "group_size": -1,
    }
    if settings.get("v2"):
        quantization["checkpoint_format"] = "gptq_v2"
    return written_checkpoint(folder, {**tensors, **changes}, quantization), net


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The net with other weights; not to be written to."""
    folder = tmp_path_factory.mktemp("packed")
    return {
        each: written(small_net(), (X,), folder / f"{each}.onnx", each, ["x"]) for each in EXPORTERS
    }


def numbers_of(file: Path) -> dict[str, Any]:
    """Module → the matrix that ``MatMulNBits`` multiplies with, its inputs in the order of the checkpoint."""
    tagged, found = htp_export.load(file), {}
    for node in (node for node in tagged.nodes if node.op_type == "MatMulNBits"):
        [module] = tagged.owners_of(node)
        found[module], gathered = matrix_of(node), node.inputs[0].producer()
        if gathered is not None and gathered.op_type == "Gather":
            order = np.argsort(gathered.inputs[1].const_value.numpy())
            found[module] = found[module][:, order]
    return found


def product_of_unit(file: Path, module: str) -> Any:
    """What the product of a module gives for the unit matrix, transposed: the weight itself."""
    part = htp_export.extract(file, module).model
    product = next(node for node in part.graph if node.op_type == "MatMulBnb4")
    onnx_model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("MatMulBnb4", ["x", "b", "s"], ["y"], domain="com.microsoft",
                                   **{name: each.as_int() for name, each in product.attributes.items()})],
            "unit",
            [onnx.helper.make_tensor_value_info("x", 1, [None, None])],
            [onnx.helper.make_tensor_value_info("y", 1, [None, None])],
            [onnx.numpy_helper.from_array(value.const_value.numpy(), name)
             for name, value in zip("bs", product.inputs[1:], strict=True)],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(onnx_model.SerializeToString())
    return session.run(None, {"x": np.eye(product.attributes["K"].as_int(), dtype=np.float32)})[0].T


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_file_has_the_numbers_of_the_checkpoint(case, files, tmp_path):
    source, net = checkpoint(tmp_path / "source", case)
    result = htp_export.quantize(files["dynamo"], output=tmp_path / "made.onnx", weights=source)
    numbers = (
        numbers_of(tmp_path / "made.onnx")
        if "nf4" not in case
        else dict.fromkeys(("first", "second"))
    )
    assert set(numbers) == {"first", "second"}
    for path, weight in numbers.items():
        if weight is None:  # MatMulBnb4 multiplies with the unit matrix
            weight = product_of_unit(tmp_path / "made.onnx", path)
        np.testing.assert_array_equal(
            weight, net.get_submodule(path).weight.detach().numpy(), strict=True
        )
    session = onnxruntime.InferenceSession(tmp_path / "made.onnx")
    [made] = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(made), net(X), rtol=1e-5, atol=1e-4)
    assert result.modules["first"].precision == "checkpoint"
    assert not result.tags.untagged
    report = htp_export.verify(net, tmp_path / "made.onnx", (X,))
    assert report.ok, report


@pytest.fixture(scope="module")
def awq_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("source"), "awq")[0]


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_operators_of_onnx_alone_and_modules_of_a_plan(exporter, files, awq_source, tmp_path):
    _, net = checkpoint(tmp_path / "again", "awq")
    plan = {"first": {"precision": "checkpoint", "format": "qdq"}, "second": "fp32"}
    result = htp_export.quantize(files[exporter], plan, tmp_path / "made.onnx", weights=awq_source)
    words = {path: result.modules[path].precision for path in ("first", "norm", "second")}
    assert words == {"first": "checkpoint", "norm": "fp32", "second": "fp32"}
    kinds = [node.op_type for node in onnx.load(tmp_path / "made.onnx").graph.node]
    assert (kinds.count("DequantizeLinear"), kinds.count("MatMulNBits")) == (1, 0)
    assert htp_export.verify(net, tmp_path / "made.onnx", (X,)).ok


def test_the_bytes_are_predicted(files, awq_source):
    made = htp_export.quantize(files["dynamo"], weights=awq_source)
    assert_predicted(made, files["dynamo"], "checkpoint", weights=awq_source)


def test_recipes_and_places_are_those_of_the_parameters(files, awq_source):
    made = htp_export.quantize(files["dynamo"], weights=awq_source).tagged
    recipes = {
        name: value.const_value.metadata_props.get("htp.recipe")
        for name, value in made.model.graph.initializers.items()
        if value.const_value is not None and name.startswith("first.weight_")
    }
    assert set(recipes) == {
        "first.weight_levels",
        "first.weight_scales",
        "first.weight_zero_points",
    }
    assert set(recipes.values()) == {'["computed","first.weight","awq"]'}
    [*held] = htp_export.nodes(made).parameters["first.weight"].initializers
    assert [(each.name, each.how) for each in held] == [("first.weight_levels", ("quantized",))]


@pytest.mark.parametrize(
    ("case", "changes", "problem"),
    [
        (
            "gptq",
            {"first.scales": torch.zeros(2, 64)},
            "module 'first': 'scales' has shape [2, 64]",
        ),
        (
            "gptq",
            {"first.qweight": torch.zeros(12, dtype=torch.int32)},
            "'qweight' is missing or is no matrix",
        ),
        (
            "gptq",
            {"first.g_idx": torch.zeros(96, dtype=torch.int32)},
            "g_idx does not assign 32 inputs to each group",
        ),
        (
            "gptq",
            {"norm.weight": torch.zeros(7)},
            "'norm.weight' has shape [7], and the file was exported with [64]",
        ),
        (
            "awq",
            {"first.qweight": torch.zeros(96, 7, dtype=torch.int32)},
            "module 'first': 'qzeros' has shape [3, 8]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_named(
    case, changes, problem, files, tmp_path
):
    source, _ = checkpoint(tmp_path / "source", case, **changes)
    with pytest.raises(htp_export.errors.HtpExportError) as refused:
        htp_export.quantize(files["dynamo"], output=tmp_path / "made.onnx", weights=source)
    assert problem in str(refused.value)
    assert not (tmp_path / "made.onnx").exists()


def with_state(folder: Path, **changes: Any) -> Path:
    """A checkpoint of bitsandbytes whose first weight has another state; ``HUGE`` is a number of 500 digits."""
    name, case = "first.weight.quant_state.bitsandbytes__nf4", "bitsandbytes nf4, nested"
    source, _ = checkpoint(folder / "source", case)
    state = json.loads(bytes(load_file(source / "model.safetensors")[name].tolist()))
    text = json.dumps(state | changes).replace('"HUGE"', "9" * 500)
    changed, _ = checkpoint(
        folder / "changed", case, **{name: torch.tensor([*text.encode()], dtype=torch.uint8)}
    )
    return changed


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"blocksize": 0}, "no shape of a matrix and no blocksize"),
        ({"blocksize": 1 << 40}, "no shape of a matrix and no blocksize"),
        ({"blocksize": "64"}, "no shape of a matrix and no blocksize"),
        ({"shape": [[64], 96]}, "no shape of a matrix and no blocksize"),
        ({"nested_blocksize": 0}, "no nested_blocksize and no nested_offset"),
        ({"nested_blocksize": 1}, "'weight.nested_absmax' has shape [1], and [96] is needed"),
        ({"nested_offset": {}}, "no nested_blocksize and no nested_offset"),
        ({"nested_offset": "HUGE"}, "a number has 500 digits"),
    ],
)
def test_a_state_of_bitsandbytes_with_other_numbers_is_refused_and_named(
    changes, problem, files, tmp_path
):
    source = with_state(tmp_path, **changes)
    with pytest.raises(
        htp_export.errors.HtpExportError, match=f"module 'first': .*{re.escape(problem)}"
    ):
        htp_export.quantize(files["dynamo"], output=tmp_path / "made.onnx", weights=source)


def test_a_nested_block_larger_than_the_weight_takes_no_memory(tmp_path):
    wanted, _ = checkpoint(tmp_path / "wanted", "bitsandbytes nf4, nested")
    found = with_state(tmp_path, nested_blocksize=1 << 62)
    np.testing.assert_array_equal(*(read_packed(each)["first.weight"] for each in (wanted, found)))


def test_a_parameter_that_is_missing_and_a_layer_that_is_unknown_are_named(files, tmp_path):
    source, _ = checkpoint(tmp_path / "source", "gptq")
    tensors = load_file(source / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if name != "norm.bias"}
    other = {name.replace("second.", "third."): tensor for name, tensor in tensors.items()}
    for content, problem in ((without, "has no 'norm.bias'"), (other, "has no 'second.weight'")):
        save_file(content, source / "model.safetensors")
        with pytest.raises(htp_export.errors.InputError, match=problem):
            htp_export.quantize(files["dynamo"], output=tmp_path / "made.onnx", weights=source)
    assert not (tmp_path / "made.onnx").exists()


def test_the_prefix_of_a_wrapper_is_removed_from_packed_weights(files, tmp_path):
    source, _ = checkpoint(tmp_path / "source", "awq")
    expected = stored(htp_export.quantize(files["dynamo"], weights=source).model)
    tensors = load_file(source / "model.safetensors")
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
        source / "model.safetensors",
    )
    result = htp_export.quantize(files["dynamo"], weights=source)
    assert any("'base_model.model.'" in note for note in result.notes)
    assert stored(result.model) == expected


def stored(model: Any) -> dict[str, bytes]:
    return {name: each.const_value.tobytes() for name, each in model.graph.initializers.items()}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_quantized_are_bound_and_then_quantized(kind, files, tmp_path):
    torch.manual_seed(3)
    tuned = {name: each.to(kind) for name, each in small_net().state_dict().items()}
    save_file(tuned, tmp_path / "model.safetensors")
    bound = htp_export.bind(files["dynamo"], tuned)
    expected = htp_export.quantize(bound.model, "int4")
    for weights in (tuned, tmp_path, tmp_path / "model.safetensors"):
        result = htp_export.quantize(files["dynamo"], "int4", weights=weights)
        assert stored(result.model) == stored(expected.model)
    command = ["quantize", str(files["dynamo"]), "int4", "--weights", str(tmp_path)]
    assert main([*command, "-o", str(tmp_path / "made.onnx")]) == 0
    assert stored(htp_export.load(tmp_path / "made.onnx").model) == stored(expected.model)
    with pytest.raises(htp_export.errors.InputError, match="checkpoint"):
        htp_export.quantize(files["dynamo"], "checkpoint", weights=tuned)


def test_zero_points_of_floats_are_refused_in_operators_of_onnx(files, tmp_path):
    source, _ = checkpoint(tmp_path / "source", "bitsandbytes nf4")
    plan = {".": {"precision": "checkpoint", "format": "qdq"}}
    with pytest.raises(
        htp_export.errors.InputError, match=r"'first.weight' of .* has a table of numbers"
    ):
        htp_export.quantize(files["dynamo"], plan, weights=source)


PACK: dict[str, Any] = {"gptq": gptq, "awq": awq}


def packed_decoder(folder: Path, method: str) -> tuple[Path, nn.Module]:
    """A Llama whose layer is packed, and the model with the same numbers."""

    generator, tensors = np.random.default_rng(0), {}
    model = load_model(
        "llama",
        task="text-generation",
        random_weights=True,
        overrides={**TEXT, "num_hidden_layers": 1},
    )
    model.config.use_cache = False
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        if isinstance(model.get_submodule(path), nn.Linear) and "layers" in path:
            packed, weight = PACK[method](generator, *parameter.shape, 16)
            tensors |= {f"{path}.{each}": tensor for each, tensor in packed.items()}
            model.get_submodule(path).weight = nn.Parameter(weight)
        else:
            tensors[name] = parameter.detach().half()
            parameter.data = tensors[name].float()
    quantization = {"quant_method": method, "bits": 4, "group_size": 16}
    return written_checkpoint(
        folder, tensors, quantization, {**model.config.to_dict(), "dtype": "float16"}
    ), model


@pytest.mark.long
@pytest.mark.parametrize("method", ["gptq", pytest.param("awq", marks=pytest.mark.slow)])
def test_a_quantized_folder_is_exported_with_its_weights_and_verified(method, tmp_path, capsys):
    folder, model = packed_decoder(tmp_path / "packed", method)
    file = tmp_path / "int4.onnx"
    assert (
        main(
            [
                "export",
                str(folder),
                "--task",
                "text-generation",
                "-o",
                str(file),
                "--verify",
                "--json",
            ]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["verify"]["ok"]
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "int4.onnx",
        "int4.onnx.data",
        "packed",
    ]
    kinds = [node.op_type for node in onnx.load(file, load_external_data=False).graph.node]
    assert kinds.count("MatMulNBits") == 7
    ids = torch.arange(12).reshape(2, 6)
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(6).expand(2, 6),
    }
    assert htp_export.verify(model, file, kwargs=call).ok


@pytest.mark.long
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_gguf_file_is_exported_with_its_blocks_and_verified(tied, tmp_path, capsys):
    from transformers import LlamaForCausalLM

    source, file = written_gguf(tmp_path / "model.gguf", tied=tied), tmp_path / "made.onnx"
    assert (
        main(
            [
                "export",
                str(source),
                "--task",
                "text-generation",
                "-o",
                str(file),
                "--verify",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["verify"]["ok"]
    nodes = [
        node
        for node in onnx.load(file, load_external_data=False).graph.node
        if node.op_type == "MatMulNBits"
    ]
    kept = {
        next(entry.value for entry in node.metadata_props if entry.key == "htp.module")
        for node in nodes
    }
    assert {path.rpartition(".")[2] for path in kept} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),  # up_proj is Q5_0
        *(("lm_head",) if tied else ()),
    }
    model = LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file=source.name, use_cache=False
    ).eval()
    ids = torch.arange(12).reshape(2, 6)
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(6).expand(2, 6),
    }
    assert htp_export.verify(model, file, kwargs=call).ok
