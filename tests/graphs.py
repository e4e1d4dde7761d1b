"""Small tagged graphs for tests of passes, in one line a node, and what they compute."""

import re
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import find
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.signatures import Signature, signatures_to_json
from htp_export.lineage.settling import Bookkeeping
from htp_export.model.tagged import load

Shape = list[int | str]


class Builder:
    """Builds a tagged graph; every value has a name, and every node an owner.

    Args:
        opset: Version of the ONNX operators.
        inputs: Input → its shape; floats.
    """

    def __init__(self, opset: int = 17, **inputs: Shape) -> None:
        self.values = {
            name: ir.val(name, ir.DataType.FLOAT, shape) for name, shape in inputs.items()
        }
        self.inputs = list(self.values.values())
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.opset = opset

    def const(self, name: str, array: Any) -> str:
        """An initializer."""
        value = ir.Value(name=name, const_value=ir.tensor(np.asarray(array), name=name))
        value.shape, value.type = (
            ir.Shape(np.asarray(array).shape),
            ir.TensorType(value.const_value.dtype),
        )
        self.values[name] = value
        self.weights.append(value)
        return name

    def add(
        self, op: str, inputs: str, output: str, owner: str, domain: str = "", **attributes: Any
    ) -> ir.Node:
        """A node; names are separated by spaces."""
        results = [ir.Value(name=name) for name in output.split()]
        metadata = {tags.MODULE: owner, tags.REASON: "scope"}
        read = [self.values[name] for name in inputs.split()]
        node = ir.node(
            op,
            read,
            attributes,
            domain=domain,
            outputs=results,
            name=f"n_{output}",
            metadata_props=metadata,
        )
        self.values.update({str(value.name): value for value in results})
        self.nodes.append(node)
        return node

    def model(
        self, outputs: str, signatures: dict[str, tuple[list[str], list[str]]] | None = None
    ) -> ir.Model:
        """The model; the modules are the owners of nodes, those of ``signatures``, and what lies above them."""
        results = [self.values[name] for name in outputs.split()]
        graph = ir.Graph(
            self.inputs,
            results,
            nodes=self.nodes,
            initializers=self.weights,
            opset_imports={"": self.opset, "com.microsoft": 1},
            name="Net",
        )
        for value in results:
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        return _with_modules(ir.Model(graph, ir_version=10), signatures)


def _with_modules(
    made: ir.Model, signatures: dict[str, tuple[list[str], list[str]]] | None
) -> ir.Model:
    owners = dict.fromkeys(
        owner for node in made.graph for owner in tags.owners_of(node.metadata_props)
    )
    paths = dict.fromkeys(
        up for owner in (*owners, *(signatures or {})) for up in reversed([*tags.ancestors(owner)])
    )
    hierarchy = Hierarchy(
        ModuleInfo(path, "net.Module", 1, "computed") for path in {"": None, **paths}
    )
    made.metadata_props.update({tags.FORMAT: "1", tags.MODULES: hierarchy.to_json()})
    if signatures is not None:
        calls = {
            path: [
                Signature(
                    {f"arg{place}": name for place, name in enumerate(given)}, tuple(returned)
                )
            ]
            for path, (given, returned) in signatures.items()
        }
        made.metadata_props[tags.SIGNATURES] = signatures_to_json(calls)
    return made


def tagged(
    text: str,
    signatures: dict[str, tuple[list[str], list[str]]] | None = None,
    opset: int = 17,
    **weights: np.ndarray[Any, Any],
) -> ir.Model:
    """A tagged model in ONNX's notation: ``(float[n, 3] x) => (float y) { [act] y = Relu (x) }``.

    The name of a node is the module that owns it, with ``__`` for each dot. ``i7`` and ``im1`` are initializers with
    the one number 7 and -1.
    """
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> Net {text}')
    for name in dict.fromkeys(name for node in proto.graph.node for name in node.input):
        if number := re.fullmatch(r"i(m?)(\d+)", name):
            weights[name] = np.array([int(number[2]) * (-1 if number[1] else 1)])
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(numbers, name) for name, numbers in weights.items()
    )
    model = ir.from_proto(proto)
    for name, numbers in weights.items():
        model.graph.initializers[name].const_value = ir.tensor(numbers, name=name)
    for value in model.graph.outputs:
        value.shape = None
    for node in model.graph.all_nodes():
        node.metadata_props.update(
            {tags.MODULE: (node.name or "").replace("__", "."), tags.REASON: "scope"}
        )
    for node in model.graph:
        node.name = f"n_{node.outputs[0].name}"
    return _with_modules(model, signatures)


def feeds(model: ir.Model, **sizes: int) -> dict[str, np.ndarray[Any, Any]]:
    """Random inputs of a model; an open dimension has two elements if no other size is given."""
    return {
        str(value.name): array(
            *(d if isinstance(d, int) else sizes.get(str(d.value), 2) for d in value.shape),
            seed=place,
        )
        for place, value in enumerate(model.graph.inputs)
        if value.shape is not None
    }


def run(model: ir.Model, **inputs: Any) -> list[np.ndarray[Any, Any]]:
    """The outputs, by ONNX Runtime without its own optimisations."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    # it rounds sums in another order
    options.add_session_config_entry("session.disable_prepacking", "1")
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)


def passed(model: ir.Model, *names: str) -> tuple[ir.Model, Bookkeeping]:
    """A copy of a model after passes, each once, with the books kept."""
    books = Bookkeeping(load(model.clone()))
    for name in names:
        result = find(name).make()(books.model)
        books.model = result.model
        books.settle()
    return books.finish().model, books


def rewritten(model: ir.Model, *names: str, tolerance: float = 0.0, **inputs: Any) -> ir.Model:
    """A copy of a model after passes, which computes the same from these inputs."""
    changed, _ = passed(model, *names)
    assert same(model, changed, tolerance, **inputs)
    return changed


def same(model: ir.Model, changed: ir.Model, tolerance: float = 0.0, **inputs: Any) -> bool:
    """Whether two models compute the same from these inputs."""
    pairs = zip(run(model, **inputs), run(changed, **inputs), strict=True)
    return all(
        np.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        for one, other in pairs
    )


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def owners(model: ir.Model) -> dict[str, tuple[str, ...]]:
    """First output of each node → its owners."""
    return {str(node.outputs[0].name): tags.owners_of(node.metadata_props) for node in model.graph}


def reasons(model: ir.Model) -> dict[str, str]:
    return {str(node.outputs[0].name): node.metadata_props[tags.REASON] for node in model.graph}


def array(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
