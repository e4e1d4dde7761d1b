"""Exports for tests: files of nets, with the two exporters named by a word."""

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from _pytest.mark import ParameterSet

import htp_export
from tests.nets import EXPORTERS, NETS, spread
from tests.random_nets import RandomNet

BOTH = pytest.mark.parametrize("exporter", EXPORTERS)


def quick(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Cases for ``parametrize``: those chosen run always, the others where ``slow`` tests do."""
    slow = pytest.mark.slow
    return [
        case
        if case in chosen
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=slow)
        for case in cases
    ]


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``: one of ``step`` runs always, the others where ``slow`` tests do."""
    chosen = []
    for position, case in enumerate(cases):
        if position % step == 0:
            chosen.append(case)
            continue
        parts = case
        if not isinstance(case, ParameterSet):
            parts = pytest.param(*(case if isinstance(case, tuple) else (case,)))
        chosen.append(
            pytest.param(*parts.values, id=parts.id, marks=[*parts.marks, pytest.mark.slow])
        )
    return chosen


# torch._higher_order_ops.while_loop; torch.onnx.export alone fails alike
converts_loops = pytest.mark.xfail(
    torch.__version__ < "2.11",
    reason="torch 2.10 converts no body that returns one tensor: TypeError: 'Node' object is not iterable",
    raises=torch.onnx.OnnxExporterError,
    strict=True,
)


def open_sizes(exporter: str, **axes: dict[int, str]) -> dict[str, Any]:
    """Options of an export whose inputs have open sizes: input → axis → name."""
    return (
        {"dynamic_shapes": axes}
        if exporter == "dynamo"
        else {"dynamic_axes": axes, "input_names": [*axes]}
    )


def exported(
    model: torch.nn.Module, kwargs: dict[str, Any], exporter: str, folder: Path, **options: Any
) -> onnx.ModelProto:
    """The tagged file of a model, read by onnx."""
    path = folder / "model.onnx"
    htp_export.export(
        model, (), path, kwargs=kwargs, dynamo=exporter == "dynamo", verbose=False, **options
    )
    return onnx.load(str(path))


def exported_net(name: str, exporter: str, folder: Path, **options: Any) -> onnx.ModelProto:
    """The tagged file of a net of the registry."""
    model, kwargs = NETS[name].build()
    return exported(
        model, kwargs, exporter, folder, **NETS[name].export_options(exporter), **options
    )


@functools.cache
def _once(
    build: Callable[[], torch.nn.Module], inputs: Callable[[], dict[str, Any]], exporter: str
) -> tuple[torch.nn.Module, dict[str, bytes]]:
    torch.manual_seed(0)
    model = spread(build()).eval()
    with tempfile.TemporaryDirectory() as folder:
        exported(model, inputs(), exporter, Path(folder))
        return model, {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def exported_once(
    build: Callable[[], torch.nn.Module],
    inputs: Callable[[], dict[str, Any]],
    exporter: str,
    folder: Path,
) -> tuple[Any, Path]:
    """A net and its file ``model.onnx``, both of which a test may change; it is exported once in a process."""
    model, files = _once(build, inputs, exporter)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return copy.deepcopy(model), folder / "model.onnx"


def of_type(name: str, **overrides: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of a type of transformers with random weights, and inputs for it."""
    from htp_export.huggingface import example_inputs, load_model

    model = load_model(name, random_weights=True, overrides=overrides)
    return model, dict(example_inputs(model))


def metadata(node: onnx.NodeProto | onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time: the others find what it has made."""
    with lock.open("w") as file:
        with contextlib.suppress(ImportError):  # Windows has none
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class SharedFiles:
    """Files that many tests read and none may change, each exported once for all processes of a test run.

    Tests that change how torch exports, or that ignore warnings of exports, use ``exported_net``: what they export is
    not for others.

    Args:
        folder: Where the files are kept; every process of the run has the same.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def net(self, name: str, exporter: str) -> Path:
        """The tagged file of a net of the registry."""
        return self._once(f"{name}-{exporter}", lambda folder: exported_net(name, exporter, folder))

    def random_net(self, seed: int, exporter: str) -> Path:
        """The tagged file of a network of ``tests.random_nets``."""
        net = RandomNet(seed)
        options = net.export_options(exporter)
        return self._once(
            f"random-{seed}-{exporter}",
            lambda folder: exported(net, net.inputs(), exporter, folder, **options),
        )

    def decoder(self, name: str) -> Path:
        """The file of a decoder of ``tests.decoders``, with its cache, as ``example_calls`` has it."""
        from htp_export.huggingface import example_calls
        from tests.decoders import Programs, decoder

        def save(folder: Path) -> None:
            model = decoder(name)
            Programs(model, example_calls(model)).save(folder)

        return self._once(f"decoder-{name}", save)

    def _once(self, name: str, make: Callable[[Path], object]) -> Path:
        """``model.onnx`` of a folder that is made once."""
        made = self._folder / name
        self._folder.mkdir(exist_ok=True)
        with _alone(made.with_suffix(".lock")):
            if not made.exists():
                with tempfile.TemporaryDirectory(dir=self._folder) as parent:
                    own = Path(parent) / "made"
                    own.mkdir()
                    make(own)
                    # where there are no locks, another process may be first
                    with contextlib.suppress(OSError):
                        own.rename(made)
        return made / "model.onnx"

    def read(self, name: str, exporter: str) -> onnx.ModelProto:
        """The same, read by onnx; it may be changed."""
        return onnx.load(str(self.net(name, exporter)))


def tiny_bert(layers: int = 3) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A BERT, and its inputs, whose last two tokens are masked."""
    from transformers import BertConfig, BertModel

    size = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    model = spread(BertModel(BertConfig(vocab_size=100, max_position_embeddings=32, **size))).eval()
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[:, -2:] = 0
    return model, {"input_ids": torch.randint(3, 100, (1, 8)), "attention_mask": mask}
