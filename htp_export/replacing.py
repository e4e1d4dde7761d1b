"""Files that belong together, put in place together."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

__all__ = ["beside", "replace_together"]


def beside(path: Path) -> Path:
    """A temporary name in the same folder, with the same extension."""
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}{path.suffix}")


def replace_together(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Rename files to their targets, in order; all of them, or none.

    Each step is safe by itself: a program that is killed in the middle leaves whole files, the first of them new.

    Args:
        pairs: Each new file, and what it replaces; both in one folder.

    Raises:
        OSError: If one cannot be renamed. Every target is what it was; one that cannot be put back is named in a note,
            with the file that holds what it was.
    """
    kept: list[tuple[Path, Path | None]] = []
    try:
        for place, (new, target) in enumerate(pairs):
            if place < len(pairs) - 1:  # what comes last needs no copy: it is replaced, or it is not
                kept.append((target, _kept(target)))
            new.replace(target)
    except BaseException as error:
        for target, old in reversed(kept):
            _put_back(target, old, error)
        raise
    for _, old in kept:
        if old is not None:
            old.unlink(missing_ok=True)


def _kept(target: Path) -> Path | None:
    """Another name for what is there now; None where nothing is."""
    if not target.exists():
        return None
    old = beside(target)
    try:
        os.link(target, old)  # so that the target is there all the time
    except OSError:  # no file system has to have links
        target.replace(old)
    return old


def _put_back(target: Path, old: Path | None, error: BaseException) -> None:
    try:
        if old is None:
            target.unlink(missing_ok=True)
            return
        old.replace(target)
        with contextlib.suppress(FileNotFoundError):
            old.unlink()  # two names of one file: the rename did nothing
    except OSError as again:
        error.add_note(f"{target} could not be put back ({again})" + (f"; what it was is in {old}" if old else ""))
