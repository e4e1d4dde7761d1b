"""Models that see images of any size (Qwen's): modules, tokens in ONNX Runtime GenAI and in transformers.js."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from htp_export.capabilities.export.deploy_options import DeployOptions
from htp_export.capabilities.huggingface.genai import genai_config
from htp_export.capabilities.huggingface.image_grids import (
    attending_by_sequence,
    encoder_of_grids,
    example_images,
    in_place_of_loops,
)
from htp_export.capabilities.huggingface.transformers_js import write_transformers_js
from htp_export.errors import InputError
from htp_export.huggingface import example_calls, load_model
from tests.decoders import TEXT, Programs
from tests.export.test_transformers_js import node

pytest.importorskip("transformers.exporters", reason="transformers older than 5.23 has no exporters")

TASK = "image-text-to-text-with-past"
IMAGE, START, TOKENS = 60, 62, 20
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {"intermediate_size": 24, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"intermediate_size": 24, "num_position_embeddings": 36, "deepstack_visual_indexes": [0]},
}


def qwen(name: str) -> Any:
    vision = {"hidden_size": 16, "out_hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4, **VISION[name]}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**TEXT, "rope_parameters": rope}
    if name == "qwen2_vl":
        del vision["out_hidden_size"]
    if name == "qwen3_vl":
        text = {key: value for key, value in text.items() if key not in ("bos_token_id", "eos_token_id")}
        text["head_dim"] = 8
    overrides = {f"text_config.{key}": value for key, value in text.items()}
    overrides |= {f"vision_config.{key}": value for key, value in vision.items()}
    overrides |= {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": START}
    model = load_model(name, task=TASK, random_weights=True, overrides=overrides)
    with torch.no_grad():  # what is seen and where it is shall count: random weights are small
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    model.generation_config.update(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return model


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("frames", [1, 2])
def test_what_is_computed_from_grids_as_tensors_is_what_the_encoder_computes_in_loops(name: str, frames: int) -> None:
    encoder = encoder_of_grids(qwen(name))
    images = example_images(encoder, 3, torch.Generator().manual_seed(0))
    grid = images["image_grid_thw"] * torch.tensor([frames, 1, 1])
    pixels = torch.cat([images["pixel_values"]] * frames)
    with torch.no_grad():
        right = encoder(pixels, grid_thw=grid).pooler_output
        with attending_by_sequence(encoder):
            found = encoder(pixels, grid_thw=grid, **in_place_of_loops(encoder, grid, len(pixels))).pooler_output
    assert torch.allclose(found, right, rtol=0, atol=1e-5 * float(right.abs().max()))


def test_an_encoder_whose_attention_takes_no_mask_is_refused() -> None:
    model = qwen("qwen2_vl")
    model.set_attn_implementation("eager")
    with pytest.raises(InputError, match="finds other things in images where image_grid_thw is not constant; try"):
        example_calls(model, task=TASK)


def test_files_for_genai_and_for_transformers_js_are_two_exports() -> None:
    names = ["vision_encoder", "embed_tokens", "decoder_model_merged"]
    DeployOptions(genai=True).check_files(names)
    with pytest.raises(InputError, match=r"--genai and --transformers-js: .*; export twice"):
        DeployOptions(genai=True, transformers_js=Path("js")).check_files(names)
    with pytest.raises(InputError, match="--genai and --export-json are for models of one file"):
        DeployOptions(export_json=True).check_files(names)


# --- tokens -----------------------------------------------------------------------------------------------


def prompt(model: Any) -> dict[str, torch.Tensor]:
    """A text with two images of other sizes than those of the example."""
    encoder, generator = encoder_of_grids(model), torch.Generator().manual_seed(1)
    grid = torch.tensor([[1, 10, 4], [1, 2, 6]])
    width = example_images(encoder, 1, generator)["pixel_values"].shape[1]
    ids = [5, 9, START, *[IMAGE] * 10, 17, START, *[IMAGE] * 3, 33, 8, 21]
    return {
        "input_ids": torch.tensor([ids]),
        "pixel_values": torch.randn(52, width, generator=generator),
        "image_grid_thw": grid,
    }


def generated(model: Any, given: dict[str, torch.Tensor]) -> list[int]:
    ids = given["input_ids"]
    settings: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    kinds = (ids == IMAGE).int()
    with torch.no_grad():
        found = model.generate(**given, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **settings)
    return found[0, ids.shape[1] :].tolist()


def by_genai(folder: Path, given: dict[str, torch.Tensor]) -> list[int]:
    genai: Any = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    model, length = genai.Model(str(folder)), given["input_ids"].shape[1]
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=length + TOKENS, min_length=length + TOKENS)
    generator, tensors = genai.Generator(model, settings), genai.NamedTensors()
    for name, value in given.items():
        tensors[name] = value.numpy().astype(np.int32 if name == "input_ids" else value.numpy().dtype)
    tensors["num_image_tokens"] = np.array([int((given["input_ids"] == IMAGE).sum())])
    generator.set_inputs(tensors)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[length:]]


SCRIPT = """
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import path from "node:path";
const [folder, kind, file] = process.argv.slice(2);
const require = createRequire(path.join(process.cwd(), "package.json"));
const library = require("@huggingface/transformers"), { Tensor, env } = library;
env.allowRemoteModels = false;
env.localModelPath = path.dirname(folder) + path.sep;
const model = await library[kind].from_pretrained(path.basename(folder), { dtype: "fp32" });
const given = JSON.parse(readFileSync(file)), whole = (list) => BigInt64Array.from(list.map(BigInt));
const length = given.input_ids[0].length, ids = given.input_ids[0];
const made = await model.generate({
  input_ids: new Tensor("int64", whole(ids), [1, length]),
  attention_mask: new Tensor("int64", whole(ids.map(() => 1)), [1, length]),
  pixel_values: new Tensor("float32", Float32Array.from(given.pixel_values.flat()), [52, given.pixel_values[0].length]),
  image_grid_thw: new Tensor("int64", whole(given.image_grid_thw.flat()), [2, 3]),
  do_sample: false, max_new_tokens: 20, min_new_tokens: 20,
});
console.log(JSON.stringify(made.tolist()[0].slice(length).map(Number)));
"""


def in_node(folder: Path, kind: str, given: dict[str, torch.Tensor]) -> list[int]:
    program, package = node()
    script, data = folder.with_name("images.mjs"), folder.with_name("images.json")
    script.write_text(SCRIPT)
    data.write_text(json.dumps({name: value.tolist() for name, value in given.items()}))
    command = [program, str(script), str(folder), kind, str(data)]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in VISION])
def files(request: pytest.FixtureRequest) -> Programs:
    model = qwen(request.param)
    return Programs(model, example_calls(model, task=TASK))


@pytest.mark.parametrize("name", ["vision_encoder", "embed_tokens", "decoder_model_merged"])
def test_every_module_of_every_file_agrees(name: str, files: Programs) -> None:
    files.assert_agree(name)
    paths = {path for path, _ in files.model.named_modules()}
    assert {node.metadata_props["htp.module"] for node in files[name].model.graph} <= paths


def test_genai_generates_the_tokens_of_pytorch(files: Programs, tmp_path: Path) -> None:
    for_genai = Programs(files.model, example_calls(files.model, task=TASK, embeds_images=True))
    for name in ("vision_encoder", "decoder_model_merged"):  # those that are the same
        if for_genai.calls[name].input_names == files.calls[name].input_names:
            for_genai[name] = files[name]
    for_genai.save(tmp_path)
    decoder = for_genai["decoder_model_merged"].model
    found = genai_config(
        decoder, files.model.config, files.model.generation_config, filename="decoder_model_merged.onnx"
    )
    assert (found["model"]["decoder"]["num_attention_heads"], found["model"]["vision"]["patch_size"]) == (4, 4)
    (tmp_path / "genai_config.json").write_text(json.dumps(found))
    given = prompt(files.model)
    assert by_genai(tmp_path, given) == generated(files.model, given)


def test_transformers_js_generates_the_tokens_of_pytorch(files: Programs, tmp_path: Path) -> None:
    node()
    (tmp_path / "files").mkdir()
    saved = files.save(tmp_path / "files")
    folder = write_transformers_js(saved, tmp_path / "tiny", files.model, dtypes=["fp32"])
    given = prompt(files.model)
    assert in_node(folder, type(files.model).__name__, given) == generated(files.model, given)
