"""The selector language, and the names of modules."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from htp_export.errors import SelectorError
from htp_export.format import tags
from htp_export.format.hierarchy import Fate
from htp_export.format.reasons import Reason

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
        ("", [""]),
        (".", [""]),
        ("layer.*.attention", ["layer.0.attention", "layer.1.attention"]),
        ("**.attention", ["layer.0.attention", "layer.0.inner.attention", "layer.1.attention"]),
        ("layer.**.attention", ["layer.0.attention", "layer.0.inner.attention", "layer.1.attention"]),
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
    ],
)
def test_a_selector_names_these_modules_in_the_order_of_the_model(
    pattern: str | list[str], selected: list[str]
) -> None:
    assert tags.select(pattern, CLASSES) == selected


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
        ("layer.0,nothing_like_it", "selector 'nothing_like_it': matches no module$"),
        ("layer.0,!layer.7.attention", "selector '!layer.7.attention': matches no module; nearest"),
        ("layer.0,!layer.*", "excludes every module that it selects"),
        ([3], "a selector is a string"),
    ],
)
def test_a_selector_that_selects_nothing_is_refused_and_named(pattern: list[str] | str, message: str) -> None:
    with pytest.raises(SelectorError, match=message):
        tags.select(pattern, CLASSES)


def test_a_star_in_a_glob_takes_no_dot_even_through_a_negated_class() -> None:
    assert tags.select("layer[!x]*", {"layer.0": "a", "layers": "a"}) == ["layers"]


def test_owners_are_read_from_the_list_and_a_broken_list_falls_back_on_the_common_ancestor() -> None:
    assert tags.owners_of({tags.MODULE: "layer", tags.OWNERS: '["layer.0","layer.1"]'}) == ("layer.0", "layer.1")
    assert tags.owners_of({tags.MODULE: "layer", tags.OWNERS: "[3]"}) == ("layer",)
    assert tags.owners_of({"namespace": "layer"}) == ()


def test_the_words_of_reasons_and_fates_are_those_of_the_format() -> None:
    text = (Path(__file__).parents[1] / "docs" / "format.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert explained >= {*Reason, *Fate}


def test_tags_are_written_in_the_format_alone() -> None:
    package = Path(tags.__file__).parents[1]
    assigned = r"\[tags\.(?!MAP|FUNCTIONS|WEIGHTS|DATA)[A-Z]+\] *="
    writes = re.compile(assigned + r"|tags\.(MODULE|OWNERS|REASON|NAMESPACE|MODULES):")
    files = (path for path in package.rglob("*.py") if path.parent.name != "format")
    assert {path.name for path in files if writes.search(path.read_text(encoding="utf-8"))} == set()


def test_namespaces_of_many_paths_are_those_of_each_and_common_levels_are_looked_at_once() -> None:
    tower = itertools.accumulate(["m"] * 300, lambda above, name: f"{above}.{name}")
    paths = ["", *tower, "a.0.b/c", "a.0", "a", "m.x"]
    for called in (set(paths), set(paths[::3]), {""}, set()):
        expected = {}
        for path in paths:
            levels = [up for up in tags.ancestors(path) if up and (up in called or up == path)][::-1]
            parts = [level[len(above) + 1 :] if above else level for above, level in itertools.pairwise(["", *levels])]
            expected[path] = "/".join(part.replace("/", "%2F") for part in parts)
        assert tags.namespaces(paths, called) == expected

    class Called(set[str]):
        asked = 0

        def __contains__(self, path: object) -> bool:
            self.asked += 1
            return super().__contains__(path)

    called = Called(paths)
    tags.namespaces(paths, called)
    assert called.asked < 3 * len(paths)


def test_tags_of_nodes_look_at_common_levels_once() -> None:
    class Counting(tags.CalledModules):
        asked = 0

        def __contains__(self, path: object) -> bool:
            type(self).asked += 1
            return super().__contains__(path)

    paths = list(itertools.accumulate(["m"] * 300, lambda above, name: f"{above}.{name}"))
    called = Counting(["", *paths])
    for path in paths:
        assert tags.node_tags([path], "scope", called)["namespace"] == path.replace(".", "/")
    assert Counting.asked < 3 * len(paths)
