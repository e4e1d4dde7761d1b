"""Memory that ONNX Runtime allocates for each module, beside the estimate of ``cost``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from htp_export.capabilities.profile.measurements import modules_around_owners
from htp_export.model.tagged import TaggedModel
from htp_export.reporting.columns import si
from htp_export.reporting.result import PlainData
from htp_export.runtime.inputs import Feed
from htp_export.runtime.sessions import RunnableModel
from htp_export.runtime.settings import RunSettings
from htp_export.runtime.traces import measured_memory

BLOCK_BYTES = 256
"""The granularity of ONNX Runtime's allocations, in bytes."""


@dataclass(frozen=True)
class KernelMemory:
    """A node of ONNX Runtime's graph, the bytes allocated for it, and its modules."""

    name: str
    op_type: str
    bytes: int
    owners: tuple[str, ...]


@dataclass(frozen=True)
class ModuleMemory:
    """Allocations of ONNX Runtime for a module, and the estimate of ``cost``, in bytes.

    A kernel of several modules counts once in the total of each of their ancestors; for ``self_…``
    it is divided.

    Attributes:
        allocated_bytes: Allocated for the kernels of the module and its descendants.
        self_allocated_bytes: Allocated for its own kernels.
        estimated_bytes: The outputs of its nodes in the file, as ``cost`` counts them, but once for
            nodes in a loop.
        self_estimated_bytes: The same for its own nodes.
        blocks: Number of its own kernels with an allocation: each is rounded up to a block.
    """

    allocated_bytes: int = 0
    self_allocated_bytes: int = 0
    estimated_bytes: int = 0
    self_estimated_bytes: int = 0
    blocks: int = 0

    @property
    def ratio(self) -> float | None:
        """``allocated_bytes`` divided by ``estimated_bytes``; None without an estimate."""
        if not self.estimated_bytes:
            return None
        return self.allocated_bytes / self.estimated_bytes

    @property
    def is_off(self) -> bool:
        """Whether the estimate for its own nodes differs by more than rounding to blocks."""
        more = self.self_allocated_bytes - self.self_estimated_bytes
        return more < 0 or more >= self.blocks * BLOCK_BYTES > 0


@dataclass(frozen=True)
class MeasuredMemory(PlainData):
    """Allocations of ONNX Runtime in one run.

    Attributes:
        kernels: Every node that ran.
        allocated_bytes: The sum of all allocations.
        unattributed_bytes: The part of nodes without a known module.
        estimated_bytes: The estimate of ``cost`` for the whole model.
        modules: Module path → its part.
    """

    derived = ("off",)

    kernels: tuple[KernelMemory, ...]
    allocated_bytes: int
    unattributed_bytes: int
    estimated_bytes: int
    modules: Mapping[str, ModuleMemory] = field(repr=False)

    @property
    def off(self) -> list[str]:
        """Modules whose own estimate is off by more than rounding, the worst first."""
        modules = self.modules

        def difference(path: str) -> int:
            return abs(modules[path].self_allocated_bytes - modules[path].self_estimated_bytes)

        paths = [path for path, module in modules.items() if module.is_off]
        return sorted(paths, key=lambda path: -difference(path))

    @property
    def notes(self) -> tuple[str, ...]:
        """The sum of the allocations, and the modules with wrong estimates, one line each."""
        whole = f"{si(self.allocated_bytes, 'B')} allocated for the outputs of kernels, {si(self.estimated_bytes, 'B')}"
        lines = [f"{whole} estimated by cost"]
        if self.unattributed_bytes:
            lines.append(
                f"{si(self.unattributed_bytes, 'B')} was allocated for kernels of no module"
            )
        if self.off:
            worst = "; ".join(map(self._compared, self.off[:3]))
            count = f"{len(self.off)} of {len(self.modules)} modules"
            lines.append(
                f"the estimate for a module's own nodes is off in {count}, most in {worst}"
            )
        return tuple(lines)

    def _compared(self, path: str) -> str:
        module = self.modules[path]
        allocated = si(module.self_allocated_bytes, "B")
        estimated = si(module.self_estimated_bytes, "B")
        return f"{path or '(root)'}: {allocated} allocated, {estimated} estimated"


def memory_by_module(
    model: RunnableModel,
    settings: RunSettings,
    feed: Feed,
    tagged: TaggedModel,
    temporary: Path,
) -> MeasuredMemory:
    """Run a model once, and sum up allocations by module; see ``measured_memory``."""
    from htp_export.alignment.carried_owners import optimized_works
    from htp_export.costs.costing import cost

    nodes, optimized = measured_memory(model, settings, feed, temporary)
    works = optimized_works(tagged, tagged.model if optimized is None else optimized)
    measured = _Sums()
    kernels = []
    for node in nodes:
        node_works = [
            works[optimized_node] for optimized_node in node.nodes if optimized_node in works
        ]
        around = modules_around_owners(node_works, tagged.calls)
        measured.add(node.bytes, tuple(around), frozenset().union(*around.values()))
        kernels.append(KernelMemory(node.name, node.op_type, node.bytes, tuple(around)))
    estimated = _Sums()
    for node_cost in cost(tagged, feed.arrays).nodes:
        once = node_cost.activation_bytes // max(node_cost.times, 1)
        estimated.add(once, node_cost.owners or ("",), node_cost.modules)
    modules = {}
    for path in tagged.paths:
        modules[path] = ModuleMemory(
            allocated_bytes=measured.total[path],
            self_allocated_bytes=measured.own[path],
            estimated_bytes=estimated.total[path],
            self_estimated_bytes=estimated.own[path],
            blocks=measured.counted[path],
        )
    return MeasuredMemory(
        kernels=tuple(kernels),
        allocated_bytes=sum(node.bytes for node in nodes),
        unattributed_bytes=sum(kernel.bytes for kernel in kernels if not kernel.owners),
        estimated_bytes=estimated.total[""],
        modules=modules,
    )


class _Sums:
    """Bytes by module: ``total`` with descendants, ``own``, and the number of ``counted`` nodes."""

    def __init__(self) -> None:
        self.total = Counter[str]()
        self.own = Counter[str]()
        self.counted = Counter[str]()

    def add(self, size: int, owners: Sequence[str], modules: Iterable[str]) -> None:
        from htp_export.costs.costing import divided

        for path in modules:
            self.total[path] += size
        for owner, share in divided(size, owners):
            self.own[owner] += share
            self.counted[owner] += size > 0
