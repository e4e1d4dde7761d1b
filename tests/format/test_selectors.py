"""The selector language."""

import contextlib
import time

import pytest

from htp_export.errors import SelectorError
from htp_export.format import selectors

CLASSES = {
    "": "net.Encoder",
    "layer": "torch.nn.modules.container.ModuleList",
    "layer.0": "net.Block",
    "layer.0.attention": "net.Attention",
    "layer.0.inner": "net.Inner",
    "layer.0.inner.attention": "net.Attention",
    "layer.1": "net.Block",
    "layer.1.attention": "net.Attention",
    "layer.1.norm": "torch.nn.modules.normalization.LayerNorm",
    "branches.a/b": "net.Odd",
    "branches.x,y": "net.Odd",
    "branches.[z]": "net.Odd",
}


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("layer.0", ["layer.0"]),
        ("layer.0-1", ["layer.0", "layer.1"]),
        ("layer.1-19.*", ["layer.1.attention", "layer.1.norm"]),
        ("**,!layer.0-8.**,!branches.*", ["", "layer"]),
        ("", [""]),
        (".", [""]),
        ("layer.*.attention", ["layer.0.attention", "layer.1.attention"]),
        ("**.attention", ["layer.0.attention", "layer.0.inner.attention", "layer.1.attention"]),
        (
            "layer.**.attention",
            ["layer.0.attention", "layer.0.inner.attention", "layer.1.attention"],
        ),
        ("layer.1.**", ["layer.1", "layer.1.attention", "layer.1.norm"]),
        ("**", list(CLASSES)),
        ("*", ["layer"]),
        ("layer.?", ["layer.0", "layer.1"]),
        ("layer.[1-9]", ["layer.1"]),
        ("layer.[!1]", ["layer.0"]),
        ("branches.a/*", ["branches.a/b"]),
        ("branches.x[,]y", ["branches.x,y"]),
        ("branches.[[]z]", ["branches.[z]"]),
        ("class:LayerNorm", ["layer.1.norm"]),
        ("class:Layer*", ["layer.1.norm"]),
        ("class:torch.nn.*", ["layer", "layer.1.norm"]),
        (r"re:layer\.\d{1,2}", ["layer.0", "layer.1"]),
        ("layer.1 , layer.0", ["layer.0", "layer.1"]),
        (["layer.1", "layer.0,class:LayerNorm"], ["layer.0", "layer.1", "layer.1.norm"]),
        ("layer.1.**,!layer.1", ["layer.1.attention", "layer.1.norm"]),
        (["!layer.1", "layer.1.**"], ["layer.1.attention", "layer.1.norm"]),
        (["!layer.**", "!class:Odd"], [""]),
        ("!re:.+,?.*", [""]),
        ("re:(?!layer).*[^]]", ["branches.a/b", "branches.x,y"]),
        ("layer.[^1]", ["layer.0"]),
        ("class:*.[!A-M]*m", ["layer.1.norm"]),
        ("**.**.*tt*n", ["layer.0.attention", "layer.0.inner.attention", "layer.1.attention"]),
        ("l*e*.**.?*t*t*n", ["layer.0.attention", "layer.0.inner.attention", "layer.1.attention"]),
        ("branches.[[][z-z]]", ["branches.[z]"]),
    ],
)
def test_a_selector_names_these_modules_in_the_order_of_the_model(pattern, selected):
    assert selectors.select(pattern, CLASSES) == selected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ([], "empty list"),
        ("re:(", r"selector 're:\(': missing \)"),
        ("layer.[z-a]", "bad character range"),
        ("re:", "nothing after 're:'"),
        ("class:", "nothing after 'class:'"),
        ("layer.0,!", "nothing after '!'"),
        ("layer.0,,layer.1", "between two commas"),
        ("layer..0", "between two dots"),
        ("layer.0.attentoin", "matches no module; nearest: 'layer.0.attention'"),
        ("class:LayreNorm", "matches no module; nearest: 'LayerNorm'"),
        (
            "layer.0,nothing_like_it",
            "selector 'nothing_like_it': matches no module; there are '.', ",
        ),
        ("layer.0,!layer.7.attention", "selector '!layer.7.attention': matches no module; nearest"),
        ("layer.0,!layer.*", "excludes every module that it selects"),
        ([3], "a selector is a string"),
    ],
)
def test_a_selector_that_selects_nothing_is_refused_and_named(pattern, message):
    with pytest.raises(SelectorError, match=message):
        selectors.select(pattern, CLASSES)


SLOW = (
    *(
        "re:(.|.|.|.|.|.)*!",
        "**." * 25 + "x",
        "*a" * 30 + "b",
        "**.*a*" * 12 + "b",
        "class:" + "*a" * 30 + "b",
    ),
    *(
        "[" * 50_000,
        "," * 50_000,
        ":" * 50_000,
        " " * 50_000 + "!",
        "*" * 50_000,
        "?" * 50_000,
        ":in[" * 10_000,
    ),
)


@pytest.mark.parametrize("pattern", SLOW)
def test_no_selector_takes_long(pattern):
    """The steps in a file of others have selectors, too."""
    long = ".".join(["aab" * 20] * 60)
    classes = {"": "net.Net", long: f"net.{'a' * 3000}"}
    began = time.monotonic()
    for choose in (
        selectors.select,
        selectors.select_below,
        lambda text, _: selectors.places_of(text),
    ):
        with contextlib.suppress(SelectorError):
            choose(pattern, classes)
    assert time.monotonic() - began < 10


def test_a_star_in_a_glob_takes_no_dot_even_through_a_negated_class():
    assert selectors.select("layer[!x]*", {"layer.0": "a", "layers": "a"}) == ["layers"]


def test_a_selector_with_all_below_takes_an_excluded_module_with_those_below_it():
    classes = {
        "": "net.Net",
        "a": "net.Block",
        "a.fc": "nn.Linear",
        "b": "net.Block",
        "b.fc": "nn.Linear",
    }
    assert selectors.select_below("class:Block", classes) == ["a", "a.fc", "b", "b.fc"]
    assert selectors.select_below(["**", "!a"], classes) == ["", "b", "b.fc"]
    assert selectors.select_below("!b", classes) == ["", "a", "a.fc"]
    with pytest.raises(SelectorError, match="excludes every module"):
        selectors.select_below("a.fc,!a", classes)


def test_a_range_is_each_number_from_the_first_to_the_last():
    classes = {f"layers.{number}": "net.Block" for number in range(130)}
    for first, last in [(0, 0), (0, 9), (8, 11), (9, 100), (99, 129), (5, 1000), (0, 10**17)]:
        expected = [f"layers.{number}" for number in range(first, min(last, 129) + 1)]
        assert selectors.select(f"layers.{first}-{last}", classes) == expected


def test_a_module_whose_path_is_a_range_is_that_module():
    classes = dict.fromkeys(["blocks.0-2", "blocks.0-2.fc", "blocks.1", "blocks.1.fc"], "net.Block")
    assert selectors.select("blocks.0-2", classes) == ["blocks.0-2"]
    assert selectors.select("!blocks.0-2", classes) == ["blocks.0-2.fc", "blocks.1", "blocks.1.fc"]
    assert selectors.select("blocks.0-2.fc", classes) == ["blocks.0-2.fc"]
    assert selectors.select("blocks.0-2.*", classes) == ["blocks.0-2.fc", "blocks.1.fc"]


@pytest.mark.parametrize(
    "text", ["layer.3-9", "layer.1-0", "layer.0-1x", "layer.0-1-2", "layer.-1"]
)
def test_a_range_without_a_module_is_an_error(text):
    with pytest.raises(SelectorError, match="matches no module"):
        selectors.select(text, CLASSES)
