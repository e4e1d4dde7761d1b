"""What tests of passes share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from htp_export.capabilities.optimize import registry


@pytest.fixture
def passes() -> Iterator[Callable[..., Any]]:
    """Passes that a test registers are forgotten afterwards."""
    before = dict(registry._registered)
    yield registry.register
    registry._registered.clear()
    registry._registered.update(before)
