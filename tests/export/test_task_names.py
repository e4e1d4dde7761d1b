"""Names and dimensions of files for tasks without a cache, and their modules."""

from __future__ import annotations

from typing import Any

import pytest

from htp_export.huggingface import example_calls, load_model
from tests.decoders import Programs
from tests.huggingface.test_huggingface import CASES, VIT

IMAGE = ["batch_size", "num_channels", "height", "width"]
TEXT = ["text_batch_size", "sequence_length"]
TASKS: list[Any] = [
    ("vit", "image-classification", VIT, {"pixel_values": IMAGE}, ["logits"]),
    (
        "clip",
        "zero-shot-image-classification",
        CASES["clip"][0],
        {"input_ids": TEXT, "attention_mask": TEXT, "pixel_values": ["image_batch_size", *IMAGE[1:]]},
        ["logits_per_image", "logits_per_text", "text_embeds", "image_embeds"],
    ),
    (
        "yolos",
        "object-detection",
        {**VIT, "num_detection_tokens": 5, "image_size": [32, 32]},
        {"pixel_values": IMAGE},
        ["logits", "pred_boxes"],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task", "settings", "inputs", "outputs"), TASKS)
def test_a_task_names_its_file_and_every_module_agrees(
    name: str, task: str, settings: dict[str, Any], inputs: dict[str, list[str]], outputs: list[str]
) -> None:
    model = load_model(name, task=task, random_weights=True, overrides=settings)
    files = Programs(model, example_calls(model, task=task))
    call, program = files.calls["model"], files["model"]
    assert {name: list(call.axes[name].values()) for name in call.input_names} == inputs
    assert [value.name for value in program.model.graph.inputs] == list(call.input_names)
    assert [value.name for value in program.model.graph.outputs] == outputs == list(call.output_names)
    files.assert_agree("model")
