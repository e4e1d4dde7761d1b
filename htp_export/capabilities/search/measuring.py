"""What plans do to a model: pruned, quantized, run on the data, and compared with the original."""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.search.output_errors import Deviation, OutputErrors
from htp_export.capabilities.search.studies import KeptRuns, open_study
from htp_export.errors import InputError
from htp_export.files.filesystem import temporary_folder
from htp_export.files.lazy_tensor import slots
from htp_export.model.hashes import content_hash
from htp_export.model.tagged import TaggedModel
from htp_export.process.argument_types import MOST_RUNS, check_whole
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.data import repeatable
from htp_export.runtime.generating import Decoder
from htp_export.runtime.runner import Metric, median_times, metric_value, outputs_of
from htp_export.runtime.sessions import RunnableModel, Session, SessionSettings
from htp_export.weights.products import weights_of

if TYPE_CHECKING:
    from htp_export.capabilities.prune.sparsities import Sparsity
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.runtime.data import Data, Samples

Plan: TypeAlias = "Mapping[str, Precision]"
Pruning: TypeAlias = "Mapping[str, Sparsity]"

_NOTHING: Pruning = MappingProxyType({})
_NOISY = ("error", "latency_ms", "metric", "tokens", "time_ms")
_PAIRS = 4  # at least, of loops that generate tokens


@dataclass(frozen=True)
class Measurement(Deviation):
    """What was measured of a model.

    Attributes:
        bytes: Size of all tensors of the model.
        latency_ms: Median time of a run; None if it was not measured. Runs alternate with the
            original's, and it is the original's time, multiplied by the ratio of both, so that the
            load of the machine cancels.
        metric: The user's number; None without one.
        tokens: Share of greedy tokens that are the original's, if the model goes on with the
            original's; None without such tokens. Then the deviation is that of the logits, ``kl``
            the mean over tokens.
        time_ms: Time of the loop that generates them, a prompt, alternated in the same way; None if
            not measured.
        nonzeros: Elements of the weights, as ``prune`` counts them, that are neither zero nor
            removed, before they are quantized; None in what was measured by an earlier version.
        spread: Name of a number → half the range of its values, if it is the median of several
            measurements.
    """

    bytes: int = 0
    latency_ms: float | None = None
    metric: float | None = None
    nonzeros: int | None = None
    tokens: float | None = None
    time_ms: float | None = None
    spread: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The numbers from `to_dict`."""
        numbers: dict[str, Any] = {
            k: float(value) if isinstance(value, str) else value for k, value in data.items()
        }
        return cls(**numbers)

    @classmethod
    def median(cls, measured: Sequence[Measurement]) -> Measurement:
        """Several measurements of one model as one: medians, and the spread of what differs.

        Examples:
            >>> found = Measurement.median([Measurement(0.1, 10.0, 0.9, time_ms=time) for time in (3.0, 5.0, 4.0)])
            >>> found.time_ms, found.spread
            (4.0, {'time_ms': 1.0})
        """
        found, spread = dict(vars(measured[0])), {}
        for name in _NOISY:
            values = [value for each in measured if (value := getattr(each, name)) is not None]
            if values and min(values) < max(values):
                found[name], spread[name] = (
                    statistics.median(values),
                    (max(values) - min(values)) / 2,
                )
        return cls(**{**found, "spread": spread})


def digest_of(
    model: ir.Model, feeds: Iterable[Mapping[str, Array]], settings: Sequence[Any] = ()
) -> str:
    """What the results of runs depend on, as a digest: the model, its inputs, settings."""
    digest = hashlib.sha256(repr((content_hash(model), settings)).encode())
    for feed in feeds:
        for name, array in feed.items():
            digest.update(repr((name, str(array.dtype), array.shape)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Prompts:
    """Prompts of a decoder, ids of tokens ``[batch, length]`` each, and how many tokens follow."""

    decoder: Decoder
    ids: Sequence[Array]
    new_tokens: int
    timed: bool = True

    @property
    def feeds(self) -> list[dict[str, Array]]:
        """Input name → ids, for each prompt, as data of the decoder have them."""
        [given] = self.decoder.of_prompts
        return [{given.name: ids} for ids in self.ids]


_Ran: TypeAlias = tuple[list[dict[str, Array]], float | None]
"""What a model computed: its outputs in each run, and the time in ms of what was timed."""


@dataclass(eq=False)
class Measurer:
    """Measures plans for one model, without functions, on one set of data; the original runs once.

    ``samples`` are compared, and calibrate unless ``calibration`` does. ``runs`` are timed, after
    some to warm up; 0 for no times. ``results`` is a file of finished runs, a journal of Optuna.
    ``finished`` may be replaced before anything is measured, by what shares runs with other
    processes. `measure` measures ``repeats`` times, if not 0. With ``prompts``, the outputs are the
    logits of the tokens that a decoder generates, and ``samples`` calibrate.
    """

    tagged: TaggedModel
    samples: Samples
    metric: Metric | None = None
    runs: int = 0
    settings: SessionSettings = field(default_factory=SessionSettings)
    results: Any = None
    calibration: Data | None = None
    prompts: Prompts | None = None
    repeats: int = 0

    @cached_property
    def feeds(self) -> list[Mapping[str, Array]]:
        """The inputs of each run."""
        return list(self.samples)

    @cached_property
    def _calibration(self) -> Data | None:
        """The data that calibrate, for each plan anew."""
        return repeatable(self.calibration)

    @cached_property
    def finished(self) -> KeptRuns:
        """The runs that are done."""
        if self.results is None:
            return KeptRuns()
        settings = (
            getattr(self.metric, "__qualname__", None),
            self.runs,
            *(["in turn"] if self.runs else ()),
        )
        return KeptRuns(
            open_study(
                self.results, digest_of(self.tagged.model, self.feeds, settings), ["minimize"]
            )
        )

    @cached_property
    def expected(self) -> list[dict[str, Array]]:
        """The outputs of the original, for each of the inputs."""
        outputs = self._run(self.tagged, 0)[0] if self.prompts is None else self._of_prompts
        for number, run in enumerate(outputs):
            for name in nan_in(run):
                if np.isnan(run[name]).all():
                    what = f"output {name!r} of the model is NaN; errors of it are not known"
                    raise InputError(f"data, run {number}: {what}")
        return outputs

    @property
    def remarks(self) -> list[str]:
        """What errors do not tell: outputs of the original of which elements are NaN."""
        found = [(number, name) for number, run in enumerate(self.expected) for name in nan_in(run)]
        counts = "of the model has NaN, which counts as no error"
        return [f"data, run {number}: output {name!r} {counts}" for number, name in found[:1]]

    @cached_property
    def original(self) -> Measurement:
        """The original, measured as if it were quantized."""
        return self._kept("", lambda: self._measured(self.tagged, self._nonzeros, beside=False))

    @cached_property
    def _nonzeros(self) -> int:
        """The elements of the original's weights that are not zero."""
        return sum(
            int(np.count_nonzero(weight.tensor.numpy())) for weight in weights_of(self.tagged)
        )

    def measure(
        self, plan: Plan, pruning: Pruning = _NOTHING, *, made: TaggedModel | None = None
    ) -> Measurement:
        """Prune and quantize a model by plans, and run it; ``made``: what `quantized` made of it already."""
        if self.repeats:
            return self.again(plan, pruning, self.repeats, made=made)
        return self._kept(
            key_of(plan, pruning), lambda: self._measured(*self._made(plan, pruning, made))
        )

    def again(
        self, plan: Plan, pruning: Pruning, repeats: int, *, made: TaggedModel | None = None
    ) -> Measurement:
        """Measure what plans make several times: medians, and their spread."""
        model = functools.cache(lambda: self._made(plan, pruning, made))
        key = key_of(plan, pruning)
        return Measurement.median(
            [
                self._kept(f"{key} again {number}", lambda: self._measured(*model()))
                for number in range(repeats)
            ]
        )

    def quantized(self, plan: Plan, tagged: TaggedModel | None = None) -> TaggedModel:
        """The model, or what was made of it, quantized by a plan, in memory."""
        from htp_export.capabilities.quantize.quantizing import quantize

        data = self.feeds if self.calibration is None else self._calibration
        drops = any(precision.max_drop is not None for precision in plan.values())
        checked: dict[str, Any] = {"metric": self.metric, "validation": self.feeds} if drops else {}
        result = quantize(tagged or self.tagged, dict(plan), data=data, **checked)
        if result.kept and not result.operators:  # it is not what the plan says
            raise InputError(f"nothing changes: {result.kept[0].reason}")
        return result.tagged

    def _made(
        self, plan: Plan, pruning: Pruning, made: TaggedModel | None
    ) -> tuple[TaggedModel, int]:
        """What plans make of the model, if it is not made, and the elements of its weights that are not zero."""
        from htp_export.capabilities.prune.pruning import prune

        tagged, nonzeros = self.tagged, self._nonzeros
        if pruning:
            pruned = prune(tagged, pruning)
            whole = pruned.modules[""]
            tagged, nonzeros = pruned.tagged, whole.weights_after - whole.zeros_after
        if made is None and not all(precision.is_kept for precision in plan.values()):
            made = self.quantized(plan, tagged)
        return made or tagged, nonzeros

    def _kept(self, key: str, make: Callable[[], Measurement]) -> Measurement:
        known = self.finished.get(key)
        if known is not None:
            return Measurement.from_dict(known)
        measured = make()
        self.finished.add(key, measured.to_dict())
        return measured

    def _measured(
        self, tagged: TaggedModel, nonzeros: int | None = None, *, beside: bool = True
    ) -> Measurement:
        """What is measured of a model; times ``beside`` the original, or, of the original itself, alone."""
        wanted, is_loop = self.expected, self.prompts is not None
        outputs, ms = (
            self._generated(tagged, beside) if is_loop else self._run(tagged, self.runs, beside)
        )
        number = None if self.metric is None else metric_value(self.metric, outputs)
        errors, same = OutputErrors(), []
        for expected, actual in zip(wanted, outputs, strict=True):
            errors.add(expected, actual)
            if is_loop:
                [(one, other)] = zip(expected.values(), actual.values(), strict=True)
                same.append(np.mean(one.argmax(-1) == other.argmax(-1)))
        return Measurement(
            **vars(errors.result()),
            bytes=sum(slot.tensor.nbytes for slot in slots(tagged.model)),
            latency_ms=None if is_loop else ms,
            metric=number,
            nonzeros=nonzeros,
            tokens=float(np.mean(same)) if same else None,
            time_ms=ms if is_loop else None,
        )

    @cached_property
    def _of_prompts(self) -> list[dict[str, Array]]:
        """The logits of the tokens that follow each prompt by the original."""
        assert self.prompts is not None
        with temporary_folder() as folder:
            loop = self.prompts.decoder
            session = self._session(self.tagged, folder)
            return [
                {"logits": loop.generate(session, ids, self.prompts.new_tokens).logits}
                for ids in self.prompts.ids
            ]

    def _generated(self, tagged: TaggedModel, beside: bool) -> _Ran:
        """The logits of the same tokens after each prompt, and the mean time of the loop of a prompt."""
        assert self.prompts is not None
        loop, count, prompts = self.prompts.decoder, self.prompts.new_tokens, self.prompts.ids
        following = [each["logits"].argmax(-1) for each in self.expected]
        with temporary_folder() as folder:
            sessions = [self._session(tagged, folder)]
            if beside and self.prompts.timed:
                sessions.append(self._session(self.tagged, folder))
            for session in sessions:
                loop.generate(session, prompts[0], 2)  # to warm up
            rounds = -(-_PAIRS // len(prompts)) if self.prompts.timed else 1
            made = [
                [loop.generate(session, ids, count, tokens) for session in sessions]
                for _ in range(rounds)
                for ids, tokens in zip(prompts, following, strict=True)
            ]
        outputs = [{"logits": each[0].logits} for each in made[: len(prompts)]]
        times = [[each.ms for each in pair] for pair in made]
        return outputs, self._ms(times, "time_ms") if self.prompts.timed else None

    def _ms(self, times: Sequence[Sequence[float]], name: str) -> float:
        """The median of times; of those beside times of the original, its time, multiplied by the median ratio."""
        if len(times[0]) == 1:
            return statistics.median(alone for [alone] in times)
        whole: float = getattr(self.original, name)
        return whole * statistics.median(time / other for time, other in times)

    def _session(self, tagged: TaggedModel, folder: Path) -> Session:
        name = tagged.hierarchy.root.simple_class or "model"
        return Session(RunnableModel.of(tagged.model, name, folder), self.settings)

    def _run(self, tagged: TaggedModel, runs: int, beside: bool = False) -> _Ran:
        """The outputs for each of the inputs, and the median time of further runs on the first ones."""
        with temporary_folder() as folder:
            name = tagged.hierarchy.root.simple_class or "model"
            runnable = RunnableModel.of(tagged.model, name, folder)
            outputs = outputs_of(runnable, self.feeds, self.settings)
            if not runs:
                return outputs, None
            sessions = [Session(runnable, self.settings)]
            if beside:
                sessions.append(self._session(self.tagged, folder))
            times = median_times(sessions, self.feeds[:1] * len(sessions), runs)
            return outputs, self._ms([times], "latency_ms")


def check_repeats(repeats: int) -> None:
    """Refuse a number of measurements that has no spread."""
    check_whole("repeats", repeats, 0, MOST_RUNS)
    if repeats == 1:
        raise InputError(
            "repeats is 1, and one measurement has no spread; give 2 or more, or 0 for none"
        )


def key_of(plan: Plan, pruning: Pruning = _NOTHING) -> str:
    """Plans as text that is the same in every process."""
    removed = (
        json.dumps({selector: str(value) for selector, value in pruning.items()}) if pruning else ""
    )
    return removed + json.dumps(
        {selector: vars(precision) for selector, precision in plan.items()}, default=str
    )
