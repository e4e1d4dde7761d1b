"""TensorRT as an engine of ``profile``: what ``trtexec`` measured, by the names that it made of the nodes'.

``--exportLayerInfo`` writes ``{"Layers": [...]}``, of names or, with
``--profilingVerbosity=detailed``, of objects with ``Name``, ``LayerType``, ``Inputs``, ``Outputs``
and ``Metadata``. ``--exportProfile`` writes a list: ``{"count": runs}``, then ``{"name", "timeMs",
"averageMs", ...}`` for each layer; ``timeMs`` is of all runs.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import onnx_ir as ir

from htp_export.capabilities.profile.measurements import Entry, Kernel, Measurement, entry_kernels
from htp_export.errors import FileError, InputError, described
from htp_export.files.text_files import read_json
from htp_export.model.tagged import TaggedModel

__all__ = ["read"]

_AROUND = (
    re.compile(r"Reformatting CopyNode for (?:Input|Output) Tensor \d+ to (.+)", re.DOTALL),
    re.compile(r"Reformatting CopyNode for Network (?:Input|Output) (.+)", re.DOTALL),
    re.compile(r"(.+) (?:input|output) reformatter \d+", re.DOTALL),
    re.compile(r"\d+-layer MLP: (.+)", re.DOTALL),
    re.compile(r"(.+) \[profile \d+\]", re.DOTALL),
)
_WRAPPED = re.compile(r"[A-Za-z_]\w*\((.+)\)", re.DOTALL)
_BESIDE = re.compile(r"\w*?(?:before|after)_(.+)", re.DOTALL)
_DEEPEST = 50
"""Levels to which names are taken apart; files come from anywhere."""
_JOINED = (" + ", " || ", " -> ")
_OPENING, _CLOSING = "([{", ")]}"
_UNNAMED = "node_of_"
"""What TensorRT's parser puts before the first output of a node without a name."""


def read(tagged: TaggedModel, files: Sequence[str | os.PathLike[str]], *, name: str) -> Measurement:
    """Read what trtexec measured of an engine that TensorRT built of a model without functions.

    ``files``: what ``--exportLayerInfo`` wrote, then what ``--exportProfile`` wrote; a `FileError`
    if one is not so, or not of this model.
    """
    if isinstance(files, str | os.PathLike) or len(files) != 2:
        raise InputError(
            "tensorrt reads two files of trtexec: that of --exportLayerInfo, then that of --exportProfile"
        )
    of_layers, of_times = (os.fspath(file) for file in files)
    layers, runs = _read_engine(of_layers, of_times)
    untimed = [layer.name for layer in layers if layer.ms is None]
    notes = (
        (f"{len(untimed)} layers have no time in the profile, {untimed[0]!r} first",)
        if untimed
        else ()
    )
    kernels = _layer_kernels(layers, tagged, of_layers, name)
    return Measurement(kernels, providers=("TensorRT",), timing="layers", runs=runs, notes=notes)


@dataclass(frozen=True)
class Layer:
    """A layer of an engine: kind and metadata, ``[ONNX Layer: name]`` each, if the file has them; ``ms`` of one run."""

    name: str
    kind: str = ""
    metadata: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    ms: float | None = None


def _read_engine(layers: str, times: str) -> tuple[list[Layer], int]:
    """The layers in the order of execution, those that only the profile has last; and the runs, 0 if unknown."""
    listed = _read(
        layers, "--exportLayerInfo", lambda content: list(map(_layer, content["Layers"]))
    )
    timed, runs = _read(times, "--exportProfile", _times)
    given: defaultdict[str, deque[float]] = defaultdict(deque)
    for name, ms in timed:
        given[name].append(ms)
    found = [
        replace(layer, ms=given[layer.name].popleft() if given[layer.name] else None)
        for layer in listed
    ]
    if all(layer.ms is None for layer in found):
        problem = f"has no time for any layer of {layers}, but one for {timed[0][0]!r}"
        raise FileError(times, f"{problem}; both files have to be of the same engine")
    return [*found, *(Layer(name, ms=ms) for name, left in given.items() for ms in left)], runs


_Read = TypeVar("_Read")


def _read(path: str, option: str, read_content: Callable[[Any], _Read]) -> _Read:
    """What a file says; a `FileError` if it is none that trtexec writes with an option."""
    content = read_json(path)
    try:
        return read_content(content)
    except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise FileError(path, f"is not what trtexec {option} writes: {described(error)}") from error


def _layer(entry: Any) -> Layer:
    if isinstance(entry, str):
        return Layer(entry)
    inputs, outputs = (
        tuple(str(each["Name"]) for each in entry.get(side, ())) for side in ("Inputs", "Outputs")
    )
    return Layer(
        str(entry["Name"]),
        str(entry.get("LayerType", "")),
        str(entry.get("Metadata", "")),
        inputs,
        outputs,
    )


def _times(content: Any) -> tuple[list[tuple[str, float]], int]:
    runs = next((int(entry["count"]) for entry in content if "count" in entry), 0)
    entries = [entry for entry in content if "name" in entry or "count" not in entry]
    timed = [
        (
            str(entry["name"]),
            float(entry["averageMs"] if "averageMs" in entry else entry["timeMs"] / runs),
        )
        for entry in entries
    ]
    if not timed or not all(0 <= ms < math.inf for _, ms in timed):
        raise ValueError("each layer has a time, a number from 0 up")
    return timed, runs


class EngineNames:
    """The nodes of a model by what TensorRT makes of their names.

    It joins names, ``a + b``, ``a || b``, ``2-layer MLP: a -> b``; wraps elementwise operations,
    ``PWN(a, b)``; and names what it inserts after what it serves: ``Reformatting CopyNode for Input
    Tensor 0 to a``, ``squeeze_after_a``, ``a_myl0_3``. Parts that are no names of nodes, as
    ``(Unnamed Layer* 12) [Shuffle]``, tell nothing; a weight tells its consumers if nothing else
    tells more.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self._nodes: defaultdict[str, list[ir.Node]] = defaultdict(list)
        self._producers: dict[str, list[ir.Node]] = {}
        self._readers: defaultdict[str, list[ir.Node]] = defaultdict(list)
        for node in tagged.nodes:
            name = node.name or next(
                (_UNNAMED + str(value.name) for value in node.outputs if value.name), ""
            )
            self._nodes[name].append(node)
            self._producers.update(
                {str(value.name): [node] for value in node.outputs if value.name}
            )
            for value in node.inputs:
                if value is not None and value.name and value.producer() is None:
                    self._readers[value.name].append(node)

    def nodes(self, name: str) -> list[ir.Node]:
        """Return the nodes that a name of the engine tells, each once."""
        parts = list(self._parts(name, _DEEPEST))
        found = [node for part in parts for node in self._named(part)]
        return list(
            dict.fromkeys(found or (node for part in parts for node in self._readers.get(part, ())))
        )

    def producers(self, tensors: Iterable[str]) -> list[ir.Node]:
        """Return the nodes that produce tensors of the original model; tensors that it does not have are left out."""
        return [node for tensor in tensors for node in self._producers.get(tensor, ())]

    def _parts(self, name: str, levels: int) -> Iterator[str]:
        if not levels:
            return
        name = name.strip()
        if not name or name in self._nodes:
            yield name
            return
        for pattern in _AROUND:
            if match := pattern.fullmatch(name):
                yield from self._parts(match[1], levels - 1)
                return
        for separator in _JOINED:
            if len(joined := _split(name, separator)) > 1:
                for part in joined:
                    yield from self._parts(part, levels - 1)
                return
        if match := _WRAPPED.fullmatch(name):
            for part in _split(match[1], ", "):
                yield from self._parts(part, levels - 1)
            return
        yield name

    def _named(self, part: str) -> list[ir.Node]:
        if part in self._nodes or part in self._producers:
            return self._nodes.get(part) or self._producers[part]
        if match := _BESIDE.fullmatch(part):
            part = match[1]
            if part in self._nodes:
                return self._nodes[part]
        ends = (place for place in range(len(part) - 1, 0, -1) if part[place] in "_ ")
        return next(
            (self._nodes[part[:place]] for place in ends if part[:place] in self._nodes), []
        )


def _split(text: str, separator: str) -> list[str]:
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        depth += (text[place] in _OPENING) - (text[place] in _CLOSING)
        if depth == 0 and text.startswith(separator, place):
            parts.append(text[start:place])
            place += len(separator)
            start = place
        else:
            place += 1
    return [*parts, text[start:]]


_MADE_OF = re.compile(r"\[ONNX Layer: (.+?)\](?=[\x1e\x1f\s\[]|$)", re.DOTALL)
_REGION = re.compile(r"\{ForeignNode\[(.+)\]\}", re.DOTALL)


def _layer_kernels(
    layers: Sequence[Layer], tagged: TaggedModel, file: str, name: str
) -> tuple[Kernel, ...]:
    """Return the layers that have times, with their owners; a `FileError` if none is made of a node of the model.

    What a layer was made of is told by its metadata; without, by its name; without, by its tensors:
    the nodes between them that no other layer names. ``{ForeignNode[a...b]}`` is the nodes between
    its tensors, or from ``a`` to ``b``. Other layers were inserted, and belong to the modules of
    their consumers, or else to those of their producers.
    """
    names = EngineNames(tagged)
    told = [_told(layer, names) for layer in layers]
    regions = _Regions(names, {node for nodes in told for node in nodes}, tagged)
    made_of = [nodes or regions.of(layer) for layer, nodes in zip(layers, told, strict=True)]
    if not any(made_of):
        first = ", ".join(repr(layer.name) for layer in layers[:3])
        raise FileError(
            file, f"no layer is made of a node of {name}: {first}; it is of another model"
        )
    run = [
        Kernel(layer.name, layer.kind or "layer", "TensorRT", layer.ms or 0.0, 1.0)
        for layer in layers
    ]
    entries = [
        Entry(run[k], made_of[k], layer.inputs, layer.outputs) for k, layer in enumerate(layers)
    ]
    kernels = entry_kernels(entries, tagged)
    return tuple(
        kernel for kernel, layer in zip(kernels, layers, strict=True) if layer.ms is not None
    )


def _told(layer: Layer, names: EngineNames) -> list[ir.Node]:
    """The nodes that the metadata or the name of a layer tells; none for a region."""
    found = [node for made_of in _MADE_OF.findall(layer.metadata) for node in names.nodes(made_of)]
    if not found and not _REGION.search(layer.name):
        found = names.nodes(layer.name)
    return list(dict.fromkeys(found))


class _Regions:
    """Finds the nodes of layers of which only the ends are known; ``taken`` are told by layers, and in no region."""

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
            return (
                value.producer()
                for value in node.inputs
                if value is not None and value.name not in read
            )

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

    def _reached(
        self, starts: Iterable[ir.Node], step: Callable[[ir.Node], Iterable[ir.Node | None]]
    ) -> set[ir.Node]:
        reached: set[ir.Node] = set()
        queue: list[ir.Node | None] = list(starts)
        while queue:
            node = queue.pop()
            if node is not None and node not in reached and node not in self._taken:
                reached.add(node)
                queue.extend(step(node))
        return reached
