"""Tags on what another tool made of a model: whose each node is, and how that is known."""

import contextlib
import json
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import htp_export
from htp_export.alignment import origin_map, weight_similarity
from htp_export.alignment.graph_summary import summarize
from htp_export.errors import FileError, InputError, UntaggedModelError
from htp_export.format import tags
from htp_export.format.hierarchy import ModuleInfo
from htp_export.model.regions import all_nodes
from htp_export.shapes.operator_kinds import resembles
from tests.handmade import (
    branching,
    encoder,
    model,
    stripped,
    tagged_node,
    value,
    weight,
    with_function,
)


def owners(result: ir.Model) -> dict[str, list[str]]:
    """First output → owners."""
    return {
        str(node.outputs[0].name): list(tags.owners_of(node.metadata_props))
        for node in result.graph.all_nodes()
    }


def reasons(result: ir.Model) -> dict[str, str]:
    return {
        str(node.outputs[0].name): node.metadata_props["htp.reason"]
        for node in result.graph.all_nodes()
    }


def chain(*steps: tuple[str, str, str]) -> ir.Model:
    """Nodes one after another, as (op type, owner, output); those that take weights have some."""
    nodes: list[ir.Node] = []
    weights, last = [], value("x")
    start = last
    for op, owner, name in steps:
        reads = [last]
        if op in ("Conv", "MatMul", "Add", "BatchNormalization", "LayerNormalization"):
            weights.append(weight(f"{owner}.{op}.weight"))
            reads.append(weights[-1])
        nodes.append(tagged_node(op, reads, owner, name))
        last = nodes[-1].outputs[0]
    paths = ["", *dict.fromkeys(owner for _, owner, _ in steps if owner)]
    return model(
        [start], nodes, weights, [ModuleInfo(path, "net.Any", 1, "computed") for path in paths]
    )


def rewire(
    changed: ir.Model, op: str, reads: list[str], makes: str, domain: str = "", **attributes: str
) -> ir.Node:
    """Put a node at the place of the one that makes a tensor; nodes that nothing reads any more are taken out."""
    values = {v.name: v for n in changed.graph for v in n.outputs}
    values |= {v.name: v for v in (*changed.graph.inputs, *changed.graph.initializers.values())}
    old = values[makes].producer()
    assert old is not None
    node = ir.node(
        op,
        [values[name] for name in reads],
        attributes=attributes,
        domain=domain,
        name=f"{op}_of_tool",
    )
    node.outputs[0].name = makes
    node.outputs[0].shape, node.outputs[0].dtype = values[makes].shape, values[makes].dtype
    changed.graph.insert_before(old, node)
    ir.convenience.replace_all_uses_with(values[makes], node.outputs[0], replace_graph_outputs=True)
    gone = [old]
    while gone:
        dead = gone.pop()
        makers = [v.producer() for v in dead.inputs if v is not None]
        changed.graph.remove(dead, safe=True)
        gone += [
            m
            for m in dict.fromkeys(makers)
            if m is not None and not any(v.uses() for v in m.outputs)
        ]
    return node


def take_out(changed: ir.Model, op: str) -> None:
    """Take out a node; what read its output reads its input."""
    node = next(node for node in changed.graph if node.op_type == op)
    node.outputs[0].replace_all_uses_with(node.inputs[0])  # type: ignore[arg-type]
    changed.graph.remove(node, safe=True)


# --- what is the same ---------------------------------------------------


@pytest.mark.parametrize("what", ["branches", "functions", "calls"])
def test_nodes_have_their_owners_and_calls_again(what, shared_files):
    made = {"branches": branching, "functions": with_function}
    before = (
        made[what]() if what in made else ir.from_proto(shared_files.read("called_twice", "dynamo"))
    )
    said = [
        [
            (node.metadata_props["htp.module"], node.metadata_props.get("htp.call"))
            for node in all_nodes(each)
        ]
        for each in (before, htp_export.carry(before, stripped(before)).model)
    ]
    assert said[0] == said[1]


def test_nodes_under_their_names_have_their_owners_again():
    before, after = encoder(), stripped(encoder())
    result = htp_export.carry(before, after)
    assert owners(result.model) == owners(before)
    assert (result.nodes, result.kept, result.recovered) == (7, 0, {"tensor": 6, "shared": 1})
    assert "7 nodes, all with owners" in str(result)
    assert json.loads(json.dumps(result.to_dict()))["recovered"] == {"tensor": 6, "shared": 1}
    assert all(not node.metadata_props for node in after.graph)  # a model in memory is not changed


def test_tags_that_a_tool_left_are_kept_with_their_reason():
    before = encoder()
    result = htp_export.carry(before, before.clone())
    assert (result.kept, result.recovered) == (7, {})
    assert reasons(result.model) == reasons(before)


def test_nodes_are_known_by_what_they_compute_when_every_name_is_another():
    before, after = encoder(), stripped(encoder())
    for index, node in enumerate(after.graph):
        node.name, node.outputs[0].name = f"n{index}", f"t{index}"
    found = owners(htp_export.carry(before, after).model)
    assert list(found.values()) == list(owners(before).values())


# --- operators by their names --------------------------------------------

# Operator → those that do its work, or whose names only look as if; ms: com.microsoft.
MADE_OF = {
    "Conv": "Conv com.microsoft.nchwc::Conv ms::FusedConv ms::NhwcFusedConv ConvInteger QLinearConv",
    "Gelu": "ms::Gelu ms::BiasGelu",
    "MaxPool": "ms::NhwcMaxPool",
    "MatMul": "ms::FusedMatMul ms::TransposeMatMul ms::MatMulNBits ms::MatMulIntegerToFloat "
    "ms::DynamicQuantizeMatMul MatMulInteger QLinearMatMul Gemm",
    "Transpose": "ms::TransposeMatMul",
    "Gemm": "ms::FusedGemm ms::QGemm",
    "Softmax": "ms::BiasSoftmax",
    "LayerNormalization": "ms::SkipLayerNormalization",
    "Gather": "ms::GatherBlockQuantized",
    "Add": "ms::QLinearAdd Gemm",
    "LeakyRelu": "ms::QLinearLeakyRelu",
}
OTHERS = {
    "Mul": "MatMul ms::FusedMatMul QLinearMatMul Gemm",
    "Exp": "Expand",
    "Max": "MaxPool ms::NhwcMaxPool ReduceMax ArgMax Softmax",
    "MaxPool": "GlobalMaxPool",
    "Sum": "ReduceSum",
    "Sin": "Sinh",
    "Relu": "LeakyRelu ms::QLinearLeakyRelu",
    "Sigmoid": "HardSigmoid",
    "Conv": "ConvTranspose com.acme::Anything",
    "Transpose": "ConvTranspose",
    "Gather": "GatherND",
    "Cast": "CastLike",
    "Log": "LogSoftmax",
    "MatMul": "ms::Attention",
}


def operators(table: dict[str, str]) -> Any:
    pairs = [
        (op.replace("ms::", "com.microsoft::"), other)
        for other, ops in table.items()
        for op in ops.split()
    ]
    return pytest.mark.parametrize(("op", "other"), pairs, ids=lambda op: op.rpartition("::")[2])


@operators(MADE_OF)
def test_operators_that_do_the_work_of_another_are_known_by_their_names(op, other):
    assert resembles(op, other)


@operators(OTHERS)
def test_operators_whose_names_only_look_alike_are_not_taken_for_each_other(op, other):
    assert not resembles(op, other)
    assert not resembles(other, op)


def test_a_name_on_an_operator_that_only_looks_alike_is_not_believed():
    before = chain(("Mul", "scale", "scaled"), ("MatMul", "fc", "y"))
    after = stripped(before)
    # the scale is in the weights now
    node = rewire(after, "MatMul", ["x", "fc.MatMul.weight"], "y")
    node.name, node.outputs[0].name = "node_scaled", "product"
    after.graph.append(ir.node("Neg", node.outputs, outputs=[value("y")], name="back"))
    after.graph.outputs[0] = after.graph[-1].outputs[0]
    assert owners(htp_export.carry(before, after).model)["product"] == ["scale", "fc"]


# --- what was merged ---------------------------------------------------


def test_a_node_that_does_the_work_of_several_has_all_their_owners():
    before = chain(
        ("MatMul", "query", "q"),
        ("Add", "query", "qb"),
        ("Softmax", "scores", "s"),
        ("Relu", "act", "y"),
    )
    after = stripped(before)
    rewire(
        after, "Attention", ["x", "query.MatMul.weight", "query.Add.weight"], "s", "com.microsoft"
    )
    result = htp_export.carry(before, after)
    assert owners(result.model) == {"s": ["query", "scores"], "y": ["act"]}
    assert reasons(result.model)["s"] == "fused"


def test_a_tag_inherited_from_one_of_the_merged_nodes_is_not_believed():
    before = chain(("MatMul", "fc", "m"), ("Relu", "act", "y"))
    after = stripped(before)
    node = rewire(after, "FusedMatMul", ["x", "fc.MatMul.weight"], "y", "com.microsoft")
    node.metadata_props.update({"htp.module": "fc", "htp.reason": "scope"})
    result = htp_export.carry(before, after)
    assert owners(result.model) == {"y": ["fc", "act"]}
    assert result.kept == 0


def test_modules_that_were_merged_are_fused_with_each_other():
    before = chain(("MatMul", "fc", "m"), ("Relu", "act", "y"), ("Neg", "out", "z"))
    after = stripped(before)
    rewire(after, "FusedMatMul", ["x", "fc.MatMul.weight"], "y", "com.microsoft")
    result = htp_export.carry(before, after)
    tree = htp_export.load(result.model).hierarchy
    assert dict(result.fates) == {"fc": "fused", "act": "fused"}
    assert (tree["fc"].fused_with, tree["act"].fused_with, tree["out"].fate) == (
        ("act",),
        ("fc",),
        "computed",
    )


def test_a_name_taken_over_by_a_merged_node_means_the_later_tensor():
    """As optimisers do that fold BatchNorm: the Conv computes what BatchNorm did, under the Conv's name."""
    before = chain(("Conv", "conv", "c"), ("BatchNormalization", "bn", "b"), ("Relu", "act", "y"))
    after = stripped(before)
    take_out(after, "BatchNormalization")
    result = htp_export.carry(before, after)
    assert owners(result.model) == {"c": ["conv", "bn"], "y": ["act"]}
    assert dict(result.fates) == {"conv": "fused", "bn": "fused"}


def test_products_that_became_one_belong_to_all_and_so_does_what_joins_their_weights():
    """As onnxoptimizer does for q, k and v: the weights are joined, one product is made of them, and it is split."""
    # of other values each
    x, weights = value("x"), [weight(name) for name in ("q.w", "k.w_1", "v.w_12")]
    products = [
        tagged_node("MatMul", [x, each], each.name[0], f"{each.name[0]}_out") for each in weights
    ]
    reading = [
        tagged_node(op, product.outputs, "", op)
        for op, product in zip(("Neg", "Exp", "Abs"), products, strict=True)
    ]
    last = tagged_node("Max", [node.outputs[0] for node in reading], "", "y")
    infos = [ModuleInfo(path, "net.Any", 1, "computed") for path in ("", "q", "k", "v")]
    before = model([x], [*products, *reading, last], weights, infos)
    after = stripped(before)
    nodes, given = {node.outputs[0].name: node for node in after.graph}, after.graph.initializers
    joined = ir.node("Concat", list(given.values()), attributes={"axis": 1})
    product = ir.node("MatMul", [after.graph.inputs[0], joined.outputs[0]])
    split = ir.node(
        "Split", [product.outputs[0]], attributes={"axis": 1, "num_outputs": 3}, num_outputs=3
    )
    after.graph.insert_before(nodes["q_out"], [joined, product, split])
    for node, name, made, reader in zip(
        (joined, product, split), "wps", split.outputs, reading, strict=True
    ):
        node.outputs[0].name = name
        nodes[reader.outputs[0].name].replace_input_with(0, made)
    after.graph.remove([nodes[name] for name in ("q_out", "k_out", "v_out")], safe=True)
    result = htp_export.carry(before, after).model
    assert [owners(result)[name] for name in "wps"] == [["q", "k", "v"]] * 3
    assert [reasons(result)[name] for name in "wps"] == ["inserted", "fused", "inserted"]


def test_what_was_left_out_because_it_changed_nothing_makes_nobody_fused():
    before = chain(("MatMul", "fc", "m"), ("Identity", "same", "i"), ("Relu", "act", "y"))
    after = stripped(before)
    take_out(after, "Identity")
    result = htp_export.carry(before, after)
    assert owners(result.model) == {"m": ["fc"], "y": ["act"]}
    assert dict(result.fates) == {"same": "identity"}


# --- by values ---------------------------------------------------


def numbers(width: int = 4) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).uniform(0.5, 2, (2, width)).astype(np.float32)}


def rewritten(*nodes: tuple[str, list[str], str]) -> ir.Model:
    """Another graph from ``x`` to the last output, as (op type, inputs, output), with no name of the one before."""
    made = {"x": value("x")}
    built = []
    for op, reads, name in nodes:
        built.append(
            ir.node(op, [made[read] for read in reads], outputs=[value(name)], name=f"tool_{name}")
        )
        made[name] = built[-1].outputs[0]
    return model([made["x"]], built, [], [])


def proved(result: htp_export.results.Carried) -> dict[str, list[str]]:
    """First output → owners, of the nodes whose owners are known."""
    known = {name for name, reason in reasons(result.model).items() if reason != "unknown"}
    return {name: paths for name, paths in owners(result.model).items() if name in known}


def test_a_tensor_that_is_computed_otherwise_under_another_name_is_known_by_its_values():
    """exp(-x) and the square root of it, which the tool computes as 1 / exp(x) and as a product of roots."""
    before = chain(("Neg", "neg", "a"), ("Exp", "exp", "b"), ("Sqrt", "root", "y"))
    after = rewritten(
        ("Exp", ["x"], "t0"),
        ("Reciprocal", ["t0"], "t1"),
        ("Sqrt", ["t1"], "t2"),
        ("Max", ["t2", "t2"], "y"),
    )
    result = htp_export.carry(before, after, data=numbers())
    assert proved(result) == {"t2": ["root"]}
    assert reasons(result.model)["t2"] == "values"
    assert (result.fates["neg"], "root" in result.fates) == ("fused", False)


def test_names_that_structure_contradicts_are_not_believed():
    """As an exporter does that counts names anew: they stand for other tensors, and structure decides."""
    before = chain(
        ("Neg", "neg", "a"), ("Exp", "exp", "b"), ("Sqrt", "root", "c"), ("Neg", "out", "y")
    )
    after = rewritten(
        ("Neg", ["x"], "b"), ("Exp", ["b"], "c"), ("Sqrt", ["c"], "a"), ("Neg", ["a"], "y")
    )
    assert owners(htp_export.carry(before, after).model) == {
        "b": ["neg"],
        "c": ["exp"],
        "a": ["root"],
        "y": ["out"],
    }


def test_the_owner_of_a_tensor_that_equals_several_is_unknown():
    """All inputs are positive: what Relu and Abs make is what they are given, and nobody can say which one it is."""
    before = chain(
        ("Exp", "exp", "a"), ("Relu", "relu", "b"), ("Abs", "abs", "c"), ("Sqrt", "root", "y")
    )
    after = rewritten(
        ("Neg", ["x"], "n"),
        ("Exp", ["n"], "e"),
        ("Reciprocal", ["e"], "t"),
        ("Max", ["t"], "m"),
        ("Sqrt", ["m"], "y"),
    )
    assert proved(htp_export.carry(before, after, data=numbers())) == {"y": ["root"]}


@pytest.mark.parametrize("array", [np.zeros((2, 4)), np.ones((2, 4)), np.tile([1.0, 2.0], (2, 2))])
def test_tensors_with_hardly_any_different_numbers_match_nothing(array):
    before = chain(("Neg", "neg", "a"), ("Exp", "exp", "b"), ("Sqrt", "root", "y"))
    after = rewritten(
        ("Exp", ["x"], "t0"),
        ("Reciprocal", ["t0"], "t1"),
        ("Sqrt", ["t1"], "t2"),
        ("Max", ["t2"], "y"),
    )
    assert (
        proved(htp_export.carry(before, after, data={"x": array.astype(np.float32)}, require=0))
        == {}
    )


def test_values_are_taken_in_portions(monkeypatch):
    from htp_export.alignment import evidence

    before = chain(("Neg", "neg", "a"), ("Exp", "exp", "b"), ("Sqrt", "root", "y"))
    after = rewritten(
        ("Exp", ["x"], "t0"),
        ("Reciprocal", ["t0"], "t1"),
        ("Sqrt", ["t1"], "t2"),
        ("Max", ["t2"], "y"),
    )
    asked, run = list[int](), evidence.Runner.run

    def counted(self, feed, names):
        asked.append(len(names))
        return run(self, feed, names)

    monkeypatch.setattr(evidence.Runner, "run", counted)
    whole = owners(htp_export.carry(before, after, data=numbers()).model)
    # of one model, the outputs of the other, and the tensors of the other
    assert asked == [3, 1, 4]
    monkeypatch.setattr(evidence, "PORTION_BYTES", 64)
    assert owners(htp_export.carry(before, after, data=numbers()).model) == whole
    assert asked[3:] == [2, 1, 1, 2, 2]


# --- bodies and functions ---------------------------------------------------


def test_work_on_what_only_a_branch_reads_is_not_lost():
    """``minus`` is made outside and read in the branch alone; the tool recomputes it inside the holder."""
    before, after = branching(), stripped(branching())
    holder = next(node for node in after.graph if node.op_type == "If")
    branch = holder.attributes["then_branch"].as_graph()
    add, x = branch[0], after.graph.inputs[0]
    double = ir.node("Sub", [x, x], name="folded")
    double.outputs[0].name = "zero"
    branch.insert_before(add, double)
    branch.outputs[0] = double.outputs[0]
    branch.remove(add, safe=True)
    after.graph.remove(next(node for node in after.graph if node.op_type == "Neg"), safe=True)
    result = owners(htp_export.carry(before, after).model)
    assert (result["gated"], result["out"]) == (["", "gate"], [""])


# --- without the model before ---------------------------------------------------


def test_a_map_brings_the_tags_back_when_the_model_before_is_gone():
    mapped = stripped(htp_export.embed_map(encoder()))
    result = htp_export.carry(mapped)
    assert owners(result.model) == owners(encoder())
    assert owners(htp_export.carry(stripped(result.model)).model) == owners(encoder())  # and again


def test_a_map_is_taken_off_by_what_changes_tags():
    optimized = htp_export.optimize(
        htp_export.embed_map(encoder()), passes=["eliminate_dead_nodes"]
    )
    assert "htp.map" not in optimized.model.metadata_props
    part = htp_export.extract(encoder(), "layer.0.fc").model
    assert (
        "htp.map"
        not in htp_export.splice(
            htp_export.embed_map(encoder()), "layer.0.fc", part
        ).model.metadata_props
    )


def test_what_the_modules_of_pytorch_hold_is_still_said(shared_files):
    exported = ir.from_proto(shared_files.read("siblings", "dynamo"))
    held = exported.metadata_props["htp.parameters"]
    mapped = stripped(htp_export.embed_map(exported))
    assert (
        htp_export.carry(exported, stripped(exported)).model.metadata_props["htp.parameters"]
        == held
    )
    assert htp_export.carry(mapped).model.metadata_props["htp.parameters"] == held


@pytest.mark.parametrize("broken", ["", "no map", "c${Nk"])
def test_a_broken_map_is_named(broken):
    mapped = stripped(htp_export.embed_map(encoder()))
    mapped.metadata_props["htp.map"] = broken
    with pytest.raises(InputError, match=r"htp\.map"):
        htp_export.carry(mapped)


# --- files and errors ---------------------------------------------------


def test_models_without_tags_or_a_map_are_refused_and_so_are_inputs_without_the_model_before():
    with pytest.raises(UntaggedModelError):
        htp_export.carry(stripped(encoder()), stripped(encoder()))
    with pytest.raises(UntaggedModelError, match="embed_map"):
        htp_export.carry(stripped(encoder()))
    with pytest.raises(InputError, match="model before"):
        htp_export.carry(htp_export.embed_map(encoder()), data=numbers())


def test_weights_are_not_needed_but_for_a_file_of_the_result(tmp_path):
    htp_export.load(encoder(64)).save(tmp_path / "before.onnx", external_data="weights.bin")
    proto = onnx.load(tmp_path / "before.onnx", load_external_data=False)
    for node in proto.graph.node:
        del node.metadata_props[:]
    onnx.save(proto, tmp_path / "after.onnx")
    (tmp_path / "weights.bin").unlink()
    result = htp_export.carry(tmp_path / "before.onnx", tmp_path / "after.onnx")
    assert owners(result.model) == owners(encoder(64))
    with pytest.raises(FileError, match=r"weights\.bin: is missing"):
        htp_export.carry(tmp_path / "before.onnx", tmp_path / "after.onnx", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("written", [False, True])
def test_a_tool_may_write_nodes_in_another_order_than_they_run(written, tmp_path):
    proto = ir.to_proto(stripped(encoder()))
    proto.graph.node.sort(key=lambda node: node.output[0])
    if written:
        onnx.save(proto, tmp_path / "after.onnx")
    result = htp_export.carry(
        encoder(), tmp_path / "after.onnx" if written else proto, data=numbers()
    )
    assert owners(result.model) == owners(encoder())
    onnx.checker.check_model(ir.to_proto(result.model))  # which wants them in order
    assert result.model.clone()


# --- limits ---------------------------------------------------


def test_values_outside_of_the_sample_count_too():
    array = np.zeros(weight_similarity._PLACES * 4, dtype=np.float32)
    array[1:4] = 1, 2, 3
    assert weight_similarity.is_distinctive(array)


def test_constants_of_many_plain_numbers_are_told_apart():
    header = '<ir_version: 10, opset_import: ["": 20]> g () => (int64[40] y)'
    texts = [
        f"{header} {{ c = Constant <value_ints = [{', '.join([str(k)] * 40)}]> () y = Identity (c) }}"
        for k in "12"
    ]
    first, second = (summarize(ir.from_onnx_text(text))[0].nodes[0].attributes for text in texts)
    assert first != second


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_map_in_a_file_is_unfolded_up_to_a_size(monkeypatch, beyond):
    mapped = stripped(htp_export.embed_map(encoder()))
    size = len(
        origin_map.zlib.decompress(origin_map.base64.b85decode(mapped.metadata_props["htp.map"]))
    )
    monkeypatch.setattr(origin_map, "_LARGEST", size - beyond)
    with pytest.raises(InputError, match="it is too large") if beyond else contextlib.nullcontext():
        assert owners(htp_export.carry(mapped).model) == owners(encoder())
