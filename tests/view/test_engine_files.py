"""Columns of files that other engines wrote where they ran the model: TensorRT, OpenVINO, ExecuTorch."""

import json
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from tests.plugins import test_tensorrt as trt

TRT_LAYERS = [
    "/block/conv1/Conv + PWN(PWN(/block/act/Sigmoid), PWN(/block/act/Mul))",
    "/block/conv2/Conv + /block/Add",
    "{ForeignNode[/Flatten.../head/Softmax]}",
]
HEADS = ("layerName", "execStatus", "layerType", "execType", "realTime (ms)", "cpuTime (ms)")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A convolution block with a head; tests/plugins/test_tensorrt.py lists its nodes and owners."""
    onnx.save(ir.to_proto(trt.model()), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def columns(html: str) -> dict[str, dict[str, float]]:
    """Title → module path → number, for the columns of times in a page of one file."""
    data = json.loads(
        html.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    )
    paths = [module["path"] for module in data["modules"]]
    return {
        measure["title"]: dict(zip(paths, measure["total"], strict=True))
        for measure in data["measures"]
        if measure["unit"] == "ms"
    }


def shown(file: Path, *results: Any) -> dict[str, dict[str, float]]:
    return columns(htp_export.view(file, results=results, explorer=False).html)


def written(folder: Path, name: str, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("order", [("layers", "times"), ("times", "layers"), ("times",)])
def test_the_files_of_trtexec_are_one_column_in_any_order(file, tmp_path, order):
    contents = {
        "layers": {"Layers": TRT_LAYERS, "Bindings": ["x", "y"]},
        "times": trt.times(**dict.fromkeys(TRT_LAYERS, 3.0)),
    }
    files = [written(tmp_path, f"{name}.json", contents[name]) for name in order]
    found = shown(file, *files)["time, tensorrt"]
    # Each layer is divided equally among its owners.
    assert (found[""], found["block"]) == (9.0, 6.0)
    assert (found["block.conv1"], found["block.act"], found["block.conv2"]) == (1.5, 1.5, 1.5)
    assert found["head"] == found["fc"] == 1.0


def test_profile_knows_the_engine_by_the_files(file, tmp_path):
    times = written(tmp_path, "times.json", trt.times(**dict.fromkeys(TRT_LAYERS, 3.0)))
    report = htp_export.profile(file, measured=[times])
    assert (report.engine, report.modules[""].total_ms) == ("tensorrt", 9.0)


def openvino_table(*requests: dict[str, float]) -> str:
    """What ``benchmark_app`` writes: a table for each request, with a sum below it."""
    lines = []
    for request in requests:
        lines.append(";".join(HEADS))
        lines += [f"{name};EXECUTED;Convolution;jit;{ms};{ms}" for name, ms in request.items()]
        lines += [f"Total;;;;{sum(request.values())};0", ""]
    return "\r\n".join(lines)


def test_openvinos_table_of_counters_is_the_mean_of_its_requests(file, tmp_path):
    first, second = {"/block/conv1/Conv": 1.0, "g": 2.0}, {"/block/conv1/Conv": 2.0, "g": 2.0}
    table = written(tmp_path, "counters.csv", openvino_table(first, second))
    found = shown(file, table)["OpenVINO time"]
    assert (found["block.conv1"], found["fc"], found[""]) == (1.5, 2.0, 3.5)


def stack(*paths: str) -> dict[str, tuple[str, str]]:
    """The modules of an operator, as ``torch.export`` records them."""
    return {f"L__self___{path}": (path, "torch.nn.modules.module.Module") for path in ("", *paths)}


def executorch_table(events: list[tuple[str, Any, Any, str]], *, separator: str = "\t") -> str:
    names = ("", "event_block_name", "event_name", "avg (ms)", "module_hierarchy")
    lines = [separator.join((*names, "is_delegated_op"))]
    for number, event in enumerate(events):
        cells = [f'"{cell}"' if separator in str(cell) else str(cell) for cell in event]
        lines.append(separator.join((str(number), "Execute", *cells)))
    return "\n".join(lines)


EVENTS: list[tuple[str, Any, Any, str]] = [
    ("Method::execute", 20.0, {}, "False"),
    ("OPERATOR_CALL", 9.0, {"conv_": stack("block", "block.conv1")}, "False"),
    ("native_call_convolution.out", 4.0, {"conv_": stack("block", "block.conv1")}, "False"),
    ("native_call_mul.out", 1.0, {"mul_": stack("block", "block.act@1")}, "False"),
    ("native_call_copy.out", 0.5, {}, "False"),
    ("Convolution (NHWC, F32) IGEMM #1", 1.5, {}, "True"),
    ("DELEGATE_CALL", 2.0, {"conv_1_": stack("block", "block.conv2")}, "False"),
    ("Fully Connected", 6.0, {"fc_": stack("fc"), "softmax_": stack("head")}, "True"),
    ("DELEGATE_CALL", 7.0, {"fc_": stack("fc"), "softmax_": stack("head")}, "False"),
]


@pytest.mark.parametrize("separator", ["\t", ","])
def test_executorchs_table_counts_each_operator_once_in_its_modules(file, tmp_path, separator):
    table = written(tmp_path, "phone.tsv", executorch_table(EVENTS, separator=separator))
    html = htp_export.view(file, results=[table], explorer=False).html
    found = columns(html)["ExecuTorch time"]
    # Without the framework, and each part of a delegate once: its events if they have modules.
    assert found[""] == 13.0
    assert (found["block"], found["block.conv1"], found["block.act"]) == (7.0, 4.0, 1.0)
    assert (found["fc"], found["head"], found["block.conv2"]) == (3.0, 3.0, 2.0)
    assert (
        "ExecuTorch time: 1 of 6 names are not in net.onnx (0.5 ms): native_call_copy.out." in html
    )


def test_files_side_by_side_have_columns_of_engines(file, tmp_path, capsys):
    written(tmp_path, "times.json", trt.times(**dict.fromkeys(TRT_LAYERS, 3.0)))
    written(tmp_path, "phone.tsv", executorch_table(EVENTS))
    other = tmp_path / "other.onnx"
    other.write_bytes(file.read_bytes())
    page = tmp_path / "page.html"
    words = ["view", str(file), "--with", str(other), "-o", str(page)]
    results = ["--result", f"{tmp_path}/times.json", "--result", f"other={tmp_path}/phone.tsv"]
    assert main([*words, *results]) == 0
    html = page.read_text(encoding="utf-8")
    assert "time, tensorrt" in html
    assert "ExecuTorch time" in html
    capsys.readouterr()
    assert main(["view", str(file), "--with", f"{tmp_path}/times.json", "-o", str(page)]) == 2
    assert "give --result" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", ";".join(HEADS), "has no counters"),
        ("a.csv", f"{';'.join(HEADS)}\na;b;c;d;soon;1", "line 2: 'soon' is no time"),
        ("a.tsv", "\tevent_block_name\tevent_name\tavg (ms)\n", "save_data_to_tsv"),
        ("a.tsv", "\tevent_block_name\tevent_name\tavg (cycles)\tmodule_hierarchy\n", "avg (cycles)"),
        ("a.tsv", executorch_table([("x", 1, "{", "False")]), "line 2: module_hierarchy cannot be read"),
        ("a.tsv", executorch_table([("x", 1, {}, "False")]), "no event of 1 has a module"),
        ("a.tsv", executorch_table([("x", 1, {"a": stack("nowhere")}, "False")]), "none of its 1 names"),
        ("a.json", [{"count": 5}], "is not what trtexec --exportProfile writes"),
        ("a.json", {"Layers": []}, "has layers without times"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named(file, tmp_path, name, content, problem):
    with pytest.raises((FileError, InputError)) as error:
        shown(file, written(tmp_path, name, content))
    assert problem in str(error.value)
