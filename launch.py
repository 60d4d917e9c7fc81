#!/usr/bin/env python3
"""``python launch.py MODEL [vllm serve flags] [--overlay-...]``: vLLM's server, with patches that are proven to fit.

See README.md. The work is in ``overlay.launcher``; this file only makes the checkout importable for this one process.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry not in ("", root)]
    sys.path.append(root)  # last: its folder names are common words
    import overlay

    if str(Path(overlay.__file__).parent.parent) != root:
        sys.exit(f"launch.py: the package 'overlay' in {overlay.__file__} hides the one in {root}: rename or remove it")
    from overlay.launcher import main

    sys.exit(main(sys.argv[1:]))
