"""``python -m overlay tune``: measure a model's matrix products on this device and write a table of the winners.

    python -m overlay tune MODEL [--tensor-parallel-size N] [--rows 1,2,4,8,16] [--dtype bfloat16] [--out FOLDER]
    python -m overlay tune --shapes 4096x1024,1024x2048

MODEL is a folder with a config.json, or a name whose configuration is in the local Hugging Face cache. The table goes to
FOLDER/<device>.json, the records of everything that was measured to FOLDER/<device>.jsonl; started again, it goes on where
it stopped. To serve with the table: ``patches: {gemm-tiles: {tables: FOLDER}}``.

Importing this package imports neither torch nor Triton.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from overlay.tune.search import FUSED
from patches._lib.gemm import table
from patches._lib.gemm.shapes import gated_mlps, normed, products


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m overlay tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="folder with a config.json, or a name in the local Hugging Face cache")
    parser.add_argument("--shapes", help="products in place of a model's: NxK,NxK (weight rows x columns of one rank)")
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rows", default="1,2,4,8,16", help="numbers of rows: batch sizes, and batch x (1 + drafts)")
    parser.add_argument("--dtype", default="bfloat16", choices=table.DTYPES)
    parser.add_argument("--out", type=Path, default=Path("gemm_tables"), help="folder of the table (default: %(default)s)")
    parser.add_argument("--margin", type=float, default=0.02, help="least gain to keep an entry (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30, help="stop after this long; what was measured is kept")
    parser.add_argument("--processes", type=int, default=8, help="processes that compile kernels (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the products and stop")
    return parser


def cells_of(args: argparse.Namespace) -> list[tuple[Any, ...]]:
    """What to measure: products, (dtype, rows, n, k); of a model on one rank its gated MLP, ("mlp", dtype, rows, hidden,
    inner); of models whose layers have a patch for it both with their norm (see ``behind_norm``). Raises ValueError with
    what is wrong.
    """
    rows = _numbers(args.rows, "--rows")
    if bad := [m for m in rows if not 1 <= m <= table.MAX_ROWS]:
        raise ValueError(f"--rows: {bad[0]} is not between 1 and {table.MAX_ROWS}")
    mlps: list[tuple[int, int]] = []
    behind_norms: list[tuple[str, int, int]] = []
    if args.shapes:
        shapes = []
        for part in args.shapes.split(","):
            if not (match := re.fullmatch(r"\s*(\d+)x(\d+)\s*", part)):
                raise ValueError(f"--shapes: {part!r} is not NxK")
            shapes.append((int(match[1]), int(match[2])))
    elif args.model:
        config = read_config(args.model)
        found = products(config, args.tensor_parallel_size)
        shapes = [(product.n, product.k) for product in found]
        if args.tensor_parallel_size == 1:
            mlps, behind_norms = gated_mlps(config), normed(config)
    else:
        raise ValueError("give a MODEL or --shapes")
    cells: list[tuple[Any, ...]] = [(args.dtype, m, n, k) for m in rows for n, k in dict.fromkeys(shapes)]
    cells += [("mlp", args.dtype, m, hidden, inner) for m in rows for hidden, inner in mlps]
    return cells + [(kind, args.dtype, m, a, b) for m in rows if m <= table.NORMED_ROWS for kind, a, b in behind_norms]


def read_config(model: str) -> dict[str, Any]:
    """A model's config.json, from a folder or from the local Hugging Face cache; nothing is downloaded."""
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
        if not isinstance(cached, str):
            raise ValueError(f"{model}: no config.json there, and none in the local Hugging Face cache; give --shapes NxK,NxK")
        path = Path(cached)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _numbers(text: str, option: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not a list of whole numbers") from None


def main(argv: list[str]) -> int:
    args = arguments().parse_args(argv)
    try:
        cells = cells_of(args)
    except ValueError as error:
        print(f"overlay tune: {error}", file=sys.stderr)
        return 2
    if args.list:
        for cell in cells:
            print("{1} {2} x {0} {3}, {4}".format(*cell) if cell[0] in FUSED else "{} {} x {} x {}".format(*cell))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("overlay tune: this Python's torch sees no GPU; run it where the server runs", file=sys.stderr)
        return 2
    return tune(args, cells)


def tune(args: argparse.Namespace, cells: list[tuple[Any, ...]]) -> int:
    """Measure, and write the table after the last product or when the time is over."""
    from overlay.tune import measure, search
    from overlay.tune.candidates import candidates

    machine = measure.versions()
    name = re.sub(r"[^a-z0-9]+", "_", str(machine["name"]).lower()).strip("_")
    log, target = args.out / f"{name}.jsonl", args.out / f"{name}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    _same_machine(log, machine)
    known = {record["cell"] for record in search.read_log(log)}
    left = [cell for cell in cells if cell not in known]
    print(f"{len(cells)} cells on {machine['name']}, {len(cells) - len(left)} of them known from {log}", flush=True)
    if left:
        from overlay.tune import behind_norm, mlp

        jobs: dict[Any, Any] = {}
        alone = [cell for cell in left if cell[0] not in FUSED]
        for dtype, m, n, k in alone:
            for tile in candidates(m, n, k, int(machine["sms"])):
                jobs[tile, m if tile.kernel == "rows" else 0, n % tile.bn == 0, k % tile.span == 0] = (tile, dtype, m, n, k)
        start = time.monotonic()
        gated = mlp.jobs([cell for cell in left if cell[0] == "mlp"], int(machine["sms"]))  # type: ignore[misc]
        normed_jobs = behind_norm.jobs([cell for cell in left if FUSED.get(cell[0]) == 2])
        measure.precompile([*jobs.values(), *gated], args.processes)
        measure.in_processes(behind_norm.compile_job, normed_jobs, args.processes)
        print(f"{len(jobs) + len(gated) + len(normed_jobs)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
        machine |= {"copy_gbs": round(measure.copy_bandwidth()), "date": time.strftime("%Y-%m-%d")}
        bench = measure.Bench(args.dtype, max((n * k for *_, n, k in alone), default=1))
        seconds = args.minutes * 60 - (time.monotonic() - start)
        search.search(bench, left, log, copy_gbs=machine["copy_gbs"], margin=args.margin, seconds=seconds,
                      say=lambda text: print(text, flush=True))  # fmt: skip
        (log.with_suffix(".machine")).write_text(json.dumps(machine, indent=1), encoding="utf-8")
    machine = json.loads(log.with_suffix(".machine").read_text(encoding="utf-8"))
    found = search.to_table(search.read_log(log), machine, margin=args.margin, note="python -m overlay tune")
    table.save(found, target)
    print(
        f"{target}: {len(found.entries)} products and {len(found.mlps)} MLPs faster than the platform's own by more than "
        f"{args.margin:.0%}, {len(found.normed) + len(found.normed_mlps)} of them faster with their norm"
    )
    return 0


def _same_machine(log: Path, machine: dict[str, Any]) -> None:
    """Records of another Triton or chip must not be mixed with new ones: they are put aside under another name."""
    path = log.with_suffix(".machine")
    if not path.is_file():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    if any(before.get(name) != machine[name] for name in ("arch", "name", "sms", "triton")):
        for old in (log, path):
            if old.exists():
                old.replace(old.with_name(f"{old.name}.{before.get('triton')}"))
        print(f"{log}: was measured with another chip or Triton ({before.get('name')}, {before.get('triton')}); put aside")
