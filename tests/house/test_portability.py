"""What differs between operating systems is written so that it works on each: encodings, ends of lines, open files."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import htp_export

ROOT = Path(htp_export.__file__).parents[1]
SYSTEM = "htp_export/files/filesystem.py"
FILES = [
    file
    for package in ("htp_export", "htp_export_plugins")
    for file in sorted((ROOT / package).rglob("*.py"))
]


def calls(source: str) -> Iterator[tuple[str, set[str], ast.Call]]:
    """Each call of a source: the name of what is called, the names of its keywords, and the call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            yield name, {str(keyword.arg) for keyword in node.keywords}, node


def faults(source: str) -> list[str]:
    """Calls that do another thing on another system.

    Text is read and written in the encoding of the system unless the call names one, and Windows writes two characters
    for the end of a line unless the call names it; a temporary folder cannot be removed there while a file in it is
    mapped.
    """
    found = []
    for name, keywords, call in calls(source):
        modes = [
            each.value
            for each in call.args[:2]
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
        is_text = name in ("read_text", "write_text") or (
            name == "open" and any("b" not in mode for mode in modes)
        )
        if is_text and not isinstance(call.func, ast.Name) and "encoding" not in keywords:
            found.append(f"{call.lineno}: {name} without encoding")
        if (
            name == "write_text"
            and isinstance(call.func, ast.Attribute)
            and "newline" not in keywords
        ):
            found.append(f"{call.lineno}: {name} without newline")
        if name == "TemporaryDirectory":
            found.append(f"{call.lineno}: {name}")
    return found


@pytest.mark.long
def test_the_package_has_none():
    planted = "a.read_text() a.write_text(b) a.open('w') a.open('wb') a.write_text(b, encoding='utf-8', newline='')"
    assert [len(faults(each)) for each in planted.replace(", ", ",").split()] == [1, 2, 1, 0, 0]
    found = [
        f"{file.relative_to(ROOT).as_posix()}:{each}"
        for file in FILES
        for each in faults(file.read_text("utf-8"))
    ]
    assert [each for each in found if not each.startswith(SYSTEM)] == []


def test_modules_that_only_some_systems_have_are_imported_in_one_file_or_inside_of_functions():
    importing = re.compile("^import (fcntl|resource|pwd|grp|termios|msvcrt|winreg)$", re.MULTILINE)
    found = {
        file.relative_to(ROOT).as_posix()
        for file in FILES
        if importing.search(file.read_text("utf-8"))
    }
    assert found <= {SYSTEM}
