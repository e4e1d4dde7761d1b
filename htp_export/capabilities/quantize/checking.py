"""``quantize(check=True)``: a quantized model against the original on the same data: errors, bytes and time."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from htp_export.files.filesystem import temporary_folder
from htp_export.model.tagged import TaggedModel
from htp_export.results.columns import many
from htp_export.results.result import PlainData
from htp_export.runtime.data import Samples
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.runner import median_times
from htp_export.runtime.sessions import RunnableModel, Session, SessionSettings

_MOST_COMPARED = 4  # runs of the data: every module is compared in each, which takes seconds for a large model
_TIMED = 20


@dataclass(frozen=True)
class Check(PlainData):
    """What a model became, measured on this machine.

    Attributes:
        worst: The module with the largest difference of elements, as `compare` finds it; None if none was compared.
        max_abs: That difference.
        cosine: The cosine of its output with the original one.
        compared: How many runs of the data were compared.
        random: Whether these are random inputs, with which errors say little.
        bytes_before: Size of all weights of the original.
        bytes_after: The same of the result.
        ms_before: Median time of a run of the original.
        ms_after: The same of the result; the runs of both alternate.
        runs: How many runs of each were timed.
    """

    derived = ("speedup",)

    worst: str | None
    max_abs: float | None
    cosine: float | None
    compared: int
    random: bool
    bytes_before: int
    bytes_after: int
    ms_before: float
    ms_after: float
    runs: int

    @property
    def speedup(self) -> float:
        """How many times as fast the result is."""
        return self.ms_before / self.ms_after if self.ms_after else math.inf

    @property
    def lines(self) -> tuple[str, ...]:
        """Error and time in words, a line each; the bytes are in the summary of the result."""
        data = f"{many(self.compared, 'run')} of {'random inputs' if self.random else 'the data'}"
        if self.worst is None or self.max_abs is None:
            error = f"no module could be compared on {data}"
        else:
            cosine = "" if self.cosine is None else f", cosine {self.cosine:.4f}"
            error = f"worst module on {data}: {self.worst or '(root)'}, max difference {self.max_abs:.2g}{cosine}"
        return (
            error,
            f"{self.ms_before:.3f} ms a run before, {self.ms_after:.3f} ms after ({self.speedup:.2f} times as fast): "
            f"medians of {self.runs} runs each, in turn, on this machine",
        )


def check_of(original: TaggedModel, changed: TaggedModel, samples: Samples, sizes: tuple[int, int]) -> Check:
    """Compare what was quantized with the original on the first runs of the data, and time both on the first one.

    ``sizes``: the bytes of all weights, before and after.
    """
    from htp_export.capabilities.verify.file_comparing import compare

    feeds = [dict(feed) for feed in itertools.islice(samples, _MOST_COMPARED)]
    results = [compare(original, changed, feed) for feed in feeds]
    found = [result.modules[result.worst] for result in results if result.worst is not None]
    known = [(math.inf if math.isnan(row.max_abs) else row.max_abs, row) for row in found if row.max_abs is not None]
    worst = max(known, key=lambda each: each[0])[1] if known else None
    with temporary_folder() as folder:
        name = original.hierarchy.root.simple_class or "model"
        runnable = [RunnableModel.of(each.model, name, folder) for each in (original, changed)]
        sessions = [Session(each, SessionSettings()) for each in runnable]
        given = [feeds[0], dict(Inputs.of(changed.model).feed_again(feeds[0]).arrays)]
        before, after = median_times(sessions, given, _TIMED)
    return Check(
        worst=None if worst is None else worst.path,
        max_abs=None if worst is None else worst.max_abs,
        cosine=None if worst is None else worst.cosine,
        compared=len(feeds),
        random=samples.random,
        bytes_before=sizes[0],
        bytes_after=sizes[1],
        ms_before=before,
        ms_after=after,
        runs=_TIMED,
    )
