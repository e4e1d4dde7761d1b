"""The page of commands and the gallery, which the site of the documentation has."""

from __future__ import annotations

import contextlib
import io
import re
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from htp_export.command.commands import command_groups, command_names
from htp_export.command.main import main
from tools import docs_site
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


def test_the_gallery_is_made_by_the_commands_of_its_page_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[str] = []

    def made(words: Sequence[str], folder: str) -> str:
        name, *rest = words
        assert name == "export" or rest[0] in there, "a page is made of a file that was exported before"
        there.append(words[-1])
        Path(folder, words[-1]).write_text(words[-1])
        return ""

    monkeypatch.setattr(docs_site, "run", made)
    (tmp_path / "gallery").mkdir()
    config = types.SimpleNamespace(site_dir=str(tmp_path), repo_url=None)
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="gallery.md"))
    text = docs_site.GALLERY.read_text(encoding="utf-8")
    for asked, pages in (("no", []), ("yes", ["bert.html", "llama.html", "resnet.html", "whisper.html"])):
        monkeypatch.setenv("HTP_GALLERY", asked)
        docs_site.on_post_build(config=config)
        assert sorted(path.name for path in (tmp_path / "gallery").iterdir()) == pages
        shown = docs_site.on_page_markdown(text, page=page, config=config, files=None)
        assert re.findall('<a href="(.*?)">', shown) == pages
