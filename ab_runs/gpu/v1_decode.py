"""The V1 runner's decode patches on a GPU, against the same engine without them.

    python ab_runs/gpu/v1_decode.py --models DIR --out FILE [--plan qwen3-0.6b:plain ...] [--shadow]

As ``v2_decode.py``, on the V1 runner: TPOT of both arms in turns with equal token ids, kernel launches and copies a step
outside the graph, busy and idle time of the device, host time a step by function. ``--shadow``: the patched arm runs the
original input preparation behind the fast one and compares every integer (no timing then; see the counters). The input
preparation alone, at a long context, is ``v1_component.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ab_runs.gpu.common import main  # noqa: E402

PATCHES = ["block-table-dirty", "unchanged-copies", "greedy-native-dtype", "decode-input-prep", "flash-schedule-graph"]
EXACT_TOO = ("mrope-pinned-copy", "gdn-metadata-once", "min-tokens-mask-cache", "running-slots")

if __name__ == "__main__":
    sys.exit(main(__doc__, "V1", PATCHES, EXACT_TOO))
