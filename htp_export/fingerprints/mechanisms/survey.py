"""All mechanisms of a graph at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from htp_export.fingerprints.mechanisms.attention import Attention, attentions_of
from htp_export.fingerprints.mechanisms.convolution import Stem, convolutions, skip_concatenations, stem_of
from htp_export.fingerprints.mechanisms.masks import CausalMasks
from htp_export.fingerprints.mechanisms.recurrence import linear_recurrences, recurrent_operators, unrolled_loops
from htp_export.fingerprints.mechanisms.routing import Router, routers
from htp_export.fingerprints.mechanisms.streams import Stream, Streams
from htp_export.fingerprints.mechanisms.timestep import timestep_inputs
from htp_export.model.graph_facts import GraphFacts

__all__ = ["Survey"]


@dataclass(frozen=True)
class Survey:
    """What a graph does, by mechanism; each is looked for when it is asked for.

    Attributes:
        facts: The graph.
    """

    facts: GraphFacts

    @cached_property
    def streams(self) -> Streams:
        """What the model is given."""
        return Streams(self.facts)

    @cached_property
    def masks(self) -> CausalMasks:
        """Which masks are causal."""
        return CausalMasks(self.facts)

    @cached_property
    def attentions(self) -> list[Attention]:
        """Every attention."""
        return attentions_of(self.facts, self.streams, self.masks)

    @cached_property
    def attention_kinds(self) -> Counter[str]:
        """How many attentions there are of each kind."""
        return Counter(attention.kind for attention in self.attentions)

    @cached_property
    def convolutions(self) -> Counter[int]:
        """Dimensions → convolutions that have so many."""
        return convolutions(self.facts)

    @cached_property
    def recurrent_operators(self) -> Counter[str]:
        """Operators that carry a state from step to step."""
        return recurrent_operators(self.facts)

    @cached_property
    def unrolled_loops(self) -> list[int]:
        """Steps of the loops over time that were unrolled."""
        return unrolled_loops(self.facts)

    @cached_property
    def linear_recurrences(self) -> list[ir.Value]:
        """What decays in linear recurrences that are computed for all steps at once."""
        return linear_recurrences(self.facts, self.masks)

    @cached_property
    def routers(self) -> list[Router]:
        """Choices among experts."""
        return routers(self.facts)

    @cached_property
    def timesteps(self) -> list[str]:
        """Names of the inputs that are time steps of diffusion."""
        return [value.name or "unnamed" for value in timestep_inputs(self.facts)]

    @cached_property
    def skips(self) -> int:
        """Skips over a part that makes things smaller and larger again."""
        return skip_concatenations(self.facts)

    def stem(self, stream: Stream) -> Stem | None:
        """The first convolution behind an input."""
        return None if stream.convolution is None else stem_of(self.facts, stream.convolution)
