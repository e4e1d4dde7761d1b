"""``--as-python`` prints a program that does what the command does, and does nothing itself."""

import ast
from pathlib import Path

import onnx
import pytest

import htp_export
from htp_export.command.main import main
from tests.all_commands import COMMANDS, arguments, companions, example

RUN = (
    "extract",
    "optimize",
    "quantize",
    "tap",
    "rename",
    "diff",
    "lora insert",
    "place",
    "verify",
    "pipeline",
)
"""Commands whose programs are run here."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the commands, in a folder of their own."""
    folder = tmp_path_factory.mktemp("commands")
    model, args = example()
    htp_export.export(model, args, folder / "net.onnx")
    return {"FILE": str(folder / "net.onnx"), **companions(folder)}


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_as_python_is_a_program_and_nothing_is_written(
    command, files, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    status = main([*arguments(command, files), "--as-python"])
    printed = capsys.readouterr()
    assert list(tmp_path.iterdir()) == []
    assert status == 0
    *_, call, shown = ast.parse(printed.out).body
    assert ast.unparse(call).startswith("result = htp_export.")
    assert ast.unparse(shown).startswith("print(result")
    if command in RUN:
        run_alike(command, printed.out, arguments(command, files), tmp_path, capsys)


def run_alike(command, program, words, folder, capsys):
    """Run the program and the command, and compare what they print and write."""
    output = folder / "out.onnx"
    exec(program, {})
    printed = capsys.readouterr().out
    graphs = [graph_of(output)] if output.exists() else []
    assert main([*words, *(["--force"] if output.exists() else [])]) == 0
    assert printed.splitlines()[-1].partition(" -> ")[0] in capsys.readouterr().out
    if graphs:
        assert graph_of(output) == graphs[0]


def graph_of(file: Path) -> bytes:
    return onnx.load(file).graph.SerializeToString(deterministic=True)


ENTRY = "--entry tests.all_commands:example"
BERT = (
    "bert --random-weights --set num_hidden_layers=1 --set hidden_size=24 --set num_attention_heads=2 "
    "--set intermediate_size=32 --set vocab_size=100"
)
GPT2 = (
    "gpt2 --random-weights --task text-generation-with-past --set n_layer=1 --set n_embd=24 --set n_head=2 "
    "--set vocab_size=100 --set bos_token_id=1 --set eos_token_id=2"
)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        f"{ENTRY} --embed-map",
        f"{ENTRY} --torchscript --opset 17",
        f"{BERT} --functions class:BertSelfOutput --names path",
        pytest.param(f"{BERT} --dynamic batch,sequence", marks=pytest.mark.slow),
        pytest.param(f"{BERT} --dynamic batch --torchscript", marks=pytest.mark.slow),
        pytest.param(f"{BERT} --decompose-attention --seed 3", marks=pytest.mark.slow),
        pytest.param(GPT2, marks=pytest.mark.slow),
    ],
)
def test_an_export_as_python_writes_the_file_of_the_command(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["export", *words.split(), "-o", "out.onnx"]
    assert main([*command, "--as-python"]) == 0
    program = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    exec(program, {})
    from_python = graph_of(tmp_path / "out.onnx")
    capsys.readouterr()
    assert main([*command, "--force", "-q"]) == 0
    assert graph_of(tmp_path / "out.onnx") == from_python


def test_a_model_of_transformers_is_not_loaded_for_its_python(tmp_path, monkeypatch, capsys, files):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("htp_export.capabilities.huggingface.models._build", None)
    monkeypatch.setattr("htp_export.capabilities.huggingface.models._pretrained", None)
    huge = ["bert", "--random-weights", "--set", "hidden_size=120000", "--as-python"]
    assert main(["export", *huge, "-o", "out.onnx", "--verify"]) == 0
    assert main(["verify", files["FILE"], *huge]) == 0
    made, verified = capsys.readouterr().out.split("import htp_export\n")[1:]
    overrides = 'overrides={"hidden_size": 120000}'
    assert f'model = load_model("bert", random_weights=True, {overrides})' in made
    assert 'print(htp_export.verify(model, "out.onnx", kwargs=inputs))' in made
    assert 'inputs = example_inputs(model, shapes={"x": [2, 32]})' in verified


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"export {GPT2} --genai -o decoder/model.onnx", "--genai"),
        (f"verify FILE {GPT2}", "docs/huggingface.md"),
        (f"verify FILE {ENTRY} --outputs-from dump.npz", "--outputs-from"),
    ],
)
def test_a_command_that_is_not_one_call_says_why(
    words, reason, files, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([*arguments(words, files), "--as-python"]) == 2
    printed = capsys.readouterr().err
    assert "--as-python" in printed
    assert reason in printed
    assert list(tmp_path.iterdir()) == []


def test_a_pipeline_with_pytorch_as_python_runs(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    verified = "verify: {entry: 'tests.all_commands:example', isolated: true}"
    (tmp_path / "steps.yaml").write_text(f"steps: [optimize, {verified}]", encoding="utf-8")
    assert (
        main(["pipeline", "steps.yaml", "-m", files["FILE"], "-o", "out.onnx", "--as-python"]) == 0
    )
    exec(capsys.readouterr().out, {})
    assert "2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("profile FILE --runs 2 --threads 1 --optimization basic", "median of 2"),
        ("nodes FILE --node 0", "of first"),
    ],
)
def test_a_program_has_the_options_of_a_session_and_the_node(words, printed, files, capsys):
    assert main([*arguments(words, files), "--as-python", "--quiet"]) == 0
    program = capsys.readouterr().out
    exec(program, {})
    assert printed in capsys.readouterr().out, program
    if words.startswith("profile"):
        assert "options.intra_op_num_threads = 1" in program
        assert "onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC" in program


def test_the_program_of_a_page_writes_it(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = arguments("view FILE -o page.html --no-explorer", files)
    assert main([*words, "--as-python"]) == 0
    program = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    exec(program, {})
    assert (tmp_path / "page.html").exists()
    assert "page.html" in capsys.readouterr().out
