"""`decomposed_attention`: the modules of a model run attention in steps, until the context ends."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

from htp_export.attention.calls import StepsOfCalls
from htp_export.attention.multihead import forward_in_steps, projections_of
from htp_export.attention.steps import AttentionSteps, KernelPart, KernelSteps, PackedProjection, SeparateSteps
from htp_export.errors import InputError
from htp_export.format.module_paths import module_paths
from htp_export.process.restoring import Changes, restored
from htp_export.process.shared_settings import turn_attention_fast_path_off

if TYPE_CHECKING:
    from htp_export.format.hierarchy import Hierarchy

__all__ = ["attention_as_in", "decomposed_attention"]


@contextlib.contextmanager
def decomposed_attention(model: nn.Module, *, exact: bool = False, keep_kernel: bool = False) -> Iterator[None]:
    """Run the attention of a model as named steps, each a module with a path of its own.

    ==============================================  ============================================================
    ``nn.MultiheadAttention``, also inside          ``q_proj``, ``k_proj``, ``v_proj``, ``scores``, ``softmax``,
    ``nn.TransformerEncoderLayer`` and others       ``context``, and its own ``out_proj``
    ``scaled_dot_product_attention``, called by     ``scores``, ``softmax``, ``context`` in the module that calls
    any module, those of transformers too
    the softmax of a product of two tensors, and    ``scores``, ``softmax``, ``context`` in the module that computes
    the product of its result with a third: eager   them; the operations are its own, so that results are equal bit
    attention of transformers, your own modules     for bit
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
        keep_kernel: Whether ``scores``, ``softmax`` and ``context`` are one call of ``scaled_dot_product_attention``,
            whose operator belongs to all three: at opset 23, dynamo makes one ``Attention`` node of it. Attention that
            a module computes from products has no kernel to keep, and runs in steps.

    Returns:
        A context manager.

    Raises:
        InputError: If a module has a submodule with the name of a step, or is given nested tensors; if a model of
            transformers uses kernels of other libraries, such as ``flash_attention_2``; if both options are set,
            because kernels round in their own way.

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
    with _in_steps(model, exact=exact, keep_kernel=keep_kernel):
        yield


@contextlib.contextmanager
def attention_as_in(hierarchy: Hierarchy, model: nn.Module) -> Iterator[None]:
    """Run the attention of a model in the steps that a file has.

    Args:
        hierarchy: The modules of the file.
        model: The model; nothing changes if the file has no steps.
    """
    steps: defaultdict[str | None, dict[str, str]] = defaultdict(dict)
    for path, info in hierarchy.items():
        if info.synthetic:
            steps[hierarchy.parent(path)][path.rpartition(".")[2]] = info.simple_class
    if not steps:
        yield
        return
    classes = {name for by_name in steps.values() for name in by_name.values()}
    callers = {
        module: steps[path] for path, _, module in module_paths(model) if path in steps and not _is_plain(module)
    }
    exact, keep_kernel = PackedProjection.__name__ in classes, KernelPart.__name__ in classes
    with _in_steps(model, exact=exact, keep_kernel=keep_kernel, callers=callers):
        yield


@contextlib.contextmanager
def _in_steps(
    model: nn.Module, *, exact: bool, keep_kernel: bool, callers: Mapping[nn.Module, Mapping[str, str]] | None = None
) -> Iterator[None]:
    """As `decomposed_attention`; ``callers`` have steps before their first call, see `StepsOfCalls.hold`."""
    if exact and keep_kernel:
        raise InputError("exact and keep_kernel exclude each other: a kernel rounds in its own way")
    _refuse_foreign_kernels(model)
    make_steps = KernelSteps if keep_kernel else functools.partial(SeparateSteps, exact)

    def make(changes: Changes) -> None:
        turn_attention_fast_path_off(changes)
        _install(changes, model, make_steps, exact)
        StepsOfCalls(make_steps).hold(changes, model, callers)

    with restored(make):
        yield


def _install(changes: Changes, model: nn.Module, make_steps: Callable[[], AttentionSteps], exact: bool) -> None:
    for path, _, attention in module_paths(model):
        if not _is_plain(attention):
            continue
        steps = make_steps()
        modules = projections_of(attention, exact=exact) | steps.modules
        taken = [name for name in modules if hasattr(attention, name)]
        if taken:
            raise InputError(f"module {path!r} has an attribute {taken[0]!r} already, the name of a step of attention")
        changes.will_undo(functools.partial(_remove, attention, tuple(modules)))
        for name, step in modules.items():
            attention.add_module(name, step.train(attention.training))
        attention.__dict__["forward"] = forward_in_steps(attention, steps, path, exact=exact)


def _refuse_foreign_kernels(model: nn.Module) -> None:
    """Refuse a model of transformers whose attention is one call into another library."""
    for path, _, module in module_paths(model):
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(name, str) and ("flash" in name or "flex" in name or "/" in name):  # "owner/name" of a kernel
            raise InputError(
                f"module {path!r} computes attention with {name!r}, in a kernel that has no steps; call "
                'set_attn_implementation("eager") or ("sdpa") on the model first'
            )


def _is_plain(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether a module computes what ``nn.MultiheadAttention`` defines."""
    own_forward = "forward" in vars(module) or type(module).forward is not nn.MultiheadAttention.forward
    return isinstance(module, nn.MultiheadAttention) and not own_forward


def _remove(attention: nn.Module, names: tuple[str, ...]) -> None:
    attention.__dict__.pop("forward", None)
    for name in names:
        attention._modules.pop(name, None)
