"""How a stored tensor was made of the parameters and buffers of the PyTorch model: ``htp.recipe`` of an initializer.

A recipe is the name of an entry of the model's ``state_dict``, or a step: ``[word, operand, ...,
setting]``. Operands are recipes, or numbers. See ``docs/format.md``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from htp_export.format.json_text import parse_json

Recipe: TypeAlias = "str | float | list[Any]"

CONSTANT: list[Any] = ["constant"]

_LONGEST = 1 << 14
"""Characters of a recipe; what is longer is written as ``computed``."""

_DEEPEST = 40
"""Steps inside one another: 3 or 4 are common; the gates of an LSTM have 8."""

_MOST_OPERANDS = 256  # of a concatenation: more than there are experts in a layer
_LARGEST_BLOCK = 1 << 16  # numbers with one scale; quantizers have up to a row


def _is_text(setting: Any) -> bool:
    return isinstance(setting, str) and bool(setting)


def _is_axis(setting: Any) -> bool:
    return isinstance(setting, int) and not isinstance(setting, bool) and abs(setting) < 64


def _is_sizes(setting: Any) -> bool:
    return isinstance(setting, list) and len(setting) < 64 and all(type(k) is int for k in setting)


def _is_cut(setting: Any) -> bool:
    return _is_sizes(setting) and len(setting) == 4 and bool(setting[3] > 0)


def _is_rows(setting: Any) -> bool:
    if not isinstance(setting, list) or len(setting) != 2 or not _is_axis(setting[0]):
        return False
    # A list, or lists in lists, as the indices of a Gather are; a number for one row.
    return isinstance(setting[1], list) or type(setting[1]) is int


def _is_blocks(setting: Any) -> bool:
    if (
        not isinstance(setting, list)
        or len(setting) != 4
        or setting[0] not in ("levels", "scales", "zero_points")
    ):
        return False
    _, bits, block, symmetric = setting
    return (
        bits in (4, 8)
        and type(block) is int
        and 16 <= block <= _LARGEST_BLOCK
        and symmetric in (0, 1)
    )


ROUNDED_PARTS = ("levels", "scales", "zero_points")
"""The parts of a weight that was rounded to integers."""

NO_AXIS = -1
"""In place of an axis: one scale for the whole weight."""

_ROUNDED_KINDS = ("int4", "uint4", "int8", "uint8", "int16", "uint16")


def _is_rounding(setting: Any) -> bool:
    if not isinstance(setting, list) or len(setting) < 2 or setting[0] not in ROUNDED_PARTS:
        return False
    match setting[1:]:
        case ["linear", str(kind), int(axis), int(symmetric), int(reduced)]:
            return kind in _ROUNDED_KINDS and _is_axis(axis) and {symmetric, reduced} <= {0, 1}
        case ["channels", int(axis)]:
            return _is_axis(axis)
        case ["rows", int(bits), int(block), int(symmetric)]:
            return bits in (4, 8) and 1 <= block <= _LARGEST_BLOCK and symmetric in (0, 1)
    return False


def _is_bias_rounding(setting: Any) -> bool:
    if not isinstance(setting, list) or len(setting) != 7 or type(setting[1]) is not float:
        return False
    part, scale, *scheme = setting
    return part != "zero_points" and math.isfinite(scale) and _is_rounding([part, *scheme])


def _is_unpacking(setting: Any) -> bool:
    if (
        not isinstance(setting, list)
        or len(setting) != 3
        or type(setting[0]) is not int
        or setting[0] < 0
    ):
        return False
    _, bits, kind = setting
    return bits in (4, 8) and kind in (f"int{bits}", f"uint{bits}")


@dataclass(frozen=True)
class _Form:
    """The operands that a step has, its setting, and whether it maps zeros to zeros, element by element."""

    fewest: int = 1
    most: int = 1
    setting: Callable[[Any], bool] | None = None
    keeps_zeros: bool = False


_FORMS: Mapping[str, _Form] = {
    "constant": _Form(0, 0),
    "computed": _Form(0, _MOST_OPERANDS, _is_text),
    "transpose": _Form(setting=_is_sizes, keeps_zeros=True),
    **dict.fromkeys(
        ("reshape", "squeeze", "unsqueeze", "expand"), _Form(setting=_is_sizes, keeps_zeros=True)
    ),
    "cast": _Form(setting=_is_text, keeps_zeros=True),
    "narrow": _Form(setting=_is_text, keeps_zeros=True),
    "slice": _Form(setting=_is_cut, keeps_zeros=True),
    "take": _Form(setting=_is_rows, keeps_zeros=True),
    "concat": _Form(1, _MOST_OPERANDS, _is_axis, keeps_zeros=True),
    "quantize": _Form(setting=_is_blocks),
    "round": _Form(setting=_is_rounding),
    "round_bias": _Form(2, 2, setting=_is_bias_rounding),
    "unpack": _Form(setting=_is_unpacking),
    "masked": _Form(),
    "equal": _Form(2, _MOST_OPERANDS),
    **dict.fromkeys(("add", "sub", "mul", "div"), _Form(2, 2)),
    **dict.fromkeys(("neg", "sqrt", "torch_sqrt"), _Form()),
}


def step(word: str, *parts: Any) -> Recipe:
    """A step, in the simplest form: the operands, and the setting where the word has one.

    What has no parameter in it is constant. A mask stays outermost, because its zeros are those of
    the stored tensor.

    Examples:
        >>> step("cast", step("transpose", "fc.weight", [1, 0]), "float16")
        ['cast', ['transpose', 'fc.weight', [1, 0]], 'float16']
        >>> step("add", CONSTANT, 1.0), step("cast", ["masked", "w"], "float16")
        (['constant'], ['masked', ['cast', 'w', 'float16']])
        >>> step("mul", "a", ["computed", "b", "lora"])
        ['computed', 'a', 'b', 'lora']
    """
    form = _FORMS[word]
    operands, setting = (parts[:-1], parts[-1:]) if form.setting else (parts, ())
    if word not in ("constant", "computed"):
        if all(
            not isinstance(each, str) and next(parameters_in(each), None) is None
            for each in operands
        ):
            vague = next(
                (each for each in operands if isinstance(each, list) and each[0] == "computed"),
                None,
            )
            return CONSTANT if vague is None else vague
        inexact = next((why for each in operands if (why := _why_not(each))), "")
        if inexact:
            return _computed(operands, inexact)
        if form.keeps_zeros and any(_is_masked(each) for each in operands):
            return [
                "masked",
                [word, *(each[1] if _is_masked(each) else each for each in operands), *setting],
            ]
        if any(_is_masked(each) for each in operands):
            return (
                operands[0]
                if word == "masked"
                else _computed(operands, f"{word} of pruned weights")
            )
    made = [word, *operands, *setting]
    if word == "computed" or len(recipe_to_text(made)) > _LONGEST or _depth(made) > _DEEPEST:
        return _computed(operands, setting[0] if word == "computed" else f"{word}, and more")
    return made


def _is_masked(recipe: Recipe) -> bool:
    return isinstance(recipe, list) and recipe[0] == "masked"


def _computed(operands: Any, why: str) -> Recipe:
    names = dict.fromkeys(name for each in operands for name in parameters_in(each))
    return ["computed", *list(names)[: _MOST_OPERANDS // 4], why]


def _why_not(recipe: Recipe) -> str:
    """Why a recipe cannot be repeated; empty if it can."""
    if not isinstance(recipe, list):
        return ""
    if recipe[0] == "computed":
        return str(recipe[-1])
    if recipe == CONSTANT:
        return "a constant that is not written down"
    return next((why for each in operands_of(recipe) if (why := _why_not(each))), "")


def is_exact(recipe: Recipe) -> bool:
    """Whether the tensor can be made once more of other parameters.

    Examples:
        >>> is_exact(["masked", "fc.weight"]), is_exact(["computed", "fc.weight", "hqq"])
        (True, False)
    """
    return recipe == CONSTANT or not _why_not(recipe)


def operands_of(recipe: list[Any]) -> list[Any]:
    """The operands of the outermost step of a recipe."""
    return recipe[1:-1] if _FORMS[recipe[0]].setting else recipe[1:]


def parameters_in(recipe: Recipe) -> Iterator[str]:
    """The names of the parameters and buffers in a recipe, in order, each as often as it is there."""
    if isinstance(recipe, str):
        yield recipe
    elif isinstance(recipe, list):
        for each in operands_of(recipe):
            yield from parameters_in(each)


def _depth(recipe: Recipe) -> int:
    return 1 + max(map(_depth, operands_of(recipe)), default=0) if isinstance(recipe, list) else 0


def recipe_to_text(recipe: Recipe) -> str:
    """The value of ``htp.recipe``; a name alone is written as it is.

    Examples:
        >>> recipe_to_text("fc.weight"), recipe_to_text(["transpose", "fc.weight", [1, 0]])
        ('fc.weight', '["transpose","fc.weight",[1,0]]')
    """
    if isinstance(recipe, str) and not recipe.startswith(("[", '"')):
        return recipe
    return json.dumps(recipe, separators=(",", ":"), ensure_ascii=False)


def recipe_from_text(text: str) -> Recipe:
    """Parse the value of ``htp.recipe``; a ValueError says what is wrong with it.

    Examples:
        >>> recipe_from_text('["cast","fc.weight","float16"]')
        ['cast', 'fc.weight', 'float16']
        >>> recipe_from_text('["run","rm"]')
        Traceback (most recent call last):
        ValueError: there is no step 'run'
    """
    if len(text) > 2 * _LONGEST:
        raise ValueError(f"it has {len(text):,} characters; {2 * _LONGEST:,} are allowed")
    if not text.startswith(("[", '"')):
        return text
    try:
        recipe: Recipe = parse_json(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if isinstance(recipe, list):
        _check(recipe, _DEEPEST)
    return recipe


def _check(recipe: Any, deepest: int) -> None:
    if isinstance(recipe, str) or (isinstance(recipe, float) and math.isfinite(recipe)):
        return
    word = recipe[0] if isinstance(recipe, list) and recipe else recipe
    form = _FORMS.get(word) if isinstance(word, str) else None
    if form is None:
        raise ValueError(f"there is no step {word!r}")
    if deepest <= 0:
        raise ValueError(f"more than {_DEEPEST} steps are inside one another")
    operands = operands_of(recipe)
    if not form.fewest <= len(operands) <= form.most or (
        form.setting and not form.setting(recipe[-1])
    ):
        raise ValueError(f"step {word!r} has other operands or settings than it takes")
    for each in operands:
        _check(each, deepest - 1)
