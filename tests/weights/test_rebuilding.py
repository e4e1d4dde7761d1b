"""Recipes of initializers: made of the parameters once more, each is what the file has, also of other parameters."""

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from htp_export import tools
from htp_export.errors import InputError, RuleError
from htp_export.format.recipes import (
    is_exact,
    parameters_in,
    recipe_from_text,
    recipe_to_text,
    step,
)
from htp_export.model.recipes import recipe_of, recorded
from htp_export.model.tagged import load
from htp_export.weights.rebuilding import Rebuilt, rebuilt
from tests.exporting import every, exported_once
from tests.nets import composed, spread, x


def convolve(self: Any, images: torch.Tensor) -> Any:
    images = self.stem(images)
    images = self.norm(self.up(torch.relu(images + self.block(images))))
    return self.last(self.head(images.mean((2, 3))))


def residual() -> nn.Module:
    """Convolutions of each kind with a normalisation after them."""
    return composed(
        convolve,
        stem=nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        ),
        block=nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8)),
        up=nn.ConvTranspose2d(8, 4, 2, 2),
        norm=nn.BatchNorm2d(4),
        head=nn.Linear(4, 5),
        last=nn.BatchNorm1d(5),
    )


def recurrent() -> nn.Module:
    """Gates in another order, two directions beside each other."""
    lstm = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)
    return composed(
        lambda self, sequence: self.head(self.lstm(sequence)[0]), lstm=lstm, head=nn.Linear(16, 3)
    )


def positions() -> nn.Module:
    """Positions are added with the channels last: ONNX Runtime transposes them, and keeps the name of the tensor."""
    return composed(
        lambda self, images: self.out(
            (self.patch(images).permute(0, 2, 3, 1) + self.pos).permute(0, 3, 1, 2)
        ),
        patch=nn.Conv2d(3, 8, 2, 2),
        pos=nn.Parameter(torch.randn(1, 4, 4, 8)),
        out=nn.Conv2d(8, 4, 1),
    )


def language(name: str, **sizes: int) -> nn.Module:
    """A transformer that returns its last hidden state; the mask is folded."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(vocab_size=100, **sizes)
    config.use_cache = False
    return composed(
        lambda self, ids: self.model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state,
        model=getattr(transformers, f"{name}Model")(config),
    )


_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def _ids() -> dict[str, torch.Tensor]:
    return {"ids": torch.arange(16).reshape(2, 8) % 13}


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "layers": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)),
        lambda: {"input": x(2, 7, 64)},
    ),
    "residual": (residual, lambda: {"images": x(2, 3, 8, 8)}),
    "recurrent": (recurrent, lambda: {"sequence": x(2, 5, 6)}),
    "positions": (positions, lambda: {"images": x(1, 3, 8, 8)}),
    "bert": (lambda: language("Bert", max_position_embeddings=32, **_BERT), _ids),
    "gpt2": (lambda: language("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=32), _ids),
    "llama": (
        lambda: language("Llama", num_key_value_heads=2, max_position_embeddings=32, **_BERT),
        _ids,
    ),
}


@dataclass
class Exported:
    """A file, the model that it was made of, and an input."""

    model: nn.Module
    sample: torch.Tensor
    file: Path


def exported(name: str, folder: Path, *, dynamo: bool) -> Exported:
    make, inputs = NETS[name]
    model, file = exported_once(make, inputs, "dynamo" if dynamo else "torchscript", folder)
    [sample] = inputs().values()
    return Exported(model, sample, file)


DESCENDANTS: dict[str, Callable[[Path, Path], object]] = {
    "export": lambda file, out: load(file).save(out),
    "exact": lambda file, out: htp_export.optimize(file, out, level="exact"),
    "tolerant": lambda file, out: htp_export.optimize(file, out, level="tolerant"),
    "fused": lambda file, out: htp_export.optimize(file, out, level="fused"),
    "functions": lambda file, out: htp_export.functions(file, "*", out),
    "fp16": lambda file, out: htp_export.quantize(file, "fp16", output=out),
    "int8-weights": lambda file, out: htp_export.quantize(file, {".": "int8-weights"}, output=out),
    "int4": lambda file, out: htp_export.quantize(file, {".": "int4"}, output=out),
    "prune": lambda file, out: htp_export.prune(file, {".": 0.5}, output=out),
    "onnxruntime basic": lambda file, out: tools.onnxruntime(file, out, level="basic"),
    "onnxruntime extended": lambda file, out: tools.onnxruntime(file, out, level="extended"),
    "onnxslim": lambda file, out: tools.onnxslim(file, out),
}

CLOSE = {"fp16": 0.1, "int8-weights": 0.05, "prune": np.inf, "int4": np.inf}
"""How far the results may be from PyTorch's; pruned weights and 4 bits are far from it."""


def wrong(made: Rebuilt) -> Iterator[str]:
    """The tensors that are not what the file has, bit by bit."""
    for value, tensor in made.tensors.items():
        assert value.const_value is not None
        if tensor.numpy().tobytes() != value.const_value.numpy().tobytes():
            yield f"{value.name}: {recipe_of(value)}"


def run_of(file: Path, sample: torch.Tensor) -> Any:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: sample.numpy()})[0]


def check(of: Exported, descendant: str) -> Rebuilt:
    """Make the weights of a descendant once more, of the same parameters and of others; what was made of the same."""
    out = of.file.with_name("made.onnx")
    DESCENDANTS[descendant](of.file, out)
    tagged = load(out)
    same = rebuilt(tagged, of.model.state_dict())
    assert not list(wrong(same))
    if not same.unknown:
        # other buffers are constants
        of.model.load_state_dict(spread(copy.deepcopy(of.model), seed=5).state_dict())
        for value, tensor in rebuilt(tagged, of.model.state_dict()).tensors.items():
            value.const_value = tensor
        bound = of.file.with_name("bound.onnx")
        tagged.save(bound)
        wanted = of.model(of.sample).detach().numpy()
        assert (
            np.abs(run_of(bound, of.sample) - wanted).max()
            < CLOSE.get(descendant, 1e-4) * np.abs(wanted).max()
        )
        assert np.abs(run_of(out, of.sample) - wanted).max() > 1e-2  # the parameters are others
    return same


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dynamo"),
    every(2, itertools.product(["layers", "residual", "recurrent"], [True, False])),
)
def test_the_weights_of_an_export_are_made_of_other_parameters(name, dynamo, tmp_path):
    made = check(exported(name, tmp_path, dynamo=dynamo), "export")
    assert made.tensors
    assert not made.unknown


@pytest.mark.parametrize(
    "descendant", ["tolerant", "functions", "fp16", "int4", "prune", "onnxruntime basic"]
)
def test_the_weights_of_descendants_are_made_of_other_parameters(descendant, tmp_path):
    made = check(exported("layers", tmp_path, dynamo=True), descendant)
    assert made.tensors
    assert not made.unknown


def test_convolutions_are_folded_and_carried_by_name_only_if_their_contents_are_the_same(tmp_path):
    of = exported("residual", tmp_path, dynamo=False)
    check(of, "tolerant")
    check(exported("residual", tmp_path, dynamo=True), "onnxruntime extended")


@pytest.mark.slow
@pytest.mark.parametrize("descendant", DESCENDANTS)
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_the_weights_of_all_descendants(name, dynamo, descendant, tmp_path):
    try:
        made = check(exported(name, tmp_path, dynamo=dynamo), descendant)
    except RuleError as nothing:
        pytest.skip(f"the net has no operators for it: {nothing}")
    covered, missing = (_bytes_of(values) for values in (made.tensors, made.unknown))
    assert covered > missing
    print(
        name,
        "dynamo" if dynamo else "script",
        descendant,
        len(made.tensors),
        covered,
        len(made.unknown),
        missing,
    )


def _bytes_of(values: Iterable[ir.Value]) -> int:
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def test_renamed_weights_and_those_of_a_part_are_known_by_their_parameters(tmp_path):
    of = exported("residual", tmp_path, dynamo=True)
    for make in (
        lambda out: htp_export.rename(of.file, output=out),
        lambda out: htp_export.extract(of.file, "block", out),
    ):
        make(out := tmp_path / "other.onnx")
        made = rebuilt(load(out), of.model.state_dict())
        assert made.tensors
        assert not made.unknown
        assert not list(wrong(made))


def test_weights_that_were_equal_are_refused_once_they_differ():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)).eval()
    program = htp_export.export(net, (x(2, 4),), verbose=False)
    assert program is not None
    assert not list(wrong(rebuilt(load(program), net.state_dict())))
    made = rebuilt(load(program), spread(net).state_dict())
    [why] = {why for value, why in made.unknown.items() if value.name == "1.weight"}
    assert re.match(r"'1.weight' and '3.weight' were equal at the export .* differ now", why)


def test_what_was_not_made_of_parameters_alone_is_said(tmp_path):
    of = exported("layers", tmp_path, dynamo=True)
    model = ir.load(of.file)
    value = model.graph.initializers["2.weight"]
    value.const_value = ir.Tensor(value.const_value.numpy() + 1, name=value.name)  # type: ignore[union-attr]
    carried = htp_export.carry(of.file, model)
    unknown = rebuilt(carried.tagged, of.model.state_dict()).unknown
    [(value, why)] = unknown.items()
    assert value.name == "2.weight"
    assert why.endswith("in a way that cannot be repeated: another tool")
    assert not is_exact(recipe_of(next(iter(unknown))))


def test_a_weight_that_a_tool_transposed_is_that_of_its_parameter(tmp_path):
    of = exported("positions", tmp_path, dynamo=True)
    made = tools.onnxruntime(of.file, level="basic").model
    assert list(made.graph.initializers["pos"].const_value.shape) == [1, 8, 4, 4]
    for recipe in (recipe_of(made.graph.initializers["pos"]), ["computed", "pos", "Sign"]):
        value = made.graph.initializers["pos"]
        value.const_value = recorded(value.const_value, recipe)
        verified = htp_export.verify(of.model, made, (of.sample,))
        assert verified.ok, verified.summary
    assert not check(of, "onnxruntime basic").unknown


def test_carry_reads_no_weights_that_lie_in_the_same_place(tmp_path):
    of = exported("layers", tmp_path, dynamo=True)
    load(of.file).save(again := tmp_path / "again.onnx")
    first, second, other = (load(file).model for file in (of.file, of.file, again))
    for file in tmp_path.glob("*.data"):
        file.unlink()
    assert not rebuilt(htp_export.carry(first, second).tagged, of.model.state_dict()).unknown
    unknown = rebuilt(htp_export.carry(first, other).tagged, of.model.state_dict()).unknown
    assert all(why.endswith(": another tool") for why in unknown.values())


def test_zeros_that_a_tool_made_are_not_taken_for_the_zeros_of_another_parameter(tmp_path):
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 8)
    ).eval()
    nn.init.zeros_(net[3].bias)
    of = Exported(net, x(1, 3, 1, 1), tmp_path / "net.onnx")
    htp_export.export(
        net, (of.sample,), of.file, dynamo=False, do_constant_folding=False, verbose=False
    )
    made = check(of, "onnxruntime basic")
    assert [why.rpartition(": ")[2] for why in made.unknown.values()] == ["another tool"] * 2


BAD = {
    '["run","0.weight"]': "there is no step 'run'",
    '["transpose","0.weight"]': "step 'transpose' has invalid operands or settings",
    '["transpose","0.weight","all"]': "step 'transpose' has invalid operands or settings",
    '["concat"]': "step 'concat' has invalid operands or settings",
    '["add","0.weight",true]': "there is no step True",
    "[": "it is not JSON",
    "[" * 20000: "20,000 characters|not JSON",
    '["neg",' * 60 + '"0.weight"' + "]" * 60: "more than 40 steps",
    json.dumps(["cast", "0.weight", "float12"]): "does not fit",
    json.dumps(["reshape", "0.weight", [3]]): "does not fit",
    json.dumps(["slice", "0.weight", [7, 0, 1, 1]]): "out of range",
    json.dumps(["expand", "0.weight", [1 << 40, 64, 64]]): "makes .* elements",
    json.dumps(["concat", "0.weight", "0.weight", 0]): r"make a tensor of float32 \[128, 64\]",
}


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("as_message", [False, True])
def test_recipes_stay_and_are_written_once_however_often_a_file_is(external, as_message, tmp_path):
    """onnx_ir would write those of a tensor once more each time."""
    file = exported("layers", tmp_path, dynamo=False).file
    texts = _texts(file)
    for again in (tmp_path / "again.onnx", tmp_path / "again2.onnx"):
        load(onnx.load(file) if as_message else file).save(again, external_data=external)
        file = again
        assert _texts(file) == texts
    assert texts


def _texts(file: Path) -> list[tuple[str, str, str]]:
    tensors = onnx.load(file, load_external_data=False).graph.initializer
    return sorted(
        (tensor.name, entry.key, entry.value)
        for tensor in tensors
        for entry in tensor.metadata_props
    )


@pytest.mark.parametrize("text", BAD)
def test_a_recipe_that_is_none_names_its_initializer(text, tmp_path):
    of = exported("layers", tmp_path, dynamo=True)
    tagged = load(of.file)
    value = tagged.model.graph.initializers["2.weight"]
    assert value.const_value is not None
    value.const_value = recorded(value.const_value, "")
    value.const_value.metadata_props["htp.recipe"] = text
    with pytest.raises(InputError, match=f"initializer '2.weight'.*({BAD[text]})"):
        rebuilt(tagged, of.model.state_dict()).tensors[value].numpy()


@pytest.mark.parametrize("dynamo", [True, False])
def test_numbers_in_operators_of_torch_are_constants_and_no_parameters(dynamo, tmp_path):
    """torchlib translates ``hardtanh`` to a function, whose limits become initializers when it is inlined."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU6(), nn.Linear(4, 4), nn.Hardtanh(-1.0, 2.0)).eval()
    htp_export.export(net, (x(2, 4),), tmp_path / "net.onnx", dynamo=dynamo, verbose=False)
    made = rebuilt(load(tmp_path / "net.onnx"), spread(net).state_dict())
    assert not made.unknown
    assert len(made.tensors) == 4
    bound = htp_export.bind(tmp_path / "net.onnx", net)
    assert bound.missing == ()


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_part_of_a_table_of_positions_is_made_of_the_parameter(dynamo, tmp_path):
    """TorchScript computes the starts and ends of slices by operators on numbers."""
    net = composed(
        lambda self, tokens: self.out(
            tokens
            + torch.cat((self.pos[:, :1], self.pos[:, 1:].reshape(1, 2, 2, 4).flatten(1, 2)), 1)
        ),
        pos=nn.Parameter(torch.randn(1, 5, 4)),
        out=nn.Linear(4, 4),
    )
    of = Exported(spread(net).eval(), x(1, 5, 4), tmp_path / "net.onnx")
    htp_export.export(net, (of.sample,), of.file, dynamo=dynamo, verbose=False)
    assert not check(of, "export").unknown


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_factor_that_a_tool_moved_into_a_layer_is_a_product_of_parameters(dynamo, tmp_path):
    """OnnxSlim multiplies weight and bias with the factor after a layer: a parameter, or a number."""
    net = composed(
        lambda self, images: self.second(self.first(images) * self.gain) * 0.25,
        first=nn.Linear(8, 8),
        gain=nn.Parameter(torch.ones(8)),
        second=nn.Linear(8, 4),
    )
    of = Exported(spread(net).eval(), x(2, 8), tmp_path / "net.onnx")
    htp_export.export(net, (of.sample,), of.file, dynamo=dynamo, verbose=False)
    made = check(of, "onnxslim")
    assert not made.unknown
    assert "gain" in {name for value in made.tensors for name in parameters_in(recipe_of(value))}


def test_an_exponential_that_torch_folds_is_computed_as_torch_folds_it(tmp_path):
    """CLIP's scale of logits, Mamba's decay: the dynamo exporter folds them with numpy."""
    net = composed(
        lambda self, tokens: self.out(tokens) * self.scale.exp() - self.decay.float().exp(),
        out=nn.Linear(4, 64),
        scale=nn.Parameter(torch.tensor(2.6592)),
        decay=nn.Parameter(torch.randn(64)),
    )
    of = Exported(spread(net).eval(), x(2, 4), tmp_path / "net.onnx")
    htp_export.export(net, (of.sample,), of.file, dynamo=True, verbose=False)
    made = check(of, "export")
    assert not made.unknown
    assert {"scale", "decay"} <= {
        name for value in made.tensors for name in parameters_in(recipe_of(value))
    }


def test_a_recipe_of_more_equal_tensors_than_a_reader_accepts_only_names_some():
    """1,000 equal weights were merged into a file that nothing of ours could read."""
    recipe = step("equal", *(f"layers.{number}.weight" for number in range(1000)))
    assert recipe[0] == "computed"
    assert recipe_from_text(recipe_to_text(recipe)) == recipe
