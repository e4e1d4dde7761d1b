"""What README and docs show runs from top to bottom as it stands: tests/documents.py says how."""

import ast
import importlib
import itertools
import operator
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import htp_export
from htp_export import results
from htp_export.command import main as program
from htp_export.command.commands import GROUPS, CommandGroup, command_groups, command_names
from htp_export.format.selectors import select
from tests import documents

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS]
WRONG = r"""# A page whose blocks do not hold, but for those that are not run

    htp-export tree net.onnx            # a comment
    pip install something
    htp-export verify google-bert/bert

Text, and what is shown, but for times and what is left out:

```console
$ echo 'module   total ms\n0  7.1 ms\nmore'
module  total ms
0       1.234 ms
...
$ echo 'module  total ms'
module  total ms
0       1.234 ms
```

<!-- not run: no network -->

```python
import nowhere
```

```python
1 + 1, "two"  # 2, 'two'
print("seen")  # a word
1 + 1  # 3
```

```
unseen
```

<!-- as python -->

```python
print("another program")
```
"""


def test_a_page_runs_and_says_what_is_not_as_it_shows(tmp_path, forked, monkeypatch):
    monkeypatch.setenv("PATH", forked)
    (tmp_path / "page.md").write_text(WRONG)
    failed = list(documents.run(tmp_path / "page.md", tmp_path))
    places = ["3: htp-export tree net.onnx            # a comment", "14: echo 'module  total ms'"]
    places += ["26: the snippet fails", "32: the page shows", "38: the page shows"]
    assert [each.splitlines()[0] for each in failed] == [f"page.md:{place}" for place in places]
    assert "ends with 2: htp-export: error: net.onnx: cannot be read" in failed[0]
    assert "2, where the page has 3" in failed[2]
    assert failed[3].endswith("and the snippet prints\nseen\n")
    assert not documents.can_run("htp-export view net.onnx --serve     # a server")
    assert documents.can_run("htp-export partition net.onnx 2 -o stages/ --serve ray")


def test_the_commands_of_the_readme_are_found():
    assert len(documents.commands(README)) > 20


def test_every_command_of_a_page_is_one_that_there_is():
    group = typer.main.get_command(program.app)
    for command in itertools.chain.from_iterable(map(documents.commands, PAGES)):
        if not command.text.startswith("htp-export "):
            continue
        _, name, *words = words_of(command.text)
        words = [word for word in words if word not in program.GLOBAL_OPTIONS]
        assert name in group.commands, command
        found = group.get_command(None, name)
        if isinstance(found, CommandGroup):
            name, *words = words
            found = found.get_command(None, name)
        # Raises where an option is unknown or an argument is missing.
        found.make_context(name, words)


def test_the_help_and_the_guides_of_the_readme_have_the_same_commands_in_the_same_order():
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|[^|]*\|[^|]+\|$",
        README.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    guides = {guide: re.findall(r"`(\w+)`", names) for guide, names in rows[1:]}
    helped = {
        group: list(dict.fromkeys(name.split()[0] for name in names))
        for group, names in command_groups().items()
    }
    assert list(guides.items()) == list(helped.items())
    assert tuple(helped) == GROUPS


def test_old_names_are_gone_and_new_ones_are_there():
    text = (ROOT / "docs" / "changes.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)  # commands, functions, and options
    commands, functions = (
        re.findall(r"^\| ?(.*?) \| (.*?) \|$", table, re.MULTILINE)[1:] for table in tables[:2]
    )
    known = {*command_names(), *(name.split()[0] for name in command_names())}
    for old, new in commands:
        assert not known & words_in(old)
        assert words_in(new) <= known
    for old, new in functions:
        assert not set(htp_export.__all__) & words_in(old)
        for name in words_in(new):
            assert operator.attrgetter(name)(htp_export)


def words_in(cell):
    """The names in a cell: what stands in backticks, up to what is typed after it in capitals or as an option."""
    return {re.split(r" (?=[A-Z-])", code)[0] for code in re.findall(r"`([^`]+)`", cell)}


def words_of(command: str) -> list[str]:
    """The words of a command as a shell gives them to a program."""
    words = shlex.split(command, comments=True)
    return words[: words.index(">")] if ">" in words else words


def test_the_snippets_of_pages_are_python():
    for page in PAGES:
        for block in documents.blocks(page):
            if block.language == "python":
                ast.parse(block.text, f"{page.name}:{block.line}")


def run(page: Path, folder: Path) -> str:
    command = [sys.executable, "-m", "tests.documents", str(page), str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not ended.stderr.startswith("Traceback"), ended.stderr
    return ended.stdout.strip()


def test_every_public_name_stands_on_a_page_of_the_api():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    named = re.findall(r"^::: htp_export\.((?:lora\.)?\w+)$", "\n".join(pages), re.MULTILINE)
    of_results = re.findall(r"^::: htp_export\.results\.(\w+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(of_results) == results.__all__
    # on one page, with their tree
    errors = {name for name in htp_export.__all__ if name.endswith("Error")}
    assert sorted(named) == sorted(
        {*htp_export.__all__, *(f"lora.{name}" for name in htp_export.lora.__all__), "errors"}
        - errors
    )


def test_the_examples_of_selectors_select_what_the_page_says():
    from examples.net import Tagger

    classes = {
        path: f"{type(m).__module__}.{type(m).__qualname__}" for path, m in Tagger().named_modules()
    }
    text = (ROOT / "docs" / "selectors.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^\| selector \| modules \|\n.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [
        [re.findall(r"`([^`]+)`", cell) for cell in row.split(" | ")] for row in table.splitlines()
    ]
    assert len(rows) > 12
    for [selector], modules in rows:
        assert [path or "." for path in select(selector, classes)] == modules, selector


WORDS = {
    "tag": "tags?|tagged",
    "owner": "owners?",
    "region": "regions?",
    "boundary": "boundary|boundaries",
    "fate": "fates?",
    "contamination": "contamination",
    "inherited-error": "inherits?",
    "signature": "signatures?",
    "recipe": "recipes?",
}
"""Section of docs/concepts.md → its word on other pages."""

FOR_READERS_OF_THE_CODE = {
    *(
        "architecture",
        "benchmarks",
        "changes",
        "compatibility",
        "comparison",
        "evidence",
        "extending",
        "files",
    ),
    *("format", "json", "models", "owners", "passes", "stability", "tool_tables", "untrusted"),
}
"""Pages on how it works, and tables: they come after the concepts."""


@pytest.mark.parametrize("anchor", WORDS)
def test_a_word_of_this_package_is_linked_to_its_meaning_where_a_page_first_has_it(anchor):
    title = anchor.replace("-", " ").capitalize()
    concepts = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert re.search(rf"^##+ {title}$", concepts, re.MULTILINE)
    word = re.compile(rf"(?<![\w.-])({WORDS[anchor]})(?![\w-])", re.IGNORECASE)
    unexplained = []
    for page in DOCS:
        if page.stem in ("concepts", *FOR_READERS_OF_THE_CODE):
            continue
        for line in prose_lines(page):
            plain = re.sub(r"`[^`]*`|!?\[[^]]*\]\([^)]*\)|\*\*[^*]*\*\*", "", line)
            if f"](concepts.md#{anchor})" in line:
                break
            if word.search(plain):
                unexplained.append(f"{page.name}: {line}")
                break
    assert not unexplained


def prose_lines(page: Path) -> list[str]:
    """The lines of a page without headings, comments and blocks of code."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return [line for line in text.splitlines() if not line.startswith(("    ", "#", "<!--"))]


@pytest.mark.long
def test_the_python_of_a_command_on_a_page_is_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    model, args = importlib.import_module("examples.net").make()
    htp_export.export(model, args, "stand_in.onnx", verbose=False)
    stand_ins = documents.StandIns(tmp_path, tmp_path / "stand_in.onnx")
    shown = [(page, entry) for page in PAGES for entry in stand_ins.shown(page)]
    assert len(shown) > 40
    for page, (block, command, python) in shown:
        assert block.text == python, f"{page.name}:{block.line}: {command.text} --as-python"


def test_a_page_chooses_the_command_whose_python_it_shows(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "    htp-export tap a.onnx b:out\n    htp-export info a.onnx\n\n<!-- as python: tap -->\n\n```python\n```\n"
        "\n<!-- as python -->\n\n```python\n```\n"
    )
    chosen = [command.text.split()[1] for _, command in documents.shown_as_python(page)]
    assert chosen == ["tap", "info"]
    page.write_text("<!-- as python: tap -->\n\n```python\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:4: no command above begins with"):
        documents.shown_as_python(page)


def test_each_function_of_a_command_is_called_on_some_page():
    snippets = [
        block.text
        for page in PAGES
        for block in documents.blocks(page)
        if block.language == "python"
    ]
    text = "\n".join(snippets)
    of_commands = {name.replace(" ", ".") for name in command_names()} - {"tree", "run"}
    assert {name for name in of_commands if f"htp_export.{name}(" not in text} == set()


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=() if page.stem == "tutorial" else pytest.mark.slow)
        for page in PAGES
    ],
)
def test_a_page_runs_as_it_stands_in_a_folder_of_its_own(page, tmp_path, forked, monkeypatch):
    monkeypatch.setenv("PATH", forked)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    failed = run(page, tmp_path)
    assert not failed, failed


def test_the_page_of_the_tools_lists_every_script():
    listed = set(
        re.findall(r"\b(\w+)\.py\b|tools\.(\w+)", (ROOT / "tools" / "README.md").read_text())
    )
    names = {first or second for first, second in listed}
    assert names == {path.stem for path in (ROOT / "tools").glob("*.py")}
