"""The steps of an attention, each a module: projections, scores, softmax and context.

The last three can be one kernel.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional


class Step(nn.Module):
    """A module for a part of another module's ``forward``; synthetic in the module tree."""

    htp_synthetic = True


class _Arithmetic(Enum):
    """The order of operations for scores, which determines how they are rounded."""

    SHORT = auto()
    """``(query * scale) @ key.T + mask``: the fewest operations."""
    SDPA = auto()
    """As in torch's reference kernel: query and key are each scaled by the root of the scale."""
    BADDBMM = auto()
    """As in ``nn.MultiheadAttention`` with weights: the product also adds the mask."""


class Projection(Step):
    """The linear map of query, key or value, ``(..., in_features)`` → ``(..., out_features)``.

    ``weight``, ``(out_features, in_features)``, and ``bias`` are views of the original ones.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # Exporters treat buffers as constants, which have no gradients; in training, the originals
        # are used.
        self.weight: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self._with_gradients = (weight, bias)

    def forward(self, tensor: Tensor, packed: int | None = None) -> Tensor:
        """Project; with ``packed``, select that part of the result of a `PackedProjection`."""
        if packed is None:
            return self.product(tensor)
        return tensor[packed]

    def product(self, tensor: Tensor) -> Tensor:
        weight, bias = (self.weight, self.bias) if _is_exporting() else self._with_gradients
        return functional.linear(tensor, weight, bias)


class PackedProjection(Projection):
    """Several projections of one tensor in one product.

    ``(..., in_features)`` → ``(parts, ..., out_features)``.
    """

    def forward(self, tensor: Tensor, packed: int | None = None) -> Tensor:
        """Project; ``packed`` is the number of parts."""
        product = self.product(tensor)
        parts = product.view(*product.shape[:-1], packed or 1, -1)
        return parts.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()


class Scores(Step):
    """The similarity of each query and each key, with the mask added.

    ``(..., queries, features)`` → ``(..., queries, keys)``.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        scale: float,
        arithmetic: _Arithmetic,
        causal: bool = False,
    ) -> Tensor:
        if causal:
            mask = torch.ones(
                query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
            ).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -math.inf).to(query.dtype)
        if arithmetic is _Arithmetic.BADDBMM:
            scaled = query * scale
            transposed = key.transpose(-2, -1)
            if mask is None:
                return torch.bmm(scaled, transposed)
            return torch.baddbmm(mask, scaled, transposed)
        if arithmetic is _Arithmetic.SDPA:
            root = math.sqrt(abs(scale))
            scores = torch.matmul(query * math.copysign(root, scale), key.transpose(-2, -1) * root)
        else:
            scores = torch.matmul(query * scale, key.transpose(-2, -1))
        return scores if mask is None else scores + mask


class Softmax(Step):
    """The weight of each key for each query, with the shape of the scores."""

    def forward(self, scores: Tensor, dropout: float, empty_rows: bool) -> Tensor:
        """The weights of scores ``(..., queries, keys)``; ``dropout`` is a probability.

        With ``empty_rows``, queries whose keys are all masked get zeros, as in
        ``scaled_dot_product_attention``, and not NaN.
        """
        weights = functional.softmax(scores, dim=-1)
        if empty_rows and _is_exporting():  # the nodes that exporters write for a boolean mask
            weights = weights.masked_fill(weights.isnan(), 0.0)
        elif empty_rows:
            weights = weights.masked_fill((scores == -math.inf).all(dim=-1, keepdim=True), 0.0)
        if dropout > 0:
            return functional.dropout(weights, dropout)
        return weights


class Context(Step):
    """The weighted sum of the values: ``(..., queries, keys)`` @ ``(..., keys, features)``."""

    def forward(self, weights: Tensor, value: Tensor) -> Tensor:
        return torch.matmul(weights, value)


class ObservedStep(Step):
    """A step that runs operations of the ``forward`` of its parent module on their tensors."""

    def forward(self, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return compute(*tensors)


class SdpaCall(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class SeparateSteps:
    """Each step computes its part; with ``exact``, in torch's order of operations.

    ``attend_with_weights`` has the order of ``nn.MultiheadAttention``: a query whose keys are all
    masked gets NaN.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self.scores = Scores()
        self.softmax = Softmax()
        self.context = Context()

    @property
    def modules(self) -> dict[str, Step]:
        return {"scores": self.scores, "softmax": self.softmax, "context": self.context}

    def attend(self, call: SdpaCall) -> Tensor:
        """Source: the implementation in the documentation of ``scaled_dot_product_attention``."""
        query, key, value, mask, dropout, causal, _, grouped = call
        if causal and mask is not None:
            # torch's own message
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        if grouped:
            groups = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(groups, -3)
            value = value.repeat_interleave(groups, -3)
        arithmetic = _Arithmetic.SDPA if self._exact else _Arithmetic.SHORT
        scores = self.scores(query, key, mask, _scale(call), arithmetic, causal)
        empty_rows = mask is not None and (mask.dtype == torch.bool or not _is_exporting())
        context: Tensor = self.context(self.softmax(scores, dropout, empty_rows), value)
        return context

    def attend_with_weights(self, call: SdpaCall) -> tuple[Tensor, Tensor]:
        query, key, value, mask = call[:4]
        batch, heads, queries, keys = *query.shape[:-1], key.shape[-2]
        if self._exact:  # one batch of matrices
            mask = None if mask is None else mask.expand(batch, heads, queries, keys).flatten(0, 1)
            query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
        arithmetic = _Arithmetic.BADDBMM if self._exact else _Arithmetic.SHORT
        weights = self.softmax(
            self.scores(query, key, mask, _scale(call), arithmetic), call.dropout_p, False
        )
        context = self.context(weights, value)
        return context.view(batch, heads, queries, -1), weights.view(batch, heads, queries, keys)


class KernelPart(ObservedStep):
    """A step whose work is part of a kernel."""


class KernelSteps:
    """All three steps are one call of ``scaled_dot_product_attention``."""

    def __init__(self) -> None:
        self.modules: dict[str, Step] = {
            name: KernelPart() for name in ("scores", "softmax", "context")
        }

    def attend(self, call: SdpaCall) -> Tensor:
        *arguments, scale, grouped = call
        attention: Callable[..., Tensor] = functional.scaled_dot_product_attention
        return self._in_all(
            functools.partial(attention, *arguments, scale=scale, enable_gqa=grouped)
        )

    def attend_with_weights(self, call: SdpaCall) -> tuple[Tensor, Tensor]:
        """The kernel returns no weights: all steps together are several operations."""
        weights: list[Tensor] = []

        def compute() -> Tensor:
            scores = Scores().forward(
                call.query, call.key, call.attn_mask, _scale(call), _Arithmetic.SHORT
            )
            weights.append(Softmax().forward(scores, call.dropout_p, False))
            return torch.matmul(weights[-1], call.value)

        return self._in_all(compute), weights[-1]

    def _in_all(self, kernel: Callable[[], Tensor]) -> Tensor:
        """Run a kernel in the last step, which runs inside the one before, and so on.

        The operations of a module that runs inside another one, but is not registered below it,
        belong to both.
        """
        for step in reversed(self.modules.values()):
            kernel = functools.partial(step, kernel)
        return kernel()


AttentionSteps: TypeAlias = SeparateSteps | KernelSteps


def _is_exporting() -> bool:
    return torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined,no-untyped-call]


def _scale(call: SdpaCall) -> float:
    if call.scale is None:
        return 1 / math.sqrt(_fixed_size(call.query, -1))
    return call.scale


def _fixed_size(tensor: Tensor, dim: int) -> int:
    """A size that is the same for all inputs; sizes are tensors while TorchScript traces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        return int(tensor.shape[dim])
