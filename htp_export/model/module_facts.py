"""What stands in each module: nodes, parameters, weights. The rows of every table are these facts, and what it adds.

- **Nodes** of a module are those with an owner at or below it; nodes of no module are the root's.
- **Weights** are what nodes read that is stored and floating point, complex, or quantized; see `is_weight`.
- **Parameters** are the elements of those that PyTorch had, as the file says (``htp.parameters``), in the size of the
  file's own tensor of that name; without ``htp.parameters``, the elements of the weights.

Each tensor counts once in a module, and once in every module above it; in full in each of several
that read it. It is **shared** in a module if nodes outside that module read it, too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.hierarchy import ModuleInfo
from htp_export.format.selectors import select_below
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.known import constant_tensor
from htp_export.shapes.operator_kinds import is_standard

_QUANTIZED_BITS = 8  # integers that are wider are no weights, but sizes and indices
_WITH_QUANTIZED_BIAS = frozenset(("QLinearConv", "DequantizeLinear", "QGemm"))
_COMPLEX = (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)


@dataclass(frozen=True, kw_only=True)
class ModuleFacts(ModuleInfo):
    """One module of the tree, and how much stands in it; ``""`` is the whole model.

    Attributes:
        nodes: How many nodes the module and those below it have.
        self_nodes: Of those, the nodes that it owns itself.
        parameters: Elements of the parameters at or below the module.
        self_parameters: Of those, elements of the parameters that it holds itself, and no module
            before it does.
        weight_bytes: Size of the weights that its nodes read.
        self_weight_bytes: Of those, the weights that its own nodes are the first to read.
        weight_bytes_by_dtype: Element type, as numpy names it → bytes.
        shared_bytes_by_dtype: Of those, the weights that nodes outside the module read too.
    """

    nodes: int = 0
    self_nodes: int = 0
    parameters: int = 0
    self_parameters: int = 0
    weight_bytes: int = 0
    self_weight_bytes: int = 0
    weight_bytes_by_dtype: Mapping[str, int] = field(default_factory=dict)
    shared_bytes_by_dtype: Mapping[str, int] = field(default_factory=dict)

    @property
    def shared_weight_bytes(self) -> int:
        """Of ``weight_bytes``, those of weights that nodes outside the module read too."""
        return sum(self.shared_bytes_by_dtype.values())


@dataclass(frozen=True)
class ModuleContents:
    """What stands in one module: its nodes, those that it owns itself, and the weights that the latter read."""

    facts: ModuleFacts
    nodes: Sequence[ir.Node]
    own_nodes: Sequence[ir.Node]
    own_weights: Sequence[ir.Value]


@dataclass(frozen=True)
class Contents:
    """What stands in the modules of a model.

    Attributes:
        modules: Module path → what stands in it.
        shared: Name of each parameter that belongs to several modules → these modules.
        from_pytorch: Whether the parameters are those that PyTorch had; else they are the weights
            in the file.
    """

    modules: Mapping[str, ModuleContents]
    shared: Mapping[str, tuple[str, ...]]
    from_pytorch: bool


class _Held(NamedTuple):
    """A parameter or weight, how large it is, and the modules that hold or read it, the first one first."""

    name: str
    amount: int
    holders: tuple[str, ...]
    kind: str = ""


def contents_of(tagged: TaggedModel) -> Contents:
    """What stands in each module of a model; without tags, everything is the root's. No values are read.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> tagged = htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> contents = contents_of(tagged).modules
        >>> [(path, m.facts.nodes, m.facts.parameters, m.facts.weight_bytes) for path, m in contents.items()]
        [('', 2, 15, 60), ('0', 1, 15, 60), ('1', 1, 0, 0)]
    """
    index = tagged.index
    own_nodes: defaultdict[str, list[ir.Node]] = defaultdict(list)
    for node, owners in index.owners.items():
        for owner in owners or ("",):
            own_nodes[owner].append(node)
    read: defaultdict[str, list[ir.Value]] = defaultdict(list)
    stored: list[_Held] = []
    sizes: list[_Held] = []
    for value, paths in _readers(tagged).items():
        tensor = stored_tensor(value)
        assert tensor is not None  # it is a weight
        stored.append(_Held(str(value.name), elements_of(value), tuple(paths)))
        sizes.append(_Held(str(value.name), tensor.nbytes, tuple(paths), dtype_name(tensor.dtype)))
        for path in paths:
            read[path].append(value)
    declared = _declared(tagged)
    held = stored if declared is None else declared
    parameters, weights = _summed(held), _summed(sizes)
    modules = {}
    for path, info in tagged.hierarchy.items():
        nodes = index.below.get(path, ()) if path else index.nodes
        facts = ModuleFacts(
            **vars(info),
            nodes=len(nodes),
            self_nodes=len(own_nodes[path]),
            parameters=parameters.total[path][""],
            self_parameters=parameters.first[path],
            weight_bytes=sum(weights.total[path].values()),
            self_weight_bytes=weights.first[path],
            weight_bytes_by_dtype=dict(weights.total[path]),
            shared_bytes_by_dtype=dict(weights.shared[path]),
        )
        modules[path] = ModuleContents(facts, nodes, own_nodes[path], read[path])
    shared = {each.name: each.holders for each in held if len(each.holders) > 1}
    return Contents(modules, shared, declared is not None)


def dtype_name(dtype: ir.DataType) -> str:
    """The element type as numpy names it: ``float32``, ``string``."""
    return "string" if dtype == ir.DataType.STRING else str(dtype.numpy().name)


def type_and_shape(value: ir.Value) -> str:
    """The type and shape of a tensor: ``FLOAT[batch,16]``."""
    return f"{value.dtype.name if value.dtype else 'unknown type'}{value.shape if value.shape is not None else ''}"


class _Sums(NamedTuple):
    """Module path → what it is first to hold; kind → what is at or below it; and what of that others hold, too."""

    first: Counter[str]
    total: defaultdict[str, Counter[str]]
    shared: defaultdict[str, Counter[str]]


def _summed(listed: Iterable[_Held]) -> _Sums:
    """Each tensor counts once in a module, and once in every module above it."""
    sums = _Sums(Counter(), defaultdict(Counter), defaultdict(Counter))
    several: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in listed:
        sums.first[each.holders[0]] += each.amount
        if len(each.holders) == 1:
            sums.total[each.holders[0]][each.kind] += each.amount
            continue
        for path, inside in Counter(
            up for holder in each.holders for up in tags.ancestors(holder)
        ).items():
            several[path][each.kind] += each.amount
            if inside < len(each.holders):
                sums.shared[path][each.kind] += each.amount
    # a parent's is shorter
    for path in sorted({*sums.total, *tags.all_above(sums.total)}, key=len, reverse=True):
        if path:
            sums.total[tags.parent_path(path) or ""].update(sums.total[path])
    for path, amounts in several.items():
        sums.total[path].update(amounts)
    return sums


def _declared(tagged: TaggedModel) -> list[_Held] | None:
    if tagged.declared is None:
        return None
    shapes = {parameter.first: parameter.shape for parameter in tagged.declared.values()}
    holders: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for parameter in tagged.declared.values():
        holders[parameter.first][parameter.module] = None
        value = tagged.model.graph.initializers.get(parameter.first)
        tensor = None if value is None else value.const_value
        if tensor is not None and tensor.dtype.is_floating_point():
            shapes[parameter.first] = tuple(tensor.shape.numpy())
    return [_Held(name, math.prod(shape), tuple(holders[name])) for name, shape in shapes.items()]


def _readers(tagged: TaggedModel) -> dict[ir.Value, dict[str, None]]:
    index, functions = tagged.index, tagged.model.functions
    readers: defaultdict[ir.Value, dict[str, None]] = defaultdict(dict)
    for node, owners in index.owners.items():
        function = functions.get(node.op_identifier()) if functions else None
        if function is not None and len(index.calls[function.graph]) == 1:
            continue  # the nodes of the function read its arguments
        for value in _sources(tagged, node):
            if is_weight(value, node):
                readers[value].update(dict.fromkeys(owners or ("",)))
    return readers


def _sources(tagged: TaggedModel, node: ir.Node) -> Iterator[ir.Value]:
    for value in node.inputs:
        if value is None:
            continue
        producer = value.producer()
        if producer is None:
            source = tagged.index.initializer(value)
            if source is not None:
                yield source
        elif is_standard(producer, "Constant"):
            yield value


def is_weight(value: ir.Value, reader: ir.Node) -> bool:
    """Whether a stored tensor that a node reads is a weight: floating point, complex, or quantized, and no scalar.

    Quantized are integers of eight bits and fewer, and the wider biases of quantized operators; no
    indices or sizes.
    """
    tensor = stored_tensor(value)
    if tensor is None or not len(tensor.shape):
        return False
    if value.producer() is not None and elements_of(value) <= 1:
        return False
    dtype = tensor.dtype
    if dtype.is_floating_point() or dtype in _COMPLEX:
        return True
    if dtype in (ir.DataType.INT32, ir.DataType.INT16, ir.DataType.UINT16):
        return reader.op_type in _WITH_QUANTIZED_BIAS
    return dtype.is_integer() and dtype.bitwidth <= _QUANTIZED_BITS


def stored_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """What an initializer or a ``Constant`` node holds; None for any other value."""
    return value.const_value if value.producer() is None else constant_tensor(value)


def elements_of(value: ir.Value) -> int:
    """The elements of an initializer or constant; 0 for any other value."""
    tensor = stored_tensor(value)
    return 0 if tensor is None else math.prod(tensor.shape.numpy())


def tied_parameters(tagged: TaggedModel) -> dict[str, dict[str, str]]:
    """Module path → its parameters that another module before it holds too: full name → full name there.

    Empty where the file does not say what PyTorch had.
    """
    tied: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for parameter in (tagged.declared or {}).values():
        if parameter.tied:
            tied[parameter.module][parameter.name] = parameter.tied
    return tied


def visible(
    tagged: TaggedModel, depth: int | None = None, select: str | Sequence[str] | None = None
) -> list[str]:
    """The modules that a table shows.

    Args:
        tagged: The model.
        depth: Leave out modules more than so many levels below the root, whose depth is 0; all
            where it is None. Containers that never run (``nn.ModuleList``) are no level: they are
            as deep as what they hold.
        select: Only the modules that this selector names, and those above them, which say where
            they are. With a depth, those so many levels below the outermost modules that it names.

    Raises:
        SelectorError: If the selector cannot be read or matches nothing.
        UntaggedModelError: If the model has no tags, and some modules are selected.
        InputError: If ``depth`` is negative.
    """
    if depth is not None and depth < 0:
        raise InputError(f"depth counts levels from 0, not {depth}")
    if select is None:
        return [
            path for path, level in _levels(tagged, {""}).items() if depth is None or level <= depth
        ]
    shown = set(tagged.select(select))
    if depth is not None:
        levels = _levels(tagged, shown)
        shown = {
            path
            for path in select_below(select, tagged.hierarchy.classes)
            if levels.get(path, 0) <= depth
        }
    shown |= tags.all_above(shown)
    return [path for path in tagged.paths if path in shown]


def _levels(tagged: TaggedModel, tops: set[str]) -> Mapping[str, int]:
    """Module path → levels below the outermost of some modules; modules that are below none are left out."""
    levels: dict[str, int] = {}
    for path in tagged.paths:  # a module stands after those above it
        parent = tagged.hierarchy.parent(path)
        if parent in levels:
            levels[path] = levels[parent] + (parent in tagged.hierarchy.called or not parent)
        elif path in tops:
            levels[path] = 0
    return levels
