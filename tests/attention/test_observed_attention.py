"""Attention that modules compute from products themselves: in steps, with the same results; the model as it was."""

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

import htp_export
from htp_export import decomposed_attention
from htp_export.errors import InputError
from htp_export.format.leaves import tensors_in
from tests.attention.test_attention import whole_and_in_steps
from tests.exporting import BOTH, quick
from tests.nets import EXPORTERS, Holding, spread

SIZES = {
    "num_hidden_layers": 1,
    "vocab_size": 50,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
# Model type → overrides, and a module with attention.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "bert": (SIZES, "encoder.layer.0.attention.self"),
    "gpt2": (
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 32},
        "h.0.attn",
    ),
    "llama": ({**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}, "layers.0.self_attn"),
    "t5": (
        {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50},
        "decoder.block.0.layer.1.EncDecAttention",
    ),
    "vit": (
        {key: size for key, size in SIZES.items() if key != "vocab_size"}
        | {"image_size": 16, "patch_size": 8},
        "layers.0.attention",
    ),
    "whisper": (
        {
            **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")},
            "d_model": 16,
            "num_mel_bins": 4,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "vocab_size": 60,
            **dict.fromkeys(
                ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1
            ),
        },
        "decoder.layers.0.encoder_attn",
    ),
    # Scores between the product and the softmax: a soft limit; a column more, which is cut off again afterwards.
    "gemma2": (
        {
            **SIZES,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "attn_logit_softcapping": 1.0,
            "query_pre_attn_scalar": 8,
        },
        "layers.0.self_attn",
    ),
    "gpt_oss": (
        {
            **SIZES,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        "layers.0.self_attn",
    ),
    "swin": (
        {
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "window_size": 2,
            "image_size": 16,
            "patch_size": 2,
        },
        "encoder.layers.1.blocks.0.attention",
    ),
}


def model_of(name: str, implementation: str) -> tuple[nn.Module, dict[str, Any], str]:
    """A tiny model, inputs, and the path of a module with attention."""
    from htp_export.huggingface import example_inputs, load_model

    overrides, path = MODELS[name]
    model = load_model(
        name, random_weights=True, overrides=overrides, attn_implementation=implementation
    )
    return model, example_inputs(model), path


def steps_of(model: nn.Module) -> list[str]:
    return [
        path for path, module in model.named_modules() if getattr(module, "htp_synthetic", False)
    ]


def assert_untouched(model: nn.Module) -> None:
    assert not steps_of(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


QUICK = ("bert-sdpa", "t5-eager", "whisper-sdpa", "gemma2-eager", "gpt_oss-eager", "swin-eager")
# transformers has no implementation by scaled_dot_product_attention for two of them.
RUNS = [f"{name}-eager" for name in MODELS]
RUNS += [f"{name}-sdpa" for name in MODELS if name not in ("gpt_oss", "gemma2")]


@pytest.mark.parametrize("run", quick(RUNS, *QUICK))
def test_models_of_transformers_run_in_steps_with_the_same_results(run):
    name, _, implementation = run.partition("-")
    model, inputs, path = model_of(name, implementation)
    wanted = [f"{path}.{step}" for step in ("scores", "softmax", "context")]
    with torch.no_grad():
        expected = list(tensors_in(model(**inputs)))
        for exact in (False, True):
            with contextlib.suppress(ZeroDivisionError), decomposed_attention(model, exact=exact):
                results = list(tensors_in(model(**inputs)))
                assert [each for each in steps_of(model) if each.startswith(f"{path}.")] == wanted
                raise ZeroDivisionError
            assert_untouched(model)
            tolerance = 0 if implementation == "eager" else 1e-5
            for ours, theirs in zip(results, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "exporter"),
    quick(
        itertools.product(
            ("bert-sdpa", "bert-eager", "t5-eager", "gemma2-eager", "swin-eager"), EXPORTERS
        ),
        ("bert-sdpa", "dynamo"),
        ("gemma2-eager", "torchscript"),
        ("swin-eager", "torchscript"),  # it is run twice
    ),
)
def test_attention_of_transformers_exports_in_steps_with_the_same_nodes(name, exporter, tmp_path):
    model, inputs, path = model_of(*name.split("-"))
    plain, tagged = whole_and_in_steps(model, inputs, exporter, tmp_path)
    assert name == "bert-sdpa" or len(plain.nodes) == len(tagged.nodes)
    kinds = {
        step: [node.op_type for node in tagged[f"{path}.{step}"].nodes]
        for step in ("scores", "softmax", "context")
    }
    assert "MatMul" in kinds["scores"]
    assert [kind for kind in kinds["softmax"] if kind in ("Softmax", "MatMul", "Mul")] == [
        "Softmax"
    ]
    assert kinds["context"] == ["MatMul"]
    result = htp_export.verify(model, tagged, kwargs=inputs)
    assert result.ok
    # scores with a mask are infinite on both sides
    statuses = {result.modules[f"{path}.{step}"].status for step in kinds}
    assert statuses <= {"agrees", "infinite"}
    with decomposed_attention(model):
        inside = htp_export.verify(model, tagged, kwargs=inputs)
    assert {path: each.status for path, each in inside.modules.items()} == {
        path: each.status for path, each in result.modules.items()
    }


class Own(nn.Module):
    """Attention of anybody's own, with operations in place, a cast, and a mask between the product and the softmax."""

    def __init__(self, attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x, self.linear(x))


def with_matmul(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / 8**0.5
    scores += torch.ones_like(scores).tril()
    scores[..., 0] = 0.5
    scores.masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ k


def with_bmm(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = torch.baddbmm(torch.ones(1, 5, 5), q, k.transpose(1, 2), alpha=0.3)
    return torch.bmm(F.dropout(F.softmax(scores, dim=2), 0.1, training=False), k)


def with_einsum(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    both = torch.einsum("bqd,bkd->bqk", q, k) + torch.einsum(
        "bqd,kd->bqk", q, torch.arange(40.0).view(5, 8) / 40
    )
    weights = torch.softmax(torch.tanh(both), -1)
    return torch.einsum("bqk,bkd->bqd", weights[:, :, :4], k[:, :4])


def twice(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    first = (q @ k.transpose(-2, -1)).softmax(-1) @ k
    return (first @ q.transpose(-2, -1)).softmax(-1) @ q


def with_module(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return nn.Softmax(dim=-1)(torch.matmul(q, k.transpose(-2, -1))).matmul(k)


ATTENDS = (with_matmul, with_bmm, with_einsum, twice, with_module)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("attend", "exporter"),
    quick(
        itertools.product(ATTENDS, EXPORTERS),
        (with_matmul, "dynamo"),
        *((attend, "torchscript") for attend in ATTENDS),
    ),
)
def test_attention_of_any_module_runs_and_exports_in_steps(attend, exporter, tmp_path):
    model, x = nn.Sequential(nn.Linear(8, 8), Own(attend)).eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = model(x)
        with decomposed_attention(model), decomposed_attention(model):
            torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
            assert steps_of(model) == ["1.scores", "1.softmax", "1.context"]
        plain, tagged = whole_and_in_steps(model, {"input": x}, exporter, tmp_path)
    assert_untouched(model)
    assert htp_export.verify(model, tagged, (x,)).ok
    assert len(tagged.nodes) == len(plain.nodes)
    assert all(tagged[f"1.{step}"].nodes for step in ("scores", "softmax", "context"))


def through_a_view(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1)
    scores.view(-1).add_(torch.arange(scores.numel()))
    return scores.softmax(-1) @ k


def of_a_changed_mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(5, 5)
    scores = q @ k.transpose(-2, -1) + mask
    mask.fill_(3)
    return scores.softmax(-1) @ k + mask.sum()


def into_a_mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = torch.ones(2, 5, 5)
    scores += q @ k.transpose(-2, -1)
    return scores.softmax(-1) @ k


def with_noise(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.dropout(q @ k.transpose(-2, -1), 0.5, training=True).softmax(-1) @ k


@pytest.mark.parametrize("attend", [through_a_view, of_a_changed_mask, into_a_mask, with_noise])
def test_what_cannot_run_again_exactly_stays_as_it_is_and_is_said_once(attend, caplog):
    model, x = nn.Sequential(nn.Linear(8, 8), Own(attend)).eval(), torch.randn(2, 5, 8)
    torch.manual_seed(0)
    expected = model(x)
    with caplog.at_level(logging.WARNING), decomposed_attention(model):
        torch.manual_seed(0)
        assert torch.equal(model(x), expected)
        model(x)
        assert not steps_of(model)
    messages = [record.getMessage().partition(" in steps")[0] for record in caplog.records]
    assert messages == ["module '1': the softmax of a product does not run"]


class TalkingHeads(nn.Module):
    """Mixes the scores of its heads: by a parameter, by a submodule, or not; and may have a softmax of its own."""

    def __init__(self, mixed_by: str) -> None:
        super().__init__()
        self.mixed_by = mixed_by
        self.mix, self.linear, self.norm = (
            nn.Parameter(torch.randn(2, 2)),
            nn.Linear(2, 2),
            nn.Softmax(-1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 5, 2, 4).transpose(1, 2)
        scores = heads @ heads.transpose(-2, -1)
        if self.mixed_by == "module":
            scores = self.linear(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if self.mixed_by == "parameter":
            scores = torch.einsum("bhqk,hg->bgqk", scores, self.mix)
        weights = self.norm(scores) if self.mixed_by == "own softmax" else scores.softmax(-1)
        return weights @ heads


@pytest.mark.parametrize(
    ("mixed_by", "steps"),
    [("parameter", ["scores", "softmax", "context"]), ("module", []), ("own softmax", [])],
)
def test_scores_end_where_the_softmax_begins_and_submodules_between_are_left_alone(
    mixed_by, steps, caplog
):
    model, x = TalkingHeads(mixed_by).eval(), torch.randn(2, 5, 8)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        expected = model(x)
        with decomposed_attention(model):
            assert torch.equal(model(x), expected)
            assert steps_of(model) == steps
    said = ["a submodule computes" in record.getMessage() for record in caplog.records]
    assert said == ([True] if mixed_by == "module" else [])


def test_in_inference_mode_attention_stays_as_it_is(caplog):
    model, x = Own(with_bmm).eval(), torch.randn(2, 5, 8)
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        expected = model(x)
        with decomposed_attention(model):
            assert torch.equal(model(x), expected)
            assert not steps_of(model)
    assert ["in inference mode" in record.getMessage() for record in caplog.records] == [True]


class NoAttention(
    Holding, choice=nn.Parameter(torch.randn(4, 8)), codes=nn.Parameter(torch.randn(8, 8))
):
    """A choice among experts by a linear map, and a codebook: products with parameters, no scores of attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x @ self.choice.T).softmax(-1)
        soft = torch.einsum("bld,de->ble", x, self.codes[None].squeeze(0)).softmax(-1)
        return chosen.sum(-1, keepdim=True) * (soft @ self.codes)


@pytest.mark.torch
@BOTH
def test_the_softmax_of_a_linear_map_is_no_attention(exporter, tmp_path):
    model, x = NoAttention().eval(), torch.randn(2, 5, 8)
    with decomposed_attention(model):
        model(x)
        htp_export.export(
            model, (x,), tmp_path / "net.onnx", dynamo=exporter == "dynamo", verbose=False
        )
        assert not steps_of(model)
    assert list(htp_export.load(tmp_path / "net.onnx").hierarchy) == [""]


def with_dropout(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.dropout((q @ k.transpose(-2, -1)).softmax(-1), 0.4) @ k


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("make", "inputs", "steps"),
    [
        (lambda: Own(with_dropout), 1, ["scores", "softmax", "context"]),
        (lambda: nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True), 3, None),
    ],
    ids=["own", "multihead"],
)
def test_training_has_the_same_dropout_and_gradients(make, inputs, steps, exact):
    model, x = spread(make()).train(), torch.randn(2, 5, 8)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        result = model(*[x] * inputs)
        (result[0] if isinstance(result, tuple) else result).square().sum().backward()
        return [
            parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
        ]

    expected = gradients()
    with decomposed_attention(model, exact=exact):
        results = gradients()
        assert steps in (None, steps_of(model))
    assert len(results) == len(expected) == len(list(model.parameters()))
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


def test_names_that_are_taken_are_left_alone():
    model, x = Own(with_bmm).eval(), torch.randn(2, 5, 8)
    model.softmax = nn.Identity()
    with decomposed_attention(model):
        model(x)
        assert steps_of(model) == ["scores", "eager_softmax", "context"]
    assert [name for name, _ in model.named_children()] == ["linear", "softmax"]


@pytest.mark.parametrize(
    "implementation", ["flash_attention_2", "flex_attention", "someone/kernel"]
)
def test_kernels_of_other_libraries_are_refused_by_module(implementation):
    model = nn.ModuleDict({"text": Own(with_bmm)})
    model["text"].config = type("Config", (), {"_attn_implementation": implementation})()
    with pytest.raises(
        InputError, match=rf"module 'text' .*'{implementation}'.*set_attn_implementation"
    ):
        decomposed_attention(model).__enter__()


@pytest.mark.torch
def test_the_report_counts_the_operations_of_steps_that_modules_get_when_they_run():
    model = nn.Sequential(nn.Linear(8, 8), Own(with_module)).eval()
    report = htp_export.attention_report(model, (torch.randn(2, 5, 8),))
    assert report.modules == ("1",)
    operations = {step: report.after[step].operations for step in ("scores", "softmax", "context")}
    nodes = {step: report.after[step].nodes for step in operations}
    assert min(*operations.values(), *nodes.values()) > 0
    assert nodes == {"scores": 1, "softmax": 1, "context": 1}
    assert report.after["attention"].nodes == report.before["attention"].nodes
