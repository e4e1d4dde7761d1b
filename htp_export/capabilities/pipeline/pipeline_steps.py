"""Steps of a pipeline: a table from names to functions, and checks of their options."""

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
from htp_export.editing.edit import Edit
from htp_export.errors import FileError, HtpExportError, InputError
from htp_export.files.filesystem import is_special
from htp_export.format import tags
from htp_export.format.call_tree import Instance
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.tags import Reason
from htp_export.model.tagged import TaggedModel, load
from htp_export.plans.rules import modules_within
from htp_export.process.argument_types import check_type, parameter_type
from htp_export.process.quiet import quiet
from htp_export.process.user_code import names_factory


class StepOptionError(InputError):
    """An option of a step cannot be used; nothing was run.

    ``place`` locates it in the list of steps: the index of the step, its name, the option, and a
    key of the option.
    """

    def __init__(self, message: str, place: tuple[int | str, ...]) -> None:
        super().__init__(message)
        self.place = place


@contextlib.contextmanager
def blamed(index: int, step: PipelineStep, *names: str) -> Iterator[None]:
    """Convert an `InputError` to a `StepOptionError` with the name and place of the step."""
    try:
        yield
    except StepOptionError:
        raise
    except InputError as error:
        raise StepOptionError(f"step {step.name}: {error}", (index, step.name, *names)) from error


@dataclass(frozen=True)
class StepKind:
    """The function of a step, which is called with the options as keyword arguments.

    A change returns a result with the new ``model``. A check returns a result with ``ok`` and
    ``summary``, writes no file, and stops the pipeline if it fails.

    Attributes:
        name: The step, and the name of its function.
        module: The module of the function, in ``htp_export.capabilities``.
        check: Whether it is a check.
        packages: Packages whose versions influence the result.
        given: The parameter for the model so far.
        start: The parameter for the model that the pipeline begins with.
        checks: Functions that accept some of the parameters and refuse wrong values:
            ``module:function`` or, outside of capabilities, ``.module:function``.
        keeps_modules: Whether the model has the same modules afterwards.
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
        """Parameters of the function that options can set."""
        parameters = dict(inspect.signature(self.load()).parameters)
        for name in (self.given, *_SET_HERE):
            parameters.pop(name, None)
        return parameters

    def takes(self, option: str) -> Any:
        """The type of an option's parameter, as text if it cannot be evaluated; None for an option of another tool."""
        return parameter_type(self.load(), option) if option in self.parameters else None

    def takes_file(self, option: str) -> bool:
        """Whether an option may name a file, by the type of its parameter; an option of another tool always may."""
        kind = self.takes(option)
        return kind is None or "PathLike" in repr(kind)

    def runs_code(self, option: str, value: Any) -> bool:
        """Whether an option may name code: a factory, or a library that a tool or an execution provider loads."""
        if option in _LOAD_LIBRARIES:
            is_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
            return not is_names
        if option in _DATA and any(map(names_factory, texts_in(value))):
            return True
        return self.takes(option) is None and not is_plain(value)

    @property
    def _named(self) -> dict[str, inspect.Parameter]:
        """The parameters without ``**options``, which a tool's own options are passed by."""
        return {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }

    def check_option(self, option: str) -> None:
        """Refuse an option that is no parameter of the function."""
        takes_all = len(self._named) < len(self.parameters)
        if option in (self.given, *_SET_HERE) or not (takes_all or option in self._named):
            listed = f"; it has {', '.join(sorted(self._named))}" if self._named else ""
            raise InputError(f"there is no option {option!r}{listed}")

    def check_complete(self, options: Mapping[str, Any]) -> None:
        """Refuse options without one that the function requires."""
        for name, parameter in self._named.items():
            is_required = parameter.default is inspect.Parameter.empty and name != self.start
            if is_required and name not in options:
                raise InputError(f"the option {name!r} is missing")


def _function(location: str) -> Callable[..., Any]:
    """Import a function: ``module:function``, relative to ``htp_export.capabilities``."""
    module_name, _, name = location.partition(":")
    module = importlib.import_module(f".{module_name}", "htp_export.capabilities")
    function: Callable[..., Any] = getattr(module, name)
    return function


_SET_HERE = ("output", "external_data", "share_weights", "dry_run")
"""Parameters that a pipeline sets itself, because it writes all files."""

_LOAD_LIBRARIES = ("providers", "session_options")
"""Parameters that are passed to ONNX Runtime. Names of providers load nothing; their options name libraries."""

_DATA = ("data", "validation")
"""Parameters that may name a factory, which is called."""

_SEED = ".process.argument_types:check_seed"
_RUN_CHECKS = ("verify.locating:check_tolerances", ".runtime.settings:check_providers")

_TOOLS = "carry.adapters"

# A new step is an entry here; every adapter of a tool is one without an entry. `docs/pipeline.md`
# lists them.
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
        checks=("prune.sparsities:sparsities_of", ".runtime.data:check_runs", _SEED),
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
    StepKind("rename", "rename.naming", checks=(".editing.path_names:check_style",)),
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
    """One step of a pipeline: its name in `STEPS`, options for its function, and options for the metadata."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    described: Mapping[str, Any] | None = None

    @property
    def kind(self) -> StepKind:
        """Its function, and facts about it."""
        return STEPS[self.name]

    @property
    def written(self) -> dict[str, Any]:
        """Its options as JSON values."""
        options = self.options if self.described is None else self.described
        written: dict[str, Any] = described_options(options)
        return written

    @property
    def files(self) -> dict[str, str]:
        """File that its options name → SHA-256."""
        kind = self.kind
        options = {name: value for name, value in self.written.items() if kind.takes_file(name)}
        return option_files(options)

    @property
    def versions(self) -> dict[str, str]:
        """Package that influences the result → version."""
        versions = {}
        for package in ("htp-export", "onnx", "onnx_ir", "onnxruntime", *self.kind.packages):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        return versions


def steps_of(
    listed: Any,
    prepare: Callable[[PipelineStep], PipelineStep] = lambda step: step,
    model_file: Path | None = None,
    *,
    allow_entry: bool = False,
) -> list[PipelineStep]:
    """Parse steps: names, ``{name: options}``, or `PipelineStep`.

    Args:
        listed: The list of steps.
        prepare: Called with each step; returns it with options for its function.
        model_file: The ONNX file that contains the steps, if there is one: its options are not
            trusted.
        allow_entry: Whether the options of an ONNX file may name code.

    Raises:
        InputError: A step or an option does not exist, or a required option is missing.
        FileError: An option of an ONNX file names code, or a file outside its folder.
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
            ready = prepare(step)
        for name in ready.options:
            with blamed(index, step, name):
                step.kind.check_option(name)
        with blamed(index, step):
            step.kind.check_complete(ready.options)
        prepared.append(ready)
    return prepared


def _step(number: int, item: Any) -> PipelineStep:
    """Parse one step; ``number`` is its position, from 1, for errors."""

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
    """Refuse a pipe or a device as a file of a step: reading it blocks, and it is read twice."""
    for name, value in step.options.items():
        for text in texts_in(value):
            if is_special(Path(text)):
                raise FileError(
                    text, f"is no plain file; step {step.name} has it as its option {name}"
                )


def _check_origin(step: PipelineStep, file: Path, *, allow_entry: bool) -> None:
    """Refuse an option of an ONNX file that names code without permission, or a file outside its folder."""
    folder = file.resolve().parent
    for name, value in step.options.items():
        option = f"its step {step.name} has the option {name}={value!r}"
        if step.kind.runs_code(name, value) and not allow_entry:
            problem = f"{option}, which may name code to run; allow it with --allow-entry if you trust the file"
            raise FileError(file, f"{problem} (in Python: allow_entry=True)")
        if step.kind.takes(name) is None or not step.kind.takes_file(name):
            continue
        for text in texts_in(value):
            # The null character: realpath refuses it in a path.
            if "\0" in text or not Path(os.path.realpath(text)).is_relative_to(folder):
                raise FileError(
                    file, f"{option}, which names a file that is not in the folder of this one"
                )


_BY_SELECTOR = ("plan", "tolerances")
"""Options that map selectors to values."""


def check_values(steps: Sequence[PipelineStep], start: Callable[[], TaggedModel]) -> None:
    """Check the values of options: types, files, modules, and the checks of each function for its own arguments.

    Selectors are resolved in the model that the pipeline begins with, up to the first step that
    adds or removes modules. ``start`` loads that model; it is called only if an option names
    modules.
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
    """Check the type of an option, and that the files that it names exist and are models if they have to be."""
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
    """Check that the selectors of an option, or the path of `splice`, match modules."""
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
    """Call a check with the options that it accepts; an error for a mapping names the entry at fault."""
    names = list(inspect.signature(check).parameters)
    options = [name for name in names if name in given]
    if not options:
        return
    defaults = {name: parameter.default for name, parameter in step.kind.parameters.items()}
    arguments = {name: given.get(name, defaults.get(name)) for name in names}
    option = options[0]
    if isinstance(given[option], Mapping):
        for key, value in given[option].items():
            with blamed(index, step, option, str(key)):
                check(**{**arguments, option: {key: value}})
    with blamed(index, step, option):
        check(**arguments)


def _try_tool(step: PipelineStep) -> None:
    """Run a tool on a model of one node, to check that it is installed and accepts these options."""
    try:
        with quiet("htp_export"):
            step.kind.load()(_one_product(), **step.options)
    except InputError:
        raise
    except HtpExportError:
        # The tool refuses this small model: the options may be right for the real one.
        pass


def _one_product() -> ir.Model:
    """A tagged model of one MatMul, 32 wide, so that a quantizer has a whole block of weights."""
    x = ir.val("x", ir.DataType.FLOAT, [2, 32])
    weight = ir.val("weight", const_value=ir.tensor(np.eye(32, dtype="f")))
    node = ir.node("MatMul", [x, weight])
    [y] = node.outputs
    y.name, y.type, y.shape = "y", x.type, x.shape
    graph = ir.Graph(
        [x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 20}, name="net"
    )
    model = ir.Model(graph, ir_version=10, metadata_props={tags.FORMAT: tags.VERSION})
    modules = Hierarchy(ModuleInfo(path, "Module", 1) for path in ("", "layer"))
    with Edit(TaggedModel(model, modules)) as edit:
        edit.own(node, Instance("layer"), Reason.SCOPE)
    return model
