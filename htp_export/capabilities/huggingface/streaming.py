"""Models with weights mapped from files: from a checkpoint or, for converted weights, from a temporary file.

A mapped weight needs no memory before its values are used. The exporter uses the values when it
writes the file, and releases each part afterwards (`exporter.capture.saving`).
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.sources import Source
from htp_export.errors import FileError
from htp_export.files.checkpoint import Checkpoint, read_checkpoint
from htp_export.process.mapped_memory import MappedFiles, release_pages
from htp_export.process.restoring import Changes, restored, set_item

if TYPE_CHECKING:
    import torch
    from torch import nn

_LARGE_BYTES = 1 << 20
"""Smaller tensors stay in memory: all small tensors of a model together need a few megabytes."""

_RELEASED_BYTES = 1 << 28
"""Bytes of converted weights after which the pages of their sources are released, to bound the memory."""

_SEVERAL = 5
"""Names in a message, so that it stays readable."""

_ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"
"""Without this setting, transformers converts further weights in other threads, and keeps all of them in memory."""


def map_weights(model: nn.Module, source: str | os.PathLike[str]) -> Checkpoint:
    """Replace the weights of a model by weights mapped from safetensors files.

    All parameters and buffers are replaced, also on ``torch.device("meta")``. Tied parameters stay
    tied. Weights of another dtype than the model's are converted one at a time, into a temporary
    file.

    Args:
        model: The model, changed in place.
        source: A safetensors file, an index of several, or a folder with ``model.safetensors`` or
            ``model.safetensors.index.json``. Its keys equal the keys of ``model.state_dict()``.

    Returns:
        The files; their ``check()`` raises if one of them was changed since.

    Raises:
        FileError: If there are no such files; if a tensor is missing, unknown or of another shape;
            or if the model has a buffer without values that is not in ``state_dict()``. The model
            is unchanged.

    Examples:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> with torch.device("meta"):
        ...     net = torch.nn.Linear(4, 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file(torch.nn.Linear(4, 3).state_dict(), f"{folder}/model.safetensors")
        ...     files = map_weights(net, folder)
        >>> net.weight.device, net(torch.zeros(4)).shape
        (device(type='cpu'), torch.Size([3]))
    """
    checkpoint = read_checkpoint(source)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    _check_keys(model, checkpoint, state)
    # One name for each tensor: tied parameters are one tensor with several names.
    names: dict[int, str] = {
        id(tensor): name for name, tensor in state.items() if name in checkpoint.files
    }
    with _Files(checkpoint) as files:
        # Load all before the first conversion, which may fail: mapped tensors need no memory.
        loaded = {key: files.load(name) for key, name in names.items()}
        new = {key: files.converted(loaded[key], state[name]) for key, name in names.items()}
    for name, tensor in state.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, new[id(tensor)])
    return checkpoint


def _check_keys(model: nn.Module, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Refuse a checkpoint whose keys or shapes differ from the model's."""
    stored = {id(tensor) for name, tensor in state.items() if name in checkpoint.files}
    missing = [name for name, tensor in state.items() if id(tensor) not in stored]
    if missing:
        raise FileError(checkpoint.path, f"has no weights for {_some(missing)}")
    unknown = sorted(checkpoint.files.keys() - state.keys())
    if unknown:
        raise FileError(
            checkpoint.files[unknown[0]],
            f"has weights that the model does not have: {_some(unknown)}",
        )
    for name, tensor in state.items():
        if name in checkpoint.files and checkpoint.shapes[name] != tuple(tensor.shape):
            raise FileError(
                checkpoint.files[name], _other_shape(name, checkpoint.shapes[name], tensor.shape)
            )
    empty = [name for name, buffer in model.named_buffers() if name not in state and buffer.is_meta]
    if empty:
        problem = "these buffers have no values, and are in no state_dict(); set their values first"
        raise FileError(checkpoint.path, f"has no weights for {_some(empty)}: {problem}")


def _other_shape(name: str, stored: Iterable[int], needed: Iterable[int]) -> str:
    return f"tensor {name!r} has shape {list(stored)}, and the model needs {list(needed)}"


def _some(names: Iterable[str]) -> str:
    """The first names, and the number of the others."""
    names = sorted(names)
    more = f" and {len(names) - _SEVERAL} more" if len(names) > _SEVERAL else ""
    return ", ".join(map(repr, names[:_SEVERAL])) + more


class _Files:
    """The open files of a checkpoint, and a temporary file for converted weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open = contextlib.ExitStack()
        self._shards: dict[Path, Any] = {}
        self._new: Any = None
        self._thread = threading.get_ident()
        self._unreleased = 0

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()  # mapped tensors stay mapped
        self._release()

    def load(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint, mapped."""
        from safetensors import safe_open

        file = self._checkpoint.files[name]
        if file not in self._shards:
            self._shards[file] = self._open.enter_context(safe_open(file, framework="pt"))
        tensor: torch.Tensor = self._shards[file].get_tensor(name)
        return tensor

    def converted(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Convert values to the dtype and the class of a parameter or buffer."""
        from torch import nn

        value = self.moved(value.to(like.dtype))
        if isinstance(like, nn.Parameter):
            return nn.Parameter(value, requires_grad=like.requires_grad)
        return value

    def moved(self, value: torch.Tensor) -> torch.Tensor:
        """Move the values of a large tensor into the temporary file; other tensors are returned unchanged."""
        import torch

        if not _is_plain(value) or value.nbytes < _LARGE_BYTES:
            return value
        storage = value.untyped_storage()
        if MappedFiles.now().path_of(storage.data_ptr(), storage.nbytes()) is not None:
            return value
        if self._new is None:
            file = tempfile.TemporaryFile(prefix="htp_export_", buffering=0)  # noqa: SIM115 - closed with the others
            self._new = self._open.enter_context(file)
        # A mapping has to begin at a multiple of the granularity.
        end = self._new.seek(0, os.SEEK_END)
        start = self._new.seek(-end % mmap.ALLOCATIONGRANULARITY, os.SEEK_CUR)
        left = memoryview(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        # An unbuffered file may write less than all bytes.
        while left:
            left = left[self._new.write(left) :]
        memory = mmap.mmap(self._new.fileno(), value.nbytes, access=mmap.ACCESS_COPY, offset=start)
        self._unreleased += value.nbytes
        if self._unreleased > _RELEASED_BYTES:
            self._release()
        return torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype).view(value.shape)

    def _release(self) -> None:
        """Release the pages of the checkpoint's files."""
        mapped = MappedFiles.now()
        for file in set(self._checkpoint.files.values()):
            mapped.release(os.path.realpath(file))
        self._unreleased = 0

    def registered(self, _module: Any, _name: str, parameter: Any) -> Any:
        """Hook of torch: move a new parameter of this thread into a file; None for an unchanged one."""
        from torch import nn

        if type(parameter) is not nn.Parameter or threading.get_ident() != self._thread:
            return None
        value = parameter.detach()
        moved = self.moved(value)
        if moved is value:
            return None
        new = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)  # attributes that transformers sets
        return new


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is dense, in memory, and of no subclass or quantized type."""
    import torch

    if value.layout is not torch.strided or value.device.type != "cpu":
        return False
    return type(value) is torch.Tensor and not value.is_quantized


@contextlib.contextmanager
def released_when_read(model: nn.Module) -> Iterator[None]:
    """Inside the block, release the pages of mapped weights after each run of their module."""

    def make(changes: Changes) -> None:
        mapped = MappedFiles.now()
        for module in model.modules():
            ranges = []
            for weight in module.parameters(recurse=False):
                address, size = weight.data_ptr(), weight.nbytes
                if size >= _LARGE_BYTES and mapped.path_of(address, size) is not None:
                    ranges.append((address, size))
            if ranges:
                hook = functools.partial(_release, ranges)
                changes.will_undo(module.register_forward_hook(hook, always_call=True).remove)

    with restored(make):
        yield


def _release(ranges: Iterable[tuple[int, int]], *_: Any) -> None:
    for address, length in ranges:
        release_pages(address, length)


@contextlib.contextmanager
def weights_in_files(checkpoint: Checkpoint) -> Iterator[None]:
    """Inside the block, ``from_pretrained`` moves converted and joined parameters into a temporary file, one by one."""
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def make(changes: Changes) -> None:
        set_item(changes, os.environ, _ONE_AT_A_TIME, "1")
        changes.will_undo(register_module_parameter_registration_hook(files.registered).remove)

    with _Files(checkpoint) as files, restored(make):
        yield


def find_checkpoint(source: Source, config: Any) -> Checkpoint:
    """The safetensors files of a folder, or of a model of the hub, which are downloaded."""
    named = getattr(config, "transformers_weights", None)  # from config.json: not trusted
    if named is not None and Path(str(named)).name != named:
        problem = (
            f"its config names weights outside of its folder: {named!r}; they will not be read"
        )
        raise FileError(source.name, problem)
    folder = Path(source.name)
    if folder.is_dir():
        return read_checkpoint(folder / named if named else folder)
    from transformers.utils.hub import get_checkpoint_shard_files

    for name in (named,) if named else ("model.safetensors", "model.safetensors.index.json"):
        file = source.file(name)
        if file is None:
            continue
        if file.endswith(".json"):
            # Downloads the files that the index names.
            get_checkpoint_shard_files(source.name, file, **source.download)  # type: ignore[no-untyped-call]
        return read_checkpoint(file)
    raise FileError(
        source.name, "has no weights in safetensors files; --stream-weights reads no others"
    )


def check_loaded(checkpoint: Checkpoint, loading: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks weights of a model, as ``from_pretrained`` reports, or that was changed since."""
    for name, stored, needed in sorted(loading["mismatched_keys"]):
        raise FileError(
            checkpoint.files.get(name, checkpoint.path), _other_shape(name, stored, needed)
        )
    if loading["missing_keys"]:
        raise FileError(checkpoint.path, f"has no weights for {_some(loading['missing_keys'])}")
    checkpoint.check()
