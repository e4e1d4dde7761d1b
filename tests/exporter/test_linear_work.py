"""The work of an export, and of reading its file, grows with the modules and no faster: lines that run are counted."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.exporter import write_tags
from htp_export.model import boundaries
from tests.exporting import quick
from tests.nets import composed, x

_WATCHED = tuple(str(Path(str(module.__file__)).parent) for module in (write_tags, boundaries))
_SIZES = 20, 80
# times as many lines as the modules, of a function; quadratic ones run four times as many
_MOST = 1.5


def lines_run(work: Callable[[], object]) -> Counter[CodeType]:
    """Function of the exporter or the model → how many of its lines ran; those of comprehensions once an element."""
    counts: Counter[CodeType] = Counter()

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        counts[frame.f_code] += event == "line"
        return in_function

    def called(frame: FrameType, *_: Any) -> Any:
        return in_function if frame.f_code.co_filename.startswith(_WATCHED) else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        work()
    finally:
        sys.settrace(before)
    return counts


def pairs(size: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(size)))


def dropouts(size: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Dropout()) for _ in range(size))
    )


def norms(size: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(size))
    )


def one_many_times(size: int) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(size):
            x = self.drop(self.fc(x))
        return x

    return composed(forward, fc=nn.Linear(4, 4), drop=nn.Dropout())


def fused_with_the_root(size: int) -> nn.Module:
    """Each module ends with a transposition that torch joins with one of the root."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x).permute(1, 2, 0)
        return x

    turned = (
        composed(lambda self, x: self.fc(x).permute(1, 0, 2), fc=nn.Linear(4, 4))
        for _ in range(size)
    )
    return composed(forward, parts=nn.ModuleList(turned))


def with_dead_parts(size: int) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.dead(x)
        return self.fc(x)  # type: ignore[no-any-return]

    return nn.Sequential(
        *(composed(forward, fc=nn.Linear(4, 4), dead=nn.Linear(4, 4)) for _ in range(size))
    )


def side_by_side(size: int) -> nn.Module:
    return composed(
        lambda self, x: sum(part(x) for part in self.parts),
        parts=nn.ModuleList(nn.Linear(4, 4) for _ in range(size)),
    )


def scripted(size: int) -> nn.Module:
    return torch.jit.script(pairs(size).eval())  # type: ignore[no-any-return]


_NETS = (pairs, dropouts, norms, one_many_times, fused_with_the_root, with_dead_parts, side_by_side)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "exporter"),
    quick(
        [(scripted, "torchscript"), *itertools.product(_NETS, ("torchscript", "dynamo"))],
        *((make, "torchscript") for make in (dropouts, fused_with_the_root)),
    ),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_no_function_looks_through_everything_for_every_module(make, exporter, tmp_path):
    file = tmp_path / "model.onnx"

    def read() -> None:
        tagged = htp_export.load(file)
        for path in tagged:
            assert tagged[path].inputs or tagged[path].outputs or not tagged[path].nodes
        htp_export.contamination(tagged)

    counts: list[Counter[CodeType]] = []
    for size in _SIZES:
        model = make(size).eval()
        # what torch keeps
        htp_export.export(model, (x(4, 4, 4),), file, dynamo=exporter == "dynamo", verbose=False)

        def export(model: nn.Module = model) -> None:
            htp_export.export(
                model, (x(4, 4, 4),), file, dynamo=exporter == "dynamo", verbose=False
            )

        counts.append(lines_run(export) + lines_run(read))
    small, large = counts
    assert sum(large.values()) > 100 * _SIZES[1]
    growth = _SIZES[1] / _SIZES[0]
    grown = [
        code
        for code, lines in large.items()
        if lines > _MOST * growth * max(small[code], _SIZES[0])
    ]
    listed = [
        f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_qualname}" for code in grown
    ]
    assert listed == []
