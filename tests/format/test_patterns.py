"""Regular expressions in linear time: they match what `re` matches, and end where `re` does not."""

import itertools
import random
import re
import time

import pytest

from htp_export.format.patterns import Pattern
from tests.exporting import every

WORDS = ("a", "b", ".", r"\.", "[ab]", "[^a]", r"[^\w]", "[a-b.]", r"\w", r"\W", r"\d", r"\s", "A")
PLACES = (
    "^",
    "$",
    r"\b",
    r"\B",
    r"\A",
    r"\Z",
    "",
    "(?=)",
    "(?!)",
    "(?<=a)",
    "(?<!a)",
    "(?<=ab|ba)",
    "(?<!b.)",
)
REPEATS = ("*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{,2}", "{2,}", "{0,2}?")
GROUPS = ("(?:{})", "({})", "(?P<name>{})", "(?=.*{})", "(?!{})", "(?i:{})", "(?s:{})", "(?m:{})")


def expression(chance: random.Random, depth: int) -> str:
    """An expression that is drawn; some are none of ``re``."""
    if not depth or chance.random() < 0.2:
        return chance.choice(chance.choice((WORDS, WORDS, PLACES)))
    first, second = (expression(chance, depth - 1) for _ in range(2))
    kind = chance.randrange(4)
    if kind == 0:
        return f"(?:{first}){chance.choice(REPEATS)}"
    if kind == 1:
        return f"(?:{first}|{second})"
    return chance.choice(GROUPS).format(first) if kind == 2 else first + second


def test_drawn_expressions_match_what_re_matches():
    chance = random.Random(0)
    texts = [
        "".join(word) for count in range(5) for word in itertools.product("abA.\n", repeat=count)
    ]
    compared = 0
    for _ in range(3000):
        text = expression(chance, 4)
        try:
            known = re.compile(text)
        except re.error:
            with pytest.raises(ValueError, match=r"\S"):
                Pattern(text)
            continue
        pattern = Pattern(text)
        for each in chance.sample(texts, 10):
            assert pattern.fullmatch(each) == (known.fullmatch(each) is not None), (text, each)
            assert pattern.match(each) == (known.match(each) is not None), (text, each)
            compared += 1
    assert compared > 20_000


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (
            r"(?:.*\.)?layers\.\d+\.(?:self_attn|mlp)\.(q|k|v|o)_proj",
            "model.layers.12.self_attn.q_proj",
        ),
        (r"^(?!.*visual).*(?:gate_proj|up_proj).*", "model.layers.0.mlp.up_proj"),
        (r".*?(?:language|text).*?(?:\bmlp\b).*?", "language_model.mlp"),
        (r"(?i)ENCODER\.LAYER\.[0-3]", "encoder.layer.3"),
        (r"layer\.(?:1[0-9]|2[0-3])", "layer.23"),
        (r"[^.]+\.\w{2,}", "encoder.fc"),
    ],
)
def test_expressions_that_people_write_are_read(text, path):
    assert re.fullmatch(text, path)
    assert Pattern(text).fullmatch(path)
    assert not Pattern(text).fullmatch("visual")


SLOW = (
    "(.|.|.|.|.|.|.|.)*!",
    "(" + ".|" * 25 + ".)*!",
    "(a*)*b",
    "((a+)+)+b",
    "(a|aa)+b",
    "(x+x+)+y",
    ".*.*.*.*.*.*=",
)


@pytest.mark.parametrize("text", SLOW)
def test_expressions_that_re_does_not_end_with_end(text):
    began = time.monotonic()
    pattern = Pattern(text)
    assert not pattern.fullmatch("a" * 3000)
    assert not pattern.fullmatch("encoder_layer" * 100)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "text",
    every(
        2,
        [
            *("(a|b)*a(a|b){600}", "(.{1,99}){1,99}x", "(?=a)" * 5000),
            *(f"(?:{'(?=.*a|.*b)' * 500})*.*", f"{'(' * 50}a{'){2}' * 50}"),
        ],
    ),
)
def test_expressions_that_take_too_much_are_refused_in_a_short_time(text):
    began, chance = time.monotonic(), random.Random(0)
    with pytest.raises(ValueError, match=r"is too large|needs too many steps"):
        Pattern(text).fullmatch("".join(chance.choice("ab") for _ in range(100_000)))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "text",
    ["(?:){4000000000}", "(){4000000000}", "((){4000000000}){4000000000,}", "(a{0}){4000000000}"],
)
def test_repeats_of_nothing_take_no_time(text):
    began = time.monotonic()
    assert Pattern(f"{text}b").fullmatch("b")
    assert not Pattern(f"{text}b").fullmatch("ab")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (r"(a)\1", "groupref"),
        ("(?P<x>a)(?P=x)", "groupref"),
        ("(a)?(?(1)b|c)", "groupref_exists"),
        ("(?>a)b", "atomic_group"),
        ("a*+b", "possessive_repeat"),
        ("(", "missing )"),
        ("a{99999999999999999999}", "too large"),
        (f"a{{{'9' * 5000}}}", "digits"),
        ("(" * 3000 + ")" * 3000, "recursion"),
    ],
)
def test_what_is_not_read_is_a_value_error(text, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        Pattern(text)
