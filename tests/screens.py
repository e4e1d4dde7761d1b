"""Screens of the page: a small encoder with fixed numbers, its page at several sizes, and how alike two screens are."""

import struct
import zlib
from pathlib import Path

import numpy as np
import onnx_ir as ir

import htp_export
from htp_export.format.hierarchy import ModuleInfo
from htp_export.format.parameters import ModuleParameters, parameters_to_json
from tests import handmade
from tests.chromium import Page

STORED = Path(__file__).parents[1] / "docs" / "images"
PANES = ("modules", "map", "graph")
SIZES = {1440: 900, 1024: 768, 390: 844}
THEMES = ("light", "dark")
SCREENS = [(pane, width, theme) for pane in PANES for width in SIZES for theme in THEMES]
LAYERS, WORDS, WIDTH, LENGTH = 6, 400, 32, 16

_SHOWN = {
    "modules": "#modules=layers.0",
    "map": "#tab=map&module=layers.2",
    "graph": "#tab=graph&module=layers.2.attention",
}
_NUMBERS = ("total_ms", "self_ms", "flops", "self_flops")
_LINEAR = "torch.nn.modules.linear.Linear"
_NORM = "torch.nn.modules.normalization.LayerNorm"


def file_name(pane: str, width: int, theme: str) -> str:
    return f"page-{pane}-{width}-{theme}.png"


class _Net:
    """Writes nodes one after the other, each with its module."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.weights: dict[str, ir.Value] = {}
        self.modules = {"": ModuleInfo("", "encoder.MaskedEncoder", 1, "computed")}
        self.held: dict[str, ModuleParameters] = {}

    def module(self, path: str, class_name: str, fate: str = "computed") -> None:
        self.modules[path] = ModuleInfo(path, class_name, 1, fate)  # type: ignore[arg-type]

    def weight(self, name: str, shape: tuple[int, ...]) -> ir.Value:
        if name not in self.weights:
            values = (
                np.random.default_rng(len(self.weights)).normal(0, 0.02, shape).astype(np.float32)
            )
            self.weights[name] = ir.Value(name=name, const_value=ir.tensor(values, name=name))
            path, _, own = name.rpartition(".")
            before = self.held.get(path, ModuleParameters({}))
            self.held[path] = ModuleParameters({**before.shapes, own: shape})
        return self.weights[name]

    def node(
        self,
        op: str,
        inputs: list[ir.Value],
        owner: str,
        name: str,
        width: int = WIDTH,
        *,
        shape: tuple[int, ...] = (),
        perm: tuple[int, ...] = (),
    ) -> ir.Value:
        made = handmade.tagged_node(op, inputs, owner, name)
        if perm:
            made.attributes["perm"] = ir.AttrInt64s("perm", perm)
        made.outputs[0].shape = ir.Shape(shape or (1, LENGTH, width))
        self.nodes.append(made)
        return made.outputs[0]

    def linear(self, path: str, x: ir.Value, width: int = WIDTH) -> ir.Value:
        self.module(path, _LINEAR)
        wide = x.shape[-1] if x.shape is not None else WIDTH
        product = self.node(
            "MatMul",
            [x, self.weight(f"{path}.weight", (int(wide), width))],
            path,
            f"{path}.p",
            width,
        )
        return self.node(
            "Add", [product, self.weight(f"{path}.bias", (width,))], path, f"{path}.y", width
        )

    def norm(self, path: str, x: ir.Value) -> ir.Value:
        self.module(path, _NORM)
        scales = [self.weight(f"{path}.{name}", (WIDTH,)) for name in ("weight", "bias")]
        return self.node("LayerNormalization", [x, *scales], path, path)


def encoder() -> ir.Model:
    """Six alike layers between embeddings and a head whose weight is tied to them."""
    net = _Net()
    ids = ir.val("input_ids", ir.DataType.INT64, [1, LENGTH])
    mask = ir.val("attention_mask", ir.DataType.FLOAT, [1, 1, LENGTH])
    net.module("embeddings", "encoder.Embeddings")
    for name, fate in {"words": "computed", "positions": "constant"}.items():
        net.module(f"embeddings.{name}", "torch.nn.modules.sparse.Embedding", fate)
    words = net.weight("embeddings.words.weight", (WORDS, WIDTH))
    x = net.node("Gather", [words, ids], "embeddings.words", "found")
    x = net.node(
        "Add",
        [x, net.weight("embeddings.positions.weight", (LENGTH, WIDTH))],
        "embeddings",
        "placed",
    )
    x = net.norm("embeddings.norm", x)
    net.module("layers", "torch.nn.modules.container.ModuleList")
    net.modules["layers"] = ModuleInfo("layers", "torch.nn.modules.container.ModuleList")
    for k in range(LAYERS):
        x = _layer(net, f"layers.{k}", x, mask)
    net.module("head", "encoder.Head")
    x = net.linear("head.dense", x)
    net.module("head.act", "torch.nn.modules.activation.GELU")
    x = net.node("Gelu", [x], "head.act", "head.act")
    net.module("head.decoder", _LINEAR)
    turned = net.node("Transpose", [words], "head.decoder", "turned", shape=(WIDTH, WORDS))
    net.node("MatMul", [x, turned], "head.decoder", "logits", WORDS)
    net.held["head.decoder"] = ModuleParameters(
        {"weight": (WORDS, WIDTH)}, {"weight": "embeddings.words.weight"}
    )
    made = handmade.model(
        [ids, mask], net.nodes, list(net.weights.values()), list(net.modules.values())
    )
    made.metadata_props["htp.parameters"] = parameters_to_json(net.held)
    made.graph.name = "encoder.onnx"
    made.producer_name = "pytorch"
    return made


def _layer(net: _Net, path: str, x: ir.Value, mask: ir.Value) -> ir.Value:
    net.module(path, "encoder.Layer")
    net.module(f"{path}.attention", "encoder.SelfAttention")
    query, key, value = (
        net.linear(f"{path}.attention.{name}", x) for name in ("query", "key", "value")
    )
    columns = net.node(
        "Transpose",
        [key],
        f"{path}.attention",
        f"{path}.columns",
        shape=(1, WIDTH, LENGTH),
        perm=(0, 2, 1),
    )
    scores = net.node("MatMul", [query, columns], f"{path}.attention", f"{path}.scores", LENGTH)
    masked = net.node("Add", [scores, mask], f"{path}.attention", f"{path}.masked", LENGTH)
    shares = net.node("Softmax", [masked], f"{path}.attention", f"{path}.shares", LENGTH)
    context = net.node("MatMul", [shares, value], f"{path}.attention", f"{path}.context")
    out = net.linear(f"{path}.attention.out", context)
    net.module(f"{path}.dropout", "torch.nn.modules.dropout.Dropout", "identity")
    y = net.norm(f"{path}.norm1", net.node("Add", [x, out], path, f"{path}.first"))
    net.module(f"{path}.mlp", "encoder.FeedForward")
    wide = net.linear(f"{path}.mlp.up", y, 4 * WIDTH)
    net.module(f"{path}.mlp.act", "torch.nn.modules.activation.GELU")
    act = net.node("Gelu", [wide], f"{path}.mlp.act", f"{path}.act", 4 * WIDTH)
    down = net.linear(f"{path}.mlp.down", act)
    return net.norm(f"{path}.norm2", net.node("Add", [y, down], path, f"{path}.second"))


def measured(model: ir.Model) -> list[dict[str, object]]:
    """Times and FLOPs that never change: what each kernel takes depends on its operator and its layer alone."""
    milliseconds = {
        "MatMul": 0.4,
        "LayerNormalization": 0.08,
        "Gelu": 0.15,
        "Softmax": 0.1,
        "Gather": 0.05,
    }
    kernels, flops = [], []
    modules: dict[str, dict[str, float]] = {}
    for node in model.graph:
        path = node.metadata_props["htp.module"]
        layer = int(path.split(".")[1]) if path.startswith("layers.") else 0
        wide = node.outputs[0].shape[-1] if node.outputs[0].shape is not None else WIDTH
        ms = (
            milliseconds.get(node.op_type, 0.03)
            * (1 + 0.15 * (layer * 2 % 5))
            * (int(wide) / WIDTH) ** 0.5
        )
        work = 2.0 * LENGTH * WIDTH * int(wide) if node.op_type == "MatMul" else 0.0
        kernels.append({"name": node.name, "ms": ms})
        flops.append({"name": node.name, "flops": work})
        parts = path.split(".") if path else []
        for count in range(len(parts) + 1):
            entry = modules.setdefault(".".join(parts[:count]), dict.fromkeys(_NUMBERS, 0.0))
            entry["total_ms"] += ms
            entry["flops"] += work
            if count == len(parts):
                entry["self_ms"] += ms
                entry["self_flops"] += work

    def only(*names: str) -> dict[str, dict[str, float]]:
        return {path: {name: entry[name] for name in names} for path, entry in modules.items()}

    return [
        {"modules": only("total_ms", "self_ms"), "kernels": kernels},
        {"modules": only("flops", "self_flops"), "nodes": flops},
    ]


def write_page(file: Path) -> None:
    model = encoder()
    htp_export.view(model, file, results=measured(model), weights=True)


def take(page: Page, file: Path, pane: str, width: int, theme: str, to: Path) -> None:
    """A screen at half its size."""
    page.size(width, SIZES[width])
    page.theme(theme)
    page.open(file, _SHOWN[pane])
    page.wait("document.documentElement.dataset.ready")
    page.wait("document.fonts.status === 'loaded'")
    page.picture(to, scale=0.5)


_SIDE = 12  # pixels of a block; lines of text are as far apart


def _blocks(pixels: np.ndarray) -> np.ndarray:
    """The greys of a screen, from 0 to 1, block by block: ``[rows, columns, pixels of a block]``."""
    height, width = (length // _SIDE for length in pixels.shape[:2])
    grey = pixels[: height * _SIDE, : width * _SIDE].mean(axis=2) / 255
    return grey.reshape(height, _SIDE, width, _SIDE).swapaxes(1, 2).reshape(height, width, -1)


def _near(blocks: np.ndarray) -> np.ndarray:
    """Each block with those around it."""
    height, width = blocks.shape
    around = np.pad(blocks, 1, mode="edge")
    return np.stack([around[y : y + height, x : x + width] for y in range(3) for x in range(3)])


def unlike(one: np.ndarray, other: np.ndarray) -> float:
    """How much of two screens differs, from 0 to 1: of their grounds, or of what is written and drawn on them.

    Which glyphs stand in a block does not count, and blocks beside each other count as one place: fonts differ.
    """
    if one.shape != other.shape:
        return 1.0
    first, second = _blocks(one), _blocks(other)
    grounds = [np.median(blocks, axis=2) for blocks in (first, second)]
    ground = (np.abs(grounds[0] - _near(grounds[1])).min(axis=0) > 0.04).mean()
    inks = [np.ptp(blocks, axis=2) > 0.2 for blocks in (first, second)]
    lost = sum(int((ink & ~_near(there).any(axis=0)).sum()) for ink, there in (inks, inks[::-1]))
    return float(max(ground, lost / max(1, sum(int(ink.sum()) for ink in inks))))


def palette_png(pixels: np.ndarray, colours: int = 64) -> bytes:
    """A PNG with a palette: the most frequent colours, every other as the nearest of them."""
    height, width, _ = pixels.shape
    flat = (pixels.reshape(-1, 3) & 0xFC).astype(np.int32)
    found, place, counts = np.unique(flat, axis=0, return_inverse=True, return_counts=True)
    palette = found[np.argsort(-counts)[:colours]]
    nearest = np.array(
        [np.argmin(((palette - colour) ** 2).sum(axis=1)) for colour in found], np.uint8
    )
    lines = nearest[place.reshape(-1)].reshape(height, width)
    data = b"".join(b"\0" + line.tobytes() for line in lines)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    table = (palette + (palette >> 6)).astype(np.uint8).tobytes()
    pixel_data = zlib.compress(data, 9)
    chunks = (
        chunk(b"IHDR", header),
        chunk(b"PLTE", table),
        chunk(b"IDAT", pixel_data),
        chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
