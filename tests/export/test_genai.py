"""ONNX Runtime GenAI generates what PyTorch does from an exported decoder and its genai_config.json."""

import importlib.util
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest

import htp_export
from htp_export.capabilities.huggingface.genai import genai_config
from htp_export.errors import InputError
from htp_export.huggingface import example_call, example_calls, load_model
from tests.decoders import (
    DECODERS,
    TEXT,
    Config,
    Programs,
    decoder,
    generated,
    generated_by_genai,
    greedy,
    greedy_right_padded,
    prompt,
)

pytest.importorskip(
    "transformers.exporters", reason="transformers older than 5.23 has no exporters"
)

TOKENS = 20


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in DECODERS]
)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A decoder, and the folder with its file and its configuration."""
    folder = tmp_path_factory.mktemp(request.param)
    model = decoder(request.param)
    files = Programs(model, example_calls(model))
    files.save(folder)
    found = genai_config(files["model"].model, model.config, model.generation_config)
    (folder / "genai_config.json").write_text(json.dumps(found))
    return model, folder


def test_genai_generates_the_tokens_of_pytorch(exported):
    model, folder = exported
    assert generated_by_genai(folder, prompt()) == generated(model, prompt(), TOKENS)


class Stages:
    """Stages with the face of a session."""

    def __init__(self, runner: Any, parts: htp_export.results.Partition) -> None:
        self._runner, self._parts = runner, parts

    def get_inputs(self) -> list[Any]:
        return [
            SimpleNamespace(name=name, shape=tensor.shape)
            for name, tensor in self._parts.inputs.items()
        ]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self._parts.outputs]

    def run(self, names: list[str], given: dict[str, Any]) -> list[Any]:
        found = self._runner.run(given)
        return [found[name] for name in names]


def test_stages_generate_the_tokens_of_pytorch_in_onnxruntime_and_in_genai(exported, tmp_path):
    model, folder = exported
    expected = generated(model, prompt(), TOKENS)
    [second] = [
        path
        for path, _ in model.named_modules()
        if path.endswith((".layers.1", ".h.1", ".blocks.1"))
    ]
    parts = htp_export.partition(
        folder / "model.onnx", ["", second], tmp_path / "stages", serve="genai"
    )
    for number, stage in enumerate(parts.stages):
        assert {name for name in stage.inputs if f".{number}." in name} == {
            name for name in stage.inputs if "past" in name
        }
        assert {name for name in stage.outputs if "present" in name} == {
            f"present.{number}.{kind}" for kind in ("key", "value")
        }
    with parts.open() as runner:
        assert greedy(Stages(runner, parts), prompt()) == expected
    assert "genai_config.json" in parts.files
    assert generated_by_genai(tmp_path / "stages", prompt()) == expected


# all shorter than the texts; every sixth layer of Gemma 3 has none
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": DECODERS["mistral"],
    "gemma2": {**TEXT, "head_dim": 8, "sliding_window": 4},
    "gemma3_text": {**TEXT, "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 6},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_texts_of_different_length_get_the_tokens_of_each_alone_with_sliding_windows(
    name, tmp_path
):
    task = "text-generation-with-past"
    model = load_model(name, task=task, random_weights=True, overrides=WINDOWS[name])
    files = Programs(model, example_calls(model, right_padding=True))
    files.save(tmp_path)
    files.assert_agree("model")
    texts = [prompt(9)[0], prompt(4)[1]]
    alone = [generated(model, text[None], 10)[0] for text in texts]
    session = files.session("model")
    assert greedy_right_padded(session, texts, 10) == alone
    assert [greedy(session, text[None], 10)[0] for text in texts] == alone
    if importlib.util.find_spec("onnxruntime_genai") is not None:
        found = genai_config(files["model"].model, model.config, model.generation_config)
        (tmp_path / "genai_config.json").write_text(json.dumps(found))
        assert generated_by_genai(tmp_path, texts, 10, together=True) == alone


GPT_NEO = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT_NEO |= {"attention_types": [[["global", "local"], 1]]}  # it applies its window by itself


@pytest.mark.parametrize(
    ("name", "settings", "warned"),
    [
        ("mistral", DECODERS["mistral"], False),
        ("mpt", DECODERS["mpt"], True),
        ("gpt_neo", GPT_NEO, True),
    ],
)
def test_a_decoder_that_counts_padding_in_another_way_is_warned_of(name, settings, warned, caplog):
    made = load_model(
        name, task="text-generation-with-past", random_weights=True, overrides=settings
    )
    with caplog.at_level(logging.WARNING):
        example_call(made, right_padding=True)
    assert (f"{type(made).__name__} counts the padding" in caplog.text) == warned


# --- what the file says -----------------------------------------------------------------------------------


LLAMA = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def tensor(name: str, *sizes: int | str) -> ir.Value:
    return ir.val(name, ir.DataType.FLOAT, sizes)


def model(
    inputs: tuple[str, ...] = ("input_ids", "attention_mask"),
    past: str = "past_key_values.{}.{}",
    present: str = "present.{}.{}",
    heads: int | str = 2,
    size: int | str = 8,
    layers: tuple[int, ...] = (0, 1),
) -> ir.Model:
    def cache(name: str) -> list[ir.Value]:
        return [
            tensor(name.format(layer, kind), "b", heads, "n", size)
            for layer in layers
            for kind in ("key", "value")
        ]

    given = [*(tensor(name, "b", "n") for name in inputs), *(cache(past) if past else ())]
    made = [tensor("logits", "b", "n", 99), *(cache(present) if present else ())]
    return ir.Model(ir.Graph(given, made, nodes=[]), ir_version=10)


def test_names_and_sizes_are_those_of_the_graph_and_what_it_leaves_open_of_the_config():
    found = genai_config(model(), Config(**{**LLAMA, "vocab_size": 7, "num_key_value_heads": 1}))
    decoder = found["model"]["decoder"]
    assert decoder["inputs"] == {
        "input_ids": "input_ids",
        "attention_mask": "attention_mask",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    }
    assert decoder["outputs"]["present_value_names"] == "present.%d.value"
    assert (decoder["num_hidden_layers"], decoder["num_key_value_heads"], decoder["head_size"]) == (
        2,
        2,
        8,
    )
    assert (found["model"]["vocab_size"], found["model"]["context_length"]) == (99, 128)
    assert found["search"]["max_length"] == 128
    decoder = genai_config(model(heads="h", size="s"), Config(**LLAMA))["model"]["decoder"]
    assert (decoder["num_key_value_heads"], decoder["head_size"]) == (2, 8)
    wide = genai_config(model(heads="h", size="s"), Config(**LLAMA, head_dim=16))["model"][
        "decoder"
    ]
    assert wide["head_size"] == 16


def test_the_names_of_transformers_are_taken_too():
    past, present = "input.past_key_values.layers.{}.{}s", "output.past_key_values.layers.{}.{}s"
    decoder = genai_config(model(past=past, present=present), Config(**LLAMA))["model"]["decoder"]
    assert decoder["inputs"]["past_key_names"] == "input.past_key_values.layers.%d.keys"
    assert decoder["outputs"]["present_value_names"] == "output.past_key_values.layers.%d.values"


def test_a_generation_config_comes_before_the_config():
    generation = Config(eos_token_id=5, do_sample=True, temperature=0.5, top_k=7)
    found = genai_config(model(), Config(**LLAMA), generation)
    assert (
        found["model"]["eos_token_id"],
        found["model"]["pad_token_id"],
        found["model"]["bos_token_id"],
    ) == (5, 5, 1)
    assert [found["search"][name] for name in ("do_sample", "temperature", "top_k")] == [
        True,
        0.5,
        7,
    ]
    plain = genai_config(model(), Config(**LLAMA))["model"]
    assert (plain["eos_token_id"], plain["pad_token_id"]) == ([2, 3], 2)


def test_values_that_are_no_numbers_are_left_out():
    bad = Config(
        **{
            **LLAMA,
            "bos_token_id": "../../x",
            "pad_token_id": -1,
            "hidden_size": True,
            "eos_token_id": 2,
        }
    )
    generation = Config(temperature="hot", top_p=float("nan"), num_beams=-3, do_sample="yes")
    found = genai_config(model(), bad, generation)
    assert "bos_token_id" not in found["model"]
    assert found["model"]["pad_token_id"] == 2
    assert "hidden_size" not in found["model"]["decoder"]
    assert [
        found["search"][name] for name in ("temperature", "top_p", "num_beams", "do_sample")
    ] == [1, 1, 1, False]


def test_what_the_configs_do_not_say_is_said_in_the_log(caplog):
    with caplog.at_level(logging.WARNING):
        found = genai_config(model(), Config(hidden_size=32, num_attention_heads=4))
    assert found["model"]["context_length"] == 2048
    assert ["longest context" in caplog.text, "eos_token_id" in caplog.text] == [True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"past": ""}, "takes none"),
        ({"present": ""}, "returns none"),
        ({"inputs": ("input_ids", "token_type_ids")}, "has no input 'token_type_ids'"),
        ({"inputs": ("attention_mask",)}, "needs an input 'input_ids'"),
        ({"past": "past%d.{}.{}"}, "of one name each, with a number"),
        (
            {"inputs": ("inputs_embeds", "position_ids")},
            r"only with position_ids of 3 dimensions \(M-RoPE\)",
        ),
    ],
)
def test_a_model_that_genai_cannot_run_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        genai_config(model(**changes), Config(**LLAMA))


def test_caches_of_other_layers_are_refused():
    made = model()
    made.graph.outputs.pop()
    with pytest.raises(InputError, match=r"keys of layers \[0, 1\], and values of layers \[0\]"):
        genai_config(made, Config(**LLAMA))
