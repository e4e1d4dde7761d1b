"""The inputs on which static ranges are measured, and the values that a model computes from them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.data import Data, Run, Samples, arrays_of
from htp_export.runtime.generating import Decoder
from htp_export.runtime.inputs import Feed
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import SessionSettings


@dataclass(frozen=True)
class CalibrationData(Samples):
    """The inputs of runs, in none of which is NaN.

    Of a ``decoder`` with a key-value cache, a run that has the ids of tokens alone is a prompt, with an empty cache.
    """

    decoder: Decoder | None = None

    @classmethod
    def of(cls, data: Data | None, model: ir.Model, **settings: Any) -> CalibrationData:
        """The runs that a user's data stand for; see `Samples.of`."""
        samples = super().of(data, model, **settings)
        assert isinstance(samples, cls)
        try:
            return replace(samples, decoder=Decoder.of(model))
        except InputError:  # it is none
            return samples

    def _feed(self, run: Run, name: str) -> Feed:
        if self.decoder is not None and len(list(self.inputs)) > 1:
            name = os.fspath(run) if isinstance(run, str | os.PathLike) else name
            run = arrays_of(run)
            if isinstance(run, Mapping) and run.keys() == {each.name for each in self.decoder.of_prompts}:
                [ids] = replace(self, inputs=self.decoder.of_prompts)._feed(run, name).arrays.values()
                run = self.decoder.first_feed(ids)
        return super()._feed(run, name)

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        for number, arrays in enumerate(super().__iter__()):
            for name in nan_in(arrays):
                raise InputError(f"data, run {number}: input {name!r} has NaN, of which no range can be known")
            yield arrays


@contextmanager
def activations(
    model: ir.Model, name: str, samples: Samples, wanted: Sequence[str]
) -> Iterator[Iterator[dict[str, Array]]]:
    """Run a model on samples, one after another, and give the values of some of its inputs and tensors.

    They are those of the main graph. NaN in one of them is an `InputError`, which has the ``name`` of the model.
    """
    given = {str(value.name) for value in model.graph.inputs}
    known = [tensor for tensor in wanted if tensor in given]
    computed = [tensor for tensor in wanted if tensor not in given]

    def read() -> Iterator[dict[str, Array]]:
        for number, arrays in enumerate(samples):
            found = {tensor: arrays[tensor] for tensor in known} | (run(arrays) if computed else {})
            for tensor in nan_in(found):
                raise InputError(f"data, run {number}: {name} computes NaN in {tensor!r}; its range is not known")
            yield found

    if not computed:
        yield read()
        return
    with Runner(model, name, SessionSettings()).opened(computed) as run:
        yield read()
