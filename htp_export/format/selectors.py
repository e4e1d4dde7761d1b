"""Selectors: one small language wherever modules are named, by path or by class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from htp_export.errors import SelectorError, nearest_names
from htp_export.format.patterns import Pattern
from htp_export.format.tags import ancestors


def select(pattern: str | Sequence[str], classes: Mapping[str, str]) -> list[str]:
    r"""The module paths that a selector names.

    ==================
    ===============================================================================
    ``encoder.layer.*``  a glob on paths: ``*``, ``?`` and ``[...]`` stay within one part of a path
    ``encoder.**``       ``**`` is any number of parts, none too: ``encoder`` and everything below
    it ``.`` or ``""``      the root ``class:LayerNorm``  a glob on the class, by its simple or its
    full name ``re:.*\.(q|k)``      a regular expression that matches the whole path, see below; it
    may hold commas ``a,b`` or a list    the union ``!dropout``         not these, wherever it
    stands; with nothing but exclusions, all others ==================
    ===============================================================================

    A selector may be that of a file: it is matched in time linear in the length of a path. Regular
    expressions are those of ``re``, without references to groups, atomic groups and possessive
    repeats.

    Args:
        pattern: The selector. A comma splits it, except inside ``[...]`` and after ``re:``.
        classes: Module path → fully qualified class name, for every module.

    Returns:
        The selected paths, each once, in the order of ``classes``.

    Raises:
        SelectorError: If the selector is empty or cannot be read, or if a part of it matches no
            module.

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
    """The modules that a selector names, with all modules below them; an excluded module takes those below it with it.

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
    """The modules that a selector names, without any of those that it excludes, and the excluded ones.

    Examples:
        >>> chosen_and_excluded("layer,!head", {"": "net.Net", "layer": "net.Block", "head": "torch.nn.Linear"})
        ({'layer'}, {'head'})
    """
    chosen, excluded = _matched(_terms(pattern), classes)
    if excluded:
        select_below(pattern, classes)  # which says so if nothing is left
    return chosen - excluded, excluded


@dataclass(frozen=True)
class Place:
    """One side of modules, as a selector writes it: ``encoder.layer.*:out``, ``fc#2:in[x]``.

    Attributes:
        text: The selector.
        modules: The selector of the modules.
        side: ``"in"`` or ``"out"``; ``""`` for both, where it excludes.
        call: Number of the call, from 0; None for all calls.
        name: The argument of ``forward``, or its position among the tensors of that side; ``""``
            for the first.
        excludes: Whether it begins with ``!``.
    """

    text: str
    modules: str
    side: str
    call: int | None = None
    name: str = ""
    excludes: bool = False


def places_of(pattern: str | Sequence[str]) -> list[Place]:
    """The places that a selector names; commas and ``!`` are those of `select`.

    Raises:
        SelectorError: If a part of it is empty, or says no side.

    Examples:
        >>> [(place.modules, place.side, place.call, place.name) for place in places_of("layer.*:out, fc#2:in[x]")]
        [('layer.*', 'out', None, ''), ('fc', 'in', 2, 'x')]
        >>> places_of("layer.0")
        Traceback (most recent call last):
        ...
        htp_export.errors.SelectorError: selector 'layer.0': says no side; write 'layer.0:in' or 'layer.0:out'
    """
    return [
        _place(text) for text in _texts(pattern, "an empty list names no tensor; write 'PATH:out'")
    ]


def _place(text: str) -> Place:
    _check_length(text)
    body = text.removeprefix("!").lstrip()
    match = _PLACE.fullmatch(body)
    if match is None or not (match["side"] or body != text):
        raise SelectorError(text, f"says no side; write {f'{body}:in'!r} or {f'{body}:out'!r}")
    call = None if match["call"] is None else int(match["call"])
    return Place(
        text,
        match["modules"],
        match["side"] or "",
        call,
        match["name"] or "",
        excludes=body != text,
    )


_LONGEST = 10_000  # characters between two commas: the time to read them grows with their square


def _check_length(text: str) -> None:
    if len(text) > _LONGEST:
        raise SelectorError(text, f"is longer than {_LONGEST:,} characters")


_PLACE = re.compile(
    r"(?P<modules>.*?)(?:#(?P<call>[0-9]{1,9}))?(?::(?P<side>in|out)(?:\[(?P<name>[^\]]+)\])?)?",
    re.DOTALL,
)


def _terms(pattern: str | Sequence[str]) -> list[_Term]:
    return [
        _term(text)
        for text in _texts(pattern, "an empty list selects nothing; write '**' for every module")
    ]


def _texts(pattern: str | Sequence[str], if_empty: str) -> list[str]:
    texts = [
        text
        for item in ([pattern] if isinstance(pattern, str) else pattern)
        for text in _split(item)
    ]
    if not texts:
        raise SelectorError("", if_empty)
    return texts


def _matched(terms: Sequence[_Term], classes: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """The paths that the terms of a selector name, and those that they exclude."""
    chosen: set[str] = set() if any(not term.excludes for term in terms) else set(classes)
    excluded: set[str] = set()
    for term in terms:
        try:
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
    return {path for path in classes if any(above in paths for above in ancestors(path))}


@dataclass(frozen=True)
class _Term:
    text: str
    excludes: bool
    kind: str  # "glob", "class" or "re"
    regex: re.Pattern[str] | Pattern

    def matches(self, path: str, class_name: str) -> bool:
        if self.kind == "class":
            return any(map(self.regex.fullmatch, (class_name.rpartition(".")[2], class_name)))
        if self.kind == "glob" and path:
            # as in _glob_regex: every part stands after a dot, and the root is ""
            path = "." + path
        return bool(self.regex.fullmatch(path))

    def hint(self, classes: Mapping[str, str]) -> str:
        wanted = self.text.removeprefix("!").removeprefix(self.kind + ":")
        known = (
            {name.rpartition(".")[2] for name in classes.values()}
            if self.kind == "class"
            else classes
        )
        nearest = nearest_names(wanted, sorted(known), cutoff=0.4)
        if nearest:
            return f"; nearest: {', '.join(map(repr, nearest))}"
        some = sorted(name or "." for name in known)
        return f"; there are {', '.join(map(repr, some[:_MOST_LISTED]))}{' and more' if some[_MOST_LISTED:] else ''}"


_MOST_LISTED = 5  # modules in a message that has none that is near


def _split(text: str) -> list[str]:
    """The parts of a selector between commas; a comma in brackets or after ``re:`` splits nothing."""
    if not isinstance(text, str):
        raise SelectorError(repr(text), "a selector is a string or a list of strings")
    parts, start, place, begins = list[str](), 0, 0, True
    for token in _tokens(text):
        if token == ",":
            parts.append(text[start:place].strip())
            start, begins = place + 1, True
        elif token == ":" and begins:
            begins = False
            if text[start:place].strip().removeprefix("!").lstrip() == "re":
                break
        place += len(token)
    parts.append(text[start:].strip())
    if len(parts) > 1 and "" in parts:
        raise SelectorError(text, "nothing stands between two commas; write '.' for the root")
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
    """The characters of a selector, and its brackets, as ``[a-z]``; a "]" right behind the opening one closes nothing.

    A bracket that is never closed is a character.
    """
    place, may_close = 0, True
    while place < len(text):
        end = place + 1
        if text[place] == "[" and may_close:
            inside = end + text.startswith("!", end)
            closing = text.find("]", inside + 1)
            may_close = closing >= 0
            end = closing + 1 if may_close else end
        yield text[place:end]
        place = end


# Regular expressions of globs are matched by `re`, without a way back into what a star has matched:
# the first place where what follows a star can match is as good as any later one, as long as
# another star follows.

_END = r"(?=\.|\Z)"  # of a part of a path
_PARTS = r"(?:\.[^.]++)*"


def _glob_regex(glob: str) -> str:
    """The regular expression of a glob on paths that are written with a dot before every part."""
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
            runs[-1] += rf"\.{_stars_regex(part, '[^.]')}{_END}"
    return _with_gaps(runs, _PARTS)


def _class_regex(glob: str) -> str:
    """The regular expression of a glob on the names of classes, whose stars match dots, too."""
    return _stars_regex(list(_tokens(glob)), "(?s:.)", negations="!")


def _stars_regex(tokens: Sequence[str], character: str, negations: str = "!^") -> str:
    """The regular expression of a glob; ``character`` is that of any character that a star may match."""
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
    """Expressions with a ``gap`` of any length between them, each of which matches texts of one length.

    A gap is as short as it can be, once and for all; the last one is as long as it can be, up to
    the last expression.
    """
    first, *others = runs
    if not others:
        return first
    middle = "".join(f"(?>{gap}?{run})" for run in others[:-1] if run)
    return f"{first}{middle}{gap}{others[-1]}"


def _bracket_regex(inside: str, negations: str) -> str:
    """The regular expression of what a bracket contains: characters, and ranges of them.

    ``negations``: Characters that negate it where they come first.
    """
    negated = inside.startswith(tuple(negations))
    characters, place = inside[negated:], 0
    items = list[str]()
    while place < len(characters):
        ends = [characters[place]]
        if characters.startswith("-", place + 1) and place + 2 < len(characters):
            ends.append(characters[place + 2])
        items.append("-".join(map(re.escape, ends)))
        place += 2 * len(ends) - 1
    return f"[{'^' if negated else ''}{''.join(items)}]"
