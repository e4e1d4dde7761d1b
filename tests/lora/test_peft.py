"""`lora.fuse` against ``merge_and_unload`` of PEFT, for what PEFT trains beside factors of linear layers."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.lora import weight_changes
from htp_export.errors import InputError
from tests.nets import composed, spread, x

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft.*", "ignore:Could not find a config file"
)

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
IDS = torch.tensor([[3, 7, 1, 9, 2]])
WORDS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def convolutions(norm: nn.Module | None = None) -> nn.Module:
    return composed(
        lambda self, x: self.head(
            self.line(torch.relu(self.point(self.norm(self.wide(x)))).flatten(2)).mean(2)
        ),
        wide=nn.Conv2d(4, 8, 3, stride=2, padding=1),
        point=nn.Conv2d(8, 8, 1),
        norm=norm or nn.Identity(),
        line=nn.Conv1d(8, 6, 5),
        head=nn.Linear(6, 3),
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = BertConfig(**SIZES, vocab_size=30, max_position_embeddings=16, num_labels=3)
    return BertForSequenceClassification(sizes)


def llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=30, use_cache=False, **settings)
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30, n_positions=16, use_cache=False)
    )


PICTURES = {"x": x(2, 4, 8, 8)}
NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "bert": (bert, WORDS),
    "convolutions": (convolutions, PICTURES),
    "llama": (llama, WORDS),
    "tied": (lambda: llama(tie_word_embeddings=True), WORDS),
    "gpt2": (gpt2, WORDS),
}


def called(model: nn.Module, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        result = model(**inputs)
    return (result if isinstance(result, torch.Tensor) else result.logits).numpy()


def run(file: Path, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    arrays = zip(session.get_inputs(), inputs.values(), strict=False)
    return np.asarray(session.run(None, {each.name: value.numpy() for each, value in arrays})[0])


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], tuple[nn.Module, dict[str, Any], Path]]:
    """A net, its inputs and its file, each made once."""
    made: dict[tuple[str, str], tuple[nn.Module, dict[str, Any], Path]] = {}

    def of(name: str, exporter: str) -> tuple[nn.Module, dict[str, Any], Path]:
        if (name, exporter) not in made:
            torch.manual_seed(0)
            make, inputs = NETS[name]
            model, file = spread(make()).eval(), tmp_path_factory.mktemp(name) / "net.onnx"
            is_dynamo = exporter == "dynamo"
            htp_export.export(model, (), file, kwargs=dict(inputs), dynamo=is_dynamo, verbose=False)
            made[name, exporter] = model, inputs, file
        return made[name, exporter]

    return of


def trained(model: nn.Module, folder: Path, **settings: Any) -> nn.Module:
    """Write an adapter as training leaves it; the model with it, merged by PEFT."""
    wrapped = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=4, lora_alpha=6, **settings)
    ).eval()
    torch.manual_seed(1)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += (
                0.3 * torch.randn_like(parameter) * parameter.abs().mean().clamp(min=0.5)
            )
    wrapped.save_pretrained(folder)
    merged: nn.Module = wrapped.merge_and_unload()
    return merged


CASES: list[Any] = [
    (
        *("bert", "dynamo", {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}),
        ["classifier.bias", "classifier.weight"],
    ),
    (
        *("bert", "torchscript"),
        {
            "task_type": "SEQ_CLS",
            "use_dora": True,
            "bias": "all",
            "target_modules": ["query", "dense", "word_embeddings"],
        },
        [],
    ),
    (
        "bert",
        "dynamo",
        {
            "bias": "lora_only",
            "modules_to_save": ["pooler", "LayerNorm"],
            "target_modules": ["key"],
        },
        [],
    ),
    (
        "convolutions",
        "dynamo",
        {"target_modules": ["wide", "point", "line", "head"], "use_dora": True},
        [],
    ),
    (
        *(
            "convolutions",
            "torchscript",
            {"target_modules": ["wide", "line"], "modules_to_save": ["head"]},
        ),
        ["head.bias", "head.weight"],
    ),
    pytest.param(
        *(
            "llama",
            "dynamo",
            {"task_type": "CAUSAL_LM", "use_dora": True, "target_modules": "all-linear"},
            [],
        ),
        marks=pytest.mark.slow,
    ),
    (
        *("llama", "dynamo"),
        {
            "init_lora_weights": "pissa",
            "target_modules": ["q_proj", "down_proj"],
            "modules_to_save": ["lm_head", "embed_tokens"],
        },
        ["lm_head.weight", "model.embed_tokens.weight"],
    ),
    pytest.param(
        *("llama", "torchscript"),
        {
            "use_rslora": True,
            "target_modules": ["embed_tokens", "k_proj"],
            "rank_pattern": {"k_proj": 2},
        },
        ["model.embed_tokens.weight"],  # PEFT saves embeddings that have factors
        marks=pytest.mark.slow,
    ),
    (
        "tied",
        "dynamo",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        ["lm_head.weight"],
    ),
    (
        *("gpt2", "dynamo"),
        {
            "use_dora": True,
            "bias": "all",
            "target_modules": ["c_attn", "c_proj"],
            "fan_in_fan_out": True,
        },
        [],
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "exporter", "settings", "parameters"), CASES)
def test_the_fused_model_is_the_one_that_peft_merges(
    name, exporter, settings, parameters, exported, tmp_path
):
    model, inputs, file = exported(name, exporter)
    merged = trained(model, tmp_path / "adapter", **settings)
    before = torch.random.get_rng_state()
    result = htp_export.lora.fuse(file, tmp_path / "adapter", tmp_path / "fused.onnx")
    assert torch.equal(before, torch.random.get_rng_state())
    wanted = called(merged, inputs)
    assert np.abs(wanted - called(model, inputs)).max() > 0.05
    assert np.abs(run(tmp_path / "fused.onnx", inputs) - wanted).max() < 1e-5 * max(
        1, np.abs(wanted).max()
    )
    if parameters:
        assert sorted(result.parameters) == parameters
    plain, fused = htp_export.load(file), htp_export.load(tmp_path / "fused.onnx")
    assert [node.name for node in fused.nodes] == [node.name for node in plain.nodes]


@pytest.mark.long
@pytest.mark.parametrize(
    "exporter", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)]
)
def test_parameters_that_were_equal_are_trained_apart(exporter, tmp_path):
    """New layers have biases of zeros and norms of ones, which exporters store once."""
    torch.manual_seed(0)
    model, inputs = bert().eval(), WORDS
    htp_export.export(
        model,
        (),
        tmp_path / "net.onnx",
        kwargs=dict(inputs),
        dynamo=exporter == "dynamo",
        verbose=False,
    )
    settings = {"bias": "all", "modules_to_save": ["output.LayerNorm"], "target_modules": ["query"]}
    merged = trained(model, tmp_path / "adapter", **settings)
    result = htp_export.lora.fuse(
        tmp_path / "net.onnx", tmp_path / "adapter", tmp_path / "fused.onnx"
    )
    assert np.abs(run(tmp_path / "fused.onnx", inputs) - called(merged, inputs)).max() < 1e-5
    assert {"bert.pooler.dense.bias", "bert.encoder.layer.0.output.LayerNorm.weight"} < {
        *result.parameters
    }


@pytest.mark.long
def test_what_cannot_be_fused_is_refused_with_what_to_do(exported, tmp_path, monkeypatch):
    torch.manual_seed(0)
    normed = spread(convolutions(nn.BatchNorm2d(8))).eval()
    merged = trained(normed, tmp_path / "conv", target_modules=["wide"])
    for optimize in (True, False):
        file = tmp_path / f"{optimize}.onnx"
        htp_export.export(normed, (), file, kwargs=PICTURES, verbose=False, optimize=optimize)
    message = r"'wide': its weight .* was computed from 'wide.weight', 'norm.weight'.*export with optimize=False"
    with pytest.raises(InputError, match=message):
        htp_export.lora.fuse(tmp_path / "True.onnx", tmp_path / "conv")
    htp_export.lora.fuse(tmp_path / "False.onnx", tmp_path / "conv", tmp_path / "fused.onnx")
    assert np.abs(run(tmp_path / "fused.onnx", PICTURES) - called(merged, PICTURES)).max() < 1e-5
    with pytest.raises(
        InputError,
        match=r"has factors of the convolution 'wide', which no run can switch; lora.fuse",
    ):
        htp_export.lora.adapter(
            htp_export.lora.insert(exported("convolutions", "dynamo")[2], "head"), tmp_path / "conv"
        )
    monkeypatch.setattr(weight_changes, "find_spec", lambda _: None)
    with pytest.raises(
        InputError,
        match=r"module 'wide' .* needs PEFT; install it with: pip install \"htp-export\[lora",
    ):
        htp_export.lora.fuse(tmp_path / "False.onnx", tmp_path / "conv")
    config = json.loads((tmp_path / "conv" / "adapter_config.json").read_text())
    (tmp_path / "conv" / "adapter_config.json").write_text(
        json.dumps({**config, "init_lora_weights": "corda"})
    )
    with pytest.raises(
        InputError, match="init_lora_weights='corda', which changed the weights of the model"
    ):
        htp_export.lora.fuse(tmp_path / "False.onnx", tmp_path / "conv")
