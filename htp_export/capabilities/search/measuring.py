"""Measure plans: prune and quantize a model, run it, and compare it with the original."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.search.output_errors import Deviation, OutputErrors
from htp_export.capabilities.search.studies import KeptRuns, open_study
from htp_export.costs.moved_bits import moved_bits_of
from htp_export.errors import InputError
from htp_export.files.filesystem import temporary_folder
from htp_export.files.lazy_tensor import slots
from htp_export.model.hashes import content_hash
from htp_export.model.module_facts import contents_of
from htp_export.model.tagged import TaggedModel
from htp_export.process.argument_types import MOST_RUNS, check_whole
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.data import repeatable
from htp_export.runtime.generating import Decoder
from htp_export.runtime.runner import Metric, median_times, metric_value, outputs_of
from htp_export.runtime.sessions import RunnableModel, Session
from htp_export.weights.products import weights_of

if TYPE_CHECKING:
    from htp_export.capabilities.prune.sparsities import Sparsity
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.runtime.data import Data
    from htp_export.runtime.samples import Samples
    from htp_export.runtime.settings import RunSettings

Plan: TypeAlias = "Mapping[str, Precision]"
Pruning: TypeAlias = "Mapping[str, Sparsity]"

_NOTHING: Pruning = MappingProxyType({})
_NOISY = ("error", "latency_ms", "metric", "tokens", "time_ms")
"""The numbers of a measurement that may differ when it is repeated."""

_PAIRS = 4
"""The smallest number of timed loops of token generation: fewer have no stable median."""


@dataclass(frozen=True)
class Measurement(Deviation):
    """The measured numbers of a model.

    Attributes:
        bytes: Size of all tensors of the model.
        latency_ms: Median time of a run; None if it was not measured. Runs of both models
            alternate, and the time is that of the original times the ratio of both, so that the
            load of the machine cancels.
        metric: The user's metric; None without one.
        tokens: Share of greedy tokens that equal the original's, when each continues the tokens of
            the original; None if no tokens are generated. With tokens, the deviation is that of
            the logits, and ``kl`` the mean over tokens.
        time_ms: Time of the loop that generates the tokens of a prompt, measured as ``latency_ms``;
            None if it was not measured.
        nonzeros: Elements of the weights, as ``prune`` counts them, that are neither zero nor
            removed, before they are quantized; None in measurements of an earlier version.
        weight_bits: Bits of the weights, with scales, as ``weight_bits`` of ``cost``; None in
            measurements of an earlier version.
        moved_bits: Bits of activations that nodes move in the first run, as ``moved_bits`` of
            ``cost``; None if they were not counted.
        spread: Name of a number → half the range of its values, if it is the median of several
            measurements.
    """

    bytes: int = 0
    latency_ms: float | None = None
    metric: float | None = None
    nonzeros: int | None = None
    weight_bits: int | None = None
    moved_bits: int | None = None
    tokens: float | None = None
    time_ms: float | None = None
    spread: Mapping[str, float] = field(default_factory=dict)

    @property
    def bits(self) -> int | None:
        """Stored bits of weights and moved bits of activations; None if these were not counted."""
        if self.weight_bits is None or self.moved_bits is None:
            return None
        return self.weight_bits + self.moved_bits

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`, in which infinity and NaN are text."""
        numbers: dict[str, Any] = dict(data)
        for name, value in data.items():
            if isinstance(value, str):
                numbers[name] = float(value)
        return cls(**numbers)

    @classmethod
    def median(cls, measured: Sequence[Measurement]) -> Measurement:
        """Combine measurements of one model: the median of each number, and spreads.

        Examples:
            >>> found = Measurement.median([Measurement(0.1, 10.0, 0.9, time_ms=time) for time in (3.0, 5.0, 4.0)])
            >>> found.time_ms, found.spread
            (4.0, {'time_ms': 1.0})
        """
        numbers = dict(vars(measured[0]))
        spread: dict[str, float] = {}
        for name in _NOISY:
            all_values = [getattr(measurement, name) for measurement in measured]
            values = [value for value in all_values if value is not None]
            if values and min(values) < max(values):
                numbers[name] = statistics.median(values)
                spread[name] = (max(values) - min(values)) / 2
        return cls(**{**numbers, "spread": spread})


def digest_of(
    model: ir.Model, feeds: Iterable[Mapping[str, Array]], settings: Sequence[Any] = ()
) -> str:
    """A digest of all that results of runs depend on: the model, its inputs, and settings."""
    digest = hashlib.sha256(repr((content_hash(model), settings)).encode())
    for feed in feeds:
        for name, array in feed.items():
            digest.update(repr((name, str(array.dtype), array.shape)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Prompts:
    """Prompts of a decoder: token ids ``[batch, length]``, and the number of new tokens."""

    decoder: Decoder
    ids: Sequence[Array]
    new_tokens: int
    timed: bool = True

    @property
    def feeds(self) -> list[dict[str, Array]]:
        """Input name → ids, for each prompt: the data of the decoder."""
        [prompt_input] = self.decoder.of_prompts
        return [{prompt_input.name: ids} for ids in self.ids]


_Ran: TypeAlias = tuple[list[dict[str, Array]], float | None]
"""The outputs of a model in each run, and the measured time in ms."""


@dataclass(eq=False)
class Measurer:
    """Measures plans for one model on one set of data; the original runs once.

    ``finished`` may be replaced before the first measurement, to share runs with other processes.

    Attributes:
        tagged: The model, without functions.
        samples: The inputs of the runs that are compared, and the settings of these runs. They
            calibrate, too, without ``calibration``.
        metric: The user's metric; None without one.
        results: A file of finished runs, a journal of Optuna; None to keep them in memory.
        calibration: Inputs for calibration; None for ``samples``.
        prompts: With these, the outputs are the logits of the tokens that a decoder generates.
        repeats: How often `measure` measures a plan, for medians; 0 for once.
        counts_moves: Whether the moved bits of activations are counted.
    """

    tagged: TaggedModel
    samples: Samples
    metric: Metric | None = None
    results: Any = None
    calibration: Data | None = None
    prompts: Prompts | None = None
    repeats: int = 0
    counts_moves: bool = False

    @property
    def settings(self) -> RunSettings:
        """How the models run."""
        return self.samples.settings

    @cached_property
    def feeds(self) -> list[Mapping[str, Array]]:
        """The inputs of each run."""
        return list(self.samples)

    @cached_property
    def _calibration(self) -> Data | None:
        """The calibration data, which can be iterated for each plan."""
        return repeatable(self.calibration)

    @cached_property
    def finished(self) -> KeptRuns:
        """The measurements of finished runs."""
        if self.results is None:
            return KeptRuns()
        settings = [getattr(self.metric, "__qualname__", None), self.settings.runs]
        if self.settings.runs:
            # In earlier versions, timed runs did not alternate with the original.
            settings.append("in turn")
        name = digest_of(self.tagged.model, self.feeds, tuple(settings))
        return KeptRuns(open_study(self.results, name, ["minimize"]))

    @cached_property
    def expected(self) -> list[dict[str, Array]]:
        """The outputs of the original, for each run."""
        outputs = self._run(self.tagged, 0)[0] if self.prompts is None else self._of_prompts
        for number, run in enumerate(outputs):
            for name in nan_in(run):
                if np.isnan(run[name]).all():
                    problem = f"output {name!r} of the model is NaN; errors of it are not known"
                    raise InputError(f"data, run {number}: {problem}")
        return outputs

    @property
    def remarks(self) -> list[str]:
        """A note on the first output of the original with NaN, which errors do not include."""
        for number, run in enumerate(self.expected):
            for name in nan_in(run):
                problem = f"output {name!r} of the model has NaN, which counts as no error"
                return [f"data, run {number}: {problem}"]
        return []

    @cached_property
    def original(self) -> Measurement:
        """The original, measured in the same way as a quantized model."""
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
        """Measure the model with plans; ``made``: the result of `quantized`, if known."""
        if self.repeats:
            return self.again(plan, pruning, self.repeats, made=made)
        return self._kept(
            key_of(plan, pruning), lambda: self._measured(*self._made(plan, pruning, made))
        )

    def again(
        self, plan: Plan, pruning: Pruning, repeats: int, *, made: TaggedModel | None = None
    ) -> Measurement:
        """Measure the model with plans several times: medians, and their spread."""
        # made once, and only if a measurement is not known already
        model = functools.cache(lambda: self._made(plan, pruning, made))
        key = key_of(plan, pruning)
        measured: list[Measurement] = []
        for number in range(repeats):
            kept = self._kept(f"{key} again {number}", lambda: self._measured(*model()))
            measured.append(kept)
        return Measurement.median(measured)

    def quantized(self, plan: Plan, tagged: TaggedModel | None = None) -> TaggedModel:
        """Quantize the model, or a pruned copy ``tagged``, by a plan, in memory."""
        from htp_export.capabilities.quantize.quantizing import quantize

        data = self.feeds if self.calibration is None else self._calibration
        # A metric is an error for plans without max_drop.
        drops = any(precision.max_drop is not None for precision in plan.values())
        checked: dict[str, Any] = {"metric": self.metric, "validation": self.feeds} if drops else {}
        result = quantize(tagged or self.tagged, dict(plan), data=data, **checked)
        if result.kept and not result.operators:
            # It is the original: its error of 0 would be that of the plan.
            raise InputError(f"nothing changes: {result.kept[0].reason}")
        return result.tagged

    def _made(
        self, plan: Plan, pruning: Pruning, made: TaggedModel | None
    ) -> tuple[TaggedModel, int]:
        """The model with plans applied, and the number of nonzero elements of its weights."""
        from htp_export.capabilities.prune.pruning import prune

        tagged, nonzeros = self.tagged, self._nonzeros
        if pruning:
            pruned = prune(tagged, pruning)
            whole = pruned.modules[""]
            tagged, nonzeros = pruned.tagged, whole.weights_after - whole.zeros_after
        # Without a change by the plan, the pruned model itself is measured.
        if made is None and not all(precision.is_kept for precision in plan.values()):
            made = self.quantized(plan, tagged)
        return made or tagged, nonzeros

    def _kept(self, key: str, measure: Callable[[], Measurement]) -> Measurement:
        """The finished measurement with a key, or a new one, which is kept."""
        known = self.finished.get(key)
        if known is not None:
            return Measurement.from_dict(known)
        measured = measure()
        self.finished.add(key, measured.to_dict())
        return measured

    def _measured(
        self, tagged: TaggedModel, nonzeros: int | None = None, *, beside: bool = True
    ) -> Measurement:
        """Measure a model; ``beside``: whether timed runs alternate with the original."""
        references, is_loop = self.expected, self.prompts is not None
        if is_loop:
            outputs, ms = self._generated(tagged, beside)
        else:
            outputs, ms = self._run(tagged, self.settings.runs, beside)
        metric = None if self.metric is None else metric_value(self.metric, outputs)
        errors = OutputErrors()
        agreements: list[Any] = []  # of the tokens of each prompt
        for expected, actual in zip(references, outputs, strict=True):
            errors.add(expected, actual)
            if is_loop:
                tokens = expected["logits"].argmax(-1)
                agreements.append(np.mean(tokens == actual["logits"].argmax(-1)))
        return Measurement(
            **vars(errors.result()),
            bytes=sum(slot.tensor.nbytes for slot in slots(tagged.model)),
            latency_ms=None if is_loop else ms,
            metric=metric,
            nonzeros=nonzeros,
            weight_bits=contents_of(tagged).modules[""].facts.weight_bits,
            moved_bits=self._moved_bits(tagged) if self.counts_moves else None,
            tokens=float(np.mean(agreements)) if agreements else None,
            time_ms=ms if is_loop else None,
        )

    def _moved_bits(self, tagged: TaggedModel) -> int:
        """The bits of activations that a model moves in the first run."""
        return moved_bits_of(tagged, replace(self.settings, data=self.feeds[0], shapes=None))

    @cached_property
    def _of_prompts(self) -> list[dict[str, Array]]:
        """The logits of the tokens that the original generates after each prompt."""
        assert self.prompts is not None
        with temporary_folder() as folder:
            loop = self.prompts.decoder
            session = self._session(self.tagged, folder)
            return [
                {"logits": loop.generate(session, ids, self.prompts.new_tokens).logits}
                for ids in self.prompts.ids
            ]

    def _generated(self, tagged: TaggedModel, beside: bool) -> _Ran:
        """The logits of the original's tokens after each prompt, and the time of a loop."""
        assert self.prompts is not None
        loop, count, prompts = self.prompts.decoder, self.prompts.new_tokens, self.prompts.ids
        timed = self.prompts.timed
        outputs: list[dict[str, Array]] = []
        times: list[list[float]] = []
        with temporary_folder() as folder:
            sessions = [self._session(tagged, folder)]
            if beside and timed:
                sessions.append(self._session(self.tagged, folder))
            for session in sessions:
                loop.generate(session, prompts[0], 2)  # to warm up
            rounds = math.ceil(_PAIRS / len(prompts)) if timed else 1
            for number in range(rounds):
                for ids, expected in zip(prompts, self.expected, strict=True):
                    tokens = expected["logits"].argmax(-1)
                    loops = [loop.generate(session, ids, count, tokens) for session in sessions]
                    times.append([generated.ms for generated in loops])
                    if number == 0:
                        outputs.append({"logits": loops[0].logits})
        return outputs, self._ms(times, "time_ms") if timed else None

    def _ms(self, times: Sequence[Sequence[float]], name: str) -> float:
        """The median time of runs, or, beside the original, its time times the median ratio.

        Args:
            times: For each run, the time of the model, and of the original if it ran beside it.
            name: The field of the original's measurement.
        """
        if len(times[0]) == 1:
            return statistics.median(alone for [alone] in times)
        original_ms: float = getattr(self.original, name)
        return original_ms * statistics.median(time / other for time, other in times)

    def _session(self, tagged: TaggedModel, folder: Path) -> Session:
        name = tagged.hierarchy.root.simple_class or "model"
        return Session(RunnableModel.of(tagged.model, name, folder), self.settings)

    def _run(self, tagged: TaggedModel, runs: int, beside: bool = False) -> _Ran:
        """The outputs for each run, and the median time of further runs on the first inputs."""
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
    """Raise an `InputError` for a number of measurements without a spread."""
    check_whole("repeats", repeats, 0, MOST_RUNS)
    if repeats == 1:
        raise InputError(
            "repeats is 1, and one measurement has no spread; give 2 or more, or 0 for none"
        )


def key_of(plan: Plan, pruning: Pruning = _NOTHING) -> str:
    """Plans as text, which is the same in every process."""
    removed = {selector: str(value) for selector, value in pruning.items()}
    precisions = {selector: vars(precision) for selector, precision in plan.items()}
    prefix = json.dumps(removed) if removed else ""
    return prefix + json.dumps(precisions, default=str)
