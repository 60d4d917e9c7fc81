"""What tests share: putting a patch into force in this process, and the folders of the test environments."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overlay.apply import Application
from overlay.catalog import load_catalog
from overlay.spec import Target

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("OVERLAY_CACHE", Path.home() / ".cache" / "vllm-overlay"))


def installed_public_version() -> str:
    """The public version of the installed vLLM, whatever its distribution is called."""
    import vllm

    return vllm.__version__.partition("+")[0]


def present(targets: tuple[Target, ...], version: str) -> tuple[Target, ...]:
    from overlay.versions import in_range

    return tuple(t for t in targets if not t.versions or in_range(version, t.versions))


@contextmanager
def applied(
    patch_id: str, *, version: str | None = None, accept_drift: bool = False, folders: tuple[Path, ...] = (), **options: Any
) -> Iterator[Application]:
    """Apply a patch of the catalogue by its real specification and take it back at the end.

    version: the release whose targets count (default: the installed vLLM's).
    """
    entry = load_catalog(folders)[patch_id]
    version = version or installed_public_version()
    targets, assumes = present(entry.patch.targets, version), present(entry.patch.assumes, version)
    for target in (*targets, *assumes):
        importlib.import_module(target.module)
    application = Application(entry.patch, sys.modules[entry.module], targets, assumes, options, accept_drift)
    application.apply()
    try:
        yield application
    finally:
        application.rollback()
