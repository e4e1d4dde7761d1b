"""Models of `benchmark.py export` with many small modules, and the steps in which our time goes.

With large weights, most of an export is work on weights. Here most of it is work on modules and nodes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from htp_export.exporter.capture.running import Guarded

Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def linear() -> Built:
    """One Linear: what every export takes, whatever its size."""
    return torch.nn.Linear(4, 4), {"input": torch.randn(1, 4)}


def modules(pairs: int) -> Built:
    """Pairs of a Linear and a ReLU, each in a Sequential: 500 of them have 1,000 modules without modules."""
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(pairs)]
    return torch.nn.Sequential(*layers), {"input": torch.randn(1, 4)}


def vit() -> Built:
    """ViT of 12 layers, width 192, 224 x 224."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768)
    return ViTModel(config), {"pixel_values": torch.randn(1, 3, 224, 224)}


def llama() -> Built:
    """A Llama of 12 layers, width 128, length 16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(**size, vocab_size=1000, use_cache=False)
    ids = torch.randint(0, 1000, (1, 16))
    return LlamaForCausalLM(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def swin() -> Built:
    """A small Swin: 2, 2, 2 and 2 layers of width 24 to 192, 64 x 64."""
    from transformers import SwinConfig, SwinModel

    size = {"image_size": 64, "patch_size": 2, "window_size": 4, "embed_dim": 24}
    config = SwinConfig(**size, depths=[2, 2, 2, 2], num_heads=[2, 2, 4, 4])
    return SwinModel(config), {"pixel_values": torch.randn(1, 3, 64, 64)}


def t5() -> Built:
    """The encoder of a T5, 8 layers of width 128, length 16."""
    from transformers import T5Config, T5EncoderModel

    size = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 8, "num_heads": 4}
    config = T5Config(**size, vocab_size=1000, use_cache=False)
    ids = torch.randint(0, 1000, (1, 16))
    return T5EncoderModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


MODELS: dict[str, Callable[[], Built]] = {
    "linear": linear,
    "modules100": lambda: modules(50),
    "modules": lambda: modules(500),
    "modules5000": lambda: modules(2500),
    "vit": vit,
    "llama": llama,
    "swin": swin,
    "t5": t5,
}


class Spent(NamedTuple):
    """Processor time in one step of our capture of an export, and how often it ran."""

    seconds: float
    times: int


@contextlib.contextmanager
def measured_steps() -> Iterator[dict[str, Spent]]:
    """Measure every step of the captures of exports in a ``with`` block, by the step's name.

    A step inside another one counts for the outer one. Reading the names of modules before the export, and the
    wrappers around torch's functions, are no steps.
    """
    spent: dict[str, Spent] = {}
    original = Guarded.step
    running: list[str] = []

    def step(self: Guarded, name: str, do: Callable[..., Any], *args: Any) -> Any:
        if running:
            return original(self, name, do, *args)
        running.append(name)
        start = time.process_time()
        try:
            return original(self, name, do, *args)
        finally:
            seconds, times = spent.get(name, (0.0, 0))
            spent[name] = Spent(seconds + time.process_time() - start, times + 1)
            running.pop()

    Guarded.step = step  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Guarded.step = original  # type: ignore[method-assign]
