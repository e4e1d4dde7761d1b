"""Original nodes by the names that an engine made of theirs: joined, wrapped, with beginnings and endings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from htp_export.model.tagged import TaggedModel

__all__ = ["EngineNames"]

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


class EngineNames:
    """The nodes of a model by what TensorRT makes of their names.

    It joins names, ``a + b``, ``a || b``, ``2-layer MLP: a -> b``; wraps elementwise operations, ``PWN(a, b)``; and
    names what it inserts after what it serves: ``Reformatting CopyNode for Input Tensor 0 to a``, ``squeeze_after_a``,
    ``a_myl0_3``. Parts that are no names of nodes, as ``(Unnamed Layer* 12) [Shuffle]``, tell nothing; a weight tells
    its consumers if nothing else tells more.

    Args:
        tagged: The model.

    Examples:
        >>> x, h, y = (ir.val(name) for name in "xhy")
        >>> nodes = [ir.node("Conv", [x], outputs=[h], name="conv"), ir.node("Relu", [h], outputs=[y], name="relu")]
        >>> model = ir.Model(ir.Graph([x], [y], nodes=nodes), ir_version=10)
        >>> from htp_export.format.hierarchy import Hierarchy, ModuleInfo
        >>> names = EngineNames(TaggedModel(model, Hierarchy([ModuleInfo("", "")])))
        >>> [node.name for node in names.nodes("Reformatting CopyNode for Input Tensor 0 to conv + PWN(relu)")]
        ['conv', 'relu']
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self._nodes: defaultdict[str, list[ir.Node]] = defaultdict(list)
        self._producers: dict[str, list[ir.Node]] = {}
        self._readers: defaultdict[str, list[ir.Node]] = defaultdict(list)
        for node in tagged.nodes:
            name = node.name or next((_UNNAMED + str(value.name) for value in node.outputs if value.name), "")
            self._nodes[name].append(node)
            self._producers.update({str(value.name): [node] for value in node.outputs if value.name})
            for value in node.inputs:
                if value is not None and value.name and value.producer() is None:
                    self._readers[value.name].append(node)

    def nodes(self, name: str) -> list[ir.Node]:
        """Return the nodes that a name of the engine tells, each once."""
        parts = list(self._parts(name, _DEEPEST))
        found = [node for part in parts for node in self._named(part)]
        return list(dict.fromkeys(found or (node for part in parts for node in self._readers.get(part, ()))))

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
        return next((self._nodes[part[:place]] for place in ends if part[:place] in self._nodes), [])


def _split(text: str, separator: str) -> list[str]:
    """Split a text at a separator outside brackets."""
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
