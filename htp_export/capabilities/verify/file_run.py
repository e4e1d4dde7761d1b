"""A file with the inputs on which it runs, and any of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from htp_export.errors import InputError, UntaggedModelError
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array
from htp_export.runtime.runner import Runner, portions
from htp_export.runtime.sessions import SessionSettings

__all__ = ["FileRun", "check_has_modules"]


@dataclass(frozen=True)
class FileRun:
    """A file, and how its tensors are computed.

    Attributes:
        tagged: The file.
        name: Its name in errors.
        feed: Input name → values.
        settings: Execution providers and options of ONNX Runtime.
        portion_bytes: Bytes of tensors that are fetched in one run.
        use_up: Whether the model may be changed instead of copied, because nothing else needs it.
    """

    tagged: TaggedModel
    name: str
    feed: Mapping[str, Array]
    settings: SessionSettings
    portion_bytes: int
    use_up: bool = False

    @cached_property
    def _runner(self) -> Runner:
        return Runner(self.tagged.model, self.name, self.settings, use_up=self.use_up)

    def fetch(self, sizes: Mapping[str, int], use: Callable[[str, Array], None]) -> None:
        """Call a function with each of some tensors once; their memory is released portion by portion.

        Args:
            sizes: Tensor name → its size in bytes, 0 if it is unknown.
            use: Called with the name and the values.

        Raises:
            InputError: If ONNX Runtime cannot run the file.
        """
        computed = {}
        for name, size in sizes.items():
            value = self.tagged.values[name]
            if name in self.feed and value.producer() is None:
                use(name, self.feed[name])
            elif value.is_initializer() and value.const_value is not None:
                use(name, _weight(value, value.const_value))
            else:
                computed[name] = size
        for names in counted(list(portions(computed, self.portion_bytes)), "portions of the tensors"):
            arrays = self._runner.run(self.feed, names)
            for name in names:
                use(name, arrays.pop(name))


def _weight(value: ir.Value, tensor: ir.TensorProtocol) -> Array:
    try:
        return tensor.numpy()
    except (OSError, ValueError) as error:
        raise InputError(f"weight {value.name!r} cannot be read: {error}") from error


def check_has_modules(tagged: TaggedModel, name: str) -> None:
    """Refuse a file that does not say which tensors belong to which module.

    Raises:
        UntaggedModelError: If it has neither tags nor signatures.
    """
    if tagged.source == "none" and not tagged.signatures:
        raise UntaggedModelError(
            f"{name}: has no module tags; a tool took them off, or it was not exported with htp_export.export(...)"
        )
