"""search for decoders: greedy tokens that agree, and the time of the loop, with arithmetic chosen by module."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.search.measuring import Measurer, Prompts
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.huggingface import example_calls, load_model
from htp_export.runtime.generating import Decoder
from htp_export.runtime.samples import Samples
from htp_export.runtime.sessions import RunnableModel, Session
from htp_export.runtime.settings import RunSettings
from tests import documents
from tests.decoders import TEXT, Programs, decoder, prompt, teach_with_outliers
from tests.exporting import SharedFiles

pytest.importorskip("optuna")

PAGE = Path(__file__).parents[2] / "docs" / "search.md"
CHOICES = ["int4", "int4:accuracy_level=0", "fp32"]


@pytest.fixture(scope="module")
def mistral(shared_files: SharedFiles) -> tuple[Any, Path]:
    return decoder("mistral"), shared_files.decoder("mistral")


def session_of(file: Path) -> tuple[Decoder, Session]:
    tagged = htp_export.load(file)
    return Decoder.of(tagged.model), Session(RunnableModel.of(tagged.model, "past", file.parent))


def tokens_of(file: Path, ids: np.ndarray[Any, Any]) -> list[list[int]]:
    """The 64 greedy tokens that a file goes on with."""
    loop, session = session_of(file)
    return loop.generate(session, ids, 64).tokens.tolist()


def test_the_loop_generates_what_pytorch_does(mistral):
    model, file = mistral
    loop, session = session_of(file)
    ids = prompt()
    made = loop.generate(session, ids, 12)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        expected = model.generate(
            torch.from_numpy(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
    assert made.tokens.tolist() == expected[:, ids.shape[1] :].tolist()
    forced = loop.generate(session, ids, 12, made.tokens)
    assert np.array_equal(forced.logits, made.logits)
    other = loop.generate(session, ids, 12, (made.tokens + 1) % 64)
    assert np.array_equal(other.logits[:, 0], made.logits[:, 0])
    assert not np.array_equal(other.logits[:, 1], made.logits[:, 1])


def test_tokens_and_time_are_objectives(mistral, tmp_path):
    np.savez(tmp_path / "prompts.npz", input_ids=prompt())
    found = htp_export.search(
        mistral[1],
        {"**.down_proj": ["int4", "fp32"]},
        objectives=["tokens", "time"],
        data=tmp_path / "prompts.npz",
        new_tokens=8,
        trials=4,
    )
    [kept] = [
        trial
        for trial in found.trials
        if set(trial.choices.values()) == {"fp32"} and trial.number is not None
    ]
    assert kept.values["tokens"] == 1
    assert kept.measured["kl"] == 0
    assert all(
        0 <= trial.values["tokens"] <= 1 and trial.values["time"] > 0 for trial in found.trials
    )
    assert not any("random" in note for note in found.notes)


def test_a_pipeline_calibrates_on_the_prompts_of_the_search(mistral, tmp_path):
    """It makes what was measured: with other ranges, the logits of the tokens would differ. Random ones are written."""
    (tmp_path / "space.yaml").write_text('"model.layers.0.mlp.down_proj": [0.5+int8, fp32]\n')
    out, words = (
        tmp_path / "found",
        ["--objectives", "tokens,nonzeros", "--new-tokens", "4", "--trials", "4"],
    )
    assert (
        main(["search", str(mistral[1]), str(tmp_path / "space.yaml"), *words, "-o", str(out)]) == 0
    )
    best = json.loads((out / "front.json").read_text())["pareto"][0]
    assert best["prune"]
    made = tmp_path / "made.onnx"
    assert main(["pipeline", str(out / "steps0.json"), "-m", str(mistral[1]), "-o", str(made)]) == 0
    tagged = htp_export.load(mistral[1])
    loop = Decoder.of(tagged.model)
    prompts = [np.load(file)["input_ids"] for file in sorted(out.glob("prompts*.npz"))]
    samples = Samples.of(RunSettings(list(map(loop.first_feed, prompts))), tagged.model)
    measurer = Measurer(tagged, samples, prompts=Prompts(loop, prompts, 4))
    found = measurer._measured(htp_export.load(made))
    assert (found.bytes, found.tokens) == (best["measured"]["bytes"], best["values"]["tokens"])
    assert found.error == pytest.approx(best["measured"]["error"], rel=1e-4) != 0


def test_random_prompts_are_said(mistral, capsys):
    words = ["--choices", "int4,fp32", "--select", "lm_head", "--new-tokens", "3", "--trials", "5"]
    assert main(["search", str(mistral[1]), "--objectives", "tokens,time", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the prompts are random tokens of the vocabulary" in said
    assert "2 plans are measured, and not 5: the space has no others" in said


def test_a_file_without_a_cache_is_refused():
    program = htp_export.export(nn.Linear(4, 4).eval(), (torch.randn(1, 4),), verbose=False)
    with pytest.raises(
        InputError,
        match="needs a key-value cache, which the model does not take; export it for the",
    ):
        htp_export.search(program, ["int4"], objectives=["tokens"])


@pytest.mark.slow  # an export of its own
def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts").mkdir()
    np.savez("prompts/0.npz", input_ids=prompt())
    export, search = (each.text for each in documents.commands(PAGE) if "past.onnx" in each.text)
    small = [
        word
        for key, value in TEXT.items()
        if key not in export
        for word in ("--set", f"{key}={value}")
    ]
    assert main([*shlex.split(export)[1:], *small]) == 0
    assert (
        main(
            [*shlex.split(search)[1:], "--select", "lm_head", "--new-tokens", "4", "--trials", "3"]
        )
        == 0
    )
    assert Path("found/front.json").exists()


@pytest.mark.slow  # a search of 24 plans
def test_a_searched_plan_keeps_the_tokens_that_int8_arithmetic_flips(tmp_path):
    """64 greedy tokens are those of fp32, with int8 arithmetic wherever it is safe.

    The public case is https://github.com/microsoft/onnxruntime/issues/29849.
    """
    file, ids = tmp_path / "past.onnx", np.random.default_rng(0).integers(3, 60, (8, 6))
    sizes = {**TEXT, "hidden_size": 64, "intermediate_size": 128}
    model = load_model(
        "llama", task="text-generation-with-past", random_weights=True, overrides=sizes
    )
    teach_with_outliers(model)
    Programs(model, example_calls(model))["model"].save(file)
    expected = tokens_of(file, ids)
    htp_export.quantize(file, "int4", tmp_path / "fast.onnx")
    assert tokens_of(tmp_path / "fast.onnx", ids) != expected

    settings: dict[str, Any] = {
        "objectives": ["tokens", "time"],
        "data": {"input_ids": ids},
        "trials": 24,
    }
    # Measured times steer the search: few decisions leave a good plan no matter of luck.
    space = dict.fromkeys(["model.layers.*", "lm_head", "**.embed_tokens"], CHOICES)
    found = htp_export.search(file, space, **settings)
    same = [
        trial for trial in found.trials if trial.number is not None and trial.values["tokens"] == 1
    ]
    best = max(same, key=lambda trial: list(trial.choices.values()).count("int4"))
    assert list(best.choices.values()).count("int4") > len(best.choices) / 2
    htp_export.quantize(file, best.plan, tmp_path / "planned.onnx")
    assert tokens_of(tmp_path / "planned.onnx", ids) == expected
