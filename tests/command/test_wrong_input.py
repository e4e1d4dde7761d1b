"""Wrong inputs of the command line: each ends with status 2 and one line that names what is wrong; files stay."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import htp_export
from htp_export.command.commands import command_names
from htp_export.command.main import main
from htp_export.files.model_files import read_model, write_model
from htp_export.format import tags
from tests.handmade import encoder
from tests.hostile import DIGITS
from tests.permissions import bound_by_permissions

FACTORY = """
import sys

def fails():
    raise RuntimeError("the weights are elsewhere")

def gives_nothing():
    return None

def runs():
    return [{"x": [[1.0] * 16] * 16}] * 2

def array():
    import numpy
    return numpy.ones(3)

number = 3
"""


def _square() -> ir.Model:
    model = encoder(16)
    for each in (*model.graph.inputs, *(node.outputs[0] for node in model.graph)):
        each.shape = ir.Shape([16, 16])
    model.graph.initializers["layer.0.fc.weight"].const_value = ir.tensor(
        np.eye(16, dtype=np.float32) + 1
    )
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    write_model(_square(), folder / "net.onnx", "net.onnx.data")
    raw = (folder / "net.onnx").read_bytes()
    texts: dict[str, bytes] = {
        "cut.onnx": raw[: len(raw) // 2],
        "empty.onnx": b"",
        "text.onnx": b"hello world\n",
        "json.onnx": b'{"a": 1}',
        "model.json": b'{"a": 1}',
        "zeros.onnx": bytes(100_000),
        "noise.onnx": np.random.default_rng(3).bytes(100_000),
        "picture.png": b"\x89PNG\r\n",
        "short.data": b"123",
        "no.npz": b"no zip",
        "bad.json": b"{",
        "none.json": b"{}",
        "list.json": b"[1, 2]",
        "negative.json": b'{"x": [-1, 2]}',
        "ok.json": b'{"x": [16, 16]}',
        "text.json": b'{"x": "a"}',
        "rank.json": b'{"x": [%s]}' % b", ".join([b"1"] * 70),
        "large.json": b'{"x": [1099511627776, 16]}',
        "digits.json": b'{"x": [%s, 16]}' % DIGITS.encode(),
        "deep.json": b"[" * 100_000,
        "digits.yaml": f"layer.0: {DIGITS}\n".encode(),
        "modules.json": b'{"modules": 3}',
        "rules.yaml": b"layer.0: int9\n",
        "steps.yaml": b"- nosuch\n",
        "key.yaml": b"step: []\n",
        "twice.yaml": b"[optimize: {level: exact, level: tolerant}]\n",
        "errors.json": b'{"modules": {"": {"max_abs": 1}}}',
        f"made_{folder.name}.py": FACTORY.encode(),
    }
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    for name in ("empty", "many"):
        (folder / name).mkdir()
    for number in range(2):
        np.savez(folder / "many" / f"{number}.npz", x=np.ones((16, 16), np.float32))
    (folder / "folder.onnx").mkdir()
    (folder / "circle.data").symlink_to("circle.data")
    np.savez(folder / "none.npz")
    np.savez(folder / "name.npz", foo=np.ones(3))
    np.savez(folder / "shape.npz", x=np.ones((2, 3), np.float32))
    np.savez(folder / "pickled.npz", x=np.array([{}, None], dtype=object))
    (folder / "cut.npz").write_bytes((folder / "shape.npz").read_bytes()[:60])
    for name, location in {
        "missing": "gone.data",
        "short": "short.data",
        "away": "../x.data",
        "absolute": "/etc/passwd",
        "circle": "circle.data",
    }.items():
        _variant(folder, name, _external("location", location))
    _variant(folder, "offset", _external("offset", "99999999999999999999"))
    _variant(folder, "offset_text", _external("offset", "abc"))
    _variant(folder, "offset_negative", _external("offset", "-5"))
    _variant(folder, "modules", _said(tags.MODULES, "[]"))
    _variant(folder, "newer_modules", _said(tags.FORMAT, "9"), _said(tags.MODULES, '{"": []}'))
    _variant(folder, "untagged", _bare)
    _variant(folder, "open", _open_width)
    return folder


def _variant(folder: Path, name: str, *edits: Callable[[onnx.ModelProto], None]) -> None:
    proto = onnx.load(folder / "net.onnx", load_external_data=False)
    for edit in edits:
        edit(proto)
    onnx.save(proto, folder / f"{name}.onnx")


def _external(key: str, value: str) -> Callable[[onnx.ModelProto], None]:
    def edit(proto: onnx.ModelProto) -> None:
        for initializer in proto.graph.initializer:
            for entry in initializer.external_data:
                entry.value = value if entry.key == key else entry.value

    return edit


def _said(key: str, value: str) -> Callable[[onnx.ModelProto], None]:
    def edit(proto: onnx.ModelProto) -> None:
        for entry in proto.metadata_props:
            entry.value = value if entry.key == key else entry.value

    return edit


def _bare(proto: onnx.ModelProto) -> None:
    proto.ClearField("metadata_props")
    for node in proto.graph.node:
        node.ClearField("metadata_props")
        node.name = ""


def _open_width(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "length"
    del proto.graph.value_info[:]


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(made))
    return made


def contents(folder: Path) -> dict[str, bytes]:
    files = (
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


NOT_ONNX = "{0}: not an ONNX model"
MISSING = "gone.data: is missing: it contains weights of missing.onnx"
SHORT = "short.data: is too short: it has 3 bytes, and the weights of short.onnx need 2,048"
BERT = "export bert --random-weights --set num_hidden_layers=1 --set hidden_size=16 --set num_attention_heads=2"
TAKE_INPUTS = ("carry net.onnx net.onnx -o o.onnx", "compare net.onnx net.onnx", "profile net.onnx", "cost net.onnx",
               "tree net.onnx")  # fmt: skip
UNTAGGED = "untagged.onnx: it has no module tags; export it with htp-export export"
OUTSIDE = "lies outside its folder; it will not be read"

WRONG: list[tuple[str | list[str], str]] = [
    # no models
    *(
        (f"tree {name}", NOT_ONNX.format(name))
        for name in ("cut.onnx", "empty.onnx", "text.onnx", "json.onnx")
    ),
    *(
        (f"tree {name}", NOT_ONNX.format(name))
        for name in ("zeros.onnx", "noise.onnx", "model.json", "picture.png")
    ),
    ("tree nowhere.onnx", "nowhere.onnx: cannot be read: No such file or directory"),
    ("tree folder.onnx", "folder.onnx: is a folder; name a file in it"),
    (
        "tree offset_text.onnx",
        "offset_text.onnx: not a valid ONNX model: tensor 'layer.0.fc.weight': invalid literal",
    ),
    (
        "tree offset_negative.onnx",
        "offset_negative.onnx: not a valid ONNX model: tensor 'layer.0.fc.weight': External",
    ),
    ("tree modules.onnx", "modules.onnx: htp.modules is not a JSON object of module paths"),
    (
        "tree newer_modules.onnx",
        "its tags are of version 9 of the file format, and this htp_export knows version 1",
    ),
    ("carry untagged.onnx net.onnx -o o.onnx", "export it with htp-export export"),
    # the second of two
    ("carry net.onnx cut.onnx -o o.onnx", NOT_ONNX.format("cut.onnx")),
    ("compare net.onnx empty.onnx", NOT_ONNX.format("empty.onnx")),
    ("diff net.onnx text.onnx", NOT_ONNX.format("text.onnx")),
    ("splice net.onnx layer.0 empty.onnx -o o.onnx", NOT_ONNX.format("empty.onnx")),
    # weights
    ("tree away.onnx", f"away.onnx: its external data '../x.data' {OUTSIDE}"),
    ("tree absolute.onnx", f"absolute.onnx: its external data '/etc/passwd' {OUTSIDE}"),
    (
        "optimize circle.onnx -o o.onnx",
        "circle.onnx: its external data 'circle.data' cannot be found",
    ),
    ("optimize missing.onnx -o o.onnx", MISSING),
    ("optimize short.onnx -o o.onnx", SHORT),
    (
        "optimize offset.onnx -o o.onnx",
        "net.onnx.data: is too short: it has 2,048 bytes, and the weights of offset.on",
    ),
    ("compare net.onnx short.onnx", SHORT),
    ("profile short.onnx --runs 1", SHORT),
    ("functions missing.onnx layer.0 -o o.onnx", MISSING),
    ("carry net.onnx missing.onnx -o o.onnx", MISSING),
    ("run onnxruntime missing.onnx -o o.onnx", MISSING),
    ("run quantize_dynamic short.onnx -o o.onnx", SHORT),
    ("optimize net.onnx -o folder.onnx/o.onnx --share-weights", "cannot share the weights in"),
    # values and sizes
    *((f"{command} --data none.npz", "none.npz: contains no arrays") for command in TAKE_INPUTS),
    *(
        (f"{command} --shapes none.json", "none.json: contains no shapes")
        for command in TAKE_INPUTS
    ),
    ("compare net.onnx net.onnx --data name.npz", "no input 'foo' in this model, only 'x'"),
    (
        "compare net.onnx net.onnx --data shape.npz",
        "input 'x': is float [2, 3], but the model requires float [16, 16]",
    ),
    (
        "compare net.onnx net.onnx --data pickled.npz",
        "pickled.npz: is not an .npz file of plain arrays",
    ),
    ("profile net.onnx --data no.npz", "no.npz: is not an .npz file of plain arrays"),
    (
        "run quantize_static net.onnx -o o.onnx --set data=pickled.npz",
        "pickled.npz: is not an .npz file of plain arrays",
    ),
    (
        "run quantize_static net.onnx -o o.onnx",
        "needs data to see activations on: --set data=FILE.npz",
    ),
    ("cost net.onnx --shapes bad.json", "bad.json: is not JSON"),
    (
        "cost net.onnx --shapes list.json",
        'list.json: is not a JSON object such as {"input_ids": [2, 16]}',
    ),
    (
        "cost net.onnx --shapes negative.json",
        "negative.json: the shape of 'x' is not a list of whole numbers: [-1, 2]",
    ),
    (
        "cost net.onnx --shapes text.json",
        "text.json: the shape of 'x' is not a list of whole numbers: 'a'",
    ),
    ("cost net.onnx --data nowhere.npz", "nowhere.npz: cannot be read: No such file or directory"),
    ("cost net.onnx --dims batch", "--dims batch: write name=size"),
    *(
        (f"cost net.onnx --dims batch={size}", "a size is a number of 64 bits")
        for size in ("9" * 23, DIGITS)
    ),
    (
        "cost net.onnx --dims batch=9",
        "this model has no open dimensions, and so none named 'batch'",
    ),
    *(
        (f"{command} --shapes rank.json", "input 'x': a shape of 70 dimensions; numpy supports at")
        for command in TAKE_INPUTS
    ),
    *(
        (f"{command} --shapes digits.json", "digits.json: is not JSON: a number has 5,000")
        for command in TAKE_INPUTS
    ),
    (
        "cost net.onnx --shapes deep.json",
        "deep.json: is not JSON: lists and objects are nested more than 300 levels deep",
    ),
    (
        "profile open.onnx --shapes large.json",
        "[1099511627776, 16] has more than 1,073,741,824 elements",
    ),
    ("quantize net.onnx digits.yaml -o o.onnx", "digits.yaml: is not YAML"),
    (
        f"prune net.onnx --rule layer.0={DIGITS}:{DIGITS} -o o.onnx",
        "write a share such as 0.5, a pattern such as",
    ),
    (f"place net.onnx --rule .=gpu --budget gpu={DIGITS} -o o.onnx", "is no size; write bytes"),
    (f"partition net.onnx {DIGITS} -o stages", "no module '999"),
    (f"quantize net.onnx --rule .=int4:block_size={DIGITS} -o o.onnx", "block_size"),
    (["tree", "net.onnx", "--select", f"re:a{{{DIGITS}}}"], "digits"),
    ("tree net.onnx --select re:(layer).\\1", "the regular expression contains groupref"),
    ("tree net.onnx --dims batch=x", "--dims batch=x: write name=size"),
    # names
    (
        "tap net.onnx layer.7:out -o o.onnx",
        "selector 'layer.7': matches no module; nearest: 'layer.1', 'layer.0', 'layer'",
    ),
    ("tap net.onnx layer.0:out[7] -o o.onnx", "module 'layer.0' has no such output; it has: 0"),
    (
        "tap net.onnx layer.0 -o o.onnx",
        "selector 'layer.0': has no side; write 'layer.0:in' or 'layer.0:out'",
    ),
    (
        "steer net.onnx layer.0:in[nosuch] -o o.onnx",
        "module 'layer.0' has no such input; it has: 0",
    ),
    ("steer net.onnx layer.0#9:out -o o.onnx", "module 'layer.0' ran 1 time, counted from 0"),
    (
        "extract net.onnx layer.7 -o o.onnx",
        "no module 'layer.7' in this model; nearest: 'layer.1', 'layer.0', 'layer'",
    ),
    (["extract", "net.onnx", "a\nb", "-o", "o.onnx"], r"no module 'a\nb' in this model"),
    (["extract", "net.onnx", "[/red]", "-o", "o.onnx"], "no module '[/red]' in this model"),
    (["tree", "net\n.onnx"], r"'net\n.onnx': cannot be read: No such file"),
    (["tree", "[red]x[/red].onnx"], "[red]x[/red].onnx: cannot be read: No such file"),
    (["tree", "a" * 5000], "aaa: cannot be read: File name too long"),
    (["tree", ""], "SOURCE is empty: give a value"),
    (
        "extract net.onnx layer.0 --call 99999999999999999999 -o o.onnx",
        "has no call 99999999999999999999",
    ),
    ("tree net.onnx --columns nosuch", "there is no column 'nosuch'; there are class"),
    ("cost net.onnx --sort nosuch", "there is no column 'nosuch'; there are class"),
    ("tree net.onnx --select nosuch", "selector 'nosuch': matches no module"),
    ("cost net.onnx --select re:(", "selector 're:(': missing )"),
    ("run nosuch net.onnx -o o.onnx", "there is no tool 'nosuch'; there are float16"),
    ("run onnxruntime net.onnx -o o.onnx --set level=9", "level is 9, and takes str"),
    (
        f"run onnxruntime net.onnx -o o.onnx --set level={2**64}",
        "--set level: a whole number of more than 64 bits",
    ),
    (
        "run onnxruntime net.onnx -o o.onnx --set nosuch=1",
        "--set nosuch: onnxruntime has no option 'nosuch'",
    ),
    (
        'run onnxruntime net.onnx -o o.onnx --set providers=["Nope"]',
        "this ONNX Runtime has no Nope",
    ),
    ("run onnxruntime net.onnx -o o.onnx --set =1", "--set =1: write key=value"),
    ("run version_converter net.onnx -o o.onnx --set opset=abc", "opset is 'abc', and takes int"),
    ("run version_converter net.onnx -o o.onnx --set opset=999", "opset 999 is none of 1 to"),
    ("run matmul_nbits net.onnx -o o.onnx --set bits=77", "bits are 77, and can be 2, 4, 8"),
    (
        "optimize net.onnx -o o.onnx --passes nosuch",
        "no pass 'nosuch'; there are: cleanup_attention",
    ),
    (
        "optimize net.onnx -o o.onnx --level nosuch",
        "'nosuch' is not one of 'exact', 'tolerant', 'fused'",
    ),
    # numbers
    ("tree net.onnx --depth -1", "'--depth'"),
    ("profile net.onnx --runs 0", "'--runs'"),
    ("view net.onnx --serve --port 99999", "'--port'"),
    ("partition net.onnx 0 -o stages", "a model has one stage or more, not 0"),
    ("partition net.onnx -o stages", "Missing argument"),
    ("partition net.onnx 2 -o stages --balance nowhere.json", "nowhere.json: cannot be read"),
    ("partition net.onnx 2 -o stages --balance bad.json", "bad.json: is not JSON"),
    (
        "partition net.onnx 2 -o stages --balance list.json",
        "list.json: holds no JSON object of module path",
    ),
    ("partition net.onnx 2 -o stages --balance text.json", "text.json: module 'x' has no number"),
    ("partition net.onnx 99 -o stages", "the model cannot be cut into 99 stages"),
    # outputs
    ("optimize net.onnx -o folder.onnx", "folder.onnx: is a folder; name a file in it"),
    (
        "optimize net.onnx -o nowhere/o.onnx",
        "nowhere/o.onnx: cannot be written: its folder does not exist: nowhere",
    ),
    ("partition net.onnx 2 -o net.onnx", "net.onnx: is a file; name a folder for a partition"),
    (
        "partition net.onnx 2 -o .",
        "which does not belong to a partition; name an empty or a new folder",
    ),
    ("optimize net.onnx", "give a file, and with -o the file to write"),
    ("view net.onnx --cost nowhere.json -o p.html", "error: nowhere.json: cannot be read"),
    ("view net.onnx --cost modules.json -o p.html", "modules.json: "),
    ("view net.onnx --profile bad.json -o p.html", "bad.json: is not JSON"),
    (
        "view net.onnx -o nowhere/p.html",
        "nowhere/p.html: cannot be written: its folder does not exist: nowhere",
    ),
    ("view net.onnx --netron --overlay dtype", "exclude each other; choose one"),
    ("view net.onnx --measure speed -o p.html", "nothing measures 'speed'; there are time, cost"),
    (
        "view nowhere.onnx --overlay error --measure time,cost",
        "--overlay error needs a result: give --verify",
    ),
    ("tree net.onnx --profile bad.json", "bad.json: is not JSON"),
    ("tree net.onnx --profile list.json", "list.json: has no results by module"),
    ("tree net.onnx --profile errors.json", "is it the JSON of another command?"),
    # what to export
    ("export -o o.onnx", "give one model: a SOURCE or --entry package.module:factory"),
    ("export bert -o o.onnx", "--random-weights"),
    ("export bert --entry a:b -o o.onnx", "give one model"),
    (BERT, "--output"),
    (f"{BERT} -o o.onnx --set layers", "write key=value"),
    (f"{BERT} -o o.onnx --set num_layer=2", "no 'num_layer'"),
    (f"{BERT} -o o.onnx --dtype int8", "int8"),
    (f"{BERT} -o o.onnx --opset ten", "--opset"),
    (f"{BERT} -o o.onnx --keep-attention --torchscript", "leave --torchscript away"),
    (f"{BERT} -o o.onnx --keep-attention --opset 20", "--keep-attention needs 23"),
    (f"{BERT} -o o.onnx --dynamic length", "no dynamic axis 'length'"),
    (f"{BERT} -o o.onnx --shapes nowhere.json", "cannot be read"),
    ("export --entry json:dumps --task fill-mask -o o.onnx", "--task is for a SOURCE"),
    ("verify net.onnx", "give one model"),
    ("verify net.onnx bert --tolerance **=1", "write SELECTOR=ABSOLUTE,RELATIVE"),
    ("export --entry nosuch:net -o o.onnx", "there is no module 'nosuch'"),
    ("export --entry {module}:nosuch -o o.onnx", "has no function 'nosuch'"),
    ("export --entry {module}:fails -o o.onnx", "raised RuntimeError: the weights are elsewhere"),
    ("export --entry {module}:gives_nothing -o o.onnx", "must return (model, example inputs)"),
    ("export --entry {module} -o o.onnx", "an entry must be package.module:factory"),
    (
        "export {module}:number -o o.onnx",
        "{module}:number: a factory is named with --entry {module}:number",
    ),
    (
        "export --entry {module}.py:net -o o.onnx",
        "an entry names a module, not its file: {module}:net",
    ),
    (
        f"{BERT} --shapes name.npz -o o.onnx",
        "name.npz: contains values: --shapes is for a JSON file of shapes",
    ),
    ("view net.onnx --profile net.onnx -o p.html", "net.onnx: is not JSON: it is not a text file"),
    # data
    (
        "carry net.onnx net.onnx -o o.onnx --data many",
        "carry takes one run, but --data has several",
    ),
    (
        "quantize net.onnx int8 -o o.onnx --data name.npz",
        "name.npz: no input 'foo' in this model, only 'x'",
    ),
    (
        "sensitivity net.onnx --data shape.npz",
        "shape.npz: input 'x': is float [2, 3], but the model requires float [16, 16]",
    ),
    (
        "compare net.onnx net.onnx --data empty",
        "empty: is a folder without .npz files; write them with numpy.savez",
    ),
    (
        "compare net.onnx net.onnx --data list.json",
        "list.json: is not an .npz file of plain arrays",
    ),
    (
        "compare net.onnx net.onnx --data many --shapes ok.json",
        "--shapes is for random inputs; give either --shapes or --data",
    ),
    (
        "profile net.onnx --data {module}:gives_nothing",
        "{module}:gives_nothing: returns NoneType, but data must be arrays",
    ),
    (
        "profile net.onnx --data {module}:array",
        "{module}:array: returns ndarray, but data must be arrays by input name",
    ),
    (
        "profile net.onnx --data {module}:nosuch",
        "{module}:nosuch: module '{module}' has no function 'nosuch'",
    ),
    # rules
    (
        "quantize net.onnx int9 -o o.onnx",
        "no file and no precision 'int9'; there are int8, u8s8, uint8, int16",
    ),
    (
        "quantize net.onnx rules.yaml -o o.onnx",
        "rules.yaml: rule 'layer.0': there is no precision 'int9'; there are",
    ),
    (
        "quantize net.onnx nowhere.yaml -o o.onnx",
        "nowhere.yaml: cannot be read: No such file or directory",
    ),
    ("quantize net.onnx layer.0=int8 -o o.onnx", "a rule is an option: --rule SELECTOR=PRECISION"),
    ("quantize net.onnx --rule layer.0 -o o.onnx", "--rule layer.0: write SELECTOR=PRECISION\n"),
    ("quantize net.onnx --rule =int8 -o o.onnx", "--rule =int8: write SELECTOR=PRECISION\n"),
    (
        "quantize net.onnx --rule layer.0=int9 -o o.onnx",
        "--rule layer.0=int9: there is no precision 'int9'; there are",
    ),
    (
        "quantize net.onnx --rule layer.7=int8 -o o.onnx",
        "selector 'layer.7': matches no module; nearest: 'layer.1'",
    ),
    (
        "quantize net.onnx --rule dropout=int8 -o o.onnx",
        "--rule dropout=int8: no operator of module 'dropout' takes",
    ),
    (
        "quantize net.onnx int8 --plan-for nosuch -o o.json",
        "plans are written for genai, modelopt, nncf, olive, ort, not for",
    ),
    ("quantize net.onnx int8 --plan-for ort -o o.onnx", "has the extension of a model"),
    (
        "quantize net.onnx --plan-for ort -o o.json",
        "give a plan (.yaml or .json), a precision (int8, ",
    ),
    (
        "quantize net.onnx --rule layer.0=int4:accuracy_level=9 -o o.onnx",
        "--rule layer.0=int4:accuracy_level=9: precision 'int4:accuracy_level=9': accuracy_level is 9, and can be 0",
    ),
    ("quantize net.onnx int8 -o rules.yaml/o.onnx", "rules.yaml/o.onnx"),
    ("quantize net.onnx int8", "give the file to write with -o, or --dry-run"),
    (
        "quantize net.onnx int8 -o net.onnx",
        "net.onnx: is an input of this command; name another file to write",
    ),
    ("quantize untagged.onnx int8 -o o.onnx", UNTAGGED),
    ("place untagged.onnx --rule .=cpu -o o.onnx", UNTAGGED),
    ("nodes untagged.onnx", UNTAGGED),
    ("partition untagged.onnx 2 -o stages", UNTAGGED),
    ("rename untagged.onnx -o o.onnx", UNTAGGED),
    (
        "quantize net.onnx int8 -o o.onnx --metric {module}:gives_nothing",
        "{module}:gives_nothing returned no function",
    ),
    ("prune net.onnx 0.5 -o o.onnx", "no file '0.5'; a rule is an option: --rule SELECTOR=VALUE"),
    ("prune net.onnx --rule .=0.5 --method l3 -o o.onnx", "'l3' is not one of 'l1'"),
    ("prune net.onnx nowhere.yaml --rule .=0.5 -o o.onnx", "nowhere.yaml: cannot be read"),
    (
        "prune net.onnx -o o.onnx",
        "the rules are missing: give a plan (.yaml or .json), or --rule SELECTOR=VALUE",
    ),
    (
        "prune net.onnx --rule layer.0=abc -o o.onnx",
        "--rule layer.0=abc: sparsity 'abc': write a share such as 0.5",
    ),
    (
        "prune net.onnx --rule layer.0=activations:0.5 -o o.onnx",
        "--rule layer.0=activations:0.5: activations:0.5 is measured on data: give data (--data)",
    ),
    (
        "prune net.onnx --rule layer.0=activations:2 -o o.onnx",
        "--rule layer.0=activations:2: sparsity 'activations:2': a share is from 0 to 1",
    ),
    (
        "search net.onnx --choices activations:0.5",
        "choice 'activations:0.5': a search decides about weights",
    ),
    (
        "prune net.onnx --rule dropout=0.5 -o o.onnx",
        "--rule dropout=0.5: the modules that it names have no weights",
    ),
    (
        "place net.onnx -o o.onnx",
        "the rules are missing: give a plan (.yaml or .json), or --rule SELECTOR=DEVICE",
    ),
    (
        "place net.onnx --rule .=toaster -o o.onnx",
        "--rule .=toaster: there is no device 'toaster'; write cpu, gpu",
    ),
    (
        "place net.onnx --rule dropout=cpu -o o.onnx",
        "--rule dropout=cpu: its modules have no nodes",
    ),
    ("place net.onnx --budget gpu -o o.onnx", "--budget gpu: write DEVICE=SIZE\n"),
    (
        "place net.onnx --budget gpu=lots -o o.onnx",
        "budget of gpu: 'lots' is no size; write bytes, or a number with",
    ),
    (
        "place net.onnx --budget gpu=1 -o o.onnx",
        "the smallest part, of module '(root)', needs 2.048 kB",
    ),
    ("place net.onnx --rule .=cpu", "give the file to write with -o, or --show"),
    ("profile net.onnx --budget layer.0", "--budget layer.0: write SELECTOR=LIMIT\n"),
    (
        "profile net.onnx --measured gone.json --budget nowhere=1ms",
        "selector 'nowhere': matches no module",
    ),
    ("profile net.onnx --provider cuda2", "this ONNX Runtime has no cuda2"),
    ("profile net.onnx --measured none.json", "none.json: is no list of events; give what ONNX"),
    (
        "profile net.onnx --budget layer.0=x",
        "budget 'x' of 'layer.0': write a time or a share below 100 %",
    ),
    # others of each command
    ("info nowhere.onnx", "nowhere.onnx: cannot be read: No such file or directory"),
    (
        "nodes net.onnx --select nosuch",
        "selector 'nosuch': matches no module; there are '.', 'dropout', 'layer'",
    ),
    (
        "nodes net.onnx --table nosuch",
        "'nosuch' is not one of 'nodes', 'modules', 'parameters', 'initializers'",
    ),
    (
        "view net.onnx --overlay latency -o o.json",
        "give --profile with the JSON of htp-export profile",
    ),
    ("diff net.onnx", "Missing argument 'after'; example: htp-export diff bert.onnx small.onnx"),
    ("forensics net.onnx --level nosuch", "level 'nosuch' is none of exact, tolerant, fused"),
    ("fingerprint nowhere.onnx", "nowhere.onnx: cannot be read: No such file or directory"),
    ("compare untagged.onnx net.onnx", "untagged.onnx: has no module tags"),
    ("profile net.onnx --engine nosuch", "no plug-in 'nosuch'; there are: openvino, tensorrt"),
    (
        "extract net.onnx dropout -o o.onnx",
        "module 'dropout' has no nodes: it gives back what it is given",
    ),
    ("extract net.onnx . --call 3 -o o.onnx", "has no call 3: it ran 1 time, counted from 0"),
    (
        "splice net.onnx layer.9 net.onnx -o o.onnx",
        "no module 'layer.9' in this model; nearest: 'layer.1'",
    ),
    ("functions net.onnx -o o.onnx", "give the modules, ** for all, or --undo"),
    (
        "pipeline steps.yaml -m net.onnx -o o.onnx",
        "steps.yaml: line 1: step 1: there is no step 'nosuch'; there are",
    ),
    ("pipeline key.yaml -m net.onnx -o o.onnx", "there is no key 'step'"),
    ("pipeline twice.yaml -m net.onnx -o o.onnx", "the key 'level' is repeated"),
    ("pipeline bad.json -m net.onnx -o o.onnx", "is not YAML"),
    (
        "search net.onnx --choices int8 --objective nosuch",
        "objectives are some of error, size, bits, latency, metric",
    ),
    ("sensitivity net.onnx --precision int9", "there is no precision 'int9'"),
    ("sensitivity net.onnx --precision fp32", "precision 'fp32' changes nothing"),
    ("sensitivity net.onnx --select layer.0 --depth 1", "give select or depth, not both"),
    (
        "sensitivity net.onnx --results nowhere/runs.jsonl",
        "nowhere/runs.jsonl: its folder does not exist",
    ),
    ("sensitivity net.onnx --results net.onnx", "net.onnx: is no journal of Optuna"),
    ("sensitivity net.onnx --metric nosuch:accuracy", "nosuch:accuracy"),
    ("search net.onnx rules.yaml --choices int8", "or --choices"),
    ("search net.onnx rules.yaml", "there is no precision 'int9'"),
    ("search net.onnx --choices int8 --objective metric", "go together"),
    ("search net.onnx --choices int8 --sampler nosuch", "there is no sampler 'nosuch'"),
    (
        "search net.onnx --choices int8 --storage nowhere/study.log",
        "nowhere/study.log: its folder does not exist",
    ),
    ("search net.onnx --choices int8 --storage nosql://x", "storage 'nosql://x' cannot be opened"),
    ("search net.onnx --choices int8 -o .", "which does not belong to a search"),
    ("lora insert net.onnx nosuch -o o.onnx", "selector 'nosuch': matches no module"),
    (
        "lora insert net.onnx dropout -o o.onnx",
        "there is no linear layer at or below the modules of 'dropout'",
    ),
    (
        "lora adapter net.onnx nowhere -o a.onnx_adapter",
        "lora.insert adds inputs for them to its linear layers",
    ),
    ("bind net.onnx nowhere -o o.onnx", "nowhere"),
    ("bind net.onnx net.onnx -o o.onnx", "net.onnx"),
    ("lora fuse net.onnx nowhere -o o.onnx", "nowhere: there is no such adapter"),
    (
        "rename net.onnx --style nosuch -o o.onnx",
        "there is no style of names 'nosuch'; there is 'path'",
    ),
    (
        "rename net.onnx -o empty/o.onnx --share-weights",
        "they are in another folder; write the model into that folder, or copy",
    ),
    (
        "partition net.onnx layer.7 -o stages",
        "no module 'layer.7' in this model; nearest: 'layer.1'",
    ),
    (
        "partition net.onnx 2 -o stages --balance nosuch",
        "--balance nosuch: balance parameters or flops, or name",
    ),
    # in another order
    (
        "extract net.onnx layer.* -o o.onnx",
        "no module 'layer.*' in this model; this takes one module, and no selector",
    ),
    ("extract net.onnx class:Linear -o o.onnx", "; this takes one module, and no selector"),
    (
        "carry net.onnx -o o.onnx",
        "name the model before it too, htp-export carry BEFORE AFTER, or use --embed-map",
    ),
    ("nosuch", "No such command 'nosuch'."),
    ("tree", "name an ONNX file, a model, or --entry"),
    ("tree net.onnx --entry a:b", "give one model"),
    ("tree net.onnx --task fill-mask", "--task is for a model without a file"),
    ("view --entry a:b --netron -o o.html", "--netron are for an ONNX file"),
    ("tree net.onnx extra", "extra"),
    ("tree --nosuch net.onnx", "No such option: --nosuch"),
    *(
        (
            f"{command} nowhere.onnx net.onnx",
            "nowhere.onnx: cannot be read: No such file or directory\n",
        )
        for command in ("compare", "diff", "carry -o o.onnx")
    ),
    # names that shells and users leave empty, folders, and options by their first names
    (["extract", "net.onnx", "", "-o", "o.onnx"], "MODULE is empty: give a value"),
    (["functions", "net.onnx", "layer.0", "", "-o", "o.onnx"], "SELECT is empty: give a value"),
    (
        "prune net.onnx --rule .=1.5 -o o.onnx",
        "--rule .=1.5: sparsity '1.5': a share is from 0 to 1\n",
    ),
    (
        "cost open.onnx --dims length=16,lenght=1",
        "no open dimension 'lenght' in this model, only 'length'; nearest",
    ),
    ("quantize net.onnx folder.onnx -o o.onnx", "folder.onnx: is a folder; name a file in it"),
    (
        "profile net.onnx --data made",
        "made: there is no such file or folder; data must be arrays by input name, several",
    ),
    ("rename net.onnx -o net", "net: has no extension; name the file net.onnx\n"),
    (
        "profile open.onnx --runs 1",
        "it ran with length = 1; for other sizes, give --dims (length=...) or --data",
    ),
]


@pytest.mark.parametrize(
    ("command", "message"), WRONG, ids=[str(command)[:60] for command, _ in WRONG]
)
def test_a_line_says_what_is_wrong_and_nothing_is_written(folder, capfd, command, message):
    typed = (
        command.format(module=f"made_{folder.name}").split()
        if isinstance(command, str)
        else command
    )
    before = contents(folder)
    status = main(typed)
    out, error = capfd.readouterr()
    assert (status, error.count("\n"), out) == (2, 1, ""), error
    assert error.startswith("htp-export: error: ")
    assert message.replace("{module}", f"made_{folder.name}") in error
    assert "htp_export_" not in error  # temporary folders
    assert "\x1b" not in error
    assert contents(folder) == before


def test_every_command_has_wrong_inputs():
    typed = [command if isinstance(command, str) else " ".join(command) for command, _ in WRONG]
    assert [
        name for name in command_names() if not any(each.startswith(name) for each in typed)
    ] == []


@pytest.mark.parametrize("use", [htp_export.profile, htp_export.compare, htp_export.carry])
def test_python_refuses_a_mapping_without_inputs(use, folder):
    files = ["net.onnx"] if use is htp_export.profile else ["net.onnx", "net.onnx"]
    with pytest.raises(htp_export.InputError, match="no value for input 'x'"):
        use(*files, data={})


def test_files_that_may_not_be_read(tmp_path):
    write_model(_square(), tmp_path / "closed.onnx", "closed.data")
    said = {
        "closed.data": "closed.data: cannot be read",
        "closed.onnx": "path 'closed.onnx' is not readable",
    }
    for name, message in said.items():
        (tmp_path / name).chmod(0)
        run = bound_by_permissions(tmp_path, "optimize", "closed.onnx", "-o", "o.onnx")
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
        assert message in run.stderr


def test_a_newer_version_of_the_format_is_read_with_a_warning(folder, tmp_path, capsys, caplog):
    model = read_model("net.onnx")
    model.metadata_props[tags.FORMAT] = "2"
    write_model(model, tmp_path / "newer.onnx")
    assert main(["tree", str(tmp_path / "newer.onnx")]) == 0
    warning = "its tags are of version 2 of the file format, and this htp_export knows version 1"
    assert f"{tmp_path / 'newer.onnx'}: {warning}" in capsys.readouterr().err
    assert len(htp_export.load(tmp_path / "newer.onnx").hierarchy) == 7
    assert warning in caplog.text


SHARING = (
    "optimize",
    "functions",
    "functions --undo",
    "splice",
    "carry",
    "run",
    "rename",
    "tap",
    "quantize",
)


@pytest.mark.parametrize("command", SHARING)
def test_weights_are_shared_on_request(folder, tmp_path, command):
    write_model(_square(), tmp_path / "net.onnx", "net.onnx.data")
    write_model(_square(), tmp_path / "part.onnx")
    net, out = str(tmp_path / "net.onnx"), tmp_path / "out.onnx"
    if command == "splice":
        assert main(["extract", net, "layer.0", "-o", str(tmp_path / "part.onnx")]) == 0
        owned = htp_export.load(tmp_path / "part.onnx").model
        for value in owned.graph.initializers.values():  # its weights go into the file itself
            assert value.const_value is not None
            value.const_value = ir.tensor(value.const_value.numpy().copy(), name=value.name)
        write_model(owned, tmp_path / "part.onnx")
    arguments = {
        "optimize": [net],
        "functions": [net, "layer.1"],
        "functions --undo": [net],
        "splice": [net, "layer.0", str(tmp_path / "part.onnx")],
        "carry": [net, net],
        "run": ["onnxscript", net],
        "rename": [net],
        "tap": [net, "layer.0:out"],
        "quantize": [net, "--rule", "layer.0.fc=fp16"],
    }
    assert main([*command.split(), *arguments[command], "-o", str(out), "--share-weights"]) == 0
    model = read_model(out)
    assert tags.WEIGHTS in model.metadata_props
    weight = model.graph.initializers["layer.1.fc.weight"].const_value
    assert isinstance(weight, ir.ExternalTensor)
    assert weight.location == "net.onnx.data"


def test_the_hub_that_cannot_be_reached_is_not_a_model_that_is_not_there(monkeypatch):
    from htp_export.capabilities.huggingface import sources
    from htp_export.huggingface import load_model

    monkeypatch.setattr(sources, "_why_unreachable", lambda: "https://hub: no network")
    with pytest.raises(
        htp_export.InputError, match=r"the hub cannot be reached \(https://hub: no network\)"
    ):
        load_model("nobody/nothing-of-the-kind")


@pytest.mark.parametrize(
    ("flags", "options", "warned"),
    [
        ("fma avx2 sse4", {}, True),
        ("fma avx2 avx512f", {}, True),
        ("fma avx2 avx_vnni", {}, False),
        ("avx2 avx512_vnni", {}, False),
        ("fma avx2", {"reduce_range": True}, False),
        ("fma avx2", {"weight_type": "unsigned"}, False),
        ("asimd", {}, False),
        (None, {}, False),
    ],
)
def test_quantizing_warns_where_products_saturate(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    flags: str | None, options: dict[str, object], warned: bool,
) -> None:  # fmt: skip
    from onnxruntime.quantization import QuantType

    from htp_export.runtime import processors

    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n")
    monkeypatch.setattr(processors, "_CPUINFO", tmp_path / "cpuinfo")
    given = {
        key: QuantType.QUInt8 if value == "unsigned" else value for key, value in options.items()
    }
    htp_export.tools.quantize_dynamic("net.onnx", **given)
    assert ("this processor has no VNNI" in caplog.text) is warned


def _gone(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].input[0] = "gone"


def _called(name: str) -> Callable[[onnx.ModelProto], None]:
    def edit(proto: onnx.ModelProto) -> None:
        proto.graph.node[0].name = name

    return edit


LONG_NAMES = (
    *(
        "extract net.onnx NAME -o o.onnx",
        "tap net.onnx NAME:out -o o.onnx",
        "rename net.onnx -o NAME",
    ),
    *(
        "quantize net.onnx --rule NAME=int8 -o o.onnx",
        "quantize net.onnx --rule re:(NAME=int8 -o o.onnx",
    ),
    *(
        "quantize net.onnx --rule layer.0=NAME -o o.onnx",
        "quantize net.onnx keys.json -o o.onnx",
        "NAME",
    ),
    *(
        "optimize net.onnx --passes NAME -o o.onnx",
        "cost net.onnx --dims NAME=3",
        "cost net.onnx --shapes keys.json",
    ),
    *(
        "info node.onnx",
        "optimize node.onnx -o o.onnx",
        "tree modules.onnx",
        "extract class.onnx layer -o o.onnx",
    ),
    *(
        "verify net.onnx --entry NAME:make",
        "lora fuse net.onnx adapter -o o.onnx",
        "compare net.onnx NAME",
    ),
)


@pytest.mark.parametrize("words", ["nnnn", "n n "])
@pytest.mark.parametrize("length", [200_000, pytest.param(5_000_000, marks=pytest.mark.slow)])
def test_messages_quote_little_of_a_name_of_megabytes(
    words: str,
    length: int,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = words * (length // len(words))
    monkeypatch.chdir(tmp_path)
    for file in ("net.onnx", "net.onnx.data"):
        shutil.copy(folder / file, file)
    _variant(tmp_path, "node", _called(name), _gone)
    _variant(tmp_path, "modules", _said(tags.MODULES, name))
    _variant(
        tmp_path,
        "class",
        _said(tags.MODULES, json.dumps({"layer": {"class": name, "calls": name}})),
    )
    Path("keys.json").write_text(json.dumps({name: [1]}))
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(json.dumps({"peft_type": name, "r": 1}))
    before = contents(tmp_path)
    for typed in LONG_NAMES:
        status, shown = (
            main([word.replace("NAME", name) for word in typed.split()]),
            capsys.readouterr(),
        )
        assert status == 2, typed
        assert 0 < len(shown.err) < 4_500, typed
        assert not shown.out, typed
    assert contents(tmp_path) == before


def test_of_a_long_name_its_begin_its_end_and_the_advice_are_quoted() -> None:
    error = htp_export.errors.FileError(
        "net.onnx", f"has no module {'a' * 1_000 + 'z' * 1_000!r}; run tree"
    )
    assert (
        str(error)
        == f"net.onnx: has no module '{'a' * 249}... (1,653 characters) ...{'z' * 98}'; run tree"
    )
    error = htp_export.errors.FileError("net.onnx", f"has no module {'a b ' * 2_000!r}; run tree")
    assert str(error).startswith("net.onnx: has no module 'a b a b ")
    assert str(error).endswith("a b '; run tree")
    assert len(str(error)) < 3_600
