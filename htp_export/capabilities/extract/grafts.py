"""What is put into a model: a copy of another one, under names, tags and calls that fit there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from htp_export.editing.cut_models import own_output
from htp_export.editing.editing import replace_uses
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance, renumbered
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import lora_of_inputs, write_lora, write_model_metadata
from htp_export.format.signatures import Signature
from htp_export.format.tags import Reason
from htp_export.lineage.owner_rule import Owned
from htp_export.model.regions import all_nodes, twins_of
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import UsedNames, rename


class _Source(NamedTuple):
    """Where a call comes from."""

    # the call of the module that the replacement stands for; -1 for a call that was there before
    copy: int
    call: Instance  # in the model that it comes from


class SplicedCalls:
    """What ran in which call, once a model has taken the place of some calls (``numbers``) of a module (``path``).

    Attributes:
        paths: Path in the replacement → path in the host.
        hierarchy: The host's modules, with what lies below the module now.
        tree: Their calls.
    """

    def __init__(
        self, host: TaggedModel, replacement: TaggedModel, path: str, numbers: Sequence[int]
    ) -> None:
        self._host, self._replacement, self._path = host, replacement, path
        paths = self.paths = _placed_paths(host, replacement, path)
        self._replaced = {Instance(path, number) for number in numbers}
        every = (
            host.calls.chain(Instance(path, number))
            for number in range(max(host.hierarchy[path].calls, 1))
        )
        self._whole = not any(map(self._replaced.isdisjoint, every))
        if self._whole:
            # calls that ran in one of them, the file does not say in which
            self._replaced.add(Instance(path, -1))
        self._top = next(
            (source_path for source_path, host_path in paths.items() if host_path == path), path
        )
        sources_of = {
            module: self._sources(module, numbers)
            for module in dict.fromkeys((*host.hierarchy, *paths.values()))
        }
        self._now = {
            source: Instance(module, number)
            for module, sources in sources_of.items()
            for number, source in enumerate(sources)
        }
        self.hierarchy = Hierarchy(self._infos(sources_of))
        callers = {
            module: [self._caller(source) for source in sources]
            for module, sources in sources_of.items()
        }
        known = {
            module: calls
            for module, calls in callers.items()
            if all(c is None or c.call >= 0 for c in calls)
        }
        self.tree = CallTree(self.hierarchy, known)
        self._kept = {
            module: [source.call.call for source in sources]
            for module, sources in sources_of.items()
            if all(source.copy < 0 for source in sources)
        }

    def encode_calls(self, node: ir.Node | None, owners: tuple[str, ...], copy: int = -1) -> str:
        """What a node of the host says of its calls now; or one of the replacement, copied for a call of the module.

        None stands for a node that the module itself has in that call.
        """
        source, calls = (self._host if copy < 0 else self._replacement), list[Instance]()
        if node is not None:
            calls = renumbered(
                source.calls, source.work_of(node), lambda call: self._now.get(_Source(copy, call))
            )
        if copy >= 0 and not calls:
            calls = [self._now[_Source(copy, Instance(self._top))]]
        return self.tree.encode_calls(owners, calls)

    def signatures(self) -> dict[str, Sequence[Signature]]:
        """Those of the host's modules all of whose calls were there before, and of the module itself."""
        known_calls = self._host.signatures.get(self._path, ())
        signatures = (
            {self._path: known_calls}
            if len(known_calls) == self.hierarchy[self._path].calls
            else {}
        )
        for path, numbers in self._kept.items():
            known = self._host.signatures.get(path, ())
            if numbers and len(known) == self._host.hierarchy[path].calls:
                signatures[path] = tuple(known[number] for number in numbers)
        return {path: signatures[path] for path in self._host.signatures if path in signatures}

    # --- where calls come from ------------------------------------------------------------------------------

    def _sources(self, path: str, numbers: Sequence[int]) -> list[_Source]:
        """The calls of a module, in the order in which they ran."""
        ran = self._host.hierarchy[path].calls if path in self._host.hierarchy else 0
        chains = [self._host.calls.chain(Instance(path, number)) for number in range(ran)]
        if self._host.hierarchy[self._path].calls:
            gone = [not self._replaced.isdisjoint(chain) for chain in chains]
        else:  # it only holds others
            gone = [tags.is_under(path, self._path)] * ran
        placed = [
            (number, 1, _Source(-1, Instance(path, number)))
            for number in range(ran)
            if not gone[number]
        ]
        for copy in numbers:
            inside = [k for k, chain in enumerate(chains) if Instance(self._path, copy) in chain]
            later = [
                k
                for k, chain in enumerate(chains)
                if any(c.path == self._path and c.call > copy for c in chain)
            ]
            place = inside[0] if inside else later[0] if later else ran
            placed += [(place, 0, source) for source in self._copied_sources(path, copy)]
        return [source for _, _, source in sorted(placed)]

    def _copied_sources(self, path: str, copy: int) -> list[_Source]:
        """The calls of a module in one copy of the replacement."""
        placed = next((key for key, host_path in self.paths.items() if host_path == path), None)
        source_path = self._top if path == self._path else placed
        if source_path is None:
            return []
        ran = (
            self._replacement.hierarchy[source_path].calls
            if source_path in self._replacement.hierarchy
            else 0
        )
        return [
            _Source(copy, Instance(source_path, number))
            for number in range(max(ran, path == self._path))
        ]

    def _caller(self, source: _Source) -> Instance | None:
        """The call that made a call, as it is now; its number is -1 where that is not known."""
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
        return (
            None
            if caller is None
            else self._now.get(_Source(-1, caller), Instance(caller.path, -1))
        )

    # --- the module tree --------------------------------------------------------------------------------------

    def _infos(self, sources_of: Mapping[str, Sequence[_Source]]) -> list[ModuleInfo]:
        """The modules of the host; those below the module are the replacement's, unless others call them, too."""
        tree, replacement = self._host.hierarchy, self._replacement.hierarchy
        counts = {path: len(sources) for path, sources in sources_of.items()}
        called = [
            path
            for path, sources in sources_of.items()
            if any(source.copy < 0 for source in sources)
        ]
        stays = {*called, *tags.all_above(called)}
        fresh = {
            host_path: replace(replacement[source_path], path=host_path, calls=counts[host_path])
            for source_path, host_path in self.paths.items()
            if source_path in replacement
            and tags.is_under(host_path, self._path)
            and host_path not in stays
        }
        fresh.pop(self._path, None)
        infos: list[ModuleInfo] = []
        for path, info in tree.items():
            if path == self._path:
                calls = counts[path] if info.calls else 0
                infos += [
                    replace(info, calls=calls, fate=Fate.COMPUTED, fused_with=()),
                    *fresh.values(),
                ]
            elif (
                path in stays
                or not tags.is_under(path, self._path)
                or not (self._whole or path in fresh)
            ):
                infos.append(info.counted(counts[path]))
        return infos


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
        self._host, self._replacement, self._path, self._call, self._weights = (
            host,
            replacement,
            path,
            call,
            weights,
        )
        self._calls, self._paths = calls, calls.paths
        self._model = replacement.model.clone()
        self._original = {
            value: weight_key(value) for value in self._model.graph.initializers.values()
        }
        self._match_opsets()
        self._names: dict[str, str] = {}  # tensor of the main graph → its name in the host
        there = (
            str(value.name) for graph in host.graphs() for value in (*_values(graph), *_read(graph))
        )
        self._tensors = UsedNames(there, first=1)
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
        ends = {*self._model.graph.inputs, *self._model.graph.outputs}
        for graph in self._model.graphs():
            for value in list(_values(graph)):
                # these get a name of the host
                if value not in ends and self._original.get(value) not in self._weights:
                    old = str(value.name)
                    name = self._free(self._tensors, old)
                    if name != old:
                        self._names[old] = name
                        rename(value, name)
        nodes = UsedNames((str(node.name) for node in self._host.graph.all_nodes()), first=1)
        for node in self._model.graph.all_nodes():
            node.name = self._free(nodes, node.name) if node.name else node.name
        functions = UsedNames(
            (name for _, name, _ in (*self._host.functions, *self._model.functions)), first=1
        )
        for identifier, function in list(self._model.functions.items()):
            if identifier in self._host.functions:
                self._rename_function(identifier, function, functions.unused(function.name))

    def _free(self, used: UsedNames, name: str) -> str:
        """A name if it is not used; otherwise it, with the path of the module before it."""
        return (
            name
            if used.unused(name) == name
            else used.unused(f"{self._path.replace('.', '/') or 'spliced'}/{name}")
        )

    def _rename_function(
        self, identifier: ir.OperatorIdentifier, function: ir.Function, name: str
    ) -> None:
        for node in all_nodes(self._model):
            if node.op_identifier() == identifier:
                node.op_type = name
        del self._model.functions[identifier]
        function.name = name
        self._model.functions[function.identifier()] = function

    def _place_tags(self) -> None:
        """Give every node owners at or below the module, and the call that it is in."""
        called = frozenset((*self._replacement.hierarchy.called, self._path, *self._paths.values()))
        for node, source in twins_of(self._model, self._replacement.model).items():
            metadata = node.metadata_props
            owners = tuple(self._paths[owner] for owner in tags.owners_of(metadata)) or (
                self._path,
            )
            calls = self._calls.encode_calls(source, owners, self._call)
            Owned(owners, metadata.get(tags.REASON, Reason.SPLICED), calls).write(metadata, called)

    # --- going in -----------------------------------------------------------------------------------------

    def insert(
        self, inputs: Mapping[ir.Value, ir.Value], stand_ins: Sequence[ir.Value | None]
    ) -> list[ir.Value]:
        """Put the copy into the host, with the host's tensors for its inputs; its results.

        These get the names of what stands for them in the host; None stands for a result that
        nothing reads.
        """
        graph, host = self._model.graph, self._host.graph
        results = [
            value if value.producer() is not None else self._own(value) for value in graph.outputs
        ]
        for formal, tensor in inputs.items():
            self._names[str(formal.name)] = str(tensor.name)
            formal.replace_all_uses_with(tensor)
        initializers, nodes = list(graph.initializers.values()), list(graph)
        optional = [value for value in graph.inputs if value.is_initializer()]
        graph.inputs.clear()
        graph.outputs.clear()
        graph.initializers.clear()
        graph.remove(nodes)
        for initializer in initializers:
            known = self._known_weight(initializer, is_optional=initializer in optional)
            if known is initializer:
                host.register_initializer(initializer)
                host.inputs.extend([initializer] if initializer in optional else [])
            else:  # the weights of a module that ran several times are there from its first call on
                initializer.replace_all_uses_with(known)
        host.extend(nodes)
        for stand_in, new in zip(stand_ins, results, strict=True):
            if stand_in is None:
                new.name = self._free(self._tensors, str(new.name))
                continue
            self._names[str(new.name)] = str(stand_in.name)
            replace_uses(stand_in, new)
        self._host.functions.update(self._model.functions)
        return results

    def _known_weight(self, initializer: ir.Value, *, is_optional: bool) -> ir.Value:
        """The weight of the host that an initializer of the copy is; itself, if the host has none.

        An input with a default value is that of its name in the host, or becomes one of the host.
        """
        known = self._weights.setdefault(self._original[initializer], initializer)
        if known is not initializer or not is_optional:
            return known
        old = str(initializer.name)
        there = next((value for value in self._host.graph.inputs if value.name == old), None)
        if there is not None and there.is_initializer() and there.type == initializer.type:
            self._weights[self._original[initializer]] = there
            return there
        self._names[old] = initializer.name = self._free(self._tensors, old)
        return initializer

    def _own(self, value: ir.Value) -> ir.Value:
        """A tensor of a node of its own, for an output that is an input or an initializer."""
        owned = Owned(
            (self._path,), Reason.SPLICED, self._calls.encode_calls(None, (self._path,), self._call)
        )
        return own_output(self._model.graph, value, owned)

    # --- the module tree --------------------------------------------------------------------------------

    def describe(self, host: TaggedModel) -> None:
        """Write what lies below the module now into the host's module tree, calls and signatures."""
        props, signatures = (
            self._host.metadata_props,
            self._calls.signatures() if host.signatures else {},
        )
        if host.signatures and host.hierarchy[self._path].calls <= 1:
            for path, known in self._replacement.signatures.items():
                place = self._paths.get(path, self._path)
                if place != self._path and len(known) == self._calls.hierarchy[place].calls:
                    signatures[place] = [
                        call.renamed(lambda name: self._names.get(name, name)) for call in known
                    ]
        calls = self._calls.tree if tags.CALLERS in props else None
        write_model_metadata(props, self._calls.hierarchy, calls=calls, signatures=signatures)
        inputs = {str(value.name) for value in self._host.graph.inputs}
        layers = lora_of_inputs(props, inputs)
        for path, scaling in lora_of_inputs(self._replacement.model.metadata_props, inputs).items():
            layers.setdefault(path, scaling)
        write_lora(props, layers)


def _placed_paths(host: TaggedModel, replacement: TaggedModel, path: str) -> dict[str, str]:
    """Path in a replacement → path in the host, at or below the module whose place it takes; empty without tags.

    What was cut out of the host keeps its paths, those of modules that are registered elsewhere,
    too.
    """
    owners = {owner for node in replacement.nodes for owner in tags.owners_of(node.metadata_props)}
    known = replacement.hierarchy if owners else ()
    numbers = range(max(host.hierarchy[path].calls, 1))
    called = {module for number in numbers for module in host.calls.inside(Instance(path, number))}
    if all(owner in called or tags.is_under(owner, path) for owner in owners):
        return {
            module: module for module in known if module in called or tags.is_under(module, path)
        }
    return {module: ".".join(filter(None, (path, module))) for module in (*known, *owners)}


def weight_key(initializer: ir.Value) -> int:
    """Equal for initializers of copies of one model that hold the same weights."""
    return id(initializer if initializer.const_value is None else initializer.const_value)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    return itertools.chain(
        graph.inputs, graph.initializers.values(), (v for node in graph for v in node.outputs)
    )


def _read(graph: ir.Graph) -> Iterator[ir.Value]:
    """What is read in a graph, also where nothing computes it now: the results of a module that was taken out."""
    return itertools.chain(
        graph.outputs, (value for node in graph for value in node.inputs if value is not None)
    )
