"""Budgets: the most time that modules may take."""

from __future__ import annotations

import re
from collections.abc import Mapping

from htp_export.errors import InputError
from htp_export.format.selectors import select

__all__ = ["budgets_by_module"]

_LIMIT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs|%)")
_MILLISECONDS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "µs": 1e-3}


def budgets_by_module(
    budgets: Mapping[str, str | float], classes: Mapping[str, str], whole_ms: float = 0.0
) -> dict[str, float]:
    """Module path → its budget in ms; of several that name a module, the last one.

    Args:
        budgets: Selector → a number of ms, or a text: ``5ms``, or ``20%`` of ``whole_ms``.
        classes: Module path → class, of all modules.
        whole_ms: Time of the whole model.

    Raises:
        InputError: If a budget is neither a time nor a share.
        SelectorError: If a selector cannot be read or matches no module.

    Examples:
        >>> budgets_by_module({"*": "5ms", "b": "50%"}, {"": "Net", "a": "Linear", "b": "Linear"}, 8.0)
        {'a': 5.0, 'b': 4.0}
    """
    return {
        path: limit
        for selector, budget in budgets.items()
        for limit in [_limit_ms(selector, budget, whole_ms)]
        for path in select(selector, classes)
    }


def _limit_ms(selector: str, budget: str | float, whole_ms: float) -> float:
    match = _LIMIT.fullmatch(budget.strip() if isinstance(budget, str) else f"{budget:f}ms")
    if match is None or (match[2] == "%" and float(match[1]) >= 100):
        raise InputError(f"budget {budget!r} of {selector!r}: write a time or a share below 100 %, such as 5ms or 20%")
    limit = float(match[1])
    return limit / 100 * whole_ms if match[2] == "%" else limit * _MILLISECONDS[match[2]]
