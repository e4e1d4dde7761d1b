"""tools/matrix.py: what it installs, and how it reads and prints what became of the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import matrix

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one" /><testcase classname="tests.test_a" name="test_two" />
<testcase classname="tests.test_a" name="test_three"><failure message="assert 1 == 2" /></testcase>
<testcase classname="tests.test_b" name="test_four"><error message="no fixture" /></testcase>
<testcase classname="tests.test_b" name="test_five"><skipped type="pytest.skip" message="no browser" /></testcase>
<testcase classname="tests.test_b" name="test_six"><skipped type="pytest.xfail" message="known" /></testcase>
</testsuite></testsuites>"""


def test_lower_bounds_are_those_of_the_package_and_of_what_its_tests_use() -> None:
    pins = dict(pin.split("==") for pin in matrix.lower_bounds())
    assert pins["torch"] == "2.10"
    assert {"onnx", "onnx_ir", "onnxscript", "onnxruntime", "transformers", "pytest"} <= set(pins)
    assert "numpy" not in pins  # it has no bound


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["--torch", "2.10", "2.13.0"], {"torch-2.10": ["torch==2.10.*"], "torch-2.13.0": ["torch==2.13.0"]}),
        ([], {f"torch-{version}": [f"torch=={version}.*"] for version in ("2.10", "2.13", "2.15")}),
    ],
)
def test_a_version_of_two_parts_means_its_newest_release(line: list[str], expected: object) -> None:
    assert matrix.wanted(matrix.parsed(line)) == expected


def test_what_follows_two_dashes_goes_to_pytest() -> None:
    options = matrix.parsed(["--lowest", "--", "-m", "torch", "tests/exporter/test_drop_in.py"])
    assert options.pytest == ["-m", "torch", "tests/exporter/test_drop_in.py"]
    assert list(matrix.wanted(options)) == ["lowest"]


def test_an_option_of_dynamo_is_on_in_the_process_that_runs_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import config

    given = []
    monkeypatch.setattr(pytest, "main", lambda words: given.append((words, config.verbose)))
    monkeypatch.setattr(sys, "argv", ["-c", "verbose", "-m", "torch"])
    with config.patch(verbose=False), pytest.raises(SystemExit):  # pytest's own way would leave it undefined
        exec(matrix.WITH_SETTING, {})
    assert given == [(["-m", "torch", "-n", "0"], True)]


def test_a_report_is_counted_and_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    outcome = matrix.Outcome("torch-9")
    matrix.read_report(tmp_path / "report.xml", outcome)
    assert outcome.counts == {"passed": 2, "failed": 2, "skipped": 1, "xfailed": 1}
    assert outcome.failed == ["tests.test_a::test_three", "tests.test_b::test_four"]
    assert outcome.reasons == {"no browser": 1}
    assert not outcome.good


def test_an_environment_is_good_only_where_tests_ran_and_every_extra_can_be_installed() -> None:
    outcome = matrix.Outcome("torch-9")
    assert not outcome.good
    outcome.counts["passed"] = 1
    assert outcome.good
    outcome.extras = {"view": "ok", "serve": "no version of ray"}
    assert not outcome.good
    lines = list(matrix.tables([outcome]))
    assert lines[2] == "| torch-9 | 1 | 0 | 0 | 0 | 0.0 | 0.0 | serve: no version of ray |"
    assert lines[0].count("|") == lines[2].count("|")
