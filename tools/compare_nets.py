"""Nets of images that no installed library has, from their blocks: MobileNetV3-Small, YOLOv8n and torchvision's ViT.

The layers and sizes are those of the papers and of the reference implementations: https://arxiv.org/abs/1905.02244
(torchvision's ``mobilenet_v3_small`` has 2,542,856 parameters), and ultralytics' ``yolov8n.yaml`` (3,157,200);
the blocks of the ViT are those of torchvision's ``vit_b_16`` (BSD-3-Clause), with 86,567,656 parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def convolution(
    channels: int,
    out: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    act: nn.Module | None = None,
) -> nn.Sequential:
    """A convolution with batch normalization and an activation, padded to keep the size."""
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    layers = [conv, nn.BatchNorm2d(out, eps=0.001)]
    return nn.Sequential(*layers, act) if act is not None else nn.Sequential(*layers)


class SqueezeExcitation(nn.Module):
    """Scales channels by a function of their means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.act, self.gate = nn.ReLU(), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))


class InvertedResidual(nn.Module):
    """A wide depthwise convolution between two products over channels."""

    def __init__(
        self, channels: int, kernel: int, wide: int, out: int, stride: int, *, se: bool, hard: bool
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []

        def act() -> nn.Module:
            return nn.Hardswish() if hard else nn.ReLU()

        if wide != channels:
            layers.append(convolution(channels, wide, act=act()))
        layers.append(convolution(wide, wide, kernel, stride, wide, act()))
        if se:
            layers.append(SqueezeExcitation(wide, _divisible(wide // 4)))
        layers.append(convolution(wide, out))
        self.block = nn.Sequential(*layers)
        self.is_residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return x + y if self.is_residual else y


def _divisible(number: int, by: int = 8) -> int:
    """The nearest multiple, at most 10 % smaller."""
    nearest = max(by, (number + by // 2) // by * by)
    return nearest + by if nearest < 0.9 * number else nearest


# kernel, wide channels, channels, squeeze and excitation, hard swish, stride
_SMALL = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


class MobileNetV3Small(nn.Module):
    """MobileNetV3-Small for 1,000 classes; ``depth``: number of its blocks."""

    def __init__(self, depth: int = len(_SMALL)) -> None:
        super().__init__()
        self.stem = convolution(3, 16, 3, 2, act=nn.Hardswish())
        blocks: list[nn.Module] = []
        channels = 16
        for kernel, wide, out, se, hard, stride in _SMALL[:depth]:
            blocks.append(InvertedResidual(channels, kernel, wide, out, stride, se=se, hard=hard))
            channels = out
        self.blocks = nn.Sequential(*blocks)
        self.last, self.pool = (
            convolution(channels, 576, act=nn.Hardswish()),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Sequential(
            nn.Linear(576, 1024), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1024, 1000)
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.pool(self.last(self.blocks(self.stem(pixel_values))))
        y: Tensor = self.head(torch.flatten(x, 1))
        return y


def conv(channels: int, out: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    """The convolution of YOLOv8."""
    return convolution(channels, out, kernel, stride, act=nn.SiLU())


class Bottleneck(nn.Module):
    """Two convolutions, with a residual sum if ``add``."""

    def __init__(self, channels: int, *, add: bool) -> None:
        super().__init__()
        self.cv1, self.cv2 = conv(channels, channels, 3), conv(channels, channels, 3)
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C2f(nn.Module):
    """Bottlenecks whose results are all joined."""

    def __init__(self, channels: int, out: int, depth: int = 1, *, add: bool = False) -> None:
        super().__init__()
        half = out // 2
        self.cv1, self.cv2 = conv(channels, out), conv((2 + depth) * half, out)
        self.m = nn.ModuleList(Bottleneck(half, add=add) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cv1(x).chunk(2, 1))
        for bottleneck in self.m:
            parts.append(bottleneck(parts[-1]))
        y: Tensor = self.cv2(torch.cat(parts, 1))
        return y


class Pyramid(nn.Module):
    """Pooling by one window, once, twice and three times (SPPF)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = conv(channels, channels // 2), conv(channels * 2, channels)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.cv1(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        y: Tensor = self.cv2(torch.cat(parts, 1))
        return y


class Detect(nn.Module):
    """Boxes as distances from anchors, each the mean of a distribution of 16 numbers; and classes."""

    def __init__(self, image: int, channels: tuple[int, ...], classes: int = 80) -> None:
        super().__init__()
        boxes, scores = max(16, channels[0] // 4, 64), max(channels[0], min(classes, 100))
        self.classes = classes
        self.boxes = nn.ModuleList(
            nn.Sequential(conv(c, boxes, 3), conv(boxes, boxes, 3), nn.Conv2d(boxes, 64, 1))
            for c in channels
        )
        self.scores = nn.ModuleList(
            nn.Sequential(
                conv(c, scores, 3), conv(scores, scores, 3), nn.Conv2d(scores, classes, 1)
            )
            for c in channels
        )
        self.mean = nn.Conv2d(16, 1, 1, bias=False)
        self.mean.weight.data[:] = torch.arange(16.0).view(1, 16, 1, 1)
        centres, strides = [], []
        for stride in (8, 16, 32):
            side = torch.arange(image // stride) + 0.5
            y, x = torch.meshgrid(side, side, indexing="ij")
            centres.append(torch.stack((x, y)).view(2, -1))
            strides.append(torch.full((1, x.numel()), float(stride)))
        self.register_buffer("centres", torch.cat(centres, 1).unsqueeze(0))
        self.register_buffer("strides", torch.cat(strides, 1))

    def forward(self, *levels: Tensor) -> Tensor:
        batch, results = levels[0].shape[0], []
        for x, boxes, scores in zip(levels, self.boxes, self.scores, strict=True):
            results.append(torch.cat((boxes(x), scores(x)), 1).view(batch, 64 + self.classes, -1))
        box, classes = torch.cat(results, 2).split((64, self.classes), 1)
        distances = self.mean(box.view(batch, 4, 16, -1).transpose(2, 1).softmax(1))
        left, right = distances.view(batch, 4, -1).chunk(2, 1)
        low, high = self.centres - left, self.centres + right  # type: ignore[operator]
        boxes_found = torch.cat(((low + high) / 2, high - low), 1) * self.strides  # type: ignore[operator]
        return torch.cat((boxes_found, classes.sigmoid()), 1)


class Yolov8n(nn.Module):
    """YOLOv8n for 80 classes; ``image``: the side of its images."""

    def __init__(self, image: int = 640) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2), C2f(32, 32, 1, add=True))
        self.down3 = nn.Sequential(conv(32, 64, 3, 2), C2f(64, 64, 2, add=True))
        self.down4 = nn.Sequential(conv(64, 128, 3, 2), C2f(128, 128, 2, add=True))
        last = (conv(128, 256, 3, 2), C2f(256, 256, 1, add=True), Pyramid(256))
        self.down5, self.up = nn.Sequential(*last), nn.Upsample(scale_factor=2.0)
        self.up4, self.up3 = C2f(384, 128), C2f(192, 64)
        self.again4, self.out4 = conv(64, 64, 3, 2), C2f(192, 128)
        self.again5, self.out5 = conv(128, 128, 3, 2), C2f(384, 256)
        self.detect = Detect(image, (64, 128, 256))

    def forward(self, pixel_values: Tensor) -> Tensor:
        p3 = self.down3(self.stem(pixel_values))
        p4 = self.down4(p3)
        p5 = self.down5(p4)
        up4 = self.up4(torch.cat((self.up(p5), p4), 1))
        out3 = self.up3(torch.cat((self.up(up4), p3), 1))
        out4 = self.out4(torch.cat((self.again4(out3), up4), 1))
        out5 = self.out5(torch.cat((self.again5(out4), p5), 1))
        y: Tensor = self.detect(out3, out4, out5)
        return y


class EncoderBlock(nn.Module):
    """A block of a vision transformer: attention and MLP, normalized before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        y = y + x
        z: Tensor = y + self.mlp(self.ln_2(y))
        return z


class Vision(nn.Module):
    """A vision transformer with the layout of torchvision's."""

    def __init__(self, image: int, patch: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        tokens = (image // patch) ** 2 + 1
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, tokens, width))
        self.layers = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(layers)))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).permute(0, 2, 1)
        token = self.class_token.expand(x.size(0), -1, -1)
        x = torch.cat([token, x], 1) + self.positions
        y: Tensor = self.head(self.ln(self.layers(x))[:, 0])
        return y
