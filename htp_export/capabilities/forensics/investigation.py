"""Forensics: what each pass would change in a graph, by module, and what it leaves unchanged and why."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from htp_export.capabilities.forensics.finding import KINDS, Finding, Forensics
from htp_export.capabilities.forensics.patterns import large_duplicates, unchanged
from htp_export.editing.editing import bytes_of
from htp_export.editing.flattening import read_flat
from htp_export.errors import HtpExportError
from htp_export.format import tags
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.model_faults import names_model_faults
from htp_export.model.neighbours import Groups
from htp_export.model.regions import name_of_node, twins_of
from htp_export.model.tagged import ModelSource, TaggedModel

if TYPE_CHECKING:
    from htp_export.capabilities.optimize.registry import Declined, Level, PassInfo
    from htp_export.lineage.difference import PassDifference


_FIRST = ("eliminate_unused_initializers", "eliminate_dead_nodes")
"""Every pass leaves out what nothing needs; these say so first."""


@names_model_faults("model")
def forensics(
    model: ModelSource, *, select: str | Sequence[str] | None = None, level: Level = "fused"
) -> Forensics:
    """List what can be simplified in a model, by module, and the pass that does it.

    For each finding: its nodes, its module, the pass of `htp_export.optimize` that changes it, or
    the reason why none does. The passes run on a copy that shares the weights: those of level
    ``exact`` one after another, then each further pass on their result.

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
            Without tags, findings belong to the root.
        select: Only findings in these modules; see ``TaggedModel.select``.
        level: The level of the passes, as in `htp_export.optimize`; ``"exact"`` takes the least
            time.

    Returns:
        The findings; `htp_export.capabilities.forensics.finding.KINDS` lists their kinds.

    Raises:
        FileError: The file cannot be read.
        InputError: There is no such level.
        SelectorError: The selector cannot be read, or matches nothing.
        UntaggedModelError: Modules are selected, and the model has no tags.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(approximate="tanh")).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 5, 4),), opset_version=18, verbose=False)
        >>> [(found.kind, found.module, found.fixed_by) for found in forensics(program).findings]
        [('matmul_add_3d', '0', 'fuse_matmul_add_3d'), ('gelu_tanh', '1', 'fuse_for_onnxruntime')]
    """
    tagged = read_flat(model)
    chosen = None if select is None else tagged.select(select)
    investigation = _Investigation(tagged)
    investigation.run(level)
    found = investigation.findings
    if chosen is not None:
        found = [
            finding
            for finding in found
            if any(tags.is_under(finding.module, path) for path in chosen)
        ]
    return Forensics(tuple(found), len(tagged.nodes), tagged.tag_facts, investigation.failed)


@dataclass
class _Copy:
    """The model, or a copy that passes run on, and which of its nodes are in the original model.

    ``origins``: node → the original nodes that it replaces.
    """

    tagged: TaggedModel
    origins: dict[ir.Node, tuple[ir.Node, ...]]
    written: Collection[ir.Node]

    def again(self) -> _Copy:
        """A copy of its present state."""
        tagged = self.tagged.clone()
        twins = twins_of(self.tagged.model, tagged.model)
        origins = {copy: self.origins.get(node, ()) for node, copy in twins.items()}
        return _Copy(tagged, origins, {twins[node] for node in twins if node in self.written})

    def origins_of(self, nodes: Iterable[ir.Node]) -> tuple[ir.Node, ...]:
        """The original nodes that some nodes replace."""
        return tuple(
            dict.fromkeys(origin for node in nodes for origin in self.origins.get(node, ()))
        )


class _Investigation:
    """Passes that run on copies of a model, and their changes; ``failed``: passes that raised → why."""

    def __init__(self, tagged: TaggedModel) -> None:
        from htp_export.capabilities.optimize import registry

        self._passes = registry
        self._tagged, self._facts = tagged, GraphFacts(tagged)
        self._places = {node: place for place, node in enumerate(tagged.nodes)}
        graph = tagged.model.graph
        made = [node.outputs[0] for node in self._facts.nodes_of("Constant")]
        self._constants = {value.name or "" for value in (*graph.initializers.values(), *made)}
        self._unread = [value for value in graph.initializers.values() if not value.uses()]
        self._found: list[tuple[int, Finding]] = []  # with the place of the first node
        self._known: set[frozenset[str]] = set()
        self.failed: dict[str, str] = {}

    @property
    def findings(self) -> list[Finding]:
        """What was found, in the order of tables."""
        order = {kind: place for place, kind in enumerate((*KINDS, *self._passes.DEFAULT))}
        found = sorted(self._found, key=lambda each: (order.get(each[1].kind, len(order)), each[0]))
        return [finding for _, finding in found]

    def run(self, level: Level) -> None:
        """Run the passes up to a level: ``exact`` first, then those that `optimize` runs, and others apart."""
        passes, levels = self._passes, self._passes.LEVELS
        chosen = passes.choose("default", level)
        exact = [
            passes.find(name)
            for name in dict.fromkeys((*_FIRST, *(e.name for e in chosen if e.level == "exact")))
        ]
        start = _Copy(self._tagged, {node: (node,) for node in self._places}, self._places.keys())
        simple = self._run(exact, "exact", start)
        ends = (
            [self._run([e for e in chosen if e.level != "fused"], "tolerant", simple)]
            if level != "exact"
            else []
        )
        apart = [
            e
            for e in passes.available().values()
            if e.level == "fused" or e.name not in passes.DEFAULT
        ]
        allowed = [
            e
            for e in apart
            if levels.index(e.level) <= levels.index(level) and e.applies(simple.tagged.model)
        ]
        ends += [self._run([e], e.level, simple) for e in allowed]
        for copy in (simple, *ends):
            self._left(copy, passes.declined(copy.tagged.nodes), level)
        self._left(simple, unchanged(GraphFacts(simple.tagged)), level)
        for constants, readers, why, detail in large_duplicates(self._facts):
            self._add("duplicate_constants", readers, detail=detail, why=why, tensors=constants)

    def _run(self, passes: Sequence[PassInfo], level: Level, given: _Copy) -> _Copy:
        """Run passes on a copy of a model; without those that fail."""
        from htp_export.capabilities.optimize.optimizing import Pipeline

        while True:
            copy = given.again()
            known, unread, found = set(self._known), self._unread, len(self._found)
            watch = functools.partial(self._watch, copy, level)
            pipeline = Pipeline(
                [info for info in passes if info.name not in self.failed], watch=watch
            )
            try:
                copy.tagged = pipeline.run(copy.tagged)
                return copy
            except HtpExportError as error:
                # a pass of another package, or weights that cannot be read
                if not pipeline.running or pipeline.running in self.failed:
                    raise
                del self._found[found:]
                self._known, self._unread = known, unread
                self.failed[pipeline.running] = str(error).splitlines()[0]

    def _watch(
        self, copy: _Copy, level: Level, info: PassInfo, difference: PassDifference, model: ir.Model
    ) -> None:
        """Add the findings of one run of a pass."""
        level = max(level, info.level, key=self._passes.LEVELS.index)
        add = functools.partial(self._add, fixed_by=info.name, level=level)
        for rewrite in rewrites(difference, one_by_one=info.name == ONE_BY_ONE):
            origins = copy.origins_of(rewrite.removed)
            copy.origins.update(dict.fromkeys(rewrite.added, origins))
            kind, names = self._kind_of(info.name, rewrite), frozenset(map(name_of_node, origins))
            # a pass of a lower level changes them, too
            again = kind == info.name and names in self._known
            if not (
                again
                or set(rewrite.removed).isdisjoint(copy.written)
                or rewrite.operators == {"Constant"}
            ):
                weights = rewrite.inputs[:1] if kind == "identity_weight" else []
                names_of_weights = [value.name or "" for value in weights if value is not None]
                add(kind, origins, detail=_detail(rewrite), tensors=names_of_weights)
        for values, readers in equal_constants(difference):
            tensors = [name for value in values if (name := value.name or "") in self._constants]
            if len(tensors) > 1:
                size = bytes_of(values[0].const_value) * (len(tensors) - 1)
                detail = f"{len(tensors)} equal, {size:,} bytes too many"
                add("duplicate_constants", copy.origins_of(readers), detail=detail, tensors=tensors)
        unread = [value for value in self._unread if value.name not in model.graph.initializers]
        if unread:
            self._unread = []
            size = sum(bytes_of(value.const_value) for value in unread)
            tensors = [value.name or "" for value in unread]
            add("unused_initializers", (), detail=f"{len(unread)}, {size:,} bytes", tensors=tensors)

    def _left(self, copy: _Copy, found: Iterable[Declined], level: Level) -> None:
        """Add nodes that passes leave unchanged, unless another pass changes them."""
        known: defaultdict[str, set[str]] = defaultdict(set)
        for _, finding in self._found:
            known[finding.kind].update(finding.nodes)
        for each in found:
            nodes = copy.origins_of(each.nodes)
            names = {name_of_node(node) for node in nodes}
            if nodes and known[each.kind].isdisjoint(names):
                known[each.kind].update(names)
                self._add(
                    each.kind,
                    nodes,
                    why=each.why or self._why(each.kind, level),
                    detail=each.detail,
                )

    def _add(
        self,
        kind: str,
        nodes: Sequence[ir.Node],
        *,
        fixed_by: str | None = None,
        level: Level | None = None,
        why: str = "",
        detail: str = "",
        tensors: Sequence[str] = (),
    ) -> None:
        nodes = sorted(nodes, key=self._places.__getitem__)
        module, names = self._facts.module_of(nodes), tuple(map(name_of_node, nodes))
        finding = Finding(kind, module, names, fixed_by, why, detail, tuple(tensors), level)
        self._found.append((self._places[nodes[0]] if nodes else 0, finding))
        self._known.add(frozenset(names))

    def _why(self, kind: str, level: Level) -> str:
        """Why nodes of a kind stay after the passes of a level, if no pass says why."""
        known, levels = KINDS.get(kind), self._passes.LEVELS
        if known is None or known.fixed_by is None:
            return "" if known is None else known.why
        needed = self._passes.find(known.fixed_by).level
        if levels.index(needed) > levels.index(level):
            return f"{known.fixed_by} did not run: it is of level {needed}"
        return (
            known.why or f"{known.fixed_by} leaves it: it does not meet the conditions of the pass"
        )

    def _kind_of(self, name: str, rewrite: Rewrite) -> str:
        """The kind of what a pass changed: a key of `KINDS`, or the name of the pass."""
        if name in ("fuse_for_onnxruntime", "fuse_attention"):
            return _fused_kind(rewrite) or name
        noted = self._passes.kind_of_change(rewrite.removed)
        return noted or next(
            (kind for kind, known in KINDS.items() if known.fixed_by == name), name
        )


def _detail(rewrite: Rewrite) -> str:
    """The operators that took the place of nodes, or those that read the result where there are none."""
    if rewrite.added:
        return "becomes " + ", ".join(dict.fromkeys(node.op_type for node in rewrite.added))
    fed = Counter(node.op_type for node in rewrite.readers)
    return (
        "feeds "
        + ", ".join(f"{op} x{count}" if count > 1 else op for op, count in fed.most_common())
        if fed
        else ""
    )


@dataclass(frozen=True)
class Rewrite:
    """Nodes that a pass eliminated or changed together, in order, with the inputs of the first of them.

    ``added``: new nodes in their place; a node that was changed is in both. ``readers``: other
    consumers of their outputs.
    """

    removed: tuple[ir.Node, ...]
    added: tuple[ir.Node, ...]
    inputs: Sequence[ir.Value | None]
    readers: tuple[ir.Node, ...]

    @property
    def operators(self) -> frozenset[str]:
        """Operators of the nodes that were eliminated."""
        return frozenset(node.op_type for node in self.removed)


def rewrites(difference: PassDifference, *, one_by_one: bool = False) -> Iterator[Rewrite]:
    """The rewrites of one run of a pass; with ``one_by_one``, each node is one of its own.

    A rewrite is what lies between a value and the equal value that replaced it. Those that share a
    node are one. A node that was eliminated with no value in its place belongs to the nodes that
    read it.
    """
    removed, added = dict.fromkeys(difference.removed), dict.fromkeys(difference.added)
    groups: Groups[ir.Node] = Groups()
    for node in (*removed, *(node for node in added if node not in removed)):
        groups.add(node)
    placed: set[ir.Node] = set()
    for old, new in () if one_by_one else difference.equal.items():
        replaced, _ = difference.replaced(old)
        together = [*replaced, *difference.replacing(new)] if replaced else []
        placed.update(together)
        for node in together[1:]:
            groups.join(together[0], node)
    for node in () if one_by_one else removed:
        for value in difference.before.nodes[node].inputs:
            producer = None if value is None else difference.before.makers.get(value)
            if producer in removed and not (node in placed and producer in placed):
                groups.join(producer, node)
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node, seen in difference.before.nodes.items() if removed else ():
        for value in seen.inputs:
            if value is not None and difference.before.makers.get(value) in removed:
                readers.setdefault(value, []).append(node)
    for members in groups:
        gone = tuple(node for node in members if node in removed)
        # it stays, and only lost an attribute
        if gone and not (one_by_one and members[0] in added):
            values = (value for node in gone for value in difference.before.nodes[node].outputs)
            read = dict.fromkeys(node for value in values for node in readers.get(value, ()))
            news = tuple(node for node in members if node in added)
            inputs = difference.before.nodes[gone[0]].inputs
            yield Rewrite(gone, news, inputs, tuple(node for node in read if node not in gone))


def equal_constants(
    difference: PassDifference,
) -> Iterator[tuple[tuple[ir.Value, ...], tuple[ir.Node, ...]]]:
    """Equal constants of which a pass kept the first one, and the nodes that read them."""
    merged: defaultdict[ir.Value, list[ir.Value]] = defaultdict(list)
    for old, new in difference.equal.items():
        if (
            old.producer() is None
            and new.producer() is None
            and None not in (old.const_value, new.const_value)
        ):
            merged[new].append(old)
    readers: defaultdict[ir.Value | None, list[ir.Node]] = defaultdict(list)
    for node, seen in difference.before.nodes.items() if merged else ():
        for value in dict.fromkeys(seen.inputs):
            readers[value].append(node)
    for kept, others in merged.items():
        values = (kept, *others)
        yield values, tuple(dict.fromkeys(node for value in values for node in readers[value]))


ONE_BY_ONE = "eliminate_identity_ops"
"""The pass whose every node is a finding of its own, also if several are consecutive."""


def _fused_kind(rewrite: Rewrite) -> str | None:
    made = {node.op_type for node in rewrite.added}
    if any(op.endswith("Attention") for op in made):
        return "attention"
    if any(op.endswith("Gelu") for op in made):
        return next(
            (f"gelu_{op.lower()}" for op in ("Erf", "Tanh") if op in rewrite.operators), None
        )
    return "rms_norm" if any("Simplified" in op or op.startswith("RMS") for op in made) else None
