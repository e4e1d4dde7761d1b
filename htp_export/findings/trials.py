"""Whether passes change what they are for: they are run on a copy, and what is still there is not fixed."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from htp_export.findings.finding import KINDS, Finding
from htp_export.model.tagged import TaggedModel, load
from htp_export.passes.optimizing import optimize
from htp_export.passes.registry import Level, PassInfo, choose, find

__all__ = ["tried"]

_log = logging.getLogger(__name__)

Look = Callable[[TaggedModel], Sequence[Finding]]


def tried(tagged: TaggedModel, findings: Sequence[Finding], look: Look) -> tuple[Finding, ...]:
    """The findings, each with the pass that does change it, or why the one for its kind does not.

    Args:
        tagged: The model. It is not changed.
        findings: What was found, with what its pattern says of its pass.
        look: Finds patterns in a model.
    """
    trials: dict[tuple[str, ...], _Trial] = {}
    settled = []
    for finding in findings:
        name = KINDS[finding.kind].fixed_by
        if name is None:
            settled.append(finding)
            continue
        info = find(name)
        default = tuple(each.name for each in choose("default", info.level))
        passes = default if name in default else (*default, name)
        trial = trials.setdefault(passes, _Trial(tagged, look, passes, info.level))
        settled.append(_settled(finding, info, trial))
    return tuple(settled)


class _Trial:
    """One optimisation of a copy, run when something is first asked of it.

    Args:
        tagged: The model.
        look: Finds patterns in a model.
        passes: What to run.
        level: What they may do.
    """

    def __init__(self, tagged: TaggedModel, look: Look, passes: Sequence[str], level: Level) -> None:
        self._tagged, self._look, self._passes, self._level = tagged, look, passes, level

    def leaves(self, finding: Finding) -> bool:
        """Whether a finding is there afterwards."""
        return not self._names(finding).isdisjoint(self._left[finding.kind])

    @property
    def problem(self) -> str:
        """Why the passes could not be run; ``""`` where they could."""
        return self._outcome[1]

    @property
    def _left(self) -> dict[str, set[str]]:
        return self._outcome[0]

    @cached_property
    def _outcome(self) -> tuple[dict[str, set[str]], str]:
        left: defaultdict[str, set[str]] = defaultdict(set)
        try:
            result = optimize(self._tagged.model, passes=self._passes, level=self._level)
            found = self._look(load(result.model))
        except Exception as error:  # rules of other packages, and kernels, raise whatever they like
            _log.debug("passes %s could not be tried", self._passes, exc_info=True)
            return left, f"{type(error).__name__}: {error}".splitlines()[0]
        for finding in found:
            left[finding.kind] |= self._names(finding)
        return left, ""

    @staticmethod
    def _names(finding: Finding) -> set[str]:
        return {*finding.nodes, *finding.tensors}


def _settled(finding: Finding, info: PassInfo, trial: _Trial) -> Finding:
    """A finding with what became of it."""
    if trial.problem:
        told = None if finding.fixed_by is None else f"could not be tried: {trial.problem}"
        return finding if told is None else replace(finding, level=info.level, why=told)
    if not trial.leaves(finding):
        return replace(finding, fixed_by=info.name, level=info.level, why="")
    generic = f"{info.name} leaves it: it does not meet the conditions of the pass"
    return replace(finding, fixed_by=None, why=finding.why or generic)
