"""A model in stages: what ``partition`` gives, and what its manifest says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from htp_export.capabilities.partition.stage_runner import StageRunner
from htp_export.capabilities.partition.stages import Stage, StageTensor
from htp_export.results.columns import Column
from htp_export.results.result import Result, Table

__all__ = ["FORMAT", "VERSION", "Partition", "PassedTensor"]

FORMAT = "htp.partition"
VERSION = "1"


@dataclass(frozen=True)
class PassedTensor:
    """A tensor that one stage computes and others read.

    Attributes:
        name: Its name, as an output of the one and an input of the others.
        tensor: Its type and shape.
        made_by: The number of the stage that computes it, from 0.
        read_by: The numbers of the stages that read it.
    """

    name: str
    tensor: StageTensor
    made_by: int
    read_by: tuple[int, ...]


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
        """The tensors that cross from stage to stage, in the order in which they are computed."""
        read: dict[tuple[int, str], list[int]] = {}
        for number, stage in enumerate(self.stages):
            for name, source in stage.sources.items():
                if source is not None:
                    read.setdefault((source, name), []).append(number)
        return tuple(
            PassedTensor(name, tensor, number, tuple(read[number, name]))
            for number, stage in enumerate(self.stages)
            for name, tensor in stage.outputs.items()
            if (number, name) in read
        )

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        session_options: Any = None,
    ) -> dict[str, Any]:
        """Run all stages in ONNX Runtime, one after another, with one of them loaded at a time.

        For several runs, and to keep all stages loaded, use ``open``.

        Args:
            inputs: Input name → numpy array, torch tensor, or nested lists of numbers.
            providers: Execution providers, in order of preference.
            session_options: An ``onnxruntime.SessionOptions`` for every stage.

        Returns:
            Output name → array.

        Raises:
            InputError: If the inputs are not those of the model, or ONNX Runtime cannot load or run a stage; it says
                which.
        """
        with self.open(providers=providers, session_options=session_options, keep_loaded=False) as runner:
            return runner.run(inputs)

    def open(
        self,
        *,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        session_options: Any = None,
        keep_loaded: bool = True,
    ) -> StageRunner:
        """What runs the stages: a context manager with a method ``run``.

        Args:
            providers: As for ``run``.
            session_options: As for ``run``.
            keep_loaded: Keep every stage loaded once it ran.
        """
        return StageRunner(
            self.stages,
            self.inputs,
            self.outputs,
            providers=providers,
            session_options=session_options,
            keep_loaded=keep_loaded,
        )

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
            "stages": [_stage(stage) for stage in self.stages],
            "crossing": [
                {**_tensor(each.name, each.tensor), "from": each.made_by, "to": each.read_by} for each in self.crossing
            ],
            "files": self.files,
        }

    def table(self) -> Table:
        """The stages."""
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
        """The tensors that cross, a line each."""
        return tuple(
            f"  {each.name}: {each.tensor}, from stage {each.made_by} to {', '.join(map(str, each.read_by))}"
            for each in self.crossing
        )

    @property
    def summary(self) -> str:
        """How many stages there are, and how many tensors go from one to another."""
        words = {0: "no tensor crosses", 1: "1 tensor crosses"}
        return f"{len(self.stages)} stages; {words.get(len(self.crossing), f'{len(self.crossing)} tensors cross')}"


def _shortened(paths: Sequence[str]) -> str:
    named = [path or "(root)" for path in paths]
    return ", ".join(named) if len(named) < 4 else f"{named[0]} ... {named[-1]} ({len(named)})"


def _stage(stage: Stage) -> dict[str, Any]:
    return {
        "file": stage.file.name if stage.file is not None else None,
        "files": stage.files,
        "modules": stage.modules,
        "nodes": stage.nodes,
        "parameter_bytes": stage.parameter_bytes,
        "inputs": [{**_tensor(name, tensor), "stage": stage.sources[name]} for name, tensor in stage.inputs.items()],
        "outputs": [_tensor(name, tensor) for name, tensor in stage.outputs.items()],
        **({"session_config": stage.session_config} if stage.session_config else {}),
    }


def _tensor(name: str, tensor: StageTensor) -> dict[str, Any]:
    return {"name": name, "type": tensor.type, "shape": tensor.shape}
