#!/usr/bin/env python3
"""The test suite in fresh environments: one for each torch release, or one with the lower bound of every dependency.

    python tools/matrix.py                               # torch 2.10, 2.13 and 2.15, the whole suite
    python tools/matrix.py --torch 2.15 -- -m torch      # one release; what follows "--" is passed to pytest
    python tools/matrix.py --torch 2.15 -- -m slow       # the sweeps, which CI leaves out; before every release
    python tools/matrix.py --lowest                      # every ">=" of pyproject.toml taken as "=="
    python tools/matrix.py --torch 2.15 --python python3.12 python3.13 -- -m torch    # with other interpreters
    python tools/matrix.py --folder environments         # keep the environments; a second run uses them again

Where a torch has an option of Dynamo that ``--settings`` names, the tests run once more with the option on. In each
environment pip also resolves every extra of the package, without installing it. The tables that are printed are
those of docs/compatibility.md. The exit status is 1 if an environment cannot be installed, an extra cannot be
resolved, a test fails or no test ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTALLED = ("test", "tools")  # the extras whose packages the tests use
SHOWN = (
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "numpy",
    "ml_dtypes",
    "rich",
    "typer",
)
SETTINGS = ["canonicalize_output_graph_node_order"]

INSTALLED_VERSIONS = """
import importlib.metadata, json
print(json.dumps({each.name: each.version for each in importlib.metadata.distributions()}))
"""

# Runs pytest with an option of torch._dynamo.config on; runs nothing where this torch has no such option.
WITH_SETTING = """
import sys, torch._dynamo.config as config
name, *arguments = sys.argv[1:]
if not hasattr(config, name):
    sys.exit(0)
setattr(config, name, True)
import pytest
sys.exit(pytest.main([*arguments, "-n", "0"]))  # other processes would not have the option
"""


@dataclass
class Outcome:
    """What became of one run of the tests.

    Attributes:
        name: What the row of the table is called.
        versions: Installed packages, by their names as PEP 503 writes them.
        counts: Tests by what became of them: ``passed``, ``skipped``, ``xfailed``, ``failed``.
        reasons: Why tests were skipped, and how many for each reason.
        failed: The tests that failed.
        minutes: What the tests took.
        installing: Minutes that the installation took.
        extras: What pip says of each extra: "ok", or why not.
        trouble: Why there was no run, if there was none.
    """

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    minutes: float = 0.0
    installing: float = 0.0
    extras: dict[str, str] = field(default_factory=dict)
    trouble: str = ""

    @property
    def good(self) -> bool:
        """Whether everything was installed, resolved and passed."""
        resolved = all(said == "ok" for said in self.extras.values())
        return not self.trouble and resolved and not self.failed and self.counts["passed"] > 0


class Environment:
    """A virtual environment with the package, its tests' requirements, and the given versions.

    Args:
        name: A name for folders and tables.
        folder: The folder to create it in.
        pins: Requirements that hold for everything that pip installs into it, such as ``torch==2.15.*``.
    """

    def __init__(self, name: str, folder: Path, pins: Sequence[str]) -> None:
        self.name = name
        self.folder = folder / name
        self.constraints = folder / f"{name}.txt"
        self.pins = pins
        self.log = folder / f"{name}.log"
        self.python = self.folder / "bin" / "python"

    def run(self, *command: str) -> tuple[int, str]:
        """Run the environment's Python in the repository; what it prints goes into the log as it comes.

        Returns:
            The exit status, and what was printed.
        """
        path = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        with self.log.open("a+", encoding="utf-8") as log:
            log.write(f"$ python {' '.join(command)}\n")
            log.flush()
            begun = log.tell()
            status = subprocess.call(
                [str(self.python), *command], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
            log.seek(begun)
            return status, log.read()

    def pip(self, *arguments: str) -> str:
        """Install something under the pins.

        Returns:
            "ok", or the first error that pip tells of.
        """
        self.constraints.write_text("".join(f"{pin}\n" for pin in self.pins), encoding="utf-8")
        status, printed = self.run(
            "-m", "pip", "install", "--quiet", "--constraint", str(self.constraints), *arguments
        )
        if status == 0:
            return "ok"
        errors = re.findall(r"^ERROR: (.*)", printed, re.MULTILINE)
        return errors[0] if errors else f"pip ended with status {status}"

    def create(self, python: str) -> str:
        """Make the environment, or bring an old one up to date; returns "ok", or why it cannot be installed."""
        if not self.python.exists():
            subprocess.run([python, "-m", "venv", str(self.folder)], check=True)
        return self.pip(f".[{','.join(INSTALLED)}]", "torch")

    def versions(self) -> dict[str, str]:
        """What is installed."""
        _, printed = self.run("-c", INSTALLED_VERSIONS)
        return {canonical(name): version for name, version in json.loads(printed).items()}

    def extras(self) -> dict[str, str]:
        """What pip says of installing each extra beside the torch that is there."""
        return {
            extra: self.pip("--dry-run", f".[{extra}]")
            for extra in PROJECT["optional-dependencies"]
        }

    def tests(self, arguments: Sequence[str], setting: str | None = None) -> Outcome | None:
        """Run the tests.

        Args:
            arguments: Passed to pytest.
            setting: An option of ``torch._dynamo.config`` to turn on.

        Returns:
            What became of them, or None if this torch has no such option.
        """
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        program = ["-m", "pytest"] if setting is None else ["-c", WITH_SETTING, setting]
        begun = time.monotonic()
        status, _ = self.run(*program, f"--junitxml={report}", "--quiet", *arguments)
        outcome = Outcome(self.name if setting is None else f"{self.name}, {setting}")
        outcome.minutes = (time.monotonic() - begun) / 60
        if report.exists():
            read_report(report, outcome)
        elif setting is not None and status == 0:
            return None
        else:
            outcome.trouble = f"pytest ended with status {status}"
        if not outcome.counts["passed"] and not outcome.trouble:
            outcome.trouble = "no test ran"
        return outcome


def canonical(name: str) -> str:
    """The name of a package with an underscore in place of each ``-``, ``_`` and ``.``."""
    return re.sub(r"[-_.]+", "_", name).lower()


def read_report(report: Path, outcome: Outcome) -> None:
    """Count the tests of a JUnit report."""
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.counts["failed"] += 1
            outcome.failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skipped is None:
            outcome.counts["passed"] += 1
        elif skipped.get("type") == "pytest.xfail":
            outcome.counts["xfailed"] += 1
        else:
            outcome.counts["skipped"] += 1
            outcome.reasons[skipped.get("message", "")] += 1


def lower_bounds() -> list[str]:
    """Every ``>=`` of the package and of the extras that its tests use, as ``==``."""
    extras = PROJECT["optional-dependencies"]
    texts = [
        *PROJECT["dependencies"],
        *(text for extra in ("ort", "view", *INSTALLED) for text in extras[extra]),
    ]
    pins = []
    for requirement in map(Requirement, texts):
        pins += [
            f"{requirement.name}=={part.version}"
            for part in requirement.specifier
            if part.operator == ">="
        ]
    return pins


def wanted(options: argparse.Namespace) -> dict[str, list[str]]:
    """Name of an environment → its pins. Of X.Y the newest release is meant, of X.Y.Z that one."""
    if options.lowest:
        return {"lowest": lower_bounds()}
    return {
        f"torch-{version}": [f"torch=={version}{'' if version.count('.') > 1 else '.*'}"]
        for version in options.torch
    }


def environments(folder: Path, options: argparse.Namespace) -> Iterator[tuple[Environment, str]]:
    """The environments with their interpreters; its name is in theirs if there are several."""
    for python in options.python:
        end = f"-{Path(python).name}" if len(options.python) > 1 else ""
        for name, pinned in wanted(options).items():
            yield Environment(f"{name}{end}", folder, pinned), python


def outcomes(
    environment: Environment, python: str, options: argparse.Namespace
) -> Iterator[Outcome]:
    """Install one environment and run the tests in it, once for each setting that its torch has."""
    begun = time.monotonic()
    said = environment.create(python)
    if said != "ok":
        yield Outcome(environment.name, trouble=said)
        return
    installing = (time.monotonic() - begun) / 60
    versions = environment.versions()
    extras = {} if options.no_extras else environment.extras()
    for setting in (None, *([] if options.lowest else options.settings)):
        outcome = environment.tests(options.pytest, setting)
        if outcome is not None:
            outcome.versions, outcome.installing = versions, installing
            outcome.extras = extras if setting is None else {}
            yield outcome


def tables(found: Sequence[Outcome]) -> Iterator[str]:
    """The lines of docs/compatibility.md: what became of the tests, why some were skipped, and the versions."""
    yield "| environment | passed | skipped | expected to fail | failed | minutes | installing | extras |"
    yield "|---|--:|--:|--:|--:|--:|--:|---|"
    for each in found:
        counts = " | ".join(
            str(each.counts[what]) for what in ("passed", "skipped", "xfailed", "failed")
        )
        bad = [f"{extra}: {said}" for extra, said in each.extras.items() if said != "ok"]
        extras = "; ".join(bad) or (f"{len(each.extras)} resolved" if each.extras else "")
        times = f"{each.minutes:.1f} | {each.installing:.1f}"
        yield f"| {each.name} | {counts} | {times} | {extras or each.trouble} |"
    yield ""
    environments = [each for each in found if each.versions and "," not in each.name]
    yield f"| package | {' | '.join(each.name for each in environments)} |"
    yield "|---" * (len(environments) + 1) + "|"
    for package in SHOWN:
        yield f"| {package} | {' | '.join(each.versions.get(package, '') for each in environments)} |"
    yield ""
    for each in found:
        yield from (
            f"skipped in {each.name}, {count}: {reason}"
            for reason, count in each.reasons.most_common()
        )
        yield from (f"failed in {each.name}: {test}" for test in each.failed)
        if each.trouble:
            yield f"{each.name}: {each.trouble}"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="+", default=["2.10", "2.13", "2.15"], metavar="VERSION")
    parser.add_argument(
        "--lowest",
        action="store_true",
        help="one environment with the lower bound of every dependency",
    )
    parser.add_argument(
        "--settings", nargs="*", default=SETTINGS, help="options of torch._dynamo.config to turn on"
    )
    parser.add_argument(
        "--folder", type=Path, help="where environments and logs stay (default: temporary)"
    )
    parser.add_argument(
        "--python", nargs="+", default=[sys.executable], help="the interpreters of the environments"
    )
    parser.add_argument("--no-extras", action="store_true", help="do not resolve the extras")
    parser.add_argument(
        "pytest", nargs="*", help="after --: what is passed to pytest, such as -m torch"
    )
    return parser.parse_args(arguments)


def main() -> int:
    options = parsed()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for environment, python in environments(folder, options):
            for outcome in outcomes(environment, python, options):
                found.append(outcome)
                print(
                    f"{outcome.name}: {outcome.trouble or dict(outcome.counts)}",
                    file=sys.stderr,
                    flush=True,
                )
    print("\n".join(tables(found)))
    return 0 if found and all(outcome.good for outcome in found) else 1


if __name__ == "__main__":
    sys.exit(main())
