#!/usr/bin/env python3
"""How often `htp_export.fingerprint` names the right family, over 40 models of transformers with random weights.

    python tools/fingerprint_accuracy.py export --folder models/   # write the files, once
    python tools/fingerprint_accuracy.py score --folder models/    # the table of docs/fingerprint.md
    python tools/fingerprint_accuracy.py score --folder models/ --half tuned

The models were drawn and split in two halves (``random.Random(0)``, shuffled within each family) before the first rule
was written. The rules were made with one half, ``TUNED``; ``HELD_OUT`` says what they are worth. Every file is looked
at twice: with its tags, and with all metadata, names of nodes and names of weights taken off.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import htp_export


@dataclass(frozen=True)
class Model:
    """A model to recognise.

    Attributes:
        family: What it is.
        overrides: Changes to its config that make it small.
        build: For what no Auto class of transformers makes.
    """

    family: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    build: Callable[[], tuple[torch.nn.Module, dict[str, Any]]] | None = None


def dit() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The diffusion transformer of Qwen2.5-Omni, which turns codes into mel spectrograms."""
    made = importlib.import_module("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
    configs = importlib.import_module("transformers.models.qwen2_5_omni.configuration_qwen2_5_omni")
    config = configs.Qwen2_5OmniDiTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16, num_embeds=50, emb_dim=32,
        look_ahead_layers=[1], look_backward_layers=[0], enc_dim=16, enc_emb_dim=12, enc_channels=[16, 16, 16, 16, 48],
        enc_attention_channels=16, enc_se_channels=16,
    )  # fmt: skip
    model = made.Qwen2_5OmniToken2WavDiTModel(config)
    return model, {
        "hidden_states": torch.randn(1, 32, 80),
        "condition_vector": torch.randn(1, 24, 80),
        "speaker_embedding": torch.randn(1, 32, 12),
        "quantized_code": torch.randint(0, 50, (1, 16)),
        "time_step": torch.tensor([0.3]),
        "apply_cfg": False,
    }


def diffusion_head() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The diffusion head of VibeVoice."""
    made = importlib.import_module("transformers.models.vibevoice.modeling_vibevoice")
    configs = importlib.import_module("transformers.models.vibevoice.configuration_vibevoice")
    config = configs.VibeVoiceDiffusionHeadConfig(hidden_size=64, num_hidden_layers=2, intermediate_size=96)
    kinds = [kind for name, kind in vars(made).items() if name.endswith("DiffusionHead")]
    latent = getattr(config, "latent_size", None) or getattr(config, "acoustic_hidden_size", 64)
    return kinds[0](config), {
        "noisy_images": torch.randn(2, latent),
        "timesteps": torch.tensor([3.0, 5.0]),
        "condition": torch.randn(2, 64),
    }


_HEADS: dict[str, object] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
_SMALL: dict[str, object] = {**_HEADS, "intermediate_size": 128}
_TEXT: dict[str, object] = {**_SMALL, "vocab_size": 1000}
_DECODER: dict[str, object] = {**_TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
_BART: dict[str, object] = {
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
       (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))},
    "d_model": 64, "vocab_size": 1000,
}  # fmt: skip

TUNED: dict[str, Model] = {
    "mobilenet_v1": Model("CNN", {"depth_multiplier": 0.5}),
    "convnext": Model("CNN", {"depths": [1, 2, 2, 1], "hidden_sizes": [16, 32, 48, 64]}),
    "mobilenet_v2": Model("CNN", {"depth_multiplier": 0.35}),
    "electra": Model("encoder", _TEXT),
    "bert": Model("encoder", _TEXT),
    "distilbert": Model("encoder", {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 1000}),
    "qwen2": Model("decoder", _DECODER),
    "opt": Model(
        "decoder", {**_HEADS, "ffn_dim": 128, "vocab_size": 1000, "word_embed_proj_dim": 64, "pad_token_id": 1}
    ),
    "gpt2": Model(
        "decoder",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "blenderbot": Model("encoder-decoder", _BART),
    "t5": Model(
        "encoder-decoder",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "vocab_size": 1000,
        },
    ),
    "marian": Model(
        "encoder-decoder",
        {**_BART, "decoder_vocab_size": 1000, "pad_token_id": 999, "decoder_start_token_id": 999},
    ),
    "deit": Model("vision transformer", {**_SMALL, "image_size": 64}),
    "beit": Model("vision transformer", {**_SMALL, "image_size": 64, "use_relative_position_bias": True}),
    "swin": Model(
        "vision transformer",
        {"image_size": 64, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "wav2vec2": Model("speech", {**_SMALL, "conv_dim": [32] * 7}),
    "speech_to_text": Model("speech", {**_BART, "conv_channels": 64}),
    "rwkv": Model(
        "recurrent",
        {
            "hidden_size": 64,
            "attention_hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": 1000,
            "intermediate_size": 128,
        },
    ),
    "mixtral": Model("mixture", {**_DECODER, "num_local_experts": 4}),
    "qwen2_5_omni_dit": Model("diffusion-like", build=dit),
}

HELD_OUT: dict[str, Model] = {
    "resnet": Model("CNN", {"embedding_size": 16, "hidden_sizes": [32, 64, 96, 128], "depths": [2, 2, 2, 2]}),
    "efficientnet": Model(
        "CNN", {"image_size": 96, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
    ),
    "regnet": Model("CNN", {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 2, 2, 1], "groups_width": 16}),
    "modernbert": Model(
        "encoder",
        {**_TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "deberta-v2": Model("encoder", {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "roberta": Model("encoder", _TEXT),
    "bloom": Model("decoder", {"vocab_size": 1000, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "llama": Model("decoder", {**_DECODER, "head_dim": 16}),
    "gpt_neox": Model("decoder", _TEXT),
    "bart": Model("encoder-decoder", _BART),
    "pegasus": Model("encoder-decoder", _BART),
    "m2m_100": Model("encoder-decoder", _BART),
    "segformer": Model("vision transformer", {"depths": [1, 1, 1, 1]}),
    "vit": Model("vision transformer", {**_SMALL, "image_size": 64}),
    "dinov2": Model("vision transformer", {**_HEADS, "image_size": 56}),
    "whisper": Model(
        "speech",
        {**_BART, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
    "hubert": Model("speech", {**_SMALL, "conv_dim": [32] * 7}),
    "mamba": Model("recurrent", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}),
    "olmoe": Model("mixture", {**_DECODER, "num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 2}),
    "vibevoice_diffusion": Model("diffusion-like", build=diffusion_head),
}  # fmt: skip

HALVES = {"tuned": TUNED, "held out": HELD_OUT}


def built(name: str, model: Model) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in eval mode, and keyword arguments for one call of it."""
    from htp_export.huggingface import example_inputs, load_model

    if model.build is not None:
        torch.manual_seed(0)
        made, inputs = model.build()
        return made.eval(), inputs
    made = load_model(name, random_weights=True, overrides=model.overrides)
    if hasattr(made.config, "_experts_implementation"):
        made.config._experts_implementation = "batched_mm"  # the default has no translation to ONNX
    inputs = dict(example_inputs(made))
    if "decoder_input_ids" in inputs:
        inputs["decoder_input_ids"] %= 1000  # the vocabulary is smaller than the config's special tokens know
    return made, inputs


def export(folder: Path, names: list[str], exporters: list[str]) -> int:
    """Write the files that are not there, by the first exporter that can; how many could not be exported."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, model in {**TUNED, **HELD_OUT}.items():
        file = folder / f"{name}.onnx"
        if file.exists() or (names and name not in names):
            continue
        start = time.perf_counter()
        for exporter in exporters:
            try:
                net, inputs = built(name, model)
                htp_export.export(net, (), file, kwargs=inputs, dynamo=exporter == "dynamo", verbose=False)
            except Exception as error:
                traceback.print_exc(limit=-2)
                print(f"{name}: {exporter}: {type(error).__name__}", flush=True)
            else:
                seconds = time.perf_counter() - start
                print(f"{name}: {exporter}, {seconds:.1f} s", flush=True)
                break
        failed += not file.exists()
    return failed


def score(folder: Path, halves: list[str], as_json: bool) -> int:
    """Print one row for each model, and how many are right; how many are wrong."""
    rows = []
    for half in halves:
        for name, model in HALVES[half].items():
            file = folder / f"{name}.onnx"
            if not file.exists():
                rows.append({"half": half, "model": name, "family": model.family, "tagged": None, "bare": None})
                continue
            tagged = htp_export.fingerprint(file)
            bare = htp_export.fingerprint(stripped(file))
            rows.append(
                {
                    "half": half,
                    "model": name,
                    "family": model.family,
                    "tagged": tagged.family,
                    "bare": bare.family,
                    "blocks": [f"{block.count} x {block.name}" for block in tagged.blocks[:1]],
                    "bare blocks": [f"{block.count} x {block.nodes} nodes" for block in bare.blocks[:1]],
                }
            )
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print("| half | model | family | with tags | bare | largest block |\n|---|---|---|---|---|---|")
        for row in rows:
            said = [row[key] if row[key] == row["family"] else f"**{row[key]}**" for key in ("tagged", "bare")]
            block = ", ".join(row.get("blocks", [])).replace(" x ", " × ")  # noqa: RUF001 - "times"
            print(f"| {row['half']} | {row['model']} | {row['family']} | {said[0]} | {said[1]} | {block} |")
        for half in halves:
            ours = [row for row in rows if row["half"] == half]
            right = {key: sum(row[key] == row["family"] for row in ours) for key in ("tagged", "bare")}
            print(f"\n{half}: {right['tagged']} of {len(ours)} right with tags, {right['bare']} without")
    return sum(row[key] != row["family"] for row in rows for key in ("tagged", "bare"))


def stripped(file: Path) -> Any:
    """The model of a file without metadata, and with no names that could tell anything."""
    tagged = htp_export.load(file)
    model = tagged.model
    model.metadata_props.clear()
    for number, node in enumerate(tagged.nodes):
        node.metadata_props.clear()
        node.name = f"n{number}"
        for output in node.outputs:
            output.metadata_props.clear()
    for number, value in enumerate(list(model.graph.inputs)):
        value.name = f"i{number}"
    for number, value in enumerate(list(model.graph.initializers.values())):
        value.name = f"w{number}"
    model.graph.name = "g"
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["export", "score"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--exporters", nargs="+", default=["torchscript", "dynamo"], choices=["torchscript", "dynamo"])
    parser.add_argument("--half", choices=list(HALVES), action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.what == "export":
        return export(options.folder, options.models, options.exporters)
    return score(options.folder, options.half or list(HALVES), options.json)


if __name__ == "__main__":
    sys.exit(main())
