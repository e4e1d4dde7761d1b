"""Faults planted in files of real architectures: verify names the module, in the whole file and each module alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import htp_export
from tests import faults
from tests.exporting import exported, of_type
from tests.faults import Plant
from tests.nets import EXPORTERS

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {**SMALL, "vocab_size": 100},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
}

# Where a convolution was merged with its normalization, it is the normalization that has a result in the file.
PLANTED: dict[str, list[tuple[Plant, str]]] = {
    "bert": [
        (faults.weight_changed, "embeddings.position_embeddings"),
        (faults.weight_changed, "encoder.layer.1.attention.self.query"),
        (faults.matrix_transposed, "encoder.layer.1.attention.self.key"),
        (faults.bias_dropped, "encoder.layer.0.output.dense"),
        (faults.nan_planted, "encoder.layer.1.intermediate.dense"),
        (faults.epsilon_changed, "encoder.layer.0.output.LayerNorm"),
        (faults.residual_swapped, "encoder.layer.1.attention.output"),
        (faults.matrix_transposed, "pooler.dense"),
    ],
    "gpt2": [
        (faults.weight_changed, "h.1.mlp.c_fc"),
        (faults.matrix_transposed, "h.0.attn.c_proj"),
        (faults.bias_dropped, "h.1.attn.c_attn"),
        (faults.nan_planted, "h.0.ln_2"),
        (faults.epsilon_changed, "h.1.ln_1"),
        (faults.residual_swapped, "h.1"),
    ],
    "resnet": [
        (faults.weight_changed, "embedder.embedder.normalization"),
        (faults.weight_changed, "encoder.stages.1.layers.0.layer.0.normalization"),
        (faults.nan_planted, "encoder.stages.1.layers.0.shortcut.normalization"),
        (faults.residual_swapped, "encoder.stages.1.layers.0"),
    ],
}
CASES = [
    pytest.param(
        name,
        exporter,
        isolated,
        id=f"{name}-{exporter}-{'isolated' if isolated else 'whole'}",
        marks=() if exporter == "torchscript" and not isolated and name != "gpt2" else pytest.mark.slow,
    )
    for name in MODELS
    for exporter in EXPORTERS
    for isolated in (False, True)
]


@pytest.mark.parametrize(("name", "exporter", "isolated"), CASES)
def test_each_fault_is_found_in_its_module_and_nowhere_else(
    name: str, exporter: str, isolated: bool, tmp_path: Path
) -> None:
    model, kwargs = of_type(name, **MODELS[name])
    exported(model, kwargs, exporter, tmp_path)
    path = tmp_path / "model.onnx"
    right = htp_export.verify(model, path, (), kwargs, isolated=isolated)
    assert right.ok, str(right)
    for plant, module in PLANTED[name]:
        tagged = htp_export.load(path)
        plant(tagged, module)
        result = htp_export.verify(model, tagged, (), kwargs, isolated=isolated)
        assert (plant.__name__, result.wrong) == (plant.__name__, (module,))
