"""The names of modules, and the keys on nodes."""

import itertools
import re
from pathlib import Path

from htp_export.format import tags
from htp_export.format.fates import Fate
from htp_export.format.tags import Reason


def test_owners_are_read_from_the_list_and_a_broken_list_falls_back_on_the_common_ancestor():
    assert tags.owners_of({tags.MODULE: "layer", tags.OWNERS: '["layer.0","layer.1"]'}) == (
        "layer.0",
        "layer.1",
    )
    assert tags.owners_of({tags.MODULE: "layer", tags.OWNERS: "[3]"}) == ("layer",)
    assert tags.owners_of({"namespace": "layer"}) == ()


def test_the_words_of_reasons_and_fates_are_those_of_the_format():
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert explained >= {*Reason, *Fate}
    assert list(Fate) == ["computed", "identity", "fused", "constant", "dead", "uncalled"]


def test_tags_are_written_in_the_format_alone():
    package = Path(tags.__file__).parents[1]
    # keys of the whole model, and those of ranges, which name no module
    others = "MAP|FUNCTIONS|WEIGHTS|DATA|WAY|CALIBRATION|FLOATS"
    assigned = rf"\[tags\.(?!{others})[A-Z]+\] *="
    writes = re.compile(assigned + r"|tags\.(MODULE|OWNERS|REASON|NAMESPACE|MODULES):")
    files = (path for path in package.rglob("*.py") if path.parent.name != "format")
    assert {path.name for path in files if writes.search(path.read_text(encoding="utf-8"))} == set()


def test_namespaces_have_a_level_for_each_module_that_ran():
    paths = ["", "m.m.m", "a.0.b/c", "a.0", "a", "m.x"]
    for called in (set(paths), set(paths[::3]), {""}, set[str]()):
        for path in paths:
            levels = [up for up in tags.ancestors(path) if up and (up in called or up == path)][
                ::-1
            ]
            parts = [
                level[len(above) + 1 :] if above else level
                for above, level in itertools.pairwise(["", *levels])
            ]
            assert tags.namespace(path, called) == "/".join(
                part.replace("/", "%2F") for part in parts
            )
