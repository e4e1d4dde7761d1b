"""A wrong type is a TypeError that says what fits, in every public function."""

import inspect
import re
from typing import Any

import onnx
import pytest
import torch

import htp_export
from htp_export.capabilities.carry import adapters

# torch's own errors
FUNCTIONS = {name: getattr(htp_export, name) for name in htp_export.__all__ if name != "export"}
FUNCTIONS = {name: each for name, each in FUNCTIONS.items() if inspect.isfunction(each)}
FUNCTIONS |= {f"lora.{name}": getattr(htp_export.lora, name) for name in htp_export.lora.__all__}
FUNCTIONS |= {f"tools.{name}": getattr(htp_export.tools, name) for name in adapters.__all__}

CHECKED = ("ModelSource", "Module", "Mapping", "Sequence", "str", "PathLike", "Space", "tuple")
"""What is written in the type of a parameter that is a model, a plan, a selector, arguments or a file."""


def parameters() -> list[Any]:
    return [
        pytest.param(function, parameter.name, id=f"{name}-{parameter.name}")
        for name, function in FUNCTIONS.items()
        for parameter in inspect.signature(function).parameters.values()
        if any(word in str(parameter.annotation) for word in CHECKED)
        and parameter.kind is not parameter.VAR_POSITIONAL
        and not any(word in str(parameter.annotation) for word in ("Literal", "Any |", "Numbers"))
    ]


def fitting(parameter: inspect.Parameter) -> Any:
    """A value for a parameter without a default."""
    kind = str(parameter.annotation)
    if "ModelSource" in kind:
        return onnx.ModelProto()
    if "Module" in kind:
        return torch.nn.ReLU()
    return {} if "Mapping" in kind else "x"


@pytest.mark.parametrize(("function", "name"), parameters())
def test_an_argument_of_a_wrong_type_is_refused_by_name_with_what_fits(function, name):
    needed = {
        each.name: fitting(each)
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    with pytest.raises(
        TypeError, match=rf"^{function.__name__}: {name} takes \w.*, and 0\.5 is of type float"
    ):
        function(**{**needed, name: 0.5})


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("tools.")])
def test_an_unknown_argument_is_refused_in_the_name_of_the_function(name):
    function = FUNCTIONS[name]
    needed = [fitting(each) for each in inspect.signature(function).parameters.values() if each.default is each.empty
              and each.kind is each.POSITIONAL_OR_KEYWORD]  # fmt: skip
    with pytest.raises(
        TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'nosuch'"
    ):
        function(*needed, nosuch=1)


def test_every_function_that_takes_a_model_is_among_them():
    names = {str(each.id) for each in parameters()}
    assert {
        "prune-plan",
        "quantize-model",
        "load-model",
        "verify-onnx",
        "tools.onnxslim-output",
    } <= names
    assert {
        name for name in FUNCTIONS if not any(each.startswith(f"{name}-") for each in names)
    } == {"tagging"}


def test_the_message_says_what_fits_and_what_was_given():
    net, onnx_model = torch.nn.Linear(2, 2), "takes an ONNX model: a file, "
    said: dict[Any, str] = {
        lambda: htp_export.prune(
            "net.onnx", 0.5
        ): "prune: plan takes a mapping, and 0.5 is of type float",
        lambda: htp_export.quantize(3, "int8"): f"quantize: model {onnx_model}",
        lambda: htp_export.load(None): f"load: model {onnx_model}",
        lambda: htp_export.load(
            net
        ): ", and Linear(in_features=2, out_features=2, bias=True) is of type Linear",
        lambda: htp_export.verify(
            "a.onnx", net
        ): "model and onnx are swapped; the order is verify(model, onnx)",
        lambda: htp_export.verify(
            net, "a.onnx", torch.ones(9, 99)
        ): "a list or a tuple, and the argument is of type Tensor",
        lambda: htp_export.nodes("a.onnx", [3]): "a list of strings, and [3] is of type list",
        lambda: htp_export.view(
            "a.onnx", 3
        ): "view: output takes a string or a path, and 3 is of type int",
    }
    for call, words in said.items():
        with pytest.raises(TypeError, match=re.escape(words)):
            call()


def test_what_a_model_may_be_fits(tmp_path):
    net = torch.nn.Linear(2, 2).eval()
    program = htp_export.export(net, (torch.ones(1, 2),), tmp_path / "net.onnx", verbose=False)
    assert program is not None
    sources = [
        tmp_path / "net.onnx",
        str(tmp_path / "net.onnx"),
        program,
        program.model,
        program.model_proto,
    ]
    assert [
        len(htp_export.load(each))
        for each in (*sources, htp_export.load(program), htp_export.inline(program))
    ] == [1] * 7
