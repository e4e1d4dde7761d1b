"""``search``: the precisions of modules that give the best trade-offs, measured."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from htp_export.compress.metrics import Metric
from htp_export.compress.quantization.calibration_data import Data, samples_of
from htp_export.compress.quantization.precisions import PRECISIONS, Method, Precision, precision_of
from htp_export.compress.trade_offs.decisions import check_apart, deciding_modules
from htp_export.compress.trade_offs.finished_runs import digest_of
from htp_export.compress.trade_offs.fronts import AdditiveFront, Choice, additive_front, spread_over
from htp_export.compress.trade_offs.measuring import Measurement, Measurer
from htp_export.compress.trade_offs.search_results import LARGER_IS_BETTER, OBJECTIVES, Search, Trial
from htp_export.compress.trade_offs.sensitivities import RANDOM_NOTE, alone
from htp_export.compress.trade_offs.studies import SAMPLERS, Heartbeat, SharedStudy
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.inlining import read_flat
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.process.progress import counted, report_counts
from htp_export.runtime.sessions import SessionSettings

__all__ = ["search"]

Space = Mapping[str, Sequence[Any]] | Sequence[Any]
_TIMED_RUNS = 20


@names_model_faults("model")
def search(
    model: ModelSource,
    space: Space,
    objectives: Sequence[str] = ("error", "size"),
    data: Data | None = None,
    *,
    select: str | Sequence[str] | None = None,
    depth: int | None = None,
    trials: int = 50,
    sampler: str = "tpe",
    seed: int = 0,
    storage: Any = None,
    study: str = "htp_export",
    metric: Metric | None = None,
    runs: int = _TIMED_RUNS,
    first: int = 12,
    calibration: Data | None = None,
    dims: Mapping[str, int] | None = None,
    heartbeat: Heartbeat = Heartbeat(),  # noqa: B008 - it is frozen
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> Search:
    """Search for the precision of each module: the plans with the best trade-offs between objectives.

    1. Every module is quantized alone, as by ``sensitivity``.
    2. As if errors and sizes added up, the Pareto front is computed exactly; ``first`` plans of it are measured, and
       those in which all modules have the same precision.
    3. Optuna goes on from there, up to ``trials``.

    Several processes, on one or more machines, with the same ``storage`` and ``study`` work on one search; each returns
    when all trials are finished. A trial whose process died is taken up by another one.

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed. No model is written.
        space: Precisions that every module may have; or selector → precisions, where later selectors win. Of modules
            inside each other that a selector names, the innermost count. ``"fp32"`` leaves a module as it is.
        objectives: One or more of ``error`` (of the outputs), ``size`` (of all tensors), ``latency``, ``metric``.
        data: Inputs, as for ``sensitivity``.
        select: For precisions alone: the modules, as for ``sensitivity``.
        depth: For precisions alone: the level of the modules, as for ``sensitivity``.
        trials: Number of measured plans in the study, those of step 2 included.
        sampler: ``tpe``, ``nsga2``, ``random`` or ``grid``.
        seed: Seed of the sampler, and of random inputs.
        storage: Any storage of Optuna: a database URL, ``grpc://host:port``, the path of a journal file, or a storage.
            None keeps the study in memory.
        study: Its name in the storage.
        metric: The number behind the objective ``metric``: called with the outputs, name → array, for each of the
            inputs; larger is better.
        runs: Runs that are timed for the objective ``latency``.
        first: Plans of the computed front that are measured first.
        calibration: Inputs for calibration; None for ``data``.
        dims: For random inputs: name of an open dimension → size.
        heartbeat: How often processes show that they are alive, and when one is taken to be dead.
        providers: ONNX Runtime's execution providers, in order of preference.

    Returns:
        ``.trials`` and ``.pareto``, each with ``.plan`` and ``.values``; a plan is one for ``quantize``.

    Raises:
        InputError: An argument cannot be used, Optuna is not installed, or the study is one of another search.
        SelectorError: A selector cannot be read or matches no module.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 64),), verbose=False)
        >>> data = {"input": torch.randn(2, 64)}
        >>> found = htp_export.search(program, ["int4", "fp32"], ["size"], data, trials=4)  # doctest: +SKIP
        >>> found.pareto[0].plan  # doctest: +SKIP
        {'0': 'int4', '2': 'int4'}
    """
    wanted = _check_objectives(objectives, metric)
    if sampler not in SAMPLERS:
        raise InputError(f"there is no sampler {sampler!r}; there are {', '.join(SAMPLERS)}")
    if trials < 1:
        raise InputError(f"there is nothing to search for in {trials} trials")
    tagged = read_flat(model)
    variables, precisions = _variables(tagged, space, select, depth)
    samples = samples_of(data, tagged.model, dims, seed, passes=2)
    settings = SessionSettings(tuple(providers))
    settings.check()
    timed = runs if "latency" in wanted else 0
    measurer = Measurer(tagged, samples, metric, timed, settings, None, calibration)
    shared = SharedStudy(
        storage,
        study,
        ["maximize" if name in LARGER_IS_BETTER else "minimize" for name in wanted],
        heartbeat=heartbeat,
        facts={
            "model and data": digest_of(tagged.model, measurer.feeds, (timed,)),
            "objectives": list(wanted),
            "precisions": {name: _plain(precision) for name, precision in precisions.items()},
        },
    )
    measurer.finished = shared
    work = _Work(measurer, shared, precisions, wanted, variables)
    problems = work.measure_alone()
    front = work.front()
    shared.choose_from(work.variables, sampler, seed)
    shared.enqueue(work.first_plans(front, min(first, trials)))
    with report_counts("trials", trials) as report:
        shared.work(work.measured, trials, report)
    return Search(
        wanted,
        work.results(front),
        work.failed,
        {path: tuple(choices) for path, choices in work.variables.items()},
        tuple((size, error) for size, error, _ in front.points),
        front.exact,
        (*([RANDOM_NOTE] if samples.random else []), *problems),
        tagged.tag_facts,
    )


def _check_objectives(objectives: Sequence[str], metric: Metric | None) -> tuple[str, ...]:
    wanted = (objectives,) if isinstance(objectives, str) else tuple(objectives)
    unknown = [name for name in wanted if name not in OBJECTIVES]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        raise InputError(f"objectives are some of {', '.join(OBJECTIVES)}, not {', '.join(map(str, wanted)) or 'none'}")
    if ("metric" in wanted) != (metric is not None):
        raise InputError("the objective 'metric' and the function metric go together; give both, or neither")
    return wanted


def _variables(
    tagged: TaggedModel, space: Space, select: str | Sequence[str] | None, depth: int | None
) -> tuple[dict[str, list[str]], dict[str, Precision]]:
    """Module path → names of the precisions that it may have; and these by name."""
    precisions: dict[str, Precision] = {}

    def named(values: Any) -> list[str]:
        listed = [values] if isinstance(values, str | Precision) else list(values)
        found = [precision_of(value) for value in listed]
        for precision in found:
            if precisions.setdefault(precision.name, precision) != precision:
                raise InputError(f"two precisions are named {precision.name!r}; give one of them another name")
        if not found:
            raise InputError(f"give precisions to choose from, of {', '.join(PRECISIONS)}")
        return list(dict.fromkeys(precision.name for precision in found))

    if not isinstance(space, Mapping):
        names = named(space)
        variables = dict.fromkeys(tags.innermost(deciding_modules(tagged, select, depth)), names)
    else:
        if select is not None or depth is not None:
            raise InputError("a space by selector says which modules; give no select or depth")
        if not space:
            raise InputError("the space is empty; give selectors and precisions")
        by_path = {
            path: names
            for selector, values in space.items()
            for names in [named(values)]
            for path in tags.innermost(deciding_modules(tagged, selector))
        }
        variables = {path: by_path[path] for path in tagged if path in by_path}
    check_apart(list(variables))
    return {path: list(names) for path, names in variables.items()}, precisions


def _plain(precision: Precision) -> Any:
    """A precision as plans write it: its name, or a mapping with what differs."""
    known = PRECISIONS.get(precision.name)
    if known == precision:
        return precision.name
    fields = {key: value for key, value in vars(precision).items() if key != "bits"}
    base = known or next(each for each in PRECISIONS.values() if each.method == precision.method)
    return {"precision": base.name, **{key: value for key, value in fields.items() if getattr(base, key) != value}}


@dataclass
class _Work:
    """What processes of a search do: measure modules alone, and plans."""

    measurer: Measurer
    study: SharedStudy
    precisions: Mapping[str, Precision]
    objectives: tuple[str, ...]
    variables: dict[str, list[str]]

    def measure_alone(self) -> list[str]:
        """Measure every module in every precision; take away those that it cannot have, and say which."""
        pairs = [(path, name) for path, names in self.variables.items() for name in names if not self._keeps(name)]
        problems = []
        self.measurer.original  # noqa: B018 - it is the first run
        for path, name in counted(random.sample(pairs, len(pairs)), "modules alone"):  # other processes do others
            try:
                self._alone(path, name)
            except InputError as error:
                problems.append(f"{path or '(root)'} in {name}: {error}")
                self.variables[path].remove(name)
        self.variables = {path: names or ["fp32"] for path, names in self.variables.items()}
        return sorted(problems)

    def _keeps(self, name: str) -> bool:
        return self._precision(name).method == Method.KEEP

    def _precision(self, name: str) -> Precision:
        return self.precisions[name] if name in self.precisions else PRECISIONS[name]

    def _alone(self, path: str, name: str) -> Measurement:
        if self._keeps(name):
            return self.measurer.original
        return self.measurer.measure(alone(path, self._precision(name)))

    def front(self) -> AdditiveFront:
        """The front of the problem in which errors and sizes, or times, add up."""
        by_time = "latency" in self.objectives and "size" not in self.objectives
        original = self.measurer.original

        def choice(path: str, name: str) -> Choice:
            measured = self._alone(path, name)
            if by_time:
                return Choice(name, (measured.latency_ms or 0.0) - (original.latency_ms or 0.0), measured.error)
            return Choice(name, measured.bytes - original.bytes, measured.error)

        found = additive_front({path: [choice(path, name) for name in names] for path, names in self.variables.items()})
        start = (original.latency_ms or 0.0) if by_time else original.bytes
        return AdditiveFront(tuple((start + size, error, plan) for size, error, plan in found.points), found.exact)

    def first_plans(self, front: AdditiveFront, count: int) -> list[Mapping[str, str]]:
        """Plans that are measured first: those with one precision, and some of the front."""
        names = dict.fromkeys(itertools.chain.from_iterable(self.variables.values()))
        uniform = [dict.fromkeys(self.variables, name) for name in names]
        allowed = [plan for plan in uniform if all(plan[path] in each for path, each in self.variables.items())]
        chosen = spread_over([(size, error) for size, error, _ in front.points], count)
        return [*allowed, *(front.points[place][2] for place in chosen)]

    def measured(self, choices: Mapping[str, str]) -> tuple[Sequence[float], Mapping[str, Any]]:
        """The values of the objectives for a choice of precisions, and everything that was measured."""
        plan = {path or ".": self._precision(name) for path, name in choices.items() if not self._keeps(name)}
        found = self.measurer.measure(plan) if plan else self.measurer.original
        return [_values(found)[name] for name in self.objectives], {"measured": found.to_dict()}

    def results(self, front: AdditiveFront) -> tuple[Trial, ...]:
        """The finished trials of all processes, and the whole model in each precision."""
        of_front = [dict(plan) for _, _, plan in front.points]
        found = []
        for trial in self.study.complete():
            plan = {str(key): str(value) for key, value in trial.params.items()}
            origin = "front" if plan in of_front else "uniform" if len(set(plan.values())) == 1 else "sampler"
            values = dict(zip(self.objectives, trial.values, strict=True))
            found.append(Trial(trial.number, self._written(plan), values, origin, trial.user_attrs["measured"]))
        names = dict.fromkeys(itertools.chain.from_iterable(self.variables.values()))
        return (*found, *filter(None, map(self._whole, names)))

    def _written(self, plan: Mapping[str, str]) -> dict[str, Any]:
        return {path or ".": _plain(self._precision(name)) for path, name in plan.items()}

    def _whole(self, name: str) -> Trial | None:
        """The whole model in one precision, its nodes outside of modules with weights too."""
        try:
            found = self.measurer.original if self._keeps(name) else self.measurer.measure({".": self._precision(name)})
        except InputError:
            return None
        values = _values(found)
        chosen = {objective: values[objective] for objective in self.objectives}
        if any(value != value for value in chosen.values()):
            return None
        return Trial(None, {".": _plain(self._precision(name))}, chosen, "uniform", found.to_dict())

    @property
    def failed(self) -> int:
        """Trials that could not be measured."""
        return self.study.failed


def _values(found: Measurement) -> dict[str, float]:
    return {
        "error": found.error,
        "size": float(found.bytes),
        "latency": float("nan") if found.latency_ms is None else found.latency_ms,
        "metric": float("nan") if found.metric is None else found.metric,
    }
