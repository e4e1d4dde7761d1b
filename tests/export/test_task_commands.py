"""``export`` and ``verify`` with tasks: files, what is said of them, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from htp_export.command.main import main
from htp_export.command.model_options import ModelOptions
from htp_export.huggingface import load_model
from tests.decoders import CACHE, DECODERS, ENCODER_DECODERS

pytest.importorskip(
    "transformers.exporters", reason="transformers older than 5.23 has no exporters"
)


def model(name: str, settings: dict[str, Any], layers: str) -> list[str]:
    settings = {**settings, layers: 1}
    return [
        name,
        "--random-weights",
        *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
    ]


GPT2 = model("gpt2", DECODERS["gpt2"], "n_layer")
PAST = "text-generation-with-past"


def inputs_of(file: Path) -> list[str]:
    return [value.name for value in onnx.load(file, load_external_data=False).graph.input]


@pytest.mark.long
def test_a_folder_with_a_decoder_is_verified_in_prefill_and_decode_and_the_run_that_differs_is_named(
    tmp_path, capsys
):
    file, folder = tmp_path / "gpt2.onnx", str(tmp_path / "gpt2")
    load_model(
        "gpt2", task=PAST, random_weights=True, overrides={**DECODERS["gpt2"], "n_layer": 1}
    ).save_pretrained(folder)
    assert main(["export", folder, "-o", str(file), "--verify", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["task"] == PAST  # as its config says
    assert {run: each["ok"] for run, each in said["verify"].items()} == {
        "prefill": True,
        "decode": True,
    }
    assert "past_key_values.0.key" in inputs_of(file)
    assert (
        main(["verify", str(file), folder, "--task", PAST, "--tolerance", "**=0,0", "--json"]) == 1
    )
    found = capsys.readouterr()
    said = json.loads(found.out)
    assert (said["ok"], list(said["runs"])) == (False, ["prefill", "decode"])
    assert "decode: first wrong" in found.err


@pytest.mark.long
def test_a_line_names_the_first_and_the_last_of_the_inputs_of_a_cache(tmp_path, capsys):
    overrides = [word.replace("n_layer=1", "n_layer=12") for word in GPT2]
    assert main(["export", *overrides, "--task", PAST, "-o", str(tmp_path / "gpt2.onnx")]) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "inputs: " in each)
    for part in ("key", "value"):
        assert f"past_key_values.0.{part} … past_key_values.11.{part} (12) float [" in line
    assert len(line) < 500


@pytest.mark.slow
def test_two_files_and_names_of_transformers(tmp_path):
    options = ["--task", PAST, "--two-files", "--cache-names", "transformers", "--quiet"]
    assert main(["export", *GPT2, *options, "-o", str(tmp_path)]) == 0
    assert sorted(file.name for file in tmp_path.glob("*.onnx")) == [
        "decoder_model.onnx",
        "decoder_with_past_model.onnx",
    ]
    assert not any("past" in name for name in inputs_of(tmp_path / "decoder_model.onnx"))
    assert f"input.{CACHE}.layers.0.keys" in inputs_of(tmp_path / "decoder_with_past_model.onnx")


def test_a_command_asks_for_windows_that_count_tokens(caplog):
    settings = [f"{key}={value}" for key, value in DECODERS["mpt"].items()]
    options = ModelOptions(source="mpt", random_weights=True, task=PAST, settings=settings)
    assert options.calls_by_task(for_genai=True)["model"].example.right_padding
    assert "counts the padding" in caplog.text
    assert not options.calls_by_task()["model"].example.right_padding


@pytest.mark.slow
def test_an_encoder_decoder_needs_a_folder_and_writes_three_files(tmp_path, capsys):
    settings = {
        key: value
        for key, value in ENCODER_DECODERS["t5"].items()
        if key != "decoder_start_token_id"
    }
    t5 = [*model("t5", settings, "num_layers"), "--task", "text2text-generation-with-past"]
    assert main(["export", *t5, "-o", str(tmp_path / "t5.onnx")]) == 2
    assert "3 files are written, encoder_model.onnx" in capsys.readouterr().err
    folder = tmp_path / "t5"
    assert main(["export", *t5, "-o", str(folder), "--verify", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said["models"]) == ["encoder_model", "decoder_model", "decoder_with_past_model"]
    assert all(each["verify"]["ok"] for each in said["models"].values())
    assert main(["verify", str(folder / "decoder_with_past_model.onnx"), *t5]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "image-classification"], "its tasks: .*text-generation-with-past"),
        (["--task", "fill-mask-with-past"], "cannot do 'fill-mask-with-past'; its tasks: "),
        (
            ["--task", "no-such-task-at-all"],
            "unknown task 'no-such-task-at-all'; its tasks: .*text-generation",
        ),
        (["--task", PAST, "--torchscript"], "TorchScript takes no cache"),
        (["--task", PAST, "--dynamic", "batch"], "decides which axes vary"),
        (["--task", PAST, "--cache-names", "mine"], "choose optimum or transformers"),
    ],
)
def test_what_cannot_be_is_refused_with_status_2(options, message, tmp_path, capsys):
    assert main(["export", *GPT2, *options, "-o", str(tmp_path / "x.onnx")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
