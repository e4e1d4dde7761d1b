"""Files of trtexec: what TensorRT's names of layers tell, ranges, tensors, and files that are refused.

The files are made by hand after those that trtexec 8.6 and 10 write; no GPU is here to record any.
"""

import json
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from tests.profile.test_latency import assert_adds_up

TEXT = """
<ir_version: 10, opset_import: ["": 20]>
g (float[1, 4, 8, 8] x, float[4, 4, 1, 1] w, float[256, 6] v) => (float[1, 6] y) {
  a = Conv(x, w)
  b = Sigmoid(a)
  c = Mul(a, b)
  d = Conv(c, w)
  e = Add(c, d)
  f = Flatten(e)
  g = MatMul(f, v)
  h = Exp(g)
  y = Softmax(h)
}
"""
# Output → the node's name and its owner.
NODES = {
    "a": ("/block/conv1/Conv", "block.conv1"),
    "b": ("/block/act/Sigmoid", "block.act"),
    "c": ("/block/act/Mul", "block.act"),
    "d": ("/block/conv2/Conv", "block.conv2"),
    "e": ("/block/Add", "block"),
    "f": ("/Flatten", ""),
    "g": ("/fc/MatMul", "fc"),
    "h": ("/head/Exp", "head"),
    "y": ("/head/Softmax", "head"),
}


def model() -> ir.Model:
    made = ir.from_proto(onnx.parser.parse_model(TEXT))
    for node in made.graph:
        name, owner = NODES[str(node.outputs[0].name)]
        node.name, node.metadata_props["htp.module"] = name, owner
    return made


def times(**ms: float) -> list[dict[str, Any]]:
    """What ``--exportProfile`` writes: ``timeMs`` is of all runs."""
    return [
        {"count": 50},
        *(
            {
                "name": name,
                "timeMs": 50 * each,
                "averageMs": each,
                "medianMs": each,
                "percentage": 1.0,
            }
            for name, each in ms.items()
        ),
    ]


@pytest.fixture
def read(tmp_path):
    """Profile the model from layers (names or objects) and times; without times, every layer takes 1 ms."""

    def profile(
        layers: list[Any], given: Any = None, made: ir.Model | None = None
    ) -> htp_export.results.Profile:
        names = [layer if isinstance(layer, str) else layer["Name"] for layer in layers]
        info = {"Layers": layers, "Bindings": ["x", "y"]}
        (tmp_path / "layers.json").write_text(json.dumps(info))
        (tmp_path / "times.json").write_text(
            json.dumps(times(**dict.fromkeys(names, 1.0)) if given is None else given)
        )
        files = (tmp_path / "layers.json", tmp_path / "times.json")
        return htp_export.profile(made or model(), engine="tensorrt", measured=files)

    return profile


def owners(report: htp_export.results.Profile) -> list[tuple[str, ...]]:
    return [kernel.owners for kernel in report.kernels]


CONV1 = "/block/conv1/Conv"


class TestNames:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            (CONV1, ("block.conv1",)),
            ("PWN(/block/act/Sigmoid)", ("block.act",)),
            ("PWN(PWN(/block/act/Sigmoid), /block/act/Mul)", ("block.act",)),
            ("PWN(PWN(/block/act/Sigmoid), PWN(/block/act/Mul))", ("block.act",)),
            (
                f"{CONV1} + PWN(PWN(/block/act/Sigmoid), PWN(/block/act/Mul))",
                ("block.conv1", "block.act"),
            ),
            ("/block/conv2/Conv + /block/Add", ("block.conv2", "block")),
            (f"{CONV1} || /block/conv2/Conv", ("block.conv1", "block.conv2")),
            ("2-layer MLP: /fc/MatMul + /head/Exp -> /head/Softmax", ("fc", "head")),
            (
                f"Reformatting CopyNode for Input Tensor 0 to {CONV1} + PWN(/block/act/Sigmoid)",
                ("block.conv1", "block.act"),
            ),
            ("Reformatting CopyNode for Output Tensor 0 to /fc/MatMul", ("fc",)),
            ("Reformatting CopyNode for Network Input x", ("block.conv1",)),
            ("Reformatting CopyNode for Network Output y", ("head",)),
            ("/fc/MatMul input reformatter 0", ("fc",)),
            ("/fc/MatMul + (Unnamed Layer* 12) [Shuffle]", ("fc",)),
            ("squeeze_after_/fc/MatMul", ("fc",)),
            ("copied_squeeze_after_/fc/MatMul", ("fc",)),
            (
                "unsqueeze_node_after_/fc/MatMul + (Unnamed Layer* 9) [Shuffle]_(Unnamed Layer* 9) [Shuffle]_output",
                ("fc",),
            ),
            ("reshape_before_/fc/MatMul", ("fc",)),
            ("PWN(/block/act/Mul) [profile 1]", ("block.act",)),
            ("PWN(" * 500 + "/fc/MatMul" + ")" * 500, ()),
            ("/fc/MatMul_myl0_3", ("fc",)),
            ("/fc/MatMul copy", ("fc",)),
            ("v", ("fc",)),
            ("v + /head/Exp", ("head",)),
            ("node_of_g", ()),  # only nodes without a name are called so
            ("g", ("fc",)),  # a tensor
            ("/fc/MatMul2", ()),
            ("(Unnamed Layer* 12) [Shuffle]", ()),
        ],
    )
    def test_a_layer_belongs_to_the_modules_of_the_nodes_in_its_name(self, read, name, expected):
        assert owners(read(["/head/Softmax", name])) == [("head",), expected]

    def test_a_name_that_is_also_the_beginning_of_another_is_not_confused(self, read):
        made = model()
        made.graph[1].name, made.graph[2].name = f"{CONV1}_1", f"{CONV1}_10"
        report = read([CONV1, f"{CONV1}_1", f"{CONV1}_10", f"{CONV1}_2"], made=made)
        assert owners(report) == [
            ("block.conv1",),
            ("block.act",),
            ("block.act",),
            ("block.conv1",),
        ]

    def test_nodes_without_names_are_told_by_their_outputs(self, read):
        made = model()
        for node in made.graph:
            node.name = None
        report = read(["node_of_a + PWN(node_of_b)", "node_of_g"], made=made)
        assert owners(report) == [("block.conv1", "block.act"), ("fc",)]


class TestTimes:
    def test_times_add_up_shared_layers_are_divided_and_the_unknown_is_counted(self, read):
        layers = [CONV1, "/block/conv2/Conv + /block/Add", "/fc/MatMul", "[trainStation1]"]
        report = read(layers, times(**dict(zip(layers, (1.0, 2.0, 4.0, 8.0), strict=True))))
        assert_adds_up(report)
        assert (report.end_to_end_ms, report.kernels_ms, report.unattributed_ms) == (15, 15, 8)
        assert (report.modules["block"].total_ms, report.modules["block"].self_ms) == (3, 1)
        assert report.modules["block.conv2"].self_ms == 1
        assert report.modules["fc"].share == 4 / 15
        assert (report.engine, report.timing, report.runs, report.providers) == (
            "tensorrt",
            "layers",
            50,
            ("TensorRT",),
        )
        text = str(report)
        assert "15.000 ms a run in the layers of TensorRT, mean of 50 runs" in text
        assert "8.000 ms belongs to no module: layer '[trainStation1]'" in text

    def test_layers_of_the_profile_alone_count_and_layers_without_times_are_said(self, read):
        report = read([CONV1, "/head/Exp", "__myl_wait"], times(**{CONV1: 1, "/fc/MatMul": 2}))
        assert owners(report) == [("block.conv1",), ("fc",)]
        assert "2 layers have no time in the profile, '/head/Exp' first" in report.notes

    def test_equal_names_have_their_times_in_order(self, read):
        given = [{"count": 1}, *({"name": CONV1, "averageMs": ms} for ms in (1.0, 2.0))]
        assert [kernel.ms for kernel in read([CONV1, CONV1], given).kernels] == [1, 2]


def layer(
    name: str, inputs: list[str], outputs: list[str], metadata: str = "", kind: str = "kgen"
) -> dict[str, Any]:
    """A layer as ``--profilingVerbosity=detailed`` writes it."""

    def tensors(names: list[str]) -> list[dict[str, Any]]:
        return [{"Name": name, "Dimensions": [1], "Format/Datatype": "Half"} for name in names]

    return {
        "Name": name,
        "LayerType": kind,
        "Inputs": tensors(inputs),
        "Outputs": tensors(outputs),
        "TacticName": name,
        "StreamId": 0,
        "Metadata": metadata,
    }


class TestDetailedLayers:
    def test_metadata_tells_what_a_kernel_of_myelin_was_made_of(self, read):
        metadata = (
            "[ONNX Layer: /fc/MatMul]\x1e[ONNX Layer: /head/Exp]\x1f[ONNX Layer: /head/Softmax]"
        )
        report = read([layer("__myl_FcExpSoft_myl0_3", ["__mye12"], ["__mye13"], metadata)])
        assert owners(report) == [("fc", "head")]
        assert report.modules["head"].by_op == {"kgen": 0.5}

    def test_names_with_brackets_in_metadata(self, read):
        made = model()
        made.graph[0].name = "layers[0]/Conv"
        report = read(
            [layer("k", [], [], "[ONNX Layer: layers[0]/Conv]\x1f[ONNX Layer: /fc/MatMul]")],
            made=made,
        )
        assert owners(report) == [("block.conv1", "fc")]

    def test_without_names_the_tensors_tell_and_nodes_of_other_layers_do_not_count(self, read):
        layers = [
            layer(CONV1, ["x"], ["a"], kind="CaskConvolution"),
            layer("__myl_a", ["a"], ["c"]),
            layer("__myl_b", ["c"], ["e"]),
            layer("/fc/MatMul", ["e"], ["g"]),
            layer("__myl_c", ["g"], ["y"]),
        ]
        assert owners(read(layers)) == [
            ("block.conv1",),
            ("block.act",),
            ("block.conv2", "block"),
            ("fc",),
            ("head",),
        ]

    def test_an_inserted_layer_belongs_to_its_consumers_and_at_the_end_to_its_producers(self, read):
        layers = [
            layer("__myl_Cast_myl0_0", ["x"], ["__mye1"]),
            layer("__myl_Move_myl0_1", ["__mye1"], ["__mye2"]),
            layer(CONV1, ["__mye2"], ["__mye3"]),
            layer("__myl_Move_myl0_2", ["__mye3"], ["__mye4"]),
        ]
        assert owners(read(layers)) == [("block.conv1",)] * 4


class TestRegions:
    def test_a_range_is_what_lies_on_ways_between_its_ends(self, read):
        report = read([f"{{ForeignNode[{CONV1}.../block/Add]}}", "/fc/MatMul"])
        assert owners(report) == [("block.conv1", "block.act", "block.conv2", "block"), ("fc",)]

    def test_an_end_may_be_joined_or_unknown(self, read):
        report = read(
            ["{ForeignNode[/Flatten + /fc/MatMul...(Unnamed Layer* 4183) [Shuffle]]}", CONV1]
        )
        assert owners(report) == [("", "fc", "head"), ("block.conv1",)]
        report = read(
            [
                "{ForeignNode[ONNXTRT_ShapeShuffle_342_output[Constant].../block/act/Mul]}",
                "/fc/MatMul",
            ]
        )
        assert owners(report) == [("block.conv1", "block.act"), ("fc",)]
        report = read(["{ForeignNode[one...(Unnamed Layer* 3) [Shuffle]]}", "/fc/MatMul"])
        assert owners(report) == [(), ("fc",)]

    def test_tensors_go_before_the_ends(self, read):
        named = f"{{ForeignNode[{CONV1}.../head/Exp]}}"
        assert owners(read([layer(named, ["c"], ["e"], kind="Myelin"), "/fc/MatMul"])) == [
            ("block.conv2", "block"),
            ("fc",),
        ]


class TestWrongFiles:
    def write(self, folder: Path, layers: str, given: str) -> tuple[Path, Path]:
        (folder / "layers.json").write_text(layers)
        (folder / "times.json").write_text(given)
        return folder / "layers.json", folder / "times.json"

    @pytest.mark.parametrize(
        ("layers", "given", "message"),
        [
            ('{"Layers": ["a"', "[]", r"layers\.json: is not JSON: .*line 1 column 16"),
            (
                '{"Layers": ["g"]}',
                '[{"count": 1},\n{"name"',
                r"times\.json: is not JSON: .*line 2 column 8",
            ),
            ("[]", "[]", r"layers\.json: is not what trtexec --exportLayerInfo writes: TypeError"),
            ('{"Layers": ["g", {"LayerType": "x"}]}', "[]", "--exportLayerInfo writes: KeyError"),
            (
                '{"Layers": [{"Name": "g", "Inputs": ["x"]}]}',
                "[]",
                "--exportLayerInfo writes: TypeError",
            ),
            (
                '{"Layers": ["g"]}',
                "{}",
                r"times\.json: is not what trtexec --exportProfile writes: .* a time",
            ),
            (
                '{"Layers": ["g"]}',
                '[{"count": 1}, {"averageMs": 1}]',
                "--exportProfile writes: KeyError",
            ),
            (
                '{"Layers": ["g"]}',
                '[{"count": 1}, {"name": "g", "percentage": 3}]',
                "--exportProfile writes: KeyError",
            ),
            (
                '{"Layers": ["g"]}',
                '[{"count": 1}, {"name": "g", "averageMs": NaN}]',
                "a number from 0 up",
            ),
            (
                '{"Layers": ["g"]}',
                '[{"count": 1}, {"name": "z", "averageMs": 1}]',
                r"times\.json: has no time for any layer of .*layers\.json, but one for 'z'",
            ),
            (
                '{"Layers": ["/other/Conv", "{ForeignNode[one...two]}"]}',
                '[{"count": 1}, {"name": "/other/Conv", "averageMs": 1}]',
                r"layers\.json: no layer is made of a node of the model: '/other/Conv', .*it is of another model",
            ),
        ],
    )
    def test_they_are_refused_with_the_place(self, tmp_path, layers, given, message):
        with pytest.raises(FileError, match=message):
            htp_export.profile(
                model(), engine="tensorrt", measured=self.write(tmp_path, layers, given)
            )

    def test_options_of_a_run_are_refused(self, tmp_path):
        files = self.write(tmp_path, '{"Layers": ["g"]}', json.dumps(times(g=1)))
        with pytest.raises(InputError, match="have no effect"):
            htp_export.profile(model(), {"x": 1}, engine="tensorrt", measured=files)
        with pytest.raises(InputError, match="is for engine='onnxruntime'"):
            htp_export.profile(model(), memory=True, engine="tensorrt", measured=files)
        with pytest.raises(InputError, match="tensorrt is not run here: give the files"):
            htp_export.profile(model(), engine="tensorrt")
        with pytest.raises(InputError, match="give the file of --exportProfile, too"):
            htp_export.profile(model(), engine="tensorrt", measured=files[:1])
        with pytest.raises(InputError, match="reads the files of one engine"):
            htp_export.profile(model(), engine="tensorrt", measured=(*files, *files))


READ = ("--engine", "tensorrt", "--measured")


class TestCommandLine:
    def test_reads_both_files(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        htp_export.load(model()).save("net.onnx")
        Path("layers.json").write_text(json.dumps({"Layers": [CONV1, "/fc/MatMul"]}))
        Path("times.json").write_text(json.dumps(times(**{CONV1: 1, "/fc/MatMul": 3})))
        assert main(["profile", "net.onnx", *READ, "layers.json", "--measured", "times.json"]) == 0
        assert "4.000 ms a run in the layers of TensorRT" in capsys.readouterr().out
        assert (
            main(
                ["profile", "net.onnx", *READ, "layers.json", "--measured", "times.json", "--json"]
            )
            == 0
        )
        result = json.loads(capsys.readouterr().out)
        assert (result["modules"]["fc"]["total_ms"], result["engine"], result["timing"]) == (
            3,
            "tensorrt",
            "layers",
        )
        assert main(["profile", "net.onnx", *READ, "times.json", "--measured", "layers.json"]) == 0
        assert "4.000 ms a run in the layers of TensorRT" in capsys.readouterr().out
        assert (
            main(
                [
                    "profile",
                    "net.onnx",
                    *READ,
                    "layers.json",
                    "--measured",
                    "times.json",
                    "--threads",
                    "1",
                ]
            )
            == 2
        )
        assert "--threads: the engine tensorrt has no such option" in capsys.readouterr().err
