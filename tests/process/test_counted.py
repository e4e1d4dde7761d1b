"""Loops that report how far they are."""

import numpy as np
import pytest
import torch

import htp_export
from htp_export.process.progress import counted, listening


class TestCounted:
    def test_the_outermost_loop_is_told_of(self):
        told = []
        with listening(lambda *what: told.append(what)):
            assert [list(counted("ab", "letters")) for _ in counted([1, 2], "rows")] == [
                ["a", "b"],
                ["a", "b"],
            ]
            assert list(counted([3], "numbers")) == [3]
        assert list(counted([1], "unheard")) == [1]
        assert told == [
            ("rows", 0, 2),
            ("rows", 1, 2),
            ("rows", 2, 2),
            ("numbers", 0, 1),
            ("numbers", 1, 1),
        ]

    def test_a_loop_that_ends_early_leaves_the_listener_as_it_was(self):
        told = []
        with listening(lambda *what: told.append(what)):
            for _ in counted([1, 2], "rows"):
                break
            list(counted([1], "others"))
        assert told == [("rows", 0, 2), ("others", 0, 1), ("others", 1, 1)]

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("work", "what"),
        [
            (lambda file, folder, net: htp_export.profile(file, runs=3, warmup=0), ("runs", 3, 3)),
            (
                lambda file, folder, net: htp_export.partition(file, 2, folder / "stages"),
                ("stages", 2, 2),
            ),
            (
                lambda file, folder, net: htp_export.optimize(file, folder / "small.onnx"),
                ("weights", 2, 2),
            ),
            (
                lambda file, folder, net: htp_export.compare(file, file),
                ("portions of the tensors", 1, 1),
            ),
            (
                lambda file, folder, net: htp_export.verify(
                    net, file, (torch.randn(1, 64),), isolated=True
                ),
                ("modules", 4, 4),
            ),
        ],
        ids=["profile", "partition", "optimize", "compare", "verify"],
    )
    def test_work_that_can_be_long_is_counted(self, work, what, tmp_path):
        net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)
        ).eval()
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), np.linspace(0.5, 2, 4), strict=True):
                parameter.mul_(value)
        htp_export.export(net, (torch.randn(1, 64),), tmp_path / "net.onnx", verbose=False)
        told = []
        with listening(lambda *each: told.append(each)):
            work(tmp_path / "net.onnx", tmp_path, net)
        assert what in told
