"""The package without its extras: what works, and what names the extra that it needs.

The arguments are packages that count as missing. ``.ci/run`` runs this where only the wheel is
installed, test_extras.py where everything is. It writes into the current folder.
"""

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

find_spec = PathFinder.find_spec


def find_installed(name: str, path: Any = None, target: Any = None) -> Any:
    is_missing = name.partition(".")[0] in sys.argv[1:]
    return None if is_missing else find_spec(name, path, target)


def check_needs(extra: str, name: str, run: Callable[[], object]) -> None:
    """Check that a function names the extra that it needs."""
    from htp_export.errors import InputError

    try:
        run()
    except InputError as error:
        message = str(error)
    else:
        sys.exit(f"{name} ran without {extra}")
    if f'pip install "htp-export[{extra}]"' not in message:
        sys.exit(f"{name}: {message}")


def main() -> None:
    import torch

    import htp_export

    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3)
    net = torch.nn.Sequential(*layers).eval()
    args = (torch.randn(1, 3, 8, 8),)
    for dynamo in (True, False):
        file = f"net{int(dynamo)}.onnx"
        htp_export.export(net, args, file, dynamo=dynamo, verbose=False)
        assert len(htp_export.load(file)["0"].nodes) == 1
        htp_export.extract(file, "0", "part.onnx")
        htp_export.functions(file, ["**"], "nested.onnx")
        htp_export.optimize(file, output="small.onnx", level="fused")
        htp_export.quantize(file, "fp16", "half.onnx")
        htp_export.carry(file, "small.onnx", "carried.onnx")
        for look in (htp_export.cost, htp_export.nodes, htp_export.info):
            look(file)
        htp_export.view(file, "page.html")
        runs: dict[str, Callable[[], object]] = {
            "verify": lambda file=file: htp_export.verify(net, file, args),
            "compare": lambda file=file: htp_export.compare(file, "small.onnx"),
            "profile": lambda file=file: htp_export.profile(file),
            "quantize": lambda file=file: htp_export.quantize(file, "int8-dynamic", "int8.onnx"),
            "optimize": lambda file=file: htp_export.optimize(file, "checked.onnx", verify=True),
        }
        for name, run in runs.items():
            check_needs("ort", name, run)
    load = htp_export.huggingface.load_model
    check_needs("transformers", "load_model", lambda: load("bert", random_weights=True))
    assert not Path("int8.onnx").exists()
    print("the package works without its extras")


if __name__ == "__main__":
    PathFinder.find_spec = find_installed
    main()
