"""An ONNX Runtime session that is timed with its profiler and without, and that tells the graph which it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.data_files import check_data
from htp_export.errors import InputError
from htp_export.files import write_model
from htp_export.runtime.arrays import to_ort
from htp_export.runtime.inputs import Feed
from htp_export.runtime.runner import check_providers
from htp_export.runtime.traces import Trace, read_trace
from htp_export.slots import slots

__all__ = ["Engine", "RunnableModel", "Session", "open_session", "temporary_folder"]

_log = logging.getLogger(__name__)

_EXTERNAL_FILE = "session.optimized_model_external_initializers_file_name"
_EXTERNAL_SIZE = "session.optimized_model_external_initializers_min_size_in_bytes"
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_LARGE_BYTES = 256 << 20
"""A file of this size has its weights in it; ONNX Runtime would copy them into the graph that it tells."""

_FATAL = 4  # of ONNX Runtime's levels of logging: what is less is raised, or about the graphs that it writes


@dataclass(frozen=True)
class RunnableModel:
    """A model as ONNX Runtime takes it.

    Attributes:
        source: A file, or the bytes of one.
        name: What to call it in errors.
        folder: For bytes, where the weights are that are not among them.
    """

    source: Path | bytes
    name: str
    folder: Path | None = None

    @classmethod
    def of(cls, model: ir.Model, name: str, temporary: Path) -> RunnableModel:
        """A model in memory. Its external weights are read from where they are, and nothing is written if it is small.

        Args:
            model: The model, which stays as it is.
            name: What to call it in errors.
            temporary: A folder to write it to if it has more weights in memory than a message may have, or external
                ones in several folders.
        """
        tensors = [slot.tensor for slot in slots(model)]
        check_data(tensors)
        folders = {os.fspath(each.base_dir) for each in tensors if isinstance(each, ir.ExternalTensor)}
        size = sum(each.nbytes for each in tensors if not isinstance(each, ir.ExternalTensor))
        if len(folders) > 1 or size > _LARGE_BYTES:
            write_model(model, temporary / "model.onnx")
            return cls(temporary / "model.onnx", name)
        return cls(ir.to_proto(model).SerializeToString(), name, Path(folders.pop()) if folders else None)

    @classmethod
    def of_file(cls, file: Path, model: ir.Model, temporary: Path) -> RunnableModel:
        """A file, which ONNX Runtime reads itself if it finds the weights where the file says that they are.

        Args:
            file: The ONNX file.
            model: What `htp_export.files.read_model` read of it.
            temporary: As above.

        Raises:
            FileError: If weights are missing.
        """
        external = [slot.tensor for slot in slots(model) if isinstance(slot.tensor, ir.ExternalTensor)]
        check_data(external)
        if all(Path(each.base_dir) == file.parent.absolute() for each in external):
            return cls(file, os.fspath(file))
        return cls.of(model, os.fspath(file), temporary)

    @property
    def size(self) -> int:
        """Bytes of the model without external weights."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size


@dataclass(frozen=True)
class Engine:
    """What runs a model.

    Attributes:
        providers: Execution providers, in order of preference, as ``onnxruntime.InferenceSession`` takes them.
        options: An ``onnxruntime.SessionOptions``, None for ONNX Runtime's defaults; put back as it was.
    """

    providers: Sequence[Any] = ("CPUExecutionProvider",)
    options: Any = None

    def check(self) -> None:
        """Refuse providers that are not there: ONNX Runtime would silently take the CPU instead.

        Raises:
            InputError: If one is not there.
        """
        check_providers(self.providers)


class Session:
    """An ONNX Runtime session under its profiler.

    Args:
        model: The model.
        engine: What runs it.
        temporary: A folder of one's own, for what ONNX Runtime writes.

    Attributes:
        optimized: The graph that it runs, without the values of weights; None where ONNX Runtime cannot tell it, as
            some execution providers compile their parts.

    Raises:
        InputError: If ONNX Runtime cannot load the model.
    """

    def __init__(self, model: RunnableModel, engine: Engine, temporary: Path) -> None:
        self._model = model
        self._folder = temporary
        self._session, told = self._open(engine)
        self.optimized = None if told is None else ir.from_proto(onnx.load(told, load_external_data=False))

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers in use."""
        return tuple(self._session.get_providers())

    def run(self, feed: Feed, runs: int) -> list[float]:
        """Run several times, and tell how long each took, in ms.

        Raises:
            InputError: If ONNX Runtime cannot run it on this.
        """
        names = [value.name for value in self._session.get_outputs()]
        try:
            values = {name: to_ort(array, feed.types.get(name)) for name, array in feed.arrays.items()}
            times = []
            for _ in range(runs):
                start = time.perf_counter()
                self._session.run_with_ort_values(names, values)
                times.append((time.perf_counter() - start) * 1000)
        except Exception as error:  # ONNX Runtime's errors share no base but this
            raise InputError(
                f"{self._model.name}: ONNX Runtime cannot run it: {' '.join(str(error).split())}"
            ) from error
        return times

    def end_profiling(self, runs: int) -> Trace:
        """Switch the profiler off, and read what it saw of the last runs."""
        return read_trace(Path(self._session.end_profiling()), runs)

    def _open(self, engine: Engine) -> tuple[Any, Path | None]:
        """The session, and the file with its graph.

        The graph comes with those weights that are not in a file already. Where they are too many for a message, they
        go into a file of their own, which costs time; and where there is no telling the graph, there is none.
        """
        attempts = ["within", "beside", "none"] if self._model.size < _LARGE_BYTES else ["beside", "none"]
        failed: Exception | None = None
        for attempt in attempts:
            told = self._folder / f"{attempt}.onnx"
            try:
                return self._create(engine, told, attempt), told if attempt != "none" else None
            except Exception as error:  # as above
                failed = failed or error
        raise InputError(
            f"{self._model.name}: ONNX Runtime cannot load it: {' '.join(str(failed).split())}"
        ) from failed

    def _create(self, engine: Engine, told: Path, weights: str) -> Any:
        options = engine.options
        entries = {_EXTERNAL_FILE: f"{told.name}.data", _EXTERNAL_SIZE: "1024"} if weights == "beside" else {}
        attributes = {
            "enable_profiling": True,
            "profile_file_prefix": os.fspath(self._folder / "profile"),
            "optimized_model_filepath": os.fspath(told) if weights != "none" else "",
            "log_severity_level": max(_FATAL, 0 if options is None else options.log_severity_level),
        }
        return _create_session(self._model, engine, attributes, entries)


def open_session(model: RunnableModel, engine: Engine) -> Any:
    """An ``onnxruntime.InferenceSession`` as it is, without a profiler.

    Raises:
        InputError: If ONNX Runtime cannot load the model.
    """
    try:
        return _create_session(model, engine, {"log_severity_level": _FATAL}, {})
    except Exception as error:  # ONNX Runtime's errors share no base but this
        raise InputError(f"{model.name}: ONNX Runtime cannot load it: {' '.join(str(error).split())}") from error


def _create_session(model: RunnableModel, engine: Engine, attributes: dict[str, Any], entries: dict[str, str]) -> Any:
    import onnxruntime

    source = model.source if isinstance(model.source, bytes) else os.fspath(model.source)
    options = engine.options if engine.options is not None else onnxruntime.SessionOptions()
    if model.folder is not None:
        entries = {**entries, _WEIGHTS_FOLDER: os.fspath(model.folder)}
    with _changed(options, attributes, entries):
        return onnxruntime.InferenceSession(source, options, providers=list(engine.providers))


@contextlib.contextmanager
def _changed(options: Any, attributes: dict[str, Any], entries: dict[str, str]) -> Iterator[None]:
    """Session options with some of them changed; afterwards they are as they were."""
    before = {name: getattr(options, name) for name in attributes}
    said = {}
    for name in entries:
        try:
            said[name] = options.get_session_config_entry(name)
        except RuntimeError:  # it was not set; what is empty says the same
            said[name] = "0" if name == _EXTERNAL_SIZE else ""
    try:
        for name, value in attributes.items():
            setattr(options, name, value)
        for name, entry in entries.items():
            options.add_session_config_entry(name, entry)
        yield
    finally:
        for name, value in before.items():
            setattr(options, name, value)
        for name, entry in said.items():
            options.add_session_config_entry(name, entry)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="htp_export_") as folder:
        yield Path(folder)
