"""Sessions of ONNX Runtime. Only this module creates them; its errors name the node and the modules at fault."""

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
from htp_export.files.data_files import check_data
from htp_export.files.lazy_tensor import slots
from htp_export.files.model_files import read_model, write_for_tool
from htp_export.format import tags
from htp_export.runtime.arrays import Array, from_ort, to_ort
from htp_export.runtime.faulty_optimizers import DISABLED, faulty_optimizers
from htp_export.runtime.inputs import Inputs

LARGE_BYTES = 256 << 20
"""A model with more bytes of weights in memory is written to a file before ONNX Runtime loads it."""

_FATAL = 4  # of ONNX Runtime's levels of logging; what is less is raised
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_DEFAULTS = {
    "session.intra_op.allow_spinning": "1",
    "session.optimized_model_external_initializers_min_size_in_bytes": "0",
    "session.record_ep_graph_assignment_info": "0",
}
"""Configuration entries whose default is not the empty text; an entry cannot be removed, only set to its default."""

_NODE_AT_FAULT = re.compile(
    r"""Name:'([^']*)'|Node \(([^)]*)\) Op|In Node, \("([^"]*)"|in node \(([^)]*)\)"""
)


@dataclass(frozen=True)
class SessionSettings:
    """Execution providers in order of preference, as for ``onnxruntime.InferenceSession``, and options.

    Providers are empty for those that ``options`` has, as those of plugins. ``options`` are an
    ``onnxruntime.SessionOptions`` of the user, restored afterwards.
    """

    providers: Sequence[Any] = ("CPUExecutionProvider",)
    options: Any = None

    @property
    def at_once(self) -> int:
        """How many kernels may run at the same time: one, unless the options say otherwise."""
        import onnxruntime

        if (
            self.options is None
            or self.options.execution_mode != onnxruntime.ExecutionMode.ORT_PARALLEL
        ):
            return 1
        return int(self.options.inter_op_num_threads) or os.cpu_count() or 1

    def check(self) -> None:
        """Refuse execution providers that are not available, see `check_providers`."""
        check_providers(self.providers)


def check_providers(providers: Sequence[Any]) -> None:
    """Refuse execution providers that are not available; ONNX Runtime would silently use the CPU instead."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    for provider in providers:
        name = provider if isinstance(provider, str) else provider[0]
        if name not in available:
            raise InputError(f"this ONNX Runtime has no {name}, only {', '.join(available)}")


@dataclass(frozen=True)
class OptionChanges:
    """Changes of the user's options that one session needs: attributes, and session configuration entries."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)


def as_written(*, threads: int | None = None) -> OptionChanges:
    """Return the changes for a session that runs the nodes of the file without optimisation, once or a few times.

    None leaves the threads of a kernel unchanged. With one thread, sums have a fixed order.
    """
    import onnxruntime

    attributes: dict[str, Any] = {
        "graph_optimization_level": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    }
    if threads is not None:
        attributes["intra_op_num_threads"] = threads
    # Prepacking copies weights, which does not pay for one run, and sums those that are constants
    # in another order. Spinning threads of many sessions slow down each other, and those of torch.
    return OptionChanges(
        attributes, {"session.disable_prepacking": "1", "session.intra_op.allow_spinning": "0"}
    )


@dataclass(frozen=True)
class RunnableModel:
    """A model in a form that ONNX Runtime loads: a file, or the bytes of one with the folder of external weights.

    ``weights``: name → ``OrtValue`` of initializers of which the source only has types and shapes.
    They share memory. A user's ``SessionOptions`` would keep references to them: they are for
    sessions without one. ``model`` is the same one; errors name modules by the tags of its nodes.
    """

    source: Path | bytes
    name: str
    folder: Path | None = None
    weights: Mapping[str, Any] = field(default_factory=dict)
    model: ir.Model | None = field(default=None, repr=False)

    @classmethod
    def of(cls, model: ir.Model, name: str, temporary: Path) -> RunnableModel:
        """Create one from a model in memory, which is not changed. External weights are read from their files.

        The model is written to the ``temporary`` folder if it has more weights in memory than a
        protobuf message may have, or external weights in several folders.
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
        """Create one from a file and what was read from it; ONNX Runtime reads the file if its weights lie there."""
        external = [
            slot.tensor for slot in slots(model) if isinstance(slot.tensor, ir.ExternalTensor)
        ]
        check_data(external)
        if all(Path(tensor.base_dir) == file.parent.absolute() for tensor in external):
            return cls(file, os.fspath(file), model=model)
        return cls.of(model, os.fspath(file), temporary)

    @property
    def size(self) -> int:
        """Bytes of the model without external weights."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    @contextlib.contextmanager
    def failing_to(self, action: str, values: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Turn errors of ONNX Runtime into an `OnnxRuntimeError` with the node at fault and its modules.

        ``values``: input name → the ``OrtValue`` that it is run on.
        """
        try:
            yield
        except Exception as error:  # ONNX Runtime's errors share no base but this
            raise self._failure(action, error, self._open_sizes(values or {})) from error

    def _open_sizes(self, values: Mapping[str, Any]) -> str:
        if self.model is None:
            return ""
        inputs = Inputs.of(self.model)
        tensors = {
            name: value for name, value in values.items() if name in inputs and value.is_tensor()
        }
        sizes = inputs.bind(shapes={name: value.shape() for name, value in tensors.items()}).sizes
        names = [name for name in sizes if name.isidentifier()]
        if not names:
            return ""
        run = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        return f"; it ran with {run}; for other sizes, give dims ({', '.join(f'{name}=...' for name in names)}) or data"

    def _failure(self, action: str, error: Exception, hint: str) -> OnnxRuntimeError:
        text = f"{in_one_line(error)}{hint}"
        if isinstance(self.source, Path):
            text = text.replace(os.fspath(self.source), self.name)
        match = _NODE_AT_FAULT.search(text)
        node = next((name for name in match.groups() if name), "") if match else ""
        return OnnxRuntimeError(self.name, action, text, node, self._owners(node) if node else ())

    def _owners(self, name: str) -> tuple[str, ...]:
        nodes = self.model.graph.all_nodes() if self.model is not None else ()
        return next(
            (tuple(tags.owners_of(node.metadata_props)) for node in nodes if node.name == name), ()
        )


RECORDED = {"session.record_ep_graph_assignment_info": "1"}
"""Configuration entries of a session that says which execution provider has which node."""


class Assigned(NamedTuple):
    """A node as ONNX Runtime gave it to an execution provider, before that fused it with others."""

    provider: str
    name: str
    domain: str
    op_type: str


class Session:
    """A model that ONNX Runtime has loaded; ``inputs`` include those with default values."""

    def __init__(
        self,
        model: RunnableModel,
        settings: SessionSettings | None = None,
        changes: OptionChanges | None = None,
    ) -> None:
        self.model = model
        with model.failing_to("load"):
            self._session = _load(model, settings or SessionSettings(), changes or OptionChanges())
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
        """Run the model once: output name → array; a list of arrays for a sequence, None for an optional without value.

        ``types``: input name → ONNX element type, for types that numpy does not have. After
        ``longest`` seconds the run ends in an error.
        """
        names = list(dict.fromkeys(self.outputs if outputs is None else outputs))
        found = {}
        values = self.run_values(self.values(arrays, types), names, longest=longest)
        for place, name in enumerate(names):
            found[name] = from_value(values[place])
            values[place] = None  # its memory is released before the next one is copied
        return found

    def values(
        self, arrays: Mapping[str, Array], types: Mapping[str, ir.DataType] | None = None
    ) -> dict[str, Any]:
        """Convert arrays to ``OrtValue``s; ``types`` as for `run`."""
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
        """Run the model once on ``OrtValue``s, and return one for each output; arguments as for `run`.

        An output that is an input, which has its name, is the given value: another one would not
        keep its memory alive.
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
        """Return what runs the model once with inputs and outputs in the memory of a device, and waits for its end.

        Arrays are copied to the device now, except for types that numpy does not have, as for
        `run`. The device has ONNX Runtime's name: ``cpu``, ``cuda``, ``dml``.
        """
        import onnxruntime

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
            # this also keeps the memory of the bound values alive
            with self.model.failing_to("run", values):
                self._session.run_with_iobinding(binding)
                binding.synchronize_outputs()

        return run

    def assignments(self) -> list[Assigned]:
        """The nodes that ONNX Runtime gave to each execution provider; the session needs the entry `RECORDED`."""
        import onnxruntime

        if not hasattr(self._session, "get_provider_graph_assignment_info"):
            raise InputError(
                f"ONNX Runtime {onnxruntime.__version__} does not say which execution provider has a node; it needs "
                "1.24 or later"
            )
        return [
            Assigned(str(part.ep_name), str(node.name), str(node.domain), str(node.op_type))
            for part in self._session.get_provider_graph_assignment_info()
            for node in part.get_nodes()
        ]

    def end_profiling(self) -> Path:
        """Stop the profiler, and return its file."""
        return Path(self._session.end_profiling())


@contextlib.contextmanager
def _stopped_after(seconds: float | None) -> Iterator[Any]:
    if seconds is None:
        yield None
        return
    import onnxruntime

    options = onnxruntime.RunOptions()
    timer = threading.Timer(seconds, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        yield options
    finally:
        timer.cancel()


def _load(model: RunnableModel, settings: SessionSettings, changes: OptionChanges) -> Any:
    import onnxruntime

    settings.check()
    options = settings.options if settings.options is not None else onnxruntime.SessionOptions()
    if model.weights and settings.options is not None:
        raise ValueError("a user's SessionOptions would keep these weights")
    for name, value in model.weights.items():
        options.add_initializer(name, value)
    quiet = {"log_severity_level": max(_FATAL, options.log_severity_level)}
    entries = {_WEIGHTS_FOLDER: os.fspath(model.folder)} if model.folder is not None else {}
    level = changes.attributes.get("graph_optimization_level", options.graph_optimization_level)
    if level != onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL and (
        faulty := faulty_optimizers(_graph_of(model))
    ):
        entries[DISABLED] = ";".join(filter(None, [entry_of(options, DISABLED), *faulty]))
    changes = OptionChanges({**quiet, **changes.attributes}, {**entries, **changes.entries})
    source = model.source if isinstance(model.source, bytes) else os.fspath(model.source)
    with _restored(options, changes) if settings.options is not None else contextlib.nullcontext():
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
    """Restore session options after the block. ONNX Runtime logs a warning for each entry that is set again."""
    before = {name: getattr(options, name) for name in changes.attributes}
    entries = {name: entry_of(options, name) for name in changes.entries}
    try:
        yield
    finally:
        _set(options, before, entries)


def entry_of(options: Any, name: str) -> str:
    """Return a configuration entry, or its default if it was not set."""
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
    """Return an ``OrtValue``: of numbers as `to_ort` does, of text as the result of a model that has it stored."""
    if array.dtype.kind not in "OUS":
        return to_ort(array, onnx_type)
    model = onnx.parser.parse_model(f"{_HELPER} () => (string[] y) {{}}")
    text: Any = [str(each) for each in array.flat]
    model.graph.initializer.append(
        onnx.helper.make_tensor("y", onnx.TensorProto.STRING, array.shape, text)
    )
    return Session(RunnableModel(model.SerializeToString(), "text")).run_values({})[0]


def from_value(value: Any) -> Any:
    """Copy an ``OrtValue``: an array, a list of arrays for a sequence, None for an optional without value."""
    if not value.has_value():
        return None
    if value.is_tensor():
        return from_ort(value)
    kind = re.sub(r"tensor\((\w+)\)", r"\1", value.data_type())
    model = onnx.parser.parse_model(f"{_HELPER} ({kind} x) => ({kind} y) {{ y = Identity(x) }}")
    session = Session(RunnableModel(model.SerializeToString(), "a sequence"))
    # only the results of a session are converted
    return session._session.run(None, {"x": value})[0]
