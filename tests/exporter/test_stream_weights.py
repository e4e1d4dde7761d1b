"""Models whose weights stay in safetensors files: the same ONNX file, without the memory, and clear errors."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError, InputError, ModelSourceError
from htp_export.huggingface import example_inputs, load_model, map_weights
from htp_export.process.mapped_memory import MappedFiles
from tests.exporting import quick
from tests.handmade import small_file
from tools import stream_weights

MEGABYTE = 1 << 20
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 5000}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ARCHITECTURES = {
    "llama": {**SMALL, "tie_word_embeddings": False},
    "qwen3": {**SMALL, "head_dim": 16, "tie_word_embeddings": True},
    # experts are joined on load
    "mixtral": {**SMALL, "num_local_experts": 3, "intermediate_size": 2048},
    "gpt2": {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 5000, "n_positions": 64},
    "bert": {
        key: SMALL[key]
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    }
    | {"num_attention_heads": 4},
}
TASKS = {"bert": "fill-mask"}


def checkpoint(folder: Path, name: str, shard: str = "1MB", **changes: Any) -> Path:
    """A folder as transformers saves it, with weights that differ."""
    model: Any = load_model(
        name,
        task=TASKS.get(name, "text-generation"),
        random_weights=True,
        overrides={**ARCHITECTURES[name], **changes},
    )
    model.save_pretrained(folder / name, max_shard_size=shard)
    return folder / name


def is_in_a_file(weight: torch.Tensor) -> bool:
    return MappedFiles.now().path_of(weight.data_ptr(), weight.nbytes) is not None


def exported(model: nn.Module, folder: Path, **inputs: Any) -> dict[str, bytes]:
    folder.mkdir()
    htp_export.export(
        model, (), folder / "m.onnx", kwargs=inputs or example_inputs(model), verbose=False
    )
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    quick(
        itertools.product(ARCHITECTURES, (None, "float16", "bfloat16")),
        ("mixtral", None),
        ("llama", "bfloat16"),
    ),
)
def test_large_weights_stay_in_files_and_have_their_values(tmp_path, name, dtype):
    source = checkpoint(tmp_path, name, vocab_size=10_000)
    streamed, loaded = (
        load_model(str(source), dtype=dtype, stream_weights=flag) for flag in (True, False)
    )
    large = [weight for weight in streamed.parameters() if weight.nbytes >= MEGABYTE]
    assert {weight.ndim for weight in large} == ({2, 3} if name == "mixtral" else {2})
    assert all(map(is_in_a_file, large))
    weights, others = (
        {**model.state_dict(), **dict(model.named_buffers())} for model in (streamed, loaded)
    )
    assert weights.keys() == others.keys()
    assert {weight.dtype for weight in streamed.parameters()} == {
        getattr(torch, dtype or "float32")
    }
    assert all(torch.equal(weights[key], others[key]) for key in weights)


class TestFilesAreEqual:
    @pytest.mark.parametrize(
        ("name", "options"),
        quick(
            [
                *((name, {}) for name in ("llama", "qwen3", "gpt2", "bert")),
                ("llama", {"dtype": "float16"}),
                ("llama", {"task": "feature-extraction"}),  # the file has a head
            ]
        ),
    )
    def test_to_those_of_a_model_in_memory(self, tmp_path, name, options):
        source = checkpoint(tmp_path, name, vocab_size=10_000)
        streamed, loaded = (
            load_model(str(source), stream_weights=flag, **options) for flag in (True, False)
        )
        assert exported(streamed, tmp_path / "a") == exported(loaded, tmp_path / "b")

    def test_under_torchscript(self, tmp_path):
        source = checkpoint(tmp_path, "bert")
        files = []
        for flag in (True, False):
            model = load_model(str(source), stream_weights=flag)
            target = tmp_path / f"{flag}.onnx"
            htp_export.export(
                model, (), target, kwargs=example_inputs(model), dynamo=False, verbose=False
            )
            files.append(target.read_bytes())
        assert files[0] == files[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


class TestRefused:
    @pytest.fixture
    def source(self, saved: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(saved, tmp_path / "llama"))

    def refused(self, source: Path, error: type[InputError] = FileError) -> str:
        with pytest.raises(error) as raised:
            load_model(str(source), stream_weights=True)
        return str(raised.value)

    @staticmethod
    def change_index(source: Path, change: Callable[[dict[str, str]], object]) -> None:
        """Change which file has which tensor."""
        index = source / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        change(content["weight_map"])
        index.write_text(json.dumps(content))

    @staticmethod
    def change_tensors(
        source: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]
    ) -> Path:
        """Change the tensors of the file that has one of this name, and return the file."""
        [file] = [file for file in source.glob("*.safetensors") if name in load_file(file)]
        tensors = load_file(file)
        change(tensors)
        file.write_bytes(save(tensors, {"format": "pt"}))
        return file

    def test_a_missing_weight(self, source):
        missing = "model.layers.0.mlp.up_proj.weight"
        self.change_tensors(source, missing, lambda tensors: tensors.pop(missing))
        self.change_index(source, lambda files: files.pop(missing))
        assert (
            self.refused(source)
            == f"{source}/model.safetensors.index.json: has no weights for '{missing}'"
        )

    def test_a_weight_of_another_shape(self, source):
        norm = "model.norm.weight"
        file = self.change_tensors(
            source, norm, lambda tensors: tensors.update({norm: torch.ones(63)})
        )
        assert (
            self.refused(source)
            == f"{file}: tensor '{norm}' has shape [63], and the model needs [64]"
        )

    def test_an_index_that_names_a_tensor_that_is_not_there(self, source):
        first = sorted(source.glob("*.safetensors"))[0]
        self.change_index(source, lambda files: files.update(more=first.name))
        said = self.refused(source)
        assert (
            said
            == f"{first}: does not contain tensor 'more', which model.safetensors.index.json assigns to it"
        )

    @pytest.mark.parametrize(
        "name", ["../other.safetensors", "{folder}/other.safetensors", "link.safetensors"]
    )
    def test_a_file_outside_of_the_folder(self, source, name):
        shard, other = sorted(source.glob("*.safetensors"))[0], source.parent / "other.safetensors"
        shutil.copy(shard, other)
        (source / "link.safetensors").symlink_to(other)
        name = name.format(folder=source.parent)
        self.change_index(
            source,
            lambda files: files.update(
                (key, name) for key, file in files.items() if file == shard.name
            ),
        )
        assert f"its file {name!r} lies outside its folder; it will not be read" in self.refused(
            source
        )

    def test_weights_that_a_config_names_elsewhere(self, source):
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(
            json.dumps({**config, "transformers_weights": "../other.safetensors"})
        )
        assert "outside of its folder: '../other.safetensors'" in self.refused(source)

    def test_pickles(self, source):
        for file in source.glob("*.safetensors*"):
            file.unlink()
        assert "contains neither model.safetensors" in self.refused(source)
        torch.save({}, source / "pytorch_model.bin")
        said = self.refused(source)
        assert said.startswith(
            f"{source}/pytorch_model.bin: is a pickle, which can run code when it is read"
        )

    @pytest.mark.parametrize("change", ["cut", "no header", "empty"])
    def test_a_broken_file(self, source, change):
        file = sorted(source.glob("*.safetensors"))[0]
        content = file.read_bytes()
        file.write_bytes({"cut": content[:-1], "no header": b"\xff" * 100, "empty": b""}[change])
        assert self.refused(source).startswith(
            f"{file}: is not a safetensors file, or is incomplete: "
        )

    @pytest.mark.parametrize(
        "content", ["[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": "a"}']
    )
    def test_an_index_that_is_none(self, source, content):
        (source / "model.safetensors.index.json").write_text(content)
        assert "is not an index of safetensors files" in self.refused(source)

    def test_random_weights(self):
        with pytest.raises(ModelSourceError, match="random weights are in no files"):
            load_model("bert", random_weights=True, stream_weights=True)


def test_loading_leaves_the_environment_and_torch_as_they_were(tmp_path, monkeypatch):
    from torch.nn.modules import module

    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    hooks = dict(module._global_parameter_registration_hooks)
    load_model(str(checkpoint(tmp_path, "llama")), stream_weights=True)
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "0"
    assert module._global_parameter_registration_hooks == hooks


class Tied(nn.Module):
    """Two names for one parameter, one equal to it by value, a persistent buffer, and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6000, 64)
        self.head = nn.Linear(64, 6000, bias=False)
        self.head.weight = self.embed.weight
        self.equal = nn.Embedding(6000, 64)
        self.register_buffer("scale", torch.tensor(3.0))
        self.register_buffer("steps", torch.arange(64.0, device="cpu"), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids) * self.scale + self.equal(ids) + self.steps)


class TestMapWeights:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        torch.manual_seed(0)
        state = Tied().state_dict()
        del state["head.weight"]
        state["scale"], state["equal.weight"] = torch.tensor(5.0), state["embed.weight"].clone()
        save_file(state, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    @staticmethod
    def on_meta() -> Tied:
        with torch.device("meta"):
            return Tied()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_gives_a_model_on_meta_the_weights_of_a_file(self, file, dtype, tmp_path):
        net = self.on_meta().to(dtype).eval()
        checkpoint = map_weights(net, file)
        assert net.head.weight is net.embed.weight
        assert is_in_a_file(net.embed.weight)
        assert is_in_a_file(net.equal.weight)
        assert {weight.dtype for weight in net.state_dict().values()} == {dtype}
        loaded = Tied().to(dtype).eval()
        loaded.load_state_dict(load_file(file), strict=False)
        ids = torch.arange(5)[None]
        assert torch.equal(net(ids), loaded(ids))
        assert exported(net, tmp_path / "a", ids=ids) == exported(loaded, tmp_path / "b", ids=ids)
        checkpoint.check()

    def test_a_file_that_was_changed_is_known(self, file):
        checkpoint = map_weights(self.on_meta(), file)
        os.utime(file, ns=(1, 1))
        with pytest.raises(
            FileError, match=r"model\.safetensors: was changed after its weights were loaded"
        ):
            checkpoint.check()

    @pytest.mark.parametrize(
        ("key", "value", "problem"),
        [
            ("embed.weight", None, "has no weights for 'embed.weight', 'head.weight'"),
            ("other", torch.ones(1), "has weights that the model does not have: 'other'"),
            ("scale", torch.ones(2), "tensor 'scale' has shape [2], and the model needs []"),
        ],
    )
    def test_refuses_what_does_not_fit(self, file, key, value, problem):
        state = {name: weight.clone() for name, weight in load_file(file).items()}
        state.pop(key, None)
        save_file(state if value is None else {**state, key: value}, file)
        net = self.on_meta()
        with pytest.raises(FileError) as raised:
            map_weights(net, file.parent)
        assert str(raised.value) == f"{file}: {problem}"
        assert net.embed.weight.is_meta

    def test_refuses_a_buffer_without_values_that_is_in_no_checkpoint(self, file):
        net = self.on_meta()
        net.steps = torch.empty(64, device="meta")
        with pytest.raises(
            FileError, match="has no weights for 'steps': these buffers have no values"
        ):
            map_weights(net, file)

    def test_refuses_pickles_and_what_is_missing(self, tmp_path):
        torch.save({}, tmp_path / "net.pt")
        with pytest.raises(FileError, match=r"net\.pt: is a pickle"):
            map_weights(self.on_meta(), tmp_path / "net.pt")
        with pytest.raises(FileError, match=r"net\.safetensors: is missing"):
            map_weights(self.on_meta(), tmp_path / "net.safetensors")


class TestCommand:
    @pytest.mark.long
    @pytest.mark.parametrize("name", quick(["bert", "llama"], "bert"))
    def test_writes_the_file_that_it_writes_without_the_option(self, tmp_path, name):
        source = checkpoint(tmp_path, name)
        written = []
        for option in ([], ["--stream-weights"]):
            folder = tmp_path / f"out{len(option)}"
            folder.mkdir()
            assert (
                main(["export", str(source), "-o", str(folder / "m.onnx"), "--quiet", *option]) == 0
            )
            model = onnx.load(str(folder / "m.onnx"), load_external_data=False)
            # torch counts the graphs that a process traces, and says which it was
            for node in model.graph.node:
                for entry in node.metadata_props:
                    entry.value = re.sub(r"<eval_with_key>\.\d+", "<eval_with_key>", entry.value)
            assert {file.name for file in folder.iterdir()} == {"m.onnx", "m.onnx.data"}
            written.append(
                (model.SerializeToString(deterministic=True), (folder / "m.onnx.data").read_bytes())
            )
        assert written[0] == written[1]

    def test_leaves_the_file_if_the_checkpoint_is_changed_meanwhile(
        self, tmp_path, monkeypatch, capsys
    ):
        from htp_export.exporter import exporting

        source = checkpoint(tmp_path, "bert")
        shard = sorted(source.glob("*.safetensors"))[0]
        original = exporting.export

        def changed(*args: Any, **kwargs: Any) -> Any:
            program = original(*args, **kwargs)
            os.utime(shard, ns=(1, 1))
            return program

        monkeypatch.setattr(exporting, "export", changed)
        before = small_file(tmp_path / "m.onnx")
        assert (
            main(
                [
                    "export",
                    str(source),
                    "-o",
                    str(tmp_path / "m.onnx"),
                    "--quiet",
                    "--stream-weights",
                ]
            )
            == 2
        )
        assert f"{shard}: was changed after its weights were loaded" in " ".join(
            capsys.readouterr().err.split()
        )
        assert (tmp_path / "m.onnx").read_bytes() == before
        assert {file.name for file in tmp_path.iterdir()} == {"bert", "m.onnx"}

    @pytest.mark.slow  # it starts a process
    def test_reads_a_model_in_the_cache_of_the_hub_whose_files_are_links(self, tmp_path):
        source = checkpoint(tmp_path, "llama")
        home = tmp_path / "hub" / "models--somebody--tiny"
        (home / "blobs").mkdir(parents=True)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("0" * 40)
        snapshot = home / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        for number, file in enumerate(sorted(source.iterdir())):
            shutil.copy(file, home / "blobs" / f"{number:064}")
            (snapshot / file.name).symlink_to(f"../../blobs/{number:064}")
        command = [
            sys.executable,
            "-m",
            "htp_export",
            "export",
            "somebody/tiny",
            "--stream-weights",
            "--quiet",
            "-o",
        ]
        environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*command, tmp_path / "a.onnx"], env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert main(["export", str(source), "-o", str(tmp_path / "b.onnx"), "--quiet"]) == 0
        assert (tmp_path / "a.onnx.data").read_bytes() == (tmp_path / "b.onnx.data").read_bytes()

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (["--torchscript"], "the TorchScript exporter holds all weights in memory"),
            (
                ["--random-weights"],
                "--stream-weights is for a SOURCE with weights in safetensors files",
            ),
        ],
    )
    def test_refuses_what_cannot_be_streamed(self, tmp_path, options, problem, capsys):
        assert (
            main(["export", "bert", "-o", str(tmp_path / "m.onnx"), "--stream-weights", *options])
            == 2
        )
        assert problem in " ".join(capsys.readouterr().err.split())
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_checkpoint_of_6_gb_is_exported_in_less_than_2_gb_of_memory(tmp_path):
    needed = 13_000_000_000
    if shutil.disk_usage(tmp_path).free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of disk in {tmp_path}")
    if not Path("/proc/self/maps").is_file():
        pytest.skip("pages of mapped files are only released on Linux")
    try:
        size = stream_weights.write_checkpoint(tmp_path / "model", 6.0)
        _, peak = stream_weights.export(tmp_path / "model", tmp_path / "model.onnx")
        written = (tmp_path / "model.onnx.data").stat().st_size
    finally:
        shutil.rmtree(tmp_path)
    assert size > 5_800_000_000
    assert abs(written - size) < 10_000_000
    assert peak < 2_000_000_000
