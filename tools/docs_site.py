"""The README as the first page of the site that MkDocs builds from docs/.

    pip install ".[docs]" && mkdocs build --strict

MkDocs calls `on_page_markdown` for every page (mkdocs.yml, "hooks"). Links out of docs/ work on a forge and in a
clone. In the site they lead to the project's repository, or lose their address where mkdocs.yml names no repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the text of a page as the site shows it."""
    if page.file.src_uri == "index.md":
        markdown = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
        markdown = markdown.replace("](examples/", "](../examples/")
    return LINK.sub(lambda link: inside(link, config.repo_url), markdown)


def inside(link: re.Match[str], repository: str | None) -> str:
    """Return a link as it is, or changed where it leads to a file outside of docs/."""
    image, text, address, anchor = link.groups()
    if not address.startswith("../"):
        return link.group(0)
    path = address.removeprefix("../")
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"{link.group(0)}: there is no {path} in the repository")
    return f"{image}[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor or ''})" if repository else text
