"""Running the stages of a model in ONNX Runtime, each on what those before it gave."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.partition.stages import Stage, StageTensor
from htp_export.errors import InputError
from htp_export.runtime.arrays import from_ort, to_ort
from htp_export.runtime.declared_inputs import Input
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.sessions import RunnableModel, Session, SessionSettings, temporary_folder

__all__ = ["StageRunner"]


class StageRunner:
    """Runs stages; a context manager, which lets go of the loaded stages at its end.

    Tensors go from stage to stage as ONNX Runtime's own values, and are let go after the last stage that reads them.

    Args:
        stages: The stages, in order.
        inputs: Input of the model → its type and shape.
        outputs: Output of the model → the stage that computes it, and its name there.
        providers: Execution providers, in order of preference.
        session_options: An ``onnxruntime.SessionOptions`` for every stage.
        keep_loaded: Keep every stage loaded once it ran.

    Raises:
        InputError: If ONNX Runtime does not have one of the providers.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        inputs: Mapping[str, StageTensor],
        outputs: Mapping[str, tuple[int, str]],
        *,
        providers: Sequence[Any],
        session_options: Any,
        keep_loaded: bool,
    ) -> None:
        self._stages, self._inputs, self._outputs = stages, inputs, outputs
        self._settings = SessionSettings(tuple(providers), session_options)
        self._settings.check()
        self._keep = keep_loaded
        self._sessions: dict[int, Session] = {}
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> StageRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the loaded stages."""
        self._sessions.clear()
        self._closing.close()

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run all stages.

        Args:
            inputs: Input name → numpy array, torch tensor, or nested lists of numbers.

        Returns:
            Output name → array.

        Raises:
            InputError: If the inputs are not those of the model, or ONNX Runtime cannot load or run a stage.
        """
        feed = Inputs(_input(name, tensor) for name, tensor in self._inputs.items()).feed(inputs)
        values: dict[tuple[int | None, str], Any] = {
            (None, name): to_ort(array, feed.types.get(name)) for name, array in feed.arrays.items()
        }
        last = self._last_uses()
        for number, stage in enumerate(self._stages):
            given = {name: values[source, name] for name, source in stage.sources.items()}
            for name, value in zip(stage.outputs, self._run_stage(number, stage, given), strict=True):
                values[number, name] = value
            for key in [key for key in values if last.get(key, -1) <= number]:
                del values[key]
        return {name: from_ort(values[source]) for name, source in self._outputs.items()}

    def _last_uses(self) -> dict[tuple[int | None, str], int]:
        """Tensor → the last stage that reads it; outputs of the model are kept to the end."""
        found: dict[tuple[int | None, str], int] = {}
        for number, stage in enumerate(self._stages):
            found.update({(source, name): number for name, source in stage.sources.items()})
        return {**found, **dict.fromkeys(self._outputs.values(), len(self._stages))}

    def _run_stage(self, number: int, stage: Stage, given: Mapping[str, Any]) -> list[Any]:
        session = self._sessions.get(number) or self._load(number, stage)
        if self._keep:
            self._sessions[number] = session
        return session.run_values(given, list(stage.outputs))

    def _load(self, number: int, stage: Stage) -> Session:
        name = f"stage {number}"
        if stage.file is not None:
            return Session(RunnableModel(stage.file, str(stage.file)), self._settings)
        if stage.model is None:
            raise InputError(f"{name} has neither a file nor a model")
        folder = self._closing.enter_context(temporary_folder()) if self._keep else None
        with contextlib.nullcontext(folder) if folder is not None else temporary_folder() as temporary:
            return Session(RunnableModel.of(stage.model, name, temporary), self._settings)


def _input(name: str, tensor: StageTensor) -> Input:
    return Input(name, None if tensor.type is None else ir.DataType[tensor.type], tensor.shape)
