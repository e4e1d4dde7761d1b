"""The modules, nodes and tags of a model as plain data, for drawing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from htp_export.capabilities.view.node_facts import NodeEntry, NodeReader, TensorEntry
from htp_export.capabilities.view.weight_statistics import WeightStatistics, weight_statistics
from htp_export.files.model_files import has_external_data
from htp_export.format import tags
from htp_export.model.module_facts import ModuleContents, ModuleFacts, contents_of, tied_parameters
from htp_export.model.tagged import Region, TaggedModel
from htp_export.results.tag_facts import TagFacts

__all__ = ["Inventory", "ModuleEntry", "take_inventory"]


@dataclass(frozen=True, kw_only=True)
class ModuleEntry(ModuleFacts):
    """One module.

    Attributes:
        own_nodes: Positions in ``Inventory.nodes`` of the nodes that no module below it computes.
        shared: Number of its nodes with the reason ``shared``.
        fused: Number of its nodes with the reason ``fused``.
        operators: Operator → its nodes, the most frequent first.
        reasons: ``htp.reason`` → its nodes.
        weights: The weights that it reads itself.
        inputs: The tensors that enter its region.
        outputs: The tensors that leave it.
        tied: Parameters that an earlier module holds, too: full name → full name there.
        counted_parameters: Of ``parameters``, those that no module before it holds, so that siblings add up; None if
            unknown.
        counted_bytes: The same of ``weight_bytes``.
        source: The lines of its ``forward``, ``modeling_bert.py:140-172``; ``""`` if unknown.
        failure: Why it could not be exported; ``""`` as a rule.
    """

    own_nodes: tuple[int, ...] = ()
    shared: int = 0
    fused: int = 0
    operators: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)
    weights: tuple[TensorEntry, ...] = ()
    inputs: tuple[TensorEntry, ...] = ()
    outputs: tuple[TensorEntry, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    counted_parameters: int | None = None
    counted_bytes: int | None = None
    source: str = ""
    failure: str = ""


@dataclass(frozen=True)
class Inventory:
    """A model, ready to be drawn.

    Attributes:
        name: What to call it.
        tags: What is known about its module tags.
        modules: Module path → module, in the order of ``named_modules()``; the root alone where there are no tags.
        nodes: Every node, those of subgraphs after the node that holds them.
        called: The paths of the modules that ran; the others are no level of their own.
        producer: The program that wrote the file, with its version.
        opsets: Domain → version; the main domain is ``ai.onnx``.
        ir_version: Version of the file format.
        external_data: Whether the weights lie in a file of their own.
        inputs: The model's inputs.
        outputs: The model's outputs.
        constants: Its initializers.
        statistics: Name of each initializer → what its values are like; empty where they were not read.
        notes: What else there is to know, as sentences.
    """

    name: str
    tags: TagFacts
    modules: Mapping[str, ModuleEntry]
    nodes: tuple[NodeEntry, ...]
    called: frozenset[str]
    producer: str = ""
    opsets: Mapping[str, int] = field(default_factory=dict)
    ir_version: int = 0
    external_data: bool = False
    inputs: tuple[TensorEntry, ...] = ()
    outputs: tuple[TensorEntry, ...] = ()
    constants: tuple[TensorEntry, ...] = ()
    statistics: Mapping[str, WeightStatistics] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def take_inventory(tagged: TaggedModel, name: str = "", statistics: bool = False) -> Inventory:
    """Everything that a drawing of a model shows.

    The weights are not read, unless their statistics are asked for. A model without tags is one module, its root,
    which owns every node.

    Args:
        tagged: The model.
        name: What to call it; the graph's own name where it is empty.
        statistics: Read every weight, and say what its values are like.

    Raises:
        InputError: If a weight is to be read and cannot be.

    Examples:
        >>> import onnx_ir as ir
        >>> from htp_export.model.tagged import load
        >>> relu = ir.node("Relu", [ir.val("x")], metadata_props={"htp.module": "act", "htp.reason": "scope"})
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20}, name="Net")
        >>> inventory = take_inventory(load(ir.Model(graph, ir_version=10)))
        >>> inventory.modules["act"].operators, inventory.tags.reasons
        ({'Relu': 1}, {'scope': 1})
    """
    contents = contents_of(tagged).modules
    reader = NodeReader(tagged, {weight for content in contents.values() for weight in content.own_weights})
    nodes = reader.entries()
    model = tagged.model
    place = {node: position for position, node in enumerate(tagged.nodes)}
    modules = {path: _module(tagged, content, reader, nodes, place) for path, content in contents.items()}
    parameters, weight_bytes = Counter[str](), Counter[str]()
    for path, content in contents.items():
        for up in tags.ancestors(path):
            parameters[up] += content.facts.self_parameters
            weight_bytes[up] += content.facts.self_weight_bytes
    modules = {
        path: replace(module, counted_parameters=parameters[path], counted_bytes=weight_bytes[path])
        for path, module in modules.items()
    }
    for path, tied in tied_parameters(tagged).items():
        if path in modules:
            modules[path] = replace(modules[path], tied=tied)
    return Inventory(
        name=name or model.graph.name or "model",
        tags=tagged.tag_facts,
        modules=modules,
        nodes=nodes,
        called=tagged.hierarchy.called,
        producer=" ".join(part for part in (model.producer_name, model.producer_version) if part),
        opsets={domain or "ai.onnx": version for domain, version in model.opset_imports.items()},
        ir_version=model.ir_version,
        external_data=has_external_data(model),
        inputs=tuple(map(reader.tensor_entry, model.graph.inputs)),
        outputs=tuple(map(reader.tensor_entry, model.graph.outputs)),
        constants=tuple(
            reader.tensor_entry(value) for graph in model.graphs() for value in graph.initializers.values()
        ),
        statistics=weight_statistics(model) if statistics else {},
    )


def _module(
    tagged: TaggedModel,
    contents: ModuleContents,
    reader: NodeReader,
    nodes: tuple[NodeEntry, ...],
    place: Mapping[ir.Node, int],
) -> ModuleEntry:
    inside = [nodes[place[node]] for node in contents.nodes]
    own_places = [place[node] for node in contents.own_nodes]
    ends: Region | ir.Graph = tagged.model.graph if tagged.source == "none" else tagged[contents.facts.path]
    return ModuleEntry(
        **vars(contents.facts),
        own_nodes=tuple(own_places),
        shared=sum(node.reason == "shared" for node in inside),
        fused=sum(node.reason == "fused" for node in inside),
        operators=dict(Counter(node.operator for node in inside).most_common()),
        reasons=dict(Counter(node.reason for node in inside if node.reason).most_common()),
        weights=tuple(map(reader.tensor_entry, contents.own_weights)),
        inputs=tuple(map(reader.tensor_entry, ends.inputs)),
        outputs=tuple(map(reader.tensor_entry, ends.outputs)),
        source=_source([nodes[position] for position in own_places]),
    )


def _source(nodes: list[NodeEntry]) -> str:
    """The source file of most of a module's own nodes, with the first and the last line."""
    lines: dict[str, list[int]] = {}
    for node in nodes:
        if node.source is not None:
            lines.setdefault(node.source.file, []).append(node.source.line)
    if not lines:
        return ""
    file = max(lines, key=lambda name: len(lines[name]))
    first, last = min(lines[file]), max(lines[file])
    return f"{file}:{first}" if first == last else f"{file}:{first}-{last}"
