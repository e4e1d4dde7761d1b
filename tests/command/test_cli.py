"""The command line, run in process: what it writes, what it shows, and its exit status."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import htp_export
from htp_export.command.main import main
from htp_export.exporter import capture_session
from tests import faults
from tests.handmade import small_file

SMALL = [
    "num_hidden_layers=1",
    "hidden_size=16",
    "num_attention_heads=2",
    "intermediate_size=32",
    "vocab_size=100",
]
BERT = [
    "export",
    "bert",
    "--random-weights",
    *(word for setting in SMALL for word in ("--set", setting)),
]
FACTORY = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)

    def forward(self, x, scale=None):
        return torch.relu(self.fc(x if scale is None else x * scale))

class Sized(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) if x.sum() > 0 else x

CALLS = []

class Unsteady(torch.nn.Module):
    def forward(self, x):
        CALLS.append(x)
        return x * len(CALLS)

def unsteady():
    return Unsteady(), (torch.randn(2, 4),)

class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x) * 2

def training():
    return Dropping().train(), (torch.randn(2, 4),)

def positional():
    return Net(), (torch.randn(2, 4), torch.randn(4))

def named():
    return Net().eval(), {"x": torch.randn(2, 4)}

def dynamic_control_flow():
    return Sized(), (torch.randn(2, 4),)

def large():
    return torch.nn.Linear(32, 32).eval(), (torch.randn(2, 32),)

def broken():
    raise RuntimeError("no weights today")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Each test has a module of its own name, since Python keeps what it has imported.
    (tmp_path / f"nets_{tmp_path.name}.py").write_text(FACTORY)
    return tmp_path


def owners(metadata) -> list[str]:
    return [entry.value for entry in metadata if entry.key in ("htp.module", "htp.owners")]


def entry(folder: Path, name: str) -> list[str]:
    return ["export", "--entry", f"nets_{folder.name}:{name}"]


def files(folder: Path) -> list[str]:
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix != ".py" and path.name != "__pycache__"
    )


class TestExport:
    @pytest.mark.long
    @pytest.mark.parametrize("exporter", ["--dynamo", "--torchscript"])
    def test_writes_a_tagged_file_shows_the_tree_and_verifies(self, folder, capsys, exporter):
        assert main([*BERT, exporter, "-o", "bert.onnx", "--verify"]) == 0
        out = capsys.readouterr().out
        assert "BertSelfAttention" in out
        assert re.search(r"every module agrees with PyTorch: (\d+) of \1 \(worst ", out)
        tagged = htp_export.load("bert.onnx")
        assert {node.op_type for node in tagged["encoder.layer.0.attention.self.query"].nodes} >= {
            "MatMul",
            "Add",
        }
        assert not tagged.untagged

    @pytest.mark.parametrize(
        "exporter", [pytest.param("--dynamo", marks=pytest.mark.slow), "--torchscript"]
    )
    def test_dynamic_axes_have_names(self, folder, exporter):
        command = [
            *BERT,
            exporter,
            "--dynamic",
            "batch,sequence",
            "-o",
            "bert.onnx",
            "--verify",
            "--quiet",
        ]
        assert main(command) == 0
        inputs = {value.name: value for value in onnx.load("bert.onnx").graph.input}
        dims = [dim.dim_param for dim in inputs["input_ids"].type.tensor_type.shape.dim]
        assert dims == ["batch", "sequence"]

    def test_shapes_come_from_a_file(self, folder):
        Path("shapes.json").write_text('{"input_ids": [2, 7]}')
        assert (
            main([*BERT, "--torchscript", "--shapes", "shapes.json", "-o", "bert.onnx", "--quiet"])
            == 0
        )
        shape = onnx.load("bert.onnx").graph.input[0].type.tensor_type.shape
        assert [dim.dim_value for dim in shape.dim] == [2, 7]

    @pytest.mark.long
    def test_opset_and_dtype_are_those_asked_for(self, folder):
        assert (
            main(
                [
                    *BERT,
                    "--opset",
                    "20",
                    "--dtype",
                    "float16",
                    "-o",
                    "bert.onnx",
                    "--quiet",
                    "--verify",
                ]
            )
            == 0
        )
        model = onnx.load("bert.onnx")
        assert model.opset_import[0].version == 20
        assert model.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16

    @pytest.mark.long
    def test_weights_go_beside_the_file_or_into_it(self, folder):
        assert main([*entry(folder, "large"), "-o", "out.onnx", "--quiet"]) == 0
        assert files(folder) == ["out.onnx", "out.onnx.data"]
        Path("out.onnx.data").unlink()
        assert (
            main([*entry(folder, "large"), "-o", "out.onnx", "--no-external-data", "--quiet"]) == 0
        )
        assert files(folder) == ["out.onnx"]

    @pytest.mark.long
    def test_a_map_brings_the_tags_back_after_a_tool_that_wrote_over_the_file(self, folder, capsys):
        assert main([*BERT, "--torchscript", "--embed-map", "-o", "bert.onnx", "--quiet"]) == 0
        assert (
            main(
                [
                    "run",
                    "onnxruntime",
                    "bert.onnx",
                    "-o",
                    "fast.onnx",
                    "--set",
                    "level=basic",
                    "--embed-map",
                ]
            )
            == 0
        )
        for file in ("bert.onnx", "fast.onnx"):
            proto = onnx.load(file, load_external_data=False)
            expected = [list(node.metadata_props) for node in proto.graph.node]
            for node in proto.graph.node:
                del node.metadata_props[:]
            onnx.save(proto, file)
            capsys.readouterr()
            assert main(["carry", file, "-o", file, "--in-place", "--json"]) == 0
            found = [
                node.metadata_props for node in onnx.load(file, load_external_data=False).graph.node
            ]
            assert [owners(entry) for entry in found] == [owners(entry) for entry in expected]

    def test_quiet_shows_nothing(self, folder, capsys):
        assert (
            main(
                [*entry(folder, "named"), "--torchscript", "-o", "net.onnx", "--quiet", "--verify"]
            )
            == 0
        )
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "")

    @pytest.mark.parametrize("exporter", ["--dynamo", "--torchscript"])
    @pytest.mark.parametrize(
        ("factory", "names"), [("positional", ["x", "scale"]), ("named", ["x"])]
    )
    def test_entry_gives_a_model_of_ones_own(self, folder, exporter, factory, names):
        assert (
            main([*entry(folder, factory), exporter, "-o", "net.onnx", "--verify", "--quiet"]) == 0
        )
        assert [value.name for value in onnx.load("net.onnx").graph.input] == names

    @pytest.mark.parametrize("exporter", ["--dynamo", "--torchscript"])
    def test_failed_verification_is_status_1_and_says_what_differs(self, folder, capsys, exporter):
        assert main([*entry(folder, "unsteady"), exporter, "-o", "net.onnx", "--verify"]) == 1
        captured = capsys.readouterr()
        assert "every module agrees" not in captured.out
        assert "htp-export: error: first wrong: (root): max " in captured.err

    def test_model_of_ones_own_is_exported_as_it_infers(self, folder):
        assert (
            main(
                [
                    *entry(folder, "training"),
                    "--torchscript",
                    "-o",
                    "net.onnx",
                    "--verify",
                    "--quiet",
                ]
            )
            == 0
        )

    def test_failed_export_is_status_1_and_leaves_what_was_there(self, folder, capsys):
        before = small_file(Path("net.onnx"))
        assert main([*entry(folder, "dynamic_control_flow"), "-o", "net.onnx"]) == 1
        captured = capsys.readouterr()
        assert "htp-export: error: the export failed" in captured.err
        assert "Traceback" not in captured.err
        assert files(folder) == ["net.onnx"]
        assert Path("net.onnx").read_bytes() == before

    @pytest.mark.long
    @pytest.mark.parametrize("exporter", ["--dynamo", "--torchscript"])
    def test_a_fault_of_the_capture_is_status_1_and_names_the_option_that_goes_on(
        self, folder, capsys, monkeypatch, exporter
    ):
        monkeypatch.setattr(capture_session, "make_tags", None)
        command = [*entry(folder, "named"), exporter, "-o", "net.onnx", "--quiet"]
        assert main(command) == 1
        captured = capsys.readouterr()
        assert "htp-export: error: htp_export failed while finding the owners" in captured.err
        assert "--allow-untagged" in captured.err
        assert "Traceback" not in captured.err
        assert files(folder) == []
        assert main([*command, "--allow-untagged", "--embed-map"]) == 0
        said = capsys.readouterr().err
        assert said.startswith(
            "htp-export: warning: the model is exported without module tags: htp_export failed"
        )
        model = onnx.load("net.onnx")
        assert model.graph.node
        assert not [entry.key for entry in model.metadata_props if entry.key.startswith("htp.")]
        assert main([*command[:-1], "--json", "--allow-untagged"]) == 0
        assert "finding the owners" in json.loads(capsys.readouterr().out)["untagged"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert") / "bert.onnx"
    options = ["--torchscript", "--no-external-data", "--dynamic", "batch,sequence"]
    assert main([*BERT, "-o", str(path), "--quiet", *options]) == 0
    return path


class TestVerify:
    """``htp-export verify`` makes the model anew, as ``export`` made it."""

    @pytest.fixture
    def wrong(self, exported, folder):
        tagged = htp_export.load(exported)
        faults.weight_changed(tagged, "encoder.layer.0.intermediate.dense")
        tagged.save("wrong.onnx")
        return "wrong.onnx"

    @pytest.mark.parametrize("mode", [[], ["--isolated"]])
    def test_a_file_that_agrees_is_status_0_and_one_line(self, exported, capsys, mode):
        assert main(["verify", str(exported), *BERT[1:], *mode]) == 0
        assert re.match(r"(\d+) of \1 modules agree \(worst \S+, \S+\)\n", capsys.readouterr().out)

    def test_all_shows_every_module(self, exported, capsys):
        assert main(["verify", str(exported), *BERT[1:], "--all"]) == 0
        assert "encoder.layer.0.attention.self.query " in capsys.readouterr().out

    @pytest.mark.parametrize("mode", [[], ["--isolated"]])
    def test_a_wrong_module_is_status_1_and_named(self, wrong, capsys, mode):
        assert main(["verify", wrong, *BERT[1:], *mode]) == 1
        captured = capsys.readouterr()
        assert captured.out.count("first wrong: encoder.layer.0.intermediate.dense: max ") == 1
        assert re.fullmatch(r"htp-export: error: \d+ of \d+ compared modules agree\n", captured.err)
        assert captured.out.splitlines()[1].startswith("encoder.layer.0.intermediate.dense")

    @pytest.mark.parametrize("option", ["--json", "--quiet"])
    def test_the_error_names_the_module_if_no_summary_is_printed(self, wrong, capsys, option):
        assert main(["verify", wrong, *BERT[1:], option]) == 1
        assert "first wrong: encoder.layer.0.intermediate.dense: max " in capsys.readouterr().err

    def test_json_and_tolerances(self, wrong, capsys):
        command = [
            "verify",
            wrong,
            *BERT[1:],
            "--json",
            "--select",
            "encoder.layer.*.intermediate.**",
        ]
        assert main(command) == 1
        result = json.loads(capsys.readouterr().out)
        assert (result["ok"], result["first_wrong"]) == (
            False,
            "encoder.layer.0.intermediate.dense",
        )
        assert main([*command, "--tolerance", "**=10,10"]) == 0

    def test_open_sizes_are_those_of_dims_else_of_the_example_inputs(
        self, exported, folder, capsys
    ):
        verify = ["verify", str(exported), *BERT[1:]]
        assert main([*verify, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["assumed"] == [
            "size 'batch' is 1",
            "size 'sequence' is 16",
        ]
        assert main([*verify, "--dims", "batch=3", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["assumed"] == ["size 'sequence' is 16"]
        Path("shapes.json").write_text('{"input_ids": {"shape": [2, 7]}}')
        assert main([*verify, "--dims", "batch=2", "--shapes", "shapes.json", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["assumed"] == ["size 'sequence' is 7"]

    @pytest.mark.parametrize(
        ("command", "message"),
        [
            (
                "verify {} bert --dims nosuch=3",
                "no open dimension 'nosuch' in this model, only 'batch', 'sequence'",
            ),
            (
                "verify {} bert --dims batch=3 --shapes s.json",
                "'input_ids' is [2, 7], but --dims has batch = 3",
            ),
            (
                "cost {} --dims batch=3 --shapes s.json",
                "'input_ids' is [2, 7], but --dims has batch = 3",
            ),
            (
                "profile {} --dims batch=3 --shapes s.json",
                "'input_ids' is [2, 7], but --dims has batch = 3",
            ),
            (
                "compare {0} {0} --dims batch=3 --data s.npz",
                "'input_ids' is [2, 7], but --dims has batch = 3",
            ),
            (
                "verify {} --entry nets:made --dims batch=3",
                "--dims is for a SOURCE; with --entry, the factory decides",
            ),
        ],
    )
    def test_sizes_that_do_not_fit_are_refused_alike(
        self, exported, folder, capsys, command, message
    ):
        Path("s.json").write_text(
            '{"input_ids": [2, 7], "attention_mask": [2, 7], "token_type_ids": [2, 7]}'
        )
        names = ("input_ids", "attention_mask", "token_type_ids")
        np.savez("s.npz", **{name: np.ones((2, 7), np.int64) for name in names})
        assert main(command.format(exported).split()) == 2
        assert message in capsys.readouterr().err

    def test_a_file_of_another_model_is_what_is_wrong_not_its_inputs(self, folder, capsys):
        assert main([*entry(folder, "named"), "--torchscript", "-o", "net.onnx", "--quiet"]) == 0
        assert main(["verify", "net.onnx", *BERT[1:]]) == 2
        error = capsys.readouterr().err
        assert error == "htp-export: error: net.onnx: was not exported from this BertModel: " + (
            "its module '(root)' has the class Net, not BertModel\n"
        )

    def test_a_model_of_ones_own_has_the_weights_of_the_seed(self, folder):
        assert main([*entry(folder, "named"), "-o", "net.onnx", "--seed", "3", "--quiet"]) == 0
        named = ["--entry", f"nets_{folder.name}:named"]
        assert main(["verify", "net.onnx", *named, "--seed", "3"]) == 0
        assert main(["verify", "net.onnx", *named, "--seed", "4"]) in (1, 2)

    def test_compare_takes_two_files_and_inputs(self, exported, wrong, capsys):
        assert main(["compare", str(exported), str(exported), "--seed", "2"]) == 0
        capsys.readouterr()
        assert main(["compare", str(exported), wrong, "--json"]) == 1
        assert (
            json.loads(capsys.readouterr().out)["first_wrong"]
            == "encoder.layer.0.intermediate.dense"
        )
        shape = [1, 16]
        np.savez(
            "x.npz", input_ids=np.ones(shape, np.int64), attention_mask=np.ones(shape, np.int64)
        )
        assert main(["compare", str(exported), wrong, "--data", "x.npz"]) in (1, 2)


def test_debug_shows_the_traceback(folder, capsys):  # other wrong inputs are in test_wrong_input.py
    assert main(["--debug", *entry(folder, "broken"), "-o", "x.onnx"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"htp-export {htp_export.__version__}\n"


@pytest.mark.parametrize(("words", "listed"), [([], "  tree  "), (["lora"], "  fuse  ")])
def test_without_a_command_the_help_is_shown(capsys, words, listed):
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert listed in shown
    assert main([*words, "--help"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("words", "nearest"), [("quantise a.onnx", "quantize"), ("lora insrt", "insert")]
)
def test_an_unknown_command_names_the_nearest(capsys, words, nearest):
    assert main(words.split()) == 2
    assert f"Did you mean '{nearest}'?" in capsys.readouterr().err


def test_carry_runs_both_files_on_inputs(tmp_path, capsys):
    from tests.carry.test_carry import chain, rewritten

    htp_export.load(chain(("Neg", "neg", "a"), ("Exp", "exp", "b"), ("Sqrt", "root", "y"))).save(
        tmp_path / "a.onnx"
    )
    made = rewritten(
        ("Exp", ["x"], "e"),
        ("Reciprocal", ["e"], "t"),
        ("Sqrt", ["t"], "r"),
        ("Max", ["r", "r"], "y"),
    )
    htp_export.load(made).save(tmp_path / "b.onnx")
    np.savez(
        tmp_path / "run.npz", x=np.random.default_rng(0).uniform(0.5, 2, (2, 4)).astype(np.float32)
    )
    (tmp_path / "shapes.json").write_text('{"x": [2, 4]}')
    command = [
        "carry",
        str(tmp_path / "a.onnx"),
        str(tmp_path / "b.onnx"),
        "-o",
        str(tmp_path / "c.onnx"),
        "--json",
    ]
    for option, file in (("--data", "run.npz"), ("--shapes", "shapes.json")):
        assert main([*command, option, str(tmp_path / file)]) == 0
        assert "values" in json.loads(capsys.readouterr().out)["recovered"]
    assert main([*command, "--dims", "batch=2"]) == 2
