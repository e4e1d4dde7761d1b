"""What exports of tests and of examples in docstrings have in common: they are many and small."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def translations() -> dict[object, object]:
    """Torch's translations of operators, as far as an export has asked for them."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def translations_read_once(translations: dict[object, object]) -> Iterator[None]:
    """Torch reads its translations of all operators anew for every export, which takes longer than most nets do."""
    from htp_export.exporter.capture import patches

    with patches.translations_read_once(translations):
        yield


@pytest.fixture(scope="session", autouse=True)
def no_other_devices() -> Iterator[None]:
    """`torch.export` overrides operators for devices that are not here, a fifth of the time of a small net's export."""
    from torch.export import exported_program

    with pytest.MonkeyPatch.context() as patch:
        for keys in ("_BACKEND_KEYS_TO_OVERRIDE", "_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE"):
            here = [
                key
                for key in getattr(exported_program, keys, ())
                if key.name.endswith(("CPU", "Meta"))
            ]
            patch.setattr(exported_program, keys, here, raising=False)
        yield
