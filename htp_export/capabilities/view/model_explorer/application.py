"""Model Explorer's web application, extracted from its wheel, to run in a page without a server.

``page/assets/frame.js`` answers its requests to the server. Model Explorer does not document them:
only the tested versions, which the extra ``view`` requires, are accepted.
"""

from __future__ import annotations

import base64
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
# The frame has no address of its own: the application gets one; see frame.js.
_MOVED = (
    (r"(?<![.\w])(?:window|document)\.location\b", "htpLocation"),
    (r"(?<![.\w])window\.history\b", "htpHistory"),
    (r"\bimport\.meta\.url\b", "htpLocation.href"),
)
# The application's settings, in its own format: layers with a single node stay layers.
_SETTINGS = {"model_explorer_settings": json.dumps({"keep_layers_with_a_single_child": True})}


class MissingApplicationError(InputError):
    """Model Explorer is not installed, or its version cannot be put into a page."""


def application(prelude: str) -> dict[str, Any]:
    """The scripts, style and files of the application, as plain data.

    Raises:
        MissingApplicationError: It is not installed, or not in a tested version.
    """
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


def _folder() -> Path:
    """The folder of the installed application, if its version was tested."""
    # `find_spec` does not import the package, which would start a part of its server.
    spec = util.find_spec("model_explorer")
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
        text_kind = "text/javascript" if path.suffix == ".js" else kind
        return {"type": text_kind, "text": path.read_text(encoding="utf-8")}
    return {"type": kind, "base64": base64.b64encode(path.read_bytes()).decode()}


def _with_fonts(style: str, folder: Path) -> str:
    """Inline the fonts of Latin letters and icons in a style sheet, and remove all others."""

    def face(rule: re.Match[str]) -> str:
        if "unicode-range" in rule.group() and _LATIN not in rule.group():
            return ""
        return re.sub(r"url\(/?([^)]*)\)", inlined, rule.group())

    def inlined(url: re.Match[str]) -> str:
        path = folder / url.group(1).strip("'\"")
        return f"url(data:font/woff2;base64,{base64.b64encode(path.read_bytes()).decode()})"

    return re.sub(r"@font-face\s*\{[^}]*\}", face, style)
