"""Where the files of a model are that a user names: in a local folder, or on the hub; a model type has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.configs import apply_overrides, nearest
from htp_export.capabilities.huggingface.packed.checkpoints import is_gguf
from htp_export.errors import ModelSourceError, described

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

        return not self._is_path and self.name not in CONFIG_MAPPING and ("/" in self.name or not self.random_weights)

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

        path: str | None = cached_file(self.name, name, _raise_exceptions_for_missing_entries=False, **self.download)
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
            raise ModelSourceError(self.name, f"its tokenizer and configs cannot be had: {error}") from error
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
        hint = "" if is_folder or "/" in self.name else nearest(self.name, CONFIG_MAPPING.keys(), "model types")
        if not self.has_files:
            if self.name not in CONFIG_MAPPING:
                problem = f"transformers has no such model type, and a hub id is owner/name{hint}"
                raise ModelSourceError(self.name, problem)
            if not self.random_weights:
                problem = "is a model type and has no weights; add --random-weights (random_weights=True), "
                raise ModelSourceError(self.name, problem + "or name a hub id (owner/name) or a folder")
        try:
            if is_gguf(self.name):
                from htp_export.capabilities.huggingface.packed.gguf_files import gguf_config

                config = gguf_config(folder)
            elif self.has_files:
                config = AutoConfig.from_pretrained(self.name, **self.options)
            else:
                config = AutoConfig.for_model(self.name)
        except Exception as error:  # transformers and its hub client raise dozens of kinds, some of them bare
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
