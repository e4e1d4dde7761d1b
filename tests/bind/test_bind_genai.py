"""Files with the weights of another checkpoint, in ONNX Runtime GenAI: the tokens are those of PyTorch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import htp_export
from htp_export.capabilities.huggingface.genai import genai_config
from htp_export.huggingface import example_calls
from tests.bind.test_bind import written
from tests.decoders import GENERATED, Programs, decoder, generated, generated_by_genai, prompt

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A tiny Llama with new weights; the file of the old ones; and the folder of a checkpoint of the new ones."""
    folder = tmp_path_factory.mktemp("llama")
    model = decoder("llama")
    files = Programs(model, example_calls(model))
    files.save(folder)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    checkpoint = written(model.state_dict(), folder / "checkpoint")
    found = genai_config(files["model"].model, model.config, model.generation_config)
    (checkpoint / "genai_config.json").write_text(json.dumps(found), encoding="utf-8")
    assert generated_by_genai(with_config(folder, found), prompt()) != tokens(model)
    return model, folder / "model.onnx", checkpoint


def with_config(folder: Path, config: Any) -> Path:
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def tokens(model: Any) -> list[list[int]]:
    return generated(model, prompt(), GENERATED)


def test_genai_generates_with_the_new_weights(exported):
    model, file, checkpoint = exported
    htp_export.bind(file, checkpoint, checkpoint / "model.onnx")
    assert generated_by_genai(checkpoint, prompt()) == tokens(model)


def test_genai_generates_from_the_file_of_the_checkpoint(exported):
    """The ONNX file refers to the safetensors file."""
    model, file, checkpoint = exported
    bound = htp_export.bind(file, checkpoint, checkpoint / "model.onnx", share_weights=True)
    assert any("stay in model.safetensors" in note for note in bound.notes)
    assert generated_by_genai(checkpoint, prompt()) == tokens(model)


def test_genai_generates_with_shared_initializers(exported):
    """The entries of the map, with names, places and types, are the weights: the file's own are others."""
    model, file, checkpoint = exported
    bound = htp_export.bind(file, checkpoint, checkpoint / "model.onnx", in_place_data=True)
    config = json.loads((checkpoint / "genai_config.json").read_text(encoding="utf-8"))
    entries = bound.map("genai")
    assert len(entries["shared_initializers"]) > 10
    config["model"]["decoder"].update(entries)
    htp_export.load(file).save(checkpoint / "old.onnx")
    config["model"]["decoder"]["filename"] = "old.onnx"
    try:
        found = generated_by_genai(with_config(checkpoint, config), prompt())
    except RuntimeError as error:  # GenAI 0.18.0
        if "GetMemoryInfo for CPU" in str(error):
            pytest.skip("GenAI has no shared initializers with the CPU provider")
        raise
    assert found == tokens(model)
