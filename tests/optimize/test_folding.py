"""fold_constants: whatever depends on no input is computed, and what it may not compute stays."""

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from htp_export.capabilities.optimize.passes import fold_constants
from htp_export.capabilities.optimize.passes.fold_constants import LEAST_ROOM
from tests.graphs import Builder, array, ops, owners, passed, rewritten, same, tagged
from tests.written import written


def positions() -> ir.Model:
    """What a detector does: position embeddings are resized to the size of the image, and a row is put before them."""
    return tagged(
        """(float[n, 7, 4] x) => (float y) <float[4] scales = {1, 1, 1.5, 1}> {
        [positions] resized = Resize <mode = "cubic"> (table, roi, scales) [positions] sizes = Shape (resized)
        [positions] some = Slice (sizes, i0, i2) [positions] shape = Concat <axis = 0> (some, im1)
        [positions] rows = Reshape (resized, shape) [positions] turned = Transpose <perm = [0, 2, 1]> (rows)
        [positions] all = Concat <axis = 1> (row, turned) [embeddings] y = Add (x, all) }""",
        {"positions": ([], ["all"]), "embeddings": (["x"], ["y"])},
        table=array(1, 4, 2, 2),
        roi=np.zeros(0, np.float32),
        row=array(1, 1, 4),
    )


def test_position_embeddings_are_resized_now_and_their_module_is_constant():
    model = positions()
    changed, books = passed(model, "fold_constants")
    assert ops(changed) == ["Add"]
    assert owners(changed) == {"y": ("embeddings",)}
    assert books.hierarchy["positions"].fate == "constant"
    assert books.hierarchy["embeddings"].fate == "computed"
    assert same(model, changed, x=array(2, 7, 4))


def test_attribution_names_the_modules_whose_work_was_folded():
    result = htp_export.optimize(positions(), passes="fold_constants")
    changes = result.attribution["fold_constants"].items()
    assert {path: change.removed for path, change in changes if change.removed} == {"positions": 7}


def test_folding_a_weight_is_exact_for_verify_too():
    graph = "(float[2, 200] x) => (float y) { [fc] t = Transpose <perm = [1, 0]> (w) [fc] y = MatMul (x, t) }"
    result = htp_export.optimize(tagged(graph, w=array(200, 200)), verify=True)
    assert (result.nodes_after, result.rolled_back, result.max_abs) == (1, {}, 0.0)


def test_a_large_weight_that_nothing_else_reads_gives_way_to_the_result():
    graph = "(float[2, 200] x) => (float y) { [fc] n = Neg (w) [fc] y = MatMul (x, n) }"
    changed = rewritten(tagged(graph, w=array(200, 200)), "fold_constants", x=array(2, 200))
    assert ops(changed) == ["MatMul"]
    assert list(changed.graph.initializers) == ["n"]


def repeated(side: int, readers: int) -> ir.Model:
    """A row of numbers repeated to a matrix, for each of several readers another row."""
    net = Builder(x=[side, side])
    net.const("shape", np.array([side, side]))
    last = "x"
    for place in range(readers):
        net.const(f"row{place}", array(1, side, seed=place))
        net.add("Neg", f"row{place}", f"turned{place}", "mask")
        net.add("Expand", f"turned{place} shape", f"mask{place}", "mask")
        net.add("Mul", f"{last} mask{place}", last := f"h{place}", "layer")
    return net.model(last)


def test_what_would_make_the_file_grow_too_much_stays_and_what_leads_there_is_folded():
    side = int((LEAST_ROOM / 4) ** 0.5) + 10
    changed = rewritten(repeated(side, 1), "fold_constants", x=array(side, side))
    assert ops(changed) == ["Expand", "Mul"]


def test_all_that_is_stored_has_one_limit_and_running_again_does_not_move_it():
    side = int((LEAST_ROOM / 4 * 0.6) ** 0.5)
    changed = rewritten(
        repeated(side, 2), "fold_constants", "fold_constants", "fold_constants", x=array(side, side)
    )
    assert sorted(ops(changed)) == ["Expand", "Mul", "Mul"]


def test_a_model_with_large_weights_may_grow_more():
    side = int((LEAST_ROOM / 4) ** 0.5) + 10
    model = repeated(side, 1)
    weight = ir.Value(name="w", const_value=ir.tensor(np.zeros((20 * side, side), np.float32)))
    model.graph.register_initializer(weight)
    last = ir.node(
        "MatMul", [weight, model.graph.outputs[0]], metadata_props={"htp.module": "layer"}
    )
    model.graph.append(last)
    model.graph.outputs.append(last.outputs[0])
    assert ops(passed(model, "fold_constants")[0]) == ["Mul", "MatMul"]


@pytest.mark.parametrize(
    ("operator", "size"),
    [("Transpose <perm = [1, 0]> (w)", (8192, 3)), ("Reshape (w, shape)", (3, 2, 4096))],
)
def test_a_transposed_or_reshaped_weight_is_a_view(operator, size):
    graph = f"""(float[2, 3] x) => (float y) <int64[2] shape = {{3, -1}}> {{
        [fc] flat = {operator} [fc] y = MatMul (x, flat) }}"""
    model = tagged(graph, w=array(*size))
    changed = rewritten(model, "fold_constants", x=array(2, 3))
    assert ops(changed) == ["MatMul"]
    stored = changed.graph.node(0).inputs[1].const_value
    assert isinstance(stored, ir.LazyTensor)
    assert np.shares_memory(stored.numpy(), model.graph.initializers["w"].const_value.numpy())


def test_text_and_sequences_are_folded_too():
    graph = """(float[2] x) => (float y) <float[4] a = {4, 9, 16, 25}, int64[2] two = {2, 2}, int64 at = {1}> {
        [one] parts = SplitToSequence <axis = 0> (a, two) [one] part = SequenceAt (parts, at)
        [two] y = Add (x, part) }"""
    changed = rewritten(tagged(graph), "fold_constants", x=array(2))
    assert ops(changed) == ["Add"]


@pytest.mark.parametrize(
    ("graph", "left", "weights"),
    [
        (
            """(float[2, 600] x) => (float y) {
            [head] t = Transpose <perm = [1, 0]> (w) [embed] h = MatMul (x, w) [head] y = MatMul (h, t) }""",
            "Transpose MatMul MatMul",
            {"w": array(600, 600)},
        ),
        (
            """(float[2, 3] x) => (float y) <float scale = {0.1}, int8 zero = {1}> {
            [fc] f = DequantizeLinear (w, scale, zero) [fc] y = MatMul (x, f) }""",
            "DequantizeLinear MatMul",
            {"w": np.int8([[1, 2], [3, 4], [5, 6]])},
        ),
        (
            """(float[2] x) => (float y, float b) <float[2] a = {4, 9}> {
            [one] b = Sqrt (a) [one] c = Exp (b) [two] y = Add (x, c) }""",
            "Sqrt Add",
            {},
        ),
        *(
            (
                "(float[n, m] x) => (float y) { [one] b = Neg (a) [two] y = MatMul (x, b) }",
                "MatMul",
                {"a": np.zeros(shape, np.float32)},
            )
            for shape in ((0, 2), (3, 0))
        ),
    ],
    ids=["stored twice", "quantized weight", "result of the graph", "empty", "empty columns"],
)
def test_what_is_left_of_constant_nodes(graph, left, weights):
    assert ops(passed(tagged(graph, **weights), "fold_constants")[0]) == left.split()


def test_what_may_be_of_any_size_is_not_run_where_its_size_is_not_known(monkeypatch):
    """Inference that does not know an operator says no size; ONNX Runtime would make what the numbers ask for."""
    graph = """(float[2] x) => (float y) <int64 size = {7}, int64 at = {0}> {
        [one] window = HannWindow (size) [one] first = Gather (window, at) [two] y = Add (x, first) }"""
    assert ops(passed(tagged(graph), "fold_constants")[0]) == ["Add"]
    monkeypatch.setattr(fold_constants, "_size", lambda value, known: None)
    assert ops(passed(tagged(graph), "fold_constants")[0]) == ["HannWindow", "Gather", "Add"]


def test_a_node_that_cannot_be_run_stays_and_the_others_are_folded():
    net = Builder(x=[2])
    net.const("a", np.float32([4, 9]))
    net.add("Sqrt", "a", "b", "one")
    net.add("Strange", "b", "c", "one", domain="com.microsoft")
    net.add("Exp", "c", "d", "one")
    net.add("Exp", "b", "e", "two")
    net.add("Add", "d e", "f", "two")
    net.add("Add", "x f", "y", "two")
    changed, _ = passed(net.model("y"), "fold_constants")
    assert ops(changed) == ["Strange", "Exp", "Add", "Add"]
    assert {"b", "e"} <= set(changed.graph.initializers)


BRANCH = """g (float[2] x) => (float[2] y) {{
    yes = {condition}
    c = If (yes) <then_branch = t () => (float[2] u) {{ u = {inner}(w) }},
                  else_branch = e () => (float[2] v) {{ v = Neg(w) }}>
    y = Add(x, c) }}"""


def branching(condition: str = "Constant <value = bool {1}> ()", inner: str = "Sqrt") -> ir.Model:
    return written(BRANCH.format(condition=condition, inner=inner), w=np.float32([4, 9]))


def test_branches_that_depend_on_no_input_are_folded_with_what_they_read():
    model = branching()
    changed = htp_export.optimize(model, passes="fold_constants").model
    assert ops(changed) == ["Add"]
    assert set(changed.graph.initializers) == {"c"}
    assert same(model, changed, x=array(2))


def test_branches_with_random_numbers_are_not_folded():
    changed = htp_export.optimize(
        branching(inner="RandomNormalLike"), passes="fold_constants"
    ).model
    assert ops(changed) == ["If", "Add"]


def test_work_on_constants_inside_a_branch_is_folded():
    model = written(
        """g (float[2] x) => (float[2] y) {
            s = ReduceSum<keepdims = 0>(x)  yes = LessOrEqual(s, s)
            c = If (yes) <then_branch = t () => (float[2] u) { r = Sqrt(w)  u = Mul(r, x) },
                          else_branch = e () => (float[2] v) { v = Neg(x) }>
            y = Add(x, c) }""",
        w=np.float32([4, 9]),
    )
    changed = htp_export.optimize(model, passes="fold_constants").model
    (held,) = (node for node in changed.graph if node.op_type == "If")
    assert [node.op_type for node in held.attributes["then_branch"].as_graph()] == ["Mul"]
    assert same(model, changed, x=array(2))


def test_loops_that_depend_on_no_input_are_folded():
    model = written(
        """g (float[2] x) => (float[2] y) {
            c = Loop (three, , w) <body = b (int64 i, bool go, float[2] h) => (bool on, float[2] k)
                { on = Identity(go)  k = Add(h, w) }>
            y = Add(x, c) }""",
        three=np.int64(3),
        w=np.float32([4, 9]),
    )
    changed = htp_export.optimize(model, passes="fold_constants").model
    assert ops(changed) == ["Add"]
    assert same(model, changed, x=array(2))
