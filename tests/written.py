"""Models written as text in ONNX's own notation, with weights beside it."""

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from onnx import numpy_helper


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def written(
    text: str, opset: int = 17, /, owners: dict[str, str] | None = None, **weights: np.ndarray
) -> ir.Model:
    """The model of a graph such as ``g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }``.

    Args:
        text: The graph. Nodes are named by their first outputs.
        opset: The version of ONNX's operators.
        owners: First output of a node → its module, for a model with tags.
        weights: Initializers.
    """
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    for node in model.graph.node:
        node.name = node.output[0]
        if owners is not None:
            node.metadata_props.add(key="htp.module", value=owners.get(node.output[0], ""))
    onnx.checker.check_model(model)
    return ir.from_proto(model)
