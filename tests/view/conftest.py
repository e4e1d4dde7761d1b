"""What tests of pages have in common."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def without_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """A page is as wide as most screens, unless a test says otherwise, and says no error whatever a test does."""
    if "page" not in request.fixturenames:
        yield
        return
    page = request.getfixturevalue("page")
    page.size(1400, 850)
    yield
    # which browsers ask a server for
    assert [said for said in page.said if "favicon" not in said] == []
