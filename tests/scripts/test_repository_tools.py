"""The scripts in tools/: the matrix of environments, the run on a GPU, the site of the docs, latencies in pairs."""

import contextlib
import io
import re
import sys

import onnxruntime
import pytest

from htp_export.command.commands import command_groups, command_names
from htp_export.command.main import main
from tools import gpu, matrix
from tools.docs_site import commands_page
from tools.latency import paired

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one" /><testcase classname="tests.test_a" name="test_two" />
<testcase classname="tests.test_a" name="test_three"><failure message="assert 1 == 2" /></testcase>
<testcase classname="tests.test_b" name="test_four"><error message="no fixture" /></testcase>
<testcase classname="tests.test_b" name="test_five"><skipped type="pytest.skip" message="no browser" /></testcase>
<testcase classname="tests.test_b" name="test_six"><skipped type="pytest.xfail" message="known" /></testcase>
</testsuite></testsuites>"""


def test_lower_bounds_are_those_of_the_package_and_of_what_its_tests_use():
    pins = dict(pin.split("==") for pin in matrix.lower_bounds())
    assert pins["torch"] == "2.10"
    assert {"onnx", "onnx_ir", "onnxscript", "onnxruntime", "transformers", "pytest"} <= set(pins)
    assert "numpy" not in pins  # it has no bound


def test_an_option_of_dynamo_is_on_in_the_process_that_runs_the_tests(monkeypatch):
    from torch._dynamo import config

    given = []
    monkeypatch.setattr(pytest, "main", lambda words: given.append((words, config.verbose)))
    monkeypatch.setattr(sys, "argv", ["-c", "verbose", "-m", "torch"])
    # pytest's own way would leave it undefined
    with config.patch(verbose=False), pytest.raises(SystemExit):
        exec(matrix.WITH_SETTING, {})
    assert given == [(["-m", "torch", "-n", "0"], True)]


def test_a_report_is_counted_and_an_expected_failure_is_no_skip(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    outcome = matrix.Outcome("torch-9")
    matrix.read_report(tmp_path / "report.xml", outcome)
    assert outcome.counts == {"passed": 2, "failed": 2, "skipped": 1, "xfailed": 1}
    assert outcome.failed == ["tests.test_a::test_three", "tests.test_b::test_four"]
    assert outcome.reasons == {"no browser": 1}
    assert not outcome.good


def test_an_environment_is_good_only_where_tests_ran_and_every_extra_can_be_installed():
    outcome = matrix.Outcome("torch-9")
    assert not outcome.good
    outcome.counts["passed"] = 1
    assert outcome.good
    outcome.extras = {"view": "ok", "serve": "no version of ray"}
    assert not outcome.good
    lines = list(matrix.tables([outcome]))
    assert lines[2] == "| torch-9 | 1 | 0 | 0 | 0 | 0.0 | 0.0 | serve: no version of ray |"
    assert lines[0].count("|") == lines[2].count("|")


# --- tools/gpu.py with the CPU in place of a GPU: steps run and write Markdown ---


SMALL = ["--layers", "1", "--width", "64", "--length", "8", "--runs", "2"]


def test_without_the_provider_it_says_which_there_are_and_ends_with_status_2(capsys):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("there is a GPU here")
    assert gpu.main(SMALL) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "gpu.py: this ONNX Runtime has no CUDAExecutionProvider, only" in output.err
    assert "CPUExecutionProvider" in output.err
    assert gpu.main(["--provider", "NoSuchExecutionProvider"]) == 2


@pytest.mark.long
def test_every_step_runs_and_writes_markdown(capsys):
    assert gpu.main(["--provider", "cpu", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[4:] for line in lines if line.startswith("### ")] == list(gpu.STEPS)
    assert (
        "Timed: kernels; on a GPU, this build of ONNX Runtime measures their times there." in lines
    )
    for head in (
        "| module | total ms | self ms | share | kernels |",
        "| module | kernels | alone |",
    ):
        row = lines[lines.index(head) + 2]
        assert row.startswith("| `(root)` | ")
        assert row.count("|") == head.count("|")
    assert any(line.startswith("A run: ") and " in fp16 " in line for line in lines)
    assert any("allocated for the outputs of kernels" in line for line in lines)


def test_a_step_that_fails_is_said_the_others_run_and_the_status_is_1(capsys, monkeypatch):
    def broken(case: gpu.Case) -> list[str]:
        raise RuntimeError("the device is gone")

    monkeypatch.setitem(gpu.STEPS, "fp16", broken)
    assert gpu.main(["--provider", "cpu", *SMALL, "--steps", "fp16", "Memory"]) == 1
    output = capsys.readouterr()
    assert "failed: RuntimeError: the device is gone" in output.out
    assert "allocated for the outputs of kernels" in output.out


# --- the page of commands, which the site of the documentation has ---


def test_the_page_of_commands_has_the_help_of_each_below_its_heading(monkeypatch):
    def helped(*words: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main([*words, "--help"]) == 0
        return out.getvalue()

    monkeypatch.setenv("COLUMNS", "100")
    page = commands_page(helped)
    names = re.findall("^### (.*)$", page, re.MULTILINE)
    assert [name for name in names if name != "lora"] == command_names()
    assert re.findall("^## (.*)$", page, re.MULTILINE) == list(command_groups())
    for name in names:
        assert f"Usage: htp-export {name} " in page


# --- pairs of latencies ---


def test_pairs_are_timed_in_turn_and_their_first_ones_left_out():
    ran: list[str] = []

    def timed(session: str) -> float:
        ran.append(session)
        return {"base": 2.0, "other": 1.0}[session] * (
            100 if len(ran) < 4 and session == "other" else 1
        )

    assert paired(timed, "base", "other", 11) == {"median": 0.5, "spread": (0.5, 0.5)}
    assert ran[:4] == ["other", "base", "base", "other"]
    assert len(ran) == 26
