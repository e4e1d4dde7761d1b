"""Errors of htp_export, as a tree; each carries the file, module or node at fault.

    HtpExportError ├── InputError               what the caller gave cannot be used (the command
    line exits with status 2) │   ├── FileError            a file is missing, unreadable, not ONNX,
    or cannot be written │   ├── UnknownModuleError   a module path that the model does not have │
    ├── SelectorError        a selector that cannot be read, or that matches nothing │   ├──
    UntaggedModelError   the work needs tags, and the file has none │   ├── ModelSourceError     a
    model cannot be made from what was named (hub id, folder, type, entry) │   ├──
    OpenDimensionError   sizes of open dimensions are missing, or are given for dimensions that
    there are not │   ├── UserCodeError        code of the caller raised: a metric, a factory, an
    iterator over data │   └── OnnxRuntimeError     ONNX Runtime cannot load or run a model ├──
    PassError                a pass of `optimize` failed; names the passes that ran before it ├──
    StepError                a step of `pipeline` failed; names the file that the steps before it
    made ├── ToolError                a tool of `htp_export.tools` failed, or wrote a model that is
    not valid ├── ResultError              what a function made is not valid ONNX; a fault of its
    own, nothing was written ├── CaptureError             htp_export could not follow an export; a
    fault of its own, not of the model └── TorchChangedError        a private part of torch that
    htp_export relies on is gone, or is another now

A failed export is not in the tree: it raises torch's own error, with a note that says which module
was running. ``tagging(strict=False)`` turns the last two into an `UntaggedExportWarning`, and the
export goes on without tags.
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
]


# of an object, as Python's default ``repr`` has it
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")


def without_addresses(text: str) -> str:
    """A message without addresses of objects, which differ in each run and help nobody.

    Examples:
        >>> without_addresses("<onnx_ir.passes.PassManager object at 0x7f26e6886c50> failed at 0x10")
        '<onnx_ir.passes.PassManager object> failed at 0x10'
    """
    return _ADDRESS.sub("", text)


_LONG_WORD = re.compile(r"\S{401,}")  # a name, or a value: a path that is typed is shorter
_KEPT_OF_WORD = 250, 100  # characters of its begin and its end
_KEPT = 2_500, 1_000  # of a message: it begins with the file at fault, and ends with the advice


def shortened(text: str) -> str:
    """A message in which names and values of files are cut in their middle: a file may have names of megabytes.

    Examples:
        >>> shortened(f"net.onnx: no module {'x' * 5_000_000!r}; give another")[:60]
        "net.onnx: no module 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
        >>> len(shortened(f"net.onnx: no module {'x' * 5_000_000!r}; give another"))
        413
    """
    cut = _LONG_WORD.sub(lambda match: _without_middle(match[0], *_KEPT_OF_WORD), text)
    return _without_middle(cut, *_KEPT) if len(cut) > sum(_KEPT) else cut


def _without_middle(text: str, begin: int, end: int) -> str:
    return f"{text[:begin]}... ({len(text) - begin - end:,} characters) ...{text[-end:]}"


def in_one_line(error: BaseException) -> str:
    r"""The message of an error of another library, as part of a message of ours.

    Examples:
        >>> in_one_line(ValueError("no such size\n  in this tensor"))
        'no such size in this tensor'
    """
    return without_addresses(" ".join(str(error).split()))


def first_line(error: BaseException, lines: int = 1) -> str:
    r"""The first lines of the message of an error that say something, in one line; its type if there is none.

    Of errors that onnx_ir wraps level by level, it is the message of the innermost one; of an
    import, of what failed.

    Examples:
        >>> first_line(ValueError("\nno such size\n  in this tensor"))
        'no such size'
    """
    said = [line.strip() for line in str(_innermost(error)).splitlines() if line.strip()]
    return without_addresses(" ".join(said[:lines])) or type(_innermost(error)).__name__


# onnx_ir says first, level by level, what it was doing: of its files, and of its passes.
_OUTER = ("Error calling", "An error occurred when running the ")


def _innermost(error: BaseException) -> BaseException:
    if any(said in str(error) for said in _OUTER):
        while deeper := error.__cause__ or error.__context__:
            error = deeper
    # lazy imports name the object that they could not give
    while isinstance(error, ImportError) and error.__cause__:
        error = error.__cause__
    return error


def described(error: BaseException, lines: int = 1) -> str:
    r"""The type of an error, and the first lines of its message.

    Examples:
        >>> described(ValueError("no such size\n  in this tensor")), described(KeyError())
        ('ValueError: no such size', 'KeyError')
    """
    name, said = type(_innermost(error)).__name__, first_line(error, lines)
    return name if said == name else f"{name}: {said}"


# characters: the time of a comparison grows with their square, and names may be of a file
_LONGEST_COMPARED = 200


def nearest_names(
    name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5
) -> list[str]:
    """The known names that an unknown one may have been meant for; none for a name that is too long to be typed.

    Examples:
        >>> nearest_names("encoder.layers.0", ["encoder.layer.0", "head"])
        ['encoder.layer.0']
    """
    if len(name) > _LONGEST_COMPARED:
        return []
    typed = [each for each in known if len(each) <= _LONGEST_COMPARED]
    return difflib.get_close_matches(name, typed, n=count, cutoff=cutoff)


class HtpExportError(Exception):
    """Base class of the errors that htp_export raises.

    Messages have no addresses of objects, and of a name or value of megabytes its begin and its
    end.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(
            *(
                shortened(without_addresses(each)) if isinstance(each, str) else each
                for each in args
            )
        )


class InputError(HtpExportError):
    """An argument cannot be used; nothing was written."""


class FileError(InputError):
    """A file cannot be read or written; ``problem`` says why, and what to do."""

    def __init__(self, path: str | os.PathLike[str], problem: str) -> None:
        name = os.fspath(path)
        # names may hold line breaks
        super().__init__(f"{name if name.isprintable() else repr(name)}: {problem}")
        self.path = Path(path)
        self.problem = problem

    @classmethod
    def unreadable(cls, path: str | os.PathLike[str], error: OSError) -> FileError:
        """The error for a file that the operating system does not open or read."""
        is_folder = isinstance(error, IsADirectoryError) or (
            isinstance(error, PermissionError) and Path(path).is_dir()
        )
        return cls(
            path,
            "is a folder; name a file in it"
            if is_folder
            else f"cannot be read: {error.strerror or error}",
        )


class TargetError(FileError, OSError):
    """A file cannot be written; an ``OSError``, too, because ``torch.onnx.export`` raises one."""


class FolderTargetError(TargetError, IsADirectoryError):
    """A folder is in the place of a file that is to be written."""

    def __init__(self, path: str | os.PathLike[str], problem: str) -> None:
        super().__init__(path, problem)
        self.errno = errno.EISDIR


class UnknownModuleError(InputError, KeyError):
    """The model has no such module; the message has the nearest paths.

    Args:
        path: The module path.
        known: The module paths of the model, or of the result.
        where: In what it was looked for.
    """

    def __init__(self, path: str, known: Iterable[str], where: str = "model") -> None:
        self.path = path
        self.nearest = tuple(nearest_names(path, known))
        hint = f"; nearest: {', '.join(map(repr, self.nearest))}" if self.nearest else ""
        if set(path) & set("*?[") or path.startswith(("class:", "re:", "!")):
            hint = f"; this takes one module, and no selector{hint}"
        super().__init__(f"no module {path!r} in this {where}{hint}")

    def __str__(self) -> str:
        return str(self.args[0])


class SelectorError(InputError):
    """A selector cannot be read, or matches nothing; ``problem`` says why, and what to do."""

    def __init__(self, pattern: str, problem: str) -> None:
        super().__init__(f"selector {pattern!r}: {problem}")
        self.pattern = pattern


class RuleError(InputError):
    """A rule of a plan, with this selector, cannot be used; ``problem`` says why, and what to do."""

    def __init__(self, selector: str, problem: str) -> None:
        super().__init__(f"rule {selector!r}: {problem}")
        self.selector = selector
        self.problem = problem


class UntaggedModelError(InputError):
    """The function needs module tags, and the model has none."""


class ModelSourceError(InputError):
    """A model cannot be created from ``source``: a hub id, folder, model type or entry point."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.source = source


class UserCodeError(InputError):
    """Code of the caller, ``what``, raised, which is the cause; the message has the line of it that ran last."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what}: {problem}")
        self.what = what


class OnnxRuntimeError(InputError):
    """ONNX Runtime cannot load or run a model.

    Args:
        model: Name of the model in the message.
        action: ``load`` or ``run``.
        problem: The message of ONNX Runtime.
        node: Name of the node at fault; empty if ONNX Runtime names none.
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
        problem: What is wrong with them, and what to do.
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
    """A model that is not valid ONNX was to be written; existing files are unchanged.

    Args:
        path: The file.
        problem: What onnx says against the model, with the node.
        node: Name of the node at fault; empty if it is not known.
        modules: The modules that own the node.
        before: Another fault, of the model that it was made of; empty if that was valid.
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
            "The model that it was made of did not have this fault; it is one of the work that was done on it. If that "
            "was a function of htp_export, please report it"
        )
        if before:
            cause = f"The model that it was made of is not valid either, and has to be mended first: {before}"
        super().__init__(f"{path}: not written, because the model is not valid: {problem}. {cause}")
        self.path, self.problem, self.node, self.modules = Path(path), problem, node, tuple(modules)


class PassError(HtpExportError):
    """A pass failed, after those that ``ran``; the model is unchanged, and nothing was written."""

    def __init__(self, name: str, ran: Iterable[str], problem: Exception) -> None:
        self.ran = tuple(ran)
        before = f"after {', '.join(self.ran)}" if self.ran else "as the first one"
        super().__init__(
            f"pass {name!r} failed ({described(problem)}); it ran {before}; leave it out with passes=[...] to go on"
        )
        self.name = name
        self.problem = problem


class StepError(HtpExportError):
    """A step of a pipeline failed; the files of the steps before it stay.

    Args:
        number: Its place among the steps, from 1.
        name: The step.
        file: The file that it was given.
        problem: The error.
    """

    def __init__(self, number: int, name: str, file: str | Path, problem: Exception) -> None:
        said = f"step {number} ({name}) failed on {file} ({described(problem)})"
        super().__init__(f"{said}; run again, it goes on from there")
        self.number, self.name, self.file, self.problem = number, name, Path(file), problem


class CaptureError(HtpExportError):
    """htp_export failed at a step, ``seam``, of following an export: which module computes a node is not known."""

    def __init__(self, seam: str, problem: Exception) -> None:
        super().__init__(
            f"htp_export failed while {seam} ({described(problem)}). This is a fault of htp_export, not of the model: "
            "please report it, with the traceback and the smallest model that shows it. To export the model without "
            "module tags meanwhile: htp_export.tagging(strict=False), or --allow-untagged on the command line"
        )
        self.seam = seam
        self.problem = problem


class UntaggedExportWarning(UserWarning):
    """A model was exported without module tags, as ``tagging(strict=False)`` allows; the message has the reason."""
