"""Find the module that is wrong in a file, and repair it.

    python examples/find_the_wrong_layer.py [FOLDER]

A model was trained further, and the weights of its ONNX file are replaced by name. The file still runs, but its result
is wrong: exporters transpose some weights, which then have other names. `verify` names the first module that differs
from PyTorch, and `nodes` the initializer that holds its weight.
"""

import sys
import tempfile
from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn

import htp_export


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, words, 64) → the same."""
        return x + self.down(self.up(x).relu())


folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(8)), nn.Linear(64, 10)).eval()
args = (torch.randn(1, 12, 64),)
htp_export.export(model, args, folder / "first.onnx", verbose=False)
print("exported:", htp_export.verify(model, folder / "first.onnx", args).summary)

with torch.no_grad():  # stands for more training, of one block
    for parameter in model[5].parameters():
        parameter.add_(torch.randn_like(parameter) / 10)

tagged = htp_export.load(folder / "first.onnx")
state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
for name, initializer in tagged.model.graph.initializers.items():
    if name in state:
        initializer.const_value = ir.tensor(state[name])
tagged.save(folder / "updated.onnx")

file = folder / "updated.onnx"
while (wrong := htp_export.verify(model, file, args).first_wrong) is not None:
    [use] = htp_export.nodes(file).parameters[f"{wrong}.weight"].initializers
    print(f"first wrong: {wrong}; {wrong}.weight is {use.name!r} in the file, {', '.join(use.how)}")
    tagged.model.graph.initializers[use.name].const_value = ir.tensor(
        state[f"{wrong}.weight"].T.copy()
    )
    tagged.save(file)
print("repaired:", htp_export.verify(model, file, args).summary)
