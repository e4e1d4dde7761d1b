"""The steps of a pipeline: a table from names to the functions that do them, and their options."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from htp_export.errors import InputError
from htp_export.provenance import adapters as tools

__all__ = [
    "STEPS",
    "PipelineStep",
    "StepKind",
    "described_options",
    "is_described",
    "is_repeatable",
    "option_files",
    "steps_of",
]


@dataclass(frozen=True)
class StepKind:
    """What a step does.

    Attributes:
        module: The module of htp_export in which its function is.
        function: The function. It is called with options by keyword. A change returns a result with the new ``model``;
            a check returns a result with ``ok`` and ``summary``.
        check: Whether it is a check, which makes no file and stops the pipeline where it fails.
        packages: Further packages whose versions decide what it makes.
        given: The parameter that takes the model that the steps before have made.
        start: The parameter that takes the model with which the pipeline began, unless an option says otherwise.
    """

    module: str
    function: str
    check: bool = False
    packages: tuple[str, ...] = ()
    given: str = "model"
    start: str = ""

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        function: Callable[..., Any] = getattr(importlib.import_module(f"htp_export.{self.module}"), self.function)
        return function

    def check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Refuse options that the function does not have, and missing ones.

        Raises:
            InputError: If there are any; the message names the step.
        """
        parameters = {
            each.name: each
            for each in inspect.signature(self.load()).parameters.values()
            if each.name not in (self.given, *_SET_HERE)
        }
        free = [key for key, each in parameters.items() if each.kind is inspect.Parameter.VAR_KEYWORD]
        known = [key for key in parameters if key not in free]
        refused = (self.given, *_SET_HERE)
        unknown = [option for option in options if option in refused or not (free or option in known)]
        if unknown:
            listed = f"; it has {', '.join(sorted(known))}" if known else ""
            raise InputError(f"step {name}: there is no option {unknown[0]!r}{listed}")
        needed = [key for key in known if parameters[key].default is inspect.Parameter.empty and key != self.start]
        missing = [key for key in needed if key not in options]
        if missing:
            raise InputError(f"step {name}: the option {missing[0]!r} is missing")


_SET_HERE = ("output", "external_data", "share_weights", "dry_run")
"""Parameters that a pipeline sets itself: it writes the files, all of them."""

# A new step is a line here; an adapter of a tool is one by itself. `docs/pipeline.md` lists them.
STEPS: dict[str, StepKind] = {
    "optimize": StepKind("passes.optimizing", "optimize", packages=("onnxscript",)),
    "quantize": StepKind("compress.quantization.quantizing", "quantize", packages=("onnxruntime",)),
    "prune": StepKind("compress.pruning.pruning", "prune"),
    "insert_lora": StepKind("compress.lora.lora_inputs", "insert_lora"),
    "fuse_lora": StepKind("compress.lora.lora_files", "fuse_lora"),
    "functions": StepKind("surgery.nesting", "functions"),
    "inline": StepKind("surgery.inlining", "inline"),
    "names": StepKind("deploy.naming", "names"),
    "splice": StepKind("surgery.splicing", "splice"),
    "carry": StepKind("provenance.carrying", "carry", given="before"),
    **{tool: StepKind("provenance.adapters", tool, packages=(tool,)) for tool in tools.__all__},
    "compare": StepKind("run.file_comparing", "compare", check=True, given="b", start="a"),
    "verify": StepKind("run.verifying", "verify", check=True, given="onnx"),
}


@dataclass(frozen=True)
class PipelineStep:
    """One step of a pipeline.

    Attributes:
        name: Its name, of `STEPS`.
        options: What its function is called with.
        described: The options as they are written into the file; None for those that ``options`` has.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    described: Mapping[str, Any] | None = None

    @property
    def kind(self) -> StepKind:
        """What it does."""
        return STEPS[self.name]

    @property
    def written(self) -> dict[str, Any]:
        """Its options as JSON can hold them."""
        written: dict[str, Any] = described_options(self.options if self.described is None else self.described)
        return written

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages that take part."""
        found = {}
        for package in ("htp-export", "onnx", "onnx_ir", "onnxruntime", *self.kind.packages):
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found


def steps_of(listed: Any, prepare: Callable[[PipelineStep], PipelineStep] = lambda step: step) -> list[PipelineStep]:
    """Read steps: names, ``{name: options}``, or `PipelineStep`.

    Args:
        listed: The steps.
        prepare: Called with each step; returns it with options for its function.

    Raises:
        InputError: If there are none, if one cannot be read, or if a name or an option is unknown.

    Examples:
        >>> [step.name for step in steps_of(["inline", {"optimize": {"level": "tolerant"}}])]
        ['inline', 'optimize']
    """
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise InputError("a pipeline is a list of steps, such as [{'optimize': {'level': 'tolerant'}}, 'compare']")
    steps = [prepare(_step(number, item)) for number, item in enumerate(listed, 1)]
    for step in steps:
        step.kind.check_options(step.name, step.options)
    return steps


def _step(number: int, item: Any) -> PipelineStep:
    if isinstance(item, str):
        item = PipelineStep(item)
    elif isinstance(item, Mapping) and len(item) == 1:
        [(name, options)] = item.items()
        if not isinstance(options, Mapping | None):
            raise InputError(f"step {number} ({name}): options are a mapping from names to values, not {options!r}")
        item = PipelineStep(str(name), dict(options or {}))
    if not isinstance(item, PipelineStep):
        raise InputError(f"step {number}: a step is a name, or one name with its options, not {item!r}")
    if item.name not in STEPS:
        raise InputError(f"step {number}: there is no step {item.name!r}; there are {', '.join(STEPS)}")
    return item


def described_options(value: Any) -> Any:
    """Return options as JSON can hold them: an array, a tensor or a PyTorch model by its hash, others by their class.

    Examples:
        >>> described_options({"level": "exact", "dims": (1, 2), "data": iter([])})
        {'level': 'exact', 'dims': [1, 2], 'data': {'object': 'list_iterator'}}
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): described_options(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [described_options(each) for each in value]
    digest = _digest(value)
    return {"object": type(value).__qualname__, **({"sha256": digest} if digest else {})}


def is_described(value: Any) -> bool:
    """Return whether described options hold everything that decides what a step makes.

    Examples:
        >>> is_described({"data": {"object": "ndarray", "sha256": "0"}}), is_described([{"object": "list_iterator"}])
        (True, False)
    """
    if isinstance(value, Mapping):
        return "sha256" in value if _is_object(value) else all(map(is_described, value.values()))
    return all(map(is_described, value)) if isinstance(value, list) else True


def is_repeatable(value: Any) -> bool:
    """Return whether described options are options that a step can be called with."""
    if isinstance(value, Mapping):
        return not _is_object(value) and all(map(is_repeatable, value.values()))
    return all(map(is_repeatable, value)) if isinstance(value, list) else True


def option_files(options: Any) -> dict[str, str]:
    """The files that options name → their SHA-256; of a folder, that of the names and contents of the files in it."""
    if isinstance(options, Mapping):
        found: dict[str, str] = {}
        for value in options.values():
            found |= option_files(value)
        return found
    if isinstance(options, list):
        return option_files(dict(enumerate(options)))
    if not isinstance(options, str) or options in ("", ".", ".."):  # a dot is a selector, too
        return {}
    if os.path.isdir(options):  # noqa: PTH112 - pathlib's raise an error for texts that are too long for a name
        files = sorted(file for file in Path(options).iterdir() if file.is_file())
        listed = "\n".join(f"{file.name}:{_file_digest(file)}" for file in files)
        return {options: hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()}
    return {options: _file_digest(Path(options))} if os.path.isfile(options) else {}  # noqa: PTH113 - the same


def _is_object(value: Mapping[Any, Any]) -> bool:
    return "object" in value and set(value) <= {"object", "sha256"}


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest(value: Any) -> str:
    """The hash of an array, a tensor, a PyTorch model or a dataclass; empty for anything else."""
    digest = hashlib.sha256()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: described_options(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest() if is_described(fields) else ""
    if hasattr(value, "state_dict") and hasattr(value, "named_modules"):
        arrays = {name: each for name, each in value.state_dict().items() if hasattr(each, "detach")}
        classes = [f"{path}:{type(module).__qualname__}" for path, module in value.named_modules()]
        digest.update(repr((value.training, classes, list(arrays))).encode())
    elif hasattr(value, "detach") or isinstance(value, np.ndarray | np.generic):
        arrays = {"": value}
    else:
        return ""
    for each in arrays.values():
        array = _array(each)
        digest.update(repr((str(array.dtype), array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _array(value: Any) -> Any:
    from htp_export.runtime.arrays import from_torch

    return from_torch(value) if hasattr(value, "detach") else np.asarray(value)
