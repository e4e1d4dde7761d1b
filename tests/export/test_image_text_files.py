"""The files of models that put images in the places of tokens: PyTorch's tokens, and exact modules."""

from typing import Any

import numpy as np
import pytest
import torch

from htp_export.errors import InputError
from htp_export.huggingface import example_calls, load_model
from tests.decoders import TEXT, Programs, next_tokens, nothing_past, past_of

pytest.importorskip(
    "transformers.exporters", reason="transformers older than 5.23 has no exporters"
)

TASK = "image-text-to-text-with-past"
IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IMAGES |= {"image_size": 8, "patch_size": 4}
IMAGE = 60
FILES = ["vision_encoder", "embed_tokens", "decoder_model_merged"]


def llava() -> Any:
    overrides: dict[str, Any] = {f"text_config.{name}": value for name, value in TEXT.items()}
    overrides |= {f"vision_config.{name}": value for name, value in IMAGES.items()}
    return load_model(
        "llava", task=TASK, random_weights=True, overrides={**overrides, "image_token_index": IMAGE}
    )


@pytest.fixture(scope="module")
def files() -> Programs:
    model = llava()
    return Programs(model, example_calls(model, task=TASK))


def prompt(images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A text with so many images, each of four tokens."""
    words = np.random.default_rng(0).integers(3, 59, (1, 7))
    ids = np.concatenate([words[:, :2], *[np.full((1, 4), IMAGE)] * images, words[:, 2:]], 1)
    return torch.from_numpy(ids), torch.randn(
        images, 3, 8, 8, generator=torch.Generator().manual_seed(0)
    )


def greedy(files: Programs, ids: Any, images: Any, tokens: int = 20) -> list[int]:
    """What the files append, run as transformers.js runs them."""
    see, embed, decode = map(files.session, FILES)
    seen = see.run(["image_features"], {"pixel_values": images})[0]
    feed, made, new = nothing_past(decode, 1), [], ids
    names = [value.name for value in decode.get_outputs()]
    for _ in range(tokens):
        rows = embed.run(["inputs_embeds"], {"input_ids": new})[0]
        rows[new == IMAGE] = seen if not made else seen[:0]
        length = ids.shape[1] + len(made)
        feed |= {"inputs_embeds": rows, "attention_mask": np.ones((1, length), np.int64)}
        feed["position_ids"] = np.arange(length)[None, -new.shape[1] :]
        found = dict(zip(names, decode.run(names, feed), strict=True))
        new = next_tokens(found["logits"])
        made.append(int(new[0, 0]))
        feed |= past_of(found)
    return made


def test_files_have_the_names_of_transformers_js(files):
    names = {
        name: (list(call.input_names), list(call.output_names))
        for name, call in files.calls.items()
    }
    assert list(names) == FILES
    assert names["vision_encoder"] == (["pixel_values"], ["image_features"])
    assert names["embed_tokens"] == (["input_ids"], ["inputs_embeds"])
    inputs, outputs = names["decoder_model_merged"]
    cache = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    past = {f"past_key_values.{each}" for each in cache}
    assert set(inputs) == {"inputs_embeds", "attention_mask", "position_ids", *past}
    assert outputs == ["logits", *(f"present.{each}" for each in cache)]


@pytest.mark.slow
@pytest.mark.parametrize("images", [1, 3])
def test_onnxruntime_generates_what_pytorch_generates(images, files):
    ids, pixels = prompt(images)
    mask = torch.ones_like(ids)
    settings: dict[str, Any] = {
        "max_new_tokens": 20,
        "min_new_tokens": 20,
        "do_sample": False,
        "pad_token_id": 0,
    }
    with torch.no_grad():
        found = files.model.generate(
            input_ids=ids, attention_mask=mask, pixel_values=pixels, **settings, eos_token_id=2
        )
    assert greedy(files, ids.numpy(), pixels.numpy()) == found[0, ids.shape[1] :].tolist()


@pytest.mark.long
@pytest.mark.parametrize("name", [*FILES[:2], pytest.param(FILES[2], marks=pytest.mark.slow)])
def test_every_module_of_every_file_agrees_and_every_node_is_tagged(name, files):
    files.assert_agree(name)
    paths = {path for path, _ in files.model.named_modules()}
    assert {node.metadata_props["htp.module"] for node in files[name].model.graph} <= paths


def test_a_model_without_places_for_images_is_refused():
    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    overrides: dict[str, Any] = {
        **small,
        "vocab_size": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    overrides |= {f"vision_config.{name}": value for name, value in IMAGES.items()}
    model = load_model("git", task=TASK, random_weights=True, overrides=overrides)
    with pytest.raises(
        InputError,
        match="GitForCausalLM does not replace tokens by images; choose a task",
    ):
        example_calls(model, task=TASK)


def test_a_model_that_does_more_with_images_is_refused(monkeypatch):
    model = llava()
    forward = model.model.forward

    def brighter(**arguments: Any) -> Any:
        if arguments.get("pixel_values") is not None:
            arguments["pixel_values"] = arguments["pixel_values"] * 2
        return forward(**arguments)

    monkeypatch.setattr(model.model, "forward", brighter)
    with pytest.raises(InputError, match="does more with images than to replace tokens by them"):
        example_calls(model, task=TASK)


def test_a_model_that_needs_more_of_an_image_is_refused(monkeypatch):
    model = llava()

    def get_image_features(pixel_values: Any, grid: Any = None) -> Any:
        return pixel_values.flatten(0, grid.sum())

    monkeypatch.setattr(model, "get_image_features", get_image_features, raising=True)
    with pytest.raises(
        InputError,
        match=r"cannot be called with images as its config describes them \(AttributeError",
    ):
        example_calls(model, task=TASK)
