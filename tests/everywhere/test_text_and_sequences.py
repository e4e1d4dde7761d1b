"""Models with inputs of text, and outputs that are no tensors: what ONNX Runtime runs, every capability runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.runtime.sessions import RunnableModel, Session

TEXT = """<ir_version: 10, opset_import: ["" : 18, "ai.onnx.ml" : 3]>
net (string[n] words, float[n, 8] x)
  => (float[n, 4] y, string[n] again, seq(float[n, 4]) both, optional(float[n, 4]) maybe)
<int64[1] one = {1}> {
    ids = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_int64s = [3, 5]> (words)
    floats = Cast <to = 1> (ids)
    column = Unsqueeze(floats, one)
    shifted = Add(x, column)
    hidden = MatMul(shifted, w)
    act = Relu(hidden)
    y = MatMul(act, v)
    again = Identity(words)
    both = SequenceConstruct(y, y)
    maybe = Optional(y)
}"""
OWNERS = {
    **dict.fromkeys(("ids", "floats", "column", "shifted"), "embed"),
    **dict.fromkeys(("hidden", "act"), "body"),
    "y": "head",
    "again": "echo",
    "both": "pair",
    "maybe": "pair",
}


def text_model() -> onnx.ModelProto:
    model = onnx.parser.parse_model(TEXT)
    generator = np.random.default_rng(0)
    for name, shape in (("w", (8, 16)), ("v", (16, 4))):
        array = generator.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
        node.metadata_props.add(key="htp.module", value=OWNERS[node.output[0]])
        node.metadata_props.add(key="htp.reason", value="scope")
    modules = [
        ModuleInfo(path, "net.Net", 1, "computed")
        for path in ("", "embed", "body", "head", "echo", "pair")
    ]
    model.metadata_props.add(key="htp.version", value="1")
    model.metadata_props.add(key="htp.modules", value=Hierarchy(modules).to_json())
    return model


def feed(rows: int = 3) -> dict[str, Any]:
    x = np.random.default_rng(1).standard_normal((rows, 8)).astype(np.float32)
    return {"words": np.array(["a", "b", "other"][:rows], object), "x": x}


@pytest.fixture
def file(tmp_path: Path) -> str:
    onnx.save(text_model(), tmp_path / "m.onnx")
    return str(tmp_path / "m.onnx")


def expected(file: str) -> dict[str, Any]:
    """What ONNX Runtime itself returns."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed()), strict=True))


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    np.testing.assert_allclose(found["y"], wanted["y"], rtol=1e-5)
    assert found["again"].tolist() == wanted["again"].tolist() == feed()["words"].tolist()
    assert len(found["both"]) == 2
    for ours, theirs in zip(found["both"], wanted["both"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(found["maybe"], wanted["maybe"], rtol=1e-5)


def test_a_session_takes_and_returns_what_onnx_runtime_does(file):
    wanted, session = expected(file), Session(RunnableModel(Path(file), "the model"))
    assert_same(session.run(feed()), wanted)
    assert session.run(feed(0), ["again"])["again"].shape == (0,)


@pytest.mark.parametrize("keep_loaded", [True, False])
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_return_what_the_model_does(keep_loaded, stages, file, tmp_path):
    htp_export.partition(file, stages, tmp_path / "stages")
    with htp_export.load_partition(tmp_path / "stages").open(keep_loaded=keep_loaded) as runner:
        for _ in range(2):
            assert_same(runner.run(feed()), expected(file))


WORDS = {
    "objects": feed()["words"],
    "unicode": np.array(["a", "b", "other"]),
    "bytes": np.array([b"a", b"b", b"other"]),
    "list": ["a", "b", "other"],
}


@pytest.mark.parametrize("form", WORDS)
def test_text_is_taken_in_every_form(form, file):
    result = htp_export.compare(file, file, {**feed(), "words": WORDS[form]})
    assert result.ok
    assert [path for path, each in result.modules.items() if each.compared] == [
        "",
        "embed",
        "body",
        "head",
        "echo",
    ]
    assert result.modules["echo"].max_abs == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (np.array(["a", None, "b"], object), "element of type NoneType"),
        (np.array([b"a", b"\xff", b"b"]), "contains bytes that are not UTF-8"),
        (np.zeros(3, np.int64), "is int64"),
        (np.array(["a"] * 6).reshape(3, 2), "the model requires string"),
    ],
)
def test_what_is_no_text_is_refused(words, problem, file):
    with pytest.raises(InputError, match=f"input 'words'.*{problem}"):
        htp_export.compare(file, file, {**feed(), "words": words})


def test_compare_finds_text_that_differs(file, tmp_path):
    changed = text_model()
    changed.graph.node[7].CopyFrom(
        onnx.helper.make_node("StringConcat", ["words", "words"], ["again"], name="n")
    )
    for each in changed.opset_import:
        each.version = 20 if each.domain == "" else each.version
    for key, value in (("htp.module", "echo"), ("htp.reason", "scope")):
        changed.graph.node[7].metadata_props.add(key=key, value=value)
    onnx.save(changed, tmp_path / "changed.onnx")
    result = htp_export.compare(file, tmp_path / "changed.onnx", feed())
    assert result.first_wrong == "echo"
    assert result.modules["head"].status == "agrees"


CALLS: dict[str, Callable[[str, str], Any]] = {
    "profile": lambda file, _: (
        htp_export.profile(file, data=feed(), runs=1, warmup=0).end_to_end_ms > 0
    ),
    "profile modules": lambda file, _: htp_export.profile(
        file, data=feed(), runs=1, timing="modules"
    ).modules["body"],
    "profile memory": lambda file, _: htp_export.profile(
        file, data=feed(), runs=1, memory=True
    ).modules["body"],
    "optimize": lambda file, out: (
        htp_export.optimize(file, out, data=feed(), verify=True).max_abs == 0
    ),
    "quantize": lambda file, out: htp_export.quantize(
        file, {"head": "uint8"}, out, data=feed()
    ).modules["head"],
    "sensitivity": lambda file, _: htp_export.sensitivity(file, data=feed(), select="head").ranking,
    "search": lambda file, _: (
        htp_export.search(file, data=feed(), trials=2, space=["int8"], select="head").pareto
    ),
    "pipeline": lambda file, out: htp_export.pipeline(
        ["optimize", {"compare": {"data": [feed()]}}], file, out
    ),
    "carry": lambda file, out: htp_export.carry(file, file, out, data=feed()).kept,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_capability_that_runs_a_file_runs_it(name, file, tmp_path):
    assert CALLS[name](file, str(tmp_path / "out.onnx"))


def test_a_metric_gets_sequences_as_they_are(file):
    seen: list[Any] = []

    def metric(outputs: Any) -> float:
        seen.extend(outputs)
        return 1.0

    htp_export.search(
        file,
        data=feed(),
        trials=1,
        space=["int8"],
        select="head",
        objectives=["metric", "size"],
        metric=metric,
    )
    assert_same(dict(seen[0]), expected(file))


def test_commands_take_text_from_a_file(file, tmp_path, capsys):
    np.savez(tmp_path / "data.npz", **{**feed(), "words": WORDS["unicode"]})
    assert main(["compare", file, file, "--data", str(tmp_path / "data.npz")]) == 0
    assert main(["profile", file, "--data", str(tmp_path / "data.npz"), "--runs", "1"]) == 0
    assert main(["profile", file, "--runs", "1"]) == 2  # random text says nothing
    assert "random values cannot be generated for string" in capsys.readouterr().err


def zipped(file: Path) -> Path:
    """A classifier as skl2onnx writes it by default: its probabilities are a sequence of maps."""
    labels = {"classlabels_int64s": [0, 1]}
    nodes = [
        onnx.helper.make_node("Softmax", ["x"], ["p"], name="p"),
        onnx.helper.make_node("ZipMap", ["p"], ["prob"], name="zip", domain="ai.onnx.ml", **labels),
    ]
    number = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
    maps = onnx.helper.make_sequence_type_proto(
        onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, number)
    )
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 2])
    graph = onnx.helper.make_graph(nodes, "net", [x], [onnx.helper.make_value_info("prob", maps)])
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), file)
    return file


@pytest.mark.parametrize(
    "typed",
    [
        *(
            "info zip.onnx",
            "tree zip.onnx",
            "nodes zip.onnx",
            "view zip.onnx -o v.html",
            "optimize zip.onnx -o o.onnx",
        ),
        *("compare zip.onnx zip.onnx", "profile zip.onnx", "quantize zip.onnx int8 -o o.onnx"),
    ],
)
def test_a_file_with_maps_is_valid_and_cannot_be_read(typed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = zipped(tmp_path / "zip.onnx")
    onnx.checker.check_model(file, full_check=True)
    [found] = onnxruntime.InferenceSession(file).run(None, {"x": np.zeros((1, 2), np.float32)})
    assert found == [{0: 0.5, 1: 0.5}]
    assert main(typed.split()) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        "htp-export: error: zip.onnx: 'prob' is a map, an ONNX type that htp_export cannot read"
    )
    assert "options={'zipmap': False}" in message
    assert "valid" not in message
    assert list(tmp_path.iterdir()) == [file]
