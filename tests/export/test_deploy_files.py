"""The files beside an exported decoder, for ONNX Runtime GenAI and for transformers.exporters."""

import copy
import json
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch

from htp_export.capabilities.huggingface.beside import OF_GENAI, check_beside, replaces_beside
from htp_export.capabilities.huggingface.companions import write_export_metadata
from htp_export.capabilities.huggingface.genai import check_genai, write_genai
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from htp_export.files.model_files import write_model
from htp_export.huggingface import example_call
from tests.decoders import CACHE, DECODERS, Config, decoder, generated, prompt

exporters = pytest.importorskip(
    "transformers.exporters", reason="transformers older than 5.23 has no exporters"
)

# --- genai_config.json ------------------------------------------------------------------------------------


class Model:
    config = Config(
        vocab_size=99,
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=2,
    )
    generation_config = Config(eos_token_id=3, do_sample=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A decoder without nodes."""

    def cache(name: str) -> list[ir.Value]:
        return [
            ir.val(f"{name}.0.{kind}", ir.DataType.FLOAT, ["b", 2, "n", 8])
            for kind in ("key", "value")
        ]

    ids = ir.val("input_ids", ir.DataType.INT64, ["b", "n"])
    zero = ir.Value(name="zero", const_value=ir.tensor([0.0], name="zero"))
    given = [ids, *cache("past_key_values")]
    logits = ir.node(
        "Cast", [ids], {"to": 1}, outputs=[ir.val("logits", ir.DataType.FLOAT, ["b", "n"])]
    )
    made = [
        ir.node("Add", [value, zero], outputs=[result])
        for value, result in zip(given[1:], cache("present"), strict=True)
    ]
    outputs = [logits.outputs[0], *(node.outputs[0] for node in made)]
    graph = ir.Graph(
        given,
        outputs,
        nodes=[logits, *made],
        initializers=[zero],
        opset_imports={"": 20},
        name="tiny",
    )
    path = tmp_path / "made" / "tiny.onnx"
    path.parent.mkdir()
    write_model(ir.Model(graph, ir_version=10), path)
    return path


def test_the_files_for_genai_lie_beside_the_decoder(file, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "weights.index.json",
        "model.safetensors",
    ):
        (source / name).write_text('"older"')
    written = write_genai(file, Model(), companions=source)
    names = [
        "config.json",
        "genai_config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(path.name for path in written) == names
    assert sorted(path.name for path in file.parent.iterdir()) == sorted([*names, "tiny.onnx"])
    content = json.loads((file.parent / "genai_config.json").read_text())
    assert content["model"]["decoder"]["filename"] == "tiny.onnx"
    assert (content["model"]["eos_token_id"], content["search"]["do_sample"]) == (3, True)
    config = json.loads((file.parent / "config.json").read_text())
    assert (config["vocab_size"], config["architectures"]) == (99, ["Model"])


def test_a_folder_with_the_config_of_another_model_is_refused(file):
    check_genai(file.parent)
    (file.parent / "config.json").write_text("{}")
    with pytest.raises(FileError, match=r"config\.json: would be replaced"):
        check_genai(file.parent)
    (file.parent / "genai_config.json").write_text("{}")
    check_genai(file.parent)


# --- files of others --------------------------------------------------------------------------------------


def test_beside_a_model_only_files_of_an_earlier_export_of_it_are_replaced(file, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    check_beside(file, Model(), OF_GENAI, source)
    for name in ("config.json", "generation_config.json", "genai_config.json", "tokenizer.json"):
        (file.parent / name).write_text('"of others"')
        with pytest.raises(
            FileError, match=rf"{name}: would be replaced, and is no file of tiny\.onnx"
        ):
            check_beside(file, Model(), OF_GENAI, source)
        assert not replaces_beside(file)(file.parent / name)
        (file.parent / name).unlink()
    (file.parent / "tokenizer.json").write_text("{}")  # the same as in the source
    check_beside(file, Model(), OF_GENAI, source)
    write_genai(file, Model(), companions=source)
    check_beside(file, Model(), OF_GENAI, source)
    assert replaces_beside(file)(file.parent / "config.json")
    with pytest.raises(
        FileError, match=r"config\.json: would be replaced, and is no file of other\.onnx"
    ):
        check_beside(file.with_name("other.onnx"), Model(), OF_GENAI, source)
    (file.parent / "tokenizer.json").unlink()
    (file.parent / "tokenizer.json").mkdir()
    with pytest.raises(FileError, match=r"tokenizer\.json: would be replaced"):
        check_beside(file, Model(), OF_GENAI, source)


# --- export.json ------------------------------------------------------------------------------------------


def test_what_transformers_could_not_load_is_refused(file):
    ids = {"input_ids": torch.ones(1, 2)}
    with pytest.raises(InputError, match="only the dynamo exporter has"):
        write_export_metadata(file, Model(), ids, None)
    with pytest.raises(InputError, match=r"from tiny\.onnx\.data"):
        write_export_metadata(file, Model(), ids, object())
    file.with_name("tiny.onnx.data").touch()
    with pytest.raises(
        InputError, match=r"no name 'past_key_values\.0\.key'; export with --cache-names"
    ):
        write_export_metadata(file, Model(), ids, object())
    assert not file.with_name("export.json").exists()


# --- on the command line ----------------------------------------------------------------------------------

TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
BERT = [
    "export",
    "bert",
    "--random-weights",
    *(f"--set={name}={value}" for name, value in TINY.items()),
]


def files_in(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.long
def test_files_for_other_runtimes_are_written_into_new_folders_and_named_as_optimum_does(
    tmp_path, capsys
):
    output, folder = tmp_path / "new" / "folder" / "bert.onnx", tmp_path / "js"
    words = [*BERT, "--task", "feature-extraction", "--export-json", "-o", str(output)]
    assert main([*words, "--transformers-js", str(folder), "--js-dtypes=q4", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["files"]
    assert files_in(folder) == {"config.json", "onnx/model_q4.onnx", "onnx/model_q4.onnx_data"}
    assert files_in(output.parent) == {"bert.onnx", "bert.onnx.data", "config.json", "export.json"}
    assert set(written) == {
        str(each / name) for each in (folder, output.parent) for name in files_in(each)
    }
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 100
    graph = onnx.load(output, load_external_data=False).graph
    assert [value.name for value in graph.output] == ["last_hidden_state"]
    dims = {
        value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in graph.input
    }
    named = ["batch_size", "sequence_length"]
    assert dims == {"input_ids": named, "attention_mask": named, "token_type_ids": named}


def test_nothing_is_written_if_genai_cannot_run_the_model(tmp_path, capsys):
    assert main([*BERT, "-o", str(tmp_path / "new" / "folder" / "bert.onnx"), "--genai"]) == 2
    assert (
        "runs decoders with a key-value cache, and the model takes none" in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


def test_a_plain_output_needs_its_folder_and_no_folder_lies_in_a_file(tmp_path, capsys):
    assert main([*BERT, "-o", str(tmp_path / "new" / "bert.onnx")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert (
        main([*BERT, "-o", str(tmp_path / "file" / "folder" / "bert.onnx"), "--export-json"]) == 2
    )
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "--entry", "examples.net:make", "--genai"], "are for a SOURCE"),
        ([*BERT, "--genai"], "config.json: would be replaced"),
        ([*BERT, "--transformers-js", "{}"], "which is replaced; export to another place"),
        ([*BERT, "--transformers-js", "{}/js", "--js-dtypes", "fp8"], "has no type 'fp8' here"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_export(words, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text('"of another model"')
    assert (
        main([*(word.format(tmp_path) for word in words), "-o", str(tmp_path / "made.onnx")]) == 2
    )
    assert message in capsys.readouterr().err
    assert files_in(tmp_path) == {"config.json"}


T5 = {"num_layers": 1, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 50}
T5_WORDS = [
    "export",
    "t5",
    "--random-weights",
    *(f"--set={name}={value}" for name, value in T5.items()),
]
T5_WORDS += ["--task", "text2text-generation-with-past"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--genai"], "models of one file, and this one has 3: encoder_model, decoder_model"),
        (
            ["--transformers-js", "{}/js", "--two-files"],
            "runs decoders of one file; leave --two-files away",
        ),
    ],
)
def test_encoder_decoders_are_refused_before_the_export(options, message, tmp_path, capsys):
    assert (
        main([*T5_WORDS, "-o", str(tmp_path / "t5"), *(word.format(tmp_path) for word in options)])
        == 2
    )
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_encoder_decoder_becomes_a_folder_for_transformers_js(tmp_path, capsys):
    output, folder = tmp_path / "t5", tmp_path / "js"
    assert (
        main([*T5_WORDS, "-o", str(output), "--transformers-js", str(folder), "--verify", "--json"])
        == 0
    )
    said = json.loads(capsys.readouterr().out)["models"]
    assert list(said) == ["encoder_model", "decoder_model_merged"]
    assert {run: each["ok"] for run, each in said["decoder_model_merged"]["verify"].items()} == {
        "prefill": True,
        "decode": True,
    }
    names = {"encoder_model", "decoder_model_merged", "encoder_model_q4", "decoder_model_merged_q4"}
    models = {f"onnx/{name}{end}" for name in names for end in (".onnx", ".onnx_data")}
    assert files_in(folder) == {"config.json", "generation_config.json", *models}
    assert json.loads((folder / "config.json").read_text())["is_encoder_decoder"] is True
    assert main(["verify", str(output / "decoder_model_merged.onnx"), *T5_WORDS[1:]]) == 0


def test_a_new_folder_is_gone_after_a_failed_export(tmp_path, capsys):
    (tmp_path / "kept").mkdir()
    for folder in ("new", "kept"):
        assert (
            main([*T5_WORDS, "-o", str(tmp_path / folder), "--functions", "class:NoSuchClass"]) == 2
        )
        assert "NoSuchClass" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.slow
def test_in_the_folder_of_a_model_its_own_files_stay_and_elsewhere_those_of_others(
    tmp_path, capsys
):
    source, other = tmp_path / "source", tmp_path / "other"
    decoder("llama").save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    words = ["export", str(source), "--task", "text-generation-with-past", "--genai", "-o"]
    assert main([*words, str(source / "model.onnx"), "--set", "max_position_embeddings=32"]) == 2
    assert "is that of SOURCE, and stays" in capsys.readouterr().err
    assert main([*words, str(source / "model.onnx")]) == 0
    added = {"genai_config.json", "model.onnx", "model.onnx.data"}
    assert files_in(source) == {*before, *added}
    assert {name: (source / name).read_bytes() for name in before} == before
    other.mkdir()
    (other / "tokenizer.json").write_text('"of others"')
    (other / "model.onnx.data").write_text("of others")
    assert main([*words, str(other / "model.onnx")]) == 2
    assert (
        "tokenizer.json: would be replaced, and is no file of model.onnx" in capsys.readouterr().err
    )
    assert files_in(other) == {"tokenizer.json", "model.onnx.data"}
    (other / "tokenizer.json").unlink()
    for _ in range(2):  # the second one replaces the first
        assert main([*words, str(other / "model.onnx")]) == 0
        assert (other / "model.onnx.data").read_text() == "of others"
        assert len(files_in(other)) == len({*before, *added}) - len({"model.safetensors"}) + len(
            {"the data"}
        )


@pytest.mark.slow
def test_a_folder_with_a_decoder_and_its_tokenizer_becomes_one_for_genai(tmp_path, capsys):
    from tests.decoders import generated_by_genai

    model = decoder("llama")
    source = tmp_path / "source"
    model.save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text("{}")
    output = tmp_path / "new" / "genai" / "model.onnx"
    words = [
        "export",
        str(source),
        "--task",
        "text-generation-with-past",
        "-o",
        str(output),
        "--json",
        "--genai",
    ]
    assert main([*words, "--transformers-js", str(tmp_path / "js")]) == 0
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert files_in(output.parent) == {*names, "genai_config.json", "model.onnx", "model.onnx.data"}
    said = json.loads(capsys.readouterr().out)["files"]
    assert set(said) == {
        str(folder / name)
        for folder in (output.parent, tmp_path / "js")
        for name in files_in(folder)
    }
    models = {f"onnx/model{end}" for end in (".onnx", ".onnx_data", "_q4.onnx", "_q4.onnx_data")}
    assert files_in(tmp_path / "js") == names | models
    assert generated_by_genai(output.parent, prompt()) == generated(model, prompt())


@pytest.mark.slow
def test_a_decoder_with_export_json_is_loaded_by_transformers_and_computes_what_pytorch_does(
    tmp_path,
):
    settings = [f"--set={name}={value}" for name, value in DECODERS["llama"].items()]
    words = [
        "export",
        "llama",
        "--random-weights",
        *settings,
        "--task",
        "text-generation-with-past",
        "--export-json",
    ]
    assert (
        main(
            [*words, "--cache-names", "transformers", "--quiet", "-o", str(tmp_path / "model.onnx")]
        )
        == 0
    )
    assert {"export.json", "config.json", "generation_config.json"} <= files_in(tmp_path)
    loaded, model = exporters.ExportedModel.from_pretrained(tmp_path), decoder("llama")
    for kwargs in example_call(model).runs.values():
        with torch.no_grad():
            expected = model(**copy.deepcopy(kwargs))
        found = loaded(**copy.deepcopy(kwargs))
        torch.testing.assert_close(found.logits, expected.logits)
        for ours, theirs in zip(found[CACHE].layers, expected[CACHE].layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys)
