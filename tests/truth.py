"""Holds an exported file against PyTorch, by values alone: does each module's region do what the module did?

PyTorch runs with hooks and notes every tensor that goes into a module and comes out of it. ONNX Runtime runs the file,
not optimised, with every tensor exposed. Both run on two sets of inputs (probes). A module is exact where the tensors
that cross the border of its region are those that PyTorch saw cross, and where its fate is what really happened.
Nothing here asks how the tags were made.

Three rules: a module's inputs are taken before it runs, as it may change them in place; tolerances grow with the
largest element of a tensor; and what a node makes that several modules own may be read anywhere in the largest modules
around them that are not around each other: equal work of two blocks, merged into one node, feeds both blocks. If one
of its owners is around another, the outer one may read it in nodes of its own, and pass it on to modules that were
given this tensor in PyTorch. A number that a module takes or gives is a tensor without dimensions.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort
import torch

from htp_export.format.signatures import Signature, signatures_from_json

Array = np.ndarray[Any, Any]
Fault = tuple[str, str]


def named_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested containers, in order, with the keys that lead to it: ``states.1``."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    if is_dataclass(tree) and not isinstance(tree, dict):
        tree = vars(tree)
    parts = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list | tuple)
        else ()
    )
    for key, part in parts:
        yield from named_leaves(part, f"{name}.{key}" if name else str(key))


def leaves(tree: Any) -> list[torch.Tensor]:
    """Every tensor in nested containers, in order."""
    return [leaf for _, leaf in named_leaves(tree)]


def numbers(tree: Any) -> Iterator[Array]:
    """Every number in nested containers, as a tensor without dimensions."""
    if isinstance(tree, int | float) and not isinstance(tree, bool):
        yield np.asarray(tree)
    for part in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    ):
        yield from numbers(part)


def another(value: Any, seed: int = 99) -> Any:
    """The same inputs with other values: floats drawn anew, integers turned round, masks of another row."""
    if isinstance(value, dict):
        return {key: another(part, seed + i) for i, (key, part) in enumerate(value.items())}
    if isinstance(value, list | tuple):
        return type(value)(another(part, seed + i) for i, part in enumerate(value))
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        drawn = torch.randn(
            value.shape, generator=torch.Generator().manual_seed(seed), dtype=value.dtype
        )
        # of the other sign in sum, so that a branch goes the other way
        return drawn - drawn.mean() - value.mean()
    if not value.ndim:
        return value
    # turned round, padding would come first, and a row might see nothing at all
    mask = int(value.max()) <= 1
    return (value if mask else value.flip(-1)).roll(1, 0)


@dataclass
class Call:
    """What went into one call of a module and what came out; numbers are those of both."""

    given: list[Array]
    returned: list[Array]
    numbers: list[Array] = field(default_factory=list)
    caller: tuple[str, int] | None = None  # module and number of the call that made it


def run_pytorch(
    model: torch.nn.Module, kwargs: dict[str, Any], shifted: tuple[str, int, int] | None = None
) -> tuple[dict[str, list[Call]], list[Array]]:
    """Every call of every module, and the results; ``shifted`` (path, call, output) is changed on its way out."""
    calls: dict[str, list[Call]] = defaultdict(list)
    running: list[tuple[str, int]] = []  # calls, outermost first

    def entering(path: str) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            # before anything changes in place
            given = [copied(leaf) for leaf in leaves([args, kwargs])]
            caller = running[-1] if running else None
            running.append((path, len(calls[path])))
            calls[path].append(Call(given, [], [*numbers([args, kwargs])], caller))

        return hook

    def leaving(path: str) -> Any:
        def hook(_module: Any, _args: Any, result: Any) -> None:
            (_, nth), returned = running.pop(), leaves(result)
            calls[path][nth].returned.extend(copied(leaf) for leaf in returned)
            calls[path][nth].numbers.extend(numbers(result))
            if shifted is not None and shifted[:2] == (path, nth):
                shift(returned[shifted[2]])

        return hook

    with contextlib.ExitStack() as stack, torch.no_grad():
        for path, module in model.named_modules():
            stack.callback(
                module.register_forward_pre_hook(entering(path), with_kwargs=True).remove
            )
            stack.callback(module.register_forward_hook(leaving(path)).remove)
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        # Run as it stands, torch.cond compiles its branches, which may have no hooks.
        stack.enter_context(mock.patch.object(torch, "cond", branch))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        result = model(**kwargs)
    return dict(calls), [copied(leaf) for leaf in leaves(result)]


def shift(tensor: torch.Tensor) -> None:
    """Change every element in place, each once: those of an expanded tensor share memory, and torch refuses that."""
    if tensor.numel():
        size = 1 + sum(
            (length - 1) * stride
            for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        memory = tensor.as_strided((size,), (1,))
        places = torch.arange(size).as_strided(tensor.shape, tensor.stride()).unique()
        memory[places] = ~memory[places] if tensor.dtype == torch.bool else memory[places] + 1


def branch(taken: Any, yes: Any, no: Any, operands: Any = ()) -> Any:
    """torch.cond in plain Python."""
    return (yes if taken else no)(*operands)


def copied(tensor: torch.Tensor) -> Array:
    """The numbers of a tensor; of a quantized one the integers, which are what a file has of it."""
    tensor = tensor.detach().cpu()
    return (tensor.int_repr() if tensor.is_quantized else tensor).numpy().copy()


def equal(one: Array | list[Any], other: Array | list[Any]) -> bool:
    """Whether two tensors have the same numbers; sequences, which an unoptimised file may have, equal none."""
    if isinstance(one, list) or isinstance(other, list) or one.shape != other.shape:
        return False
    if one.dtype.kind in "biu" and other.dtype.kind in "biu":
        return bool(np.array_equal(one, other))
    one, other = one.astype(np.float64), other.astype(np.float64)
    # masks hold the lowest numbers there are
    usual = np.abs(other[np.isfinite(other) & (np.abs(other) < 1e30)])
    # What is folded (Conv + BatchNorm) is rounded by a part of the largest element, wherever it stands.
    scale = max(1.0, float(usual.max(initial=0.0)))
    return bool(np.allclose(one, other, rtol=1e-3, atol=1e-5 * scale, equal_nan=True))


# --- the file ---------------------------------------------------


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def every_node(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from every_node(body.node)


def nodes_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """All nodes of a model: those in bodies and in functions too."""
    return list(
        every_node(
            itertools.chain(model.graph.node, *(function.node for function in model.functions))
        )
    )


def owners_of(node: onnx.NodeProto) -> tuple[str, ...]:
    said = {entry.key: entry.value for entry in node.metadata_props}
    if "htp.owners" in said:
        return tuple(json.loads(said["htp.owners"]))
    return (said["htp.module"],) if "htp.module" in said else ()


def work_of(model: onnx.ModelProto, *types: str) -> list[tuple[str, tuple[str, ...]]]:
    """``(operator, owners)`` of every node, or of those of some operators, in the order of the file."""
    return [
        (node.op_type, owners_of(node))
        for node in nodes_of(model)
        if not types or node.op_type in types
    ]


def owners_by_type(model: onnx.ModelProto, *types: str) -> dict[str, list[tuple[str, ...]]]:
    """Operator → owners of its nodes, in the order of the file."""
    return {op_type: [owners for _, owners in work_of(model, op_type)] for op_type in types}


def fates_of(model: onnx.ModelProto) -> dict[str, str]:
    """Module → its fate."""
    return {path: entry["fate"] for path, entry in tree_of(model).items()}


def modules_of(model: onnx.ModelProto) -> Callable[[onnx.NodeProto], set[str]]:
    """The modules in whose regions a node is, as the file format says: those whose calls did its work."""
    said = {entry.key: entry.value for entry in model.metadata_props}
    ran = {
        path: entry["calls"] for path, entry in json.loads(said.get("htp.modules", "{}")).items()
    }
    listed = json.loads(said.get("htp.callers", "{}"))

    def above(path: str) -> Iterator[str]:
        parts = path.split(".") if path else []
        return (".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1))

    def around(path: str, number: int) -> set[str]:
        near = next((up for up in above(path) if ran.get(up)), None)
        caller: Any = None if near is None else number // (ran.get(path, 1) // ran[near] or 1)
        if path in listed:
            caller = listed[path][number]
        found = {path, *(up for up in above(path) if not ran.get(up))}
        if isinstance(caller, list):
            return found | around(*caller)
        return found if caller is None or near is None else found | around(near, caller)

    def every(path: str, numbers: Iterable[int] | None = None) -> set[str]:
        chosen = range(max(ran.get(path, 1), 1)) if numbers is None else numbers
        return set().union(*(around(path, number) for number in chosen))

    def modules(node: onnx.NodeProto) -> set[str]:
        here, owners = {entry.key: entry.value for entry in node.metadata_props}, owners_of(node)
        if "htp.calls" in here:
            return set().union(
                *(every(path, calls) for path, calls in json.loads(here["htp.calls"]).items())
            )
        last = every(owners[-1], [int(here["htp.call"])]) if "htp.call" in here else set()
        return last.union(*(every(owner) for owner in owners if owner not in last))

    return modules


def untagged(model: onnx.ModelProto) -> list[str]:
    """Nodes that have no owner, by op type and first output."""
    return [
        f"{node.op_type} {list(node.output)[:1]}" for node in nodes_of(model) if not owners_of(node)
    ]


def tree_of(model: onnx.ModelProto) -> dict[str, dict[str, Any]]:
    said = {entry.key: entry.value for entry in model.metadata_props}
    return json.loads(said["htp.modules"])


def evaluate(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    had = {output.name for output in exposed.graph.output}
    names = dict.fromkeys(
        name for node in exposed.graph.node for name in node.output if name and name not in had
    )
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(
        exposed.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    outputs = [output.name for output in session.get_outputs()]
    return {**dict(zip(outputs, session.run(outputs, feeds), strict=True)), **feeds}


def with_branches_taken(model: onnx.ModelProto, feeds: dict[str, Array]) -> onnx.ModelProto:
    """The model with each ``If`` replaced by the nodes of the branch that these inputs take, to look into it."""
    while any(node.op_type == "If" for node in model.graph.node):
        values = evaluate(model, feeds)
        flat = onnx.ModelProto()
        flat.CopyFrom(model)
        del flat.graph.node[:]
        for node in model.graph.node:
            if node.op_type != "If":
                flat.graph.node.append(node)
                continue
            wanted = "then_branch" if bool(values[node.input[0]]) else "else_branch"
            body = next(attribute.g for attribute in node.attribute if attribute.name == wanted)
            flat.graph.initializer.extend(body.initializer)
            flat.graph.node.extend(body.node)
            for inner, outer in zip(body.output, node.output, strict=True):
                alias = flat.graph.node.add(op_type="Identity", input=[inner.name], output=[outer])
                alias.metadata_props.extend(node.metadata_props)
        model = flat
    return model


@dataclass
class Opened:
    """One file, run on one set of inputs."""

    nodes: list[onnx.NodeProto]
    owners: list[tuple[str, ...]]
    modules: list[set[str]]
    values: dict[str, Array]
    outputs: set[str]
    live: set[str] = field(default_factory=set)
    maker: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, model: onnx.ModelProto, given: list[Array]) -> Opened:
        feeds = dict(zip(input_names(model), given, strict=True))
        names = list(feeds)
        model = with_branches_taken(model, feeds)
        nodes = list(model.graph.node)
        outputs = {output.name for output in model.graph.output}
        owners, modules = [owners_of(node) for node in nodes], [*map(modules_of(model), nodes)]
        opened = cls(nodes, owners, modules, evaluate(model, feeds), outputs, set(names))
        for index, node in enumerate(nodes):
            reads = {*node.input, *(name for inner in inside(node) for name in inner.input)}
            opened.maker.update(dict.fromkeys(node.output, index))
            for name in reads:
                opened.readers[name].append(index)
            if node.op_type not in ("Shape", "Size") and not opened.live.isdisjoint(reads):
                opened.live.update(node.output)
        return opened

    def region(self, paths: Iterable[str]) -> set[int]:
        wanted = set(paths)
        return {
            index for index, modules in enumerate(self.modules) if "" in wanted or modules & wanted
        }

    def entering(self, paths: list[str]) -> Iterator[str]:
        region = self.region(paths)
        for index in sorted(region):
            for name in self.nodes[index].input:
                if name in self.live and self.maker.get(name, -1) not in region:
                    yield name

    def leaving(self, paths: list[str]) -> Iterator[tuple[str, list[int]]]:
        """Each tensor that leaves modules, and the nodes outside that read it."""
        region = self.region(paths)
        for index in sorted(region):
            # What a node does for several modules may be read by all of them, and by the blocks around them.
            also = self.region(
                block(owner, paths) for owner in self.owners[index] if not related(owner, paths)
            )
            for name in self.nodes[index].output:
                outside = [
                    reader
                    for reader in self.readers[name]
                    if reader not in region and reader not in also
                ]
                if name in self.live and (outside or name in self.outputs):
                    yield name, outside

    def made(self, paths: list[str]) -> list[Array]:
        names = (name for index in self.region(paths) for name in self.nodes[index].output)
        return [self.values[name] for name in names if name in self.values]


def input_names(model: onnx.ModelProto) -> list[str]:
    weights = {tensor.name for tensor in model.graph.initializer}
    return [entry.name for entry in model.graph.input if entry.name not in weights]


def inputs_of(model: onnx.ModelProto, kwargs: dict[str, Any]) -> list[Array]:
    """The inputs of a file, in its order; an exporter may have taken those away that nothing reads.

    TorchScript may name those that are left after what reads them. The file's signatures say which argument each is; if
    that is false, the file computes another result than PyTorch, and is not exact.
    """
    given, names = dict(named_leaves(kwargs)), input_names(model)
    if len(given) == len(names):
        return [*map(copied, given.values())]
    said = {entry.key: entry.value for entry in model.metadata_props}
    calls = json.loads(said.get("htp.signatures", "{}")).get("", [])
    arguments = {tensor: argument for argument, tensor in calls[0][0].items()} if calls else {}
    return [copied(given[name if name in given else arguments[name]]) for name in names]


def signatures_of(model: onnx.ModelProto) -> dict[str, tuple[Signature, ...]]:
    return signatures_from_json(
        {entry.key: entry.value for entry in model.metadata_props}["htp.signatures"]
    )


def named_wrongly(
    calls: Mapping[str, Sequence[Call]], model: onnx.ModelProto, values: Mapping[str, Array]
) -> Iterator[tuple[str, int, str]]:
    """``(module, call, tensor)`` for each tensor in a signature that has another value in the file than in PyTorch.

    What a call was given is paired with the names of its arguments by order, where there are as many of both.
    """
    for path, signatures in signatures_of(model).items():
        for nth, (call, signature) in enumerate(zip(calls[path], signatures, strict=True)):
            given = list(signature.inputs.values())
            pairs = [*zip(call.given, given, strict=True)] if len(call.given) == len(given) else []
            pairs += zip(call.returned, signature.outputs, strict=True)
            yield from (
                (path, nth, name)
                for array, name in pairs
                if name in values and not equal(values[name], array)
            )


def constants_of(model: onnx.ModelProto) -> dict[str, Array]:
    return {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}


def values_of(model: onnx.ModelProto, kwargs: dict[str, Any]) -> dict[str, Array]:
    """The tensors of a file when it is run on inputs of the model."""
    feeds = dict(zip(input_names(model), inputs_of(model, kwargs), strict=True))
    return {**constants_of(model), **evaluate(with_branches_taken(model, feeds), feeds)}


def inside(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    for body in bodies(node):
        yield from every_node(body.node)


def is_inside(path: str, other: str) -> bool:
    """Whether a module is in another one."""
    return path != other and (not other or path.startswith(other + "."))


def related(path: str, others: list[str]) -> bool:
    return any(
        not path
        or not other
        or (path + ".").startswith(other + ".")
        or (other + ".").startswith(path + ".")
        for other in others
    )


def block(owner: str, others: list[str]) -> str:
    """The largest module around an owner that is around none of the others."""
    parts = owner.split(".")
    around = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    return next(
        path for path in around if not any((other + ".").startswith(path + ".") for other in others)
    )


# --- the one against the other ---------------------------------------------------


class Judge:
    """One file against one model.

    Args:
        model: The model, as it was exported.
        kwargs: The inputs that it was exported with, by keyword.
        file: The exported file, or the model read from it.
        probes: Sets of inputs; one where a trace holds for the inputs alone that it was made with.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        kwargs: dict[str, Any],
        file: onnx.ModelProto | Path | str,
        probes: int = 2,
    ) -> None:
        self.model = model
        self.file = file if isinstance(file, onnx.ModelProto) else onnx.load(str(file))
        self.tree = tree_of(self.file)
        self.inputs = [kwargs, another(kwargs)][:probes]
        self.runs = [run_pytorch(model, inputs) for inputs in self.inputs]
        self.opened = [Opened.of(self.file, inputs_of(self.file, inputs)) for inputs in self.inputs]

    def faults(self) -> list[Fault]:
        """``(module, why)`` for every module that is not exact; empty for an exact file."""
        found = [("", f"node {name} has no owner") for name in untagged(self.file)]
        expected = {path for path, _ in self.model.named_modules()}
        found += [(path, "is no module of the model") for path in self.tree if path not in expected]
        for path in expected:
            if path not in self.tree:
                found.append((path, "is missing from htp.modules"))
            else:
                found += [(path, why) for why in [self.fault(path)] if why]
        for probe, (_, results) in enumerate(self.runs):
            names = [output.name for output in self.file.graph.output]
            for name, result in zip(names, results, strict=False):
                if not equal(self.opened[probe].values[name], result):
                    found.append(("", f"the file computes another {name} than PyTorch"))
        return found

    def fault(self, path: str) -> str:
        """Why one module is not exact; empty where it is."""
        fate, ran = self.tree[path]["fate"], [calls.get(path, []) for calls, _ in self.runs]
        times = max(map(len, ran))
        if self.tree[path].get("calls", 0) != times:
            return f"ran {times} times, not {self.tree[path].get('calls', 0)}"
        if fate == "uncalled" or not times:
            return (
                ""
                if fate == "uncalled" and not times
                else f"ran {times} times, and is said to be {fate}"
            )
        if fate == "identity":
            same = all(self._gives_back(call) for calls in ran for call in calls)
            return "" if same else "declared identity, and changes what it is given"
        if fate == "constant":
            return (
                "" if all(self._constant(path)) else "declared constant, and varies with the inputs"
            )
        if fate == "dead":
            return "" if all(self._dead(path)) else "declared dead, and the result depends on it"
        if fate not in ("computed", "fused"):
            return f"has the unknown fate {fate!r}"
        if fate == "fused":
            return self._not_fused(path, list(self.tree[path].get("with", [])))
        for probe in range(len(self.inputs)):
            why = self._border(probe, [path]) or self._missing(probe, path)
            if why:
                return why
        return ""

    def _gives_back(self, call: Call) -> bool:
        return all(any(equal(out, given) for given in call.given) for out in call.returned)

    def _constant(self, path: str) -> Iterator[bool]:
        """For each output of each call, whether it is the same on both probes."""
        one, other = (self.runs[probe][0].get(path, []) for probe in (0, -1))
        for first, second in zip(one, other, strict=False):
            yield from (equal(a, b) for a, b in zip(first.returned, second.returned, strict=False))

    def _dead(self, path: str) -> Iterator[bool]:
        """For each output of each call, whether another value of it leaves all results as they are."""
        calls, results = self.runs[0]
        for nth, call in enumerate(calls.get(path, [])):
            for place, out in enumerate(call.returned):
                if any(equal(out, given) for given in call.given):
                    yield True  # what it gives back unchanged is not its work
                    continue
                yield self._unneeded(path, nth, place, results)

    def _unneeded(self, path: str, nth: int, place: int, results: list[Array]) -> bool:
        try:
            _, changed = run_pytorch(self.model, self.inputs[0], (path, nth, place))
        except Exception:  # the changed value is no index any more: so it is needed
            return False
        return all(equal(a, b) for a, b in zip(results, changed, strict=True))

    def _not_fused(self, path: str, others: list[str]) -> str:
        if not others:
            return "declared fused, with nothing"
        for probe, (calls, _) in enumerate(self.runs):
            why = self._border(probe, [path, *others])
            if why:
                return f"with {others}: {why}"
            values = self.opened[probe].values.values()
            border = [
                array for call in calls.get(path, []) for array in (*call.given, *call.returned)
            ]
            # without a node of its own it can be nothing else
            own = self.opened[probe].region([path])
            if (
                own
                and border
                and all(any(equal(array, value) for value in values) for array in border)
            ):
                return "declared fused, and every tensor at its border is in the file"
        return ""

    def _border(self, probe: int, paths: list[str]) -> str:
        """Why the border of the joint region is not that of the modules."""
        opened, calls = self.opened[probe], self.runs[probe][0]
        if not opened.region(paths) and any(calls.get(path) for path in paths):
            return "no node belongs to it"
        given = [array for path in paths for call in calls.get(path, []) for array in call.given]
        returned = [
            array for path in paths for call in calls.get(path, []) for array in call.returned
        ]
        known = [array for path in paths for call in calls.get(path, []) for array in call.numbers]
        if not given and not returned:
            return ""  # a branch that these inputs do not take
        for name in opened.entering(paths):
            if not any(equal(opened.values[name], array) for array in (*given, *known)):
                return f"{name} enters, and is no input of it"
        for name, readers in opened.leaving(paths):
            if any(equal(opened.values[name], array) for array in (*returned, *given, *known)):
                continue
            if not self._is_made_around(probe, name, readers, paths):
                return f"{name} leaves, and is no output of it"
        return ""

    def _is_made_around(self, probe: int, name: str, readers: list[int], paths: list[str]) -> bool:
        """Whether a module around makes a tensor too, and reads it itself or gives it to those that do."""
        opened, calls = self.opened[probe], self.runs[probe][0]
        owners = [
            up
            for up in opened.owners[opened.maker[name]]
            if all(is_inside(path, up) for path in paths)
        ]

        def gets(module: str) -> bool:
            return any(
                equal(opened.values[name], array)
                for call in calls.get(module, [])
                for array in call.given
            )

        def may_read(reader: int, owner: str) -> bool:
            inner = (module for module in opened.modules[reader] if is_inside(module, owner))
            return owner in opened.owners[reader] or any(map(gets, inner))

        result = name in opened.outputs
        return any(
            all(may_read(reader, up) for reader in readers) and (not result or not up)
            for up in owners
        )

    def _missing(self, probe: int, path: str) -> str:
        """Which output of the module is not made in its region."""
        made, (calls, results) = self.opened[probe].made([path]), self.runs[probe]
        for nth, call in enumerate(calls.get(path, [])):
            for place, out in enumerate(call.returned):
                if any(equal(out, array) for array in (*made, *call.given)):
                    continue
                if not self._same_on_both(path, nth, place) and not self._unneeded_on(
                    probe, path, nth, place, results
                ):
                    return f"output {place} of call {nth} is not made in its region"
        return ""

    def _same_on_both(self, path: str, nth: int, place: int) -> bool:
        both = [calls.get(path, []) for calls, _ in self.runs]
        if len(both) < 2 or any(
            nth >= len(calls) or place >= len(calls[nth].returned) for calls in both
        ):
            return False
        one, other = both
        return equal(one[nth].returned[place], other[nth].returned[place])

    def _unneeded_on(
        self, probe: int, path: str, nth: int, place: int, results: list[Array]
    ) -> bool:
        try:
            _, changed = run_pytorch(self.model, self.inputs[probe], (path, nth, place))
        except Exception:
            return False
        return all(equal(a, b) for a, b in zip(results, changed, strict=True))


def inexact(
    model: torch.nn.Module, kwargs: dict[str, Any], file: onnx.ModelProto | Path | str
) -> list[Fault]:
    """``(module, why)`` for every module of the file that is not what PyTorch computed; empty for an exact file."""
    return Judge(model, kwargs, file).faults()
