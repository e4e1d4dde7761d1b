"""Values of the plan of `prune`: how much of a module's weights is removed, and in which form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from htp_export.errors import InputError, RuleError

Kind: TypeAlias = Literal["elements", "n:m", "channels", "heads", "blocks", "rank", "activations"]

_FORMS = (
    "a share such as 0.5, a pattern such as '2:4', 'channels:0.25', 'heads:0.5', 'rank:16', "
    "'rank:25%', 'drop' or 'activations:0.5'"
)
_SHARES: tuple[Kind, ...] = ("channels", "heads", "activations")
"""Kinds that are written with a share."""


@dataclass(frozen=True)
class Sparsity:
    """The value of a rule: how much of the weights of a module is removed.

    Attributes:
        kind: ``elements``: single elements become zero; ``n:m``: in each group of ``m`` elements,
            all but ``n`` become zero; ``channels``: output channels are cut out; ``heads``:
            attention heads are cut out; ``blocks``: the module itself is removed, and its input
            replaces its output; ``rank``: a matrix becomes the product of two smaller ones;
            ``activations``: elements of the module's output become zero.
        amount: The share that is removed, from 0 to 1; not used for ``n:m`` and ``blocks``. For
            ``rank``, the share of the full rank that stays; 0 if ``kept`` is the rank.
        kept: ``n`` of ``n:m``; for ``rank``, the rank.
        group: ``m`` of ``n:m``.

    Examples:
        >>> [str(sparsity_of(value)) for value in ("2:4", 0.5, "heads:0.25", "rank:25%")]
        ['2:4', '0.5', 'heads:0.25', 'rank:25%']
    """

    kind: Kind
    amount: float = 0.0
    kept: int = 0
    group: int = 0

    @property
    def is_elementwise(self) -> bool:
        """Whether single elements become zero."""
        return self.kind in ("elements", "n:m")

    def __str__(self) -> str:
        if self.kind == "n:m":
            return f"{self.kept}:{self.group}"
        if self.kind == "blocks":
            return "drop"
        if self.kind == "rank":
            return f"rank:{self.kept}" if self.kept else f"rank:{self.amount * 100:g}%"
        return f"{self.amount:g}" if self.kind == "elements" else f"{self.kind}:{self.amount:g}"


def sparsity_of(value: Any) -> Sparsity:
    """Read a value of a plan.

    Raises:
        InputError: It is not one of ``_FORMS``.

    Examples:
        >>> sparsity_of("channels:0.25")
        Sparsity(kind='channels', amount=0.25, kept=0, group=0)
    """
    if isinstance(value, Sparsity):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Sparsity("elements", _share(value, value))
    text = value.strip() if isinstance(value, str) else ""
    if text == "drop":
        return Sparsity("blocks")
    if pattern := re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text):
        return _pattern(text, kept=int(pattern[1]), group=int(pattern[2]))
    if text.startswith("rank:"):
        return _rank(text)
    kind, colon, amount = text.rpartition(":")
    try:
        number = float(amount)
    except ValueError:
        raise InputError(f"sparsity {value!r}: write {_FORMS}") from None
    if not colon:
        return Sparsity("elements", _share(number, value))
    for known in _SHARES:
        if kind == known:
            return Sparsity(known, _share(number, value))
    raise InputError(f"sparsity {value!r}: write {_FORMS}")


@dataclass(frozen=True)
class PruningPlan:
    """The rules of a plan, of weights and of activations apart: both hold for a module.

    Attributes:
        weights: Selector → how much of the weights of its modules is removed, in order.
        activations: Selector → how much of the outputs of its modules becomes zero, in order.
    """

    weights: Mapping[str, Sparsity]
    activations: Mapping[str, Sparsity]


def sparsities_of(plan: Mapping[str, Any]) -> PruningPlan:
    """The rules of a plan; an InputError names the selector.

    Examples:
        >>> rules = sparsities_of({"encoder": "2:4", "head": "0.5+activations:0.25"})
        >>> [(selector, str(sparsity)) for selector, sparsity in rules.weights.items()]
        [('encoder', '2:4'), ('head', '0.5')]
        >>> [(selector, str(sparsity)) for selector, sparsity in rules.activations.items()]
        [('head', 'activations:0.25')]
    """
    weights: dict[str, Sparsity] = {}
    activations: dict[str, Sparsity] = {}
    for selector, value in plan.items():
        parts = value.split("+") if isinstance(value, str) else [value]
        try:
            sparsities = [sparsity_of(part) for part in parts]
        except InputError as error:
            raise RuleError(selector, str(error)) from error
        for sparsity in sparsities:
            rules = activations if sparsity.kind == "activations" else weights
            if selector in rules:
                problem = f"sparsity {value!r}: write one value of weights and one of activations"
                raise RuleError(selector, f"{problem}, such as '0.5+activations:0.5'")
            rules[selector] = sparsity
    return PruningPlan(weights, activations)


def _pattern(text: str, kept: int, group: int) -> Sparsity:
    if kept > group or not group:
        raise InputError(f"sparsity {text!r}: of n:m, n is at most m, and m is not 0")
    return Sparsity("n:m", kept=kept, group=group)


def _rank(text: str) -> Sparsity:
    match = re.fullmatch(r"rank:(?:([0-9]{1,9})|([0-9]{1,9}(?:\.[0-9]*)?)%)", text)
    rank, share = (int(match[1] or 0), float(match[2] or 0) / 100) if match else (0, 0.0)
    if not rank and not 0 < share <= 1:
        raise InputError(
            f"sparsity {text!r}: "
            "write the rank, 'rank:16', or the share of it that stays, 'rank:25%'"
        )
    return Sparsity("rank", share, rank)


def _share(number: float, value: Any) -> float:
    if 0 <= number <= 1:
        return float(number)
    is_pair = number > 1 and not isinstance(value, str)
    hint = "; YAML reads 2:4 without quotes as a number: write '2:4'" if is_pair else ""
    raise InputError(f"sparsity {value!r}: a share is from 0 to 1{hint}")
