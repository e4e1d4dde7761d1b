"""Stages of a decoder as a pipeline for ONNX Runtime GenAI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import htp_export
from htp_export.errors import FileError, InputError
from tests import handmade


def genai_file(folder: Path, **changes: Any) -> Path:
    """The configuration of a whole decoder, as the exporter writes it."""
    decoder = {"filename": "model.onnx", "head_size": 8, "num_hidden_layers": 2}
    decoder |= {"inputs": {"input_ids": "x"}, "outputs": {"logits": "out"}, **changes.pop("decoder", {})}
    content = {
        "model": {"type": "decoder", "eos_token_id": [2, 3], "vocab_size": 99, "decoder": decoder, **changes},
        "search": {"max_length": 64, "do_sample": False},
    }
    file = folder / "genai_config.json"
    file.write_text(json.dumps(content))
    return file


def test_genai_gets_a_pipeline_of_the_stages(tmp_path: Path) -> None:
    file = genai_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    stages = tmp_path / "stages"
    found = htp_export.partition(handmade.encoder(), 2, stages, serve="genai", genai_config=file)
    content = json.loads((stages / "genai_config.json").read_text())
    assert content["search"] == {"max_length": 64, "do_sample": False}
    decoder = content["model"].pop("decoder")
    assert content["model"] == {"type": "decoder-pipeline", "eos_token_id": [2, 3], "vocab_size": 99}
    assert decoder.pop("pipeline") == [
        {"stage0": {"filename": "stage0.onnx", "inputs": ["x"], "outputs": ["mask", "layer0"]}},
        {"stage1": {"filename": "stage1.onnx", "inputs": ["mask", "layer0"], "outputs": ["out"]}},
    ]
    assert decoder == {
        "head_size": 8,
        "num_hidden_layers": 2,
        "inputs": {"input_ids": "x"},
        "outputs": {"logits": "out"},
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
    }
    assert set(found.files) == {"genai_config.json", "stage0.onnx", "stage1.onnx", "tokenizer.json"}
    again = htp_export.partition(handmade.encoder(), 1, stages, serve="genai", genai_config=file)
    assert set(again.files) == {"genai_config.json", "stage0.onnx", "tokenizer.json"}


def test_paths_in_a_genai_configuration_are_not_taken_over(tmp_path: Path) -> None:
    options = {"session_options": {"custom_ops_library": "/tmp/evil.so"}, "filename": "../../model.onnx"}
    file = genai_file(tmp_path, decoder=options, tokenizer_dir="../..")
    htp_export.partition(handmade.encoder(), 2, tmp_path / "stages", serve="genai", genai_config=file)
    text = (tmp_path / "stages" / "genai_config.json").read_text()
    assert [word for word in ("evil", "..", "tokenizer_dir") if word in text] == []


def test_a_tokenizer_that_is_a_link_out_of_its_folder_is_not_copied(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    file = genai_file(home)
    (tmp_path / "secret.json").write_text("{}")
    (home / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(FileError, match=r"tokenizer\.json: is a link out of its folder"):
        htp_export.partition(handmade.encoder(), 2, tmp_path / "stages", serve="genai", genai_config=file)
    assert not (tmp_path / "stages").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing; export the model with --genai"),
        ([], "is no configuration of a decoder"),
        ({"model": {"decoder": []}}, "is no configuration of a decoder"),
        ({"model": {"decoder": {"inputs": {"input_ids": 3}, "outputs": {}}}}, "does not name the inputs and outputs"),
    ],
)
def test_a_broken_genai_configuration_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "genai_config.json"
    if content is not None:
        file.write_text(json.dumps(content))
    onnx.save(ir.to_proto(handmade.encoder()), tmp_path / "model.onnx")
    with pytest.raises(FileError, match=message):
        htp_export.partition(tmp_path / "model.onnx", 2, tmp_path / "stages", serve="genai")


def test_a_model_without_a_file_needs_a_genai_configuration(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give genai_config"):
        htp_export.partition(handmade.encoder(), 2, tmp_path / "stages", serve="genai")
