"""The shipped table from the records of sweeps: products and MLPs.

    python ab_runs/gpu/gemm_table.py MACHINE.json TABLE.json PAGE.md RECORDS.jsonl [RECORDS.jsonl ...]

PAGE.md: the bf16 products of whole models as a page to read, and the fused forms.

Products are taken without programmatic launch, which measured slower in service. A sweep that also tried it holds, per
product, the best tiles' raw times without it (``tried``) and their times after a small kernel (``finalists``). An entry
is kept where such a tile is beyond the margin in both.
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
    """A product's record as if the launch had not been tried; one that did not try it as it is."""
    if not any(tile["pdl"] for _, tile in record.get("finalists", [])):
        return record
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


def fused_page(records: list[dict[str, Any]]) -> str:
    """All MLPs: the platform's, by the table's products, and fused; and what was measured with its norm."""
    from ab_runs.gpu.gemm_fused import MODELS

    names = {sizes[:2]: name for name, sizes in MODELS.items()}
    lines = [
        "",
        "## MLPs",
        "",
        "Gate/up product, activation and down product behind a small kernel whose time is taken off (overlay/tune/mlp.py).",
        "Gated: the activation inside the first product's kernel. Chained: besides, the second product starts early.",
        "",
        "| rows | model | hidden, inner | cuBLAS | tiles | gated | chained | limit | of the limit | kept |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        kind, dtype, rows, hidden, inner = record["cell"]
        if dtype != "bfloat16" or kind != "mlp":
            continue
        forms = record["forms_us"]
        us = [f"{forms[name]:.2f}" for name in ("original", "tiles", "gated", "chained")]
        best = min(forms["gated"], forms["chained"])
        kept = record["winner"] if record["kept"] else record["why"]
        row = (rows, names.get((hidden, inner), "-"), f"{hidden}, {inner}", *us, f"{record['limit_us']:.2f}",
               f"{record['limit_us'] / best:.0%}", kept)  # fmt: skip
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += [
        "",
        "## With the norm",
        "",
        "What stands behind a layer's norms, norm included: apart (a kernel for sum and norm, then the fastest of the above)",
        "and with the norm inside the product (overlay/tune/behind_norm.py).",
        "",
        "| rows | what | apart | with the norm | gain | limit | kept |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        kind, dtype, rows, a, b = record["cell"]
        if kind == "mlp" or dtype != "bfloat16":
            continue
        what = f"{a} x {b}" if kind == "normed" else f"MLP {a}, {b}"
        figures = (f"{record['apart_us']:.2f}", f"{record['us']:.2f}", f"{record['apart_us'] / record['us']:.2f}x")
        row = (rows, what, *figures, f"{record['limit_us']:.2f}", "yes" if record["kept"] else record["why"])
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    machine, target, readable = (Path(argument) for argument in sys.argv[1:4])
    records = [record for path in sys.argv[4:] for record in search.read_log(Path(path))]
    fused = [record for record in records if record["cell"][0] in search.FUSED]
    products = [without_programmatic_launch(record) for record in records if record["cell"][0] not in search.FUSED]
    head = json.loads(machine.read_text())
    made = search.to_table([*products, *fused], head, margin=MARGIN, note=NOTE)
    table.save(made, target)
    kept = len(made.mlps) + len(made.normed) + len(made.normed_mlps)
    print(f"{len(made.entries)} of {len(products)} products and {kept} of {len(fused)} fused forms kept")
    readable.write_text(page([record for record in products if record["cell"][0] == "bfloat16"], head) + fused_page(fused))
    for record in (*products, *fused):
        if not record["kept"]:
            print(search.describe(record))


if __name__ == "__main__":
    main()
