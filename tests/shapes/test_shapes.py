"""Shape inference: against what ONNX Runtime computes, on what it does not know, and on files that are hostile."""

import time

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from htp_export.model.tagged import load
from htp_export.shapes import inference, operators
from htp_export.shapes.sizes import Size, divide, not_negative, smaller_of, symbol
from htp_export.shapes.symbolic import Symbolic

NET = '<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1, "own": 1]>\n'

SIZES = {"n": 3, "m": 4}


def parsed(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(NET + text))


def inferred(text: str, **given) -> dict[str, list[int | str] | None]:
    """The shapes of what nodes of the main graph make, as numbers and texts."""
    model = parsed(text)
    known = Symbolic(model.graph, functions=model.functions, **given)
    found = {}
    for value in (value for node in model.graph for value in node.outputs if value.name):
        shape = known.shape(value)
        found[value.name] = (
            None if shape is None else [dim if isinstance(dim, int) else str(dim) for dim in shape]
        )
    return found


def computed(text: str, **given: np.ndarray) -> dict[str, list[int]]:
    """The same, as ONNX Runtime computes it."""
    proto = onnx.parser.parse_model(NET + text)
    names = [name for node in proto.graph.node for name in node.output if name]
    proto.graph.ClearField("output")
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, ["CPUExecutionProvider"]
    )
    return {
        name: list(array.shape)
        for name, array in zip(names, session.run(names, given), strict=True)
    }


MODELS = {
    "sizes that are computed": """net (float[n, m, 6] x) => (float[a, b] y) {
        s = Shape(x) one = Constant<value_ints=[1]>() zero = Constant<value_ints=[0]>()
        three = Constant<value_ints=[3]>()
        rows = Gather(s, zero) columns = Gather(s, one) both = Mul(rows, columns) rest = Constant<value_ints=[-1]>()
        target = Concat<axis=0>(both, three, rest) cut = Reshape(x, target) y = Flatten<axis=1>(cut)
        half = Div(columns, three) made = ConstantOfShape(half) last = Slice(x, zero, rest, one) }""",
    "slices up to a limit": """net (float[n, m] x, float[1, 512] w) => (float[a, b] y) {
        s = Shape(x) one = Constant<value_ints=[1]>() zero = Constant<value_ints=[0]>()
        m1 = Gather(s, one) cut = Slice(w, zero, m1, one) y = Add(x, cut) }""",
    "both branches": """net (float[n, m] x, bool c) => (float[a, b] y) {
        y, z = If(c) <
            then_branch = t () => (y1, z1) { y1 = Relu(x) z1 = Concat<axis=0>(x, x) },
            else_branch = e () => (y2, z2) { y2 = Neg(x) z2 = Concat<axis=1>(x, x) }> }""",
    "a state that keeps its shape": """net (float[n, m] x, int64 k) => (float[a, b] y) {
        go = Constant<value = bool {1}>()
        y, all = Loop(k, go, x) <body = step (int64 i, bool c, float[n, m] s) => (c2, s2, row) {
            c2 = Identity(c) s2 = Relu(s) row = ReduceSum<keepdims=0>(s) }> }""",
    "a state that grows": """net (float[n, m] x, int64 k) => (float[a, b] y) {
        go = Constant<value = bool {1}>()
        y = Loop(k, go, x) <body = step (int64 i, bool c, float[p, m] s) => (c2, s2) {
            c2 = Identity(c) s2 = Concat<axis=0>(s, s) }> }""",
    "a loop that may end before": """net (float[n, m] x) => (float[a, b] y) {
        go = Constant<value = bool {1}>() k = Constant<value = int64 {5}>()
        y, all = Loop(k, go, x) <body = step (int64 i, bool c, float[n, m] s) => (c2, s2, row) {
            two = Constant<value = int64 {2}>() c2 = Less(i, two) s2 = Relu(s) row = Neg(s) }> }""",
    "a scan": """net (float[n, m] x, float[m] start) => (float[a] y) {
        y, all = Scan(start, x) <num_scan_inputs = 1, body = step (float[m] s, float[m] r) => (s2, row) {
            s2 = Add(s, r) row = Concat<axis=0>(s, r) }> }""",
    "operators with no rule": """net (float[n, 4, 6, 6] x, float[4, 2, 3, 3] w) => (float[a, b, c, d] y) {
        y = ConvTranspose<strides=[2, 2]>(x, w) d = DepthToSpace<blocksize=2>(x)
        e = Einsum<equation="bcij,bcij->bc">(x, x)
        k = Constant<value_ints=[2]>() v, i = TopK(x, k) nz = NonZero(x) }""",
    "operators of ONNX Runtime": """net (float[n, m, 8] x, float[8, 6] w, float[8] b) => (float[a, c, d] y) {
        g = com.microsoft.BiasGelu(x, b) y = com.microsoft.FusedMatMul(g, w)
        z, mean, inv, sum = com.microsoft.SkipLayerNormalization(x, x, b, b) }""",
}


def given_for(text: str) -> dict[str, np.ndarray]:
    proto = onnx.parser.parse_model(NET + text)
    found = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value or SIZES[dim.dim_param] for dim in kind.shape.dim]
        found[value.name] = np.full(shape, 2, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_what_is_inferred_is_what_onnxruntime_computes(name):
    text = MODELS[name]
    truth = computed(text, **given_for(text))
    in_numbers = inferred(text, sizes=SIZES)
    in_names = inferred(text)
    assert in_numbers.keys() == truth.keys() == in_names.keys()
    namespace = {"Min": min, "Max": max, **SIZES}
    for output, shape in truth.items():
        for found in (in_numbers[output], in_names[output]):
            assert found is None or len(found) == len(shape), output
            dims = [
                dim if dim in ("a", "b") or "?" in str(dim) else eval(str(dim), namespace)
                for dim in found or ()
            ]
            assert all(
                dim == size for dim, size in zip(dims, shape, strict=False) if isinstance(dim, int)
            ), output


KNOWN = {
    "sizes that are computed": {
        "cut": ["m*n", 3, 2],
        "y": ["m*n", 6],
        "made": ["m//3"],
        "last": ["n", "Max(0, m + -1)", 6],
    },
    # a limit does not hide the size
    "slices up to a limit": {"cut": [1, "Min(512, m)"], "y": ["n", "m"]},
    "both branches": {"y": ["n", "m"], "z": ["?z#0", "?z#1"]},
    "a state that grows": {"y": ["a", "m"]},
    "a state that keeps its shape": {"y": ["n", "m"], "all": ["?all#0"]},
    "a loop that may end before": {"all": ["?all#0", "n", "m"]},
    "a scan": {"all": ["n", "2*m"]},
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_computed_of_open_sizes_is_known_in_their_terms_and_for_every_run(name):
    found = inferred(MODELS[name])
    assert {output: found[output] for output in KNOWN[name]} == KNOWN[name]


def test_every_call_of_a_function_has_its_own_sizes():
    text = """net (float[n, 6] x, float[k, 4] z) => (float[a, b] y, float[c, d] w) {
        y = own.f<ax=1>(x) w = own.f<ax=0>(z) }
    <domain: "own", opset_import: ["": 20]> f <ax> (v) => (r) { nz = NonZero(v) s = ReduceSum<keepdims: int = 1>(v)
        r = Softmax<axis: int = @ax>(v) }"""
    model = parsed(text)
    known = Symbolic(model.graph, functions=model.functions)
    assert [str(dim) for dim in known.shape(model.graph.outputs[0])] == ["n", "6"]
    assert [str(dim) for dim in known.shape(model.graph.outputs[1])] == ["k", "4"]
    text = """net (float[n] x, float[k] z) => (float[a] y) { p = own.f(x) q = own.f(z) y = Concat<axis=0>(p, q) }
    <domain: "own", opset_import: ["": 20]> f (v) => (r) {
        nz = NonZero(v) flat = Flatten<axis=0>(nz) r = Cast<to=1>(flat) }"""
    unknown = inferred(text)
    assert unknown["p"] is None or unknown["p"] != unknown["q"]


def test_sizes_in_another_file_are_read_if_it_is_there(tmp_path):
    proto = onnx.parser.parse_model(
        NET + "net (float[n, 6] x) => (float[a, b, c] y) { y = Reshape(x, s) }"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 2, 3]), "s"))
    onnx.save(
        proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0
    )
    for found in (["n", "2", "3"], None):
        tagged = load(tmp_path / "m.onnx")
        if found is None:
            (tmp_path / "m.data").unlink()
        shape = tagged.inferred.shape(tagged.model.graph.outputs[0])
        assert [str(dim) for dim in shape] == (found or ["a", "b", "c"])


@pytest.mark.parametrize(
    "text",
    [
        "net (float[n, 4] x) => (float[a] y) { y = Transpose<perm=[7, 0]>(x) }",
        "net (float[n, 4] x, float[5, 2] w) => (float[a] y) { y = Concat<axis=9>(x, w) }",
        "net (float[n] x) => (float[a] y) { y = Flatten<axis=-40>(x) z = Split<axis=3>(x) }",
        "net (float x, float[2] w) => (float[a] y) { y = MatMul(x, w) z = Gemm(x, w, w) }",
        "net (float[4] x) => (float[a] y) { k = Constant<value_ints=[0]>() y = Reshape(x, k) z = Div(k, k) }",
        "net (float[1, 4, 8] x, float[1, 1, 3] w) => (float[a] y) { y = Conv<strides=[0]>(x, w) z = MaxPool(x) }",
        "net (bool c) => (float[a] y) { y = If(c) k, j = Loop(c, c) s = Scan(c) }",
        "net (float[n] x) => (float[a] y) { y = Cast(x) z = Cast<to=99>(x) c = Constant() }",
        "net (float[n] x) => (float[a] y) { y = com.microsoft.Attention(x) z = com.microsoft.MultiHeadAttention(x) }",
    ],
)
def test_nodes_that_are_not_valid_are_unknown_and_no_error(text):
    model = parsed(text)
    for given in ({}, {"sizes": {"n": 3}}):
        known = Symbolic(model.graph, **given)
        for node in model.graph:
            known.described(node.outputs[0])


HUGE = 2**40


def repeated(text: str, first: str = "s = Shape(x)") -> str:
    """A chain of nodes: ``text`` with one number after another for the tensor before and the one that is made."""
    return first + "".join(
        text.replace("BEFORE", f"s{k or ''}").replace("AFTER", f"s{k + 1}") for k in range(60)
    )


@pytest.mark.parametrize(
    "text",
    [
        repeated(" AFTER = Mul(BEFORE, BEFORE)") + " y = ConstantOfShape(s60)",
        repeated(
            " AFTERq = Div(BEFORE, t) AFTER = Mul(AFTERq, AFTERq)",
            "s = Shape(x) t = Constant<value_ints=[3]>()",
        ),
        repeated(" AFTER = Mul(BEFORE, BEFORE)", "s = Constant<value_ints=[3]>()"),
        repeated(" AFTER = Concat<axis=0>(BEFORE, BEFORE)") + " y = ConstantOfShape(s60)",
        f"s = Constant<value_ints=[{HUGE}, {HUGE}]>() y = ConstantOfShape(s) z = Expand(x, s) r = Tile(x, s)",
        f"a = Constant<value_int=0>() b = Constant<value_int={HUGE}>() c = Constant<value_int=1>() y = Range(a, b, c)",
        f"s = Constant<value_ints=[{HUGE}]>() p = ConstantOfShape(s) q = Reshape(x, p) e = Expand(x, p)",
        *(
            f"s = Constant<value_int=3000000000>() y = {window}Window(s) z = Add(y, y)"
            for window in ("Hann", "Hamming", "Blackman")
        ),
        "s = Constant<value_int=3000000000>() l = Constant<value_float=1.0>() h = Constant<value_float=9.0>() "
        "y = MelWeightMatrix(s, s, s, l, h)",
        "s = Constant<value_float=1.0>() o = Constant<value_ints=[1, 1, 1]>() c = Reshape(s, o) "
        "y = MaxPool<kernel_shape=[3000000001], pads=[1500000000, 1500000000]>(c)",
        "s = Constant<value_int=3000000000>() l = Constant<value_float=1.0>() o = Constant<value_ints=[1, 1, 1]>() "
        "c = Reshape(l, o) p = CenterCropPad<axes=[2]>(c, s) y = ReduceSum(p)",
        f's = Constant<value_string="{"a" * 60}!">() y = RegexFullMatch<pattern="(a|aa)+">(s)',
        f"i = Constant<value_int={'1' * 19}>() s = Cast<to=8>(i) "
        'y = RegexFullMatch<pattern="((1|11)*)*((1|11)*)*2">(s)',
    ],
)
def test_what_a_few_bytes_ask_for_is_not_computed(text):
    model = parsed(f"net (float[n] x) => (float[a] y) {{ {text} }}")
    start = time.process_time()
    for given in ({}, {"sizes": {"n": 3}}):
        Symbolic(model.graph, **given)
    assert time.process_time() - start < 20  # not a measurement: without bounds it never ends


def test_a_version_that_no_operator_has_makes_its_nodes_unknown():
    relu = ir.node("Relu", [ir.val("x", ir.DataType.FLOAT, [2])], domain="other")
    graph = ir.Graph(
        relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20, "other": 2**40}
    )
    assert Symbolic(graph).shape(relu.outputs[0]) is None


def test_names_of_any_length_are_not_copied_from_node_to_node():
    model = parsed("net (float[n] x) => (float[a] y) { y = Relu(x) }")
    model.graph.inputs[0].shape = ir.Shape(["n" * 1_000_000, "m"])
    shape = Symbolic(model.graph).shape(model.graph.node(0).outputs[0])
    assert len(str(shape[0])) < 100
    assert (shape[0] == shape[1], str(shape[1])) == (False, "m")


def test_functions_that_call_each_other_twice_are_not_walked_without_end(monkeypatch):
    monkeypatch.setattr(inference, "_MOST_VISITS", 5_000)
    functions = "".join(
        f'\n<domain: "own", opset_import: ["": 20, "own": 1]> f{k} (v) => (r) '
        f"{{ a = own.f{k + 1}(v) r = own.f{k + 1}(a) }}"
        for k in range(40)
    )
    last = '\n<domain: "own", opset_import: ["": 20]> f40 (v) => (r) { r = Relu(v) }'
    model = parsed(
        "net (float[n] x) => (float[a] y) { y = own.f0(x) z = Neg(x) }" + functions + last
    )
    known = Symbolic(model.graph, functions=model.functions)
    assert [str(dim) for dim in known.shape(model.graph.node(1).outputs[0])] == ["n"]


def test_every_file_of_the_folder_of_rules_is_read(tmp_path, monkeypatch):
    """A family of operators is one new file, and no list names it."""
    (tmp_path / "fresh.py").write_text(
        "from htp_export.shapes.operators import shape_rule\n"
        "@shape_rule('Fresh', domain='tests.new')\ndef fresh(node, known): return None\n"
    )
    monkeypatch.setattr(operators, "__path__", [*operators.__path__, str(tmp_path)])
    operators._load.cache_clear()
    assert operators.rules_of("tests.new", "Fresh").shape is not None
    assert operators.rules_of("", "MatMul").shape is not None


def test_sizes_are_written_as_sympy_reads_them():
    n, m = symbol("n"), symbol("m")
    for size in (
        3 * divide(n, 2) * m + 4,
        smaller_of(512, n + m),
        not_negative(n - 7) * 2,
        divide(n * n + 1, m),
    ):
        assert isinstance(size, Size)
        for values in ({"n": 9, "m": 4}, {"n": 3, "m": 700}):
            expected = eval(str(size), {"Min": min, "Max": max, **values})
            assert ir.SymbolicDim(str(size)).evaluate(values) == expected


def test_a_file_that_says_a_wrong_shape_is_not_believed():
    model = parsed("net (float[n, 4] x) => (float[a, b] y) { y = Transpose(x) }")
    model.graph.outputs[0].shape = ir.Shape([7, 7])
    assert [str(dim) for dim in Symbolic(model.graph).shape(model.graph.outputs[0])] == ["4", "n"]


def test_a_map_over_sequences_has_the_type_that_its_body_makes():
    model = parsed(
        """net (float[n, 4] x, float[4] w, int64 i) => (y) {
            s = SplitToSequence <axis = 0> (x)
            t, u = SequenceMap (s, w) <body = b (float[r, 4] e, float[4] v) => (f, g) {
                f = Cast <to = 11> (e) g = Greater (e, v) }>
            y = SequenceAt (t, i) }"""
    )
    known = Symbolic(model.graph)
    made = {value.name: known.type(value) for node in model.graph for value in node.outputs}
    double, boolean = ir.TensorType(ir.DataType.DOUBLE), ir.TensorType(ir.DataType.BOOL)
    assert (made["t"], made["u"], made["y"]) == (
        ir.SequenceType(double),
        ir.SequenceType(boolean),
        double,
    )


def test_a_tensor_with_known_contents_has_their_shape():
    """``GatherElements`` has a rule for its contents, and none for its shape."""
    found = inferred(
        """net (float[n] x) => (int64[a, b] y) {
            table = Constant<value = int64[2, 3] {4, 5, 6, 7, 8, 9}>()
            place = Constant<value = int64[2, 1] {2, 0}>()
            found = GatherElements<axis=1>(table, place)
            y = Neg(found) }"""
    )
    assert found["found"] == [2, 1]
