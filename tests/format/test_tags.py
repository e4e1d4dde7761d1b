"""The names of modules, and the keys on nodes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from htp_export.format import tags
from htp_export.format.fates import Fate
from htp_export.format.tags import Reason


def test_owners_are_read_from_the_list_and_a_broken_list_falls_back_on_the_common_ancestor() -> None:
    assert tags.owners_of({tags.MODULE: "layer", tags.OWNERS: '["layer.0","layer.1"]'}) == ("layer.0", "layer.1")
    assert tags.owners_of({tags.MODULE: "layer", tags.OWNERS: "[3]"}) == ("layer",)
    assert tags.owners_of({"namespace": "layer"}) == ()


def test_the_words_of_reasons_and_fates_are_those_of_the_format() -> None:
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert explained >= {*Reason, *Fate}
    assert list(Fate) == ["computed", "identity", "fused", "constant", "dead", "uncalled"]


def test_tags_are_written_in_the_format_alone() -> None:
    package = Path(tags.__file__).parents[1]
    assigned = r"\[tags\.(?!MAP|FUNCTIONS|WEIGHTS|DATA|WAY)[A-Z]+\] *="
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
