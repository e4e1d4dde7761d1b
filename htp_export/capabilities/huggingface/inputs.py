"""Example inputs for a transformers model, from its ``forward`` signature and its config."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.configs import find, nearest
from htp_export.capabilities.huggingface.processors import Processor
from htp_export.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["dynamic_shapes", "example_inputs", "named_parameters"]

_LENGTH = 16  # of texts, in tokens
_PADDING = 3  # of those, at the end: without padding, models make no mask in eager mode, and tracing one does
_SAMPLES = 16_000  # of sound: a second
_OPEN = 0  # a size that is to be as it is without a shape


@dataclass(frozen=True)
class _Spec:
    """A tensor to make: its shape, and its dtype by torch's name for it."""

    shape: tuple[int, ...]
    dtype: str

    def completed(self, name: str, usual: _Spec | None) -> _Spec:
        """The same, with the usual sizes in the place of those that are open."""
        if _OPEN not in self.shape:
            return self
        if usual is None or len(usual.shape) != len(self.shape):
            shown = [None if size == _OPEN else size for size in self.shape]
            raise InputError(f"input {name!r}: the config does not describe it; give all sizes of {shown}")
        sizes = zip(self.shape, usual.shape, strict=True)
        return _Spec(tuple(own if size == _OPEN else size for size, own in sizes), self.dtype)


def example_inputs(
    model: nn.Module,
    *,
    task: str | None = None,
    shapes: Mapping[str, Any] | None = None,
    seed: int = 0,
    batch: int = 1,
    processor: Processor | None = None,
) -> dict[str, torch.Tensor]:
    """Keyword arguments for one call of a transformers model, in the order of ``forward``'s signature.

    Texts are 16 tokens long, the last 3 of them padding, images as large as the image processor or the config says,
    sound is a second long or as long as the config says. Tokens are random without a tokenizer.

    Args:
        model: The model, or any module with a ``config`` and a ``main_input_name``.
        task: The task the model was made for; ``"feature-extraction"`` and others change nothing, and ``None`` neither:
            what is made follows ``forward``.
        shapes: Input → shape, as ``[2, 16]`` or as ``{"shape": [2, 16], "dtype": "int64"}``, for inputs that should be
            otherwise; None leaves an input out, and in a shape it stands for the usual size: ``[2, None]``. The others
            follow the batch and length of the main input.
        seed: Of the values. Torch's own generator is left as it was.
        batch: Examples in one call.
        processor: The tokenizer and the image processor of the model, from ``load_processor``.

    Raises:
        InputError: If ``shapes`` names what ``forward`` does not take or is no shape, or if ``forward`` needs an input
            that its config does not describe.

    Examples:
        >>> from htp_export.huggingface import load_model
        >>> model = load_model("vit", random_weights=True, overrides={"image_size": 32, "num_hidden_layers": 1})
        >>> {name: tuple(tensor.shape) for name, tensor in example_inputs(model).items()}
        {'pixel_values': (1, 3, 32, 32)}
    """
    import torch

    parameters = named_parameters(model)
    wanted = {name: _wanted(name, shape) for name, shape in (shapes or {}).items() if shape is not None}
    unknown = [name for name in shapes or {} if name not in parameters]
    if unknown:
        raise InputError(f"the model takes no input {unknown[0]!r}" + nearest(unknown[0], parameters, "inputs"))
    if any(_OPEN in spec.shape for spec in wanted.values()):
        usual = _Describer(model, parameters, {}, batch, processor).specs()
        wanted = {name: spec.completed(name, usual.get(name)) for name, spec in wanted.items()}
    specs = _Describer(model, parameters, wanted, batch, processor).specs()
    specs = {name: spec for name, spec in specs.items() if (shapes or {}).get(name, ()) is not None}
    missing = [name for name, spec in parameters.items() if spec.default is spec.empty and name not in specs]
    if missing:
        raise InputError(
            f"{type(model).__name__} needs {missing[0]!r}, which its config does not describe: give its shape"
        )
    if not specs:
        raise InputError(f"the config of {type(model).__name__} describes none of its inputs: give their shapes")
    generator = torch.Generator().manual_seed(seed)
    fill = _Filler(model, generator, processor)
    return {name: fill(name, specs[name]) for name in parameters if name in specs}


def dynamic_shapes(inputs: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Which dimensions of which inputs may vary; the same for ``dynamic_shapes`` and ``dynamic_axes`` of torch.

    ==========================  ====================================================================
    ``batch``                   the first dimension of every input
    ``sequence``                the second of texts and their masks; a decoder's is ``decoder_sequence``
    ``height``, ``width``       the last two of images
    ==========================  ====================================================================

    Args:
        inputs: The example inputs.
        names: Which of the names above.

    Returns:
        Input → dimension → name; an input of which nothing varies has an empty entry.

    Raises:
        InputError: If a name is not known, or no input has such a dimension.

    Examples:
        >>> import torch
        >>> dynamic_shapes({"input_ids": torch.ones(2, 8, dtype=torch.int64)}, ["batch", "sequence"])
        {'input_ids': {0: 'batch', 1: 'sequence'}}
    """
    dynamic: dict[str, dict[int, str]] = {name: {} for name in inputs}
    for axis in names:
        if axis not in _AXES:
            raise InputError(f"no dynamic axis {axis!r}; there are {', '.join(_AXES)}")
        places = {name: _AXES[axis](name, tensor) for name, tensor in inputs.items()}
        if all(place is None for place in places.values()):
            raise InputError(f"no input has an axis {axis!r}; the inputs are {', '.join(inputs)}")
        for name, place in places.items():
            if place is not None:
                decoder = axis == "sequence" and name.startswith("decoder_")
                dynamic[name][place] = "decoder_sequence" if decoder else axis
    return {name: dict(sorted(axes.items())) for name, axes in dynamic.items()}


def _batch_axis(name: str, tensor: torch.Tensor) -> int | None:
    return 0 if tensor.dim() else None


def _text_axis(name: str, tensor: torch.Tensor) -> int | None:
    is_text = tensor.dim() >= 2 and not tensor.is_floating_point() and not name.startswith("pixel")
    return 1 if is_text else None


def _height_axis(name: str, tensor: torch.Tensor) -> int | None:
    return tensor.dim() - 2 if name.startswith("pixel") and tensor.dim() >= 3 else None


def _width_axis(name: str, tensor: torch.Tensor) -> int | None:
    return tensor.dim() - 1 if name.startswith("pixel") and tensor.dim() >= 3 else None


_AXES: dict[str, Callable[[str, torch.Tensor], int | None]] = {
    "batch": _batch_axis,
    "sequence": _text_axis,
    "height": _height_axis,
    "width": _width_axis,
}


class _Describer:
    """What shape each input has that ``forward`` takes and the config describes."""

    def __init__(
        self,
        model: Any,
        parameters: Iterable[str],
        wanted: Mapping[str, _Spec],
        batch: int,
        processor: Processor | None,
    ) -> None:
        self.config, self.processor = model.config, processor or Processor()
        self.main = getattr(model, "main_input_name", "")
        self.modalities = getattr(model, "input_modalities", ()) or ()
        self.float = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
        self.parameters = frozenset(parameters)
        self.wanted = wanted = {name: self._typed(name, spec) for name, spec in wanted.items()}
        leading = wanted.get(self.main) or wanted.get("input_ids")
        self.batch = leading.shape[0] if leading and leading.shape else batch
        text = wanted.get("input_ids")
        longest = find(self._text_config, "max_position_embeddings") or _LENGTH + 2
        # Some count positions from behind the padding's: two fewer than there are.
        self.length = text.shape[-1] if text and text.shape else max(1, min(_LENGTH, longest - 2))

    def specs(self) -> dict[str, _Spec]:
        """Input → shape and dtype."""
        specs: dict[str, _Spec] = {}
        for name in ("input_ids", "pixel_values", "input_features", "input_values", "past_values"):
            spec = getattr(self, f"_{name}")() if name in self.parameters and self._needed(name) else None
            if spec is not None:
                specs[name] = spec
        text = self.wanted.get("input_ids") or specs.get("input_ids")
        if text is not None:
            if "attention_mask" in self.parameters:
                specs["attention_mask"] = text
            if "token_type_ids" in self.parameters and find(self._text_config, "type_vocab_size"):
                specs["token_type_ids"] = text
        if "decoder_input_ids" in self.parameters and getattr(self.config, "is_encoder_decoder", False):
            # As long as the text: some heads lay what is found in one over the other.
            specs["decoder_input_ids"] = _Spec((self.batch, self.length if text else _LENGTH // 2), "int64")
        return {**specs, **self.wanted}

    @property
    def _text_config(self) -> Any:
        get = getattr(self.config, "get_text_config", None)
        return get() if get is not None else self.config

    def _needed(self, name: str) -> bool:
        if name == self.main or self.main not in self.parameters:
            return True
        if name == "input_ids":
            return "text" in self.modalities and "decoder_input_ids" not in self.parameters
        # Where images or sounds take the places of special tokens, a text without those tokens comes with none.
        placed = find(self.config, "image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
        kind = "image" if name == "pixel_values" else "audio"
        return kind in self.modalities and placed is None and not getattr(self.config, "is_encoder_decoder", False)

    def _typed(self, name: str, spec: _Spec) -> _Spec:
        if spec.dtype:
            return spec
        whole = name.endswith(("_ids", "_mask", "_labels", "_positions")) or name in {"bbox", "labels", "timesteps"}
        return _Spec(spec.shape, "int64" if whole else self.float)

    def _input_ids(self) -> _Spec:
        return _Spec((self.batch, self.length), "int64")

    def _pixel_values(self) -> _Spec:
        size = self.processor.image_size or find(self.config, "image_size") or 224
        if isinstance(size, dict):
            size = (size.get("height", 224), size.get("width", 224))
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        channels = find(self.config, "num_channels", "in_channels", "in_chans") or 3
        frames = find(self.config, "num_frames")
        time = (frames,) if frames else ()
        return _Spec((self.batch, *time, channels, height, width), self.float)

    def _input_features(self) -> _Spec | None:
        mel, positions = find(self.config, "num_mel_bins"), find(self.config, "max_source_positions")
        if mel and positions:
            return _Spec((self.batch, mel, 2 * positions), self.float)  # the first layers halve the time
        channels = find(self.config, "input_feat_per_channel", "feature_projection_input_dim")
        return _Spec((self.batch, 128, channels), self.float) if channels else None

    def _input_values(self) -> _Spec:
        mel, longest = find(self.config, "num_mel_bins"), find(self.config, "max_length")
        if mel and longest and not find(self.config, "conv_kernel"):
            return _Spec((self.batch, longest, mel), self.float)  # a spectrogram
        channels = find(self.config, "audio_channels")
        return _Spec((self.batch, *((channels,) if channels else ()), _SAMPLES), self.float)

    def _past_values(self) -> _Spec | None:
        length, channels = find(self.config, "context_length"), find(self.config, "num_input_channels")
        return _Spec((self.batch, length, channels), self.float) if length and channels else None


class _Filler:
    """Values for an input: tokens within the vocabulary, masks with padding at the end, noise for all else."""

    def __init__(self, model: Any, generator: torch.Generator, processor: Processor | None) -> None:
        config = model.config
        self.generator, self.whole, self.processor = generator, config, processor or Processor()
        self.config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.decoder = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config

    def __call__(self, name: str, spec: _Spec) -> torch.Tensor:
        import torch

        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            return torch.randn(spec.shape, generator=self.generator).to(dtype)
        if name == "decoder_input_ids":
            return self._decoder_ids(spec.shape).to(dtype)
        if name.endswith("input_ids"):
            return self._ids(spec.shape).to(dtype)
        if name.endswith("mask"):
            mask = torch.ones(spec.shape, dtype=dtype)
            if name == "attention_mask" and spec.shape:
                mask[..., self._visible(spec.shape) :] = 0
            return mask
        if name == "token_type_ids":
            types = torch.zeros(spec.shape, dtype=dtype)
            types[..., spec.shape[-1] // 2 :] = min(1, (find(self.config, "type_vocab_size") or 1) - 1)
            return types
        return torch.zeros(spec.shape, dtype=dtype)

    @staticmethod
    def _visible(shape: Sequence[int]) -> int:
        return max(1, shape[-1] - _PADDING) if shape[-1] > 1 else 1

    def _random_ids(self, config: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Tokens that are none of the special ones, as far as the config names those."""
        import torch

        vocabulary = find(config, "vocab_size") or 2
        special = {token for kind in ("pad", "bos", "eos", "mask") for token in _special_tokens(config, kind)}
        usual = [token for token in range(min(3, vocabulary - 1), min(vocabulary, 10_000)) if token not in special]
        picked = torch.randint(0, len(usual) or 1, shape, generator=self.generator)
        return torch.tensor(usual or [0])[picked]

    def _ids(self, shape: tuple[int, ...]) -> torch.Tensor:
        vocabulary = find(self.config, "vocab_size") or 2
        text = self._text(self.config, shape, self._visible(shape) if shape else 0, special=True)
        if text is not None:
            return text
        ids = self._random_ids(self.config, shape)
        if not shape:
            return ids
        visible = self._visible(shape)
        for kind, place in (("eos", slice(visible - 1, visible)), ("pad", slice(visible, None))):
            token = next(iter(_special_tokens(self.config, kind)), -1)
            if 0 <= token < vocabulary:
                ids[..., place] = token
        return ids

    def _text(self, config: Any, shape: tuple[int, ...], visible: int, *, special: bool) -> torch.Tensor | None:
        """Tokens of texts, and padding after as many as are visible; None without a tokenizer that fits the model."""
        import torch

        if self.processor.tokenizer is None or not visible:
            return None
        vocabulary, rows = find(config, "vocab_size"), []
        known = (self.processor.padding, getattr(config, "pad_token_id", None))
        padding = next((token for token in known if token is not None), 0)
        for start in torch.randint(0, 1_000, (math.prod(shape[:-1]),), generator=self.generator).tolist():
            tokens = self.processor.tokens(visible, start, vocabulary, special=special)
            if tokens is None:
                return None
            rows.append([*tokens, *[padding] * (shape[-1] - visible)])
        return torch.tensor(rows).reshape(shape)

    def _decoder_ids(self, shape: tuple[int, ...]) -> torch.Tensor:
        text = self._text(self.decoder, shape, shape[-1] if shape else 0, special=False)
        ids = self._random_ids(self.decoder, shape) if text is None else text
        starts = (getattr(each, "decoder_start_token_id", None) for each in (self.whole, self.decoder))
        start = next((each for each in starts if isinstance(each, int)), None)
        if start is not None and 0 <= start < (find(self.decoder, "vocab_size") or start + 1):
            ids[..., 0] = start
        return ids


def _special_tokens(config: Any, kind: str) -> list[int]:
    """Tokens of one kind that a config names; a text may end with each of several tokens."""
    named = getattr(config, f"{kind}_token_id", None)
    return [token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)]


def named_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """What ``forward`` takes by name; ``*args`` and ``**kwargs`` are no names."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in variadic}


def _wanted(name: str, spec: Any) -> _Spec:
    """One entry of the user's shapes, checked."""
    import torch

    shape, dtype = (spec.get("shape"), spec.get("dtype", "")) if isinstance(spec, Mapping) else (spec, "")
    extra = set(spec) - {"shape", "dtype"} if isinstance(spec, Mapping) else set()
    if extra:
        raise InputError(f"input {name!r}: has {sorted(extra)[0]!r}; only 'shape' and 'dtype' are known")
    listed = shape if isinstance(shape, (list, tuple)) else ()
    sizes = [_OPEN if size is None else size for size in listed if size is None or (type(size) is int and size > 0)]
    if not sizes or len(sizes) < len(listed):
        raise InputError(f"input {name!r}: its shape is a list of positive numbers, not {shape!r}")
    if dtype and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise InputError(f"input {name!r}: torch has no dtype {dtype!r}")
    return _Spec(tuple(sizes), str(dtype))
