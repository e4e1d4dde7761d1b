"""Calls of models that generate: the names and axes that optimum has, and the tokens that PyTorch generates."""

from typing import Any

import onnxruntime
import pytest

import htp_export
from htp_export.capabilities.huggingface.tasks import task_of
from htp_export.errors import InputError
from htp_export.huggingface import example_call, example_calls, load_model
from htp_export.runtime.declared_inputs import Input
from tests.decoders import (
    CACHE,
    DECODERS,
    Programs,
    decoder,
    encoder_decoder,
    generated,
    greedy,
    prompt,
)
from tests.exporting import SharedFiles, quick
from tests.huggingface.test_huggingface import CASES, VIT

pytest.importorskip(
    "transformers.exporters", reason="transformers older than 5.23 has no exporters"
)

TOTAL = "past_sequence_length + sequence_length"


# its window is shorter than what is generated
@pytest.fixture(scope="module", params=quick(DECODERS, "mistral"))
def exported(request: pytest.FixtureRequest, shared_files: SharedFiles) -> Any:
    model, file = decoder(request.param), shared_files.decoder(request.param)
    files = Programs(model, example_calls(model))
    files["model"] = htp_export.load(file)
    return model, file, files


@pytest.mark.long
def test_names_and_axes_are_those_of_optimum(exported):
    model, _, files = exported
    graph = files["model"].model.graph
    inputs, outputs = (
        {value.name: Input.of(value).shape for value in ends}
        for ends in (graph.inputs, graph.outputs)
    )
    heads = inputs["past_key_values.0.key"][1]
    assert inputs.pop("input_ids") == ("batch_size", "sequence_length")
    assert inputs.pop("attention_mask") == ("batch_size", TOTAL)
    if model.config.model_type != "mpt":  # it has no positions, but biases by distance
        assert inputs.pop("position_ids") == ("batch_size", "sequence_length")
    assert outputs.pop("logits") == ("batch_size", "sequence_length", 64)
    kinds = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    assert inputs == {
        f"past_key_values.{kind}": ("batch_size", heads, "past_sequence_length", 8)
        for kind in kinds
    }
    assert outputs == {f"present.{kind}": ("batch_size", heads, TOTAL, 8) for kind in kinds}


def test_onnxruntime_generates_what_pytorch_generates(exported):
    model, file, _ = exported
    assert greedy(onnxruntime.InferenceSession(file), prompt()) == generated(model, prompt())


def test_every_module_agrees_in_prefill_and_in_decode_and_tags_are_the_models_own(exported):
    model, _, files = exported
    files.assert_agree("model")
    owners = {node.metadata_props["htp.module"] for node in files["model"].model.graph}
    assert owners <= {name for name, _ in model.named_modules()}
    assert (
        next(name for name, _ in model.named_modules() if "norm" in name or "ln_" in name) in owners
    )


def test_signatures_have_the_cache_whole_in_the_model_and_by_layer_in_the_layers(exported):
    _, _, files = exported
    call, tagged = files.calls["model"], files["model"]

    def caches(path: str) -> dict[str, str | None]:
        inputs = tagged.signature(path, 0).inputs.items()
        # MPT's name
        same = {name.replace("layer_past.", f"{CACHE}."): tensor for name, tensor in inputs}
        return {name: tensor for name, tensor in same.items() if name.startswith(f"{CACHE}.")}

    parts = [
        (f"layers.{layer}.{kind}s", f"{layer}.{kind}")
        for layer in range(2)
        for kind in ("key", "value")
    ]
    assert caches("") == {f"{CACHE}.{own}": f"past_key_values.{optimum}" for own, optimum in parts}
    assert tagged.signature("", 0).outputs == call.output_names
    attention = [path for path in tagged.paths if path.rpartition(".")[2] in ("attn", "self_attn")]
    assert len(attention) == 2
    for layer, path in enumerate(attention):
        own = {name: tensor for name, tensor in caches("").items() if f".{layer}." in name}
        assert caches(path) == own
        assert caches(path.rpartition(".")[0]) == own
    decode = htp_export.verify(call.model, tagged, kwargs=call.runs["decode"])
    compared = [each.name for each in decode.modules[attention[1]].calls[0].inputs]
    assert {f"{CACHE}.layers.1.keys", f"{CACHE}.layers.1.values"} <= set(compared)


def test_two_files_and_cache_names_of_transformers():
    call = example_call(decoder("llama"), cache_names="transformers")
    assert call.input_names[3] == f"input.{CACHE}.layers.0.keys"
    assert call.output_names[1] == f"output.{CACHE}.layers.0.keys"
    first, following = example_calls(call.model, two_files=True).values()
    assert first.input_names == ("input_ids", "attention_mask", "position_ids")
    assert first.axes["present.0.key"][2] == "sequence_length"
    assert (following.input_names[3], following.axes["present.0.key"][2]) == (
        "past_key_values.0.key",
        TOTAL,
    )


def test_without_a_cache_there_are_tokens_and_logits():
    model = load_model(
        "llama", task="text-generation", random_weights=True, overrides=DECODERS["llama"]
    )
    call = example_call(model, task="text-generation")
    assert call.input_names == ("input_ids", "attention_mask", "position_ids")
    assert call.output_names == ("logits",)
    assert list(call.runs) == ["forward"]


def test_a_model_whose_cache_is_off_says_so():
    for model in (decoder("gpt2"), encoder_decoder("whisper")):
        task = task_of(model)
        model.config.use_cache = False
        with pytest.raises(InputError, match="use_cache"):
            example_calls(model, task=task)


def test_caches_that_hold_states_are_refused_with_their_class():
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "state_size": 4,
        "bos_token_id": 0,
    }
    mamba = load_model(
        "mamba", task="text-generation", random_weights=True, overrides={**sizes, "pad_token_id": 0}
    )
    with pytest.raises(
        InputError,
        match=r"(takes no key-value cache|, which hold states .*); choose a task without",
    ):
        example_call(mamba, task="text-generation-with-past")
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "lru_width": 16,
    }
    sizes |= {"num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    gemma = load_model(
        "recurrent_gemma", task="text-generation-with-past", random_weights=True, overrides=sizes
    )
    message = "the cache of RecurrentGemmaForCausalLM has layers with a LinearAttentionLayer, which hold states"
    with pytest.raises(InputError, match=message):
        example_call(gemma, task="text-generation-with-past")
    assert task_of(mamba) == task_of(gemma) == "text-generation"


def test_random_inputs_fit_a_file_with_a_cache_and_it_is_a_decoder(exported):
    """The length of the mask is computed of those of the text and the cache, and the keys are of both."""
    _, _, files = exported
    assert htp_export.fingerprint(files["model"]).family in ("decoder", "mixture")
    assert htp_export.compare(files["model"], files["model"], dims={"past_sequence_length": 3}).ok


# --- without a cache ----------------------------------------------------------------------------------------

IMAGE = ["batch_size", "num_channels", "height", "width"]
TEXT = ["text_batch_size", "sequence_length"]
TASKS: list[Any] = [
    ("vit", "image-classification", VIT, {"pixel_values": IMAGE}, ["logits"]),
    (
        "clip",
        "zero-shot-image-classification",
        CASES["clip"][0],
        {
            "input_ids": TEXT,
            "attention_mask": TEXT,
            "pixel_values": ["image_batch_size", *IMAGE[1:]],
        },
        ["logits_per_image", "logits_per_text", "text_embeds", "image_embeds"],
    ),
    (
        "yolos",
        "object-detection",
        {**VIT, "num_detection_tokens": 5, "image_size": [32, 32]},
        {"pixel_values": IMAGE},
        ["logits", "pred_boxes"],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task", "settings", "inputs", "outputs"), TASKS)
def test_a_task_names_its_file_and_every_module_agrees(name, task, settings, inputs, outputs):
    model = load_model(name, task=task, random_weights=True, overrides=settings)
    files = Programs(model, example_calls(model, task=task))
    call, program = files.calls["model"], files["model"]
    assert {name: list(call.axes[name].values()) for name in call.input_names} == inputs
    assert [value.name for value in program.model.graph.inputs] == list(call.input_names)
    assert (
        [value.name for value in program.model.graph.outputs] == outputs == list(call.output_names)
    )
    files.assert_agree("model")
