"""The shipped table of a sweep: its records without programmatic launch, which measured slower in service.

    python ab_runs/gpu/gemm_table.py RECORDS.jsonl MACHINE.json TABLE.json

A sweep that also tried programmatic launch holds, per product, the best tiles' raw times without it (``tried``) and their
times after a small kernel (``finalists``). An entry is kept where such a tile is beyond the margin in both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from overlay.tune import search
from patches._lib.gemm import table

MARGIN = 0.02
NOTE = "ab_runs/gpu/gemm_sweep.py: graph replay, weights from memory; all records are in ab_runs/results/gemm"


def without_programmatic_launch(record: dict[str, Any]) -> dict[str, Any]:
    raw = {json.dumps(tile, sort_keys=True): us for us, tile in record.get("tried", [])}
    plain = [(us, tile) for us, tile in record.get("finalists", []) if not tile["pdl"]]
    if not plain:
        return record | {"kept": False, "why": "no finalist without programmatic launch"}
    spaced, tile = min(plain, key=lambda item: item[0])
    us, small = raw[json.dumps(tile, sort_keys=True)], record["small_us"]
    raw_gain = 1 - us / record["original_us"]
    spaced_gain = 1 - (spaced + small) / (record["original_spaced_us"] + small)
    checked = record["error"] <= min(search.ERROR_LIMIT, 2 * record["original_error"] + 1e-4)  # of the same arithmetic
    kept = checked and record["why"] != "two runs differ" and min(raw_gain, spaced_gain) >= MARGIN
    why = "" if kept else f"raw {raw_gain:+.1%}, spaced {spaced_gain:+.1%}"
    return record | {"winner": tile, "us": us, "spaced_us": spaced, "kept": kept, "why": why}


def main() -> None:
    records, machine, target = (Path(argument) for argument in sys.argv[1:4])
    found = [without_programmatic_launch(record) for record in search.read_log(records)]
    made = search.to_table(found, json.loads(machine.read_text()), margin=MARGIN, note=NOTE)
    table.save(made, target)
    print(f"{len(made.entries)} of {len(found)} products kept")
    for record in found:
        if not record["kept"]:
            print(search.describe(record))


if __name__ == "__main__":
    main()
