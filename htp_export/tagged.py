"""TaggedModel: an ONNX model whose nodes know their modules; load, look at, select, save."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

import onnx
import onnx_ir as ir

from htp_export import tags
from htp_export.errors import FileError, InputError, UnknownModuleError, UntaggedModelError
from htp_export.files import read_model, write_model
from htp_export.hierarchy import Hierarchy, ModuleInfo
from htp_export.regions import GraphIndex, Region, all_nodes
from htp_export.torch_scopes import scopes_of

__all__ = ["Region", "TagSource", "TaggedModel", "all_nodes", "load"]

_log = logging.getLogger(__name__)

TagSource: TypeAlias = Literal["htp", "torch", "none"]


class _HasModel(Protocol):
    """What ``torch.onnx.ONNXProgram`` and the results of this package have in common."""

    @property
    def model(self) -> ir.Model: ...


class TaggedModel:
    """An ONNX model and its module tree; indexed by module path.

    What it knows of the graph is found once, when first asked for. After changing the graph, ``load(tagged.model)``.

    Args:
        model: The model.
        hierarchy: Its modules, every owner of a node among them.
        source: Where the owners come from: ``"htp"``, the exact tags of this package; ``"torch"``, torch's own scopes;
            ``"none"`` of them.

    Attributes:
        model: The model.
        hierarchy: Its modules.
        source: Where the owners come from.

    Example:
        >>> import onnx_ir as ir
        >>> relu = ir.node("Relu", [ir.val("x")], metadata_props={"htp.module": "act", "htp.reason": "scope"})
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20})
        >>> tagged = load(ir.Model(graph, ir_version=10))
        >>> tagged.paths, [node.op_type for node in tagged["act"].nodes], tagged.reasons
        (['', 'act'], ['Relu'], Counter({'scope': 1}))
    """

    def __init__(self, model: ir.Model, hierarchy: Hierarchy, source: TagSource = "htp") -> None:
        self.model = model
        self.hierarchy = hierarchy
        self.source: TagSource = source

    def __repr__(self) -> str:
        name = self.hierarchy.root.simple_class or self.model.graph.name or "unnamed"
        return f"<TaggedModel {name}: {len(self)} modules, tags: {self.source}>"

    def __getitem__(self, path: str) -> Region:
        self._require_tags()
        if path not in self.hierarchy:
            raise UnknownModuleError(path, self.hierarchy)
        return Region(self._index, self.hierarchy, path)

    def __iter__(self) -> Iterator[str]:
        return iter(self.hierarchy)

    def __len__(self) -> int:
        return len(self.hierarchy)

    def __contains__(self, path: object) -> bool:
        return path in self.hierarchy

    @property
    def paths(self) -> list[str]:
        """Every module path, in the order of ``named_modules()``."""
        return list(self.hierarchy)

    @property
    def nodes(self) -> list[ir.Node]:
        """Every node, in subgraphs and functions too, in the order of ``all_nodes``."""
        return self._index.nodes

    @property
    def untagged(self) -> list[ir.Node]:
        """The nodes without owners."""
        return [node for node, owners in self._index.owners.items() if not owners]

    @property
    def reasons(self) -> Counter[str]:
        """How the owners are known: ``htp.reason`` → nodes."""
        found = (node.metadata_props.get(tags.REASON) for node in all_nodes(self.model))
        return Counter(reason for reason in found if reason is not None)

    def owners_of(self, node: ir.Node) -> tuple[str, ...]:
        """The modules that a node computes, in order of execution; empty for an untagged node."""
        if self.source == "htp":
            return tags.owners_of(node.metadata_props)
        if self.source == "torch":
            return tuple(path for path, _ in scopes_of(node)[-1:])
        return ()

    def select(self, patterns: str | Sequence[str]) -> list[str]:
        """The module paths that a selector names; see ``tags.select`` for the language.

        Raises:
            SelectorError: If the selector cannot be read, or a part of it matches no module.
            UntaggedModelError: If the model has no tags.
        """
        self._require_tags()
        return tags.select(patterns, self.hierarchy.classes)

    def save(self, path: str | os.PathLike[str], external_data: str | None = None) -> None:
        """Write the model, whole or not at all.

        External weights stay external: in the folder where they are they are left alone, and into another folder they
        are streamed, into ``<name>.data`` beside the file.

        Args:
            path: The file to write.
            external_data: Name of a file beside it, for all weights of more than 256 bytes.

        Raises:
            FileError: If it cannot be written; what was there before is untouched.
        """
        write_model(self.model, path, external_data)

    @cached_property
    def _index(self) -> GraphIndex:
        return GraphIndex(self.model, self.owners_of)

    def _require_tags(self) -> None:
        if self.source != "none":
            return
        problem = "it has no module tags; export it with htp_export.export(...) in place of torch.onnx.export(...)"
        if tags.MODULES in self.model.metadata_props:
            problem = "its nodes have lost their module tags; htp_export.carry(before, after) brings them back"
        raise UntaggedModelError(f"model {self.model.graph.name!r}: {problem}")


ModelSource: TypeAlias = str | os.PathLike[str] | onnx.ModelProto | ir.Model | TaggedModel | _HasModel
"""Everything that ``load`` takes."""


def load(source: ModelSource) -> TaggedModel:
    """A model with its module tree.

    An untagged model is read with torch's own module scopes, where it has them: node metadata from the dynamo
    exporter, node names from the TorchScript exporter. They are not exact, and a warning is logged.

    Args:
        source: A file, an ``ONNXProgram``, a ``ModelProto``, an ``ir.Model``, or anything with an ``ir.Model`` as
            ``model``. Models in memory are taken as they are, not copied. The weights of a file that has external
            data are not read.

    Raises:
        FileError: If the file is missing, is not ONNX, has broken tags, or names external data outside its folder.
        InputError: If a model in memory has broken tags.
    """
    if isinstance(source, TaggedModel):
        return source
    if isinstance(source, str | os.PathLike):
        model = read_model(source)
    elif isinstance(source, onnx.ModelProto):
        model = ir.from_proto(source)
    else:
        model = source if isinstance(source, ir.Model) else getattr(source, "model", None)  # type: ignore[assignment]
        if not isinstance(model, ir.Model):
            raise TypeError(f"no ONNX model: {type(source).__name__}; give a file, a ModelProto or an ir.Model")
    try:
        return _tagged(model)
    except ValueError as error:
        if isinstance(source, str | os.PathLike):
            raise FileError(os.fspath(source), str(error)) from error
        raise InputError(f"model {model.graph.name!r}: {error}") from error


def _tagged(model: ir.Model) -> TaggedModel:
    declared = model.metadata_props.get(tags.MODULES)
    hierarchy = Hierarchy([ModuleInfo("", "", 1, "computed")]) if declared is None else Hierarchy.from_json(declared)
    calls: dict[str, int] = {}
    for node in all_nodes(model):
        call = node.metadata_props.get(tags.CALL, "0")
        for owner in tags.owners_of(node.metadata_props):
            calls[owner] = max(calls.get(owner, 1), int(call) + 1 if call.isdecimal() else 1)
    if calls:
        above = {up: 1 for path in calls for up in tags.ancestors(path)}  # what ran inside them says that they ran
        return TaggedModel(model, hierarchy.including({**above, **calls}), "htp")
    classes = dict(scope for node in all_nodes(model) for scope in scopes_of(node))
    if not classes:
        return TaggedModel(model, hierarchy, "none")
    if declared is None:
        hierarchy = Hierarchy([ModuleInfo("", classes.get("", ""), 1, "computed")])
    _log.warning(
        "model %r has no htp_export tags; its modules are read from torch's own scopes, which are not exact. "
        "Export it with htp_export.export(...) for exact ones",
        model.graph.name,
    )
    return TaggedModel(model, hierarchy.including(dict.fromkeys(classes, 1), classes), "torch")
