"""Where the overlay keeps what it can make again: digests, options of a release, the receipts of runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache() -> Path:
    """The user's cache folder for the overlay; it need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-overlay"


def runs() -> Path:
    """The folder that holds a folder for each run."""
    return cache() / "runs"
