"""Tiny modules that carry their own truth: one net for each trap that an exporter sets for module owners."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

EXPORTERS = ("dynamo", "torchscript")

Owners = tuple[str, ...]


@dataclass(frozen=True)
class Truth:
    """What is certain about a net, whichever exporter is used.

    Attributes:
        fates: Module path → fate.
        owners: Op type → owners of the nodes of that type, in the order of the graph.
        merged: Module path → the modules that a ``fused`` one was merged with.
    """

    fates: dict[str, str] = field(default_factory=dict)
    owners: dict[str, list[Owners]] = field(default_factory=dict)
    merged: dict[str, Owners] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Net(Truth):
    """One trap, and what holds with both exporters.

    Attributes:
        name: What the trap is.
        build: Makes the model, in eval mode, and its keyword inputs.
        dynamo: What holds besides under dynamo.
        torchscript: What holds besides under TorchScript.
        skip: Exporters that torch itself cannot use for it.
        dynamic: Keyword input → its dynamic dimensions, by name.
    """

    name: str
    build: Callable[[], tuple[nn.Module, dict[str, Any]]]
    dynamo: Truth = Truth()
    torchscript: Truth = Truth()
    skip: frozenset[str] = frozenset()
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)

    def facts(self, exporter: str) -> Truth:
        """What is certain with one exporter."""
        more: Truth = getattr(self, exporter)
        return Truth(
            {**self.fates, **more.fates},
            {**self.owners, **more.owners},
            {**self.merged, **more.merged},
        )

    def export_options(self, exporter: str) -> dict[str, Any]:
        """Arguments of the export that make the dynamic dimensions dynamic."""
        if not self.dynamic:
            return {}
        if exporter == "torchscript":
            return {"input_names": list(self.dynamic), "dynamic_axes": self.dynamic}
        dims = {
            name: dict.fromkeys(axes, torch.export.Dim.DYNAMIC)
            for name, axes in self.dynamic.items()
        }
        return {"dynamic_shapes": dims}


NETS: dict[str, Net] = {}


def spread(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and buffer of floats values of its own: equal ones are merged and hide faults."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator)
                tensor.copy_(
                    0.5 + noise if "var" in name or "scale" in name else 0.8 * (noise - 0.45)
                )
    return model


def ready(model: nn.Module) -> nn.Module:
    """The model in eval mode, with its parameters spread."""
    return spread(model).eval()


def x(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net(
    name: str,
    make: Callable[[], nn.Module] | None = None,
    inputs: Callable[[], dict[str, Any]] = lambda: {"x": x(2, 4)},
    *,
    equal: bool = False,
    skip: tuple[str, ...] = (),
    **facts: Any,
) -> Any:
    """Put one net into the registry: what ``make`` makes, or the class below.

    Its parameters are spread unless the trap is that they are equal.
    """

    def put(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def build() -> tuple[nn.Module, dict[str, Any]]:
            torch.manual_seed(0)
            model = make()
            return (model if equal else spread(model)).eval(), inputs()

        NETS[name] = Net(name=name, build=build, skip=frozenset(skip), **facts)
        return make

    return put(make) if make else put


def row() -> dict[str, Any]:
    """The input of a Sequential: two rows of four features."""
    return {"input": x(2, 4)}


def sequence() -> dict[str, Any]:
    return {"x": x(2, 3, 4)}


def computed(*paths: str) -> dict[str, str]:
    return dict.fromkeys(paths, "computed")


class Holding(nn.Module):
    """A module with the parts that its class names, each instance with copies of its own."""

    _parts: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **parts: Any) -> None:
        cls._parts = {**cls._parts, **parts}

    def __init__(self) -> None:
        super().__init__()
        for name, part in self._parts.items():
            setattr(self, name, copy.deepcopy(part))
        for module in self.modules():
            if hasattr(module, "reset_parameters"):  # as those of a new one are: drawn
                module.reset_parameters()


class Apply(nn.Module):
    """One function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def composed(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module of these parts, which computes ``forward(module, *inputs)``; made in the order in which they stand."""
    made: nn.Module = type("Composed", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


# --- the same module, or the same class, several times ---------------------------------------------------


@net(
    "siblings",
    fates=computed("", "first", "second"),
    owners={"Gemm": [("first",), ("second",)], "Tanh": [("",)], "Mul": [("",)]},
)
class Siblings(Holding, first=nn.Linear(4, 4), second=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.second(x).tanh()


def equal_siblings() -> nn.Module:
    model = Siblings()
    model.second.load_state_dict(model.first.state_dict())
    return model


class Region(Holding, fc=nn.Linear(4, 4), act=nn.GELU()):
    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.fc(x))


# torch has one graph for equal regions, which Dynamo traces once.
net(
    "nested_compile_region",
    lambda: nn.Sequential(Region(), Region(), Region()),
    row,
    # torch 2.10 translates no invoke_subgraph
    skip=("dynamo",) if torch.__version__ < "2.13" else (),
    fates=computed(
        "", *(f"{number}{inside}" for number in range(3) for inside in ("", ".fc", ".act"))
    ),
    owners={
        "Gemm": [("0.fc",), ("1.fc",), ("2.fc",)],
        "Gelu": [("0.act",), ("1.act",), ("2.act",)],
        "Add": [("0",), ("1",), ("2",)],
    },
)


# Equal work on the same input is done once, for both.
net(
    "equal_siblings",
    equal_siblings,
    equal=True,
    fates=computed(""),
    owners={"Tanh": [("",)], "Mul": [("",)]},
)


@net(
    "twin_branches",
    inputs=lambda: {"x": x(2, 4), "y": x(2, 4, seed=8)},
    equal=True,
    fates=computed("left.0", "right.0", "left.2", "right.2"),
    owners={"Gemm": [("left.0",), ("right.0",)], "LayerNormalization": [("left.2",), ("right.2",)]},
)
class Twins(nn.Module):
    """Equal parameters, different inputs: equal weights may be merged, the work may not."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))
        self.right = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))
        self.right.load_state_dict(self.left.state_dict())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(y)


@net(
    "called_twice",
    fates=computed("fc", "act"),
    owners={"Gemm": [("fc",), ("fc",)], "Tanh": [("act",)]},
)
class Twice(Holding, fc=nn.Linear(4, 4), act=nn.Tanh()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.act(self.fc(x)))


@net(
    "loop_of_three",
    fates=computed("block", "block.0", "block.1"),
    owners={"Gemm": [("block.0",)] * 3, "Tanh": [("block.1",)] * 3, "Add": [("",)] * 3},
)
class Loop(Holding, block=nn.Sequential(nn.Linear(4, 4), nn.Tanh())):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.block(x)
        return x


@net("two_names", fates=computed("", "one"), owners={"Gemm": [("one",), ("one",)], "Tanh": [("",)]})
class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).tanh())


class Holder(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x).sigmoid()


# The second parent must own its work too, though the path of what it holds lies under the first.
@net(
    "two_parents",
    fates=computed("left", "right", "left.shared"),
    owners={
        "Sigmoid": [("left",), ("right",)],
        "Gemm": [("left.shared",), ("right", "left.shared")],
    },
)
class TwoParents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.left, self.right = Holder(shared), Holder(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


@net(
    "tied_weights",
    inputs=lambda: {"ids": torch.tensor([[1, 5, 3], [0, 8, 2]])},
    fates=computed("embed", "norm", "head"),
    owners={"Gather": [("embed",)], "LayerNormalization": [("norm",)], "MatMul": [("head",)]},
)
class TiedWeights(nn.Module):
    def __init__(self, words: int = 9, width: int = 4) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids)))


@net("calls_itself", fates=computed("fc"), owners={"Gemm": [("fc",), ("fc",)]})
class Recursive(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return self(self.fc(x).tanh(), depth - 1) if depth else x


# --- which call ran in which ---------------------------------------------------


class Steps(Holding, fc=nn.Linear(4, 4), extra=nn.Sequential(nn.Linear(4, 4), nn.Tanh())):
    def forward(self, x: torch.Tensor, times: int, more: bool = False) -> torch.Tensor:
        for _ in range(times):
            x = self.fc(x).sin()
        return self.extra(x).exp() if more else x


class Uneven(Holding, block=Steps()):
    """``block`` runs twice: ``fc`` once in the first call, three times in the second, which alone runs ``extra``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x, 1).cos(), 3, more=True)


class Deeper(Holding, fc=nn.Linear(4, 4), act=nn.Tanh()):
    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        inner = self.fc(x).sin()
        return self.act(self(inner, depth - 1) if depth else inner).cos()


class CallsChildThatCallsItself(Holding, deeper=Deeper()):
    """``deeper`` runs once alone, and once with two more calls of itself inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.deeper(self.deeper(x, 0).exp(), 2)


class Applies(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), act

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        x = self.fc(x)
        for _ in range(times):
            x = self.act(x).sin()
        return x.cos()


def activation() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class TwoHolders(nn.Module):
    """One module in two parents, which run it once, twice, and once more; the model runs it itself as well."""

    def __init__(self) -> None:
        super().__init__()
        act = activation()
        self.first, self.second = Applies(act), Applies(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x), 2).exp()
        return self.first(self.second.act(x).sigmoid())


class Outside(nn.Module):
    """A module that only others run: the model, and a module beside the one that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.user = Steps(), nn.ModuleList([Applies(nn.Identity())])
        self.user[0].act = self.owner.extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.user[0](self.owner(x, 1).exp()).sigmoid() + self.owner.extra(x)


class LoopOfHolders(nn.Module):
    """A module in two parents, each of which runs several times."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.Tanh()
        self.first, self.second = Applies(act), Applies(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for times in (1, 2):
            x = self.second(self.first(x, times), 1)
        return x


net(
    "uneven_calls",
    Uneven,
    fates=computed("", "block", "block.fc", "block.extra", "block.extra.0", "block.extra.1"),
    owners={"Gemm": [*[("block.fc",)] * 4, ("block.extra.0",)], "Sin": [("block",)] * 4},
)
net(
    "child_calls_itself",
    CallsChildThatCallsItself,
    fates=computed("", "deeper", "deeper.fc", "deeper.act"),
    owners={"Gemm": [("deeper.fc",)] * 4},
)
net(
    "child_of_two_parents",
    TwoHolders,
    fates=computed(
        "", "first", "first.fc", "first.act", "first.act.0", "first.act.1", "second", "second.fc"
    ),
    owners={"Tanh": [("first.act.1",), *[("second", "first.act.1")] * 2, *[("first.act.1",)] * 2]},
)
net(
    "called_from_outside",
    Outside,
    fates=computed(
        "",
        "owner",
        "owner.fc",
        "owner.extra",
        "owner.extra.0",
        "owner.extra.1",
        "user.0",
        "user.0.fc",
    ),
)
net(
    "two_parents_in_a_loop",
    LoopOfHolders,
    fates=computed("", "first", "first.fc", "first.act", "second"),
)


# --- merged by the exporters ---------------------------------------------------


def conv_bn_relu() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    )


def image() -> dict[str, Any]:
    return {"input": x(1, 3, 6, 6)}


net(
    "conv_bn_relu",
    conv_bn_relu,
    image,
    fates={"0": "fused", "1": "fused", **computed("", "2", "3")},
    owners={"Conv": [("0", "1"), ("3",)], "Relu": [("2",)]},
    merged={"0": ("1",), "1": ("0",)},
)


def bn_conv() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.ReLU())


net("bn_before_conv", bn_conv, image, fates=computed("2"), owners={"Relu": [("2",)]})


class MaskedLayer(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + (1.0 - mask.to(x.dtype))[:, None] * -3.0


class SharedMask(Holding, layers=nn.ModuleList(MaskedLayer() for _ in range(3))):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


LAYERS = ("layers.0", "layers.1", "layers.2")
net(
    "mask_made_in_every_layer",
    SharedMask,
    lambda: {"x": x(2, 4), "mask": torch.tensor([1, 0])},
    fates={"layers": "uncalled", **computed(*LAYERS, *(f"{layer}.fc" for layer in LAYERS))},
    owners={
        "Cast": [LAYERS],
        "Sub": [LAYERS],
        "Mul": [LAYERS],
        "Add": [(layer,) for layer in LAYERS],
    },
)


class Gain(nn.Module):
    """Returns the exponential, or what is computed from it."""

    def __init__(self, squashed: bool) -> None:
        super().__init__()
        self.squashed = squashed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.exp(x)) if self.squashed else torch.exp(x)


class GainBlock(nn.Module):
    """Its own forward reads what its gain returns."""

    def __init__(self, squashed: bool) -> None:
        super().__init__()
        self.gain, self.fc = Gain(squashed), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.gain(g)


@net(
    "merged_work_read_in_both_blocks",
    inputs=lambda: {"x": x(2, 4), "g": x(2, 4)},
    fates=computed("blocks.0", "blocks.0.gain", "blocks.1", "blocks.1.gain"),
    owners={"Exp": [("blocks.0.gain", "blocks.1.gain")], "Mul": [("blocks.0",), ("blocks.1",)]},
)
class MergedGains(Holding, blocks=nn.ModuleList([GainBlock(True), GainBlock(False)])):
    """Both gains begin alike; the merged node feeds one gain, and the block around the other."""

    def forward(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, g)
        return x


class CastThenScale(Holding, weight=nn.Parameter(torch.ones(3))):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.float() * self.weight


@net(
    "same_cast_in_two_siblings",
    inputs=lambda: {"ids": torch.tensor([[1, 5, 3], [0, 8, 2]])},
    fates=computed("first", "second"),
    owners={"Cast": [("first", "second")], "Mul": [("first",), ("second",)], "Sub": [("",)]},
)
class SharedCast(Holding, first=CastThenScale(), second=CastThenScale()):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.first(ids) - self.second(ids).exp()


def unflat(*shape: int) -> nn.Module:
    return Apply(lambda x: x.reshape(shape))


net(
    "reshapes_that_meet",
    lambda: nn.Sequential(nn.Tanh(), unflat(2, 2, 2), unflat(8, 1), nn.Sigmoid()),
    row,
    fates=computed("0", "3"),
    owners={"Tanh": [("0",)], "Sigmoid": [("3",)]},
    dynamo=Truth(
        {"1": "fused", "2": "fused"}, {"Reshape": [("1", "2")]}, {"1": ("2",), "2": ("1",)}
    ),
)


@net(
    "shapes_that_come_back",
    inputs=lambda: {"x": x(2, 2, 2)},
    fates=computed("flat", "last"),
    dynamo=Truth(
        {"same": "identity", "there": "fused", "back": "fused"}, {"Reshape": [("flat",), ("last",)]}
    ),
)
class Reshapes(
    Holding,
    before=nn.Tanh(),
    flat=nn.Flatten(),
    same=unflat(2, 4),
    head=nn.Linear(4, 2),
    there=unflat(4),
    back=unflat(2, 2),
    last=unflat(4, 1),
):
    """Shapes that come back after others: their tensors are equal, so that they are still in the file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.same(self.flat(self.before(x))))
        return self.last(self.back(self.there(y))).exp()


net(
    "a_shape_that_a_module_takes_back_and_makes_again",
    # As Rearrange of einops with a size of one: its view is the permuted tensor, and is made flat once more.
    lambda: nn.Sequential(
        Apply(lambda x: x.permute(1, 2, 0, 3).reshape(2, 5, 8)),
        Apply(lambda x: x.reshape(2, 5, 1, 8).reshape(2, 5, 8)),
        nn.Tanh(),
    ),
    lambda: {"input": x(1, 2, 5, 8)},
    fates=computed("0", "2"),
    owners={"Tanh": [("2",)]},
    dynamo=Truth({"1": "identity"}, {"Reshape": [("0",)]}),
)


def turn() -> nn.Module:
    return Apply(lambda x: x.transpose(0, 1))


net(
    "transposes_that_cancel",
    lambda: nn.Sequential(nn.Tanh(), turn(), turn(), nn.Sigmoid()),
    row,
    fates={"1": "fused", "2": "fused", **computed("0", "3")},
    owners={"Tanh": [("0",)], "Sigmoid": [("3",)], "Transpose": []},
)


# --- not computed ---------------------------------------------------


@net(
    "dead_branch_and_unused_module",
    fates={
        "dead": "dead",
        "dead.0": "dead",
        "dead.1": "dead",
        "unused": "uncalled",
        **computed("", "main"),
    },
    owners={"Gemm": [("main",)]},
)
class DeadBranch(
    Holding,
    main=nn.Linear(4, 4),
    dead=nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    unused=nn.Linear(4, 4),
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dead(x)
        return self.main(x)


class Positions(Holding, table=nn.Embedding(4, 4), fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x + self.table(torch.arange(4) % 3))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(-self.rate * torch.arange(4.0))


class Schedule(Holding, scale=Scale(), fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale(x)


net("positions_folded_away", Positions, lambda: {"x": x(4, 4)}, fates=computed("", "fc"))
net(
    "scale_folded_away",
    Schedule,
    fates=computed("fc"),
    owners={"Gemm": [("fc",)]},
    dynamo=Truth({"scale": "constant"}),
)


def identities() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Identity(), nn.Tanh())


net(
    "dropout_and_identity",
    identities,
    row,
    fates={"1": "identity", "2": "identity", **computed("0", "3")},
    owners={"Gemm": [("0",)], "Tanh": [("3",)]},
)


net("nothing_but_identity", lambda: nn.Sequential(nn.Identity()), row, fates={"0": "identity"})


net(
    "identity_at_the_end",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()),
    row,
    fates={"0": "computed", "1": "identity"},
    owners={"Gemm": [("0",)]},
)


@net(
    "inputs_that_nothing_reads",
    inputs=lambda: {
        "unread": x(2, 4, seed=1),
        "x": x(2, 4),
        "states": [x(2, 4, seed=2), x(2, 4, seed=3)],
    },
    fates=computed("", "scale", "fc"),
    owners={"Gemm": [("fc",), ("scale",)], "Sin": [("",)]},
)
class SkipsInputs(Holding, scale=nn.Linear(4, 4), fc=nn.Linear(4, 4)):
    """Nothing reads the first input and a part of the last one; TorchScript names the others after what reads them."""

    def forward(
        self, unread: torch.Tensor, x: torch.Tensor, states: list[torch.Tensor]
    ) -> torch.Tensor:
        return self.fc(x) * self.scale(states[1]).sin()


class SpreadsWeights(Holding, score=nn.Linear(4, 4), value=nn.Linear(4, 4)):
    """Returns, beside its result, an expanded tensor that nobody reads: averaged weights, for each head."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = self.score(x).softmax(-1)
        averaged = weights.mean(0)[:, None].expand(-1, 3)
        return self.value(x) * weights, averaged, x.sum(0)


@net(
    "expanded_result_that_nobody_reads",
    fates=computed("", "attention", "attention.score", "attention.value", "head"),
)
class DropsSpreadWeights(Holding, attention=SpreadsWeights(), head=nn.Linear(4, 2)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, _, bias = self.attention(x)
        return self.head(values + bias)


# --- names ---------------------------------------------------


def nested() -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return nn.Sequential(nn.Sequential(nn.Sequential(inner, nn.Sigmoid())), nn.Linear(4, 4))


net(
    "nested_sequentials",
    nested,
    row,
    fates=computed("0", "0.0", "0.0.0", "0.0.0.0", "1"),
    owners={"Gemm": [("0.0.0.0",), ("1",)], "Tanh": [("0.0.0.1",)], "Sigmoid": [("0.0.1",)]},
)

ODD_KEYS = ("a/b", "a-b", "a::b", "a;b", "a b", "ä%2F", "a")


class OddKeys(nn.Module):
    def __init__(self, keys: tuple[str, ...]) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict({key: nn.Linear(4, 4) for key in keys})
        self.keys = ("a", *keys)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for key in self.keys:
            x = self.by_name[key](x)
        return x


net(
    "odd_keys",
    lambda: OddKeys(ODD_KEYS),
    fates=computed(*(f"by_name.{key}" for key in ODD_KEYS)),
    owners={"Gemm": [(f"by_name.{key}",) for key in ("a", *ODD_KEYS)]},
)

# torch writes the second call of "a" as "a@1".
net(
    "at_sign_in_a_key",
    lambda: OddKeys(("a@1", "a")),
    fates=computed("by_name.a", "by_name.a@1"),
    owners={"Gemm": [("by_name.a",), ("by_name.a@1",), ("by_name.a",)]},
)


@net(
    "names_that_end_alike",
    fates=computed("linear", "inner.linear", "linear_1"),
    owners={"Gemm": [("inner.linear",), ("linear",), ("linear",), ("linear_1",)]},
)
class SameEnd(nn.Module):
    """`inner.linear` and `linear`: TorchScript cuts both to the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.linear = nn.Linear(4, 4)
        self.linear = nn.Linear(4, 4)
        self.linear_1 = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_1(self.linear(self.linear(self.inner.linear(x))))


# --- calls that are no plain calls ---------------------------------------------------


class Codec(Holding, fc=nn.Linear(4, 4)):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x).sigmoid()


# `codec` never runs: what its method computes belongs to its caller, and its child runs.
@net(
    "a_method_that_is_not_forward",
    fates={"codec": "uncalled", **computed("", "codec.fc")},
    owners={"Gemm": [("codec.fc",)], "Tanh": [("",)]},
)
class OtherMethod(Holding, codec=Codec()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.codec.encode(x)


@net(
    "forward_called_directly",
    fates={"codec": "uncalled", **computed("codec.fc")},
    owners={"Gemm": [("codec.fc",)], "Tanh": [("",)], "Sigmoid": [("",)]},
)
class DirectForward(Holding, codec=Codec()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.codec.forward(x) + 1.0


@net(
    "no_grad_inside",
    fates=computed("frozen", "frozen.0", "frozen.1", "head"),
    owners={"Gemm": [("frozen.0",), ("head",)], "Tanh": [("frozen.1",)]},
)
class NoGrad(Holding, frozen=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), head=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.frozen(x)
        return self.head(features)


def forward_hooked() -> nn.Module:
    model = Siblings()
    model.first.register_forward_hook(lambda _module, _args, out: out.exp())
    return model


def pre_hooked() -> nn.Module:
    model = Siblings()
    model.second.register_forward_pre_hook(lambda _module, args: (args[0].cos(),))
    return model


# A hook of the user's changes what the module gives back, or what it is given.
net(
    "forward_hook_that_computes",
    forward_hooked,
    fates=computed("first", "second"),
    owners={"Exp": [("first",)]},
)
net(
    "pre_hook_that_computes", pre_hooked, fates=computed("first", "second"), owners={"Cos": [("",)]}
)


class ChangedBefore(Holding, first=nn.Linear(4, 4), second=nn.Linear(4, 4)):
    """A pre-hook changes its argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_forward_pre_hook(type(self).change)

    @staticmethod
    def change(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].cos_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class CallsInPreHook(Holding, scale=nn.Linear(4, 4), fc=nn.Linear(4, 4), act=nn.Tanh()):
    """The pre-hook of a module that runs twice calls another module."""

    def __init__(self) -> None:
        super().__init__()
        self.act.register_forward_pre_hook(lambda _module, args: self.scale(args[0]).exp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(self.act(x)))


class Prepares(Holding, fc=nn.Linear(4, 4)):
    """A pre-hook computes what ``forward`` needs besides its argument, as a weight normalization does."""

    def __init__(self) -> None:
        super().__init__()
        self.held = SimpleNamespace()  # torch.export warns of tensors that become attributes
        self.register_forward_pre_hook(type(self).prepare)

    @staticmethod
    def prepare(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        module.held.factor = args[0].sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.held.factor


net(
    "pre_hook_that_changes_its_argument",
    ChangedBefore,
    fates=computed("first", "second"),
    owners={"Cos": [("",)]},
)
net(
    "pre_hook_that_calls_a_module",
    CallsInPreHook,
    fates=computed("scale", "fc", "act"),
    owners={"Exp": [("",), ("",)], "Tanh": [("act",), ("act",)]},
)
# TorchScript runs pre-hooks before the scope of their module.
net(
    "pre_hook_that_leaves_its_argument",
    lambda: composed(lambda self, x: self.part(x).tanh(), part=Prepares()),
    skip=("torchscript",),
    fates=computed("part", "part.fc"),
    owners={"Sin": [("part",)]},
)


@net(
    "checkpointed",
    skip=("torchscript",),
    fates=computed("fc", "head"),
    owners={"Gemm": [("fc",), ("head",)], "Tanh": [("",)]},
)
class Checkpointed(Holding, fc=nn.Linear(4, 4), head=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.utils.checkpoint.checkpoint(self.fc, x, use_reentrant=False).tanh())


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 + x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


net(
    "autograd_function",
    lambda: nn.Sequential(nn.Linear(4, 4), Apply(Doubling.apply), Apply(Doubling.apply)),
    row,
    fates=computed("0", "1", "2"),
    owners={"Sin": [("1",), ("2",)], "Mul": [("1",), ("2",)]},
)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2.0, (x,))  # type: ignore[no-any-return]


@net(
    "cond",
    skip=("torchscript",),
    fates=computed("fc", "choose", "again"),
    owners={
        "If": [("choose",), ("again",)],
        "Sin": [("choose",), ("again",)],
        "Cos": [("choose",), ("again",)],
    },
)
class Cond(Holding, fc=nn.Linear(4, 4), choose=Branches(), again=Branches()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.choose(self.fc(x)))


class CondOverSelf(
    Holding, weight=nn.Parameter(torch.ones(4)), up=nn.Linear(4, 4), down=nn.Linear(4, 4)
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def high(x: torch.Tensor) -> torch.Tensor:
            return self.up(x) * self.weight

        def low(x: torch.Tensor) -> torch.Tensor:
            return self.down(x).tanh() - self.weight

        return torch.cond(x.sum() > -0.45, high, low, (x,))  # type: ignore[no-any-return]


@net(
    "cond_over_self",
    skip=("torchscript",),
    fates=computed("fc", "choose", "choose.up", "choose.down"),
    owners={
        "If": [("choose",)],
        "Gemm": [("fc",), ("choose.up",), ("choose.down",)],
        "Tanh": [("choose",)],
        # these read a parameter of the module's own, and give back the branch's result
        "Mul": [("choose",)],
        "Sub": [("choose",)],
    },
)
class HoldsCond(Holding, fc=nn.Linear(4, 4), choose=CondOverSelf()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.choose(self.fc(x))


class Block(
    Holding,
    fc=nn.Linear(4, 4),
    act=Apply(lambda x: x.sin() * 2.0),
    rest=nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.act(self.fc(x))) + 1.0


@net(
    "modules_in_branches",
    skip=("torchscript",),
    fates=computed(
        "", "block", "block.act", "block.rest", "block.rest.1", "act", "both", "both.fc", "both.act"
    ),
    owners={
        "If": [("",)],
        "Gemm": [("block.fc",), ("block.rest.0",)] + [("both.fc",), ("both.rest.0",)] * 3,
        "Sin": [("block.act",)] + [("both.act",)] * 3,
        "Tanh": [("block.rest.1",)] + [("both.rest.1",)] * 3,
        "Cos": [("",)],
        "Exp": [("act",)],
        "Abs": [("",)],
    },
)
class ModulesInBranches(Holding, block=Block(), act=Apply(lambda x: x.exp() + 3.0), both=Block()):
    """Modules with and without parameters and with others inside; one runs in both branches, and twice in one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def high(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.both(self.block(x).cos())
            return y - 3.0

        def low(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.act(self.both(self.both(x)))
            return y.abs()

        return torch.cond(x.sum() > 0, high, low, (x,)).sigmoid()  # type: ignore[no-any-return]


class BranchesInside(Holding, block=Block(), inner=Block()):
    """A branch inside a branch, and branches that are modules themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def low(x: torch.Tensor) -> torch.Tensor:
            other = lambda x: self.inner(x).exp()  # noqa: E731 - functions of three lines would hide what runs where
            return torch.cond(x.sum() < 0, self.inner, other, (x * 2.0,)).cos()  # type: ignore[no-any-return]

        return torch.cond(x.sum() > 0, self.block, low, (x,))  # type: ignore[no-any-return]


@net(
    "branches_inside_branches",
    skip=("torchscript",),
    fates=computed("one", "one.block", "one.block.act", "one.inner.act", "two.inner.rest.1"),
    owners={
        "Exp": [("one",), ("two",)],
        "Sin": [("one.block.act",)]
        + [("one.inner.act",)] * 2
        + [("two.block.act",)]
        + [("two.inner.act",)] * 2,
        "Cos": [("one",), ("two",)],
        "If": [("one",), ("one",), ("two",), ("two",)],
    },
)
class HoldsBranchesInside(Holding, one=BranchesInside(), two=BranchesInside()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) - self.two(-x)


@net(
    "outside_and_in_a_branch",
    skip=("torchscript",),
    fates=computed("block", "block.fc", "block.act"),
    owners={"Sin": [("block.act",)] * 4, "Exp": [("",)], "Cos": [("",)], "Sigmoid": [("",)]},
)
class OutsideAndInBranch(Holding, block=Block()):
    """Runs a module before a branch, in it, and after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x).exp()
        z = torch.cond(x.sum() > 0, lambda y: self.block(y), lambda y: self.block(y).cos(), (y,))
        return self.block(z.sigmoid())


# --- graph modules: torch.export has no scopes for them --------------------------------------------------


class Traced(Holding, fc=nn.Linear(4, 4), weight=nn.Parameter(torch.ones(4))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.sin()).tanh() * self.weight


class Bare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos() - 2.0


@net(
    "graph_modules",
    fates=computed("", "one", "one.fc", "bare", "head"),
    owners={
        "Sin": [("one",), ("one",)],
        "Gemm": [("one.fc",), ("one.fc",), ("head",)],
        "Tanh": [("one",), ("one",)],
        "Cos": [("bare",)],
        "Exp": [("",)],
    },
)
class HoldsGraphModules(Holding, head=nn.Linear(4, 3)):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.bare = torch.fx.symbolic_trace(Traced()), torch.fx.symbolic_trace(Bare())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.one(x)
        return self.head(self.bare(self.one(y))).exp()


class KeepsModules(torch.fx.Tracer):
    """Traces no further into modules of these classes."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (Block, torch.fx.GraphModule)) or super().is_leaf_module(
            m, module_qualified_name
        )


class ForNested(Holding, block=Block()):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.fx.symbolic_trace(Traced())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.block(x).exp()).abs()


def nested_graph_module() -> nn.Module:
    holder = ForNested()
    return torch.fx.GraphModule(holder, KeepsModules().trace(holder), "ForNested")


net(
    "graph_module_in_a_graph_module",
    lambda: nn.Sequential(nested_graph_module(), nn.Tanh()),
    row,
    fates=computed("", "0", "0.inner", "0.inner.fc", "0.block", "0.block.act", "1"),
    owners={"Abs": [("0",)], "Exp": [("0",)], "Sin": [("0.block.act",), ("0.inner",)]},
)
net(
    "graph_module_as_the_model",
    nested_graph_module,
    fates=computed("", "inner", "inner.fc", "block", "block.act"),
    owners={"Abs": [("",)], "Exp": [("",)], "Sin": [("block.act",), ("inner",)]},
)


# --- tensors in and out ---------------------------------------------------


class Pair(Holding, a=nn.Linear(4, 4), b=nn.Linear(4, 2)):
    def forward(self, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        return {"both": (self.a(x), self.b(x)), "sum": (x.sum(-1),)}


@net(
    "dict_of_tuples",
    fates=computed("", "pair", "pair.a", "pair.b", "norm"),
    owners={"Gemm": [("pair.a",), ("pair.b",)], "ReduceSum": [("pair",)], "Exp": [("",)]},
)
class Structured(Holding, pair=Pair(), norm=nn.LayerNorm(4)):
    def forward(self, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        found = self.pair(x)
        return {
            "first": (self.norm(found["both"][0]), found["both"][1]),
            "last": (found["sum"][0].exp(),),
        }


@net(
    "nested_inputs",
    inputs=lambda: {"pair": (x(2, 4), [x(2, 4, seed=8), x(2, 4, seed=9)])},
    fates=computed("fc"),
    owners={"Gemm": [("fc",)], "Mul": [("",)], "Sub": [("",)]},
)
class NestedInputs(Holding, fc=nn.Linear(4, 4)):
    def forward(self, pair: tuple[torch.Tensor, list[torch.Tensor]]) -> torch.Tensor:
        return self.fc(pair[0]) * pair[1][0] - pair[1][1]


class Together(Holding, fc=nn.Linear(4, 4)):
    """Gives back what it was given, beside something new."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.fc(x).tanh()


@net(
    "input_beside_something_new",
    fates={"one": "dead", "one.fc": "dead", **computed("two", "two.fc", "head")},
    owners={"Gemm": [("two.fc",)], "Tanh": [("two",)], "Sigmoid": [("head",)], "Mul": [("",)]},
)
class PassesThrough(Holding, one=Together(), two=Together(), head=nn.Sigmoid()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same, new = self.two(self.one(x)[0])
        return self.head(same) * new


@net("same_tensor_twice_and_an_input_returned", fates=computed("fc"), owners={"Gemm": [("fc",)]})
class ReturnsTwice(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.fc(x)
        return y, y, x


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        y.add_(1.0)
        y[:, 0] = 0.5
        return y.tanh_()


net(
    "in_place",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), InPlace(), nn.Linear(4, 4)),
    row,
    fates=computed("0", "1", "2", "3"),
    owners={"Gemm": [("0",), ("3",)], "Relu": [("1",)], "Tanh": [("2",)]},
)


class FillsPart(nn.Module):
    """Changes a part of what it is given, and gives the whole back."""

    def forward(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        whole[:, 2] = part.cos()
        return whole


@net(
    "filled_in_parts",
    inputs=lambda: {"x": x(2, 4, 4)},
    fates=computed("key", "value", "fill", "head"),
    owners={"Sin": [("",)], "Cos": [("fill",)], "Exp": [("",)] * 2},
)
class FillsInParts(
    Holding, key=nn.Linear(4, 4), value=nn.Linear(4, 4), fill=FillsPart(), head=nn.Linear(4, 4)
):
    """Nothing but changes of parts leads from some modules to the result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value = self.key(x), self.value(x)
        out = torch.zeros_like(key)
        for step in range(2):
            out[:, step] = key[:, step].exp() * value[:, step]
        before = out.sin()
        return self.head(self.fill(out, value[:, 2])) + before


@net(
    "filled_last",
    inputs=lambda: {"x": x(2, 4, 4)},
    fates=computed("fc", "fill"),
    owners={"Cos": [("fill",)]},
)
class FilledLast(Holding, fc=nn.Linear(4, 4), fill=FillsPart()):
    """What is changed in part is what the model returns; and a constant beside it."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x)
        return self.fill(y * 2, y[:, 0]), None


# Functionalization makes a view again, where the tensor under it was changed in place, when somebody reads it.


class Written(nn.Module):
    """Writes a new tensor part by part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        made[:, 0] = x[:, 1]
        made[:, 1:] = x[:, 1:] * 0.5
        return made


class Picks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[:, 1])


class WritesWhatItPicks(Holding, part=Picks()):
    """Without optimisation, the view that is written stays as a node, and shares its index with the part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        made[:, 1] = self.part(x)
        return made


net(
    "written_by_a_part",
    lambda: nn.Sequential(nn.Linear(4, 4), WritesWhatItPicks(), nn.Linear(4, 3)),
    lambda: {"input": x(2, 4, 4)},
    fates=computed("", "0", "1", "1.part", "2"),
    owners={"Tanh": [("1.part",)]},
)


net(
    "given_back_after_a_change",
    lambda: nn.Sequential(nn.Linear(4, 4), Written(), nn.Dropout(), nn.Linear(4, 3)),
    lambda: {"input": x(2, 4, 4)},
    fates={**computed("", "0", "1", "3"), "2": "identity"},
    owners={"MatMul": [("0",), ("3",)]},
)


net(  # `broadcast_tensors` gives back what has the size already
    "given_back_in_a_list",
    lambda: nn.Sequential(
        nn.Linear(4, 4),
        composed(
            lambda self, x: nn.functional.mse_loss(self.code(x.argmax(-1)), x, reduction="none"),
            code=nn.Embedding(4, 4),
        ),
    ),
    lambda: {"input": x(2, 3, 4)},
    fates=computed("", "0", "1", "1.code"),
    owners={"Gather": [("1.code",)], "ArgMax": [("1",)]},
)


net(
    "view_after_a_change",
    lambda: nn.Sequential(
        nn.Conv2d(4, 8, 1), nn.ReLU(inplace=True), nn.Flatten(1), nn.Linear(8, 3)
    ),
    lambda: {"input": x(1, 4, 1, 1)},
    fates=computed("0", "1", "2", "3"),
    owners={"Relu": [("1",)], "Gemm": [("3",)]},
)


@net(
    "views_of_a_changed_tensor",
    inputs=sequence,
    dynamo=Truth(
        computed("fc", "act", "turn", "split", "again", "head"),
        {"Transpose": [("turn",)] * 2, "Reshape": [("split",)] * 2},
    ),
    skip=("torchscript",),
)
class ViewsOfChanged(
    Holding,
    fc=nn.Linear(4, 4),
    act=nn.ReLU(inplace=True),
    turn=Apply(lambda x: x.permute(0, 2, 1)),
    split=Apply(lambda x: x.unflatten(1, (2, 2))),
    again=nn.Hardsigmoid(inplace=True),
    head=nn.Linear(3, 2),
):
    """Views of views of a changed tensor; one is returned, one is changed in turn."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            y = self.split(self.turn(self.act(self.fc(x))))
        z = self.turn(self.again(self.fc(x * 2.0)).add_(1.0))
        return self.head(y) + z.mean(), self.split(z)


@net(
    "parts_of_a_changed_tensor",
    fates=computed("norm", "act", "parts", "one"),
    skip=("torchscript",),
)
class PartsOfChanged(
    Holding,
    norm=nn.LayerNorm(4),
    act=nn.ReLU(inplace=True),
    parts=Apply(lambda x: x.chunk(2, 1)),
    rows=Apply(lambda x: x.unbind(1)),
    one=nn.Linear(2, 1),
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y += x
        first, second = self.parts(self.act(y))
        second, _ = self.rows(second.masked_fill(second > 0.5, 0.25).mul_(2.0).unflatten(1, (2, 1)))
        return self.one(first) * second


net(
    "cell_then_views",
    lambda: nn.Sequential(nn.GRUCell(4, 4), unflat(4, 2), nn.Linear(2, 3)),
    row,
    fates=computed("0", "1", "2"),
    owners={"Reshape": [("1",)]},
)


# TorchScript's exporter leaves the tensor under the view as it was, in torch too.
@net(
    "changes_of_views",
    skip=("torchscript",),
    fates=computed("", "fc", "flat", "act", "head"),
    owners={"Relu": [("act",), ("act",)], "ScatterND": [("",)], "Sin": [("",)]},
)
class ChangesOfViews(
    Holding,
    fc=nn.Linear(4, 4),
    flat=nn.Flatten(0),
    act=nn.ReLU(inplace=True),
    head=nn.Linear(8, 2),
    again=nn.Hardsigmoid(inplace=True),
):
    """What a module changes is a view of a tensor that others have, and read afterwards."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.fc(x)
        z = self.head(self.act(self.flat(self.again(y))))
        self.act(y.t()[1:3])
        return z, y.sin()


# The view that `flat` gave back is nowhere in the file, but only the view of the changed tensor.
@net(
    "view_before_a_change",
    skip=("torchscript",),
    fates={"flat": "fused", **computed("", "fc", "act", "head")},
    owners={"Reshape": [("",)]},
    merged={"flat": ("",)},
)
class ViewThenChange(
    Holding, fc=nn.Linear(4, 4), flat=nn.Flatten(0), act=nn.ReLU(inplace=True), head=nn.Linear(8, 2)
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        view = self.flat(y)
        changed = self.act(y)
        return self.head(view) + changed.mean()


class ShiftsAndReads(
    Holding, shift=nn.Parameter(torch.ones(6, 4)), norm=nn.LayerNorm(4), head=nn.Linear(4, 3)
):
    """Changes what it is given in place, and reads it then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.shift
        return self.head(self.norm(x)) * x.sin().mean()


# Functionalization writes the changed view back into the result of the ReLU, which nobody reads, and makes it again.
net(
    "view_changed_and_read",
    lambda: nn.Sequential(
        nn.Sequential(
            nn.Conv2d(4, 4, 1), nn.ReLU(), Apply(lambda x: x.permute(0, 2, 3, 1).flatten(1, 2))
        ),
        ShiftsAndReads(),
    ),
    lambda: {"input": x(2, 4, 2, 3)},
    fates=computed("0", "0.2", "1", "1.norm", "1.head"),
    owners={"Sin": [("1",)]},
    dynamo=Truth(owners={"Reshape": [("0.2",), ("1",), ("1",)]}),
    torchscript=Truth(owners={"Reshape": [("0.2",)]}),
)


@net(
    "tensor_changed_under_a_view_that_is_read",
    skip=("torchscript",),  # its graph reads the view as it was before the change, in torch too
    fates=computed("", "fc", "turn", "block", "head"),
    owners={"Transpose": [("turn",), ("block",)], "Cos": [("",)], "Sin": [("block",)]},
)
class ChangesUnderAView(
    Holding,
    fc=nn.Linear(4, 4),
    turn=Apply(lambda x: x.t()),
    head=nn.Linear(2, 3),
    block=Apply(lambda whole, view: whole.add_(1.0).sum() * view.sin()),
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.fc(x)
        view = self.turn(whole)
        return self.head(view.cos() + self.block(whole, view))


@net(
    "view_changed_read_and_returned",
    inputs=lambda: {"x": x(2, 4, 2, 4)},
    fates=computed("fc", "turn", "block", "block.0", "after", "head"),
    owners={"Exp": [("block.0",)], "Sigmoid": [("after",)]},
    dynamo=Truth(owners={"Reshape": [("turn",), ("block.0",), ("block.0",)]}),
)
class ChangesReadsAndReturns(
    Holding,
    fc=nn.Linear(4, 4),
    after=nn.Sigmoid(),
    head=nn.Linear(4, 2),
    turn=Apply(lambda x: x.permute(0, 2, 3, 1).flatten(1, 2)),
    block=nn.Sequential(Apply(lambda x: (x.mul_(2.0).exp(), x))),
):
    """Another module reads the changed view, too; it is returned beside what was computed from it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, changed = self.block(self.turn(self.fc(x)))
        return self.head(one + self.after(changed))


class ToOwnType(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the same tensor, which the TorchScript tracer gives another number
        x = x.to(dtype=self.fc.weight.dtype)
        return self.fc(x).sin()


net(
    "argument_made_its_own_type",
    lambda: nn.Sequential(ToOwnType(), nn.Tanh()),
    row,
    fates=computed("0", "0.fc"),
    owners={"Sin": [("0",)], "Gemm": [("0.fc",)]},
)


@net(
    "an_output_that_nobody_uses",
    fates=computed("qkv", "split", "act"),
    owners={"Gemm": [("qkv",)], "Sigmoid": [("act",)]},
)
class UsesSomeHeads(
    Holding, qkv=nn.Linear(4, 6), split=Apply(lambda x: x.chunk(3, dim=-1)), act=nn.Sigmoid()
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, _, v = self.split(self.qkv(x))
        return self.act(q) * v


net(
    "pads_by_nothing",
    # As MobileNetV2 of transformers: it pads by what its size needs, and for this size that is nothing.
    lambda: nn.Sequential(nn.ZeroPad2d(0), nn.Conv2d(2, 3, 3), nn.ReLU()),
    lambda: {"input": x(1, 2, 8, 8)},
    fates=computed("1", "2"),
    owners={"Conv": [("1",)], "Relu": [("2",)]},
    dynamo=Truth({"0": "identity"}),
)


# --- shapes ---------------------------------------------------


class FromShape(Holding, table=nn.Embedding(16, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.arange(x.shape[1], device=x.device))


class SplitMerge(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = x.view(batch, length, 2, 2).transpose(1, 2).softmax(-1)
        return heads.transpose(1, 2).reshape(batch, length, 4)


@net(
    "positions_from_shapes",
    inputs=sequence,
    dynamic={"x": {0: "batch", 1: "length"}},
    fates=computed("positions", "positions.table", "one", "fc", "two"),
    owners={"Softmax": [("one",), ("two",)], "MatMul": [("fc",)]},
)
class ShapesEverywhere(
    Holding, positions=FromShape(), one=SplitMerge(), fc=nn.Linear(4, 4), two=SplitMerge()
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.fc(self.one(self.positions(x))))


# --- modules of torch with an inside ---------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.norm, self.rnn, self.head = (
            nn.LayerNorm(4),
            kind(4, 3, batch_first=True),
            nn.Linear(3, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.norm(x))[0])


net(
    "lstm",
    lambda: Recurrent(nn.LSTM),
    sequence,
    fates=computed("rnn", "norm", "head"),
    owners={"LSTM": [("rnn",)]},
)
net(
    "gru",
    lambda: Recurrent(nn.GRU),
    sequence,
    fates=computed("rnn", "norm", "head"),
    owners={"GRU": [("rnn",)]},
)


@net("multihead_attention", inputs=sequence, fates=computed("attention", "fc"))
class Attends(Holding, fc=nn.Linear(4, 4), attention=nn.MultiheadAttention(4, 2, batch_first=True)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        return x + self.attention(x, x, x, need_weights=False)[0]


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)


net(
    "transformer_encoder",
    encoder,
    lambda: {"src": x(2, 3, 4)},
    fates={
        **computed("layers.0", "layers.1.linear1", "layers.1.norm2"),
        "layers.0.dropout": "identity",
    },
)


def normed() -> nn.Module:
    weight_norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 3)))


net("weight_norm", normed, row, fates=computed("0", "1", "2"), owners={"Tanh": [("1",)]})


class Attention(Holding, q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


@net(
    "scaled_dot_product_attention",
    inputs=lambda: {
        "x": x(2, 3, 4),
        "mask": torch.tensor([[True, True, False], [True, True, True]]),
    },
    fates=computed("blocks.0", "blocks.1.q"),
    owners={"Softmax": [("blocks.0",), ("blocks.1",)]},
)
class AttentionBlocks(Holding, blocks=nn.ModuleList(Attention() for _ in range(2))):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x, mask[:, None, None, :])
        return x


class OtherNames(Holding, first=nn.Linear(4, 4), second=nn.Linear(4, 4)):
    """Operators by their second names, in place too, which torch replaces when a trace ends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.multiply(self.first(x), x)
        y = torch.subtract(torch.absolute(self.second(y)), torch.divide(x, 2.0).negative_())
        return torch.special.expit(torch.concat([y, torch.clip(x, -1.0, 1.0)], dim=-1))


net(
    "other_names_of_operators",
    lambda: nn.Sequential(OtherNames(), nn.Linear(8, 4)),
    row,
    fates=computed("0", "0.first", "0.second", "1"),
    owners={"Abs": [("0",)], "Sigmoid": [("0",)]},
)


class OnlyMeasured(Holding, linear=nn.Linear(4, 4)):
    """What its layer computes is looked at for its size alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(self.linear(x))


@net("zeros_of_the_same_size", inputs=lambda: {"x": x(2, 4)}, fates={"zeros.linear": "dead"})
class ZerosInBetween(Holding, zeros=OnlyMeasured(), out=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.zeros(x))


class SplitsItsResult(Holding, linear=nn.Linear(4, 4)):
    """Of two parts that one operator makes, one is returned as it is: nothing but the tuple around both reads it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, rest = torch.split(self.linear(x), [1, 2], 1)
        return rest.permute(0, 2, 1).reshape(2, 8), first


net(
    "returned_parts",
    lambda: nn.Sequential(SplitsItsResult()),
    lambda: {"input": x(2, 3, 4)},
    fates=computed("0", "0.linear"),
)


def conv_bn(features: int, kernel: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, features, kernel, bias=False), nn.BatchNorm2d(features))


net(
    "conv_bn_conv_bn",
    lambda: nn.Sequential(conv_bn(3, 3), conv_bn(4, 1)),
    image,
    fates=computed("0", "1"),
    owners={"Conv": [("0.0", "0.1"), ("1.0", "1.1")]},
)


# --- operators with several results that torch decomposes: of their results, nothing keeps the names --------


@net("cells", inputs=sequence, fates=computed("cell", "out"))
class Cells(Holding, cell=nn.LSTMCell(4, 4), out=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, state = x[:, 0].tanh(), torch.zeros_like(x[:, 0])
        outs = []
        for step in range(3):
            hidden, state = self.cell(x[:, step] + hidden, (hidden, state))
            outs.append(self.out(hidden))
        return torch.stack(outs, 1)


class Picks(Holding, score=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = self.score(x).softmax(-1).topk(2, -1)
        return places, values * 2


@net("picks_twice", fates=computed("first", "first.score", "second", "second.score"))
class PicksTwice(Holding, first=Picks(), second=Picks()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch makes a graph of its own for this, and the results of all nodes get new names
        with torch.no_grad():
            shift, scale = x.sin(), x.cos()
        places, values = self.first(x * scale + shift)
        x = x.scatter(1, places, values)
        places, values = self.second(x)
        return x.scatter(1, places, values)


@net(
    "largest_twice",
    inputs=lambda: {"x": x(2, 2, 6), "y": x(2, 2, 6, seed=8)},
    # torch 2.10 has no ONNX operators for it
    skip=("dynamo",) if torch.__version__ < "2.11" else (),
    fates=computed("encoder", "encoder.0", "encoder.1"),
)
class LargestTwice(
    Holding, encoder=nn.Sequential(nn.Conv1d(2, 3, 3), nn.AdaptiveMaxPool1d(1), nn.Flatten())
):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) * self.encoder(y).sin()


# --- what modules pass to each other ---------------------------------------------------


class PassesNumbers(
    Holding,
    counts=Apply(lambda x: (x > 0).sum(0).tolist()),
    multiplies=Apply(lambda x, numbers: x.sigmoid() * numbers[0] + numbers[1]),
):
    """What passes between the two are numbers in Python, and tensors in a file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiplies(x, self.counts(x)).tanh()


net(
    "passes_numbers",
    PassesNumbers,
    lambda: {"x": x(3, 2)},
    skip=("torchscript",),  # numbers are constants in a trace
    fates=computed("counts", "multiplies"),
    owners={"Greater": [("counts",)], "Sigmoid": [("multiplies",)]},
)


class Router(Holding, weight=nn.Parameter(torch.ones(3, 4))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.view(-1, 4), self.weight).softmax(-1)


class Routed(Holding, router=Router(), experts=nn.Linear(4, 3)):
    """Flattens its input, as the router inside it does: one node does both, and what it makes goes to the experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x)
        mixed: torch.Tensor = (self.experts(x.view(-1, 4)) * weights).sum(-1)
        return mixed.view(x.shape[:-1])[..., None] + x


@net(
    "equal_work_of_a_module_and_one_inside_it",
    inputs=sequence,
    fates=computed("routed", "routed.router", "routed.experts"),
    owners={"Reshape": [("routed", "routed.router"), ("routed",)], "Softmax": [("routed.router",)]},
)
class HoldsRouted(Holding, first=nn.Linear(4, 4), routed=Routed(), last=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.routed(self.first(x)))


class Scores(Holding, query=nn.Linear(4, 4)):
    """Reads the size of a tensor whose transposition is merged with the next one, and is not in the graph."""

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries = self.query(x).view(2, 3, 2, 2).transpose(1, 2)
        keys = x.view(2, 3, 2, 2).transpose(1, 2)
        if bias is None:
            bias = torch.zeros(1, 2, 3, keys.shape[-2])
        return queries @ keys.transpose(2, 3) + bias, bias


@net(
    "size_of_a_tensor_that_is_gone",
    inputs=sequence,
    fates=computed("first", "first.query", "second", "second.query"),
)
class SharesBias(Holding, first=Scores(), second=Scores()):
    """The second module adds what the first one made of that size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, bias = self.first(x, None)
        more, _ = self.second(x.sin(), bias)
        return scores * more
