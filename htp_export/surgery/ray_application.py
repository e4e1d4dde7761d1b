"""A Ray Serve application that runs the stages of a model one after another, each in a replica of its own.

This file stands alone: it reads ``manifest.json`` beside it, and needs ``ray[serve]``, ``onnxruntime`` and ``numpy``.
Written by htp_export.partition(..., serve="ray"). Start it in its folder: ``serve run serve.yaml``.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any


class Stage:
    """One stage, loaded: takes what the model was given and what stages before gave, gives what it computes.

    Args:
        folder: Where the files are.
        number: Which stage, from 0.
        providers: Execution providers of ONNX Runtime, in order of preference.
    """

    def __init__(self, folder: str, number: int, providers: list[str]) -> None:
        import onnxruntime

        entry = json.loads((pathlib.Path(folder) / "manifest.json").read_text(encoding="utf-8"))["stages"][number]
        self._sources = {given["name"]: given["stage"] for given in entry["inputs"]}
        self._outputs = [made["name"] for made in entry["outputs"]]
        file = pathlib.Path(folder) / pathlib.PurePath(entry["file"]).name
        options = onnxruntime.SessionOptions()
        for key, value in entry.get("session_config", {}).items():  # without these, ONNX Runtime cannot load the file
            options.add_session_config_entry(key, value)
        self._session = onnxruntime.InferenceSession(str(file), options, providers=providers)

    def __call__(self, inputs: dict[str, Any], *before: dict[str, Any]) -> dict[str, Any]:
        """Run the stage.

        Args:
            inputs: What the model was given.
            before: What each stage gave from which this one takes anything, in order.
        """
        numbers = sorted({source for source in self._sources.values() if source is not None})
        given = dict(zip(numbers, before, strict=True))
        feed = {name: (inputs if source is None else given[source])[name] for name, source in self._sources.items()}
        return dict(zip(self._outputs, self._session.run(self._outputs, feed), strict=True))


class Pipeline:
    """The whole model: hands tensors from stage to stage, which send them to one another.

    Args:
        folder: Where the files are.
        stages: Handles of the stages, in order.
    """

    def __init__(self, folder: str, *stages: Any) -> None:
        manifest = json.loads((pathlib.Path(folder) / "manifest.json").read_text(encoding="utf-8"))
        self._stages = stages
        self._inputs = manifest["inputs"]
        self._outputs = {made["name"]: (made["stage"], made["tensor"]) for made in manifest["outputs"]}
        self._sources = [
            sorted({given["stage"] for given in entry["inputs"] if given["stage"] is not None})
            for entry in manifest["stages"]
        ]

    async def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Run the model.

        Args:
            inputs: Input name → numpy array.

        Returns:
            Output name → numpy array.
        """
        responses: list[Any] = []
        for stage, sources in zip(self._stages, self._sources, strict=True):
            responses.append(stage.remote(inputs, *(responses[source] for source in sources)))
        given = {number: await responses[number] for number in sorted({number for number, _ in self._outputs.values()})}
        return {name: given[number][made] for name, (number, made) in self._outputs.items()}

    async def __call__(self, request: Any) -> dict[str, Any]:
        """Answer a request over HTTP: inputs as nested lists under their names, and outputs likewise."""
        import numpy

        kinds = {"FLOAT": "float32", "DOUBLE": "float64"}
        body = await request.json()
        inputs = {}
        for entry in self._inputs:
            if entry["name"] in body:
                kind = kinds.get(entry["type"], str(entry["type"]).lower())
                inputs[entry["name"]] = numpy.asarray(body[entry["name"]], dtype=kind)
        return {name: array.tolist() for name, array in (await self.run(inputs)).items()}


def build(arguments: dict[str, Any]) -> Any:
    """The application.

    Args:
        arguments: ``folder``, where the stages are on every machine that runs one: here, where it is not said;
            ``providers``, execution providers of ONNX Runtime, by comma.
    """
    from ray import cloudpickle, serve

    # Replicas run where this file may not be; they get its classes along with the application.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    folder = str(arguments.get("folder") or pathlib.Path(__file__).resolve().parent)
    providers = str(arguments.get("providers") or "CPUExecutionProvider").split(",")
    manifest = json.loads((pathlib.Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    stages = [
        serve.deployment(Stage, name=f"stage{number}").bind(folder, number, providers)
        for number in range(len(manifest["stages"]))
    ]
    return serve.deployment(Pipeline, name="pipeline").bind(folder, *stages)
