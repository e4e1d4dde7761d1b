"""A new pass, adapter, formula or command is one new file in a copy of the package; an engine is an entry point."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import htp_export


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package."""
    copy = tmp_path_factory.mktemp("copy") / "htp_export"
    shutil.copytree(Path(htp_export.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def run(package: Path, *arguments: str) -> str:
    """What Python prints with the copy in place of the package."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=package.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def drop(package: Path, name: str, source: str) -> None:
    (package / name).write_text(textwrap.dedent(source), encoding="utf-8")


def test_a_formula_is_one_file(package: Path) -> None:
    drop(
        package,
        "capabilities/cost/formulas/mine.py",
        """
        from htp_export.capabilities.cost.work import Work

        FORMULAS = {("my.own", "Mystery"): lambda step: Work(macs=7)}
        """,
    )
    code = """
import onnx_ir as ir, htp_export
node = ir.node("Mystery", [ir.val("x", ir.DataType.FLOAT, [2])], domain="my.own", name="n")
graph = ir.Graph(node.inputs, node.outputs, nodes=[node], opset_imports={"": 20, "my.own": 1})
report = htp_export.cost(ir.Model(graph, ir_version=10))
print(htp_export.__file__, report.modules[""].macs, report.uncounted)
"""
    assert run(package, "-c", code) == f"{package / '__init__.py'} 7 {{}}\n"


def test_a_command_is_one_file(package: Path) -> None:
    drop(
        package,
        "capabilities/carry/greet_command.py",
        """
        from typing import Annotated
        import typer

        EXAMPLE = "Ada"

        def greet_command(name: Annotated[str, "Who."], loud: Annotated[bool, "With a sign."] = False) -> None:
            \"\"\"Say hello.\"\"\"
            typer.echo(f"hello {name}{'!' * loud}")
        """,
    )
    assert run(package, "-m", "htp_export", "greet", "Ada", "--loud") == "hello Ada!\n"
    assert "Say hello." in run(package, "-m", "htp_export", "--help")
    told = run(package, "-m", "htp_export", "greet", "--help")
    assert "Who." in told
    assert "--loud  With a sign." in told
    assert "--no-loud" not in told
    assert "Example: htp-export greet Ada" in told


def test_the_version_is_said_without_importing_the_commands(package: Path) -> None:
    code = "import sys; from htp_export.command.main import main; main(['--version']); print(*sys.modules)"
    assert not [name for name in run(package, "-c", code).split() if name.endswith("_command")]


def test_an_adapter_of_a_tool_is_one_file(package: Path) -> None:
    drop(
        package,
        "capabilities/carry/adapters/doubling.py",
        """
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
    )
    code = """
import onnx_ir as ir, htp_export
tags = {"htp.module": "act", "htp.reason": "scope"}
relu = ir.node("Relu", [ir.val("x", ir.DataType.FLOAT, [2])], name="n", metadata_props=tags)
relu.outputs[0].name, relu.outputs[0].dtype, relu.outputs[0].shape = "y", ir.DataType.FLOAT, ir.Shape([2])
graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20}, name="net")
[node] = htp_export.tools.doubler(ir.Model(graph, ir_version=10)).model.graph
print(node.op_type, node.metadata_props["htp.module"])
"""
    assert run(package, "-c", code) == "Abs act\n"
    assert "doubler" in run(package, "-m", "htp_export", "run", "--help")


def test_a_pass_is_one_file(package: Path) -> None:
    drop(
        package,
        "capabilities/optimize/passes/note_nothing.py",
        """
        import onnx_ir as ir

        from htp_export.capabilities.optimize.registry import register

        @register("note_nothing", level="exact", after="eliminate_dead_nodes")
        class NoteNothing(ir.passes.InPlacePass):
            \"\"\"Changes nothing.\"\"\"

            def call(self, model):
                return ir.passes.PassResult(model, modified=False)
        """,
    )
    code = """
from htp_export.capabilities.optimize.registry import choose
names = [info.name for info in choose("default", "exact")]
print(names.index("note_nothing") - names.index("eliminate_dead_nodes"))
"""
    assert run(package, "-c", code) == "1\n"
    listed = run(package, "-m", "htp_export", "optimize", "--list")
    assert [line.split()[:2] for line in listed.splitlines() if "Changes nothing." in line] == [
        ["note_nothing", "exact"]
    ]


def test_an_engine_of_another_package_is_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def engine():\n    return 7\n")
    info = tmp_path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[htp_export.profile]\nmine = mine:engine\ngone = no_such_module\n")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from htp_export.discovery import plug_in
from htp_export.errors import InputError
print(plug_in("profile", "mine")())
for name in ("gone", "other"):
    try:
        plug_in("profile", name)
    except InputError as error:
        print(error)
"""
    first, gone, other = run(Path(htp_export.__file__).parent, "-c", code).splitlines()
    assert first == "7"
    assert gone == "profile: the plug-in 'gone' (no_such_module) cannot be loaded: No module named 'no_such_module'"
    assert other.startswith("profile: no plug-in 'other'; there are: gone, mine")
