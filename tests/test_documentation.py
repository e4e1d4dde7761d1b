"""The commands and snippets of README and docs run from top to bottom as they stand, in one folder."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from htp_export.cli import main as program

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_THE_HUB = ("google-bert/", "hub.onnx")


def blocks(page: Path) -> list[str]:
    """The code of a page: what is indented by four, and what stands between fences without a language or in a shell."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    unfenced = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^ {4}.*\n)+", unfenced, re.MULTILINE)
    return [*fenced, *indented]


def commands(page: Path) -> list[str]:
    lines = [line.strip().removeprefix("$ ") for block in blocks(page) for line in block.splitlines()]
    return [line for line in lines if line.startswith("htp-export ")]


def test_the_commands_of_a_page_are_found():
    assert len(commands(README)) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_one_that_there_is(page):
    known = {name for name, _, _ in program._COMMANDS}
    used = {line.split()[1] for line in commands(page)}
    assert used <= known


@pytest.mark.slow
def test_the_commands_of_the_readme_run_as_they_stand(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    failed = []
    for line in commands(README):
        if any(word in line for word in NEEDS_THE_HUB):
            continue
        shell = line.replace("htp-export ", f"{sys.executable} -m htp_export ", 1)
        run = subprocess.run(shell, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
        if run.returncode:
            failed.append(f"{line}\n{run.returncode}: {run.stderr}")
    assert not failed, "\n".join(failed)


def test_the_snippets_of_the_readme_run_from_top_to_bottom(tmp_path):
    snippets = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 5
    program = tmp_path / "snippets.py"
    program.write_text("\n".join(snippets), encoding="utf-8")
    run = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
