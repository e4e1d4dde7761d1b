"""The files of models with an encoder and a decoder: optimum's names, PyTorch's tokens, and exact modules."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest

import htp_export
from htp_export.errors import InputError
from htp_export.format.leaves import tensors_in
from htp_export.huggingface import example_calls
from tests.decoders import ENCODER_DECODERS, encoder_decoder, generated_from, greedy_from, start_of

pytest.importorskip("transformers.exporters", reason="transformers older than 5.23 has no exporters")

QUICK = {"t5"}
MODELS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ENCODER_DECODERS]
KINDS = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]


MERGED = "decoder_model_merged"


@pytest.fixture(scope="module", params=MODELS)
def exported(request: pytest.FixtureRequest) -> Any:
    model = encoder_decoder(request.param)
    calls = {**example_calls(model), MERGED: example_calls(model, two_files=False)[MERGED]}
    files = {}
    for name, call in calls.items():
        with call.exporting():
            program = htp_export.export(call.model, verbose=False, **call.options)
        call.name_dimensions(program.model.graph)
        files[name] = call, program
    return model, files


def session_of(program: Any) -> Any:
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString())


def shapes(values: Any) -> dict[str, list[Any]]:
    return {value.name: [size if isinstance(size, int) else size.value for size in value.shape] for value in values}


def test_names_are_those_of_optimum(exported: Any) -> None:
    model, files = exported
    assert list(files) == ["encoder_model", "decoder_model", "decoder_with_past_model", MERGED]
    graphs = {name: program.model.graph for name, (_, program) in files.items()}
    inputs = {name: set(shapes(graph.inputs)) for name, graph in graphs.items()}
    outputs = {name: set(shapes(graph.outputs)) for name, graph in graphs.items()}
    masks = {"attention_mask"} if model.main_input_name == "input_ids" else set()
    encoder_masks = {f"encoder_{name}" for name in masks}
    past = {f"past_key_values.{kind.replace('.', f'.{side}.')}" for kind in KINDS for side in ("decoder", "encoder")}
    assert inputs["encoder_model"] == {model.main_input_name, *masks}
    assert outputs["encoder_model"] == {"last_hidden_state"}
    assert inputs["decoder_model"] == {"input_ids", "encoder_hidden_states", *encoder_masks}
    assert outputs["decoder_model"] == {"logits"} | {name.replace("past_key_values", "present") for name in past}
    assert inputs["decoder_with_past_model"] == {"input_ids", *encoder_masks, *past}
    grown = {f"present.{kind.replace('.', '.decoder.')}" for kind in KINDS}
    assert outputs["decoder_with_past_model"] == {"logits"} | grown
    assert inputs[MERGED] == inputs["decoder_model"] | inputs["decoder_with_past_model"]
    assert outputs[MERGED] == outputs["decoder_model"]


def test_signatures_of_the_decoder_have_what_each_attention_reads_of_the_cache(exported: Any) -> None:
    tagged = htp_export.load(exported[1]["decoder_with_past_model"][1])
    sides = {"decoder": "self_attention_cache", "encoder": "cross_attention_cache"}
    paths = [path for path in tagged.paths if path.endswith(("SelfAttention", "self_attn"))]
    paths += [path for path in tagged.paths if path.endswith(("EncDecAttention", "encoder_attn"))]
    paths = [path for path in paths if path.startswith(("decoder.", "model.decoder."))]
    assert len(paths) == 4
    for place, path in enumerate(paths):
        side, layer = ("decoder", "encoder")[place // 2], place % 2
        inputs = tagged.signature(path, 0).inputs
        caches = {name: tensor for name, tensor in inputs.items() if name.startswith("past_key_values")}
        wanted = {
            f"past_key_values.{sides[side]}.layers.{layer}.{kind}s": f"past_key_values.{layer}.{side}.{kind}"
            for kind in ("key", "value")
        }
        assert caches == wanted, path


def test_dimensions_are_named_as_optimum_names_them(exported: Any) -> None:
    model, files = exported
    if model.main_input_name != "input_ids":
        pytest.skip("sounds have one length")
    graph = files["decoder_with_past_model"][1].model.graph
    heads = model.config.num_attention_heads
    assert shapes(graph.inputs)["past_key_values.0.encoder.key"] == ["batch_size", heads, "encoder_sequence_length", 8]
    assert shapes(graph.inputs)["past_key_values.1.decoder.value"][2] == "past_decoder_sequence_length"
    assert shapes(graph.outputs)["present.0.decoder.key"][2] == "past_decoder_sequence_length + decoder_sequence_length"
    assert shapes(files["encoder_model"][1].model.graph.inputs)["input_ids"] == [
        "batch_size",
        "encoder_sequence_length",
    ]


def test_onnxruntime_generates_what_pytorch_generates(exported: Any) -> None:
    model, files = exported
    encoder, first, following, merged = (session_of(program) for _, program in files.values())
    inputs = files["encoder_model"][0].kwargs
    arrays = {name: value.numpy() for name, value in inputs.items()}
    expected = generated_from(model, inputs)
    assert greedy_from(encoder, first, following, arrays, start_of(model)) == expected
    assert greedy_from(encoder, merged, merged, arrays, start_of(model)) == expected


def test_a_merged_decoder_is_one_flat_graph_with_each_weight_and_module_once(exported: Any) -> None:
    _, files = exported
    merged = htp_export.load(files[MERGED][1])
    separate = htp_export.load(files["decoder_model"][1])
    graph = merged.model.graph
    assert not any(attribute.type.name.startswith("GRAPH") for node in graph for attribute in node.attributes.values())
    assert all("htp.module" in node.metadata_props for node in graph)
    assert list(merged.paths) == list(separate.paths)
    assert {path: merged.hierarchy[path].fate for path in merged} == {
        path: separate.hierarchy[path].fate for path in separate
    }
    assert (
        htp_export.cost(files[MERGED][1]).modules[""].parameters
        == htp_export.cost(files["decoder_model"][1]).modules[""].parameters
    )


def test_a_merged_decoder_computes_one_state_of_the_encoder_where_the_cache_has_all(exported: Any) -> None:
    model, files = exported
    call, program = files[MERGED]
    projections = [
        path for path, _ in model.named_modules() if path.endswith(("EncDecAttention.k", "encoder_attn.k_proj"))
    ]
    assert len(projections) == 2
    flops = {}
    for run, kwargs in call.runs.items():
        found = htp_export.cost(program, dict(zip(call.input_names, tensors_in(kwargs), strict=True)))
        flops[run] = [found.modules[path].flops for path in projections]
    states = call.kwargs["encoder_hidden_states"].shape[1]
    assert flops["prefill"] == [states * each for each in flops["decode"]]


def test_every_module_of_every_file_agrees(exported: Any) -> None:
    _, files = exported
    for name, (call, program) in files.items():
        with call.adapted():
            for run, kwargs in call.runs.items():
                result = htp_export.verify(call.model, program, kwargs=kwargs)
                assert result.ok, f"{name}, {run}: {result.summary}"
                assert len(result.modules[""].calls[0].outputs) == len(call.output_names)


def test_the_model_is_as_it_was_afterwards(exported: Any) -> None:
    model, files = exported
    assert "forward" not in vars(model)
    owners = {node.metadata_props["htp.module"] for node in files["decoder_model"][1].model.graph}
    assert owners <= {name for name, _ in model.named_modules()}


def test_a_decoder_that_cannot_continue_a_part_of_the_encoders_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicLayer

    model = encoder_decoder("t5")
    attention = model.decoder.block[1].layer[1].EncDecAttention
    forward = attention.forward

    def forgetful(*args: Any, past_key_values: Any, **kwargs: Any) -> Any:
        if not past_key_values.is_updated.get(1):  # it computes keys, and knows no others
            past_key_values.cross_attention_cache.layers[1] = DynamicLayer()
        return forward(*args, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(attention, "forward", forgetful)
    assert list(example_calls(model))[1:] == ["decoder_model", "decoder_with_past_model"]
    with pytest.raises(InputError, match=r"from a part of its states \(.*\): export its decoder as two files"):
        example_calls(model, two_files=False)


def test_a_decoder_is_called_with_the_output_class_of_its_own_encoder() -> None:
    calls = example_calls(encoder_decoder("moonshine"), two_files=True)
    assert list(calls) == ["encoder_model", "decoder_model", "decoder_with_past_model"]
    assert set(calls["decoder_model"].input_names) == {"input_ids", "encoder_hidden_states"}
