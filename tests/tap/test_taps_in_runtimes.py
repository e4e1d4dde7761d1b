"""Taps in the programs that read them: ONNX Runtime GenAI, transformers.js, and a drafter that is trained on them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.huggingface.genai import genai_config
from htp_export.capabilities.huggingface.transformers_js import write_transformers_js
from tests.decoders import decoder, nothing_past, prompt
from tests.export.test_transformers_js import node, words
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


SCRIPT = """
import { createRequire } from "node:module";
import path from "node:path";
const [folder, text] = process.argv.slice(2);
const require = createRequire(path.join(process.cwd(), "package.json"));
const { AutoModelForCausalLM, AutoTokenizer, env } = require("@huggingface/transformers");
env.allowRemoteModels = false;
env.localModelPath = path.dirname(folder) + path.sep;
const name = path.basename(folder);
const tokenizer = await AutoTokenizer.from_pretrained(name);
const model = await AutoModelForCausalLM.from_pretrained(name, { dtype: "fp32" });
const { hidden_states } = await model(await tokenizer(text));
console.log(JSON.stringify({ dims: hidden_states.dims, data: Array.from(hidden_states.data) }));
"""


@pytest.mark.slow
def test_transformers_js_gives_the_hidden_states(tapped: tuple[Any, Path], tmp_path: Path) -> None:
    program, package = node()
    model, file = tapped
    folder = write_transformers_js(
        {"model": file}, tmp_path / "tiny", model, companions=words(tmp_path / "words"), dtypes=["fp32"]
    )
    (tmp_path / "hidden.mjs").write_text(SCRIPT)
    ids = [3, 14, 15, 9, 26]
    command = [program, str(tmp_path / "hidden.mjs"), str(folder), " ".join(f"w{number}" for number in ids)]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = hidden_states(model, np.array([ids]))
    np.testing.assert_allclose(np.reshape(found["data"], found["dims"]), expected, atol=1e-4)


@pytest.mark.slow
def test_a_drafter_that_is_trained_on_taps_says_what_the_model_will_say(tapped: tuple[Any, Path]) -> None:
    """As EAGLE's: it reads hidden states and the next token, and says the one that the model gives after it."""
    model, file = tapped
    session = onnxruntime.InferenceSession(file)
    embedding = model.get_input_embeddings().weight.detach()
    torch.manual_seed(0)
    drafter = nn.Sequential(nn.Linear(64 + 32, 64), nn.ReLU(), nn.Linear(64, 64))

    def drafted(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes into the drafter, and what it is to say."""
        ids = np.random.default_rng(seed).integers(3, 19, (64, 12))
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), **nothing_past(session, len(ids))}
        feed["position_ids"] = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
        taken = {value.name for value in session.get_inputs()}
        given = {name: value for name, value in feed.items() if name in taken}
        hidden, logits = session.run(["hidden_states", "logits"], given)
        read = torch.cat([torch.from_numpy(hidden[:, :-1]), embedding[torch.from_numpy(ids[:, 1:])]], -1)
        return read, torch.from_numpy(logits.argmax(-1)[:, 1:])

    optimizer = torch.optim.AdamW(drafter.parameters(), 1e-2)
    read, wanted = drafted(0)
    for _ in range(60):
        loss = nn.functional.cross_entropy(drafter(read).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    read, wanted = drafted(1)
    hits = float((drafter(read).argmax(-1) == wanted).float().mean())
    most = float(wanted.flatten().bincount().max() / wanted.numel())
    assert hits > most + 0.1, f"{hits:.0%} with taps, {most:.0%} for the token that comes most"
