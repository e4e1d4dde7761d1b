"""fold_constants: whatever depends on no input is computed, and what it may not compute stays."""

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from htp_export.capabilities.optimize.constant_work import LEAST_ROOM
from tests.graphs import Builder, array, ops, owners, passed, rewritten, same
from tests.written import written


def positions() -> ir.Model:
    """What a detector does: position embeddings are resized to the size of the image, and a row is put before them."""
    net = Builder(x=["n", 7, 4])  # 2 · 3 positions and the row
    net.const("table", array(1, 4, 2, 2))
    net.const("roi", np.zeros(0, np.float32))
    net.const("scales", np.float32([1, 1, 1.5, 1]))
    net.const("row", array(1, 1, 4))
    net.const("zero", np.array([0]))
    net.const("two", np.array([2]))
    net.const("flat", np.array([1, 4, -1]))
    net.add("Resize", "table roi scales", "resized", "positions", mode="cubic")
    net.add("Shape", "resized", "sizes", "positions")
    net.add("Slice", "sizes zero two", "some", "positions")
    net.const("rest", np.array([-1]))
    net.add("Concat", "some rest", "shape", "positions", axis=0)
    net.add("Reshape", "resized shape", "rows", "positions")
    net.add("Transpose", "rows", "turned", "positions", perm=[0, 2, 1])
    net.add("Concat", "row turned", "all", "positions", axis=1)
    net.add("Add", "x all", "y", "embeddings")
    return net.model("y", {"positions": ([], ["all"]), "embeddings": (["x"], ["y"])})


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
    net = Builder(x=[2, 200])
    net.const("w", array(200, 200))
    net.add("Transpose", "w", "t", "fc", perm=[1, 0])
    net.add("MatMul", "x t", "y", "fc")
    result = htp_export.optimize(net.model("y"), verify=True)
    assert (result.nodes_after, result.rolled_back, result.max_abs) == (1, {}, 0.0)


def test_a_large_weight_that_nothing_else_reads_gives_way_to_the_result():
    net = Builder(x=[2, 200])
    net.const("w", array(200, 200))
    net.add("Neg", "w", "n", "fc")
    net.add("MatMul", "x n", "y", "fc")
    changed = rewritten(net.model("y"), "fold_constants", x=array(2, 200))
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
    changed = rewritten(repeated(side, 2), "fold_constants", "fold_constants", "fold_constants", x=array(side, side))
    assert sorted(ops(changed)) == ["Expand", "Mul", "Mul"]


def test_a_model_with_large_weights_may_grow_more():
    side = int((LEAST_ROOM / 4) ** 0.5) + 10
    model = repeated(side, 1)
    weight = ir.Value(name="w", const_value=ir.tensor(np.zeros((20 * side, side), np.float32)))
    model.graph.register_initializer(weight)
    last = ir.node("MatMul", [weight, model.graph.outputs[0]], metadata_props={"htp.module": "layer"})
    model.graph.append(last)
    model.graph.outputs.append(last.outputs[0])
    assert ops(passed(model, "fold_constants")[0]) == ["Mul", "MatMul"]


def test_a_transposed_weight_is_not_stored_twice():
    net = Builder(x=[2, 600])
    net.const("w", array(600, 600))
    net.add("Transpose", "w", "t", "head", perm=[1, 0])
    net.add("MatMul", "x w", "h", "embed")
    net.add("MatMul", "h t", "y", "head")
    assert ops(passed(net.model("y"), "fold_constants")[0]) == ["Transpose", "MatMul", "MatMul"]


def test_a_reshaped_weight_is_a_view():
    net = Builder(x=[2, 3])
    weight = array(3, 2, 4096)
    net.const("w", weight)
    net.const("shape", np.array([3, -1]))
    net.add("Reshape", "w shape", "flat", "fc")
    net.add("MatMul", "x flat", "y", "fc")
    model = net.model("y")
    changed = rewritten(model, "fold_constants", x=array(2, 3))
    assert ops(changed) == ["MatMul"]
    stored = changed.graph.node(0).inputs[1].const_value
    assert np.shares_memory(stored.numpy(), model.graph.initializers["w"].const_value.numpy())


def test_quantized_weights_stay_quantized():
    net = Builder(x=[2, 3])
    net.const("w", np.int8([[1, 2], [3, 4], [5, 6]]))
    net.const("scale", np.float32(0.1))
    net.const("zero", np.int8(1))
    net.add("DequantizeLinear", "w scale zero", "f", "fc")
    net.add("MatMul", "x f", "y", "fc")
    assert ops(passed(net.model("y"), "fold_constants")[0]) == ["DequantizeLinear", "MatMul"]


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


def test_text_and_sequences_are_folded_too():
    net = Builder(x=[2])
    net.const("a", np.float32([4, 9, 16, 25]))
    net.const("two", np.array([2, 2]))
    net.const("at", np.int64(1))
    net.add("SplitToSequence", "a two", "parts", "one", axis=0)
    net.add("SequenceAt", "parts at", "part", "one")
    net.add("Add", "x part", "y", "two")
    changed = rewritten(net.model("y"), "fold_constants", x=array(2))
    assert ops(changed) == ["Add"]


def test_a_result_of_the_graph_keeps_its_node_and_what_reads_it_is_folded():
    net = Builder(x=[2])
    net.const("a", np.float32([4, 9]))
    net.add("Sqrt", "a", "b", "one")
    net.add("Exp", "b", "c", "one")
    net.add("Add", "x c", "y", "two")
    changed = rewritten(net.model("y b"), "fold_constants", x=array(2))
    assert ops(changed) == ["Sqrt", "Add"]


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
    changed = htp_export.optimize(branching(inner="RandomNormalLike"), passes="fold_constants").model
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


@pytest.mark.parametrize("shape", [[0, 2], [3, 0]])
def test_empty_results_are_folded(shape):
    net = Builder(x=["n", "m"])
    net.const("a", np.zeros(shape, np.float32))
    net.add("Neg", "a", "b", "one")
    net.add("MatMul", "x b", "y", "two")
    assert ops(passed(net.model("y"), "fold_constants")[0]) == ["MatMul"]
