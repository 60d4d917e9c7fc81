"""The MLPs of the reported models, fused and apart, on the GPU at hand: records for the table and for the results.

    python ab_runs/gpu/gemm_mlp.py --sweep RECORDS.jsonl --out DIR [--models 4B,0.6B] [--rows 1,2,4,8] [--seconds 200]

--sweep: the records of the products that the shipped table was made from, so that an MLP is measured against its own products
by tiles. What is measured, and how: ``overlay/tune/mlp.py``. Writes DIR/mlp.jsonl and DIR/mlp.machine.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ab_runs.gpu.gemm_table import without_programmatic_launch
from overlay.tune import measure, mlp, search

MODELS = {"0.6B": (1024, 3072), "4B": (2560, 9728), "8B": (4096, 12288), "llama-8B": (4096, 14336), "27B": (5120, 17408),
          "32B": (5120, 25600)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    cells = [("mlp", "bfloat16", int(m), *MODELS[name]) for m in args.rows.split(",") for name in args.models.split(",")]
    products = [without_programmatic_launch(record) for record in search.read_log(args.sweep)]
    jobs = mlp.jobs(cells)
    measure.precompile(jobs, os.cpu_count() or 1)
    print(f"{len(jobs)} kernels compiled after {time.monotonic() - began:.0f} s", flush=True)
    copy = measure.copy_bandwidth()
    machine = measure.versions() | {"copy_gbs": round(copy), "date": time.strftime("%Y-%m-%d")}
    (args.out / "mlp.machine.json").write_text(json.dumps(machine, indent=1))
    with (args.out / "mlp.jsonl").open("w") as log:
        for cell in cells:
            if time.monotonic() - began > args.seconds:
                print("time is over", flush=True)
                break
            record = mlp.measure_mlp(cell, search.products_of(cell, products), 0.02, copy)
            log.write(json.dumps(record) + "\n")
            log.flush()
            print(f"{time.monotonic() - began:.0f} s {search.describe(record)}", flush=True)


if __name__ == "__main__":
    main()
