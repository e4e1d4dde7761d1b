"""Reading and writing ONNX files: external data stays external, and nothing is lost when a write fails."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from htp_export.errors import FileError
from htp_export.files import model_files as files
from htp_export.files.model_files import external_files, read_model, write_model
from htp_export.files.protobuf_bytes import LARGE_BYTES
from tests.files.test_data_files import WEIGHT, listing, weight_of
from tests.handmade import encoder


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A model whose weights are in ``home/weights.bin``."""
    (tmp_path / "home").mkdir()
    ir.save(encoder(16), tmp_path / "home" / "model.onnx", external_data="weights.bin")
    assert (tmp_path / "home" / "weights.bin").stat().st_size == 2048
    return tmp_path / "home" / "model.onnx"


def expected() -> np.ndarray:
    return weight_of(encoder(16)).numpy()


def test_only_weights_that_the_model_still_has_are_brought_along(external, tmp_path):
    (tmp_path / "other").mkdir()
    model = read_model(external)
    reader = next(
        node for node in model.graph if any(value.name == WEIGHT for value in node.inputs)
    )
    reader.replace_input_with(1, model.graph.initializers["layer.0.fc.weight"])
    del model.graph.initializers[WEIGHT]
    write_model(model, tmp_path / "other" / "half.onnx")
    assert (tmp_path / "other" / "half.onnx.data").stat().st_size == 1024


def test_a_model_that_reads_what_nothing_makes_is_not_written(external):
    model = read_model(external)
    del model.graph.initializers[WEIGHT]
    with pytest.raises(
        FileError, match=f"nothing in the model produces an input of a node: .*{WEIGHT}"
    ):
        write_model(model, external.with_name("half.onnx"))
    assert listing(external.parent) == ["model.onnx", "weights.bin"]


def test_nodes_that_stand_in_no_order_are_written_in_one(tmp_path):
    model = encoder()
    first, *_, last = model.graph
    model.graph.remove(first)
    model.graph.insert_after(last, first)
    write_model(model, tmp_path / "model.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"))


class RenameFails:
    """``os.replace`` that refuses one target, once.

    Args:
        target: The name of the file that is not replaced.
    """

    def __init__(self, target: str) -> None:
        self.target, self.refused = target, 0
        self._replace = os.replace

    def __call__(self, source: Any, target: Any) -> None:
        if Path(target).name == self.target and not self.refused:
            self.refused += 1
            raise PermissionError(13, "Permission denied", str(target))
        self._replace(source, target)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("failing", ["target.onnx", "target.onnx.data"])
@pytest.mark.parametrize("there", [True, False])
def test_a_graph_and_its_weights_are_replaced_together_or_not_at_all(
    external, monkeypatch, links, failing, there
):
    folder = external.parent
    old = {"target.onnx": b"old model", "target.onnx.data": b"old weights"} if there else {}
    for name, content in old.items():
        (folder / name).write_bytes(content)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = read_model(external)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails := RenameFails(failing))
        if not links:
            patched.delattr(os, "link")
            patched.setattr(os, "link", _no_links, raising=False)
        with pytest.raises(
            FileError, match=r"target\.onnx: cannot be written: .*Permission denied"
        ):
            write_model(model, folder / "target.onnx", "target.onnx.data")
    assert fails.refused == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    np.testing.assert_array_equal(weight_of(model).numpy(), expected())
    write_model(model, folder / "target.onnx", "target.onnx.data")
    assert listing(folder) == ["model.onnx", "target.onnx", "target.onnx.data", "weights.bin"]
    np.testing.assert_array_equal(weight_of(read_model(folder / "target.onnx")).numpy(), expected())


def _no_links(*_: object) -> None:
    raise OSError(95, "Operation not supported")


def test_a_model_whose_own_weights_could_not_be_replaced_still_has_them(external, monkeypatch):
    model = read_model(external)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", RenameFails("model.onnx"))
        with pytest.raises(FileError):
            write_model(model, external, "weights.bin")
    for each in (model, read_model(external)):
        np.testing.assert_array_equal(weight_of(each).numpy(), expected())


def test_what_cannot_be_put_back_is_said_with_the_place_where_it_is(external, monkeypatch):
    replace, refused = os.replace, []

    def refuses(source: Any, target: Any) -> None:
        if refused or Path(target).name == "target.onnx":
            refused.append(Path(target).name)
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    (external.parent / "target.onnx.data").write_bytes(b"old weights")
    monkeypatch.setattr(os, "replace", refuses)
    with pytest.raises(
        FileError, match=r"could not be restored .*; its previous contents are in "
    ) as caught:
        write_model(read_model(external), external.with_name("target.onnx"), "target.onnx.data")
    assert refused == ["target.onnx", "target.onnx.data"]
    assert Path(str(caught.value).rpartition(" ")[2]).read_bytes() == b"old weights"


def test_a_model_is_not_changed_while_it_is_written(tmp_path, monkeypatch):
    """Other threads may read it, even in the middle of the longest step."""
    model = encoder(256)
    assert weight_of(model).nbytes > LARGE_BYTES
    before = ir.to_proto(model).SerializeToString()
    tensor, seen = weight_of(model), []

    def look(proto: Any, *rest: Any) -> None:
        seen.append(ir.to_proto(model).SerializeToString() == before and weight_of(model) is tensor)
        write_filled(proto, *rest)

    write_filled = files.write_filled
    monkeypatch.setattr(files, "write_filled", look)
    write_model(model, tmp_path / "inside.onnx")
    write_model(model, tmp_path / "beside.onnx", "beside.data")
    assert seen == [True, True]
    assert ir.to_proto(model).SerializeToString() == before


def in_threads(write: Callable[[int, int], object]) -> None:
    """Call a function with the numbers of a thread and of a turn, in three threads at the same time."""
    with ThreadPoolExecutor(3) as pool:
        for done in [
            pool.submit(lambda thread=thread: [write(thread, turn) for turn in range(8)])
            for thread in range(3)
        ]:
            done.result(120)


def test_threads_may_write_one_model(tmp_path):
    model = encoder(256)  # weights that are written apart from the rest

    def write(thread: int, turn: int) -> None:
        write_model(model, tmp_path / f"{thread}.onnx", f"{thread}.data" if turn % 2 else None)
        np.testing.assert_array_equal(
            weight_of(read_model(tmp_path / f"{thread}.onnx")).numpy(), values
        )

    values = weight_of(model).numpy().copy()
    in_threads(write)
    np.testing.assert_array_equal(weight_of(model).numpy(), values)


def test_threads_may_write_over_the_weights_of_their_model(external):
    model = read_model(external)
    in_threads(lambda *_: write_model(model, external, "weights.bin"))
    for each in (model, read_model(external)):
        np.testing.assert_array_equal(weight_of(each).numpy(), expected())
    assert listing(external.parent) == ["model.onnx", "weights.bin"]


def test_a_relative_file_name_and_another_working_directory_change_nothing(
    external, tmp_path, monkeypatch
):
    monkeypatch.chdir(external.parent)
    model = read_model("model.onnx")
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(weight_of(model).numpy(), expected())


def test_models_too_large_for_one_file_get_external_data(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LARGE_BYTES", 2000)
    write_model(encoder(16), tmp_path / "large.onnx")
    assert listing(tmp_path) == ["large.onnx", "large.onnx.data"]
    np.testing.assert_array_equal(
        weight_of(read_model(tmp_path / "large.onnx")).numpy(), expected()
    )


def test_weights_that_are_one_tensor_are_written_once(tmp_path):
    model = encoder(16)
    model.graph.initializers["layer.0.fc.weight"].const_value = weight_of(model)
    write_model(model, tmp_path / "tied.onnx", "tied.bin")
    assert (tmp_path / "tied.bin").stat().st_size == 1024
    both = read_model(tmp_path / "tied.onnx")
    np.testing.assert_array_equal(
        weight_of(both, "layer.0.fc.weight").numpy(), weight_of(both).numpy()
    )


def test_a_weight_that_is_an_output_is_written_with_its_type(tmp_path):
    model = encoder()
    weight = next(iter(model.graph.initializers.values()))
    weight.type, weight.shape = ir.TensorType(weight.const_value.dtype), weight.const_value.shape
    model.graph.outputs.append(weight)
    write_model(model, tmp_path / "net.onnx")
    onnx.checker.check_model(tmp_path / "net.onnx", full_check=True)


def test_a_model_may_overwrite_its_own_weights_and_still_has_them(external):
    model = read_model(external)
    model.graph.initializers["layer.0.fc.weight"].const_value = ir.tensor(
        np.zeros((1, 16), np.float32)
    )
    for node in model.graph:
        node.outputs[0].shape = None
    write_model(model, external, "weights.bin")
    assert listing(external.parent) == ["model.onnx", "weights.bin"]
    # the other one is small, and now in the file
    assert (external.parent / "weights.bin").stat().st_size == 1024
    np.testing.assert_array_equal(weight_of(model).numpy(), expected())
    again = read_model(external)
    np.testing.assert_array_equal(weight_of(again).numpy(), expected())
    assert weight_of(again, "layer.0.fc.weight").numpy().max() == 0


def test_external_tensors_in_node_attributes_move_too(external, tmp_path):
    model = read_model(external)
    constant = ir.node("Constant", [], {"value": weight_of(model)})
    model.graph.insert_before(model.graph[0], constant)
    (tmp_path / "other").mkdir()
    write_model(model, tmp_path / "other" / "copy.onnx")
    copy = read_model(tmp_path / "other" / "copy.onnx")
    np.testing.assert_array_equal(copy.graph[0].attributes["value"].as_tensor().numpy(), expected())


def test_targets_that_cannot_be_are_refused_before_anything_is_written(external, tmp_path):
    model = read_model(external)
    with pytest.raises(FileError, match="is a folder"):
        write_model(model, tmp_path)
    with pytest.raises(FileError, match="another file in the same folder"):
        write_model(model, tmp_path / "a.onnx", "../a.data")
    with pytest.raises(FileError, match="contains the weights of this model"):
        write_model(model, external.parent / "weights.bin")
    with pytest.raises(FileError, match="cannot be written"):
        write_model(model, tmp_path / "nowhere" / "a.onnx")
    assert listing(tmp_path) == ["home"]


ROOT = Path(__file__).parents[2]
WRITES = """
import os, sys
import numpy as np
import onnx_ir as ir
from htp_export.files.model_files import write_model
from tests.handmade import encoder

model, others = encoder(16), []
while len(others) < 2:
    others.append(os.fork())
    if not others[-1]:
        others = []
        break
for number in range(12):
    for value in model.graph.initializers.values():
        value.const_value = ir.tensor(np.full((16, 16), number, np.float32), name=value.name)
    write_model(model, sys.argv[1], True)
sys.exit(any(os.waitpid(other, 0)[1] for other in others))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_processes_that_write_one_target_leave_one_model_and_its_data(tmp_path):
    target = tmp_path / "net.onnx"
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", WRITES, str(target)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    model = read_model(target)
    assert sorted(tmp_path.iterdir()) == sorted([target, *external_files(model)])
    values = {
        float(value.const_value.numpy().flat[0]) for value in model.graph.initializers.values()
    }
    assert values == {11.0}
    assert [node.op_type for node in model.graph] == [node.op_type for node in encoder(16).graph]
