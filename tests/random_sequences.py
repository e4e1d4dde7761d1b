"""What random networks over sequences, tensors of batch, length and width, are made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SHAPE = (2, 4, 8)
OPEN = {name: {0: "batch"} for name in "xy"}
DIMS = {"batch": torch.export.Dim.AUTO}
EPSILON = 0.1


class Attends(nn.Module):
    """Attention of two heads, with queries of one tensor, and keys and values of another."""

    takes_two = True

    def __init__(self) -> None:
        super().__init__()
        self.query, self.pair, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        read = (self.query(x), *self.pair(x if y is None else y).chunk(2, -1))
        heads = [each.reshape(*x.shape[:2], 2, 4).transpose(1, 2) for each in read]
        return self.out(
            functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
        )


class Gated(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class GivesStates(nn.Module):
    """A recurrent layer, whose last states nothing reads."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = kind(8, 8 // (1 + len(options)), batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[0]
        return result


class Attended(nn.Module):
    """A layer of PyTorch's own attention, which calls functions in place of its projection."""

    takes_two = True

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        result, weights = self.attention(x, y, value=y, need_weights=True)
        return result * weights.amax(-1, keepdim=True)


class Twofold(nn.Module):
    """One layer under two names, called by the second one; another one whose weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"made": self.tied(self.again(x)), "nothing": None}


class Masked(nn.Module):
    """Makes its mask of sizes, as decoders do, and gives it to a part by keyword."""

    class Adds(nn.Module):
        def forward(self, *, scores: Tensor, mask: Tensor) -> Tensor:
            return (scores + mask).softmax(-1)

    def __init__(self) -> None:
        super().__init__()
        self.adds, self.norm = Masked.Adds(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        mask = torch.where(places[None] <= places[:, None], 0.0, -1e4)[None]
        x = self.norm(x)
        result: Tensor = self.adds(scores=x @ x.transpose(1, 2) / 3, mask=mask) @ x
        return result


class Pieces(nn.Module):
    """Works on pieces one by one with the same layer, and writes them into one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        state, made = torch.zeros_like(x[:, 0]), torch.empty_like(x)
        for place in range(2):
            state = self.cell(x[:, place], state)
            made[:, place] = state
        made[:, 2:] = x[:, 2:] * 0.5
        return made, [state[:, None].expand(x.shape)]


class Learned(nn.Module):
    """Computes with a parameter, and with positions, before it reads its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.positions = nn.Parameter(torch.zeros(8)), nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.weight.sigmoid()) + self.positions(torch.arange(x.shape[1]))


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(8, 8),
    lambda: nn.LayerNorm(8),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.BatchNorm1d(4),
    lambda: nn.Conv1d(4, 4, 3, padding=1),
    lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
    lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.LeakyReLU()),
    nn.SiLU,
    nn.Tanh,
    nn.PReLU,
    nn.Dropout,
    nn.Identity,
    lambda: nn.Softmax(-1),
    lambda: GivesStates(nn.GRU),
    lambda: GivesStates(nn.LSTM),
    lambda: GivesStates(nn.GRU, bidirectional=True),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True),
    lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU6(inplace=True)),
    Attended,
    Attends,
    Gated,
    Learned,
    Masked,
    Pieces,
    Twofold,
]


def written(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = y[:, 1]
    return x


def doubled_in_part(x: Tensor, y: Tensor) -> Tensor:
    x = x * 0.7
    x[:, 1:3].mul_(2)
    return x.add_(y)


def rotated(x: Tensor, y: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1) * y


FUNCTIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    written,
    doubled_in_part,
    rotated,
    lambda x, y: x + y,
    lambda x, y: x * y.sigmoid(),
    lambda x, y: functional.relu(x) - 0.1,
    lambda x, y: x.transpose(1, 2).reshape(x.shape),
    lambda x, y: torch.cat((x[:, 1:], y[:, :1]), 1),
    lambda x, y: x - x.mean(-1, keepdim=True),
    lambda x, y: torch.softmax(x @ y.transpose(1, 2), -1) @ y,
    lambda x, y: x.masked_fill(torch.triu(torch.ones(4, 8, dtype=torch.bool), 1), 0.5),
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: torch.einsum("btd,bsd->bts", x, y).tanh() @ x,
    lambda x, y: functional.layer_norm(x, (8,), eps=EPSILON),
    lambda x, y: torch.stack((x, y)).mean(0),
    lambda x, y: x.to(torch.float64).to(torch.float32),
    lambda x, y: x.reshape(-1, 8).reshape(x.shape),
    lambda x, y: x + torch.arange(4, dtype=torch.float32)[:, None],
    lambda x, y: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON),
    lambda x, y: x.index_select(1, torch.tensor([3, 2, 1, 0])),
    lambda x, y: functional.pad(x, (0, 0, 1, 0))[:, :-1],
    lambda x, y: x * x.shape[1] ** -0.5,
    lambda x, y: x + (y.abs() / 100 + 1).long() % 2,
]

EMBEDS = LAYERS

HEADS: list[Callable[[nn.Module], nn.Module]] = [lambda _: nn.Linear(8, 3)]


def inputs(seed: int, sizes: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """One or two tensors."""
    return {
        name: torch.randn(sizes, generator=generator) for name in ("xy" if seed % 5 > 2 else "x")
    }
