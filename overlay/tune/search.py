"""The search for the best tile of each product, resumable, one line of JSON a product.

A product is measured in three steps: every candidate once in the raw regime; the best few in the spaced regime too; the
winner and the platform's own call in turns, in both regimes, with a check against
float64. It is kept only where it is beyond the margin in both and its slowest repeat beats the original's fastest.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from overlay.tune.candidates import candidates
from patches._lib.gemm.table import Entry, Mlp, Normed, Table, Tile

Cell = tuple[str, int, int, int]  # dtype, m, n, k
MlpCell = tuple[str, str, int, int, int]  # "mlp", dtype, m, hidden, inner
FUSED = {"mlp": 1, "normed": 2, "normed_mlp": 2}  # first word of other cells -> when they can be measured
ERROR_LIMIT = 1e-2  # relative; bf16 rounding of the result alone gives about 2e-3


def limit_us(m: int, n: int, k: int, copy_gbs: float) -> float:
    """Every operand moved once at the copy bandwidth; 2 bytes an element."""
    return (n * k + m * k + m * n) * 2 / copy_gbs / 1e3


def measure_cell(bench: Any, cell: Cell, margin: float, copy_gbs: float, best: int = 3, pdl: bool = False) -> dict[str, Any]:
    """One product measured: what was tried, the winner, whether it is kept and, if not, why.

    pdl: try the finalists with programmatic dependent launch, too. Off: on an H200 it measured faster here and slower in a
    chain with other kernels and in service.
    """
    from overlay.tune.measure import original, with_tile

    _, m, n, k = cell
    before = min(bench.time(original, m, n, k, repeats=2))
    tried: list[tuple[float, Tile]] = []
    failed = []
    for tile in candidates(m, n, k, bench.processors):
        try:
            tried.append((min(bench.time(with_tile(tile), m, n, k, repeats=2)), tile))
        except Exception as error:  # noqa: BLE001 - a tile this chip cannot run is a result, too
            failed.append((str(tile), f"{type(error).__name__}: {str(error)[:120]}"))
    record: dict[str, Any] = {"cell": cell, "original_us": before, "limit_us": limit_us(m, n, k, copy_gbs), "failed": failed}
    if not tried:
        return record | {"kept": False, "why": "no candidate ran"}
    tried.sort(key=lambda item: item[0])
    record["tried"] = [(round(us, 3), asdict(tile)) for us, tile in tried[:8]]
    finalists = [tile for _, tile in tried[:best]]
    finalists += [replace(tile, pdl=True) for tile in finalists] if pdl else []
    small = min(bench.time(None, m, n, k, spaced=True))
    spaced = {tile: statistics.median(bench.time(with_tile(tile), m, n, k, spaced=True)) for tile in finalists}
    winner = min(spaced, key=spaced.__getitem__)
    record["finalists"] = [(round(us - small, 3), asdict(tile)) for tile, us in spaced.items()]
    ours: dict[bool, list[float]] = {False: [], True: []}
    theirs: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(2):
        for regime in (False, True):
            theirs[regime] += bench.time(original, m, n, k, spaced=regime)
            ours[regime] += bench.time(with_tile(winner), m, n, k, spaced=regime)
    error, original_error, same_bits = bench.check(winner, m, n, k)
    record |= {
        "winner": asdict(winner), "us": statistics.median(ours[False]), "original_us": statistics.median(theirs[False]),
        "spaced_us": statistics.median(ours[True]) - small, "original_spaced_us": statistics.median(theirs[True]) - small,
        "small_us": small, "error": error, "original_error": original_error,
    }  # fmt: skip
    why = ""
    if not same_bits:
        why = "two runs differ"
    elif not error <= min(ERROR_LIMIT, 2 * original_error + 1e-4):
        why = f"error {error:.2e} against the original's {original_error:.2e}"
    else:
        for regime, name in ((False, "raw"), (True, "spaced")):
            gain = 1 - statistics.median(ours[regime]) / statistics.median(theirs[regime])
            if gain < margin or max(ours[regime]) >= min(theirs[regime]):
                why = why or f"{name}: {gain:+.1%} is not beyond the margin of {margin:.0%}"
    return record | {"kept": not why, "why": why}


def search(
    bench: Any,
    cells: Iterable[Cell | MlpCell],
    log: Path,
    *,
    copy_gbs: float,
    margin: float,
    seconds: float,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure the cells that ``log`` does not hold yet, until ``seconds`` are over. Returns all records of the log.

    Products come first, then what is measured against the best of them: MLPs, and both with their norm.
    """
    records = read_log(log)
    done = {record["cell"] for record in records}
    cells = sorted((cell for cell in cells if cell not in done), key=lambda cell: FUSED.get(cell[0], 0))
    start = time.monotonic()
    with log.open("a", encoding="utf-8") as out:
        for number, cell in enumerate(cells, 1):
            if (spent := time.monotonic() - start) > seconds:
                say(f"time is over after {spent:.0f} s: {len(cells) - number + 1} cells not measured")
                break
            if cell[0] in ("normed", "normed_mlp"):
                from overlay.tune.behind_norm import measure_normed

                record = measure_normed(cell, records, copy_gbs)
            elif cell[0] == "mlp":
                from overlay.tune.mlp import measure_mlp

                record = measure_mlp(cell, products_of(cell, records), margin, copy_gbs)
            else:
                record = measure_cell(bench, cell, margin, copy_gbs)
            records.append(record)
            out.write(json.dumps(record) + "\n")
            out.flush()
            say(f"[{number}/{len(cells)} {spent:.0f}s] {describe(record)}")
    return records


def products_of(cell: MlpCell, records: Iterable[dict[str, Any]]) -> tuple[Tile | None, Tile | None]:
    """The tiles that an MLP's two products have by themselves; None where the platform's own stays."""
    _, dtype, rows, hidden, inner = cell
    known = {entry.key: entry.tile for entry in entries(records)}
    return known.get((dtype, rows, 2 * inner, hidden)), known.get((dtype, rows, hidden, inner))


def describe(record: dict[str, Any]) -> str:
    if record["cell"][0] == "mlp":
        _, dtype, m, hidden, inner = record["cell"]
        forms = ", ".join(f"{name} {us:.2f}" for name, us in record.get("forms_us", {}).items())
        text = f"{dtype} {m} x MLP {hidden}, {inner}: us {forms}; limit {record['limit_us']:.2f}"
        return text + ("" if record["kept"] else f"; left out: {record['why']}")
    if record["cell"][0] in FUSED:
        kind, dtype, m, a, b = record["cell"]
        figures = f"apart {record.get('apart_us', 0):.2f} us, with the norm {record.get('us', 0):.2f}"
        text = f"{dtype} {m} x {kind} {a}, {b}: {figures}"
        return text + ("" if record["kept"] else f"; left out: {record['why']}")
    dtype, m, n, k = record["cell"]
    text = f"{dtype} {m} x {n} x {k}: original {record['original_us']:.2f} us, limit {record['limit_us']:.2f}"
    if "us" in record:
        text += f", best {record['us']:.2f} ({short(Tile(**record['winner']))})"
        text += f"; spaced {record['original_spaced_us']:.2f} -> {record['spaced_us']:.2f}"
    return text + ("" if record["kept"] else f"; left out: {record['why']}")


def short(tile: Tile) -> str:
    text = f"{tile.kernel} {tile.bn}x{tile.bk} w{tile.warps} s{tile.stages}"
    text += f" split{tile.split}" if tile.split > 1 else ""
    return text + (" narrow" if tile.narrow else "") + (" pdl" if tile.pdl else "")


def read_log(log: Path) -> list[dict[str, Any]]:
    """Records of an earlier search; a last line cut off in the middle is dropped."""
    records = []
    if log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            record["cell"] = tuple(record["cell"])
            records.append(record)
    return records


def entries(records: Iterable[dict[str, Any]]) -> list[Entry]:
    """The table's entries: the records that were kept."""
    return [
        Entry(
            *record["cell"], tile=Tile(**record["winner"]), us=round(record["us"], 2),
            original_us=round(record["original_us"], 2), limit_us=round(record["limit_us"], 2),
            error=float(f"{record['error']:.2e}"),
        )
        for record in records
        if record["kept"] and record["cell"][0] not in FUSED
    ]  # fmt: skip


def mlps(records: Iterable[dict[str, Any]]) -> list[Mlp]:
    """The table's MLPs: the records of such that were kept."""
    return [
        Mlp(
            *record["cell"][1:], first=Tile(**record["first"]), second=Tile(**record["second"]) if record["second"] else None,
            **{name: round(record[name], 2) for name in ("us", "tiles_us", "original_us", "limit_us")},
            error=float(f"{record['error']:.2e}"),
        )
        for record in records
        if record["kept"] and record["cell"][0] == "mlp"
    ]  # fmt: skip


def normed(records: Iterable[dict[str, Any]]) -> list[Normed]:
    """The table's products and MLPs with their norm: the records of such that were kept."""
    found = []
    for record in records:
        if not record["kept"] or record["cell"][0] not in ("normed", "normed_mlp"):
            continue
        kind, dtype, rows, a, b = record["cell"]
        gated = kind == "normed_mlp"
        n, k = (2 * b, a) if gated else (a, b)
        tiles = {"tile": Tile(**record["tile"]), "second": Tile(**record["second"]) if record["second"] else None}
        figures = {name: round(record[name], 2) for name in ("us", "apart_us", "limit_us")}
        found.append(Normed(dtype, rows, n, k, gated, **tiles, **figures, error=float(f"{record['error']:.2e}")))
    return found


def to_table(records: Iterable[dict[str, Any]], machine: dict[str, Any], *, margin: float, note: str) -> Table:
    """The table of what was kept. machine: what ``measure.versions`` says, with ``copy_gbs`` and ``date``."""
    records = list(records)
    found = {entry.key: entry for entry in entries(records)}
    gated = {mlp.key: mlp for mlp in mlps(records)}
    with_norm = normed(records)
    head = {name: machine[name] for name in ("arch", "sms", "triton", "torch", "driver", "date", "copy_gbs")}
    return Table(
        path="", devices=(machine["name"],), margin=margin, note=note, entries=found, mlps=gated,
        normed={entry.key: entry for entry in with_norm if not entry.gated},
        normed_mlps={entry.key: entry for entry in with_norm if entry.gated}, **head,
    )  # fmt: skip
