"""Run the checks of ``tests.v1.checks`` inside one vLLM release: ``python -m tests.v1.release_process RELEASE [ROOT]``.

Prints one line of JSON a check. ROOT holds the release's sources; without it the installed vLLM is the release.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import time
import traceback
from typing import Any


def checks() -> dict[str, Any]:
    """name -> check, over all modules of ``tests.v1.checks``."""
    import tests.v1.checks as package

    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"tests.v1.checks.{info.name}")
        found |= {f"{info.name}:{name[6:]}": value for name, value in vars(module).items() if name.startswith("check_")}
    return found


def main(release: str, root: str | None) -> None:
    from tests.v1 import lab

    lab.prepare(root, release)
    import torch

    torch.set_num_threads(1)
    for name, check in checks().items():
        began = time.time()
        line: dict[str, Any] = {"check": name}
        try:
            line["result"] = check(release)
        except Exception:
            line["failed"] = traceback.format_exc()
        line["seconds"] = round(time.time() - began, 2)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
