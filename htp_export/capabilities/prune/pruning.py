"""prune(): remove elements, channels, heads, ranks or blocks of modules; and checks of plans."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal, TypeVar

import numpy as np
import onnx_ir as ir

from htp_export.alignment.origin_map import renew_map
from htp_export.capabilities.prune.activations import ActivationRules
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
from htp_export.runtime.data import Data
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
    data: Data | None = None,
    seed: int = 0,
    strict: bool = False,
) -> Pruned:
    """Remove the least important weights of modules, or elements of their outputs.

    A plan maps selectors of modules to the pruning of their regions; rules hold as in every plan,
    see `quantize`:

    - ``0.5``: half of the elements of each weight become zero
    - ``"2:4"``: in each group of 4 adjacent elements, all but 2 become zero
    - ``"channels:0.25"``: a quarter of the output channels of each weight is cut out
    - ``"heads:0.5"``: half of the attention heads are cut out
    - ``"rank:25%"``: each matrix becomes the product of two that have a quarter of its rank;
      ``"rank:16"``: rank 16
    - ``"drop"``: the module, a residual block, is removed
    - ``"activations:0.5"``: half of the elements of the module's output become zero; this holds
      for the modules that the selector itself matches. ``"0.5+activations:0.5"``: both.

    Tensors with the same channels are cut, too: weights and biases of other modules, and sizes in
    the graph. Weights that cannot be cut, or whose rank saves nothing, are unchanged: ``whole`` of
    the result has the reason for each. A rule that changes none of its weights is an error.

    Weights are the stored tensors that products multiply with, and tables that are looked up;
    biases and factors of normalizations are not. A weight that several modules use, such as a tied
    embedding, is pruned once.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        plan: Selector → the value of its rule, in order.
        output: The file to write.
        method: ``"l1"``: remove the smallest absolute values, for channels and heads on average;
            ``"random"``.
        scope: ``"local"``: the share is removed from each weight, or output of a module;
            ``"global"``: from all with the same value in the plan together. n:m patterns are always
            local.
        data: For ``activations``: inputs of some runs, on which thresholds and zeros are measured;
            as for `quantize`.
        seed: For ``"random"``: the same seed removes the same elements.
        strict: Raise an error if a weight for which the plan has channels or a rank is unchanged,
            or an output for which it has activations.

    Returns:
        The model, and sparsity and bytes by module.

    Raises:
        SelectorError: A selector cannot be read or matches no module.
        InputError: A value of the plan cannot be used, a rule names modules without weights, or all
            weights of a rule are unchanged, or any with ``strict``; the message names the node
            that prevents the first change.
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
    for name, choice, choices in (("method", method, _METHODS), ("scope", scope, _SCOPES)):
        if choice not in choices:
            raise InputError(f"{name} {choice!r}: there are {' and '.join(map(repr, choices))}")
    rules = sparsities_of(plan)
    scores = Scores(None if method == "l1" else seed)
    together = scope == "global"
    activations = ActivationRules(rules.activations, data, scores, together, strict)
    activations.check()
    tagged = read_for_change(model)
    external = has_external_data(tagged.model)
    had_map = tags.MAP in tagged.model.metadata_props
    dropped: set[str] = set()
    for selector, value in rules.weights.items():
        if value.kind == "blocks":
            dropped.update(tagged.select(selector))
    # A plan of activations alone has no rules of weights.
    wanted = Assigned[Sparsity]({}, {}, {}, {}, {}, {})
    if rules.weights or not rules.activations:
        wanted = assigned(tagged, rules.weights)
    result = _pruned(tagged, wanted, dropped, scores, activations, together=together, strict=strict)
    renew_map(result.model, had_map=had_map)
    if output is not None:
        write_model(result.model, output, True if external else None)
    return result


def _pruned(
    tagged: TaggedModel,
    wanted: Assigned[Sparsity],
    dropped: Set[str],
    scores: Scores,
    activations: ActivationRules,
    *,
    together: bool,
    strict: bool,
) -> Pruned:
    """Prune a model in place; ``dropped``: the modules that selectors name for removal."""
    bytes_before = {path: facts.weight_bytes for path, facts in _facts(tagged).items()}
    weights = weights_of(tagged)
    values = _values_of(weights, tagged, wanted)
    owners = {weight: weight.owners(tagged) or ("",) for weight in weights}
    _refuse_empty_rules(owners, wanted)
    _refuse_nan(values, owners)
    names = names_now(tagged.model)
    before = {weight: _counts(weight.value) for weight in counted(weights, "weights")}
    removed = _outermost_blocks(wanted, dropped)
    # Blocks go first, as their weights need no cut; masks follow the cut, as they have the final
    # shapes; then ranks, as factors replace the weights; outputs of modules last, as they are
    # measured with the weights that stay.
    if removed:
        tagged = remove_blocks(tagged, removed)
    left = [weight for weight in weights if is_in_model(weight.value)]
    present = {weight: values[weight] for weight in left if weight in values}

    structured = _of_kinds(present, "channels", "heads")
    cut = cut_channels(tagged, structured, scores, together=together) if structured else Cut()
    separate_names(tagged.model, names)
    elementwise = _of_kinds(present, "elements", "n:m")
    for weight, mask in _masks(elementwise, scores, together=together).items():
        _apply(weight, mask)
    matrices = _of_kinds(present, "rank")
    factors, unchanged = factorise(tagged.refresh(), matrices) if matrices else ({}, {})
    whole = {**cut.whole, **unchanged}
    _refuse_whole_weights(wanted, owners, whole, values, strict=strict)

    after = dict.fromkeys(weights, (0, 0))
    for weight in counted(left, "weights"):
        tensors = factors[weight].values if weight in factors else (weight.value,)
        after[weight] = _counts(*tensors)
    masked = activations.apply(tagged.refresh())
    counts = [(owners[weight], before[weight], after[weight]) for weight in weights]
    facts = _facts(tagged.refresh()).values()
    plan = {path: str(value) for path, value in wanted.modules.items()}
    for path, value in masked.plan.items():
        plan[path] = f"{plan[path]}+{value}" if path in plan else str(value)
    return Pruned(
        modules=pruned_modules(facts, counts, bytes_before, masked.counts),
        plan=plan,
        removed=removed,
        cut=cut.shapes,
        ranks={weight.name: pair.rank for weight, pair in factors.items()},
        whole={weight.name: reason for weight, reason in whole.items()},
        short=cut.short,
        thresholds=masked.thresholds,
        unmasked=masked.unmasked,
        model=tagged.model,
    )


def _values_of(
    weights: Iterable[Weight], tagged: TaggedModel, wanted: Assigned[V]
) -> dict[Weight, V]:
    """Weight → its value in the plan, for the weights that have one."""
    values: dict[Weight, V] = {}
    for weight in weights:
        value = value_of(weight, tagged, wanted)
        if value is not None:
            values[weight] = value
    return values


def _of_kinds(values: Mapping[Weight, Sparsity], *kinds: str) -> dict[Weight, Sparsity]:
    return {weight: value for weight, value in values.items() if value.kind in kinds}


def _outermost_blocks(wanted: Assigned[Sparsity], dropped: Set[str]) -> tuple[str, ...]:
    """The modules to remove, without the descendants of others."""
    blocks: dict[str, None] = {}
    for path, value in wanted.modules.items():
        if value.kind == "blocks" and path in dropped:
            blocks[path] = None
    outermost: list[str] = []
    for path in blocks:
        ancestors = set(tags.ancestors(path)) - {path}
        if ancestors.isdisjoint(blocks):
            outermost.append(path)
    return tuple(outermost)


def _refuse_nan(values: Mapping[Weight, Sparsity], owners: Mapping[Weight, Sequence[str]]) -> None:
    for weight, value in values.items():
        if value.kind != "blocks" and nan_in({weight.name: weight.tensor.numpy()}):
            name = f"weight {weight.name!r} of module {owners[weight][0]!r}"
            raise InputError(f"{name} has NaN, which cannot be ordered by size; replace it first")


def _counts(*values: ir.Value) -> Counts:
    arrays = [numbers_of(value).numpy() for value in values]
    size = sum(array.size for array in arrays)
    return size, size - sum(int(np.count_nonzero(array)) for array in arrays)


def _facts(tagged: TaggedModel) -> dict[str, ModuleFacts]:
    return {path: module.facts for path, module in contents_of(tagged).modules.items()}


def value_of(weight: Weight, tagged: TaggedModel, wanted: Assigned[V]) -> V | None:
    """The value of a weight in a plan; None if no rule names a module that uses it.

    Raises:
        InputError: Several modules use the weight, and their values differ.
    """
    disputed = next((use.node for use in weight.uses if use.node in wanted.disputed), None)
    if disputed is not None:
        owners = _owners(tagged, disputed)
        raise InputError(
            f"weight {weight.name!r} belongs to a node of several modules ({owners}), "
            "and the plan has different values for them"
        )
    values = {use.node: wanted.nodes[use.node] for use in weight.uses if use.node in wanted.nodes}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{_owners(tagged, node)}: {value}" for node, value in values.items())
        raise InputError(
            f"weight {weight.name!r} is shared by modules "
            f"with different values in the plan ({listed})"
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
    """Refuse a rule that changes none of its weights.

    With ``strict``, one that leaves any unchanged.
    """
    for selector, paths in reversed(list(wanted.named.items())):
        named = [weight for weight in values if not set(paths).isdisjoint(owners[weight])]
        unchanged = [weight for weight in named if weight in whole]
        if not unchanged or (len(unchanged) < len(named) and not strict):
            continue
        weight = unchanged[0]
        if values[weight].kind == "rank":
            raise RuleError(selector, f"weight {weight.name!r} keeps its rank: {whole[weight]}")
        where = f"weight {weight.name!r} of {', '.join(map(repr, owners[weight]))}"
        raise RuleError(selector, f"{where}: {whole[weight]}; the value 0 leaves a module as it is")


def _masks(
    values: Mapping[Weight, Sparsity], scores: Scores, *, together: bool
) -> dict[Weight, Mask]:
    """The mask of each weight, which sets elements to zero."""
    masks: dict[Weight, Mask] = {}
    pools: defaultdict[tuple[Sparsity, Weight | None], list[Weight]] = defaultdict(list)
    for weight, value in values.items():
        if value.kind == "n:m":
            masks[weight] = group_mask(weight, value.kept, value.group, scores)
        else:
            pools[value, None if together else weight].append(weight)
    for (value, _), pool in pools.items():
        masks.update(zip(pool, element_masks(pool, value.amount, scores), strict=True))
    return masks


def _apply(weight: Weight, mask: Mask) -> None:
    """Apply a mask to a weight and its copies; the elements are computed when they are written."""
    tensor, shape = weight.tensor, weight.shape
    for value, is_transposed in {weight.value: False, **weight.copies}.items():
        recipe = step("masked", recipe_of(value))
        if is_transposed:
            masked = changed_when_written(tensor, lambda array: mask(array).T, recipe, shape[::-1])
        else:
            masked = changed_when_written(tensor, mask, recipe)
        store(value, masked)


class PlanChecks:
    """Checks of the values of plans for modules of one model, which has no functions."""

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged
        self._rules: dict[str, Assigned[bool]] = {}
        self._weights: defaultdict[str, list[Weight]] = defaultdict(list)
        for weight in weights_of(tagged):
            paths = {""}
            for use in weight.uses:
                paths.update(tagged.index.works[use.node].modules)
            for path in paths:
                self._weights[path].append(weight)

    def why_not(self, path: str, value: Sparsity) -> str:
        """Why a module cannot be pruned by a value; empty if it can."""
        if value.kind == "activations":
            return "a search decides about weights; prune activations in a step of its own"
        try:
            if value.kind == "blocks":
                ends_of(self._tagged, path)
                return ""
            if path not in self._rules:
                self._rules[path] = assigned(self._tagged, {path or ".": True})
            wanted = self._rules[path]
            weights = list(_values_of(self._weights[path], self._tagged, wanted))
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
        """The couplings of a module's weights that can be cut; an InputError if none can."""
        couplings: list[Coupling] = []
        first_problem = ""
        for weight in self._weights[path]:
            try:
                coupling = coupling_of(self._tagged, weight, value)
            except StopError as error:
                first_problem = first_problem or f"weight {weight.name!r}: {error}"
                continue
            if coupling is not None:
                couplings.append(coupling)
        if first_problem and not couplings:
            raise InputError(first_problem)
        return couplings

    def check_coupled(self, values: Mapping[str, Set[Sparsity | None]]) -> None:
        """Refuse different shares of channels for modules that have the same channels.

        ``values``: the possible values of each module.

        Raises:
            InputError: Modules with the same channels may lose different shares of them.
        """
        shares: dict[str, set[Sparsity]] = {}
        for path, possible in values.items():
            of_channels = {value for value in possible if value and value.kind == "channels"}
            if of_channels:
                shares[path] = of_channels
        if len(set[Sparsity]().union(*shares.values())) < 2:
            return
        first_module: dict[Axis, str] = {}
        for path, of_channels in shares.items():
            for coupling in self._couplings(path, next(iter(of_channels))):
                for axis in coupling.labels:
                    other = first_module.setdefault(axis, path)
                    both = of_channels | shares[other]
                    if other != path and len(both) > 1:
                        listed = ", ".join(sorted(map(str, both)))
                        raise InputError(
                            f"modules {other!r} and {path!r} have the same channels, and may lose "
                            f"different shares of them ({listed}); give them one share"
                        )
