"""`decomposed_attention`: the modules of a model run attention in steps, until the context ends."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import nn

from htp_export.attention.multihead import forward_in_steps, steps_of
from htp_export.attention.sdpa import StepsOfSdpa
from htp_export.errors import InputError
from htp_export.format.module_paths import module_paths
from htp_export.process.restoring import Changes
from htp_export.process.shared_settings import turn_attention_fast_path_off

__all__ = ["decomposed_attention"]


@contextlib.contextmanager
def decomposed_attention(model: nn.Module, *, exact: bool = False) -> Iterator[None]:
    """Run the attention of a model as named steps, each a module with a path of its own.

    ==============================================  ============================================================
    ``nn.MultiheadAttention``, also inside          ``q_proj``, ``k_proj``, ``v_proj``, ``scores``, ``softmax``,
    ``nn.TransformerEncoderLayer`` and others       ``context``, and its own ``out_proj``
    ``scaled_dot_product_attention``, called by     ``scores``, ``softmax``, ``context`` in the module that calls
    any module, those of transformers too
    ==============================================  ============================================================

    An export inside has these modules in its hierarchy, marked as synthetic. Their weights are views of the original
    ones; the state dict does not change. Afterwards the model is as before, also on errors.

    Results differ from the original's by rounding; of a query that may see no key, they are what torch's operators
    define: zeros from ``scaled_dot_product_attention``, NaN where weights are returned.

    May be nested: modules whose attention runs in steps already stay as they are. Not thread-safe: no other thread may
    use the model meanwhile.

    Args:
        model: The model. Subclasses of ``nn.MultiheadAttention`` with a ``forward`` of their own stay as they are.
        exact: Whether query, key and value are projected in one product where the original does so (the step
            ``in_proj`` or ``kv_proj``, of which ``q_proj``, ``k_proj`` and ``v_proj`` take their parts), and everything
            is computed in the order of torch's slow path, so that results are equal bit for bit.

    Returns:
        A context manager.

    Raises:
        InputError: If a module has a submodule with the name of a step, or is given nested tensors.

    Examples:
        >>> import torch
        >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> x = torch.randn(1, 5, 8)
        >>> with torch.no_grad(), decomposed_attention(attention):
        ...     [name for name, _ in attention.named_children()], tuple(attention(x, x, x)[0].shape)
        (['out_proj', 'q_proj', 'k_proj', 'v_proj', 'scores', 'softmax', 'context'], (1, 5, 8))
        >>> [name for name, _ in attention.named_children()]
        ['out_proj']
    """
    changes = Changes()
    try:
        try:
            turn_attention_fast_path_off(changes)
            _install(changes, model, exact)
            yield
        finally:
            changes.take_back()
    finally:
        changes.take_back()


def _install(changes: Changes, model: nn.Module, exact: bool) -> None:
    for path, _, attention in module_paths(model):
        if not _is_plain(attention):
            continue
        steps: dict[str, Any] = dict(steps_of(attention, exact=exact))
        taken = [name for name in steps if hasattr(attention, name)]
        if taken:
            raise InputError(f"module {path!r} has an attribute {taken[0]!r} already, the name of a step of attention")
        changes.will_undo(functools.partial(_remove, attention, tuple(steps)))
        for name, step in steps.items():
            attention.add_module(name, step.train(attention.training))
        attention.__dict__["forward"] = forward_in_steps(attention, path, exact=exact)
    StepsOfSdpa(exact).hold(changes, model)


def _is_plain(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether a module computes what ``nn.MultiheadAttention`` defines."""
    own_forward = "forward" in vars(module) or type(module).forward is not nn.MultiheadAttention.forward
    return isinstance(module, nn.MultiheadAttention) and not own_forward


def _remove(attention: nn.Module, names: tuple[str, ...]) -> None:
    attention.__dict__.pop("forward", None)
    for name in names:
        attention._modules.pop(name, None)
