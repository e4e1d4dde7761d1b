"""Errors of functions name the options that the user typed, not the parameters of Python."""

import re

import pytest
import typer

import htp_export
from htp_export.command import main as program
from htp_export.command.commands import CommandGroup, command_names
from htp_export.command.main import main
from htp_export.command.typed_options import as_typed
from tests.all_commands import arguments, companions, example

CASES = {
    "profile FILE --engine tensorrt": "tensorrt is not run here: give the files of its measurements, --measured",
    "profile FILE --engine openvino --memory": "--memory is for --engine onnxruntime",
    "profile FILE --engine openvino --optimization basic": "--optimization is for --engine onnxruntime",
    "profile FILE --budget first=foo": "--budget 'foo' of 'first': write a time",
    "forensics FILE --level foo": "--level 'foo' is none of exact, tolerant, fused",
    "verify FILE --entry tests.all_commands:example --tolerance first=-1,0": "--tolerance of 'first': -1.0",
    "lora insert FILE first --alpha -1 -o out.onnx": "--alpha -1.0: it is a number above 0",
    "place FILE --budget gpu=foo -o out.onnx": "--budget of gpu: 'foo' is no size",
    "export --entry tests.all_commands:example --opset 99 -o out.onnx": "--opset 99: torch's",
    "search FILE --choices int8 --objectives metric": "--objectives metric and --metric go together",
    "run onnxruntime FILE --set foo=1 -o out.onnx": "--set foo: onnxruntime has no option 'foo'; there are",
    "run onnxruntime FILE --set output=a.onnx -o out.onnx": "--set output: onnxruntime has no option",
    "verify FILE bert": "bert: is a model type and has no weights; add --random-weights, or name a hub id",
    "quantize FILE auto:foo=1 -o out.onnx": "precision 'auto' has no fields, and 'foo' is given",
    "quantize FILE fixed:1.0 -o out.onnx": "'1.0' is 1 wide; choose a width from 2 to 16 bits",
    "bind FILE PART_WEIGHTS -o out.onnx": "--no-strict keeps the old values",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("typed")
    model, args = example()
    htp_export.export(model, args, folder / "net.onnx", verbose=False)
    some = {"first.weight": model.state_dict()["first.weight"]}
    save_file(some, folder / "some.safetensors")
    return {
        "FILE": str(folder / "net.onnx"),
        "PART_WEIGHTS": str(folder / "some.safetensors"),
        **companions(folder),
    }


@pytest.mark.parametrize("words", CASES)
def test_an_error_names_options_as_they_are_typed(words, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments(words, files)) == 2
    printed = capsys.readouterr().err
    assert CASES[words] in printed
    assert not re.search(r"\w=(\(|\[|True|False|')|unexpected keyword|\bNone\b", printed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("x.onnx: leave it out with measured=(...)", "x.onnx: leave it out with --measured"),
        ("write engine=tensorrt here", "write engine=tensorrt here"),  # no Python: it has no quotes
        ("runs of net.onnx differ", "runs of net.onnx differ"),  # a noun: the value is not typed
        ("timing='foo' and other='bar'", "--timing foo and other='bar'"),
        ("memory=True is slow; memory=False is not", "--memory is slow; no --memory is not"),
        ("as in fixed:engine='a'", "as in fixed:engine='a'"),  # a field of a precision
    ],
)
def test_only_parameters_of_the_command_are_replaced(message, typed):
    command = typer.main.get_command(program.app).get_command(None, "profile")
    assert as_typed(message, command.params, {"runs": 20, "engine": "tensorrt"}) == typed


def test_every_other_name_of_a_parameter_is_an_option_of_a_command():
    from htp_export.command.typed_options import _OTHER_NAMES

    group = typer.main.get_command(program.app)
    options = set()
    for name in command_names():
        command = group
        for word in name.split():
            command = command.get_command(None, word)
        if not isinstance(command, CommandGroup):
            options |= {each.name for each in command.params}
    assert set(_OTHER_NAMES.values()) <= options
