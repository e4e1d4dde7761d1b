"""A new pass, adapter, formula or command is one new file: it is dropped into a copy of the package, and works."""

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
        "costs/formulas/mine.py",
        """
        from htp_export.costs.work import Work

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
        "cli/greet_command.py",
        """
        from typing import Annotated
        import typer

        EXAMPLE = "Ada"

        def greet_command(name: Annotated[str, typer.Argument()], loud: bool = False) -> None:
            \"\"\"Say hello.\"\"\"
            typer.echo(f"hello {name}{'!' * loud}")
        """,
    )
    assert run(package, "-m", "htp_export", "greet", "Ada", "--loud") == "hello Ada!\n"
    assert "Say hello." in run(package, "-m", "htp_export", "--help")
    assert "Example: htp-export greet Ada" in run(package, "-m", "htp_export", "greet", "--help")


def test_the_version_is_said_without_importing_the_commands(package: Path) -> None:
    code = "import sys; from htp_export.cli.main import main; main(['--version']); print(*sys.modules)"
    assert not [name for name in run(package, "-c", code).split() if name.endswith("_command")]
