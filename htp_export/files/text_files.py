"""Read JSON and YAML files of users, and write JSON files and pages, but never over a model."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from htp_export.errors import FileError, in_one_line
from htp_export.files.filesystem import opened_plain
from htp_export.files.targets import Kind, check_target
from htp_export.files.write_file import replace_file
from htp_export.format.json_text import parse_json


@contextlib.contextmanager
def named_if_unwritable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Replace an ``OSError`` of a ``with`` block by a `FileError` that names the file or folder."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(path, f"cannot be written: {error.strerror or error}") from error


_BEGINNING = 4096
"""Bytes: a trace has up to 300 MB, and each form differs in its first keys."""


def beginning_of(path: str | os.PathLike[str]) -> str:
    """Return the first characters of a text file, without leading space; empty if it cannot be read."""
    try:
        with opened_plain(path) as file:
            return file.read(_BEGINNING).decode("utf-8-sig", "replace").lstrip()
    except (OSError, FileError):
        return ""


def read_json(path: str | os.PathLike[str], *, plain: bool = False) -> Any:
    """Read a JSON file; a `FileError` if it cannot be read or is not JSON.

    ``plain``: refuse a pipe or a device, for a path that the user did not name. Reading a pipe
    waits for its writer.
    """
    with (
        _named_if_unreadable(path, "JSON"),
        opened_plain(path) if plain else Path(path).open("rb") as file,
    ):
        return parse_json(file.read(), finite=False)  # results may contain NaN and infinity


@contextlib.contextmanager
def _named_if_unreadable(
    path: str | os.PathLike[str], form: str, advice: str = ""
) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError.unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise FileError(path, f"is not {form}: it is not a text file") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise FileError(path, f"is not {form}: {in_one_line(error)}{advice}") from error


def write_json(file: Path, content: Any) -> Path:
    """Write a JSON file into a temporary folder, and return its path; an `OSError` if that fails."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    file.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    return file


def write_text(path: str | os.PathLike[str], text: str, kind: Kind = Kind.PAGE) -> None:
    """Write a text file completely or not at all; a `FileError` if that fails, or for the extension of a model.

    Examples:
        >>> write_text("bert.onnx", "<!doctype html>")
        Traceback (most recent call last):
        ...
        htp_export.errors.FileError: bert.onnx: has the extension of a model; choose another name, such as bert.html
    """
    check_target(path, kind)
    with named_if_unwritable(path), replace_file(Path(path)) as new:
        new.write_text(text, encoding="utf-8", newline="\n")


class _Loader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML has no types
    """A loader that keeps keys as strings: ``1.10`` is a module path and not a number."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping; an error for a repeated key."""
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                problem = "a key must be a string"
            elif key in mapping:
                problem = f"the key {key!r} is repeated"
            else:
                mapping[key] = self.construct_object(value_node, deep=True)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        return mapping


_Loader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG,
    lambda loader, node: loader.construct_mapping(node),
)


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Read a YAML or JSON file; a `FileError` if it cannot be read, is not YAML, or repeats a key."""
    with _named_if_unreadable(path, "YAML", "; put selectors with '*' or '!' into quotes"):
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)


def line_in_yaml(path: str | os.PathLike[str], place: Sequence[int | str]) -> int:
    """Return the line number, from 1, of an entry of a valid YAML file.

    ``place`` is the path to the entry: keys of mappings and indices of lists. If an entry does not
    exist, the line is that of the last one before it.
    """
    node = yaml.compose(Path(path).read_text(encoding="utf-8"), _Loader)
    line = node.start_mark.line
    for key in place:
        if isinstance(node, yaml.MappingNode):
            entries = [entry for entry in node.value if entry[0].value == key]
            if not entries:
                break
            key_node, node = entries[0]
            line = key_node.start_mark.line
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
            node = node.value[key]
            line = node.start_mark.line
        else:
            break
    return int(line) + 1
