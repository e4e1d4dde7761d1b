"""Attention in named steps: the same results, modules of their own, and the model as it was."""

import contextlib
import itertools
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import htp_export
from htp_export import decomposed_attention
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.process.restoring import restored, turn_attention_fast_path_off
from tests.exporting import exported, quick
from tests.nets import EXPORTERS, Holding, spread

STEPS = ("q_proj", "k_proj", "v_proj", "scores", "softmax", "context", "out_proj")

GRID = [
    {
        "bias": bias,
        "batch_first": first,
        "add_bias_kv": bias_kv,
        "add_zero_attn": zero,
        "kinds": kinds,
    }
    for bias, first, bias_kv, zero, kinds in itertools.product(
        (True, False),
        (True, False),
        (True, False),
        (True, False),
        ("self", "memory", "three", "sizes"),
    )
]
CALLS = [
    {
        "batched": batched,
        "weights": weights,
        "average": average,
        "mask": mask,
        "padding": padding,
        "causal": causal,
    }
    for batched, weights, average, mask, padding, causal in itertools.product(
        (True, False),
        (True, False),
        (True, False),
        ("none", "bool 2", "float 2", "bool 3", "float 3"),
        ("none", "bool", "float"),
        (True, False),
    )
    if (weights or not average)
    and ("bool" in mask) >= (padding == "bool" and mask != "none")
    and ("float" in mask) >= (padding == "float" and mask != "none")
    and (mask == "float 2" or not causal)
]


def call_of(
    options: dict[str, Any], call: dict[str, Any], seed: int
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A small attention and arguments for it; two heads of four features."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"kdim": 5, "vdim": 7} if options["kinds"] == "sizes" else {}
    plain = {name: value for name, value in options.items() if name != "kinds"}
    attention = spread(nn.MultiheadAttention(8, 2, **plain, **sizes).eval(), seed)
    queries, keys = 4, 4 if options["kinds"] == "self" or call["causal"] else 6
    batch = 3 if call["batched"] else 1

    def tensor(length: int, width: int) -> torch.Tensor:
        shape = (batch, length, width) if options["batch_first"] else (length, batch, width)
        return torch.randn(shape if call["batched"] else (length, width), generator=generator)

    query = tensor(queries, 8)
    key = query if options["kinds"] == "self" else tensor(keys, sizes.get("kdim", 8))
    value = tensor(keys, sizes.get("vdim", 8)) if options["kinds"] in ("three", "sizes") else key
    kind, _, rank = call["mask"].partition(" ")
    mask_shape = (queries, keys) if rank == "2" else (batch * 2, queries, keys)
    mask = None if kind == "none" else torch.randn(mask_shape, generator=generator)
    if call["causal"]:
        mask = nn.Transformer.generate_square_subsequent_mask(queries)
    padding_shape = (batch, keys) if call["batched"] else (keys,)
    padding = None if call["padding"] == "none" else torch.randn(padding_shape, generator=generator)
    kwargs = {
        "attn_mask": mask > 0.3 if kind == "bool" and mask is not None else mask,
        "key_padding_mask": padding > 0.3
        if call["padding"] == "bool" and padding is not None
        else padding,
        "need_weights": call["weights"],
        "average_attn_weights": call["average"],
        "is_causal": call["causal"],
    }
    return attention, (query, key, value), kwargs


@pytest.mark.parametrize(
    "options", quick(GRID, *GRID[::9]), ids=lambda options: "-".join(map(str, options.values()))
)
def test_results_are_those_of_the_slow_path_over_all_arguments(options):
    for seed, call in enumerate(random.Random(str(options)).sample(CALLS, 12)):
        attention, args, kwargs = call_of(options, call, seed)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), restored(turn_attention_fast_path_off):
            expected = attention(*args, **kwargs)
            for exact in (True, False):
                with decomposed_attention(attention, exact=exact):
                    results = attention(*args, **kwargs)
                for ours, torchs in zip(results, expected, strict=True):
                    if torchs is None:
                        assert ours is None
                        continue
                    tolerance = 0.0 if exact else 1e-5
                    torch.testing.assert_close(
                        ours, torchs, rtol=0, atol=tolerance, equal_nan=True, msg=str(call)
                    )


def test_weights_are_views_and_the_state_dict_and_the_model_are_as_before():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    before, names = set(model.state_dict()), [name for name, _ in model.named_modules()]
    with contextlib.suppress(ZeroDivisionError), decomposed_attention(model):
        assert set(model.state_dict()) == before
        weight = model.self_attn.in_proj_weight
        assert model.self_attn.q_proj.weight.data_ptr() == weight.data_ptr()
        assert model.self_attn.v_proj.weight.data_ptr() == weight[16:].data_ptr()
        model(torch.randn(1, 3, 8))
        raise ZeroDivisionError
    assert [name for name, _ in model.named_modules()] == names
    assert "forward" not in vars(model.self_attn)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_nested_tensors_and_taken_names_are_refused_by_module():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=True)}).eval()
    nested = torch.nested.as_nested_tensor(
        [torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged
    )
    with (
        decomposed_attention(model),
        pytest.raises(InputError, match=r"'attention'.*nested tensors"),
    ):
        model["attention"](nested, nested, nested)
    model["attention"].scores = nn.Identity()
    with pytest.raises(InputError, match=r"'attention'.*'scores'"), decomposed_attention(model):
        pass
    assert list(dict(model["attention"].named_children())) == ["out_proj", "scores"]


def test_an_attention_with_a_forward_of_its_own_stays_as_it_is():
    class Own(nn.MultiheadAttention):
        def forward(self, query, key, value):  # type: ignore[no-untyped-def,override]
            return query + key + value

    model = nn.Sequential(nn.Identity(), Own(8, 2))
    with decomposed_attention(model):
        assert [name for name, _ in model.named_modules()] == ["", "0", "1", "1.out_proj"]


class Grouped(Holding, softmax=nn.Linear(8, 8)):
    """Calls `scaled_dot_product_attention` twice; has modules with the names of steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.softmax(x).unflatten(-1, (4, 2)).transpose(1, 2)
        key = heads[:, :2]
        causal = F.scaled_dot_product_attention(
            heads, key, key, is_causal=True, scale=0.7, enable_gqa=True
        )
        hidden = torch.ones(5, 5, dtype=torch.bool).tril(-1)
        return (
            F.scaled_dot_product_attention(causal, heads, heads, hidden).transpose(1, 2).flatten(2)
        )


@pytest.mark.parametrize("exact", [True, False])
def test_a_call_of_sdpa_in_any_module_runs_in_steps(exact):
    model, x = nn.Sequential(nn.Linear(8, 8), Grouped()).eval(), torch.randn(2, 5, 8)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        expected = model(x)
        with decomposed_attention(model, exact=exact), decomposed_attention(model):
            result = model(x)
            names = [name for name, _ in model.named_modules()]
    assert names == ["", "0", "1", "1.softmax", "1.sdpa_scores", "1.sdpa_softmax", "1.sdpa_context"]
    torch.testing.assert_close(result, expected, rtol=0, atol=0 if exact else 1e-5)
    assert not expected.isnan().any()  # the first query sees no key
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "1.softmax"]


class Masked(Holding, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(2))):
    """Layers that call `scaled_dot_product_attention` with one mask."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            heads = layer(x).view(2, 5, 2, 4).transpose(1, 2)
            x = (
                F.scaled_dot_product_attention(heads, heads, heads, mask)
                .transpose(1, 2)
                .reshape(2, 5, 8)
            )
        return x


def whole_and_in_steps(
    model: nn.Module, kwargs: dict[str, Any], exporter: str, folder: Path
) -> tuple[htp_export.TaggedModel, htp_export.TaggedModel]:
    """The file of a model, and that of the model with its attention in steps."""
    whole = exported(model, kwargs, exporter, folder)
    with decomposed_attention(model):
        steps = exported(model, kwargs, exporter, folder)
    return htp_export.load(whole), htp_export.load(steps)


FLAGS = torch.ones(5, 5, dtype=torch.bool).tril()
MASKS = {"flags": FLAGS, "numbers": torch.zeros(5, 5).masked_fill(~FLAGS, -torch.inf)}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("mask", "exporter"),
    quick(
        itertools.product((None, "flags", "numbers"), EXPORTERS),
        ("flags", "dynamo"),
        ("numbers", "torchscript"),
    ),
)
def test_steps_take_no_more_nodes_with_any_mask(mask, exporter, tmp_path):
    model = Masked().eval()
    kwargs = {"x": torch.randn(2, 5, 8)} | ({} if mask is None else {"mask": MASKS[mask]})
    plain, tagged = whole_and_in_steps(model, kwargs, exporter, tmp_path)
    assert len(tagged.nodes) <= len(plain.nodes)
    assert htp_export.verify(model, tagged, kwargs=kwargs).ok


def test_what_dynamo_compiles_stays_as_it_is():
    class Flexible(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return flex_attention(x, x, x)

    model, x = Flexible().eval(), torch.randn(1, 2, 5, 8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        expected = model(x)
        with decomposed_attention(model):
            torch.testing.assert_close(model(x), expected)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    """Two layers of torch's own transformer, and an input."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 64, batch_first=True), 2)
    return spread(model.eval()), torch.randn(1, 5, 16)


@pytest.mark.torch
@pytest.mark.parametrize("exporter", quick(EXPORTERS, "torchscript"))
def test_a_transformer_exports_with_seven_steps_a_layer_and_no_more_nodes(exporter, tmp_path):
    model, x = encoder()
    plain, tagged = whole_and_in_steps(model, {"src": x}, exporter, tmp_path)
    result = htp_export.verify(model, tagged, (x,))  # runs the model in the steps of the file
    assert result.ok
    assert result.modules["layers.1.self_attn.softmax"].status == "agrees"
    assert len(tagged[""].nodes) <= len(plain[""].nodes)
    for layer in range(2):
        path = f"layers.{layer}.self_attn"
        assert set(tagged[path].children) == {f"{path}.{step}" for step in STEPS}
        synthetic = {name for name in STEPS if tagged.hierarchy[f"{path}.{name}"].synthetic}
        assert synthetic == set(STEPS) - {"out_proj"}
        kinds = {
            step: {node.op_type for node in tagged[f"{path}.{step}"].nodes} - {"Constant"}
            for step in STEPS
        }
        assert kinds["softmax"] == {"Softmax"}
        assert kinds["context"] == {"MatMul"}
        assert (
            kinds["q_proj"]
            == kinds["k_proj"]
            == kinds["v_proj"]
            == kinds["out_proj"]
            == {"MatMul", "Add"}
        )
        assert {"Mul", "MatMul"} <= kinds["scores"]


@pytest.mark.torch
def test_the_report_has_the_numbers_of_both_exports_and_of_each_step():
    model, x = encoder()
    report = htp_export.attention_report(model, (x,))
    layers = [f"layers.{layer}.self_attn" for layer in range(2)]
    assert report.modules == tuple(layers)
    assert set(report.before) == {"model", "attention"}
    assert set(report.after) == {"model", "attention", *STEPS}
    program, rows = htp_export.export(model, (x,), verbose=False), report.before
    tagged, costs = htp_export.load(program), htp_export.cost(program).modules
    assert rows["model"].nodes == len(tagged.nodes)
    assert rows["attention"].nodes == sum(len(tagged[path].nodes) for path in layers)
    calls = [node for node in program.exported_program.graph.nodes if node.op == "call_function"]
    assert rows["model"].operations == len(calls) > rows["attention"].operations > 0
    cost, root = rows["model"].cost, costs[""]
    assert (cost.traffic_bytes, cost.fused_traffic_bytes) == (
        root.traffic_bytes,
        root.fused_traffic_bytes,
    )
    assert (cost.peak_bytes, cost.fused_peak_bytes) == (root.peak_bytes, root.fused_peak_bytes)
    cost = rows["attention"].cost
    assert cost.traffic_bytes == sum(costs[path].traffic_bytes for path in layers)
    assert cost.fused_traffic_bytes == sum(costs[path].fused_traffic_bytes for path in layers)
    assert cost.peak_bytes == max(costs[path].peak_bytes for path in layers) > cost.fused_peak_bytes
    named = [report.after[step] for step in STEPS]
    assert all(row.modules == 2 for row in named)
    assert sum(row.nodes for row in named) <= report.after["attention"].nodes
    assert sum(row.operations for row in named) <= report.after["attention"].operations
    assert (
        report.after["scores"].cost.fused_traffic_bytes < report.after["scores"].cost.traffic_bytes
    )
    # one node
    assert (
        report.after["softmax"].cost.fused_traffic_bytes
        == report.after["softmax"].cost.traffic_bytes
    )
    assert report.after["model"].nodes <= report.before["model"].nodes
    data = json.loads(json.dumps(report.to_dict()))
    assert (
        data["after"]["scores"]["cost"]["traffic_bytes"]
        == report.after["scores"].cost.traffic_bytes
    )
    lines = str(report).splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["before", "model"],
        ["before", "attention"],
    ]
    assert len(lines) == 1 + 2 + 2 + len(STEPS) + 2
    assert lines[-2] == report.summary
    assert lines[-2].startswith("2 modules with attention; ONNX nodes from ")


@pytest.mark.torch
def test_there_is_no_report_on_a_model_without_attention():
    with pytest.raises(InputError, match=r"no module .* scaled_dot_product_attention"):
        htp_export.attention_report(nn.Linear(2, 2).eval(), (torch.randn(1, 2),))


@pytest.mark.torch
def test_a_kernel_that_is_kept_is_one_node_which_belongs_to_its_steps(tmp_path):
    (model, x), file = encoder(), tmp_path / "kept.onnx"
    with torch.no_grad(), decomposed_attention(model, keep_kernel=True):
        htp_export.export(model, (x,), file, opset_version=23, verbose=False)
        assert htp_export.verify(model, file, (x,)).ok
        result = model(x)
    torch.testing.assert_close(result, model(x))
    tagged = htp_export.load(file)
    kernels = [node for node in tagged[""].nodes if node.op_type == "Attention"]
    paths = [f"layers.{layer}.self_attn" for layer in range(2)]
    owners = [(f"{path}.scores", f"{path}.softmax", f"{path}.context") for path in paths]
    assert [tagged.owners_of(node) for node in kernels] == owners
    assert not htp_export.cost(file).uncounted


def test_a_kept_kernel_takes_what_scaled_dot_product_attention_takes():
    model, x = nn.Sequential(nn.Linear(8, 8), Grouped()).eval(), torch.randn(2, 5, 8)
    attention = spread(nn.MultiheadAttention(8, 2, batch_first=True).eval())
    with torch.no_grad(), restored(turn_attention_fast_path_off):
        expected, weighted = model(x), attention(x, x, x)
        with (
            decomposed_attention(model, keep_kernel=True),
            decomposed_attention(attention, keep_kernel=True),
        ):
            torch.testing.assert_close(model(x), expected)
            torch.testing.assert_close(attention(x, x, x), weighted)
    with (
        pytest.raises(InputError, match="exclude"),
        decomposed_attention(model, exact=True, keep_kernel=True),
    ):
        pass


TINY = ["bert", "--random-weights"]
TINY += [
    part
    for size in ("hidden_size=16", "intermediate_size=16", "vocab_size=40")
    for part in ("--set", size)
]
TINY += ["--set", "num_hidden_layers=1", "--set", "num_attention_heads=2", "--quiet"]


@pytest.mark.torch
@pytest.mark.parametrize("keep", quick([True, False], False))
def test_the_command_line_has_attention_in_steps_and_kept(keep, tmp_path):
    file = tmp_path / "bert.onnx"
    options = ["--decompose-attention", "--verify", *(["--keep-attention"] if keep else [])]
    assert main(["export", *TINY, *options, "-o", str(file)]) == 0
    tagged = htp_export.load(file)
    steps = tuple(
        f"encoder.layer.0.attention.self.{step}" for step in ("scores", "softmax", "context")
    )
    assert set(steps) < set(tagged.paths)
    kernels = [tagged.owners_of(node) for node in tagged[""].nodes if node.op_type == "Attention"]
    assert kernels == ([steps] if keep else [])
