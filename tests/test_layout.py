"""The package is layered: a module imports only from rows above its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import htp_export

PACKAGE = Path(htp_export.__file__).parent

# Top to bottom, by folder; a module imports from its own folder and from rows above. Within a row no folder imports
# from another one.
ROWS = [
    ["discovery", "errors"],
    ["process"],
    ["format"],
    ["files"],
    ["model"],
    ["huggingface", "runtime"],
    ["costs", "passes"],
    ["surgery"],
    ["exporter"],
    ["attention"],
    ["findings", "provenance"],
    ["deploy", "differences", "fingerprints", "run"],
    ["compress"],
    ["inspection"],
    ["show"],
    ["cli"],
]
ROW = {name: number for number, names in enumerate(ROWS) for name in names}
# What stands above all rows: the face of the package, which imports nothing until it is asked to, and its program.
FACES = {"htp_export", "htp_export.__main__", "htp_export.tools"}


def folder_of(module: str) -> str:
    """The folder in the package that a module lies in, at any depth; of a module at the top, its name."""
    return module.split(".")[1]


def row_of(module: str) -> int | None:
    return ROW.get(folder_of(module))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def running_code(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that can run, in functions too; what only type checkers read is left out."""
    yield node
    for child in [*node.orelse] if is_type_checking(node) else ast.iter_child_nodes(node):
        yield from running_code(child)


def imports(source: str, code: Callable[[ast.AST], Iterator[ast.AST]] = running_code) -> set[str]:
    """The modules of the package that a source imports, at its top or inside functions."""
    found = set()
    for node in code(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return {name for name in found if name.split(".")[0] == "htp_export"}


GRAPH = {name: imports(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


@pytest.mark.parametrize("name", sorted(set(MODULES) - FACES))
def test_module_has_a_row_and_imports_only_from_rows_above(name):
    row = row_of(name)
    assert row is not None, f"{name} stands in no row of tests/test_layout.py"
    others = {other for other in GRAPH[name] - {"htp_export"} if folder_of(other) != folder_of(name)}
    assert not {other for other in others if row_of(other) >= row}, f"{name} imports from a folder that is not above"


def test_nothing_but_the_command_line_imports_the_face_of_the_package():
    importing = {name for name, imported in GRAPH.items() if "htp_export" in imported}
    assert {name.split(".")[1] for name in importing - FACES} <= {"cli"}


def test_there_are_no_import_cycles_for_type_checkers_either():
    graph = {name: imports(path.read_text(encoding="utf-8"), ast.walk) for name, path in MODULES.items()}
    del graph["htp_export"]  # it names everything for type checkers
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " → ".join((*above[above.index(name) :], name))
        if name in done:
            return
        for other in sorted(graph.get(name, set())):
            visit(other, (*above, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_no_module_is_named_like_a_public_function():
    functions = {name for name in htp_export.__all__ if not name[0].isupper()}
    assert {name for name in MODULES if name.rpartition(".")[2] in functions} == set()


def test_plans_become_values_of_modules_in_one_place():
    """A model of PyTorch alone has no calls: there, rules hold by path."""
    below = re.compile(r"\b(select_below|chosen_and_excluded)\b")
    reading = {
        name.removeprefix("htp_export.") for name, path in MODULES.items() if below.search(path.read_text("utf-8"))
    }
    assert reading == {"format.selectors", "model.plans", "compress.quantization.training"}


def test_lazy_imports_and_those_for_type_checkers_are_told_apart():
    source = """
import htp_export.format.tags
if TYPE_CHECKING:
    import htp_export.show
else:
    import htp_export.files.model_files
def later():
    from htp_export.errors import FileError
    from htp_export.model import tagged
"""
    names = ("format.tags", "files.model_files", "errors", "model.tagged")
    assert imports(source) == {"htp_export." + name for name in names}
