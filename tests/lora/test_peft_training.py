"""The page on training with PEFT: its snippet runs, and the fused file computes what PEFT's module computes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import htp_export
from htp_export.costs.result import tree_rows
from tests import documents

pytest.importorskip("peft")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_snippet_of_the_page_trains_an_adapter_and_fuses_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    [block] = [
        block
        for block in documents.blocks(ROOT / "docs" / "lora.md")
        if "peft.LoraConfig" in block.text
    ]
    names: dict[str, Any] = {"htp_export": htp_export}
    torch.manual_seed(0)
    exec(compile(block.text, "lora.md", "exec"), names)
    tuned, words = names["tuned"], names["words"]
    with torch.no_grad():
        expected = tuned(words).numpy()
        with tuned.disable_adapter():
            untrained = tuned(words).numpy()
    found = onnxruntime.InferenceSession("trained.onnx").run(None, {"words": words.numpy()})[0]
    assert np.allclose(found, expected, atol=1e-4)
    assert not np.allclose(untrained, expected, atol=1e-2)
    rows = {row.path: row for row in tree_rows(htp_export.load("peft.onnx")).rows}
    assert rows[""].trainable == 4 * (64 + 9)
    [head] = [row for path, row in rows.items() if path.endswith("head")]
    assert head.trainable == rows[""].trainable
