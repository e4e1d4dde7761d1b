"""The weights that can be pruned: initializers that products multiply with, and tables that are looked up.

An initializer counts if a MatMul, Gemm, Conv, recurrent layer or Gather reads it, directly or through operators that
only change its layout or type. It belongs to the modules of these nodes. Biases, factors of normalisations and position
embeddings that are added are not among them, as in ``torch.nn.utils.prune``, which is applied to ``weight``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from htp_export.format import tags
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import operator_of

__all__ = ["Copy", "Use", "Weight", "changed_when_written", "uses_of", "weights_of"]

_LAST_TWO = (-2, -1)
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
"""Operator → place of a weight among its inputs → the axis over which it is summed, and the axis of its results.

A table that is looked up has its last axis for both.
"""

_TRANSPOSED = ("transA", "transB")


@dataclass(frozen=True)
class Use:
    """One product that reads a weight.

    Attributes:
        node: The product.
        place: The place among its inputs.
        value: The initializer.
        reduced: The axis of the initializer over which the product sums.
        channels: The axis of the initializer that the results have.
    """

    node: ir.Node
    place: int
    value: ir.Value
    reduced: int
    channels: int


@dataclass(frozen=True)
class Copy:
    """An initializer with the numbers of another one.

    Attributes:
        value: The initializer.
        transposed: Whether they are transposed.
    """

    value: ir.Value
    transposed: bool


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight, with the copies of it that an exporter made for tied parameters.

    Attributes:
        value: The initializer.
        uses: The products that read it or a copy, in order.
        copies: Other initializers with the same numbers.
    """

    value: ir.Value
    uses: tuple[Use, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def name(self) -> str:
        """The name of the initializer."""
        return str(self.value.name)

    @property
    def tensor(self) -> ir.TensorProtocol:
        """Its numbers."""
        tensor = self.value.const_value
        assert tensor is not None
        return tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape.numpy())

    def owners(self, tagged: TaggedModel) -> tuple[str, ...]:
        """The modules whose nodes read it or a copy, in order."""
        return tuple(dict.fromkeys(path for use in self.uses for path in tagged.owners_of(use.node)))

    @property
    def reduced(self) -> int:
        """The axis over which products sum, from 0."""
        return self.uses[0].reduced


def changed_when_written(
    tensor: ir.TensorProtocol, change: Callable[[Array], Array], shape: Sequence[int] | None = None
) -> ir.LazyTensor:
    """A tensor with other numbers of the same type; they are computed when they are read, as when a file is written.

    Args:
        tensor: The tensor.
        change: Numbers → other numbers.
        shape: The shape of these; None for the same.

    Examples:
        >>> changed_when_written(ir.tensor(np.float32([1, 2])), lambda array: array[:1] * 3, [1]).numpy().tolist()
        [3.0]
    """

    def changed() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(change(tensor.numpy())), dtype=tensor.dtype)

    sizes = tensor.shape.numpy() if shape is None else shape
    return ir.LazyTensor(changed, tensor.dtype, ir.Shape(sizes), name=tensor.name)


def uses_of(tagged: TaggedModel, node: ir.Node) -> Iterator[Use]:
    """The weights that a node multiplies with, or looks up.

    Args:
        tagged: The model.
        node: Any node.
    """
    for place, axes in _PRODUCTS.get(operator_of(node), {}).items():
        found = _source(tagged, node.inputs[place]) if place < len(node.inputs) else None
        if found is None:
            continue
        value, order = found
        flag = node.attributes.get_int(_TRANSPOSED[place], 0) if place < 2 else 0
        turned = tuple(reversed(axes)) if flag and axes in ((0, 1), (1, 0), _LAST_TWO, (-1, -2)) else axes
        reduced, channels = (order[axis] for axis in turned)
        yield Use(node, place, value, reduced, channels)


def _source(tagged: TaggedModel, value: ir.Value | None) -> tuple[ir.Value, Sequence[int]] | None:
    """The initializer that a value is made of, and for each axis of the value the axis of the initializer."""
    turns: list[Sequence[int]] = []
    while value is not None and (maker := value.producer()) is not None:
        if maker.op_type == "Transpose" and not maker.domain:
            turns.append(maker.attributes.get_ints("perm", ()))
        elif maker.op_type not in ("Cast", "CastLike", "Identity"):
            return None
        value = maker.inputs[0]
    source = None if value is None else tagged.index.initializer(value)
    tensor = None if source is None else source.const_value
    if source is None or tensor is None or not tensor.dtype.is_floating_point() or tensor.dtype.bitwidth < 16:
        return None
    rank = len(tensor.shape)
    if rank < 2:
        return None
    order: Sequence[int] = range(rank)
    for turn in reversed(turns):
        order = [order[axis] for axis in (turn or range(rank - 1, -1, -1))]
    return source, order


def weights_of(tagged: TaggedModel) -> list[Weight]:
    """The weights of a model that can be pruned, each once, in the order in which they are first read.

    Args:
        tagged: The model, without functions. Values are only read of weights that may be copies of a tied parameter.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
        >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> [(weight.name, weight.shape, weight.reduced) for weight in weights_of(tagged)]
        [('0.weight', (3, 4), 1), ('2.weight', (2, 3), 1)]
    """
    uses: dict[ir.Value, list[Use]] = {}
    for node in tagged.nodes:
        for use in uses_of(tagged, node):
            uses.setdefault(use.value, []).append(use)
    weights = {value: Weight(value, tuple(read)) for value, read in uses.items()}
    for first, second in _tied_pairs(tagged, weights):
        if first in weights and second in weights and (copy := _copy_of(first, second)):
            one, other = weights[first], weights.pop(second)
            weights[first] = Weight(one.value, (*one.uses, *other.uses), (*one.copies, copy))
    return list(weights.values())


def _tied_pairs(tagged: TaggedModel, weights: Mapping[ir.Value, Weight]) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Initializers of modules whose parameters PyTorch tied, of the same sizes."""
    by_owner: dict[str, list[ir.Value]] = {}
    for value, weight in weights.items():
        for path in weight.owners(tagged):
            by_owner.setdefault(path, []).append(value)
    for path, module in (tagged.parameters or {}).items():
        for first in module.tied.values():
            for one in by_owner.get(tags.parent_path(first) or "", ()):
                for other in by_owner.get(path, ()):
                    if one is not other and _sizes(one) == _sizes(other):
                        yield one, other


def _sizes(value: ir.Value) -> list[int]:
    return sorted(value.const_value.shape.numpy()) if value.const_value is not None else []


def _copy_of(first: ir.Value, second: ir.Value) -> Copy | None:
    assert first.const_value is not None
    assert second.const_value is not None
    one, other = first.const_value.numpy(), second.const_value.numpy()
    if np.array_equal(one, other):
        return Copy(second, transposed=False)
    return Copy(second, transposed=True) if one.ndim == 2 and np.array_equal(one.T, other) else None
