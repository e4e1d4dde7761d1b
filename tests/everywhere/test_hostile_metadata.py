"""Values of metadata that no program writes: each is read or is an error of the file, in a short time."""

import base64
import contextlib
import copy
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest

import htp_export
from htp_export.command.main import main
from htp_export.errors import HtpExportError
from htp_export.format import tags
from tests.all_commands import COMMANDS, arguments, companions, example
from tests.hostile import DIGITS, JSON, holder, places, replaced, within

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
SECONDS = 30  # for what takes a tenth of a second
INTERNAL = 3  # the exit status that says that a fault is ours

MODULE = {"class": "net.Net", "calls": 1, "fate": "computed"}
NOTE = {
    "size": 8704,
    "modified_ns": 1,
    "sha256": "0" * 64,
    "serial": "0" * 32,
    "tensors": "0" * 16,
    "differs": 4096,
}
FLAT = {
    "name": "flat",
    "metadata": {"htp.call": "1", "gone": None},
    "outputs": {"0": {"name": "y", "metadata": {"key": "value"}, "type": [1, [2, 32]]}},
    "graphs": [["body", "x"]],
}
STEP = {
    "step": "prune",
    "options": {"plan": {"first": 0.5}},
    "input": "0",
    "output": "1",
    "files": {},
    "versions": {},
}
MODELS: dict[str, Any] = {
    tags.FORMAT: "1",
    tags.MODULES: {
        "": MODULE,
        "first": {**MODULE, "fate": "fused", "with": ["act"], "name": "it", "synthetic": True},
    },
    tags.CALLERS: {"first": [0, ["second", 1], None]},
    tags.SIGNATURES: {"first": [[{"input": "input"}, ["linear", None]]]},
    tags.PARAMETERS: {
        "first": {"weight": [32, 32], "bias": [32]},
        "second": {"weight": "first.weight"},
    },
    tags.FROZEN: {"first": ["weight"]},
    tags.ASSUMED: {"first.bias": 0.0},
    tags.CALIBRATIONS: {
        "version": 1,
        "calibrations": [
            {"call": 0, "name": "int8", "method": "static", "activation": "int8", "weight": "int8"}
        ],
    },
    tags.CONTAMINATION: [["first", "linear", True]],
    tags.FUNCTIONS: {
        "calls": {"call": {"node": {**FLAT, "inside": {"node": FLAT}}}},
        "order": [1, 0],
    },
    tags.LORA: {"first": {"scaling": 2.0}},
    tags.TAPS: {"linear": {"places": ["first:out"], "made": ["linear"]}},
    tags.PLACEMENT: {"session.layer_assignment_settings": "cpu(=cpu)"},
    tags.PROVENANCE: [STEP],
    tags.WEIGHTS: {"net.onnx.data": NOTE},
    tags.DATA: {"net.onnx.data": NOTE},
    tags.MAP: {
        "nodes": [[["Relu"], [0]], ["node"], [[-1]], [[0]]],
        "values": [["x"]],
        "inputs": [0],
        "outputs": [1],
    },
}
NODES: dict[str, Any] = {
    tags.MODULE: "first",
    tags.OWNERS: ["first", "act"],
    tags.CALL: "1",
    tags.CALLS: {"first": [0, 1]},
    tags.REASON: "scope",
    tags.NAMESPACE: "first",
    tags.CALIBRATION: "0",
    "layer_ann": "cpu",
    "pkg.torch.onnx.name_scopes": "['', 'first', 'linear']",
    "pkg.torch.onnx.class_hierarchy": "['net.Net', 'torch.nn.Linear', 'aten']",
    "pkg.torch.onnx.stack_trace": 'File "net.py", line 3, in forward',
    tags.SOURCE: 'File "net.py", line 3, in forward',
}
RECIPE: Any = [
    "add",
    ["slice", ["cast", ["transpose", "first.weight", [1, 0]], "float16"], [0, 0, 8, 1]],
    2.0,
]
EXAMPLES: dict[str, Any] = {**MODELS, **NODES, tags.RECIPE: RECIPE, tags.FLOATS: "0RRIE"}
"""Every key of the format, and those of others that are read → what a file may have there."""

TEXTS = (
    *(
        "",
        " ",
        DIGITS,
        "null",
        "1" * 18,
        "1",
        "{[]}",
        "-1",
        "[" * 100_000,
        "[]",
        "." * 100_000,
        "{}",
        "٣",
        '""',
    ),
    *(
        '{"a":' * 100_000,
        "[",
        "\0\x1b[2J\u202e",
        "]",
        "(" * 5000,
        "²",
        "-" * 5000 + "1",
        "NaN",
        '{"": 1}',
        "[1]",
    ),
    *('["a"' + ',"a"' * 10_000 + "]", "x" * 1_000_000, "/" * 50_000, "'" * 101),
)
"""What may stand in place of a whole value."""

READERS = (
    *(
        "info",
        "tree",
        "nodes",
        "view",
        "cost",
        "diff",
        "extract",
        "verify",
        "carry",
        "functions --undo",
        "rename",
    ),
    *(
        "place --show",
        "forensics",
        "pipeline FILE -m PART -o again.onnx",
        "tap FILE --undo -o out.onnx",
    ),
)


def renamed(value: Any, place: tuple[Any, ...], name: str) -> str:
    """A value as JSON, with another key in one place."""
    changed = copy.deepcopy(value)
    entries = holder(changed, place)
    entries[name] = entries.pop(place[-1])
    return json.dumps(changed)


def values(key: str) -> Iterator[str]:
    """What is written in place of the example of a key."""
    example = EXAMPLES[key]
    yield from TEXTS
    if isinstance(example, str):
        return
    texts = [replaced(example, place, text) for place in places(example) for text in JSON]
    keys = [place for place in places(example) if place and isinstance(place[-1], str)]
    texts += [
        renamed(example, place, name)
        for place in keys
        for name in ("", DIGITS, "-1", "\x1b[2J\u202e", "gone")
    ]
    yield from (
        (base64.b85encode(zlib.compress(text.encode())).decode() for text in texts)
        if key == tags.MAP
        else texts
    )


def written(net: onnx.ModelProto, key: str, value: str, target: Path) -> Path:
    """A copy of a model with a value of a key, on the model, on all nodes, or on all initializers."""
    proto = onnx.ModelProto()
    proto.CopyFrom(net)
    scopes = key.startswith("pkg.")
    holders: Sequence[Any] = (
        [proto] if key in MODELS else proto.graph.node if key in NODES else proto.graph.initializer
    )
    for each in (*holders, *(proto.graph.node if scopes else ())):
        kept = [entry for entry in each.metadata_props if entry.key != key]
        kept = [
            entry for entry in kept if not (scopes and entry.key.startswith("htp."))
        ]  # read where there are no tags
        entries = [(entry.key, entry.value) for entry in kept]
        del each.metadata_props[:]
        each.metadata_props.extend(
            onnx.StringStringEntryProto(key=name, value=text) for name, text in entries
        )
    for each in holders:
        each.metadata_props.add(key=key, value=value)
    target.write_bytes(proto.SerializeToString())
    return target


def fault_of_loading(file: Path, *, save: bool = False) -> str:
    """The fault that is not one of the file, when a program loads it and asks for all that is known; empty if none."""
    try:
        with within(SECONDS):
            tagged = htp_export.load(file)
            for path in [] if tagged.source == "none" else list(tagged)[:10]:
                region = tagged[path]
                _ = region.nodes, region.inputs, region.outputs, region.parameters
            _ = (
                tagged.signatures,
                tagged.parameters,
                tagged.declared,
                tagged.taps,
                tagged.calls,
                tagged.reasons,
            )
            _ = repr(tagged), tagged._repr_html_()
            if save:
                tagged.save(file.with_name("saved.onnx"))
    except HtpExportError:
        return ""
    except Exception as error:
        return f"load: {type(error).__name__}: {error}"[:200]
    return ""


def fault_of_command(command: str, files: dict[str, Any]) -> str:
    """The same of a command."""
    said = io.StringIO()
    typed = arguments(command, files)
    with within(SECONDS), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main([*typed, *(["--force"] if "-o" in typed else [])])
    return f"{command}: {said.getvalue().strip()[-200:]}" if status == INTERNAL else ""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    model, args = example()
    htp_export.export(model, args, folder / "net.onnx", verbose=False)
    return folder / "net.onnx"


@pytest.fixture(scope="module")
def others(net: Path) -> dict[str, str]:
    return companions(net.parent)


def test_the_examples_are_those_of_every_key_of_the_format():
    documented = set(re.findall(r"`(htp\.[a-z]+|namespace)`", FORMAT.read_text(encoding="utf-8")))
    assert documented == {
        key for key in EXAMPLES if key.startswith("htp.") or key == tags.NAMESPACE
    }


def test_a_huge_number_in_the_place_of_calls_is_passed_over(net, tmp_path):
    proto = onnx.load(net, load_external_data=False)
    tagged = htp_export.load(written(proto, tags.CALLS, DIGITS, net.with_name("calls.onnx")))
    assert {tagged.work_of(node).doing for node in tagged.nodes} == {
        ("first",),
        ("act",),
        ("second",),
    }


ALL = pytest.mark.slow  # an hour


@pytest.mark.long
@pytest.mark.parametrize(
    "step", [pytest.param(23, id="some"), pytest.param(1, id="all", marks=ALL)]
)
@pytest.mark.parametrize("key", EXAMPLES)
def test_whatever_a_key_has_a_file_is_read_or_at_fault(key, step, net, others, monkeypatch):
    """A fault of ours is an exception that is none of htp_export, exit status 3, and what does not end."""
    monkeypatch.chdir(net.parent)
    proto = onnx.load(net, load_external_data=False)
    listed = list(values(key))
    commands = itertools.cycle(COMMANDS if step == 1 else READERS[ord(key[-1]) % 5 :])
    found = []
    for number, value in enumerate([*TEXTS[:: min(step, 2)], *listed[len(TEXTS) :: step]]):
        file = written(proto, key, value, net.with_name("hostile.onnx"))
        with_commands = number % min(step, 10) == 0
        found.append((value[:80], fault_of_loading(file, save=with_commands)))
        if with_commands:
            found.append((value[:80], fault_of_command(next(commands), {"FILE": file, **others})))
    assert [each for each in found if each[1]] == []


def test_hostile_values_of_all_keys_at_once_are_read_by_every_command(net, others, monkeypatch):
    """Values with which each key alone can be read, together: what reads one key meets what another one has."""
    monkeypatch.chdir(net.parent)
    proto = onnx.load(net, load_external_data=False)
    whole, kept = onnx.ModelProto(), []
    whole.CopyFrom(proto)
    for key in itertools.chain(
        MODELS, (tags.OWNERS, tags.CALL, tags.CALLS, tags.REASON, "layer_ann", tags.RECIPE)
    ):
        for value in list(values(key))[3::7]:
            file = written(proto, key, value, net.with_name("hostile.onnx"))
            with contextlib.suppress(HtpExportError):
                _ = htp_export.load(file).signatures
                whole.ParseFromString(written(whole, key, value, file).read_bytes())
                kept.append(key)
                break
    assert len(kept) > 10
    file = net.with_name("hostile.onnx")
    file.write_bytes(whole.SerializeToString())
    assert [
        said for command in READERS if (said := fault_of_command(command, {"FILE": file, **others}))
    ] == []
