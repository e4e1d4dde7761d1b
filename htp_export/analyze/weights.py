"""Parameters and weights of each module: the first as PyTorch has them, the second as the file does."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export import tags
from htp_export.analyze.execution import Run, Step, Tensor, walk
from htp_export.tagged import TaggedModel

__all__ = ["ModuleWeights", "Weights", "declared_parameters", "weights_of"]

# Integers of eight bits and fewer are quantized weights; wider ones are indices and sizes, unless they are the biases
# that these operators take.
_QUANTIZED_BITS = 8
_WITH_QUANTIZED_BIAS = frozenset(("QLinearConv", "DequantizeLinear", "QGemm"))


@dataclass(frozen=True)
class ModuleWeights:
    """What one module holds.

    Attributes:
        parameters: Elements of the parameters at or below the module, each parameter once.
        self_parameters: Of those, elements of the parameters that it holds itself, and no module before it does.
        bytes: Size of the weights in the file that its region reads, each once.
        self_bytes: Of those, the weights that its own nodes are the first to read.
        by_dtype: Element type → bytes.
    """

    parameters: int = 0
    self_parameters: int = 0
    bytes: int = 0
    self_bytes: int = 0
    by_dtype: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Weights:
    """What the modules hold.

    Attributes:
        modules: Module path → what it holds; modules that hold nothing are absent.
        shared: Name of a parameter, or weight, that belongs to several modules → these modules.
        known: Whether the parameters are those that PyTorch had; else they are the weights in the file.
    """

    modules: Mapping[str, ModuleWeights]
    shared: Mapping[str, tuple[str, ...]]
    known: bool


@dataclass(frozen=True)
class _Held:
    """A parameter or weight, and whose it is."""

    elements: int
    holders: Sequence[str]
    bytes: int = 0
    dtype: str = ""


def weights_of(tagged: TaggedModel, run: Run) -> Weights:
    """What each module of a model holds.

    Parameters are what the file says that PyTorch had (``htp.parameters``), also where an exporter has merged or folded
    them. Where the file's own tensor of that name has another size, as after pruning, that counts. A file that says
    nothing has as parameters the weights that are read. Weights are initializers and constants of floating point or
    quantized, but for scalars, and constants of one element; their values are not looked at.

    Args:
        tagged: The model.
        run: One run of it.
    """
    stored = _stored(run)
    declared = _declared(tagged)
    listed = stored if declared is None else declared
    parameters, own_parameters = _elements(listed)
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    own_sizes: Counter[str] = Counter()
    for held in stored.values():
        own_sizes[held.holders[0]] += held.bytes
        for path in _above(held.holders):
            sizes[path][held.dtype] += held.bytes
    modules = {
        path: ModuleWeights(
            parameters[path], own_parameters[path], sizes[path].total(), own_sizes[path], dict(sizes[path])
        )
        for path in {**parameters, **sizes}
    }
    shared = {name: tuple(held.holders) for name, held in listed.items() if len(held.holders) > 1}
    return Weights(modules, shared, declared is not None)


def declared_parameters(tagged: TaggedModel) -> dict[str, int] | None:
    """Module path → elements of its parameters in PyTorch, each once; None where the file does not say."""
    declared = _declared(tagged)
    return None if declared is None else dict(_elements(declared)[0])


def _elements(listed: Mapping[str, _Held]) -> tuple[Counter[str], Counter[str]]:
    total: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for held in listed.values():
        own[held.holders[0]] += held.elements
        for path in _above(held.holders):
            total[path] += held.elements
    return total, own


def _above(paths: Sequence[str]) -> dict[str, None]:
    """The paths, and all above them, each once."""
    return dict.fromkeys(up for path in paths for up in tags.ancestors(path))


def _declared(tagged: TaggedModel) -> dict[str, _Held] | None:
    """Full name of each parameter of the PyTorch model → the modules that hold it; None where it is not known."""
    if tagged.parameters is None:
        return None
    initializers = tagged.model.graph.initializers
    shapes: dict[str, tuple[int, ...]] = {}
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for path, held in tagged.parameters.items():
        for name, shape in held.shapes.items():
            full = held.tied.get(name) or (f"{path}.{name}" if path else name)
            shapes[full] = shape
            if path not in holders[full]:
                holders[full].append(path)
    found = {}
    for full, shape in shapes.items():
        tensor = initializers[full].const_value if full in initializers else None
        floating = tensor is not None and tensor.dtype.is_floating_point()
        sizes = tensor.shape.numpy() if tensor is not None and floating else shape
        found[full] = _Held(math.prod(sizes), holders[full])
    return found


def _stored(run: Run) -> dict[str, _Held]:
    """Name of each weight in the file → the modules whose nodes read it."""
    readers: defaultdict[Tensor, dict[str, None]] = defaultdict(dict)
    for step, _ in walk(run.steps):
        for tensor in step.inputs:
            if tensor is not None and _is_weight(tensor, step):
                readers[tensor].update(dict.fromkeys(step.owners or ("",)))
    found: dict[str, _Held] = {}
    for tensor, owners in readers.items():
        name = tensor.name if tensor.name not in found else f"{tensor.name}@{len(found)}"  # of another subgraph
        dtype = tensor.dtype.name.lower() if tensor.dtype is not None else ""
        found[name] = _Held(tensor.elements, tuple(owners), tensor.bytes, dtype)
    return found


def _is_weight(tensor: Tensor, reader: Step) -> bool:
    if not tensor.shape or tensor.dtype is None:
        return False
    if tensor.origin != "weight" and not (tensor.origin == "constant" and tensor.elements > 1):
        return False
    if tensor.dtype.is_floating_point() or tensor.dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
        return True
    if tensor.dtype == ir.DataType.INT32:
        return reader.op[1] in _WITH_QUANTIZED_BIAS
    return tensor.dtype.is_integer() and tensor.dtype.bitwidth <= _QUANTIZED_BITS
