"""Precisions: the types in which modules compute, how values get there, and the names for them in plans."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from htp_export.errors import InputError

__all__ = [
    "PRECISIONS",
    "PRESETS",
    "Engine",
    "Method",
    "Precision",
    "precision_of",
    "precisions_of",
    "weight_precision",
]


class Method(StrEnum):
    """How the operators of a module get their precision."""

    KEEP = "keep"  # as they are
    CAST = "cast"  # another float type, with Casts at the borders
    STATIC = "static"  # QuantizeLinear and DequantizeLinear, with ranges from calibration
    DYNAMIC = "dynamic"  # integer operators, with ranges of activations at run time
    WEIGHTS = "weights"  # weights alone, block by block


class Calibration(StrEnum):
    """How static ranges are chosen from the values that activations take."""

    MINMAX = "minmax"
    ENTROPY = "entropy"
    PERCENTILE = "percentile"


class Algorithm(StrEnum):
    """How weights are rounded to few bits, block by block."""

    DEFAULT = "default"  # round to nearest, with the kernels of ONNX Runtime
    RTN = "rtn"
    HQQ = "hqq"
    GPTQ = "gptq"
    K_QUANT = "k-quant"


class Engine(StrEnum):
    """Whose numerics they are."""

    ONNX_RUNTIME = "onnxruntime"
    NNCF = "nncf"


_ACTIVATIONS = {
    Method.KEEP: ("float32",),
    Method.CAST: ("float16", "bfloat16"),
    Method.STATIC: ("int8", "uint8", "int16", "uint16"),
    Method.DYNAMIC: ("uint8",),
    Method.WEIGHTS: ("float32",),
}
_WEIGHTS = {**_ACTIVATIONS, Method.DYNAMIC: ("int8", "uint8"), Method.WEIGHTS: ("int4", "int8")}
_BITS = {"int4": 4, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "float16": 16, "bfloat16": 16, "float32": 32}


@dataclass(frozen=True)
class Precision:
    """The types in which a module computes, and how its values get there.

    Attributes:
        name: Its name in tables.
        method: ``keep``, ``cast``, ``static``, ``dynamic`` or ``weights``.
        activation: Type of activations: ``float32``, ``float16``, ``bfloat16``, ``int8``, ``uint8``, ``int16`` or
            ``uint16``. Dynamic ones are ``uint8``.
        weight: Type of weights, as for activations, and ``int4``.
        symmetric: Whether zero is the middle of the range: of activations (``static``), or of weights in blocks.
        per_channel: Whether each output channel of a weight has its own scale (``static``, ``dynamic``).
        calibration: How ranges are chosen (``static``): ``minmax``, ``entropy`` or ``percentile``.
        reduce_range: Whether weights of 8 bits use 7 of them (``static``, ``dynamic``), for processors without VNNI.
        algorithm: How weights are rounded (``weights``): ``default``, ``rtn``, ``hqq``, ``gptq`` or ``k-quant``.
        block_size: Weights that share a scale (``weights``): 16 or more, a power of two.
        engine: Whose numerics (``static``, ``weights``): ``onnxruntime``, or ``nncf``, an extra. Its ``int8`` is for
            activations and weights, its ``int8-weights`` has a scale for each output channel, its ``int4`` has blocks.
        smooth_quant: Whether activations and weights are scaled so that outliers of activations cost less (``nncf``,
            ``static``).
        bias_correction: Whether biases make up for the mean error of quantized weights and activations (``nncf``,
            ``static``).
        max_drop: The most by which a metric may fall (``nncf``, ``static``): operators go back to fp32 until it does
            not fall more. None for no limit.
        awq: Whether weights are scaled so that those of large activations lose less (``nncf``, ``int4``).
        scale_estimation: Whether scales are fitted to the activations of the data (``nncf``, ``int4``).
        bits: Bits of a weight.

    Raises:
        InputError: If the fields do not go together.

    Examples:
        >>> Precision("small blocks", "weights", weight="int4", block_size=16).bits
        4
        >>> Precision("a16w8", "static", "uint16", "uint8").weight
        'uint8'
    """

    name: str
    method: str = Method.KEEP
    activation: str = "float32"
    weight: str = "float32"
    symmetric: bool = False
    per_channel: bool = False
    calibration: str = Calibration.MINMAX
    reduce_range: bool = False
    algorithm: str = Algorithm.DEFAULT
    block_size: int = 32
    engine: str = Engine.ONNX_RUNTIME
    smooth_quant: bool = False
    bias_correction: bool = False
    max_drop: float | None = None
    awq: bool = False
    scale_estimation: bool = False
    bits: int = 0

    def __post_init__(self) -> None:
        """Check that the fields go together; the bits follow from the type of the weights."""
        _check(self.name, "method", self.method, tuple(Method))
        method = Method(self.method)
        _check(self.name, "activation", self.activation, _ACTIVATIONS[method])
        _check(self.name, "weight", self.weight, _WEIGHTS[method])
        if method == Method.CAST and self.activation != self.weight:
            raise InputError(f"precision {self.name!r}: activations and weights have the same float type")
        if method == Method.STATIC and (self.activation, self.weight) in (("int8", "uint8"), ("int16", "uint8")):
            raise InputError(f"precision {self.name!r}: ONNX Runtime has no {self.activation} with uint8 weights")
        _check(self.name, "calibration", self.calibration, tuple(Calibration))
        _check(self.name, "algorithm", self.algorithm, tuple(Algorithm))
        if not isinstance(self.block_size, int) or self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise InputError(f"precision {self.name!r}: block_size is {self.block_size!r}, not 16, 32, 64, 128, ...")
        bits = _BITS[self.weight]
        if self.bits not in (0, bits):
            raise InputError(f"precision {self.name!r}: {self.weight} has {bits} bits, not {self.bits!r}")
        object.__setattr__(self, "bits", bits)
        if method == Method.WEIGHTS and bits != 4 and self.algorithm in (Algorithm.GPTQ, Algorithm.HQQ):
            raise InputError(f"precision {self.name!r}: with {self.algorithm}, ONNX Runtime runs 4 bits, not {bits}")
        self._check_engine()

    def _check_engine(self) -> None:
        """Check that the engine has what the other fields ask for."""
        _check(self.name, "engine", self.engine, tuple(Engine))
        for field in ("smooth_quant", "bias_correction", "awq", "scale_estimation"):
            _check(self.name, field, getattr(self, field), (False, True))
        of_static = [name for name in ("smooth_quant", "bias_correction") if getattr(self, name)]
        of_static += [] if self.max_drop is None else ["max_drop"]
        of_int4 = [name for name in ("awq", "scale_estimation") if getattr(self, name)]
        if self.engine != Engine.NNCF:
            if of_static or of_int4:
                raise InputError(f"precision {self.name!r}: {(of_static + of_int4)[0]} is of the engine 'nncf'")
            return
        if self.method == Method.WEIGHTS:
            if self.algorithm != Algorithm.DEFAULT:
                raise InputError(f"precision {self.name!r}: with the engine 'nncf', algorithm can be default")
            misplaced = of_static or (of_int4 if self.weight != "int4" else [])
        elif self.method != Method.STATIC or (self.activation, self.weight) != ("int8", "int8"):
            raise InputError(f"precision {self.name!r}: the engine 'nncf' has int8, int8-weights and int4 alone")
        else:
            misplaced = of_int4
        if misplaced:
            where = "int4" if misplaced[0] in of_int4 else "int8, with the method static"
            raise InputError(f"precision {self.name!r}: {misplaced[0]} is of {where}")
        if self.calibration != Calibration.MINMAX:
            raise InputError(f"precision {self.name!r}: with the engine 'nncf', calibration can be minmax")
        drop = self.max_drop
        if drop is not None and (isinstance(drop, bool) or not isinstance(drop, int | float) or not drop >= 0):
            raise InputError(f"precision {self.name!r}: max_drop is {drop!r}, not a number from 0 up")

    def __str__(self) -> str:
        return self.name

    @property
    def activation_bits(self) -> int:
        """Bits of an activation."""
        return _BITS[self.activation]

    @property
    def calibrated(self) -> bool:
        """Whether it needs data."""
        fitted = self.algorithm == Algorithm.GPTQ or self.awq or self.scale_estimation
        return self.method == Method.STATIC or (self.method == Method.WEIGHTS and fitted)


def _check(name: str, what: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise InputError(f"precision {name!r}: {what} is {value!r}, and can be {', '.join(map(str, allowed))}")


PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("int8", Method.STATIC, "int8", "int8", per_channel=True),
        Precision("u8s8", Method.STATIC, "uint8", "int8", per_channel=True),
        Precision("uint8", Method.STATIC, "uint8", "uint8"),
        Precision("int16", Method.STATIC, "int16", "int8", symmetric=True, per_channel=True),
        Precision("int8-dynamic", Method.DYNAMIC, "uint8", "int8", per_channel=True),
        Precision("int8-weights", Method.WEIGHTS, weight="int8"),
        Precision("int4", Method.WEIGHTS, weight="int4"),
        Precision("fp16", Method.CAST, "float16", "float16"),
        Precision("bf16", Method.CAST, "bfloat16", "bfloat16"),
        Precision("fp32"),
    )
}
"""The precisions that have a name."""

PRESETS: Mapping[str, Mapping[str, str]] = {
    "int8": {".": "int8"},
    "w4": {".": "int4"},
    "fp16": {".": "fp16"},
}
"""Plans that have a name."""


def precision_of(value: Any) -> Precision:
    """The precision that a value of a plan stands for.

    Args:
        value: A `Precision`, a name of one, or a mapping with the name as ``precision`` and fields that differ.

    Raises:
        InputError: If there is no such precision or field, or the fields do not go together.

    Examples:
        >>> precision_of("int4").block_size, precision_of({"precision": "int4", "block_size": 128}).block_size
        (32, 128)
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, Mapping):
        fields = dict(value)
        base = fields.pop("precision", None)
        if base is None:
            raise InputError(f"precision {value!r} has no name; write it as 'precision': 'int8'")
        known = {field.name for field in dataclasses.fields(Precision)}
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise InputError(f"precision {base!r} has no field {unknown[0]!r}{_nearest(unknown[0], known)}")
        return dataclasses.replace(precision_of(base), **({"bits": 0} | fields))
    if not isinstance(value, str) or value not in PRECISIONS:
        raise InputError(f"there is no precision {value!r}; there are {', '.join(PRECISIONS)}")
    return PRECISIONS[value]


def precisions_of(plan: Mapping[str, Any] | str) -> dict[str, Precision]:
    """The rules of a plan, or of a preset, as precisions.

    Raises:
        InputError: If there is no such preset, or a value is no precision; the message names the selector.

    Examples:
        >>> {selector: precision.name for selector, precision in precisions_of("w4").items()}
        {'.': 'int4'}
    """
    if isinstance(plan, str):
        if plan not in PRESETS:
            raise InputError(f"there is no preset {plan!r}; there are {', '.join(PRESETS)}")
        plan = PRESETS[plan]
    if not isinstance(plan, Mapping):
        raise InputError(f"a plan is a mapping from selectors to precisions, or a preset, not {type(plan).__name__}")
    rules: dict[str, Precision] = {}
    for selector, value in plan.items():
        try:
            rules[selector] = precision_of(value)
        except InputError as error:
            raise InputError(f"rule {selector!r}: {error}") from error
    return rules


def weight_precision(types: Iterable[str]) -> str:
    """The precision of weights of these element types, by the names of plans where they have one.

    Examples:
        >>> weight_precision(["float32"]), weight_precision(["float64"]), weight_precision(["float16", "float32"])
        ('fp32', 'float64', 'mixed')
    """
    float_names = {each.weight: each.name for each in PRECISIONS.values() if each.method in (Method.KEEP, Method.CAST)}
    first, *others = dict.fromkeys(types)
    return "mixed" if others else float_names.get(first, first)


def _nearest(word: str, known: set[str]) -> str:
    near = difflib.get_close_matches(str(word), sorted(known), n=1)
    return f"; nearest: {near[0]!r}" if near else f"; there are {', '.join(sorted(known))}"
