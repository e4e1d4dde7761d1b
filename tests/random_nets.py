"""Random networks: what each module computes, calls and returns is drawn, and the same seed draws the same network.

Each thousand of seeds is a family: sequences, images, tokens, ways to write. All values in a network have the shape of
its family, so that whatever is drawn fits together.

Two things are left out, because no tags can tell them: functions that give back what they are given when they are
applied twice (``relu``), and tensors that are changed in place and read by a module outside afterwards. Values stay
small, and norms have a large epsilon: errors of rounding stay small, too.
"""

import itertools
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests import random_images, random_sequences, random_tokens, random_ways
from tests.nets import spread
from tests.random_sequences import EPSILON
from tests.truth import leaves, named_leaves

FAMILIES = (random_sequences, random_images, random_tokens, random_ways)

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


def values_and_others(made: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The values in a result, and the other tensors in it: integers, keys and values, what was pooled."""
    found = leaves(made)
    fits = [each.ndim == x.ndim and each.dtype == x.dtype for each in found]
    return [*itertools.compress(found, fits)], [
        each for each, fit in zip(found, fits, strict=True) if not fit
    ]


class Drawn(nn.Module):
    """A module whose parts, statements and results are drawn.

    A part is given what is in its ``takes`` of the keywords that the module is given.

    Args:
        pick: What draws.
        family: What it draws from.
        depth: How many levels of drawn modules are inside.
        others: Layers that other modules hold, one of which it may hold, too; its own are added.
    """

    takes_two = True
    takes = ("mask", "past")

    def __init__(
        self, pick: random.Random, family: ModuleType, depth: int, others: list[nn.Module]
    ) -> None:
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
        work = [
            *calls[pick.choice((0, 0, 0, 1)) :],
            *pick.choices(family.FUNCTIONS, k=pick.randint(0, 4)),
        ]
        pick.shuffle(work)
        self.statements = [
            Statement(
                each, pick.choice((1, 1, 1, pick.random())), pick.random(), pick.random() < 0.5
            )
            for each in work
        ]
        self.kept, self.returns = pick.random(), pick.choice(RETURNS)

    def forward(self, x: Tensor, y: Tensor | None = None, **given: Any) -> Any:
        values, others = [x] if y is None else [x, y], list[Tensor]()
        for work, *places, takes_two in self.statements:
            first, second = (
                values[min(int(place * len(values)), len(values) - 1)] for place in places
            )
            if callable(work):
                values.append(work(first, second))
                continue
            part = self.parts[work]
            pair = (first, second) if takes_two and getattr(part, "takes_two", False) else (first,)
            keywords = {name: given[name] for name in getattr(part, "takes", ()) if name in given}
            made, more = values_and_others(part(*pair, **keywords), x)
            values += made
            others += more
        result = self.returns(values[-1], values[int(self.kept * len(values))])
        return (result, others) if others else result


class RandomNet(nn.Module):
    """A network of one or two drawn blocks between two layers; `spread`, for evaluation.

    Some take a second input, and give what goes into the last layer, too.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.family = seed, FAMILIES[seed // 1000]
        pick, others, depth = (
            random.Random(seed),
            list[nn.Module](),
            1 + (seed % 4 == 3 and seed < 1000),
        )
        torch.manual_seed(seed)
        self.embed = pick.choice(self.family.EMBEDS)()
        self.blocks = nn.ModuleList(
            Drawn(pick, self.family, depth, others) for _ in range(pick.randint(1, 2))
        )
        self.head = pick.choice(self.family.HEADS)(self.embed)
        spread(self, seed).eval()
        for module in self.modules():
            if hasattr(module, "eps"):
                module.eps = EPSILON

    def forward(
        self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None, past: Any = None
    ) -> Any:
        keywords = {"y": None if y is None else y * 0.5, "mask": mask, "past": past}
        given = {name: each for name, each in keywords.items() if each is not None}
        x, others = torch.stack(leaves(self.embed(x))).sum(0) * 1.5, list[Tensor]()
        for block in self.blocks:
            made, more = values_and_others(block(x, **given), x)
            x = x + torch.stack(made).sum(0).tanh()
            others += more
        if not given and not others:
            return self.head(x)
        return {"head": self.head(x), "states": [x], **({"others": others} if others else {})}

    def inputs(self, sizes: tuple[int, ...] = ()) -> dict[str, Any]:
        """Its inputs, by keyword, of the sizes of its family or of others."""
        generator = torch.Generator().manual_seed(self.seed)
        inputs: dict[str, Any] = self.family.inputs(
            self.seed, sizes or self.family.SHAPE, generator
        )
        return inputs

    def is_for(self, exporter: str) -> bool:
        """Whether the exporter can take it at all."""
        return exporter == "dynamo" or not any(
            hasattr(each, "dynamo_only") for each in self.modules()
        )

    def export_options(self, exporter: str) -> dict[str, Any]:
        """How it is exported: every other one with open sizes, which dynamo does not know of recurrent layers.

        Every third one is not optimised under dynamo.
        """
        inputs, dynamo = self.inputs(), exporter == "dynamo"
        options = {"optimize": False} if dynamo and self.seed % 3 == 2 else {}
        is_recurrent = any(isinstance(each, nn.RNNBase) for each in self.modules())
        if self.seed % 2 == 0 or (dynamo and is_recurrent):
            return options
        axes = {name: self.family.OPEN[name] for name in inputs}
        if not dynamo:
            names = {leaf: axes[leaf.split(".")[0]] for leaf, _ in named_leaves(inputs)}
            return {"input_names": [*names], "dynamic_axes": names}
        sizes = {
            name: {axis: self.family.DIMS[size] for axis, size in axes[name].items()}
            for name in inputs
        }
        shapes = {
            name: (sizes[name],) * len(each) if isinstance(each, tuple) else sizes[name]
            for name, each in inputs.items()
        }
        return {**options, "dynamic_shapes": shapes}
