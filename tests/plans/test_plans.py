"""Plans: rules from selectors to values, for modules and nodes, from files and command lines."""

import json

import onnx_ir as ir
import pytest

from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.precisions import PRECISIONS, precision_of, precisions_of
from htp_export.errors import FileError, InputError, SelectorError, UntaggedModelError
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.model.tagged import TaggedModel, load
from htp_export.plans.plan_options import typed_pairs
from htp_export.plans.rules import assigned, read_plan


def _tagged(nodes: dict[str, list[str]], fates: dict[str, str] | None = None) -> TaggedModel:
    """A chain of nodes, name → owners, in a model whose modules are the owners and all above them."""
    value = ir.val("x", dtype=ir.DataType.FLOAT, shape=[2])
    first, made = value, []
    for name, owners in nodes.items():
        metadata = {"htp.module": owners[0], "htp.owners": json.dumps(owners)}
        node = ir.node("Relu", [value], name=name, metadata_props=metadata)
        made.append(node)
        value = node.outputs[0]
    model = ir.Model(ir.Graph([first], [value], nodes=made, opset_imports={"": 20}), ir_version=10)
    tagged = load(model)
    classes = {path: "torch.nn.Linear" if path.endswith("fc") else "net.Block" for path in tagged}
    infos = [
        ModuleInfo(path, classes[path], 1, (fates or {}).get(path, "computed")) for path in tagged
    ]
    return TaggedModel(model, Hierarchy(infos), "htp")


def _values(tagged: TaggedModel, rules: dict[str, object]) -> dict[str, object]:
    return {str(node.name): value for node, value in assigned(tagged, rules).nodes.items()}


NET = {"a": ["enc.0.fc"], "b": ["enc.0"], "c": ["enc.1.fc"], "d": ["head.fc"]}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"enc": 8}, {"a": 8, "b": 8, "c": 8}),
        ({"enc": 8, "enc.0.fc": 4}, {"a": 4, "b": 8, "c": 8}),
        ({"enc.0.fc": 4, "enc": 8}, {"a": 8, "b": 8, "c": 8}),
        ({".": 8}, {"a": 8, "b": 8, "c": 8, "d": 8}),
        ({"**,!enc.0": 8}, {"c": 8, "d": 8}),
        ({"!enc": 8}, {"d": 8}),
        ({"class:Linear": 4}, {"a": 4, "c": 4, "d": 4}),
        ({"enc.*": 8, "re:.*1.fc": 4}, {"a": 8, "b": 8, "c": 4}),
        ({"enc.0": None}, {"a": None, "b": None}),
    ],
    ids=str,
)
def test_a_rule_holds_for_all_below_and_the_last_rule_wins(rules, expected):
    assert _values(_tagged(NET), rules) == expected


def test_a_node_of_several_modules_has_a_value_only_if_all_of_them_have_it():
    tagged = _tagged({"shared": ["enc.0", "enc.1"], "own": ["enc.0"]})
    assert _values(tagged, {"enc.*": 8}) == {"shared": 8, "own": 8}
    assert _values(tagged, {"enc.*": 8, "enc.1": 4}) == {"own": 8}
    found = assigned(tagged, {"enc.0": 8})
    assert [node.name for node in found.nodes] == ["own"]
    assert [node.name for node in found.disputed] == ["shared"]


def test_a_fused_owner_that_no_rule_names_is_left_out_of_account():
    tagged = _tagged({"conv": ["conv", "norm"]}, {"conv": "fused", "norm": "fused"})
    assert _values(tagged, {"conv": 8}) == {"conv": 8}
    assert _values(tagged, {"norm": 8}) == {"conv": 8}
    assert _values(tagged, {"conv": 8, "norm": 4}) == {}


def test_modules_have_the_values_of_their_rules():
    found = assigned(_tagged(NET), {"head": 4, "enc.1": 8})
    assert found.modules == {"enc.1": 8, "enc.1.fc": 8, "head": 4, "head.fc": 4}
    assert found.named == {"head": ("head", "head.fc"), "enc.1": ("enc.1", "enc.1.fc")}


def test_a_rule_that_matches_nothing_is_refused_with_the_nearest_paths():
    with pytest.raises(SelectorError, match=r"'enc\.2': matches no module; nearest: 'enc\.1'"):
        assigned(_tagged(NET), {"enc.0": 8, "enc.2": 4})
    with pytest.raises(InputError, match="no rules"):
        assigned(_tagged(NET), {})
    untagged = TaggedModel(_tagged(NET).model, Hierarchy([ModuleInfo("", "")]), "none")
    with pytest.raises(UntaggedModelError, match="no module tags"):
        assigned(untagged, {".": 8})


def test_rules_are_typed_with_an_equals_sign_and_the_last_of_equal_selectors_holds():
    def read(*texts: str) -> dict[str, str]:
        return typed_pairs(texts, "--rule", "SELECTOR=PRECISION")

    assert read("re:a=b=int8", " c = fp16") == {"re:a=b": "int8", "c": "fp16"}
    assert list(read("a=int8", "b=fp16", "a=int4").items()) == [("b", "fp16"), ("a", "int4")]
    for text in ("a", "=a", "a="):
        with pytest.raises(InputError, match=f"--rule {text}: write SELECTOR=PRECISION$"):
            read(text)


def test_a_plan_file_is_an_ordered_mapping_in_yaml_or_json(tmp_path):
    yaml_file, json_file = tmp_path / "plan.yaml", tmp_path / "plan.json"
    yaml_file.write_text(
        '"**": int8\n1.10: 0.5\nlm_head: {precision: int4, block_size: 64}\n', encoding="utf-8"
    )
    json_file.write_text('{"b": "int8", "a": 0.5}', encoding="utf-8")
    read = {"**": "int8", "1.10": 0.5, "lm_head": {"precision": "int4", "block_size": 64}}
    assert list(read_plan(yaml_file).items()) == list(read.items())
    assert list(read_plan(json_file).items()) == [("b", "int8"), ("a", 0.5)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no rules"),
        ("- a", "holds no rules"),
        ("a: int8\na: fp16", "the key 'a' is repeated"),
        ("**: int8", "into quotes"),
        ("[a, b]: int8", "a key must be a string"),
    ],
)
def test_a_plan_file_that_is_no_mapping_is_refused(text, problem, tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=problem):
        read_plan(file)
    with pytest.raises(FileError, match="cannot be read"):
        read_plan(tmp_path / "other.yaml")


def test_a_precision_is_a_name_with_other_fields_or_a_dataclass():
    assert precision_of({"precision": "int8-weights", "weight": "int4"}).bits == 4
    own = Precision("mine", "static", "uint8", "int8")
    assert precisions_of({"a": own, "b": "fp32"}) == {"a": own, "b": PRECISIONS["fp32"]}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("int3", "there is no precision 'int3'; there are int8"),
        (8, "there is no precision 8"),
        ({"block_size": 32}, "has no name"),
        ({"precision": "int4", "blocksize": 32}, "has no field 'blocksize'; nearest: 'block_size'"),
        ({"precision": "int4", "block_size": 24}, "block_size is 24"),
        (
            {"precision": "int4", "algorithm": "best"},
            "algorithm is 'best', and can be default, rtn",
        ),
        ({"precision": "int8", "weight": "int4"}, "weight is 'int4', and can be int8"),
        ({"precision": "int8", "weight": "uint8"}, "no int8 with uint8 weights"),
        ({"precision": "int8", "bits": 4}, "int8 has 8 bits, not 4"),
        ({"precision": "fp16", "weight": "bfloat16"}, "same float type"),
        ({"precision": "int8-weights", "algorithm": "hqq"}, "runs 4 bits, not 8"),
    ],
    ids=str,
)
def test_a_precision_that_cannot_be_is_refused_with_its_rule(value, problem):
    with pytest.raises(InputError, match=rf"rule 'lm_head': .*{problem}"):
        precisions_of({"lm_head": value})


def test_any_precision_is_a_plan_for_the_whole_model():
    assert all(precisions_of(name) == {".": precision} for name, precision in PRECISIONS.items())
    with pytest.raises(InputError, match="no precision 'w3'; there are int8, u8s8"):
        precisions_of("w3")
