"""tools/architectures.py: predicted latencies rank candidates as measured ones do; equal parts are measured once."""

import pytest

pytest.importorskip("optuna")
pytest.importorskip("scipy")


@pytest.mark.slow
def test_the_sum_of_parts_ranks_candidates_as_their_measured_latency():
    from tools.architectures import compared

    result = compared("convolution", 30, dynamo=False)
    assert result["candidates"] == 30
    assert result["rank correlation"] >= 0.9, result
    assert result["median error"] < 0.25, result
    assert result["measured parts"] < 0.4 * result["parts"]
