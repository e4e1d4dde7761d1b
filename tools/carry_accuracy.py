#!/usr/bin/env python3
"""Accuracy of the owners that `carry` finds for files of other exporters: the tables of docs/evidence.md.

    python tools/carry_accuracy.py torch            # torch.onnx.export's files, and what tools make of them
    python tools/carry_accuracy.py transformers     # files of transformers.exporters, without fusions and with them
    python tools/carry_accuracy.py genai            # files of ONNX Runtime GenAI's builder; needs onnxruntime-genai
    python tools/carry_accuracy.py torch --only BERT-base --show 20
    python tools/carry_accuracy.py nets             # all nets of tests/nets.py after tools, without any names

``torch``: tags are carried from an export by dynamo onto files of both exporters: the very same file, and one whose
graph has other operators, names and constants. The truth are the tags that htp_export writes when it exports the same
file, and those after a tool. The tags are removed; with ``--no-names`` the names of nodes and tensors, too. ``genai``:
the truth is written down below, by the names that the builder gives; `carry` runs with and without these names.
``nets``: a row is a tool and all files of both exporters; the truth are the tags that the file has after the tool, as
long as it has its names, and `carry` gets the file without names and tags.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

import htp_export
from htp_export.capabilities.huggingface.models import spread_parameters
from htp_export.format import tags

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.compare_models import MODELS

TORCH_MODELS = (
    "BERT-base",
    "DistilBERT",
    "GPT-2",
    "Llama",
    "ViT-B",
    "ResNet-50",
    "MobileNetV2",
    "Whisper-tiny encoder",
    "T5-small encoder",
    "CLIP",
)
Truth = Callable[[ir.Node], set[frozenset[str]] | None]
"""Node → the sets of owners that are true of it; None for a node that no module computes."""


@dataclass
class Score:
    """The nodes of one file.

    Attributes:
        exact: Nodes whose owners are the true ones.
        unknown: Nodes that `carry` calls unknown.
        too_many: Nodes that have the true owners, and others.
        disjoint: Nodes that have none of the true owners.
        fewer: Nodes that have some of the true owners.
        inserted: Nodes that no module computes: constants, and what a builder adds.
        files: How many files these are.
        seen: The wrong and unknown nodes, a line each.
    """

    exact: int = 0
    unknown: int = 0
    too_many: int = 0
    disjoint: int = 0
    fewer: int = 0
    inserted: int = 0
    files: int = 1
    seen: list[str] = field(default_factory=list)

    def add(self, other: Score, where: str) -> None:
        """Add the nodes of another file; ``where``: its name."""
        for count in COUNTS:
            setattr(self, count, getattr(self, count) + getattr(other, count))
        self.files += other.files
        self.seen += [where + node for node in other.seen]


def score(carried: htp_export.results.Carried, truth: Truth) -> Score:
    """Hold the tags against the truth."""
    result = Score()
    for node in carried.model.graph.all_nodes():
        said, expected = frozenset(tags.owners_of(node.metadata_props)), truth(node)
        reason = node.metadata_props[tags.REASON]
        if (
            expected is not None
            and node.op_type != "Constant"
            and said in expected
            and reason != "unknown"
        ):
            result.exact += 1
        elif expected is None or node.op_type == "Constant":
            result.inserted += 1
        else:
            kind = _kind(said, expected) if reason != "unknown" else "unknown"
            setattr(result, kind, getattr(result, kind) + 1)
            listed = " or ".join(str(sorted(owners)) for owners in expected)
            result.seen.append(
                f"{kind:8} {node.op_type} {node.name}: {sorted(said)} ({reason}), not {listed}"
            )
    return result


def _kind(said: frozenset[str], expected: set[frozenset[str]]) -> str:
    if any(said > owners for owners in expected):
        return "too_many"
    return "fewer" if any(said & owners for owners in expected) else "disjoint"


COUNTS = ("exact", "unknown", "too_many", "disjoint", "fewer", "inserted")


def line(name: str, found: Score) -> str:
    """A line of the table."""
    counts = [getattr(found, count) for count in COUNTS]
    return "| " + " | ".join(map(str, (name, sum(counts), *counts))) + " |"


HEADER = (
    "| file | nodes | exact | unknown | too many owners | disjoint | fewer owners | of no module |\n"
    + "|---" * 8
    + "|"
)


# --- files of torch.onnx.export ---


def tools() -> dict[str, Callable[[Any], Any]]:
    """What is made of the file."""
    made = htp_export.tools
    return {
        "as exported": lambda model: model,
        "OnnxSlim": lambda model: made.onnxslim(model).model,
        "onnxsim": lambda model: made.onnxsim(model).model,
        "onnxscript": lambda model: made.onnxscript(model).model,
        "ONNX Runtime, extended": lambda model: made.onnxruntime(model, level="extended").model,
        "float16": lambda model: made.float16(model, keep_io_types=True).model,
        "int8, dynamic": lambda model: made.quantize_dynamic(model).model,
        "int4, MatMulNBits": lambda model: made.matmul_nbits(model, block_size=32).model,
    }


def anonymous(model: ir.Model) -> None:
    """Rename nodes and tensors, but for inputs and outputs."""
    kept = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    for number, node in enumerate(model.graph.all_nodes()):
        node.name = f"n{number}"
        for place, value in enumerate(node.outputs):
            if value.name and value.name not in kept:
                value.name = f"t{number}_{place}"
    for number, value in enumerate(list(model.graph.initializers.values())):
        if value.name not in kept:
            model.graph.initializers.pop(str(value.name))
            value.name = f"w{number}"
            model.graph.initializers[value.name] = value


def torch_rows(only: str | None, names: bool) -> Iterator[tuple[str, Score]]:
    """Each model, each tool."""
    for name in TORCH_MODELS:
        if only not in (None, name):
            continue
        torch.manual_seed(0)
        model, inputs = MODELS[name]("small")
        model.eval()
        spread_parameters(model, torch.Generator().manual_seed(0), scale=0.1)
        with tempfile.TemporaryDirectory() as folder:
            original, file = Path(folder) / "original.onnx", Path(folder) / "file.onnx"
            htp_export.export(model, (), original, kwargs=inputs, verbose=False)
            htp_export.export(
                model, (), file, kwargs=inputs, dynamo=False, opset_version=17, verbose=False
            )
            for source, tool in ((source, tool) for source in (original, file) for tool in tools()):
                try:
                    tagged = htp_export.load(tools()[tool](source))
                except htp_export.HtpExportError as error:
                    print(f"{name}, {tool}: {error}", file=sys.stderr)
                    continue
                exporter = "dynamo" if source == original else "TorchScript"
                yield f"{name}, {exporter}, {tool}", _torch_score(tagged, original, inputs, names)


def _torch_score(
    tagged: htp_export.TaggedModel, original: Path, inputs: dict[str, Any] | None, names: bool
) -> Score:
    foreign = tagged.model.clone()
    if not names:
        anonymous(foreign)
    truths = [
        None if tagged.owners_of(node) == () else {frozenset(tagged.owners_of(node))}
        for node in tagged.model.graph.all_nodes()
    ]
    for node in foreign.graph.all_nodes():
        node.metadata_props.clear()
    foreign.metadata_props.clear()
    arguments = None
    if inputs is not None:
        names_of = [value.name for value in htp_export.load(original).model.graph.inputs]
        arguments = dict(zip(names_of, inputs.values(), strict=True))
    carried = htp_export.carry(original, foreign, data=arguments, require=0)
    for note in carried.notes:
        print(note, file=sys.stderr)
    expected = dict(zip(carried.model.graph.all_nodes(), truths, strict=True))
    return score(carried, expected.__getitem__)


# --- small nets after tools ---

NET_TOOLS = ("OnnxSlim", "ONNX Runtime, basic")


def nets_rows(only: str | None, names: bool) -> Iterator[tuple[str, Score]]:
    """Each tool: the nodes of all nets, exported by both exporters."""
    from tests.nets import EXPORTERS, NETS

    chosen = [(name, exporter) for name in NETS for exporter in EXPORTERS]
    made = tools() | {
        "ONNX Runtime, basic": lambda model: (
            htp_export.tools.onnxruntime(model, level="basic").model
        )
    }
    found = {tool: Score(files=0) for tool in NET_TOOLS}
    for name, exporter in chosen:
        net = NETS[name]
        if exporter in net.skip or only not in (None, name):
            continue
        model, inputs = net.build()
        options = net.export_options(exporter) | {"dynamo": exporter == "dynamo"}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            htp_export.export(model, (), file, kwargs=inputs, verbose=False, **options)
            for tool in NET_TOOLS:
                try:
                    one = _torch_score(htp_export.load(made[tool](file)), file, None, names)
                except htp_export.HtpExportError as error:
                    print(f"{name}, {exporter}, {tool}: {error}", file=sys.stderr)
                    continue
                found[tool].add(one, f"{name}, {exporter}: ")
    for tool, total in found.items():
        yield f"{tool}, {total.files} files", total


# --- files of transformers.exporters ---

TRANSFORMERS_MODELS = ("BERT-base", "GPT-2", "Llama")


def transformers_rows(only: str | None, names: bool) -> Iterator[tuple[str, Score]]:
    """Each model, without ``ort_fusions`` and with those for the CPU; the truth are the tags under `tagging`."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    for name in TRANSFORMERS_MODELS:
        if only not in (None, name):
            continue
        for fusions in (None, "cpu"):
            torch.manual_seed(0)
            model, inputs = MODELS[name]("small")
            model.eval()
            spread_parameters(model, torch.Generator().manual_seed(0), scale=0.1)
            with tempfile.TemporaryDirectory() as folder:
                original = Path(folder) / "original.onnx"
                htp_export.export(model, (), original, kwargs=inputs, verbose=False)
                with contextlib.redirect_stdout(io.StringIO()), htp_export.tagging():
                    made = OnnxExporter().export(
                        model, dict(inputs), OnnxConfig(dynamic=False, ort_fusions=fusions)
                    )
                made.save_pretrained(Path(folder) / "made")
                [file] = (Path(folder) / "made").glob("*.onnx")
                yield (
                    f"{name}, fusions: {fusions or 'none'}",
                    _torch_score(htp_export.load(file), original, inputs, names),
                )


# --- files of ONNX Runtime GenAI's builder ---

TEXT = {"vocab_size": 80, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}
TEXT |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GENAI_MODELS = {
    "llama": TEXT,
    "mistral": TEXT,
    "qwen2": TEXT,
    "qwen3": {**TEXT, "head_dim": 16},
    "gemma": {**TEXT, "head_dim": 16},
    "phi3": TEXT,
}
PRECISIONS = ("fp32", "fp16", "int4")


def build(model: Any, name: str, precision: str, folder: Path) -> Path:
    """The file that GenAI's builder writes for a model."""
    from onnxruntime_genai.models.builder import create_model, parse_extra_options
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    source, target = folder / "hf", folder / precision
    if not source.exists():
        model.save_pretrained(source)
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(80)}, unk_token="t0"))
        PreTrainedTokenizerFast(
            tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t0"
        ).save_pretrained(source)
    asked = (name, str(source), str(target), precision, "cpu", str(folder / "cache"))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        create_model(*asked, **parse_extra_options(*asked, []))
    return target / "model.onnx"


def genai_truth(
    name: str, layers: int, joined: dict[str, tuple[str, ...]]
) -> set[frozenset[str]] | None:
    """The owners of a node by the name that the builder gives it.

    Args:
        name: The name.
        layers: Number of layers.
        joined: Projection of the builder's file → the projections of transformers.
    """

    def sets(*owners: str) -> set[frozenset[str]]:
        return {frozenset(owners)}

    if "attn_mask_reformat" in name or "constant_nodes" in name or "rotemb_caches" in name:
        return None
    if name.startswith("/lm_head"):
        return sets("lm_head")
    if "/embed_tokens/" in name:
        return sets("model.embed_tokens")
    found = re.match(r"/model/layers\.(\d+)/(\w+)/(.*)", name)
    if found is None:
        return None
    layer, part, rest = int(found[1]), found[2], found[3]
    here, before = f"model.layers.{layer}", f"model.layers.{layer - 1}"
    if part == "final_norm_layernorm":
        return sets("model.norm") if "Skip" not in rest else sets(before, "model.norm")
    if part == "input_layernorm":
        return sets(f"{here}.{part}") if "Skip" not in rest else sets(before, f"{here}.{part}")
    if part == "post_attention_layernorm":
        return sets(here, f"{here}.{part}")
    if part == "attn":
        return _attention_truth(f"{here}.self_attn", rest, joined)
    for projection in ("gate_proj", "up_proj", "down_proj", "gate_up_proj"):
        if rest.startswith(projection):
            modules = frozenset(
                f"{here}.mlp.{module}" for module in joined.get(projection, (projection,))
            )
            # with the split
            return {modules, modules | {f"{here}.mlp"}} if projection in joined else {modules}
    act = next((word for word in joined.get("activation", ("act_fn",))), "act_fn")
    return sets(f"{here}.mlp.{act}") if rest.startswith("act_fn") else sets(f"{here}.mlp")


def _attention_truth(
    attention: str, rest: str, joined: dict[str, tuple[str, ...]]
) -> set[frozenset[str]]:
    first = rest.split("/")[0]
    if first in ("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj") and "repeat_kv" not in rest:
        modules = joined.get(first, (first,))
        owners = frozenset(f"{attention}.{module}" for module in modules)
        # with the split
        return (
            {owners, owners | {attention}} if first != "qkv_proj" and first in joined else {owners}
        )
    if first in ("q_norm", "k_norm"):
        norm = frozenset([f"{attention}.{first}"])
        return {norm, frozenset([attention])} if "Reshape" in rest else {norm}
    if "rotary" in first:  # it also reads the angles of the positions
        return {frozenset([attention]), frozenset([attention, "model.rotary_emb"])}
    return {frozenset([attention])}


def genai_rows(only: str | None, names: bool) -> Iterator[tuple[str, Score]]:
    """Each model, each precision."""
    from htp_export.huggingface import example_call, load_model

    for name, overrides in GENAI_MODELS.items():
        if only not in (None, name):
            continue
        task = "text-generation-with-past"
        model = load_model(name, task=task, random_weights=True, overrides=overrides)
        spread_parameters(model, torch.Generator().manual_seed(0), scale=0.2)
        with tempfile.TemporaryDirectory() as folder:
            original, call = Path(folder) / "original.onnx", example_call(model, task=task)
            htp_export.export(model, (), original, verbose=False, **call.options)
            names_of = dict(model.named_modules())
            joined = (
                {}
                if "model.layers.0.self_attn.qkv_proj" in names_of
                else {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
            )
            if "model.layers.0.self_attn.qkv_proj" in names_of:
                joined |= dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
                joined |= dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj",))
                joined["activation"] = ("activation_fn",)
            for precision in PRECISIONS:
                file = build(model, name, precision, Path(folder))
                yield (
                    f"{name}, {precision}",
                    _genai_score(file, original, call.inputs, joined, names),
                )


def _genai_score(
    file: Path, original: Path, inputs: Any, joined: dict[str, tuple[str, ...]], names: bool
) -> Score:
    foreign = htp_export.load(file).model
    truths = [genai_truth(node.name or "", 2, joined) for node in foreign.graph.all_nodes()]
    if not names:
        anonymous(foreign)
    carried = htp_export.carry(original, foreign, data=inputs, require=0)
    for note in carried.notes:
        print(note, file=sys.stderr)
    expected = dict(zip(carried.model.graph.all_nodes(), truths, strict=True))
    return score(carried, expected.__getitem__)


ROWS = {
    "torch": torch_rows,
    "nets": nets_rows,
    "transformers": transformers_rows,
    "genai": genai_rows,
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*ROWS])
    parser.add_argument("--only", help="one model")
    parser.add_argument(
        "--no-names", action="store_true", help="rename all nodes and tensors first"
    )
    parser.add_argument(
        "--show", type=int, default=0, help="nodes that are not exact, of each file"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    has_names = not options.no_names and options.what != "nets"
    rows = ROWS[options.what](options.only, has_names)
    total = Counter[str]()
    print(HEADER)
    for name, found in rows:
        print(line(name, found), flush=True)
        total.update({count: getattr(found, count) for count in COUNTS})
        for seen in found.seen[: options.show]:
            print("   ", seen)
    print(line("all", Score(**total)))


if __name__ == "__main__":
    main()
