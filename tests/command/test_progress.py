"""What long commands show of how far they have come: on a terminal alone, and only of what takes some time."""

import io
import re
import time

import pytest

from htp_export.command import terminal
from htp_export.process.progress import counted


class Screen(io.StringIO):
    """A terminal, or a pipe."""

    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())

    def wait_for(self, words: str) -> None:
        ends = time.monotonic() + 60
        while words not in self.text:
            assert time.monotonic() < ends, self.text
            time.sleep(0.01)


@pytest.fixture
def screen(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(terminal, "terminal_stderr", lambda: screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    return screen


class TestSteps:
    def test_a_step_says_its_number_and_what_is_counted(self, screen, monkeypatch):
        monkeypatch.setattr(terminal, "_PATIENCE", 0)
        steps = terminal.Steps(count=2)
        with steps.step("loading"):
            screen.wait_for("step 1 of 2: loading")
        with steps.step("verifying"):
            for place in counted(range(4), "modules"):
                if place == 3:
                    screen.wait_for("3 of 4 modules")
        assert "step 2 of 2: verifying" in screen.text

    def test_a_quick_step_shows_nothing(self, screen, monkeypatch):
        monkeypatch.setattr(terminal, "_PATIENCE", 60)
        with terminal.Steps().step("loading"):
            list(counted(range(4), "modules"))
        assert screen.getvalue() == ""

    @pytest.mark.parametrize(("is_terminal", "quiet"), [(False, False), (True, True)])
    def test_a_pipe_and_who_wants_quiet_see_nothing(self, is_terminal, quiet, monkeypatch):
        screen = Screen(is_terminal)
        monkeypatch.setattr(terminal, "terminal_stderr", lambda: screen)
        monkeypatch.setattr(terminal, "_PATIENCE", 0)
        with terminal.Steps(quiet).step("loading"):
            time.sleep(0.05)
        assert screen.getvalue() == ""

    def test_an_error_in_a_step_clears_the_line_and_is_raised(self, screen, monkeypatch):
        monkeypatch.setattr(terminal, "_PATIENCE", 0)

        def fails():
            with terminal.Steps().step("loading"):
                screen.wait_for("loading")
                raise ValueError("no such model")

        with pytest.raises(ValueError, match="no such model"):
            fails()
        assert screen.getvalue().endswith("\x1b[2K")
