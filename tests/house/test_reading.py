"""How the package reads: plain technical English, and code in steps.

The measures are those of a first reading: a docstring that begins with "What" has a clause where a noun belongs; a
comprehension inside another one has to be taken apart before it is understood.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "htp_export"
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

MOST = {"what": 4, "those": 3, "said|says": 2, "stands": 1, "whoever|whatever|nobody": 1}
"""Word → the most occurrences in 1,000 words of the docstrings and comments of a file."""

FREE = 2
"""Occurrences that a file may have in any case: in a short file, one word is many in a thousand."""

MOST_BRANCHES = 26
"""Branches of a function, counted as in `branches`: more do not fit in a head at once."""


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text.split("Examples:")[0]


def prose(source: str, tree: ast.AST) -> str:
    """The docstrings and comments of a file, without code."""
    comments = [
        token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
        and not re.match(r"# ?(noqa|type:|fmt|pragma)", token.string)
    ]
    return re.sub(r"`+[^`]*`+", " ", "\n".join([*docstrings(tree), *comments]))


def old_words(source: str, tree: ast.AST) -> list[str]:
    """The words that are too frequent in a file, and docstrings that begin with "What"."""
    text = prose(source, tree)
    count = len(re.findall(r"\w+", text))
    found = [
        word
        for word, most in MOST.items()
        if len(re.findall(rf"\b({word})\b", text, re.IGNORECASE)) > max(FREE, most * count / 1000)
    ]
    begins = [
        each for each in docstrings(tree) if re.match(r"(what|whether what)\b", each, re.IGNORECASE)
    ]
    return [*found, *(["docstring: What ..."] if begins else [])]


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def has_nested_comprehension(tree: ast.AST) -> bool:
    outer = [node for node in ast.walk(tree) if isinstance(node, COMPREHENSIONS)]
    return any(
        isinstance(inner, COMPREHENSIONS)
        for node in outer
        for inner in ast.walk(node)
        if inner is not node
    )


def branches(function: ast.AST) -> int:
    """The branches of a function: conditions, loops, handlers, and parts of comprehensions and of boolean operators."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(
            node, ast.If | ast.For | ast.While | ast.ExceptHandler | ast.IfExp | ast.match_case
        ):
            count += 1
    return count


def most_branches(tree: ast.AST) -> int:
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return max(map(branches, functions), default=0)


@pytest.mark.parametrize("file", FILES)
def test_a_file_reads_like_the_field(file):
    source = FILES[file].read_text(encoding="utf-8")
    tree = ast.parse(source)
    words = old_words(source, tree)
    assert not words
    assert not has_nested_comprehension(tree)
    assert most_branches(tree) <= MOST_BRANCHES


def test_a_file_of_the_old_style_is_seen():
    source = '''"""What is told of those whom nobody knows."""
# What stands there is what those say who made what they were given.
def made(given):
    """What it is given, and whatever those said."""
    return [[each for each in one] for one in given]
'''
    tree = ast.parse(source)
    assert old_words(source, tree) == ["what", "those", "docstring: What ..."]
    assert has_nested_comprehension(tree)
    assert branches(tree) == 2
