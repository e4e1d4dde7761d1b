"""Screens of the page, compared with those in docs/images, which `python -m tools.screens` takes."""

from __future__ import annotations

import itertools
import re

import onnx
import onnx_ir as ir
import pytest

from tests import screens
from tests.chromium import Page, needs_chromium
from tests.exporting import quick

pytestmark = needs_chromium

TOLERATED = 0.027  # of a screen; another font makes up to 0.025, a missing part at least 0.028


def stored(page: Page, pane: str, width: int, theme: str):
    return page.pixels((screens.STORED / screens.file_name(pane, width, theme)).read_bytes())


# The dark ones differ in their colours alone, and those of 1024 stand between the others.
QUICK = [case for case in screens.SCREENS if "light" in case and 1024 not in case]


@pytest.mark.parametrize(("pane", "width", "theme"), quick(screens.SCREENS, *QUICK))
def test_the_page_looks_as_it_did(page, encoder_page, tmp_path, pane, width, theme):
    screens.take(page, encoder_page, pane, width, theme, tmp_path / "taken.png")
    assert page.said == []
    taken = page.pixels((tmp_path / "taken.png").read_bytes())
    assert screens.unlike(taken, stored(page, pane, width, theme)) < TOLERATED


@pytest.mark.parametrize(
    ("width", "missing"),
    quick(
        [(1440, "#detail"), *itertools.product((1440, 390), ("#rows", "#top", "#pane-modules"))],
        (1440, "#detail"),
    ),
)
def test_a_screen_without_one_of_its_parts_is_told_apart(page, encoder_page, tmp_path, missing, width):
    screens.take(page, encoder_page, "modules", width, "light", tmp_path / "whole.png")
    page.run(f"document.querySelector('{missing}').style.visibility = 'hidden'")
    page.picture(tmp_path / "part.png", scale=0.5)
    part = page.pixels((tmp_path / "part.png").read_bytes())
    assert screens.unlike(part, stored(page, "modules", width, "light")) > TOLERATED


def test_another_font_makes_no_other_screen_and_the_other_theme_does(page, encoder_page, tmp_path):
    screens.take(page, encoder_page, "modules", 1440, "light", tmp_path / "whole.png")
    style = "Object.assign(document.createElement('style'), { textContent: '* { font-family: serif !important }' })"
    page.run(f"document.head.append({style})")
    page.picture(tmp_path / "serif.png", scale=0.5)
    serif = page.pixels((tmp_path / "serif.png").read_bytes())
    light = stored(page, "modules", 1440, "light")
    assert screens.unlike(serif, light) < TOLERATED
    assert screens.unlike(light, stored(page, "modules", 1440, "dark")) > 0.9


def test_the_model_on_the_screens_is_valid() -> None:
    onnx.checker.check_model(ir.to_proto(screens.encoder()), full_check=True)


def test_stored_screens_are_small_and_shown_in_the_docs():
    text = (screens.STORED.parent / "view.md").read_text(encoding="utf-8")
    stored = {screens.file_name(*each) for each in screens.SCREENS}
    assert all((screens.STORED / name).stat().st_size < 40_000 for name in stored)
    shown = re.findall(r"images/(page-[\w.-]+)", text)
    assert shown
    assert {*shown} <= stored
