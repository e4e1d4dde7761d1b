"""Runs a model by shapes alone: what every node reads and makes when the inputs have given sizes.

Weights are not read. Of the file's own shapes those are believed that say every size, with names of open sizes put in;
other shapes are inferred, and what shapes are computed from (``Shape``, ``Gather``, ``Concat``) is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.costs.bindings import Bindings
from htp_export.costs.contrib_shapes import contrib_shape
from htp_export.costs.execution import Body, Run, Step, Tensor, UnknownShapeError
from htp_export.costs.inference import MOST_ELEMENTS, evaluate, infer, node_proto
from htp_export.format import tags
from htp_export.model.operators import CONTROL_FLOW, RESHAPING
from htp_export.model.tagged import TaggedModel

__all__ = ["run_by_shapes"]

# ONNX Runtime gives the output of these the memory of the input.
_VIEWS = RESHAPING | {"Identity"}
_CONSTANT_VALUES = ("value_int", "value_ints", "value_float", "value_floats")


def run_by_shapes(tagged: TaggedModel, bindings: Bindings) -> Run:
    """What happens in one run of a model.

    Args:
        tagged: The model.
        bindings: The sizes of its inputs.

    Returns:
        The steps, in the order of the graph; a call of a function of the model is the steps of its body.
    """
    return _Runner(tagged, bindings).main()


class _Runner:
    """One run; functions are run once for each call, with the tensors that the call gives."""

    def __init__(self, tagged: TaggedModel, bindings: Bindings) -> None:
        self._model = tagged.model
        self._tagged = tagged
        self._bindings = bindings
        self._opsets = dict(tagged.model.opset_imports)
        self._known: dict[ir.Value, Tensor] = {}
        self._calling: list[ir.Function] = []
        self._around: tuple[str, ...] = ()
        self._given: Mapping[str, ir.Attr] = {}
        self._steps: list[Step] = []
        graph = tagged.model.graph
        # Where the file says all shapes, and how often everything runs, nothing has to be worked out.
        self._infer = bool(tagged.model.functions) or any(
            node.op_type in CONTROL_FLOW or any(self._written(value).shape is None for value in node.outputs)
            for node in graph.all_nodes()
        )

    def main(self) -> Run:
        graph = self._model.graph
        for value in graph.inputs:
            if value.name in self._bindings.inputs:
                self._known[value] = self._bindings.inputs[(value.name or "")]
        steps = self._graph(graph)
        return Run(steps, [self._tensor(value) for value in graph.outputs])

    def _graph(self, graph: ir.Graph | ir.Function) -> list[Step]:
        """Run the nodes of a graph; its inputs are known."""
        outer, self._steps = self._steps, []
        if isinstance(graph, ir.Graph):
            for value in graph.initializers.values():
                self._known[value] = self._initializer(value)
        for node in graph:
            self._node(node)
        steps, self._steps = self._steps, outer
        return steps

    def _node(self, node: ir.Node) -> None:
        inputs = tuple(None if value is None else self._tensor(value) for value in node.inputs)
        attributes = self._attributes(node)
        function = self._model.functions.get(node.op_identifier())
        if function is not None and function not in self._calling:
            self._call(function, node, inputs, attributes)
            return
        bare = Step(node, self._owners(node), inputs, (), attributes)
        if node.op_type in CONTROL_FLOW and bare.op[0] == "":
            made, bodies, trips_known = _Control(self, bare).run()
            outputs = [self._best(value, tensor) for value, tensor in zip(node.outputs, made, strict=False)]
            outputs += [self._written(value) for value in node.outputs[len(outputs) :]]
        else:
            outputs, bodies, trips_known = self._outputs(bare), (), True
        self._known.update(zip(node.outputs, outputs, strict=True))
        modules = self._modules(node, bare.owners)
        self._steps.append(Step(node, bare.owners, inputs, tuple(outputs), attributes, bodies, trips_known, modules))

    def _tensor(self, value: ir.Value) -> Tensor:
        if value not in self._known:
            # An initializer that is also an input, a value from outside of a function, or no valid model.
            self._known[value] = self._initializer(value) if value.const_value is not None else self._written(value)
        return self._known[value]

    def _owners(self, node: ir.Node) -> tuple[str, ...]:
        """Owners in the call that runs: a node of a shared body names the modules of all calls."""
        owners = self._tagged.owners_of(node)
        if not self._around:
            return owners
        here = tuple(owner for owner in owners if any(tags.is_under(owner, path) for path in self._around))
        return here or owners or self._around

    def _modules(self, node: ir.Node, owners: tuple[str, ...]) -> frozenset[str]:
        """The modules in whose regions a node is when it has these owners."""
        work = self._tagged.work_of(node)
        return (work if work.owners == owners else self._tagged.calls.work(owners)).modules

    def _attributes(self, node: ir.Node) -> Mapping[str, ir.Attr]:
        if not any(attribute.is_ref() for attribute in node.attributes.values()):
            return node.attributes
        found = {}
        for name, attribute in node.attributes.items():
            if not attribute.is_ref():
                found[name] = attribute
            elif attribute.ref_attr_name in self._given:
                found[name] = ir.Attr(name, attribute.type, self._given[str(attribute.ref_attr_name)].value)
        return found

    def _call(
        self,
        function: ir.Function,
        node: ir.Node,
        inputs: Sequence[Tensor | None],
        attributes: Mapping[str, ir.Attr],
    ) -> None:
        saved = self._around, self._given, self._opsets
        self._around = self._owners(node) or self._around
        self._given = {**{n: a for n, a in function.attributes.items() if a.value is not None}, **attributes}
        self._opsets = {**self._opsets, **function.opset_imports}
        self._calling.append(function)
        for position, formal in enumerate(function.inputs):
            given = inputs[position] if position < len(inputs) else None
            self._known[formal] = given if given is not None else Tensor(str(formal.name), None, None)
        self._steps += self._graph(function)
        made = [self._tensor(value) for value in function.outputs]
        self._calling.pop()
        self._around, self._given, self._opsets = saved
        self._known.update(zip(node.outputs, made, strict=False))

    def body(self, graph: ir.Graph, inputs: Sequence[Tensor]) -> tuple[list[Step], list[Tensor]]:
        """Run a subgraph; its steps, and what it gives back."""
        self._known.update(zip(graph.inputs, inputs, strict=False))
        steps = self._graph(graph)
        return steps, [self._tensor(value) for value in graph.outputs]

    def _outputs(self, step: Step) -> list[Tensor]:
        """What a node without subgraphs makes."""
        node = step.node
        if node.op_type == "Constant" and step.op[0] == "":
            return [_constant((value.name or ""), step) for value in node.outputs]
        written = [self._written(value) for value in node.outputs]
        if not self._infer:
            return self._viewing(step, written)
        values = self._values(step)
        if values is not None:
            names = ((value.name or "") for value in node.outputs)
            return self._viewing(step, [_array(name, array) for name, array in zip(names, values, strict=True)])
        in_function = bool(self._calling)  # what a function's body says may be true of another call
        if all(tensor.shape is not None and tensor.dtype is not None for tensor in written) and not in_function:
            return self._viewing(step, written)
        inferred = self._inferred(step)
        return self._viewing(
            step,
            [
                Tensor(
                    tensor.name,
                    tensor.dtype or dtype,
                    (shape or tensor.shape) if in_function else (tensor.shape or shape),
                )
                if shape != () and tensor.shape != ()
                else Tensor(tensor.name, tensor.dtype or dtype, ())
                for tensor, (dtype, shape) in zip(written, inferred, strict=True)
            ],
        )

    def _values(self, step: Step) -> list[Any] | None:
        first = step.input(0)
        if step.op == ("", "Shape"):
            if first is None or first.shape is None:
                return None
            start, end = step.integer("start", 0), step.integer("end", len(first.shape))
            return [np.array(first.shape[start:end], dtype=np.int64)]
        if step.op == ("", "Size") and first is not None and first.shape is not None:
            return [np.array(first.elements, dtype=np.int64)]
        if any(tensor is not None and tensor.value is None for tensor in step.inputs):
            return None
        version = self._opsets.get(step.node.domain, self._opsets.get("", 0))
        proto = node_proto(step.node, step.attributes, step.inputs, len(step.node.outputs))
        return evaluate(proto, version, step.inputs)

    def _inferred(self, step: Step) -> list[tuple[ir.DataType | None, tuple[int, ...] | None]]:
        count = len(step.node.outputs)
        first = step.input(0)
        try:
            shape = contrib_shape(step)
        except (UnknownShapeError, ValueError, IndexError):  # IndexError, ValueError: no valid node
            shape = None
        if shape is not None:
            dtype = first.dtype if first is not None else None
            return [(dtype, shape), *((None, None),) * (count - 1)]
        if any(tensor is not None and tensor.shape is None for tensor in step.inputs):
            return [(None, None)] * count
        version = self._opsets.get(step.node.domain, self._opsets.get("", 0))
        proto = node_proto(step.node, step.attributes, step.inputs, count)
        return infer(proto, version, step.inputs)

    def _viewing(self, step: Step, made: list[Tensor]) -> list[Tensor]:
        first = step.input(0)
        if step.op[0] != "" or step.op[1] not in _VIEWS or first is None:
            return made
        return [Tensor(t.name, t.dtype or first.dtype, t.shape, "made", t.value, first) for t in made]

    def _best(self, value: ir.Value, made: Tensor) -> Tensor:
        """What a subgraph gave, under the name that the node gives it; the file's shape where that is not known."""
        written = self._written(value)
        shape = made.shape if made.shape is not None else written.shape
        return Tensor((value.name or ""), made.dtype or written.dtype, shape)

    def _written(self, value: ir.Value) -> Tensor:
        """A tensor as the file describes it, open sizes put in."""
        dtype = value.dtype if isinstance(value.type, ir.TensorType) else None
        if value.shape is None or (self._calling and not value.shape.is_static()):
            return Tensor((value.name or ""), dtype, None)
        sizes = []
        for dim in value.shape:
            size = dim if isinstance(dim, int) else self._size(dim)
            if size is None:
                return Tensor((value.name or ""), dtype, None)
            sizes.append(size)
        return Tensor((value.name or ""), dtype, tuple(sizes))

    def _size(self, dim: ir.SymbolicDim) -> int | None:
        if dim.value is None:
            return None
        sizes = self._bindings.sizes
        if dim.value in sizes:
            return sizes[dim.value]
        if dim.value.isidentifier():
            return None
        try:  # an expression: Min(512, sequence)
            found = dim.evaluate(dict(sizes)) if dim.free_symbols() <= set(sizes) else None
        except Exception:  # whatever sympy says of a text that is no expression
            return None
        return found if isinstance(found, int) and found >= 0 else None

    def _initializer(self, value: ir.Value) -> Tensor:
        tensor = value.const_value
        name = value.name or ""
        if tensor is None:
            return Tensor(name, value.dtype, None, "weight")
        shape = tuple(int(size) for size in tensor.shape.numpy())
        made = Tensor(name, tensor.dtype, shape, "weight")
        if isinstance(tensor, ir.ExternalTensor) or not self._infer or not _may_say_a_size(made):
            return made
        return Tensor(name, tensor.dtype, shape, "weight", np.asarray(tensor.numpy()))


class _Control:
    """A node with subgraphs, run by shapes.

    Args:
        run: The run that it is part of.
        step: The node with its inputs.
    """

    def __init__(self, run: _Runner, step: Step) -> None:
        self._run = run
        self._step = step

    def run(self) -> tuple[list[Tensor], tuple[Body, ...], bool]:
        """What it makes, what ran, and whether it is known how often."""
        kinds: Mapping[str, Callable[[], tuple[list[Tensor], tuple[Body, ...], bool]]] = {
            "If": self._if,
            "Loop": self._loop,
            "Scan": self._scan,
        }
        return kinds[self._step.node.op_type]()

    def _bodies(self) -> dict[str, ir.Graph]:
        graphs = {name: a for name, a in self._step.attributes.items() if a.type == ir.AttributeType.GRAPH}
        return {name: attribute.as_graph() for name, attribute in graphs.items()}

    def _if(self) -> tuple[list[Tensor], tuple[Body, ...], bool]:
        condition = self._step.input(0)
        decided = condition.value if condition is not None else None
        bodies, given = [], []
        for name, graph in self._bodies().items():
            if decided is not None and bool(decided.all()) != (name == "then_branch"):
                continue
            steps, outputs = self._run.body(graph, ())
            bodies.append(Body(name, steps, 1, (), outputs))
            given.append(outputs)
        made = [max(choice, key=lambda tensor: tensor.elements) for choice in zip(*given, strict=False)]
        return made, tuple(bodies), True

    def _loop(self) -> tuple[list[Tensor], tuple[Body, ...], bool]:
        graph = self._bodies().get("body")
        if graph is None:
            return [], (), False
        most, condition = self._step.input(0), self._step.input(1)
        known = most is not None and most.value is not None and most.value.size == 1
        trips = int(most.value.reshape(-1)[0]) if known and most is not None and most.value is not None else 1
        if condition is not None and condition.value is not None and not condition.value.all():
            known, trips = True, 0
        if not 0 <= trips < 2**31:  # "for ever", until the condition says stop
            known, trips = False, 1
        state = [_forget(tensor) for tensor in self._step.inputs[2:]]
        counter = Tensor("iteration", ir.DataType.INT64, ())
        again = Tensor("condition", ir.DataType.BOOL, ())
        given = (counter, again, *state)
        steps, outputs = self._run.body(graph, given)
        made = outputs[1 : 1 + len(state)] + [_stacked(tensor, trips) for tensor in outputs[1 + len(state) :]]
        return made, (Body("body", steps, trips, given, outputs),), known

    def _scan(self) -> tuple[list[Tensor], tuple[Body, ...], bool]:
        graph, count = self._bodies().get("body"), self._step.integer("num_scan_inputs", 1)
        if graph is None or not 0 < count <= len(self._step.inputs):
            return [], (), False
        states = [_forget(tensor) for tensor in self._step.inputs[: len(self._step.inputs) - count]]
        axes = self._step.integers("scan_input_axes") or (0,) * count
        scanned = [tensor or Tensor("", None, None) for tensor in self._step.inputs[len(states) :]]
        shapes = [tensor.shape for tensor in scanned]
        trips = next((shape[axis] for shape, axis in zip(shapes, axes, strict=True) if shape), None)
        slices = [_without_axis(tensor, axis) for tensor, axis in zip(scanned, axes, strict=True)]
        given = (*states, *slices)
        steps, outputs = self._run.body(graph, given)
        made = outputs[: len(states)]
        out_axes = self._step.integers("scan_output_axes") or (0,) * len(outputs)
        made += [_stacked(t, trips or 1, axis) for t, axis in zip(outputs[len(states) :], out_axes, strict=False)]
        return made, (Body("body", steps, trips or 1, given, outputs),), trips is not None


def _forget(tensor: Tensor | None) -> Tensor:
    """A tensor that is another in each run of a body, of the same shape."""
    return Tensor("", None, None) if tensor is None else Tensor(tensor.name, tensor.dtype, tensor.shape)


def _without_axis(tensor: Tensor, axis: int) -> Tensor:
    if tensor.shape is None:
        return _forget(tensor)
    axis %= max(1, len(tensor.shape))
    return Tensor(tensor.name, tensor.dtype, tensor.shape[:axis] + tensor.shape[axis + 1 :])


def _stacked(tensor: Tensor, trips: int, axis: int = 0) -> Tensor:
    if tensor.shape is None:
        return _forget(tensor)
    axis %= len(tensor.shape) + 1
    return Tensor(tensor.name, tensor.dtype, (*tensor.shape[:axis], trips, *tensor.shape[axis:]))


def _constant(name: str, step: Step) -> Tensor:
    """What a Constant node gives."""
    attribute = step.attributes.get("value")
    if attribute is not None and attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        made = Tensor(name, tensor.dtype, tuple(int(size) for size in tensor.shape.numpy()), "constant")
        if isinstance(tensor, ir.ExternalTensor) or not _may_say_a_size(made):
            return made
        return _array(name, np.asarray(tensor.numpy()), "constant")
    for key in _CONSTANT_VALUES:
        if key in step.attributes:
            dtype = np.float32 if "float" in key else np.int64
            return _array(name, np.asarray(step.attributes[key].value, dtype=dtype), "constant")
    return Tensor(name, None, None, "constant")


def _may_say_a_size(tensor: Tensor) -> bool:
    """Whether a constant is one that shapes may be computed from: whole numbers, and single or few other ones."""
    if tensor.dtype in (None, ir.DataType.STRING, ir.DataType.UNDEFINED):
        return False
    whole = tensor.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
    return tensor.elements <= (MOST_ELEMENTS if whole else 16)


def _array(name: str, array: Any, origin: Any = "made") -> Tensor:
    dtype = ir.DataType.from_numpy(array.dtype)
    return Tensor(name, dtype, tuple(array.shape), origin, array)
