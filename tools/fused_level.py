"""Latency of files after ``optimize --level fused``; ``tools/benchmark.py fused`` runs it.

Each model is exported under dynamo and optimised. Both files are loaded in one process for one thread, with all of
ONNX Runtime's own optimisations, and run in turn on the same inputs, in pairs; the control is the exported file loaded
twice, in pairs of the same kind. Decoders run a prompt with an empty cache, and one token with the cache of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import compare_models
import decoder_speed
import latency
import numpy as np
import onnx

import htp_export
from htp_export.runtime.generating import Decoder

ENCODERS: Mapping[str, str] = {
    "bert": "BERT-base",
    "vit": "ViT-B",
    "whisper": "Whisper-tiny encoder",
    "resnet": "ResNet-50",
    "mobilenet": "MobileNetV2",
}
"""Name here → name of a model in compare_models.py."""

MODELS = (*decoder_speed.SHAPES, *ENCODERS)

_PROMPT = 128

Feed = dict[str, Any]


def exported(name: str, small: bool, folder: Path) -> tuple[Path, dict[str, Feed]]:
    """The file of a model, and what it is run on: name of a run → inputs."""
    if name in ENCODERS:
        file = folder / "model.onnx"
        _, inputs = compare_models.export(
            ENCODERS[name], "dynamo", "small" if small else "real", str(file)
        )
        return file, {"forward": {key: value.numpy() for key, value in inputs.items()}}
    decoder_speed.write_model(name, "small" if small else "100m", folder / "transformers")
    decoder_speed.export(folder / "transformers", folder / "exported")
    file = folder / "exported" / "model.onnx"
    decoder = Decoder.of(htp_export.load(file).model)
    first = decoder.first_feed(np.random.default_rng(0).integers(3, 2000, (1, _PROMPT)))
    outputs = list(decoder.cache.values())
    past = dict(zip(decoder.cache, latency.session(file).run(outputs, first), strict=True))
    token = past | decoder.tokens(np.array([[5]]), _PROMPT + 1)
    return file, {f"prefill, {_PROMPT} tokens": first, "decode, 1 token": token}


def run(names: Sequence[str], pairs: int, small: bool) -> None:
    """Print a table with a row for each run of each model."""
    print(
        "| model | nodes | run | fused / exported | A/A | |\n|---|---|---|---|---|---|", flush=True
    )
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            file, feeds = exported(name, small, Path(temporary))
            fused = Path(temporary) / "fused.onnx"
            htp_export.optimize(file, fused, level="fused", external_data=f"{fused.name}.data")
            nodes = " → ".join(
                str(len(onnx.load(each, load_external_data=False).graph.node))
                for each in (file, fused)
            )
            base, control, other = (latency.session(each) for each in (file, file, fused))
            for what, feed in feeds.items():
                same = latency.paired(latency.timed(feed), base, control, pairs)
                ratio = latency.paired(latency.timed(feed), base, other, pairs)
                cells = (
                    name,
                    nodes,
                    what,
                    latency.shown(ratio),
                    latency.shown(same),
                    latency.difference(ratio, same),
                )
                print(f"| {' | '.join(cells)} |", flush=True)
