"""Containers of other libraries as inputs and outputs of a model, such as the key-value caches of transformers."""

import copy
import subprocess
import sys
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.utils import _pytree

import htp_export
from htp_export.errors import InputError
from htp_export.exporter.export_arguments import advice_on_caches, prepare_caches
from htp_export.format.leaves import named_tensors_in
from tests.exporting import exported
from tests.nets import Holding, spread, x
from tests.truth import owners_of, untagged

pytest.importorskip(
    "transformers.exporters", reason="transformers older than 5.23 registers no caches"
)


class Box:
    """A container that computes while torch builds it again, as the caches of transformers do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = torch.cat([torch.tensor([]), tensor])


_pytree.register_pytree_node(
    Box,
    lambda box: ([box.tensor], None),
    lambda tensors, _: Box(*tensors),
    serialized_type_name="tests.Box",
    flatten_with_keys_fn=lambda box: ([(_pytree.GetAttrKey("tensor"), box.tensor)], None),
)


class Fills(Holding, fc=nn.Linear(4, 4)):
    """Takes a container and returns another one."""

    def forward(self, x: torch.Tensor, box: Box) -> tuple[torch.Tensor, Box]:
        y = self.fc(x)
        return y + box.tensor, Box(y.tanh())


def test_a_container_that_computes_while_it_is_built_again_can_be_taken_and_returned(tmp_path):
    model, kwargs = spread(Fills()).eval(), {"x": x(2, 4), "box": Box(x(2, 4, seed=3))}
    file = exported(model, kwargs, "dynamo", tmp_path)
    assert {node.op_type: owners_of(node) for node in file.graph.node} == {
        "Gemm": ("fc",),
        "Add": ("",),
        "Tanh": ("",),
    }
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = dict(
        zip([given.name for given in session.get_inputs()], [x(2, 4), x(2, 4, seed=3)], strict=True)
    )
    wanted, box = model(**kwargs)
    found = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    for one, other in zip(found, (wanted, box.tensor), strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-5)


def llama(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlamaConfig(
        **size, num_hidden_layers=layers, num_key_value_heads=1, bos_token_id=0, eos_token_id=1
    )
    return spread(LlamaForCausalLM(config)).eval()


def with_cache(model: Any) -> dict[str, Any]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        cache.update(x(2, 1, 3, 8, seed=layer), x(2, 1, 3, 8, seed=layer + 9), layer)
    ids = torch.arange(4).reshape(2, 2)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(2, 5, dtype=torch.long),
        "past_key_values": cache,
    }


class Attends(
    Holding,
    config=llama(1).config,
    tokens=nn.Embedding(32, 16),
    heads=nn.Linear(16, 24),
    head=nn.Linear(8, 32),
):
    """An attention that adds to a cache, as the decoders of transformers do."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past_key_values: Any
    ) -> Any:
        query, key, value = self.heads(self.tokens(input_ids))[:, None].chunk(3, -1)
        keys, values = past_key_values.update(key, value, 0)
        scores = (query @ keys.mT).masked_fill(attention_mask[:, None, None] == 0, -1e9)
        return self.head(scores.softmax(-1) @ values), past_key_values


ENTRY = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}


# What torch.export and transformers do there warns their own developers.
@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_a_decoder_exports_with_a_cache_and_one_entry_for_its_dynamic_shapes(tmp_path):
    model, both = spread(Attends()).eval(), dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    shapes = {"input_ids": both, "attention_mask": both, "past_key_values": ENTRY}
    file = exported(model, with_cache(model), "dynamo", tmp_path, dynamic_shapes=shapes)
    assert untagged(file) == []
    sizes = {
        given.name: [dim.dim_param or dim.dim_value for dim in given.type.tensor_type.shape.dim]
        for given in file.graph.input
    }
    caches = [name for name in sizes if name.startswith("past_key_values")]
    assert len(caches) == 2
    for name in caches:
        assert [type(size) for size in sizes[name]] == [str, int, str, int]
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    given = with_cache(model)
    layer = given["past_key_values"].layers[0]
    feeds = dict(
        zip(
            sizes,
            [given["input_ids"], given["attention_mask"], layer.keys, layer.values],
            strict=True,
        )
    )
    found = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    with torch.no_grad():
        wanted, cache = model(**with_cache(model))
    for one, other in zip(
        found, (wanted, cache.layers[0].keys, cache.layers[0].values), strict=True
    ):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        ENTRY,
        [(ENTRY, ENTRY)] * 3,
        [ENTRY] * 6,
        [[ENTRY] * 3, [ENTRY] * 3],
        {"key_cache": [ENTRY] * 3, "value_cache": [ENTRY] * 3},
    ],
    ids=["one", "pairs", "flat", "keys_then_values", "named"],
)
def test_dynamic_shapes_of_a_cache_are_taken_in_every_usual_form(spec):
    kwargs = with_cache(llama(3))
    given = prepare_caches((), kwargs, {"input_ids": {0: 1}, "past_key_values": spec})
    assert given == {"input_ids": {0: 1}, "past_key_values": [ENTRY] * 6}


def test_keys_and_values_keep_their_own_dynamic_shapes():
    kwargs, key, value = with_cache(llama(3)), {2: "keys"}, {2: "values"}
    for spec in ([(key, value)] * 3, [[key] * 3, [value] * 3]):
        assert prepare_caches((), kwargs, {"past_key_values": spec}) == {
            "past_key_values": [key, value] * 3
        }


def test_a_cache_with_tensors_is_refused_under_torchscript(tmp_path):
    model = llama(1)
    with pytest.raises(InputError, match="takes no DynamicCache as an input; use dynamo=True"):
        exported(model, with_cache(model), "torchscript", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_a_cache_have_the_same_names_however_it_is_registered(monkeypatch):
    from torch.utils._pytree import SUPPORTED_NODES, NodeDef
    from transformers import DynamicCache
    from transformers.integrations.executorch import (
        _flatten_cache_dict,
        _get_cache_dict,
        _unflatten_dynamic_cache,
    )

    def flattened(cache: Any) -> Any:  # as of executorch's registration: all keys, then all values
        return _flatten_cache_dict(_get_cache_dict(cache), [None, None])

    node = NodeDef(DynamicCache, flattened, _unflatten_dynamic_cache, None)
    monkeypatch.setitem(SUPPORTED_NODES, DynamicCache, node)
    cache = with_cache(llama(2))["past_key_values"]
    order = [(layer, kind) for kind in ("keys", "values") for layer in range(2)]
    found = dict(named_tensors_in({"past_key_values": cache}))
    assert list(found) == [f"past_key_values.layers.{layer}.{kind}" for layer, kind in order]
    for layer, kind in order:
        assert found[f"past_key_values.layers.{layer}.{kind}"] is getattr(cache.layers[layer], kind)


FIRST = """
from transformers.integrations.executorch import register_dynamic_cache_export_support
register_dynamic_cache_export_support()
import htp_export
from htp_export.huggingface import example_call
from tests.decoders import decoder
model = decoder("mistral")
call = example_call(model)
with call.exporting():
    program = htp_export.export(model, verbose=False, **call.options)
assert [value.name for value in program.model.graph.inputs] == list(call.input_names)
for kwargs in call.runs.values():
    assert htp_export.verify(model, program, kwargs=kwargs).ok
"""


@pytest.mark.slow
def test_a_decoder_with_a_window_exports_by_task_if_executorch_registered_the_cache_first():
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_error_names_a_cache_whose_window_fixes_its_length_and_what_to_do():
    from transformers import DynamicCache, MistralConfig

    windows = DynamicCache(config=MistralConfig(num_hidden_layers=1, sliding_window=3))
    for cache, notes in ((windows, 1), (DynamicCache(), 0)):
        with pytest.raises(RuntimeError) as caught, advice_on_caches((), {"caches": [cache]}):
            raise RuntimeError("of torch")
        found = getattr(caught.value, "__notes__", [])
        assert len(found) == notes
        for note in found:
            assert "layers of the DynamicCache are DynamicSlidingWindowLayers" in note
            assert note.endswith(
                "Pass a DynamicCache() without a config, which keeps all tokens; the mask applies the window"
            )


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_a_static_cache_which_the_model_fills_in_place_exports_and_agrees(tmp_path):
    from transformers import StaticCache

    model = llama(1)
    cache = StaticCache(config=model.config, max_cache_len=8)
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        model(input_ids=ids[:, :3], past_key_values=cache)
    kwargs = {
        "input_ids": ids[:, 3:],
        "position_ids": torch.tensor([[3, 4]] * 2),
        "past_key_values": cache,
    }
    assert untagged(exported(model, copy.deepcopy(kwargs), "dynamo", tmp_path)) == []
    result = htp_export.verify(model, tmp_path / "model.onnx", kwargs=kwargs)
    assert result.ok, result.summary
