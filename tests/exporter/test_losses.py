"""A model that is called with labels has its loss in the file, with exact owners, and as PyTorch computes it."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import htp_export
from tests.exporting import exported, quick
from tests.nets import EXPORTERS, spread
from tests.truth import inexact, nodes_of, owners_of, untagged

transformers = pytest.importorskip("transformers")

BERT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}


def called(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A small model, and inputs with labels, one of which of a language model is ignored."""
    torch.manual_seed(0)
    words = torch.randint(3, 50, (2, 8))
    labels = words.clone()
    labels[0, 0] = -100
    if name == "bert":
        config = transformers.BertConfig(**BERT)
        model = transformers.BertForSequenceClassification(config)
        labels = torch.tensor([0, 1])
    elif name == "bert-masked":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT))
    else:
        config = transformers.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2, use_cache=False)
        model = transformers.GPT2LMHeadModel(config)
    # With a mask, GPT-2 does not look for packed texts, for which TorchScript has no operator.
    mask = torch.ones_like(words)
    mask[:, -2:] = 0  # a mask of ones alone would be equal to other tensors
    return spread(model).eval(), {"input_ids": words, "attention_mask": mask, "labels": labels}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "exporter"),
    quick(
        [(name, exporter) for name in ("bert", "bert-masked", "gpt2") for exporter in EXPORTERS],
        ("bert", "torchscript"),
        ("gpt2", "dynamo"),
    ),
)
def test_a_loss_in_the_file_is_that_of_pytorch_and_the_owners_are_exact(name, exporter, tmp_path):
    model, kwargs = called(name)
    file = exported(model, kwargs, exporter, tmp_path)
    assert not untagged(file)
    assert not inexact(model, kwargs, file)
    assert htp_export.verify(model, tmp_path / "model.onnx", kwargs=kwargs).ok
    losses = [node for node in nodes_of(file) if "SoftmaxCrossEntropy" in node.op_type]
    assert [owners_of(node) for node in losses] == [("",)]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    names = [each.name for each in session.get_inputs()]
    feed = {name: kwargs[key].numpy() for name, key in zip(names, kwargs, strict=True)}
    with torch.no_grad():
        expected = model(**kwargs).loss.item()
    assert np.isclose(session.run(None, feed)[0], expected, rtol=1e-4)
