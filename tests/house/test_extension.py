"""A new pass, adapter, formula or command is one new file in a copy of the package; an engine is an entry point."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import htp_export
from htp_export.discovery import plug_in
from htp_export.errors import InputError

NEW_FILES = {
    "costs/formulas/mine.py": """
from htp_export.costs.work import Work

FORMULAS = {("my.own", "Mystery"): lambda step: Work(macs=7)}
""",
    "capabilities/carry/greet_command.py": """
from typing import Annotated
import typer

EXAMPLE = "Ada"

def greet_command(name: Annotated[str, "Who."], loud: Annotated[bool, "With a sign."] = False) -> None:
    \"\"\"Say hello.\"\"\"
    typer.echo(f"hello {name}{'!' * loud}")
""",
    "capabilities/carry/adapters/doubling.py": """
import onnx

from htp_export.capabilities.carry.adapting import adapter

__all__ = ["doubler"]

@adapter
def doubler(source, _, operator="Abs"):
    \"\"\"Replace the first operator.\"\"\"
    changed = onnx.load(source)
    changed.graph.node[0].op_type = operator
    return changed
""",
    "capabilities/optimize/passes/note_nothing.py": """
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import register

@register("note_nothing", level="exact", after="eliminate_dead_nodes")
class NoteNothing(ir.passes.InPlacePass):
    \"\"\"Changes nothing.\"\"\"

    def call(self, model):
        return ir.passes.PassResult(model, modified=False)
""",
}
PROGRAM = """
import contextlib, io, json, sys
from htp_export.command.main import main

def shown(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(list(words))
    return out.getvalue()

version = shown("--version")
commands = [name for name in sys.modules if name.endswith("_command")]

import onnx_ir as ir, htp_export
from htp_export.capabilities.optimize.registry import choose

def model(op, domain):
    tags = {"htp.module": "act", "htp.reason": "scope"}
    node = ir.node(op, [ir.val("x", ir.DataType.FLOAT, [2])], domain=domain, name="n", metadata_props=tags)
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", ir.DataType.FLOAT, ir.Shape([2])
    opsets = {"": 20, "my.own": 1}
    return ir.Model(ir.Graph(node.inputs, node.outputs, nodes=[node], opset_imports=opsets, name="net"), ir_version=10)

cost = htp_export.cost(model("Mystery", "my.own"))
[node] = htp_export.tools.doubler(model("Relu", "")).model.graph
print(json.dumps({
    "package": htp_export.__file__, "version": version, "commands": commands,
    "cost": [cost.modules[""].macs, cost.uncounted],
    "greet": shown("greet", "Ada", "--loud"), "greet help": shown("greet", "--help"), "help": shown("--help"),
    "tool": [node.op_type, node.metadata_props["htp.module"]], "run help": shown("run", "--help"),
    "passes": [info.name for info in choose("default", "exact")], "optimize list": shown("optimize", "--list"),
}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program says that runs with a copy of the package which has the new files."""
    copy = tmp_path_factory.mktemp("copy") / "htp_export"
    shutil.copytree(
        Path(htp_export.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, source in NEW_FILES.items():
        (copy / name).write_text(source, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=environment, cwd=copy.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["package"] == str(copy / "__init__.py")
    return found


@pytest.mark.long
def test_a_formula_is_one_file(said):
    assert said["cost"] == [7, {}]


def test_a_command_is_one_file(said):
    assert said["greet"] == "hello Ada!\n"
    assert "Say hello." in said["help"]
    for word in ("Who.", "--loud With a sign.", "Example: htp-export greet Ada"):
        assert word in " ".join(said["greet help"].split())
    assert "--no-loud" not in said["greet help"]


def test_the_version_is_said_without_importing_the_commands(said):
    assert (said["version"], said["commands"]) == (f"htp-export {htp_export.__version__}\n", [])


def test_an_adapter_of_a_tool_is_one_file(said):
    assert said["tool"] == ["Abs", "act"]
    assert "doubler" in said["run help"]


def test_a_pass_is_one_file(said):
    assert said["passes"].index("note_nothing") == said["passes"].index("eliminate_dead_nodes") + 1
    listed = [
        line.split()[:2]
        for line in said["optimize list"].splitlines()
        if "Changes nothing." in line
    ]
    assert listed == [["note_nothing", "exact"]]


def test_an_engine_of_another_package_is_an_entry_point(tmp_path, monkeypatch):
    (tmp_path / "engine_of_mine.py").write_text("def engine():\n    return 7\n")
    info = tmp_path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[htp_export.profile]\nmine = engine_of_mine:engine\ngone = no_such_module\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert plug_in("profile", "mine")() == 7
    gone = r"profile: the plug-in 'gone' \(no_such_module\) cannot be loaded: No module named 'no_such_module'"
    with pytest.raises(InputError, match=gone):
        plug_in("profile", "gone")
    with pytest.raises(InputError, match="profile: no plug-in 'other'; there are: gone, mine"):
        plug_in("profile", "other")
