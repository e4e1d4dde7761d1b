"""The model of docs/tutorial.md: it looks at a part on a belt, reads the machine's sensors, and names what is wrong.

The weights are random, as nothing is trained here. Everything else is as in such a model: the sensors come in their own
units, and the model normalises them itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

# Kelvin, pascal, turns a minute, volt, metres, a share.
MEANS = torch.tensor([300.0, 101_325.0, 1500.0, 24.0, 0.002, 0.5])
DEVIATIONS = torch.tensor([5.0, 400.0, 30.0, 0.4, 0.0005, 0.1])


class Stage(nn.Module):
    """A picture at half its size, through a residual block."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(before, after, 3, stride=2, padding=1)
        self.conv = nn.Conv2d(after, after, 3, padding=1)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        """(batch, before, size, size) → (batch, after, size / 2, size / 2)."""
        picture = self.down(picture).relu()
        return picture + self.norm(self.conv(picture)).relu()


class Camera(nn.Module):
    """Features of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(3, 32), Stage(32, 48), Stage(48, 64)])
        self.out = nn.Linear(64, 32)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        """(batch, 3, 128, 128) → (batch, 32)."""
        for stage in self.stages:
            picture = stage(picture)
        return self.out(picture.mean((2, 3)))


class Sensors(nn.Module):
    """Features of the readings of six sensors, each in its own unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.norm.running_mean.copy_(MEANS)
        self.norm.running_var.copy_(DEVIATIONS**2)
        self.hidden, self.out = nn.Linear(6, 64), nn.Linear(64, 32)

    def forward(self, readings: torch.Tensor) -> torch.Tensor:
        """(batch, 6) → (batch, 32)."""
        return self.out(self.hidden(self.norm(readings)).relu())


class Inspector(nn.Module):
    """Scores of ten faults."""

    def __init__(self) -> None:
        super().__init__()
        self.camera, self.sensors, self.head = Camera(), Sensors(), nn.Linear(64, 10)

    def forward(self, picture: torch.Tensor, readings: torch.Tensor) -> torch.Tensor:
        """(batch, 3, 128, 128) and (batch, 6) → (batch, 10)."""
        return self.head(torch.cat([self.camera(picture), self.sensors(readings)], dim=1))


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures and readings."""
    return torch.rand(count, 3, 128, 128), MEANS + DEVIATIONS * torch.randn(count, 6)


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model, and one example."""
    torch.manual_seed(0)
    return Inspector().eval(), examples(1)


def data() -> Iterator[dict[str, np.ndarray]]:
    """Sixteen runs: a picture and the readings of each."""
    torch.manual_seed(1)
    for _ in range(16):
        picture, readings = examples(1)
        yield {"picture": picture.numpy(), "readings": readings.numpy()}
