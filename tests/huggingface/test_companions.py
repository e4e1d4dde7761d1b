"""Tokenizers, preprocessors and configs are found in local folders and in the cache of the hub, and copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from htp_export.capabilities.huggingface.companions import copy_companions, source_folder
from htp_export.errors import FileError, ModelSourceError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with one model; there is no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, commit = tmp_path / "models--someone--tiny", "0123456789012345678901234567890123456789"
    snapshot = model / "snapshots" / commit
    for folder in (model / "refs", model / "blobs", snapshot):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja", "model.safetensors"):
        (model / "blobs" / name).write_text(name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    return snapshot


def test_files_in_the_cache_of_the_hub_are_links_and_are_copied(cache: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    folder = source_folder("someone/tiny")
    assert folder == cache
    copies = copy_companions(folder, target)
    assert [file.name for file in copies] == ["chat_template.jinja", "merges.txt", "tokenizer.json"]
    assert [file.is_symlink() for file in copies] == [False] * 3
    assert (target / "merges.txt").read_text() == "merges.txt"


def test_a_link_out_of_the_model_in_the_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "token.json").write_text("secret")
    (cache / "vocab.json").symlink_to(tmp_path / "token.json")
    with pytest.raises(FileError, match=r"vocab\.json: is a link out of its folder"):
        copy_companions(cache, tmp_path)


def test_a_model_that_cannot_be_had_says_so(cache: Path) -> None:
    with pytest.raises(ModelSourceError, match="its tokenizer and configs cannot be had"):
        source_folder("someone/other")


def test_local_folders_and_model_types_need_no_hub(tmp_path: Path) -> None:
    assert source_folder(str(tmp_path)) == tmp_path
    assert source_folder("llama") is None
