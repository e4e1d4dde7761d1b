"""Deep and wide models: nothing calls itself for each level, and nothing looks at the whole for each part."""

from __future__ import annotations

import io
import itertools

import onnx
import onnx_ir as ir
import pytest
from rich.console import Console

import htp_export
from htp_export.costs.module_tree import ModuleRow, ModuleTree
from htp_export.format.call_tree import Instance
from htp_export.model.rewiring import replace_inputs
from htp_export.model.tensor_names import UsedNames
from htp_export.passes.near_matching import near, near_matching
from htp_export.show.tree import render
from htp_export.surgery.placing import MOST_NESTED
from tools import scale


def test_a_tree_of_a_thousand_levels_is_drawn() -> None:
    paths = ["", *itertools.accumulate(["m"] * 1000, lambda above, name: f"{above}.{name}")]
    tree = ModuleTree(tuple(ModuleRow(path, "net.Level", 1, "computed", 1, 1, 0) for path in paths))
    console = Console(width=500, record=True, file=io.StringIO())
    console.print(render(tree))
    lines = console.export_text().splitlines()
    assert len(lines) == 1002
    assert lines[-1].startswith("… 999 levels └── m ")


def test_modules_nested_deeper_than_onnx_allows_functions_to_be_stay_flat() -> None:
    model = scale.deep(MOST_NESTED + 20)
    nested = htp_export.functions(model, "**")
    assert len(nested.modules) == 2 * MOST_NESTED  # of both towers
    last = "a" + ".m" * MOST_NESTED
    assert last not in nested.modules
    assert nested.skipped[last] == "ONNX allows 100 functions inside one another"
    onnx.checker.check_model(ir.to_proto(nested.model))  # it refuses deeper ones
    flat = htp_export.inline(nested.model).model
    before = {node.name: (node.op_type, dict(node.metadata_props)) for node in ir.from_proto(model).graph}
    assert {node.name: (node.op_type, dict(node.metadata_props)) for node in flat.graph} == before


def test_calls_of_modules_nested_a_thousand_levels_are_known() -> None:
    calls = htp_export.load(scale.deep(1000)).calls
    inmost = "a" + ".m" * 999
    (part,) = calls.work((inmost,)).parts
    assert len(part.running) == 1001
    assert calls.caller(Instance(inmost)) == Instance("a" + ".m" * 998)


def test_used_names_count_on_from_the_last_number() -> None:
    tried: list[str] = []

    class Counting(set[str]):
        def __contains__(self, name: object) -> bool:
            tried.append(str(name))
            return super().__contains__(name)

    used = UsedNames()
    used._names = Counting()
    names = [used.unused("output") for _ in range(1000)]
    assert names[:2] == ["output", "output_2"]
    assert names[-1] == "output_1000"
    assert len(tried) < 3000


@pytest.mark.parametrize("count", [3, 100])
def test_many_inputs_are_replaced_as_one_after_the_other(count: int) -> None:
    before, after = ([ir.val(f"{name}{k}") for k in range(count)] for name in "ab")
    node = ir.node("Sum", [*before, before[0], None])
    given: dict[ir.Value, ir.Value | None] = dict(zip(before, after, strict=True))
    replace_inputs(node, {**given, before[1]: None})
    assert node.inputs == (after[0], None, *after[2:], after[0], None)
    assert not any(value.uses() for value in before)
    assert [[use.idx for use in value.uses()] for value in after] == [[0, count], [], *([k] for k in range(2, count))]
    assert all(use.node is node for value in after for use in value.uses())


def test_patterns_of_several_results_look_at_what_is_near() -> None:
    from onnxscript.rewriter import pattern

    x, end = ir.val("x"), ir.Value(name="end", const_value=ir.tensor([1]))
    chain = [ir.node("Slice", [x, end])]
    for _ in range(999):
        chain.append(ir.node("Slice", [chain[-1].outputs[0], end]))
    ir.Graph([x], chain[-1].outputs, nodes=chain)
    assert near(chain[500], 2) == [chain[500], chain[499], chain[501], chain[498], chain[502]]

    rule = pattern.RewriteRule(
        lambda op, x, one, two: (op.Slice(x, one), op.Slice(x, two)), lambda op, x, one, two: (x, x)
    )
    tried: list[object] = []
    multi_match = pattern.SimplePatternMatcher._multi_match
    whole = pattern.SimplePatternMatcher.match
    with pytest.MonkeyPatch.context() as patch, near_matching():
        patch.setattr(
            pattern.SimplePatternMatcher,
            "_multi_match",
            lambda self, *given, **more: tried.append(given) or multi_match(self, *given, **more),
        )
        for node in chain:
            rule.match(ir.Model(chain[0].graph, ir_version=10), chain[0].graph, node)  # type: ignore[arg-type]
    assert 0 < len(tried) <= 5 * len(chain)
    assert pattern.SimplePatternMatcher.match is whole


def test_the_exponent_is_the_slope_of_the_logarithms() -> None:
    assert scale.exponent({10: 1.0, 100: 100.0, 1000: 10000.0}) == pytest.approx(2.0)
