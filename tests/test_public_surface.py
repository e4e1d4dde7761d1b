"""What the package offers: fixed names, each documented, and an import that costs little."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import htp_export

PUBLIC = [
    "Block",
    "Carried",
    "Comparison",
    "Contamination",
    "Cost",
    "Extraction",
    "Finding",
    "Fingerprint",
    "Forensics",
    "Hierarchy",
    "HtpExportError",
    "Inlined",
    "InputError",
    "ModelDifference",
    "ModuleDifference",
    "ModuleInfo",
    "ModuleLatency",
    "Nested",
    "Optimized",
    "Partition",
    "Profile",
    "Region",
    "Splice",
    "Stage",
    "TaggedModel",
    "Verification",
    "View",
    "Work",
    "carry",
    "compare",
    "contamination",
    "cost",
    "diff",
    "embed_map",
    "export",
    "extract",
    "fingerprint",
    "forensics",
    "functions",
    "inline",
    "load",
    "load_partition",
    "optimize",
    "partition",
    "profile",
    "splice",
    "tagging",
    "verify",
    "view",
]


def test_public_names_are_these():
    assert sorted(htp_export.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_there_and_documented(name):
    assert getattr(htp_export, name).__doc__


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        htp_export.no_such_thing  # noqa: B018 - looking it up is the test


def test_version_is_that_of_the_project():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*)"$', project, re.MULTILINE) == [htp_export.__version__]


@pytest.mark.parametrize("library", ["torch", "transformers", "onnxruntime", "typer", "rich"])
def test_importing_the_package_does_not_import(library):
    code = f"import sys, htp_export; sys.exit({library!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[1]).returncode == 0


@pytest.mark.parametrize("library", ["transformers", "onnxruntime", "typer"])
def test_exporting_needs_no(library):
    code = f"import sys, htp_export; htp_export.export; htp_export.load; sys.exit({library!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[1]).returncode == 0
