"""Times of files in ONNX Runtime, as ratios of pairs that ran in turn: for compare_tools.py and benchmark.py."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Ratio = dict[str, Any]
"""``median``, and ``spread``: where eight of ten pairs lie."""

_RUNS, _SECONDS = 5, 0.05
"""Of a latency: at least so many runs, and so long. The least counts, as all else that a machine does adds to it."""


def session(path: str | os.PathLike[str], optimised: bool = True) -> Any:
    """A file loaded for one thread, with all of ONNX Runtime's own optimisations or with none."""
    import onnxruntime as ort

    options, levels = ort.SessionOptions(), ort.GraphOptimizationLevel
    options.graph_optimization_level = (
        levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    )
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])


def timed(feed: Mapping[str, Any]) -> Callable[[Any], float]:
    """The function that runs a session on these inputs: seconds of processor time, the least of some runs."""

    def run(loaded: Any) -> float:
        times: list[float] = []
        while len(times) < _RUNS or sum(times) < _SECONDS:
            began = time.process_time()
            loaded.run(None, feed)
            times.append(time.process_time() - began)
        return min(times)

    return run


def paired(timed: Callable[[Any], float], base: Any, other: Any, pairs: int) -> Ratio:
    """Latency of one session as a part of another's: the median of pairs, and where eight of ten of them lie."""
    ratios = []
    for pair in range(pairs + 2):
        order = (base, other) if pair % 2 else (other, base)
        spent = {id(each): timed(each) for each in order}
        ratios.append(spent[id(other)] / spent[id(base)])
    kept = sorted(ratios[2:])  # the first two warm up
    return {
        "median": statistics.median(kept),
        "spread": (kept[len(kept) // 10], kept[-1 - len(kept) // 10]),
    }


def shown(ratio: Ratio) -> str:
    """A ratio and its spread."""
    low, high = ratio["spread"]
    return f"{ratio['median']:.2f} ({low:.2f} to {high:.2f})"


def difference(ratio: Ratio, control: Ratio) -> str:
    """``faster`` or ``slower`` if the pairs lie outside of those of the control, otherwise nothing."""
    (low, high), (same_low, same_high) = ratio["spread"], control["spread"]
    return "faster" if high < same_low else "slower" if low > same_high else ""
