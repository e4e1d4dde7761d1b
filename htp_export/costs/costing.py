"""``cost``: parameters, operations, memory and traffic of a model, by module and by node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import onnx_ir as ir

from htp_export.costs.columns import SUMMED
from htp_export.costs.execution import Body, Run, RunStep, run_by_shapes, walk
from htp_export.costs.memory import Timeline, moved_bytes
from htp_export.costs.moved_bits import MovedBits
from htp_export.costs.result import Cost, ModuleCost, NodeCost, Peak
from htp_export.costs.work import NOTHING, Formulas, Work, all_formulas, work_of
from htp_export.editing.flattening import read_flat
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import Contents, contents_of
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.runtime.data import Data
from htp_export.runtime.settings import RunSettings

_Sums: TypeAlias = defaultdict[str, Counter[str]]


@names_model_faults("model")
def cost(
    model: ModelSource,
    data: Data | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    formulas: Formulas | None = None,
) -> Cost:
    """Compute parameters, FLOPs, bytes and peak memory of every module and node.

    Nothing is run and no weight is loaded. FLOPs are two for each multiply-add of matrix products
    and convolutions; other operations are counted separately, and operators without a formula are
    listed. ``docs/cost.md`` has the formulas and the memory model.

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
            Without tags, the result contains the whole model and its nodes.
        data: The inputs of one run, as for `quantize`; some may be absent. Their shapes are used,
            and the values of a few integers.
        dims: Open dimension → size. The default is 1, and `assumed` lists the dimensions for which
            it was used.
        shapes: Input name → shape.
        formulas: ``(domain, operator)`` → a function that returns `htp_export.Work` for one run of
            a node. It adds an operator or replaces its formula.

    Returns:
        Costs by module path, in elements, operations and bytes.

    Raises:
        FileError: The file cannot be read.
        InputError: The arguments do not fit the model, the number of dimensions of an input is
            unknown, or a formula does not return `htp_export.Work`.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> report = cost(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> [(path, module.parameters, module.flops, module.other_flops) for path, module in report.modules.items()]
        [('', 15, 48, 12), ('0', 15, 48, 6), ('1', 0, 0, 6)]
        >>> report.peak.bytes, report.uncounted
        (56, {})
    """
    settings = RunSettings(data, dims, shapes)
    tagged = read_flat(model)
    run = run_by_shapes(tagged, settings.with_one_run("cost"))
    nodes = _nodes(run, all_formulas(formulas))
    timeline = Timeline(run)
    contents = contents_of(tagged)
    return Cost(
        modules=_modules(run, nodes, timeline, contents),
        nodes=tuple(nodes),
        uncounted=dict(Counter(node.op_type for node in nodes if not node.counted)),
        peak=_peak(run, timeline),
        shared=contents.shared,
        dims=dict(run.sizes),
        from_pytorch=contents.from_pytorch,
        limits=_limits(tagged, run, contents.from_pytorch),
        tags=tagged.tag_facts,
        assumed=run.notes,
    )


def _nodes(run: Run, formulas: Formulas) -> list[NodeCost]:
    works = {id(step): work_of(step, formulas) for step, _ in walk(run.steps)}
    moved = MovedBits(run)
    nodes: list[NodeCost] = []
    for step, times in _counted(run.steps, works):
        nodes.append(_node_cost(step, works[id(step)], times, moved.of(step)))
    return nodes


def node_flops(tagged: TaggedModel) -> dict[ir.Node, int]:
    """Node of the main graph → its FLOPs as in `cost`, with those of its subgraphs.

    Nodes without FLOPs are left out, and open dimensions are 1.
    """
    run = run_by_shapes(tagged)
    formulas = all_formulas()
    works = {id(step): work_of(step, formulas) for step, _ in walk(run.steps)}
    flops: Counter[ir.Node] = Counter()
    for step, times in _counted(run.steps, works):
        work = works[id(step)]
        if work is not None and work.macs:
            *_, holder = tagged.index.scopes(step.node)
            flops[holder] += 2 * work.macs * times
    return dict(flops)


def _node_cost(step: RunStep, work: Work | None, times: int, moved_bits: int) -> NodeCost:
    """The cost of ``times`` runs of a node."""
    macs, other = (0, 0) if work is None else (work.macs, work.other)
    activations = 0
    for tensor in step.outputs:
        if tensor.viewed is None and tensor.origin == "made":
            activations += tensor.bytes
    read, written = moved_bytes([step])
    return NodeCost(
        name=step.node.name or "",
        op_type=step.node.op_type,
        owners=step.owners,
        times=times,
        counted=work is not None,
        macs=macs * times,
        flops=2 * macs * times,
        other_flops=other * times,
        shapes=tuple(tensor.shape for tensor in step.outputs),
        activation_bytes=times * activations,
        moved_bits=times * moved_bits,
        traffic_bytes=times * (read + written),
        read_bytes=times * read,
        written_bytes=times * written,
        modules=step.modules if "" in step.modules else step.modules | {""},
    )


def _counted(
    steps: Sequence[RunStep], works: Mapping[int, Work | None], times: int = 1
) -> Iterator[tuple[RunStep, int]]:
    """Yield every step and its count, which is 0 in the cheaper branch of an ``If``."""
    for step in steps:
        yield step, times
        costliest = max(step.bodies, key=lambda body: _sum(body, works), default=None)
        for body in step.bodies:
            counts = step.node.op_type != "If" or body is costliest
            yield from _counted(body.steps, works, times * body.times if counts else 0)


def _sum(body: Body, works: Mapping[int, Work | None]) -> tuple[int, int]:
    """The multiply-adds and the other operations of one run of a subgraph."""
    macs = other = 0
    for step, times in _counted(body.steps, works):
        work = works[id(step)] or NOTHING
        macs += work.macs * times
        other += work.other * times
    return macs, other


def _modules(
    run: Run, nodes: Sequence[NodeCost], timeline: Timeline, contents: Contents
) -> dict[str, ModuleCost]:
    """Module path → its cost."""
    total, own_total, uncounted = _sums(nodes)
    peaks = _peaks(run, timeline)
    modules = {}
    for path, module in contents.modules.items():
        internal = timeline.internal.get(path, ())
        sums: dict[str, Any] = {name: total[path][name] for name in SUMMED}
        sums |= {f"self_{name}": own_total[path][name] for name in SUMMED}
        modules[path] = ModuleCost(
            **vars(module.facts),
            uncounted=dict(uncounted[path]),
            peak_bytes=peaks.get(path, 0),
            fused_traffic_bytes=total[path]["traffic_bytes"] - timeline.traffic_of(internal),
            fused_peak_bytes=timeline.peak(without=internal),
            **sums,
        )
    return modules


def _sums(nodes: Sequence[NodeCost]) -> tuple[_Sums, _Sums, _Sums]:
    """Module path → sums over its region; over itself; and uncounted nodes by operator."""
    total: _Sums = defaultdict(Counter)
    own_total: _Sums = defaultdict(Counter)
    uncounted: _Sums = defaultdict(Counter)
    # Many nodes have the same regions: they are summed once for each set of regions.
    region_sums: defaultdict[AbstractSet[str], Counter[str]] = defaultdict(Counter)
    for node in nodes:
        if not node.counted:
            for path in node.modules:
                uncounted[path][node.op_type] += 1
        for name in SUMMED:
            number = getattr(node, name)
            region_sums[node.modules][name] += number
            for owner, share in divided(number, node.owners or ("",)):
                own_total[owner][name] += share
    for modules, sums in region_sums.items():
        for path in modules:
            for name, number in sums.items():
                if number:
                    total[path][name] += number
    return total, own_total, uncounted


def divided(number: int, owners: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Divide a number among its owners, as equally as whole numbers allow."""
    for position, owner in enumerate(owners):
        yield owner, (number + len(owners) - 1 - position) // len(owners)


def _peaks(run: Run, timeline: Timeline) -> dict[str, int]:
    """Module path → the peak of live bytes while its region runs."""
    peaks: dict[str, int] = {}
    for step, live in zip(run.steps, timeline.live.tolist(), strict=True):
        for path in step.modules | {""}:
            peaks[path] = max(live, peaks.get(path, 0))
    return peaks


def _peak(run: Run, timeline: Timeline) -> Peak:
    """The first step with the most live bytes, and its tensors."""
    if not run.steps:
        return Peak(0, "", (), ())
    at = int(timeline.live.argmax())  # the first step that reaches the peak
    step = run.steps[at]
    alive = [life for life in timeline.lives if life.size and life.start <= at <= life.end]
    alive.sort(key=lambda life: -life.size)
    live = tuple((life.tensor.name, life.size) for life in alive)
    return Peak(
        bytes=timeline.peak(),
        node=step.node.name or step.node.op_type,
        modules=step.owners,
        live=live,
    )


def _limits(tagged: TaggedModel, run: Run, from_pytorch: bool) -> tuple[str, ...]:
    """Sentences on what the numbers do not include."""
    notes = []
    if tagged.source == "none":
        notes.append("only the whole is known")
    elif tagged.untagged:
        notes.append("nodes of no module count in the whole")
    if not from_pytorch:
        notes.append(
            "parameters are the weights that the file has: it does not say which PyTorch had"
        )
    unknown = 0
    for step, _ in walk(run.steps):
        unknown += sum(tensor.shape is None and bool(tensor.name) for tensor in step.outputs)
    if unknown:
        notes.append(
            f"{unknown} tensors have no known shape; they are missing from bytes and peaks ({run.unknown})"
        )
    return tuple(notes)
