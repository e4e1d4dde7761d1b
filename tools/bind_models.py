#!/usr/bin/env python3
"""`htp_export.bind` against new exports: the weights of another seed in every kind of descendant.

    python tools/bind_models.py                                # all models, both exporters, all steps: hours
    python tools/bind_models.py --models bert gpt2 --exporters dynamo --steps int4 fused

For each model, exporter and step: the stored tensors, those that `bind` computed, those whose entries it lists in
``unbound``, and those that are neither equal, bit for bit, to the file of a new export of the new weights with the
same step, nor listed. The last number has to be 0 everywhere. Models are small and have random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

import htp_export
from htp_export import tools
from htp_export.errors import HtpExportError
from htp_export.format.recipes import parameters_in
from htp_export.model.recipes import recipe_of

MODELS: Mapping[str, str] = {
    "bidirectional encoders": "bert distilbert roberta electra",
    "encoders with shared layers": "albert",
    "encoders with relative positions": "deberta-v2 mpnet",
    "encoders with other mixers": "fnet squeezebert",
    "GPT-2 and its relatives": "gpt2 gpt_neo gptj gpt_neox",
    "decoders with biases": "opt bloom falcon phi",
    "decoders with gates": "llama mistral qwen2 qwen3 gemma",
    "mixture of experts": "mixtral qwen2_moe",
    "state space": "mamba",
    "encoder-decoders": "t5 bart marian",
    "speech encoders": "wav2vec2 hubert",
    "speech decoders": "whisper",
    "vision transformers": "vit deit",
    "self-supervised vision": "dinov2",
    "windowed vision": "swin",
    "residual convolutions": "resnet",
    "modern convolutions": "convnext",
    "mobile convolutions": "mobilenet_v2 efficientnet",
    "segmentation": "segformer",
    "detection": "yolos",
    "image and text": "clip siglip",
    "time series": "patchtst",
}
"""Family → types of transformers."""

NAMES = tuple(name for names in MODELS.values() for name in names.split())
EXPORTERS = ("dynamo", "torchscript")

Arrays = dict[str, np.ndarray[Any, Any]]
Step = Callable[[Path, Path], object]


def seeded(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy of a model whose ``state_dict`` has random values of a seed, all of them different."""
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    with torch.no_grad():
        for name, tensor in changed.state_dict(keep_vars=True).items():
            if not tensor.is_floating_point() or tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            noise = torch.rand(tensor.shape, generator=generator)
            is_positive = "var" in name or "scale" in name
            tensor.copy_(0.5 + noise if is_positive else 0.4 * (noise - 0.45))
    return changed.eval()


def _inner(file: Path) -> str:
    """The path of a module with parameters that is not the whole model, and not a leaf if there is another."""
    tagged = htp_export.load(file)
    owned = [parameter.name.rpartition(".")[0] for parameter in (tagged.declared or {}).values()]
    parents = sorted(
        {path.rpartition(".")[0] for path in owned} - {""}, key=lambda each: each.count(".")
    )
    for path in [*reversed(parents), *owned]:
        if path and tagged[path].nodes and tagged[path].outputs:
            return path
    raise HtpExportError("no module has nodes of its own")


def _extract(file: Path, output: Path) -> object:
    return htp_export.extract(file, _inner(file), output)


def _lora(file: Path, output: Path) -> object:
    """LoRA inputs of linear layers, which transformers has in two classes."""
    kinds = {row.simple_class for row in htp_export.load(file).hierarchy.values()}
    selected = [f"class:{kind}" for kind in ("Linear", "Conv1D") if kind in kinds]
    if not selected:
        raise HtpExportError("the model has no linear layers")
    return htp_export.lora.insert(file, selected, output)


def _tap(file: Path, output: Path) -> object:
    return htp_export.tap(file, f"{_inner(file)}:out", output)


STEPS: Mapping[str, Step] = {
    "export": lambda file, output: htp_export.load(file).save(output),
    "exact": lambda file, output: htp_export.optimize(file, output),
    "tolerant": lambda file, output: htp_export.optimize(file, output, level="tolerant"),
    "fused": lambda file, output: htp_export.optimize(file, output, level="fused"),
    "fp16": lambda file, output: htp_export.quantize(file, "fp16", output),
    "int4": lambda file, output: htp_export.quantize(file, "int4", output),
    "int8-weights": lambda file, output: htp_export.quantize(file, "int8-weights", output),
    "int8-dynamic": lambda file, output: htp_export.quantize(file, "int8-dynamic", output),
    "prune": lambda file, output: htp_export.prune(file, {"**": 0.5}, output=output),
    "lora.insert": _lora,
    "rename": lambda file, output: htp_export.rename(file, output=output),
    "functions": lambda file, output: htp_export.functions(file, ["**"], output),
    "extract": _extract,
    "partition": lambda file, output: htp_export.partition(file, 2, output.with_suffix("")),
    "tap": _tap,
    "onnxruntime": lambda file, output: tools.onnxruntime(file, output, level="extended"),
    "onnxslim": lambda file, output: tools.onnxslim(file, output),
}
"""Name → the function that makes a descendant of a file."""

OF_OTHER_TOOLS = frozenset(("onnxruntime", "onnxslim"))


@dataclass(frozen=True)
class Outcome:
    """What `bind` made of one descendant.

    Attributes:
        tensors: The stored tensors of the file.
        bytes: Their size.
        computed: Those that `bind` computed.
        listed: Those that differ from a new export, and whose entries are in ``unbound``.
        listed_bytes: Their size.
        reasons: The reasons of ``unbound``.
        wrong: Those that differ, and are not listed.
    """

    tensors: int
    bytes: int
    computed: int
    listed: int
    listed_bytes: int
    reasons: tuple[str, ...]
    wrong: tuple[str, ...]


def stored(model: Any) -> dict[str, tuple[np.ndarray[Any, Any], tuple[str, ...]]]:
    """Stored tensor → its array, and the entries in its recipe; those of ``Constant`` nodes, too."""
    found = {}
    for graph in htp_export.load(model).model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                entries = tuple(parameters_in(recipe_of(value)))
                found[str(value.name)] = np.asarray(value.const_value.numpy()), entries
        for node in graph:
            if node.op_type == "Constant" and "value" in node.attributes:
                array = np.asarray(node.attributes["value"].as_tensor().numpy())
                found[f"Constant {node.outputs[0].name}"] = array, ()
    return found


def is_same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays are equal, bit for bit."""
    is_like = one.dtype == other.dtype and one.shape == other.shape
    return is_like and one.tobytes() == other.tobytes()


def outcome(file: Path, expected_file: Path, weights: Any, *, is_pruned: bool = False) -> Outcome:
    """Bind weights to a file, and compare it with the file of a new export."""
    bound = htp_export.bind(file, weights, strict=False)
    found, expected, before = stored(bound.model), stored(expected_file), stored(file)
    wrong = [*(found.keys() ^ expected.keys())]
    listed = listed_bytes = 0
    for name in found.keys() & expected.keys():
        array, entries = found[name]
        wanted = expected[name][0]
        if is_pruned and array.dtype.kind == "f":  # the zeros of the old weights stay
            wanted = np.where(before[name][0] == 0, before[name][0], wanted)
        if is_same(array, wanted):
            continue
        if set(entries) & set(bound.unbound) or f"initializer {name!r}" in bound.unbound:
            listed += 1
            listed_bytes += array.nbytes
        else:
            wrong.append(name)
    return Outcome(
        len(found),
        sum(array.nbytes for array, _ in found.values()),
        bound.tensors,
        listed,
        listed_bytes,
        tuple(dict.fromkeys(bound.unbound.values())),
        tuple(sorted(wrong)),
    )


class Pair:
    """The exports of a model with the weights of two seeds."""

    def __init__(self, name: str, exporter: str, folder: Path) -> None:
        # here, as tests of the steps need no transformers
        from tools.sweep_models import transformers_model

        torch.manual_seed(0)
        model, inputs = transformers_model(name)
        if getattr(getattr(model, "config", None), "use_cache", False):
            model.config.use_cache = False
        self.folder, self.inputs = folder, dict(inputs)
        self.models = [seeded(model, seed) for seed in (1, 2)]
        self.files = [folder / f"{seed}.onnx" for seed in (1, 2)]
        for each, file in zip(self.models, self.files, strict=True):
            htp_export.export(
                each, (), file, kwargs=dict(self.inputs), dynamo=exporter == "dynamo", verbose=False
            )

    def outcomes(self, step: str) -> Iterator[Outcome]:
        """Bind the second weights to the descendant of the first file: one outcome for each file of the step."""
        made = []
        for number, file in enumerate(self.files):
            folder = self.folder / f"{step} {number}"
            folder.mkdir()
            STEPS[step](file, folder / "made.onnx")
            made.append(sorted(folder.rglob("*.onnx")))
        assert [each.name for each in made[0]] == [each.name for each in made[1]]
        for file, expected in zip(*made, strict=True):
            if step == "prune":
                expected = self.files[1]
            yield outcome(file, expected, self.models[1], is_pruned=step == "prune")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """No output of exporters and tools."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def rows(names: Sequence[str], exporters: Sequence[str], steps: Sequence[str]) -> Iterator[str]:
    """The lines of the table."""
    for name in names:
        for exporter in exporters:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    with silent():
                        pair = Pair(name, exporter, Path(folder))
                except Exception as error:  # of torch, transformers or the exporter
                    yield f"| {name} | {exporter} | no export: {type(error).__name__}: {str(error)[:80]!r} |"
                    continue
                for step in steps:
                    try:
                        with silent():
                            found = [*pair.outcomes(step)]
                    except HtpExportError as error:
                        yield f"| {name} | {exporter} | {step} | not made: {str(error)[:150]} |"
                        continue
                    except Exception as error:
                        yield f"| {name} | {exporter} | {step} | FAILED {type(error).__name__}: {str(error)[:300]} |"
                        continue
                    counts = [
                        sum(getattr(each, field) for each in found)
                        for field in ("tensors", "computed", "listed")
                    ]
                    wrong = [tensor for each in found for tensor in each.wrong]
                    reasons = list(dict.fromkeys(why for each in found for why in each.reasons))
                    cells = [name, exporter, step, *map(str, counts), str(len(wrong))]
                    detail = "; ".join([*map(repr, wrong[:4]), *reasons[:2]])
                    yield f"| {' | '.join(cells)} | {detail} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=NAMES)
    parser.add_argument("--exporters", nargs="+", default=EXPORTERS, choices=EXPORTERS)
    parser.add_argument("--steps", nargs="+", default=[*STEPS], choices=[*STEPS])
    options = parser.parse_args()
    print("| model | exporter | step | tensors | computed | listed | wrong | |")
    print("|---|---|---|--:|--:|--:|--:|---|")
    for row in rows(options.models, options.exporters, options.steps):
        print(row, flush=True)


if __name__ == "__main__":
    main()
