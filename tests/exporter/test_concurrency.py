"""Exports in several threads and tasks: each has its own tags, and nobody else's."""

import asyncio
import functools
import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.exporter.capture import running, torch_internals
from htp_export.process import restoring
from htp_export.process.restoring import restored
from tests.exporting import quick
from tests.nets import EXPORTERS

TWO = pytest.mark.parametrize(
    "exporters",
    quick(
        [f"{one} {other}" for one in EXPORTERS for other in EXPORTERS],
        "torchscript torchscript",
        "dynamo torchscript",
    ),
)


class Slow(nn.Module):
    """Tells when it runs, and waits in the middle for as long as another thread needs to begin its export.

    Args:
        name: Of its one child; another one in each thread.
        runs: Gets the name when ``forward`` begins, and when it ends.
        began: Set once ``forward`` has begun.
    """

    def __init__(self, name: str, runs: list[str], began: threading.Event) -> None:
        super().__init__()
        self.name, self.runs, self.began = name, runs, began
        self.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(self.name)
        x = self.get_submodule(self.name)(x)
        self.began.set()
        time.sleep(0.2)
        x = self.get_submodule(self.name)(x * 2)
        self.runs.append(self.name)
        return x


def in_threads(*work: Callable[[], Any]) -> list[BaseException]:
    """Run each in a thread of its own; what they raised."""
    with ThreadPoolExecutor(len(work)) as threads:
        futures = [threads.submit(each) for each in work]
        return [error for future in futures if (error := future.exception(120))]


@pytest.mark.long
@TWO
def test_exports_in_two_threads_wait_for_each_other(exporters, tmp_path):
    runs: list[str] = []
    began = threading.Event()
    models = {name: Slow(name, runs, began).eval() for name in ("one", "other")}

    def export(name: str, exporter: str) -> None:
        if name == "other":
            began.wait(60)  # the other thread is in the middle of its trace
        args = (torch.linspace(-1, 1, 8).reshape(2, 4),)
        htp_export.export(
            models[name],
            args,
            tmp_path / f"{name}.onnx",
            dynamo=exporter == "dynamo",
            verbose=False,
        )

    work = [
        lambda n=name, e=exporter: export(n, e)
        for name, exporter in zip(models, exporters.split(), strict=True)
    ]
    assert in_threads(*work) == []
    starts = runs[::2]
    assert starts == runs[1::2], "one ran inside the other"
    for name in models:
        tagged = htp_export.load(tmp_path / f"{name}.onnx")
        assert set(tagged.paths) == {"", name, f"{name}.0", f"{name}.1"}
        assert [tagged.hierarchy[path].calls for path in ("", f"{name}.0", f"{name}.1")] == [
            1,
            2,
            2,
        ]
        assert [node.op_type for node in tagged[""].own_nodes if node.op_type != "Constant"] == [
            "Mul"
        ]
        assert [node.op_type for node in tagged[f"{name}.1"].nodes] == ["Relu", "Relu"]


def test_torchscript_exports_of_four_threads_all_succeed():
    """Torch's own do not: one that begins while another is running fails."""
    files = [io.BytesIO() for _ in range(4)]
    args = (torch.ones(1, 3, 4),)
    layers = [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval() for _ in files]

    def export(place: int) -> None:
        for _ in range(3):
            files[place].seek(0)
            if place % 2:
                htp_export.export(layers[place], args, files[place], dynamo=False, verbose=False)
            else:
                with htp_export.tagging():
                    torch.onnx.export(
                        layers[place], args, files[place], dynamo=False, verbose=False
                    )

    assert in_threads(*(functools.partial(export, place) for place in range(4))) == []
    trees = [list(htp_export.load(onnx.load_from_string(file.getvalue())).paths) for file in files]
    assert trees == [[path for path, _ in layer.named_modules()] for layer in layers]
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_thread_that_exports_nothing_is_left_alone():
    """It runs modules, while an export with tags runs in another thread."""
    inside, over = threading.Event(), threading.Event()
    found = []

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            over.wait(60)
            found.append(running.script_capture.get() is not None)
            return x * 2

    def look() -> None:
        inside.wait(60)
        found.append(running.script_capture.get())
        found.append(nn.Tanh()._slow_forward(torch.zeros(1)).item())
        over.set()

    def export() -> None:
        htp_export.export(
            Waits().eval(), (torch.ones(1, 4),), io.BytesIO(), dynamo=False, verbose=False
        )

    assert in_threads(export, look) == []
    assert found == [None, 0.0, True]


def keys(program: Any) -> set[str]:
    return {key for key in program.model.metadata_props if key.startswith("htp.")}


def export_relu() -> Any:
    return torch.onnx.export(nn.ReLU().eval(), (torch.ones(2),), dynamo=True, verbose=False)


def test_tagging_holds_for_the_task_that_enters_it_alone():
    async def tagged(entered: asyncio.Event, leave: asyncio.Event) -> set[str]:
        with htp_export.tagging():
            entered.set()
            await leave.wait()
            return keys(export_relu())

    async def main() -> tuple[set[str], set[str]]:
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(tagged(entered, leave))
        await entered.wait()
        plain = keys(export_relu())  # another task, while the patches are in
        leave.set()
        return plain, await task

    plain, found = asyncio.run(main())
    assert plain == set()
    assert "htp.version" in found


def test_tagging_ends_for_tasks_that_were_begun_inside_too():
    async def later(go: asyncio.Event) -> set[str]:
        await go.wait()
        return keys(export_relu())

    async def main() -> tuple[set[str], set[str]]:
        go, now = asyncio.Event(), asyncio.Event()
        with htp_export.tagging():
            inside = asyncio.create_task(later(now))
            outside = asyncio.create_task(later(go))
            now.set()
            during = await inside
        with htp_export.tagging():  # the patches are in again, for others
            go.set()
            return during, await outside

    during, after = asyncio.run(main())
    assert "htp.version" in during
    assert after == set()


def test_an_export_handed_over_to_a_thread_by_a_task_is_tagged():
    async def main() -> Any:
        with htp_export.tagging():
            return await asyncio.to_thread(export_relu)

    assert "htp.version" in keys(asyncio.run(main()))


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


@pytest.mark.parametrize(
    ("turn_off", "now", "on", "off"),
    [
        (
            restoring.turn_attention_fast_path_off,
            torch.backends.mha.get_fastpath_enabled,
            True,
            False,
        ),
        (torch_internals.turn_compilation_off, stance, "default", "force_eager"),
    ],
)
def test_a_setting_of_torch_is_put_back_by_the_last_of_several_threads(turn_off, now, on, off):
    first, second = restored(turn_off), restored(turn_off)
    assert now() == on
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert now() == off
    second.__exit__(None, None, None)
    assert now() == on


def test_the_fast_path_of_attention_stays_off_where_it_was():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with restored(restoring.turn_attention_fast_path_off):
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Waiting(nn.Module):
    """Says that it runs, and waits for another thread to begin something."""

    def __init__(self, runs: threading.Event, other: threading.Event) -> None:
        super().__init__()
        self.runs, self.other = runs, other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.runs.set()
            self.other.wait(1)
        return x.exp()


class Branching(nn.Module):
    def __init__(self, runs: threading.Event) -> None:
        super().__init__()
        self.high, self.low, self.runs = nn.Linear(4, 4), nn.Linear(4, 4), runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.set()
        return torch.cond(x.sum() > 0, lambda x: self.high(x).exp(), lambda x: self.low(x), (x,))


@pytest.mark.long
def test_an_export_with_branches_waits_until_verify_in_another_thread_has_run_the_model():
    """While verify runs a model, nothing is compiled, and torch does not trace branches."""
    x, verifying, exporting = torch.ones(2, 4), threading.Event(), threading.Event()
    waiting = Waiting(threading.Event(), threading.Event()).eval()
    tagged = htp_export.load(htp_export.export(waiting, (x,), verbose=False))
    waiting.runs, waiting.other = verifying, exporting
    began_early, owners = [], set()

    def verify() -> None:
        assert htp_export.verify(waiting, tagged, (x,)).ok

    def export() -> None:
        assert verifying.wait(60)
        model = htp_export.export(Branching(exporting).eval(), (x,), verbose=False).model
        owners.update(node.metadata_props.get("htp.module") for node in model.graph.all_nodes())

    def watch() -> None:
        assert verifying.wait(60)
        began_early.append(exporting.wait(0.7))

    assert in_threads(verify, export, watch) == []
    assert began_early == [False]
    assert owners == {"", "high", "low"}


def of_model(model: ir.Model) -> str:
    """Nodes with their tags, and weights."""
    nodes = [
        (node.op_type, dict(node.metadata_props), [v and v.name for v in node.inputs])
        for node in model.graph
    ]
    return repr((nodes, sorted(model.graph.initializers)))


WORK: dict[str, Callable[[htp_export.TaggedModel], object]] = {
    "carry": lambda tagged: htp_export.carry(tagged, tagged.model.clone()).to_dict(),
    "compare": lambda tagged: htp_export.compare(tagged, tagged).summary,
    "contamination": lambda tagged: htp_export.contamination(tagged).kinds(),
    "cost": lambda tagged: htp_export.cost(tagged).to_dict(),
    "diff": lambda tagged: htp_export.diff(tagged, tagged).to_dict(),
    "embed_map": lambda tagged: of_model(htp_export.embed_map(tagged)),
    "extract": lambda tagged: of_model(htp_export.extract(tagged, "self_attn").model),
    "fingerprint": lambda tagged: htp_export.fingerprint(tagged).to_dict(),
    "forensics": lambda tagged: htp_export.forensics(tagged).to_dict(),
    "functions": lambda tagged: htp_export.functions(tagged, "**").to_dict(),
    "inline": lambda tagged: of_model(htp_export.inline(tagged).model),
    "rename": lambda tagged: of_model(htp_export.rename(tagged).model),
    "optimize": lambda tagged: of_model(htp_export.optimize(tagged).model),
    "partition": lambda tagged: [stage.modules for stage in htp_export.partition(tagged, 2).stages],
    "splice": lambda tagged: of_model(
        htp_export.splice(tagged, "linear1", htp_export.extract(tagged, "linear1").model).model
    ),
    "view": lambda tagged: len(htp_export.view(tagged).html),
}


@pytest.mark.long
def test_functions_of_models_give_the_same_in_several_threads_on_one_model():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    program = htp_export.export(layer, (torch.randn(2, 5, 16),), verbose=False)
    alone = {name: work(htp_export.load(program)) for name, work in WORK.items()}
    tagged = htp_export.load(program)
    found: dict[tuple[str, int], object] = {}

    def run(name: str, number: int) -> None:
        found[name, number] = WORK[name](tagged)

    raised = in_threads(
        *(functools.partial(run, name, number) for name in WORK for number in range(2))
    )
    assert raised == []
    assert [key for key, result in found.items() if result != alone[key[0]]] == []
    assert len(found) == 2 * len(WORK)
