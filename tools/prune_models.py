#!/usr/bin/env python3
"""Channels removed from every kind of model, compared with PyTorch: the table of docs/prune.md.

    python tools/prune_models.py                  # all models, as a table
    python tools/prune_models.py --only resnet lstm

Each model is exported, a quarter of all channels that can be cut is cut out, and ONNX Runtime's outputs are compared
with those of the PyTorch model without these channels. That model is made by the recipes in the file, which say which
rows and columns of each parameter stay. With torch-pruning installed, its ``MetaPruner`` prunes each model, too.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

import htp_export
from htp_export.format import tags
from htp_export.huggingface import load_model

Kept = dict[str, list[np.ndarray]]


def conv(
    read: int, computed: int, size: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A convolution, normalised."""
    layer = nn.Conv2d(read, computed, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(computed))


class DenseNet(nn.Module):
    """Each layer reads what all layers before it compute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * k) for k in range(4))
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * k, 4, 3, padding=1) for k in range(4))
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return self.head(F.relu(x).mean((2, 3)))


def shuffled(x: torch.Tensor, groups: int) -> torch.Tensor:
    b, c, h, w = x.shape
    return x.view(b, groups, c // groups, h, w).transpose(1, 2).reshape(b, c, h, w)


class ShuffleUnit(nn.Module):
    """ShuffleNet v2: one half of the channels goes through layers, and then all are shuffled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.layers = nn.Sequential(
            conv(half, half, 1), nn.ReLU(), conv(half, half, groups=half), conv(half, half, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = self.layers[0][0].weight.shape[1]  # a half; other shares of both halves may be cut
        first, second = x.split([x.shape[1] - taken, taken], 1)
        return shuffled(torch.cat([first, F.relu(self.layers(second))], 1), 2)


class GroupedShuffleUnit(nn.Module):
    """ShuffleNet v1: grouped convolutions, with a shuffle between them."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.first, self.depthwise = (
            conv(width, width, 1, groups=groups),
            conv(width, width, groups=width),
        )
        self.last = conv(width, width, 1, groups=groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = shuffled(F.relu(self.first(x)), self.groups)
        return F.relu(x + self.last(self.depthwise(inner)))


def classifier(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


class Inverted(nn.Module):
    """A block of MobileNetV3: expanded, depthwise, squeezed and excited."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(conv(width, inner, 1), nn.Hardswish())
        self.depthwise = nn.Sequential(conv(inner, inner, groups=inner), nn.Hardswish())
        self.squeeze, self.excite = nn.Conv2d(inner, 8, 1), nn.Conv2d(8, inner, 1)
        self.project = conv(inner, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.depthwise(self.expand(x))
        scale = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(inner, 1)))))
        return x + self.project(inner * scale)


class MixerBlock(nn.Module):
    """Products along the tokens, and then along the channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(tokens, 12), nn.GELU(), nn.Linear(12, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.blocks = nn.Sequential(*(MixerBlock(16, 16) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))


class Recurrent(nn.Module):
    """A classifier of words, by the mean of the hidden states."""

    def __init__(self, kind: type[nn.RNNBase], layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.rnn = kind(12, 16, num_layers=layers, bidirectional=bidirectional, batch_first=True)
        self.head = nn.Linear(32 if bidirectional else 16, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(words))[0].mean(1))


class UNet(nn.Module):
    """Two steps down and up, with what was computed before beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList((conv(3, 8), conv(8, 16), conv(16, 32)))
        self.up = nn.ModuleList((nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)))
        self.merge = nn.ModuleList((conv(32, 16), conv(16, 8)))
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.down[0](x))
        second = F.relu(self.down[1](F.max_pool2d(first, 2)))
        x = F.relu(self.down[2](F.max_pool2d(second, 2)))
        x = F.relu(self.merge[0](torch.cat([self.up[0](x), second], 1)))
        return self.head(F.relu(self.merge[1](torch.cat([self.up[1](x), first], 1))))


def espcn() -> nn.Module:
    """Two steps of PixelShuffle; the channels of the first can be cut."""
    return nn.Sequential(
        *(
            nn.Conv2d(1, 16, 5, padding=2),
            nn.Tanh(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.PixelShuffle(2),
            nn.Tanh(),
        ),
        *(
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 4, 3, padding=1),
            nn.PixelShuffle(2),
        ),
    )


def of_transformers(
    kind: str, task: str | None = None, attention: str | None = None, **overrides: object
) -> Callable[[], nn.Module]:
    return lambda: load_model(
        kind, task=task, random_weights=True, overrides=overrides, attn_implementation=attention
    )


def image(size: int = 32, channels: int = 3) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(2, channels, size, size),)


def words() -> tuple[torch.Tensor, ...]:
    return (torch.randint(1, 30, (2, 7)),)


Model = tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]

_TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 30,
}
_VISION = {
    "image_size": 32,
    "patch_size": 8,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
}
_CLASSES = "image-classification"

MODELS: dict[str, Model] = {
    "ResNet": (
        of_transformers(
            "resnet",
            _CLASSES,
            embedding_size=8,
            hidden_sizes=[16, 24],
            depths=[2, 2],
            layer_type="basic",
        ),
        image(),
    ),
    "MobileNetV2": (of_transformers("mobilenet_v2", _CLASSES, depth_multiplier=0.35), image(64)),
    "MobileNetV3": (
        lambda: classifier(conv(3, 12), Inverted(12, 24), Inverted(12, 36), width=12),
        image(),
    ),
    "DenseNet": (DenseNet, image()),
    "RegNet": (
        of_transformers(
            "regnet",
            _CLASSES,
            embedding_size=8,
            hidden_sizes=[16, 32],
            depths=[1, 2],
            groups_width=8,
            layer_type="y",
        ),
        image(),
    ),
    "ShuffleNet v1": (
        lambda: classifier(
            conv(3, 36), GroupedShuffleUnit(36, 3), GroupedShuffleUnit(36, 3), width=36
        ),
        image(),
    ),
    "ShuffleNet v2": (
        lambda: classifier(conv(3, 16), ShuffleUnit(16), ShuffleUnit(16), width=16),
        image(),
    ),
    "ConvNeXt": (
        of_transformers(
            "convnext", _CLASSES, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], image_size=32
        ),
        image(),
    ),
    "ViT": (of_transformers("vit", _CLASSES, intermediate_size=48, **_VISION), image()),
    "Swin": (
        of_transformers(
            "swin",
            _CLASSES,
            "eager",
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        image(),
    ),
    "MLP-Mixer": (Mixer, image()),
    "LSTM": (lambda: Recurrent(nn.LSTM, 2, True), words),
    "GRU": (lambda: Recurrent(nn.GRU, 2, False), words),
    "ESPCN": (espcn, image(8, 1)),
    "BERT": (of_transformers("bert", "text-classification", **_TEXT), words),
    "Llama": (
        of_transformers("llama", "text-generation", num_key_value_heads=2, head_dim=8, **_TEXT),
        words,
    ),
    "U-Net": (UNet, image()),
}


# --- the PyTorch model without the channels ---------------------------------------------------------------------------


def elements(recipe: Any, numbers: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The elements of parameters that each element of an initializer is made of, by their numbers."""
    if isinstance(recipe, str):
        return [numbers[recipe]] if recipe in numbers else []
    if not isinstance(recipe, list) or recipe[0] in ("constant", "computed"):
        return []
    word, *rest = recipe
    if word in ("add", "sub", "mul", "div", "equal"):
        found = [array for each in rest for array in elements(each, numbers)]
        return list(np.broadcast_arrays(*found)) if found else []
    if word == "concat":
        parts = [elements(each, numbers) for each in rest[:-1]]
        return [np.concatenate(arrays, rest[-1]) for arrays in zip(*parts, strict=True)]
    setting = rest[1] if len(rest) > 1 else None
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "transpose": lambda array: np.transpose(array, setting or None),
        "reshape": lambda array: array.reshape(setting),
        "unsqueeze": lambda array: np.expand_dims(array, tuple(setting)),
        "squeeze": lambda array: np.squeeze(array, tuple(setting) or None),
        "expand": lambda array: np.broadcast_to(
            array, np.broadcast_shapes(array.shape, tuple(setting))
        ),
        "take": lambda array: np.take(array, setting[1], setting[0]),
        "slice": lambda array: np.take(array, range(*setting[1:]), setting[0]),
    }
    return [changes.get(word, lambda array: array)(array) for array in elements(rest[0], numbers)]


def kept_of(model: nn.Module, pruned: onnx.ModelProto) -> Kept:
    """Parameter → the indices that stay of each of its axes, by the recipes of a pruned file."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor.dim()}
    starts = np.cumsum([0, *(tensor.numel() for tensor in tensors.values())])
    numbers = {
        name: np.arange(tensor.numel()).reshape(tensor.shape) + start
        for (name, tensor), start in zip(tensors.items(), starts, strict=False)
    }
    stays = np.zeros(starts[-1], bool)
    for initializer in pruned.graph.initializer:
        text = {each.key: each.value for each in initializer.metadata_props}.get(tags.RECIPE)
        for array in elements(json.loads(text) if text else initializer.name, numbers):
            stays[array] = True
    kept: Kept = {}
    for name, array in numbers.items():
        places = np.nonzero(stays[array])
        if len(places[0]):
            kept[name] = [np.unique(axis) for axis in places]
    # Swin's biases of heads, which GatherND looks up: no recipe says which stay
    for name, table in tensors.items():
        attention, found, _ = name.partition(".relative_position_bias.")
        if found and table.is_floating_point():
            size = model.get_submodule(attention).head_dim
            heads = np.unique(kept[f"{attention}.q_proj.weight"][0] // size)
            kept[name] = [np.arange(table.shape[0]), heads]
    return kept


def masked(model: nn.Module, kept: Kept) -> nn.Module:
    """A copy of a model of full size, with zeros in place of the indices of its parameters that are gone.

    It computes what the smaller one computes if nothing normalises channels together, and so tells whether the
    channels that producers lose are those that consumers lose.
    """
    full = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in full.state_dict(keep_vars=True).items():
            if name in kept and not name.endswith("running_var"):
                stays = torch.zeros_like(tensor)
                stays[np.ix_(*kept[name])] = 1
                tensor *= stays
    return full.eval()


def shrink(model: nn.Module, kept: Kept) -> nn.Module:
    """A copy of a model with some indices of its parameters, and the attributes of modules that say their sizes."""
    smaller = copy.deepcopy(model)
    for path, module in list(smaller.named_modules()):
        before = {name: tensor.shape for name, tensor in module.state_dict().items()}
        held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in held:
            left = tensor.detach()
            for axis, indices in enumerate(kept.get(f"{path}.{name}" if path else name, [])):
                left = left.index_select(axis, torch.tensor(indices))
            setattr(module, name, nn.Parameter(left) if isinstance(tensor, nn.Parameter) else left)
        if isinstance(module, nn.Conv2d):
            ratio = module.weight.shape[0] / before["weight"][0]
            if module.groups > 1 and 1 in (
                before["weight"][1],
                before["weight"][0] // module.groups,
            ):  # whole groups are cut
                module.groups = round(module.groups * ratio)
        elif isinstance(module, nn.LayerNorm):
            module.normalized_shape = tuple(module.weight.shape)
        elif isinstance(module, nn.RNNBase):
            module.input_size, module.hidden_size = (
                module.weight_ih_l0.shape[1],
                module.weight_hh_l0.shape[1],
            )
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    return smaller.eval()


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One model: its weights that are smaller, those that stay, and how far outputs are from PyTorch's.

    ``spread``: The standard deviation of the outputs; ``masked``: how far they are from those of the full model with
    zeros instead, None if it normalises channels together.
    """

    name: str
    weights: int
    whole: int
    share: float
    spread: float
    difference: float
    masked: float | None


def outputs_of(model: nn.Module, args: tuple[torch.Tensor, ...]) -> np.ndarray:
    with torch.no_grad():
        found = model(*args)
    return (found if isinstance(found, torch.Tensor) else found[0]).numpy()


def compared(name: str, folder: Path, amount: float = 0.25) -> Row:
    """Cut a model of `MODELS`, and compare it with the PyTorch model without these channels."""
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model, args = spread(build()), inputs()
    file, cut = folder / "net.onnx", folder / "cut.onnx"
    htp_export.export(model, args, file, dynamo=True, verbose=False)
    result = htp_export.prune(file, {"**": f"channels:{amount}"}, cut)
    written = onnx.load(cut)
    kept = kept_of(model, written)
    smaller = shrink(model, kept)
    session = onnxruntime.InferenceSession(cut, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    found = session.run(None, {name: arg.numpy() for name, arg in zip(names, args, strict=True)})[0]
    difference = float(np.abs(found - outputs_of(smaller, args)).max())
    together = any(
        type(module).__name__.endswith(("LayerNorm", "RMSNorm")) for module in model.modules()
    )
    zeros = None if together else float(np.abs(found - outputs_of(masked(model, kept), args)).max())
    share = result.modules[""].sparsity
    return Row(
        name, len(result.cut), len(result.whole), share, float(found.std()), difference, zeros
    )


def spread(model: nn.Module) -> nn.Module:
    """The model with parameters and buffers that are all different, in eval mode."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.dim():
                values = torch.randn_like(tensor)
                inputs = tensor[0].numel()  # of each result, so that results stay of one size
                tensor.copy_(
                    values * (2 / inputs) ** 0.5 if tensor.dim() > 1 else 1 + values.abs() * 0.5
                )
    return model.eval()


def pruned_by_torch_pruning(name: str) -> str:
    """What torch-pruning's ``MetaPruner`` makes of a model of `MODELS`."""
    import torch_pruning

    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model, args = spread(build()), inputs()
    try:
        before = sum(parameter.numel() for parameter in model.parameters())
        pruner = torch_pruning.pruner.MetaPruner(
            model,
            args,
            importance=torch_pruning.importance.MagnitudeImportance(p=1),
            pruning_ratio=0.25,
        )
        pruner.step()
        outputs_of(model, args)
    except Exception as error:  # whatever stops it is what the table says
        return f"fails: {type(error).__name__}"
    return f"{1 - sum(parameter.numel() for parameter in model.parameters()) / before:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=list(MODELS), metavar="MODEL", help="Models, by their names."
    )
    parser.add_argument(
        "--torch-pruning", action="store_true", help="Only what torch-pruning does."
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [name for name in MODELS if name.lower() in [each.lower() for each in options.only]]
    for name in chosen:
        if options.torch_pruning:
            print(f"| {name} | {pruned_by_torch_pruning(name)} |", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = compared(name, Path(folder))
            except Exception as error:
                print(f"| {name} | {type(error).__name__}: {str(error)[:400]}", flush=True)
                continue
        numbers = f"{row.weights} | {row.whole} | {row.share:.0%} | {row.difference:.1e} | {row.spread:.2g}"
        zeros = "" if row.masked is None else f"{row.masked:.1e}"
        print(f"| {name} | {numbers} | {zeros} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
