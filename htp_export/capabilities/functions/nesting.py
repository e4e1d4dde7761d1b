"""`functions` and `inline`: modules of a model as ONNX functions, and the flat graph again."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.alignment.origin_map import renew_map
from htp_export.capabilities.functions.bodies import Bodies, differing_constants
from htp_export.capabilities.functions.originals import flat_order, share_bodies
from htp_export.capabilities.functions.placing import Levels, Placement
from htp_export.editing.flattening import dissolved, flattened
from htp_export.editing.function_records import DOMAIN, Records
from htp_export.errors import InputError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format import tags
from htp_export.format.call_tree import Instance
from htp_export.format.hierarchy import ModuleInfo
from htp_export.model.copies import Copied
from htp_export.model.model_faults import names_model_faults
from htp_export.model.regions import GraphIndex, all_nodes
from htp_export.model.tagged import HoldsModel, ModelSource, TaggedModel, load
from htp_export.model.tensor_names import UsedNames
from htp_export.reporting.columns import Column, many
from htp_export.reporting.result import Table


@dataclass(frozen=True)
class FunctionRow:
    """One new function.

    Attributes:
        class_name: The class of its modules.
        modules: Their paths, in the order of ``named_modules()``.
        calls: Number of calls of these modules that it replaces.
        nodes: Nodes in its body, with calls of other functions and nodes in subgraphs.
        inputs: Its inputs, with weights.
        outputs: Its outputs.
    """

    class_name: str
    modules: tuple[str, ...]
    calls: int
    nodes: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Nested(HoldsModel):
    """The result of `functions`.

    Attributes:
        model: The model.
        modules: Path of each module that became a function → identifier of the function,
            ``htp::BertLayer``; of the first call, if calls became different functions.
        functions: Identifier → the function.
        skipped: Path of each selected module that stayed flat → reason.
        outside: Path of a module that became a function → number of its nodes outside of the
            function: shared with other modules, on a path that leaves the module and returns, or
            constants that differ between modules.
    """

    model: ir.Model = field(repr=False)
    modules: Mapping[str, str]
    functions: Mapping[str, FunctionRow]
    skipped: Mapping[str, str]
    outside: Mapping[str, int]

    @property
    def summary(self) -> str:
        """The numbers of functions, of their modules, and of modules that stayed flat."""
        count = f"{len(self.functions)} functions of {len(self.modules)} modules"
        if not self.skipped:
            return count
        total = len(self.skipped) + len(self.modules)
        return f"{count}; left flat: {len(self.skipped)} of {total} modules"

    def table(self) -> Table:
        """The functions."""
        return FUNCTION_COLUMNS, self.functions.items()


FUNCTION_COLUMNS: tuple[Column[tuple[str, FunctionRow]], ...] = (
    Column("function", "function", lambda item: item[0], style="cyan", right=False),
    Column("calls", "calls", lambda item: item[1].calls),
    Column("nodes", "nodes", lambda item: item[1].nodes),
    Column("inputs", "inputs", lambda item: item[1].inputs),
    Column("outputs", "outputs", lambda item: item[1].outputs),
    Column("module", "first module", lambda item: item[1].modules[0], right=False),
)
"""The columns of a function, with its identifier."""


@names_model_faults("model")
def functions(
    model: ModelSource,
    select: str | Sequence[str],
    output: str | os.PathLike[str] | None = None,
    *,
    share_weights: bool = False,
) -> Nested:
    """Turn selected modules into ONNX functions, nested as the modules are.

    Viewers then show the hierarchy; runtimes compute the same. Modules of one class that compute
    the same share a function, which has their weights as inputs. The root, modules that are not
    ``computed``, and work that several modules share stay in the graph. Functions from an earlier
    call are inlined first. `inline` restores the flat graph.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed. It needs tags of htp_export; weights are not read.
        select: The modules; see ``TaggedModel.select``. ``"**"`` is every module.
        output: The file to write.
        share_weights: Leave external weights in the data file of another model in the folder of
            ``output``: no copy.

    Returns:
        The model, its functions, and the reason for each selected module that stayed flat.

    Raises:
        FileError: A file cannot be read or written.
        InputError: None of the selected modules can be a function; the message has the reason.
        SelectorError: The selector cannot be read, or a part of it matches no module.
        UntaggedModelError: The model has no tags, or only torch's own scopes.

    Examples:
        >>> import torch, htp_export
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> net = torch.nn.Sequential(block(), block()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> nested = htp_export.functions(program, "class:Sequential")
        >>> dict(nested.modules), [node.op_type for node in nested.model.graph], dict(nested.skipped)
        ({'0': 'htp::Sequential', '1': 'htp::Sequential'}, ['Sequential', 'Sequential'], {'': 'it is
        the graph itself'})
    """
    check_target(output)
    tagged = load(model)
    selected = tagged.select(select)
    tagged.require_exact_tags()
    wanted = [path for path in selected if path and tagged.hierarchy[path].fate.is_exact]
    has_functions = any(function.domain == DOMAIN for function in tagged.model.functions.values())
    source = dissolved(tagged) if has_functions else tagged
    sources, index, placement, bodies = _built(source, wanted)
    model = bodies.model
    identifiers = _functions_of(bodies)
    skipped: dict[str, str] = {}
    for path in selected:
        if path not in identifiers:
            skipped[path] = _why_flat(tagged.hierarchy[path], index, placement)
    if not identifiers:
        raise _none_possible(skipped)
    records = Records(share_bodies(bodies, sources, tagged.calls), flat_order(bodies, sources))
    written_map = model.metadata_props.get(tags.MAP)
    bodies.edit.finish()
    if written_map is not None:  # it describes the flat graph, which is as it was
        model.metadata_props[tags.MAP] = written_map
    model.opset_imports[DOMAIN] = 1
    if records.calls or records.order:
        model.metadata_props[tags.FUNCTIONS] = records.to_json()
    if output is not None:
        write_model(model, output, share_weights=share_weights)
    ordered = {path: identifiers[path] for path in selected if path in identifiers}
    return Nested(model, ordered, _rows(bodies), skipped, _outside(index, placement, ordered))


def _none_possible(skipped: Mapping[str, str]) -> InputError:
    reasons = [f"{path or '(root)'}: {reason}" for path, reason in skipped.items()]
    listed = "; ".join(reasons[:5])
    more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return InputError(f"no selected module can be a function: {listed}{more}")


def _built(
    source: TaggedModel, wanted: Collection[str]
) -> tuple[Mapping[ir.Node, ir.Node], GraphIndex, Placement, Bodies]:
    """Build functions of a copy of a model.

    Constants that differ between equal functions become inputs, so that one function is enough.

    Returns node of the copy → node of the model; the index of the copy before; the placement of
    its nodes; the functions.
    """
    outside: dict[ir.Node, set[Instance]] = {}
    while True:
        copied = Copied.of(source)
        work, sources = copied.tagged, copied.original_of
        index = GraphIndex(work.model, work.work_of)
        placement = Placement(work, index, wanted)
        for node in list(placement.chains) if outside else ():
            placement.without(node, outside.get(sources[node], ()))
        bodies = _build(work, index, placement)
        differing = differing_constants(bodies.occurrences.values(), source.hierarchy)
        count = sum(map(len, outside.values()))
        for node, instances in differing.items():
            outside.setdefault(sources[node], set()).update(instances)
        if sum(map(len, outside.values())) == count:
            return sources, index, placement, bodies


def _build(work: TaggedModel, index: GraphIndex, placement: Placement) -> Bodies:
    """Build functions of a model's groups, in place."""
    levels = Levels(placement, index.works)
    inner_graphs = [node.graph for node in placement.scopes if node.graph]
    graphs = list(dict.fromkeys([work.model.graph, *inner_graphs]))
    # outer graphs first: their groups take the nodes of inner graphs with them
    arranged = {graph: levels.arrange_graph(graph) for graph in graphs}
    bodies = Bodies(work, index)
    for graph in reversed(graphs):
        bodies.build(graph, arranged[graph])
    nodes = list(work.model.graph.all_nodes())
    used = UsedNames(str(node.name) for node in nodes if node not in bodies.occurrences)
    for node in nodes:
        if node in bodies.occurrences:
            node.name = used.unused(str(node.name))
    return bodies


def _functions_of(bodies: Bodies) -> dict[str, str]:
    """Module path → identifier of the function of its first call."""
    identifiers: dict[str, str] = {}
    by_call = sorted(bodies.occurrences.values(), key=lambda occurrence: occurrence.instance.call)
    for occurrence in by_call:
        identifiers.setdefault(occurrence.instance.path, _identifier(occurrence.function))
    return identifiers


def _rows(bodies: Bodies) -> dict[str, FunctionRow]:
    paths_of: defaultdict[ir.Function, list[str]] = defaultdict(list)
    for occurrence in bodies.occurrences.values():
        paths_of[occurrence.function].append(occurrence.instance.path)
    order = {path: position for position, path in enumerate(bodies.hierarchy)}
    rows: dict[str, FunctionRow] = {}
    for function, paths in paths_of.items():
        rows[_identifier(function)] = FunctionRow(
            class_name=bodies.hierarchy[paths[0]].class_name,
            modules=tuple(sorted(set(paths), key=order.__getitem__)),
            calls=len(paths),
            nodes=sum(1 for _ in function.all_nodes()),
            inputs=len(function.inputs),
            outputs=len(function.outputs),
        )
    return rows


def _outside(index: GraphIndex, placement: Placement, modules: Collection[str]) -> dict[str, int]:
    """Module path → number of nodes of it or its descendants outside its function, if not 0."""
    counts: Counter[str] = Counter()
    functions = frozenset(modules)
    for node, scopes in placement.scopes.items():
        functions_around: set[str] = set()
        for scope in (node, *scopes):
            functions_around.update(instance.path for instance in placement.chains[scope])
        counts.update((index.works[node].modules & functions) - functions_around)
    return {path: counts[path] for path in modules if counts[path]}


def _why_flat(module: ModuleInfo, index: GraphIndex, placement: Placement) -> str:
    """The reason why a selected module is no function."""
    if not module.path:
        return "it is the graph itself"
    if not module.fate.ran:
        return "it never ran; select what it holds"
    if module.fate.is_merged:
        return f"it is merged with {', '.join(map(repr, module.fused_with)) or 'its neighbours'}"
    if not module.fate.is_exact:
        return module.fate.meaning
    if module.path in placement.flat:
        return placement.flat[module.path]
    nodes = index.below.get(module.path, ())
    if not nodes:
        return "it has no nodes"
    if all(node not in placement.chains for node in nodes):
        return "it lies in functions that the model has already; inline them first"
    if all(tags.is_under(owner, module.path) for node in nodes for owner in index.owners[node]):
        return "its calls share all its nodes"
    return "all its nodes are shared with other modules"


def _identifier(function: ir.Function) -> str:
    return f"{function.domain}::{function.name}"


@dataclass(frozen=True)
class Inlined(HoldsModel):
    """The result of `inline`.

    Attributes:
        model: The model without functions.
        functions: Identifier of each function, ``htp::BertLayer`` → number of its calls in the
            flat graph.
        nodes_before: Number of nodes before; nodes in functions count once.
        nodes_after: Number of nodes after.
    """

    model: ir.Model = field(repr=False)
    functions: Mapping[str, int]
    nodes_before: int
    nodes_after: int

    @property
    def summary(self) -> str:
        """The result in one line."""
        if not self.functions:
            return f"there are no functions; {many(self.nodes_after, 'node')}"
        calls, nodes = many(sum(self.functions.values()), "call"), many(self.nodes_after, "node")
        return f"{calls} of {many(len(self.functions), 'function')} inlined: {nodes}"


@names_model_faults("model")
def inline(
    model: ModelSource, output: str | os.PathLike[str] | None = None, *, share_weights: bool = False
) -> Inlined:
    """Inline the functions of a model; the result is a flat, tagged graph.

    In a model that ``functions`` wrote, every node gets its original name, owners and types. Nodes
    of other functions get unique names, and the tags of the call if they have none.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed. It needs no tags; weights are not read.
        output: The file to write.
        share_weights: Leave external weights in the data file of another model in the folder of
            ``output``: no copy.

    Returns:
        The flat model, and the functions that it had.

    Raises:
        FileError: A file cannot be read or written.
        InputError: A function cannot be inlined: it calls itself, needs another opset, or has
            graphs as attributes; or the flat graph is too large.

    Examples:
        >>> import onnx_ir as ir
        >>> relu = ir.node("Relu", [ir.val("a")])
        >>> body = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20})
        >>> call = ir.node("Act", [ir.val("x")], domain="net", metadata_props={"htp.module": "act"})
        >>> graph = ir.Graph(call.inputs, call.outputs, nodes=[call], opset_imports={"": 20, "net": 1})
        >>> function = ir.Function("net", "Act", graph=body, attributes=[])
        >>> result = inline(ir.Model(graph, ir_version=10, functions=[function]))
        >>> [(node.op_type, node.metadata_props["htp.module"]) for node in result.model.graph]
        [('Relu', 'act')]
        >>> print(result)
        1 call of 1 function inlined: 1 node
    """
    check_target(output)
    tagged = load(model)
    flat, calls = flattened(tagged)
    renew_map(flat, had_map=tags.MAP in flat.metadata_props)
    if output is not None:
        write_model(flat, output, share_weights=share_weights)
    before = sum(1 for _ in all_nodes(tagged.model))
    after = sum(1 for _ in all_nodes(flat))
    return Inlined(flat, calls, before, after)
