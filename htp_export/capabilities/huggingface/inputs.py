"""Example inputs for a transformers model, from the signature of ``forward`` and the config."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from htp_export.capabilities.huggingface.configs import find, nearest
from htp_export.capabilities.huggingface.sources import Processor
from htp_export.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

_LENGTH = 16
"""Tokens of a text: short, for a fast example, and long enough for a few words."""

_PADDING = 3
"""Padding tokens at the end of a text: without any, models skip the mask in eager mode, but not in a trace."""

_SAMPLES = 16_000
"""Samples of sound: one second at the usual rate of speech models."""


class _Spec(NamedTuple):
    """Shape and dtype of a tensor, the dtype by torch's name."""

    shape: tuple[int, ...]
    dtype: str


def example_inputs(
    model: nn.Module,
    *,
    task: str | None = None,
    shapes: Mapping[str, Any] | None = None,
    seed: int = 0,
    batch: int = 1,
    processor: Processor | None = None,
) -> dict[str, torch.Tensor]:
    """Create keyword arguments for one call of a transformers model, in the order of ``forward``'s signature.

    Texts have 16 tokens, the last 3 of them padding. The image processor or the config decides the
    size of images. Sound lasts one second, or as long as in the config. Without a tokenizer, tokens
    are random.

    Args:
        model: The model, or any module with a ``config`` and a ``main_input_name``.
        task: Has no effect: the inputs follow ``forward``.
        shapes: Input → shape, ``[2, 16]`` or ``{"shape": [2, 16], "dtype": "int64"}``, for other
            shapes than the defaults. None omits an input; within a shape, None is the default size:
            ``[2, None]``. Other inputs follow the batch and length of the main input.
        seed: Seed of the values. Torch's own generator is not changed.
        batch: Number of examples.
        processor: The tokenizer and the image processor of the model, from ``load_processor``.

    Raises:
        InputError: If an entry of ``shapes`` is no parameter of ``forward`` or no shape, or if
            ``forward`` requires an input that the config does not describe.

    Examples:
        >>> from htp_export.huggingface import load_model
        >>> model = load_model("vit", random_weights=True, overrides={"image_size": 32, "num_hidden_layers": 1})
        >>> {name: tuple(tensor.shape) for name, tensor in example_inputs(model).items()}
        {'pixel_values': (1, 3, 32, 32)}
    """
    import torch

    processor, shapes = processor or Processor(), shapes or {}
    parameters = named_parameters(model)
    for name in shapes:
        if name not in parameters:
            hint = nearest(name, parameters, "inputs")
            raise InputError(f"the model takes no input {name!r}{hint}")
    defaults = _InputShapes(model, {}, batch, processor).specs()
    wanted = {}
    for name, shape in shapes.items():
        if shape is not None:
            wanted[name] = _wanted(name, shape, defaults.get(name))
    all_specs = _InputShapes(model, wanted, batch, processor).specs()
    specs: dict[str, _Spec] = {}
    for name, parameter in parameters.items():
        is_omitted = name in shapes and shapes[name] is None
        if name in all_specs and not is_omitted:
            specs[name] = all_specs[name]
        elif parameter.default is parameter.empty:
            problem = f"needs {name!r}, which its config does not describe: give its shape"
            raise InputError(f"{type(model).__name__} {problem}")
    if not specs:
        raise InputError(
            f"the config of {type(model).__name__} describes none of its inputs: give their shapes"
        )
    values = _InputValues(model.config, torch.Generator().manual_seed(seed), processor)
    return {name: values.of(name, spec) for name, spec in specs.items()}


def named_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Parameters of ``forward``, without ``*args`` and ``**kwargs``."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters
    return {
        name: parameter for name, parameter in parameters.items() if parameter.kind not in variadic
    }


def _wanted(name: str, spec: Any, default: _Spec | None) -> _Spec:
    """Check one entry of the user's shapes, and replace open sizes by default ones."""
    import torch

    entry = spec if isinstance(spec, Mapping) else {"shape": spec}
    extra = sorted(set(entry) - {"shape", "dtype"})
    if extra:
        raise InputError(f"input {name!r}: has {extra[0]!r}; only 'shape' and 'dtype' are known")
    shape, dtype = entry.get("shape"), entry.get("dtype", "")
    sizes = shape if isinstance(shape, (list, tuple)) else ()
    if not sizes or not all(map(_is_size, sizes)):
        raise InputError(f"input {name!r}: its shape is a list of positive numbers, not {shape!r}")
    if dtype and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise InputError(f"input {name!r}: torch has no dtype {dtype!r}")
    if None not in sizes:
        return _Spec(tuple(sizes), str(dtype))
    if default is None or len(default.shape) != len(sizes):
        raise InputError(
            f"input {name!r}: the config does not describe it; give all sizes of {list(sizes)}"
        )
    pairs = zip(sizes, default.shape, strict=True)
    return _Spec(tuple(size or default_size for size, default_size in pairs), str(dtype))


def _is_size(size: object) -> bool:
    """Whether an entry of a shape is open, or a positive integer."""
    return size is None or (type(size) is int and size > 0)


def _text_config(config: Any, *, decoder: bool | None = None) -> Any:
    """The config of the text model inside a model of several modalities; the config itself without one."""
    return config.get_text_config(decoder=decoder) if hasattr(config, "get_text_config") else config


class _InputShapes:
    """Shapes and dtypes of the inputs of ``forward`` that the config describes."""

    def __init__(
        self, model: Any, wanted: Mapping[str, _Spec], batch: int, processor: Processor
    ) -> None:
        self.config, self.text_config = model.config, _text_config(model.config)
        self.processor = processor
        self.parameters = named_parameters(model)
        self.main = getattr(model, "main_input_name", "")
        self.modalities = getattr(model, "input_modalities", ()) or ()
        self.is_encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
        self.float = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
        self.wanted: dict[str, _Spec] = {}
        for name, (shape, dtype) in wanted.items():
            self.wanted[name] = _Spec(shape, dtype or self._dtype(name))
        text = self.wanted.get("input_ids")
        main = self.wanted.get(self.main) or text
        self.batch = main.shape[0] if main else batch
        self.length = text.shape[-1] if text else self._default_length()

    def specs(self) -> dict[str, _Spec]:
        """Input → shape and dtype."""
        shapes: dict[str, Callable[[], tuple[int, ...] | None]] = {
            "input_ids": lambda: (self.length,),
            "pixel_values": self._pixels,
            "input_features": self._features,
            "input_values": self._values,
            "past_values": self._past_values,
        }
        specs: dict[str, _Spec] = {}
        for name, shape_of in shapes.items():
            shape = shape_of() if name in self.parameters and self._is_needed(name) else None
            if shape is not None:
                specs[name] = _Spec((self.batch, *shape), self._dtype(name))
        text = self.wanted.get("input_ids") or specs.get("input_ids")
        if text is not None:
            specs["attention_mask"] = text
            if find(self.text_config, "type_vocab_size"):
                specs["token_type_ids"] = text
        if self.is_encoder_decoder:
            # As long as the text: some heads select positions of one by positions of the other.
            length = self.length if text else _LENGTH // 2
            specs["decoder_input_ids"] = _Spec((self.batch, length), "int64")
        specs = {name: spec for name, spec in specs.items() if name in self.parameters}
        return specs | self.wanted

    def _default_length(self) -> int:
        """The usual length of a text, if the model has so many positions."""
        positions: int | None = find(self.text_config, "max_position_embeddings")
        if not positions:
            return _LENGTH
        # RoBERTa-like models start positions after the padding id, so two positions are not usable.
        return max(1, min(_LENGTH, positions - 2))

    def _is_needed(self, name: str) -> bool:
        """Whether the example has this input: the main input, or an input of another modality beside it."""
        if name == self.main or self.main not in self.parameters:
            return True
        if name == "input_ids":
            return "text" in self.modalities and "decoder_input_ids" not in self.parameters
        # A model may replace special tokens by images or sounds. The example text has no such
        # tokens, and therefore no image or sound.
        special_token = find(
            self.config,
            "image_token_id",
            "image_token_index",
            "audio_token_id",
            "audio_token_index",
        )
        if special_token is not None or self.is_encoder_decoder:
            return False
        return ("image" if name == "pixel_values" else "audio") in self.modalities

    def _dtype(self, name: str) -> str:
        """The dtype of an input by its name: integers for ids, masks and positions, else the model's."""
        is_integer = name.endswith(("_ids", "_mask", "_labels", "_positions"))
        if is_integer or name in {"bbox", "labels", "timesteps"}:
            return "int64"
        return self.float

    def _pixels(self) -> tuple[int, ...]:
        """Shape of an image, or of the frames of a video, without the batch."""
        # 224, the size of ImageNet's crops, is the default of most vision configs.
        size = self.processor.image_size or find(self.config, "image_size") or 224
        if isinstance(size, dict):
            size = (size.get("height", 224), size.get("width", 224))
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        channels = find(self.config, "num_channels", "in_channels", "in_chans") or 3
        frames = find(self.config, "num_frames")
        image = (channels, height, width)
        return (frames, *image) if frames else image

    def _features(self) -> tuple[int, ...] | None:
        """Shape of the features of sound, without the batch: ``[mel, time]``, or ``[time, channels]``."""
        mel = find(self.config, "num_mel_bins")
        positions = find(self.config, "max_source_positions")
        if mel and positions:
            return (mel, 2 * positions)  # the first layers halve the time
        channels = find(self.config, "input_feat_per_channel", "feature_projection_input_dim")
        # 128 frames of 10 ms are about a second, as for `_SAMPLES`.
        return (128, channels) if channels else None

    def _values(self) -> tuple[int, ...]:
        """Shape of sound, without the batch: samples, or a spectrogram."""
        mel, longest = find(self.config, "num_mel_bins"), find(self.config, "max_length")
        if mel and longest and not find(self.config, "conv_kernel"):
            return (longest, mel)  # a spectrogram
        channels = find(self.config, "audio_channels")
        return (channels, _SAMPLES) if channels else (_SAMPLES,)

    def _past_values(self) -> tuple[int, ...] | None:
        """Shape of a time series, without the batch."""
        length = find(self.config, "context_length")
        channels = find(self.config, "num_input_channels")
        return (length, channels) if length and channels else None


class _InputValues:
    """Values of inputs: tokens of the vocabulary, masks with padding at the end, and noise for other inputs."""

    def __init__(self, config: Any, generator: torch.Generator, processor: Processor) -> None:
        self.config = config
        self.text_config = _text_config(config)
        self.decoder_config = _text_config(config, decoder=True)
        self.generator, self.processor = generator, processor

    def of(self, name: str, spec: _Spec) -> torch.Tensor:
        """The values of one input."""
        import torch

        shape, dtype = spec.shape, getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=self.generator).to(dtype)
        if name == "decoder_input_ids":
            return self._decoder_ids(shape).to(dtype)
        if name.endswith("input_ids"):
            return self._ids(shape).to(dtype)
        values = torch.full(shape, 1 if name.endswith("mask") else 0, dtype=dtype)
        if name == "attention_mask":
            values[..., _visible(shape) :] = 0
        elif name == "token_type_ids":
            # The second half of the text is the second segment, if the model has two.
            types = find(self.text_config, "type_vocab_size") or 1
            values[..., shape[-1] // 2 :] = min(1, types - 1)
        return values

    def _ids(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Tokens of a text, an end token, and padding."""
        config, visible = self.text_config, _visible(shape)
        text = self._from_tokenizer(config, shape, visible, special=True)
        if text is not None:
            return text
        ids = self._random_ids(config, shape)
        vocabulary = find(config, "vocab_size") or 2
        positions = {"eos": slice(visible - 1, visible), "pad": slice(visible, None)}
        for kind, position in positions.items():
            token = next(iter(_special_tokens(config, kind)), -1)
            if 0 <= token < vocabulary:
                ids[..., position] = token
        return ids

    def _decoder_ids(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Tokens of a decoder, which begin with its start token."""
        config = self.decoder_config
        text = self._from_tokenizer(config, shape, shape[-1], special=False)
        ids = self._random_ids(config, shape) if text is None else text
        starts = [getattr(level, "decoder_start_token_id", None) for level in (self.config, config)]
        start = next((token for token in starts if isinstance(token, int)), None)
        if start is not None and 0 <= start < (find(config, "vocab_size") or start + 1):
            ids[..., 0] = start
        return ids

    def _random_ids(self, config: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Random tokens, without the special tokens that the config names."""
        import torch

        vocabulary = find(config, "vocab_size") or 2
        special: set[int] = set()
        for kind in ("pad", "bos", "eos", "mask"):
            special.update(_special_tokens(config, kind))
        # The first tokens are special in many vocabularies. Ten thousand are enough to choose from.
        first, end = min(3, vocabulary - 1), min(vocabulary, 10_000)
        usual = [token for token in range(first, end) if token not in special] or [0]
        indices = torch.randint(0, len(usual), shape, generator=self.generator)
        return torch.tensor(usual)[indices]

    def _from_tokenizer(
        self, config: Any, shape: tuple[int, ...], visible: int, *, special: bool
    ) -> torch.Tensor | None:
        """Tokens of texts, padded after ``visible`` tokens; None without a tokenizer that fits the model."""
        import torch

        tokenizer = self.processor.tokenizer
        if tokenizer is None:
            return None
        vocabulary, rows = find(config, "vocab_size"), []
        paddings = [getattr(source, "pad_token_id", None) for source in (tokenizer, config)]
        padding = next((token for token in paddings if isinstance(token, int)), 0)
        # Texts begin with the word of a random number: many more numbers than words.
        count = math.prod(shape[:-1])
        starts = torch.randint(0, 1_000, (count,), generator=self.generator)
        for start in starts.tolist():
            tokens = self.processor.tokens(visible, start, vocabulary, special=special)
            if tokens is None:
                return None
            rows.append([*tokens, *[padding] * (shape[-1] - visible)])
        return torch.tensor(rows).reshape(shape)


def _visible(shape: tuple[int, ...]) -> int:
    """The number of tokens of a text without the padding."""
    return max(1, shape[-1] - _PADDING)


def _special_tokens(config: Any, kind: str) -> list[int]:
    """Tokens of one kind that a config names; there may be several end tokens."""
    setting = getattr(config, f"{kind}_token_id", None)
    tokens = setting if isinstance(setting, list) else [setting]
    return [token for token in tokens if isinstance(token, int)]


def dynamic_shapes(
    inputs: Mapping[str, torch.Tensor], names: Iterable[str]
) -> dict[str, dict[int, str]]:
    """Name the dimensions of inputs that may vary, for torch's ``dynamic_shapes`` or ``dynamic_axes``.

    Args:
        inputs: The example inputs.
        names: ``batch``, the first dimension of every input; ``sequence``, the second of texts and
            their masks, of a decoder ``decoder_sequence``; ``height`` and ``width``, the last two
            of images.

    Returns:
        Input → dimension → name; empty for an input without such dimensions.

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
        dimensions = {}
        for name, tensor in inputs.items():
            dimension = _dimensions(name, tensor).get(axis)
            if dimension is not None:
                dimensions[name] = dimension
        if not dimensions:
            raise InputError(f"no input has an axis {axis!r}; the inputs are {', '.join(inputs)}")
        for name, dimension in dimensions.items():
            is_decoder = axis == "sequence" and name.startswith("decoder_")
            dynamic[name][dimension] = "decoder_sequence" if is_decoder else axis
    return {name: dict(sorted(axes.items())) for name, axes in dynamic.items()}


_AXES = ("batch", "sequence", "height", "width")


def _dimensions(name: str, tensor: torch.Tensor) -> dict[str, int]:
    """Name of an axis → dimension, for the axes that an input has."""
    rank, is_image = tensor.dim(), name.startswith("pixel")
    dimensions = {"batch": 0} if rank else {}
    if rank >= 2 and not is_image and not tensor.is_floating_point():
        dimensions["sequence"] = 1
    if rank >= 3 and is_image:
        dimensions |= {"height": rank - 2, "width": rank - 1}
    return dimensions
