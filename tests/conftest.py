import os
from pathlib import Path

import pytest

# Before huggingface_hub is imported: a test that names no model on purpose must not look for it on the hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# The tests whose results depend on how the installed torch exports. `pytest -m torch` runs them alone.
TORCH = {
    "test_calls",
    "test_capture_faults",
    "test_concurrency",
    "test_drop_in",
    "test_drop_in_calls",
    "test_drop_in_torchscript",
    "test_exactness",
    "test_exactness_torchscript",
    "test_fates",
    "test_signatures",
    "test_torch_internals",
    "test_torch_warnings",
    "test_transformers_exporters",
    "test_verify",
    "test_verify_faults",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = {name for name in TORCH if not (here / f"{name}.py").exists()}
    assert not missing, f"tests/conftest.py lists files that are not there: {', '.join(sorted(missing))}"
    for item in items:
        if item.path.parent == here and item.path.stem in TORCH:
            item.add_marker(pytest.mark.torch)
