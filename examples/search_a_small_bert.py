"""Search the layers, the heads and the width of a small BERT, by removal from its file.

    python examples/search_a_small_bert.py [FOLDER]

A BERT learns which of two words a text has more often. Then each layer may be dropped, and half of its heads and of its
intermediate channels may be cut out: an architecture search without another training. It needs Optuna.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

import htp_export


def texts(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of 15 words, (count, 15), and whether word 1 is in it more often than word 2."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 8, (count, 15), generator=generator)
    return words, ((words == 1).sum(1) > (words == 2).sum(1)).long()


folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)
torch.set_num_threads(1)  # of small matrices, threads only wait for each other
config = BertConfig(
    vocab_size=8,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=16,
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
words, labels = texts(2048, seed=1)
for step in range(96):
    batch = slice(step % 32 * 64, step % 32 * 64 + 64)
    model(words[batch], labels=labels[batch]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

words, labels = texts(64, seed=2)
file = folder / "bert.onnx"
htp_export.export(model.eval(), (), file, kwargs={"input_ids": words}, verbose=False)


def accuracy(outputs: list[dict[str, object]]) -> float:
    """The share of texts that are classified correctly."""
    [(_, scores)] = outputs[0].items()
    return float((torch.as_tensor(scores).argmax(1) == labels).float().mean())


space = {
    "bert.encoder.layer.*": ["drop", "fp32"],
    "bert.encoder.layer.*.attention.self": ["heads:0.5", "fp32"],
    "bert.encoder.layer.*.intermediate.dense": ["channels:0.5", "fp32"],
}
found = htp_export.search(
    file,
    space,
    objectives=["latency", "size", "metric"],
    data={"input_ids": words.numpy()},
    metric=accuracy,
    trials=12,
    runs=5,
)
print(found)
best = max(trial.values["metric"] for trial in found.pareto)
good = [trial for trial in found.pareto if trial.values["metric"] > best - 0.05]
chosen = min(good, key=lambda trial: trial.values["size"])
htp_export.pipeline(chosen.steps, file, folder / "smaller.onnx")
before, after = (htp_export.cost(name).modules[""] for name in (file, folder / "smaller.onnx"))
print(f"{before.parameters:,} → {after.parameters:,} parameters", end="")
print(f", {chosen.values['metric']:.1%} right, {chosen.counted}")
