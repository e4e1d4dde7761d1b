"""The rule of owners after a change in ten sentences, those of docs/owners.md: each with a net, or the rule itself.

The docstring of each test is the sentence of the page; `test_the_page_has_these_sentences` compares them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export import tools
from htp_export.format.call_tree import CallTree
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.lineage.owner_rule import OwnerRule, Replacement, Work
from htp_export.lineage.tagging import Owned
from tests.nets import Holding, composed, spread, x

Tensor = torch.Tensor
Changed = Callable[..., htp_export.TaggedModel]
PAGE = Path(__file__).parents[2] / "docs" / "owners.md"
PLAIN = {"dynamo": True, "optimize": False}  # an export that merges and removes nothing
UNFOLDED = {"dynamo": False, "do_constant_folding": False}


@pytest.fixture
def changed(tmp_path: Path) -> Changed:
    """Exports a net, lets something change the file, and returns the changed model."""

    def run(
        net: nn.Module,
        inputs: dict[str, Any],
        change: Callable[[Path, Path], Any],
        **options: Any,
    ) -> htp_export.TaggedModel:
        file, output = tmp_path / "net.onnx", tmp_path / "changed.onnx"
        model = spread(net).eval()
        htp_export.export(model, (), file, kwargs=inputs, verbose=False, **options)
        change(file, output)
        return htp_export.load(output)

    return run


def optimized(level: str) -> Callable[[Path, Path], Any]:
    return lambda file, output: htp_export.optimize(file, output, level=level)


def found(tagged: htp_export.TaggedModel, op: str) -> list[tuple[tuple[str, ...], str]]:
    """The owners and the reason of each node of an operator, in order."""
    nodes = [node for node in tagged.nodes if node.op_type == op]
    return [(tagged.owners_of(node), node.metadata_props["htp.reason"]) for node in nodes]


def rule_of(*paths: str) -> OwnerRule:
    """The rule for modules that ran once, in this order."""
    modules = Hierarchy([ModuleInfo(path, "Module", 1) for path in paths])
    return OwnerRule(CallTree(modules), {path: place for place, path in enumerate(paths)})


@dataclass
class Graph:
    """A graph for the rule: the consumers of each node, none of which has values of the inputs."""

    readers: dict[int, list[int]]

    def consumers(self, node: int) -> list[int]:
        return self.readers.get(node, [])

    def producers(self, node: int) -> list[int]:
        return [other for other, readers in self.readers.items() if node in readers]

    def holders(self, node: int) -> list[int]:
        return []

    def is_live(self, node: int) -> bool:
        return False

    def reads_size(self, node: int) -> bool:
        return True


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).transpose(1, 2)


class Masked(Holding, q=nn.Linear(4, 4)):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.q(x).masked_fill(~(mask[..., None] > 0), -1e4)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logarithms = nn.Parameter(torch.zeros(4))

    def forward(self) -> Tensor:
        return self.logarithms.exp()


@pytest.mark.parametrize(
    ("change", "reason"), [(optimized("exact"), "scope"), (tools.onnxsim, "region")]
)
def test_one_module(changed: Changed, change: Callable[[Path, Path], Any], reason: str) -> None:
    """A node that replaces nodes of one module belongs to this module, and keeps the reason of these
    nodes; after another tool, the reason is the evidence.
    """
    net = nn.Sequential(Turned(), nn.Tanh())
    tagged = changed(net, {"input": x(2, 3, 4)}, change, **PLAIN)
    assert found(tagged, "Transpose") == [(("0",), reason)]


def test_shared(changed: Changed) -> None:
    """A node that replaces equal work of several modules belongs to all of them: `shared`."""
    net = composed(lambda net, x, mask: net.b(net.a(x, mask), mask), a=Masked(), b=Masked())
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    tagged = changed(net, {"x": x(2, 3, 4), "mask": mask}, optimized("exact"), **PLAIN)
    assert found(tagged, "Greater") == [(("a", "b"), "shared")]


def test_fused(changed: Changed) -> None:
    """A node that does a part of the work of several modules belongs to all of them: `fused`."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    tagged = changed(net, {"input": x(1, 3, 8, 8)}, optimized("tolerant"), **UNFOLDED)
    assert found(tagged, "Conv") == [(("0", "1"), "fused")]


def test_calls(changed: Changed) -> None:
    """It does so in the calls of the replaced nodes: equal calls of one module that were merged are
    the work of all these calls.
    """
    net = composed(lambda net, x: net.a(x).relu() * net.a(x).tanh(), a=nn.Linear(4, 4))
    tagged = changed(net, {"x": x(3, 4)}, optimized("exact"), **PLAIN)
    [gemm] = [node for node in tagged.nodes if node.op_type == "Gemm"]
    assert [(call.path, call.call) for call in tagged.work_of(gemm).calls] == [("a", 0), ("a", 1)]


def test_repeated() -> None:
    """If several modules shared a node, and its work is done anew for each of them, each new node
    belongs to the module of its result.
    """
    shared = Work(("a", "b"), reason="shared")
    mine, theirs = Work(("a",), reason="scope"), Work(("b",), reason="scope")
    replacements = [Replacement(1, [[shared, mine]]), Replacement(2, [[shared, theirs]])]
    owned = rule_of("", "a", "b").owners(replacements, {}, [], Graph({}))
    assert [owned[1].paths, owned[2].paths] == [("a",), ("b",)]


def test_absorbed(changed: Changed) -> None:
    """A removed node that returned its input unchanged leaves nothing, and work on constants and
    sizes is absorbed by no node.
    """
    net = composed(lambda net, x: net.drop(x) * net.table(), drop=nn.Dropout(), table=Table())
    tagged = changed(net, {"x": x(2, 4)}, optimized("exact"), **PLAIN)
    assert found(tagged, "Mul") == [(("",), "scope")]
    assert (tagged["drop"].fate, tagged["table"].fate) == ("identity", "constant")


def test_inserted(changed: Changed) -> None:
    """A new layout operator, cast or quantizer that replaces none of its kind, and any other new
    node that replaces none, serves its consumers and has their owners: `inserted`; without
    consumers it has the owners of its producers, or else of the node that holds its subgraph.
    """
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    tagged = changed(
        net,
        {"input": x(2, 4)},
        lambda file, output: tools.float16(file, output, keep_io_types=True),
        **PLAIN,
    )
    assert found(tagged, "Cast") == [(("0",), "inserted"), (("1",), "inserted")]


def test_sizes() -> None:
    """A new node that computes a size for several modules belongs to the innermost module around
    them that ran.
    """
    known = {1: Owned(("body.a",), "scope"), 2: Owned(("body.b",), "scope")}
    rule = rule_of("", "body", "body.a", "body.b")
    owned = rule.owners([], known, [0], Graph({0: [1, 2]}))
    assert owned[0] == Owned(("body",), "inserted")


def test_boundaries(changed: Changed) -> None:
    """A module that lost a tensor of its boundary is `fused` with the modules on the other side; see
    below.
    """
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh())
    tagged = changed(net, {"input": x(1, 3, 8, 8)}, optimized("tolerant"), **UNFOLDED)
    assert [tagged[path].fate for path in "012"] == ["fused", "fused", "computed"]
    assert [tagged.hierarchy[path].fused_with for path in "01"] == [("1",), ("0",)]


def test_unknown(tmp_path: Path) -> None:
    """A node whose owners the evidence does not decide is `unknown`, and belongs to the innermost
    module that is certain.
    """

    def layers(activation: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 3)))

    net = spread(layers(nn.Tanh())).eval()
    program = htp_export.export(net, (x(2, 4),), verbose=False)
    net = spread(layers(nn.Sigmoid()), seed=1).eval()  # another function, and other weights
    other = tmp_path / "other.onnx"
    htp_export.export(net, (x(2, 4),), other, dynamo=False, verbose=False)
    plain = htp_export.load(other).model.clone()
    plain.metadata_props.clear()
    for node in plain.graph:
        node.metadata_props.clear()
    stored = list(plain.graph.initializers.values())
    plain.graph.initializers.clear()
    for number, value in enumerate(stored):
        value.name = f"w{number}"
        plain.graph.initializers.add(value)
    tagged = htp_export.load(htp_export.carry(program, plain, require=0))
    assert found(tagged, "Sigmoid") == [(("",), "unknown")]  # only the root is certain


SENTENCES = (
    test_one_module,
    test_shared,
    test_fused,
    test_calls,
    test_repeated,
    test_absorbed,
    test_inserted,
    test_sizes,
    test_boundaries,
    test_unknown,
)


def test_the_page_has_these_sentences() -> None:
    section = PAGE.read_text().split("## After a change")[1].split("\n## ")[0]
    items = re.findall(r"^\d+\. (.*(?:\n   .*)*)", section, re.MULTILINE)
    shown = [" ".join(str(test.__doc__).split()) for test in SENTENCES]
    assert [" ".join(item.split()) for item in items] == shown
