"""Search the fixed-point formats of the input, weight and bias of each layer of a trained net.

    python examples/search_fixed_point.py [FOLDER]

Thirteen formats for each of three tensors, by class and by module, with three samplers. The net is
trained here, on pictures of digits that are made here. Plans of a search may follow FOLDER (300).
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import htp_export

NARROW = ["4.2", "4.3", "6.2", "6.4", "8.2", "8.4", "8.6"]  # width.fractional bits
FORMATS = [*NARROW, *(f"16.{bits}" for bits in range(2, 13, 2))]
GLYPHS = [75557, 26227, 71747, 71717, 55711, 74717, 74757, 71111, 75757, 75717]  # rows of 3 bits
BUDGETS = (0.6, 0.62, 0.65, 0.7, 0.8)  # of the bits of the model in 16 bits


def pictures(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy pictures of 8 by 8 pixels from 0 to 16, and the digits on them."""
    random = np.random.default_rng(seed)
    images, digits = random.normal(2, 2, (count, 8, 8)), random.integers(0, 10, count)
    for image, digit in zip(images, digits, strict=True):
        glyph = np.array([[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in str(GLYPHS[digit])])
        down, right = random.integers(1, 3), random.integers(2, 4)
        image[down : down + 5, right : right + 3] += glyph * random.uniform(7, 12)
    images = np.clip(np.rint(images), 0, 16).reshape(count, 64).astype(np.float32)
    return torch.from_numpy(images), torch.from_numpy(digits)


def accuracy(outputs) -> float:
    """The share of the test pictures whose digit has the largest score."""
    scores = np.concatenate([next(iter(run.values())) for run in outputs])
    return float((scores.argmax(1) == tested.numpy()).mean())


folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
trials = int(sys.argv[2]) if len(sys.argv) > 2 else 300
torch.manual_seed(0)
torch.set_num_threads(1)  # the net is small
net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))
images, digits = pictures(4000, 0)
optimizer = torch.optim.Adam(net.parameters(), 2e-3)
for _ in range(40):
    for rows in torch.randperm(len(images)).split(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[rows]), digits[rows]).backward()
        optimizer.step()
htp_export.export(net.eval(), (images[:16],), folder / "digits.onnx", verbose=False)
images, tested = pictures(1024, 1)
data = [{"input": run} for run in images.split(16)]
with torch.no_grad():
    print(f"fp32: {accuracy([{'scores': net(images).numpy()}]):.1%}\n")

parts = dict.fromkeys(("data", "weight", "bias"), FORMATS)
space = {"class:Linear": {"precision": "fixed", **parts}}
settings = {"objectives": ("metric", "bits"), "metric": accuracy, "data": data, "trials": trials}
print("| decided by | sampler | 4 bits | 16 bits |", *(f"{share:.0%} |" for share in BUDGETS))
print("|" + "---|" * (len(BUDGETS) + 4))
for case in ("class grid", "class random", "class tpe", "module random", "module tpe"):
    by, sampler = case.split()
    found = htp_export.search(folder / "digits.onnx", space, by=by, sampler=sampler, **settings)
    values = [trial.values for trial in found.trials]
    whole = {trial.plan["."]: trial.values for trial in found.trials if "." in trial.plan}
    most = max(each["bits"] for each in whole.values())
    cells = []
    for width in (4, 16):
        cells += [max(each["metric"] for name, each in whole.items() if f"={width}." in name)]
    for share in BUDGETS:
        cells += [max(each["metric"] for each in values if each["bits"] <= share * most)]
    print(f"| {by} | {sampler} |", *(f"{cell:.1%} |" for cell in cells))
