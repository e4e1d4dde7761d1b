from pathlib import Path

import pytest
import torch

from tests.nets import EXPORTERS
from tests.quantized import IDS, Net, written


@pytest.fixture(scope="session")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file of each exporter; not to be written to."""
    folder = tmp_path_factory.mktemp("net")
    torch.manual_seed(0)
    given = (torch.from_numpy(IDS),)
    return {
        each: written(Net(), given, folder / f"{each}.onnx", each, ["ids"]) for each in EXPORTERS
    }


@pytest.fixture(scope="session")
def net(nets: dict[str, Path]) -> Path:
    return nets["dynamo"]
