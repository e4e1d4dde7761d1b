"""Screens of the page, compared with those in docs/images, which `python -m tools.screens` takes."""

from __future__ import annotations

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


def test_the_model_on_the_screens_is_valid() -> None:
    onnx.checker.check_model(ir.to_proto(screens.encoder()), full_check=True)


def test_stored_screens_are_small_and_shown_in_the_docs():
    text = (screens.STORED.parent / "view.md").read_text(encoding="utf-8")
    stored = {screens.file_name(*each) for each in screens.SCREENS}
    assert all((screens.STORED / name).stat().st_size < 40_000 for name in stored)
    shown = re.findall(r"images/(page-[\w.-]+)", text)
    assert shown
    assert {*shown} <= stored
