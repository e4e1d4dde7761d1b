"""A Ray Serve application that runs the stages of a model one after another, each in a replica of its own.

This file stands alone: it reads ``manifest.json`` beside it, and needs ``ray[serve]``,
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
"""How often a request is run when a replica that works on it dies, with 1, 2, 3, ... seconds between."""


def deployments(stages: int) -> dict[str, dict[str, Any]]:
    """Deployment → its options; ``serve.yaml`` has the same ones, to be edited.

    A replica of a stage holds its weights, so that there is one. It computes one request at a time;
    more wait beside it, so that it has no pause. The stages of a request run one after another:
    together, they ask for one CPU.
    """
    checks = {"health_check_period_s": 2, "health_check_timeout_s": 10}
    stage = {"num_replicas": 1, "max_ongoing_requests": 4, **checks}
    share = {"ray_actor_options": {"num_cpus": int(100 / stages) / 100}}
    whole = {"num_replicas": 2, "max_ongoing_requests": 32, "max_queued_requests": 256, **checks}
    named = {f"stage{number}": {**stage, **share} for number in range(stages)}
    return {**named, "pipeline": {**whole, "ray_actor_options": {"num_cpus": 0}}}


class ManifestError(ValueError):
    """``manifest.json`` is not that of a partition of htp_export; the message names what is wrong."""


DISABLED = "optimization.disable_specified_optimizers"
"""The only session configuration entry that stages have; others load libraries or write files."""


def manifest_of(folder: str) -> dict[str, Any]:
    """The manifest of the stages, with the parts that are used here; a `ManifestError` if it is another file."""
    file = pathlib.Path(folder) / "manifest.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or manifest.get("htp.partition") != "1":
            raise ManifestError("'htp.partition' is not '1'")
        for place, stage in enumerate(manifest["stages"]):
            _check_stage(stage, place)
        for made in manifest["outputs"]:
            _check_text(made["name"], made["tensor"])
            _check_number(made["stage"], len(manifest["stages"]))
        for given in manifest["inputs"]:
            _check_text(given["name"], *([] if given["type"] is None else [given["type"]]))
            list(given["shape"] or ())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ManifestError(f"{file}: not the manifest of a partition: {problem}") from error
    return manifest


def _check_stage(stage: Any, place: int) -> None:
    """Check what is used of a stage; its place says which stages are before it."""
    for given in stage["inputs"]:
        _check_text(given["name"])
        if given["stage"] is not None:
            _check_number(given["stage"], place)
    _check_text(stage["file"], *(made["name"] for made in stage["outputs"]))
    for key, value in stage.get("session_config", {}).items():
        if key != DISABLED:
            raise ManifestError(f"session_config: {key!r} is not allowed")
        _check_text(value)


def _check_text(*values: Any) -> None:
    for value in values:
        if not isinstance(value, str):
            raise ManifestError(f"{value!r} is no text")


def _check_number(value: Any, end: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < end:
        raise ManifestError(f"{value!r} is no number of a stage before it")


class BodyError(ValueError):
    """The body of a request is no input of the model; a sentence says why."""


def array_of(value: Any, entry: dict[str, Any]) -> Any:
    """The array of one input, of nested lists; a `BodyError` if they do not fit what the manifest says of it."""
    import numpy

    name, kind = entry["name"], entry["type"]
    known = {"FLOAT": "float32", "DOUBLE": "float64", "STRING": "str", None: None}
    wanted = numpy.dtype(known.get(kind, str(kind).lower()))
    takes = {"b": "b", "i": "iu", "u": "iu", "f": "iuf", "U": "U"}[wanted.kind]
    try:
        found = numpy.asarray(value)
    except ValueError:  # lists of different lengths
        found = numpy.asarray(None)
    if found.size and found.dtype.kind not in takes:
        raise BodyError(f"input {name!r} is no {kind}, or no nested lists of it of equal lengths")
    array = found.astype(wanted)
    if wanted.kind in "iu" and (array != found).any():
        raise BodyError(f"input {name!r} has numbers that {kind} does not have")
    shape = entry["shape"]
    if shape is not None and (
        len(shape) != array.ndim
        or any(
            isinstance(size, int) and size != there
            for size, there in zip(shape, array.shape, strict=True)
        )
    ):
        raise BodyError(
            f"input {name!r} has the shape {list(array.shape)}, and the model takes {shape}"
        )
    return array


class Stage:
    """One stage, loaded: takes what the model was given and what stages before gave, gives what it computes."""

    def __init__(self, folder: str, number: int, providers: list[str]) -> None:
        import onnxruntime

        entry = manifest_of(folder)["stages"][number]
        self._sources = {given["name"]: given["stage"] for given in entry["inputs"]}
        self._outputs = [made["name"] for made in entry["outputs"]]
        file = pathlib.Path(folder) / pathlib.PurePath(entry["file"]).name
        options = onnxruntime.SessionOptions()
        # without these, ONNX Runtime cannot load the file
        for key, value in entry.get("session_config", {}).items():
            options.add_session_config_entry(key, value)
        self._session = onnxruntime.InferenceSession(str(file), options, providers=providers)

    def __call__(self, inputs: dict[str, Any], *before: dict[str, Any]) -> dict[str, Any]:
        """Run the stage on what the model was given, and what each stage gave from which it takes something."""
        numbers = sorted({source for source in self._sources.values() if source is not None})
        given = dict(zip(numbers, before, strict=True))
        feed = {
            name: (inputs if source is None else given[source])[name]
            for name, source in self._sources.items()
        }
        return dict(zip(self._outputs, self._session.run(self._outputs, feed), strict=True))


class Pipeline:
    """The whole model: hands tensors from stage to stage, by the handles of the stages, which send them on."""

    def __init__(self, folder: str, *stages: Any) -> None:
        manifest = manifest_of(folder)
        self._stages = stages
        self._inputs = manifest["inputs"]
        self._outputs = {
            made["name"]: (made["stage"], made["tensor"]) for made in manifest["outputs"]
        }
        self._sources = [
            sorted({given["stage"] for given in entry["inputs"] if given["stage"] is not None})
            for entry in manifest["stages"]
        ]

    async def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Run the model: input name → numpy array; output name → numpy array."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._run(inputs)
            except Exception as error:
                from ray.exceptions import ObjectLostError, RayActorError

                # A replica died, with the tensors that it held; a new one is started. Stages have
                # no state.
                if not isinstance(error, (RayActorError, ObjectLostError)) or attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        responses: list[Any] = []
        for stage, sources in zip(self._stages, self._sources, strict=True):
            responses.append(stage.remote(inputs, *(responses[source] for source in sources)))
        given = {
            number: await responses[number]
            for number in sorted({number for number, _ in self._outputs.values()})
        }
        return {name: given[number][made] for name, (number, made) in self._outputs.items()}

    async def __call__(self, request: Any) -> Any:
        """Answer a request over HTTP: inputs as nested lists under their names, and outputs likewise.

        A body that is no input of the model is answered with status 400 and a sentence under
        ``error``.
        """
        try:
            inputs = self.inputs_of(await request.body())
        except BodyError as error:
            from starlette.responses import JSONResponse

            return JSONResponse({"error": str(error)}, status_code=400)
        return {name: array.tolist() for name, array in (await self.run(inputs)).items()}

    def inputs_of(self, body: bytes) -> dict[str, Any]:
        """Input name → array, as the JSON of a request has them; a `BodyError` if these are not the model's inputs."""
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise BodyError("the body is no JSON") from None
        names = [entry["name"] for entry in self._inputs]
        if not isinstance(given, dict) or given.keys() != set(names):
            raise BodyError(
                f"the body is no object with the inputs of the model: {', '.join(names)}"
            )
        arrays = {entry["name"]: array_of(given[entry["name"]], entry) for entry in self._inputs}
        sizes: dict[str, int] = {}
        for entry in self._inputs:
            for size, there in zip(entry["shape"] or (), arrays[entry["name"]].shape, strict=False):
                if isinstance(size, str) and sizes.setdefault(size, there) != there:
                    raise BodyError(
                        f"{size} is {sizes[size]} and, in input {entry['name']!r}, {there}"
                    )
        return arrays


def build(arguments: dict[str, Any]) -> Any:
    """The application.

    Args:
        arguments: ``folder``, where the stages are on every machine that runs one: here, where it
            is not said; ``providers``, execution providers of ONNX Runtime, by comma.
    """
    from ray import cloudpickle, serve

    # Replicas run where this file may not be; they get its classes along with the application.
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
