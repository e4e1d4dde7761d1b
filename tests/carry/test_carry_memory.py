"""Weights are compared in blocks: memory does not grow with copies of them, and the errors are those of numpy."""

import tracemalloc

import numpy as np
import pytest

from htp_export.alignment import weight_similarity
from htp_export.alignment.weight_similarity import Originals, relative_error
from htp_export.model.hashes import array_hash


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(7,), (33, 5), (3, 4, 5)])
def test_an_error_in_blocks_is_that_of_whole_arrays(shape, monkeypatch):
    monkeypatch.setattr(weight_similarity, "_BLOCK", 4)
    original = drawn(*shape)
    array = original + drawn(*shape, seed=1) / 100
    theirs = original.astype(np.float64)
    expected = np.linalg.norm(array - theirs) / np.linalg.norm(theirs - theirs.mean())
    assert relative_error(array, original) == pytest.approx(expected, rel=1e-12)
    transposed = relative_error(array.T, original.T)
    assert transposed == pytest.approx(expected, rel=1e-12)


def test_infinities_must_be_in_the_same_places_in_every_block(monkeypatch):
    monkeypatch.setattr(weight_similarity, "_BLOCK", 4)
    original = drawn(20)
    original[[2, 17]] = np.inf
    assert relative_error(original, original) == 0
    other = original.copy()
    other[17] = 1
    assert relative_error(other, original) == np.inf
    assert relative_error(np.full(3, np.inf), np.full(3, np.inf)) == np.inf  # nothing to compare


def test_the_hash_of_a_transposed_array_is_that_of_its_copy():
    array = drawn(3000, 700)
    assert array_hash(array.T) == array_hash(np.ascontiguousarray(array.T))


def test_weights_are_compared_in_less_memory_than_one_of_them():
    """A file of 3.2 GB took 1.2 GB, 4.4 times its largest weight."""
    weights = [drawn(4000, 2000, seed=seed) for seed in range(2)]  # 32 MB each
    near = weights[1] * np.float32(1 + 1e-6)
    originals = Originals(weights=True)
    tracemalloc.start()
    try:
        for index, weight in enumerate(weights):
            originals.add(index, weight, lambda weight=weight: weight)
        found = originals.find(near)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found is not None
    assert found.originals == (1,)
    assert peak < weights[0].nbytes
