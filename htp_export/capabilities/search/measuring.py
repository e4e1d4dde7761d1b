"""What plans do to a model: pruned, quantized, run on the data, and compared with the original."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.search.output_errors import Deviation, OutputErrors
from htp_export.capabilities.search.studies import KeptRuns, open_study
from htp_export.errors import InputError
from htp_export.files.filesystem import temporary_folder
from htp_export.files.slots import slots
from htp_export.model.content_hash import content_hash
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.generating import Decoder
from htp_export.runtime.metrics import Metric, metric_value, outputs_of
from htp_export.runtime.sessions import RunnableModel, Session, SessionSettings
from htp_export.runtime.timing import median_times
from htp_export.weights.products import weights_of

if TYPE_CHECKING:
    from htp_export.capabilities.prune.sparsities import Sparsity
    from htp_export.capabilities.quantize.precisions import Precision
    from htp_export.runtime.data import Data, Samples

__all__ = ["Measurement", "Measurer", "Plan", "Prompts", "Pruning", "digest_of"]

Plan: TypeAlias = "Mapping[str, Precision]"
Pruning: TypeAlias = "Mapping[str, Sparsity]"

_NOTHING: Pruning = MappingProxyType({})


@dataclass(frozen=True)
class Measurement(Deviation):
    """What was measured of a model.

    Attributes:
        bytes: Size of all tensors of the model.
        latency_ms: Median time of a run; None if it was not measured.
        metric: The user's number; None without one.
        tokens: Share of greedy tokens that are the original's, if the model goes on with the original's; None without
            such tokens. Then the deviation is that of the logits, ``kl`` the mean over tokens.
        time_ms: Time of the loop that generates them, a prompt; None without.
        nonzeros: Elements of the weights, as ``prune`` counts them, that are neither zero nor removed, before they are
            quantized; None in what was measured by an earlier version.
    """

    bytes: int = 0
    latency_ms: float | None = None
    metric: float | None = None
    nonzeros: int | None = None
    tokens: float | None = None
    time_ms: float | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The numbers from `to_dict`."""
        numbers: dict[str, Any] = {k: float(value) if isinstance(value, str) else value for k, value in data.items()}
        return cls(**numbers)


def digest_of(model: ir.Model, feeds: Iterable[Mapping[str, Array]], settings: Sequence[Any] = ()) -> str:
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


@dataclass(frozen=True)
class _Ran:
    """What a model computed: its outputs in each run, and times in ms."""

    outputs: list[dict[str, Array]]
    latency_ms: float | None = None
    time_ms: float | None = None


@dataclass(eq=False)
class Measurer:
    """Measures plans for one model, without functions, on one set of data; the original runs once.

    ``samples`` are compared, and calibrate unless ``calibration`` does. ``runs`` are timed, after some to warm up; 0
    for no times. ``results`` is a file of finished runs, a journal of Optuna. ``finished`` may be replaced before
    anything is measured, by what shares runs with other processes. With ``prompts``, the outputs are the logits of the
    tokens that a decoder generates, and ``samples`` calibrate.
    """

    tagged: TaggedModel
    samples: Samples
    metric: Metric | None = None
    runs: int = 0
    settings: SessionSettings = field(default_factory=SessionSettings)
    results: Any = None
    calibration: Data | None = None
    prompts: Prompts | None = None

    @cached_property
    def feeds(self) -> list[Mapping[str, Array]]:
        """The inputs of each run."""
        return list(self.samples)

    @cached_property
    def finished(self) -> KeptRuns:
        """The runs that are done."""
        if self.results is None:
            return KeptRuns()
        settings = getattr(self.metric, "__qualname__", None), self.runs
        return KeptRuns(open_study(self.results, digest_of(self.tagged.model, self.feeds, settings), ["minimize"]))

    @cached_property
    def expected(self) -> list[dict[str, Array]]:
        """The outputs of the original, for each of the inputs."""
        outputs = self._run(self.tagged, 0).outputs if self.prompts is None else self._generated(self.tagged).outputs
        for number, run in enumerate(outputs):
            for name in nan_in(run):
                if np.isnan(run[name]).all():
                    raise InputError(
                        f"data, run {number}: output {name!r} of the model is NaN; errors of it are not known"
                    )
        return outputs

    @property
    def remarks(self) -> list[str]:
        """What errors do not tell: outputs of the original of which elements are NaN."""
        found = [(number, name) for number, run in enumerate(self.expected) for name in nan_in(run)]
        return [
            f"data, run {k}: output {name!r} of the model has NaN, which counts as no error" for k, name in found[:1]
        ]

    @cached_property
    def original(self) -> Measurement:
        """The original, measured as if it were quantized."""
        return self._kept("", lambda: self._measured(self.tagged, self._nonzeros))

    @cached_property
    def _nonzeros(self) -> int:
        """The elements of the original's weights that are not zero."""
        return sum(int(np.count_nonzero(weight.tensor.numpy())) for weight in weights_of(self.tagged))

    def measure(self, plan: Plan, pruning: Pruning = _NOTHING, *, made: TaggedModel | None = None) -> Measurement:
        """Prune and quantize a model by plans, and run it; ``made``: what `quantized` made of it already."""
        return self._kept(key_of(plan, pruning), lambda: self._measured_plan(plan, pruning, made))

    def quantized(self, plan: Plan, tagged: TaggedModel | None = None) -> TaggedModel:
        """The model, or what was made of it, quantized by a plan, in memory."""
        from htp_export.capabilities.quantize.quantizing import quantize

        data = self.feeds if self.calibration is None else self.calibration
        drops = any(precision.max_drop is not None for precision in plan.values())
        checked: dict[str, Any] = {"metric": self.metric, "validation": self.feeds} if drops else {}
        return quantize(tagged or self.tagged, dict(plan), data=data, **checked).tagged

    def _measured_plan(self, plan: Plan, pruning: Pruning, made: TaggedModel | None) -> Measurement:
        from htp_export.capabilities.prune.pruning import prune

        tagged, nonzeros = self.tagged, self._nonzeros
        if pruning:
            pruned = prune(tagged, pruning)
            whole = pruned.modules[""]
            tagged, nonzeros = pruned.tagged, whole.weights_after - whole.zeros_after
        if made is None:
            changes = any(not precision.is_kept for precision in plan.values())
            made = self.quantized(plan, tagged) if changes else tagged
        return self._measured(made, nonzeros)

    def _kept(self, key: str, make: Callable[[], Measurement]) -> Measurement:
        known = self.finished.get(key)
        if known is not None:
            return Measurement.from_dict(known)
        measured = make()
        self.finished.add(key, measured.to_dict())
        return measured

    def _measured(self, tagged: TaggedModel, nonzeros: int | None = None) -> Measurement:
        ran = self._run(tagged, self.runs) if self.prompts is None else self._generated(tagged, self.expected)
        number = None if self.metric is None else metric_value(self.metric, ran.outputs)
        errors, same = OutputErrors(), []
        for expected, actual in zip(self.expected, ran.outputs, strict=True):
            errors.add(expected, actual)
            if self.prompts is not None:
                [(one, other)] = zip(expected.values(), actual.values(), strict=True)
                same.append(np.mean(one.argmax(-1) == other.argmax(-1)))
        return Measurement(
            **vars(errors.result()),
            bytes=sum(slot.tensor.nbytes for slot in slots(tagged.model)),
            latency_ms=ran.latency_ms,
            metric=number,
            nonzeros=nonzeros,
            tokens=float(np.mean(same)) if same else None,
            time_ms=ran.time_ms,
        )

    def _generated(self, tagged: TaggedModel, expected: Sequence[Mapping[str, Array]] | None = None) -> _Ran:
        """The logits of the tokens that follow each prompt: with what is expected, of the same tokens."""
        assert self.prompts is not None
        loop, count = self.prompts.decoder, self.prompts.new_tokens
        following = [None if expected is None else expected[k]["logits"].argmax(-1) for k in range(len(self.feeds))]
        with temporary_folder() as folder:
            session = Session(RunnableModel.of(tagged.model, "the decoder", folder), self.settings)
            loop.generate(session, self.prompts.ids[0], 2)  # to warm up
            made = [
                loop.generate(session, ids, count, tokens)
                for ids, tokens in zip(self.prompts.ids, following, strict=True)
            ]
        return _Ran([{"logits": each.logits} for each in made], time_ms=sum(each.ms for each in made) / len(made))

    def _run(self, tagged: TaggedModel, runs: int) -> _Ran:
        """The outputs for each of the inputs, and the median time of further runs on the first ones."""
        with temporary_folder() as folder:
            name = tagged.hierarchy.root.simple_class or "model"
            runnable = RunnableModel.of(tagged.model, name, folder)
            outputs = outputs_of(runnable, self.feeds, self.settings)
            if not runs:
                return _Ran(outputs)
            [latency] = median_times([Session(runnable, self.settings)], self.feeds[:1], runs)
            return _Ran(outputs, latency)


def key_of(plan: Plan, pruning: Pruning = _NOTHING) -> str:
    """Plans as text that is the same in every process."""
    removed = json.dumps({selector: str(value) for selector, value in pruning.items()}) if pruning else ""
    return removed + json.dumps({selector: vars(precision) for selector, precision in plan.items()}, default=str)
