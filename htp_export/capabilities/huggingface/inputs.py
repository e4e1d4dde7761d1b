"""Example inputs for a transformers model, from its ``forward`` signature and its config."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from htp_export.capabilities.huggingface.configs import find, nearest
from htp_export.capabilities.huggingface.sources import Processor
from htp_export.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

_LENGTH = 16  # of texts, in tokens
# of those, at the end: without padding, models make no mask in eager mode, and tracing one does
_PADDING = 3
_SAMPLES = 16_000  # of sound: a second


class _Spec(NamedTuple):
    """A tensor to make: its shape, and its dtype by torch's name for it."""

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
    """Keyword arguments for one call of a transformers model, in the order of ``forward``'s signature.

    Texts are 16 tokens long, the last 3 of them padding, images as large as the image processor or
    the config says, sound is a second long or as long as the config says. Tokens are random without
    a tokenizer.

    Args:
        model: The model, or any module with a ``config`` and a ``main_input_name``.
        task: Changes nothing: what is made follows ``forward``.
        shapes: Input → shape, as ``[2, 16]`` or as ``{"shape": [2, 16], "dtype": "int64"}``, for
            inputs that should be otherwise; None leaves an input out, and in a shape it stands for
            the usual size: ``[2, None]``. The others follow the batch and length of the main input.
        seed: Of the values. Torch's own generator is left as it was.
        batch: Examples in one call.
        processor: The tokenizer and the image processor of the model, from ``load_processor``.

    Raises:
        InputError: If ``shapes`` names what ``forward`` does not take or is no shape, or if
            ``forward`` needs an input that its config does not describe.

    Examples:
        >>> from htp_export.huggingface import load_model
        >>> model = load_model("vit", random_weights=True, overrides={"image_size": 32, "num_hidden_layers": 1})
        >>> {name: tuple(tensor.shape) for name, tensor in example_inputs(model).items()}
        {'pixel_values': (1, 3, 32, 32)}
    """
    import torch

    processor, shapes = processor or Processor(), shapes or {}
    parameters = named_parameters(model)
    unknown = [name for name in shapes if name not in parameters]
    if unknown:
        raise InputError(
            f"the model takes no input {unknown[0]!r}" + nearest(unknown[0], parameters, "inputs")
        )
    usual = _Describer(model, {}, batch, processor).specs()
    wanted = {
        name: _wanted(name, shape, usual.get(name))
        for name, shape in shapes.items()
        if shape is not None
    }
    specs = _Describer(model, wanted, batch, processor).specs()
    specs = {
        name: specs[name]
        for name in parameters
        if name in specs and shapes.get(name, ()) is not None
    }
    missing = [
        name
        for name, spec in parameters.items()
        if spec.default is spec.empty and name not in specs
    ]
    if missing:
        problem = f"needs {missing[0]!r}, which its config does not describe: give its shape"
        raise InputError(f"{type(model).__name__} {problem}")
    if not specs:
        raise InputError(
            f"the config of {type(model).__name__} describes none of its inputs: give their shapes"
        )
    filled = _Filler(model.config, torch.Generator().manual_seed(seed), processor)
    return {name: filled(name, spec) for name, spec in specs.items()}


def named_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """What ``forward`` takes by name; ``*args`` and ``**kwargs`` are no names."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters
    return {
        name: parameter for name, parameter in parameters.items() if parameter.kind not in variadic
    }


def _wanted(name: str, spec: Any, usual: _Spec | None) -> _Spec:
    """One entry of the user's shapes, checked, with the usual sizes in the place of those that are open."""
    import torch

    given = spec if isinstance(spec, Mapping) else {"shape": spec}
    extra = sorted(set(given) - {"shape", "dtype"})
    if extra:
        raise InputError(f"input {name!r}: has {extra[0]!r}; only 'shape' and 'dtype' are known")
    shape, dtype = given.get("shape"), given.get("dtype", "")
    sizes = shape if isinstance(shape, (list, tuple)) else ()
    if not sizes or not all(size is None or (type(size) is int and size > 0) for size in sizes):
        raise InputError(f"input {name!r}: its shape is a list of positive numbers, not {shape!r}")
    if dtype and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise InputError(f"input {name!r}: torch has no dtype {dtype!r}")
    if None not in sizes:
        return _Spec(tuple(sizes), str(dtype))
    if usual is None or len(usual.shape) != len(sizes):
        raise InputError(
            f"input {name!r}: the config does not describe it; give all sizes of {list(sizes)}"
        )
    return _Spec(
        tuple(size or known for size, known in zip(sizes, usual.shape, strict=True)), str(dtype)
    )


def _text_config(config: Any, *, decoder: bool | None = None) -> Any:
    return config.get_text_config(decoder=decoder) if hasattr(config, "get_text_config") else config


class _Describer:
    """What shape each input has that ``forward`` takes and the config describes."""

    def __init__(
        self, model: Any, wanted: Mapping[str, _Spec], batch: int, processor: Processor
    ) -> None:
        self.config, self.text, self.processor = model.config, _text_config(model.config), processor
        self.parameters = named_parameters(model)
        self.main = getattr(model, "main_input_name", "")
        self.modalities = getattr(model, "input_modalities", ()) or ()
        self.float = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
        self.wanted = {
            name: _Spec(shape, dtype or self._dtype(name))
            for name, (shape, dtype) in wanted.items()
        }
        leading, text = self.wanted.get(self.main), self.wanted.get("input_ids")
        leading = leading or text
        self.batch = leading.shape[0] if leading else batch
        longest = find(self.text, "max_position_embeddings") or _LENGTH + 2
        # Some count positions from behind the padding's: two fewer than there are.
        self.length = text.shape[-1] if text else max(1, min(_LENGTH, longest - 2))

    def specs(self) -> dict[str, _Spec]:
        """Input → shape and dtype."""
        shapes = {
            "input_ids": lambda: (self.length,),
            "pixel_values": self._pixels,
            "input_features": self._features,
            "input_values": self._values,
            "past_values": self._past_values,
        }
        specs: dict[str, _Spec] = {}
        for name, shape_of in shapes.items():
            shape = shape_of() if name in self.parameters and self._needed(name) else None
            if shape is not None:
                specs[name] = _Spec((self.batch, *shape), self._dtype(name))
        text = self.wanted.get("input_ids") or specs.get("input_ids")
        if text is not None:
            specs["attention_mask"] = text
            if find(self.text, "type_vocab_size"):
                specs["token_type_ids"] = text
        if getattr(self.config, "is_encoder_decoder", False):
            # As long as the text: some heads lay what is found in one over the other.
            specs["decoder_input_ids"] = _Spec(
                (self.batch, self.length if text else _LENGTH // 2), "int64"
            )
        return {name: spec for name, spec in specs.items() if name in self.parameters} | self.wanted

    def _needed(self, name: str) -> bool:
        if name == self.main or self.main not in self.parameters:
            return True
        if name == "input_ids":
            return "text" in self.modalities and "decoder_input_ids" not in self.parameters
        # Where images or sounds take the places of special tokens, a text without those tokens
        # comes with none.
        placed = find(
            self.config,
            "image_token_id",
            "image_token_index",
            "audio_token_id",
            "audio_token_index",
        )
        kind = "image" if name == "pixel_values" else "audio"
        return (
            kind in self.modalities
            and placed is None
            and not getattr(self.config, "is_encoder_decoder", False)
        )

    def _dtype(self, name: str) -> str:
        whole = name.endswith(("_ids", "_mask", "_labels", "_positions")) or name in {
            "bbox",
            "labels",
            "timesteps",
        }
        return "int64" if whole else self.float

    def _pixels(self) -> tuple[int, ...]:
        size = self.processor.image_size or find(self.config, "image_size") or 224
        if isinstance(size, dict):
            size = (size.get("height", 224), size.get("width", 224))
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        frames = find(self.config, "num_frames")
        channels = find(self.config, "num_channels", "in_channels", "in_chans") or 3
        return (*((frames,) if frames else ()), channels, height, width)

    def _features(self) -> tuple[int, ...] | None:
        mel, positions = (
            find(self.config, "num_mel_bins"),
            find(self.config, "max_source_positions"),
        )
        if mel and positions:
            return (mel, 2 * positions)  # the first layers halve the time
        channels = find(self.config, "input_feat_per_channel", "feature_projection_input_dim")
        return (128, channels) if channels else None

    def _values(self) -> tuple[int, ...]:
        mel, longest = find(self.config, "num_mel_bins"), find(self.config, "max_length")
        if mel and longest and not find(self.config, "conv_kernel"):
            return (longest, mel)  # a spectrogram
        channels = find(self.config, "audio_channels")
        return (channels, _SAMPLES) if channels else (_SAMPLES,)

    def _past_values(self) -> tuple[int, ...] | None:
        length, channels = (
            find(self.config, "context_length"),
            find(self.config, "num_input_channels"),
        )
        return (length, channels) if length and channels else None


class _Filler:
    """Values for an input: tokens within the vocabulary, masks with padding at the end, noise for all else."""

    def __init__(self, config: Any, generator: torch.Generator, processor: Processor) -> None:
        self.whole, self.text, self.decoder = (
            config,
            _text_config(config),
            _text_config(config, decoder=True),
        )
        self.generator, self.processor = generator, processor

    def __call__(self, name: str, spec: _Spec) -> torch.Tensor:
        import torch

        shape, dtype = spec.shape, getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=self.generator).to(dtype)
        if name == "decoder_input_ids":
            return self._decoder_ids(shape).to(dtype)
        if name.endswith("input_ids"):
            return self._ids(shape).to(dtype)
        filled = torch.full(shape, 1 if name.endswith("mask") else 0, dtype=dtype)
        if name == "attention_mask":
            filled[..., _visible(shape) :] = 0
        elif name == "token_type_ids":
            filled[..., shape[-1] // 2 :] = min(1, (find(self.text, "type_vocab_size") or 1) - 1)
        return filled

    def _ids(self, shape: tuple[int, ...]) -> torch.Tensor:
        visible = _visible(shape)
        text = self._from_tokenizer(self.text, shape, visible, special=True)
        if text is not None:
            return text
        ids = self._random_ids(self.text, shape)
        for kind, place in (("eos", slice(visible - 1, visible)), ("pad", slice(visible, None))):
            token = next(iter(_special_tokens(self.text, kind)), -1)
            if 0 <= token < (find(self.text, "vocab_size") or 2):
                ids[..., place] = token
        return ids

    def _decoder_ids(self, shape: tuple[int, ...]) -> torch.Tensor:
        text = self._from_tokenizer(self.decoder, shape, shape[-1], special=False)
        ids = self._random_ids(self.decoder, shape) if text is None else text
        starts = (
            getattr(config, "decoder_start_token_id", None) for config in (self.whole, self.decoder)
        )
        start = next((token for token in starts if isinstance(token, int)), None)
        if start is not None and 0 <= start < (find(self.decoder, "vocab_size") or start + 1):
            ids[..., 0] = start
        return ids

    def _random_ids(self, config: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Tokens that are none of the special ones, as far as the config names those."""
        import torch

        vocabulary = find(config, "vocab_size") or 2
        special = {
            token
            for kind in ("pad", "bos", "eos", "mask")
            for token in _special_tokens(config, kind)
        }
        usual = [
            token
            for token in range(min(3, vocabulary - 1), min(vocabulary, 10_000))
            if token not in special
        ]
        picked = torch.randint(0, len(usual) or 1, shape, generator=self.generator)
        return torch.tensor(usual or [0])[picked]

    def _from_tokenizer(
        self, config: Any, shape: tuple[int, ...], visible: int, *, special: bool
    ) -> torch.Tensor | None:
        """Tokens of texts, and padding after as many as are visible; None without a tokenizer that fits the model."""
        import torch

        if self.processor.tokenizer is None:
            return None
        vocabulary, rows = find(config, "vocab_size"), []
        known = (
            getattr(source, "pad_token_id", None) for source in (self.processor.tokenizer, config)
        )
        padding = next((token for token in known if isinstance(token, int)), 0)
        for start in torch.randint(
            0, 1_000, (math.prod(shape[:-1]),), generator=self.generator
        ).tolist():
            tokens = self.processor.tokens(visible, start, vocabulary, special=special)
            if tokens is None:
                return None
            rows.append([*tokens, *[padding] * (shape[-1] - visible)])
        return torch.tensor(rows).reshape(shape)


def _visible(shape: tuple[int, ...]) -> int:
    """How many tokens of a text are no padding."""
    return max(1, shape[-1] - _PADDING)


def _special_tokens(config: Any, kind: str) -> list[int]:
    """Tokens of one kind that a config names; a text may end with each of several tokens."""
    named = getattr(config, f"{kind}_token_id", None)
    return [
        token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)
    ]


def dynamic_shapes(
    inputs: Mapping[str, torch.Tensor], names: Iterable[str]
) -> dict[str, dict[int, str]]:
    """Which dimensions of which inputs may vary; the same for ``dynamic_shapes`` and ``dynamic_axes`` of torch.

    Args:
        inputs: The example inputs.
        names: ``batch``, the first dimension of every input; ``sequence``, the second of texts and
            their masks, of a decoder ``decoder_sequence``; ``height`` and ``width``, the last two
            of images.

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
        places = {
            name: _places(name, tensor)[axis]
            for name, tensor in inputs.items()
            if axis in _places(name, tensor)
        }
        if not places:
            raise InputError(f"no input has an axis {axis!r}; the inputs are {', '.join(inputs)}")
        for name, place in places.items():
            decoder = axis == "sequence" and name.startswith("decoder_")
            dynamic[name][place] = "decoder_sequence" if decoder else axis
    return {name: dict(sorted(axes.items())) for name, axes in dynamic.items()}


_AXES = ("batch", "sequence", "height", "width")


def _places(name: str, tensor: torch.Tensor) -> dict[str, int]:
    """Name of an axis → its place in an input that has it."""
    rank, is_image = tensor.dim(), name.startswith("pixel")
    places = {"batch": 0} if rank else {}
    if rank >= 2 and not is_image and not tensor.is_floating_point():
        places["sequence"] = 1
    if rank >= 3 and is_image:
        places |= {"height": rank - 2, "width": rank - 1}
    return places
