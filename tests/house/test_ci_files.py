"""CI, of users and of this project: the scripts of action.yml and the hooks run as they stand; facts agree."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import htp_export

ROOT = Path(__file__).parents[2]
BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="no bash")
NET = """
import torch

def make():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    return net.eval(), (torch.randn(2, 64),)

def wrong():
    net, args = make()
    net[2].weight.data.mul_(2)
    return net, args
"""


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


ACTION = read("action.yml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: str) -> Path:
    """The current folder, with a model, an exported file and an optimised one; its path has a space, as on runners."""
    inside = tmp_path / "a b"
    inside.mkdir()
    monkeypatch.chdir(inside)
    monkeypatch.setenv("PATH", forked)
    Path("net.py").write_text(NET, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(NET, names)
    net, args = names["make"]()
    htp_export.export(net, args, "before.onnx", verbose=False)
    htp_export.prune("before.onnx", {"0": 0.5}, "net.onnx")
    return inside


def act(folder: Path, **inputs: str) -> dict[str, int]:
    """Run the scripts of the action whose conditions hold: name of the step → exit status."""
    given = {name: about.get("default", "") for name, about in ACTION["inputs"].items()} | inputs
    values = {f"inputs.{name}": value for name, value in given.items()}
    values |= {"runner.temp": str(folder / "temp"), "github.action_path": str(ROOT)}
    done = {}
    for step in ACTION["runs"]["steps"]:
        wanted = re.findall(r"inputs\.(\w+) != ''", step.get("if", ""))
        if "run" not in step or not all(given[name] for name in wanted):
            continue
        environment = {
            name: re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda found: values[found[1]], text)
            for name, text in step["env"].items()
        }
        run = subprocess.run(
            [str(BASH), "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env={**os.environ, **environment},
            capture_output=True, text=True, encoding="utf-8", check=False,
        )  # fmt: skip
        done[step["name"]] = run.returncode
        print(step["name"], run.stdout, run.stderr)
    return done


@needs_bash
class TestAction:
    @pytest.mark.long
    def test_everything_holds_and_the_pages_are_kept(self, folder):
        inputs = {
            "before": "net.onnx",
            "verify": "--entry net:make",
            "budgets": "class:Linear=60000ms\n\n.=60000ms\n",
        }
        done = act(folder, file="before.onnx", profile="--runs 1 --threads 1", **inputs)
        assert done == {"Install": 0, "Diff": 0, "Verify": 0, "Profile": 0, "Page": 0}
        kept = folder / "temp" / "htp-export"
        assert sorted(file.name for file in kept.iterdir()) == [
            "diff.html",
            "index.html",
            "profile.json",
        ]
        assert json.loads((kept / "profile.json").read_text(encoding="utf-8"))["runs"] == 1
        assert "total_ms" in (kept / "index.html").read_text(encoding="utf-8")

    def test_what_does_not_hold_fails_its_step_and_the_page_is_there(self, folder, capfd):
        done = act(
            folder,
            file="net.onnx",
            verify="--entry net:make",
            budgets=".=0.000001ms",
            profile="--runs 1",
        )
        assert done == {"Install": 0, "Verify": 1, "Profile": 1, "Page": 0}
        assert (folder / "temp" / "htp-export" / "index.html").stat().st_size > 1000
        assert "over budget: (root) takes" in capfd.readouterr().out

    @pytest.mark.parametrize(
        ("package", "installed"),
        [("", "/the action[all]"), ("htp-export==0.1.0", "htp-export==0.1.0")],
    )
    def test_what_is_not_there_is_installed(self, package, installed, tmp_path):
        python = tmp_path / "python"
        python.write_text('#!/bin/sh\nprintf "%s|" "$@"\n', encoding="utf-8", newline="\n")
        python.chmod(0o755)
        paths = os.pathsep.join([str(tmp_path), "/usr/bin", "/bin"])
        environment = {
            "PATH": paths,
            "RESULTS": str(tmp_path / "new"),
            "PACKAGE": package,
            "ACTION": "/the action",
        }
        script = ACTION["runs"]["steps"][0]["run"]
        run = subprocess.run(
            [str(BASH), "-eo", "pipefail", "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout == f"-m|pip|install|{installed}|"

    def test_inputs_are_not_read_as_shell(self, folder):
        done = act(
            folder,
            file="$(touch one).onnx",
            verify="; touch two",
            budgets="`touch three`=1ms",
            profile="&& touch 4",
        )
        assert done == {"Install": 0, "Verify": 2, "Profile": 2, "Page": 2}
        assert sorted(file.name for file in folder.iterdir() if file.suffix == "") == ["temp"]

    def test_scripts_hold_no_expressions_and_every_input_is_used(self):
        steps = ACTION["runs"]["steps"]
        assert [step["name"] for step in steps if "${{" in step.get("run", "")] == []
        assert all("cancelled()" in step["if"] for step in steps[1:]), (
            "each runs if one before it failed"
        )
        used = set(re.findall(r"inputs\.(\w+)", yaml.safe_dump(steps)))
        assert used == set(ACTION["inputs"])
        page = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
        assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == used


@pytest.mark.long
def test_hooks_run_as_they_stand(folder):
    hooks = {hook["id"]: hook for hook in read(".pre-commit-hooks.yaml")}
    arguments = {
        "htp-export-verify": (
            ["before.onnx", "--entry", "net:make"],
            ["before.onnx", "--entry", "net:wrong"],
        ),
        "htp-export-profile": (
            ["net.onnx", "--runs=1"],
            ["net.onnx", "--runs=1", "--budget=.=0.000001ms"],
        ),
    }
    assert hooks.keys() == arguments.keys()
    for name, (right, wrong) in arguments.items():
        assert not hooks[name]["pass_filenames"]
        assert re.search(hooks[name]["files"], "a/net.onnx")
        for given, status in ((right, 0), (wrong, 1)):
            command = [*hooks[name]["entry"].split(), *given]
            run = subprocess.run(command, capture_output=True, check=False)
            assert run.returncode == status, run.stderr.decode()


def test_the_workflow_runs_what_is_there_and_gives_the_action_inputs_that_it_has():
    jobs = read(".github/workflows/ci.yml")["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    given = [step["with"].keys() for step in steps if step.get("uses") == "./"]
    assert given
    assert all(keys <= ACTION["inputs"].keys() for keys in given)
    assert {"run": ".ci/run"} in jobs["linux"]["steps"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_facts_in_several_files_are_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = read("CITATION.cff")
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert citation["title"] == project["name"]
    lowest = project["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in project["classifiers"]
    for file in (".github/workflows/ci.yml", "docs/ci.md"):
        assert set(
            re.findall(r'python-version: "(.*?)"', (ROOT / file).read_text(encoding="utf-8"))
        ) == {lowest}


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="no clone")
def test_what_git_tracks_is_released():
    """`tools/release_check.py` compares the built archive; here, what pyproject.toml lists."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"][
        "build"
    ]
    listed = tuple(build["targets"]["sdist"]["include"])
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    left = [file for file in filter(None, tracked) if not f"/{file}".startswith(listed)]
    assert left == [".gitignore", "pyproject.toml"], "hatchling adds these itself"
