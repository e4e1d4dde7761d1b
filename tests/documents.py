"""README and the pages of docs/ as programs: what stands in one is run from top to bottom, in a folder of its own.

    python -m tests.documents docs/cost.md FOLDER
    python -m tests.documents --refresh [PAGE...]   # writes the Python of commands into the pages, or into all

- Lines of indented blocks that begin with ``htp-export`` or ``echo`` are run by a shell, others are not. The program is
  the one on the ``PATH``.
- So are lines of ``console`` fences that begin with ``$ ``. The lines below are what the command prints: ``...`` stands
  for any lines, or for any part of a line; numbers that depend on the machine are not compared.
- Snippets of a page in Python share their names. In ``value  # 3`` the comment is compared if it is a literal. A fence
  without a language right behind a snippet is what the snippet prints.
- What ``<!-- not run: why -->`` stands before is not run.
- A snippet after ``<!-- as python -->`` is what ``--as-python`` prints for the last command above it; it is not run.
  ``<!-- as python: tap -->`` means the last command above that begins with ``htp-export tap``.
"""

import ast
import contextlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tokenize
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_AS_PYTHON = re.compile(r"<!-- as python(?:: (.+))? -->")
NEEDS_THE_HUB = ("google-bert/", "hub.onnx")
RUN = ("htp-export ", "echo ")
_SERVES_UNTIL_STOPPED = re.compile(r"--serve(\s+--|\s*#|\s*$)")
_LONGEST = 900  # seconds that a command may take; one that waits for something would wait for ever


@dataclass
class Block:
    """A block of code in a page.

    Attributes:
        language: What stands behind its fence; ``indented`` where there is none.
        line: The number of its first line.
        lines: Its lines.
        run: Whether it is run.
        follows: The language of the block before, where nothing but blank lines is between.
        of_command: The first words of the command above of which it is the Python, without the name of
            the program; None if it is of no command.
    """

    language: str
    line: int
    lines: list[str] = field(default_factory=list)
    run: bool = True
    follows: str = ""
    of_command: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


@dataclass
class Command:
    """A command of a page, and what it prints, where the page shows it."""

    line: int
    text: str
    output: list[str] | None = None


def blocks(page: Path) -> list[Block]:
    """The blocks of code of a page, in order."""
    found: list[Block] = []
    open_fence: Block | None = None
    run, before, blank = True, "", True
    of_command: str | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if open_fence is None:
                open_fence = Block(line[3:].strip(), number + 1, run=run, follows=before)
                open_fence.of_command = of_command
                found.append(open_fence)
            else:
                before, run, open_fence = open_fence.language or "plain", True, None
                of_command = None
        elif open_fence is not None:
            open_fence.lines.append(line)
        elif line.startswith("    ") and (blank or before == "indented"):
            if before != "indented":
                found.append(Block("indented", number, run=run))
            found[-1].lines.append(line[4:])
            before, run = "indented", True
        elif line.strip():
            before = ""
            run = not line.startswith("<!-- not run")
            marked = _AS_PYTHON.fullmatch(line)
            of_command = None if marked is None else marked[1] or ""
        blank = not line.strip()
    return found


def commands_of(block: Block) -> list[Command]:
    """The commands of a block."""
    if block.language == "indented":
        return [
            Command(block.line + at, line)
            for at, line in enumerate(block.lines)
            if line.startswith(RUN)
        ]
    found: list[Command] = []
    if block.language == "console":
        for at, line in enumerate(block.lines):
            if line.startswith("$ "):
                found.append(Command(block.line + at, line[2:], []))
            elif found and found[-1].output is not None:
                found[-1].output.append(line)
    return [command for command in found if command.text.startswith(RUN)]


def commands(page: Path) -> list[Command]:
    """The commands of a page, those of the hub and servers too."""
    return [command for block in blocks(page) for command in commands_of(block)]


def can_run(command: str) -> bool:
    """Whether a command needs no network, and ends."""
    return not any(word in command for word in NEEDS_THE_HUB) and not _SERVES_UNTIL_STOPPED.search(
        command
    )


_MACHINE = (
    (re.compile(r"\(worst [^)]*\){1,2}"), "(worst #)"),
    (re.compile(r"\d+(\.\d+)?e-\d+"), "#"),
    (re.compile(r"\d+\.\d+ (ms|s)\b"), "# s"),
    (re.compile(r"max \d+(\.\d+)?"), "max #"),
    # torch writes paths of sources into a model
    (re.compile(r"(\.onnx) \(\d+(\.\d+)? [kMG]?B\)"), r"\1 (#)"),
)
# The lines of a table of `profile`: its times, and the operators that took longest.
_TIMES = re.compile(r"(?:\s+\d+\.\d{3}){2}\s+\d+\.\d%(\s+\d+).*")


def comparable(line: str) -> str:
    """A line of output without what depends on the machine, nor on the widths of columns."""
    line = _TIMES.sub(r" # # #\1", line)
    for pattern, word in _MACHINE:
        line = pattern.sub(word, line)
    return " ".join(line.split())


def same_output(expected: list[str], printed: list[str]) -> bool:
    """Whether a page shows what was printed: ``...`` stands for any lines, or for any part of a line."""
    pattern = [
        r"(?:.*\n)*" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n"
        for line in map(comparable, filter(str.strip, expected))
    ]
    text = "".join(f"{comparable(line)}\n" for line in printed if line.strip())
    return re.fullmatch("".join(pattern), text) is not None


def instrumented(snippet: str) -> ast.Module:
    """A snippet in which every value with a literal beside it is compared with that."""
    tree = ast.parse(snippet)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(snippet).readline)
        if token.type == tokenize.COMMENT
    }
    for statement in tree.body:
        comment = comments.get(statement.end_lineno or 0, "")
        if not isinstance(statement, ast.Expr) or not is_literal(comment):
            continue
        call = ast.Call(ast.Name("_hold", ast.Load()), [statement.value, ast.Constant(comment)], [])
        statement.value = ast.copy_location(call, statement.value)
    return ast.fix_missing_locations(tree)


def is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return True


def _hold(value: Any, comment: str) -> None:
    expected = ast.literal_eval(comment)
    assert value == expected, f"{value!r}, where the page has {comment}"


def run(page: Path, folder: Path) -> Iterator[str]:
    """Run a page in a folder; what fails, or prints what the page does not show."""
    names: dict[str, Any] = {"_hold": _hold, "__name__": "__main__"}
    printed = ""
    shown = {block.line: command for block, command in shown_as_python(page)}
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if not block.run:
            continue
        if block.of_command is not None:
            command = shown[block.line]
            if block.text != (python := python_of(command, folder)):
                yield f"{where}: the page shows\n{block.text}and `{command.text} --as-python` prints\n{python}"
            continue
        for command in commands_of(block):
            if can_run(command.text):
                yield from _run_command(command, page, folder)
        if block.language == "python":
            out = io.StringIO()
            try:
                with contextlib.chdir(folder), contextlib.redirect_stdout(out):
                    exec(compile(instrumented(block.text), where, "exec"), names)
            except Exception:
                yield f"{where}: the snippet fails\n{block.text}{traceback.format_exc(limit=-4)}"
            printed = out.getvalue()
        if (
            block.language == ""
            and block.follows == "python"
            and not same_output(block.lines, printed.splitlines())
        ):
            yield f"{where}: the page shows\n{block.text}and the snippet prints\n{printed}"


def shown_as_python(page: Path) -> list[tuple[Block, Command]]:
    """The blocks of a page that are the Python of a command, and these commands."""
    found: list[tuple[Block, Command]] = []
    above: list[Command] = []
    for block in blocks(page):
        above += commands_of(block)
        if block.of_command is not None:
            begin = f"{RUN[0]}{block.of_command}"
            named = [command for command in above if command.text.startswith(begin)]
            assert named, f"{page.name}:{block.line}: no command above begins with {begin!r}"
            found.append((block, named[-1]))
    return found


def python_of(command: Command, folder: Path) -> str:
    """What ``--as-python`` prints for a command, as a page has it; its error, if it fails."""
    words, _, _ = command.text.partition("  #")
    ended = subprocess.run(
        f"{words} --as-python", shell=True, cwd=folder, capture_output=True, text=True, check=False
    )
    return ended.stdout or ended.stderr


class StandIns:
    """The Python of commands in this process, with a small model for each that a command reads.

    The folder has to be the current one. Of files, only what ``echo`` of the page writes is as there:
    a command whose Python depends on the contents of another file is not for a page.

    Args:
        folder: An empty folder.
        model: The model file that stands for each.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model

    def shown(self, page: Path) -> list[tuple[Block, Command, str]]:
        """The blocks of a page that show Python, their commands, and what ``--as-python`` prints for them."""
        for command in commands(page):
            if command.text.startswith("echo "):
                subprocess.run(command.text, shell=True, cwd=self._folder, check=True)
        return [
            (block, command, self.python_of(command)) for block, command in shown_as_python(page)
        ]

    def python_of(self, command: Command) -> str:
        """What ``--as-python`` prints for a command; its error, if it fails."""
        from htp_export.command.main import main

        words = shlex.split(command.text, comments=True)[1:]
        outputs = {
            word for option, word in itertools.pairwise(words) if option in ("-o", "--output")
        }
        models = [word for word in words if word.endswith(".onnx") and word not in outputs]
        for model in models:
            (self._folder / model).symlink_to(self._model)
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main([*words, "--as-python"])
        finally:
            for model in models:
                (self._folder / model).unlink()
        return out.getvalue() or err.getvalue()


def refresh(page: Path, stand_ins: StandIns) -> None:
    """Write the Python of commands into the blocks of a page that show it."""
    lines = page.read_text(encoding="utf-8").splitlines()
    moved = 0
    for block, _, python in stand_ins.shown(page):
        new = python.splitlines()
        begin = block.line - 1 + moved
        lines[begin : begin + len(block.lines)] = new
        moved += len(new) - len(block.lines)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run_command(command: Command, page: Path, folder: Path) -> Iterator[str]:
    where = f"{page.name}:{command.line}: {command.text}"
    ended = subprocess.run(
        command.text,
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=_LONGEST,
    )
    if ended.returncode:
        yield f"{where}\nends with {ended.returncode}: {ended.stderr}"
    elif command.output and not same_output(command.output, ended.stdout.splitlines()):
        shown = "\n".join(command.output)
        yield f"{where}\nthe page shows\n{shown}\nand the command prints\n{ended.stdout}"


def _refresh_pages(pages: list[str]) -> None:
    """Refresh some pages, or all of them."""
    root = Path(__file__).parents[1]
    found = [Path(page).absolute() for page in pages] or [
        root / "README.md",
        *sorted((root / "docs").glob("*.md")),
    ]
    sys.path.insert(0, str(root))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        net = Path(folder, "stand_in.onnx")
        program = [sys.executable, "-m", "htp_export"]
        subprocess.run(
            [*program, "export", "--entry", "examples.net:make", "-o", str(net), "-q"],
            check=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        stand_ins = StandIns(Path(folder), net)
        for page in found:
            refresh(page, stand_ins)


if __name__ == "__main__":
    if sys.argv[1] == "--refresh":
        _refresh_pages(sys.argv[2:])
        sys.exit()
    failed = list(run(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute()))
    print("\n\n".join(failed))
    sys.exit(bool(failed))
