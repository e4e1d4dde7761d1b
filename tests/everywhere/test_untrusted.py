"""Files from untrusted sources: no metadata of a model makes htp_export import, run or open what it names."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

import htp_export
from htp_export.command.commands import command_names
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from htp_export.files.model_files import read_model, write_model
from htp_export.format import tags
from htp_export.format.model_metadata import ProvenanceNote, write_provenance
from htp_export.model.hashes import content_hash
from tests.all_commands import COMMANDS, NAMES, companions, example
from tests.hostile import within

ROOT = Path(__file__).parents[2]
ENTRY = "evilmod:make"
EVIL = "from pathlib import Path\nPath('ran').touch()\ndef make():\n    Path('ran').touch()\n"


def keys_that_are_read() -> dict[str, bool]:
    """Every key of metadata in the source → whether it is one of nodes."""
    source = "\n".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "htp_export").rglob("*.py")
    )
    found = set(re.findall(r'= "((?:htp\.|pkg\.torch\.)[\w.]+|namespace|layer_ann)"', source))
    return {
        key: key in (*tags.NODE_KEYS, tags.SOURCE) or key.startswith("pkg.") or key == "layer_ann"
        for key in sorted(found)
    }


KEYS = keys_that_are_read()


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("net")
    model, args = example()
    htp_export.export(model, args, folder / "net.onnx", verbose=False)
    return folder / "net.onnx"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module that must not be imported; beside it is a file that must not be opened."""
    (tmp_path / "outside_secret").mkdir()
    (tmp_path / "outside_secret" / "secret.onnx").write_bytes(b"secret")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "evilmod.py").write_text(EVIL, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def well_formed(key: str, secret: str) -> list[str]:
    """Hostile values that the format allows: where it has a name, they have one of a module or a file."""
    module = {"class": ENTRY, "calls": 1, "fate": "computed", "name": secret}
    note = {"size": 6, "modified_ns": 1, "sha256": "0", "serial": "0", "tensors": "0"}
    contents: dict[str, Any] = {
        tags.MODULES: {"": module, "first": module, "act": module, "second": module},
        tags.CALLERS: {"first": [[ENTRY, 0]]},
        tags.SIGNATURES: {"first": [[{ENTRY: secret}, [secret]]]},
        tags.PARAMETERS: {"first": {ENTRY: [1], "weight": secret}},
        tags.FROZEN: {"first": [secret, ENTRY], ENTRY: [secret]},
        tags.CONTAMINATION: [["first", secret, True]],
        tags.FUNCTIONS: {"calls": {ENTRY: {secret: {"name": secret}}}, "order": [0]},
        tags.LORA: {"first": {"scaling": 1.0}, ENTRY: {"scaling": 2.0}},
        tags.PLACEMENT: {
            "session.layer_assignment_settings": secret,
            "session.load_model_format": secret,
        },
        tags.WEIGHTS: {secret: note, ENTRY: note},
        tags.DATA: {secret: note, ENTRY: note},
        tags.PROVENANCE: [
            {
                "step": "verify",
                "options": {"entry": ENTRY},
                "input": "",
                "output": "",
                "files": {secret: ""},
            }
        ],
        tags.OWNERS: ["first", ENTRY],
        tags.CALLS: {ENTRY: [0]},
    }
    trace = f'File "{secret}", line 1, in forward\n    import evilmod'
    code = f"[__import__('evilmod'), open({secret!r})]"
    return [json.dumps(contents[key])] if key in contents else [trace if "trace" in key else code]


def values(key: str, secret: str) -> list[str]:
    texts = [ENTRY, secret, f"!!python/object/apply:{ENTRY}"]
    return [
        *well_formed(key, secret),
        *texts,
        json.dumps(texts),
        json.dumps({text: text for text in texts}),
    ]


def hostile(net: Path, target: Path, wanted: dict[str, str]) -> Path:
    """A copy of a model with other metadata, on itself and on each of its nodes."""
    proto = onnx.load(net)
    for each, of_nodes in ((proto, False), *((node, True) for node in proto.graph.node)):
        entries = {entry.key: entry.value for entry in each.metadata_props}
        entries |= {key: value for key, value in wanted.items() if KEYS[key] == of_nodes}
        del each.metadata_props[:]
        each.metadata_props.extend(
            onnx.StringStringEntryProto(key=key, value=value) for key, value in entries.items()
        )
    onnx.save(proto, target)
    return target


def audited(commands: dict[Path, list[str]], others: dict[str, str]) -> list[str]:
    """What commands, listed for each file, imported, ran and opened because files name it."""
    listed = {str(file): words for file, words in commands.items()}
    Path("plan.json").write_text(json.dumps({"commands": listed, "others": others}))
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "tests.audited", "plan.json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_key_and_every_command_is_gone_through():
    assert {
        *tags.MODEL_KEYS,
        *tags.NODE_KEYS,
        tags.SOURCE,
        tags.PLACEMENT,
        tags.WEIGHTS,
        tags.DATA,
        tags.LORA,
    } <= set(KEYS)
    assert {"layer_ann", "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.stack_trace"} <= set(KEYS)
    assert set(command_names()) == NAMES


AGAIN = "pipeline FILE -m PART -o again.onnx"


def loads(file: Path) -> bool:
    try:
        tagged = htp_export.load(file)
        return bool((tagged.signatures, tagged.parameters, tagged.calls))
    except InputError:
        return False


@pytest.mark.long
def test_nothing_that_metadata_names_is_imported_run_or_opened(net, work):
    secret = str(work.parent / "outside_secret" / "secret.onnx")
    wanted = {key: well_formed(key, secret)[0] for key in KEYS}
    files = [
        hostile(net, work / f"{number}.onnx", {key: value})
        for number, (key, value) in enumerate(wanted.items())
    ]
    read = {key: wanted[key] for key, file in zip(wanted, files, strict=True) if loads(file)}
    assert {tags.PROVENANCE, tags.PLACEMENT, tags.CALLS, tags.LORA} < set(read)
    together = hostile(net, work / "all.onnx", read)
    assert not audited(
        {together: [*COMMANDS, AGAIN], **{file: ["tree"] for file in files}}, companions(work)
    )
    assert not (work / "ran").exists()


@pytest.mark.slow
def test_whatever_is_in_a_key_nothing_is_imported_run_or_opened(net, work):
    names = (str(work.parent / "outside_secret" / "secret.onnx"), "../outside_secret/secret.onnx")
    listed = {key: [value for name in names for value in values(key, name)] for key in KEYS}
    combined, refused = [], []
    # as many keys in one file as it is read with
    for number in range(max(map(len, listed.values()))):
        wanted = {key: texts[number] for key, texts in listed.items() if number < len(texts)}
        files = {
            key: hostile(net, work / f"{number}-{key}.onnx", {key: value})
            for key, value in wanted.items()
        }
        read = {key for key, file in files.items() if loads(file)}
        refused += [file for key, file in files.items() if key not in read]
        combined.append(hostile(net, work / f"{number}.onnx", {key: wanted[key] for key in read}))
    commands = [
        "tree",
        "view",
        "place --show",
        "functions",
        "optimize",
        "carry",
        "lora insert",
        "verify",
        AGAIN,
    ]
    listed_commands = dict.fromkeys(combined, commands) | {file: ["tree"] for file in refused}
    assert not audited(listed_commands, companions(work))
    assert not (work / "ran").exists()


def made_by(net: Path, target: Path, step: str, options: dict[str, Any]) -> Path:
    """A copy of a model that says that a step made it of that model."""
    model = read_model(net)
    write_provenance(
        model.metadata_props,
        [ProvenanceNote(step, options, content_hash(model), content_hash(model))],
    )
    write_model(model, target)
    return target


@pytest.mark.parametrize(
    ("step", "options", "problem"),
    [
        ("verify", {"entry": ENTRY}, "which may name code to run"),
        ("verify", {"source": "bert", "random_weights": True}, "which may name code to run"),
        ("compare", {"data": ENTRY}, "which may name code to run"),
        ("quantize", {"plan": "int8", "data": [ENTRY]}, "which may name code to run"),
        ("onnxsim", {"custom_lib": "outside_secret/evil.so"}, "which may name code to run"),
        (
            "onnxslim",
            {"model_check_inputs": ["x:outside_secret/x.npy"]},
            "which may name code to run",
        ),
        (
            "compare",
            {"providers": [["CPUExecutionProvider", {"library": "evil.so"}]]},
            "which may name code to run",
        ),
        (
            "lora.fuse",
            {"adapter": "../outside_secret"},
            "names a file that is not in the folder of this one",
        ),
        (
            "carry",
            {"after": "../outside_secret/secret.onnx"},
            "names a file that is not in the folder",
        ),
        (
            "splice",
            {"path": "first", "replacement": "/etc/passwd"},
            "names a file that is not in the folder",
        ),
        ("compare", {"a": "link/secret.onnx"}, "names a file that is not in the folder"),
        (
            "quantize",
            {"plan": "int8", "data": ["../outside_secret/x.npz"]},
            "names a file that is not in the folder",
        ),
        (
            "quantize_static",
            {"data": "../outside_secret/x.npz"},
            "names a file that is not in the folder",
        ),
    ],
)
def test_steps_of_a_model_file_name_no_code_and_no_file_elsewhere(
    step, options, problem, net, work, capsys
):
    (work / "link").symlink_to(work.parent / "outside_secret")
    file = made_by(net, work / "made.onnx", step, options)
    with pytest.raises(FileError, match=f"made.onnx: its step {step} has the option .*{problem}"):
        htp_export.pipeline(file, net, work / "again.onnx")
    assert main(["pipeline", str(file), "-m", str(net), "-o", "again.onnx"]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
    assert not {"ran", "again.onnx", "again.onnx.steps"} & {each.name for each in work.iterdir()}


@pytest.mark.parametrize("pattern", ["(.|.|.|.|.|.|.)*!", "(" + ".|" * 25 + ".)*!", "(a*)*b"])
def test_a_selector_in_the_steps_of_a_model_file_ends(pattern, net, work):
    file = made_by(net, work / "made.onnx", "prune", {"plan": {f"re:{pattern}": 0.5}})
    with within(30), pytest.raises(InputError, match="matches no module"):
        htp_export.pipeline(file, net, work / "again.onnx")
    file = made_by(net, work / "made.onnx", "functions", {"select": f"re:({pattern}"})
    with pytest.raises(InputError, match="missing "):
        htp_export.pipeline(file, net, work / "again.onnx")
    assert not (work / "again.onnx").exists()


def test_an_entry_runs_if_it_is_allowed_and_files_beside_are_read(net, work):
    file = made_by(net, work / "made.onnx", "verify", {"entry": "tests.all_commands:example"})
    assert main(["pipeline", str(file), "-m", str(net), "-o", "again.onnx", "--allow-entry"]) == 0
    file = made_by(
        net,
        work / "made.onnx",
        "splice",
        {"path": "first", "replacement": "../outside_secret/secret.onnx"},
    )
    assert main(["pipeline", str(file), "-m", str(net), "-o", "more.onnx", "--allow-entry"]) == 2
    others = companions(work)
    file = made_by(
        net, work / "made.onnx", "splice", {"path": "first", "replacement": others["PART"]}
    )
    assert [step.status for step in htp_export.pipeline(file, net, "more.onnx").steps] == ["ran"]
    Path("first").mkdir()  # a selector is no file
    file = made_by(net, work / "made.onnx", "functions", {"select": "first"})
    assert htp_export.pipeline(file, net, "nested.onnx").provenance[0].files == {}
