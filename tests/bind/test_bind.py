"""bind: the weights of another checkpoint in a descendant of an export, bit for bit as a new export has them."""

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.editing import equal_parameters
from htp_export.errors import FileError, InputError, ResultError
from tests.nets import NETS, Holding, spread
from tools.bind_models import STEPS as OF_ALL_MODELS

Arrays = dict[str, np.ndarray]


class Net(nn.Module):
    """A table, a convolution with a normalization, an LSTM, two products, and a parameter that two modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 32)
        self.conv, self.norm = nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32)
        self.rnn = nn.LSTM(32, 32, batch_first=True)
        self.fc = nn.Linear(32, 64)
        self.out = nn.Linear(64, 32)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2).relu()
        x, _ = self.rnn(x)
        return self.head(self.out(self.fc(x).tanh()))


TOKENS = torch.arange(12).reshape(2, 6)


def of_seed(make: Callable[[], nn.Module], seed: int, step: float) -> Any:
    """A net whose weights differ from those of other seeds by at most a step."""
    torch.manual_seed(0)
    made = spread(make()).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor += step * torch.rand(tensor.shape, generator=generator)
    return made


def net(seed: int) -> Net:
    return of_seed(Net, seed, 0.1)  # type: ignore[no-any-return]


def files_of_two(
    make: Callable[[int], nn.Module], x: torch.Tensor, exporter: str, folder: Path
) -> list[Path]:
    """The files of the nets of two seeds."""
    found = [folder / f"{seed}.onnx" for seed in (1, 2)]
    for seed, file in enumerate(found, 1):
        htp_export.export(make(seed), (x,), file, dynamo=exporter == "dynamo", verbose=False)
    return found


@pytest.fixture(scope="module", params=["dynamo", "torchscript"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return files_of_two(net, TOKENS, request.param, tmp_path_factory.mktemp(request.param))


def stored(file: Any) -> Arrays:
    tagged = htp_export.load(file)
    values = (value for graph in tagged.model.graphs() for value in graph.initializers.values())
    return {str(value.name): np.asarray(value.const_value.numpy()) for value in values}


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


STEPS: dict[str, Callable[[Path, Path], object]] = {
    **{name: step for name, step in OF_ALL_MODELS.items() if name not in ("prune", "partition")},
    "extract": lambda file, output: htp_export.extract(file, "rnn", output),
    "fused, then int4": lambda file, output: htp_export.quantize(
        htp_export.optimize(file, level="fused").model, "int4", output
    ),
}
"""Those of the tool that write one file with all weights of a new export; of them, another part is extracted."""


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
def test_what_is_bound_is_what_a_new_export_would_hold(files, step, tmp_path):
    made = [tmp_path / "1.onnx", tmp_path / "2.onnx"]
    for file, output in zip(files, made, strict=True):
        STEPS[step](file, output)
    bound = htp_export.bind(made[0], net(2).state_dict(), tmp_path / "bound.onnx", strict=False)
    found, expected = stored(tmp_path / "bound.onnx"), stored(made[1])
    assert found.keys() == expected.keys()
    different = {name for name in expected if not same(found[name], expected[name])}
    assert different == set()
    assert bound.unbound == {}
    assert bound.tensors > 0
    functions = [
        htp_export.load(file).model.functions for file in (made[0], tmp_path / "bound.onnx")
    ]
    assert functions[0].keys() == functions[1].keys()


def test_back_and_forth_is_the_first_file(files, tmp_path):
    htp_export.quantize(files[0], "int4", tmp_path / "a.onnx")
    htp_export.bind(tmp_path / "a.onnx", net(2), tmp_path / "b.onnx")
    htp_export.bind(tmp_path / "b.onnx", net(1), tmp_path / "c.onnx")
    first, last = stored(tmp_path / "a.onnx"), stored(tmp_path / "c.onnx")
    assert all(same(first[name], last[name]) for name in first)


# --- static integers: ranges of activations are those of the old weights ---


def test_static_integers_are_bound_with_the_ranges_of_the_old_weights(files, tmp_path):
    file = tmp_path / "int8.onnx"
    [name] = [value.name for value in htp_export.load(files[0]).model.graph.inputs]
    plan = {"fc": "uint8", "out": "uint8"}
    htp_export.quantize(files[0], plan, file, data={name: TOKENS.numpy()})
    bound = htp_export.bind(file, net(2), tmp_path / "bound.onnx")
    assert any("ranges of activations" in note for note in bound.notes)
    assert bound.unbound == {}
    fed, expected = {name: TOKENS.numpy()}, net(2)(TOKENS).detach().numpy()
    found = onnxruntime.InferenceSession(tmp_path / "bound.onnx").run(None, fed)[0]
    old = onnxruntime.InferenceSession(file).run(None, fed)[0]
    assert np.abs(found - expected).max() < 0.3 * np.abs(old - expected).max()


def test_ranges_are_measured_again_with_the_weights_option_of_quantize(files):
    """The float file, the plan, the data and the new weights: as `quantize` of a new export, bit for bit."""
    plan, data = {"fc": "uint8", "out": "int8"}, {}
    for value in htp_export.load(files[0]).model.graph.inputs:
        data[str(value.name)] = TOKENS.numpy()
    found = htp_export.quantize(files[0], plan, data=data, weights=net(2))
    expected = htp_export.quantize(files[1], plan, data=data)
    arrays, wanted = stored(found.model), stored(expected.model)
    assert arrays.keys() == wanted.keys()
    assert all(same(arrays[name], wanted[name]) for name in wanted)


# --- checkpoints as people have them ---


def written(state: dict[str, torch.Tensor], folder: Path) -> Path:
    folder.mkdir()
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in state.items()},
        folder / "model.safetensors",
    )
    return folder


def tuned(folder: Path) -> Path:
    """A folder with the weights of the second net; tied parameters are there once, as transformers writes them."""
    state = net(2).state_dict()
    del state["head.weight"]
    return written(state, folder / "tuned")


def test_a_folder_a_file_a_module_and_a_state_dict_give_the_same(files, tmp_path):
    folder = tuned(tmp_path)
    sources = [folder, folder / "model.safetensors", net(2), net(2).state_dict()]
    expected = stored(files[1])
    for source in sources:
        arrays = stored(htp_export.bind(files[0], source).model)
        assert all(same(arrays[name], expected[name]) for name in expected)


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod.", "base_model.model."])
def test_a_prefix_of_all_names_is_removed_and_said(files, prefix):
    state = {f"{prefix}{name}": tensor for name, tensor in net(2).state_dict().items()}
    bound = htp_export.bind(files[0], state)
    assert any(prefix in note for note in bound.notes)
    expected = stored(files[1])
    assert all(same(array, expected[name]) for name, array in stored(bound.model).items())


def test_names_that_fit_nothing_are_refused_with_the_nearest(files):
    state = {
        name.replace("rnn", "lstm").replace("fc", "mlp"): tensor
        for name, tensor in net(2).state_dict().items()
    }
    with pytest.raises(InputError, match=r"the weights have no '(fc|rnn)\.") as raised:
        htp_export.bind(files[0], state)
    assert "strict=False" in str(raised.value)
    with pytest.raises(InputError, match="has none of the"):
        htp_export.bind(files[0], {"other.weight": torch.zeros(1)})


def test_missing_and_surplus_entries_are_listed(files, tmp_path):
    state = net(2).state_dict()
    del state["fc.bias"]
    state["another.weight"] = torch.zeros(2)
    output = tmp_path / "bound.onnx"
    with pytest.raises(InputError, match=r"no 'fc\.bias'"):
        htp_export.bind(files[0], state, output)
    assert not output.exists()
    bound = htp_export.bind(files[0], state, output, strict=False)
    assert (bound.missing, bound.unexpected) == (("fc.bias",), ("another.weight",))
    assert list(bound.unbound) == ["fc.bias"]
    arrays, old, new = stored(output), stored(files[0]), stored(files[1])
    assert same(arrays["fc.bias"], old["fc.bias"])
    assert same(arrays["out.bias"], new["out.bias"])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_converted_as_load_state_dict_does(files, kind):
    state = {
        name: tensor.to(kind) if tensor.is_floating_point() else tensor
        for name, tensor in net(2).state_dict().items()
    }
    loaded = net(1)
    loaded.load_state_dict(state)
    expected = stored(htp_export.bind(files[0], loaded).model)
    arrays = stored(htp_export.bind(files[0], state).model)
    assert all(same(arrays[name], expected[name]) for name in expected)
    with pytest.raises(InputError, match="the file was exported with FLOAT"):
        htp_export.bind(files[0], state, cast=False)


def test_another_shape_is_refused_with_both(files):
    state = {**net(2).state_dict(), "fc.weight": torch.zeros(65, 32)}
    with pytest.raises(
        InputError,
        match=r"'fc.weight' has shape \[65, 32\], and the file was exported with \[64, 32\]",
    ):
        htp_export.bind(files[0], state)


class Pair(Holding, one=nn.Linear(8, 8, bias=False), two=nn.Linear(8, 8, bias=False)):
    """Two layers with the same weights, which an exporter stores once."""

    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.two.load_state_dict(self.one.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).relu() + self.two(self.inner(x))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_parameters_that_were_equal_have_an_initializer_each_if_they_differ_now(
    exporter, precision, tmp_path
):
    pair, given = Pair(torch.tanh).eval(), torch.randn(2, 8)
    apart = {name: torch.randn(8, 8) for name in pair.state_dict()}
    files = [tmp_path / "equal.onnx", tmp_path / "apart.onnx"]
    for file, state in zip(files, (pair.state_dict(), apart), strict=True):
        pair.load_state_dict(state)
        htp_export.export(pair, (given,), file, dynamo=exporter == "dynamo", verbose=False)
        htp_export.quantize(file, {"**": precision}, file)
    bound = htp_export.bind(files[0], apart, tmp_path / "bound.onnx")
    assert bound.unbound == {}
    assert any("equal at the export" in note for note in bound.notes)
    found, expected = stored(tmp_path / "bound.onnx"), stored(files[1])
    assert sorted(map(np.ndarray.tobytes, found.values())) == sorted(
        map(np.ndarray.tobytes, expected.values())
    )
    outputs = []
    for file in (tmp_path / "bound.onnx", files[1]):
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        outputs += session.run(None, {session.get_inputs()[0].name: given.numpy()})
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("shares", [False, True])
def test_a_graph_with_new_initializers_is_checked_before_it_is_written(
    shares, tmp_path, monkeypatch
):
    """A planted fault: a new initializer has the name of the Identity that TorchScript wrote for it."""
    monkeypatch.setattr(equal_parameters, "separate_names", lambda *_: None)
    pair, file = (
        nn.Sequential(nn.LayerNorm(8), nn.Tanh(), nn.LayerNorm(8)).eval(),
        tmp_path / "pair.onnx",
    )
    htp_export.export(pair, (torch.randn(2, 8),), file, dynamo=False, verbose=False)
    apart = {name: torch.randn(8) for name in pair.state_dict()}
    save_file(apart, tmp_path / "apart.safetensors")
    with pytest.raises(ResultError, match="single static assignment"):
        htp_export.bind(
            file, tmp_path / "apart.safetensors", tmp_path / "bound.onnx", share_weights=shares
        )
    assert not (tmp_path / "bound.onnx").exists()


def test_equal_parameters_that_one_node_reads_for_both_are_named(tmp_path):
    pair, file = Pair(lambda x: x).eval(), tmp_path / "pair.onnx"
    htp_export.export(pair, (torch.randn(2, 8),), file, dynamo=True, verbose=False)
    htp_export.optimize(file, file, level="tolerant")  # both products are one node
    apart = {name: torch.randn(8, 8) for name in pair.state_dict()}
    with pytest.raises(InputError, match="were equal at the export"):
        htp_export.bind(file, apart)
    bound = htp_export.bind(file, apart, strict=False)
    assert set(bound.unbound) == {"one.weight", "two.weight"}
    both = dict.fromkeys(pair.state_dict(), torch.randn(8, 8))
    assert htp_export.bind(file, both).unbound == {}


def without_sums_of_zeros(file: Path, output: Path) -> None:
    """A tool that removes the addition of the first bias, and the tags."""
    model = onnx.load(file)
    [add] = [node for node in model.graph.node if "0.bias" in node.input]
    [kept] = [name for name in add.input if name != "0.bias"]
    model.graph.node.remove(add)
    for node in model.graph.node:
        node.input[:] = [kept if name == add.output[0] else name for name in node.input]
        del node.metadata_props[:]
    [bias] = [tensor for tensor in model.graph.initializer if tensor.name == "0.bias"]
    model.graph.initializer.remove(bias)
    htp_export.carry(file, model, output)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda file, output: htp_export.optimize(file, output, level="tolerant"),
        without_sums_of_zeros,
    ],
    ids=["optimize", "a tool, and carry"],
)
def test_a_bias_that_an_optimiser_removed_because_it_was_zero_is_named(optimizer, tmp_path):
    model = spread(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))).eval()
    nn.init.zeros_(model[0].bias)
    file = tmp_path / "net.onnx"
    htp_export.export(model, (torch.randn(2, 3, 8),), file, dynamo=True, verbose=False)
    optimizer(file, tmp_path / "small.onnx")
    assert "0.bias" not in stored(tmp_path / "small.onnx")
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match=r"'0.bias' was 0 everywhere at the export"):
        htp_export.bind(tmp_path / "small.onnx", state)
    assert "0.bias" in htp_export.bind(tmp_path / "small.onnx", state, strict=False).unbound
    with pytest.raises(InputError, match=r"'0.bias' was 0 everywhere at the export"):
        htp_export.quantize(tmp_path / "small.onnx", {"2": "int4"}, weights=state)
    still_zero = {**state, "0.bias": torch.zeros(8)}
    assert htp_export.bind(tmp_path / "small.onnx", still_zero).unbound == {}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", ["tied_weights", "two_parents"])
def test_a_shared_parameter_is_taken_under_any_of_its_names(name, exporter, shared_files):
    file = shared_files.net(name, exporter)
    model, _ = NETS[name].build()
    state = model.state_dict()
    names = sorted(key for key in state if key.endswith("weight"))
    [(one, other)] = [
        (first, second)
        for first, second in itertools.combinations(names, 2)
        if state[first].data_ptr() == state[second].data_ptr()
    ]
    for weights in (state, without(state, one), without(state, other)):
        bound = htp_export.bind(file, weights)
        assert (bound.missing, bound.unexpected, bound.unbound) == ((), (), {})
    # load_state_dict would keep one of the two, without a word
    with pytest.raises(InputError, match=f"{one}|{other}"):
        htp_export.bind(file, {**state, one: state[one] + 1})


def without(state: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {each: tensor for each, tensor in state.items() if each != name}


class Normalized(nn.Module):
    """A normalization of each channel, whose weight and bias the exporters write as a product and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 32, 3), nn.GroupNorm(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_factors_and_summands_in_a_normalization_are_bound(exporter, tmp_path):
    x = torch.randn(2, 8, 9)
    files = files_of_two(lambda seed: of_seed(Normalized, seed, 0.1), x, exporter, tmp_path)
    made = [htp_export.optimize(file, level="tolerant").model for file in files]
    types = [node.op_type for node in made[0].graph]
    assert "InstanceNormalization" in types
    assert "Add" not in types
    bound = htp_export.bind(made[0], of_seed(Normalized, 2, 0.1))
    found, expected = stored(bound.model), stored(made[1])
    assert all(same(found[name], expected[name]) for name in expected)
    assert bound.tensors == 4


class Pooled(nn.Module):
    """An attention of a repeated query: its joined weight is split in two parts of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 32))
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(self.query.repeat(x.shape[0], 1, 1), x, x)[0]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_repeated_query_and_a_weight_of_three_projections_are_bound(exporter, tmp_path):
    first, second = files_of_two(
        lambda seed: of_seed(Pooled, seed, 0.1), torch.randn(2, 5, 32), exporter, tmp_path
    )
    bound = htp_export.bind(first, of_seed(Pooled, 2, 0.1))
    found, expected = stored(bound.model), stored(second)
    assert all(same(found[name], expected[name]) for name in expected)
    assert bound.tensors > 4


@pytest.mark.parametrize("entry", ["table.weight", "head.weight"])
def test_a_parameter_of_two_modules_with_two_values_is_named(files, entry):
    """``load_state_dict`` loads both into one parameter: the last one wins, whatever the other is."""
    state = net(2).state_dict()
    once = {name: tensor for name, tensor in state.items() if name != entry}
    assert htp_export.bind(files[0], once).unbound == {}
    for other in (1.5 * state[entry], state[entry].T.contiguous()):
        with pytest.raises(InputError, match=r"weight' (differs from|has shape)"):
            htp_export.bind(files[0], {**state, entry: other})


@pytest.mark.parametrize("change", ["dropped", "swapped", "transposed", "scaled"])
def test_no_change_of_a_checkpoint_is_silent(files, change):
    """The tensors that a change touches are other than before, or named; all others are as before."""
    state = net(2).state_dict()
    if change == "dropped":
        del state["out.weight"]
    elif change == "swapped":
        state["rnn.weight_ih_l0"], state["rnn.weight_hh_l0"] = (
            state["rnn.weight_hh_l0"],
            state["rnn.weight_ih_l0"],
        )
    elif change == "transposed":
        state["out.weight"] = state["out.weight"].T.contiguous()
    else:
        state["out.weight"] = state["out.weight"] * 2
    bound = htp_export.bind(files[0], state, strict=False)
    arrays, expected = stored(bound.model), stored(files[1])
    touched = {"out.weight"} if change != "swapped" else {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}
    different = {name for name in expected if not same(arrays[name], expected[name])}
    assert different
    for name in different:
        assert set(htp_export.bind(files[0], net(2)).map("tensorrt")[name]) & touched
    if change in ("dropped", "transposed"):
        assert "out.weight" in bound.unbound


def test_pickles_and_files_outside_of_the_folder_are_refused(files, tmp_path):
    torch.save(net(2).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(FileError, match="pickle"):
        htp_export.bind(files[0], tmp_path / "weights.pt")
    index = {"weight_map": {"fc.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(FileError, match="outside"):
        htp_export.bind(files[0], tmp_path / "model.safetensors.index.json")
    with pytest.raises(InputError, match="weights are a state_dict"):
        htp_export.bind(files[0], 3)


# --- results, maps, adapters, check, command ---


def test_arrays_run_in_a_session_of_the_old_file(files):
    """The arrays are what ONNX Runtime takes in place of the initializers of a file."""
    bound = htp_export.bind(files[0], net(2))
    session = onnxruntime.InferenceSession(bound.model and _written(bound))
    [name] = [each.name for each in session.get_inputs()]
    with torch.no_grad():
        expected = net(2)(TOKENS).numpy()
    np.testing.assert_allclose(session.run(None, {name: TOKENS.numpy()})[0], expected, atol=1e-5)
    assert set(bound.arrays) == set(bound.recipes)
    assert len(bound.arrays) == bound.tensors


def _written(bound: Any) -> bytes:
    import onnx_ir as ir

    return ir.to_proto(bound.model).SerializeToString()


def test_maps_name_entries(files):
    bound = htp_export.bind(files[0], net(2))
    assert bound.map("safetensors")["fc.bias"] == "fc.bias"
    assert bound.map("tensorrt")["fc.bias"] == ["fc.bias"]
    assert bound.map() == dict(bound.recipes)
    with pytest.raises(InputError, match="there is no map 'openvino'; there are recipes, tensorrt"):
        bound.map("openvino")


def test_updatable_tensors_of_qualcomm_are_those_that_an_adapter_changes(files, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["fc"], init_lora_weights=False)
    peft.get_peft_model(net(2), config).save_pretrained(tmp_path / "lora")
    bound = htp_export.bind(files[0], net(2), adapters={str(tmp_path / "lora"): 1.0})
    [name] = bound.map("qti")["lora_weight_list"]
    assert bound.recipes[name] in ("fc.weight", ["transpose", "fc.weight", [1, 0]])
    # as qairt-lora-importer puts them in: keys are names of initializers, shapes are theirs
    assert bound.arrays[name].shape == stored(files[0])[name].shape
    everything = htp_export.bind(files[0], net(2))
    assert set(everything.map("qti")["lora_weight_list"]) == set(everything.arrays)


# --- initializers that sessions share ---


@pytest.fixture(scope="module")
def encoder_and_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of one net in one folder, with their weights in data files: the whole net, and a part of it."""
    folder = tmp_path_factory.mktemp("shared")
    for name, model in (("whole", net(1)), ("encoder", net(1))):
        file = folder / f"{name}.onnx"
        htp_export.export(model, (TOKENS,), file, dynamo=True, verbose=False, external_data=True)
    htp_export.extract(folder / "whole.onnx", "rnn", folder / "encoder.onnx")
    return folder


def test_shared_initializers_are_places_of_the_data_file(encoder_and_whole, tmp_path):
    weights = net(2)
    bound, other = (
        htp_export.bind(encoder_and_whole / f"{name}.onnx", weights, tmp_path / f"{name}.onnx")
        for name in ("whole", "encoder")
    )
    entries = bound.map("genai")["shared_initializers"]
    assert entries
    for each in entries:
        content = (tmp_path / each["data_file"]).read_bytes()
        start, length = int(each["offset"]), int(each["length"])
        array = bound.arrays[each["name"]]
        assert content[start : start + length] == array.tobytes()
        assert each["shape"] == list(array.shape)
        assert each["data_type"] == onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    shared = bound.map("genai", other)["shared_initializers"]
    assert {each["name"] for each in shared} == set(other.recipes) & {
        each["name"] for each in entries
    }
    assert shared
    with pytest.raises(InputError, match="different weights"):
        bound.map("genai", htp_export.bind(encoder_and_whole / "encoder.onnx", net(2)))
    with pytest.raises(InputError, match="give bind an output"):
        htp_export.bind(encoder_and_whole / "whole.onnx", weights).map("genai")


def test_a_session_of_onnxruntime_takes_shared_initializers(encoder_and_whole, tmp_path):
    """ONNX Runtime GenAI gives each entry to its sessions as an external initializer of this name."""
    weights = net(2)
    bound = htp_export.bind(encoder_and_whole / "whole.onnx", weights, tmp_path / "whole.onnx")
    options, held = onnxruntime.SessionOptions(), []
    names, values = [], []
    for each in bound.map("genai")["shared_initializers"]:
        data = np.fromfile(
            tmp_path / each["data_file"],
            onnx.helper.tensor_dtype_to_np_dtype(each["data_type"]),
            int(np.prod(each["shape"])),
            offset=int(each["offset"]),
        )
        held.append(data.reshape(each["shape"]))
        names.append(each["name"])
        values.append(onnxruntime.OrtValue.ortvalue_from_numpy(held[-1]))
    options.add_external_initializers(names, values)
    # the ONNX file alone: its data file is not read
    (tmp_path / "alone").mkdir()
    alone = shutil.copy(tmp_path / "whole.onnx", tmp_path / "alone")
    session = onnxruntime.InferenceSession(alone, options)
    [name] = [each.name for each in session.get_inputs()]
    with torch.no_grad():
        expected = weights(TOKENS).numpy()
    found = session.run(None, {name: TOKENS.numpy()})[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_genai_reads_the_entries(encoder_and_whole, tmp_path):
    genai = pytest.importorskip("onnxruntime_genai")
    weights = net(2)
    bound = htp_export.bind(encoder_and_whole / "whole.onnx", weights, tmp_path / "whole.onnx")
    decoder = {"filename": "whole.onnx", **bound.map("genai")}
    config = {"type": "decoder", "vocab_size": 40, "context_length": 16, "decoder": decoder}
    (tmp_path / "genai_config.json").write_text(
        json.dumps({"model": config, "search": {}}), encoding="utf-8"
    )
    genai.Config(str(tmp_path))
    decoder["shared_initializers"][0]["data_file_"] = "x"
    (tmp_path / "genai_config.json").write_text(
        json.dumps({"model": config, "search": {}}), encoding="utf-8"
    )
    with pytest.raises(Exception, match="data_file_"):
        genai.Config(str(tmp_path))


def test_check_finds_a_module_that_differs(files):
    htp_export.bind(files[0], net(2), check=(TOKENS,))
    with pytest.raises(InputError, match=r"give an nn\.Module"):
        htp_export.bind(files[0], net(2).state_dict(), check=(TOKENS,))


def test_an_adapter_is_added_in_part_as_peft_merges_it(files, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["fc"], init_lora_weights=False)
    torch.manual_seed(5)
    adapted = peft.get_peft_model(net(2), config)
    adapted.save_pretrained(tmp_path / "lora")
    bound = htp_export.bind(files[0], net(2), adapters={str(tmp_path / "lora"): 0.5})
    delta = adapted.base_model.model.fc.get_delta_weight("default").detach()
    expected = {**net(2).state_dict(), "fc.weight": net(2).fc.weight.detach() + 0.5 * delta}
    wanted = stored(htp_export.bind(files[0], expected).model)
    for name, array in stored(bound.model).items():
        np.testing.assert_allclose(array, wanted[name], atol=1e-6)
    assert any("0.5 times" in note for note in bound.notes)


def test_an_adapter_of_other_sizes_is_refused(files, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["fc"], init_lora_weights=False)
    # numpy would add its product, of one row, to each row of the weight
    other = nn.Sequential()
    other.add_module("fc", nn.Linear(32, 1))
    peft.get_peft_model(other, config).save_pretrained(tmp_path / "lora")
    with pytest.raises(InputError, match="module 'fc' maps 32 numbers to 1"):
        htp_export.bind(files[0], net(2), adapters={str(tmp_path / "lora"): 1.0})


def test_command(files, tmp_path, capsys):
    folder = tuned(tmp_path)
    output = tmp_path / "new.onnx"
    assert main(["bind", str(files[0]), str(folder), "-o", str(output)]) == 0
    assert "computed from the new weights" in capsys.readouterr().out
    expected = stored(files[1])
    assert all(same(array, expected[name]) for name, array in stored(output).items())
    assert (
        main(["bind", str(files[0]), str(folder), "-o", str(output), "--map", "safetensors"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["fc.bias"] == "fc.bias"
    before = output.read_bytes()
    assert (
        main(["bind", str(files[0]), str(tmp_path / "nowhere.safetensors"), "-o", str(output)]) == 2
    )
    assert main(["bind", str(files[0]), str(folder), "-o", str(output), "--adapter", "x=y"]) == 2
    assert output.read_bytes() == before


def test_a_pipeline_binds(files, tmp_path):
    folder = tuned(tmp_path)
    done = htp_export.pipeline(
        [{"bind": {"weights": str(folder)}}, {"quantize": {"plan": "fp16"}}],
        files[0],
        tmp_path / "out.onnx",
    )
    assert done.ok
    htp_export.quantize(files[1], "fp16", tmp_path / "expected.onnx")
    expected = stored(tmp_path / "expected.onnx")
    assert all(same(array, expected[name]) for name, array in stored(tmp_path / "out.onnx").items())
