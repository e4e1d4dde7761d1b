"""Fingerprint: the family of architectures that a graph belongs to, why, and the blocks that it repeats.

Only mechanisms count: what the graph does to its inputs. Names of models, modules and tensors say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.capabilities.fingerprint.blocks import Block, repeated_blocks
from htp_export.capabilities.fingerprint.detectors.convolution import kernel_and_strides
from htp_export.capabilities.fingerprint.detectors.features import GraphFeatures
from htp_export.capabilities.fingerprint.detectors.inputs import ModelInput
from htp_export.capabilities.fingerprint.example_sizes import inferred_with_sizes
from htp_export.editing.flattening import read_flat
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource
from htp_export.results.result import Result
from htp_export.results.tag_facts import TagFacts

__all__ = ["FAMILIES", "Fingerprint", "fingerprint"]


@dataclass(frozen=True)
class Fingerprint(Result):
    """The result of `fingerprint`.

    Attributes:
        family: One of `FAMILIES`.
        evidence: The evidence in sentences; the decisive one comes first.
        blocks: Repeated structures, those with the largest part of the model first.
        nodes: Number of nodes of the model.
        tags: The tags of the model: source, reasons, untagged nodes.
    """

    family: str
    evidence: tuple[str, ...]
    blocks: tuple[Block, ...]
    nodes: int
    tags: TagFacts | None = None

    @property
    def summary(self) -> str:
        """The result in one line."""
        return self.family

    @property
    def lines(self) -> tuple[str, ...]:
        """The evidence, the blocks, and what is known about tags."""
        blocks = (f"{block.count:5} × {block.name}, {block.nodes} nodes each" for block in self.blocks)  # noqa: RUF001 - "times"
        return (*(f"  {fact}" for fact in self.evidence), *blocks, *super().lines)


def _multimodal(features: GraphFeatures) -> bool:
    """Tokens and another input, unless a decoder attends to that input: then tokens are what it generates."""
    inputs = features.inputs
    both = bool(inputs.of("tokens")) and bool(inputs.of("image") or inputs.of("sound"))
    return both and not _decodes(features)


def _decodes(features: GraphFeatures) -> bool:
    """Whether what is computed from one input attends to what is computed from another."""
    return features.attention_kinds["cross"] > 0 and features.attention_kinds["causal"] > 0


def _speech(features: GraphFeatures) -> bool:
    if features.inputs.of("sound"):
        return True
    alone = not features.inputs.of("tokens") and not features.inputs.of("image")
    return alone and bool(features.inputs.of("features")) and bool(features.attentions) and features.convolutions[1] > 0


def _recurrent(features: GraphFeatures) -> bool:
    return sum(features.recurrent_operators.values()) + len(features.unrolled_loops) > len(features.attentions)


def _vision_transformer(features: GraphFeatures) -> bool:
    return bool(features.inputs.of("image")) and bool(features.attentions) and not _decodes(features)


def _convolutional(features: GraphFeatures) -> bool:
    return features.convolutions[2] + features.convolutions[3] > 0 and not features.attentions


_RULES: tuple[tuple[str, Callable[[GraphFeatures], bool]], ...] = (
    ("diffusion-like", lambda features: bool(features.timesteps)),
    ("mixture", lambda features: bool(features.routers)),
    ("multimodal", _multimodal),
    ("speech", _speech),
    ("recurrent", _recurrent),
    ("vision transformer", _vision_transformer),
    ("encoder-decoder", _decodes),
    ("CNN", _convolutional),
    ("decoder", lambda features: features.attention_kinds["causal"] > features.attention_kinds["bidirectional"]),
    ("encoder", lambda features: bool(features.attentions) or bool(features.inputs.of("tokens"))),
    ("unknown", lambda features: True),
)
"""The families, and what says that a graph belongs to one; the first that applies does."""

FAMILIES = tuple(family for family, _ in _RULES)
"""What `Fingerprint.family` can be."""


@names_model_faults("model")
def fingerprint(model: ModelSource) -> Fingerprint:
    """Classify the architecture of a model, and find the blocks that it repeats.

    ======================  =======================================================================================
    ``diffusion-like``      an input with one number for each example enters a layer as sines and cosines
    ``mixture``             each position selects experts
    ``multimodal``          tokens and images, or tokens and sound
    ``speech``              a signal or spectrum over time enters a convolution
    ``recurrent``           more recurrent operators, or loops over time, than attentions
    ``vision transformer``  attention over values computed from an image
    ``encoder-decoder``     causal attention, and attention between values of different inputs
    ``CNN``                 convolutions in two or three dimensions, no attention
    ``decoder``             most attention is causal
    ``encoder``             other attention, or tokens without attention
    ``unknown``             none of these
    ======================  =======================================================================================

    The first row that applies decides, so a speech model with an encoder and a decoder is ``speech``.
    ``docs/fingerprint.md`` has the accuracy.

    Thread-safe, also for calls on the same model.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed. Tags are not needed;
            with them, repeated blocks are modules.

    Returns:
        The family, the evidence for it, and the blocks.

    Raises:
        FileError: The file cannot be read.

    Examples:
        >>> import torch, htp_export
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> program = htp_export.export(net, (torch.randn(1, 5, 16),), verbose=False)
        >>> found = fingerprint(program)
        >>> found.family, found.evidence[0], [(block.count, block.name) for block in found.blocks]
        ('encoder', '3 attentions: 3 bidirectional', [(3, 'TransformerEncoderLayer')])
    """
    tagged = read_flat(model)
    features = GraphFeatures.of(GraphFacts(tagged, inferred_with_sizes(tagged.model)))
    family = next(name for name, applies in _RULES if applies(features))
    blocks = repeated_blocks(GraphFacts(tagged))
    shapes = {value.name: value.shape for value in tagged.model.graph.inputs if value.name}
    return Fingerprint(family, tuple(_evidence(features, family, shapes)), blocks, len(tagged.nodes), tagged.tag_facts)


def _evidence(features: GraphFeatures, family: str, shapes: Mapping[str, ir.Shape | None]) -> Iterator[str]:
    """What was seen, what decided the family first."""
    facts = {
        "diffusion-like": _about_time(features),
        "mixture": _about_routing(features),
        "recurrent": _about_recurrence(features),
        "attention": _about_attention(features),
        "inputs": [
            _about_input(features, model_input, shapes.get(model_input.name)) for model_input in features.inputs.data
        ],
        "convolution": _about_convolution(features),
    }
    first = {
        "multimodal": "inputs",
        "speech": "inputs",
        "vision transformer": "inputs",
        "CNN": "convolution",
    }.get(family, family if family in facts else "attention")
    yield from facts[first]
    for name, sentences in facts.items():
        if name != first:
            yield from sentences


def _about_time(features: GraphFeatures) -> list[str]:
    return [f"input {name} is a time step: its sines and cosines enter a linear layer" for name in features.timesteps]


def _about_routing(features: GraphFeatures) -> list[str]:
    if not features.routers:
        return []
    router = features.routers[0]
    chosen = "some" if router.chosen is None else router.chosen
    return [f"{len(features.routers)} routers: each position chooses {chosen} of {router.experts} experts"]


def _about_recurrence(features: GraphFeatures) -> list[str]:
    sentences = [f"{count} {op}" for op, count in features.recurrent_operators.most_common()]
    if features.unrolled_loops:
        sentences.append(
            f"loops over {max(features.unrolled_loops)} steps, unrolled, over {len(features.unrolled_loops)} tensors"
        )
    return sentences


def _about_attention(features: GraphFeatures) -> list[str]:
    kinds = features.attention_kinds
    if not kinds:
        return []
    parts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return [f"{len(features.attentions)} attentions: {parts}"]


def _about_input(features: GraphFeatures, model_input: ModelInput, shape: ir.Shape | None) -> str:
    sizes = [str(size if isinstance(size, int) else size.value or "?") for size in shape.dims] if shape else []
    sentence = f"input {model_input.name} [{', '.join(sizes)}]"
    if model_input.kind == "tokens":
        return f"{sentence} is tokens: it is looked up in a table of vectors"
    convolution = model_input.convolution
    first = None if convolution is None else kernel_and_strides(features.facts, convolution)
    if first is None:
        return f"{sentence} is numbers that enter no convolution first"
    kernel, strides = ("x".join(map(str, sizes)) for sizes in first)
    what = "an image" if model_input.kind == "image" else "a signal or spectrum over time"
    patches = first[0] == first[1] and min(first[0]) > 1
    how = f"is cut in patches of {kernel}" if patches else f"enters a convolution of {kernel}, stride {strides}"
    return f"{sentence} is {what}: it {how}"


def _about_convolution(features: GraphFeatures) -> list[str]:
    total = sum(features.convolutions.values())
    if not total:
        return []
    parts = ", ".join(f"{count} in {dims} dimensions" for dims, count in sorted(features.convolutions.items()))
    return [f"{total} convolutions wider than a point: {parts}".replace("in 1 dimensions", "in 1 dimension")]
