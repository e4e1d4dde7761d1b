"""Forensics: the changes that each pass would apply to a graph, and why other nodes stay."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import onnx_ir as ir

from htp_export.capabilities.forensics.finding import KINDS, SINGLE_STEPS, Finding, Forensics, Moved
from htp_export.capabilities.forensics.patterns import large_duplicates, unchanged
from htp_export.costs.execution import RunStep, run_by_shapes
from htp_export.costs.memory import moved_bytes
from htp_export.editing.editing import bytes_of
from htp_export.editing.flattening import read_flat
from htp_export.errors import HtpExportError
from htp_export.format import tags
from htp_export.model.copies import Copied
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.model_faults import names_model_faults
from htp_export.model.neighbours import Groups
from htp_export.model.regions import name_of_node
from htp_export.model.tagged import ModelSource, TaggedModel

if TYPE_CHECKING:
    from htp_export.capabilities.optimize.registry import Declined, Level, PassInfo
    from htp_export.lineage.difference import PassDifference


_FIRST = ("eliminate_unused_initializers", "eliminate_dead_nodes")
"""Every pass removes unused nodes and weights, too; these run first, so that the finding is
theirs."""


@names_model_faults("model")
def forensics(
    model: ModelSource, *, select: str | Sequence[str] | None = None, level: Level = "fused"
) -> Forensics:
    """List the possible simplifications of a model, by module, and the pass that applies each.

    For each finding: its nodes, its module, the pass of `htp_export.optimize` that changes it, or
    the reason why none does. The passes run on a copy that shares the weights: the passes of level
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
        found = [finding for finding in found if tags.is_under_any(finding.module, chosen)]
    return Forensics(tuple(found), len(tagged.nodes), tagged.tag_facts, investigation.failed)


@dataclass
class _Copy:
    """The model, or a copy that passes run on.

    ``origins``: node → the original nodes that it replaces.
    ``written``: the nodes of the original model.
    """

    tagged: TaggedModel
    origins: dict[ir.Node, tuple[ir.Node, ...]]
    written: Collection[ir.Node]

    def again(self) -> _Copy:
        """Return a copy of the present state."""
        copied = Copied.of(self.tagged)
        origins: dict[ir.Node, tuple[ir.Node, ...]] = {}
        written: set[ir.Node] = set()
        for node, copy in copied.copy_of.items():
            origins[copy] = self.origins.get(node, ())
            if node in self.written:
                written.add(copy)
        return _Copy(copied.tagged, origins, written)

    def origins_of(self, nodes: Iterable[ir.Node]) -> tuple[ir.Node, ...]:
        """Return the original nodes that some nodes replace."""
        return tuple(
            dict.fromkeys(origin for node in nodes for origin in self.origins.get(node, ()))
        )


class _Investigation:
    """Runs passes on copies of a model and collects their changes.

    ``failed``: passes that raised → the reason.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        from htp_export.capabilities.optimize import registry

        self._passes = registry
        self._tagged, self._facts = tagged, GraphFacts(tagged)
        self._places = {node: place for place, node in enumerate(tagged.nodes)}
        graph = tagged.model.graph
        constants = [node.outputs[0] for node in self._facts.nodes_of("Constant")]
        stored = (*graph.initializers.values(), *constants)
        self._constants = {value.name or "" for value in stored}
        self._unread = [value for value in graph.initializers.values() if not value.uses()]
        self._found: list[tuple[int, Finding]] = []  # with the place of the first node
        # names of nodes → the kinds of their findings
        self._known: dict[frozenset[str], frozenset[str]] = {}
        self.failed: dict[str, str] = {}
        # index of a finding in `_found` → the original nodes and the new ones
        self._single_steps: dict[int, tuple[Sequence[ir.Node], Sequence[ir.Node]]] = {}

    @property
    def findings(self) -> list[Finding]:
        """The findings, in the order of tables."""
        order = {kind: position for position, kind in enumerate((*KINDS, *self._passes.DEFAULT))}

        def sort_key(entry: tuple[int, Finding]) -> tuple[int, int]:
            first_node, finding = entry
            return order.get(finding.kind, len(order)), first_node

        return [finding for _, finding in sorted(self._found, key=sort_key)]

    def run(self, level: Level) -> None:
        """Run the passes up to a level: exact ones, then the tolerant ones, then others.

        Each of the other passes starts from the result of the exact ones.
        """
        passes, levels = self._passes, self._passes.LEVELS
        chosen = passes.choose("default", level)
        exact_names = [info.name for info in chosen if info.level == "exact"]
        exact = [passes.find(name) for name in dict.fromkeys((*_FIRST, *exact_names))]
        original = _Copy(
            self._tagged, {node: (node,) for node in self._places}, self._places.keys()
        )
        simple = self._run(exact, "exact", original)
        results = [simple]
        if level != "exact":
            unfused = [info for info in chosen if info.level != "fused"]
            results.append(self._run(unfused, "tolerant", simple))
        for info in passes.available().values():
            if info.level != "fused" and info.name in passes.DEFAULT:
                continue
            is_allowed = levels.index(info.level) <= levels.index(level)
            if is_allowed and info.applies(simple.tagged.model):
                results.append(self._run([info], info.level, simple))
        for copy in results:
            self._left(copy, passes.declined(copy.tagged.nodes), level)
        self._left(simple, unchanged(GraphFacts(simple.tagged)), level)
        for constants, readers, why, detail in large_duplicates(self._facts):
            self._add("duplicate_constants", readers, detail=detail, why=why, tensors=constants)

    def _run(self, passes: Sequence[PassInfo], level: Level, source: _Copy) -> _Copy:
        """Run passes on a copy of a model; if one raises, start again without it."""
        from htp_export.capabilities.optimize.optimizing import Pipeline

        while True:
            copy = source.again()
            known, unread, found = dict(self._known), self._unread, len(self._found)
            self._single_steps = {}
            watch = functools.partial(self._watch, copy, level)
            usable = [info for info in passes if info.name not in self.failed]
            pipeline = Pipeline(usable, watch=watch)
            try:
                copy.tagged = pipeline.run(copy.tagged)
                self._add_moved(copy.tagged)
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
        """Add the findings of one run: rewrites, merged constants, and removed weights."""
        level = max(level, info.level, key=self._passes.LEVELS.index)
        add = functools.partial(self._add, fixed_by=info.name, level=level)
        self._add_rewrites(copy, info.name, difference, add)
        self._add_merged_constants(copy, difference, add)
        self._add_removed_weights(model, add)

    def _add_rewrites(
        self, copy: _Copy, pass_name: str, difference: PassDifference, add: Callable[..., None]
    ) -> None:
        """Add a finding for each rewrite of original nodes, and follow the origins of new nodes."""
        for rewrite in rewrites(difference, one_by_one=pass_name == ONE_BY_ONE):
            origins = copy.origins_of(rewrite.removed)
            copy.origins.update(dict.fromkeys(rewrite.added, origins))
            if set(rewrite.removed).isdisjoint(copy.written) or rewrite.operators == {"Constant"}:
                continue
            kind = self._kind_of(pass_name, rewrite)
            # another pass changed these nodes already
            kinds = self._known.get(frozenset(map(name_of_node, origins)), frozenset())
            if kind in kinds or (kind == pass_name and kinds):
                continue
            weights = rewrite.inputs[:1] if kind == "identity_weight" else []
            if kind in SINGLE_STEPS:
                self._single_steps[len(self._found)] = (origins, rewrite.added)
            names_of_weights = [value.name or "" for value in weights if value is not None]
            add(kind, origins, detail=_detail(rewrite), tensors=names_of_weights)

    def _add_moved(self, tagged: TaggedModel) -> None:
        """Add the bytes that operators in single steps move, in the original model and now."""
        if not self._single_steps:
            return
        after = _steps_of(tagged)
        for index, (nodes, new_nodes) in self._single_steps.items():
            old_steps = [self._original_steps.get(node) for node in nodes]
            new_steps = [after.get(node) for node in new_nodes]
            moved = _moved(old_steps, new_steps)
            place, finding = self._found[index]
            self._found[index] = (place, replace(finding, moved=moved))

    @functools.cached_property
    def _original_steps(self) -> dict[ir.Node, RunStep]:
        return _steps_of(self._tagged)

    def _add_merged_constants(
        self, copy: _Copy, difference: PassDifference, add: Callable[..., None]
    ) -> None:
        """Add a finding for each group of equal constants of the original model."""
        for values, readers in equal_constants(difference):
            names = [value.name or "" for value in values]
            tensors = [name for name in names if name in self._constants]
            if len(tensors) > 1:
                size = bytes_of(values[0].const_value) * (len(tensors) - 1)
                detail = f"{len(tensors)} equal, {size:,} bytes too many"
                add("duplicate_constants", copy.origins_of(readers), detail=detail, tensors=tensors)

    def _add_removed_weights(self, model: ir.Model, add: Callable[..., None]) -> None:
        """Add one finding for the initializers without consumers, when a pass removes them."""
        removed = [value for value in self._unread if value.name not in model.graph.initializers]
        if not removed:
            return
        self._unread = []
        size = sum(bytes_of(value.const_value) for value in removed)
        tensors = [value.name or "" for value in removed]
        add("unused_initializers", (), detail=f"{len(removed)}, {size:,} bytes", tensors=tensors)

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
        known = self._known.get(frozenset(names), frozenset())
        self._known[frozenset(names)] = known | {kind}

    def _why(self, kind: str, level: Level) -> str:
        """Why nodes of a kind stay after the passes of a level, if no pass stated a reason."""
        known, levels = KINDS.get(kind), self._passes.LEVELS
        if known is None or known.fixed_by is None:
            return "" if known is None else known.why
        needed = self._passes.find(known.fixed_by).level
        if levels.index(needed) > levels.index(level):
            return f"level {level} leaves it: {known.fixed_by} is of level {needed}"
        return (
            known.why or f"{known.fixed_by} leaves it: it does not meet the conditions of the pass"
        )

    def _kind_of(self, name: str, rewrite: Rewrite) -> str:
        """The kind of a rewrite: a key of `KINDS`, or the name of the pass."""
        if name in ("fuse_for_onnxruntime", "fuse_attention"):
            return _fused_kind(rewrite) or name
        noted = self._passes.kind_of_change(rewrite.removed)
        return noted or next(
            (kind for kind, known in KINDS.items() if known.fixed_by == name), name
        )


def _steps_of(tagged: TaggedModel) -> dict[ir.Node, RunStep]:
    """The nodes of one run; none if the shapes of the model contradict each other."""
    try:
        run = run_by_shapes(tagged)
    except HtpExportError:
        return {}
    return {step.node: step for step in run.steps}


def _moved(old: Sequence[RunStep | None], new: Sequence[RunStep | None]) -> Moved | None:
    """The bytes that nodes move before and after; None if a node or a shape is unknown."""
    before = [step for step in old if step is not None]
    after = [step for step in new if step is not None]
    if len(before) < len(old) or len(after) < len(new):
        return None
    for step in (*before, *after):
        if any(tensor.shape is None for tensor in step.outputs):
            return None
    return Moved(*moved_bytes(before), *moved_bytes(after))


def _detail(rewrite: Rewrite) -> str:
    """The operators of the new nodes; if there are none, the operators of the consumers."""
    if rewrite.added:
        return "becomes " + ", ".join(dict.fromkeys(node.op_type for node in rewrite.added))
    consumers = Counter(node.op_type for node in rewrite.readers)
    if not consumers:
        return ""
    listed = [f"{op} x{count}" if count > 1 else op for op, count in consumers.most_common()]
    return "feeds " + ", ".join(listed)


@dataclass(frozen=True)
class Rewrite:
    """Nodes that a pass removed or changed together, in order, and the inputs of the first of them.

    ``added``: the new nodes; a node that was changed is in both. ``readers``: other consumers of
    the outputs.
    """

    removed: tuple[ir.Node, ...]
    added: tuple[ir.Node, ...]
    inputs: Sequence[ir.Value | None]
    readers: tuple[ir.Node, ...]

    @property
    def operators(self) -> frozenset[str]:
        """Operators of the removed nodes."""
        return frozenset(node.op_type for node in self.removed)


def rewrites(difference: PassDifference, *, one_by_one: bool = False) -> Iterator[Rewrite]:
    """The rewrites of one run of a pass; with ``one_by_one``, each node is one of its own.

    A rewrite consists of the nodes between a value and the equal value that replaced it. Rewrites
    that share a node are merged. A node that was removed without a replacement belongs to its
    consumers.
    """
    removed, added = dict.fromkeys(difference.removed), dict.fromkeys(difference.added)
    groups: Groups[ir.Node] = Groups()
    for node in {**removed, **added}:
        groups.add(node)
    if not one_by_one:
        _join_rewritten(groups, difference)
    consumers = _consumers_of(removed, difference)
    for members in groups:
        gone = tuple(node for node in members if node in removed)
        # one by one, a node in both sets stays and only lost an attribute
        if not gone or (one_by_one and members[0] in added):
            continue
        users: dict[ir.Node, None] = {}
        for node in gone:
            for value in difference.before.nodes[node].outputs:
                users.update(dict.fromkeys(consumers.get(value, ())))
        yield Rewrite(
            removed=gone,
            added=tuple(node for node in members if node in added),
            inputs=difference.before.nodes[gone[0]].inputs,
            readers=tuple(node for node in users if node not in gone),
        )


def _join_rewritten(groups: Groups[ir.Node], difference: PassDifference) -> None:
    """Join the nodes of each rewrite, and removed nodes with their removed producers."""
    removed = set(difference.removed)
    replaced: set[ir.Node] = set()
    for old, new in difference.equal.items():
        replaced_nodes, _ = difference.replaced(old)
        if not replaced_nodes:
            continue
        together = [*replaced_nodes, *difference.replacing(new)]
        replaced.update(together)
        for node in together[1:]:
            groups.join(together[0], node)
    for node in difference.removed:
        for value in difference.before.nodes[node].inputs:
            producer = None if value is None else difference.before.makers.get(value)
            # two nodes of rewrites are one rewrite only if a rewrite contains both
            if producer in removed and not (node in replaced and producer in replaced):
                groups.join(producer, node)


def _consumers_of(
    removed: Collection[ir.Node], difference: PassDifference
) -> dict[ir.Value, list[ir.Node]]:
    """Value of a removed node → its consumers before the pass."""
    consumers: dict[ir.Value, list[ir.Node]] = {}
    if not removed:
        return consumers
    for node, seen in difference.before.nodes.items():
        for value in seen.inputs:
            if value is not None and difference.before.makers.get(value) in removed:
                consumers.setdefault(value, []).append(node)
    return consumers


def equal_constants(
    difference: PassDifference,
) -> Iterator[tuple[tuple[ir.Value, ...], tuple[ir.Node, ...]]]:
    """Equal constants of which a pass kept the first one, and their consumers."""
    merged: defaultdict[ir.Value, list[ir.Value]] = defaultdict(list)
    for old, new in difference.equal.items():
        are_initializers = old.producer() is None and new.producer() is None
        if are_initializers and None not in (old.const_value, new.const_value):
            merged[new].append(old)
    if not merged:
        return
    readers: defaultdict[ir.Value | None, list[ir.Node]] = defaultdict(list)
    for node, seen in difference.before.nodes.items():
        for value in dict.fromkeys(seen.inputs):
            readers[value].append(node)
    for kept, others in merged.items():
        values = (kept, *others)
        yield values, tuple(dict.fromkeys(node for value in values for node in readers[value]))


ONE_BY_ONE = "eliminate_identity_ops"
"""The pass of which each node is a separate finding, also if several are consecutive."""


def _fused_kind(rewrite: Rewrite) -> str | None:
    new_operators = {node.op_type for node in rewrite.added}
    if any(op.endswith("Attention") for op in new_operators):
        return "attention"
    if any(op.endswith("Gelu") for op in new_operators):
        inner = [op for op in ("Erf", "Tanh") if op in rewrite.operators]
        return f"gelu_{inner[0].lower()}" if inner else None
    if any("Simplified" in op or op.startswith("RMS") for op in new_operators):
        return "rms_norm"
    return None
