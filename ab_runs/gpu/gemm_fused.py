"""The fused forms of the reported models on the GPU at hand: MLPs, and products with their norm. Records for the table.

    python ab_runs/gpu/gemm_fused.py --records SWEEP.jsonl [MLPS.jsonl] --out FILE.jsonl [--kinds mlp,normed] [--seconds 200]

--records: what is known of the products (and MLPs), so that a fused form is measured against the best of its parts. What is
measured, and how: ``overlay/tune/mlp.py`` and ``behind_norm.py``. Writes FILE.jsonl and FILE.machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ab_runs.gpu.gemm_table import without_programmatic_launch
from overlay.tune import behind_norm, measure, mlp, search
from patches._lib.gemm import table

# hidden, inner, and the rows of the attention's weight where a patch fuses it with its norm
MODELS = {"0.6B": (1024, 3072, 4096), "4B": (2560, 9728, 6144), "8B": (4096, 12288, 6144), "llama-8B": (4096, 14336, 0),
          "27B": (5120, 17408, 0), "32B": (5120, 25600, 10240)}  # fmt: skip


def cells_of(models: list[str], rows: list[int], kinds: list[str]) -> list[tuple[Any, ...]]:
    sizes = [MODELS[name] for name in models]
    found: list[tuple[Any, ...]] = []
    if "mlp" in kinds:
        found += [("mlp", "bfloat16", m, hidden, inner) for m in rows for hidden, inner, _ in sizes]
    if "normed" in kinds:
        for m in (m for m in rows if m <= table.NORMED_ROWS):
            for hidden, inner, attention in (size for size in sizes if size[2]):
                found += [("normed", "bfloat16", m, attention, hidden), ("normed_mlp", "bfloat16", m, hidden, inner)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--kinds", default="mlp,normed")
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    began = time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    cells = cells_of(args.models.split(","), [int(m) for m in args.rows.split(",")], args.kinds.split(","))
    read = [record for path in args.records for record in search.read_log(path)]
    known = [record if record["cell"][0] in search.FUSED else without_programmatic_launch(record) for record in read]
    processes = os.cpu_count() or 1
    jobs = mlp.jobs([cell for cell in cells if cell[0] == "mlp"])  # type: ignore[misc]
    normed_jobs = behind_norm.jobs([cell for cell in cells if cell[0] != "mlp"])
    measure.precompile(jobs, processes)
    measure.in_processes(behind_norm.compile_job, normed_jobs, processes)
    print(f"{len(jobs) + len(normed_jobs)} kernels compiled after {time.monotonic() - began:.0f} s", flush=True)
    copy = measure.copy_bandwidth()
    machine = measure.versions() | {"copy_gbs": round(copy), "date": time.strftime("%Y-%m-%d")}
    args.out.with_suffix(".machine").write_text(json.dumps(machine, indent=1))
    with args.out.open("w") as log:
        for cell in cells:
            if time.monotonic() - began > args.seconds:
                print("time is over", flush=True)
                break
            if cell[0] == "mlp":
                record = mlp.measure_mlp(cell, search.products_of(cell, known), 0.02, copy)  # type: ignore[arg-type]
            else:
                record = behind_norm.measure_normed(cell, known, copy)
            known.append(record)
            log.write(json.dumps(record) + "\n")
            log.flush()
            print(f"{time.monotonic() - began:.0f} s {search.describe(record)}", flush=True)


if __name__ == "__main__":
    main()
