"""A study in every kind of storage: two processes share it, one is killed, and the other one does what it had begun.

After Ctrl-C, the front so far is written, and the same command goes on.
"""

import contextlib
import glob
import importlib.util
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.search.measuring import Measurer
from htp_export.capabilities.search.studies import open_study
from htp_export.command.main import main
from htp_export.errors import InputError

optuna = pytest.importorskip("optuna")

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def journal(folder: Path) -> Iterator[str]:
    yield str(folder / "study.log")


@contextlib.contextmanager
def sqlite(folder: Path) -> Iterator[str]:
    yield f"sqlite:///{folder}/study.db"


@contextlib.contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """A server of its own, in a folder that it may write; as another user, since PostgreSQL does not run as root."""
    places = [os.environ.get("PATH", ""), *glob.glob("/usr/lib/postgresql/*/bin")]  # noqa: PTH207 - not in PATH on Debian
    programs = [shutil.which(name, path=os.pathsep.join(places)) for name in ("initdb", "pg_ctl")]
    driver = next(
        (name for name in ("psycopg", "psycopg2") if importlib.util.find_spec(name)), None
    )
    if None in programs or driver is None:
        pytest.skip("needs the server of PostgreSQL (initdb, pg_ctl) and psycopg or psycopg2")
    as_user: dict[str, Any] = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.STDOUT,
        "check": True,
    }
    with tempfile.TemporaryDirectory(prefix="htp_pg_") as place:
        if os.getuid() == 0:
            names = {entry.pw_name for entry in pwd.getpwall()}
            user = next((name for name in ("postgres", "nobody") if name in names), None)
            if user is None:
                pytest.skip("PostgreSQL does not run as root, and there is no other user")
            as_user |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "cwd": place}
            shutil.chown(place, user)
        base, port = str(Path(place) / "data"), free_port()
        initdb, pg_ctl = map(str, programs)
        subprocess.run([initdb, "-D", base, "-A", "trust", "-U", "htp", "--no-sync"], **as_user)
        options = f"-c listen_addresses=127.0.0.1 -c unix_socket_directories='' -p {port}"
        subprocess.run(
            [pg_ctl, "-D", base, "-o", options, "-l", f"{place}/log", "-w", "start"], **as_user
        )
        try:
            yield f"postgresql+{driver}://htp@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([pg_ctl, "-D", base, "-m", "immediate", "stop"], **as_user)


@contextlib.contextmanager
def grpc(folder: Path) -> Iterator[str]:
    """A proxy in a process of its own, in front of a database."""
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("needs grpcio")
    port = free_port()
    serve = f"optuna.storages.run_grpc_proxy_server(storage, host='127.0.0.1', port={port})"
    code = f"import optuna; storage = optuna.storages.RDBStorage('sqlite:///{folder}/proxied.db'); {serve}"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(300):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            yield f"grpc://127.0.0.1:{port}"
        finally:
            server.kill()


KINDS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "journal": journal,
    "sqlite": sqlite,
    "postgresql": postgresql,
    "grpc": grpc,
}


@pytest.fixture(
    params=[
        "journal",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sqlite", "postgresql", "grpc")),
    ]
)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with KINDS[request.param](tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("storages") / "net.onnx"
    model = nn.Sequential(
        *(layer for _ in range(5) for layer in (nn.Linear(48, 48), nn.Tanh()))
    ).eval()
    htp_export.export(model, (torch.randn(4, 48),), path, verbose=False)
    return path


WORKER = """
import sys, time
import htp_export
from htp_export.capabilities.search.measuring import Measurer

word, file, storage = sys.argv[1:]
if word == "hangs":  # in its second trial
    measure, begun = Measurer.measure, []
    def hanging(self, plan, pruning):
        changed = {path for path, precision in plan.items() if precision.name != "fp32"}
        if len({*changed, *pruning}) > 1:
            begun.append(plan)
            if len(begun) == 2:
                print("hangs", flush=True)
                time.sleep(600)
        return measure(self, plan, pruning)
    Measurer.measure = hanging
found = htp_export.search(file, ["int4", "0.5", "rank:25%+fp16", "fp32"],
    objectives=["error", "size"], trials=12, first=4, storage=storage, grace=2.0)
print(len(found.trials), found.failed, flush=True)
"""


def start(word: str, file: Path, storage: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WORKER), word, str(file), storage]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


@pytest.mark.slow
def test_two_processes_share_a_study_and_take_up_what_a_killed_one_had(storage, file):
    with start("hangs", file, storage) as hanging:
        assert hanging.stdout is not None
        assert hanging.stdout.readline() == "hangs\n"
        with start("works", file, storage) as working:
            time.sleep(0.5)
            os.kill(hanging.pid, signal.SIGKILL)
            hanging.wait()
            out, _ = working.communicate(timeout=180)
    assert working.returncode == 0
    assert out.split()[1] == "0"
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(storage, "htp_export", ["minimize", "minimize"])
    states = [trial.state.name for trial in study.trials]
    assert states.count("COMPLETE") >= 12
    has_heartbeats = storage.startswith(("sqlite", "postgresql"))
    left, other = ("FAIL", "RUNNING") if has_heartbeats else ("RUNNING", "FAIL")
    assert (states.count(left), states.count(other)) == (1, 0)
    [dead] = [trial for trial in study.trials if trial.state.name == left]
    again = [
        trial
        for trial in study.trials
        if trial.params == dead.params and trial.state.name == "COMPLETE"
    ]
    assert again
    assert [dead.number] in [
        again[0].user_attrs.get("taken up again"),
        again[0].system_attrs.get("retry_history"),
    ]


def test_a_later_command_joins_the_study(storage, file, capsys):
    command = [
        "search",
        str(file),
        "--choices",
        "int4,2:4+fp16",
        "--trials",
        "5",
        "--storage",
        storage,
        "--json",
    ]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert main(["search", str(file), "--choices", "int4", "--storage", storage]) == 2
    assert "its choices differs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("grpc://127.0.0.1:{port}", "cannot be opened: .*[Cc]onnect"),
        ("grpc://127.0.0.1:x", "cannot be opened"),
        ("postgresql+nothing://127.0.0.1:{port}/x", "cannot be opened"),
        ("sqlite:////no/such/folder/study.db", "cannot be opened"),
    ],
)
def test_a_storage_that_is_not_there_is_said(named, problem, file):
    if named.startswith("grpc") and importlib.util.find_spec("grpc") is None:
        pytest.skip("needs grpcio")
    storage = named.format(port=free_port())
    with pytest.raises(InputError, match=problem) as raised:
        htp_export.search(file, ["int4"], storage=storage, trials=2)
    assert storage in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_front_so_far_is_written_and_the_same_command_goes_on(
    file, tmp_path, monkeypatch, capsys
):
    journal, folder = tmp_path / "study.journal", tmp_path / "found"
    measure = Measurer.measure

    def interrupted(*given: Any, **named: Any) -> Any:
        if journal.exists() and journal.read_text(encoding="utf-8").count('"measured"') >= 3:
            signal.raise_signal(signal.SIGINT)
        return measure(*given, **named)

    words = [
        "search",
        str(file),
        "--choices",
        "int4,fp16,fp32",
        "--storage",
        str(journal),
        "-o",
        str(folder),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Measurer, "measure", interrupted)
        assert main([*words, "--trials", "200"]) == 130
    out, err = capsys.readouterr()
    assert not out
    assert "htp-export: error: interrupted" in err
    assert f"the same command goes on from there: all that was measured is in {journal}" in err
    front = json.loads((folder / "front.json").read_text(encoding="utf-8"))
    measured = len(front["trials"])
    assert f"{measured} of 200 trials are measured; their front is in " in err
    assert 2 <= measured < 200  # a trial is not finished when its measurement is kept
    assert len(list(folder.glob("plan*.json"))) == len(front["pareto"]) > 0
    assert main([*words, "--trials", str(measured + 1)]) == 0
    after = json.loads((folder / "front.json").read_text(encoding="utf-8"))
    kept = {json.dumps(trial, sort_keys=True) for trial in after["trials"]}
    assert {
        json.dumps({**trial, "origin": trial["origin"]}, sort_keys=True)
        for trial in front["trials"]
    } <= kept


def test_before_a_plan_is_measured_nothing_is_written(file, tmp_path, monkeypatch, capsys):
    from htp_export.capabilities.search.search_work import SearchWork

    monkeypatch.setattr(
        SearchWork, "measure_alone", lambda self: signal.raise_signal(signal.SIGINT)
    )
    assert main(["search", str(file), "--choices", "int4", "-o", str(tmp_path / "found")]) == 130
    said = capsys.readouterr().err
    assert "0 of 50 trials are measured\n" in said
    assert "with --storage study.journal, the same command goes on" in said
    assert not list(tmp_path.iterdir())
