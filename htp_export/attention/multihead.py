"""``nn.MultiheadAttention`` in steps: the same arguments, the same results.

Source: ``torch.nn.functional.multi_head_attention_forward``; with ``exact``, in its order of
operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from htp_export.attention.steps import AttentionSteps, PackedProjection, Projection, SdpaCall, Step
from htp_export.errors import InputError


def projections_of(attention: nn.MultiheadAttention, *, exact: bool) -> dict[str, Step]:
    """Create the projections of an ``nn.MultiheadAttention``, by the names of their modules."""
    width = attention.embed_dim
    weight = attention.in_proj_weight
    bias = attention.in_proj_bias
    if weight is None:
        weights = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
    else:
        weights = [weight[width * part : width * (part + 1)] for part in range(3)]
    steps: dict[str, Step] = {}
    if exact and weight is not None:
        steps["in_proj"] = PackedProjection(weight[:], None if bias is None else bias[:])
        steps["kv_proj"] = PackedProjection(weight[width:], None if bias is None else bias[width:])
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        own_bias = None if bias is None else bias[width * part : width * (part + 1)]
        steps[name] = Projection(weights[part][:], own_bias)
    return steps


def forward_in_steps(
    attention: nn.MultiheadAttention,
    steps: AttentionSteps,
    path: str,
    *,
    exact: bool,
) -> Callable[..., Any]:
    """The function that replaces the ``forward`` of a module at ``path`` with registered steps."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            raise InputError(
                f"module {path!r}: attention in steps takes no nested tensors; pass padded ones "
                "and a mask"
            )
        if is_causal and attn_mask is None:
            # torch's own message
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        call = _Call(attention, steps, exact, query.dim() == 3, need_weights)
        query, key, value = call.projected(query, key, value)
        # the mask can then be implied
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else call.mask(query, key, attn_mask, key_padding_mask)
        context, weights = call.attended(query, key, value, mask, causal)
        output = call.joined(context)
        return output, None if weights is None else call.returned(weights, average_attn_weights)

    return forward


class _Call:
    """One call of an attention; returning the weights or not decides the order of operations."""

    def __init__(
        self,
        attention: Any,
        steps: AttentionSteps,
        exact: bool,
        batched: bool,
        need_weights: bool,
    ) -> None:
        self.attention = attention
        self.steps = steps
        self.exact = exact
        self.batched = batched
        self.need_weights = need_weights
        # The original works on (length, batch, features); so does `exact`. Without a batch, nothing
        # needs to be transposed.
        self.batch_first = attention.batch_first and batched and not exact

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Query, key and value by head, ``(batch, heads, length, features)``."""
        attention = self.attention
        same_key = query is key
        same_value = key is value
        query = self._oriented(query)
        key = query if same_key else self._oriented(key)
        value = key if same_value else self._oriented(value)
        # Without a batch, the original does not detect that the tensors are the same.
        packed = self.exact and self.batched and attention.in_proj_weight is not None and same_value
        if packed and same_key:
            together = attention.in_proj(query, 3)
            tensors = [
                attention.q_proj(together, 0),
                attention.k_proj(together, 1),
                attention.v_proj(together, 2),
            ]
        elif packed:
            together = attention.kv_proj(key, 2)
            tensors = [
                attention.q_proj(query),
                attention.k_proj(together, 0),
                attention.v_proj(together, 1),
            ]
        else:
            tensors = [attention.q_proj(query), attention.k_proj(key), attention.v_proj(value)]
        if attention.bias_k is not None:
            tensors[1] = self._longer(tensors[1], attention.bias_k)
            tensors[2] = self._longer(tensors[2], attention.bias_v)
        heads = [self._by_head(tensor) for tensor in tensors]
        if attention.add_zero_attn:
            for part in (1, 2):  # a key and a value of zeros
                zeros = torch.zeros_like(heads[part][..., :1, :])
                heads[part] = torch.cat([heads[part], zeros], dim=-2)
        return heads

    def mask(
        self,
        query: Tensor,
        key: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
    ) -> Tensor | None:
        """The mask to add to the scores, of a shape that broadcasts to theirs; None without one."""
        batch, heads, queries, keys = *query.shape[:-1], key.shape[-2]
        mask = None
        if attn_mask is not None:
            mask = self._padded(attn_mask, query.dtype)
            mask = mask.view(batch, heads, queries, keys) if mask.dim() == 3 else mask
        if key_padding_mask is not None:
            padding = self._padded(key_padding_mask, query.dtype).view(batch, 1, 1, keys)
            mask = padding if mask is None else mask + padding
        return mask

    def attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The context of each head, and the weights, ``(batch, heads, queries, ...)``."""
        scale = math.sqrt(1.0 / float(self.attention.head_dim))
        dropout = self.attention.dropout if self.attention.training else 0.0
        call = SdpaCall(query, key, value, mask, dropout, causal, scale)
        if self.need_weights:
            return self.steps.attend_with_weights(call)
        return self.steps.attend(call), None

    def joined(self, context: Tensor) -> Tensor:
        """The output, with the layout of the query."""
        attention = self.attention
        if self.batch_first:
            output: Tensor = attention.out_proj(context.transpose(1, 2).flatten(2))
            return output
        joined = context.permute(2, 0, 1, 3)
        length, batch = joined.shape[:2]
        if self.exact:  # the original multiplies a matrix
            output = attention.out_proj(joined.reshape(length * batch, attention.embed_dim)).view(
                length, batch, -1
            )
        else:
            output = attention.out_proj(joined.flatten(2))
        if not self.batched:
            return output.squeeze(1)
        if attention.batch_first:
            return output.transpose(0, 1)
        return output

    def returned(self, weights: Tensor, average: bool) -> Tensor:
        weights = weights.mean(dim=1) if average else weights
        if self.batched:
            return weights
        return weights.squeeze(0)

    def _oriented(self, tensor: Tensor) -> Tensor:
        """``(batch, length, features)`` if `batch_first`, else ``(length, batch, features)``."""
        if not self.batched:
            return tensor.unsqueeze(1)
        if self.attention.batch_first and not self.batch_first:
            return tensor.transpose(0, 1)
        return tensor

    def _longer(self, tensor: Tensor, bias: Tensor) -> Tensor:
        """Append one key or value, the same for all examples."""
        dim = 1 if self.batch_first else 0
        sizes = list(tensor.shape)
        sizes[dim] = 1
        return torch.cat([tensor, bias.expand(*sizes)], dim)

    def _by_head(self, tensor: Tensor) -> Tensor:
        heads = self.attention.num_heads
        features = self.attention.head_dim
        # sizes and `view`, because TorchScript exports `unflatten` as six nodes
        first, second = tensor.shape[:2]
        if self.exact:
            by_head = tensor.view(first, second * heads, features).transpose(0, 1)
            return by_head.view(second, heads, first, features)
        by_head = tensor.view(first, second, heads, features)
        if self.batch_first:
            return by_head.transpose(1, 2)
        return by_head.permute(1, 2, 0, 3)

    def _padded(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an additive mask, also of a boolean one (True: masked), with the keys that the module appends."""
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
        added = (self.attention.bias_k is not None) + bool(self.attention.add_zero_attn)
        if added:
            return functional.pad(mask, (0, added))
        return mask
