"""Commands that are refused: with status 2, one line of error, and every file as it was."""

from pathlib import Path

import pytest

from htp_export.command.main import main


def contents(folder: Path) -> dict[str, bytes]:
    """Name → content of each file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def assert_refused(words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command ends with status 2 and a message of one line, and leaves the files of a folder as they were."""
    before = contents(folder)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert contents(folder) == before
