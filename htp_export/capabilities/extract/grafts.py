"""What is put into a model: a copy of another one, under names and tags that fit there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from htp_export.capabilities.extract.spliced_calls import SplicedCalls
from htp_export.editing.editing import take_place
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.reasons import Reason
from htp_export.model.cut_models import own_output
from htp_export.model.regions import all_nodes, twins_of
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import UsedNames, rename


class Graft:
    """A copy of a replacement that fits into a host, in the place of a call of a module.

    ``weights`` are the host's, by ``weight_key``; those of the copy are added when it is inserted.

    Attributes:
        inputs: The copy's inputs that are no initializers.

    Raises:
        InputError: If it needs another version of an operator set than the host has.
    """

    def __init__(
        self,
        host: ir.Model,
        replacement: TaggedModel,
        path: str,
        call: int,
        calls: SplicedCalls,
        weights: dict[int, ir.Value],
    ) -> None:
        self._host, self._replacement, self._path, self._call, self._weights = host, replacement, path, call, weights
        self._calls, self._paths = calls, placed_paths(replacement, path)
        self._model = replacement.model.clone()
        self._original = {value: weight_key(value) for value in self._model.graph.initializers.values()}
        self._match_opsets()
        self._names: dict[str, str] = {}  # tensor of the main graph → its name in the host
        self._take_free_names()
        self._place_tags()
        self.inputs = [value for value in self._model.graph.inputs if not value.is_initializer()]

    # --- fitting in ---------------------------------------------------------------------------------------

    def _match_opsets(self) -> None:
        known, wanted = self._host.graph.opset_imports, self._model.graph.opset_imports
        for domain, version in wanted.items():
            if known.setdefault(domain, version) == version:
                continue
            raise InputError(
                f"the replacement uses opset {version} of {domain or 'ai.onnx'!r}, and the model {known[domain]}; "
                "convert one of them (onnx.version_converter) or export both with one opset_version"
            )
        self._host.ir_version = max(self._host.ir_version, self._model.ir_version)

    def _take_free_names(self) -> None:
        """Rename what has a name that the host uses already."""
        taken = {value.name for graph in self._host.graphs() for value in (*_values(graph), *_read(graph))}
        nodes = {node.name for node in self._host.graph.all_nodes()}
        prefix = self._path.replace(".", "/") or "spliced"
        for graph in self._model.graphs():
            used = _used(taken | {value.name for value in _values(graph)})
            ends = {*graph.inputs, *graph.outputs} if graph is self._model.graph else set()
            for value in list(_values(graph)):
                stays = value in ends or self._original.get(value) in self._weights  # another's name or place is its
                if value.name in taken and not stays:
                    old = str(value.name)
                    self._names[old] = used.unused(f"{prefix}/{old}")
                    rename(value, self._names[old])
                taken.add(value.name)
        used = _used(nodes | {node.name for node in self._model.graph.all_nodes()})
        for node in self._model.graph.all_nodes():
            if node.name in nodes:
                node.name = used.unused(f"{prefix}/{node.name}")
            nodes.add(node.name)
        for identifier, function in list(self._model.functions.items()):
            if identifier in self._host.functions:
                self._rename_function(identifier, function)

    def _rename_function(self, identifier: ir.OperatorIdentifier, function: ir.Function) -> None:
        domain, name, overload = identifier
        known = {identifiers[1] for identifiers in (*self._host.functions, *self._model.functions)}
        fresh = _used(known).unused(name)
        for node in all_nodes(self._model):
            if node.op_identifier() == identifier:
                node.op_type = fresh
        del self._model.functions[identifier]
        function.name = fresh
        self._model.functions[domain, fresh, overload] = function

    def _place_tags(self) -> None:
        """Give every node owners at or below the module, and the call that it is in."""
        called = tags.CalledModules((*self._replacement.hierarchy.called, self._path, *self._paths.values()))
        for node, source in twins_of(self._model, self._replacement.model).items():
            metadata = node.metadata_props
            owners = tuple(self._paths[owner] for owner in tags.owners_of(metadata)) or (self._path,)
            calls = self._calls.encode_calls(source, owners, self._call)
            tags.tag_node(metadata, tags.node_tags(owners, metadata.get(tags.REASON, Reason.SPLICED), called, calls))

    # --- going in -----------------------------------------------------------------------------------------

    def insert(self, inputs: Mapping[ir.Value, ir.Value], stand_ins: Sequence[ir.Value | None]) -> list[ir.Value]:
        """Put the copy into the host, with the host's tensors for its inputs; its results.

        These get the names of what stands for them in the host; None stands for a result that nothing reads.
        """
        graph, host = self._model.graph, self._host.graph
        results = [value if value.producer() is not None else self._own(value) for value in graph.outputs]
        for formal, tensor in inputs.items():
            self._names[str(formal.name)] = str(tensor.name)
            formal.replace_all_uses_with(tensor)
        initializers, nodes = list(graph.initializers.values()), list(graph)
        graph.inputs.clear()
        graph.outputs.clear()
        graph.initializers.clear()
        graph.remove(nodes)
        for initializer in initializers:
            known = self._weights.setdefault(self._original[initializer], initializer)
            if known is initializer:
                host.register_initializer(initializer)
            else:  # the weights of a module that ran several times are there from its first call on
                initializer.replace_all_uses_with(known)
        host.extend(nodes)
        for stand_in, new in zip(stand_ins, results, strict=True):
            if stand_in is None:
                used = _used(value.name for value in _values(host))
                new.name = used.unused(f"{self._path.replace('.', '/')}/{new.name}")
                continue
            self._names[str(new.name)] = str(stand_in.name)
            take_place(stand_in, new)
        self._host.functions.update(self._model.functions)
        return results

    def _own(self, value: ir.Value) -> ir.Value:
        """A tensor of a node of its own, for an output that is an input or an initializer."""
        entry = tags.node_tags(
            (self._path,), Reason.SPLICED, {self._path}, self._calls.encode_calls(None, (self._path,), self._call)
        )
        return own_output(self._model.graph, value, entry)

    # --- the module tree --------------------------------------------------------------------------------

    def describe(self, host: TaggedModel) -> None:
        """Write what lies below the module now into the host's module tree, calls and signatures."""
        props, signatures = self._host.metadata_props, self._calls.signatures() if host.signatures else {}
        if host.signatures and host.hierarchy[self._path].calls <= 1:
            for path, known in self._replacement.signatures.items():
                if self._paths.get(path, self._path) != self._path:
                    renamed = [call.renamed(lambda name: self._names.get(name, name)) for call in known]
                    signatures[self._paths[path]] = renamed
        calls = self._calls.tree if tags.CALLERS in props else None
        write_model_metadata(props, self._calls.hierarchy, calls=calls, signatures=signatures)


def placed_paths(replacement: TaggedModel, path: str) -> dict[str, str]:
    """Path in a replacement → path in the host, at or below the module whose place it takes; empty without tags."""
    owners = {owner for node in replacement.nodes for owner in tags.owners_of(node.metadata_props)}
    known = replacement.hierarchy if owners else ()
    if all(tags.is_under(owner, path) for owner in owners):
        return {module: module for module in known if tags.is_under(module, path)}
    return {module: ".".join(filter(None, (path, module))) for module in (*known, *owners)}


def weight_key(initializer: ir.Value) -> int:
    """Equal for initializers of copies of one model that hold the same weights."""
    return id(initializer if initializer.const_value is None else initializer.const_value)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    return itertools.chain(graph.inputs, graph.initializers.values(), (v for node in graph for v in node.outputs))


def _read(graph: ir.Graph) -> Iterator[ir.Value]:
    """What is read in a graph, also where nothing computes it now: the results of a module that was taken out."""
    return itertools.chain(graph.outputs, (value for node in graph for value in node.inputs if value is not None))


def _used(names: Iterable[str | None]) -> UsedNames:
    return UsedNames(filter(None, names), first=1)
