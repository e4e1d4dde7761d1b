"""The steps of a pipeline: a table from names to the functions that do them, and checks of their options."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.pipeline.step_options import (
    described_options,
    is_plain,
    is_repeatable,
    option_files,
    texts_in,
)
from htp_export.discovery import exported_in
from htp_export.errors import FileError, HtpExportError, InputError
from htp_export.files.filesystem import is_special
from htp_export.format import tags
from htp_export.format.tags import Reason
from htp_export.lineage.owner_rule import Owned
from htp_export.model.tagged import TaggedModel, load
from htp_export.plans.rules import modules_within
from htp_export.process.argument_types import check_type, parameter_type
from htp_export.process.quiet import quiet
from htp_export.process.user_code import names_factory


class StepOptionError(InputError):
    """An option of a step cannot be used; nothing was run.

    The place is where it stands: the number of the step, from 0, its name, the option, and a key in
    it.
    """

    def __init__(self, message: str, place: tuple[int | str, ...]) -> None:
        super().__init__(message)
        self.place = place


@contextlib.contextmanager
def blamed(index: int, step: PipelineStep, *names: str) -> Iterator[None]:
    """Name the step of an error, and its place, as in `StepOptionError`."""
    try:
        yield
    except StepOptionError:
        raise
    except InputError as error:
        raise StepOptionError(f"step {step.name}: {error}", (index, step.name, *names)) from error


@dataclass(frozen=True)
class StepKind:
    """What a step does, by the function of its name, which is called with options by keyword.

    A change returns a result with the new ``model``; a check returns one with ``ok`` and
    ``summary``, makes no file, and stops the pipeline where it fails. ``module`` is in
    ``htp_export.capabilities``; versions of ``packages`` decide what is made. ``given`` is the
    parameter that takes the model so far, and ``start`` the one for the model to begin with.
    ``checks`` are functions, ``module:function`` or, outside of capabilities, ``.module:function``,
    that take some of the parameters and refuse wrong values. ``keeps_modules``: whether the model
    has its modules afterwards.
    """

    name: str
    module: str
    check: bool = False
    packages: tuple[str, ...] = ()
    given: str = "model"
    start: str = ""
    checks: tuple[str, ...] = ()
    keeps_modules: bool = True

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        return _function(f"{self.module}:{self.name.rpartition('.')[2]}")

    @cached_property
    def check_functions(self) -> list[Callable[..., Any]]:
        """Import the functions of ``checks``."""
        return [_function(check) for check in self.checks]

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of the function that options can give."""
        listed = inspect.signature(self.load()).parameters
        return {name: each for name, each in listed.items() if name not in (self.given, *_SET_HERE)}

    def takes(self, option: str) -> Any:
        """The type of the parameter of an option, as text if it cannot be evaluated; None if another tool has it."""
        return parameter_type(self.load(), option) if option in self.parameters else None

    def takes_file(self, option: str) -> bool:
        """Whether an option may name a file: by the type of its parameter, and if another tool has it."""
        kind = self.takes(option)
        return kind is None or "PathLike" in repr(kind)

    def runs_code(self, option: str, value: Any) -> bool:
        """Whether an option may name code: a factory, a library that a tool or an execution provider loads."""
        if option in _LOAD_LIBRARIES:
            return not (isinstance(value, list) and all(isinstance(each, str) for each in value))
        if option in _DATA and any(map(names_factory, texts_in(value))):
            return True
        return self.takes(option) is None and not is_plain(value)

    @property
    def _named(self) -> dict[str, inspect.Parameter]:
        """The parameters without ``**options``, which are those of another tool."""
        return {
            key: each
            for key, each in self.parameters.items()
            if each.kind is not inspect.Parameter.VAR_KEYWORD
        }

    def check_option(self, option: str) -> None:
        """Refuse an option that the function does not have."""
        takes_all = len(self._named) < len(self.parameters)
        if option in (self.given, *_SET_HERE) or not (takes_all or option in self._named):
            listed = f"; it has {', '.join(sorted(self._named))}" if self._named else ""
            raise InputError(f"there is no option {option!r}{listed}")

    def check_complete(self, options: Mapping[str, Any]) -> None:
        """Refuse options that leave out one that the function needs."""
        for key, each in self._named.items():
            if each.default is inspect.Parameter.empty and key != self.start and key not in options:
                raise InputError(f"the option {key!r} is missing")


def _function(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(
        importlib.import_module(f".{module}", "htp_export.capabilities"), name
    )
    return function


_SET_HERE = ("output", "external_data", "share_weights", "dry_run")
"""Parameters that a pipeline sets itself: it writes the files, all of them."""

_LOAD_LIBRARIES = ("providers", "session_options")
"""Parameters whose values are handed to ONNX Runtime. Names of providers load nothing; their options name libraries."""

_DATA = ("data", "validation")
"""Parameters that may name a factory, which is called."""

_SEED = ".process.argument_types:check_seed"
_RUN_CHECKS = ("verify.locating:check_tolerances", ".runtime.sessions:check_providers")

_TOOLS = "carry.adapters"

# A new step is a line here; an adapter of a tool is one by itself. `docs/pipeline.md` lists them.
_KINDS = [
    StepKind(
        "optimize",
        "optimize.optimizing",
        packages=("onnxscript",),
        checks=("optimize.registry:choose",),
    ),
    StepKind(
        "quantize",
        "quantize.quantizing",
        packages=("onnxruntime",),
        checks=("quantize.precisions:check_plan", ".runtime.data:check_runs", _SEED),
    ),
    StepKind(
        "prune",
        "prune.pruning",
        checks=("prune.sparsities:sparsities_of", _SEED),
        keeps_modules=False,
    ),
    StepKind(
        "lora.insert",
        "lora.lora_inputs",
        checks=("lora.lora_inputs:scaling_of",),
        keeps_modules=False,
    ),
    StepKind(
        "lora.fuse", "lora.lora_files", checks=("lora.adapters:read_adapter",), keeps_modules=False
    ),
    StepKind("bind", "bind.binding"),
    StepKind("functions", "functions.nesting"),
    StepKind("inline", "functions.nesting"),
    StepKind("rename", "rename.naming", checks=(".model.tensor_names:check_style",)),
    StepKind("splice", "extract.extraction", keeps_modules=False),
    StepKind("tap", "tap.tapping"),
    StepKind("untap", "tap.tapping"),
    StepKind("steer", "tap.steering"),
    StepKind("carry", "carry.carrying", given="before", keeps_modules=False),
    *(
        StepKind(tool, _TOOLS, packages=(tool,))
        for tool in exported_in(f"htp_export.capabilities.{_TOOLS}")
    ),
    StepKind(
        "compare",
        "verify.file_comparing",
        check=True,
        given="b",
        start="a",
        checks=(*_RUN_CHECKS, _SEED),
    ),
    StepKind("verify", "verify.verifying", check=True, given="onnx", checks=_RUN_CHECKS),
]
STEPS: dict[str, StepKind] = {kind.name: kind for kind in _KINDS}


@dataclass(frozen=True)
class PipelineStep:
    """One step of a pipeline: its name in `STEPS`, options for its function, and the options that are written."""

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
        written: dict[str, Any] = described_options(
            self.options if self.described is None else self.described
        )
        return written

    @property
    def files(self) -> dict[str, str]:
        """The files that its options name → their SHA-256."""
        return option_files(
            {name: value for name, value in self.written.items() if self.kind.takes_file(name)}
        )

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages that take part."""
        found = {}
        for package in ("htp-export", "onnx", "onnx_ir", "onnxruntime", *self.kind.packages):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        return found


def steps_of(
    listed: Any,
    prepare: Callable[[PipelineStep], PipelineStep] = lambda step: step,
    model_file: Path | None = None,
    *,
    allow_entry: bool = False,
) -> list[PipelineStep]:
    """Read steps: names, ``{name: options}``, or `PipelineStep`; a step or an option that is wrong is an `InputError`.

    Each step is given to ``prepare``, which returns it with options for its function. The options
    of a model file, if the steps were read from one, may name code only if ``allow_entry`` says so.
    """
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise InputError(
            "a pipeline is a list of steps, such as [{'optimize': {'level': 'tolerant'}}, 'compare']"
        )
    steps = [_step(number, item) for number, item in enumerate(listed, 1)]
    if model_file is not None:
        for step in steps:
            _check_origin(step, model_file, allow_entry=allow_entry)
    prepared = []
    for index, step in enumerate(steps):
        _check_plain(step)
        with blamed(index, step):
            prepared.append(prepare(step))
        for name in prepared[-1].options:
            with blamed(index, step, name):
                step.kind.check_option(name)
        with blamed(index, step):
            step.kind.check_complete(prepared[-1].options)
    return prepared


def _step(number: int, item: Any) -> PipelineStep:
    def refused(problem: str, *names: str) -> StepOptionError:
        return StepOptionError(f"step {number}{problem}", (number - 1, *names))

    if isinstance(item, str):
        item = PipelineStep(item)
    elif isinstance(item, Mapping) and len(item) == 1:
        [(name, options)] = item.items()
        if not isinstance(options, Mapping | None):
            problem = f" ({name}): options are a mapping from names to values, not {options!r}"
            raise refused(problem, str(name))
        item = PipelineStep(str(name), dict(options or {}))
    if not isinstance(item, PipelineStep):
        raise refused(f": a step is a name, or one name with its options, not {item!r}")
    if item.name not in STEPS:
        raise refused(f": there is no step {item.name!r}; there are {', '.join(STEPS)}")
    return item


def _check_plain(step: PipelineStep) -> None:
    """Refuse a pipe or a device in the place of a file that a step names: it would be waited for, and read twice."""
    for name, value in step.options.items():
        for text in texts_in(value):
            if is_special(Path(text)):
                raise FileError(
                    text, f"is no plain file; step {step.name} has it as its option {name}"
                )


def _check_origin(step: PipelineStep, file: Path, *, allow_entry: bool) -> None:
    """Refuse an option of a model file that names code, unless it may, or a file outside of the model's folder."""
    folder = file.resolve().parent
    for name, value in step.options.items():
        said = f"its step {step.name} has the option {name}={value!r}"
        if step.kind.runs_code(name, value) and not allow_entry:
            problem = f"{said}, which may name code to run; allow it with --allow-entry if you trust the file"
            raise FileError(file, f"{problem} (in Python: allow_entry=True)")
        for text in (
            texts_in(value)
            if step.kind.takes(name) is not None and step.kind.takes_file(name)
            else ()
        ):
            if "\0" in text or not Path(os.path.realpath(text)).is_relative_to(folder):
                raise FileError(
                    file, f"{said}, which names a file that is not in the folder of this one"
                )


_BY_SELECTOR = ("plan", "tolerances")
"""Options that are mappings from selectors."""


def check_values(steps: Sequence[PipelineStep], start: Callable[[], TaggedModel]) -> None:
    """Check the values of options: types, files, modules, and what each function checks of its own arguments.

    Modules are looked for in the model that the pipeline begins with, up to the first step that
    adds or removes some; ``start`` reads that model, and is called only if an option names modules.
    """
    from htp_export.capabilities.carry import adapters as tools

    keeps_modules = True
    for index, step in enumerate(steps):
        given = {name: value for name, value in step.options.items() if value is not None}
        for name, value in given.items():
            with blamed(index, step, name):
                _check_value(step, name, value)
            if keeps_modules:
                _check_modules(index, step, name, value, start)
        for check in step.kind.check_functions:
            _run_check(check, index, step, given)
        if step.name in tools.__all__ and is_repeatable(step.written):
            with blamed(index, step):
                _try_tool(step)
        keeps_modules = keeps_modules and step.kind.keeps_modules


def _check_value(step: PipelineStep, name: str, value: Any) -> None:
    kind = step.kind.takes(name)
    check_type(name, value, kind)
    if kind is None or not step.kind.takes_file(name):
        return
    for text in texts_in(value):
        if "ModelProto" in repr(kind):
            load(text)
        elif not Path(text).exists():
            raise FileError(text, "there is no such file")


def _check_modules(
    index: int, step: PipelineStep, name: str, value: Any, start: Callable[[], TaggedModel]
) -> None:
    """Check the selectors of an option, and the path of `splice`."""
    if name in _BY_SELECTOR and isinstance(value, Mapping):
        for selector in value:
            with blamed(index, step, name, str(selector)):
                modules_within(start(), selector)
    elif name == "select":
        with blamed(index, step, name):
            modules_within(start(), value)
    elif name == "path":
        with blamed(index, step, name):
            start()[value]


def _run_check(
    check: Callable[..., Any], index: int, step: PipelineStep, given: Mapping[str, Any]
) -> None:
    """Call a check of a function with the options that it takes; of a mapping, the entry at fault is named."""
    taken = list(inspect.signature(check).parameters)
    if not set(taken) & set(given):
        return
    defaults = {key: each.default for key, each in step.kind.parameters.items()}
    arguments = {key: given.get(key, defaults.get(key)) for key in taken}
    option = next(key for key in taken if key in given)
    if isinstance(given[option], Mapping):
        for key, value in given[option].items():
            with blamed(index, step, option, str(key)):
                check(**{**arguments, option: {key: value}})
    with blamed(index, step, option):
        check(**arguments)


def _try_tool(step: PipelineStep) -> None:
    """Run a tool on a model of one node: is it installed, and has it these options?"""
    try:
        with quiet("htp_export"):
            step.kind.load()(_one_product(), **step.options)
    except InputError:
        raise
    except HtpExportError:  # about the model, which counts for nothing
        pass


def _one_product() -> ir.Model:
    x, weight = (
        ir.val("x", ir.DataType.FLOAT, [2, 32]),
        ir.val("weight", const_value=ir.tensor(np.eye(32, dtype="f"))),
    )
    node = ir.node(
        "MatMul",
        [x, weight],
        metadata_props=Owned(("layer",), Reason.SCOPE).metadata({"", "layer"}),
    )
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", x.type, x.shape
    graph = ir.Graph(
        [x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 20}, name="net"
    )
    return ir.Model(graph, ir_version=10, metadata_props={tags.FORMAT: tags.VERSION})
