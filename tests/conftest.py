"""What several tests need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``tokenizer.json`` of a token for each word or run of marks; words of more than two
    letters are one and the same."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["?", *letters, *(a + b for a in letters for b in letters)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real traces and reference runs; tests that need it are skipped where it is absent.

    ``KVPLAN_DATA`` names it; without that, the folder ``shared`` beside the repository.
    """
    default = Path(__file__).resolve().parent.parent.parent / "shared"
    folder = Path(os.environ.get("KVPLAN_DATA", default))
    if not (folder / "traces").is_dir():
        pytest.skip(f"no data at {folder}: set KVPLAN_DATA")
    return folder
