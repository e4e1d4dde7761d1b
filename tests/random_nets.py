"""Random networks: what each module computes, calls and returns is drawn, and the same seed draws the same network.

Each thousand of seeds is a family: 0 sequences, 1000 images. All values in a network have the shape of its family, so
that whatever is drawn fits together.

Two things are left out, because no tags can tell them: functions that give back what they are given when they are
applied twice (``relu``), and tensors that are changed in place and read by a module outside afterwards. Values stay
small, and norms have a large epsilon: errors of rounding stay small, too.
"""

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests import random_images, random_sequences
from tests.nets import spread
from tests.truth import leaves

EPSILON = random_sequences.EPSILON
FAMILIES = (random_sequences, random_images)

RETURNS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda last, other: last,
    lambda last, other: last,
    lambda last, other: (other, last),
    lambda last, other: {"first": other, "second": last},
    lambda last, other: ((other,), [last]),
]


class Statement(NamedTuple):
    """One line of a module: a part that is called, or a function, with two of the values so far."""

    work: int | Callable[[Tensor, Tensor], Tensor]
    first: float  # which value, from 0 for the first to 1 for the last
    second: float
    takes_two: bool  # whether a part is given both


class Drawn(nn.Module):
    """A module whose parts, statements and results are drawn.

    Args:
        pick: What draws.
        family: What it draws from.
        depth: How many levels of drawn modules are inside.
        others: Layers that other modules hold, one of which it may hold, too; its own are added.
    """

    takes_two = True

    def __init__(self, pick: random.Random, family: ModuleType, depth: int, others: list[nn.Module]) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(pick.randint(1, 4)):
            if depth and pick.random() < 0.5:
                parts.append(Drawn(pick, family, depth - 1, others))
            else:
                shared = others and pick.random() < 0.1
                parts.append(pick.choice(others) if shared else pick.choice(family.LAYERS)())
                others.append(parts[-1])
        self.parts = nn.ModuleList(parts)
        calls = [*range(len(parts)), *pick.choices(range(len(parts)), k=pick.randint(0, 2))]
        work = [*calls[pick.choice((0, 0, 0, 1)) :], *pick.choices(family.FUNCTIONS, k=pick.randint(0, 4))]
        pick.shuffle(work)
        self.statements = [
            Statement(each, pick.choice((1, 1, 1, pick.random())), pick.random(), pick.random() < 0.5) for each in work
        ]
        self.kept, self.returns = pick.random(), pick.choice(RETURNS)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        values = [x] if y is None else [x, y]
        for work, *places, takes_two in self.statements:
            first, second = (values[min(int(place * len(values)), len(values) - 1)] for place in places)
            if callable(work):
                values.append(work(first, second))
                continue
            part = self.parts[work]
            two = takes_two and getattr(part, "takes_two", False)
            values += leaves(part(first, second) if two else part(first))
        return self.returns(values[-1], values[int(self.kept * len(values))])


class RandomNet(nn.Module):
    """A network of one or two drawn blocks between two layers; `spread`, for evaluation.

    Some take a second input, and give what goes into the last layer, too.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.family = seed, FAMILIES[seed // 1000]
        pick, others, depth = random.Random(seed), list[nn.Module](), 1 + (seed % 4 == 3)
        torch.manual_seed(seed)
        self.embed = pick.choice(self.family.LAYERS)()
        self.blocks = nn.ModuleList(Drawn(pick, self.family, depth, others) for _ in range(pick.randint(1, 2)))
        self.head = pick.choice(self.family.HEADS)()
        spread(self, seed).eval()
        for module in self.modules():
            if hasattr(module, "eps"):
                module.eps = EPSILON

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = torch.stack(leaves(self.embed(x))).sum(0) * 1.5
        for block in self.blocks:
            x = x + torch.stack(leaves(block(x) if y is None else block(x, y * 0.5))).sum(0).tanh()
        return self.head(x) if y is None else {"head": self.head(x), "states": [x]}

    def inputs(self, sizes: tuple[int, ...] = ()) -> dict[str, Tensor]:
        """Its inputs, by keyword, of the sizes of its family or of others."""
        generator = torch.Generator().manual_seed(self.seed)
        names = "xy" if self.seed % 5 > 2 else "x"
        return {name: torch.randn(sizes or self.family.SHAPE, generator=generator) for name in names}

    def export_options(self, exporter: str) -> dict[str, Any]:
        """How it is exported: every other one with open sizes, which dynamo does not know of recurrent layers.

        Every third one is not optimised under dynamo.
        """
        names, dynamo = [*self.inputs()], exporter == "dynamo"
        options = {"optimize": False} if dynamo and self.seed % 3 == 2 else {}
        is_recurrent = any(isinstance(each, nn.RNNBase) for each in self.modules())
        if self.seed % 2 == 0 or (dynamo and is_recurrent):
            return options
        if dynamo:
            return {**options, "dynamic_shapes": dict.fromkeys(names, self.family.SIZES)}
        return {"input_names": names, "dynamic_axes": dict.fromkeys(names, self.family.OPEN)}
