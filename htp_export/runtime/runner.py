"""ONNX Runtime sessions that give any tensor of a model, and share the model's weights instead of copying them."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from htp_export import tags
from htp_export.data_files import check_data
from htp_export.errors import InputError
from htp_export.runtime.arrays import Array, from_ort, to_ort

__all__ = ["Engine", "Runner", "check_providers", "portions"]


_SMALL_BYTES = 1024  # what is smaller stays in the model: shape inference reads it, and sharing saves nothing
_NO_FILE = "weights"
_FATAL = 4  # of ONNX Runtime's levels of logging: what is less is raised


@dataclass(frozen=True)
class Engine:
    """What runs ONNX models.

    Attributes:
        providers: Execution providers, in order of preference, as ``onnxruntime.InferenceSession`` takes them.
        entries: Session configuration entries, by key, as in ``SessionOptions.add_session_config_entry``.
    """

    providers: Sequence[Any] = ("CPUExecutionProvider",)
    entries: Mapping[str, str] = field(default_factory=dict)

    def options(self) -> Any:
        """Fresh ``SessionOptions`` that leave the graph as it is.

        Raises:
            InputError: If this ONNX Runtime has not all of the providers; it would silently take the CPU instead.
        """
        import onnxruntime

        check_providers(self.providers)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _FATAL
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # what is written runs
        options.add_session_config_entry("session.disable_prepacking", "1")  # it copies weights, for a single run
        options.add_session_config_entry(
            "session.intra_op.allow_spinning", "0"
        )  # threads of many sessions, and torch's
        for key, value in self.entries.items():
            options.add_session_config_entry(key, value)
        return options


def check_providers(providers: Sequence[Any]) -> None:
    """Refuse execution providers that are not there: ONNX Runtime would silently take the CPU instead.

    Args:
        providers: As ``onnxruntime.InferenceSession`` takes them.

    Raises:
        InputError: If one is not there.
    """
    import onnxruntime

    there = onnxruntime.get_available_providers()
    for provider in providers:
        name = provider if isinstance(provider, str) else provider[0]
        if name not in there:
            raise InputError(f"this ONNX Runtime has no {name}, only {', '.join(there)}")


class Runner:
    """Runs a model, and gives whichever of its tensors is asked for.

    The weights are handed to ONNX Runtime where they are: in the user's memory, or mapped from their files.

    Args:
        model: The model; left as it is, unless it may be used up.
        name: What to call it in errors.
        engine: What runs it.
        use_up: Whether nobody else needs the model: then it is not copied.
    """

    def __init__(self, model: ir.Model, name: str, engine: Engine, *, use_up: bool = False) -> None:
        self._name, self._engine = name, engine
        self._given = frozenset(value.name for value in model.graph.outputs)
        self._owners = {str(node.name): tags.owners_of(node.metadata_props) for node in model.graph if node.name}
        lean = model if use_up else model.clone()
        self._weights: dict[str, Any] = {}
        self._folder = self._take_weights(lean)
        self._bytes = ir.to_proto(lean).SerializeToString()

    def run(self, feed: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """The values of tensors of the main graph, by name.

        Args:
            feed: Input name → values.
            names: Outputs of the model, or of any node of its main graph.

        Raises:
            InputError: If ONNX Runtime cannot load the model, or cannot run it on this.
        """
        import onnxruntime

        names = list(dict.fromkeys(names))
        options = self._engine.options()
        for name, value in self._weights.items():
            options.add_initializer(name, value)
        source = self._bytes + _more_outputs(name for name in names if name not in self._given)
        try:
            with self._weights_folder() as folder:
                options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
                session = onnxruntime.InferenceSession(source, options, providers=list(self._engine.providers))
            wanted = {value.name for value in session.get_inputs()}
            values = {name: to_ort(array) for name, array in feed.items() if name in wanted}
            found = session.run_with_ort_values(names, values)
            return {name: from_ort(value) for name, value in zip(names, found, strict=True)}
        except Exception as error:  # ONNX Runtime's errors share no base but this
            raise InputError(self._failed(str(error).strip())) from error

    @contextlib.contextmanager
    def _weights_folder(self) -> Iterator[str]:
        """The folder of the weights in files; without any, one with the file that those in memory are said to be in.

        ONNX Runtime looks whether it is there.
        """
        if self._folder:
            yield self._folder
            return
        with tempfile.TemporaryDirectory(prefix="htp_export_", ignore_cleanup_errors=True) as folder:
            (Path(folder) / _NO_FILE).touch()
            yield folder

    def _failed(self, message: str) -> str:
        """What is said of an error: ONNX Runtime names the node, whose module we know."""
        named = re.search(r"Name:'([^']*)'", message)
        owners = self._owners.get(named[1], ()) if named else ()
        where = f" in module {', '.join(map(repr, owners))}" if owners else ""
        return f"{self._name}: ONNX Runtime cannot run it{where}: {' '.join(message.split())}"

    def _take_weights(self, lean: ir.Model) -> str:
        """Keep the large weights that are in memory; the model says that they are in a file, of which nothing is read.

        Those that are in files, ONNX Runtime maps itself.

        Returns:
            The folder of the files; ``""`` without any.
        """
        files = [tensor for tensor in _tensors(lean) if isinstance(tensor, ir.ExternalTensor)]
        check_data(files)
        folder = os.fspath(files[0].base_dir) if files else ""
        location = os.fspath(files[0].location) if files else _NO_FILE
        for value in lean.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes <= _SMALL_BYTES or not _is_shareable(tensor.dtype):
                continue
            if isinstance(tensor, ir.ExternalTensor) and os.fspath(tensor.base_dir) == folder:
                continue
            self._weights[str(value.name)] = to_ort(tensor.numpy(), tensor.dtype)
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                location, 0, tensor.nbytes, tensor.dtype, shape=shape, name=str(value.name)
            )
        return folder


def _is_shareable(dtype: ir.DataType) -> bool:
    """Whether numpy, ONNX and ONNX Runtime lay out values of a type alike: not text, and no two in a byte."""
    return dtype != ir.DataType.STRING and dtype.bitwidth >= 8


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    for graph in model.graphs():
        yield from (value.const_value for value in graph.initializers.values() if value.const_value is not None)


def _more_outputs(names: Iterable[str]) -> bytes:
    """A model that has nothing but outputs: protobuf merges messages whose bytes follow each other."""
    graph = onnx.GraphProto(output=[onnx.ValueInfoProto(name=name) for name in names])
    return onnx.ModelProto(graph=graph).SerializeToString() if graph.output else b""


def portions(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Names in groups, in order, whose sizes together stay within ``most``, or that are one alone.

    Example:
        >>> list(portions({"a": 4, "b": 4, "c": 9, "d": 1}, 8))
        [['a', 'b'], ['c'], ['d']]
    """
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group
