"""Measure the latency of every module, and show the slowest blocks in a page.

    python examples/show_the_slowest_blocks.py [FOLDER]

ONNX Runtime's profiler knows kernels; tags give their time to the modules whose work they do, also after fusions.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import htp_export


class Stage(nn.Sequential):
    """Two convolutions with batch norms; the first one halves the image."""

    def __init__(self, channels: int, wider: int) -> None:
        first = nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False)
        second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        super().__init__(
            first, nn.BatchNorm2d(wider), nn.ReLU(), second, nn.BatchNorm2d(wider), nn.ReLU()
        )


class Net(nn.Module):
    """Ten classes for an image of 128 x 128 pixels."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        self.stages = nn.Sequential(*map(Stage, widths, widths[1:]))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(widths[-1], 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) → (batch, 10)."""
        return self.head(self.pool(self.stages(image)).flatten(1))


folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)
image = torch.randn(1, 3, 128, 128)
htp_export.export(Net().eval(), (image,), folder / "net.onnx", input_names=["image"], verbose=False)

report = htp_export.profile(folder / "net.onnx", {"image": image})
costs = htp_export.cost(folder / "net.onnx")
print(f"{report.end_to_end_ms:.2f} ms a run")
blocks = [path for path in report.modules if path.startswith("stages.") and path.count(".") == 1]
for path in sorted(blocks, key=lambda path: -report.modules[path].total_ms):
    time, flops = report.modules[path], costs.modules[path].flops
    print(f"  {path}: {time.share:.0%} of the time, {flops / time.total_ms / 1e6:.1f} GFLOP/s")

page = htp_export.view(
    folder / "net.onnx", folder / "net.html", results=[report, costs], explorer=False
)
print(f"open {page.path} in a browser: sort by time, or choose time and FLOPs in the map")
