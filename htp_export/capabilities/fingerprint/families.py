"""Fingerprint: the family of architectures that a graph belongs to, why, and the blocks that it repeats.

Only mechanisms count: what the graph does to its inputs. Names of models, modules and tensors say nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from htp_export.capabilities.fingerprint.blocks import Block, repeated_blocks
from htp_export.capabilities.fingerprint.features import GraphFeatures, ModelInput
from htp_export.editing.flattening import read_flat
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource
from htp_export.results.columns import many
from htp_export.results.result import Result
from htp_export.results.tag_facts import TagFacts


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
        return (*(f"  {fact}" for fact in self.evidence), *map(str, self.blocks), *super().lines)


def _hears(seen: GraphFeatures) -> bool:
    """Whether there is a signal, or a spectrum that enters layers of speech models."""
    spectrum = seen.takes("features") and not seen.takes("tokens", "image")
    return seen.takes("sound") or (spectrum and bool(seen.attentions) and seen.convolutions[1] > 0)


_RULES: Mapping[str, tuple[str, Callable[[GraphFeatures], bool]]] = {
    "diffusion-like": ("time", lambda seen: bool(seen.time_steps)),
    "mixture": ("routing", lambda seen: bool(seen.routers)),
    "multimodal": ("inputs", lambda seen: seen.takes("tokens") and seen.takes("image", "sound") and not seen.decodes),
    "speech": ("inputs", _hears),
    "recurrent": ("recurrence", lambda seen: seen.recurrent.total() + len(seen.loops) > seen.attentions.total()),
    "vision transformer": ("inputs", lambda seen: seen.takes("image") and bool(seen.attentions) and not seen.decodes),
    "encoder-decoder": ("attention", lambda seen: seen.decodes),
    "CNN": ("convolution", lambda seen: seen.convolutions[2] + seen.convolutions[3] > 0 and not seen.attentions),
    "decoder": ("attention", lambda seen: seen.attentions["causal"] > seen.attentions["bidirectional"]),
    "encoder": ("attention", lambda seen: bool(seen.attentions) or seen.takes("tokens")),
    "unknown": ("attention", lambda seen: True),
}
"""Family → the evidence that decides, and what it has to be; the first family that applies counts."""

FAMILIES = tuple(_RULES)
"""What `Fingerprint.family` can be."""


@names_model_faults("model")
def fingerprint(model: ModelSource) -> Fingerprint:
    """Classify the architecture of a model, and find the blocks that it repeats.

    The first of `FAMILIES` whose evidence is there counts, so that a speech model with an encoder and a decoder is
    ``speech``. ``docs/fingerprint.md`` has what tells each, and the accuracy.

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
    seen = GraphFeatures(tagged)
    family, (first, _) = next((name, rule) for name, rule in _RULES.items() if rule[1](seen))
    sentences = _evidence(seen)
    evidence = (*sentences.pop(first), *itertools.chain.from_iterable(sentences.values()))
    return Fingerprint(family, evidence, repeated_blocks(GraphFacts(tagged)), len(tagged.nodes), tagged.tag_facts)


def _evidence(seen: GraphFeatures) -> dict[str, list[str]]:
    """What was seen, in sentences."""
    attentions = ", ".join(f"{count} {kind}" for kind, count in seen.attentions.most_common())
    wide = (f"{count} in {many(dims, 'dimension')}" for dims, count in sorted(seen.convolutions.items()))
    unrolled = f"loops over {max(seen.loops, default=0)} steps, unrolled, over {len(seen.loops)} tensors"
    return {
        "time": [
            f"input {name} is a time step: its sines and cosines enter a linear layer" for name in seen.time_steps
        ],
        "routing": [
            f"{len(seen.routers)} routers: each position chooses {chosen or 'some'} of {experts} experts"
            for chosen, experts in seen.routers[:1]
        ],
        "recurrence": [
            *(f"{count} {op}" for op, count in seen.recurrent.most_common()),
            *[unrolled][: len(seen.loops)],
        ],
        "attention": [f"{seen.attentions.total()} attentions: {attentions}"] if attentions else [],
        "inputs": [_about(seen.facts, given) for given in seen.inputs if given.kind != "control"],
        "convolution": [f"{seen.convolutions.total()} convolutions wider than a point: {', '.join(wide)}"]
        if seen.convolutions
        else [],
    }


def _about(facts: GraphFacts, given: ModelInput) -> str:
    sizes = ", ".join(str(size if isinstance(size, int) else size.value or "?") for size in given.value.shape or ())
    sentence = f"input {given.value.name or 'unnamed'} [{sizes}] is"
    if given.kind == "tokens":
        return f"{sentence} tokens: it is looked up in a table of vectors"
    first = given.convolution
    shape = None if first is None else facts.shape(first.inputs[1])
    kernel = [size for size in (shape or ())[2:] if isinstance(size, int)]
    if first is None or not kernel:
        return f"{sentence} numbers that enter no convolution first"
    strides = [*(first.attributes.get_ints("strides") or (1,) * len(kernel))]
    wide, stride = ("x".join(map(str, sizes)) for sizes in (kernel, strides))
    patches = kernel == strides and min(kernel) > 1
    how = f"is cut in patches of {wide}" if patches else f"enters a convolution of {wide}, stride {stride}"
    return f"{sentence} {'an image' if given.kind == 'image' else 'a signal or spectrum over time'}: it {how}"
