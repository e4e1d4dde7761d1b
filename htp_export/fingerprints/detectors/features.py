"""All features that the detectors find in a graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from htp_export.fingerprints.detectors.attention import Attention, attentions_of
from htp_export.fingerprints.detectors.convolution import Stem, convolutions, skip_concatenations, stem_of
from htp_export.fingerprints.detectors.inputs import ModelInput, ModelInputs
from htp_export.fingerprints.detectors.masks import CausalMasks
from htp_export.fingerprints.detectors.recurrence import linear_recurrences, recurrent_operators, unrolled_loops
from htp_export.fingerprints.detectors.routing import Router, routers
from htp_export.fingerprints.detectors.timestep import timestep_inputs
from htp_export.model.graph_facts import GraphFacts

__all__ = ["GraphFeatures"]


@dataclass(frozen=True)
class GraphFeatures:
    """What a graph computes; each feature is detected when it is first used.

    Attributes:
        facts: The graph.
    """

    facts: GraphFacts

    @cached_property
    def inputs(self) -> ModelInputs:
        """The inputs of the model."""
        return ModelInputs(self.facts)

    @cached_property
    def masks(self) -> CausalMasks:
        """The causal masks."""
        return CausalMasks(self.facts)

    @cached_property
    def attentions(self) -> list[Attention]:
        """All attentions."""
        return attentions_of(self.facts, self.inputs, self.masks)

    @cached_property
    def attention_kinds(self) -> Counter[str]:
        """Kind → number of attentions."""
        return Counter(attention.kind for attention in self.attentions)

    @cached_property
    def convolutions(self) -> Counter[int]:
        """Number of spatial dimensions → number of convolutions."""
        return convolutions(self.facts)

    @cached_property
    def recurrent_operators(self) -> Counter[str]:
        """Operator with a recurrent state → number of nodes."""
        return recurrent_operators(self.facts)

    @cached_property
    def unrolled_loops(self) -> list[int]:
        """Number of steps of each unrolled loop over time."""
        return unrolled_loops(self.facts)

    @cached_property
    def linear_recurrences(self) -> list[ir.Value]:
        """The decays of linear recurrences that are computed for all steps at once."""
        return linear_recurrences(self.facts, self.masks)

    @cached_property
    def routers(self) -> list[Router]:
        """The routers of mixtures of experts."""
        return routers(self.facts)

    @cached_property
    def timesteps(self) -> list[str]:
        """Names of the inputs that are diffusion time steps."""
        return [value.name or "unnamed" for value in timestep_inputs(self.facts)]

    @cached_property
    def skips(self) -> int:
        """Number of skip connections over a part that downsamples and upsamples."""
        return skip_concatenations(self.facts)

    def stem(self, model_input: ModelInput) -> Stem | None:
        """Return the first convolution of an input; None if there is none."""
        return None if model_input.convolution is None else stem_of(self.facts, model_input.convolution)
