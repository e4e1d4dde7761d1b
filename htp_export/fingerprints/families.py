"""Fingerprint: the family of architectures that a graph belongs to, why, and the blocks that it repeats.

Only mechanisms count: what the graph does to its inputs. Names of models, modules and tensors say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from htp_export.costs.concrete import with_sizes
from htp_export.fingerprints.blocks import Block, repeated_blocks
from htp_export.fingerprints.mechanisms.streams import Stream
from htp_export.fingerprints.mechanisms.survey import Survey
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.inlining import read_flat
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tag_facts import TagFacts, tag_lines
from htp_export.model.tagged import ModelSource

__all__ = ["FAMILIES", "Fingerprint", "fingerprint"]


@dataclass(frozen=True)
class Fingerprint:
    """What a graph is.

    Attributes:
        family: One of `FAMILIES`.
        evidence: What was seen, in sentences; what decided the family comes first.
        blocks: Structures that stand in the graph several times, those that make up most of it first.
        nodes: Nodes of the model.
        tags: What the model knows about its module tags.
    """

    family: str
    evidence: tuple[str, ...]
    blocks: tuple[Block, ...]
    nodes: int
    tags: TagFacts | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.family, *(f"  {fact}" for fact in self.evidence)]
        lines += [f"{block.count:5} × {block.name}, {block.nodes} nodes each" for block in self.blocks]  # noqa: RUF001 - "times"
        return "\n".join((*lines, *tag_lines(self.tags)))


def _diffusion(survey: Survey) -> bool:
    return bool(survey.timesteps)


def _mixture(survey: Survey) -> bool:
    return bool(survey.routers)


def _multimodal(survey: Survey) -> bool:
    """Two kinds of input, other than one that is turned into tokens: those are given to the decoder themselves."""
    streams = survey.streams
    if not streams.of("tokens") or not (streams.of("image") or streams.of("sound")):
        return False
    return not _decodes(survey)


def _decodes(survey: Survey) -> bool:
    """Whether what is computed from one input attends to what is computed from another."""
    return survey.attention_kinds["cross"] > 0 and survey.attention_kinds["causal"] > 0


def _speech(survey: Survey) -> bool:
    if survey.streams.of("sound"):
        return True
    alone = not survey.streams.of("tokens") and not survey.streams.of("image")
    return alone and bool(survey.streams.of("features")) and bool(survey.attentions) and survey.convolutions[1] > 0


def _recurrent(survey: Survey) -> bool:
    loops = sum(survey.recurrent_operators.values()) + len(survey.unrolled_loops)
    return loops + len(survey.linear_recurrences) > len(survey.attentions)


def _vision_transformer(survey: Survey) -> bool:
    return bool(survey.streams.of("image")) and bool(survey.attentions) and not _decodes(survey)


def _convolutional(survey: Survey) -> bool:
    return survey.convolutions[2] + survey.convolutions[3] > 0 and not survey.attentions


def _decoder(survey: Survey) -> bool:
    kinds = survey.attention_kinds
    return kinds["causal"] > kinds["bidirectional"]


def _encoder(survey: Survey) -> bool:
    return bool(survey.attentions) or bool(survey.streams.of("tokens"))


_RULES: tuple[tuple[str, Callable[[Survey], bool]], ...] = (
    ("diffusion-like", _diffusion),
    ("mixture", _mixture),
    ("multimodal", _multimodal),
    ("speech", _speech),
    ("recurrent", _recurrent),
    ("vision transformer", _vision_transformer),
    ("encoder-decoder", _decodes),
    ("CNN", _convolutional),
    ("decoder", _decoder),
    ("encoder", _encoder),
    ("unknown", lambda survey: True),
)
"""The families, and what says that a graph belongs to one; the first that applies does."""

FAMILIES = tuple(family for family, _ in _RULES)
"""What `Fingerprint.family` can be."""


@names_model_faults("model")
def fingerprint(model: ModelSource) -> Fingerprint:
    """What kind of network a graph is, told by its mechanisms, and the blocks that it repeats.

    ======================  =======================================================================================
    ``diffusion-like``      an input of one number for each example enters a layer as sines and cosines
    ``mixture``             each position chooses among experts
    ``multimodal``          tokens and images, or tokens and sound
    ``speech``              a signal or spectrum over time enters a convolution
    ``recurrent``           more recurrent operators, loops over time, or linear recurrences, than attentions
    ``vision transformer``  attention over what is computed from an image
    ``encoder-decoder``     causal attention, and attention of what comes from one input to what comes from another
    ``CNN``                 convolutions in two or three dimensions, no attention
    ``decoder``             most attention is causal
    ``encoder``             other attention, or tokens without any
    ``unknown``             none of these
    ======================  =======================================================================================

    The first that applies counts, so that a speech model with an encoder and a decoder is ``speech``. See
    ``docs/fingerprint.md`` for how often this is right.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``. It is not changed. Tags are not
            needed; with them, repeated blocks are modules.

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
    survey = Survey(GraphFacts(with_sizes(tagged)))
    family = next(name for name, applies in _RULES if applies(survey))
    blocks = repeated_blocks(GraphFacts(tagged))
    shapes = {value.name: value.shape for value in tagged.model.graph.inputs if value.name}
    return Fingerprint(family, tuple(_evidence(survey, family, shapes)), blocks, len(tagged.nodes), tagged.tag_facts)


def _evidence(survey: Survey, family: str, shapes: Mapping[str, ir.Shape | None]) -> Iterator[str]:
    """What was seen, what decided the family first."""
    facts = {
        "diffusion-like": _about_time(survey),
        "mixture": _about_routing(survey),
        "recurrent": _about_recurrence(survey),
        "attention": _about_attention(survey),
        "inputs": [_about_stream(survey, stream, shapes.get(stream.name)) for stream in survey.streams.data],
        "convolution": _about_convolution(survey),
    }
    first = {
        "multimodal": "inputs",
        "speech": "inputs",
        "vision transformer": "inputs",
        "CNN": "convolution",
    }.get(family, family if family in facts else "attention")
    yield from facts[first]
    for name, told in facts.items():
        if name != first:
            yield from told


def _about_time(survey: Survey) -> list[str]:
    told = [f"input {name} is a time step: its sines and cosines enter a linear layer" for name in survey.timesteps]
    if survey.skips:
        told.append(f"{survey.skips} skips beside a part that makes things smaller and larger again")
    return told


def _about_routing(survey: Survey) -> list[str]:
    if not survey.routers:
        return []
    router = survey.routers[0]
    chosen = "some" if router.chosen is None else router.chosen
    return [f"{len(survey.routers)} routers: each position chooses {chosen} of {router.experts} experts"]


def _about_recurrence(survey: Survey) -> list[str]:
    told = [f"{count} {op}" for op, count in survey.recurrent_operators.most_common()]
    if survey.unrolled_loops:
        told.append(
            f"loops over {max(survey.unrolled_loops)} steps, unrolled, over {len(survey.unrolled_loops)} tensors"
        )
    if survey.linear_recurrences:
        told.append(f"{len(survey.linear_recurrences)} cumulative sums of decays: linear recurrence, all steps at once")
    return told


def _about_attention(survey: Survey) -> list[str]:
    kinds = survey.attention_kinds
    if not kinds:
        return []
    parts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return [f"{len(survey.attentions)} attentions: {parts}"]


def _about_stream(survey: Survey, stream: Stream, shape: ir.Shape | None) -> str:
    sizes = [str(size if isinstance(size, int) else size.value or "?") for size in shape.dims] if shape else []
    said = f"input {stream.name} [{', '.join(sizes)}]"
    if stream.kind == "tokens":
        return f"{said} is tokens: it is looked up in a table of vectors"
    if stream.in_patches:
        return f"{said} is an image: its patches enter a linear layer"
    stem = survey.stem(stream)
    if stem is None:
        return f"{said} is numbers that enter no convolution first"
    kernel, strides = ("x".join(map(str, sizes)) for sizes in (stem.kernel, stem.strides))
    what = "an image" if stream.kind == "image" else "a signal or spectrum over time"
    how = f"is cut in patches of {kernel}" if stem.patches else f"enters a convolution of {kernel}, stride {strides}"
    return f"{said} is {what}: it {how}"


def _about_convolution(survey: Survey) -> list[str]:
    total = sum(survey.convolutions.values())
    if not total:
        return []
    parts = ", ".join(f"{count} in {dims} dimensions" for dims, count in sorted(survey.convolutions.items()))
    return [f"{total} convolutions wider than a point: {parts}".replace("in 1 dimensions", "in 1 dimension")]
