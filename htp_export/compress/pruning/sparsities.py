"""The values of a plan of `prune`: what is removed from the weights of a module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from htp_export.errors import InputError

__all__ = ["Kind", "Sparsity", "sparsity_of"]

Kind: TypeAlias = Literal["elements", "n:m", "channels", "heads", "blocks"]

_FORMS = "a share such as 0.5, a pattern such as '2:4', 'channels:0.25', 'heads:0.5' or 'drop'"


@dataclass(frozen=True)
class Sparsity:
    """What is removed from the weights of a module.

    Attributes:
        kind: ``elements``: single elements become zero; ``n:m``: in each group of ``m`` elements, all but ``n`` become
            zero; ``channels``: output channels are cut out; ``heads``: attention heads are cut out; ``blocks``: the
            module itself is removed, and its input takes the place of its output.
        amount: The share that is removed, from 0 to 1; not used for ``n:m`` and ``blocks``.
        kept: ``n`` of ``n:m``.
        group: ``m`` of ``n:m``.

    Examples:
        >>> str(sparsity_of("2:4")), str(sparsity_of(0.5)), str(sparsity_of("heads:0.25"))
        ('2:4', '0.5', 'heads:0.25')
    """

    kind: Kind
    amount: float = 0.0
    kept: int = 0
    group: int = 0

    @property
    def is_structured(self) -> bool:
        """Whether whole channels, heads or modules are removed, so that tensors become smaller."""
        return self.kind in ("channels", "heads", "blocks")

    def __str__(self) -> str:
        if self.kind == "n:m":
            return f"{self.kept}:{self.group}"
        if self.kind == "blocks":
            return "drop"
        return f"{self.amount:g}" if self.kind == "elements" else f"{self.kind}:{self.amount:g}"


def sparsity_of(value: Any) -> Sparsity:
    """Read a value of a plan.

    Args:
        value: A share from 0 to 1, ``"n:m"``, ``"channels:share"``, ``"heads:share"``, ``"drop"``, or a `Sparsity`.

    Raises:
        InputError: If it is none of these.

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
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        kept, group = int(match[1]), int(match[2])
        if not 0 <= kept <= group or not group:
            raise InputError(f"sparsity {text!r}: of n:m, n is at most m, and m is not 0")
        return Sparsity("n:m", kept=kept, group=group)
    kind, colon, amount = text.rpartition(":")
    try:
        number = float(amount)
    except ValueError:
        number = None
    if number is not None and not colon:
        return Sparsity("elements", _share(number, value))
    if number is not None and kind in ("channels", "heads"):
        return Sparsity("channels" if kind == "channels" else "heads", _share(number, value))
    raise InputError(f"sparsity {value!r}: write {_FORMS}")


def _share(number: float, value: Any) -> float:
    if 0 <= number <= 1:
        return float(number)
    hint = "; YAML reads 2:4 without quotes as a number: write '2:4'" if number > 1 else ""
    raise InputError(f"sparsity {value!r}: a share is from 0 to 1{hint}")
