"""onnxscript's rewriter as `optimize` runs it: limited matches, and nodes that it cannot handle.

Its rules are written for recent opsets. For older ones, some fail, misread nodes, or write
operators that the opset does not have.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.errors import HtpExportError, described
from htp_export.model.neighbours import replace_inputs
from htp_export.model.regions import all_values
from htp_export.process.forking import Mutex
from htp_export.process.restoring import Changes, restored, set_attribute
from htp_export.shapes.schemas import is_written_as, misfit

MOST = 64
"""Nodes that are searched for the further results of a pattern; each takes 0.1 ms.

A match has its results within a block, which is smaller."""

_WRITTEN_FOR = 18
"""The lowest opset that onnxscript's rules are written for:
https://github.com/microsoft/onnxscript, ``optimizer``."""

_log = logging.getLogger(__name__)

_ONE_AT_A_TIME = Mutex()  # the changed classes are shared by the whole process


@contextlib.contextmanager
def changed_rules() -> Iterator[dict[ir.Node, str]]:
    """Change onnxscript's rewriter while the context is open.

    Yields nodes that it cannot handle → the reason. These nodes are unchanged: a rule or a
    folding step that raises an error is skipped for the node. A rule is also skipped if it matches
    nodes whose attributes became inputs later (``Pad`` before opset 11: the rule does not see
    them), and if the opset of the model does not have its new nodes (``Clip`` with inputs).

    Numbers match equal numbers only, and several results of a pattern are near each other.

    There is no rule for ``SkipLayerNormalization``: on the CPU, ONNX Runtime 1.32 takes 3 to 9
    times as long for it as for ``Add`` and ``LayerNormalization`` (docs/passes.md), and the
    normalization is not exact any more.

    In onnxscript, the 0 of a pattern matches every number below 1e-8, and its 1 every number that
    differs by less than 1e-5: ``x + 1e-15`` becomes ``x``, and ``log(x + 1e-15)`` of a zero becomes
    infinite. Here, numbers that half precision can represent match exactly, and others, such as the
    square root of 2, by their relative difference alone.

    onnxscript (0.7) searches all nodes of the graph for the further results of a pattern, for each
    of its nodes: the time grows with the square of the graph. The nodes of a match are connected by
    the tensors that they share, so that it is enough to search nodes at a distance up to the size
    of the pattern. If a tensor has very many consumers, they are all near each other: at most
    `MOST` are searched, and a warning names the node.

    onnx_ir (1.1) writes inferred types as element types: sequences and optional values of unknown
    type become tensors, and the model is not valid any more. Here, they keep their kind.
    """
    from onnx_ir.passes.common import shape_inference
    from onnxscript.optimizer import _constant_folding
    from onnxscript.rewriter import pattern
    from onnxscript.rewriter.ort_fusions import _core

    matcher, rule = pattern.SimplePatternMatcher, pattern.RewriteRule
    folder = _constant_folding.FoldConstantsPass
    with _ONE_AT_A_TIME.lock:
        originals = _Originals(
            matcher.match, matcher._match_constant, rule.try_rewrite, folder.process_node
        )
        changes = _Changes(originals)
        patches: list[tuple[Any, str, Callable[..., Any]]] = [
            (matcher, "match", changes.match),
            (matcher, "_match_constant", changes.match_constant),
            (rule, "try_rewrite", changes.try_rewrite),
            (folder, "process_node", changes.process_node),
            (shape_inference, "_merge_func", _set_inferred),
            (_core, "fuse_skip_layer_normalization", lambda model, debug=False: 0),
        ]

        def put_in(until: Changes) -> None:
            for owner, name, changed in patches:
                original = getattr(owner, name)
                set_attribute(until, owner, name, _in_this_thread(changed, original))

        with restored(put_in):
            yield changes.unhandled
    _release(changes.unfinished)
    if changes.crowded:
        node, *others = changes.crowded
        _log.warning(
            "pass fuse_for_onnxruntime: node %r (%s)%s: a tensor near it has very many consumers; "
            "patterns with several results were looked for among the nearest %d nodes only, and "
            "may have been missed",
            node.name,
            node.op_type,
            f" and {len(others)} others" if others else "",
            MOST,
        )


def _in_this_thread(
    changed: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that is changed for the present thread only: torch may export in another one."""
    here = threading.get_ident()

    def chosen(*args: Any, **options: Any) -> Any:
        return (changed if threading.get_ident() == here else original)(*args, **options)

    return chosen


@dataclass(frozen=True)
class _Originals:
    """The original functions of onnxscript that are changed."""

    match: Callable[..., Any]
    match_constant: Callable[..., Any]
    try_rewrite: Callable[..., Any]
    process_node: Callable[..., Any]


@dataclass
class _Changes:
    """The changed functions, and the nodes that they could not handle."""

    originals: _Originals
    unhandled: dict[ir.Node, str] = field(default_factory=dict)  # node → why it is unchanged
    # models with values that new nodes of unfinished rules use
    unfinished: dict[ir.Model, None] = field(default_factory=dict)
    # nodes near a tensor with very many consumers
    crowded: dict[ir.Node, None] = field(default_factory=dict)

    def match(
        self, matcher: Any, model: ir.Model, graph: Any, node: ir.Node, **options: Any
    ) -> Any:
        """``SimplePatternMatcher.match``, for near nodes in the form of recent opsets only."""
        from onnxscript.rewriter import pattern

        first = matcher.pattern.output_nodes[0].op_identifier()
        if first is not None and first[:2] != (node.domain, node.op_type):
            return pattern.MatchResult().fail("The last node of the pattern is another operator.")
        if not matcher.pattern.has_single_output_node:
            nodes = near(node, len(matcher.pattern))
            if len(nodes) == MOST:
                self.crowded[node] = None
            graph = _Part(graph if isinstance(graph, ir.Graph) else graph.graph, nodes)
        match = self.originals.match(matcher, model, graph, node, **options)
        if not match:
            return match
        opset = model.opset_imports.get("", 1)
        older = [
            matched for matched in match.nodes if not is_written_as(matched, opset, _WRITTEN_FOR)
        ]
        if not older:
            return match
        why = f"onnxscript's rules do not know {older[0].op_type} as opset {opset} has it"
        self.unhandled.update((matched, why) for matched in older)
        return pattern.MatchResult().fail(why)

    def match_constant(self, matcher: Any, constant: Any, value: ir.Value) -> bool:
        """``SimplePatternMatcher._match_constant``, without tolerance for exact numbers."""
        number = constant.value
        is_exact = False
        if isinstance(number, int | float):
            with np.errstate(over="ignore"):
                is_exact = float(np.float16(number)) == number
        closer = type(constant)(number, rel_tol=0.0 if is_exact else constant._rel_tol, abs_tol=0.0)
        return bool(self.originals.match_constant(matcher, closer, value))

    def try_rewrite(
        self, rule: Any, model: ir.Model, graph: Any, node: ir.Node, **options: Any
    ) -> Any:
        """``RewriteRule.try_rewrite``: the replacement of a match.

        None if the rule fails, or if the opset does not have the new nodes.
        """
        try:
            replacement = self.originals.try_rewrite(rule, model, graph, node, **options)
        except (HtpExportError, MemoryError, OSError):  # weights that cannot be read
            raise
        except Exception as error:  # rules raise errors of any class on unexpected nodes
            self.unhandled[node] = f"onnxscript's rule {rule} fails for it: {described(error)}"
            self.unfinished[model] = None
            return None
        opset = model.opset_imports.get("", 1)
        if replacement is None or self._fits(node, replacement.new_nodes, opset):
            return replacement
        return None

    def process_node(self, folder: Any, node: ir.Node, *args: Any, **options: Any) -> Any:
        """``FoldConstantsPass.process_node``, with the same conditions as `try_rewrite`."""
        try:
            replacement = self.originals.process_node(folder, node, *args, **options)
        except (HtpExportError, MemoryError, OSError):
            raise
        except Exception as error:
            cause = described(error.__cause__ or error)
            self.unhandled[node] = f"onnxscript cannot fold it: {cause}"
            return None
        opset = folder._opset_imports.get("", 1)
        if replacement is None or self._fits(node, replacement.new_nodes, opset):
            return replacement
        return None

    def _fits(self, node: ir.Node, new: Sequence[ir.Node], opset: int) -> bool:
        """Whether an opset has all new nodes in their form; if not, they are dropped."""
        for new_node in new:
            problem = misfit(new_node, opset)
            if problem:
                why = f"onnxscript would write what opset {opset} does not have: {problem}"
                self.unhandled[node] = why
                _detach(new)
                return False
        return True


def _detach(nodes: Iterable[ir.Node]) -> None:
    """Remove the inputs of nodes that are in no graph, so that they are no consumers any more."""
    for node in nodes:
        replace_inputs(node, {value: None for value in node.inputs if value is not None})


def _release(models: Iterable[ir.Model]) -> None:
    """Remove consumers that are in no graph: nodes of replacements that a rule did not finish."""
    for model in models:
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            for value in all_values(graph):
                _detach([use.node for use in value.uses() if use.node.graph is None])


def _set_inferred(model: ir.Model, inferred: onnx.ModelProto) -> bool:
    """Set the shapes and types that onnx inferred, and return whether any was new.

    Also the types of sequences and optional values.
    """
    modified = False
    for graph, inferred_graph in zip(
        model.graphs(), ir.from_proto(inferred).graphs(), strict=False
    ):
        inferred_values = ir.convenience.create_value_mapping(inferred_graph)
        for name, value in ir.convenience.create_value_mapping(graph).items():
            other = inferred_values.get(name)
            if other is None:
                continue
            if other.shape is not None and other.shape != value.shape:
                value.shape, modified = other.shape, True
            has_other_kind = type(other.type) is not type(value.type)
            if other.dtype is not None and (other.dtype != value.dtype or has_other_kind):
                value.type, modified = other.type, True
    return modified


@dataclass(frozen=True)
class _Part:
    """Some nodes of a graph, in place of the graph."""

    graph: ir.Graph
    nodes: list[ir.Node]

    def __iter__(self) -> Iterator[ir.Node]:
        return iter(self.nodes)


def near(node: ir.Node, steps: int) -> list[ir.Node]:
    """The nearest nodes of the same graph through shared tensors, itself first, at most `MOST`.

    Nodes that only share constants are not near.

    Examples:
        >>> x, one = ir.val("x"), ir.Value(name="one", const_value=ir.tensor(1.0))
        >>> first = ir.node("Relu", [x])
        >>> second, apart = ir.node("Add", [first.outputs[0], one]), ir.node("Neg", [one])
        >>> [each.op_type for each in near(first, 1)], [each.op_type for each in near(apart, 9)]
        (['Relu', 'Add'], ['Neg'])
    """
    nearest = {node: None}
    edge = [node]
    for _ in range(steps):
        beside, edge = (neighbour for reached in edge for neighbour in _neighbours(reached)), []
        for neighbour in beside:
            if neighbour.graph is not node.graph or neighbour in nearest:
                continue
            if len(nearest) == MOST:
                return list(nearest)
            nearest[neighbour] = None
            edge.append(neighbour)
    return list(nearest)


def _neighbours(node: ir.Node) -> Iterator[ir.Node]:
    for value in (*node.inputs, *node.outputs):
        if value is None or value.const_value is not None:
            continue
        producer = value.producer()
        if producer is not None:
            yield producer
        for use in value.uses():
            yield use.node
