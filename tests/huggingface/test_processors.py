"""What lies beside a model: a tokenizer and an image processor, for example inputs, and what is copied."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from htp_export.capabilities.huggingface.companions import copy_companions, source_folder
from htp_export.capabilities.huggingface.sources import size_of_images
from htp_export.errors import FileError, ModelSourceError
from htp_export.huggingface import example_calls, example_inputs, load_model, load_processor

BERT = {
    "model_type": "bert",
    "vocab_size": 400,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
BERT |= {"intermediate_size": 16, "architectures": ["BertForMaskedLM"], "pad_token_id": 0}
GPT2 = {"model_type": "gpt2", "vocab_size": 400, "n_embd": 16, "n_layer": 1, "n_head": 2}
GPT2 |= {"architectures": ["GPT2LMHeadModel"], "bos_token_id": 1, "eos_token_id": 2}
CONVNEXT = {
    "model_type": "convnext",
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
    "image_size": 32,
}
CONVNEXT |= {"architectures": ["ConvNextForImageClassification"]}


def folder_with(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_tokenizer(folder: Path) -> Any:
    """A tokenizer of letters and their pairs, trained on a few words, which puts [CLS] and [SEP] around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    alphabet = [chr(code) for code in range(32, 127)]
    made.train_from_iterator(
        ["the quick brown fox and the lazy dog"],
        trainers.BpeTrainer(vocab_size=150, special_tokens=special, initial_alphabet=alphabet),
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    wrapped.save_pretrained(folder)
    return wrapped


def model_in(folder: Path, **options: Any) -> Any:
    return load_model(str(folder), random_weights=True, **options)


def test_texts_are_tokens_of_the_tokenizer(tmp_path):
    folder = folder_with(tmp_path / "bert", BERT)
    tokenizer = add_tokenizer(folder)
    processor, model = load_processor(str(folder)), model_in(folder)
    inputs = example_inputs(model, processor=processor, batch=2)
    ids = inputs["input_ids"]
    assert ids.shape == (2, 16)
    assert ids[:, 0].tolist() == [2, 2], "[CLS]"
    assert ids[:, 12].tolist() == [3, 3], "[SEP]"
    assert ids[:, 13:].tolist() == [[0] * 3] * 2, "[PAD]"
    assert inputs["attention_mask"].tolist() == [[1] * 13 + [0] * 3] * 2
    texts = ["".join(tokenizer.convert_ids_to_tokens(row[1:12])) for row in ids]
    assert texts[0] != texts[1]
    assert all("[UNK]" not in text and text.isascii() for text in texts)
    again = example_inputs(model, processor=processor, batch=2)["input_ids"]
    other = example_inputs(model, processor=processor, batch=2, seed=1)["input_ids"]
    assert torch.equal(ids, again)
    assert not torch.equal(ids, other)


def test_prompts_of_a_decoder_are_tokens_of_the_tokenizer(tmp_path):
    folder = folder_with(tmp_path / "gpt2", GPT2)
    add_tokenizer(folder)
    model = model_in(folder, task="text-generation-with-past")
    call = example_calls(model, processor=load_processor(str(folder)))["model"]
    assert call.runs["prefill"]["input_ids"][:, 0].tolist() == [2, 2], "[CLS]"
    assert call.runs["decode"]["input_ids"].shape == (2, 3)


def test_decoder_ids_begin_with_the_start_token_and_have_no_special_ones(tmp_path):
    config = {
        "model_type": "t5",
        "vocab_size": 400,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 1,
    }
    config |= {
        "num_heads": 2,
        "decoder_start_token_id": 7,
        "architectures": ["T5ForConditionalGeneration"],
    }
    folder = folder_with(tmp_path / "t5", config)
    add_tokenizer(folder)
    ids = example_inputs(model_in(folder), processor=load_processor(str(folder)))[
        "decoder_input_ids"
    ]
    assert ids[0, 0] == 7
    assert not set(ids[0, 1:].tolist()) & {0, 1, 2, 3}


def test_without_a_tokenizer_nothing_is_read_and_nothing_said(tmp_path, caplog):
    folder, model = folder_with(tmp_path / "bert", BERT), None
    with caplog.at_level(logging.WARNING):
        processor, model = load_processor(str(folder)), model_in(folder)
        assert (processor.tokenizer, processor.image_size) == (None, None)
        assert load_processor("bert").tokenizer is None
    assert not [record for record in caplog.records if record.name.startswith("htp_export")]
    plain, read = example_inputs(model), example_inputs(model, processor=processor)
    assert all(torch.equal(plain[name], read[name]) for name in plain)


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}'], ids=["cut", "empty"])
def test_a_broken_tokenizer_is_reported_and_the_config_is_used(tmp_path, caplog, content):
    folder = folder_with(tmp_path / "bert", BERT)
    add_tokenizer(folder)
    (folder / "tokenizer.json").write_text(content)
    model = model_in(folder)
    with caplog.at_level(logging.WARNING, logger="htp_export"):
        inputs = example_inputs(model, processor=load_processor(str(folder)))
    assert "the tokenizer cannot be read" in caplog.text
    assert torch.equal(inputs["input_ids"], example_inputs(model)["input_ids"])


def test_a_tokenizer_of_another_model_is_reported(tmp_path, caplog):
    folder = folder_with(tmp_path / "bert", BERT)
    add_tokenizer(folder)
    model = model_in(folder, overrides={"vocab_size": 10})
    with caplog.at_level(logging.WARNING, logger="htp_export"):
        inputs = example_inputs(model, processor=load_processor(str(folder)))
    assert "and the model has 10 tokens" in caplog.text
    assert int(inputs["input_ids"].max()) < 10


def test_code_of_a_tokenizer_runs_only_if_asked(tmp_path, caplog):
    folder = folder_with(tmp_path / "bert", BERT)
    add_tokenizer(folder)
    ran = tmp_path / "ran"
    source = f"""
import pathlib
from transformers import PreTrainedTokenizerFast
pathlib.Path({str(ran)!r}).touch()
class Own(PreTrainedTokenizerFast):
    pass
"""
    (folder / "own.py").write_text(source)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING, logger="htp_export"):
        load_processor(str(folder))
    assert not ran.exists()
    processor = load_processor(str(folder), trust_remote_code=True)
    assert ran.exists()
    assert type(processor.tokenizer).__name__ == "Own"


def test_images_are_as_large_as_an_image_processor_that_can_be_read_makes_them(tmp_path, caplog):
    folder = folder_with(tmp_path / "convnext", CONVNEXT)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": 48, "width": 64}})
    )
    model = model_in(folder)
    processor = load_processor(str(folder))
    assert example_inputs(model, processor=processor)["pixel_values"].shape == (1, 3, 48, 64)
    assert example_inputs(model)["pixel_values"].shape == (1, 3, 32, 32)
    changed = {"image_size": 40}
    resized, model = (
        load_processor(str(folder), overrides=changed),
        model_in(folder, overrides=changed),
    )
    assert example_inputs(model, processor=resized)["pixel_values"].shape == (1, 3, 40, 40)
    (folder / "preprocessor_config.json").write_text("[1, 2")
    with caplog.at_level(logging.WARNING, logger="htp_export"):
        assert load_processor(str(folder)).image_size is None
    assert "the image processor cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"size": 224}, (224, 224)),
        ({"size": [48, 64]}, (48, 64)),
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 200}}, (256, 256)),
        (
            {"do_center_crop": True, "size": 256, "crop_size": {"height": 224, "width": 200}},
            (224, 200),
        ),
        ({"do_center_crop": True, "size": 256}, (256, 256)),
        ({"size": {"shortest_edge": 800, "longest_edge": 1333}}, (800, 800)),
        ({"size": {"longest_edge": 1024}}, None),
        ({"do_resize": False, "size": 224}, None),
        ({"size": {"height": -1, "width": 3}}, None),
        ({"size": "large"}, None),
        ({}, None),
    ],
)
def test_sizes_of_images_in_the_forms_of_transformers(settings, size):
    assert size_of_images(settings) == size


def test_the_command_uses_the_tokenizer_beside_the_model(tmp_path):
    from htp_export.command.model_options import ModelOptions

    folder = folder_with(tmp_path / "bert", BERT)
    add_tokenizer(folder)
    plain = ModelOptions(source=str(folder), random_weights=True, task="fill-mask")
    assert plain.call().kwargs["input_ids"][0, 0] == 2
    assert plain.calls_by_task()["model"].kwargs["input_ids"][0, 0] == 2


# --- in the cache of the hub ------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of one model in a cache of the hub; there is no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, commit = tmp_path / "models--someone--tiny", "0123456789012345678901234567890123456789"
    for folder in (model / "refs", model / "blobs", model / "snapshots" / commit):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    return model / "snapshots" / commit


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_files_in_the_cache_of_the_hub_are_read_without_the_network(cache, caplog, has_tokenizer):
    folder_with(cache, BERT)
    (cache / "processor_config.json").write_text(json.dumps({"image_processor": {"size": 48}}))
    if has_tokenizer:
        add_tokenizer(cache)
    with caplog.at_level(logging.WARNING, logger="htp_export"):
        processor = load_processor("someone/tiny")
    assert (processor.tokenizer is not None) is has_tokenizer
    assert processor.image_size == (48, 48)
    assert not [record for record in caplog.records if record.name.startswith("htp_export")]


def test_companions_in_the_cache_of_the_hub_are_links_and_are_copied(cache, tmp_path):
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja", "model.safetensors"):
        (cache.parents[1] / "blobs" / name).write_text(name)
        (cache / name).symlink_to(Path("../../blobs") / name)
    target = tmp_path / "target"
    target.mkdir()
    assert source_folder("someone/tiny") == cache
    copies = copy_companions(cache, target)
    assert [file.name for file in copies] == ["chat_template.jinja", "merges.txt", "tokenizer.json"]
    assert [file.is_symlink() for file in copies] == [False] * 3
    assert (target / "merges.txt").read_text() == "merges.txt"
    (tmp_path / "token.json").write_text("secret")
    (cache / "vocab.json").symlink_to(tmp_path / "token.json")
    with pytest.raises(FileError, match=r"vocab\.json: is a link out of its folder"):
        copy_companions(cache, tmp_path)


def test_companions_of_a_model_that_is_not_there_or_needs_no_hub(cache, tmp_path):
    with pytest.raises(ModelSourceError, match="its tokenizer and configs cannot be downloaded"):
        source_folder("someone/other")
    assert source_folder(str(tmp_path)) == tmp_path
    assert source_folder("llama") is None
