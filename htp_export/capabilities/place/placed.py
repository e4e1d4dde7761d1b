"""The results of ``place`` and ``placement``: devices by module, and the tensors between them."""

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

_MOST_NAMED = 2  # of consumers, in text


@dataclass(frozen=True)
class Crossing:
    """A tensor that is computed on one device and read on another; one that is read on two others crosses twice.

    Attributes:
        tensor: Its name; that of the graph that ONNX Runtime runs, in a result of ``placement``.
        bytes: Its size; None if its shape is unknown.
        source: The device or execution provider of its producer.
        target: That of its consumers.
        producer: Path of the module that computes it; None for an input of the model.
        consumers: Paths of the modules that read it; empty for an output of the model alone.
        copied: Whether ONNX Runtime copies it to other memory; None if it does not say.
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
    """Each tensor, its producer, None for an input of the model, and a consumer, None for an output.

    What a subgraph is given comes from the node that runs it, and what it returns goes there. Every
    device has the initializers and constants that it needs: they are left out.
    """
    holder = {body: node for node in all_nodes(model) for body in subgraphs(node)}

    def producer(value: ir.Value) -> tuple[bool, ir.Node | None]:
        node = value.producer()
        if node is not None:
            return node.op_type != "Constant", node
        given = value.is_graph_input() and not value.is_initializer()
        return given, None if value.graph is None else holder.get(value.graph)

    for node in model.graph.all_nodes():
        for value in dict.fromkeys(value for value in node.inputs if value is not None):
            counts, maker = producer(value)
            if counts:
                yield value, maker, node
    for graph in (model.graph, *holder):
        for value in graph.outputs:
            counts, maker = producer(value)
            if counts and maker is not holder.get(graph):
                yield value, maker, holder.get(graph)


def crossings(
    model: ir.Model,
    device_of: Callable[[ir.Node], str | None],
    owners_of: Callable[[ir.Node], tuple[str, ...]],
    sizes: Mapping[str, int],
    host: str,
    counts: Callable[[ir.Value], bool] = lambda value: True,
) -> tuple[Crossing, ...]:
    """The tensors between devices of a model without functions, in the order in which they are first read.

    Where the device of a node is unknown, nothing is said of its tensors. ``host`` has the inputs
    and takes the outputs of the model; ``sizes`` are bytes by name; tensors that do not ``counts``
    are left out.
    """
    found: dict[tuple[ir.Value, str, str], tuple[ir.Node | None, dict[str, None]]] = {}
    for value, maker, reader in _edges(model):
        source = host if maker is None else device_of(maker)
        target = host if reader is None else device_of(reader)
        if source is None or target is None or source == target or not counts(value):
            continue
        _, consumers = found.setdefault((value, source, target), (maker, {}))
        if reader is not None:
            consumers[_module(owners_of(reader))] = None
    return tuple(
        Crossing(
            tensor=value.name or "",
            bytes=sizes.get(value.name or ""),
            source=source,
            target=target,
            producer=None if maker is None else _module(owners_of(maker)),
            consumers=tuple(consumers),
        )
        for (value, source, target), (maker, consumers) in found.items()
    )


def _module(owners: tuple[str, ...]) -> str:
    return common_ancestor(owners) if owners else ""


_AND = " + "
_MOST_LINES = 10  # of crossings in text; to_dict has all


@dataclass(frozen=True, kw_only=True)
class PlacedModule(ModuleFacts):
    """The facts of a module, and where it runs.

    Attributes:
        device: Its device or execution provider; several are joined by ``+``, the one with the most
            nodes first; empty if none is known. Nodes that it shares with modules outside of it do
            not count, unless it has no others.
        by_device: Device → number of its nodes, shared ones included. In a result of ``placement``,
            of the nodes that ONNX Runtime places, which are fewer than ``nodes`` where it has
            merged some.
        crossing_bytes: Bytes of the tensors that cross between devices and that it, or a module
            below it, makes or reads.
    """

    device: str = ""
    by_device: Mapping[str, int] = field(default_factory=dict)
    crossing_bytes: int = 0


@dataclass(frozen=True)
class DeviceUse:
    """What is on one device.

    Attributes:
        nodes: Number of nodes.
        weight_bytes: Bytes of the weights that they read; None if shapes are unknown.
        peak_bytes: The most activations that are in memory while one of them runs, on all devices
            together.
        budget: The bytes that they may need; None for no limit.
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
    details = ("by_device",)
    derived = ("notes",)

    crossings: tuple[Crossing, ...]
    free: int = 0

    @property
    def listed(self) -> Sequence[PlacedModule]:
        """The modules with nodes; of those below a module all of whose nodes are on one device, only it."""
        modules: Mapping[str, PlacedModule] = self.by_module
        whole = {
            path for path, module in modules.items() if module.device and _AND not in module.device
        }
        if self.free:
            whole = {
                path
                for path in whole
                if sum(modules[path].by_device.values()) >= modules[path].nodes
            }
        return [
            module
            for path, module in modules.items()
            if module.by_device and not any(up in whole for up in ancestors(path) if up != path)
        ]

    def _crossing_lines(self) -> list[str]:
        if not self.crossings:
            return ["no tensor crosses between devices"]
        known = sum(crossing.bytes or 0 for crossing in self.crossings)
        count = len(self.crossings)
        lines = [
            f"{count} tensor{'s cross' if count != 1 else ' crosses'} between devices, {known:,} bytes a run:"
        ]
        lines += [f"  {crossing}" for crossing in self.crossings[:_MOST_LINES]]
        return [*lines, f"  and {count - _MOST_LINES} more"] if count > _MOST_LINES else lines


@dataclass(frozen=True)
class Placed(_ByDevice, HoldsModel):
    """The result of `htp_export.place`.

    Attributes:
        modules: Module path → where it goes.
        devices: Device → what is on it.
        crossings: The tensors between nodes of different devices. The inputs and outputs of the
            model are on the CPU.
        options: Session configuration entries that make ONNX Runtime use the devices.
        free: Number of nodes without a device. ONNX Runtime offers them to all execution providers,
            in their order.
        remarks: Sentences on what to know of the result.
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
            InputError: If this ONNX Runtime would ignore the devices.
        """
        return session_options_with(self.options, options)

    @property
    def summary(self) -> str:
        """What is on each device, in one line."""
        return "; ".join(f"{device}: {use}" for device, use in self.devices.items())

    @property
    def notes(self) -> tuple[str, ...]:
        """Crossings, and what else is to be known, a line each."""
        free = [f"{self.free} nodes have no device: ONNX Runtime chooses"] if self.free else []
        options = [f"session option {name}: {value}" for name, value in self.options.items()]
        return (*self._crossing_lines(), *free, *self.remarks, *options)


@dataclass(frozen=True)
class Misplaced:
    """A node that runs elsewhere than its device in the file.

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
    """The result of `htp_export.placement`: where ONNX Runtime runs each module.

    Attributes:
        modules: Module path → the execution providers that run it.
        providers: Execution provider → number of nodes, in the order of the session.
        crossings: The tensors that one provider computes and another one reads.
        unattributed: Nodes of which no module is known: ``(provider, operator, name)``.
        misplaced: Nodes that run elsewhere than their device in the file.
        options: The session configuration entries for layer assignment that were used.
        remarks: Sentences on what to know of the result.
        assumed: A line for each open dimension whose size was not given, with the size that was
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
        """Crossings, and what differs from the file, a line each."""
        lines = self._crossing_lines()
        for (device, provider), count in Counter(
            (node.device, node.provider) for node in self.misplaced
        ).items():
            lines.append(
                f"{count} node{'s run' if count != 1 else ' runs'} on {provider} and not on {device}"
            )
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
    """The rows of a result, from the device of each node of the model, or of a graph made of it."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    alone: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for node, device in nodes.items():
        if device is not None:
            work = work_of(node)
            counts[""][device] += 1
            in_all_parts = set(work.modules).intersection(*(part.modules for part in work.parts))
            for path in work.modules - {""}:
                counts[path][device] += 1
                alone[path][device] += path in in_all_parts
    crossing_bytes: Counter[str] = Counter()
    for crossing in crossings:
        touched = {*crossing.consumers, *([] if crossing.producer is None else [crossing.producer])}
        for path in {up for end in touched for up in ancestors(end)}:
            crossing_bytes[path] += crossing.bytes or 0
    rows = {}
    for path, contents in contents_of(tagged).modules.items():
        by_device = dict(counts[path].most_common())
        own = [device for device, count in alone[path].most_common() if count]
        rows[path] = PlacedModule(
            **vars(contents.facts),
            device=_AND.join(own or by_device),
            by_device=by_device,
            crossing_bytes=crossing_bytes[path],
        )
    return rows
