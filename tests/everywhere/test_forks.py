"""A child process that is forked while another thread works waits for no lock, and finds torch as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forks import FOLDER, OF_TORCH, WORK

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    folder = tmp_path_factory.mktemp("forks")
    command = [sys.executable, "-W", "ignore", "-m", "tests.forks", str(folder), *WORK, FOLDER]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.long
@pytest.mark.parametrize("name", WORK)
def test_a_child_does_what_another_thread_was_doing(name, found):
    assert (found[name]["child"], found[name]["thread"]) == (0, [])


@pytest.mark.parametrize("name", WORK)
def test_a_child_finds_nothing_changed_and_its_parent_neither(name, found):
    of_torch = {"call of a module", "traced modules"} if name in OF_TORCH else set()
    assert set(found[name]["changed"]) <= of_torch
    assert (found[name]["after"], found[name]["left"]) == ([], [])


def test_a_child_does_not_keep_the_lock_of_a_folder(found):
    assert found[FOLDER] == {"free": True}
