"""Channels that have to be cut together, found by following one axis of a weight through the graph.

Each index of the axis has a label. Labels are propagated to the axes that have the same channels;
labels that meet at one index are joined. A Reshape that splits an axis into heads joins the labels
of each head.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.prune.coupled_axes import (
    Axis,
    Group,
    changed_axes,
    gathered,
    groups_of,
    slice_start,
)
from htp_export.capabilities.prune.reshaped_axes import (
    blocks,
    period_of,
    periods_of,
    rows_at,
    spread_labels,
)
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import RESHAPING, subgraphs

_MOST_ATTEMPTS = 64
"""Attempts to split channels. Attention takes 2 or 3; each walks over all nodes with the
channels."""


class StopError(Exception):
    """An axis cannot be cut.

    The message names the node or tensor. For callers in this folder only.
    """


class Coupling:
    """Axes of tensors and the labels of their channels; -1 for an index that no channel reaches.

    An axis with an open dimension, ``4*batch``, has labels for one period of it. ``choices``:
    Reshape → which of the axes that it could split into have the channels. ``heads``: whether the
    channels are to be attention heads, which no product of computed tensors sums over.
    """

    def __init__(
        self, tagged: TaggedModel, choices: dict[ir.Node, int], *, heads: bool = False
    ) -> None:
        self._tagged, self._shapes, self._heads = tagged, tagged.inferred, heads
        self._choices, self.alternatives = choices, dict[ir.Node, int]()
        self.labels: dict[Axis, Array] = {}
        self._joined: list[int] = []
        self._waiting: deque[Axis] = deque()

    def follow(self, seed: Axis) -> None:
        """Find all axes that have the channels of an axis.

        `StopError` if one of them cannot be cut.
        """
        size = self._size(seed, "")
        self._joined = list(range(size))
        self._mark(seed, np.arange(size), None)
        while self._waiting:
            axis = self._waiting.popleft()
            value = axis[0]
            for node in dict.fromkeys((value.producer(), *(use.node for use in value.uses()))):
                if node is not None:
                    self._cross(node, axis)
        if size > 1 and not self.groups:
            raise StopError(
                "each of its channels, such as the queries of a matrix, is all that a tensor holds"
            )

    def roots(self, axis: Axis) -> Array:
        """The representative label of each index of an axis; -1 for none."""
        labels = self.labels[axis]
        return np.array([self.root(int(label)) if label >= 0 else -1 for label in labels])

    def root(self, label: int) -> int:
        """The representative of a label and of all labels that were joined with it."""
        while self._joined[label] != label:
            self._joined[label] = self._joined[self._joined[label]]
            label = self._joined[label]
        return label

    @cached_property
    def axes(self) -> list[frozenset[int]]:
        """The groups of each axis that has no other indices: one of these groups has to stay."""
        found = dict[frozenset[int], None]()
        for labels in self.labels.values():
            if (labels >= 0).all():
                found[frozenset(self.root(label) for label in set(labels.tolist()))] = None
        return list(found)

    @cached_property
    def groups(self) -> list[int]:
        """The channels that can be cut: a label for each group that is not all of an axis."""
        whole_axes = {root for axis in self.axes if len(axis) == 1 for root in axis}
        return sorted(self.roots_of_all - whole_axes)

    @cached_property
    def roots_of_all(self) -> frozenset[int]:
        """A label for each group of channels, groups that cannot be cut included."""
        return frozenset(self.root(label) for label in range(len(self._joined)))

    @property
    def is_joined(self) -> bool:
        """Whether some channels can only be cut together, as the channels of an attention head."""
        return any(self.root(label) != label for label in range(len(self._joined)))

    def _mark(self, axis: Axis, labels: Array, node: ir.Node | None) -> None:
        """Add labels to an axis; ``node`` is the node that they were propagated through."""
        value, position = axis
        if value.is_graph_input():
            raise StopError(f"input {value.name!r} of the model has its channels{self._at(node)}")
        if value.is_graph_output():
            raise StopError(f"its channels reach output {value.name!r}")
        if value.graph is not self._tagged.model.graph:
            raise StopError(f"its channels reach a branch or loop{self._at(node)}")
        present, shape = self.labels.get(axis), self._shapes.shape(value)
        sizes = (shape[position], period_of(shape[position])) if shape is not None else ()
        if len(labels) not in sizes or (present is not None and len(present) != len(labels)):
            raise StopError(f"the sizes of {value.name!r} do not fit{self._at(node)}")
        if present is None:
            self.labels[axis] = np.array(labels)
            self._waiting.append(axis)
            return
        both = (present >= 0) & (labels >= 0)
        for one, other in zip(present[both].tolist(), labels[both].tolist(), strict=True):
            self._join(one, other)
        fresh = (present < 0) & (labels >= 0)
        if fresh.any():
            present[fresh] = labels[fresh]
            self._waiting.append(axis)

    def _join(self, one: int, other: int) -> None:
        first, second = sorted((self.root(one), self.root(other)))
        self._joined[second] = first

    def _size(self, axis: Axis, where: str) -> int:
        value, position = axis
        shape = self._shapes.shape(value)
        size = None if shape is None else shape[position]
        if not isinstance(size, int):
            raise StopError(f"the size of {value.name!r} is not known{where}")
        return size

    def _at(self, node: ir.Node | None) -> str:
        if node is None:
            return ""
        owners = ", ".join(map(repr, self._tagged.owners_of(node))) or "no module"
        return f", at {node.op_type} {node.name!r} of {owners}"

    def _cross(self, node: ir.Node, axis: Axis) -> None:
        """Propagate the labels of an axis through a node."""
        # each kind of node has an early exit, the nodes without a rule included
        value, position = axis
        if node.graph is not self._tagged.model.graph or any(subgraphs(node)):
            raise StopError(f"its channels reach a branch or loop{self._at(node)}")
        operator = "" if node.domain else node.op_type
        if operator in RESHAPING:
            # other inputs are sizes and axes, which are no channels
            if value in (node.inputs[0], node.outputs[0]):
                self._cross_reshape(node, axis)
            return
        if operator in ("Concat", "Split", "Slice"):
            if position in (changed_axes(node, self._shapes) or ()):
                self._cross_parts(node, axis)
                return
        elif operator in ("Gather", "GatherND") and self._cross_gather(node, axis):
            return
        groups = [group for group in groups_of(node, self._shapes) if axis in group]
        if not groups:
            raise StopError(f"its channels cannot be cut{self._at(node)}")
        is_product = node.op_type in ("MatMul", "Einsum")
        for group in groups:
            if self._heads and is_product and self._sums(node, group):
                raise StopError(f"its channels are within heads{self._at(node)}")
            self._cross_group(node, axis, group)

    def _cross_group(self, node: ir.Node, axis: Axis, group: Group) -> None:
        """Propagate the labels of an axis to the group, with the labels of each channel joined."""
        times, width = group[axis]
        labels = self.labels[axis]
        if times * width > 1:
            size = self._size(axis, self._at(node))
            tiles = labels.reshape(times, size // (times * width), width)
            labels = self._one_of_each(rows_at(tiles, 1))
        for other, (repeats, neighbours) in group.items():
            is_done, shape = other == axis and times * width == 1, self._shapes.shape(other[0])
            is_broadcast = shape is not None and shape[other[1]] == 1
            if not is_done and not is_broadcast:
                self._mark(other, np.tile(np.repeat(labels, neighbours), repeats), node)

    def _sums(self, node: ir.Node, group: Group) -> bool:
        """Whether a node sums the products of computed tensors over these axes."""
        constants = self._tagged.index.constant
        weights = set(self._tagged.model.graph.initializers.values())
        computed = {value for value, _ in group} - constants - weights
        return len(computed) > 1 and computed.isdisjoint(node.outputs)

    def _cross_parts(self, node: ir.Node, axis: Axis) -> None:
        """Propagate labels between the whole tensor of a Concat, Split or Slice, and its parts."""
        whole, parts = self._parts(node, axis[1])
        for start, part in parts:
            size = self._size((part, axis[1]), self._at(node))
            if axis[0] is whole:
                labels = self.labels[axis][start : start + size]
                if (labels >= 0).any():
                    self._mark((part, axis[1]), labels, node)
            elif axis[0] is part:
                labels = np.full(self._size((whole, axis[1]), self._at(node)), -1)
                labels[start : start + size] = self.labels[axis]
                self._mark((whole, axis[1]), labels, node)

    def _parts(self, node: ir.Node, axis: int) -> tuple[ir.Value, list[tuple[int, ir.Value]]]:
        """The whole tensor of a Concat, Split or Slice, and its parts with their first index."""
        if node.op_type == "Slice":
            source = node.inputs[0]
            assert source is not None
            size = self._size((source, axis), self._at(node))
            start = slice_start(node, axis, self._shapes, size)
            if start is None:
                raise StopError(f"its channels are sliced by computed indices{self._at(node)}")
            return source, [(start, node.outputs[0])]
        if node.op_type == "Concat":
            whole, values = node.outputs[0], [value for value in node.inputs if value is not None]
        else:
            whole, values = node.inputs[0], list(node.outputs)  # type: ignore[assignment]
        sizes = [self._size((value, axis), self._at(node)) for value in values]
        return whole, list(zip([0, *itertools.accumulate(sizes)], values, strict=False))

    def _cross_gather(self, node: ir.Node, axis: Axis) -> bool:
        """Propagate labels through constant indices; False if another axis is gathered.

        The indices are positions of channels in the table. Of several axes of indices, the channels
        are the one in which labels differ.
        """
        indexed = gathered(node, self._shapes)
        if indexed is None:
            return False
        table_axis, indices = indexed
        source: Axis = (node.inputs[0], table_axis)  # type: ignore[assignment]
        results = [(node.outputs[0], table_axis + k) for k in range(indices.ndim)]
        if axis != source and axis not in results:
            return False
        size = self._size(source, self._at(node))
        if axis == source:
            spread = self.labels[axis][indices]
            chosen = self._choose(node, spread, results)
            self._mark(results[chosen], self._one_of_each(rows_at(spread, chosen)), node)
        else:
            chosen = results.index(axis)
        labels = np.full(size, -1)
        returned = spread_labels(self.labels[results[chosen]], chosen, indices.shape)
        for index, label in zip(indices.ravel().tolist(), returned.ravel().tolist(), strict=True):
            if label >= 0 and labels[index] >= 0:
                self._join(int(labels[index]), label)
            labels[index] = max(label, labels[index])
        self._mark(source, labels, node)
        return True

    def _one_of_each(self, rows: Array) -> Array:
        """A label for each row of labels, which are joined; -1 for a row without labels."""
        for row in rows:
            reached = row[row >= 0].tolist()
            for label in reached[1:]:
                self._join(reached[0], label)
        labels: Array = rows.max(axis=1)
        return labels

    def _cross_reshape(self, node: ir.Node, axis: Axis) -> None:
        source, position = axis
        target = node.outputs[0] if source is node.inputs[0] else node.inputs[0]
        first, second = self._shapes.shape(source), self._shapes.shape(target)
        if target is None or first is None or second is None:
            raise StopError(f"a shape is not known{self._at(node)}")
        block = next((pair for pair in blocks(first, second) if position in pair[0]), None)
        if block is None:
            raise StopError(f"its channels cannot be followed{self._at(node)}")
        before, after = block
        if not after:  # an axis of size 1 that the target does not have
            return
        if len(before) == len(after) == 1:
            self._mark((target, after[0]), self.labels[axis], node)
            return
        old = periods_of(first[k] for k in before)
        new = periods_of(second[k] for k in after)
        if old is None or new is None:
            raise StopError(f"its channels are merged with an open dimension{self._at(node)}")
        axes = [(source, k) for k in before], [(target, k) for k in after]
        self._regroup(node, axis, axes, (old, new))

    def _regroup(
        self,
        node: ir.Node,
        axis: Axis,
        axes: Sequence[Sequence[Axis]],
        sizes: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """Propagate the labels of an axis to one of the axes into which it and others are reshaped.

        ``axes`` and ``sizes``: of the axes before the Reshape, then after it.
        """
        place = axes[0].index(axis)
        if len(self.labels[axis]) != sizes[0][place] or math.prod(sizes[0]) != math.prod(sizes[1]):
            raise StopError(f"its channels are merged with an open dimension{self._at(node)}")
        spread = spread_labels(self.labels[axis], place, sizes[0]).reshape(sizes[1])
        chosen = self._choose(node, spread, axes[1])
        labels = self._one_of_each(rows_at(spread, chosen))
        self._mark(axes[1][chosen], labels, node)
        returned = rows_at(spread_labels(labels, chosen, sizes[1]).reshape(sizes[0]), place)
        # of a head that is reached in part, the other channels have to be cut, too
        self._mark(axis, returned.max(axis=1), node)

    def _choose(self, node: ir.Node, spread: Array, axes: Sequence[Axis]) -> int:
        """Return the position of the axis, among those that a Reshape splits one into, with the channels.

        An axis that already has labels is taken. Otherwise, each axis along which labels differ can
        have the channels; `couple` tries these in turn, by ``alternatives`` and ``choices``.
        """
        for position, axis in enumerate(axes):
            if axis in self.labels:
                return position
        candidates: list[int] = []
        for position in range(len(axes)):
            label_sets = {self._roots_in(row) for row in rows_at(spread, position)}
            if len(label_sets) > 1:
                candidates.append(position)
        if not candidates:
            raise StopError(f"its channels would all be cut together{self._at(node)}")
        self.alternatives[node] = len(candidates)
        return candidates[min(self._choices.get(node, 0), len(candidates) - 1)]

    def _roots_in(self, labels: Array) -> frozenset[int]:
        return frozenset(map(self.root, labels[labels >= 0].tolist()))


def couple(tagged: TaggedModel, seed: Axis, *, heads: bool = False) -> Coupling:
    """Find all axes that have the channels of an axis.

    A Reshape may split channels in several ways, such as into queries, keys and values, and heads.
    The first way in which all channels can be cut is used; if there is none, the way in which most
    channels can.

    Raises:
        StopError: The channels cannot be cut: an input or output has them, or a node has no rule.
    """
    choices, first_error = dict[ir.Node, int](), None
    best: Coupling | None = None
    for _ in range(_MOST_ATTEMPTS):
        coupling = Coupling(tagged, choices, heads=heads)
        try:
            coupling.follow(seed)
        except StopError as error:
            first_error = first_error or error
        else:
            if len(coupling.groups) == len(coupling.roots_of_all):
                return coupling
            if best is None or len(coupling.groups) > len(best.groups):
                best = coupling
        next_choices = _next_choices(coupling, choices)
        if next_choices is None:
            break
        choices = next_choices
    if best is not None:
        return best
    raise first_error or StopError("its channels can be split in too many ways")


def _next_choices(coupling: Coupling, choices: Mapping[ir.Node, int]) -> dict[ir.Node, int] | None:
    """The choices with the last one that has an alternative changed; None if there is none."""
    nodes = list(coupling.alternatives)
    while nodes and choices.get(nodes[-1], 0) + 1 >= coupling.alternatives[nodes[-1]]:
        nodes.pop()
    if not nodes:
        return None
    following = {node: choices.get(node, 0) for node in nodes}
    following[nodes[-1]] += 1
    return following
