"""The inputs of several runs of a model: data of a user or random arrays, checked for the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from htp_export.errors import FileError, InputError
from htp_export.process.progress import counted
from htp_export.process.user_code import iterated
from htp_export.runtime.arrays import Array
from htp_export.runtime.data import Run, arrays_of, only_run, runs_of
from htp_export.runtime.inputs import Feed, Inputs
from htp_export.runtime.settings import RunSettings

_RANDOM_RUNS = 4  # with more random data, ranges and medians hardly change


@dataclass(frozen=True)
class Samples:
    """The inputs of several runs, each checked when it is reached; each iteration starts from the first run.

    ``given`` is None for random values, with the sizes and the seed of ``settings``. The data of a
    user must have the sizes ``settings.dims``.
    """

    given: Iterable[Run] | None
    inputs: Inputs
    settings: RunSettings

    @classmethod
    def of(cls, settings: RunSettings, model: ir.Model, *, passes: int = 1) -> Samples:
        """Create samples from the data of a user; random ones without data.

        ``passes`` is the number of iterations: if there are several, the runs of an iterator are
        kept in memory. An InputError for invalid data, whose subclasses name the file or the
        factory at fault, and for an iterator that is read again although ``passes`` is 1.
        """
        settings.check_seed(_RANDOM_RUNS)
        settings.check_one_source()
        given = runs_of(settings.data, settings.seed, passes)
        return cls(given, Inputs.of(model), settings)

    @property
    def random(self) -> bool:
        """Whether the values are random, so that results on them do not show the accuracy of the model."""
        return self.given is None

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        if self.given is None:
            for number in counted(range(_RANDOM_RUNS), "random runs"):
                settings = replace(self.settings, seed=self.settings.seed + number)
                yield self.inputs.random(settings).arrays
            return
        for feed in self._given_feeds(self.given):
            yield feed.arrays

    def feeds(self) -> Iterator[Feed]:
        """Iterate over the inputs of each run of the user; over one random run without data."""
        given = self.given
        if given is None:
            yield self.inputs.random(self.settings)
        elif isinstance(given, Sequence) and len(given) == 1:
            yield self._feed(given[0], "data")
        else:
            yield from self._given_feeds(given)

    def _given_feeds(self, given: Iterable[Run]) -> Iterator[Feed]:
        runs = counted(given, "runs") if isinstance(given, Sequence) else iterated(given, "data")
        is_empty = True
        for number, run in enumerate(runs):
            is_empty = False
            yield self._feed(run, f"data, run {number}")
        if is_empty:
            raise InputError("data have no runs; give a mapping of input name → array for each run")

    def only(self, what: str) -> Feed:
        """Return the inputs of the only run; an `InputError` if there are several. ``what`` accepts only one run."""
        if self.given is None:
            return self.inputs.random(self.settings)
        return self._feed(only_run(self.given, what), "data")

    def _feed(self, run: Run, name: str) -> Feed:
        if isinstance(run, str | os.PathLike):
            name = os.fspath(run)
        try:
            return self.inputs.feed(arrays_of(run), self.settings.dims)
        except FileError:
            raise
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
