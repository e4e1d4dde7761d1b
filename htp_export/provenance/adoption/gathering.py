"""Gathers the evidence for `adopt`: pairs inputs, recognises weights, runs both models and compares their tensors."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.provenance.adoption.feeds import feed_original, feed_other, pair_names, simpler_feeds
from htp_export.provenance.adoption.foreign_alignment import Evidence
from htp_export.provenance.adoption.near_values import Likeness, OriginalTensors, is_distinctive
from htp_export.provenance.adoption.same_weights import OriginalWeights, SameWeight, replaced
from htp_export.provenance.adoption.stored_numbers import numbers_of, stored_numbers
from htp_export.provenance.graph_summary import NOTHING, GraphSummary
from htp_export.provenance.values import tensors_of_run
from htp_export.runtime.arrays import PORTION_BYTES, Array, ArrayStore
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import SessionSettings

__all__ = ["gather"]

Model = tuple[ir.Model, GraphSummary]

_ROUNDED = 1e-6
"""Relative error of a weight beyond which the original runs with the weight of the other file."""


def gather(before: Model, after: Model, inputs: Mapping[str, Any] | None, seed: int = 0) -> tuple[Evidence, str]:
    """What is known of the tensors of the other file, and why values were not compared, if they were not.

    Args:
        before: The original model and its summary.
        after: The other model and its summary, with names.
        inputs: Input name of the original → array; None for random ones.
        seed: Of random inputs.

    Raises:
        InputError: If ``inputs`` are given, and are not those of the original.
    """
    evidence, problems = Evidence(inputs=_inputs(before, after)), list[str]()
    same = _weights(before, after, evidence)
    try:
        feed = feed_original(before[0], inputs, seed)
    except InputError as error:
        if inputs is not None:
            raise
        return evidence, str(error)
    originals = [_with_weights_of(before, after[0], same)]
    originals += [before[0]] if originals[0] is not before[0] else []
    for original, tried in itertools.product(originals, simpler_feeds(before[0], feed)):
        try:
            _compare(original, before[1], after, tried, evidence)
        except InputError as error:
            problems.append(str(error))
        else:
            return evidence, ""
    return evidence, problems[0]


def _inputs(before: Model, after: Model) -> dict[int, int]:
    ours, theirs = (_ranks(summary) for _, summary in (after, before))
    pairs = {after[1].find(mine): before[1].find(other) for mine, other in pair_names(ours, theirs).items()}
    return {mine: other for mine, other in pairs.items() if NOTHING not in (mine, other)}


def _ranks(summary: GraphSummary) -> dict[str, int | None]:
    values = [summary.values[index] for index in summary.inputs if summary.values[index].kind == "input"]
    return {value.name: None if value.shape is None else len(value.shape) for value in values}


# --- weights ---


def _weights(before: Model, after: Model, evidence: Evidence) -> dict[str, SameWeight]:
    """Recognise the weights of the other file; return those of its initializers, by name."""
    stored = {before[1].find(str(value.name)): value for value in before[0].graph.initializers.values()}
    stored.pop(NOTHING, None)
    large = {index: value for index, value in stored.items() if numbers_of(value.const_value) is not None}
    originals = OriginalWeights({index: _loader(value) for index, value in large.items()})
    found, weights = dict[str, SameWeight](), dict[int, Likeness]()
    for values, array in stored_numbers(after[0].graph):
        same = originals.find(array)
        if same is None:
            continue
        found[str(values[0].name)] = same
        like = Likeness(same.originals, same.same_shape, len(same.blocks) > 1, same.error)
        weights.update({after[1].find(str(value.name)): like for value in values})
    weights.pop(NOTHING, None)
    evidence.weights = weights
    return found


def _loader(value: ir.Value) -> Any:
    def load() -> Array:
        array = numbers_of(value.const_value)
        assert array is not None
        return array

    return load


def _with_weights_of(before: Model, other: ir.Model, same: Mapping[str, SameWeight]) -> ir.Model:
    """The original model with the weights of the other file, as far as those are rounded.

    Both then compute the same but for the rounding of activations.
    """
    rounded = {name: entry for name, entry in same.items() if entry.error > _ROUNDED}
    if not rounded:
        return before[0]
    uses: defaultdict[int, list[tuple[SameWeight, Array]]] = defaultdict(list)
    for values, array in stored_numbers(other.graph):
        entry = rounded.get(str(values[0].name))
        if entry is not None:
            for original in entry.originals:
                uses[original].append((entry, array))
    model = before[0].clone()
    for original, entries in uses.items():
        value = model.graph.initializers[before[1].values[original].name]
        stored = numbers_of(value.const_value)
        changed = None if stored is None else replaced(stored, original, entries)
        if changed is not None and value.const_value is not None:
            value.const_value = ir.Tensor(changed, dtype=value.const_value.dtype, name=value.name)
    return model


# --- values ---


def _compare(original: ir.Model, before: GraphSummary, after: Model, feed: Mapping[str, Array], to: Evidence) -> None:
    """Run both models, and find the tensors of one among those of the other."""
    model = _exact(after[0])
    others = feed_other(model, feed)
    with ArrayStore.opened(PORTION_BYTES) as store:
        known, compared, results = OriginalTensors(store), set[int](), list[Array]()
        for index, array in tensors_of_run(original, before, feed, "the original model", PORTION_BYTES):
            known.add(index, array)
            compared.add(index)
            results += [array] if index in before.outputs else []
        outputs = [str(value.name) for value in model.graph.outputs]
        theirs = Runner(model, "the other model", SessionSettings()).run(others, outputs)
        if not known.measure(theirs.values(), results):
            raise InputError("its outputs have the numbers of no tensor of the original model")
        values, unequal = dict[int, Likeness](), set[int]()
        for index, array in tensors_of_run(model, after[1], others, "the other model", PORTION_BYTES):
            like = known.find(array)
            if like is not None:
                values[index] = like
            elif is_distinctive(array):
                unequal.add(index)
    to.values, to.unequal, to.compared = values, unequal, compared


def _exact(model: ir.Model) -> ir.Model:
    """The model without permission for its operators to compute less exactly than their inputs are."""
    copy = model.clone()
    for node in copy.graph.all_nodes():
        node.attributes.pop("accuracy_level", None)
    return copy
