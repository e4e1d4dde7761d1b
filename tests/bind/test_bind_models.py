"""bind against new exports, on small models of many families: each tensor is equal, bit for bit, or listed.

``tools/bind_models.py`` prints the same as a table.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import htp_export
from htp_export.errors import HtpExportError

pytest.importorskip("transformers")

from tools.bind_models import (
    EXPORTERS,
    NAMES,
    OF_OTHER_TOOLS,
    STEPS,
    Outcome,
    Pair,
    is_same,
    seeded,
    silent,
    stored,
)

QUICK = ("bert", "dynamo")


def cases() -> Iterator[object]:
    for name in NAMES:
        for exporter in EXPORTERS:
            marks = () if (name, exporter) == QUICK else pytest.mark.slow
            yield pytest.param(name, exporter, marks=marks, id=f"{name}-{exporter}")


def outcomes(name: str, exporter: str, folder: Path) -> Iterator[tuple[str, list[Outcome]]]:
    with silent():
        try:
            pair = Pair(name, exporter, folder)
        except Exception as error:  # torch does not export it
            pytest.skip(f"{name} is not exported: {type(error).__name__}")
        for step in STEPS:
            try:
                yield step, [*pair.outcomes(step)]
            except HtpExportError:  # the model has no layer for it
                continue


@pytest.mark.long
@pytest.mark.parametrize(("name", "exporter"), [*cases()])
def test_no_tensor_of_a_descendant_differs_from_a_new_export_in_silence(name, exporter, tmp_path):
    for step, found in outcomes(name, exporter, tmp_path):
        for each in found:
            assert each.wrong == (), f"{step}: {each.wrong[:5]}"
        if step in OF_OTHER_TOOLS and not any(each.listed for each in found):
            assert sum(each.computed for each in found) > 0


@pytest.mark.slow
@pytest.mark.parametrize("tool", sorted(OF_OTHER_TOOLS))
def test_nearly_all_bytes_after_other_tools_are_bound(tool, tmp_path):
    total = listed = 0
    for name in ("bert", "gpt2", "llama", "opt", "vit", "dinov2", "convnext", "resnet"):
        for exporter in EXPORTERS:
            folder = tmp_path / f"{name}-{exporter}"
            folder.mkdir()
            with silent():
                found = [*Pair(name, exporter, folder).outcomes(tool)]
            assert not any(each.wrong for each in found)
            total += sum(each.bytes for each in found)
            listed += sum(each.listed_bytes for each in found)
    assert listed < 0.02 * total


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_a_checkpoint_in_bfloat16_is_that_of_load_state_dict_and_an_export(name, tmp_path):
    with silent():
        pair = Pair(name, "dynamo", tmp_path)
        state = {
            entry: each.bfloat16() if each.is_floating_point() else each
            for entry, each in seeded(pair.models[0], 3).state_dict().items()
        }
        loaded = pair.models[0]
        loaded.load_state_dict(state)
        htp_export.export(
            loaded, (), tmp_path / "3.onnx", kwargs=pair.inputs, dynamo=True, verbose=False
        )
    assert all(each.dtype == torch.bfloat16 for each in state.values() if each.is_floating_point())
    found = stored(htp_export.bind(pair.files[0], state).model)
    expected = stored(tmp_path / "3.onnx")
    assert found.keys() == expected.keys()
    assert all(is_same(found[entry][0], expected[entry][0]) for entry in expected)


@pytest.mark.slow
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_the_map_of_a_unet_contains_that_by_hashes_of_half_floats(exporter, tmp_path):
    """NVIDIA's Diffusion demo maps an initializer to the entry with the same fp16 bytes, also transposed."""
    pytest.importorskip("diffusers")
    from tools.sweep_models import diffusers_model

    with silent():
        model, inputs = diffusers_model("UNet2DConditionModel")
        model = seeded(model, 1)
        file = tmp_path / "unet.onnx"
        htp_export.export(
            model, (), file, kwargs=inputs, dynamo=exporter == "dynamo", verbose=False
        )
    by_bytes: dict[bytes, str] = {}
    for name, entry in model.state_dict().items():
        half = entry.numpy().astype(np.float16)
        by_bytes[half.tobytes()] = by_bytes[half.T.tobytes()] = name
    ours = htp_export.bind(file, model).map("tensorrt")
    by_hash = {}
    for name, (array, _) in stored(file).items():
        if array.dtype != np.float32:
            continue
        with np.errstate(over="ignore"):
            entry = by_bytes.get(array.astype(np.float16).tobytes())
        if entry is not None:
            by_hash[name] = entry
    assert len(by_hash) > 100
    assert {name: ours.get(name) for name in by_hash} == {
        name: [entry] for name, entry in by_hash.items()
    }
    print(exporter, len(by_hash), "by hash,", len(ours), "by recipe")
