"""The V2 runner's decode patches on a GPU, against the same engine without them.

    python ab_runs/gpu/v2_decode.py --models DIR --out FILE [--plan qwen3-0.6b:plain qwen3-0.6b:default ...]

``plain``: no inductor, full decode graphs of 1, 2, 4, 8 and 16. ``default``: vLLM's defaults. Per batch size: TPOT of both
arms in turns with equal token ids, kernel launches and copies a step outside the graph, busy and idle time of the device,
host time a step by function and thread, and which graphs are dispatched: with the stock arm's profile it shows where the
time between batch 1 and batch 8 goes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ab_runs.gpu.common import main  # noqa: E402

PATCHES = ["sampler-staged-writes", "decode-input-prep-v2", "greedy-tail", "decision-cache", "running-slots"]
PATCHES += ["decode-tail-graph", "flash-schedule-graph", "attention-metadata-reuse"]

if __name__ == "__main__":
    sys.exit(main(__doc__, "V2", PATCHES))
