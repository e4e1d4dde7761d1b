"""Results of `place` and `placement`: devices by module, and the tensors between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.place.devices import session_options_with
from htp_export.format.call_tree import NodeCalls
from htp_export.format.tags import ancestors, common_ancestor
from htp_export.model.module_facts import ModuleFacts, contents_of
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import HoldsModel, TaggedModel
from htp_export.reporting.columns import CLASS_NAME, Column, many, si
from htp_export.reporting.tables import ModuleTable
from htp_export.reporting.tag_facts import TagFacts
from htp_export.shapes.operator_kinds import subgraphs

_MOST_NAMED = 2  # consumers in a line of text, so that it stays short


@dataclass(frozen=True)
class Crossing:
    """A tensor that is computed on one device and used on another; one for each other device.

    Attributes:
        tensor: Its name; in a result of ``placement``, the name in ONNX Runtime's graph.
        bytes: Its size; None if its shape is unknown.
        source: The device or execution provider of its producer.
        target: The device or execution provider of its consumers.
        producer: Path of the module that computes it; None for an input of the model.
        consumers: Paths of the modules that use it; empty if it is only an output of the model.
        copied: Whether ONNX Runtime copies it to other memory; None if it does not report that.
    """

    tensor: str
    bytes: int | None
    source: str
    target: str
    producer: str | None
    consumers: tuple[str, ...]
    copied: bool | None = None

    def __str__(self) -> str:
        start = "an input" if self.producer is None else self.producer or "(root)"
        named = [path or "(root)" for path in self.consumers[:_MOST_NAMED]] or ["an output"]
        more = len(self.consumers) - _MOST_NAMED
        end = ", ".join(named) + (f" and {more} more" if more > 0 else "")
        size = "unknown size" if self.bytes is None else f"{self.bytes:,} bytes"
        return f"{self.tensor}: {size}, {start} ({self.source}) to {end} ({self.target})"


def _edges(model: ir.Model) -> Iterator[tuple[ir.Value, ir.Node | None, ir.Node | None]]:
    """Yield each tensor, its producer (None: a model input), and a consumer (None: an output).

    A subgraph receives its inputs from the node that contains it, and returns its outputs to it.
    Initializers and constants are omitted: every device has its own copies.
    """
    holder: dict[ir.Graph, ir.Node] = {}
    for node in all_nodes(model):
        holder.update(dict.fromkeys(subgraphs(node), node))

    def producer_of(value: ir.Value) -> tuple[bool, ir.Node | None]:
        """Whether a value counts, and its producer."""
        node = value.producer()
        if node is not None:
            return node.op_type != "Constant", node
        is_input = value.is_graph_input() and not value.is_initializer()
        return is_input, None if value.graph is None else holder.get(value.graph)

    for node in model.graph.all_nodes():
        for value in dict.fromkeys(value for value in node.inputs if value is not None):
            counts, producer = producer_of(value)
            if counts:
                yield value, producer, node
    for graph in (model.graph, *holder):
        for value in graph.outputs:
            counts, producer = producer_of(value)
            if counts and producer is not holder.get(graph):
                yield value, producer, holder.get(graph)


def crossings(
    model: ir.Model,
    device_of: Callable[[ir.Node], str | None],
    owners_of: Callable[[ir.Node], tuple[str, ...]],
    sizes: Mapping[str, int],
    host: str,
    counts: Callable[[ir.Value], bool] = lambda value: True,
) -> tuple[Crossing, ...]:
    """The tensors between devices of a model without functions, in the order of their first use.

    Tensors of nodes on an unknown device are omitted. ``host`` provides the inputs and receives the
    outputs of the model; ``sizes`` are bytes by name; tensors for which ``counts`` is False are
    omitted.
    """
    # Tensor, source and target → producer and consuming modules.
    found: dict[tuple[ir.Value, str, str], tuple[ir.Node | None, dict[str, None]]] = {}
    for value, producer, consumer in _edges(model):
        source = host if producer is None else device_of(producer)
        target = host if consumer is None else device_of(consumer)
        if source is None or target is None or source == target or not counts(value):
            continue
        _, consumers = found.setdefault((value, source, target), (producer, {}))
        if consumer is not None:
            consumers[_module(owners_of(consumer))] = None
    return tuple(
        Crossing(
            tensor=value.name or "",
            bytes=sizes.get(value.name or ""),
            source=source,
            target=target,
            producer=None if producer is None else _module(owners_of(producer)),
            consumers=tuple(consumers),
        )
        for (value, source, target), (producer, consumers) in found.items()
    )


def _module(owners: tuple[str, ...]) -> str:
    return common_ancestor(owners) if owners else ""


_AND = " + "
_NONE = "(none)"
_MOST_LINES = 10  # crossings in text, which should fit on a screen; to_dict has all


@dataclass(frozen=True, kw_only=True)
class PlacedModule(ModuleFacts):
    """The facts of a module, and its devices.

    Attributes:
        device: Its device or execution provider; several are joined by ``+``, the one with the most
            nodes first, and ``(none)`` last if other nodes have no device; empty if none is known.
            Nodes that are shared with modules outside do not count, unless it has no others.
        by_device: Device → number of its nodes, shared ones included. In a result of ``placement``,
            these are nodes of ONNX Runtime's graph, fewer than ``nodes`` if it merged some.
        crossing_bytes: Bytes of the tensors between devices that it, or a descendant, produces or
            uses.
    """

    device: str = ""
    by_device: Mapping[str, int] = field(default_factory=dict)
    crossing_bytes: int = 0


@dataclass(frozen=True)
class DeviceUse:
    """The use of one device.

    Attributes:
        nodes: Number of nodes.
        weight_bytes: Bytes of the weights of these nodes; None if shapes are unknown.
        peak_bytes: Peak of activations on all devices together while one of the nodes runs.
        budget: The limit of its memory in bytes; None for no limit.
    """

    nodes: int
    weight_bytes: int | None = None
    peak_bytes: int | None = None
    budget: int | None = None

    def __str__(self) -> str:
        text = ""
        if self.weight_bytes is not None and self.peak_bytes is not None:
            text = f", {si(self.weight_bytes, 'B')} weights, {si(self.peak_bytes, 'B')} activations"
        limit = "" if self.budget is None else f", of {si(self.budget, 'B')}"
        return f"{many(self.nodes, 'node')}{text}{limit}"


_REST: tuple[Column[PlacedModule], ...] = (
    Column("nodes", "nodes", keep=2),
    Column("weight_bytes", "weights", unit="B", keep=3),
    Column("crossing_bytes", "crossing", unit="B", keep=4),
)


class _ByDevice(ModuleTable):
    """The common part of both results: modules by device, and the tensors between devices."""

    details = ("by_device",)
    derived = ("notes",)

    crossings: tuple[Crossing, ...]
    free: int = 0

    @property
    def listed(self) -> Sequence[PlacedModule]:
        """The modules with nodes, without descendants of a module that is on one device."""
        modules: Mapping[str, PlacedModule] = self.by_module
        whole = {path for path, module in modules.items() if self._is_whole(module)}
        listed = []
        for path, module in modules.items():
            is_inside = any(above in whole for above in ancestors(path) if above != path)
            if module.by_device and not is_inside:
                listed.append(module)
        return listed

    def _is_whole(self, module: PlacedModule) -> bool:
        """Whether all nodes of a module are on one device."""
        return bool(module.device) and _AND not in module.device

    def _crossing_lines(self) -> list[str]:
        """The number and size of crossings, and the first of them, one line each."""
        if not self.crossings:
            return ["no tensor crosses between devices"]
        size = sum(crossing.bytes or 0 for crossing in self.crossings)
        count = len(self.crossings)
        lines = [
            f"{count} tensor{'s cross' if count != 1 else ' crosses'} between devices, {size:,} bytes a run:"
        ]
        lines += [f"  {crossing}" for crossing in self.crossings[:_MOST_LINES]]
        if count > _MOST_LINES:
            lines.append(f"  and {count - _MOST_LINES} more")
        return lines


@dataclass(frozen=True)
class Placed(_ByDevice, HoldsModel):
    """The result of `htp_export.place`.

    Attributes:
        modules: Module path → its device and its nodes by device.
        devices: Device → nodes and memory on it.
        crossings: The tensors between nodes of different devices. The inputs and outputs of the
            model are on the CPU.
        options: Session configuration entries that make ONNX Runtime use the devices.
        free: Number of nodes without a device. ONNX Runtime offers them to all execution providers,
            in their order.
        remarks: Notes on the result.
        tags: The tags of the model.
        given: The model.
    """

    columns = (CLASS_NAME, Column("device", "device", right=False, keep=5), *_REST)

    modules: Mapping[str, PlacedModule]
    devices: Mapping[str, DeviceUse]
    crossings: tuple[Crossing, ...]
    options: Mapping[str, str]
    free: int = 0
    remarks: tuple[str, ...] = field(default=(), repr=False)
    tags: TagFacts | None = None
    given: ir.Model | None = field(default=None, repr=False, kw_only=True)

    @property
    def model(self) -> ir.Model:  # type: ignore[override]
        """The model with the devices of its nodes."""
        assert self.given is not None
        return self.given

    def session_options(self, options: Any = None) -> Any:
        """The ``onnxruntime.SessionOptions`` for the model.

        Args:
            options: Options to add the entries to; None for new ones.

        Raises:
            InputError: This version of ONNX Runtime ignores the devices.
        """
        return session_options_with(self.options, options)

    @property
    def summary(self) -> str:
        """The use of each device, in one line."""
        return "; ".join(f"{device}: {use}" for device, use in self.devices.items())

    @property
    def notes(self) -> tuple[str, ...]:
        """Crossings and further notes, one line each."""
        free = []
        if self.free:
            free.append(f"{many(self.free, 'node')} without a device: ONNX Runtime chooses")
        options = [f"session option {name}: {value}" for name, value in self.options.items()]
        return (*self._crossing_lines(), *free, *self.remarks, *options)


@dataclass(frozen=True)
class Misplaced:
    """A node that runs on another device than the file states.

    Attributes:
        node: Its name.
        op_type: Its operator.
        modules: The modules that it computes.
        device: Its device in the file.
        provider: The execution provider that has it.
    """

    node: str
    op_type: str
    modules: tuple[str, ...]
    device: str
    provider: str


@dataclass(frozen=True)
class Placement(_ByDevice):
    """The result of `htp_export.placement`: the devices on which ONNX Runtime runs each module.

    Attributes:
        modules: Module path → the execution providers that run it.
        providers: Execution provider → number of nodes, in the order of the session.
        crossings: The tensors that one provider computes and another one uses.
        unattributed: Nodes without a known module: ``(provider, operator, name)``.
        misplaced: Nodes that run on another device than the file states.
        options: The session configuration entries for layer assignment that were used.
        remarks: Notes on the result.
        assumed: A line for each open dimension without a size in the call, with the size that was
            used.
        tags: The tags of the model.
    """

    columns = (CLASS_NAME, Column("device", "provider", right=False, keep=5), *_REST)

    modules: Mapping[str, PlacedModule]
    providers: Mapping[str, int]
    crossings: tuple[Crossing, ...]
    unattributed: tuple[tuple[str, str, str], ...] = ()
    misplaced: tuple[Misplaced, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = field(default=(), repr=False)
    assumed: tuple[str, ...] = ()
    tags: TagFacts | None = None

    @property
    def summary(self) -> str:
        """The nodes of each provider, in one line."""
        return ", ".join(f"{name}: {many(nodes, 'node')}" for name, nodes in self.providers.items())

    @property
    def notes(self) -> tuple[str, ...]:
        """Crossings, and differences from the file, one line each."""
        lines = self._crossing_lines()
        misplaced = Counter((node.device, node.provider) for node in self.misplaced)
        for (device, provider), count in misplaced.items():
            runs = "s run" if count != 1 else " runs"
            lines.append(f"{count} node{runs} on {provider} and not on {device}")
        if self.unattributed:
            kinds = ", ".join(sorted({op for _, op, _ in self.unattributed}))
            lines.append(f"{len(self.unattributed)} nodes belong to no known module: {kinds}")
        return (*lines, *self.remarks, *self.assumed)


def placed_modules(
    tagged: TaggedModel,
    nodes: Mapping[ir.Node, str | None],
    work_of: Callable[[ir.Node], NodeCalls],
    crossings: Sequence[Crossing],
) -> dict[str, PlacedModule]:
    """The modules of a result, from the device of each node of a graph of the model."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    # Nodes that a module does not share with modules outside.
    alone: defaultdict[str, Counter[str]] = defaultdict(Counter)
    without_device = set[str]()
    for node, device in nodes.items():
        work = work_of(node)
        if device is None:
            without_device |= {"", *work.modules}
            continue
        counts[""][device] += 1
        in_all_parts = set(work.modules).intersection(*(part.modules for part in work.parts))
        for path in work.modules - {""}:
            counts[path][device] += 1
            alone[path][device] += path in in_all_parts
    crossing_bytes: Counter[str] = Counter()
    for crossing in crossings:
        ends = set(crossing.consumers)
        if crossing.producer is not None:
            ends.add(crossing.producer)
        for path in set[str]().union(*map(ancestors, ends)):
            crossing_bytes[path] += crossing.bytes or 0
    rows = {}
    for path, contents in contents_of(tagged).modules.items():
        by_device = dict(counts[path].most_common())
        own = [device for device, count in alone[path].most_common() if count]
        named = own or [*by_device]
        if named and path in without_device:
            named.append(_NONE)
        rows[path] = PlacedModule(
            **vars(contents.facts),
            device=_AND.join(named),
            by_device=by_device,
            crossing_bytes=crossing_bytes[path],
        )
    return rows
