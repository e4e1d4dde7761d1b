"""Model Explorer's own web application, taken out of its wheel so that it runs inside a page without a server.

What it asks a server for is answered by ``page/assets/frame.js``. That contract is not documented
by Model Explorer: others than the versions that it was tested with, those of the extra ``view``,
are refused.
"""

from __future__ import annotations

import base64
import gzip
import json
import mimetypes
import re
from importlib import metadata, util
from pathlib import Path
from typing import Any

from htp_export.errors import InputError

_PACKAGE = "ai-edge-model-explorer"
_TESTED = ("0.1.33", "0.1.34")  # the versions that tests/view/test_view_page.py was run with
_INSTALL = "install it with: pip install 'htp-export[view]'"
_IMAGES = (".png", ".json", ".svg")
_LATIN = "U+0000-00FF"
# The frame has no address of its own, so the application is given one; see frame.js.
_MOVED = (
    (r"(?<![.\w])(?:window|document)\.location\b", "htpLocation"),
    (r"(?<![.\w])window\.history\b", "htpHistory"),
    (r"\bimport\.meta\.url\b", "htpLocation.href"),
)
# Settings of its own, as it keeps them: layers that hold one node stay layers.
_SETTINGS = {"model_explorer_settings": json.dumps({"keep_layers_with_a_single_child": True})}


class MissingApplicationError(InputError):
    """Model Explorer is not installed, or is a version whose application cannot be put into a page."""


def application(prelude: str) -> dict[str, Any]:
    """The application's scripts, style and files, as plain data; a `MissingApplicationError` if there is none."""
    folder = _folder()
    scripts = {name: next(folder.glob(f"{name}-*.js")) for name in ("main", "polyfills", "worker")}
    style = next(folder.glob("styles-*.css"))
    main = scripts["main"].read_text(encoding="utf-8")
    for pattern, replacement in _MOVED:
        main = re.sub(pattern, replacement, main)
    files = {scripts["worker"].name: _file(scripts["worker"])}
    for path in sorted((folder / "static_files").iterdir()):
        if path.suffix in _IMAGES:
            files[f"static_files/{path.name}"] = _file(path)
    return {
        "prelude": prelude,
        "main": main,
        "polyfills": scripts["polyfills"].read_text(encoding="utf-8"),
        "style": _with_fonts(style.read_text(encoding="utf-8"), folder),
        "files": files,
        "settings": _SETTINGS,
    }


def packed(data: Any) -> str:
    """Data as compressed JSON in base64, the same for the same data."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _folder() -> Path:
    spec = util.find_spec("model_explorer")  # found, not imported: that starts a part of its server
    if spec is None or not spec.submodule_search_locations:
        raise MissingApplicationError(f"it is not installed; {_INSTALL}")
    folder = Path(spec.submodule_search_locations[0]) / "web_app"
    if (version := metadata.version(_PACKAGE)) not in _TESTED:
        tested = f"pages were tested with {', '.join(_TESTED)}"
        raise MissingApplicationError(
            f"Model Explorer {version} cannot be put into a page: {tested}; {_INSTALL}"
        )
    return folder


def _file(path: Path) -> dict[str, str]:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if path.suffix in (".js", ".json", ".svg"):
        return {
            "type": "text/javascript" if path.suffix == ".js" else kind,
            "text": path.read_text(encoding="utf-8"),
        }
    return {"type": kind, "base64": base64.b64encode(path.read_bytes()).decode()}


def _with_fonts(style: str, folder: Path) -> str:
    """The style sheet with the fonts of Latin letters and icons in it, and without the others."""

    def face(rule: re.Match[str]) -> str:
        if "unicode-range" in rule.group() and _LATIN not in rule.group():
            return ""
        return re.sub(r"url\(/?([^)]*)\)", inlined, rule.group())

    def inlined(url: re.Match[str]) -> str:
        path = folder / url.group(1).strip("'\"")
        return f"url(data:font/woff2;base64,{base64.b64encode(path.read_bytes()).decode()})"

    return re.sub(r"@font-face\s*\{[^}]*\}", face, style)
