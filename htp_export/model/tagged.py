"""TaggedModel: an ONNX model with module tags; load, inspect, select, save."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, NoReturn, Protocol, TypeAlias, TypeVar

import onnx
import onnx_ir as ir

from htp_export.errors import (
    FileError,
    InputError,
    SelectorError,
    UnknownModuleError,
    UntaggedModelError,
)
from htp_export.files.model_files import read_model, write_model
from htp_export.files.parsing import check_flat_size, model_from_proto
from htp_export.files.written_check import made_from
from htp_export.format import selectors, tags
from htp_export.format.bounds import number_in
from htp_export.format.call_tree import CallTree, NodeCalls
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import Tap, assumed_from_json, taps_from_json
from htp_export.format.parameters import (
    Declared,
    ModuleParameters,
    declared,
    parameters_from_json,
    with_frozen,
)
from htp_export.format.signatures import Signature, signatures_from_json
from htp_export.format.torch_metadata import scopes_of
from htp_export.model.graph_names import GraphNames
from htp_export.model.module_tensors import ModuleTensor, chosen_tensors, tensors_of
from htp_export.model.regions import GraphIndex, Region, all_nodes
from htp_export.process.argument_types import checks_arguments
from htp_export.reporting.result import Result, html_table, html_tree
from htp_export.reporting.tables import drawn_levels, drawn_parents
from htp_export.reporting.tag_facts import TagFacts
from htp_export.shapes.symbolic import Symbolic

_log = logging.getLogger(__name__)

_WARNED = "htp_export.warned_of_scopes"
"""Key in the ``meta`` of a model with torch's scopes only: it has been warned about."""

TagSource: TypeAlias = Literal["htp", "torch", "none"]

_T = TypeVar("_T")


class _HasModel(Protocol):
    """The common interface of ``torch.onnx.ONNXProgram`` and `HoldsModel`."""

    @property
    def model(self) -> ir.Model: ...


class HoldsModel(Result):
    """A result of this package that contains a model."""

    model: ir.Model

    @cached_property
    def tagged(self) -> TaggedModel:
        """The model with its module tree, read once; after changing the graph, `refresh` it."""
        return load(self.model)


class TaggedResult(HoldsModel):
    """A result whose tables also have facts about the model's tags."""

    derived: ClassVar[tuple[str, ...]] = ("tags",)

    @cached_property
    def tags(self) -> TagFacts:
        """The facts about the model's module tags."""
        return self.tagged.tag_facts


class TaggedModel:
    """An ONNX model and its module tree; indexed by module path.

    Facts about the graph are found once, on demand. After changing the graph, `refresh` it. If the
    metadata of the model is not valid, properties that read it raise an `InputError`.

    Attributes:
        model: The model.
        hierarchy: Its modules, including every owner of a node.
        source: The source of the owners: ``"htp"``, the exact tags of this package; ``"torch"``,
            torch's own scopes; or ``"none"``.

    Examples:
        >>> import onnx_ir as ir
        >>> props = {"htp.module": "act", "htp.reason": "scope"}
        >>> relu = ir.node("Relu", [ir.val("x")], metadata_props=props)
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20})
        >>> tagged = load(ir.Model(graph, ir_version=10))
        >>> tagged.paths, [node.op_type for node in tagged["act"].nodes], tagged.reasons
        (['', 'act'], ['Relu'], Counter({'scope': 1}))
    """

    def __init__(self, model: ir.Model, hierarchy: Hierarchy, source: TagSource = "htp") -> None:
        self.model = model
        self.hierarchy = hierarchy
        self.source: TagSource = source
        self._regions: dict[str, Region] = {}
        self._file: Path | None = None

    def __repr__(self) -> str:
        name = self.hierarchy.root.simple_class or self.model.graph.name or "unnamed"
        return f"<TaggedModel {name}: {len(self)} modules, tags: {self.source}>"

    def _repr_html_(self) -> str:
        """The module tree, for notebooks; ``htp_export.view`` draws it with all facts."""
        if self.source == "none":
            return html_table(["nodes"], [[str(len(self.nodes))]], [str(self.tag_facts)])
        return html_tree(self._lines(), [str(self.tag_facts)])

    def _lines(self) -> Iterator[tuple[int, str, str, str]]:
        parents = drawn_parents({path: self[path] for path in self})
        levels = drawn_levels(parents)
        for path, above in parents.items():
            module, nodes = self.hierarchy[path], len(self[path].nodes)
            remarks = [module.simple_class, f"{nodes} node{'s' * (nodes != 1)}"]
            remarks += [f"{module.calls} calls"] if module.calls > 1 else []
            remarks += filter(None, [module.fate.remark])
            short = path[len(above) + 1 if above else 0 :]
            yield levels[path], short or "(root)", path or "(root)", " · ".join(remarks)

    def __getitem__(self, path: str) -> Region:
        self.require_tags()
        if path not in self.hierarchy:
            raise UnknownModuleError(path, self.hierarchy, described=self.described(path))
        path = "" if path == "." else path
        if path not in self._regions:
            self._regions[path] = Region(self.index, self.hierarchy, self.calls, path)
        return self._regions[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.hierarchy)

    def __len__(self) -> int:
        return len(self.hierarchy)

    def __contains__(self, path: object) -> bool:
        return path in self.hierarchy

    def refresh(self, hierarchy: Hierarchy | None = None) -> TaggedModel:
        """Find owners, regions, shapes and signatures again after a change, also with other modules."""
        lasting = {
            "model": self.model,
            "hierarchy": hierarchy or self.hierarchy,
            "source": self.source,
        }
        self.__dict__ = {**lasting, "_regions": {}, "_file": self._file}
        return self

    def clone(self) -> TaggedModel:
        """Return the same for a copy of the model; the module tree is not read again."""
        copy = self.model.clone()
        copy.meta.update(self.model.meta)
        return TaggedModel(copy, self.hierarchy, self.source)

    def __deepcopy__(self, memo: dict[int, object]) -> TaggedModel:
        """Return a `clone`: the graph of a deep model is too deep for the recursion of `copy.deepcopy`."""
        memo[id(self)] = copied = self.clone()
        return copied

    @property
    def paths(self) -> list[str]:
        """Every module path, in the order of ``named_modules()``."""
        return list(self.hierarchy)

    @property
    def nodes(self) -> list[ir.Node]:
        """Every node, also in subgraphs and functions, in the order of ``all_nodes``."""
        return self.index.nodes

    @property
    def untagged(self) -> list[ir.Node]:
        """The nodes without owners."""
        return [node for node, owners in self.index.owners.items() if not owners]

    @property
    def reasons(self) -> Counter[str]:
        """``htp.reason``, the evidence for owners → number of nodes."""
        listed = (node.metadata_props.get(tags.REASON) for node in all_nodes(self.model))
        return Counter(reason for reason in listed if reason is not None)

    @property
    def tag_facts(self) -> TagFacts:
        """The facts about the model's tags that tables show."""
        lost = self.source != "htp" and tags.MODULES in self.model.metadata_props
        untagged = 0 if self.source == "none" else len(self.untagged)
        return TagFacts(self.source, dict(self.reasons.most_common()), untagged, lost)

    @cached_property
    def signatures(self) -> Mapping[str, tuple[Signature, ...]]:
        """Module path → its inputs and outputs in PyTorch, for each call, if they are in the file."""
        return self._read(tags.SIGNATURES, signatures_from_json) or {}

    def signature(self, path: str, call: int = 0) -> Signature | None:
        """The inputs and outputs of one call of a module in PyTorch; None if they are not in the file."""
        calls = self.signatures.get(path, ())
        return calls[call] if call < len(calls) else None

    def tensors(self, path: str) -> list[ModuleTensor]:
        """The inputs and outputs of a module's calls in PyTorch, and their tensors in the file.

        They are from ``htp.signatures``. A call without signature has the tensor that enters or
        leaves its nodes, if there is only one.

        Raises:
            UnknownModuleError: If the model has no such module.

        Examples:
            >>> import torch, htp_export
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
            >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
            >>> [(each.place, each.name, each.tensor) for each in tagged.tensors("1")]
            [('1:in', 'input', 'linear'), ('1:out', '0', 'relu')]
        """
        region = self[path]
        return tensors_of(region, self.signatures.get(region.path, ()), self.values)

    def select_tensors(self, patterns: str | Sequence[str]) -> list[ModuleTensor]:
        """The tensors that a selector names, ``encoder.layer.*:out``; see ``docs/taps.md``.

        Of several modules, those whose tensor is not in the file have the reason as ``problem``.

        Raises:
            SelectorError: If the selector cannot be read, or a part of it matches no module, call
                or tensor.
            InputError: If the tensor of one module is not in the file, or those of all; the message
                has the reason and a remedy.
            UntaggedModelError: If the model has no exact tags.
        """
        self.require_exact_tags()
        try:
            places = selectors.places_of(patterns)
        except SelectorError as error:
            described = self.described(error.pattern)
            if described and error.pattern not in self:
                raise SelectorError(error.pattern, f"is no module; it is {described}") from None
            raise
        return chosen_tensors(places, self.select, self.tensors)

    @cached_property
    def taps(self) -> Mapping[str, Tap]:
        """Output that ``tap`` added to the graph → its description; the model does not return it."""
        taps = self._read(tags.TAPS, taps_from_json) or {}
        names = {value.name for value in self.model.graph.outputs}
        return {name: tap for name, tap in taps.items() if name in names}

    @property
    def results(self) -> list[ir.Value]:
        """The tensors that the model returns: the outputs of the graph, without taps."""
        return [value for value in self.model.graph.outputs if value.name not in self.taps]

    @property
    def assumed(self) -> Mapping[str, float | str]:
        """Parameter that an optimiser removed with its value → this value, of all of its elements."""
        return self._read(tags.ASSUMED, assumed_from_json) or {}

    @cached_property
    def parameters(self) -> Mapping[str, ModuleParameters] | None:
        """Module path → its parameters in PyTorch; None if they are not in the file.

        None, too, if a module is missing, as in a part of a model that another tool extracted.
        A shared module is in the tree under its first path, and here under each.
        """
        parameters = self._read(tags.PARAMETERS, parameters_from_json)
        if parameters is None:
            return None
        if any(
            path not in self.hierarchy and not each.is_tied for path, each in parameters.items()
        ):
            return None
        return self._read(tags.FROZEN, lambda text: with_frozen(parameters, text)) or parameters

    @cached_property
    def declared(self) -> Mapping[str, Declared] | None:
        """Full name → parameter in PyTorch; one that several modules have is listed under each name."""
        return None if self.parameters is None else declared(self.parameters)

    @cached_property
    def values(self) -> Mapping[str, ir.Value]:
        """The tensors of the main graph by name."""
        return ir.convenience.create_value_mapping(self.model.graph, include_subgraphs=False)

    @cached_property
    def inferred(self) -> Symbolic:
        """Types and shapes of all tensors, inferred where the file has none, with open dimensions."""
        return Symbolic(self.model.graph, functions=self.model.functions)

    @cached_property
    def typed(self) -> Mapping[str, ir.Value]:
        """The tensors by name, each with its known type and shape."""
        typed: dict[str, ir.Value] = {}
        for name, value in self.values.items():
            is_typed = value.dtype is not None and value.shape is not None
            typed[name] = value if is_typed else self.inferred.described(value)
        return typed

    @cached_property
    def names(self) -> GraphNames:
        """The nodes and tensors of the model by name, in subgraphs and functions, too."""
        return GraphNames(self.model)

    def described(self, name: str) -> str:
        """The node, tensor or parameter that has a name, and its modules, for messages.

        Examples:
            >>> import torch, htp_export
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
            >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
            >>> tagged.described("node_relu"), tagged.described("0.weight"), tagged.described("relu_7")
            ("a node (Relu) of module '1'", "a parameter of module '0'", '')
        """
        return self.names.described(name, self.owners_of, self.declared or {})

    def owners_of(self, node: ir.Node | str) -> tuple[str, ...]:
        """The owners of a node, in order of execution; empty for an untagged node.

        Args:
            node: The node; or its name, or the name of a tensor that it computes. If several nodes
                have this name, in functions or branches, their owners are returned together.

        Raises:
            InputError: There is no node of this name, and no node computes such a tensor.

        Examples:
            >>> import torch, htp_export
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
            >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
            >>> tagged.owners_of("node_relu"), tagged.owners_of("linear")
            (('1',), ('0',))
        """
        if isinstance(node, str):
            named = self.names.computing(node)
            return tuple(dict.fromkeys(path for each in named for path in self.owners_of(each)))
        if self.source == "htp":
            return tags.owners_of(node.metadata_props)
        if self.source == "torch":
            return tuple(path for path, _ in scopes_of(node)[-1:])
        return ()

    @cached_property
    def calls(self) -> CallTree:
        """For each call of a module, the call of another one in which it ran."""
        known = None
        if self.source == "htp":
            known = self._read(
                tags.CALLERS, lambda written: CallTree.from_json(written, self.hierarchy)
            )
        return known or CallTree(self.hierarchy)

    def _read(self, key: str, parse: Callable[[str], _T]) -> _T | None:
        written = self.model.metadata_props.get(key)
        try:
            return None if written is None else parse(written)
        except ValueError as error:
            raise InputError(f"model {self.model.graph.name!r}: {error}") from error

    def work_of(self, node: ir.Node) -> NodeCalls:
        """The owners of a node, their calls, and the regions that contain it."""
        encoded = tags.encoded_calls(node.metadata_props) if self.source == "htp" else ""
        return self.calls.work(self.owners_of(node), encoded)

    def select(self, patterns: str | Sequence[str]) -> list[str]:
        """The module paths that a selector names; see ``format.selectors`` for the language.

        Raises:
            SelectorError: If the selector cannot be read, or a part of it matches no module.
            UntaggedModelError: If the model has no tags.
        """
        self.require_tags()
        return selectors.select(patterns, self.classes)

    @cached_property
    def classes(self) -> selectors.ModuleClasses:
        """Module path → fully qualified class, in order: the argument of functions of ``selectors``."""
        return selectors.ModuleClasses(self.hierarchy.classes, self.described)

    def save(
        self,
        path: str | os.PathLike[str],
        external_data: str | None = None,
        *,
        share_weights: bool = False,
    ) -> None:
        """Write the model completely, or leave the target as it was.

        If some weights are external, all of more than 256 bytes are streamed into ``<name>.data``
        beside the file, or ``<name>.<serial>.data`` if that name belongs to another file; or they
        stay in the data file of the model that is replaced, if all are there.

        Args:
            path: The file to write.
            external_data: Name of a file beside it, for all weights of more than 256 bytes.
            share_weights: Keep external weights in the data file of another model in the same
                folder, without a copy. If that file changes, this model cannot be read any more.

        Raises:
            FileError: If it cannot be written; what was there before is untouched.
            ResultError: If the changed graph of a model from a file is not valid; for other models,
                that is logged.
        """
        file = self._file
        with contextlib.nullcontext() if file is None else made_from(lambda: [read_model(file)]):
            write_model(self.model, path, external_data, share_weights=share_weights)

    @cached_property
    def index(self) -> GraphIndex:
        """The facts that one pass over the model finds for all its regions."""
        return GraphIndex(self.model, self.work_of, self.taps)

    def require_tags(self) -> None:
        """Raise an `UntaggedModelError` with a remedy for a model without tags."""
        if self.source == "none":
            self._refuse("it has no module tags")

    def require_exact_tags(self) -> None:
        """Raise an `UntaggedModelError` for a model without htp_export's tags, also with torch's scopes."""
        self.require_tags()
        if self.source == "torch":
            self._refuse("the scopes that torch wrote are not exact enough for this")

    def _refuse(self, problem: str) -> NoReturn:
        advice = "export it with htp_export.export(...) in place of torch.onnx.export(...), or tag it with"
        message = f"{problem}; {advice} htp_export.carry(model, file)"
        if tags.MODULES in self.model.metadata_props:
            message = (
                "its nodes have lost their module tags; "
                "htp_export.carry(before, after) brings them back"
            )
        raise UntaggedModelError(f"{self._file or f'model {self.model.graph.name!r}'}: {message}")


ModelSource: TypeAlias = (
    str | os.PathLike[str] | onnx.ModelProto | ir.Model | TaggedModel | _HasModel
)
"""The types that ``load`` accepts."""


@checks_arguments
def load(model: ModelSource) -> TaggedModel:
    """Open a model with its module tree.

    A model without tags is read with torch's own module scopes, if it has them: node metadata from
    the dynamo exporter, node names from the TorchScript exporter. They are not exact: a warning is
    logged, once for a model, and functions that need exact tags raise an `UntaggedModelError`.

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, an ``ONNXProgram``, a ``ModelProto``, an ``ir.Model``, or any object with an
            ``ir.Model`` as ``model``. Models in memory are not copied. External data and large
            weights of a file are read when they are used. Until then, the ONNX file may be replaced
            but not overwritten in place.

    Returns:
        The model, indexed by module path.

    Raises:
        FileError: The file is missing, is not valid ONNX, has invalid tags, or names external data
            outside of its folder; or its data file was replaced without it, for example by a
            process that was killed.
        InputError: A model in memory has invalid tags, or would be too large without functions.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> tagged.paths, [node.op_type for node in tagged["1"].nodes]
        (['', '0', '1'], ['Relu'])
    """
    if isinstance(model, TaggedModel):
        return model
    graph_model = model_of(model)
    try:
        tagged = _tagged(graph_model, name_of(model, f"model {graph_model.graph.name!r}"))
        tagged.hierarchy.check_calls(lambda: len(list(all_nodes(graph_model))))
    except ValueError as error:
        if isinstance(model, str | os.PathLike):
            raise FileError(os.fspath(model), str(error)) from error
        raise InputError(f"model {graph_model.graph.name!r}: {error}") from error
    tagged._file = Path(model) if isinstance(model, str | os.PathLike) else None
    return tagged


def for_change(tagged: TaggedModel, source: ModelSource) -> TaggedModel:
    """Return a model that was read from a source; a copy if it is the user's own model in memory."""
    return tagged.clone() if is_of_user(tagged.model, source) else tagged


def is_of_user(model: ir.Model, source: ModelSource) -> bool:
    """Whether a model is the one in memory that a source is or holds, so that it must not change.

    Examples:
        >>> model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
        >>> is_of_user(model, model), is_of_user(model, load(model)), is_of_user(model, "a.onnx")
        (True, True, False)
    """
    held = source if isinstance(source, ir.Model) else getattr(source, "model", None)
    return held is model


def name_of(source: ModelSource, otherwise: str) -> str:
    """The name of a model in messages: its file, or ``otherwise`` for a model in memory.

    Examples:
        >>> name_of("a.onnx", "the ONNX model"), name_of(onnx.ModelProto(), "the ONNX model")
        ('a.onnx', 'the ONNX model')
    """
    return os.fspath(source) if isinstance(source, str | os.PathLike) else otherwise


def model_of(source: ModelSource) -> ir.Model:
    """Return the model without its modules; a model in memory is not copied.

    Raises:
        FileError: If the file is missing, is not ONNX, or names external data outside its folder.
        InputError: If the model would be too large without functions, see `check_flat_size`.
    """
    if isinstance(source, str | os.PathLike):
        return read_model(source)
    if isinstance(source, onnx.ModelProto):
        return model_from_proto(source)
    model = source if isinstance(source, ir.Model) else getattr(source, "model", None)
    if not isinstance(model, ir.Model):
        raise TypeError(
            f"no ONNX model: {type(source).__name__}; give a file, a ModelProto or an ir.Model"
        )
    check_flat_size(model)
    return model


def _tagged(model: ir.Model, name: str) -> TaggedModel:
    """Read the modules and owners of a model; ``name`` is for messages."""
    text = model.metadata_props.get(tags.MODULES)
    newer = _newer_version(model)
    try:
        known = None if text is None else Hierarchy.from_json(text)
    except ValueError as error:
        raise ValueError(
            f"{error}; {newer}, so that it needs a newer htp_export" if newer else str(error)
        ) from error
    if newer:
        _log.warning("%s: %s; what that adds is passed over", name, newer)
    hierarchy = known or Hierarchy([ModuleInfo("", "", 1)])
    calls = _calls_of_owners(model)
    tags.check_paths({*hierarchy, *calls})
    # A model without nodes has not lost its tags.
    if calls or (known and next(all_nodes(model), None) is None):
        above = dict.fromkeys(tags.all_above(calls), 1)  # a module ran if one inside it ran
        return TaggedModel(model, hierarchy.including({**above, **calls}), "htp")
    classes = dict(scope for node in all_nodes(model) for scope in scopes_of(node))
    tags.check_paths(classes)
    if not classes:
        return TaggedModel(model, hierarchy, "none")
    if text is None:
        hierarchy = Hierarchy([ModuleInfo("", classes.get("", ""), 1)])
    if not model.meta.get(_WARNED):
        model.meta[_WARNED] = True
        _log.warning(
            "model %r has no htp_export tags; its modules are read from torch's own scopes, which are not exact. "
            "Export it with htp_export.export(...) for exact ones",
            model.graph.name,
        )
    return TaggedModel(model, hierarchy.including(dict.fromkeys(classes, 1), classes), "torch")


def _calls_of_owners(model: ir.Model) -> dict[str, int]:
    """Owner of a node → its number of calls, at least: the number on a node is that of the last owner."""
    calls: dict[str, int] = {}
    for node in all_nodes(model):
        owners, call = tags.owners_of(node.metadata_props), node.metadata_props.get(tags.CALL, "0")
        for owner in owners:
            number = number_in(call) if owner == owners[-1] else None
            calls[owner] = max(calls.get(owner, 1), (number or 0) + 1)
    return calls


def _newer_version(model: ir.Model) -> str:
    """A message if the model has a later version of the file format than this package; or ``""``."""
    version = model.metadata_props.get(tags.FORMAT, tags.VERSION)
    number = number_in(version)
    if number is not None and number <= int(tags.VERSION):
        return ""
    return f"its tags are of version {version} of the file format, and this htp_export knows version {tags.VERSION}"
