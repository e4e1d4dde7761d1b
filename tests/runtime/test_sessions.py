"""ONNX Runtime sessions: options of users are put back, providers are checked, and errors name node and module."""

import contextlib
import tempfile
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import htp_export
from htp_export.errors import InputError, OnnxRuntimeError
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import RunnableModel, Session, as_written
from htp_export.runtime.settings import RunSettings

HEADER = '<ir_version: 10, opset_import: ["": 20]>'


def runnable(text: str, **owners: str) -> RunnableModel:
    model = ir.from_onnx_text(f"{HEADER} {text}")
    for node in model.graph:
        node.name = f"make_{node.outputs[0].name}"
        if owner := owners.get(str(node.outputs[0].name)):
            node.metadata_props["htp.module"] = owner
    return RunnableModel(ir.to_proto(model).SerializeToString(), "the model", model=model)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("g (float[2, 4] x) => (float[2, 4] y) { y = Relux(x) }", "load"),
        ("g (float[2, 4] x) => (y) { y = Softmax<axis = 7>(x) }", "load"),
        ("g (float[n, 4] x) => (y) <int64[2] s = {3, 3}> { y = Reshape(x, s) }", "run"),
        ("g (float[n, m] x) => (y) <int64[1] s = {3}> { y = Gather(x, s) }", "run"),
    ],
)
def test_an_error_says_what_failed_and_names_the_node_and_its_module(text, action):
    with pytest.raises(
        OnnxRuntimeError, match=f"^the model: ONNX Runtime cannot {action} it in module 'block.0': "
    ) as e:
        Session(runnable(text, y="block.0")).run({"x": np.ones((2, 4), np.float32)})
    assert (e.value.action, e.value.node, e.value.modules) == (action, "make_y", ("block.0",))


def test_an_error_about_no_node_names_none():
    session = Session(runnable("g (float[2] x) => (y) { y = Relu(x) }", y="act"))
    with pytest.raises(OnnxRuntimeError) as error:
        session.run({"z": np.ones(2, np.float32)})
    assert (error.value.node, error.value.modules) == ("", ())


def test_a_provider_that_is_not_there_is_refused():
    settings = RunSettings(providers=[("NoExecutionProvider", {})])
    with pytest.raises(InputError, match=r"no NoExecutionProvider, only .*CPUExecutionProvider"):
        Session(runnable("g (float[2] x) => (y) { y = Relu(x) }"), settings)


@pytest.mark.parametrize("op", ["Relu", "Relux"])
def test_options_of_the_user_are_as_they_were_also_after_an_error(op):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 3
    options.add_session_config_entry("session.disable_prepacking", "0")
    model = runnable(f"g (float[2] x) => (float[2] y) {{ y = {op}(x) }}")
    with contextlib.nullcontext() if op == "Relu" else pytest.raises(OnnxRuntimeError):
        Session(model, RunSettings(session_options=options), as_written(threads=1))
    assert options.intra_op_num_threads == 3
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert options.log_severity_level == onnxruntime.SessionOptions().log_severity_level
    assert options.get_session_config_entry("session.disable_prepacking") == "0"
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"  # its default


def test_a_session_without_options_of_a_user_is_quiet(capfd):
    Session(runnable("g (float[2] x) => (y) { y = Relu(x) }"), changes=as_written())
    assert capfd.readouterr() == ("", "")  # ONNX Runtime warns of an entry that is set again


def test_sequences_and_narrow_floats_are_given():
    text = "g (float[2, 2] x) => (seq(float[1, 2]) parts, bfloat16[2, 2] y) "
    text += "{ parts = SplitToSequence(x) y = Cast<to = 16>(x) }"
    session = Session(runnable(text))
    x = np.array([[1, 2], [3, 4]], np.float32)
    assert [part.tolist() for part in session.run({"x": x}, ["parts"])["parts"]] == [
        [[1, 2]],
        [[3, 4]],
    ]
    y = session.run({"x": x}, ["y"])["y"]
    assert (y.dtype, y.astype(np.float32).tolist()) == (ml_dtypes.bfloat16, x.tolist())


@pytest.fixture(scope="module")
def net() -> tuple[torch.nn.Module, tuple[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
    ).eval()
    args = (torch.randn(2, 64),)
    return model, args, htp_export.export(model, args, verbose=False)


@pytest.mark.parametrize("isolated", [False, True])
def test_verify_and_compare_run_with_the_options_of_the_user(net, isolated):
    model, args, program = net
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    plain = htp_export.verify(model, program, args, isolated=isolated)
    # options that kept the weights of a first model would refuse those of a second
    for _ in range(2):
        result = htp_export.verify(model, program, args, isolated=isolated, session_options=options)
        assert result.ok
        assert set(result.modules) == set(plain.modules)
    assert htp_export.compare(program, program, {"input": args[0]}, session_options=options).ok
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL


def test_weights_written_for_a_user_of_options_are_gone_with_the_runner(net, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("htp_export.runtime.sessions.LARGE_BYTES", 100)
    model, args, program = net
    runner = Runner(program.model, "net", RunSettings(session_options=onnxruntime.SessionOptions()))
    output = program.model.graph.outputs[0].name
    values = runner.run({"input": args[0].numpy()}, [output])[output]
    np.testing.assert_allclose(values, model(*args).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert list(tmp_path.iterdir()) != []
    del runner
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_onnx_runtime_has_no_cpp_in_it(tmp_path):
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 4])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    shape = onnx.helper.make_tensor("shape", onnx.TensorProto.INT64, [2], [3, 3])
    node = onnx.helper.make_node("Reshape", ["x", "shape"], ["y"], name="bent")
    graph = onnx.helper.make_graph([node], "g", [x], [y], initializer=[shape])
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10
    )
    with pytest.raises(htp_export.InputError, match="cannot be reshaped") as caught:
        htp_export.optimize(model, verify=True)
    for word in ("::", "ONNXRuntimeError", ".h:", "was false"):
        assert word not in str(caught.value)
    assert "bent" in str(caught.value)
