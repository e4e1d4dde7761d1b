"""prune(): weights of modules become sparse or smaller; and whether they can, told by the graph."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.prune.coupled_axes import Axis
from htp_export.capabilities.prune.coupling import Coupling, StopError
from htp_export.capabilities.prune.low_rank import factorise, why_not
from htp_export.capabilities.prune.masks import Mask, Scores, element_masks, group_mask
from htp_export.capabilities.prune.pruned import Counts, Pruned, pruned_modules
from htp_export.capabilities.prune.residual_blocks import ends_of, remove_blocks
from htp_export.capabilities.prune.sparsities import Sparsity, sparsities_of
from htp_export.capabilities.prune.structured import Cut, coupling_of, cut_channels
from htp_export.editing.flattening import read_for_change
from htp_export.errors import InputError, RuleError
from htp_export.files.model_files import has_external_data, write_model
from htp_export.files.targets import check_target
from htp_export.format import tags
from htp_export.format.recipes import step
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import ModuleFacts, contents_of
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.model.tensor_names import names_now, separate_names
from htp_export.plans.rules import Assigned, assigned
from htp_export.process.argument_types import MOST_SEED, check_whole
from htp_export.process.progress import counted
from htp_export.runtime.arrays import nan_in
from htp_export.weights.products import Weight, changed_when_written, weights_of
from htp_export.weights.storing import is_in_model, numbers_of, store

V = TypeVar("V")
_METHODS = ("l1", "random")
_SCOPES = ("local", "global")


@names_model_faults("model")
def prune(
    model: ModelSource,
    plan: Mapping[str, Any],
    output: str | os.PathLike[str] | None = None,
    *,
    method: Literal["l1", "random"] = "l1",
    scope: Literal["local", "global"] = "local",
    seed: int = 0,
    strict: bool = False,
) -> Pruned:
    """Remove the least important weights of modules.

    A plan has selectors of modules and what is removed in their regions; rules hold as in every
    plan, see `quantize`:

    ==================
    =============================================================================== ``0.5``
    half of the elements of each weight become zero ``"2:4"``           in each group of 4
    neighbours, all but 2 become zero ``"channels:0.25"``  a quarter of the output channels of each
    weight is cut out ``"heads:0.5"``      half of the attention heads are cut out ``"rank:25%"``
    each matrix becomes the product of two that have a quarter of its rank; ``"rank:16"``: rank 16
    ``"drop"``          the module, a residual block, is removed ==================
    ===============================================================================

    What has the same channels is cut, too: weights and biases of other modules, and sizes in the
    graph. Weights that cannot be cut, or whose rank saves nothing, stay as they are: ``whole`` of
    the result has the reason for each. A rule of which every weight stays is an error.

    Weights are the stored tensors that products multiply with, and tables that are looked up; no
    biases, and no factors of normalisations. A weight that several modules read, such as a tied
    embedding, is pruned once.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        plan: Selector → what is removed, in order.
        output: The file to write.
        method: ``"l1"``: what has the smallest absolute values, for channels and heads on average;
            ``"random"``.
        scope: ``"local"``: the share is removed from each weight; ``"global"``: from all weights
            with the same value in the plan together. n:m patterns are always local.
        seed: For ``"random"``: the same seed removes the same elements.
        strict: Raise an error if any weight of which the plan gives channels or a rank stays as it
            is.

    Returns:
        The model, and sparsity and bytes by module.

    Raises:
        SelectorError: A selector cannot be read or matches no module.
        InputError: A value of the plan cannot be used, a rule names modules without weights, or all
            weights of a rule stay as they are, or any with ``strict``; the message has the node
            that stops the first one.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> exported = htp_export.export(net, (torch.randn(2, 8),), verbose=False)
        >>> result = htp_export.prune(exported, {"**": 0.5, "2": "2:4"})
        >>> [(path, module.zeros_after) for path, module in result.modules.items()]
        [('', 40), ('0', 32), ('1', 0), ('2', 8)]
    """
    check_target(output)
    check_whole("seed", seed, 0, MOST_SEED)
    for name, given, known in (("method", method, _METHODS), ("scope", scope, _SCOPES)):
        if given not in known:
            raise InputError(f"{name} {given!r}: there are {' and '.join(map(repr, known))}")
    rules = sparsities_of(plan)
    tagged = read_for_change(model)
    external = has_external_data(tagged.model)
    scores = Scores(None if method == "l1" else seed)
    dropped = {
        path
        for selector, value in rules.items()
        if value.kind == "blocks"
        for path in tagged.select(selector)
    }
    result = _pruned(
        tagged, assigned(tagged, rules), dropped, scores, together=scope == "global", strict=strict
    )
    if output is not None:
        write_model(result.model, output, True if external else None)
    return result


def _pruned(
    tagged: TaggedModel,
    wanted: Assigned[Sparsity],
    dropped: Set[str],
    scores: Scores,
    *,
    together: bool,
    strict: bool,
) -> Pruned:
    """Prune a model in place; of the modules that are removed, those that rules name are given."""
    bytes_before = {path: facts.weight_bytes for path, facts in _facts(tagged).items()}
    weights = weights_of(tagged)
    values = {
        weight: value
        for weight in weights
        if (value := value_of(weight, tagged, wanted)) is not None
    }
    owners = {weight: weight.owners(tagged) or ("",) for weight in weights}
    _refuse_empty_rules(owners, wanted)
    for weight, value in values.items():
        if value.kind != "blocks" and nan_in({weight.name: weight.tensor.numpy()}):
            raise InputError(
                f"weight {weight.name!r} of module {owners[weight][0]!r} has NaN, which has no size"
            )
    names = names_now(tagged.model)
    before = {weight: _counts(weight.value) for weight in counted(weights, "weights")}
    blocks = [
        path for path, value in wanted.modules.items() if value.kind == "blocks" and path in dropped
    ]
    removed = tuple(
        path
        for path in blocks
        if not any(up != path and up in blocks for up in tags.ancestors(path))
    )
    if removed:
        tagged = remove_blocks(tagged, removed)
    left = {weight for weight in weights if is_in_model(weight.value)}

    def those(*kinds: str) -> dict[Weight, Sparsity]:
        return {
            weight: value
            for weight, value in values.items()
            if value.kind in kinds and weight in left
        }

    structured, matrices = those("channels", "heads"), those("rank")
    cut = cut_channels(tagged, structured, scores, together=together) if structured else Cut()
    separate_names(tagged.model, names)
    for weight, mask in _masks(those("elements", "n:m"), scores, together=together).items():
        _apply(weight, mask)
    factors, full = factorise(tagged.refresh(), matrices) if matrices else ({}, {})
    whole = {**cut.whole, **full}
    _refuse_whole_weights(wanted, owners, whole, values, strict=strict)
    now = {
        weight: factors[weight].values if weight in factors else (weight.value,) for weight in left
    }
    after = {weight: _counts(*now[weight]) for weight in counted(list(left), "weights")}
    counts = [(owners[weight], before[weight], after.get(weight, (0, 0))) for weight in weights]
    rows = pruned_modules(_facts(tagged.refresh()).values(), counts, bytes_before)
    said = {path: str(value) for path, value in wanted.modules.items()}
    ranks = {weight.name: found.rank for weight, found in factors.items()}
    kept = {weight.name: reason for weight, reason in whole.items()}
    return Pruned(rows, said, removed, cut.shapes, ranks, kept, cut.short, model=tagged.model)


def _counts(*values: ir.Value) -> Counts:
    arrays = [numbers_of(value).numpy() for value in values]
    size = sum(array.size for array in arrays)
    return size, size - sum(int(np.count_nonzero(array)) for array in arrays)


def _facts(tagged: TaggedModel) -> dict[str, ModuleFacts]:
    return {path: module.facts for path, module in contents_of(tagged).modules.items()}


def value_of(weight: Weight, tagged: TaggedModel, wanted: Assigned[V]) -> V | None:
    """What the plan says of a weight; None if no rule names a module that reads it."""
    disputed = next((use.node for use in weight.uses if use.node in wanted.disputed), None)
    if disputed is not None:
        raise InputError(
            f"weight {weight.name!r} does the work of several modules ({_owners(tagged, disputed)}), "
            "and the plan does not say the same of all of them"
        )
    values = {use.node: wanted.nodes[use.node] for use in weight.uses if use.node in wanted.nodes}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{_owners(tagged, node)}: {value}" for node, value in values.items())
        raise InputError(
            f"weight {weight.name!r} is shared by modules with different values in the plan ({listed})"
        )
    return next(iter(values.values()), None)


def _owners(tagged: TaggedModel, node: ir.Node) -> str:
    return ", ".join(repr(path) for path in tagged.owners_of(node)) or "no module"


def _refuse_empty_rules(owners: Mapping[Weight, Sequence[str]], wanted: Assigned[Sparsity]) -> None:
    prunable = {path for paths in owners.values() for path in paths}
    prunable |= {path for path, value in wanted.modules.items() if value.kind == "blocks"}
    for selector, paths in wanted.named.items():
        if prunable.isdisjoint(paths):
            raise RuleError(
                selector, "the modules that it names have no weights that can be pruned"
            )


def _refuse_whole_weights(
    wanted: Assigned[Sparsity],
    owners: Mapping[Weight, Sequence[str]],
    whole: Mapping[Weight, str],
    values: Mapping[Weight, Sparsity],
    *,
    strict: bool,
) -> None:
    """Refuse a rule of which every weight stays as it is; with ``strict``, of which any does."""
    for selector, paths in reversed(list(wanted.named.items())):
        named = [weight for weight in values if not set(paths).isdisjoint(owners[weight])]
        stay = [weight for weight in named if weight in whole]
        if stay and (strict or len(stay) == len(named)):
            weight = stay[0]
            if values[weight].kind == "rank":
                raise RuleError(selector, f"weight {weight.name!r} keeps its rank: {whole[weight]}")
            where = f"weight {weight.name!r} of {', '.join(map(repr, owners[weight]))}"
            raise RuleError(
                selector, f"{where}: {whole[weight]}; the value 0 leaves a module as it is"
            )


def _masks(
    values: Mapping[Weight, Sparsity], scores: Scores, *, together: bool
) -> dict[Weight, Mask]:
    """What sets the elements of each weight to zero."""
    masks: dict[Weight, Mask] = {}
    alike: dict[Sparsity, list[Weight]] = {}
    for weight, value in values.items():
        if value.kind == "n:m":
            masks[weight] = group_mask(weight, value.kept, value.group, scores)
        else:
            alike.setdefault(value, []).append(weight)
    for value, weights in alike.items():
        for chosen in [weights] if together else [[weight] for weight in weights]:
            masks.update(zip(chosen, element_masks(chosen, value.amount, scores), strict=True))
    return masks


def _apply(weight: Weight, mask: Mask) -> None:
    """Let a weight and its copies have the numbers that a mask leaves; they are computed when they are written."""
    tensor, shape = weight.tensor, weight.shape
    for value, is_turned in {weight.value: False, **weight.copies}.items():
        recipe = step("masked", recipe_of(value))
        turned = changed_when_written(tensor, lambda array: mask(array).T, recipe, shape[::-1])
        store(value, turned if is_turned else changed_when_written(tensor, mask, recipe))


class PlanChecks:
    """Checks of what plans say of modules of one model, which has no functions."""

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged
        self._rules: dict[str, Assigned[bool]] = {}
        self._weights: defaultdict[str, list[Weight]] = defaultdict(list)
        for weight in weights_of(tagged):
            for path in {
                "",
                *(path for use in weight.uses for path in tagged.index.works[use.node].modules),
            }:
                self._weights[path].append(weight)

    def why_not(self, path: str, value: Sparsity) -> str:
        """Why a module cannot be pruned so; nothing if it can."""
        try:
            if value.kind == "blocks":
                ends_of(self._tagged, path)
                return ""
            if path not in self._rules:
                self._rules[path] = assigned(self._tagged, {path or ".": True})
            wanted = self._rules[path]
            weights = [
                weight
                for weight in self._weights[path]
                if value_of(weight, self._tagged, wanted) is not None
            ]
            if not weights:
                return "it has no weights that can be pruned"
            if value.kind == "rank":
                reasons = [why_not(self._tagged, weight, value) for weight in weights]
                return reasons[0] if all(reasons) else ""
            if value.kind in ("channels", "heads") and not self._couplings(path, value):
                return "it has no attention heads to cut"
        except InputError as error:
            return str(error)
        return ""

    def _couplings(self, path: str, value: Sparsity) -> list[Coupling]:
        """Everything that has the channels of a module's weights that can be cut; an error if none of them can."""
        found, stopped = [], ""
        for weight in self._weights[path]:
            try:
                coupling = coupling_of(self._tagged, weight, value)
            except StopError as error:
                stopped = stopped or f"weight {weight.name!r}: {error}"
            else:
                found += [coupling] if coupling is not None else []
        if stopped and not found:
            raise InputError(stopped)
        return found

    def check_coupled(self, values: Mapping[str, Set[Sparsity | None]]) -> None:
        """Refuse different shares of channels for modules that have the same channels (`InputError`).

        ``values`` are what may be removed of each module.
        """
        shares = {
            path: {value for value in each if value and value.kind == "channels"}
            for path, each in values.items()
        }
        shares = {path: each for path, each in shares.items() if each}
        if len(set[Sparsity]().union(*shares.values())) < 2:
            return
        first: dict[Axis, str] = {}
        for path, each in shares.items():
            for coupling in self._couplings(path, next(iter(each))):
                for axis in coupling.labels:
                    other = first.setdefault(axis, path)
                    if other != path and len(each | shares[other]) > 1:
                        listed = ", ".join(sorted(map(str, each | shares[other])))
                        raise InputError(
                            f"modules {other!r} and {path!r} have the same channels, and may lose different shares of "
                            f"them ({listed}); give them one share"
                        )
