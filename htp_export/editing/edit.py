"""An edit of a tagged model: owners are set when nodes are created, modules described at the end.

Code that changes a graph knows the module call of each new node. It tells an `Edit` when it creates
the node, so that nothing is inferred afterwards. The edit also has the module tree, signatures,
calls and parameters, and writes them into the model's metadata when it ends. Capabilities write
neither tags of nodes nor this metadata themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import onnx_ir as ir

from htp_export.editing.editing import replace_uses
from htp_export.errors import HtpExportError
from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import read_contamination, write_model_metadata
from htp_export.format.parameters import ModuleParameters
from htp_export.format.signatures import Signature
from htp_export.format.tags import Reason
from htp_export.lineage.difference import PassDifference, Snapshot
from htp_export.lineage.records import Change, changes_are_checked
from htp_export.lineage.tagging import Owned
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import Names

ROOT = Instance("")
"""The call of the whole model: the owner of nodes that belong to no module."""


class Edit:
    """A change of a tagged model, in place.

    The owners of new nodes are written immediately; modules and signatures when the ``with`` block
    ends without an error. Then the model is read again (`TaggedModel.refresh`).

    Args:
        tagged: The model, a copy of its own;
            `htp_export.editing.flattening.read_for_change` returns one.

    Attributes:
        tagged: The model.
        graph: Its main graph.
        signatures: Module path → the signatures to write; changed in place.
        changes: The steps so far, in order.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False)).clone()
        >>> with Edit(tagged) as edit:
        ...     linear = tagged.values["linear"]
        ...     edit.graph.insert_after(linear.producer(), node := edit.node("Neg", [linear], Instance("0"), "negated"))
        ...     edit.replace_uses(linear, node.outputs[0], rest="positive")
        >>> [(node.op_type, node.metadata_props["htp.module"]) for node in tagged["0"].nodes]
        [('Gemm', '0'), ('Neg', '0')]
        >>> print(*edit.changes, sep="; ")
        node negated: 0; replaced linear: linear
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self.tagged, self.graph = tagged, tagged.model.graph
        self.signatures: dict[str, list[Signature]] = {
            path: list(calls) for path, calls in tagged.signatures.items()
        }
        self.changes: list[Change] = []
        self._hierarchy = tagged.hierarchy
        self._calls: CallTree | None = None
        self._parameters: Mapping[str, ModuleParameters] | None = None
        self._contamination = read_contamination(tagged.model.metadata_props)
        self._untagged = set(_untagged(tagged.model))
        self._checked = Snapshot(tagged.model) if changes_are_checked() else None
        self._before = self._description()
        # A file without signatures gets none for a few modules.
        self._has_signatures = bool(self.signatures)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()

    @cached_property
    def names(self) -> Names:
        """The names in use."""
        return Names(self.tagged.model)

    @property
    def hierarchy(self) -> Hierarchy:
        """The modules to write."""
        return self._hierarchy

    # --- nodes ----------------------------------------------------------------------------------------------

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        call: Instance,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[ir.Value] | None = None,
    ) -> ir.Node:
        """Create a node that belongs to a module call; it is not in a graph yet.

        ``name`` gets a number if another node has it. Without ``outputs``, it has new values
        without names.
        """
        unused = self.names.nodes.unused(name)
        node = ir.node(op_type, inputs, attributes, outputs=outputs, name=unused)
        self.own(node, call)
        return node

    def own(self, node: ir.Node, call: Instance, reason: str = Reason.INSERTED) -> None:
        """Set a module call as the owner of a node."""
        runs_often = self._hierarchy[call.path].calls > 1
        self.set_owners(node, Owned((call.path,), reason, str(call.call) if runs_often else ""))

    def set_owners(self, node: ir.Node, owned: Owned) -> None:
        """Set the owners of a node, of which there may be several."""
        owned.write(node.metadata_props, self._hierarchy.called)
        listed = ", ".join(path or "(root)" for path in owned.paths)
        self.changes.append(Change("node", str(node.name), listed))

    def own_as(self, node: ir.Node, other: ir.Node) -> None:
        """Set the metadata of another node, the work of which is divided among both."""
        node.metadata_props.update(other.metadata_props)
        # `quantize` measured ranges of the other node alone
        node.metadata_props.pop(tags.CALIBRATION, None)
        listed = ", ".join(path or "(root)" for path in tags.owners_of(other.metadata_props))
        self.changes.append(Change("node", str(node.name), listed))

    def set_calls(self, node: ir.Node, encoded: str) -> None:
        """Set the calls of a node's owners, as of ``tags.encoded_calls``."""
        tags.write_calls(node.metadata_props, encoded)

    # --- tensors --------------------------------------------------------------------------------------------

    def replace_uses(
        self,
        old: ir.Value,
        new: ir.Value,
        readers: Iterable[tuple[ir.Node, int]] | None = None,
        rest: str | None = None,
    ) -> None:
        """Replace a tensor for its consumers; the new one gets its name.

        As `htp_export.editing.editing.replace_uses`. ``rest`` is the name of ``old`` afterwards; it
        gets a number if another tensor has it.
        """
        self.changes.append(Change("replaced", str(old.name), str(old.name)))
        replace_uses(old, new, readers, None if rest is None else self.names.tensors.unused(rest))

    def rename(
        self, name_of: Callable[[str], str | None], paths: Collection[str] | None = None
    ) -> None:
        """Rename boundary tensors of modules; of all modules without ``paths``.

        ``name_of`` returns None for a removed tensor.
        """
        for path, calls in self.signatures.items():
            if paths is None or path in paths:
                self.signatures[path] = [call.renamed(name_of) for call in calls]
        contamination: set[tuple[str, str, bool]] = set()
        for path, tensor, leaves in self._contamination:
            new = name_of(tensor) if paths is None or path in paths else tensor
            if new is not None:
                contamination.add((path, new, leaves))
        self._contamination = contamination

    # --- modules --------------------------------------------------------------------------------------------

    def add_modules(self, modules: Mapping[str, Sequence[ModuleInfo]]) -> None:
        """Add modules, each after all modules at or below a path."""
        listed: list[ModuleInfo] = []
        # paths in ``modules`` whose descendants are being listed
        open_paths: list[str] = []
        for path, module in self._hierarchy.items():
            while open_paths and not tags.is_under(path, open_paths[-1]):
                listed += modules[open_paths.pop()]
            listed.append(module)
            if path in modules:
                open_paths.append(path)
        while open_paths:
            listed += modules[open_paths.pop()]
        self._hierarchy = Hierarchy(listed)
        for added in modules.values():
            self.changes += [Change("module", module.path) for module in added]

    def remove_modules(self, paths: Collection[str]) -> None:
        """Remove modules and their signatures; their nodes are removed or have other owners."""
        self._hierarchy = Hierarchy(
            module for path, module in self._hierarchy.items() if path not in paths
        )
        for path in paths:
            self.signatures.pop(path, None)
        self._contamination = {entry for entry in self._contamination if entry[0] not in paths}
        self.changes += [Change("removed", path) for path in paths]

    def set_modules(self, hierarchy: Hierarchy, calls: CallTree | None = None) -> None:
        """Set all modules, and their calls unless these are None; ``signatures`` will be theirs.

        The signatures are written even if the model has none yet.
        """
        self._hierarchy, self._calls, self._has_signatures = hierarchy, calls, True

    def set_parameters(self, parameters: Mapping[str, ModuleParameters]) -> None:
        """Set the parameters of all modules."""
        self._parameters = parameters

    def set_fates(self, fates: Mapping[str, Fate]) -> None:
        """Set the fates of some modules."""
        self._hierarchy = self._hierarchy.with_results(fates=fates)

    # --- the end --------------------------------------------------------------------------------------------

    def finish(self) -> TaggedModel:
        """Write the metadata of modules if it changed, and read the model again.

        The map of `htp_export.embed_map` is removed: it describes the graph before the edit.

        Raises:
            HtpExportError: If a node that was added has no owner.
        """
        self._check_owners()
        if self._checked is not None:
            PassDifference.between(self._checked, Snapshot(self.tagged.model)).check_records()
        self.tagged.model.metadata_props.pop(tags.MAP, None)
        if self._description() != self._before:
            self._write()
        return self.tagged.refresh(self._hierarchy)

    def _write(self) -> None:
        """Write the metadata of modules."""
        props, contamination = self.tagged.model.metadata_props, list[tuple[str, str, bool]]()
        if self._contamination != read_contamination(props):
            props.pop(tags.CONTAMINATION, None)
            contamination = sorted(self._contamination)
        write_model_metadata(
            props,
            self._hierarchy,
            calls=self._calls,
            signatures=self.signatures if self._has_signatures else None,
            parameters=self._parameters,
            contamination=contamination,
        )

    def _description(self) -> tuple[object, ...]:
        """The present metadata of modules, to compare."""
        signatures = {path: tuple(calls) for path, calls in self.signatures.items()}
        facts = self._calls, self._parameters, self._contamination
        return id(self._hierarchy), signatures, *facts

    def _check_owners(self) -> None:
        """Raise an error if a new node has no owner; nodes that had none before may stay so."""
        for node in _untagged(self.tagged.model):
            if node not in self._untagged:
                raise HtpExportError(
                    f"{node.op_type} {node.name!r} was added and has no owner: make it with edit.node, or own it"
                )


def _untagged(model: ir.Model) -> Iterator[ir.Node]:
    """The nodes without owners."""
    return (node for node in all_nodes(model) if tags.MODULE not in node.metadata_props)
