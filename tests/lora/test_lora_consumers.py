"""One file and two adapters in GenAI, and in JavaScript with ONNX Runtime's package for Node and transformers.js."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import htp_export
from htp_export.capabilities.huggingface.genai import genai_config
from htp_export.capabilities.huggingface.transformers_js import write_transformers_js
from htp_export.huggingface import example_calls
from tests.decoders import Programs, decoder, generated
from tests.export.test_transformers_js import node, words

pytestmark = pytest.mark.slow

NAMES = ("a", "b")
TEXT = np.array([[3, 14, 15, 9, 26]])
TOKENS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict[str, list[int]]]:
    """A decoder, the folder with its file and two adapters, and what PyTorch generates with each and without one."""
    pytest.importorskip(
        "transformers.exporters", reason="transformers older than 5.23 has no exporters"
    )
    peft = pytest.importorskip("peft", reason="peft is not installed")
    folder, model = tmp_path_factory.mktemp("decoder"), decoder("llama")
    files = Programs(model, example_calls(model)).save(folder)
    htp_export.lora.insert(
        files["model"], "**.q_proj, **.v_proj, **.down_proj", folder / "lora.onnx", rank=4, alpha=8
    )
    wanted = {"": generated(model, TEXT, TOKENS)[0]}
    for seed, name in enumerate(NAMES):
        settings = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]
        )
        wrapped = peft.get_peft_model(copy.deepcopy(model), settings).eval()
        torch.manual_seed(seed)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = 0.5 * torch.randn_like(parameter)
        wrapped.save_pretrained(folder / name)
        htp_export.lora.adapter(
            folder / "lora.onnx", folder / name, folder / f"{name}.onnx_adapter"
        )
        wanted[name] = generated(wrapped.merge_and_unload(), TEXT, TOKENS)[0]
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3
    return model, folder, wanted


def test_genai_switches_between_two_adapters(made, tmp_path):
    genai: Any = pytest.importorskip(
        "onnxruntime_genai", reason="onnxruntime-genai is not installed"
    )
    model, folder, wanted = made
    tagged = htp_export.load(folder / "lora.onnx")
    tagged.save(tmp_path / "model.onnx")
    config = genai_config(tagged.model, model.config, model.generation_config)
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    loaded = genai.Model(str(tmp_path))
    adapters = genai.Adapters(loaded)
    for name in NAMES:
        adapters.load(str(folder / f"{name}.onnx_adapter"), name)
    for name in ("a", "", "b", "a"):
        settings = genai.GeneratorParams(loaded)
        length = TEXT.shape[1] + TOKENS
        settings.set_search_options(max_length=length, min_length=length)
        generator = genai.Generator(loaded, settings)
        if name:
            generator.set_active_adapter(adapters, name)
        generator.append_tokens(TEXT[0].astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        assert [int(token) for token in generator.get_sequence(0)[TEXT.shape[1] :]] == wanted[
            name
        ], name


IN_NODE = """
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
const { folder, ids, tokens, adapters } = JSON.parse(readFileSync(process.argv[2], "utf8"));
const require = createRequire(path.join(process.cwd(), "package.json"));
const { AutoModelForCausalLM, Tensor, env } = require("@huggingface/transformers");
env.allowRemoteModels = false;
env.localModelPath = path.dirname(folder) + path.sep;
const model = await AutoModelForCausalLM.from_pretrained(path.basename(folder), { dtype: "fp32" });
const shape = [1, ids.length], made = {};
for (const [name, factors] of Object.entries(adapters)) {
  const given = {};
  for (const [key, [values, sizes]] of Object.entries(factors))
    given[key] = new Tensor("float32", Float32Array.from(values), sizes);
  model.forward_params = [...new Set([...model.forward_params, ...Object.keys(given)])];  // what `generate` passes on
  const found = await model.generate({
    input_ids: new Tensor("int64", BigInt64Array.from(ids.map(BigInt)), shape),
    attention_mask: new Tensor("int64", BigInt64Array.from(ids.map(() => 1n)), shape),
    ...given, do_sample: false, max_new_tokens: tokens, min_new_tokens: tokens,
  });
  made[name] = found.tolist()[0].slice(ids.length).map(Number);
}
console.log(JSON.stringify(made));
"""


def test_transformers_js_is_given_two_adapters_as_inputs(made, tmp_path):
    """ONNX Runtime's package for JavaScript reads no adapter files, and ignores what is given for optional inputs."""
    program, package = node()
    model, folder, wanted = made
    file, paths = tmp_path / "required.onnx", "**.q_proj, **.v_proj, **.down_proj"
    taken = htp_export.lora.insert(
        folder / "model.onnx", paths, file, rank=4, alpha=8, required=True
    ).modules
    empty = {}
    for layer in taken.values():
        for name, sizes in zip(layer.names, ((0, layer.inputs), (layer.outputs, 0)), strict=True):
            empty[name] = np.zeros(sizes, np.float32)
    arrays = {
        "": empty,
        **{name: htp_export.lora.adapter(file, folder / name).arrays for name in NAMES},
    }
    given = {
        name: {key: (array.flatten().tolist(), array.shape) for key, array in factors.items()}
        for name, factors in arrays.items()
    }
    target = write_transformers_js(
        {"model": file}, tmp_path / "tiny", model, companions=words(tmp_path / "words")
    )
    asked = {"folder": str(target), "ids": TEXT[0].tolist(), "tokens": TOKENS, "adapters": given}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    (tmp_path / "run.mjs").write_text(IN_NODE)
    command = [program, str(tmp_path / "run.mjs"), str(tmp_path / "asked.json")]
    done = subprocess.run(
        command, cwd=package, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == wanted
