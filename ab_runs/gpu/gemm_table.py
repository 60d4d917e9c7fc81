"""The shipped table of a sweep: its records without programmatic launch, which measured slower in service.

    python ab_runs/gpu/gemm_table.py RECORDS.jsonl MACHINE.json TABLE.json [PAGE.md]

PAGE.md: all products by model as a page to read.

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


def page(records: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """All products by model: the platform's time, the shipped tile's, the bandwidth limit, and how much of it is reached."""
    from ab_runs.gpu.gemm_shapes import MODELS

    found = {record["cell"][1:]: record for record in records}
    versions = f"torch {machine['torch']}, Triton {machine['triton']}, driver {machine['driver']}, {machine['date']}"
    lines = [
        f"# Decode products on one {machine['name']}, bf16, microseconds",
        "",
        f"Graph replay, weights from memory, {versions}. Limit: every operand moved once at the measured copy",
        f"bandwidth, {machine['copy_gbs']} GB/s read plus written (reading alone is a little faster: figures above 100%).",
        "No tile: the platform's call was within 2% in one of the two regimes, and stays.",
    ]
    for model, shapes in MODELS.items():
        lines += [
            "",
            f"## {model}",
            "",
            "| rows | N x K | cuBLAS | tile | gain | limit | of the limit | tile's block |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for m in (1, 2, 4, 8, 16):
            for n, k in shapes:
                record = found[m, n, k]
                ours, gain, block = "-", "-", record["why"]
                if record["kept"]:
                    ours, gain = f"{record['us']:.2f}", f"{record['original_us'] / record['us']:.2f}x"
                    block = search.short(search.Tile(**record["winner"]))
                reached = record["limit_us"] / (record["us"] if record["kept"] else record["original_us"])
                row = (
                    m,
                    f"{n} x {k}",
                    f"{record['original_us']:.2f}",
                    ours,
                    gain,
                    f"{record['limit_us']:.2f}",
                    f"{reached:.0%}",
                    block,
                )
                lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    records, machine, target = (Path(argument) for argument in sys.argv[1:4])
    found = [without_programmatic_launch(record) for record in search.read_log(records)]
    made = search.to_table(found, json.loads(machine.read_text()), margin=MARGIN, note=NOTE)
    table.save(made, target)
    print(f"{len(made.entries)} of {len(found)} products kept")
    if len(sys.argv) > 4:
        Path(sys.argv[4]).write_text(page(found, json.loads(machine.read_text())))
    for record in found:
        if not record["kept"]:
            print(search.describe(record))


if __name__ == "__main__":
    main()
