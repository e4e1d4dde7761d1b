"""Parts of a model that takes adapters: they take the adapters of their layers, and give them back when spliced."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import htp_export
from htp_export.format.model_metadata import read_lora
from tests.exporting import BOTH
from tests.lora.test_lora import adapter, arrays_of, close, factors, feeds, made, run

LAYERS = ["up", "twice", "down", "head"]


@pytest.fixture
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model, and the folder with ``plain.onnx``, ``lora.onnx`` and ``tuned.onnx_adapter``."""
    model, file = made(request.param, tmp_path)
    (tmp_path / "plain.onnx").write_bytes(file.read_bytes())
    htp_export.lora.insert(file, "**", rank=4, alpha=8, output=tmp_path / "lora.onnx")
    folder = adapter(tmp_path, "tuned", factors(model, LAYERS, 4, 1), 8)
    htp_export.lora.adapter(tmp_path / "lora.onnx", folder, tmp_path / "tuned.onnx_adapter")
    return model, tmp_path


PARTS = pytest.mark.parametrize("parts", ["dynamo", "torchscript"], indirect=True)


def inputs_of(file: Path) -> list[str]:
    return [value.name for value in onnx.load(file).graph.input]


def lora_of(file: Path) -> dict[str, float]:
    return read_lora({entry.key: entry.value for entry in onnx.load(file).metadata_props})


@pytest.mark.long
@PARTS
def test_an_extracted_layer_takes_its_adapter(parts):
    model, folder = parts
    x = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)
    for path in htp_export.load(folder / "lora.onnx").paths:  # the modules of the factors, too
        htp_export.extract(folder / "lora.onnx", path, folder / "part.onnx")
        onnx.checker.check_model(str(folder / "part.onnx"), full_check=True)
    htp_export.extract(folder / "lora.onnx", "up", folder / "up.onnx")
    assert inputs_of(folder / "up.onnx")[1:] == ["up.lora_A.weight", "up.lora_B.weight"]
    assert lora_of(folder / "up.onnx") == {"up": 2.0}
    [name, *_] = inputs_of(folder / "up.onnx")
    plain = run(folder / "up.onnx", {name: x})
    linear = model.up
    assert close(plain, x @ linear.weight.detach().numpy().T + linear.bias.detach().numpy())
    tuned = arrays_of({"up": factors(model, LAYERS, 4, 1)["up"]})
    wanted = plain + 2.0 * x @ tuned["up.lora_A.weight"].T @ tuned["up.lora_B.weight"].T
    assert close(run(folder / "up.onnx", {name: x, **tuned}), wanted)


@PARTS
def test_a_layer_that_is_spliced_back_takes_its_adapter(parts):
    model, folder = parts
    tuned = folder / "tuned.onnx_adapter"
    extracted = htp_export.extract(folder / "lora.onnx", "up", folder / "up.onnx")
    for part in (folder / "up.onnx", extracted):
        htp_export.splice(folder / "lora.onnx", "up", part, folder / "whole.onnx")
        assert inputs_of(folder / "whole.onnx") == inputs_of(folder / "lora.onnx")
        assert lora_of(folder / "whole.onnx") == lora_of(folder / "lora.onnx")
        assert close(run(folder / "whole.onnx"), run(folder / "plain.onnx"))
        assert close(
            run(folder / "whole.onnx", adapter_file=tuned),
            run(folder / "lora.onnx", adapter_file=tuned),
        )
    assert htp_export.verify(model, folder / "whole.onnx", (), feeds()).ok


@PARTS
def test_a_layer_without_adapters_takes_the_place_of_one_with_them_and_the_other_way_round(parts):
    model, folder = parts
    htp_export.extract(folder / "plain.onnx", "up", folder / "up.onnx")
    htp_export.splice(folder / "lora.onnx", "up", folder / "up.onnx", folder / "whole.onnx")
    assert [name for name in inputs_of(folder / "whole.onnx") if name.startswith("up.")] == []
    assert list(lora_of(folder / "whole.onnx")) == ["twice", "down", "head"]
    assert close(run(folder / "whole.onnx"), run(folder / "plain.onnx"))
    htp_export.extract(folder / "lora.onnx", "up", folder / "up.onnx")
    htp_export.splice(folder / "plain.onnx", "up", folder / "up.onnx", folder / "whole.onnx")
    assert inputs_of(folder / "whole.onnx")[1:] == ["up.lora_A.weight", "up.lora_B.weight"]
    assert lora_of(folder / "whole.onnx") == {"up": 2.0}
    assert htp_export.verify(model, folder / "whole.onnx", (), feeds()).ok


@PARTS
def test_each_stage_takes_the_adapters_of_its_layers(parts):
    model, folder = parts
    htp_export.partition(folder / "lora.onnx", 2, folder / "stages")
    stages = htp_export.load_partition(folder / "stages")
    [name] = stages.inputs
    taken = [each for stage in stages.stages for each in inputs_of(stage.file) if "lora" in each]
    assert sorted(taken) == sorted(
        each for each in inputs_of(folder / "lora.onnx") if "lora" in each
    )
    [found] = stages.run({name: feeds()["x"]}).values()
    assert close(found, run(folder / "plain.onnx"))
    tuned = arrays_of(factors(model, LAYERS, 4, 1))
    values: dict[str, Any] = {name: feeds()["x"].numpy(), **tuned}
    options = ort.SessionOptions()
    options.log_severity_level = 3
    for stage in stages.stages:
        session = ort.InferenceSession(str(stage.file), options, providers=["CPUExecutionProvider"])
        feed = {each: values[each] for each in inputs_of(stage.file)}
        values |= dict(zip(stage.outputs, session.run(list(stage.outputs), feed), strict=True))
    [output] = (values[each] for _, each in stages.outputs.values())
    assert close(output, run(folder / "lora.onnx", adapter_file=folder / "tuned.onnx_adapter"))


@BOTH
def test_each_module_of_a_model_with_adapters_is_verified_alone(exporter, tmp_path):
    model, file = made(exporter, tmp_path)
    htp_export.lora.insert(file, "**", rank=4, alpha=8, output=tmp_path / "lora.onnx")
    result = htp_export.verify(model, tmp_path / "lora.onnx", (), feeds(), isolated=True)
    assert result.ok, str(result)
