"""Whatever runs a PyTorch model leaves it, and its arguments, as they were: also a model that changes itself."""

import collections
import copy
import dataclasses
import itertools
import random
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.style  # noqa: F401 - it draws a random number when it is imported
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import HtpExportError
from htp_export.exporter.capture import running
from htp_export.exporter.capture.model_state import unchanged
from htp_export.process.restoring import Changes
from tests.exporting import every, quick
from tests.nets import spread, x


class Holder:
    """An object of a program: it holds a tensor, and a list in a dictionary."""

    def __init__(self) -> None:
        self.tensor, self.by_name = torch.zeros(2), {"seen": [1]}

    def change(self) -> None:
        self.tensor += 1
        self.by_name["seen"].append(2)
        self.by_name["more"] = []


class Base:
    """A class with a slot, whose name is private."""

    __slots__ = ("__hidden", "unset")

    def __init__(self) -> None:
        self.__hidden = [1]

    def held(self) -> list[Any]:
        return [self.__hidden, getattr(self, "unset", "unset")]

    def change(self) -> None:
        self.__hidden.append(2)
        self.unset = 1


class Slotted(Base):
    """An object without ``__dict__``: it holds a number and a tensor."""

    __slots__ = ("n", "tensor")

    def __init__(self) -> None:
        super().__init__()
        self.n, self.tensor = 0, torch.zeros(2)

    def held(self) -> list[Any]:
        return [*super().held(), self.n, self.tensor]

    def change(self) -> None:
        super().change()
        self.n += 1
        self.tensor = self.tensor + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """An object whose class refuses that its attributes are set."""

    n: int

    def held(self) -> list[Any]:
        return [self.n]


class State(nn.Module):
    """A layer with every kind of state; ``change`` changes one of them each time that it runs."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.fc, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("counter", torch.tensor(1.0))
        self.register_buffer("cache", torch.zeros(2, 4))
        self.register_buffer("view", torch.arange(12.0).reshape(3, 4)[1:])
        self.steps, self.last, self.hidden = 0, None, torch.ones(3)
        self.kept: list[Any] = [1, [2]]
        self.by_name: dict[str, Any] = {"a": {"b": [1]}}
        self.ordered = collections.OrderedDict(a=1)
        self.recent: Any = collections.deque([1, 2], maxlen=2)
        self.words = {"one"}
        self.numbers = np.arange(3)
        self.namespace, self.holder = types.SimpleNamespace(n=0), Holder()
        self.slotted, self.frozen = Slotted(), Frozen(1)
        self.unregistered = [nn.BatchNorm1d(4)]
        self.change, self.active, self.fails = change, True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (
            self.fc(x) * self.counter + self.cache[:1] + self.hidden.sum() + self.steps
        )
        if self.active:
            self.change(self)
        if self.fails:
            raise ValueError("after the change")
        return result


class Net(nn.Module):
    """The state lies in an inner module, in a model in training mode."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.before, self.state = nn.Linear(4, 4), State(change)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.state(self.before(x).relu())
        return result


def fill(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a buffer": lambda m: m.counter.add_(1),
    "a buffer through .data": lambda m: m.counter.data.fill_(7),
    "a buffer in another's memory": lambda m: m.view.zero_(),
    "a replaced buffer": lambda m: setattr(m, "cache", m.cache + 1),
    "a buffer with other memory": lambda m: setattr(m.cache, "data", torch.ones(5)),
    "a removed buffer": lambda m: m._buffers.pop("view", None),
    "a new buffer": lambda m: m.register_buffer("new", torch.ones(1)),
    "a parameter": lambda m: fill(m.fc.weight),
    "a parameter through .data": lambda m: m.fc.weight.data.clamp_(-0.01, 0.01),
    "a part of a parameter": lambda m: m.fc.weight.data[0].zero_(),
    "a parameter with other memory": lambda m: setattr(m.fc.bias, "data", torch.ones(4)),
    "a replaced parameter": lambda m: setattr(m.fc, "bias", nn.Parameter(torch.ones(4))),
    "parameters by one operator": lambda m: torch._foreach_mul_(
        [p.data for p in m.fc.parameters()], 2.0
    ),
    "a counter": lambda m: setattr(m, "steps", m.steps + 1),
    "an attribute": lambda m: setattr(m, "last", 3),
    "a new attribute": lambda m: setattr(m, "new", 3),
    "a tensor that is no buffer": lambda m: m.hidden.mul_(2),
    "a list": lambda m: m.kept.append(5),
    "a list in a list": lambda m: m.kept[1].append(5),
    "a dictionary": lambda m: m.by_name.update(c=1),
    "a list in dictionaries": lambda m: m.by_name["a"]["b"].append(1),
    "an ordered dictionary": lambda m: m.ordered.move_to_end("a") or m.ordered.update(b=1),
    "a queue": lambda m: m.recent.append(9),
    "a set": lambda m: m.words.add("two"),
    "an array": lambda m: m.numbers.fill(8),
    "a namespace": lambda m: setattr(m.namespace, "n", m.namespace.n + 1),
    "an object": lambda m: m.holder.change(),
    "an object with slots": lambda m: m.slotted.change(),
    "a slot that is deleted": lambda m: (
        m.slotted.__delattr__("n") if hasattr(m.slotted, "n") else None
    ),
    "a frozen object": lambda m: object.__setattr__(m.frozen, "n", 2),
    "a module in a list": lambda m: m.unregistered[0].running_mean.add_(1),
    "a module that is replaced": lambda m: setattr(m, "spare", nn.Identity()),
    "a training mode": lambda m: m.spare.train(),
    "a hook": lambda m: m.register_forward_hook(lambda *_: None),
    "random numbers": lambda m: (torch.rand(1), random.random(), np.random.rand()),  # noqa: NPY002
}


def net(name: str, kind: type[Net] = Net) -> Net:
    made = spread(kind(CHANGES[name])).train()
    made.before.eval()
    return made


def same(one: Any, other: Any) -> bool:
    """Whether two objects hold the same, at any depth."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (nn.Module, Holder, types.SimpleNamespace)):
        return same(vars(one), vars(other))
    if isinstance(one, (Base, Frozen)):
        return same(one.held(), other.held())
    return bool(one == other)


def objects_of(model: nn.Module) -> list[int]:
    """The identities of all tensors of a model, and of its modules."""
    return [id(each) for each in (*model.parameters(), *model.buffers(), *model.modules())]


def random_states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), *np.random.get_state()[1:]]  # noqa: NPY002


def assert_unchanged(
    model: nn.Module, args: tuple[torch.Tensor, ...], run: Callable[[], Any]
) -> Any:
    """Run what runs a model, which stays as it is, and return the result, or the error."""
    before, given = copy.deepcopy(model), copy.deepcopy(args)
    identities, numbers = objects_of(model), random_states()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    try:
        result = run()
    except Exception as error:
        result = error
    assert same(model, before)
    assert objects_of(model) == identities
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert same(list(args), list(given))
    assert same(numbers, random_states())
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unchanged")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    """A file of the model that does not change itself."""
    model = net("a counter")
    model.state.active = False
    htp_export.export(copy.deepcopy(model).eval(), (x(2, 4),), folder / "net.onnx", verbose=False)
    return folder / "net.onnx"


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_verify_twice_finds_the_same(name, file):
    model, args = net(name), (x(2, 4),)
    for isolated in (False, True, False):
        result = assert_unchanged(
            model, args, lambda each=isolated: htp_export.verify(model, file, args, isolated=each)
        )
        assert result.ok, str(result)


@pytest.mark.parametrize("name", CHANGES)
def test_verify_leaves_a_model_that_fails_as_it_was(name, file):
    model, args = net(name), (x(2, 4),)
    model.state.fails = True
    error = assert_unchanged(model, args, lambda: htp_export.verify(model, file, args))
    assert isinstance(error, HtpExportError)
    assert "after the change" in str(error)


def test_verify_leaves_arguments_as_they_were(folder):
    class Filling(nn.Module):
        def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
            result = x * cache[0]
            cache[0].add_(1)
            return result

    model, args = Filling().eval(), (x(2, 4), [x(2, 4)])
    program = htp_export.export(model, args, verbose=False)
    for _ in range(2):
        assert assert_unchanged(model, args, lambda: htp_export.verify(model, program, args)).ok


class Slots:
    """An object without a dictionary of attributes, and one slot that is empty at first."""

    __slots__ = ("__secret", "count", "empty", "tensor")

    def __init__(self) -> None:
        self.count, self.tensor, self.__secret = 0, torch.zeros(2), 1

    def change(self) -> None:
        self.count, self.empty, self.__secret = self.count + 1, 1, 2
        self.tensor += 1

    def contents(self) -> list[Any]:
        return [self.count, self.tensor.tolist(), self.__secret, hasattr(self, "empty")]


class Drawing(nn.Module):
    """A model with random number generators of its own, and objects with slots."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.slots = nn.Linear(4, 4), Slots()
        self.torchs, self.pythons = torch.Generator().manual_seed(3), random.Random(3)
        self.numpys, self.older = np.random.default_rng(3), np.random.RandomState(3)
        self.active = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc(x)
        if self.active:
            self.slots.change()
            self.draw()
        return result

    def draw(self) -> list[float]:
        """Numbers that follow from the states of the generators."""
        drawn = torch.rand(1, generator=self.torchs).item(), self.numpys.random()
        return [*drawn, self.pythons.random(), self.older.rand()]


def test_verify_puts_generators_and_slots_of_a_model_back():
    model, args = Drawing().eval(), (x(2, 4),)
    program = htp_export.export(model, args, verbose=False)
    contents, model.active = model.slots.contents(), True
    assert htp_export.verify(model, program, args).ok
    assert model.slots.contents() == contents
    assert model.draw() == Drawing().draw()


def test_random_numbers_of_an_export_for_which_verify_waits_are_not_drawn_again():
    model, args = nn.Sequential(nn.Linear(4, 4)).eval(), (x(2, 4),)
    program = htp_export.export(model, args, verbose=False)
    begun, over = threading.Event(), threading.Event()

    def exporting() -> None:
        changes = Changes()
        running.wait_alone(changes)
        begun.set()
        over.wait()
        torch.manual_seed(1234)
        changes.take_back()

    threads = [
        threading.Thread(target=each)
        for each in (exporting, lambda: htp_export.verify(model, program, args))
    ]
    threads[0].start()
    begun.wait()
    threads[1].start()
    time.sleep(0.5)  # verify waits by now
    over.set()
    for thread in threads:
        thread.join()
    drawn = torch.rand(1)
    assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(1234)))


class Attending(Net):
    """The same with attention, for its report."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x[None, None]
        return super().forward(
            nn.functional.scaled_dot_product_attention(heads, heads, heads)[0, 0]
        )


CALLS: dict[str, Callable[[nn.Module, Any, Path], Any]] = {
    "inspect": lambda model, args, _: htp_export.inspect(model, args),
    "view": lambda model, args, _: htp_export.view(model, args, explorer=False),
    "carry": lambda model, args, file: htp_export.carry(model, file, args=args),
    "attention_report": lambda model, args, _: htp_export.attention_report(model, args),
}
CRASHING = ("a parameter through .data", "a part of a parameter", "parameters by one operator")
"""On these, `torch.export` itself ends the process (torch 2.13)."""
EXPORTABLE = [name for name in CHANGES if name not in CRASHING]
QUICK = ("a buffer", "a replaced buffer", "a list in a list", "a namespace")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
@pytest.mark.parametrize(
    ("name", "call"),
    quick(
        itertools.product(EXPORTABLE, CALLS),
        *((QUICK[0], call) for call in CALLS),
        *((name, "inspect") for name in QUICK),
    ),
)
def test_whatever_exports_a_model_leaves_it_as_it_was(name, call, file):
    model, args = net(name, Attending if call == "attention_report" else Net), (x(2, 4),)
    result = assert_unchanged(model, args, lambda: CALLS[call](model, args, file))
    if call in ("inspect", "view") or name in QUICK:  # torch.export refuses some of the others
        assert not isinstance(result, Exception), result


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
@pytest.mark.parametrize("name", quick(EXPORTABLE, "a parameter"))
def test_inspect_leaves_a_model_that_fails_as_it_was(name):
    model, args = net(name), (x(2, 4),)
    model.state.fails = True
    inspected = assert_unchanged(model, args, lambda: htp_export.inspect(model, args))
    assert inspected.way == "parts"  # all ways were tried, and each of them failed after the change


ENTRY: list[Net] = []


def entry() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return ENTRY[0], (x(2, 4),)


@pytest.mark.long
@pytest.mark.parametrize("command", every(2, ["tree", "cost", "verify FILE", "view", "carry FILE"]))
def test_commands_leave_the_model_of_a_factory_as_it_was(command, file, folder, capsys):
    ENTRY[:] = [net("a buffer").eval()]
    words = command.replace("FILE", str(file)).split()
    output = {
        "view": ["-o", str(folder / "view.html"), "--no-explorer"],
        "carry": ["-o", str(folder / "carried.onnx")],
    }
    typed = [*words, "--entry", f"{__name__}:entry", *output.get(words[0], [])]
    assert assert_unchanged(ENTRY[0], (), lambda: main(typed)) == 0, capsys.readouterr().err


class Branching(nn.Module):
    """Writes to its parameter in a branch of ``torch.cond``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def changing(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.fc.weight.mul_(2.0)
            return x + 1

        result: torch.Tensor = torch.cond(x.sum() > -1e9, changing, lambda x: x - 1, (self.fc(x),))
        return result


@pytest.mark.torch
def test_a_parameter_that_a_branch_writes_to_is_put_back() -> None:
    model, given = spread(Branching()).eval(), (x(2, 4),)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad(), unchanged(model, given):
        model(*given)
        assert not torch.equal(model.fc.weight, before["fc.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
