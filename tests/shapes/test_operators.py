"""Kinds of operators: each set holds standard operators only, and stands in one place."""

import ast
from pathlib import Path

import pytest

import htp_export
from htp_export.shapes import operator_kinds as operators
from htp_export.shapes.operator_kinds import CONTROL_FLOW, LAYOUT, RANDOM, RESHAPING, SIZES_ONLY


@pytest.mark.parametrize(
    "kind", [RANDOM, SIZES_ONLY, CONTROL_FLOW, LAYOUT, RESHAPING, operators.COMMUTATIVE]
)
def test_a_kind_has_operators_of_onnx_only(kind):
    assert kind <= operators._standard()


def test_a_set_that_a_kind_names_is_not_written_again():
    """`capture` is apart: it knows torch's operators, and ONNX's only by what its exporters write."""
    kinds = {
        kind
        for name, kind in vars(operators).items()
        if name.isupper() and isinstance(kind, frozenset)
    }
    package, again = Path(htp_export.__file__).parent, []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        named = any(all(f'"{op}"' in text for op in kind) for kind in kinds)
        if not named or path.name == "operator_kinds.py" or "capture" in path.parts:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Set | ast.Tuple | ast.List) and len(node.elts) > 1:
                names = [each.value for each in node.elts if isinstance(each, ast.Constant)]
                if len(names) == len(node.elts) and frozenset(names) in kinds:
                    again.append(f"{path.relative_to(package)}:{node.lineno}")
    assert again == []
