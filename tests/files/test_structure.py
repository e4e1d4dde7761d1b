"""Models that break a rule of ONNX: refused when they are read, with what is at fault; and those that break none."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import AttributeProto, TensorProto, helper

import htp_export
from htp_export.command.main import main
from tests.exporting import every

Edit = Callable[[onnx.ModelProto], object]

TEXT = """
<ir_version: 10, opset_import: ["" : 20, "pkg" : 1]>
net (float[n, 4] x, bool c) => (float[n, 4] y)
<float[4] w = {1, 2, 3, 4}, int64[2] turned = {1, 0}>
{
    a = Add (x, w)
    t = Transpose <perm = [0, 1]> (a)
    f = pkg.Act (t)
    k = Constant <value = float[4] {5, 6, 7, 8}> ()
    i = If (c) <
        then_branch = g1 () => (float[n, 4] p) { p = Mul (f, k) },
        else_branch = g2 () => (float[n, 4] q) { q = Identity (f) }
    >
    y = Relu (i)
}
<domain: "pkg", opset_import: ["" : 20]>
Act (u) => (v) { v = Relu (u) }
"""


def net() -> onnx.ModelProto:
    model = onnx.parser.parse_model(TEXT)
    for node in (
        *model.graph.node,
        *model.graph.node[4].attribute[0].g.node,
        *model.functions[0].node,
    ):
        node.name = f"the_{node.output[0]}"
    model.graph.node[0].metadata_props.add(key="htp.module", value="block")
    return model


def node(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    return next(each for each in model.graph.node if output in each.output)


def branch(model: onnx.ModelProto) -> onnx.GraphProto:
    return node(model, "i").attribute[0].g


def rename_output(model: onnx.ModelProto) -> None:
    node(model, "t").output[0] = "a"


def turn(attribute: AttributeProto) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        del node(model, "t").attribute[:]
        node(model, "t").attribute.append(attribute)

    return edit


def typed(edit: Callable[[onnx.TensorProto], object]) -> Edit:
    return lambda model: edit(model.graph.initializer[0])


def dims(*sizes: int) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].dims[:] = sizes

    return edit


def calls_itself(model: onnx.ModelProto) -> None:
    function = model.functions[0]
    function.node.append(
        helper.make_node("Act", [function.input[0]], ["again"], domain=function.domain)
    )
    function.opset_import.append(helper.make_opsetid(function.domain, 1))


BROKEN: dict[str, tuple[Edit, str]] = {
    "an edge from nowhere": (
        lambda model: node(model, "a").input.__setitem__(1, "gone"),
        "node 'the_a' (Add) reads 'gone', which nothing produces",
    ),
    "an edge from nowhere in a branch": (
        lambda model: branch(model).node[0].input.__setitem__(0, "gone"),
        "node 'the_p' (Mul) reads 'gone', which nothing produces",
    ),
    "an edge from nowhere in a function": (
        lambda model: model.functions[0].node[0].input.__setitem__(0, "gone"),
        "node 'the_v' (Relu) reads 'gone', which nothing produces",
    ),
    "an output of nothing": (
        lambda model: model.graph.output.add(name="gone"),
        "nothing produces the output 'gone' in graph 'net'",
    ),
    "an output of nothing that a node reads": (
        lambda model: (
            model.graph.output.add(name="gone"),
            model.graph.node.add(op_type="Neg", input=["gone"], output=["z"]),
        ),
        "nothing produces the output 'gone'",
    ),
    "a name given twice": (rename_output, "Output 'a' is redeclared"),
    "two inputs of one name": (
        lambda model: model.graph.input.append(model.graph.input[0]),
        "two inputs of graph 'net' are called 'x'",
    ),
    "a cycle": (lambda model: node(model, "a").input.__setitem__(0, "y"), "cycle"),
    "no operator": (
        lambda model: node(model, "y").ClearField("op_type"),
        "node 'the_y' () has no operator type",
    ),
    "an attribute of another kind": (
        turn(helper.make_attribute("perm", "text")),
        "attribute 'perm' of node 'the_t' (Transpose) is of type STRING, not INTS",
    ),
    "an attribute of no kind": (
        turn(AttributeProto(name="perm", ints=[0, 1])),
        "attribute 'perm' of node 'the_t' (Transpose) is of type UNDEFINED, not INTS",
    ),
    "an attribute of a call, outside of a function": (
        turn(AttributeProto(name="perm", type=AttributeProto.INTS, ref_attr_name="axes")),
        "attribute 'perm' of node 'the_t' (Transpose) refers to attribute 'axes' of a function, but is in no function",
    ),
    "an attribute that is missing": (
        lambda model: node(model, "t").__setattr__("op_type", "Cast"),
        "node 'the_t' (Cast) has no attribute 'to'",
    ),
    "too many inputs": (
        lambda model: node(model, "t").input.append("w"),
        "node 'the_t' (Transpose) has 2 inputs, but the operator requires 1",
    ),
    "no outputs": (
        lambda model: node(model, "k").ClearField("output"),
        "has 0 outputs, but the operator requires 1",
    ),
    "a negative size": (dims(-4), "tensor 'w' has a negative size: [-4]"),
    "too few values": (dims(5), "tensor 'w' has 4 values, but its shape and type require 5"),
    "very many values of none": (
        lambda model: (
            dims(300_000_000)(model),
            model.graph.initializer[0].ClearField("float_data"),
        ),
        "tensor 'w' has 0 values, but its shape and type require 300,000,000",
    ),
    "values of another type": (
        typed(lambda tensor: tensor.int64_data.append(3)),
        "tensor 'w' is of type FLOAT, but has values in int64_data",
    ),
    "no element type": (
        typed(lambda tensor: tensor.ClearField("data_type")),
        "tensor 'w' has no element type",
    ),
    "an element type that there is not": (
        typed(lambda tensor: tensor.__setattr__("data_type", 99)),
        "tensor 'w': 99 is not a valid DataType",
    ),
    "an element type that a value does not have": (
        lambda model: model.graph.input[0].type.tensor_type.__setattr__("elem_type", 99),
        "value 'x': 99 is not a valid DataType",
    ),
    "a function that gives an input back": (
        lambda model: model.functions[0].output.__setitem__(0, "u"),
        "function 'Act' returns its input 'u'; insert an Identity node",
    ),
    "a function that gives an output twice": (
        lambda model: model.functions[0].output.append("v"),
        "function 'Act' returns a value twice",
    ),
    "a function that calls itself": (calls_itself, "function 'Act' calls itself"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_model_that_breaks_a_rule_is_refused_with_what_is_at_fault(fault, tmp_path):
    edit, message = BROKEN[fault]
    model = net()
    edit(model)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(htp_export.errors.FileError, match=re.escape(message)) as error:
        htp_export.load(tmp_path / "net.onnx")
    assert f"{tmp_path / 'net.onnx'}: not a valid ONNX model: " in str(error.value)
    with pytest.raises(htp_export.InputError, match=re.escape(message)):
        htp_export.load(model)


def test_a_model_that_breaks_none_is_taken():
    assert [each.op_type for each in htp_export.load(net()).nodes][:3] == [
        "Add",
        "Transpose",
        "Act",
    ]


def test_what_a_value_does_not_say_is_unknown():
    model = net()
    sized, typeless = model.graph.value_info.add(name="a"), model.graph.value_info.add(name="t")
    sized.CopyFrom(helper.make_tensor_value_info("a", TensorProto.FLOAT, [-1, 4]))
    typeless.CopyFrom(helper.make_tensor_value_info("t", TensorProto.UNDEFINED, [2]))
    first, second = (each.outputs[0] for each in list(htp_export.load(model).model.graph)[:2])
    assert first.shape is not None
    assert [size if isinstance(size, int) else size.value for size in first.shape] == [None, 4]
    assert second.dtype is None


@pytest.mark.parametrize("indices", [[[0, 1], [2, 0]], [1, 4]])
def test_sparse_initializers_are_read_as_what_they_stand_for(indices, tmp_path):
    values = onnx.numpy_helper.from_array(np.array([5.0, 6.0], np.float32), "w")
    places = onnx.numpy_helper.from_array(np.array(indices), "places")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 2])],
    )
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [3, 2]))
    model = helper.make_model(graph, ir_version=10)
    weight = htp_export.load(model).model.graph.initializers["w"].const_value
    assert weight is not None
    assert weight.numpy().tolist() == [[0, 5], [0, 0], [6, 0]]
    assert len(model.graph.sparse_initializer) == 1
    htp_export.load(model).save(tmp_path / "dense.onnx")
    model.graph.sparse_initializer[0].dims[:] = [10**9, 10**9]
    with pytest.raises(
        htp_export.InputError, match="the sparse initializer 'w' has the unsupported shape"
    ):
        htp_export.load(model)


@pytest.mark.parametrize(
    ("dtype", "field", "values"),
    [
        (TensorProto.FLOAT, "float_data", 3),
        (TensorProto.DOUBLE, "double_data", 3),
        (TensorProto.INT64, "int64_data", 3),
        (TensorProto.UINT32, "uint64_data", 3),
        (TensorProto.BFLOAT16, "int32_data", 3),
        (TensorProto.BOOL, "int32_data", 3),
        (TensorProto.INT4, "int32_data", 2),
        (TensorProto.COMPLEX64, "float_data", 6),
        (TensorProto.FLOAT, "raw_data", 12),
        (TensorProto.UINT4, "raw_data", 2),
        (TensorProto.STRING, "string_data", 3),
    ],
)
def test_the_values_of_a_tensor_are_counted_where_its_type_has_them(dtype, field, values):
    tensor = TensorProto(name="w", data_type=dtype, dims=[3])
    if field == "raw_data":
        tensor.raw_data = bytes(values)
    else:
        getattr(tensor, field).extend([b""] * values if field == "string_data" else [0] * values)
    model = helper.make_model(helper.make_graph([], "net", [], [], [tensor]), ir_version=10)
    htp_export.load(model)
    tensor.dims[0] = 30
    model = helper.make_model(helper.make_graph([], "net", [], [], [tensor]), ir_version=10)
    with pytest.raises(htp_export.InputError, match="tensor 'w' has"):
        htp_export.load(model)


def test_rules_are_those_of_the_opset_and_operators_of_others_have_none():
    # from opset 13 on, axes are an input
    squeeze = helper.make_node("Squeeze", ["x"], ["y"], axes=[0])
    mine = helper.make_node("Cast", ["x", "x", "x"], ["z"], domain="mine", to="text")
    graph = helper.make_graph(
        [squeeze, mine], "net", [helper.make_tensor_value_info("x", 1, [1])], []
    )
    for version in (11, 13, 999):
        model = helper.make_model(
            graph, ir_version=8, opset_imports=[helper.make_opsetid("", version)]
        )
        htp_export.load(model)


def test_names_that_are_not_utf8_are_refused_and_metadata_that_is_not_is_read(tmp_path):
    data = net().SerializeToString()
    (tmp_path / "name.onnx").write_bytes(data.replace(b"the_a", b"the\xff\xfe"))
    with pytest.raises(htp_export.InputError, match="has a name that is not UTF-8"):
        htp_export.load(tmp_path / "name.onnx")
    (tmp_path / "metadata.onnx").write_bytes(data.replace(b"block", b"bl\xffck"))
    tagged = htp_export.load(tmp_path / "metadata.onnx")
    assert "bl\ufffdck" in tagged
    tagged.save(tmp_path / "saved.onnx")


def texts(message: Any, place: str = "") -> Iterator[tuple[str, Any, str, int | None]]:
    """Every text of a message and of those in it, with its place."""
    for field, value in message.ListFields():
        for number, each in enumerate(value if field.is_repeated else [value]):
            where = f"{place}.{field.name}"
            if field.type == field.TYPE_STRING:
                yield where, message, field.name, number if field.is_repeated else None
            elif field.type == field.TYPE_MESSAGE:
                yield from texts(each, where)


def with_every_text() -> onnx.ModelProto:
    model = net()
    graph, function = model.graph, model.functions[0]
    del graph.node[0].metadata_props[:]
    branches = (node for attribute in graph.node[4].attribute for node in attribute.g.node)
    for each in (*graph.node, *branches, *function.node):
        each.metadata_props.add(key="htp.module", value="block")
    graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n", 4]))
    for each in (
        model,
        graph,
        *graph.node,
        *graph.input,
        *graph.value_info,
        *graph.initializer,
        function,
    ):
        each.doc_string = "documented"
        each.metadata_props.add(key="key", value="value")
    for each in (*graph.input, *graph.value_info):
        each.type.denotation = "TENSOR"
        each.type.tensor_type.shape.dim.add(dim_value=1, denotation="DATA_BATCH")
        del each.type.tensor_type.shape.dim[0]
    model.producer_name, model.producer_version, model.domain = "tool", "1", "org"
    graph.node[1].attribute[0].doc_string = function.node[0].doc_string = "documented"
    function.node[0].overload = function.overload = next(
        n for n in graph.node if n.domain == "pkg"
    ).overload = "one"
    return model


PLACES = sorted({place for place, *_ in texts(with_every_text())})


@pytest.mark.parametrize("place", every(3, PLACES))
def test_text_that_is_not_utf8_is_refused_by_load_or_harms_nothing(place, tmp_path):
    model = with_every_text()
    _, message, name, number = next(each for each in texts(model) if each[0] == place)
    if number is None:
        setattr(message, name, "ZZZZ")
    else:
        getattr(message, name)[number] = "ZZZZ"
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString().replace(b"ZZZZ", b"Z\xff\xfeZ"))
    try:
        tagged = htp_export.load(tmp_path / "net.onnx")
    except htp_export.InputError:
        assert (
            not re.search("doc_string|denotation|producer|model_domain", place)
            or "initializer" in place
        )
        return
    tagged.save(tmp_path / "saved.onnx")
    assert b"\xff\xfe" not in (tmp_path / "saved.onnx").read_bytes()
    if "metadata_props" in place:  # a node may have lost its module
        return
    assert main(["rename", str(tmp_path / "net.onnx"), "-o", str(tmp_path / "named.onnx")]) == 0
    assert main(["optimize", str(tmp_path / "net.onnx"), "-o", str(tmp_path / "small.onnx")]) == 0


def test_an_error_in_the_work_on_a_model_names_the_node_where_the_model_is_at_fault(
    tmp_path, monkeypatch
):
    from htp_export.costs import costing

    def fails(*_: object, **__: object) -> None:
        raise LookupError("no such axis")

    monkeypatch.setattr(costing, "read_flat", fails)
    model = net()
    turn(helper.make_attribute("perm", [0, 7]))(model)
    onnx.save(model, tmp_path / "net.onnx")
    message = (
        r"net\.onnx: not a valid ONNX model: Transpose 'the_t': .*\(LookupError: no such axis\)"
    )
    with pytest.raises(htp_export.InputError, match=message):
        htp_export.cost(tmp_path / "net.onnx")


@pytest.mark.parametrize(
    ("valid", "error"),
    [
        (True, LookupError("a fault of our own")),
        (False, OSError("no space left")),
        (False, MemoryError()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_does_not_stem_from_the_model_stays_what_it_is(monkeypatch, valid, error):
    """ONNX Runtime cannot load an operator that it does not have, and the model is valid all the same."""
    from htp_export.costs import costing

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(costing, "read_flat", fails)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20, "my.own" : 1]>
        net (float[2] x) => (float[2] y) { h = my.own.Mystery (x) y = Relu (h) }""")
    if not valid:
        model.graph.node[1].attribute.append(helper.make_attribute("alpha", 1.0))
        with pytest.raises(onnx.checker.ValidationError):
            onnx.checker.check_model(model)
    with pytest.raises(type(error)) as raised:
        htp_export.cost(model)
    assert raised.value is error


@pytest.mark.parametrize("key", ["htp.owners", "htp.calls", "htp.call", "namespace"])
def test_tags_nested_beyond_what_python_reads_are_passed_over(key):
    model = net()
    model.graph.node[0].metadata_props.add(key=key, value="[" * 100_000)
    assert htp_export.load(model).owners_of(htp_export.load(model).model.graph[0]) == ("block",)


@pytest.mark.parametrize("location", ["a\0b", "pipe"])
def test_data_files_that_cannot_be_files_are_refused(tmp_path, location):
    import os

    os.mkfifo(tmp_path / "pipe")
    model = net()
    weight = model.graph.initializer[0]
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(htp_export.errors.FileError, match="its external data"):
        htp_export.load(tmp_path / "net.onnx")


def bomb(*text: str) -> onnx.ModelProto:
    body = "\n".join(text)
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        net (int64 x) => (int64 y) <int64[1] size = {{300000000}}, int64 many = {{300000000}}, int64 zero = {{0}},
            int64 one = {{1}}, bool on = {{1}}>
        {{ {body}
           s = ReduceSum <keepdims = 0> (b)
           y = Add (s, x) }}""")


BOMBS = {
    "a size": bomb("b = Range (zero, many, one)"),
    "a size that is computed": bomb(
        "f = Cast <to = 1> (size) r = Mul (f, f) q = Sqrt (r) v = Cast <to = 7> (q) c = ConstantOfShape (v)",
        "b = Cast <to = 7> (c)",
    ),
    "an expansion": bomb("b = Expand (many, size)"),
    "repetition": bomb("b = Tile (size, size)"),
}


@pytest.mark.parametrize("level", ["exact", "fused"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_few_bytes_that_ask_for_very_many_values_are_left_to_their_nodes(name, level):
    largest = {"Range", "ConstantOfShape", "Expand", "Tile"}
    result = htp_export.optimize(BOMBS[name], level=level)
    assert largest & {each.op_type for each in result.model.graph}
    assert {each.domain for each in result.model.graph} == {""}


def loop(trips: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        net (int64 x) => (int64 y) <int64 trips = {{{trips}}}, int64 zero = {{0}}, int64 one = {{1}}, bool on = {{1}}>
        {{
            b = Loop (trips, on, zero) <
                body = g (int64 i, bool p, int64 h) => (bool q, int64 k) {{ q = Identity (p) k = Add (h, one) }}
            >
            y = Add (b, x)
        }}""")


def test_a_loop_that_does_not_end_is_not_computed_beforehand(monkeypatch):
    from htp_export.capabilities.optimize.passes import fold_constants

    monkeypatch.setattr(fold_constants, "_LONGEST", 0.2)
    assert "Loop" in {each.op_type for each in htp_export.optimize(loop(10**12)).model.graph}


def test_a_loop_that_ends_is_computed_beforehand():
    optimized = htp_export.optimize(loop(5)).model
    assert [each.op_type for each in optimized.graph] == ["Add"]
    assert {int(value.const_value.numpy()) for value in optimized.graph.initializers.values()} == {
        5
    }  # type: ignore[union-attr]


HOSTILE = "\x1b[31mred\x9b2J\u202elive"
SHOWN = r"\x1b[31mred\x9b2J\u202elive"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    relu = ir.node(HOSTILE, [ir.val("x", ir.DataType.FLOAT, [2])], domain="mine", name=HOSTILE)
    relu.metadata_props["htp.module"] = HOSTILE
    relu.outputs[0].name = HOSTILE
    graph = ir.Graph(
        relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20, "mine": 1}, name=HOSTILE
    )
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "words", ["tree", "tree --csv", "tree --sort nodes", "cost", "cost --csv --nodes", "forensics --list",
              "fingerprint", "diff F"],
)  # fmt: skip
def test_a_terminal_acts_on_no_name_of_a_file(hostile, words, terminal, capsys, monkeypatch):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "300")
    command, *rest = words.split()
    assert (
        main([command, str(hostile), *(str(hostile) if word == "F" else word for word in rest)])
        == 0
    )
    printed = "".join(capsys.readouterr())
    for raw in ("\x1b[31mred", "\x9b", "\u202e"):
        assert raw not in printed
    if command in ("tree", "cost", "diff"):
        assert SHOWN in printed


def test_errors_show_names_as_text(hostile, capsys):
    assert (
        main(
            [
                "extract",
                str(hostile),
                "gone\x1b]0;title\x07",
                "-o",
                str(hostile.with_name("out.onnx")),
            ]
        )
        == 2
    )
    assert "\x1b" not in capsys.readouterr().err
