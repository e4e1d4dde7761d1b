"""A model of one's own for ``htp-export export --entry examples.net:make``: a factory of a model and example inputs."""

import torch


class Tagger(torch.nn.Module):
    """Names for the words of a text: an embedding, an encoder of two layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 64)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(64, 9)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of nine names for each word: (batch, words) → (batch, words, 9)."""
        return self.head(self.encoder(self.embed(words)))


def make() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The model with random weights, and one example of 12 words."""
    return Tagger().eval(), (torch.arange(12).reshape(1, 12),)
