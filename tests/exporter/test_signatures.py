"""Signatures in files name the tensors that PyTorch gave to modules and got back, those inside of caches too."""

import functools
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.format.leaves import containers_in, named_leaves
from htp_export.format.signatures import Signature, signatures_from_json, signatures_to_json
from tests.exporting import BOTH, exported, exported_net, open_sizes
from tests.nets import NETS, Apply, Holding, ready, spread, x
from tests.truth import equal, named_wrongly, run_pytorch, signatures_of, tree_of, values_of


def test_nothing_is_taken_from_an_attempt_at_tracing_that_failed(tmp_path, monkeypatch):
    """torch.onnx.export then tries torch.export's strict mode, in which no module is seen to run."""
    from torch.onnx._internal.exporter import _capture_strategies as strategies

    attempt = strategies.TorchExportNonStrictStrategy._capture

    def fails(*args: Any, **kwargs: Any) -> None:
        attempt(*args, **kwargs)
        raise RuntimeError("not so")

    monkeypatch.setattr(strategies.TorchExportNonStrictStrategy, "_capture", fails)
    file = exported_net("cells", "dynamo", tmp_path)
    assert "htp.signatures" not in {entry.key for entry in file.metadata_props}
    model, kwargs = NETS["cells"].build()
    # of a cell's two results the last call has one in the file
    result = htp_export.verify(model, file, kwargs=kwargs)
    assert (result.ok, result.modules["cell"].status, result.modules["out"].status) == (
        True,
        "agrees",
        "agrees",
    )


class Layer(Holding, fc=nn.Linear(4, 4)):
    def forward(
        self, x: torch.Tensor, *rest: torch.Tensor, scale: torch.Tensor, pair: Any = None
    ) -> Any:
        return {"hidden": self.fc(x) * scale + rest[0], "pair": (pair[0].tanh(), pair[1] * 3)}


class Model(Holding, layer=Layer()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        once = self.layer(x, y, scale=x * 2, pair=(y, x))
        twice = self.layer(
            once["hidden"].relu(), y, scale=once["pair"][0], pair=(x, once["pair"][1])
        )
        return twice["hidden"] + twice["pair"][0] + twice["pair"][1]


@BOTH
def test_arguments_have_their_names_in_forward_and_calls_are_told_apart(exporter, tmp_path):
    file = exported(spread(Model()).eval(), {"x": x(2, 4)}, exporter, tmp_path)
    first, second = signatures_of(file)["layer"]
    ops = {node.output[0]: node.op_type for node in file.graph.node}
    assert list(first.inputs) == ["x", "rest.0", "scale", "pair.0", "pair.1"]
    assert first.inputs["x"] == first.inputs["pair.1"] == file.graph.input[0].name
    assert first.inputs["rest.0"] == first.inputs["pair.0"] == second.inputs["rest.0"]
    assert [ops[str(name)] for name in first.outputs] == ["Add", "Tanh", "Mul"]
    assert ops[str(second.inputs["x"])] == "Relu"
    assert (second.inputs["scale"], second.inputs["pair.1"]) == first.outputs[1:]


class Sum(nn.Module):
    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one.exp() + other


class PlainTensor(Holding, layer=Sum(), table=torch.arange(8.0).reshape(2, 4)):
    """Gives a module a tensor that the tracer has never seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, self.table) + self.table


@dataclass
class Parts:
    """What torch does not take apart; it has itself as a field."""

    hidden: torch.Tensor
    rest: tuple[torch.Tensor, ...]
    whole: Any = None


class GivesParts(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> Parts:
        parts = Parts(self.fc(x), (x.exp(),))
        parts.whole = parts
        return parts


class TakesParts(Holding, fc=nn.Linear(4, 4)):
    def forward(self, parts: Parts) -> torch.Tensor:
        return self.fc(parts.hidden) + parts.rest[0]


class Between(Holding, gives=GivesParts(), takes=TakesParts()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.takes(self.gives(x)).tanh()


@BOTH
def test_tensors_in_a_dataclass_between_modules_are_named_by_its_fields(exporter, tmp_path):
    model, kwargs = spread(Between()).eval(), {"x": x(2, 4)}
    found = signatures_of(exported(model, kwargs, exporter, tmp_path))
    assert found["takes"][0].inputs == dict(
        zip(("parts.hidden", "parts.rest.0"), found["gives"][0].outputs, strict=True)
    )
    result = htp_export.verify(model, tmp_path / "model.onnx", kwargs=kwargs)
    assert (result.ok, result.modules["gives"].status) == (True, "agrees")


@BOTH
def test_a_constant_argument_names_no_tensor_of_another_value(exporter, tmp_path):
    model, kwargs = spread(PlainTensor()).eval(), {"x": x(2, 4)}
    file = exported(model, kwargs, exporter, tmp_path)
    (signature,) = signatures_of(file)["layer"]
    values = values_of(file, kwargs)
    constant = signature.inputs["other"]
    assert signature.inputs["one"] == file.graph.input[0].name
    assert constant is None or equal(values[constant], model.table.numpy())


class GivesNumbers(Holding, fc=nn.Linear(4, 4), factor=torch.tensor(2.5)):
    """Numbers among tensors: sizes, arithmetic on them, flags; and tensors without dimensions that are no numbers."""

    def forward(self, x: torch.Tensor, count: int, causal: bool = False, scale: float = 2.0) -> Any:
        size, y = x.shape[0], self.fc(x) * scale
        numbers = (
            size,
            size * 2,
            2 - size,
            size / 2,
            size // 2 % 3,
            size**2,
            size > 2,
            count,
            causal,
            [x.numel(), scale],
        )
        tensors = (
            y.sum(),
            y.mean() * size,
            torch.arange(size).sum(),
            torch.ones(size).sum(),
            size * self.factor,
        )
        return numbers, y, {"sum": tensors[0], "size": -size}, (*tensors[1:], x.shape, y.max())


class TakesNumbers(
    Holding, gives=GivesNumbers(), only=Apply(lambda x: (x.shape[1], x)), out=nn.Linear(4, 2)
):
    def forward(self, x: torch.Tensor, count: int = 3) -> torch.Tensor:
        numbers, y, named, (mean, places, ones, product, _, most) = self.gives(x, count, True)
        width, same = self.only(y)
        return (
            self.out(same) / width * numbers[1]
            + named["sum"]
            + mean
            + places
            + ones
            + product
            + most
        )


@BOTH
@pytest.mark.parametrize("is_open", [False, True], ids=["fixed", "open"])
def test_numbers_that_modules_take_and_give_are_in_no_signature(exporter, is_open, tmp_path):
    """The tracer of TorchScript has tensors in their place."""
    model, kwargs = ready(TakesNumbers()), {"x": x(5, 4)}
    options = open_sizes(exporter, x={0: "batch"}) if is_open else {}
    file = exported(model, kwargs, exporter, tmp_path, **options)
    calls, _ = run_pytorch(model, kwargs)
    (signature,) = signatures_of(file)["gives"]
    assert (list(signature.inputs), len(signature.outputs)) == (["x"], 7)
    assert [name is not None for name in signature.outputs[:3]] == [True, True, True]
    assert [len(signatures_of(file)[path][0].outputs) for path in calls] == [
        len(calls[path][0].returned) for path in calls
    ]
    assert list(named_wrongly(calls, file, values_of(file, kwargs))) == []
    assert tree_of(file)["only"]["fate"] == "identity"
    # nothing in the file reads the other one
    assert list(signatures_of(file)[""][0].inputs) == ["x"]
    assert htp_export.verify(model, tmp_path / "model.onnx", kwargs=kwargs).ok
    assert (
        len(htp_export.tap(tmp_path / "model.onnx", ["only:out"], tmp_path / "tapped.onnx").tensors)
        == 1
    )


class Flags(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor, flag: bool = True, times: int = 2) -> Any:
        return (self.fc(x) if flag else x) * times, times


def test_numbers_of_the_call_are_named_where_they_are_inputs_of_the_file(tmp_path):
    file = exported(ready(Flags()), {"x": x(2, 4)}, "torchscript", tmp_path)
    (signature,) = signatures_of(file)[""]
    inputs = [entry.name for entry in file.graph.input]
    assert list(signature.inputs.items()) == [("x", inputs[0]), ("times", inputs[1])]
    assert signature.outputs == (file.graph.output[0].name,)


def test_what_is_written_is_read_back():
    signatures = {"": [Signature({"x": "in", "mask": None}, (None, "out"))], "a b": []}
    assert signatures_from_json(signatures_to_json(signatures)) == {
        path: tuple(c) for path, c in signatures.items()
    }


@pytest.mark.parametrize(
    "text", ["", "[]", '{"fc": 1}', '{"fc": [[[], []]]}', '{"fc": [[{"x": 1}, []]]}']
)
def test_what_is_no_signature_is_refused_with_the_key_at_fault(text):
    with pytest.raises(ValueError, match=r"htp\.signatures"):
        signatures_from_json(text)


@dataclass
class States:
    """A cache of one tensor for each layer; a layer replaces its own."""

    tensors: list[torch.Tensor]


torch.export.register_dataclass(States, serialized_type_name="tests.States")


class Stateful(nn.Module):
    """Reads the state of its own layer, and writes it."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.fc = place, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, states: States) -> torch.Tensor:
        y = self.fc(x) + states.tensors[self.place]
        states.tensors[self.place] = y.tanh()
        return y


class ReturnsItsState(Stateful):
    """Returns the whole cache, too, as layers of older libraries do."""

    def forward(self, x: torch.Tensor, states: States) -> Any:
        return super().forward(x, states), states


class SharesStates(nn.Module):
    """Layers that share one cache."""

    def __init__(self, kind: type[Stateful]) -> None:
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
def exported_with_cache(
    kind: type[Stateful],
) -> tuple[nn.Module, dict[str, Any], Any, dict[str, Signature]]:
    """A net, its inputs, its program, and the signature of each module."""
    model, kwargs = ready(SharesStates(kind)), {"x": x(2, 4), "states": states()}
    program = htp_export.export(model, kwargs=kwargs, verbose=False)
    found = signatures_from_json(program.model.metadata_props["htp.signatures"])
    return model, kwargs, program, {path: calls[0] for path, calls in found.items()}


def test_a_layer_has_the_part_that_it_reads_and_the_root_has_all():
    _, _, program, found = exported_with_cache(Stateful)
    inputs = [str(value.name) for value in program.model.graph.inputs]
    parts = [f"states.tensors.{place}" for place in range(3)]
    assert found[""].inputs == dict(zip(["x", *parts], inputs, strict=True))
    assert found[""].outputs == tuple(str(value.name) for value in program.model.graph.outputs)
    for place, part in enumerate(parts):
        assert set(found[f"layers.{place}"].inputs) == {"x", part}
        assert found[f"layers.{place}"].inputs[part] == inputs[1 + place]


@pytest.mark.parametrize("kind", [Stateful, ReturnsItsState])
@pytest.mark.parametrize("isolated", [False, True], ids=["whole", "isolated"])
def test_modules_with_a_cache_agree(kind, isolated):
    model, kwargs, program, _ = exported_with_cache(kind)
    for _ in range(2):  # each run has the cache as it was given
        result = htp_export.verify(model, program, kwargs=kwargs, isolated=isolated)
        assert result.ok, result.summary
        names = [entry.name for entry in result.modules["layers.1"].calls[0].inputs]
        assert isolated or "states.tensors.1" in names
    assert all(
        torch.equal(one, two)
        for one, two in zip(kwargs["states"].tensors, states().tensors, strict=True)
    )


def test_a_layer_that_returns_the_cache_has_all_of_it():
    _, _, program, found = exported_with_cache(ReturnsItsState)
    new = [str(value.name) for value in program.model.graph.outputs][1:]
    old = [str(value.name) for value in program.model.graph.inputs][1:]
    assert list(found["layers.1"].inputs.values())[1:] == [new[0], old[1], old[2]]
    assert found["layers.1"].outputs[1:] == (new[0], new[1], old[2])


class Twice(Holding, layer=Stateful(0)):
    """Makes its cache itself, and calls one layer twice with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = States([x.sin()])
        return self.layer(self.layer(x, states), states) + states.tensors[0]


@BOTH
def test_what_a_call_leaves_in_the_cache_is_given_to_the_next_call_only(exporter, tmp_path):
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
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_a_process_in_which_torch_does_not_know_caches_verifies(tmp_path):
    pytest.importorskip(
        "transformers.exporters", reason="transformers older than 5.23 registers no caches"
    )
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
    def test_tensors_are_named_by_the_attributes_that_lead_to_them_where_torch_only_counts(self):
        exporters = pytest.importorskip("transformers.exporters.exporter_dynamo")
        from transformers import DynamicCache, EncoderDecoderCache

        own, cross = DynamicCache(), DynamicCache()
        own.update(x(1, 1, 2, 4), x(1, 1, 2, 4, seed=1), 0)
        cross.update(x(1, 1, 3, 4), x(1, 1, 3, 4, seed=1), 0)
        cache = EncoderDecoderCache(own, cross)
        kinds = ("self_attention_cache", "cross_attention_cache")
        wanted = [f"past.{kind}.layers.0.{part}" for kind in kinds for part in ("keys", "values")]
        for _ in range(2):  # the same names before and after torch knows the class
            tensors = {
                name: leaf
                for name, leaf in named_leaves({"past": cache})
                if isinstance(leaf, torch.Tensor)
            }
            assert list(tensors) == wanted
            exporters.register_pytree_node(EncoderDecoderCache)
        assert list(containers_in({"past": cache, "ids": x(1, 1), "both": [cache]})) == [
            "past",
            "both.0",
        ]

    def test_what_torch_cannot_take_apart_is_one_leaf(self):
        class Broken:
            tensor = x(1, 1)

        def refuse(_: Any) -> Any:
            raise TypeError("Cannot flatten a bound method")

        torch.utils._pytree.register_pytree_node(Broken, refuse, lambda *_: Broken())
        broken = Broken()
        assert list(named_leaves({"a": broken})) == [("a", broken)]
