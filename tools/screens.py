"""Take the screens of the page that docs/view.md shows, and that tests/view/test_view_choice.py compares.

    python -m tools.screens [pane] [width] [theme]

Look at what changed before you commit them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests import screens
from tests.chromium import browser


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        file, taken = Path(folder) / "encoder.html", Path(folder) / "taken.png"
        screens.write_page(file)
        for pane, width, theme in screens.SCREENS:
            if not set(words) <= {pane, str(width), theme}:
                continue
            screens.take(page, file, pane, width, theme, taken)
            stored = screens.STORED / screens.file_name(pane, width, theme)
            stored.write_bytes(screens.palette_png(page.pixels(taken.read_bytes())))
            print(stored, stored.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
