"""``info``: what a file is, without its weights: inputs, outputs, versions, sizes, tags, family, and what fits it."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path

import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.files.data_files import check_data
from htp_export.files.lazy_tensor import Slot, slots
from htp_export.format import tags
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import contents_of, dtype_name
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import ModelSource, TaggedModel, load
from htp_export.reporting.columns import Column, many, si
from htp_export.reporting.result import PlainData, Result, Table
from htp_export.reporting.tag_facts import TagFacts
from htp_export.runtime.declared_inputs import Input
from htp_export.weights.storing import numbers_of

_TORCHS = "pkg.torch.onnx."  # what keys begin with that torch's dynamo exporter gives to nodes
_MOST_EVIDENCE = 6  # lines that are shown
_WIDEST = 60  # characters of a command, before what it is for
_MANY_BYTES = 10_000_000  # of float32 weights; fewer need no other precision


@dataclass(frozen=True)
class ModelValue(PlainData):
    """An input or output of a model.

    Attributes:
        name: Its name.
        role: ``"input"`` or ``"output"``.
        type: Its element type as numpy names it; the whole type of what is no tensor; None if the
            file does not say.
        shape: Its sizes, each a number, the name of an open size, or None; None if the file does
            not say.
    """

    name: str
    role: str
    type: str | None
    shape: tuple[int | str | None, ...] | None


def _sizes(shape: tuple[int | str | None, ...]) -> str:
    shown = (
        "?" if size is None else f"({size})" if " " in str(size) else str(size) for size in shape
    )
    return " × ".join(shown) or "scalar"  # noqa: RUF001 - "times"


def _folded(values: Iterable[ModelValue]) -> Iterator[ModelValue]:
    """Values that differ in the numbers of their names alone as one, such as those of a cache by layer."""
    alike: dict[tuple[object, ...], list[ModelValue]] = {}
    for value in values:
        alike.setdefault(
            (value.role, re.sub(r"\d+", "0", value.name), value.type, value.shape), []
        ).append(value)
    for first, *others in alike.values():
        name = f"{first.name} … {others[-1].name} × {len(others) + 1}" if others else first.name  # noqa: RUF001 - "times"
        yield replace(first, name=name)


_COLUMNS = [
    Column[ModelValue]("role", "", right=False),
    Column[ModelValue]("name", "name", right=False),
    Column[ModelValue]("type", "type", right=False),
    Column[ModelValue]("shape", "shape", text=_sizes, right=False),
]


@dataclass(frozen=True)
class Info(Result):
    """The result of `info`.

    Attributes:
        inputs: Its inputs.
        outputs: Its outputs.
        opsets: Domain → version; ``ai.onnx`` is ONNX's own.
        ir_version: The version of ONNX's file format.
        producer: The program that wrote the model, with its version; empty if the file does not
            say.
        exporter: ``"dynamo"`` if nodes have the metadata of this exporter of torch; None otherwise.
        nodes: Number of nodes, those of subgraphs and functions included.
        functions: Number of ONNX functions.
        modules: Number of modules in the module tree.
        format: The version of the tags' format; None without tags.
        weights: Element type of stored tensors → their bytes, most first: of initializers, and of
            the weights in ``Constant`` nodes.
        elements: Number of their elements.
        file_bytes: Size of the file; None for a model in memory.
        data_files: Name of each file with external data → its size; None if it is missing.
        family: The family of its architecture, as of `fingerprint`; None if that cannot be found.
        evidence: The evidence for it, in sentences.
        next: Commands that fit the model → what each is for.
        notes: What is wrong with the file, a line each.
        tags: The tags of the model: source, reasons, untagged nodes.
    """

    inputs: tuple[ModelValue, ...]
    outputs: tuple[ModelValue, ...]
    opsets: Mapping[str, int]
    ir_version: int
    producer: str
    exporter: str | None
    nodes: int
    functions: int
    modules: int
    format: str | None
    weights: Mapping[str, int]
    elements: int
    file_bytes: int | None
    data_files: Mapping[str, int | None]
    family: str | None
    evidence: tuple[str, ...]
    next: Mapping[str, str]
    notes: tuple[str, ...] = ()
    tags: TagFacts = field(default_factory=TagFacts)

    @property
    def summary(self) -> str:
        """The result in one line."""
        sizes = ", ".join(f"{si(size, 'B')} {name}" for name, size in self.weights.items())
        count = f"{many(self.nodes, 'node')} in {many(self.modules, 'module')}"
        return f"{self.family or 'unknown'}: {count}, {si(self.elements)} weights{f' ({sizes})' * bool(sizes)}"

    def table(self) -> Table:
        """The inputs and outputs, those alike in one line."""
        return _COLUMNS, _folded((*self.inputs, *self.outputs))

    @property
    def lines(self) -> tuple[str, ...]:
        """The family's evidence, versions, sizes, tags, and what to do next."""
        opsets = ", ".join(f"{domain} {version}" for domain, version in self.opsets.items())
        writer = (
            f"; {self.producer}{f', exporter {self.exporter}' if self.exporter else ''}"
            if self.producer
            else ""
        )
        files = [] if self.file_bytes is None else [f"file {si(self.file_bytes, 'B')}"]
        files += [
            f"{name} {'missing' if size is None else si(size, 'B')}"
            for name, size in self.data_files.items()
        ]
        functions = f"; {many(self.functions, 'function')}" if self.functions else ""
        width = min(max(map(len, self.next), default=0), _WIDEST)
        more = (
            [f"... and {len(self.evidence) - _MOST_EVIDENCE} more"]
            if len(self.evidence) > _MOST_EVIDENCE
            else []
        )
        return (
            *(f"  {fact}" for fact in (*self.evidence[:_MOST_EVIDENCE], *more)),
            f"opset {opsets}; IR version {self.ir_version}{writer}{functions}",
            *([", ".join(files)] if files else ()),
            *super().lines,
            *(f"next: {command.ljust(width)}  # {why}" for command, why in self.next.items()),
        )


@names_model_faults("model")
def info(model: ModelSource) -> Info:
    """Describe a model: inputs and outputs, versions, sizes, tags, the family of its architecture, and what fits it.

    Large weights and external data are not read, and external data may be missing.

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
            Tags are not needed.

    Returns:
        What is known of it. ``.next`` has commands that fit it.

    Raises:
        FileError: The file cannot be read.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> found = htp_export.info(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> found.inputs[0].shape, found.nodes, found.modules, found.elements, found.weights
        ((2, 4), 2, 3, 15, {'float32': 60})
    """
    tagged = load(model)
    file = Path(model) if isinstance(model, str | PathLike) else None
    found, metadata = tagged.model, tagged.model.metadata_props
    initializers = [slot for slot in slots(found) if slot.initializer]
    stored = [*(slot.tensor for slot in initializers), *_weights_in_nodes(tagged)]
    sizes: Counter[str] = Counter()
    for tensor in stored:
        if tensor.dtype != ir.DataType.STRING:
            sizes[dtype_name(tensor.dtype)] += tensor.nbytes
    data, notes = _data_of(initializers)
    family, evidence = _family_of(tagged)
    nodes = list(all_nodes(found))
    by_dynamo = any(key.startswith(_TORCHS) for node in nodes for key in node.metadata_props)
    facts = tagged.tag_facts
    inputs = tuple(_value(value, "input") for value in found.graph.inputs)
    return Info(
        inputs,
        tuple(_value(value, "output") for value in found.graph.outputs),
        {domain or "ai.onnx": version for domain, version in found.opset_imports.items()},
        found.ir_version,
        " ".join(filter(None, (found.producer_name, found.producer_version))),
        "dynamo" if by_dynamo else None,
        len(nodes),
        len(found.functions),
        len(tagged) if facts.source != "none" else 0,
        metadata.get(tags.FORMAT) if facts.source == "htp" else None,
        dict(sizes.most_common()),
        sum(tensor.size for tensor in stored),
        None if file is None else file.stat().st_size,
        data,
        family,
        evidence,
        _next_steps(shlex.quote(fspath(file or "FILE")), tagged, inputs, sizes, whole=not notes),
        notes,
        facts,
    )


def _weights_in_nodes(tagged: TaggedModel) -> list[ir.TensorProtocol]:
    """The weights that are ``Constant`` nodes; other constants are axes, sizes and single numbers."""
    read = dict.fromkeys(
        value for module in contents_of(tagged).modules.values() for value in module.own_weights
    )
    return [numbers_of(value) for value in read if value.producer() is not None]


def _value(value: ir.Value, role: str) -> ModelValue:
    declared = Input.of(value)
    other = None if value.type is None else str(value.type)
    named = other if declared.type is None else dtype_name(declared.type)
    return ModelValue(value.name or "", role, named, declared.shape)


def _data_of(stored: list[Slot]) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """Name of each data file → its size, None if it is missing; and what is wrong with them."""
    files = {slot.path: slot.tensor for slot in stored if slot.external}
    notes = []
    for tensor in files.values():
        try:
            check_data([tensor])
        except FileError as error:
            notes.append(str(error))
    return {
        Path(path).name: Path(path).stat().st_size if Path(path).is_file() else None
        for path in files
    }, (*notes,)


def _family_of(tagged: TaggedModel) -> tuple[str | None, tuple[str, ...]]:
    from htp_export.capabilities.fingerprint.families import fingerprint

    try:
        found = fingerprint(tagged)
    except FileError:  # it needs a small tensor of a file that is missing; notes say which
        return None, ()
    return found.family, found.evidence


def _next_steps(
    file: str,
    tagged: TaggedModel,
    inputs: tuple[ModelValue, ...],
    sizes: Counter[str],
    *,
    whole: bool,
) -> dict[str, str]:
    """Commands that fit a model → what each is for; those that need weights only where all files are there."""
    steps, facts = dict[str, str](), tagged.tag_facts
    if facts.source != "htp":
        before = "BEFORE" if facts.lost else "MODEL"
        why = (
            "bring back the tags that a tool dropped"
            if facts.lost
            else "give its nodes the modules of a model"
        )
        steps[f"htp-export carry {before} {file} -o tagged.onnx"] = why
    if facts.source != "none":
        steps[f"htp-export tree {file}"] = "its module tree"
    if tagged.model.functions:
        steps[f"htp-export functions {file} --undo -o flat.onnx"] = "its functions as a flat graph"
    sizes_of = (size for value in inputs for size in value.shape or () if isinstance(size, str))
    # others are made of these
    if named := dict.fromkeys(size for size in sizes_of if size.isidentifier()):
        dims = ",".join(f"{name}=1" for name in named)
        steps[f"htp-export cost {file} --dims {dims}"] = (
            "its work, for sizes that the file leaves open"
        )
    integers = (
        any(name.lstrip("u").startswith("int") for name in sizes if name != "int64")
        or "float16" in sizes
    )
    if integers and whole:
        steps[f"htp-export compare ORIGINAL {file}"] = "what the other precision changed, by module"
    if whole and facts.source == "htp" and "com.microsoft" not in tagged.model.opset_imports:
        steps[f"htp-export optimize {file} -o small.onnx"] = "fewer nodes, and the same modules"
        if not integers and sizes["float32"] > _MANY_BYTES:
            steps[f"htp-export quantize {file} int4 -o int4.onnx"] = "smaller weights, by module"
    steps[f"htp-export view {file}"] = "one page with all of it"
    return steps
