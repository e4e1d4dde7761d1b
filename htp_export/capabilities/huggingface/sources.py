"""The files of a model that a user names, and facts about its inputs from the tokenizer and the image processor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.configs import apply_overrides, nearest
from htp_export.capabilities.huggingface.packed.checkpoints import is_gguf
from htp_export.errors import FileError, ModelSourceError, described, nearest_names
from htp_export.extras import required
from htp_export.files.text_files import read_json

_SECONDS = 5.0
"""Timeout of the hub: its own client retries for a minute, and then reports that there is no such model."""


_CHECKPOINT_SUFFIXES = (".bin", ".ckpt", ".pkl", ".pt", ".pth", ".safetensors")
"""Suffixes of files with weights alone."""


@dataclass(frozen=True)
class Source:
    """A model by the name that a user passes; the fields are arguments of `load_model`."""

    name: str
    random_weights: bool = False
    overrides: Mapping[str, object] = field(default_factory=dict)
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        required("transformers", f"loading {self.name!r}")

    @property
    def has_files(self) -> bool:
        """Whether it is a folder, a GGUF file or a hub id; a model type has no files."""
        return Path(self.name).is_dir() or is_gguf(self.name) or self._is_on_hub

    @property
    def _is_path(self) -> bool:
        return self.name.startswith((".", "/", "~")) or Path(self.name).exists()

    @property
    def _is_on_hub(self) -> bool:
        """Whether the hub has to be asked; other names are checked without a connection."""
        from transformers import CONFIG_MAPPING

        if self._is_path or self.name in CONFIG_MAPPING:
            return False
        # A name without an owner and with random weights is a misspelled model type.
        return "/" in self.name or not self.random_weights

    @cached_property
    def offline(self) -> str:
        """The reason why the hub cannot be reached, ``""`` if it can; the local cache may still have the files."""
        return _why_unreachable() if self._is_on_hub else ""

    @property
    def download(self) -> dict[str, Any]:
        """Options for transformers to find files."""
        options: dict[str, Any] = {"revision": self.revision}
        if self.offline:
            options["local_files_only"] = True
        return options

    @property
    def options(self) -> dict[str, Any]:
        """Options for transformers to load configs, models and tokenizers."""
        return {**self.download, "trust_remote_code": self.trust_remote_code}

    def file(self, name: str) -> str | None:
        """The path of a file of the model; None if it has no such file."""
        from transformers.utils.hub import cached_file

        path: str | None = cached_file(
            self.name, name, _raise_exceptions_for_missing_entries=False, **self.download
        )
        return path

    def folder(self, suffixes: tuple[str, ...], ignored_ends: tuple[str, ...]) -> Path | None:
        """The local folder, or the folder in the hub's cache with the files of these suffixes; None without files."""
        if not self._is_on_hub:
            return Path(self.name) if Path(self.name).is_dir() else None
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(
                self.name,
                revision=self.revision,
                allow_patterns=[f"*{suffix}" for suffix in suffixes],
                ignore_patterns=["*/*", *(f"*{end}" for end in ignored_ends)],
                local_files_only=bool(self.offline),
            )
        except Exception as error:  # the hub's client raises errors of several libraries
            raise ModelSourceError(
                self.name, f"its tokenizer and configs cannot be downloaded: {error}"
            ) from error
        return Path(folder)

    def config(self) -> Any:
        """The config of the model, with the overrides."""
        self._check_name()
        try:
            config = self._own_config()
        except FileError:
            raise
        except Exception as error:
            # transformers and its hub client raise errors of dozens of types, some without a text
            problem = f"no model found: {described(error, lines=2)}"
            if self.offline:
                problem = f"the hub cannot be reached ({self.offline}), and it is not in the cache of this machine"
            raise ModelSourceError(self.name, problem + self._hint) from error
        return apply_overrides(self.name, config, self.overrides)

    @property
    def _hint(self) -> str:
        """Similar model types, for the message about a name that may be a misspelled one."""
        from transformers import CONFIG_MAPPING

        if Path(self.name).is_dir() or "/" in self.name:
            return ""
        return nearest(self.name, CONFIG_MAPPING.keys(), "model types")

    def _check_name(self) -> None:
        """Refuse names of which no model can be loaded, before the hub is asked."""
        from transformers import CONFIG_MAPPING

        folder = Path(self.name)
        is_folder = folder.is_dir()
        if not is_folder and not is_gguf(self.name):
            self._refuse_file_name(folder)
        if is_folder and not (folder / "config.json").is_file():
            problem = "the folder has no config.json"
            if self.name in CONFIG_MAPPING:
                problem += (
                    "; it hides the model type of this name: use another folder, or rename it"
                )
            raise ModelSourceError(self.name, problem)
        if self._is_path and not is_folder and not is_gguf(self.name):
            problem = "is no folder; give a folder with a config.json, a hub id or a model type"
            raise ModelSourceError(self.name, problem)
        if self.has_files:
            return
        if self.name not in CONFIG_MAPPING:
            problem = "transformers has no such model type, and a hub id is owner/name"
            raise ModelSourceError(self.name, problem + self._hint)
        if not self.random_weights:
            problem = (
                "is a model type and has no weights; add --random-weights (random_weights=True), "
            )
            raise ModelSourceError(self.name, problem + "or name a hub id (owner/name) or a folder")

    def _refuse_file_name(self, path: Path) -> None:
        """Refuse the name of a file, so that no public host is asked for a misspelled one."""
        suffix = path.suffix.lower()
        if suffix in _CHECKPOINT_SUFFIXES:
            problem = "a checkpoint has weights and no code; name the code: --entry package.module:factory"
            raise ModelSourceError(self.name, problem)
        # Hub ids with a dot, such as ``owner/name-v1.5``, end in a number or have an owner.
        has_word_suffix = suffix[1:].isalpha()
        in_folder = self._is_path or len(path.parts) == 1 or path.parent.is_dir()
        if has_word_suffix and in_folder and not path.exists():
            beside = [file.name for file in path.parent.glob("*.onnx")]
            nearest = nearest_names(path.name, beside, count=1)
            hint = f"; nearest: {path.parent / nearest[0]}" if nearest else ""
            raise FileError(path, f"is missing{hint}")

    def _own_config(self) -> Any:
        """The config as the model has it."""
        from transformers import AutoConfig

        if is_gguf(self.name):
            from htp_export.capabilities.huggingface.packed.gguf_files import gguf_config

            return gguf_config(Path(self.name))
        if self.has_files:
            return AutoConfig.from_pretrained(self.name, **self.options)
        return AutoConfig.for_model(self.name)


def _why_unreachable() -> str:
    """The reason why the hub cannot be reached; ``""`` if it answers, with any status."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # The errors depend on the client's HTTP library, which changes.
        return f"{constants.ENDPOINT}: {error}"
    return ""


_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
_TEXT = (
    "The quick brown fox jumps over the lazy dog while a small boat sails along the quiet river and two old friends "
    "talk about the weather, the price of bread and the long way home"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Processor:
    """A tokenizer of transformers, and the height and width of preprocessed images; None if there are none.

    ``source`` is their origin, for messages.
    """

    source: str = ""
    tokenizer: Any = None
    image_size: tuple[int, int] | None = None

    def tokens(
        self, count: int, start: int, vocabulary: int | None, *, special: bool
    ) -> list[int] | None:
        """Tokens of an English text; None without a tokenizer, or if its tokens do not fit the model.

        Args:
            count: The number of tokens.
            start: The number of the first word: different numbers result in different texts.
            vocabulary: The size of the model's vocabulary, if it is known.
            special: Whether to add the special tokens around a text.
        """
        if self.tokenizer is None:
            return None
        words = _TEXT.split()
        begin = start % len(words)
        text = " ".join((words[begin:] + words[:begin]) * (1 + count // len(words)))
        # Truncated by the tokenizer, so that the special token at the end is not cut off.
        options = {"truncation": True, "max_length": count} if special else {}
        try:
            encoded = self.tokenizer(text, add_special_tokens=special, **options)
            ids = [int(token) for token in encoded["input_ids"]]
        except Exception as error:  # from the code of a model: some refuse plain text
            return self._refused(f"cannot encode a plain text ({described(error)})")
        if len(ids) < count:
            return self._refused(f"encodes {len(text)} characters as {len(ids)} tokens")
        largest = max(ids[:count], default=0)
        if vocabulary is not None and largest >= vocabulary:
            return self._refused(f"has the token {largest}, and the model has {vocabulary} tokens")
        return ids[:count]

    def _refused(self, problem: str) -> list[int] | None:
        """Log a problem of the tokenizer."""
        _log.warning("%s: the tokenizer %s; the example has random tokens", self.source, problem)
        return None


def load_processor(
    source: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overrides: Mapping[str, object] | None = None,
) -> Processor:
    """Load the tokenizer and the settings of the image processor of a model; both None for a model type.

    The arguments have the meaning of `load_model`. If the overrides change the size of images, the image
    processor is ignored. A file that cannot be read is ignored, with a warning in the log.

    Examples:
        >>> load_processor("bert")
        Processor(source='bert', tokenizer=None, image_size=None)
    """
    return processor_of(Source(source, True, overrides or {}, revision, trust_remote_code))


def processor_of(source: Source) -> Processor:
    """Like `load_processor`, for a source."""
    if not source.has_files:
        return Processor(source.name)
    is_resized = any(key.rpartition(".")[2] == "image_size" for key in source.overrides)
    tokenizer = _read(source, "tokenizer", _tokenizer)
    image_size = None if is_resized else _read(source, "image processor", _image_size)
    return Processor(source.name, tokenizer, image_size)


def _read(source: Source, part: str, read: Callable[[Source], Any]) -> Any:
    """Read a part of the files of a model; None, and a warning, if it cannot be read."""
    try:
        return read(source)
    except Exception as error:
        # transformers and the code of a model raise errors of dozens of types
        text = "%s: the %s cannot be read (%s); example inputs are from the config"
        _log.warning(text, source.name, part, described(error))
        return None


def _tokenizer(source: Source) -> Any:
    """The tokenizer; None if there are no files of one."""
    from transformers import AutoTokenizer

    if not any(source.file(name) for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(source.name, **source.options)


def _image_size(source: Source) -> tuple[int, int] | None:
    """Height and width of preprocessed images; None without an image processor."""
    for settings in image_settings(source.file):
        size = size_of_images(settings)
        if size is not None:
            return size
    return None


def image_settings(find: Callable[[str], str | Path | None]) -> Iterator[Mapping[str, Any]]:
    """The settings of image processors; ``find`` returns the path of a file by its name, None without one."""
    for name in _IMAGE_FILES:
        file = find(name)
        settings = None if file is None else read_json(file, plain=True)
        if isinstance(settings, Mapping):
            inner = settings.get("image_processor")
            yield inner if isinstance(inner, Mapping) else settings


def size_of_images(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of a square image after an image processor; None if its settings do not determine them.

    The image processor itself is not loaded: it needs torchvision or PIL, and only the size is
    used.
    """
    size = settings.get("crop_size") if settings.get("do_center_crop") else None
    if size is None and settings.get("do_resize", True):
        size = settings.get("size")
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        size = [size.get("height", edge), size.get("width", edge)]
    sides: list[Any] = list(size) if isinstance(size, (list, tuple)) else [size, size]
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        return None
    return sides[0], sides[1]
