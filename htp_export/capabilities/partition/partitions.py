"""Result of `partition`: stages and their tensors, as data and in a manifest; and their runner."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.files.filesystem import temporary_folder
from htp_export.reporting.columns import Column
from htp_export.reporting.result import PlainData, Result, Table
from htp_export.runtime.declared_inputs import Input
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.sessions import (
    RunnableModel,
    Session,
    from_value,
    to_value,
)
from htp_export.runtime.settings import RunSettings

FORMAT = "htp.partition"
VERSION = "1"


@dataclass(frozen=True)
class StageTensor:
    """Type and shape of a tensor.

    Attributes:
        type: Its element type, by ONNX's name: ``"FLOAT"``; None if it is unknown, or not a tensor.
        shape: Sizes, names of sizes, or None for unnamed sizes; None if even the rank is unknown.
    """

    type: str | None
    shape: tuple[int | str | None, ...] | None

    @classmethod
    def of(cls, value: ir.Value) -> StageTensor:
        """The type and shape of a value in a graph."""
        declared = Input.of(value)
        return cls(None if declared.type is None else declared.type.name, declared.shape)

    def __str__(self) -> str:
        kind = self.type or "unknown type"
        if self.shape is None:
            return kind
        return f"{kind}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True)
class Stage(PlainData):
    """One stage of a model: consecutive whole modules.

    Attributes:
        modules: The outermost modules that are completely in the stage, in execution order. A
            module that is cut is in none.
        inputs: Input → its type and shape.
        outputs: Output → its type and shape.
        sources: Input → number of the stage that computes it, from 0; None for an input of the
            model.
        nodes: Number of nodes.
        parameter_bytes: Bytes of its weights, without initializers of earlier stages.
        file: The file that was written; None if there is none.
        model: The model; None if it was written.
        files: All its files, ``file`` first, relative to the folder of ``file``.
        session_config: Session configuration entries that ONNX Runtime needs to load it.
    """

    optional = ("session_config",)

    modules: tuple[str, ...]
    inputs: Mapping[str, StageTensor]
    outputs: Mapping[str, StageTensor]
    sources: Mapping[str, int | None]
    nodes: int
    parameter_bytes: int
    file: Path | None = None
    model: ir.Model | None = field(default=None, repr=False, compare=False)
    files: tuple[str, ...] = ()
    session_config: Mapping[str, str] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """The entry in the manifest; paths are relative to its folder."""
        return {
            "file": self.file and self.file.name,
            "files": self.files,
            "modules": self.modules,
            "nodes": self.nodes,
            "parameter_bytes": self.parameter_bytes,
            "inputs": [
                {**_tensor(name, tensor), "stage": self.sources[name]}
                for name, tensor in self.inputs.items()
            ],
            "outputs": [_tensor(name, tensor) for name, tensor in self.outputs.items()],
            "session_config": self.session_config,
        }


@dataclass(frozen=True)
class PassedTensor:
    """A tensor that one stage computes and others use.

    Attributes:
        name: Its name, as an output of the producer and an input of the consumers.
        tensor: Its type and shape.
        made_by: The number of the stage that computes it, from 0.
        read_by: The numbers of the stages that use it.
    """

    name: str
    tensor: StageTensor
    made_by: int
    read_by: tuple[int, ...]

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.read_by))
        return f"  {self.name}: {self.tensor}, from stage {self.made_by} to {stages}"


@dataclass(frozen=True)
class Partition(Result):
    """A model in stages that run one after another.

    Attributes:
        name: The name of the model's graph.
        stages: The stages, in order.
        inputs: Input of the model → its type and shape.
        outputs: Output of the model → the stage that computes it, and its name there.
        versions: Versions of htp_export, of the IR and of the opsets of the stages.
        folder: The folder that was written; None if there is none.
        files: Every file in the folder, by its path in it.
    """

    name: str
    stages: tuple[Stage, ...]
    inputs: Mapping[str, StageTensor]
    outputs: Mapping[str, tuple[int, str]]
    versions: Mapping[str, Any]
    folder: Path | None = None
    files: tuple[str, ...] = ()

    @property
    def crossing(self) -> tuple[PassedTensor, ...]:
        """The tensors between stages, in the order in which they are computed."""
        read: dict[tuple[int, str], list[int]] = {}
        for number, stage in enumerate(self.stages):
            for name, source in stage.sources.items():
                if source is not None:
                    read.setdefault((source, name), []).append(number)
        passed = []
        for number, stage in enumerate(self.stages):
            for name, tensor in stage.outputs.items():
                if (number, name) in read:
                    consumers = tuple(read[number, name])
                    passed.append(PassedTensor(name, tensor, number, consumers))
        return tuple(passed)

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        session_options: Any = None,
    ) -> dict[str, Any]:
        """Run all stages in ONNX Runtime, one after another, with one of them loaded at a time.

        For several runs, and to keep all stages loaded, use ``open``. Both accept execution
        providers in order of preference, and an ``onnxruntime.SessionOptions`` for every stage. For
        inputs, results and errors see `StageRunner.run`.
        """
        with self.open(
            providers=providers, session_options=session_options, keep_loaded=False
        ) as runner:
            return runner.run(inputs)

    def open(
        self,
        *,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        session_options: Any = None,
        keep_loaded: bool = True,
    ) -> StageRunner:
        """A runner of the stages: a context manager with a method ``run``. Stages stay loaded."""
        settings = RunSettings(providers=providers, session_options=session_options)
        return StageRunner(self, settings, keep_loaded)

    def data(self) -> dict[str, Any]:
        """The manifest; paths are relative to the folder."""
        return {
            FORMAT: VERSION,
            "name": self.name,
            "versions": self.versions,
            "inputs": [_tensor(name, tensor) for name, tensor in self.inputs.items()],
            "outputs": [
                {**_tensor(name, self.stages[stage].outputs[made]), "stage": stage, "tensor": made}
                for name, (stage, made) in self.outputs.items()
            ],
            "stages": self.stages,
            "crossing": [
                {
                    **_tensor(passed.name, passed.tensor),
                    "from": passed.made_by,
                    "to": passed.read_by,
                }
                for passed in self.crossing
            ],
            "files": self.files,
        }

    def table(self) -> Table:
        """The stages, one row each."""
        total = sum(stage.parameter_bytes for stage in self.stages) or 1
        columns: list[Column[tuple[int, Stage]]] = [
            Column("stage", "stage", lambda item: item[0]),
            Column("modules", "modules", lambda item: _shortened(item[1].modules), right=False),
            Column("nodes", "nodes", lambda item: item[1].nodes),
            Column("parameter_bytes", "weights", lambda item: item[1].parameter_bytes, "B"),
            Column("share", "share", lambda item: item[1].parameter_bytes / total, unit="%"),
            Column("inputs", "takes", lambda item: len(item[1].inputs)),
            Column("outputs", "gives", lambda item: len(item[1].outputs)),
            Column("file", "file", lambda item: item[1].file and item[1].file.name, right=False),
        ]
        return columns, enumerate(self.stages)

    @property
    def lines(self) -> tuple[str, ...]:
        """The tensors between stages, one line each."""
        return tuple(map(str, self.crossing))

    @property
    def summary(self) -> str:
        """The number of stages, and of tensors between them."""
        count = len(self.crossing)
        words = {0: "no tensor crosses", 1: "1 tensor crosses"}
        return f"{len(self.stages)} stages; {words.get(count, f'{count} tensors cross')}"


def _shortened(paths: Sequence[str]) -> str:
    names = [path or "(root)" for path in paths]
    if len(names) < 4:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def _tensor(name: str, tensor: StageTensor) -> dict[str, Any]:
    return {"name": name, "type": tensor.type, "shape": tensor.shape}


class StageRunner:
    """Runs stages; a context manager, which releases the loaded stages at its end.

    Tensors are passed between stages as ONNX Runtime's own values, and released after their last
    consumer.

    Raises:
        InputError: ONNX Runtime does not have one of the providers.
    """

    def __init__(self, partition: Partition, settings: RunSettings, keep_loaded: bool) -> None:
        settings.check_providers()
        self._partition, self._settings, self._keep = partition, settings, keep_loaded
        self._sessions: dict[int, Session] = {}
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> StageRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the loaded stages."""
        self._sessions.clear()
        self._closing.close()

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run all stages: input name → array, torch tensor or nested lists; output name → array.

        A sequence is a list of arrays, and an optional without value is None.

        Raises:
            InputError: The inputs do not match the model, or ONNX Runtime cannot load or run a
                stage, which the message names.
        """
        stages = self._partition.stages
        outputs = self._partition.outputs
        declared = []
        for name, tensor in self._partition.inputs.items():
            dtype = None if tensor.type is None else ir.DataType[tensor.type]
            declared.append(Input(name, dtype, tensor.shape))
        feed = Inputs(declared).feed(inputs)
        values: dict[tuple[int | None, str], Any] = {
            (None, name): to_value(array, feed.types.get(name))
            for name, array in feed.arrays.items()
        }
        last_use: dict[tuple[int | None, str], int] = {}
        for number, stage in enumerate(stages):
            for name, source in stage.sources.items():
                last_use[source, name] = number
        last_use.update(dict.fromkeys(outputs.values(), len(stages)))
        for number, stage in enumerate(stages):
            arguments = {name: values[source, name] for name, source in stage.sources.items()}
            results = self._session(number, stage).run_values(arguments, list(stage.outputs))
            for name, value in zip(stage.outputs, results, strict=True):
                values[number, name] = value
            for key in [*values]:
                if last_use.get(key, -1) <= number:
                    del values[key]
        return {name: from_value(values[source]) for name, source in outputs.items()}

    def _session(self, number: int, stage: Stage) -> Session:
        """The session of a stage; an in-memory model that stays loaded keeps its folder."""
        if number in self._sessions:
            return self._sessions[number]
        if stage.file is not None:
            session = Session(RunnableModel(stage.file, str(stage.file)), self._settings)
        elif stage.model is None:
            raise InputError(f"stage {number} has neither a file nor a model")
        else:
            with contextlib.ExitStack() as temporary:
                owner = self._closing if self._keep else temporary
                folder = owner.enter_context(temporary_folder())
                runnable = RunnableModel.of(stage.model, f"stage {number}", folder)
                session = Session(runnable, self._settings)
        if self._keep:
            self._sessions[number] = session
        return session
