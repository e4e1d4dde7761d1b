"""Tiny models that generate, and one greedy loop in ONNX Runtime for the files of all of them."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM

import htp_export
from htp_export.format.leaves import tensors_in
from htp_export.huggingface import load_model

CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
"""What models call their cache: ``past_key_values`` before transformers 5.24."""

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "llama": TEXT,
    "qwen3": {**TEXT, "head_dim": 8},
    "mistral": {**TEXT, "sliding_window": 4},  # shorter than what is generated: the window counts
    "gemma": {**TEXT, "head_dim": 8},
    "phi": TEXT,
    "mixtral": {**TEXT, "num_local_experts": 4},
    # ALiBi, no positions
    "mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
}


GENERATED = 20
"""Tokens that GenAI appends to a text."""


class Config:
    """What is asked of a config of transformers."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)

    def to_json_string(self) -> str:
        return json.dumps(self.__dict__)


WIDTHS = {"d_model": 32, "vocab_size": 64}
HALVES = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
HALVES |= {
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5": {
        **WIDTHS,
        "decoder_start_token_id": 0,
        "num_layers": 2,
        "d_kv": 8,
        "num_heads": 4,
        "d_ff": 48,
    },
    "bart": {
        **WIDTHS,
        **HALVES,
        "max_position_embeddings": 64,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
    "whisper": {
        **WIDTHS,
        **HALVES,
        "max_source_positions": 20,
        "max_target_positions": 40,
        "num_mel_bins": 8,
        "decoder_start_token_id": 3,
    },
    "moonshine": {  # its encoder returns a class of its own, and its decoder reads that
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 2),
        **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
}


def encoder_decoder(name: str, **sizes: int) -> Any:
    base = (
        "automatic-speech-recognition"
        if name in ("whisper", "moonshine")
        else "text2text-generation"
    )
    overrides = ENCODER_DECODERS[name] | sizes
    overrides = {
        key: value
        for key, value in overrides.items()
        if (name, key) != ("t5", "decoder_start_token_id")
    }
    return load_model(name, task=f"{base}-with-past", random_weights=True, overrides=overrides)


def decoder(name: str, **options: Any) -> Any:
    return load_model(
        name,
        task="text-generation-with-past",
        random_weights=True,
        overrides=DECODERS[name],
        **options,
    )


class Programs(dict[str, Any]):
    """The files of a model by name, each exported when a test first asks for it.

    Args:
        model: The model.
        calls: Name → the call that the file is exported from.
    """

    def __init__(self, model: Any, calls: Mapping[str, Any]) -> None:
        self.model, self.calls = model, dict(calls)

    def __missing__(self, name: str) -> Any:
        call = self.calls[name]
        given = [
            tensor.shape
            for kwargs in (call.kwargs, *call.runs.values())
            for tensor in tensors_in(kwargs)
        ]
        with call.exporting():
            program = htp_export.export(call.model, verbose=False, **call.options)
        kept = [
            tensor.shape
            for kwargs in (call.kwargs, *call.runs.values())
            for tensor in tensors_in(kwargs)
        ]
        assert kept == given, "the export changed the cache of the example"
        call.name_dimensions(program.model.graph)
        return self.setdefault(name, program)

    def session(self, name: str) -> Any:
        return onnxruntime.InferenceSession(self[name].model_proto.SerializeToString())

    def save(self, folder: Path) -> dict[str, Path]:
        """Name → file."""
        files = {name: folder / f"{name}.onnx" for name in self.calls}
        for name, file in files.items():
            self[name].save(file)
        return files

    def assert_agree(self, name: str) -> None:
        """Every module of a file agrees with PyTorch in each of its runs, and all that the file returns is compared."""
        call, program = self.calls[name], self[name]
        with call.adapted():
            for run, kwargs in call.runs.items():
                # a model adds to the cache that it is given, and the next call has the same again
                for _ in range(2):
                    result = htp_export.verify(call.model, program, kwargs=kwargs)
                    assert result.ok, f"{name}, {run}: {result.summary}"
                    assert len(result.modules[""].calls[0].outputs) == len(call.output_names)


def teach_with_outliers(
    model: Any, tokens: int = 64, scale: float = 200.0, head: bool = False
) -> None:
    """Let a Llama learn what follows each of the first tokens, with some activations that are far larger than others.

    The norm before the first MLP makes every 16th channel larger by ``scale``, and the MLP reads it smaller by as much,
    so that the model computes the same; with ``head``, so do the last norm and what computes the logits.
    """
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    following = torch.randperm(tokens)
    model.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with torch.enable_grad():
        for _ in range(60):
            ids = torch.randint(0, tokens, (128, 2))
            logits = model(input_ids=ids, use_cache=False).logits
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), following[ids].flatten()
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.requires_grad_(False)
    layer = model.model.layers[0]
    planted = [(layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj])]
    for norm, products in [*planted, (model.model.norm, [model.lm_head])] if head else planted:
        norm.weight[::16] *= scale
        for product in products:
            product.weight[:, ::16] /= scale


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


def nothing_past(session: Any, batch: int) -> dict[str, Any]:
    """An empty cache, as optimum and transformers.js make it: sizes that the file leaves open are 0."""
    return {
        value.name: np.zeros(
            [
                batch if place == 0 else size if isinstance(size, int) else 0
                for place, size in enumerate(value.shape)
            ],
            np.float32,
        )
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }


def greedy(session: Any, ids: npt.NDArray[np.int64], tokens: int = 20) -> list[list[int]]:
    """What a file with a cache appends: once all tokens with an empty cache, then one token at a time."""
    feed = nothing_past(session, ids.shape[0])
    taken, outputs = (
        {value.name for value in session.get_inputs()},
        [value.name for value in session.get_outputs()],
    )
    new, made = ids, ids[:, :0]
    for _ in range(tokens):
        length = ids.shape[1] + made.shape[1]
        feed["input_ids"] = new
        feed["attention_mask"] = np.ones((ids.shape[0], length), np.int64)
        feed["position_ids"] = np.tile(np.arange(length - new.shape[1], length), (ids.shape[0], 1))
        found = dict(
            zip(
                outputs,
                session.run(outputs, {k: v for k, v in feed.items() if k in taken}),
                strict=True,
            )
        )
        new = next_tokens(found["logits"])
        made = np.concatenate([made, new], 1)
        feed |= past_of(found)
    return made.tolist()


def greedy_right_padded(
    session: Any, texts: list[npt.NDArray[np.int64]], tokens: int = 20
) -> list[list[int]]:
    """What a file with a cache appends to texts of different length, in one batch as GenAI runs it.

    The texts are padded on the right. The padding is masked, and stays in the cache.
    """
    lengths = np.array([len(text) for text in texts])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    new = np.zeros_like(mask)
    new[mask == 1] = np.concatenate(texts)
    feed, taken = nothing_past(session, len(texts)), {value.name for value in session.get_inputs()}
    outputs, made = [value.name for value in session.get_outputs()], []
    for step in range(tokens):
        feed |= {"input_ids": new, "attention_mask": mask}
        feed["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)[:, -new.shape[1] :]
        found = dict(
            zip(
                outputs,
                session.run(outputs, {k: v for k, v in feed.items() if k in taken}),
                strict=True,
            )
        )
        last = lengths - 1 if step == 0 else np.zeros_like(lengths)
        new = next_tokens(found["logits"][np.arange(len(texts)), last][:, None])
        made.append(new)
        mask = np.concatenate([mask, np.ones_like(new)], 1)
        feed |= past_of(found)
    return np.concatenate(made, 1).tolist()


def start_of(model: Any) -> int:
    """The token with which a decoder begins: T5's configs do not have it."""
    return int(ENCODER_DECODERS[model.config.model_type]["decoder_start_token_id"])


def generated_from(
    model: Any, inputs: Mapping[str, torch.Tensor], tokens: int = 20
) -> list[list[int]]:
    """What PyTorch's ``generate`` writes for the inputs of an encoder, after the start token."""
    config = GenerationConfig(
        decoder_start_token_id=start_of(model),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    with torch.no_grad():
        found = GenerationMixin.generate(model, **inputs, generation_config=config)
    return found[:, 1:].tolist()


def greedy_from(
    encoder: Any,
    first: Any,
    following: Any,
    inputs: Mapping[str, npt.NDArray[Any]],
    start: int,
    tokens: int = 20,
) -> list[list[int]]:
    """The same of the files: the encoder once, the decoder for the first token, and the one for those after it."""
    hidden = encoder.run(["last_hidden_state"], dict(inputs))[0]
    feed: dict[str, Any] = {"encoder_hidden_states": hidden, **nothing_past(first, hidden.shape[0])}
    if "attention_mask" in inputs:
        feed["encoder_attention_mask"] = inputs["attention_mask"]
    new, made, session = np.full((hidden.shape[0], 1), start), [], first
    for _ in range(tokens):
        feed["input_ids"] = new
        outputs = [value.name for value in session.get_outputs()]
        taken = {value.name for value in session.get_inputs()}
        found = dict(
            zip(
                outputs,
                session.run(outputs, {k: v for k, v in feed.items() if k in taken}),
                strict=True,
            )
        )
        new = next_tokens(found["logits"])
        made.append(new)
        feed |= past_of(found)
        session = following
    return np.concatenate(made, 1).tolist()


def next_tokens(logits: npt.NDArray[Any], end: int = 2) -> npt.NDArray[np.int64]:
    """The most probable token; not the end of the text: ``generate`` is told to go on, too."""
    last = logits[:, -1].astype(np.float32)
    last[:, end] = -np.inf
    return last.argmax(-1)[:, None]


def past_of(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The cache that a run returns, as inputs of the next."""
    cache = {name: value for name, value in outputs.items() if name.startswith("present.")}
    return {name.replace("present", "past_key_values"): value for name, value in cache.items()}


def generated_by_genai(
    folder: Path, texts: Any, tokens: int = GENERATED, *, together: bool = False
) -> list[list[int]]:
    """What GenAI appends to texts, one by one, or in one batch, padded with token 0; no text ends before."""
    genai: Any = pytest.importorskip(
        "onnxruntime_genai", reason="onnxruntime-genai is not installed"
    )
    model, made = genai.Model(str(folder)), []
    for batch in [texts] if together else [[text] for text in texts]:
        longest = max(map(len, batch))
        settings = genai.GeneratorParams(model)
        length = longest + tokens
        settings.set_search_options(max_length=length, min_length=length, batch_size=len(batch))
        generator = genai.Generator(model, settings)
        generator.append_tokens(
            np.stack([np.pad(text, (0, longest - len(text))) for text in batch]).astype(np.int32)
        )
        while not generator.is_done():
            generator.generate_next_token()
        made += [
            [int(token) for token in generator.get_sequence(row)[longest:]]
            for row in range(len(batch))
        ]
    return made
