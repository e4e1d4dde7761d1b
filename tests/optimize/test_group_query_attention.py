"""fuse_group_query_attention: the same tokens and logits for every mask, exact owners, and what it refuses."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest

import htp_export
from htp_export.capabilities.huggingface.genai import GENAI_CONFIG, genai_config, shares_cache
from htp_export.capabilities.optimize.registry import declined
from htp_export.huggingface import example_calls, load_model
from tests.decoders import (
    TEXT,
    Programs,
    generated,
    generated_by_genai,
    greedy,
    nothing_past,
    past_of,
    prompt,
)
from tests.graphs import tagged

PASS = "fuse_group_query_attention"
HEADS = {**TEXT, "hidden_size": 64}  # of 16 features: the operator can rotate them
NO_GROUPS = {key: value for key, value in HEADS.items() if key != "num_key_value_heads"}
GPT = {
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# settings, and which layers' nodes rotate
FAMILIES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "llama": (HEADS, [1, 1]),
    "gpt2": (GPT, [0, 0]),
    "smollm3": ({**HEADS, "no_rope_layer_interval": 2}, [1, 0]),
    "qwen2": (HEADS, [1, 1]),
    "qwen3": ({**HEADS, "head_dim": 16}, [1, 1]),
    "mistral": ({**HEADS, "sliding_window": 4}, [1, 1]),
    "phi3": (HEADS, [1, 1]),
    "gemma2": ({**HEADS, "head_dim": 16, "sliding_window": 4}, [1, 1]),
    "gemma3_text": (
        {**HEADS, "head_dim": 16, "sliding_window": 4, "num_hidden_layers": 6},
        [1] * 6,
    ),
    "olmo2": (HEADS, [1, 1]),
    "gpt_neox": ({**NO_GROUPS, "hidden_size": 128}, [0, 0]),
    "phi": ({**HEADS, "hidden_size": 128}, [1, 1]),
    "gptj": ({**GPT, "rotary_dim": 16}, [1, 1]),
    "cohere": (HEADS, [1, 1]),
    "mixtral": ({**HEADS, "num_local_experts": 4}, [1, 1]),
    "qwen3_moe": (
        {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        [1, 1],
    ),
}
QUICK = ("smollm3",)  # it has layers of both kinds
# softmax as PyTorch has it: rows without a visible key average all values
AVERAGING = ("gemma2", "gptj")


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FAMILIES],
)
def family(request: pytest.FixtureRequest, families: Callable[[str], Family]) -> Family:
    return families(request.param)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    return functools.cache(lambda name: Family(name, tmp_path_factory.mktemp(name)))


class Family:
    """A small decoder, its file, and what the pass alone and all passes make of it."""

    def __init__(self, name: str, folder: Path) -> None:
        pytest.importorskip(
            "transformers.exporters", reason="transformers older than 5.23 has no exporters"
        )
        self.name, self.folder = name, folder
        self.settings, self.rotates = FAMILIES[name]
        task = "text-generation-with-past"
        self.model = load_model(name, task=task, random_weights=True, overrides=self.settings)
        self.files = Programs(self.model, example_calls(self.model))
        self.original = self.files.save(folder)["model"]
        self.results = {}
        for what, passes in (("alone", PASS), ("fused", "default")):
            self.results[what] = htp_export.optimize(
                self.original,
                folder / f"{what}.onnx",
                passes=passes,
                level="fused",
                keep_exact=what == "alone",
            )

    def session(self, what: str) -> Any:
        return onnxruntime.InferenceSession(self.folder / f"{what}.onnx")


def grouped(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "GroupQueryAttention"]


def masks(batch: int, length: int) -> dict[str, npt.NDArray[np.int64]]:
    """Masks of a prompt: whole, padded on each side, with holes, and with a text of nothing but padding."""
    ones = np.ones((batch, length), np.int64)
    left, right, nothing = ones.copy(), ones.copy(), ones.copy()
    left[0, :4], left[1, :1] = 0, 0
    right[0, 5:] = 0
    nothing[0] = 0
    holes = np.random.default_rng(0).integers(0, 2, ones.shape)
    return {"whole": ones, "left": left, "right": right, "holes": holes, "nothing": nothing}


def runs(session: Any, mask: npt.NDArray[np.int64], made: list[int]) -> list[dict[str, Any]]:
    """What a file returns for a prompt, and then for more tokens at a time with the cache that it returned itself."""
    numbers = np.random.default_rng(1)
    taken, outputs = (
        {value.name for value in session.get_inputs()},
        [value.name for value in session.get_outputs()],
    )
    cache, found = nothing_past(session, len(mask)), []
    for count in (mask.shape[1], *made):
        if found:
            mask = np.concatenate([mask, np.ones((len(mask), count), np.int64)], 1)
        ids = numbers.integers(3, 60, (len(mask), count))
        positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -count:]
        feed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **cache}
        result = session.run(
            outputs, {name: value for name, value in feed.items() if name in taken}
        )
        found.append(dict(zip(outputs, result, strict=True)))
        cache = past_of(found[-1])
    return found


@pytest.mark.long
def test_logits_and_cache_stay_for_every_mask(family):
    """Prefill, single tokens, and several tokens at once, of a batch of texts."""
    before, after = family.session("model"), family.session("fused")
    for name, mask in masks(3, 9).items():
        if family.name in AVERAGING and name != "whole":
            continue  # padding of the query itself
        for was, now in zip(
            runs(before, mask, [1, 4, 1]), runs(after, mask, [1, 4, 1]), strict=True
        ):
            for output, array in was.items():
                assert np.allclose(array, now[output], rtol=1e-4, atol=1e-5), (name, output)


def test_texts_stay_where_padding_averages_all_values(family):
    """The logits of padding are of no meaning; those of the text behind it stay."""
    if family.name not in AVERAGING:
        pytest.skip("the file gives zeros, and all is compared")
    mask = masks(3, 9)["left"]
    for was, now in zip(
        *(runs(family.session(what), mask, [1, 4]) for what in ("model", "fused")), strict=True
    ):
        new = was["logits"].shape[1]
        seen = (
            np.concatenate([mask, np.ones((3, 5), np.int64)], 1)[:, : mask.shape[1]][:, -new:]
            if new > 4
            else None
        )
        texts = np.ones((3, new), bool) if seen is None else seen > 0
        assert np.allclose(was["logits"][texts], now["logits"][texts], rtol=1e-4, atol=1e-5)


def test_tokens_stay(family):
    tokens = generated(family.model, prompt())
    assert (
        greedy(family.session("alone"), prompt())
        == greedy(family.session("fused"), prompt())
        == tokens
    )


def test_each_layer_has_one_node_of_its_own_attention(family):
    for result in family.results.values():
        nodes = grouped(result.model)
        tagged = htp_export.load(result.model)
        assert [node.attributes["do_rotary"].as_int() for node in nodes] == family.rotates
        owners = [tagged.owners_of(node) for node in nodes]
        for layer, (node, (owner, *projections)) in enumerate(zip(nodes, owners, strict=True)):
            assert f".{layer}." in f".{owner}."
            assert "attn" in owner or "attention" in owner
            assert all(each.startswith(f"{owner}.") for each in projections)
            assert not projections or node.inputs[1] is None  # it reads the joint result of these
        assert all("htp.module" in node.metadata_props for node in result.model.graph)


def test_no_module_becomes_inexact_by_it(family):
    """Alone, with ``keep_exact``: each attention is still computed from what PyTorch gave it."""
    result = family.results["alone"]
    tagged = htp_export.load(result.model)
    for node in grouped(result.model):
        assert tagged[tagged.owners_of(node)[0]].fate == "computed"
    call = family.files.calls["model"]
    with call.adapted():
        for kwargs in call.runs.values():
            for what in ("alone", "fused"):
                assert htp_export.verify(
                    call.model, family.folder / f"{what}.onnx", kwargs=kwargs
                ).ok


def test_costs_count_the_node_as_its_parts(family):
    dims = {"batch_size": 2, "sequence_length": 3, "past_sequence_length": 5}
    before, after = (
        htp_export.cost(family.folder / f"{what}.onnx", dims=dims) for what in ("model", "alone")
    )
    assert "GroupQueryAttention" not in after.uncounted
    assert after.modules[""].flops == pytest.approx(before.modules[""].flops, rel=0.1)


@pytest.mark.long
def test_past_and_present_share_a_buffer_in_genai(family):
    pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    config = genai_config(
        ir.load(family.original), family.model.config, family.model.generation_config
    )
    assert not config["search"]["past_present_share_buffer"]
    config["model"]["decoder"]["filename"] = "shared.onnx"
    (family.folder / GENAI_CONFIG).write_text(json.dumps(config))
    htp_export.optimize(family.original, family.folder / "shared.onnx", level="fused")
    assert json.loads((family.folder / GENAI_CONFIG).read_text())["search"][
        "past_present_share_buffer"
    ]
    assert generated_by_genai(family.folder, prompt()) == generated(family.model, prompt())
    htp_export.optimize(family.original, family.folder / "shared.onnx", level="tolerant")
    assert not json.loads((family.folder / GENAI_CONFIG).read_text())["search"][
        "past_present_share_buffer"
    ]


# --- what it leaves alone ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(families: Callable[[str], Family]) -> ir.Model:
    return htp_export.load(families(QUICK[0]).original).model


def reasons(model: ir.Model) -> set[str]:
    """Why the pass leaves the attention of a model alone; the model is changed."""
    result = htp_export.optimize(model, passes=PASS, level="fused")
    assert not grouped(result.model)
    assert not result.attribution.get(PASS)
    return {each.why for each in declined([*result.model.graph]) if each.kind == PASS}


def first(model: ir.Model, operator: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == operator)


def shows_the_next_token(model: ir.Model) -> None:
    compared = first(model, "LessOrEqual")
    one = ir.val("one", const_value=ir.tensor(np.array(1, np.int64), name="one"))
    model.graph.register_initializer(one)
    shifted = ir.node("Add", [compared.inputs[1], one])
    shifted.outputs[0].shape = compared.inputs[1].shape
    model.graph.insert_before(compared, shifted)
    compared.replace_input_with(1, shifted.outputs[0])


LATER = "its mask is not known to hide later tokens, which the operator always does"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: setattr(first(model, "LessOrEqual"), "op_type", "GreaterOrEqual"), LATER),
        (shows_the_next_token, LATER),
        (
            lambda model: setattr(first(model, "Less"), "op_type", "Greater"),
            "its result depends on another condition than its mask",
        ),
        (
            lambda model: model.graph.outputs.extend(
                [n.outputs[0] for n in model.graph if n.op_type == "Softmax"]
            ),
            "other nodes read the weights of the attention",
        ),
    ],
    ids=["later tokens", "the next token", "condition", "weights"],
)
def test_what_the_operator_does_not_compute_is_refused(decoder, change, why):
    model = decoder.clone()
    change(model)
    assert reasons(model) == {why}


def cached(
    size: int = 8,
    type_: str = "float",
    heads: int = 2,
    values: int = 8,
    scores: str = "Add (s, mask)",
) -> ir.Model:
    """An attention with a cache, of two heads for keys and values."""
    sizes = {"q": f"{heads}, n, {size}", "k": f"2, n, {size}", "v": f"2, n, {values}"}
    sizes |= {"past_k": f"2, p, {size}", "past_v": f"2, p, {values}", "mask": "1, n, t"}
    inputs = ", ".join(f"{type_}[b, {shape}] {name}" for name, shape in sizes.items())
    return tagged(f"""({inputs}) => ({type_} y) {{ keys = Concat <axis = 2> (past_k, k)
        values = Concat <axis = 2> (past_v, v) kt = Transpose <perm = [0, 1, 3, 2]> (keys) s = MatMul (q, kt)
        m = {scores} w = Softmax <axis = -1> (m) c = MatMul (w, values) y = Transpose <perm = [0, 2, 1, 3]> (c) }}""")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({}, LATER),
        ({"size": 4, "values": 4}, "heads have 4 features; the operator takes multiples of 8"),
        ({"values": 16}, "queries, keys and values have heads of different sizes"),
        ({"heads": 3}, "keys and values have other heads or lengths"),
        ({"type_": "double"}, "it computes in DOUBLE, and the operator in float32 and float16"),
        (
            {"scores": "Mul (s, i1)"},
            "its scores are not a product that is scaled, capped and added to a mask",
        ),
    ],
)
def test_a_form_that_the_operator_does_not_take_is_refused(form, why):
    assert reasons(cached(**form)) == {why}


def test_a_cache_whose_length_no_input_says_is_not_shared(decoder):
    model = decoder.clone()
    mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
    mask.shape = ir.Shape(["batch_size", "all_tokens"])
    result = htp_export.optimize(model, passes=PASS, level="fused")
    assert len(grouped(result.model)) == 2
    assert not shares_cache(result.model.graph)


def test_it_is_for_onnx_runtime_alone(decoder):
    assert not grouped(htp_export.optimize(decoder, level="tolerant").model)
