"""Targets that are no plain files, links, modes, folders that take no file; and what other systems do differently."""

import errno
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError
from htp_export.files import filesystem, write_file
from htp_export.files.filesystem import Identity, Lock
from htp_export.files.model_files import read_model, write_model
from htp_export.files.text_files import write_text
from tests.files.test_data_files import listing, save, values
from tests.permissions import bound_by_permissions

EXPORTERS = pytest.mark.parametrize("dynamo", [True, False])


def exported(file: Path, dynamo: bool, seed: int = 0) -> None:
    torch.manual_seed(seed)
    htp_export.export(
        nn.Linear(16, 16).eval(), (torch.zeros(1, 16),), file, dynamo=dynamo, verbose=False
    )


class Reader:
    """Reads a pipe to its end, beside the one who writes."""

    def __init__(self, pipe: Path) -> None:
        os.mkfifo(pipe)
        self._read = b""
        self._thread = threading.Thread(target=self._run, args=(pipe,), daemon=True)
        self._thread.start()

    def _run(self, pipe: Path) -> None:
        self._read = pipe.read_bytes()

    @property
    def model(self) -> onnx.ModelProto:
        self._thread.join(30)
        return onnx.load_from_string(self._read)


class TestSpecial:
    @EXPORTERS
    def test_an_export_writes_into_a_pipe(self, tmp_path, dynamo):
        reader = Reader(tmp_path / "pipe")
        exported(tmp_path / "pipe", dynamo)
        assert {len(tensor.raw_data) for tensor in reader.model.graph.initializer} == {64, 1024}
        assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
        assert listing(tmp_path) == ["pipe"]

    def test_a_model_is_written_with_its_weights(self, tmp_path):
        reader = Reader(tmp_path / "pipe")
        write_model(read_model(save(tmp_path / "a.onnx")), tmp_path / "pipe")
        made = {
            each.name: onnx.numpy_helper.to_array(each) for each in reader.model.graph.initializer
        }
        np.testing.assert_array_equal(made["layer.1.fc.weight"], values(tmp_path / "a.onnx"))
        assert not any(entry.key == "htp.data" for entry in reader.model.metadata_props)
        assert listing(tmp_path) == ["a.onnx", "a.onnx.data", "pipe"]

    @pytest.mark.parametrize(
        "command", ["optimize {0} -o {1}", "extract {0} layer -o {1}", "carry {0} {0} -o {1}"]
    )
    def test_commands_write_to_the_null_device(self, tmp_path, command):
        file = save(tmp_path / "a.onnx")
        assert main(command.format(file, os.devnull).split()) == 0
        assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
        assert not Path(f"{os.devnull}.data").exists()

    @EXPORTERS
    def test_exports_write_to_the_null_device(self, dynamo):
        exported(Path(os.devnull), dynamo)
        assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
        assert not Path(f"{os.devnull}.data").exists()

    def test_weights_cannot_lie_beside_it(self, tmp_path):
        model = read_model(save(tmp_path / "a.onnx"))
        with pytest.raises(
            FileError, match="is not a regular file, so that no data file can be beside it"
        ):
            write_model(model, os.devnull, "weights")


class TestLinks:
    def test_a_model_is_written_where_a_link_leads_to(self, tmp_path):
        real, link = save(tmp_path / "real" / "a.onnx", 0), tmp_path / "link.onnx"
        link.symlink_to(real)
        write_model(read_model(save(tmp_path / "b.onnx", 1)), link)
        assert link.is_symlink()
        for file in (real, link):
            np.testing.assert_array_equal(values(file), values(tmp_path / "b.onnx"))

    def test_a_command_names_the_files_that_it_wrote(self, tmp_path, capsys):
        (tmp_path / "real").mkdir()
        (tmp_path / "link.onnx").symlink_to(tmp_path / "real" / "a.onnx")
        assert (
            main(["optimize", str(save(tmp_path / "b.onnx")), "-o", str(tmp_path / "link.onnx")])
            == 0
        )
        said = " ".join(capsys.readouterr().out.split())
        assert str(tmp_path / "link.onnx") in said
        assert str(tmp_path / "real" / "a.onnx.data") in said

    @EXPORTERS
    def test_an_export_follows_links_as_torch_does(self, tmp_path, dynamo):
        (tmp_path / "real").mkdir()
        (tmp_path / "link.onnx").symlink_to(tmp_path / "real" / "a.onnx")
        exported(tmp_path / "link.onnx", dynamo)
        assert (tmp_path / "link.onnx").is_symlink()
        assert listing(tmp_path / "real") == ["a.onnx"]
        assert onnx.load(tmp_path / "link.onnx").graph.initializer[0].raw_data

    def test_a_link_to_another_file_system(self, tmp_path, monkeypatch):
        """What is in the work folder cannot be renamed there."""
        (tmp_path / "there").mkdir()
        (tmp_path / "a.html").symlink_to(tmp_path / "there" / "a.html")
        state = Path.stat

        def of_two_devices(path: Path, **options: Any) -> Any:
            found = state(path, **options)
            if path == tmp_path / "there":
                return os.stat_result([*found[:2], found.st_dev + 1, *found[3:]])
            return found

        monkeypatch.setattr(Path, "stat", of_two_devices)
        write_text(tmp_path / "a.html", "page")
        assert (tmp_path / "there" / "a.html").read_text() == "page"
        assert listing(tmp_path / "there") == ["a.html"]


class TestModes:
    @pytest.mark.parametrize("data", [None, "a.onnx.data"])
    def test_files_keep_their_mode(self, tmp_path, data):
        file, model = save(tmp_path / "a.onnx"), read_model(save(tmp_path / "b.onnx", 1))
        for path in (file, tmp_path / "a.onnx.data"):
            path.chmod(0o640)
        write_model(model, file, data)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("a.onnx*")}
        assert len(modes) == 2
        assert set(modes.values()) == {0o640}

    @EXPORTERS
    def test_exports_keep_modes(self, tmp_path, dynamo):
        exported(tmp_path / "a.onnx", dynamo)
        for path in tmp_path.iterdir():
            path.chmod(0o600)
        exported(tmp_path / "a.onnx", dynamo, seed=1)
        assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}

    def test_a_new_file_has_the_mode_that_others_have(self, tmp_path):
        (tmp_path / "plain").touch()
        save(tmp_path / "a.onnx")
        assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1

    @pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
    )
    def test_files_keep_their_owner(self, tmp_path):
        os.chown(save(tmp_path / "a.onnx"), 1234, 4321)
        write_model(read_model(save(tmp_path / "b.onnx")), tmp_path / "a.onnx")
        assert {(path.stat().st_uid, path.stat().st_gid) for path in tmp_path.glob("a.onnx")} == {
            (1234, 4321)
        }

    def test_a_group_that_cannot_be_kept_may_do_what_everybody_may(self, tmp_path, monkeypatch):
        file = tmp_path / "new"
        file.touch()
        old = os.stat_result([0o100664, 1, 1, 1, 999, 999, 0, 0, 0, 0])

        def refused(*_: object) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "chown", refused)
        filesystem.keep_owner_and_mode(file, old)
        assert stat.S_IMODE(file.stat().st_mode) == 0o644


class TestFolders:
    @pytest.fixture
    def read_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder that is mounted for reading, as these calls tell it."""
        folder = tmp_path / "mounted"
        folder.mkdir()
        access, mkdir, volume = os.access, Path.mkdir, os.statvfs(tmp_path)

        def not_made(path: Path, *rest: Any, **options: Any) -> None:
            if folder in path.parents:
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            mkdir(path, *rest, **options)

        flags = [*volume[:8], volume.f_flag | os.ST_RDONLY, volume.f_namemax]
        monkeypatch.setattr(
            os, "access", lambda path, mode: Path(path) != folder and access(path, mode)
        )
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(flags))
        monkeypatch.setattr(Path, "mkdir", not_made)
        return folder

    def test_a_command_says_it_in_one_line(self, read_only, tmp_path, capsys):
        file = save(tmp_path / "a.onnx")
        for command in ("optimize {0} -o {1}", "extract {0} layer -o {1}", "view {0} -o {1}.html"):
            assert main(command.format(file, read_only / "b.onnx").split()) == 2
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert "Read-only file system" in said

    @pytest.mark.parametrize("folder", ["mounted", "nowhere"])
    def test_it_is_said_before_the_work(self, read_only: Path, tmp_path: Path, folder: str) -> None:
        # The model is not there: whatever reads it first says that.
        file, out = tmp_path / "a.onnx", tmp_path / folder / "b.onnx"
        uses = (
            lambda: htp_export.optimize(file, out),
            lambda: htp_export.extract(file, "layer", out),
            lambda: htp_export.splice(file, "layer", file, out),
            lambda: htp_export.functions(file, "layer", out),
            lambda: htp_export.inline(file, out),
            lambda: htp_export.embed_map(file, out),
            lambda: htp_export.tools.onnxscript(file, out),
        )
        for use in uses:
            with pytest.raises(
                FileError, match=r"b\.onnx: cannot be written: .*(Read-only|does not exist)"
            ):
                use()

    @EXPORTERS
    def test_an_export_says_it_before_the_model_runs(self, read_only, dynamo):
        class Fails(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                pytest.fail("the model ran first")

        with pytest.raises(OSError, match="Read-only file system"):
            htp_export.export(
                Fails(), (torch.zeros(1),), read_only / "a.onnx", dynamo=dynamo, verbose=False
            )
        with pytest.raises(FileNotFoundError):
            htp_export.export(
                Fails(),
                (torch.zeros(1),),
                read_only / "no" / "a.onnx",
                dynamo=dynamo,
                verbose=False,
            )


@pytest.mark.long
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="file permissions bind the program by prctl"
)
def test_a_read_only_file_is_refused_before_the_work(tmp_path):
    save(tmp_path / "a.onnx")
    (tmp_path / "b.onnx").touch(0o444)
    run = bound_by_permissions(tmp_path, "optimize", "a.onnx", "-o", "b.onnx", "--force")
    assert (run.returncode, run.stderr) == (
        2, "htp-export: error: b.onnx: is read-only; name another file, or change its permissions\n",
    )  # fmt: skip
    (tmp_path / "b.onnx").chmod(0o644)
    assert (
        bound_by_permissions(tmp_path, "optimize", "a.onnx", "-o", "b.onnx", "--force").returncode
        == 0
    )


class TestOtherSystems:
    @pytest.fixture
    def windows(self, monkeypatch: pytest.MonkeyPatch) -> set[Path]:
        """No locks, no links, no modes, and files that are open are neither removed nor replaced."""
        open_files: set[Path] = set()
        unlink, replace = Path.unlink, os.replace

        def refuse(path: Any) -> None:
            if Path(path) in open_files:
                raise PermissionError(errno.EACCES, "The process cannot access the file", str(path))

        monkeypatch.setattr(filesystem, "fcntl", None)
        monkeypatch.setattr(os, "link", lambda *_: refuse_all())
        monkeypatch.delattr(os, "chown")
        monkeypatch.setattr(
            Path, "unlink", lambda self, missing_ok=False: (refuse(self), unlink(self, missing_ok))
        )
        monkeypatch.setattr(
            os, "replace", lambda one, other: (refuse(one), refuse(other), replace(one, other))
        )
        return open_files

    def test_models_are_written(self, windows, tmp_path):
        for seed in (0, 1):
            save(tmp_path / "a.onnx", seed)
            write_model(read_model(tmp_path / "a.onnx"), tmp_path / "b.onnx")
        np.testing.assert_array_equal(values(tmp_path / "a.onnx"), values(tmp_path / "b.onnx"))
        assert len(listing(tmp_path)) == 4

    def test_files_do_not_keep_the_access_of_a_work_folder(self, windows, tmp_path):
        """A folder of mode 0o700 has an access list on Windows, and files keep the list of where they were made."""
        with write_file.work_folder(tmp_path / "a") as work:
            assert work.path.stat().st_mode & 0o777 != 0o700

    def test_a_lock_is_held_whatever_the_identity_of_a_path_is(
        self, windows, tmp_path, monkeypatch
    ):
        """An open file cannot have been replaced there."""
        monkeypatch.setattr(Identity, "at", lambda path: None)
        assert Lock.new(tmp_path / "lock") is not None

    def test_data_that_is_mapped_is_not_in_the_way(self, windows, tmp_path):
        """The old data file cannot be removed while somebody has it mapped; a later run removes it."""
        write_model(read_model(save(tmp_path / "a.onnx", 0)), tmp_path / "b.onnx")
        windows.add(tmp_path / "b.onnx.data")
        write_model(read_model(save(tmp_path / "a.onnx", 1)), tmp_path / "b.onnx")
        np.testing.assert_array_equal(values(tmp_path / "b.onnx"), values(tmp_path / "a.onnx"))
        assert "b.onnx.data" in listing(tmp_path)
        windows.clear()
        save(tmp_path / "c.onnx")
        assert "b.onnx.data" not in listing(tmp_path)
        assert not [name for name in listing(tmp_path) if name.startswith(".")]
        np.testing.assert_array_equal(values(tmp_path / "b.onnx"), values(tmp_path / "a.onnx"))

    def test_a_model_that_is_mapped_is_left_with_its_data(self, windows, tmp_path):
        before = values(save(tmp_path / "a.onnx", 0))
        windows.add(tmp_path / "a.onnx.data")
        with pytest.raises(FileError, match=r"cannot be written: .*cannot access"):
            save(tmp_path / "a.onnx", 1)
        np.testing.assert_array_equal(values(tmp_path / "a.onnx"), before)

    def test_the_work_folder_of_a_running_process_is_left(self, windows, tmp_path):
        with write_file.work_folder(tmp_path / "a") as work:
            windows.add(work.path / "lock")
            write_file.clear_killed(tmp_path)
            assert (work.path / "new").is_dir()
            windows.clear()
        assert listing(tmp_path) == []

    def test_folders_that_cannot_be_waited_for(self, tmp_path, monkeypatch):
        def refused(*_: object) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refused)
        filesystem.sync_folder(tmp_path)


def refuse_all() -> None:
    raise OSError(errno.ENOTSUP, "Operation not supported")


NOBODY = {"device": 1, "number": 2, "size": 6, "written_ns": 3}
STEP = {
    "new": "new",
    "target": "target",
    "free": False,
    "old": None,
    "made": NOBODY,
    "away": "away",
    "holds": None,
}


class TestLocks:
    def test_a_lock_is_free_when_its_process_has_let_it_go(self, tmp_path):
        held = Lock.new(tmp_path / "lock")
        assert held is not None
        assert Lock.left(tmp_path / "lock") is None
        held.release()
        assert Lock.left(tmp_path / "lock") is not None

    def test_a_lock_that_was_removed_meanwhile_is_none(self, tmp_path):
        assert Lock.new(tmp_path / "gone" / "lock") is None
        assert Lock.left(tmp_path / "lock") is None

    def test_file_systems_without_locks(self, tmp_path, monkeypatch):
        """There, only a lock of yesterday is taken for one that was left."""

        def refused(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("fcntl.flock", refused)
        assert Lock.new(tmp_path / "lock") is not None
        assert Lock.left(tmp_path / "lock") is None
        os.utime(tmp_path / "lock", (1, 1))
        assert Lock.left(tmp_path / "lock") is not None

    def test_work_folders_of_running_processes_and_of_others_are_left(self, tmp_path, monkeypatch):
        (tmp_path / ".htp-something").mkdir()
        (tmp_path / ".htp-0123456789ab").symlink_to(tmp_path / ".htp-something")
        with write_file.work_folder(tmp_path / "a") as work:
            write_file.clear_killed(tmp_path)
            assert (work.path / "new").is_dir()
        assert listing(tmp_path) == [".htp-0123456789ab", ".htp-something"]
        killed = tmp_path / ".htp-ba9876543210"
        killed.mkdir()
        (killed / "lock").touch()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        write_file.clear_killed(tmp_path)
        assert killed.exists()
        monkeypatch.undo()
        write_file.clear_killed(tmp_path)
        assert not killed.exists()

    @pytest.mark.parametrize(
        "journal",
        ["", "{", "[]", "[" * 100_000, '{"steps": [7], "obsolete": []}', '{"steps": [{"new": 3}]}',
         '{"steps": [], "obsolete": [{"target": "\\u0000", "old": null}]}',
         *(json.dumps({"steps": [{**STEP, **other}], "obsolete": []}) for other in ({"holds": [7]}, {"made": 7},
          {"target": "\0"}, {"new": "/"}, {"new": "/", "made": None}, {"old": "x"}, {"free": "x", "away": 7}))],
    )  # fmt: skip
    def test_a_journal_that_makes_no_sense(self, tmp_path, journal):
        killed = tmp_path / ".htp-0123456789ab"
        killed.mkdir()
        (killed / "lock").touch()
        (killed / "journal").write_text(journal)
        write_file.clear_killed(tmp_path)
        assert listing(tmp_path) == []


def test_a_journal_from_elsewhere_moves_nothing(tmp_path):
    """Somebody unpacked an archive that holds a work folder: its journal cannot know the identity of its files."""
    work, target = tmp_path / ".htp-0123456789ab", tmp_path / "startup"
    (work / "new").mkdir(parents=True)
    (work / "lock").touch()
    (work / "new" / "file").write_text("run me")
    step = {
        **STEP,
        "new": str(work / "new" / "file"),
        "target": str(target),
        "away": str(work / "old" / "0"),
    }
    (work / "journal").write_text(json.dumps({"steps": [step], "obsolete": []}))
    write_file.clear_killed(tmp_path)
    assert listing(tmp_path) == []


def test_one_file_is_renamed_without_a_journal_and_several_files_with_one(tmp_path, monkeypatch):
    """One rename is done or not: a file of an export is written with two folders and a lock."""
    journals = []
    write_journal = write_file.WorkFolder._write_journal

    def counted(self: Any, steps: Any, removals: Any) -> None:
        journals.append([step.target.name for step in steps])
        write_journal(self, steps, removals)

    monkeypatch.setattr(write_file.WorkFolder, "_write_journal", counted)
    write_text(tmp_path / "a", "1")
    write_text(tmp_path / "a", "2")
    assert journals == []
    with write_file.work_folder(tmp_path / "a") as work:
        for name in ("a", "b"):
            (work.new / name).write_text("3")
        work.commit([write_file.Move(work.new / name, tmp_path / name) for name in ("a", "b")])
    assert journals == [["a", "b"]]
    assert listing(tmp_path) == ["a", "b"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.parametrize(("after", "expected"), [(False, "old"), (True, "new")])
def test_a_process_that_is_killed_at_its_only_rename_leaves_the_old_file_or_the_new_one(
    after, expected, tmp_path, monkeypatch
):
    target = tmp_path / "a"
    target.write_text("old")
    rename = os.replace

    def killed(*paths: Any) -> None:
        if after:
            rename(*paths)
        os._exit(7)

    monkeypatch.setattr(os, "replace", killed)
    process = os.fork()
    if not process:
        write_text(target, "new")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    monkeypatch.undo()
    assert target.read_text() == expected
    write_text(tmp_path / "b", "removes what is left of killed processes")
    assert listing(tmp_path) == ["a", "b"]
    assert target.read_text() == expected


def test_identities_of_folders_do_not_change_with_what_is_in_them(tmp_path):
    before = Identity.at(tmp_path)
    (tmp_path / "file").touch()
    assert Identity.at(tmp_path) == before
    assert Identity.at(tmp_path / "nothing") is None
