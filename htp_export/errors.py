"""Errors of htp_export, as a tree; each contains the file, module or node at fault.

::

    HtpExportError
    ├── InputError               an argument is invalid (exit status 2 of the command line)
    │   ├── FileError            a file is missing, unreadable, invalid, or cannot be written
    │   ├── UnknownModuleError   the model has no module with this path
    │   ├── SelectorError        a selector is invalid, or matches nothing
    │   ├── RuleError            a rule of a plan cannot be applied
    │   ├── UntaggedModelError   the function requires tags, and the file has none
    │   ├── ModelSourceError     a model cannot be created (hub id, folder, type, entry point)
    │   ├── OpenDimensionError   sizes of open dimensions are missing, or no such dimension exists
    │   ├── UserCodeError        user code raised an error: a metric, a factory, an iterator
    │   └── OnnxRuntimeError     ONNX Runtime cannot load or run a model
    ├── PassError                a pass of `optimize` failed; names the passes that ran before
    ├── StepError                a step of `pipeline` failed; names its input file
    ├── ToolError                a tool of `htp_export.tools` failed, or wrote an invalid model
    ├── ResultError              the result is not valid ONNX, and is not written; a bug
    ├── CaptureError             htp_export could not follow an export; a bug of htp_export
    └── TorchChangedError        a private part of torch that htp_export needs has changed

A failed export is not in the tree: it raises torch's own error, with notes: the module and the line
of the model, a remedy, and the next step. ``tagging(strict=False)`` turns the last two errors into
an `UntaggedExportWarning`, and the model is exported without tags.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "CaptureError",
    "FileError",
    "HtpExportError",
    "InputError",
    "ModelSourceError",
    "OnnxRuntimeError",
    "OpenDimensionError",
    "PassError",
    "ResultError",
    "SelectorError",
    "StepError",
    "ToolError",
    "TorchChangedError",
    "UnknownModuleError",
    "UntaggedExportWarning",
    "UntaggedModelError",
    "UserCodeError",
    "described",
    "first_line",
    "in_one_line",
    "nearest_names",
    "unknown_name",
]


# the address of an object in Python's default ``repr``
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")


def without_addresses(text: str) -> str:
    """Remove addresses of objects, which differ in each run, from a message.

    Examples:
        >>> without_addresses("<onnx_ir.passes.PassManager object at 0x7f26e6886c50> failed at 0x10")
        '<onnx_ir.passes.PassManager object> failed at 0x10'
    """
    return _ADDRESS.sub("", text)


_LONG_WORD = re.compile(
    r"\S{401,}"
)  # a name or value in a file: paths that people type are shorter
_KEPT_OF_WORD = 250, 100  # characters at its start and its end: enough to recognize it
_KEPT = 2_500, 1_000  # characters of a message: it starts with the file, and ends with the advice


def shortened(text: str) -> str:
    """Shorten the long names and values in a message in their middle: a file may contain names of megabytes.

    Examples:
        >>> shortened(f"net.onnx: no module {'x' * 5_000_000!r}; give another")[:60]
        "net.onnx: no module 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
        >>> len(shortened(f"net.onnx: no module {'x' * 5_000_000!r}; give another"))
        413
    """
    short = _LONG_WORD.sub(lambda match: _without_middle(match[0], *_KEPT_OF_WORD), text)
    if len(short) <= sum(_KEPT):
        return short
    return _without_middle(short, *_KEPT)


def _without_middle(text: str, begin: int, end: int) -> str:
    return f"{text[:begin]}... ({len(text) - begin - end:,} characters) ...{text[-end:]}"


def in_one_line(error: BaseException) -> str:
    r"""Return the message of an error of another library in one line, for use in a message.

    Examples:
        >>> in_one_line(ValueError("no such size\n  in this tensor"))
        'no such size in this tensor'
    """
    return without_addresses(" ".join(str(error).split()))


def first_line(error: BaseException, lines: int = 1) -> str:
    r"""Return the first non-empty lines of the message of an error, in one line; its type if there are none.

    For an error that onnx_ir or an import wraps, this is the message of the original error.

    Examples:
        >>> first_line(ValueError("\nno such size\n  in this tensor"))
        'no such size'
    """
    original = _innermost(error)
    text = [line.strip() for line in str(original).splitlines() if line.strip()]
    return without_addresses(" ".join(text[:lines])) or type(original).__name__


# onnx_ir raises an error at each level, for its files and its passes
_OUTER = ("Error calling", "An error occurred when running the ")


def _innermost(error: BaseException) -> BaseException:
    """Return the original error that onnx_ir or an import has wrapped."""
    if any(phrase in str(error) for phrase in _OUTER):
        while deeper := error.__cause__ or error.__context__:
            error = deeper
    # the error of a lazy import names only the missing object
    while isinstance(error, ImportError) and error.__cause__:
        error = error.__cause__
    return error


def described(error: BaseException, lines: int = 1) -> str:
    r"""Return the type of an error and the first lines of its message.

    Examples:
        >>> described(ValueError("no such size\n  in this tensor")), described(KeyError())
        ('ValueError: no such size', 'KeyError')
    """
    name, message = type(_innermost(error)).__name__, first_line(error, lines)
    return name if message == name else f"{name}: {message}"


# characters: the time of a comparison grows with their square, and names in a file may be long
_LONGEST_COMPARED = 200


def nearest_names(
    name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5
) -> list[str]:
    """Return the known names that are similar to an unknown one; empty for a very long name.

    Examples:
        >>> nearest_names("encoder.layers.0", ["encoder.layer.0", "head"])
        ['encoder.layer.0']
        >>> nearest_names("FP32", ["fp32", "int8"], count=1)
        ['fp32']
    """
    if len(name) > _LONGEST_COMPARED:
        return []
    candidates = [candidate for candidate in known if len(candidate) <= _LONGEST_COMPARED]
    for candidate in candidates:
        if candidate.lower() == name.lower():
            return [candidate]
    return difflib.get_close_matches(name, candidates, n=count, cutoff=cutoff)


def unknown_name(name: object, known: Iterable[str]) -> str:
    """Describe a name that is unknown, for a message: all known names, and the nearest one.

    Examples:
        >>> unknown_name("FP32", ["fp32", "int8"])
        "'FP32'; there are fp32, int8; nearest: fp32"
    """
    names = list(known)
    nearest = nearest_names(str(name), names, count=1)
    listed = f"{name!r}; there are {', '.join(names)}"
    return f"{listed}; nearest: {nearest[0]}" if nearest else listed


class HtpExportError(Exception):
    """Base class of the errors that htp_export raises.

    Messages contain no addresses of objects, and only the start and the end of very long names and
    values.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*map(_readable, args))


def _readable(argument: object) -> object:
    return shortened(without_addresses(argument)) if isinstance(argument, str) else argument


class InputError(HtpExportError):
    """An argument is invalid; nothing was written."""


class FileError(InputError):
    """A file cannot be read or written; ``problem`` is the reason and the remedy."""

    def __init__(self, path: str | os.PathLike[str], problem: str) -> None:
        name = os.fspath(path)
        # names may contain line breaks
        super().__init__(f"{name if name.isprintable() else repr(name)}: {problem}")
        self.path = Path(path)
        self.problem = problem

    @classmethod
    def unreadable(cls, path: str | os.PathLike[str], error: OSError) -> FileError:
        """Create the error for a file that the operating system cannot open or read."""
        # Windows raises a PermissionError for a folder
        is_denied_folder = isinstance(error, PermissionError) and Path(path).is_dir()
        if is_denied_folder or isinstance(error, IsADirectoryError):
            return cls(path, "is a folder; name a file in it")
        return cls(path, f"cannot be read: {error.strerror or error}")


class TargetError(FileError, OSError):
    """A file cannot be written; an ``OSError``, too, because ``torch.onnx.export`` raises one."""


class FolderTargetError(TargetError, IsADirectoryError):
    """The output is an existing folder, and not a file."""

    def __init__(self, path: str | os.PathLike[str], problem: str) -> None:
        super().__init__(path, problem)
        self.errno = errno.EISDIR


class UnknownModuleError(InputError, KeyError):
    """The model has no such module; the message contains similar paths.

    Args:
        path: The module path.
        known: The module paths of the model, or of the result.
        where: A noun for the object that has no such module.
        described: A description of the node, tensor or parameter with this name; ``""`` without
            one.
    """

    def __init__(
        self, path: str, known: Iterable[str], where: str = "model", described: str = ""
    ) -> None:
        self.path = path
        self.nearest = tuple(nearest_names(path, known))
        hint = f"; nearest: {', '.join(map(repr, self.nearest))}" if self.nearest else ""
        if described:
            hint = f"; it is {described}"
        if set(path) & set("*?[") or path.startswith(("class:", "re:", "!")):
            hint = f"; this takes one module, and no selector{hint}"
        super().__init__(f"no module {path!r} in this {where}{hint}")

    def __str__(self) -> str:
        return str(self.args[0])


class SelectorError(InputError):
    """A selector is invalid, or matches nothing; ``problem`` is the reason and the remedy."""

    def __init__(self, pattern: str, problem: str) -> None:
        super().__init__(f"selector {pattern!r}: {problem}")
        self.pattern = pattern


class RuleError(InputError):
    """The rule of a plan with this selector cannot be applied; ``problem`` is the reason and the remedy."""

    def __init__(self, selector: str, problem: str) -> None:
        super().__init__(f"rule {selector!r}: {problem}")
        self.selector = selector
        self.problem = problem


class UntaggedModelError(InputError):
    """The function requires module tags, and the model has none."""


class ModelSourceError(InputError):
    """A model cannot be created from ``source``: a hub id, folder, model type or entry point."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.source = source


class UserCodeError(InputError):
    """User code, ``what``, raised an error, which is the cause; the message contains its last line that ran."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what}: {problem}")
        self.what = what


class OnnxRuntimeError(InputError):
    """ONNX Runtime cannot load or run a model.

    Args:
        model: Name of the model in the message.
        action: ``load`` or ``run``.
        problem: The message of ONNX Runtime.
        node: Name of the node at fault; empty if it is unknown.
        modules: The modules that own the node, if they are known.
    """

    def __init__(
        self, model: str, action: str, problem: str, node: str = "", modules: Iterable[str] = ()
    ) -> None:
        self.model, self.action, self.problem, self.node = model, action, problem, node
        self.modules = tuple(modules)
        where = f" in module {', '.join(map(repr, self.modules))}" if self.modules else ""
        super().__init__(f"{model}: ONNX Runtime cannot {action} it{where}: {problem}")


class OpenDimensionError(InputError):
    """Sizes of open dimensions are missing, or are given for dimensions that the model does not have.

    Args:
        names: The dimensions at fault: names, ``x: 1`` for one without a name, ``x: all`` for a
            whole shape.
        problem: The reason and the remedy.
    """

    def __init__(self, names: Iterable[str], problem: str) -> None:
        super().__init__(problem)
        self.names = tuple(names)


class ToolError(HtpExportError):
    """A tool, by its name in `htp_export.tools`, failed on a model; nothing was written."""

    def __init__(self, tool: str, problem: str) -> None:
        super().__init__(f"{tool} {problem}")
        self.tool = tool


class TorchChangedError(HtpExportError):
    """A private part of torch that htp_export needs, by its dotted name, is missing or has changed."""

    def __init__(self, what: str, problem: str = "is gone") -> None:
        import torch

        super().__init__(
            f"torch {torch.__version__}: {what} {problem}, and htp_export needs it to see modules during an export; "
            "install a torch version that htp_export supports (see its pyproject.toml)"
        )
        self.what = what


class ResultError(HtpExportError):
    """A result is not valid ONNX, and was not written; existing files are unchanged.

    Args:
        path: The file.
        problem: The error that onnx reports for the model, with the node.
        node: Name of the node at fault; empty if it is unknown.
        modules: The modules that own the node.
        before: An error of the source model; empty if that is valid.
    """

    def __init__(
        self,
        path: str | Path,
        problem: str,
        node: str = "",
        modules: Iterable[str] = (),
        before: str = "",
    ) -> None:
        cause = (
            "The source model does not have this error, so it is an error of the change. If a function of htp_export "
            "changed the model, please report it"
        )
        if before:
            cause = f"The source model is not valid either, and must be corrected first: {before}"
        super().__init__(f"{path}: not written, because the model is not valid: {problem}. {cause}")
        self.path, self.problem, self.node, self.modules = Path(path), problem, node, tuple(modules)


class PassError(HtpExportError):
    """A pass failed after the passes in ``ran``; the model is unchanged, and nothing was written."""

    def __init__(self, name: str, ran: Iterable[str], problem: Exception) -> None:
        self.ran = tuple(ran)
        before = f"after {', '.join(self.ran)}" if self.ran else "as the first one"
        super().__init__(
            f"pass {name!r} failed ({described(problem)}); it ran {before}; leave it out with passes=[...] to go on"
        )
        self.name = name
        self.problem = problem


class StepError(HtpExportError):
    """A step of a pipeline failed; the files of the earlier steps remain.

    Args:
        number: Its position among the steps, from 1.
        name: The step.
        file: Its input file.
        problem: The error.
    """

    def __init__(self, number: int, name: str, file: str | Path, problem: Exception) -> None:
        failure = f"step {number} ({name}) failed on {file} ({described(problem)})"
        super().__init__(f"{failure}; run again to continue from there")
        self.number, self.name, self.file, self.problem = number, name, Path(file), problem


class CaptureError(HtpExportError):
    """htp_export failed in a step, ``seam``, of following an export, so that the modules of nodes are unknown."""

    def __init__(self, seam: str, problem: Exception) -> None:
        super().__init__(
            f"htp_export failed while {seam} ({described(problem)}). This is a bug of htp_export, not of the model: "
            "please report it, with the traceback and the smallest model that shows it. To export the model without "
            "module tags meanwhile: htp_export.tagging(strict=False), or --allow-untagged on the command line"
        )
        self.seam = seam
        self.problem = problem


class UntaggedExportWarning(UserWarning):
    """A model was exported without module tags, as ``tagging(strict=False)`` allows; the message is the reason."""
