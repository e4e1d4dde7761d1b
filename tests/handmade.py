"""Small ONNX models, tagged by hand, each with one trap."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.format.hierarchy import Hierarchy, ModuleInfo


def tagged_node(
    op: str, inputs: list[ir.Value], owners: str | list[str], name: str, call: int | None = None
) -> ir.Node:
    """A node with tags, and one output, which bears its name."""
    listed = [owners] if isinstance(owners, str) else owners
    metadata = {"htp.module": listed[0] if len(listed) == 1 else "layer", "htp.reason": "scope"}
    if len(listed) > 1:
        metadata |= {"htp.owners": json.dumps(listed), "htp.reason": "shared"}
    if call is not None:
        metadata["htp.call"] = str(call)
    return ir.node(op, inputs, outputs=[value(name)], metadata_props=metadata, name=f"node_{name}")


def value(name: str, width: int = 4) -> ir.Value:
    return ir.val(name, ir.DataType.FLOAT, [2, width])


def weight(name: str, width: int = 4) -> ir.Value:
    array = np.arange(width * width, dtype=np.float32).reshape(width, width) + len(name)
    return ir.Value(name=name, const_value=ir.tensor(array, name=name))


def model(
    inputs: list[ir.Value],
    nodes: list[ir.Node],
    weights: list[ir.Value],
    modules: list[ModuleInfo],
    functions: list[ir.Function] | None = None,
) -> ir.Model:
    """The last node gives the output."""
    graph = ir.Graph(
        inputs,
        list(nodes[-1].outputs),
        nodes=nodes,
        initializers=weights,
        opset_imports={"": 20, "pkg": 1},
        name="Net",
    )
    made = ir.Model(graph, ir_version=10, functions=functions or [])
    if modules:
        made.metadata_props.update(
            {"htp.version": "1", "htp.modules": Hierarchy(modules).to_json()}
        )
    return made


def stripped(tagged: ir.Model) -> ir.Model:
    """A copy without metadata of nodes, as most tools leave a model."""
    copy = tagged.clone()
    for node in (
        *copy.graph.all_nodes(),
        *(node for made in copy.functions.values() for node in made.all_nodes()),
    ):
        node.metadata_props.clear()
    return copy


def nameless(model: ir.Model) -> ir.Model:
    """The model itself, without tags, recipes, and the names of nodes and of tensors inside."""
    ends = {*model.graph.inputs, *model.graph.outputs}
    stored = list(model.graph.initializers.values())
    model.graph.initializers.clear()
    for number, value in enumerate(stored):
        value.name = f"w{number}"
        value.metadata_props.clear()
        assert value.const_value is not None
        value.const_value.metadata_props.clear()
        value.const_value.name = value.name
        model.graph.initializers.add(value)
    for number, node in enumerate(model.graph.all_nodes()):
        node.name = f"n{number}"
        node.metadata_props.clear()
        for place, value in enumerate(node.outputs):
            if value not in ends:
                value.name = f"t{number}_{place}"
    model.metadata_props.clear()
    return model


def small_file(path: Path) -> bytes:
    """Write a model that a failed command is to leave, and return its bytes."""
    onnx.save(ir.to_proto(encoder()), path)
    return path.read_bytes()


def encoder(width: int = 4) -> ir.Model:
    """Two layers that share a node, ``mask``; the first reads its weight through a Transpose."""
    x, w0, w1 = (
        value("x", width),
        weight("layer.0.fc.weight", width),
        weight("layer.1.fc.weight", width),
    )
    mask = tagged_node("Neg", [x], ["layer.0", "layer.1"], "mask")
    turned = tagged_node("Transpose", [w0], "layer.0.fc", "turned")
    fc0 = tagged_node("MatMul", [x, turned.outputs[0]], "layer.0.fc", "fc0")
    layer0 = tagged_node("Add", [fc0.outputs[0], mask.outputs[0]], "layer.0", "layer0")
    fc1 = tagged_node("MatMul", [layer0.outputs[0], w1], "layer.1.fc", "fc1")
    layer1 = tagged_node("Mul", [fc1.outputs[0], mask.outputs[0]], "layer.1", "layer1")
    out = tagged_node("Relu", [layer1.outputs[0]], "", "out")
    modules = [
        ModuleInfo("", "net.Net", 1, "computed"),
        ModuleInfo("layer", "torch.nn.modules.container.ModuleList"),
        ModuleInfo("layer.0", "net.Layer", 1, "computed"),
        ModuleInfo("layer.0.fc", "torch.nn.modules.linear.Linear", 1, "computed"),
        ModuleInfo("layer.1", "net.Layer", 1, "computed"),
        ModuleInfo("layer.1.fc", "torch.nn.modules.linear.Linear", 1, "computed"),
        ModuleInfo("dropout", "torch.nn.modules.dropout.Dropout", 1, "identity"),
    ]
    nodes = [mask, turned, fc0, layer0, fc1, layer1, out]
    for node in nodes:
        node.outputs[0].shape = ir.Shape([width if node is turned else 2, width])
    return model([x], nodes, [w0, w1], modules)


def called_twice() -> ir.Model:
    """``block`` runs twice, ``block.fc`` twice in each run, and ``block.odd`` three times in all."""
    x = value("x")
    nodes: list[ir.Node] = []
    for name, owner, call in (
        ("fc0", "block.fc", 0),
        ("fc1", "block.fc", 1),
        ("odd0", "block.odd", 0),
        ("block0", "block", 0),
        ("fc2", "block.fc", 2),
        ("fc3", "block.fc", 3),
        ("odd1", "block.odd", 1),
        ("odd2", "block.odd", 2),
        ("block1", "block", 1),
    ):
        nodes.append(tagged_node("Neg", [nodes[-1].outputs[0] if nodes else x], owner, name, call))
    modules = [
        ModuleInfo("", "net.Net", 1, "computed"),
        ModuleInfo("block", "net.Block", 2, "computed"),
        ModuleInfo("block.fc", "net.Fc", 4, "computed"),
        ModuleInfo("block.odd", "net.Odd", 3, "computed"),
        ModuleInfo("unused", "net.Fc"),
    ]
    return model([x], nodes, [], modules)


def branching() -> ir.Model:
    """An ``If`` of the module ``gate``; its first branch is the module ``gate.yes`` and captures two tensors."""
    x, condition = value("x"), ir.val("condition", ir.DataType.BOOL, [])
    minus = tagged_node("Neg", [x], "", "minus")
    yes = tagged_node("Add", [x, minus.outputs[0]], "gate.yes", "yes")
    no = tagged_node("Abs", [x], "gate", "no")
    gate = tagged_node("If", [condition], "gate", "gated")
    for name, node in (("then_branch", yes), ("else_branch", no)):
        gate.attributes[name] = ir.AttrGraph(
            name, ir.Graph([], list(node.outputs), nodes=[node], name=name)
        )
    out = tagged_node("Relu", [gate.outputs[0]], "", "out")
    modules = [
        ModuleInfo("", "net.Net", 1, "computed"),
        ModuleInfo("gate", "net.Gate", 1, "computed"),
        ModuleInfo("gate.yes", "net.Yes", 1, "computed"),
    ]
    return model([x, condition], [minus, gate, out], [], modules)


def with_function() -> ir.Model:
    """``block`` is a call of a function, whose body is the modules ``block.fc`` and ``block.act``."""
    a, formal = value("a"), value("formal")
    fc = tagged_node("MatMul", [a, formal], "block.fc", "h")
    act = tagged_node("Relu", [fc.outputs[0]], "block.act", "r")
    body = ir.Graph([a, formal], list(act.outputs), nodes=[fc, act], opset_imports={"": 20})
    function = ir.Function("pkg", "Block", graph=body, attributes=[])
    x, w = value("x"), weight("block.fc.weight")
    call = ir.node(
        "Block", [x, w], domain="pkg", outputs=[value("y")], metadata_props={"htp.module": "block"}
    )
    out = tagged_node("Neg", [call.outputs[0]], "", "out")
    modules = [
        ModuleInfo(path, "net.Any", 1, "computed")
        for path in ("", "block", "block.fc", "block.act")
    ]
    return model([x], [call, out], [w], modules, [function])
