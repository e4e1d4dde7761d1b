"""Products and their weights: nodes that multiply by a stored tensor or look up its rows; the axes.

A stored tensor is a weight if such a node reads it, directly or through operators that change only
its layout or type. Biases, factors of normalizations and added embeddings are not, as in
``torch.nn.utils.prune``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.recipes import Recipe
from htp_export.model.recipes import recorded
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import is_standard, operator_of
from htp_export.weights.parameter_places import WeightSources
from htp_export.weights.storing import numbers_of

_Array = npt.NDArray[Any]

_LAST_TWO = (-2, -1)  # the axis over which a product sums, and the axis of its results
_PRODUCTS: Mapping[str, Mapping[int, tuple[int, int]]] = {
    "MatMul": {1: _LAST_TWO, 0: (-1, -2)},
    "com.microsoft::FusedMatMul": {1: _LAST_TWO, 0: (-1, -2)},
    "Gemm": {1: (0, 1), 0: (1, 0)},
    "com.microsoft::FusedGemm": {1: (0, 1), 0: (1, 0)},
    "com.microsoft::GemmFloat8": {1: (0, 1), 0: (1, 0)},
    "Conv": {1: (1, 0)},
    "com.microsoft::FusedConv": {1: (1, 0)},
    "ConvTranspose": {1: (0, 1)},
    "LSTM": {1: (2, 1), 2: (2, 1)},
    "GRU": {1: (2, 1), 2: (2, 1)},
    "RNN": {1: (2, 1), 2: (2, 1)},
    "com.microsoft::Attention": {1: (0, 1)},
    "Gather": {0: (-1, -1)},
}
"""Operator → position of a weight among its inputs → the axis of the sum, and that of the results.

For a table of a lookup, both are its last axis.
"""

_TRANSPOSED = ("transA", "transB")
_KEEPING = ("Transpose", "Cast", "CastLike", "Identity")
"""Operators between a weight and its product that keep each element."""

_OF_ONNX_RUNTIME = ("FusedMatMul", "MatMulNBits", "DynamicQuantizeMatMul")
LINEAR = frozenset(("MatMul", "Gemm", *(f"com.microsoft::{name}" for name in _OF_ONNX_RUNTIME)))
"""Operators of a linear layer: their second input is its matrix, also one of integers."""


def weight_place(node: ir.Node) -> int:
    """The position of the weight among the inputs of a product, a convolution, or a ``Gather``."""
    return next(iter(_PRODUCTS.get(operator_of(node), (1,))))


def weight_axes(node: ir.Node, place: int) -> tuple[int, int] | None:
    """The axis of an input over which a node sums, and that of the results; None for no product.

    Examples:
        >>> gemm = ir.node("Gemm", [ir.val("x"), ir.val("weight")], {"transB": 1})
        >>> weight_axes(gemm, 1), weight_axes(gemm, 2)
        ((1, 0), None)
    """
    axes = _PRODUCTS.get(operator_of(node), {}).get(place)
    if axes in ((0, 1), (1, 0), _LAST_TWO, (-1, -2)) and place < len(_TRANSPOSED):
        return axes[::-1] if node.attributes.get_int(_TRANSPOSED[place], 0) else axes
    return axes


def is_matrix_product(node: ir.Node) -> bool:
    """Whether a node is a ``MatMul``, or a ``Gemm`` that only adds a bias to one."""
    if is_standard(node, "Gemm"):
        scaled = any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta"))
        return not scaled and not node.attributes.get_int("transA", 0)
    return is_standard(node, "MatMul")


@dataclass(frozen=True)
class Product:
    """A node that multiplies by a weight, or looks up its rows.

    Attributes:
        node: The node.
        place: The position of the weight among its inputs.
        value: The stored tensor of the weight: an initializer, or the output of a ``Constant``.
        reduced: The axis of the stored tensor over which the node sums.
        channels: The axis of the stored tensor that the results have.
        how: The operations from the stored tensor to the weight, see ``WeightSource.how``.
    """

    node: ir.Node
    place: int
    value: ir.Value
    reduced: int
    channels: int
    how: tuple[str, ...] = ()

    @property
    def activation(self) -> ir.Value | None:
        """The other factor of the product; None for a table."""
        if self.node.op_type == "Gather":
            return None
        return self.node.inputs[1 if self.place == 0 else 0]


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight, with the copies of it that an exporter created for tied parameters.

    Attributes:
        value: The stored tensor: an initializer, or the output of a ``Constant``.
        uses: The products that read it or a copy, in order.
        copies: Other stored tensors with the same numbers → whether these are transposed.
    """

    value: ir.Value
    uses: tuple[Product, ...]
    copies: Mapping[ir.Value, bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.value.name)

    @property
    def tensor(self) -> ir.TensorProtocol:
        return numbers_of(self.value)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape.numpy())

    def owners(self, tagged: TaggedModel) -> tuple[str, ...]:
        """The modules whose nodes read it or a copy, in order."""
        paths = dict.fromkeys(path for use in self.uses for path in tagged.owners_of(use.node))
        return tuple(paths)

    @property
    def reduced(self) -> int:
        """The axis over which products sum, from 0."""
        return self.uses[0].reduced


def changed_when_written(
    tensor: ir.TensorProtocol,
    change: Callable[[_Array], _Array],
    recipe: Recipe,
    shape: Sequence[int] | None = None,
) -> ir.TensorProtocol:
    """A tensor with other numbers of the same type, computed when it is read, or a file is written.

    ``recipe``: How the new numbers are computed from parameters.

    Examples:
        >>> changed_when_written(ir.tensor(np.float32([1, 2])), lambda array: array[:1] * 3, "w", [1]).numpy().tolist()
        [3.0]
    """

    def changed() -> ir.TensorProtocol:
        # a transpose is a view: who writes it makes it contiguous, a part at a time
        return ir.Tensor(np.asarray(change(tensor.numpy())), dtype=tensor.dtype)

    sizes = tensor.shape.numpy() if shape is None else shape
    return recorded(ir.LazyTensor(changed, tensor.dtype, ir.Shape(sizes), name=tensor.name), recipe)


def products_of(tagged: TaggedModel, nodes: Iterable[ir.Node]) -> Iterator[Product]:
    """The products among nodes, one for each floating-point weight that a node reads."""
    sources = WeightSources(tagged)
    for node in nodes:
        for place in _PRODUCTS.get(operator_of(node), ()):
            value = node.inputs[place] if place < len(node.inputs) else None
            axes = weight_axes(node, place)
            if value is None or axes is None:
                continue
            stored = _source(sources, value)
            if stored is not None:
                source, order, how = stored
                yield Product(node, place, source, order[axes[0]], order[axes[1]], how)


def _source(
    sources: WeightSources, value: ir.Value
) -> tuple[ir.Value, Sequence[int], tuple[str, ...]] | None:
    """The stored tensor of a weight, its axes in the order of the weight, and the operations."""
    found = sources.of(value)
    if len(found) != 1:
        return None
    [source] = found
    tensor = numbers_of(source.tensor)
    if not tensor.dtype.is_floating_point() or tensor.dtype.bitwidth < 16:
        return None
    rank = len(tensor.shape)
    if rank < 2 or any(step.op_type not in _KEEPING for step in source.steps):
        return None
    order: Sequence[int] = range(rank)
    for step in source.steps:
        if step.op_type == "Transpose":
            perm = step.attributes.get_ints("perm", ()) or range(rank - 1, -1, -1)
            order = [order[axis] for axis in perm]
    return source.tensor, order, source.how


def readers_of(value: ir.Value) -> Iterator[ir.Node | None]:
    """The consumers of a value, also in another layout or type; None for an output of the model."""
    if value.is_graph_output():
        yield None
    for node, place in value.uses():
        if is_standard(node, *_KEEPING) and place == 0:
            yield from readers_of(node.outputs[0])
        else:
            yield node


def weights_of(tagged: TaggedModel) -> list[Weight]:
    """The weights of a model without functions, each once, in the order of their first consumers.

    Values are read only for weights that may be copies of a tied parameter.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
        >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> [(weight.name, weight.shape, weight.reduced) for weight in weights_of(tagged)]
        [('0.weight', (3, 4), 1), ('2.weight', (2, 3), 1)]
    """
    uses: dict[ir.Value, list[Product]] = {}
    for product in products_of(tagged, tagged.nodes):
        uses.setdefault(product.value, []).append(product)
    weights = {value: Weight(value, tuple(read)) for value, read in uses.items()}
    for first, second in _tied_pairs(tagged, weights):
        if first not in weights or second not in weights:
            continue
        one, other = weights[first], weights[second]
        if sorted(one.shape) != sorted(other.shape):
            continue
        tensor, copy = one.tensor.numpy(), other.tensor.numpy()
        is_same = np.array_equal(tensor, copy)
        if is_same or (tensor.ndim == 2 and np.array_equal(tensor.T, copy)):
            del weights[second]
            copies = {**one.copies, second: not is_same}
            weights[first] = Weight(one.value, (*one.uses, *other.uses), copies)
    return list(weights.values())


def _tied_pairs(
    tagged: TaggedModel, weights: Mapping[ir.Value, Weight]
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Stored tensors of modules whose parameters PyTorch tied."""
    by_owner: dict[str, list[ir.Value]] = {}
    for value, weight in weights.items():
        for path in weight.owners(tagged):
            by_owner.setdefault(path, []).append(value)
    for parameter in (tagged.declared or {}).values():
        if not parameter.tied:
            continue
        for one in by_owner.get(tags.parent_path(parameter.tied) or "", ()):
            for other in by_owner.get(parameter.module, ()):
                if one is not other:
                    yield one, other
