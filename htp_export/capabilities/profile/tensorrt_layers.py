"""The layers of a TensorRT engine, with the modules whose work they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Set

import onnx_ir as ir

from htp_export.capabilities.profile.engine_entries import Entry, entry_kernels
from htp_export.capabilities.profile.engine_names import EngineNames
from htp_export.capabilities.profile.kernels import Kernel, Timed
from htp_export.capabilities.profile.tensorrt_files import Layer, TensorRTEngine
from htp_export.errors import FileError
from htp_export.model.tagged import TaggedModel

__all__ = ["tensorrt_kernels"]

_MADE_OF = re.compile(r"\[ONNX Layer: (.+?)\](?=[\x1e\x1f\s\[]|$)", re.DOTALL)
_REGION = re.compile(r"\{ForeignNode\[(.+)\]\}", re.DOTALL)


def tensorrt_kernels(engine: TensorRTEngine, tagged: TaggedModel, name: str) -> tuple[Kernel, ...]:
    """Return the layers that have times, with their owners.

    What a layer was made of is told by its metadata; without, by its name; without, by its tensors: the nodes between
    them that no other layer names. ``{ForeignNode[a...b]}`` is the nodes between its tensors, or from ``a`` to ``b``.
    Other layers were inserted, and belong to the modules of their consumers, or else to those of their producers.

    Args:
        engine: The engine.
        tagged: The original model, without functions.
        name: The name of the model in errors.

    Raises:
        FileError: If no layer is made of a node of the model.
    """
    names = EngineNames(tagged)
    told = [_told(layer, names) for layer in engine.layers]
    regions = _Regions(names, {node for nodes in told for node in nodes}, tagged)
    made_of = [nodes or regions.of(layer) for layer, nodes in zip(engine.layers, told, strict=True)]
    if not any(made_of):
        first = ", ".join(repr(layer.name) for layer in engine.layers[:3])
        raise FileError(engine.file, f"no layer is made of a node of {name}: {first}; it is of another model")
    entries = [
        Entry(_timed(layer), tuple(nodes), layer.inputs, layer.outputs)
        for layer, nodes in zip(engine.layers, made_of, strict=True)
    ]
    kernels = entry_kernels(entries, tagged)
    return tuple(kernel for kernel, layer in zip(kernels, engine.layers, strict=True) if layer.ms is not None)


def _timed(layer: Layer) -> Timed:
    return Timed(layer.name, layer.kind or "layer", "TensorRT", layer.ms or 0.0, 1.0)


def _told(layer: Layer, names: EngineNames) -> list[ir.Node]:
    """The nodes that the metadata or the name of a layer tells; none for a region."""
    found = [node for made_of in _MADE_OF.findall(layer.metadata) for node in names.nodes(made_of)]
    if not found and not _REGION.search(layer.name):
        found = names.nodes(layer.name)
    return list(dict.fromkeys(found))


class _Regions:
    """Finds the nodes of layers of which only the ends are known.

    Args:
        names: The nodes by name.
        taken: Nodes that layers tell; they are in no region.
        tagged: The model.
    """

    def __init__(self, names: EngineNames, taken: Set[ir.Node], tagged: TaggedModel) -> None:
        self._names, self._taken = names, taken
        self._place = tagged.index.place

    def of(self, layer: Layer) -> list[ir.Node]:
        """Return the nodes of a layer, in order; none if its ends are unknown."""
        match = _REGION.search(layer.name)
        found = self._between_tensors(layer)
        if not found and match is not None:
            found = self._between_nodes(match[1])
        return sorted(found, key=lambda node: self._place.get(node, 0))

    def _between_tensors(self, layer: Layer) -> set[ir.Node]:
        """The nodes from which the outputs of a layer are computed, back to its inputs."""
        read = set(layer.inputs)
        ends = self._names.producers(layer.outputs)

        def before(node: ir.Node) -> Iterable[ir.Node | None]:
            return (value.producer() for value in node.inputs if value is not None and value.name not in read)

        return self._reached(ends, before)

    def _between_nodes(self, ends: str) -> set[ir.Node]:
        """The nodes on ways from the first to the last of a region; all on one side if the other end is unknown."""
        first, _, last = ends.partition("...")
        starts, stops = self._names.nodes(first), self._names.nodes(last)
        ahead = self._reached(starts, lambda node: node.successors())
        behind = self._reached(stops, lambda node: node.predecessors())
        if not starts or not stops:
            return ahead | behind
        return (ahead & behind) | (set(starts) | set(stops)) - self._taken

    def _reached(self, starts: Iterable[ir.Node], step: Callable[[ir.Node], Iterable[ir.Node | None]]) -> set[ir.Node]:
        reached: set[ir.Node] = set()
        queue: list[ir.Node | None] = list(starts)
        while queue:
            node = queue.pop()
            if node is not None and node not in reached and node not in self._taken:
                reached.add(node)
                queue.extend(step(node))
        return reached
