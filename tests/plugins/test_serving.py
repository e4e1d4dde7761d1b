"""Plug-ins of `partition`: Triton's model repository, and a Ray Serve application."""

import ast
import contextlib
import importlib.util
import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from torch import nn

import htp_export
from htp_export.errors import InputError
from tests import handmade
from tests.handmade import tagged_node, value
from tests.nets import spread, x

# --- Triton -----------------------------------------------------------------------------------------------


def parsed(text: str) -> dict[str, list[Any]]:
    """Protobuf's text format: field → its values; messages as such dictionaries, strings without their escapes."""
    tokens = re.findall(r'"(?:[^"\\\n]|\\.)*"|[\w.+-]+|[{}\[\]:,]', text)
    assert "".join(tokens) == re.sub(r'\s+(?=(?:[^"]*"[^"]*")*[^"]*$)', "", text), (
        "something that is no token"
    )

    def scalar(token: str) -> Any:
        if token.startswith('"'):
            raw = re.sub(
                rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), token[1:-1].encode()
            )
            return raw.decode()
        return int(token) if re.fullmatch(r"-?\d+", token) else token

    def message(rest: Iterator[str]) -> dict[str, list[Any]]:
        fields: dict[str, list[Any]] = {}
        for name in rest:
            if name == "}":
                break
            assert re.fullmatch(r"[a-z_]+", name)
            follows = next(rest)
            if follows == "{":
                fields.setdefault(name, []).append(message(rest))
                continue
            assert follows == ":"
            token = next(rest)
            if token == "[":
                items = iter(lambda: next(rest), "]")
                fields.setdefault(name, []).extend(scalar(item) for item in items if item != ",")
            else:
                fields.setdefault(name, []).append(scalar(token))
        return fields

    return message(iter(tokens))


def configurations(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Model of a repository → its configuration; its name has to be its folder's."""
    found = {
        file.parent.name: parsed(file.read_text())
        for file in (folder / "triton").glob("*/config.pbtxt")
    }
    assert all(
        each["name"] == [name] and each["max_batch_size"] == [0] for name, each in found.items()
    )
    return found


def tensors(listed: list[Any]) -> dict[str, tuple[str, list[int]]]:
    return {each["name"][0]: (each["data_type"][0], each["dims"]) for each in listed}


def pairs(listed: list[Any]) -> dict[str, str]:
    return {each["key"][0]: each["value"][0] for each in listed}


def check_ensemble(ensemble: dict[str, list[Any]], models: dict[str, Any]) -> None:
    """What Triton checks when it loads an ensemble: every tensor is mapped, written before it is read, and fits."""
    written = tensors(ensemble["input"])
    unread = set(written)
    for step in ensemble["ensemble_scheduling"][0]["step"]:
        model = models[step["model_name"][0]]
        inputs, outputs = pairs(step["input_map"]), pairs(step["output_map"])
        assert inputs.keys() == tensors(model["input"]).keys()
        assert outputs.keys() <= tensors(model["output"]).keys()
        for name, there in inputs.items():
            assert written[there] == tensors(model["input"])[name]
        unread -= set(inputs.values())
        assert not written.keys() & set(outputs.values())
        written.update({there: tensors(model["output"])[name] for name, there in outputs.items()})
    assert unread == set()
    assert tensors(ensemble["output"]).items() <= written.items()


def test_triton_repository_has_a_model_for_each_stage_and_an_ensemble(tmp_path):
    htp_export.partition(handmade.encoder(), 2, tmp_path / "stages", serve="triton")
    models = configurations(tmp_path / "stages")
    assert models.keys() == {"Net", "Net_stage0", "Net_stage1"}
    assert models["Net"]["platform"] == ["ensemble"]
    assert models["Net_stage0"]["backend"] == ["onnxruntime"]
    assert tensors(models["Net_stage0"]["output"]) == {
        "mask": ("TYPE_FP32", [2, 4]),
        "layer0": ("TYPE_FP32", [2, 4]),
    }
    check_ensemble(models["Net"], models)


def test_triton_has_the_data_of_the_stages_which_refer_to_it(tmp_path):
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    htp_export.export(net, (x(2, 64),), tmp_path / "net.onnx", verbose=False, external_data=True)
    htp_export.partition(tmp_path / "net.onnx", 2, tmp_path / "stages", serve="triton")
    found = htp_export.load_partition(tmp_path / "stages")
    for number, stage in enumerate(found.stages):
        version = tmp_path / "stages" / "triton" / f"Sequential_stage{number}" / "1"
        assert {file.name for file in version.iterdir()} == {
            "model.onnx",
            f"stage{number}.onnx.data",
        }
        assert stage.files == (
            f"stage{number}.onnx",
            f"triton/Sequential_stage{number}/1/stage{number}.onnx.data",
        )
        assert (version / f"stage{number}.onnx.data").stat().st_nlink == 1
        one, other = (
            onnx.load(file)
            for file in (tmp_path / "stages" / stage.files[0], version / "model.onnx")
        )
        assert list(one.graph.initializer) == list(other.graph.initializer)
        assert one.graph.initializer[0].raw_data
    given = x(2, 64)
    (result,) = found.run({"input": given.numpy()}).values()
    np.testing.assert_allclose(result, net(given).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_triton_has_open_sizes_as_minus_one_and_no_tensors_without_dimensions(tmp_path):
    given, number = value("x"), ir.val("number", ir.DataType.FLOAT, [])
    given.shape = ir.Shape(["batch", None, 4])
    first = tagged_node("ReduceMax", [given], "first", "a")
    first.attributes["keepdims"] = ir.AttrInt64("keepdims", 0)
    second = tagged_node("Mul", [first.outputs[0], number], "second", "b")
    first.outputs[0].shape = second.outputs[0].shape = ir.Shape([])
    infos = [
        htp_export.ModuleInfo(path, "net.Net", 1, "computed") for path in ("", "first", "second")
    ]
    made = handmade.model([given, number], [first, second], [], infos)
    htp_export.partition(made, 2, tmp_path / "stages", serve="triton")
    models = configurations(tmp_path / "stages")
    check_ensemble(models["Net"], models)
    assert tensors(models["Net"]["input"])["x"] == ("TYPE_FP32", [-1, -1, 4])
    assert tensors(models["Net"]["input"])["number"] == ("TYPE_FP32", [1])
    assert not any("reshape" in each for each in models["Net"]["input"])
    (scalar,) = (each for each in models["Net_stage1"]["input"] if each["name"] == ["number"])
    assert scalar["reshape"] == [{"shape": []}]


NASTY = 'a"b\\c\n} name: "x\u20ac'


def test_names_of_tensors_cannot_break_out_of_triton_files(tmp_path):
    model = handmade.encoder()
    model.graph.inputs[0].name = NASTY
    model.graph.name = "../../evil"
    model.metadata_props["htp.modules"] = model.metadata_props["htp.modules"].replace(
        "net.Net", "../../evil"
    )
    htp_export.partition(model, 2, tmp_path / "stages", serve="triton")
    models = configurations(tmp_path / "stages")
    assert all(re.fullmatch(r"[\w-]+", name) for name in models)
    (ensemble,) = (each for each in models.values() if "ensemble_scheduling" in each)
    assert list(tensors(ensemble["input"])) == [NASTY]
    check_ensemble(ensemble, models)


@pytest.mark.parametrize(
    ("kind", "shape"), [(ir.DataType.FLOAT8E4M3FN, [2]), (ir.DataType.FLOAT, None)]
)
def test_triton_is_not_given_what_it_does_not_have(kind, shape, tmp_path):
    model = handmade.encoder()
    model.graph.inputs[0].type, model.graph.inputs[0].shape = (
        ir.TensorType(kind),
        shape and ir.Shape(shape),
    )
    with pytest.raises(InputError, match=r"tensor 'x' is .*: Triton needs"):
        htp_export.partition(model, 2, tmp_path / "stages", serve="triton")
    assert list(tmp_path.iterdir()) == []


# --- Ray Serve --------------------------------------------------------------------------------------------


def test_ray_program_is_the_same_for_every_model_and_needs_nothing_of_ours(tmp_path):
    model = handmade.encoder()
    model.graph.inputs[0].name = NASTY
    htp_export.partition(handmade.encoder(), 2, tmp_path / "one", serve="ray")
    htp_export.partition(model, 1, tmp_path / "other", serve="ray")
    programs = {(tmp_path / name / "serve_app.py").read_text() for name in ("one", "other")}
    assert len(programs) == 1
    tree = ast.parse(programs.pop())
    imported = {each.names[0].name for each in ast.walk(tree) if isinstance(each, ast.Import)}
    imported |= {str(each.module) for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    own = {"__future__", "asyncio", "json", "pathlib", "sys", "typing"}
    assert imported == {
        *own,
        "onnxruntime",
        "numpy",
        "ray",
        "ray.exceptions",
        "starlette.responses",
    }


def test_ray_is_not_given_tensors_that_numpy_does_not_have(tmp_path):
    model = handmade.encoder()
    values = [
        *model.graph.inputs,
        *model.graph.initializers.values(),
        *(node.outputs[0] for node in model.graph),
    ]
    for each in values:
        each.type = ir.TensorType(ir.DataType.BFLOAT16)
        if each.const_value is not None:
            each.const_value = ir.tensor(
                each.const_value.numpy().astype(ml_dtypes.bfloat16), name=each.name
            )
    with pytest.raises(InputError, match="which numpy arrays cannot carry"):
        htp_export.partition(model, 2, tmp_path / "stages", serve="ray")


def program(folder: Path) -> Any:
    """The module ``serve_app`` of a folder."""
    spec = importlib.util.spec_from_file_location("serve_app", folder / "serve_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_app"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Any, htp_export.results.Partition, dict[str, Any]]]:
    """The program of three stages, one of which reads tensors of both others; the stages; and inputs."""
    net = spread(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))).eval()
    tied = htp_export.export(net, (x(2, 4),), verbose=False)
    found = htp_export.partition(tied, 3, tmp_path / "stages", serve="ray")
    yield program(tmp_path / "stages"), found, {"input": x(2, 4).numpy()}
    sys.modules.pop("serve_app", None)


class Handle:
    """Calls a stage here, as a Ray Serve handle does elsewhere."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def remote(self, inputs: Any, *before: Any) -> Any:
        return Response(self._stage(inputs, *(each.value for each in before)))


class Response:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Any:
        yield from ()
        return self.value


class Request:
    def __init__(self, body: Any) -> None:
        self._body = body

    async def body(self) -> bytes:
        return json.dumps(self._body).encode()


def test_ray_program_chains_the_stages_and_answers_requests(served, tmp_path):
    app, found, inputs = served
    folder = str(tmp_path / "stages")
    stages = [
        Handle(app.Stage(folder, number, ["CPUExecutionProvider"]))
        for number in range(len(found.stages))
    ]
    pipeline = app.Pipeline(folder, *stages)
    expected = found.run(inputs)

    def result(coroutine: Any) -> Any:
        with pytest.raises(StopIteration) as stop:
            coroutine.send(None)
        return stop.value.value

    arrays = result(pipeline.run(inputs))
    answer = result(pipeline(Request({name: array.tolist() for name, array in inputs.items()})))
    assert {name: array.tolist() for name, array in arrays.items()} == answer
    assert all(np.array_equal(arrays[name], array) for name, array in expected.items())


ROW = [[1, 2.5, 3, 4]] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[1", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b"[]", "no object with the inputs of the model: ids, input"),
        ({"input": ROW}, "no object with the inputs of the model: ids, input"),
        (
            {"ids": [1], "input": ROW, "more": 1},
            "no object with the inputs of the model: ids, input",
        ),
        (
            {"ids": [1], "input": [[1, 2], [3]]},
            "input 'input' is no FLOAT, or no nested lists of it of equal lengths",
        ),
        ({"ids": [1], "input": [["1"] * 4] * 2}, "input 'input' is no FLOAT"),
        ({"ids": [1], "input": None}, "input 'input' is no FLOAT"),
        ({"ids": [1.5], "input": ROW}, "input 'ids' is no INT8"),
        ({"ids": [True], "input": ROW}, "input 'ids' is no INT8"),
        ({"ids": [300], "input": ROW}, "input 'ids' has numbers that INT8 does not have"),
        (
            {"ids": [1], "input": [[1, 2]] * 2},
            r"input 'input' has the shape \[2, 2\], and the model takes \['n', 4\]",
        ),
        ({"ids": [1], "input": 3}, r"input 'input' has the shape \[\]"),
        ({"ids": [1, 2, 3], "input": ROW}, "n is 3 and, in input 'input', 2"),
    ],
)
def test_ray_program_refuses_a_body_that_is_no_input_with_a_sentence(body, message, tmp_path):
    htp_export.partition(handmade.encoder(), 1, tmp_path / "stages", serve="ray")
    app = program(tmp_path / "stages")
    entries = [("ids", "INT8", ["n"]), ("input", "FLOAT", ["n", 4])]
    inputs = [{"name": name, "type": kind, "shape": shape} for name, kind, shape in entries]
    manifest = {"htp.partition": "1", "inputs": inputs, "outputs": [], "stages": []}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    pipeline = app.Pipeline(str(tmp_path))
    taken = pipeline.inputs_of(json.dumps({"ids": [1, -2], "input": ROW}).encode())
    assert {name: (array.dtype.name, array.tolist()) for name, array in taken.items()} == {
        "ids": ("int8", [1, -2]),
        "input": ("float32", ROW),
    }
    with pytest.raises(app.BodyError, match=message):
        pipeline.inputs_of(body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({"htp.partition": "2"}), "'htp.partition' is not '1'"),
        (lambda m: m.pop("stages"), "no 'stages'"),
        (lambda m: m.update(stages=7), "not iterable"),
        (lambda m: m["stages"][0].update(file=7), "7 is not a string"),
        (lambda m: m["stages"][0].update(session_config=[]), "no attribute 'items'"),
        (
            lambda m: m["stages"][0].update(session_config={"session.profile_file": "x"}),
            "'session.profile_file' is not",
        ),
        (
            lambda m: m["stages"][1]["inputs"][0].update(stage=1),
            "1 is not the number of a stage before it",
        ),
        (lambda m: m["outputs"][0].update(stage=-1), "-1 is not the number of a stage before it"),
        (lambda m: m["inputs"][0].update(shape=1), "not iterable"),
    ],
)
def test_ray_program_refuses_a_manifest_that_partition_did_not_write(change, message, tmp_path):
    htp_export.partition(handmade.encoder(), 2, tmp_path / "stages", serve="ray")
    app, file = program(tmp_path / "stages"), tmp_path / "stages" / "manifest.json"
    written = json.loads(file.read_text())
    app.Stage(str(file.parent), 0, ["CPUExecutionProvider"])
    change(written)
    file.write_text(json.dumps(written))
    for made in (
        lambda: app.Pipeline(str(file.parent)),
        lambda: app.Stage(str(file.parent), 0, []),
    ):
        with pytest.raises(
            app.ManifestError,
            match=rf"manifest\.json: not the manifest of a partition: .*{message}",
        ):
            made()


def replicas(deployment: str) -> list[int]:
    """The processes of a deployment's replicas on this machine."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # a process that has ended
            if (
                folder.name.isdigit()
                and f"ServeReplica:stages:{deployment}" in (folder / "cmdline").read_text()
            ):
                found.append(int(folder.name))
    return found


def answer_over_http(body: Any) -> tuple[int, Any]:
    """The status and the JSON of an answer of the application that runs here."""
    request = urllib.request.Request("http://127.0.0.1:8000/", data=json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray's own code and what it depends on
def test_ray_serves_the_stages(served):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'htp-export[serve]'")
    serve = pytest.importorskip(
        "ray.serve", reason="Ray Serve is not installed: pip install 'htp-export[serve]'"
    )
    app, found, inputs = served
    body = {name: array.tolist() for name, array in inputs.items()}
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        handle = serve.run(app.build({}), name="stages", route_prefix="/")
        answer = handle.run.remote(inputs).result(timeout_s=60)
        over_http = answer_over_http(body)
        refused = answer_over_http({"input": "text"})
        after_deaths = []
        for killed in ("stage1", "stage0", "pipeline"):
            for process in replicas(killed)[:1]:
                os.kill(process, signal.SIGKILL)
                after_deaths.append(answer_over_http(body))
    finally:
        serve.shutdown()
        ray.shutdown()
    assert all(np.array_equal(answer[name], array) for name, array in found.run(inputs).items())
    assert over_http == (200, {name: array.tolist() for name, array in answer.items()})
    assert refused == (
        400,
        {"error": "input 'input' is no FLOAT, or no nested lists of it of equal lengths"},
    )
    assert after_deaths == [over_http] * 3, "requests wait until another replica is there"
