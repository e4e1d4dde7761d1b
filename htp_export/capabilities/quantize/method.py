"""Methods: the interface through which an engine gives a precision to nodes.

Methods are discovered, and listed nowhere. The package ``methods`` has a file for each method of
ONNX Runtime, with a class ``METHOD``. Methods of another engine come from a plug-in: an entry point
of the group ``htp_export.quantize``, named after the engine, of a module whose ``METHODS`` maps the
names of its methods to their classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import onnx_ir as ir

from htp_export.capabilities.quantize.ort_quantizers import kinds_of, tool_failures, without_faulty
from htp_export.capabilities.quantize.weight_operators import separate_copies
from htp_export.capabilities.quantize.work import Facts, Left, Work, named
from htp_export.discovery import names_in, plug_in, plug_ins
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.json_text import parse_json
from htp_export.runtime.arrays import Array, nan_in
from htp_export.shapes.operator_kinds import dequantizes, is_standard, without_copies
from htp_export.weights.fixed_point import FIXED_BITS
from htp_export.weights.microscaling import MX_ELEMENTS
from htp_export.weights.products import weight_axes, weight_place

ENGINE = "onnxruntime"
"""The engine whose methods are built in."""

CHECKPOINT = "checkpoint"
"""The precision of weights packed as in a quantized checkpoint, and its method."""

_BITS = {
    "int4": 4, "int8": 8, "uint8": 8, "float8e4m3fn": 8, "int16": 16, "uint16": 16,
    "float16": 16, "bfloat16": 16, "float32": 32,
    **FIXED_BITS, **{name: element.bits for name, element in MX_ELEMENTS.items()},
}  # fmt: skip
_FOLDER = "htp_export.capabilities.quantize.methods"


@dataclass(frozen=True)
class Made:
    """The result of a method for a part.

    Attributes:
        model: The part, quantized.
        left: Name of a node in the part → the reason why it stays as it is.
        partly: Name of a quantized node → the reason why one of its inputs stays as it is.
    """

    model: ir.Model
    left: Mapping[str, str] = field(default_factory=dict)
    partly: Mapping[str, str] = field(default_factory=dict)


class Method:
    """One method of an engine, with the fields of one precision.

    Attributes:
        activations: Types that activations can have.
        weights: Types that weights can have.
        calibrations: Ways to choose ranges.
        algorithms: Ways to round weights.
        accuracy_levels: Levels of arithmetic of products with weights in blocks; empty if there is
            no such attribute.
        formats: Ways to write the quantized operators.
        options: Names of fields of plans that only this method has; `check` checks their values.
        parts: Names of the parts of a module whose types a plan chooses apart; ``float32`` leaves a
            part as it is.
        floats: Types of floats that it quantizes.
        order: Methods with smaller numbers are applied first; a metric that a later method computes
            includes their effect.
        with_producer: Operators that are quantized only together with the producer of their input.
        multiplies_integers: Whether products are computed in 8-bit integers, which saturate on some
            processors.
    """

    activations: ClassVar[tuple[str, ...]]
    weights: ClassVar[tuple[str, ...]]
    calibrations: ClassVar[tuple[str, ...]] = ("minmax",)
    algorithms: ClassVar[tuple[str, ...]] = ("default",)
    accuracy_levels: ClassVar[tuple[int, ...]] = ()
    formats: ClassVar[tuple[str, ...]] = ("default",)
    options: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ()
    floats: ClassVar[tuple[ir.DataType, ...]] = (ir.DataType.FLOAT,)
    order: ClassVar[int] = 0
    with_producer: ClassVar[frozenset[str]] = frozenset()
    multiplies_integers: ClassVar[bool] = False

    def __init__(self, precision: Precision) -> None:
        self.precision = precision

    def check(self) -> None:
        """Check that the fields go together; an `InputError` if they do not."""

    @classmethod
    def fields_in(cls, texts: Iterable[str]) -> dict[str, Any]:
        """Parse the fields after the name of a precision, as in ``int4:block_size=128``."""
        return dict(map(_field, texts))

    @classmethod
    def fields_from(cls, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `Precision`, and options, for the fields in a plan.

        Args:
            name: The name of the precision, for errors.
            given: Field → value.
        """
        return dict(given)

    @property
    def first_opset(self) -> int:
        """The first opset in which it can be written; models of earlier opsets are converted."""
        return 1

    @property
    def calibrated(self) -> bool:
        """Whether it needs data."""
        return False

    @property
    def readings(self) -> int:
        """The number of passes over the data; 2 for several."""
        return int(self.calibrated)

    @property
    def in_subgraphs(self) -> bool:
        """Whether it also quantizes nodes of branches and loops."""
        return False

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether a node can get the precision; determined without reading weights."""
        return False

    def why_not(self, node: ir.Node, facts: Facts) -> str:
        """The reason why a node with a weight cannot get the precision, and the remedy.

        Empty for nodes without a weight, and if ONNX Runtime, or ONNX, has no such operator.
        """
        place = weight_place(node)
        if place >= len(node.inputs) or weight_axes(node, place) is None:
            return ""
        name = self.precision.name
        weight = node.inputs[place]
        for value in (weight, node.inputs[0], node.outputs[0]):
            dtype = None if value is None else facts.dtypes.get(value)
            if dtype is not None and dtype.is_floating_point() and dtype not in self.floats:
                known = " or ".join(kind.numpy().name for kind in self.floats)
                kind = dtype.numpy().name
                return f"its type is {kind}, and {name} is made of {known}: give it {name} before it is cast"
        source = None if weight is None else without_copies(weight)
        if source is None:
            return ""
        if dequantizes(_before_transpose(source).producer()):
            return f"its weight is quantized already: give it {name} in the file as it was before"
        if source.is_graph_input():
            return f"{source.name!r} is an input of the model and no stored weight: make it an initializer"
        return ""

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        """The bytes of a float input in the precision, with its scales; None if it stays."""
        return None

    def rounded(self, weight: Array, reduced: int) -> Array | None:
        """A weight rounded to the precision, as floats; None if only a tool can compute it.

        Args:
            weight: The weight.
            reduced: The axis over which its product sums.
        """
        return None

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        """A key of the way in which a constant input is quantized; None if it stays as it is.

        Inputs with the same weight and key share one copy of it. Inputs with another key get another
        constant: tools have one scale, or one layout, for each name.
        """
        return None

    def groups(self, nodes: Sequence[ir.Node], work: Work) -> Iterable[Sequence[ir.Node]]:
        """The groups of nodes that are quantized together, each as a model of its own."""
        return [nodes]

    def quantize(self, part: Submodel, work: Work) -> Made:
        """Quantize the nodes of a part; the part may be changed in place."""
        raise NotImplementedError

    def apply(self, nodes: Sequence[ir.Node], work: Work) -> Iterator[Left]:
        """Give nodes the precision, in place, and yield the nodes that are left unchanged."""
        self._refuse_nan(nodes)
        for group in self.groups(nodes, work):
            done, faulty = without_faulty(group, lambda subset: self._made(subset, work), kinds_of)
            for node, failure in faulty.items():
                yield work.left(
                    node, f"ONNX Runtime fails on {named(node)}: {failure}", failure=failure
                )
            if done is None:
                continue
            part, made = done
            work.put_back(part, made.model)
            for name, why in made.left.items():
                yield work.left(part.nodes[name], part.names.in_text(why))
            for name, why in made.partly.items():
                yield work.left(part.nodes[name], part.names.in_text(why), partly=True)

    def _made(self, nodes: Sequence[ir.Node], work: Work) -> tuple[Submodel, Made]:
        part = work.cut_out(nodes)
        separate_copies(part.model.graph, self.shared_by)
        with tool_failures(part.names.in_text):
            return part, self.quantize(part, work)

    def _refuse_nan(self, nodes: Sequence[ir.Node]) -> None:
        """Raise an `InputError` for weights with NaN, which integers cannot represent."""
        for node in nodes:
            for value in node.inputs:
                tensor = constant_of(value)
                if value is None or tensor is None:
                    continue
                if nan_in({str(value.name): tensor.numpy()}):
                    path = next(iter(tags.owners_of(node.metadata_props)), "") or "(root)"
                    raise InputError(
                        f"{value.name!r} of module {path!r} has NaN, which {self.precision.name} has not"
                    )


@dataclass(frozen=True)
class Precision:
    """The types in which a module computes, and how its values are converted to them.

    Attributes:
        name: Its name in tables.
        method: ``keep``, ``cast``, ``static``, ``float8``, ``dynamic``, ``weights``, ``cache``,
            ``fixed`` or ``microscaling``.
        activation: Type of activations: ``float32``, ``float16``, ``bfloat16``, ``float8e4m3fn``,
            ``int8``, ``uint8``, ``int16``, ``uint16``, or fixed point such as ``fixed8.4``.
            Dynamic ones are ``uint8``.
        weight: Type of weights, as for activations, and ``int4``; elements of ``microscaling``:
            ``int8``, ``e4m3``, ``e5m2``, ``e3m2``, ``e2m3``, ``e2m1``.
        symmetric: Whether zero is the middle of the range: of activations (``static``), or of
            weights in blocks.
        per_channel: Whether each output channel of a weight has its own scale (``static``,
            ``float8``, ``dynamic``, ``cache``).
        calibration: How ranges are chosen (``static``, ``float8``): ``minmax``, ``entropy`` or
            ``percentile``.
        reduce_range: Whether weights of 8 bits use 7 of them (``static``, ``dynamic``), for
            processors without VNNI.
        algorithm: How weights are rounded (``weights``): ``default``, ``rtn``, ``hqq`` or
            ``k-quant``.
        block_size: Number of weights that share a scale (``weights``): 16 or more, a power of two.
        format: How they are written (``weights``): ``default``, operators of ONNX Runtime, or
            ``qdq``, the operators of ONNX behind a ``DequantizeLinear`` in blocks, which needs
            opset 21.
        engine: The tool that quantizes: ``onnxruntime``, or the name of a plug-in, such as
            ``nncf``.
        options: Further arguments of the engine's method, such as ``{"awq": True}``. In plans these
            are fields like the others.
        bits: Bits of a weight.
        accuracy_level: The arithmetic of products with weights in blocks (``weights``), as in the
            attribute of ``MatMulNBits``: 4 for int8, 1 for fp32, 0 for no attribute, which ONNX
            Runtime's CPU treats as 1. None for 4, which is the fastest.

    Raises:
        InputError: If the fields do not go together.

    Examples:
        >>> Precision("small blocks", "weights", weight="int4", block_size=16).bits
        4
        >>> Precision("a16w8", "static", "uint16", "uint8").weight
        'uint8'
    """

    name: str
    method: str = "keep"
    activation: str = "float32"
    weight: str = "float32"
    symmetric: bool = False
    per_channel: bool = False
    calibration: str = "minmax"
    reduce_range: bool = False
    algorithm: str = "default"
    block_size: int = 32
    format: str = "default"
    engine: str = ENGINE
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    bits: int = 0
    accuracy_level: int | None = None

    def __post_init__(self) -> None:
        """Check that the fields go together, and set the bits by the type of the weights."""
        if self.engine != ENGINE:
            self.check("engine", self.engine, (ENGINE, *sorted(plug_ins("quantize"))))
        self.check("method", self.method, _methods_of(self.engine))
        method = self.how
        for name in ("activation", "weight", "calibration", "algorithm", "format"):
            self.check(name, getattr(self, name), getattr(method, f"{name}s"))
        if not _is_block_size(self.block_size):
            raise self.fault(f"block_size is {self.block_size!r}, not 16, 32, 64, 128, ...")
        if self.accuracy_level is not None:
            self._check_level(method, self.accuracy_level)
        bits = _BITS[self.weight]
        if self.bits not in (0, bits):
            raise self.fault(f"{self.weight} has {bits} bits, not {self.bits!r}")
        object.__setattr__(self, "bits", bits)
        for name in self.options:
            if name not in method.options:
                raise InputError(
                    f"precision {self.name!r} has no field {name!r}; {self._nearest(name)}"
                )
        method.check()

    def _check_level(self, method: Method, level: int) -> None:
        if not method.accuracy_levels:
            raise self.fault(
                "accuracy_level is of weights in blocks of ONNX Runtime: int4, int8-weights"
            )
        # True equals 1, and is no level.
        comparable = str(level) if isinstance(level, bool) else level
        self.check("accuracy_level", comparable, method.accuracy_levels)

    def __str__(self) -> str:
        return self.name

    @property
    def how(self) -> Method:
        """Its method, with its fields."""
        return _methods_of(self.engine)[self.method](self)

    @property
    def is_kept(self) -> bool:
        """Whether modules stay as they are."""
        return self.method == "keep"

    @property
    def activation_bits(self) -> int:
        """Bits of an activation."""
        return _BITS[self.activation]

    @property
    def calibrated(self) -> bool:
        """Whether it needs data."""
        return self.how.calibrated

    @property
    def max_drop(self) -> float | None:
        """The largest allowed drop of a metric, for methods with this option; None for no limit."""
        return self.options.get("max_drop")

    def check(self, field: str, value: Any, allowed: Iterable[Any]) -> None:
        """Raise an `InputError` if the value of a field is none of the allowed values."""
        values = list(allowed)
        if value in values:
            return
        is_usual = self.engine == ENGINE or field == "engine"
        engine = "" if is_usual else f"with the engine {self.engine!r}, "
        raise self.fault(f"{engine}{field} is {value!r}, and can be {', '.join(map(str, values))}")

    def _nearest(self, word: str) -> str:
        """The field with the most similar name; all fields if none is similar."""
        known = [*FIELDS, *self.how.options]
        for near in difflib.get_close_matches(str(word), known, n=1):
            return f"nearest: {near!r}"
        return f"the method {self.method!r} of {self.engine} has {', '.join(known)}"

    def fault(self, problem: str) -> InputError:
        """An error for a problem of this precision."""
        return InputError(f"precision {self.name!r}: {problem}")


def _before_transpose(value: ir.Value) -> ir.Value:
    """The input of a ``Transpose`` of a weight; another value as it is."""
    producer = value.producer()
    source = producer.inputs[0] if is_standard(producer, "Transpose") and producer else None
    return value if source is None else without_copies(source)


def _is_block_size(size: object) -> bool:
    """Whether ONNX Runtime has blocks of a size: 16 elements or more, and a power of two."""
    return isinstance(size, int) and size >= 16 and size & (size - 1) == 0


def _field(text: str) -> tuple[str, Any]:
    """Parse a field, as in ``block_size=128``."""
    name, _, value = text.partition("=")
    if not (name and value):
        raise InputError(
            f"{text!r} is no field of a precision; write FIELD=VALUE, as in int4:accuracy_level=0"
        )
    with contextlib.suppress(ValueError):  # a number, true or false; otherwise a word
        return name, parse_json(value)
    return name, value


FIELDS = tuple(field.name for field in dataclasses.fields(Precision))
"""The fields of a precision; the options of its method are fields of plans, too."""


@functools.cache
def _methods_of(engine: str) -> Mapping[str, type[Method]]:
    """The methods of an engine by name; an `InputError` without such a plug-in."""
    if engine != ENGINE:
        return dict(plug_in("quantize", engine).METHODS)
    return {name: importlib.import_module(f"{_FOLDER}.{name}").METHOD for name in names_in(_FOLDER)}
