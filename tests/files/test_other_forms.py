"""Files that are no models: the error says what they are, and what to do with them; nothing in them is loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError, InputError, SelectorError

STATE = {"fc.weight": torch.zeros(2, 2)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save(STATE, "zip.pt")
    torch.save(STATE, "old.pt", _use_new_zipfile_serialization=False)
    save_file(STATE, "weights.safetensors")
    Path("empty.onnx").touch()
    Path("list.onnx").write_text("[1, 2]")
    Path("other.json").write_text(json.dumps({"a": 1}))
    Path("noise.onnx").write_bytes(b"\xff" * 99)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("zip.pt", "it is a file of torch.save, weights without a graph"),
        ("old.pt", "it is a file of torch.save"),
        ("weights.safetensors", "it is a safetensors file, weights without a graph"),
        ("empty.onnx", "it is empty"),
        ("list.onnx", "it is JSON of something else"),
        ("other.json", "it is JSON of something else"),
        ("noise.onnx", "not an ONNX model"),
    ],
)
def test_what_a_file_is_in_place_of_a_model(folder, file, said, capsys):
    with pytest.raises(FileError, match=f"{file}: not an ONNX model"):
        htp_export.info(file)
    assert main(["info", file]) == 2
    assert said in capsys.readouterr().err


def test_the_remedy_names_commands_on_the_command_line(folder, capsys):
    assert main(["info", "zip.pt"]) == 2
    said = capsys.readouterr().err
    assert "htp-export export" in said
    assert "htp-export bind" in said


def test_a_place_with_a_wrong_side_is_told_the_right_ones():
    from htp_export.format.selectors import places_of

    with pytest.raises(SelectorError, match="write 'encoder:in' or 'encoder:out'"):
        places_of("encoder:oot")


def test_a_node_that_there_is_not_by_number_or_by_parameter(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()).eval()
    program = htp_export.export(net, (torch.randn(2, 5, 3),), verbose=False)
    found = htp_export.nodes(program)
    with pytest.raises(InputError, match="counted from 0"):
        found.find(found.key_of("-1"))
    [stored] = found.parameters["0.weight"].initializers
    assert stored.name != "0.weight"  # it is transposed
    with pytest.raises(InputError, match=f"it is a parameter, stored as '{stored.name}'"):
        found.find("0.weight")
