r"""The HTML file: a template, its styles and scripts, and data, put together so that no name in it can act.

Data stands in ``<script type="application/json">``, where no browser runs it, with every ``<`` written as ``\u003c``
so that it cannot close its element. The scripts put text into the page as text. The policy of the page forbids all
requests, and all scripts but its own, which it names by their hashes, and those that these make (``blob:``, for the
frame of Model Explorer).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

SCRIPTS = (
    *("sizes.js", "reasons.js", "model.js", "colours.js", "search.js", "table.js", "details.js", "map.js"),
    *("layers.js", "follow.js", "graph.js", "front.js", "explorer.js", "main.js"),
)
"""The scripts of the page of a model, in the order in which they run."""

_DATA_URLS = "img-src data: blob:; font-src data: blob:; media-src 'none'"


def document(
    title: str,
    data: Mapping[str, Any],
    packed: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    template: str = "page.html",
    style: Sequence[str] = ("page.css",),
    scripts: Sequence[str] = SCRIPTS,
) -> str:
    """A whole HTML document, made of one of the package's templates with style sheets and scripts.

    The scripts read ``data`` and, by ``id``, ``more``, which are plain data; they unpack ``packed``, in base64.
    """
    sources = [f"\n{asset(name)}" for name in scripts]
    hashes = " ".join(f"'sha256-{_hash(source)}'" for source in sources)
    policy = (
        f"default-src 'none'; script-src {hashes} blob:; worker-src blob:; style-src 'unsafe-inline' blob:; "
        f"{_DATA_URLS}; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "style": "\n" + "\n".join(map(asset, style)),
        "data": as_script_text(data),
        "more": "\n".join(
            [
                f'<script type="{kind}" id="{identifier}">{text}</script>'
                for kind, texts in (
                    ("application/json", {name: as_script_text(value) for name, value in (more or {}).items()}),
                    ("application/octet-stream", packed or {}),
                )
                for identifier, text in texts.items()
            ]
        ),
        "scripts": "\n".join(f"<script>{source}</script>" for source in sources),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place.group(1)], asset(template))


def asset(name: str) -> str:
    """A file of the page, as it lies in the package."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def as_script_text(data: Mapping[str, Any] | Sequence[Any]) -> str:
    r"""JSON that may stand inside a script element.

    Examples:
        >>> as_script_text({"name": "</script><b>"})
        '{"name":"\\u003c/script>\\u003cb>"}'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
