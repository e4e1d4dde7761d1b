"""``search``: the choices of precision and pruning for each module with the best trade-offs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from htp_export.capabilities.search.architecture_results import Architectures
from htp_export.capabilities.search.architectures import (
    Build,
    ModuleMetric,
    search_architectures,
)
from htp_export.capabilities.search.measuring import Measurer, Prompts, check_repeats, digest_of
from htp_export.capabilities.search.search_results import (
    LARGER_IS_BETTER,
    OBJECTIVES,
    OF_DECODERS,
    Search,
    SearchInterrupted,
    Trial,
)
from htp_export.capabilities.search.search_work import SearchWork
from htp_export.capabilities.search.sensitivities import RANDOM_NOTE
from htp_export.capabilities.search.spaces import (
    By,
    Decision,
    SearchSpace,
    Space,
    read_space,
)
from htp_export.capabilities.search.studies import SharedStudy, check_sampler
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.files.filesystem import temporary_folder
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.process.argument_types import MOST_RUNS, check_whole, is_torch_module
from htp_export.process.interrupts import stems_from_interrupt
from htp_export.process.progress import report_counts
from htp_export.runtime.generating import Decoder
from htp_export.runtime.runner import TIMED_RUNS, Metric
from htp_export.runtime.sessions import RunnableModel, Session
from htp_export.runtime.settings import RunSettings

if TYPE_CHECKING:
    from htp_export.runtime.data import Data
    from htp_export.runtime.samples import Samples

_BEFORE_SAMPLER = 0.75
"""The share of the trials that refine the front before a sampler chooses: with some dozens of
trials, plans near the front are better than those of any sampler."""

# Defaults of arguments that only the search on a file has: with a function, others are refused.
_NEW_TOKENS = 64  # as many as an answer of some sentences
_FIRST = 20  # less than half of the default of trials: later ones learn from them

_RANDOM_PROMPTS = 2
"""Prompts without data: each is completed token by token, which takes seconds."""

RANDOM_PROMPTS = (
    "the prompts are random tokens of the vocabulary: on real prompts other tokens may agree"
)
_REFINED_AT_ONCE = 4
"""Plans next to the front that are measured before the next predictions."""


@overload
def search(model: ModelSource, space: Space = ..., **settings: Any) -> Search: ...


@overload
def search(model: Build, space: Mapping[str, Sequence[Any]], **settings: Any) -> Architectures: ...


@names_model_faults("model")  # type: ignore[misc] # overloads that repeat no keywords
def search(
    model: ModelSource | Build,
    space: Space = ("auto", "fp32"),
    *,
    objectives: Sequence[str] | None = None,
    data: Data | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    select: str | Sequence[str] | None = None,
    depth: int | None = None,
    by: By = "module",
    trials: int = 50,
    sampler: str = "tpe",
    seed: int = 0,
    storage: Any = None,
    study: str = "htp_export",
    metric: Metric | ModuleMetric | None = None,
    runs: int = TIMED_RUNS,
    repeats: int = 0,
    new_tokens: int = _NEW_TOKENS,
    first: int = _FIRST,
    calibration: Data | None = None,
    grace: float = 60.0,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    dynamo: bool = True,
) -> Search | Architectures:
    """Search for the precision and the pruning of each module with the best trade-offs.

    Every choice of every module is measured alone, then plans on the front of the sums, then plans
    next to measured plans; Optuna continues from there (``docs/search.md``). Several processes, on
    one or more machines, with the same ``storage`` and ``study`` work on one search; each returns
    when all trials are finished.

    With a function in place of the model, it is a search over architectures: ``build(choice)``
    returns the PyTorch module of a candidate, and ``space`` has names → choices. The latency of a
    candidate is the sum of its parts, and equal parts of all candidates are measured once.

    Thread-safe, also for calls on the same model; not with a function, which uses PyTorch.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
            No model is written. Or a function that is called with a dict, name → choice, and
            returns an ``nn.Module``, or ``(module, example inputs)``; it may train the module.
        space: The choices of every module; or selector → choices of its modules, where later
            selectors win. If a selector matches modules inside each other, the innermost are used.
            Each choice is a precision, as in a plan of ``quantize``; a value of a plan of
            ``prune``, such as ``0.5``, ``"2:4"``, ``"rank:25%"`` or ``"drop"``; or both, as
            ``"2:4+int8"`` or ``{"prune": "2:4", "precision": "int8"}``. ``"fp32"`` leaves a module
            as it is; ``"auto"`` is one precision for all modules with this choice. Modules that are
            only dropped or stay may contain others. For a selector, also ``{"precision": "fixed",
            "data": ["8.4", "6.2"], "weight": [...], "bias": [...]}``: the parts are decided apart. For a function:
            name → list of choices.
        objectives: One or more of ``error`` (of the outputs), ``size`` (of all tensors),
            ``bits`` (stored bits of weights and moved bits of activations, in the format of each,
            as in ``cost``), ``latency``, ``metric``, and
            ``nonzeros`` (elements of weights that are neither zero nor
            removed). For a decoder with a key-value cache, also ``tokens``, the share of greedy
            tokens that agree with the original's, and ``time``, in ms, of the loop that generates
            them, prompt included; ``error`` is then that of their logits. None for ``error`` and
            ``size``. Of architectures: ``latency`` (ms on one thread), ``size`` (of parameters and
            buffers), ``parameters``, ``flops``, ``metric``; None for ``latency``, and ``metric``
            or ``size``.
        data: Inputs, as for ``sensitivity``; with ``tokens`` or ``time`` prompts, ``input_ids``
            alone. Of architectures: one run, name of an argument → array, if ``build`` returns no
            inputs.
        dims: Name of an open dimension → size, as for ``sensitivity``.
        shapes: For random inputs: input name → shape.
        select: For choices alone: the modules, as for ``sensitivity``.
        depth: For choices alone: the level of the modules, as for ``sensitivity``.
        by: ``"module"``, or ``"class"``: all modules of a class get the same choice.
        trials: Number of measured plans in the study.
        sampler: ``tpe``, ``nsga2``, ``random`` or ``grid``.
        seed: Seed of the sampler, and of random inputs.
        storage: Any storage of Optuna: a database URL, ``grpc://host:port``, the path of a journal
            file, or a storage. None keeps the study in memory.
        study: Its name in the storage.
        metric: The function of the objective ``metric``: called with the outputs, name → array, for
            each of the inputs; of architectures, called with the module. Larger is better.
        runs: Runs that are timed for the objective ``latency``, each beside one of the original.
        repeats: How often each plan of the front is measured again at the end, 2 or more, for
            medians and spreads; 0 for not at all.
        new_tokens: With ``tokens`` or ``time``, the tokens that follow each prompt.
        first: Plans of the front of the sums that are measured first.
        calibration: Inputs for calibration; None for ``data``.
        grace: Seconds without a sign of another process after which its trials are repeated.
        providers: ONNX Runtime's execution providers, in order of preference.
        dynamo: How candidates of architectures are exported, as for ``export``.

    Returns:
        ``.trials`` and ``.pareto``, each with ``.values``, ``.prune``, a plan for ``prune``, and
        ``.plan``, one for ``quantize`` afterwards; ``.steps`` has both for ``pipeline``. Of
        architectures, each has ``.choice`` and ``.parts``, and `Architectures.failures` has the
        candidates that could not be built.

    Raises:
        InputError: An argument cannot be used, no module can have a choice, no candidate can be
            built, modules with the same channels may lose different shares of them, Optuna is not
            installed, or the study is one of another search.
        SelectorError: A selector cannot be read or matches no module.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.
        KeyboardInterrupt: On Ctrl-C; once plans are measured, the search so far is its ``.result``.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 64),), verbose=False)
        >>> settings = {"objectives": ["size"], "data": {"input": torch.randn(2, 64)}, "trials": 4}
        >>> found = htp_export.search(program, ["int4", "fp32"], **settings)  # doctest: +SKIP
        >>> found.pareto[0].plan  # doctest: +SKIP
        {'0': 'int4', '2': 'int4'}
    """
    from htp_export.capabilities.quantize.choosing import AutoPrecision
    from htp_export.capabilities.quantize.work import CalibrationData

    if is_torch_module(model):
        raise InputError("export the module first; or give a function that builds modules")
    if callable(model) and not hasattr(model, "model"):
        _check_of_files(
            select=select,
            depth=depth is not None,
            dims=dims,
            shapes=shapes,
            by=by != "module",
            repeats=repeats,
            new_tokens=new_tokens != _NEW_TOKENS,
            first=first != _FIRST,
            calibration=calibration is not None,
        )
        check_whole("trials", trials, 1, MOST_RUNS)
        given = RunSettings(data, seed=seed, providers=providers, runs=runs)
        given.check_seed()
        given.check_timed_runs(1)
        given.check_providers()
        return search_architectures(
            model,
            space,
            objectives,
            metric,
            given.with_one_run("a search over architectures"),
            dynamo=dynamo,
            trials=trials,
            sampler=sampler,
            storage=storage,
            study=study,
            grace=grace,
        )
    if not dynamo:
        raise InputError("dynamo is for the search by a function; leave it out with a file")
    # The steps in their order: arguments, data, study, single modules, plans. Processes that share a
    # study repeat all of them, and find the results of the others.
    settings = RunSettings(data, dims, shapes, seed, providers=providers, runs=runs)
    wanted = _check_objectives(objectives, metric)
    check_sampler(sampler, {})
    check_whole("trials", trials, 1, MOST_RUNS)
    settings.check_timed_runs(1)
    if "latency" not in wanted:
        settings = replace(settings, runs=0)
    check_repeats(repeats)
    check_whole("new_tokens", new_tokens, 1, MOST_RUNS)
    tagged = read_flat(model)
    auto = AutoPrecision(tagged, settings)
    choices = read_space(tagged, space, select, depth, auto, by)
    check_sampler(sampler, choices.variables)
    if any(choice.is_quantized for choice in choices.choices.values()):
        tagged.require_exact_tags()
    samples = CalibrationData.of(settings, tagged.model, passes=2)
    settings.check_providers()
    prompts = None
    calibrating = samples
    if not {*OF_DECODERS}.isdisjoint(wanted):
        prompts = _prompts(tagged, samples, new_tokens, "time" in wanted)
        calibrating = replace(samples, given=list(map(prompts.decoder.first_feed, prompts.ids)))
    measurer = Measurer(
        tagged,
        calibrating,
        metric,
        calibration=calibration,
        prompts=prompts,
        counts_moves="bits" in wanted,
    )
    shared = SharedStudy(
        storage,
        study,
        ["maximize" if name in LARGER_IS_BETTER else "minimize" for name in wanted],
        grace=grace,
        facts={
            "model and data": _digest(measurer, wanted),
            "objectives": list(wanted),
            "choices": choices.written,
        },
    )
    measurer.finished = shared.runs
    work = SearchWork(measurer, shared, wanted, choices)
    work.measure_alone()
    fronts = work.fronts()
    shared.choose_from(work.space.variables, sampler, seed)
    shared.enqueue(work.first_plans(fronts, min(first, trials)))
    predicted = next(iter(fronts.values()))

    def result(measured: tuple[Trial, ...], *, stopped: bool = False) -> Search:
        notes = list(auto.notes)
        if samples.random:
            notes.append(RANDOM_NOTE if prompts is None else RANDOM_PROMPTS)
        notes += [*measurer.remarks, *work.space.problems]
        notes += [*_dense(choices, wanted), *shared.problems]
        if not stopped:
            notes += shared.why_fewer(trials)
        return Search(
            wanted,
            measured,
            shared.failed,
            work.space.variables,
            predicted=tuple((size, error) for size, error, _ in predicted.points),
            exact=predicted.exact,
            notes=tuple(notes),
            tags=tagged.tag_facts,
            prompts=tuple(prompts.feeds) if prompts and samples.random else (),
        )

    try:
        with report_counts("trials", trials) as count:
            _measure_plans(
                work, shared, min(first, trials), trials, lambda done: count(min(done, trials))
            )
        finished = result(work.results(fronts.values()))
        return work.repeated(finished, repeats) if repeats else finished
    except BaseException as error:
        if not stems_from_interrupt(error):
            raise
        raise SearchInterrupted(result(work.finished(fronts.values()), stopped=True)) from error


def _check_of_files(**given: Any) -> None:
    """Raise an `InputError` for an argument of a search on a file that has a value."""
    for name, value in given.items():
        if value:
            raise InputError(f"{name} is for the search on a file; leave it out with a function")


def _digest(measurer: Measurer, objectives: Sequence[str]) -> str:
    """A digest of the model, the data, and the settings of times and tokens, for a study."""
    settings: list[Any] = [measurer.settings.runs]
    if measurer.prompts is not None:
        settings.append(measurer.prompts.new_tokens)
    if "latency" in objectives or "time" in objectives:
        # In earlier versions, timed runs did not alternate with the original.
        settings.append("in turn")
    return digest_of(measurer.tagged.model, measurer.feeds, tuple(settings))


def _prompts(tagged: TaggedModel, samples: Samples, new_tokens: int, timed: bool) -> Prompts:
    """The prompts of a decoder, random without data; an `InputError` if the model is no decoder."""
    decoder = Decoder.of(tagged.model)
    if samples.random:
        first = samples.settings.seed
        seeds = range(first, first + _RANDOM_PROMPTS)
        with temporary_folder() as folder:
            session = Session(
                RunnableModel.of(tagged.model, "the decoder", folder), samples.settings
            )
            ids = [decoder.random_prompt(session, seed) for seed in seeds]
    else:
        ids = [next(iter(run.values())) for run in replace(samples, inputs=decoder.of_prompts)]
    return Prompts(decoder, ids, new_tokens, timed)


def _measure_plans(
    work: SearchWork, shared: SharedStudy, first: int, trials: int, report: Callable[[int], None]
) -> None:
    """Measure the enqueued plans, plans next to the front, and plans of the sampler.

    ``work`` measures all enqueued plans, and asks the sampler for more only until a number of
    trials is reached. With ``first``, the number of plans that are enqueued at the start, it
    measures enqueued plans alone.
    """
    shared.work(work.measured, first, report)
    refined_trials = round(_BEFORE_SAMPLER * trials)
    tried: list[Decision] = []
    while (missing := refined_trials - len(shared.complete())) > 0:
        # A plan that was tried is not complete if it failed, or runs in another process.
        refined = work.refined(min(_REFINED_AT_ONCE, missing))
        plans = [plan for plan in refined if plan not in tried]
        if not plans:
            break
        tried += plans
        shared.enqueue(plans)
        shared.work(work.measured, first, report)
    shared.work(work.measured, trials, report)


def _dense(space: SearchSpace, objectives: Sequence[str]) -> list[str]:
    """A note on sparsities whose zeros improve none of the objectives; empty without them."""
    if "nonzeros" in objectives:
        return []
    zeros: list[str] = []
    for name, choice in space.choices.items():
        if choice.sparsity is not None and choice.sparsity.is_elementwise:
            zeros.append(name)
    if not zeros:
        return []
    return [
        f"{', '.join(zeros)}: zeros take as many bytes as other numbers; the objective nonzeros counts them"
    ]


def _check_objectives(
    objectives: Sequence[str] | None, metric: Metric | ModuleMetric | None
) -> tuple[str, ...]:
    if objectives is None:
        objectives = ("error", "size")
    wanted = (objectives,) if isinstance(objectives, str) else tuple(objectives)
    unknown = [name for name in wanted if name not in OBJECTIVES]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        raise InputError(
            f"objectives are some of {', '.join(OBJECTIVES)}, not {', '.join(map(str, wanted)) or 'none'}"
        )
    if "latency" in wanted and not {*OF_DECODERS}.isdisjoint(wanted):
        raise InputError(
            "with tokens or time, a decoder is run in its loop, whose time is 'time'; leave out latency"
        )
    if ("metric" in wanted) != (metric is not None):
        raise InputError(
            "the objective 'metric' and the function metric go together; give both, or neither"
        )
    return wanted
