"""The nets that the table of nodes is about have the layers of their originals."""

import pytest

from tools import compare_models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("EfficientNet-B0", 5_288_548),  # torchvision's efficientnet_b0
        ("MobileNetV3-S", 2_542_856),  # torchvision's mobilenet_v3_small
        ("YOLOv8n", 3_157_200),  # ultralytics' yolov8n.yaml
        # openai/whisper-base: 19,822,592 with the positions, which are a parameter here
        ("Whisper-base encoder", 20_590_592),
    ],
)
def test_a_net_has_as_many_parameters_as_its_original(name, parameters):
    model, _ = compare_models.build(name, "real")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
