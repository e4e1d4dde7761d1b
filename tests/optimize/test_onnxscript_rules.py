"""Level ``fused``: what onnxscript's rewriter cannot take stays as it is and is named, and the results stay right."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import htp_export
from htp_export.capabilities.optimize.onnxscript_rules import changed_rules
from htp_export.capabilities.optimize.registry import find
from htp_export.errors import HtpExportError, PassError, described
from htp_export.format import tags
from tests.graphs import array, ops, run, tagged

_NUMBERS: dict[str, Any] = {
    "low": np.float32(-0.5),
    "high": np.float32(0.5),
    "zeros": np.zeros(4, np.float32),
    "square": array(4, 4, seed=1),
    "kernel": array(4, 3, 3, 3, seed=2),
    "row": np.array([1, 192]),
    "parts": np.array([1, 2]),
    "third": np.array(2),
    "first": np.array(0),
}

# Each a chain that a rule of onnxscript matches, or folds, as the given opsets have it.
_IMAGE, _ROWS = "float[1, 3, 8, 8] x", "float[2, 4] x"
CHAINS: list[tuple[str, str, tuple[int, ...]]] = [
    # attributes that are inputs now
    (_IMAGE, "p = Pad <pads = [0, 0, 0, 0, 0, 0, 1, 1]> (x) y = Conv (p, kernel)", (7, 9, 10)),
    (
        _IMAGE,
        'p = Pad <mode = "reflect", pads = [0, 0, 1, 1, 0, 0, 1, 1]> (x) y = Conv (p, kernel)',
        (10,),
    ),
    (
        _IMAGE,
        "p = Pad <value = 1.0, pads = [0, 0, 1, 1, 0, 0, 1, 1]> (x) y = Conv (p, kernel)",
        (10,),
    ),
    (_IMAGE, "a = Clip <min = -1.0, max = 6.0> (x) y = Clip <min = 0.0, max = 0.5> (a)", (7, 10)),
    (_IMAGE, "a = Clip <min = -0.5, max = 0.5> (x) y = Relu (a)", (10,)),
    (_IMAGE, "a = Relu (x) y = Clip <min = 0.0, max = 0.5> (a)", (10,)),
    (
        _IMAGE,
        "a = Slice <starts = [1], ends = [7], axes = [2]> (x) y = Slice <starts = [1], ends = [3]> (a)",
        (9,),
    ),
    (
        _IMAGE,
        "a = Unsqueeze <axes = [0]> (x) b = Unsqueeze <axes = [1]> (a) y = Squeeze <axes = [0]> (b)",
        (11, 12),
    ),
    (_IMAGE, "a = Reshape (x, row) b = Squeeze <axes = [0]> (a) y = Reshape (b, row)", (12,)),
    # operators in a form that the opset does not have yet
    (_IMAGE, "a = Max (x, low) y = Min (a, high)", (8, 10, 11)),
    (_IMAGE, "a = Min (x, high) y = Max (a, low)", (8, 10, 11)),
    (_ROWS, "y = Gemm (x, square, zeros)", (7, 10, 11)),
    (
        _IMAGE,
        "s = SplitToSequence <axis = 1> (x, parts) a = SequenceAt (s, first) y = Relu (a)",
        (11, 12, 13),
    ),
    (
        "float[1, 4, 8] x",
        "s = SplitToSequence <axis = 1> (x, third) a = SequenceAt (s, first) y = Relu (a)",
        (12, 17),
    ),
    # a default that is another one now
    ("float[2, 3, 4] x", "a = Cast <to = 1> (x) b = Softmax (a) y = Cast <to = 1> (b)", (11, 12)),
]


def of_file(file: Path, **inputs: Any) -> np.ndarray:
    """The first output of a file, by ONNX Runtime."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


@pytest.mark.parametrize(
    ("given", "chain", "opset"),
    [(given, chain, opset) for given, chain, opsets in CHAINS for opset in opsets],
)
def test_rules_for_later_opsets_leave_what_is_written_in_another_form(
    given, chain, opset, tmp_path
):
    read = {
        name: numbers
        for name, numbers in _NUMBERS.items()
        if f"{name})" in chain or f"{name}," in chain
    }
    model = tagged(f"({given}) => (float y) {{ {chain} }}", opset=opset, **read)
    x = array(*(int(size) for size in given.partition("[")[2].partition("]")[0].split(",")))
    htp_export.optimize(model, tmp_path / "fused.onnx", level="fused")
    np.testing.assert_allclose(
        of_file(tmp_path / "fused.onnx", x=x), run(model, x=x)[0], rtol=1e-4, atol=1e-5
    )


def padded() -> ir.Model:
    """A padding as opset 10 has it, before a convolution."""
    given, chain, _ = CHAINS[0]
    return tagged(f"({given}) => (float y) {{ {chain} }}", opset=10, kernel=_NUMBERS["kernel"])


def test_nodes_that_a_rule_cannot_take_are_named_in_the_result(capsys, tmp_path):
    from htp_export.command.main import main

    found = htp_export.optimize(padded(), level="fused")
    assert found.left == {"n_p": "onnxscript's rules do not know Pad as opset 10 has it"}
    assert next(each for each in found.passes if each.left).name == "fuse_for_onnxruntime"
    assert {"n_p"} == {*next(each for each in found.to_dict()["passes"] if each["left"])["left"]}
    later = tagged(
        "(float[1, 3, 8, 8] x) => (float y) { p = Pad (x, sizes) y = Conv (p, kernel) }",
        opset=17, kernel=_NUMBERS["kernel"], sizes=np.array([0, 0, 0, 0, 0, 0, 1, 1]),
    )  # fmt: skip
    result = htp_export.optimize(later, level="fused")
    assert (result.left, ops(result.model)) == ({}, ["Conv"])
    ir.save(padded(), tmp_path / "padded.onnx")
    assert (
        main(
            [
                "optimize",
                str(tmp_path / "padded.onnx"),
                "-o",
                str(tmp_path / "out.onnx"),
                "--level",
                "fused",
            ]
        )
        == 0
    )
    assert (
        "node 'n_p' is left as before: onnxscript's rules do not know Pad"
        in capsys.readouterr().out
    )


class Fails:
    """Stands in for what a library does not expect; its text has an address, as Python's own ``repr`` has."""

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        object_with_address = object()
        raise IndexError(f"tuple index of {object_with_address} out of range")


def rule_of_padding() -> Any:
    from onnxscript import rewriter

    return next(rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule.name == "FuseConvPad")


def test_a_rule_that_fails_for_a_node_is_left_out_for_it(monkeypatch):
    monkeypatch.setattr(rule_of_padding(), "_condition_function", Fails())
    model = tagged(
        """(float[1, 3, 8, 8] x) => (float y) {
            p = Pad (x, sizes) c = Conv (p, kernel) n = Add (c, low) m = Mul (n, high) e = Relu (m) f = Relu (e)
            y = Gelu (f) }""",
        opset=20, kernel=_NUMBERS["kernel"], sizes=np.array([0, 0, 0, 0, 0, 0, 1, 1]), **{
            name: _NUMBERS[name] for name in ("low", "high")
        },
    )  # fmt: skip
    found = htp_export.optimize(model, passes=["fuse_for_onnxruntime"], level="fused")
    assert list(found.left) == ["n_c"]
    assert "FuseConvPad" in found.left["n_c"]
    assert "IndexError: tuple index of <object object> out of range" in found.left["n_c"]
    assert ops(found.model).count("Pad") == 1
    assert ops(found.model).count("Relu") == 1  # other rules go on
    x = array(1, 3, 8, 8)
    np.testing.assert_allclose(run(found.model, x=x)[0], run(model, x=x)[0], rtol=1e-5, atol=1e-6)


def test_a_constant_that_cannot_be_folded_stays(monkeypatch):
    from onnxscript.optimizer import _constant_folding

    monkeypatch.setattr(_constant_folding._reference_evaluator, "evaluate", Fails())
    model = tagged(
        "(float[4] x) => (float y) { h = Exp (zeros) y = Add (x, h) }", zeros=_NUMBERS["zeros"]
    )
    found = htp_export.optimize(model, passes=["fuse_for_onnxruntime"], level="fused")
    assert list(found.left) == ["n_h"]
    assert "onnxscript cannot fold it: IndexError" in found.left["n_h"]
    assert ops(found.model) == ["Exp", "Add"]


def test_consumers_that_an_abandoned_replacement_left_are_gone(monkeypatch):
    def begins(op: Any, x: ir.Value, **_others: Any) -> Any:
        op.Relu(x)
        raise IndexError

    monkeypatch.setattr(rule_of_padding()._replacement_pattern, "_function", begins)
    model = tagged(
        "(float[1, 3, 8, 8] x) => (float y) { r = Relu (x) p = Pad (r, sizes) y = Conv (p, kernel) }",
        opset=17, kernel=_NUMBERS["kernel"], sizes=np.array([0, 0, 0, 0, 0, 0, 1, 1]),
    )  # fmt: skip
    found = htp_export.optimize(model, passes=["fuse_for_onnxruntime"], level="fused")
    assert list(found.left) == ["n_y"]
    assert [use.node.op_type for use in found.model.graph[0].outputs[0].uses()] == ["Pad"]


def test_a_rewriter_that_fails_as_a_whole_is_undone_and_named(monkeypatch, caplog):
    from onnxscript.rewriter import ort_fusions

    def breaks(model: ir.Model) -> Any:
        model.graph.outputs.clear()
        raise RuntimeError("no such function")

    monkeypatch.setattr(ort_fusions, "optimize_for_ort", breaks)
    model = padded()
    found = htp_export.optimize(model, level="fused")
    assert found.rolled_back == {
        "fuse_for_onnxruntime": "it failed: RuntimeError: no such function"
    }
    assert "pass fuse_for_onnxruntime was undone" in caplog.text
    x = array(1, 3, 8, 8)
    np.testing.assert_allclose(run(found.model, x=x)[0], run(model, x=x)[0], rtol=1e-5, atol=1e-6)
    assert htp_export.load(found.model).hierarchy[""].fate == "computed"


def test_no_message_has_the_address_of_an_object(passes):
    class Breaks(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            raise ValueError(f"{self} cannot take {model.graph[0].op_type}")

    passes("breaks", level="exact")(lambda: ir.passes.Sequential(ir.passes.PassManager([Breaks()])))
    with pytest.raises(PassError) as raised:
        htp_export.optimize(padded(), passes="breaks")
    # what failed, not the passes around it
    assert "Breaks object> cannot take Pad" in str(raised.value)
    assert " at 0x" not in str(raised.value)
    assert " at 0x" not in described(ValueError(object()))
    assert str(HtpExportError(f"{object()} in stage at 0x10")) == "<object object> in stage at 0x10"


@pytest.mark.parametrize("level", ["exact", "tolerant", "fused"])
@pytest.mark.parametrize("opset", [10, 17, 20])
def test_numbers_near_zero_and_one_count_as_what_they_are(level, opset):
    """onnxscript's rules remove an addition of what is below 1e-8: the logarithm of a zero becomes infinite."""
    numbers = {"tiny": 1e-15, "small": 5e-9, "large": 1e8, "near": 1 + 5e-6}
    model = tagged(
        """(float[3] x) => (float y, float z, float v, float w) {
            a = Add (x, tiny) y = Log (a)
            b = Add (tiny, x) z = Sqrt (b)
            c = Sub (x, small) d = Mul (c, large) v = Identity (d)
            e = Mul (x, near) f = Sub (e, x) w = Mul (f, large) }""",
        opset=opset,
        **{name: np.float32(number) for name, number in numbers.items()},
    )
    x = np.float32([0, 1e-12, 3])
    found = run(htp_export.optimize(model, level=level).model, x=x)
    expected = [np.log(x + np.float32(1e-15)), np.sqrt(x + np.float32(1e-15))]
    expected += [
        (x - np.float32(5e-9)) * np.float32(1e8),
        (x * np.float32(1 + 5e-6) - x) * np.float32(1e8),
    ]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_onnxscript_is_as_it_was_afterwards():
    from onnx_ir.passes.common import shape_inference
    from onnxscript.optimizer._constant_folding import FoldConstantsPass
    from onnxscript.rewriter import pattern

    def changed() -> list[Any]:
        rule, matcher = pattern.RewriteRule, pattern.SimplePatternMatcher
        return [
            shape_inference._merge_func, FoldConstantsPass.process_node, rule.try_rewrite, matcher.match,
            matcher._match_constant,
        ]  # fmt: skip

    before, during = changed(), list[Any]()

    def interrupted() -> None:
        with changed_rules():
            during.extend(changed())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not {*map(id, during)} & {*map(id, before)}
    assert changed() == before


def test_other_threads_have_onnxscripts_own_rules():
    from onnxscript import optimizer

    def operators() -> list[str]:
        model = tagged(
            "(float[3] x) => (float y) { a = Add (x, tiny) y = Log (a) }",
            opset=20,
            tiny=np.float32(1e-15),
        )
        optimizer.optimize(model)
        return ops(model)

    with ThreadPoolExecutor(1) as others, changed_rules():
        assert others.submit(operators).result() == ["Log"]
        assert operators() == ["Add", "Log"]


# --- sequences and optional values ---

SEQUENCES: dict[str, str] = {
    # the body of the loop says no types, as exporters write it
    "loop": """s0 = SequenceEmpty ()
        s = Loop (i3, yes, s0) <body = b (int64 i, bool go, acc) => (on, more) {
            on = Identity (go) r = Gather (h, i) more = SequenceInsert (acc, r) }>
        y = ConcatFromSequence <axis = 0, new_axis = 1> (s)""",
    "branches": """s = If (yes) <
            then_branch = t () => (one) { one = SplitToSequence <axis = 0> (h, parts) },
            else_branch = e () => (two) { n = Neg (h) two = SequenceConstruct (n) }>
        y = ConcatFromSequence <axis = 0> (s)""",
    "optional": """o = If (k) <
            then_branch = t () => (one) { one = Optional (h) },
            else_branch = e () => (two) { n = Neg (h) two = Optional (n) }>
        v = OptionalGetElement (o) y = Sigmoid (v)""",
    "map": """s = SplitToSequence <axis = 0> (h, parts)
        m = SequenceMap (s) <body = b (float[rows, 4] e) => (float[rows, 4] f) { f = Exp (e) }>
        y = ConcatFromSequence <axis = 0> (m)""",
}


def of_sequences(name: str) -> ir.Model:
    text, weights = SEQUENCES[name], {"parts": np.array([1, 2]), "yes": np.array(True)}
    k = ", bool k" if "(k)" in text else ""
    weights = {key: numbers for key, numbers in weights.items() if key in text}
    return tagged(f"(float[3, 4] x{k}) => (float y) {{ h = Relu (x) {text} }}", opset=20, **weights)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_and_optional_values_keep_their_types_in_bodies(name, tmp_path):
    model, inputs = of_sequences(name), {"x": array(3, 4)}
    if len(model.graph.inputs) == 2:
        inputs["k"] = np.array(False)
    htp_export.optimize(model, tmp_path / "fused.onnx", level="fused")
    np.testing.assert_allclose(
        of_file(tmp_path / "fused.onnx", **inputs), run(model, **inputs)[0], rtol=1e-5
    )


def test_nodes_that_a_rule_writes_in_a_branch_have_owners() -> None:
    model = of_sequences("branches")
    changed = htp_export.optimize(model, passes="fuse_for_onnxruntime", level="fused").model
    nodes = [*changed.graph.all_nodes()]
    assert "Split" in [node.op_type for node in nodes]
    assert [node.op_type for node in nodes if tags.MODULE not in node.metadata_props] == []


class Bags(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = torch.nn.EmbeddingBag(20, 8, mode="sum"), torch.nn.Linear(8, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(words))


def test_an_embedding_bag_is_fused_in_silence(tmp_path, caplog, capfd, recwarn):
    words = torch.randint(0, 20, (4, 3))
    net = Bags().eval()
    htp_export.export(net, (words,), tmp_path / "bags.onnx", verbose=False)
    caplog.clear(), capfd.readouterr(), recwarn.clear()
    htp_export.optimize(tmp_path / "bags.onnx", tmp_path / "fused.onnx", level="fused")
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == []
    assert (*capfd.readouterr(), list(recwarn)) == ("", "", [])
    found = of_file(tmp_path / "fused.onnx", words=words.numpy())
    np.testing.assert_allclose(found, net(words).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["exact", "fused"])
def test_initializers_that_a_graph_takes_or_returns_are_no_news(level, caplog):
    model = tagged(
        "(float[4] x, float[4] v) => (float y, float[4] w) { h = Add (x, w) y = Add (h, v) }",
        w=array(4),
    )
    value = model.graph.inputs[1]
    value.const_value = ir.tensor(array(4), name="v")
    model.graph.initializers["v"] = value
    htp_export.optimize(model, level=level)
    assert caplog.text == ""


def test_what_is_left_is_said_by_a_plain_path(tmp_path: Path):
    ir.save(padded(), tmp_path / "padded.onnx")
    found = htp_export.optimize(
        tmp_path / "padded.onnx", tmp_path / "out.onnx", level="fused", verify=True
    )
    assert (list(found.left), found.rolled_back) == (["n_p"], {})


def test_an_output_that_is_left_out_is_a_change() -> None:
    x, skip, scale = (
        ir.val(name, ir.DataType.FLOAT, shape)
        for name, shape in (("x", [2, 3, 4]), ("skip", [2, 3, 4]), ("scale", [4]))
    )
    node = ir.node(
        "SkipLayerNormalization", [x, skip, scale], domain="com.microsoft", num_outputs=4
    )
    imports = {"": 20, "com.microsoft": 1}
    graph = ir.Graph([x, skip, scale], node.outputs[:1], nodes=[node], opset_imports=imports)
    make = find("fuse_for_onnxruntime").make
    results = [make()(ir.Model(graph, ir_version=10)) for _ in range(2)]
    assert [len(each.outputs) for each in graph] == [1]
    assert [result.modified for result in results] == [True, False]
