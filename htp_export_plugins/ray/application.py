"""A Ray Serve application that runs the stages of a model one after another, in separate replicas.

This file is self-contained: it reads ``manifest.json`` beside it, and needs ``ray[serve]``,
``onnxruntime`` and ``numpy``. Written by htp_export.partition(..., serve="ray"). Start it in its
folder: ``serve run serve.yaml``.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
from typing import Any

ATTEMPTS = 5
"""Attempts for a request whose replica dies, 1, 2, 3, ... seconds apart: a restart takes time."""


def deployments(stages: int) -> dict[str, dict[str, Any]]:
    """Deployment → its options; ``serve.yaml`` contains the same ones, to be edited.

    A stage has one replica, because each holds the stage's weights. It computes one request at a
    time; more are queued in it, so that it never waits. The stages of a request run one after
    another: together, they request one CPU.
    """
    checks = {"health_check_period_s": 2, "health_check_timeout_s": 10}
    stage = {"num_replicas": 1, "max_ongoing_requests": 4, **checks}
    share = {"ray_actor_options": {"num_cpus": int(100 / stages) / 100}}
    whole = {"num_replicas": 2, "max_ongoing_requests": 32, "max_queued_requests": 256, **checks}
    named = {f"stage{number}": {**stage, **share} for number in range(stages)}
    return {**named, "pipeline": {**whole, "ray_actor_options": {"num_cpus": 0}}}


class ManifestError(ValueError):
    """``manifest.json`` is not the manifest of a partition; the message names the problem."""


DISABLED = "optimization.disable_specified_optimizers"
"""The only session configuration entry that is accepted; others load libraries or write files."""


def manifest_of(folder: str) -> dict[str, Any]:
    """Read the manifest of the stages, and check the parts that are used here.

    Raises:
        ManifestError: The file has other contents.
    """
    file = pathlib.Path(folder) / "manifest.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or manifest.get("htp.partition") != "1":
            raise ManifestError("'htp.partition' is not '1'")
        for place, stage in enumerate(manifest["stages"]):
            _check_stage(stage, place)
        for tensor in manifest["outputs"]:
            _check_text(tensor["name"], tensor["tensor"])
            _check_number(tensor["stage"], len(manifest["stages"]))
        for tensor in manifest["inputs"]:
            _check_text(tensor["name"])
            if tensor["type"] is not None:
                _check_text(tensor["type"])
            list(tensor["shape"] or ())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ManifestError(f"{file}: not the manifest of a partition: {problem}") from error
    return manifest


def _check_stage(stage: Any, place: int) -> None:
    """Check the used fields of a stage; its inputs must come from the ``place`` before it."""
    for tensor in stage["inputs"]:
        _check_text(tensor["name"])
        if tensor["stage"] is not None:
            _check_number(tensor["stage"], place)
    _check_text(stage["file"], *(tensor["name"] for tensor in stage["outputs"]))
    for key, value in stage.get("session_config", {}).items():
        if key != DISABLED:
            raise ManifestError(f"session_config: {key!r} is not allowed")
        _check_text(value)


def _check_text(*values: Any) -> None:
    for value in values:
        if not isinstance(value, str):
            raise ManifestError(f"{value!r} is not a string")


def _check_number(value: Any, end: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < end:
        raise ManifestError(f"{value!r} is not the number of a stage before it")


class BodyError(ValueError):
    """The body of a request does not match the model's inputs; the message is for the client."""


def array_of(value: Any, entry: dict[str, Any]) -> Any:
    """Convert nested lists to the array of one input.

    Raises:
        BodyError: They do not match the type or shape in the manifest.
    """
    import numpy

    name = entry["name"]
    kind = entry["type"]
    dtypes = {"FLOAT": "float32", "DOUBLE": "float64", "STRING": "str", None: None}
    dtype = numpy.dtype(dtypes.get(kind, str(kind).lower()))
    accepted_kinds = {"b": "b", "i": "iu", "u": "iu", "f": "iuf", "U": "U"}[dtype.kind]
    try:
        parsed = numpy.asarray(value)
    except ValueError:  # lists of different lengths
        parsed = numpy.asarray(None)
    if parsed.size and parsed.dtype.kind not in accepted_kinds:
        raise BodyError(f"input {name!r} is no {kind}, or no nested lists of it of equal lengths")
    array = parsed.astype(dtype)
    if dtype.kind in "iu" and (array != parsed).any():
        raise BodyError(f"input {name!r} has numbers that {kind} does not have")
    shape = entry["shape"]
    if shape is not None and not _fits(shape, array.shape):
        raise BodyError(
            f"input {name!r} has the shape {list(array.shape)}, and the model takes {shape}"
        )
    return array


def _fits(declared: list[Any], shape: tuple[int, ...]) -> bool:
    """Whether a shape has the declared rank and sizes; a size that is a name or None is open."""
    if len(declared) != len(shape):
        return False
    pairs = zip(declared, shape, strict=True)
    return all(size == actual for size, actual in pairs if isinstance(size, int))


class Stage:
    """One loaded stage: a function of the model's inputs and the results of earlier stages."""

    def __init__(self, folder: str, number: int, providers: list[str]) -> None:
        import onnxruntime

        entry = manifest_of(folder)["stages"][number]
        self._sources = {tensor["name"]: tensor["stage"] for tensor in entry["inputs"]}
        self._outputs = [tensor["name"] for tensor in entry["outputs"]]
        file = pathlib.Path(folder) / pathlib.PurePath(entry["file"]).name
        options = onnxruntime.SessionOptions()
        # Without these entries, ONNX Runtime cannot load the file.
        for key, value in entry.get("session_config", {}).items():
            options.add_session_config_entry(key, value)
        self._session = onnxruntime.InferenceSession(str(file), options, providers=providers)

    def __call__(self, inputs: dict[str, Any], *before: dict[str, Any]) -> dict[str, Any]:
        """Run the stage on the model's inputs and the results of its sources, in their order."""
        numbers = sorted({source for source in self._sources.values() if source is not None})
        results = dict(zip(numbers, before, strict=True))
        feed = {}
        for name, source in self._sources.items():
            feed[name] = inputs[name] if source is None else results[source][name]
        return dict(zip(self._outputs, self._session.run(self._outputs, feed), strict=True))


class Pipeline:
    """The whole model: passes tensors between stages as references, which the replicas resolve."""

    def __init__(self, folder: str, *stages: Any) -> None:
        manifest = manifest_of(folder)
        self._stages = stages
        self._inputs = manifest["inputs"]
        self._outputs = {
            tensor["name"]: (tensor["stage"], tensor["tensor"]) for tensor in manifest["outputs"]
        }
        self._sources = []
        for entry in manifest["stages"]:
            sources = {tensor["stage"] for tensor in entry["inputs"]} - {None}
            self._sources.append(sorted(sources))

    async def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Run the model: input name → numpy array; output name → numpy array."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._run(inputs)
            except Exception as error:
                from ray.exceptions import ObjectLostError, RayActorError

                # A replica died, with its tensors. Ray starts a new one, and stages have no state.
                if not isinstance(error, (RayActorError, ObjectLostError)) or attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        responses: list[Any] = []
        for stage, sources in zip(self._stages, self._sources, strict=True):
            responses.append(stage.remote(inputs, *(responses[source] for source in sources)))
        results = {}
        for number in sorted({number for number, _ in self._outputs.values()}):
            results[number] = await responses[number]
        return {name: results[number][tensor] for name, (number, tensor) in self._outputs.items()}

    async def __call__(self, request: Any) -> Any:
        """Answer a request over HTTP: inputs and outputs are nested lists by name.

        A body that does not match the inputs is answered with status 400 and a message under
        ``error``.
        """
        try:
            inputs = self.inputs_of(await request.body())
        except BodyError as error:
            from starlette.responses import JSONResponse

            return JSONResponse({"error": str(error)}, status_code=400)
        return {name: array.tolist() for name, array in (await self.run(inputs)).items()}

    def inputs_of(self, body: bytes) -> dict[str, Any]:
        """Convert the JSON body of a request to arrays by input name.

        Raises:
            BodyError: The body does not match the model's inputs.
        """
        try:
            lists = json.loads(body)
        except (ValueError, RecursionError):
            raise BodyError("the body is not JSON") from None
        names = [entry["name"] for entry in self._inputs]
        if not isinstance(lists, dict) or lists.keys() != set(names):
            raise BodyError(
                f"the body is no object with the inputs of the model: {', '.join(names)}"
            )
        arrays = {entry["name"]: array_of(lists[entry["name"]], entry) for entry in self._inputs}
        sizes: dict[str, int] = {}
        for entry in self._inputs:
            shape = arrays[entry["name"]].shape
            for size, actual in zip(entry["shape"] or (), shape, strict=False):
                if isinstance(size, str) and sizes.setdefault(size, actual) != actual:
                    raise BodyError(
                        f"{size} is {sizes[size]} and, in input {entry['name']!r}, {actual}"
                    )
        return arrays


def build(arguments: dict[str, Any]) -> Any:
    """Build the application.

    Args:
        arguments: ``folder``, the path of the stages on every machine that runs one; by default the
            folder of this file. ``providers``, execution providers of ONNX Runtime, by comma.
    """
    from ray import cloudpickle, serve

    # Replicas run on machines without this file: its classes are sent with the application.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    folder = str(arguments.get("folder") or pathlib.Path(__file__).resolve().parent)
    providers = str(arguments.get("providers") or "CPUExecutionProvider").split(",")
    manifest = manifest_of(folder)
    options = deployments(len(manifest["stages"]))
    pipeline = serve.deployment(Pipeline, name="pipeline", **options.pop("pipeline"))
    stages = [
        serve.deployment(Stage, name=name, **own).bind(folder, number, providers)
        for number, (name, own) in enumerate(options.items())
    ]
    return pipeline.bind(folder, *stages)
