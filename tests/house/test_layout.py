"""The package is layered: a module imports only from rows above its own."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import htp_export
from htp_export.discovery import imported_for_types

PACKAGE = Path(htp_export.__file__).parent

# Top to bottom, by folder; a module imports from its own folder and from rows above. Within a row no folder imports
# from another one.
ROWS = [
    ["errors", "version"],
    ["process"],
    ["discovery", "extras"],
    ["format"],
    ["files", "reporting", "shapes"],
    ["model"],
    ["lineage"],
    ["weights", "editing", "runtime"],
    ["alignment", "costs", "plans"],
    ["exporter"],
    ["attention"],
    ["command"],
    ["capabilities"],
]
ROW = {name: number for number, names in enumerate(ROWS) for name in names}
# What stands above all rows: the face of the package, which imports nothing until it is asked to, its program, and
# the names under which users know parts of capabilities.
FACES = {
    f"htp_export{name}"
    for name in ("", ".__main__", ".huggingface", ".lora", ".passes", ".results", ".tools")
}
# The other capabilities that each may import, inside of functions. There is no circle.
MAY_IMPORT: dict[str, set[str]] = {
    "bind": {"lora", "quantize", "verify"},
    "diff": {"view"},
    "export": {"huggingface", "quantize", "verify"},
    "fingerprint": {"forensics"},
    "forensics": {"optimize"},
    "huggingface": {"carry"},
    "info": {"fingerprint"},
    "partition": {"huggingface"},
    "pipeline": {"carry", "huggingface"},
    "profile": {"verify"},
    "prune": {"quantize"},
    "quantize": {"verify"},
    "rename": {"functions"},
    "search": {"fingerprint", "prune", "quantize", "verify"},
    "verify": {"huggingface", "optimize"},
    "view": {"inspect", "profile", "search"},
}


def folder_of(module: str) -> str:
    """The folder in the package that a module lies in, at any depth; of a module at the top, its name."""
    return module.split(".")[1]


def capability_of(module: str) -> str | None:
    """The capability that a module belongs to; None outside of ``capabilities/``."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["capabilities"] and len(parts) > 2 else None


def row_of(module: str) -> int | None:
    return ROW.get(folder_of(module))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def running_code(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that can run, in functions too; what only type checkers read is left out."""
    nodes = [node]
    for each in nodes:
        yield each
        nodes += each.orelse if is_type_checking(each) else ast.iter_child_nodes(each)


@functools.cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(
    tree: ast.Module, code: Callable[[ast.AST], Iterator[ast.AST]] = running_code
) -> set[str]:
    """The modules of the package that a source imports, at its top or inside functions."""
    found = set()
    for node in code(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return {name for name in found if name.split(".")[0] == "htp_export"}


@functools.cache
def graph() -> dict[str, set[str]]:
    """Module → the modules of the package that it imports."""
    return {name: imports(parsed(name)) for name in MODULES}


@functools.cache
def everywhere() -> dict[str, set[str]]:
    """Module → the modules of the package that it imports, for type checkers too."""
    return {name: imports(parsed(name), ast.walk) for name in MODULES}


def test_modules_have_a_row_and_import_only_from_rows_above():
    wrong = []
    for name in set(MODULES) - FACES:
        row = row_of(name)
        assert row is not None, f"{name} stands in no row of tests/house/test_layout.py"
        others = {
            other for other in graph()[name] - {"htp_export"} if folder_of(other) != folder_of(name)
        }
        wrong += [(name, other) for other in others if row_of(other) >= row]
    assert not wrong, "these import from folders that are not above"


def test_the_folders_of_tests_are_those_of_the_package():
    tests = Path(__file__).parents[1]
    folders = {path.parent.name for path in tests.glob("*/test_*.py")}
    rooms = {folder_of(name) for name in MODULES if "." in name} | {
        capability_of(name) for name in MODULES
    }
    assert folders - rooms <= {"everywhere", "house", "plugins", "scripts"}
    assert not list(tests.glob("test_*.py")), "a test lies in the folder of what it tests"
    page = (tests / "README.md").read_text(encoding="utf-8")
    shared = {path.name for path in tests.glob("*.py")} - {"conftest.py"}
    assert shared == set(re.findall(r"`([a-z_]+\.py)`", page)) - {"conftest.py"}


def test_nothing_imports_a_face_of_the_package():
    importing = {name: imported & FACES for name, imported in everywhere().items()}
    assert {name: faces for name, faces in importing.items() if faces and name not in FACES} == {}


def test_there_are_no_import_cycles_for_type_checkers_either():
    graphlib.TopologicalSorter(everywhere()).prepare()  # a CycleError has the modules of a circle


def test_rooms_import_one_another_without_a_circle():
    """A room is a folder of the core or of a capability; imports for type checkers count."""
    rooms: dict[str, set[str]] = {}
    for module, imported in everywhere().items():
        if module not in FACES:
            rooms.setdefault(room_of(module), set()).update(room_of(other) for other in imported)
    others = {room: imported - {room} for room, imported in rooms.items()}
    graphlib.TopologicalSorter(others).prepare()  # a CycleError has the rooms of a circle


def room_of(module: str) -> str:
    """The capability that a module belongs to, or its folder in the core."""
    return capability_of(module) or folder_of(module)


CAPABILITIES = sorted(
    path.name for path in (PACKAGE / "capabilities").iterdir() if (path / "__init__.py").is_file()
)


def test_capabilities_import_only_the_capabilities_that_are_listed_for_them():
    found: dict[str, set[str]] = {}
    for module, imported in graph().items():
        if name := capability_of(module):
            found.setdefault(name, set()).update(
                {capability_of(other) for other in imported} - {name, None}
            )
    assert {name: others for name, others in found.items() if others} == MAY_IMPORT


def test_one_file_writes_the_owners_of_nodes():
    """Everyone else says who owns a node, and has it written: by `Owned`, or by an `Edit`."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES.values()
        if re.search(r"\b(node_tags|tag_node)\(", path.read_text(encoding="utf-8"))
    }
    assert found == {"format/tags.py", "lineage/tagging.py", "editing/function_records.py"}


# Everyone else has tags and modules written: as a whole, by `ModelTags`; after a change that knows its owners, by an
# `Edit`; after passes, by `Bookkeeping`.
DOORS = {"lineage/tagging.py", "editing/edit.py", "lineage/settling.py"}
# The words of a file; and the tags that functions have in a file, restored.
WRITE_TAGS = {*DOORS, "format/tags.py", "editing/function_records.py"}
WRITE_MODULES = {*DOORS, "format/model_metadata.py"}


@pytest.mark.parametrize(
    ("written", "files"),
    [
        (r"\.write\((\w+\.)*metadata|\b(write_calls|tag_node)\(", WRITE_TAGS),
        (r"\bwrite_model_metadata\(", WRITE_MODULES),
    ],
)
def test_few_files_write_tags_of_nodes_and_the_metadata_of_modules(
    written: str, files: set[str]
) -> None:
    found = set()
    for path in MODULES.values():
        if re.search(written, path.read_text(encoding="utf-8")):
            found.add(path.relative_to(PACKAGE).as_posix())
    assert found == files


def test_capabilities_import_one_another_without_a_circle():
    order = graphlib.TopologicalSorter({name: MAY_IMPORT.get(name, set()) for name in CAPABILITIES})
    assert sorted(order.static_order()) == CAPABILITIES


def importing_code(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in [*node.orelse] if is_type_checking(node) else ast.iter_child_nodes(node):
            yield from importing_code(child)


def test_no_module_imports_another_capability_before_a_function_runs():
    for name in set(MODULES) - FACES:
        others = {capability_of(other) for other in imports(parsed(name), importing_code)}
        assert others <= {capability_of(name), None}, name


@pytest.mark.parametrize(
    "names", [["quantize"], pytest.param(CAPABILITIES, marks=pytest.mark.slow)], ids=len
)
def test_each_capability_can_be_left_out(names):
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OUT, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr.splitlines()[-1]


# registers itself with Model Explorer, once a process
ONCE = {"htp_export.capabilities.view.model_explorer.main"}

# For each capability in turn: all modules of the others are imported again while its folder cannot be, and the help
# lists their commands. What imports no capability stays imported.
LEFT_OUT = f"""
import importlib, sys, warnings
warnings.simplefilter("ignore")
from htp_export.discovery import capability_modules
MODULES = {sorted(name for name in set(MODULES) - ONCE if capability_of(name))!r}
OPTIONAL = {{"model_explorer", "optuna", "openvino", "nncf", "ray"}}
for name in sys.argv[1:]:
    for module in [module for module in sys.modules if module.startswith("htp_export.capabilities")]:
        del sys.modules[module]
    gone = f"htp_export.capabilities.{{name}}"
    sys.modules[gone] = None
    for module in MODULES:
        if module != gone and not module.startswith(gone + "."):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in OPTIONAL:
                    raise AssertionError(f"without {{name}}, {{module}} cannot be imported") from error
    from htp_export.command.commands import command_names
    listed = {{command.replace("-", "_") for command in command_names()}}
    homes = capability_modules("_command")
    assert listed == {{command for command, home in homes.items() if not home.startswith(gone + ".")}}, name
"""


def test_public_functions_stand_in_the_capability_of_their_name():
    homes = imported_for_types(htp_export.__file__)
    folders = {name: home.split(".")[1:] for name, home in homes.items() if not name[0].isupper()}
    found = {name: parts[1] for name, parts in folders.items() if parts[0] == "capabilities"}
    assert {name: folder for name, folder in found.items() if name != folder} == IN_ANOTHER_FOLDER
    assert {name for name, parts in folders.items() if parts[0] != "capabilities"} == {
        *("contamination", "cost", "decomposed_attention", "embed_map", "export", "load", "tagging")
    }


IN_ANOTHER_FOLDER = {
    "compare": "verify",
    "export_plan": "quantize",
    "frozen_fake_quantize": "quantize",
    "inline": "functions",
    "load_partition": "partition",
    "module_filter": "quantize",
    "placement": "place",
    "sensitivity": "search",
    "splice": "extract",
    "steer": "tap",
    "untap": "tap",
}


def test_plans_become_values_of_modules_in_one_place():
    """A model of PyTorch alone has no calls: there, rules hold by path."""
    below = re.compile(r"\b(select_below|chosen_and_excluded)\b")
    reading = {
        name.removeprefix("htp_export.")
        for name, path in MODULES.items()
        if below.search(path.read_text("utf-8"))
    }
    assert reading == {
        "format.selectors",
        "model.module_facts",
        "plans.rules",
        "capabilities.quantize.training",
    }


# Concepts that stood in several places once: the one place of each, and what would betray a second definition.
ONE_PLACE = {
    "what became of a module": ("lineage.fates", r"def (find_fates|fate_of)\b"),
    "boundaries of regions": ("model.boundaries", r"class Boundaries\b|OUTSIDE = "),
    # a plan has others of its own
    "merged work at boundaries": ("model.boundaries", r".*\.blocks_outside\("),
    "sessions of ONNX Runtime": ("runtime.sessions", r".*\.InferenceSession\("),
    "shapes of tensors": ("shapes.symbolic", r"class Symbolic\b"),
    "hashes of what a model says": (
        "model.hashes",
        r"def \w*(array|body|constant|content|graph)_(hash|key)\b",
    ),
    "hashes of what regions compute": ("model.hashes", r"class \w*Hash(er|es)\b"),
    "constants of parts, and tensors between them": (
        "model.parts",
        r"class (Constants|PartTensor)\b|def part_tensors",
    ),
    "the tensors between devices": ("capabilities.place.placed", r"class \w*Crossing\b"),
    "a chain of modules": ("capabilities.partition.chain", r"class \w*Chain\b"),
    "cutting a part out": ("model.cutting", r"class Cutter\b"),
    "libraries kept quiet": ("process.quiet", r".*(NullHandler\(|\w[lL]ogger\.disabled = )"),
    "fresh names": ("model.tensor_names", r"class UsedNames\b"),
    "the check of an output path": ("files.targets", r"def check_target\b"),
    "rules of a plan become nodes": ("plans.rules", r"def assigned\b"),
    "tables as text and CSV": ("reporting.columns", r"def (text_table|csv_text)\b"),
}


@pytest.mark.parametrize("concept", sorted(ONE_PLACE))
def test_a_concept_stands_in_one_place(concept):
    place, betraying = ONE_PLACE[concept]
    pattern = re.compile(rf"^\s*(?:{betraying})", re.MULTILINE)
    found = {
        name for name, path in MODULES.items() if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert found == {f"htp_export.{place}"}


# Names of classes that stood for two or three things once.
ONE_CLASS = {
    *(
        "Call",
        "Changes",
        "Choice",
        "Constants",
        "Crossing",
        "Difference",
        "Engine",
        "Evidence",
        "Hasher",
        "PartTensor",
    ),
    *("Step", "Tensor"),
}


def test_a_name_of_a_class_stands_for_one_thing():
    homes: dict[str, list[str]] = {name: [] for name in ONE_CLASS}
    for module in MODULES:
        for node in parsed(module).body:
            if isinstance(node, ast.ClassDef) and node.name in homes:
                homes[node.name].append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_numbers_with_a_name_have_a_reason_beside_them():
    bare = []
    for module, path in MODULES.items():
        lines, body = path.read_text().splitlines(), parsed(module).body
        for node, behind in zip(body, [*body[1:], ast.Pass()], strict=True):
            if (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and node.value is not None
                and is_number(node.value)
            ):
                documented = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
                commented = "#" in f"{lines[node.lineno - 2]}{lines[node.lineno - 1]}"
                bare += [] if documented or commented else [f"{module}: {lines[node.lineno - 1]}"]
    assert bare == []


def is_number(expression: ast.expr) -> bool:
    """Whether an expression is a number, such as ``1 << 20``, or several."""
    made_of = ast.BinOp | ast.UnaryOp | ast.Tuple | ast.operator | ast.unaryop | ast.expr_context
    return all(
        type(node.value) in (int, float)
        if isinstance(node, ast.Constant)
        else isinstance(node, made_of)
        for node in ast.walk(expression)
    )


def test_the_drawing_in_the_documentation_is_that_of_the_code():
    page = PACKAGE.parent / "docs" / "architecture.md"
    text = page.read_text(encoding="utf-8")
    assert text.partition("<!-- drawn -->\n")[2].partition("<!-- /drawn -->")[0] == drawing(), (
        "python tests/house/test_layout.py"
    )


def test_files_that_the_documentation_names_are_there():
    root = PACKAGE.parent
    named = {
        (page.name, file)
        for page in [root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]
        for file in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text(encoding="utf-8"))
    }
    missing = {
        each for each in named if not ((PACKAGE / each[1]).is_file() or (root / each[1]).is_file())
    }
    assert ("architecture.md", "lineage/fates.py") in named - missing
    assert not missing


def drawing() -> str:
    """The rows and the capabilities, each with the first line of its docstring."""
    core = [
        f"{' · '.join(row):28}{said_of(row[-1]) if len(row) == 1 else ''}".rstrip()
        for row in ROWS[:-1]
    ]
    several = [f"    {name:24}{said_of(name)}" for row in ROWS[:-1] if len(row) > 1 for name in row]
    listed = [
        f"| `{name}` | {said_of('capabilities/' + name)} | {', '.join(f'`{other}`' for other in imported)} |"
        for name in CAPABILITIES
        for imported in [sorted(MAY_IMPORT.get(name, ()))]
    ]
    head = ["", "| capability | is | imports |", "|---|---|---|"]
    return "\n".join(["```text", *core, "", *several, "```", *head, *listed, ""])


def said_of(room: str) -> str:
    """The first line of the docstring of a room."""
    file = PACKAGE / room / "__init__.py"
    source = (file if file.is_file() else PACKAGE / f"{room}.py").read_text(encoding="utf-8")
    return (
        (ast.get_docstring(ast.parse(source)) or "")
        .partition("\n")[0]
        .rstrip(".")
        .replace("``", "`")
    )


if __name__ == "__main__":
    page = PACKAGE.parent / "docs" / "architecture.md"
    before, mark, rest = page.read_text(encoding="utf-8").partition("<!-- drawn -->\n")
    page.write_text(
        before + mark + drawing() + "<!-- /drawn -->" + rest.partition("<!-- /drawn -->")[2],
        encoding="utf-8",
    )
