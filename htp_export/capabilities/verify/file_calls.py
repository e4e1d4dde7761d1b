"""The inputs and outputs of every call of every module in one run of a file."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from htp_export.capabilities.verify.file_run import FileRun
from htp_export.capabilities.verify.pairing import leaving_tensors
from htp_export.capabilities.verify.precisions import half_precisions
from htp_export.capabilities.verify.pytorch_calls import ModuleCall
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array, ArrayStore, StoredArray
from htp_export.runtime.bound_shapes import infer_bound

__all__ = ["calls_in_file"]


def calls_in_file(run: FileRun, store: ArrayStore) -> list[ModuleCall]:
    """Return every call of every module that a file knows of, with its tensors, in the order in which they end.

    Raises:
        InputError: If ONNX Runtime cannot run the file.
    """
    tensors = list(_tensors_of_calls(run.tagged))
    known = infer_bound(run.tagged.model, {name: array.shape for name, array in run.feed.items()})
    wanted = dict.fromkeys(value for _, _, entered, back in tensors for value in (*entered.values(), *back) if value)
    arrays: dict[str, StoredArray] = {}

    def keep(name: str, array: Array) -> None:
        arrays[name] = store.keep(array)

    run.fetch({str(value.name): known.bytes_of(value) or 0 for value in wanted}, keep)
    calls, halves = [], half_precisions(run.tagged)
    for path, number, entered, back in tensors:
        outputs = tuple(arrays[str(value.name)] if value is not None else None for value in back)
        inputs = {argument: arrays[str(value.name)] for argument, value in entered.items()}
        computed_in = tuple(halves.get(str(value.name), "") if value is not None else "" for value in back)
        calls.append(ModuleCall(path, number, inputs, outputs, computed_in=computed_in))
    return calls


_CallTensors = tuple[str, int, dict[str, ir.Value], list["ir.Value | None"]]


def _tensors_of_calls(tagged: TaggedModel) -> Iterator[_CallTensors]:
    """Path, number, arguments and results of every call that a file knows of, in the order in which they end."""
    order = {value: place for place, value in enumerate(tagged.values.values())}
    calls: list[_CallTensors] = []
    for path, info in tagged.hierarchy.items():
        for number in range(max(len(tagged.signatures.get(path, ())), info.calls)):
            signature = tagged.signature(path, number)
            names = {} if signature is None else signature.inputs
            inputs = {
                arg: tagged.values[name] for arg, name in names.items() if name is not None and name in tagged.values
            }
            calls.append((path, number, inputs, _results(tagged, path, number)))
    last = [max((order.get(value, -1) for value in back if value is not None), default=-1) for *_, back in calls]
    depth = [-path.count(".") - bool(path) for path, *_ in calls]
    return iter([calls[k] for k in sorted(range(len(calls)), key=lambda k: (last[k], depth[k]))])


def _results(tagged: TaggedModel, path: str, number: int) -> list[ir.Value | None]:
    if not path:
        return list(tagged.model.graph.outputs)
    signature = tagged.signature(path, number)
    if signature is not None and all(name is None or name in tagged.values for name in signature.outputs):
        return [None if name is None else tagged.values[name] for name in signature.outputs]
    if tagged.source == "none":
        return []
    region = tagged[path]
    try:
        region = region.call(number) if region.calls > 1 else region
    except InputError:
        return []
    return list(leaving_tensors(tagged, region))
