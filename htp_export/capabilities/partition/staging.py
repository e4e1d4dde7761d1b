"""`partition`: a model in stages, cut between modules, so that each can run on its own machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from htp_export.capabilities.partition.balancing import Balance, balanced_cuts, weigh
from htp_export.capabilities.partition.chain import Border, Chain, stages_of
from htp_export.capabilities.partition.partitions import Partition
from htp_export.capabilities.partition.stage_folder import check_folder, write_folder
from htp_export.discovery import plug_in
from htp_export.errors import FileError, InputError
from htp_export.files.text_files import read_json, write_json
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, load


def genai_pipeline(file: Path) -> Callable[[Partition, Path], Partition]:
    """Return a function that writes the configuration of a pipeline for ONNX Runtime GenAI.

    GenAI's model type ``decoder-pipeline`` runs the stages one after another, passes tensors by
    name, and passes the cache to the stages that name it: ``src/models/decoder_only_pipeline.cpp``
    in https://github.com/microsoft/onnxruntime-genai.

    Token ids, sizes and sampling settings are copied from the whole model's ``genai_config.json``:
    only numbers and names of tensors, no paths. The tokenizer beside it is copied, too.

    Raises:
        FileError: The file is missing, or is not the configuration of a decoder.
    """
    if not file.is_file():
        raise FileError(
            file, "is missing; export the model with --genai, or give its genai_config.json"
        )
    whole = read_json(file)
    model = whole.get("model") if isinstance(whole, dict) else None
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict):
        raise FileError(file, "is no configuration of a decoder for ONNX Runtime GenAI")
    tensors = {key: decoder.get(key) for key in ("inputs", "outputs")}
    for named in tensors.values():
        if not isinstance(named, dict) or not all(type(name) is str for name in named.values()):
            raise FileError(file, "does not name the inputs and outputs of a decoder")
    model_settings = {"type": "decoder-pipeline", **_numbers(model)}
    decoder_settings = {**_numbers(decoder), **tensors}
    search = _numbers(whole.get("search"))

    def write(partition: Partition, folder: Path) -> Partition:
        """Write ``genai_config.json`` into the folder of written stages."""
        from htp_export.capabilities.huggingface.companions import copy_companions
        from htp_export.capabilities.huggingface.genai import GENAI_CONFIG

        for name, (number, stage_name) in partition.outputs.items():
            if stage_name != name:
                problem = f"output {name!r} of the model is no result of stage {number}"
                raise InputError(f"{problem}: ONNX Runtime GenAI cannot use it")
        stages = []
        for number, stage in enumerate(partition.stages):
            entry = {
                "filename": stage.files[0],
                "inputs": [*stage.inputs],
                "outputs": [*stage.outputs],
            }
            stages.append({f"stage{number}": entry})
        options: dict[str, Any] = {"log_id": "onnxruntime-genai", "provider_options": list[Any]()}
        for stage in partition.stages:
            options |= stage.session_config
        pipeline = {**decoder_settings, "session_options": options, "pipeline": stages}
        settings = dict(search)
        # Stages of files with shared buffers were not tried.
        if "past_present_share_buffer" in settings:
            settings["past_present_share_buffer"] = False
        config = {"model": {**model_settings, "decoder": pipeline}, "search": settings}
        write_json(folder / GENAI_CONFIG, config)
        copy_companions(file.parent, folder)
        return partition

    return write


def _numbers(settings: Any) -> dict[str, Any]:
    """The settings that are finite numbers, flags, or lists of these."""
    if not isinstance(settings, dict):
        return {}
    numbers = {}
    for name, value in settings.items():
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, int | float) and math.isfinite(item) for item in items):
            numbers[name] = value
    return numbers


_CROSSING = 0.01
"""Charge for a tensor between stages, relative to the squared weights of equal stages.

It is small, so that it decides only between stages that are nearly balanced.
"""

_CUT_MODULE = 0.02
"""Charge for a module that is cut, in the same units: borders between layers are preferred."""


@names_model_faults("model")
def partition(
    model: ModelSource,
    stages: int | Sequence[str],
    output: str | os.PathLike[str] | None = None,
    *,
    balance: Balance = "parameters",
    slack: float = 0.05,
    serve: str | None = None,
    genai_config: str | os.PathLike[str] | None = None,
) -> Partition:
    """Cut a model into stages that run one after another, each with consecutive whole modules.

    With a number of stages, the heaviest stage is as light as possible, or up to ``slack`` heavier
    if fewer modules are cut, fewer tensors pass between stages, or the other stages are more even.
    Every weight is in exactly one stage, and every node, except for cheap constants and sizes. A
    tensor may skip stages.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed. Weights are not loaded.
        stages: Number of stages, or the modules at which stages begin. The first stage begins with
            the model.
        output: A folder for ``stage0.onnx`` and so on, each with its external weights beside it,
            and ``manifest.json``. It is written completely or not at all. An existing partition is
            replaced.
        balance: ``"parameters"``: bytes of weights; ``"flops"``, for a model without open
            dimensions; or a number for each module with its descendants: a mapping, or a result
            of ``profile`` or ``cost``.
        slack: How much heavier the heaviest stage may be, as a fraction of the smallest possible
            weight.
        serve: Also write the configuration of an engine: ``"genai"``, the ``genai_config.json`` of
            a pipeline for ONNX Runtime GenAI, and the tokenizer; or a plug-in: ``"triton"``, a
            model repository with an ensemble in ``triton/``; ``"ray"``, a Ray Serve application,
            ``serve_app.py`` and ``serve.yaml``.
        genai_config: The ``genai_config.json`` of the model, for ``serve="genai"``; by default the
            one beside its file. It is required for an in-memory model.

    Returns:
        The stages, which can be run, and the tensors between them.

    Raises:
        UnknownModuleError: A named module is not in the model.
        InputError: There are too few places to cut, or no stage can begin at a named module; the
            message lists the places.
        FileError: The folder has other contents, or a file cannot be read or written; existing
            files are unchanged.
        UntaggedModelError: The model has no tags.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> found = partition(program, 2)
        >>> [stage.modules for stage in found.stages], [each.name for each in found.crossing]
        ([('0', '1'), ('2',)], ['relu'])
        >>> list(found.run({"input": torch.zeros(2, 4)}))
        ['linear_1']
    """
    write_extras = _extras(serve, model, genai_config)
    if serve is not None and output is None:
        raise InputError(f"serve={serve!r} writes files; name an output folder")
    if output is not None:
        check_folder(Path(output))
    tagged = load(model)
    tagged.select("**")  # raises the error of a model without tags
    chain = Chain(tagged)
    if isinstance(stages, int):
        starts = _balanced(chain, weigh(chain, balance), stages, slack)
    else:
        starts = _named(chain, stages)
    result = stages_of(chain, starts)
    if output is None:
        return result
    return write_folder(result, Path(output), write_extras)


def _extras(
    serve: str | None, model: ModelSource, genai_config: str | os.PathLike[str] | None
) -> Callable[[Partition, Path], Partition]:
    """Return a function that adds the configuration of an engine to written stages."""
    if serve is None:
        return lambda partition, folder: partition
    if serve != "genai":
        write_stages: Callable[[Partition, Path], Partition] = plug_in(
            "partition", serve
        ).write_stages
        return write_stages
    if genai_config is None and isinstance(model, str | os.PathLike):
        genai_config = Path(model).with_name("genai_config.json")
    if genai_config is None:
        raise InputError("genai_config is required for an in-memory model")
    return genai_pipeline(Path(genai_config))


def _balanced(chain: Chain, weights: Sequence[float], count: int, slack: float) -> list[int]:
    """Borders that balance the stages: between sequential modules, inside if these are few."""
    if isinstance(count, bool) or count < 1:
        raise InputError(f"a model has one stage or more, not {count}")
    if not 0 <= slack < float("inf"):
        raise InputError(f"slack is a fraction of a stage's weight, 0 or more, not {slack}")
    borders = [border for border in chain.borders if border.sequential or not border.cuts]
    if count > len(borders) + 1:
        borders = list(chain.borders)
    if count > len(borders) + 1:
        raise InputError(f"the model cannot be cut into {count} stages; {_possible(borders)}")
    charges = [_CROSSING * border.tensors + _CUT_MODULE * border.cuts for border in borders]
    return balanced_cuts(weights, [border.place for border in borders], charges, count, slack)


def _named(chain: Chain, modules: Sequence[str]) -> list[int]:
    """The places where the named modules begin."""
    if isinstance(modules, str):
        raise InputError(f"stages begin at a list of modules, not at one text: [{modules!r}]")
    begins: dict[int, str] = {}
    for path in modules:
        chain.tagged[path]  # raises an error for an unknown module
        if path not in chain.spans:
            raise InputError(
                f"no stage can begin at module {path!r}: it has no nodes of its own in the graph"
            )
        place = chain.spans[path][0]
        if place in begins:
            raise InputError(
                f"modules {begins[place]!r} and {path!r} begin at the same place; name one of them"
            )
        begins[place] = path
    places = {border.place for border in chain.borders}
    for place, path in begins.items():
        if place and place not in places:
            raise InputError(
                f"no stage can begin at module {path!r}: module {chain.astride(place)!r} runs before it and "
                f"after it; {_possible(chain.borders)}"
            )
    return sorted(place for place in begins if place)


def _possible(borders: Sequence[Border]) -> str:
    if not borders:
        return "there is no border at which it could be cut"
    return f"stages can begin before {', '.join(repr(border.module) for border in borders)}"
