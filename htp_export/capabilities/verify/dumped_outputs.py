"""A file whose tensors another engine computed, and wrote down by name: what is compared, and what to ask for next.

The first wrong module is found as ``git bisect`` finds a commit: the tensor that halves what is in doubt comes next.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.verify.checking import CheckedCall, Pair, PairedCall, excesses
from htp_export.capabilities.verify.file_run import FileRun
from htp_export.capabilities.verify.locating import Blame, computed_from
from htp_export.errors import InputError
from htp_export.files.npz_file import NpzArrays
from htp_export.format import tags
from htp_export.model.regions import is_inserted
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array

NOT_DUMPED = "the dump has none of its tensors"

Dump = str | os.PathLike[str] | Mapping[str, Any]
"""An ``.npz`` file of tensors by name, or these as arrays."""


@dataclass(frozen=True)
class DumpedRun(FileRun):
    """A file whose tensors are in a dump, tensor → values; what is not there is not known."""

    dumped: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, run: FileRun, dump: Dump) -> DumpedRun:
        """A file with a dump.

        Names are those of the file; or as engines write them, with ``_`` for what is no letter and no digit.

        Raises:
            FileError: If the dump is no ``.npz`` file of plain arrays.
            InputError: If it has no tensor of the file, or was made of other inputs.
        """
        arrays = NpzArrays(dump) if isinstance(dump, str | os.PathLike) else dump
        name = os.fspath(dump) if isinstance(dump, str | os.PathLike) else "the dump"
        dumped = _resolved(run.tagged, arrays)
        if not dumped.keys() - run.feed.keys():
            listed = ", ".join(map(repr, list(arrays)[:5])) or "nothing"
            raise InputError(f"{name}: has no tensor that {run.name} computes; it has {listed}")
        for tensor, fed in run.feed.items():
            if tensor in dumped and not _is_same(dumped[tensor], fed):
                raise InputError(f"{name}: was made of another input {tensor!r} than PyTorch is run on; give that one")
        return cls(run.tagged, run.name, run.feed, run.settings, run.portion_bytes, run.use_up, dumped)

    def fetch(self, sizes: Mapping[str, int], use: Callable[[str, Array], None]) -> None:
        """As of `FileRun`, for tensors in the dump and weights."""
        for name in sizes.keys() & self.dumped.keys():
            use(name, self.dumped[name])
        super().fetch({name: size for name, size in sizes.items() if name not in self.dumped}, use)

    def knows(self, value: ir.Value) -> bool:
        """Whether a tensor is in the dump, or needs no run."""
        return value.name in self.dumped or value.producer() is None


def _is_same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=one.dtype.kind == "f")


def _resolved(tagged: TaggedModel, arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Tensor of the file → its values in a dump; a tap gives the tensors that it was made of, too."""
    plain = Counter(_plain(name) for name in tagged.values)
    by_plain = {_plain(name): name for name in tagged.values if plain[_plain(name)] == 1}
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        tensor = name if name in tagged.values else by_plain.get(_plain(name))
        if tensor is not None:
            found.setdefault(tensor, np.asarray(array))
    for tap in tagged.taps.keys() & found.keys():
        node = tagged.values[tap].producer()
        if node is not None and is_inserted(node):
            for value, part in zip(node.inputs, _parts(tagged, node, found[tap]), strict=False):
                if value is not None:
                    found.setdefault(str(value.name), part)
    return found


def _parts(tagged: TaggedModel, node: ir.Node, array: Array) -> list[Array]:
    """What a tap put together: along an axis of which the file knows the sizes, or whose parts are equally long."""
    if node.op_type == "Identity":
        return [array]
    shapes = [tagged.inferred.shape(value) for value in node.inputs]
    if node.op_type != "Concat" or any(shape is None or len(shape) != array.ndim for shape in shapes):
        return []
    axis = node.attributes["axis"].as_int()
    sizes = [shape[axis] for shape in shapes if shape is not None]
    if len(set(sizes)) == 1 and array.shape[axis] % len(sizes) == 0:
        return np.split(array, len(sizes), axis)
    numbers = [size for size in sizes if isinstance(size, int)]
    is_whole = len(numbers) == len(sizes) and sum(numbers) == array.shape[axis]
    return np.split(array, np.cumsum(numbers)[:-1], axis) if is_whole else []


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name).strip("_")


def with_dumped_tensors(run: DumpedRun, calls: Sequence[PairedCall]) -> list[PairedCall]:
    """The calls with those of their tensors that the dump has."""

    def known(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
        listed = (replace(pair, candidates=tuple(filter(run.knows, pair.candidates))) for pair in pairs)
        return tuple(pair for pair in listed if pair.candidates)

    return [replace(call, outputs=known(call.outputs), inputs=known(call.inputs), missing=0) for call in calls]


def narrowed(
    run: DumpedRun, calls: Sequence[PairedCall], checked: Sequence[CheckedCall], blame: Blame
) -> tuple[Blame, tuple[str, ...]]:
    """Say where the first wrong module is, as far as a dump tells, and which tensor to ask for next.

    ``calls`` are all, with all tensors that the file names, and ``blame`` has the modules that return the first tensors
    that differ. Returned are the module that is wrong, or that holds all that may be; and the next tensor, none if that
    is the module.
    """
    if not blame.calls:
        return blame, ()
    excess = excesses(checked)
    [bad, *_] = [value for value, r in checked[blame.calls[0]].outputs if excess[value] > 1 or not r.difference.agrees]
    fine = computed_from(run.tagged, (value for value, size in excess.items() if size <= 1))
    doubtful = computed_from(run.tagged, [bad], fine) - fine
    homes: dict[ir.Value, str] = {}
    for call in calls:  # in the order in which they ended: a tensor is that of the innermost module
        for pair in call.outputs:
            if len(pair.candidates) == 1 and pair.candidates[0] in doubtful:
                homes.setdefault(pair.candidates[0], call.call.path)
    open_tensors = [value for value in homes if value is not bad and value not in excess]
    if not open_tensors:
        return blame, ()
    sizes = {value: len((computed_from(run.tagged, [value], fine) - fine) & homes.keys()) for value in open_tensors}
    chosen = max(open_tensors, key=lambda value: min(sizes[value], len(homes) - sizes[value]))
    around = tags.common_ancestor(homes.values())
    why = f"{len(homes)} modules that lead to {bad.name!r} are in doubt: it is one of them, or {around or 'the root'!r}"
    return Blame((), {around: why}), (str(chosen.name),)
