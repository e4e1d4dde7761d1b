"""The plot of nodes against latency: what tools/compare_tools.py draws and says."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from tools.compare_tools import median_times, plot, shown, shown_latency
from tools.latency import paired
from tools.scatter import Dot, correlation, scatter

SVG = "{http://www.w3.org/2000/svg}"


def entry(nodes: int, off: float, on: float, around: float = 0.05) -> dict:
    sides = {"off": off, "on": on}
    spreads = {how: {"median": at, "spread": [at - around, at + around]} for how, at in sides.items()}
    return {"nodes": nodes, **spreads}


ROW = {
    "model": "A & B", "exporter": "dynamo", "nodes": 100, "control": entry(100, 1.0, 1.0),
    "quick": entry(50, 0.5, 1.02), "slow": entry(80, 1.4, 0.98), "broken": {"failed": "no such <operator>"},
}  # fmt: skip


def test_correlation_is_pearsons() -> None:
    assert correlation([1, 2, 4], [3, 5, 9]) == pytest.approx(1)
    assert correlation([1, 2, 3], [6, 4, 2]) == pytest.approx(-1)
    assert correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert math.isnan(correlation([1, 1], [2, 3]))


def test_only_what_lies_outside_the_controls_spread_is_called_a_difference() -> None:
    lines = shown_latency(ROW, ["quick", "slow", "broken"]).splitlines()
    assert lines[2].endswith("50 nodes, off 0.50 (0.45 to 0.55)  faster, on 1.02 (0.97 to 1.07)")
    assert lines[3].endswith("80 nodes, off 1.40 (1.35 to 1.45)  slower, on 0.98 (0.93 to 1.03)")
    assert lines[4].endswith("failed: no such <operator>")
    assert "er" not in lines[1].replace("control", "")


def test_the_plot_has_a_dot_for_each_file_that_ran_and_a_band_for_the_control() -> None:
    drawn = ET.fromstring(plot([ROW, ROW], ["quick", "slow", "broken"], "small", 21))
    titles = [title.text or "" for title in drawn.iter(f"{SVG}title")]
    assert sum("latency" in title for title in titles) == 2 * 2 * 2
    assert titles.count("the same file twice: 0.95 to 1.05") == 2
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "r = 1.00 over 4 files" in texts
    assert "r = -1.00 over 4 files" in texts


def test_dots_with_fewer_nodes_are_further_left_and_faster_ones_lower() -> None:
    dots = [Dot("one", "a", 0.5, 0.5, (0.4, 0.6)), Dot("two", "a", 1.0, 1.5, (1.4, 1.6))]
    drawn = ET.fromstring(scatter({"panel": dots}, {"panel": (0.9, 1.1)}, "note"))
    one, two = [circle for circle in drawn.iter(f"{SVG}circle") if circle.find(f"{SVG}title") is not None]
    assert float(one.get("cx", 0)) < float(two.get("cx", 0))
    assert float(one.get("cy", 0)) > float(two.get("cy", 0))


def test_pairs_are_timed_in_turn_and_their_first_ones_left_out() -> None:
    ran: list[str] = []

    def timed(session: str) -> float:
        ran.append(session)
        return {"base": 2.0, "other": 1.0}[session] * (100 if len(ran) < 4 and session == "other" else 1)

    assert paired(timed, "base", "other", 11) == {"median": 0.5, "spread": (0.5, 0.5)}
    assert ran[:4] == ["other", "base", "base", "other"]
    assert len(ran) == 26


def test_times_are_told_as_parts_of_onnxslims() -> None:
    rows = [
        {"bytes": 1_000_000, "onnxslim": {"nodes": 3, "seconds": 2.0, "cpu_seconds": 1.0, "bytes": 10},
         "tolerant": {"nodes": 2, "seconds": seconds, "cpu_seconds": 0.9, "bytes": 250_000}}
        for seconds in (1.0, 1.5, 6.0)
    ]  # fmt: skip
    assert shown(rows[0]["tolerant"], rows[0]) == (
        "2, 1.00 s, 0.90 s of processor (0.50 and 0.90 of onnxslim's), 0 MB (0.25 of the file)"
    )
    assert "tolerant             0.75, on the processor 0.90" in median_times(rows, ["onnxslim", "tolerant"])
