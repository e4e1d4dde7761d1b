"""JSON files, YAML files and pages: those that users give, and those that are written, never over a model."""

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
    """Raise a `FileError` that names a file or folder in place of an ``OSError``."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(path, f"cannot be written: {error.strerror or error}") from error


def read_json(path: str | os.PathLike[str], *, plain: bool = False) -> Any:
    """Read a JSON file; a `FileError` if it cannot be read or is not JSON.

    ``plain``: a pipe or a device is refused, because it was found in a folder. One that the user
    names is waited for.
    """
    with (
        _named_if_unreadable(path, "JSON"),
        opened_plain(path) if plain else Path(path).open("rb") as file,
    ):
        return parse_json(file.read(), finite=False)  # results may have numbers that are not finite


@contextlib.contextmanager
def _named_if_unreadable(
    path: str | os.PathLike[str], form: str, advice: str = ""
) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError.unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise FileError(path, f"is not {form}: it is no text") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise FileError(path, f"is not {form}: {in_one_line(error)}{advice}") from error


def write_json(file: Path, content: Any) -> Path:
    """Write a JSON file into a folder that is written whole, and return it; an `OSError` if that fails."""
    file.write_text(
        json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n"
    )
    return file


def write_text(path: str | os.PathLike[str], text: str, kind: Kind = Kind.PAGE) -> None:
    """Write a file whole or not at all; a `FileError` if that fails, or if it has the name of a model.

    Examples:
        >>> write_text("bert.onnx", "<!doctype html>")
        Traceback (most recent call last):
        ...
        htp_export.errors.FileError: bert.onnx: is the name of a model; name the page otherwise, such as bert.html
    """
    check_target(path, kind)
    with named_if_unwritable(path), replace_file(Path(path)) as new:
        new.write_text(text, encoding="utf-8", newline="\n")


class _Loader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML has no types
    """Reads keys as text as it is written: ``1.10`` is a module path, and no number."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Read a mapping; a key that stands there twice is a fault."""
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is text", key_node.start_mark
                )
            if key_node.value in found:
                problem = f"{key_node.value!r} stands there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            found[key_node.value] = self.construct_object(value_node, deep=True)
        return found


_Loader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG,
    lambda loader, node: loader.construct_mapping(node),
)


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Read a YAML file (JSON is YAML); a `FileError` if it cannot be read, is not YAML, or names a key twice."""
    with _named_if_unreadable(path, "YAML", "; put selectors with '*' or '!' into quotes"):
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)


def line_in_yaml(path: str | os.PathLike[str], place: Sequence[int | str]) -> int:
    """Return the line, from 1, of an entry of a file that `read_yaml` has read.

    The place is keys of mappings and positions in lists that lead to it; what is not in the file is
    left out.
    """
    node = yaml.compose(Path(path).read_text(encoding="utf-8"), _Loader)
    line = node.start_mark.line
    for key in place:
        if isinstance(node, yaml.MappingNode):
            found = next(((name, value) for name, value in node.value if name.value == key), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
            found = (node.value[key], node.value[key])
        else:
            found = None
        if found is None:
            break
        line, node = found[0].start_mark.line, found[1]
    return int(line) + 1
