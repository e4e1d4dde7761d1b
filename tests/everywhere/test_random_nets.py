"""What holds of every network, whatever is done with its file, holds of random ones.

``HTP_RANDOM_NETS="100:200 1100:1120" pytest -m slow tests/everywhere/test_random_nets.py`` tries other networks than
those below; each thousand is a family, see ``tests/random_nets.py``.
"""

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import htp_export
from htp_export import lora, tools
from htp_export.errors import InputError, RuleError, ToolError
from htp_export.format import tags
from htp_export.model.regions import all_values
from htp_export.model.tensor_names import rename
from htp_export.runtime.faulty_optimizers import safe_entries
from htp_export.weights.rebuilding import rebuilt
from tests.exporting import quick
from tests.extract.test_cutting import run_file, wrong_parts
from tests.handmade import stripped
from tests.nets import EXPORTERS
from tests.random_nets import RandomNet
from tests.truth import (
    Array,
    equal,
    inexact,
    input_names,
    inputs_of,
    named_wrongly,
    run_pytorch,
    untagged,
    values_of,
)

_RANGES = os.environ.get("HTP_RANDOM_NETS", "2:40 1000:1006 2000:2006 3000:3006 3013:3014").split()
_SWEPT = itertools.chain.from_iterable(range(*map(int, each.split(":"))) for each in _RANGES)
# small ones always
SEEDS = [0, 2015, *_SWEPT]


@dataclass
class Case:
    """A network, its file, and a folder to write to."""

    net: RandomNet
    kwargs: dict[str, torch.Tensor]
    file: Path
    folder: Path
    _written: list[Path] = field(default_factory=list)

    def new(self) -> Path:
        """The path of a file to write."""
        self._written.append(self.folder / f"{len(self._written)}.onnx")
        return self._written[-1]

    @functools.cached_property
    def feeds(self) -> dict[str, Array]:
        file = onnx.load(str(self.file), load_external_data=False)
        return dict(zip(input_names(file), inputs_of(file, self.kwargs), strict=True))

    def results(self, file: Path) -> list[Array]:
        return run_file(file, self.feeds)

    @functools.cached_property
    def expected(self) -> list[Array]:
        return self.results(self.file)

    def other_results(self, file: Path) -> list[str]:
        """Empty if a file computes what the exported one does."""
        found = self.results(file)
        return [] if all(map(equal, found, self.expected)) else ["other results"]

    def far(self, file: Path, share: float) -> list[str]:
        """Empty if results, as ONNX Runtime computes them for users, differ by no more than a share of the largest."""
        most = max(float(np.abs(array).max()) for array in self.expected)
        options = onnxruntime.SessionOptions()
        for key, value in safe_entries(htp_export.load(file).model).items():
            options.add_session_config_entry(key, value)
        session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        pairs = zip(session.run(None, self.feeds), self.expected, strict=True)
        off = max(
            float(np.nan_to_num(np.abs(one - other), nan=np.inf).max()) for one, other in pairs
        )
        return (
            []
            if off <= share * most
            else [f"results differ by {off:.2g}, the largest is {most:.2g}"]
        )

    def faults(self, file: Path) -> list[Any]:
        """Empty if a file computes what the exported one does, and `verify` agrees; no node is without an owner."""
        result = htp_export.verify(self.net, file, (), self.kwargs)
        return [
            *self.other_results(file),
            *untagged(onnx.load(str(file))),
            *([] if result.ok else [result.summary]),
        ]

    @functools.cached_property
    def once(self) -> list[str]:
        """The modules with a region that ran once, and not in a branch, in a mixed order."""
        tagged = htp_export.load(self.file)
        paths = [
            path
            for path in tagged
            if path
            and tagged[path].fate == "computed"
            and tagged.hierarchy[path].calls < 2
            and any(node.graph is tagged.model.graph for node in tagged[path].nodes)
        ]
        return sorted(paths, key=lambda path: path[::-1])


Property = Callable[[Case], Iterator[Any]]
"""What is wrong of a case; nothing, if the property holds."""

HOLDS: dict[str, Property] = {}


def holds(check: Property) -> Property:
    HOLDS[check.__name__] = check
    return check


@holds
def owners_are_exact(case: Case) -> Iterator[Any]:
    yield from inexact(case.net, case.kwargs, case.file)


@holds
def signatures_name_what_modules_take_and_give(case: Case) -> Iterator[Any]:
    """Each tensor has the value that PyTorch saw; a result without a name is one that nothing reads, or is gone."""
    calls, expected = run_pytorch(case.net, case.kwargs)
    file = onnx.load(str(case.file))
    yield from named_wrongly(calls, file, values_of(file, case.kwargs))
    tagged = htp_export.load(case.file)
    for path, signatures in tagged.signatures.items():
        for nth, signature in enumerate(signatures):
            has_nodes = tagged[path].fate == "computed" and tagged[path].call(nth).nodes
            for place in [
                place for place, name in enumerate(signature.outputs) if name is None and has_nodes
            ]:
                found = run_pytorch(case.net, case.kwargs, (path, nth, place))[1]
                if not all(map(equal, found, expected)):
                    yield path, nth, place, "is read, and has no name"


@holds
def modules_alone_give_what_they_give_in_pytorch(case: Case) -> Iterator[Any]:
    yield from wrong_parts(case.net, case.kwargs, case.file, case.new(), sizes=True)


@holds
def verify_agrees(case: Case) -> Iterator[Any]:
    for isolated in (False, True):
        result = htp_export.verify(case.net, case.file, (), case.kwargs, isolated=isolated)
        if not result.ok or "wrong" in result.summary:
            yield result.summary
    if not htp_export.compare(case.file, case.file, case.feeds).ok:
        yield "compare"


def optimized(level: Any) -> Property:
    def check(case: Case) -> Iterator[Any]:
        htp_export.optimize(case.file, smaller := case.new(), level=level)
        yield from case.faults(smaller)
        if level != "fused":  # there, work crosses the borders of modules
            # made by nodes outside, into which its own went
            elsewhere = "every tensor at its border is in the file"
            yield from (
                fault
                for fault in inexact(case.net, case.kwargs, smaller)
                if elsewhere not in fault[1]
            )

    return check


def run_by(tool: Callable[..., Any], **options: Any) -> Property:
    def check(case: Case) -> Iterator[Any]:
        try:
            tool(case.file, made := case.new(), **options)
        except ToolError as error:
            if not re.search(
                "failed on this model|made a model of this one that is not valid", str(error)
            ):  # by itself
                raise
        else:
            yield from case.faults(made)

    return check


HOLDS.update({f"optimized_{level}": optimized(level) for level in ("exact", "tolerant", "fused")})
HOLDS.update(
    {
        "onnxruntime_basic": run_by(tools.onnxruntime, level="basic"),
        "onnxruntime_extended": run_by(tools.onnxruntime, level="extended"),
        **{
            name: run_by(getattr(tools, name))
            for name in ("onnxslim", "onnxsim", "onnxoptimizer", "onnxscript")
        },
    }
)


@holds
def tags_that_were_lost_come_back(case: Case) -> Iterator[Any]:
    htp_export.carry(case.file, stripped(ir.load(case.file)), tagged := case.new())
    yield from inexact(case.net, case.kwargs, tagged)
    without_names = stripped(ir.load(case.file))
    for place, value in enumerate(
        [*without_names.graph.initializers.values(), *all_values(without_names.graph)]
    ):
        if not value.is_graph_input() and not value.is_graph_output():
            rename(value, f"tensor{place}")
    for node in without_names.graph.all_nodes():
        node.name = None
    found = htp_export.carry(case.file, without_names, data=case.feeds).model.graph.all_nodes()
    for node, true in zip(found, ir.load(case.file).graph.all_nodes(), strict=True):
        if node.metadata_props[tags.REASON] != "unknown" and owners_of(node) != owners_of(true):
            yield node.op_type, owners_of(node), owners_of(true)


def owners_of(node: ir.Node) -> set[str]:
    return {*tags.owners_of(node.metadata_props)}


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """A file that is not optimised transposes the weights of all products: it has none to be quantized."""
    try:
        yield
    except InputError as error:
        if not re.search(
            "no operator of module .* takes|nothing here multiplies with stored weights", str(error)
        ):
            raise


def in_precision(precision: str, share: float) -> Property:
    def check(case: Case) -> Iterator[Any]:
        with without_weights():
            htp_export.quantize(case.file, precision, small := case.new(), data=case.feeds)
            yield from (*case.far(small, share), *untagged(onnx.load(str(small))))

    return check


PRECISIONS = {
    "fp16": 0.05,
    "int8-weights": 0.2,
    "int4": 2,
    "int8-dynamic": 0.5,
    "u8s8": 2,
    "auto": 2,
}
HOLDS.update({f"in_{name}": in_precision(name, share) for name, share in PRECISIONS.items()})


@holds
def a_precision_changes_the_module_of_its_rule_alone(case: Case) -> Iterator[Any]:
    tagged = htp_export.load(case.file)
    for path in case.once[:2]:
        try:
            htp_export.quantize(case.file, {path: "int8-weights"}, small := case.new())
        except InputError:  # it has no weights
            continue
        inside = {value.name for node in tagged[path].nodes for value in node.outputs}
        after = {str(node) for node in _nodes(small)}
        yield from (
            (path, node.name)
            for node in _nodes(case.file)
            if str(node) not in after and node.output[0] not in inside
        )


@holds
def precisions_may_follow_each_other(case: Case) -> Iterator[Any]:
    for first, second in (
        ("u8s8", "fp16"),
        ("int4", "fp16"),
        ("int8-dynamic", "fp16"),
        ("fp16", "int8-weights"),
    ):
        with without_weights():  # or what the first made has none that the second takes
            htp_export.quantize(case.file, first, once := case.new(), data=case.feeds)
            htp_export.quantize(once, second, twice := case.new())
            yield from (
                (first, second, why)
                for why in (*case.far(twice, 2), *untagged(onnx.load(str(twice))))
            )


@holds
def functions_and_back_is_the_same_graph(case: Case) -> Iterator[Any]:
    htp_export.functions(case.file, "*,**", nested := case.new())
    htp_export.inline(nested, flat := case.new())
    yield from (*case.other_results(nested), *case.other_results(flat))
    yield from [] if _nodes(case.file) == _nodes(flat) else ["another graph"]


def _nodes(file: Path) -> list[onnx.NodeProto]:
    """The nodes of a file, their metadata in order."""
    nodes = onnx.load(str(file)).graph.node
    for node in nodes:
        entries = sorted(node.metadata_props, key=lambda entry: entry.key)
        del node.metadata_props[:]
        node.metadata_props.extend(entries)
    return list(nodes)


@holds
def a_module_can_be_taken_out_and_put_back(case: Case) -> Iterator[Any]:
    for path in case.once[:3]:
        htp_export.extract(case.file, path, part := case.new())
        htp_export.splice(case.file, path, part, whole := case.new())
        yield from (
            (path, why)
            for why in (*case.other_results(whole), *inexact(case.net, case.kwargs, whole))
        )


@holds
def stages_give_what_the_whole_gives(case: Case) -> Iterator[Any]:
    found = htp_export.partition(case.file, 2, case.folder / "stages").run(case.feeds)
    yield from [] if all(map(equal, found.values(), case.expected)) else ["other results"]


@holds
def names_by_module_change_nothing_else(case: Case) -> Iterator[Any]:
    htp_export.rename(case.file, named := case.new())
    yield from (*case.other_results(named), *inexact(case.net, case.kwargs, named))


@holds
def taps_are_hooks(case: Case) -> Iterator[Any]:
    calls, _ = run_pytorch(case.net, case.kwargs)
    paths = [path for path in case.once if len(calls[path][0].returned) == 1][:6]
    if not paths:
        return
    htp_export.tap(
        case.file, {f"tap {path}": [f"{path}:out"] for path in paths}, tapped := case.new()
    )
    found = case.results(tapped)[len(case.expected) :]
    yield from (
        path
        for path, array in zip(paths, found, strict=True)
        if not equal(array, calls[path][0].returned[0])
    )
    htp_export.untap(tapped, output=(untapped := case.new()))
    yield from [] if _nodes(untapped) == _nodes(case.file) else ["another graph"]


@holds
def steering_by_nothing_changes_nothing(case: Case) -> Iterator[Any]:
    for path in case.once[:2]:
        try:
            htp_export.steer(case.file, [f"{path}:out"], steered := case.new())
        except InputError:  # the tensor stands for two
            continue
        yield from case.other_results(steered)


@holds
def places_change_no_results(case: Case) -> Iterator[Any]:
    htp_export.place(
        case.file, {".": "cpu", **dict.fromkeys(case.once[:1], "gpu")}, placed := case.new()
    )
    yield from case.other_results(placed)


@holds
def adapters_that_are_not_given_change_nothing(case: Case) -> Iterator[Any]:
    layers = [path for path in case.once if type(case.net.get_submodule(path)) is torch.nn.Linear]
    if layers:
        lora.insert(case.file, layers, adaptable := case.new())
        yield from case.other_results(adaptable)


@holds
def what_is_pruned_runs(case: Case) -> Iterator[Any]:
    for value in (0.5, "channels:0.5"):
        try:
            htp_export.prune(case.file, {".": value}, small := case.new())
        except RuleError:  # nothing can be cut, and it says why
            continue
        case.results(small)
        yield from untagged(onnx.load(str(small)))


@holds
def weights_are_made_of_parameters_as_their_recipes_say(case: Case) -> Iterator[Any]:
    state = {name: tensor.numpy() for name, tensor in case.net.state_dict().items()}
    for value, tensor in rebuilt(htp_export.load(case.file), state).tensors.items():
        if not np.array_equal(value.const_value.numpy(), tensor.numpy()):  # type: ignore[union-attr]
            yield value.name


@holds
def costs_add_up(case: Case) -> Iterator[Any]:
    result = htp_export.cost(
        case.file, shapes={name: array.shape for name, array in case.feeds.items()}
    )
    yield from result.uncounted
    if result.modules[""].parameters > sum(each.numel() for each in case.net.parameters()):
        yield "more parameters than the model has"
    if result.modules[""].nodes != len(htp_export.load(case.file).nodes):
        yield "another number of nodes"


@holds
def reports_are_made(case: Case) -> Iterator[Any]:
    for report in (htp_export.nodes, htp_export.forensics, htp_export.info, htp_export.fingerprint):
        result = report(case.file)
        yield from [] if str(result) and result.to_dict() else [report.__name__]
    htp_export.view(case.file, page := case.folder / "page.html")
    yield from [] if page.stat().st_size else ["view"]
    if htp_export.profile(case.file, case.feeds, runs=1, warmup=0).end_to_end_ms <= 0:
        yield "profile"


@pytest.mark.parametrize(
    ("seed", "exporter"),
    quick(itertools.product(SEEDS, EXPORTERS), (SEEDS[0], "torchscript"), (SEEDS[1], "dynamo")),
)
@pytest.mark.parametrize("name", HOLDS)
def test_it_holds_of_every_network(name, seed, exporter, shared_files, tmp_path):
    net = RandomNet(seed)
    if not net.is_for(exporter):
        pytest.skip("TorchScript knows no torch.cond")
    file = shared_files.random_net(seed, exporter)
    sizes = onnx.load(str(file), load_external_data=False).graph.input[0].type.tensor_type.shape.dim
    others = tuple(
        size.dim_value or other for size, other in zip(sizes, (3, 12, 16, 12), strict=False)
    )  # than at export
    assert [*HOLDS[name](Case(net, net.inputs(others), file, tmp_path))] == []
