"""Each pass on a net of its own: what is left, that values stay, whose the nodes are, and what it leaves alone."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from htp_export.capabilities.optimize.registry import DEFAULT, available
from htp_export.format import tags
from htp_export.model.regions import all_values
from tests.graphs import array, feeds, ops, owners, passed, reasons, same, tagged

Signatures = dict[str, tuple[list[str], list[str]]]


def test_every_default_pass_is_there_with_a_level_and_a_summary():
    found = available()
    for name in (*DEFAULT, "fuse_matmul_add_3d"):
        assert found[name].level in ("exact", "tolerant", "fused")
        assert found[name].summary.endswith(".")


# --- what passes change ---


@dataclass
class Case:
    """Passes, a graph, and the operators that they leave of it; ``said``: output of a node → its owners and reason.

    ``fates``: Module → its fate. ``partners``: Module → those with which it was fused.
    """

    passes: str
    graph: str
    left: str
    said: dict[str, str] = field(default_factory=dict)
    fates: dict[str, str] = field(default_factory=dict)
    partners: dict[str, str] = field(default_factory=dict)
    tolerance: float = 0.0
    opset: int = 17
    signatures: Signatures | None = None
    weights: dict[str, np.ndarray] = field(default_factory=dict)


_TRANSPOSED = (
    """[one] a = Transpose <perm = [1, 0, 2]> (x) [two] b = Transpose <perm = [0, 2, 1]> (a)"""
)

_SHAPE_CHAIN = """(float[batch, length, 6] x) => (float y) <int64 zero = {0}, int64 first = {1}> {
    [a] h = Relu (x) [b] s = Shape (h) [b] n = Gather (s, zero) [b] l = Gather (s, first) [b] n1 = Unsqueeze (n, i0)
    [b] l1 = Unsqueeze (l, i0) [b] wanted = Concat <axis = 0> (n1, l1, i2, i3) [b] y = Reshape (h, wanted) }"""

_WHERE = """(float[n, 3] x) => (float w, float y, float z) <bool[2] first = {1, 0}, int64[2] other = {5, 7}> {
    [a] sizes = Shape (x) [a] n = Gather (sizes, i0) [a] w = ConstantOfShape (n)
    [y] yw = Where (first, sizes, other) [y] y = ConstantOfShape (yw)
    [z] zw = Where (first, sizes, other) [z] z = ConstantOfShape (zw) }"""

_CONVOLUTION = """(float[1, 2, 6, 6] x) => (float y) <int64[8] pads = {0, 0, 1, 2, 0, 0, 1, 0}> {
    [pad] p = Pad (x, pads) [conv] c = Conv <kernel_shape = [3, 3]> (p, w)
    [norm] b = BatchNormalization <epsilon = 0.01> (c, gamma, beta, mean, variance) [act] y = Relu (b) }"""
_OF_CONVOLUTION = {
    name: np.abs(array(3, seed=k)) + 0.5
    for k, name in enumerate(("gamma", "beta", "mean", "variance"))
}
_OF_CONVOLUTION["w"] = array(3, 2, 3, 3)

_LINEAR = "[fc] h = MatMul (x, w) [fc] y = Add (b, h)"
_OF_LINEAR = {"w": array(4, 3), "b": array(3)}

_SCALED = """[norm] h = InstanceNormalization (x, ones, zeros) [norm] i = Mul (h, factor) [norm] y = Add (i, summand)"""
_CONSTANTS = "<float[3] ones = {1, 1, 1}, float[3] zeros = {0, 0, 0}>"
_NORMALIZED = f"(float[n, 3, 5] x) => (float y) {_CONSTANTS} {{ {_SCALED} }}"

_GUARDED = """[attention] product = MatMul (q, k) [attention] {scores}
    [attention] shares = Softmax <axis = -1> (scores) [attention] bad = IsNaN (shares)
    [attention] y = Where (bad, zero, shares)"""
_OF_ATTENTION = (
    "(float[n, 3, 4] q, float[n, 4, 3] k) => (float y) <float scale = {0.5}, float zero = {0}>"
)
_UNMASKED = f"{_OF_ATTENTION} {{ {_GUARDED.format(scores='scores = Mul (product, scale)')} }}"
_SUM = "scaled = Mul (product, scale) [attention] scores = Add (scaled, mask)"
_MASKED = f"{_OF_ATTENTION} {{ {_GUARDED.format(scores=_SUM)} }}"
_CAUSAL = np.float32([[0, -np.inf, -np.inf], [0, 0, -np.inf], [0, 0, 0]])
_A_ROW = np.float32([[0, -np.inf, -np.inf], [-np.inf, -np.inf, -np.inf], [0, 0, 0]])


def _halves(end: str = "i4") -> str:
    return f"""(float[n, 8] x) => (float y) {{ [gate] left = Slice (x, i0, {end}, im1, i1)
        [gate] right = Slice (x, i4, i8, i1, i1) [gate] minus = Neg (right)
        [gate] y = Concat <axis = 1> (minus, left) }}"""


_ROLLED = """(float[n, 8, 3] x) => (float y) { [roll] tail = Slice (x, i2, i4611686018427387904, i1, i1)
    [roll] head = Slice (x, i0, i2, i1, i1) [roll] y = Concat <axis = 1> (tail, head) }"""


def _split_twice(inner: str) -> str:
    return f"""(float[8, 8] x) => (float minus, float first, float left, float right) {{
        [rotary] left = Slice (x, i0, i4, i1, i1) [rotary] right = Slice (x, i4, i8, i1, i1)
        [rotary] first = Slice (left, i0, i2, {inner}, i1) [rotary] second = Slice (left, i2, i8, {inner}, i1)
        [rotary] minus = Neg (second) }}"""


def _indexed(start: int = 0, ends: str = "n m") -> str:
    """x[rows, columns] with ranges of the shapes ``rows`` and ``columns``, that are broadcast to a grid."""
    first, second = ends.split()
    return f"""(float[n, m] x) => (float y) <int64 start = {{{start}}}, int64 step = {{1}}> {{
        [net] n1 = Shape <start = 0, end = 1> (x) [net] n = Squeeze (n1)
        [net] m1 = Shape <start = 1, end = 2> (x) [net] m = Squeeze (m1)
        [net] r0 = Range (start, {first}, step) [net] r1 = Reshape (r0, rows)
        [net] c0 = Range (start, {second}, step) [net] c1 = Reshape (c0, columns)
        [net] grid = Max (r1, c1) [net] sizes = Shape (grid)
        [net] r2 = Expand (r1, sizes) [net] r3 = Unsqueeze (r2, im1)
        [net] c2 = Expand (c1, sizes) [net] c3 = Unsqueeze (c2, im1)
        [net] indices = Concat <axis = -1> (r3, c3) [net] y = GatherND (x, indices) }}"""


_IN_ORDER = {"rows": np.array([-1, 1]), "columns": np.array([1, -1])}
_APART = {"rows": np.array([-1, 1, 1, 1]), "columns": np.array([1, 1, 1, -1])}


def _masked(mask: str) -> str:
    return f"""(float[3] x) => (float y) <float zero = {{0}}> {{ [mask] less = Less (x, zero)
        [mask] mask = {mask} [net] y = Where (mask, x, zero) }}"""


def _means(opset: int, keep: int) -> str:
    read, attributes = ("x, i1", "h, im1"), ("", "")
    if opset < 18:
        read, attributes = ("x", "h"), (", axes = [1]", ", axes = [-1]")
    return f"""(float[n, 3, 4, 5] x) => (float y) {{
        [pool] h = ReduceMean <keepdims = {keep}{attributes[0]}> ({read[0]})
        [pool] y = ReduceMean <keepdims = {keep}{attributes[1]}> ({read[1]}) }}"""


CHANGED = {
    "dead nodes go": Case(
        "eliminate_dead_nodes",
        "(float[2, 3] x) => (float y) { [a] u = Neg (x) [b] y = Relu (x) }",
        "Relu",
    ),
    "an output of the graph keeps its name": Case(
        "eliminate_identity_ops",
        "(float[2] x) => (float y) { [a] h = Relu (x) [b] y = Identity (h) }",
        "Relu",
    ),
    "identity ops go and leave nothing to their neighbours": Case(
        "eliminate_identity_ops",
        """(float[n, 3] x) => (float y) <int64[2] shape = {0, 3}, float one = {1}, int64[4] pads = {0, 0, 0, 0}> {
        [drop] a = Identity (x) [drop] b = Cast <to = 1> (a) [drop] c = Reshape (b, shape) [drop] e = Pad (c, pads)
        [drop] f = Slice (e, i0, i8, i1) [drop] d = Mul (f, one) [act] y = Relu (d) }""",
        "Relu",
        {"y": "act (scope)"},
        {"drop": "identity"},
        signatures={"drop": (["x"], ["d"]), "act": (["d"], ["y"])},
    ),
    "modules in a row that return their input are identities": Case(
        "eliminate_identity_ops",
        """(float[n, 3] x) => (float y) <float one = {1}> {
        [a] h = Relu (x) [drop] i = Identity (h) [scale] j = Mul (i, one) [cast] k = Cast <to = 1> (j)
        [last] l = Slice (k, i0, i8, i1) [b] y = Relu (l) }""",
        "Relu Relu",
        {"h": "a (scope)", "y": "b (scope)"},
        dict.fromkeys(("drop", "scale", "cast", "last"), "identity"),
        signatures={
            "drop": (["h"], ["i"]),
            "scale": (["i"], ["j"]),
            "cast": (["j"], ["k"]),
            "last": (["k"], ["l"]),
            "a": (["x"], ["h"]),
            "b": (["l"], ["y"]),
        },
    ),
    "so are modules in a row at the end of a model": Case(
        "eliminate_identity_ops",
        "(float[n, 3] x) => (float y) { [a] h = Relu (x) [drop] i = Identity (h) [last] y = Identity (i) }",
        "Relu",
        {"y": "a (scope)"},
        {"drop": "identity", "last": "identity"},
        signatures={"drop": (["h"], ["i"]), "last": (["i"], ["y"]), "a": (["x"], ["h"])},
    ),
    "equal work belongs to all who did it": Case(
        "eliminate_common_subexpressions",
        """(float[2] x) => (float y) { [one] a = Neg (x) [one] b = Exp (a) [two] c = Neg (x) [two] d = Exp (c)
        [sum] y = Add (b, d) }""",
        "Neg Exp Add",
        {"a": "one two (shared)", "b": "one two (shared)", "y": "sum (scope)"},
    ),
    "transpositions in a row are one and those that cancel are none": Case(
        "eliminate_redundant_transposes",
        f"""(float[2, 3, 4] x) => (float y) {{ {_TRANSPOSED} [three] c = Transpose <perm = [1, 2, 0]> (b)
        [three] d = Transpose <perm = [2, 0, 1]> (c) [act] y = Relu (d) }}""",
        "Transpose Relu",
        {"d": "one two three (fused)"},
    ),
    "what depends on constants alone is computed now": Case(
        "fold_constants",
        "(float[2] x) => (float y) <float[2] a = {4, 9}> { [one] b = Sqrt (a) [one] c = Exp (b) [two] y = Mul (x, c) }",
        "Mul",
    ),
    "a reshape to sizes that stay in their place needs no computation": Case(
        "simplify_shape_chains", _SHAPE_CHAIN, "Relu Reshape", {"y": "b (scope)"}, opset=14
    ),
    "an equal shape after one that was put together reads the new one": Case(
        "simplify_shape_chains",
        _WHERE,
        "Shape Gather ConstantOfShape Concat ConstantOfShape ConstantOfShape",
    ),
    "reshapes in a row are one that belongs to all": Case(
        "merge_reshapes",
        """(float[2, 12] x) => (float y) <int64[3] s1 = {2, 3, 4}, int64[2] s2 = {6, 4}> {
        [one] a = Reshape (x, s1) [two] b = Reshape (a, s2) [act] y = Relu (b) }""",
        "Reshape Relu",
        {"b": "one two (fused)"},
    ),
    "a transposition of joined dimensions needs no reshapes": Case(
        "merge_layout_ops",
        """(float[2, 4, 5, 3] x) => (float y) <int64[3] s1 = {8, 5, 3}, int64[4] s2 = {2, 4, 3, 5}> {
        [one] a = Reshape (x, s1) [one] b = Transpose <perm = [0, 2, 1]> (a) [one] y = Reshape (b, s2) }""",
        "Transpose",
    ),
    "scaled queries and keys are scaled once": Case(
        "cleanup_attention",
        """(float[2, 3, 4] q, float[2, 4, 3] k) => (float y) <float s = {0.6}> {
        [attention] a = Mul (q, s) [attention] b = Mul (k, s) [attention] y = MatMul (a, b) }""",
        "Mul MatMul",
        {"y": "attention (scope)"},
        tolerance=1e-5,
    ),
    "constant factors in a row are one": Case(
        "simplify_arithmetic",
        """(float[3] x) => (float y) <float a = {3}, float b = {7}> { [one] h = Mul (x, a) [two] y = Div (h, b) }""",
        "Mul",
        {"y": "one two (fused)"},
        tolerance=1e-6,
    ),
    **{
        f"a convolution is all the work of padding and normalisation, {first} first": Case(
            passes,
            _CONVOLUTION,
            "Conv Relu",
            {"b": "pad conv norm (fused)", "y": "act (scope)"},
            {"pad": "fused", "conv": "fused", "norm": "fused", "act": "computed"},
            {"pad": "conv norm", "conv": "norm pad", "norm": "conv pad"},
            tolerance=1e-5,
            signatures={
                "pad": (["x"], ["p"]),
                "conv": (["p"], ["c"]),
                "norm": (["c"], ["b"]),
                "act": (["b"], ["y"]),
            },
            weights=_OF_CONVOLUTION,
        )
        for first, passes in (
            ("padding", "fuse_pad_into_conv fuse_conv_batchnorm"),
            ("normalisation", "fuse_conv_batchnorm fuse_pad_into_conv"),
        )
    },
    "a convolution takes in Relu for ONNX Runtime": Case(
        "fuse_conv_batchnorm fuse_conv_relu",
        _CONVOLUTION,
        "Pad FusedConv",
        {"y": "conv norm act (fused)"},
        tolerance=1e-5,
        weights=_OF_CONVOLUTION,
    ),
    "a product and a bias are one Gemm": Case(
        "fuse_matmul_add",
        f"(float[n, 4] x) => (float y) {{ {_LINEAR} }}",
        "Gemm",
        tolerance=1e-5,
        weights=_OF_LINEAR,
    ),
    "a batch of products is one Gemm between reshapes": Case(
        "fuse_matmul_add_3d",
        f"(float[n, 5, 4] x) => (float y) {{ {_LINEAR} }}",
        "Reshape Gemm Reshape",
        {"y": "fc (scope)"},
        tolerance=1e-5,
        weights=_OF_LINEAR,
    ),
    "parallel projections share a product and stay exact": Case(
        "merge_parallel_projections",
        """(float[2, 4] x) => (float q, float k, float v) { [q] qm = MatMul (x, wq) [q] q = Add (qm, bq)
        [k] km = MatMul (x, wk) [k] k = Add (km, bk) [v] vm = MatMul (x, wv) [v] v = Add (vm, bv) }""",
        "MatMul Add Slice Slice Slice",
        {"q": "q (scope)", "k": "k (scope)", "v": "v (scope)"},
        {"q": "computed", "k": "computed", "v": "computed"},
        tolerance=1e-6,
        signatures={name: (["x"], [name]) for name in "qkv"},
        weights={
            f"{kind}{n}": array(*rows, w)
            for n, w in zip("qkv", (3, 2, 5), strict=True)
            for kind, rows in (("w", [4]), ("b", []))
        },
    ),
    "slices in a row that cut other dimensions are one": Case(
        "merge_slices",
        """(float[n, 8, 6] x) => (float y) { [merge] rows = Slice (x, i0, i2147483648, i1, i2)
        [merge] left = Slice (rows, i0, i2147483648, i2, i2) [merge] right = Slice (rows, i1, i2147483648, im1, i2)
        [merge] y = Concat <axis = -1> (left, right) }""",
        "Slice Slice Concat",
    ),
    "parts that are put together anew are one Gather": Case(
        "merge_slices",
        _ROLLED,
        "Gather",
        {"y": "roll (scope)"},
        {"roll": "computed"},
        signatures={"roll": (["x"], ["y"])},
    ),
    "a tensor turned round is a Gather too": Case(
        "merge_slices",
        """(float[5, 3] x) => (float y) { [flip] back = Slice (x, i4, im4611686018427387904, i0, im1)
        [flip] first = Slice (x, im5, i2, i0, i1) [flip] y = Concat <axis = 0> (back, first) }""",
        "Gather",
    ),
    **{
        f"slices that are all of a tensor are one Split in opset {opset}": Case(
            "merge_slices", _halves(), "Split Neg Concat", {"left": "gate (scope)"}, opset=opset
        )
        for opset in (12, 13, 18)
    },
    **{
        f"slices of a slice that cover it in dimension {inner} are a Split of a Split": Case(
            "merge_slices merge_slices", _split_twice(f"i{inner}"), "Split Split Neg"
        )
        for inner in (1, 0)
    },
    **{
        f"a gather of everything in order is {left}": Case(
            "eliminate_whole_gathers", _indexed(), left, {"y": "net (scope)"}, weights=shapes
        )
        for left, shapes in (("Identity", _IN_ORDER), ("Unsqueeze", _APART))
    },
    **{
        f"a constant that changes nothing goes: {mask}": Case(
            "eliminate_identity_ops",
            _masked(mask),
            "Less Where",
            weights={"given": np.array(given)},
        )
        for mask, given in (("And (given, less)", [True]), ("Or (less, given)", [False]))
    },
    "what is broadcast anyway is not expanded before": Case(
        "eliminate_expands",
        """(float[n, 2, 8] x, float[n, 2, 1] s) => (float y) <int64[3] shape = {1, 2, 8}> {
        [norm] wide = Expand (s, shape) [norm] y = Div (x, wide) }""",
        "Div",
    ),
    "constants that are added one after another are one": Case(
        "merge_constant_sums",
        """(float[n, 4] x) => (float y) <float[4] mask = {0, -100, 0, -100}> {
        [a] h = Add (x, mask) [b] y = Add (bias, h) }""",
        "Add",
        {"y": "a b (fused)"},
        tolerance=1e-5,
        weights={"bias": array(4)},
    ),
    "infinite masks are added up": Case(
        "merge_constant_sums",
        "(float[2] x) => (float y) { [a] h = Add (x, one) [a] y = Add (h, other) }",
        "Add",
        weights={"one": np.float32([-np.inf, 0]), "other": np.float32([-np.inf, -np.inf])},
    ),
    "zeros are not added but where they make the result larger": Case(
        "merge_constant_sums",
        "(float[n, 2] x) => (float y) { [a] h = Add (x, zero) [a] y = Add (h, taller) }",
        "Add",
        weights={"zero": np.zeros((1, 2), np.float32), "taller": np.zeros((3, 1, 2), np.float32)},
    ),
    **{
        f"a product {order} with a reciprocal is a quotient": Case(
            "simplify_arithmetic",
            f"""(float[n, 4] x, float[n, 1] s) => (float y) {{ [norm] r = Reciprocal (s) [norm] y = Mul ({order}) }}""",
            "Div",
            tolerance=1e-4,
        )
        for order in ("x, r", "r, x")
    },
    **{
        f"a mean of means is one mean in opset {opset} with keepdims {keep}": Case(
            "merge_reductions", _means(opset, keep), "ReduceMean", tolerance=1e-5, opset=opset
        )
        for opset in (17, 18)
        for keep in (0, 1)
    },
    "a normalisation takes in one factor and one summand a channel": Case(
        "fuse_normalization_scale",
        _NORMALIZED,
        "InstanceNormalization",
        {},
        {"norm": "computed"},
        tolerance=1e-5,
        signatures={"norm": (["x"], ["y"])},
        weights={"factor": array(3, 1), "summand": array(3, 1, seed=1)},
    ),
    "a softmax without a mask needs no guard": Case(
        "eliminate_nan_guards", _UNMASKED, "MatMul Mul Softmax"
    ),
    **{
        f"a softmax with a {what} mask needs no guard": Case(
            "eliminate_nan_guards", _MASKED, "MatMul Mul Add Softmax", weights={"mask": mask}
        )
        for what, mask in (("causal", _CAUSAL), ("finite", np.float32([[0], [1], [2]])))
    },
}


@pytest.mark.parametrize("case", CHANGED)
def test_pass(case):
    found = CHANGED[case]
    model = tagged(found.graph, found.signatures, found.opset, **found.weights)
    changed, books = passed(model, *found.passes.split())
    assert ops(changed) == found.left.split()
    said, why = owners(changed), reasons(changed)
    assert {name: f"{' '.join(said[name])} ({why[name]})" for name in found.said} == found.said
    assert {path: books.hierarchy[path].fate for path in found.fates} == found.fates
    assert {
        path: " ".join(sorted(books.hierarchy[path].fused_with)) for path in found.partners
    } == found.partners
    assert [value.name for value in changed.graph.outputs] == [
        value.name for value in model.graph.outputs
    ]
    assert same(model, changed, found.tolerance, **feeds(model, m=5))


# --- names that passes derive ---


def _names(model: ir.Model) -> list[str]:
    return [str(value.name) for value in all_values(model.graph) if value.name]


def _node_names(model: ir.Model) -> list[str]:
    return [str(node.name) for node in model.graph.all_nodes()]


def _taken(model: ir.Model, tensors: Iterable[str], nodes: Iterable[str]) -> ir.Model:
    """A copy in which results of the model, and nodes, have these names already, for the first pass and later ones."""
    copy = model.clone()
    pairs = itertools.zip_longest(sorted(tensors), sorted(nodes))
    for number, (tensor, node) in enumerate(pairs):
        result = ir.val(tensor or f"unlike any {number}", ir.DataType.FLOAT, [1])
        metadata = {tags.MODULE: "", tags.REASON: "scope"}
        noise = ir.node(
            "RandomNormal",
            [],
            {"shape": [1], "seed": float(number)},
            outputs=[result],
            metadata_props=metadata,
        )
        noise.name = node or f"unlike any {number}"
        copy.graph.append(noise)
        copy.graph.outputs.append(result)
    return copy


@pytest.mark.parametrize("case", CHANGED)
def test_names_that_a_pass_derives_may_be_taken(case):
    found = CHANGED[case]
    model = tagged(found.graph, found.signatures, found.opset, **found.weights)
    changed, _ = passed(model, *found.passes.split())
    tensors, nodes = (
        set(_names(changed)) - {*_names(model)},
        set(_node_names(changed)) - {*_node_names(model)},
    )
    numbered = {f"{name}_{number}" for name in tensors for number in (1, 2)}
    full = _taken(model, tensors | numbered, nodes)
    again, _ = passed(full, *found.passes.split())
    assert len(set(_names(again))) == len(_names(again))
    assert len(set(_node_names(again))) == len(_node_names(again))
    assert {*_names(full)} - {*_names(model)} <= {*_names(again)}
    assert same(full, again, found.tolerance, **feeds(model, m=5))


@pytest.mark.parametrize("level", ["tolerant", "fused"])
def test_names_of_folded_weights_may_be_those_of_results_and_of_tensors_of_branches(
    level, tmp_path
):
    text = """(float[1, 2, 6, 6] x, bool given) => (float y, float w_normalized) {
        [conv] c = Conv (x, w) [norm] b = BatchNormalization (c, gamma, beta, mean, variance) [act] y = Relu (b)
        [other] w_normalized = If (given) <then_branch = t () => (float w_bias) { w_bias = Neg (y) },
            else_branch = e () => (float w_bias) { w_bias = Abs (y) }> }"""
    model = tagged(text, **_OF_CONVOLUTION)
    for node in model.graph.all_nodes():
        node.metadata_props.update(
            {tags.MODULE: "other", tags.REASON: "scope", **node.metadata_props}
        )
    htp_export.optimize(model, file := tmp_path / "made.onnx", level=level)
    changed = ir.load(file)
    assert "BatchNormalization" not in ops(changed)
    assert same(model, changed, 1e-4, x=array(1, 2, 6, 6), given=np.array(True))


# --- what passes leave alone ---

_EXPANDED = "[norm] wide = Expand (s, shape) [norm] y = Div (x, wide)"
_RECIPROCAL = "[one] r = Reciprocal (s) [two] y = Mul (x, r)"
_GIVEN_MASK = (
    "(float[n, 3, 4] q, float[n, 4, 3] k, float[3, 3] mask) => (float y) <float zero = {0}>"
)

STAYS: dict[str, tuple[str, str] | tuple[str, str, Signatures | None, dict[str, np.ndarray]]] = {
    "an input that is given back": (
        "eliminate_identity_ops",
        "(float[2] x) => (float y) { [a] y = Identity (x) }",
    ),
    "adding zero, which is not exact": (
        "eliminate_identity_ops",
        "(float[2] x) => (float y) <float zero = {0}> { [a] y = Add (x, zero) }",
    ),
    "a transposition whose result is what a module gives": (
        "eliminate_redundant_transposes",
        f"(float[2, 3, 4] x) => (float b) {{ {_TRANSPOSED} }}",
        {"one": (["x"], ["a"]), "two": (["a"], ["b"])},
        {},
    ),
    "random numbers": (
        "fold_constants",
        "(float[2] x) => (float y) { [one] r = RandomNormal <shape = [2]> () [two] y = Add (x, r) }",
    ),
    "padding with other numbers than zero": (
        "fuse_pad_into_conv",
        """(float[1, 2, 6, 6] x) => (float y) <int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}, float fill = {2}> {
        [pad] p = Pad (x, pads, fill) [conv] y = Conv <kernel_shape = [3, 3]> (p, w) }""",
        None,
        {"w": array(3, 2, 3, 3)},
    ),
    "a batch that Gemm does not take": (
        "fuse_matmul_add",
        f"(float[n, 5, 4] x) => (float y) {{ {_LINEAR} }}",
        None,
        _OF_LINEAR,
    ),
    "a bias that is wider than Gemm takes": (
        "fuse_matmul_add",
        f"(float[n, 4] x) => (float y) {{ {_LINEAR} }}",
        None,
        {**_OF_LINEAR, "b": array(1, 2, 3)},
    ),
    "a slice that turns a dimension round": (
        "eliminate_identity_ops",
        "(float[n, 3] x) => (float y) { [flip] h = Slice (x, i2, im5, i1, im1) [act] y = Relu (h) }",
    ),
    "slices in a row of one dimension or with another reader": (
        "merge_slices",
        """(float[8, 6] x) => (float b, float d, float e) { [one] a = Slice (x, i1, i7, i0, i1)
        [one] b = Slice (a, i1, i3, i0, i1) [one] c = Slice (x, i1, i7, i1, i1) [one] d = Slice (c, i2, i4, i0, i1)
        [one] e = Neg (c) }""",
    ),
    "a slice that a module gives": (
        "merge_slices",
        "(float[8, 6] x) => (float y) { [one] a = Slice (x, i1, i7, i0, i1) [two] y = Slice (a, i1, i3, i1, i1) }",
        {"one": (["x"], ["a"]), "two": (["a"], ["y"])},
        {},
    ),
    "parts of a dimension of open size": (
        "merge_slices",
        """(float[n, 3] x) => (float y) { [roll] tail = Slice (x, i1, i4611686018427387904, i0, i1)
        [roll] head = Slice (x, i0, i1, i0, i1) [roll] y = Concat <axis = 0> (tail, head) }""",
    ),
    "slices with a gap": ("merge_slices", _halves("i3")),
    "slices that are given by modules of their own": (
        "merge_slices",
        _halves(),
        {"gate": (["x"], ["y"]), "left": (["x"], ["left"])},
        {},
    ),
    "an expansion that makes the result larger": (
        "eliminate_expands",
        f"(float[1, 8] x, float[1, 8] s) => (float y) <int64[2] shape = {{4, 8}}> {{ {_EXPANDED} }}",
    ),
    "an expansion that is read otherwise": (
        "eliminate_expands",
        f"""(float[4, 8] x, float[1, 8] s) => (float y, float z) <int64[2] shape = {{4, 8}}> {{ {_EXPANDED}
        [norm] z = Transpose (wide) }}""",
    ),
    "an expansion that a module gives": (
        "eliminate_expands",
        f"(float[4, 8] x, float[1, 8] s) => (float y) <int64[2] shape = {{4, 8}}> {{ {_EXPANDED} }}",
        {"repeat": (["s"], ["wide"]), "norm": (["x", "wide"], ["y"])},
        {},
    ),
    "constants that would cancel": (
        "merge_constant_sums",
        """(float[2] x) => (float y) <float[2] one = {1000000, 0}, float[2] other = {-1000000, 0}> {
        [a] h = Add (x, one) [a] y = Add (h, other) }""",
    ),
    "a sum that a module gives": (
        "merge_constant_sums",
        "(float[2] x) => (float y) <float[2] one = {1, 2}> { [a] h = Add (x, one) [b] y = Add (h, one) }",
        {"a": (["x"], ["h"]), "b": (["h"], ["y"])},
        {},
    ),
    "a reciprocal that is read twice": (
        "simplify_arithmetic",
        """(float[4] x, float[4] s) => (float y) {
        [norm] r = Reciprocal (s) [norm] a = Mul (x, r) [norm] y = Mul (a, r) }""",
    ),
    "a reciprocal that a module gives": (
        "simplify_arithmetic",
        f"(float[4] x, float[4] s) => (float y) {{ {_RECIPROCAL} }}",
        {"one": (["s"], ["r"]), "two": (["x", "r"], ["y"])},
        {},
    ),
    **{
        f"a gather {what}": ("eliminate_whole_gathers", graph, None, shapes)
        for what, graph, shapes in (
            (
                "that transposes",
                _indexed(),
                {"rows": _IN_ORDER["columns"], "columns": _IN_ORDER["rows"]},
            ),
            ("without the first of each", _indexed(start=1), _IN_ORDER),
            ("of a square", _indexed(ends="n n"), _IN_ORDER),
            (
                "of a diagonal",
                _indexed(ends="n n"),
                dict.fromkeys(("rows", "columns"), np.array([-1])),
            ),
        )
    },
    "a constant that decides": (
        "eliminate_identity_ops",
        _masked("And (less, given)"),
        None,
        {"given": np.array([0]) > 0},
    ),
    "a constant that makes the result larger": (
        "eliminate_identity_ops",
        _masked("And (given, less)"),
        None,
        {"given": np.array([[True]] * 2)},
    ),
    "other reductions in a row": (
        "merge_reductions",
        """(float[2, 3, 4] x) => (float y) {
        [pool] h = ReduceMax <axes = [1]> (x) [pool] y = ReduceMin <axes = [2]> (h) }""",
    ),
    **{
        f"factors of shape {shape}": (
            "fuse_normalization_scale",
            _NORMALIZED,
            None,
            {"factor": array(*shape), "summand": array(*shape, seed=1)},
        )
        for shape in ((5,), (3, 5), (1, 3, 5))
    },
    "the guard of a row that is masked": ("eliminate_nan_guards", _MASKED, None, {"mask": _A_ROW}),
    "the guard of a masked column": (
        "eliminate_nan_guards",
        _MASKED,
        None,
        {"mask": np.float32([[0], [-np.inf], [0]])},
    ),
    "the guard where the model is given a mask": (
        "eliminate_nan_guards",
        f"{_GIVEN_MASK} {{ {_GUARDED.format(scores='scores = Add (product, mask)')} }}",
    ),
}


@pytest.mark.parametrize("case", STAYS)
def test_pass_leaves(case):
    name, graph, *rest = STAYS[case]
    signatures, weights = rest or (None, {})
    model = tagged(graph, signatures, **weights)
    assert ops(passed(model, name)[0]) == ops(model)
