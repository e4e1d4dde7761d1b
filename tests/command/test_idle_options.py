"""Options that would do nothing are refused: beside others, given twice, empty, or for what a model does not have."""

from pathlib import Path

import pytest
import torch

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError

CODE = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Linear(8, 8)), {"input": torch.randn(2, 8)}
"""
ENTRY = "export --entry CODE:net -o o.onnx"
BERT = "export bert --random-weights -o o.onnx"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("made") / "net.onnx"
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    htp_export.export(net, (torch.randn(2, 8),), file, verbose=False)
    return file


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        # for what the model does not have
        f"{ENTRY} --attention banana", f"{ENTRY} --revision main", f"{ENTRY} --trust-remote-code",
        f"{ENTRY} --two-files", f"{ENTRY} --one-file", f"{ENTRY} --cache-names transformers",
        f"{ENTRY} --decompose-attention", f"{ENTRY} --keep-attention", f"{ENTRY} --js-dtypes q4",
        f"{ENTRY} --quiet --json", f"{BERT} --set num_hidden_layers=-3", f"{BERT} --set hidden_dropout_prob=-1",
        "export . --revision main -o o.onnx",
        "tree --entry CODE:net --attention eager", "tree FILE --seed 3", "view FILE --revision main -o o.html",
        "cost FILE --trust-remote-code", "carry FILE FILE -o o.onnx --task fill-mask",
        "carry FILE FILE -o o.onnx --random-weights", "carry FILE FILE -o o.onnx --attention eager",
        # given twice, or empty
        "optimize FILE -o a.onnx -o o.onnx", "profile FILE --runs 2 --runs 3",
        "view FILE --explorer --no-explorer -o o.html",
        f"{BERT} --set hidden_size=8 --set hidden_size=16", "run onnxruntime FILE -o o.onnx --set a=1 --set a=2",
        "cost FILE --dims n=1,n=2", ["tree", "FILE", "--select", ""], "tree FILE --columns ,",
        "place FILE --show --provider ,",
        ["optimize", "FILE", "-o", "o.onnx", "--passes", ""],
        # beside others
        "tree FILE --json --csv", "nodes FILE --json --csv", "sensitivity FILE --json --csv",
        "cost FILE --json --sort flops", "cost FILE --json --depth 1",
        "place FILE --rule .=cpu -o o.onnx --json --select 0",
        "tree FILE --json --no-fold", "nodes FILE --json --table modules", "diff FILE FILE --json --only-changed",
        "forensics FILE --list --depth 1", "forensics FILE --json --list", "profile FILE --json --sort total",
        "quantize FILE int8 --dry-run -o o.onnx", "quantize FILE int8 --dry-run --data x.npz",
        "quantize FILE int8 -o o.onnx --data x.npz --seed 3", "optimize FILE -o o.onnx --data x.npz",
        "sensitivity FILE --estimate --runs 3", "sensitivity FILE --estimate --alone",
        "sensitivity FILE --by-module", "optimize --list FILE", "optimize FILE -o o.onnx --depth 2",
        "prune FILE --rule 0=0.5 --seed 3 -o o.onnx", "partition FILE 2 -o stages --genai-config x.json",
        "partition FILE 2 --balance flops 1 -o stages", "place FILE --rule .=cpu --slack 0.5 -o o.onnx",
        "view FILE --dims n=1 -o o.html", "view --entry CODE:net --measure cost --data x.npz -o o.html",
        "view FILE --port 80 -o o.html", "view FILE --netron --weights -o o.json", "cost FILE --nodes",
        "cost FILE --fused --columns flops", "search FILE --choices int4 --study x",
        "search FILE --choices int4 --grace 3", "search FILE --choices int4 --runs 3", "pipeline FILE --fresh",
        "compare FILE FILE --data x.npz --seed 3", "quantize FILE int8 --plan-for ort --data x.npz -o o.json",
        "quantize FILE int8 --plan-for ort --csv", "place FILE --provider cpu -o o.onnx", "place FILE --show -o o.onnx",
        "place FILE --rule .=cpu --show", "place FILE --show --budget cpu=1MB", "functions FILE 0 --undo -o o.onnx",
        "profile FILE --engine x --measured times.json --runs 3",
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str | list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code = tmp_path / f"code_{tmp_path.name}.py"
    code.write_text(CODE)
    words = command.split() if isinstance(command, str) else command
    assert main([word.replace("FILE", str(made)).replace("CODE", code.stem) for word in words]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert "--" in error or "-o" in error or "negative" in error
    assert [
        path.name for path in tmp_path.iterdir() if path.suffix != ".pyc" and path.is_file()
    ] == [code.name]


def test_negative_ids_of_a_config_mean_none():
    from htp_export.huggingface import load_model

    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    model = load_model(
        "gpt2",
        random_weights=True,
        overrides={"n_layer": 1, "n_embd": 8, "n_head": 2, "eos_token_id": -1},
    )
    assert model.config.eos_token_id == -1
    with pytest.raises(InputError, match="num_hidden_layers=12, and -1 is negative"):
        load_model("bert", random_weights=True, overrides=sizes | {"num_hidden_layers": -1})
