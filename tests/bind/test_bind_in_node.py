"""Files without weights of their own in transformers.js, which runs them with onnxruntime-node."""

from pathlib import Path

import pytest
import torch

import htp_export
from tests.export.test_transformers_js import node, run_node

pytestmark = pytest.mark.slow

PROGRAM = """
import { createRequire } from "node:module";
import path from "node:path";
const folder = process.argv[2];
const library = createRequire(path.join(process.cwd(), "package.json"))("@huggingface/transformers");
library.env.allowRemoteModels = false;
library.env.localModelPath = path.dirname(folder) + path.sep;
const model = await library.AutoModel.from_pretrained(path.basename(folder), { dtype: "fp32" });
const row = (value) => new library.Tensor("int64", BigInt64Array.from({ length: 8 }, value), [1, 8]);
const made = await model({
  input_ids: row((_, index) => BigInt(index)),
  attention_mask: row(() => 1n),
  token_type_ids: row(() => 0n),
});
console.log(JSON.stringify(Array.from(made.last_hidden_state.data)));
"""


def bert(folder: Path) -> torch.nn.Module:
    """A tiny BERT, with its checkpoint in a folder."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100,
        max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dynamo", [True, False])
def test_transformers_js_runs_a_file_that_refers_to_the_checkpoint(dynamo, tmp_path):
    node()
    folder = tmp_path / "model"
    model, file = bert(folder), folder / "onnx" / "model.onnx"
    file.parent.mkdir()
    ids = torch.arange(8).reshape(1, 8)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }
    htp_export.export(
        model,
        (),
        file,
        kwargs=inputs,
        input_names=[*inputs],
        output_names=["last_hidden_state"],
        dynamo=dynamo,
        weights=str(folder),
        verbose=False,
    )
    assert {path.name for path in file.parent.iterdir()} == {
        "model.onnx", "model.onnx.data", "model.safetensors",
    }  # fmt: skip
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state.flatten()
    program = tmp_path / "program.mjs"
    program.write_text(PROGRAM)
    found = torch.tensor(run_node(program, folder))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
