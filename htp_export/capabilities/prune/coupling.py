"""Channels that have to be cut together: found by following one axis of a weight through the graph.

Each index of the axis has a label. Labels are carried along the axes that have the same channels;
where two meet, they are joined. A Reshape that splits an axis into heads joins the labels of each
head.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
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

_MOST_ATTEMPTS = 64  # attention takes 2 or 3; each walks over all that has the channels


class StopError(Exception):
    """An axis cannot be cut; the message has the node or tensor that stops it. For callers in this folder only."""


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
        """Find everything that has the channels of an axis; `StopError` if they reach what cannot be cut."""
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
        """The label of each index of an axis, the same for channels that were joined; -1 for none."""
        labels = self.labels[axis]
        return np.array([self.root(int(label)) if label >= 0 else -1 for label in labels])

    def root(self, label: int) -> int:
        """The label that stands for a label and all that were joined with it."""
        while self._joined[label] != label:
            self._joined[label] = self._joined[self._joined[label]]
            label = self._joined[label]
        return label

    @cached_property
    def axes(self) -> list[frozenset[int]]:
        """For each axis of which channels are all that there is, their groups: one of them has to stay."""
        found = dict[frozenset[int], None]()
        for labels in self.labels.values():
            if (labels >= 0).all():
                found[frozenset(self.root(label) for label in set(labels.tolist()))] = None
        return list(found)

    @cached_property
    def groups(self) -> list[int]:
        """The channels that can be cut: a label for each group, without those that are all of an axis."""
        return sorted(
            self.roots_of_all - {root for axis in self.axes if len(axis) == 1 for root in axis}
        )

    @cached_property
    def roots_of_all(self) -> frozenset[int]:
        """A label for each group of channels, those that cannot be cut included."""
        return frozenset(self.root(label) for label in range(len(self._joined)))

    @property
    def is_joined(self) -> bool:
        """Whether some channels can only be cut together, as those of a head."""
        return any(self.root(label) != label for label in range(len(self._joined)))

    def _mark(self, axis: Axis, labels: Array, node: ir.Node | None) -> None:
        value = axis[0]
        if value.is_graph_input():
            raise StopError(f"input {value.name!r} of the model has its channels{self._at(node)}")
        if value.is_graph_output():
            raise StopError(f"its channels reach output {value.name!r}")
        if value.graph is not self._tagged.model.graph:
            raise StopError(f"its channels reach a branch or loop{self._at(node)}")
        known, shape = self.labels.get(axis), self._shapes.shape(value)
        sizes = (shape[axis[1]], period_of(shape[axis[1]])) if shape is not None else ()
        if len(labels if known is None else known) != len(labels) or len(labels) not in sizes:
            raise StopError(f"the sizes of {value.name!r} do not fit{self._at(node)}")
        if known is None:
            self.labels[axis] = np.array(labels)
            self._waiting.append(axis)
            return
        both = (known >= 0) & (labels >= 0)
        for one, other in zip(known[both].tolist(), labels[both].tolist(), strict=True):
            self._join(one, other)
        fresh = (known < 0) & (labels >= 0)
        if fresh.any():
            known[fresh] = labels[fresh]
            self._waiting.append(axis)

    def _join(self, one: int, other: int) -> None:
        first, second = sorted((self.root(one), self.root(other)))
        self._joined[second] = first

    def _size(self, axis: Axis, where: str) -> int:
        value, place = axis
        shape = self._shapes.shape(value)
        size = None if shape is None else shape[place]
        if not isinstance(size, int):
            raise StopError(f"the size of {value.name!r} is not known{where}")
        return size

    def _at(self, node: ir.Node | None) -> str:
        if node is None:
            return ""
        owners = ", ".join(map(repr, self._tagged.owners_of(node))) or "no module"
        return f", at {node.op_type} {node.name!r} of {owners}"

    def _cross(self, node: ir.Node, axis: Axis) -> None:
        """Carry the labels of an axis through a node."""
        if node.graph is not self._tagged.model.graph or any(subgraphs(node)):
            raise StopError(f"its channels reach a branch or loop{self._at(node)}")
        if node.op_type in RESHAPING and not node.domain:
            if axis[0] in (node.inputs[0], node.outputs[0]):
                self._cross_reshape(node, axis)
            return  # sizes and axes are no channels
        is_of_parts = node.op_type in ("Concat", "Split", "Slice") and not node.domain
        if is_of_parts and axis[1] in (changed_axes(node, self._shapes) or ()):
            self._cross_parts(node, axis)
            return
        if (
            node.op_type in ("Gather", "GatherND")
            and not node.domain
            and self._cross_gather(node, axis)
        ):
            return
        groups = [group for group in groups_of(node, self._shapes) if axis in group]
        if not groups:
            raise StopError(f"its channels cannot be cut{self._at(node)}")
        for group in groups:
            if self._heads and node.op_type in ("MatMul", "Einsum") and self._sums(node, group):
                raise StopError(f"its channels are within heads{self._at(node)}")
            self._cross_group(node, axis, group)

    def _cross_group(self, node: ir.Node, axis: Axis, group: Group) -> None:
        """Carry the labels of an axis to others, after those of indices that have one channel are joined."""
        times, width = group[axis]
        labels = self.labels[axis]
        if times * width > 1:
            size = self._size(axis, self._at(node))
            labels = self._one_of_each(
                rows_at(labels.reshape(times, size // (times * width), width), 1)
            )
        for other, (repeats, neighbours) in group.items():
            is_done, shape = other == axis and times * width == 1, self._shapes.shape(other[0])
            is_broadcast = shape is not None and shape[other[1]] == 1
            if not is_done and not is_broadcast:
                self._mark(other, np.tile(np.repeat(labels, neighbours), repeats), node)

    def _sums(self, node: ir.Node, group: Group) -> bool:
        """Whether a node sums the products of computed tensors over these axes."""
        values = {value for value, _ in group}
        computed = (
            values
            - self._tagged.index.constant
            - set(self._tagged.model.graph.initializers.values())
        )
        return len(computed) > 1 and computed.isdisjoint(node.outputs)

    def _cross_parts(self, node: ir.Node, axis: Axis) -> None:
        """Concat, Split and Slice: a whole axis, and its parts from a first index on."""
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
        """Carry labels through constant indices along the axis that is gathered; False if the axis is another one.

        The indices are the places of channels in the table, which an axis of the result has: of
        more than one, it is that in which channels are told apart.
        """
        found = gathered(node, self._shapes)
        if found is None:
            return False
        at, indices = found
        source: Axis = (node.inputs[0], at)  # type: ignore[assignment]
        results = [(node.outputs[0], at + place) for place in range(indices.ndim)]
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
        for place, label in zip(indices.ravel().tolist(), returned.ravel().tolist(), strict=True):
            if label >= 0 and labels[place] >= 0:
                self._join(int(labels[place]), label)
            labels[place] = max(label, labels[place])
        self._mark(source, labels, node)
        return True

    def _one_of_each(self, rows: Array) -> Array:
        """A label for each row of labels, which are joined; -1 for a row without."""
        for row in rows:
            reached = row[row >= 0].tolist()
            for label in reached[1:]:
                self._join(reached[0], label)
        labels: Array = rows.max(axis=1)
        return labels

    def _cross_reshape(self, node: ir.Node, axis: Axis) -> None:
        source = axis[0]
        target = node.outputs[0] if source is node.inputs[0] else node.inputs[0]
        first, second = self._shapes.shape(source), self._shapes.shape(target)
        if target is None or first is None or second is None:
            raise StopError(f"a shape is not known{self._at(node)}")
        block = next((b for b in blocks(first, second) if axis[1] in b[0]), None)
        if block is None:
            raise StopError(f"its channels cannot be followed{self._at(node)}")
        before, after = block
        if len(before) == len(after) == 1:
            self._mark((target, after[0]), self.labels[axis], node)
            return
        if after:  # else an axis of size 1
            old, new = (
                periods_of(first[place] for place in before),
                periods_of(second[place] for place in after),
            )
            if old is None or new is None:
                raise StopError(f"its channels are merged with an open dimension{self._at(node)}")
            axes = [(source, place) for place in before], [(target, place) for place in after]
            self._regroup(node, axis, axes, (old, new))

    def _regroup(
        self,
        node: ir.Node,
        axis: Axis,
        axes: Sequence[Sequence[Axis]],
        sizes: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """Carry the labels of an axis to one of the axes into which it and others are reshaped.

        ``axes`` and ``sizes`` are those that are reshaped, then those into which they are.
        """
        place = axes[0].index(axis)
        if len(self.labels[axis]) != sizes[0][place] or math.prod(sizes[0]) != math.prod(sizes[1]):
            raise StopError(f"its channels are merged with an open dimension{self._at(node)}")
        spread = spread_labels(self.labels[axis], place, sizes[0]).reshape(sizes[1])
        chosen = self._choose(node, spread, axes[1])
        labels = self._one_of_each(rows_at(spread, chosen))
        self._mark(axes[1][chosen], labels, node)
        returned = rows_at(spread_labels(labels, chosen, sizes[1]).reshape(sizes[0]), place)
        # a head that is reached in part belongs together
        self._mark(axis, returned.max(axis=1), node)

    def _choose(self, node: ir.Node, spread: Array, axes: Sequence[Axis]) -> int:
        """Which axis of a split has the channels: the outermost one in which they are told apart."""
        marked = [place for place, axis in enumerate(axes) if axis in self.labels]
        if marked:
            return marked[0]
        candidates = [
            place
            for place in range(len(axes))
            if len(
                {
                    frozenset(map(self.root, row[row >= 0].tolist()))
                    for row in rows_at(spread, place)
                }
            )
            > 1
        ]
        if not candidates:
            raise StopError(f"its channels would all be cut together{self._at(node)}")
        self.alternatives[node] = len(candidates)
        return candidates[min(self._choices.get(node, 0), len(candidates) - 1)]


def couple(tagged: TaggedModel, seed: Axis, *, heads: bool = False) -> Coupling:
    """Find what has the channels of an axis; a StopError if it cannot be cut: an input, an output, no rule.

    A Reshape may split channels in several ways, such as into queries, keys and values, and heads.
    The first way in which all channels can be cut is taken; if there is none, that in which most
    can.
    """
    choices, stopped = dict[ir.Node, int](), None
    best: Coupling | None = None
    for _ in range(_MOST_ATTEMPTS):
        coupling = Coupling(tagged, choices, heads=heads)
        try:
            coupling.follow(seed)
        except StopError as error:
            stopped = stopped or error
        else:
            if len(coupling.groups) == len(coupling.roots_of_all):
                return coupling
            best = coupling if best is None or len(coupling.groups) > len(best.groups) else best
        made = list(coupling.alternatives)
        while made and choices.get(made[-1], 0) + 1 >= coupling.alternatives[made[-1]]:
            made.pop()
        if not made:
            break
        choices = {node: choices.get(node, 0) for node in made}
        choices[made[-1]] += 1
    if best is not None:
        return best
    raise stopped or StopError("its channels can be split in too many ways")
