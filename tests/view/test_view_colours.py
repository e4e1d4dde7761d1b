"""The colours of the page: told apart by every reader, the same in every model, and readable text on all of them."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from htp_export.capabilities.view.page.document import asset
from htp_export.capabilities.view.viewing import view
from htp_export.format.hierarchy import ModuleInfo
from tests import handmade
from tests.chromium import Page, needs_chromium
from tests.view.test_view_page import start

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


CLASSES = (
    "Linear", "LayerNorm", "Embedding", "Conv2d", "BatchNorm2d", "ReLU", "GELU", "Conv1d", "SiLU", "Tanh", "Dropout",
    "Softmax",
)  # fmt: skip


@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_class_has_the_same_colour_in_every_model(page: Page, tmp_path, encoder_page, theme):
    page.theme(theme)
    page.size(1400, 850)
    start(page, encoder_page)
    of = (
        "Object.fromEntries(htp.modules.filter((module) => module.nodes)"
        ".map((module) => [htp.simple(module.class), htp.colours.ofClass(module)]))"
    )
    first = page.run(of)
    modules = [ModuleInfo("", "other.Net", 1, "computed")]
    modules += [ModuleInfo(f"m{k}", f"torch.nn.{name}", 1, "computed") for k, name in enumerate(CLASSES)]
    nodes = [handmade.tagged_node("Neg", [handmade.value("x")], f"m{k}", f"v{k}") for k in range(len(CLASSES))]
    view(handmade.model(list(nodes[0].inputs), nodes, [], modules), tmp_path / "other.html", explorer=False)
    start(page, tmp_path / "other.html")
    second = page.run(of)
    assert len({second[name] for name in CLASSES}) == len(CLASSES)
    assert {name: first[name] for name in CLASSES if name in first} == {
        name: second[name] for name in CLASSES if name in first
    }
    assert sum(name in first for name in CLASSES) >= 4
    page.theme("light")
