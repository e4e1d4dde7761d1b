"""What several processes write is whole, with no data file too many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from htp_export.files.model_files import external_files, read_model
from tests.handmade import encoder

ROOT = Path(__file__).parents[2]
WRITES = """
import os, sys
import numpy as np
import onnx_ir as ir
from htp_export.files.model_files import write_model
from tests.handmade import encoder

model, others = encoder(16), []
while len(others) < 2:
    others.append(os.fork())
    if not others[-1]:
        others = []
        break
for number in range(12):
    for value in model.graph.initializers.values():
        value.const_value = ir.tensor(np.full((16, 16), number, np.float32), name=value.name)
    write_model(model, sys.argv[1], True)
sys.exit(any(os.waitpid(other, 0)[1] for other in others))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_processes_that_write_one_target_leave_one_model_and_its_data(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", WRITES, str(target)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    model = read_model(target)
    assert sorted(tmp_path.iterdir()) == sorted([target, *external_files(model)])
    values = {float(value.const_value.numpy().flat[0]) for value in model.graph.initializers.values()}
    assert values == {11.0}
    assert [node.op_type for node in model.graph] == [node.op_type for node in encoder(16).graph]
