"""Containers of other libraries as inputs and outputs of a model, such as the key-value caches of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import nn
from torch.utils import _pytree

from tests.exporting import exported
from tests.nets import spread, x
from tests.truth import owners_of


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


class Fills(nn.Module):
    """Takes a container and returns another one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, box: Box) -> tuple[torch.Tensor, Box]:
        y = self.fc(x)
        return y + box.tensor, Box(y.tanh())


def test_a_container_that_computes_while_it_is_built_again_can_be_taken_and_returned(tmp_path: Path) -> None:
    model, kwargs = spread(Fills()).eval(), {"x": x(2, 4), "box": Box(x(2, 4, seed=3))}
    file = exported(model, kwargs, "dynamo", tmp_path)
    assert {node.op_type: owners_of(node) for node in file.graph.node} == {
        "Gemm": ("fc",),
        "Add": ("",),
        "Tanh": ("",),
    }
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = dict(zip([given.name for given in session.get_inputs()], [x(2, 4), x(2, 4, seed=3)], strict=True))
    wanted, box = model(**kwargs)
    found = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    for one, other in zip(found, (wanted, box.tensor), strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-5)
