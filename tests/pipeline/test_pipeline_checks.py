"""Options of a pipeline: values, modules and files are checked before the first step, and errors name file and line."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import htp_export
from htp_export.capabilities.pipeline.pipeline_steps import STEPS
from htp_export.command.main import main
from htp_export.errors import InputError
from tests.all_commands import companions, example


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("net")
    model, args = example()
    htp_export.export(model, args, folder / "net.onnx", verbose=False)
    (folder / "text.onnx").write_text("no model", encoding="utf-8")
    companions(folder)
    np.savez(folder / "x.npz", x=np.ones((2, 32), np.float32))
    return folder / "net.onnx"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"quantize": {"plan": {"first": "int9"}}}, "step quantize: rule 'first': "),
    ({"quantize": {"plan": "int9"}}, "step quantize: there is no precision 'int9'"),
    (
        {"quantize": {"plan": {"frist": "int8"}}},
        "step quantize: selector 'frist': matches no module; nearest: 'first'",
    ),
    (
        {"quantize": {"plan": "int8", "data": ["gone.npz"]}},
        "step quantize: gone.npz: there is no such file",
    ),
    (
        {"quantize": {"plan": "int8", "dims": {"batch": "two"}}},
        "step quantize: dims is {'batch': 'two'}, and takes ",
    ),
    (
        {"quantize": {"plan": "int8", "data": "text.onnx"}},
        "step quantize: text.onnx: is not an .npz file of plain arrays",
    ),
    (
        {"quantize": {"plan": "int8", "data": ["x.npz", "text.onnx"]}},
        "step quantize: text.onnx: is not an .npz file",
    ),
    (
        {"quantize": {"plan": "int8", "seed": -1}},
        "step quantize: seed -1: it is a whole number from 0",
    ),
    ({"compare": {"seed": -1}}, "step compare: seed -1: it is a whole number from 0"),
    ({"lora.fuse": {"adapter": "text.onnx"}}, "step lora.fuse: text.onnx: is no adapter file"),
    ({"prune": {"plan": {"first": "3:2"}}}, "step prune: rule 'first': sparsity '3:2'"),
    (
        {"prune": {"plan": {"first": 0.5}, "method": "l3"}},
        "step prune: method is 'l3', and takes one of 'l1'",
    ),
    (
        {"optimize": {"level": "banana"}},
        "step optimize: level is 'banana', and takes one of 'exact'",
    ),
    ({"optimize": {"passes": "nothing"}}, "step optimize: no pass 'nothing'"),
    ({"optimize": {"verify": "yes"}}, "step optimize: verify is 'yes', and takes bool"),
    ({"functions": {"select": "nothing"}}, "step functions: selector 'nothing': matches no module"),
    ({"functions": {"select": "["}}, "step functions: selector '['"),
    ({"rename": {"style": "x"}}, "step rename: there is no style of names 'x'"),
    ({"lora.insert": {"select": "first", "rank": 0}}, "step lora.insert: rank 0"),
    ({"lora.fuse": {"adapter": "gone"}}, "step lora.fuse: gone: there is no such file"),
    ({"splice": {"path": "frist", "replacement": "part.onnx"}}, "step splice: no module 'frist'"),
    (
        {"splice": {"path": "first", "replacement": "gone.onnx"}},
        "step splice: gone.onnx: cannot be read",
    ),
    ({"carry": {"after": "text.onnx"}}, "step carry: text.onnx: not an ONNX model"),
    ({"compare": {"tolerances": {"first": [-1.0, 0.0]}}}, "step compare: tolerance of 'first'"),
    (
        {"compare": {"tolerances": {"first": 1.0}}},
        "step compare: tolerances is {'first': 1.0}, and takes ",
    ),
    ({"compare": {"select": "nothing"}}, "step compare: selector 'nothing'"),
    (
        {"compare": {"providers": ["GoneProvider"]}},
        "step compare: this ONNX Runtime has no GoneProvider",
    ),
    ({"compare": {"a": "gone.onnx"}}, "step compare: gone.onnx"),
    ({"onnxruntime": {"level": "banana"}}, "step onnxruntime: level 'banana'"),
    (
        {"version_converter": {"opset": 99}},
        "step version_converter: version_converter: opset 99 is none of",
    ),
    ({"matmul_nbits": {"bits": 3}}, "step matmul_nbits: matmul_nbits: bits are 3"),
    ({"float16": {"no_such_option": 3}}, "step float16: float16: "),
    ({"quantize_static": {}}, "step quantize_static: quantize_static needs data"),
]


def test_every_check_takes_options_of_its_step():
    for name, kind in STEPS.items():
        for check in kind.check_functions:
            assert set(inspect.signature(check).parameters) <= set(kind.parameters), (name, check)


@pytest.mark.long
@pytest.mark.parametrize(("step", "message"), WRONG, ids=str)
def test_values_are_checked_before_the_first_step(
    step, message, net, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(net.parent)
    output = tmp_path / "out.onnx"
    with pytest.raises(InputError) as raised:
        htp_export.pipeline(["optimize", step], net, output)
    assert str(raised.value).startswith(message) or message in str(raised.value)
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps(["optimize", step], indent=1), encoding="utf-8")
    assert main(["pipeline", str(steps), "-m", str(net), "-o", str(output)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{steps}: line " in said
    assert message.rstrip() in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["steps.json"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("steps:\n- inline\n- quantize:\n    plan:\n      second: int8\n      first: int9\n", 6),
        ("- inline\n- rename: {}\n- quantize:\n    plan: int9\n", 4),
        ("- inline\n\n- gone\n", 3),
        ("- inline\n- optimize:\n    lvl: exact\n", 3),
        ("- inline\n- functions\n", 2),
        ("- inline\n- functions:\n    select:\n    - nothing\n", 3),
        ("- inline\n- compare: {tolerances: {first: [1.0, 1.0],\n    gone: [1.0, 1.0]}}\n", 3),
        ("- verify:\n    entry: gone:make\n", 1),
        ("steps: [inline]\nfolder: 3\n", 2),
    ],
)
def test_errors_name_the_file_and_the_line(text, line, net, tmp_path, capsys):
    steps = tmp_path / "steps.yaml"
    steps.write_text(text, encoding="utf-8")
    assert main(["pipeline", str(steps), "-m", str(net), "-o", str(tmp_path / "out.onnx")]) == 2
    assert f"{steps}: line {line}: " in " ".join(capsys.readouterr().err.split())


def test_modules_that_a_step_adds_are_not_missed(net, tmp_path):
    steps = [
        {"lora.insert": {"select": "first", "rank": 2}},
        {"functions": {"select": "first.lora_A"}},
    ]
    result = htp_export.pipeline(steps, net, tmp_path / "out.onnx")
    assert [step.status for step in result.steps] == ["ran", "ran"]


def test_options_of_every_kind_that_are_right_are_taken(net, tmp_path):
    data = str(net.parent / "x.npz")
    steps: list[Any] = [
        {
            "optimize": {
                "passes": ["default"],
                "verify": True,
                "data": {"x": np.ones((2, 32), np.float32)},
            }
        },
        {"rename": {"style": "path"}},
        {
            "compare": {
                "select": ["first", "second"],
                "tolerances": {"**": [0.1, 0.1]},
                "seed": 1,
                "shapes": None,
            }
        },
        {"quantize": {"plan": {"first": "int8"}, "data": data}},
        {"onnxruntime": {"level": "basic", "providers": ["CPUExecutionProvider"]}},
    ]
    result = htp_export.pipeline(steps, net, tmp_path / "out.onnx")
    assert [step.status for step in result.steps] == ["ran"] * 5
