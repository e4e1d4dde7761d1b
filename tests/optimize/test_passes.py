"""Each pass on a net of its own: what is left, that values stay, and whose the nodes are."""

import numpy as np
import onnx_ir as ir
import pytest

from htp_export.capabilities.optimize.registry import DEFAULT, available, find
from htp_export.errors import InputError
from tests.graphs import Builder, array, ops, owners, passed, reasons, rewritten, same


def test_every_default_pass_is_there_with_a_level_and_a_summary():
    found = available()
    for name in (*DEFAULT, "fuse_matmul_add_3d"):
        assert found[name].level in ("exact", "tolerant", "fused")
        assert found[name].summary.endswith(".")


def test_an_unknown_pass_is_an_error_that_lists_the_known():
    with pytest.raises(InputError, match="no pass 'nothing'; there are: "):
        find("nothing")


def test_dead_nodes_go():
    net = Builder(x=[2, 3])
    net.add("Neg", "x", "unused", "a")
    net.add("Relu", "x", "y", "b")
    changed = rewritten(net.model("y"), "eliminate_dead_nodes", x=array(2, 3))
    assert ops(changed) == ["Relu"]


def test_identity_ops_go_and_leave_nothing_to_their_neighbours():
    net = Builder(x=["n", 3])
    net.const("shape", np.array([0, 3]))
    net.const("one", np.float32(1))
    net.add("Identity", "x", "a", "drop")
    net.add("Cast", "a", "b", "drop", to=ir.DataType.FLOAT)
    net.add("Reshape", "b shape", "c", "drop")
    net.add("Mul", "c one", "d", "drop")
    net.add("Relu", "d", "y", "act")
    model = net.model("y", {"drop": (["x"], ["d"]), "act": (["d"], ["y"])})
    changed, books = passed(model, "eliminate_identity_ops")
    assert ops(changed) == ["Relu"]
    assert owners(changed) == {"y": ("act",)}
    assert books.hierarchy["drop"].fate == "identity"
    assert books.signatures["act"][0].inputs == {"arg0": "x"}
    assert same(model, changed, x=array(2, 3))


def test_an_output_of_the_graph_keeps_its_name():
    net = Builder(x=[2])
    net.add("Relu", "x", "h", "a")
    net.add("Identity", "h", "y", "b")
    changed, _ = passed(net.model("y"), "eliminate_identity_ops")
    assert ops(changed) == ["Relu"]
    assert [value.name for value in changed.graph.outputs] == ["y"]


@pytest.mark.parametrize(
    ("op", "inputs", "number", "left"),
    [
        ("And", "given less", [True], []),
        ("Or", "less given", [False], []),
        ("And", "less given", [False], ["And"]),
        ("And", "given less", [[True]] * 2, ["And"]),  # of two rows, so that the result has two
    ],
)
def test_a_constant_that_changes_nothing_goes_at_either_place(
    op: str, inputs: str, number: list[bool], left: list[str]
):
    net = Builder(18, x=[3])
    net.const("zero", np.float32(0))
    net.const("given", np.array(number))
    net.add("Less", "x zero", "less", "mask")
    net.add(op, inputs, "mask", "mask")
    net.add("Where", "mask x zero", "y", "net")
    assert ops(rewritten(net.model("y"), "eliminate_identity_ops", x=array(3))) == ["Less", *left, "Where"]


def test_an_input_that_is_given_back_keeps_its_identity():
    net = Builder(x=[2])
    net.add("Identity", "x", "y", "a")
    changed, _ = passed(net.model("y"), "eliminate_identity_ops")
    assert ops(changed) == ["Identity"]


def test_adding_zero_is_not_exact_and_stays():
    net = Builder(x=[2])
    net.const("zero", np.float32(0))
    net.add("Add", "x zero", "y", "a")
    assert ops(passed(net.model("y"), "eliminate_identity_ops")[0]) == ["Add"]


def test_unused_initializers_go():
    net = Builder(x=[2])
    net.const("w", array(2))
    net.add("Relu", "x", "y", "a")
    assert list(passed(net.model("y"), "eliminate_unused_initializers")[0].graph.initializers) == []


def test_duplicate_constants_are_kept_once():
    net = Builder(x=[2])
    net.const("one", np.float32([1, 2]))
    net.const("other", np.float32([1, 2]))
    net.add("Constant", "", "third", "a", value=ir.tensor(np.float32([1, 2])))
    net.add("Add", "x one", "h", "a")
    net.add("Add", "h other", "i", "a")
    net.add("Add", "i third", "y", "a")
    changed = rewritten(net.model("y"), "eliminate_duplicate_constants", x=array(2))
    assert ops(changed) == ["Add"] * 3
    assert len({node.inputs[1] for node in changed.graph}) == 1


def test_equal_work_belongs_to_all_who_did_it():
    net = Builder(x=[2])
    net.add("Neg", "x", "a", "one")
    net.add("Exp", "a", "b", "one")
    net.add("Neg", "x", "c", "two")
    net.add("Exp", "c", "d", "two")
    net.add("Add", "b d", "y", "sum")
    changed = rewritten(net.model("y"), "eliminate_common_subexpressions", x=array(2))
    assert ops(changed) == ["Neg", "Exp", "Add"]
    assert owners(changed) == {"a": ("one", "two"), "b": ("one", "two"), "y": ("sum",)}
    assert reasons(changed)["b"] == "shared"


def test_transpositions_in_a_row_are_one_and_those_that_cancel_are_none():
    net = Builder(x=[2, 3, 4])
    net.add("Transpose", "x", "a", "one", perm=[1, 0, 2])
    net.add("Transpose", "a", "b", "two", perm=[0, 2, 1])
    net.add("Transpose", "b", "c", "three", perm=[1, 2, 0])
    net.add("Transpose", "c", "d", "three", perm=[2, 0, 1])
    net.add("Relu", "d", "y", "act")
    changed = rewritten(net.model("y"), "eliminate_redundant_transposes", x=array(2, 3, 4))
    assert ops(changed) == ["Transpose", "Relu"]
    assert set(owners(changed)["d"] if "d" in owners(changed) else owners(changed)["b"]) >= {"one", "two"}


def test_a_transposition_stays_where_its_result_is_what_a_module_gives():
    net = Builder(x=[2, 3, 4])
    net.add("Transpose", "x", "a", "one", perm=[1, 0, 2])
    net.add("Transpose", "a", "y", "two", perm=[0, 2, 1])
    model = net.model("y", {"one": (["x"], ["a"]), "two": (["a"], ["y"])})
    changed, books = passed(model, "eliminate_redundant_transposes")
    assert ops(changed) == ["Transpose", "Transpose"]
    assert books.hierarchy["one"].fate == "computed"


def test_what_depends_on_constants_alone_is_computed_now():
    net = Builder(x=[2])
    net.const("a", np.float32([4, 9]))
    net.add("Sqrt", "a", "b", "one")
    net.add("Exp", "b", "c", "one")
    net.add("Mul", "x c", "y", "two")
    changed = rewritten(net.model("y"), "fold_constants", x=array(2))
    assert ops(changed) == ["Mul"]


def test_random_numbers_are_not_folded():
    net = Builder(x=[2])
    net.add("RandomNormal", "", "r", "one", shape=[2])
    net.add("Add", "x r", "y", "two")
    assert ops(passed(net.model("y"), "fold_constants")[0]) == ["RandomNormal", "Add"]


def test_a_transposed_weight_is_folded_without_a_copy():
    weight = array(256, 128)
    net = Builder(x=[2, 128])
    net.const("w", weight)
    net.add("Transpose", "w", "t", "fc", perm=[1, 0])
    net.add("MatMul", "x t", "y", "fc")
    model = net.model("y")
    changed = rewritten(model, "fold_constants", x=array(2, 128))
    assert ops(changed) == ["MatMul"]
    folded = changed.graph.node(0).inputs[1].const_value
    assert isinstance(folded, ir.LazyTensor)
    assert np.shares_memory(folded.numpy(), model.graph.initializers["w"].const_value.numpy())


def shape_chain() -> ir.Model:
    """TorchScript's way of x.view(batch, length, 2, 3), with sizes taken from the tensor at hand."""
    net = Builder(opset=14, x=["batch", "length", 6])
    net.const("zero", np.int64(0))
    net.const("first", np.int64(1))
    net.const("at", np.int64([0]))
    net.const("two", np.int64([2]))
    net.const("three", np.int64([3]))
    net.add("Relu", "x", "h", "a")
    net.add("Shape", "h", "s", "b")
    net.add("Gather", "s zero", "n", "b")
    net.add("Gather", "s first", "l", "b")
    net.add("Unsqueeze", "n at", "n1", "b")
    net.add("Unsqueeze", "l at", "l1", "b")
    net.add("Concat", "n1 l1 two three", "wanted", "b", axis=0)
    net.add("Reshape", "h wanted", "y", "b")
    return net.model("y")


def test_a_reshape_to_sizes_that_stay_in_their_place_needs_no_computation():
    model = shape_chain()
    changed, _ = passed(model, "simplify_shape_chains")
    assert ops(changed) == ["Relu", "Reshape"]
    assert owners(changed)["y"] == ("b",)
    assert same(model, changed, x=array(2, 5, 6))
    assert same(model, changed, x=array(3, 1, 6))


def test_sizes_taken_elsewhere_keep_their_owners():
    """A size that module b takes from what it is given is equal to that of the input; b does not get the input."""
    net = Builder(x=["n", 6])
    net.const("zero", np.int64([0]))
    net.const("ones", np.int64([1, 1]))
    net.add("Shape", "x", "s0", "a")
    net.add("Gather", "s0 zero", "n0", "a")
    net.add("Expand", "x ones", "h", "a")
    net.add("Relu", "h", "r", "b")
    net.add("Shape", "r", "s1", "b")
    net.add("Gather", "s1 zero", "n1", "b")
    net.add("Concat", "n0 n1", "both", "c", axis=0)
    net.add("Reshape", "zero ones", "one", "c")
    net.add("ConstantOfShape", "both", "y", "c")
    model = net.model("y r", {"a": (["x"], ["h"]), "b": (["h"], ["r"])})
    changed, books = passed(model, "simplify_shape_chains")
    assert owners(changed)["s0"] == ("a",)
    assert books.hierarchy["b"].fate == "computed"
    assert same(model, changed, x=array(2, 6))


def test_an_equal_shape_after_one_that_was_put_together_reads_the_new_one():
    net = Builder(x=["n", 3])
    net.const("zero", np.int64([0]))
    net.const("first", np.array([True, False]))
    net.const("other", np.int64([5, 7]))
    net.add("Shape", "x", "sizes", "a")
    net.add("Gather", "sizes zero", "n", "a")
    net.add("ConstantOfShape", "n", "w", "a")
    for name in "yz":
        net.add("Where", "first sizes other", f"{name}.wanted", name)
        net.add("ConstantOfShape", f"{name}.wanted", name, name)
    changed = rewritten(net.model("w y z"), "simplify_shape_chains", x=array(2, 3))
    assert ops(changed).count("Where") == 0
    assert ops(changed).count("Concat") == 1


def test_tensors_of_equal_size_are_not_taken_for_one_another():
    net = Builder(x=["n", 3], z=["n", 4])
    net.const("first", np.array([0]))
    net.add("Neg", "x", "h", "embed")
    net.add("Shape", "h", "h.sizes", "")
    net.add("Gather", "h.sizes first", "h.size", "")
    net.add("ConstantOfShape", "h.size", "a", "")
    net.add("Neg", "z", "g", "block")
    net.add("Shape", "g", "g.sizes", "block")
    net.add("Gather", "g.sizes first", "g.size", "block")
    net.add("ConstantOfShape", "g.size", "b", "block")
    net.add("Abs", "h", "c", "")
    changed, _ = passed(net.model("a b c"), "simplify_shape_chains")
    assert ops(changed).count("Neg") == 1
    assert owners(changed)["h"] == ("embed",)


def test_reshapes_in_a_row_are_one_that_belongs_to_all():
    net = Builder(x=[2, 12])
    net.const("s1", np.int64([2, 3, 4]))
    net.const("s2", np.int64([6, 4]))
    net.add("Reshape", "x s1", "a", "one")
    net.add("Reshape", "a s2", "b", "two")
    net.add("Relu", "b", "y", "act")
    changed = rewritten(net.model("y"), "merge_reshapes", x=array(2, 12))
    assert ops(changed) == ["Reshape", "Relu"]
    assert owners(changed)["b"] == ("one", "two")
    assert reasons(changed)["b"] == "fused"


def test_a_transposition_of_joined_dimensions_needs_no_reshapes():
    net = Builder(x=[2, 4, 5, 3])
    net.const("s1", np.int64([8, 5, 3]))
    net.const("s2", np.int64([2, 4, 3, 5]))
    net.add("Reshape", "x s1", "a", "one")
    net.add("Transpose", "a", "b", "one", perm=[0, 2, 1])
    net.add("Reshape", "b s2", "y", "one")
    changed = rewritten(net.model("y"), "merge_layout_ops", x=array(2, 4, 5, 3))
    assert ops(changed) == ["Transpose"]


def test_scaled_queries_and_keys_are_scaled_once():
    net = Builder(q=[2, 3, 4], k=[2, 4, 3])
    net.const("s", np.float32(0.6))
    net.add("Mul", "q s", "a", "attention")
    net.add("Mul", "k s", "b", "attention")
    net.add("MatMul", "a b", "y", "attention")
    changed = rewritten(net.model("y"), "cleanup_attention", tolerance=1e-5, q=array(2, 3, 4), k=array(2, 4, 3, seed=1))
    assert ops(changed) == ["Mul", "MatMul"]
    assert set(owners(changed).values()) == {("attention",)}


def test_constant_factors_in_a_row_are_one():
    net = Builder(x=[3])
    net.const("a", np.float32(3))
    net.const("b", np.float32(7))
    net.add("Mul", "x a", "h", "one")
    net.add("Div", "h b", "y", "two")
    changed = rewritten(net.model("y"), "simplify_arithmetic", tolerance=1e-6, x=array(3))
    assert ops(changed) == ["Mul"]
    assert owners(changed)["y"] == ("one", "two")


def convolution(*after: str) -> Builder:
    net = Builder(x=[1, 2, 6, 6])
    net.const("w", array(3, 2, 3, 3))
    net.const("pads", np.int64([0, 0, 1, 2, 0, 0, 1, 0]))
    net.add("Pad", "x pads", "p", "pad")
    net.add("Conv", "p w", "c", "conv", kernel_shape=[3, 3])
    for place, name in enumerate(("gamma", "beta", "mean", "variance")):
        net.const(name, np.abs(array(3, seed=place)) + 0.5)
    net.add("BatchNormalization", "c gamma beta mean variance", "b", "norm", epsilon=0.01)
    net.add("Relu", "b", "y", "act")
    return net


def test_convolution_takes_in_padding_and_normalisation_and_is_all_their_work():
    model = convolution().model(
        "y", {"pad": (["x"], ["p"]), "conv": (["p"], ["c"]), "norm": (["c"], ["b"]), "act": (["b"], ["y"])}
    )
    changed, books = passed(model, "fuse_pad_into_conv", "fuse_conv_batchnorm")
    assert ops(changed) == ["Conv", "Relu"]
    assert owners(changed) == {"b": ("pad", "conv", "norm"), "y": ("act",)}
    assert reasons(changed)["b"] == "fused"
    assert {path: books.hierarchy[path].fate for path in ("pad", "conv", "norm", "act")} == {
        "pad": "fused",
        "conv": "fused",
        "norm": "fused",
        "act": "computed",
    }
    assert set(books.hierarchy["conv"].fused_with) == {"pad", "norm"}
    assert same(model, changed, 1e-5, x=array(1, 2, 6, 6))


def test_convolution_takes_in_relu_for_onnxruntime():
    changed = rewritten(
        convolution().model("y"), "fuse_conv_batchnorm", "fuse_conv_relu", tolerance=1e-5, x=array(1, 2, 6, 6)
    )
    assert ops(changed) == ["Pad", "FusedConv"]
    assert owners(changed)["y"] == ("conv", "norm", "act")


def test_padding_with_other_numbers_than_zero_stays():
    net = Builder(x=[1, 2, 6, 6])
    net.const("w", array(3, 2, 3, 3))
    net.const("pads", np.int64([0, 0, 1, 1, 0, 0, 1, 1]))
    net.const("fill", np.float32(2))
    net.add("Pad", "x pads fill", "p", "pad")
    net.add("Conv", "p w", "y", "conv", kernel_shape=[3, 3])
    assert ops(passed(net.model("y"), "fuse_pad_into_conv")[0]) == ["Pad", "Conv"]


def linear(rank3: bool, bias: np.ndarray) -> ir.Model:
    net = Builder(x=["n", 5, 4] if rank3 else ["n", 4])
    net.const("w", array(4, 3))
    net.const("b", bias)
    net.add("MatMul", "x w", "h", "fc")
    net.add("Add", "b h", "y", "fc")
    return net.model("y")


def test_a_product_and_a_bias_are_one_gemm():
    changed = rewritten(linear(False, array(3)), "fuse_matmul_add", tolerance=1e-5, x=array(2, 4))
    assert ops(changed) == ["Gemm"]


@pytest.mark.parametrize("model", [linear(True, array(3)), linear(False, array(1, 2, 3))], ids=["batch", "wide bias"])
def test_what_gemm_cannot_say_stays(model):
    assert ops(passed(model, "fuse_matmul_add")[0]) == ["MatMul", "Add"]


def test_a_batch_of_products_is_one_gemm_between_reshapes():
    changed = rewritten(linear(True, array(3)), "fuse_matmul_add_3d", tolerance=1e-5, x=array(2, 5, 4))
    assert ops(changed) == ["Reshape", "Gemm", "Reshape"]
    assert set(owners(changed).values()) == {("fc",)}


def test_parallel_projections_share_a_product_and_stay_exact():
    net = Builder(x=[2, 4])
    signatures = {}
    for name, width in (("q", 3), ("k", 2), ("v", 5)):
        net.const(f"w{name}", array(4, width))
        net.const(f"b{name}", array(width))
        net.add("MatMul", f"x w{name}", f"m{name}", name)
        net.add("Add", f"m{name} b{name}", name, name)
        signatures[name] = (["x"], [name])
    model = net.model("q k v", signatures)
    changed, books = passed(model, "merge_parallel_projections")
    assert ops(changed) == ["MatMul", "Add", "Slice", "Slice", "Slice"]
    assert list(owners(changed).values()) == [("q", "k", "v"), ("q", "k", "v"), ("q",), ("k",), ("v",)]
    assert [books.hierarchy[path].fate for path in "qkv"] == ["computed"] * 3
    assert same(model, changed, 1e-6, x=array(2, 4))


def test_two_projections_would_save_nothing_and_stay():
    net = Builder(x=[2, 4])
    for name in "qk":
        net.const(f"w{name}", array(4, 3))
        net.const(f"b{name}", array(3))
        net.add("MatMul", f"x w{name}", f"m{name}", name)
        net.add("Add", f"m{name} b{name}", name, name)
    assert ops(passed(net.model("q k"), "merge_parallel_projections")[0]) == ["MatMul", "Add"] * 2
