"""All features that the detectors find in a graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.fingerprints.detectors.attention import Attention, attentions_of
from htp_export.fingerprints.detectors.convolution import convolutions, skip_concatenations
from htp_export.fingerprints.detectors.inputs import ModelInputs
from htp_export.fingerprints.detectors.masks import CausalMasks
from htp_export.fingerprints.detectors.recurrence import linear_recurrences, recurrent_operators, unrolled_loops
from htp_export.fingerprints.detectors.routing import Router, routers
from htp_export.fingerprints.detectors.timestep import timestep_inputs
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
        linear_recurrences: The decays of linear recurrences that are computed for all steps at once.
        routers: The routers of mixtures of experts.
        timesteps: Names of the inputs that are diffusion time steps.
        skips: Number of skip connections over a part that downsamples and upsamples.
    """

    facts: GraphFacts
    inputs: ModelInputs
    attentions: list[Attention]
    attention_kinds: Counter[str]
    convolutions: Counter[int]
    recurrent_operators: Counter[str]
    unrolled_loops: list[int]
    linear_recurrences: list[ir.Value]
    routers: list[Router]
    timesteps: list[str]
    skips: int

    @classmethod
    def of(cls, facts: GraphFacts) -> GraphFeatures:
        """Run every detector on a graph."""
        inputs, masks = ModelInputs(facts), CausalMasks(facts)
        attentions = attentions_of(facts, inputs, masks)
        return cls(
            facts,
            inputs,
            attentions,
            Counter(attention.kind for attention in attentions),
            convolutions(facts),
            recurrent_operators(facts),
            unrolled_loops(facts),
            linear_recurrences(facts, masks),
            routers(facts),
            [value.name or "unnamed" for value in timestep_inputs(facts)],
            skip_concatenations(facts),
        )
