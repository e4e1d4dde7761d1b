"""What `tap` adds to a file and takes off again, what stays as it was, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError
from tests.exporting import BOTH
from tests.nets import NETS, Holding, ready
from tests.tap.test_taps_are_hooks import hooks, session_of


def run(file: Any, feed: dict[str, Any]) -> dict[str, Any]:
    session = session_of(file)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feed), strict=True))


def places(tagged: htp_export.TaggedModel) -> dict[str, str]:
    """Every tensor that the file has, as a tap with a name."""
    found = {}
    for path in tagged.paths:
        for each in tagged.tensors(path):
            if not each.problem:
                found[f"tap.{len(found)}"] = each.place
    return found


@pytest.mark.long
@BOTH
@pytest.mark.parametrize(
    "name", ["conv_bn_relu", "cond", "modules_in_branches", "two_parents_in_a_loop"]
)
def test_a_tapped_file_says_of_its_modules_what_it_did_and_without_taps_it_is_the_file(
    name, exporter, shared_files, tmp_path
):
    if exporter in NETS[name].skip:
        pytest.skip("torch does not export it")
    file = shared_files.net(name, exporter)
    before = htp_export.load(file)
    wanted = places(before)
    assert wanted
    htp_export.tap(file, wanted, tmp_path / "tapped.onnx")
    tapped = htp_export.load(tmp_path / "tapped.onnx")
    assert [value.name for value in tapped.results] == [
        value.name for value in before.model.graph.outputs
    ]
    assert {tap: list(each.places) for tap, each in tapped.taps.items()} == {
        tap: [p] for tap, p in wanted.items()
    }
    assert tapped.signatures == before.signatures
    assert dict(tapped.hierarchy.items()) == dict(before.hierarchy.items())
    for path in before.paths:
        for side in ("inputs", "outputs"):
            ends = [
                [value.name for value in getattr(each[path], side)] for each in (before, tapped)
            ]
            assert ends[0] == ends[1], (path, side)
    assert not tapped.untagged
    assert (
        htp_export.contamination(tapped.model).after == htp_export.contamination(before.model).after
    )
    for folder in ("back", "saved"):
        (tmp_path / folder).mkdir()
    htp_export.untap(tmp_path / "tapped.onnx", None, tmp_path / "back" / "net.onnx")
    before.save(tmp_path / "saved" / "net.onnx")
    assert (tmp_path / "back" / "net.onnx").read_bytes() == (
        tmp_path / "saved" / "net.onnx"
    ).read_bytes()
    first = next(iter(wanted))
    rest = htp_export.untap(tmp_path / "tapped.onnx", first)
    assert set(rest.tagged.taps) == wanted.keys() - {first}


def test_taps_in_branches_are_given_by_the_branch_that_runs_and_empty_by_the_other(
    shared_files, tmp_path
):
    model, _ = NETS["modules_in_branches"].build()
    tagged = htp_export.load(shared_files.net("modules_in_branches", "dynamo"))
    [name] = [value.name for value in tagged.model.graph.inputs]
    tapped = htp_export.tap(
        tagged, ["block.fc:out", "both#0:out", "both#1:out", "act:in"], tmp_path / "tapped.onnx"
    )
    onnx.checker.check_model(str(tmp_path / "tapped.onnx"))
    x = torch.ones(2, 4)
    with torch.no_grad():
        high = {"block.fc:out": model.block.fc(x), "both#0:out": model.both(model.block(x).cos())}
        twice = model.both(model.both(-x))
        low = {"both#0:out": model.both(-x), "both#1:out": twice, "act:in": twice}
    for given, expected in ((x, high), (-x, low)):  # the sum decides
        found = run(tmp_path / "tapped.onnx", {name: given.numpy()})
        for place, tensor in expected.items():
            np.testing.assert_allclose(found[place], tensor, atol=1e-5)
        assert [tap for tap, value in found.items() if not value.size] == [
            place for place in ("block.fc:out", "both#1:out", "act:in") if place not in expected
        ]
    optimized = htp_export.optimize(tapped, level="fused")
    again = run(optimized, {name: np.ones((2, 4), np.float32)})
    assert again["both#0:out"].shape == (2, 4)


class Scans(Holding, fc=nn.Linear(4, 4), act=nn.Tanh()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.scan import scan

        def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = self.act(self.fc(state) + row)
            return state, state * 2

        state, rows = scan(step, x[0], x)
        return state + rows.sum(0)


@pytest.mark.long
def test_a_tap_in_a_scan_has_what_each_step_gave_and_without_it_the_file_is_as_before(tmp_path):
    model, x, file = ready(Scans()), torch.linspace(-1, 1, 12).reshape(3, 4), tmp_path / "scan.onnx"
    htp_export.export(model, (x,), file, dynamo=True, verbose=False)
    assert "Scan" in [node.op_type for node in htp_export.load(file).model.graph]
    tapped = htp_export.tap(file, ["fc:in", "fc:out", "act:out"], tmp_path / "tapped.onnx")
    onnx.checker.check_model(str(tmp_path / "tapped.onnx"))
    state = x[0]
    with torch.no_grad():
        rows = [(state, model.fc(state), state := model.act(model.fc(state) + row)) for row in x]
    [name] = [value.name for value in tapped.model.graph.inputs]
    found = run(tmp_path / "tapped.onnx", {name: x.numpy()})
    for place, expected in zip(
        ("fc:in", "fc:out", "act:out"), zip(*rows, strict=True), strict=True
    ):
        np.testing.assert_allclose(found[place], torch.stack(expected), atol=1e-6)
    [only] = htp_export.untap(tapped, ["fc:in", "act:out"]).model.graph.outputs[1:]
    assert only.name == "fc:out"
    htp_export.untap(tapped, None, tmp_path / "back.onnx")
    htp_export.load(file).save(tmp_path / "saved.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "saved.onnx").read_bytes()
    with pytest.raises(InputError, match="a branch or a loop body"):
        htp_export.steer(file, "fc:out")


@BOTH
def test_a_tapped_file_that_is_optimised_has_the_modules_of_the_optimised_file(exporter, tmp_path):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    net = ready(nn.Sequential(inner, nn.Linear(4, 2)))
    file = tmp_path / "net.onnx"
    htp_export.export(net, (torch.randn(2, 4),), file, dynamo=exporter == "dynamo", verbose=False)
    tapped = htp_export.tap(file, ["0.1:out", "0.2:in", "0:in"])
    plain, kept = (
        htp_export.optimize(file, level="exact").tagged,
        htp_export.optimize(tapped, level="exact").tagged,
    )
    assert kept.taps.keys() == {"0.1:out", "0.2:in", "0:in"}
    assert len(kept.results) == 1
    assert [info.fate for info in plain.hierarchy.values()] == [
        info.fate for info in kept.hierarchy.values()
    ]
    for path in plain.paths:
        sides = [
            (len(each[path].inputs), len(each[path].outputs), len(each[path].nodes))
            for each in (plain, kept)
        ]
        assert sides[0] == sides[1] or not path, path
    assert [value.name for value in kept["0"].outputs] == [
        value.name for value in plain["0"].outputs
    ]


class Two(Holding, fc=nn.Linear(4, 3)):
    """Gives back two tensors, the second of which is its input."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fc(x * scale), x


class Net(Holding, two=Two(), act=nn.ReLU(), idle=nn.ModuleList()):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h, x = self.two(x, scale)
        return self.act(h) + self.two(x.sin(), scale)[0]


@pytest.fixture(scope="module", params=["dynamo", "torchscript"])
def net(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, dict[str, Any]]:
    torch.manual_seed(0)
    model, x, scale = Net().eval(), torch.randn(2, 4), torch.randn(4)
    file = tmp_path_factory.mktemp("net") / "net.onnx"
    htp_export.export(
        model,
        (x, scale),
        file,
        dynamo=request.param == "dynamo",
        input_names=["x", "scale"],
        verbose=False,
    )
    return model, file, {"x": x, "scale": scale}


def test_calls_arguments_positions_inputs_and_outputs_of_the_graph_are_tapped_and_a_tensor_twice(
    net,
):
    model, file, inputs = net
    with hooks(model) as seen, torch.no_grad():
        model(**inputs)
    wanted = {
        ".:in": "#0:in[x]", ".:in[scale]": "#0:in[scale]", ".:out": "#0:out[0]", "two#0:in": "two#0:in[x]",
        "two#0:out[1]": "two#0:out[1]", "two#1:in[scale]": "two#1:in[scale]", "two.fc#1:out": "two.fc#1:out[0]",
        "two.fc#0:out": "two.fc#0:out[0]", "act:in": "act#0:in[input]",
    }  # fmt: skip
    tapped = htp_export.tap(file, list(wanted))
    found = run(tapped, {name: value.numpy() for name, value in inputs.items()})
    for name, place in wanted.items():
        np.testing.assert_allclose(found[name], seen[place], atol=1e-6, err_msg=name)
    every = htp_export.tap(file, "two:out, two.fc:out, !two.fc#0")
    assert [each.name for each in every.tensors] == ["two#0:out", "two#1:out", "two.fc#1:out"]
    every = htp_export.tap(file, "**:out")
    assert {each.name for each in every.tensors} == {
        ".:out",
        "act:out",
        *(f"two{n}:out" for n in ("#0", "#1", ".fc#0", ".fc#1")),
    }
    joined = htp_export.tap(file, {"h": ["two#0:in", "two.fc#0:out"]}, concat=1)
    found = run(joined, {name: value.numpy() for name, value in inputs.items()})
    np.testing.assert_allclose(
        found["h"], torch.cat([inputs["x"], seen["two.fc#0:out[0]"]], 1), atol=1e-6
    )
    assert [str(each.kind) for each in joined.tensors] == ["FLOAT[2,7]"]
    assert htp_export.verify(model, joined, kwargs=inputs).ok


# Places that cannot be read, or that are not there, are in test_wrong_input.py.
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ({"scale": "act:out"}, {}, "has a tensor 'scale' already"),
    ({"h": "two:out"}, {}, "'h' names 2 tensors"),
    ({"h": ["act:out", "two#0:in"]}, {"concat": 0}, "tensors differ in axis 1 too"),
    ({"h": ["act:out", ".:in[scale]"]}, {"concat": 0}, "of different type or rank"),
    ({"h": ["act:out", "act:in"]}, {"concat": 2}, "concat 2: the rank of 'h' is 2"),
    ({"h": "act:out"}, {"concat": 9}, "concat 9: the rank of 'h' is 2"),
    ({"h": "act:out"}, {"concat": -3}, "concat -3: the rank of 'h' is 2"),
    ({"h": "act:out"}, {"concat": "1"}, "concat '1': it is a whole number"),
    (["act:out"], {"concat": 0}, "give a mapping from names to places"),
    ("idle:out", {}, "module 'idle' has no such output; it has: none, as it never ran"),
    ({}, {}, "no place is given"),
    ("act:out, !act", {}, "excludes every tensor"),
]


@pytest.mark.parametrize(("wanted", "options", "problem"), REFUSED)
def test_a_place_that_is_not_there_is_refused_with_what_to_do(
    wanted, options, problem, net, tmp_path
):
    with pytest.raises(InputError) as raised:
        htp_export.tap(net[1], wanted, tmp_path / "out.onnx", **options)
    assert problem in str(raised.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="is no tap of the model; it has none"):
        htp_export.untap(net[1], "h")


@BOTH
def test_of_many_modules_those_without_a_tensor_are_named_and_the_rest_is_tapped(
    exporter, shared_files
):
    file = shared_files.net("conv_bn_relu", exporter)
    tagged = htp_export.load(file)
    # the convolution has no result of its own: the one of its normalization is computed at once
    assert tagged.hierarchy["0"].fused_with == ("1",)
    tapped = htp_export.tap(file, "**:out")
    assert [each.name for each in tapped.tensors] == [".:out", "1:out", "2:out", "3:out"]
    assert "not in the file: 0:out (it was merged with '1'" in tapped.summary
    with pytest.raises(InputError, match="0:out: it was merged with '1'"):
        htp_export.tap(file, "0:out")


def test_a_tensor_that_an_optimiser_took_is_refused_with_the_module_and_a_tap_before_stays(
    shared_files, tmp_path
):
    file = shared_files.net("conv_bn_relu", "torchscript")
    tagged = htp_export.load(file)
    gone = next(path for path in tagged.paths if tagged.hierarchy[path].fused_with)
    [other] = tagged.hierarchy[gone].fused_with[:1]
    with pytest.raises(
        InputError, match=rf"merged with .*{other!r}.*; tap the file before it is optimised"
    ):
        htp_export.tap(
            file,
            f"{gone}:*"[: len(gone)] + (":out" if not tagged.tensors(gone)[-1].values else ":in"),
        )


class Twins(Holding, one=nn.Sequential(nn.Tanh()), two=nn.Sequential(nn.Tanh())):
    """Two modules that compute the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) - 2 * self.two(x).sin()


def test_a_vector_is_refused_at_a_tensor_that_another_module_gives_too(tmp_path):
    file = tmp_path / "twins.onnx"
    htp_export.export(Twins().eval(), (torch.randn(2, 4),), file, verbose=False, optimize=False)
    assert htp_export.steer(file, "one.0:out").tensors
    merged = htp_export.optimize(file, level="exact")
    assert merged.tagged.tensors("one")[-1].tensor == merged.tagged.tensors("two")[-1].tensor
    for place in ("one:out", "one.0:out"):
        with pytest.raises(
            InputError,
            match=r"the same tensor for two:out, two\.0:out, and cannot change only one",
        ):
            htp_export.steer(merged, place)


def test_the_map_stays_true(tmp_path):
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    file = tmp_path / "net.onnx"
    htp_export.export(net, (torch.randn(1, 64),), file, verbose=False)
    mapped = htp_export.embed_map(file)
    tapped = htp_export.tap(mapped, "0:out")
    assert "htp.map" in tapped.model.metadata_props
    assert (
        htp_export.untap(tapped).model.metadata_props["htp.map"] == mapped.metadata_props["htp.map"]
    )
    carried = htp_export.tools.onnxruntime(tapped.model, level="basic")
    assert [value.name for value in carried.model.graph.outputs][-1] == "0:out"
    assert set(carried.tagged.taps) == {"0:out"}


def test_the_commands_and_a_pipeline_do_the_same(tmp_path, capsys):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    file, out = tmp_path / "net.onnx", tmp_path / "out.onnx"
    htp_export.export(net, (torch.randn(1, 4),), file, verbose=False)
    assert main(["tap", str(file), "*:out", "-o", str(out)]) == 0
    assert "0:out  FLOAT[1,4]  0:out" in capsys.readouterr().out
    assert (
        main(
            [
                "tap",
                str(file),
                "0:out",
                "1:out",
                "--name",
                "h",
                "--concat",
                "-1",
                "-o",
                str(out),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["tensors"] == [
        {"name": "h", "places": ["0:out", "1:out"], "kind": "FLOAT[1,8]"}
    ]
    assert main(["tap", str(out), "--undo", "-o", str(tmp_path / "back.onnx")]) == 0
    assert main(["steer", str(file), "0:out", "1:in", "--name", "v", "-o", str(out)]) == 0
    assert main(["tap", str(file), "-o", str(out)]) == 2
    assert main(["tap", str(file), "0:out", "--concat", "0", "-o", str(out)]) == 2
    steps = [
        {"tap": {"places": {"h": "1:out"}}},
        {"steer": {"places": ["0:out"]}},
        {"optimize": {"level": "fused"}},
    ]
    result = htp_export.pipeline([*steps, "compare"], file, tmp_path / "made.onnx")
    assert result.ok
    assert [value.name for value in htp_export.load(tmp_path / "made.onnx").model.graph.outputs][
        1:
    ] == ["h"]


STEER_REFUSED = [
    ("two#0:out[1]", "the same tensor for :in\\[x\\]"),
    ("two#0:in[scale]", None),
    (".:in[scale]", None),
]


@pytest.mark.parametrize(("place", "problem"), STEER_REFUSED)
def test_a_vector_is_refused_where_the_graph_does_not_tell_two_tensors_apart(place, problem, net):
    model, file, inputs = net
    if problem is not None:
        with pytest.raises(InputError, match=problem):
            htp_export.steer(file, place)
        return
    steered = htp_export.steer(file, {"v": place})
    feed = {name: value.numpy() for name, value in inputs.items()} | {"v": np.ones(4, np.float32)}
    [found] = run(steered, feed).values()
    calls = []

    def adds(_: nn.Module, args: Any) -> Any:
        calls.append(1)
        return (args[0], args[1] + 1) if len(calls) == 1 else args

    handle = (model.two if place.startswith("two") else model).register_forward_pre_hook(adds)
    with torch.no_grad():
        expected = model(inputs["x"], inputs["scale"])
    handle.remove()
    np.testing.assert_allclose(found, expected, atol=1e-5)


class _ThreeResults(torch.nn.Module):
    def forward(self, y):
        return y * 2, y + 1, y - 1


class _Sums(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.neck = _ThreeResults()

    def forward(self, y):
        first, second, third = self.neck(y)
        return first + second * third


def test_a_tap_of_the_first_of_several_results_names_the_others():
    program = htp_export.export(_Sums().eval(), (torch.randn(2, 4),), verbose=False)
    one = htp_export.tap(program, "neck:out").summary
    assert one.endswith("neck:out is the first of 3 results, beside neck:out[1], neck:out[2]")
    assert htp_export.tap(program, "neck:out, neck:out[1], neck:out[2]").summary == (
        "3 outputs added"
    )
