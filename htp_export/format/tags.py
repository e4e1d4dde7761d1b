"""Module paths, owners, and the metadata keys for them in ONNX files.

Independent of torch and ONNX: paths are strings, as in ``model.named_modules()``, and the root is
``""``. See ``docs/format.md`` for the file format.
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
    """The evidence for the owners of a node."""

    # from the capture of an export
    SCOPE = "scope"
    SHARED = "shared"
    FUSED = "fused"
    FLOW = "flow"
    PARAMETERS = "parameters"
    # from an edit of the model
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
SOURCE = "htp.source"
"""The line of the model's code that created a node: no tag, as owners change and it does not."""

CALIBRATION = "htp.calibration"  # the number of the calibration that measured ranges of the node

# On initializers.
RECIPE = "htp.recipe"
FLOATS = "htp.floats"  # of a constant that was rounded to integers: its floats

# On the model.
FORMAT = "htp.version"
MODULES = "htp.modules"
CALLERS = "htp.callers"
SIGNATURES = "htp.signatures"
PARAMETERS = "htp.parameters"
FROZEN = "htp.frozen"
ASSUMED = "htp.assumed"  # entries whose values the file was computed with
CONTAMINATION = "htp.contamination"
FUNCTIONS = "htp.functions"
LORA = "htp.lora"
TAPS = "htp.taps"
MAP = "htp.map"
PROVENANCE = "htp.provenance"
PLACEMENT = "htp.placement"
CALIBRATIONS = "htp.calibrations"
WEIGHTS = "htp.weights"  # describes the data files that the file shares with other models
DATA = "htp.data"  # describes the data files of the file
WAY = "htp.way"  # of a graph for inspection, which cannot be written: how it was captured
ATEN = "aten"  # the domain of torch's operators in such a graph
MODEL_KEYS = (
    FORMAT,
    MODULES,
    CALLERS,
    SIGNATURES,
    PARAMETERS,
    FROZEN,
    ASSUMED,
    CONTAMINATION,
    FUNCTIONS,
    MAP,
    PROVENANCE,
)


def is_under(path: str, ancestor: str) -> bool:
    """Return whether ``path`` is ``ancestor`` or one of its descendants.

    Examples:
        >>> is_under("encoder.layer.1", "encoder"), is_under("encoder2", "encoder"), is_under("a", "")
        (True, False, True)
    """
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def is_under_any(path: str, ancestors: Iterable[str]) -> bool:
    """Return whether ``path`` is one of ``ancestors`` or a descendant of one.

    Examples:
        >>> is_under_any("encoder.layer.1", ("decoder", "encoder")), is_under_any("encoder", ())
        (True, False)
    """
    return any(is_under(path, ancestor) for ancestor in ancestors)


@lru_cache(maxsize=1 << 16)  # one string for each path: deep trees copy and hash it once
def parent_path(path: str) -> str | None:
    """Return the path one level up; None for the root.

    Examples:
        >>> parent_path("encoder.layer.1"), parent_path("encoder"), parent_path("")
        ('encoder.layer', '', None)
    """
    return path.rpartition(".")[0] if path else None


def below(prefix: str, path: str) -> str:
    """Join the path of a module and a relative path, or the name of a parameter.

    Examples:
        >>> below("encoder", "layer.0"), below("", "layer.0"), below("encoder", "")
        ('encoder.layer.0', 'layer.0', 'encoder')
    """
    return f"{prefix}.{path}" if prefix and path else prefix or path


def path_order(path: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key for paths that orders numbers in them by their values.

    Examples:
        >>> sorted(["layer.10", "layer.2", "head"], key=path_order)
        ['head', 'layer.2', 'layer.10']
    """
    return tuple(map(_part_order, path.split(".")))


def _part_order(part: str) -> tuple[int, str]:
    """Return a sort key for a part of a path.

    Numbers are ordered by their number of digits first, and are not parsed, because a part of a
    path may have any length.
    """
    if not (part.isascii() and part.isdecimal()):
        return -1, part
    digits = part.lstrip("0")
    return len(digits), digits


def ancestors(path: str) -> Iterator[str]:
    """Iterate over a path and its ancestors, up to the root.

    Examples:
        >>> list(ancestors("a.b"))
        ['a.b', 'a', '']
    """
    current: str | None = path
    while current is not None:
        yield current
        current = parent_path(current)


def nearest_above(path: str, among: Container[str]) -> str | None:
    """Return the nearest ancestor of a path that is in ``among``; None without one.

    Examples:
        >>> nearest_above("a.b.c", {"", "a", "a.b.c"}), nearest_above("", {""})
        ('a', None)
    """
    return next((up for up in ancestors(path) if up != path and up in among), None)


def check_paths(paths: Iterable[str]) -> None:
    """Refuse (``ValueError``) module paths of a file that have too many ancestors.

    Examples:
        >>> check_paths(["encoder.layer.0"])
        >>> check_paths(["." * 100_000])
        Traceback (most recent call last):
        ValueError: the path of a module has 100,001 parts, which is too long
    """
    remaining = MOST_CHARACTERS
    for path in paths:
        parts = path.count(".") + 1
        remaining -= len(path) * parts
        if remaining < 0:
            raise ValueError(f"the path of a module has {parts:,} parts, which is too long")


def all_above(paths: Iterable[str], known: Container[str] = ()) -> set[str]:
    """Return the ancestors of ``paths``, up to the root or an ancestor in ``known``; each is visited once.

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
    """Return the deepest common ancestor of ``paths``.

    Examples:
        >>> common_ancestor(["layer.0.query", "layer.0.key"]), common_ancestor(["a", "b"])
        ('layer.0', '')
    """
    levels = zip(*(path.split(".") if path else [] for path in paths), strict=False)
    common = itertools.takewhile(lambda names: len(set(names)) == 1, levels)
    return ".".join(names[0] for names in common)


def innermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that have no descendants among ``paths``, in order, each once.

    For a stack of running modules, these are the owners of a node.

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
    """Return the path for graph viewers: ``/`` between modules, but containers are joined to their children.

    Containers, such as ``nn.ModuleList``, are modules that did not run.

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
    """Return the JSON text of a metadata value, without spaces."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def json_object(
    key: str, text: str, of: str, values: type | tuple[type, ...] = object
) -> dict[str, Any]:
    """Parse the value of a metadata key that is a JSON object; a `ValueError` for any other value.

    ``of`` describes its contents in the message; ``values`` is the class of its values, or several.
    """
    try:
        entries = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{key} is not JSON: {error}") from error
    if isinstance(entries, dict) and all(isinstance(entry, values) for entry in entries.values()):
        return entries
    raise ValueError(f"{key} is not a JSON object of {of}")


def owners_of(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the owners in a node's metadata; empty for an untagged node.

    Examples:
        >>> owners_of({"htp.module": "layer", "htp.owners": '["layer.0", "layer.1"]'})
        ('layer.0', 'layer.1')
    """
    if OWNERS in metadata:
        try:
            owners = parse_json(metadata[OWNERS])
        except ValueError:
            owners = None
        if isinstance(owners, list) and owners and all(isinstance(path, str) for path in owners):
            return tuple(owners)
    return (metadata[MODULE],) if MODULE in metadata else ()


def encoded_calls(metadata: Mapping[str, str]) -> str:
    """Return the encoded calls in the metadata of a node, ``htp.calls`` or ``htp.call``; empty without them.

    Examples:
        >>> encoded_calls({"htp.module": "fc", "htp.call": "1"}), encoded_calls({"htp.calls": '{"fc":[0,2]}'})
        ('1', '{"fc":[0,2]}')
    """
    return metadata.get(CALLS) or metadata.get(CALL, "")


def calls_listed(encoded: str) -> dict[str, list[int]]:
    """Parse a value of ``htp.calls``: module path → numbers of its calls; empty if it is invalid."""
    if not encoded.startswith("{"):
        return {}
    try:
        entries = parse_json(encoded)
    except ValueError:
        return {}
    for calls in entries.values():
        if not isinstance(calls, list) or not all(map(is_call_number, calls)):
            return {}
    return dict(entries)


def is_call_number(number: object) -> bool:
    """Return whether a JSON value is a valid number of a call."""
    return type(number) is int and number >= 0


def write_calls(metadata: MutableMapping[str, str], encoded: str) -> None:
    """Replace the encoded calls of a node; without ``encoded``, remove them."""
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
    """Replace the tags of a node by the result of ``node_tags``."""
    for key in NODE_KEYS:
        metadata.pop(key, None)
    metadata.update(entry)
