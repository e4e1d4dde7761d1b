"""Vision encoders for images of any size, as one sequence of patches with their grids in ``image_grid_thw``.

Such encoders compute the positions of patches from the values of the grids in Python loops, or
accept them as arguments (``transformers.vision_utils``). Here, tensor operations compute them, for
any number of images of any size. One attention runs on all patches, with a mask that selects the
patches of the same sequence (an image, a frame or a window).
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
"""Frames, rows and columns of patches of each image, in a tensor of [images, 3]."""


def encoder_of_grids(model: nn.Module) -> Any:
    """The module with an argument ``grid_thw``; None if there is none."""
    for module in model.modules():
        if "grid_thw" in named_parameters(module):
            return module
    return None


def example_images(encoder: Any, count: int, generator: torch.Generator) -> dict[str, Any]:
    """Patches and grids of example images.

    All images have the same number of patches, but alternate between two shapes, whose last windows
    are not full: no size of one image is a constant of the graph.
    """
    import torch

    merge, window = _merge_size(encoder), _window(encoder) or 1
    sizes = [merge * (window + 1), merge * (window + 2)]
    grids = [[1, *(sizes if image % 2 == 0 else sizes[::-1])] for image in range(count)]
    grid = torch.tensor(grids)
    channels = find(encoder.config, "in_channels", "in_chans", "num_channels") or 3
    size = find(encoder.config, "patch_size")
    frames = find(encoder.config, "temporal_patch_size") or 1
    shape = (int(grid.prod(-1).sum()), channels * frames * size * size)
    patches = torch.randn(shape, generator=generator)
    return {"pixel_values": patches.to(encoder.dtype), GRID: grid}


def grid_tensors(encoder: Any, grid: torch.Tensor, patches: int) -> dict[str, torch.Tensor]:
    """Compute the arguments that the encoder otherwise computes from the values of the grids.

    The names are from ``transformers.vision_utils``. ``cu_seqlens`` and ``cu_window_seqlens``
    do not contain the ends of sequences, but the number of each patch's sequence; see
    `attending_by_sequence`. ``patches`` is the number of patches of all images.
    """
    import torch

    merge = _merge_size(encoder)
    counts = grid.prod(-1)
    ends = counts.cumsum(0)
    # For each patch: its index, its image, the grid and the first patch of the image.
    index = torch.arange(patches, device=grid.device)
    image = (index[:, None] >= ends[None, :]).sum(1)
    _, height, width = grid[image].unbind(-1)
    start = (ends - counts)[image]
    frame, within = (index - start) // (height * width), (index - start) % (height * width)
    # Patches are ordered by blocks of merge by merge, which are merged.
    block, inner = within // merge**2, within % merge**2
    block_row, block_column = block // (width // merge), block % (width // merge)
    row, column = block_row * merge + inner // merge, block_column * merge + inner % merge
    # The first patch of the same frame is the number of the frame.
    first = start + frame * height * width
    merges_frames = getattr(encoder, "merge_temporal", False)
    has_time = getattr(encoder, "include_temporal", False)
    tensors = {
        "cu_seqlens": start if merges_frames else first,
        "position_ids": torch.stack([frame, row, column] if has_time else [row, column], -1),
    }
    window = _window(encoder)
    if window is not None:
        across = (width // merge + window - 1) // window
        # Unique: a frame has no more windows than patches, so that its numbers end before those of
        # the next frame begin.
        number = first + (block_row // window) * across + block_column // window
        order = torch.argsort((number * patches + index)[:: merge**2])
        tensors["window_index"] = order
        tensors["cu_window_seqlens"] = number[:: merge**2][order].repeat_interleave(merge**2)
    side = getattr(encoder, "num_grid_per_side", None)
    if side is not None:
        tensors |= _interpolation(encoder, side, (row, height), (column, width))
    return tensors


def _interpolation(
    encoder: Any, side: int, *axes: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Rows of a square of learned positions from which each patch's position is interpolated, and their weights."""
    import torch
    from transformers import vision_utils

    mode = getattr(encoder, "interpolation_mode", None) or "bilinear"
    corners = getattr(encoder, "interpolation_align_corners", None) is True
    padding = getattr(encoder, "interpolation_padding", None) or "border"
    taps_and_weights = vision_utils._interpolation_axis_taps_weights
    (rows, row_weights), (columns, column_weights) = (
        taps_and_weights(*axis, side, mode, corners, padding) for axis in axes
    )
    indices = rows[:, :, None] * side + columns[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return {
        "interp_indices": torch.flatten(indices, 1),
        "interp_weights": torch.flatten(weights, 1),
    }


@contextlib.contextmanager
def attending_by_sequence(encoder: nn.Module) -> Iterator[None]:
    """Inside the block, mask the attention of an encoder to the patches of the same sequence.

    The encoder passes the number of each patch's sequence to its modules as ``cu_seqlens``. A hook
    replaces it by the ends of one sequence of all patches, and ``scaled_dot_product_attention`` is
    called with a mask.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    # Sequence numbers and their mask, in the order of use: the last mask applies.
    masks: list[tuple[torch.Tensor, torch.Tensor]] = []
    whole_sequence: list[torch.Tensor] = []  # `cu_seqlens` of all patches, created once

    def replace_ends(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        numbers = kwargs.get("cu_seqlens")
        # A module inside another one gets the replaced argument.
        if numbers is None or any(numbers is ends for ends in whole_sequence):
            return None
        same = [mask for earlier, mask in masks if earlier is numbers]
        mask = same[0] if same else numbers[:, None] == numbers[None, :]
        masks.append((numbers, mask))
        if not whole_sequence:
            whole_sequence.append(torch.arange(2, device=numbers.device) * numbers.shape[0])
        return args, {**kwargs, "cu_seqlens": whole_sequence[0]}

    class Masked(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            # By name, because transformers' exporters replace the function itself.
            if masks and getattr(function, "__name__", "") == "scaled_dot_product_attention":
                kwargs.pop("attn_mask", None)
                args = (*args[:3], masks[-1][1], *args[4:])
            return function(*args, **kwargs)

    def make(changes: Changes) -> None:
        for module in encoder.modules():
            if module is not encoder:
                handle = module.register_forward_pre_hook(replace_ends, with_kwargs=True)
                changes.will_undo(handle.remove)

    with restored(make), Masked():
        yield


def _merge_size(encoder: nn.Module) -> int:
    """Rows and columns of patches that are merged into one token."""
    return _setting(encoder, "spatial_merge_size") or 1


def _window(encoder: nn.Module) -> int | None:
    """Rows and columns of tokens in a window of attention; None without windows."""
    window, patch = _setting(encoder, "window_size"), _setting(encoder, "patch_size")
    return None if window is None or patch is None else window // _merge_size(encoder) // patch


def _setting(encoder: nn.Module, name: str) -> int | None:
    """The first integer attribute of this name in the encoder's modules, as transformers' exporters find it."""
    for module in encoder.modules():
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    return None
