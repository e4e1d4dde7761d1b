"""transformers.js generates what PyTorch does from the folder of an exported decoder."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.huggingface.transformers_js import DTYPES, write_transformers_js
from htp_export.errors import FileError
from htp_export.huggingface import example_calls
from tests.decoders import (
    Config,
    Programs,
    decoder,
    encoder_decoder,
    generated,
    generated_from,
    start_of,
)
from tests.nets import spread

pytest.importorskip(
    "transformers.exporters", reason="transformers older than 5.23 has no exporters"
)

SCRIPT = Path(__file__).parents[2] / "examples" / "transformers_js.mjs"
INSTALLED = "HTP_TRANSFORMERS_JS"
"""The variable that names the folder in which npm installed the package."""


def node() -> tuple[str, Path]:
    """The program that runs JavaScript, and the folder with the package."""
    program, folder = shutil.which("node"), os.environ.get(INSTALLED)
    if program is None:
        pytest.skip("node is not installed")
    if (
        folder is None
        or not (Path(folder) / "node_modules" / "@huggingface" / "transformers").is_dir()
    ):
        pytest.skip(f"{INSTALLED} names no folder in which npm installed @huggingface/transformers")
    return program, Path(folder)


def words(folder: Path) -> Path:
    """A tokenizer whose words are w0 to w63; the token of each is its number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


def run_node(*words: object) -> Any:
    """What a script prints as JSON."""
    program, package = node()
    command = [program, *map(str, words)]
    done = subprocess.run(
        command, cwd=package, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_node(folder: Path, ids: list[int], dtype: str) -> list[int]:
    """The tokens that transformers.js generates."""
    found: list[int] = run_node(SCRIPT, folder, " ".join(f"w{number}" for number in ids), dtype)[
        "ids"
    ]
    return found


OF_TENSORS = """
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import path from "node:path";
const [folder, kind, file] = process.argv.slice(2);
const library = createRequire(path.join(process.cwd(), "package.json"))("@huggingface/transformers");
library.env.allowRemoteModels = false;
library.env.localModelPath = path.dirname(folder) + path.sep;
const model = await library[kind].from_pretrained(path.basename(folder), { dtype: "fp32" });
const options = { do_sample: false, max_new_tokens: 20, min_new_tokens: 20 };
for (const [name, [values, dims, whole]] of Object.entries(JSON.parse(readFileSync(file)))) {
  const data = whole ? BigInt64Array.from(values.map(BigInt)) : Float32Array.from(values);
  options[name] = new library.Tensor(whole ? "int64" : "float32", data, dims);
}
const made = await model.generate(options);
console.log(JSON.stringify(made.tolist()[0].map(Number)));
"""


def of_tensors_in_node(folder: Path, kind: str, given: dict[str, torch.Tensor]) -> list[int]:
    """The text and 20 more tokens, which a class of transformers.js generates from tensors."""
    given = {**given, "attention_mask": torch.ones_like(given["input_ids"])}
    script, data = folder.with_name("tensors.mjs"), folder.with_name("tensors.json")
    script.write_text(OF_TENSORS)
    listed = {
        name: [x.flatten().tolist(), list(x.shape), not x.is_floating_point()]
        for name, x in given.items()
    }
    data.write_text(json.dumps(listed))
    found: list[int] = run_node(script, folder, kind, data)
    return found


@pytest.mark.slow
def test_transformers_js_generates_the_tokens_of_pytorch(tmp_path):
    node()
    model = decoder("llama")
    files = Programs(model, example_calls(model)).save(tmp_path)
    folder = write_transformers_js(
        files, tmp_path / "tiny", model, companions=words(tmp_path / "words")
    )
    ids = [3, 14, 15, 9, 26]
    assert in_node(folder, ids, "fp32") == [*ids, *generated(model, np.array([ids]), 20)[0]]
    assert in_node(folder, ids, "q4")[:5] == ids
    assert len(in_node(folder, ids, "q4")) == 25


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_transformers_js_generates_the_tokens_of_an_encoder_decoder(name, tmp_path):
    node()
    model = encoder_decoder(name)
    model.generation_config.update(
        decoder_start_token_id=start_of(model), eos_token_id=2, pad_token_id=0
    )
    files = Programs(model, example_calls(model, two_files=False)).save(tmp_path)
    folder = write_transformers_js(
        files, tmp_path / "tiny", model, companions=words(tmp_path / "words"), dtypes=["fp32", "q8"]
    )
    ids = [3, 14, 15, 9, 26]
    inputs = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, 5, dtype=torch.int64),
    }
    assert in_node(folder, ids, "fp32") == [start_of(model), *generated_from(model, inputs)[0]]
    assert len(in_node(folder, ids, "q8")) == 21


@pytest.mark.slow
def test_transformers_js_generates_the_tokens_of_a_model_that_sees_images(tmp_path):
    from tests.export.test_image_text_files import TASK, llava, prompt

    node()
    model = llava()
    model.generation_config.update(eos_token_id=2, pad_token_id=0)
    files = Programs(model, example_calls(model, task=TASK)).save(tmp_path)
    folder = write_transformers_js(files, tmp_path / "tiny", model, dtypes=["fp32"])
    ids, pixels = prompt(2)
    settings: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    with torch.no_grad():
        right = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, **settings
        )
    found = of_tensors_in_node(
        folder, "LlavaForConditionalGeneration", {"input_ids": ids, "pixel_values": pixels}
    )
    assert found == right[0].tolist()


# --- the folder -------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.config = self.generation_config = Config(model_type="tiny", vocab_size=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.first(x).relu())
        return hidden


@pytest.fixture
def net(tmp_path: Path) -> tuple[Net, Path]:
    model = spread(Net()).eval()
    htp_export.export(
        model, (torch.ones(2, 3, 64),), tmp_path / "net.onnx", verbose=False, dynamo=True
    )
    return model, tmp_path / "net.onnx"  # type: ignore[return-value]


def names(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_every_variant_is_a_model_that_runs_with_its_weights_beside_it_and_its_tags(net, tmp_path):
    model, file = net
    folder = write_transformers_js({"model": file}, tmp_path / "js", model, dtypes=DTYPES)
    suffixes = ["", "_fp16", "_quantized", "_int8", "_uint8", "_q4"]
    expected = {f"onnx/model{suffix}.onnx{end}" for suffix in suffixes for end in ("", "_data")}
    assert names(folder) == {"config.json", "generation_config.json", *expected}
    config = json.loads((folder / "config.json").read_text())
    external = {f"model{suffix}.onnx": 1 for suffix in suffixes}
    assert config == {
        "model_type": "tiny",
        "vocab_size": 8,
        "architectures": ["Net"],
        "transformers.js_config": {"use_external_data_format": external},
    }
    x = torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 64)
    right = model(x).detach().numpy()
    for suffix in suffixes:
        made = folder / "onnx" / f"model{suffix}.onnx"
        session = onnxruntime.InferenceSession(str(made))
        [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert np.abs(found - right).max() < 0.15 * np.abs(right).max()
        nodes = onnx.load(str(made), load_external_data=False).graph.node
        assert {
            entry.value
            for node in nodes
            for entry in node.metadata_props
            if entry.key == "htp.module"
        } >= {
            "first",
            "second",
        }


def test_an_earlier_folder_is_replaced_and_another_one_refused(net, tmp_path):
    model, file = net
    folder = tmp_path / "js"
    write_transformers_js({"model": file}, folder, model)
    write_transformers_js({"encoder_model": file}, folder, model, dtypes=["fp32"])
    here = {
        "config.json",
        "generation_config.json",
        "onnx/encoder_model.onnx",
        "onnx/encoder_model.onnx_data",
    }
    assert names(folder) == here
    (folder / "thesis.doc").write_text("years of work")
    with pytest.raises(FileError, match=r"contains 'thesis\.doc'"):
        write_transformers_js({"model": file}, folder, model)
    assert names(folder) == {*here, "thesis.doc"}


def test_only_files_that_an_earlier_call_can_have_written_are_replaced(net, tmp_path):
    model, file = net
    folder = tmp_path / "js"
    for name in (
        "config.json",
        "tokenizer.json",
        "onnx/model.onnx",
        "onnx/model.onnx_data",
        "notes.txt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('"years of work"')
        with pytest.raises(FileError, match=rf"js: contains '{name.partition('/')[0]}"):
            write_transformers_js({"model": file}, folder, model, dtypes=["fp32"])
        assert names(folder) == {name}
        (folder / name).unlink()
    write_transformers_js({"model": file}, folder, model, dtypes=["fp32"])
    here = names(folder)
    for name in ("onnx/mine.onnx", "onnx/mine.bin", "notes.txt", "package.json"):
        (folder / name).write_text('"years of work"')
        with pytest.raises(FileError, match=rf"js: contains '{name}'"):
            write_transformers_js({"model": file}, folder, model, dtypes=["fp32"])
        assert names(folder) == {*here, name}
        (folder / name).unlink()
    write_transformers_js({"model": file}, folder, model, dtypes=["fp32"])


def test_a_failure_leaves_what_was_there(net, tmp_path):
    model, file = net
    companions = tmp_path / "companions"
    companions.mkdir()
    (companions / "tokenizer.json").write_text("{}")
    write_transformers_js(
        {"model": file}, tmp_path / "js", model, companions=companions, dtypes=["fp32"]
    )
    before = names(tmp_path / "js")
    assert "tokenizer.json" in before
    (companions / "vocab.txt").symlink_to("/etc/hostname")
    with pytest.raises(FileError, match="link out of its folder"):
        write_transformers_js(
            {"other": file}, tmp_path / "js", model, companions=companions, dtypes=["fp32"]
        )
    assert names(tmp_path / "js") == before
    assert not list(tmp_path.glob(".htp-*"))


def test_config_of_the_exported_model_comes_before_the_one_of_its_folder(net, tmp_path):
    model, file = net
    companions = tmp_path / "companions"
    companions.mkdir()
    (companions / "config.json").write_text('{"model_type": "older"}')
    (companions / "model.safetensors.index.json").write_text("{}")
    folder = write_transformers_js(
        {"model": file}, tmp_path / "js", model, companions=companions, dtypes=["fp32"]
    )
    assert json.loads((folder / "config.json").read_text())["model_type"] == "tiny"
    assert "model.safetensors.index.json" not in names(folder)


def test_a_folder_that_cannot_be_made_is_named(net, tmp_path):
    model, file = net
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FileError, match=r"taken.js: cannot be written: "):
        write_transformers_js({"model": file}, tmp_path / "taken" / "js", model, dtypes=["fp32"])
    assert (tmp_path / "taken").read_text() == "a file"
