"""Names of weights that are not there: a folder that is missing is no hub id."""

import pytest
import torch

import htp_export
from htp_export.errors import FileError


@pytest.mark.long
@pytest.mark.parametrize("name", ["finetuned/", "a/b/c", "-x/y", "./there", "owner/"])
def test_a_missing_folder_is_named_and_no_host_is_asked(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
    htp_export.export(net, (torch.randn(2, 4),), "net.onnx")
    for command in (
        lambda: htp_export.bind("net.onnx", name, "new.onnx"),
        lambda: htp_export.quantize("net.onnx", "int8-weights", "new.onnx", weights=name),
    ):
        with pytest.raises(FileError, match="is missing"):
            command()
    assert not (tmp_path / "new.onnx").exists()
