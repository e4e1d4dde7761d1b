"""Checkpoints whose files have other entries than the model: transformers' own conversion is asked."""

import pytest
import torch
from safetensors import safe_open

import htp_export
from htp_export.errors import InputError
from htp_export.huggingface import example_calls
from tests.bind.test_bind import same, stored
from tests.decoders import Programs, decoder


@pytest.mark.slow
def test_experts_that_transformers_joins_are_bound_from_the_files_of_single_experts(tmp_path):
    model = decoder("mixtral")
    files = Programs(model, example_calls(model))
    (tmp_path / "old").mkdir()
    files.save(tmp_path / "old")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    model.save_pretrained(tmp_path / "tuned")
    with safe_open(tmp_path / "tuned" / "model.safetensors", "pt") as opened:
        names = set(opened.keys())
    if names >= {name for name, _ in model.named_parameters()}:
        pytest.skip("this version of transformers does not join experts")
    old = tmp_path / "old" / "model.onnx"
    bound = htp_export.bind(old, tmp_path / "tuned")
    assert any("transformers loads the checkpoint" in note for note in bound.notes)
    assert (bound.missing, bound.unbound) == ((), {})
    expected = stored(htp_export.bind(old, model).model)
    assert all(same(array, expected[name]) for name, array in stored(bound.model).items())
    before = stored(old)
    assert any(not same(array, before[name]) for name, array in expected.items())


def test_a_folder_of_another_model_is_refused_as_without_transformers(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
    htp_export.export(net, (torch.ones(1, 4),), tmp_path / "net.onnx", dynamo=False, verbose=False)
    model = decoder("llama")
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(InputError, match="has none of the"):
        htp_export.bind(tmp_path / "net.onnx", tmp_path / "tuned")
