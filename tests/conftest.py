"""What several tests need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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
