"""Sessions of ONNX Runtime, which only this module creates; errors name the node and the modules at fault."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir

from htp_export.errors import InputError, OnnxRuntimeError, in_one_line
from htp_export.extras import required
from htp_export.files.data_files import check_data
from htp_export.files.lazy_tensor import slots
from htp_export.files.model_files import read_model, write_for_tool
from htp_export.format import tags
from htp_export.runtime.arrays import Array, from_ort, to_ort
from htp_export.runtime.faulty_optimizers import DISABLED, faulty_optimizers
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.settings import DEFAULTS, RunSettings

LARGE_BYTES = 256 << 20
"""A model with more bytes of weights in memory is written to a file first: ONNX Runtime would copy them."""

_FATAL = 4  # the severity of ONNX Runtime's log; errors of lower severity are raised, too
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_DEFAULTS = {
    "session.intra_op.allow_spinning": "1",
    "session.optimized_model_external_initializers_min_size_in_bytes": "0",
    "session.record_ep_graph_assignment_info": "0",
}
"""Configuration entries with a default that is not empty: an entry cannot be removed, only set to its default."""

_NODE_AT_FAULT = re.compile(
    r"""Name:'([^']*)'|Node \(([^)]*)\) Op|In Node, \("([^"]*)"|in node \(([^)]*)\)"""
)


_STATUS = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_CPP = re.compile(
    r"\S+\.(?:h|cc|cpp|cu):\d+ [\w:~<>]+\([^()]*\)(?: const)? (?:[^.]+ was false\. )?"
)
_LONGEST_MESSAGE = 10_000
"""Characters of a message that is searched: those of ONNX Runtime itself are shorter, names in files may not be."""


def without_cpp(message: str) -> str:
    """Return a message of ONNX Runtime without its status code, C++ sources, signatures and conditions.

    Examples:
        >>> without_cpp(
        ...     "[ONNXRuntimeError] : 1 : FAIL : Name:'r' Status Message: /core/reshape.h:91 "
        ...     "onnxruntime::Helper::Helper(const Shape&, bool) size == wanted was false. It cannot be reshaped."
        ... )
        "Name:'r' Status Message: It cannot be reshaped."
    """
    if len(message) > _LONGEST_MESSAGE:
        return message
    return _CPP.sub("", _STATUS.sub("", message))


def kernels_at_once(settings: RunSettings) -> int:
    """Return the number of kernels that may run at the same time: one, except in the parallel execution mode."""
    onnxruntime = required("onnxruntime")

    options = settings.session_options
    if options is None or options.execution_mode != onnxruntime.ExecutionMode.ORT_PARALLEL:
        return 1
    return int(options.inter_op_num_threads) or os.cpu_count() or 1


@dataclass(frozen=True)
class OptionChanges:
    """Changes of session options that one session needs: attributes, and session configuration entries."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)


def as_written(*, threads: int | None = None) -> OptionChanges:
    """Return the changes for a session that runs the nodes of the file without optimisation, once or a few times.

    None leaves the threads of a kernel unchanged. With one thread, sums have a fixed order.
    """
    onnxruntime = required("onnxruntime")

    attributes: dict[str, Any] = {
        "graph_optimization_level": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    }
    if threads is not None:
        attributes["intra_op_num_threads"] = threads
    # Prepacking copies weights, which is slower for one run, and sums constants in another order.
    # Spinning threads of many sessions slow down each other, and the threads of torch.
    return OptionChanges(
        attributes, {"session.disable_prepacking": "1", "session.intra_op.allow_spinning": "0"}
    )


@dataclass(frozen=True)
class RunnableModel:
    """A model in a form that ONNX Runtime loads: a file, or a serialized model and the folder of its external weights.

    ``weights``: name → ``OrtValue``, which shares memory, of initializers for which the source has
    only types and shapes. A user's ``SessionOptions`` would keep references to these values: they
    are for sessions without them. ``model`` is the same model, whose tags name modules in errors.
    """

    source: Path | bytes
    name: str
    folder: Path | None = None
    weights: Mapping[str, Any] = field(default_factory=dict)
    model: ir.Model | None = field(default=None, repr=False)

    @classmethod
    def of(cls, model: ir.Model, name: str, temporary: Path) -> RunnableModel:
        """Create one from a model in memory, which is not changed; external weights are read from their files.

        The model is written to the ``temporary`` folder if it has many weights in memory, or
        external weights in several folders.
        """
        tensors = [slot.tensor for slot in slots(model)]
        check_data(tensors)
        folders = {
            os.fspath(tensor.base_dir)
            for tensor in tensors
            if isinstance(tensor, ir.ExternalTensor)
        }
        size = sum(tensor.nbytes for tensor in tensors if not isinstance(tensor, ir.ExternalTensor))
        if len(folders) > 1 or size > LARGE_BYTES:
            write_for_tool(model, temporary / "model.onnx")
            return cls(temporary / "model.onnx", name, model=model)
        folder = Path(folders.pop()) if folders else None
        return cls(ir.to_proto(model).SerializeToString(), name, folder, model=model)

    @classmethod
    def of_file(cls, file: Path, model: ir.Model, temporary: Path) -> RunnableModel:
        """Create one from a file and its model; ONNX Runtime reads the file if its weights are in the same folder."""
        tensors = [slot.tensor for slot in slots(model)]
        external = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
        check_data(external)
        if all(Path(tensor.base_dir) == file.parent.absolute() for tensor in external):
            return cls(file, os.fspath(file), model=model)
        return cls.of(model, os.fspath(file), temporary)

    @property
    def size(self) -> int:
        """Size of the model in bytes, without external weights."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    @contextlib.contextmanager
    def failing_to(self, action: str, values: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Turn errors of ONNX Runtime into an `OnnxRuntimeError` with the node at fault and its modules.

        ``values``: input name → its ``OrtValue`` in the run.
        """
        try:
            yield
        except Exception as error:  # ONNX Runtime's errors have no other common base class
            raise self._failure(action, error, self._open_sizes(values or {})) from error

    def _open_sizes(self, values: Mapping[str, Any]) -> str:
        """Return the end of a message with the sizes of open dimensions in a failed run."""
        if self.model is None:
            return ""
        inputs = Inputs.of(self.model)
        shapes: dict[str, Sequence[int]] = {}
        for name, value in values.items():
            if name in inputs and value.is_tensor():
                shapes[name] = value.shape()
        sizes = inputs.bind(shapes=shapes).sizes
        names = [name for name in sizes if name.isidentifier()]
        if not names:
            return ""
        run = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        example = ", ".join(f"{name}=..." for name in names)
        return f"; it ran with {run}; for other sizes, give dims ({example}) or data"

    def _failure(self, action: str, error: Exception, hint: str) -> OnnxRuntimeError:
        text = f"{without_cpp(in_one_line(error))}{hint}"
        if isinstance(self.source, Path):
            text = text.replace(os.fspath(self.source), self.name)
        match = _NODE_AT_FAULT.search(text)
        node = next(filter(None, match.groups()), "") if match else ""
        return OnnxRuntimeError(self.name, action, text, node, self._owners(node) if node else ())

    def _owners(self, name: str) -> tuple[str, ...]:
        """Return the modules that own the node with a name."""
        if self.model is None:
            return ()
        for node in self.model.graph.all_nodes():
            if node.name == name:
                return tuple(tags.owners_of(node.metadata_props))
        return ()


RECORDED = {"session.record_ep_graph_assignment_info": "1"}
"""Configuration entries of a session that records the assignment of nodes to execution providers."""


class Assigned(NamedTuple):
    """A node that ONNX Runtime assigned to an execution provider, before the provider fused it with others."""

    provider: str
    name: str
    domain: str
    op_type: str


class Session:
    """A model that ONNX Runtime has loaded; ``inputs`` include those with default values."""

    def __init__(
        self,
        model: RunnableModel,
        settings: RunSettings = DEFAULTS,
        changes: OptionChanges | None = None,
    ) -> None:
        self.model = model
        with model.failing_to("load"):
            self._session = _load(model, settings, changes or OptionChanges())
        self.inputs = tuple(argument.name for argument in self._session.get_inputs())
        self.outputs = tuple(argument.name for argument in self._session.get_outputs())
        self.providers: tuple[str, ...] = tuple(self._session.get_providers())

    def run(
        self,
        arrays: Mapping[str, Array],
        outputs: Sequence[str] | None = None,
        types: Mapping[str, ir.DataType] | None = None,
        *,
        longest: float | None = None,
    ) -> dict[str, Any]:
        """Run the model once: output name → array; a list of arrays for a sequence, None for an empty optional.

        ``types``: input name → ONNX element type, for types that numpy does not have. After
        ``longest`` seconds, the run ends with an error.
        """
        names = list(dict.fromkeys(self.outputs if outputs is None else outputs))
        results = {}
        values = self.run_values(self.values(arrays, types), names, longest=longest)
        for index, name in enumerate(names):
            results[name] = from_value(values[index])
            values[index] = None  # release its memory before the next output is copied
        return results

    def values(
        self, arrays: Mapping[str, Array], types: Mapping[str, ir.DataType] | None = None
    ) -> dict[str, Any]:
        """Convert arrays to ``OrtValue``s; ``types`` as in `run`."""
        with self.model.failing_to("run"):
            return {
                name: to_value(array, (types or {}).get(name)) for name, array in arrays.items()
            }

    def run_values(
        self,
        values: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        *,
        longest: float | None = None,
    ) -> list[Any]:
        """Run the model once on ``OrtValue``s, and return one for each output; arguments as in `run`.

        For an output that is also an input, the value of the input is returned: another value would
        not keep its memory alive.
        """
        names = list(self.outputs if outputs is None else outputs)
        with self.model.failing_to("run", values), _stopped_after(longest) as options:
            results = self._session.run_with_ort_values(names, dict(values), options)
        return [values.get(name, result) for name, result in zip(names, results, strict=True)]

    def bound(
        self,
        arrays: Mapping[str, Array],
        types: Mapping[str, ir.DataType] | None = None,
        device: str = "cpu",
    ) -> Callable[[], None]:
        """Return a function that runs the model once with inputs and outputs in the memory of a device.

        It returns when the run has ended. Arrays are copied to the device now, except for types
        that numpy does not have, as in `run`. The device has ONNX Runtime's name: ``cpu``,
        ``cuda``, ``dml``.
        """
        onnxruntime = required("onnxruntime")

        values = self.values(arrays, types)
        with self.model.failing_to("run"):
            binding = self._session.io_binding()
            for name in values:
                if device != "cpu" and arrays[name].dtype.kind in "bfiu":
                    values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(arrays[name], device, 0)
                binding.bind_ortvalue_input(name, values[name])
            for name in self.outputs:
                binding.bind_output(name, device)

        def run() -> None:
            # the reference to `values` also keeps the memory of the bound values alive
            with self.model.failing_to("run", values):
                self._session.run_with_iobinding(binding)
                binding.synchronize_outputs()

        return run

    def assignments(self) -> list[Assigned]:
        """Return the assignment of nodes to execution providers; requires a session with the entry `RECORDED`."""
        onnxruntime = required("onnxruntime")

        if not hasattr(self._session, "get_provider_graph_assignment_info"):
            raise InputError(
                f"ONNX Runtime {onnxruntime.__version__} does not report the execution provider of a node; "
                "1.24 or later is required"
            )
        assigned: list[Assigned] = []
        for part in self._session.get_provider_graph_assignment_info():
            provider = str(part.ep_name)
            assigned += [
                Assigned(provider, str(node.name), str(node.domain), str(node.op_type))
                for node in part.get_nodes()
            ]
        return assigned

    def end_profiling(self) -> Path:
        """Stop the profiler, and return its file."""
        return Path(self._session.end_profiling())


@contextlib.contextmanager
def _stopped_after(seconds: float | None) -> Iterator[Any]:
    """Provide options for a run that end it after some seconds; None without a limit."""
    if seconds is None:
        yield None
        return
    onnxruntime = required("onnxruntime")

    options = onnxruntime.RunOptions()
    timer = threading.Timer(seconds, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        yield options
    finally:
        timer.cancel()


def _load(model: RunnableModel, settings: RunSettings, changes: OptionChanges) -> Any:
    onnxruntime = required("onnxruntime")

    settings.check_providers()
    given = settings.session_options
    options = onnxruntime.SessionOptions() if given is None else given
    if model.weights and given is not None:
        raise ValueError("a user's SessionOptions would keep these weights")
    for name, value in model.weights.items():
        options.add_initializer(name, value)
    quiet = {"log_severity_level": max(_FATAL, options.log_severity_level)}
    entries = {_WEIGHTS_FOLDER: os.fspath(model.folder)} if model.folder is not None else {}
    level = changes.attributes.get("graph_optimization_level", options.graph_optimization_level)
    if level != onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL:
        faulty = faulty_optimizers(_graph_of(model))
        if faulty:
            disabled = [entry_of(options, DISABLED), *faulty]
            entries[DISABLED] = ";".join(filter(None, disabled))
    changes = OptionChanges({**quiet, **changes.attributes}, {**entries, **changes.entries})
    source = model.source if isinstance(model.source, bytes) else os.fspath(model.source)
    with contextlib.nullcontext() if given is None else _restored(given, changes):
        _set(options, changes.attributes, changes.entries)
        return onnxruntime.InferenceSession(source, options, providers=list(settings.providers))


def _graph_of(model: RunnableModel) -> ir.Model:
    if model.model is not None:
        return model.model
    if isinstance(model.source, bytes):
        return ir.from_proto(onnx.load_from_string(model.source))
    return read_model(model.source)  # without its weights


@contextlib.contextmanager
def _restored(options: Any, changes: OptionChanges) -> Iterator[None]:
    """Restore session options after a ``with`` block; ONNX Runtime logs a warning for each entry that is set again."""
    before = {name: getattr(options, name) for name in changes.attributes}
    entries = {name: entry_of(options, name) for name in changes.entries}
    try:
        yield
    finally:
        _set(options, before, entries)


def entry_of(options: Any, name: str) -> str:
    """Return the value of a configuration entry, or its default if it is not set."""
    try:
        return str(options.get_session_config_entry(name))
    except RuntimeError:
        return _DEFAULTS.get(name, "")


def _set(options: Any, attributes: Mapping[str, Any], entries: Mapping[str, str]) -> None:
    for name, value in attributes.items():
        setattr(options, name, value)
    for name, entry in entries.items():
        options.add_session_config_entry(name, entry)


# --- values for which ONNX Runtime has no conversion from or to numpy ---

_HELPER = '<ir_version: 10, opset_import: ["": 18]> helper'


def to_value(array: Array, onnx_type: ir.DataType | None = None) -> Any:
    """Return an ``OrtValue`` of an array: as `to_ort`, but strings are the output of a model that contains them."""
    if array.dtype.kind not in "OUS":
        return to_ort(array, onnx_type)
    model = onnx.parser.parse_model(f"{_HELPER} () => (string[] y) {{}}")
    strings: Any = [str(element) for element in array.flat]
    tensor = onnx.helper.make_tensor("y", onnx.TensorProto.STRING, array.shape, strings)
    model.graph.initializer.append(tensor)
    return Session(RunnableModel(model.SerializeToString(), "text")).run_values({})[0]


def from_value(value: Any) -> Any:
    """Copy an ``OrtValue``: an array, a list of arrays for a sequence, None for an empty optional."""
    if not value.has_value():
        return None
    if value.is_tensor():
        return from_ort(value)
    value_type = re.sub(r"tensor\((\w+)\)", r"\1", value.data_type())
    model = onnx.parser.parse_model(
        f"{_HELPER} ({value_type} x) => ({value_type} y) {{ y = Identity(x) }}"
    )
    session = Session(RunnableModel(model.SerializeToString(), "a sequence"))
    # onnxruntime converts a sequence only as the result of a session
    return session._session.run(None, {"x": value})[0]
