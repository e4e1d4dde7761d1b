"""Under ``dynamo=False`` the model is called as torch calls it; where torch's call fails, as the user gave the call."""

import functools
import io
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional

import htp_export
from htp_export.errors import InputError
from tests.nets import x
from tests.same_graph import assert_same_graph
from tests.truth import untagged

ROOT_CALL = "htp_export.exporter.capture.root_module_call"


class Calls(nn.Module):
    """Runs a function of its arguments on the result of a layer; it has the function's signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(4, 4)

        @functools.wraps(function)
        def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
            through = isinstance(x, torch.Tensor) and x.shape[-1:] == (4,)
            return function(self.fc(x) if through else x, *args, **kwargs)

        self.forward = forward


def written(export: Callable[..., Any], model: Any, args: Any, **options: Any) -> onnx.ModelProto:
    buffer = io.BytesIO()
    export(model, args, buffer, dynamo=False, **options)
    return onnx.load_from_string(buffer.getvalue())


def assert_as_by_torch(make: Callable[[], Any], args: Any, **options: Any) -> onnx.ModelProto:
    """A model's file is the one that torch writes; returns it."""
    torchs, ours = (
        written(export, make(), args, **options)
        for export in (torch.onnx.export, htp_export.export)
    )
    assert_same_graph(ours, torchs)
    assert untagged(ours) == []
    return ours


def input_names(file: onnx.ModelProto) -> list[str]:
    return [value.name for value in file.graph.input]


# --- what torch accepts ---------------------------------------------------


@dataclass(frozen=True)
class Accepted:
    """A call that torch's own exporter accepts."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


def default_of_two(x: Any, n: int = 2) -> Any:
    return x * n


def tensor_default(x: Any, y: Any = torch.arange(4.0)) -> Any:  # noqa: B008 - as people write it
    return x + y


def optional(x: Any, y: Any = None, scale: float = 2.0, mode: str = "tanh") -> Any:
    x = x if y is None else x - y
    return (x.tanh() if mode == "tanh" else x.sigmoid()) * scale


def nested(x: Any, parts: Any) -> Any:
    return x * parts["scale"] + parts["more"][0] - parts["more"][1]


def affine_grid(theta: Any, size: Any) -> Any:
    return functional.affine_grid(theta, size, align_corners=False)


def hann_window(x: Any, length: int) -> Any:
    return x + torch.hann_window(length, periodic=False)


NAMES = {"input_names": ["x", "n"]}
ACCEPTED = {
    "number": Accepted(lambda x, n: x * n, (x(2, 4), 3)),
    "number_with_names": Accepted(lambda x, n: x * n, (x(2, 4), 3), NAMES),
    "float": Accepted(lambda x, n: x + n, (x(2, 4), 2.5)),
    "number_left_out": Accepted(default_of_two, (x(2, 4),)),
    "number_left_out_with_names": Accepted(default_of_two, (x(2, 4),), NAMES),
    "number_by_keyword": Accepted(default_of_two, (x(2, 4),), {"kwargs": {"n": 5}}),
    "tensor_default": Accepted(tensor_default, (x(2, 4),)),
    "tensor_default_given": Accepted(tensor_default, (x(2, 4), x(4))),
    "flag": Accepted(lambda x, flag: x * flag, (x(2, 4), True)),
    "optional": Accepted(optional, (x(2, 4),)),
    "optional_none": Accepted(optional, (x(2, 4), None, 3.0, "sigmoid")),
    "optional_by_keyword": Accepted(
        optional, (x(2, 4),), {"kwargs": {"y": x(2, 4), "mode": "sigmoid"}}
    ),
    "keywords_in_order": Accepted(
        optional, (), {"kwargs": {"x": x(2, 4), "y": x(2, 4), "scale": 3.0}}
    ),
    "keywords_with_names": Accepted(
        optional,
        (),
        {"kwargs": {"scale": 3.0, "y": x(2, 4), "x": x(2, 4)}, "input_names": ["x", "y", "scale"]},
    ),
    "unknown_keyword": Accepted(default_of_two, (x(2, 4),), {"kwargs": {"other": x(2, 4)}}),
    "size": Accepted(lambda x, size: x.reshape(size), (x(2, 4), torch.Size([4, 2]))),
    "tuple_of_ints": Accepted(lambda x, size: x.reshape(size), (x(2, 4), (4, 2))),
    "list_of_ints": Accepted(lambda x, sizes: x.repeat(sizes), (x(2, 4), [3, 1])),
    "list_of_tensors": Accepted(lambda x, more: x + more[0] * more[1], (x(2, 4), [x(2, 4), x(4)])),
    "dict": Accepted(nested, (x(2, 4), {"scale": x(4), "more": (x(4), 2)}, {})),
    "affine_grid": Accepted(
        affine_grid, (x(1, 2, 3), torch.Size([1, 1, 3, 2])), {"opset_version": 20}
    ),
    "pad": Accepted(lambda x, pads: functional.pad(x, pads), (x(2, 4), [1, 2])),
    "fill": Accepted(lambda x, value: x.fill_(value), (x(2, 3), 7)),
    "hann_window": Accepted(hann_window, (x(5), 5)),
    "tril": Accepted(
        lambda x, diagonal: torch.tril(x, diagonal), (x(4, 4), 1), {"opset_version": 14}
    ),
    "squeeze": Accepted(lambda x, dim: x.squeeze(dim), (x(2, 1, 4), 1)),
    "unsqueeze": Accepted(lambda x, dim: x.unsqueeze(dim), (x(2, 4), 1)),
    "numbers_returned": Accepted(lambda a, b: a > b, (3, 2)),
    "number_among_results": Accepted(lambda x, n: (x + 1, n * 2, None), (x(2, 4), 3)),
    "dict_returned": Accepted(lambda x, n=2: {"a": x * n, "b": [x, x + 1]}, (x(2, 4),)),
}
TORCHS_OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore:Skipping _decide_input_format:UserWarning", "ignore::torch.jit.TracerWarning"
)


@TORCHS_OWN_WARNINGS
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_torch_accepts_gives_the_file_that_torch_writes(name):
    case = ACCEPTED[name]
    assert_as_by_torch(lambda: Calls(case.function), case.args, **case.options)


@torch.jit.script
def scripted_function(x: torch.Tensor, n: int, flag: bool) -> torch.Tensor:
    if flag:
        x = x * n
    return x.relu()


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, n: int, sizes: tuple[int, int]) -> torch.Tensor:
        for _ in range(n):
            x = self.fc(x)
        return x.reshape(sizes)


@pytest.mark.parametrize("names", [None, ["x", "n", "flag"]])
def test_a_scripted_function_gives_the_file_that_torch_writes(names):
    # torch names its first one in another way
    written(torch.onnx.export, scripted_function, (x(2, 4), 2, True))
    assert_as_by_torch(lambda: scripted_function, (x(2, 4), 2, True), input_names=names)


@pytest.mark.parametrize("names", [None, ["x", "n", "rows", "columns"]])
def test_a_scripted_module_gives_the_file_that_torch_writes(names):
    script, args = torch.jit.script(Scripted()), (x(2, 4), 2, (4, 2))
    written(torch.onnx.export, script, args)  # torch names its first one in another way
    assert_as_by_torch(lambda: script, args, input_names=names)


# --- what torch refuses ---------------------------------------------------


class State:
    """What a model gives back that no exporter knows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def gives_a_flag_by_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers does: a default that the user did not give is passed by keyword."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("flag", None)
        return function(*args, **kwargs)

    return wrapper


def keyword_only(x: Any, *, scale: Any, twice: bool = True) -> Any:
    return x * scale * (2 if twice else 1)


def keeps(x: Any, keep: int = 0) -> Any:
    """Computes something else where its number is a tensor (transformers' ``logits_to_keep``)."""
    return x[:, slice(-keep, None) if isinstance(keep, int) else keep]


def everything(x: Any, **more: Any) -> Any:
    return x * more["scale"] if more else x


REFUSED = {
    "multiple_values": (
        gives_a_flag_by_keyword(lambda x, y, flag=None: x - y),
        (),
        {"x": x(2, 4), "y": x(4)},
    ),
    "keyword_only": (keyword_only, (x(2, 4),), {"scale": x(4)}),
    "object_returned": (lambda x, y: (x + y, State(x * y)), (x(2, 4), x(4)), {}),
    "object_returned_after_a_number": (
        lambda x, y, n=2: (x + y, State(x * n)),
        (x(2, 4), x(4)),
        {},
    ),
    "number_that_no_translation_takes": (
        lambda x, y, dim=1: (x - y).softmax(dim),
        (x(2, 4), x(4)),
        {},
    ),
    "object_given": (lambda x, part: x[part] * 2, (x(2, 4), slice(1)), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_called_as_it_was_given(name):
    function, args, kwargs = REFUSED[name]
    with pytest.raises((TypeError, RuntimeError, torch.onnx.OnnxExporterError)):
        written(torch.onnx.export, Calls(function), args, kwargs=kwargs)
    file = written(htp_export.export, Calls(function), args, kwargs=kwargs)
    session = onnxruntime.InferenceSession(file.SerializeToString())
    feeds = [
        value.numpy() for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
    ]
    found = session.run(None, dict(zip(input_names(file), feeds, strict=True)))
    results = Calls(function)(*args, **kwargs)
    results = results if isinstance(results, tuple) else (results,)
    expected = [result.tensor if isinstance(result, State) else result for result in results]
    torch.testing.assert_close([torch.from_numpy(array) for array in found], expected)
    assert untagged(file) == []


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (keeps, (x(1, 3, 4),), {}),
        (keeps, (x(1, 3, 4), 2), {}),
        (everything, (x(2, 4),), {"scale": x(4)}),
    ],
    ids=["number_left_out", "number_given", "keyword_that_torch_drops"],
)
def test_where_torchs_call_gives_another_result_the_file_has_that_of_the_call_as_given(
    function, args, kwargs, caplog
):
    caplog.set_level(logging.INFO, ROOT_CALL)
    file = written(htp_export.export, Calls(function), args, kwargs=kwargs)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    session = onnxruntime.InferenceSession(file.SerializeToString())
    (found,) = session.run(
        None, dict(zip(input_names(file), (t.numpy() for t in tensors), strict=True))
    )
    torch.testing.assert_close(torch.from_numpy(found), Calls(function)(*args, **kwargs))
    assert "change its result" in caplog.text


def test_the_log_says_what_torch_refused_and_what_is_constant(caplog):
    caplog.set_level(logging.INFO, ROOT_CALL)
    function, args, kwargs = REFUSED["multiple_values"]
    written(htp_export.export, Calls(function), args, kwargs=kwargs)
    written(
        htp_export.export, Calls(keyword_only), (x(2, 4),), kwargs={"scale": x(4), "twice": False}
    )
    written(htp_export.export, Calls(default_of_two), (x(2, 4), 3))
    first, second = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert first[0] == "INFO"
    assert first[1].startswith("Calls: not called as torch calls it: TypeError: ")
    assert "multiple values for argument 'flag'" in first[1]
    assert second[0] == "WARNING"
    assert second[1].endswith("; constants in the file: twice")


class Changes(nn.Module):
    """Changes all that a run of it can change, and then gives back an object, or refuses to be called by position."""

    def __init__(self, refuses: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bn, self.off, self.refuses = nn.BatchNorm1d(4), nn.Dropout(0.5), refuses
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))
        self.sizes: list[int] = []
        self.seen = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, n: int = 2) -> Any:
        y = self.off(self.bn(x))
        self.runs += 1
        self.last = y[0].detach()
        self.sizes.append(len(x))
        self.seen += 1
        x.add_(1)
        if self.refuses == "object":
            return y, State(y * n)
        return y if not isinstance(n, torch.Tensor) else n.refused


def state_of(model: nn.Module, *tensors: torch.Tensor) -> list[Any]:
    assert isinstance(model, Changes)
    return [
        [
            model.runs.clone(),
            model.bn.num_batches_tracked.clone(),
            model.bn.running_mean.clone(),
            *tensors,
        ],
        [model.sizes, model.seen, sorted(vars(model))],
        torch.get_rng_state(),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("refuses", ["object", "number"])
def test_an_attempt_that_fails_leaves_nothing_behind(refuses):
    states = []
    for exports in (False, True):
        model, data = Changes(refuses).train(), torch.ones(3, 4)
        torch.manual_seed(3)
        if exports:
            written(
                htp_export.export,
                model,
                (data,),
                training=torch.onnx.TrainingMode.PRESERVE,
                opset_version=17,
            )
        else:
            model(data)
        states.append(state_of(model, data))
    torch.testing.assert_close(states[1][0], states[0][0])
    assert states[1][1] == states[0][1]
    assert torch.equal(states[1][2], states[0][2])


def fails(x: Any, *, why: str = "no export for this one") -> Any:
    raise ArithmeticError(why)


def test_where_both_ways_fail_the_error_is_torchs_own():
    errors = []
    for export in (torch.onnx.export, htp_export.export):
        with pytest.raises(TypeError) as caught:
            written(export, Calls(fails), (x(2, 4),))
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    notes = getattr(errors[1], "__notes__", [])
    assert any("ArithmeticError: no export for this one" in note for note in notes)


def test_a_failed_attempt_leaves_autocasts_cache_on():
    torch.set_autocast_cache_enabled(True)  # torch leaves it off where an export fails
    written(htp_export.export, Calls(keyword_only), (x(2, 4),), kwargs={"scale": x(4)})
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.LSTM(4, 3)])
def test_without_a_file_to_write_nothing_is_exported(make):
    with pytest.raises(InputError, match="returns no model; give f, the file to write"):
        htp_export.export(make().eval(), (x(2, 4),), dynamo=False)


# --- order of keywords ---------------------------------------------------


def test_keywords_become_inputs_in_the_order_given_unless_there_are_names():
    kwargs = {"y": x(2, 4), "x": x(3, 2, 4)}

    def shapes(**options: Any) -> list[int]:
        file = written(htp_export.export, Calls(optional), (), kwargs=kwargs, **options)
        return [len(value.type.tensor_type.shape.dim) for value in file.graph.input]

    assert shapes()[:2] == [2, 3]
    assert shapes(input_names=["x", "y", "scale"]) == [3, 2, 0]


@pytest.mark.parametrize("args", [(x(2, 4), 3), (x(2, 4),)], ids=["given", "left_out"])
def test_verify_gives_numbers_that_are_inputs(args, tmp_path):
    model = Calls(default_of_two).eval()
    htp_export.export(model, args, tmp_path / "m.onnx", dynamo=False)
    report = htp_export.verify(model, tmp_path / "m.onnx", args)
    assert report.ok
    assert {path: module.status for path, module in report.modules.items()} == {
        "": "agrees",
        "fc": "agrees",
    }
