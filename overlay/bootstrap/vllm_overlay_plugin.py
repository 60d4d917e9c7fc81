"""The second way into a process: a ``vllm.general_plugins`` entry point, found through the dist-info beside it.

It comes too late to patch anything: it checks that the first way (``sitecustomize``) has run.
"""

import os
import sys


def register():
    """Called by vLLM's ``load_general_plugins``. Ends the process where a plan is set and no hook is armed: vLLM would
    log an exception and go on, unpatched.
    """
    if not os.environ.get("OVERLAY_PLAN"):
        return
    hooks = sys.modules.get("overlay.hooks")
    if hooks is not None and hooks.ARMED is not None:
        return
    print(
        f"overlay: process {os.getpid()} started without the bootstrap (a Python run with -E, -I or -S, or a PYTHONPATH "
        "that was replaced): nothing of the plan is in force here. Start Python without these flags and keep "
        "overlay/bootstrap on PYTHONPATH.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(78)
