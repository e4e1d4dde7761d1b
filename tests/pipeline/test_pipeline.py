"""Pipelines: steps into files, how a file was made, going on after a stop, and the same model made again."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.pipeline.pipeline_steps import STEPS, PipelineStep
from htp_export.capabilities.pipeline.step_options import described_options
from htp_export.command.main import main
from htp_export.errors import FileError, InputError, StepError
from htp_export.files.model_files import read_model, write_model
from htp_export.format.model_metadata import read_provenance
from htp_export.model.hashes import content_hash
from tests.nets import Holding

ROOT = Path(__file__).parents[2]


class Net(Holding, first=nn.Linear(4, 40), same=nn.Identity(), second=nn.Linear(40, 3)):
    """Has something to fold, a module to replace, and weights that half precision changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.same(torch.relu(self.first(x)))) * (torch.ones(3) + 1)


def example() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The entry of a check against PyTorch."""
    torch.manual_seed(1)
    return Net().eval(), (torch.randn(2, 4),)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("exported") / "net.onnx"
    model, args = example()
    htp_export.export(model, args, file, dynamo=False, verbose=False)
    return file


def statuses(result: htp_export.results.PipelineRun) -> list[str]:
    return [step.status for step in result.steps]


STEPS_HERE: list[Any] = [
    {"optimize": {"level": "tolerant"}},
    "compare",
    {"onnxoptimizer": None},
    {"inline": {}},
]


@pytest.mark.parametrize("external", [False, True])
def test_each_step_writes_a_file_and_the_result_tells_how_it_was_made(external, exported, tmp_path):
    begin = tmp_path / "begin.onnx"
    write_model(read_model(exported), begin, True if external else None)
    output = tmp_path / "out.onnx"
    result = htp_export.pipeline(STEPS_HERE, begin, output)
    assert result.ok
    assert statuses(result) == ["ran"] * 4
    names = ["01-optimize.onnx", "03-onnxoptimizer.onnx", "04-inline.onnx"]
    files = sorted(tmp_path.glob("out.onnx.steps/*.onnx"))
    assert [file.name for file in files] == names
    assert [step.file for step in result.steps if step.file] == files
    notes = read_provenance(read_model(output).metadata_props)
    assert notes == result.provenance
    assert [note.step for note in notes] == ["optimize", "compare", "onnxoptimizer", "inline"]
    assert notes[0].options == {"level": "tolerant"}
    assert notes[0].input == content_hash(read_model(exported))
    assert [note.input for note in notes[1:]] == [note.output for note in notes[:-1]]
    assert notes[1].input == notes[1].output
    assert [content_hash(read_model(file)) for file in files] == [
        notes[place].output for place in (0, 2, 3)
    ]
    assert content_hash(read_model(output)) == notes[-1].output
    assert {"htp-export", "onnx", "onnxruntime", "onnxoptimizer"} <= set(notes[2].versions)
    assert output.with_name("out.onnx.data").exists() == external
    assert htp_export.load(output).source == "htp"
    assert htp_export.compare(exported, output).ok
    data = json.loads(json.dumps(result.to_dict()))
    assert (data["ok"], data["steps"][1]["file"], len(data["provenance"])) == (True, None, 4)
    assert str(result).splitlines()[-1] == "4 steps"


def test_carry_keeps_the_steps_that_made_the_model_before_the_tool(exported, tmp_path, capsys):
    made, after = tmp_path / "made.onnx", tmp_path / "after.onnx"
    steps = htp_export.pipeline(["optimize"], exported, made).provenance
    htp_export.tools.onnxoptimizer(made, after)
    stripped = read_model(after)
    stripped.metadata_props.pop("htp.provenance")
    for node in stripped.graph:
        node.metadata_props.clear()
    carried = htp_export.carry(made, stripped, tmp_path / "carried.onnx").model
    assert (
        read_provenance(read_model(after).metadata_props)
        == read_provenance(carried.metadata_props)
        == steps
    )
    assert main(["pipeline", str(tmp_path / "carried.onnx"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["unchanged"], [note["step"] for note in said["provenance"]]) == (
        False,
        ["optimize"],
    )
    htp_export.embed_map(made, tmp_path / "mapped.onnx")
    assert read_provenance(htp_export.carry(tmp_path / "mapped.onnx").model.metadata_props) == steps


def changed_files(folder: Path, before: dict[str, int]) -> set[str]:
    return {
        name for name, modified in modified_files(folder).items() if before.get(name) != modified
    }


def modified_files(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("*.onnx")}


def test_a_second_run_goes_on_after_the_last_step_that_is_the_same(exported, tmp_path):
    output, folder = tmp_path / "out.onnx", tmp_path / "steps"
    first = htp_export.pipeline(STEPS_HERE, exported, output, folder=folder)
    before = modified_files(folder)
    again = htp_export.pipeline(STEPS_HERE, exported, output, folder=folder)
    assert statuses(again) == ["kept"] * 4
    assert again.summary == "4 steps, 4 kept from an earlier run"
    assert again.provenance == first.provenance
    assert not changed_files(folder, before)

    other = [STEPS_HERE[0], {"compare": {"seed": 3}}, *STEPS_HERE[2:]]
    assert statuses(htp_export.pipeline(other, exported, output, folder=folder)) == [
        "kept",
        "ran",
        "ran",
        "ran",
    ]
    assert changed_files(folder, before) == {"03-onnxoptimizer.onnx", "04-inline.onnx"}

    changed = read_model(exported)
    weight = next(
        value for value in changed.graph.initializers.values() if value.const_value.size == 160
    )
    weight.const_value = ir.tensor(weight.const_value.numpy() * 2, name=weight.name)
    write_model(changed, tmp_path / "changed.onnx")
    assert (
        statuses(htp_export.pipeline(other, tmp_path / "changed.onnx", output, folder=folder))
        == ["ran"] * 4
    )

    assert statuses(htp_export.pipeline(other, exported, output, folder=folder)) == ["ran"] * 4
    assert (
        statuses(htp_export.pipeline(other, exported, output, folder=folder, resume=False))
        == ["ran"] * 4
    )
    for name in ("03-onnxoptimizer.onnx", "04-inline.onnx"):
        damaged = read_model(folder / name)
        damaged.graph[0].name = "another"
        write_model(damaged, folder / name)
    assert statuses(htp_export.pipeline(other, exported, output, folder=folder)) == [
        "kept",
        "ran",
        "ran",
        "ran",
    ]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("is_model", [False, True])
def test_a_file_that_no_pipeline_wrote_stays_in_the_folder_of_the_steps(
    used, is_model, exported, tmp_path
):
    output, folder = tmp_path / "out.onnx", tmp_path / "steps"
    folder.mkdir()
    if used:
        htp_export.pipeline(STEPS_HERE, exported, output, folder=folder)
    foreign = folder / "04-inline.onnx"
    foreign.unlink(missing_ok=True)
    if is_model:
        shutil.copy(exported, foreign)
    else:
        foreign.write_bytes(b"notes")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    for resume in (True, False):
        with pytest.raises(
            FileError,
            match=r"04-inline\.onnx: was not written by a pipeline; remove it, or name another",
        ):
            htp_export.pipeline(STEPS_HERE, exported, output, folder=folder, resume=resume)
        assert {file: file.read_bytes() for file in folder.iterdir()} == before
    foreign.unlink()
    assert statuses(htp_export.pipeline(STEPS_HERE, exported, output, folder=folder))[-1] == "ran"


class Branches(Holding, linear=nn.Linear(4, 4)):
    """Has branches, whose graphs are attributes of a node."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.linear(x) * 0.1, lambda x: x - 0.3, (x,))


@pytest.mark.long
@pytest.mark.torch
def test_models_with_branches_and_functions_are_known_again(tmp_path):
    file, output = tmp_path / "net.onnx", tmp_path / "out.onnx"
    htp_export.export(
        nn.Sequential(nn.Linear(4, 4), Branches()).eval(), (torch.ones(1, 4),), file, verbose=False
    )
    steps = [{"optimize": {"level": "tolerant"}}, {"functions": {"select": "0"}}]
    result = htp_export.pipeline(steps, file, output)
    assert len(read_model(output).functions) == 1
    assert [node.op_type for node in read_model(output).graph].count("If") == 1
    again = htp_export.pipeline(steps, file, output)
    assert (statuses(again), again.provenance) == (["kept", "kept"], result.provenance)


def test_files_that_options_name_count_by_their_contents(exported, tmp_path):
    after, output = tmp_path / "after.onnx", tmp_path / "out.onnx"
    shutil.copy(exported, after)
    steps = [{"carry": {"after": str(after)}}]
    assert statuses(htp_export.pipeline(steps, exported, output)) == ["ran"]
    assert statuses(htp_export.pipeline(steps, exported, output)) == ["kept"]
    htp_export.optimize(exported, after)
    result = htp_export.pipeline(steps, exported, output)
    assert statuses(result) == ["ran"]
    assert list(result.provenance[0].files) == [str(after)]


def test_options_of_python_count_by_their_values_and_what_has_none_is_never_kept():
    model = nn.Linear(2, 2)
    first = described_options({"data": np.ones(2), "model": model, "x": torch.ones(2)})
    assert first == described_options({"data": np.ones(2), "model": model, "x": torch.ones(2)})
    with torch.no_grad():
        model.weight.add_(1)
    second = described_options({"data": np.zeros(2), "model": model, "x": torch.ones(2)})
    assert first["x"] == second["x"]
    assert first["data"] != second["data"]
    assert first["model"] != second["model"]
    assert first["model"]["object"] == "Linear"
    assert described_options(lambda: None) == {"object": "function"}


def test_the_first_check_that_does_not_hold_stops_it_and_files_stay(exported, tmp_path):
    output = tmp_path / "out.onnx"
    strict = {"compare": {"tolerances": {"**": [0.0, 0.0]}}}
    steps = ["optimize", "float16", strict, "inline"]
    result = htp_export.pipeline(steps, exported, output)
    assert statuses(result) == ["ran", "ran", "failed", "skipped"]
    assert (result.ok, result.output, result.failed.name if result.failed else "") == (
        False,
        None,
        "compare",
    )
    assert result.summary == "step 3 (compare) does not hold; 1 skipped; the output is not written"
    assert result.steps[2].summary.startswith("first wrong") or "agree" in result.steps[2].summary
    assert not output.exists()
    assert sorted(file.name for file in (tmp_path / "out.onnx.steps").iterdir()) == [
        "01-optimize.onnx", "02-float16.onnx"
    ]  # fmt: skip
    assert [note.step for note in result.provenance] == ["optimize", "float16"]
    resumed = htp_export.pipeline([*steps[:2], "inline"], exported, output)
    assert statuses(resumed) == ["kept", "kept", "ran"]
    assert output.exists()


def test_a_step_that_fails_is_named_with_its_file_and_the_ones_before_stay(exported, tmp_path):
    output = tmp_path / "out.onnx"
    with pytest.raises(
        StepError, match=r"step 2 \(functions\) failed on .*01-optimize.onnx \(InputError"
    ) as raised:
        htp_export.pipeline(["optimize", {"functions": {"select": "same"}}], exported, output)
    assert (raised.value.number, raised.value.name) == (2, "functions")
    assert raised.value.file == tmp_path / "out.onnx.steps" / "01-optimize.onnx"
    assert not output.exists()
    result = htp_export.pipeline(["optimize", {"functions": {"select": "first"}}], exported, output)
    assert statuses(result) == ["kept", "ran"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "a pipeline is a list of steps"),
        ("optimize", "cannot be read"),
        ([{"optimise": {}}], "step 1: there is no step 'optimise'; there are optimize, "),
        (
            ["inline", {"optimize": {"lvl": 1}}],
            "step optimize: there is no option 'lvl'; it has data, dims, keep_exact",
        ),
        ([{"optimize": {"output": "x.onnx"}}], "there is no option 'output'"),
        ([{"onnxslim": {"output": "x.onnx"}}], "there is no option 'output'"),
        ([{"verify": {}}], "step verify: the option 'model' is missing"),
        ([{"functions": None}], "the option 'select' is missing"),
        ([{"optimize": {}, "inline": {}}], "step 1: a step is a name"),
        ([{"optimize": 3}], r"step 1 \(optimize\): options are a mapping"),
    ],
)
def test_steps_are_checked_before_anything_runs(steps, message, exported, tmp_path):
    with pytest.raises(InputError, match=message):
        htp_export.pipeline(steps, exported, tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


def test_the_model_to_begin_with_is_not_replaced(exported, tmp_path):
    file = tmp_path / "net.onnx"
    shutil.copy(exported, file)
    with pytest.raises(FileError, match="is the model to begin with"):
        htp_export.pipeline(["optimize"], file, file)
    with pytest.raises(InputError, match="an output to write"):
        htp_export.pipeline(["optimize"], file)
    with pytest.raises(InputError, match="a model to begin with"):
        htp_export.pipeline(["optimize"], None, tmp_path / "out.onnx")


def test_the_pipeline_of_a_file_is_repeated_and_makes_the_same_model(exported, tmp_path):
    made, again = tmp_path / "made.onnx", tmp_path / "again.onnx"
    htp_export.pipeline(["optimize"], exported, tmp_path / "first.onnx")
    result = htp_export.pipeline(["onnxoptimizer", "compare"], tmp_path / "first.onnx", made)
    assert [note.step for note in result.provenance] == ["optimize", "onnxoptimizer", "compare"]
    repeated = htp_export.pipeline(made, exported, again)
    assert (repeated.same, repeated.ok) == (True, True)
    assert repeated.summary == "3 steps; the same model came out again"
    assert content_hash(read_model(again)) == content_hash(read_model(made))
    with pytest.raises(InputError, match="began with another model"):
        htp_export.pipeline(made, made, again)
    with pytest.raises(FileError, match="has no record of how it was made"):
        htp_export.pipeline(exported, exported, again)
    model, args = example()
    htp_export.pipeline([{"verify": {"model": model, "args": args}}], exported, made)
    with pytest.raises(FileError, match="step verify had an option that was a Python object"):
        htp_export.pipeline(made, exported, again)


def test_a_folder_counts_by_the_files_in_it_and_a_precision_by_its_fields(exported, tmp_path):
    (tmp_path / "adapter").mkdir()
    step = PipelineStep("lora.fuse", {"adapter": str(tmp_path / "adapter")})
    before = step.files
    assert list(before) == [str(tmp_path / "adapter")]
    (tmp_path / "adapter" / "weights.bin").write_bytes(b"1")
    assert step.files != before
    assert PipelineStep("functions", {"select": str(tmp_path)}).files == {}
    steps = [
        {
            "quantize": {
                "plan": {"first": htp_export.Precision("half", "cast", "float16", "float16")}
            }
        }
    ]
    assert statuses(htp_export.pipeline(steps, exported, tmp_path / "out.onnx")) == ["ran"]
    assert statuses(htp_export.pipeline(steps, exported, tmp_path / "out.onnx")) == ["kept"]


def test_a_check_against_pytorch(exported, tmp_path):
    model, args = example()
    step = PipelineStep("verify", {"model": model, "args": args})
    assert htp_export.pipeline(["optimize", step], exported, tmp_path / "out.onnx").ok
    with pytest.raises(
        StepError, match=r"step 1 \(verify\) failed .* was not exported from this Net"
    ):
        htp_export.pipeline(
            [{"verify": {"model": Net().eval(), "args": args}}], exported, tmp_path / "other.onnx"
        )


def test_the_hash_is_of_what_a_model_computes_and_of_its_tags(exported, tmp_path):
    model = read_model(exported)
    base = content_hash(model)
    write_model(model, tmp_path / "other.onnx", "weights.bin")
    assert content_hash(read_model(tmp_path / "other.onnx")) == base
    assert content_hash(ir.from_proto(onnx.load(exported))) == base
    model.metadata_props["note"] = "of no importance"
    model.doc_string = "neither"
    assert content_hash(model) == base
    hashes = {base}

    def note_change() -> None:
        changed = content_hash(model)
        assert changed not in hashes
        hashes.add(changed)

    node = model.graph[-1]
    node.metadata_props["htp.module"] = "second"
    note_change()
    node.attributes["alpha"] = ir.AttrFloat32("alpha", 0.1)
    note_change()
    node.attributes["alpha"] = ir.AttrTensor("alpha", ir.tensor([0.1]))
    note_change()
    model.graph.inputs[0].shape = ir.Shape(["batch", 4])
    note_change()
    weight = next(iter(model.graph.initializers.values()))
    weight.const_value = ir.tensor(weight.const_value.numpy() + 1, name=weight.name)
    note_change()


YAML = """
model: {model}
output: {output}
steps:
- optimize:
    level: tolerant
- verify: {{entry: "tests.pipeline.test_pipeline:example"}}
- compare: {{tolerances: {{second: [1.0e-4, 1.0e-4]}}}}
"""


@pytest.mark.parametrize("options", [[], ["--json"], ["-m", "FILE", "-o", "OUT"]])
def test_a_file_that_no_pipeline_wrote_is_refused(options, exported, tmp_path, capsys):
    places = {"FILE": str(exported), "OUT": str(tmp_path / "out.onnx")}
    assert main(["pipeline", str(exported), *(places.get(word, word) for word in options)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no pipeline wrote it; to run steps on it, name a file of steps" in captured.err


def test_the_command_runs_a_file_shows_and_repeats_its_result(
    exported, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    steps, output = tmp_path / "steps.yaml", tmp_path / "out.onnx"
    steps.write_text(YAML.format(model=exported, output=output))
    assert main(["pipeline", str(steps)]) == 0
    assert "3 steps" in capsys.readouterr().out
    assert main(["pipeline", str(steps), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    # checks at the end run again
    assert [step["status"] for step in data["steps"]] == ["kept", "ran", "ran"]
    assert data["provenance"][1]["options"] == {"entry": "tests.pipeline.test_pipeline:example"}
    assert main(["pipeline", str(output)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "optimize(level='tolerant')",
        "verify(entry='tests.pipeline.test_pipeline:example')",
        "compare(tolerances={'second': [0.0001, 0.0001]})",
    ]
    again = tmp_path / "again.onnx"
    assert (
        main(
            [
                "pipeline",
                str(output),
                "-m",
                str(exported),
                "-o",
                str(again),
                "--json",
                "--allow-entry",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["same"] is True
    changed = htp_export.optimize(again, passes="eliminate_identity_ops").model
    changed.graph[0].name = "changed"
    write_model(changed, again)
    assert main(["pipeline", str(again), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unchanged"] is False


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (
            '[{"float16": {}}, {"compare": {"tolerances": {"**": [0, 0]}}}]',
            1,
            "step 2 (compare) does not hold",
        ),
        ("[{functions: {select: same}}]", 1, "step 1 (functions) failed"),
    ],
)
def test_exit_statuses_of_the_command(text, status, message, exported, tmp_path, capsys):
    steps = tmp_path / "steps.yaml"
    steps.write_text(text)
    assert (
        main(["pipeline", str(steps), "-m", str(exported), "-o", str(tmp_path / "out.onnx")])
        == status
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.onnx").exists()


def test_the_documentation_lists_every_step():
    listed = set(
        re.findall(
            r"^\| `([\w.]+)`",
            (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    from htp_export.capabilities.carry import adapters

    assert listed == set(STEPS) - set(adapters.__all__)
