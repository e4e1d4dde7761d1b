"""optimize(): run passes on a model, and keep its tags correct."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.attribution import AttributedModel
from htp_export.capabilities.optimize.registry import (
    Level,
    LibraryResult,
    PassInfo,
    choose,
    shared_shapes,
)
from htp_export.capabilities.optimize.results import Change, Optimized, PassReport
from htp_export.discovery import providers
from htp_export.editing.editing import insert_behind, replace_with
from htp_export.editing.flattening import read_for_change
from htp_export.editing.outputs import without_defaults
from htp_export.errors import FileError, InputError, PassError, described
from htp_export.extras import required
from htp_export.files.filesystem import temporary_folder
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.lineage.difference import PassDifference
from htp_export.model.assumed_values import ReadParameters
from htp_export.model.model_faults import names_model_faults
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array, arrays_in, nan_in
from htp_export.runtime.data import Data
from htp_export.runtime.samples import Samples
from htp_export.runtime.sessions import RunnableModel, Session, as_written
from htp_export.runtime.settings import RunSettings
from htp_export.shapes.symbolic import Symbolic


@names_model_faults("model")
def optimize(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    *,
    passes: str | Sequence[str] = "default",
    level: Level = "exact",
    verify: bool = False,
    keep_exact: bool = False,
    data: Data | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    external_data: str | None = None,
    share_weights: bool = False,
) -> Optimized:
    """Reduce the number of nodes of a model, and keep its tags correct.

    A node that replaces others has the owners of all of them. A module that lost a tensor at its
    boundary becomes ``fused`` with the modules that it was merged with.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        output: The file to write.
        passes: ``"default"``, or names of passes as a list or separated by commas; ``"default"``
            among them means all default passes. See `htp_export.passes.available`.
        level: ``"exact"``: outputs stay equal, bit for bit; ``"tolerant"``: they may change by
            1e-5; ``"fused"``: as ``"tolerant"``, with operators that only ONNX Runtime has.
        verify: Run the model in ONNX Runtime before and after every pass. A pass that changes more
            than its level allows is undone and listed in the result.
        keep_exact: Skip rewrites that make a module inexact although all its inputs and outputs
            stay in the graph. The result has a few more nodes at level ``"fused"``.
        data: The runs of ``verify``, as for `quantize`; None for one run on random inputs.
        dims: Name of an open dimension → size. ``data`` of other sizes raise an error.
        shapes: For random inputs: input name → shape.
        seed: Seed of the random inputs.
        external_data: Name of a file beside ``output`` for all weights of more than 256 bytes.
        share_weights: Leave external weights in the data file of another model in the folder of
            ``output``: no copy.

    Returns:
        The model, and the changes of each module by each pass.

    Raises:
        InputError: There is no such pass or level, or ``verify`` cannot run the model.
        FileError: A file cannot be read or written.
        PassError: A pass fails; nothing is written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> exported = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> result = htp_export.optimize(exported, level="tolerant", verify=True)
        >>> result.nodes_after <= result.nodes_before, result.max_abs <= 1e-5
        (True, True)
    """
    settings = RunSettings(data, dims, shapes, seed)
    check_target(output)
    chosen = choose(passes, level)
    original = read_for_change(model)
    nodes_before = sum(1 for _ in all_nodes(original.model))
    if not verify and settings.has_inputs:
        raise InputError(
            "data, sizes and seed are for verify, which runs the model; "
            "give verify, or leave them out"
        )
    check = None
    if verify:
        samples = Samples.of(settings, original.model)
        check = OutputCheck(original.model, samples)
    pipeline = Pipeline(chosen, check, keep_exact=keep_exact)
    before = ReadParameters.of(original.model)
    optimized = pipeline.run(original)
    before.record_assumed(optimized.model)
    if output is not None:
        write_model(optimized.model, output, external_data, share_weights=share_weights)
        for beside in providers("files_beside"):
            beside.renew(optimized.model.graph, output)
    return Optimized(
        nodes_before=nodes_before,
        nodes_after=sum(1 for _ in all_nodes(optimized.model)),
        passes=pipeline.reports,
        max_abs=None if check is None else check.max_abs,
        nan=() if check is None else check.nan,
        model=optimized.model,
    )


_log = logging.getLogger(__name__)

_MOST_ROUNDS = 12
"""The most rounds of all passes: two passes that undo each other's work would not end."""

_BARRIER = ("htp_export", "Barrier")
"""Domain and type of an opaque operator: no pattern matches across its nodes."""


_TOLERANCE: Mapping[Level, float] = {"exact": 0.0, "tolerant": 1e-5, "fused": 1e-3}
"""Largest difference of an output, relative to its largest value if that is more than 1."""

_SIZES = (2, 8, 5, 3, 7)  # of open dimensions, in order: small, and different from each other


@dataclass
class _Account:
    """The changes of one pass so far."""

    info: PassInfo
    seconds: float = 0.0
    changes: defaultdict[str, Change] = field(default_factory=lambda: defaultdict(Change))
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rolled_back: str = ""
    left: Mapping[str, str] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)  # tensors of signatures that it must not remove
    seen: int = -1  # the state of the model after its last run


class OutputCheck:
    """Compares outputs of a model with its outputs before each pass, and before all passes.

    Without data, the inputs are random: floats of a normal distribution, integers 0 and 1, and
    booleans of which half are true. ``max_abs``: the largest difference so far. ``nan``: the names
    of outputs with NaN, whose differences are unknown.

    Raises:
        InputError: If the model cannot be run on the inputs.
    """

    def __init__(self, model: ir.Model, samples: Samples) -> None:
        required("onnxruntime", "the comparison of outputs after each pass")
        if samples.random:
            feed = samples.inputs.random(samples.settings, open_sizes=_SIZES, true=0.5)
            self._runs = [feed.arrays]
        else:
            self._runs = list(samples)
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
        """Why the model after a pass does not agree with the level of the pass.

        Empty if it does.
        """
        try:
            outputs = self._outputs(model)
        except Exception as error:
            return f"it does not run any more: {str(error).splitlines()[0][:200]}"
        for name, expected in self._latest.items():
            actual = outputs.get(name)
            if actual is None or (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
                return f"output {name!r} has another shape or dtype"
            off, scale = _distance(expected, actual)
            if not off <= _TOLERANCE[level] * max(1.0, scale):
                return f"output {name!r} is off by {off:.3g}, more than {level} allows"
        self._latest = outputs
        distances = (_distance(array, outputs[name]) for name, array in self._expected.items())
        self.max_abs = max((off for off, _ in distances), default=0.0)
        return ""

    def _outputs(self, model: ir.Model) -> dict[str, Array]:
        with temporary_folder() as folder:
            runnable = RunnableModel.of(model, "the model", folder)
            session = Session(runnable, changes=as_written(threads=1))
            runs = [arrays_in(session.run(inputs)) for inputs in self._runs]
        outputs: dict[str, Array] = {}
        for number, run in enumerate(runs):
            for name, array in run.items():
                outputs[f"{name}, run {number}" if number else name] = array
        return outputs


def _distance(expected: Array, actual: Array) -> tuple[float, float]:
    """The largest difference, and the largest finite number.

    The difference is infinite if only one of two numbers is finite.
    """
    if expected.dtype.kind in "biuSUO":
        return (0.0 if np.array_equal(expected, actual) else float("inf")), 0.0
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(a - b))
    off = np.where(np.isnan(off), np.inf, off)
    return float(off.max(initial=0.0)), float(np.abs(a[np.isfinite(a)]).max(initial=0.0))


class Pipeline:
    """Runs passes in order, and again while any of them changes the model.

    A pass that violates its level, as far as ``check`` detects it, is undone, named, and not run
    again. With ``keep_exact``, no pass may make a module inexact whose boundary tensors all remain.
    ``watch`` is called after each run that changed the model, with the pass, its changes, and the
    model. ``running`` is the pass that started last.
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
        # graph → shapes and types in it, since the last pass that changed the model
        self._shapes: dict[ir.Graph, Symbolic] = {}
        self.running = ""

    def run(self, tagged: TaggedModel) -> TaggedModel:
        """Run the passes on a model, in place.

        Returns the model; it is another one if a pass returned a new model, or was undone.

        Raises:
            PassError: If a pass fails; the model is then in an undefined state.
        """
        books, state = AttributedModel(tagged), 0
        for _ in range(_MOST_ROUNDS):
            started = state
            for account in counted(self._accounts, "passes"):
                if account.seen == state or account.rolled_back:
                    continue
                undoes = self._check is not None or self._keep_exact or account.info.may_fail
                kept = books.twin() if undoes else None
                books, modified = self._step(account, books, kept)
                state += modified
                account.seen = state
            if state == started:
                break
        return books.finish()

    def _step(
        self, account: _Account, books: AttributedModel, kept: AttributedModel | None
    ) -> tuple[AttributedModel, bool]:
        """Run one pass once.

        Return the model (``kept`` if it was undone), and whether it changed.
        """
        began = time.perf_counter()
        try:
            modified, changes, fused = self._run(account, books)
            while self._keep_exact and kept is not None:
                crossed = books.worked_across(fused) - account.held
                if not crossed:
                    break
                account.held |= crossed
                books, kept = kept, kept.twin()
                modified, changes, fused = self._run(account, books)
        except PassError as error:
            if kept is None or not account.info.may_fail:
                raise
            return self._undone(account, kept, f"it failed: {described(error.problem)}")
        finally:
            account.seconds += time.perf_counter() - began
        if not modified:
            return books, False
        if self._check is not None and kept is not None:
            fault = self._check.fault(books.model, account.info.level)
            if fault:
                return self._undone(account, kept, fault)
        for path, change in changes.items():
            account.changes[path] += change
        account.fused.update(fused)
        if self._watch is not None:
            self._watch(account.info, books.difference, books.model)
        return books, True

    def _undone(
        self, account: _Account, kept: AttributedModel, why: str
    ) -> tuple[AttributedModel, bool]:
        """Record that a pass was undone, and return the model from before it."""
        account.rolled_back, account.left = why, {}
        self._shapes.clear()
        _log.warning("pass %s was undone: %s", account.info.name, why)
        return kept, False

    def _run(
        self, account: _Account, books: AttributedModel
    ) -> tuple[bool, dict[str, Change], dict[str, tuple[str, ...]]]:
        """Run a pass with barriers at the held tensors.

        Returns whether it changed the model, its changes by module, and the modules that it fused.
        """
        self.running = account.info.name
        tensors = map(books.tensor, account.held)
        held = {value for value in tensors if value is not None}
        try:
            result = self._result(account, books.model, held)
            books.model = result.model
            if not result.modified:
                books.check_unchanged()
                return False, {}, {}
            fused = books.settle()
            return True, books.changes(), fused
        except InputError:  # weights that cannot be read: no fault of the pass
            raise
        except Exception as error:
            finished = [one for one in self._accounts if one.seen >= 0 and not one.rolled_back]
            ran = [one.info.name for one in finished]
            raise PassError(account.info.name, ran, error) from error

    def _result(
        self, account: _Account, model: ir.Model, held: Collection[ir.Value]
    ) -> ir.passes.PassResult:
        """Run a pass with barriers at some tensors."""
        # Passes with barriers, and passes of libraries, see another graph than the others.
        shares = not held and not account.info.may_fail
        with (
            shared_shapes(self._shapes if shares else None),
            _barriers(model.graph, held),
            without_defaults(model.graph) as restore_defaults,
        ):
            result = account.info.make()(model)
        if held:  # the pass may have returned a new graph, with copies of them
            _remove_barriers(result.model.graph)
        restore_defaults(result.model.graph)
        if isinstance(result, LibraryResult):
            account.left = result.left
        if result.modified or not shares:
            self._shapes.clear()
        return result

    @property
    def reports(self) -> tuple[PassReport, ...]:
        """The changes by each pass."""
        return tuple(
            PassReport(
                name=account.info.name,
                level=account.info.level,
                modules=dict(account.changes),
                seconds=account.seconds,
                fused=dict(account.fused),
                rolled_back=account.rolled_back,
                left=dict(account.left),
            )
            for account in self._accounts
        )


@contextlib.contextmanager
def _barriers(graph: ir.Graph, values: Collection[ir.Value]) -> Iterator[None]:
    """Insert an opaque node after each tensor, and remove it afterwards, also after an error."""
    domain, operator = _BARRIER
    if not values:
        yield
        return
    try:
        for value in values:
            uses = list(value.uses())
            barrier = ir.node(operator, [value], domain=domain)
            behind = barrier.outputs[0]
            behind.shape, behind.type, behind.name = value.shape, value.type, f"{value.name}_behind"
            for node, position in uses:  # an output of the model stays one
                node.replace_input_with(position, behind)
            insert_behind(graph, value, barrier)
        graph.opset_imports[domain] = 1
        yield
    finally:
        _remove_barriers(graph)


def _remove_barriers(graph: ir.Graph) -> None:
    """Remove every barrier from a graph, also from a new graph that a pass returns."""
    for node in list(graph):
        if (node.domain, node.op_type) != _BARRIER:
            continue
        value = node.inputs[0]
        if value is not None and replace_with(node.outputs[0], value):
            graph.remove(node, safe=True)
        else:  # its output became an output of the model
            node.domain, node.op_type = "", "Identity"
    graph.opset_imports.pop(_BARRIER[0], None)
