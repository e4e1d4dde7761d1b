"""The package is layered: a module imports only from rows above its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import htp_export

PACKAGE = Path(htp_export.__file__).parent

# Top to bottom; each module or folder of the package stands in one row, but for modules of a folder that stand in an
# earlier one by their own names. Within a row there are no cycles.
ROWS = [
    ["errors"],
    ["model"],
    ["restoring"],
    ["tags"],
    ["hierarchy", "module_paths", "parameters", "signatures"],
    [
        "call_tree",
        "command_words",
        "crossings",
        "garbage",
        "json_file",
        "names",
        "npz_file",
        "filesystem",
        "data_notes",
        "progress",
        "replacing",
        "rewiring",
        "sharing",
        "slots",
        "sparse",
        "stored",
        "structure",
        "wire",
    ],
    [
        "data_files",
        "files",
        "model.dependence",
        "data_plan",
        "placing",
        "regions",
        "refating",
        "shapes",
        "tables",
        "tag_facts",
        "torch_scopes",
        "tagged",
        "model_faults",
    ],
    ["cutting", "cut_models"],
    ["nested"],
    ["capture"],
    ["owners"],
    ["exporter"],
    ["attention"],
    ["huggingface"],
    ["runtime"],
    ["passes"],
    ["provenance"],
    ["tools"],
    ["analyze"],
    ["run"],
    ["surgery"],
    ["compress"],
    ["show"],
    ["cli"],
]
ROW = {name: number for number, names in enumerate(ROWS) for name in names}
# What stands above all rows: the face of the package, which imports nothing until it is asked to, and its program.
FACES = {"htp_export", "htp_export.__main__"}


def row_of(module: str) -> int | None:
    parts = module.split(".")[1:]
    return ROW.get(".".join(parts), ROW.get(parts[0]))


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


def imports(source: str) -> set[str]:
    """The modules of the package that a source imports, at its top or inside functions."""
    found = set()
    for node in running_code(ast.parse(source)):
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
    below = {other for other in GRAPH[name] - {"htp_export"} if row_of(other) > row}
    assert not below, f"{name} imports from rows below its own"


def test_nothing_but_the_command_line_imports_the_face_of_the_package():
    importing = {name for name, imported in GRAPH.items() if "htp_export" in imported}
    assert {name.split(".")[1] for name in importing - FACES} <= {"cli"}


def test_there_are_no_import_cycles():
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " → ".join((*above[above.index(name) :], name))
        if name in done:
            return
        for other in sorted(GRAPH.get(name, set())):
            visit(other, (*above, name))
        done.add(name)

    for name in sorted(GRAPH):
        visit(name, ())


def test_no_module_is_named_like_a_public_function():
    functions = {name for name in htp_export.__all__ if not name[0].isupper()}
    assert {name for name in MODULES if name.rpartition(".")[2] in functions} == set()


def test_lazy_imports_and_those_for_type_checkers_are_told_apart():
    source = """
import htp_export.tags
if TYPE_CHECKING:
    import htp_export.show
else:
    import htp_export.files
def later():
    from htp_export.errors import FileError
    from htp_export import tagged
"""
    assert imports(source) == {"htp_export." + name for name in ("tags", "files", "errors", "tagged")}
