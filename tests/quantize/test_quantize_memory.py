"""Weights are quantized a group at a time: what was made of others is in a file until it is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_QUANTIZE = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tools")
import large_model
from peak_memory import PeakOfOwn, status
import htp_export
from htp_export.capabilities.quantize import ort_quantizers
folder, precision = Path(sys.argv[1]), sys.argv[2]
for name, gigabytes in (("first", 0.001), ("net", 0.1)):  # the first run imports what both need
    large_model.write_model(folder / f"{name}.onnx", gigabytes)
    ort_quantizers.GROUP_BYTES = 4 << 20
    before = status("RssAnon")
    with PeakOfOwn() as peak:
        made = folder / "made.onnx"
        result = htp_export.quantize(folder / f"{name}.onnx", precision, made, external_data="made.data")
print(json.dumps([peak.own - before, result.modules[""].bytes_before, result.modules[""].bytes_after]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is counted otherwise elsewhere")
@pytest.mark.parametrize("precision", ["int4", pytest.param("int8-dynamic", marks=pytest.mark.slow)])
def test_quantizing_weights_holds_a_few_of_them_and_not_the_model(tmp_path: Path, precision: str) -> None:
    command = [sys.executable, "-c", _QUANTIZE, str(tmp_path), precision]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    peak, before, after = json.loads(done.stdout.splitlines()[-1])
    assert after < 0.26 * before
    assert peak < 0.6 * before  # seven of twelve weights; what is computed of one takes up to six times its bytes
