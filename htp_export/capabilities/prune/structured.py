"""Channels and attention heads that are cut out: which ones, and everything that has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.prune.coupled_axes import Axis
from htp_export.capabilities.prune.coupling import Coupling, StopError, couple
from htp_export.capabilities.prune.cut_axes import ParameterShape, change_parameters, cut_axes
from htp_export.capabilities.prune.masks import Scores
from htp_export.capabilities.prune.sparsities import Sparsity
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard
from htp_export.weights.parameter_places import ParameterPlaces, WeightSources
from htp_export.weights.products import Weight
from htp_export.weights.storing import numbers_of


@dataclass(frozen=True)
class Cut:
    """What was cut out of a model.

    Attributes:
        shapes: Weight → its shape before and after, for all initializers that became smaller.
        short: Weight → what stays, where the share cannot be reached.
        whole: Weight → why none of its channels can be cut.
    """

    shapes: Mapping[str, tuple[ParameterShape, ParameterShape]] = field(default_factory=dict)
    short: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[Weight, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Cuttable:
    """Channels that are chosen among: those of weights coupled with ``weight``, in groups that can be cut.

    ``scores``: label → mean score of the elements that compute its channels; ``gone``: the labels
    that are cut.
    """

    weight: Weight
    value: Sparsity
    coupling: Coupling
    scores: Mapping[int, float]
    gone: set[int] = field(default_factory=set)


def cut_channels(
    tagged: TaggedModel, values: Mapping[Weight, Sparsity], scores: Scores, *, together: bool
) -> Cut:
    """Cut the least important channels and heads out of a model, in place, of all weights that can be cut.

    ``together``, the shares are of all channels with the same value.
    """
    found, whole = _cuttable(tagged, values, scores)
    for value in dict.fromkeys(values.values()):
        if value.kind == "heads" and not any(each.value == value for each in found):
            names = ", ".join(
                repr(weight.name) for weight, other in values.items() if other == value
            )
            raise InputError(
                f"there are no attention heads to cut: no channels of {names} are split into heads"
            )
    pools: defaultdict[Sparsity | Weight, list[_Cuttable]] = defaultdict(list)
    for each in found:
        pools[each.value if together else each.weight].append(each)
    short = {pool[0].weight.name: problem for pool in pools.values() if (problem := _choose(pool))}
    kept: dict[Axis, Array] = {}
    for each in found:
        for axis in each.coupling.labels:
            stays = ~np.isin(each.coupling.roots(axis), list(each.gone))
            kept[axis] = kept[axis] & stays if axis in kept else stays
    kept = {axis: stays for axis, stays in kept.items() if not stays.all()}
    cut = {value for value, _ in kept}
    constants = (
        value for node in tagged.nodes if is_standard(node, "Constant") for value in node.outputs
    )
    weights = [
        value for value in (*tagged.model.graph.initializers.values(), *constants) if value in cut
    ]
    before, places = (
        {value: _shape(value) for value in weights},
        ParameterPlaces(tagged, WeightSources(tagged)),
    )
    cut_axes(tagged, kept)
    change_parameters(
        tagged, places, {value: (before[value], {"": _shape(value)}) for value in weights}
    )
    return Cut({str(value.name): (before[value], _shape(value)) for value in weights}, short, whole)


def _choose(pool: Sequence[_Cuttable]) -> str:
    """Choose the groups with the smallest scores, one of each axis stays; and say what stays beyond the plan."""
    value, total = pool[0].value, sum(len(each.coupling.roots_of_all) for each in pool)
    wanted = left = round(value.amount * total)
    ordered = sorted(
        (each.scores[group], at, group)
        for at, each in enumerate(pool)
        for group in each.coupling.groups
    )
    for _, at, group in ordered:
        each = pool[at]
        empty = (axis <= each.gone | {group} for axis in each.coupling.axes if group in axis)
        if left and not any(empty):
            each.gone.add(group)
            left -= 1
    stays = total - wanted + left
    return (
        f"{value} leaves {stays} of {total} {value.kind}, as one of each has to stay"
        if left
        else ""
    )


def _shape(value: ir.Value) -> ParameterShape:
    return tuple(numbers_of(value).shape.numpy())


def _cuttable(
    tagged: TaggedModel, values: Mapping[Weight, Sparsity], scores: Scores
) -> tuple[list[_Cuttable], dict[Weight, str]]:
    """Everything that has the channels of the weights, each channel once; and why those of other weights stay."""
    found: list[_Cuttable] = []
    whole: dict[Weight, str] = {}
    for weight in counted(list(values), "weights"):
        value, seed = values[weight], (weight.value, weight.uses[0].channels)
        known = next((each for each in found if seed in each.coupling.labels), None)
        if known is not None:
            if known.value != value and "heads" not in (known.value.kind, value.kind):
                problem = f"{value} of channels of which the plan also says {known.value}"
                raise InputError(f"weight {weight.name!r}: {problem}")
            continue
        try:
            coupling = coupling_of(tagged, weight, value)
        except StopError as error:
            whole[weight] = str(error)
            continue
        if coupling is not None:
            alike = [other for other, given in values.items() if given == value]
            group_scores = _group_scores(coupling, alike, weight, scores)
            found.append(_Cuttable(weight, value, coupling, group_scores))
    return found, whole


def coupling_of(tagged: TaggedModel, weight: Weight, value: Sparsity) -> Coupling | None:
    """Everything that has the channels of a weight; None if heads are to be cut and they are of no heads.

    Raises:
        StopError: Its channels cannot be cut.
    """
    try:
        coupling = couple(
            tagged, (weight.value, weight.uses[0].channels), heads=value.kind == "heads"
        )
    except StopError:
        # the layer behind the heads, such as the projection of the results
        if value.kind == "heads":
            return None
        raise
    return None if value.kind == "heads" and not coupling.is_joined else coupling


def _group_scores(
    coupling: Coupling, weights: Iterable[Weight], seed: Weight, scores: Scores
) -> dict[int, float]:
    random = scores.generator(seed)
    if random is not None:
        return dict(zip(coupling.groups, random.random(len(coupling.groups)).tolist(), strict=True))
    sums = dict.fromkeys(coupling.groups, 0.0)
    counts = dict.fromkeys(coupling.groups, 0)
    for weight in weights:
        axis = weight.uses[0].channels
        if (weight.value, axis) not in coupling.labels:
            continue
        array = np.abs(np.moveaxis(weight.tensor.numpy(), axis, 0).astype(np.float32))
        for root, channel in zip(coupling.roots((weight.value, axis)).tolist(), array, strict=True):
            if root in sums:
                sums[root] += float(channel.sum(dtype=np.float64))
                counts[root] += channel.size
    return {root: sums[root] / max(counts[root], 1) for root in sums}
