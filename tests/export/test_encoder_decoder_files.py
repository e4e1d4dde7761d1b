"""The files of models with an encoder and a decoder: optimum's names, PyTorch's tokens, and exact modules."""

from typing import Any

import pytest

import htp_export
from htp_export.errors import InputError
from htp_export.format.leaves import tensors_in
from htp_export.huggingface import example_calls
from tests.decoders import (
    CACHE,
    ENCODER_DECODERS,
    Programs,
    encoder_decoder,
    generated_from,
    greedy_from,
    start_of,
)
from tests.exporting import quick

pytest.importorskip(
    "transformers.exporters", reason="transformers older than 5.23 has no exporters"
)

KINDS = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
ENCODER, FIRST, NEXT, MERGED = (
    "encoder_model",
    "decoder_model",
    "decoder_with_past_model",
    "decoder_model_merged",
)
MODELS = [
    pytest.param(name, marks=() if name == "t5" else pytest.mark.slow) for name in ENCODER_DECODERS
]


@pytest.fixture(scope="module", params=MODELS)
def files(request: pytest.FixtureRequest) -> Programs:
    model = encoder_decoder(request.param, **({"num_layers": 1} if request.param == "t5" else {}))
    return Programs(
        model, {**example_calls(model), MERGED: example_calls(model, two_files=False)[MERGED]}
    )


@pytest.mark.parametrize("name", quick(ENCODER_DECODERS, "t5", "whisper"))
def test_names_are_those_of_optimum(name):
    model = encoder_decoder(name)
    calls = {**example_calls(model), MERGED: example_calls(model, two_files=False)[MERGED]}
    assert list(calls) == [ENCODER, FIRST, NEXT, MERGED]
    inputs = {name: set(call.input_names) for name, call in calls.items()}
    outputs = {name: set(call.output_names) for name, call in calls.items()}
    masks = {"attention_mask"} if model.main_input_name == "input_ids" else set()
    encoder_masks = {f"encoder_{name}" for name in masks}
    past = {
        f"past_key_values.{kind.replace('.', f'.{side}.')}"
        for kind in KINDS
        for side in ("decoder", "encoder")
    }
    assert inputs[ENCODER] == {model.main_input_name, *masks}
    assert outputs[ENCODER] == {"last_hidden_state"}
    assert inputs[FIRST] == {"input_ids", "encoder_hidden_states", *encoder_masks}
    assert outputs[FIRST] == {"logits"} | {
        name.replace("past_key_values", "present") for name in past
    }
    assert inputs[NEXT] == {"input_ids", *encoder_masks, *past}
    assert outputs[NEXT] == {"logits"} | {
        f"present.{kind.replace('.', '.decoder.')}" for kind in KINDS
    }
    assert inputs[MERGED] == inputs[FIRST] | inputs[NEXT]
    assert outputs[MERGED] == outputs[FIRST]


@pytest.mark.long
def test_dimensions_are_named_as_optimum_names_them_and_a_merged_decoder_has_no_branches(files):
    if files.model.main_input_name != "input_ids":
        pytest.skip("sounds have one length")

    def shapes(values: Any) -> dict[str, list[Any]]:
        return {
            value.name: [size if isinstance(size, int) else size.value for size in value.shape]
            for value in values
        }

    graph = files[MERGED].model.graph
    heads = files.model.config.num_attention_heads
    cross = ["batch_size", heads, "past_encoder_sequence_length", 8]
    assert shapes(graph.inputs)["past_key_values.0.encoder.key"] == cross
    assert files.calls[NEXT].axes["past_key_values.0.encoder.key"][2] == "encoder_sequence_length"
    assert (
        shapes(graph.inputs)["past_key_values.0.decoder.value"][2] == "past_decoder_sequence_length"
    )
    assert (
        shapes(graph.outputs)["present.0.decoder.key"][2]
        == "past_decoder_sequence_length + decoder_sequence_length"
    )
    text = ["batch_size", "encoder_sequence_length"]
    assert shapes(files[ENCODER].model.graph.inputs)["input_ids"] == text
    assert not any(
        attribute.type.name.startswith("GRAPH")
        for node in graph
        for attribute in node.attributes.values()
    )


@pytest.mark.parametrize(
    "decoders", [(MERGED, MERGED), pytest.param((FIRST, NEXT), marks=pytest.mark.slow)]
)
def test_onnxruntime_generates_what_pytorch_generates(decoders, files):
    encoder, first, following = map(files.session, (ENCODER, *decoders))
    inputs = files.calls[ENCODER].kwargs
    arrays = {name: value.numpy() for name, value in inputs.items()}
    expected = generated_from(files.model, inputs)
    assert greedy_from(encoder, first, following, arrays, start_of(files.model)) == expected


@pytest.mark.parametrize(
    "name",
    [ENCODER, MERGED, *(pytest.param(each, marks=pytest.mark.slow) for each in (FIRST, NEXT))],
)
def test_every_module_of_every_file_agrees(name, files):
    files.assert_agree(name)
    assert "forward" not in vars(files.model)
    owners = {node.metadata_props["htp.module"] for node in files[name].model.graph}
    assert owners <= {path for path, _ in files.calls[name].model.named_modules()}


@pytest.mark.slow
def test_signatures_of_the_decoder_have_what_each_attention_reads_of_the_cache(files):
    tagged = htp_export.load(files[NEXT])
    sides = {"decoder": "self_attention_cache", "encoder": "cross_attention_cache"}
    paths = [path for path in tagged.paths if path.endswith(("SelfAttention", "self_attn"))]
    paths += [path for path in tagged.paths if path.endswith(("EncDecAttention", "encoder_attn"))]
    paths = [path for path in paths if path.startswith(("decoder.", "model.decoder."))]
    layers = len(paths) // 2
    assert layers == (1 if "t5" in type(files.model).__name__.lower() else 2)
    for place, path in enumerate(paths):
        side, layer = ("decoder", "encoder")[place // layers], place % layers
        inputs = tagged.signature(path, 0).inputs
        assert {name: tensor for name, tensor in inputs.items() if name.startswith(CACHE)} == {
            f"{CACHE}.{sides[side]}.layers.{layer}.{kind}s": f"past_key_values.{layer}.{side}.{kind}"
            for kind in ("key", "value")
        }, path


@pytest.mark.slow
def test_a_merged_decoder_has_each_weight_and_module_once(files):
    merged, separate = htp_export.load(files[MERGED]), htp_export.load(files[FIRST])
    assert list(merged.paths) == list(separate.paths)
    fates = [{path: made.hierarchy[path].fate for path in made} for made in (merged, separate)]
    assert fates[0] == fates[1]
    sizes = [htp_export.cost(files[name]).modules[""].parameters for name in (MERGED, FIRST)]
    assert sizes[0] == sizes[1]


def test_a_merged_decoder_computes_one_state_of_the_encoder_where_the_cache_has_all(files):
    ends = ("EncDecAttention.k", "encoder_attn.k_proj")
    projections = [path for path, _ in files.model.named_modules() if path.endswith(ends)]
    assert projections
    call, flops = files.calls[MERGED], {}
    for run, kwargs in call.runs.items():
        found = htp_export.cost(
            files[MERGED], dict(zip(call.input_names, tensors_in(kwargs), strict=True))
        )
        flops[run] = [found.modules[path].flops for path in projections]
    states = call.kwargs["encoder_hidden_states"].shape[1]
    assert flops["prefill"] == [states * each for each in flops["decode"]]


def test_a_decoder_that_cannot_continue_a_part_of_the_encoders_keys_is_refused(monkeypatch):
    from transformers.cache_utils import DynamicLayer

    model = encoder_decoder("t5")
    attention = model.decoder.block[1].layer[1].EncDecAttention
    forward = attention.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        if not kwargs[CACHE].is_updated.get(1):  # it computes keys, and knows no others
            kwargs[CACHE].cross_attention_cache.layers[1] = DynamicLayer()
        return forward(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", forgetful)
    assert list(example_calls(model))[1:] == ["decoder_model", "decoder_with_past_model"]
    with pytest.raises(
        InputError, match=r"from a part of its states \(.*\): export its decoder as two files"
    ):
        example_calls(model, two_files=False)


@pytest.mark.parametrize("two_files", [True, False])
def test_a_model_whose_encoder_wants_other_inputs_is_refused(two_files, monkeypatch):
    model = encoder_decoder("t5")

    def forward(
        input_ids: Any = None, attention_mask: Any = None, patches: Any = None, **_: Any
    ) -> Any:
        raise ValueError("You have to specify patches")

    monkeypatch.setattr(model.encoder, "forward", forward)
    with pytest.raises(InputError, match=r"the states of its encoder .*specify patches"):
        example_calls(model, two_files=two_files)
