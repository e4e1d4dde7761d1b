"""A copy of a model that is inserted into another, with names, tags and calls that fit there."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from htp_export.editing.cut_models import own_output
from htp_export.editing.edit import Edit
from htp_export.editing.editing import replace_uses
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance, renumbered
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import lora_of_inputs, write_lora
from htp_export.format.signatures import Signature
from htp_export.format.tags import Reason
from htp_export.lineage.tagging import Owned
from htp_export.model.copies import Copied
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import UsedNames, rename


class _Source(NamedTuple):
    """The origin of a call: the model that contains it, and its number there."""

    # The call of the module that the copy of the replacement replaces; -1 for a call of the host.
    copy: int
    call: Instance


class SplicedCalls:
    """Calls of a host after a model replaced some calls (``numbers``) of a module (``path``).

    Attributes:
        paths: Path in the replacement → path in the host.
        hierarchy: The host's modules, with the new descendants of the module.
        tree: Their calls.
    """

    def __init__(
        self, host: TaggedModel, replacement: TaggedModel, path: str, numbers: Sequence[int]
    ) -> None:
        self._host, self._replacement, self._path = host, replacement, path
        paths = self.paths = _placed_paths(host, replacement, path)
        self._replaced = {Instance(path, number) for number in numbers}
        chains = (
            host.calls.chain(Instance(path, number))
            for number in range(max(host.hierarchy[path].calls, 1))
        )
        self._whole = not any(map(self._replaced.isdisjoint, chains))
        if self._whole:
            # Work of which the file does not say in which call of the module it ran.
            self._replaced.add(Instance(path, -1))
        source_path = self._source_path(path)
        # The path of the module itself in the replacement, which may be its root, "".
        self._top = path if source_path is None else source_path
        sources_of: dict[str, list[_Source]] = {}
        for module in dict.fromkeys((*host.hierarchy, *paths.values())):
            sources_of[module] = self._sources(module, numbers)
        self._now: dict[_Source, Instance] = {}
        for module, sources in sources_of.items():
            for number, source in enumerate(sources):
                self._now[source] = Instance(module, number)
        self.hierarchy = Hierarchy(self._infos(sources_of))
        self.tree = CallTree(self.hierarchy, self._known_callers(sources_of))
        # Modules all of whose calls are the host's → the numbers of these calls in the host.
        self._kept: dict[str, list[int]] = {}
        for module, sources in sources_of.items():
            if all(source.copy < 0 for source in sources):
                self._kept[module] = [source.call.call for source in sources]

    def _known_callers(
        self, sources_of: Mapping[str, Sequence[_Source]]
    ) -> dict[str, list[Instance | None]]:
        """Module → the callers of its calls, for modules with known callers only."""
        known: dict[str, list[Instance | None]] = {}
        for module, sources in sources_of.items():
            callers = [self._caller(source) for source in sources]
            if all(caller is None or caller.call >= 0 for caller in callers):
                known[module] = callers
        return known

    def _source_path(self, path: str) -> str | None:
        """The path in the replacement of a module of the host."""
        for source_path, host_path in self.paths.items():
            if host_path == path:
                return source_path
        return None

    def encode_calls(self, node: ir.Node | None, owners: tuple[str, ...], copy: int = -1) -> str:
        """Encode the calls of a node of the host, or of the replacement, copied for ``copy``.

        None means a new node of the module itself in that call.
        """
        source = self._host if copy < 0 else self._replacement
        calls = list[Instance]()
        if node is not None:
            calls = renumbered(
                source.calls, source.work_of(node), lambda call: self._now.get(_Source(copy, call))
            )
        if copy >= 0 and not calls:
            calls = [self._now[_Source(copy, Instance(self._top))]]
        return self.tree.encode_calls(owners, calls)

    def signatures(self) -> dict[str, Sequence[Signature]]:
        """Signatures of the module itself, and of modules all of whose calls are the host's."""
        own_calls = self._host.signatures.get(self._path, ())
        signatures: dict[str, Sequence[Signature]] = {}
        if len(own_calls) == self.hierarchy[self._path].calls:
            signatures[self._path] = own_calls
        for path, numbers in self._kept.items():
            known = self._host.signatures.get(path, ())
            if numbers and len(known) == self._host.hierarchy[path].calls:
                signatures[path] = tuple(known[number] for number in numbers)
        return {path: signatures[path] for path in self._host.signatures if path in signatures}

    # --- origins of calls -------------------------------------------------------------------------

    def _sources(self, path: str, numbers: Sequence[int]) -> list[_Source]:
        """The calls of a module, in execution order."""
        ran = self._host.hierarchy[path].calls if path in self._host.hierarchy else 0
        chains = [self._host.calls.chain(Instance(path, number)) for number in range(ran)]
        if self._host.hierarchy[self._path].calls:
            removed = [not self._replaced.isdisjoint(chain) for chain in chains]
        else:  # the replaced module is a container, which has no calls
            removed = [tags.is_under(path, self._path)] * ran
        # Sort key of a call: its number in the host; new calls precede the next call of the host.
        placed = [
            (number, 1, _Source(-1, Instance(path, number)))
            for number in range(ran)
            if not removed[number]
        ]
        for copy in numbers:
            place = self._first_place(chains, copy)
            placed += [(place, 0, source) for source in self._copied_sources(path, copy)]
        return [source for _, _, source in sorted(placed)]

    def _first_place(self, chains: Sequence[Sequence[Instance]], copy: int) -> int:
        """The number of the first call inside a replaced call, or else after it."""
        replaced = Instance(self._path, copy)
        for number, chain in enumerate(chains):
            if replaced in chain:
                return number
        for number, chain in enumerate(chains):
            if any(call.path == self._path and call.call > copy for call in chain):
                return number
        return len(chains)

    def _copied_sources(self, path: str, copy: int) -> list[_Source]:
        """The calls of a module in one copy of the replacement."""
        source_path = self._top if path == self._path else self._source_path(path)
        if source_path is None:
            return []
        ran = 0
        if source_path in self._replacement.hierarchy:
            ran = self._replacement.hierarchy[source_path].calls
        count = max(ran, path == self._path)
        return [_Source(copy, Instance(source_path, number)) for number in range(count)]

    def _caller(self, source: _Source) -> Instance | None:
        """The caller of a call in the new tree; its number is -1 if it is unknown."""
        call = source.call
        if source.copy >= 0:
            caller = self._replacement.calls.caller(call)
            if caller is not None and caller.call < 0:
                return Instance(self._path, -1)
            inside = None if caller is None else self._now.get(_Source(source.copy, caller))
            if inside is not None:
                return inside
            if call.path != self._top:
                return self._now[_Source(source.copy, Instance(self._top))]
            call = Instance(self._path, source.copy)
        caller = self._host.calls.caller(call)
        if caller is None:
            return None
        return self._now.get(_Source(-1, caller), Instance(caller.path, -1))

    # --- the module tree --------------------------------------------------------------------------

    def _infos(self, sources_of: Mapping[str, Sequence[_Source]]) -> list[ModuleInfo]:
        """The modules of the host, with the replacement's as descendants of the module.

        A descendant that other modules call, too, remains the host's.
        """
        counts = {path: len(sources) for path, sources in sources_of.items()}
        called = []
        for path, sources in sources_of.items():
            if any(source.copy < 0 for source in sources):
                called.append(path)
        remaining = {*called, *tags.all_above(called)}
        new = self._new_infos(counts, remaining)
        infos: list[ModuleInfo] = []
        for path, info in self._host.hierarchy.items():
            is_replaced = tags.is_under(path, self._path) and (self._whole or path in new)
            if path == self._path:
                calls = counts[path] if info.calls else 0
                infos.append(
                    replace(info, calls=calls, fate=Fate.of_calls(counts[path]), fused_with=())
                )
                infos.extend(new.values())
            elif path in remaining or not is_replaced:
                infos.append(info.counted(counts[path]))
        return infos

    def _new_infos(
        self, counts: Mapping[str, int], remaining: Collection[str]
    ) -> dict[str, ModuleInfo]:
        """The descendants of the module that come from the replacement."""
        replacement = self._replacement.hierarchy
        new: dict[str, ModuleInfo] = {}
        for source_path, path in self.paths.items():
            is_below = tags.is_under(path, self._path) and path != self._path
            if source_path in replacement and is_below and path not in remaining:
                new[path] = replace(replacement[source_path], path=path, calls=counts[path])
        return new


class Graft:
    """A copy of a replacement that fits into a host, in the place of one call of a module.

    ``edit``: The host, with the modules of ``calls``. ``weights`` are the host's, by
    ``weight_key``; inserting the copy adds its own.

    Attributes:
        inputs: The copy's inputs without initializers.

    Raises:
        InputError: It needs another version of an operator set than the host has.
    """

    def __init__(
        self,
        edit: Edit,
        replacement: TaggedModel,
        path: str,
        call: int,
        calls: SplicedCalls,
        weights: dict[int, ir.Value],
    ) -> None:
        self._edit, self._replacement = edit, replacement
        host = self._host = edit.tagged.model
        self._path, self._call, self._weights = path, call, weights
        self._calls = calls
        self._paths = calls.paths
        self._copy = Copied.of(replacement)
        self._model = self._copy.tagged.model
        self._original = {
            value: weight_key(value) for value in self._model.graph.initializers.values()
        }
        self._match_opsets()
        self._names: dict[str, str] = {}  # tensor of the main graph → its name in the host
        used = list[str]()
        for graph in host.graphs():
            used.extend(str(value.name) for value in (*_values(graph), *_used(graph)))
        self._tensors = UsedNames(used, first=1)
        self._rename_conflicts()
        self._write_tags()
        self.inputs = [value for value in self._model.graph.inputs if not value.is_initializer()]

    # --- fitting into the host --------------------------------------------------------------------

    def _match_opsets(self) -> None:
        """Add the replacement's operator sets to the host."""
        known = self._host.graph.opset_imports
        wanted = self._model.graph.opset_imports
        for domain, version in wanted.items():
            if known.setdefault(domain, version) == version:
                continue
            raise InputError(
                f"the replacement uses opset {version} of {domain or 'ai.onnx'!r}, and the model {known[domain]}; "
                "convert one of them (onnx.version_converter) or export both with one opset_version"
            )
        self._host.ir_version = max(self._host.ir_version, self._model.ir_version)

    def _rename_conflicts(self) -> None:
        """Rename tensors, nodes and functions whose names the host already uses."""
        ends = {*self._model.graph.inputs, *self._model.graph.outputs}
        for graph in self._model.graphs():
            for value in list(_values(graph)):
                # Inputs, outputs and known weights get the names of the host's tensors.
                if value in ends or self._original.get(value) in self._weights:
                    continue
                old = str(value.name)
                name = self._free(self._tensors, old)
                if name != old:
                    self._names[old] = name
                    rename(value, name)
        nodes = UsedNames((str(node.name) for node in self._host.graph.all_nodes()), first=1)
        for node in self._model.graph.all_nodes():
            if node.name:
                node.name = self._free(nodes, node.name)
        functions = UsedNames(
            (name for _, name, _ in (*self._host.functions, *self._model.functions)), first=1
        )
        for identifier, function in list(self._model.functions.items()):
            if identifier in self._host.functions:
                self._rename_function(identifier, function, functions.unused(function.name))

    def _free(self, used: UsedNames, name: str) -> str:
        """A name if it is unused; otherwise an unused one with the path of the module before it."""
        if used.unused(name) == name:
            return name
        return used.unused(f"{self._path.replace('.', '/') or 'spliced'}/{name}")

    def _rename_function(
        self, identifier: ir.OperatorIdentifier, function: ir.Function, name: str
    ) -> None:
        for node in all_nodes(self._model):
            if node.op_identifier() == identifier:
                node.op_type = name
        del self._model.functions[identifier]
        function.name = name
        self._model.functions[function.identifier()] = function

    def _write_tags(self) -> None:
        """Tag every node with owners at or below the module, and with its call."""
        for source, node in self._copy.copy_of.items():
            metadata = node.metadata_props
            # a number in the list of the other model
            metadata.pop(tags.CALIBRATION, None)
            owners = tuple(self._paths[owner] for owner in tags.owners_of(metadata))
            owners = owners or (self._path,)
            calls = self._calls.encode_calls(source, owners, self._call)
            reason = metadata.get(tags.REASON, Reason.SPLICED)
            self._edit.set_owners(node, Owned(owners, reason, calls))

    # --- insertion --------------------------------------------------------------------------------

    def insert(
        self, inputs: Mapping[ir.Value, ir.Value], placeholders: Sequence[ir.Value | None]
    ) -> list[ir.Value]:
        """Insert the copy into the host, with the host's tensors as arguments; return its results.

        A result gets the name of its placeholder in the host; None is that of an unused result.
        """
        graph = self._model.graph
        host = self._host.graph
        results = [
            value if value.producer() is not None else self._copied(value)
            for value in graph.outputs
        ]
        for formal, tensor in inputs.items():
            self._names[str(formal.name)] = str(tensor.name)
            formal.replace_all_uses_with(tensor)
        initializers = list(graph.initializers.values())
        nodes = list(graph)
        optional = [value for value in graph.inputs if value.is_initializer()]
        graph.inputs.clear()
        graph.outputs.clear()
        graph.initializers.clear()
        graph.remove(nodes)
        for initializer in initializers:
            is_optional = initializer in optional
            known = self._known_weight(initializer, is_optional=is_optional)
            if known is not initializer:
                # The weights of a module that ran several times were added with its first call.
                initializer.replace_all_uses_with(known)
                continue
            host.register_initializer(initializer)
            if is_optional:
                host.inputs.append(initializer)
        host.extend(nodes)
        for placeholder, new in zip(placeholders, results, strict=True):
            if placeholder is None:
                new.name = self._free(self._tensors, str(new.name))
                continue
            self._names[str(new.name)] = str(placeholder.name)
            replace_uses(placeholder, new)
        self._host.functions.update(self._model.functions)
        return results

    def _known_weight(self, initializer: ir.Value, *, is_optional: bool) -> ir.Value:
        """The host's weight that equals an initializer of the copy; itself if there is none.

        An input with a default value is the host's input of that name, or becomes an input of the
        host.
        """
        known = self._weights.setdefault(self._original[initializer], initializer)
        if known is not initializer or not is_optional:
            return known
        old = str(initializer.name)
        existing = next((value for value in self._host.graph.inputs if value.name == old), None)
        if existing is not None and existing.is_initializer() and existing.type == initializer.type:
            self._weights[self._original[initializer]] = existing
            return existing
        self._names[old] = initializer.name = self._free(self._tensors, old)
        return initializer

    def _copied(self, value: ir.Value) -> ir.Value:
        """A copy of an input or initializer that is an output, by a node of the module."""
        owners = (self._path,)
        calls = self._calls.encode_calls(None, owners, self._call)
        owned = Owned(owners, Reason.SPLICED, calls)
        return own_output(self._edit, self._model.graph, value, owned)

    # --- the signatures ---------------------------------------------------------------------------

    def describe(self) -> None:
        """Set the host's signatures, with those of the new descendants of the module."""
        host, props = self._edit.tagged, self._host.metadata_props
        signatures = self._calls.signatures() if host.signatures else {}
        # With several calls, the names of the copies' tensors differ: only one has signatures.
        if host.signatures and host.hierarchy[self._path].calls <= 1:
            for path, known in self._replacement.signatures.items():
                place = self._paths.get(path, self._path)
                if place != self._path and len(known) == self._calls.hierarchy[place].calls:
                    signatures[place] = [call.renamed(self._host_name) for call in known]
        self._edit.signatures = {path: list(known) for path, known in signatures.items()}
        inputs = {str(value.name) for value in self._host.graph.inputs}
        layers = lora_of_inputs(props, inputs)
        for path, scaling in lora_of_inputs(self._replacement.model.metadata_props, inputs).items():
            layers.setdefault(path, scaling)
        write_lora(props, layers)

    def _host_name(self, name: str) -> str:
        return self._names.get(name, name)


def _placed_paths(host: TaggedModel, replacement: TaggedModel, path: str) -> dict[str, str]:
    """Path in a replacement → path in the host, at or below the replaced module.

    It is empty without tags. A model that was extracted from the host keeps its paths, also of
    called modules that are registered elsewhere.
    """
    owners = {owner for node in replacement.nodes for owner in tags.owners_of(node.metadata_props)}
    known = replacement.hierarchy if owners else ()
    called: set[str] = set()
    for number in range(max(host.hierarchy[path].calls, 1)):
        called.update(host.calls.inside(Instance(path, number)))

    def is_inside(module: str) -> bool:
        return module in called or tags.is_under(module, path)

    if all(map(is_inside, owners)):
        return {module: module for module in filter(is_inside, known)}
    return {module: ".".join(filter(None, (path, module))) for module in (*known, *owners)}


def weight_key(initializer: ir.Value) -> int:
    """A key that is equal for initializers of copies of one model with the same weights."""
    return id(initializer if initializer.const_value is None else initializer.const_value)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """The values that are defined in a graph."""
    outputs = (value for node in graph for value in node.outputs)
    return itertools.chain(graph.inputs, graph.initializers.values(), outputs)


def _used(graph: ir.Graph) -> Iterator[ir.Value]:
    """The values that are used in a graph, even if their producers were removed."""
    inputs = (value for node in graph for value in node.inputs if value is not None)
    return itertools.chain(graph.outputs, inputs)
