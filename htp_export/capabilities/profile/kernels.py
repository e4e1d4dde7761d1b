"""What an engine runs and times, and the modules whose work it is: the same for every engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from htp_export.format.call_tree import CallTree, NodeCalls

__all__ = ["Kernel", "Timed", "modules_around_owners", "owned"]


@dataclass(frozen=True)
class Timed:
    """An entry of an engine's profile: a kernel, a layer, a node of its own graph.

    Attributes:
        name: Its name in the engine; in ONNX Runtime, for a node without a name, its operator and index.
        op_type: The engine's word for what it does: in ONNX Runtime its operator, after fusion.
        provider: The execution provider or device that ran it.
        ms: Its time in one run, without the kernels of its subgraphs; see ``Trace.typical`` for ONNX Runtime.
        launches: Mean number of launches in one run.
    """

    name: str
    op_type: str
    provider: str
    ms: float
    launches: float


@dataclass(frozen=True)
class Kernel(Timed):
    """An entry of an engine's profile, and the modules whose work it is.

    Attributes:
        owners: The paths of the modules whose work it does, in the order of execution; empty if none is known.
        around: For each owner, the modules whose regions contain its share.
    """

    owners: tuple[str, ...]
    around: tuple[frozenset[str], ...] = field(default=(), repr=False)


def owned(timed: Timed, works: Iterable[NodeCalls], calls: CallTree) -> Kernel:
    """Return an entry with its owners: those of the original nodes whose work it does, each once.

    Args:
        timed: The entry.
        works: Owners and calls of these nodes, in the order of execution; empty if none is known.
        calls: The calls of the model.
    """
    around = modules_around_owners(works, calls)
    known = {field.name: getattr(timed, field.name) for field in fields(Timed)}
    return Kernel(**known, owners=tuple(around), around=tuple(around.values()))


def modules_around_owners(works: Iterable[NodeCalls], calls: CallTree) -> dict[str, frozenset[str]]:
    """Return owner → the modules whose regions contain its share of the work, in the order of execution."""
    modules_by_owner: dict[str, frozenset[str]] = {}
    for work in works:
        for owner, modules in calls.around_owners(work).items():
            modules_by_owner[owner] = modules_by_owner.get(owner, frozenset()) | modules
    return modules_by_owner
