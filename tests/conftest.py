import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.chromium import Page
    from tests.exporting import SharedFiles

# Before huggingface_hub is imported: a test that names no model on purpose must not look for it on the hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before torch is imported: the nets are small, and there is a process of pytest for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell without job control lets what it starts in the background ignore Ctrl-C, and so do all processes that are
# started from there: tests that interrupt a command would wait for ever.
if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)
# As the command line has it: walking over all that torch and transformers leave in memory is a tenth of the time.
gc.set_threshold(70_000, *gc.get_threshold()[1:])
MOST_PROCESSES = 8  # each takes one to two GB

# doctests would be looked for in them, and two of one name are refused
collect_ignore_glob = ["*/conftest.py"]

# The tests whose results depend on how the installed torch exports. `pytest -m torch` runs them alone.
TORCH = {
    "test_calls",
    "test_capture_faults",
    "test_concurrency",
    "test_drop_in",
    "test_drop_in_calls",
    "test_drop_in_torchscript",
    "test_encoder_decoder_files",
    "test_exactness",
    "test_exactness_torchscript",
    "test_example_calls",
    "test_fates",
    "test_random_nets",
    "test_rename",
    "test_signatures",
    "test_torch_internals",
    "test_wrapped_modules",
    "test_transformers_exporters",
    "test_verify",
}


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """The processes of `-n auto`, the default: one for each core for all tests, none besides for some of them."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None  # pytest-xdist reads it
    option = config.option
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    some = named and not all(Path(word).is_dir() for word in config.args)
    if (
        some
        or option.keyword
        or getattr(option, "lf", False)
        or option.collectonly
        or option.capture == "no"
    ):
        return 0
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, MOST_PROCESSES)


@pytest.fixture(scope="session")
def shared_files(tmp_path_factory: pytest.TempPathFactory) -> "SharedFiles":
    from tests.exporting import SharedFiles

    folder = tmp_path_factory.getbasetemp()
    own = "PYTEST_XDIST_WORKER" in os.environ  # its folder lies in that of the whole run
    return SharedFiles((folder.parent if own else folder) / "shared")


@pytest.fixture(scope="module", autouse=True)
def cycles_collected() -> Iterator[None]:
    """Collect the cycles of each file without a look at older objects, which takes seconds in a long run."""
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def known_as_frozen() -> Iterator[None]:
    """Objects are frozen in all tests: an export need not count them, which took a fifth of the time."""
    from htp_export.process import restoring

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "_has_frozen_objects", lambda: True)
        yield


@pytest.fixture
def collecting_own() -> None:
    """`gc.collect` visits only the objects of the test itself, and none of its imports."""
    gc.freeze()


@pytest.fixture(scope="session")
def forked() -> Iterator[str]:
    """A ``PATH`` on which ``htp-export`` starts at once."""
    from tests.forking import on_path

    with on_path() as path:
        yield path


@pytest.fixture(scope="session")
def one_browser() -> Iterator["Page"]:
    """The browser of all tests of this process: its start takes longer than most of them."""
    from tests.chromium import browser

    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def page(one_browser: "Page") -> "Page":
    """A page as a browser has it that was just started."""
    one_browser.start_anew()
    return one_browser


@pytest.fixture(scope="session")
def encoder_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the encoder of the stored screens, with Model Explorer; not to be written to."""
    from tests import screens

    file = tmp_path_factory.mktemp("encoder") / "encoder.html"
    screens.write_page(file)
    return file


def pytest_sessionfinish() -> None:
    """Look for cycles once: pytest does so five times at the end, a second each."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = TORCH - {path.stem for path in here.glob("*/test_*.py")}
    assert not missing, (
        f"tests/conftest.py lists files that are not there: {', '.join(sorted(missing))}"
    )
    for item in items:
        if item.path.parent.parent == here and item.path.stem in TORCH:
            item.add_marker(pytest.mark.torch)
