"""TensorRT as an engine of `profile`: measurements of ``trtexec``, mapped to nodes by layer names.

``--exportLayerInfo`` writes ``{"Layers": [...]}``, a list of names or, with
``--profilingVerbosity=detailed``, of objects with ``Name``, ``LayerType``, ``Inputs``, ``Outputs``
and ``Metadata``. ``--exportProfile`` writes a list: ``{"count": runs}``, then ``{"name", "timeMs",
"averageMs", ...}`` for each layer; ``timeMs`` is the sum of all runs.
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
from htp_export.files.text_files import beginning_of, read_json
from htp_export.model.tagged import TaggedModel

__all__ = ["read", "wrote"]

_LAYERS = re.compile(r'\{\s*"Layers"\s*:')
_TIMES = re.compile(r'\[\s*\{\s*"count"\s*:')
"""Beginnings of the files."""

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
"""The most levels at which names are split: the files are untrusted, and may nest deeper."""
_JOINED = (" + ", " || ", " -> ")
_OPENING, _CLOSING = "([{", ")]}"
_UNNAMED = "node_of_"
"""Prefix of TensorRT's parser for a node without a name, before its first output."""


def wrote(beginning: str) -> bool:
    """Whether a file with this beginning is one of ``trtexec``."""
    return bool(_LAYERS.match(beginning) or _TIMES.match(beginning))


def read(tagged: TaggedModel, files: Sequence[str | os.PathLike[str]], *, name: str) -> Measurement:
    """Read ``trtexec``'s measurements of an engine of a model without functions.

    Args:
        tagged: The model.
        files: The files of ``--exportLayerInfo`` and of ``--exportProfile``, or the second alone.
        name: The name of the model in errors.

    Raises:
        FileError: A file has other contents, or belongs to another model.
    """
    if isinstance(files, str | os.PathLike) or len(files) not in (1, 2):
        raise InputError(
            "tensorrt reads the files of one engine: that of --exportLayerInfo and that of "
            "--exportProfile, or the second alone"
        )
    given = [os.fspath(file) for file in files]
    if len(given) == 2 and _has_times(given[0]) and not _has_times(given[1]):
        given.reverse()
    *with_layers, times_file = given
    if not with_layers and '"Layers"' in beginning_of(times_file):
        raise FileError(
            times_file, "has layers without times; give the file of --exportProfile, too"
        )
    layers_file = with_layers[0] if with_layers else None
    layers, runs = _read_engine(layers_file, times_file)
    untimed = [layer.name for layer in layers if layer.ms is None]
    notes = tuple[str, ...]()
    if untimed:
        notes = (f"{len(untimed)} layers have no time in the profile, {untimed[0]!r} first",)
    kernels = _layer_kernels(layers, tagged, layers_file or times_file, name)
    return Measurement(kernels, providers=("TensorRT",), timing="layers", runs=runs, notes=notes)


@dataclass(frozen=True)
class Layer:
    """A layer of an engine; ``metadata`` contains ``[ONNX Layer: name]`` items; ``ms`` a run."""

    name: str
    kind: str = ""
    metadata: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    ms: float | None = None


def _has_times(file: str) -> bool:
    """Whether a file is that of ``--exportProfile``: a list."""
    return beginning_of(file).startswith("[")


def _read_engine(layers: str | None, times: str) -> tuple[list[Layer], int]:
    """Layers in execution order, layers of the profile only last; and the runs, 0 if unknown."""
    listed = None
    if layers is not None:
        listed = _read(
            layers, "--exportLayerInfo", lambda content: list(map(_layer, content["Layers"]))
        )
    timed, runs = _read(times, "--exportProfile", _times)
    if listed is None:
        return [Layer(name, ms=ms) for name, ms in timed], runs
    # Several layers may share a name: their times are in the same order.
    times_of: defaultdict[str, deque[float]] = defaultdict(deque)
    for name, ms in timed:
        times_of[name].append(ms)
    measured = []
    for layer in listed:
        left = times_of[layer.name]
        measured.append(replace(layer, ms=left.popleft() if left else None))
    if all(layer.ms is None for layer in measured):
        problem = f"has no time for any layer of {layers}, but one for {timed[0][0]!r}"
        raise FileError(times, f"{problem}; both files have to be of the same engine")
    for name, left in times_of.items():
        measured += [Layer(name, ms=ms) for ms in left]
    return measured, runs


_Read = TypeVar("_Read")


def _read(path: str, option: str, read_content: Callable[[Any], _Read]) -> _Read:
    """The content of a file; raises `FileError` for one that trtexec does not write."""
    content = read_json(path)
    try:
        return read_content(content)
    except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise FileError(path, f"is not what trtexec {option} writes: {described(error)}") from error


def _layer(entry: Any) -> Layer:
    if isinstance(entry, str):
        return Layer(entry)
    inputs = tuple(str(tensor["Name"]) for tensor in entry.get("Inputs", ()))
    outputs = tuple(str(tensor["Name"]) for tensor in entry.get("Outputs", ()))
    kind = str(entry.get("LayerType", ""))
    metadata = str(entry.get("Metadata", ""))
    return Layer(str(entry["Name"]), kind, metadata, inputs, outputs)


def _times(content: Any) -> tuple[list[tuple[str, float]], int]:
    """Layer and milliseconds a run; and the number of runs."""
    runs = next((int(entry["count"]) for entry in content if "count" in entry), 0)
    timed = []
    for entry in content:
        if "count" in entry and "name" not in entry:
            continue
        name = str(entry["name"])
        ms = entry["averageMs"] if "averageMs" in entry else entry["timeMs"] / runs
        timed.append((name, float(ms)))
    if not timed or not all(0 <= ms < math.inf for _, ms in timed):
        raise ValueError("each layer has a time, a number from 0 up")
    return timed, runs


class EngineNames:
    """Finds the nodes of a model by TensorRT's names.

    TensorRT joins names, ``a + b``, ``a || b``, ``2-layer MLP: a -> b``; wraps elementwise
    operations, ``PWN(a, b)``; and names an inserted layer after another: ``Reformatting CopyNode
    for Input Tensor 0 to a``, ``squeeze_after_a``, ``a_myl0_3``. Parts that are not names of nodes,
    such as ``(Unnamed Layer* 12) [Shuffle]``, are ignored. The name of a weight means its
    consumers if no other part names a node.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self._nodes: defaultdict[str, list[ir.Node]] = defaultdict(list)
        self._producers: dict[str, list[ir.Node]] = {}
        self._consumers: defaultdict[str, list[ir.Node]] = defaultdict(list)
        for node in tagged.nodes:
            outputs = [str(value.name) for value in node.outputs if value.name]
            name = node.name or (f"{_UNNAMED}{outputs[0]}" if outputs else "")
            self._nodes[name].append(node)
            for output in outputs:
                self._producers[output] = [node]
            for value in node.inputs:
                if value is not None and value.name and value.producer() is None:
                    self._consumers[value.name].append(node)

    def nodes(self, name: str) -> list[ir.Node]:
        """Return the distinct nodes of a name of the engine."""
        parts = list(self._parts(name, _DEEPEST))
        nodes = dict.fromkeys(node for part in parts for node in self._named(part))
        if not nodes:
            nodes = dict.fromkeys(node for part in parts for node in self._consumers.get(part, ()))
        return list(nodes)

    def producers(self, tensors: Iterable[str]) -> list[ir.Node]:
        """Return the producers of tensors that the original model has."""
        return [node for tensor in tensors for node in self._producers.get(tensor, ())]

    def _parts(self, name: str, levels: int) -> Iterator[str]:
        """Split a name into parts that are not composed of others."""
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
        """The nodes of a part: by its name, by its output, or by a prefix of it."""
        if part in self._nodes or part in self._producers:
            return self._nodes.get(part) or self._producers[part]
        if match := _BESIDE.fullmatch(part):
            part = match[1]
            if part in self._nodes:
                return self._nodes[part]
        for end in range(len(part) - 1, 0, -1):
            if part[end] in "_ " and part[:end] in self._nodes:
                return self._nodes[part[:end]]
        return []


def _split(text: str, separator: str) -> list[str]:
    """Split a text at separators outside of parentheses."""
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
    """Return the layers that have times, with their owners.

    The original nodes of a layer are named in its metadata, or else in its name, or else they are
    the nodes between its tensors that no other layer names. ``{ForeignNode[a...b]}`` means the
    nodes between its tensors, or from ``a`` to ``b``. Other layers were inserted, and belong to the
    modules of their consumers, or else of their producers.

    Raises:
        FileError: No layer has a node of the model.
    """
    names = EngineNames(tagged)
    named = [_named_nodes(layer, names) for layer in layers]
    regions = _Regions(names, set[ir.Node]().union(*named), tagged)
    nodes_of = [nodes or regions.of(layer) for layer, nodes in zip(layers, named, strict=True)]
    if not any(nodes_of):
        first = ", ".join(repr(layer.name) for layer in layers[:3])
        raise FileError(
            file, f"no layer is made of a node of {name}: {first}; it is of another model"
        )
    entries = []
    for layer, nodes in zip(layers, nodes_of, strict=True):
        kernel = Kernel(layer.name, layer.kind or "layer", "TensorRT", layer.ms or 0.0, 1.0)
        entries.append(Entry(kernel, nodes, layer.inputs, layer.outputs))
    kernels = zip(entry_kernels(entries, tagged), layers, strict=True)
    return tuple(kernel for kernel, layer in kernels if layer.ms is not None)


def _named_nodes(layer: Layer, names: EngineNames) -> list[ir.Node]:
    """The nodes in the metadata or the name of a layer; none for a region."""
    nodes: dict[ir.Node, None] = {}
    for original_name in _MADE_OF.findall(layer.metadata):
        nodes.update(dict.fromkeys(names.nodes(original_name)))
    if not nodes and not _REGION.search(layer.name):
        nodes.update(dict.fromkeys(names.nodes(layer.name)))
    return list(nodes)


class _Regions:
    """Finds the nodes of layers with known ends only; ``taken`` nodes are named by other layers."""

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
        inputs = set(layer.inputs)
        ends = self._names.producers(layer.outputs)

        def before(node: ir.Node) -> Iterable[ir.Node | None]:
            return (
                value.producer()
                for value in node.inputs
                if value is not None and value.name not in inputs
            )

        return self._reached(ends, before)

    def _between_nodes(self, ends: str) -> set[ir.Node]:
        """The nodes from the first to the last of a region; on one side if one is unknown."""
        first, _, last = ends.partition("...")
        starts = self._names.nodes(first)
        stops = self._names.nodes(last)
        ahead = self._reached(starts, lambda node: node.successors())
        behind = self._reached(stops, lambda node: node.predecessors())
        if not starts or not stops:
            return ahead | behind
        return (ahead & behind) | (set(starts) | set(stops)) - self._taken

    def _reached(
        self, starts: Iterable[ir.Node], step: Callable[[ir.Node], Iterable[ir.Node | None]]
    ) -> set[ir.Node]:
        """The nodes that are reached from some by steps, without ``taken`` ones."""
        reached: set[ir.Node] = set()
        queue: list[ir.Node | None] = list(starts)
        while queue:
            node = queue.pop()
            if node is not None and node not in reached and node not in self._taken:
                reached.add(node)
                queue.extend(step(node))
        return reached
