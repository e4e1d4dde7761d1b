"""Settings of a run: all that it depends on besides the model, in one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from htp_export.errors import InputError
from htp_export.extras import required
from htp_export.process.argument_types import MOST_RUNS, MOST_SEED, check_whole
from htp_export.runtime.data import Data, single_run

HOST = "CPUExecutionProvider"
"""The execution provider that every ONNX Runtime has, and the default."""


@dataclass(frozen=True, eq=False)  # arrays are compared element by element
class RunSettings:
    """The inputs of a model, and how ONNX Runtime runs it: all that a run depends on besides the model.

    Public functions have these fields, or some of them, as keyword arguments, and pass them on as
    one object, from which internal functions take what they need: `Samples` and `Inputs.random`
    the inputs of runs, ``run_by_shapes`` the shapes of one run, `Session` the providers.

    Settings are made without a model, and checked when they are used: the methods below check
    values, `Inputs` checks names, sizes and arrays, which depend on the model.

    Attributes:
        data: Inputs of the user, in one of the forms of `Data`; None for random inputs. An iterator
            is read once, by `Samples` or `with_one_run`.
        dims: Name of an open dimension → size, which ``data`` must have, and random inputs get.
        shapes: Input name → shape, for random inputs.
        seed: The seed of random inputs.
        providers: Execution providers in order of preference, as for
            ``onnxruntime.InferenceSession``. Without providers, ``session_options`` name them, such
            as plugins.
        session_options: An ``onnxruntime.SessionOptions`` of the user, which is restored
            afterwards; None for the default.
        runs: Number of timed runs; 0 for no times.
    """

    data: Data | None = None
    dims: Mapping[str, int] | None = None
    shapes: Mapping[str, Sequence[int]] | None = None
    seed: int = 0
    providers: Sequence[Any] = (HOST,)
    session_options: Any = None
    runs: int = 0

    def __post_init__(self) -> None:
        """Store the providers as a tuple: they may be an iterator, and several sessions read them."""
        object.__setattr__(self, "providers", tuple(self.providers))

    @property
    def has_inputs(self) -> bool:
        """Whether any setting is about the inputs: without a run, it would have no effect."""
        return self.data is not None or bool(self.dims or self.shapes or self.seed)

    @property
    def has_default_session(self) -> bool:
        """Whether a session has the default providers and options."""
        return self.providers == (HOST,) and self.session_options is None

    def with_one_run(self, what: str) -> RunSettings:
        """Return the same settings, in which ``data`` are the arrays of the only run, or None.

        Raises:
            InputError: ``data`` have several runs, or none; ``what`` accepts only one.
        """
        return replace(self, data=single_run(self.data, what))

    def check_seed(self, further: int = 0) -> int:
        """Refuse a seed that some random generator does not accept; ``further`` seeds follow it."""
        return check_whole("seed", self.seed, 0, MOST_SEED - further)

    def check_timed_runs(self, least: int) -> None:
        """Refuse a number of timed runs that is too small, or takes days."""
        check_whole("runs", self.runs, least, MOST_RUNS)

    def check_one_source(self) -> None:
        """Refuse shapes of random inputs beside data."""
        if self.data is not None and self.shapes:
            raise InputError("shapes are for random inputs; give either shapes or data")

    def check_providers(self) -> None:
        """Refuse execution providers that are not available, as in `check_providers`."""
        check_providers(self.providers)


DEFAULTS = RunSettings()
"""Random inputs, on the CPU."""


def check_providers(providers: Sequence[Any]) -> None:
    """Refuse execution providers that are not available; ONNX Runtime would silently use the CPU instead."""
    onnxruntime = required("onnxruntime")

    available = onnxruntime.get_available_providers()
    for provider in providers:
        name = provider if isinstance(provider, str) else provider[0]
        if name not in available:
            raise InputError(f"this ONNX Runtime has no {name}, only {', '.join(available)}")
