"""The work of torch that an export under dynamo saves changes nothing but time, and its work is counted."""

import collections
import copy
import functools
import gc
import linecache
import re
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.exporter.capture import patches, running
from htp_export.exporter.capture.patching import Patch
from htp_export.process import restoring
from htp_export.process.restoring import Changes, keep_objects, restored, set_variable
from tests.exporting import every
from tests.nets import NETS

PAIRS = 10
GROUPS = (patches.FASTER_START, patches.FASTER_DYNAMO)


@pytest.fixture(scope="module", autouse=True)
def translations_read_once() -> None:
    """Translations are read in each export, as outside of tests."""


def small_modules(pairs: int = PAIRS) -> nn.Module:
    """Pairs of a Linear and a ReLU: modules that compute next to nothing."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(pairs)]
    return nn.Sequential(*layers).eval()


def exported(model: nn.Module, args: Any, *, hurries: bool, **options: Any) -> Any:
    def make(changes: Any) -> None:
        set_variable(changes, running.hurries, hurries)

    with restored(make):
        return htp_export.export(model, args, dynamo=True, **options)


def content(program: Any, file: Path) -> onnx.ModelProto:
    """The saved model, without the numbers of code that FX generates, which are others each time."""
    program.save(file)
    model = onnx.load(file)
    drop_numbers(model.graph.node)
    return model


def drop_numbers(nodes: Any) -> None:
    for node in nodes:
        for entry in node.metadata_props:
            entry.value = re.sub(r"<eval_with_key>\.\d+", "<eval_with_key>", entry.value)
        for attribute in node.attribute:
            drop_numbers(attribute.g.node)


@pytest.mark.long
@pytest.mark.parametrize("name", every(8, sorted(NETS)))
def test_a_model_is_the_same_without_what_is_saved(name, tmp_path):
    net = NETS[name]
    if "dynamo" in net.skip:
        pytest.skip("torch does not export it")
    model, kwargs = net.build()
    options = net.export_options("dynamo")
    models = []
    for hurries in (True, False):
        inputs = copy.deepcopy(kwargs)
        program = exported(model, (), hurries=hurries, kwargs=inputs, **options)
        models.append(content(program, tmp_path / "model.onnx"))
    assert models[0] == models[1]


class Promotes(nn.Module):
    """Numbers of several types, which torch converts in further nodes."""

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = given.to(torch.int32)
        halves = given.half()
        return (
            whole + given,
            whole / 2,
            halves * given,
            torch.where(given > 0, whole, 1.5),
            whole**2,
        )


class Chooses(nn.Module):
    """The size of a result depends on values: its nodes are executed as torch does it."""

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.nonzero(given)
        return places + given.sum(), places.to(torch.int32) * 0.5


OPEN = {"dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "options"),
    [(Promotes(), {}), (Promotes(), OPEN), (Chooses(), {})],
    ids=["known sizes", "open sizes", "sizes that values decide"],
)
def test_types_are_promoted_as_by_torch(model, options, tmp_path):
    args = (torch.randn(3, 4),)
    programs = [
        exported(model.eval(), args, hurries=hurries, **options) for hurries in (True, False)
    ]
    files = [content(program, tmp_path / "model.onnx") for program in programs]
    assert files[0] == files[1]
    shown = [program.exported_program.graph_module.print_readable(False) for program in programs]
    assert shown[0] == shown[1]


def counted(patch: Patch, counts: dict[str, int]) -> Patch:
    """A patch that counts how often what it replaces is called."""

    def wrap(original: Any) -> Any:
        if not isinstance(original, types.FunctionType | types.MethodType):
            return patch.wrap(original)

        @functools.wraps(original)
        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[patch.name.rpartition(".")[2]] += 1
            return original(*args, **kwargs)

        return patch.wrap(counting)

    return Patch(patch.module, patch.name, wrap)


def work(monkeypatch: pytest.MonkeyPatch, *, hurries: bool) -> collections.Counter[str]:
    """Name of a function of torch → how often it runs in an export."""
    counts = collections.Counter[str]()

    def count(owner: Any, name: str, called: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += called(*args)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for group in GROUPS:
        monkeypatch.setattr(group, "patches", [counted(patch, counts) for patch in group.patches])
    signature = torch.export.graph_signature
    count(signature, "_immutable_dict")
    promoting = "_TypePromotionInterpreter"
    is_promoting = lambda self, *_: type(self).__name__ == promoting  # noqa: E731
    count(torch.fx.Interpreter, "call_function", is_promoting)

    def hold(changes: Changes) -> None:
        for group in GROUPS:
            group.hold(changes)

    with restored(hold):
        exported(small_modules(), (torch.randn(1, 4),), hurries=hurries)
    monkeypatch.undo()
    return counts


def test_repeated_work_of_torch_is_done_once(monkeypatch):
    """Counts, not times: 1,000 small modules took 1.2 times as long as with torch alone, and now 0.86 times."""
    # the first export of a process also imports the translations of operators
    exported(small_modules(1), (torch.randn(1, 4),), hurries=True)
    saved, torchs = (work(monkeypatch, hurries=hurries) for hurries in (True, False))
    operators = 2 * PAIRS
    inputs = 2 * PAIRS + 1  # a weight and a bias each
    # torch 2.13 and older list all parameters three more times for each input
    assert saved["_immutable_dict"] <= max(inputs, torchs["_immutable_dict"] - 3 * inputs + 3)
    assert saved["_is_call_name"] == 0
    assert torchs["_extract_symbolized_tb"] >= operators
    assert saved["_extract_symbolized_tb"] == 0
    assert torchs["call_function"] == operators
    assert saved["call_function"] == 0
    assert torchs["from_op_schema"] == operators
    assert saved["from_op_schema"] == 2  # Gemm and Relu
    assert torchs["try_rewrite"] >= 20 * operators
    assert saved["try_rewrite"] <= 4 * operators


@pytest.mark.long
def test_signatures_of_translations_are_not_computed_to_read_a_domain(monkeypatch):
    from onnxscript import values

    read = []
    original = values.TracedOnnxFunction.function_ir

    def counted_read(self: Any) -> Any:
        read.append(self)
        return original.fget(self)

    monkeypatch.setattr(values.TracedOnnxFunction, "function_ir", property(counted_read))
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    registries = []
    for hurries in (True, False):
        read.clear()

        def make(changes: Any, hurries: bool = hurries) -> None:
            set_variable(changes, running.hurries, hurries)
            set_variable(changes, running.exporter, types.SimpleNamespace(ended=False))
            patches.FASTER_START.hold(changes)

        with restored(make):
            registries.append(ONNXRegistry.from_torchlib())
        assert bool(read) is not hurries
    assert registries[0].functions.keys() == registries[1].functions.keys()
    assert len(registries[0].functions) > 400
    function = read[0]
    with restored(patches.FASTER_START.hold):
        assert function.function_ir.domain == original.fget(function).domain
        assert function.function_ir.name == original.fget(function).name


def test_the_history_of_a_node_is_copied_whole():
    from torch.fx import traceback as fx_traceback

    program = torch.export.export(small_modules(1), (torch.randn(1, 4),)).run_decompositions({})
    histories = [node.meta["from_node"] for node in program.graph.nodes if "from_node" in node.meta]
    assert any(source.from_node for history in histories for source in history)

    def make(changes: Any) -> None:
        set_variable(changes, running.exporter, types.SimpleNamespace(ended=False))
        patches.FASTER_DYNAMO.hold(changes)

    with restored(make):
        copied = [fx_traceback.copy.deepcopy(history) for history in histories]
    assert copied == histories == [copy.deepcopy(history) for history in histories]
    for before, after in zip(histories, copied, strict=True):
        assert {type(source) for source in after} == {fx_traceback.NodeSource}
        assert parts(before).isdisjoint(parts(after))


def parts(history: list[Any]) -> set[int]:
    """Identities of all objects in a history that can be changed."""
    found = {id(history)}
    for source in history:
        found |= {id(source), id(source.action), id(source.node_info)} | parts(source.from_node)
    return found


@pytest.mark.parametrize(
    "gone",
    [
        Patch("torch.export", "gone", lambda original: original),
        Patch("torch.export", "export", lambda original: original.gone),
    ],
    ids=["a place is gone", "a place is not what it was"],
)
def test_a_place_where_torch_has_moved_is_left_out_and_the_others_are_not(gone, monkeypatch):
    group = patches.FASTER_DYNAMO
    monkeypatch.setattr(group, "patches", (gone, *group.patches))
    original = torch.export.export
    with restored(group.hold):
        assert torch.export.export is original
        assert type(torch.fx.traceback.copy) is not types.ModuleType
    assert torch.fx.traceback.copy is copy
    program = exported(small_modules(1), (torch.randn(1, 4),), hurries=True)
    assert htp_export.load(program).paths


@pytest.mark.parametrize(
    "name", ["a", "a@1", "a@12", "ab", "a@", "a@b", "b", "", "a\n", "a@1\n", "a+"]
)
@pytest.mark.parametrize("base", ["a", "a+", ""])
def test_names_of_modules_are_compared_as_by_torch(name, base):
    [patch] = [each for each in patches.FASTER_DYNAMO.patches if each.name == "_is_call_name"]
    original = patch.find()[2]
    assert patch.wrap(original)(name, base) is original(name, base)


@pytest.fixture
def collector(monkeypatch):
    """The garbage collector as in a program of a user: `conftest.py` freezes what it has imported."""
    gc.unfreeze()
    monkeypatch.setattr(restoring, "_has_frozen_objects", lambda: gc.get_freeze_count() > 0)
    yield
    gc.unfreeze()
    gc.enable()
    gc.freeze()


class Fails(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        assert gc.get_freeze_count()
        raise ValueError("no")


@pytest.mark.usefixtures("collector")
def test_objects_are_collected_again_after_an_export_that_fails():
    with pytest.raises(torch.onnx.OnnxExporterError):
        exported(Fails().eval(), (torch.randn(1),), hurries=True)
    assert gc.isenabled()
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("state", ["frozen", "disabled"])
def test_a_garbage_collector_that_the_user_has_set_stays_as_it_is(state):
    if state == "frozen":
        gc.freeze()
    else:
        gc.disable()
    before = gc.isenabled(), gc.get_freeze_count()
    with restored(keep_objects):
        assert (gc.isenabled(), gc.get_freeze_count()) == before
    assert (gc.isenabled(), gc.get_freeze_count()) == before


@pytest.mark.long
@pytest.mark.usefixtures("collector")
def test_garbage_of_one_export_is_gone_in_the_next():
    class Cycle:
        pass

    gc.collect()
    for _ in range(2):
        with restored(keep_objects):
            cycle = Cycle()
            cycle.own = cycle  # type: ignore[attr-defined]
            gone = weakref.ref(cycle)
            del cycle
    with restored(keep_objects):
        assert gone() is None


def test_sources_that_torch_read_for_stacks_are_not_kept_in_memory():
    by_torch = torch.fx.experimental.proxy_tensor.__file__
    linecache.cache.pop(by_torch, None)
    linecache.getlines(re.__file__)
    export_small(hurries=True)
    assert by_torch not in linecache.cache
    assert re.__file__ in linecache.cache  # it was there before
    export_small(hurries=False)
    assert by_torch in linecache.cache


def export_small(*, hurries: bool) -> None:
    exported(small_modules(1), (torch.randn(2, 4),), hurries=hurries, verbose=False)
