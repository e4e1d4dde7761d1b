"""A file of inputs that holds none is refused, by every command, with the same words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from htp_export.tools import quantize_static
from tests.carry.test_carry import chain


@pytest.mark.parametrize(("name", "message"), [("none.npz", "holds no arrays"), ("none.json", "holds no shapes")])
@pytest.mark.parametrize(
    "command",
    ["carry a.onnx a.onnx -o c.onnx", "compare a.onnx a.onnx", "profile a.onnx", "cost a.onnx", "tree a.onnx"],
)
def test_a_file_of_inputs_that_is_empty_is_refused_by_every_command(
    tmp_path, monkeypatch, capsys, command, name, message
):
    monkeypatch.chdir(tmp_path)
    htp_export.load(chain(("Neg", "neg", "a"), ("Exp", "exp", "y"))).save("a.onnx")
    np.savez("none.npz")
    Path("none.json").write_text("{}")
    assert main([*command.split(), "--inputs", name]) == 2
    assert f"{name}: {message}" in capsys.readouterr().err
    assert not Path("c.onnx").exists()


def test_carry_compare_and_profile_refuse_a_mapping_without_inputs(tmp_path):
    file = tmp_path / "a.onnx"
    htp_export.load(chain(("Neg", "neg", "a"), ("Exp", "exp", "y"))).save(file)
    for run in (htp_export.compare, htp_export.carry):
        with pytest.raises(InputError, match="no value for input 'x'"):
            run(file, file, inputs={})
    with pytest.raises(InputError, match="no value for input 'x'"):
        htp_export.profile(file, {})


def test_quantize_static_refuses_a_file_without_arrays(tmp_path):
    np.savez(tmp_path / "none.npz")
    with pytest.raises(FileError, match=r"none\.npz: holds no arrays"):
        quantize_static(chain(("Neg", "neg", "a"), ("Exp", "exp", "y")), inputs=tmp_path / "none.npz")
