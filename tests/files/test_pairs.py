"""A model and its data file are a pair: replaced together, known when torn apart, and read as what was loaded."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import FileError
from htp_export.files import data_plan, filesystem, write_file
from htp_export.files.kept_name import KeptName, rename_data
from htp_export.files.model_files import read_model, write_model
from htp_export.format import tags
from tests.files.test_data_files import WEIGHT, listing, save, values, weight_of

USES: dict[str, Any] = {
    "save": lambda tagged, out: tagged.save(out),
    "save_named": lambda tagged, out: tagged.save(out, "named.data"),
    "optimize": lambda tagged, out: htp_export.optimize(tagged, out),
    "carry": lambda tagged, out: htp_export.carry(tagged, tagged, out),
    "extract": lambda tagged, out: htp_export.extract(tagged, "layer", out),
    "numpy": lambda tagged, out: weight_of(tagged.model).numpy(),
    "tobytes": lambda tagged, out: weight_of(tagged.model).tobytes(),
}


class TestIdentity:
    @pytest.mark.parametrize("read_before", [False, True])
    @pytest.mark.parametrize("use", USES)
    def test_weights_of_another_model_are_never_read(self, tmp_path, use, read_before):
        tagged = htp_export.load(save(tmp_path / "a.onnx", seed=0))
        if read_before:
            weight_of(tagged.model).numpy()
        time = (tmp_path / "a.onnx.data").stat().st_mtime_ns
        save(tmp_path / "a.onnx", seed=1)
        # of one size, written in the same instant
        os.utime(tmp_path / "a.onnx.data", ns=(time, time))
        with pytest.raises(
            FileError,
            match=r"a\.onnx\.data: was changed after .*a\.onnx was read; load the model again",
        ):
            USES[use](tagged, tmp_path / "b.onnx")
        assert listing(tmp_path) == ["a.onnx", "a.onnx.data"]

    def test_a_file_that_was_removed_meanwhile_is_named(self, tmp_path):
        model = read_model(save(tmp_path / "a.onnx"))
        (tmp_path / "a.onnx.data").unlink()
        with pytest.raises(
            FileError, match=r"a\.onnx\.data: is missing: .*it existed when the model was read"
        ):
            weight_of(model).numpy()

    def test_a_file_that_changes_while_it_is_copied_is_refused(self, tmp_path):
        model = read_model(save(tmp_path / "a.onnx"))

        class Changing:
            def write(self, part: bytes) -> None:
                with (tmp_path / "a.onnx.data").open("r+b") as file:
                    file.write(bytes(8))
                os.utime(tmp_path / "a.onnx.data", (1, 1))

        with pytest.raises(FileError, match="was changed after"):
            weight_of(model).tofile(Changing())  # type: ignore[attr-defined]


class TestNames:
    @pytest.mark.parametrize("name", ["b.onnx", "b.textproto"])
    def test_a_data_file_keeps_its_name_when_the_model_is_replaced(self, tmp_path, name):
        for seed in (0, 1, 2, 2):
            source = save(tmp_path / f"from{seed}" / "a.onnx", seed=seed)
            write_model(read_model(source), tmp_path / name)
            assert listing(tmp_path)[:2] == [name, f"{name}.data"]
            np.testing.assert_array_equal(values(tmp_path / name), values(source))
            assert (tmp_path / f"{name}.data").stat().st_nlink == 1  # onnx refuses several links

    def test_a_model_is_read_on_after_it_was_written_over_the_file_that_it_is_read_from(
        self, tmp_path
    ):
        file = save(tmp_path / "a.onnx")
        model = read_model(file)
        before = weight_of(model).numpy().copy()
        model.graph.initializers["layer.0.fc.weight"].const_value = ir.tensor(
            np.ones((16, 16), np.float32)
        )
        write_model(model, file, True)
        assert listing(tmp_path) == ["a.onnx", "a.onnx.data"]
        np.testing.assert_array_equal(weight_of(model).numpy(), before)
        assert weight_of(model).path == str(tmp_path / "a.onnx.data")

    def test_a_data_file_has_another_name_where_the_file_system_has_no_hard_links(
        self, tmp_path, monkeypatch
    ):
        def refused(*_: object) -> None:
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refused)
        for seed in (0, 1):
            source = save(tmp_path / f"from{seed}" / "a.onnx", seed=seed)
            write_model(read_model(source), tmp_path / "b.onnx")
        (data,) = (name for name in listing(tmp_path) if name.endswith(".data"))
        assert data.startswith("b.onnx.")
        assert data != "b.onnx.data"
        np.testing.assert_array_equal(values(tmp_path / "b.onnx"), values(source))
        write_model(read_model(source), tmp_path / "b.onnx")
        assert listing(tmp_path)[:2] == ["b.onnx", "b.onnx.data"]

    def test_at_no_moment_do_the_files_not_fit_together(self, tmp_path, monkeypatch):
        """Other programs do not read the description that htp_export compares."""
        sources = [save(tmp_path / f"from{seed}" / "a.onnx", seed=seed) for seed in (0, 1)]
        old, new = (values(source).tobytes() for source in sources)
        write_model(read_model(sources[0]), tmp_path / "b.onnx")
        seen: list[bytes] = []

        def look(change: Callable[..., Any]) -> Callable[..., Any]:
            def changed(*arguments: Any, **options: Any) -> Any:
                seen.append(raw_weight(tmp_path / "b.onnx"))
                result = change(*arguments, **options)
                seen.append(raw_weight(tmp_path / "b.onnx"))
                return result

            return changed

        for name in ("link", "replace", "rename", "unlink"):
            monkeypatch.setattr(os, name, look(getattr(os, name)))
        write_model(read_model(sources[1]), tmp_path / "b.onnx")
        monkeypatch.undo()
        changed = seen.index(new)
        assert set(seen[:changed]) == {old}
        assert set(seen[changed:]) == {new}
        assert listing(tmp_path)[:2] == ["b.onnx", "b.onnx.data"]

    def test_a_model_that_another_process_has_written_meanwhile_stays(self, tmp_path, monkeypatch):
        sources = [save(tmp_path / f"from{seed}" / "a.onnx", seed=seed) for seed in (0, 1, 2)]
        write_model(read_model(sources[0]), tmp_path / "b.onnx")
        take = KeptName.take

        def late(kept: KeptName, *arguments: Any) -> bool:
            monkeypatch.undo()
            shutil.copy(sources[2], tmp_path / "b.onnx")
            shutil.copy(tmp_path / "from2" / "a.onnx.data", tmp_path / "a.onnx.data")
            return take(kept, *arguments)

        monkeypatch.setattr(KeptName, "take", late)
        write_model(read_model(sources[1]), tmp_path / "b.onnx")
        np.testing.assert_array_equal(values(tmp_path / "b.onnx"), values(sources[2]))
        assert "b.onnx.data" not in listing(tmp_path)

    def test_a_data_file_of_that_name_which_is_not_the_models_own_stays(self, tmp_path):
        (tmp_path / "b.onnx.data").write_bytes(b"something else")
        write_model(read_model(save(tmp_path / "a.onnx")), tmp_path / "b.onnx")
        assert (tmp_path / "b.onnx.data").read_bytes() == b"something else"
        np.testing.assert_array_equal(values(tmp_path / "b.onnx"), values(tmp_path / "a.onnx"))

    def test_a_name_that_another_process_has_just_taken(self, tmp_path, monkeypatch):
        model = read_model(save(tmp_path / "a.onnx"))
        commit = write_file.WorkFolder.commit

        def taken(self: Any, moves: Any, obsolete: Any = list) -> None:
            if not (tmp_path / "b.onnx.data").exists():
                (tmp_path / "b.onnx.data").write_bytes(b"theirs")
            commit(self, moves, obsolete)

        monkeypatch.setattr(write_file.WorkFolder, "commit", taken)
        write_model(model, tmp_path / "b.onnx")
        assert (tmp_path / "b.onnx.data").read_bytes() == b"theirs"
        np.testing.assert_array_equal(values(tmp_path / "b.onnx"), values(tmp_path / "a.onnx"))

    def test_an_export_has_the_names_that_torch_gives(self, tmp_path):
        for _ in range(2):
            export(tmp_path / "a.onnx", 0)
        assert listing(tmp_path) == ["a.onnx", "a.onnx.data"]

    def test_an_export_takes_the_place_of_a_model_with_a_serial(self, tmp_path):
        for seed in (0, 1):
            write_model(read_model(save(tmp_path / "x" / "a.onnx", seed=seed)), tmp_path / "a.onnx")
        (tmp_path / "a.onnx.data").rename(tmp_path / "a.onnx.01ab23cd.data")
        proto = onnx.load(tmp_path / "a.onnx", load_external_data=False)
        for tensor in proto.graph.initializer:
            rename_data([tensor], "a.onnx.01ab23cd.data")
        onnx.save(proto, tmp_path / "a.onnx")
        assert "a.onnx.data" not in listing(tmp_path)
        export(tmp_path / "a.onnx", 0)
        assert listing(tmp_path) == ["a.onnx", "a.onnx.data", "x"]


def raw_weight(file: Path) -> bytes:
    """The weight that `values` reads, as any program reads it."""
    proto = onnx.load(file, load_external_data=False)
    (tensor,) = (each for each in proto.graph.initializer if each.name == WEIGHT)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    start = int(entries["offset"])
    data = (file.parent / entries["location"]).read_bytes()
    return data[start : start + int(entries["length"])]


def export(file: Path, seed: int, head: float = 0.0) -> None:
    """A model whose last value in the data file can be another, and nothing else."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 512)).eval()
    with torch.no_grad():
        model[1].weight[300, 77] += head
    program = htp_export.export(model, (torch.zeros(2, 256),), verbose=False)
    assert program is not None
    program.save(file, external_data=True)


class TestTornPairs:
    @pytest.mark.parametrize("kind", ["write_model", "export", "one_value"])
    def test_a_model_with_the_data_that_was_there_before_is_refused(self, tmp_path, kind):
        """As a kill between the two renames leaves them."""
        file, old = tmp_path / "a.onnx", tmp_path / "old.data"
        for seed in (0, 1):
            if kind == "write_model":
                save(file, seed)
            else:
                export(file, seed if kind == "export" else 0, head=seed)
            if seed == 0:
                shutil.copyfile(tmp_path / "a.onnx.data", old)
        read_model(file)
        old.replace(tmp_path / "a.onnx.data")
        with pytest.raises(
            FileError,
            match=r"a\.onnx: does not match its data file a\.onnx\.data: its contents are not",
        ):
            htp_export.load(file)

    def test_a_model_of_another_tool_whose_data_was_replaced_is_not_left_alone(
        self, tmp_path, monkeypatch
    ):
        """A model that says nothing of its data is replaced before its data is."""
        torch.manual_seed(0)
        torch.onnx.export(
            nn.Linear(64, 64).eval(), (torch.zeros(1, 64),), tmp_path / "a.onnx", verbose=False
        )
        torch.manual_seed(1)
        program = htp_export.export(nn.Linear(64, 64).eval(), (torch.zeros(1, 64),), verbose=False)
        renames = stopped_after_first(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            program.save(tmp_path / "a.onnx", external_data=True)  # type: ignore[union-attr]
        assert renames == ["a.onnx"]
        monkeypatch.undo()
        with pytest.raises(FileError, match="does not match its data file"):
            htp_export.load(tmp_path / "a.onnx")

    def test_what_was_interrupted_is_finished_by_the_next_write(self, tmp_path, monkeypatch):
        save(tmp_path / "a.onnx", 0)
        stopped_after_first(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "a.onnx", 1)
        monkeypatch.undo()
        with pytest.raises(FileError, match="does not match its data"):
            read_model(tmp_path / "a.onnx")
        save(tmp_path / "b.onnx", 2)
        assert listing(tmp_path) == ["a.onnx", "a.onnx.data", "b.onnx", "b.onnx.data"]
        np.testing.assert_array_equal(
            values(tmp_path / "a.onnx"), values(save(tmp_path / "c.onnx", 1))
        )

    def test_what_was_interrupted_is_not_finished_over_newer_files(self, tmp_path, monkeypatch):
        save(tmp_path / "a.onnx", 0)
        stopped_after_first(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "a.onnx", 1)
        monkeypatch.undo()
        (tmp_path / "a.onnx.data").write_bytes(b"mine")
        save(tmp_path / "b.onnx", 2)
        assert (tmp_path / "a.onnx.data").read_bytes() == b"mine"
        assert not [name for name in listing(tmp_path) if name.startswith(".")]

    def test_copies_of_both_files_are_read(self, tmp_path):
        file = save(tmp_path / "a.onnx")
        (tmp_path / "copy").mkdir()
        for name in ("a.onnx", "a.onnx.data"):
            shutil.copyfile(tmp_path / name, tmp_path / "copy" / name)
        np.testing.assert_array_equal(values(tmp_path / "copy" / "a.onnx"), values(file))

    def test_files_that_another_tool_wrote_anew_are_read(self, tmp_path):
        model = onnx.load(save(tmp_path / "a.onnx"))
        (tmp_path / "a.onnx.data").unlink()
        del model.graph.initializer[0].metadata_props[:]
        model.graph.initializer[0].raw_data = bytes(len(model.graph.initializer[0].raw_data))
        model.graph.initializer.reverse()
        onnx.save(
            model,
            tmp_path / "a.onnx",
            save_as_external_data=True,
            location="a.onnx.data",
            size_threshold=2000,
        )
        assert tags.DATA in {entry.key for entry in model.metadata_props}
        values(tmp_path / "a.onnx")

    def test_an_exported_model_says_it_once_and_is_torchs_own_without(self, tmp_path):
        export(tmp_path / "a.onnx", 0)
        htp_export.embed_map(tmp_path / "a.onnx", tmp_path / "a.onnx")
        proto = onnx.load(tmp_path / "a.onnx", load_external_data=False)
        (said,) = (
            json.loads(entry.value) for entry in proto.metadata_props if entry.key == tags.DATA
        )
        size = (tmp_path / "a.onnx.data").stat().st_size
        assert said["a.onnx.data"].keys() == {"size", "serial", "tensors"}
        assert said["a.onnx.data"]["size"] == size

    @pytest.mark.parametrize("key", [tags.DATA, tags.WEIGHTS])
    @pytest.mark.parametrize(
        "note", ["{", "7", '{"a.onnx.data": 3}', '{"a.onnx.data": {"size": -1, "serial": 3}}']
    )
    def test_what_is_said_may_be_nonsense(self, tmp_path, key, note):
        proto = onnx.load(save(tmp_path / "a.onnx"), load_external_data=False)
        del proto.metadata_props[:]
        proto.metadata_props.add(key=key, value=note)
        onnx.save(proto, tmp_path / "a.onnx")
        with pytest.raises(FileError, match=rf"{key} is not what the file format says"):
            read_model(tmp_path / "a.onnx")

    def test_the_first_block_that_differs_is_sampled(self, tmp_path):
        size, at = 3 << 20, (1 << 20) + 12345
        for name, value in (("old", 0), ("new", 1)):
            content = bytearray(size)
            content[at] = value
            (tmp_path / name).write_bytes(content)
        places = [(0, size)]
        said = data_plan.describe_own(tmp_path / "new", places, tmp_path / "old")
        assert said["differs"] == at // 4096 * 4096
        assert "differs" not in data_plan.describe_own(tmp_path / "new", places)
        assert (
            said["serial"]
            != data_plan.describe_own(tmp_path / "old", places, tmp_path / "new")["serial"]
        )
        assert "differs" not in data_plan.describe_own(tmp_path / "new", places, tmp_path / "new")


def stopped_after_first(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stop after the first rename as a kill does: nothing is put back."""
    renames: list[str] = []
    do = write_file._Step.do

    def stopped(step: Any) -> None:
        if renames:
            raise KeyboardInterrupt
        renames.append(step.target.name)
        do(step)

    monkeypatch.setattr(write_file._Step, "do", stopped)
    monkeypatch.setattr(write_file, "_put_back", lambda *_: False)
    monkeypatch.setattr(write_file.WorkFolder, "finish", lambda *_: None)
    unlink = Path.unlink
    monkeypatch.setattr(
        Path,
        "unlink",
        lambda self, missing_ok=False: None if self.name == "journal" else unlink(self, missing_ok),
    )
    return renames


class TestFailures:
    @pytest.mark.parametrize("where", ["sync", "write", "journal"])
    @pytest.mark.parametrize("data", [None, "target.onnx.data"])
    def test_the_disk_is_full(self, tmp_path, monkeypatch, where, data):
        target = save(tmp_path / "target.onnx", 0)
        model = read_model(save(tmp_path / "other" / "a.onnx", 1))
        old = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        place = {
            "sync": (filesystem, "sync_file"),
            "write": (htp_export.files.data_files, "write_values"),
            "journal": (write_file, "_plain"),
        }[where]
        monkeypatch.setattr(
            "fcntl.ioctl", lambda *_: (_ for _ in ()).throw(OSError(95, "not here"))
        )
        monkeypatch.setattr(*place, full)
        with pytest.raises(
            FileError, match=r"target\.onnx: cannot be written: No space left on device$"
        ):
            write_model(model, target, data)
        assert {
            path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()
        } == old
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other", *sorted(old)]

    def test_new_files_are_on_the_disk_before_old_ones_are_replaced(self, tmp_path, monkeypatch):
        done: list[str] = []
        sync, folder, do = filesystem.sync_file, filesystem.sync_folder, write_file._Step.do
        monkeypatch.setattr(
            filesystem, "sync_file", lambda path: (done.append(f"sync {path.name}"), sync(path))
        )
        monkeypatch.setattr(
            filesystem, "sync_folder", lambda path: (done.append("sync folder"), folder(path))
        )
        monkeypatch.setattr(
            write_file._Step,
            "do",
            lambda step: (done.append(f"rename {step.target.name}"), do(step)),
        )
        save(tmp_path / "a.onnx", 0)
        assert done == ["rename a.onnx.data", "rename a.onnx"]  # nothing could be lost
        done.clear()
        save(tmp_path / "a.onnx", 1)
        assert done == [
            "sync a.onnx",
            "sync a.onnx.data",
            "rename a.onnx",
            "rename a.onnx.data",
            "sync folder",
        ]
