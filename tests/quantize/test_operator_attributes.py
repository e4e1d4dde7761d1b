"""Every operator that a quantizer of ONNX Runtime changes, with each attribute other than its default, against fp32.

A quantizer that drops or resets an attribute makes a model that loads, and computes something else. So does a kernel
that ONNX Runtime fuses a quantized operator into: each model runs as it is written, and with the default optimizations.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import htp_export
from htp_export.errors import InputError
from tests.exporting import every
from tests.quantized import distance, results, tagged_graph

_LIMITS = {"int4": 0.25, "fp8": 0.15, "fp16": 0.005, "int8-dynamic": 0.1}
"""The largest distance from fp32 that rounding alone makes in these graphs; 0.05 for other precisions."""

_IMAGE = (2, 4, 7, 7)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Row:
    """One operator with attributes: ``call`` is what stands in the graph, ``x`` what it reads."""

    call: str
    x: np.ndarray
    constants: dict[str, Any] = field(default_factory=dict)
    results: str = "y"
    rank: int | None = None
    opset: int = 17
    is_sorted: bool = True

    @property
    def model(self) -> Any:
        kind = "int64" if self.x.dtype == np.int64 else "float"
        sizes = ",".join(map(str, self.x.shape))
        open_sizes = ",".join(
            f"d{k}" for k in range(self.x.ndim if self.rank is None else self.rank)
        )
        text = (
            f"g ({kind}[{sizes}] x) => (float[{open_sizes}] y) {{ {self.results} = {self.call} }}"
        )
        return tagged_graph(text, self.opset, **self.constants)

    def __str__(self) -> str:
        shapes = ",".join(
            f"{name}{list(np.shape(array))}" for name, array in self.constants.items()
        )
        return f"{self.call} {shapes}"


def _gemms() -> Iterator[Row]:
    x, turned = floats(5, 8), floats(8, 5)
    for attributes in (
        "alpha=2.0",
        "beta=0.5",
        "alpha=0.5,beta=3.0",
        "alpha=-1.5,beta=-2.0",
        "beta=0.0",
        "alpha=1.0",
    ):
        yield Row(f"Gemm<{attributes}>(x,w,b)", x, {"w": floats(8, 6), "b": floats(6) * 3})
        yield Row(f"Gemm<{attributes}>(x,w)", x, {"w": floats(8, 6)})
        yield Row(f"Gemm<{attributes}>(x,w,b)", x, {"w": floats(8, 6), "b": floats(5, 6) * 3})
    yield Row("Gemm<transB=1>(x,w,b)", x, {"w": floats(6, 8), "b": floats(6) * 3})
    yield Row(
        "Gemm<transB=1,alpha=2.0,beta=0.5>(x,w,b)", x, {"w": floats(6, 8), "b": floats(6) * 3}
    )
    yield Row("Gemm<transA=1>(x,w,b)", turned, {"w": floats(8, 6), "b": floats(6) * 3})
    yield Row(
        "Gemm<alpha=2.0,beta=0.5>(w,x,b)", floats(8, 6), {"w": floats(5, 8), "b": floats(6) * 3}
    )
    yield Row("Gemm<alpha=2.0,beta=0.5>(x,w,x)", floats(6, 6), {"w": floats(6, 6)})
    for shape in ((1, 6), (1,), (1, 1), (), (5, 1), (5, 6)):
        bias = np.asarray(floats(*shape) * 3, np.float32)
        yield Row("Gemm(x,w,b)", x, {"w": floats(8, 6), "b": bias})
        yield Row("Gemm<alpha=0.5,beta=2.0>(x,w,b)", x, {"w": floats(8, 6), "b": bias})
    # as many rows as columns
    yield Row("Gemm(x,w,b)", floats(6, 8), {"w": floats(8, 6), "b": floats(6, 6) * 3})


def _convolutions() -> Iterator[Row]:
    x = floats(*_IMAGE)
    for groups in (2, 4):
        weights = {"w": floats(8, 4 // groups, 3, 3), "b": floats(8) * 3}
        yield Row(f"Conv<group={groups}>(x,w,b)", x, weights)
        yield Row(
            f"ConvTranspose<group={groups}>(x,w,b)",
            x,
            {"w": floats(4, 8 // groups, 3, 3), "b": floats(8) * 3},
        )
        yield Row(f"ConvTranspose<group={groups}>(x,w)", x, {"w": floats(4, 8 // groups, 3, 3)})
    both = (
        "strides=[2,2]",
        "pads=[1,0,2,1]",
        "dilations=[2,2]",
        'auto_pad="SAME_UPPER"',
        "kernel_shape=[3,3]",
    )
    for attributes in (*both, 'auto_pad="SAME_LOWER",strides=[2,2]', 'auto_pad="VALID"'):
        yield Row(f"Conv<{attributes}>(x,w,b)", x, {"w": floats(8, 4, 3, 3), "b": floats(8) * 3})
    for attributes in (
        *both,
        "output_padding=[1,1],strides=[2,2]",
        "output_shape=[15,15],strides=[2,2]",
    ):
        yield Row(
            f"ConvTranspose<{attributes}>(x,w,b)", x, {"w": floats(4, 8, 3, 3), "b": floats(8) * 3}
        )
    yield Row(
        "Conv<dilations=[2]>(x,w,b)", floats(2, 4, 9), {"w": floats(8, 4, 3), "b": floats(8) * 3}
    )
    yield Row(
        "Conv<group=2>(x,w,b)",
        floats(1, 4, 5, 5, 5),
        {"w": floats(8, 2, 3, 3, 3), "b": floats(8) * 3},
    )


def _pools() -> Iterator[Row]:
    x, kernel = floats(*_IMAGE), "kernel_shape=[3,3]"
    for attributes in ("strides=[2,2],ceil_mode=1", "pads=[1,1,1,1]", 'auto_pad="SAME_UPPER"'):
        yield Row(f"MaxPool<{kernel},{attributes}>(x)", x)
        yield Row(f"AveragePool<{kernel},{attributes}>(x)", x)
    yield Row(f"MaxPool<{kernel},dilations=[2,2]>(x)", x)
    yield Row(f"MaxPool<{kernel},storage_order=1>(x)", x)
    yield Row(f"AveragePool<{kernel},pads=[1,1,1,1],count_include_pad=1>(x)", x)
    yield Row(f"AveragePool<{kernel},dilations=[2,2]>(x)", x, opset=19)


def _elements() -> Iterator[Row]:
    x = floats(*_IMAGE)
    yield Row("LeakyRelu<alpha=0.3>(x)", x)
    yield Row("LeakyRelu<alpha=2.0>(x)", x)
    for axis in (0, 1, 2):
        yield Row(f"Softmax<axis={axis}>(x)", x)
        yield Row(f"Concat<axis={axis}>(x,k)", x, {"k": floats(*_IMAGE, seed=1)})
    yield Row("Softmax<axis=2>(x)", x, opset=11)
    yield Row("Where(m,x,k)", x, {"m": np.arange(7) % 2 == 0, "k": floats(*_IMAGE, seed=1)})
    for attributes in ("exclusive=1", "reverse=1", "exclusive=1,reverse=1"):
        yield Row(f"CumSum<{attributes}>(x,a)", x, {"a": np.array(2)})
    for attributes in ("axis=1,largest=0", "axis=2"):
        yield Row(f"TopK<{attributes}>(x,k)", x, {"k": np.array([3])}, "y,z")
    yield Row("TopK<axis=1,sorted=0>(x,k)", x, {"k": np.array([3])}, "y,z", is_sorted=False)


def _norms() -> Iterator[Row]:
    x = floats(*_IMAGE)
    for axis, shape in ((-1, (7,)), (2, (7, 7)), (1, (4, 7, 7))):
        weights = {"s": floats(*shape) + 2, "b": floats(*shape, seed=1) * 3}
        for attributes in (f"axis={axis}", f"axis={axis},epsilon=0.5"):
            yield Row(f"LayerNormalization<{attributes}>(x,s,b)", x, weights)
    yield Row("LayerNormalization<axis=2>(x,s,b)", x, {"s": floats(7, 7) + 2, "b": floats(7)})
    scale, bias = floats(4) + 2, floats(4, seed=1) * 3
    yield Row("InstanceNormalization<epsilon=0.5>(x,s,b)", x, {"s": scale, "b": bias})
    moments = {"m": floats(4, seed=2), "v": np.abs(floats(4, seed=3)) + np.float32(0.5)}
    yield Row("BatchNormalization<epsilon=0.5>(x,s,b,m,v)", x, {"s": scale, "b": bias, **moments})


def _layouts() -> Iterator[Row]:
    x = floats(*_IMAGE)
    yield Row("Transpose<perm=[0,2,1,3]>(x)", x)
    yield Row("Reshape<allowzero=1>(x,s)", x, {"s": np.array([8, 49])}, rank=2)
    for axis in (0, 2, -1):
        yield Row(f"Flatten<axis={axis}>(x)", x, rank=2)
    yield Row("Split<axis=1>(x,s)", x, {"s": np.array([1, 3])}, "y,z")
    # the last one has no elements
    yield Row("Split<axis=1,num_outputs=3>(x)", x, results="y,z,q", opset=18)
    pads = {"p": np.array([0, 0, 1, 1, 0, 0, 2, 1])}
    for mode, opset in (("reflect", 17), ("edge", 17), ("wrap", 19)):
        yield Row(f'Pad<mode="{mode}">(x,p)', x, pads, opset=opset)
    yield Row("Pad(x,p,c)", x, {**pads, "c": np.float32(2.5)})
    places = {"s": np.array([5]), "e": np.array([0]), "a": np.array([2]), "t": np.array([-2])}
    yield Row("Slice(x,s,e,a,t)", x, places)
    words, table = np.array([[0, 3, -1], [1, 1, 2]]), {"k": floats(4, 6)}
    for axis in (0, 1, -1):
        yield Row(f"Gather<axis={axis}>(k,x)", words, table, rank=3)
        yield Row(
            f"GatherElements<axis={axis}>(x,i)", floats(4, 4), {"i": np.array([[0, 1, 2, -1]])}
        )


def _resizes() -> Iterator[Row]:
    x, scales = floats(*_IMAGE), {"s": np.float32([1, 1, 2, 1.5])}
    modes = (
        'mode="linear"', 'mode="cubic"', 'mode="cubic",cubic_coeff_a=-0.5', 'mode="cubic",exclude_outside=1',
        'mode="nearest",nearest_mode="ceil"', 'mode="linear",coordinate_transformation_mode="align_corners"',
        'mode="linear",coordinate_transformation_mode="asymmetric"',
        'mode="linear",coordinate_transformation_mode="pytorch_half_pixel"',
    )  # fmt: skip
    for attributes in modes:
        yield Row(f"Resize<{attributes}>(x,,s)", x, scales)
    yield Row(
        'Resize<mode="linear",antialias=1>(x,,s)', x, {"s": np.float32([1, 1, 0.5, 0.5])}, opset=18
    )
    sizes = {"s": np.array([14, 10])}
    yield Row(
        'Resize<mode="linear",keep_aspect_ratio_policy="not_larger",axes=[2,3]>(x,,,s)',
        x,
        sizes,
        opset=18,
    )
    around = {**scales, "r": np.float32([0, 0, -0.2, -0.2, 1, 1, 1.2, 1.2])}
    outside = (
        'mode="linear",coordinate_transformation_mode="tf_crop_and_resize",extrapolation_value'
    )
    for number in (3.0, 300.0):  # results far outside of the range of the input
        yield Row(f"Resize<{outside}={number}>(x,r,s)", x, around)


def _products() -> Iterator[Row]:
    yield Row("MatMul(x,w)", floats(2, 4, 5, 8), {"w": floats(8, 6)})
    yield Row("MatMul(x,w)", floats(2, 5, 8), {"w": floats(2, 8, 6)})
    yield Row("MatMul(x,w)", floats(2, 5, 8), {"w": floats(8)}, rank=2)
    yield Row("MatMul(w,x)", floats(8, 6), {"w": floats(5, 8)})


def _recurrent() -> Iterator[Row]:
    x = floats(6, 2, 5)

    def row(attributes: str, read: str = "", directions: int = 1, **more: Any) -> Row:
        weights = {
            "w": floats(directions, 16, 5),
            "r": floats(directions, 16, 4),
            "b": floats(directions, 32),
        }
        call = f"LSTM<hidden_size=4{attributes}>(x,w,r,b{read})"
        return Row(call, x, {**weights, **more}, "y,h,c", rank=4)

    yield row(',direction="reverse"')
    yield row(',direction="bidirectional"', directions=2)
    yield row(',activations=["Sigmoid","Relu","Tanh"]')
    yield row(
        ',activations=["HardSigmoid","Tanh","Tanh"],activation_alpha=[0.4],activation_beta=[0.3]'
    )
    yield row(',activations=["Sigmoid","LeakyRelu","Tanh"],activation_alpha=[0.3]')
    yield row(",clip=0.3")
    yield row(",input_forget=1")
    yield row("", ",l", l=np.array([6, 3], np.int32))
    yield row("", ",,h0,c0", h0=floats(1, 2, 4, seed=1), c0=floats(1, 2, 4, seed=2))
    yield row("", ",,,,p", p=floats(1, 12))


_GROUPS = (
    _gemms, _convolutions, _pools, _elements, _norms, _layouts, _resizes, _products, _recurrent,
)  # fmt: skip
ROWS = [row for group in _GROUPS for row in group()]
# every precision takes a second of a row: one of four rows of each kind always
CASES = [case for group in _GROUPS for case in every(4, group())]

_PRECISIONS = (
    "int8",
    "u8s8",
    "uint8",
    "int16",
    "int8-dynamic",
    "int8-weights",
    "int4",
    "fp16",
    "fp8",
    "fixed",
    "mxint8",
)


@pytest.mark.long
@pytest.mark.parametrize("row", CASES, ids=str)
def test_an_attribute_means_the_same_in_every_precision(row):
    model = row.model
    [expected, *_] = results(model, {"x": row.x})
    changed = 0
    for precision in _PRECISIONS:
        result = _quantized(model, precision, row.x)
        if result is None:
            continue
        changed += 1
        for optimized in (False, True):
            [found, *_] = results(result.model, {"x": row.x}, optimized=optimized)
            if not row.is_sorted:
                found, expected = np.sort(found, 1), np.sort(expected, 1)
            assert distance(found, expected) < _LIMITS.get(precision, 0.05), (
                precision,
                optimized,
                result.notes,
            )
    assert changed


def _quantized(model: Any, precision: str, x: np.ndarray) -> htp_export.results.Quantized | None:
    """What becomes of a model; None if there is no such operator in the precision, or not at this opset."""
    try:
        return htp_export.quantize(model, precision, data={"x": x})
    except InputError as error:
        if "no operator of module" in str(error) or "needs opset" in str(error):
            return None
        raise


def test_every_operator_that_the_static_quantizer_changes_has_a_row():
    """Operators without attributes, and those that make no floats, need none."""
    from htp_export.capabilities.quantize.ort_quantizers import quantizers

    known = {*quantizers("registry").QDQRegistry, *quantizers("registry").QLinearOpsRegistry}
    without = {"Add", "Mul", "Relu", "Clip", "Sigmoid", "Squeeze", "Unsqueeze", "GlobalAveragePool"}
    others = {"ArgMax", "EmbedLayerNormalization"}  # integers, and ONNX Runtime's own
    assert known - without - others <= {
        row.call.partition("<")[0].partition("(")[0] for row in ROWS
    }
