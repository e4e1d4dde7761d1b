"""Commands on folders with checkpoints that are quantized already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from tests.decoders import decoder
from tests.packed import awq, gptq, written_checkpoint, written_gguf

PACK: dict[str, Any] = {"gptq": gptq, "awq": awq}


def packed_decoder(folder: Path, method: str) -> tuple[Path, nn.Module]:
    """A Llama whose layers are packed, and the model with the same numbers."""
    import numpy as np

    generator, model, tensors = np.random.default_rng(0), decoder("llama"), {}
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
    return written_checkpoint(folder, tensors, quantization, {**model.config.to_dict(), "dtype": "float16"}), model


@pytest.mark.parametrize("method", ["gptq", pytest.param("awq", marks=pytest.mark.slow)])
def test_a_quantized_folder_is_exported_with_its_weights_and_verified(method: str, tmp_path: Path, capsys: Any):
    folder, model = packed_decoder(tmp_path / "packed", method)
    file = tmp_path / "int4.onnx"
    assert main(["export", str(folder), "--task", "text-generation", "-o", str(file), "--verify", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verify"]["ok"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["int4.onnx", "int4.onnx.data", "packed"]
    kinds = [node.op_type for node in onnx.load(file, load_external_data=False).graph.node]
    assert kinds.count("MatMulNBits") == 14
    ids = torch.arange(12).reshape(2, 6)
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(6).expand(2, 6)}
    assert htp_export.verify(model, file, kwargs=call).ok


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_gguf_file_is_exported_with_its_blocks_and_verified(tied: bool, tmp_path: Path, capsys: Any):
    from transformers import LlamaForCausalLM

    source, file = written_gguf(tmp_path / "model.gguf", tied=tied), tmp_path / "made.onnx"
    assert main(["export", str(source), "--task", "text-generation", "-o", str(file), "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verify"]["ok"]
    nodes = [node for node in onnx.load(file, load_external_data=False).graph.node if node.op_type == "MatMulNBits"]
    kept = {next(entry.value for entry in node.metadata_props if entry.key == "htp.module") for node in nodes}
    assert {path.rpartition(".")[2] for path in kept} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),  # up_proj is Q5_0
        *(("lm_head",) if tied else ()),
    }
    model = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=source.name, use_cache=False).eval()
    ids = torch.arange(12).reshape(2, 6)
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(6).expand(2, 6)}
    assert htp_export.verify(model, file, kwargs=call).ok
