"""Models and example inputs by hub id, folder or model type."""

import struct
from types import MappingProxyType

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import htp_export
from htp_export.capabilities.huggingface.configs import use_batched_experts
from htp_export.capabilities.huggingface.packed.checkpoints import read_packed
from htp_export.capabilities.huggingface.packed.gguf_files import gguf_config
from htp_export.errors import FileError, InputError, ModelSourceError
from htp_export.huggingface import dynamic_shapes, example_inputs, load_model
from tests.exporting import BOTH, exported
from tests.packed import TYPES, written_gguf

BERT = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 100,
}
VIT = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
}
CLIP = {
    **{f"text_config.{key}": value for key, value in BERT.items()},
    **{f"vision_config.{key}": value for key, value in VIT.items()},
    "text_config.eos_token_id": 2,
}
WHISPER = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
WHISPER |= {
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 50,
}
CASES = {
    "bert": (BERT, {"input_ids", "attention_mask", "token_type_ids"}),
    "distilbert": (
        {"n_layers": 1, "dim": 16, "n_heads": 2, "hidden_dim": 32},
        {"input_ids", "attention_mask"},
    ),
    "gpt2": ({"n_layer": 1, "n_embd": 16, "n_head": 2}, {"input_ids", "attention_mask"}),
    "vit": (VIT, {"pixel_values"}),
    "resnet": ({"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, {"pixel_values"}),
    "t5": (
        {"num_layers": 1, "d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32},
        {"input_ids", "attention_mask", "decoder_input_ids"},
    ),
    "clip": (CLIP, {"input_ids", "attention_mask", "pixel_values"}),
    "whisper": (WHISPER, {"input_features", "decoder_input_ids"}),
    "wav2vec2": (
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        }
        | {"conv_dim": [8] * 7, "num_conv_pos_embedding_groups": 4},
        {"input_values"},
    ),
}


def bert(**options):
    return load_model("bert", random_weights=True, overrides=BERT, **options)


class TestLoadModel:
    def test_model_type_gives_the_base_model_in_eval_mode_without_a_cache(self):
        model = bert()
        assert type(model).__name__ == "BertModel"
        assert not any(module.training for module in model.modules())
        assert model.config.use_cache is False
        assert len(model.encoder.layer) == 1

    @pytest.mark.parametrize(
        ("source", "overrides", "task", "expected"),
        [
            ("bert", BERT, "fill-mask", "BertForMaskedLM"),
            ("bert", BERT, "text-classification", "BertForSequenceClassification"),
            ("bert", BERT, "question-answering", "BertForQuestionAnswering"),
            ("bert", BERT, "feature-extraction", "BertModel"),
            # a second class
            ("whisper", WHISPER, "automatic-speech-recognition", "WhisperForConditionalGeneration"),
        ],
    )
    def test_task_decides_the_class(self, source, overrides, task, expected):
        model = load_model(source, task=task, random_weights=True, overrides=overrides)
        assert type(model).__name__ == expected

    def test_random_parameters_and_running_statistics_are_spread_apart(self):
        norms = [module for module in bert().modules() if isinstance(module, nn.LayerNorm)]
        assert all(
            norm.weight.unique().numel() > 8 and norm.bias.unique().numel() > 8 for norm in norms
        )
        model = load_model("resnet", random_weights=True, overrides=CASES["resnet"][0])
        norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
        assert norm.running_var.min() >= 0.5
        assert norm.running_mean.unique().numel() == norm.running_mean.numel()

    def test_same_seed_gives_the_same_weights_and_leaves_torchs_generator_alone(self):
        before = torch.get_rng_state()
        first, second, third = bert(), bert(), bert(seed=1)
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(first.pooler.dense.weight, second.pooler.dense.weight)
        assert not torch.equal(first.pooler.dense.weight, third.pooler.dense.weight)

    def test_overrides_lead_into_sub_configs_and_take_the_names_that_transformers_maps(self):
        config = load_model("clip", random_weights=True, overrides=CLIP).config
        assert (config.text_config.hidden_size, config.vision_config.image_size) == (16, 32)
        assert config.vision_config.patch_size == 32, "as usual"
        model = load_model(
            "gpt2", random_weights=True, overrides={**CASES["gpt2"][0], "num_hidden_layers": 2}
        )
        assert len(model.h) == 2

    def test_folder_gives_its_weights_and_architecture(self, tmp_path):
        saved = bert(task="fill-mask")
        saved.save_pretrained(tmp_path)
        model = load_model(str(tmp_path))
        assert type(model).__name__ == "BertForMaskedLM"
        assert torch.equal(
            model.bert.embeddings.word_embeddings.weight,
            saved.bert.embeddings.word_embeddings.weight,
        )

    def test_a_folder_with_the_name_of_a_model_type_says_that_it_hides_it(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "gpt2").mkdir()
        with pytest.raises(ModelSourceError, match="hides the model type"):
            load_model("gpt2", random_weights=True)

    def test_folder_with_a_config_alone_needs_random_weights(self, tmp_path):
        with pytest.raises(ModelSourceError, match="has no config"):
            load_model(str(tmp_path))
        bert().config.save_pretrained(tmp_path)
        with pytest.raises(ModelSourceError, match="--random-weights"):
            load_model(str(tmp_path))
        model = load_model(str(tmp_path), random_weights=True, overrides={"num_hidden_layers": 2})
        assert model.config.hidden_size == 16

    @pytest.mark.parametrize(
        ("source", "options", "message"),
        [
            ("bert", {}, "--random-weights"),
            ("berd", {"random_weights": True}, "nearest model types: .*bert"),
            ("./nowhere", {}, "is no folder"),
            ("nobody/nothing", {}, "the hub cannot be reached|no model found"),
            (
                "bert",
                {"random_weights": True, "overrides": {"num_hiden_layers": 2}},
                "nearest keys: num_hidden_layers",
            ),
            ("bert", {"random_weights": True, "overrides": {"hidden_size.x": 2}}, "no keys below"),
            (
                "bert",
                {"random_weights": True, "overrides": {"num_hidden_layers": "two"}},
                "num_hidden_layers='two'",
            ),
            (
                "bert",
                {"random_weights": True, "overrides": {**BERT, "hidden_size": 15}},
                "cannot be built|refuses",
            ),
            (
                "bert",
                {"random_weights": True, "overrides": {**BERT, "pad_token_id": 10**6}},
                "cannot be built with .*pad_token_id=1000000: .*Padding_idx",
            ),
            (
                "clip",
                {"random_weights": True, "overrides": {"text_config.layers": 2}},
                "no 'layers' in text_config",
            ),
            ("bert", {"random_weights": True, "task": "fil-mask"}, "nearest tasks: fill-mask"),
            (
                "bert",
                {"random_weights": True, "task": "image-classification"},
                "its tasks: .*fill-mask",
            ),
            ("bert", {"random_weights": True, "dtype": "int8"}, "no floating-point dtype"),
        ],
    )
    def test_what_cannot_be_made_is_said(self, source, options, message):
        with pytest.raises(ModelSourceError, match=message):
            load_model(source, **options)


class TestExampleInputs:
    @pytest.mark.parametrize("source", CASES)
    def test_inputs_are_those_the_model_takes_and_it_runs(self, source):
        overrides, expected = CASES[source]
        model = load_model(source, random_weights=True, overrides=overrides)
        inputs = example_inputs(model)
        assert set(inputs) == expected
        with torch.no_grad():
            model(**inputs)

    def test_tokens_lie_within_the_vocabulary_and_padding_is_masked_at_the_end(self):
        inputs = example_inputs(bert())
        assert 0 <= inputs["input_ids"].min() <= inputs["input_ids"].max() < 100
        assert inputs["attention_mask"].tolist() == [[1] * 13 + [0] * 3]

    @pytest.mark.parametrize("start", [7, 99, 100, 50257])
    def test_a_decoder_begins_with_its_start_token_if_the_vocabulary_has_it(self, start):
        overrides = {
            **WHISPER,
            "vocab_size": 100,
            "pad_token_id": 0,
            "decoder_start_token_id": start,
        }
        inputs = example_inputs(
            load_model("whisper", random_weights=True, overrides=overrides), batch=2
        )
        ids = inputs["decoder_input_ids"]
        assert 0 <= ids.min() <= ids.max() < 100
        assert (ids[:, 0].tolist() == [start, start]) is (start < 100)

    @pytest.mark.parametrize("ends", [2, [2, 5, 9]])
    def test_a_text_ends_once_with_its_only_or_first_end_token(self, ends):
        small = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        overrides = {**small, "num_key_value_heads": 2, "vocab_size": 12, "eos_token_id": ends}
        [ids] = example_inputs(load_model("llama", random_weights=True, overrides=overrides))[
            "input_ids"
        ].tolist()
        assert ids[12] == 2
        assert not {2, 5, 9}.intersection(ids[:12]) if isinstance(ends, list) else 2 not in ids[:12]

    def test_same_seed_gives_the_same_inputs_and_leaves_torchs_generator_alone(self):
        before = torch.get_rng_state()
        model = bert()
        first, second = example_inputs(model), example_inputs(model)
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(first["input_ids"], second["input_ids"])

    def test_shapes_change_one_input_and_the_others_follow(self):
        inputs = example_inputs(
            bert(),
            shapes={"input_ids": {"shape": [3, 8], "dtype": "int32"}, "token_type_ids": None},
        )
        assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {
            "input_ids": (3, 8),
            "attention_mask": (3, 8),
        }
        assert inputs["input_ids"].dtype == torch.int32

    def test_what_is_open_in_a_shape_is_as_usual(self):
        inputs = example_inputs(
            bert(), shapes={"input_ids": [2, None], "attention_mask": [None, 5]}
        )
        assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {
            "input_ids": (2, 16),
            "attention_mask": (1, 5),
            "token_type_ids": (2, 16),
        }

    def test_images_have_the_dtype_of_the_model(self):
        model = load_model("vit", random_weights=True, overrides=VIT, dtype="float16")
        assert example_inputs(model)["pixel_values"].dtype == torch.float16

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            ({"input_idz": [1, 2]}, "no input 'input_idz'; nearest inputs: input_ids"),
            ({"input_ids": [0, 2]}, "positive numbers"),
            ({"input_ids": {"shape": [1, 2], "dtype": "int65"}}, "no dtype 'int65'"),
            ({"input_ids": {"size": [1, 2]}}, "'size'"),
            ({"input_ids": "big"}, "positive numbers"),
            (
                {"input_ids": [2, None, 3]},
                r"'input_ids': the config does not describe it; give all sizes of \[2, None, 3",
            ),
            ({"kwargs": [2]}, "takes no input 'kwargs'$"),
            ({"x": [2]}, "takes no input 'x'$"),
        ],
    )
    def test_bad_shapes_are_said(self, shapes, message):
        with pytest.raises(InputError, match=message):
            example_inputs(bert(), shapes=shapes)


class TestDynamicShapes:
    def test_axes_go_where_they_are(self):
        inputs = {
            "input_ids": torch.ones(2, 8, dtype=torch.int64),
            "decoder_input_ids": torch.ones(2, 8, dtype=torch.int64),
            "pixel_values": torch.ones(2, 3, 32, 32),
        }
        assert dynamic_shapes(inputs, ["sequence", "batch", "height", "width"]) == {
            "input_ids": {0: "batch", 1: "sequence"},
            "decoder_input_ids": {0: "batch", 1: "decoder_sequence"},
            "pixel_values": {0: "batch", 2: "height", 3: "width"},
        }

    @pytest.mark.parametrize(
        ("axis", "message"), [("length", "no dynamic axis"), ("height", "no input has an axis")]
    )
    def test_axis_that_is_not_there_is_said(self, axis, message):
        with pytest.raises(InputError, match=message):
            dynamic_shapes({"input_ids": torch.ones(2, 8, dtype=torch.int64)}, [axis])


# --- Packed weights of GGUF files, against ``gguf`` and transformers ---


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_blocks_have_the_numbers_and_the_order_of_rows_of_transformers(tmp_path):
    from transformers import LlamaForCausalLM

    source = written_gguf(tmp_path / "model.gguf")
    made = read_packed(source)
    wanted = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=source.name).state_dict()
    assert {*made} == {*wanted}
    for name, values in wanted.items():
        np.testing.assert_array_equal(made[name], values.numpy())
    for name in made.layers:
        weight, values = made.packed(name).weight(), wanted[name].numpy()
        # Q4_1, Q4_K: a minimum in place of a zero point
        if name.rpartition(".")[0].endswith(("v_proj", "o_proj")):
            np.testing.assert_allclose(weight, values, rtol=0, atol=2e-7 * np.abs(values).max())
        else:
            np.testing.assert_array_equal(weight, values)
    assert len(made.layers) == len(TYPES) - 1


def test_a_broken_gguf_file_is_refused(tmp_path):
    source = written_gguf(tmp_path / "model.gguf")
    content = source.read_bytes()
    for broken in (
        b"",
        b"GGUF",
        content[:200],
        content[:4] + b"\xff" * 20,
        content[: len(content) // 2],
    ):
        source.write_bytes(broken)
        with pytest.raises(FileError, match="cannot be read as GGUF"):
            read_packed(source)


def text_of_gguf(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


ARCHITECTURE = text_of_gguf("general.architecture") + struct.pack("<I", 8) + text_of_gguf("llama")

FALSE_COUNTS = {  # entries, tensors, and the bytes of the header after the first entry
    "elements of an array": (2, 0, text_of_gguf("x") + struct.pack("<IIQ", 9, 0, 2**62)),
    "texts of an array": (2, 0, text_of_gguf("x") + struct.pack("<IIQ", 9, 8, 2**62)),
    "arrays in one another": (
        2,
        0,
        text_of_gguf("x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
    ),
    "characters": (2, 0, text_of_gguf("x") + struct.pack("<IQ", 8, 2**62)),
    "entries": (2**62, 0, b""),
    "tensors": (1, 2**62, b""),
    "dimensions": (1, 1, text_of_gguf("w") + struct.pack("<I", 2**31)),
    "no type": (2, 0, text_of_gguf("x") + struct.pack("<II", 77, 1)),
}


@pytest.mark.parametrize("name", FALSE_COUNTS)
@pytest.mark.parametrize("read", [read_packed, gguf_config])
def test_a_number_in_a_gguf_header_that_the_file_has_no_bytes_for_is_refused(name, read, tmp_path):
    """``gguf`` would loop and allocate as often as an array says: 2^62 times, of a file of 150 bytes."""
    entries, tensors, rest = FALSE_COUNTS[name]
    begin = b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + ARCHITECTURE
    (tmp_path / "model.gguf").write_bytes(begin + rest)
    with pytest.raises(FileError, match=r"model\.gguf: cannot be read as GGUF: "):
        read(tmp_path / "model.gguf")


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "set_experts_implementation"),
    reason="transformers 4 runs experts one by one",
)
class TestExperts:
    SMALL = MappingProxyType(
        {
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 100,
            "num_local_experts": 4,
        }
    )

    def model(self):
        return load_model("mixtral", random_weights=True, overrides=self.SMALL)

    @pytest.mark.long
    @BOTH
    def test_a_mixture_of_experts_exports_and_agrees_with_transformers_own_implementation(
        self, exporter, tmp_path
    ):
        model = self.model()
        exported(model, example_inputs(model), exporter, tmp_path)
        path = tmp_path / "model.onnx"
        assert htp_export.load(path)["layers.0.mlp.experts"].nodes
        others = example_inputs(model, seed=1)  # other tokens choose other experts
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        arrays = {}
        for value, tensor in zip(session.get_inputs(), others.values(), strict=True):
            arrays[value.name] = tensor.numpy()
        hidden = session.run(None, arrays)[0]
        model.set_experts_implementation("grouped_mm")
        with torch.no_grad():
            expected = model(**others).last_hidden_state.numpy()
        np.testing.assert_allclose(hidden, expected, atol=1e-5)

    def test_an_implementation_that_the_config_chooses_stays(self):
        config = self.model().config
        assert config._experts_implementation == "batched_mm"
        config._experts_implementation = "eager"
        use_batched_experts(config)
        assert config._experts_implementation == "eager"
