"""Arms the hooks of a process from the orders in its environment, at the first import that they care about."""

from __future__ import annotations

import atexit
import base64
import json
import os
import sys
import zlib
from collections.abc import Iterable
from typing import Any


def pack(orders: dict[str, Any], points: Iterable[str] = ()) -> str:
    """Orders as the value of ``OVERLAY_PLAN``: the module names to watch, in clear, then everything. They travel in the
    environment, also to hosts that do not have our files.

    points: ``module:qualname`` of the overlay's own hook points.
    """
    watched = {at.partition(":")[0] for at in points}
    for patch in orders["patches"]:
        watched |= {at.partition(":")[0] for at in [*patch["targets"], *patch["assumes"], patch["after_call"]] if at}
    packed = base64.b64encode(zlib.compress(json.dumps(orders, sort_keys=True).encode(), 9)).decode()
    return f"{','.join(sorted(watched))};{packed}"


def unpack(value: str) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(value.rpartition(";")[2], validate=True)))


def arm(value: str) -> Any:
    """Install the import hooks for the orders in ``value`` and return their finder. Called once."""
    from overlay import hooks, vllm_hooks

    if os.environ.get("OVERLAY_DISTRIBUTION"):
        import overlay.bootstrap.carry  # noqa: F401 - answers for the name vllm, also in programs that are not the server
    orders = unpack(value)
    folder: str | None = os.environ.get("OVERLAY_RUN_DIR") or None
    if folder is not None:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            folder = None  # another host without that path: receipts go over the engine's RPC
    hooks.ARMED = hooks.Hooks(orders, folder)
    vllm_hooks.install(hooks.ARMED)
    hooks.ARMED.arm()
    atexit.register(_exit_code, folder)
    return hooks.ARMED.finder


def _exit_code(folder: str | None) -> None:
    """The main process of a refused run ends with 78, whatever vLLM made of the exception."""
    if folder is None or "multiprocessing.spawn" in sys.modules and _is_child():
        return
    try:
        refused = [name for name in os.listdir(folder) if name.startswith("refusal-")]
    except OSError:
        return
    if not refused:
        return
    for name in sorted(refused):
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError):
            continue
        print(f"overlay: refused in process {content['pid']} ({content['role']}): {content['reason']}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(78)


def _is_child() -> bool:
    from multiprocessing import parent_process

    return parent_process() is not None
