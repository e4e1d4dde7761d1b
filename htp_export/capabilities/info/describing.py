"""`info`: a file without its weights: inputs, outputs, versions, sizes, tags, family, commands."""

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

_TORCHS = "pkg.torch.onnx."  # prefix of metadata keys of torch's dynamo exporter
_MOST_EVIDENCE = 6  # lines of evidence in text, so that the rest stays on the screen
_WIDEST = 60  # characters of a command; the explanations of longer ones are not aligned
_MANY_BYTES = 10_000_000  # bytes of float32 weights from which a smaller precision is suggested


@dataclass(frozen=True)
class ModelValue(PlainData):
    """An input or output of a model.

    Attributes:
        name: Its name.
        role: ``"input"`` or ``"output"``.
        type: Its element type, by numpy's name; the whole type if it is not a tensor; None if it is
            unknown.
        shape: Its sizes, each a number, the name of an open size, or None; None if it is unknown.
    """

    name: str
    role: str
    type: str | None
    shape: tuple[int | str | None, ...] | None


def _sizes(shape: tuple[int | str | None, ...]) -> str:
    """A shape as text; expressions have parentheses."""
    texts = []
    for size in shape:
        text = "?" if size is None else str(size)
        texts.append(f"({text})" if " " in text else text)
    return " × ".join(texts) or "scalar"  # noqa: RUF001 - "times"


def _folded(values: Iterable[ModelValue]) -> Iterator[ModelValue]:
    """Merge values that differ only in the numbers of their names, such as a cache by layer."""
    groups: dict[tuple[object, ...], list[ModelValue]] = {}
    for value in values:
        pattern = re.sub(r"\d+", "0", value.name)
        groups.setdefault((value.role, pattern, value.type, value.shape), []).append(value)
    for first, *others in groups.values():
        name = first.name
        if others:
            name = f"{name} … {others[-1].name} × {len(others) + 1}"  # noqa: RUF001 - "times"
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
        producer: The program that wrote the model, with its version; empty if it is unknown.
        exporter: ``"dynamo"`` if nodes have the metadata of this exporter of torch; None otherwise.
        nodes: Number of nodes, also in subgraphs and functions.
        functions: Number of ONNX functions.
        modules: Number of modules in the module tree.
        format: The version of the tags' format; None without tags.
        weights: Element type of stored tensors → their bytes, most first: of initializers, and of
            the weights in ``Constant`` nodes.
        elements: Number of their elements.
        file_bytes: Size of the file; None for an in-memory model.
        data_files: Name of each file with external data → its size; None if it is missing.
        family: The family of its architecture, as of `fingerprint`; None if it is unknown.
        evidence: The evidence for it, in sentences.
        next: Commands that fit the model → their purposes.
        notes: Problems of the file, one line each.
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
        """The inputs and outputs; names that differ only in numbers share a row."""
        return _COLUMNS, _folded((*self.inputs, *self.outputs))

    @property
    def lines(self) -> tuple[str, ...]:
        """The family's evidence, versions, sizes, tags, and next commands."""
        lines = [f"  {sentence}" for sentence in self.evidence[:_MOST_EVIDENCE]]
        if len(self.evidence) > _MOST_EVIDENCE:
            lines.append(f"  ... and {len(self.evidence) - _MOST_EVIDENCE} more")
        opsets = ", ".join(f"{domain} {version}" for domain, version in self.opsets.items())
        versions = f"opset {opsets}; IR version {self.ir_version}"
        if self.producer:
            versions += f"; {self.producer}"
            if self.exporter:
                versions += f", exporter {self.exporter}"
        if self.functions:
            versions += f"; {many(self.functions, 'function')}"
        lines.append(versions)
        files = [] if self.file_bytes is None else [f"file {si(self.file_bytes, 'B')}"]
        for name, size in self.data_files.items():
            files.append(f"{name} {'missing' if size is None else si(size, 'B')}")
        if files:
            lines.append(", ".join(files))
        lines += super().lines
        width = min(max(map(len, self.next), default=0), _WIDEST)
        for command, purpose in self.next.items():
            lines.append(f"next: {command.ljust(width)}  # {purpose}")
        return tuple(lines)


@names_model_faults("model")
def info(model: ModelSource) -> Info:
    """Describe a model: inputs, outputs, versions, sizes, tags, family, and commands that fit it.

    Large weights and external data are not loaded, and external data may be missing.

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
            Tags are not needed.

    Returns:
        The description. ``.next`` has commands that fit the model.

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
    found = tagged.model
    metadata = tagged.model.metadata_props
    initializers = [slot for slot in slots(found) if slot.initializer]
    stored = [*(slot.tensor for slot in initializers), *_weights_in_nodes(tagged)]
    sizes = _bytes_by_type(stored)
    data, notes = _data_of(initializers)
    family, evidence = _family_of(tagged)
    nodes = list(all_nodes(found))
    facts = tagged.tag_facts
    inputs = tuple(_value(value, "input") for value in found.graph.inputs)
    name = shlex.quote(fspath(file or "FILE"))
    return Info(
        inputs=inputs,
        outputs=tuple(_value(value, "output") for value in found.graph.outputs),
        opsets={domain or "ai.onnx": version for domain, version in found.opset_imports.items()},
        ir_version=found.ir_version,
        producer=" ".join(filter(None, (found.producer_name, found.producer_version))),
        exporter="dynamo" if any(map(_is_of_dynamo, nodes)) else None,
        nodes=len(nodes),
        functions=len(found.functions),
        modules=len(tagged) if facts.source != "none" else 0,
        format=metadata.get(tags.FORMAT) if facts.source == "htp" else None,
        weights=dict(sizes.most_common()),
        elements=sum(tensor.size for tensor in stored),
        file_bytes=None if file is None else file.stat().st_size,
        data_files=data,
        family=family,
        evidence=evidence,
        next=_next_steps(name, tagged, inputs, sizes, whole=not notes),
        notes=notes,
        tags=facts,
    )


def _bytes_by_type(tensors: Iterable[ir.TensorProtocol]) -> Counter[str]:
    """Element type → bytes; strings, which have no fixed size, are omitted."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype != ir.DataType.STRING:
            sizes[dtype_name(tensor.dtype)] += tensor.nbytes
    return sizes


def _is_of_dynamo(node: ir.Node) -> bool:
    return any(key.startswith(_TORCHS) for key in node.metadata_props)


def _weights_in_nodes(tagged: TaggedModel) -> list[ir.TensorProtocol]:
    """The weights in ``Constant`` nodes; other constants are axes, sizes and single numbers."""
    used: dict[ir.Value, None] = {}
    for module in contents_of(tagged).modules.values():
        used.update(dict.fromkeys(module.own_weights))
    return [numbers_of(value) for value in used if value.producer() is not None]


def _value(value: ir.Value, role: str) -> ModelValue:
    declared = Input.of(value)
    other = None if value.type is None else str(value.type)
    named = other if declared.type is None else dtype_name(declared.type)
    return ModelValue(value.name or "", role, named, declared.shape)


def _data_of(stored: list[Slot]) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """Name of each data file → its size, None if it is missing; and problems of these files."""
    files = {slot.path: slot.tensor for slot in stored if slot.external}
    notes = []
    for tensor in files.values():
        try:
            check_data([tensor])
        except FileError as error:
            notes.append(str(error))
    sizes = {}
    for path in map(Path, files):
        sizes[path.name] = path.stat().st_size if path.is_file() else None
    return sizes, tuple(notes)


def _family_of(tagged: TaggedModel) -> tuple[str | None, tuple[str, ...]]:
    from htp_export.capabilities.fingerprint.families import fingerprint

    try:
        found = fingerprint(tagged)
    except FileError:  # a small tensor is in a missing file, which the notes name
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
    """Commands that fit a model → their purposes. Without all files, none that needs weights."""
    steps = dict[str, str]()
    facts = tagged.tag_facts
    if facts.source != "htp":
        before, purpose = "MODEL", "give its nodes the modules of a model"
        if facts.lost:
            before, purpose = "BEFORE", "bring back the tags that a tool dropped"
        steps[f"htp-export carry {before} {file} -o tagged.onnx"] = purpose
    if facts.source != "none":
        steps[f"htp-export tree {file}"] = "its module tree"
    if tagged.model.functions:
        steps[f"htp-export functions {file} --undo -o flat.onnx"] = "its functions as a flat graph"
    names = _open_dimensions(inputs)
    if names:
        dims = ",".join(f"{name}=1" for name in names)
        purpose = "its work, for sizes that the file leaves open"
        steps[f"htp-export cost {file} --dims {dims}"] = purpose
    is_compressed = "float16" in sizes or any(map(_is_small_integer, sizes))
    if is_compressed and whole:
        steps[f"htp-export compare ORIGINAL {file}"] = "what the other precision changed, by module"
    if whole and facts.source == "htp" and "com.microsoft" not in tagged.model.opset_imports:
        steps[f"htp-export optimize {file} -o small.onnx"] = "fewer nodes, and the same modules"
        if not is_compressed and sizes["float32"] > _MANY_BYTES:
            steps[f"htp-export quantize {file} int4 -o int4.onnx"] = "smaller weights, by module"
    steps[f"htp-export view {file}"] = "one page with all of it"
    return steps


def _open_dimensions(values: Iterable[ModelValue]) -> list[str]:
    """The names of open dimensions; other sizes are numbers, or expressions of these names."""
    names: dict[str, None] = {}
    for value in values:
        for size in value.shape or ():
            if isinstance(size, str) and size.isidentifier():
                names[size] = None
    return list(names)


def _is_small_integer(dtype: str) -> bool:
    """Whether a type is an integer that may hold quantized weights; int64 holds sizes."""
    return dtype.lstrip("u").startswith("int") and dtype != "int64"
