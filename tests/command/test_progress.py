"""What long commands show of how far they have come: on a terminal alone, and only of what takes some time."""

import io
import re
import time

import numpy as np
import pytest
import torch

import htp_export
from htp_export.command import terminal
from htp_export.process.progress import counted, listening


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


class TestCounted:
    def test_the_outermost_loop_is_told_of(self):
        told = []
        with listening(lambda *what: told.append(what)):
            assert [list(counted("ab", "letters")) for _ in counted([1, 2], "rows")] == [
                ["a", "b"],
                ["a", "b"],
            ]
            assert list(counted([3], "numbers")) == [3]
        assert list(counted([1], "unheard")) == [1]
        assert told == [
            ("rows", 0, 2),
            ("rows", 1, 2),
            ("rows", 2, 2),
            ("numbers", 0, 1),
            ("numbers", 1, 1),
        ]

    def test_a_loop_that_ends_early_leaves_the_listener_as_it_was(self):
        told = []
        with listening(lambda *what: told.append(what)):
            for _ in counted([1, 2], "rows"):
                break
            list(counted([1], "others"))
        assert told == [("rows", 0, 2), ("others", 0, 1), ("others", 1, 1)]

    @pytest.mark.parametrize(
        ("work", "what"),
        [
            (lambda file, folder, net: htp_export.profile(file, runs=3, warmup=0), ("runs", 3, 3)),
            (
                lambda file, folder, net: htp_export.partition(file, 2, folder / "stages"),
                ("stages", 2, 2),
            ),
            (
                lambda file, folder, net: htp_export.optimize(file, folder / "small.onnx"),
                ("weights", 2, 2),
            ),
            (
                lambda file, folder, net: htp_export.compare(file, file),
                ("portions of the tensors", 1, 1),
            ),
            (
                lambda file, folder, net: htp_export.verify(
                    net, file, (torch.randn(1, 64),), isolated=True
                ),
                ("modules", 4, 4),
            ),
        ],
        ids=["profile", "partition", "optimize", "compare", "verify"],
    )
    def test_work_that_can_be_long_is_counted(self, work, what, tmp_path):
        net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)
        ).eval()
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), np.linspace(0.5, 2, 4), strict=True):
                parameter.mul_(value)
        htp_export.export(net, (torch.randn(1, 64),), tmp_path / "net.onnx", verbose=False)
        told = []
        with listening(lambda *each: told.append(each)):
            work(tmp_path / "net.onnx", tmp_path, net)
        assert what in told


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
