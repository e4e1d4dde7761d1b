"""Which tensors of a translated JIT graph stand for those of the graph before, operator by operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from htp_export.exporter.capture.jit_graph import JitStep, autograd_functions, nodes_of, numbers_of_outputs


class Translation:
    """One translation of a graph into ONNX operators, as it happens.

    Attributes:
        numbers: Number of a tensor in the graph → number in the new graph.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self._functions: list[tuple[str, tuple[int, ...]]] = []  # those that are not translated yet

    def begin(self, graph: Any) -> None:
        """Note the graph that is about to be translated."""
        self._functions = autograd_functions(nodes_of(graph))

    def node(self, node: Any, result: Any) -> None:
        """Note what a node became."""
        self._note(numbers_of_outputs(node), result)

    def function(self, name: str, result: Any) -> None:
        """Note what an ``autograd.Function`` with a translation of its own became: torch does not say which node."""
        called = next((place for place, (known, _) in enumerate(self._functions) if known == name), None)
        if called is not None:
            _, outputs = self._functions.pop(called)
            self._note(outputs, result)

    def _note(self, outputs: tuple[int, ...], result: Any) -> None:
        results = result if isinstance(result, (tuple, list)) else (result,)
        for output, value in zip(outputs, results, strict=False):
            if hasattr(value, "unique"):
                # A quantized tensor is a tuple: the tensor, its scale and its zero point.
                made = value.node().inputsAt(0) if value.node().kind() == "prim::TupleConstruct" else value
                self.numbers[output] = made.unique()

    def through_blocks(self, steps: Iterable[JitStep]) -> None:
        """Note what became of nodes whose one block was dissolved: ``autograd.Function``s without a translation."""
        for step in steps:
            for output, inner in zip(step.outputs, step.returned, strict=bool(step.returned)):
                if output not in self.numbers and inner in self.numbers:
                    self.numbers[output] = self.numbers[inner]
