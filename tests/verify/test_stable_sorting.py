"""verify and sorts with equal elements: their order is open in torch, and the same in every run of verify."""

from __future__ import annotations

import torch
from torch import nn

import htp_export
from htp_export.capabilities.verify.pytorch_run import stable_sorting


class Experts(nn.Module):
    """Rows sorted by a key that many have, worked on, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        order = torch.sort(expert)[1]
        return self.work(x[order])[torch.sort(order)[1]]


def test_modules_between_two_sorts_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    x, expert = torch.randn(200, 3, generator=generator), torch.randint(0, 4, (200,), generator=generator)
    net = Experts().eval()
    program = htp_export.export(net, (x, expert), verbose=False)
    result = htp_export.verify(net, program, (x, expert))
    assert result.ok, result.summary
    assert result.modules["work"].status == "agrees"


def test_every_way_of_sorting_is_stable_inside_and_takes_its_arguments() -> None:
    equal, rising = torch.zeros(4, 500), list(range(500))
    with stable_sorting():
        for found in (
            torch.sort(equal)[1],
            equal.sort(1)[1],
            torch.argsort(equal, -1, True),
            equal.argsort(dim=1, descending=True),
            torch.sort(input=equal, stable=False)[1].sort()[0],
            torch.argsort(equal, stable=True),
        ):
            assert found.tolist() == [rising] * 4
        assert torch.sort(torch.tensor([1.0, 3.0, 2.0]), descending=True)[0].tolist() == [3.0, 2.0, 1.0]
