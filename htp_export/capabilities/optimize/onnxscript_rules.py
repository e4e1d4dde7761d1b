"""onnxscript's rewriter as `optimize` runs it: limits of what its rules match, and nodes that it cannot handle.

Its rules are written for recent opsets. Of an older one, some fail, misread nodes, or write what it
does not have.
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
from htp_export.shapes.schemas import is_written_as, misfit

MOST = 64
"""Nodes in which the further results are looked for; each takes 0.1 ms. A match has its results within a block."""

_WRITTEN_FOR = 18
"""The lowest opset that onnxscript's rules are written for: https://github.com/microsoft/onnxscript, ``optimizer``."""

_log = logging.getLogger(__name__)

_ONE_AT_A_TIME = Mutex()  # the changed classes are shared by the whole process


@contextlib.contextmanager
def changed_rules() -> Iterator[dict[ir.Node, str]]:
    """Change onnxscript's rewriter while it is open; yields nodes that it cannot handle → the reason.

    These nodes stay as they are: a rule or a folding step that raises an error is skipped for the
    node. So is one that matches nodes whose attributes became inputs later (``Pad`` before opset
    11: the rule would take them for absent), and one whose new nodes the opset of the model does
    not have (``Clip`` with inputs).

    Numbers match equal numbers only, and several results of a pattern are near each other.

    There is no rule for ``SkipLayerNormalization``: on the CPU, ONNX Runtime 1.32 takes 3 to 9
    times as long for it as for ``Add`` and ``LayerNormalization`` (docs/passes.md), and the
    normalisation is not exact any more.

    A pattern's 0 matches each number below 1e-8 in onnxscript, and its 1 those that differ by 1e-5:
    ``x + 1e-15`` counts as ``x``, and ``log(x + 1e-15)`` of a zero becomes infinite. Here, numbers
    that half precision has match exactly, and others, as the square root of 2, by their relative
    difference alone.

    onnxscript (0.7) looks for the further results of a pattern among all nodes of the graph, for
    each of its nodes: the time grows with the square of the graph. The nodes of a match hang
    together by the tensors that they share, so those are enough that are as near as the pattern is
    large. If a tensor has very many consumers, they are all near each other: at most `MOST` are
    searched, and a warning names the node.

    onnx_ir (1.1) writes the types that it infers as element types: sequences and optional values of
    unknown type become tensors, and the model is not valid any more. Here, they keep their kind.
    """
    from onnx_ir.passes.common import shape_inference
    from onnxscript.optimizer import _constant_folding
    from onnxscript.rewriter import pattern
    from onnxscript.rewriter.ort_fusions import _core

    matcher, folder, rule = (
        pattern.SimplePatternMatcher,
        _constant_folding.FoldConstantsPass,
        pattern.RewriteRule,
    )
    with _ONE_AT_A_TIME.lock, contextlib.ExitStack() as until:
        originals = _Originals(
            matcher.match, matcher._match_constant, rule.try_rewrite, folder.process_node
        )
        changes = _Changes(originals)
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (matcher, "match", changes.match),
            (matcher, "_match_constant", changes.match_constant),
            (rule, "try_rewrite", changes.try_rewrite),
            (folder, "process_node", changes.process_node),
            (shape_inference, "_merge_func", _set_inferred),
            (_core, "fuse_skip_layer_normalization", lambda model, debug=False: 0),
        ]
        for owner, name, changed in places:
            original = getattr(owner, name)
            until.callback(setattr, owner, name, original)
            setattr(owner, name, _in_this_thread(changed, original))
        yield changes.unhandled
    _release(changes.unfinished)
    if changes.crowded:
        node, *others = changes.crowded
        _log.warning(
            "pass fuse_for_onnxruntime: node %r (%s)%s: a tensor near it has very many consumers; patterns with "
            "several results were looked for among the nearest %d nodes only, and may have been missed",
            *(node.name, node.op_type, f" and {len(others)} others" if others else "", MOST),
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
    """Functions of onnxscript that are changed, as they were."""

    match: Callable[..., Any]
    match_constant: Callable[..., Any]
    try_rewrite: Callable[..., Any]
    process_node: Callable[..., Any]


@dataclass
class _Changes:
    """The changed functions, and what they found."""

    originals: _Originals
    unhandled: dict[ir.Node, str] = field(default_factory=dict)  # node → why it stays as it is
    # models with values that abandoned new nodes read
    unfinished: dict[ir.Model, None] = field(default_factory=dict)
    # nodes near a tensor with very many consumers
    crowded: dict[ir.Node, None] = field(default_factory=dict)

    def match(
        self, matcher: Any, model: ir.Model, graph: Any, node: ir.Node, **options: Any
    ) -> Any:
        """``SimplePatternMatcher.match``: near nodes only, and none that is written as in older opsets."""
        from onnxscript.rewriter import pattern

        first = matcher.pattern.output_nodes[0].op_identifier()
        if first is not None and first[:2] != (node.domain, node.op_type):
            return pattern.MatchResult().fail("The last node of the pattern is another operator.")
        if not matcher.pattern.has_single_output_node:
            nodes = near(node, len(matcher.pattern))
            if len(nodes) == MOST:
                self.crowded[node] = None
            graph = _Part(graph if isinstance(graph, ir.Graph) else graph.graph, nodes)
        found = self.originals.match(matcher, model, graph, node, **options)
        opset = model.opset_imports.get("", 1)
        older = (
            [matched for matched in found.nodes if not is_written_as(matched, opset, _WRITTEN_FOR)]
            if found
            else []
        )
        if not older:
            return found
        why = f"onnxscript's rules do not know {older[0].op_type} as opset {opset} has it"
        self.unhandled.update((matched, why) for matched in older)
        return pattern.MatchResult().fail(why)

    def match_constant(self, matcher: Any, constant: Any, value: ir.Value) -> bool:
        """``SimplePatternMatcher._match_constant``, without tolerance for what a floating-point number can be."""
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
        """``RewriteRule.try_rewrite``: what replaces a match; None if the rule fails, or for what the opset has not."""
        try:
            found = self.originals.try_rewrite(rule, model, graph, node, **options)
        except (HtpExportError, MemoryError, OSError):  # weights that cannot be read
            raise
        except Exception as error:  # whatever the rule did not expect
            self.unhandled[node] = f"onnxscript's rule {rule} fails for it: {described(error)}"
            self.unfinished[model] = None
            return None
        if found is None or self._fits(node, found.new_nodes, model.opset_imports.get("", 1)):
            return found
        return None

    def process_node(self, folder: Any, node: ir.Node, *args: Any, **options: Any) -> Any:
        """``FoldConstantsPass.process_node``: the same of folding constants."""
        try:
            found = self.originals.process_node(folder, node, *args, **options)
        except (HtpExportError, MemoryError, OSError):
            raise
        except Exception as error:
            self.unhandled[node] = (
                f"onnxscript cannot fold it: {described(error.__cause__ or error)}"
            )
            return None
        if found is None or self._fits(node, found.new_nodes, folder._opset_imports.get("", 1)):
            return found
        return None

    def _fits(self, node: ir.Node, new: Sequence[ir.Node], opset: int) -> bool:
        """Whether an opset has all new nodes as they are; if not, they are dropped."""
        for made in new:
            if why := misfit(made, opset):
                self.unhandled[node] = (
                    f"onnxscript would write what opset {opset} does not have: {why}"
                )
                _detach(new)
                return False
        return True


def _detach(nodes: Iterable[ir.Node]) -> None:
    """Let nodes that are in no graph read nothing, so that the values that they read have no such consumers."""
    for node in nodes:
        replace_inputs(node, {value: None for value in node.inputs if value is not None})


def _release(models: Iterable[ir.Model]) -> None:
    """Remove consumers that are in no graph: nodes of replacements that a rule did not finish."""
    for model in models:
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            for value in all_values(graph):
                _detach([use.node for use in value.uses() if use.node.graph is None])


def _set_inferred(model: ir.Model, inferred: onnx.ModelProto) -> bool:
    """Set shapes and types that onnx inferred, also those of sequences and optional values; whether any was new."""
    modified = False
    for graph, known in zip(model.graphs(), ir.from_proto(inferred).graphs(), strict=False):
        found = ir.convenience.create_value_mapping(known)
        for name, value in ir.convenience.create_value_mapping(graph).items():
            other = found.get(name)
            if other is None:
                continue
            if other.shape is not None and other.shape != value.shape:
                value.shape, modified = other.shape, True
            if other.dtype is not None and (
                other.dtype != value.dtype or type(other.type) is not type(value.type)
            ):
                value.type, modified = other.type, True
    return modified


@dataclass(frozen=True)
class _Part:
    """Some nodes of a graph, which stand in for the graph."""

    graph: ir.Graph
    nodes: list[ir.Node]

    def __iter__(self) -> Iterator[ir.Node]:
        return iter(self.nodes)


def near(node: ir.Node, steps: int) -> list[ir.Node]:
    """The nearest nodes of the same graph that some tensors lead to, itself first, no more than `MOST`.

    Those that only read the same constants are not near.

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
