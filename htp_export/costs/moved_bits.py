"""Bits of activations that nodes move, in the width of the format in which they are used.

A file simulates narrow formats: a tensor is rounded by ``QuantizeLinear`` (behind a ``Clip``, if the
format is narrower than the integer) and converted back by ``DequantizeLinear``, and the next
operator reads floats. Hardware with the format moves the rounded numbers: these operators count
nothing, the consumer reads the format's bits, and the producer writes the widest format that a
consumer needs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import onnx_ir as ir

from htp_export.costs.execution import Body, Run, RunStep, Tensor, run_by_shapes, walk
from htp_export.costs.memory import moves
from htp_export.editing.editing import constant_array
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.settings import RunSettings
from htp_export.shapes.operator_kinds import dequantizes, is_standard, quantizes


def moved_bits_of(tagged: TaggedModel, settings: RunSettings) -> int:
    """The bits of activations that all nodes of a model move in one run; ``settings`` as of `run_by_shapes`."""
    run = run_by_shapes(tagged, settings)
    bits = MovedBits(run)
    return sum(bits.of(step) * times for step, times in walk(run.steps))


class MovedBits:
    """The bits of activations that each step of a run reads and writes."""

    def __init__(self, run: Run) -> None:
        self._producers: dict[Tensor, RunStep] = {}
        self._consumers: defaultdict[Tensor, list[tuple[RunStep, int]]] = defaultdict(list)
        self._stored: set[Tensor] = set()
        self._returned = set(run.outputs)
        for step, _ in walk(run.steps):
            self._add(step)

    def _add(self, step: RunStep) -> None:
        for position, tensor in enumerate(step.inputs):
            if tensor is not None:
                self._consumers[tensor].append((step, position))
        for body in step.bodies:
            self._returned.update(body.outputs)
        for tensor in step.outputs:
            self._producers[tensor] = step
            if self._is_stored(step, step.bodies):
                self._stored.add(tensor)

    def _is_stored(self, step: RunStep, bodies: Sequence[Body]) -> bool:
        """Whether the outputs of a step follow from stored tensors alone, as a dequantized weight."""
        inputs = [tensor for tensor in step.inputs if tensor is not None]
        return bool(inputs) and not bodies and not any(map(self._is_activation, inputs))

    def _is_activation(self, tensor: Tensor) -> bool:
        return tensor.origin in ("input", "made") and tensor not in self._stored

    def of(self, step: RunStep) -> int:
        """The bits that one run of a node reads and writes, without its subgraphs."""
        if self._rounds(step):
            return 0
        bits = 0
        for tensor, size, is_written in moves(step):
            if not size or tensor.dtype is None or not self._is_activation(tensor):
                continue
            width = self._written(tensor) if is_written else self._read(tensor)
            bits += size * 8 // tensor.dtype.bitwidth * width
        return bits

    def _rounds(self, step: RunStep) -> bool:
        """Whether a step belongs to the rounding of an activation."""
        node = step.node
        return quantizes(node) or dequantizes(node) or _clipped_bits(node) is not None

    def _read(self, tensor: Tensor) -> int:
        """Bits of an element for a consumer."""
        source = tensor.buffer
        step = self._producers.get(source)
        rounded = None if step is None or not dequantizes(step.node) else step.input(0)
        if rounded is None:
            return _bits(source)
        quantizer = self._producers.get(rounded)
        if quantizer is not None and quantizes(quantizer.node):
            return _format_bits(quantizer)
        return _bits(rounded)

    def _written(self, tensor: Tensor) -> int:
        """Bits of an element for its producer: the widest format that a consumer needs."""
        pending, seen = [tensor], {tensor}
        widest = 0
        while pending:
            current = pending.pop()
            consumers = self._consumers.get(current, [])
            if current in self._returned or not consumers:
                return _bits(tensor)
            for step, position in consumers:
                views = [output for output in step.outputs if output.viewed is current]
                pending += [view for view in views if view not in seen]
                seen.update(views)
                if not views:
                    widest = max(widest, self._needed(step, position, tensor))
        return widest

    def _needed(self, step: RunStep, position: int, tensor: Tensor) -> int:
        """Bits of an element that one consumer needs."""
        if position == 0 and quantizes(step.node):
            return _format_bits(step)
        clipped = _clipped_bits(step.node) if position == 0 else None
        return _bits(tensor) if clipped is None else clipped


def _bits(tensor: Tensor) -> int:
    return 0 if tensor.dtype is None else tensor.dtype.bitwidth


def _format_bits(quantizer: RunStep) -> int:
    """Bits of a result of ``QuantizeLinear``; fewer than its type has behind a ``Clip`` to a format."""
    source = quantizer.node.inputs[0]
    clip = None if source is None else source.producer()
    clipped = None if clip is None else _clipped_bits(clip)
    return _bits(quantizer.outputs[0]) if clipped is None else clipped


def _clipped_bits(clip: ir.Node) -> int | None:
    """Bits of the format to which a ``Clip`` saturates; None if it is no part of a rounding.

    Its bounds are the ends of two's complement in the steps of each ``QuantizeLinear`` that reads
    it: a ReLU6 has other ones.
    """
    if not is_standard(clip, "Clip") or len(clip.inputs) < 3:
        return None
    low, high = (constant_array(value, 1) for value in clip.inputs[1:3])
    readers = list(clip.outputs[0].uses())
    if low is None or high is None or not readers or clip.outputs[0].is_graph_output():
        return None
    widths: set[float] = set()
    for use in readers:
        if use.idx or not quantizes(use.node):
            return None
        scale = constant_array(use.node.inputs[1], 1)
        if scale is None or not float(scale) > 0:
            return None
        lowest, highest = float(low) / float(scale), float(high) / float(scale)
        if highest < 0 or lowest != -highest - 1:
            return None
        widths.add(math.log2(-lowest) + 1)
    width = max(widths)
    return int(width) if width.is_integer() else None
