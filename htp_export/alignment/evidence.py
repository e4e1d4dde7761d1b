"""Evidence of equal tensors in two models: contents of weights, and values when both models run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.alignment.alignment import AlignmentEvidence
from htp_export.alignment.graph_summary import NOTHING, GraphSummary
from htp_export.alignment.stored_weights import WeightNumbers, weight_numbers
from htp_export.alignment.unnamed_alignment import input_pairs
from htp_export.alignment.weight_similarity import (
    NumericMatch,
    Originals,
    is_distinctive,
    largest_error,
    relative_error,
    transposed,
)
from htp_export.errors import FileError, InputError
from htp_export.model.hashes import array_hash
from htp_export.runtime.arrays import PORTION_BYTES, Array, ArrayStore
from htp_export.runtime.carried_inputs import feed_original, feed_other, simpler_feeds
from htp_export.runtime.inputs import infer_bound
from htp_export.runtime.runner import Runner, portions
from htp_export.runtime.settings import DEFAULTS, RunSettings
from htp_export.shapes.operator_kinds import base_op

Model: TypeAlias = tuple[ir.Model, GraphSummary]
_Use: TypeAlias = tuple[NumericMatch, Callable[[], Array]]

_ROUNDED = 1e-6
"""Relative error beyond which the original runs with the weight of the other model.

Below it, the weights differ in the last bits of float32: they change no values by more than kernels
do.
"""

# operators whose outputs are sequences or optional values, which are not compared
_NO_TENSORS = ("Sequence", "SplitToSequence", "Optional")


def weights_then_values(
    before: Model, after: Model, settings: RunSettings
) -> Iterator[tuple[AlignmentEvidence, str]]:
    """Yield the evidence of weights, and then that of weights and values.

    Each with the reason why values were not compared, or ``""``. The original runs with the weights
    of the other model first: then both values differ less.

    Args:
        before: The original.
        after: The other model.
        settings: The inputs of the original: those of one run, or random ones.

    Raises:
        InputError: If the data are not the inputs of the original.
    """
    feed, problems = dict[str, Array](), list[str]()
    try:
        feed = feed_original(before[0], settings)
    except InputError as error:
        if settings.data is not None:
            raise
        problems.append(str(error))
    evidence = AlignmentEvidence(inputs=input_pairs(before[1], after[1]))
    evidence.weights, matches = _match_weights(before, after)
    yield evidence, ""
    if problems:
        yield evidence, problems[0]
        return
    originals = dict.fromkeys((_with_weights_of(before, matches), before[0]))
    other = _without_inexact_kernels(after[0])
    names = "the original model", "the other model"
    for original, tried in itertools.product(originals, simpler_feeds(before[0], feed)):
        try:
            feeds = tried, feed_other(other, tried)
            compared = _compare_values((original, before[1]), (other, after[1]), feeds, names)
        except (FileError, InputError) as error:
            problems.append(str(error))
        else:
            yield replace(compared, inputs=evidence.inputs, weights=evidence.weights), ""
            return
    yield evidence, problems[0]


# --- weights ---


def renamed_weights(before: Model, after: Model) -> dict[int, NumericMatch]:
    """Renamed weight → original weight with the same contents.

    Only large weights are read, and only if both models have weights of the same type and shape
    whose names the other model does not have.
    """
    originals, results = _unnamed(before, after), _unnamed(after, before)
    found: dict[int, NumericMatch] = {}
    for kind in originals.keys() & results.keys():
        by_content = {_content(before, index): index for index in reversed(originals[kind])}
        for index in results[kind]:
            content = _content(after, index)
            if content is not None and content in by_content:
                found[index] = NumericMatch((by_content[content],))
    return found


def _unnamed(own: Model, other: Model) -> dict[object, list[int]]:
    """Type and shape → the large weights of the main graph whose names the other model does not have."""
    (model, summary), (_, others) = own, other
    unnamed = defaultdict[object, list[int]](list)
    for index, value in enumerate(summary.values):
        is_large = value.kind == "initializer" and not value.content and not value.scope
        is_stored = value.name in model.graph.initializers
        if is_large and is_stored and value.name not in others.by_name:
            unnamed[value.dtype, value.shape].append(index)
    return unnamed


def _content(own: Model, index: int) -> bytes | None:
    """The hash of a weight's contents; None if its data file is gone."""
    model, summary = own
    tensor = model.graph.initializers[summary.values[index].name].const_value
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return None
    try:
        return array_hash(np.asarray(tensor.numpy()))
    except (FileError, OSError):
        return None


def _match_weights(
    before: Model, after: Model
) -> tuple[dict[int, NumericMatch], list[tuple[WeightNumbers, NumericMatch]]]:
    """Find the originals of the other model's weights.

    Returns:
        The matches by tensor, and the same by weight as it is stored.
    """
    originals, stored = Originals(weights=True), dict[int, Sequence[int]]()
    for weight in weight_numbers(before[0].graph):
        indices = _indices_of(before[1], weight)
        if NOTHING in indices:
            continue
        # A quantized original is identified by its dequantized numbers, the last of its values.
        stored[indices[-1]] = indices
        with contextlib.suppress(FileError, OSError):  # its data file is gone
            originals.add(indices[-1], weight.load(), weight.load)
    matches = list[tuple[WeightNumbers, NumericMatch]]()
    by_tensor = dict[int, NumericMatch]()
    for weight in weight_numbers(after[0].graph):
        match = None
        with contextlib.suppress(FileError, OSError):
            match = originals.find(weight.load())
        if match is None:
            continue
        matches.append((weight, match))
        indices = _indices_of(after[1], weight)
        for position, index in enumerate(indices):
            equal = list[int]()
            for original in match.originals:
                # Levels are matched with levels, and dequantized numbers with such numbers.
                same_format = len(stored[original]) == len(indices)
                equal.append(stored[original][position] if same_format else original)
            by_tensor[index] = replace(match, originals=tuple(equal))
    by_tensor.pop(NOTHING, None)
    return by_tensor, matches


def _indices_of(summary: GraphSummary, weight: WeightNumbers) -> list[int]:
    """The values of a weight in a summary; `NOTHING` for one that is not in it."""
    return [summary.find(str(value.name)) for value in weight.values]


def _with_weights_of(
    before: Model, matches: Iterable[tuple[WeightNumbers, NumericMatch]]
) -> ir.Model:
    """The original with the rounded weights of the other model: only activations differ then."""
    uses: defaultdict[int, list[_Use]] = defaultdict(list)
    for weight, match in matches:
        if match.error > _ROUNDED:
            for original in match.originals:
                uses[original].append((match, weight.load))
    if not uses:
        return before[0]
    plain = dict[int, WeightNumbers]()
    for weight in weight_numbers(before[0].graph):
        if weight.plain:
            plain[before[1].find(str(weight.values[0].name))] = weight
    model = before[0].clone()
    for original, entries in uses.items():
        if original not in plain:
            continue
        changed = rounded_weight(plain[original].load(), original, entries)
        if changed is not None:
            value = model.graph.initializers[before[1].values[original].name]
            assert value.dtype is not None
            array = changed.astype(value.dtype.numpy())
            value.const_value = ir.Tensor(array, dtype=value.dtype, name=value.name)
    return model


def rounded_weight(original: Array, index: int, uses: Iterable[_Use]) -> Array | None:
    """An original weight with the rounded numbers of the other model; None if some of them are missing.

    Args:
        original: The weight.
        index: Its index in the original's summary.
        uses: The tensors of the other model that have its numbers, or parts of them.
    """
    # whether transposed → the numbers that are known so far; NaN for the others
    filled: dict[bool, Array] = {}
    for match, load in uses:
        array = load()
        if not match.parts:
            return _unscaled(original, array, match)
        for part in match.parts:
            if part.original != index:
                continue
            shape = transposed(original, part.transposed).shape
            numbers = filled.setdefault(part.transposed, np.full(shape, np.nan, np.float32))
            before = (slice(None),) * part.axis
            numbers[(*before, slice(*part.of))] = array[(*before, slice(*part.place))]
    for is_transposed, numbers in filled.items():
        if not np.isnan(numbers).any():
            return transposed(numbers, is_transposed)
    return None


def _unscaled(original: Array, array: Array, match: NumericMatch) -> Array:
    """A whole weight of the other model with the scale and layout of the original."""
    numbers = (array.astype(np.float32) - match.offset) / match.scale
    layouts = []
    if match.same_shape or array.shape != original.shape[::-1]:
        layouts.append(numbers.reshape(original.shape))
    if numbers.T.shape == original.shape:
        layouts.append(numbers.T)
    return min(layouts, key=lambda layout: relative_error(layout, original))


# --- values ---


def _compare_values(
    before: Model,
    after: Model,
    feeds: tuple[Mapping[str, Array], Mapping[str, Array]],
    names: tuple[str, str],
) -> AlignmentEvidence:
    """Run both models, and find the tensors of one in the other, within the error of the outputs."""
    evidence, summary = AlignmentEvidence(), before[1]
    values, unequal = dict[int, NumericMatch](), set[int]()
    compared, idle = set[int](), dict[int, int]()
    with ArrayStore.opened(PORTION_BYTES) as store:
        originals, results = Originals(), list[Array]()
        for index, array in _tensors_of_run(*before, feeds[0], names[0]):
            held = store.keep(array)
            same = originals.add(index, array, functools.partial(getattr, held, "array"))
            maker = summary.maker[index]
            inputs = summary.nodes[maker].inputs if maker != NOTHING else ()
            returned = [value for value in same if value in inputs]
            if returned:
                idle[maker] = returned[0]
            compared.add(index)
            if index in summary.outputs:
                results.append(array)
        outputs = [str(value.name) for value in after[0].graph.outputs]
        theirs = Runner(after[0], names[1], DEFAULTS).run(feeds[1], outputs)
        pairs = [(array, results) for array in theirs.values()]
        originals.tolerance = largest_error(pairs, originals.find)
        if math.isinf(originals.tolerance):
            raise InputError("its outputs have the numbers of no tensor of the original model")
        for index, array in _tensors_of_run(*after, feeds[1], names[1]):
            match = originals.find(array)
            if match is not None:
                values[index] = match
            elif is_distinctive(array):
                unequal.add(index)
    evidence.values, evidence.unequal = values, unequal
    evidence.compared, evidence.idle = compared, idle
    return evidence


def _tensors_of_run(
    model: ir.Model, summary: GraphSummary, feed: Mapping[str, Array], name: str
) -> Iterator[tuple[int, Array]]:
    """Run a model, and yield its tensors that depend on inputs, each once, with their indices."""
    computed = list[str]()
    for index, value in enumerate(summary.values):
        if value.scope or not value.name or not summary.live[index]:
            continue
        if value.kind == "input":
            yield index, feed[value.name]
        elif value.kind == "node":
            op = base_op(summary.nodes[summary.maker[index]].op)
            if not op.startswith(_NO_TENSORS):
                computed.append(value.name)
    expected = _expected_bytes(model, feed, computed)
    runner = Runner(model, name, DEFAULTS)
    for wanted in portions(expected, PORTION_BYTES):
        arrays = runner.run(feed, wanted)
        for tensor in wanted:
            yield summary.find(tensor), arrays.pop(tensor)


def _expected_bytes(
    model: ir.Model, feed: Mapping[str, Array], tensors: Iterable[str]
) -> dict[str, int]:
    """Tensor → its size in a run; one of unknown size counts as the largest known one."""
    shapes = infer_bound(model, {name: array.shape for name, array in feed.items()})
    bytes_of = dict[str | None, int | None]()
    for node in model.graph:
        for value in node.outputs:
            bytes_of[value.name] = shapes.bytes_of(value)
    sizes = {tensor: bytes_of.get(tensor) for tensor in tensors}
    largest = max((size for size in sizes.values() if size is not None), default=0)
    return {tensor: largest if size is None else size for tensor, size in sizes.items()}


def _without_inexact_kernels(model: ir.Model) -> ir.Model:
    """A copy whose operators may not compute with less precision than their inputs have."""
    copy = model.clone()
    for node in copy.graph.all_nodes():
        node.attributes.pop("accuracy_level", None)
    return copy
