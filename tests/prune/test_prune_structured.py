"""Channels, heads and blocks that prune cuts out: the model is what PyTorch computes when it is built smaller."""

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import htp_export
from htp_export.errors import InputError
from tests.exporting import BOTH, open_sizes
from tests.extract.test_cutting import exported_to, run_file
from tests.nets import composed, spread, x
from tests.prune.test_prune import words
from tests.truth import untagged

# Tests that hold what prune does, whoever exported: with the other exporter they are slow.
DYNAMO = pytest.mark.parametrize(
    "exporter", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)]
)
TORCHSCRIPT = pytest.mark.parametrize(
    "exporter", ["torchscript", pytest.param("dynamo", marks=pytest.mark.slow)]
)


def export(
    model: nn.Module, kwargs: dict[str, Any], exporter: str, folder: Path, **options: Any
) -> Path:
    return exported_to(folder / "net.onnx", model, kwargs, exporter, **options)


def smallest(weight: torch.Tensor, amount: float, groups: int | None = None) -> torch.Tensor:
    """The channels that stay: those with the largest mean absolute values."""
    norms = weight.detach().abs().reshape(groups or weight.shape[0], -1).mean(1)
    gone = norms.argsort()[: round(amount * len(norms))]
    return torch.tensor([k for k in range(len(norms)) if k not in gone])


def keep(module: nn.Module, channels: torch.Tensor) -> None:
    """Leave some channels of all tensors of a layer."""
    with torch.no_grad():
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            if tensor.dim():
                left = tensor.index_select(0, channels)
                setattr(
                    module, name, nn.Parameter(left) if isinstance(tensor, nn.Parameter) else left
                )


def checked(model: nn.Module, kwargs: dict[str, Any], file: Path) -> None:
    onnx.checker.check_model(str(file), full_check=True)
    assert untagged(onnx.load(file)) == []
    graph = htp_export.load(file).model.graph
    assert [name for name, value in graph.initializers.items() if not value.uses()] == []
    verified = htp_export.verify(model, file, (), kwargs)
    assert verified.ok, str(verified)


def convolve(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalisation, a depthwise convolution, a residual sum, a concatenation and a flattened head."""
    hidden = self.point(torch.relu(self.depthwise(torch.relu(self.norm(self.first(x))))))
    hidden = torch.relu(hidden + self.skip(x))
    return self.head(self.pool(torch.cat([hidden, self.side(hidden)], 1)).flatten(1))


def convolutions() -> Any:
    return composed(
        convolve,
        first=nn.Conv2d(3, 8, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(8),
        depthwise=nn.Conv2d(8, 8, 3, padding=1, groups=8),
        point=nn.Conv2d(8, 6, 1),
        skip=nn.Conv2d(3, 6, 1),
        side=nn.Conv2d(6, 4, 1),
        pool=nn.MaxPool2d(2),
        head=nn.Linear(10 * 4, 5),
    )


@pytest.mark.long
@BOTH
def test_channels_are_cut_through_the_graph(exporter, tmp_path):
    torch.manual_seed(0)
    model, kwargs = spread(convolutions()).eval(), {"x": x(2, 3, 4, 4)}
    file = export(model, kwargs, exporter, tmp_path)
    before = htp_export.load(file)
    # the norm is folded into it
    weight = torch.tensor(before["first"].nodes[0].inputs[1].const_value.numpy())
    plan = {"first": "channels:0.25", "point": "channels:0.5", "side": "channels:0.5"}
    result = htp_export.prune(file, plan, tmp_path / "cut.onnx")
    smaller = copy.deepcopy(model)
    kept = smallest(weight, 0.25)
    for module in (smaller.first, smaller.norm, smaller.depthwise):
        keep(module, kept)
    smaller.depthwise.groups = 6
    with torch.no_grad():
        smaller.point.weight = nn.Parameter(smaller.point.weight[:, kept])
        kept = smallest(model.point.weight, 0.5)
        for module in (smaller.point, smaller.skip):
            keep(module, kept)
        smaller.side.weight = nn.Parameter(smaller.side.weight[:, kept])
        aside = smallest(model.side.weight, 0.5)
        keep(smaller.side, aside)
        columns = smaller.head.weight.reshape(5, 10, 4)[:, [*kept.tolist(), *(6 + aside).tolist()]]
        smaller.head.weight = nn.Parameter(columns.reshape(5, -1))
    checked(smaller, kwargs, tmp_path / "cut.onnx")
    assert result.modules["first"].sparsity == 0.25
    assert result.modules["first"].bytes_after < result.modules["first"].bytes_before
    assert result.modules[""].weights_after == sum(
        p.numel() for n, p in smaller.named_parameters() if p.dim() > 1
    )
    written = htp_export.load(tmp_path / "cut.onnx")
    assert [node.name for node in written.nodes] == [node.name for node in before.nodes]
    shapes = {name: tuple(p.shape) for name, p in smaller.named_parameters()}
    said = {
        f"{p}.{n}": shape
        for p, held in written.parameters.items()
        for n, shape in held.shapes.items()
    }
    assert said == shapes


def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Heads with fewer heads of keys; a projection in three dimensions."""
    q, k, v = (
        layer(x).view(x.shape[0], x.shape[1], heads, self.size).transpose(1, 2)
        for layer, heads in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
    )
    if self.groups != self.heads:
        times = self.heads // self.groups
        b, g, s, d = k.shape
        k = k[:, :, None].expand(b, g, times, s, d).reshape(b, g * times, s, d)
        v = v[:, :, None].expand(b, g, times, s, d).reshape(b, g * times, s, d)
    weights = torch.softmax(q @ k.transpose(2, 3) / self.size**0.5, -1)
    return self.out((weights @ v).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


def block(heads: int = 4, groups: int = 4, size: int = 3) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

    layers = {"q": nn.Linear(12, heads * size), "k": nn.Linear(12, groups * size, bias=False)}
    layers |= {"v": nn.Linear(12, groups * size), "out": nn.Linear(heads * size, 12)}
    attention = composed(attend, heads=heads, groups=groups, size=size, **layers)
    mlp = {"up": nn.Linear(12, 16), "down": nn.Linear(16, 12)}
    return composed(forward, attention=attention, norm=nn.LayerNorm(12), **mlp)


def stacked(count: int = 3, heads: int = 4, groups: int = 4) -> Any:
    layers = nn.Sequential(*(block(heads, groups) for _ in range(count)))
    return composed(
        lambda self, words: self.head(self.layers(self.embed(words))),
        embed=nn.Embedding(9, 12), layers=layers, head=nn.Linear(12, 5),
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return export(
        spread(stacked(2)).eval(), words(), "torchscript", tmp_path_factory.mktemp("layers")
    )


def without_heads(attention: Any, groups: list[int]) -> None:
    """Cut heads out of an attention module, by groups of those that share keys."""
    times, size = attention.heads // attention.groups, attention.size
    stay = torch.tensor([g * size + i for g in groups for i in range(size)])
    rows = torch.tensor(
        [(g * times + h) * size + i for g in groups for h in range(times) for i in range(size)]
    )
    for module, indices in ((attention.q, rows), (attention.k, stay), (attention.v, stay)):
        keep(module, indices)
    attention.out.weight = nn.Parameter(attention.out.weight[:, rows])
    attention.heads, attention.groups = len(groups) * times, len(groups)


@TORCHSCRIPT
@pytest.mark.parametrize("groups", [pytest.param(4, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("is_open", [pytest.param(False, marks=pytest.mark.slow), True])
def test_heads_are_cut(is_open, groups, exporter, tmp_path):
    torch.manual_seed(0)
    model = spread(stacked(2, 4, groups)).eval()
    sizes = open_sizes(exporter, words={0: "batch", 1: "length"}) if is_open else {}
    file = export(model, words(), exporter, tmp_path, **sizes)
    result = htp_export.prune(file, {"layers.0.attention": "heads:0.5"}, tmp_path / "cut.onnx")
    attention = model.layers[0].attention
    means = [
        sum(
            float(layer.weight.detach().abs().reshape(groups, -1)[g].sum())
            for layer in (attention.q, attention.k, attention.v)
        )
        for g in range(groups)
    ]
    kept = sorted(sorted(range(groups), key=means.__getitem__)[groups // 2 :])
    without_heads(attention, kept)
    checked(model, words(), tmp_path / "cut.onnx")
    assert result.modules["layers.0.attention"].sparsity == 0.5
    assert result.modules["layers.1.attention"].sparsity == 0


@pytest.mark.long
@DYNAMO
def test_channels_of_a_hidden_layer_and_of_the_whole_stream(exporter, tmp_path):
    torch.manual_seed(0)
    model = spread(stacked(1)).eval()
    file = export(
        model, words(), exporter, tmp_path, **open_sizes(exporter, words={0: "batch", 1: "length"})
    )
    plan = {"layers.*.up": "channels:0.25", "embed": "channels:0.5"}
    htp_export.prune(file, plan, tmp_path / "cut.onnx")
    stream = smallest(model.embed.weight.T, 0.5)
    with torch.no_grad():
        for layer in model.layers:
            hidden = smallest(layer.up.weight, 0.25)
            keep(layer.up, hidden)
            layer.down.weight = nn.Parameter(layer.down.weight[:, hidden][stream])
            layer.down.bias = nn.Parameter(layer.down.bias[stream])
            keep(layer.norm, stream)
            layer.norm.normalized_shape = (6,)
            attention = layer.attention
            keep(attention.out, stream)
            for module in (layer.up, attention.q, attention.k, attention.v):
                module.weight = nn.Parameter(module.weight[:, stream])
        model.embed.weight = nn.Parameter(model.embed.weight[:, stream])
        model.head.weight = nn.Parameter(model.head.weight[:, stream])
    checked(model, words(), tmp_path / "cut.onnx")


@TORCHSCRIPT
def test_residual_blocks_are_removed(exporter, tmp_path):
    torch.manual_seed(0)
    model = spread(stacked(4)).eval()
    file = export(model, words(), exporter, tmp_path)
    result = htp_export.prune(
        file, {"layers.1": "drop", "layers.2": "drop", "head": 0.5}, tmp_path / "cut.onnx"
    )
    torch_prune.l1_unstructured(model.head, "weight", 0.5)
    wanted = model(**words())
    for number in (1, 2):
        model.layers[number] = nn.Identity()
    assert not torch.allclose(wanted, model(**words()))
    [found] = run_file(
        tmp_path / "cut.onnx",
        {onnx.load(tmp_path / "cut.onnx").graph.input[0].name: words()["words"].numpy()},
    )
    assert torch.allclose(torch.tensor(found), model(**words()), atol=1e-5)
    assert result.removed == ("layers.1", "layers.2")
    tree = htp_export.load(tmp_path / "cut.onnx").hierarchy
    assert {path: tree[path].fate for path in ("layers.0", "layers.1", "layers.1.up", "layers.3")} == {
        "layers.0": "computed", "layers.1": "identity", "layers.1.up": "dead", "layers.3": "computed",
    }  # fmt: skip
    assert result.modules["layers.1"].sparsity == 1
    assert result.modules["layers.1"].bytes_after == 0
    onnx.checker.check_model(str(tmp_path / "cut.onnx"), full_check=True)
    assert untagged(onnx.load(tmp_path / "cut.onnx")) == []


@pytest.mark.long
def test_a_block_whose_output_is_that_of_the_model_is_removed(tmp_path):
    torch.manual_seed(0)
    model, kwargs = spread(nn.Sequential(block(), block())).eval(), {"input": x(2, 4, 12)}
    file = export(model, kwargs, "dynamo", tmp_path)
    htp_export.prune(file, {"1": "drop"}, tmp_path / "cut.onnx")
    [found] = run_file(tmp_path / "cut.onnx", {"input": kwargs["input"].numpy()})
    assert torch.allclose(torch.tensor(found), model[0](kwargs["input"]), atol=1e-5)
    names = [
        [value.name for value in onnx.load(each).graph.output]
        for each in (file, tmp_path / "cut.onnx")
    ]
    assert names[0] == names[1]


def test_a_share_of_all_channels_leaves_one_of_each_and_random_ones_are_seeded(tmp_path):
    torch.manual_seed(0)
    model = spread(stacked(3)).eval()
    with torch.no_grad():
        model.layers[1].up.weight *= 0.01
    file = export(model, words(), "torchscript", tmp_path)
    result = htp_export.prune(file, {"layers.*.up": "channels:0.4"}, scope="global")
    gone = [16 - result.modules[f"layers.{k}.up"].weights_after // 12 for k in range(3)]
    assert gone[1] == 15
    assert sum(gone) == round(0.4 * 48)

    def rows(seed: int) -> bytes:
        pruned = htp_export.prune(file, {"layers.0.up": "channels:0.5"}, method="random", seed=seed)
        return b"".join(
            pruned.model.graph.initializers[name].const_value.numpy().tobytes()
            for name in sorted(pruned.cut)
        )

    assert rows(1) == rows(1) != rows(2)


@pytest.mark.parametrize(
    ("scope", "left"), [("local", ["1 of 16", "1 of 16"]), ("global", ["2 of 32"])]
)
def test_a_share_that_cannot_be_reached_is_said(scope, left, two_layers):
    result = htp_export.prune(two_layers, {"layers.*.up": "channels:1.0"}, scope=scope)
    said = [f"channels:1 leaves {count} channels, as one of each has to stay" for count in left]
    assert list(result.short.values()) == said
    assert all(any(note.endswith(each) for note in result.notes) for each in said)
    assert htp_export.prune(two_layers, {"layers.*.up": "channels:0.9"}, scope=scope).short == {}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"head": "channels:0.5"}, "its channels reach output"),
        ({"layers.0.up": "heads:0.5"}, "there are no attention heads to cut"),
        (
            {
                "layers.0.up": "channels:0.5",
                "layers.0.down": "channels:0.25",
                "embed": "channels:0.5",
            },
            "for which the plan also has",
        ),
        ({"layers.0.attention": "drop"}, "is no residual block"),
        ({"layers.0.up": "drop"}, "is no residual block"),
        ({".": "drop"}, "it is the whole model"),
        ({"layers.0.norm": "channels:0.5"}, "have no weights"),
        ({"layers.0.up": "channels:2"}, "a share is from 0 to 1"),
    ],
)
def test_what_cannot_be_cut_is_said(plan, message, two_layers, tmp_path):
    with pytest.raises(InputError, match=message):
        htp_export.prune(two_layers, plan, tmp_path / "cut.onnx")
    assert not list(tmp_path.iterdir())


def test_the_node_that_stops_a_cut_is_named(tmp_path):
    parts = {"up": nn.Linear(4, 6), "down": nn.Linear(6, 2)}
    net = composed(lambda self, x: self.down(self.up(x).cumsum(1)), **parts)
    file = export(spread(net).eval(), {"x": x(2, 4)}, "dynamo", tmp_path)
    with pytest.raises(
        InputError,
        match=r"'up\.weight' of 'up': its channels cannot be cut, at CumSum.* of ''; the value 0",
    ):
        htp_export.prune(file, {"up": "channels:0.5"})


def gpt2() -> tuple[nn.Module, dict[str, Any], str, str, int]:
    """Queries, keys and values in one matrix, which a Split takes apart."""
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=30, n_positions=16))
    ids = torch.tensor([[3, 7, 1, 9, 2]])
    kwargs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "use_cache": False,
        "return_dict": False,
    }
    return model, kwargs, "h.0.attn", "h.0.attn.c_proj", 0


def transformer_layer() -> tuple[nn.Module, dict[str, Any], str, str, int]:
    """Queries, keys and values in one matrix, which a Reshape to three and to heads takes apart."""
    model = nn.TransformerEncoderLayer(16, 4, 20, batch_first=True)
    return model, {"src": x(1, 5, 16)}, "self_attn", "self_attn.out_proj", 1


@pytest.mark.long
@DYNAMO
@pytest.mark.parametrize("make", [pytest.param(gpt2, marks=pytest.mark.slow), transformer_layer])
def test_heads_of_merged_projections_are_cut(make, exporter, tmp_path):
    torch.manual_seed(0)
    model, kwargs, attention, output, axis = make()
    model = spread(model).eval()
    file = export(model, kwargs, exporter, tmp_path)
    result = htp_export.prune(file, {attention: "heads:0.25"}, tmp_path / "cut.onnx")
    assert result.modules[attention].sparsity == 0.25
    arrays = [value.numpy() for value in kwargs.values() if isinstance(value, torch.Tensor)]
    names = [value.name for value in onnx.load(tmp_path / "cut.onnx").graph.input]
    found = torch.tensor(run_file(tmp_path / "cut.onnx", dict(zip(names, arrays, strict=False)))[0])
    same = []
    for head in range(4):  # a head that is left out gives nothing
        smaller = copy.deepcopy(model)
        with torch.no_grad():
            smaller.get_submodule(output).weight.index_fill_(
                axis, torch.arange(4 * head, 4 * head + 4), 0.0
            )
            wanted = smaller(**kwargs)
        same.append(
            torch.allclose(
                found, wanted if isinstance(wanted, torch.Tensor) else wanted[0], atol=1e-4
            )
        )
    assert same.count(True) == 1


@BOTH
def test_the_shape_of_a_square_matrix_is_cut_at_its_axis(exporter, tmp_path):
    torch.manual_seed(0)
    model = spread(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    ).eval()
    # three dimensions: matrices are transposed
    file = export(model, {"input": x(2, 5, 6)}, exporter, tmp_path)
    after = htp_export.prune(file, {"2": "channels:0.5"}).tagged
    assert after.parameters["2"].shapes == {"weight": (4, 8), "bias": (4,)}
    assert after.parameters["4"].shapes == {"weight": (3, 4), "bias": (3,)}
