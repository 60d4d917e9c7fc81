"""What tests share: putting a patch into force in this process, and the folders of the test environments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overlay.apply import Application, apply_entry
from overlay.catalog import load_catalog

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("OVERLAY_CACHE", Path.home() / ".cache" / "vllm-overlay"))


def installed_public_version() -> str:
    """The public version of the installed vLLM, whatever its distribution is called."""
    import vllm

    return vllm.__version__.partition("+")[0]


@contextmanager
def applied(
    patch_id: str, *, version: str | None = None, accept_drift: bool = False, folders: tuple[Path, ...] = (), **options: Any
) -> Iterator[Application]:
    """Apply a patch of the catalogue by its real specification and take it back at the end.

    version: the release whose targets count (default: the installed vLLM's).
    """
    entry = load_catalog(folders)[patch_id]
    application = apply_entry(entry, version or installed_public_version(), options, accept_drift)
    try:
        yield application
    finally:
        application.rollback()
