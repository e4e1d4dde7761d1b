"""Decoders in stages: their caches, and the configuration of ONNX Runtime GenAI."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import FileError, InputError
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from tests import handmade
from tests.nets import Holding, spread, x


def genai_file(folder: Path, **changes: Any) -> Path:
    """The configuration of a whole decoder, as the exporter writes it."""
    decoder = {"filename": "model.onnx", "head_size": 8, "num_hidden_layers": 2}
    decoder |= {
        "inputs": {"input_ids": "x"},
        "outputs": {"logits": "out"},
        **changes.pop("decoder", {}),
    }
    content = {
        "model": {
            "type": "decoder",
            "eos_token_id": [2, 3],
            "vocab_size": 99,
            "decoder": decoder,
            **changes,
        },
        "search": {"max_length": 64, "do_sample": False},
    }
    file = folder / "genai_config.json"
    file.write_text(json.dumps(content))
    return file


def test_genai_gets_a_pipeline_of_the_stages(tmp_path):
    file = genai_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    stages = tmp_path / "stages"
    found = htp_export.partition(handmade.encoder(), 2, stages, serve="genai", genai_config=file)
    content = json.loads((stages / "genai_config.json").read_text())
    assert content["search"] == {"max_length": 64, "do_sample": False}
    decoder = content["model"].pop("decoder")
    assert content["model"] == {
        "type": "decoder-pipeline",
        "eos_token_id": [2, 3],
        "vocab_size": 99,
    }
    assert decoder.pop("pipeline") == [
        {"stage0": {"filename": "stage0.onnx", "inputs": ["x"], "outputs": ["mask", "layer0"]}},
        {"stage1": {"filename": "stage1.onnx", "inputs": ["mask", "layer0"], "outputs": ["out"]}},
    ]
    assert decoder == {
        "head_size": 8,
        "num_hidden_layers": 2,
        "inputs": {"input_ids": "x"},
        "outputs": {"logits": "out"},
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
    }
    assert set(found.files) == {"genai_config.json", "stage0.onnx", "stage1.onnx", "tokenizer.json"}
    again = htp_export.partition(handmade.encoder(), 1, stages, serve="genai", genai_config=file)
    assert set(again.files) == {"genai_config.json", "stage0.onnx", "tokenizer.json"}


def test_paths_in_a_genai_configuration_are_not_taken_over(tmp_path):
    options = {
        "session_options": {"custom_ops_library": "/tmp/evil.so"},
        "filename": "../../model.onnx",
    }
    file = genai_file(tmp_path, decoder=options, tokenizer_dir="../..")
    htp_export.partition(
        handmade.encoder(), 2, tmp_path / "stages", serve="genai", genai_config=file
    )
    text = (tmp_path / "stages" / "genai_config.json").read_text()
    assert [word for word in ("evil", "..", "tokenizer_dir") if word in text] == []


def test_a_tokenizer_that_is_a_link_out_of_its_folder_is_not_copied(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    file = genai_file(home)
    (tmp_path / "secret.json").write_text("{}")
    (home / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(FileError, match=r"tokenizer\.json: is a link out of its folder"):
        htp_export.partition(
            handmade.encoder(), 2, tmp_path / "stages", serve="genai", genai_config=file
        )
    assert not (tmp_path / "stages").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing; export the model with --genai"),
        ([], "is no configuration of a decoder"),
        ({"model": {"decoder": []}}, "is no configuration of a decoder"),
        (
            {"model": {"decoder": {"inputs": {"input_ids": 3}, "outputs": {}}}},
            "does not name the inputs and outputs",
        ),
    ],
)
def test_a_broken_genai_configuration_is_refused(content, message, tmp_path):
    file = tmp_path / "genai_config.json"
    if content is not None:
        file.write_text(json.dumps(content))
    onnx.save(ir.to_proto(handmade.encoder()), tmp_path / "model.onnx")
    with pytest.raises(FileError, match=message):
        htp_export.partition(tmp_path / "model.onnx", 2, tmp_path / "stages", serve="genai")


def test_a_model_without_a_file_needs_a_genai_configuration(tmp_path):
    with pytest.raises(InputError, match="genai_config is required for an in-memory model"):
        htp_export.partition(handmade.encoder(), 2, tmp_path / "stages", serve="genai")


# --- stages of a decoder: the cache of each layer is in the stage of the layer ---


class Layer(Holding, key=nn.Linear(4, 4)):
    def forward(self, hidden: torch.Tensor, past: torch.Tensor, places: torch.Tensor) -> Any:
        present = torch.cat([past, self.key(hidden)], dim=1)
        return hidden + places[:, None] * present.mean(1, keepdim=True), present


class Start(nn.Module):
    def forward(self, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return hidden + places.cos()[:, None]


class Decoder(Holding, start=Start(), layers=nn.ModuleList(Layer() for _ in range(3))):
    """Reads the length of the past from the cache of its last layer, and uses it before the first one and in each."""

    def forward(
        self, hidden: torch.Tensor, past_0: torch.Tensor, past_1: torch.Tensor, past_2: torch.Tensor
    ) -> Any:
        places = torch.arange(past_2.shape[1], past_2.shape[1] + hidden.shape[1]).float() / 7
        hidden, presents = self.start(hidden, places), []
        for layer, past in zip(self.layers, (past_0, past_1, past_2), strict=True):
            hidden, present = layer(hidden, past, places)
            presents.append(present)
        return hidden, *presents


NAMES = [f"past_{number}" for number in range(3)]


def feed(length: int, past: int) -> dict[str, torch.Tensor]:
    return {
        "hidden": x(2, length, 4),
        **{name: x(2, past, 4, seed=ord(name[-1])) for name in NAMES},
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    batch, length, past = (torch.export.Dim(name) for name in ("batch", "length", "past"))
    shapes = {"hidden": {0: batch, 1: length}, **{name: {0: batch, 1: past} for name in NAMES}}
    path = tmp_path_factory.mktemp("decoder") / "decoder.onnx"
    options = {
        "output_names": ["out", "present_0", "present_1", "present_2"],
        "dynamic_shapes": shapes,
    }
    htp_export.export(
        spread(Decoder()).eval(), (), path, kwargs=feed(3, 5), verbose=False, dynamo=True, **options
    )
    return path


def caches_of(parts: htp_export.results.Partition) -> list[set[str]]:
    return [set(stage.inputs) & set(NAMES) for stage in parts.stages]


@pytest.mark.long
def test_each_stage_has_the_caches_of_its_own_layers(file):
    """The first one, which has no layer, reads the length of the past from the cache that the model reads it from."""
    parts = htp_export.partition(file, ["layers.0", "layers.1", "layers.2"])
    assert caches_of(parts) == [{"past_2"}, {"past_0"}, {"past_1"}, {"past_2"}]
    given = [
        [f"present_{number}" in stage.outputs for number in range(3)] for stage in parts.stages
    ]
    assert given == [[False] * 3, *np.eye(3).tolist()]
    assert caches_of(htp_export.partition(file, ["layers.1", "layers.2"])) == [
        {"past_0"},
        {"past_1"},
        {"past_2"},
    ]


@pytest.mark.parametrize("starts", [["layers.1", "layers.2"], ["layers.0", "layers.2"]])
@pytest.mark.parametrize(("length", "past"), [(3, 6), (4, 0), (1, 9)])
def test_stages_give_the_caches_of_the_whole(file, starts, length, past):
    given = feed(length, past)
    expected = htp_export.partition(file, 1).run(given)
    found = htp_export.partition(file, starts).run(given)
    assert list(found) == ["out", "present_0", "present_1", "present_2"]
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, atol=1e-6)


def test_a_size_is_not_read_from_an_input_that_is_left_out_itself():
    """``start`` reads the past of one cache and the batch of another one, which is the batch of ``x``, too."""

    def floats(name: str, *sizes: str) -> ir.Value:
        return ir.val(name, ir.DataType.FLOAT, sizes)

    def node(
        op: str, inputs: list[ir.Value], module: str, made: ir.Value, **attributes: int
    ) -> ir.Node:
        tags = {"htp.module": module, "htp.reason": "scope"}
        return ir.node(
            op, inputs, attributes, outputs=[made], metadata_props=tags, name=f"node_{made.name}"
        )

    x, caches = floats("x", "b", "n"), [floats(f"past_{number}", "b", "p") for number in range(2)]
    sizes = [ir.val(name, ir.DataType.INT64, [1]) for name in ("past", "batch", "both")]
    factor, started, first, out = (
        ir.val("factor", ir.DataType.FLOAT, [1]),
        *(floats(n, "b", "n") for n in "sfo"),
    )
    nodes = [
        node("Shape", [caches[0]], "start", sizes[0], start=1, end=2),
        node("Shape", [caches[1]], "start", sizes[1], start=0, end=1),
        node("Add", [sizes[1], sizes[0]], "start", sizes[2]),
        node("Cast", [sizes[2]], "start", factor, to=ir.DataType.FLOAT),
        node("Mul", [x, factor], "start", started),
        node("Add", [started, caches[0]], "first", first),
        node("Add", [first, caches[1]], "second", out),
    ]
    model = ir.Model(
        ir.Graph([x, *caches], [out], nodes=nodes, opset_imports={"": 20}, name="net"),
        ir_version=10,
    )
    modules = [ModuleInfo("", "net.Net", 1, "computed")]
    modules += [
        ModuleInfo(name, "net.Part", 1, "computed") for name in ("start", "first", "second")
    ]
    model.metadata_props.update({"htp.version": "1", "htp.modules": Hierarchy(modules).to_json()})
    parts = htp_export.partition(model, ["first", "second"])
    given = {
        value.name: np.full((2, 3), number, np.float32)
        for number, value in enumerate((x, *caches), 1)
    }
    assert set(parts.stages[0].inputs) == {"x", "past_0"}
    assert parts.run(given)["o"].tolist() == [[5 + 2 + 3] * 3] * 2
