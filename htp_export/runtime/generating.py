"""Greedy decoding with a key-value cache: a run of the prompt with an empty cache, then one run for each token."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.runtime.arrays import Array, from_ort
from htp_export.runtime.declared_inputs import Input, check_elements
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.sessions import Session

CACHE = re.compile(
    r"(?P<before>.*?)(?<![0-9])(?P<layer>[0-9]{1,9})\.(?P<kind>key|value)(?P<after>s?)",
    re.DOTALL,
)
"""Names of cache tensors: ``past_key_values.0.key`` of optimum, ``input.cache.layers.0.keys`` of transformers."""

_IDS, _MASK, _POSITIONS, _LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
_RANDOM_LENGTH = 16  # tokens: a short prompt


@dataclass(frozen=True)
class Generated:
    """The result of decoding.

    Attributes:
        logits: The logits of each new token, ``[batch, new tokens, vocabulary]``.
        prefill_ms: Wall time of the run of the prompt.
        step_ms: Median wall time of the runs of one token; 0 without such runs.
    """

    logits: Array
    prefill_ms: float
    step_ms: float

    @property
    def tokens(self) -> Array:
        """The most probable token at each position, ``[batch, new tokens]``."""
        return np.asarray(self.logits.argmax(-1))

    @property
    def ms(self) -> float:
        """The time of all runs, where each run of one token counts with the median time."""
        return self.prefill_ms + self.step_ms * (int(self.logits.shape[1]) - 1)


@dataclass(frozen=True)
class Decoder:
    """A model that takes tokens and a key-value cache, and returns logits and the extended cache.

    Attributes:
        inputs: Its inputs by name.
        cache: Input of the cache → the output with the same tensor after the run.
    """

    inputs: Mapping[str, Input]
    cache: Mapping[str, str]

    @classmethod
    def of(cls, model: ir.Model) -> Decoder:
        """Create a decoder from a model; an `InputError` names a missing input or output.

        Examples:
            >>> Decoder.of(ir.Model(ir.Graph([ir.val("input_ids")], [], nodes=[]), ir_version=10))
            Traceback (most recent call last):
            ...
            htp_export.errors.InputError: generating tokens needs a key-value cache, which the model does not take;
            export it for the task text-generation-with-past
        """
        inputs = {declared.name: declared for declared in Inputs.of(model)}
        outputs = [str(value.name) for value in model.graph.outputs]
        cache_inputs = _cache_by_layer(inputs)
        cache_outputs = _cache_by_layer(outputs)
        for cache, verb in ((cache_inputs, "take"), (cache_outputs, "return")):
            if not cache:
                raise InputError(
                    f"generating tokens needs a key-value cache, which the model does not {verb}; export it for the "
                    "task text-generation-with-past"
                )
        if cache_inputs.keys() != cache_outputs.keys():
            raise InputError(
                "the cache inputs and the cache outputs of the model have other layers"
            )
        known = {_IDS, _MASK, _POSITIONS, *cache_inputs.values()}
        for name in inputs:
            if name not in known:
                raise InputError(f"generating tokens has no value for the input {name!r}")
        if _IDS not in inputs:
            raise InputError(f"generating tokens needs an input {_IDS!r}")
        if _LOGITS not in outputs:
            raise InputError(f"generating tokens needs an output {_LOGITS!r}")
        return cls(inputs, {name: cache_outputs[layer] for layer, name in cache_inputs.items()})

    @property
    def of_prompts(self) -> Inputs:
        """The inputs that a prompt determines: the ids of its tokens."""
        return Inputs([self.inputs[_IDS]])

    def first_feed(self, ids: Array) -> dict[str, Array]:
        """Return the inputs of the run of a prompt, ``[batch, length]``, with an empty cache."""
        batch = ids.shape[0]
        feed = {name: _empty(self.inputs[name], batch) for name in self.cache}
        return feed | self.tokens(ids, ids.shape[1])

    def tokens(self, new: Array, length: int) -> dict[str, Array]:
        """Return the inputs except the cache for the last tokens, ``[batch, new]``, of a text of this length."""
        positions = np.tile(np.arange(length - new.shape[1], length), (len(new), 1))
        mask = np.ones((len(new), length), np.int64)
        arrays = {_IDS: new, _MASK: mask, _POSITIONS: positions}
        return {
            name: array.astype(self._dtype(name))
            for name, array in arrays.items()
            if name in self.inputs
        }

    def _dtype(self, name: str) -> Any:
        dtype = self.inputs[name].type
        return np.int64 if dtype is None else dtype.numpy()

    def random_prompt(self, session: Session, seed: int) -> Array:
        """Return a prompt of random tokens of the vocabulary."""
        [logits] = session.run(self.first_feed(np.zeros((1, 1), np.int64)), [_LOGITS]).values()
        ids = np.random.default_rng(seed).integers(0, logits.shape[-1], (1, _RANDOM_LENGTH))
        return ids.astype(self._dtype(_IDS))

    def generate(
        self, session: Session, ids: Array, count: int, following: Array | None = None
    ) -> Generated:
        """Run a prompt, then one token at a time; the cache stays in ONNX Runtime.

        Args:
            session: The loaded model.
            ids: The prompt, ``[batch, length]``, without padding.
            count: The number of new tokens.
            following: Tokens to continue with, ``[batch, count]``, in place of the most probable
                ones, so that models can be compared at each position.
        """
        values = session.values(self.first_feed(ids))
        names = [_LOGITS, *self.cache.values()]
        rows, times = [], []
        for step in range(count):
            begun = time.perf_counter()
            logits, *present = session.run_values(values, names)
            times.append((time.perf_counter() - begun) * 1000)
            rows.append(from_ort(logits)[:, -1].astype(np.float32))
            new = rows[-1].argmax(-1) if following is None else following[:, step]
            values = dict(zip(self.cache, present, strict=True))
            values |= session.values(self.tokens(new[:, None], ids.shape[1] + step + 1))
        return Generated(np.stack(rows, 1), times[0], statistics.median(times[1:] or [0.0]))


def _cache_by_layer(names: Iterable[str]) -> dict[tuple[int, str], str]:
    """Return the names of cache tensors: layer and ``key`` or ``value`` → name."""
    by_layer: dict[tuple[int, str], str] = {}
    for name in names:
        match = CACHE.fullmatch(name)
        if match is not None:
            by_layer[int(match["layer"]), match["kind"]] = name
    return by_layer


def _empty(declared: Input, batch: int) -> Array:
    """Return a tensor of the cache without tokens: the open dimensions except the first one are 0."""
    sizes = [dim if isinstance(dim, int) else 0 for dim in declared.shape or ()]
    if sizes:
        sizes[0] = batch
    check_elements(declared.name, sizes)
    return np.zeros(sizes, np.float32 if declared.type is None else declared.type.numpy())
