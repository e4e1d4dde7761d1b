"""The colours of the page: told apart by every reader, the same in every model, and readable text on all of them."""

from __future__ import annotations

import itertools
import re

import numpy as np

from htp_export.capabilities.view.page.document import asset

THEMES = (":root {", ':root[data-theme="dark"] {')
PALETTE = [re.findall(r"#[0-9a-f]{6}", pair) for pair in re.findall(r'\["#\w{6}", "#\w{6}"\]', asset("colours.js"))][2:]


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, "contrast ratio"."""
    light, dark = sorted((linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (one, other)), reverse=True)
    return float((light + 0.05) / (dark + 0.05))


def variables(theme: str) -> dict[str, str]:
    block = asset("page.css").split(theme, 1)[1].split("}", 1)[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def test_text_has_enough_contrast_on_everything_that_it_stands_on():
    for theme, name in enumerate(THEMES):
        colours = variables(name)
        assert min(contrast(colours["text"], pair[theme]) for pair in PALETTE) >= 4.5
        plain = itertools.product(("text", "soft", "faint", "accent", "node"), ("ground", "raised"))
        pills = (
            ("accent", "accent-soft"),
            ("warn", "warn-soft"),
            ("bad", "bad-soft"),
            ("text", "accent-soft"),
            ("soft", "accent-soft"),
        )
        for text, ground in (*plain, *pills):
            assert contrast(colours[text], colours[ground]) >= 4.5, (name, text, ground)
