"""A node that a tool inserted beside an unknown one is unknown: its owner is not proved."""

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

import htp_export


def test_a_cast_behind_a_layer_of_other_weights_is_unknown():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).eval()
    program = htp_export.export(net, (torch.randn(2, 4),))
    generator = np.random.default_rng(0)
    weights = {
        "k0": net[0].weight.detach().numpy(),
        "c0": net[0].bias.detach().numpy(),
        "k1": generator.normal(size=(3, 4)).astype(np.float16),
        "c1": generator.normal(size=3).astype(np.float16),
    }
    nodes = [
        helper.make_node("Gemm", ["a", "k0", "c0"], ["t"], transB=1, name="first"),
        helper.make_node("Tanh", ["t"], ["u"], name="tanh"),
        helper.make_node("Cast", ["u"], ["v"], to=TensorProto.FLOAT16, name="narrow"),
        helper.make_node("Gemm", ["v", "k1", "c1"], ["z"], transB=1, name="other"),
        helper.make_node("Cast", ["z"], ["b"], to=TensorProto.FLOAT, name="widen"),
    ]
    graph = helper.make_graph(
        nodes,
        "other",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, [2, 3])],
        initializer=[numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    tagged = htp_export.load(htp_export.carry(program, model))
    reasons = {node.name: node.metadata_props["htp.reason"] for node in tagged.nodes}
    assert tagged.owners_of("first") == ("0",)
    assert [reasons[name] for name in ("narrow", "other", "widen")] == ["unknown"] * 3
