"""Runs passes until none changes the model, checks their outputs, and records what each did to each module."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.bookkeeping import Bookkeeping
from htp_export.capabilities.optimize.merging import PassDifference
from htp_export.capabilities.optimize.registry import Level, PassInfo
from htp_export.capabilities.optimize.results import Change, PassReport
from htp_export.editing.editing import insert_behind, stand_in
from htp_export.editing.outputs import without_defaults
from htp_export.errors import FileError, InputError, PassError
from htp_export.files.filesystem import temporary_folder
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.data import Samples
from htp_export.runtime.sessions import RunnableModel, Session, as_written

_log = logging.getLogger(__name__)

_MOST_ROUNDS = 12
"""Rounds of all passes, after which the model stays as it is: two passes that undo each other's work would not end."""

_BARRIER = ("htp_export", "Barrier")
"""Domain and type of an opaque operator: no pattern matches across its nodes."""


_TOLERANCE: Mapping[Level, float] = {"exact": 0.0, "tolerant": 1e-5, "fused": 1e-3}
"""Largest difference of an output, relative to its largest value if that is more than 1."""

_SIZES = (2, 8, 5, 3, 7)  # of open dimensions, in order


@dataclass
class _Account:
    """The changes of one pass so far."""

    info: PassInfo
    seconds: float = 0.0
    changes: defaultdict[str, Change] = field(default_factory=lambda: defaultdict(Change))
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rolled_back: str = ""
    held: set[str] = field(default_factory=set)  # tensors of signatures that it may not work across
    seen: int = -1  # the state of the model after it ran last


class OutputCheck:
    """Compares outputs of a model with what they were before each pass, and at first.

    Without data they are random: floats of a normal distribution, integers 0 and 1, and booleans half of them true.
    The largest difference so far is ``max_abs``; ``nan`` names outputs with NaN, of which no difference is known.

    Raises:
        InputError: If the model cannot be run on the inputs.
    """

    def __init__(self, model: ir.Model, samples: Samples) -> None:
        inputs, sizes = samples.inputs, (samples.dims, samples.shapes, samples.seed)
        random = [inputs.random(*sizes, open_sizes=_SIZES, true=0.5).arrays] if samples.random else None
        self._runs = random or list(samples)
        try:
            self._expected = self._latest = self._outputs(model)
        except FileError:
            raise
        except Exception as error:
            raise InputError(
                f"the model does not run in ONNX Runtime, so that nothing can be verified: {error}"
            ) from error
        self.nan = tuple(nan_in(self._expected))
        self.max_abs = 0.0

    def fault(self, model: ir.Model, level: Level) -> str:
        """Why the model after a pass does not agree with the level of the pass; empty if it does."""
        try:
            outputs = self._outputs(model)
        except Exception as error:
            return f"it does not run any more: {str(error).splitlines()[0][:200]}"
        for name, expected in self._latest.items():
            if name not in outputs or outputs[name].shape != expected.shape or outputs[name].dtype != expected.dtype:
                return f"output {name!r} has another shape or dtype"
            off, scale = _distance(expected, outputs[name])
            if not off <= _TOLERANCE[level] * max(1.0, scale):
                return f"output {name!r} is off by {off:.3g}, more than {level} allows"
        self._latest = outputs
        self.max_abs = max((_distance(array, outputs[name])[0] for name, array in self._expected.items()), default=0.0)
        return ""

    def _outputs(self, model: ir.Model) -> dict[str, Array]:
        with temporary_folder() as folder:
            session = Session(RunnableModel.of(model, "the model", folder), changes=as_written(threads=1))
            outputs = [session.run(inputs) for inputs in self._runs]
        return {
            f"{name}, run {number}" if number else name: array
            for number, run in enumerate(outputs)
            for name, array in run.items()
        }


def _distance(expected: Array, actual: Array) -> tuple[float, float]:
    """The largest difference, infinite where only one of two numbers is finite; and the largest finite number."""
    if expected.dtype.kind in "biuSUO":
        return (0.0 if np.array_equal(expected, actual) else float("inf")), 0.0
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(a - b))
    off = np.where(np.isnan(off), np.inf, off)
    return float(off.max(initial=0.0)), float(np.abs(a[np.isfinite(a)]).max(initial=0.0))


class Pipeline:
    """Passes, in order, again and again while any of them changes the model.

    A pass that breaks its level, as far as ``check`` sees, is undone, named, and not run again. With ``keep_exact``, no
    pass may make a module inexact whose boundary tensors all remain. ``watch`` is called after each run that changed
    the model, with the pass, what it did, and the model. ``running`` is the pass that started last.
    """

    def __init__(
        self,
        passes: Sequence[PassInfo],
        check: OutputCheck | None = None,
        *,
        keep_exact: bool = False,
        watch: Callable[[PassInfo, PassDifference, ir.Model], None] | None = None,
    ) -> None:
        self._accounts = [_Account(info) for info in passes]
        self._check, self._keep_exact, self._watch = check, keep_exact, watch
        self.running = ""

    def run(self, tagged: TaggedModel) -> TaggedModel:
        """Run the passes on a model, which is changed in place; another one, if a pass made a new one or was undone.

        Raises:
            PassError: If a pass fails; the model is as that pass left it, and of no use any more.
        """
        books, state = Bookkeeping(tagged), 0
        for _ in range(_MOST_ROUNDS):
            started = state
            for account in counted(self._accounts, "passes"):
                if account.seen == state or account.rolled_back:
                    continue
                kept = books.twin() if self._check is not None or self._keep_exact else None
                books, modified = self._step(account, books, kept)
                state += modified
                account.seen = state
            if state == started:
                break
        return books.finish()

    def _step(self, account: _Account, books: Bookkeeping, kept: Bookkeeping | None) -> tuple[Bookkeeping, bool]:
        """Run one pass once; the books afterwards (the kept ones if it was undone), and whether it changed anything."""
        began = time.perf_counter()
        modified, changes, fused = self._run(account, books)
        while self._keep_exact and kept is not None and (across := books.worked_across(fused) - account.held):
            account.held |= across
            books, kept = kept, kept.twin()
            modified, changes, fused = self._run(account, books)
        account.seconds += time.perf_counter() - began
        if not modified:
            return books, False
        if self._check is not None and kept is not None:
            account.rolled_back = self._check.fault(books.model, account.info.level)
            if account.rolled_back:
                _log.warning("pass %s was undone: %s", account.info.name, account.rolled_back)
                return kept, False
        for path, change in changes.items():
            account.changes[path] += change
        account.fused.update(fused)
        if self._watch is not None:
            self._watch(account.info, books.difference, books.model)
        return books, True

    def _run(self, account: _Account, books: Bookkeeping) -> tuple[bool, dict[str, Change], dict[str, tuple[str, ...]]]:
        """Run a pass, with barriers at tensors that it may not cross; whether it changed anything, and its changes."""
        self.running = account.info.name
        held = {value for name in account.held if (value := books.tensor(name)) is not None}
        try:
            with _barriers(books.model.graph, held), without_defaults(books.model.graph) as give_defaults:
                result = account.info.make()(books.model)
            _take_barriers(result.model.graph)
            give_defaults(result.model.graph)
            books.model = result.model
            return result.modified, *(books.settle() if result.modified else ({}, {}))
        except InputError:  # weights that cannot be read: no fault of the pass
            raise
        except Exception as error:
            ran = [earlier.info.name for earlier in self._accounts if earlier.seen >= 0 and not earlier.rolled_back]
            raise PassError(account.info.name, ran, error) from error

    @property
    def reports(self) -> tuple[PassReport, ...]:
        """What each pass did."""
        return tuple(
            PassReport(a.info.name, a.info.level, dict(a.changes), a.seconds, dict(a.fused), a.rolled_back)
            for a in self._accounts
        )


@contextlib.contextmanager
def _barriers(graph: ir.Graph, values: Iterable[ir.Value]) -> Iterator[None]:
    """Insert an opaque node after each tensor, and remove it afterwards, also after an error."""
    domain, operator = _BARRIER
    try:
        for value in values:
            readers = list(value.uses())
            barrier = ir.node(operator, [value], domain=domain)
            behind = barrier.outputs[0]
            behind.shape, behind.type, behind.name = value.shape, value.type, f"{value.name}_behind"
            for node, place in readers:  # a result of the model stays one
                node.replace_input_with(place, behind)
            insert_behind(graph, value, barrier)
        graph.opset_imports[domain] = 1
        yield
    finally:
        _take_barriers(graph)


def _take_barriers(graph: ir.Graph) -> None:
    """Remove every barrier from a graph, also from one that a pass returns in place of its own."""
    for node in list(graph):
        if (node.domain, node.op_type) != _BARRIER:
            continue
        value = node.inputs[0]
        if value is None or not stand_in(node.outputs[0], value):  # it became a result of the model
            node.domain, node.op_type = "", "Identity"
        else:
            graph.remove(node, safe=True)
    graph.opset_imports.pop(_BARRIER[0], None)
