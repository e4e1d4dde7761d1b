"""Fingerprints: families by mechanisms, with tags and without, and the blocks that repeat."""

import functools
import json
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.fingerprint.families import FAMILIES
from htp_export.command.main import main
from tests.exporting import every, exported, of_type, open_sizes
from tests.nets import Holding, spread
from tests.written import weight, written

Made = tuple[nn.Module, dict[str, Any]]

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


class TimeUnet(nn.Module):
    """One level down and up again, told the time step as sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 8))
        self.down, self.inner, self.up = (
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.Conv2d(8, 8, 3, 1, 1),
            nn.ConvTranspose2d(8, 8, 2, 2),
        )
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Conv2d(11, 3, 3, 1, 1)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-math.log(10_000.0) * torch.arange(8) / 8)
        waves = timestep[:, None] * frequencies[None]
        told = self.time(torch.cat([waves.sin(), waves.cos()], -1))
        inner = torch.relu(self.norm(self.inner(self.down(sample) + told[:, :, None, None])))
        return self.out(torch.cat([self.up(inner), sample], 1))


class Experts(
    Holding, router=nn.Linear(8, 4, bias=False), weights=nn.Parameter(torch.randn(4, 8, 8))
):
    """Two of four layers for each position, chosen by a router."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        return (torch.einsum("bd,bkde->bke", x, self.weights[chosen]) * share[..., None]).sum(1)


class Recurrent(
    Holding,
    embedding=nn.Embedding(30, 8),
    lstm=nn.LSTM(8, 8, batch_first=True),
    out=nn.Linear(8, 2),
):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embedding(tokens))[0][:, -1])


class Cell(Holding, input=nn.Linear(4, 8), state=nn.Linear(8, 8)):
    """A recurrence written in Python, which exporters unroll."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 8)
        states = []
        for step in range(6):
            state = torch.tanh(self.input(x[:, step]) + self.state(state))
            states.append(state)
        return torch.stack(states, 1)


# Type of transformers → its family, and what makes it small.
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("encoder", {**SMALL, "vocab_size": 100}),
    "gpt2": ("decoder", {
        "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0,
    }),
    "bart": ("encoder-decoder", {
        "d_model": 16, "vocab_size": 100,
        **{f"{side}_{key}": 2 for side in ("encoder", "decoder") for key in ("layers", "attention_heads")},
    }),
    "vit": ("vision transformer", {**SMALL, "image_size": 32}),
    "resnet": ("CNN", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "basic"}),
    "wav2vec2": ("speech", {**SMALL, "conv_dim": [8] * 7, "num_conv_pos_embedding_groups": 4}),
    "clip": ("multimodal", {
        **{f"{side}_config.{key}": n for side in ("text", "vision") for key, n in SMALL.items()},
        "text_config.vocab_size": 100, "vision_config.image_size": 32, "vision_config.patch_size": 16,
        "text_config.eos_token_id": 99, "text_config.bos_token_id": 0, "text_config.pad_token_id": 1,
    }),
}  # fmt: skip
OWN: dict[str, tuple[str, str, Callable[[], Made]]] = {
    "unet": (
        *("diffusion-like", "dynamo"),
        lambda: (TimeUnet(), {"sample": torch.randn(1, 3, 8, 8), "timestep": torch.tensor([3.0])}),
    ),
    "experts": ("mixture", "torchscript", lambda: (Experts(), {"x": torch.randn(3, 8)})),
    "lstm": (
        "recurrent",
        "torchscript",
        lambda: (Recurrent(), {"tokens": torch.randint(0, 30, (2, 5))}),
    ),
    "unrolled": ("recurrent", "dynamo", lambda: (Cell(), {"x": torch.randn(2, 6, 4)})),
}
FAMILY = {name: family for name, (family, *_) in (*TYPES.items(), *OWN.items())}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Name of a case → its file, each exported once."""

    @functools.cache
    def file(name: str) -> onnx.ModelProto:
        _, exporter, build = OWN.get(name) or (
            "",
            "torchscript",
            lambda: of_type(name, **TYPES[name][1]),
        )
        model, inputs = build()
        names = {} if exporter == "dynamo" else {"input_names": [*inputs]}
        return exported(
            spread(model).eval(), inputs, exporter, tmp_path_factory.mktemp(name), **names
        )

    return file


def bare(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with nothing that says where it is from."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    copy.ClearField("metadata_props")
    for number, node in enumerate(copy.graph.node):
        node.ClearField("metadata_props")
        node.name = f"n{number}"
    return copy


@pytest.mark.parametrize("name", every(2, FAMILY))
def test_the_family_with_tags_and_without(name, files):
    found = [htp_export.fingerprint(model).family for model in (files(name), bare(files(name)))]
    assert found == [FAMILY[name]] * 2


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("bert", "2 attentions: 2 bidirectional"),
        ("gpt2", "2 attentions: 2 causal"),
        ("bart", "6 attentions: 2 bidirectional, 2 causal, 2 cross"),
        ("vit", "input pixel_values [1, 3, 32, 32] is an image: it is cut in patches of 16x16"),
        (
            "wav2vec2",
            "input input_values [1, 16000] is a signal or spectrum over time: it enters a convolution of 10, stride 5",
        ),
        ("unet", "input timestep is a time step: its sines and cosines enter a linear layer"),
        ("experts", "1 routers: each position chooses 2 of 4 experts"),
        ("lstm", "1 LSTM"),
    ],
)
def test_evidence_says_what_was_seen(name, fact, files):
    assert fact in htp_export.fingerprint(files(name)).evidence


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("bert", [(2, "BertLayer")]),
        ("gpt2", [(2, "GPT2Block")]),
        ("bart", [(2, "BartDecoderLayer"), (2, "BartEncoderLayer")]),
        ("resnet", [(2, "ResNetBasicLayer")]),
        ("lstm", []),
    ],
)
def test_modules_of_equal_structure_are_blocks(name, blocks, files):
    found = htp_export.fingerprint(files(name)).blocks
    assert [(block.count, block.name) for block in found] == blocks
    assert all(len(block.modules) == block.count for block in found)


@pytest.mark.parametrize(
    ("name", "counts"), [("bert", [2]), ("gpt2", [2]), ("bart", [2, 2]), ("vit", [2])]
)
def test_blocks_are_found_along_the_chain_where_there_are_no_tags(name, counts, files):
    found = htp_export.fingerprint(bare(files(name))).blocks
    assert [block.count for block in found] == counts
    assert all("Softmax" in block.name and not block.modules for block in found)


def test_blocks_differ_where_a_shape_or_an_operator_does():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(5)]
    layers[1][1] = nn.Sigmoid()
    layers[3] = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))
    program = htp_export.export(nn.Sequential(*layers).eval(), (torch.randn(2, 8),), verbose=False)
    (block,) = htp_export.fingerprint(program).blocks
    assert (block.count, block.modules) == (3, ("0", "2", "4"))


def test_a_module_that_runs_again_counts_each_time():
    class Shared(Holding, layer=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = self.layer(x)
            return x

    program = htp_export.export(Shared().eval(), (torch.randn(2, 8),), verbose=False)
    (block,) = htp_export.fingerprint(program).blocks
    assert (block.count, block.modules, block.nodes) == (4, ("layer",), 3)


@pytest.mark.parametrize(
    "exporter", [pytest.param("dynamo", marks=pytest.mark.slow), "torchscript"]
)
def test_a_causal_mask_is_computed_where_sizes_are_open(exporter, tmp_path):
    model, inputs = of_type(
        "qwen2", **{**SMALL, "num_hidden_layers": 1}, num_key_value_heads=1, vocab_size=100
    )
    options = open_sizes(exporter, **{name: {0: "batch", 1: "sequence"} for name in inputs})
    found = htp_export.fingerprint(exported(model, inputs, exporter, tmp_path, **options))
    assert found.family == "decoder"
    assert (
        "input input_ids [batch, sequence] is tokens: it is looked up in a table of vectors"
        in found.evidence
    )


MASKED = """g (float[1,2,4,3] q, float[1,2,4,3] k, float[1,2,4,3] v, bool[4,4] given) => (float[1,2,4,3] y) {{
    t = Transpose<perm=[0,1,3,2]>(k)  s = MatMul(q, t)  {mask}  p = Softmax<axis=-1>(m)  y = MatMul(p, v) }}"""
LOWER = torch.ones(4, 4).tril().bool().numpy()


@pytest.mark.parametrize(
    ("mask", "family"),
    [
        ("m = Where(low, s, least)", "decoder"),
        ("n = Not(low)  m = Where(n, least, s)", "decoder"),
        ("m = Where(low, least, s)", "encoder"),
        ("a = Where(low, zero, least)  m = Add(s, a)", "decoder"),
        ("m = Add(s, bias)", "encoder"),
        ("b = And(low, given)  m = Where(b, s, least)", "decoder"),
        ("m = Where(given, s, least)", "encoder"),
    ],
)
def test_a_mask_is_causal_by_what_it_hides(mask, family):
    constants = {
        "low": LOWER,
        "least": np.float32(-1e9),
        "zero": np.float32(0),
        "bias": weight(4, 4),
    }
    assert htp_export.fingerprint(written(MASKED.format(mask=mask), **constants)).family == family


@pytest.mark.parametrize(
    "mask",
    [
        "o = ConstantOfShape(many) a = Expand(o, many) c = Slice(a, zero1, four1) n = Reshape(c, sizes) m = Add(s, n)",
        "f = Exp(logarithm) i = Cast<to=7>(f) l = Range(zero0, i, one0) c = Slice(l, zero1, four1) n = Cast<to=1>(c) "
        "m = Add(s, n)",
        "w = HannWindow(window) c = Slice(w, zero1, four1) m = Add(s, c)",
    ],
)
def test_masks_that_ask_for_very_many_elements_are_not_computed(mask):
    """Whatever the file says of their shapes: here that they are small."""
    constants = {
        "many": np.int64([200_000_000]), "zero1": np.int64([0]), "four1": np.int64([4]), "sizes": np.int64([1, 4]),
        "logarithm": np.float32(19.1), "zero0": np.int64(0), "one0": np.int64(1), "window": np.int64(200_000_000),
    }  # fmt: skip
    text = MASKED.format(mask=mask)
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 17]> {text}')
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(each), n) for n, each in constants.items()
    )
    for name in ("o", "a", "l", "w"):
        model.graph.value_info.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4])
        )
    tracemalloc.start()
    family = htp_export.fingerprint(model).family
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert family == "encoder"
    assert most < 100 << 20


@pytest.mark.parametrize(
    ("call", "evidence"),
    [
        ("Attention <is_causal = 1> (q, k, v)", "1 attentions: 1 causal"),
        ("Attention (q, k, v, low)", "1 attentions: 1 causal"),
        ("Attention (q, k, v, bias)", "1 attentions: 1 cross"),
        ("Attention (learned, k, v)", "1 attentions: 1 learned queries"),
        ("Attention (q, q, q)", "1 attentions: 1 bidirectional"),
    ],
)
def test_one_operator_is_an_attention_as_its_steps_are(call, evidence):
    inputs = ", ".join(f"float[1,2,4,3] {name}" for name in "qkv")
    constants = {"low": LOWER, "bias": weight(4, 4), "learned": weight(1, 2, 4, 3)}
    model = written(f"g ({inputs}) => (float[1,2,4,3] y) {{ y = {call} }}", 23, **constants)
    assert evidence in htp_export.fingerprint(model).evidence


def test_rotary_positions_are_no_time_steps():
    text = """g (float[1] t, float[1,4] x) => (float[1,4] y) {
        w = Mul(t, f)  s = Sin(w)  c = Cos(w)  a = Mul(x, s)  b = Mul(x, c)  h = Add(a, b)  y = MatMul(h, m) }"""
    assert htp_export.fingerprint(written(text, f=weight(4), m=weight(4, 4))).family == "unknown"


def test_what_is_none_of_these_is_unknown():
    found = htp_export.fingerprint(written("g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }"))
    assert (found.family, found.blocks) == ("unknown", ())
    assert "unknown" in FAMILIES


def test_prints_and_is_plain_data(files, tmp_path, capsys):
    path = tmp_path / "bert.onnx"
    onnx.save(files("bert"), path)
    found = htp_export.fingerprint(path)
    assert str(found).splitlines()[0] == "encoder"
    assert "2 × BertLayer" in str(found)  # noqa: RUF001 - "times"
    assert main(["fingerprint", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "encoder" in printed
    assert "BertLayer" in printed
    assert main(["fingerprint", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"][0]["modules"] == [
        f"encoder.layer.{k}" for k in range(2)
    ]


@pytest.mark.parametrize("tool", ["quantize_dynamic", "optimize"])
def test_blocks_are_still_there_after_quantization_and_optimisation(tool, files, tmp_path):
    """Scales and zero points are numbers of a layer, as weights are."""
    onnx.save(files("bert"), tmp_path / "bert.onnx")
    work = htp_export.optimize if tool == "optimize" else htp_export.tools.quantize_dynamic
    work(tmp_path / "bert.onnx", tmp_path / "after.onnx")
    found = htp_export.fingerprint(tmp_path / "after.onnx")
    assert (found.family, [(block.count, block.name) for block in found.blocks]) == (
        "encoder",
        [(2, "BertLayer")],
    )


CHOSEN = """g (float[5,4] x, bool[5,3] open) => (float[5,4] y) {{
    r = MatMul(x, w)  {choice}  e = Unsqueeze(x, one)  p = MatMul(e, m)  z = Squeeze(p, one)  y = Mul(z, s) }}"""
PICKED = "i = Squeeze(k, one)  m = Gather(weights, i)"
SHARES = "a = Softmax<axis=-1>(r)"


@pytest.mark.parametrize(
    ("choice", "family"),
    [
        (f"c = Where(open, r, least)  v, k = TopK(c, one)  {PICKED}  s = Sigmoid(v)", "mixture"),
        (f"k = ArgMax<axis=-1>(r)  {SHARES}  s = GatherElements(a, k)  {PICKED}", "mixture"),
        (
            f"k = ArgMax<axis=-1>(r)  {SHARES}  s = GatherElements(a, k)  m = GatherND(weights, k)",
            "mixture",
        ),
        (
            f"{SHARES}  c = Cast<to=1>(a)  k = ArgMax<axis=-1>(c)  {PICKED}  s = ReduceMax<axes=[1]>(c)",
            "mixture",
        ),
        (f"k = ArgMax<axis=-1>(r)  {PICKED}  s = ReduceMean<axes=[1]>(x)", "unknown"),
    ],
    ids=[
        "masked groups",
        "share of the choice",
        "picked by indices, as dynamo",
        "largest share",
        "no share",
    ],
)
def test_experts_are_chosen_by_a_share_that_is_used_too(choice, family):
    """By the largest share alone, classes are told."""
    constants = {
        "w": weight(4, 3),
        "weights": weight(3, 4, 4),
        "one": np.array([1]),
        "least": np.float32(-1e9),
    }
    assert (
        htp_export.fingerprint(written(CHOSEN.format(choice=choice), **constants)).family == family
    )
