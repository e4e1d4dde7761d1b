"""Tags as they are written: the owners of one node, and the tags of a whole model.

Three write them into a model: `ModelTags`, for a graph whose tags are found as a whole, by an export
or by `carry`; `htp_export.editing.edit.Edit`, for a change that knows the owners of its nodes; and
`htp_export.lineage.settling.Bookkeeping`, for passes.
"""

from __future__ import annotations

from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cache

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.parameters import ModuleParameters
from htp_export.format.signatures import Signature

IR_VERSION = 10
"""The first version of the ONNX format with metadata of nodes."""


@dataclass(frozen=True, slots=True)
class Owned:
    """The owners of one node after a change.

    Attributes:
        paths: The owners' module paths, in order of execution.
        reason: A `Reason`.
        call: Their calls, as of ``tags.encoded_calls``.
        kept: Whether the node has these tags already.
    """

    paths: tuple[str, ...]
    reason: str
    call: str = ""
    kept: bool = False

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Owned:
        """Read the owners from the metadata of a node."""
        return cls(
            tags.owners_of(metadata), metadata.get(tags.REASON, ""), tags.encoded_calls(metadata)
        )

    def metadata(self, called: Collection[str]) -> dict[str, str]:
        """Return the tags of a node with these owners; ``called``: paths of modules that ran.

        Examples:
            >>> Owned(("fc",), "inserted").metadata({"", "fc"})
            {'htp.module': 'fc', 'htp.reason': 'inserted', 'namespace': 'fc'}
        """
        return tags.node_tags(self.paths, self.reason, called, self.call)

    def write(self, metadata: MutableMapping[str, str], called: Collection[str]) -> None:
        """Replace the tags of a node by these owners; without owners, remove them.

        Tags without a namespace, which only viewers need, get none.
        """
        is_short = tags.MODULE in metadata and tags.NAMESPACE not in metadata
        tags.tag_node(metadata, self.metadata(called) if self.paths else {})
        if is_short:
            metadata.pop(tags.NAMESPACE, None)


NO_OWNERS = Owned((), "")
"""For a node without tags."""


@dataclass(frozen=True)
class ModelTags:
    """The tags of a whole model.

    Attributes:
        owners: The owners of each node, in the order of the nodes.
        called: The paths of the modules that ran.
        model: The metadata of the model.
        graph_name: The name of the main graph: the class of the root.
    """

    owners: Sequence[Owned]
    called: Collection[str]
    model: Mapping[str, str]
    graph_name: str

    @classmethod
    def of(
        cls,
        owners: Sequence[Owned],
        hierarchy: Hierarchy,
        *,
        calls: CallTree | None = None,
        signatures: Mapping[str, Sequence[Signature]] | None = None,
        parameters: Mapping[str, ModuleParameters] | None = None,
        contamination: Iterable[tuple[str, str, bool]] = (),
        lasting: Mapping[str, str] | None = None,
    ) -> ModelTags:
        """Encode the owners and modules of a model.

        Args:
            owners: The owners of each node.
            hierarchy: The modules, with their fates.
            calls: As for `write_model_metadata`, and so on.
            signatures: The tensors of the modules.
            parameters: The parameters of the modules.
            contamination: Boundary tensors that PyTorch does not have.
            lasting: Encoded metadata that stay as they are.
        """
        metadata: dict[str, str] = {}
        write_model_metadata(
            metadata,
            hierarchy,
            calls=calls,
            signatures=signatures,
            parameters=parameters,
            contamination=contamination,
        )
        metadata.update(lasting or {})
        return cls(owners, hierarchy.called, metadata, hierarchy.root.simple_class)

    def of_nodes(self) -> Iterator[Mapping[str, str]]:
        """The tags of each node; nodes with equal owners share one mapping."""

        @cache
        def metadata(owners: Owned) -> Mapping[str, str]:
            return owners.metadata(self.called) if owners.paths else {}

        return map(metadata, self.owners)

    def write(self, model: ir.Model, nodes: Iterable[ir.Node]) -> None:
        """Replace all tags of a model; ``nodes``: in the order of ``owners``."""
        for node, entry in zip(nodes, self.of_nodes(), strict=True):
            tags.tag_node(node.metadata_props, entry)
        _remove_metadata(model)
        model.metadata_props.update(self.model)
        model.graph.name = self.graph_name or model.graph.name
        model.ir_version = max(model.ir_version, IR_VERSION)


def remove_tags(model: ir.Model, nodes: Iterable[ir.Node]) -> None:
    """Remove all tags of a model."""
    for node in nodes:
        NO_OWNERS.write(node.metadata_props, ())
    _remove_metadata(model)


def _remove_metadata(model: ir.Model) -> None:
    for key in tags.MODEL_KEYS:
        model.metadata_props.pop(key, None)
