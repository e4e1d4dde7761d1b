"""Selectors: the language in which all functions and commands name modules, by path or by class."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from htp_export.errors import SelectorError, nearest_names
from htp_export.format.patterns import Pattern
from htp_export.format.tags import ancestors


class ModuleClasses(dict[str, str]):
    """Module path → fully qualified class, of a model that also has nodes, tensors and parameters.

    If a part of a selector matches no module, the error describes the object with this name.

    Attributes:
        described: Returns a description of the object that has a name, with its module; ``""``
            without one.

    Examples:
        >>> nodes = {"node_linear": "a node (Gemm) of module 'fc'"}
        >>> select("node_linear", ModuleClasses({"fc": "torch.nn.Linear"}, lambda name: nodes.get(name, "")))
        Traceback (most recent call last):
        ...
        htp_export.errors.SelectorError: selector 'node_linear': matches no module; it is a node (Gemm) of module 'fc'
    """

    def __init__(self, classes: Mapping[str, str], described: Callable[[str], str]) -> None:
        super().__init__(classes)
        self.described = described


def select(pattern: str | Sequence[str], classes: Mapping[str, str]) -> list[str]:
    r"""Return the module paths that a selector matches.

    - ``encoder.layer.*``: a glob on paths; ``*``, ``?`` and ``[...]`` match within one part of a
      path.
    - ``encoder.**``: ``**`` matches any number of parts, including none: ``encoder`` and all of its
      descendants.
    - ``encoder.layer.0-19``: a part of two numbers is also each number between them, both included.
      If a module has this very path, only that module.
    - ``.`` or ``""``: the root.
    - ``class:LayerNorm``: a glob on the simple or the full name of the class.
    - ``re:.*\.(q|k)``: a regular expression for the whole path; it may contain commas.
    - ``a,b`` or a list: the union.
    - ``!dropout``: an exclusion, at any position. A selector of exclusions only matches all other
      modules.

    A selector may come from an untrusted file: it is matched in time linear in the length of a
    path. Regular expressions are those of ``re``, without references to groups, atomic groups and
    possessive repeats.

    Args:
        pattern: The selector. A comma splits it, except inside ``[...]`` and after ``re:``.
        classes: Module path → fully qualified class name, for every module.

    Returns:
        The selected paths, each once, in the order of ``classes``.

    Raises:
        SelectorError: If the selector is empty or invalid, or if a part of it matches no module.

    Examples:
        >>> classes = {"": "net.Net", "layer": "net.List", "layer.0": "net.Block", "layer.0.fc": "torch.nn.Linear"}
        >>> select("layer.*", classes), select("**.fc", classes), select(".", classes)
        (['layer.0'], ['layer.0.fc'], [''])
        >>> select("class:Block, class:torch.nn.*", classes), select(["layer.**", "!layer"], classes)
        (['layer.0', 'layer.0.fc'], ['layer.0', 'layer.0.fc'])
    """
    terms = _terms(pattern)
    chosen, excluded = _matched(terms, classes)
    return _remaining(terms, chosen - excluded, classes)


def select_below(pattern: str | Sequence[str], classes: Mapping[str, str]) -> list[str]:
    """Return the modules that a selector matches, with their descendants; those of excluded modules are excluded.

    Examples:
        >>> classes = {"": "net.Net", "layer": "net.Block", "layer.fc": "torch.nn.Linear", "head": "torch.nn.Linear"}
        >>> select_below("layer", classes), select_below("**,!layer", classes), select_below(".", classes)
        (['layer', 'layer.fc'], ['', 'head'], ['', 'layer', 'layer.fc', 'head'])
    """
    terms = _terms(pattern)
    chosen, excluded = _matched(terms, classes)
    return _remaining(terms, _with_below(chosen, classes) - _with_below(excluded, classes), classes)


def chosen_and_excluded(
    pattern: str | Sequence[str], classes: Mapping[str, str]
) -> tuple[set[str], set[str]]:
    """Return the modules that a selector matches, and the modules that it excludes.

    Examples:
        >>> chosen_and_excluded("layer,!head", {"": "net.Net", "layer": "net.Block", "head": "torch.nn.Linear"})
        ({'layer'}, {'head'})
    """
    chosen, excluded = _matched(_terms(pattern), classes)
    if excluded:
        select_below(pattern, classes)  # raises an error if no module remains
    return chosen - excluded, excluded


@dataclass(frozen=True)
class Place:
    """A parsed selector of tensors at one side of modules: ``encoder.layer.*:out``, ``fc#2:in[x]``.

    Attributes:
        text: The selector.
        modules: The selector of the modules.
        side: ``"in"`` or ``"out"``; ``""`` for both sides in an exclusion.
        call: Number of the call, from 0; None for all calls.
        name: The argument of ``forward``, or its position among the tensors of that side; ``""``
            for the first tensor.
        excludes: Whether it begins with ``!``.
    """

    text: str
    modules: str
    side: str
    call: int | None = None
    name: str = ""
    excludes: bool = False


def places_of(pattern: str | Sequence[str]) -> list[Place]:
    """Parse a selector of tensors; commas and ``!`` have the same meaning as in `select`.

    Raises:
        SelectorError: If a part of it is empty, or has no side.

    Examples:
        >>> [(place.modules, place.side, place.call, place.name) for place in places_of("layer.*:out, fc#2:in[x]")]
        [('layer.*', 'out', None, ''), ('fc', 'in', 2, 'x')]
        >>> places_of("layer.0")
        Traceback (most recent call last):
        ...
        htp_export.errors.SelectorError: selector 'layer.0': has no side; write 'layer.0:in' or 'layer.0:out'
    """
    texts = _texts(pattern, "an empty list names no tensor; write 'PATH:out'")
    return [_place(text) for text in texts]


def _place(text: str) -> Place:
    _check_length(text)
    body = text.removeprefix("!").lstrip()
    excludes = body != text
    match = _PLACE.fullmatch(body)
    if match is None or not (match["side"] or excludes):
        modules = body.partition(":")[0]
        raise SelectorError(text, f"has no side; write {f'{modules}:in'!r} or {f'{modules}:out'!r}")
    call = None if match["call"] is None else int(match["call"])
    side, name = match["side"] or "", match["name"] or ""
    return Place(text, match["modules"], side, call, name, excludes)


_LONGEST = 10_000  # characters between two commas: the time to parse them grows with their square


def _check_length(text: str) -> None:
    if len(text) > _LONGEST:
        raise SelectorError(text, f"is longer than {_LONGEST:,} characters")


_PLACE = re.compile(
    r"(?P<modules>.*?)(?:#(?P<call>[0-9]{1,9}))?(?::(?P<side>in|out)(?:\[(?P<name>[^\]]+)\])?)?",
    re.DOTALL,
)


def _terms(pattern: str | Sequence[str]) -> list[_Term]:
    texts = _texts(pattern, "an empty list selects nothing; write '**' for every module")
    return [_term(text) for text in texts]


def _texts(pattern: str | Sequence[str], if_empty: str) -> list[str]:
    """Return the parts of a selector; a SelectorError with this text if it has none."""
    texts: list[str] = []
    for item in [pattern] if isinstance(pattern, str) else pattern:
        texts += _split(item)
    if not texts:
        raise SelectorError("", if_empty)
    return texts


def _matched(terms: Sequence[_Term], classes: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Return the paths that the terms of a selector match, and the paths that they exclude."""
    only_excludes = all(term.excludes for term in terms)
    chosen: set[str] = set(classes) if only_excludes else set()
    excluded: set[str] = set()
    for term in terms:
        try:
            if term.is_literal_of(classes):
                matches = [term.path]
            else:
                matches = [path for path, name in classes.items() if term.matches(path, name)]
        except ValueError as error:
            raise SelectorError(term.text, str(error)) from error
        if not matches:
            raise SelectorError(term.text, "matches no module" + term.hint(classes))
        (excluded if term.excludes else chosen).update(matches)
    return chosen, excluded


def _remaining(terms: Sequence[_Term], chosen: set[str], classes: Mapping[str, str]) -> list[str]:
    if not chosen:
        raise SelectorError(
            ", ".join(term.text for term in terms), "excludes every module that it selects"
        )
    return [path for path in classes if path in chosen]


def _with_below(paths: set[str], classes: Mapping[str, str]) -> set[str]:
    return {path for path in classes if not paths.isdisjoint(ancestors(path))}


@dataclass(frozen=True)
class _Term:
    """A part of a selector, compiled."""

    text: str
    excludes: bool
    kind: str  # "glob", "class" or "re"
    regex: re.Pattern[str] | Pattern

    @property
    def path(self) -> str:
        """The path without the sign of an exclusion."""
        return self.text[1:].lstrip() if self.excludes else self.text

    def is_literal_of(self, classes: Mapping[str, str]) -> bool:
        """Whether a glob has a range of numbers and is the very path of a module."""
        if self.kind != "glob" or self.path not in classes:
            return False
        return any(map(_RANGE.fullmatch, self.path.split(".")))

    def matches(self, path: str, class_name: str) -> bool:
        if self.kind == "class":
            return any(map(self.regex.fullmatch, (class_name.rpartition(".")[2], class_name)))
        if self.kind == "glob" and path:
            # as in _glob_regex: each part follows a dot, and the root is ""
            path = "." + path
        return bool(self.regex.fullmatch(path))

    def hint(self, classes: Mapping[str, str]) -> str:
        """Return the end of a message about a term without a match.

        It describes the node or tensor of this name, or has similar names, or some names.
        """
        typed = self.text.removeprefix("!").removeprefix(self.kind + ":")
        if isinstance(classes, ModuleClasses):
            described = classes.described(typed)
            if described:
                return f"; it is {described}"
        names = set(classes)
        if self.kind == "class":
            names = {name.rpartition(".")[2] for name in classes.values()}
        nearest = nearest_names(typed, sorted(names), cutoff=0.4)
        if nearest:
            return f"; nearest: {', '.join(map(repr, nearest))}"
        shown = sorted(name or "." for name in names)
        more = " and more" if len(shown) > _MOST_LISTED else ""
        return f"; there are {', '.join(map(repr, shown[:_MOST_LISTED]))}{more}"


_MOST_LISTED = 5  # names in a message without similar names: enough to show what paths look like


def _split(text: str) -> list[str]:
    """Split a selector at commas, but not in brackets and not after ``re:``."""
    if not isinstance(text, str):
        raise SelectorError(repr(text), "a selector is a string or a list of strings")
    parts = list[str]()
    start, position = 0, 0  # of the current part, and of the token
    is_prefix = True  # whether the next ":" ends the kind of a term
    for token in _tokens(text):
        if token == ",":
            parts.append(text[start:position].strip())
            start, is_prefix = position + 1, True
        elif token == ":" and is_prefix:
            is_prefix = False
            if text[start:position].strip().removeprefix("!").lstrip() == "re":
                break
        position += len(token)
    parts.append(text[start:].strip())
    if len(parts) > 1 and "" in parts:
        raise SelectorError(text, "there is nothing between two commas; write '.' for the root")
    return parts


@lru_cache(maxsize=1024)
def _term(text: str) -> _Term:
    _check_length(text)
    excludes = text.startswith("!")
    body = text[1:].lstrip() if excludes else text
    if excludes and not body:
        raise SelectorError(text, "nothing after '!'; write '!.' to exclude the root")
    kind, colon, rest = body.partition(":")
    if not colon or kind not in ("class", "re"):
        kind, rest = "glob", body
    elif not rest:
        raise SelectorError(text, f"nothing after '{kind}:'")
    try:
        if kind == "re":
            return _Term(text, excludes, kind, Pattern(rest))
        regex = re.compile(_class_regex(rest) if kind == "class" else _glob_regex(rest))
    except (re.error, ValueError) as error:
        raise SelectorError(text, str(error)) from error
    return _Term(text, excludes, kind, regex)


def _tokens(text: str) -> Iterator[str]:
    """Yield the characters of a selector, and its brackets, such as ``[a-z]``, as one token each.

    A "]" directly after the opening bracket is a character of it. A bracket without an end is a
    character.
    """
    position, may_close = 0, True
    while position < len(text):
        end = position + 1
        if text[position] == "[" and may_close:
            inside = end + text.startswith("!", end)
            closing = text.find("]", inside + 1)
            may_close = closing >= 0
            if may_close:
                end = closing + 1
        yield text[position:end]
        position = end


# `re` matches the regular expressions of globs without backtracking into a star: as long as another
# star follows, the first position where the text between the two matches is as good as a later one.

_END = r"(?=\.|\Z)"  # the end of a part of a path
_PARTS = r"(?:\.[^.]++)*"


def _glob_regex(glob: str) -> str:
    """Return the regular expression of a glob on paths with a dot before each part."""
    if glob in ("", "."):
        return ""
    parts: list[list[str]] = [[]]
    for token in _tokens(glob):
        if token == ".":
            parts.append([])
        else:
            parts[-1].append(token)
    if [] in parts:
        raise ValueError("a part between two dots is empty")
    runs = [""]
    for part in parts:
        if part == ["*", "*"]:
            runs.append("")
        else:
            runs[-1] += rf"\.{_part_regex(part)}{_END}"
    return _with_gaps(runs, _PARTS)


_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
"""A part of a path that is a range of numbers."""


def _part_regex(tokens: Sequence[str]) -> str:
    """Return the regular expression of a part of a path: a glob, or a range of numbers, also as it is written."""
    glob = _stars_regex(tokens, "[^.]")
    found = _RANGE.fullmatch("".join(tokens))
    if found is None or int(found[1]) > int(found[2]):
        return glob
    return f"(?:{glob}|{_range_regex(int(found[1]), int(found[2]))})"


def _range_regex(first: int, last: int) -> str:
    """Return the regular expression of the decimal numbers from ``first`` to ``last``.

    Examples:
        >>> _range_regex(0, 19), _range_regex(8, 123)
        ('(?:[0-9]|1[0-9])', '(?:[8-9]|[1-9][0-9]|1(?:[0-1][0-9]|2[0-3]))')
    """
    alternatives: list[str] = []
    while first <= last:
        end = min(last, 10 ** len(str(first)) - 1)  # numbers of as many digits
        alternatives.append(_digits_regex(str(first), str(end)))
        first = end + 1
    return f"(?:{'|'.join(alternatives)})" if len(alternatives) > 1 else alternatives[0]


def _digits_regex(low: str, high: str) -> str:
    """Return the regular expression of the numbers between two of the same number of digits."""
    if low[:1] == high[:1]:
        return low[:1] + _digits_regex(low[1:], high[1:]) if low else ""
    lowest, highest = "0" * (len(low) - 1), "9" * (len(low) - 1)
    first, last = int(low[0]), int(high[0])
    alternatives: list[str] = []
    if low[1:] != lowest:
        alternatives.append(low[0] + _digits_regex(low[1:], highest))
        first += 1
    end = "" if high[1:] == highest else high[0] + _digits_regex(lowest, high[1:])
    last -= bool(end)
    if first <= last:
        digits = f"[{first}-{last}]" if first < last else str(first)
        alternatives.append(digits + "[0-9]" * len(lowest))
    if end:
        alternatives.append(end)
    return f"(?:{'|'.join(alternatives)})" if len(alternatives) > 1 else alternatives[0]


def _class_regex(glob: str) -> str:
    """Return the regular expression of a glob on class names, whose stars also match dots."""
    return _stars_regex(list(_tokens(glob)), "(?s:.)", negations="!")


def _stars_regex(tokens: Sequence[str], character: str, negations: str = "!^") -> str:
    """Return the regular expression of a glob; ``character`` matches any character that a star may match."""
    runs = [""]
    for token in tokens:
        if token == "*":
            runs.append("")
        elif token == "?":
            runs[-1] += character
        elif len(token) > 1:
            runs[-1] += rf"(?={character}){_bracket_regex(token[1:-1], negations)}"
        else:
            runs[-1] += re.escape(token)
    return _with_gaps(runs, f"{character}*")


def _with_gaps(runs: Sequence[str], gap: str) -> str:
    """Join expressions, each of which matches texts of one length, with gaps of any length.

    Each gap is as short as possible, without backtracking; the last one extends to the last
    expression.
    """
    first, *others = runs
    if not others:
        return first
    middle = "".join(f"(?>{gap}?{run})" for run in others[:-1] if run)
    return f"{first}{middle}{gap}{others[-1]}"


def _bracket_regex(inside: str, negations: str) -> str:
    """Return the regular expression of a bracket with characters and ranges.

    ``negations``: characters that negate the bracket if they are the first in it.
    """
    negated = inside.startswith(tuple(negations))
    characters, position = inside[negated:], 0
    items = list[str]()
    while position < len(characters):
        ends = [characters[position]]
        if characters.startswith("-", position + 1) and position + 2 < len(characters):
            ends.append(characters[position + 2])
        items.append("-".join(map(re.escape, ends)))
        position += 2 * len(ends) - 1
    return f"[{'^' if negated else ''}{''.join(items)}]"
