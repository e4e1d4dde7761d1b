"""What stands in each module: nodes, parameters, weights. The rows of every table are these facts, and what it adds.

- **Nodes** of a module are those with an owner at or below it; its **own nodes** those that it owns itself. Nodes of no
  module are the root's.
- **Weights** are the initializers and constants that nodes read, of floating point, complex, or quantized (integers of
  eight bits and fewer, and the 32-bit biases of quantized operators); no scalars, constants of one element, indices or
  sizes.
- **Parameters** of a module are the elements of those that PyTorch had, as the file says (``htp.parameters``), also
  where an exporter merged or folded them. Where the file's own tensor of that name has another size, as after pruning,
  that counts. If the file does not say what PyTorch had, they are the elements of the weights.

Each tensor counts once in a module, and once in every module above it. A weight that several modules read, as that of
merged projections, counts in full in each of them. It is **shared** in a module if nodes outside that module read it,
too; a module that has all its readers has it to itself.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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

_QUANTIZED_BITS = 8
_WITH_QUANTIZED_BIAS = frozenset(("QLinearConv", "DequantizeLinear", "QGemm"))
_COMPLEX = (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)


@dataclass(frozen=True, kw_only=True)
class ModuleFacts(ModuleInfo):
    """One module of the tree, and how much stands in it; ``""`` is the whole model.

    Attributes:
        nodes: How many nodes the module and those below it have.
        self_nodes: Of those, the nodes that it owns itself.
        parameters: Elements of the parameters at or below the module.
        self_parameters: Of those, elements of the parameters that it holds itself, and no module before it does.
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
        from_pytorch: Whether the parameters are those that PyTorch had; else they are the weights in the file.
    """

    modules: Mapping[str, ModuleContents]
    shared: Mapping[str, tuple[str, ...]]
    from_pytorch: bool


class _TensorHolders(NamedTuple):
    """A parameter or weight, and the modules that hold or read it, the first one first."""

    elements: int
    holders: Sequence[str]

    @property
    def is_shared(self) -> bool:
        return len(self.holders) > 1


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
    stored = {value: _TensorHolders(elements_of(value), tuple(paths)) for value, paths in _readers(tagged).items()}
    weights = _weight_sizes(stored)
    declared = _declared(tagged)
    listed = list(stored.items()) if declared is None else list(declared.items())
    parameters, own_parameters = _summed([tensor for _, tensor in listed])
    modules = {}
    for path, info in tagged.hierarchy.items():
        nodes = index.below.get(path, ()) if path else index.nodes
        facts = ModuleFacts(
            **vars(info),
            nodes=len(nodes),
            self_nodes=len(own_nodes[path]),
            parameters=parameters[path],
            self_parameters=own_parameters[path],
            weight_bytes=sum(weights.by_dtype[path].values()),
            self_weight_bytes=weights.first_read[path],
            weight_bytes_by_dtype=weights.by_dtype[path],
            shared_bytes_by_dtype=dict(weights.shared[path]),
        )
        modules[path] = ModuleContents(facts, nodes, own_nodes[path], weights.read[path])
    shared = {str(getattr(key, "name", key)): tuple(tensor.holders) for key, tensor in listed if tensor.is_shared}
    return Contents(modules, shared, declared is not None)


@dataclass(frozen=True)
class _WeightSizes:
    """Module path → sizes in bytes of the weights that it reads, as `ModuleFacts` has them, and what its nodes read."""

    by_dtype: defaultdict[str, dict[str, int]]
    shared: defaultdict[str, Counter[str]]
    first_read: Counter[str]
    read: defaultdict[str, list[ir.Value]]


def _weight_sizes(stored: Mapping[ir.Value, _TensorHolders]) -> _WeightSizes:
    sizes = _WeightSizes(defaultdict(dict), defaultdict(Counter), Counter(), defaultdict(list))
    alike: defaultdict[str, list[_TensorHolders]] = defaultdict(list)
    for value, tensor in stored.items():
        held = stored_tensor(value)
        assert held is not None  # it is a weight
        size, dtype = held.nbytes, dtype_name(held.dtype)
        sizes.first_read[tensor.holders[0]] += size
        for path in tensor.holders:
            sizes.read[path].append(value)
        alike[dtype].append(_TensorHolders(size, tensor.holders))
        inside = Counter(up for path in tensor.holders for up in tags.ancestors(path)) if tensor.is_shared else {}
        for path, readers_inside in inside.items():
            if readers_inside < len(tensor.holders):
                sizes.shared[path][dtype] += size
    for dtype, weights in alike.items():
        for path, size in _summed(weights)[0].items():
            sizes.by_dtype[path][dtype] = size
    return sizes


def dtype_name(dtype: ir.DataType) -> str:
    """The element type as numpy names it: ``float32``, ``string``."""
    return "string" if dtype == ir.DataType.STRING else str(dtype.numpy().name)


def _summed(listed: Sequence[_TensorHolders]) -> tuple[Counter[str], Counter[str]]:
    """Module path → elements at or below it; and those that it is the first to hold."""
    total: Counter[str] = Counter()
    first: Counter[str] = Counter()
    shared: Counter[str] = Counter()
    for tensor in listed:
        first[tensor.holders[0]] += tensor.elements
        if not tensor.is_shared:
            total[tensor.holders[0]] += tensor.elements
            continue
        for path in dict.fromkeys(up for holder in tensor.holders for up in tags.ancestors(holder)):
            shared[path] += tensor.elements
    for path in sorted({*total, *tags.all_above(total)}, key=len, reverse=True):  # the path of a parent is shorter
        if path:
            total[tags.parent_path(path) or ""] += total[path]
    for path, elements in shared.items():
        total[path] += elements
    return total, first


def _declared(tagged: TaggedModel) -> dict[str, _TensorHolders] | None:
    """Full name of each parameter of the PyTorch model → the modules that hold it; None where it is not known."""
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
    return {name: _TensorHolders(math.prod(shape), tuple(holders[name])) for name, shape in shapes.items()}


def _readers(tagged: TaggedModel) -> dict[ir.Value, dict[str, None]]:
    """Each weight of the file → the modules whose nodes read it, in order."""
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
    """The initializers and outputs of ``Constant`` nodes that a node reads."""
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
    """Whether a stored tensor that a node reads is a weight, as the head of this module has it."""
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


def visible(tagged: TaggedModel, depth: int | None = None, select: str | Sequence[str] | None = None) -> list[str]:
    """The modules that a table shows.

    Args:
        tagged: The model.
        depth: Leave out modules more than so many levels below the root, whose depth is 0; all where it is None.
            Containers that never run (``nn.ModuleList``) are no level: they are as deep as what they hold.
        select: Only the modules that this selector names, and those above them, which say where they are. With a depth,
            those so many levels below the outermost modules that it names.

    Raises:
        SelectorError: If the selector cannot be read or matches nothing.
        UntaggedModelError: If the model has no tags, and some modules are selected.
        InputError: If ``depth`` is negative.
    """
    if depth is not None and depth < 0:
        raise InputError(f"depth counts levels from 0, not {depth}")
    if select is None:
        return [path for path, level in _levels(tagged, {""}).items() if depth is None or level <= depth]
    shown = set(tagged.select(select))
    if depth is not None:
        levels = _levels(tagged, shown)
        shown = {path for path in select_below(select, tagged.hierarchy.classes) if levels.get(path, 0) <= depth}
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
