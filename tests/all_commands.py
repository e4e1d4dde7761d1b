"""Every command that reads a model file, with arguments that fit one small net."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.lora.test_lora import adapter, factors
from tests.nets import Holding

COMMANDS: dict[str, str] = {
    "info": "FILE",
    "tree": "FILE",
    "nodes": "FILE",
    "view": "FILE -o view.html",
    "cost": "FILE",
    "profile": "FILE --runs 1 --warmup 0 --threads 1",
    "verify": "FILE --entry tests.all_commands:example",
    "compare": "FILE FILE",
    "diff": "FILE FILE",
    "extract": "FILE first -o out.onnx",
    "splice": "FILE first PART -o out.onnx",
    "functions": "FILE first -o out.onnx",
    "functions --undo": "FILE -o out.onnx",
    "tap": "FILE first:out -o out.onnx",
    "steer": "FILE first:out -o out.onnx",
    "rename": "FILE -o out.onnx",
    "partition": "FILE 2 -o stages",
    "place": "FILE --rule .=cpu -o out.onnx",
    "place --show": "FILE",
    "optimize": "FILE -o out.onnx",
    "quantize": "FILE --rule first=int8-dynamic -o out.onnx",
    "quantize --plan-for": "nncf FILE --rule first=int8 -o out.json",
    "prune": "FILE --rule first=0.5 -o out.onnx",
    "sensitivity": "FILE --precision int8 --select first",
    "search": "FILE --choices int8 --trials 2 --select first",
    "bind": "FILE WEIGHTS -o out.onnx",
    "lora insert": "FILE first -o out.onnx",
    "lora fuse": "FILE ADAPTER -o out.onnx",
    "run": "onnxoptimizer FILE -o out.onnx",
    "carry": "FILE FILE -o out.onnx",
    "forensics": "FILE",
    "fingerprint": "FILE",
    "pipeline": "STEPS -m FILE -o out.onnx",
}
"""Name, or name and an option that makes it do another thing → arguments; capitals are files, see `companions`."""

WITHOUT_FILE = ("export", "lora adapter")

NAMES = {command.partition(" --")[0] for command in (*COMMANDS, *WITHOUT_FILE)}


class Net(Holding, first=nn.Linear(32, 32), act=nn.ReLU(), second=nn.Linear(32, 3)):
    """Two layers, the second of another size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


def example() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The net that files are exported from, with inputs: an entry."""
    torch.manual_seed(1)
    return Net().eval(), (torch.randn(2, 32),)


def companions(folder: Path) -> dict[str, str]:
    """Write the files that commands take besides the model: word → file."""
    import htp_export

    part, steps = folder / "part.onnx", folder / "steps.yaml"
    htp_export.export(nn.Linear(32, 32).eval(), (torch.randn(2, 32),), part, verbose=False)
    steps.write_text("[optimize, compare]", encoding="utf-8")
    save_file(example()[0].state_dict(), folder / "weights.safetensors")
    made = adapter(folder, "adapter", factors(example()[0], ["first"], 4, 1), 8)
    return {
        "PART": str(part),
        "STEPS": str(steps),
        "ADAPTER": str(made),
        "WEIGHTS": str(folder / "weights.safetensors"),
    }


def arguments(command: str, files: dict[str, Any]) -> list[str]:
    """What is typed: a command with its arguments of `COMMANDS`, or with its own."""
    typed = f"{command} {COMMANDS[command]}" if command in COMMANDS else command
    return [str(files.get(word, word)) for word in typed.split()]
