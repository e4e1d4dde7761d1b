"""Taps hold what forward hooks in PyTorch see, at every path of every family, and steering is a hook that adds."""

import contextlib
import copy
import functools
import inspect
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.huggingface.genai import genai_config
from htp_export.format.leaves import named_tensors_in
from htp_export.huggingface import example_calls
from tests.decoders import decoder, prompt
from tests.exporting import quick
from tools.sweep_models import subjects

Hooked = dict[str, torch.Tensor]

LEVELS: tuple[Any, ...] = ("exact", "tolerant", "fused")


def seen_in(model: Any, kwargs: Mapping[str, Any]) -> Hooked:
    """What hooks see in one run."""
    with hooks(model) as seen, torch.no_grad():
        model(**copy.deepcopy(dict(kwargs)))
    return seen


@contextlib.contextmanager
def hooks(model: nn.Module) -> Iterator[Hooked]:
    """Place → what forward hooks see there: arguments that are tensors, and results."""
    seen: Hooked = {}
    counts, running = Counter[str](), defaultdict[str, list[int]](list)

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        number = counts[path]
        counts[path] += 1
        running[path].append(number)
        for name, value in (
            inspect.signature(module.forward).bind(*args, **kwargs).arguments.items()
        ):
            if isinstance(value, torch.Tensor):
                seen[f"{path}#{number}:in[{name}]"] = value.detach().clone()

    def after(path: str, _: nn.Module, __: Any, ___: Any, result: Any) -> None:
        number, given = (
            running[path].pop(),
            result.values() if isinstance(result, Mapping) else result,
        )
        leaves = (
            [*given]
            if isinstance(given, Iterable) and not isinstance(given, torch.Tensor)
            else [given]
        )
        for place, value in (
            enumerate(leaves) if all(isinstance(each, torch.Tensor) for each in leaves) else ()
        ):
            seen[f"{path}#{number}:out[{place}]"] = value.detach().clone()

    with contextlib.ExitStack() as handles:
        for path, module in model.named_modules():
            for register, note in (
                (module.register_forward_pre_hook, before),
                (module.register_forward_hook, after),
            ):
                handles.callback(register(functools.partial(note, path), with_kwargs=True).remove)
        yield seen


def session_of(model: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        htp_export.load(model).save(file)
        return onnxruntime.InferenceSession(file, options)


def present(tagged: htp_export.TaggedModel) -> dict[str, Any]:
    """Place with the number of its call and its name → what ``tensors`` says of it."""
    return {
        f"{each.path}#{each.call or 0}:{each.side}[{each.name}]": each
        for path in tagged.paths
        for each in tagged.tensors(path)
    }


def with_other_values(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the same types and shapes, with other elements."""

    def other(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
            return value
        return value * 0.5 + 0.1 if value.is_floating_point() else value.flip(-1)

    return {name: other(value) for name, value in kwargs.items()}


def held(
    model: Any, seen: Hooked, again: Hooked, feed: Mapping[str, Any], atol: float = 2e-4
) -> tuple[int, list[str]]:
    """How many places of a file hold what hooks saw, and those that are refused, each for a reason that is true.

    A module was merged with others, which the message names; or the tensor is the same in another run, ``again``.
    """
    tagged = htp_export.load(model)
    known = present(tagged)
    assert seen.keys() <= known.keys()
    refused = [place for place, each in known.items() if place in seen and each.problem]
    for place in refused:
        each, info = known[place], tagged.hierarchy[known[place].path]
        if info.fate.is_merged:
            assert info.fused_with, place
            assert all(repr(other) in each.problem for other in info.fused_with), each.problem
        elif info.fate.passes_on:
            assert "were merged" in each.problem, place
        elif not info.fate.is_needless:
            assert "constant" in each.problem, (place, each.problem)
            torch.testing.assert_close(seen[place], again[place], msg=f"{place}: {each.problem}")
    wanted = {place: each for place, each in known.items() if place in seen and not each.problem}
    places = {f"tap{k}": _escaped(each) for k, each in enumerate(wanted.values())}
    tapped = htp_export.tap(tagged, places)
    found = dict(zip(places, session_of(tapped.model).run(list(places), dict(feed)), strict=True))
    for name, place in zip(places, wanted, strict=True):
        expected = seen[place].numpy()
        if expected.dtype.kind == "f":
            scale = max(
                1.0, float(np.abs(np.nan_to_num(expected, posinf=0, neginf=0)).max(initial=0))
            )
            if scale > 1e30:  # a mask: -inf in its type
                continue
            np.testing.assert_allclose(
                found[name], expected, atol=atol * scale, rtol=2e-4, err_msg=place
            )
        else:
            np.testing.assert_array_equal(found[name], expected, err_msg=place)
    declared = {value.name: value for value in tapped.model.graph.outputs}
    for name, place in zip(places, wanted, strict=True):
        sizes = zip(declared[name].shape, seen[place].shape, strict=True)
        assert all(dim == size for dim, size in sizes if isinstance(dim, int)), place
    return len(wanted), refused


def _escaped(each: Any) -> str:
    number = "" if each.call is None else f"#{each.call}"
    path = f"re:{re.escape(each.path)}" if each.path else "."
    return f"{path}{number}:{each.side}[{each.name}]"


def feed_of(tagged: htp_export.TaggedModel, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    tensors = dict(named_tensors_in(kwargs))
    signature = tagged.signature("")
    assert signature is not None
    names = {tensor: argument for argument, tensor in signature.inputs.items() if tensor}
    inputs = [value.name for value in tagged.model.graph.inputs if not value.is_initializer()]
    return {name: tensors[names.get(name, name)].detach().numpy() for name in inputs}


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], tuple[nn.Module, dict[str, Any], Path]]:
    """Family and exporter → a model, its arguments and its file, each made once."""

    @functools.cache
    def of(family: str, exporter: str) -> tuple[nn.Module, dict[str, Any], Path]:
        torch.manual_seed(0)
        model, kwargs = subjects()[f"transformers/{family}"].build()
        for noise in ("noise_scale", "noise_scale_duration"):  # vits
            if hasattr(model, noise):
                setattr(model, noise, 0.0)
        file = tmp_path_factory.mktemp(family) / "model.onnx"
        try:
            htp_export.export(
                model, (), file, kwargs=dict(kwargs), dynamo=exporter == "dynamo", verbose=False
            )
        except Exception as error:
            pytest.skip(f"torch does not export it: {type(error).__name__}")
        return model, kwargs, file

    return of


FAMILIES = [
    "bert", "gpt2", "llama", "t5", "whisper", "vit", "resnet", "swin", "convnext", "clip",
    "wav2vec2", "mixtral", "mamba", "albert", "deberta-v2", "qwen3", "gemma2", "detr", "segformer", "vits", "patchtst",
]  # fmt: skip


CASES = [(family, exporter) for family in FAMILIES for exporter in ("dynamo", "torchscript")]


@pytest.mark.long
@pytest.mark.parametrize(("family", "exporter"), quick(CASES, ("bert", "dynamo")))
def test_a_tap_holds_what_a_hook_sees_at_every_path_before_and_after_optimize(
    family, exporter, made
):
    model, kwargs, program = made(family, exporter)
    seen, again = seen_in(model, kwargs), seen_in(model, with_other_values(kwargs))
    if not (verified := htp_export.verify(model, program, kwargs=kwargs)).ok:
        pytest.skip(f"torch exports another model, without this package too: {verified.summary}")
    feed = feed_of(htp_export.load(program), kwargs)
    count, refused = held(program, seen, again, feed)
    print(f"{family} {exporter}: {count} places, refused {len(refused)}", refused[:4])
    tree = htp_export.load(program).hierarchy
    varying = [place for place in refused if not torch.equal(seen[place], again[place])]
    assert exporter == "torchscript" or all(
        tree[place.rpartition("#")[0]].fate.is_merged for place in varying
    ), varying
    for level in LEVELS:
        optimized = htp_export.optimize(program, level=level)
        count, refused = held(optimized, seen, again, feed)
        print(f"   {level}: {count} places, refused {len(refused)}")
        assert count > len(refused)


@pytest.mark.parametrize(
    "name", quick(["llama", "gpt2", "qwen3", "gemma", "mistral", "phi"], "mistral")
)
def test_taps_of_a_decoder_with_a_cache_hold_in_prefill_and_decode_and_optimize_keeps_them(
    name, shared_files
):
    pytest.importorskip(
        "transformers.exporters", reason="transformers older than 5.23 has no exporters"
    )
    model = decoder(name)
    call, program = example_calls(model)["model"], htp_export.load(shared_files.decoder(name))
    [layer] = [path for path, _ in model.named_modules() if path.endswith((".layers.1", ".h.1"))]
    tapped = htp_export.tap(program, {"hidden_states": [f"{layer}:in", f"{layer}:out"]}, concat=-1)
    assert [value.name for value in program.model.graph.outputs] == list(call.output_names)
    sessions = [
        session_of(file)
        for file in (tapped.model, htp_export.optimize(tapped, level="fused").model)
    ]
    with call.adapted():
        for kwargs in call.runs.values():
            feed = feed_of(program, copy.deepcopy(kwargs))
            seen, again = (
                seen_in(call.model, kwargs),
                seen_in(call.model, with_other_values(kwargs)),
            )
            entering = next(
                value
                for place, value in seen.items()
                if place.startswith(f"{layer}#0:in[hidden_states")
            )
            expected = torch.cat([entering, seen[f"{layer}#0:out[0]"]], -1)
            for session in sessions:
                [found] = session.run(["hidden_states"], feed)
                np.testing.assert_allclose(found, expected, atol=1e-5)
            count, refused = held(program, seen, again, feed)
            assert count > 4 * len(refused)
        assert htp_export.verify(call.model, tapped, kwargs=copy.deepcopy(kwargs)).ok


@pytest.mark.slow
def test_genai_gives_the_hidden_states_of_prefill_and_of_each_step(shared_files, tmp_path):
    pytest.importorskip(
        "transformers.exporters", reason="transformers older than 5.23 has no exporters"
    )
    genai: Any = pytest.importorskip(
        "onnxruntime_genai", reason="onnxruntime-genai is not installed"
    )
    model = decoder("mistral")
    # by a vector that nobody gives
    steered = htp_export.steer(shared_files.decoder("mistral"), "model.layers.0:out")
    places = ["model.layers.1:in", "model.layers.1:out"]
    tapped = htp_export.tap(steered, {"hidden_states": places}, tmp_path / "model.onnx", concat=-1)
    config = genai_config(tapped.model, model.config, model.generation_config)
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    loaded = genai.Model(str(tmp_path))
    settings = genai.GeneratorParams(loaded)
    settings.set_search_options(max_length=12, min_length=12)
    generator = genai.Generator(loaded, settings)
    generator.append_tokens(prompt()[0].astype(np.int32))
    for length in (None, -1):
        generator.generate_next_token()
        seen = seen_in(
            model, {"input_ids": torch.tensor([[*map(int, generator.get_sequence(0)[:-1])]])}
        )
        taken = [seen["model.layers.1#0:in[hidden_states]"], seen["model.layers.1#0:out[0]"]]
        found = generator.get_output("hidden_states")
        np.testing.assert_allclose(
            found[:, length:], torch.cat(taken, -1).numpy()[:, length:], atol=1e-4
        )


# --- steer ------------------------------------------------------------------------------------------------


STEERED = [(level, exporter) for level in (None, *LEVELS) for exporter in ("dynamo", "torchscript")]


@pytest.mark.parametrize(("level", "exporter"), quick(STEERED, (None, "dynamo")))
def test_steering_is_a_hook_that_adds_and_zero_without_a_vector(exporter, level, made):
    model, kwargs, program = made("bert", exporter)
    places = [
        "encoder.layer.0:out",
        "encoder.layer.1:in",
        "encoder.layer.1.output.dense:out",
        "pooler:in",
    ]
    steered = htp_export.steer(program, places)
    assert htp_export.verify(model, steered, kwargs=kwargs).ok
    if level is not None:
        steered = htp_export.load(htp_export.optimize(steered, level=level).model)
    feed = feed_of(htp_export.load(program), kwargs)
    session = session_of(steered.model)
    plain = session_of(program).run(None, feed)
    for one, other in zip(plain, session.run(None, feed), strict=True):
        np.testing.assert_allclose(one, other, atol=0 if level is None else 1e-3)
    vectors = {
        each.name: np.random.default_rng(1).normal(size=each.shape).astype(np.float32)
        for each in session.get_overridable_initializers()
    }
    assert list(vectors) == [f"{place}.steer" for place in places]
    with contextlib.ExitStack() as handles:
        for place in places:
            path, _, side = place.partition(":")
            module, vector = model.get_submodule(path), torch.from_numpy(vectors[f"{place}.steer"])
            if side == "out":
                handle = module.register_forward_hook(lambda _m, _a, result, v=vector: result + v)
            else:
                handle = module.register_forward_pre_hook(
                    lambda _m, args, v=vector: (args[0] + v, *args[1:])
                )
            handles.callback(handle.remove)
        with hooks(model) as seen, torch.no_grad():
            expected = model(**kwargs)
    found = session.run(None, {**feed, **vectors})
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4)
    assert np.abs(found[0] - plain[0]).max() > 0.01
    if level is None:
        tapped = htp_export.tap(steered, ["encoder.layer.0:out", "encoder.layer.1:in"])
        values = session_of(tapped.model).run(
            [each.name for each in tapped.tensors], {**feed, **vectors}
        )
        np.testing.assert_allclose(values[0], seen["encoder.layer.0#0:out[0]"], atol=1e-4)
