"""Facts about each module that the rows of all tables contain: nodes, parameters, weights.

- **Nodes** of a module have an owner at or below it; nodes without an owner are the root's.
- **Weights** are stored tensors that nodes read: floating point, complex, or quantized; see `is_weight`.
- **Parameters** are elements of PyTorch's parameters, if the file lists them (``htp.parameters``), in the size of the
  file's own tensor of that name; otherwise, they are the elements of the weights.

Each tensor counts once in a module, and once in every module above it. If several modules read it,
it counts in full in each. It is **shared** in a module if nodes outside that module read it, too.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.hierarchy import ModuleInfo
from htp_export.format.recipes import element_bits, recipe_from_text
from htp_export.format.selectors import select_below
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.known import constant_tensor
from htp_export.shapes.operator_kinds import is_standard

_QUANTIZED_BITS = 8  # wider integers are sizes and indices
_WITH_QUANTIZED_BIAS = frozenset(("QLinearConv", "DequantizeLinear", "QGemm"))
_COMPLEX = (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)


@dataclass(frozen=True, kw_only=True)
class ModuleFacts(ModuleInfo):
    """One module of the tree and its facts; ``""`` is the whole model.

    Attributes:
        nodes: Number of nodes of the module and its descendants.
        self_nodes: Number of nodes that it owns itself.
        parameters: Elements of the parameters at or below the module.
        self_parameters: Elements of its own parameters that no module before it has.
        trainable: Elements of the parameters at or below the module that train: that had
            ``requires_grad`` at the export; None if the file does not record that.
        weight_bytes: Size of the weights that its nodes read.
        weight_bits: Bits of these weights: those of their format in fixed point or microscaling,
            which can be narrower than the type in the file.
        self_weight_bytes: Size of the weights that its own nodes are the first to read.
        weight_bytes_by_dtype: Element type, as numpy names it → bytes.
        shared_bytes_by_dtype: The same for weights that nodes outside the module read, too.
    """

    nodes: int = 0
    self_nodes: int = 0
    parameters: int = 0
    self_parameters: int = 0
    trainable: int | None = None
    weight_bytes: int = 0
    weight_bits: int = 0
    self_weight_bytes: int = 0
    weight_bytes_by_dtype: Mapping[str, int] = field(default_factory=dict)
    shared_bytes_by_dtype: Mapping[str, int] = field(default_factory=dict)

    @property
    def shared_weight_bytes(self) -> int:
        """Size of the weights that nodes outside the module read, too."""
        return sum(self.shared_bytes_by_dtype.values())


@dataclass(frozen=True)
class ModuleContents:
    """The contents of one module: its nodes, its own nodes, and the weights that these read."""

    facts: ModuleFacts
    nodes: Sequence[ir.Node]
    own_nodes: Sequence[ir.Node]
    own_weights: Sequence[ir.Value]


@dataclass(frozen=True)
class Contents:
    """The contents of the modules of a model.

    Attributes:
        modules: Module path → its contents.
        shared: Name of each parameter that belongs to several modules → these modules.
        from_pytorch: Whether the parameters are PyTorch's; otherwise they are the weights in the
            file.
    """

    modules: Mapping[str, ModuleContents]
    shared: Mapping[str, tuple[str, ...]]
    from_pytorch: bool


class _Held(NamedTuple):
    """A parameter or weight, its size, and the modules that have or read it, the first one first."""

    name: str
    amount: int
    holders: tuple[str, ...]
    kind: str = ""


def contents_of(tagged: TaggedModel) -> Contents:
    """The contents of each module of a model; without tags, all are the root's. Values are not read.

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
    bits: list[_Held] = []
    for value, paths in _readers(tagged).items():
        tensor = stored_tensor(value)
        assert tensor is not None  # it is a weight
        stored.append(_Held(str(value.name), elements_of(value), tuple(paths)))
        sizes.append(_Held(str(value.name), tensor.nbytes, tuple(paths), dtype_name(tensor.dtype)))
        bits.append(_Held(str(value.name), bits_of(value), tuple(paths)))
        for path in paths:
            read[path].append(value)
    declared = _declared(tagged)
    held = stored if declared is None else declared
    trainable = _trainable(tagged, declared)
    parameters, weights, bits_by_module = _summed(held), _summed(sizes), _summed(bits).total
    modules = {}
    for path, info in tagged.hierarchy.items():
        nodes = index.below.get(path, ()) if path else index.nodes
        facts = ModuleFacts(
            **vars(info),
            nodes=len(nodes),
            self_nodes=len(own_nodes[path]),
            parameters=parameters.total[path][""],
            self_parameters=parameters.first[path],
            trainable=None if trainable is None else trainable[path][""],
            weight_bytes=sum(weights.total[path].values()),
            weight_bits=bits_by_module[path][""],
            self_weight_bytes=weights.first[path],
            weight_bytes_by_dtype=dict(weights.total[path]),
            shared_bytes_by_dtype=dict(weights.shared[path]),
        )
        modules[path] = ModuleContents(facts, nodes, own_nodes[path], read[path])
    shared = {each.name: each.holders for each in held if len(each.holders) > 1}
    return Contents(modules, shared, declared is not None)


def dtype_name(dtype: ir.DataType) -> str:
    """The numpy name of an element type: ``float32``, ``string``."""
    return "string" if dtype == ir.DataType.STRING else str(dtype.numpy().name)


def type_and_shape(value: ir.Value) -> str:
    """The type and shape of a tensor: ``FLOAT[batch,16]``."""
    dtype = value.dtype.name if value.dtype else "unknown type"
    return f"{dtype}{'' if value.shape is None else value.shape}"


class _Sums(NamedTuple):
    """Amounts by module path.

    ``first``: of tensors that the module is the first to have. ``total``, by kind: of tensors at or
    below it. ``shared``: of those that others have, too.
    """

    first: Counter[str]
    total: defaultdict[str, Counter[str]]
    shared: defaultdict[str, Counter[str]]


def _summed(listed: Iterable[_Held]) -> _Sums:
    """Sum amounts by module: a tensor counts once in a module, and once in every module above it."""
    sums = _Sums(Counter(), defaultdict(Counter), defaultdict(Counter))
    several: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in listed:
        sums.first[each.holders[0]] += each.amount
        if len(each.holders) == 1:
            sums.total[each.holders[0]][each.kind] += each.amount
            continue
        # module → how many of the holders are at or below it
        inside = Counter(up for holder in each.holders for up in tags.ancestors(holder))
        for path, count in inside.items():
            several[path][each.kind] += each.amount
            if count < len(each.holders):
                sums.shared[path][each.kind] += each.amount
    # Children before parents: the path of a parent is shorter.
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


def _trainable(
    tagged: TaggedModel, held: list[_Held] | None
) -> defaultdict[str, Counter[str]] | None:
    """Elements of the parameters that train, by module; None if that is unknown of one."""
    if held is None or tagged.declared is None:
        return None
    training: list[_Held] = []
    for parameter in held:
        trains = tagged.declared[parameter.name].trains
        if trains is None:
            return None
        if trains:
            training.append(parameter)
    return _summed(training).total


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
    """Whether a stored tensor that a node consumes is a weight, and no scalar, index or size.

    Weights are floating point, complex or quantized: integers of at most eight bits, and wider
    biases of quantized operators.
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
    """The tensor of an initializer or a ``Constant`` node; None for any other value."""
    return value.const_value if value.producer() is None else constant_tensor(value)


def bits_of(value: ir.Value) -> int:
    """Bits of a stored tensor, by the format in its recipe, or by its type."""
    tensor = stored_tensor(value)
    if tensor is None:
        return 0
    bits = None
    with contextlib.suppress(ValueError):  # a faulty recipe: its readers report it
        bits = element_bits(recipe_from_text(tensor.metadata_props.get(tags.RECIPE, "")))
    return tensor.nbytes * 8 if bits is None else elements_of(value) * bits


def elements_of(value: ir.Value) -> int:
    """The number of elements of an initializer or constant; 0 for any other value."""
    tensor = stored_tensor(value)
    return 0 if tensor is None else math.prod(tensor.shape.numpy())


def tied_parameters(tagged: TaggedModel) -> dict[str, dict[str, str]]:
    """Module path → its parameters that a module before it also has: full name → full name there.

    Empty if the file does not list PyTorch's parameters.
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
        depth: The last level to show; the root is level 0. None for all. Containers that never run
            (``nn.ModuleList``) are no level: they have that of their children.
        select: Show only the modules that this selector names, and their ancestors. With a depth,
            so many levels below the outermost modules that it names.

    Raises:
        SelectorError: If the selector cannot be read or matches nothing.
        UntaggedModelError: If the model has no tags, and some modules are selected.
        InputError: If ``depth`` is negative.
    """
    if depth is not None and depth < 0:
        raise InputError(f"depth counts levels from 0, not {depth}")
    if select is None:
        levels = _levels(tagged, {""})
        return [path for path, level in levels.items() if depth is None or level <= depth]
    shown = set(tagged.select(select))
    if depth is not None:
        levels = _levels(tagged, shown)
        candidates = select_below(select, tagged.classes)
        shown = {path for path in candidates if levels.get(path, 0) <= depth}
    shown |= tags.all_above(shown)
    return [path for path in tagged.paths if path in shown]


def _levels(tagged: TaggedModel, tops: set[str]) -> Mapping[str, int]:
    """Module path → level below the outermost of some modules; others are left out."""
    levels: dict[str, int] = {}
    for path in tagged.paths:  # parents before children
        parent = tagged.hierarchy.parent(path)
        if parent in levels:
            levels[path] = levels[parent] + (parent in tagged.hierarchy.called or not parent)
        elif path in tops:
            levels[path] = 0
    return levels
