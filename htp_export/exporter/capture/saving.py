"""Tagged files are written as torch writes them, but completely or not at all, without copies.

Large weights of a program of the dynamo exporter are written part by part. Pages of parameters that
are mapped from a file are released after each part: otherwise all would be resident at the end. The
optimizer transposes weights without copying them; numpy would write these one element at a time.

The TorchScript exporter copies each weight four times before it is written. It receives an empty
tensor instead; the shape and the bytes are added when the file is written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx_ir as ir
import torch

from htp_export.errors import FileError, HtpExportError
from htp_export.exporter.capture.patching import Wrap
from htp_export.files.filesystem import check_kind_of_target, is_special, why_not_writable
from htp_export.files.protobuf_bytes import Weight
from htp_export.files.write_file import replace_file
from htp_export.process.mapped_memory import MappedFiles, release_pages

_LARGE_BYTES = 1 << 20  # writing smaller tensors takes no noticeable time
_PART_BYTES = 1 << 21  # memory for the part of a tensor whose layout is changed
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an element → a type of this size that numpy has, too."""
_MARK = "_htp_export_saves_whole"
_INVALID = (
    "not written, because the model that torch.onnx.export made is not valid: {}; if they are input_names or "
    "output_names of yours, choose names that no other tensor has"
)
_SMALL = 1024  # bytes; copying them costs nothing
_MOST = 1 << 30  # bytes; near 2 GB, torch decides by the size whether one file is enough


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise an `OSError` if a file cannot be written in its folder, before the model runs."""
    file = Path(path)
    check_kind_of_target(file)
    error = None if is_special(file) else why_not_writable(file.absolute().parent)
    if error is not None and not _is_writable(file):
        raise error


def _is_writable(file: Path) -> bool:
    """Whether a file exists and can be overwritten."""
    return file.is_file() and os.access(file, os.W_OK)


def _only_itself_writable(file: Path) -> bool:
    """Whether a file can be overwritten, but its folder accepts no other: then torch writes it."""
    return _is_writable(file) and why_not_writable(file.absolute().parent) is not None


def save_whole(program: Any) -> None:
    """Let ``program.save`` write a model with its data file; `torch.onnx.export` uses it, too."""
    program_class: Any = type(program)
    if not hasattr(program_class, _MARK):
        program.__class__ = _saved_whole(program_class)


@functools.cache
def _saved_whole(program_class: Any) -> Any:
    original = program_class.save

    @functools.wraps(original)
    def save(self: Any, destination: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(destination, str | os.PathLike) or _only_itself_writable(
            Path(destination)
        ):
            original(self, destination, *args, **kwargs)
            return
        from htp_export.files.external_writers import written_whole
        from htp_export.files.structure import fault_of_names

        fault = fault_of_names(self.model)
        if fault:
            raise FileError(destination, _INVALID.format(fault))
        metadata = {}  # name of an initializer → its metadata
        for name, value in self.model.graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.metadata_props:
                metadata[name] = tensor.metadata_props
        # Reading the file again would make a second graph of it, beside that of the program.
        whole = written_whole(destination, metadata, is_checked=True)
        with whole as new, written_in_parts(self.model):
            original(self, new, *args, **kwargs)

    described = {
        "__doc__": program_class.__doc__,
        "__module__": program_class.__module__,
        "save": save,
        _MARK: True,
    }
    return type(program_class.__name__, (program_class,), described)


@contextlib.contextmanager
def written_in_parts(model: ir.Model) -> Iterator[None]:
    """Inside a ``with`` block, replace large weights by tensors that are written in parts."""
    kept: list[tuple[ir.Value, Any]] = []
    mapped = MappedFiles.now()
    try:
        for value in model.graph.initializers.values():
            values = _values(value.const_value)
            if values is None:
                continue
            memory = _memory(values)
            if mapped.path_of(*memory) is None:
                memory = (0, 0)
            kept.append((value, value.const_value))
            value.const_value = _InParts(value.const_value, values, memory)
        yield
    finally:
        for value, tensor in kept:
            value.const_value = tensor


def _values(tensor: Any) -> np.ndarray[Any, Any] | None:
    """The values of a large tensor, with elements as written to the file; or None."""
    raw: Any = getattr(tensor, "raw", None)
    if _is_plain(raw) and raw.dtype.itemsize in _SAME_SIZE:
        raw = raw.detach().view(_SAME_SIZE[raw.dtype.itemsize]).numpy()
    if not isinstance(raw, np.ndarray) or sys.byteorder != "little" or not raw.dtype.isnative:
        return None
    if raw.ndim > 0 and raw.nbytes == tensor.nbytes >= _LARGE_BYTES:
        return raw
    return None


def _is_plain(weight: Any) -> bool:
    """Whether the bytes of a weight are available without torch's exporter, and large enough."""
    return (
        type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.layout is torch.strided
        and weight.device.type == "cpu"
        and weight.nbytes > _SMALL
        and not (weight.is_quantized or weight.is_conj() or weight.is_neg())
    )


def _memory(values: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Address and length of the memory of an array, which may have negative strides."""
    before = 0
    behind = 0
    for size, stride in zip(values.shape, values.strides, strict=True):
        if stride < 0:
            before += (size - 1) * stride
        else:
            behind += (size - 1) * stride
    return values.ctypes.data + before, behind - before + values.itemsize


class _InParts(ir.Tensor):  # type: ignore[type-arg]
    """A tensor of torch's exporter that is written part by part.

    ``mapped`` is the address and length of its memory if that is mapped from a file, else zeros.
    """

    __slots__ = ("_mapped", "_tensor", "_values")

    def __init__(
        self,
        tensor: Any,
        values: np.ndarray[Any, Any],
        mapped: tuple[int, int],
    ) -> None:
        about = {"doc_string": tensor.doc_string, "metadata_props": dict(tensor.metadata_props)}
        super().__init__(
            tensor.raw, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name, **about
        )
        self._tensor = tensor
        self._values = values
        self._mapped = mapped

    def numpy(self) -> Any:
        return self._tensor.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._tensor.__array__(dtype, copy)

    def tobytes(self) -> bytes:
        return self._tensor.tobytes()  # type: ignore[no-any-return]

    def tofile(self, file: IO[bytes]) -> None:
        values = self._values
        is_contiguous = values.flags.c_contiguous
        rows = values.reshape(-1) if is_contiguous else values
        step = max(1, _PART_BYTES * len(rows) // values.nbytes)
        for start in range(0, len(rows), step):
            part = np.ascontiguousarray(rows[start : start + step])
            file.write(part.view(np.uint8).data)
            if is_contiguous and self._mapped[1]:
                release_pages(part.ctypes.data, part.nbytes)
        release_pages(*self._mapped)  # every part of a transposed tensor uses all of its pages


# --- the TorchScript exporter ---------------------------------------------------


@dataclass
class KeptWeights:
    """The weights that are missing in the bytes serialized by torch."""

    weights: dict[str, Weight]  # name of an initializer → its contents
    whole: Callable[[], bytes]  # serializes the model as torch does, with all weights


def empty_weights(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Name → an empty tensor, for weights whose bytes are available without torch's exporter."""
    plain = {name: weight for name, weight in weights.items() if _is_plain(weight)}
    if sys.byteorder != "little" or sum(weight.nbytes for weight in plain.values()) > _MOST:
        return {}
    return {name: torch.empty(0, dtype=weight.dtype) for name, weight in plain.items()}


def kept_weights(
    weights: Mapping[str, Any],
    empty: Iterable[str],
    copied: Mapping[str, bytes],
) -> dict[str, Weight]:
    """Name → contents, of weights that were replaced by empty tensors, or copied by torch."""
    kept = {name: Weight.of(data) for name, data in copied.items()}
    return {**kept, **{name: stored(weights[name]) for name in empty}}


def stored(weight: torch.Tensor) -> Weight:
    """A weight's shape and bytes, which are copied only if they are not contiguous."""

    def read() -> memoryview:
        bytewise = weight.detach().contiguous().reshape(-1).view(torch.uint8)
        return memoryview(bytewise.numpy().data)

    return Weight(weight.nbytes, read, tuple(weight.shape))


def write(f: Any, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file completely: beside its place first, so that a failure keeps the old file."""
    if not isinstance(f, (str, os.PathLike)):
        for chunk in chunks:
            f.write(chunk)
        return
    with replace_file(Path(f)) as new, new.open("wb") as opened:
        for chunk in chunks:
            opened.write(chunk)


# --- torch 2.10, whose exporter ends later than that of the releases after it -------------------
#
# From 2.11 on, ``_core.export`` converts the opset and optimizes, and its caller only saves the
# result, so the tags are written when it returns. In 2.10 its caller, ``export_compat``, converts,
# optimizes and saves. The end of the export is therefore the end of ``export_compat``, called
# without a file; the program is saved here, after the tags are written. To be deleted with the
# support of torch 2.10.

LATE_PLACE = ("torch.onnx._internal.exporter._compat", "export_compat")


def is_late() -> bool:
    """Whether the installed torch optimizes and saves outside ``_core.export``."""
    return torch.torch_version.TorchVersion(torch.__version__) < "2.11"


def saving_after(tagged: Wrap, wanted: Callable[[], Any]) -> Wrap:
    """Create the wrapper of ``export_compat`` from the one of ``_core.export``, which adds tags.

    Exports are passed through if tags are not ``wanted``.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        with_tags = tagged(original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not wanted():
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options = bound.arguments
            try:
                program = with_tags(**{**options, "f": None, "fallback": False})
            except HtpExportError:
                raise
            except Exception:
                if not options["fallback"]:
                    raise
                # It fails again, and then writes the file with TorchScript, an export with its own
                # tags.
                return original(*args, **kwargs)
            if options["f"] is not None:
                _save(program, options)
            return program

        return wrapper

    return wrap


def _save(program: Any, options: dict[str, Any]) -> None:
    """Save a program as ``export_compat`` does."""
    import onnx

    if isinstance(options["f"], io.BytesIO):
        warnings.warn(
            "Saving ONNX model to a BytesIO object is deprecated. Please use a file path instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        onnx.save(program.model_proto, options["f"])
    else:
        kept = ("keep_initializers_as_inputs", "external_data")
        program.save(
            options["f"],
            include_initializers=options["export_params"],
            **{name: options[name] for name in kept},
        )
