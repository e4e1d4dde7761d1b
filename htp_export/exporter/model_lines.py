"""Lines of the model's code in stacks: the innermost line outside of torch, for nodes and for errors."""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Container, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from htp_export.format.torch_metadata import SourceLine

_OWN = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
# packages beside torch that trace models, and contain no lines of them
_TRACERS = ("torch", "onnx", "onnxscript", "onnx_ir", "numpy")


@lru_cache(maxsize=4096)
def is_of_model(file: str) -> bool:
    """Whether a file has code of a model, or of a library that it uses, and not of torch.

    Examples:
        >>> is_of_model("/home/me/net.py"), is_of_model(torch.nn.functional.__file__), is_of_model("<string>")
        (True, False, False)
    """
    path = Path(file)
    if file.startswith("<") or path.is_relative_to(_OWN) or path.is_relative_to(_TORCH):
        return False
    for place, part in enumerate(path.parts):
        if part in ("site-packages", "dist-packages"):
            return path.parts[place + 1] not in _TRACERS
    return not path.is_relative_to(_STANDARD)


def line_of_model(lines: Sequence[SourceLine]) -> SourceLine | None:
    """The innermost line outside of torch, of lines whose innermost one is last; None without one."""
    return next((line for line in reversed(lines) if is_of_model(line.file)), None)


# a frame of a trace, and of the source of a script
_TRACED = re.compile(r"^(.+)\(([0-9]{1,9})\): (.+)$")
_SCRIPTED = re.compile(r'File "([^"\n]+)", line ([0-9]{1,9})')


def line_of_range(text: str, ends: Container[str]) -> SourceLine | None:
    r"""The innermost line outside of torch in the source range of a JIT node; None without one.

    Args:
        text: The source range: a frame in each line, the innermost first; or the text of a script.
        ends: Files that call the model: frames from there on are not of the model.

    Examples:
        >>> frames = [f"{torch.nn.functional.__file__}(9): linear", "/net.py(7): forward", "/run.py(3): run"]
        >>> line_of_range("\n".join(frames), ["/run.py"])
        SourceLine(file='/net.py', line=7, function='forward', code='')
        >>> line_of_range("/run.py(3): run\n/a.py(1): b", ["/run.py"]) is None
        True
    """
    begin = 0
    while begin < len(text):
        # not all rows: usually, one of the first is of the model
        end = text.find("\n", begin)
        row = text[begin:] if end < 0 else text[begin:end]
        begin += len(row) + 1
        found = _frame_of(row)
        if found is None:
            continue
        file, line, function = found
        if file in ends:
            return None
        if is_of_model(file):
            return SourceLine(file, line, function, linecache.getline(file, line).strip())
    return None


@lru_cache(maxsize=4096)
def _frame_of(row: str) -> tuple[str, int, str] | None:
    """The file, the line and the function of a row of a source range; None for other rows."""
    frame = _TRACED.match(row)
    if frame is not None:
        return frame[1], int(frame[2]), frame[3]
    scripted = _SCRIPTED.search(row)
    if scripted is None:
        return None
    return scripted[1], int(scripted[2]), "forward"
