"""Without ``htp_export_plugins`` the package works, and asking for one of its engines says what is not there."""

import ast
import sys
from pathlib import Path

import pytest
import torch

import htp_export
from htp_export.discovery import plug_ins
from htp_export.errors import InputError

PLUG_INS = [
    (capability, name)
    for capability in ("export_plan", "partition", "profile", "quantize")
    for name, entry in sorted(plug_ins(capability).items())
    if entry.value.startswith("htp_export_plugins.")
]


def test_the_package_imports_no_plug_in():
    for file in Path(htp_export.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "htp_export_plugins" in text else ():
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in modules if name.startswith("htp_export_plugins")], file


def test_every_plug_in_is_tried():
    assert {name for _, name in PLUG_INS} == {"nncf", "openvino", "ray", "tensorrt", "triton"}


@pytest.mark.long
@pytest.mark.parametrize(("capability", "name"), PLUG_INS)
def test_a_plug_in_that_is_absent_is_an_input_error(capability, name, tmp_path, monkeypatch):
    for module in [module for module in sys.modules if module.startswith("htp_export_plugins.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "htp_export_plugins", None)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).eval()
    model = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
    ask = {
        "partition": lambda: htp_export.partition(model, 2, tmp_path / "stages", serve=name),
        "profile": lambda: htp_export.profile(model, engine=name),
        "quantize": lambda: htp_export.quantize(
            model, {"0": {"precision": "int8", "engine": name}}, tmp_path / "a.onnx"
        ),
    }[capability]
    with pytest.raises(InputError, match=f"{capability}: the plug-in '{name}' .* cannot be loaded"):
        ask()
    assert list(tmp_path.iterdir()) == []
