"""Module paths, owners and the keys under which they are written into ONNX files.

Knows neither torch nor ONNX: paths are strings, as ``model.named_modules()`` gives them, and the
root is ``""``. See ``docs/format.md`` for the file format.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import (
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from enum import StrEnum
from functools import lru_cache
from typing import Any

from htp_export.format.bounds import MOST_CHARACTERS
from htp_export.format.json_text import parse_json


class Reason(StrEnum):
    """How the owners of a node are known."""

    # from the capture of an export
    SCOPE = "scope"
    SHARED = "shared"
    FUSED = "fused"
    FLOW = "flow"
    PARAMETERS = "parameters"
    # from what was done to the model
    FUNCTION = "function"
    SPLICED = "spliced"
    # from `carry`
    TENSOR = "tensor"
    NODE = "node"
    INITIALIZER = "initializer"
    VALUES = "values"
    REGION = "region"
    INSERTED = "inserted"
    UNKNOWN = "unknown"


VERSION = "1"

# On nodes.
MODULE = "htp.module"
OWNERS = "htp.owners"
CALL = "htp.call"
CALLS = "htp.calls"
REASON = "htp.reason"
NAMESPACE = "namespace"
NODE_KEYS = (MODULE, OWNERS, CALL, CALLS, REASON, NAMESPACE)

# On initializers.
RECIPE = "htp.recipe"

# On the model.
FORMAT = "htp.version"
MODULES = "htp.modules"
CALLERS = "htp.callers"
SIGNATURES = "htp.signatures"
PARAMETERS = "htp.parameters"
CONTAMINATION = "htp.contamination"
FUNCTIONS = "htp.functions"
LORA = "htp.lora"
TAPS = "htp.taps"
MAP = "htp.map"
PROVENANCE = "htp.provenance"
PLACEMENT = "htp.placement"
# of the file, not of the model: it is there where a file shares the weights of another
WEIGHTS = "htp.weights"
DATA = "htp.data"  # of the file, too: what is in its own data files
WAY = "htp.way"  # of a graph in memory that is no ONNX file: how it was got
ATEN = "aten"  # domain of torch's own operators in such a graph
MODEL_KEYS = (
    FORMAT,
    MODULES,
    CALLERS,
    SIGNATURES,
    PARAMETERS,
    CONTAMINATION,
    FUNCTIONS,
    MAP,
    PROVENANCE,
)


def is_under(path: str, ancestor: str) -> bool:
    """Whether ``path`` is ``ancestor`` or lies below it.

    Examples:
        >>> is_under("encoder.layer.1", "encoder"), is_under("encoder2", "encoder"), is_under("a", "")
        (True, False, True)
    """
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


@lru_cache(maxsize=1 << 16)  # one string for each path: deep trees copy and hash it once
def parent_path(path: str) -> str | None:
    """The path one level up; None for the root.

    Examples:
        >>> parent_path("encoder.layer.1"), parent_path("encoder"), parent_path("")
        ('encoder.layer', '', None)
    """
    return path.rpartition(".")[0] if path else None


def below(prefix: str, path: str) -> str:
    """The path of a module inside another one, in the whole; the name of a parameter too.

    Examples:
        >>> below("encoder", "layer.0"), below("", "layer.0"), below("encoder", "")
        ('encoder.layer.0', 'layer.0', 'encoder')
    """
    return f"{prefix}.{path}" if prefix and path else prefix or path


def path_order(path: str) -> tuple[tuple[int, str], ...]:
    """What to sort paths by: numbers in them count as numbers.

    Examples:
        >>> sorted(["layer.10", "layer.2", "head"], key=path_order)
        ['head', 'layer.2', 'layer.10']
    """
    return tuple(map(_part_order, path.split(".")))


def _part_order(part: str) -> tuple[int, str]:
    """A number is after one with fewer digits: it is not computed, because a part of a path may have any length."""
    if not (part.isascii() and part.isdecimal()):
        return -1, part
    digits = part.lstrip("0")
    return len(digits), digits


def ancestors(path: str) -> Iterator[str]:
    """The path itself and everything above it, up to the root.

    Examples:
        >>> list(ancestors("a.b"))
        ['a.b', 'a', '']
    """
    current: str | None = path
    while current is not None:
        yield current
        current = parent_path(current)


def nearest_above(path: str, among: Container[str]) -> str | None:
    """The nearest path above one that is among some; None where there is none.

    Examples:
        >>> nearest_above("a.b.c", {"", "a", "a.b.c"}), nearest_above("", {""})
        ('a', None)
    """
    return next((up for up in ancestors(path) if up != path and up in among), None)


def check_paths(paths: Iterable[str]) -> None:
    """Refuse (``ValueError``) module paths of a file that have too many paths above them.

    Examples:
        >>> check_paths(["encoder.layer.0"])
        >>> check_paths(["." * 100_000])
        Traceback (most recent call last):
        ValueError: the path of a module has 100,001 parts; with the paths above it, that is too long
    """
    left = MOST_CHARACTERS
    for path in paths:
        parts = path.count(".") + 1
        left -= len(path) * parts
        if left < 0:
            raise ValueError(
                f"the path of a module has {parts:,} parts; with the paths above it, that is too long"
            )


def all_above(paths: Iterable[str], known: Container[str] = ()) -> set[str]:
    """Every path that lies above one of ``paths``, up to the root or one that is ``known``; each is looked at once.

    Example:
        >>> sorted(all_above(["a.b.c", "a.b", "d"]))
        ['', 'a', 'a.b']
    """
    ancestors_of_paths: set[str] = set()
    for path in paths:
        above = parent_path(path)
        while above is not None and above not in ancestors_of_paths and above not in known:
            ancestors_of_paths.add(above)
            above = parent_path(above)
    return ancestors_of_paths


def common_ancestor(paths: Iterable[str]) -> str:
    """The deepest path that all of ``paths`` are under.

    Examples:
        >>> common_ancestor(["layer.0.query", "layer.0.key"]), common_ancestor(["a", "b"])
        ('layer.0', '')
    """
    parts = zip(*(path.split(".") if path else [] for path in paths), strict=False)
    return ".".join(
        names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, parts)
    )


def innermost(paths: Iterable[str]) -> tuple[str, ...]:
    """The paths that no other of them lies below, in the order given, each once.

    This turns a stack of running modules into owners, who belong to the modules above them.

    Examples:
        >>> innermost(["", "decoder", "decoder.fc", "embed"])
        ('decoder.fc', 'embed')
    """
    unique = list(dict.fromkeys(paths))
    if len(unique) < 2:
        return tuple(unique)
    above = all_above(unique)
    return tuple(path for path in unique if path not in above)


@lru_cache(maxsize=65536)
def _escape(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F").replace(";", "%3B")


def namespace(path: str, called: Collection[str]) -> str:
    """Return the path as graph viewers group it: ``/`` between modules, containers joined to their children.

    The modules that did not run (``nn.ModuleList`` and the like) are no level.

    Examples:
        >>> namespace("encoder.layer.0.query", {"", "encoder", "encoder.layer.0", "encoder.layer.0.query"})
        'encoder/layer.0/query'
    """
    levels, inner = list[str](), path
    for above in itertools.islice(ancestors(path), 1, None):
        if above in called or not above:
            levels.append(_escape(inner[len(above) + 1 :] if above else inner))
            inner = above
    return "/".join(reversed(levels))


def json_text(content: Any) -> str:
    """The value of a key of metadata that is JSON: without spaces."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def json_object(key: str, text: str, of: str, values: type = object) -> dict[str, Any]:
    """Parse the value of a key of a model's metadata that is a JSON object; a `ValueError` for anything else.

    ``values``: the class of its values.
    """
    try:
        listed = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{key} is not JSON: {error}") from error
    if not isinstance(listed, dict) or not all(
        isinstance(value, values) for value in listed.values()
    ):
        raise ValueError(f"{key} is not a JSON object of {of}")
    return listed


def owners_of(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The owners that a node's metadata names; empty for an untagged node.

    Examples:
        >>> owners_of({"htp.module": "layer", "htp.owners": '["layer.0", "layer.1"]'})
        ('layer.0', 'layer.1')
    """
    if OWNERS in metadata:
        try:
            listed = parse_json(metadata[OWNERS])
        except ValueError:
            listed = None
        if isinstance(listed, list) and listed and all(isinstance(path, str) for path in listed):
            return tuple(listed)
    return (metadata[MODULE],) if MODULE in metadata else ()


def encoded_calls(metadata: Mapping[str, str]) -> str:
    """Return the encoded calls in the metadata of a node, ``htp.calls`` or ``htp.call``; empty without them.

    Examples:
        >>> encoded_calls({"htp.module": "fc", "htp.call": "1"}), encoded_calls({"htp.calls": '{"fc":[0,2]}'})
        ('1', '{"fc":[0,2]}')
    """
    return metadata.get(CALLS) or metadata.get(CALL, "")


def calls_listed(encoded: str) -> dict[str, list[int]]:
    """Parse a value of ``htp.calls``: module path → numbers of its calls; empty if it is something else."""
    try:
        listed = parse_json(encoded) if encoded.startswith("{") else {}
    except ValueError:
        return {}
    for calls in listed.values():
        if not isinstance(calls, list) or not all(map(is_call_number, calls)):
            return {}
    return dict(listed)


def is_call_number(number: object) -> bool:
    """Whether a value of JSON is the number of a call, from 0."""
    return type(number) is int and number >= 0


def write_calls(metadata: MutableMapping[str, str], encoded: str) -> None:
    """Write the encoded calls of a node, and remove earlier ones."""
    for key in (CALL, CALLS):
        metadata.pop(key, None)
    if encoded:
        metadata[CALLS if encoded.startswith("{") else CALL] = encoded


def node_tags(
    owners: Sequence[str], reason: str, called: Collection[str], calls: str = ""
) -> dict[str, str]:
    """Return the tags of a node: its owners in order of execution, a `Reason` or ``""``, and its ``encoded_calls``.

    Examples:
        >>> node_tags(["layer.0", "layer.1"], "shared", {"", "layer.0", "layer.1"})["htp.owners"]
        '["layer.0","layer.1"]'
    """
    module = owners[0] if len(owners) == 1 else common_ancestor(owners)
    entry = {MODULE: module, REASON: str(reason), NAMESPACE: namespace(module, called)}
    if not reason:
        del entry[REASON]
    if len(owners) > 1:
        entry[OWNERS] = json_text(owners)
    write_calls(entry, calls)
    return entry


def tag_node(metadata: MutableMapping[str, str], entry: Mapping[str, str]) -> None:
    """Write a node's tags, as of ``node_tags``, in place of those that it had."""
    for key in NODE_KEYS:
        metadata.pop(key, None)
    metadata.update(entry)
