"""Small models that do not export to ONNX, each for another reason, and where torch stops.

They are in no registry of nets: those export.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.nets import Holding


def line_of(code: Any, text: str) -> int:
    """The line of this file where a class or function has some text."""
    lines, first = inspect.getsourcelines(code)
    return first + next(place for place, line in enumerate(lines) if text in line)


def spread(module: nn.Module) -> nn.Module:
    """Give a module random parameters that are far apart."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return module.eval()


class Block(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc(x).relu()
        return result


class Orthogonal(Holding, block=Block()):
    """An operator of torch that ONNX has no translation of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(self.block(x))[0]


class WithOrthogonal(Holding, orthogonal=Orthogonal(), head=nn.Linear(4, 3)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.orthogonal(x))
        return result


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x)[0] * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class WithHead(nn.Module):
    """A block and a head, between which the nets below do what cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 3)


class WithFunction(WithHead):
    """A custom ``autograd.Function``, with an operator in it that ONNX has no translation of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(Doubled.apply(self.block(x)))
        return result


class Prints(WithHead):
    """``print`` and NumPy in ``forward``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.block(x)
        print("shape", h.shape)
        scale = np.abs(h.detach().numpy()).max()
        result: torch.Tensor = self.head(h * float(scale))
        return result


class Watched(
    Holding, block=Block(), norm=nn.Sequential(nn.LayerNorm(4), nn.Dropout()), head=nn.Linear(4, 3)
):
    """The bytes of a tensor are printed, and nothing else is done with them."""

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        h = self.norm(self.block(x) * scale)
        print("bytes", h.detach().numpy().tobytes())
        result: torch.Tensor = self.head(h)
        return result


class Deceiving(WithHead):
    """What ``torch.fx`` traces of it is another branch than the one that runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.head(self.block(x))
        print("bytes", h.detach().numpy().tobytes())
        return h * 2 if isinstance(h, torch.Tensor) else h


class Choosing(Holding, one=Block(), other=Block()):
    """``.item()`` decides a branch."""

    def forward(this, x: torch.Tensor) -> torch.Tensor:  # noqa: N805 - the name is free
        if x.sum().item() > 0:
            x = this.one(x)
        return this.other(x) * 2


class WithChoosing(Holding, first=Block(), choosing=Choosing(), head=nn.Linear(4, 3)):
    """Control flow that depends on data, in a module of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.choosing(self.first(x)))
        return result


class Repeating(WithHead):
    """A Python loop over a tensor, as often as its values say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in x:
            if row.sum() > 0:
                x = self.block(x)
        result: torch.Tensor = self.head(x)
        return result


def keep_best(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Non-maximum suppression, as it is written in Python."""
    kept, order = [], scores.argsort(descending=True)
    while order.numel() > 0:
        best, rest = order[0], order[1:]
        kept.append(best)
        low = torch.maximum(boxes[best, :2], boxes[rest, :2])
        high = torch.minimum(boxes[best, 2:], boxes[rest, 2:])
        common = (high - low).clamp(min=0).prod(-1)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
        order = rest[common / (areas[best] + areas[rest] - common) <= threshold]
    return torch.stack(kept)


class Detector(nn.Module):
    """A detector of the kind of YOLO: convolutions, a head for boxes and scores, and the best of overlapping boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1),
            nn.BatchNorm2d(4),
            nn.SiLU(),
            nn.Conv2d(4, 4, 3, 2, 1),
            nn.SiLU(),
        )
        self.head = nn.Conv2d(4, 5, 1)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.head(self.backbone(image)).flatten(2).transpose(1, 2)[0].sigmoid()
        centres, sizes, scores = found[:, :2] * 16, found[:, 2:4] * 8, found[:, 4]
        boxes = torch.cat([centres - sizes, centres + sizes], 1)
        kept = keep_best(boxes, scores, 0.5)
        return boxes[kept], scores[kept]


class Counting(Holding, fc=nn.Linear(4, 4)):
    """Goes round a loop as often as the values of a tensor say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x.exp()).tanh()
        count = y.abs().sum().long().tolist()
        for each in [count]:
            for place in range(each % 3 + 1):
                y = y + place
        return y.sigmoid()


class SearchingDetector(Detector):
    """Its loop needs values in each round, so that Dynamo makes no graph of ``forward``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, *edges = self.head(self.backbone(x))[0].flatten(1)
        boxes, order = torch.stack(edges, -1).exp(), scores.argsort(descending=True)
        kept: list[int] = []
        while order.numel() and len(kept) < 8:
            best = int(order[0])
            kept.append(best)
            order = order[(boxes[order] - boxes[best]).abs().sum(-1) > 1]
        return boxes[kept]
