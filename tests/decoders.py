"""Tiny models that generate, and one greedy loop in ONNX Runtime for the files of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from htp_export.huggingface import load_model

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    "llama": TEXT,
    "qwen3": {**TEXT, "head_dim": 8},
    "mistral": {**TEXT, "sliding_window": 4},  # shorter than what is generated: the window counts
    "gemma": {**TEXT, "head_dim": 8},
    "phi": TEXT,
    "mixtral": {**TEXT, "num_local_experts": 4},
}


def decoder(name: str, **options: Any) -> Any:
    return load_model(name, task="text-generation-with-past", random_weights=True, overrides=DECODERS[name], **options)


def prompt(length: int = 6) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).integers(3, 60, (2, length))


def generated(model: Any, ids: npt.NDArray[np.int64], tokens: int = 20) -> list[list[int]]:
    """What PyTorch's ``generate`` appends."""
    inputs = torch.from_numpy(ids)
    with torch.no_grad():
        found = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return found[:, ids.shape[1] :].tolist()


def greedy(session: Any, ids: npt.NDArray[np.int64], tokens: int = 20, end: int = 2) -> list[list[int]]:
    """What a file with a cache appends: once all tokens with an empty cache, then one token at a time."""
    feed: dict[str, Any] = {
        value.name: np.zeros(
            [
                ids.shape[0] if place == 0 else size if isinstance(size, int) else 0
                for place, size in enumerate(value.shape)
            ],
            np.float32,
        )
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    taken, outputs = {value.name for value in session.get_inputs()}, [value.name for value in session.get_outputs()]
    new, made = ids, ids[:, :0]
    for _ in range(tokens):
        length = ids.shape[1] + made.shape[1]
        feed["input_ids"] = new
        feed["attention_mask"] = np.ones((ids.shape[0], length), np.int64)
        feed["position_ids"] = np.tile(np.arange(length - new.shape[1], length), (ids.shape[0], 1))
        found = dict(zip(outputs, session.run(outputs, {k: v for k, v in feed.items() if k in taken}), strict=True))
        logits = found["logits"][:, -1].copy()
        logits[:, end] = -np.inf  # generate is told to go on, too
        new = logits.argmax(-1)[:, None]
        made = np.concatenate([made, new], 1)
        feed |= {
            name.replace("present", "past_key_values"): value for name, value in found.items() if "present" in name
        }
    return made.tolist()
