"""Vision encoders that take images of any size as one sequence of patches, with their grids in ``image_grid_thw``.

They compute the places of patches from the values of the grids, in loops of Python, or take them as
arguments (``transformers.vision_utils``). Here tensors alone compute them, for any number of images
of any size. All patches go through one attention, masked to those of the same sequence (an image, a
frame or a window).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.configs import find
from htp_export.capabilities.huggingface.inputs import named_parameters
from htp_export.process.restoring import Changes, restored

if TYPE_CHECKING:
    import torch
    from torch import nn

GRID = "image_grid_thw"
"""Images → frames, rows and columns of patches, in a tensor of [images, 3]."""


def encoder_of_grids(model: nn.Module) -> Any:
    """The module that takes patches and ``grid_thw``; None if there is none."""
    return next(
        (module for module in model.modules() if "grid_thw" in named_parameters(module)), None
    )


def example_images(encoder: Any, count: int, generator: torch.Generator) -> dict[str, Any]:
    """Patches of some images, and their grids: as many patches in each image, in other shapes, and no full windows."""
    import torch

    merge, window = _merge_size(encoder), _window(encoder) or 1
    sizes = [merge * (window + 1), merge * (window + 2)]
    grid = torch.tensor(
        [[1, *(sizes if image % 2 == 0 else sizes[::-1])] for image in range(count)]
    )
    channels = find(encoder.config, "in_channels", "in_chans", "num_channels") or 3
    size, frames = (
        find(encoder.config, "patch_size"),
        find(encoder.config, "temporal_patch_size") or 1,
    )
    patches = torch.randn(
        int(grid.prod(-1).sum()), channels * frames * size * size, generator=generator
    )
    return {"pixel_values": patches.to(encoder.dtype), GRID: grid}


def in_place_of_loops(encoder: Any, grid: torch.Tensor, patches: int) -> dict[str, torch.Tensor]:
    """What the encoder computes from the values of the grids, under the names of ``transformers.vision_utils``.

    In ``cu_seqlens`` and ``cu_window_seqlens`` are not the ends of the sequences, but the number of
    the sequence of each patch; see `attending_by_sequence`. The number of patches is that of all
    images.
    """
    import torch

    merge = _merge_size(encoder)
    counts = grid.prod(-1)
    ends = counts.cumsum(0)
    place = torch.arange(patches, device=grid.device)
    image = (place[:, None] >= ends[None, :]).sum(1)
    (_, height, width), start = grid[image].unbind(-1), (ends - counts)[image]
    frame, within = (place - start) // (height * width), (place - start) % (height * width)
    # Patches are ordered by blocks of merge by merge, which are merged.
    block, inner = within // merge**2, within % merge**2
    block_row, block_column = block // (width // merge), block % (width // merge)
    row, column = block_row * merge + inner // merge, block_column * merge + inner % merge
    # of the patches of the same frame: a number of the frame
    first = start + frame * height * width
    merges_frames = getattr(encoder, "merge_temporal", False)
    made = {
        "cu_seqlens": start if merges_frames else first,
        "position_ids": torch.stack([row, column], -1),
    }
    if getattr(encoder, "include_temporal", False):
        made["position_ids"] = torch.stack([frame, row, column], -1)
    window = _window(encoder)
    if window is not None:
        across = (width // merge + window - 1) // window
        # smaller than that of the next frame
        number = first + (block_row // window) * across + block_column // window
        order = torch.argsort((number * patches + place)[:: merge**2])
        made["window_index"] = order
        made["cu_window_seqlens"] = number[:: merge**2][order].repeat_interleave(merge**2)
    side = getattr(encoder, "num_grid_per_side", None)
    if side is not None:
        made |= _interpolation(encoder, side, (row, height), (column, width))
    return made


def _interpolation(
    encoder: Any, side: int, *axes: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Which rows of a square of learned positions make that of a patch, and their weights."""
    import torch
    from transformers import vision_utils

    mode = getattr(encoder, "interpolation_mode", None) or "bilinear"
    corners = getattr(encoder, "interpolation_align_corners", None) is True
    padding = getattr(encoder, "interpolation_padding", None) or "border"
    of_axis = vision_utils._interpolation_axis_taps_weights
    (rows, by_row), (columns, by_column) = (
        of_axis(*axis, side, mode, corners, padding) for axis in axes
    )
    indices = rows[:, :, None] * side + columns[:, None, :]
    weights = by_row[:, :, None] * by_column[:, None, :]
    return {
        "interp_indices": torch.flatten(indices, 1),
        "interp_weights": torch.flatten(weights, 1),
    }


@contextlib.contextmanager
def attending_by_sequence(encoder: nn.Module) -> Iterator[None]:
    """Let the attention of an encoder see the patches of one sequence alone, as long as a ``with`` block runs.

    Its modules are given the number of the sequence of each patch as ``cu_seqlens``. They are
    called with one sequence of all patches; ``scaled_dot_product_attention`` gets the mask.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    # numbers of sequences, and their mask; the last is in use
    masks: list[tuple[torch.Tensor, torch.Tensor]] = []
    ends: list[torch.Tensor] = []  # of one sequence of all patches

    def give_all(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        numbers = kwargs.get("cu_seqlens")
        if numbers is None or any(numbers is known for known in ends):
            return None
        made = next((mask for known, mask in masks if known is numbers), None)
        masks.append((numbers, numbers[:, None] == numbers[None, :] if made is None else made))
        ends[:] = ends or [torch.arange(2, device=numbers.device) * numbers.shape[0]]
        return args, {**kwargs, "cu_seqlens": ends[0]}

    class Masked(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            # By name: transformers' exporters replace the function itself.
            if masks and getattr(function, "__name__", "") == "scaled_dot_product_attention":
                args, kwargs = (
                    (*args[:3], masks[-1][1], *args[4:]),
                    {k: v for k, v in kwargs.items() if k != "attn_mask"},
                )
            return function(*args, **kwargs)

    def make(changes: Changes) -> None:
        for module in encoder.modules():
            if module is not encoder:
                changes.will_undo(
                    module.register_forward_pre_hook(give_all, with_kwargs=True).remove
                )

    with restored(make), Masked():
        yield


def _merge_size(encoder: nn.Module) -> int:
    """Rows and columns of patches that make one token."""
    return _setting(encoder, "spatial_merge_size") or 1


def _window(encoder: nn.Module) -> int | None:
    """Rows and columns of tokens in a window of attention; None without windows."""
    window, patch = _setting(encoder, "window_size"), _setting(encoder, "patch_size")
    return None if window is None or patch is None else window // _merge_size(encoder) // patch


def _setting(encoder: nn.Module, name: str) -> int | None:
    """A number that a module of the encoder has, as transformers' exporters find it."""
    return next(
        (
            value
            for module in encoder.modules()
            if isinstance(value := getattr(module, name, None), int)
        ),
        None,
    )
