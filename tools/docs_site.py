"""Additions of the MkDocs site to the pages of docs/: the README, the help of the commands, the gallery.

    pip install ".[docs]" && mkdocs build --strict
    pip install ".[docs,all]" && HTP_GALLERY=yes mkdocs build --strict    # minutes: four models are exported

MkDocs calls the functions `on_...` (mkdocs.yml, "hooks"). The help and the gallery are made by the ``htp-export`` on
the path, which may be installed in another environment. Links out of docs/ work on a forge and in a clone. In the
site they lead to the project's repository, or lose their address where mkdocs.yml names no repository.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")

WIDTH = "100"
"""Columns of the help."""

GALLERY = ROOT / "docs" / "gallery.md"


def on_files(files: Any, *, config: Any) -> Any:
    """Add the reference of commands, which is in no folder."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "commands.md", content=commands_page(help_of)))
    return files


def help_of(*words: str) -> str:
    """Return the help of the program, or of a command."""
    return run([*words, "--help"])


def run(words: Sequence[str], folder: str | None = None) -> str:
    """Run htp-export in a folder, and return what it prints."""
    program = shutil.which(
        "htp-export", path=os.pathsep.join((os.environ["PATH"], str(Path(sys.executable).parent)))
    )
    if program is None:
        raise FileNotFoundError(
            "htp-export, which makes the help and the gallery, is not on the path: pip install ."
        )
    environment = {**os.environ, "COLUMNS": WIDTH}
    done = subprocess.run(
        [program, *words], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def commands_page(helped: Callable[..., str]) -> str:
    """Return the reference of commands: the help of each, in the order and below the headings of the program's."""
    whole = helped()
    parts = [
        "# Commands",
        "The help of every command, as `htp-export COMMAND --help` prints it.",
        block(whole),
    ]
    for heading, names in listed(whole).items():
        parts.append(f"## {heading}")
        for name in names:
            shown = helped(name)
            parts += [f"### {name}", block(shown)]
            for inner in listed(shown).get("Commands", ()):
                parts += [f"### {name} {inner}", block(helped(name, inner))]
    return "\n\n".join(parts) + "\n"


def block(text: str) -> str:
    """Return text as Markdown shows it unchanged."""
    return f"```text\n{text.strip()}\n```"


def listed(text: str) -> dict[str, list[str]]:
    """Return the commands that a help lists: heading → names."""
    found: dict[str, list[str]] = {}
    for section in re.finditer(r"^([A-Z][\w ]*):\n((?:  .*\n)+)", text, re.MULTILINE):
        if section[1] not in ("Options", "Arguments", "Words"):
            found[section[1]] = re.findall(r"^  (\w[\w-]*) {2,}", section[2], re.MULTILINE)
    return found


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the text of a page as the site shows it."""
    if page.file.src_uri == "index.md":
        markdown = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
        markdown = markdown.replace("](examples/", "](../examples/")
    elif page.file.src_uri == "gallery.md" and with_gallery():
        links = [f'- <a href="{name}">{Path(name).stem}</a>\n' for name in pages_of_gallery()]
        markdown = re.sub(r"<!-- gallery: .* -->\n", "".join(links), markdown)
    return LINK.sub(lambda link: inside(link, config.repo_url), markdown)


def inside(link: re.Match[str], repository: str | None) -> str:
    """Return a link as it is, or changed where it leads to a file outside of docs/."""
    image, text, address, anchor = link.groups()
    if not address.startswith("../"):
        return link.group(0)
    path = address.removeprefix("../")
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"{link.group(0)}: there is no {path} in the repository")
    return (
        f"{image}[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor or ''})"
        if repository
        else text
    )


def with_gallery() -> bool:
    """Return whether the pages of the gallery are made: this takes torch, and minutes."""
    return os.environ.get("HTP_GALLERY") == "yes"


def on_post_build(*, config: Any) -> None:
    """Make the pages of the gallery."""
    if with_gallery():
        with tempfile.TemporaryDirectory() as folder:
            for words in commands_of_gallery():
                run(words, folder)
            for name in pages_of_gallery():
                shutil.copy(Path(folder, name), Path(config.site_dir, "gallery", name))


def commands_of_gallery() -> list[list[str]]:
    """Return the words of the commands in docs/gallery.md, which make its pages."""
    lines = GALLERY.read_text(encoding="utf-8").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("    htp-export ")]


def pages_of_gallery() -> list[str]:
    """Return the names of the pages that these commands write."""
    return [words[-1] for words in commands_of_gallery() if words[0] == "view"]
