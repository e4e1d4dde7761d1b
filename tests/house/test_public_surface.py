"""What the package offers: fixed names, each documented, and an import that costs little."""

import builtins
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import htp_export
from htp_export import results
from htp_export.capabilities.carry import adapters
from htp_export.reporting.result import Result

ROOT = Path(__file__).parents[2]
PUBLIC = [
    "Hierarchy", "HtpExportError", "InputError", "ModuleInfo", "Precision", "Region", "TaggedModel", "Work",
    "attention_report", "bind", "carry", "compare", "contamination", "cost", "decomposed_attention", "diff",
    "embed_map", "export", "export_plan", "extract", "fingerprint", "forensics", "frozen_fake_quantize",
    "functions", "info", "inline", "inspect", "load", "load_partition", "module_filter", "nodes", "optimize",
    "partition", "pipeline", "place", "placement", "profile", "prune", "quantize", "rename", "search",
    "sensitivity", "splice", "steer", "tagging", "tap", "untap", "verify", "view",
]  # fmt: skip


RESULTS = {name: getattr(results, name) for name in results.__all__}


def test_public_names_are_these_shadow_no_builtin_and_are_documented():
    assert sorted(htp_export.__all__) == PUBLIC
    assert not set(PUBLIC) & set(dir(builtins))
    assert [name for name in PUBLIC if not getattr(htp_export, name).__doc__] == []
    assert [name for name, each in RESULTS.items() if not each.__doc__] == []


def test_what_public_functions_return_is_public_and_not_at_the_top():
    returned = {
        word
        for each in public_functions().values()
        for word in re.findall(r"\w+", returned_by(each))
    }
    classes = {
        each.__name__ for each in subclasses(Result) if each.__module__.startswith("htp_export.")
    }
    assert returned & classes - {"HoldsModel"} <= RESULTS.keys()
    assert not RESULTS.keys() & set(PUBLIC)
    assert sorted(RESULTS) == results.__all__


def returned_by(function):
    return str(inspect.signature(function).return_annotation)


def subclasses(base):
    return {each for child in base.__subclasses__() for each in (child, *subclasses(child))}


def public_functions():
    functions = {
        name: getattr(htp_export, name)
        for name in PUBLIC
        if inspect.isfunction(getattr(htp_export, name))
    }
    functions |= {
        f"lora.{name}": getattr(htp_export.lora, name) for name in htp_export.lora.__all__
    }
    return functions | {
        f"tools.{name}": getattr(htp_export.tools, name) for name in adapters.__all__
    }


@pytest.mark.parametrize("name", public_functions())
def test_a_public_function_documents_arguments_result_and_errors_with_an_example(name):
    function = public_functions()[name]
    summary, *rest = inspect.getdoc(function).splitlines()
    assert summary.endswith("."), name
    assert not rest[0], name
    sections = [line for line in rest if re.fullmatch(r"[A-Z]\w+:", line)]
    assert sections == ["Args:", "Returns:", "Raises:", "Examples:"], name
    arguments = "\n".join(rest).partition("Args:")[2].partition("Returns:")[0]
    documented = re.findall(r"^    \*{0,2}(\w+): ", arguments, re.MULTILINE)
    assert documented == list(inspect.signature(function).parameters), name


SHARED = ["data", "dims", "shapes", "select", "depth", "seed", "providers", "session_options", "external_data",
          "share_weights"]  # fmt: skip
# args and kwargs, as torch has them
TORCH_LIKE = {"export", "verify", "inspect", "view", "attention_report"}


@pytest.mark.parametrize("name", public_functions())
def test_what_comes_after_the_output_is_given_by_keyword_and_shared_parameters_have_one_order(name):
    parameters = inspect.signature(public_functions()[name]).parameters
    positional = [
        each.name for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    assert [each for each in parameters if each in SHARED] == [
        each for each in SHARED if each in parameters
    ], name
    assert not {"inputs", "out"} & {*parameters}, name
    if "output" in parameters and name not in TORCH_LIKE:
        assert positional[-1] == "output", name
        assert parameters["output"].default is None, name
    assert not {*SHARED[1:]} & {*positional} - {"select"}, name


def test_public_functions_say_whether_they_are_thread_safe():
    texts = {
        name: inspect.getdoc(function).lower() for name, function in public_functions().items()
    }
    silent = {
        name
        for name, text in texts.items()
        if "thread" not in text and not name.startswith("tools.")
    }
    assert silent <= {"load_partition"}  # makes an object of a folder


@pytest.mark.parametrize(
    "name", [name for name, each in RESULTS.items() if issubclass(each, Result)]
)
def test_a_result_has_a_summary_which_is_a_line_and_notes_which_are_lines(name):
    result = RESULTS[name]
    assert result.__repr__ is Result.__repr__
    assert result.summary is not Result.summary
    assert result.summary.fget.__annotations__["return"] == "str"
    notes = getattr(result, "notes", None)
    assert (
        not isinstance(notes, property) or notes.fget.__annotations__["return"] == "tuple[str, ...]"
    )


def test_the_onnx_model_is_the_parameter_model_of_every_public_function():
    sources = {
        name: [
            each.name
            for each in inspect.signature(function).parameters.values()
            if "ModelSource" in str(each)
        ]
        for name, function in public_functions().items()
    }
    others = {
        "carry": ["before", "after"],
        "compare": ["a", "b"],
        "diff": ["a", "b"],
        "splice": ["model", "replacement"],
        "verify": ["onnx"],  # its model is the PyTorch model
    }
    assert {
        name: given for name, given in sources.items() if given and given != ["model"]
    } == others


@pytest.mark.parametrize(
    "name", [*RESULTS, *(name for name in PUBLIC if inspect.isclass(getattr(htp_export, name)))]
)
def test_a_public_class_documents_its_attributes(name):
    public = RESULTS.get(name) or getattr(htp_export, name)
    if dataclasses.is_dataclass(public):
        documented = re.findall(
            r"^    (\w+): ", inspect.getdoc(public).partition("Attributes:")[2], re.MULTILINE
        )
        own = [each for each in public.__annotations__ if not each.startswith("_")]
        assert [each for each in documented if each in own] == own, name


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        htp_export.no_such_thing  # noqa: B018 - looking it up is the test


def test_version_is_that_of_the_project():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*)"$', project, re.MULTILINE) == [htp_export.__version__]


def test_a_file_is_drawn_without_torch():
    node = "onnx_ir.node('Relu', [onnx_ir.val('x', onnx_ir.DataType.FLOAT, [2])])"
    graph = "onnx_ir.Graph(node.inputs, node.outputs, nodes=[node], opset_imports={'': 20})"
    drawn = "htp_export.view(onnx_ir.Model(graph, ir_version=10), explorer=False)"
    code = f"import sys, htp_export, onnx_ir; node = {node}; graph = {graph}; {drawn}; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert run.stdout == "False\n"


def test_importing_the_package_imports_no_library_and_exporting_none_but_torch():
    show = (
        "print(*{'torch', 'transformers', 'onnxruntime', 'typer'} & sys.modules.keys(), sep=', ')"
    )
    names = (
        "htp_export.results.Profile; htp_export.export; htp_export.load; htp_export.tools.onnxslim"
    )
    code = f"import sys, htp_export; {show}; {names}; htp_export.errors.FileError; {show}"
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert run.stdout.split("\n") == ["", "torch", ""]
