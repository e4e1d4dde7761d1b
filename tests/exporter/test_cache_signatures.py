"""Signatures of modules that are given a cache: the tensors in it that they read, and those that they give back."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.format.leaves import containers_in, named_leaves
from htp_export.format.signatures import Signature, signatures_from_json
from tests.exporting import BOTH, exported
from tests.nets import ready, x


@dataclass
class States:
    """A cache of one tensor for each layer; a layer replaces its own."""

    tensors: list[torch.Tensor]


torch.export.register_dataclass(States, serialized_type_name="tests.States")


class Layer(nn.Module):
    """Reads the state of its own layer, and writes it."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.fc = place, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, states: States) -> torch.Tensor:
        y = self.fc(x) + states.tensors[self.place]
        states.tensors[self.place] = y.tanh()
        return y


class Returning(Layer):
    """Returns the whole cache, too, as layers of older libraries do."""

    def forward(self, x: torch.Tensor, states: States) -> Any:
        return super().forward(x, states), states


class Net(nn.Module):
    """Layers that share one cache."""

    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(place) for place in range(3))

    def forward(self, x: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
        states = States(list(states.tensors))
        for layer in self.layers:
            x = layer(x, states)
            x = x[0] if isinstance(x, tuple) else x
        return x, states


def states() -> States:
    return States([x(2, 4, seed=seed) for seed in range(5, 8)])


@functools.cache
def exported_with_cache(kind: type[Layer]) -> tuple[nn.Module, dict[str, Any], Any, dict[str, Signature]]:
    """A net, its inputs, its program, and the signature of each module."""
    model, kwargs = ready(Net(kind)), {"x": x(2, 4), "states": states()}
    program = htp_export.export(model, kwargs=kwargs, verbose=False)
    found = signatures_from_json(program.model.metadata_props["htp.signatures"])
    return model, kwargs, program, {path: calls[0] for path, calls in found.items()}


def test_a_layer_has_the_part_that_it_reads_and_the_root_has_all() -> None:
    _, _, program, found = exported_with_cache(Layer)
    inputs = [str(value.name) for value in program.model.graph.inputs]
    parts = [f"states.tensors.{place}" for place in range(3)]
    assert found[""].inputs == dict(zip(["x", *parts], inputs, strict=True))
    assert found[""].outputs == tuple(str(value.name) for value in program.model.graph.outputs)
    for place, part in enumerate(parts):
        assert set(found[f"layers.{place}"].inputs) == {"x", part}
        assert found[f"layers.{place}"].inputs[part] == inputs[1 + place]


@pytest.mark.parametrize("kind", [Layer, Returning])
@pytest.mark.parametrize("isolated", [False, True], ids=["whole", "isolated"])
def test_modules_with_a_cache_agree(kind: type[Layer], isolated: bool) -> None:
    model, kwargs, program, _ = exported_with_cache(kind)
    for _ in range(2):  # each run has the cache as it was given
        result = htp_export.verify(model, program, kwargs=kwargs, isolated=isolated)
        assert result.ok, result.summary
        names = [entry.name for entry in result.modules["layers.1"].calls[0].inputs]
        assert isolated or "states.tensors.1" in names
    assert all(torch.equal(one, two) for one, two in zip(kwargs["states"].tensors, states().tensors, strict=True))


def test_a_layer_that_returns_the_cache_has_all_of_it() -> None:
    _, _, program, found = exported_with_cache(Returning)
    new = [str(value.name) for value in program.model.graph.outputs][1:]
    old = [str(value.name) for value in program.model.graph.inputs][1:]
    assert list(found["layers.1"].inputs.values())[1:] == [new[0], old[1], old[2]]
    assert found["layers.1"].outputs[1:] == (new[0], new[1], old[2])


class Twice(nn.Module):
    """Makes its cache itself, and calls one layer twice with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = States([x.sin()])
        return self.layer(self.layer(x, states), states) + states.tensors[0]


@BOTH
def test_what_a_call_leaves_in_the_cache_is_given_to_the_next_call_only(exporter: str, tmp_path: Path) -> None:
    model, kwargs = ready(Twice()), {"x": x(2, 4)}
    exported(model, kwargs, exporter, tmp_path)
    tagged = htp_export.load(tmp_path / "model.onnx")
    given = [tagged.signature("layer", number).inputs["states.tensors.0"] for number in range(2)]
    assert [tagged.values[name].producer().op_type for name in given] == ["Sin", "Tanh"]
    result = htp_export.verify(model, tmp_path / "model.onnx", kwargs=kwargs)
    assert result.ok, result.summary
    assert [len(call.inputs) for call in result.modules["layer"].calls] == [2, 2]


# What torch.export and transformers do there warns their own developers.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_process_in_which_torch_does_not_know_caches_verifies(tmp_path: Path) -> None:
    pytest.importorskip("transformers.exporters", reason="transformers older than 5.23 registers no caches")
    from tests.exporter.test_containers import llama, with_cache

    model = llama(2)
    exported(model, with_cache(model), "dynamo", tmp_path)
    code = """
import sys
import htp_export
from tests.exporter.test_containers import llama, with_cache
model = llama(2)
kwargs = with_cache(model)
for _ in range(2):
    result = htp_export.verify(model, sys.argv[1], kwargs=kwargs)
    call = result.modules["model.layers.1.self_attn"].calls[0]
    print(result.ok, [entry.name for entry in call.inputs if entry.name.startswith("past")])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "model.onnx")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    line = "True ['past_key_values.layers.1.keys', 'past_key_values.layers.1.values']"
    assert found.stdout.splitlines() == [line, line], found.stderr


class TestLeaves:
    def test_tensors_are_named_by_the_attributes_that_lead_to_them_where_torch_only_counts(self) -> None:
        exporters = pytest.importorskip("transformers.exporters.exporter_dynamo")
        from transformers import DynamicCache, EncoderDecoderCache

        own, cross = DynamicCache(), DynamicCache()
        own.update(x(1, 1, 2, 4), x(1, 1, 2, 4, seed=1), 0)
        cross.update(x(1, 1, 3, 4), x(1, 1, 3, 4, seed=1), 0)
        cache = EncoderDecoderCache(own, cross)
        kinds = ("self_attention_cache", "cross_attention_cache")
        wanted = [f"past.{kind}.layers.0.{part}" for kind in kinds for part in ("keys", "values")]
        for _ in range(2):  # the same names before and after torch knows the class
            tensors = {name: leaf for name, leaf in named_leaves({"past": cache}) if isinstance(leaf, torch.Tensor)}
            assert list(tensors) == wanted
            exporters.register_pytree_node(EncoderDecoderCache)
        assert list(containers_in({"past": cache, "ids": x(1, 1), "both": [cache]})) == ["past", "both.0"]

    def test_what_torch_cannot_take_apart_is_one_leaf(self) -> None:
        class Broken:
            tensor = x(1, 1)

        def refuse(_: Any) -> Any:
            raise TypeError("Cannot flatten a bound method")

        torch.utils._pytree.register_pytree_node(Broken, refuse, lambda *_: Broken())
        broken = Broken()
        assert list(named_leaves({"a": broken})) == [("a", broken)]
