"""What random networks over tokens are made of: integers of batch and length, which become tensors of width 8."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.random_sequences import EPSILON

SHAPE = (2, 5, 8)
OPEN = {
    "x": {0: "batch", 1: "length"},
    "mask": {0: "batch", 1: "length"},
    "past": {0: "batch", 2: "past"},
}
DIMS = dict.fromkeys(("batch", "length", "past"), torch.export.Dim.DYNAMIC)
TOKENS, PAST = 11, 3


class Embeds(nn.Module):
    """Tokens and positions, normed."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.norm = (
            nn.Embedding(TOKENS, 8),
            nn.Embedding(16, 8),
            nn.LayerNorm(8),
        )
        self.register_buffer("places", torch.arange(16)[None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.word(x) + self.place(self.places[:, : x.shape[1]]))


class Scaled(nn.Embedding):
    """An embedding that scales what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.embedding_dim**0.5


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(
            x.dtype
        )


class Rotary(nn.Module):
    """Gives cosines and sines of positions; it has no input of floats but for its type."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1]), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        angles = (places[:, :, None].float() * self.frequencies).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines[:, None] + torch.cat((-second, first), -1) * sines[:, None]


def repeated(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    return (
        x[:, :, None]
        .expand(batch, heads, times, length, width)
        .reshape(batch, heads * times, length, width)
    )


class Attends(nn.Module):
    """Attention of grouped heads with rotary positions and a mask, if there is one, behind a past, if there is one.

    Args:
        repeat: How heads of keys and values are repeated.
        fused: Whether one function of PyTorch computes it.
    """

    takes = ("mask", "past")

    def __init__(self, repeat: Callable[[Tensor, int], Tensor], fused: bool) -> None:
        super().__init__()
        self.repeat, self.fused = repeat, fused
        self.query, self.key, self.value = (
            nn.Linear(8, 8),
            nn.Linear(8, 4, bias=False),
            nn.Linear(8, 4),
        )
        self.rotary, self.out = Rotary(), nn.Linear(8, 8)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, past: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        batch, length, _ = x.shape
        before = 0 if past is None else past[0].shape[2]
        places = torch.arange(before, before + length, device=x.device)[None]
        query = self.query(x).view(batch, length, 2, 4).transpose(1, 2)
        key, value = (
            layer(x).view(batch, length, 1, 4).transpose(1, 2) for layer in (self.key, self.value)
        )
        query, key = (rotated(each, *self.rotary(x, places)) for each in (query, key))
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        seen = torch.arange(before + length)[None, None] <= places[:, :, None]
        if mask is not None:
            seen = seen & functional.pad(mask, (before, 0), value=True)[:, None]
        keys, values = self.repeat(key, 2), self.repeat(value, 2)
        if self.fused:
            made = functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=seen[:, None]
            )
        else:
            scores = query @ keys.transpose(2, 3) / 2
            made = (
                scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min).softmax(-1)
                @ values
            )
        made = self.out(made.transpose(1, 2).reshape(batch, length, 8))
        return made if past is None else (made, (key, value))


class Interleaves(Attends):
    """Repeats heads as one operator."""

    dynamo_only = True  # as of index_add, see `Sorted`

    def __init__(self) -> None:
        super().__init__(lambda x, times: x.repeat_interleave(times, 1), fused=False)


class Biased(nn.Module):
    """Attention with a bias for each distance, in buckets, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.bias = nn.Linear(8, 24, bias=False), nn.Embedding(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.all(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        far = (places[None] - places[:, None]).abs()
        bucket = torch.where(
            far < 2, far, (torch.log2(far.clamp(min=1).float()) + 1.01).long().clamp(max=3)
        )
        bias = self.bias(bucket).permute(2, 0, 1)
        return ((query @ key.transpose(2, 3) + bias).softmax(-1) @ value).transpose(1, 2).flatten(2)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(functional.gelu(gate, approximate="tanh") * up)


class Experts(nn.Module):
    """A mixture of experts, each on all tokens, with the shares of the best two; gives the router's choices, too."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Linear(8, 3, bias=False),
            nn.ModuleList(Gated() for _ in range(3)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = self.router(x).softmax(-1).topk(2, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        weights = (functional.one_hot(chosen, 3) * shares[..., None]).sum(-2)
        made = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            made = made + expert(x) * weights[..., place, None]
        return made, chosen


class Sorted(nn.Module):
    """Sorts tokens by their expert, works on them in this order, and adds each to where it was."""

    # of index_add, TorchScript takes the sizes that are open for those of the trace
    dynamo_only = True

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Linear(8, 3), nn.Parameter(torch.zeros(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        share, chosen = self.gate(flat).softmax(-1).max(-1)
        order = chosen.argsort()
        made = (
            torch.bmm(flat[order][:, None], self.weight[chosen[order]]).squeeze(1)
            * share[order, None]
        )
        return torch.zeros_like(flat).index_add(0, order, made).view(x.shape)


class Counted(nn.Module):
    """Adds positions that count the tokens of a mask."""

    takes = ("mask",)

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(16, 8, padding_idx=0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = x[..., 0] > 0
        return x + self.places(mask.long().cumsum(1) * mask)


class Pools(nn.Module):
    """Adds the last token of each row that a mask leaves, and gives it alone, too."""

    takes = ("mask",)

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        if mask is None:
            last = x[:, -1]
        else:
            places = mask.sum(1, keepdim=True) - 1
            last = x.gather(1, places[..., None].expand(-1, -1, 8)).squeeze(1)
        pooled = self.dense(last).tanh()
        return {"states": x + pooled[:, None], "pooled": pooled}


class Chooses(nn.Module):
    """Looks up what is largest, and gives its place."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = x.argmax(-1)
        return x * 0.5 + self.codes(code), code


class Mixes(nn.Module):
    """A causal convolution of each channel, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv1d(8, 8, 3, groups=8, padding=2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return functional.silu(made) * self.gate(x)


class Branches(nn.Module):
    """Runs a layer in either branch, as the inputs decide."""

    dynamo_only = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: self.layer(x).tanh(), lambda x: -self.layer(x), (x,)
        )


def sequential() -> nn.Module:
    return nn.Sequential(
        RootMeanSquare(), nn.Linear(8, 16, bias=False), nn.SiLU(inplace=True), nn.Linear(16, 8)
    )


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(8, 8),
    lambda: nn.LayerNorm(8, bias=False),
    sequential,
    nn.Identity,
    nn.Softplus,
    Interleaves,
    lambda: Attends(repeated, fused=True),
    lambda: Attends(repeated, fused=False),
    Biased,
    Branches,
    Chooses,
    Counted,
    Experts,
    Gated,
    Mixes,
    Pools,
    RootMeanSquare,
    Sorted,
]
EMBEDS: list[Callable[[], nn.Module]] = [
    lambda: nn.Embedding(TOKENS, 8),
    lambda: Scaled(TOKENS, 8),
    Embeds,
]


def scattered(x: Tensor, y: Tensor) -> Tensor:
    order = torch.argsort(y[..., :4], -1)
    return x.scatter(-1, order, y[..., 4:] * 0.5)


def put(x: Tensor, y: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])
    x = x.clone()
    x[rows, y.mean(-1).argmax(1)] = y[:, 0]
    return x


def decayed(x: Tensor, y: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    far = (places[:, None] - places[None]).clamp(min=0)
    return torch.tril(0.5 ** far.float()) @ x + y


FUNCTIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    scattered,
    put,
    decayed,
    lambda x, y: x + y,
    lambda x, y: x * y.sigmoid(),
    lambda x, y: x.cumsum(1) * 0.3,
    lambda x, y: x.gather(2, torch.tensor([1, 0, 3, 2, 5, 4, 7, 6]).expand(x.shape)) + y,
    lambda x, y: x.sort(1).values - y,
    lambda x, y: x * functional.one_hot(y.argmax(-1), 8) + 0.1,
    lambda x, y: x.roll(1, 1) * 0.7,
    lambda x, y: torch.cat((x[:, 1:], y[:, :1]), 1),
    lambda x, y: torch.where((x > 0) & ~(y > 0.2), x, y),
    lambda x, y: torch.stack((x, y), -1).flatten(2).unflatten(-1, (2, 8)).mean(2),
    lambda x, y: x.index_select(1, torch.tensor([2, 0])).sum(1, keepdim=True) + y,
    lambda x, y: x * (y.topk(2, -1).values.sum(-1, keepdim=True).tanh()),
    lambda x, y: functional.pad(x, (0, 0, 1, 0)).narrow(1, 0, x.shape[1]),
    lambda x, y: torch.baddbmm(x, y, (y.transpose(1, 2) @ x).tanh(), beta=0.5),
    lambda x, y: x.clamp(-0.5, 0.5) + torch.round(y * 2) * 0.2,
    lambda x, y: (x.flatten(0, 1) - y.flatten(0, 1).amin(0)).view(x.shape) * 0.4,
    lambda x, y: x * (torch.arange(x.shape[1]) % 2 == 0).to(x.dtype)[:, None] + y,
]


class Tied(nn.Linear):
    """A head with the weight of an embedding."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__(8, TOKENS, bias=False)
        self.weight = (embed.word if isinstance(embed, Embeds) else embed).weight


HEADS: list[Callable[[nn.Module], nn.Module]] = [Tied, Tied, lambda embed: nn.Linear(8, 3)]


def inputs(seed: int, sizes: tuple[int, ...], generator: torch.Generator) -> dict[str, Any]:
    """Tokens, sometimes a mask, whose first row ends with padding, and sometimes keys and values of a past."""
    batch, length = sizes[:2]
    made: dict[str, Any] = {"x": torch.randint(TOKENS, (batch, length), generator=generator)}
    if seed % 5 > 1:
        made["mask"] = torch.ones(batch, length, dtype=torch.bool)
        made["mask"][0, -2:] = False
    if seed % 5 > 3:
        made["past"] = tuple(torch.randn(batch, 1, PAST, 4, generator=generator) for _ in range(2))
    return made
