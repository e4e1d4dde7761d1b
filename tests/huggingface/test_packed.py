"""Packed weights of GGUF files, against ``gguf`` and transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from htp_export.capabilities.huggingface.packed.checkpoints import read_packed
from htp_export.errors import FileError
from tests.packed import TYPES, written_gguf


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_blocks_have_the_numbers_and_the_order_of_rows_of_transformers(tmp_path: Path):
    from transformers import LlamaForCausalLM

    source = written_gguf(tmp_path / "model.gguf")
    made = read_packed(source)
    wanted = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=source.name).state_dict()
    assert {*made} == {*wanted}
    for name, values in wanted.items():
        np.testing.assert_array_equal(made[name], values.numpy())
    for name in made.layers:
        weight, values = made.packed(name).weight(), wanted[name].numpy()
        if name.rpartition(".")[0].endswith(("v_proj", "o_proj")):  # Q4_1, Q4_K: a minimum in place of a zero point
            np.testing.assert_allclose(weight, values, rtol=0, atol=2e-7 * np.abs(values).max())
        else:
            np.testing.assert_array_equal(weight, values)
    assert len(made.layers) == len(TYPES) - 1


def test_a_broken_gguf_file_is_refused(tmp_path: Path):
    source = written_gguf(tmp_path / "model.gguf")
    content = source.read_bytes()
    for broken in (b"", b"GGUF", content[:200], content[:4] + b"\xff" * 20, content[: len(content) // 2]):
        source.write_bytes(broken)
        with pytest.raises(FileError, match="cannot be read as GGUF"):
            read_packed(source)
