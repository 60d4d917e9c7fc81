"""One checkout for all tests: its root is importable, and nothing of an outer launch leaks in."""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
for name in [name for name in os.environ if name.startswith("OVERLAY_") and name != "OVERLAY_CACHE"]:
    del os.environ[name]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
