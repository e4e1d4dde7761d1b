"""Models that see images of any size (Qwen's): modules, tokens in ONNX Runtime GenAI and in transformers.js."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from htp_export.capabilities.export.export_options import DeployOptions
from htp_export.capabilities.huggingface.genai import image_operators, vision_processor, write_genai
from htp_export.capabilities.huggingface.image_grids import (
    attending_by_sequence,
    encoder_of_grids,
    example_images,
    grid_tensors,
)
from htp_export.capabilities.huggingface.transformers_js import write_transformers_js
from htp_export.errors import InputError
from htp_export.huggingface import example_calls, load_model
from tests.decoders import TEXT, Programs
from tests.export.test_transformers_js import node, of_tensors_in_node

pytest.importorskip(
    "transformers.exporters", reason="transformers older than 5.23 has no exporters"
)

TASK = "image-text-to-text-with-past"
IMAGE, START, TOKENS = 60, 62, 20
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {"intermediate_size": 24, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {
        "intermediate_size": 24,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0],
    },
}
PIXELS: dict[str, Any] = {"patch_size": 4, "min_pixels": 64, "max_pixels": 4096}
PIXELS |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}


def qwen(name: str) -> Any:
    vision = {
        "hidden_size": 16,
        "out_hidden_size": 32,
        "depth": 2,
        "num_heads": 2,
        "patch_size": 4,
        **VISION[name],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**TEXT, "rope_parameters": rope}
    if name == "qwen2_vl":
        del vision["out_hidden_size"]
    if name == "qwen3_vl":
        text = {
            key: value for key, value in text.items() if key not in ("bos_token_id", "eos_token_id")
        }
        text["head_dim"] = 8
    overrides = {f"text_config.{key}": value for key, value in text.items()}
    overrides |= {f"vision_config.{key}": value for key, value in vision.items()}
    overrides |= {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": START}
    model = load_model(name, task=TASK, random_weights=True, overrides=overrides)
    with torch.no_grad():  # what is seen and where it is shall count: random weights are small
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
        # no text has it: PyTorch embeds one that it generated as any other token
        model.lm_head.weight[IMAGE] = 0
    model.generation_config.update(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return model


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("frames", [1, 2])
def test_what_is_computed_from_grids_as_tensors_is_what_the_encoder_computes_in_loops(name, frames):
    encoder = encoder_of_grids(qwen(name))
    images = example_images(encoder, 3, torch.Generator().manual_seed(0))
    grid = images["image_grid_thw"] * torch.tensor([frames, 1, 1])
    pixels = torch.cat([images["pixel_values"]] * frames)
    with torch.no_grad():
        right = encoder(pixels, grid_thw=grid).pooler_output
        with attending_by_sequence(encoder):
            found = encoder(
                pixels, grid_thw=grid, **grid_tensors(encoder, grid, len(pixels))
            ).pooler_output
    assert torch.allclose(found, right, rtol=0, atol=1e-5 * float(right.abs().max()))


def test_an_encoder_whose_attention_takes_no_mask_is_refused():
    model = qwen("qwen2_vl")
    model.set_attn_implementation("eager")
    with pytest.raises(
        InputError, match="computes other features if image_grid_thw is not constant; try"
    ):
        example_calls(model, task=TASK)


def test_files_for_genai_and_for_transformers_js_are_two_exports():
    names = ["vision_encoder", "embed_tokens", "decoder_model_merged"]
    DeployOptions(genai=True).check_files(names)
    with pytest.raises(InputError, match=r"--genai and --transformers-js: .*; export twice"):
        DeployOptions(genai=True, transformers_js=Path("js")).check_files(names)
    with pytest.raises(InputError, match="--genai and --export-json are for models of one file"):
        DeployOptions(export_json=True).check_files(names)


def test_settings_of_an_image_processor_become_operators():
    steps = {
        step["operation"]["type"]: step["operation"]["attrs"] for step in image_operators(PIXELS)
    }
    resized = {"interpolation": "CUBIC", "smart_resize": 1, "min_pixels": 64, "max_pixels": 4096}
    assert steps["Resize"] == {**resized, "patch_size": 4, "merge_size": 2}
    assert steps["Normalize"] == {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    named = {
        "size": {"shortest_edge": 9, "longest_edge": 81},
        "resample": 2,
        "do_rescale": False,
        "do_normalize": False,
    }
    steps = {
        step["operation"]["type"]: step["operation"]["attrs"] for step in image_operators(named)
    }
    assert (steps["Resize"]["min_pixels"], steps["Resize"]["max_pixels"]) == (9, 81)
    assert (steps["Resize"]["interpolation"], steps["Rescale"]) == (
        "LINEAR",
        {"rescale_factor": 1.0},
    )
    assert "Normalize" not in steps


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**PIXELS, "resample": 4}, "has no filter for its resample, 4"),
        ({**PIXELS, "image_std": [1, 0, 1]}, r"image_std is \[1.0, 0.0, 1.0\]"),
        ({**PIXELS, "image_mean": [float("nan")] * 3}, "image_mean is .*, and not three numbers"),
        ({**PIXELS, "patch_size": "../4"}, "patch_size is '../4'"),
        ({}, "no preprocessor_config.json with a patch_size"),
    ],
)
def test_an_image_processor_that_genai_has_no_operators_for_is_said(
    settings, said, tmp_path, caplog
):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert vision_processor(tmp_path) is None
    assert re.search(said, caplog.text)


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
    settings: dict[str, Any] = {
        "max_new_tokens": TOKENS,
        "min_new_tokens": TOKENS,
        "do_sample": False,
    }
    kinds = (ids == IMAGE).int()
    with torch.no_grad():
        found = model.generate(
            **given, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **settings
        )
    return found[0, ids.shape[1] :].tolist()


def by_genai(model: Any, tensors: Any, length: int) -> list[int]:
    """What GenAI appends to a text of this length."""
    genai = importlib.import_module("onnxruntime_genai")
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=length + TOKENS, min_length=length + TOKENS)
    generator = genai.Generator(model, settings)
    generator.set_inputs(tensors)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[length:]]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in VISION]
)
def files(request: pytest.FixtureRequest) -> Programs:
    model = qwen(request.param)
    return Programs(model, example_calls(model, task=TASK))


@pytest.mark.parametrize("name", ["vision_encoder", "embed_tokens", "decoder_model_merged"])
def test_every_module_of_every_file_agrees(name, files):
    files.assert_agree(name)
    paths = {path for path, _ in files.model.named_modules()}
    assert {node.metadata_props["htp.module"] for node in files[name].model.graph} <= paths


@pytest.fixture(scope="module")
def for_genai(files: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``export --genai`` writes, from one with a tokenizer and an image processor."""
    folder, companions = tmp_path_factory.mktemp("genai"), tmp_path_factory.mktemp("source")
    programs = Programs(files.model, example_calls(files.model, task=TASK, embeds_images=True))
    for name in ("vision_encoder", "decoder_model_merged"):  # those that are the same
        if programs.calls[name].input_names == files.calls[name].input_names:
            programs[name] = files[name]
    saved = programs.save(folder)
    tokenizer().save_pretrained(companions)
    (companions / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    write_genai(saved["decoder_model_merged"], files.model, companions=companions)
    return folder


def test_genai_generates_the_tokens_of_pytorch(files, for_genai):
    said = json.loads((for_genai / "genai_config.json").read_text())["model"]
    assert (said["decoder"]["num_attention_heads"], said["vision"]["patch_size"]) == (4, 4)
    genai: Any = pytest.importorskip(
        "onnxruntime_genai", reason="onnxruntime-genai is not installed"
    )
    given, tensors = prompt(files.model), genai.NamedTensors()
    for name, value in given.items():
        tensors[name] = value.numpy().astype(
            np.int32 if name == "input_ids" else value.numpy().dtype
        )
    tensors["num_image_tokens"] = np.array([int((given["input_ids"] == IMAGE).sum())])
    found = by_genai(genai.Model(str(for_genai)), tensors, given["input_ids"].shape[1])
    assert found == generated(files.model, given)


def tokenizer() -> Any:
    """Characters from ``!`` to ``X``, and the three tokens around an image by the names that GenAI looks for."""
    from transformers import Qwen2Tokenizer

    around = {"<|image_pad|>": IMAGE, "<|vision_start|>": START, "<|vision_end|>": 63}
    letters = {chr(ord("!") + place): 3 + place for place in range(56)}
    return Qwen2Tokenizer(
        {**letters, **around}, [], unk_token=None, extra_special_tokens=list(around)
    )


def test_genai_prepares_images_as_transformers_does(files, for_genai, tmp_path):
    genai: Any = pytest.importorskip(
        "onnxruntime_genai", reason="onnxruntime-genai is not installed"
    )
    image: Any = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model, random = genai.Model(str(for_genai)), np.random.default_rng(0)
    processor = model.create_multimodal_processor()
    for number, size in enumerate([(41, 50), (100, 60), (5, 7)]):  # as it is, smaller and larger
        file = tmp_path / f"{number}.png"
        image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)).save(file)
        right = Qwen2VLImageProcessorPil(**PIXELS)(images=[image.open(file)], return_tensors="pt")
        text = "HELLO<|vision_start|><|image_pad|><|vision_end|>,SEE"
        found = processor(text, images=genai.Images.open(str(file)))
        assert np.allclose(
            found["pixel_values"].as_numpy(), right["pixel_values"], rtol=0, atol=1e-5
        )
        count = int(right["image_grid_thw"].prod()) // 4
        ids = tokenizer()(
            text.replace("<|image_pad|>", "<|image_pad|>" * count), return_tensors="pt"
        ).input_ids
        assert found["input_ids"].as_numpy().tolist() == ids.tolist()
        assert by_genai(model, found, ids.shape[1]) == generated(
            files.model, {"input_ids": ids, **right}
        )


def test_transformers_js_generates_the_tokens_of_pytorch(files, tmp_path):
    node()
    (tmp_path / "files").mkdir()
    saved = files.save(tmp_path / "files")
    folder = write_transformers_js(saved, tmp_path / "tiny", files.model, dtypes=["fp32"])
    given = prompt(files.model)
    found = of_tensors_in_node(folder, type(files.model).__name__, given)
    assert found[given["input_ids"].shape[1] :] == generated(files.model, given)
