"""The page of commands that the site of the documentation has."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from htp_export.command.commands import command_groups, command_names
from htp_export.command.main import main
from tools.docs_site import commands_page


def test_the_page_of_commands_has_the_help_of_each_below_its_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    def helped(*words: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main([*words, "--help"]) == 0
        return out.getvalue()

    monkeypatch.setenv("COLUMNS", "100")
    page = commands_page(helped)
    names = re.findall("^### (.*)$", page, re.MULTILINE)
    assert [name for name in names if name != "lora"] == command_names()
    assert re.findall("^## (.*)$", page, re.MULTILINE) == list(command_groups())
    for name in names:
        assert f"Usage: htp-export {name} " in page
