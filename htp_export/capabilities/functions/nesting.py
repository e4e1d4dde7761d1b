"""`functions` and `inline`: modules of a model as ONNX functions of it, and the way back."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

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
from htp_export.model.model_faults import names_model_faults
from htp_export.model.regions import GraphIndex, all_nodes, twins_of
from htp_export.model.tagged import HoldsModel, ModelSource, TaggedModel, load
from htp_export.model.tensor_names import UsedNames
from htp_export.reporting.columns import Column, many
from htp_export.reporting.result import Table


@dataclass(frozen=True)
class FunctionRow:
    """One function that was made.

    Attributes:
        class_name: The class of the modules that it is.
        modules: Their paths, in the order of ``named_modules()``.
        calls: How many calls of these modules it stands for.
        nodes: Nodes in its body, calls of other functions and nodes in subgraphs counted.
        inputs: Its inputs, weights among them.
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
        """How many modules are functions, and how many are not."""
        left = (
            f"; left flat: {len(self.skipped)} of {len(self.skipped) + len(self.modules)} modules"
        )
        return f"{len(self.functions)} functions of {len(self.modules)} modules{left if self.skipped else ''}"

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
"""What is known of each function, by its identifier."""


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
        ({'0': 'htp::Sequential', '1': 'htp::Sequential'}, ['Sequential', 'Sequential'], {'': 'it is the graph itself'})
    """
    check_target(output)
    tagged = load(model)
    selected = tagged.select(select)
    tagged.require_exact_tags()
    wanted = [path for path in selected if path and tagged.hierarchy[path].fate.is_exact]
    has_functions = any(function.domain == DOMAIN for function in tagged.model.functions.values())
    sources, index, placement, bodies = _built(
        dissolved(tagged) if has_functions else tagged, wanted
    )
    model = bodies.model
    made = _functions_of(bodies)
    hierarchy = tagged.hierarchy
    skipped = {
        path: _why_flat(hierarchy[path], index, placement) for path in selected if path not in made
    }
    if not made:
        listed = "; ".join(
            f"{path or '(root)'}: {reason}" for path, reason in list(skipped.items())[:5]
        )
        more = f"; and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        raise InputError(f"no selected module can be a function: {listed}{more}")
    records = Records(share_bodies(bodies, sources, tagged.calls), flat_order(bodies, sources))
    model.opset_imports[DOMAIN] = 1
    if records.calls or records.order:
        model.metadata_props[tags.FUNCTIONS] = records.to_json()
    if output is not None:
        write_model(model, output, share_weights=share_weights)
    ordered = {path: made[path] for path in selected if path in made}
    return Nested(model, ordered, _rows(bodies), skipped, _outside(index, placement, ordered))


def _built(
    source: TaggedModel, wanted: Collection[str]
) -> tuple[Mapping[ir.Node, ir.Node], GraphIndex, Placement, Bodies]:
    """Make functions of a copy of a model; constants in which functions differ become inputs, so that one is left.

    Returns node of the copy → node of the model; what was known of the copy before; where its nodes
    are; the functions.
    """
    outside: dict[ir.Node, set[Instance]] = {}
    while True:
        model = source.model.clone()
        sources = twins_of(model, source.model)
        work = TaggedModel(model, source.hierarchy)
        index = GraphIndex(model, work.work_of)
        placement = Placement(work, index, wanted)
        for node in list(placement.chains) if outside else ():
            placement.without(node, outside.get(sources[node], ()))
        bodies = _make(work, index, placement)
        known = sum(map(len, outside.values()))
        for node, instances in differing_constants(
            bodies.occurrences.values(), source.hierarchy
        ).items():
            outside.setdefault(sources[node], set()).update(instances)
        if sum(map(len, outside.values())) == known:
            return sources, index, placement, bodies


def _make(work: TaggedModel, index: GraphIndex, placement: Placement) -> Bodies:
    """Make functions of a model's groups, in place."""
    levels = Levels(placement, index.works)
    graphs = list(
        dict.fromkeys([work.model.graph, *(node.graph for node in placement.scopes if node.graph)])
    )
    # those outside first: they take nodes along
    arranged = {graph: levels.arrange_graph(graph) for graph in graphs}
    bodies = Bodies(work, index)
    for graph in reversed(graphs):
        bodies.build(graph, arranged[graph])
    outer = list(work.model.graph.all_nodes())
    used = UsedNames(str(node.name) for node in outer if node not in bodies.occurrences)
    for node in outer:
        if node in bodies.occurrences:
            node.name = used.unused(str(node.name))
    return bodies


def _functions_of(bodies: Bodies) -> dict[str, str]:
    """Path → identifier of the function that its first call became."""
    found: dict[str, str] = {}
    for occurrence in sorted(bodies.occurrences.values(), key=lambda one: one.instance.call):
        found.setdefault(occurrence.instance.path, _identifier(occurrence.function))
    return found


def _rows(bodies: Bodies) -> dict[str, FunctionRow]:
    alike: defaultdict[ir.Function, list[str]] = defaultdict(list)
    for occurrence in bodies.occurrences.values():
        alike[occurrence.function].append(occurrence.instance.path)
    places = {path: place for place, path in enumerate(bodies.hierarchy)}
    return {
        _identifier(function): FunctionRow(
            class_name=bodies.hierarchy[paths[0]].class_name,
            modules=tuple(sorted(set(paths), key=places.__getitem__)),
            calls=len(paths),
            nodes=sum(1 for _ in function.all_nodes()),
            inputs=len(function.inputs),
            outputs=len(function.outputs),
        )
        for function, paths in alike.items()
    }


def _outside(index: GraphIndex, placement: Placement, made: Collection[str]) -> dict[str, int]:
    """Path → nodes with an owner at or below it that are not in its function, where there are any."""
    counts: Counter[str] = Counter()
    functions = frozenset(made)
    for node in placement.chains:
        held = {
            one.path for scope in (node, *placement.scopes[node]) for one in placement.chains[scope]
        }
        counts.update((index.works[node].modules & functions) - held)
    return {path: counts[path] for path in made if counts[path]}


def _why_flat(module: ModuleInfo, index: GraphIndex, placement: Placement) -> str:
    """Why a selected module is no function."""
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
        functions: Identifier of each function, ``htp::BertLayer`` → number of its calls in the flat
            graph.
        nodes_before: Number of nodes before, those in functions once.
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
    if output is not None:
        write_model(flat, output, share_weights=share_weights)
    before, after = (sum(1 for _ in all_nodes(each)) for each in (tagged.model, flat))
    return Inlined(flat, calls, before, after)
