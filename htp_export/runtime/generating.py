"""The greedy loop of a decoder with a key-value cache: the prompt with an empty cache, then one token at a time."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
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
"""``past_key_values.0.key`` as optimum has it, ``input.cache.layers.0.keys`` as transformers has it."""

_IDS, _MASK, _POSITIONS, _LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
_RANDOM_LENGTH = 16  # tokens: as many as a short prompt has


@dataclass(frozen=True)
class Generated:
    """What a decoder computed in the loop.

    Attributes:
        logits: Those of which each new token is chosen, ``[batch, new tokens, vocabulary]``.
        prefill_ms: Wall time of the run of the prompt.
        step_ms: Median wall time of the runs of one token; 0 if there were none.
    """

    logits: Array
    prefill_ms: float
    step_ms: float

    @property
    def tokens(self) -> Array:
        """The most probable token at each place, ``[batch, new tokens]``."""
        return np.asarray(self.logits.argmax(-1))

    @property
    def ms(self) -> float:
        """The time of the loop, in which each step counts as the median one."""
        return self.prefill_ms + self.step_ms * (int(self.logits.shape[1]) - 1)


@dataclass(frozen=True)
class Decoder:
    """A model that takes tokens and a key-value cache, and returns logits and the cache with these tokens.

    Attributes:
        inputs: Its inputs by name.
        cache: Input of the cache → the output that is the same tensor after a run.
    """

    inputs: Mapping[str, Input]
    cache: Mapping[str, str]

    @classmethod
    def of(cls, model: ir.Model) -> Decoder:
        """The decoder that a model is; an `InputError` says what it lacks.

        Examples:
            >>> Decoder.of(ir.Model(ir.Graph([ir.val("input_ids")], [], nodes=[]), ir_version=10))
            Traceback (most recent call last):
            ...
            htp_export.errors.InputError: generating tokens needs a key-value cache, which the model does not take;
            export it for the task text-generation-with-past
        """
        inputs = {each.name: each for each in Inputs.of(model)}
        taken = {_layer(name): name for name in inputs if CACHE.fullmatch(name)}
        returned = {
            _layer(name): name
            for value in model.graph.outputs
            if CACHE.fullmatch(name := str(value.name))
        }
        for found, verb in ((taken, "take"), (returned, "return")):
            if not found:
                raise InputError(
                    f"generating tokens needs a key-value cache, which the model does not {verb}; export it for the "
                    "task text-generation-with-past"
                )
        if taken.keys() != returned.keys():
            raise InputError(
                "the layers of the cache that the model takes are not those that it returns"
            )
        unknown = [
            name for name in inputs if name not in {_IDS, _MASK, _POSITIONS, *taken.values()}
        ]
        if unknown or _IDS not in inputs:
            problem = (
                f"has nothing for the input {unknown[0]!r}"
                if unknown
                else f"needs an input {_IDS!r}"
            )
            raise InputError(f"the loop that generates tokens {problem}")
        if all(value.name != _LOGITS for value in model.graph.outputs):
            raise InputError(f"the loop that generates tokens needs an output {_LOGITS!r}")
        return cls(inputs, {name: returned[layer] for layer, name in taken.items()})

    @property
    def of_prompts(self) -> Inputs:
        """What a prompt gives: the ids of its tokens."""
        return Inputs([self.inputs[_IDS]])

    def first_feed(self, ids: Array) -> dict[str, Array]:
        """The inputs of the run of a prompt, ``[batch, length]``, with an empty cache."""
        batch = ids.shape[0]
        feed = {name: _empty(self.inputs[name], batch) for name in self.cache}
        return feed | self.tokens(ids, ids.shape[1])

    def tokens(self, new: Array, length: int) -> dict[str, Array]:
        """The inputs besides the cache for new tokens, ``[batch, new]``, the last of a text of this length."""
        places = np.tile(np.arange(length - new.shape[1], length), (len(new), 1))
        given = {_IDS: new, _MASK: np.ones((len(new), length), np.int64), _POSITIONS: places}
        return {
            name: array.astype(self._dtype(name))
            for name, array in given.items()
            if name in self.inputs
        }

    def _dtype(self, name: str) -> Any:
        kind = self.inputs[name].type
        return np.int64 if kind is None else kind.numpy()

    def random_prompt(self, session: Session, seed: int) -> Array:
        """A prompt of random tokens of the vocabulary."""
        [logits] = session.run(self.first_feed(np.zeros((1, 1), np.int64)), [_LOGITS]).values()
        ids = np.random.default_rng(seed).integers(0, logits.shape[-1], (1, _RANDOM_LENGTH))
        return ids.astype(self._dtype(_IDS))

    def generate(
        self, session: Session, ids: Array, count: int, following: Array | None = None
    ) -> Generated:
        """Run a prompt, and a token after the other; the cache stays in ONNX Runtime.

        Args:
            session: The loaded model.
            ids: The prompt, ``[batch, length]``, without padding.
            count: How many tokens are chosen.
            following: The tokens that it goes on with, ``[batch, count]``, whatever it chooses, so
                that models can be compared at every place; None for its own.
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


def _layer(name: str) -> tuple[int, str]:
    found = CACHE.fullmatch(name)
    assert found is not None
    return int(found["layer"]), found["kind"]


def _empty(declared: Input, batch: int) -> Array:
    """A tensor of the cache without tokens: sizes that the file leaves open are 0."""
    shape = declared.shape or ()
    sizes = [
        batch if k == 0 else size if isinstance(size, int) else 0 for k, size in enumerate(shape)
    ]
    check_elements(declared.name, sizes)
    return np.zeros(sizes, np.float32 if declared.type is None else declared.type.numpy())
