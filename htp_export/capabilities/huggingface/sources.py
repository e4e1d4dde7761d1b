"""Where the files of a model are that a user names, and what its tokenizer and image processor say about its inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.configs import apply_overrides, nearest
from htp_export.capabilities.huggingface.packed.checkpoints import is_gguf
from htp_export.errors import FileError, ModelSourceError, described
from htp_export.files.text_files import read_json

_SECONDS = 5.0
"""To wait for the hub: its own client retries for a minute, and then reports that there is no such model."""


@dataclass(frozen=True)
class Source:
    """A model as a user names it; the fields are those of `load_model`."""

    name: str
    random_weights: bool = False
    overrides: Mapping[str, object] = field(default_factory=dict)
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def has_files(self) -> bool:
        """Whether it is a folder, a GGUF file or a hub id; a model type has no files."""
        return Path(self.name).is_dir() or is_gguf(self.name) or self._is_on_hub

    @property
    def _is_path(self) -> bool:
        return self.name.startswith((".", "/", "~")) or Path(self.name).exists()

    @property
    def _is_on_hub(self) -> bool:
        """Whether the hub has to be asked; what is wrong with other names is said without it."""
        from transformers import CONFIG_MAPPING

        return (
            not self._is_path
            and self.name not in CONFIG_MAPPING
            and ("/" in self.name or not self.random_weights)
        )

    @cached_property
    def offline(self) -> str:
        """Why the hub, which has the files, cannot be reached; the cache of this machine may have them, too."""
        return _why_unreachable() if self._is_on_hub else ""

    @property
    def download(self) -> dict[str, Any]:
        """The options with which transformers finds files."""
        return {"revision": self.revision, **({"local_files_only": True} if self.offline else {})}

    @property
    def options(self) -> dict[str, Any]:
        """The options with which transformers loads configs, models and tokenizers."""
        return {**self.download, "trust_remote_code": self.trust_remote_code}

    def file(self, name: str) -> str | None:
        """The path of a file of the model; None if it has no such file."""
        from transformers.utils.hub import cached_file

        path: str | None = cached_file(
            self.name, name, _raise_exceptions_for_missing_entries=False, **self.download
        )
        return path

    def folder(self, suffixes: tuple[str, ...], ignored_ends: tuple[str, ...]) -> Path | None:
        """The local folder, or the one in the cache of the hub with the files of these suffixes; None without files."""
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
        except Exception as error:  # the hub's client raises kinds of several libraries
            raise ModelSourceError(
                self.name, f"its tokenizer and configs cannot be had: {error}"
            ) from error
        return Path(folder)

    def config(self) -> Any:
        """The config of the model, with the overrides."""
        from transformers import CONFIG_MAPPING, AutoConfig

        folder = Path(self.name)
        is_folder = folder.is_dir()
        if is_folder and not (folder / "config.json").is_file():
            raise ModelSourceError(self.name, "the folder has no config.json")
        if self._is_path and not is_folder and not is_gguf(self.name):
            problem = "is no folder; give a folder with a config.json, a hub id or a model type"
            raise ModelSourceError(self.name, problem)
        hint = (
            ""
            if is_folder or "/" in self.name
            else nearest(self.name, CONFIG_MAPPING.keys(), "model types")
        )
        if not self.has_files:
            if self.name not in CONFIG_MAPPING:
                problem = f"transformers has no such model type, and a hub id is owner/name{hint}"
                raise ModelSourceError(self.name, problem)
            if not self.random_weights:
                problem = "is a model type and has no weights; add --random-weights (random_weights=True), "
                raise ModelSourceError(
                    self.name, problem + "or name a hub id (owner/name) or a folder"
                )
        try:
            if is_gguf(self.name):
                from htp_export.capabilities.huggingface.packed.gguf_files import gguf_config

                config = gguf_config(folder)
            elif self.has_files:
                config = AutoConfig.from_pretrained(self.name, **self.options)
            else:
                config = AutoConfig.for_model(self.name)
        except FileError:
            raise
        except Exception as error:
            # transformers and its hub client raise dozens of kinds, some of them bare
            problem = f"no model found: {described(error, lines=2)}"
            if self.offline:
                problem = f"the hub cannot be reached ({self.offline}), and it is not in the cache of this machine"
            raise ModelSourceError(self.name, problem + hint) from error
        return apply_overrides(self.name, config, self.overrides)


def _why_unreachable() -> str:
    """Why the hub cannot be reached; ``""`` if it answers, with any status."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # the client has changed its HTTP library, and with it the errors
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
    """A tokenizer of transformers, and height and width of the images that the image processor makes, or None.

    The source is where they come from, for messages.
    """

    source: str = ""
    tokenizer: Any = None
    image_size: tuple[int, int] | None = None

    def tokens(
        self, count: int, start: int, vocabulary: int | None, *, special: bool
    ) -> list[int] | None:
        """So many tokens of an English text; None if there is no tokenizer, or its tokens are not those of the model.

        The text begins with the word of a number: different numbers give different texts. The
        vocabulary is the number of tokens that the model knows, if that is known. With ``special``,
        those that are put around a text are there.
        """
        if self.tokenizer is None:
            return None
        words = _TEXT.split()
        begin = start % len(words)
        text = " ".join((words[begin:] + words[:begin]) * (1 + count // len(words)))
        options = {"truncation": True, "max_length": count} if special else {}
        try:
            ids = [
                int(token)
                for token in self.tokenizer(text, add_special_tokens=special, **options)[
                    "input_ids"
                ]
            ]
        except Exception as error:  # the code of a model: some take no plain text
            return self._refused(f"makes no tokens of a plain text ({described(error)})")
        if len(ids) < count:
            return self._refused(f"makes {len(ids)} tokens of a text of {len(text)} characters")
        largest = max(ids[:count], default=0)
        if vocabulary is not None and largest >= vocabulary:
            return self._refused(f"has the token {largest}, and the model has {vocabulary} tokens")
        return ids[:count]

    def _refused(self, problem: str) -> list[int] | None:
        _log.warning("%s: the tokenizer %s; the example has random tokens", self.source, problem)
        return None


def load_processor(
    source: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overrides: Mapping[str, object] | None = None,
) -> Processor:
    """The tokenizer and the image processor of a model, as far as there are any; both None for a model type.

    The arguments are those of `load_model`; if the overrides change the size of images, the image
    processor is left out. A file that cannot be read is reported in the log, and is as if it were
    not there.

    Examples:
        >>> load_processor("bert")
        Processor(source='bert', tokenizer=None, image_size=None)
    """
    return processor_of(Source(source, True, overrides or {}, revision, trust_remote_code))


def processor_of(source: Source) -> Processor:
    """As `load_processor`."""
    if not source.has_files:
        return Processor(source.name)
    resized = any(key.rpartition(".")[2] == "image_size" for key in source.overrides)
    tokenizer = _read(source, "tokenizer", _tokenizer)
    return Processor(
        source.name, tokenizer, None if resized else _read(source, "image processor", _image_size)
    )


def _read(source: Source, what: str, read: Callable[[Source], Any]) -> Any:
    """What a function reads of the files of a model; None, and a warning, where they cannot be read."""
    try:
        return read(source)
    except Exception as error:
        # transformers raises dozens of kinds, and so does the code of a model
        text = "%s: the %s cannot be read (%s); example inputs are from the config"
        _log.warning(text, source.name, what, described(error))
        return None


def _tokenizer(source: Source) -> Any:
    from transformers import AutoTokenizer

    has_one = any(source.file(name) for name in _TOKENIZER_FILES)
    return AutoTokenizer.from_pretrained(source.name, **source.options) if has_one else None


def _image_size(source: Source) -> tuple[int, int] | None:
    sizes = map(size_of_images, image_settings(source.file))
    return next((size for size in sizes if size is not None), None)


def image_settings(find: Callable[[str], str | Path | None]) -> Iterator[Mapping[str, Any]]:
    """The settings of image processors, by the function that finds a file by its name; None where there is none."""
    for name in _IMAGE_FILES:
        file = find(name)
        settings = None if file is None else read_json(file, plain=True)
        if isinstance(settings, Mapping):
            inner = settings.get("image_processor")
            yield inner if isinstance(inner, Mapping) else settings


def size_of_images(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of what an image processor makes of a square image; None if its settings do not say.

    The settings are read and not run: an image processor needs torchvision or PIL, and the size is
    all that is used.
    """
    size = settings.get("crop_size") if settings.get("do_center_crop") else None
    size = (
        size
        if size is not None
        else settings.get("size")
        if settings.get("do_resize", True)
        else None
    )
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        size = [size.get("height", edge), size.get("width", edge)]
    listed = list(size) if isinstance(size, (list, tuple)) else [size, size]
    sizes = [side for side in listed if type(side) is int and side > 0]
    return (sizes[0], sizes[1]) if len(sizes) == len(listed) == 2 else None
