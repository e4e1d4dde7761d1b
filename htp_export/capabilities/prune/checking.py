"""Whether modules can be pruned, told by the graph: no weight is changed, and few are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set

from htp_export.capabilities.prune.coupled_axes import Axis
from htp_export.capabilities.prune.coupling import Coupling, StopError
from htp_export.capabilities.prune.low_rank import why_not
from htp_export.capabilities.prune.pruning import value_of
from htp_export.capabilities.prune.residual_blocks import ends_of
from htp_export.capabilities.prune.sparsities import Sparsity
from htp_export.capabilities.prune.structured import coupling_of
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export.plans.rules import Assigned, assigned
from htp_export.weights.products import Weight, weights_of


class PlanChecks:
    """Checks of what plans say of modules of one model, which has no functions."""

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged
        self._rules: dict[str, Assigned[bool]] = {}
        self._weights: defaultdict[str, list[Weight]] = defaultdict(list)
        for weight in weights_of(tagged):
            for path in {"", *(path for use in weight.uses for path in tagged.index.works[use.node].modules)}:
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
            weights = [weight for weight in self._weights[path] if value_of(weight, self._tagged, wanted) is not None]
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

    def check_coupled(self, values: Mapping[str, Set[Sparsity]]) -> None:
        """Refuse different shares of channels for modules that have the same channels (`InputError`).

        ``values`` are what may be removed of each module.
        """
        shares = {path: {value for value in each if value.kind == "channels"} for path, each in values.items()}
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
