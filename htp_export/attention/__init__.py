"""Attention as named steps: ``nn.MultiheadAttention`` and ``scaled_dot_product_attention`` run as several modules."""

from htp_export.attention.decomposing import decomposed_attention

__all__ = ["decomposed_attention"]
