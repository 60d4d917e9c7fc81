"""Sweep of the GEMM tiles over the reported models' shapes on the GPU at hand: correctness, search, raw records.

    python ab_runs/gpu/gemm_sweep.py --out DIR --seconds 200

Writes DIR/sweep.jsonl (a line a product, as it goes), DIR/check.json (errors of every kernel on awkward shapes) and
DIR/machine.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

NOTE = "ab_runs/gpu/gemm_sweep.py: graph replay, weights from memory; see ab_runs/results/gemm for all records"
AWKWARD = [(1, 37, 200), (2, 16, 256), (3, 100, 1000), (4, 33, 3072), (5, 130, 300), (7, 96, 5120), (8, 70, 999), (11, 200, 64),
           (13, 1024, 2048), (16, 4097, 1040)]  # fmt: skip


def check_awkward() -> list[dict]:
    """Every kernel on sizes that fit no block, both dtypes, with bias, strided x and w: error against float64."""
    import torch

    from patches._lib.gemm import kernels
    from patches._lib.gemm.table import Tile

    tiles = [
        Tile("rows", 4, 256, 1), Tile("rows", 8, 512, 2, 3), Tile("rows", 2, 512, 2, 1, split=3),
        Tile("rows", 4, 1024, 4, pdl=True),
        Tile("lanes", 8, 64, 4, 4, slices=4), Tile("lanes", 16, 64, 4, 3, 2, slices=4),
        Tile("lanes", 8, 64, 8, 3, slices=8, pdl=True),
        Tile("tiles", 64, 128, 4, 4), Tile("tiles", 64, 64, 4, 6, narrow=True), Tile("tiles", 32, 128, 4, 4, split=4),
        Tile("tiles", 128, 128, 8, 3, pdl=True),
    ]  # fmt: skip
    generator = torch.Generator(device="cuda").manual_seed(7)
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for m, n, k in AWKWARD:
            pad = 24
            x = torch.randn(m, k + pad, generator=generator, device="cuda").to(dtype)[:, :k]
            w = (torch.randn(n, k + pad, generator=generator, device="cuda") * 0.05).to(dtype)[:, :k]
            bias = torch.randn(n, generator=generator, device="cuda").to(dtype)
            reference = x.double() @ w.double().T + bias.double()
            theirs = (torch.nn.functional.linear(x, w, bias).double() - reference).norm() / reference.norm()
            for tile in tiles:
                if tile.problem(m):
                    continue
                ys = []
                for _ in range(3):
                    y = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
                    ys.append(kernels.run(tile, x, w, bias, out=y))
                error = ((ys[0].double() - reference).norm() / reference.norm()).item()
                found.append(
                    {
                        "dtype": str(dtype),
                        "m": m,
                        "n": n,
                        "k": k,
                        "tile": str(tile),
                        "error": error,
                        "original": theirs.item(),
                        "same_bits": torch.equal(ys[0], ys[1]) and torch.equal(ys[0], ys[2]),
                    }  # fmt: skip
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--rows", default="1,2,4,8,16,5,10")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--awkward", action="store_true", help="check every kernel on awkward sizes first (compiles for 90 s)")
    parser.add_argument("--known", type=Path, help="records of an earlier sweep: those products are not measured again")
    parser.add_argument("--processes", type=int, default=min(15, os.cpu_count() or 1))
    args = parser.parse_args()
    started = time.monotonic()
    from ab_runs.gpu.gemm_shapes import shapes
    from overlay.tune import measure, search
    from overlay.tune.candidates import candidates
    from patches._lib.gemm import table

    args.out.mkdir(parents=True, exist_ok=True)
    rows = [int(m) for m in args.rows.split(",")]
    cells = [(args.dtype, m, n, k) for m in rows for n, k in shapes()]
    from dataclasses import replace

    if args.known:
        (args.out / "sweep.jsonl").write_text(args.known.read_text())
    done = {record["cell"] for record in search.read_log(args.out / "sweep.jsonl")}
    jobs = {}
    for cell in cells:
        if cell in done:
            continue
        dtype, m, n, k = cell
        for tile in candidates(m, n, k):
            for variant in (tile, replace(tile, pdl=True)):
                jobs[variant, m if tile.kernel == "rows" else 0, n % tile.bn == 0, k % tile.span == 0] = (
                    variant,
                    dtype,
                    m,
                    n,
                    k,
                )
    measure.precompile(list(jobs.values()), args.processes)
    print(f"{len(jobs)} kernels compiled after {time.monotonic() - started:.0f} s", flush=True)
    awkward = check_awkward() if args.awkward else []
    (args.out / "check.json").write_text(json.dumps(awkward, indent=0))
    bad = [c for c in awkward if not (c["error"] <= 2 * c["original"] + 1e-4) or not c["same_bits"]]
    print(f"{len(awkward)} awkward products checked, {len(bad)} wrong", *bad[:5], sep="\n", flush=True)
    copy = measure.copy_bandwidth()
    machine = measure.versions() | {"copy_gbs": round(copy), "date": time.strftime("%Y-%m-%d")}
    (args.out / "machine.json").write_text(json.dumps(machine, indent=1))
    print(machine, f"after {time.monotonic() - started:.0f} s", flush=True)
    bench = measure.Bench(args.dtype, max(n * k for n, k in shapes()))
    left = args.seconds - (time.monotonic() - started)
    records = search.search(
        bench,
        cells,
        args.out / "sweep.jsonl",
        copy_gbs=copy,
        margin=0.02,
        seconds=left,
        say=lambda s: print(s, flush=True),
    )
    found = search.to_table(records, machine, margin=0.02, note=NOTE)
    table.save(found, args.out / "tables" / "nvidia_h200.json")
    print(f"{len(found.entries)} of {len(records)} products kept", flush=True)


if __name__ == "__main__":
    main()
