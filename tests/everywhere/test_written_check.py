"""What is not valid ONNX is not written, whichever function made it, and the error names node and module."""

import ast
import contextlib
import functools
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from safetensors.numpy import save_file
from torch import nn

import htp_export
from htp_export import tools
from htp_export.errors import InputError, ResultError, StepError, ToolError
from htp_export.files import model_files
from htp_export.files.written_check import faults_of
from tests.exporting import quick
from tests.extract.test_cutting import exported_to
from tests.nets import EXPORTERS, NETS, spread, x
from tools.peak_memory import status

PACKAGE = Path(htp_export.__file__).parent


def net() -> nn.Module:
    layers = {"body": nn.Linear(64, 64), "act": nn.ReLU(), "head": nn.Linear(64, 4)}
    return spread(nn.Sequential(OrderedDict(layers))).eval()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files that the functions work on."""
    folder = tmp_path_factory.mktemp("given")
    file = exported_to(folder / "net.onnx", net(), {"input": x(2, 3, 64)}, "dynamo")
    htp_export.extract(file, "head", folder / "head.onnx")
    htp_export.functions(file, ["body"], folder / "nested.onnx")
    factors = {
        "base_model.model.head.lora_A.weight": np.ones((2, 64), np.float32),
        "base_model.model.head.lora_B.weight": np.ones((4, 2), np.float32),
    }
    (folder / "adapter").mkdir()
    save_file(factors, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 2}'
    )
    plain = onnx.load(file)
    for node in plain.graph.node:
        del node.metadata_props[:]
    onnx.save(plain, folder / "plain.onnx")
    return {file.stem: file for file in folder.iterdir() if file.suffix != ".data"}


def export_with(**options: Any) -> Callable[..., Any]:
    def exported(given: dict[str, Path], out: Path) -> None:
        htp_export.export(net(), (x(2, 3, 64),), out, verbose=False, dynamo=False, **options)

    return exported


WRITERS: dict[str, Callable[[dict[str, Path], Path], Any]] = {
    "save": lambda given, out: htp_export.load(given["net"]).save(out),
    "prune": lambda given, out: htp_export.prune(given["net"], {"body": 0.5}, out),
    "prune channels": lambda given, out: htp_export.prune(
        given["net"], {"body": "channels:0.5"}, out
    ),
    "prune activations": lambda given, out: htp_export.prune(
        given["net"], {"act": "activations:0.9"}, out, data={"input": x(2, 3, 64)}
    ),
    "quantize fp16": lambda given, out: htp_export.quantize(
        given["net"], {"body": "fp16"}, output=out
    ),
    "quantize int8": lambda given, out: htp_export.quantize(
        given["net"], {"body": "int8-dynamic"}, output=out
    ),
    "quantize int4": lambda given, out: htp_export.quantize(
        given["net"], {"body": "int4"}, output=out
    ),
    "extract": lambda given, out: htp_export.extract(given["net"], "body", out),
    "splice": lambda given, out: htp_export.splice(given["net"], "head", given["head"], out),
    "functions": lambda given, out: htp_export.functions(given["net"], ["body"], out),
    "inline": lambda given, out: htp_export.inline(given["nested"], out),
    "tap": lambda given, out: htp_export.tap(given["net"], "body:out", out),
    "untap": lambda given, out: htp_export.untap(
        htp_export.tap(given["net"], "body:out"), None, out
    ),
    "steer": lambda given, out: htp_export.steer(given["net"], "body:out", out),
    "partition": lambda given, out: htp_export.partition(given["net"], 2, out.with_suffix("")),
    "optimize": lambda given, out: htp_export.optimize(given["net"], out),
    "carry": lambda given, out: htp_export.carry(given["net"], given["plain"], out),
    "embed_map": lambda given, out: htp_export.embed_map(given["net"], out),
    "rename": lambda given, out: htp_export.rename(given["net"], output=out),
    "place": lambda given, out: htp_export.place(given["net"], {"body": "cpu"}, out),
    "lora.insert": lambda given, out: htp_export.lora.insert(
        given["net"], "head", rank=2, output=out
    ),
    "lora.fuse": lambda given, out: htp_export.lora.fuse(given["net"], given["adapter"], out),
    "pipeline": lambda given, out: htp_export.pipeline(
        [{"prune": {"plan": {"body": 0.5}}}], given["net"], out
    ),
    "tool": lambda given, out: tools.quantize_dynamic(given["net"], out),
    "export with names": export_with(names="path"),
    "export with functions": export_with(export_modules_as_functions=True),
}


def a_wrong_attribute(graph: ir.Graph) -> str:
    node = next(node for node in graph if not node.domain and node.op_type != "Constant")
    node.attributes.add(ir.AttrInt64("planted", 1))
    return "planted"


def a_wrong_shape(graph: ir.Graph) -> str:
    graph.outputs[0].shape = ir.Shape([7] * 9)
    return "rank"


@pytest.mark.parametrize(
    ("writer", "plant"),
    [("save", a_wrong_shape), *((writer, a_wrong_attribute) for writer in WRITERS)],
)
def test_a_fault_that_is_made_before_writing_is_refused_by_every_function(
    writer: str, plant: Callable[[ir.Graph], str], given: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write = model_files._write
    said: list[str] = []

    def planted(copy: ir.Model, file: Path, target: Path | None, *others: Any) -> None:
        if target is not None:
            graphs = [copy.graph, *(function.graph for function in copy.functions.values())]
            standard = [graph for graph in graphs if any(not node.domain for node in graph)]
            said.append(plant(standard[0] if plant is a_wrong_attribute else copy.graph))
        write(copy, file, target, *others)

    before = {
        file.name: file.read_bytes() for file in given["net"].parent.iterdir() if file.is_file()
    }
    monkeypatch.setattr(model_files, "_write", planted)
    out = tmp_path / "out.onnx"
    out.write_bytes(given["net"].read_bytes())
    if writer == "partition":
        out.unlink()
    with pytest.raises(
        (ResultError, StepError, ToolError), match=r"body|head|act|MatMul"
    ) as raised:
        WRITERS[writer](given, out)
    assert said
    assert said[0] in str(raised.value)
    assert not isinstance(raised.value, InputError)
    assert {
        file.name: file.read_bytes() for file in given["net"].parent.iterdir() if file.is_file()
    } == before
    left = {path.name for path in tmp_path.iterdir()} - {"out.onnx.steps"}
    assert left <= {"out.onnx"}
    if writer != "partition":
        assert out.read_bytes() == given["net"].read_bytes()


@pytest.mark.parametrize("writer", [writer for writer in WRITERS if "export" not in writer])
def test_models_in_memory_stay_as_they_were(writer, given, tmp_path):
    models = {
        name: htp_export.load(file) if file.is_file() else file for name, file in given.items()
    }
    protos = {name: ir.to_proto(each.model) for name, each in models.items() if name != "adapter"}
    before = {name: proto.SerializeToString(deterministic=True) for name, proto in protos.items()}
    WRITERS[writer](models, tmp_path / "out.onnx")
    for name, proto in before.items():
        assert ir.to_proto(models[name].model).SerializeToString(deterministic=True) == proto, name


def test_the_error_says_node_module_and_whose_fault_it_is(given, tmp_path):
    tagged = htp_export.load(given["net"])
    node = tagged["act"].nodes[0]
    node.attributes.add(ir.AttrInt64("alpha", 1))
    with pytest.raises(ResultError) as raised:
        tagged.save(tmp_path / "out.onnx")
    assert (raised.value.node, raised.value.modules) == (node.name, ("act",))
    assert f"Relu {node.name!r} of 'act': Unrecognized attribute: alpha for operator Relu" in str(
        raised.value
    )
    assert "does not have this error" in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plant", [a_wrong_attribute, a_wrong_shape])
def test_a_fault_that_a_model_had_before_is_no_reason_to_refuse_it(plant, given, tmp_path):
    model = ir.from_proto(onnx.load(given["net"]))
    plant(model.graph)
    onnx.save(ir.to_proto(model), tmp_path / "faulty.onnx")
    for made_of in (tmp_path / "faulty.onnx", model):
        htp_export.prune(made_of, {"head": 0.5}, tmp_path / "out.onnx")
        htp_export.rename(made_of, output=tmp_path / "named.onnx")
    htp_export.load(tmp_path / "faulty.onnx").save(tmp_path / "copy.onnx")
    assert len(list(tmp_path.glob("*.onnx"))) == 4


def test_another_fault_than_a_model_had_is_said_with_the_one_that_it_had(given, tmp_path):
    model = ir.from_proto(onnx.load(given["net"]))
    a_wrong_shape(model.graph)
    onnx.save(ir.to_proto(model), tmp_path / "faulty.onnx")
    tagged = htp_export.load(tmp_path / "faulty.onnx")
    tagged["act"].nodes[0].attributes.add(ir.AttrInt64("alpha", 1))
    with pytest.raises(
        ResultError, match=r"alpha .*source model is not valid either, and .* rank"
    ) as raised:
        tagged.save(tmp_path / "out.onnx")
    assert "report" not in str(raised.value)


def own(*nodes: ir.Node, opset: int = 20, **imports: int) -> ir.Model:
    graph = ir.Graph(
        [nodes[0].inputs[0]],
        nodes[-1].outputs,
        nodes=nodes,
        opset_imports={"": opset, **imports},
        name="g",
    )
    return ir.Model(graph, ir_version=99)


def test_operators_and_versions_that_onnx_does_not_know_are_written(tmp_path):
    mystery = ir.node("Mystery", [ir.val("x", ir.DataType.FLOAT, ["n", 3])], domain="my.own")
    after = ir.node("Relu", [mystery.outputs[0]])
    after.outputs[0].dtype = ir.DataType.FLOAT  # an output without a shape
    htp_export.load(own(mystery, after, opset=99, **{"my.own": 1})).save(tmp_path / "own.onnx")
    assert onnx.load(tmp_path / "own.onnx").ir_version == 99


def test_an_operator_of_onnx_runtime_in_the_domain_of_onnx_is_no_fault():
    for op_type, is_fault in {
        "SimplifiedLayerNormalization": False,
        "SimpleLayerNormalization": True,
    }.items():
        x, made, y = (ir.val(name, ir.DataType.FLOAT, [2, 8]) for name in "xmy")
        scale = ir.val("scale", const_value=ir.tensor(np.ones(8, np.float32), name="scale"))
        norm = ir.node(op_type, [x, scale], {"axis": -1}, outputs=[made])
        model = own(norm, ir.node("Relu", [made], outputs=[y]))
        model.graph.register_initializer(scale)
        assert bool(faults_of(model)) == is_fault


@pytest.mark.parametrize("external", [False, True])
def test_a_tensor_that_becomes_empty_is_refused(external, given, tmp_path):
    tagged = htp_export.load(given["net"])
    act = tagged["act"].nodes[0]
    axes = [
        ir.val(name, const_value=ir.tensor(np.array([0]), name=name)) for name in ("none", "axis")
    ]
    for value in axes:
        tagged.model.graph.register_initializer(value)
    cut = ir.node(
        "Slice",
        [act.outputs[0], axes[0], axes[0], axes[1]],
        name="cut",
        metadata_props=act.metadata_props,
    )
    tagged.model.graph.insert_after(act, cut)
    act.outputs[0].replace_all_uses_with(cut.outputs[0])
    cut.replace_input_with(0, act.outputs[0])
    for node in (*tagged["head"].nodes,):
        node.outputs[0].shape = None
    with pytest.raises(
        ResultError, match=r"Slice 'cut' of 'act': .* has the shape \[0, 3, 64\], without elements"
    ):
        tagged.save(tmp_path / "out.onnx", "out.data" if external else None)
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_shape_may_be_empty(given, tmp_path):
    tagged = htp_export.load(given["net"])
    act = tagged["act"].nodes[0]
    none = ir.val("none", const_value=ir.tensor(np.array([0]), name="none"))
    tagged.model.graph.register_initializer(none)
    shape = ir.node("Shape", [act.outputs[0]], name="shape", metadata_props=act.metadata_props)
    cut = ir.node(
        "Slice", [shape.outputs[0], none, none], name="cut", metadata_props=act.metadata_props
    )
    tagged.model.graph.insert_after(act, [shape, cut])
    tagged.save(tmp_path / "out.onnx")
    assert {"shape", "cut"} <= {node.name for node in onnx.load(tmp_path / "out.onnx").graph.node}


# --- what is valid is not refused ---

OPAQUE: dict[str, str] = {
    "flat": "a = my.Op (x) y = Relu (a)",
    "in a branch": """a = If (k) <
            then_branch = t () => (b) { b = my.Op (x) }, else_branch = e () => (c) { c = Neg (x) }>
        y = Relu (a)""",
    "inside of a branch": """a = If (k) <
            then_branch = t () => (b) { m = my.Op (x) b = Relu (m) }, else_branch = e () => (c) { c = Neg (x) }>
        y = Relu (a)""",
    "before a branch": """m = my.Op (x)
        a = If (k) <then_branch = t () => (b) { b = Exp (m) }, else_branch = e () => (c) { c = Neg (m) }>
        y = Relu (a)""",
    "in a loop": """a = Loop (n, k, x) <body = b (int64 i, bool go, float[4] s) => (bool on, float[4] t) {
            on = Identity (go) t = my.Op (s) }>
        y = Relu (a)""",
}
"""Nodes of another domain whose results have no type."""


@pytest.mark.parametrize("where", OPAQUE)
def test_what_another_domain_computes_needs_no_type(where):
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20, "my": 1]>
        g (float[4] x, bool k, int64 n) => (float[4] y, float[3] z) {{ {OPAQUE[where]} z = Concat <axis = 0> (w, v) }}
        """
    )
    for name, size in (("w", 2), ("v", 1)):
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.ones(size, np.float32), name)
        )
    onnx.checker.check_model(model)
    assert faults_of(ir.from_proto(model)) == []
    # the rest is looked at
    model.graph.node[-1].name, model.graph.initializer[-1].dims[:] = "joined", [1, 1]
    assert [fault.node for fault in faults_of(ir.from_proto(model))] == ["joined"]


@pytest.mark.parametrize("typed", ["graph output", "value info"])
def test_what_reads_a_typed_result_of_another_domain_is_looked_at(typed):
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20, "my": 1]>
        g (float[4] x) => (float[4] a, float[4] z) { a = my.Op (x) [joined] z = Concat <axis = 0> (a, a) }"""
    )
    if typed == "value info":
        model.graph.value_info.append(model.graph.output[0])
        del model.graph.output[0]
    onnx.checker.check_model(model, full_check=True)  # it excuses all faults of such a graph
    assert [fault.node for fault in faults_of(ir.from_proto(model))] == ["joined"]


def test_functions_of_another_domains_operators_are_valid(given, tmp_path):
    """Inference alone knows no types in a function that calls such an operator in another function."""
    htp_export.quantize(given["net"], {"body": "int4"}, tmp_path / "int4.onnx")
    htp_export.functions(tmp_path / "int4.onnx", "**", tmp_path / "nested.onnx")
    inputs = {"input": x(2, 3, 64).numpy()}
    one, other = (
        onnxruntime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"]).run(
            None, inputs
        )[0]
        for name in ("int4.onnx", "nested.onnx")
    )
    np.testing.assert_array_equal(one, other)

    tagged = htp_export.load(tmp_path / "int4.onnx")
    for node in tagged.nodes:  # nor are they known outside
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
    assert htp_export.functions(tagged, "**", tmp_path / "untyped.onnx").functions


def test_a_fault_in_a_function_is_found_beside_operators_of_another_domain(given, tmp_path):
    htp_export.quantize(given["net"], {"body": "int4"}, tmp_path / "int4.onnx")
    htp_export.functions(tmp_path / "int4.onnx", "**", tmp_path / "nested.onnx")
    nested = htp_export.load(tmp_path / "nested.onnx")
    (act,) = (
        node
        for function in nested.model.functions.values()
        for node in function
        if node.op_type == "Relu"
    )
    wrong = ir.node("Concat", [act.inputs[0], act.inputs[0]], {"axis": 7}, name="wrong")
    wrong.metadata_props.update(act.metadata_props)
    act.graph.insert_before(act, wrong)
    act.replace_input_with(0, wrong.outputs[0])
    with pytest.raises(ResultError, match=r"Concat 'wrong' of 'act'") as raised:
        nested.save(tmp_path / "out.onnx")
    assert (raised.value.node, raised.value.modules) == ("wrong", ("act",))


def test_a_fault_that_a_model_had_is_none_of_functions_that_are_made_of_it(given, tmp_path):
    tagged = htp_export.load(given["net"])
    a_wrong_shape(tagged.model.graph)
    htp_export.functions(tagged, "**", tmp_path / "nested.onnx")


def test_what_is_computed_of_an_empty_constant_may_be_empty(given, tmp_path):
    # an adapter of no rank by default
    htp_export.lora.insert(given["net"], "**", tmp_path / "lora.onnx", rank=2)
    htp_export.functions(tmp_path / "lora.onnx", "**", tmp_path / "nested.onnx")
    for file in ("lora.onnx", "nested.onnx"):
        htp_export.extract(tmp_path / file, "body", tmp_path / "part.onnx")
        onnx.checker.check_model(tmp_path / "part.onnx", full_check=True)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[2, 3] x) => (float[2, 3] y) {
            none = Constant <value = float[0, 3] {}> () h = Abs (none) y = Concat <axis = 0> (x, h) }"""
    )
    htp_export.optimize(model, tmp_path / "folded.onnx")


def test_a_size_that_is_found_to_be_zero_was_zero_before(tmp_path):
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[2, 3] x) => (float[n, m] y) {
            s = Shape (x) size = Gather (s, i) none = Sub (size, size) y = Slice (x, none, none, axis) }"""
    )
    for name, number in (("i", [0]), ("axis", [0])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(number), name))
    htp_export.optimize(model, tmp_path / "out.onnx")
    found = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "out.onnx")).graph.output[0].type
    assert [dim.dim_value for dim in found.tensor_type.shape.dim] in ([0, 3], [0, 0])


CHANGES: dict[str, Callable[[Path, Path], Any]] = {
    "exact": lambda file, out: htp_export.optimize(file, out),
    "tolerant": lambda file, out: htp_export.optimize(file, out, level="tolerant"),
    "fused": lambda file, out: htp_export.optimize(file, out, level="fused"),
    "functions": lambda file, out: htp_export.functions(file, "**", out),
    "inline": lambda file, out: htp_export.inline(file, out),
    "int4": lambda file, out: htp_export.quantize(file, "int4", out),
    "fp16": lambda file, out: htp_export.quantize(file, "fp16", out),
    "int8": lambda file, out: htp_export.quantize(file, "int8", out),
    "int8-dynamic": lambda file, out: htp_export.quantize(file, "int8-dynamic", out),
    "sparse": lambda file, out: htp_export.prune(file, {"**": 0.5}, out),
    "channels": lambda file, out: htp_export.prune(file, {"**": "channels:0.5"}, out),
    "rank": lambda file, out: htp_export.prune(file, {"**": "rank:1"}, out),
    "lora": lambda file, out: htp_export.lora.insert(file, "**", out, rank=1),
    "rename": lambda file, out: htp_export.rename(file, output=out),
    "carry": lambda file, out: htp_export.carry(file, file, out),
    "place": lambda file, out: htp_export.place(file, {"**": "cpu"}, out),
    "stages": lambda file, out: htp_export.partition(file, 2, out.with_suffix("")),
}
"""What is done to a whole file."""

# modules of each file that are cut out, put back and tapped; they take as long as all the rest
_SEVERAL = 6


def parts_of(file: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """What is done to single modules of a file."""
    tree, part = htp_export.load(file).hierarchy, out.with_suffix(".part.onnx")
    work: dict[str, Callable[[], Any]] = {}
    for path in [path for path in tree if path and tree[path].fate.is_exact][:_SEVERAL]:

        def splice(path: str = path) -> None:
            htp_export.extract(file, path, part)
            htp_export.splice(file, path, part, out)

        work[f"splice {path}"] = splice
        work[f"tap {path}"] = functools.partial(htp_export.tap, file, f"{path}:out", out)
    return work


def tried(file: Path, folder: Path) -> list[str]:
    """What could be done to a file: alone, and after what makes nodes of another domain, functions, or inputs.

    Where an input is refused, as there is no layer for it, nothing is written.
    """
    made, done = {"": file}, list[str]()
    for change, make in CHANGES.items():
        out = folder / f"{change}.onnx"
        with contextlib.suppress(InputError):
            make(file, out)
            made[change] = out
    for first in ("", "fused", "functions", "int4", "int8-dynamic", "lora"):
        if first not in made:
            continue
        second = folder / "second.onnx"
        again = {
            change: functools.partial(make, made[first], second)
            for change, make in CHANGES.items()
            if first
        }
        for change, work in {**again, **parts_of(made[first], second)}.items():
            with contextlib.suppress(InputError, ToolError):
                work()
                done.append(f"{first}, {change}")
            shutil.rmtree(second.with_suffix(""), ignore_errors=True)
    return [*made, *done]


@pytest.mark.long
def test_no_command_refuses_what_it_made_of_a_valid_file(given, tmp_path):
    done = tried(given["net"], tmp_path)
    assert {
        *CHANGES,
        "int4, functions",
        "functions, int4",
        "lora, functions",
        "int8-dynamic, splice head",
    } <= {*done}


@pytest.mark.parametrize(
    ("name", "exporter"),
    quick(
        (
            (name, exporter)
            for name in NETS
            for exporter in EXPORTERS
            if exporter not in NETS[name].skip
        ),
        ("conv_bn_relu", "torchscript"),
    ),
)
def test_no_command_refuses_what_it_made_of_a_net(name, exporter, shared_files, tmp_path):
    # of what only passes on its input, few
    assert len(tried(shared_files.net(name, exporter), tmp_path)) >= 15


def test_no_function_writes_a_model_without_the_check():
    """Files that are written otherwise are those of torch, and those that only a tool or a runtime reads."""
    writers = {"save", "save_model", "write_for_tool"}
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func
                name = (
                    called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                )
                of_onnx = not isinstance(called, ast.Attribute) or getattr(
                    called.value, "id", ""
                ) in ("onnx", "ir")
                if name in writers and of_onnx:
                    found.add(file.relative_to(PACKAGE).as_posix())
    assert found == {
        "files/model_files.py",
        "files/external_writers.py",  # torch's file
        "exporter/capture/saving.py",  # torch's file
        "capabilities/carry/adapting.py",
        "runtime/sessions.py",
        "capabilities/quantize/methods/static.py",
        "capabilities/quantize/methods/float8.py",  # what ONNX Runtime measures the ranges on
        # what ONNX Runtime's quantizer made, until it is put back
        "capabilities/quantize/methods/weights.py",
    }


LONG = 4_000_000
"""Elements of a vector, of which onnx's inference would allocate 500 MB in two seconds."""

LONG_VECTORS = {
    "constants": "() => (float y) <int64 n = {LONG}, int64 zero = {0}, int64 one = {1}> {"
    "r = Range(zero, n, one) f = Cast <to = 1> (r) y = ReduceSum <keepdims = 0> (f) }",
    "an input": "(float[LONG] x) => (double[LONG] y) { y = Cast <to = 11> (x) }",
    "values of a shape": "(float[LONG, 2] x) => (double y) {"
    "n = Shape <start = 0, end = 1> (x) r = ConstantOfShape(n) "
    "f = Cast <to = 11> (r) y = ReduceSum <keepdims = 0> (f) }",
    "doubled": "(int64[2] x) => (int64 y) {"
    + " ".join(
        f"x{k} = Concat <axis = 0> ({'x' if k == 0 else f'x{k - 1}'}, {'x' if k == 0 else f'x{k - 1}'})"
        for k in range(21)
    )
    + " y = ReduceSum <keepdims = 0> (x20) }",
    "a branch": "(bool c, float[LONG] x) => (double[LONG] y) {"
    "y = If (c) <then_branch = t () => (double[LONG] u) { u = Cast <to = 11> (x) },"
    " else_branch = e () => (double[LONG] v) { v = Cast <to = 11> (x) }> }",
    "a function": "(float[LONG] x) => (double[LONG] y) { y = local.long(x) }"
    ' <domain: "local", opset_import: ["": 20, "local": 1]> long (x) => (y) { y = local.longer(x) }'
    ' <domain: "local", opset_import: ["": 20]> longer (x) => (y) { y = Cast <to = 11> (x) }',
}


@pytest.mark.parametrize("name", LONG_VECTORS)
def test_the_check_allocates_nothing_for_values_of_long_vectors(name):
    resource = pytest.importorskip("resource")
    text = f'<ir_version: 10, opset_import: ["": 20, "local": 1]> net {LONG_VECTORS[name]}'
    model = ir.from_proto(onnx.parser.parse_model(text.replace("LONG", str(LONG))))
    # whatever loads, did
    assert not faults_of(ir.from_proto(onnx.parser.parse_model(text.replace("LONG", "10"))))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + 200_000_000, before[1]))
    try:
        assert not faults_of(model)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_values_of_shapes_are_followed_beside_long_vectors():
    text = """<ir_version: 10, opset_import: ["": 20]> net (float[8, 4] x, float[5, 2] u, float[LONG] z)
        => (float[a, b] y, double[LONG] w) <int64[1] rest = {-1}> {
        n = Shape <start = 1, end = 2> (x) s = Concat <axis = 0> (n, rest) w = Cast <to = 11> (z)
        r = Reshape(x, s) y = Add(r, u) }"""
    faults = faults_of(ir.from_proto(onnx.parser.parse_model(text.replace("LONG", str(LONG)))))
    assert [fault.op_type for fault in faults] == ["Add"]  # 4 rows and 5
