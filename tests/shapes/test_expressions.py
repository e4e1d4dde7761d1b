"""Sizes that files write as expressions: as onnx_ir and SymPy compute them, and in a time that is bounded."""

import random
import time

import onnx_ir as ir
import pytest

import htp_export
from htp_export.shapes.expressions import evaluate, names_in
from tests.hostile import within

SIZES = {"n": 12, "m": 5, "k_1": 3, "ids.45_dim_1": 7}


def expression(chance: random.Random, depth: int) -> str:
    if not depth or chance.random() < 0.2:
        return chance.choice([*SIZES, str(chance.randrange(9))])
    first, second = (expression(chance, depth - 1) for _ in range(2))
    forms = (
        "{0} + {1}",
        "{0} - {1}",
        "{0}*{1}",
        "({0})//({1} + 1)",
        "Max({0}, {1})",
        "min({0},{1})",
        "({0})**2",
    )
    forms += ("floor(({0})/3)", "({0}) % 4", "Mod({0}, 3)", "({0})", "(({0}) - ({1}))*2")
    return chance.choice(forms).format(first, second)


def sympy_size(text: str) -> int | None:
    try:
        size = ir.SymbolicDim(text).evaluate(SIZES)
    except Exception:  # whatever SymPy says
        return None
    return size if isinstance(size, int) and size >= 0 else None


def test_drawn_expressions_have_the_size_that_sympy_computes():
    chance, compared = random.Random(1), 0
    for _ in range(150):
        text = expression(chance, 3)
        if not text.isidentifier():
            assert evaluate(text, SIZES) == sympy_size(text), text
            compared += 1
    assert compared > 80


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("past + 2*sequence", {"past", "sequence"}),
        ("Max(1, s0)", {"s0"}),
        ("floor(height/16)*floor(width/16)", {"height", "width"}),
        ("sqrt(n)", {"n"}),
        ("n//(m - 1)", {"n", "m"}),
        ("ids.45_dim_1 + 1", {"ids.45_dim_1"}),
        ("batch-size", {"batch", "size"}),
        ("past +", set()),
        ("factorial(n)", set()),
        ("floor(n, 2)", set()),
        ("Mod(n)", set()),
        ("mod(n, 2, m)", set()),
        ("n n", set()),
        ("__import__('os')", set()),
    ],
)
def test_the_names_in_an_expression(text, names):
    assert names_in(text) == names


def test_what_is_no_size_is_not_known():
    for text in ("n - 13", "n/5", "sqrt(m)", "n//0", "n % 0", "gone + 1", "n**64*n**64", "9" * 400):
        assert evaluate(text, SIZES) is None, text
    assert evaluate("sqrt(n + 4)", SIZES) == 4
    assert evaluate("n**17", SIZES) == 12**17
    assert evaluate("n**18", SIZES) is None  # more than 64 bits


ENDLESS = (
    *(
        "n**n**n",
        "2**2**2**2**2**2*n",
        "n**99999999",
        "9**9**9*n",
        "((((n**99)**99)**99)**99)**99",
        "max(n, 1)**7**7",
    ),
    *(
        "n%m%" * 80 + "7",
        "*".join(["n"] * 20_000),
        "max(" + ",".join(f"n*{k}-m" for k in range(40)) + ")",
    ),
    *(
        "(" * 240 + "n" + ")" * 240,
        "-" * 490 + "n",
        "9" * 5000 + "*n",
        "max(" * 100 + "n" + ")" * 100,
        "n" * 100_000,
    ),
)


@pytest.mark.parametrize("text", ENDLESS)
def test_expressions_that_sympy_computes_for_ever_end(text):
    began = time.monotonic()
    names_in(text)
    evaluate(text, {**SIZES, "n": 2**63 - 1})
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("text", ENDLESS)
def test_an_input_of_such_a_size_is_read(text):
    x = ir.val("x", ir.DataType.FLOAT, [text, 4])
    act = ir.node("Relu", [x], name="act", metadata_props={"htp.module": "act"})
    act.outputs[0].name = "y"
    model = ir.Model(
        ir.Graph([x], act.outputs, nodes=[act], opset_imports={"": 20}, name="g"), ir_version=10
    )
    with within(20):
        assert htp_export.cost(model, shapes={"x": [3, 4]}).modules["act"].other_flops == 12
        assert htp_export.info(model).inputs[0].shape[1] == 4
        assert htp_export.profile(model, runs=1, warmup=0, shapes={"x": [3, 4]}).end_to_end_ms > 0
