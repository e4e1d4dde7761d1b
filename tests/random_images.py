"""What random networks over images, tensors of batch, channels, height and width, are made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.random_sequences import EPSILON, inputs  # noqa: F401 # one or two tensors, too

SHAPE = (2, 4, 8, 8)
OPEN = {name: {0: "batch", 2: "height", 3: "width"} for name in "xy"}
DIMS = {
    "batch": torch.export.Dim.AUTO,
    **{name: 4 * torch.export.Dim(name) for name in ("height", "width")},
}


class Added(nn.Sequential):
    """A residual block, with layers on its shortcut or without."""

    def __init__(self, *layers: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__(*layers)
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        made = x
        for name, layer in self.named_children():
            made = layer(made) if name != "shortcut" else made
        return functional.relu(made + self.shortcut(x)) - 0.1


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.reduce, self.expand = (
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(4, 2, 1),
            nn.Conv2d(2, 4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (
            x * self.expand(functional.silu(self.reduce(self.squeeze(x)), inplace=True)).sigmoid()
        )


class UNet(nn.Module):
    """Two levels down and up again, with skips, and its features."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)])
        self.up = nn.ModuleDict(
            {"2": nn.ConvTranspose2d(6, 6, 2, stride=2), "1": nn.Upsample(scale_factor=2)}
        )
        self.mix = nn.ModuleList([nn.Conv2d(12, 6, 1), nn.Conv2d(10, 4, 1)])
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        skips = [x]
        for layer in self.down:
            skips.append(layer(self.pool(skips[-1])).tanh())
        made = skips.pop()
        for up, mix in zip(self.up.values(), self.mix, strict=True):
            made = mix(torch.cat((up(made), skips.pop()), 1))
        return made


class ChannelsLast(nn.Module):
    """A norm or a projection over channels, which stand last for it, as in ConvNeXt."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.gamma = nn.Sequential(*layers), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.gamma * self.layers(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class Windows(nn.Module):
    """Attention inside of windows that may be shifted, as in Swin, with a bias for each place."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.all, self.out = shift, nn.Linear(4, 12), nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.zeros(2, 16, 16))

    def forward(self, given: Tensor) -> Tensor:
        x = given.permute(0, 2, 3, 1)
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        batch, height, width, _ = x.shape
        windows = (
            x.view(batch, height // 4, 4, width // 4, 4, 4)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, 16, 4)
        )
        query, key, value = self.all(windows).view(-1, 16, 3, 2, 2).permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-2, -1) * 2**-0.5 + self.bias).softmax(-1)
        made = self.out((scores @ value).transpose(1, 2).reshape(-1, 16, 4))
        made = made.view(batch, height // 4, width // 4, 4, 4, 4).permute(0, 1, 3, 2, 4, 5)
        made = made.reshape(batch, height, width, 4)
        if self.shift:
            made = torch.roll(made, (self.shift, self.shift), (1, 2))
        return given + made.permute(0, 3, 1, 2)


class Patches(nn.Module):
    """Patches as tokens behind one more, which a layer mixes, and which become an image again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Conv2d(4, 8, 4, stride=4), nn.Parameter(torch.zeros(1, 1, 8))
        self.norm, self.mix, self.back = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        patches = self.embed(x)
        tokens = patches.flatten(2).transpose(1, 2)
        tokens = torch.cat((self.first.expand(x.shape[0], -1, -1), tokens), 1)
        tokens = tokens + self.mix(self.norm(tokens).mean(1, keepdim=True))
        spread = (
            self.back(tokens[:, 1:]).transpose(1, 2).reshape(x.shape[0], 64, *patches.shape[2:])
        )
        return {"made": functional.pixel_shuffle(spread, 4)}


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised in each call."""

    def forward(self, x: Tensor) -> Tensor:
        off = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = off / (off.pow(2).mean((1, 2, 3), keepdim=True) + EPSILON).sqrt()
        return functional.conv2d(
            x, weight * 0.3, self.bias, padding=self.padding, groups=self.groups
        )


class Conditional(nn.Module):
    """A convolution whose weight is a mixture that another tensor decides, and a bias that is none of a parameter."""

    takes_two = True

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.router = nn.Parameter(torch.zeros(3, 4, 4, 3, 3)), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        shares = self.router((x if y is None else y).mean((0, 2, 3))).softmax(-1)
        weight = (shares.view(3, 1, 1, 1, 1) * self.experts).sum(0)
        return functional.conv2d(x, weight, shares.sum() * torch.ones(4), padding=1)


class PoolsBoth(nn.Module):
    """Gives what two kinds of pools give; nothing reads the places of the largest elements."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.mean = nn.MaxPool2d(3, 1, 1, return_indices=True), nn.AvgPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        made, _ = self.largest(x)
        return made, [self.mean(x)]


class Pyramid(nn.Module):
    """Features of several sizes, brought to one size."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(
            nn.Conv2d(4, 4, 3, stride=stride, padding=1) for stride in (1, 2, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        made = [side(x) for side in self.sides]
        modes = (
            {"mode": "nearest"},
            {"mode": "bilinear", "align_corners": False},
            {"mode": "nearest"},
        )
        same = [
            functional.interpolate(each, size=x.shape[2:], **mode)
            for each, mode in zip(made, modes, strict=True)
        ]
        return torch.stack(same).sum(0)


class AttendsPixels(nn.Module):
    """Linear attention between pixels, of two heads, from one projection by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Conv2d(4, 12, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        query, key, value = self.all(x).reshape(batch, 3, 2, 2, height * width).unbind(1)
        context = torch.einsum("bhdn,bhen->bhde", key.softmax(-1), value)
        made = torch.einsum("bhde,bhdn->bhen", context, query.softmax(-2))
        return self.out(made.reshape(batch, 4, height, width))


def bottleneck(*middle: nn.Module) -> list[nn.Module]:
    return [
        nn.Conv2d(4, 8, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.Hardswish(),
        *middle,
        nn.Conv2d(8, 4, 1),
    ]


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Conv2d(4, 4, 3, padding=1),
    lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
    lambda: nn.Conv2d(4, 4, (1, 3), padding="same", groups=2),
    lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2, padding_mode="reflect"),
    lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
    ),
    lambda: nn.Sequential(nn.Conv2d(4, 16, 2, stride=2), nn.PixelShuffle(2)),
    lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(16, 4, 1), nn.Upsample(scale_factor=2)),
    lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(inplace=True)),
    lambda: nn.Sequential(nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1)),
    lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(4, 4, 2)),
    lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
    lambda: nn.BatchNorm2d(4),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.InstanceNorm2d(4, affine=True),
    lambda: nn.MaxPool2d(3, 1, 1),
    lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    lambda: nn.Softmax2d(),
    lambda: nn.PReLU(4),
    nn.Hardsigmoid,
    nn.Mish,
    nn.Dropout2d,
    nn.Identity,
    lambda: Added(
        *bottleneck(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.Hardswish())
    ),
    lambda: Added(
        *bottleneck(), shortcut=nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
    ),
    lambda: ChannelsLast(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
    lambda: Standardised(4, 4, 3, padding=1),
    lambda: Windows(0),
    lambda: Windows(2),
    AttendsPixels,
    Conditional,
    Patches,
    PoolsBoth,
    Pyramid,
    SqueezeExcite,
    UNet,
]


def written(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, :, ::2, 1:] = y[:, :, 1::2, 1:]
    return x


def scaled_in_part(x: Tensor, y: Tensor) -> Tensor:
    x = x * 0.7
    x[:, 1:3].mul_(y[:, :2].sigmoid())
    return x.add_(y)


def with_coordinates(x: Tensor, y: Tensor) -> Tensor:
    rows, columns = (torch.arange(size, dtype=x.dtype) / size for size in x.shape[2:])
    return x + rows[:, None] * columns


FUNCTIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    written,
    scaled_in_part,
    with_coordinates,
    lambda x, y: x + y,
    lambda x, y: x * y.sigmoid(),
    lambda x, y: torch.cat((x[:, :2], y[:, 2:]), 1),
    lambda x, y: x.flatten(1).reshape(x.shape) + 0.1,
    lambda x, y: x.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2),
    lambda x, y: x.permute(0, 2, 3, 1).softmax(-1).permute(0, 3, 1, 2) + y,
    lambda x, y: torch.roll(x, (1, -1), (2, 3)) - y,
    lambda x, y: x.flip(3),
    lambda x, y: x - x.mean((2, 3), keepdim=True),
    lambda x, y: x * functional.adaptive_avg_pool2d(y, 1),
    lambda x, y: x.amax((2, 3), keepdim=True) * 0.5 + y,
    lambda x, y: functional.interpolate(functional.max_pool2d(x, 2), scale_factor=2) + y,
    lambda x, y: functional.avg_pool2d(functional.pad(x, (1, 1, 1, 1), mode="reflect"), 3, 1),
    lambda x, y: (
        (x.flatten(2).transpose(1, 2) @ (x.flatten(2) @ y.flatten(2).transpose(1, 2)).tanh())
        .transpose(1, 2)
        .reshape(x.shape)
    ),
    lambda x, y: x / (x.pow(2).sum(1, keepdim=True) + EPSILON).sqrt(),
    lambda x, y: torch.where(x.mean(1, keepdim=True) > y, x, y * 0.5),
    lambda x, y: functional.pixel_shuffle(functional.pixel_unshuffle(x, 2).flip(1), 2),
]


class Flat(nn.Module):
    """A head that flattens what is pooled."""

    def __init__(self, pool: nn.Module, size: int) -> None:
        super().__init__()
        self.pool, self.dropout, self.classes = pool, nn.Dropout(), nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Any:
        return self.classes(self.dropout(torch.flatten(self.pool(x), 1)))


EMBEDS = LAYERS

HEADS: list[Callable[[nn.Module], nn.Module]] = [
    lambda _: Flat(nn.AdaptiveAvgPool2d(1), 4),
    lambda _: Flat(nn.AdaptiveMaxPool2d(1), 4),
    lambda _: nn.Sequential(
        nn.Conv2d(4, 3, 3, padding=1), nn.Upsample(scale_factor=2, mode="bilinear")
    ),
    lambda _: nn.Sequential(nn.Conv2d(4, 3, 1), nn.Sigmoid()),
]
