"""Taps in the programs that read them: ONNX Runtime GenAI, transformers.js, and a drafter that is trained on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import htp_export
from htp_export.capabilities.huggingface.genai import genai_config
from tests.decoders import decoder, prompt
from tests.exporting import SharedFiles
from tests.tap.test_taps_are_hooks import hooks

PLACES = ["model.layers.1:in", "model.layers.1:out"]


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory, shared_files: SharedFiles) -> tuple[Any, Path]:
    """A decoder, and its file with hidden states, and vectors that nobody gives."""
    pytest.importorskip("transformers.exporters", reason="transformers older than 5.23 has no exporters")
    model = decoder("mistral")
    file = tmp_path_factory.mktemp("tapped") / "model.onnx"
    steered = htp_export.steer(shared_files.decoder("mistral"), "model.layers.0:out")
    htp_export.tap(steered, {"hidden_states": PLACES}, file, concat=-1)
    return model, file


def hidden_states(model: Any, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with hooks(model) as seen, torch.no_grad():
        model(torch.from_numpy(ids))
    taken = [seen["model.layers.1#0:in[hidden_states]"], seen["model.layers.1#0:out[0]"]]
    found: np.ndarray[Any, Any] = torch.cat(taken, -1).numpy()
    return found


@pytest.mark.slow
def test_genai_gives_the_hidden_states_of_prefill_and_of_each_step(tapped: tuple[Any, Path]) -> None:
    genai: Any = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    model, file = tapped
    config = genai_config(htp_export.load(file).model, model.config, model.generation_config)
    (file.parent / "genai_config.json").write_text(json.dumps(config))
    ids = prompt()[:1]
    loaded = genai.Model(str(file.parent))
    settings = genai.GeneratorParams(loaded)
    settings.set_search_options(max_length=12, min_length=12)
    generator = genai.Generator(loaded, settings)
    generator.append_tokens(ids[0].astype(np.int32))
    generator.generate_next_token()
    np.testing.assert_allclose(generator.get_output("hidden_states"), hidden_states(model, ids), atol=1e-4)
    generator.generate_next_token()
    ids = np.array([generator.get_sequence(0)[:-1]], np.int64)
    np.testing.assert_allclose(
        generator.get_output("hidden_states")[:, -1], hidden_states(model, ids)[:, -1], atol=1e-4
    )
