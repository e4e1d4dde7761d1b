"""Recipes: how a stored tensor was computed from the parameters and buffers of the PyTorch model.

A recipe is the value of ``htp.recipe`` of an initializer: the name of an entry of the model's
``state_dict``, or a step, ``[word, operand, ..., setting]``. Operands are recipes or numbers. See
``docs/format.md``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from htp_export.format.bounds import MOST_DIMENSIONS
from htp_export.format.json_text import parse_json

Recipe: TypeAlias = "str | float | list[Any]"

CONSTANT: list[Any] = ["constant"]

_LONGEST = 1 << 14
"""Characters of a recipe: a longer one costs more than it explains, and is written as ``computed``."""

_DEEPEST = 40
"""Nested steps: 3 or 4 are common; the gates of an LSTM have 8."""

MOST_OPERANDS = 256
"""Operands of a concatenation: more than the experts of a layer."""

_MOST_LISTED = MOST_OPERANDS // 4  # entries of a tensor that cannot be computed again

_LARGEST_BLOCK = 1 << 16  # elements with the same scale: quantizers use at most a row


def _is_text(setting: Any) -> bool:
    return isinstance(setting, str) and bool(setting)


def _is_axis(setting: Any) -> bool:
    return type(setting) is int and abs(setting) < MOST_DIMENSIONS


def _is_sizes(setting: Any) -> bool:
    if not isinstance(setting, list) or len(setting) >= MOST_DIMENSIONS:
        return False
    return all(type(size) is int for size in setting)


def _is_cut(setting: Any) -> bool:
    return _is_sizes(setting) and len(setting) == 4 and bool(setting[3] > 0)


def _is_rows(setting: Any) -> bool:
    if not isinstance(setting, list) or len(setting) != 2:
        return False
    axis, rows = setting
    # A list, or lists in lists, as the indices of a Gather are; a number for one row.
    return _is_axis(axis) and (isinstance(rows, list) or type(rows) is int)


def _is_blocks(setting: Any) -> bool:
    if not isinstance(setting, list) or len(setting) != 4:
        return False
    result, bits, block, symmetric = setting
    if result not in ("levels", "scales", "zero_points") or bits not in (4, 8):
        return False
    # ONNX Runtime's MatMulNBits has blocks of at least 16
    is_block = type(block) is int and 16 <= block <= _LARGEST_BLOCK
    return is_block and symmetric in (0, 1)


ROUNDED_PARTS = ("levels", "scales", "zero_points")
"""The parts of a weight that was rounded to integers."""

NO_AXIS = -1
"""In place of an axis: one scale for the whole weight."""

_MX_ELEMENTS = {"int8": 8, "e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}
"""Element types of microscaling → bits."""

_MX_SCALE_BITS = 8  # E8M0

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
        case ["fixed", int(width), int(fraction)]:
            return 2 <= width <= 16 and 0 <= fraction <= width
        case ["mx", str(element), int(axis)]:
            return element in _MX_ELEMENTS and 0 <= axis < MOST_DIMENSIONS
    return False


def _is_bias_rounding(setting: Any) -> bool:
    if not isinstance(setting, list) or len(setting) != 7 or type(setting[1]) is not float:
        return False
    part, scale, *scheme = setting
    return part != "zero_points" and math.isfinite(scale) and _is_rounding([part, *scheme])


def _is_unpacking(setting: Any) -> bool:
    if not isinstance(setting, list) or len(setting) != 3:
        return False
    axis, bits, dtype = setting
    if type(axis) is not int or axis < 0 or bits not in (4, 8):
        return False
    return dtype in (f"int{bits}", f"uint{bits}")


@dataclass(frozen=True)
class _Form:
    """The syntax of a step: its number of operands, and a check of its setting, if it has one.

    ``keeps_zeros``: whether it maps each zero to a zero, so that a mask can be applied afterwards.
    """

    fewest: int = 1
    most: int = 1
    setting: Callable[[Any], bool] | None = None
    keeps_zeros: bool = False


_FORMS: Mapping[str, _Form] = {
    "constant": _Form(0, 0),
    "computed": _Form(0, MOST_OPERANDS, _is_text),
    "transpose": _Form(setting=_is_sizes, keeps_zeros=True),
    **dict.fromkeys(
        ("reshape", "squeeze", "unsqueeze", "expand"), _Form(setting=_is_sizes, keeps_zeros=True)
    ),
    "cast": _Form(setting=_is_text, keeps_zeros=True),
    "narrow": _Form(setting=_is_text, keeps_zeros=True),
    "slice": _Form(setting=_is_cut, keeps_zeros=True),
    "take": _Form(setting=_is_rows, keeps_zeros=True),
    "gather": _Form(2, 2, _is_axis),
    "concat": _Form(1, MOST_OPERANDS, _is_axis, keeps_zeros=True),
    "quantize": _Form(setting=_is_blocks),
    "round": _Form(setting=_is_rounding),
    "round_bias": _Form(2, 2, setting=_is_bias_rounding),
    "unpack": _Form(setting=_is_unpacking),
    "masked": _Form(),
    "equal": _Form(2, MOST_OPERANDS),
    **dict.fromkeys(("add", "sub", "mul", "div"), _Form(2, 2)),
    **dict.fromkeys(("neg", "exp", "sqrt", "torch_sqrt"), _Form()),
}


def step(word: str, *parts: Any) -> Recipe:
    """Return the recipe of a step in its simplest form; ``parts`` are the operands and the setting.

    A recipe without parameters is constant. A mask is moved to the outermost step, because its
    zeros are the zeros of the stored tensor.

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
    if word == "computed":
        return _computed(operands, setting[0])
    if word != "constant":
        simplified = _simplified(word, operands, setting)
        if simplified is not None:
            return simplified
    recipe = [word, *operands, *setting]
    is_wide = len(operands) > form.most  # a reader refuses it: one tensor for a thousand equal ones
    if is_wide or len(recipe_to_text(recipe)) > _LONGEST or _depth(recipe) > _DEEPEST:
        return _computed(operands, f"{word}, and more")
    return recipe


def _simplified(word: str, operands: Sequence[Any], setting: Sequence[Any]) -> Recipe | None:
    """Return a simpler recipe that replaces a step; None if there is none.

    Earlier rules come first: an operand that cannot be computed again matters more than its zeros.
    """
    # Without parameters, the result is a constant: "add" of two constants is ["constant"].
    if all(next(parameters_in(operand), None) is None for operand in operands):
        computed = [operand for operand in operands if _is_step(operand, "computed")]
        return computed[0] if computed else CONSTANT
    # A step on a tensor that cannot be computed again cannot be repeated either.
    for operand in operands:
        reason = why_not_exact(operand)
        if reason:
            return _computed(operands, reason)
    if not any(_is_step(operand, "masked") for operand in operands):
        return None
    # Zeros that pruning wrote stay outermost: "cast" of ["masked", "w"] is ["masked", ["cast", "w", ...]].
    if _FORMS[word].keeps_zeros:
        unmasked = [operand[1] if _is_step(operand, "masked") else operand for operand in operands]
        return ["masked", [word, *unmasked, *setting]]
    # A tensor that is pruned again is masked once; its zeros are read from the tensor itself.
    if word == "masked":
        masked: Recipe = operands[0]
        return masked
    return _computed(operands, f"{word} of pruned weights")


def _is_step(recipe: Recipe, word: str) -> bool:
    return isinstance(recipe, list) and recipe[0] == word


def _computed(operands: Sequence[Any], reason: str) -> Recipe:
    """Return a recipe that only names the parameters that a tensor depends on."""
    names: dict[str, None] = {}
    for operand in operands:
        names.update(dict.fromkeys(parameters_in(operand)))
    # of many operands, the first ones: nobody can repeat the computation
    return ["computed", *list(names)[:_MOST_LISTED], reason]


def is_listed_whole(recipe: Recipe) -> bool:
    """Return whether a tensor cannot be computed again, and its recipe lists all of its entries.

    Examples:
        >>> is_listed_whole(["computed", "fc.weight", "hqq"]), is_listed_whole(["computed", "hqq"])
        (True, False)
    """
    names = set(parameters_in(recipe))
    return bool(why_not_exact(recipe)) and 0 < len(names) < _MOST_LISTED


def why_not_exact(recipe: Recipe) -> str:
    """Return the reason why the computation of a recipe cannot be repeated; empty if it can."""
    if not isinstance(recipe, list):
        return ""
    if recipe[0] == "computed":
        return str(recipe[-1])
    if recipe == CONSTANT:
        return "a constant that is not written down"
    reasons = map(why_not_exact, operands_of(recipe))
    return next(filter(None, reasons), "")


def is_exact(recipe: Recipe) -> bool:
    """Return whether the tensor can be computed again from other parameters.

    Examples:
        >>> is_exact(["masked", "fc.weight"]), is_exact(["computed", "fc.weight", "hqq"])
        (True, False)
    """
    return recipe == CONSTANT or not why_not_exact(recipe)


_LAYOUT = frozenset(
    ("transpose", "reshape", "squeeze", "unsqueeze", "expand", "slice", "take", "concat")
)


def is_layout(recipe: Recipe) -> bool:
    """Return whether all steps of a recipe keep the type and the numbers of their operands.

    Examples:
        >>> is_layout(["transpose", "fc.weight", [1, 0]]), is_layout(["cast", "fc.weight", "float16"])
        (True, False)
    """
    if not isinstance(recipe, list):
        return True
    return recipe[0] in _LAYOUT and all(map(is_layout, operands_of(recipe)))


def operands_of(recipe: list[Any]) -> list[Any]:
    """Return the operands of the outermost step of a recipe."""
    return recipe[1:-1] if _FORMS[recipe[0]].setting else recipe[1:]


def parameters_in(recipe: Recipe) -> Iterator[str]:
    """Iterate over the names of the parameters and buffers in a recipe, in order, with repetitions."""
    if isinstance(recipe, str):
        yield recipe
    elif isinstance(recipe, list):
        for operand in operands_of(recipe):
            yield from parameters_in(operand)


def steps_in(recipe: Recipe) -> Iterator[list[Any]]:
    """Iterate over the steps of a recipe, each before the steps of its operands.

    Examples:
        >>> [each[0] for each in steps_in(["masked", ["cast", "fc.weight", "float16"]])]
        ['masked', 'cast']
    """
    if isinstance(recipe, list):
        yield recipe
        for operand in operands_of(recipe):
            yield from steps_in(operand)


_WORDS = {
    "transpose": "transposed",
    "reshape": "reshaped",
    "squeeze": "reshaped",
    "unsqueeze": "reshaped",
    "expand": "repeated",
    "slice": "sliced",
    "take": "some rows",
    "quantize": "quantized",
    "round": "rounded to integers",
    "round_bias": "rounded to integers",
    "unpack": "unpacked",
    "masked": "pruned",
    "neg": "negated",
    "sqrt": "square root",
    "torch_sqrt": "square root",
}
"""Step with one operand → the words for it."""

_LISTED = 4
"""Parameters that words list, at most."""


def recipe_in_words(recipe: Recipe) -> str:
    """Return a recipe as words: the parameters, and the steps in the order of the computation.

    Examples:
        >>> recipe_in_words(["cast", ["transpose", "fc.weight", [1, 0]], "float16"])
        'fc.weight, transposed, as float16'
        >>> recipe_in_words(["concat", "query.weight", "key.weight", 0])
        'query.weight and key.weight, joined'
        >>> recipe_in_words(["constant"]), recipe_in_words(["computed", "fc.weight", "hqq"])
        ('a constant', 'computed of fc.weight (hqq)')
    """
    steps: list[str] = []
    while isinstance(recipe, list):
        word, operands = recipe[0], operands_of(recipe)
        if word in _WORDS and word != "round_bias":
            steps.append(_WORDS[word])
        elif word in ("cast", "narrow"):
            steps.append(f"as {recipe[-1]}")
        else:
            return ", ".join([_joined_in_words(word, recipe), *reversed(steps)])
        recipe = operands[0]
    return ", ".join([str(recipe), *dict.fromkeys(reversed(steps))])


def _joined_in_words(word: str, recipe: list[Any]) -> str:
    """The words for the innermost step with several operands, or none."""
    if recipe == CONSTANT:
        return "a constant"
    names = list(dict.fromkeys(parameters_in(recipe)))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    listed = names[:_LISTED]
    named = ", ".join(listed) + more if more else " and ".join(listed)
    if word == "concat":
        return f"{named}, joined"
    if word == "gather":
        return f"{names[0]}, rows that {listed[-1]} selects"
    if word == "equal":
        return f"{listed[0]}, equal to other parameters" if listed else "equal parameters"
    return f"computed of {named} ({recipe[-1]})" if word == "computed" else f"computed of {named}"


def _depth(recipe: Recipe) -> int:
    if not isinstance(recipe, list):
        return 0
    return 1 + max(map(_depth, operands_of(recipe)), default=0)


def element_bits(recipe: Recipe) -> int | None:
    """Return the bits of an element of a rounded tensor; None if they are those of its type.

    The format of a weight can be narrower than the types in which a file can store it.

    Examples:
        >>> element_bits(["round", "fc.weight", ["levels", "fixed", 6, 2]])
        6
        >>> element_bits(["round", "fc.weight", ["scales", "mx", "e2m1", 1]]), element_bits("fc.weight")
        (8, None)
    """
    for each in steps_in(recipe):
        match each:
            case ["round", _, ["levels", "fixed", int(width), _]]:
                return width
            case ["round", _, ["levels", "mx", str(element), _]]:
                return _MX_ELEMENTS.get(element)
            case ["round", _, ["scales", "mx", *_]]:
                return _MX_SCALE_BITS
    return None


def recipe_to_text(recipe: Recipe) -> str:
    """Return the value of ``htp.recipe``; a name alone is written without quotes.

    Examples:
        >>> recipe_to_text("fc.weight"), recipe_to_text(["transpose", "fc.weight", [1, 0]])
        ('fc.weight', '["transpose","fc.weight",[1,0]]')
    """
    if isinstance(recipe, str) and not recipe.startswith(("[", '"')):
        return recipe
    return json.dumps(recipe, separators=(",", ":"), ensure_ascii=False)


def recipe_from_text(text: str) -> Recipe:
    """Parse the value of ``htp.recipe``; a ValueError describes the problem.

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
        raise ValueError(f"more than {_DEEPEST} steps are nested")
    operands = operands_of(recipe)
    has_valid_setting = form.setting is None or form.setting(recipe[-1])
    if not form.fewest <= len(operands) <= form.most or not has_valid_setting:
        raise ValueError(f"step {word!r} has invalid operands or settings")
    for operand in operands:
        _check(operand, deepest - 1)
