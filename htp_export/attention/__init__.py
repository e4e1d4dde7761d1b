"""Attention in named steps: its projections, scores, softmax and context run as modules."""

from htp_export.attention.decomposing import decomposed_attention

__all__ = ["decomposed_attention"]
