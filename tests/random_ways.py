"""What random networks are made of that write one thing in many ways; tensors of batch, length and width."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.random_sequences import DIMS, FUNCTIONS, HEADS, OPEN, SHAPE, inputs  # noqa: F401 # these are the same


@dataclass
class Parts:
    made: Tensor
    rest: tuple[Tensor, ...]


class Pair(NamedTuple):
    made: Tensor
    scale: Tensor


class GivesParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Parts:
        return Parts(self.layer(x), (x.tanh(),))


class TakesParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, parts: Parts, *, pair: Pair) -> dict[str, Any]:
        return {
            "made": self.layer(parts.made) * pair.scale,
            "deep": {"rest": [*parts.rest, None, pair.made]},
        }


class Contained(nn.Module):
    """Modules that pass containers to each other: a dataclass, a named tuple, and a dictionary in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.gives, self.reads = GivesParts(), TakesParts()

    def forward(self, x: Tensor) -> Tensor:
        made = self.reads(self.gives(x), pair=Pair(x.exp().clamp(max=2), torch.sigmoid(x)))
        return made["made"] + made["deep"]["rest"][0] * made["deep"]["rest"][2]


class OddKeys(nn.Module):
    """Modules under keys that are no words, two of them called in another order."""

    def __init__(self) -> None:
        super().__init__()
        keys = ("10", "a-b", "with space", "forward_", "ä", "x/y:z")
        self.layers = nn.ModuleDict({key: nn.Linear(8, 8) for key in keys})
        self.add_module("0", nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for key in ("x/y:z", "10", "with space", "ä"):
            x = self.layers[key](x) * 0.7
        return self.get_submodule("0")(x)


class Slices(nn.Module):
    """A sequence of modules of which slices are called, some layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[:2](x)
        for layer in self.layers[2:4]:
            x = x + layer(x)
        return self.layers[-1](x) + self.layers[0](x)


class Reads(nn.Module):
    """Computes with a parameter and a buffer of another module, which also runs."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.held = [other]  # not registered here

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.held[0].weight.t()) + self.held[0].table[: x.shape[1]]


class Tables(nn.Module):
    """A layer with a buffer, one that reads both, and a buffer of its own that is the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.register_buffer("table", torch.zeros(6, 8))
        self.reads = Reads(self.layer)
        self.register_buffer("same", self.layer.table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(x) * self.layer(x).sigmoid() + self.same[-1]


class InPlace(nn.Module):
    """Changes what it computed in place, in every way; none of these is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(8, 16), nn.ELU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        self.act(made)
        made[..., :8].mul_(made[..., 8:].sigmoid())
        made = made.view(*x.shape[:2], 2, 8).sum(2)
        made[..., -1] += 1
        return made.sub_(x)


class Partly(nn.Module):
    """Calls its layers by functions: partial, bound methods, lambdas, and one that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.act = functools.partial(functional.gelu, approximate="tanh")
        self.steps = (self.layer.forward, lambda x: self.norm(x) * 0.5, self.layer, self.act)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Hooked(nn.Module):
    """A layer with hooks of the user, one of which changes the result, and one the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.layer.register_forward_hook(lambda module, args, result: result.tanh() + args[0])
        self.register_forward_hook(lambda module, args, result: result * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 0.5)


class Shapes(nn.Module):
    """Calls one layer with tensors of several ranks and lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        whole, first, one = self.layer(x), self.layer(x[:, 0]), self.layer(x.mean((0, 1)))
        return whole + first[:, None] * self.layer(x[:, 1:3, None]).sum((1, 2))[:, None] + one


class Halves(nn.Module):
    """Calls one layer on each half."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.split(x.shape[1] // 2, 1)
        return torch.cat((self.layer(first) * 0.5, second + self.layer(second)), 1)


class Static(nn.Module):
    """Static and class methods, a property, and a layer that another method calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    @property
    def last(self) -> nn.Module:
        return self.layers[-1]

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        return torch.cat((x[..., 4:], -x[..., :4]), -1)

    def encode(self, x: Tensor) -> Tensor:
        return self.layers[0](x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.turned(self.last(self.encode(x))) * getattr(self, "encode")(x * 0.5)  # noqa: B009 - a way to write


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(8, 8),
    lambda: nn.Sequential(
        nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.Identity()), nn.Dropout()
    ),
    Contained,
    Hooked,
    InPlace,
    OddKeys,
    Partly,
    Halves,
    Shapes,
    Slices,
    Static,
    Tables,
]
EMBEDS = LAYERS
