"""Quantize a classifier to int8, except its head.

    python examples/quantize_all_but_the_head.py [FOLDER]

The plan selects modules by their PyTorch names. ONNX Runtime's quantizer runs on exactly the nodes of these modules.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import htp_export


class Classifier(nn.Module):
    """Ten classes for a text: an embedding, four encoder layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores: (batch, words) → (batch, 10)."""
        return self.head(self.encoder(self.embed(words)).mean(dim=1))


folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)
model = Classifier().eval()
texts = [torch.randint(1000, (4, 16)) for _ in range(8)]

htp_export.export(model, (texts[0],), folder / "float.onnx", verbose=False)
data = [{"words": text.numpy()} for text in texts]  # ranges of activations are measured on these
plans = {
    "int8": {"**": "int8"},
    "int8_but_head": {"**": "int8", "head": "fp32"},
}  # of several rules, the last one holds
for name, plan in plans.items():
    result = htp_export.quantize(folder / "float.onnx", plan, folder / f"{name}.onnx", data=data)
    compared = htp_export.compare(folder / "float.onnx", folder / f"{name}.onnx", data[0])
    whole, head = result.modules[""], result.modules["head"]
    print(
        f"{name}: {whole.bytes_before:,} → {whole.bytes_after:,} bytes of weights, head in {head.precision}"
    )
    print(f"  largest error after the encoder {compared.modules['encoder'].max_abs:.4f}", end="")
    print(f", of the scores {compared.modules[''].max_abs:.4f}")

print(f"\nThe modules of {folder / 'int8_but_head.onnx'}:")
rows = [result.modules[path] for path in ("", "embed", "encoder", "encoder.layers.0", "head")]
for row in rows:
    print(
        f"  {row.path or '(root)':<18} {row.precision:<6} {row.changed:>4} of {row.nodes} nodes changed"
    )
