"""The steps of an attention, each a module: projections, scores, softmax, context.

They have no parameters of their own: a projection holds views of the original weights, as buffers that are in no state
dict.
"""

from __future__ import annotations

import math
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Arithmetic", "Context", "PackedProjection", "Projection", "Scores", "Softmax", "Step"]


class Step(nn.Module):
    """A module that stands for a part of another module's ``forward``; the module tree marks it as synthetic."""

    htp_synthetic = True


class Arithmetic(Enum):
    """In which order scores are computed, which decides how they are rounded."""

    SHORT = auto()
    """``(query * scale) @ key.T + mask``: the fewest operations."""
    SDPA = auto()
    """As torch's reference kernel does: query and key each times the root of the scale."""
    BADDBMM = auto()
    """As ``nn.MultiheadAttention`` does where it returns weights: the mask is added in the product."""


class Projection(Step):
    """The linear map of query, key or value, ``(..., in_features)`` → ``(..., out_features)``.

    Args:
        weight: ``(out_features, in_features)``, a view of the original weight.
        bias: ``(out_features,)``, the same.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # Exporters take buffers for constants, which have no gradients; in training, the originals get theirs.
        self.weight: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self._with_gradients = (weight, bias)

    def forward(self, tensor: Tensor, packed: int | None = None) -> Tensor:
        """Project; with ``packed``, take that part of what a `PackedProjection` computed."""
        return self.product(tensor) if packed is None else tensor[packed]

    def product(self, tensor: Tensor) -> Tensor:
        exporting = torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined,no-untyped-call]
        weight, bias = (self.weight, self.bias) if exporting else self._with_gradients
        return functional.linear(tensor, weight, bias)


class PackedProjection(Projection):
    """Several projections of one tensor in one product, ``(..., in_features)`` → ``(parts, ..., out_features)``."""

    def forward(self, tensor: Tensor, packed: int | None = None) -> Tensor:
        """Project; ``packed`` is the number of parts."""
        product = self.product(tensor)
        parts = product.view(*product.shape[:-1], packed or 1, -1)
        return parts.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()


class Scores(Step):
    """How well each query fits each key, ``(..., queries, features)`` → ``(..., queries, keys)``, and the mask."""

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float, arithmetic: Arithmetic) -> Tensor:
        if arithmetic is Arithmetic.BADDBMM:
            scaled, turned = query * scale, key.transpose(-2, -1)
            return torch.bmm(scaled, turned) if mask is None else torch.baddbmm(mask, scaled, turned)
        if arithmetic is Arithmetic.SDPA:
            root = math.sqrt(abs(scale))
            scores = torch.matmul(query * math.copysign(root, scale), key.transpose(-2, -1) * root)
        else:
            scores = torch.matmul(query * scale, key.transpose(-2, -1))
        return scores if mask is None else scores + mask


class Softmax(Step):
    """The weight of each key for each query, of the shape of the scores."""

    def forward(self, scores: Tensor, dropout: float, empty_rows: bool) -> Tensor:
        """Compute the weights.

        Args:
            scores: ``(..., queries, keys)``.
            dropout: Probability with which a weight is set to zero.
            empty_rows: Whether queries that may see no key get zeros, as in ``scaled_dot_product_attention``, and not
                the softmax's NaN.
        """
        weights = functional.softmax(scores, dim=-1)
        if empty_rows:
            weights = weights.masked_fill((scores == -math.inf).all(dim=-1, keepdim=True), 0.0)
        return functional.dropout(weights, dropout) if dropout > 0 else weights


class Context(Step):
    """The weighted sum of the values, ``(..., queries, keys)`` and ``(..., keys, features)``."""

    def forward(self, weights: Tensor, value: Tensor) -> Tensor:
        return torch.matmul(weights, value)
