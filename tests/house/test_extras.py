"""The package without its extras: it exports, reads and cuts, and names the extra of everything else."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from htp_export import extras
from htp_export.errors import InputError, TorchChangedError
from htp_export.exporter.capture.patching import Patch

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
PROJECT_TABLE = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]

IN_CORE = (Path(__file__).parent / "core_alone.py").read_text(encoding="utf-8")
"""A program for a process in which the packages of its arguments are missing."""


def packages_of_extras() -> set[str]:
    """The packages that extras install and that the package itself does not depend on, as they are imported."""
    core = {name_of(line) for line in PROJECT_TABLE["dependencies"]}
    # extras name the project itself, to install other extras
    core.add(PROJECT_TABLE["name"])
    optional: set[str] = set()
    for lines in PROJECT_TABLE["optional-dependencies"].values():
        optional.update(map(name_of, lines))
    optional -= core
    packages = set(extras._EXTRA_OF)
    for package, distributions in packages_distributions().items():
        if optional.intersection(distribution.lower() for distribution in distributions):
            packages.add(package)
    return packages - {name.replace("-", "_") for name in core}


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower()


def test_the_core_works_alone_and_names_the_extra_that_a_run_needs(tmp_path):
    missing = sorted(packages_of_extras())
    process = subprocess.run(
        [sys.executable, "-c", IN_CORE, *missing], cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert not (tmp_path / "int8.onnx").exists()


def test_no_build_of_onnx_runtime_is_installed_without_asking():
    # a second build would overwrite the files of the one that the user chose
    names = [name_of(line) for line in PROJECT_TABLE["dependencies"]]
    assert not [name for name in names if name.startswith(("onnxruntime", "transformers"))]


def test_every_extra_that_a_message_names_exists():
    extras_of_project = PROJECT_TABLE["optional-dependencies"]
    for package, extra in extras._EXTRA_OF.items():
        assert extra in extras_of_project, package


def test_a_package_that_is_broken_is_not_said_to_be_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import a_missing_part_of_it")
    monkeypatch.syspath_prepend(tmp_path)
    problem = "the page needs broken_package, which cannot be imported: .*a_missing_part_of_it"
    with pytest.raises(InputError, match=problem):
        extras.required("broken_package", "the page")


def test_a_missing_dependency_of_torch_is_not_a_changed_torch(tmp_path, monkeypatch):
    (tmp_path / "torch_like.py").write_text("import a_graph_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match="torch_like needs a_graph_library, which is not installed"
    ):
        Patch("torch_like", "export", lambda original: original).find()
    with pytest.raises(TorchChangedError):
        Patch("torch.onnx.no_such_part", "export", lambda original: original).find()
