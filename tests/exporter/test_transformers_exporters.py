"""The exporters of transformers, under `tagging`: they call torch.export and hand its result to torch.onnx.export."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import htp_export
from tests.exporting import metadata
from tests.nets import spread
from tests.truth import Judge, nodes_of, tree_of, untagged

exporters = pytest.importorskip(
    "transformers.exporters", reason="transformers older than 5.23 has no exporters"
)
# What it calls in torch.export warns its own developers.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

SIZE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def ids() -> dict[str, Any]:
    inputs = torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(0))
    return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return spread(
        LlamaForCausalLM(LlamaConfig(**SIZE, num_key_value_heads=1, bos_token_id=0, eos_token_id=1))
    ).eval()


def bert() -> Any:
    from transformers import BertConfig, BertModel

    return spread(
        BertModel(BertConfig(**SIZE | {"num_hidden_layers": 1}, max_position_embeddings=16))
    ).eval()


@pytest.fixture(scope="module")
def exporter() -> Any:
    try:
        return exporters.OnnxExporter()
    except ImportError as error:  # it takes no torch before 2.11
        pytest.skip(str(error))


def owners(file: onnx.ModelProto) -> Counter[str]:
    """How many nodes each module owns."""
    return Counter(metadata(node)["htp.module"] for node in nodes_of(file))


def saved(exported: Any, folder: Path) -> dict[str, onnx.ModelProto]:
    exported.save_pretrained(folder)
    return {path.stem: onnx.load(str(path)) for path in folder.glob("*.onnx")}


@pytest.mark.long
def test_the_file_of_an_encoder_has_tags_signatures_parameters_and_fates_of_its_own(
    exporter, tmp_path
):
    model = bert()
    with htp_export.tagging():
        exported = exporter.export(model, ids(), exporters.OnnxConfig(dynamic=True))
    [file] = saved(exported, tmp_path).values()
    assert untagged(file) == []
    found, tree = owners(file), tree_of(file)
    for linear in (
        "attention.self.query",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    ):
        assert found[f"encoder.layer.0.{linear}"] > 0
    assert found["encoder.layer.0.output.LayerNorm"] > 0
    assert set(found) <= set(tree)
    said = {
        entry.key: json.loads(entry.value) for entry in file.metadata_props if "{" in entry.value
    }
    assert list(tree) == [path for path, _ in model.named_modules()]
    assert tree["embeddings.dropout"]["fate"] == "identity"
    assert said["htp.parameters"]["encoder.layer.0.intermediate.dense"]["weight"] == [24, 16]
    [[inputs, outputs]] = said["htp.signatures"]["encoder.layer.0.output.LayerNorm"]
    assert list(inputs) == ["input"]
    assert len(outputs) == 1


@pytest.mark.slow
def test_every_node_of_both_parts_of_a_generating_model_is_tagged(exporter, tmp_path):
    with htp_export.tagging():
        exported = exporter.export_for_generation(
            llama(), ids(), exporters.OnnxConfig(dynamic=True), multi_token_decode=True
        )
    files = saved(exported, tmp_path)
    assert files
    for file in files.values():
        assert untagged(file) == []
        found = owners(file)
        for linear in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            assert {found[f"model.layers.{layer}.{linear}"] for layer in range(2)} == {1}
        assert found["lm_head"] > 0
        assert set(found) <= set(tree_of(file))


@pytest.mark.slow
def test_without_tagging_the_exporter_writes_none(exporter, tmp_path):
    exported = exporter.export(bert(), ids(), exporters.OnnxConfig())
    [file] = saved(exported, tmp_path).values()
    assert len(untagged(file)) == len(nodes_of(file)) > 0


def contaminated(file: onnx.ModelProto) -> set[str]:
    said = {entry.key: entry.value for entry in file.metadata_props}
    return {path for path, _, _ in json.loads(said.get("htp.contamination", "[]"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "fusions"),
    [*((llama, name) for name in ("cpu", "cuda", "webgpu", "dml")), (bert, "cpu"), (bert, "cuda")],
)
def test_every_node_that_is_fused_for_onnx_runtime_has_its_owners(
    make, fusions, exporter, tmp_path
):
    config = exporters.OnnxConfig(dynamic=True, ort_fusions=fusions)
    bare = exporter.export(make(), ids(), config)
    with htp_export.tagging():
        plain = exporter.export(make(), ids(), exporters.OnnxConfig(dynamic=True))
        fused = exporter.export(make(), ids(), config)
    [before], [after] = (
        saved(plain, tmp_path / "plain").values(),
        saved(fused, tmp_path / "fused").values(),
    )
    [untouched] = saved(bare, tmp_path / "bare").values()
    operators = [
        Counter(node.op_type for node in nodes_of(model)) for model in (untouched, after, before)
    ]
    # what is fused is transformers' affair, and the same
    assert operators[0] == operators[1] != operators[2]
    assert untagged(after) == []
    # transformers gives attention another mask than the model itself does: the same modules differ without fusions.
    usual = {path for path, _ in Judge(make(), ids(), before).faults()}
    assert {path for path, _ in Judge(make(), ids(), after).faults()} - usual == contaminated(
        after
    ) - usual
    names = {name for node in nodes_of(after) for name in (*node.output, *node.input)}
    said = {entry.key: entry.value for entry in after.metadata_props}
    signed = [
        outputs for calls in json.loads(said["htp.signatures"]).values() for _, outputs in calls
    ]
    assert {name for outputs in signed for name in outputs if name is not None} <= names
