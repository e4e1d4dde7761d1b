"""All features that the detectors find in a graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from htp_export.capabilities.fingerprint.detectors.attention import Attention, attentions_of
from htp_export.capabilities.fingerprint.detectors.convolution import convolutions
from htp_export.capabilities.fingerprint.detectors.inputs import ModelInputs
from htp_export.capabilities.fingerprint.detectors.masks import CausalMasks
from htp_export.capabilities.fingerprint.detectors.recurrence import recurrent_operators, unrolled_loops
from htp_export.capabilities.fingerprint.detectors.routing import Router, routers
from htp_export.capabilities.fingerprint.detectors.timestep import timestep_inputs
from htp_export.model.graph_facts import GraphFacts

__all__ = ["GraphFeatures"]


@dataclass(frozen=True)
class GraphFeatures:
    """What a graph computes.

    Attributes:
        facts: The graph.
        inputs: The inputs of the model.
        attentions: All attentions.
        attention_kinds: Kind → number of attentions.
        convolutions: Number of spatial dimensions → number of convolutions.
        recurrent_operators: Operator with a recurrent state → number of nodes.
        unrolled_loops: Number of steps of each unrolled loop over time.
        routers: The routers of mixtures of experts.
        timesteps: Names of the inputs that are diffusion time steps.
    """

    facts: GraphFacts
    inputs: ModelInputs
    attentions: list[Attention]
    attention_kinds: Counter[str]
    convolutions: Counter[int]
    recurrent_operators: Counter[str]
    unrolled_loops: list[int]
    routers: list[Router]
    timesteps: list[str]

    @classmethod
    def of(cls, facts: GraphFacts) -> GraphFeatures:
        """Run every detector on a graph."""
        inputs = ModelInputs(facts)
        attentions = attentions_of(facts, inputs, CausalMasks(facts))
        return cls(
            facts,
            inputs,
            attentions,
            Counter(attention.kind for attention in attentions),
            convolutions(facts),
            recurrent_operators(facts),
            unrolled_loops(facts),
            routers(facts),
            [value.name or "unnamed" for value in timestep_inputs(facts)],
        )
